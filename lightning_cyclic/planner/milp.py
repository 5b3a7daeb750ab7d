"""Cut a graph into stages by mixed-integer linear programming, with HiGHS from SciPy.

    minimise T    for each stage i:   sum_v seconds_v x_vi + sum_c transfer_c y_ci  <=  T
                                      sum_v bytes_v x_vi                            <=  limit
                  for each node v:    sum_i x_vi = 1
                  for each edge u v:  sum_i i x_ui <= sum_i i x_vi
                  for each tensor c with maker u, user v:  |x_ui - x_vi| <= y_ci

The third line is what makes it a pipeline: the published programme asks for contiguous stages
only, which lets two of them depend on each other, and a stage is then entered twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import inf
from typing import Any, TypeAlias, final

from lightning_cyclic.errors import PlanError
from lightning_cyclic.planner.graph import Graph, Split, check_parts, does_not_fit

_Row: TypeAlias = tuple[dict[int, float], float, float]  # coefficients, lower and upper bound
_INFEASIBLE = 2  # SciPy's status of a programme without solution


def split_milp(
    graph: Graph, parts: int, *, limit_bytes: float = inf, gap: float = 0.0, limit_s: float = 60.0
) -> Split:
    """Cut a graph into at most ``parts`` stages, for graphs with too many ideals.

    Args:
        graph: the graph.
        parts: most stages.
        limit_bytes: most bytes of a stage's nodes. [any number]
        gap: relative distance from the best at which to stop. [0]
        limit_s: seconds after which the best so far is taken. [60]

    Returns:
        The stages; their load is computed from them, not taken from the solver.

    Raises:
        PlanError: SciPy is not installed, no split keeps the limit, or none was found in time.

    Source: Tarnawski et al., NeurIPS 2020, the integer programme of the throughput problem,
        https://arxiv.org/abs/2006.16423; the order of the stages is ours.
    """
    check_parts(graph, parts)
    optimize, sparse = _scipy()
    programme = _Programme(graph, min(parts, graph.num_nodes), limit_bytes)
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
        options={"mip_rel_gap": gap, "time_limit": limit_s},
    )
    if found.status == _INFEASIBLE:
        raise does_not_fit(graph, parts, limit_bytes)
    if found.x is None:
        raise PlanError(
            f"no split of {graph.num_nodes} nodes was found in {limit_s:g} s; allowed: any limit; "
            "raise limit_s=, or use split_linear(graph, ...)"
        )
    return Split.of(graph, programme.stages(found.x))


def _scipy() -> tuple[Any, Any]:
    """Import SciPy only when it is asked for: the planning floors need no NumPy."""
    try:
        from scipy import optimize, sparse  # noqa: PLC0415
    except ImportError as error:
        raise PlanError(
            "split_milp needs SciPy, which is not installed; allowed: SciPy 1.9 or later; "
            "run: pip install 'lightning-cyclic[milp]', or use split_linear or split_ideals"
        ) from error
    return optimize, sparse


@final
class _Programme:
    """Number the variables: x by node and stage, y by tensor and stage, T."""

    def __init__(self, graph: Graph, parts: int, limit_bytes: float) -> None:
        self.graph = graph
        self.parts = parts
        self.limit_bytes = limit_bytes
        self.num_choices = graph.num_nodes * parts
        self.width = self.num_choices + len(graph.tensors) * parts + 1

    def rows(self) -> Iterator[_Row]:
        """Yield the constraints."""
        graph, stages = self.graph, range(self.parts)
        nodes = range(graph.num_nodes)
        for i in stages:
            load = {self._x(v, i): graph.seconds[v] for v in nodes}
            load |= {self._y(c, i): x.transfer_s for c, x in enumerate(graph.tensors)}
            yield load | {self.width - 1: -1.0}, -inf, 0.0
            if self.limit_bytes < inf:
                kept = {self._x(v, i): graph.num_bytes[v] for v in nodes}
                yield kept, -inf, self.limit_bytes
        for v in nodes:
            yield dict.fromkeys((self._x(v, i) for i in stages), 1.0), 1.0, 1.0
        for u, v in graph.edges:
            places = {self._x(u, i): float(i) for i in stages}
            yield places | {self._x(v, i): -float(i) for i in stages}, -inf, 0.0
        for c, tensor in enumerate(graph.tensors):
            u = tensor.nodes[0]
            for v in sorted({*tensor.nodes} - {u}):
                for i in stages:
                    yield {self._x(u, i): 1.0, self._x(v, i): -1.0, self._y(c, i): -1.0}, -inf, 0.0
                    yield {self._x(u, i): -1.0, self._x(v, i): 1.0, self._y(c, i): -1.0}, -inf, 0.0

    def stages(self, values: Any) -> Iterable[list[int]]:
        """Read the stages off a solution."""
        for i in range(self.parts):
            yield [v for v in range(self.graph.num_nodes) if values[self._x(v, i)] > 0.5]

    def _x(self, v: int, i: int) -> int:
        return v * self.parts + i

    def _y(self, c: int, i: int) -> int:
        return self.num_choices + c * self.parts + i
