"""Meta weights: layers that are made on the meta device; each rank makes what it needs of them.

    with torch.device("meta"): self.net = Net()    parameters and buffers are shapes
    MetaWeights(module, ...)                       buffers are made, parameters absent (absent.py)
    read                                           what a checkpoint has of it, or a file; else by
                                                   reset_parameters of its module, under its key

The key is made of the seed and the module's path, so that values depend neither on who makes them
nor on what else is made.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, cast, final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_cyclic.errors import ConfigurationError
from lightning_cyclic.runtime.absent import come_back, home_of, is_absent, leave, without_memory
from lightning_cyclic.runtime.bits import Mark
from lightning_cyclic.runtime.generators import untouched

PATH = "weights_path"
"""Attribute of modules: a file of safetensors, or a folder of them, that has their weights."""
_ALLOWED = (
    "allowed: modules with a reset_parameters for their own parameters and buffers, in torch's "
    f"operations; files of safetensors, module.{PATH} = ...; checkpoints, ckpt_path=...; or make "
    "it outside of torch.device('meta')"
)


class _Unit(NamedTuple):
    """Be what is initialised together: a module, with its children where their parent does it."""

    path: str
    module: nn.Module


class _Stored(NamedTuple):
    """Say where values lie: in which file, under which name."""

    file: Path
    key: str


_Source: TypeAlias = _Unit | _Stored | None


def is_unmade(module: nn.Module) -> bool:
    """Say whether a module has parameters or buffers on the meta device, or that others have."""
    return any(x.is_meta or is_absent(x) for x in chain(module.parameters(), module.buffers()))


@final
class MetaWeights:
    """Make parameters when they are read.

    Args:
        module: of which some are on the meta device, or absent since a fit that is over.
    """

    def __init__(self, module: nn.Module, device: torch.device, seed: int) -> None:
        self._device, self._seed = device, seed
        self._modules = dict(module.named_modules(remove_duplicate=False))
        self._stored: dict[str, dict[str, Path]] = {}  # path of a module -> key -> file
        self._given: dict[str, Tensor] = {}
        self._making = ""
        self._is_open = True  # for what a checkpoint has
        self._lent: dict[int, tuple[nn.Parameter, str]] | None = None
        self._graphs_hold = True
        self._kept: set[int] = set()  # of them, by graphs
        names: dict[int, list[str]] = {}
        parameters = module.named_parameters(remove_duplicate=False)
        for name, x in chain(parameters, module.named_buffers(remove_duplicate=False)):
            names.setdefault(id(x), []).append(name)
        sources = {name: self._source(names[id(p)]) for name, p in _on_meta(module)}
        _put_hollow(module, device)
        self._where = {
            name: (p, sources.get(name))
            for name, p in module.named_parameters()
            if name in sources or is_absent(p)
        }
        for name, (p, _) in self._where.items():
            leave(p, name, self)
        left = {n: b for n, b in module.named_buffers() if is_absent(b)}
        for b in left.values():
            come_back(b)
        left |= self._make_buffers(module, names)
        self._unmade = [(n, Mark.of(b)) for n, b in left.items()]

    # ------------------------------------------------------------------ where values come from

    def _source(self, names: Sequence[str]) -> _Source:
        files = filter(None, map(self._file_of, names))
        return next(files, None) or next(filter(None, map(self._unit_of, names)), None)

    def _file_of(self, name: str) -> _Stored | None:
        for path in _paths_above(name):
            place = getattr(self._modules[path], PATH, None)
            if isinstance(place, str | Path):
                if path not in self._stored:
                    self._stored[path] = _files_of(Path(place), path)
                key = name[len(path) + 1 :] if path else name
                if key in self._stored[path]:
                    return _Stored(self._stored[path][key], key)
        return None

    def _unit_of(self, name: str) -> _Unit | None:
        above = [_Unit(path, self._modules[path]) for path in _paths_above(name)]
        unit = next((x for x in above if _resets_all(x.module)), above[0])
        return unit if _resets(unit.module) else None

    def check(self) -> None:
        """See that there are values for everything; a checkpoint has been loaded, if any is.

        Raises:
            ConfigurationError: with the first parameter or buffer that nothing gives values.
        """
        self._is_open = False
        for name, (_, source) in self._where.items():
            if source is None and name not in self._given:
                self._refuse("parameter", name)
        for name, b in self._unmade:
            if b.is_of(b.value):
                self._refuse("buffer", name)

    def _refuse(self, what: str, name: str) -> None:
        kind = type(self._modules[name.rpartition(".")[0]]).__name__
        raise ConfigurationError(
            f"{what} {name!r} of {kind} was made on the meta device, or left to other ranks by a "
            f"fit that is over, and nothing gives it values: {kind} has no reset_parameters, and "
            f"no file has it; {_ALLOWED}"
        )

    # ------------------------------------------------------------------ reading

    def make_all(self) -> None:
        self.read([n for n, (p, _) in self._where.items() if home_of(p) is self])

    def read(self, names: Sequence[str]) -> None:
        """Make parameters, since their values are read.

        Raises:
            ConfigurationError: what initialises one module reads another one.
        """
        if self._making:
            raise ConfigurationError(
                f"reset_parameters of {self._making} reads or changes {names[0]!r} of another "
                "module, which has its values by itself; allowed: a module's own parameters and "
                "buffers; let the other module initialise its own"
            )
        made, unit = dict[int, Tensor](), None
        for name in names:
            p, source = self._where[name]
            if home_of(p) is not self:  # it has come with another one
                continue
            if name in self._given:
                values = _copied(self._given[name].detach(), p)
            elif isinstance(source, _Stored):
                values = _copied(_loaded(source, p, name), p)
            else:
                assert source is not None
                if source != unit:
                    made, unit = {}, source  # nothing twice
                    made = self._reset(source)
                values = made.pop(id(p))
            self._come(p, name, values)

    def _come(self, p: nn.Parameter, name: str, values: Tensor) -> None:
        with torch.inference_mode(mode=False), torch.no_grad():
            come_back(p)
            p.data = values.to(p.device, p.dtype).contiguous()
        if self._lent is not None:
            self._lent[id(p)] = p, name
            if torch.is_grad_enabled() and self._graphs_hold:
                self._kept.add(id(p))

    def accept(self, name: str, values: Tensor) -> bool:
        """Take the values that a checkpoint has, for when they are read."""
        if self._is_open:
            self._given[name] = values
        return self._is_open

    def read_gradient(self, name: str) -> None:
        """Let it be read: there is none yet."""

    @contextmanager
    def lending(self, *, graphs_hold: bool = True) -> Iterator[None]:
        """Let what the body reads leave behind the call of its module; what graphs hold, later."""
        self._lent, self._graphs_hold = {}, graphs_hold
        hook = nn.modules.module.register_module_forward_hook(
            lambda m, *_: self._take_back(m.parameters()), always_call=True
        )
        try:
            yield
        finally:
            hook.remove()
            self._kept.clear()
            self._take_back([p for p, _ in self._lent.values()])
            self._lent = None

    def _take_back(self, parameters: Any) -> None:
        assert self._lent is not None
        with torch._C.DisableTorchFunction():  # a survey is not to see it
            for p in parameters if self._lent else ():
                if id(p) in self._lent and id(p) not in self._kept:
                    _, name = self._lent.pop(id(p))
                    p.data = without_memory(p)
                    leave(p, name, self)

    # ------------------------------------------------------------------ making

    def _make_buffers(
        self, module: nn.Module, names: Mapping[int, Sequence[str]]
    ) -> Iterator[tuple[str, Tensor]]:
        """Make all buffers; yield those that only a checkpoint can still give values."""
        made, values, unit = dict[int, Tensor](), dict[int, Tensor](), None
        for m in module.modules():
            for key, b in m._buffers.items():
                if b is None or not b.is_meta:
                    continue
                if id(b) not in made:
                    name, source = names[id(b)][0], self._source(names[id(b)])
                    if isinstance(source, _Unit) and source != unit:
                        values, unit = self._reset(source), source
                    elif isinstance(source, _Stored):
                        values = {id(b): _loaded(source, b, name)}
                    made[id(b)] = values.get(id(b), torch.empty_like(b, device="cpu"))
                    made[id(b)] = made[id(b)].to(self._device)
                    if source is None:
                        yield name, made[id(b)]
                m._buffers[key] = made[id(b)]

    def _reset(self, unit: _Unit) -> dict[int, Tensor]:
        """Return the values that a module gives its parameters and buffers, by their ids.

        It has others in their places while it does so: of what is tied, or has been loaded or
        trained, nothing may change.
        """
        within = unit.module.modules() if _resets_all(unit.module) else [unit.module]
        parts = [m for m in within if _resets(m)][::-1]  # parents have the last word
        saved = [(own, dict(own)) for m in parts for own in _tensors(m)]
        pairs = [(own, k, x) for own, before in saved for k, x in before.items() if x is not None]
        fresh = {id(x): _fresh(x) for _, _, x in pairs}
        versions = {key: x._version for key, x in fresh.items()}
        self._making = type(unit.module).__name__
        try:
            for own, k, x in pairs:
                own[k] = fresh[id(x)]
            with _keyed(f"{self._seed}/{unit.path}"):
                for m in parts:
                    cast(Callable[[], Any], _resets(m))()
            made = {id(x): cast(Tensor, own[k]).detach() for own, k, x in pairs}
            left = (k for own, k, x in pairs if own[k] is fresh[id(x)] and not _is_written(
                made[id(x)], fresh[id(x)]._version > versions[id(x)]))  # fmt: skip
            for key in left:
                raise ConfigurationError(
                    f"reset_parameters of {self._making} ({unit.path}) leaves {key!r} as it was; "
                    f"{_ALLOWED}"
                )
            return made
        finally:
            self._making = ""
            for own, before in saved:
                own.clear()
                own.update(before)


@contextmanager
def lending(module: nn.Module, *, graphs_hold: bool = True) -> Iterator[None]:
    """Run the body, which runs a module; what is not made for good is there while it is called.

    Args:
        graphs_hold: whether graphs that the body makes hold it until the end.
    """
    homes = (h for h in map(home_of, module.parameters()) if isinstance(h, MetaWeights))
    home = next(homes, None)
    with nullcontext() if home is None else home.lending(graphs_hold=graphs_hold):
        yield


def _paths_above(name: str) -> Iterator[str]:
    """Iterate over the paths of the modules that hold a parameter, from the inside out."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def _resets(m: nn.Module) -> Callable[[], Any] | None:
    """Return the method by which a module initialises its own parameters, if it has one."""
    found = getattr(m, "_reset_parameters" if _resets_all(m) else "reset_parameters", None)
    return found if callable(found) else None


def _resets_all(m: nn.Module) -> bool:
    """Say whether a module of torch's initialises parameters of its children, too."""
    return isinstance(m, nn.MultiheadAttention)


def _files_of(place: Path, path: str) -> dict[str, Path]:
    """Return key -> file, of a file of safetensors or a folder of them."""
    from safetensors import safe_open  # noqa: PLC0415  (of an extra)

    files = sorted(place.glob("*.safetensors")) if place.is_dir() else [place]
    if not files or not files[0].exists():
        raise ConfigurationError(
            f"{PATH}={str(place)!r} of module {path!r} has no safetensors; allowed: a file of "
            "safetensors, or a folder of such files; write one with model.save_pretrained(folder) "
            "or safetensors.torch.save_file"
        )
    found: dict[str, Path] = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            found |= dict.fromkeys(opened.keys(), file)
    return found


def _loaded(source: _Stored, like: Tensor, name: str) -> Tensor:
    from safetensors import safe_open  # noqa: PLC0415

    with safe_open(source.file, framework="pt") as opened:
        values: Tensor = opened.get_tensor(source.key)
    if values.shape != like.shape:
        raise ConfigurationError(
            f"{name!r} has shape {tuple(like.shape)}, and {source.key!r} in {source.file} has "
            f"{tuple(values.shape)}; allowed: the same; make the module as the file's was made"
        )
    return values


def _copied(values: Tensor, like: Tensor) -> Tensor:
    """Return values in memory of their own; they may be read only now."""
    with torch.inference_mode(mode=False), torch.no_grad():
        return torch.empty(like.shape, dtype=like.dtype, device=like.device).copy_(values)


def _on_meta(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((n, p) for n, p in module.named_parameters() if p.is_meta and not is_lazy(p))


def _put_hollow(module: nn.Module, device: torch.device) -> None:
    """Let parameters of the meta device be on another one, without memory."""
    hollow: dict[int, nn.Parameter] = {}
    for _, p in _on_meta(module):
        like = torch.empty(0, dtype=p.dtype, device=device)
        hollow[id(p)] = nn.Parameter(without_memory(p, like), requires_grad=p.requires_grad)
        vars(hollow[id(p)]).update(vars(p))
    for m in module.modules():
        m._parameters.update({k: hollow.get(id(p), p) for k, p in m._parameters.items()})
        if isinstance(m, nn.RNNBase):  # it holds its weights in a list, too
            m._init_flat_weights()


def _tensors(m: nn.Module) -> Iterator[dict[str, Tensor | None]]:
    yield cast(dict[str, Tensor | None], m._parameters)
    yield m._buffers


def _fresh(x: Tensor) -> Tensor:
    """Return what takes a tensor's place, with its values if it has any."""
    if x.is_meta or is_absent(x):
        like = torch.empty(x.shape, dtype=x.dtype)
        like = like.fill_(torch.nan) if x.dtype.is_floating_point else like
    else:
        like = x.detach().clone()
    is_parameter = isinstance(x, nn.Parameter)
    return nn.Parameter(like, requires_grad=x.requires_grad) if is_parameter else like


def _is_written(x: Tensor, is_counted: bool) -> bool:
    by_data = x.is_floating_point() and not bool(x.isnan().all())  # which nobody counts
    return x.numel() == 0 or is_counted or by_data


@contextmanager
def _keyed(text: str) -> Iterator[None]:
    """Draw random numbers by a key; what is drawn behind the body is as it was."""
    key = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
    own, cpu = torch.default_generator, torch.device("cpu")
    with untouched([own]), torch.inference_mode(mode=False), torch.no_grad(), cpu:
        own.manual_seed(key)
        yield
