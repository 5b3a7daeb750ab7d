"""The planner: choices that follow from measured numbers."""

from lightning_cyclic.planner.partition import balance, balance_between

__all__ = ["balance", "balance_between"]
