"""Parts that the scripts of this folder share: a small GPT, a small network for pictures, text and pictures."""

import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset


class Block(nn.Module):
    """Attention and a feed-forward network, each behind a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attend, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Adds what both find to their input."""
        batch, tokens, width = x.shape
        parts = self.attend(self.norms[0](x)).view(batch, tokens, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mix(seen.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.feed(self.norms[1](x))


class GPT(nn.Module):
    """A GPT whose tokens are bytes."""

    def __init__(self, layers: int = 2, width: int = 64, heads: int = 4, context: int = 64) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        self.head.weight = self.tokens.weight  # tied, as in GPT-2
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, given: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores the next byte after each byte, and returns the loss too."""
        x = self.tokens(given) + self.places(torch.arange(given.shape[1], device=given.device))
        scores = self.head(self.norm(self.blocks(x)))
        return scores, functional.cross_entropy(scores.flatten(0, 1), wanted.flatten())


def text(path: Path | None, most_bytes: int = 1 << 20) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns bytes to learn from and bytes held out: of a file, or of Python's own source, which is everywhere."""
    if path is not None:
        content = path.read_bytes()
    else:
        library = Path(sysconfig.get_path("stdlib"))
        content = b"".join(each.read_bytes() for each in sorted(library.glob("*.py")))
    held = torch.frombuffer(bytearray(content[:most_bytes]), dtype=torch.uint8).long()
    return held[: len(held) * 9 // 10], held[len(held) * 9 // 10 :]


def windows(data: torch.Tensor, count: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws sequences at random, and returns them with the tokens that follow each token."""
    starts = torch.randint(len(data) - length - 1, (count,))
    drawn = torch.stack([data[start : start + length + 1] for start in starts])
    return drawn[:, :-1], drawn[:, 1:]


def pictures() -> tuple[TensorDataset, TensorDataset]:
    """Returns pictures of 8 x 8 for training and for validation: scikit-learn's digits, or noisy shapes without it."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        generator = torch.Generator().manual_seed(0)
        labels = torch.arange(1797) % 10
        shapes = torch.rand(10, 64, generator=generator).round()
        found = shapes[labels] + 0.5 * torch.randn(1797, 64, generator=generator)
    else:
        data = load_digits()
        found, labels = torch.tensor(data.data / 16.0, dtype=torch.float32), torch.tensor(data.target)
    found = found.view(-1, 1, 8, 8)
    return TensorDataset(found[:1500], labels[:1500]), TensorDataset(found[1500:], labels[1500:])


def convolutions() -> nn.Module:
    """Makes a small convolutional network with batch normalisation."""

    def layer(inside: int, outside: int) -> list[nn.Module]:
        return [nn.Conv2d(inside, outside, 3, padding=1, bias=False), nn.BatchNorm2d(outside), nn.ReLU()]

    return nn.Sequential(*layer(1, 16), *layer(16, 32), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(512, 10))
