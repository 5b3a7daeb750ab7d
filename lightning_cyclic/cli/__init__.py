"""The command line: draw, simulate, plan, and look at modules."""
