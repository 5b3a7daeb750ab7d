"""All modules that pipelines must train as they are, with the places where they are cut."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any

import torch

from tests.modules import huggingface as hf
from tests.modules import plain as own
from tests.modules.huggingface import CLASSES, VOCABULARY
from tests.modules.plain import Logging, accuracy

# transformers 5 has given these modules other names
_IS_NEW = int(version("transformers").partition(".")[0]) >= 5
VIT, EXPERTS = ("vit.layers", "mlp") if _IS_NEW else ("vit.encoder.layer", "block_sparse_moe")


class FineTuned(Logging):
    """Train a Hugging Face model on the loss that it computes; decay matrices only.

    Args:
        net: name of a model.
        dropout: everywhere where it has some.
        num_classes: of its logits.
    """

    def __init__(self, net: str, dropout: float = 0.0, num_classes: int = VOCABULARY) -> None:
        super().__init__(accuracy(num_classes))
        self.model = hf.NETS[net](dropout)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = self.model(**batch)
        self.note(out.loss, out.logits.detach().flatten(0, -2), batch["labels"].flatten())
        return out.loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        out = self.model(**batch)
        self.log("val_loss", out.loss, batch_size=len(out.logits))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log_dict({"test_loss": self.model(**batch).loss}, batch_size=1)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(**batch).logits

    def configure_optimizers(self) -> Any:
        parameters = list(self.parameters())
        groups = [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.05},
            {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=3e-3)


# ---------------------------------------------------------------------- all of them


@dataclass(frozen=True, kw_only=True)
class Case:
    """Say how to make a module and its batches, and where it may be cut.

    Args:
        make: dropout -> module.
        batch: (k, size) -> batch.
        cuts2: where the second of two stages begins.
        cuts4: where stages 1, 2, 3 of four begin.
        random: whether it draws numbers even without dropout.
    """

    make: Callable[..., Logging]
    batch: Callable[[int, int], Any]
    cuts2: list[str]
    cuts4: list[str]
    random: bool = False

    def cuts(self, num_stages: int) -> list[str]:
        return {2: self.cuts2, 4: self.cuts4}[num_stages]


def _hugging_face(net: str, batch: Any, cuts2: str, cuts4: str, classes: int = VOCABULARY) -> Case:
    make = partial(FineTuned, net, num_classes=classes)
    paths = [f"model.{path}" for path in cuts4.split()]
    return Case(make=make, batch=batch, cuts2=[f"model.{cuts2}"], cuts4=paths)


CASES: dict[str, Case] = {
    "resnet": Case(
        make=own.ResNet, batch=own.images, cuts2=["blocks.1.conv2"],
        cuts4=["blocks.0.conv2", "blocks.1.shortcut", "blocks.2.bn2"],
    ),
    "unet": Case(
        make=own.UNet, batch=own.noisy_images, cuts2=["middle"], cuts4=["down2", "middle", "up1"]
    ),
    "inception": Case(
        make=own.Inception, batch=own.images, cuts2=["five"],
        cuts4=["three.2", "five.1", "pool.1"],
    ),
    "lstm": Case(
        make=own.LstmStack, batch=own.tokens, cuts2=["rnns.2"],
        cuts4=["rnns.1", "rnns.2", "rnns.3"],
    ),
    "gru": Case(
        make=own.PackedGru, batch=own.sequences, cuts2=["second"], cuts4=["first", "second", "mix"]
    ),
    "siamese": Case(
        make=own.Siamese, batch=own.vector_pairs, cuts2=["compare"],
        cuts4=["compare", "middle", "out"],
    ),
    "vae": Case(
        make=own.Vae, batch=own.vectors, cuts2=["decoder.0"], random=True,
        cuts4=["mean", "decoder.0", "decoder.2"],
    ),
    "cls_token": Case(
        make=own.ClsToken, batch=own.labelled_images, cuts2=["layers.1"],
        cuts4=["layers.0", "layers.1.linear1", "layers.2"],
    ),
    "frozen": Case(
        make=own.Frozen, batch=own.images, cuts2=["head.0"], cuts4=["trunk.3", "head.0", "head.3"]
    ),
    "bert": _hugging_face(
        "bert", hf.sentences, "bert.encoder.layer.2",
        "bert.encoder.layer.1.output bert.encoder.layer.2 bert.pooler", CLASSES,
    ),
    "gpt2": _hugging_face(
        "gpt2", hf.texts, "transformer.h.2",
        "transformer.h.1 transformer.h.2.mlp transformer.h.3",
    ),
    "llama": _hugging_face(
        "llama", hf.texts, "model.layers.2",
        "model.layers.1 model.layers.2.self_attn.v_proj model.layers.3",
    ),
    "vit": _hugging_face(
        "vit", hf.pictures, f"{VIT}.2", f"{VIT}.0 {VIT}.1.layernorm_after {VIT}.3", CLASSES
    ),
    "t5": _hugging_face(
        "t5", hf.pairs, "decoder.block.0",
        "encoder.block.2 decoder.block.0.layer.1 decoder.block.2",
    ),
    "whisper": _hugging_face(
        "whisper", hf.sounds, "model.decoder.layers.0",
        "model.encoder.layers.1 model.decoder.layers.0 model.decoder.layers.1.encoder_attn",
    ),
    "mamba": _hugging_face(
        "mamba", hf.texts, "backbone.layers.2",
        "backbone.layers.1 backbone.layers.2.mixer.x_proj backbone.layers.3",
    ),
    "mixtral": _hugging_face(
        "mixtral", hf.texts, "model.layers.2",
        f"model.layers.1.{EXPERTS} model.layers.2 model.layers.3.self_attn",
    ),
}  # fmt: skip
