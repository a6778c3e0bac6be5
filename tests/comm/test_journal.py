"""What ranks have done: who waits in vain is named ([Note: Ranks that do not come]), and what never ends is proved."""

from __future__ import annotations

import atexit
import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import redirect_stderr
from datetime import timedelta
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record as reported

from laconic.comm import watch
from laconic.comm.entries import decode, encode
from laconic.comm.journal import Awaited, Entries, Journal, RankRecord, Ticket, reasons_to_wait, waits
from laconic.comm.watch import find_proof, report_waits
from laconic.errors import RanksDifferError
from laconic.optim import Muon, matrices_and_rest
from tests.support import sharded_net
from tests.support.launch import launch, on_ranks, run_ranks

TIMEOUT_S = 2.0
WATCH = "laconic-watch"


def run_impatient(job: Callable[..., Any], num_ranks: int) -> list[Any]:
    """Run `job` on ranks that make their own process group."""
    return launch(job, num_ranks=num_ranks, num_local=1, timeout_s=90, backend=None)


def sharded() -> Any:
    """A sharded model, on process groups that soon give up."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    return sharded_net.shard(sharded_net.build())


def error_of(function: Callable[[], Any]) -> str:
    """The error that `function` ends with, and its notes."""
    with pytest.raises(RuntimeError) as info:
        function()
    return "\n".join([str(info.value), *getattr(info.value, "__notes__", [])])


def thread_names() -> list[str]:
    return [thread.name for thread in threading.enumerate()]


# -- ranks that are elsewhere ------------------------------------------------------------------------------------------


def job_evaluates_alone() -> tuple[str, str]:
    model = sharded()
    for step in range(2):
        sharded_net.train_step(model, seed=step)
    if dist.get_rank() == 0:
        with redirect_stderr(StringIO()) as printed, torch.no_grad():
            return error_of(lambda: model(torch.zeros(2, 5))), printed.getvalue()
    time.sleep(1.5 * TIMEOUT_S)  # it waits for rank 0 in something that is not laconic's
    return "", ""


@pytest.mark.machine
def test_a_rank_that_evaluates_alone_names_the_others() -> None:
    (error, printed), _, _ = run_impatient(job_evaluates_alone, 3)
    assert "imed out" in error
    assert printed.count("\n") == 1
    for text in (error, printed):
        assert "rank 0 has waited" in text
        assert (
            "s for weights of Net in forward 3 of Net: rank 1 never entered forward 3 of Net; it was last seen" in text
        )
        assert "; rank 2 never entered forward 3 of Net; it was last seen" in text
        assert "s ago after backward 2 of Net, and waits for no transfer of laconic" in text


def job_unequal_batches() -> str:
    model = sharded()

    def train() -> None:
        for step in range(4 - dist.get_rank()):
            sharded_net.train_step(model, seed=step)

    if dist.get_rank() == 0:
        return error_of(train)
    train()
    return error_of(dist.barrier)  # such as the end of the script


@pytest.mark.machine
def test_a_rank_with_fewer_batches_is_named() -> None:
    error, _ = run_impatient(job_unequal_batches, 2)
    assert "rank 1 never entered forward 4 of Net; it was last seen" in error
    assert "after backward 3 of Net, and waits for no transfer of laconic" in error


def job_ends() -> str:
    model = sharded()
    sharded_net.train_step(model)
    if dist.get_rank() == 0:
        return error_of(lambda: sharded_net.train_step(model))
    atexit._run_exitfuncs()  # a rank of the tests ends without
    assert WATCH not in thread_names()
    return ""


@pytest.mark.machine
def test_a_rank_that_ended_is_named() -> None:
    error, _ = run_impatient(job_ends, 2)
    assert "forward 2 of Net; it ended" in error
    assert "s ago after backward 1 of Net" in error


def job_other_parameters() -> str:
    model = sharded()
    optimizer = Muon(matrices_and_rest(model))
    sharded_net.train_step(model)
    sharded_net.squared_error(model, sharded_net.inputs(0, dist.get_rank())).backward()
    if dist.get_rank() == 0:
        return error_of(optimizer.step)
    time.sleep(1.5 * TIMEOUT_S)
    return ""


@pytest.mark.machine
def test_a_rank_that_skips_the_step_of_an_optimizer_is_named() -> None:
    error, _ = run_impatient(job_other_parameters, 2)
    assert "for control after backward 2 of Net: rank 1 does not take part; it was last seen" in error
    assert "after backward 2 of Net, and waits for no transfer of laconic" in error


def job_host_goes_on() -> str:
    """With NCCL no transfer blocks the host; it stops somewhere later."""
    report_waits(0.6)
    model = sharded_net.shard(sharded_net.build())
    sharded_net.train_step(model)
    watch._watch._host_waits = False  # type: ignore[union-attr]
    with redirect_stderr(StringIO()) as printed:
        if dist.get_rank() == 0:
            model._laconic_unit.progress.note("in forward")
        time.sleep(2.0)
    return printed.getvalue()


@pytest.mark.machine
def test_a_host_that_does_not_wait_names_the_ranks_that_are_behind() -> None:
    ahead, behind = run_ranks(job_host_goes_on, 2, local=1)
    assert "s in forward 2 of Net: rank 1 never entered forward 2 of Net; it was last seen" in ahead
    assert behind == ""


# -- while all goes well -----------------------------------------------------------------------------------------------


class CountingBoard:
    """A board that counts what is written and read."""

    def __init__(self) -> None:
        self.written: list[RankRecord | None] = []
        self.reads = 0

    def write(self, rank: int, record: RankRecord | None) -> None:
        self.written.append(record)

    def read(self, rank: int) -> None:
        self.reads += 1

    def verdict(self) -> None:
        self.reads += 1


@pytest.mark.machine
@on_ranks(2, local=1)
def test_nothing_is_sent_while_ranks_go_on() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watch, "_Board", CountingBoard)
        report_waits(0.6)
        model = sharded_net.shard(sharded_net.build())
        for step in range(20):
            sharded_net.train_step(model, seed=step)
            time.sleep(0.05)
        board: Any = watch._watch._board  # type: ignore[union-attr]
        assert not board.written
        time.sleep(1.2)  # idle, such as during a save
        assert len(board.written) == 1
        dist.barrier()
        sharded_net.train_step(model)
        time.sleep(0.3)
        assert board.written[1:] == [None]
        assert board.reads == 0
        assert thread_names().count(WATCH) == 1
        watch._watch.end()  # type: ignore[union-attr]
        assert WATCH not in thread_names()


@on_ranks(2, local=1)
def test_it_can_be_turned_off() -> None:
    report_waits(0)
    sharded_net.shard(sharded_net.build())
    assert WATCH not in thread_names()


# -- records -----------------------------------------------------------------------------------------------------------


def record(*counts: tuple[str, int, int] | None, **changes: Any) -> RankRecord:
    fields = {"last": 0, "action": "in forward", "awaited": "weights", "since": time.time(), "has_ended": False}
    numbered = {str(number): count for number, count in enumerate(counts) if count is not None}
    return decode(RankRecord, encode(RankRecord(counts=numbered, **(fields | changes))).encode())


def test_records_say_who_is_behind() -> None:
    own = record(("a", 3, 2), ("b", 2, 2))
    assert reasons_to_wait(own, {1: record(("a", 3, 2), ("b", 2, 2))}) == [], "it waits as well"
    assert reasons_to_wait(own, {1: record(("a", 2, 2), ("b", 2, 2), action="after backward", awaited=None)}) == [
        "rank 1 never entered forward 3 of a; it was last seen 0 s ago after backward 2 of a, and waits for no "
        "transfer of laconic"
    ]
    backward = record(("a", 3, 3), last=0, action="in backward")
    assert "never entered backward 3 of a" in reasons_to_wait(backward, {1: own})[0]
    assert reasons_to_wait(own, {1: record(("a", 3, 3), awaited=None, has_ended=True)}) == [
        "rank 1 does not take part; it ended 0 s ago in forward 3 of a"
    ]
    no_unit = record(last=None, action=None, awaited=None)
    assert reasons_to_wait(own, {1: no_unit}) == [
        "rank 1 does not take part; it was last seen 0 s ago before the first forward, and waits for no transfer of "
        "laconic"
    ]
    other_model = record(("teacher", 0, 0), None)
    assert reasons_to_wait(own, {1: other_model}) == []
    without_wait = record(("a", 3, 2), awaited=None)
    assert reasons_to_wait(without_wait, {1: no_unit}) == [], "the host of a rank with NCCL does not wait"
    assert len(reasons_to_wait(without_wait, {1: record(("a", 2, 2))})) == 1


# -- proof -------------------------------------------------------------------------------------------------------------


def told(ticket: Awaited | None, has_ended: bool = False, **groups: Entries) -> RankRecord:
    """A rank that waits for `ticket`, and has issued `groups`."""
    told = RankRecord(
        counts={"0": ("a", 1, 0)}, last=0, action="in forward", awaited="weights of a", since=time.time(),
        has_ended=has_ended, ticket=ticket, groups=groups,
    )  # fmt: skip
    return decode(RankRecord, encode(told).encode())


def test_ranks_that_wait_for_each_other_are_a_proof() -> None:
    records = {
        0: told(Awaited("g", 3, [0, 1, 2]), g=Entries(3, [])),
        1: told(Awaited("h", 1, [1, 2]), g=Entries(2, []), h=Entries(1, [])),
        2: told(Awaited("k", 5, [0, 2]), g=Entries(3, []), k=Entries(5, [])),
        3: told(None),
    }
    proof = find_proof(0, records)
    assert proof is not None
    assert proof.ranks == [0, 1, 2]
    assert "rank 0 waits for weights of a in forward 1 of a: rank 1 does not take part" in proof.line
    records[2] = told(None, g=Entries(3, []))  # it computes, and may issue what rank 1 waits for
    assert find_proof(0, records) is None
    assert find_proof(1, records) is None
    del records[2]  # or has told nothing
    assert find_proof(0, records) is None


def test_a_transfer_that_all_have_issued_may_end() -> None:
    """A slow wire: all ranks wait, each for another transfer."""
    both = {"g": Entries(2, ["x", "y"]), "h": Entries(1, ["z"])}
    records = {0: told(Awaited("g", 1, [0, 1]), **both), 1: told(Awaited("h", 1, [0, 1]), **both)}
    assert find_proof(0, records) is None
    assert find_proof(1, records) is None


def test_only_the_senders_are_awaited() -> None:
    records = {
        1: told(Awaited("g", 1, [0]), g=Entries(1, [])),  # a broadcast of rank 0
        0: told(None, g=Entries(1, [])),
        2: told(Awaited("h", 1, [1, 2]), h=Entries(1, [])),
    }
    assert find_proof(1, records) is None


def test_a_rank_that_has_ended_is_a_proof() -> None:
    records = {0: told(Awaited("g", 3, [0, 1]), g=Entries(3, [])), 1: told(None, has_ended=True, g=Entries(2, []))}
    proof = find_proof(0, records)
    assert proof is not None
    assert "it ended 0 s ago" in proof.line
    records[1] = told(None, has_ended=True, g=Entries(3, []))  # it has done its part
    assert find_proof(0, records) is None


def test_two_names_of_one_transfer_are_a_proof() -> None:
    records = {0: told(None, g=Entries(9, ["b", "c"])), 1: told(None, g=Entries(8, ["a", "x"]))}
    proof = find_proof(0, records)
    assert proof is not None
    assert "transfer 8 of their group is x there (in forward 1 of a), and b on rank 0" in proof.line
    records[1] = told(None, g=Entries(8, ["a", "b"]))
    assert find_proof(0, records) is None
    records[1] = told(None, g=Entries(2, ["a", "x"]))  # the names of the first ones are forgotten here
    assert find_proof(0, records) is None


def test_a_thread_of_the_user_proves_nothing() -> None:
    """A saver's thread waits while the program goes on."""
    journal = Journal.__new__(Journal)
    ticket = Ticket(None, journal, 1, ("a save", ""), None)  # type: ignore[arg-type]
    is_set, may_end = threading.Event(), threading.Event()

    def wait() -> None:
        waits.swap(ticket)
        is_set.set()
        may_end.wait(30)
        waits.swap(None)

    thread = threading.Thread(target=wait)
    thread.start()
    assert is_set.wait(30)
    assert waits.of_program() is None
    waits.swap(ticket)
    assert waits.of_program() is ticket
    waits.swap(None)
    may_end.set()
    thread.join()


def job_slow() -> float:
    """One rank computes much longer than others look for a proof, now before a step, and now within one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watch, "_PROOF_S", 0.2)
        patch.setattr(watch, "_MOST_INTERVAL_S", 0.1)
        model = sharded_net.shard(sharded_net.build())
    sharded_net.train_step(model)
    if dist.get_rank() == 1:
        time.sleep(1.5)
        model.blocks[1].register_forward_pre_hook(lambda *_: time.sleep(1.5))
    return float(sharded_net.train_step(model).detach())


def test_a_slow_rank_is_not_ended() -> None:
    assert len(run_ranks(job_slow, 3, local=1)) == 3


def job_differ(folder: Path) -> str:
    """Rank 0 gathers a tensor while the others train. A proof ends all, also out of autograd."""
    dist.init_process_group("gloo")
    report = folder / f"{dist.get_rank()}.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watch, "_PROOF_S", 0.2)
        patch.setattr(watch, "_MOST_INTERVAL_S", 0.1)
        model: Any = sharded_net.shard(sharded_net.build())
    sharded_net.train_step(model)

    @reported
    def differ() -> None:
        if dist.get_rank() == 0:
            next(model.parameters()).full_tensor()
        sharded_net.squared_error(model, sharded_net.inputs(0, 0)).backward()

    os.environ["TORCHELASTIC_ERROR_FILE"] = str(report)
    with pytest.raises(RanksDifferError) as info:
        differ()
    del os.environ["TORCHELASTIC_ERROR_FILE"]
    assert isinstance(info.value.__cause__, RuntimeError), "the backend's own error stays below"
    assert str(info.value) in json.loads(report.read_text())["message"]["message"], "torchrun shows this file"
    return str(info.value)


@pytest.mark.machine
def test_the_exception_itself_names_the_ranks(tmp_path: Path) -> None:
    for text in launch(job_differ, tmp_path, num_ranks=2, num_local=1, timeout_s=90, backend=None):
        assert "rank 0" in text
        assert "rank 1" in text
        assert "the whole of inp.weight" in text


def job_told() -> str:
    """Rank 1 looks for no proof, and is slow to read that of rank 0, which hosts the store and ends at once."""
    dist.init_process_group("gloo")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watch, "_PROOF_S", 0.2)
        patch.setattr(watch, "_MOST_INTERVAL_S", 0.1)
        model: Any = sharded_net.shard(sharded_net.build())
    sharded_net.train_step(model)
    told_verdict = watch._Watch.told_verdict

    def slowly(self: watch._Watch) -> str:
        time.sleep(2.0)
        return told_verdict(self)

    def differ() -> None:
        if dist.get_rank() == 0:
            next(model.parameters()).full_tensor()
        sharded_net.squared_error(model, sharded_net.inputs(0, 0)).backward()

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(watch._Watch, "_prove", lambda *_: None)
            patch.setattr(watch._Watch, "told_verdict", slowly)
        with pytest.raises(RanksDifferError) as info:
            differ()
    return str(info.value)


@pytest.mark.machine
def test_a_told_proof_is_read_before_its_teller_ends() -> None:
    for text in launch(job_told, num_ranks=2, num_local=1, timeout_s=90, backend=None):
        assert "the whole of inp.weight" in text
