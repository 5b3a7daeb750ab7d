"""A stack of LSTMs with residual connections that judges a text.

Shapes: N texts, T words, E features.
Source: the sentiment task of SpecTrain's code, github.com/ntueclab/SpecTrain-PyTorch.
"""

from __future__ import annotations

from typing import final

from torch import Tensor, nn


@final
class ResidualLSTM(nn.Module):
    """Add an LSTM's projected output to its input."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, hidden, batch_first=True)
        self.projection = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, T, E) to (N, T, E)."""
        return x + self.projection(self.lstm(x)[0])


@final
class MeanOverTime(nn.Module):
    """Average over the words."""

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, T, E) to (N, E)."""
        return x.mean(dim=1)


def residual_lstm(
    *, vocab_size: int, num_classes: int, blocks: int = 4, width: int = 128, hidden: int = 128
) -> nn.Sequential:
    """Make a classifier of texts: embedding, LSTMs, mean over time, logits.

    Args:
        vocab_size: Number of words.
        num_classes: Number of logits.
        blocks: Number of LSTMs.
        width: Features of a word, E.
        hidden: Features of an LSTM's state.
    """
    lstms = [ResidualLSTM(width, hidden) for _ in range(blocks)]
    head = nn.Sequential(MeanOverTime(), nn.Linear(width, num_classes))
    return nn.Sequential(nn.Embedding(vocab_size, width), *lstms, head)
