"""PowerSGD: the factors of torch's own hook where gradients are alike, and what differs else."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import (
    PowerSGDState,
    powerSGD_hook,
)
from torch.nn.parallel import DistributedDataParallel

from lightning_cyclic import ConfigurationError, PowerSgd
from tests.harness import processes
from tests.harness.processes import here

ROWS, COLUMNS = 24, 40


def gradient(t: int, worker: int = 0) -> Tensor:
    """Return a gradient with a few directions that stay, and others."""
    g = torch.Generator().manual_seed(7)
    basis = torch.randn(ROWS, 4, generator=g) @ torch.randn(4, COLUMNS, generator=g)
    g.manual_seed(100 * worker + t)
    return basis + 0.3 * torch.randn(ROWS, COLUMNS, generator=g)


def sent_of(codec: PowerSgd, grad: Tensor, state: dict[str, Tensor]) -> Tensor:
    return codec.decode(codec.encode(grad, state), torch.empty_like(grad, device="meta"))


def ours(rank: int, num_steps: int, first: Tensor, worker: int = 0) -> list[Tensor]:
    state = {"factor": first}
    return [sent_of(PowerSgd(rank), gradient(t, worker), state) for t in range(num_steps)]


# ---------------------------------------------------------------------- beside torch's hook


def hooked(rank: int, num_steps: int, alike: bool) -> Any:
    """Return what torch's hook makes of the gradients of this rank's steps, and its first Q."""
    dist.init_process_group("gloo", rank=here().rank, world_size=here().num_ranks)
    module = nn.Linear(COLUMNS, ROWS, bias=False)
    model = DistributedDataParallel(module)
    # until its own iterations begin it only averages: they begin with the third call
    state = PowerSGDState(None, rank, start_powerSGD_iter=2, min_compression_rate=0.5)
    seed = deepcopy(state.rng).randint(1_000_000_000)  # as it will draw its first Q
    first = torch.randn(1, COLUMNS, rank, generator=torch.Generator().manual_seed(seed))[0]
    model.register_comm_hook(state, powerSGD_hook)
    made = []
    for t in range(-2, num_steps):
        model.zero_grad()
        grad = gradient(t % 50, 0 if alike else here().rank)
        (model(torch.eye(COLUMNS)).T * grad).sum().backward()
        made.append(module.weight.grad.clone())  # type: ignore[union-attr]
    return made[2:], first


@pytest.mark.multi
@pytest.mark.parametrize("rank", [1, 3, 4])
def test_alike_gradients_are_approximated_as_by_torch(rank: int) -> None:
    for made, first in processes.run(hooked, 2, rank, 6, True):
        for t, (x, y) in enumerate(zip(ours(rank, 6, first), made, strict=True)):
            assert not torch.allclose(x, gradient(t), atol=1e-2)  # it is an approximation
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


@pytest.mark.multi
def test_other_gradients_have_a_basis_of_each_worker() -> None:
    """Torch's mean has one basis, and rank r; ours those of all."""
    rank = 2
    (made, first), _ = processes.run(hooked, 2, rank, 4, False)
    both = zip(ours(rank, 4, first), ours(rank, 4, first, 1), strict=True)
    means = [(x + y) / 2 for x, y in both]
    assert torch.linalg.matrix_rank(made[0], rtol=1e-4) == rank
    assert torch.linalg.matrix_rank(means[0], rtol=1e-4) == 2 * rank


# ---------------------------------------------------------------------- by itself


@pytest.mark.parametrize("rank", [1, 2, 5])
def test_what_is_sent_and_what_is_left_are_what_there_was(rank: int) -> None:
    codec, state, left = PowerSgd(rank), {}, torch.zeros(ROWS, COLUMNS)
    for t in range(8):
        w = gradient(t) + left
        sent = sent_of(codec, gradient(t), state)
        left = state["left"]
        assert torch.equal(left, w - sent)
        assert torch.linalg.matrix_rank(sent, rtol=1e-4) == rank


def test_nothing_is_lost_over_many_steps() -> None:
    codec, state = PowerSgd(2), {}
    total = sum(gradient(t).double() for t in range(30))
    sent = sum(sent_of(codec, gradient(t), state).double() for t in range(30))
    assert state["left"].norm() > 1
    torch.testing.assert_close(sent + state["left"], total, rtol=0, atol=1e-4)


def test_steps_find_the_best_approximation_together() -> None:
    codec, state, grad = PowerSgd(4), {}, gradient(0)
    for _ in range(12):
        state["left"] = torch.zeros(ROWS, COLUMNS)
        sent = sent_of(codec, grad, state)
    u, s, v = torch.linalg.svd(grad)
    best = (grad - u[:, :4] * s[:4] @ v[:4]).norm()
    assert best <= (grad - sent).norm() * (1 + 1e-6) <= 1.01 * best


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (8, 3, 3, 3)])
def test_the_full_rank_gives_the_gradient(shape: tuple[int, ...]) -> None:
    grad = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    rank = min(shape[0], grad.numel() // shape[0])
    state: dict[str, Tensor] = {}
    for k in (1, 2, 3):
        came = sent_of(PowerSgd(rank), k * grad, state)
        assert (came - k * grad).norm() <= 1e-6 * (k * grad).norm()


def test_of_zeros_comes_nothing_and_then_all_goes_on() -> None:
    codec, state, zeros = PowerSgd(2), {}, torch.zeros(ROWS, COLUMNS)
    for _ in range(2):
        assert not sent_of(codec, zeros, state).any()
    assert sent_of(codec, gradient(0), state).norm() > 1
    alone: dict[str, Tensor] = {}
    assert sent_of(codec, gradient(0), alone).norm() > 1


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_arrives_and_leaves_nothing(bad: float) -> None:
    codec, state = PowerSgd(2), {}
    sent_of(codec, gradient(0), state)
    before = dict(state)
    grad = gradient(1)
    grad[3, 4] = bad
    assert not sent_of(codec, grad, state).isfinite().all()
    assert all(state[name].equal(before[name]) for name in before)
    assert sent_of(codec, gradient(1), state).isfinite().all()


def test_what_is_sent_as_it_is() -> None:
    codec = PowerSgd(4)
    shapes: list[tuple[int, ...]] = [(24, 40), (1000,), (8, 8), (4, 500), (10, 3, 3, 7), (999, 1)]
    likes = [torch.empty(shape, device="meta") for shape in shapes]
    assert [codec.takes(like) for like in likes] == [True, False, False, False, True, False]
    assert not codec.takes(torch.empty(24, 40, dtype=torch.int32))
    assert [tuple(x.shape) for x in codec.sent(likes[4])] == [(10, 4), (63, 4)]


def test_bytes_of_square_matrices() -> None:
    sent = sum(x.numel() * 4 for x in PowerSgd(3).sent(torch.empty(100, 100, device="meta")))
    assert PowerSgd(3).num_bytes(10_000) == sent
    assert PowerSgd(1000).num_bytes(10_000) == 40_000
    assert PowerSgd(3).num_bytes(2 * 1024**2 + 10_000) == 2 * 4 * 3 * 2048 + sent


@pytest.mark.parametrize("rank", [0, -1, 1.5, True, None, "full"])
def test_ranks_that_cannot_be(rank: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"rank=.*; allowed: whole .*; use rank=4"):
        PowerSgd(rank=rank)
