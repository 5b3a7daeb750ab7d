"""Numbers of the host are looked at once, those of a GPU one step later and in their order."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_cyclic.runtime.late_values import LateValues


class Recorded:
    """An event of a GPU that has not come to it."""

    def __init__(self, log: list[str], name: str) -> None:
        self._log, self._name = log, name

    def synchronize(self) -> None:
        self._log.append(f"wait for {self._name}")


class Slow:
    """Copies that are made only when somebody waits for them."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def to_host(self, data: Tensor) -> tuple[Tensor, Recorded]:
        name = f"{float(data):g}"
        self.log.append(f"copy {name}")
        return data.clone(), Recorded(self.log, name)


def test_numbers_of_the_host_are_looked_at_once() -> None:
    seen: list[float] = []
    late = LateValues()
    late.put(torch.tensor(2.5, requires_grad=True), seen.append)
    assert seen == [2.5]
    late.put(torch.tensor([3.0]), seen.append)  # one element, whatever the shape
    late.settle()
    assert seen == [2.5, 3.0]


def test_numbers_of_a_gpu_are_looked_at_with_the_next_one() -> None:
    slow = Slow()
    late = LateValues(lambda device: slow)
    for x in (1.0, 2.0):
        late.put(torch.tensor(x), lambda y: slow.log.append(f"look at {y:g}"))
    assert slow.log == ["copy 1", "wait for 1", "look at 1", "copy 2"]
    late.settle()
    late.settle()  # nothing is left
    assert slow.log[4:] == ["wait for 2", "look at 2"]


def test_what_a_look_raises_comes_with_the_next_number_and_once() -> None:
    late = LateValues(lambda device: Slow())

    def refuse(x: float) -> None:
        raise ValueError(x)

    late.put(torch.tensor(1.0), refuse)
    with pytest.raises(ValueError, match=r"1\.0"):
        late.put(torch.tensor(2.0), refuse)
    late.settle()


@pytest.mark.gpu
def test_a_gpu_is_not_waited_for() -> None:
    late, seen = LateValues(), list[float]()
    torch.cuda._sleep(int(1e9))
    with_mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        late.put(torch.ones((), device="cuda"), seen.append)
    finally:
        torch.cuda.set_sync_debug_mode(with_mode)
    assert seen == []
    late.settle()
    assert seen == [1.0]
