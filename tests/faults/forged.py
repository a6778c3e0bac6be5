"""Forged and damaged messages: in the store of islands, at the ports of the watchers, and at the rendezvous.

A message is an entry of the store that is overwritten again and again while islands read it, bytes that a stranger
sends to the port at which a rank's watcher listens, bytes that a neighbour sends to it, an entry with the place of a
watcher, or bytes at the port of `laconic rendezvous`. Islands must end with one line and exit code 2, or go on, within
30 s; watchers and the rendezvous must go on. Most islands are threads that keep agreements. Some are `laconic train`.
"""

from __future__ import annotations

import contextlib
import json
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any

import torch.distributed as dist

from laconic import Membership
from laconic.errors import JobError
from laconic.islands.agreements import Agreements, Outcome, RunEndedError
from laconic.islands.elastic import Entrance
from tests.comm import rings
from tests.faults.bench import Bench, Found, campaign
from tests.faults.victims import Place, Run, Strategy
from tests.support.tiers import inside

LIMIT_S = 30.0
_GOES_ON_S = 3.0  # after which an island that has not ended has not read the entry
_TERMS = {"every": 3, "codec": "int4"}


def _signed(value: Any) -> bytes:
    """A forged entry: its checksum matches."""
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    return f"{zlib.crc32(text):08x} ".encode() + text


ENTRY_DAMAGE: Mapping[str, Callable[[bytes], bytes]] = {
    "a flipped bit": lambda entry: entry[:-1] + bytes([entry[-1] ^ 1]) if entry else b"1",
    "half": lambda entry: entry[: len(entry) // 2],
    "nothing": lambda entry: b"",
    "no text": lambda entry: b"\xff\xfe\x00\x80",
    "no JSON": lambda entry: b"{nonsense",
    "deep brackets": lambda entry: b"[" * 200_000,
    "deep brackets, signed": lambda entry: _signed(b"[" * 100_000),
    "other fields": lambda entry: _signed({"members": [[1]], "more": None}),
    "lists": lambda entry: _signed([["done"], [{"a": 1}]]),
    "a huge number": lambda entry: _signed(10**40),
    "true": lambda entry: _signed(True),
}
"""What is put in the place of an entry."""
COUNTER_DAMAGE: Mapping[str, Callable[[bytes], bytes]] = {
    name: lambda entry, forged=forged: forged  # type: ignore[misc]
    for name, forged in {
        "no number": b"garbage", "nothing": b"", "a negative number": b"-5", "a float": b"1e3", "no text": b"\xff\xfe",
        "deep brackets": b"[" * 100_000, "a huge number": b"9" * 40,
    }.items()
}  # fmt: skip
ENTRIES = ["generation", "terms", "answer/{k}", "call", "welcome/{k}", "roster/{r}", "verdict/{n}", "ended"]
COUNTERS = ["come", "beat", "beat/{k}", "done/{n}"]
EARLY = {"generation", "terms", "come", "welcome/{k}"}
"""The kinds of keys that are read while islands come."""


@dataclass(kw_only=True)
class Findings:
    """What happened after messages."""

    tried: int = 0
    tracebacks: int = 0
    dead: int = 0
    """Watchers and rendezvous that ended."""
    late: int = 0
    """Ends that took longer than LIMIT_S."""
    otherwise: int = 0
    """Ends with another exit code than 2, or with other than one line."""
    what: list[str] = field(default_factory=list)

    def add(self, other: Findings) -> None:
        """Take in what another part has found."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


# -- islands in threads ------------------------------------------------------------------------------------------------


class _Run:
    """A run of three islands, which are threads that keep agreements. The third one comes later."""

    def __init__(self, store: dist.Store) -> None:
        self.store = store
        self.stop = threading.Event()
        self.begun, self.forged = threading.Event(), threading.Event()
        """Set after some rounds, and when the first entry is forged."""
        self.roster = self.round = 0
        self._policy = Membership(rendezvous="here:1", islands=2, start_timeout_s=LIMIT_S)

    def island(self, waits: bool) -> str:
        """Be an island until `stop`. Returns the class of its error, or "" if it went on."""
        try:
            if waits:
                self.begun.wait(LIMIT_S)
            self._live()
        except Exception as error:
            return type(error).__name__
        return ""

    def _live(self) -> None:
        agreements = Agreements(self.store, "run", "here")
        entrance = Entrance(agreements, self._policy, _TERMS)
        found = None
        while found is None and not self.stop.is_set():
            found = entrance.wait(0.2)
        if found is None:
            return
        number, roster = found[1], agreements.welcome(found[1])
        assert roster is not None
        now, lost = roster.round, set[int]()
        while not self.stop.is_set():
            self.roster, self.round = roster.number, now
            if now == 4:
                self.begun.set()
            self._signs(agreements, number, roster.members)
            agreements.arrive(roster, now, number)
            assert agreements.has_begun(roster, now, number)
            is_lost = now % 5 == 3 and now not in lost  # no round in which another comes
            lost.add(now)
            outcome = Outcome.LOST if is_lost else Outcome.DONE
            verdict = agreements.vote(roster, now, outcome, num_ranks=len(roster.members), patience_s=LIMIT_S / 2)
            if verdict.outcome is not Outcome.DONE:
                before = dict.fromkeys(roster.members, 0)  # all have given some
                agreements.propose(roster, now, before, is_late=False, patience_s=5.0)
                following = agreements.next_roster(roster, 5.0)
                if following is None or number not in following.members:
                    raise JobError("left behind")
                roster = following
                continue
            now += 1
            if verdict.newcomers:
                roster = agreements.enlarge(roster, verdict.newcomers, now, now + 1)

    def _signs(self, agreements: Agreements, number: int, members: tuple[int, ...]) -> None:
        agreements.look_for_end()
        agreements.beat(number)
        agreements.silent_s(*members)
        agreements.answer(number)

    def forge(self, kind: str, damage: Callable[[bytes], bytes]) -> None:
        """Overwrite the keys of a kind, those of this round and of the next ones, until `stop`."""
        agreements = Agreements(self.store, "run", "here", 0)  # of the only generation
        whole = dict[str, bytes]()
        while not self.stop.is_set():
            rosters, rounds = range(self.roster, self.roster + 3), range(self.round, self.round + 4)
            tries = [f"{r}-{n}" for r, n in product(rosters, rounds)]
            names = {kind.format(k=k, r=r, n=n) for k, r, n in product(range(3), rosters, tries)}
            for name in names:
                store = agreements._run_store if name in ("generation", "ended") else agreements.store
                if name not in whole and kind in (*ENTRIES,) and store.check([name]):
                    whole[name] = store.get(name)
                store.set(name, damage(whole.get(name, b"")))
            self.forged.set()
            time.sleep(0.002)


def try_store(kind: str, damage: Callable[[bytes], bytes]) -> tuple[list[str], float]:
    """Let islands run while entries of a kind are forged. Returns how each island ended.

    Also returns the seconds from the first end to the last. An island that does not read such an entry goes on; ""
    stands for it.
    """
    run = _Run(dist.HashStore())
    with ThreadPoolExecutor(4) as pool:
        is_early = kind in EARLY
        if is_early:
            run.begun.set()  # the third one comes at once
            forger = pool.submit(run.forge, kind, damage)
            run.forged.wait(LIMIT_S)  # an island reads some entries once, when it comes
        islands = [pool.submit(run.island, waits) for waits in (False, False, True)]
        run.begun.wait(LIMIT_S)
        began = time.monotonic()
        if not is_early:
            forger = pool.submit(run.forge, kind, damage)
        first: float | None = None
        while not all(island.done() for island in islands):
            now = time.monotonic()
            if first is None and any(island.done() for island in islands):
                first = now
            if now - began > _GOES_ON_S if first is None else now - first > LIMIT_S:
                break
            time.sleep(0.02)
        took_s = 0.0 if first is None else time.monotonic() - first
        run.stop.set()
        forger.result()
        return [island.result() for island in islands], took_s


def _try_stores(quick: bool) -> Findings:
    tables = ((ENTRIES, ENTRY_DAMAGE), (COUNTERS, COUNTER_DAMAGE))
    cases = [(kind, *each) for kinds, damages in tables for kind in kinds for each in damages.items()]
    found = Findings()
    for kind, name, damage in cases[::10] if quick else cases:
        with inside():  # threads take turns, and the clock is theirs
            ends, took_s = try_store(kind, damage)
        bad = set(ends) - {"", "JobError", RunEndedError.__name__}
        found.add(Findings(tried=1, tracebacks=len(bad), late=took_s > LIMIT_S))
        if bad or took_s > LIMIT_S:
            found.what.append(f"{kind}, {name}: {ends} after {took_s:.1f} s")
    return found


# -- watchers ----------------------------------------------------------------------------------------------------------


def try_watchers(quick: bool = False) -> Findings:
    """Send what strangers and neighbours say, and damage the places of watchers. They must go on to watch."""
    found = Findings()
    tries = [("stranger", data) for data in rings.STRANGERS * (1 if quick else 3)]
    tries += [("neighbour", data) for data in rings.NEIGHBOURS]
    tries += [("place", damage(b"x")) for damage in ENTRY_DAMAGE.values()]
    for kind, data in tries:
        found.tried += 1
        try:
            with rings.Circle(3) as circle:
                rings.send(circle, kind, data)
        except Exception as error:  # another one than an assertion would have ended the thread
            found.dead += isinstance(error, AssertionError)
            found.tracebacks += not isinstance(error, AssertionError)
            found.what.append(f"{kind}, {data[:12]!r}: {error!r}")
    return found


# -- the rendezvous ----------------------------------------------------------------------------------------------------


def try_rendezvous(num: int, folder: Path) -> Findings:
    """Send damaged requests to `laconic rendezvous`. It must go on to answer."""
    found, dice, magic = Findings(), random.Random(7), struct.pack("<BI", 0, 0x3C85F7CE)
    requests = [
        lambda: dice.randbytes(1000), lambda: b"[" * 100_000, lambda: b"GET / HTTP/1.1\r\n\r\n", lambda: b"",
        lambda: magic + dice.randbytes(60), lambda: magic + struct.pack("<BQ", 1, 1 << 60), lambda: magic + bytes([99]),
        lambda: magic + struct.pack("<BQ", 1, 3) + b"abc" + struct.pack("<Q", 1 << 40),
    ]  # fmt: skip
    log = folder / "rendezvous.txt"
    command = [sys.executable, "-m", "laconic.cli", "rendezvous", "--host", "127.0.0.1", "--port", "0"]
    with (
        log.open("w") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as server,
        contextlib.ExitStack() as at_end,
    ):
        at_end.callback(server.kill)  # where the rest fails, or the end of the block would wait for ever
        assert server.stdout is not None
        port = int(server.stdout.readline().split("islands meet at 127.0.0.1:")[1].split(";")[0])
        with contextlib.ExitStack() as stack:
            for index in range(num):
                connection = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
                with contextlib.suppress(OSError):
                    connection.sendall(requests[index % len(requests)]())
                found.tried += 1
            try:
                store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=LIMIT_S))
                Agreements(store, "run", "here").come()
            except (dist.DistError, JobError) as error:
                found.what.append(repr(error))
                found.dead += 1
        server.send_signal(signal.SIGTERM)
        found.otherwise += server.wait() != 0
    found.tracebacks += "Traceback" in log.read_text()
    return found


# -- `laconic train` ---------------------------------------------------------------------------------------------------


def try_train(kind: str, damage: Callable[[bytes], bytes], folder: Path) -> Findings:
    """Let two launches of `laconic train` be islands while entries are forged. Both must end with one line and 2."""
    folder.mkdir(parents=True)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    sync = {"mode": "local", "every": 2, "rendezvous": f"127.0.0.1:{store.port}", "run_id": "run", "islands": 2}
    job = Strategy(sections={"sync": sync, "train": {"steps": 10**6}}, place=Place(num_ranks=1, num_local=1))
    victims = [Run(job, folder / str(number)).start() for number in range(2)]
    found, forged = Findings(tried=1), _Run(dist.TCPStore("127.0.0.1", store.port, is_master=False))
    agreements = Agreements(dist.TCPStore("127.0.0.1", store.port, is_master=False), "run", "here", 0)
    deadline = time.monotonic() + 4 * LIMIT_S
    while not agreements.store.check(["roster/0", "verdict/0-2"]) and time.monotonic() < deadline:
        time.sleep(0.05)
    forged.round = 2
    while agreements.store.check([f"verdict/0-{forged.round}"]):
        forged.round += 1
    began = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(forged.forge, kind, damage)
        for victim in victims:
            found.late += len(victim.wait(max(0.1, began + LIMIT_S - time.monotonic())))
            found.otherwise += victim.exit_codes != [2] or victim.text(0).count("damaged entry") != 1
            found.tracebacks += "Traceback" in victim.text(0)
        forged.stop.set()
    if found.otherwise or found.late or found.tracebacks:
        found.what.append(f"{kind}: see {folder}")
    return found


TRAIN_KINDS = ["verdict/{n}", "done/{n}", "call", "beat", "beat/{k}", "ended"]
"""The kinds of keys that islands read while they train."""


@campaign(
    "forged",
    "forged or damaged messages in the store of islands, to watchers and to the rendezvous; islands end with code 2 "
    "and one line; watchers live, with more than 1,024 open files too",
    harms=("tracebacks", "dead", "late", "otherwise"),
    section="mend",
)
def messages(bench: Bench) -> Found:
    """Try all of them."""
    found = _try_stores(bench.quick)
    found.add(try_watchers(bench.quick))
    found.add(try_rendezvous(16 if bench.quick else 96, bench.out))
    for index, kind in enumerate(TRAIN_KINDS[:1] if bench.quick else TRAIN_KINDS * 3):
        table = COUNTER_DAMAGE if kind in COUNTERS else ENTRY_DAMAGE
        damages = [damage for damage in table.values() if damage(b"")]  # an empty entry is as good as none
        found.add(try_train(kind, damages[index % len(damages)], bench.out / f"forged-{index}"))
    script = "from tests.comm import rings; rings.watch_with_many_files()"
    found.dead += subprocess.run([sys.executable, "-c", script], check=False).returncode != 0
    harms = [name for name in ("tracebacks", "dead", "late", "otherwise") for _ in range(getattr(found, name))]
    return found.tried, harms, "; ".join(found.what)
