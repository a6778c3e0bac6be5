"""A model of tensors that are awkward to store, trained and gathered under any sharding."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import laconic
from laconic.checkpoint import state
from laconic.layout.packing import plan_bucket
from laconic.ragged.redistribute import whole_on
from laconic.ragged.spec import RaggedSpec
from laconic.ragged.tensor import RaggedTensor


class Zoo(nn.Module):
    """Sizes that divide nothing, tied weights, buffers, and a frozen unit.

    With `odd` also a scalar and an empty parameter, which FSDP2 refuses.
    """

    seen: Tensor

    def __init__(self, *, odd: bool = True, hidden: int = 13) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 7)
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.up = nn.Linear(7, hidden)
        self.down = nn.Linear(hidden, 7, bias=False)
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.embed.weight
        self.gain = nn.Parameter(torch.tensor(1.5)) if odd else 1.5
        self.nothing = nn.Parameter(torch.empty(0, 5)) if odd else None
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        self.seen += 1
        x = self.frozen(self.embed(tokens))
        x = x + self.down(torch.tanh(self.up(x)))
        return self.head(x * self.gain)


def make_small(hidden: int = 13) -> nn.Module:
    """Build a model with sizes that no number of ranks divides, a bias of one element, and dropout."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Sequential(nn.Linear(7, hidden), nn.Tanh(), nn.Dropout(0.2)),
        nn.Sequential(nn.LayerNorm(hidden), nn.Linear(hidden, 1)),
    )


def make_zoo(*, seed: int, odd: bool = True, hidden: int = 13) -> Zoo:
    torch.manual_seed(seed)
    return Zoo(odd=odd, hidden=hidden)


def shard(model: Zoo, granularity: Any = None) -> Zoo:
    mesh = laconic.init_mesh("cpu")
    for unit, cache in ((model.frozen, "device"), (model.up, "host"), (model, "none")):
        laconic.fully_shard(unit, mesh=mesh, cache=cache, granularity=granularity)
    return model


def shard_fsdp2(model: Zoo) -> Zoo:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for unit in (model.frozen, model.up, model):
        fully_shard(unit, mesh=mesh)
    return model


TOKENS = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 10]])


def train(model: Zoo, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for _ in range(steps):
        logits = model(TOKENS)
        nn.functional.cross_entropy(logits.flatten(0, 1), TOKENS.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


def logits(model: Zoo) -> Tensor:
    with torch.no_grad():
        return model(TOKENS).clone()


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the tensors of an optimizer's state by `NAME.KEY`."""
    return {
        f"{name}.{key}": value
        for name, entries in state.optimizer_state(model, optimizer).items()
        for key, value in entries.items()
        if isinstance(value, Tensor)
    }


def whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the gathered parameters, buffers and optimizer state."""
    tensors: dict[str, Any] = state.model_tensors(model) | optimizer_tensors(model, optimizer)
    return {name: (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().clone() for name, t in tensors.items()}


class Hoarder(torch.optim.Optimizer):
    """An optimizer with state of every kind that laconic's optimizers have, made by `init_state`.

    Some tensors are like the parameter, of another shape, whole on one rank, or replicated; others are numbers.
    """

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def init_state(self, parameter: Tensor) -> None:
        rows = max(1, parameter.shape[0] if parameter.ndim else 1)
        kept: dict[str, Any] = {"step": torch.zeros(()), "table": torch.zeros(2, 3), "count": 0}
        kept["momentum"] = torch.zeros_like(parameter, requires_grad=False)
        if isinstance(parameter, RaggedTensor):
            spec = parameter.spec
            owner = parameter.numel() % spec.layout.num_shards
            layout = plan_bucket(["rows"], [(rows,)], [1], num_shards=spec.layout.num_shards, itemsize=4)
            kept["whole"] = _zeros(whole_on(spec, owner))
            kept["rows"] = _zeros(RaggedSpec(cluster=spec.cluster, layout=layout, index=0))
        else:
            kept["whole"], kept["rows"] = torch.zeros(parameter.shape), torch.zeros(rows)
        self.state[parameter] = kept

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if not self.state[parameter]:
                    self.init_state(parameter)
                kept = self.state[parameter]
                kept["step"] += 1
                kept["count"] += 2
                kept["momentum"] += parameter.grad
                kept["table"] += torch.arange(6).view(2, 3) / 7
                for key in ("whole", "rows"):
                    _count_up(kept[key])
                parameter -= group["lr"] * kept["momentum"]


def _zeros(spec: RaggedSpec) -> RaggedTensor:
    return RaggedTensor(torch.zeros(spec.extent.numel if spec.extent else 0), spec)


def _count_up(tensor: Tensor) -> None:
    """Give every element another number, on whichever rank it is."""
    whole = torch.arange(tensor.numel(), dtype=torch.float32).view(tensor.shape) + 0.25
    tensor += whole
