"""The steady step of any plan, without the programs of large ones."""

from __future__ import annotations

from typing import Final

from lightning_cyclic.plan.plan import Plan
from lightning_cyclic.simulate.costs import Costs, Network
from lightning_cyclic.simulate.engine import simulate
from lightning_cyclic.simulate.result import steady_step, steady_window

MOST_WALKED: Final = 512  # messages of a step, of a kind: so many are simulated in half a second


def steady_step_s(plan: Plan, costs: Costs, network: Network | None = None) -> float:
    """Return the seconds per training step in steady state, of the slowest worker.

    That of :func:`~lightning_cyclic.simulate.engine.simulate`. Of large plans whose workers run
    whole micro-batches, and exchange nothing but sums and parameters, it is that of
    ``simulate(..., in_turn=True)``, to the last digit, and no program is made, so that there may
    be thousands of workers. In turn ports wait for messages that are late, so that it is mostly
    within some percent, and up to a fifth more where the network is busy all the time.

    Args:
        plan: of ten steps or so, so that some are steady.
        costs: what each stage costs.
        network: the links between the workers; free by default.

    Returns:
        Seconds.

    Raises:
        PlanError: the network has hosts of other workers.

    Example:
        >>> from lightning_cyclic.plan import make_plan
        >>> numbers = {"num_stages": 32, "num_workers": 256, "num_steps": 12}
        >>> plan = make_plan("cyclic_dp", proved=False, **numbers)
        >>> costs = Costs.even(32, compute_s=1.0, model_bytes=64.0)
        >>> round(steady_step_s(plan, costs, Network(bandwidth_bytes_per_s=100.0)), 2)
        1.35
    """
    network = network or Network()
    network.check(plan.num_workers)
    first, last = steady_window(plan.num_steps)
    overlaps_end = last == plan.num_steps - 1  # beside the last step there is less traffic
    if _num_messages(plan) > MOST_WALKED and not overlaps_end:
        from lightning_cyclic.simulate.longest_path import ends_of_steps  # noqa: PLC0415  (numpy)

        ends = ends_of_steps(plan, costs, network, last)
        if ends is not None:
            return steady_step(ends, first, last)
    return simulate(plan.programs, costs, network, plan).step_s


def is_quick(plan: Plan) -> bool:
    """Say whether the steady step of a plan is found in seconds: it is small, or needs no program.

    Args:
        plan: of ten steps or so.
    """
    if _num_messages(plan) <= MOST_WALKED:
        return True
    from lightning_cyclic.simulate.timetable import Timetable, is_regular  # noqa: PLC0415  (numpy)

    return is_regular(plan) and Timetable(plan).keeps_order


def _num_messages(plan: Plan) -> int:
    return plan.num_workers * plan.num_stages
