"""Small networks and synthetic data that the programs share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

N_CLASSES = 10


def digits(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return images (n, 1, 16, 16) of ten prototypes with shifts and noise, and their labels."""
    generator = torch.Generator().manual_seed(seed)
    prototypes = torch.randn(N_CLASSES, 1, 16, 16, generator=torch.Generator().manual_seed(7))
    labels = torch.randint(N_CLASSES, (n,), generator=generator)
    shifts = torch.randint(-2, 3, (n,), generator=generator)
    images = [
        torch.roll(prototypes[label], int(shift), 2)
        for label, shift in zip(labels, shifts, strict=True)
    ]
    return torch.stack(images) + 0.3 * torch.randn(n, 1, 16, 16, generator=generator), labels


def loader(seed: int, n: int = 256, batch_size: int = 32) -> DataLoader[Any]:
    """Return a loader of digits in random order."""
    return DataLoader(TensorDataset(*digits(n, seed)), batch_size=batch_size, shuffle=True)


def sequences(n: int, length: int = 12, vocabulary: int = 32, seed: int = 0) -> Tensor:
    """Return token ids (n, length) that count upwards from a random start."""
    starts = torch.randint(vocabulary, (n, 1), generator=torch.Generator().manual_seed(seed))
    return (starts + torch.arange(length)) % vocabulary


class ConvNet(nn.Module):
    """Two convolutions with batch norm and dropout, and a linear layer."""

    def __init__(self, p: float = 0.1) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(1, 8, 3, 2), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 16, 3, 2), nn.BatchNorm2d(16)
        self.dropout = nn.Dropout(p)
        self.fc = nn.Linear(16 * 9, N_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (n, 10)."""
        x = functional.relu(self.bn1(self.conv1(x)))
        x = functional.relu(self.bn2(self.conv2(x)))
        logits: Tensor = self.fc(self.dropout(x.flatten(1)))
        return logits


class Attention(nn.Module):
    """Causal attention; `always_drops` passes the rate of dropout in evaluation mode too."""

    def __init__(self, width: int, p: float, *, always_drops: bool) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.p, self.always_drops = p, always_drops

    def forward(self, x: Tensor) -> Tensor:
        """Return (batch, length, width)."""
        n, length, width = x.shape
        q, k, v = self.qkv(x).view(n, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        p = self.p if self.training or self.always_drops else 0.0
        mixed = functional.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        found: Tensor = self.out(mixed.transpose(1, 2).reshape(n, length, width))
        return found


class LanguageModel(nn.Module):
    """A transformer of two layers."""

    def __init__(
        self, vocabulary: int = 32, width: int = 32, *, always_drops: bool = False
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.attentions = nn.ModuleList(
            Attention(width, 0.1, always_drops=always_drops) for _ in range(2)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits (batch, length, vocabulary)."""
        x = self.embedding(ids)
        for norm, attention in zip(self.norms, self.attentions, strict=True):
            x = x + attention(norm(x))
        logits: Tensor = self.head(x)
        return logits


def language_loss(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the loss of predicting each next token."""
    logits = model(ids[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def epochs(data: DataLoader[Any], n: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches of `n` passes over the data."""
    for _ in range(n):
        yield from data


def backward(loss: Any) -> None:
    """Run the backward pass of a loss."""
    loss.backward()


@torch.no_grad()
def evaluate(model: nn.Module, data: DataLoader[Any]) -> float:
    """Return the mean loss of the data in evaluation mode, and go back to training mode."""
    model.eval()
    losses = [functional.cross_entropy(model(x), y).item() for x, y in data]
    model.train()
    return sum(losses) / len(losses)
