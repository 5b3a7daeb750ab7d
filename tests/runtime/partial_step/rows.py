"""Layers of which tests say how they are used, compared stage by stage with a plain run."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.runtime.partial_step.hand import router_of, run_stages

X = torch.linspace(-1, 1, 8).reshape(2, 4)


class Layer(nn.Linear):
    """Say when it is called."""

    def __init__(self, name, seen):
        super().__init__(4, 4)
        self.name, self.seen = name, seen

    def forward(self, x):
        self.seen.append(self.name)
        return torch.tanh(super().forward(x))


class Row(nn.Module):
    """Layers of which subclasses say how they are used."""

    def __init__(self):
        super().__init__()
        self.seen, self.extra = [], None
        torch.manual_seed(0)
        self.a, self.b, self.c = (Layer(name, self.seen) for name in "abc")

    def forward(self, x):
        h = self.a(x)
        self.seen.append("glue 1")
        h = self.b(F.relu(h) + x)
        self.seen.append("glue 2")
        return self.c(h + x.mean()).sum()


def step_of(model, x=X):
    return lambda: model(x.clone())


def check(model, *starts, x=X):
    """Compare with a plain run; return the runs."""
    runs, output = run_stages(router_of(model, *starts), step_of(model, x))
    assert torch.equal(output, model(x.clone()))
    return runs
