"""A small net, sharded, and what tests of the engine ask of it: gradients, bytes, buckets and an oracle."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

import laconic
from laconic.comm.traffic import Level, Purpose, Snapshot
from laconic.layout.packing import plan_bucket
from laconic.ragged.spec import RaggedSpec
from laconic.ragged.tensor import RaggedTensor
from laconic.shard.bucket import Bucket
from laconic.shard.states import GatherState, UnitPhase
from laconic.shard.unit import unit_of
from tests.reference.step import Oracle


@dataclass(eq=False)
class Place:
    """A rank of a cluster without other ranks: enough for everything but communication."""

    num_nodes: int = 1
    num_local: int = 1
    node_rank: int = 0
    local_rank: int = 0
    mesh: str = "the mesh"
    device = torch.device("cpu")

    @property
    def size(self) -> int:
        return self.num_nodes * self.num_local

    @property
    def shard_index(self) -> int:
        return self.local_rank * self.num_nodes + self.node_rank


def places(num_nodes: int, num_local: int) -> list[Place]:
    """All ranks, in the order of the shards they own."""
    ranks = [Place(num_nodes, num_local, n, i) for n in range(num_nodes) for i in range(num_local)]
    return sorted(ranks, key=lambda place: place.shard_index)


def ragged(value: Tensor, num_shards: int, *, block: int = 1, bump: Any = None) -> list[RaggedTensor]:
    """Cut `value` over `num_shards` ranks of one node; return every rank's RaggedTensor."""
    specs = [specs_of([tuple(value.shape)], place, [block])[0] for place in places(1, num_shards)]
    return [RaggedTensor(spec.part_of(value).clone(), spec, bump=bump) for spec in specs]


def cut(value: Tensor, cluster: laconic.Cluster) -> RaggedTensor:
    """Cut `value` over a cluster by elements, so that parts begin and end within rows; return this rank's part."""
    return part_of(value.contiguous(), specs_of([tuple(value.shape)], cluster, [1])[0])


def part_of(value: Tensor, spec: RaggedSpec) -> RaggedTensor:
    """This rank's part of `value`, as a tensor of its own."""
    return RaggedTensor(spec.part_of(value).clone(), spec)


def specs_of(shapes: Sequence[tuple[int, ...]], cluster: Any, blocks: Sequence[int]) -> list[RaggedSpec]:
    """The specs of tensors in one bucket."""
    names = [f"t{index or ''}" for index in range(len(shapes))]
    layout = plan_bucket(names, shapes, blocks, num_shards=cluster.size, itemsize=16)
    return [RaggedSpec(cluster=cluster, layout=layout, index=index) for index in range(len(shapes))]


def whole(parts: list[RaggedTensor]) -> Tensor:
    """Join the tensor that `ragged` cut."""
    return torch.cat([part.to_local() for part in parts]).view(parts[0].shape)


class Block(nn.Module):
    """A residual MLP whose sizes divide nothing."""

    def __init__(self, d: int = 17, h: int = 29) -> None:
        super().__init__()
        self.up = nn.Linear(d, h)
        self.down = nn.Linear(h, d)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    """Input layer, blocks, output layer: each block is a unit, the rest belongs to the root."""

    make_block: type[nn.Module] = Block

    def __init__(self, num_blocks: int = 3, d: int = 17, h: int = 29) -> None:
        super().__init__()
        self.inp = nn.Linear(5, d)
        self.blocks = nn.ModuleList(self.make_block(d, h) for _ in range(num_blocks))
        self.out = nn.Linear(d, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def small_net() -> Any:
    """A net of one block."""
    return Net(1)


def partly_frozen() -> nn.Module:
    """A net whose second block is frozen."""
    net = Net()
    net.blocks[1].requires_grad_(False)
    return net


def build(make: Callable[[], nn.Module] = Net, *, seed: int = 0) -> nn.Module:
    """Build a model with the same values on every rank and in every process."""
    torch.manual_seed(seed)
    return make()


def shard(model: nn.Module, units: list[nn.Module] | None = None, **policies: Any) -> Any:
    """Call `fully_shard` on the units (default: `model.blocks`), then on the model, over torchrun's mesh."""
    mesh = policies.pop("mesh", None) or laconic.init_mesh("cpu")
    for unit in units if units is not None else list(model.blocks):  # type: ignore[arg-type]
        laconic.fully_shard(unit, mesh=mesh, **policies)
    return laconic.fully_shard(model, mesh=mesh, **policies)


def set_divide_factors(model: nn.Module, factor: float) -> None:
    """Set the divisor of gradients in every unit, as FSDP2's users do."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(factor)


def inputs(seed: int, rank: int, rows: int = 4, width: int = 5) -> tuple[Tensor, Tensor]:
    """Draw a rank's regression batch for `Net`."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(rows, width, generator=generator), torch.randn(rows, 3, generator=generator)


def squared_error(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return (model(x) - y).square().mean()


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, seed: int = 0) -> Tensor:
    """Take one step of `Net` on this rank's batch; gradients are None afterwards."""
    loss = squared_error(model, inputs(seed, dist.get_rank()))
    loss.backward()
    if optimizer is not None:
        optimizer.step()
    model.zero_grad()
    return loss.detach()


class FailsInBackward(torch.autograd.Function):
    """The identity, whose backward raises ZeroDivisionError."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        raise ZeroDivisionError


def full_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Gather every parameter's whole gradient. Collective."""
    return {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None}  # type: ignore[union-attr]


def full_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Gather every parameter, or copy it where it is plain. Collective."""
    whole: dict[str, Any] = dict(model.named_parameters())
    return {n: (p.full_tensor() if hasattr(p, "full_tensor") else p.clone()).detach() for n, p in whole.items()}


def buckets(*modules: nn.Module) -> list[Bucket]:
    """Return the buckets of all units below the modules."""
    units = [unit for module in modules for child in module.modules() if (unit := unit_of(child)) is not None]
    return [bucket for unit in units for bucket in unit.buckets]


def _piece_numel(level: Level, bucket: Bucket) -> int:
    """The elements that one rank sends on `level`: (R - 1) pieces, each a shard or a node shard."""
    n, loc, c = bucket.cluster.num_nodes, bucket.cluster.num_local, bucket.layout.shard_numel
    return {"node": (n - 1) * c, "local": (loc - 1) * n * c}[level]


def gather_bytes(level: Level, which: list[Bucket]) -> int:
    """Bytes one rank sends on `level` per gather of the buckets."""
    return sum(_piece_numel(level, bucket) * bucket.form.dtype.itemsize for bucket in which)


def reduce_bytes(level: Level, which: list[Bucket]) -> int:
    """Bytes one rank sends on `level` per reduction of the trainable buckets.

    Those of small ones are summed on both levels, in parts, which are gathered inside the node.
    """
    total = 0
    for bucket in which:
        itemsize, cut = bucket.reduce_dtype.itemsize, bucket.cluster.cut
        if cut is not None and not bucket.stored.is_frozen:
            numel, (rank, size) = bucket.layout.numel, cut.place_on("local")
            own_bytes = len(torch.arange(numel).tensor_split(size)[rank]) * itemsize
            inside = numel * itemsize + (size - 2) * own_bytes
            total += 2 * (cut.num_nodes - 1) * own_bytes // cut.num_nodes if level == "node" else inside
        elif not bucket.stored.is_frozen:
            total += _piece_numel(level, bucket) * itemsize
    return total


class Moved:
    """The bytes that one rank sent while a `moved` block ran."""

    snapshot: Snapshot

    def sent(self, level: Level, purpose: Purpose) -> int:
        sent = self.snapshot.total(level, purpose, "sent")
        assert sent == self.snapshot.total(level, purpose, "received")
        return sent

    @property
    def weights(self) -> int:
        return self.sent("node", "weights")

    @property
    def gradients(self) -> int:
        return self.sent("node", "gradients")


@contextmanager
def moved(model: Any) -> Iterator[Moved]:
    """Count the bytes that this rank sends in the body."""
    result, before = Moved(), model.traffic.snapshot()
    yield result
    result.snapshot = model.traffic.snapshot() - before


# -- against the oracle, and between steps -----------------------------------------------------------------------------

Batches = list[list[tuple[Tensor, Tensor]]]


def micro_batches(num: int, seed: int = 0) -> Batches:
    """Batches of `Net`, by micro-batch and rank."""
    return [[inputs(100 * seed + a, rank) for rank in range(dist.get_world_size())] for a in range(num)]


def accumulate(model: Any, batches: Any, loss: Any = squared_error) -> Tensor:
    """Run forward and backward on this rank's part of `batches[a][rank]`; only the last one sends gradients."""
    for number, batch in enumerate(batches):
        model.set_requires_gradient_sync(number == len(batches) - 1)
        value = loss(model, batch[dist.get_rank()])
        value.backward()
    return value.detach()


def oracle_of(model: Any, make: Callable[[], nn.Module] = Net, loss: Any = squared_error) -> Oracle:
    cluster = model._laconic_unit.cluster
    return Oracle(build(make), loss, num_nodes=cluster.num_nodes, num_local=cluster.num_local)


def assert_gradients(model: Any, oracle: Oracle, batches: Any, **tolerance: float) -> None:
    """Assert that the model's gradients for `batches[a][rank]` equal the oracle's."""
    _, want = oracle.gradients(batches)
    got = full_gradients(model)
    for name, parameter in oracle.parameters().items():
        if parameter.requires_grad:
            expected = want.get(name, torch.zeros_like(parameter))
            torch.testing.assert_close(got[name], expected, msg=lambda text, name=name: f"{name}: {text}", **tolerance)


def assert_nothing_gathered(model: Any) -> None:
    """Assert that every unit is resharded, shows its sharded parameters, and no full buffer but what stays is held."""
    for module in model.modules():
        unit = unit_of(module)
        if unit is not None:
            resting = {GatherState.IDLE, GatherState.WHOLE} if unit.gather.stays_whole else {GatherState.IDLE}
            assert unit.gather.state in resting, unit.name
            assert unit.phase is UnitPhase.REST, unit.name
            for bucket in unit.buckets:
                assert bucket.node_shard.is_whole or not bucket.full.nbytes, unit.name
    assert all(isinstance(p, laconic.RaggedTensor) for p in model.parameters())


def held_bytes(model: Any) -> int:
    """The bytes that a model holds between steps: its shards, and the weights that stay on the device."""
    shards = sum(bucket.shard.nbytes for bucket in buckets(model) if not bucket.stored.is_dropped)
    return shards + sum(
        bucket.node_shard.nbytes
        for bucket in buckets(model)
        if bucket.node_shard._memory is not None or (bucket.node_shard.is_whole and bucket.full.nbytes)
    )
