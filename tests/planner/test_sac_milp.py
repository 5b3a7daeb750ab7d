"""Beside torch's own choice of what to run again, ``torch.distributed._tools.sac_ilp.sac_milp``.

It chooses modules, none within another, and of each how much of what it keeps is given up; its
peak is the most, over modules, of what all before them keep and of what they themselves make. So
what it chooses is a schedule with one level of segments, if modules are given up as a whole, and
is counted here as one. Its peaks hold parameters, gradients and those of activations besides.

Costs are exact: bytes as torch's trackers see them, and FLOPs for times, as torch estimates times
on a GPU alone.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.ilp_utils import (
    Graph,
    ModuleInfo,
    aggregate_stats,
    parse_module_info,
)
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed._tools.runtime_estimator import RuntimeEstimator
from torch.distributed._tools.sac_estimator import SACEstimator
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from lightning_cyclic.planner.rematerialisation import (
    Again,
    Keep,
    Schedule,
    Unit,
    best_schedule,
    least_bytes,
)
from lightning_cyclic.runtime.partial_step.call_router import CallRouter
from lightning_cyclic.runtime.partial_step.observed import Chain, Observation
from lightning_cyclic.runtime.partial_step.segments import Recorder
from lightning_cyclic.runtime.stages.cuts import whole
from tests.modules import huggingface
from tests.planner.walk import Walk

pytestmark = pytest.mark.filterwarnings("ignore:.*PuLP 4.0:DeprecationWarning")

CPU = torch.device("cpu")
GIB = 2**30  # in which sac_milp has its budget
GAP = 1.06  # it stops at 5 % from what no solution is below


def chosen(graph: Graph, budget: float, modules: Sequence[str]) -> dict[str, float] | None:
    """Return what sac_milp gives up: of each module a part; None where nothing is enough."""
    from torch.distributed._tools.sac_ilp import sac_milp

    found, _, peak = sac_milp(graph, budget / GIB, ac_units=list(modules))
    return None if peak == -1 else {path: part for path, part in found.items() if part > 0}


def one_level(paths: Sequence[str], given_up: Mapping[str, float]) -> Schedule:
    """Return the schedule in which modules that are given up run again, each with all inside."""
    schedule: list[Keep | Again] = []
    k = 0
    while k < len(paths):
        module = next((m for m in given_up if f"{paths[k]}.".startswith(f"{m}.")), None)
        last = k
        while module and last + 1 < len(paths) and paths[last + 1].startswith(f"{module}."):
            last += 1
        inside = tuple(map(Keep, range(k, last + 1)))
        schedule += [Again(k, last, inside)] if module else inside
        k = last + 1
    return tuple(schedule)


# ---------------------------------------------------------------------- costs that are made up


class Tree(NamedTuple):
    """Hold units, and modules that hold some of them in a row."""

    paths: tuple[str, ...]
    units: tuple[Unit, ...]

    def modules(self) -> list[str]:
        return list(dict.fromkeys(x for path in self.paths for x in _around(path)))

    def graph(self) -> Graph:
        """Make what torch's trackers would, of bytes that are GiB, so that no number is small."""
        before = [0]
        for unit in self.units:
            before.append(before[-1] + unit.kept_bytes)
        stats, pre, post = [], self.modules(), []
        for path in pre:
            inside = [k for k, x in enumerate(self.paths) if f"{x}.".startswith(f"{path}.")]
            first, last = inside[0], inside[-1]
            given_up = before[last + 1] - before[first] - self.units[last].output_bytes
            stats.append(_stats(
                path, act_fw_per_module=given_up * GIB, sac_memory=given_up * GIB,
                act_total=before[last + 1] * GIB,
                sac_runtime=sum(self.units[k].forward_s for k in inside),
            ))  # fmt: skip
        for path, behind in zip(self.paths, (*self.paths[1:], ""), strict=True):
            post += [
                x for x in reversed(list(_around(path))) if not f"{behind}.".startswith(f"{x}.")
            ]
        order: Any = {"fw_pre_order": pre, "fw_post_order": post}
        return parse_module_info(ModuleInfo(mod_order=order, mod_stats=stats))


def _around(path: str) -> Iterator[str]:
    parts = path.split(".")
    for n in range(1, len(parts) + 1):
        yield ".".join(parts[:n])


def _stats(fqn: str, **known: float) -> Any:
    """Say what is known of a module whose whole forward runs again, however little is given up."""
    nothing = dict.fromkeys(
        ("param_per_module", "grad_per_module", "grad_total", "act_bw_per_module",
         "act_grad_per_module", "input_per_module", "output_per_module",
         "fw_runtime_per_module", "bw_runtime_per_module"), 0,
    )  # fmt: skip
    curve = {"n_segments": 1, "slopes": [0.0], "intercepts": [1.0]}
    return {"fqn": fqn, "is_leaf": False, **nothing, **curve, **known}


COSTS = st.builds(
    Unit, forward_s=st.integers(1, 9).map(float), kept_bytes=st.integers(4, 12),
    output_bytes=st.integers(1, 3), is_joined=st.just(True), must_keep=st.just(False),
)  # fmt: skip


@st.composite
def trees(draw: Callable[[Any], Any]) -> Tree:
    groups = draw(st.lists(st.lists(COSTS, min_size=1, max_size=3), min_size=2, max_size=4))
    each = [(f"M.{g}.{n}", unit) for g, group in enumerate(groups) for n, unit in enumerate(group)]
    return Tree(tuple(path for path, _ in each), tuple(unit for _, unit in each))


def _antichains(tree: Tree) -> Iterator[dict[str, float]]:
    """Yield all choices of modules of which none is within another."""
    groups = sorted({path.rpartition(".")[0] for path in tree.paths})

    def of(rest: Sequence[str]) -> Iterator[dict[str, float]]:
        if not rest:
            yield {}
            return
        inside = [path for path in tree.paths if path.startswith(f"{rest[0]}.")]
        for others in of(rest[1:]):
            yield {rest[0]: 1.0} | others
            for bits in range(2 ** len(inside)):
                yield {p: 1.0 for n, p in enumerate(inside) if bits >> n & 1} | others

    yield {"M": 1.0}
    yield from of(groups)


@settings(max_examples=15, deadline=None)
@given(trees(), st.integers(0, 3))
def test_with_the_same_costs_no_limit_is_kept_better_by_torchs_choice(
    tree: Tree, quarter: int
) -> None:
    every = [Walk(tree.units, one_level(tree.paths, x)) for x in _antichains(tree)]
    once = sum(u.forward_s for u in tree.units)
    low, high = min(w.most for w in every), max(w.most for w in every)
    limit = low + (high - low) * quarter // 4
    theirs = chosen(tree.graph(), limit * GIB, tree.modules())
    assert theirs is not None  # as some choice of modules keeps to it
    walk = Walk(tree.units, one_level(tree.paths, theirs))
    # what it counts is what is counted here: it keeps to the limit, and nearly best
    assert walk.most <= limit
    least = min(w.seconds for w in every if w.most <= limit)
    assert least <= walk.seconds <= once + (least - once) * GAP
    ours = best_schedule(tree.units, limit)
    assert ours.peak_bytes <= limit
    assert ours.again_s <= walk.seconds - once
    assert best_schedule(tree.units, walk.most).again_s <= walk.seconds - once
    assert chosen(tree.graph(), (low - 1) * GIB, tree.modules()) is None


def test_segments_within_segments_keep_limits_that_single_ones_do_not() -> None:
    tree = Tree(tuple(f"M.{k}" for k in range(8)), (Unit(1.0, 8, 2),) * 8)
    least = min(Walk(tree.units, one_level(tree.paths, dict.fromkeys(x, 1.0))).most
                for x in ([], tree.paths))  # fmt: skip
    assert least_bytes(tree.units) < least
    assert chosen(tree.graph(), (least - 1) * GIB, tree.modules()) is None
    assert best_schedule(tree.units, least - 1).peak_bytes < least


# ---------------------------------------------------------------------- as torch's trackers see it


class Perceptron(nn.Module):
    """Have blocks of several widths, one after the other."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(64, n), nn.Tanh(), nn.Linear(n, 64)) for n in widths
        )
        self.head = nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def counted(function: Any, args: Any, kwargs: Any) -> tuple[Any, float]:
    """Estimate the time of an operator by its FLOPs."""
    result = function(*args, **(kwargs or {}))
    count = flop_registry.get(function._overloadpacket)
    return result, count(*args, **(kwargs or {}), out_val=result) / 1e6 if count else 0.0


class Case(NamedTuple):
    make: Callable[[], nn.Module]
    step: Callable[[nn.Module], Tensor]


def _perceptron() -> nn.Module:
    return Perceptron(256, 128, 512, 256, 64, 256)


def _texts(model: nn.Module) -> Tensor:
    tokens = torch.zeros(4, 16, dtype=torch.long)
    return model(input_ids=tokens, labels=tokens).loss


CASES = {
    "perceptron": Case(_perceptron, lambda module: module(torch.ones(512, 64)).sum()),
    "gpt2": Case(lambda: huggingface.gpt2(0.0).train(), _texts),
}


def tracked(case: Case) -> Graph:
    """Run torch's trackers."""
    with FakeTensorMode():
        module = case.make()
        memory, runtime, discarded = MemTracker(), RuntimeEstimator(), SACEstimator()
        memory.track_external(module)
        runtime("operator-level-cost-model")._estimate = counted
        discarded._estimate_runtime = counted
        for mode in (memory, runtime):
            with mode:
                case.step(module).backward()
            module.zero_grad(set_to_none=True)
        with discarded:
            case.step(module)
        return parse_module_info(aggregate_stats(module, memory, runtime, discarded, CPU))


def seen(case: Case, flops: Mapping[str, float]) -> list[Chain]:
    """Return the chains that the runtime takes a module for, with FLOPs for times."""
    module = case.make()
    router = CallRouter(module, whole(module), CPU)
    observation = Observation([*module.parameters(), *module.buffers()], flops, ())
    with router.open(), router.followed(observation):
        case.step(module)
    return [x for x in observation.chains(48) if len(x.units) > 2]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_in_a_models_own_units_torchs_choice_is_never_better(case: Case) -> None:
    graph = tracked(case)
    root = graph.nodes[0]["fqn"]
    most = max(
        x["act_total"] + x["act_grad_per_module"] + x["grad_total"] for x in graph.nodes
    ) + graph.nodes[0]["param_per_module"]  # fmt: skip
    compared = better = 0
    flops = {x["fqn"].removeprefix(f"{root}."): x["fw_runtime_per_module"] for x in graph.nodes}
    for chain in seen(case, flops):
        once = sum(u.forward_s for u in chain.units)
        for percent in range(50, 100, 5):
            modules = [f"{root}.{path}" for path in chain.paths]
            theirs = chosen(graph, most * percent / 100, modules)
            if not theirs:
                continue
            given_up = {m.removeprefix(f"{root}."): part for m, part in theirs.items()}
            walk = Walk(chain.units, one_level(chain.paths, given_up))
            ours = best_schedule(chain.units, walk.most)
            assert ours.peak_bytes <= walk.most
            assert ours.again_s <= (walk.seconds - once) * (1 + 1e-9)  # sums in another order
            compared += 1
            better += ours.again_s < (walk.seconds - once) * 0.99
        assert least_bytes(chain.units) < min(
            Walk(chain.units, one_level(chain.paths, dict.fromkeys(x, 1.0))).most
            for x in ([], chain.paths)
        )
    assert compared > better > 0


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_same_choice_costs_what_torchs_checkpoint_costs(case: Case) -> None:
    chain = seen(case, {})[0]
    for path in [x for x in chain.paths if x.rpartition(".")[2].isdecimal()]:
        module, again = case.make(), case.make()
        inner = again.get_submodule(path)
        run = inner.forward
        inner.forward = lambda *args, run=run, **given: checkpoint(
            run, *args, use_reentrant=False, **given
        )
        schedule = one_level(chain.paths, {path: 1.0})
        router = CallRouter(module, whole(module), CPU)
        recorder = Recorder(chain.paths, chain.opened, schedule, lambda _: nullcontext)
        with router.open(), router.followed(recorder):
            ours = measured(module, case.step)
        assert ours == measured(again, case.step)
        assert ours[0] > measured(case.make(), case.step)[0]


def measured(module: nn.Module, step: Callable[[nn.Module], Tensor]) -> tuple[int, int]:
    """Return the FLOPs of a step, and the most bytes that are alive in it."""
    memory = MemTracker()
    memory.track_external(module)
    try:
        gc.collect()
        gc.disable()  # whose moments would show
        with FlopCounterMode(display=False) as flops, memory:
            step(module).backward()
    finally:
        gc.enable()
    return flops.get_total_flops(), memory.get_tracker_snapshot("peak")[CPU]["Total"]
