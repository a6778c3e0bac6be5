"""What the race checker finds: shared by the tests, which take a sample of orders, and by tests/faults/device.py."""

from __future__ import annotations

import ast
import gc
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

import laconic
from laconic.rehearse.order import races
from laconic.rehearse.tape import Site
from tests.rehearse.programs import Watched
from tests.rehearse.replay import Orders

_CALLS = {
    *("running", "going_on", "record_event", "wait_for", "synchronize", "wait_event", "wait_stream"),
    *("run_job", "go_on_with", "event_after", "result", "_wait"),
}
"""The calls that order streams: those of shard/lanes.py, and torch's. And those that order threads and messages."""
_LIBRARY = Path(laconic.__file__).parent
_ROOMS = ("checkpoint", "codec", "comm", "cyclic", "guard", "islands", "layers", "optim", "ragged", "shard", "store")
_OTHERS = {
    ("shard/lanes.py", "going_on"): "every site of a lane passes it",
    ("shard/lanes.py", "run_job"): "every site of a lane passes it",
    ("shard/lanes.py", "go_on_with"): "every site of a lane passes it",
    ("shard/lanes.py", "event_after"): "every site of a lane passes it",
    ("shard/lanes.py", "record_event"): "every site of a lane passes it",
    ("shard/lanes.py", "compute_event"): "every site that calls it passes it",
    ("shard/lanes.py", "running"): "every site of a lane passes it",
    ("shard/lanes.py", "wait_for"): "every site of a lane passes it",
    ("comm/speed.py", "_finish"): "it measures seconds, between steps",
    ("comm/failure.py", "fail"): "it waits while its failure is told, and trains no more",
    ("pipeline/stages.py", "_time_s"): "it measures seconds, before training",
    ("pipeline/stages.py", "synchronize"): "it measures seconds, before training",
    ("islands/elastic.py", "_waiting"): "it waits for a thread that has ended",
    ("shard/cache.py", "_unlock_pages_for_cuda"): "it runs when a model goes, after the programs have ended",
}
"""Functions whose calls are no sites of their own."""


@dataclass
class Findings:
    """What all programs together have shown."""

    races: dict[str, list[str]] = field(default_factory=dict)
    """By program: pairs of accesses without an order."""
    caught: dict[str, str] = field(default_factory=dict)
    """By site: the first program that has a race without it."""
    unnoticed: list[str] = field(default_factory=list)
    """Sites that all programs can do without."""
    num_calls: int = 0
    """Calls in the source that order streams, or the host behind a stream or a thread."""
    unvisited: list[str] = field(default_factory=list)
    """Calls in the source that no program passes."""
    orders: int = 0
    """Random orders in which programs ran."""
    different: list[str] = field(default_factory=list)
    """Programs and seeds whose results had other bits."""


def explore(programs: Mapping[str, Watched], orders: Iterable[int]) -> Findings:
    """Watch every program, take out each of its sites in turn, and run it in random orders, one for each seed."""
    found, sites, caught = Findings(), dict[Site, None](), dict[Site, str]()
    seeds = list(orders)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the operations are tiny
    for name, program in programs.items():
        gc.freeze()  # a program collects its garbage, and should not look at all that was there before
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of settings that are odd on purpose
            machine = program.record()
        pairs = list(dict.fromkeys(map(str, races(machine.tape))))
        if pairs:
            found.races[name] = pairs
            continue
        new = [site for site in machine.tape.sites if site not in caught]
        sites |= dict.fromkeys(new)
        caught |= {site: name for site in new if next(races(machine.tape.without({site})), None) is not None}
        if seeds:
            results = Orders(machine)
            found.different += [f"{name}: memory {m} in the recorded order" for m in results.differs_from_recording]
            found.different += [f"{name}: seed {seed}" for seed in seeds if not results.is_equal(seed)]
            found.orders += len(seeds)
    torch.set_num_threads(num_threads)
    found.caught = {str(site): name for site, name in sorted(caught.items(), key=lambda item: str(item[0]))}
    found.unnoticed = sorted(str(site) for site in sites if site not in caught)
    visited = {(site.file, site.line) for site in sites}
    calls = list(ordering_calls())
    found.num_calls = len(calls)
    found.unvisited = [f"{file}:{lines.start}" for file, lines in calls if visited.isdisjoint((file, n) for n in lines)]
    return found


def ordering_calls() -> Iterator[tuple[str, range]]:
    """The file and the lines of each call in the library that orders streams, or the host behind one or a thread."""
    for path in sorted(path for room in _ROOMS for path in (_LIBRARY / room).rglob("*.py")):
        file, text = path.relative_to(_LIBRARY).as_posix(), path.read_text()
        if not re.search(rf"\b({'|'.join(_CALLS)})\(", text):
            continue
        for function in ast.walk(ast.parse(text)):
            if isinstance(function, ast.FunctionDef) and (file, function.name) not in _OTHERS:
                for node in ast.walk(function):
                    if isinstance(node, ast.Call) and _orders(node):
                        yield file, range(node.lineno, (node.end_lineno or node.lineno) + 1)


def _orders(call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    has_events = {"going_on": bool(call.args), "go_on_with": any(each.arg == "after" for each in call.keywords)}
    return name in _CALLS and has_events.get(name, True)  # without events a job stays behind its own lane
