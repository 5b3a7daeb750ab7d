"""Prediction answers out of place, stays where nothing moves, and says what it cannot do."""

import copy
from collections import deque

import pytest
import torch
from torch import nn

from lightning_cyclic.errors import ConfigurationError
from lightning_cyclic.runtime.prediction.prediction import Displacements, knows, predict

REMEMBERING = {
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.1),
    "nesterov": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.1, amsgrad=True),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.1, weight_decay=0.1),
    "nadam": lambda ps: torch.optim.NAdam(ps, lr=0.1),
    "radam": lambda ps: torch.optim.RAdam(ps, lr=0.1),
    "adamax": lambda ps: torch.optim.Adamax(ps, lr=0.1),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=0.1, momentum=0.9),
    "rprop": lambda ps: torch.optim.Rprop(ps, lr=0.1),
}
if hasattr(torch.optim, "Muon"):
    REMEMBERING["muon"] = lambda ps: torch.optim.Muon(ps, lr=0.1)
FORGETFUL = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=0.1, centered=True),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.1),
    "adadelta": lambda ps: torch.optim.Adadelta(ps, lr=0.1),
    "adafactor": lambda ps: torch.optim.Adafactor(ps, lr=0.1),
}
MAKERS = REMEMBERING | {f"forgetful {name}": make for name, make in FORGETFUL.items()}


def pair():
    """Return two matrices with zeros of both signs among their elements."""
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(2, 2))]
    for weight in weights:
        weight.data[0] = torch.tensor([0.0, -0.0])
    return weights


def update(optimizer, weights, seed=1):
    torch.manual_seed(seed)
    gradients = {p: torch.randn_like(p) for p in weights}
    for p, gradient in gradients.items():
        p.grad = gradient.clone()
    optimizer.step()
    optimizer.zero_grad()
    return gradients


def quiet():
    return Displacements(say=lambda _: None)


def bits(tensors):
    return [t.detach().clone().view(torch.int32) for t in tensors]


def assert_same_bits(given, wanted):
    assert all(torch.equal(a, b) for a, b in zip(bits(given), bits(wanted), strict=True))


@pytest.mark.parametrize("name", MAKERS)
class TestStayingPut:
    def test_before_the_first_update(self, name):
        weights = pair()
        optimizer = MAKERS[name](weights)
        state = copy.deepcopy(optimizer.state_dict()["state"])
        assert_same_bits(predict(optimizer, weights, 3, fallback=quiet()), weights)
        if name in REMEMBERING:
            assert_same_bits(predict(optimizer, weights, 3), weights)
        assert len(optimizer.state_dict()["state"]) == len(state)  # no entry was made

    def test_at_horizon_0(self, name):
        weights = pair()
        optimizer = MAKERS[name](weights)
        update(optimizer, weights)
        assert_same_bits(predict(optimizer, weights, 0), weights)
        assert_same_bits(predict(optimizer, weights, 0, lrs=[], shape="geometric"), weights)

    def test_at_learning_rate_0(self, name):
        weights = pair()
        optimizer = MAKERS[name](weights)
        update(optimizer, weights)
        assert_same_bits(predict(optimizer, weights, 2, lrs=[[0.0], [0.0]]), weights)
        optimizer.param_groups[0]["lr"] = 0.0
        assert_same_bits(predict(optimizer, weights, 2), weights)

    def test_nothing_else_changes(self, name):
        weights = pair()
        optimizer = MAKERS[name](weights)
        gradients = update(optimizer, weights)
        for p in weights:
            p.grad = torch.ones_like(p)
        before = copy.deepcopy((weights, optimizer.state_dict(), list(gradients.values())))
        for shape in ["linear", "geometric"] if name in ("momentum", "adam") else ["linear"]:
            guesses = predict(
                optimizer, weights, 2, shape=shape, fallback=quiet(), last_gradients=gradients
            )
            for guess, p in zip(guesses, weights, strict=True):
                assert guess.shape == p.shape
                assert not guess.requires_grad
                guess.zero_()  # its own storage
        after = (weights, optimizer.state_dict(), list(gradients.values()))
        torch.testing.assert_close(after, before, rtol=0, atol=0)
        assert all(torch.equal(p.grad, torch.ones_like(p)) for p in weights)


@pytest.mark.parametrize("name", REMEMBERING)
def test_the_state_alone_moves_the_weights(name):
    weights = pair()
    optimizer = REMEMBERING[name](weights)
    assert knows(optimizer)
    update(optimizer, weights)
    near, far = predict(optimizer, weights, 1), predict(optimizer, weights, 5)
    for p, a, b in zip(weights, near, far, strict=True):
        assert 0 < (a - p).norm() < (b - p).norm()


@pytest.mark.parametrize("name", FORGETFUL)
def test_the_last_displacement_stands_in_and_that_is_said_once(name):
    weights, said = pair(), []
    optimizer, fallback = FORGETFUL[name](weights), Displacements(said.append)
    assert not knows(optimizer)
    update(optimizer, weights)
    before = [p.detach().clone() for p in weights]
    update(optimizer, weights, seed=2)
    for p, old in zip(weights, before, strict=True):
        fallback.note(p, old, p, lr=0.1)
        fallback.note(p, p, p, lr=0.0)  # tells nothing, so the direction stays
    for _ in range(2):
        guesses = predict(optimizer, weights, 2, lrs=[[0.1], [0.2]], fallback=fallback)
    for guess, p, old in zip(guesses, weights, before, strict=True):
        torch.testing.assert_close(guess, p - 3 * (old - p))
    assert len(said) == 1
    assert type(optimizer).__name__ in said[0]


def test_by_default_a_warning_says_that_displacements_stand_in():
    weights = pair()
    with pytest.warns(UserWarning, match="the updates of ASGD are not known"):
        predict(torch.optim.ASGD(weights), weights, 1, fallback=Displacements())


def test_the_last_gradient_goes_before_the_last_displacement():
    weights = pair()
    optimizer, fallback = torch.optim.SGD(weights, lr=0.5), quiet()
    fallback.note(weights[0], torch.ones(3, 2), torch.zeros(3, 2), lr=1.0)
    fallback.note(weights[1], torch.ones(2, 2), torch.zeros(2, 2), lr=1.0)
    given = {weights[0]: torch.full((3, 2), 2.0)}
    guesses = predict(optimizer, weights, 1, fallback=fallback, last_gradients=given)
    torch.testing.assert_close(guesses, [weights[0] - 1.0, weights[1] - 0.5])
    guesses = predict(optimizer, weights, 1, last_gradients=given)
    assert_same_bits(guesses[1:], weights[1:])  # it got no gradient yet


def test_every_group_has_its_own_numbers():
    weights = pair()
    groups = [{"params": [weights[0]]}, {"params": [weights[1]], "lr": 0.5, "momentum": 0.5}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    gradients = update(optimizer, weights)
    guesses = predict(optimizer, weights[::-1], 2)
    expected = [weights[1] - 1.0 * gradients[weights[1]], weights[0] - 0.2 * gradients[weights[0]]]
    torch.testing.assert_close(guesses, expected)
    guesses = predict(optimizer, weights, 2, lrs=[[0.0, 1.0], [0.3, 2.0]])
    expected = [weights[0] - 0.3 * gradients[weights[0]], weights[1] - 3.0 * gradients[weights[1]]]
    torch.testing.assert_close(guesses, expected)


def test_a_snapshot_of_hyper_parameters_stands_in_for_the_present_ones():
    weights = pair()
    optimizer = torch.optim.AdamW(weights, lr=0.1)
    update(optimizer, weights)
    wanted = predict(optimizer, weights, 3)
    snapshot = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    optimizer.param_groups[0].update(lr=1.0, betas=(0.5, 0.5), weight_decay=0.5)
    assert_same_bits(predict(optimizer, weights, 3, groups=snapshot), wanted)


@pytest.mark.parametrize("name", ["momentum", "adamw"])
def test_a_learning_rate_may_be_a_tensor(name):
    weights = pair()
    optimizer = REMEMBERING[name](weights)
    update(optimizer, weights)
    wanted = predict(optimizer, weights, 2, lrs=[[0.5], [0.25]])
    ahead = [[torch.tensor(0.5)], [torch.tensor([0.25])]]
    assert_same_bits(predict(optimizer, weights, 2, lrs=ahead), wanted)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.5)
    once = predict(optimizer, weights, 1)
    assert_same_bits(once, predict(optimizer, weights, 1, lrs=[[0.5]]))


@pytest.mark.parametrize("name", ["momentum", "adam", "nadam"])
def test_complex_weights_move_as_pairs_of_real_ones(name):
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(3, dtype=torch.complex128))
    real = nn.Parameter(torch.view_as_real(weight.detach()).clone())
    gradient = torch.randn(3, dtype=torch.complex128)
    guesses = []
    for p, g in [(weight, gradient), (real, torch.view_as_real(gradient))]:
        optimizer = REMEMBERING[name]([p])
        p.grad = g.clone()
        optimizer.step()
        guesses += predict(optimizer, [p], 2, last_gradients={p: g})
    torch.testing.assert_close(torch.view_as_real(guesses[0]), guesses[1])


@pytest.mark.parametrize("name", ["momentum", "adamw"])
@pytest.mark.parametrize("shape", ["linear", "geometric"])
def test_the_dtype_of_the_weights_is_kept(name, shape):
    weights = [nn.Parameter(p.detach().bfloat16()) for p in pair()]
    optimizer = REMEMBERING[name](weights)
    update(optimizer, weights)
    optimizer.state[weights[0]] = {  # as some keep it
        k: v.float() for k, v in optimizer.state[weights[0]].items()
    }
    guesses = predict(optimizer, weights, 2, shape=shape)
    assert [g.dtype for g in guesses] == [torch.bfloat16] * 2


def test_frozen_weights_stay_though_the_optimizer_does_not_have_them():
    weights = pair()
    weights[0].requires_grad_(False)
    optimizer = torch.optim.SGD(weights[1:], lr=0.1, momentum=0.9)
    update(optimizer, weights[1:])
    guesses = predict(optimizer, weights, 2)
    assert_same_bits(guesses[:1], weights[:1])
    assert not torch.equal(guesses[1], weights[1])
    assert predict(optimizer, [], 2) == []


def momentum_after_an_update():
    weights = pair()
    optimizer = REMEMBERING["momentum"](weights)
    update(optimizer, weights)
    return weights, optimizer


class TestBadInput:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"horizon": -1}, "horizon of -1 updates; allowed: 0 or more"),
            ({"lrs": [[0.1]]}, r"of 1 updates for \[1\] groups; allowed: 2 updates .* 1 groups"),
            ({"lrs": [[0.1, 0.1], [0.1]]}, r"of 2 updates for \[1, 2\] groups; allowed"),
            ({"groups": []}, "of 0 groups; allowed: one mapping for each .* 1 groups"),
            ({"shape": "square"}, "prediction shape 'square' is unknown; allowed: linear, geom"),
        ],
    )
    def test_numbers_that_do_not_fit(self, options, message):
        weights, optimizer = momentum_after_an_update()
        with pytest.raises(ConfigurationError, match=message):
            predict(optimizer, weights, **{"horizon": 2, **options})

    @pytest.mark.parametrize("name", ["nadam", "rmsprop", "forgetful adagrad", "rprop"])
    def test_no_geometric_form(self, name):
        weights = pair()
        with pytest.raises(ConfigurationError, match=r"allowed: SGD, Adam, AdamW; use a linear"):
            predict(MAKERS[name](weights), weights, 1, shape="geometric", fallback=quiet())

    @pytest.mark.parametrize("name", FORGETFUL)
    def test_nothing_to_go_by(self, name):
        weights = pair()
        with pytest.raises(ConfigurationError, match=r"fallback=Displacements\(\)"):
            predict(FORGETFUL[name](weights), weights, 1)

    def test_gradients_do_not_help_an_unknown_optimizer(self):
        weights = pair()
        given = {p: torch.ones_like(p) for p in weights}
        with pytest.raises(ConfigurationError, match="the updates of ASGD are not known"):
            predict(torch.optim.ASGD(weights), weights, 1, last_gradients=given)

    def test_a_parameter_of_somebody_else(self):
        weights, optimizer = momentum_after_an_update()
        with pytest.raises(ConfigurationError, match=r"parameter 1 of shape \(5,\) is in no grou"):
            predict(optimizer, [weights[0], nn.Parameter(torch.ones(5))], 1)

    def test_the_state_of_another_parameter(self):
        weights, optimizer = momentum_after_an_update()
        optimizer.state[weights[0]] = optimizer.state[weights[1]]
        message = r"'momentum_buffer' of parameter 0 has shape \(2, 2\); allowed: \(3, 2\)"
        with pytest.raises(ConfigurationError, match=message):
            predict(optimizer, weights, 1)

    def test_sparse_gradients(self):
        weights, optimizer = momentum_after_an_update()
        given = {weights[0]: torch.eye(3, 2).to_sparse()}
        with pytest.raises(ConfigurationError, match="gradient of parameter 0 is sparse; allowed"):
            predict(optimizer, weights, 1, last_gradients=given)
        optimizer.state[weights[1]]["momentum_buffer"] = torch.eye(2).to_sparse()
        with pytest.raises(ConfigurationError, match="'momentum_buffer' of parameter 1 is sparse"):
            predict(optimizer, weights, 1)


# Stability on quadratics: the gradient lambda * w is tau updates old. Only lr * lambda counts, so
# a vector of lambdas at lr = 1 tries several at a time.

LIMITS = [  # tau, momentum, the limit of lr * lambda without and with prediction
    (1, 0.0, 1.00000, 0.61803),
    (3, 0.0, 0.44504, 0.26556),
    (7, 0.0, 0.20906, 0.12464),
    (1, 0.9, 0.10000, 0.27016),
    (3, 0.9, 0.03478, 0.07226),
    (7, 0.9, 0.01575, 0.02321),
]


def stability_limit(tau, momentum, predicted):
    """Bisect the roots of w' - w = momentum * (w - w_1) - x * read, read = w_tau or predicted."""
    ahead = tau if predicted else 0
    low, high = 0.0, 2.0
    while high - low > 1e-9:
        x = (low + high) / 2
        coefficients = torch.zeros(tau + 2, dtype=torch.float64)  # of w, w_1, ..., w_(tau + 1)
        coefficients[0] += 1 + momentum
        coefficients[1] -= momentum
        coefficients[tau] -= x * (1 + ahead)
        coefficients[tau + 1] += x * ahead
        companion = torch.diag(torch.ones(tau + 1, dtype=torch.float64), -1)
        companion[0] = coefficients
        stable = torch.linalg.eigvals(companion).abs().max() < 1
        low, high = (x, high) if stable else (low, x)
    return low


def growth(sizes, tau, momentum, predicted):
    """Return how much larger w swings at the end of a run than half-way, for each lr * lambda."""
    weight = nn.Parameter(torch.ones_like(sizes))
    optimizer = torch.optim.SGD([weight], lr=1.0, momentum=momentum)
    read, swings = deque([weight.detach().clone()] * tau), []
    for t in range(3000):
        given = {} if weight.grad is None else {weight: weight.grad}
        horizon = min(t, tau) if predicted else 0
        read += predict(optimizer, [weight], horizon, last_gradients=given)
        weight.grad = sizes * read.popleft()
        optimizer.step()
        swings.append(weight.detach().abs())
    halfway, end = (torch.stack(swings[t - 500 : t]).amax(0) for t in (1500, 3000))
    return end / halfway


@pytest.mark.parametrize(("tau", "momentum", "plain", "with_prediction"), LIMITS)
@pytest.mark.parametrize("predicted", [False, True])
def test_stability_limits_on_quadratics(tau, momentum, plain, with_prediction, predicted):
    limit = stability_limit(tau, momentum, predicted)
    assert limit == pytest.approx(with_prediction if predicted else plain, abs=6e-6)
    if momentum == 0 and not predicted:
        closed = 2 * torch.sin(torch.tensor(torch.pi / (4 * tau + 2), dtype=torch.float64))
        assert limit == pytest.approx(closed.item(), abs=1e-8)
    around = torch.tensor([0.97, 1.03], dtype=torch.float64) * limit
    stable, unstable = growth(around, tau, momentum, predicted)
    assert stable < 1 < unstable
