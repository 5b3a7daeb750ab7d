"""Each direction is the one that torch's own optimizer took, or takes if it goes on so."""

import copy

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop

from lightning_cyclic.runtime.prediction.directions import RULES, advance, rule_of
from lightning_cyclic.runtime.prediction.prediction import predict

EXACT = {"rtol": 0, "atol": 1e-12}
MUON = getattr(torch.optim, "Muon", None)
needs_muon = pytest.mark.skipif(MUON is None, reason="this torch has no Muon")


class History:
    """A few updates of a matrix and of what happened in the last one."""

    def __init__(self, kind, *, constant=False, updates=6, seed=0, **options):
        generator = torch.Generator().manual_seed(seed)

        def random():
            return torch.randn(4, 3, dtype=torch.float64, generator=generator)

        self.weight = nn.Parameter(random())
        self.optimizer = kind([self.weight], **{"lr": 0.01, **options})
        self.gradient = random()
        for _ in range(updates):
            self.gradient = self.gradient if constant else random()
            self.before = self.weight.detach().clone()
            self.step(self.gradient)

    def step(self, gradient):
        self.weight.grad = gradient.clone()
        self.optimizer.step()
        self.weight.grad = None

    @property
    def now(self):
        return self.weight.detach()

    @property
    def state(self):
        return self.optimizer.state[self.weight]

    def guess(self, horizon, *, with_gradient=False, **options):
        given = {self.weight: self.gradient} if with_gradient else None
        [guess] = predict(self.optimizer, [self.weight], horizon, last_gradients=given, **options)
        return guess

    def really(self, horizon, gradient):
        """Step a copy with the gradients that ``gradient(copy)`` gives."""
        ahead = copy.deepcopy(self)
        for _ in range(horizon):
            ahead.step(gradient(ahead))
        return ahead.now


REPEATED = [  # (optimizer, options): with the last gradient, the last displacement comes again
    (SGD, {}),
    (SGD, {"maximize": True}),
    (SGD, {"momentum": 0.9}),
    (SGD, {"momentum": 0.9, "dampening": 0.3}),
    (SGD, {"momentum": 0.9, "weight_decay": 0.1}),  # the buffer has absorbed the decay
    (SGD, {"momentum": 0.9, "nesterov": True}),
    (SGD, {"momentum": 0.9, "nesterov": True, "maximize": True}),
    (Adam, {}),
    (Adam, {"weight_decay": 0.1}),
    (Adam, {"amsgrad": True}),
    (Adam, {"maximize": True, "betas": (0.8, 0.95), "eps": 1e-3}),
    (AdamW, {"weight_decay": 0.0}),
    (NAdam, {}),
    (NAdam, {"maximize": True, "momentum_decay": 0.1}),
    (RAdam, {"betas": (0.9, 0.9)}),  # rectified from the 6th update on
    (RAdam, {"betas": (0.9, 0.9), "updates": 9}),
    (RAdam, {"updates": 3}),  # not yet rectified
    (Adamax, {"weight_decay": 0.1}),
    (RMSprop, {}),
    (RMSprop, {"centered": True, "maximize": True}),
    (RMSprop, {"momentum": 0.9, "weight_decay": 0.1}),
    (RMSprop, {"momentum": 0.9, "centered": True}),
    (Adagrad, {"initial_accumulator_value": 0.1}),
    (Adagrad, {"maximize": True}),
]


@pytest.mark.parametrize(("kind", "options"), REPEATED)
@pytest.mark.parametrize("horizon", [1, 4])
def test_linear_repeats_the_last_displacement(kind, options, horizon):
    past = History(kind, **options)
    expected = past.now - horizon * (past.before - past.now)
    guess = past.guess(horizon, with_gradient=True)
    torch.testing.assert_close(guess, expected, **EXACT)


@pytest.mark.parametrize(("kind", "options"), REPEATED)
def test_a_learning_rate_ahead_scales_the_displacement(kind, options):
    past = History(kind, **options)
    expected = past.now - (0.02 + 0.05) / 0.01 * (past.before - past.now)
    guess = past.guess(2, with_gradient=True, lrs=[[0.02], [0.05]])
    torch.testing.assert_close(guess, expected, **EXACT)


@pytest.mark.parametrize("kind", [AdamW, NAdam, RAdam])
def test_decoupled_decay_shrinks_the_weights_at_each_step(kind):
    decoupled = {} if kind is AdamW else {"decoupled_weight_decay": True}
    past = History(kind, weight_decay=0.3, **decoupled)
    direction = (past.before * (1 - 0.01 * 0.3) - past.now) / 0.01
    expected = past.now
    for lr in (0.02, 0.05, 0.03):
        expected = (1 - lr * 0.3) * expected - lr * direction
    guess = past.guess(3, with_gradient=True, lrs=[[0.02], [0.05], [0.03]])
    torch.testing.assert_close(guess, expected, **EXACT)


@pytest.mark.parametrize("dampening", [0.0, 0.4])
@pytest.mark.parametrize("decay", [0.0, 0.2])
@pytest.mark.parametrize("maximize", [False, True])
def test_sgd_goes_on_as_with_gradients_that_keep_its_buffer(dampening, decay, maximize):
    past = History(SGD, momentum=0.9, dampening=dampening, weight_decay=decay, maximize=maximize)

    def keeping(ahead):
        wanted = 0.1 / (1 - dampening) * ahead.state["momentum_buffer"] - decay * ahead.now
        return -wanted if maximize else wanted

    torch.testing.assert_close(past.guess(5), past.really(5, keeping), **EXACT)


def test_nesterov_without_a_gradient_assumes_the_one_that_keeps_the_buffer():
    past = History(SGD, momentum=0.9, nesterov=True)
    went = past.really(5, lambda ahead: 0.1 * ahead.state["momentum_buffer"])
    torch.testing.assert_close(past.guess(5), went, **EXACT)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_adds_the_penalty_at_each_step_to_a_gradient_that_was_kept(momentum):
    past = History(SGD, momentum=momentum, nesterov=momentum > 0, weight_decay=0.3)
    buffer = past.state["momentum_buffer"] if momentum else 0
    expected = past.now
    for _ in range(4):
        expected = expected - 0.01 * (past.gradient + 0.3 * expected + momentum * buffer)
    torch.testing.assert_close(past.guess(4, with_gradient=True), expected, **EXACT)


@pytest.mark.parametrize("maximize", [False, True])
def test_plain_sgd_with_a_constant_gradient_is_foreseen_exactly(maximize):
    past = History(SGD, constant=True, weight_decay=0.3, maximize=maximize)
    went = past.really(5, lambda ahead: ahead.gradient)
    torch.testing.assert_close(past.guess(5, with_gradient=True), went, **EXACT)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Adam, {}),
        (Adam, {"amsgrad": True, "maximize": True}),
        (AdamW, {"weight_decay": 0.3}),
        (AdamW, {"weight_decay": 0.3, "amsgrad": True}),
        (Adamax, {"eps": 1e-16}),
    ],
)
def test_adam_with_a_constant_gradient_is_foreseen_exactly(kind, options):
    past = History(kind, constant=True, **options)
    went = past.really(5, lambda ahead: ahead.gradient)
    torch.testing.assert_close(past.guess(5), went, **EXACT)


def test_nadam_without_a_gradient_assumes_its_mean_by_its_momentum_schedule():
    past = History(NAdam, weight_decay=0.1, momentum_decay=0.05)
    t, m, v = 6, past.state["exp_avg"], past.state["exp_avg_sq"]
    mu = [0.9 * (1 - 0.5 * 0.96 ** (i * 0.05)) for i in range(1, t + 2)]
    product = float(past.state["mu_product"])
    torch.testing.assert_close(product, float(torch.tensor(mu[:t]).prod()), rtol=1e-5, atol=0)
    mean = mu[t] * m / (1 - product * mu[t])
    mean = mean + (1 - mu[t - 1]) * (m / (1 - 0.9**t)) / (1 - product)
    direction = mean / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
    torch.testing.assert_close(past.guess(3), past.now - 0.03 * direction, **EXACT)


def test_nadam_adds_the_penalty_to_a_gradient_that_was_kept():
    past = History(NAdam, weight_decay=0.1)
    bare = History(NAdam, weight_decay=0.1)
    bare.gradient = past.gradient + 0.1 * past.now
    bare.optimizer.param_groups[0]["weight_decay"] = 0.0
    guess = past.guess(3, with_gradient=True)
    torch.testing.assert_close(guess, bare.guess(3, with_gradient=True), **EXACT)


@pytest.mark.parametrize("centered", [False, True])
def test_rmsprop_scales_the_last_gradient_with_the_penalty(centered):
    past = History(RMSprop, weight_decay=0.3, centered=centered)
    v = past.state["square_avg"] - (past.state["grad_avg"] ** 2 if centered else 0)
    direction = (past.gradient + 0.3 * past.now) / (v.sqrt() + 1e-8)
    guess = past.guess(3, with_gradient=True)
    torch.testing.assert_close(guess, past.now - 0.03 * direction, **EXACT)


@pytest.mark.parametrize("horizon", [1, 4])
@pytest.mark.parametrize("options", [{}, {"maximize": True}, {"updates": 1}])
def test_rprop_repeats_its_last_step_at_any_learning_rate(options, horizon):
    past = History(Rprop, **options)
    expected = past.now - horizon * (past.before - past.now)
    lrs = [[0.3 / (i + 1)] for i in range(horizon)]
    for guess in (past.guess(horizon), past.guess(horizon, lrs=lrs)):
        torch.testing.assert_close(guess, expected, **EXACT)


def test_rprop_with_a_constant_gradient_takes_longer_steps_than_foreseen():
    past = History(Rprop, constant=True)
    ahead = past.really(1, lambda copy: copy.gradient)
    foreseen = past.now - past.guess(1)
    torch.testing.assert_close(past.now - ahead, 1.2 * foreseen, **EXACT)


def test_adagrad_slows_down_along_the_horizon():
    past = History(Adagrad, weight_decay=0.3, lr_decay=0.2, maximize=True)
    direction = (-past.gradient + 0.3 * past.now) / (past.state["sum"].sqrt() + 1e-10)
    expected = past.now
    for updates in (6, 7, 8):
        expected = expected - 0.01 / (1 + updates * 0.2) * direction
    torch.testing.assert_close(past.guess(3, with_gradient=True), expected, **EXACT)


@needs_muon
@pytest.mark.parametrize("adjust", [None, "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [False, True])
def test_muon_repeats_its_orthogonalised_update_and_decays(adjust, nesterov):
    options = {"adjust_lr_fn": adjust, "nesterov": nesterov, "ns_steps": 3, "weight_decay": 0.2}
    past = History(MUON, **options)
    direction = (past.before * (1 - 0.01 * 0.2) - past.now) / 0.01
    expected = past.now
    for _ in range(3):
        expected = (1 - 0.01 * 0.2) * expected - 0.01 * direction
    torch.testing.assert_close(past.guess(3, with_gradient=True), expected, **EXACT)


@needs_muon
def test_muon_without_a_gradient_orthogonalises_its_average():
    past = History(MUON, nesterov=True)
    went = past.really(3, lambda ahead: ahead.state["momentum_buffer"])
    torch.testing.assert_close(past.guess(3), went, **EXACT)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True},
        {"momentum": 0.9, "dampening": 0.4},
        {"momentum": 0.9, "maximize": True},
        {"momentum": 0.9, "weight_decay": 0.3},
        {"momentum": 0.9, "weight_decay": 0.3, "nesterov": True},
        {"momentum": 0.9, "weight_decay": 0.3, "dampening": 0.4, "maximize": True},
        {"weight_decay": 0.3},
    ],
)
def test_geometric_sgd_is_stepping_with_zero_gradients(options):
    past = History(SGD, **options)
    went = past.really(5, lambda ahead: torch.zeros_like(ahead.now))
    torch.testing.assert_close(past.guess(5, shape="geometric"), went, **EXACT)


def test_geometric_sgd_is_the_published_sum():
    past = History(SGD, momentum=0.9)
    reach = 0.01 * (0.9 - 0.9**6) / (1 - 0.9)
    expected = past.now - reach * past.state["momentum_buffer"]
    torch.testing.assert_close(past.guess(5, shape="geometric"), expected, **EXACT)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Adam, {}),
        (Adam, {"maximize": True, "betas": (0.8, 0.95)}),
        (Adam, {"weight_decay": 0.3}),
        (AdamW, {"weight_decay": 0.3}),
        (AdamW, {"weight_decay": 0.3, "amsgrad": True}),
    ],
)
def test_geometric_adam_is_stepping_with_zero_gradients_and_held_second_moments(kind, options):
    past = History(kind, **options)
    squares = past.state["exp_avg_sq"].clone()
    _, beta2 = past.optimizer.param_groups[0]["betas"]
    penalty = options.get("weight_decay", 0) if kind is Adam else 0

    def zero(ahead):  # set so that after the step the second moment is what it was
        seen = (1 - beta2) * (penalty * ahead.now) ** 2
        ahead.state["exp_avg_sq"].copy_((squares - seen) / beta2)
        return torch.zeros_like(ahead.now)

    torch.testing.assert_close(past.guess(5, shape="geometric"), past.really(5, zero), **EXACT)


def test_geometric_adam_is_the_published_sum():
    past = History(Adam)
    m, v, expected = past.state["exp_avg"], past.state["exp_avg_sq"], past.now
    for i, lr in enumerate([0.02, 0.0, 0.05], start=1):
        scale = (v / (1 - 0.999 ** (6 + i))).sqrt() + 1e-8
        expected = expected - lr * 0.9**i * m / (1 - 0.9 ** (6 + i)) / scale
    guess = past.guess(3, shape="geometric", lrs=[[0.02], [0.0], [0.05]])
    torch.testing.assert_close(guess, expected, **EXACT)


def test_advance_leaves_the_bits_where_the_direction_is_zero():
    weights = torch.tensor([0.0, -0.0, 1.0])
    ahead = advance(weights, torch.zeros(3), [0.1, 0.2])
    assert torch.equal(ahead.view(torch.int32), weights.view(torch.int32))


def test_a_subclass_counts_as_its_parent_unless_it_steps_in_its_own_way():
    class Named(SGD):
        pass

    class Different(SGD):
        def step(self, closure=None):
            return super().step(closure)

    weights = [nn.Parameter(torch.ones(1))]
    assert rule_of(Named(weights)) is RULES[SGD]
    assert rule_of(Different(weights)) is None
    assert rule_of(torch.optim.Adadelta(weights)) is None
    for kind in set(RULES) - {MUON}:
        assert rule_of(kind(weights, lr=0.1)) == RULES[kind]
