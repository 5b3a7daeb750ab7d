"""The simulator: what a plan costs in seconds, bytes, messages and memory, without running it."""

from lightning_cyclic.simulate.account import Account, WorkerAccount, account
from lightning_cyclic.simulate.coding import CodecCosts, Coding
from lightning_cyclic.simulate.compare import Comparison, Figures, compare, table
from lightning_cyclic.simulate.costs import Costs, Network
from lightning_cyclic.simulate.engine import Event, Result, simulate
from lightning_cyclic.simulate.graph import Lane
from lightning_cyclic.simulate.lockstep import Lockstep, best_lockstep, lockstep
from lightning_cyclic.simulate.memory import Memory, memory, memory_by_slot
from lightning_cyclic.simulate.units import (
    parse_bandwidth,
    parse_bytes,
    parse_seconds,
    show_bytes,
    show_seconds,
)

__all__ = [
    "Account",
    "CodecCosts",
    "Coding",
    "Comparison",
    "Costs",
    "Event",
    "Figures",
    "Lane",
    "Lockstep",
    "Memory",
    "Network",
    "Result",
    "WorkerAccount",
    "account",
    "best_lockstep",
    "compare",
    "lockstep",
    "memory",
    "memory_by_slot",
    "parse_bandwidth",
    "parse_bytes",
    "parse_seconds",
    "show_bytes",
    "show_seconds",
    "simulate",
    "table",
]
