"""Guessing the weights that a backward will find."""
