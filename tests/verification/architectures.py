"""Tiny random models of Hugging Face's architectures, made from their configs by one table.

A name is "TASK MODEL", as "causal llama". Nothing is downloaded; the defaults of each config stay,
but for sizes: dropout, tied weights, caches and the way of attention are as users have them.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

WIDTH, HEADS, LAYERS, VOCABULARY, PIXELS, LENGTH, CLASSES = 16, 2, 4, 48, 32, 10, 4

_SIZES = [  # of what configs call by these names
    (
        WIDTH,
        (
            "attention_hidden_size block_dim classifier_proj_size codevector_dim conv_channels "
            "conv_dim cross_attention_hidden_size d_embed d_model decoder_dim decoder_hidden_size "
            "dim dims emb_dim embed_dim embed_dims embedding_size encoder_dim encoder_hidden_size "
            "hidden_dim hidden_size hidden_size_per_layer_input hidden_sizes kv_lora_rank "
            "lru_width mask_embed_size n_embd neck_hidden_sizes out_channels output_hidden_size "
            "pooler_hidden_size proj_codevector_dim projection_dim q_lora_rank qk_embed "
            "rnn_hidden vision_embed_dim word_embed_proj_dim "
        ),
    ),
    (
        2 * WIDTH,
        (
            "d_ff d_inner decoder_ffn_dim dff encoder_ffn_dim expert_ffn_hidden_size "
            "expert_ffn_size feed_forward_hidden ff_dim ffn_dim ffn_embed_dim ffn_hidden_size "
            "intermediate_size intermediate_size_mlp moe_intermediate_size n_inner "
            "shared_expert_intermediate_size shared_intermediate_size "
        ),
    ),
    (
        HEADS,
        (
            "attention_heads decoder_attention_heads decoder_num_attention_heads "
            "encoder_attention_heads encoder_num_attention_heads key_value_heads kv_n_heads "
            "n_head n_heads num_attention_groups num_attention_heads num_decoder_attention_heads "
            "num_encoder_attention_heads num_heads num_key_value_heads num_kv_heads "
        ),
    ),
    (LAYERS, ("layers n_layer n_layers num_encoder_layers num_hidden_layers num_layers ")),
    (
        2,
        (
            "decoder_layers decoder_num_hidden_layers encoder_layers encoder_num_hidden_layers "
            "moe_num_experts n_routed_experts num_codevector_groups num_decoder_layers "
            "num_experts num_local_experts xvector_layers "
        ),
    ),
    (
        WIDTH // HEADS,
        (
            "attention_head_size d_kv dim_head global_head_dim head_dim kv_channels qk_head_dim "
            "qk_nope_head_dim qk_rope_head_dim rope_head_dim rotary_dim v_head_dim "
        ),
    ),
    (VOCABULARY, ("n_token text_vocab_size vocab_size vocab_size_per_layer_input ")),
    (
        64,
        (
            "max_position_embeddings max_seq_len max_sequence_length max_source_positions "
            "max_target_positions n_ctx n_positions seq_length "
        ),
    ),
    (PIXELS, ("image_size img_size ")),
    (8, ("num_codevectors_per_group num_conv_pos_embeddings num_mel_bins ")),
    (1, ("depths moe_top_k moe_topk n_shared_experts num_experts_per_tok num_shared_experts ")),
    (0, ("pad_token_id ")),
]
_VALUES = {name: size for size, names in _SIZES for name in names.split()}


def shrunk(kind: Any) -> dict[str, Any]:
    """Return what a config is made with, for sizes of a few numbers."""
    default = kind()
    found: dict[str, Any] = {}
    for key, value in default.to_dict().items():
        if key in kind.sub_configs:
            sub = getattr(default, key, None)
            sub_kind = type(sub) if sub is not None else kind.sub_configs[key]
            if hasattr(sub_kind, "sub_configs") and sub is not None:
                found[key] = shrunk(sub_kind)
        elif key in _VALUES and value is not None and not isinstance(value, bool):
            found[key] = resized(value, _VALUES[key])
        elif key.endswith("token_id") and isinstance(value, int) and value >= VOCABULARY:
            found[key] = {"bos": 1, "eos": 2, "dec": 1}.get(key[:3], 3)
    if default.is_encoder_decoder and "decoder_start_token_id" not in found:
        found["decoder_start_token_id"] = 1
    return found


def resized(value: Any, size: int) -> Any:
    """Return a number, or as many as there are, of another size."""
    if isinstance(value, list | tuple):
        return type(value)(resized(x, size) for x in value)
    return size if isinstance(value, int | float) else value


# ---------------------------------------------------------------------- models


def make(name: str) -> nn.Module:
    """Return the model of a name."""
    import transformers

    task, _, model = name.partition(" ")
    config = transformers.CONFIG_MAPPING[model]
    made = config(**shrunk(config))
    if task in {"images", "sequences", "sounds"}:
        made.num_labels = CLASSES
    return getattr(transformers, _TASKS[task]).from_config(made)


_TASKS = {
    "causal": "AutoModelForCausalLM",
    "masked": "AutoModelForMaskedLM",
    "sequences": "AutoModelForSequenceClassification",
    "pairs": "AutoModelForSeq2SeqLM",
    "images": "AutoModelForImageClassification",
    "ctc": "AutoModelForCTC",
    "sounds": "AutoModelForAudioClassification",
    "speech": "AutoModelForSpeechSeq2Seq",
    "base": "AutoModel",
}


class Wrapped(LightningModule):
    """Train a model by its own loss, or by the mean of its first output of numbers."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.net = make(name)

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        output = self.net(**batch)
        loss = getattr(output, "loss", None)
        if loss is None:
            loss = next(
                x.mean() for x in output.values() if isinstance(x, Tensor) and x.requires_grad
            )
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


# ---------------------------------------------------------------------- batches


def batch_of(name: str, net: nn.Module, rows: int = 4) -> dict[str, Tensor]:
    """Return a batch of a task."""
    task = name.partition(" ")[0]
    g = torch.Generator().manual_seed(7)
    kind = getattr(net, "main_input_name", "input_ids")
    words = torch.randint(4, VOCABULARY - 1, (rows, LENGTH), generator=g)
    labels = torch.randint(0, CLASSES, (rows,), generator=g)
    if kind == "pixel_values":
        batch = {"pixel_values": torch.randn((rows, 3, PIXELS, PIXELS), generator=g)}
    elif kind == "input_values":
        mels = getattr(net.config, "num_mel_bins", None)
        shape = (rows, 6400) if mels is None else (rows, net.config.max_length, mels)
        batch = {"input_values": torch.randn(shape, generator=g)}
    elif kind == "input_features":
        mels = getattr(net.config, "num_mel_bins", getattr(net.config, "feature_size", 8))
        shape = (rows, mels, 128) if "whisper" in name else (rows, 40, mels)
        batch = {"input_features": torch.randn(shape, generator=g)}
    else:
        batch = {"input_ids": words, "attention_mask": torch.ones_like(words)}
    if task in ("causal", "masked", "pairs", "ctc", "speech"):
        batch["labels"] = (
            words[:, :-2].contiguous() if task in ("pairs", "ctc", "speech") else words.clone()
        )
    elif task in ("sequences", "images", "sounds"):
        batch["labels"] = labels
    return batch
