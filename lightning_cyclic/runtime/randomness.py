"""Randomness keyed by seed, step, micro-batch and stage, so that it does not depend on placement.

A stage draws from a stream of its own. Code between units is run by several workers; what it
draws is keyed by its place, so that all of them draw the same.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

import torch

DRAWS = frozenset(
    {"rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "normal"}
    | {"bernoulli", "multinomial", "poisson", "binomial", "dropout", "rrelu", "bernoulli_"}
    | {"normal_", "uniform_", "exponential_", "geometric_", "log_normal_", "cauchy_", "random_"}
    | {"dropout_", "alpha_dropout", "alpha_dropout_", "feature_dropout", "feature_dropout_"}
    | {"feature_alpha_dropout", "feature_alpha_dropout_", "dropout1d", "dropout2d", "dropout3d"}
    | {"gumbel_softmax", "fractional_max_pool2d", "fractional_max_pool3d", "native_dropout"}
    | {"fractional_max_pool2d_with_indices", "fractional_max_pool3d_with_indices"}
    | {"scaled_dot_product_attention", "multi_head_attention_forward", "rrelu_"}
    | {"_sample_dirichlet", "_standard_gamma", "lstm", "gru", "rnn_tanh", "rnn_relu"}
    | {"kaiming_uniform_", "kaiming_normal_", "xavier_uniform_", "xavier_normal_", "trunc_normal_"}
)
"""Names of torch functions that may draw random numbers."""


def is_random(func: Any) -> bool:
    """Say whether a torch function may draw random numbers."""
    return func.__name__ in DRAWS


@final
class Randomness:
    """Seed what one micro-batch of one step draws.

    Args:
        seed: of the run.
        t: training step.
        i: micro-batch.
        device: of this worker.
    """

    def __init__(self, seed: int, t: int, i: int, device: torch.device) -> None:
        self._key = f"{seed},{t},{i}"
        self._on_cuda = device.type == "cuda"
        self._device = device
        self._draws = 0

    def begin_stage(self, j: int) -> None:
        """Begin the stream of stage ``j``."""
        self._seed(f"stage {j}")

    def begin_region(self, j: int) -> None:
        """Begin what Python's and numpy's own generators draw in the code of stage ``j``.

        That code is run by the workers of later stages, too, who are to draw the same.
        """
        value = self._value(f"region {j}")
        random.seed(value)
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed(value % 2**32)

    @contextmanager
    def of_glue(self) -> Iterator[None]:
        """Run the body with randomness keyed by its place among the draws between units."""
        state = torch.get_rng_state()
        on_device = torch.cuda.get_rng_state(self._device) if self._on_cuda else None
        self._seed(f"draw {self._draws}")
        self._draws += 1
        try:
            yield
        finally:
            torch.set_rng_state(state)
            if on_device is not None:
                torch.cuda.set_rng_state(on_device, self._device)

    def skip_glue(self) -> None:
        """Count a draw that another worker makes."""
        self._draws += 1

    def _seed(self, what: str) -> None:
        value = self._value(what)
        torch.default_generator.manual_seed(value)
        if self._on_cuda:
            torch.cuda.manual_seed(value)

    def _value(self, what: str) -> int:
        digest = hashlib.blake2b(f"{self._key},{what}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") >> 1  # torch takes signed 64-bit seeds


@contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Run the body; leave all generators of random numbers behind it as they were."""
    state, python_state = torch.get_rng_state(), random.getstate()
    numpy = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy else None
    on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        yield
    finally:
        torch.set_rng_state(state)
        random.setstate(python_state)
        if numpy:
            numpy.random.set_state(numpy_state)
        if on_device is not None:
            torch.cuda.set_rng_state(on_device, device)
