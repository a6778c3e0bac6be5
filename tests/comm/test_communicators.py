"""How many process groups there are on a device, how they are made, and what they share: [Note: Communicators]."""

from __future__ import annotations

import datetime
import math
import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import laconic
from laconic import _compat
from laconic.comm import cluster as cluster_module
from laconic.comm import groups as groups_module
from laconic.comm.agreement import RankGroup
from laconic.comm.groups import device_to_bind, new_group, started_bytes
from laconic.comm.launch import RankInfo, process_group
from laconic.doctor.cli import _communicator_lines
from laconic.rehearse import rehearsal
from tests.support.launch import free_port, launch, run_ranks

CUDA = torch.device("cuda", 0)

_events: list[tuple[str, list[int]]] = []
"""How each group came, "split" from the default one or "made", with its ranks; and which of the latter "begun" at once.
"""


class Splitting(dist.ProcessGroup):
    """A backend from which groups can be split, as from NCCL's. Nothing is ever sent."""

    def __init__(self, name: str, ranks: list[int], rank: int) -> None:
        super().__init__(rank, len(ranks))  # type: ignore[call-overload]
        self._name, self._ranks = name, ranks

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self._name

    def getBackendName(self) -> str:
        return "splitting"

    @property
    def _device_types(self) -> list[torch.device]:  # type: ignore[override]
        return [torch.device("cpu"), torch.device("cuda")]

    def _get_backend(self, device: torch.device) -> Any:
        return SimpleNamespace(
            name=lambda: "splitting",
            supports_splitting=True,
            options=SimpleNamespace(_timeout=datetime.timedelta(seconds=60)),
            eager_connect_single_device=lambda device: _events.append(("begun", self._ranks)),
            _set_sequence_number_for_group=lambda: None,
        )

    def split_group(self, ranks: list[int], *, group_name: str, **options: Any) -> Splitting:  # type: ignore[override]
        _events.append(("split", list(ranks)))
        return Splitting(group_name, list(ranks), list(ranks).index(dist.get_rank()))

    def get_group_store(self) -> Any:
        return None


def _make(options: Any, backend_options: Any) -> Splitting:
    ranks = list(options.global_ranks_in_group)
    if ranks:
        assert dist.group.WORLD is not None
        is_alone = dist.group.WORLD.bound_device_id is None  # else torch would split it, which takes all ranks
        _events.append(("made" if is_alone else "split without the others", ranks))
    return Splitting(options.group_id, ranks or list(range(options.group_size)), options.group_rank)


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Be a rank of a job whose default group is on a device that is not there."""
    if "SPLITTING" not in dist.Backend._plugins:
        dist.Backend.register_backend("splitting", _make, extended_api=True, devices=["cpu", "cuda"])
    for name, value in {
        "is_available": lambda: True, "current_accelerator": lambda check_available=False: torch.device("cuda"),
        "device_count": lambda: 1, "set_device_index": lambda index: None,
        "get_memory_info": lambda device=None: (10**9 - 10**6 * len(_events), 10**9),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.accelerator, name, value)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)  # else torch selects a device
    for name in ("watch_peers", "watch_progress"):
        monkeypatch.setattr(cluster_module, name, lambda: None)
    monkeypatch.setattr(RankGroup, "gather", lambda self, value: [value] * self.size)
    monkeypatch.setattr(groups_module, "_started_bytes", 0)

    def begin(rank: int, num_ranks: int, *, bound: bool) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("splitting", store=dist.HashStore(), rank=rank, world_size=num_ranks)
        assert dist.group.WORLD is not None
        dist.group.WORLD.bound_device_id = CUDA if bound else None
        groups_module._started_bytes = 0
        _events.clear()

    yield begin
    dist.destroy_process_group()


def _made_by(
    start: Callable[..., None], rank: int, shape: tuple[int, int, int], bound: bool
) -> tuple[dict[str, list[int]], list[tuple[str, list[int]]], int]:
    islands, nodes, local = shape
    start(rank, islands * nodes * local, bound=bound)
    cluster = laconic.Cluster.of(laconic.init_mesh("cuda", islands=islands, nodes=nodes, local=local))
    assert laconic.Cluster.of(laconic.init_mesh("cuda", islands=islands, nodes=nodes, local=local)) is cluster
    groups: dict[str, Any] = cluster.communicators
    return {name: group._ranks for name, group in groups.items()}, list(_events), started_bytes()


SHAPES = {
    (1, 1, 1): ["default, all"],
    (1, 3, 1): ["default, all, gather node", "reduce node"],
    (1, 1, 3): ["default, all, gather local", "reduce local"],
    (1, 2, 3): ["default, all", "gather node", "gather local", "reduce node", "reduce local"],
    (3, 1, 1): ["default, gather island, reduce island"],
    (2, 3, 1): ["default", "all, gather node", "gather island, reduce island", "reduce node"],
}
"""The communicators of each shape (islands, nodes, local), by what they are for."""


@pytest.mark.parametrize("shape", SHAPES)
def test_groups_are_split_along_axes_on_all_ranks_in_one_order(
    start: Callable[..., None], shape: tuple[int, int, int]
) -> None:
    num_ranks = math.prod(shape)
    kinds = []
    for rank in sorted({0, num_ranks // 2, num_ranks - 1}):
        groups, events, started = _made_by(start, rank, shape, True)
        assert list(groups) == SHAPES[shape]
        default, *others = groups.values()
        assert default == list(range(num_ranks))
        split = [own for kind, own in events if kind == "split"]
        assert sorted(split) == sorted(others), "each is split once, and a transfer can use it"
        assert all(rank in own for own in split)
        assert not [own for kind, own in events if kind == "begun"], "what was made alone is for the host, or for one"
        assert started == 10**6 * len(split)
        kinds.append([(kind, len(own)) for kind, own in events])
    assert all(theirs == kinds[0] for theirs in kinds), "a split takes all ranks"
    groups, events, started = _made_by(start, num_ranks - 1, shape, False)
    assert list(groups) == SHAPES[shape], "where no device is bound, they are made, and begin when used"
    assert {kind for kind, _ in events} <= {"made"}
    assert started == 0


def test_the_doctor_names_them_and_says_what_they_took(start: Callable[..., None]) -> None:
    start(0, 6, bound=True)
    (line,) = _communicator_lines(laconic.Cluster.of(laconic.init_mesh("cuda", nodes=2, local=3)))
    assert "5 communicators (default, all; gather node; gather local; reduce node; reduce local)" in line
    assert line.endswith("begun in 4 MB of device memory")


def test_a_part_of_a_mesh_makes_its_own_communicator_which_begins_at_once(start: Callable[..., None]) -> None:
    """The ranks of a part cannot split from the default group, as the others are elsewhere."""
    start(1, 4, bound=True)
    outer = init_device_mesh("cuda", (2, 2), mesh_dim_names=("tp", "dp"))
    del _events[:]
    cluster = laconic.Cluster.of(outer["dp"])
    assert cluster.gather_groups["node"] is outer.get_group("dp"), "as FSDP2 does"
    made = [event for event in _events if len(event[1]) > 1]
    cyclic = new_group([0, 1], None)
    assert cyclic.bound_device_id is None, "its receives are posted early"
    assert dist.group.WORLD.bound_device_id == CUDA  # type: ignore[union-attr]
    assert list(cluster.communicators) == ["default", "all, gather node", "reduce node"]
    assert made[:2] == [("made", [0, 1]), ("begun", [0, 1])]
    assert [kind for kind, _ in made[2:]] == ["made"], "for small messages in host memory"


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_on_gloo_nothing_is_shared(backend: str) -> None:
    for nodes, local in ((3, 1), (2, 3)):
        with rehearsal(nodes=nodes, local=local, backend=backend):
            cluster = laconic.Cluster.of(laconic.init_mesh("cuda", nodes=nodes, local=local))
            shared = SHAPES[1, nodes, local]
            own = ["default, all", "gather node", "reduce node"] if (backend, local) == ("gloo", 1) else shared
            assert list(cluster.communicators) == own


def job_gloo() -> None:
    """Gloo says that it can be split, but torch asks of bound groups what Gloo does not have."""
    world = dist.group.WORLD
    assert world is not None
    world.bound_device_id = CUDA
    assert _compat.splitting_device() is None
    group = cluster_module._own_group([[0, 1, 2]])
    assert group is not None
    assert group.bound_device_id is None
    world.bound_device_id = None  # torch's own messages would go to the device
    groups = laconic.Cluster.of(laconic.init_mesh("cpu")).communicators
    assert list(groups) == ["default, all", "gather node", "reduce node"]
    for each in (group, *groups.values()):
        number = torch.ones(1)
        dist.all_reduce(number, group=each)
        assert number == 3
    assert started_bytes() == 0


def test_ranks_on_gloo_sum_in_groups_of_their_own_which_are_not_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    run_ranks(job_gloo, 3, local=1)


def test_the_device_is_bound_where_nccl_carries_it() -> None:
    assert device_to_bind("nccl", CUDA) == CUDA
    for backend, device in (("gloo", CUDA), ("nccl", torch.device("cpu")), ("nccl", None), ("xccl", CUDA)):
        assert device_to_bind(backend, device) is None


def _bound_by_laconic(by_mesh: bool, num_local: int) -> list[Any]:
    """The devices to which laconic binds the default group that it starts, on a machine with two."""
    bound: list[Any] = []
    start = dist.init_process_group

    def init(backend: str, *, device_id: torch.device | None = None, **place: Any) -> None:
        bound.append((backend, device_id))
        start("gloo", **place)

    accelerator: Any = torch.accelerator
    accelerator.get_memory_info = lambda device=None: (10**9, 10**9)
    accelerator.current_accelerator = lambda check_available=False: torch.device("cuda")
    accelerator.device_count, accelerator.current_device_index = lambda: 2, lambda: 1
    accelerator.set_device_index = lambda index: bound.append(index)
    torch.cuda.is_initialized = lambda: True
    with mock.patch.object(dist, "init_process_group", init):
        if by_mesh:
            place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1"}
            with mock.patch.dict(os.environ, {**place, "MASTER_PORT": str(free_port())}):
                laconic.init_mesh("cuda", local=1)
        else:
            ranks = RankInfo(rank=0, world_size=1, local_rank=0, num_local=num_local, num_nodes=1)
            with process_group(ranks, torch.device("cuda", 0), 60):
                pass
    return bound


@pytest.mark.machine
@pytest.mark.parametrize(
    ("by_mesh", "num_local", "bound"),
    [
        (True, 1, [1, ("nccl", torch.device("cuda", 1))]),  # after the device was selected
        (False, 1, [("nccl", CUDA)]),
        (False, 3, [("gloo", None)]),  # NCCL refuses two ranks on one device
    ],
)
def test_laconic_binds_the_group_that_it_starts(by_mesh: bool, num_local: int, bound: list[Any]) -> None:
    assert launch(_bound_by_laconic, by_mesh, num_local, num_ranks=1, backend=None) == [bound]


def _sum_on_the_host() -> tuple[bool, float]:
    ranks = RankInfo(rank=0, world_size=1, local_rank=0, num_local=1, num_nodes=1)
    dist.Backend.register_backend("splitting", _make, extended_api=True, devices=["cpu", "cuda"])
    dist.init_process_group("splitting", store=dist.HashStore(), rank=0, world_size=1)
    with process_group(ranks, CUDA, 60) as group:
        number = torch.full((1,), 3.0)
        dist.all_reduce(number, group=group)
        return group is dist.group.WORLD, number.item()


@pytest.mark.machine
def test_a_command_has_a_group_for_the_host_beside_the_script_s_own() -> None:
    assert launch(_sum_on_the_host, num_ranks=1, backend=None) == [(False, 3.0)]
