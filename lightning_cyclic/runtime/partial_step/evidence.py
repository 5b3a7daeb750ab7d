"""Evidence: what a step did, in an order in which two runs of it can be compared bit by bit.

Each item has a name for people and a print: its bits, and a text that shows its value. The same
items are taken from the step that is run in stages, on the workers that run them, and from the
plain one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, final

import torch
from torch import Tensor, nn

from lightning_cyclic.runtime import generators
from lightning_cyclic.runtime.partial_step.losses import loss_of
from lightning_cyclic.runtime.snapshot import Print, print_of, prints, tensor_print
from lightning_cyclic.runtime.values.trees import flatten

if TYPE_CHECKING:
    from lightning_cyclic.runtime.partial_step.stage_step import Outcome

NOTHING = Print("nothing", "nothing")
_MOST_SHOWN = 2


class Item(NamedTuple):
    """Name what is compared.

    Args:
        kind: "call", "draws", "loss", "output", "log", "gradient", "buffer" or "attribute".
        i: micro-batch; -1 for the whole step.
        j: stage; -1 where nobody can say.
        n: how many of the same come before it.
        name: of a module, parameter, buffer, attribute or value.
    """

    kind: str
    i: int
    j: int
    n: int
    name: str
    what: str = ""


Evidence = dict[Item, Print]


@final
class Notes:
    """Take the evidence of a step while it runs."""

    def __init__(self, held: Mapping[str, Any], device: torch.device) -> None:
        named = {f"self.{name}": x for name, x in held.items()}
        self._generators = generators.of_process(device) | named
        self._found: dict[tuple[int, int], Evidence] = {}  # by micro-batch and stage
        self._outcomes: Evidence = {}

    def begin(self, i: int, j: int) -> None:
        """Begin a stage of a micro-batch, which may have been begun before, and misled."""
        self._found[i, j] = {}

    def call(
        self, i: int, j: int, path: str, inputs: Sequence[Print], outputs: Sequence[Tensor]
    ) -> None:
        """Note a call of a module, or of a metric."""
        found = self._found[i, j]
        n = len(found)
        for k, given in enumerate(inputs):
            found[Item("call", i, j, n, path, f"input {k}")] = given
        for k, x in enumerate(outputs):
            found[Item("call", i, j, n, path, f"output {k}")] = tensor_print(x)

    def end(self, i: int, j: int, draws: int) -> None:
        """Note how far generators of random numbers have gone where a stage ends."""
        found = self._found[i, j]
        found[Item("draws", i, j, 0, "between modules")] = print_of(draws)
        for name, x in self._generators.items():
            found[Item("draws", i, j, 0, name)] = print_of(x)

    def outcome(self, i: int, outcome: Outcome) -> None:
        self._outcomes |= outcome_evidence(i, outcome)

    def evidence(self) -> Evidence:
        return self._outcomes | {
            item: x for key in sorted(self._found) for item, x in self._found[key].items()
        }


def outcome_evidence(i: int, outcome: Outcome) -> Evidence:
    """Return what a micro-batch gave: what the step returned, and what it logged."""
    found: Evidence = {}
    output = outcome.output
    leaves, structure = flatten(output)
    found[Item("output", i, -1, 0, "its structure")] = print_of(str(structure))
    if isinstance(output, Tensor) or (isinstance(output, Mapping) and "loss" in output):
        found[Item("loss", i, -1, 0, "loss")] = tensor_print(loss_of(output))
    for k, x in enumerate(leaves):
        found[Item("output", i, -1, k, f"leaf {k}")] = print_of(x)
    for n, (name, value, arguments) in enumerate(outcome.logs):
        found[Item("log", i, -1, n, name)] = log_print(value, arguments)
    return found


def log_print(value: Any, arguments: Mapping[str, Any]) -> Print:
    """Return what a logged value is compared by; of a metric what it gave for its last batch."""
    if isinstance(value, nn.Module):
        value = getattr(value, "_forward_cache", None)
    shown = print_of(value)
    named = {k: getattr(x, "__name__", x) for k, x in sorted(arguments.items())}
    return Print(f"{shown.bits} {named}", shown.text)


def gradient_evidence(j: int, names: Sequence[str], grads: Sequence[Tensor | None]) -> Evidence:
    """Return the sums of gradients of a stage."""
    return {
        Item("gradient", -1, j, 0, name): NOTHING if grad is None else tensor_print(grad)
        for name, grad in zip(names, grads, strict=True)
    }


def state_evidence(
    module: nn.Module, not_state: frozenset[str], stage_of: Mapping[str, int]
) -> Evidence:
    """Return what the module keeps beside its weights.

    Generators of random numbers are compared where stages end (Notes.end).
    """
    buffers = {name for name, _ in module.named_buffers()}
    return {
        Item(
            "buffer" if name in buffers else "attribute", -1, stage_of.get(name, -1), 0, name
        ): found
        for name, found in prints(module, not_state).items()
    }


def as_text(evidence: Evidence) -> str:
    return json.dumps([[*item, *found] for item, found in evidence.items()])


def from_text(text: str) -> Evidence:
    num = len(Item._fields)
    return {Item(*row[:num]): Print(*row[num:]) for row in json.loads(text)}


# ---------------------------------------------------------------------- comparing


class Difference(NamedTuple):
    """Hold one item that is another in the step in stages than in the plain one."""

    item: Item
    plain: Print
    staged: Print


def differences(
    plain: Evidence, by_rank: Sequence[Evidence], *, replicas: int, moves: bool
) -> list[Difference]:
    """Compare, in the order in which things happen.

    What stages, losses and gradients are is asked of the worker that has them. What a module keeps
    is to be right on a worker whose code has changed it; buffers on all that have them. Replicas
    see batches of their own, and keep what they like; the last of them has the buffers.

    Args:
        plain: of the plain step.
        by_rank: of all workers, in the order of ranks.
        replicas: how many there are.
        moves: whether buffers go from worker to worker, so that the last one has them.
    """
    found = []
    items = dict.fromkeys([*plain, *(item for e in by_rank for item in e)])
    for item in sorted(items, key=_order):
        if item.kind == "attribute" and replicas > 1:
            continue
        wanted = plain.get(item, NOTHING)
        given = [e[item] for e in by_rank if item in e] or [NOTHING]
        if item.kind == "attribute" or (item.kind == "buffer" and moves):
            given += [NOTHING] * (len(given) < len(by_rank))
            seen = next((x for x in given if x.bits == wanted.bits), given[0])
        else:
            seen = next((x for x in given if x.bits != wanted.bits), given[0])
        if seen.bits != wanted.bits:
            found.append(Difference(item, wanted, seen))
    return found


_KINDS = (
    "raised",
    "call",
    "draws",
    "loss",
    "output",
    "log",
    "gradient",
    "buffer",
    "attribute",
    "told",
)


def _order(item: Item) -> tuple[int, ...]:
    """Return what items are sorted by: gradients are made from the last stage to the first."""
    kind = _KINDS.index(item.kind)
    group = -1 if item.kind == "raised" else 0 if item.kind in ("call", "draws") else kind
    return group, item.i, -item.j if item.kind == "gradient" else item.j, kind, item.n


def words(
    found: Sequence[Difference], num_microbatches: int, t: int, *, starts: Sequence[str]
) -> str:
    """Say what differs first, where it is made, both values, and what to do."""
    first = found[0]
    also = [_name_of(d.item, num_microbatches) for d in found[1 : _MOST_SHOWN + 1]]
    more = len(found) - 1 - len(also)
    rest = f"; besides: {', '.join(also)}" if also else ""
    rest += f" and {more} more" if more > 0 else ""
    return (
        f"step {t}: {_name_of(first.item, num_microbatches)} is {first.staged.text} where the "
        "step is "
        f"run in stages, but {first.plain.text} where training_step is run on the whole module"
        f"{_bits_remark(first)}{rest}; allowed: steps that come out alike, bit by bit; "
        f"{_todo(first, starts)}, or leave the comparison out with "
        "verify=False, if you know why they differ"
    )


def _bits_remark(d: Difference) -> str:
    if d.plain.text != d.staged.text:
        return ""
    return f" (bits {d.staged.bits[-16:]} and {d.plain.bits[-16:]})"


_NAMES = {
    "raised": "the {name} of training_step",
    "call": "{what} of {name}{stage}{micro}",
    "draws": "how far {name} has drawn{stage}{micro}",
    "log": "the value of self.log({name!r}){micro}",
    "loss": "the loss{micro}",
    "output": "what training_step returned ({name}){micro}",
    "told": "{name} of the whole batch",
    "gradient": "the gradient of {name!r}{stage}",
    "buffer": "the buffer self.{name}{stage}",
    "attribute": "self.{name}{stage}",
}


def _name_of(item: Item, num_microbatches: int) -> str:
    micro = f" in micro-batch {item.i + 1} of {num_microbatches}" if item.i >= 0 else ""
    stage = f" (stage {item.j})" if item.j >= 0 else ""
    return _NAMES[item.kind].format(name=item.name, what=item.what, stage=stage, micro=micro)


def _todo(d: Difference, starts: Sequence[str]) -> str:
    item = d.item
    if item.kind in ("attribute", "buffer"):
        return (
            f"let one stage have all code that uses self.{item.name}, "
            "stages=[...], or change it in a hook between steps"
        )
    if item.kind == "draws":
        return "draw by functions of torch, random or numpy.random, or let the DataLoader draw"
    if item.kind == "call" and item.what.startswith("input") and item.j == 0:
        return (
            "let what the step computes with come with the batch: what it reads elsewhere (a "
            "global, an iterator, a file) is read once more here, and once for each stage"
        )
    if not starts:
        return "use num_microbatches=1"
    return (
        f"let stages begin elsewhere than at {', '.join(map(repr, starts))}, "
        "stages=[...], so that the code around it is in one of them"
    )


def told_differences(expected: Mapping[str, Print], told: Mapping[str, Print]) -> list[Difference]:
    """Compare what a step was told to be with what was to be told."""
    names = dict.fromkeys([*expected, *told])
    pairs = ((n, expected.get(n, NOTHING), told.get(n, NOTHING)) for n in names)
    return [
        Difference(Item("told", -1, -1, k, name), x, y)
        for k, (name, x, y) in enumerate(pairs)
        if x.bits != y.bits
    ]


def unlike_itself(d: Difference, num_microbatches: int) -> str:
    return (
        "training_step on the whole module does not come out alike when it is run twice: "
        f"{_name_of(d.item, num_microbatches)} differs. What is trained in stages may differ by "
        "as much from the plain step; threads, atomic additions on a GPU, and what a step reads "
        "elsewhere, as the clock, do that."
    )
