"""A checkpoint of one mesh loads on any other, by laconic and by PyTorch's FSDP2, without state on the wire."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.checkpoint import sizes
from tests.checkpoint.sizes import OPTIMIZERS, Seen
from tests.support.launch import run_ranks


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Seen]]:
    """Save on two nodes of two ranks."""
    folder = tmp_path_factory.mktemp("saved")
    seen = run_ranks(sizes.save_each, 4, str(folder), local=2)[0]
    assert all(one.shard_dropped for one in seen.values())
    return folder, seen


@pytest.mark.parametrize(("world_size", "local"), [(3, 3), (1, 1), (6, 3)])
def test_any_number_of_ranks_loads_it(world_size: int, local: int, saved: tuple[Path, dict[str, Seen]]) -> None:
    folder, expected = saved
    for rank, seen in enumerate(run_ranks(sizes.load_each, world_size, str(folder), local=local)):
        for name in OPTIMIZERS:
            assert_same(seen[name], expected[name], f"{name} on rank {rank}")


def test_fsdp2_reads_and_is_read(tmp_path: Path) -> None:
    """FSDP2 on 4 ranks -> laconic on 3, and laconic on 4 -> FSDP2 on 3, in every usual layout."""
    expected = run_ranks(sizes.save_both_ways, 4, str(tmp_path), local=2)[0]
    for seen in run_ranks(sizes.load_both_ways, 3, str(tmp_path)):
        assert len(seen) == 11
        for (what, who), found in seen.items():
            assert_same(found, expected["fsdp2" if "fsdp2" in what else "laconic"], f"{what} by {who}")


def test_no_state_crosses_the_wire(tmp_path: Path) -> None:
    """With sixty times the state in as many tensors, messages grow only by the digits of sizes."""
    small = run_ranks(sizes.bytes_on_the_wire, 2, str(tmp_path / "small"), 16)[0]
    large = run_ranks(sizes.bytes_on_the_wire, 2, str(tmp_path / "large"), 4096)[0]
    assert large["state"] > 60 * small["state"]
    for what in small.keys() - {"state"}:
        assert 0 < large[what] < 1.1 * small[what] + 200, (what, small, large)


def assert_same(seen: Seen, expected: Seen, what: str) -> None:
    assert seen.whole.keys() == expected.whole.keys(), what
    for name, value in expected.whole.items():
        assert seen.whole[name].dtype == value.dtype, (what, name)
        assert torch.equal(seen.whole[name], value), (what, name)
    assert seen.numbers == expected.numbers, what
    torch.testing.assert_close(seen.logits, expected.logits, rtol=1e-5, atol=1e-6, msg=what)
