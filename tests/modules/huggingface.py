"""Tiny random Hugging Face models and their batches; nothing is downloaded, nothing adapted.

transformers is imported where it is needed: most tests need one model or none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY, LENGTH, CLASSES = 48, 10, 4


def generator(k: int) -> torch.Generator:
    """Return the randomness of batch k."""
    return torch.Generator().manual_seed(7_000 + k)


# ---------------------------------------------------------------------- models


def bert(dropout: float) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=4, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=16, num_labels=CLASSES,
        hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
        attn_implementation="eager",
    )  # fmt: skip
    return BertForSequenceClassification(config)


def gpt2(dropout: float) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=16, n_embd=16, n_layer=4, n_head=2, use_cache=False,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    assert model.lm_head.weight is model.transformer.wte.weight
    return model


def llama(dropout: float) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=16,
        attention_dropout=dropout, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def vit(dropout: float) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=16, num_hidden_layers=4, num_attention_heads=2, intermediate_size=32,
        image_size=16, patch_size=4, num_labels=CLASSES, hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    return ViTForImageClassification(config)


def t5(dropout: float) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=32, num_layers=3, num_decoder_layers=3,
        num_heads=2, dropout_rate=dropout, use_cache=False, decoder_start_token_id=0,
    )  # fmt: skip
    model = T5ForConditionalGeneration(config)
    assert model.lm_head.weight is model.shared.weight
    return model


def whisper(dropout: float) -> nn.Module:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=VOCABULARY, num_mel_bins=8, d_model=16, encoder_layers=3, decoder_layers=3,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=32,
        decoder_ffn_dim=32, max_source_positions=8, max_target_positions=LENGTH + 2,
        use_cache=False, dropout=dropout, attention_dropout=dropout, activation_dropout=dropout,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    return WhisperForConditionalGeneration(config)


def mamba(dropout: float) -> nn.Module:
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(
        vocab_size=VOCABULARY, hidden_size=12, state_size=4, num_hidden_layers=4, use_cache=False,
        pad_token_id=0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return MambaForCausalLM(config)  # which has no dropout


def mixtral(dropout: float) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=4,
        num_attention_heads=2, num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2,
        max_position_embeddings=16, attention_dropout=dropout, use_cache=False,
        output_router_logits=True, router_aux_loss_coef=0.05,
    )  # fmt: skip
    config._experts_implementation = "eager"  # experts chosen by the values: one call for each
    return MixtralForCausalLM(config)


NETS = {
    "bert": bert, "gpt2": gpt2, "llama": llama, "vit": vit, "t5": t5, "whisper": whisper,
    "mamba": mamba, "mixtral": mixtral,
}  # fmt: skip


# ---------------------------------------------------------------------- batches


def sentences(k: int, size: int) -> Any:
    """Return classified sentences of several lengths, as a tokenizer would."""
    from transformers import BatchEncoding

    g = generator(k)
    lengths = torch.randint(4, LENGTH + 1, (size, 1), generator=g)
    return BatchEncoding(
        {
            "input_ids": torch.randint(0, VOCABULARY, (size, LENGTH), generator=g),
            "attention_mask": (torch.arange(LENGTH) < lengths).long(),
            "labels": torch.randint(0, CLASSES, (size,), generator=g),
        }
    )


def texts(k: int, size: int) -> dict[str, Tensor]:
    """Return texts to be continued."""
    tokens = torch.randint(0, VOCABULARY, (size, LENGTH), generator=generator(k))
    return {"input_ids": tokens, "labels": tokens.clone()}


def pairs(k: int, size: int) -> dict[str, Tensor]:
    """Return texts, padded, with their translations."""
    g = generator(k)
    lengths = torch.randint(4, LENGTH + 1, (size, 1), generator=g)
    return {
        "input_ids": torch.randint(1, VOCABULARY, (size, LENGTH), generator=g),
        "attention_mask": (torch.arange(LENGTH) < lengths).long(),
        "labels": torch.randint(1, VOCABULARY, (size, LENGTH - 3), generator=g),
    }


def pictures(k: int, size: int) -> dict[str, Tensor]:
    """Return classified images."""
    g = generator(k)
    return {
        "pixel_values": torch.randn((size, 3, 16, 16), generator=g),
        "labels": torch.randint(0, CLASSES, (size,), generator=g),
    }


def sounds(k: int, size: int) -> dict[str, Tensor]:
    """Return spectrograms with what was said."""
    g = generator(k)
    return {
        "input_features": torch.randn((size, 8, 16), generator=g),
        "labels": torch.randint(3, VOCABULARY, (size, LENGTH), generator=g),
    }
