"""The recipes' networks and which of their parameters decay."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import nn

from recipes.models.byte_gpt import gpt2
from recipes.models.decay import decay_groups
from recipes.models.muon import MuonWithAdamW
from recipes.models.recommender import RecommenderNet
from recipes.models.resnet import digits_resnet, resnet18, resnet50


@pytest.mark.parametrize(("make", "count"), [(resnet18, 11_689_512), (resnet50, 25_557_032)])
def test_resnets_have_the_published_number_of_parameters(make, count):
    net = make(channels=3, num_classes=1000, stem="imagenet")
    assert sum(p.numel() for p in net.parameters()) == count


@pytest.mark.parametrize(("stem", "size"), [("imagenet", 2), ("cifar", 8)])
def test_stem_decides_the_size_of_the_feature_map(stem, size):
    net = resnet18(channels=3, num_classes=10, stem=stem, width=4)
    images = torch.randn(2, 3, 64, 64)
    assert net.groups(net.stem(images)).shape == (2, 32, size, size)
    assert net(images).shape == (2, 10)


def test_digits_resnet_maps_grey_images_to_logits():
    net = digits_resnet(channels=1, num_classes=10, stem="cifar")
    assert net(torch.randn(2, 1, 8, 8)).shape == (2, 10)


def test_an_unknown_stem_names_the_known_ones():
    with pytest.raises(ValueError, match="allowed: imagenet, cifar"):
        resnet18(channels=3, num_classes=10, stem="mnist")


def test_decay_spares_batchnorm_and_biases():
    net = resnet18(channels=3, num_classes=10, stem="cifar", width=4)
    optimizer = torch.optim.SGD(decay_groups(net), lr=0.1, weight_decay=1e-4)
    spared = {
        id(parameter)
        for module in net.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if isinstance(module, nn.BatchNorm2d) or name == "bias"
    }
    decayed, kept = optimizer.param_groups
    assert (decayed["weight_decay"], kept["weight_decay"]) == (1e-4, 0.0)
    assert {id(p) for p in kept["params"]} == spared
    assert len(decayed["params"]) + len(spared) == len(list(net.parameters()))


def test_decay_counts_tied_parameters_once_and_frozen_ones_not_at_all():
    net = gpt2(vocab_size=256, block_size=8, layers=1, heads=2, width=8)
    assert net.lm_head.weight is net.transformer.wte.weight
    net.transformer.wpe.weight.requires_grad = False
    grouped = [id(p) for group in decay_groups(net) for p in group["params"]]
    assert len(grouped) == len(set(grouped)) == len(list(net.parameters())) - 1


def test_muon_updates_the_matrices_of_layers_and_adamw_all_else():
    net = gpt2(vocab_size=256, block_size=8, layers=1, heads=2, width=8, tied=False)
    optimizer = MuonWithAdamW(decay_groups(net), lr=0.01)
    for p in net.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    by_muon = {
        n for n, p in net.named_parameters() if optimizer.state[p].keys() == {"momentum_buffer"}
    }
    layers = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    assert by_muon == {f"transformer.h.0.{name}.weight" for name in layers}
    again = MuonWithAdamW(decay_groups(net), lr=0.01)
    again.load_state_dict(deepcopy(optimizer.state_dict()))
    before = [p.detach().clone() for p in net.parameters()]
    again.step()
    with_state = [p.detach().clone() for p in net.parameters()]
    for p, x in zip(net.parameters(), before, strict=True):
        p.data.copy_(x)
    optimizer.step()
    assert all(map(torch.equal, with_state, net.parameters()))


def test_a_recommender_maps_rows_to_logits_and_reads_all_tables():
    net = RecommenderNet(num_numbers=3, cardinalities=[4, 7], width=8, hidden=16)
    ids = torch.tensor([[0, 6], [3, 1]])
    logits = net(torch.randn(2, 3), ids)
    assert logits.shape == (2,)
    logits.sum().backward()
    read = [table.weight.grad.any(1).nonzero().flatten().tolist() for table in net.embeddings]
    assert read == [[0, 3], [1, 6]]


def test_gpt_starts_out_knowing_nothing():
    net = gpt2(vocab_size=256, block_size=8, layers=1, heads=2, width=8)
    logits = net(torch.randint(256, (2, 8))).logits
    assert logits.shape == (2, 8, 256)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), torch.randint(256, (16,)))
    assert loss.item() == pytest.approx(torch.tensor(256.0).log().item(), abs=0.1)
