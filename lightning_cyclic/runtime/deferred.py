"""Deferred tensors: a module is made without memory, and each of its parameters when it is read.

    with deferral.running():                operations are noted, on tensors without memory
        module = Net()
    deferral.adopt(module)                  parameters are absent (absent.py), buffers are made;
                                            so are those that lie in files (safetensors)
    module.layer.weight + 1                 what made the weight is carried out, and nothing else

A worker of a pipeline makes its own stages alone, with the random values that one device would
have given them: the state of the generator is noted before each random operation.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_iter, tree_map_only, tree_unflatten
from typing_extensions import override

from lightning_cyclic.errors import ConfigurationError
from lightning_cyclic.runtime.absent import come_back, home_of, is_absent, leave, name_of
from lightning_cyclic.runtime.lending import Lending, without_memory
from lightning_cyclic.runtime.mapped_files import MappedFiles
from lightning_cyclic.runtime.notes import Note, Ref, described, some_values

_META = torch.device("meta")
_OURS = {"_device", "_home", "_is_param"}  # attributes of a deferred tensor


class DeferredTensor(Tensor):
    """Be a tensor without memory that says it is on a device, as its initialiser may ask."""

    _home: Deferral
    _device: torch.device

    @staticmethod
    def __new__(cls, data: Tensor, *, requires_grad: bool = True, **attributes: Any) -> Any:
        """Make a plain parameter, where code makes another one of the kind of one that it has."""
        return nn.Parameter(data, requires_grad=requires_grad)

    @classmethod
    def over(cls, shadow: Tensor, device: torch.device, home: Deferral) -> DeferredTensor:
        """Make one over a tensor of the meta device."""
        made: Any = Tensor._make_subclass(
            cls, shadow, require_grad=False, dispatch_device=True, device_for_backend_keys=device
        )
        made._device, made._home = device, home
        return made  # type: ignore[no-any-return]

    @property
    @override
    def device(self) -> torch.device:  # type: ignore[override]
        return self._device

    @override
    def __deepcopy__(self, memo: Any) -> Any:
        if id(self) not in memo:
            made: Any = self.detach().clone()
            if isinstance(self, nn.Parameter):
                made = nn.Parameter(made, requires_grad=self.requires_grad)
            memo[id(self)] = made
        return memo[id(self)]

    @override
    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        values = self._home.real(self).detach().numpy(*args, **kwargs)
        values.setflags(write=False)  # what is written here would reach nobody
        return values

    @override
    def tolist(self) -> Any:
        return self._home.real(self).tolist()

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Give it values where it is used later, and was no parameter of the module."""
        given = tree_iter((args, kwargs or {}))
        home = next(x._home for x in given if isinstance(x, DeferredTensor))
        args, kwargs = home.real((args, kwargs or {}))
        return func(*args, **kwargs)


@final
class Deferral:
    """Note how tensors are made, and make them later.

    Args:
        device: on which parameters are to be.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._notes: list[Note] = []
        self._writers: dict[int, list[int]] = {}  # storage -> the notes that write to it
        self._alive: dict[int, Tensor] = {}  # so that no storage takes the place of another
        self._where: dict[str, tuple[nn.Parameter, Ref | None]] = {}
        self._lending: Lending | None = None
        self._given: dict[str, Tensor] = {}  # values that were loaded
        self._files = MappedFiles()
        self._is_loading = False
        self._again: set[str] = set()  # parameters that were given values behind a fit

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let the body make tensors without memory."""
        try:
            with _Noting(self):
                yield
        except (NotImplementedError, RuntimeError, TypeError) as error:
            said = str(error).strip().partition("\n")[0]
            raise ConfigurationError(
                f"layers could not be made without memory: {type(error).__name__}: {said}; "
                "allowed: what works without memory_limit_bytes as well, and gives tensors their "
                "values by torch's operations; if it fails without memory_limit_bytes, too, the "
                "error is its own; else make this one otherwise, or outside of configure_model "
                "and trainer.init_module"
            ) from error

    def adopt(self, module: nn.Module) -> None:
        """Let the parameters of a module that was made so be absent, and make its buffers."""
        made: dict[int, torch.UntypedStorage] = {}
        for m in module.modules():
            for name, b in m._buffers.items():
                if b is not None and _is_deferred(b):
                    m._buffers[name] = self._make([_ref(b)], made)[0]
        self._files = files = MappedFiles()
        scripted = [m for m in module.modules() if isinstance(m, torch.jit.ScriptModule)]
        theirs = {id(p) for m in scripted for p in m.parameters()}  # pipelines refuse them by name
        for name, deferred in list(module.named_parameters()):
            if id(deferred) in theirs or is_lazy(deferred):
                continue
            if _is_deferred(deferred):
                ref, p = _ref(deferred), _hollow(deferred, module)
                leave(p, self._key(name, p, ref), self)
            elif not is_absent(deferred) and files.hold(deferred):
                key = self._key(name, deferred, None)
                self._given[key] = deferred.data  # of which the file is read where it is copied
                deferred.data = without_memory(deferred)
                leave(deferred, key, self)

    def _key(self, name: str, p: nn.Parameter, ref: Ref | None) -> str:
        """Enter a parameter under a name that no parameter of another module has."""
        key = name if name not in self._where else f"{name} ({len(self._where)})"
        self._where[key] = p, ref
        return key

    def origins(self) -> Iterator[bytes]:
        """Yield what parameters are to be made from, and by what; of values some."""
        seen: set[int] = set()
        storages: dict[int, int] = {}  # by numbers that are alike in every process
        for ref in (ref for _, ref in self._where.values() if ref is not None):
            for n in sorted(self._needed([ref.storage]) - seen):
                seen.add(n)
                yield from described(self._notes[n], storages)
        for name in (n for n in self._given if n not in self._again):
            yield from some_values(self._value_of(name))

    # ------------------------------------------------------------------ reading

    def read(self, names: Sequence[str], operands: Sequence[Tensor]) -> None:
        """Make parameters, since their values are read."""
        read: dict[str, nn.Parameter] = {}
        for name in names:
            p, ref = self._where[name]
            if home_of(p) is not self:
                continue
            if name in self._given:
                value = torch.empty(p.shape, dtype=p.dtype, device=p.device)
                value.copy_(self._value_of(name))
            else:
                assert ref is not None
                (value,) = self._make([ref], {})
            come_back(p)
            p.data = value
            read[name] = p
        if self._lending is not None:
            self._lending.lend(read, operands)

    def _value_of(self, name: str) -> Tensor:
        """Return what a parameter was given; what lies in a file can be read of it."""
        self._files.check(self._given[name], name)
        return self._given[name]

    def accept(self, name: str, values: Tensor) -> bool:
        """Take values that a parameter is to have; while a checkpoint is loaded, for later."""
        p, _ = self._where[name]
        if not self._is_loading or home_of(p) is not self or values.shape != p.shape:
            return False
        self._given[name] = values.detach()
        return True

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Let what the body copies into absent parameters be theirs when they are read.

        So it is with those that other ranks have kept from a fit that is over.
        """
        self._is_loading = True
        kept = [
            (n, p, name_of(p), home)
            for n, (p, _) in self._where.items()
            if (home := home_of(p)) is not None and getattr(home, "is_over", False)
        ]
        for n, p, *_ in kept:
            self._again.add(n)
            self._given.pop(n, None)
            leave(p, n, self)
        try:
            yield
        finally:
            self._is_loading, self._files = False, MappedFiles()
            for n, p, name, home in kept:
                if n not in self._given:
                    leave(p, name, home)

    def read_gradient(self, name: str) -> None:
        """Let it be read: there is none yet."""

    @contextmanager
    def lending(self, module: nn.Module) -> Iterator[None]:
        """Let the body read parameters that are given up again where their module's call ends."""
        self._lending = Lending(module, self._leave)
        try:
            yield
        finally:
            self._lending.end()
            self._lending = None

    def _leave(self, p: Tensor, name: str) -> None:
        p.data = without_memory(p)
        leave(p, name, self)

    # ------------------------------------------------------------------ noting

    def note(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Carry an operation out without memory, and note it."""
        leaves, tree = tree_flatten((args, kwargs))
        device, state = self._device_of(func, leaves, kwargs), None
        given = [_ref(x) if _is_deferred(x) else _copied(x) for x in leaves]
        shadows = [_shadow(x) for x in leaves]
        mine = {id(s): x for s, x in zip(shadows, leaves, strict=True) if _is_deferred(x)}
        args_there, there = tree_unflatten(shadows, tree)
        try:
            out = func(*args_there, **_on_meta(func, there))
        except NotImplementedError:  # its result has a form that values decide
            if any(map(_is_deferred, _changed(func, args))):
                raise
            args, kwargs = self.real((args, kwargs))
            return func(*args, **kwargs)
        if _is_random(func):
            state = _state(device)
            self._draw(func, leaves, tree)
        for s, x in zip(shadows, leaves, strict=True):
            if _is_deferred(x) and _ref(s) != _ref(x):  # set_, resize_: it lies elsewhere now
                x.data = DeferredTensor.over(s, x.device, self)
        outputs = [_ref(x) for x in tree_iter(out) if isinstance(x, Tensor)]
        number = len(self._notes)
        self._notes.append(Note(func, given, tree, outputs, state, device))
        for key in {r.storage for r in outputs} | {_ref(x).storage for x in _changed(func, args)}:
            self._writers.setdefault(key, []).append(number)

        def wrapped(x: Tensor) -> Tensor:
            self._alive.setdefault(x.untyped_storage()._cdata, x)
            known = mine.get(id(x))  # changed in place, and returned
            return DeferredTensor.over(x, device, self) if known is None else known

        return tree_map_only(Tensor, wrapped, out)

    def _draw(self, func: Any, leaves: list[Any], tree: Any) -> None:
        """Draw as many random numbers as the operation would, and forget them."""
        args, kwargs = tree_unflatten(
            [
                torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=x.device).zero_()
                if _is_deferred(x)
                else x
                for x in leaves
            ],
            tree,
        )
        func(*args, **kwargs)

    def _device_of(self, func: Any, leaves: list[Any], kwargs: Any) -> torch.device:
        asked = kwargs.get("device")
        if asked is not None:
            return torch.device(asked)
        return next((x.device for x in leaves if isinstance(x, Tensor)), self._device)

    def real(self, tree: Any) -> Any:
        """Return a tree of which all tensors have values."""
        made: dict[int, torch.UntypedStorage] = {}
        return tree_map_only(
            Tensor, lambda x: self._make([_ref(x)], made)[0] if _is_deferred(x) else x, tree
        )

    # ------------------------------------------------------------------ making

    def _make(self, refs: list[Ref], made: dict[int, torch.UntypedStorage]) -> list[Tensor]:
        """Carry out what wrote to some storages, and to those that it read.

        Args:
            refs: the tensors that are wanted.
            made: storages that are there; what is made is added.
        """
        numbers = self._needed([r.storage for r in refs if r.storage not in made])
        states = {torch.device("cpu"): torch.get_rng_state()}
        try:
            with torch.no_grad(), torch._C._DisableTorchDispatch():
                for n in sorted(numbers):
                    note = self._notes[n]
                    if note.state is not None:
                        states.setdefault(note.device, _state(note.device))
                    self._carry_out(note, made)
        finally:
            for device, state in states.items():
                _set_state(device, state)
        return [_lying(made[r.storage], r) for r in refs]

    def _needed(self, keys: list[int]) -> set[int]:
        """Return the numbers of the notes by which storages got their values."""
        numbers: set[int] = set()
        seen, todo = set(keys), list(keys)
        while todo:
            for n in self._writers.get(todo.pop(), ()):
                if n in numbers:
                    continue
                numbers.add(n)
                note = self._notes[n]
                for x in (*note.leaves, *note.outputs):
                    if isinstance(x, Ref) and x.storage not in seen:
                        seen.add(x.storage)
                        todo.append(x.storage)
        return numbers

    def _carry_out(self, note: Note, made: dict[int, torch.UntypedStorage]) -> None:
        leaves = [_lying(made[x.storage], x) if isinstance(x, Ref) else x for x in note.leaves]
        args, kwargs = tree_unflatten(leaves, note.tree)
        if note.state is not None:
            _set_state(note.device, note.state)
        out = note.func(*args, **kwargs)
        for x, ref in zip(
            (x for x in tree_iter(out) if isinstance(x, Tensor)), note.outputs, strict=True
        ):
            made.setdefault(ref.storage, x.untyped_storage())


def beginnings(module: nn.Module) -> str:
    """Return a digest of what a module's parameters are to be made from.

    That is what initialises them, with the state of the generator; and of those that lie in files
    the first and last values, as nobody is to read them all.
    """
    homes = {id(h): h for h in map(home_of, module.parameters()) if isinstance(h, Deferral)}
    digest = hashlib.blake2b(digest_size=8)
    for home in homes.values():
        for data in home.origins():
            digest.update(data)
    return digest.hexdigest()


@final
class _Noting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hand operations to a deferral: those that make tensors, and those on what it has made."""

    def __init__(self, deferral: Deferral) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._deferral = deferral

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [x for x in tree_iter((args, kwargs)) if isinstance(x, Tensor)]
        deferred = [x for x in given if _is_deferred(x)]
        if _is_on_meta(kwargs):  # its caller wants no values
            args, kwargs = tree_map_only(DeferredTensor, _shadow, (args, kwargs))
            return func(*args, **kwargs)
        is_factory = not given and _takes_device(func) and not _is_empty(args)
        if not deferred and not is_factory:
            return func(*args, **kwargs)
        returns = [str(r.type) for r in func._schema.returns]
        hands_values_on = not any("Tensor" in r for r in returns) and bool(returns)
        changed = _changed(func, args)
        changes_real = any(not _is_deferred(x) for x in changed)
        if hands_values_on or changes_real:  # a number is asked for, or what has memory
            args, kwargs = self._deferral.real((args, kwargs))
            return func(*args, **kwargs)
        only_read = [x for x in deferred if all(x is not y for y in changed)]
        if _is_random(func) and only_read:
            # how many numbers are drawn may depend on the values that it is given
            kept = set(map(id, changed))
            args, kwargs = tree_map_only(
                DeferredTensor,
                lambda x: x if id(x) in kept else self._deferral.real(x),
                (args, kwargs),
            )
            if not changed:
                return func(*args, **kwargs)
        return self._deferral.note(func, args, kwargs)


def _hollow(p: nn.Parameter, module: nn.Module) -> nn.Parameter:
    """Turn a parameter into a usual one, whose elements share one place in memory."""
    hollow = nn.Parameter(without_memory(p), requires_grad=p.requires_grad)
    if _swapped(p, hollow):  # whoever holds it goes on holding it
        vars(p).clear()
        vars(p).update({k: x for k, x in vars(hollow).items() if k not in _OURS})
        return p
    vars(hollow).update({k: x for k, x in vars(p).items() if k not in _OURS})
    for m in module.modules():
        for name in [n for n, q in m._parameters.items() if q is p]:
            m._parameters[name] = hollow
            if isinstance(m, nn.RNNBase):  # it holds its weights in a list, too
                m._init_flat_weights()
    return hollow


def _swapped(p: nn.Parameter, other: nn.Parameter) -> bool:
    """Let a parameter be another one, if nothing of torch's refers to it."""
    if weakref.getweakrefs(p):
        return False
    try:
        torch.utils.swap_tensors(p, other)  # type: ignore[no-untyped-call]
    except RuntimeError:  # a graph has seen it
        return False
    return True


def _is_deferred(x: Any) -> bool:
    return isinstance(x, DeferredTensor)


def _ref(x: Tensor) -> Ref:
    key, offset = x.untyped_storage()._cdata, int(x.storage_offset())
    return Ref(key, offset, x.size(), x.stride(), x.dtype)


def _lying(storage: torch.UntypedStorage, ref: Ref) -> Tensor:
    made = torch.empty(0, dtype=ref.dtype, device=storage.device)
    return made.set_(storage, ref.offset, ref.size, ref.stride)


def _is_random(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


def _is_empty(args: Any) -> bool:
    """Say whether a factory is asked for no element, as for parameters that are not yet known."""
    return bool(args) and isinstance(args[0], list | tuple) and 0 in args[0]


def _copied(x: Any) -> Any:
    """Return a leaf that no later change reaches."""
    return x.detach().clone() if isinstance(x, Tensor) else x


def _shadow(x: Any) -> Any:
    if isinstance(x, DeferredTensor):
        with torch._C._DisableTorchDispatch():
            return _lying(x.untyped_storage(), _ref(x))
    return x.to(_META) if isinstance(x, Tensor) else x


def _takes_device(func: Any) -> bool:
    return any(a.name == "device" for a in func._schema.arguments)


def _is_on_meta(kwargs: Any) -> bool:
    asked = kwargs.get("device")
    return asked is not None and torch.device(asked) == _META


def _on_meta(func: Any, kwargs: Any) -> Any:
    return kwargs | {"device": _META} if _takes_device(func) else kwargs


def _changed(func: Any, args: Any) -> list[Tensor]:
    """Return what an operation changes in place."""
    named = zip(func._schema.arguments, args, strict=False)
    changed = [x for a, x in named if a.alias_info is not None and a.alias_info.is_write]
    return [x for x in tree_iter(changed) if isinstance(x, Tensor)]


def _state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)
