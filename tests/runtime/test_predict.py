"""Guesses go where the optimizer's own step would go again, and stay where nothing moves."""

import copy

import pytest
import torch
from torch import nn

from lightning_cyclic.runtime.predict import guesses, knows

KNOWN = {
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, dampening=0.5),
    "penalised": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.1),
    "nesterov": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True),
    "ascending": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, maximize=True),
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.1, weight_decay=0.1),
    "amsgrad": lambda ps: torch.optim.Adam(ps, lr=0.1, amsgrad=True),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.1, weight_decay=0.1),
}
OTHERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.1),
    "nadam": lambda ps: torch.optim.NAdam(ps, lr=0.1),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=0.1, momentum=0.9),
}
MAKERS = KNOWN | OTHERS


def pair():
    """Return two matrices with zeros of both signs among their elements."""
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(2, 2))]
    for weight in weights:
        weight.data[0] = torch.tensor([0.0, -0.0])
    return weights


def update(optimizer, weights, gradients=None):
    torch.manual_seed(1)
    for k, p in enumerate(weights):
        p.grad = torch.randn_like(p) if gradients is None else gradients[k].clone()
    optimizer.step()
    optimizer.zero_grad()


def guess(optimizer, weights, updates, **more):
    found = guesses(optimizer, weights, updates, more.get("groups", optimizer.param_groups),
                    more.get("displacements", {}))  # fmt: skip
    return list(found)


def assert_same_bits(given, wanted):
    bits = [[x.detach().clone().view(torch.int32) for x in each] for each in (given, wanted)]
    assert all(torch.equal(a, b) for a, b in zip(*bits, strict=True))


@pytest.mark.parametrize("name", MAKERS)
def test_weights_stay_where_nothing_moves_and_nothing_else_changes(name):
    weights = pair()
    optimizer = MAKERS[name](weights)
    before = len(optimizer.state)
    assert_same_bits(guess(optimizer, weights, 3), weights)  # before the first update
    assert len(optimizer.state) == before  # no entry was made
    update(optimizer, weights)
    moved = {p: torch.ones_like(p) for p in weights}
    state = copy.deepcopy((weights, optimizer.state_dict()))
    assert_same_bits(guess(optimizer, weights, 0, displacements=moved), weights)
    for x, p in zip(guess(optimizer, weights, 2, displacements=moved), weights, strict=True):
        assert not torch.equal(x, p)
        assert x.shape == p.shape
        assert not x.requires_grad
        x.zero_()  # its own storage
    torch.testing.assert_close((weights, optimizer.state_dict()), state, rtol=0, atol=0)
    groups = [{**group, "lr": 0.0} for group in optimizer.param_groups]
    assert_same_bits(guess(optimizer, weights, 2, groups=groups, displacements=moved), weights)


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("updates", [1, 3])
def test_the_way_is_that_of_steps_whose_gradients_keep_its_averages(name, updates):
    """Give the optimizer its own averages as gradients, so that it goes on along them."""
    weights = pair()
    optimizer = KNOWN[name](weights)
    assert knows(optimizer)
    update(optimizer, weights)
    found = guess(optimizer, weights, updates)
    lr, lengths = 0.1, [(x - p).norm() for x, p in zip(found, weights, strict=True)]
    for p, x in zip(weights, found, strict=True):
        state = optimizer.state[p]
        if "momentum_buffer" in state:
            expected = p - updates * lr * state["momentum_buffer"]
        else:
            squares = state["max_exp_avg_sq" if name == "amsgrad" else "exp_avg_sq"]
            direction = (state["exp_avg"] / 0.1) / ((squares / 0.001).sqrt() + 1e-8)
            expected = p.detach().clone()
            for _ in range(updates):
                expected = expected * (1 - lr * 0.1 * (name == "adamw")) - lr * direction
        torch.testing.assert_close(x, expected.detach())
    assert min(lengths) > 0


@pytest.mark.parametrize("name", OTHERS)
def test_others_go_on_by_their_last_displacement(name):
    weights = pair()
    optimizer = OTHERS[name](weights)
    assert not knows(optimizer)
    update(optimizer, weights)
    assert_same_bits(guess(optimizer, weights, 2), weights)  # none is known
    moved = {p: torch.full_like(p, 0.5) for p in weights}
    expected = [p.detach() - 2 * 0.1 * 0.5 for p in weights]
    torch.testing.assert_close(guess(optimizer, weights, 2, displacements=moved), expected)


def test_a_subclass_with_a_step_of_its_own_is_another_optimizer():
    class Own(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)

    class Named(torch.optim.SGD):
        pass

    assert not knows(Own(pair(), lr=0.1, momentum=0.9))
    assert knows(Named(pair(), lr=0.1, momentum=0.9))


def test_every_group_has_its_own_numbers_and_they_may_be_those_of_another_step():
    weights = pair()
    groups = [{"params": [weights[0]]}, {"params": [weights[1]], "lr": torch.tensor(0.5)}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    update(optimizer, weights, [torch.ones(3, 2), torch.ones(2, 2)])
    expected = [weights[1].detach() - 1.0, weights[0].detach() - 0.2]
    torch.testing.assert_close(guess(optimizer, weights[::-1], 2), expected)
    before = [dict(group) for group in optimizer.param_groups]
    optimizer.param_groups[0]["lr"] = 7.0
    found = guess(optimizer, weights[::-1], 2, groups=before)
    torch.testing.assert_close(found, expected)


def test_what_the_optimizer_does_not_train_stays():
    weights = pair()
    optimizer = KNOWN["adamw"](weights[:1])
    update(optimizer, weights[:1])
    assert_same_bits(guess(optimizer, weights[1:], 2), weights[1:])


@pytest.mark.parametrize("name", ["momentum", "adam"])
def test_complex_weights_move_as_pairs_of_real_ones(name):
    torch.manual_seed(0)
    one = nn.Parameter(torch.randn(3, dtype=torch.complex64))
    two = nn.Parameter(torch.view_as_real(one.detach()).clone())
    slope = torch.randn(3, dtype=torch.complex64)
    found = []
    for p, gradient in ((one, slope), (two, torch.view_as_real(slope))):
        optimizer = KNOWN[name]([p])
        update(optimizer, [p], [gradient])
        found += guess(optimizer, [p], 2)
    torch.testing.assert_close(torch.view_as_real(found[0]), found[1])
