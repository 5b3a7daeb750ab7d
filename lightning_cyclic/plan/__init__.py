"""Plans and their programs: integers only, without torch."""

from lightning_cyclic.plan.plan import PRESETS, Plan, Preset, lower, make_plan

__all__ = ["PRESETS", "Plan", "Preset", "lower", "make_plan"]
