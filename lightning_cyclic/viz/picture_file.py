"""Picture files: a plan as .svg, .png, .html or .json, which by the ending of its name."""

from __future__ import annotations

import html
from pathlib import Path

from lightning_cyclic.errors import PlanError
from lightning_cyclic.plan import Plan
from lightning_cyclic.viz.chart import chart
from lightning_cyclic.viz.look import Look
from lightning_cyclic.viz.scene import Scene, scene
from lightning_cyclic.viz.trace_events import trace_of

_PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{title}</title>
<style>
body {{ margin: 1em; font-family: sans-serif; color: #222222; background: white; }}
[id^="text_"] {{ pointer-events: none; }}
[id^="cell"]:hover path, [id^="arrow"]:hover path {{ stroke-width: 3 !important; }}
</style>
</head>
<body>
{svg}<p>Point at a cell, a diamond or an arrow to read what it is.</p>
</body>
</html>
"""


def save_picture(plan: Plan, path: str | Path, *, first_slot: int = 0) -> None:
    """Draw the timetable of a plan into a file; the same plan gives the same bytes.

    Args:
        plan: all of its steps are drawn.
        path: ends in .svg, .png, .html (a page that needs no network), or .json (for
            ui.perfetto.dev).
        first_slot: slot at which the picture begins. [0]

    Raises:
        PlanError: another ending, a file that cannot be written, no matplotlib, or a plan that is
            too large for a picture or over before ``first_slot``.
    """
    path = Path(path)
    ending = path.suffix.lower()
    if ending not in _FORMS:
        raise PlanError(
            f"the name of the picture {str(path)!r} ends in {ending!r}; allowed: "
            f"{', '.join(_FORMS)}; write it like {path.stem}.svg"
        )
    data = _FORMS[ending](scene(plan, first_slot))
    try:
        path.write_bytes(data)
    except OSError as error:
        raise PlanError(
            f"{path} cannot be written ({error.strerror}); allowed: a file in a folder that "
            "exists; check the path"
        ) from error


def _svg(seen: Scene) -> bytes:
    return chart(seen, "svg")


def _png(seen: Scene) -> bytes:
    return chart(seen, "png")


def _page(seen: Scene) -> bytes:
    svg = chart(seen, "svg").decode()
    svg = svg[svg.index("<svg") :]  # a page has its own declaration
    return _PAGE.format(title=html.escape(Look.of(seen.plan).title), svg=svg).encode()


_FORMS = {".svg": _svg, ".png": _png, ".html": _page, ".json": trace_of}
