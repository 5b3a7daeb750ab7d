"""Randomness: keyed by place, alike on all workers, and every function that draws is known."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_cyclic.runtime.partial_step.tape import DRAWS_PLAINLY, names
from lightning_cyclic.runtime.randomness import Randomness, undisturbed
from lightning_cyclic.runtime.torch_functions import DRAWS, is_random
from tests.runtime.partial_step.hand import CPU, router_of, run_stages


def draws():
    """Draw from all generators."""
    return torch.rand(3).tolist(), random.random(), np.random.rand(3).tolist()


def stream(j=0, seed=1, t=2, i=3):
    Randomness(seed, t, i, CPU).begin_stage(j)
    return torch.rand(4).tolist()


def test_a_stream_depends_on_seed_step_micro_batch_and_stage_alone():
    first = stream()
    torch.rand(7)
    assert stream() == first
    others = [stream(1), stream(seed=2), stream(t=3), stream(i=4), stream(seed=12, t=3)]
    assert len(set(map(tuple, [first, *others]))) == 1 + len(others)


def test_neighbouring_numbers_make_other_keys():
    made = {tuple(stream(j, 1, t, i)) for j in (1, 11) for t in (1, 11) for i in (1, 11)}
    assert len(made) == 8


def test_the_region_leaves_torchs_stream_alone_and_the_stage_the_others():
    chance = Randomness(0, 0, 0, CPU)
    chance.begin_stage(0)
    state = torch.get_rng_state()
    chance.begin_region(1)
    assert torch.equal(torch.get_rng_state(), state)
    python, numpy = random.getstate(), np.random.get_state()[1].tolist()
    chance.begin_stage(1)
    assert random.getstate() == python
    assert np.random.get_state()[1].tolist() == numpy


@pytest.mark.parametrize("draw", [random.random, lambda: random.gauss(0, 1), np.random.rand])
def test_a_region_in_which_python_or_numpy_draw_is_noticed(draw):
    made = Randomness(0, 0, 0, CPU)
    made.begin_region(1)
    torch.rand(1)
    assert not made.has_drawn_plainly(likely=True)
    made.begin_region(1)
    draw()
    assert made.has_drawn_plainly(likely=False)


@pytest.mark.parametrize("likely", [False, True])
def test_where_others_have_seeded_meanwhile_it_is_what_it_was(likely):
    made, other = Randomness(0, 0, 0, CPU), Randomness(0, 0, 1, CPU)
    made.begin_region(0)
    other.begin_region(0)
    assert made.has_drawn_plainly(likely=likely) is likely
    assert not other.has_drawn_plainly(likely=True)
    assert other.has_drawn_plainly(likely=likely) is likely  # it has drawn itself, to see


@pytest.mark.parametrize("likely", [False, True])
def test_where_others_have_restored_what_was_it_is_what_it_was(likely):
    made, other = Randomness(0, 0, 0, CPU), undisturbed(CPU)
    with other:  # of a worker in another thread, which ends first
        made.begin_region(0)
    assert made.has_drawn_plainly(likely=likely) is likely


def test_draws_of_glue_are_keyed_by_their_number_and_leave_the_stream_alone():
    def glue(skip=0, before=0, t=0):
        chance = Randomness(0, t, 0, CPU)
        for _ in range(skip):
            chance.skip_glue()
        torch.rand(before)
        drawn = []
        for _ in range(3 - skip):
            state = torch.get_rng_state()
            with chance.of_glue():
                drawn.append(torch.rand(2).tolist())
            assert torch.equal(torch.get_rng_state(), state)
        return drawn

    whole = glue()
    assert len(set(map(tuple, whole))) == 3
    assert glue(skip=1, before=5) == whole[1:]
    assert glue(skip=2) == whole[2:]
    assert glue(t=1) != whole


def test_a_draw_that_fails_leaves_the_stream_alone_and_counts():
    chance, other = Randomness(0, 0, 0, CPU), Randomness(0, 0, 0, CPU)
    state = torch.get_rng_state()
    with pytest.raises(KeyError), chance.of_glue():  # noqa: PT012
        torch.rand(1)
        raise KeyError
    assert torch.equal(torch.get_rng_state(), state)
    other.skip_glue()
    made = []
    for c in (chance, other):
        with c.of_glue():
            made.append(float(torch.rand(())))
    assert made[0] == made[1]


def test_nothing_is_disturbed():
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    expected = draws()
    for error in (False, True):
        torch.manual_seed(0), random.seed(0), np.random.seed(0)
        with pytest.raises(KeyError) if error else nullcontext(), undisturbed(CPU):
            draws()
            Randomness(5, 0, 0, CPU).begin_region(3)
            Randomness(5, 0, 0, CPU).begin_stage(3)
            if error:
                raise KeyError
        assert draws() == expected


class Drawing(nn.Module):
    """Units that draw, and glue that draws: on ghosts, on the batch, and out of nothing."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (
            nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)) for _ in range(3)
        )
        self.seen = []

    def forward(self, x):
        h = self.a(x)
        self.note("after a", x)
        h = F.dropout(h, 0.5)
        h = self.b(h + torch.rand_like(h))
        self.note("after b", x)
        h = self.c(F.dropout(x, 0.5) + h * random.random())
        return h.sum()

    def note(self, where, x):
        drawn = (*draws(), torch.randn(2), F.dropout(x, 0.5), torch.empty(2).uniform_())
        self.seen.append((where, str(drawn)))


def test_glue_draws_alike_in_all_stages():
    model = Drawing()
    x, by_cuts = torch.ones(2, 4), []
    for starts in (("b", "c"), ("c",), ()):
        model.seen.clear()
        run_stages(router_of(model, *starts), lambda: model(x.clone()))
        by_cuts.append(sorted(set(model.seen)))
    assert len(by_cuts[0]) == 2  # one for each place, whichever stage noted it
    for drawn in by_cuts[0]:
        assert drawn in by_cuts[1] or "after b" in drawn[0]


def test_only_regions_that_draw_plainly_are_seeded_when_they_are_replayed(monkeypatch):
    class Sometimes(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))

        def forward(self, x):
            h = self.b(self.a(x))
            return self.c(h * random.random()).sum()

    seeded, begin = [], Randomness.begin_region
    monkeypatch.setattr(
        Randomness, "begin_region", lambda self, j: (seeded.append(j), begin(self, j))
    )
    model, x = Sometimes(), torch.ones(2, 4)
    runs, _ = run_stages(router_of(model, "b", "c"), lambda: model(x))
    assert seeded == [0, 1, 1, 2]  # for stage 0; for 1; for 2, before which 1 has drawn
    assert [run.record.tape[-1:] == [DRAWS_PLAINLY] for run in runs] == [False, True, False]
    assert DRAWS_PLAINLY.name not in names(tuple(runs[1].record.tape))  # the same path


# ---------------------------------------------------------------------- all that draw

KERNELS = {
    "_cudnn_attention_forward", "_cudnn_init_dropout_state", "_cudnn_rnn",
    "_efficient_attention_forward", "_fill_mem_eff_dropout_mask_", "_flash_attention_forward",
    "_flash_attention_forward_no_dropout_inplace", "_fused_dropout", "_fused_sdp_choice",
    "_lstm_mps", "_scaled_dot_product_attention_math",
    "_scaled_dot_product_attention_math_for_mps", "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_fused_attention_overrideable", "_triton_scaled_dot_attention",
    "miopen_rnn",
}  # fmt: skip  # behind functions that are known: attention, dropout and recurrent layers
NO_DRAWS = {"_nested_tensor_softmax_with_shape"}  # tagged, but it draws nothing


def tagged():
    """List the operations that PyTorch says draw random numbers."""
    schemas = torch._C._jit_get_all_schemas()
    every = {s.name.removeprefix("aten::") for s in schemas if s.name.startswith("aten::")}
    found = set()
    for name in every:
        packet = getattr(torch.ops.aten, name, None)
        for overload in packet.overloads() if packet else ():
            if torch.Tag.nondeterministic_seeded in getattr(packet, overload).tags:
                found.add(name)
    return found


def has_a_function(name, *more):
    places = (torch, torch.Tensor, F, torch._VF, *more)
    return any(callable(getattr(place, name, None)) for place in places)


def test_every_operation_that_draws_and_has_a_function_is_known():
    found = tagged()
    assert {"rand", "dropout", "multinomial", "random_"} < found
    assert {n for n in found - DRAWS - KERNELS - NO_DRAWS if has_a_function(n)} == set()


@pytest.mark.skipif(
    not hasattr(torch.ops.aten, "_cudnn_attention_forward"), reason="this torch has fewer of them"
)
def test_the_exceptions_are_still_needed():
    assert tagged() >= KERNELS | NO_DRAWS
    assert DRAWS.isdisjoint(KERNELS | NO_DRAWS)


def test_every_name_is_that_of_a_function():
    assert {name for name in DRAWS if not has_a_function(name, nn.init)} == set()


M = torch.rand(6, 5)
COMPOSITE = {
    "svd_lowrank": lambda: torch.svd_lowrank(M, 2),
    "pca_lowrank": lambda: torch.pca_lowrank(M, 2),
    "lobpcg": lambda: torch.lobpcg(torch.eye(9) + 1, 2),
    "gumbel_softmax": lambda: F.gumbel_softmax(M),
    "dropout": lambda: F.dropout(M),
    "dropout2d": lambda: F.dropout2d(M[None, None]),
    "feature_alpha_dropout": lambda: F.feature_alpha_dropout(M[None, None], training=True),
    "rrelu": lambda: F.rrelu(M - 1, training=True),
    "fractional_max_pool2d": lambda: F.fractional_max_pool2d(M[None, None], 2, 3),
    "fractional_max_pool2d with indices": lambda: F.fractional_max_pool2d(
        M[None, None], 2, 3, return_indices=True
    ),
    "fractional_max_pool3d": lambda: F.fractional_max_pool3d(torch.rand(1, 1, 5, 5, 5), 2, 3),
    "attention": lambda: F.scaled_dot_product_attention(M[None], M[None], M[None], dropout_p=0.5),
    "normal": lambda: torch.normal(M, 1.0),
    "bernoulli": M.bernoulli,
    "multinomial": lambda: M.multinomial(1),
    "poisson": lambda: torch.poisson(M),
    "binomial": lambda: torch.binomial(M * 0 + 9, M),
    "init.normal_": lambda: nn.init.normal_(M.clone()),
    "init.uniform_": lambda: nn.init.uniform_(M.clone()),
    "init.trunc_normal_": lambda: nn.init.trunc_normal_(M.clone()),
    "init.kaiming_uniform_": lambda: nn.init.kaiming_uniform_(M.clone()),
    "init.orthogonal_": lambda: nn.init.orthogonal_(M.clone()),
    "init.sparse_": lambda: nn.init.sparse_(M.clone(), 0.3),
    "Normal": lambda: torch.distributions.Normal(M, 1.0).rsample(),
    "Categorical": lambda: torch.distributions.Categorical(M).sample(),
    "Gamma": lambda: torch.distributions.Gamma(M, 1.0).rsample(),
    "Dirichlet": lambda: torch.distributions.Dirichlet(M).rsample(),
    "Beta": lambda: torch.distributions.Beta(M + 1, M + 1).rsample(),
    "Bernoulli": lambda: torch.distributions.Bernoulli(M).sample(),
    "Poisson": lambda: torch.distributions.Poisson(M).sample(),
    "Geometric": lambda: torch.distributions.Geometric(M / 2 + 0.1).sample(),
    "VonMises": lambda: torch.distributions.VonMises(M, 1.0).sample(),
    "LowRank": lambda: torch.distributions.LowRankMultivariateNormal(
        M[0], M[:5, :1], M[0] + 1
    ).rsample(),
}


class _Unseen(torch.overrides.TorchFunctionMode):
    """Find functions that move the generator and are not known to."""

    def __init__(self):
        super().__init__()
        self.drew, self.unknown = False, set()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        before = torch.get_rng_state()
        result = func(*args, **(kwargs or {}))
        if not torch.equal(torch.get_rng_state(), before):
            self.drew = True
            if not is_random(func):
                self.unknown.add(func.__name__)
        return result


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", COMPOSITE)
def test_functions_that_draw_are_seen_and_known(name: str):
    before = torch.get_rng_state()
    with _Unseen() as mode:
        COMPOSITE[name]()
    assert not torch.equal(torch.get_rng_state(), before), "it draws nothing"
    assert mode.unknown == set()
    assert mode.drew, "it draws where no function is seen"


# ---------------------------------------------------------------------- who has drawn


@pytest.fixture
def _as_before() -> Iterator[None]:
    python, numpy, bits = random.getstate(), np.random.get_state(), np.random.get_bit_generator()
    yield
    random.setstate(python)
    np.random.set_bit_generator(bits)
    np.random.set_state(numpy)


def nothing() -> None:
    pass


def python(count: int) -> Callable[[], Any]:
    return lambda: [random.getrandbits(32) for _ in range(count)]


def of_numpy(count: int) -> Callable[[], Any]:
    return lambda: np.random.bytes(4 * count)


def replaced() -> None:
    np.random.set_bit_generator(np.random.MT19937(7))


def seeded_and_restored() -> None:
    before, of_numpy = random.getstate(), np.random.get_state()
    random.seed(3), np.random.seed(3), random.random(), np.random.rand()
    random.setstate(before), np.random.set_state(of_numpy)


DRAWING = {
    "nothing": (nothing, False),
    "restored": (seeded_and_restored, False),
    "python, one": (python(1), True),
    "python, a whole turn": (python(624), True),
    "python, two turns": (python(1248), True),
    "python, seeded": (lambda: random.seed(3), True),
    "numpy, one": (of_numpy(1), True),
    "numpy, a whole turn": (of_numpy(624), True),
    "numpy, seeded": (lambda: np.random.seed(3), True),
    "numpy, normal": (np.random.standard_normal, True),
    "numpy, another generator": (replaced, True),
}


@pytest.mark.usefixtures("_as_before")
@pytest.mark.parametrize(("code", "has_drawn"), DRAWING.values(), ids=DRAWING)
def test_it_is_seen_whether_anything_has_drawn(code: Callable[[], Any], has_drawn: bool) -> None:
    made = Randomness(0, 0, 0, CPU)
    for _ in range(2):  # behind another generator, too
        made.begin_region(1)
        code()
        assert made.has_drawn_plainly(likely=not has_drawn) is has_drawn
