"""LightningDataModules of the recipes: plain Lightning, they know nothing of lightning_cyclic."""
