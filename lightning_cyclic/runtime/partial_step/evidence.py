"""Evidence: what a step did, in an order in which two runs of it can be compared bit by bit.

Each item has a name for people and a print: its bits, and a text that shows its value. The same
items are taken from the step that is run in stages, on the workers that run them, and from the
plain one.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, final

import torch
from torch import Tensor, nn

from lightning_cyclic.runtime.partial_step.losses import loss_of
from lightning_cyclic.runtime.snapshot import Print, print_of, tensor_print
from lightning_cyclic.runtime.values.trees import flatten

if TYPE_CHECKING:
    from lightning_cyclic.runtime.partial_step.stage_step import Outcome

NOTHING = Print("nothing", "nothing")


class Item(NamedTuple):
    """Name what is compared.

    Args:
        kind: "call", "draws", "loss", "output", "log", "gradient", "buffer" or "attribute".
        i: micro-batch; -1 for the whole step.
        j: stage; -1 where nobody can say.
        n: how many of the same come before it.
        name: of a module, parameter, buffer, attribute or value.
        what: of it.
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
    """Take the evidence of a step while it runs.

    Args:
        generators: of the module's own, by name.
        device: of this worker.
    """

    def __init__(self, generators: Mapping[str, Any], device: torch.device) -> None:
        named = {f"self.{name}": x for name, x in generators.items()}
        self._generators = dict(_global_generators(device)) | named
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
        """Note how far generators of random numbers have gone where a stage ends.

        Args:
            i: micro-batch.
            j: stage.
            draws: number of draws between modules since the micro-batch began.
        """
        found = self._found[i, j]
        found[Item("draws", i, j, 0, "between modules")] = print_of(draws)
        for name, x in self._generators.items():
            found[Item("draws", i, j, 0, name)] = print_of(x)

    def outcome(self, i: int, outcome: Outcome) -> None:
        """Note what a micro-batch gave."""
        self._outcomes |= outcome_evidence(i, outcome)

    def evidence(self) -> Evidence:
        """Return it in the order of micro-batches and stages."""
        return self._outcomes | {
            item: x for key in sorted(self._found) for item, x in self._found[key].items()
        }


def _global_generators(device: torch.device) -> Iterator[tuple[str, Any]]:
    yield "torch", torch.default_generator
    if device.type == "cuda":
        yield "torch.cuda", torch.cuda.default_generators[device.index or 0]
    yield "random", random._inst
    if (numpy := sys.modules.get("numpy")) is not None:
        yield "numpy.random", numpy.random.mtrand._rand


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
