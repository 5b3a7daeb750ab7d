"""Plans and their programs: integers only, without torch."""

from lightning_cyclic.plan.lower import lower, make_plan
from lightning_cyclic.plan.plan import Plan
from lightning_cyclic.plan.presets import PRESETS, Preset

__all__ = ["PRESETS", "Plan", "Preset", "lower", "make_plan"]
