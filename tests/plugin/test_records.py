"""What micro-batches log, put together, and logged again on every worker."""

from __future__ import annotations

import json
import math

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torchmetrics import MeanMetric

from lightning_cyclic.errors import StepError
from lightning_cyclic.plugin.records import Record, Recorder, from_summary, to_summary


class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.nested = nn.Module()
        self.nested.mean = MeanMetric()


def combined(*logs, sizes=None, module=None):
    """Put together what each micro-batch logged: pairs of name and value, or triples."""
    full = [[(*log, {})[:3] for log in calls] for calls in logs]
    return Recorder(module or Module()).combine(full, sizes or [1] * len(logs))


def value_of(*values, sizes=None, **arguments):
    (record,) = combined(*[[("x", v, dict(arguments))] for v in values], sizes=sizes)
    return record.value


def test_means_are_weighted_by_the_samples_of_each_micro_batch():
    assert value_of(torch.tensor(2.0), torch.tensor(5.0), sizes=[2, 1]) == 3
    assert value_of(2.0, 5.0, sizes=[1, 2]) == 4
    assert value_of(2.0, 4.0) == 3


def test_a_batch_size_that_was_given_goes_before_that_of_the_batch():
    calls = [[("x", 1.0, {"batch_size": 1})], [("x", 5.0, {"batch_size": 3})]]
    (record,) = combined(*calls, sizes=[10, 10])
    assert record.value == 4
    assert record.arguments == {"batch_size": 4}
    assert calls[0][0][2] == {"batch_size": 1}


@pytest.mark.parametrize(
    ("how", "expected"),
    [("mean", 3), ("avg", 3), ("sum", 8), ("max", 5), ("min", 1), (torch.mean, 3)]
    + [(torch.sum, 8), (torch.max, 5), (torch.min, 1), (torch.amax, 5), (max, 5), (sum, 8)],
    ids=lambda x: f"{type(x).__name__} {getattr(x, '__name__', x)}",
)
def test_reductions_over_micro_batches(how, expected):
    values = [torch.tensor(1.0), torch.tensor(2.0), torch.tensor(5.0)]
    assert value_of(*values, sizes=[1, 1, 2] if expected == 3 else [4, 2, 7], reduce_fx=how) == (
        13 / 4 if expected == 3 else expected
    )


def test_integers_and_bools_have_means():
    assert value_of(1, 2) == 1.5
    assert value_of(torch.tensor(1), torch.tensor(2)) == 1.5
    assert value_of(True, False, sizes=[1, 3]) == 0.25
    largest = value_of(torch.tensor(2**53 + 1), torch.tensor(3), reduce_fx="max")
    assert largest == 2**53 + 1
    assert largest.dtype == torch.int64


def test_precision_is_that_of_the_values():
    assert value_of(*[torch.tensor(0.1, dtype=torch.float64)] * 2).dtype == torch.float64
    assert value_of(torch.tensor(1.0, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_one_micro_batch_keeps_its_value_whatever_the_reduction():
    x = torch.tensor([0.1])
    assert torch.equal(value_of(x, sizes=[3], reduce_fx=torch.logsumexp), x)
    assert value_of(x).data_ptr() == x.data_ptr()


def test_values_are_cut_off_from_the_graph():
    x = torch.ones(1, requires_grad=True) * 2
    assert not value_of(x).requires_grad
    assert not value_of(x, x).requires_grad
    assert value_of(x, x).shape == ()


def test_nan_is_no_number_of_samples():
    assert math.isnan(value_of(1.0, float("nan")))


def test_names_keep_their_order_and_need_not_be_in_every_micro_batch():
    records = combined(
        [("b", 1.0), ("a", 2.0)], [("a", 4.0), ("c", 5.0), ("b", 3.0)], sizes=[1, 3]
    )
    assert [(r.name, float(r.value)) for r in records] == [("b", 2.5), ("a", 3.5), ("c", 5)]
    assert combined([], []) == []


def test_the_last_arguments_hold():
    records = combined([("x", 1.0, {"prog_bar": False})], [("x", 1.0, {"prog_bar": True})])
    assert records[0].arguments == {"prog_bar": True}


def test_a_metric_is_recorded_by_its_path_and_last_value():
    module = Module()
    metric = module.nested.mean
    assert combined([("m", metric)], module=module) == [Record("m", None, "nested.mean", {})]
    metric(torch.tensor(1.0))
    metric(torch.tensor(4.0))
    arguments = {"on_step": True}
    records = combined([("m", metric, {})], [("m", metric, arguments)], module=module)
    assert records == [Record("m", torch.tensor(4.0), "nested.mean", arguments)]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([{"a": 1.0}], "was given a dict; .*use self.log_dict"),
        ([torch.ones(2)], r"a tensor of shape \(2,\); allowed: one number"),
        ([torch.ones(0)], r"a tensor of shape \(0,\)"),
        (["text"], "was given a str; allowed: numbers"),
        ([None], "was given a NoneType"),
        ([MeanMetric()], "was given a MeanMetric that is not part of the module"),
        ([1.0, "text"], "was given a str"),
    ],
)
def test_what_cannot_be_logged_is_refused_with_its_name(values, text):
    with pytest.raises(StepError, match=rf"self\.log\('x', \.\.\.\) {text}|'x'.*{text}"):
        value_of(*values)


@pytest.mark.parametrize("how", [torch.logsumexp, "median", lambda x: x[0]])
def test_reductions_that_cannot_be_put_together_are_refused(how):
    with pytest.raises(StepError, match=r"self\.log\('x', .*cannot be put together"):
        value_of(1.0, 2.0, reduce_fx=how)


# ---------------------------------------------------------------------- as messages


def test_records_survive_the_journey():
    module = Module()
    arguments = {"reduce_fx": torch.max, "on_step": True, "batch_size": 3, "metric_attribute": "m"}
    records = [
        Record("a", torch.tensor(1.5), None, arguments),
        Record("b", None, "nested.mean", {}),
        Record("c", torch.tensor(2), None, {"reduce_fx": "mean", "sync_dist_group": None}),
        Record("d", torch.tensor(3.0), "nested.mean", {"add_dataloader_idx": False}),
    ]
    tensors, facts = to_summary(records)
    assert [float(x) for x in tensors] == [1.5, 2, 3]
    back = from_summary(tensors, json.loads(json.dumps(facts)))
    assert back == records
    assert from_summary(*to_summary([])) == []
    assert module.nested.mean.update_count == 0


def test_an_argument_that_cannot_be_sent_is_refused_with_the_name():
    with pytest.raises(StepError, match=r"an argument of self\.log\('x', \.\.\.\)"):
        to_summary([Record("x", torch.ones(()), None, {"reduce_fx": lambda x: x})])


# ---------------------------------------------------------------------- held back, and again


def noted(module, act):
    calls = []
    with Recorder(module).holding(lambda *call: calls.append(call)):
        act()
    return calls


def test_logs_are_held_back_and_arguments_are_named():
    module = Module()

    def act():
        module.log("a", 1.0, True, on_epoch=True)
        module.log(value=2.0, name="b")
        module.log_dict({"c": 3, "d": 4}, batch_size=2)

    a, b, c, d = noted(module, act)
    assert a == ("a", 1.0, {"prog_bar": True, "on_epoch": True})
    assert b == ("b", 2.0, {})
    assert [x[:2] for x in (c, d)] == [("c", 3), ("d", 4)]
    assert c[2]["batch_size"] == 2
    assert "log" not in vars(module)


def test_logging_is_as_it_was_behind_an_error():
    module = Module()
    with pytest.raises(KeyError), Recorder(module).holding(lambda *_: None):
        raise KeyError
    assert "log" not in vars(module)
    with pytest.raises(TypeError, match="missing a required argument"):
        noted(module, lambda: module.log("x"))


def test_records_are_logged_again_for_all_replicas():
    module = Module()
    records = [
        Record("a", torch.tensor(1.5), None, {"prog_bar": True, "sync_dist": False}),
        Record("m", torch.tensor(4.0), "nested.mean", {"on_step": True}),
        Record("n", None, "nested.mean", {}),
    ]
    calls = noted(module, lambda: Recorder(module).replay(records))
    assert calls == [
        ("a", torch.tensor(1.5), {"prog_bar": True, "sync_dist": True}),
        ("m", module.nested.mean, {"on_step": True}),
        ("n", module.nested.mean, {}),
    ]
    assert module.nested.mean._forward_cache == 4
