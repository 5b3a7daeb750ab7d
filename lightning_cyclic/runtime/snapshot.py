"""A snapshot: what a step may change of a module beside its weights, to compare and to put back.

Looked at are buffers, the attributes of all modules and what they lead to: containers, objects of
the user's classes, tensors, arrays, generators of random numbers, iterators; and what hooks of
modules close over. Not looked at are parameters, classes and functions, objects of libraries, and
what no attribute leads to, such as a global of the user's file.

A name is a path: "net.3.mean", "seen[2]", "stats.count".
"""

from __future__ import annotations

import copy
import enum
import hashlib
import itertools
import sys
import types
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from lightning_cyclic.errors import StepError
from lightning_cyclic.runtime import generators
from lightning_cyclic.runtime.absent import is_absent
from lightning_cyclic.runtime.bits import Mark, digest, same
from lightning_cyclic.runtime.generators import is_generator
from lightning_cyclic.runtime.partial_step.ghosts import Ghost

_PLAIN = (type(None), bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device,
          torch.Size, range, slice)  # fmt: skip
_LIBRARIES = ("torch", "lightning", "pytorch_lightning", "lightning_cyclic", "lightning_utilities",
              "logging", "threading", "_thread", "concurrent", "multiprocessing", "asyncio", "io",
              "_io", "builtins", "types", "weakref", "functools", "typing", "re")  # fmt: skip
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_OF_TORCH = frozenset(vars(nn.Module())) - {"training", "_buffers", *_HOOKS}
_MOST_ITEMS = 10_000  # of a container, that are searched for others
_MOST_BYTES = 1 << 30  # of tensors and arrays that are no buffers, that are copied
_REWOUND: tuple[type, ...] = (
    type(iter([])),
    type(iter(())),
    type(iter(range(0))),
    itertools.count,
)
_MOST = 200_000  # objects, that are looked at
_LONGEST = 60  # characters of a value, as it is shown


class Print(NamedTuple):
    """Hold what two values are compared by, and how one is shown."""

    bits: str
    text: str


@contextmanager
def untouched(module: nn.Module) -> Iterator[Snapshot]:
    """Restore a module and all random generators behind the body, also when it raises."""
    devices = {torch.device("cpu"), *(p.device for p in module.parameters())}
    own = [x for device in devices for x in generators.of_process(device).values()]
    with generators.untouched(own):
        snapshot = Snapshot(module)
        try:
            yield snapshot
        finally:
            snapshot.restore()


def _put(tensor: Tensor, before: Tensor, *, had_graph: bool) -> None:
    with torch.no_grad():
        if not same(before, tensor):
            tensor.detach().copy_(before)
        if tensor.grad_fn is not None and not had_graph:
            tensor.detach_()


@final
class Snapshot:
    """Know how a module was."""

    def __init__(self, module: nn.Module, ignored: Collection[str] = ()) -> None:
        self._module = module
        self._ignored = frozenset(ignored)
        self._containers: list[tuple[Any, Any]] = []
        self._cells: list[tuple[types.CellType, Any]] = []
        self._tensors: dict[int, tuple[Tensor, Tensor, bool]] = {}  # with whether it had a graph
        self._counted: list[tuple[str, Mark]] = []  # too large for a copy
        self._puts: list[tuple[Callable[[Any], object], Any]] = []
        self._generators: generators.States = []
        self._streams: list[tuple[str, Any, Print]] = []
        self._buffers = dict(module.named_buffers())
        self._are_buffers = {id(b) for b in self._buffers.values()}
        self._bytes = 0
        for m in module.modules():
            self._note_container(vars(m))
            for name in ("_parameters", "_buffers", "_modules", *_HOOKS):
                self._note_container(vars(m)[name])
        for name, x in walk(module, self._ignored):
            self._note(name, x)

    def keep(self, tensor: Tensor) -> None:
        """Copy a tensor that is about to change in place."""
        if id(tensor) not in self._tensors:
            copy_ = tensor.detach().clone()
            self._tensors[id(tensor)] = (tensor, copy_, tensor.grad_fn is not None)

    def changed_buffers(self) -> list[str]:
        """Return the names of the buffers whose values differ from those at the beginning."""
        now = dict(self._module.named_buffers())
        before = {name: self._tensors[id(b)][1] for name, b in self._buffers.items()
                  if id(b) in self._tensors}  # fmt: skip
        return [n for n, x in before.items() if n not in now or not same(x, now[n])]

    def restore(self) -> None:
        """Put everything back.

        Raises:
            StepError: for an iterator that has gone on, or a large tensor that was changed: what
                cannot be put back.
        """
        for container, items in self._containers:
            refill(container, items)
        for cell, value in self._cells:
            cell.cell_contents = value
        for tensor, before, had_graph in self._tensors.values():
            _put(tensor, before, had_graph=had_graph)
        for put, state in self._puts:
            put(state)
        generators.put(self._generators)
        for name, x, seen in self._streams:
            if _stream_print(x) != seen:
                raise _once(name, f"an iterator ({type(x).__name__}), which the step has advanced")
        for name, mark in self._counted:
            if not mark.is_of(mark.value):
                raise _once(name, "a tensor of over 1 GiB, which the step has changed in place")

    def _note(self, name: str, x: Any) -> None:
        if isinstance(x, Tensor):
            self._note_tensor(name, x)
        elif is_generator(x):
            self._generators.append((x, generators.state_of(x)))
        elif isinstance(x, list | dict | set | deque):
            self._note_container(x)
        elif isinstance(x, types.CellType):
            self._cells.append((x, x.cell_contents))
        elif _is_array(x):
            self._puts.append((_into(x), x.copy()))
        elif is_stream(x):
            if not isinstance(x, _REWOUND):
                self._streams.append((name, x, _stream_print(x)))
        elif hasattr(x, "__dict__"):
            self._note_container(vars(x))

    def _note_tensor(self, name: str, x: Tensor) -> None:
        if x.is_inference() or x.is_meta:
            return
        num_bytes = x.numel() * x.element_size()
        if id(x) not in self._are_buffers:
            if self._bytes + num_bytes > _MOST_BYTES:
                self._counted.append((name, Mark.of(x)))
                return
            self._bytes += num_bytes
        self.keep(x)

    def _note_container(self, container: Any) -> None:
        items = copy.copy(container) if type(container) is not dict else dict(container)
        _rewind_within(items)
        self._containers.append((container, items))


def walk(module: nn.Module, ignored: Collection[str] = ()) -> Iterator[tuple[str, Any]]:
    """Iterate over what a module's code can reach: names, and all but containers' plain items."""
    seen = {id(m) for m in module.modules()} | {id(p) for p in module.parameters()}
    for path, m in module.named_modules():
        dot = f"{path}." if path else ""
        skipped = _OF_TORCH | (frozenset(ignored) - {"_buffers", *_HOOKS} if not path else set())
        for name, x in list(vars(m).items()):
            if name == "_buffers":
                for key, b in x.items():
                    yield from _walk(f"{dot}{key}", b, seen)
            elif name in _HOOKS:
                for hook in x.values():
                    yield from _walk_function(f"{dot}{name}", hook, seen)
            elif name not in skipped:
                yield from _walk(f"{dot}{name}", x, seen)


def _walk(name: str, x: Any, seen: set[int]) -> Iterator[tuple[str, Any]]:
    if isinstance(x, _PLAIN):
        yield name, x
        return
    if len(seen) > _MOST or id(x) in seen or _is_elsewhere(x):
        return
    seen.add(id(x))
    inside = _inside(name, x)
    if inside is not None:
        yield name, x
        for label, item in inside:
            yield from _walk(label, item, seen)


def _inside(name: str, x: Any) -> list[tuple[str, Any]] | None:
    """Return what a value leads to, by name; None where nothing is looked at."""
    if isinstance(x, Tensor | set | frozenset) or is_generator(x) or _is_array(x) or is_stream(x):
        return []
    if isinstance(x, dict):
        return [(f"{name}[{key!r}]", item) for key, item in list(x.items())[:_MOST_ITEMS]]
    if isinstance(x, list | tuple | deque):
        items = itertools.islice(x, _MOST_ITEMS)
        return [(f"{name}[{k}]", item) for k, item in enumerate(items)]
    if _is_of_user(x):
        return [(f"{name}.{key}", item) for key, item in vars(x).items()]
    return None


def _is_elsewhere(x: Any) -> bool:
    return isinstance(x, Ghost) or (isinstance(x, Tensor) and is_absent(x))


def _walk_function(name: str, hook: Any, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Iterate over what a hook closes over, and over the object that it is a method of."""
    if isinstance(hook, types.MethodType):
        yield from _walk(f"{name}.self", hook.__self__, seen)
    for cell in getattr(hook, "__closure__", None) or ():
        try:
            value = cell.cell_contents
        except ValueError:  # empty
            continue
        if id(cell) not in seen:
            seen.add(id(cell))
            yield name, cell
            yield from _walk(f"{name}.{getattr(hook, '__name__', 'hook')}", value, seen)


def prints(module: nn.Module, ignored: Collection[str] = ()) -> dict[str, Print]:
    """Return what is compared of a module's state, by name; generators are left out."""
    return {
        name: print_of(x)
        for name, x in walk(module, ignored)
        if not (isinstance(x, types.CellType) or is_generator(x))
    }


def print_of(x: Any) -> Print:
    """Return what a value is compared by; of a container its length, as its items have names."""
    if isinstance(x, _PLAIN):
        return Print(repr(x), _shortened(repr(x)))
    return next((made(x) for fits, made in _PRINTERS if fits(x)), Print("", type(x).__name__))


def _generator_print(x: Any) -> Print:
    bits = hashlib.blake2b(_text_bits(generators.state_of(x)).encode(), digest_size=4).hexdigest()
    return Print(bits, f"a generator in state {bits}")


def _array_print(x: Any) -> Print:
    bits = hashlib.blake2b(x.tobytes(), digest_size=8).hexdigest()
    return Print(f"{x.dtype}{x.shape}{bits}", _shortened(x))


def _set_print(x: Any) -> Print:
    plain = sorted(repr(item) for item in x if isinstance(item, _PLAIN))
    return Print(f"{len(x)} {plain}", _shortened(x))


def _length_print(x: Any) -> Print:
    return Print(f"{len(x)}", f"{type(x).__name__} of {len(x)}")


def tensor_print(x: Tensor) -> Print:
    """Return what a tensor is compared by, and its shape and norm, or its number, as text."""
    x = x.detach()
    if x.is_meta or x.numel() == 0:
        return Print(f"{x.dtype}{list(x.shape)}", f"{list(x.shape)}")
    if x.layout is not torch.strided:
        x = x.coalesce() if x.layout is torch.sparse_coo else x
        x = x.to_dense()
    if x.is_quantized or x.is_nested:
        return Print("", type(x).__name__)
    bits = f"{x.dtype}{list(x.shape)}{int(digest(x)) & (2**64 - 1):016x}"
    if x.numel() == 1:
        return Print(bits, repr(x.reshape(()).item()))
    if not (x.is_floating_point() or x.is_complex()):
        return Print(bits, f"{list(x.shape)} with sum {int(x.sum())}")
    norm = float(torch.linalg.vector_norm(x if x.is_complex() else x.double()))
    return Print(bits, f"{list(x.shape)} with norm {norm:.9g}")


def generators_of(module: nn.Module, ignored: Collection[str] = ()) -> dict[str, Any]:
    """Return the random generators that a module keeps, by name."""
    return {name: x for name, x in walk(module, ignored) if is_generator(x)}


def is_stream(x: Any) -> bool:
    """Say whether an object is an iterator, which can be asked once for each item."""
    return hasattr(type(x), "__next__") and not isinstance(x, Tensor)


def _stream_print(x: Any) -> Print:
    """Say how far an iterator is, as far as that can be seen."""
    if isinstance(x, types.GeneratorType):
        frame = x.gi_frame
        if frame is None:
            return Print("ended", "ended")
        known = {n: print_of(v).bits for n, v in frame.f_locals.items()}
        return Print(f"{frame.f_lasti}{known}", f"at line {frame.f_lineno}, {_shortened(known)}")
    if isinstance(x, _REWOUND):
        reduced = x.__reduce__()
        return Print(repr(reduced[2:] or reduced[1:]), _shortened(reduced[2:] or reduced[1:]))
    number = getattr(x, "_num_yielded", None)  # of torch's loaders
    if number is not None:
        return Print(f"{number}", f"behind item {number}")
    kept = {n: print_of(v).bits for n, v in getattr(x, "__dict__", {}).items()}
    return Print(repr(kept), _shortened(kept)) if kept else Print("", type(x).__name__)


def _is_array(x: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(x, numpy.ndarray) and x.dtype != object


_PRINTERS: tuple[tuple[Callable[[Any], bool], Callable[[Any], Print]], ...] = (
    (lambda x: isinstance(x, Tensor), tensor_print),
    (is_generator, _generator_print),
    (_is_array, _array_print),
    (lambda x: isinstance(x, set | frozenset), _set_print),
    (lambda x: isinstance(x, dict | list | tuple | deque), _length_print),
    (is_stream, _stream_print),
)


def _rewind_within(items: Any) -> None:
    """Let the copy of a container have copies of iterators, to be put in their places."""
    if isinstance(items, dict):
        for key, x in items.items():
            if isinstance(x, _REWOUND):
                items[key] = copy.copy(x)
    elif isinstance(items, list):
        items[:] = [copy.copy(x) if isinstance(x, _REWOUND) else x for x in items]


def _is_of_user(x: Any) -> bool:
    kind = type(x)
    if isinstance(x, type | types.ModuleType | types.FunctionType | types.MethodType):
        return False
    first = kind.__module__.partition(".")[0]
    return hasattr(x, "__dict__") and (isinstance(x, nn.Module) or first not in _LIBRARIES)


def _into(array: Any) -> Callable[[Any], object]:
    def put(values: Any) -> None:
        array[...] = values

    return put


def refill(container: Any, items: Any) -> None:
    """Let a list, queue, set or dictionary have these items."""
    if isinstance(container, dict):
        same = list(container) == list(items) and all(container[k] is items[k] for k in items)
    else:
        same = len(container) == len(items) and all(
            a is b for a, b in zip(container, items, strict=True)
        )
    if same:
        return
    container.clear()
    (container.extend if isinstance(container, list | deque) else container.update)(items)


def _text_bits(state: Any) -> str:
    if isinstance(state, Tensor):
        return f"{int(digest(state)) & (2**64 - 1):016x}"
    if isinstance(state, Mapping):
        return "{" + ",".join(f"{k}:{_text_bits(v)}" for k, v in state.items()) + "}"
    if isinstance(state, tuple | list) and len(state) <= 16:
        return "(" + ",".join(map(_text_bits, state)) + ")"
    data = state.tobytes() if _is_array(state) else repr(state).encode()
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _shortened(x: Any) -> str:
    text = " ".join((x if isinstance(x, str) else repr(x)).split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _once(name: str, what: str) -> StepError:
    return StepError(
        f"self.{name} is {what}: a step that cannot be run twice, while a step that is cut into "
        "stages is run once for each of them; allowed: steps that read what they are given; let "
        "the DataLoader give it with the batch, or take it in on_train_batch_start"
    )
