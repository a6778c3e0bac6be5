"""Units whose computation takes next to no time, for those who count or time what an engine does around it."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

WIDTH = 8


class Block(nn.Module):
    """A unit of nine tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(7))

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: (rows, WIDTH) -> (rows, WIDTH)."""
        y = self.norm(x)
        for layer in self.layers:
            y = layer(y)
        return x + y


KINDS: dict[str, Callable[[], nn.Module]] = {
    "one tensor": lambda: nn.Linear(WIDTH, WIDTH, bias=False),
    "nine tensors": Block,
}


def stack(kind: str, num_units: int) -> nn.Sequential:
    """So many units of a kind, and a layer behind them that is part of the root."""
    return nn.Sequential(*[KINDS[kind]() for _ in range(num_units)], nn.Linear(WIDTH, WIDTH))
