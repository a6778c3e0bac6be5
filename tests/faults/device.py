"""Campaigns about accelerators on a machine without one: races, waits, operations on lanes, and kernel paths.

docs/races.md says how programs run on an accelerator that is not there. The suite tries each program in one order; here
are thousands. tests/composition/kernel_paths.py takes the kernel paths from transformers' own registries.
"""

from __future__ import annotations

import warnings
from collections import Counter

from laconic.rehearse.tape import Mark, Step, Tape, Wait
from tests.composition.kernel_paths import LIMIT, STRATEGIES, faults, job, paths, sort_out
from tests.faults.bench import Bench, Found, campaign
from tests.rehearse.campaign import Findings, explore
from tests.rehearse.engine import ENGINE
from tests.rehearse.fsdp2 import FSDP2
from tests.rehearse.programs import PROGRAMS
from tests.support.launch import launch

_NUM_ORDERS = 2000
"""The promised number of orders, over all programs."""
RACE_HARMS = ("race", "wait that nothing needs", "wait that no program passes", "order with other bits")


def _harms_of(found: Findings) -> list[str]:
    return [
        *(f"race: {program}, {pairs}" for program, pairs in found.races.items()),
        *(f"wait that nothing needs: {site}" for site in found.unnoticed),
        *(f"wait that no program passes: {site}" for site in found.unvisited),
        *(f"order with other bits: {order}" for order in found.different),
    ]


@campaign(
    "races",
    "accesses to the same bytes are ordered, each wait that is taken out makes a race, and random legal orders of "
    "streams end with the same bits",
    harms=RACE_HARMS,
)
def races(bench: Bench) -> Found:
    """Every program, each without each of its waits, and in random orders, with memory that is reused."""
    found = explore(PROGRAMS, range(1 if bench.quick else -(-_NUM_ORDERS // len(PROGRAMS)) + 10))
    waits = "; ".join(f"{site.split(' ')[0]} by *{program}*" for site, program in found.caught.items())
    return found.orders, _harms_of(found), f"programs: {'; '.join(PROGRAMS)}; waits: {waits}"


@campaign(
    "races-fsdp2",
    "torch's FSDP2 and HSDP, for which the checker was not written, have no race, and end with the same bits",
    harms=(RACE_HARMS[0], RACE_HARMS[3]),
)
def races_of_fsdp2(bench: Bench) -> Found:
    """Torch's own programs."""
    found = explore(FSDP2, range(1 if bench.quick else 10))
    harms = [harm for harm in _harms_of(found) if not harm.startswith("wait")]
    return found.orders, harms, f"waits that some program needs: {len(found.caught)}; that none: {len(found.unnoticed)}"


# -- lanes ------------------------------------------------------------------------------------------------------------

_EXACT = (
    "cache none", "cache host", "cache device", "mixed precision", "LoRA, cache host", "replicas",
    "4 bits, cache device",
)  # fmt: skip
_OFFLOADED = ("offload", "offload, cache host", "offload, 8 bits")
_OF_MESSAGES = ("guard/comparison.py", "shard/crossing.py")
"""Where the host waits for messages of other hosts, and for no device."""
_DEEP = 16
"""The layers of the programs whose operations are counted."""
_MOST_OPERATIONS = {"cache none": 8.5, "cache host": 8.5, "4 bits, cache device": 20}


def _tape(name: str, num_blocks: int, *, counts: bool = False) -> tuple[Tape, int]:
    """A warm run of a program, and the number of its backwards."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of settings that are odd on purpose
        tape = ENGINE[name].record(num_blocks=num_blocks, is_warm=True, counts=counts).tape
    return tape, sum(isinstance(entry, Mark) and entry.label == "backward" for entry in tape.entries)


def host_waits_of(name: str) -> dict[str, float]:
    """The engine's waits of the host for the device in a warm step of a program, by file."""
    tape, steps = _tape(name, 5)
    waits = Counter(
        entry.site.file
        for entry in tape.entries
        if isinstance(entry, Wait) and entry.timeline in tape.threads and entry.site is not None
    )
    return {file: count / steps for file, count in waits.items() if file not in _OF_MESSAGES}


@campaign(
    "host-waits",
    "waits of the host for the device in a warm step: none, with offload one",
    harms=("more waits",),
    section="device",
)
def host_waits(bench: Bench) -> Found:
    """Waits of the host in a warm step, by place."""
    found = {name: host_waits_of(name) for name in (*_EXACT, *_OFFLOADED)}
    harms = [f"more waits: {name}, {of}" for name, of in found.items() if sum(of.values()) > (name in _OFFLOADED)]
    return len(found), harms, "Not counted: what the program reads itself, and messages of other hosts."


def operations_of(name: str) -> Counter[str]:
    """The operations on streams other than compute in a step, by kind, for each unit."""
    tape, steps = _tape(name, _DEEP, counts=True)
    counted = Counter(
        entry.name.removeprefix("aten::")
        for entry in tape.entries
        if isinstance(entry, Step)
        and tape.timelines[entry.timeline] == "stream"
        and (entry.cost is not None or entry.transfer is not None)
    )
    return Counter({kind: count / (_DEEP + 1) / steps for kind, count in counted.items()})  # type: ignore[misc]


@campaign(
    "lane-operations",
    "operations on the lanes for a unit in a warm step: 8.5, in four bits 20",
    harms=("more operations",),
    section="device",
)
def lane_operations(bench: Bench) -> Found:
    """Operations on the engine's lanes for a unit in a step: kernels, copies and collectives."""
    found = {name: operations_of(name) for name in _MOST_OPERATIONS}
    harms = [
        f"more operations: {name}, {of}" for name, of in found.items() if sum(of.values()) > _MOST_OPERATIONS[name]
    ]
    return len(found), harms, "; ".join(f"{name} {sum(of.values()):.1f}" for name, of in found.items())


# -- kernel paths -----------------------------------------------------------------------------------------------------

_MESHES = ((2, 1), (2, 2), (1, 3))
"""(nodes, ranks of a node)."""


@campaign(
    "kernel-paths",
    f"default kernel paths x strategies: gradients within {LIMIT:.0e} of the unsharded model's, in fp32",
    harms=("fault",),
    section="mend",
)
def kernel_paths(bench: Bench) -> Found:
    """Try all paths under all strategies on each mesh; a quick run takes one mesh."""
    runnable, reasons, wrong = sort_out(paths())
    num = 0
    for nodes, local in _MESHES[:1] if bench.quick else _MESHES:
        by_rank = launch(job, runnable, STRATEGIES, num_ranks=nodes * local, num_local=local, timeout_s=1500.0)
        wrong += [f"{nodes}x{local}, {fault}" for fault in faults(by_rank)]
        num += len(by_rank[0])
    elsewhere = sorted({path.implementation for path in reasons})
    return num, [f"fault: {each}" for each in wrong], f"The library cannot train here with {', '.join(elsewhere)}."
