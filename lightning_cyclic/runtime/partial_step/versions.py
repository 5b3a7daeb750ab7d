"""The weight versions of one worker's stages, alive as long as somebody may read them.

Optimizers update the module's own parameters. Forwards read *stand-ins*: parameters that take the
places of the module's own while a forward runs, so that each graph belongs to the version that
its forward read. The stand-ins of the newest version share the memory of the module's own:

    F reads version v      stand-ins of v | own      one memory
    update to v+1          stand-ins of v   own      if anybody still has v: else in place

Autograd keeps some parameters themselves for the backward, not their memory, so nothing is
copied that no one reads. Backwards find the stand-ins of their forward in place, too, as
activation checkpointing runs parts of the forward again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn

from lightning_cyclic.plan import Plan
from lightning_cyclic.plan.actions import Action
from lightning_cyclic.runtime.predict import Foresight, overwrite
from lightning_cyclic.runtime.weight_forms import ALL, WeightForms

_Place = tuple[dict[str, nn.Parameter | None], str, nn.Parameter, nn.Parameter]
"""A module's parameters, the name of one, its stand-in and the parameter itself."""


@final
class Version(dict[str, nn.Parameter]):
    """Hold the stand-ins of one version of a stage, by name.

    Args:
        v: version; the one from which it was predicted.
    """

    __slots__ = ("__weakref__", "j", "places", "v")

    def __init__(self, j: int, v: int, parameters: Mapping[str, nn.Parameter]) -> None:
        super().__init__(parameters)
        self.j = j
        self.v = v
        self.places: list[_Place] = []  # of all parameters; flat, as runs go through it


@final
class Versions:
    """Keep the versions of stages.

    Args:
        stages: stage -> name -> trained parameter, of the stages that this worker has.
        readers: stage -> the stages that read its parameters, itself among them.
    """

    def __init__(
        self,
        module: nn.Module,
        plan: Plan,
        stages: Mapping[int, Mapping[str, nn.Parameter]],
        newest: int,
        readers: Mapping[int, Sequence[int]],
        foresight: Foresight | None = None,
        forms: WeightForms = ALL,
    ) -> None:
        self._plan = plan
        self._forms = forms
        self._take(stages)
        self._readers = readers
        self._places = _places_of(module)
        self._rnns = {
            k: rnns
            for k, places in self._places.items()
            if (rnns := [x for x in places if isinstance(x[0], nn.RNNBase)])
        }
        self._newest = dict.fromkeys(stages, newest)
        self._kept: dict[int, dict[int, Version]] = {j: {} for j in stages}
        self._alive = {j: weakref.WeakValueDictionary[int, Version]() for j in stages}
        self._foresight = foresight
        self._overwritten: dict[int, Version] = {}  # stage -> what all its graphs hold
        # stage -> its last micro-batch, counted from the first step on
        self._last = dict.fromkeys(
            range(plan.num_stages), newest * plan.num_microbatches - plan.replicas
        )

    def _take(self, stages: Mapping[int, Mapping[str, nn.Parameter]]) -> None:
        self._stages = stages
        self._own = {n: p for stage in stages.values() for n, p in stage.items()}

    def train_others(self, stages: Mapping[int, Mapping[str, nn.Parameter]]) -> None:
        """Keep versions of other parameters from now on, behind a flush: no graph is alive."""
        self._take(stages)
        for j, kept in self._kept.items():
            for v, version in kept.items():  # what was frozen has its value in every version
                made = {n: self._like(p, version.get(n, p)) for n, p in stages[j].items()}
                kept[v] = Version(j, v, made)
            self._alive[j] = weakref.WeakValueDictionary(kept)
        self._overwritten.clear()
        if self._foresight is not None:
            self._foresight.train_others(stages)

    def restart(self) -> None:
        """Take the parameters as they are now for every version: they were loaded, behind a flush.

        The rule goes on from them as it does from the first weights of all.
        """
        for j in self._stages:
            self._kept[j].clear()
            self._alive[j].clear()
        self._overwritten.clear()
        if self._foresight is not None:
            self._foresight.restart()
        self.put_previous({"versions": {}, "owed": {}})

    @property
    def overwrites(self) -> bool:
        """Say whether guesses for forwards are written over the ones before."""
        return self._foresight is not None

    def newest(self, j: int) -> int:
        return self._newest[j]

    @contextmanager
    def shown(self, a: Action, stages: Sequence[int]) -> Iterator[tuple[Version, ...]]:
        """Let stages have the versions that a forward reads, while the body runs.

        Yields:
            The versions; graphs that are made in the body need them until their backward.
        """
        assert a.i is not None
        self._last[a.j] = a.t * self._plan.num_microbatches + a.i
        if self._foresight is not None and self._foresight.looks_ahead(a):
            versions: tuple[Version, ...] = (self._predicted(a),)
        else:
            reads = {j: self._plan.reads(a.t, a.i, j) for j in stages if j in self._stages}
            versions = tuple(self._version(j, v) for j, v in reads.items())
        with self._in_place(versions):
            yield versions

    @contextmanager
    def shown_again(
        self, a: Action, versions: tuple[Version, ...]
    ) -> Iterator[tuple[Version, ...]]:
        """Let stages have what a backward reads, before which they are run again."""
        if self._foresight is not None:
            newest = self._newest[a.j]
            if self._plan.backward_horizon(a.j) > 0:
                versions = (self._made(a.j, self._foresight.backward(a.j, newest)),)
            else:
                versions = (self._version(a.j, newest),)
        with self._in_place(versions):
            yield versions

    @contextmanager
    def backward(self, versions: Sequence[Version]) -> Iterator[None]:
        """Let the gradients that the body gives stand-ins go to the module's own parameters."""
        for version in versions:
            if version is self._overwritten.get(version.j):
                assert self._foresight is not None
                overwrite(version, self._foresight.backward(version.j, self._newest[version.j]))
        pairs = [(self._own[n], q) for version in versions for n, q in version.items()]
        for p, q in pairs:
            q.grad, p.grad = p.grad, None
            _share_hooks(p, q)
        try:
            with self._in_place(versions):
                yield
        finally:
            for p, q in pairs:
                p.grad, q.grad = q.grad, None

    def reserve(self, a: Action) -> None:
        """Predict for a forward that is put off by a flush, before the next update."""
        if self._foresight is not None:
            self._foresight.reserve(a, self._newest[a.j])

    def begin_update(self, j: int) -> None:
        """Make room for the next version of a stage: its parameters are about to be changed."""
        newest, needed = self._newest[j], self._next_read(j)
        if needed <= newest:
            self._kept[j][newest] = self._version(j, newest)
        for v in [v for v in self._kept[j] if v < needed]:
            del self._kept[j][v]
        if newest in self._alive[j]:
            for p in self._stages[j].values():
                p.data = p.data.clone()
        self._newest[j] += 1

    def previous(self) -> dict[str, Any]:
        """Return what later forwards read beside the newest version, in plain types."""
        found: dict[str, dict[int, Tensor]] = {}
        for j, kept in self._kept.items():
            for v in (v for v in sorted(kept) if self._next_read(j) <= v):
                for n, q in kept[v].items():
                    found.setdefault(n, {})[v] = q.detach().clone()
        return {"versions": found, "owed": self._foresight.owed() if self._foresight else {}}

    def put_previous(self, previous: Mapping[str, Any]) -> None:
        """Take from a checkpoint what :meth:`previous` returned, of all workers together."""
        values = previous["versions"]
        for j, stage in self._stages.items():
            have = [set(values[n]) for n in stage if n in values]  # tied ones may have more
            alive = set(range(self._next_read(j), self._newest[j])) if not have else set()
            # what was frozen when it was saved had one value
            for v in sorted(set.intersection(*have) if have else alive):
                made = {n: self._like(p, values.get(n, {}).get(v, p)) for n, p in stage.items()}
                self._kept[j][v] = self._alive[j][v] = Version(j, v, made)
        if self._foresight is not None:
            self._foresight.put_owed(previous["owed"])

    # ------------------------------------------------------------------ finding and showing

    def _version(self, j: int, v: int) -> Version:
        version = self._alive[j].get(v)
        if version is None:
            assert v == self._newest[j], f"version {v} of stage {j} is gone"
            version = Version(j, v, {n: self._alias(p) for n, p in self._stages[j].items()})
            self._alive[j][v] = version
        return version

    def _predicted(self, a: Action) -> Version:
        assert self._foresight is not None
        values = self._foresight.forward(a, self._newest[a.j])
        version = self._overwritten.get(a.j)
        if version is None:
            version = self._overwritten[a.j] = self._made(a.j, values)
        else:
            overwrite(version, values)
        return version

    def _made(self, j: int, values: Mapping[str, Tensor]) -> Version:
        made = {n: self._like(p, values[n]) for n, p in self._stages[j].items()}
        return Version(j, self._newest[j], made)

    def _alias(self, p: nn.Parameter) -> nn.Parameter:
        """Return a parameter over the same memory, whose changes are counted apart."""
        return self._forms.stand_in(p, nn.Parameter(p.data, requires_grad=p.requires_grad))

    def _like(self, p: nn.Parameter, values: Tensor) -> nn.Parameter:
        made = torch.empty_like(p, requires_grad=False)
        made.copy_(values)
        return self._forms.stand_in(p, nn.Parameter(made, requires_grad=p.requires_grad))

    def _next_read(self, j: int) -> int:
        """Return the oldest version of stage ``j`` that later forwards read."""
        replicas, num_microbatches = self._plan.replicas, self._plan.num_microbatches
        nexts = [
            divmod(self._last[user] + replicas, num_microbatches) for user in self._readers[j]
        ]
        return min(self._plan.reads(t, i, j) for t, i in nexts)

    @contextmanager
    def _in_place(self, versions: Sequence[Version]) -> Iterator[None]:
        places = [place for version in versions for place in self._places_of(version)]
        for parameters, name, q, _ in places:
            parameters[name] = q
        self._put_in_rnns(versions, lambda q, _: q)
        try:
            yield
        finally:
            for parameters, name, _, p in places:
                parameters[name] = p
            self._put_in_rnns(versions, lambda _, p: p)

    def _places_of(self, version: Version) -> list[_Place]:
        if not version.places:
            version.places = [
                (owner._parameters, name, q, p)
                for p, q in ((self._own[n], q) for n, q in version.items())
                for owner, name in self._places[id(p)]
            ]
        return version.places

    def _put_in_rnns(self, versions: Sequence[Version], chosen: Callable[..., Any]) -> None:
        """Put parameters where recurrent modules keep their weights beside: in a list."""
        for version in versions if self._rnns else ():
            for n, q in version.items():
                p = self._own[n]
                for owner, name in self._rnns.get(id(p), ()):
                    setattr(owner, name, chosen(q, p))


def _share_hooks(p: Any, q: Any) -> None:
    """Let the hooks of a parameter see the gradients that its stand-in gets."""
    if p._backward_hooks is not None and q._backward_hooks is not p._backward_hooks:
        q._backward_hooks = p._backward_hooks
    if p._post_accumulate_grad_hooks is not None and q._post_accumulate_grad_hooks is None:
        q._post_accumulate_grad_hooks = p._post_accumulate_grad_hooks


def _places_of(module: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """List where each parameter sits: tied ones in several modules."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for m in module.modules():
        for name, p in m._parameters.items():
            if p is not None:
                places.setdefault(id(p), []).append((m, name))
    return places
