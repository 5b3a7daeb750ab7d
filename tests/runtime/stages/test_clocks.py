"""Counted times are the same in every run; measured ones are those of the step."""

import hashlib
import time
from dataclasses import replace
from threading import Event, Thread

import pytest
import torch
from torch import library, nn
from transformers import GPT2Config, GPT2LMHeadModel

from lightning_cyclic.runtime.stages.cuts import choose_cuts
from lightning_cyclic.runtime.stages.survey import survey
from tests.harness import processes

X = torch.ones(4, 16)


class Sleepy(nn.Linear):
    """A layer that takes its time."""

    def __init__(self, sleeps=False):
        super().__init__(16, 16)
        self.sleeps = sleeps

    def forward(self, x):
        if self.sleeps:
            time.sleep(0.02)
        return super().forward(x)


def row(sleeper=None):
    return nn.Sequential(*(Sleepy(k == sleeper) for k in range(6)))


def times_of(seen):
    return [t for c in seen.calls for t in (c.begin_ns, c.end_ns)] + [seen.duration_ns]


def test_a_layer_takes_what_its_flops_and_bytes_take_on_the_nominal_device():
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU())
    seen = survey(model, lambda: model(torch.ones(8, 64)))
    flops = 2 * 8 * 64 * 32
    num_bytes = 4 * (8 * 64 + 64 * 32 + 32 + 8 * 32)
    made = 4 * 8 * 64  # the batch, within the step
    relu = 4 * 2 * (8 * 32)
    linear, rectified = (next(c for c in seen.calls if c.path == path) for path in "01")
    assert linear.begin_ns == 10 * made // 1000
    assert linear.end_ns == (flops + 10 * (made + num_bytes)) // 1000 == rectified.begin_ns
    assert seen.duration_ns == (flops + 10 * (made + num_bytes + relu)) // 1000


def test_an_operator_without_a_formula_takes_its_bytes():
    @library.custom_op("cyclic_tests::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    class Custom(nn.Module):
        def forward(self, x):
            return twice(x)

    model, x = Custom(), torch.ones(100, 100)
    assert survey(model, lambda: model(x)).duration_ns == 10 * 2 * x.nbytes // 1000


def test_both_clocks_tell_the_same_but_for_the_times():
    model = row()

    def step():
        return model(X)

    counted, measured = survey(model, step), survey(model, step, clock="measured")
    assert (counted.clock, measured.clock) == ("counted", "measured")
    timeless = [
        replace(
            seen,
            calls=tuple(replace(c, begin_ns=0, end_ns=0) for c in seen.calls),
            duration_ns=0,
            clock="counted",
        )
        for seen in (counted, measured)
    ]
    assert timeless[0] == timeless[1]
    for seen in (counted, measured):
        assert sorted(times_of(seen)) != [0] * len(times_of(seen))
        assert all(c.begin_ns <= c.end_ns <= seen.duration_ns for c in seen.calls)


def test_counted_times_do_not_depend_on_threads_or_earlier_runs():
    model = row(0)
    seen = [survey(model, lambda: model(X)) for _ in range(2)]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        seen.append(survey(model, lambda: model(X)))
    finally:
        torch.set_num_threads(threads)
    with torch.inference_mode():
        seen.append(survey(model, lambda: model(X)))
    assert times_of(seen[0]) == times_of(seen[1]) == times_of(seen[2]) == times_of(seen[3])


def surveyed():
    """Survey a small GPT-2 while this process is busy with something else."""
    done = Event()

    def work():
        while not done.is_set():
            hashlib.sha256(bytes(1 << 20))

    Thread(target=work, daemon=True).start()
    try:
        config = GPT2Config(n_layer=4, n_embd=32, n_head=2, vocab_size=64, n_positions=16,
                            bos_token_id=0, eos_token_id=0)  # fmt: skip
        model, ids = GPT2LMHeadModel(config), torch.arange(32).reshape(2, 16)
        seen = [survey(model, lambda: model(input_ids=ids, labels=ids).loss) for _ in range(2)]
    finally:
        done.set()
    return [(times_of(s), [choose_cuts(s, n).starts for n in (2, 3, 4)]) for s in seen]


@pytest.mark.multi
def test_every_process_of_a_loaded_machine_cuts_alike():
    found = [each for rank in processes.run(surveyed, 3) for each in rank]
    assert len(found) == 6
    assert all(each == found[0] for each in found)
    (start,) = found[0][1][0]
    assert start.startswith("transformer.h.2")
