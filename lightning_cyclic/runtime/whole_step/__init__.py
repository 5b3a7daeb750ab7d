"""F and B of a worker that runs whole micro-batches."""
