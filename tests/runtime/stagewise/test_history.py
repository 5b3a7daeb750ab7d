"""History: forwards that read the version before, and where their gradients go."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_cyclic.runtime.stagewise.history import History

X = torch.linspace(-1, 1, 6).reshape(2, 3)


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


def stages_of(model):
    """Return the parameters of each child, by name; tied ones belong to the first."""
    stages = [{} for _ in model.named_children()]
    for name, p in model.named_parameters():
        stages[[c for c, _ in model.named_children()].index(name.split(".")[0])][name] = p
    return stages


def updated(model, v=3):
    """Return a history in which each parameter has grown by 1 since the version before."""
    history = History(model, stages_of(model), v - 1)
    update(model, history)
    assert history.newest == v
    return history


def update(model, history, by=1.0):
    history.begin_update()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(by)


def outputs(make, x=X):
    """Return what a model gives before and after an update, by the versions of its two stages."""
    found = {}
    for old_a in (0, 1):
        for old_b in (0, 1):
            model = make()
            with torch.no_grad():
                for child, old in ((model.a, old_a), (model.b, old_b)):
                    for p in child.parameters():
                        p.add_(1 - old)
            found[3 - old_a, 3 - old_b] = model(x)
    return found


@pytest.mark.parametrize("versions", [(2, 2), (2, 3), (3, 2), (3, 3)])
def test_each_stage_shows_the_version_that_is_asked_for(versions):
    model = Two()
    history = updated(model)
    own = dict(model.named_parameters())
    with history.shown(dict(enumerate(versions))) as shown:
        output = model(X)
        stand_ins = dict(model.named_parameters())
    assert torch.equal(output, outputs(Two)[versions])
    assert set(shown) == {n for n in own if versions["ab".index(n[0])] == 2}
    for n, p in stand_ins.items():
        assert p is shown.get(n, own[n])
    assert {n: id(p) for n, p in model.named_parameters()} == {n: id(p) for n, p in own.items()}


def test_the_modules_own_are_back_behind_an_error():
    model = Two()
    history, own = updated(model), [id(p) for p in model.parameters()]
    with pytest.raises(KeyError), history.shown({0: 2, 1: 2}):  # noqa: PT012
        assert [id(p) for p in model.parameters()] != own
        raise KeyError
    assert [id(p) for p in model.parameters()] == own


def test_before_an_update_there_is_one_version():
    model = Two()
    history = History(model, stages_of(model), 0)
    expected = model(X)
    with history.shown({0: 0, 1: 0}) as shown:
        assert torch.equal(model(X), expected)
    assert shown == {}
    assert history.previous() == {}


def test_a_version_older_than_the_one_before_is_no_version():
    with pytest.raises(AssertionError), updated(Two()).shown({0: 1}):
        pass


def test_gradients_of_an_older_version_go_to_the_modules_own_parameters():
    reference = Two()
    reference(X).sum().backward()
    model = Two()
    history = updated(model)
    with history.shown({0: 2, 1: 2}) as shown:
        loss = model(X).sum()
    with history.accumulating(shown):
        loss.backward()
    for (n, p), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(p.grad, expected.grad), n
        assert shown[n].grad is None


def test_gradients_are_added_to_those_of_earlier_micro_batches():
    model = Two()
    history = updated(model)
    for p in model.parameters():
        p.grad = torch.full_like(p, 2.0)
    with history.shown({1: 2}) as shown:
        loss = model(X).sum()
    with history.accumulating(shown):
        loss.backward()
    assert torch.equal(model.b.bias.grad, torch.full((3,), 4.0))  # 2 + one for each row
    assert not torch.equal(model.a.bias.grad, torch.full((3,), 2.0))  # of the newest: as ever
    assert all(p.grad is None for p in shown.values())


def test_gradients_are_at_home_behind_a_backward_that_fails():
    model = Two()
    history = updated(model)
    grads = {n: torch.ones_like(p) for n, p in model.named_parameters()}
    for n, p in model.named_parameters():
        p.grad = grads[n]
    with history.shown({0: 2, 1: 2}) as shown:
        pass
    with pytest.raises(KeyError), history.accumulating(shown):
        raise KeyError
    for n, p in model.named_parameters():
        assert p.grad is grads[n]
        assert shown[n].grad is None


def test_a_graph_of_the_older_version_outlives_an_update_of_the_newest():
    """The optimizer changes the newest in place between that forward and its backward."""
    reference = Two()
    reference(X).sum().backward()
    model = Two()
    history = updated(model)
    with history.shown({0: 2, 1: 2}) as shown:
        loss = model(X).sum()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3)
    with history.accumulating(shown):
        loss.backward()
    assert torch.equal(model.a.weight.grad, reference.a.weight.grad)


def test_the_version_before_follows_the_updates():
    model = Two()
    first = model(X)
    history = updated(model)
    second = model(X)
    update(model, history)
    with history.shown({0: 3, 1: 3}):
        assert torch.equal(model(X), second)
    assert not torch.equal(first, second)
    assert history.newest == 4


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.LSTM(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        return self.b(self.a(x)[0])


def test_recurrent_layers_compute_with_the_version_that_is_shown():
    model = Recurrent()
    history, own = updated(model), [id(p) for p in model.a._flat_weights]
    with history.shown({0: 2, 1: 3}) as shown:
        output = model(X)
        assert {id(p) for p in model.a._flat_weights} == {id(p) for p in shown.values()}
    assert torch.equal(output, outputs(Recurrent)[2, 3])
    assert [id(p) for p in model.a._flat_weights] == own
    with history.accumulating(shown):
        output.sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    assert torch.equal(model(X), outputs(Recurrent)[3, 3])


class Tied(Two):
    def __init__(self):
        super().__init__()
        self.b.weight = self.a.weight


def test_tied_modules_show_one_parameter_in_all_places():
    model = Tied()
    history = updated(model)
    before = Tied()
    before(X).sum().backward()
    with history.shown({0: 2, 1: 2}) as shown:
        assert model.a.weight is model.b.weight is shown["a.weight"]
        output = model(X)
    assert model.a.weight is model.b.weight
    assert "b.weight" not in shown
    assert torch.equal(output, before(X))
    with history.accumulating(shown):
        output.sum().backward()
    assert torch.equal(model.a.weight.grad, before.a.weight.grad)


def test_the_version_before_survives_a_checkpoint():
    model = Two()
    history = updated(model)
    saved = history.previous()
    assert set(saved) == {n for n, _ in model.named_parameters()}
    update(model, history)  # what was returned is a copy
    for n, p in Two().named_parameters():
        assert torch.equal(saved[n], p)
    history.put_previous(saved)
    assert torch.equal(history.previous()["a.bias"], saved["a.bias"])
    model = Two()
    updated(model)
    fresh = Two()
    fresh.load_state_dict(model.state_dict())
    other = History(fresh, stages_of(fresh), 4)
    other.put_previous(saved)
    with other.shown({0: 3, 1: 3}):
        assert torch.equal(fresh(X), Two()(X))
    assert torch.equal(fresh(X), model(X))


def test_values_of_a_part_of_the_stages_are_taken():
    """A checkpoint of other stages, or of none."""
    model = Two()
    history = History(model, stages_of(model), 1)
    history.put_previous({})
    assert history.previous() == {}
    history.put_previous({"b.weight": torch.zeros(3, 3), "b.bias": torch.zeros(3)})
    assert set(history.previous()) == {"b.weight", "b.bias"}
    with history.shown({0: 1, 1: 0}):
        assert torch.equal(model(X), torch.zeros(2, 3))
