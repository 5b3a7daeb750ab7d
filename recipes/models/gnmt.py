"""GNMT: translation by two stacks of LSTMs with attention between them.

Shapes: N sentences, S words of the source, T words of the target, E features.
Source: Wu et al., "Google's Neural Machine Translation System", arXiv 1609.08144, in the form of
MLPerf's benchmark that PipeDream and PipeOptim train: the first LSTM of the encoder reads in both
directions, the first one of the decoder asks the attention, all others get its answer.
"""

from __future__ import annotations

import math
from typing import final

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

PAD = 0


@final
class BothWays(nn.Module):
    """Read each sentence forwards and, from its last word, backwards."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Map (N, S, E) and the lengths (N,) to (N, S, 2E)."""
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(
            self.lstm(packed)[0], batch_first=True, total_length=x.shape[1]
        )[0]


@final
class Recurrent(nn.Module):
    """Dropout, an LSTM and, where the shapes allow it, a residual connection.

    Args:
        inputs: Features of the layer before.
        context: Features of the attention's answer, which is put behind the input; may be 0.
        width: Features of the result, E.
        dropout: Share of the input that is dropped.
        residual: Add the input to the result.
    """

    def __init__(
        self, inputs: int, width: int, *, dropout: float, context: int = 0, residual: bool = True
    ) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.lstm = nn.LSTM(inputs + context, width, batch_first=True)
        self.residual = residual

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """Map (N, T, inputs), and the context (N, T, context), to (N, T, E)."""
        inputs = self.dropout(x)
        if context is not None:
            inputs = torch.cat([inputs, context], dim=-1)
        outputs = self.lstm(inputs)[0]
        return outputs + x if self.residual else outputs


@final
class AdditiveAttention(nn.Module):
    """Bahdanau's attention, its weights normalised.

    Source: Bahdanau et al., arXiv 1409.0473, section A.1.2; the normalisation is that of Salimans
    and Kingma, "Weight Normalization", arXiv 1602.07868.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.direction = nn.Parameter(torch.empty(width).uniform_(-1, 1) / math.sqrt(width))
        self.length = nn.Parameter(torch.tensor(1 / math.sqrt(width)))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, queries: Tensor, memory: Tensor, words: Tensor) -> Tensor:
        """Map queries (N, T, E) to weighted means of the memory (N, S, E).

        Args:
            queries: One for each word of the target.
            memory: One row for each word of the source.
            words: Which rows are words and no padding, (N, S).
        """
        sums = self.query(queries).unsqueeze(2) + self.key(memory).unsqueeze(1) + self.bias
        weights = self.direction / self.direction.norm() * self.length
        scores = torch.tanh(sums) @ weights  # (N, T, S)
        scores = scores.masked_fill(~words.unsqueeze(1), -torch.inf)
        return scores.softmax(dim=-1) @ memory


@final
class GNMT(nn.Module):
    """Map sentences, and the beginnings of their translations, to the next words' logits.

    Args:
        vocab_size: Number of words or pieces of words, for both languages.
        layers: LSTMs of the encoder, and as many of the decoder: 4 in GNMT-8, 8 in GNMT-16.
        width: Features of a word and of a state, E.
        dropout: Share that each layer drops of its input.
    """

    def __init__(
        self, *, vocab_size: int, layers: int = 4, width: int = 1024, dropout: float = 0.2
    ) -> None:
        super().__init__()
        if layers < 2:
            raise ValueError(f"GNMT has {layers} layers on each side; allowed: 2 and more")
        self.source = nn.Embedding(vocab_size, width, padding_idx=PAD)
        self.both_ways = BothWays(width)
        self.encoder = nn.ModuleList(
            Recurrent(
                2 * width if index == 0 else width, width, dropout=dropout, residual=index > 0
            )
            for index in range(layers - 1)
        )
        self.target = nn.Embedding(vocab_size, width, padding_idx=PAD)
        self.asking = nn.LSTM(width, width, batch_first=True)
        self.attention = AdditiveAttention(width)
        self.decoder = nn.ModuleList(
            Recurrent(width, width, dropout=dropout, context=width, residual=index > 0)
            for index in range(layers - 1)
        )
        self.logits = nn.Linear(width, vocab_size)
        self.apply(_initialise)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Map source (N, S) and target (N, T) to logits (N, T, vocab_size)."""
        return self.decode(self.encode(source), source, target)

    def encode(self, source: Tensor) -> Tensor:
        """Map source (N, S) to the memory (N, S, E)."""
        x = self.both_ways(self.source(source), (source != PAD).sum(dim=1))
        for layer in self.encoder:
            x = layer(x)
        return x

    def decode(self, memory: Tensor, source: Tensor, target: Tensor) -> Tensor:
        """Map the memory (N, S, E) and target (N, T) to logits (N, T, vocab_size)."""
        x = self.asking(self.target(target))[0]
        context = self.attention(x, memory, source != PAD)
        for layer in self.decoder:
            x = layer(x, context)
        return self.logits(x)


def _initialise(module: nn.Module) -> None:
    """Draw LSTMs and embeddings between -0.04 and 0.04, as GNMT does."""
    if isinstance(module, nn.LSTM | nn.Embedding):
        for parameter in module.parameters():
            nn.init.uniform_(parameter, -0.04, 0.04)
