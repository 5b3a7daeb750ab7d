"""The blocks of memory that a run of steps has used, and what follows from when it used them.

    event    0     1     2     3     4     5        each function of torch that runs is one
    block 7        made  used        used  freed    lifetime: from made to freed
                   |---->|---------->|---->|        intervals: between accesses that are adjacent

A block is what tensors share with their views (an untyped storage). It is alive *at* an event if
it is there when the function has returned. What lives within one function is not seen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, final

PARAMETERS, OPTIMIZER, GRADIENTS, BUFFERS = "parameters", "optimizer", "gradients", "buffers"
MESSAGES, INPUTS, ACTIVATIONS = "messages", "inputs", "activations"
TEMPORARIES, OTHER = "temporaries", "other"
KINDS = (
    PARAMETERS, OPTIMIZER, GRADIENTS, BUFFERS, MESSAGES, INPUTS, ACTIVATIONS, TEMPORARIES, OTHER,
)  # fmt: skip
"""What blocks are for; one that is for several is of the kind that comes first."""

_NS_PER_S = 1e9


class Access(NamedTuple):
    event: int
    ns: int


@final
@dataclass(slots=True, kw_only=True)
class Block:
    """Hold what is known of one block; a watch writes into it while the block is there.

    Args:
        kind: one of ``KINDS``; temporary or other where nothing more is known.
        step: in which it was made, or seen first.
        made: first event at which it is alive.
        is_found: it was there before, and is counted from the beginning of the step on.
        ended: first event at which it is gone, or nobody looks any more. [None: it is still there]
        accesses: its making, each use, and its end, in order; of those that were there before,
            what was seen of it.
    """

    number: int
    num_bytes: int
    step: int
    made: int
    is_found: bool
    kind: str = OTHER
    ended: int | None = None
    accesses: list[Access] = field(default_factory=list)

    @property
    def lifetime_s(self) -> float | None:
        """Return for how long it was there; None where its beginning or end was not seen."""
        if self.is_found or self.ended is None:
            return None
        return (self.accesses[-1].ns - self.accesses[0].ns) / _NS_PER_S

    @property
    def intervals_s(self) -> list[float]:
        return [(b.ns - a.ns) / _NS_PER_S for a, b in pairwise(self.accesses)]

    def longest(self, spans: Sequence[Span]) -> tuple[Access, Access] | None:
        """Return the longest interval between accesses in spans that follow one another."""
        seen = [a for a in self.accesses if spans[0].begin <= a.event <= spans[-1].end]
        return max(pairwise(seen), key=lambda pair: pair[1].ns - pair[0].ns, default=None)

    def is_alive(self, event: int) -> bool:
        return self.made <= event and (self.ended is None or event < self.ended)


class Span(NamedTuple):
    """Say which events are those of a step; the first is its beginning.

    ``allocated_bytes``: the most that the device's allocator had given out at any of them, its
    rounding included; 0 where there is none to ask.
    """

    step: int
    begin: int
    end: int
    begin_ns: int
    end_ns: int
    allocated_bytes: int = 0


class Peak(NamedTuple):
    """Say when a step has most, counted from its beginning, and what it consists of."""

    event: int
    by_kind: Mapping[str, int]

    @property
    def num_bytes(self) -> int:
        return sum(self.by_kind.values())


class Swap(NamedTuple):
    """Say what could be on the host between two uses, and none of it be waited for.

    Args:
        num_bytes: of all blocks whose longest interval takes no less than their two ways.
        peak_bytes: what would be left of the peak.
    """

    num_bytes: int
    peak_bytes: int


@final
class Timeline:
    """Answer what a run of watched steps has shown.

    Args:
        blocks: all that were seen.
        spans: of the steps, in order.

    Source: Li et al., "Pinpointing the Memory Behaviors of DNN Training", ISPASS 2021, arXiv
        2104.00258: blocks, their accesses, the intervals between these, and their period.
    """

    def __init__(self, blocks: Sequence[Block], spans: Sequence[Span]) -> None:
        self.blocks = tuple(blocks)
        self.spans = tuple(spans)

    def bytes_at(self, span: Span) -> dict[str, list[int]]:
        """Return the bytes of each kind at each event of a step."""
        length = span.end - span.begin + 1
        changes = {kind: [0] * (length + 1) for kind in KINDS}
        for x in self.blocks:
            begin = max(x.made, span.begin)
            end = span.end + 1 if x.ended is None else min(x.ended, span.end + 1)
            if begin < end:
                changes[x.kind][begin - span.begin] += x.num_bytes
                changes[x.kind][end - span.begin] -= x.num_bytes
        return {kind: list(accumulate(each[:-1])) for kind, each in changes.items()}

    def peak(self, span: Span) -> Peak:
        """Return the moment with most bytes, the first of equals."""
        each = self.bytes_at(span)
        totals = list(map(sum, zip(*each.values(), strict=True)))
        n = totals.index(max(totals))
        return Peak(n, {kind: series[n] for kind, series in each.items() if series[n]})

    def most(self, span: Span) -> dict[str, int]:
        """Return the most of each kind, which need not fall on the same moment."""
        return {kind: max(series) for kind, series in self.bytes_at(span).items()}

    def pattern(self, span: Span) -> Counter[tuple[str, int, str]]:
        """Count what happened to which sizes of which kinds in a step.

        What it makes, what it uses, and which of its own it frees: what is left over from before
        goes whenever somebody lets it go.
        """
        found = Counter[tuple[str, int, str]]()
        for x in self.blocks:
            last = len(x.accesses) - 1
            for n, access in enumerate(x.accesses):
                if span.begin <= access.event <= span.end:
                    what = "made" if n == 0 and not x.is_found else "used"
                    if n == last and access.event == x.ended:
                        if x.is_found or x.made < span.begin:
                            continue
                        what = "freed"
                    found[what, x.num_bytes, x.kind] += 1
        return found

    @property
    def steady(self) -> tuple[int, int] | None:
        """Return the step from which on the pattern repeats, and after how many steps it does."""
        patterns = [self.pattern(span) for span in self.spans]
        for period in range(1, len(patterns)):
            pairs = list(zip(patterns, patterns[period:], strict=False))
            differing = [n for n, (one, other) in enumerate(pairs) if one != other]
            first = differing[-1] + 1 if differing else 0
            if first < len(pairs):
                return self.spans[first].step, period
        return None

    def swap(self, span: Span, bytes_per_s: float) -> Swap:
        """Return what a step could have on the host meanwhile.

        A block may be away in its longest interval if that is no shorter than its way there and
        its way back.
        """
        each = self.bytes_at(span)
        totals = list(map(sum, zip(*each.values(), strict=True)))
        away = 0
        for x, (a, b) in self._longest(span):
            if (b.ns - a.ns) / _NS_PER_S >= 2 * x.num_bytes / bytes_per_s:
                away += x.num_bytes
                for n in range(max(a.event + 1, span.begin), min(b.event, span.end + 1)):
                    totals[n - span.begin] -= x.num_bytes
        return Swap(away, max(totals))

    def _longest(self, span: Span) -> Iterator[tuple[Block, tuple[Access, Access]]]:
        """Yield the longest interval of each block that the step has, over all steps."""
        for x in self.blocks:
            is_here = x.made <= span.end and (x.ended is None or x.ended > span.begin)
            if is_here and (found := x.longest(self.spans)) is not None:
                yield x, found

    def as_dict(self, bytes_per_s: float) -> dict[str, Any]:
        """Return everything as plain data, events counted from the first step's beginning."""
        steady = self.steady
        return {
            "steady": None if steady is None else {"from_step": steady[0], "period": steady[1]},
            "steps": [self._step(span, bytes_per_s) for span in self.spans],
            "blocks": [self._block(x) for x in self.blocks],
        }

    def _step(self, span: Span, bytes_per_s: float) -> dict[str, Any]:
        peak, swap = self.peak(span), self.swap(span, bytes_per_s)
        return {
            "step": span.step,
            "first_event": span.begin,
            "events": span.end - span.begin,
            "seconds": (span.end_ns - span.begin_ns) / _NS_PER_S,
            "peak_bytes": peak.num_bytes,
            "peak_event": span.begin + peak.event,
            "peak": dict(peak.by_kind),
            "most": self.most(span),
            "swappable_bytes": swap.num_bytes,
            "peak_bytes_if_swapped": swap.peak_bytes,
            "allocated_bytes": span.allocated_bytes,
        }

    def _block(self, x: Block) -> dict[str, Any]:
        return {
            "number": x.number,
            "bytes": x.num_bytes,
            "kind": x.kind,
            "step": x.step,
            "made": None if x.is_found else x.made,
            "freed": x.ended,
            "lifetime_s": x.lifetime_s,
            "accesses": len(x.accesses),
            "intervals_us": [round(1e6 * each, 1) for each in x.intervals_s],
        }
