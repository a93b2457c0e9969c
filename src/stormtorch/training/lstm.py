"""A recurrent classifier of sequences: one LSTM, one linear layer."""

import torch
from torch import nn


class LstmClassifier(nn.Module):
    """Scores of each class: sequences (N, T, inputs) become (N, classes), judged by the LSTM's last state.

    Args:
        inputs: Elements of each item of a sequence.
        classes: How many there are.
        width: Of the state.
    """

    def __init__(self, inputs: int, classes: int, *, width: int = 64) -> None:
        super().__init__()
        self.lstm = nn.LSTM(inputs, width, batch_first=True)
        self.head = nn.Linear(width, classes)

    def forward(self, sequences: torch.Tensor) -> torch.Tensor:
        """The state after the last item decides."""
        _, (last, _) = self.lstm(sequences)
        scores: torch.Tensor = self.head(last[-1])
        return scores
