"""Run a step stage by stage by hand, as workers would, without messages."""

from __future__ import annotations

import torch
from torch import nn

from lightning_cyclic.runtime.partial_step.call_router import CallRouter
from lightning_cyclic.runtime.partial_step.replay import Replay
from lightning_cyclic.runtime.partial_step.run import Delivery, Run
from lightning_cyclic.runtime.partial_step.sharing import Sharing
from lightning_cyclic.runtime.randomness import Randomness
from lightning_cyclic.runtime.stages.cuts import Cuts

CPU = torch.device("cpu")


def cuts_of(model: nn.Module, starts, *, tied=None, split=(), metrics=None, changed=()) -> Cuts:
    """Cut a module whose children are called in their order."""
    stage, parameters, buffers = 0, [[] for _ in range(len(starts) + 1)], []
    buffers = [[] for _ in parameters]
    for path, m in model.named_modules():
        stage = starts.index(path) + 1 if path in starts else stage
        prefix = f"{path}." if path else ""
        parameters[stage] += [prefix + n for n, _ in m.named_parameters(recurse=False)]
        buffers[stage] += [prefix + n for n, _ in m.named_buffers(recurse=False)]
    known = dict(model.named_parameters())
    return Cuts(
        starts=tuple(starts),
        split=frozenset(split),
        parameters=tuple(tuple(n for n in names if n in known) for names in parameters),
        tied=dict(tied or {}),
        buffers=tuple(map(tuple, buffers)),
        changed=frozenset(changed),
        metrics=dict(metrics or {}),
    )


def router_of(model: nn.Module, *starts: str, **more) -> CallRouter:
    return CallRouter(model, cuts_of(model, starts, **more), CPU)


def run_stage(
    router: CallRouter, step, target: int, before=(), *, received=None, chance=None, wanted=None,
    path=None, likely=(), replays=None, reads=None,
):  # fmt: skip
    """Run one stage behind the runs of the stages before.

    Returns:
        The run, and what the step returned.
    """
    if received is None:
        received = {h: x.detach() for h, x in before[-1].record.captured.items()} if before else {}
    if replays is None:
        replays = replays_of(router, before)
    delivery = Delivery(received, wanted, path, likely, Sharing({}, {}))
    chance = chance or Randomness(0, 0, 0, CPU)
    run = Run(router, target, replays, lambda: delivery, chance, reads)
    with router.open():
        return run, run(step)


def replays_of(router, before) -> list[Replay]:
    """Replay the stages before."""
    return [Replay(j, tuple(run.record.tape), router) for j, run in enumerate(before)]


def run_stages(router: CallRouter, step, watch=lambda target: None):
    """Run all stages; return the runs and what the last returned."""
    runs, output = [], None
    for target in range(router.num_stages):
        watch(target)
        run, output = run_stage(router, step, target, runs)
        runs.append(run)
    return runs, output
