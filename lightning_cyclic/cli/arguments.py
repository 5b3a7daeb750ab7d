"""Values of the command line: how their errors get past argparse."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TypeVar

from lightning_cyclic.errors import PlanError

T = TypeVar("T")


def explained(parse: Callable[[str], T]) -> Callable[[str], T]:
    """Let argparse print the message of a PlanError, which it hides as any ValueError's."""

    def parse_or_explain(text: str) -> T:
        try:
            return parse(text)
        except PlanError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parse_or_explain
