"""Numbers with units, as people write them: ``100Mbit/s``, ``25MB``, ``2ms``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal

from lightning_cyclic.errors import PlanError

# Decimal, so that 50us is 5e-05 and not its neighbour.
_PREFIXES = {
    "": Decimal(1), "k": Decimal("1e3"), "M": Decimal("1e6"), "G": Decimal("1e9"),
    "T": Decimal("1e12"), "Ki": Decimal(2**10), "Mi": Decimal(2**20), "Gi": Decimal(2**30),
}  # fmt: skip
_PLAIN = {"": Decimal(1)}
_BYTES = _PLAIN | {prefix + "B": scale for prefix, scale in _PREFIXES.items()}
_BANDWIDTH = (
    _PLAIN
    | {prefix + "B/s": scale for prefix, scale in _PREFIXES.items()}
    | {prefix + "bit/s": scale / 8 for prefix, scale in _PREFIXES.items()}
    | {prefix + "bps": scale / 8 for prefix, scale in _PREFIXES.items()}
)
_SECONDS = _PLAIN | {"s": Decimal(1), "ms": Decimal("1e-3"), "us": Decimal("1e-6")}
_NUMBER = re.compile(r"\s*(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|\.\d+)\s*([^\d\s]*)\s*")


def parse_bytes(text: str) -> float:
    """Read a number of bytes.

    Example:
        >>> parse_bytes("25MB"), parse_bytes("1KiB"), parse_bytes("512")
        (25000000.0, 1024.0, 512.0)
    """
    return _parse(text, _BYTES, "number of bytes", "25MB, 1GiB or 1e9")


def parse_bandwidth(text: str) -> float:
    """Read a bandwidth in bytes per second.

    Example:
        >>> parse_bandwidth("1Gbit/s"), parse_bandwidth("10GB/s")
        (125000000.0, 10000000000.0)
    """
    return _parse(text, _BANDWIDTH, "bandwidth", "1Gbit/s, 100Mbit/s or 10GB/s")


def parse_seconds(text: str) -> float:
    """Read a number of seconds.

    Example:
        >>> parse_seconds("2ms"), parse_seconds("0.5")
        (0.002, 0.5)
    """
    return _parse(text, _SECONDS, "time", "0.05, 2ms or 150us")


def _parse(text: str, units: Mapping[str, Decimal], what: str, example: str) -> float:
    match = _NUMBER.fullmatch(text)
    scale = units.get(match[2].replace("KB", "kB")) if match else None
    if match is None or scale is None:
        raise PlanError(
            f"{text!r} is not a {what}; allowed: a number and one of "
            f"{', '.join(unit for unit in units if unit)}; write it like {example}"
        )
    return float(Decimal(match[1]) * scale)


def show_bytes(num_bytes: float) -> str:
    """Print bytes for people.

    Example:
        >>> show_bytes(1_500_000), show_bytes(12)
        ('1.5 MB', '12 B')
    """
    for prefix in ("T", "G", "M", "k"):
        scale = float(_PREFIXES[prefix])
        if num_bytes >= scale:
            return f"{num_bytes / scale:.4g} {prefix}B"
    return f"{num_bytes:.4g} B"


def show_seconds(seconds: float) -> str:
    """Print seconds for people.

    Example:
        >>> show_seconds(0.0123), show_seconds(2.0)
        ('12.3 ms', '2 s')
    """
    if seconds >= 1 or seconds == 0:
        return f"{seconds:.4g} s"
    return f"{seconds * 1e3:.4g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.4g} µs"
