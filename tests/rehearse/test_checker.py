"""The race checker itself: it reports a toy's race of each kind, and does not report the ordered twin."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from laconic.rehearse import Machine, rehearsal
from laconic.rehearse.machine import byte_runs
from laconic.rehearse.modes import accelerator
from laconic.rehearse.order import overlap, races
from laconic.rehearse.tape import Site, Step, Tape
from laconic.rehearse.threads import Thread
from tests.rehearse.replay import Orders

Toy = Callable[[Machine, Any, bool], None]
"""A program of (machine, torch's module of the device, whether its accesses have an order)."""


def behind(streams: Any) -> Any:
    """A stream that begins behind the current one."""
    side = streams.Stream()
    side.wait_stream(streams.current_stream())
    return side


def write_and_read(machine: Machine, streams: Any, ordered: bool) -> None:
    x = torch.zeros(8, device="cuda")
    side = behind(streams)
    with streams.stream(side):
        x.add_(1)
    if ordered:
        streams.current_stream().wait_event(side.record_event())
    (x * 2).sum().item()


def event_too_early(machine: Machine, streams: Any, ordered: bool) -> None:
    x = torch.zeros(8, device="cuda")
    side = behind(streams)
    early = side.record_event()
    with streams.stream(side):
        x.add_(1)
    streams.current_stream().wait_event(side.record_event() if ordered else early)
    x.mul_(2)


def overlapping_parts(machine: Machine, streams: Any, ordered: bool) -> None:
    """Both twins have two streams without an order; the ordered one writes to parts that do not overlap."""
    x = torch.zeros(4, 8, device="cuda")
    side = behind(streams)
    with streams.stream(side):
        x[:, :4].add_(1)  # strided: four runs of bytes
    x[:, (4 if ordered else 3) :].mul_(2)
    streams.current_stream().wait_stream(side)


def in_a_list(machine: Machine, streams: Any, ordered: bool) -> None:
    values = [torch.zeros(8, device="cuda") for _ in range(3)]
    side = behind(streams)
    with streams.stream(side):
        torch._foreach_add_(values[1:], 1.0)
    if ordered:
        streams.current_stream().wait_stream(side)
    torch.add(values[0], 1.0, out=values[2])


def used_before_its_allocation(machine: Machine, streams: Any, ordered: bool) -> None:
    """A side stream writes to new memory, which compute may still read under another name."""
    old = torch.ones(64, device="cuda")
    y = old * 3
    side = streams.Stream()
    del old
    new = torch.empty(64, device="cuda")
    if ordered:
        side.wait_stream(streams.current_stream())
    with streams.stream(side):
        new.fill_(7.0)
    streams.current_stream().wait_stream(side)
    (y + new).sum().item()


def _freed_while_read(streams: Any, ordered: bool, free: Callable[[list[Tensor]], Any]) -> None:
    held = [torch.ones(64, device="cuda")]
    side = behind(streams)
    with streams.stream(side):
        y = held[0] * 2
    if ordered:
        streams.current_stream().wait_stream(side)
    free(held)
    z = torch.zeros(64, device="cuda")
    streams.current_stream().wait_stream(side)
    (y + z).sum().item()


def reused_memory(machine: Machine, streams: Any, ordered: bool) -> None:
    """Compute frees what a side stream still reads, and the next allocation may have the memory."""
    _freed_while_read(streams, ordered, lambda held: held.clear())


def emptied_storage(machine: Machine, streams: Any, ordered: bool) -> None:
    _freed_while_read(streams, ordered, lambda held: held[0].untyped_storage().resize_(0))


def host_edits_pinned_memory(machine: Machine, streams: Any, ordered: bool) -> None:
    x = torch.ones(64, pin_memory=True)
    y = torch.empty(64, device="cuda")
    y.copy_(x, non_blocking=True)
    if ordered:
        streams.current_stream().record_event().synchronize()
    x.zero_()
    y.sum().item()


def host_reads_pinned_memory(machine: Machine, streams: Any, ordered: bool) -> None:
    x = torch.empty(4, pin_memory=True)
    x.copy_(torch.ones(4, device="cuda"), non_blocking=True)
    if ordered:
        torch.zeros(1, device="cuda").item()  # waits for the stream, as on a real device
    x.tolist()


def collective(machine: Machine, streams: Any, ordered: bool, device: str = "cuda") -> None:
    x = torch.ones(64, device=device)
    work: Any = dist.all_reduce(x, async_op=True)
    if ordered:
        work.wait()
    x.mul_(2)
    work.wait()


def collective_on_the_host(machine: Machine, streams: Any, ordered: bool) -> None:
    collective(machine, streams, ordered, "cpu")


def message_on_the_host(machine: Machine, streams: Any, ordered: bool) -> None:
    """A buffer goes, and its memory to another tensor, while another rank may still read it."""
    x = torch.ones(64)
    work: Any = dist.isend(x, 1)
    if ordered:
        work.wait()
    del x, work
    torch.zeros(64)


def thread_reads(machine: Machine, streams: Any, ordered: bool) -> None:
    """A background thread writes to a file what the program changes."""
    x = torch.ones(64)
    job = Thread(machine, 1).submit(lambda: torch.save(x, io.BytesIO()))
    if ordered:
        job.result()
    x.mul_(2)
    job.result()


def thread_reads_a_copy(machine: Machine, streams: Any, ordered: bool) -> None:
    """A background thread reads the copy of a device's tensor, which the device may still write."""
    x, copy = torch.ones(64, device="cuda"), torch.empty(64, pin_memory=True)
    copy.copy_(x, non_blocking=True)
    if ordered:
        streams.current_stream().synchronize()
    Thread(machine, 1).submit(copy.tolist).result()


def part_of_a_buffer(machine: Machine, streams: Any, ordered: bool) -> None:
    """Two storages are parts of one buffer, and overlap or not."""
    whole = torch.zeros(16, dtype=torch.uint8, pin_memory=True).untyped_storage()
    first, second = (torch.empty(0, dtype=torch.uint8).set_(part) for part in (whole[:8], whole[8 if ordered else 4 :]))
    first.copy_(torch.ones(8, dtype=torch.uint8, device="cuda"), non_blocking=True)
    second.tolist()


def number_of_the_host(machine: Machine, streams: Any, ordered: bool) -> None:
    """An operation on the device takes a number of host memory when it is issued, or a copy takes it later."""
    x, number = torch.ones(8, device="cuda"), torch.ones((), pin_memory=True)
    if ordered:
        x.mul_(number)
    else:
        x.copy_(number, non_blocking=True)
    number.zero_()
    x.sum().item()


TOYS: list[Toy] = [
    write_and_read, event_too_early, overlapping_parts, in_a_list, reused_memory, used_before_its_allocation,
    emptied_storage, host_edits_pinned_memory, host_reads_pinned_memory, collective, collective_on_the_host,
    message_on_the_host, thread_reads, thread_reads_a_copy, part_of_a_buffer, number_of_the_host,
]  # fmt: skip


def recorded(toy: Toy, *, ordered: bool) -> Machine:
    with rehearsal(local=2, has_values=True) as machine:
        with machine.recording():
            toy(machine, torch.get_device_module("cuda"), ordered)
        machine.keep_last_contents()
    return machine


@pytest.mark.parametrize("toy", TOYS, ids=lambda toy: toy.__name__)
def test_each_kind_of_race_is_reported_and_its_ordered_twin_is_not(toy: Toy) -> None:
    found = list(races(recorded(toy, ordered=False).tape))
    assert found
    assert all("test_checker.py" in place for race in found for _, _, place in (race.first, race.second))
    assert list(races(recorded(toy, ordered=True).tape)) == []


@pytest.mark.parametrize(
    "toy", [write_and_read, reused_memory, host_edits_pinned_memory, thread_reads], ids=lambda toy: toy.__name__
)
def test_random_orders_show_a_race_as_other_bits(toy: Toy) -> None:
    for ordered in (True, False):
        orders = Orders(recorded(toy, ordered=ordered))
        equal = {orders.is_equal(seed) for seed in range(20)}
        assert orders.differs_from_recording == []
        assert equal == ({True} if ordered else {True, False})


def test_a_wait_that_orders_nothing_goes_unnoticed() -> None:
    needed, redundant = (Site("toy.py", line, "toy", "wait") for line in (1, 2))

    def program() -> Tape:
        with accelerator() as machine, machine.recording() as tape:
            streams = torch.get_device_module("cuda")
            x = torch.zeros(8, device="cuda")
            side = behind(streams)
            with streams.stream(side):
                x.add_(1)
            for site in (needed, redundant):
                machine.wait(streams.current_stream().timeline, machine.record(side.timeline, None), site)
                x.mul_(2)
        return tape

    tape = program()
    assert list(races(tape)) == []
    assert tape.sites == [needed, redundant]
    assert list(races(tape.without({redundant}))) == []
    assert len(list(races(tape.without({needed})))) == 1


def test_a_transfer_runs_beside_the_compute_that_no_event_orders() -> None:
    with rehearsal(local=2) as machine, machine.recording() as tape:
        x, y = torch.ones(64, device="cuda"), torch.ones(8, 8, device="cuda")
        y.mul_(2)  # before the transfer
        work: Any = dist.all_reduce(x, async_op=True)
        y @ y  # beside it
        work.wait()
        y.add_(1)  # after it
        dist.all_reduce(y)  # on the current stream: beside nothing
    hidden, exposed = overlap(tape)
    assert (hidden.transfer.op, hidden.transfer.level, hidden.transfer.sent_bytes) == ("all-reduce", "local", 64 * 4)
    assert [step.name for step in hidden.compute] == ["aten::mm"]
    assert exposed.compute == []


def test_backward_runs_in_another_thread_as_on_an_accelerator() -> None:
    threads = []
    with rehearsal(local=2) as machine, machine.recording() as tape:
        x = torch.ones(8, device="cuda", requires_grad=True)
        x.register_hook(lambda gradient: threads.append(threading.current_thread()))
        (x * 2).sum().backward()
        failing = (x * 3).sum()
        failing.register_hook(lambda gradient: {}["missing"])
        with pytest.raises(KeyError, match="missing"):
            failing.backward()
    assert len(threads) == 1
    assert threads[0] is not threading.current_thread()
    products = [step for step in tape.entries if isinstance(step, Step) and step.name == "aten::mul"]
    assert len(products) > 2, "two of forwards; the machine sees those of backward, too"


@pytest.mark.parametrize(
    ("tensor", "runs"),
    [
        (torch.empty(6, dtype=torch.int16), [(0, 12)]),
        (torch.empty(4, 6, dtype=torch.int16)[1:3], [(12, 36)]),
        (torch.empty(4, 6, dtype=torch.int16).t(), [(0, 48)]),
        (torch.empty(4, 6, dtype=torch.int16)[:, 2:4], [(4, 8), (16, 20), (28, 32), (40, 44)]),
        (torch.empty(2, 2, 3, dtype=torch.int8)[:, :, 1], [(1, 2), (4, 5), (7, 8), (10, 11)]),
        (torch.empty(1, dtype=torch.float32).expand(5), [(0, 4)]),
        (torch.empty(5000, 2, dtype=torch.int8)[:, 0], [(0, 9999)]),  # too many runs: one that holds them all
    ],
)
def test_bytes_of_a_view(tensor: Tensor, runs: list[tuple[int, int]]) -> None:
    assert sorted(byte_runs(tensor)) == runs
