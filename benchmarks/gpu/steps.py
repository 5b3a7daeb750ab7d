"""Parts "one" and "data_parallel": ways to train one GPT-2, in turn, round after round."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

from benchmarks.data_parallel.sharding import shard
from benchmarks.gpu.fits import LitGPT, case_of, fit, in_turn, table
from benchmarks.gpu.ranks import FailedError, Place, Say, run
from benchmarks.gpu.shared import backend
from lightning_cyclic.registration import make_strategy

OURS = ("cyclic_dp", "cyclic_zero")


def one(args: argparse.Namespace, until: float) -> Iterator[str]:
    """Compare plans of one process with plain Lightning, for each size of micro-batches."""
    yield from run(_one, 1, args.device, until, args)


def _one(place: Place, say: Say, args: argparse.Namespace) -> None:
    missing = []
    torch.set_float32_matmul_precision("high")
    for k, rows in enumerate(args.rows):
        case, m = case_of(args, rows=rows), args.micro
        now_s = time.monotonic()
        part = place._replace(until=now_s + (place.until - now_s) / (len(args.rows) - k))
        say(f"  {m} micro-batches of {rows} x {args.length} tokens")
        ways: dict[str, Any] = {
            "accumulate": partial(_fit, case, place, "auto", accumulate=m, rows=rows),
            "1f1b": partial(_fit, case, place, "1f1b"),
            "cyclic_dp": partial(_fit, case, place, "cyclic_dp"),
            "at once": partial(_fit, case, place, "auto"),
        }
        found = in_turn(part, args.rounds, ways, say)
        missing += [name for name in ways if name not in found]
        if "accumulate" in found:
            tokens = m * rows * case.length
            say("\n".join(table(found, "accumulate", tokens, case, share_of="at once")))
        say(f"  a share of (N + 1) / 2N = {(m + 1) / (2 * m):.3f} is what cyclic_dp may keep")
    if missing:
        raise FailedError(f"without figures: {', '.join(missing)}")


def _fit(case: Any, place: Place, way: str, seen: Any, **more: Any) -> None:
    m = case.num_microbatches
    strategy = way if way == "auto" else make_strategy(way, num_microbatches=m, stages=m)
    fit(case, place, strategy, seen=seen, **more)


def data_parallel(args: argparse.Namespace, until: float) -> Iterator[str]:
    """Compare replicated and sharded workers that share the GPU with DDP and FSDP2."""
    yield from run(_data_parallel, 2, args.device, until, args)


def _data_parallel(place: Place, say: Say, args: argparse.Namespace) -> None:
    case = case_of(args, num_microbatches=1, num_workers=place.num_ranks)
    torch.set_float32_matmul_precision("high")
    # DDP comes first, and makes the process group that all of them use
    ways: dict[str, Any] = {
        "ddp": lambda seen: fit(
            case, place, DDPStrategy(process_group_backend=backend(args.device)), seen=seen
        ),
        **{name: partial(_sharing, case, place, name) for name in ("fsdp2", *OURS)},
    }
    found = in_turn(place, args.rounds, ways, say)
    if place.rank == 0:
        tokens = place.num_ranks * case.rows * case.length
        for base in ("ddp", "fsdp2"):
            say("\n".join([f"  ratios to {base}", *table(found, base, tokens, case)]))


def _sharing(case: Any, place: Place, name: str, seen: Any) -> None:
    if name != "fsdp2":
        fit(case, place, make_strategy(name), seen=seen)
        return
    strategy = ModelParallelStrategy(data_parallel_size=place.num_ranks, tensor_parallel_size=1)
    fit(case, place, strategy, seen=seen, module=_Sharded(case))


class _Sharded(LitGPT):
    """Shard each block, as FSDP2's tutorial does."""

    def configure_model(self) -> None:
        assert self.device_mesh is not None
        blocks = list(self.gpt.transformer.h)
        shard(blocks, self.gpt, self.device_mesh["data_parallel"], ahead=False)
