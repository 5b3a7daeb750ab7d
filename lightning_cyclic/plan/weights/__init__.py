"""The third axis: which weight version each forward and backward reads."""
