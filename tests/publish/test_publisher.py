"""Readers of versions that several ranks wrote have the weights of that step, for every way to hold a model."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import peft
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.two_tensor import TwoTensor

import laconic
from laconic.checkpoint import state
from laconic.comm.agreement import RankGroup
from laconic.cyclic.runtime import CyclicDataParallel
from laconic.partial.updates import unsliced_state_dict
from laconic.policy import PolicyError
from laconic.publish import FolderSource, Publisher, PublishError, Reader, holdings, shares
from laconic.publish.staging import verify
from laconic.publish.versions import version_name
from laconic.shard import cache
from laconic.store import folder as store
from laconic.store.folder import CrashPoint
from tests.checkpoint.zoo import make_zoo, shard_fsdp2, train
from tests.checkpoint.zoo import shard as shard_zoo
from tests.cyclic.toys import OPTIMIZERS, Course, make_stages
from tests.support.launch import on_ranks, run_ranks
from tests.support.partial_models import MLPS, MlpNet
from tests.support.published import assert_same, cast, snapshot, write
from tests.support.sharded_net import Net, build, moved, shard, train_step


def whole_in_bf16(model: nn.Module) -> dict[str, Tensor]:
    """What a reader must have. Collective."""
    names = state.model_tensors(model).keys()
    plain = {state.strip(name).removeprefix("module."): tensor for name, tensor in unsliced_state_dict(model).items()}
    wholes = {name: tensor for name, tensor in plain.items() if name in names or name not in state.tied_names(model)}
    gathered: dict[str, Any] = {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for name, tensor in wholes.items()
    }
    return {name: whole.clone() for name, whole in cast(gathered).items()}


def assert_read(folder: Path, wanted: dict[str, Tensor], held: dict[str, Tensor]) -> None:
    """Bring `held` to the newest version on rank 0, and compare it with `wanted`."""
    if dist.get_rank() == 0:
        Reader(folder).update(held)
        assert_same(held, wanted)
    dist.barrier()


def empty_like(wanted: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}


def follow(model: Any, folder: Path, step: Any, *, shown: Any = nullcontext, **keys: Any) -> list[dict[str, Tensor]]:
    """Publish three steps of a model; a reader follows. Returns what it must have had, which `shown()` shows."""
    publisher = Publisher(model, folder, **keys)
    seen: list[dict[str, Tensor]] = []
    held: dict[str, Tensor] = {}
    for _ in range(3):
        step()
        with shown():
            seen.append(whole_in_bf16(model))
            if "local_steps" not in keys:
                publisher.publish()
        if "local_steps" in keys:
            publisher.publish()
        publisher.wait()
        held = held or empty_like(seen[0])
        assert_read(folder, seen[-1], held)
    assert_read(folder, seen[-1], empty_like(seen[0]))
    differing = [name for name in seen[0] if not torch.equal(seen[0][name], seen[2][name])]
    assert differing, "the model has trained"
    return seen


SmallNet = partial(Net, 1)
LOSSLESS = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


PLACEMENTS: dict[str, dict[str, Any]] = {
    "rank": {"cache": "rank"},
    "4bit": {"cache": "host", "wire": "4bit"},
    "lossless": {"cache": "host", "wire": "lossless", "mp_policy": LOSSLESS},
    "shares": {"shares": [1, 2, 3, 2]},
}


@pytest.mark.parametrize(
    "name", ["lossless", *(pytest.param(name, marks=pytest.mark.heavy) for name in ("rank", "shares", "4bit"))]
)
@on_ranks(4, local=2)
def test_every_placement(name: str, tmp_path: Path) -> None:
    """Publishing changes nothing of the run: losses and bytes are those of a run that does not publish."""
    encoding, results = "smallest" if name in ("lossless", "shares") else "gaps", []
    for is_published in (False, True) if "wire" in PLACEMENTS[name] else (True,):
        model = shard(build(SmallNet), **PLACEMENTS[name])
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=1e-2), list[float]()

        def step(model: Any = model, optimizer: Any = optimizer, losses: list[float] = losses) -> None:
            losses.append(float(train_step(model, optimizer, seed=len(losses))))

        with moved(model) as bytes_moved:
            if is_published:
                follow(model, tmp_path, step, base_every=2, encoding=encoding)
            else:
                for _ in range(3):
                    step()
                    whole_in_bf16(model)  # which `follow` gathers, too
        sent = [bytes_moved.snapshot.total("node", purpose, "sent") for purpose in ("weights", "gradients")]
        results.append((losses, sent))
    assert results[0] == results[-1]


@pytest.mark.parametrize("kind", ["laconic", "fsdp2", "replicas", pytest.param("ddp", marks=pytest.mark.machine)])
@on_ranks(3)
def test_tensors_that_are_awkward(kind: str, tmp_path: Path) -> None:
    """Tied weights, buffers, a scalar, an empty tensor, frozen ones, and sizes that divide nothing."""
    model: Any = make_zoo(seed=3, odd=kind == "laconic", hidden=2001)
    spread = {"laconic": shard_zoo, "fsdp2": shard_fsdp2, "ddp": nn.parallel.DistributedDataParallel}
    model = spread[kind](model) if kind in spread else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    seen = follow(model, tmp_path, lambda: train(model, optimizer, 1))
    assert "head.weight" not in seen[0]
    assert seen[0]["seen"].dtype == torch.int64
    if kind in ("replicas", "ddp"):
        files = sorted(path.name for path in (tmp_path / "weight_v000001").iterdir())
        shared = [f"whole-0000{rank}.safetensors" for rank in range(3)]
        assert files == ["manifest.json", *shared], "replicas share the work"


@on_ranks(4, local=2)
def test_tensor_parallel_and_sliced_weights(tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = build(SmallNet)
    for block in model.blocks:  # type: ignore[union-attr]
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    for block in (*model.blocks, model):  # type: ignore[misc]
        laconic.fully_shard(block, mesh=mesh["dp"])

    def edit() -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.01)  # also the parts of a slice that no island trains

    follow(model, tmp_path / "tp", edit)

    sliced = laconic.partial_updates(build(MlpNet), num_slices=2, slice_index=0, include=["mlp"], patterns=MLPS)
    model = shard(sliced)
    follow(model, tmp_path / "sliced", edit)


@on_ranks(4, local=1)
def test_islands_publish_what_they_agreed_on(tmp_path: Path) -> None:
    mesh = laconic.init_mesh("cpu", islands=2)
    model = shard(build(SmallNet), mesh=mesh)
    local = laconic.LocalSteps(model, torch.optim.SGD(model.parameters(), lr=1e-2), mesh=mesh, every=2)
    seen = follow(model, tmp_path, lambda: train_step(model, local), shown=local.outer_parameters, local_steps=local)
    inner = whole_in_bf16(model)
    assert any(not torch.equal(inner[name], seen[2][name]) for name in inner)
    first, second, third = (FolderSource(tmp_path).manifest(version).digests for version in (1, 2, 3))
    assert first != second == third, "islands agree every second step"


@on_ranks(3)
def test_cyclic_runs_publish_one_version_of_all_stages(tmp_path: Path) -> None:
    stages, steps, mesh = make_stages(3, 0), itertools.count(), init_device_mesh("cpu", (3,))
    run = CyclicDataParallel(
        stages, nn.functional.cross_entropy, OPTIMIZERS["adamw"], mesh, rule="v2", states="sharded"
    )

    def step() -> None:
        number = next(steps)
        Course().train(run, range(number, number + 1))

    follow(nn.ModuleList(stages), tmp_path, step, shown=run.consistent_parameters)
    run.close()


@on_ranks(3)
def test_a_version_stands_still_for_one_trip_between_ranks(tmp_path: Path) -> None:
    """The first version takes more: its elements are divided among the ranks."""
    model, me, trips = shard(build()), threading.current_thread(), list[int]()
    publisher = Publisher(model, tmp_path)
    gather = RankGroup.gather

    def counted(ranks: RankGroup, value: Any) -> list[Any]:
        if threading.current_thread() is me:
            trips[-1] += 1
        return gather(ranks, value)

    is_counting = dist.get_rank() == 0
    with mock.patch.object(RankGroup, "gather", counted) if is_counting else nullcontext():
        for _ in range(3):
            trips.append(0)
            write(publisher)
        dist.barrier()
    assert trips == ([3, 1, 1] if is_counting else [0] * 3)


@pytest.mark.parametrize("step", ["_aligned", "bits_of", "encode_gaps", "write"])
@on_ranks(2, local=1)
def test_a_failure_on_one_rank_fails_a_version_on_all_and_the_next_one_is_whole(step: str, tmp_path: Path) -> None:
    """While elements are divided, compared, encoded by the thread, and written. No copy is half of the new values."""
    model, calls = shard(build()), list[int]()
    publisher = Publisher(model, tmp_path)
    real = getattr(shares, step, None)

    def fail(*args: Any) -> Any:
        calls.extend([1] * dist.get_rank())
        if dist.get_rank() == 1 and step == "_aligned":
            return 1 << 50
        if dist.get_rank() == 1 and len(calls) == 2:
            raise torch.OutOfMemoryError("full")
        return real(*args)  # type: ignore[misc]

    def fail_to_write(point: CrashPoint) -> None:
        if point is CrashPoint.WRITTEN and dist.get_rank() == 1:
            raise OSError(28, "No space left on device")

    first = write(publisher) if step != "_aligned" else 0
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    message = {
        "_aligned": r"a version could not be made .*\(on rank 1\)",
        "write": r"version 2 could not be written into",
    }
    store.on_crash_point = fail_to_write if step == "write" else None
    is_patched = dist.get_rank() == 1 and step != "write"
    with mock.patch.object(shares, step, fail) if is_patched else nullcontext():
        with pytest.raises(PublishError, match=message.get(step, r"OutOfMemoryError: full")):
            write(publisher)
        dist.barrier()
    store.on_crash_point = None
    assert not publisher.is_copy_published
    assert FolderSource(tmp_path).versions() == [1][:first]
    dist.barrier()
    version = write(publisher)
    assert FolderSource(tmp_path).manifest(version).base is None
    assert_read(tmp_path, whole_in_bf16(model), empty_like(whole_in_bf16(model)))
    assert write(publisher) == version + 1
    assert FolderSource(tmp_path).manifest(version + 1).base == version


def publish_until_killed(folder: str, victim: int, point: CrashPoint) -> None:
    """Publish three versions; a rank dies while it writes the third one, which takes the place of both others."""
    model = laconic.fully_shard(nn.Linear(7, 2), mesh=laconic.init_mesh("cpu"))
    publisher = Publisher(model, folder, run="run", base_every=2, keep=1)
    for version in (1, 2, 3):
        with torch.no_grad():
            model.weight.fill_(version)
        if version == 3 and dist.get_rank() == victim:
            store.on_crash_point = lambda it: os.kill(os.getpid(), signal.SIGKILL) if it is point else None
        write(publisher)


@pytest.mark.parametrize("point", [CrashPoint.WRITTEN, CrashPoint.LISTED, CrashPoint.COMMITTED])
def test_a_rank_that_dies_leaves_whole_versions(point: CrashPoint, tmp_path: Path) -> None:
    """And the next run goes on from them. All points, of one rank: tests/store/test_crash_points.py."""
    for victim in (0, 1) if point is CrashPoint.WRITTEN else (0,):
        folder = tmp_path / str(victim)
        with suppress(RuntimeError):  # not all ranks pass all points
            run_ranks(publish_until_killed, 2, str(folder), victim, point)
        assert not [verdict.problem for verdict in verify(FolderSource(folder)) if verdict.problem]
        held = nn.Linear(7, 2).bfloat16()
        version = Reader(folder).update(held)
        assert version in (2, 3)
        assert held.weight.tolist() == [[version] * 7] * 2
        with Publisher(nn.Linear(7, 2), folder, run="run") as publisher:
            assert publisher.publish() == version + 1


@on_ranks(2)
def test_a_mistake_on_one_rank_is_told_on_all(tmp_path: Path) -> None:
    model = build()
    publisher = Publisher(model, tmp_path)
    if dist.get_rank() == 1:
        model.to("meta")
    with pytest.raises(PublishError, match=r"inp.weight, inp.bias, .*no memory, on the meta device.*\(on rank 1\)"):
        publisher.publish()
    model = build().double() if dist.get_rank() == 1 else build()
    with pytest.raises(PublishError, match="ranks hold tensors of other names, shapes or dtypes"):
        Publisher(model, tmp_path / "other").publish()


@pytest.mark.parametrize("point", [CrashPoint.BEGUN, CrashPoint.SYNCED, CrashPoint.COMMITTED])
@on_ranks(1)
def test_two_publishers_that_begin_at_one_instant_have_folders_of_their_own(tmp_path: Path, point: CrashPoint) -> None:
    """The younger one takes over while the older one writes, and is disturbed by nothing that the older one removes."""
    model, younger, folders = build(), list[Publisher](), list[Path]()

    def begin_another(reached: CrashPoint) -> None:
        if reached is point and not younger:
            younger.append(Publisher(model, tmp_path, run="run"))
            version = 2 if point is CrashPoint.COMMITTED else 1
            folders.append(younger[0]._begin(tmp_path / version_name(version)))

    older = Publisher(model, tmp_path, run="run")
    with (
        mock.patch("laconic.publish.publisher.reached", begin_another),
        mock.patch("laconic.store.folder.reached", begin_another),
    ):
        older.publish()
        with nullcontext() if point is CrashPoint.COMMITTED else pytest.raises(PublishError, match="began after this"):
            older.wait()
    assert folders[0].is_dir()
    write(younger[0])
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".tmp"] == []


@on_ranks(2)
def test_a_younger_publisher_takes_over(tmp_path: Path) -> None:
    model = shard(build())
    first = Publisher(model, tmp_path, run="run")
    write(first)
    with pytest.raises(PublishError, match="has versions of the run 'run', and this is None; give run='run'"):
        Publisher(model, tmp_path)
    second = Publisher(model, tmp_path, run="run")
    assert write(second) == 2
    with pytest.raises(PublishError, match="another publisher, which began after this one"):
        write(first)
    assert FolderSource(tmp_path).versions() == [1, 2]
    with pytest.raises(PolicyError, match=r"names='x'.* is not known; use one of 'huggingface', 'hub', 'model'"):
        Publisher(model, tmp_path, run="run", names="x")


@on_ranks(2)
def test_another_division_begins_with_a_whole_version(tmp_path: Path) -> None:
    """What was published is the weights of the call, though they change before the files are written."""
    model = build()
    publisher = Publisher(model, tmp_path)
    write(publisher)
    for is_sharded in (False, True):
        if is_sharded:
            shard(model)
        wanted = whole_in_bf16(model)
        version = publisher.publish()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(-1.5)
        publisher.wait()
        assert FolderSource(tmp_path).manifest(version).base == (None if is_sharded else 1)
        assert_read(tmp_path, wanted, empty_like(wanted))


def test_a_copy_that_has_changed_in_memory_is_found_and_mended(tmp_path: Path) -> None:
    model = build()
    publisher = Publisher(model, tmp_path, base_every=3)
    publisher.publish()
    write(publisher)
    assert publisher._shares is not None
    publisher._shares._owned["out.weight"][0].copy[5] += 1  # what a flipped bit of memory does
    model.get_parameter("out.weight").data.view(-1)[5] += 1  # and the weight gets the same value, so no patch tells
    publisher.publish()
    with pytest.raises(PublishError, match=r"version 4 could not be written .*out.weight: the copies in host memory"):
        write(publisher)
    write(publisher)
    held = empty_like(whole_in_bf16(model))
    assert Reader(tmp_path).update(held) == 5


def test_copies_of_shares_on_an_accelerator_take_no_more_than_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are page-locked, and not by torch, which rounds up to a power of two. The pages are unlocked afterwards."""
    told: list[Any] = []

    def lock(nbytes: int, device: torch.device, **_: Any) -> Tensor:
        told.append((nbytes, device.type))
        return torch.empty(nbytes, dtype=torch.uint8)

    monkeypatch.setattr(cache, "make_slab", lock)
    monkeypatch.setattr(cache, "free_slab", lambda slab, device: told.append(("unlocked", device.type)))
    held = {"weight": holdings.holding_of(torch.empty(1000, 1025, device="meta"))}
    share = holdings.Share(0, 0, 1_025_000, ((0,), (1_025_000,)))
    own = shares.OwnShares(held, {"weight": [share]}, torch.bfloat16, "gaps")
    assert own.nbytes == 2_050_000
    assert own._piece_numel * shares._DEVICE_BYTES <= 4 * 1_025_000, "a comparison takes less than the share"
    del own
    assert told == [(2_050_048, "meta"), ("unlocked", "meta")]


def test_adapters_that_cannot_be_merged_are_told(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=r"adapters='merged'\) needs names=.huggingface. or names=.hub."):
        Publisher(build(), tmp_path, adapters="merged", names="model")
    with pytest.raises(PublishError, match='Net has no adapters of peft to merge; leave adapters="merged" out'):
        Publisher(build(), tmp_path, adapters="merged").publish()
    for settings, message in (
        ({"use_dora": True}, "'default' of up is more than a product of two matrices"),
        ({"lora_bias": True}, "'default' of up is more than a product"),
    ):
        model = peft.get_peft_model(build(), peft.LoraConfig(r=2, target_modules=["up"], **settings))
        with pytest.raises(PublishError, match=message):
            Publisher(model, tmp_path, adapters="merged").publish()
    assert FolderSource(tmp_path).versions() == []


def test_weights_in_few_bits_have_no_checkpoint(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    laconic.quantize_(model, "int8")
    with pytest.raises(PublishError, match="the model has weights in few bits"):
        Publisher(model, tmp_path).publish()
    with Publisher(model, tmp_path, names="model") as publisher:
        publisher.publish()
    codes = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
    Reader(tmp_path).update(codes)
    assert_same(codes, cast(snapshot(model)))


def test_one_process_without_a_group(tmp_path: Path) -> None:
    """Nothing changes: the patch is empty, and its digests are those before."""
    model = make_zoo(seed=0)
    with Publisher(model, tmp_path, dtype=torch.float32, keep=1, base_every=3) as publisher:
        for _ in range(7):
            publisher.publish()
    source = FolderSource(tmp_path)
    assert source.versions() == [7]
    manifest = source.manifest(7)
    assert (manifest.is_whole, manifest.base, manifest.files_of("patch")) == (True, 6, [])
    assert all(tensor.before == tensor.after for tensor in manifest.tensors)
    other = make_zoo(seed=1)
    assert Reader(tmp_path).update(other) == 7
    assert_same(snapshot(other), snapshot(model))
    assert os.listdir(tmp_path / "weight_v000007")


def test_a_parameter_of_a_class_of_its_own(tmp_path: Path) -> None:
    """It has no memory of its own, as torchao's."""
    model = nn.ParameterDict({"weight": nn.Parameter(TwoTensor(torch.ones(8), torch.ones(8)))})
    with Publisher(model, tmp_path) as publisher:
        publisher.publish()
        model["weight"].data.add_(1)
        publisher.publish()
    found = {"weight": torch.zeros(8, dtype=torch.bfloat16)}
    assert Reader(tmp_path).update(found) == 2
    assert torch.equal(found["weight"], torch.full((8,), 2, dtype=torch.bfloat16))
