"""Let mkdocstrings read this package's docstrings: examples, sources, and roles of Sphinx."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|func|data|mod|meth):`~?(?:[\w.]*\.)?(\w+)`")


class PlainDocstrings(griffe.Extension):
    """Rewrite docstrings as the parser of Google's style knows them."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite one; called for everything that is documented."""
        if obj.docstring is not None:
            text = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.M)
            text = re.sub(r"^Source: ", "*Source:* ", text, flags=re.M)
            obj.docstring.value = _ROLE.sub(r"`\1`", text)
