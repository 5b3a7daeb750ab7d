import pytest

from lightning_cyclic.simulate import Costs, Network, lockstep

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
