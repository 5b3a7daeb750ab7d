"""Agreement: what all workers must see alike before they train, compared once at the start.

Only tensors travel (UTF-8 bytes), never pickled objects, and where the process group takes them:
gloo in the host's memory, NCCL on the GPU.
"""

from __future__ import annotations

import hashlib
import inspect
import io
from collections.abc import Iterable, Mapping, Sequence
from numbers import Number
from types import CodeType, FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from lightning_cyclic.errors import ConfigurationError, StepError

_DIGEST = 16  # characters
_LIBRARIES = ("torch.", "lightning.", "pytorch_lightning.", "lightning_cyclic.", "builtins")


def device_for(group: Any = None) -> torch.device:
    """Return where a process group takes tensors: in the host's memory, if it may be chosen.

    Args:
        group: of which this worker is a member. [the default group]
    """
    if "cpu:" in dist.get_backend_config(group):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def gather_texts(text: str, group: Any = None) -> list[str]:
    """Return every worker's text, in the order of ranks; all must call it."""
    device = device_for(group)
    data = torch.tensor(list(text.encode()), dtype=torch.uint8, device=device)
    size = torch.tensor([data.numel()], device=device)
    sizes = [torch.zeros_like(size) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, size, group=group)
    longest = max(int(n) for n in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: data.numel()] = data
    parts = [torch.zeros_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=group)
    return [bytes(part[: int(n)].tolist()).decode() for part, n in zip(parts, sizes, strict=True)]


def require_same_module(module: nn.Module) -> None:
    """Refuse ranks whose modules differ.

    Raises:
        ConfigurationError: on every worker, with the first tensor that differs, or method.
    """
    lines = [_tensor_line(name, x) for name, x in _tensors(module)]
    code = code_of(module)
    digests = gather_texts(_digest("\n".join(lines)) + _digest("\n".join(code)))
    if len(set(digests)) == 1:
        return
    if len({x[:_DIGEST] for x in digests}) == 1:
        _refuse_other_code([text.splitlines() for text in gather_texts("\n".join(code))])
        return
    everyone = [text.splitlines() for text in gather_texts("\n".join(lines))]
    raise ConfigurationError(
        f"ranks hold different modules: {_first_difference(everyone)}; allowed: the same "
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
    return hashlib.blake2b(text.encode(), digest_size=_DIGEST // 2).hexdigest()


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
    what: str, number: object, group: Any = None, among: Sequence[int] | None = None
) -> None:
    """Refuse ranks that hold different values of a number, or of several; all must call it.

    Args:
        what: the number is.
        number: of this rank.
        group: process group of all workers. [the default group]
        among: ranks that are compared. [all]

    Raises:
        ConfigurationError: on every one of these, with every value.
    """
    values = gather_texts(repr(number), group)
    if among is not None:
        values = [values[rank] for rank in among]
    if len(set(values)) > 1:
        pairs = zip(among or range(len(values)), values, strict=True)
        each = ", ".join(f"rank {rank}: {value}" for rank, value in pairs)
        raise ConfigurationError(
            f"ranks have different {what} ({each}); allowed: the same everywhere; "
            "use Trainer(use_distributed_sampler=True), or limit_train_batches"
        )


def describe_batch(batch: Any) -> str:
    """Describe what must be alike in every worker's batch: structure, dtypes and ranks.

    Sizes may differ: sentences are padded batch by batch, last batches are smaller.

    Example:
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


def merged(mine: Mapping[Any, Any], group: Any) -> dict[Any, Any]:
    """Return on worker 0 what all workers have, in nested mappings; elsewhere the own."""
    return together(gathered(mine, group) or [mine])


def gathered(mine: Mapping[Any, Any], group: Any) -> list[Mapping[Any, Any]] | None:
    """Return on worker 0 what all workers have; None elsewhere.

    Args:
        mine: what this worker has.
        group: process group of all workers for what is in the host's memory; None for one worker.
    """
    if group is None:
        return [mine]
    if dist.get_rank() != 0:
        packed = _packed(mine)
        for x in (torch.tensor([packed.numel()]), packed):
            dist.send(x, 0, group=group)
        return None
    parts = [mine]
    for rank in range(1, dist.get_world_size()):
        size = torch.zeros(1, dtype=torch.int64)
        dist.recv(size, rank, group=group)
        packed = torch.empty(int(size), dtype=torch.uint8)
        dist.recv(packed, rank, group=group)
        parts.append(torch.load(io.BytesIO(packed.numpy().data), weights_only=True))
    return parts


def together(parts: Sequence[Mapping[Any, Any]]) -> dict[Any, Any]:
    """Return nested mappings as one; where several have a value, it is that of the first.

    Example:
        >>> together([{"t": 3, "previous": {"a": 1}}, {"t": 4, "previous": {"b": 2}}])
        {'t': 3, 'previous': {'a': 1, 'b': 2}}
    """
    whole: dict[Any, Any] = {}
    for part in parts:
        for key, value in part.items():
            if isinstance(value, Mapping) and isinstance(whole.get(key, {}), Mapping):
                whole[key] = together([whole.get(key, {}), value])
            else:
                whole.setdefault(key, value)
    return whole


def _plain(x: Any) -> Any:
    if type(x) is Tensor and x.layout is torch.strided:
        return x.detach().cpu().clone()  # a file has all of the storage in which a tensor lies
    if isinstance(x, Tensor):
        return x.cpu()
    return x.item() if isinstance(x, Number) and hasattr(x, "item") else x  # numpy's, as Python's


def _packed(mine: Mapping[Any, Any]) -> Tensor:
    """Return values as bytes of a file, from which nothing but such values can be read.

    Raises:
        ConfigurationError: for a kind of values that no checkpoint could be read with.
    """
    file = io.BytesIO()
    torch.save(tree_map(_plain, dict(mine)), file)
    file.seek(0)  # worker 0 could not read them, and others would wait for it
    if kinds := torch.serialization.get_unsafe_globals_in_checkpoint(file):
        raise ConfigurationError(
            f"rank {dist.get_rank()} has values of {', '.join(sorted(kinds))} in what a "
            "checkpoint keeps; allowed: tensors, numbers, strings, and dictionaries, lists and "
            "tuples of them; keep others out of the optimizer's state, or name their class to "
            "torch.serialization.add_safe_globals on every rank"
        )
    return torch.frombuffer(file.getbuffer(), dtype=torch.uint8)


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
