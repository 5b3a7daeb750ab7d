"""Departed: names that users may still give, and what to do in their place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from lightning_cyclic.errors import ConfigurationError

DEPARTED: Final[dict[str, str]] = {
    # an argument, or one value of an argument -> what to do instead
    "trace": "profile with torch.profiler or Trainer(profiler='pytorch'), which show each action",
}


def refuse_departed(given: Mapping[str, object]) -> None:
    """Say what to do in the place of arguments, or values of them, that there were.

    Args:
        given: name of an argument -> its value.

    Raises:
        ConfigurationError: with the first of them that is known no more.
    """
    for name, value in given.items():
        for text in (name, f"{name}={value!r}"):
            if text in DEPARTED:
                raise ConfigurationError(
                    f"{name}={value!r} was given, and has left CyclicStrategy; {DEPARTED[text]}"
                )
