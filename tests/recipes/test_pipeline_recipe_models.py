"""The networks of the papers on pipelines: their sizes, and what is special about each."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from recipes.models.alexnet import alexnet
from recipes.models.byte_gpt import gpt2
from recipes.models.gnmt import GNMT, AdditiveAttention, BothWays
from recipes.models.googlenet import googlenet
from recipes.models.inception import inception_v3
from recipes.models.language_model import LanguageModel
from recipes.models.residual_lstm import residual_lstm
from recipes.models.resnet import resnet101, wide_resnet101
from recipes.models.translator import Translator
from recipes.models.vgg import vgg16, vgg19

PIXELS = {alexnet: 63, inception_v3: 75}


def count(net):
    return sum(p.numel() for p in net.parameters())


@pytest.mark.parametrize(
    ("make", "parameters"),
    [  # torchvision's, without auxiliary heads; its VGG-16 with BatchNorm
        (alexnet, 61_100_840),
        (vgg16, 138_365_992),
        (vgg19, 143_678_248),
        (wide_resnet101, 126_886_696),
        (resnet101, 44_549_160),
        (googlenet, 6_624_904),
        (inception_v3, 23_834_568),
    ],
)
def test_image_networks_have_the_published_number_of_parameters(make, parameters):
    with torch.device("meta"):
        assert count(make(channels=3, num_classes=1000, stem="imagenet")) == parameters


def test_vgg16_without_batchnorm_has_the_papers_number_of_parameters():
    with torch.device("meta"):
        net = vgg16(channels=3, num_classes=1000, stem="imagenet", batch_norm=False)
    assert count(net) == 138_357_544


def test_networks_for_small_images_are_those_of_pipeoptims_code():
    with torch.device("meta"):
        vgg = vgg16(channels=3, num_classes=100, stem="cifar")
        goog = googlenet(channels=3, num_classes=10, stem="cifar")
    convolutions = [m for m in goog.modules() if isinstance(m, nn.Conv2d)]
    biases = sum(conv.out_channels for conv in convolutions)  # theirs has them besides BatchNorm's
    assert count(goog) + biases == 6_166_250
    features = 138_365_992 - (25088 * 4096 + 4096) - (4096 * 4096 + 4096) - (4096 * 1000 + 1000)
    assert count(vgg) == features + 512 * 100 + 100


@pytest.mark.parametrize("make", [alexnet, vgg16, resnet101, googlenet, inception_v3])
def test_narrow_networks_map_large_images_to_logits(make):
    net = make(channels=1, num_classes=5, stem="imagenet", width=8)
    assert net(torch.randn(2, 1, *[PIXELS.get(make, 40)] * 2)).shape == (2, 5)


@pytest.mark.parametrize("make", [vgg16, resnet101, googlenet])
def test_narrow_networks_map_small_images_to_logits(make):
    net = make(channels=3, num_classes=5, stem="cifar", width=12)
    assert net(torch.randn(2, 3, 32, 32)).shape == (2, 5)


@pytest.mark.parametrize("make", [alexnet, inception_v3])
def test_networks_without_a_form_for_small_images_say_what_they_take(make):
    with pytest.raises(ValueError, match="allowed: data sets with stem imagenet"):
        make(channels=3, num_classes=10, stem="cifar")


def test_residual_lstm_is_the_one_of_spectrains_code():
    net = residual_lstm(vocab_size=10_000, num_classes=2)
    block = 4 * 128 * (128 + 128) + 8 * 128 + (128 * 128 + 128)
    assert count(net) == 10_000 * 128 + 4 * block + 2 * 128 + 2
    assert net(torch.randint(10_000, (3, 9))).shape == (3, 2)


def test_gpt2_medium_has_the_published_number_of_parameters():
    with torch.device("meta"):
        net = gpt2(vocab_size=50_257, block_size=1024, layers=24, heads=16, width=1024)
    assert count(net) == 354_823_168


def test_the_learning_rate_of_the_language_model_rises_and_falls_along_lines():
    net = gpt2(vocab_size=9, block_size=4, layers=1, heads=1, width=4)
    module = LanguageModel(net, optimizer=lambda groups: torch.optim.SGD(groups, 1.0), warmup=0.2)
    module._trainer = type("Trainer", (), {"estimated_stepping_batches": 10})()
    made = module.configure_optimizers()
    rates = []
    for _ in range(10):
        rates.append(made["optimizer"].param_groups[0]["lr"])
        made["optimizer"].step()
        made["lr_scheduler"]["scheduler"].step()
    assert rates[:3] == [0.5, 1.0, 1.0]
    assert rates[3:] == pytest.approx([left / 8 for left in range(7, 0, -1)])
    assert made["optimizer"].param_groups[0]["lr"] == 0


def small_gnmt(**settings):
    """Make a GNMT that is not as still as the published first weights leave one of this size."""
    torch.manual_seed(0)
    net = GNMT(vocab_size=20, dropout=0.0, **settings)
    for p in net.parameters():
        p.data.mul_(10)
    return net


class TestGNMT:
    @pytest.mark.parametrize(("layers", "more"), [(4, 0), (8, 4 * (8_396_800 + 12_591_104))])
    def test_gnmt_8_and_16_have_the_parameters_of_pipedreams_code(self, layers, more):
        embeddings, both_ways = 2 * 32_320 * 1024, 16_793_600
        narrow, wide, attention = 8_396_800, 12_591_104, 2 * 1024**2 + 2 * 1024 + 1
        logits = 32_320 * 1025
        gnmt_8 = embeddings + both_ways + wide + 3 * narrow + attention + 3 * wide + logits
        with torch.device("meta"):
            assert count(GNMT(vocab_size=32_320, layers=layers)) == gnmt_8 + more

    def test_padding_changes_no_logits(self):
        net = small_gnmt(width=8)
        source, target = torch.tensor([[2, 5, 6, 3]]), torch.tensor([[2, 9, 8]])
        padded = torch.tensor([[2, 5, 6, 3, 0, 0], [2, 7, 8, 9, 4, 3]])
        logits = net(padded, torch.cat([target, target]))[:1]
        torch.testing.assert_close(logits, net(source, target))

    def test_words_to_come_change_no_logits_and_the_source_changes_them(self):
        net = small_gnmt(width=8, layers=2)
        source, target = torch.tensor([[2, 5, 6, 3]]), torch.tensor([[2, 9, 8]])
        before = net(source, target)
        later = net(source, torch.tensor([[2, 9, 17]]))
        torch.testing.assert_close(later[:, :2], before[:, :2])
        assert not torch.allclose(net(source.flip(1), target), before)

    def test_reading_both_ways_begins_backwards_at_the_last_word(self):
        layer = BothWays(4)
        words = torch.randn(2, 5, 4)
        alone = layer(words[:1, :3], torch.tensor([3]))
        together = layer(words, torch.tensor([3, 5]))
        torch.testing.assert_close(together[:1, :3], alone)
        assert not together[0, 3:].any()

    def test_attention_is_a_mean_of_words(self):
        attention = AdditiveAttention(4)
        memory = torch.ones(1, 3, 4)
        memory[:, 2] = 99.0
        words = torch.tensor([[True, True, False]])
        answer = attention(torch.randn(1, 2, 4), memory, words)
        torch.testing.assert_close(answer, torch.ones(1, 2, 4))

    def test_one_layer_is_too_few(self):
        with pytest.raises(ValueError, match="allowed: 2 and more"):
            GNMT(vocab_size=20, layers=1)


class TestTranslate:
    def test_sentences_learnt_by_heart_are_translated(self):
        net = small_gnmt(width=16, layers=2)
        module = Translator(net, optimizer=torch.optim.Adam, max_length=8)
        source = torch.tensor([[2, 4, 5, 3], [2, 5, 4, 3], [2, 6, 3, 0]])
        target = torch.tensor([[2, 7, 8, 9, 3], [2, 10, 3, 0, 0], [2, 9, 8, 3, 0]])
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
        for _ in range(60):
            loss = module.loss(net(source, target[:, :-1]), target[:, 1:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert torch.equal(module.translate(source), target)

    def test_no_translation_is_longer_than_asked_for(self):
        net = small_gnmt(width=8, layers=2)
        nn.init.constant_(net.logits.bias[3:4].data, -100)  # never the end
        words = Translator(net, optimizer=torch.optim.Adam, max_length=5).translate(
            torch.tensor([[2, 4, 3]])
        )
        assert words.shape == (1, 6)
