"""What is trained on one of several workers, and what travels of it."""

from __future__ import annotations

import torch
from torch import nn

from lightning_cyclic.plugin.precision.compressed import Layout, ParameterState
from lightning_cyclic.plugin.precision.sparse_state import SparseForms
from lightning_cyclic.runtime.weight_forms import ALL

BF16 = torch.bfloat16
MASK = torch.tensor([[True, False], [False, True]])


class Worker:
    def __init__(self) -> None:
        self.checks = 0
        self.pruned, self.bias, self.other = (nn.Parameter(torch.ones(2, 2)) for _ in range(3))
        self.states = [
            ParameterState("pruned", self.pruned, Layout.of(MASK), BF16),
            ParameterState("bias", self.bias, Layout(None), BF16),
        ]
        self.forms = SparseForms(self.states, self.states, self.check)

    def check(self) -> None:
        self.checks += 1


def test_masters_stand_for_weights_and_back() -> None:
    worker = Worker()
    for state in worker.states:
        assert worker.forms.trained(state.weight) is state.master
        assert worker.forms.weight(state.master) is state.weight
    assert worker.forms.trained(worker.other) is worker.forms.weight(worker.other) is worker.other
    assert ALL.trained(worker.other) is ALL.weight(worker.other) is worker.other


def test_kept_elements_travel() -> None:
    worker = Worker()
    forms, pruned = worker.forms, worker.pruned
    assert [forms.sends_all(p) for p in (pruned, worker.bias, worker.other)] == [False, True, True]
    values = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    sent = forms.compress(pruned, values)
    assert sent.tolist() == [1, 4]
    came = torch.full((2, 2), 9.0)  # of memory that was used before
    forms.expand_into(pruned, sent, came)
    assert came.tolist() == [[1, 0], [0, 4]]
    forms.expand_into(worker.bias, forms.compress(worker.bias, values), came)
    assert torch.equal(came, values)


def test_gradients_of_stand_ins_go_to_the_master() -> None:
    worker = Worker()
    older = nn.Parameter(worker.pruned.detach().clone())
    assert worker.forms.stand_in(worker.pruned, older) is older
    for _ in range(2):
        (older * torch.tensor([[2.0, 5.0], [7.0, 3.0]], dtype=BF16)).sum().backward()
    master = worker.states[0].master
    assert older.grad is None
    assert master.grad is not None
    assert master.grad.dtype == BF16
    assert master.grad.tolist() == [4, 6]


def test_gradients_of_masters_go_back_into_the_shape_of_weights() -> None:
    worker = Worker()
    grads = torch.tensor([4.0, 6.0], dtype=BF16), torch.ones(2, 2, dtype=BF16)
    pruned, bias = map(worker.forms.as_weight, (worker.pruned, worker.bias), grads)
    assert pruned.tolist() == [[4, 0], [0, 6]]
    assert pruned.dtype == BF16
    assert torch.equal(bias, grads[1])
    assert worker.forms.as_weight(worker.other, grads[1]) is grads[1]
    # what the optimizer does not have is pruned, but nothing has compressed its gradient
    idle = SparseForms(worker.states, worker.states[1:], worker.check)
    assert idle.as_weight(worker.pruned, grads[1]) is grads[1]


def test_an_update_is_of_float32_and_weights_have_it_behind() -> None:
    worker = Worker()
    master = worker.states[0].master
    master.grad = torch.tensor([0.5, 0.25], dtype=BF16)
    with worker.forms.updating([master, worker.other]):
        assert worker.checks == 1
        assert master.grad.dtype == torch.float32
        with torch.no_grad():
            master.sub_(master.grad)
    assert worker.pruned.tolist() == [[0.5, 0], [0, 0.75]]
    assert master.grad is None
    assert worker.bias.tolist() == [[1, 1], [1, 1]]


def test_masters_that_others_update_leave() -> None:
    worker = Worker()
    mine, theirs = (s.master for s in worker.states)
    worker.forms.leave([mine])
    assert mine.untyped_storage().nbytes() == 8
    assert theirs.untyped_storage().nbytes() == 4
    assert theirs.shape == (2, 2)
