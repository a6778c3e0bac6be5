"""benchmarks.optimizers: counts of bytes and states, and the record of rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from benchmarks.optimizers import BENCHMARK, TINY_MIX, CollectiveBytes, measure_adamw8bit, measure_muon
from tests.support import record
from tests.support.launch import run_ranks

pytestmark = pytest.mark.machine


def job_redistributions() -> dict[str, float]:
    """Return the bytes that each redistribution of 12 x 24 fp32 elements (1152 bytes) brings to one of 3 ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sharded = DTensor.from_local(torch.ones(4, 24), mesh, [Shard(0)])
    partial = DTensor.from_local(torch.ones(12, 24), mesh, [Partial()])
    received = {}
    for name, tensor, target in [
        ("gather", sharded, Replicate()),
        ("exchange", sharded, Shard(1)),
        ("all_reduce", partial, Replicate()),
        ("reduce_scatter", partial, Shard(0)),
        ("nothing", sharded, Shard(0)),
    ]:
        with CollectiveBytes(3).counting() as counted:
            tensor.redistribute(mesh, [target])
        received[name] = counted.received_bytes
    return received


def test_each_collective_is_counted_as_its_best_algorithm_moves_it() -> None:
    for received in run_ranks(job_redistributions, 3):
        assert received == {
            "gather": 2 * 384,
            "exchange": 2 / 3 * 384,
            "all_reduce": 2 * 2 / 3 * 1152,
            "reduce_scatter": 2 / 3 * 1152,
            "nothing": 0,
        }


def test_muon_moves_fewer_bytes_than_torch_and_none_for_whole_matrices() -> None:
    measured = run_ranks(measure_muon, 4, TINY_MIX, local=2)[0]
    assert measured["whole"] == 0 < measured["rows"] <= 1
    assert measured["fsdp2"] > 2


def test_adamw8bit_has_small_states_and_the_bits_of_one_process() -> None:
    measured = run_ranks(measure_adamw8bit, 4, TINY_MIX, 2, local=2)[0]
    assert measured["is_equal"] == 1
    assert 2 < measured["state_bytes"] < 8


def test_a_partial_run_is_recorded_beside_earlier_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = tmp_path / "RESULTS.md"
    monkeypatch.setattr(record, "RESULTS", results)
    first = record.Row(key="ranks", claim="losses", required="equal", measured="equal", is_met=True)
    second = record.Row(key="muon-bytes", claim="bytes", required="<= 2", measured="0.3", is_met=True)
    for row in (first, second):
        record.Record("optimizers", [row], BENCHMARK.rows, ["--rows", row.key]).save()
    text = results.read_text()
    assert text.index("| bytes ") < text.index("| losses ")  # in the order of the claim, not of measuring
    for key in ("muon-bytes", "ranks"):
        assert f"`python -m benchmarks.optimizers --rows {key}`" in text
