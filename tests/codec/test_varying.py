"""Messages whose lengths vary, between ranks."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist

import laconic
from laconic.codec.lossless import UnreadMessage
from laconic.codec.varying import VaryingMessages, VaryingParts
from laconic.comm.cluster import Cluster
from laconic.comm.collectives import Communicator
from tests.support.launch import on_ranks


def body_of(rank: int, step: int, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(256, (length,), generator=generator, dtype=torch.uint8)


class Held:
    nbytes = 0

    def __call__(self, nbytes: int) -> None:
        self.nbytes += nbytes


def way() -> tuple[Communicator, Cluster]:
    cluster = Cluster(laconic.init_mesh("cpu"))
    return Communicator(cluster, "node"), cluster


def start(messages: VaryingMessages, body: torch.Tensor) -> None:
    """Send `body`, which is a part of a longer buffer, as on an accelerator."""
    buffer = torch.cat([body, torch.full((50,), 7, dtype=torch.uint8)])
    messages.start(lambda: UnreadMessage(buffer, torch.tensor([len(body)], dtype=torch.int32)), typical_bytes=0)


def finish(messages: VaryingMessages) -> dict[int, torch.Tensor]:
    found: dict[int, torch.Tensor] = {}
    messages.finish(found.__setitem__)
    return found


@on_ranks(3, local=1)
def test_messages_of_any_lengths_arrive_whole() -> None:
    """Lengths that grow, shrink, vanish and jump, other ones on each rank."""
    node, _ = way()
    held, draw = Held(), random.Random(0)
    messages = VaryingMessages(node, held, "weights")
    lengths = [[draw.choice([0, 1, 15, 16, 17, 400, 1000, 1031, 70_000]) for _ in range(3)] for _ in range(40)]
    for step, by_rank in enumerate(lengths):
        start(messages, body_of(dist.get_rank(), step, by_rank[dist.get_rank()]))
        assert held.nbytes > 0
        arrived = finish(messages)
        assert arrived.keys() == {0, 1, 2} - {dist.get_rank()}
        for rank, body in arrived.items():
            assert torch.equal(body, body_of(rank, step, by_rank[rank])), (step, rank)
        assert held.nbytes == 0
        assert not [each for each in vars(messages).values() if isinstance(each, torch.Tensor)]
        if step % 7 == 6:
            messages.forget()


@on_ranks(2, local=1)
def test_steady_lengths_take_one_transfer_and_little_more_than_their_bytes() -> None:
    node, cluster = way()
    messages = VaryingMessages(node, Held(), "weights")

    def sent(length: int) -> int:
        before = cluster.traffic.snapshot()
        start(messages, body_of(dist.get_rank(), 0, length))
        finish(messages)
        return (cluster.traffic.snapshot() - before).total("node", "weights", "sent")

    assert sent(10_000) == 16 + 10_000, "of the first message nothing is known: a head, then all of it"
    expected = -(-10_016 * 33 // 32 // 16) * 16
    assert sent(10_200) == expected, "it fits, with the margin"
    assert sent(9_000) == -(-10_216 * 33 // 32 // 16) * 16
    assert sent(9_600) == -(-9_016 * 33 // 32 // 16) * 16 + -(-(9_616 - -(-9_016 * 33 // 32 // 16) * 16) // 16) * 16
    messages.forget()
    assert sent(4_800) == 16 + 4_800, "nothing is known again"


@on_ranks(2, local=1)
def test_steady_rates_take_one_transfer_and_little_more_than_their_bytes() -> None:
    node, cluster = way()
    parts, numel = VaryingParts(node), 10_000

    def sent(length: int) -> int:
        before = cluster.traffic.snapshot()
        body = body_of(dist.get_rank(), length, length)
        message = UnreadMessage(body, torch.tensor([length], dtype=torch.int32))
        under_way = parts.start({1 - dist.get_rank(): message}, [numel, numel], typical_bits=4.0)
        (came,) = under_way.finish().values()
        assert torch.equal(came, body_of(1 - dist.get_rank(), length, length))
        return (cluster.traffic.snapshot() - before).total("node", "gradients", "sent")

    def sent_at(rate: int) -> int:
        return -(-(16 + 256 - (-numel * rate // 256)) // 16) * 16

    rate = -(-(10_000 - 256) * 256 // numel)
    assert sent(10_000) == sent_at(rate), "half a byte a value, as is typical, and then the rest"
    with_margin = rate + rate // 128 + 1
    assert sent(10_050) == sent_at(with_margin), "it fits, with the margin"
    sent(200)
    assert sent(200) == sent_at(1), "a short message has no rate"


@on_ranks(2, local=1)
def test_a_message_that_is_cut_short_leaves_nothing() -> None:
    """All ranks drop a message that is under way, forget, and go on."""
    node, _ = way()
    held = Held()
    messages = VaryingMessages(node, held, "weights")
    start(messages, body_of(dist.get_rank(), 0, 500))
    messages.forget()
    start(messages, body_of(dist.get_rank(), 1, 700))
    assert [len(each) for each in finish(messages).values()] == [700]
    assert held.nbytes == 0


@on_ranks(2, local=1)
def test_a_damaged_length_is_an_error() -> None:
    node, _ = way()
    messages = VaryingMessages(node, Held(), "weights")
    start(messages, body_of(dist.get_rank(), 0, 100))
    messages._pending.wait()
    assert messages._arriving is not None
    messages._arriving[8 * 2 * node.rank : 8 * 2 * node.rank + 8] = 255
    with pytest.raises(RuntimeError, match=r"messages say that they are .* bytes long.*damaged"):
        finish(messages)
