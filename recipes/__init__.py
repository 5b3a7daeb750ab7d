"""Recipes: what conf/ names, and the programs that train and test it."""
