"""The GPT that the contenders of the benchmark "pipeline" train, whole and cut by hand."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import cast

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.slept import Slept

VOCABULARY = 256  # bytes


@dataclass(frozen=True, kw_only=True)
class Case:
    """Hold one comparison.

    Args:
        name: what it is called in the table.
        num_workers: how many processes.
        num_stages: how many stages the model is cut into.
        num_microbatches: into how many micro-batches a batch is cut.
        rows: samples of a micro-batch.
        length: tokens of a sample.
        width: features of the model.
        depth: layers of the model.
        sleep_ms: emulated compute of one layer's forward, and of each half of its backward.
        num_steps: timed steps of a round.
        rounds: how often every contender trains.
        heads: of each layer's attention.
        vocabulary: tokens there are.
        device: "cpu" or "cuda", which all workers share.
        dtype: of the parameters.
        is_tied: whether the last layer has the weights of the embedding.
    """

    name: str
    num_workers: int
    num_stages: int
    num_microbatches: int
    rows: int
    length: int
    width: int
    depth: int
    sleep_ms: float
    num_steps: int
    rounds: int
    heads: int = 4
    vocabulary: int = VOCABULARY
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    is_tied: bool = False

    @property
    def place(self) -> torch.device:
        """Return the device, by its number."""
        return torch.device("cuda", 0) if self.device == "cuda" else torch.device(self.device)

    @property
    def begins(self) -> list[int]:
        """Return the layers with which stages 1, 2, ... begin."""
        return [self.depth * j // self.num_stages for j in range(1, self.num_stages)]

    @property
    def cut_bytes(self) -> int:
        """Return the bytes of the hidden states of one micro-batch."""
        return self.dtype.itemsize * self.rows * self.length * self.width

    def batch(self) -> Tensor:
        """Return the tokens of a whole batch."""
        generator = torch.Generator().manual_seed(1)
        size = (self.rows * self.num_microbatches, self.length)
        return torch.randint(self.vocabulary, size, generator=generator).to(self.device)

    def optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer of all contenders."""
        return torch.optim.SGD(module.parameters(), lr=1e-3, momentum=0.9)


# ---------------------------------------------------------------------- the model, whole and cut


class _Slow(nn.Module):
    """Sleep as long for the gradient of the input, and where a weight's is made."""

    def __init__(self, inner: nn.Module, seconds: float) -> None:
        super().__init__()
        self.inner, self.seconds = inner, seconds
        weight = next(p for p in inner.parameters() if p.dim() > 1)
        weight.register_hook(lambda _: time.sleep(seconds))

    def forward(self, x: Tensor) -> Tensor:
        return Slept.apply(self.inner(x), self.seconds, 1)


def make_gpt(case: Case) -> GPT2LMHeadModel:
    """Return Hugging Face's GPT-2 with random weights, the same each time."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=case.vocabulary, n_positions=case.length, n_embd=case.width, n_layer=case.depth,
        n_head=case.heads, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
        tie_word_embeddings=case.is_tied, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    with torch.device(case.device):
        model = GPT2LMHeadModel(config)
    nn.Module.to(model, case.dtype)
    if case.sleep_ms:
        for block in model.transformer.h:
            block.mlp = _Slow(cast(nn.Module, block.mlp), case.sleep_ms / 1000)
    return model.train()


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the loss of predicting each next token."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class LitGPT(L.LightningModule):
    """Be the module as a user would write it, whole."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.gpt = make_gpt(case)
        self.case = case
        self.stage_paths = [f"gpt.transformer.h.{k}" for k in case.begins]

    def training_step(self, batch: Tensor, batch_idx: int = 0) -> Tensor:
        return loss_of(self.gpt(input_ids=batch).logits, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.case.optimizer(self)


class LitSequential(L.LightningModule):
    """Be a chain of layers, as torchgpipe wants it."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.net = nn.Sequential(*(layer for stage in cut_by_hand(case) for layer in stage))
        self.case = case
        self.stage_paths = [f"net.{k + 1}" for k in case.begins]  # behind the embedding

    def training_step(self, batch: Tensor, batch_idx: int = 0) -> Tensor:
        return loss_of(self.net(batch), batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.case.optimizer(self)


class _Embedding(nn.Module):
    def __init__(self, gpt: GPT2LMHeadModel) -> None:
        super().__init__()
        self.wte, self.wpe = gpt.transformer.wte, gpt.transformer.wpe

    def forward(self, tokens: Tensor) -> Tensor:
        return self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))


def cut_by_hand(case: Case) -> list[nn.Sequential]:
    """Return the stages that a user would cut for torch.distributed.pipelining."""
    gpt = make_gpt(case)
    ends = [0, *case.begins, case.depth]
    stages = [list(gpt.transformer.h[a:b]) for a, b in zip(ends, ends[1:], strict=False)]
    stages[0].insert(0, _Embedding(gpt))
    stages[-1] += [gpt.transformer.ln_f, gpt.lm_head]
    return [nn.Sequential(*layers) for layers in stages]
