"""Versions of a stage: what is left of them where a worker ends."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_cyclic.runtime.messages import Messages
from lightning_cyclic.runtime.whole_step.versions import VersionStore
from tests.harness.races import Device, noted

CPU = torch.device("cpu")
SIZE = 1 << 15  # elements: enough for pages of their own


def messages_of_nobody() -> Messages:
    return Messages(None, {}, lambda pending, action: pending.wait(), CPU)


def test_older_versions_are_gone_before_parameters_are_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parameters = [nn.Parameter(torch.zeros(SIZE)) for _ in range(2)]
    store = VersionStore(parameters, 0, messages_of_nobody(), keeps=False)
    store.begin_update(1, oldest=0)
    with torch.no_grad():
        for p in parameters:
            p.fill_(1)
    assert store.versions == [0, 1]
    lent, found = {p.data_ptr() for p in parameters}, []
    clone = Tensor.clone

    def copied(x: Tensor) -> Tensor:
        found.append(store.versions)
        return clone(x)

    monkeypatch.setattr(Tensor, "clone", copied)
    store.release()
    assert found == [[1]] * 2
    assert all(bool((p == 1).all()) for p in parameters)
    assert lent.isdisjoint(p.data_ptr() for p in parameters)


def test_what_parameters_show_stays_though_it_is_older() -> None:
    parameters = [nn.Parameter(torch.zeros(SIZE))]
    store = VersionStore(parameters, 0, messages_of_nobody(), keeps=False)
    store.write(1, [torch.ones(SIZE)])
    store.release()
    assert store.versions == [1]
    assert not parameters[0].any()


def test_parameters_of_others_get_no_memory() -> None:
    parameters = [nn.Parameter(torch.zeros(()).expand(SIZE))]
    before = parameters[0].data_ptr()
    store = VersionStore(parameters, 0, messages_of_nobody(), keeps=False, is_here=False)
    store.release()
    assert parameters[0].data_ptr() == before
    assert parameters[0].untyped_storage().nbytes() == 4


def test_a_version_that_several_lanes_send_stays_until_all_have() -> None:
    parameters = [nn.Parameter(torch.zeros(SIZE))]
    store = VersionStore(parameters, 0, messages_of_nobody(), keeps=False)
    store.hold(0)
    store.hold(0)
    store.write(1, [torch.ones(SIZE)])
    store.let_go(0)
    store.leave_behind(1)
    assert store.versions == [0, 1]
    store.let_go(0)
    assert store.versions == [1]


def test_a_version_that_a_lane_lets_go_last_is_not_written_before_all_have_read_it() -> None:
    device = Device()
    with noted(device):
        messages = messages_of_nobody()
        store = VersionStore([nn.Parameter(torch.zeros(SIZE))], 0, messages)
        old = store[0]
        store.write(1, [torch.ones(SIZE)])
        store.hold(0)
        store.drop_below(1)  # the main stream has read it, and may still do so
        with device.on(device.new()):
            store.let_go(0)
            assert messages.room(store.layout) is not old
        assert old in store.layout.spare
