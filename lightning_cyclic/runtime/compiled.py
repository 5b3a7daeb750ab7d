"""Modules that torch.compile has compiled: each is called as a whole, and nothing inside is seen.

block.compile()          the module's calls go to ``_compiled_call_impl``, past its hooks
torch.compile(block)     a wrapper with a ``forward`` of its own, around ``_orig_mod``
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from lightning_cyclic.runtime.plain_copies import ours

IN_PLACE = "_compiled_call_impl"


def is_compiled(module: nn.Module) -> bool:
    return is_compiled_in_place(module) or hasattr(module, "_orig_mod")


def is_compiled_in_place(module: nn.Module) -> bool:
    return getattr(module, IN_PLACE, None) is not None


def named_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Iterate over a module and those inside by path, but not into compiled ones."""
    hidden = ""
    for path, m in module.named_modules():
        if hidden and path.startswith(hidden):
            continue
        yield path, m
        if path and is_compiled(m):
            hidden = f"{path}."


def seen_as(module: nn.Module, path: str) -> str:
    """Return the path of the outermost compiled module around a module; else its own."""
    parts = path.split(".")
    for n in range(1, len(parts)):
        outer = ".".join(parts[:n])
        if is_compiled(module.get_submodule(outer)):
            return outer
    return path


def before_calls(module: nn.Module, then: Callable[[nn.Module], None]) -> Callable[[], None]:
    """Call ``then`` before each call of a module; return what ends that."""
    if is_compiled_in_place(module):  # hooks would be compiled, too
        return _around_compiled(module, then, lambda: None)
    return module.register_forward_pre_hook(ours(lambda m, _: then(m)), prepend=True).remove


def around_forwards(
    module: nn.Module, before: Callable[[nn.Module], None], behind: Callable[[], None]
) -> Callable[[], None]:
    """Call both around each forward of a module, inside its other hooks; return what ends that."""
    if is_compiled_in_place(module):
        return _around_compiled(module, before, behind)
    handles = (
        module.register_forward_pre_hook(ours(lambda m, _: before(m))),
        module.register_forward_hook(ours(lambda *_: behind()), prepend=True, always_call=True),
    )

    def end() -> None:
        for handle in handles:
            handle.remove()

    return end


def _around_compiled(
    module: nn.Module, before: Callable[[nn.Module], None], behind: Callable[[], None]
) -> Callable[[], None]:
    call: Any = getattr(module, IN_PLACE)
    is_on = True  # several may be around one another, and end in any order

    def routed(*args: Any, **kwargs: Any) -> Any:
        if not is_on:
            return call(*args, **kwargs)
        before(module)
        try:
            return call(*args, **kwargs)
        finally:
            behind()

    def end() -> None:
        nonlocal is_on
        is_on = False
        if module.__dict__.get(IN_PLACE) is routed:
            module.__dict__[IN_PLACE] = call

    module.__dict__[IN_PLACE] = ours(routed, call)
    return end


@contextmanager
def uncompiled(module: nn.Module) -> Iterator[None]:
    """Let the body call all modules inside as if none were compiled."""
    found = [(m, "forward" if hasattr(m, "_orig_mod") else IN_PLACE)
             for path, m in module.named_modules() if path and is_compiled(m)]  # fmt: skip
    before = [(m, name, m.__dict__.get(name)) for m, name in found]
    for m, name in found:
        m.__dict__[name] = m._orig_mod if name == "forward" else None
    try:
        yield
    finally:
        for m, name, value in before:
            if value is None:
                m.__dict__.pop(name, None)
            else:
                m.__dict__[name] = value
