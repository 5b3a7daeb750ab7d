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

Source: Qi et al., "Zero Bubble Pipeline Parallelism", section 2, https://arxiv.org/abs/2401.10241.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, Final, NoReturn, final

import torch
from torch import Tensor, nn
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch._C._functorch import peek_interpreter_stack
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge
from torch.nn import functional

from lightning_cyclic.errors import StepError

# what has the weights of almost all modules, wherever it is called from
_SPLIT: Final[tuple[tuple[Any, str], ...]] = (
    *((functional, f"conv{kind}{n}d") for kind in ("", "_transpose") for n in (1, 2, 3)),
    (functional, "linear"), (functional, "embedding"), (torch, "addmm"), (torch, "matmul"),
)  # fmt: skip


@final
class Whole:
    """Know of one stage the weights whose gradients cannot be put off, by identity."""

    def __init__(self) -> None:
        self.kinds: set[str] = set()  # of micro-batches, whose graphs have been looked at
        self._weights: dict[int, Tensor] = {}
        self._put_off: dict[int, Tensor] = {}

    def __contains__(self, p: Tensor) -> bool:
        return id(p) in self._weights

    def add(self, p: Tensor) -> None:
        """Note that gradients of a weight are made at I.

        Raises:
            StepError: some have been put off.
        """
        if id(p) in self._put_off:
            _refuse_other_use(p)
        self._weights[id(p)] = p

    def put_off(self, weights: Iterable[Tensor]) -> None:
        """Note that gradients of weights have been put off."""
        self._put_off |= {id(p): p for p in weights}


@final
class Pieces:
    """Hold what one forward of a stage leaves for its W.

    Args:
        whole: of the stage; others may be found with its first forward.
    """

    def __init__(self, whole: Whole) -> None:
        self.whole = whole
        self.puts_off = False  # while I runs
        self.used: dict[int, nn.Parameter] = {}  # weights in pieces
        self.weights: list[nn.Parameter] = []  # those whose gradients have been put off
        self._outputs: list[Tensor] = []
        self._gradients: list[Tensor] = []
        self._thread = threading.get_ident()
        self._hooks: Any = None

    @contextmanager
    def cut_out(self) -> Iterator[None]:
        """Let calls in the body be pieces, where they can be."""
        global _pieces  # noqa: PLW0603  (functions of torch are looked up by name, on any path)
        self._hooks = _top_saved_tensors_default_hooks(False)
        before, _pieces = _pieces, self
        for module, name in _SPLIT:
            setattr(module, name, _CUT[name])
        try:
            yield
        finally:
            _pieces = before
            if before is None:
                for module, name in _SPLIT:
                    setattr(module, name, _ORIGINAL[name])

    def look_at(self, kind: str, roots: Sequence[Any]) -> list[Tensor]:
        """Find the weights that are used in another way, too: their gradients are made at I.

        Autograd adds all gradients of a weight in one order, which two backwards would change.

        Args:
            kind: of the micro-batch; graphs of one kind are looked at once.
            roots: of the graph outside: tensors, or edges.

        Returns:
            The weights whose gradients are made at I, if this is the first graph of its kind.
        """
        found: dict[int, Tensor] = {}
        if kind in self.whole.kinds:
            return []
        self.whole.kinds.add(kind)
        todo = [root.node if isinstance(root, GradientEdge) else root.grad_fn for root in roots]
        seen = set()
        while todo:
            node = todo.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if (p := getattr(node, "variable", None)) is not None:
                found[id(p)] = p
                if id(p) in self.used:
                    self.whole.add(p)
                continue
            nexts = [edge[0] for edge in node.next_functions]
            if isinstance(node, _NODE):
                nexts = [x for x, p in zip(nexts, node.is_weight, strict=True) if not p]
            todo += nexts
        return list(found.values())

    @contextmanager
    def putting_off(self) -> Iterator[None]:
        """Let a backward in the body be I.

        Raises:
            StepError: a weight was used otherwise than in the forwards before.
        """
        self.weights = [p for p in self.used.values() if p not in self.whole]
        self.whole.put_off(self.weights)
        before = [(p, p.grad, None if p.grad is None else p.grad._version) for p in self.weights]
        self.puts_off = True
        try:
            yield
        finally:
            self.puts_off = False
        for p, grad, version in before:
            if p.grad is not grad or (grad is not None and grad._version != version):
                _refuse_other_use(p)

    def note(self, output: Tensor, gradient: Tensor) -> None:
        self._outputs.append(output)
        self._gradients.append(gradient)

    def run(self, others: Sequence[tuple[nn.Parameter, Tensor]]) -> None:
        """Make what was put off, in ``p.grad``.

        Args:
            others: parameters and gradients of them that come first in the addition.
        """
        weights = {**{id(p): p for p, _ in others}, **{id(p): p for p in self.weights}}
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
        return (
            any(p.dim() > 1 for p in weights)
            and not any(p in self.whole or _has_hooks(p) for p in weights)
            and threading.get_ident() == self._thread
            and torch.is_grad_enabled()
            and not torch._C._len_torch_function_stack()  # nobody looks on: not between modules
            and _top_saved_tensors_default_hooks(False) == self._hooks  # nor leads autograd
            and peek_interpreter_stack() is None
        )


def _refuse_other_use(p: Tensor) -> NoReturn:
    raise StepError(
        f"a weight of shape {tuple(p.shape)} was used in another way than in micro-batches before,"
        " which a split backward does not support; allowed: steps that use weights in one way; "
        "use strategy='1f1b'"
    )


_pieces: Pieces | None = None  # of the forward that runs


def _has_hooks(p: Any) -> bool:
    """Say whether somebody looks at the gradients of a weight, who would be shown I's, too."""
    return bool(p._backward_hooks or p._post_accumulate_grad_hooks)


def _is_weight(x: Tensor) -> bool:
    return isinstance(x, nn.Parameter) and x.requires_grad


def _cut(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function of torch be a piece where it is called with weights."""

    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or _pieces is None:
            return original(*args, **kwargs)
        names = [n for n, x in enumerate(args) if isinstance(x, Tensor)]
        words = [n for n, x in kwargs.items() if isinstance(x, Tensor)]
        tensors = [*(args[n] for n in names), *(kwargs[n] for n in words)]
        if not _pieces.takes(tensors) or kwargs.get("sparse") or kwargs.get("out") is not None:
            return original(*args, **kwargs)

        def inside(found: Sequence[Tensor]) -> Tensor:
            given, more = list(args), dict(kwargs)
            for n, x in zip(names, found, strict=False):
                given[n] = x
            more |= zip(words, found[len(names) :], strict=True)
            made: Tensor = original(*given, **more)
            return made

        return _apply(_pieces, inside, *tensors)

    return call


_ORIGINAL = {name: getattr(module, name) for module, name in _SPLIT}
_CUT = {name: _cut(original) for name, original in _ORIGINAL.items()}


class _Piece(torch.autograd.Function):
    """Make an output apart from the graph, and its weights' gradient when it is asked for."""

    @staticmethod
    def forward(
        ctx: Any, pieces: Pieces, inside: Callable[[Sequence[Tensor]], Tensor], *tensors: Tensor
    ) -> Tensor:
        with torch.enable_grad():
            found = [
                x if _is_weight(x) else x.detach().requires_grad_(x.requires_grad) for x in tensors
            ]
            output = inside(found)
        ctx.pieces, ctx.found, ctx.output = pieces, found, output
        ctx.is_weight = [_is_weight(x) for x in tensors]
        pieces.used |= {id(p): p for p in found if isinstance(p, nn.Parameter)}
        return output.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        pieces, found, output = ctx.pieces, ctx.found, ctx.output
        if torch.is_grad_enabled():
            raise StepError(
                "the step makes gradients of gradients (create_graph=True), through which "
                "backwards cannot be split; allowed: schedules with whole ones; use "
                "strategy='1f1b'"
            )
        put_off = [
            pieces.puts_off and p and x not in pieces.whole
            for x, p in zip(found, ctx.is_weight, strict=True)
        ]
        wanted = [n for n, x in enumerate(found) if x.requires_grad and not put_off[n]]
        made: list[Tensor | None] = [None] * len(found)
        if wanted:
            grads = torch.autograd.grad(
                output, [found[n] for n in wanted], gradient, retain_graph=any(put_off)
            )
            for n, grad in zip(wanted, grads, strict=True):
                made[n] = grad
        if any(put_off):
            pieces.note(output, gradient)
        ctx.found = ctx.output = None
        return None, None, *made


_apply: Callable[..., Any] = _Piece.apply
_NODE: Any = _Piece._backward_cls
