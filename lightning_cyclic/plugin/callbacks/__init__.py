"""Callbacks: where Lightning offers a callback hook but no strategy hook."""
