import json

import pytest

from lightning_cyclic.errors import PlanError
from lightning_cyclic.planner import ModelProfile, Tie, UnitProfile, from_json, to_json

COSTS = {
    "forward_s": 0.5, "backward_s": 1.0, "param_bytes": 8, "activation_bytes": 16,
    "crossing_bytes": 4,
}  # fmt: skip


def profile(count=3, **changes):
    units = tuple(UnitProfile(name=f"h.{k}", **COSTS) for k in range(count))
    return ModelProfile(**{"name": "net", "micro_size": 4, "units": units} | changes)


def test_json_keeps_everything():
    kept = profile(ties=(Tie(units=(0, 2), bytes=8),))
    assert from_json(to_json([kept])) == (kept,)
    assert from_json(to_json([kept, kept.scaled(8)])) == (kept, kept.scaled(8))


def test_ties_may_be_left_out_of_a_file():
    data = json.loads(to_json([profile()]))
    del data["ties"]
    assert from_json(json.dumps(data)) == (profile(),)


def test_scaling_keeps_parameters():
    scaled = profile(ties=(Tie(units=(0, 1), bytes=8),)).scaled(8)
    assert scaled.micro_size == 8
    assert scaled.ties == (Tie(units=(0, 1), bytes=8),)
    assert scaled.units[1] == UnitProfile(
        name="h.1", forward_s=1, backward_s=2, param_bytes=8, activation_bytes=32, crossing_bytes=8
    )
    assert scaled.scaled(4) == profile(ties=scaled.ties)


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), "3", None, True])
@pytest.mark.parametrize("cost", COSTS)
def test_costs_that_cannot_be(cost, value):
    with pytest.raises(PlanError, match=rf"{cost}=.* of unit 0 \('a'\) of profile 'net'"):
        profile(units=(UnitProfile(name="a", **COSTS | {cost: value}),))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"units": ()}, "profile 'net' has no units"),
        ({"micro_size": 0}, "micro_size=0 of profile 'net'"),
        ({"micro_size": 1.5}, "micro_size=1.5 of profile 'net'; allowed: whole numbers"),
        ({"ties": (Tie(units=(0, 3), bytes=1),)}, r"a tie of units \(0, 3\) .* units 0 to 2"),
        ({"ties": (Tie(units=(1,), bytes=1),)}, "allowed: two or more"),
        ({"ties": (Tie(units=(0, 1), bytes=-1),)}, "bytes=-1 of the tie of units"),
    ],
)
def test_profiles_that_cannot_be(changes, message):
    with pytest.raises(PlanError, match=message):
        profile(**changes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.pop("units"), "the profile has no units"),
        (lambda data: data.update(units={}), "units of profile 'net' are {}; allowed: a list"),
        (lambda data: data["units"].append(3), "unit 3 of profile 'net' is 3; allowed: an object"),
        (
            lambda data: [data["units"][1].pop(name) for name in ("backward_s", "param_bytes")],
            "unit 1 of profile 'net' has no backward_s and no param_bytes; allowed",
        ),
        (
            lambda data: data.update(ties=[{"units": [0, 1]}]),
            "a tie of profile 'net' has no bytes",
        ),
    ],
)
def test_files_that_lack_something(change, message):
    data = json.loads(to_json([profile()]))
    change(data)
    with pytest.raises(PlanError, match=message):
        from_json(json.dumps(data))


@pytest.mark.parametrize(("text", "message"), [("{", "is no JSON"), ("3", "the profile is 3")])
def test_text_that_is_no_profile(text, message):
    with pytest.raises(PlanError, match=message):
        from_json(text)
