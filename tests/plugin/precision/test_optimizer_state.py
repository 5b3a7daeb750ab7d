"""An optimizer's groups and state, compressed and as dense training has them."""

from __future__ import annotations

import torch
from torch import nn

from lightning_cyclic.plugin.precision.compressed import Layout, ParameterState
from lightning_cyclic.plugin.precision.sparse_state import compressed, expanded, give_masters

MASK = torch.tensor([[True, False, True], [False, True, False]])


def states() -> list[ParameterState]:
    torch.manual_seed(0)
    weight, bias = nn.Parameter(torch.randn(2, 3)), nn.Parameter(torch.randn(2))
    layouts = Layout.of(MASK), Layout(None)
    return [
        ParameterState(name, p, layout, torch.bfloat16)
        for name, p, layout in zip(("w", "b"), (weight, bias), layouts, strict=True)
    ]


def test_groups_keep_all_but_their_parameters() -> None:
    one, two = states()
    other = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([{"params": [other, one.weight], "lr": 1.0}], lr=0.1)
    (group,) = optimizer.param_groups
    assert give_masters(optimizer, [one, two]) == [one]
    assert optimizer.param_groups[0] is group
    assert group["lr"] == 1.0
    assert [id(p) for p in group["params"]] == [id(other), id(one.master)]


def test_state_from_the_start_is_handed_over() -> None:
    one, two = states()
    optimizer = torch.optim.Adagrad([one.weight, two.weight], initial_accumulator_value=0.5)
    give_masters(optimizer, [one, two])
    assert optimizer.state.keys() == {one.master, two.master}
    assert optimizer.state[one.master]["sum"].tolist() == [0.5] * 3
    assert optimizer.state[one.master]["sum"].dtype == torch.float32
    assert optimizer.state[two.master]["sum"].tolist() == [0.5] * 2


def test_saved_state_has_the_shapes_of_parameters_and_comes_back() -> None:
    one, two = states()
    optimizer = torch.optim.AdamW([two.weight, one.weight])
    give_masters(optimizer, [one, two])
    for state in (one, two):
        state.master.grad = torch.randn_like(state.master)
    optimizer.step()
    before = optimizer.state_dict()
    saved = expanded(before, optimizer, [one, two])
    own = before["state"][1]["exp_avg"]
    assert own.shape == (3,)  # the optimizer's own is as it was
    assert saved["state"][1]["exp_avg"][MASK].tolist() == own.tolist()
    assert saved["state"][1]["exp_avg"][~MASK].tolist() == [0] * 3
    assert saved["state"][1]["step"] is before["state"][1]["step"]
    assert saved["state"][0] is before["state"][0]
    assert saved["param_groups"] == before["param_groups"]
    again = compressed(saved, optimizer, [one, two])
    assert torch.equal(again["state"][1]["exp_avg"], own)
    optimizer.load_state_dict(again)
