"""Pictures of plans."""

from lightning_cyclic.viz.memory import Row, draw_memory, save_memory
from lightning_cyclic.viz.picture import save_picture
from lightning_cyclic.viz.text import draw

__all__ = ["Row", "draw", "draw_memory", "save_memory", "save_picture"]
