"""The planner: choices that follow from measured numbers."""

from lightning_cyclic.planner.partition import balance

__all__ = ["balance"]
