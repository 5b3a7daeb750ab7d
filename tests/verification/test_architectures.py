"""The first step of Hugging Face's architectures, in stages, is the plain one bit by bit."""

from __future__ import annotations

import warnings

import pytest
import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from lightning_cyclic.errors import StepError, VerificationError
from lightning_cyclic.registration import make_strategy
from tests.verification.architectures import Wrapped, batch_of

ALWAYS = ("causal llama", "images convnext", "masked camembert")
EXHAUSTIVE = {
    "causal": (
        "bert-generation bigbird_pegasus blenderbot-small cohere cohere2 falcon flex_olmo "
        "flint fuyu gemma3 gemma3_text gemma4_unified_text gpt2 gpt_neox_japanese "
        "granite granite_swa hrm_text hy_v4 hyperclovax kolibri1 ministral3 mixtral moshi "
        "nanochat olmo2 opt phi3 plbart qwen2 smollm3 whisper zaya "
    ),
    "ctc": ("data2vec-audio hubert sew sew-d unispeech "),
    "images": (
        "beit clip convnextv2 data2vec-vision dinov2 dinov2_with_registers focalnet hiera "
        "ijepa imagegpt metaclip_2 mobilenet_v1 mobilevit poolformer vit "
    ),
    "masked": (
        "albert bart bert convbert data2vec-text deberta deberta-v2 distilbert electra ernie "
        "esmc eurobert flaubert fnet gte ibert jina_embeddings_v3 layoutlm "
        "mbart megatron-bert mobilebert modernbert modernvbert mpnet mra mvp nomic_bert "
    ),
    "pairs": ("led longt5 m2m_100 nllb-moe pegasus_x seamless_m4t "),
    "speech": ("canary cohere_asr "),
}
NAMES = [
    *ALWAYS,
    *(
        pytest.param(f"{task} {model}", marks=pytest.mark.exhaustive)
        for task, models in EXHAUSTIVE.items()
        for model in models.split()
    ),
]
STAGES = {"1f1b": 4, "cyclic_pipeline": 3}  # two micro-batches allow no more of the second
FEWER = {"pairs pegasus_x": 2}


def steps_compared(name: str, preset: str) -> int:
    torch.manual_seed(1)
    strategy = make_strategy(preset, num_microbatches=2, stages=FEWER.get(name, STAGES[preset]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = Wrapped(name).train()
        trainer = Trainer(
            accelerator="cpu", devices=1, strategy=strategy, max_steps=1, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(module, DataLoader([batch_of(name, module.net)], batch_size=None))
    return strategy.steps_compared


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("preset", STAGES)
def test_the_step_of_an_architecture_is_the_plain_one(name: str, preset: str) -> None:
    assert steps_compared(name, preset) == 1


@pytest.mark.exhaustive
def test_a_model_that_makes_modules_in_its_first_step_is_refused() -> None:
    with pytest.raises(StepError, match="took another way") as caught:
        steps_compared("masked big_bird", "1f1b")
    assert not isinstance(caught.value, VerificationError)
