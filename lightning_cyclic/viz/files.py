"""Files of pictures, by matplotlib: the same picture gives the same bytes, whoever draws it."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from lightning_cyclic.errors import PlanError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PICTURES: Final = ("svg", "png")

_SETTINGS = {
    "svg.fonttype": "none",  # text that can be searched and copied
    "svg.hashsalt": "lightning_cyclic",  # the same names in every run
    "font.family": ["DejaVu Sans", "sans-serif"],  # the first comes with matplotlib
}
_NO_METADATA: dict[str, dict[str, Any]] = {  # which would name the time and the version
    "svg": {"Date": None, "Creator": None, "Format": None, "Type": None},
    "png": {"Software": None},
}


def form_of(path: Path, allowed: Sequence[str] = PICTURES) -> str:
    """Return what a file is to be, by the ending of its name.

    Raises:
        PlanError: another ending.
    """
    form = path.suffix.lower().removeprefix(".")
    if form not in allowed:
        raise PlanError(
            f"the name of the picture {str(path)!r} ends in {path.suffix!r}; allowed: "
            f"{', '.join(f'.{each}' for each in allowed)}; write it like {path.stem}.svg"
        )
    return form


def drawn(size: tuple[float, float], paint: Callable[[Figure], None], form: str) -> bytes:
    """Return the file of a figure.

    Args:
        size: width and height in inches.
        paint: draws into the figure.
        form: one of ``PICTURES``.

    Raises:
        PlanError: there is no matplotlib.
    """
    matplotlib = _matplotlib()
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # whatever the user's own settings are
        matplotlib.rcParams.update(_SETTINGS)
        from matplotlib.figure import Figure  # noqa: PLC0415

        figure = Figure(figsize=size)
        paint(figure)
        data = io.BytesIO()
        metadata = _NO_METADATA[form]
        figure.savefig(
            data, format=form, dpi=144, metadata=metadata, bbox_inches="tight", pad_inches=0.3
        )
    return data.getvalue()


def _matplotlib() -> ModuleType:
    try:
        import matplotlib  # noqa: PLC0415
    except ImportError as error:
        raise PlanError(
            "a picture was asked for, but matplotlib, which draws it, is not installed; allowed: "
            "a text without it; run pip install 'lightning-cyclic[viz]', or leave the file out"
        ) from error
    return matplotlib


def write(path: Path, data: bytes) -> None:
    try:
        path.write_bytes(data)
    except OSError as error:
        raise PlanError(
            f"{path} cannot be written ({error.strerror}); allowed: a file in a folder that "
            "exists; check the path"
        ) from error
