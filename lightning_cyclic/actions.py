"""Actions: the words of a program, as data that prints and parses.

An action is one thing that one worker does. Compute is written as torch.distributed.pipelining
writes it (stage, kind, micro-batch), plus the weight version behind ``@`` and the training step
behind ``#``:

    2F0@3#4            stage 2, forward of micro-batch 0, on version 3, in step 4
    2B0@3#4            its backward, on the same version
    2SEND_S0>1#4       send the partial gradient sum of stage 2 up to micro-batch 0 to worker 1
    2RECV_P@3<0#4      receive version 3 of the parameters of stage 2 from worker 0
    2UPDATE@4#3        make version 4 from the gradients of step 3
    2GATHER@3#4, 2FREE@3#4   fetch or drop the bytes of stage 2 (sharding "full")
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

from lightning_cyclic.errors import ActionSyntaxError


class Kind(enum.StrEnum):
    """Say what a worker does."""

    F = "F"
    B = "B"
    SEND = "SEND"
    RECV = "RECV"
    UPDATE = "UPDATE"
    GATHER = "GATHER"
    FREE = "FREE"


class Payload(enum.StrEnum):
    """Say what travels in a message."""

    A = "A"  # activations, stage j-1 -> j
    G = "G"  # activation gradients, stage j+1 -> j
    S = "S"  # partial gradient sums, micro-batch i -> i+1
    T = "T"  # the total of a step, last micro-batch's worker -> owner
    P = "P"  # parameters of a version, owner -> owner+1 -> ...
    R = "R"  # relayed module buffers (BatchNorm statistics), micro-batch i -> i+1


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """Hold one action of one worker.

    Args:
        kind: what is done.
        payload: what travels; only for SEND and RECV.
        t: training step (0-based). Of an UPDATE: the step whose gradients it applies.
        j: stage (0 = input side).
        i: micro-batch inside the step (0-based); None for T, P, UPDATE, GATHER and FREE.
        v: weight version; None where no version is read or made (A, G, S, T, R).
        peer: the other worker of a SEND or RECV.
        s: slot in which the timetable places the action; no part of its identity or text.
    """

    kind: Kind
    t: int
    j: int
    i: int | None = None
    v: int | None = None
    payload: Payload | None = None
    peer: int | None = None
    s: int = 0

    def __str__(self) -> str:
        """Print the action in the form that :func:`parse` reads."""
        text = f"{self.j}{self.kind}"
        if self.payload is not None:
            text += f"_{self.payload}"
        if self.i is not None:
            text += str(self.i)
        if self.v is not None:
            text += f"@{self.v}"
        if self.peer is not None:
            text += f"{'>' if self.kind is Kind.SEND else '<'}{self.peer}"
        return f"{text}#{self.t}"
