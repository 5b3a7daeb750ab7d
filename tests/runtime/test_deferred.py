"""Deferred tensors: each parameter made by itself has the bits that it has in the whole."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from lightning_cyclic.runtime.absent import is_absent, make_present
from lightning_cyclic.runtime.deferred import Deferral
from lightning_cyclic.runtime.lending import lending

SMALL: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
    "vocab_size": 100,
}  # fmt: skip


class Everything(nn.Module):
    """Is initialised in every way: by value, by rejection, by reads, in views, twice, tied."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        nn.init.orthogonal_(self.linear.weight)
        nn.init.trunc_normal_(self.linear.bias)
        self.embedding = nn.Embedding(5, 4, padding_idx=1)
        self.lstm = nn.LSTM(4, 4, 2)
        self.norm = nn.BatchNorm1d(4)
        self.attention = nn.MultiheadAttention(4, 2)
        self.product = nn.Parameter(torch.randn(3, 3) @ torch.eye(3))
        self.sparse = nn.Parameter(nn.init.sparse_(torch.empty(4, 4), 0.5))
        self.scale = float(self.linear.weight.detach().norm())
        self.tied = nn.Linear(4, 5, bias=False)
        self.tied.weight = self.embedding.weight
        self.register_buffer("places", torch.arange(4).float() * self.scale)
        self.given = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.mask = nn.Parameter(torch.bernoulli(torch.full((4,), 0.5)))
        self.turned = nn.Parameter(torch.empty(6, 5).t().normal_())
        with torch.no_grad():
            self.linear.weight[0] = self.product.sum()
            self.linear.weight.copy_(self.linear.weight.T.clone())
            self.turned[:, 2].uniform_(-1, 1)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
        self.frozen = nn.Parameter(torch.rand(2), requires_grad=False)


class Odd(nn.Module):
    """Is made in ways that need care: copied, converted, set, read, seen by a graph."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.orthogonal = nn.utils.parametrizations.orthogonal(nn.Linear(4, 4))
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.doubled = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).double()
        self.set = nn.Linear(3, 3)
        self.set.weight.data = torch.randn(3, 3)
        self.filled = nn.Linear(3, 3)
        self.filled.load_state_dict({n: x + 1 for n, x in self.filled.state_dict().items()})
        self.array = nn.Parameter(torch.from_numpy(torch.rand(3).numpy()))
        self.used = nn.Linear(3, 3)
        self.used(torch.ones(1, 3)).sum().backward()
        self.used.zero_grad()
        self.bins = nn.Parameter(
            torch.unique(torch.rand(4)) + torch.rand(4)[torch.rand(4) > 2].sum()
        )
        self.gru = nn.GRU(3, 3, bidirectional=True)
        self.embedding = nn.Embedding.from_pretrained(torch.rand(4, 3), freeze=False)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "everything": Everything,
    "odd": Odd,
    "transformer": lambda: nn.TransformerEncoderLayer(8, 2, 16),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=100)
    ),
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)),
    "bert": lambda: transformers.BertModel(transformers.BertConfig(**SMALL)),
}


# what code takes from there as an array it may read, and torch says so of those that it is given
@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize("name", MODULES)
def test_parameters_made_one_by_one_have_the_bits_of_the_whole(name: str) -> None:
    torch.manual_seed(5)
    whole = MODULES[name]()
    behind = torch.rand(3)
    torch.manual_seed(5)
    deferral = Deferral(torch.device("cpu"))
    with deferral.running():
        made = MODULES[name]()
    assert torch.equal(torch.rand(3), behind)  # what is drawn next is the same
    deferral.adopt(made)
    state = torch.get_rng_state()
    absent = [n for n, p in made.named_parameters() if is_absent(p)]
    # but for what was given as numbers, or drawn by values
    assert len(absent) >= len(list(made.parameters())) - 2
    pairs = zip(made.named_parameters(), whole.named_parameters(), strict=True)
    for (n, p), (m, q) in reversed(list(pairs)):
        assert n == m
        assert p.requires_grad == q.requires_grad
        assert torch.equal(p.detach(), q.detach()), n
        assert type(p) is type(q)
        assert p.stride() == q.stride()
    assert not any(map(is_absent, made.parameters()))
    for (n, b), (_, c) in zip(made.named_buffers(), whole.named_buffers(), strict=True):
        assert torch.equal(b, c), n
    assert torch.equal(torch.get_rng_state(), state)
    assert list(made.state_dict()) == list(whole.state_dict())


def deferred_chain() -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(0)
    whole = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
    torch.manual_seed(0)
    deferral = Deferral(torch.device("cpu"))
    with deferral.running():
        made = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
    deferral.adopt(made)
    return made, whole(torch.ones(1, 4))


def test_what_is_lent_is_there_while_its_module_is_called() -> None:
    made, expected = deferred_chain()
    here: list[list[int]] = []
    for layer in made:
        layer.register_forward_hook(
            lambda *_: here.append([k for k in range(3) if not is_absent(made[k].weight)])
        )
    with torch.no_grad(), lending(made):
        assert torch.equal(made(torch.ones(1, 4)), expected)
        assert float(made[1].weight.detach().norm()) > 0  # read by no module: until the end
        assert not is_absent(made[1].weight)
    assert here == [[0], [1], [2]]
    assert all(map(is_absent, made.parameters()))
    assert torch.equal(made(torch.ones(1, 4)), expected)  # now for good
    assert not any(map(is_absent, made.parameters()))


def test_what_a_graph_needs_stays_until_lending_ends() -> None:
    made, expected = deferred_chain()
    whole, _ = deferred_chain()
    make_present(*whole.parameters())
    x = torch.ones(1, 4, requires_grad=True)
    with lending(made):
        out = made(x)
        assert torch.equal(out, expected)
        (grad,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(grad, *torch.autograd.grad(whole(x).sum(), x))
    assert all(map(is_absent, made.parameters()))


def test_a_module_that_is_absent_has_no_memory_and_may_be_moved_to_where_it_is() -> None:
    made, _ = deferred_chain()
    made.to("cpu").to(torch.device("cpu"), torch.float32).train()
    for p in made.parameters():
        assert is_absent(p)
        assert p.untyped_storage().nbytes() == p.element_size()
    made.to(torch.float64)
    assert made[0].weight.dtype == torch.float64
    assert not any(map(is_absent, made.parameters()))


def test_code_that_makes_parameters_of_the_same_kind_makes_plain_ones() -> None:
    """As accelerate's init_empty_weights does, within which old transformers read a folder."""
    deferral = Deferral(torch.device("cpu"))
    with deferral.running():
        p = nn.Linear(2, 2).weight
        made: Any = type(p)(p.to("meta"), **vars(p), requires_grad=False)
        empty = torch.empty_like(p, device="meta")
    assert type(made) is nn.Parameter
    assert made.is_meta
    assert not made.requires_grad
    assert type(empty) is Tensor
    assert empty.is_meta


def test_tensors_beside_the_module_get_their_values_where_they_are_used() -> None:
    torch.manual_seed(1)
    expected = torch.randn(3) + 1
    torch.manual_seed(1)
    deferral = Deferral(torch.device("cpu"))
    with deferral.running():
        kept = torch.randn(3)
    assert torch.equal(kept + 1, expected)


def test_modules_of_one_deferral_keep_their_own_values() -> None:
    torch.manual_seed(3)
    expected = [nn.Linear(3, 3).weight.detach() for _ in range(2)]
    torch.manual_seed(3)
    deferral = Deferral(torch.device("cpu"))
    with deferral.running():
        modules = [nn.Linear(3, 3) for _ in range(2)]
    for module in modules:
        deferral.adopt(module)
    for module, values in reversed(list(zip(modules, expected, strict=True))):
        assert torch.equal(module.weight.detach(), values)


def test_nothing_stays_alive_behind_the_module() -> None:
    made, _ = deferred_chain()
    ref = weakref.ref(made[0].weight)
    del made
    gc.collect()
    assert ref() is None
