"""The states of Python's and numpy's own generators, looked at without drawing or seeding.

To ask a generator for its state makes Python objects of its 624 words, and to see whether it draws
what it drew before takes two seedings. Here bytes are read where CPython and numpy keep them; that
they are there is made sure of by what the generators say themselves. Where they are not, as
on other interpreters, there is nothing to look at.
"""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from typing import Any, final

_WORDS = 624  # of a Mersenne twister, which are made anew together, beside its position in them
_SEEN = 16  # of these 625, the position among them: draws change it, but for 624 of them, which
# change all others
_Bytes = ctypes.c_char * (4 * _SEEN)

Look = tuple[bytes, object, bytes]  # of Python's; of numpy's, whose generator may be replaced


@final
class GeneratorState:
    """Look at the states."""

    def __init__(self) -> None:
        self._python: ctypes.Array[ctypes.c_char] | None = None
        self._numpy: ctypes.Array[ctypes.c_char] | None = None
        self._of_numpy: object = None  # is kept alive, since its memory is read
        self._has_looked = False

    def look(self, numpy: Any) -> Look | None:
        """Return what is another thing once a generator has drawn or has been seeded otherwise.

        Args:
            numpy: the module, if it is there.

        Returns:
            None where it cannot be seen.
        """
        of_numpy = None if numpy is None else _generator_of(numpy.random)
        if not self._has_looked or of_numpy is not self._of_numpy:
            self._has_looked, self._of_numpy = True, of_numpy
            self._python, self._numpy = _find_python(), _find_numpy(numpy, of_numpy)
        if self._python is None:
            return None
        if self._numpy is None:
            return (self._python.raw, None, b"") if numpy is None else None
        return self._python.raw, of_numpy, self._numpy.raw


def _generator_of(numpy_random: Any) -> Any:
    try:
        return numpy_random.get_bit_generator()
    except AttributeError:  # an old version
        return None


def _find_python() -> ctypes.Array[ctypes.c_char] | None:
    base: Any = random.Random.__base__  # made in C: head of the object, position, words
    head = object.__basicsize__
    if sys.implementation.name != "cpython" or base.__basicsize__ < head + 4 * (_WORDS + 1):
        return None
    *words, position = random.getstate()[1]
    return _found(id(random._inst) + head, [position, *words], 0)


def _find_numpy(numpy: Any, generator: Any) -> ctypes.Array[ctypes.c_char] | None:
    if generator is None or type(generator) is not numpy.random.MT19937:
        return None
    state = generator.state["state"]
    words = [*state["key"].tolist(), state["pos"]]
    return _found(generator.ctypes.state_address, words, _WORDS + 1 - _SEEN)


def _found(address: int, words: list[int], first: int) -> ctypes.Array[ctypes.c_char] | None:
    """Return the bytes of a few words, the position among them, if all lie at the address."""
    if ctypes.string_at(address, 4 * len(words)) != struct.pack(f"{len(words)}I", *words):
        return None
    return _Bytes.from_address(address + 4 * first)
