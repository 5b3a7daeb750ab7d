"""Errors of the package, each with what was given, what is allowed and what to do next.

CyclicError                         every error that the package raises on purpose
├── PlanError (ValueError)          a plan that cannot be made: unknown name, impossible numbers
│   └── ValidationError             a program that breaks a rule; with the arrowed timetable
├── ActionSyntaxError (ValueError)  text that is not an action
├── ConfigurationError (ValueError) a Trainer flag, module or optimizer that cannot be trained so
├── StepError (RuntimeError)        a training step that broke the contract (no loss, NaN, order)
│   └── VerificationError           a step in stages that is another than the plain one
├── PeerError (RuntimeError)        another rank failed or left; one line, the culprit first
└── WaitTimeoutError (TimeoutError) a wait at its limit: who waited for whom, and for what
"""

from __future__ import annotations


class CyclicError(Exception):
    """Be the base of every error that this package raises on purpose."""


class PlanError(CyclicError, ValueError):
    """Say that a plan cannot be made from the given preset, axes or numbers."""


class ValidationError(PlanError):
    """Say which action of a program breaks which rule, with the timetable and an arrow."""


class ActionSyntaxError(CyclicError, ValueError):
    """Say which text is not an action, and what an action looks like."""


class ConfigurationError(CyclicError, ValueError):
    """Say which Trainer flag, module or optimizer does not fit, and what does."""


class StepError(CyclicError, RuntimeError):
    """Say how a training step broke the contract that the plan needs."""


class VerificationError(StepError):
    """Say what differs between a step that is run in stages and the plain one."""


class PeerError(CyclicError, RuntimeError):
    """Say which other rank failed, and with what."""


class WaitTimeoutError(CyclicError, TimeoutError):
    """Say which rank waited for which other one, for what, and for how long."""


def one_of(given: object, allowed: object, what: str, hint: str) -> str:
    """Phrase the three parts of a good message on one line.

    Example:
        >>> one_of("cdp", ["cyclic_dp"], "preset", "use preset='cyclic_dp'")
        "preset 'cdp' is unknown; allowed: cyclic_dp; use preset='cyclic_dp'"
    """
    names = ", ".join(map(str, allowed)) if isinstance(allowed, list | tuple) else str(allowed)
    return f"{what} {given!r} is unknown; allowed: {names}; {hint}"
