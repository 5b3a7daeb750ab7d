"""Pictures of plans."""

from lightning_cyclic.viz.picture import save_picture
from lightning_cyclic.viz.text import draw

__all__ = ["draw", "save_picture"]
