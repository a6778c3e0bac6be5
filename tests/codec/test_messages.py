"""Sums whose terms cross without loss have the bits of exact ones; and messages between ranks whose lengths vary."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import laconic
from laconic.codec import lossless_gradients
from laconic.codec.coding import PartCoding
from laconic.codec.lossless import UnreadMessage
from laconic.codec.lossless_gradients import BLOCK, TYPICAL_BITS, Exponents
from laconic.codec.messages import ToldLengths, UnderWay
from laconic.codec.sums import CodedSum
from laconic.comm.cluster import Cluster
from laconic.comm.collectives import Communicator
from laconic.comm.moves import NOTHING, Pending
from laconic.comm.traffic import Purpose
from tests.support.launch import on_ranks
from tests.support.sharded_net import moved


class Held:
    nbytes = 0

    def __call__(self, nbytes: int) -> None:
        self.nbytes += nbytes


def way() -> tuple[Communicator, Cluster]:
    cluster = Cluster(laconic.init_mesh("cpu"))
    return Communicator(cluster, "node"), cluster


def terms(step: int, numel: int, dtype: torch.dtype) -> Tensor:
    """A rank's term: some steps are of zeros, some of patterns that no code makes shorter."""
    draw = torch.Generator().manual_seed(10 * step + dist.get_rank())
    match step % 4:
        case 1 if dist.get_rank() == 1:
            values = torch.zeros(numel)
        case 3:
            values = torch.randn(numel, generator=draw) * torch.exp2(torch.randint(-30, 30, (numel,), generator=draw))
        case _:
            values = torch.randn(numel, generator=draw) * 1e-3
    return values.to(dtype)


def lossless_sum(way: Any, held: Held) -> CodedSum:
    return CodedSum(ToldLengths(way, Exponents(), "gradients"), held)


def finished(way: Communicator | CodedSum, whole: Tensor, numels: Sequence[int] | None) -> Tensor:
    return way.start_reduce_scatter(whole, numels=numels).finish()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@on_ranks(3, local=1)
def test_a_reduce_scatter_has_the_bits_of_exact_terms(dtype: torch.dtype) -> None:
    """Of equal parts and of others, one of them empty, while lengths jump."""
    (exact, _), held, draw = way(), Held(), random.Random(0)
    coded = lossless_sum(exact, held)
    for step in range(8):
        numels = draw.choice([None, [1000, 0, 517], [300, 5000, 1]])
        numel = 3 * 700 if numels is None else sum(numels)
        whole = terms(step, numel, dtype)
        want, got = finished(exact, whole, numels), finished(coded, whole, numels)
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8)), step
        assert got.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr()
        assert torch.equal(whole.view(torch.uint8), terms(step, numel, dtype).view(torch.uint8)), "the input stays"
    assert held.nbytes == 0


@on_ranks(3, local=1)
def test_unequal_parts_take_bytes_in_proportion_and_what_came_is_what_was_sent() -> None:
    (node, cluster), rank = way(), dist.get_rank()
    coded, numels = lossless_sum(node, Held()), [20_000, 10_000, 100]
    for _ in range(3):
        with moved(cluster) as m:
            finished(coded, terms(0, sum(numels), torch.bfloat16), numels)
    sent = m.snapshot.total("node", "gradients", "sent")
    assert 0 <= sent - 11.3 / 8 * (sum(numels) - numels[rank]) < 2000
    own = terms(0, 200_001, torch.bfloat16)
    transfer = lossless_sum(node, Held()).start_reduce_scatter(own)
    of_message = 2 * 66_667 * 11.5 / 8
    assert 2.9 * of_message < transfer.nbytes < 3.1 * of_message, "messages: as they are coded, sent and received"
    gathered = [torch.empty_like(own) for _ in range(3)]
    dist.all_gather(gathered, own)
    parts = [whole[66_667 * rank :][:66_667] for whole in gathered]
    for came, part in zip(transfer.received(), parts, strict=True):
        assert torch.equal(came, part)
    assert torch.equal(transfer.finish(), parts[0] + parts[1] + parts[2])


@on_ranks(3, local=1)
def test_an_all_reduce_over_islands_gives_all_ranks_the_sum_in_the_order_of_ranks() -> None:
    mesh, held = laconic.init_mesh("cpu", islands=3, nodes=1, local=1), Held()
    coded = lossless_sum(Communicator(Cluster(mesh), "island"), held)
    for step in range(4):
        for numel in (1, 2, 7, 5000):
            own = terms(step, numel, torch.bfloat16)
            gathered = [torch.empty_like(own) for _ in range(3)]
            dist.all_gather(gathered, own)
            want = gathered[0] + gathered[1] + gathered[2]
            assert sum(1 for _ in coded.sum_in_place(own)) == 2, "trips"
            assert torch.equal(own.view(torch.int16), want.view(torch.int16)), (step, numel)
    assert held.nbytes == 0


@on_ranks(3, local=1)
def test_a_head_with_a_wrong_bit_is_an_error() -> None:
    """Also in the rate, by which a rank would begin a transfer alone."""
    coded = lossless_sum(way()[0], Held())
    for bit in range(0, 128, 9):
        transfer = coded.start_reduce_scatter(terms(0, 900, torch.bfloat16))
        transfer.under_way.pending.wait()
        transfer.under_way.landing[1, bit // 8] ^= 1 << bit % 8
        with pytest.raises(RuntimeError, match=r"messages say that they are .* bytes long.*damaged"):
            transfer.finish()


@on_ranks(2, local=1)
def test_steady_terms_take_one_transfer_and_the_bytes_of_the_longest() -> None:
    node, cluster = way()
    coded, numel = lossless_sum(node, Held()), 64 * BLOCK

    def sent(step: int) -> int:
        with moved(cluster) as m:
            finished(coded, terms(step, 2 * numel, torch.bfloat16), None)
        return m.gradients

    first, steady = sent(0), sent(0)
    assert first == 16 + 256 + numel * 11.5 / 8, "what is typical"
    assert 11 * numel // 8 < steady < 11.4 * numel / 8
    jumped, wide = sent(3), sent(3)
    assert 15 * numel // 8 < jumped <= 2 * numel + 32, "what was expected, and in a second transfer the rest"
    assert jumped <= wide <= jumped * 129 // 128 + 256


class Rehearsed:
    """The way of a rank that rehearses: what comes has no meaning."""

    rank, size, has_peers = 0, 2, False

    def start_all_to_all(self, landings: Tensor, messages: Tensor, /, *, numels: Sequence[int]) -> Pending:
        return NOTHING

    def all_gather(
        self, whole: Tensor, piece: Tensor, purpose: Purpose, /, *, numels: Sequence[int] | None = None
    ) -> Pending:
        return NOTHING


def test_in_a_rehearsal_messages_have_the_typical_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """In both trips, at first and later: nobody can read how long they are."""
    lengths = []

    def encode(values: Tensor) -> UnreadMessage:
        return UnreadMessage.of(values.new_zeros(values.nbytes, dtype=torch.uint8))

    monkeypatch.setattr(lossless_gradients, "encode", encode)
    monkeypatch.setattr(lossless_gradients, "decode", lambda message, out: lengths.append(len(message)))
    coded, numel = lossless_sum(Rehearsed(), Held()), 1000
    for _ in range(3):
        assert sum(1 for _ in coded.sum_in_place(torch.zeros(2 * numel, dtype=torch.bfloat16))) == 2
    typical = numel * TYPICAL_BITS[torch.bfloat16] / 8
    assert lengths == [math.floor(typical)] * 2 * 3


# -- messages whose lengths vary ---------------------------------------------------------------------------------------


def body_of(rank: int, step: int, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(256, (length,), generator=generator, dtype=torch.uint8)


class Bodies(PartCoding):
    """Each part is a message as it is, the first part of a longer buffer, as on an accelerator."""

    def typical_bits(self, dtype: torch.dtype) -> float:
        return 4.0

    def encode(self, part: Tensor, base: Tensor | None = None) -> UnreadMessage:
        buffer = torch.cat([part, torch.full((50,), 7, dtype=torch.uint8)])
        return UnreadMessage(buffer, torch.tensor([len(part)], dtype=torch.int32))

    def decode_into(self, index: int, message: Tensor, part: Tensor, *, adds: bool = False) -> None:
        raise AssertionError("the test reads messages")


def told(node: Communicator, purpose: Purpose = "weights") -> ToldLengths:
    return ToldLengths(node, Bodies(), purpose)  # type: ignore[arg-type]


def arrived(under_way: UnderWay) -> dict[int, Tensor]:
    """The messages of the other ranks."""
    return {rank: each for rank, each in enumerate(under_way.arrive()) if rank != dist.get_rank()}


@on_ranks(3, local=1)
def test_messages_of_any_lengths_arrive_whole() -> None:
    """Lengths that grow, shrink, vanish and jump, other ones on each rank."""
    node, _ = way()
    draw, messages = random.Random(0), told(node)
    lengths = [[draw.choice([0, 1, 15, 16, 17, 400, 1000, 1031, 70_000]) for _ in range(3)] for _ in range(15)]
    for step, by_rank in enumerate(lengths):
        found = arrived(messages.start_gather(body_of(dist.get_rank(), step, by_rank[dist.get_rank()])))
        assert found.keys() == {0, 1, 2} - {dist.get_rank()}
        for rank, body in found.items():
            assert torch.equal(body, body_of(rank, step, by_rank[rank])), (step, rank)
        assert not [each for each in vars(messages).values() if isinstance(each, torch.Tensor)]
        if step % 7 == 6:
            messages.forget()


@on_ranks(2, local=1)
def test_steady_lengths_take_one_transfer_and_little_more_than_their_bytes() -> None:
    node, cluster = way()
    messages = told(node)

    def sent(length: int) -> int:
        with moved(cluster) as m:
            messages.start_gather(body_of(dist.get_rank(), 0, length)).arrive()
        return m.weights

    def padded(nbytes: int) -> int:
        return -(-nbytes // 16) * 16

    def guessed(length: int) -> int:
        return padded(-(-(16 + length) * 33 // 32))

    assert sent(10_000) == 16 + 10_000, "of the first message nothing is known: a head, then all of it"
    assert sent(10_200) == guessed(10_000), "it fits, with the margin"
    assert sent(9_000) == guessed(10_200)
    assert sent(9_600) == guessed(9_000) + padded(9_616 - guessed(9_000))
    messages.forget()
    assert sent(4_800) == 16 + 4_800, "nothing is known again"


@on_ranks(2, local=1)
def test_steady_rates_take_one_transfer_and_little_more_than_their_bytes() -> None:
    """A message of `length` bytes stands for 10,000 values."""
    node, cluster = way()
    messages, numel = told(node, "gradients"), 10_000
    messages.coding.encode = lambda part, base=None: Bodies().encode(part[: lengths[-1]])  # type: ignore[method-assign]
    lengths: list[int] = []

    def sent(length: int) -> int:
        lengths.append(length)
        part = torch.cat([body_of(dist.get_rank(), length, length), torch.zeros(numel, dtype=torch.uint8)])[:numel]
        with moved(cluster) as m:
            (came,) = arrived(messages.start_exchange([part, part])).values()
        assert torch.equal(came, body_of(1 - dist.get_rank(), length, length)[:numel])
        return m.gradients

    def sent_at(rate: int) -> int:
        return -(-(16 + 256 - (-numel * rate // 256)) // 16) * 16

    rate = -(-(9_900 - 256) * 256 // numel)
    assert sent(9_900) == sent_at(rate), "half a byte a value, as is typical, and then the rest"
    with_margin = rate + rate // 128 + 1
    assert sent(9_950) == sent_at(with_margin), "it fits, with the margin"
    sent(200)
    assert sent(200) == sent_at(1), "a short message has no rate"


@on_ranks(2, local=1)
def test_messages_that_are_cut_short_or_damaged() -> None:
    """All ranks drop a message that is under way, forget, and go on; a damaged length is an error."""
    node, _ = way()
    messages = told(node)
    messages.start_gather(body_of(dist.get_rank(), 0, 500))
    messages.forget()
    assert [len(each) for each in arrived(messages.start_gather(body_of(dist.get_rank(), 1, 700))).values()] == [700]
    under_way = messages.start_gather(body_of(dist.get_rank(), 0, 100))
    under_way.pending.wait()
    begin = len(under_way.landing) // 2 * node.rank
    under_way.landing[begin : begin + 8] = 255
    with pytest.raises(RuntimeError, match=r"messages say that they are .* bytes long.*damaged"):
        under_way.arrive()
