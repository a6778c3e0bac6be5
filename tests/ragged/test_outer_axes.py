"""DTensors over several outer axes (experts x tensors) or over the axes of fully_shard."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import laconic
from laconic.checkpoint import load_checkpoint, save_checkpoint
from laconic.comm import collectives
from laconic.ragged.dtensor import whole_of
from tests.support.launch import on_ranks, run_ranks
from tests.support.sharded_net import Block, assert_nothing_gathered, build, full_gradients, full_parameters

R = Replicate()
PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}
CUT = {
    "up": (Shard(0), Shard(2)),
    "down": (Shard(0), Shard(1)),
    "scale": (Shard(0), Shard(0)),
    "shift": (Shard(0), Shard(0)),
    "offset": (R, Shard(0)),
    "bias": (R, R),
}
"""The experts' placements over ("ep", "tp"). Hardly a size divides; three ranks of the four have no part of `shift`."""
OTHER_CUT = {"up": (Shard(1), Shard(0)), "down": (Shard(2), R), "scale": (R, Shard(0)), "shift": (R, R)}


class Experts(nn.Module):
    """The sum of all experts, each a small MLP; every rank of ("ep", "tp") computes a part of the sum."""

    def __init__(self, num: int = 3, d: int = 7, h: int = 5) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(num, d, h)), nn.Parameter(torch.randn(num, h, d))
        self.scale, self.shift = nn.Parameter(torch.randn(d)), nn.Parameter(torch.randn(1, d))
        self.offset, self.bias, self.gain = (nn.Parameter(torch.randn(d)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        up, down, scale, shift, offset, bias = (getattr(self, name) for name in CUT)
        if not isinstance(up, DTensor):
            return self.gain * (_mlps(x, up, down) * scale + shift + offset + bias)
        mesh = up.device_mesh
        x = DTensor.from_local(x, mesh, [R, R], run_check=False).to_local(grad_placements=[Partial(), Partial()])
        terms = DTensor.from_local(_mlps(x, up.to_local(), down.to_local()), mesh, [Partial(), Partial()])
        scale, shift, offset, bias = (whole_of(parameter) for parameter in (scale, shift, offset, bias))
        return self.gain * (whole_of(terms) * scale + shift + offset + bias)


def _mlps(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return torch.einsum("beh,ehd->bd", torch.einsum("bd,edh->beh", x, up).relu(), down)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp, self.block, self.experts, self.out = nn.Linear(5, 7), Block(7, 10), Experts(), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.experts(self.block(self.inp(x))))


def distribute(module: nn.Module, mesh: DeviceMesh, cut: dict[str, tuple[Placement, ...]]) -> None:
    """Replace parameters of `module` by DTensors over `mesh`."""
    for name, placements in cut.items():
        place, _, last = name.rpartition(".")
        owner = module.get_submodule(place)
        whole = owner.get_parameter(last).detach()
        setattr(owner, last, nn.Parameter(distribute_tensor(whole, mesh, placements, src_data_rank=None)))


def mixture(mesh: DeviceMesh, cut: dict[str, tuple[Placement, ...]], *, seed: int = 0) -> Any:
    """`Mixture` with experts over ("ep", "tp") and a block over ("tp",) in one unit over ("dp",); the rest over all."""
    model: Any = build(Mixture, seed=seed)
    parallelize_module(model.block, mesh["tp"], PLAN)
    distribute(model.experts, mesh["ep", "tp"], cut)
    laconic.fully_shard([model.block, model.experts], mesh=mesh["dp"])
    return laconic.fully_shard(model, mesh=laconic.init_mesh("cpu", local=1))


def assert_equal_steps(
    models: list[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    losses: list[Callable[[int], Tensor]],
    steps: int = 1,
) -> None:
    """Train the sharded and the plain model for `steps`; compare gradients, norms and parameters."""
    model, plain = models
    for step in range(steps):
        for loss in losses:
            loss(step).backward()
        for name, value in full_gradients(model).items():
            want = plain.get_parameter(name).grad
            torch.testing.assert_close(value, want, msg=lambda text, name=name: f"{name}: {text}")
        for settings in ({"norm_type": float("inf"), "foreach": True}, {"foreach": False}):
            norms = [nn.utils.clip_grad_norm_(net.parameters(), 0.1, **settings) for net in models]  # type: ignore[arg-type]
            torch.testing.assert_close(norms[0], norms[1])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_nothing_gathered(model)
    assert_equal_parameters(model, plain)


def assert_equal_parameters(model: nn.Module, plain: nn.Module) -> None:
    for name, value in full_parameters(model).items():
        torch.testing.assert_close(value, plain.get_parameter(name), msg=lambda text, name=name: f"{name}: {text}")


def rows(step: int, replica: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(10 * step + replica))


def plain_loss(plain: nn.Module, step: int, replicas: int, *shape: int) -> Tensor:
    return torch.stack([plain(rows(step, r, *shape)).square().mean() for r in range(replicas)]).mean()


def check_messages(model: Any, messages: list[Any]) -> None:
    """Clipping sends one message over each cluster, and one along each outer axis of each kind of DTensor."""
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = len(messages)
    total = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    sent = [(name, numel) for rank, name, numel in messages[before:] if rank == dist.get_rank()]
    # over all ranks and over dp: one trip each; tp of the block, ep and tp of the experts
    assert sorted(sent) == [("reduce", 4), ("reduce", 6), ("reduce", 6), ("send", 4), ("send", 11)]
    torch.testing.assert_close(total, torch.tensor(float(sum(p.numel() for p in model.parameters()))).sqrt())
    model.zero_grad()


def check_found_inf(model: Any) -> None:
    gradients = [torch.ones_like(parameter) for parameter in model.experts.parameters()]
    found = torch.zeros(1)
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, torch.ones(1))
    assert not found
    if dist.get_rank() == 5:
        held = next(each.to_local() for each in gradients if each.to_local().numel())  # type: ignore[attr-defined]
        held[-1] = float("inf")
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, torch.ones(1))
    assert found


def check_random_fills(model: Any) -> None:
    for name in ("up", "scale", "offset", "gain"):
        parameter = model.experts.get_parameter(name)
        want = torch.empty(parameter.shape)
        for tensor in (parameter, want):
            torch.manual_seed(2)
            nn.init.trunc_normal_(tensor, 0.0, 1.0, 0.5, 4.0)
        assert torch.equal(parameter.full_tensor(), want)


MESSAGES: list[tuple[int, str, int]] = []
"""(rank, call, elements for each peer) of collectives of all ranks."""


def test_experts_cut_over_two_axes_train_as_the_unsharded_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    send, reduce = collectives.start_to_all, dist.all_reduce

    def counting_send(group: Any, ticket: Any, arriving: Tensor, rows: Tensor) -> Any:
        MESSAGES.append((dist.get_rank(), "send", rows.shape[1]))
        return send(group, ticket, arriving, rows)

    def counting_reduce(tensor: Tensor, *args: Any, **arguments: Any) -> Any:
        MESSAGES.append((dist.get_rank(), "reduce", tensor.numel()))
        return reduce(tensor, *args, **arguments)

    monkeypatch.setattr(collectives, "start_to_all", counting_send)
    monkeypatch.setattr(dist, "all_reduce", counting_reduce)
    run_ranks(job_experts, 8, tmp_path, local=1)


def job_experts(tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "ep", "tp"))
    model, plain = mixture(mesh, CUT), build(Mixture)
    own, outer = mesh.get_local_rank("dp"), {"up": 2, "scale": 2, "bias": 2, "gain": 0}
    for name, axes in outer.items():
        spec = model.experts.get_parameter(name).spec
        assert len(spec.outer_groups) == axes
        assert spec.layout.num_shards == 2
        assert axes == 0 or spec.slot.shape == spec.dtensor.local_shape
    optimizers = [torch.optim.AdamW(net.parameters(), lr=0.01) for net in (model, plain)]
    losses: list[Callable[[int], Tensor]] = [
        lambda step: model(rows(step, own, 4, 5)).square().mean(),
        lambda step: plain_loss(plain, step, 2, 4, 5),
    ]
    assert_equal_steps([model, plain], optimizers, losses)
    save_checkpoint(tmp_path, 1, model=model, optimizer=optimizers[0], extra={})
    check_messages(model, MESSAGES)
    check_found_inf(model)
    check_random_fills(model)

    again = mixture(mesh, OTHER_CUT, seed=1)
    optimizer = torch.optim.AdamW(again.parameters(), lr=0.01)
    load_checkpoint(tmp_path, model=again, optimizer=optimizer)
    assert_equal_parameters(again, plain)
    for parameter, want in zip(again.parameters(), plain.parameters(), strict=True):
        moment = optimizer.state[parameter]["exp_avg"].full_tensor()
        torch.testing.assert_close(moment, optimizers[1].state[want]["exp_avg"])


# -- DTensors over the axes of fully_shard -----------------------------------------------------------------------------


# torch 2.11 has no such class
DataParallelMeshDims = getattr(torch.distributed.fsdp, "DataParallelMeshDims", SimpleNamespace)
BLOCK_CUT = {"up.weight": Shard(0), "up.bias": Shard(0), "down.weight": Shard(1), "down.bias": R}


def two_blocks() -> nn.Module:
    return nn.Sequential(Block(5, 9), Block(5, 9))


@on_ranks(4, local=1)
def test_plain_tensors_are_repeated_to_the_part_of_a_rank() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model: Any = build(two_blocks)[0]
    parallelize_module(model, mesh["tp"], PLAN)
    laconic.fully_shard(model, mesh=mesh["dp"])
    for weight in (model.up.weight.detach(), model.down.weight.detach()):
        row, column = torch.arange(weight.shape[1]), torch.arange(weight.shape[0]).unsqueeze(1)
        for other in (row, column):
            assert torch.equal((weight + other).full_tensor(), weight.full_tensor() + other)


@pytest.mark.heavy
@on_ranks(4, local=1)
def test_dtensors_over_the_axes_that_dp_mesh_dims_names(tmp_path: Path) -> None:
    """Blocks whose parameters and inputs are DTensors over the whole mesh; the axis "other" cuts rows or matrices."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("other", "data"))
    for replicate in (None, "other"):
        is_parallel = replicate is None
        batch_cut = (R if is_parallel else Shard(0), Shard(0))
        replica, num_replicas = (mesh.get_local_rank("data"), 2) if is_parallel else (dist.get_rank(), 4)
        model: Any = build(two_blocks)
        plain = copy.deepcopy(model)
        for unit in (*model, model):
            if unit is not model:
                distribute(unit, mesh, {name: (cut if is_parallel else R, R) for name, cut in BLOCK_CUT.items()})
            dims = DataParallelMeshDims(shard="data", replicate=replicate)
            laconic.fully_shard(unit, mesh=mesh, dp_mesh_dims=dims)
        spec = model[0].up.weight.spec
        assert spec.dtensor.outer_axes == ((0,) if is_parallel else ())
        assert (spec.cluster.num_islands, spec.cluster.size) == ((1, 2) if is_parallel else (2, 2))

        def loss(step: int, model: Any = model, replica: int = replica, cut: Any = batch_cut) -> Tensor:
            output = model(DTensor.from_local(rows(step, replica, 4, 5), mesh, cut, run_check=False))
            return output.redistribute(placements=cut).to_local().square().mean()

        def wanted(step: int, plain: Any = plain, num_replicas: int = num_replicas) -> Tensor:
            return plain_loss(plain, step, num_replicas, 4, 5)

        optimizers = [torch.optim.AdamW(net.parameters(), lr=0.01) for net in (model, plain)]
        assert_equal_steps([model, plain], optimizers, [loss, wanted], steps=2)
        dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / str(is_parallel))
        other = laconic.fully_shard(build(two_blocks, seed=1), mesh=laconic.init_mesh("cpu", local=1))
        dcp.load({"model": other.state_dict()}, checkpoint_id=tmp_path / str(is_parallel))
        assert_equal_parameters(other, plain)


@on_ranks(4, local=1)
def test_axes_by_name_and_dtensors_that_cannot_be_cut() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    shard_dp = SimpleNamespace(shard="dp", replicate=None)
    for placements in ([R, Partial()], [Partial(), Shard(0)], [R, _StridedShard(0, split_factor=2)]):
        module = nn.Linear(3, 3)
        module.weight = nn.Parameter(DTensor.from_local(torch.ones(3, 3), mesh, placements, run_check=False))
        with pytest.raises(ValueError, match=r"weight is a DTensor with placements .*; fully_shard cuts DTensors"):
            laconic.fully_shard(module, mesh=mesh, dp_mesh_dims=shard_dp)
    module = build(lambda: nn.Linear(3, 3))
    whole = module.weight.detach()
    distribute(module, mesh, {"weight": (R, Shard(0))})
    with pytest.raises(ValueError, match=r"over ranks \[0, 1, 2, 3\], which are .* or name its axes in dp_mesh_dims"):
        laconic.fully_shard(module, mesh=mesh["dp"])
    for dims in (SimpleNamespace(shard="tp", replicate=None), SimpleNamespace(shard=("dp", "tp"), replicate=None)):
        with pytest.raises(ValueError, match=r"over axes \('dp', 'tp'\); along the axes over which fully_shard cuts"):
            laconic.fully_shard(module, mesh=mesh, dp_mesh_dims=dims)
    with pytest.raises(NotImplementedError, match="names no axis to cut over"):
        laconic.fully_shard(module, mesh=mesh, dp_mesh_dims=SimpleNamespace(shard=None, replicate="dp"))
    for names in ({"shard": "ep", "replicate": None}, {"shard": "dp", "replicate": "dp"}):
        with pytest.raises(ValueError, match=r"must name axes of the mesh, each once; its axes are \('dp', 'tp'\)"):
            laconic.fully_shard(module, mesh=mesh, dp_mesh_dims=SimpleNamespace(**names))
    for other in (
        init_device_mesh("cpu", (4,), mesh_dim_names=("tp",)),
        DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("dp", "tp")),
    ):
        layer = nn.Linear(3, 3)
        distribute(layer, other, {"weight": (R,) * other.ndim})
        with pytest.raises(ValueError, match=r"weight is a DTensor over another mesh, .*, than fully_shard got beside"):
            laconic.fully_shard(layer, mesh=mesh, dp_mesh_dims=shard_dp)
    layer = nn.Linear(3, 3)
    distribute(layer, mesh["tp"], {"weight": (Shard(0),)})
    laconic.fully_shard(layer, mesh=mesh, dp_mesh_dims=shard_dp)
    laconic.fully_shard(module, mesh=mesh, dp_mesh_dims=shard_dp)
    assert torch.equal(module.weight.full_tensor(), whole)  # type: ignore[operator]
    # the places of this rank among those that cut and those that replicate, for axes in any order
    first, second = mesh.get_local_rank("dp"), mesh.get_local_rank("tp")
    for shard, replicate, want in (
        (("dp", "tp"), None, (1, 0, 4, 2 * first + second)),
        ("tp", "dp", (2, first, 2, second)),
        ("dp", "tp", (2, second, 2, first)),
    ):
        cut = laconic.fully_shard(
            nn.Linear(3, 3), mesh=mesh, dp_mesh_dims=SimpleNamespace(shard=shard, replicate=replicate)
        )
        cluster: Any = cut._laconic_unit.cluster  # type: ignore[union-attr]
        assert (cluster.num_islands, cluster.island_rank, cluster.size, cluster.shard_index) == want


class Scaled(nn.Module):
    """The product of a weight that is whole on each rank of "tp" and the rank's own number."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh
        self.weight = nn.Parameter(distribute_tensor(torch.ones(3), mesh, [Replicate()]))

    def forward(self, factor: Tensor) -> Tensor:
        weight: Any = self.weight
        return (weight.to_local(grad_placements=[Partial()]) * factor).sum()


@pytest.mark.parametrize("reduce_dtype", [None, torch.float32])
@on_ranks(2, local=2)
def test_sums_over_another_axis_have_the_reduce_dtype(reduce_dtype: torch.dtype | None) -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    model: Any = laconic.fully_shard(Scaled(mesh["tp"]), mesh=mesh["dp"], mp_policy=precision)
    model(torch.tensor([256.0, 1.0][dist.get_rank()])).backward()
    total = 257.0 if reduce_dtype is torch.float32 else 256.0  # bf16 has no 257
    assert torch.equal(model.weight.grad.full_tensor(), torch.full((3,), total))
