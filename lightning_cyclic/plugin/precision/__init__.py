"""Precision plugins: what the bytes of weights, gradients and optimizer state are."""
