"""What follows from blocks and their accesses, on blocks that are made up."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_cyclic.runtime.memory_blocks import Access, Block, Peak, Span, Swap, Timeline

MS = 1_000_000  # in nanoseconds


def block(num_bytes: int, kind: str, *events: int, is_found: bool = False, ends: bool = True,
          **more: Any) -> Block:  # fmt: skip
    """Make one with an access at each event, of a millisecond each."""
    return Block(
        number=0, num_bytes=num_bytes, step=0, kind=kind, is_found=is_found,
        made=0 if is_found else events[0], ended=events[-1] if ends else None,
        accesses=[Access(n, n * MS) for n in events], **more,
    )  # fmt: skip


def span(step: int, begin: int, end: int) -> Span:
    return Span(step, begin, end, begin * MS, end * MS)


#  event        0  1  2  3  4  5
#  parameters   8  8  8  8  8  8     used at 1 and 5
#  activations     4  4  4  .  .     made at 1, used at 3, freed at 4
#  temporaries        2  .  .  .
ONE = Timeline(
    [
        block(8, "parameters", 1, 5, is_found=True, ends=False),
        block(4, "activations", 1, 3, 4),
        block(2, "temporaries", 2, 3),
    ],
    [span(0, 0, 5)],
)


def test_bytes_at_each_event() -> None:
    (whole,) = ONE.spans
    found = {kind: series for kind, series in ONE.bytes_at(whole).items() if any(series)}
    assert found == {
        "parameters": [8] * 6,
        "activations": [0, 4, 4, 4, 0, 0],
        "temporaries": [0, 0, 2, 0, 0, 0],
    }
    assert ONE.peak(whole) == Peak(2, {"parameters": 8, "activations": 4, "temporaries": 2})
    assert ONE.peak(whole).num_bytes == 14
    assert ONE.most(whole)["activations"] == 4


def test_intervals_and_lifetimes() -> None:
    weight, activation, temporary = ONE.blocks
    assert weight.intervals_s == [0.004]
    assert weight.lifetime_s is None
    assert activation.intervals_s == [0.002, 0.001]
    assert activation.lifetime_s == 0.003
    assert [temporary.is_alive(n) for n in range(4)] == [False, False, True, False]


def test_what_could_be_away_meanwhile() -> None:
    (whole,) = ONE.spans
    # 4 ms suffice for 8 bytes there and back at 4 bytes/ms, 2 ms for 4 bytes, and 1 ms for 2 bytes
    assert ONE.swap(whole, 4e3) == Swap(num_bytes=14, peak_bytes=12)  # at the uses in event 1
    # at half of that 8 ms would be needed for the weight, 4 for the activation
    assert ONE.swap(whole, 2e3) == Swap(num_bytes=0, peak_bytes=14)
    assert ONE.swap(whole, 3.999e3).num_bytes == 0


def repeating(sizes: list[int]) -> Timeline:
    """Return steps of which each makes, uses and frees a block of a size."""
    blocks = [block(size, "activations", 4 * t + 1, 4 * t + 2, 4 * t + 3)
              for t, size in enumerate(sizes)]  # fmt: skip
    return Timeline(blocks, [span(t, 4 * t, 4 * t + 3) for t in range(len(sizes))])


@pytest.mark.parametrize(
    ("sizes", "steady"),
    [
        ([4, 4, 4], (0, 1)),
        ([9, 4, 4, 4], (1, 1)),
        ([4, 8, 4, 8], (0, 2)),
        ([1, 4, 8, 4, 8], (1, 2)),
        ([4, 8, 2], None),
        ([4], None),
    ],
)
def test_from_where_on_and_how_often_steps_repeat(
    sizes: list[int], steady: tuple[int, int] | None
) -> None:
    assert repeating(sizes).steady == steady


def test_a_pattern_has_what_happened_to_which_size_and_kind() -> None:
    (whole,) = ONE.spans
    assert ONE.pattern(whole) == {
        ("used", 8, "parameters"): 2,
        ("made", 4, "activations"): 1,
        ("used", 4, "activations"): 1,
        ("freed", 4, "activations"): 1,
        ("made", 2, "temporaries"): 1,
        ("freed", 2, "temporaries"): 1,
    }


def test_the_file_has_it_all() -> None:
    data = ONE.as_dict(bytes_per_s=1.0)
    (step,) = data["steps"]
    assert (step["events"], step["peak_event"], step["peak_bytes"]) == (5, 2, 14)
    weight, activation, _ = data["blocks"]
    assert (weight["made"], weight["freed"]) == (None, None)
    assert (activation["made"], activation["freed"]) == (1, 4)
    assert activation["intervals_us"] == [2000.0, 1000.0]
