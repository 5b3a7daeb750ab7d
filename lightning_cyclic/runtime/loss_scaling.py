"""Loss scaling under old gradients: one scale per step, known when its first loss is.

A gradient scaler looks at the gradients of a step, skips its update if one is not finite, and
sets the scale of the next. Where steps overlap, the next has begun by then, so the scale of a
step follows from those steps of which every stage had its gradients when the step came to its
last stage: a function of the plan, never of the timing.

    scale(t) = what the scaler makes of the outcomes of steps 0 .. plan.ended_before(t) - 1

Where no step begins before the one ahead of it has ended, those are all steps before it.

Whether a step is skipped is one decision under ``delayed``, as all stages know of all before they
update; under other rules each stage skips its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import final

import torch
from torch import Tensor
from torch.amp import GradScaler

from lightning_cyclic.errors import StepError
from lightning_cyclic.plan import Plan
from lightning_cyclic.runtime.assembly import Assembly

State = tuple[float, int]  # scale, updates since it was last changed


def state_of(scaler: GradScaler) -> State:
    """Return the state that a scaler holds; a GPU is waited for."""
    state = scaler.state_dict()
    return state["scale"], state["_growth_tracker"]


def put_state(scaler: GradScaler, state: State) -> None:
    scale, tracker = state
    scaler.load_state_dict(
        {
            "scale": scale,
            "_growth_tracker": tracker,
            "growth_factor": scaler.get_growth_factor(),
            "backoff_factor": scaler.get_backoff_factor(),
            "growth_interval": scaler.get_growth_interval(),
        }
    )


def state_behind(scaler: GradScaler, state: State, is_finite: bool) -> State:
    """Return what a scaler makes of a state when it knows whether gradients were finite."""
    scale = torch.full((), state[0])
    tracker = torch.full((), state[1], dtype=torch.int32)
    torch._amp_update_scale_(
        scale, tracker, torch.full((), float(not is_finite)), scaler.get_growth_factor(),
        scaler.get_backoff_factor(), scaler.get_growth_interval(),
    )  # fmt: skip
    return float(scale), int(tracker)


@final
class Outcomes:
    """Know of steps whether the gradients of all stages were finite, as versions tell.

    An owner notes what it decides, and all others what a version says that they read.
    """

    def __init__(self) -> None:
        self._known: dict[int, dict[int, bool]] = {}  # step -> stage -> finite
        self._settled: dict[int, bool] = {}

    def note(self, t: int, j: int, is_finite: bool) -> None:
        """Note how the update of a stage by step ``t`` came out."""
        self._known.setdefault(t, {})[j] = is_finite

    def are_finite(self, t: int, num_stages: int) -> bool:
        """Say whether the gradients of all stages were.

        Raises:
            StepError: of some nothing is known.
        """
        if t in self._settled:
            return self._settled[t]
        known = self._known.get(t, {})
        if len(known) < num_stages:  # or ranks would go on with scales that differ
            raise StepError(
                f"the loss scale follows from step {t}, and of its {num_stages} stages this rank "
                f"has heard of {len(known)}; allowed: none that is missing; this is an error of "
                "lightning_cyclic: please report it, and use precision='bf16-mixed'"
            )
        return all(known.values())

    def settle(self, begin: int, end: int, assembly: Assembly) -> None:
        """Let every worker know of the steps from begin up to end; all must call it.

        Args:
            begin: first step.
            end: the one behind the last.
            assembly: all ranks.
        """
        mine = [all(self._known.get(t, {}).values()) for t in range(begin, end)]
        everyone = assembly.share(mine, "to agree on the loss scale")
        self._settled = dict(enumerate(map(all, zip(*everyone, strict=True)), start=begin))
        self._known.clear()

    def forget(self, before: int) -> None:
        self._known = {t: x for t, x in self._known.items() if t >= before}


@final
class LossScaling:
    """Keep the scales of steps.

    Args:
        scaler: the Trainer's, whose numbers are used; it holds the newest state between steps.
        is_finite: says of a step whether the gradients of every stage are finite; waits for those
            of other workers. None: it had no loss.
        at_once: whether each step ends before the next one begins.
    """

    def __init__(
        self, scaler: GradScaler, is_finite: Callable[[int], bool | None], *, at_once: bool = False
    ) -> None:
        self._scaler = scaler
        self._is_finite = is_finite
        self._at_once = at_once
        self._states: dict[int, State] = {}  # outcomes that are counted in -> state

    def scale_of(self, plan: Plan, t: int) -> float:
        return self._state_of(plan, t)[0]

    def _state_of(self, plan: Plan, t: int) -> State:
        counted = t if self._at_once else plan.ended_before(t)
        self._forget(counted - 2 * plan.steps_under_way)
        return self._state(counted)

    def show(self, plan: Plan, t: int) -> None:
        """Let the scaler hold the state of step ``t``, whose loss it is about to scale."""
        self.begin(t)
        put_state(self._scaler, self._state_of(plan, t))

    def scaled(
        self, plan: Plan, t: int, share: Callable[[Tensor], Tensor]
    ) -> Callable[[Tensor], Tensor]:
        """Return the share of a micro-batch in the loss of step ``t``, times its scale."""
        self.begin(t)
        return lambda ones: share(ones) * self.scale_of(plan, t)

    @torch.no_grad()
    def unscale(self, plan: Plan, t: int, grads: Sequence[Tensor | None]) -> None:
        inverse = 1.0 / self.scale_of(plan, t)
        for grad in grads:
            if grad is not None:
                grad.mul_(inverse)

    def unscaled(self, plan: Plan, t: int, grads: Sequence[Tensor | None]) -> bool:
        """Divide the gradients of step ``t`` by its scale; say whether they are finite."""
        self.unscale(plan, t, grads)
        present = [torch.isfinite(grad).all() for grad in grads if grad is not None]
        return not present or bool(torch.stack(present).all())  # asked once

    def begin(self, t: int) -> None:
        """Go on from the scaler's own state at step ``t``, where no other is known."""
        if not self._states:
            self._states[t] = state_of(self._scaler)

    def catch_up(self, t: int) -> None:
        """Let the scaler hold the state behind all steps before ``t``, which have ended."""
        put_state(self._scaler, self._state(t))

    @property
    def known(self) -> int:
        """Count the steps whose outcomes are counted in the newest state."""
        return max(self._states, default=0)

    def _state(self, counted: int) -> State:
        first, last = min(self._states), max(self._states)
        for n in range(last, counted):
            state, is_finite = self._states[n], self._is_finite(n)
            if is_finite is not None:
                state = state_behind(self._scaler, state, is_finite)
            self._states[n + 1] = state
        return self._states[max(counted, first)]  # first: behind a checkpoint of another plan

    def _forget(self, before: int) -> None:
        self._states = {
            n: state for n, state in self._states.items() if n >= min(before, max(self._states))
        }

    # ------------------------------------------------------------------ checkpoints

    def state(self) -> dict[int, State]:
        """Return the states that later steps may need."""
        return dict(self._states)

    def put_state(self, states: Mapping[int, State]) -> None:
        self._states = {n: (scale, tracker) for n, (scale, tracker) in states.items()}
