"""Pictures of plans."""

from lightning_cyclic.viz.text import draw

__all__ = ["draw"]
