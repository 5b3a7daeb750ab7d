"""Values that user code passes around: containers, trees, and what JSON can hold."""
