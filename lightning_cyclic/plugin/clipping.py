"""Clipping: what a gradient norm is taken over."""

from __future__ import annotations

from lightning_cyclic.compat import Trainer, is_overridden, rank_zero_warn
from lightning_cyclic.errors import ConfigurationError
from lightning_cyclic.plan import Plan

CLIPPING = ("stage", "global")


def clip_mode(trainer: Trainer, plan: Plan, clip: str | None) -> str:
    """Return what a gradient norm is taken over: "stage" or "global".

    Raises:
        ConfigurationError: a global norm where stages are updated from different steps.
    """
    if decides_together(plan) or (plan.weights != "freshest" and not plan.flows):
        return clip or "global"
    if clip == "global" and (plan.flows or plan.slack > 0):
        raise ConfigurationError(
            f'clip_norm="global" with preset {plan.preset!r} would make every stage wait for the '
            'norm of the first, which comes last; allowed: clip_norm="stage"; use '
            'clip_norm="stage", or preset "pipedream_2bw" or "1f1b", whose norm is over all stages'
            if plan.flows
            else f'clip_norm="global" with slack={plan.slack} would mix gradients of two steps in '
            'one norm; allowed: clip_norm="stage", or slack=0, or preset "cyclic_dp_v1"; use '
            'clip_norm="stage"'
        )
    if clip is None and clips_by_norm(trainer) and not (plan.flows and plan.num_stages == 1):
        others = "" if plan.flows else 'clip_norm="global" is exact and stalls, '
        rank_zero_warn(
            "gradient_clip_val clips each stage by its own norm, because the norm over all stages "
            f"would stall {'a pipeline without a flush' if plan.flows else 'freshest weights'}; "
            f'{others}clip_norm="stage" keeps this and silences the warning.'
        )
    return clip or "stage"


def clips_by_norm(trainer: Trainer) -> bool:
    """Say whether gradients are clipped by a norm, not value by value."""
    return bool(trainer.gradient_clip_val) and trainer.gradient_clip_algorithm != "value"


def may_clip_by_norm(trainer: Trainer) -> bool:
    """Say whether gradients could be clipped by a norm: by a flag, or by the module's own code."""
    overridden = is_overridden("configure_gradient_clipping", trainer.lightning_module)
    return clips_by_norm(trainer) or overridden


def decides_together(plan: Plan) -> bool:
    """Say whether all stages of a pipeline without a flush can decide about a step at no price.

    Under ``delayed`` a version is first read when every stage has long had its gradients.
    """
    return plan.weights == "delayed" and plan.flows
