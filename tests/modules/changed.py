"""GPT-2 and BERT as users change them: adapters, compiled and checkpointed blocks, a scheduler."""

from __future__ import annotations

from typing import Any

import torch

from tests.modules.cases import FineTuned


class Scheduled(FineTuned):
    """Train with a rate that changes in each step."""

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=3e-3, weight_decay=0.05)
        rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1 / (1 + t))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": rates, "interval": "step"}}


def scheduled(dropout: float) -> FineTuned:
    return Scheduled("gpt2", dropout)


def adapted(dropout: float) -> FineTuned:
    """Train low-rank parts alone (peft)."""
    from peft import LoraConfig, inject_adapter_in_model

    module: Any = Scheduled("gpt2", dropout)
    wanted = LoraConfig(r=2, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)
    inject_adapter_in_model(wanted, module.model)
    return module  # type: ignore[no-any-return]


def compiled(dropout: float) -> FineTuned:
    """Compile an MLP of each second block in place."""
    module: Any = Scheduled("gpt2", dropout)
    for block in module.model.transformer.h[::2]:
        block.mlp.compile(backend="aot_eager")
    return module  # type: ignore[no-any-return]


def checkpointed(dropout: float) -> FineTuned:
    """Run all blocks again for their backward, by Hugging Face's switch."""
    module: Any = Scheduled("gpt2", dropout)
    model = module.model
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": False})
    return module  # type: ignore[no-any-return]


def frozen(dropout: float) -> FineTuned:
    """Freeze words and the first two blocks."""
    module: Any = Scheduled("gpt2", dropout)
    for part in (module.model.transformer.wpe, *module.model.transformer.h[:2]):
        part.requires_grad_(False)
    return module  # type: ignore[no-any-return]
