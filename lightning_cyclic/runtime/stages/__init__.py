"""Finding the stages of an unmodified module."""
