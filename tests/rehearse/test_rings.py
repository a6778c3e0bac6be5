"""What ranks send by level: routes against the closed formulas, and on the tapes of torch's own collectives."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from laconic.rehearse import Tape, rehearsal
from laconic.rehearse.rings import Places, Ring
from laconic.rehearse.tape import Step
from laconic.strategies.ring import RingReduceScatter
from tests.support.launch import launch
from tests.support.step_bytes import step_bytes

SHAPES = [(2, 2), (3, 1), (1, 4), (2, 3), (4, 2)]
_WIDTH, _BLOCKS = 24, 3
_NBYTES = 4 * _BLOCKS * _WIDTH * _WIDTH


@pytest.mark.parametrize(("nodes", "local"), SHAPES)
def test_routes_of_rings_follow_the_formulas(nodes: int, local: int) -> None:
    """A pass sends (R - 1) / R of the buffer over each edge, and waits for all wires but one."""
    places = Places(nodes=nodes, local=local)
    flat = Ring(range(nodes * local), places)
    expected = step_bytes("ddp", nodes=nodes, local=local, weights_bytes=0, gradients_bytes=100)
    route = flat.all_reduce(100)
    assert local * route.sent.get("node", 0) == pytest.approx(expected.node)
    assert local * route.sent.get("local", 0) == pytest.approx(expected.local)
    assert route.hops.get("node", 0) == 2 * (nodes - 1)
    assert route.hops.get("local", 0) == (2 * nodes if local > 1 else 0)
    inside, across = Ring(range(local), places), Ring(range(0, nodes * local, local), places)
    assert inside.gather(100).sent == ({"local": pytest.approx(100 * (local - 1) / local)} if local > 1 else {})
    assert across.gather(100).sent == ({"node": pytest.approx(100 * (nodes - 1) / nodes)} if nodes > 1 else {})


def test_a_message_to_the_next_rank_crosses_nodes_on_one_rank_of_a_node() -> None:
    """Its bytes are a mean over the ranks."""
    ring = Ring(range(8), Places(nodes=2, local=2))
    assert ring.message(100, 1).sent == {"local": 50, "node": 25, "island": 25}
    assert ring.message(100, 4).sent == {"island": 100}


def _sent(tape: Tape) -> dict[str, float]:
    found: Counter[str] = Counter()
    for entry in tape.entries:
        if isinstance(entry, Step) and entry.transfer is not None:
            for level, nbytes in entry.transfer.route.sent.items():
                found[f"{level} {entry.transfer.purpose}"] += nbytes  # type: ignore[assignment]
    return dict(found)


def _train(nodes: int, local: int, *, replicas: int) -> dict[str, float]:
    """One step of FSDP2 or HSDP."""
    with rehearsal(nodes=nodes, local=local) as machine:
        model = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(_BLOCKS))).to("cuda")
        sizes = (replicas, nodes * local // replicas) if replicas > 1 else (nodes * local,)
        mesh = init_device_mesh("cuda", sizes, mesh_dim_names=("replicate", "shard")[-len(sizes) :])
        for block in model:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        with machine.recording() as tape:
            model(torch.randn(2, _WIDTH, device="cuda")).sum().backward()
    return _sent(tape)


def _sum_along_a_ring() -> tuple[dict[str, float], list[tuple[str, int]]]:
    """The ring reduce-scatter of FSDP2's baseline on a CPU: its bytes, and its messages with their numbers."""
    with rehearsal(nodes=2, local=2) as machine, machine.recording() as tape:
        assert dist.group.WORLD is not None
        whole = torch.ones(80)
        RingReduceScatter()(torch.empty(20), whole, dist.group.WORLD, dist.ReduceOp.SUM)
    steps = [each for each in tape.entries if isinstance(each, Step) and each.transfer is not None]
    messages = dict.fromkeys((s.transfer.op, s.transfer.message[2]) for s in steps if s.transfer and s.transfer.message)
    return _sent(tape), list(messages)


def _gather_and_sum_on_gloo() -> tuple[dict[str, float], list[tuple[str, int]]]:
    """Gloo's own collectives: their bytes, and the memory that they take."""
    with rehearsal(nodes=2, local=2) as machine:
        whole, piece = torch.ones(80), torch.empty(20)
        with machine.recording() as tape:
            dist.all_gather_into_tensor(whole, piece)
            dist.reduce_scatter_tensor(piece, whole)
        taken = [(tape.timelines[tape.memories[n].timeline], tape.memories[n].nbytes) for n in sorted(tape.allocated)]
    return _sent(tape), taken


def _tapes() -> Any:
    shapes = [(nodes, local) for nodes, local in SHAPES if nodes > 1 and local > 1]
    steps = {("fsdp2", *shape): _train(*shape, replicas=1) for shape in SHAPES}
    steps |= {("hsdp", *shape): _train(*shape, replicas=shape[0]) for shape in shapes}
    return steps, _sum_along_a_ring(), _gather_and_sum_on_gloo()


@pytest.mark.machine
def test_the_tapes_of_torchs_collectives_have_their_bytes() -> None:
    """Steps of FSDP2 and HSDP send what the formulas say. A ring of messages moves a pass. Gloo sums a whole copy."""
    steps, (sent, messages), (on_gloo, taken) = launch(_tapes, num_ranks=1, timeout_s=60, backend=None)[0]
    for (name, nodes, local), found in steps.items():
        expected = step_bytes(name, nodes=nodes, local=local, weights_bytes=_NBYTES, gradients_bytes=_NBYTES)
        assert {kind.split()[1] for kind in found} == {"weights", "gradients"}
        for level, nbytes in (("node", expected.node), ("local", expected.local)):
            both = found.get(f"{level} weights", 0) + found.get(f"{level} gradients", 0)
            assert local * both == pytest.approx(nbytes), (name, nodes, local, level)
    assert sent == {level: pytest.approx(0.5 * 0.75 * 320) for level in ("node control", "local control")}
    for op in ("send", "receive"):  # what is received has the number of what is sent
        assert sorted(number for each, number in messages if each == op) == list(range(1, 13))
    assert sum(on_gloo.values()) == pytest.approx(3 * 0.75 * 320)
    assert [nbytes for name, nbytes in taken if name.startswith("Gloo")] == [320]
    assert [nbytes for name, nbytes in taken if name == "host"] == [320]
