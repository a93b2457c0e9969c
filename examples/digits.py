"""Parts that the examples share: small pictures of digits, a model for them, and a line about the result."""

import hashlib

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset


def load() -> tuple[TensorDataset, TensorDataset]:
    """Returns pictures for training and for testing: scikit-learn's digits if installed, else ten noisy shapes."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        generator = torch.Generator().manual_seed(0)
        labels = torch.arange(1797) % 10
        shapes = torch.rand(10, 64, generator=generator).round()
        pictures = shapes[labels] + 0.5 * torch.randn(1797, 64, generator=generator)
    else:
        data = load_digits()
        pictures, labels = torch.tensor(data.data / 16.0, dtype=torch.float32), torch.tensor(data.target)
    return TensorDataset(pictures[:1500], labels[:1500]), TensorDataset(pictures[1500:], labels[1500:])


def make_model(seed: int) -> nn.Module:
    """Makes a small network. Each rank may pass a different seed: DDP and prepare() start from rank 0's parameters."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


@torch.no_grad()
def report(model: nn.Module, test: TensorDataset) -> None:
    """Prints, on rank 0, the backend, loss and accuracy, and whether all ranks have bit-identical parameters."""
    pictures, labels = test.tensors
    answers = model(pictures)
    loss = nn.functional.cross_entropy(answers, labels).item()
    accuracy = (answers.argmax(1) == labels).float().mean().item()
    content = b"".join(parameter.numpy().tobytes() for parameter in model.parameters())
    replicas: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(replicas, hashlib.sha256(content).hexdigest())
    if dist.get_rank() == 0:
        verdict = "identical" if len(set(replicas)) == 1 else "DIFFERENT"
        print(
            f"backend {dist.get_backend()}, {len(replicas)} ranks: loss {loss:.3f}, accuracy {accuracy:.1%}, "
            f"replicas {verdict}",
            flush=True,
        )
