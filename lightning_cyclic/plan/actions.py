"""Actions: the words of a program, as data that prints and parses.

An action is one thing that one worker does. Compute is written as torch.distributed.pipelining
writes it (stage, kind, micro-batch), plus the weight version behind ``@`` and the training step
behind ``#``:

    2F0@3#4            stage 2, forward of micro-batch 0, on version 3, in step 4
    2B0@3#4            its backward, on the same version; or in two parts, I and W:
    2I0@3#4            the gradient of what entered the stage
    2W0@3#4            the gradient of the weights
    2SEND_S0>1#4       send the partial gradient sum of stage 2 up to micro-batch 0 to worker 1
    2RECV_P@3<0#4      receive version 3 of the parameters of stage 2 from worker 0
    2UPDATE@4#3        make version 4 from the gradients of step 3
    0SEND_W1>3#4       send the gradient of tied parameters of stage 0 for micro-batch 1
    0RECV_V@3<0#3      receive version 3 of tied parameters of stage 0
    2SEND_D>1#4        send the batch of step 4 to worker 1, whose first stage is 2
    0RECV_L<3#4        receive the losses of step 4 from worker 3; the own first stage is 0
    2ADD1#4            add the gradient of micro-batch 1 to the sum of those before it
    2OUTER#4           make outer weights (of local steps) of the sum of differences of step 4
    0TELL#4            note what came out of step 4; the own first stage is 0
    2GATHER@3#4, 2FREE@3#4   fetch or drop the bytes of stage 2 (sharding "full")
    2FETCH_O#4         copy optimizer state of stage 2 into memory, for its update of step 4
    2EVICT_O#4         copy it to where there is room, when that update is over
    2FREE_O#4          drop what has been copied
    2FETCH_P@3#4       copy version 3 of the weights of stage 2 into memory, for their use
    2EVICT_P@4#4, 2FREE_P@4#4   copy to where there is room what an update has made; drop it
    2EVICT_A1#4        copy what the forward of micro-batch 1 has left to where there is room
    2FREE_A1#4         drop what has been copied
    2FETCH_A1#4        copy it into memory again, for the backward

A RECV says where a worker is ready for a message, which is where it is posted; what waits for the
message is the action that reads it. An action runs on the main lane of its worker, one after the
other, unless it names another lane, whose actions run beside it:

    2SEND_S0>1#4~sums  pass the sum on beside the backward that goes on
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from lightning_cyclic.errors import ActionSyntaxError


class _Name(enum.StrEnum):
    __hash__ = str.__hash__  # an enum's own runs Python, and these are keys of every action


class Kind(_Name):
    F = "F"
    B = "B"
    I = "I"  # noqa: E741  (the field's name)
    W = "W"
    ADD = "ADD"
    OUTER = "OUTER"
    SEND = "SEND"
    RECV = "RECV"
    UPDATE = "UPDATE"
    TELL = "TELL"
    GATHER = "GATHER"
    FREE = "FREE"
    FETCH = "FETCH"
    EVICT = "EVICT"


COMPUTE = frozenset({Kind.F, Kind.B, Kind.I, Kind.W})
GO_BACK = frozenset({Kind.B, Kind.I})  # make the gradient of what entered the stage
MAKE_GRADIENTS = frozenset({Kind.B, Kind.W})  # of the weights


class Payload(_Name):
    A = "A"  # activations, stage j-1 -> j; or those of stage j, between tiers of memory
    G = "G"  # activation gradients, stage j+1 -> j
    S = "S"  # partial gradient sums, micro-batch i -> i+1
    T = "T"  # the total of a step, last micro-batch's worker -> owner
    H = "H"  # the gradient of a micro-batch, its worker -> the owner, who adds all of them
    P = "P"  # parameters of a version, owner -> owner+1 -> ...; or between tiers of memory
    U = "U"  # outer weights of local steps, which a step's differences have made; as P
    R = "R"  # relayed module buffers (BatchNorm statistics), micro-batch i -> i+1
    W = "W"  # gradient of tied parameters, a later stage that uses them -> the first, stage j
    V = "V"  # a version of tied parameters, owner of the first stage j -> the later stages
    D = "D"  # the batch of a step, worker of stage 0 -> the others; j: first stage of the receiver
    L = "L"  # losses of a step, worker of the last stage -> the others; j as in D
    N = "N"  # norms of the gradients of stage j, its owner -> those who decide about a step
    C = "C"  # relayed module buffers at a flush, from a worker that has the newest -> the others
    K = "K"  # a signal to start, worker w -> w+1; only in a step that all begin together
    X = "X"  # what a message of another form than the last looks like, and its content
    M = "M"  # a metric's state at the end of an epoch, worker of stage j -> the others
    O = "O"  # noqa: E741  optimizer state, between tiers of memory: no message


class Lane(_Name):
    MAIN = ""
    SUMS = "sums"  # gradients are added and passed on while the backward goes on; so are
    # differences of local weights, and what is made of them, while the next steps do
    WEIGHTS = "weights"  # versions are passed on as soon as they have come
    TIERS = "tiers"  # what leaves memory, or comes back, is copied


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """Hold one action of one worker.

    Args:
        payload: what travels, or is moved; only for SEND and RECV, FETCH and EVICT, and FREE of
            what was moved.
        t: training step (0-based). Of an UPDATE: the step whose gradients it applies.
        j: stage (0 = input side).
        i: micro-batch inside the step (0-based); only of F, B, I, W and ADD, of messages A, G, S,
            H, R and W, of P where parameters are fetched for each use, and of what moves A.
        v: weight version; only of F, B, I, W, UPDATE, GATHER, FREE without a payload, P and V.
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
    lane: Lane = Lane.MAIN
    s: int = field(default=0, compare=False)

    def moved(self, steps: int, slots: int) -> Action:
        """Return the same action some steps later: with later slots, and versions if it has any.

        Every worker moves all actions of each step, and ``replace`` takes twice as long.

        Example:
            >>> str(parse("2RECV_P@3<0#4").moved(1, 8))
            '2RECV_P@4<0#5'
        """
        later: Action = object.__new__(Action)
        for name, put in _PUT.items():
            put(later, getattr(self, name))
        _PUT["t"](later, self.t + steps)
        _PUT["s"](later, self.s + slots)
        if self.v is not None:
            _PUT["v"](later, self.v + steps)
        return later

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
        lane = f"~{self.lane}" if self.lane else ""
        return f"{text}#{self.t}{lane}"


# what a frozen object is made by
_PUT: dict[str, Callable[[Action, Any], None]] = {
    f.name: getattr(Action, f.name).__set__ for f in fields(Action)
}

Program = tuple[Action, ...]  # what one worker does, in its order

_PATTERN = re.compile(
    r"(?P<j>\d+)"
    r"(?:(?P<kind>F|B|I|W|ADD|OUTER|UPDATE|TELL|GATHER|FREE)"
    r"|(?P<way>SEND|RECV)_(?P<payload>[AGSTHPURWVDLNCKXM])|(?P<move>FETCH|EVICT|FREE)_(?P<moved>[AOP]))"
    r"(?P<i>\d+)?(?:@(?P<v>\d+))?(?:(?P<arrow>[<>])(?P<peer>\d+))?#(?P<t>\d+)"
    r"(?:~(?P<lane>sums|weights|tiers))?",
    re.ASCII,  # other scripts' digits would parse but not print back
)
_WITH_MICRO = {
    *COMPUTE, Kind.ADD,
    Payload.A, Payload.G, Payload.S, Payload.H, Payload.R, Payload.W,
}  # fmt: skip
_WITH_VERSION = {Kind.UPDATE, Kind.GATHER, Kind.FREE, Payload.P, Payload.V}
_MAYBE_VERSION = {*COMPUTE, Payload.X}  # of programs without weights; X has its message's
_MAYBE_MICRO = {Payload.P, Payload.X}  # P that is fetched for one use names it


def parse(text: str) -> Action:
    """Read an action from the text that it prints as; the inverse of ``str``.

    Args:
        text: one action, such as ``2F0@3#4``. Its slot is not part of the text.

    Returns:
        The action, in slot 0.

    Raises:
        ActionSyntaxError: the text is not an action, or has a field too many or too few.

    Example:
        >>> parse("2RECV_P@3<0#4").peer
        0
    """
    match = _PATTERN.fullmatch(text.strip())
    if match is None or not _is_complete(match):
        raise ActionSyntaxError(
            f"{text!r} is not an action; an action is stage, kind, micro-batch, @version, peer, "
            "#step, such as 2F0@3#4, 2SEND_S0>1#4, 2RECV_P@3<0#4 or 2UPDATE@4#3; write one of "
            "these forms, or make the text with str(action)"
        )
    payload = match["payload"] or match["moved"]
    return Action(
        kind=Kind(match["kind"] or match["way"] or match["move"]),
        payload=None if payload is None else Payload(payload),
        t=int(match["t"]),
        j=int(match["j"]),
        i=_number(match["i"]),
        v=_number(match["v"]),
        peer=_number(match["peer"]),
        lane=Lane(match["lane"] or ""),
    )


def _number(digits: str | None) -> int | None:
    return None if digits is None else int(digits)


def _is_complete(match: re.Match[str]) -> bool:
    """Say whether exactly the fields that the kind or payload needs are there."""
    payload = match["payload"] or match["moved"]
    what = Payload(payload) if payload else Kind(match["kind"])
    arrow = {"SEND": ">", "RECV": "<", None: None}[match["way"]]
    version_fits = what in _MAYBE_VERSION or (match["v"] is not None) == (what in _WITH_VERSION)
    return (
        (what in _MAYBE_MICRO or (match["i"] is not None) == (what in _WITH_MICRO))
        and match["arrow"] == arrow
        and version_fits
    )
