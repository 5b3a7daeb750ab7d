import json

import pytest

from lightning_cyclic.plan import make_plan
from lightning_cyclic.simulate import Costs, Network, best_lockstep, compare, table

NETWORK = Network(latency_s=0.002, bandwidth_bytes_per_s=1e9)


def comparison(preset="cyclic_dp", bucket_bytes=0, **numbers):
    plan = make_plan(preset, num_stages=4, num_workers=4, num_steps=12, **numbers)
    costs = Costs.even(4, compute_s=0.12, model_bytes=4e6)
    return compare(plan, costs, NETWORK, bucket_bytes=bucket_bytes)


def test_a_plan_and_the_reference():
    got = comparison()
    assert got.plan.step_s == pytest.approx(0.12)
    # a bucket takes 6 rounds of 2 ms + 0.25 ms, and only the last is not hidden by a backward
    assert got.lockstep.step_s == pytest.approx(0.12 + 0.0135)
    assert got.speed == pytest.approx(0.1335 / 0.12)
    assert (got.plan.sent_messages, got.lockstep.sent_messages) == (7, 24)
    assert (got.plan.all_activations, got.lockstep.all_activations) == (10, 16)


def test_the_reference_is_the_best_there_is_unless_a_size_is_given():
    best, given = comparison(bucket_bytes=None), comparison(bucket_bytes=25e6)
    assert best.reference == best_lockstep(best.costs, NETWORK, 4)
    assert best.lockstep.step_s == best.reference.step_s < given.lockstep.step_s
    assert (given.reference.all_reduce, given.reference.num_buckets) == ("ring", 1)
    assert best.plan == given.plan
    assert table(given).splitlines()[-1] == "lockstep: ring all-reduce, 1 bucket per step"
    assert best.as_dict()["reference"]["all_reduce"] == best.reference.all_reduce


def test_plans_of_other_step_sizes_are_compared_by_micro_batch():
    got = comparison("pipedream")
    assert (got.plan.num_microbatches, got.lockstep.num_microbatches) == (1, 4)
    assert got.plan.micro_per_s == 1 / got.plan.step_s
    assert got.speed == got.plan.micro_per_s / got.lockstep.micro_per_s


def test_the_reference_accumulates_what_it_has_more():
    got = comparison("1f1b", num_microbatches=8)
    assert got.lockstep.num_microbatches == 8
    assert got.lockstep.step_s == pytest.approx(0.12 + 0.1335)


def test_json_round_trip():
    got = comparison().as_dict()
    assert json.loads(json.dumps(got)) == got
    assert got["plan"]["sent_messages"] == 7
    assert got["costs"]["param_bytes"] == [1e6] * 4
    assert got["costs"]["backward_s"] == pytest.approx([0.02] * 4)


TABLE = """\
4 workers, 4 stages, 2 ms latency, 1 GB/s
assumed model: 4 MB of parameters, 1 MB per stage; 0 B of activations per cut
assumed compute: 120 ms per micro-batch, 40 ms forward and 80 ms backward (2 times as long)
    of a stage: 10 ms forward, 20 ms backward, 0 s per update

                                            cyclic_dp   lockstep data parallelism
 ─────────────────────────────────────────────────────────────────────────────────
  time per step                                120 ms                    133.5 ms
"""


def test_the_table_as_plain_text():
    text = table(comparison())
    assert text.startswith(TABLE)
    assert text.splitlines()[-2].split() == ["speed", "1.11x", "1.00x"]
    assert text.splitlines()[-1] == "lockstep: ring all-reduce, 4 buckets per step"
    assert "\033" not in text
    assert "\033" in table(comparison(), colour=True)


def test_stages_that_differ_are_said_from_which_to_which():
    costs = Costs(
        forward_s=(0.01, 0.02),
        backward_s=(0.01, 0.05),
        param_bytes=(1e6, 3e6),
        cut_bytes=(0.0, 2e3),
        update_s=(0.001, 0.001),
    )
    plan = make_plan("1f1b", num_stages=2, num_workers=2, num_steps=4)
    assert table(compare(plan, costs, NETWORK)).splitlines()[1:4] == [
        "assumed model: 4 MB of parameters, 1 MB to 3 MB per stage; 2 kB of activations per cut",
        "assumed compute: 90 ms per micro-batch, 30 ms forward and 60 ms backward "
        "(2 times as long)",
        "    of a stage: 10 ms to 20 ms forward, 10 ms to 50 ms backward, 1 ms per update",
    ]
    free = Costs.even(1, compute_s=0.0)
    alone = make_plan("cyclic_dp", num_stages=1, num_workers=1, num_steps=4)
    lines = table(compare(alone, free, NETWORK)).splitlines()
    assert lines[1].endswith("0 B per stage")  # there is no cut
    assert lines[2].endswith("0 s forward and 0 s backward")  # and no ratio
