"""What is between Lightning and the runtime: hooks, checks, checkpoints, logging."""
