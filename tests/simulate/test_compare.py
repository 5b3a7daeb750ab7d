import json

import pytest

from lightning_cyclic.plan import make_plan
from lightning_cyclic.simulate import Costs, Network, compare, table

NETWORK = Network(latency_s=0.002, bandwidth_bytes_per_s=1e9)


def comparison(preset="cyclic_dp", **numbers):
    plan = make_plan(preset, num_stages=4, num_workers=4, num_steps=12, **numbers)
    return compare(plan, Costs.even(4, compute_s=0.12, model_bytes=4e6), NETWORK)


def test_a_plan_and_the_reference():
    got = comparison()
    assert got.plan.step_s == pytest.approx(0.12)
    # a bucket takes 6 rounds of 2 ms + 0.25 ms, and only the last is not hidden by a backward
    assert got.lockstep.step_s == pytest.approx(0.12 + 0.0135)
    assert got.speed == pytest.approx(0.1335 / 0.12)
    assert (got.plan.sent_messages, got.lockstep.sent_messages) == (7, 24)
    assert (got.plan.all_activations, got.lockstep.all_activations) == (10, 16)


def test_plans_of_other_step_sizes_are_compared_by_micro_batch():
    got = comparison("pipedream")
    assert (got.plan.num_micro, got.lockstep.num_micro) == (1, 4)
    assert got.plan.micro_per_s == 1 / got.plan.step_s
    assert got.speed == got.plan.micro_per_s / got.lockstep.micro_per_s


def test_the_reference_accumulates_what_it_has_more():
    got = comparison("1f1b", num_micro=8)
    assert got.lockstep.num_micro == 8
    assert got.lockstep.step_s == pytest.approx(0.12 + 0.1335)


def test_json_round_trip():
    got = comparison().as_dict()
    assert json.loads(json.dumps(got)) == got
    assert got["plan"]["sent_messages"] == 7


TABLE = """\
4 workers, 4 stages, 2 ms latency, 1 GB/s

                                          cyclic_dp   lockstep data parallelism
 ───────────────────────────────────────────────────────────────────────────────
  time per step                              120 ms                    133.5 ms
"""


def test_the_table_as_plain_text():
    text = table(comparison())
    assert text.startswith(TABLE)
    assert text.splitlines()[-1].split() == ["speed", "1.11x", "1.00x"]
    assert "\033" not in text
    assert "\033" in table(comparison(), colour=True)
