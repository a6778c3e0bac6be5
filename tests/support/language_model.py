"""A small language model and its data, for the tests with other trainers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY, LENGTH = 29, 9


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 23), nn.Linear(23, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x)))).cumsum(-2) / LENGTH


class LanguageModel(nn.Module):
    """Odd sizes, a tied head, a buffer, and vectors that are shorter than the number of ranks would like."""

    def __init__(self, width: int = 14, num_layers: int = 3) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(num_layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        self.temperature = nn.Parameter(torch.ones(1))
        self.head.weight = self.tokens.weight
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)) * self.scale * self.temperature


def make_model(seed: int = 0) -> LanguageModel:
    torch.manual_seed(seed)
    return LanguageModel()


def make_rows(number: int, seed: int = 0) -> Tensor:
    """Return rows of token numbers with some order in them, (number, LENGTH + 1)."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(VOCABULARY, (number, 1), generator=generator)
    steps = torch.randint(1, 4, (number, 1), generator=generator)
    return (starts + steps * torch.arange(LENGTH + 1)) % VOCABULARY


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    return functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def decay_groups(model: nn.Module) -> list[dict]:
    """Two groups for an optimizer: matrices with weight decay, the rest without."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    rest = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
