"""Written weights: a step that changes parameters in its own forward, besides the optimizer."""

from __future__ import annotations

from lightning_cyclic.errors import PlanError
from lightning_cyclic.runtime.stages.evidence import Survey, Written


def refuse_written(survey: Survey, *, keeps_order: bool) -> None:
    """Refuse changes that would not be those of one device, wherever stages begin.

    Args:
        survey: of the step.
        keeps_order: whether forwards meet the weights as on one device: in one version, once for
            each micro-batch.

    Raises:
        PlanError: with the parameter.
    """
    for written in survey.written:
        if not (keeps_order and _is_within_its_module(written, survey)):
            raise PlanError(
                f"training_step changes parameter {written.name!r} ({written.at.line}) in its "
                "forward, but ranks have several versions or copies of it, which the change does "
                "not reach in the order of one device; allowed: weights that the optimizer alone "
                "changes; change them in the optimizer's step(), keep what moves in a buffer, or "
                "use strategy='ddp'"
            )


def _is_within_its_module(written: Written, survey: Survey) -> bool:
    """Say whether a parameter is changed in place, and used, by a module that no stage divides.

    Autograd refuses such a change of what a backward still needs; through ``.data`` it sees none.
    """
    owner = written.name.rpartition(".")[0]

    def is_inside(call: int | None) -> bool:
        return owner != "" and owner in {c.path for c in survey.around(call)}

    uses = [written.at, *survey.parameters[written.name].uses]
    parts = [c for c in survey.calls if c.is_unit and c.path.startswith(f"{owner}.")]
    return written.itself and not parts and all(is_inside(use.call) for use in uses)
