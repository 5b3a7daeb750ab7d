"""Cut a graph into stages by mixed-integer linear programming, with HiGHS from SciPy.

    minimise T    for each stage i:   sum_v seconds_v x_vi                      <=  T
                                      sum_c transfer_c (y_c,i-1 + y_ci)         <=  T
                                      sum_v x_vi                                >=  1
                  for each node v:    sum_i x_vi = 1
                  u before v:         sum_i i x_ui <= sum_i i x_vi
                  for each tensor c with maker u, user v, behind each stage i:
                                      sum_{k<=i} x_uk - sum_{k<=i} x_vk         <=  y_ci

The published programme asks for contiguous stages only, which lets two of them depend on each
other, so that a stage is entered twice; the fifth line is what makes it a pipeline.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from math import inf
from operator import or_
from typing import Any, TypeAlias, final

from lightning_cyclic.errors import PlanError
from lightning_cyclic.planner.graph import CostGraph, GraphSplit, check_parts, nodes_in

_Row: TypeAlias = tuple[dict[int, float], float, float]  # coefficients, lower and upper bound


def split_milp(graph: CostGraph, parts: int, *, limit_s: float = 60.0) -> GraphSplit:
    """Cut a graph into stages, none empty, in whatever order; for graphs with too many ideals.

    Args:
        graph: the graph.
        parts: number of stages.
        limit_s: seconds after which the best so far is taken. [60]

    Returns:
        The stages; what the slowest takes is computed from them, not taken from the solver.

    Raises:
        PlanError: SciPy is not installed, more stages than nodes, or none were found in time.

    Source: Tarnawski et al., NeurIPS 2020, the integer programme of the throughput problem,
        https://arxiv.org/abs/2006.16423; the order of the stages, and what they send, are ours.
    """
    check_parts(graph, parts)
    optimize, sparse = _scipy()
    programme = _Programme(graph, parts)
    rows = list(programme.rows())
    entries = [
        (r, column, value) for r, row in enumerate(rows) for column, value in row[0].items()
    ]
    r, columns, values = zip(*entries, strict=True)
    matrix = sparse.csr_array((values, (r, columns)), shape=(len(rows), programme.width))
    is_whole = [int(column < programme.num_choices) for column in range(programme.width)]
    found = optimize.milp(
        c=[0.0] * (programme.width - 1) + [1.0],
        constraints=optimize.LinearConstraint(matrix, [x[1] for x in rows], [x[2] for x in rows]),
        integrality=is_whole,
        bounds=optimize.Bounds([0.0] * programme.width, [1.0] * (programme.width - 1) + [inf]),
        options={"mip_rel_gap": 0.0, "time_limit": limit_s},
    )
    if found.x is None:
        raise PlanError(
            f"no split of {graph.num_nodes} nodes was found in {limit_s:g} s; allowed: any limit; "
            "raise limit_s=, or use split_ideals(graph, ...)"
        )
    return GraphSplit.of(graph, programme.ends(found.x))


def _scipy() -> tuple[Any, Any]:
    """Import SciPy only when it is asked for: the planning floors need no NumPy."""
    try:
        from scipy import optimize, sparse  # noqa: PLC0415
    except ImportError as error:
        raise PlanError(
            "split_milp needs SciPy, which is not installed; allowed: SciPy 1.9 or later; "
            "run: pip install 'lightning-cyclic[milp]', or use split_ideals"
        ) from error
    return optimize, sparse


@final
class _Programme:
    """Number the variables: x by node and stage, y by tensor and cut, T.

    Tensors that take no time, on a network without limits, have no variables. Times are in terms
    of the longest: the solver takes what is below 1e-6, a microsecond say, for nothing.
    """

    def __init__(self, graph: CostGraph, parts: int) -> None:
        self.graph = graph
        self.parts = parts
        sent = [(graph.network.transfer_s(x.num_bytes), x) for x in graph.tensors]
        longest = max([*graph.seconds, *(s for s, _ in sent)]) or 1.0
        self.computing = [s / longest for s in graph.seconds]
        self.sent = [(s / longest, x) for s, x in sent if s > 0]
        self.num_choices = graph.num_nodes * parts
        self.width = self.num_choices + len(self.sent) * (parts - 1) + 1

    def rows(self) -> Iterator[_Row]:
        """Yield the constraints."""
        nodes, slowest = range(self.graph.num_nodes), {self.width - 1: -1.0}
        for i in range(self.parts):
            yield {self._x(v, i): self.computing[v] for v in nodes} | slowest, -inf, 0.0
            yield self._messages(i) | slowest, -inf, 0.0
            yield {self._x(v, i): 1.0 for v in nodes}, 1.0, inf
        for v, before in enumerate(self.graph.before):
            yield {self._x(v, i): 1.0 for i in range(self.parts)}, 1.0, 1.0
            for u in nodes_in(before):
                yield self._stage(u, 1.0) | self._stage(v, -1.0), -inf, 0.0
        for c, (_, tensor) in enumerate(self.sent):
            for v in set(tensor.users):
                yield from self._crossings(c, tensor.maker, v)

    def _messages(self, i: int) -> dict[int, float]:
        cuts = [cut for cut in (i - 1, i) if 0 <= cut < self.parts - 1]
        return {self._y(c, cut): s for c, (s, _) in enumerate(self.sent) for cut in cuts}

    def _stage(self, v: int, sign: float) -> dict[int, float]:
        return {self._x(v, i): sign * i for i in range(self.parts)}

    def _crossings(self, c: int, u: int, v: int) -> Iterator[_Row]:
        """Yield, for each cut, that a tensor crosses it if its maker is before and a user not."""
        for cut in range(self.parts - 1):
            made = {self._x(u, k): 1.0 for k in range(cut + 1)}
            used = {self._x(v, k): -1.0 for k in range(cut + 1)}
            yield made | used | {self._y(c, cut): -1.0}, -inf, 0.0

    def ends(self, values: Any) -> list[int]:
        """Read the ideals behind which stages end off a solution."""
        nodes = range(self.graph.num_nodes)
        stages = (
            sum(1 << v for v in nodes if values[self._x(v, i)] > 0.5) for i in range(self.parts)
        )
        return list(accumulate(stages, or_))

    def _x(self, v: int, i: int) -> int:
        return v * self.parts + i

    def _y(self, c: int, cut: int) -> int:
        return self.num_choices + c * (self.parts - 1) + cut
