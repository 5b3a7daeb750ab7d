"""Meta weights: where values of parameters and buffers come from, and what has none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import nn

from lightning_cyclic.errors import ConfigurationError
from lightning_cyclic.runtime.absent import is_absent
from lightning_cyclic.runtime.meta import MetaWeights, lending

CPU = torch.device("cpu")


class Everything(nn.Module):
    """Has what torch initialises: alone, with its children, in lists, and buffers; and a tie."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0, batch_first=True)
        self.lstm = nn.LSTM(4, 4, 2)
        self.embedding = nn.Embedding(5, 4, padding_idx=1)
        self.tied = nn.Linear(4, 5)
        self.tied.weight = self.embedding.weight
        self.norm = nn.BatchNorm1d(4)
        self.own = Own()


class Own(nn.Module):
    """Initialises by ``.data``, and computes a buffer that checkpoints do not have."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(3))
        self.register_buffer("places", torch.empty(4), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.scale.data.normal_()
        self.places = torch.arange(4.0)


def on_meta(make: Callable[[], nn.Module], seed: int = 3) -> tuple[Any, MetaWeights]:
    with torch.device("meta"):
        module = make().eval()
    return module, MetaWeights(module, CPU, seed)


def test_values_do_not_depend_on_what_else_is_made() -> None:
    state = torch.get_rng_state()
    (whole, weights), (parts, _), (other, _) = (on_meta(Everything, seed) for seed in (3, 3, 4))
    weights.check()
    weights.make_all()
    for (n, p), q in reversed([*zip(whole.named_parameters(), parts.parameters(), strict=True)]):
        assert not is_absent(p)
        assert torch.equal(q.detach(), p.detach()), n
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(other.tied.bias.detach(), whole.tied.bias)
    assert whole.tied.weight is whole.embedding.weight
    assert not whole.embedding.weight[1].any()
    assert torch.equal(whole.norm.running_var, torch.ones(4))
    assert torch.equal(whole.own.places, torch.arange(4.0))
    assert not whole.layer.self_attn.out_proj.bias.any()  # as its parent has it
    assert whole.lstm(torch.ones(1, 1, 4))[0].isfinite().all()


def test_modules_of_one_kind_do_not_begin_alike() -> None:
    module, weights = on_meta(lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    weights.make_all()
    assert not torch.equal(module[0].weight.detach(), module[1].weight)


def test_what_is_lent_is_there_while_its_module_is_called() -> None:
    (whole, weights), (module, _) = on_meta(Everything), on_meta(Everything)
    weights.make_all()
    x = torch.ones(1, 2, 8)
    with torch.no_grad(), lending(module):
        assert torch.equal(module.layer(x), whole.layer(x))
        assert all(map(is_absent, module.parameters()))
        assert module.tied.bias.detach().isfinite().all()  # read by no module: until the end
        assert not is_absent(module.tied.bias)
    assert all(map(is_absent, module.parameters()))
    assert torch.equal(module.layer(x), whole.layer(x))  # now for good
    assert not any(map(is_absent, module.layer.parameters()))


def test_modules_may_be_converted_before_they_are_made() -> None:
    module, weights = on_meta(Everything)
    module.to(torch.bfloat16)
    assert all(map(is_absent, module.parameters()))
    weights.make_all()
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=100)
    return transformers.GPT2LMHeadModel(config)


class Reader(nn.Module):
    """Is read from files, but for a head that they lack."""

    def __init__(self, place: Path) -> None:
        super().__init__()
        self.net = gpt2()
        self.net.weights_path = place
        self.head = nn.Linear(3, 3)


def test_files_are_read_by_key(tmp_path: Path) -> None:
    model = gpt2()
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    module, weights = on_meta(lambda: Reader(tmp_path))
    weights.check()
    weights.make_all()
    for (n, p), q in zip(model.named_parameters(), module.net.parameters(), strict=True):
        assert torch.equal(p, q), n
    assert module.net.lm_head.weight is module.net.transformer.wte.weight
    assert module.head.weight.isfinite().all()


def test_what_a_checkpoint_has_goes_before_everything() -> None:
    module, weights = on_meta(Unmade)
    module.load_state_dict({"scale": torch.ones(3), "places": torch.ones(2)})
    weights.check()
    assert is_absent(module.scale)
    assert torch.equal(module.scale.detach(), torch.ones(3))
    assert torch.equal(module.places, torch.ones(2))


class Unmade(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(3))
        self.register_buffer("places", torch.empty(2))


class UnmadeBuffer(Unmade):
    def __init__(self) -> None:
        super().__init__()
        del self.scale


class Leaves(Unmade):
    def reset_parameters(self) -> None:
        nn.init.zeros_(self.scale)


class Meddles(Unmade):
    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(2, 2)

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.scale)
        nn.init.zeros_(self.child.bias)


class Misnamed(Reader):
    def __init__(self) -> None:
        super().__init__(Path("nowhere"))


def reshaped(folder: Path) -> nn.Module:
    module = nn.Linear(2, 2)
    module.weights_path = str(folder / "weights.safetensors")
    return module


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (Unmade, r"parameter 'scale' of Unmade .* Unmade has no reset_parameters"),
        (UnmadeBuffer, "buffer 'places' of UnmadeBuffer "),
        (Leaves, "reset_parameters of Leaves .* leaves 'places' as it was"),
        (Meddles, "reset_parameters of Meddles reads or changes 'child.bias' of another module"),
        (Misnamed, "weights_path='nowhere' of module 'net' has no safetensors"),
        (reshaped, r"'weight' has shape \(2, 2\), and 'weight' in .* has \(3,\)"),
    ],
)
def test_what_has_no_values_is_refused_by_name(make: Any, said: str, tmp_path: Path) -> None:
    save_file({"weight": torch.ones(3)}, tmp_path / "weights.safetensors")
    with pytest.raises(ConfigurationError, match=said):  # noqa: PT012  (by one of them)
        _, weights = on_meta(make if isinstance(make, type) else lambda: make(tmp_path))
        weights.check()
        weights.make_all()
