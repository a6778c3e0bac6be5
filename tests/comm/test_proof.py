"""A wait that never ends is proved, and one that may end is not: [Note: Proof that a transfer never ends]."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record as reported

from laconic.comm import watch
from laconic.comm.journal import Awaited, Entries, Journal, RankRecord, Ticket, waits
from laconic.comm.watch import find_proof
from laconic.errors import RanksDifferError
from tests.support import helpers
from tests.support.launch import launch, run_ranks


def record(ticket: Awaited | None, has_ended: bool = False, **groups: Entries) -> RankRecord:
    """A rank that waits for `ticket`, and has issued `groups`."""
    told = RankRecord(
        counts={"0": ("a", 1, 0)}, last=0, action="in forward", awaited="weights of a", since=time.time(),
        has_ended=has_ended, ticket=ticket, groups=groups,
    )  # fmt: skip
    return RankRecord.decode(told.encode().encode())


def test_ranks_that_wait_for_each_other_are_a_proof() -> None:
    records = {
        0: record(Awaited("g", 3, [0, 1, 2]), g=Entries(3, [])),
        1: record(Awaited("h", 1, [1, 2]), g=Entries(2, []), h=Entries(1, [])),
        2: record(Awaited("k", 5, [0, 2]), g=Entries(3, []), k=Entries(5, [])),
        3: record(None),
    }
    proof = find_proof(0, records)
    assert proof is not None
    assert proof.ranks == [0, 1, 2]
    assert "rank 0 waits for weights of a in forward 1 of a: rank 1 does not take part" in proof.line
    records[2] = record(None, g=Entries(3, []))  # it computes, and may issue what rank 1 waits for
    assert find_proof(0, records) is None
    assert find_proof(1, records) is None
    del records[2]  # or has told nothing
    assert find_proof(0, records) is None


def test_a_transfer_that_all_have_issued_may_end() -> None:
    """A slow wire: all ranks wait, each for another transfer."""
    both = {"g": Entries(2, ["x", "y"]), "h": Entries(1, ["z"])}
    records = {0: record(Awaited("g", 1, [0, 1]), **both), 1: record(Awaited("h", 1, [0, 1]), **both)}
    assert find_proof(0, records) is None
    assert find_proof(1, records) is None


def test_only_the_senders_are_awaited() -> None:
    records = {
        1: record(Awaited("g", 1, [0]), g=Entries(1, [])),  # a broadcast of rank 0
        0: record(None, g=Entries(1, [])),
        2: record(Awaited("h", 1, [1, 2]), h=Entries(1, [])),
    }
    assert find_proof(1, records) is None


def test_a_rank_that_has_ended_is_a_proof() -> None:
    records = {0: record(Awaited("g", 3, [0, 1]), g=Entries(3, [])), 1: record(None, has_ended=True, g=Entries(2, []))}
    proof = find_proof(0, records)
    assert proof is not None
    assert "it ended 0 s ago" in proof.line
    records[1] = record(None, has_ended=True, g=Entries(3, []))  # it has done its part
    assert find_proof(0, records) is None


def test_two_names_of_one_transfer_are_a_proof() -> None:
    records = {0: record(None, g=Entries(9, ["b", "c"])), 1: record(None, g=Entries(8, ["a", "x"]))}
    proof = find_proof(0, records)
    assert proof is not None
    assert "transfer 8 of their group is x there (in forward 1 of a), and b on rank 0" in proof.line
    records[1] = record(None, g=Entries(8, ["a", "b"]))
    assert find_proof(0, records) is None
    records[1] = record(None, g=Entries(2, ["a", "x"]))  # the names of the first ones are forgotten here
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
        model = helpers.shard(helpers.build())
    helpers.train_step(model)
    if dist.get_rank() == 1:
        time.sleep(1.5)
        model.blocks[1].register_forward_pre_hook(lambda *_: time.sleep(1.5))
    return float(helpers.train_step(model).detach())


def test_a_slow_rank_is_not_ended() -> None:
    assert len(run_ranks(job_slow, 3, local=1)) == 3


def job_differ(folder: Path) -> str:
    """Rank 0 gathers a tensor while the others train. A proof ends all, also out of autograd."""
    dist.init_process_group("gloo")
    report = folder / f"{dist.get_rank()}.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watch, "_PROOF_S", 0.2)
        patch.setattr(watch, "_MOST_INTERVAL_S", 0.1)
        model: Any = helpers.shard(helpers.build())
    helpers.train_step(model)

    @reported
    def differ() -> None:
        if dist.get_rank() == 0:
            next(model.parameters()).full_tensor()
        helpers.squared_error(model, helpers.inputs(0, 0)).backward()

    os.environ["TORCHELASTIC_ERROR_FILE"] = str(report)
    with pytest.raises(RanksDifferError) as info:
        differ()
    del os.environ["TORCHELASTIC_ERROR_FILE"]
    assert isinstance(info.value.__cause__, RuntimeError), "the backend's own error stays below"
    assert str(info.value) in json.loads(report.read_text())["message"]["message"], "torchrun shows this file"
    return str(info.value)


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
        model: Any = helpers.shard(helpers.build())
    helpers.train_step(model)
    told_verdict = watch._Watch.told_verdict

    def slowly(self: watch._Watch) -> str:
        time.sleep(2.0)
        return told_verdict(self)

    def differ() -> None:
        if dist.get_rank() == 0:
            next(model.parameters()).full_tensor()
        helpers.squared_error(model, helpers.inputs(0, 0)).backward()

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(watch._Watch, "_prove", lambda *_: None)
            patch.setattr(watch._Watch, "told_verdict", slowly)
        with pytest.raises(RanksDifferError) as info:
            differ()
    return str(info.value)


def test_a_told_proof_is_read_before_its_teller_ends() -> None:
    for text in launch(job_told, num_ranks=2, num_local=1, timeout_s=90, backend=None):
        assert "the whole of inp.weight" in text
