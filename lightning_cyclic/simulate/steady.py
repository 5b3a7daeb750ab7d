"""The steady step of large plans, without their programs."""

from __future__ import annotations

from lightning_cyclic.plan.plan import Plan
from lightning_cyclic.simulate.costs import Costs, Network
from lightning_cyclic.simulate.engine import simulate
from lightning_cyclic.simulate.result import steady_step, steady_window


def steady_step_s(plan: Plan, costs: Costs, network: Network | None = None) -> float:
    """Return the seconds per training step in steady state, of the slowest worker.

    They are those of :func:`~lightning_cyclic.simulate.engine.simulate`, to the last digit. Of
    workers that run whole micro-batches, and exchange nothing but sums and parameters, no program
    is made, so that there may be thousands of them.

    Args:
        plan: of ten steps or so, so that some are steady.
        costs: what each stage costs.
        network: the links between the workers; free by default.

    Returns:
        The ``step_s`` of a simulation of the plan's programs.

    Raises:
        PlanError: the network has hosts of other workers.

    Example:
        >>> from lightning_cyclic.plan import make_plan
        >>> plan = make_plan("cyclic_dp", num_stages=4, num_workers=4, num_steps=12)
        >>> costs = Costs.even(4, compute_s=1.0, model_bytes=8.0)
        >>> steady_step_s(plan, costs, Network(bandwidth_bytes_per_s=10.0))
        1.4
    """
    from lightning_cyclic.simulate.longest_path import ends_of_steps  # noqa: PLC0415  (numpy)

    network = network or Network()
    network.check(plan.num_workers)
    first, last = steady_window(plan.num_steps)
    overlaps_end = last == plan.num_steps - 1  # beside the last step there is less traffic
    ends = None if overlaps_end else ends_of_steps(plan, costs, network, last)
    if ends is None:
        return simulate(plan.programs, costs, network, plan).step_s
    return steady_step(ends, first, last)
