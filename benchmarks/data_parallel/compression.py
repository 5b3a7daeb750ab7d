"""Compare what sends fewer bytes: codecs, local steps, and torch's hooks of DDP.

    python -m benchmarks compression                          2 workers, 100 Mbit/s
    python -m benchmarks compression --only '8 workers, 1gb'  another case
    python -m benchmarks compression --case codecs            seconds of each codec, one thread

All contenders take turns in the same rounds, on links of network namespaces (root), with compute
slept. Figures are seconds per step from the end of the warm-up to the end of the last step
everywhere, as ratios to plain DDP of the same round: median (lowest - highest). Beside them stands
what the package's simulator says of that ratio, and a step in milliseconds, measured and
simulated; it is given the step of a worker alone, the bytes of each codec for these tensors, and
the seconds that one thread takes to encode and decode them.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import cycle
from statistics import median
from time import thread_time
from typing import Any, NamedTuple

import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import (
    PowerSGDState,
    powerSGD_hook,
)

from benchmarks.data_parallel import replicated
from benchmarks.data_parallel.fits import WARM_UP, Case, Net, Taken, in_turn, timed
from benchmarks.rounds import quiet, result, spread
from lightning_cyclic import PRESETS, CyclicStrategy, Dct, LocalSteps, PowerSgd, TopK, make_plan
from lightning_cyclic.plugin.option_values import OfGradients
from lightning_cyclic.runtime.codecs.choice import codec_of
from lightning_cyclic.runtime.codecs.coded import CodedStage, Codes
from lightning_cyclic.runtime.gradient_store import WIRE_DTYPES
from lightning_cyclic.runtime.whole_step.session import auto_stages
from lightning_cyclic.simulate import Costs, Network, compare, lockstep
from lightning_cyclic.simulate.lockstep import ring

EVERY = 8  # steps of a period of local steps; what is measured is one
RANK = 4
CODECS: Mapping[str, OfGradients] = {
    "bf16": "bf16",
    "fp16": "fp16",
    "int8": "int8",
    "topk": TopK(density=0.01),
    "dct": Dct(density=0.01),
    "powersgd": PowerSgd(rank=RANK),
}
DDP = ("ddp", "ddp+fp16", "ddp+bf16", "ddp+powersgd", "ddp+local")
CYCLIC = ("cyclic_dp", *(f"cyclic_dp+{x}" for x in ("bf16", "int8", "topk", "dct", "powersgd")))
LOCKSTEP = ("lockstep_dp", "lockstep_dp+int8", "lockstep_dp+dct")
LOCAL = ("diloco", "streaming_diloco")
CONTENDERS = ("alone", *DDP, *CYCLIC, *LOCKSTEP, *LOCAL)
_WIDTHS = {"10mbit": 96, "100mbit": 256, "1gbit": 640}  # whose bytes take about as long
CASES = [
    Case(
        name=f"{n} workers, {rate}", num_workers=n, step_s=0.2 if n == 8 else 0.1, width=width,
        depth=8, batch=8, rate=rate, num_steps=WARM_UP + EVERY, rounds=2,
        strategies=CONTENDERS,
    )
    for rate, width in _WIDTHS.items()
    for n in (2, 4, 8)
]  # fmt: skip
SMOKE = (
    "--only", "2 workers, 1gb", "--rounds", "1", "--width", "32", "--num-steps", "10",
    "--loopback",
)  # fmt: skip
_REPEATS = 9  # of what is timed
_OTHERS = 4  # gradients that take turns, as none comes twice in training
_LONG = 200  # steps, behind which a threshold is seldom too old


# ---------------------------------------------------------------------- one worker


class HookedDDP(DDPStrategy):
    """Be DDP with a hook of torch's; Lightning passes one on where there are GPUs alone."""

    def __init__(self, state: Any, hook: Callable[..., Any], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._own_state, self._own_hook = state, hook

    def configure_ddp(self) -> None:
        """Wrap the module, and register the hook."""
        super().configure_ddp()
        self.model.register_comm_hook(self._own_state, self._own_hook)  # type: ignore[union-attr,operator]


_Hook = Callable[[Any, Any], Any]


def _passed_on(hook: _Hook) -> _Hook:
    """Return a hook that DDP knows neither by its name nor by its annotations.

    It takes none in which annotations are text, and not torch's for bfloat16 without NCCL.
    """

    def passed_on(state: Any, bucket: Any) -> Any:
        return hook(state, bucket)

    passed_on.__annotations__ = {}
    return passed_on


def _own(state: Any, bucket: Any) -> Any:
    """Leave each worker its own gradients, as post-local SGD does behind its warm-up."""
    found: torch.futures.Future[Tensor] = torch.futures.Future()
    found.set_result(bucket.buffer())
    return found


def _ddp(hook: str) -> DDPStrategy | str:
    if hook == "fp16":
        return HookedDDP(None, default_hooks.fp16_compress_hook)
    if hook == "bf16":
        return HookedDDP(None, _passed_on(default_hooks.bf16_compress_hook))
    if hook == "powersgd":
        # in one bucket: of several, callbacks call all-reduces in no order that ranks share
        state = PowerSGDState(None, RANK, start_powerSGD_iter=2)
        return HookedDDP(state, powerSGD_hook, bucket_cap_mb=25)
    if hook == "local":
        local = PostLocalSGDState(None, None, 0, post_local_gradient_allreduce=False)
        return HookedDDP(
            None, _passed_on(_own), ddp_comm_state=local, model_averaging_period=EVERY
        )
    return "ddp"


def strategy_of(name: str) -> Any:
    """Return what the Trainer is given for one of CONTENDERS."""
    preset, _, codec = name.partition("+")
    if preset == "ddp":
        return _ddp(codec)
    if preset in LOCAL:
        return CyclicStrategy(LocalSteps(every=EVERY, in_turn=preset != "diloco"))
    if codec:
        return CyclicStrategy(preset, compress=CODECS[codec])
    return replicated.strategy_of(name, 0)


def train(case: Case, name: str) -> Taken:
    """Train once."""
    shards = 1 if name == "alone" else case.num_workers
    return timed(case, strategy_of(name), Net(case), shards=shards)


def work(case: dict[str, Any]) -> None:
    """Be one worker: all contenders, round after round; worker 0 prints what they took."""
    quiet()
    found = in_turn(Case(**case), train)
    if os.environ["NODE_RANK"] == "0":
        result(found)


# ---------------------------------------------------------------------- codecs by themselves


class Coded(NamedTuple):
    """Hold what a codec makes of one layer's gradients, on one thread.

    Args:
        num_bytes: that are sent.
        encode_s: of one worker's.
        decode_s: of one message.
    """

    num_bytes: int
    encode_s: float
    decode_s: float


def coded(name: str, width: int, behind: int = WARM_UP) -> Coded:
    """Measure a codec on the gradients of a layer.

    Args:
        behind: how many others it has encoded before.
    """
    several = cycle([[torch.randn(width, width), torch.randn(width)] for _ in range(_OTHERS)])
    grads, codec = next(several), codec_of(CODECS[name])
    if codec is None:
        dtype = WIRE_DTYPES[name]
        sent = [x.to(dtype) for x in grads]
        return Coded(
            sum(x.nbytes for x in sent),
            _seconds(lambda: [x.to(dtype) for x in next(several)]),
            _seconds(lambda: [x.to(torch.float32) for x in sent]),
        )
    stage = CodedStage(Codes(codec), ["weight", "bias"], [x.to("meta") for x in grads])
    room = [torch.empty_like(x, device="cpu") for x in stage.tensors]
    return Coded(
        sum(x.nbytes for x in room),
        _seconds(lambda: stage.write(0, list(next(several)), room), behind),
        _seconds(lambda: stage.read(None, room)),
    )


def _seconds(do: Callable[[], object], behind: int = 2) -> float:
    """Return the median of the seconds that this thread computes, behind some runs."""
    for _ in range(behind):
        do()
    found = []
    for _ in range(_REPEATS):
        begun = thread_time()
        do()
        found.append(thread_time() - begun)
    return median(found)


def tell_codecs(width: int) -> None:
    """Print what each codec takes for a layer of such a width, once it has run for long."""
    torch.set_num_threads(1)
    mega = 4 * width * (width + 1) / 1e6
    print(f"\ngradients of {width} x {width}, one thread, of a MB of float32")
    for name in CODECS:
        found = coded(name, width, behind=_LONG)
        print(
            f"  {name:10} sends {found.num_bytes / mega / 1000:6.1f} kB; encodes in "
            f"{1000 * found.encode_s / mega:6.2f} ms, decodes in "
            f"{1000 * found.decode_s / mega:6.2f} ms",
            flush=True,
        )


# ---------------------------------------------------------------------- what is simulated


class Expected(NamedTuple):
    """Hold what the simulator is asked for.

    Args:
        compute_s: of a step of a worker alone.
        codecs: what each does with a layer of the case.
    """

    case: Case
    compute_s: float
    codecs: Mapping[str, Coded]

    def step_s(self, name: str) -> float:
        """Return the seconds of a step by the package's simulator."""
        preset, _, codec = name.partition("+")
        return self._of_ddp(codec) if preset == "ddp" else self._of_ours(preset, codec)

    @property
    def _network(self) -> Network:
        return replicated.network_of(self.case)

    def _of_ours(self, preset: str, codec: str) -> float:
        case = self.case
        most = min(auto_stages(case.num_workers, case.model_bytes), case.depth)
        costs = Costs.even(most, compute_s=self.compute_s, model_bytes=case.model_bytes)
        if codec:
            costs = self._compressed(costs, codec)
        plan = make_plan(
            preset, num_stages=most, num_workers=case.num_workers, num_steps=12,
            weights=replace(PRESETS[preset].local, every=EVERY) if preset in LOCAL else None,
            to_owners=codec_of(CODECS.get(codec)) is not None,
        )  # fmt: skip
        return compare(plan, costs, self._network).plan.step_s

    def _compressed(self, costs: Costs, codec: str) -> Costs:
        found, layer_bytes = self.codecs[codec], self.case.model_bytes / self.case.depth
        return costs.compressed(
            lambda elements: 4 * elements / layer_bytes * found.num_bytes,
            encode_bytes_per_s=layer_bytes / found.encode_s,
            decode_bytes_per_s=layer_bytes / found.decode_s,
        )

    def _of_ddp(self, hook: str) -> float:
        case = self.case
        costs = Costs.even(case.depth, compute_s=self.compute_s, model_bytes=case.model_bytes)
        if hook == "local":  # nothing but a mean of all weights, every so many steps
            exchange = ring(case.model_bytes, case.num_workers, self._network)
            return self.compute_s + exchange.seconds / EVERY
        if hook:
            shares = self._compressed(costs, hook)
            costs = replace(
                costs, param_bytes=shares.sent_sum_bytes, sent_param_bytes=(), sent_sum_bytes=()
            )
        return lockstep(costs, self._network, case.num_workers, bucket_bytes=25 << 20).step_s


# ---------------------------------------------------------------------- all workers of a case


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say what can be chosen."""
    parser.add_argument("--case", choices=("links", "codecs"), default="links")
    parser.add_argument("--only", default="2 workers, 100mbit", help="cases that contain this")
    parser.add_argument("--rounds", type=int, help="how often every contender trains")
    parser.add_argument("--num-steps", type=int, help=f"of a fit, {WARM_UP} of them to warm up")
    parser.add_argument("--width", type=int, help="features of every layer")
    parser.add_argument("--strategies", nargs="+", help="with alone and ddp first")
    parser.add_argument("--loopback", action="store_true", help="without limits of links")
    parser.add_argument(
        "--slower", type=float, default=1, help="how many times longer compute and links take"
    )


def run(args: argparse.Namespace) -> None:
    """Run the cases that were asked for and print their table."""
    if args.case == "codecs":
        for width in [args.width] if args.width else _WIDTHS.values():
            tell_codecs(width)
        return
    for case in replicated.chosen(CASES, args):
        on_link = replace(case, rate="") if args.loopback else case
        report(on_link if args.slower == 1 else replicated.slowed(on_link, args.slower))


def report(case: Case) -> None:
    """Run a case, and print a row for each contender."""
    torch.set_num_threads(1)
    codecs = {name: coded(name, case.width) for name in CODECS}
    found = replicated.measure(case, "compression")
    compute_s = median(taken.steady_s for taken in found.pop("alone"))
    expected = Expected(case, compute_s, codecs)
    ddp, ddp_s = found["ddp"], expected.step_s("ddp")
    print(
        f"\n{case.name}, {case.model_bytes / 1e6:.2f} MB: DDP "
        f"{1000 * median(x.step_s for x in ddp):.0f} ms per step, {1000 * compute_s:.0f} ms "
        f"alone; load average {os.getloadavg()[0]:.1f}"
    )
    for name, fits in found.items():
        ratio = spread([a.step_s / b.step_s for a, b in zip(fits, ddp, strict=True)])
        step_s, simulated_s = median(x.step_s for x in fits), expected.step_s(name)
        cpu_s = median(x.cpu_s for x in fits)
        print(
            f"  {name:22} {ratio} of DDP's time; simulated {simulated_s / ddp_s:.3f}; "
            f"{1000 * step_s:.0f} ms per step, simulated {1000 * simulated_s:.0f}, "
            f"{step_s / simulated_s:.3f} of it; {1000 * cpu_s:.0f} ms of CPU",
            flush=True,
        )
