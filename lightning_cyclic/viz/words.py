"""Plain words for what is in a timetable, for readers who know none of the letters."""

from __future__ import annotations

from lightning_cyclic.plan.actions import COMPUTE, Action, Kind, Payload

# what travels, as it reads behind "sends" and "waits for"
CARRIED = {
    Payload.A: "activations",
    Payload.G: "gradients of activations",
    Payload.S: "the sum of gradients so far",
    Payload.T: "the sum of all gradients",
    Payload.H: "gradients to add",
    Payload.P: "new weights",
    Payload.U: "new outer weights",
    Payload.R: "module buffers",
    Payload.W: "gradients of shared weights",
    Payload.V: "new shared weights",
    Payload.D: "the batch",
    Payload.L: "losses and logs",
    Payload.N: "norms of gradients",
    Payload.C: "module buffers",
    Payload.K: "the signal to start",
    Payload.X: "the form of a message",
    Payload.M: "a metric",
    Payload.O: "optimizer state",
}
_DONE = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "backward to the input",
    Kind.W: "backward to the weights",
    Kind.ADD: "add gradients",
    Kind.OUTER: "make outer weights",
    Kind.UPDATE: "update",
    Kind.TELL: "note losses and logs",
    Kind.GATHER: "fetch weights",
    Kind.FREE: "drop weights",
}
_MOVED = {
    Kind.FETCH: "fetch",
    Kind.EVICT: "put away",
    Kind.FREE: "drop",
}


def title(a: Action) -> str:
    """Say what an action does, and to what of the model, in a few words.

    Example:
        >>> from lightning_cyclic.plan.actions import parse
        >>> title(parse("2F0@3#4"))
        'forward, stage 2, micro-batch 0'
        >>> title(parse("2SEND_P@3>1#4"))
        'send new weights, stage 2'
    """
    if a.payload is None:
        what = _DONE[a.kind]
    elif a.kind in _MOVED:
        what = f"{_MOVED[a.kind]} {CARRIED[a.payload]}"
    elif a.kind is Kind.SEND:
        what = f"send {CARRIED[a.payload]}"
    else:
        what = f"be ready for {CARRIED[a.payload]}"
    return ", ".join([what, *_where(a)])


def sentence(a: Action) -> str:
    """Say all that is known of an action.

    Example:
        >>> from lightning_cyclic.plan.actions import parse
        >>> sentence(parse("2F0@3#4"))
        'forward, stage 2, micro-batch 0, of step 4, on version 3 of the weights'
        >>> sentence(parse("2UPDATE@4#3"))
        'update, stage 2, of step 3, makes version 4 of the weights'
        >>> sentence(parse("1SEND_A0>1#4"))
        'send activations, stage 1, micro-batch 0, of step 4, to worker 1'
    """
    return _sentence(title(a), a)


def waiting(a: Action) -> str:
    """Say what the reader of the message of a RECV waits for.

    Example:
        >>> from lightning_cyclic.plan.actions import parse
        >>> waiting(parse("2RECV_A0<1#4"))
        'wait for activations, stage 2, micro-batch 0, of step 4, from worker 1'
    """
    return _sentence(title(a).replace("be ready for", "wait for"), a)


def _sentence(what: str, a: Action) -> str:
    parts = [what, f"of step {a.t}" if a.t >= 0 else f"of evaluation {-a.t}"]
    if a.t < 0:  # validation, test and predict: they count downward, and all read one version
        parts += ["on the newest weights"] if a.kind is Kind.F else []
    elif a.v is not None and a.kind is Kind.UPDATE:
        parts.append(f"makes version {a.v} of the weights")
    elif a.v is not None and a.kind in COMPUTE:
        parts.append(f"on version {a.v} of the weights")
    elif a.v is not None:
        parts.append(f"version {a.v}")
    if a.peer is not None:
        parts.append(f"{'to' if a.kind is Kind.SEND else 'from'} worker {a.peer}")
    return ", ".join(parts)


def _where(a: Action) -> list[str]:
    if a.payload in _OF_NO_STAGE or a.kind is Kind.TELL:
        return []
    micro = [] if a.i is None else [f"micro-batch {a.i}"]
    return [f"stage {a.j}", *micro]


_OF_NO_STAGE = frozenset({Payload.D, Payload.L, Payload.K})
