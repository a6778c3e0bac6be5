"""The features of real models: memory formats, dtypes, recomputation, running statistics, schedulers."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from laconic.cyclic.links import HEADER_BYTES, ActivationMeta, ByteLayout
from laconic.cyclic.runtime import CyclicDataParallel
from laconic.cyclic.schedule import Rule, StatePlacement
from laconic.cyclic.stages import trainable
from tests.cyclic.toys import Course, assert_equal, assert_equals_oracle
from tests.reference.cyclic import Oracle
from tests.support.launch import on_ranks

torch.set_num_threads(1)


class Recomputed(nn.Module):
    """Saves only its input, and reads its parameters again in the backward."""

    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        self.inner, self.reentrant = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6)), reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


class Cast(nn.Module):
    """Has bf16 and fp32 parameters, with sizes that are no multiples of 16 bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.norm = nn.Linear(6, 5, dtype=torch.bfloat16), nn.LayerNorm(5)
        self.wide = nn.Linear(5, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.wide(self.norm(self.narrow(x.bfloat16()).float()))


def vectors(count: int, seed: int) -> list[nn.Module]:
    torch.manual_seed(seed)
    return [nn.Linear(6, 6), Recomputed(), Cast(), nn.Sequential(Recomputed(reentrant=True), nn.Linear(6, 3))]


def pictures(count: int, seed: int) -> list[nn.Module]:
    torch.manual_seed(seed)
    last = nn.Sequential(nn.Conv2d(5, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    middle = [nn.Sequential(nn.Conv2d(5, 5, 3, padding=1, bias=False), nn.BatchNorm2d(5), nn.ReLU()) for _ in range(2)]
    stages = [nn.Conv2d(3, 5, 3, stride=2), *middle, last]
    return [stage.to(memory_format=torch.channels_last) for stage in stages]


def batch(shape: tuple[int, ...], count: int, step: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(step)
    return [
        (torch.randn(4, *shape, generator=generator), torch.randint(3, (4,), generator=generator)) for _ in range(4)
    ]


VECTORS = Course(count=4, optimizer="adamw", states="single", end=4, make=vectors, batch=partial(batch, (6,)))
PICTURES = replace(VECTORS, make=pictures, batch=partial(batch, (3, 9, 9)))


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def test_single_device() -> None:
    """Running statistics stay local, and follow the data."""
    for course in (VECTORS, PICTURES):
        assert_equals_oracle(course)
    run = PICTURES.run()
    PICTURES.train(run, range(3))
    for name, value in run.stages[1].named_buffers():
        assert value == 12 if "num" in name else value.abs().sum() > 0


@on_ranks(4)
def test_workers() -> None:
    for states in ("replicated", "sharded"):
        for course in (VECTORS, PICTURES):
            assert_equals_oracle(replace(course, states=states))  # type: ignore[arg-type]


class Split(nn.Module):
    """An MLP whose ten inner columns two ranks share, and a norm that both have."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(7), nn.Linear(7, 10), nn.Linear(10, 7)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).tanh())


def split_stages(seed: int) -> list[nn.Module]:
    torch.manual_seed(seed)
    return [Split().double(), nn.Sequential(Split(), nn.Linear(7, 3)).double()]


def split_among(mesh: DeviceMesh, stages: list[nn.Module]) -> list[nn.Module]:
    for module in (each for stage in stages for each in stage.modules() if isinstance(each, Split)):
        parallelize_module(module, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return stages


@pytest.mark.parametrize(
    ("ranks", "states", "rule", "max_grad_norm"),
    [
        (2, "single", "v2", None),
        (4, "replicated", "lag2", None),
        (4, "replicated", "clip", 0.05),
        (4, "sharded", "v2", None),
        (6, "shared", "v1", None),
    ],
)
@on_ranks("ranks")
def test_workers_of_two_ranks_equal_the_oracle(
    ranks: int, states: StatePlacement, rule: str, max_grad_norm: float | None, tmp_path: Path
) -> None:
    """Tensor parallelism cuts the layers of each worker; a ring has half of them, and sends half of the bytes."""
    mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("worker", "tp"))

    def begin(seed: int) -> CyclicDataParallel:
        stages = split_among(mesh["tp"], split_stages(seed))
        workers, placed = (None, {}) if states == "single" else (mesh["worker"], {"states": states})
        return CyclicDataParallel(  # type: ignore[arg-type]
            stages, nn.functional.mse_loss, adamw, workers, rule=rule, max_grad_norm=max_grad_norm, **placed
        )

    def batch(step: int) -> list[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(step)
        sizes = ((5, 7), (5, 3))
        return [tuple(torch.randn(size, generator=generator).double() for size in sizes) for _ in range(2)]  # type: ignore[misc]

    def train(run: CyclicDataParallel, steps: range) -> None:
        for step in steps:
            run.step(batch(step)[mesh.get_local_rank("worker")] if states in ("replicated", "sharded") else batch(step))

    oracle = Oracle(split_stages(0), nn.functional.mse_loss, adamw, Rule.named(rule, 2), max_grad_norm)
    for step in range(6):
        oracle.step(batch(step))
    run = begin(seed=0)
    train(run, range(3))
    dcp.save(run.state_dict(), checkpoint_id=tmp_path)
    resumed = begin(seed=1)
    state = resumed.blank_state_dict()
    dcp.load(state, checkpoint_id=tmp_path)
    resumed.load_state_dict(state)
    for each in (run, resumed):
        train(each, range(3, 6))
        each.drain()
        with each.consistent_parameters():
            for stage, wanted in zip(each.stages, oracle.newest, strict=True):
                for (name, own), want in zip(trainable(stage).items(), wanted, strict=True):
                    whole = own.full_tensor() if isinstance(own, DTensor) else own
                    torch.testing.assert_close(whole, nn.Parameter(want), rtol=1e-9, atol=1e-9, msg=name)
        each.close()


@on_ranks(3)
def test_batches_of_other_shapes() -> None:
    """A device sends the shapes of activations once for every shape of batch."""
    mesh = init_device_mesh("cpu", (3,))
    stages = [nn.Linear(6, 5), nn.Linear(5, 3)]
    run = CyclicDataParallel(stages, nn.functional.cross_entropy, adamw, mesh, states="shared")
    headers = []
    for rows in (4, 4, 2, 4, 2):
        before = run.traffic.snapshot()
        run.step([(torch.randn(rows, 6), torch.zeros(rows, dtype=torch.int64)) for _ in range(2)])
        sent = (run.traffic.snapshot() - before).total(direction="sent")
        headers.append(sent // HEADER_BYTES)
    run.drain()
    assert headers == ([1, 0, 1, 0, 0] if dist.get_rank() < 2 else [0] * 5)


def test_learning_rate_scheduler() -> None:
    """A scheduler of torch drives the optimizers of all stages, without a warning."""
    run, oracle = VECTORS.run(), VECTORS.oracle()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, step_size=2, gamma=0.1)
        for step in range(5):
            oracle.set(lr=scheduler.get_last_lr()[0])
            run.step(VECTORS.batch(4, step))
            oracle.step(VECTORS.batch(4, step))
            scheduler.step()
    run.drain()
    assert_equal(run, oracle, "scheduled")
    assert [group["lr"] for group in run.optimizer.param_groups] == [pytest.approx(0.02 * 0.1**2)] * 4


def test_layout_keeps_values_and_strides() -> None:
    tensors = [
        torch.randn(3, 5, 2, 2).to(memory_format=torch.channels_last),
        torch.randn(7, dtype=torch.float16),
        torch.randn(4, 6).t(),  # neither contiguous nor channels_last: copied in order
        torch.tensor(3, dtype=torch.int64),
        torch.zeros(0, 4),
    ]
    layout = ByteLayout(tensors)
    views = layout.views(layout.pack(tensors, torch.device("cpu")))
    for view, tensor in zip(views, tensors, strict=True):
        assert torch.equal(view, tensor)
        assert view.data_ptr() % 16 == 0
    assert views[0].stride() == tensors[0].stride()
    assert layout.num_bytes == 240 + 16 + 96 + 16


def test_metadata_survive_their_header() -> None:
    meta = ActivationMeta.of(
        [torch.zeros(2, 3, requires_grad=True), torch.zeros(4, dtype=torch.bool), torch.tensor(1.0)]
    )
    assert ActivationMeta.from_header(meta.header(torch.device("cpu"))) == meta
    assert [t[0] for t in meta.gradients().tensors] == [(2, 3)]
    with pytest.raises(ValueError, match="hands on 400 tensors"):
        ActivationMeta.of([torch.zeros(1)] * 400).header(torch.device("cpu"))
