"""Activations that a codec makes smaller, of all workers in one process, against the rule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_cyclic import TopK
from lightning_cyclic.plan import make_plan
from lightning_cyclic.runtime.codecs.activations import crossing_codec_of
from tests.harness.rows import more
from tests.references import asynchronous
from tests.references.crossings import cut

from .crews import NUM_STEPS, Crew, batch

DENSITY = 0.1


class Wide(nn.Module):
    """Eight layers, whose outputs have 100 elements of each sample, and a skip over all of them.

    Args:
        starts: of stages, where this is the reference of a run in stages.
    """

    def __init__(self, starts: tuple[int, ...] = ()) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6 if k == 0 else 100, 100) for k in range(8))
        self.starts = starts

    def step(self, x: Tensor) -> Tensor:
        skip = y = torch.tanh(self.layers[0](x))
        for k in range(1, 8):
            if k in self.starts:
                skip, y = cut(skip, DENSITY), cut(y, DENSITY)
            y = torch.tanh(self.layers[k](y)) + 0.1 * skip
        return y.square().mean()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


@pytest.mark.parametrize(
    ("preset", "num_stages", "num_workers", "num_micro", "remat"),
    [
        ("cyclic_pipeline", 4, 4, 3, "never"),
        ("pipedream_2bw", 2, 2, 2, "always"),
        ("pipedream", 4, 1, 1, "never"),
        ("cyclic_mp", 4, 10, 4, "never"),
        more("cyclic_pipeline", 4, 2, 4, "except_last"),
        more("pipedream", 8, 4, 1, "always"),
        more("pipedream_2bw", 4, 1, 4, "never"),
    ],
)
def test_the_rule_of_old_weights_bit_by_bit(
    preset: str, num_stages: int, num_workers: int, num_micro: int, remat: str
) -> None:
    numbers = {"num_stages": num_stages, "num_workers": num_workers}
    plan = make_plan(preset, num_microbatches=num_micro, **numbers)
    codec = crossing_codec_of(TopK(density=DENSITY))
    crew = Crew(plan, Wide, sgd, remat=remat, activations=codec)
    crew.train(flush_after=(3,))
    size = 8 // num_stages
    expected = Wide(tuple(range(size, 8, size)))
    named = dict(expected.named_parameters())

    def loss(module: Any, t: int, i: int) -> Tensor:
        value: Tensor = module.step(batch(t * num_micro + i))
        return value

    asynchronous.train(
        expected, [[named[n] for n in names] for names in crew.cuts.parameters],
        sgd(expected.parameters()), loss,
        rule=plan.weights, num_microbatches=num_micro, num_steps=NUM_STEPS,
    )  # fmt: skip
    crew.compare(expected)
