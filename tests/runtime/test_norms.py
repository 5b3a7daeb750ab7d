"""Norms over stages of several owners have the bits of one process that has all gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_cyclic import make_plan
from lightning_cyclic.plan.actions import Payload, parse
from lightning_cyclic.plan.dataflow import Item
from lightning_cyclic.runtime.messages import Messages
from lightning_cyclic.runtime.norms import Norms
from tests.harness.local_transport import LocalTransport, PostOffice

CPU = torch.device("cpu")


class Pair:
    """Two workers in one thread, each of which owns one stage."""

    def __init__(self, stages: list[list[nn.Parameter]]) -> None:
        plan = make_plan("gpipe", num_stages=2, num_workers=2, num_microbatches=2, norms="owners")
        office, self.stages = PostOffice(), stages
        self.norms, self.messages = [], []
        for w in range(2):
            messages = Messages(LocalTransport(office, w, 2, 0.5), {}, lambda p, a: p.wait(), CPU)
            norms = Norms(plan, w, stages, self.fetch)
            for j in range(2):
                messages.know(Payload.N, j, norms.layout(j, messages))
            self.norms.append(norms)
            self.messages.append(messages)

    def fetch(self, item: Item) -> None:
        raise AssertionError("everything has been told")

    def tell(self) -> None:
        """Let each owner tell the other worker."""
        for w, j in ((0, 0), (1, 1)):
            grads = [p.grad for p in self.stages[j]]
            key, message = None, self.norms[w].note(0, j, grads).message()
            self.messages[w].send(parse(f"{j}SEND_N>{1 - w}#0"), key, message)
            receive = parse(f"{j}RECV_N<{w}#0")
            incoming = self.messages[1 - w].post(receive, key)
            self.norms[1 - w].put(0, j, self.messages[1 - w].take(incoming))


def stages_of(
    dtypes: list[torch.dtype], missing: set[int], size: int = 17
) -> list[list[nn.Parameter]]:
    g = torch.Generator().manual_seed(0)
    parameters = []
    for k in range(8):
        p = nn.Parameter(torch.zeros(size + k, dtype=dtypes[k % len(dtypes)]))
        if k not in missing:
            p.grad = torch.randn(p.shape, generator=g).to(p.dtype)
        parameters.append(p)
    return [parameters[:5], parameters[5:]]


def expected(order: list[nn.Parameter]) -> Tensor:
    grads = [p.grad for p in order if p.grad is not None]
    return torch.nn.utils.get_total_norm(grads)


@pytest.mark.parametrize("missing", [set(), {0, 3, 6}, {5, 6, 7}, set(range(8))])
@pytest.mark.parametrize(
    "dtypes", [[torch.float32], [torch.bfloat16], [torch.float64], [torch.float32, torch.bfloat16]]
)
def test_the_total_has_the_bits_of_one_process(
    missing: set[int], dtypes: list[torch.dtype]
) -> None:
    stages = stages_of(dtypes, missing)
    order = [*stages[1], *stages[0][::-1]]  # as optimizers have them, not as stages do
    pair = Pair(stages)
    pair.tell()
    for norms in pair.norms:
        total = norms.total(0, order)
        assert torch.equal(total, expected(order))
        assert norms.is_finite(0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_one_gradient_that_is_not_finite_is_seen_by_all(bad: float) -> None:
    stages = stages_of([torch.float32], {1})
    stages[1][2].grad[3] = bad  # type: ignore[index]
    pair = Pair(stages)
    pair.tell()
    assert [norms.is_finite(0) for norms in pair.norms] == [False, False]
    assert pair.norms[0].is_finite(0, {0})
    assert not pair.norms[1].is_finite(0, {1})
