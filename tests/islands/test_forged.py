"""Forged and damaged messages end all islands in one way, and no watcher and no rendezvous."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import pytest
import torch.distributed as dist

from laconic import _compat
from laconic.islands import rendezvous
from laconic.islands.agreements import Agreements, RunEndedError
from laconic.islands.saved_state import SavedState
from tests.faults import forged

ENDED = {"RunEndedError"}
DAMAGE = {**forged.ENTRY_DAMAGE, "no number": forged.COUNTER_DAMAGE["no number"]}
FORGED = [
    *((kind, name, ENDED) for kind in forged.ENTRIES if kind not in ("terms", "answer/{k}")
      for name in ("a flipped bit", "deep brackets, signed", "other fields", "true")),
    *((kind, "no number", ENDED) for kind in forged.COUNTERS),
    *((kind, name, {"", "JobError", *ENDED}) for kind in ("terms", "answer/{k}") for name in ("no JSON", "lists")),
]  # fmt: skip
"""Forged entries and counters, and how islands may end; the founders may have read the last ones before."""


@pytest.mark.parametrize(("kind", "name", "ended"), FORGED)
def test_what_is_forged_ends_all_islands(kind: str, name: str, ended: set[str]) -> None:
    ends, took_s = forged.try_store(kind, DAMAGE[name])
    assert len(ends) == 3
    assert set(ends) <= ended
    assert took_s < forged.LIMIT_S


@pytest.mark.parametrize(
    "fields",
    [
        {"members": [0, 0]}, {"slots": [0]}, {"newcomers": [7]}, {"number": 3}, {"members": [0, 9]},
        {"num_seen": 10**15}, {"round": -1},
    ],
    ids=str,
)  # fmt: skip
def test_a_roster_that_contradicts_itself_is_refused(fields: dict[str, object]) -> None:
    store = dist.HashStore()
    agreements = Agreements(store, "test", "here")
    for _ in range(2):
        agreements.come()
    plain = {"number": 0, "members": [0, 1], "slots": [0, 1], "num_seen": 2, "round": 1, "newcomers": [1], "until": 2}
    agreements.store.set("roster/0", forged._signed(plain))
    assert agreements.roster(0).members == (0, 1)
    agreements.store.set("roster/0", forged._signed(plain | fields))
    with pytest.raises(RunEndedError, match="has a damaged entry, roster/0: "):
        agreements.roster(0)
    with pytest.raises(RunEndedError, match="roster/0"):
        Agreements(store, "test", "here")


@pytest.mark.machine
def test_the_rendezvous_lives(tmp_path: Path) -> None:
    found = forged.try_rendezvous(16, tmp_path)
    assert found.what == []
    assert found.dead == found.tracebacks == found.late == found.otherwise == 0


@pytest.mark.machine
@pytest.mark.parametrize(("host", "shown"), [("127.0.0.1", "it listens on 127.0.0.1"), ("", "all addresses")])
def test_the_rendezvous_says_where_it_listens(host: str, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous.threading.Event, "wait", lambda *_: True)
    monkeypatch.setattr(rendezvous.signal, "signal", lambda *_: None)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert rendezvous.main(["--host", host, "--port", "0"]) == 0
    assert shown in printed.getvalue()
    assert printed.getvalue().count("\n") == 1
    # On one address it is not on others.
    listener = rendezvous._listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    assert store.port == port
    with pytest.raises(ConnectionRefusedError):
        forged.socket.create_connection(("127.0.0.2", port), 5)


def test_damaged_addresses_of_gloo_are_a_lost_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("std::bad_alloc")

    monkeypatch.setattr(_compat.dist, "ProcessGroupGloo", fail)
    with pytest.raises(RuntimeError, match="the addresses of the ranks in the store are damaged"):
        _compat.gloo_group(dist.HashStore(), 0, 2, 1.0)


@pytest.mark.parametrize("values", [None, [], {}, [[1, 2, "a"], 0, 0, 1, [0], "x"], [[1, 2, 3], 0, 0, 1, [], []]])
def test_a_saved_state_of_other_values_is_refused(values: object) -> None:
    with pytest.raises(ValueError, match="belong"):
        SavedState.from_json({"run": "", "layout": None, "files": [], "state": values})


@pytest.mark.machine
def test_launches_end_with_one_line_and_code_2(tmp_path: Path) -> None:
    found = forged.try_train("verdict/{n}", forged.ENTRY_DAMAGE["a flipped bit"], tmp_path / "run")
    assert found.what == []
    assert found.tracebacks == found.otherwise == found.late == 0
