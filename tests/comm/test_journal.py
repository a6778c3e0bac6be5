"""What ranks have done: who waits in vain is named ([Note: Ranks that do not come]), and what never ends is proved.

Of two ranks that make different blocking calls, each pair ends soon, with an error that names the difference. It is
that of a proof or of a call that compares. No two calls may meet in one transfer: Gloo would end the process.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import replace
from datetime import timedelta
from io import StringIO
from itertools import combinations, pairwise, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.elastic.multiprocessing.errors import record as reported

import laconic
from laconic import checkpoint
from laconic.comm import collectives, journal, watch
from laconic.comm.agreement import RankGroup
from laconic.comm.cluster import Cluster
from laconic.comm.collectives import share_first
from laconic.comm.entries import decode, encode
from laconic.comm.journal import Awaited, Entries, Journal, RankRecord, Ticket, here, issue, reasons_to_wait
from laconic.comm.watch import find_proof, report_waits, waiting_for
from laconic.errors import RanksDifferError
from laconic.optim import Muon, matrices_and_rest
from laconic.publish import Publisher
from laconic.rehearse import ranks
from tests.support import sharded_net
from tests.support.launch import launch, on_ranks, run_ranks

TIMEOUT_S = 2.0


class _Threads:
    """The module `threading`, whose main thread is the one that asks: each rank may start its watch."""

    main_thread = staticmethod(threading.current_thread)

    def __getattr__(self, name: str) -> Any:
        return getattr(threading, name)


@contextmanager
def watching() -> Iterator[None]:
    """Let ranks that are threads watch each other as processes do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watch, "threading", _Threads())
        patch.setattr(watch, "atexit", SimpleNamespace(register=lambda function: None))
        patch.setattr(journal.Here, "ticket", lambda self: next((each.ticket for each in self.waits.values()), None))
        yield


@pytest.fixture
def watched() -> Iterator[None]:
    with watching():
        yield


def sharded() -> Any:
    """A sharded model, on process groups that soon give up."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    return sharded_net.shard(sharded_net.build())


def error_of(function: Callable[[], Any]) -> str:
    """The error that `function` ends with, and its notes."""
    with pytest.raises(RuntimeError) as info:
        function()
    return "\n".join([str(info.value), *getattr(info.value, "__notes__", [])])


def give_up_soon() -> Any:
    """A sharded model that has taken a step, and a watch that looks for proofs soon."""
    dist.init_process_group("gloo")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watch, "_PROOF_S", 0.2)
        patch.setattr(watch, "_MOST_INTERVAL_S", 0.1)
        model = sharded_net.shard(sharded_net.build())
    sharded_net.train_step(model)
    return model


# -- ranks that are elsewhere ------------------------------------------------------------------------------------------


def job_elsewhere(how: str) -> tuple[str, str]:
    """Rank 0 waits in vain for ranks that are in something that is not laconic's. The error, and what was printed."""
    model = sharded()
    optimizer = Muon(matrices_and_rest(model))
    for step in range(2 if how == "evaluates alone" else 1):
        sharded_net.train_step(model, seed=step)
    waits_in = {
        "evaluates alone": lambda: model(torch.zeros(2, 5)),
        "skips a step": optimizer.step,
        "ends": lambda: sharded_net.train_step(model),
    }[how]
    if how == "skips a step":
        sharded_net.squared_error(model, sharded_net.inputs(0, dist.get_rank())).backward()
    if dist.get_rank() == 0:
        with redirect_stderr(StringIO()) as printed, torch.set_grad_enabled(how != "evaluates alone"):
            return error_of(waits_in), printed.getvalue()
    if how == "ends":
        watch._leave_last_word()  # as where its process ends
        assert not watch._watch._thread.is_alive()  # type: ignore[union-attr]
    time.sleep(2 * TIMEOUT_S)
    return "", ""


NO_TRANSFER = "s ago after backward 2 of Net, and waits for no transfer of laconic"
NEVER = "never entered forward 3 of Net; it was last seen"


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (
            "evaluates alone",
            [
                "rank 0 has waited",
                f"weights of Net in forward 3 of Net: rank 1 {NEVER}",
                f"; rank 2 {NEVER}",
                NO_TRANSFER,
            ],
        ),
        ("ends", ["forward 2 of Net; it ended", "s ago after backward 1 of Net"]),
        (
            "skips a step",
            ["for control after backward 2 of Net: rank 1 does not take part; it was last seen", NO_TRANSFER],
        ),
    ],
)
def test_ranks_that_are_elsewhere_are_named(watched: None, how: str, words: list[str]) -> None:
    error, printed = ranks(job_elsewhere, how, nodes=3 if how == "evaluates alone" else 2)[0]
    assert printed.count("\n") == (how != "ends")
    for text, word in product((error, printed or error), words):
        assert word in text


def job_first_weights() -> str:
    report_waits(0.6)
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    cluster = Cluster.of(laconic.init_mesh("cpu"))
    if dist.get_rank() == 0:
        time.sleep(2 * TIMEOUT_S)
        return ""
    return error_of(lambda: share_first(cluster, torch.zeros(3)))


def test_the_rank_that_owes_the_first_weights_is_named(watched: None) -> None:
    with mock.patch.object(collectives, "issue", wraps=issue) as issued:
        errors = ranks(job_first_weights, nodes=3)[1:]
    assert [call.kwargs for call in issued.call_args_list if "the first weights" in call.args] == [{"senders": [0]}] * 2
    for error in errors:
        assert "the first weights" in error
        assert set(re.findall(r": rank \d", error)) == {": rank 0"}


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


def test_a_host_that_does_not_wait_names_the_ranks_that_are_behind(watched: None) -> None:
    ahead, behind = run_ranks(job_host_goes_on, 2, local=1)
    assert "s in forward 2 of Net: rank 1 never entered forward 2 of Net; it was last seen" in ahead
    assert behind == ""


# -- while all goes well -----------------------------------------------------------------------------------------------


def job_goes_on() -> None:
    report_waits(0)  # turned off
    watch.watch_progress()
    assert watch._watch is None
    report_waits(0.6)
    model = sharded_net.shard(sharded_net.build())
    for step in range(20):
        sharded_net.train_step(model, seed=step)
        time.sleep(0.05)
    own: Any = watch._watch
    put = own._board.put
    assert not put.call_args_list
    time.sleep(1.2)  # idle, such as during a save
    assert len(put.call_args_list) == 1
    dist.barrier()
    sharded_net.train_step(model)
    time.sleep(0.3)
    assert put.call_args_list[1:] == [mock.call(str(dist.get_rank()), None)]
    assert not own._board.get.called
    own.end()
    assert not own._thread.is_alive()


def test_nothing_is_sent_while_ranks_go_on(watched: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_Board", mock.Mock)
    run_ranks(job_goes_on, 2, local=1)


# -- records -----------------------------------------------------------------------------------------------------------


def record(*counts: tuple[str, int, int] | None, **changes: Any) -> RankRecord:
    fields = {"last": 0, "action": "in forward", "awaited": "weights", "since": time.time(), "has_ended": False}
    numbered = {str(number): count for number, count in enumerate(counts) if count is not None}
    return decode(RankRecord, encode(RankRecord(counts=numbered, **(fields | changes))).encode())


OWN = record(("a", 3, 2), ("b", 2, 2))
NO_UNIT = record(last=None, action=None, awaited=None)
NO_WAIT = record(("a", 3, 2), awaited=None)
"""The host of a rank with NCCL does not wait."""
ELSEWHERE = "and waits for no transfer of laconic"


@pytest.mark.parametrize(
    ("own", "other", "reason"),
    [
        (OWN, record(("a", 3, 2), ("b", 2, 2)), None),  # it waits as well
        (
            OWN, record(("a", 2, 2), ("b", 2, 2), action="after backward", awaited=None),
            f"never entered forward 3 of a; it was last seen 0 s ago after backward 2 of a, {ELSEWHERE}",
        ),
        (record(("a", 3, 3), action="in backward"), OWN, "never entered backward 3 of a; it was last seen 0 s"),
        (
            OWN, record(("a", 3, 3), awaited=None, has_ended=True),
            "does not take part; it ended 0 s ago in forward 3 of a",
        ),
        (OWN, NO_UNIT, f"does not take part; it was last seen 0 s ago before the first forward, {ELSEWHERE}"),
        (OWN, record(("teacher", 0, 0), None), None),  # another model
        (NO_WAIT, NO_UNIT, None),
        (NO_WAIT, record(("a", 2, 2)), "never entered forward 3 of a"),
    ],
)  # fmt: skip
def test_records_say_who_is_behind(own: RankRecord, other: RankRecord, reason: str | None) -> None:
    own, other = (replace(each, since=time.time()) for each in (own, other))
    found = reasons_to_wait(own, {1: other})
    assert len(found) == (reason is not None)
    assert not reason or found[0].startswith(f"rank 1 {reason}")


# -- proof -------------------------------------------------------------------------------------------------------------


def told(ticket: Awaited | None, has_ended: bool = False, **groups: Entries) -> RankRecord:
    """A rank that waits for `ticket`, and has issued `groups`."""
    return record(("a", 1, 0), awaited="weights of a", has_ended=has_ended, ticket=ticket, groups=groups)


CIRCLE = {
    0: told(Awaited("g", 3, [0, 1, 2]), g=Entries(3, [])),
    1: told(Awaited("h", 1, [1, 2]), g=Entries(2, []), h=Entries(1, [])),
    2: told(Awaited("k", 5, [0, 2]), g=Entries(3, []), k=Entries(5, [])),
    3: told(None),
}
BOTH = {"g": Entries(2, ["x", "y"]), "h": Entries(1, ["z"])}


@pytest.mark.parametrize(
    ("own", "records", "words"),
    [
        (0, CIRCLE, "rank 0 waits for weights of a in forward 1 of a: rank 1 does not take part"),
        (0, {**CIRCLE, 2: told(None, g=Entries(3, []))}, None),  # it computes, and may issue what rank 1 waits for
        (1, {**CIRCLE, 2: told(None, g=Entries(3, []))}, None),
        (0, {0: CIRCLE[0], 1: CIRCLE[1]}, None),  # rank 2 has told nothing
        # a slow wire: all ranks wait, each for another transfer
        (0, {0: told(Awaited("g", 1, [0, 1]), **BOTH), 1: told(Awaited("h", 1, [0, 1]), **BOTH)}, None),
        # a broadcast of rank 0: only the senders are awaited
        (1, {0: told(None, g=Entries(1, [])), 1: told(Awaited("g", 1, [0]), g=Entries(1, []))}, None),
        (0, {0: CIRCLE[0], 1: told(None, has_ended=True, g=Entries(2, []))}, "it ended 0 s ago"),
        (1, {**CIRCLE, 2: told(None, has_ended=True, g=Entries(3, []))}, "rank 1 waits for weights"),
        (0, {0: CIRCLE[0], 1: told(None, has_ended=True, g=Entries(3, []))}, None),  # it has done its part
        (
            0,
            {0: told(None, g=Entries(9, ["b", "c"])), 1: told(None, g=Entries(8, ["a", "x"]))},
            "transfer 8 of their group is x there (in forward 1 of a), and b on rank 0",
        ),
        (0, {0: told(None, g=Entries(9, ["b", "c"])), 1: told(None, g=Entries(8, ["a", "b"]))}, None),
        # the names of the first ones are forgotten here
        (0, {0: told(None, g=Entries(9, ["b", "c"])), 1: told(None, g=Entries(2, ["a", "x"]))}, None),
    ],
)
def test_what_never_ends_is_proved(own: int, records: dict[int, RankRecord], words: str | None) -> None:
    now = {rank: replace(record, since=time.time()) for rank, record in records.items()}
    proof = find_proof(own, now)
    assert (proof is None) is (words is None)
    if proof is not None:
        assert str(words) in proof.line
        assert set(proof.ranks) == ({0, 1, 2} if records is CIRCLE else {0, 1} if own == 0 else {1, 2})


@on_ranks(3)
def test_who_sends_waits_for_all_and_who_receives_for_the_senders() -> None:
    group = dist.group.WORLD
    assert group is not None
    ticket = issue(group, "buffers", "the first rank", senders=[1])
    assert ticket.awaited().ranks == ([0, 1, 2] if dist.get_rank() == 1 else [1])


def test_a_thread_of_the_user_proves_nothing() -> None:
    """A saver's thread waits while the program goes on."""
    journal = Journal.__new__(Journal)
    journal.count, journal.last = 0, deque()
    ticket, seen = Ticket(journal, ("a save", "", None)), list[Any]()

    def wait() -> None:
        with waiting_for("a save", ticket):
            seen.append(here.ticket())

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()
    wait()
    assert seen == [None, ticket]


def job_slow() -> float:
    """One rank computes much longer than others look for a proof, now before a step, and now within one."""
    model = give_up_soon()
    if dist.get_rank() == 1:
        time.sleep(1.5)
        model.blocks[1].register_forward_pre_hook(lambda *_: time.sleep(1.5))
    return float(sharded_net.train_step(model).detach())


def test_a_slow_rank_is_not_ended(watched: None) -> None:
    assert len(ranks(job_slow, nodes=3)) == 3


def job_differ(folder: Path) -> str:
    """Rank 0 gathers a tensor while the others train. A proof ends all, also out of autograd."""
    model, report = give_up_soon(), folder / f"{dist.get_rank()}.json"

    @reported
    def differ() -> None:
        if dist.get_rank() == 0:
            next(model.parameters()).full_tensor()
        sharded_net.squared_error(model, sharded_net.inputs(0, 0)).backward()

    os.environ["TORCHELASTIC_ERROR_FILE"] = str(report)
    with pytest.raises(RanksDifferError) as info:
        differ()
    assert isinstance(info.value.__cause__, RuntimeError), "the backend's own error stays below"
    assert str(info.value) in json.loads(report.read_text())["message"]["message"], "torchrun shows this file"
    return str(info.value)


@pytest.mark.parametrize("is_told", [False, True])
def test_the_exception_itself_names_the_ranks(
    watched: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_told: bool
) -> None:
    """Told: rank 1 looks for no proof, and is slow to read that of rank 0, which hosts the store and ends at once."""
    told_line, settle = watch._Watch.told_line, watch._Watch.settle
    settled: list[int] = []

    def slowly(self: watch._Watch) -> str:
        time.sleep(2.0 * self._rank)
        return told_line(self)

    def settle_and_note(self: watch._Watch) -> None:
        settle(self)
        settled.append(self._rank)

    monkeypatch.setattr(watch._Watch, "settle", settle_and_note)
    if is_told:
        prove = watch._Watch._prove
        monkeypatch.setattr(watch._Watch, "_prove", lambda self, *all: None if self._rank else prove(self, *all))
        monkeypatch.setattr(watch._Watch, "told_line", slowly)
    for text in ranks(job_differ, tmp_path, nodes=2):
        assert "ranks 0 and 1 run different programs" in text
        assert "the whole of inp.weight" in text
    assert {*settled} == {0, 1}, "each says that it has read the verdict before it ends"


@pytest.mark.machine
def test_a_proof_ends_the_waits_of_gloo(tmp_path: Path) -> None:
    for text in launch(job_differ, tmp_path, num_ranks=2, num_local=1, backend=None):
        assert "the whole of inp.weight" in text


# -- two ranks that make different blocking calls ----------------------------------------------------------------------

LATEST_S = 15.0
NAMED = re.compile(r"RanksDifferError|JobError: ranks make different calls")
WHOLE = StateDictOptions(full_state_dict=True)
_BATCH = torch.zeros(2, 5)


def clip(model: Any, folder: Path) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


CALLS: dict[str, Callable[[Any, Path], Any]] = {
    "trains": lambda model, folder: model(_BATCH).sum().backward(),
    "evaluates": lambda model, folder: torch.no_grad()(model)(_BATCH),
    "gathers a tensor": lambda model, folder: model.out.weight.full_tensor(),
    "takes a norm": lambda model, folder: model.out.weight.norm(),
    "clips": clip,
    "gathers a state": lambda model, folder: get_model_state_dict(model, options=WHOLE),
    "saves": lambda model, folder: checkpoint.save_checkpoint(folder, 1, model=model, optimizer=None, extra={}),
    "exports": lambda model, folder: laconic.save_safetensors(model, folder / "export"),
    "publishes": lambda model, folder: Publisher(model, folder / "versions").publish(),
    "shards": lambda model, folder: laconic.fully_shard(sharded_net.build(), broadcast=True),
}


def job_pair(calls: tuple[str, str], folder: Path) -> tuple[str, float]:
    """The error of a rank, and the seconds until then."""
    model = give_up_soon()
    dist.barrier()
    begun = time.monotonic()
    error = "nothing"
    try:
        CALLS[calls[dist.get_rank()]](model, folder)
        RankGroup().gather("the end")  # a call may end on one rank: then the other is the one that waits
    except Exception as found:  # of any kind: the test looks at it
        error = f"{type(found).__name__}: {found}"
    return error, time.monotonic() - begun


def problems(pairs: Iterable[tuple[str, str]], folder: Path) -> list[str]:
    """The pairs that end late, or without a word about the difference."""
    found = []
    for number, pair in enumerate(pairs):
        with watching():
            answers = ranks(job_pair, pair, folder / str(number), nodes=2, goes_on=True)
        is_late = max(seconds for _, seconds in answers) > LATEST_S
        if is_late or not any(NAMED.match(error) for error, _ in answers):
            found.append(f"{pair}: {answers}")
    return found


def test_a_sample_of_pairs_ends_with_the_difference(tmp_path: Path) -> None:
    assert problems(pairwise(CALLS), tmp_path) == []


@pytest.mark.campaign(seconds=15)
def test_all_pairs_end_with_the_difference(tmp_path: Path) -> None:
    assert problems(combinations(CALLS, 2), tmp_path) == []
