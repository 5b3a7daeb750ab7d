"""Plans and their programs: integers only, without torch."""

from lightning_cyclic.plan.check.proof import proof_of
from lightning_cyclic.plan.lower import program_of, programs_of
from lightning_cyclic.plan.make import make_plan
from lightning_cyclic.plan.plan import Plan
from lightning_cyclic.plan.presets import PRESETS, Preset
from lightning_cyclic.plan.weights import LocalSteps

__all__ = [
    "PRESETS",
    "LocalSteps",
    "Plan",
    "Preset",
    "make_plan",
    "program_of",
    "programs_of",
    "proof_of",
]
