"""Part "memory": what pruned states keep, and the peak of a step beside the package's account."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.fits import GIB, LitGPT, Seen, case_of, clear, fit
from benchmarks.gpu.ranks import Place, Say, run
from benchmarks.gpu.shared import backend, missing_nccl
from benchmarks.pipeline.model import Case
from lightning_cyclic import SparseStatePrecision, make_plan
from lightning_cyclic.registration import make_strategy
from lightning_cyclic.runtime.partial_step.collectives import rank_of
from lightning_cyclic.runtime.stages.best_places import Demands
from lightning_cyclic.runtime.stages.cuts import choose_cuts
from lightning_cyclic.runtime.stages.report import loads
from lightning_cyclic.runtime.stages.survey import survey
from lightning_cyclic.simulate import Network

SPARSITY = 0.9
_ADAM = 2  # moments of each parameter, in its own precision
_LIMIT = 1.02  # of what the account says of the worker with most


def memory(args: argparse.Namespace, until: float) -> Iterator[str]:
    """Compare pruned states with dense ones, and peaks with what the package says of them."""
    yield from run(_pruned, 1, args.device, until, args)
    yield from run(_accounts, 2, args.device, until, args)


def _pruned(place: Place, say: Say, args: argparse.Namespace) -> None:
    case = case_of(args, rows=1, num_microbatches=1, dtype=torch.float32, is_tied=False)
    dense = None
    for name in ("bf16-mixed", "compressed"):
        seen, module = Seen(), LitGPT(case)
        how: dict[str, Any] = {"precision": name}
        if name == "compressed":
            how = {"precision": None, "plugins": [SparseStatePrecision(mask=_masks(module))]}
        fit(case, place, "auto", seen=seen, module=module, **how)
        del module, how
        clear()
        dense = dense or seen
        kept, peak = (
            _beside(a, b)
            for a, b in (
                (seen.between_bytes, dense.between_bytes), (seen.peak_bytes, dense.peak_bytes),
            )
        )  # fmt: skip
        say(
            f"  {name:12}{1e3 * seen.step_s[-1]:8.1f} ms a step; between steps {kept}; peak {peak}"
        )


def _masks(module: LitGPT) -> dict[str, Tensor]:
    """Return masks of what is kept of each block's matrices: some of its elements, at random."""
    return {
        name: (torch.rand_like(p) > SPARSITY).cpu()
        for name, p in module.gpt.transformer.h.named_parameters(prefix="gpt.transformer.h")
        if p.dim() == 2
    }


def _beside(num_bytes: float, other: float) -> str:
    if not num_bytes or not other:
        return "unknown"
    return f"{num_bytes / GIB:.2f} GiB ({num_bytes / other:.3f})"


def _accounts(place: Place, say: Say, args: argparse.Namespace) -> None:
    case = case_of(args, num_stages=2, num_workers=2, is_tied=False)
    for remat in ("always", "never"):
        accounts = _account(case, again=remat == "always")
        clear()
        options: dict[str, Any] = {"activation_checkpointing": remat}
        if remat == "never":
            options["memory_limit_bytes"] = int(_LIMIT * max(accounts))
        seen = _peak(case, place, options)
        mine = accounts[rank_of(place.rank, 2)]
        line = f"  rank {place.rank}, 1f1b, {_said(options)}: account {mine / GIB:.3f} GiB, peak "
        say(f"{line}{_beside(seen.peak_bytes, mine)}")


def _said(options: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in options.items())


def _account(case: Case, *, again: bool) -> list[float]:
    """Return what the package says that each worker keeps, by which it cuts stages."""
    module = LitGPT(case)
    plan = make_plan("1f1b", num_stages=2, num_workers=2, num_microbatches=case.num_microbatches)
    demands = Demands.of(plan, again=again, network=Network(), state_per_param=_ADAM)
    assert demands is not None
    batch = case.batch()[: case.rows]
    seen = survey(module, lambda: module.training_step(batch))
    of_stages = loads(seen, choose_cuts(seen, 2, demands=demands))
    sent = [*(load.crossing_bytes for load in of_stages[1:]), 0]
    return [
        demands.kept_bytes(j, load, n)
        for j, (load, n) in enumerate(zip(of_stages, sent, strict=True))
    ]


def _peak(case: Case, place: Place, options: dict[str, Any]) -> Seen:
    talks = "gloo" if missing_nccl(case.device) else backend(case.device)
    strategy = make_strategy(
        "1f1b", num_microbatches=case.num_microbatches, stages=2, process_group_backend=talks,
        **options,
    )  # fmt: skip
    seen = Seen()
    fit(case, place, strategy, seen=seen)
    clear()
    return seen
