import math

import pytest

from lightning_cyclic.simulate import Costs, Network, best_lockstep, lockstep
from lightning_cyclic.simulate.lockstep import ALL_REDUCES, ring, tree, two_level

NARROW = Network(latency_s=0.1, bandwidth_bytes_per_s=10.0)
EVEN = Costs.even(4, compute_s=12.0, model_bytes=80.0)  # per stage: F 1 s, B 2 s, 20 bytes


def test_without_a_network_a_step_is_its_compute():
    step = lockstep(EVEN, Network(), 4)
    assert (step.step_s, step.compute_s, step.bubble) == (12.0, 12.0, 0.0)


def test_buckets_overlap_with_the_backward_and_the_last_is_exposed():
    # 2 rounds of 10 bytes: 1 s per bucket, shorter than a stage's backward
    step = lockstep(EVEN, Network(bandwidth_bytes_per_s=20.0), 2)
    assert step.step_s == 13.0
    assert step.bubble == pytest.approx(1 / 13)


def test_buckets_are_reduced_one_after_the_other():
    # 4 s per bucket, ready at 6, 8, 10, 12: the ring is busy from 6 on
    assert lockstep(EVEN, Network(bandwidth_bytes_per_s=5.0), 2).step_s == 6 + 4 * 4


def test_each_round_of_each_bucket_costs_a_latency():
    # 3 workers, 4 rounds: 4 * 2 s per bucket of any size
    network = Network(latency_s=2.0)
    assert lockstep(EVEN, network, 3).step_s == 6 + 4 * 8
    assert lockstep(EVEN, network, 3, bucket_bytes=80).step_s == 12 + 8


def test_buckets_take_whole_stages_until_they_are_full():
    counts = [
        lockstep(EVEN, Network(), 2, bucket_bytes=size).num_buckets for size in (0, 20, 21, 41, 81)
    ]
    assert counts == [4, 4, 2, 2, 1]


def test_what_a_worker_sends():
    step = lockstep(EVEN, Network(), 4)
    assert step.sent_bytes == 2 * 3 / 4 * 80
    assert step.sent_messages == 2 * 3 * 4


def test_accumulated_micro_batches_only_compute():
    network = Network(bandwidth_bytes_per_s=20.0)
    assert lockstep(EVEN, network, 2, micro_per_worker=3).step_s == 2 * 12 + 13


def test_one_worker_sends_nothing_and_updates():
    costs = Costs.even(2, compute_s=6.0, model_bytes=10.0, update_s=0.5)
    step = lockstep(costs, Network(latency_s=1.0, bandwidth_bytes_per_s=1.0), 1)
    assert (step.step_s, step.sent_bytes, step.sent_messages) == (6.5, 0.0, 0)


# ---------------------------------------------------------------------- the best of them


HOSTS = Network(
    latency_s=1.0, bandwidth_bytes_per_s=1.0,
    hosts=(0, 0, 1, 1), inside=Network(latency_s=0.25, bandwidth_bytes_per_s=4.0),
)  # fmt: skip


def test_ways_to_sum():
    network = Network(latency_s=1.0, bandwidth_bytes_per_s=2.0)
    assert ring(80.0, 8, network) == (14 * (1 + 5), 14)
    assert tree(80.0, 8, network) == (6 + 2 * 80 * 7 / 8 / 2, 6)
    assert tree(80.0, 5, network).messages == 6
    # inside: 2 rounds and as many bytes as there are; between: half of the bytes
    assert two_level(8.0, 4, HOSTS) == ((2 * 0.25 + 8 / 4) + (2 * 1.0 + 4 / 1), 4)
    assert two_level(8.0, 8, network).seconds == math.inf


@pytest.mark.parametrize("all_reduce", ALL_REDUCES)
@pytest.mark.parametrize("bucket_bytes", [0, 40, 80])
@pytest.mark.parametrize("network", [HOSTS, Network(latency_s=5.0), Network(), NARROW])
def test_no_other_way_is_faster_than_the_best(all_reduce, bucket_bytes, network):
    best = best_lockstep(EVEN, network, 4)
    other = lockstep(EVEN, network, 4, bucket_bytes=bucket_bytes, all_reduce=all_reduce)
    assert best.step_s <= other.step_s
    assert best == best_lockstep(EVEN, network, 4)


def test_equal_buckets_are_ready_little_by_little():
    # as one stage has all bytes, its first half is ready when half of its backward is over
    costs = Costs(
        forward_s=(1.0, 1.0), backward_s=(2.0, 4.0), param_bytes=(8.0, 0.0), update_s=(0.0, 0.0)
    )
    network = Network(bandwidth_bytes_per_s=1.0)
    whole = lockstep(costs, network, 2, bucket_bytes=8)
    assert whole.step_s == 2 + 6 + 8  # the bucket waits for the last backward
    best = best_lockstep(costs, network, 2)
    assert best.num_buckets == 128
    assert best.step_s == pytest.approx(2 + 4 + 2 / 128 + 8)  # the first of them begins soon


def test_latencies_make_buckets_few_and_trees_best():
    best = best_lockstep(EVEN, Network(latency_s=5.0), 64)
    assert (best.all_reduce, best.num_buckets) == ("tree", 1)
    assert best.step_s == 12 + 2 * 6 * 5.0
    assert best_lockstep(EVEN, HOSTS, 4).all_reduce == "two-level"
