"""The planner: choices that follow from measured numbers."""

from lightning_cyclic.planner.candidates import DEFAULT_PRESETS, Candidate, Problem
from lightning_cyclic.planner.fit import Fit
from lightning_cyclic.planner.ideals import CostGraph, GraphSplit, GraphTensor, split_ideals
from lightning_cyclic.planner.partition import balance, balance_between
from lightning_cyclic.planner.profile import ModelProfile, Tie, UnitProfile, from_json, to_json
from lightning_cyclic.planner.ring import RingNumbers, best_around_ring
from lightning_cyclic.planner.search import RankedPlan, Ranking, search
from lightning_cyclic.planner.stages import Stages
from lightning_cyclic.simulate.memory import Memory, memory

__all__ = [
    "DEFAULT_PRESETS",
    "Candidate",
    "CostGraph",
    "Fit",
    "GraphSplit",
    "GraphTensor",
    "Memory",
    "ModelProfile",
    "Problem",
    "RankedPlan",
    "Ranking",
    "RingNumbers",
    "Stages",
    "Tie",
    "UnitProfile",
    "balance",
    "balance_between",
    "best_around_ring",
    "from_json",
    "memory",
    "search",
    "split_ideals",
    "to_json",
]
