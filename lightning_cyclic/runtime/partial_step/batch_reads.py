"""What Python has read of a micro-batch: each value once, however many stages run the step.

To read a value the host waits for the device, until that has done all that it was asked for. A
step asks once; run stage by stage, the code before a stage asks again in each:

    stage 0   mask.any() -> True           waits
    stage 1   mask.any() -> True, known
    stage 2   mask.any() -> True, known

The same code asks the same of the same batch, so answers are known by their region and number;
but not of a run that ghosts of another batch have misled, which may have gone another way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final


@final
class BatchReads:
    """Remember what was read of one micro-batch."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, int], tuple[str, Any]] = {}

    def read(self, region: int, number: int, name: str, ask: Callable[[], Any]) -> Any:
        """Return the answer to a question, which is asked where it is not known.

        Args:
            region: of the step's code that asks.
            number: of the questions of that region before it.
            name: of the question.
            ask: asks it.
        """
        known = self._found.get((region, number))
        if known is not None and known[0] == name:
            return known[1]
        answer = ask()
        if isinstance(answer, bool | int | float | complex):  # lists and arrays can be changed
            self._found[region, number] = name, answer
        return answer

    def forget(self) -> None:
        """Forget all, as a run was misled."""
        self._found.clear()
