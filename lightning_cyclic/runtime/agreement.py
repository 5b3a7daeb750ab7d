"""Agreement: what all ranks must see alike, compared; the first difference is told on all."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterable, Sequence
from types import CodeType, FunctionType
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from lightning_cyclic.errors import ConfigurationError, StepError
from lightning_cyclic.runtime.assembly import Assembly

_DIGEST_BYTES = 8
_LIBRARIES = ("torch.", "lightning.", "pytorch_lightning.", "lightning_cyclic.", "builtins")


def require_same_module(module: nn.Module, assembly: Assembly, what: str) -> None:
    """Refuse ranks whose modules differ.

    Args:
        assembly: all ranks.
        what: they come together for, as are those below.

    Raises:
        ConfigurationError: on every worker, with the first tensor that differs, or method.
    """
    lines = [_tensor_line(name, x) for name, x in _tensors(module)]
    code = code_of(module)
    digests = assembly.share([_digest("\n".join(lines)), _digest("\n".join(code))], what)
    if all(x == digests[0] for x in digests):
        return
    if all(held == digests[0][0] for held, _ in digests):
        _refuse_other_code(assembly.share(code, what))
        return
    difference = _first_difference(assembly.share(lines, what))
    raise ConfigurationError(
        f"ranks hold different modules: {difference}; allowed: the same "
        "module, with the same shapes, dtypes and frozen parameters, on every worker; build it "
        "from the same arguments everywhere"
    )


def code_of(module: nn.Module) -> list[str]:
    """Say which class each module within is of, and what the methods of these are made of.

    One line each: a name, and a digest. Left out is what libraries bring, whose versions are the
    business of who installs them.
    """
    modules = dict(module.named_modules())
    lines = {
        f"the class of {repr(path) if path else 'the module'}": type(m).__qualname__
        for path, m in modules.items()
    }
    classes = dict.fromkeys(cls for m in modules.values() for cls in type(m).__mro__)
    for cls in (x for x in classes if not x.__module__.startswith(_LIBRARIES)):
        for name, x in vars(cls).items():
            method = _function_of(x)
            if method is not None:
                lines[f"{cls.__qualname__}.{name}"] = _digest(_text_of(method.__code__))
    return [f"{name}\t{what}" for name, what in lines.items()]


def _function_of(x: Any) -> FunctionType | None:
    """Return what a class's attribute runs, behind decorators; None for what is no method."""
    x = x.fget if isinstance(x, property) else getattr(x, "__func__", x)
    x = inspect.unwrap(x) if isinstance(x, FunctionType) else x
    return x if isinstance(x, FunctionType) else None


def _text_of(code: CodeType) -> str:
    constants = (
        _text_of(x) if isinstance(x, CodeType)
        else repr(sorted(map(repr, x))) if isinstance(x, frozenset)  # in any order
        else repr(x)
        for x in code.co_consts
    )  # fmt: skip
    return "\n".join((code.co_code.hex(), *code.co_names, *code.co_varnames, *constants))


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).hexdigest()


def _refuse_other_code(everyone: list[list[str]]) -> None:
    """Refuse ranks of which the same module, or the same method, is another one.

    Raises:
        ConfigurationError: with the first that differs.
    """
    first, *others = (dict(line.split("\t") for line in lines) for lines in everyone)
    for rank, other in enumerate(others, start=1):
        for name in (n for n in first | other if other.get(n) != first.get(n)):
            raise ConfigurationError(
                f"ranks run different code: {name} differs between ranks 0 and {rank}; allowed: "
                "the same program on every rank, by the same version of Python; copy the same "
                "files to every machine"
            )


def require_same_number(
    name: str, number: object, assembly: Assembly, what: str, among: Sequence[int] | None = None
) -> None:
    """Refuse ranks that hold different values of a number, or of several; all must call it.

    Args:
        name: of the number.
        number: of this rank.
        among: ranks that are compared. [all]

    Raises:
        ConfigurationError: on every one of these, with every value.
    """
    values = assembly.share(repr(number), what)
    if among is not None:
        values = [values[rank] for rank in among]
    if len(set(values)) > 1:
        pairs = zip(among or range(len(values)), values, strict=True)
        each = ", ".join(f"rank {rank}: {value}" for rank, value in pairs)
        raise ConfigurationError(
            f"ranks have different {name} ({each}); allowed: the same everywhere; "
            "use Trainer(use_distributed_sampler=True), or limit_train_batches"
        )


def describe_batch(batch: Any) -> str:
    """Describe what must be alike in every worker's batch: structure, dtypes and ranks.

    Sizes may differ: sentences are padded batch by batch, last batches are smaller.

    Example:
        >>> import torch
        >>> describe_batch((torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64)))
        'tuple of 2: float32 with 2 dims, int64 with 1 dim'
    """
    keys = ""
    if isinstance(batch, dict):
        batch = dict(sorted(batch.items(), key=lambda item: str(item[0])))
        keys = f" ({', '.join(map(str, batch))})"
    leaves, _ = tree_flatten(batch)
    parts = [_leaf(leaf) for leaf in leaves]
    return f"{type(batch).__name__}{keys} of {len(leaves)}: {', '.join(parts)}"


def require_same_lines(what: str, texts: list[str], allowed: str) -> None:
    """Refuse ranks whose texts differ.

    Raises:
        StepError: with the first line that differs.
    """
    if len(set(texts)) > 1:
        difference = _first_difference([text.splitlines() for text in texts])
        raise StepError(f"ranks differ in {what}: {difference}; allowed: {allowed}")


def _leaf(leaf: Any) -> str:
    if not isinstance(leaf, Tensor):
        return type(leaf).__name__
    return f"{str(leaf.dtype)[6:]} with {leaf.dim()} dim{'s' * (leaf.dim() != 1)}"


def _tensors(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _tensor_line(name: str, x: Tensor) -> str:
    trained = "trained" if x.requires_grad else "frozen"
    return f"{name} {tuple(x.shape)} {str(x.dtype)[6:]} {trained}"


def _first_difference(everyone: list[list[str]]) -> str:
    base = everyone[0]
    for w, lines in enumerate(everyone[1:], start=1):
        for k in range(max(len(base), len(lines))):
            a = base[k] if k < len(base) else "nothing"
            b = lines[k] if k < len(lines) else "nothing"
            if a != b:
                return f"rank 0 has {a!r}, rank {w} has {b!r}"
    return "none found"
