"""What a step keeps, and what keeping less of it takes."""
