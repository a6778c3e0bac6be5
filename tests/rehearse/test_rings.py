"""What ranks send by level: routes against the closed formulas, and on tapes. tests/plan has those of whole steps."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.distributed as dist

from laconic.rehearse import Tape, rehearsal
from laconic.rehearse.rings import Places, Ring
from laconic.rehearse.tape import Step
from laconic.strategies.ring import RingReduceScatter
from tests.support.step_bytes import step_bytes


@pytest.mark.parametrize(("nodes", "local"), [(2, 2), (3, 1), (1, 4), (2, 3)])
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


def test_a_ring_of_messages_moves_one_pass() -> None:
    """The ring reduce-scatter of FSDP2's baseline on a CPU."""
    with rehearsal(nodes=2, local=2) as machine, machine.recording() as tape:
        assert dist.group.WORLD is not None
        RingReduceScatter()(torch.empty(20), torch.ones(80), dist.group.WORLD, dist.ReduceOp.SUM)
    assert _sent(tape) == {level: pytest.approx(0.5 * 0.75 * 320) for level in ("node control", "local control")}
    transfers = [each.transfer for each in tape.entries if isinstance(each, Step) and each.transfer is not None]
    messages = dict.fromkeys((each.op, each.message.number) for each in transfers if each.message)
    for op in ("send", "receive"):  # what is received has the number of what is sent
        assert sorted(number for each, number in messages if each == op) == list(range(1, 13))


def test_gloos_own_collectives_move_a_pass_each_and_sum_a_whole_copy() -> None:
    with rehearsal(nodes=2, local=2) as machine:
        whole, piece = torch.ones(80), torch.empty(20)
        with machine.recording() as tape:
            dist.all_gather_into_tensor(whole, piece)
            dist.reduce_scatter_tensor(piece, whole)
        taken = [(tape.timelines[tape.memories[n].timeline], tape.memories[n].nbytes) for n in sorted(tape.allocated)]
    assert sum(_sent(tape).values()) == pytest.approx(3 * 0.75 * 320)
    assert [nbytes for name, nbytes in taken if name.startswith("Gloo")] == [320]
    assert [nbytes for name, nbytes in taken if name == "host"] == [320]
