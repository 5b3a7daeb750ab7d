"""Run a training step one stage at a time: trees of values, batches cut up, regions, executor."""
