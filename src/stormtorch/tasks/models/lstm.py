"""A recurrent model that judges each word of a sentence: one LSTM, one linear layer."""

import torch
from torch import nn


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
