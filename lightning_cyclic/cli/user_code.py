"""User code: the file or module that the command line names.

It is run before anything of ours imports Lightning, as it says which host the process has.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from functools import lru_cache
from pathlib import Path
from types import ModuleType

from lightning_cyclic.errors import PlanError


def load(where: str) -> tuple[ModuleType, str, str]:
    """Return what a file or a module defines, its path, and the name of a class in it.

    Args:
        where: "PATH:CLASS".

    Raises:
        PlanError: that is neither, or not there.
    """
    path, colon, name = where.rpartition(":")
    if not colon or not path or not name:
        raise PlanError(
            f"{where!r} does not say which class; allowed: FILE.py:CLASS or dotted.module:CLASS; "
            f"write it like model.py:Model"
        )
    return _imported(path), path, name


def _imported(path: str) -> ModuleType:
    if not path.endswith(".py"):
        sys.path.insert(0, str(Path.cwd()))
        try:
            return importlib.import_module(path)
        except ModuleNotFoundError as error:
            if error.name is not None and (
                path == error.name or path.startswith(f"{error.name}.")
            ):
                raise PlanError(
                    f"there is no module {path!r}; allowed: an installed module, one in the "
                    "current folder, or a file; write a file like model.py:Model"
                ) from error
            raise
        finally:
            sys.path.remove(str(Path.cwd()))
    file = Path(path)
    if not file.is_file():
        raise PlanError(f"there is no file {path!r}; allowed: a Python file; check the path")
    return _executed(file.resolve(), file.stat().st_mtime_ns)


@lru_cache(maxsize=8)
def _executed(file: Path, mtime_ns: int) -> ModuleType:
    # a file that is called like a module of Python or of a package must not take its place
    is_taken = file.stem in sys.stdlib_module_names or file.stem in sys.modules
    name = f"_file_{file.stem}" if is_taken else file.stem
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[name] = loaded  # dataclasses and pickle look it up there
    # for its neighbours, as python FILE does
    sys.path.insert(len(sys.path) if is_taken else 0, str(file.parent))
    spec.loader.exec_module(loaded)
    return loaded
