"""Error feedback is one-step prediction seen from elsewhere; PipeMare's rule is a formula."""

import pytest
import torch
from torch import nn

from lightning_cyclic.errors import ConfigurationError
from lightning_cyclic.runtime.prediction.delays import ErrorFeedback, pipemare_lr
from lightning_cyclic.runtime.prediction.prediction import predict

MATRIX = torch.tensor([[2.0, 0.3, 0.1], [0.3, 1.0, 0.2], [0.1, 0.2, 0.5]], dtype=torch.float64)
OPTIMIZERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.05),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.02, momentum=0.9),
    "nesterov": lambda ps: torch.optim.SGD(ps, lr=0.02, momentum=0.9, nesterov=True),
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.05),
}


def gradient(weights):
    return MATRIX @ weights + weights**3


def start():
    return torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)


def with_error_feedback(make, steps):
    """2BW: the gradient of W_(t-1), W_0 twice, and every update corrected."""
    weight, feedback = nn.Parameter(start()), ErrorFeedback()
    optimizer = make([weight])
    trace = [weight.detach().clone()]
    for t in range(steps):
        before = weight.detach().clone()
        weight.grad = gradient(trace[max(t - 1, 0)])
        optimizer.step()
        weight.data = feedback.correct(weight, before, weight)
        trace.append(weight.detach().clone())
    return trace


def with_prediction(make, steps):
    """2BW whose forwards read V_(t-1) moved on by one predicted update."""
    weight = nn.Parameter(start())
    optimizer = make([weight])
    read = [weight.detach().clone()]
    for t in range(steps):
        weight.grad = gradient(read[max(t - 1, 0)])
        optimizer.step()
        read += predict(optimizer, [weight], 1, last_gradients={weight: weight.grad})
    return read


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_error_feedback_is_one_step_prediction(name):
    make = OPTIMIZERS[name]
    corrected, predicted = with_error_feedback(make, 60), with_prediction(make, 60)
    torch.testing.assert_close(corrected, predicted, rtol=0, atol=1e-12)
    assert (corrected[-1] - corrected[0]).norm() > 0.5  # it went somewhere


def test_each_update_is_doubled_less_the_one_before():
    weight, feedback = nn.Parameter(torch.zeros(2)), ErrorFeedback()
    at = torch.tensor([8.0, 8.0])
    for update, applied in [(1.0, 2.0), (3.0, 5.0), (0.0, -3.0)]:
        after = feedback.correct(weight, at, at - update)
        assert torch.equal(after, at - applied)
        at = after
    assert torch.equal(feedback.updates[weight], torch.zeros(2))
    assert torch.equal(weight, torch.zeros(2))  # writing is the caller's


def test_pipemare_starts_at_a_fraction_and_ends_at_the_base():
    assert pipemare_lr(0.3, 3, 0, 10) == pytest.approx(0.1)
    assert pipemare_lr(0.3, 3, 5, 10) == pytest.approx(0.3 / 3**0.5)
    assert pipemare_lr(0.3, 3, 10, 10) == pipemare_lr(0.3, 3, 99, 10) == 0.3
    assert pipemare_lr(0.3, 3, 0, 0) == 0.3


@pytest.mark.parametrize("delay", [0, 0.25, 1])
def test_pipemare_never_raises_the_learning_rate(delay):
    assert pipemare_lr(0.3, delay, 0, 10) == 0.3


@pytest.mark.parametrize("numbers", [(-1, 0, 1), (1, -1, 1), (1, 0, -1)])
def test_pipemare_refuses_negative_numbers(numbers):
    with pytest.raises(ConfigurationError, match="allowed: 0 or more of each"):
        pipemare_lr(0.1, *numbers)
