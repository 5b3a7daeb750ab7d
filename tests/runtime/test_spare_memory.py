"""Spare memory is used again, and is no more than was used at once."""

from __future__ import annotations

import torch

from lightning_cyclic.runtime.buffers import Layout
from lightning_cyclic.runtime.spare_memory import SpareMemory

MANY = 1 << 17


def test_what_nobody_holds_is_used_again() -> None:
    spare = SpareMemory()
    first = spare.take(MANY)
    place = first.data_ptr()
    view = torch.empty(0, dtype=torch.float32).set_(first.untyped_storage(), 4, (5,), (1,))
    del first
    other = spare.take(MANY)
    assert (other.data_ptr() != place, spare.num_bytes) == (True, 0)  # the view lies in it
    del view
    assert spare.num_bytes == MANY
    assert spare.take(MANY - MANY // 10).data_ptr() == place  # it need not be as large


def test_spare_memory_goes_before_there_is_more_than_was_used_at_once() -> None:
    spare = SpareMemory()
    held = [spare.take(MANY) for _ in range(8)]
    held.clear()
    most = 8 * MANY
    for size in (3 * MANY, MANY, 2 * MANY, MANY // 2 + 1, 4 * MANY):  # others, in each place
        held.append(spare.take(size))
        assert sum(x.numel() for x in held) + spare.num_bytes <= max(
            most, sum(x.numel() for x in held)
        )
        held = held[-2:]


def test_all_that_is_spare_is_given_back_and_what_is_held_stays() -> None:
    spare = SpareMemory()
    held = spare.take(MANY).fill_(7)
    spare.take(MANY)
    spare.give_back()
    assert spare.num_bytes == 0
    assert bool((held == 7).all())
    del held
    assert spare.num_bytes == MANY


def test_small_buffers_take_no_pages_of_their_own() -> None:
    spare = SpareMemory()
    spare.take(100)
    assert spare.num_bytes == 0


def test_buffers_that_are_not_kept_lie_in_it() -> None:
    spare, x = SpareMemory(), torch.zeros(MANY)
    layout = Layout([x], torch.device("cpu"), keeps=False, take=spare.take)
    buffer = layout.new()
    place = buffer.data.data_ptr()
    buffer.write([x])
    buffer.let_go()
    (view,) = buffer.tensors
    del buffer
    assert spare.num_bytes == 0  # a parameter may still show it
    del view
    assert layout.new().data.data_ptr() == place
