"""Optimizer state between memory and a file: right wherever it is, and in memory as told."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_cyclic.errors import ConfigurationError, StepError, WaitTimeoutError
from lightning_cyclic.plan.actions import parse
from lightning_cyclic.runtime import state_tier
from lightning_cyclic.runtime.state_holders import ModuleWeights, OptimizerState
from lightning_cyclic.runtime.state_homes import AbstractHome, FileHome, HostHome
from lightning_cyclic.runtime.state_layout import lay_state, lay_weights
from lightning_cyclic.runtime.state_tier import StateTier
from lightning_cyclic.runtime.worker import LaneThread
from tests.harness.commands import until
from tests.harness.races import Device, Streams, noted

CPU = torch.device("cpu")
FETCH, EVICT = (f"{{}}{kind}_O#{{}}~tiers" for kind in ("FETCH", "EVICT"))


class Model:
    """Two stages of two parameters, trained with their state on a disk, and in memory.

    Args:
        kept: chunks of each stage that stay.
    """

    def __init__(self, folder: Path | None, kept: tuple[int, int] = (0, 0)) -> None:
        torch.manual_seed(0)
        self.stages = [[nn.Parameter(torch.randn(40, 30)) for _ in range(2)] for _ in range(2)]
        self.optimizer = torch.optim.AdamW([p for ps in self.stages for p in ps], 0.1)
        self.plain = [p.detach().clone().requires_grad_() for ps in self.stages for p in ps]
        self.other = torch.optim.AdamW(self.plain, 0.1)
        self.folder, self.kept = folder, kept
        self.tier = self.new_tier()
        self.t = 0

    def new_tier(self) -> StateTier:
        layout = lay_state(self.optimizer, self.stages)
        parameters = dict(enumerate(self.stages))
        holder = OptimizerState(lambda: self.optimizer)
        return StateTier(layout, self.kept, parameters, holder, self.home, CPU)

    def home(self, num_bytes: int) -> AbstractHome:
        if self.folder is None:
            return HostHome(num_bytes, is_pinned=False)
        return FileHome(self.folder, num_bytes)

    def fetch(self, j: int) -> None:
        a = parse(FETCH.format(j, self.t))
        self.tier.hold(a)
        self.tier.move(a)

    def evict(self, j: int) -> None:
        a = parse(EVICT.format(j, self.t))
        self.tier.hold(a)
        self.tier.move(a)

    def update(self, j: int) -> None:
        self.tier.install(j)
        for p in self.stages[j]:
            p.grad = torch.full_like(p, 1.0 + self.t)
        self.optimizer.step()
        for p in self.stages[j]:
            p.grad = None

    def step(self) -> None:
        for j in (0, 1):
            self.fetch(j)
            self.update(j)
            self.evict(j)
            self.tier.free(j)
        self.tier.rest()
        self.step_plainly()

    def step_plainly(self) -> None:
        for p in self.plain:
            p.grad = torch.full_like(p, 1.0 + self.t)
        self.other.step()
        self.t += 1

    def assert_alike(self) -> None:
        for p, q in zip((p for ps in self.stages for p in ps), self.plain, strict=True):
            assert torch.equal(p, q)
            mine, others = self.optimizer.state[p], self.other.state[q]
            assert mine.keys() == others.keys()
            assert all(torch.equal(mine[k], others[k]) for k in mine)

    def tensors(self, key: str = "exp_avg") -> Iterator[Tensor]:
        return (self.optimizer.state[p][key] for ps in self.stages for p in ps)


@pytest.mark.parametrize("is_file", [True, False])
@pytest.mark.parametrize("kept", [(0, 0), (1, 0), (2, 4)])
def test_the_same_bits_and_readable_at_any_time(kept: Any, is_file: bool, tmp_path: Path) -> None:
    model = Model(tmp_path if is_file else None, kept)
    for _ in range(3):
        model.step()
        model.assert_alike()
    assert not list(tmp_path.iterdir())  # the file has no name


def test_what_is_away_is_in_the_file_and_nowhere_else(tmp_path: Path) -> None:
    model = Model(tmp_path)
    model.step()
    maps = Path("/proc/self/smaps").read_text()
    (begin,) = [
        line for line in maps.splitlines() if str(tmp_path) in line and "(deleted)" in line
    ]
    low, high = (int(x, 16) for x in begin.split()[0].split("-"))
    assert all(low <= x.data_ptr() < high for x in model.tensors())
    assert not model.tier._spare
    model.t += 1
    model.fetch(0)
    model.tier.install(0)
    assert [low <= x.data_ptr() < high for x in model.tensors()] == [False, False, True, True]


def test_stages_use_the_same_room_one_behind_the_other(tmp_path: Path) -> None:
    model = Model(tmp_path)
    model.step()
    rooms = []
    for j in (0, 1):
        model.fetch(j)
        rooms.append({id(room) for room in model.tier._rooms[j]})
        model.update(j)
        model.evict(j)
        model.tier.free(j)
    assert rooms[0] == rooms[1]
    model.step_plainly()
    model.assert_alike()


def test_what_others_change_or_replace_between_steps_counts(tmp_path: Path) -> None:
    model = Model(tmp_path)
    model.step()
    for state in (model.optimizer.state, model.other.state):
        for k, x in enumerate(state.values()):
            if k % 2:
                x["exp_avg"].mul_(0.5)
            else:
                x["exp_avg"] = x["exp_avg"] * 2
    model.step()
    model.assert_alike()


def test_state_that_was_loaded_goes_to_the_file(tmp_path: Path) -> None:
    model = Model(tmp_path)
    model.step()
    saved = model.optimizer.state_dict()
    model.optimizer.load_state_dict(saved)
    held = next(model.tensors()).data_ptr()
    model.tier = model.new_tier()
    assert next(model.tensors()).data_ptr() != held
    model.assert_alike()
    model.step()
    model.assert_alike()


def test_a_parameter_without_a_gradient_has_no_state_until_it_gets_one(tmp_path: Path) -> None:
    model = Model(tmp_path)
    late = model.stages[0][1]
    model.fetch(0)
    late.requires_grad_(False)
    model.stages[0][0].grad = torch.ones(40, 30)
    model.optimizer.step()
    model.evict(0)
    model.tier.free(0)
    assert late not in model.optimizer.state
    model.fetch(0)
    model.update(0)  # gives it one
    model.evict(0)
    model.tier.free(0)
    assert float(model.optimizer.state[late]["step"]) == 1
    assert torch.equal(model.optimizer.state[late]["exp_avg"], torch.full((40, 30), 0.1))


def test_whoever_keeps_what_leaves_is_refused(tmp_path: Path) -> None:
    model = Model(tmp_path)
    model.step()
    model.fetch(1)
    model.update(1)
    kept = [x.view(-1)[3:] for x in model.tensors()][2:]
    model.evict(1)
    with pytest.raises(StepError, match="stage 1 leaves memory .* has kept tensors of it"):
        model.tier.free(1)
    del kept


@pytest.mark.parametrize(
    "wrong", [lambda x: x.double(), lambda x: x[:1].clone(), lambda x: "nothing"]
)
def test_state_of_another_form_is_refused(wrong: Any, tmp_path: Path) -> None:
    model = Model(tmp_path)
    model.step()
    state = model.optimizer.state[model.stages[1][0]]
    state["exp_avg"] = wrong(state["exp_avg"])
    model.fetch(1)
    with pytest.raises(StepError, match="'exp_avg' of a parameter of stage 1 is"):
        model.tier.install(1)


def broken(*_: Any) -> None:
    raise OSError(5, os.strerror(5))


def test_a_disk_without_room_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ConfigurationError, match=r"free: .*No space left.* with \d+ bytes free"):
        Model(tmp_path)


@pytest.mark.parametrize(("way", "call"), [("read from", "preadv"), ("written to", "pwrite")])
def test_a_disk_that_fails_is_named(
    way: str, call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model(tmp_path)
    model.step()
    model.fetch(1)
    model.update(1)

    monkeypatch.setattr(os, call, broken)
    with pytest.raises(StepError, match=f"state of stage [01] was not {way} the folder disk="):
        model.fetch(0) if call == "preadv" else model.evict(1)


# ---------------------------------------------------------------------- weights


class Weights:
    """Two stages of a trained and a frozen weight, whose values are in a file."""

    def __init__(self, folder: Path) -> None:
        self.stages = [
            [nn.Parameter(torch.randn(40, 30), requires_grad=k == 0) for k in range(2)]
            for _ in range(2)
        ]
        self.before = [p.detach().clone() for ps in self.stages for p in ps]
        self.tier = StateTier(
            lay_weights(self.stages), (0, 0), dict(enumerate(self.stages)), ModuleWeights(),
            lambda num_bytes: FileHome(folder, num_bytes), CPU,
        )  # fmt: skip

    def move(self, text: str) -> None:
        a = parse(text)
        self.tier.hold(a)
        self.tier.move(a)

    def values(self) -> list[Tensor]:
        return [p.detach().clone() for ps in self.stages for p in ps]


def test_weights_can_be_read_wherever_they_are(tmp_path: Path) -> None:
    w = Weights(tmp_path)
    try:
        assert all(map(torch.equal, w.values(), w.before))
        assert not w.tier.is_here(0)
        w.move("0FETCH_P@0#0~tiers")
        w.tier.install(0)
        assert w.tier.is_here(0)
        assert all(map(torch.equal, w.values(), w.before))
        with torch.no_grad():
            w.stages[0][0].add_(1.0)
        w.move("0EVICT_P@1#0~tiers")
        w.tier.free(0)
        assert not w.tier.is_here(0)
        w.before[0].add_(1.0)
        assert all(map(torch.equal, w.values(), w.before))
    finally:
        w.tier.close()


def test_frozen_weights_are_not_written_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = Weights(tmp_path)
    written = []
    write = FileHome.write
    monkeypatch.setattr(
        FileHome, "write", lambda self, *args: (written.append(args[0]), write(self, *args))
    )
    try:
        w.move("1FETCH_P@0#0~tiers")
        w.tier.install(1)
        w.move("1EVICT_P@1#0~tiers")
        w.tier.free(1)
        assert len(written) == 1  # the chunk of what is trained
    finally:
        w.tier.close()


def in_place(p: nn.Parameter) -> None:
    with torch.no_grad():
        p.add_(1.0)


def by_data(p: nn.Parameter) -> None:
    p.data.add_(1.0)


def replaced(p: nn.Parameter) -> None:
    p.data = p.data + 1.0


@pytest.mark.parametrize("change", [in_place, by_data, replaced])
@pytest.mark.parametrize("when", ["before", "on its way", "within", "behind"])
def test_what_others_change_of_frozen_weights_stays(
    change: Any, when: str, tmp_path: Path
) -> None:
    w = Weights(tmp_path)
    try:
        for name, text in (("before", "1FETCH_P@0#0~tiers"), ("within", "1EVICT_P@1#0~tiers")):
            if when == name:
                change(w.stages[1][1])
            w.move(text)
            if when == "on its way" and name == "before":
                change(w.stages[1][1])
            w.tier.install(1)
            if when in ("before", "on its way"):  # what is computed with, too
                assert torch.equal(w.stages[1][1], w.before[3] + 1.0)
        if when == "behind":
            change(w.stages[1][1])
        w.tier.free(1)
        w.before[3].add_(1.0)
        assert all(map(torch.equal, w.values(), w.before))
        w.move("1FETCH_P@1#1~tiers")
        w.tier.install(1)
        assert all(map(torch.equal, w.values(), w.before))
    finally:
        w.tier.close()


def test_weights_on_a_disk_that_fails_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = Weights(tmp_path)

    monkeypatch.setattr(os, "preadv", broken)
    try:
        with pytest.raises(StepError, match="weights of stage 1 were not read from the folder"):
            w.move("1FETCH_P@0#0~tiers")
    finally:
        w.tier.close()


def test_a_disk_that_hangs_has_a_limit() -> None:
    release, hold = os.pipe()

    def stuck(_: str) -> None:
        os.read(release, 1)

    lane = LaneThread("cyclic-tiers", stuck, limit_s=lambda: 0.05)
    lane.put(["an action"])
    try:
        with pytest.raises(WaitTimeoutError, match=r"cyclic-tiers has not ended .* for 0.05 s"):
            lane.wait_for(1)
    finally:
        os.write(hold, b"x")
        lane.wait_for(1)
        lane.close()


# ---------------------------------------------------------------------- where a host runs ahead


def on_a_device(forgets: str, monkeypatch: pytest.MonkeyPatch) -> Device:
    """Run steps on a device that is as slow as it can be, with a lane beside; note all.

    Args:
        forgets: what is not waited for.
    """
    device = Device()
    with noted(device):
        streams = Streams(device)
        monkeypatch.setattr(state_tier, "streams_of", lambda _: streams)
        if forgets == "host":
            monkeypatch.setattr(type(streams.now()), "wait", lambda _: None)
        with device.aside():  # as memory of the host is no stream's
            model = Model(None)
        lane = LaneThread("cyclic-tiers", model.tier.move, streams)

        def move(text: str, j: int) -> None:
            a = parse(text.format(j, model.t))
            model.tier.hold(a)
            lane.put([a])
            if forgets == text:
                until(lambda: lane.num_over == lane.num_put, 5.0, "the lane")
            else:
                lane.wait_for(lane.num_put)

        for _ in range(3):
            for j in (0, 1):
                move(FETCH, j)
                model.update(j)
                move(EVICT, j)
                model.tier.free(j)
                with device.on(device.new()):  # the host, which knows what it has waited for
                    home = model.tier._home
                    assert isinstance(home, HostHome)
                    home._data.add(0)
                    device.see(device.clock(device.current))
            model.t += 1
        lane.close()
    return device


def test_no_two_streams_use_a_room_or_a_home_in_no_order(monkeypatch: Any) -> None:
    on_a_device("", monkeypatch).check()


@pytest.mark.parametrize("forgets", [FETCH, "host"])
def test_the_model_finds_who_does_not_wait(forgets: str, monkeypatch: Any) -> None:
    with pytest.raises(AssertionError, match="does not wait for"):
        on_a_device(forgets, monkeypatch).check()
