"""Backwards in two halves: first the gradient of what entered a stage, later that of its weights.

    F   y = linear(x, weight)     is made apart, from a stand-in of x; outside there is a copy of y
    I   the gradient of y comes   goes on to x alone, and is kept with y: a *piece*
    W   all pieces of a stage     one backward, from their ys to their weights alone

So each half runs the very kernels that one backward would, on the same values, and gradients of a
weight that is used several times are added in the same order: pieces keep the order of the
forward. Between I and W a piece keeps x and the gradient of y, and nothing else of the graph is
kept. Linear layers, convolutions and embeddings have almost all weights; of everything else (and
of what is used in another way besides) gradients are made at I, as in a whole backward. So are
those of regions in which autograd is led by others: compiled blocks, torch.utils.checkpoint.
Which weights these are, the first micro-batch of a kind shows, of which nothing is put off.

Source: Qi et al., "Zero Bubble Pipeline Parallelism", section 2, https://arxiv.org/abs/2401.10241.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, Final, NoReturn, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge
from torch.nn import functional

from lightning_cyclic.errors import StepError
from lightning_cyclic.runtime.bits import Mark
from lightning_cyclic.runtime.torch_functions import is_transformed, num_modes, saving_hooks

# what has the weights of almost all modules, wherever it is called from
_SPLIT: Final[tuple[tuple[Any, str], ...]] = (
    *((functional, f"conv{kind}{n}d") for kind in ("", "_transpose") for n in (1, 2, 3)),
    (functional, "linear"), (functional, "embedding"), (torch, "addmm"), (torch, "matmul"),
)  # fmt: skip


@final
class Weights:
    """Know of one stage the weights whose gradients are put off."""

    def __init__(self) -> None:
        self._kinds: set[str] = set()  # of micro-batches, whose graphs have been looked at
        self._allowed: dict[int, Tensor] = {}
        self._others: dict[int, Tensor] = {}  # that are used in another way, too
        self._put_off: set[int] = set()

    def are_known(self, kind: str) -> bool:
        return kind in self._kinds

    def __contains__(self, p: Tensor) -> bool:
        return id(p) in self._allowed

    def note(self, kind: str, pure: Mapping[int, Tensor], others: Mapping[int, Tensor]) -> None:
        """Note the weights that pieces alone use in micro-batches of a kind, and all others.

        Raises:
            StepError: gradients of one of the others have been put off.
        """
        self._kinds.add(kind)
        self._others.update(others)
        for n, p in others.items():
            if n in self._put_off:
                _refuse_other_use(p)
            self._allowed.pop(n, None)
        self._allowed.update({n: p for n, p in pure.items() if n not in self._others})

    def look_again(self, kind: str, weights: Iterable[Tensor]) -> None:
        """Let the next micro-batch show more, if weights are new: unfrozen, or of another task."""
        if any(id(p) not in self._allowed and id(p) not in self._others for p in weights):
            self._kinds.discard(kind)

    def put_off(self, weights: Iterable[Tensor]) -> None:
        self._put_off |= {id(p) for p in weights}


@final
class Pieces:
    """Hold what one forward of a stage leaves for its W.

    Args:
        weights: of the stage.
        kind: of the micro-batch, whatever its sizes; of the first of a kind nothing is put off.
    """

    def __init__(self, weights: Weights, kind: str = "") -> None:
        self.put_off: list[nn.Parameter] = []  # weights, by I
        self.looks = not weights.are_known(kind)
        self.runs_first_half = False
        self._weights = weights
        self._kind = kind
        self._used: Counter[int] = Counter()  # how often, in calls that can be pieces
        self._named: dict[int, nn.Parameter] = {}
        self._outputs: list[GradientEdge] = []  # and not what they are, which nobody needs
        self._gradients: list[Tensor] = []
        self._thread = threading.get_ident()
        self._hooks: Any = None

    @contextmanager
    def cut_out(self) -> Iterator[None]:
        """Let calls in the body be pieces, where they can be."""
        global _pieces  # noqa: PLW0603  (functions of torch are looked up by name, on any path)
        self._hooks = saving_hooks()
        before, _pieces = _pieces, self
        if before is None:
            for module, name in _SPLIT:  # as they are now: others may have changed them
                _original[name] = getattr(module, name)
                setattr(module, name, _CUT[name])
        try:
            yield
        finally:
            _pieces = before
            if before is None:
                for module, name in _SPLIT:
                    setattr(module, name, _original[name])

    def look_at(self, roots: Sequence[Any]) -> list[Tensor]:
        """Find the weights that nothing but pieces uses, in the first graph of its kind.

        Of others all gradients are made at I: autograd adds those of a weight in one order, which
        two backwards would change.

        Args:
            roots: of the graph: tensors, or edges.

        Returns:
            The weights of which nothing is put off.
        """
        todo = [root.node if isinstance(root, GradientEdge) else root.grad_fn for root in roots]
        seen, edges, found = set(), Counter[int](), dict[int, Tensor]()
        while todo:
            node = todo.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            for following, _ in node.next_functions:
                p = getattr(following, "variable", None)
                if isinstance(p, nn.Parameter):  # and not what enters the stage
                    found[id(p)] = p
                    edges[id(p)] += 1
                todo.append(following)
        pure = {n: p for n, p in self._named.items() if edges[n] <= self._used[n]}
        others = {n: p for n, p in found.items() if n not in pure}
        self._weights.note(self._kind, pure, others)
        return list(others.values())

    @contextmanager
    def first_half(self) -> Iterator[None]:
        """Let a backward in the body be I.

        Raises:
            StepError: a weight was used otherwise than in the forwards before.
        """
        self.put_off = [p for p in self._named.values() if not self.looks]
        self._weights.put_off(self.put_off)
        before = [(p, Mark.of(p.grad)) for p in self.put_off]
        self.runs_first_half = True
        try:
            yield
        finally:
            self.runs_first_half = False
        for p, grad in before:
            if not grad.is_of(p.grad):
                _refuse_other_use(p)

    def note(self, output: GradientEdge, gradient: Tensor) -> None:
        self._outputs.append(output)
        self._gradients.append(gradient)

    def second_half(self, others: Sequence[tuple[nn.Parameter, Tensor]]) -> None:
        """Run W: make what was put off, in ``p.grad``.

        Args:
            others: parameters and gradients of them that come first in the addition.
        """
        weights = {id(p): p for p in (*(p for p, _ in others), *self.put_off)}
        roots: tuple[Any, ...] = (*(get_gradient_edge(p) for p, _ in others), *self._outputs)
        gradients = (*(x for _, x in others), *self._gradients)
        if roots:
            _engine_run_backward(
                roots, gradients, False, False, tuple(weights.values()),
                allow_unreachable=True, accumulate_grad=True,
            )  # fmt: skip

    def takes(self, tensors: Sequence[Tensor]) -> bool:
        """Say whether a call on these can be a piece."""
        weights = [x for x in tensors if _is_weight(x)]
        may_be = (
            any(p.dim() > 1 for p in weights)
            and threading.get_ident() == self._thread
            and torch.is_grad_enabled()
            and not num_modes()  # nobody looks on: not between modules
            and saving_hooks() == self._hooks  # nor leads autograd
            and not is_transformed()
        )
        if may_be and not self.looks and not all(p in self._weights for p in weights):
            self._weights.look_again(self._kind, weights)
            return False
        return may_be

    def use(self, tensors: Sequence[Tensor]) -> None:
        """Note the weights of a piece."""
        for p in tensors:
            if isinstance(p, nn.Parameter) and p.requires_grad:
                self._used[id(p)] += 1
                self._named[id(p)] = p


def _refuse_other_use(p: Tensor) -> NoReturn:
    raise StepError(
        f"a weight of shape {tuple(p.shape)} was used in another way than in micro-batches before,"
        " which a split backward does not support; allowed: steps that use weights in one way; "
        "use strategy='1f1b'"
    )


def edge_of(x: Tensor) -> GradientEdge:
    """Return where the gradient of a tensor enters its graph, which lives as long as the edge."""
    node = x.grad_fn
    if node is None:
        return get_gradient_edge(x)
    # the node of a Function of the user's is the tensor's own, and torch 2.6 lets it go with it
    if isinstance(node, torch._C._FunctionBase):
        with torch.enable_grad():
            x = x.view_as(x)
        return get_gradient_edge(x)
    return GradientEdge(node, x.output_nr)


_pieces: Pieces | None = None  # of the forward that runs


def _is_weight(x: Tensor) -> bool:
    return isinstance(x, nn.Parameter) and x.requires_grad


def _cut(name: str) -> Callable[..., Any]:
    """Let a function of torch be a piece where it is called with weights."""

    @wraps(_original[name])
    def call(*args: Any, **kwargs: Any) -> Any:
        original = _original[name]
        if torch.compiler.is_compiling() or _pieces is None:
            return original(*args, **kwargs)
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        if not _pieces.takes(tensors):
            return original(*args, **kwargs)
        _pieces.use(tensors)
        if _pieces.looks:
            return original(*args, **kwargs)

        def inside(stand_in: Callable[[Any], Any]) -> Tensor:
            made: Tensor = original(
                *map(stand_in, args), **{n: stand_in(x) for n, x in kwargs.items()}
            )
            return made

        given = {id(x): x for x in tensors if not _is_weight(x) and x.requires_grad}
        # an output whose weights alone have gradients has one, too
        return _apply(_pieces, inside, *(given.values() or [_none(tensors[0])]))

    return call


def _none(like: Tensor) -> Tensor:
    return torch.empty(0, device=like.device, requires_grad=True)


_original: dict[str, Any] = {name: getattr(module, name) for module, name in _SPLIT}
# always the same, so that what torch.compile has made of their callers stays valid
_CUT = {name: _cut(name) for _, name in _SPLIT}


class _Piece(torch.autograd.Function):
    """Make an output apart from the graph; its weights' gradients can wait."""

    @staticmethod
    def forward(
        ctx: Any, pieces: Pieces, inside: Callable[[Callable[[Any], Any]], Tensor], *given: Tensor
    ) -> Tensor:
        found = {id(x): x.detach().requires_grad_() for x in given}
        with torch.enable_grad():
            output = inside(lambda x: found.get(id(x), x))
        ctx.pieces, ctx.found, ctx.output = pieces, list(found.values()), edge_of(output)
        return output.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise StepError(
                "the step makes gradients of gradients (create_graph=True), through which "
                "backwards cannot be split; allowed: schedules with whole ones; use "
                "strategy='1f1b'"
            )
        output = ctx.output
        made = torch.autograd.grad(
            output, ctx.found, gradient, retain_graph=True, allow_unused=True
        )
        if ctx.pieces.runs_first_half:  # and not a backward of the step's own
            ctx.pieces.note(output, gradient)
            ctx.found = ctx.output = None
        return None, None, *made


_apply: Callable[..., Any] = _Piece.apply
