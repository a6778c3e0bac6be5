"""The steps in which fragments are sent and applied, their parameters, and means of their largest values alone."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import laconic
from laconic.codec import TopK
from laconic.islands.all_reduce import IslandGroup, mean_over_islands
from laconic.islands.fragments import SyncSchedule, fragment_of
from tests.reference.sparse import decoded
from tests.support.launch import on_ranks


@pytest.mark.parametrize(("every", "fragments", "overlap"), [(1, 1, 0), (6, 1, 5), (6, 3, 1), (8, 4, 0), (100, 4, 24)])
def test_every_fragment_is_sent_and_applied_once_a_round(every: int, fragments: int, overlap: int) -> None:
    schedule = SyncSchedule(every=every, fragments=fragments, overlap=overlap)
    steps = range(schedule.interval, 5 * every + 1, schedule.interval)
    sent = {t: schedule.rounds(t) % fragments for t in steps}
    for begin in range(1, 4 * every):
        window = [sent[t] for t in range(begin, begin + every) if t in sent]
        assert sorted(window) == list(range(fragments)), "each fragment once in every round"
    for t, fragment in sent.items():
        assert [schedule.in_flight(t + late) for late in range(overlap)] == [fragment] * overlap
        assert schedule.in_flight(t + overlap) is None, "it is applied before the next one is sent"
    assert list(sent.values())[: fragments + 1] == [*range(1, fragments), 0, 1 % fragments]


@pytest.mark.parametrize(
    ("every", "fragments", "overlap", "message"),
    [
        (0, 1, 0, "must be at least 1"),
        (4, 1, -1, "must not be negative"),
        (100, 37, 0, r"fragments=37\) does not divide every=100.*use every=111"),
        (8, 4, 2, r"overlap=2\) must be less than every / fragments = 2"),
    ],
)
def test_invalid_schedules_are_refused(every: int, fragments: int, overlap: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SyncSchedule(every=every, fragments=fragments, overlap=overlap)


def test_layers_are_assigned_to_fragments() -> None:
    names = ["embed.weight", *(f"model.layers.{i}.mlp.{j}.weight" for i in range(5) for j in range(2)), "head.weight"]
    strided = fragment_of(names, 2)
    assert {n: f for n, f in strided.items() if "layers" not in n} == {"embed.weight": 0, "head.weight": 0}
    assert [strided[f"model.layers.{i}.mlp.1.weight"] for i in range(5)] == [0, 1, 0, 1, 0]
    sequential = fragment_of(names, 2, "sequential")
    assert [sequential[f"model.layers.{i}.mlp.0.weight"] for i in range(5)] == [0, 0, 0, 1, 1]
    assert set(fragment_of(["a.weight"], 1).values()) == {0}
    with pytest.raises(ValueError, match=r"fragments=6, but the model has 5 numbered layers; use at most 5"):
        fragment_of(names, 6)
    with pytest.raises(ValueError, match=r"leaves fragments \[1\] without a parameter: only the layers \[0, 2\]"):
        fragment_of(["0.weight", "2.weight"], 2)


NUMEL = 9001
KEEP = 8


def vector(island: int) -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(island))


@pytest.mark.parametrize("islands", [2, 3])
@on_ranks("islands", local=1)
def test_every_island_gets_the_mean_of_what_all_have_kept() -> None:
    islands = dist.get_world_size()
    cluster = laconic.Cluster.of(laconic.init_mesh("cpu", islands=islands, nodes=1, local=1))
    codec = TopK(keep=KEEP)
    before = cluster.traffic.snapshot()
    of = IslandGroup.of(cluster), codec, cluster.traffic
    mean = mean_over_islands(vector(dist.get_rank()), *of)
    sent = (cluster.traffic.snapshot() - before).total("island", "outer", "sent")
    assert sent == mean.sent_bytes == (islands - 1) * codec.payload_bytes(NUMEL)
    expected = [decoded(vector(island), KEEP) for island in range(islands)]
    torch.testing.assert_close(mean.sent, expected[dist.get_rank()], rtol=1e-2, atol=0)
    torch.testing.assert_close(mean.value, torch.stack(expected).sum(0) / islands, rtol=1e-2, atol=1e-6)
    everyone = [torch.empty(NUMEL) for _ in range(islands)]
    dist.all_gather(everyone, mean.value)
    assert all(torch.equal(theirs, mean.value) for theirs in everyone)

    holders = (torch.arange(NUMEL) % 3).float()  # none, one or two islands train a coordinate
    divided = mean_over_islands(vector(dist.get_rank()), *of, divisor=holders)
    total = torch.stack(expected).sum(0)
    torch.testing.assert_close(
        divided.value, torch.where(holders > 0, total / holders.clamp(min=1), 0.0), rtol=1e-2, atol=1e-6
    )
