"""Recurrent models: a classifier of sequences, and one of each word of a sentence. One LSTM, one linear layer."""

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


class LstmTagger(nn.Module):
    """Scores of each class for each word: (N, T) integers become (N, T, classes), judged by what came before.

    Args:
        words: How many there are.
        classes: How many there are.
        embedding: Elements that a word becomes.
        width: Of the state.
    """

    def __init__(self, words: int, classes: int, *, embedding: int = 128, width: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, embedding)
        self.lstm = nn.LSTM(embedding, width, batch_first=True)
        self.head = nn.Linear(width, classes)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """The state after each word decides."""
        states, _ = self.lstm(self.embedding(words))
        scores: torch.Tensor = self.head(states)
        return scores
