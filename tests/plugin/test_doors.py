"""The two doors: the options of each, each with a check, and those of hosts by default."""

from __future__ import annotations

import inspect
from dataclasses import fields, replace
from typing import Any

import pytest

from lightning_cyclic import PRESETS, CyclicStrategy, PipelineStrategy
from lightning_cyclic.errors import PlanError
from lightning_cyclic.plan import Plan
from lightning_cyclic.plugin.checks import workers_per_host
from lightning_cyclic.plugin.option_values import CHECKS
from lightning_cyclic.plugin.options import Options
from lightning_cyclic.plugin.strategy import Inherited
from lightning_cyclic.registration import make_strategy

DOORS = (CyclicStrategy, PipelineStrategy)


def options_of(door: type) -> dict[str, inspect.Parameter]:
    found = dict(inspect.signature(door).parameters)
    return {k: v for k, v in found.items() if v.kind is not inspect.Parameter.VAR_KEYWORD}


@pytest.mark.parametrize("door", DOORS)
def test_an_option_has_a_default_a_check_and_words(door: Any) -> None:
    options = options_of(door)
    assert len(options) <= 14
    words = inspect.getdoc(door) or ""
    of_default = {f.name: f.default for f in fields(Options)}
    made = door()._chosen
    for name, option in options.items():
        assert f"    {name}: " in words
        if name != "preset":
            assert CHECKS[name].passes(option.default)
        if name not in ("preset", "bandwidth"):  # of which Options has what follows
            assert getattr(made, name) == option.default
            assert name in of_default
    assert all(name in words for name in Inherited.__annotations__)


@pytest.mark.parametrize("name", CHECKS)
def test_the_example_of_a_check_passes(name: str) -> None:
    assert CHECKS[name].passes(eval(CHECKS[name].example))
    assert not CHECKS[name].passes(object())


def test_each_preset_is_of_one_door() -> None:
    assert {name for door in DOORS for name in door.presets} == PRESETS.keys()
    for name in PRESETS:
        made = make_strategy(name)
        assert [name in door.presets for door in DOORS] == [type(made) is door for door in DOORS]


def planned(num_workers: int, hosts: list[str], **options: Any) -> Plan:
    chosen = CyclicStrategy(**options)._chosen
    per_host = workers_per_host(hosts)
    return replace(chosen, num_workers=num_workers, workers_per_host=per_host).plan(4)


@pytest.mark.parametrize(
    ("hosts", "size"),
    [("aabb", 2), ("aaaa", 1), ("abcd", 1), ("abab", 1), ("aaab", 1), ("aaaabbbb", 4)],
)
def test_workers_of_a_host_are_a_group_where_there_are_several_hosts(
    hosts: str, size: int
) -> None:
    assert planned(len(hosts), [*hosts]).group_size == size
    assert planned(len(hosts), [*hosts], group_size=1).group_size == 1
    assert planned(len(hosts), [*hosts], preset="lockstep_dp").group_size == 1


@pytest.mark.parametrize("preset", ["1f1b", "interleaved_1f1b", "zb_h1", "zb_v", "dualpipe_v"])
@pytest.mark.parametrize("stages", [2, 4, 8])
def test_stages_may_be_many_before_it_is_known_how_many_workers_there_are(
    preset: str, stages: int
) -> None:
    strategy = PipelineStrategy(preset, stages=stages, num_microbatches=4)
    chosen = replace(strategy._chosen, num_workers=stages // 2)
    assert chosen.plan(stages).num_workers == stages // 2


def test_an_odd_number_of_stages_has_no_vee() -> None:
    with pytest.raises(PlanError, match=r"num_stages=3 .*twice as many stages.*use num_stages=4"):
        PipelineStrategy("zb_v", stages=3)
