"""Campaigns about accelerators on a machine without one: races, waits, operations on lanes, and kernel paths.

docs/races.md says how programs run on an accelerator that is not there. The suite tries each program in one order; here
are thousands. tests/composition/kernel_paths.py takes the kernel paths from transformers' own registries.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections import Counter

from laconic.rehearse.tape import Mark, Step, Tape, Wait
from tests.composition.kernel_paths import LIMIT, STRATEGIES, faults, job, paths, sort_out
from tests.faults.bench import Bench, campaign_row, faults_row
from tests.rehearse.campaign import Findings, explore
from tests.rehearse.engine import ENGINE
from tests.rehearse.fsdp2 import FSDP2
from tests.rehearse.programs import PROGRAMS
from tests.support.launch import launch
from tests.support.record import Row

_NUM_ORDERS = 2000
"""The promised number of orders, over all programs."""


@functools.cache
def _explored(bench: Bench) -> Findings:
    return explore(PROGRAMS, range(1 if bench.quick else -(-_NUM_ORDERS // len(PROGRAMS)) + 10))


@campaign_row("races")
def races(bench: Bench) -> Row:
    """Pairs of accesses without an order."""
    return faults_row(
        claim="two accesses to the same bytes, device or host, are ordered in every program",
        tried=len(PROGRAMS),
        at_least=len(PROGRAMS),
        harms={"programs with a race": len(_explored(bench).races)},
        note=f"programs: {'; '.join(PROGRAMS)}",
    )


@campaign_row("stream-waits")
def stream_waits(bench: Bench) -> Row:
    """Waits, events and synchronisations that are taken out and not missed."""
    found = _explored(bench)
    return faults_row(
        claim="each wait, event and host synchronisation of streams, messages and threads, taken out, makes a race",
        tried=len(found.caught) + len(found.unnoticed),
        at_least=len(found.caught),
        harms={"unnoticed": len(found.unnoticed), "passed by no program": len(found.unvisited)},
        note="; ".join(f"{site.split(' ')[0]} by *{program}*" for site, program in found.caught.items()),
    )


@campaign_row("orders")
def orders(bench: Bench) -> Row:
    """Random legal orders, with memory that is reused as a caching allocator does."""
    found = _explored(bench)
    return faults_row(
        claim="programs that run in random legal orders of their streams end with the same bits",
        tried=found.orders,
        at_least=len(PROGRAMS) if bench.quick else _NUM_ORDERS,
        harms={"different": len(found.different)},
    )


@campaign_row("races-fsdp2")
def races_of_fsdp2(bench: Bench) -> Row:
    """Torch's own FSDP2 and HSDP: code that the checker was not written for."""
    found = explore(FSDP2, range(1 if bench.quick else 10))
    return faults_row(
        claim="torch's FSDP2 and HSDP have no race, and end with the same bits in every legal order",
        tried=len(FSDP2),
        at_least=10,
        harms={"programs with a race": len(found.races), "different": len(found.different)},
        note=f"waits and events that some program needs: {len(found.caught)}; missed by none: {len(found.unnoticed)}",
    )


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


@campaign_row("host-waits", section="device")
def host_waits(bench: Bench) -> Row:
    """Waits of the host in a warm step, by place."""
    found = {name: host_waits_of(name) for name in (*_EXACT, *_OFFLOADED)}
    exact, offloaded = (max(sum(found[name].values()) for name in names) for names in (_EXACT, _OFFLOADED))
    return Row(
        claim="waits of the host for the device in a warm step, weights on the device / offload, worst program",
        required="0 / <= 1",
        measured=f"{exact:g} / {offloaded:g}",
        is_met=exact == 0 and offloaded <= 1,
        note=f"Programs: {', '.join(_EXACT)} / {', '.join(_OFFLOADED)}. Places: "
        f"{', '.join(sorted({place for of in found.values() for place in of})) or 'none'}. Not counted: what the "
        "program reads itself, and messages of other hosts. With offload, one wait is for gradients that arrive.",
    )


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


@campaign_row("lane-operations", section="device")
def lane_operations(bench: Bench) -> Row:
    """Operations on the engine's lanes for a unit in a step: kernels, copies and collectives."""
    found = {name: sum(operations_of(name).values()) for name in _MOST_OPERATIONS}
    return Row(
        claim="operations on the lanes for a unit in a warm step, exact / in four bits",
        required="<= 8.5 / <= 20",
        measured="; ".join(f"{name} {count:.1f}" for name, count in found.items()),
        is_met=all(found[name] <= most for name, most in _MOST_OPERATIONS.items()),
        note=f"{_DEEP} layers and the root on NCCL, 2 x 2 ranks, fp32; a codec's kernel is one operation, as on a GPU. "
        "A step has three more, of the flags of used parameters.",
    )


# -- kernel paths -----------------------------------------------------------------------------------------------------

_MESHES = ((2, 1), (2, 2), (1, 3))
"""(nodes, ranks of a node)."""


@campaign_row("kernel-paths", section="mend")
def kernel_paths(bench: Bench) -> Row:
    """Try all paths under all strategies on each mesh; a quick run takes one mesh."""
    runnable, reasons, wrong = sort_out(paths())
    cells = []
    for nodes, local in _MESHES[:1] if bench.quick else _MESHES:
        by_rank = launch(job, runnable, STRATEGIES, num_ranks=nodes * local, num_local=local, timeout_s=1500.0)
        wrong += [f"{nodes}x{local}, {fault}" for fault in faults(by_rank)]
        cells += [max(cell, key=lambda each: each.difference) for cell in zip(*by_rank, strict=True)]
    print("\n".join(wrong), file=sys.stderr, flush=True)
    largest = max(each.difference for each in cells if not each.refusal)
    return Row(
        claim="default kernel paths x strategies against unsharded, relative difference of gradients in fp32",
        required=f"every cell <= {LIMIT:.0e}",
        measured=f"{len(cells)} cells, the largest difference {largest:.1e}; {len(wrong)} faults",
        is_met=not wrong and largest <= LIMIT,
        note=f"{len(runnable)} paths of transformers' registries and forms of models, {len(STRATEGIES)} strategies. "
        f"Refused by name: {', '.join(sorted({f'{each.strategy} of {each.path}' for each in cells if each.refusal}))}. "
        f"The library cannot train here with {', '.join(sorted({path.implementation for path in reasons}))}.",
    )
