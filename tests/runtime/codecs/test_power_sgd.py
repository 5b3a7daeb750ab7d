"""PowerSGD: low-rank approximations that go on from step to step, and lose nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_cyclic import ConfigurationError, PowerSgd

ROWS, COLUMNS = 24, 40


def gradient(t: int) -> Tensor:
    """Return a gradient with a few directions that stay, and others."""
    g = torch.Generator().manual_seed(7)
    basis = torch.randn(ROWS, 4, generator=g) @ torch.randn(4, COLUMNS, generator=g)
    g.manual_seed(t)
    return basis + 0.3 * torch.randn(ROWS, COLUMNS, generator=g)


def sent_of(codec: PowerSgd, grad: Tensor, state: dict[str, Tensor]) -> Tensor:
    return codec.decode(codec.encode(grad, state), torch.empty_like(grad, device="meta"))


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


@pytest.mark.parametrize("rank", [0, -1, 1.5, True, None, "full"])
def test_ranks_that_cannot_be(rank: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"rank=.*; allowed: whole .*; use rank=4"):
        PowerSgd(rank=rank)
