"""A recurrent model that classifies each word of a sentence: one LSTM, one linear layer."""

import torch
from torch import nn


class LstmTagger(nn.Module):
    """Model that scores each class for each word, given the words before it: (N, T) integers become (N, T, classes).

    Args:
        words: Number of different words.
        classes: Number of classes.
        embedding: Width of the embedding of a word.
        width: Width of the LSTM's state.
    """

    def __init__(self, words: int, classes: int, *, embedding: int = 128, width: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, embedding)
        self.lstm = nn.LSTM(embedding, width, batch_first=True)
        self.head = nn.Linear(width, classes)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Score the classes by the state after each word."""
        states, _ = self.lstm(self.embedding(words))
        scores: torch.Tensor = self.head(states)
        return scores
