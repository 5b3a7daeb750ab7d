"""The first axis: in which slot each forward and backward runs."""
