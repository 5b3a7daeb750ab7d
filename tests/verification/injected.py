"""Ways of going wrong, injected one by one into the package, and a module that would show each.

A fault is a name, a function that patches the package, what the comparison is to name, and the
run in which it shows.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import MeanMetric

from lightning_cyclic.plugin import summaries
from lightning_cyclic.runtime.gradient_store import GradientStore, Sum
from lightning_cyclic.runtime.partial_step import batches
from lightning_cyclic.runtime.partial_step import stage_step as stage_steps
from lightning_cyclic.runtime.partial_step.batches import Batches
from lightning_cyclic.runtime.partial_step.exchange import Exchange
from lightning_cyclic.runtime.partial_step.module_state import ModuleState
from lightning_cyclic.runtime.partial_step.ownership import Ownership
from lightning_cyclic.runtime.partial_step.packets import Gradients
from lightning_cyclic.runtime.partial_step.passage import Entry
from lightning_cyclic.runtime.partial_step.run import Run
from lightning_cyclic.runtime.partial_step.stage_step import StageStep
from lightning_cyclic.runtime.partial_step.versions import Versions

Patch = Callable[[pytest.MonkeyPatch], None]
NUM_MICRO = 4
STAGES = ["b", "c", "d"]


class Shown(LightningModule):
    """Have in one step all that stages can get wrong."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c, self.d = (nn.Linear(6, 6) for _ in range(4))
        self.norm, self.out = nn.BatchNorm1d(6), nn.Linear(6, 3)
        self.seen = MeanMetric()
        self.generator = np.random.default_rng(1)
        self.count, self.losses = 0, []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Any]:
        x, y = batch
        self.count += 1
        share = random.random() + float(self.generator.uniform())
        x = x.mul_(2.0).clone()  # each run of it has a copy of its own
        h = skip = self.a(x)
        h = F.dropout(self.norm(self.b(h)).tanh(), 0.3)
        h = self.c(h) + share * skip + x
        h = h + 0.1 * torch.rand_like(h) * np.random.rand()
        h = F.linear(self.d(h), self.b.weight)  # tied
        loss = F.cross_entropy(self.out(h), y)
        self.seen(loss.detach())
        self.log("loss", loss, on_step=True)
        self.log("largest", h.max(), reduce_fx="max")
        self.log("seen", self.seen)
        self.losses.append(float(loss))
        return {"loss": loss, "h": h}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@dataclass(frozen=True)
class Fault:
    """Say what is done to the package, and where it shows.

    Args:
        patch: does it.
        named: a pattern in the error of the comparison.
        runs: names of runs of the test in which it shows; the first runs by default.
        steps: how many steps are compared.
    """

    patch: Patch
    named: str = ""
    runs: tuple[str, ...] = ("1f1b",)
    steps: int = 1


FAULTS: dict[str, Fault] = {}


def around(owner: Any, name: str, change: Callable[..., Any]) -> Patch:
    """Let ``change(original, *args)`` answer in the place of a method or function."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **kw: change(original, *args, **kw))

    return patch


def add(name: str, named: str, patch: Patch, *runs: str, **more: Any) -> None:
    FAULTS[name] = Fault(patch, named, runs or ("1f1b",), **more)


# ---------------------------------------------------------------------- what crosses stages


def packets(change: Callable[[Any], None], i: int = 1, j: int = 0) -> Patch:
    def forward(original: Any, step: Any, a: Any, take: Any) -> Any:
        gone = original(step, a, take)
        if gone is not None and (a.i, a.j) == (i, j):
            change(gone)
        return gone

    return around(StageStep, "forward", forward)


def each_tensor(change: Callable[[Tensor], Tensor]) -> Callable[[Any], None]:
    def do(packet: Any) -> None:
        packet.tensors = {h: change(x) for h, x in packet.tensors.items()}

    return do


CALL = r"(input|output) \d of \w+\(\) \(stage \d\) in micro-batch \d of 4"
add("a packet with one element off", CALL, packets(each_tensor(lambda x: x + 1e-6)))


def _without_gradients(packet: Any) -> None:
    packet.with_grad = frozenset()


add("gradients are not asked for", "gradient of", packets(_without_gradients))


_last: dict[Any, Any] = {}


def _older_packet(original: Any, step: Any, a: Any, take: Any) -> Any:
    gone = original(step, a, take)
    if a.j == 0 and gone is not None:
        before = _last.get("packet")
        _last["packet"] = dict(gone.tensors)
        if a.i == 2 and before is not None:
            gone.tensors = before
    return gone


add("a packet of the micro-batch before", CALL, around(StageStep, "forward", _older_packet))


def crossed(change: Callable[[dict[Any, Tensor]], dict[Any, Tensor]], i: int = 1) -> Patch:
    def backward(original: Any, step: Any, a: Any, take: Any) -> Any:
        gone = original(step, a, take)
        return gone._replace(crossed=change(dict(gone.crossed))) if a.i == i and a.j else gone

    return around(StageStep, "backward", backward)


GRADIENT = r"the gradient of '[\w.]+' \(stage \d\)"
add("one gradient that crosses is lost", GRADIENT, crossed(lambda g: dict(list(g.items())[1:])))
add(
    "gradients that cross are rounded",
    GRADIENT,
    crossed(lambda g: {h: x.half().float() for h, x in g.items()}),
)


def _older_gradients(original: Any, step: Any, a: Any, take: Any) -> Any:
    gone = original(step, a, take)
    before, _last[a.j] = _last.get(a.j), gone
    return before if a.i == 1 and a.j == 2 and before is not None else gone


add(
    "gradients of the micro-batch before",
    GRADIENT,
    around(StageStep, "backward", _older_gradients),
)
add(
    "what came is cut off from the graph",
    GRADIENT,
    around(Entry, "keep", lambda original, entry, grads: original(entry, (None,) * len(grads))),
)


# ---------------------------------------------------------------------- tied weights


def tied(change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Patch:
    def backward(original: Any, step: Any, a: Any, take: Any) -> Any:
        gone = original(step, a, take)
        return Gradients(gone.crossed, change(dict(gone.tied)))

    return around(StageStep, "backward", backward)


add("gradients of tied weights are lost", r"gradient of 'b\.weight'", tied(lambda g: {}))


# ---------------------------------------------------------------------- batches and shares


def _micro(change: Callable[[dict[int, Any]], dict[int, Any]]) -> Patch:
    def micro(original: Any, session: Any, parts: Any, shares: Any, kind: str) -> Any:
        made = original(session, parts, shares, kind)
        return change(made) if kind == "train" else made

    return around(Batches, "numbered", micro)


add(
    "micro-batches in another order",
    CALL,
    _micro(lambda m: {i: m[len(m) - 1 - i] for i in m}),
    "1f1b",
    "cyclic_dp",
    "2 ranks",
)
add(
    "labels of the next micro-batch",
    "the loss in micro-batch 1 of 4|output",
    _micro(lambda m: m | {0: m[0]._replace(batch=(m[0].batch[0], m[1].batch[1]))}),
)
add(
    "one micro-batch weighs nothing",
    GRADIENT,
    around(
        batches,
        "shares_of",
        lambda original, sizes, parts: [*original(sizes, parts)[:-1], torch.zeros_like],
    ),
)


def _not_copied(original: Any, step: Any, a: Any, micro: Any) -> Any:
    call, batch = step._calls[a.t], micro.batch
    return lambda: call(batch)


add("a batch that the step changes is not copied", CALL, around(StageStep, "_step", _not_copied))


# ---------------------------------------------------------------------- sums of gradients


def _last_alone(original: Any, store: Any, t: int, j: int) -> Any:
    store._sums.pop((t, j), None)
    if j == 1:
        store._own.pop((t, j), None)
    return original(store, t, j)


add("sums forget what came before", GRADIENT, around(GradientStore, "adding", _last_alone))


def _hide(change: Callable[[Tensor], Tensor | None]) -> Patch:
    def hide(original: Any, store: Any, t: int, j: int, word: int = 0) -> None:
        if j == 2:
            for p in store.parameters_of(j):
                p.grad = None if p.grad is None else change(p.grad)
        original(store, t, j, word)

    return around(GradientStore, "hide", hide)


add("sums of one element are off", GRADIENT, _hide(lambda g: g + 1e-9))


def _other_order(original: Any, store: Any, t: int, j: int) -> Any:
    """Keep the gradients of a stage apart, and add them from the last micro-batch on."""
    found = original(store, t, j)
    kept = _last.pop(("kept", j), None)
    if kept:
        grads = [
            None if xs[0] is None else sum(reversed(xs[:-1]), xs[-1])
            for xs in zip(*kept, strict=True)
        ]
        return Sum(grads)
    return found


def _keep_apart(original: Any, step: Any, a: Any, take: Any) -> Any:
    parameters = step._ownership.owned(a.j)
    before = [None if p.grad is None else p.grad.clone() for p in parameters]
    for p in parameters:
        p.grad = None
    gone = original(step, a, take)
    _last.setdefault(("kept", a.j), []).append([p.grad for p in parameters])
    for p, b in zip(parameters, before, strict=True):
        p.grad = b if p.grad is None else p.grad if b is None else b + p.grad
    return gone


def _in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    around(StageStep, "backward", _keep_apart)(monkeypatch)
    adding = around(
        GradientStore,
        "take",
        lambda original, store, t, j: (
            _other_order(original, store, t, j)
            if len(_last.get(("kept", j), ())) == NUM_MICRO
            else original(store, t, j)
        ),
    )
    adding(monkeypatch)


add("sums in another order", GRADIENT, _in_another_order)


# ---------------------------------------------------------------------- buffers


def _behind_forward(change: Callable[[nn.Module], None], i: int = 0, j: int = 1) -> Patch:
    def forward(original: Any, step: Any, a: Any, take: Any) -> Any:
        gone = original(step, a, take)
        if (a.t, a.i, a.j) == (0, i, j):
            with torch.no_grad():
                change(step._router.module)
        return gone

    return around(StageStep, "forward", forward)


def _undo_statistics(module: nn.Module) -> None:
    module.norm.running_mean.data.zero_()  # which autograd does not count


BUFFER = r"the buffer self\.norm\.\w+|of norm\(\)"
add("statistics are undone", BUFFER, _behind_forward(_undo_statistics, i=3))
add(
    "a run again counts its statistics once more",
    BUFFER,
    around(ModuleState, "again", lambda original, *args: stage_steps._NOTHING),
    "remat",
)


# ---------------------------------------------------------------------- what the module keeps


KEPT = r"self\.(count|losses)"
add(
    "what stages keep is not put back",
    KEPT,
    around(ModuleState, "_put_back", lambda original, *args: None),
    "cyclic_dp",
    "1f1b",
)
add("an item of a list is lost", KEPT, _behind_forward(lambda m: m.losses.clear(), i=2, j=3))
add(
    "a metric counts a micro-batch twice",
    r"self\.seen\.",
    _behind_forward(lambda m: m.seen.update(1.0), i=2, j=3),
)
add(
    "a mode is changed",
    r"self\.norm\.training|of norm\(\)",
    _behind_forward(lambda m: m.norm.eval(), i=1, j=1),
)


# ---------------------------------------------------------------------- outcomes and logs


def _outcomes(change: Callable[[dict[int, Any]], dict[int, Any]]) -> Patch:
    return around(StageStep, "take_outcomes", lambda original, step, t: change(original(step, t)))


TOLD = r"the loss of the whole batch|self\.log\('\w+'\) of the whole batch|output \d of training"
add("outcomes of another micro-batch", TOLD, _outcomes(lambda o: o | {0: o[1]}))
add(
    "a log is left out",
    TOLD,
    _outcomes(lambda o: {i: x._replace(logs=x.logs[1:]) for i, x in o.items()}),
)
add(
    "outputs are lost",
    TOLD,
    _outcomes(lambda o: {i: x._replace(output=x.output["loss"]) for i, x in o.items()}),
)


def _told(change: Callable[[Any], Any]) -> Patch:
    return around(
        summaries.Summaries, "read_step", lambda original, s, summary: change(original(s, summary))
    )


def _late_records(told: Any) -> Any:
    before, _last["records"] = _last.get("records", []), told.records
    return told._replace(records=before)


add("logs of the step before", TOLD, _told(_late_records))
add("the loss is scaled", TOLD, _told(lambda t: t._replace(loss=t.loss / 4)))


def _output(change: Callable[[Any], Any]) -> Patch:
    return around(Run, "_check_end", lambda original, run, output: change(original(run, output)))


add(
    "the loss loses its last bits",
    r"the loss in micro-batch|what training_step returned",
    _output(lambda o: {**o, "loss": o["loss"] * (1 + 2**-20)} if isinstance(o, dict) else o),
)


# ---------------------------------------------------------------------- random numbers


DRAWS = r"how far [\w.]+( modules)? has drawn|" + CALL
add(
    "a draw too many of numpy",
    DRAWS,
    around(Run, "_enter_stage", lambda original, run: (original(run), np.random.rand(), None)[2]),
)
add(
    "the key of another stage",
    DRAWS,
    around(
        Run,
        "_enter_stage",
        lambda original, run: (original(run), run._randomness.begin_stage(0), None)[2],
    ),
)


def _unkeyed(original: Any, run: Any, func: Any, args: Any, kwargs: Any) -> Any:
    return func(*args, **kwargs)


add("draws between modules have no key", DRAWS, around(Run, "_call", _unkeyed))


add(
    "keys forget the micro-batch",
    DRAWS,
    around(
        stage_steps, "Randomness", lambda original, seed, t, i, *rest: original(seed, t, 0, *rest)
    ),
)


# ---------------------------------------------------------------------- weights


@contextmanager
def _shown_shifted(original: Any, versions: Any, a: Any, stages: Any) -> Iterator[Any]:
    with original(versions, a, stages) as shown:
        for p in (p for version in shown for p in version.values()):
            p.data = p.data * (1 + 2**-18)
        yield shown


add("a version that was changed", CALL, around(Versions, "shown", _shown_shifted), "cyclic_dp")
add(
    "a run again reads other weights",
    r"gradient|" + CALL,
    around(
        Versions,
        "shown_again",
        lambda original, versions, a, shown: (
            [p.data.mul_(1.001) for v in shown for p in v.values()],
            original(versions, a, shown),
        )[1],
    ),
    "cyclic_pipeline remat",
)


# ---------------------------------------------------------------------- messages of two ranks


def given(payloads: str, change: Callable[[Tensor], Tensor]) -> Patch:
    """Change what is sent."""

    def give(original: Any, exchange: Any, a: Any) -> Any:
        message = original(exchange, a)
        if a.payload.name not in payloads.split():
            return message
        return type(message)(
            [change(x) if x.is_floating_point() else x for x in message.tensors], message.facts
        )

    return around(Exchange, "give", give)


TWO = "2 ranks"
add("activations arrive rounded", CALL, given("A", lambda x: x.half().float()), TWO)
add("gradients arrive rounded", GRADIENT, given("G", lambda x: x.half().float()), TWO)
add("the batch arrives changed", CALL, given("D", lambda x: x.flip(0)), "2 ranks, two batches")
add("sums of replicas arrive changed", GRADIENT, given("S T", lambda x: x * 0), "2 replicas")
add("statistics of replicas arrive changed", BUFFER, given("R C", lambda x: x * 0), "2 replicas")


def _own_buffers(original: Any, ownership: Any, j: int) -> Any:
    return [x.clone() for x in original(ownership, j)]


add(
    "statistics of replicas are written beside the module",
    BUFFER,
    around(Ownership, "changing", _own_buffers),
    "2 replicas",
)
add("weights arrive changed", CALL, given("P V", lambda x: x + 1e-6), "2 replicas", steps=2)
