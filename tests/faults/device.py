"""Campaigns about accelerators on a machine without one: races, waits, lanes, lines of a device, and kernels.

docs/races.md says how programs run on an accelerator that is not there. Every program of tests/rehearse/programs.py
runs once; then each of its waits, events and host synchronisations is taken out in turn; then it runs in random legal
orders. Exposed transfers, waits of the host and operations are read from the order of streams. The kernels of triton
are compiled for the GPUs that people have, and run in its interpreter beside their twins.
tests/composition/kernel_paths.py takes the kernel paths from transformers' own registries.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from laconic.rehearse.tape import Mark, Step, Tape, Wait
from tests.composition.kernel_paths import LIMIT, STRATEGIES, Outcome, faults, job, paths, sort_out
from tests.faults.bench import Bench, campaign_row, faults_row
from tests.kernels.apart import told as told_apart
from tests.rehearse.campaign import Findings, explore
from tests.rehearse.device_lines import ROOMS, device_places
from tests.rehearse.engine import ENGINE
from tests.rehearse.exposure import moved as moved_on
from tests.rehearse.fsdp2 import FSDP2
from tests.rehearse.passed import WATCHES, not_passed, told
from tests.rehearse.programs import PROGRAMS
from tests.support.launch import launch
from tests.support.record import Row

_NUM_ORDERS = 2000
"""The promised number of orders, over all programs."""


@campaign_row("races")
def races(bench: Bench) -> Row:
    """Pairs of accesses without an order."""
    found = _explored(bench)
    return faults_row(
        claim="two accesses to the same bytes, device or host, are ordered in every program",
        tried=len(PROGRAMS),
        at_least=len(PROGRAMS),
        harms={"programs with a race": len(found.races)},
        note=f"programs: {'; '.join(PROGRAMS)}",
    )


@campaign_row("stream-waits")
def stream_waits(bench: Bench) -> Row:
    """Waits, events and synchronisations that are taken out and not missed."""
    found = _explored(bench)
    lines = [f"{site} | {program}" for site, program in found.caught.items()]
    table = bench.out / "waits.txt"
    table.write_text("\n".join([*lines, *(f"{site} | -" for site in found.unnoticed), ""]))
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


@functools.cache
def _explored(bench: Bench) -> Findings:
    return explore(PROGRAMS, range(1 if bench.quick else -(-_NUM_ORDERS // len(PROGRAMS)) + 10))


# -- lanes ------------------------------------------------------------------------------------------------------------

_BLOCKS = 5
_EXACT = (
    "cache none", "cache host", "cache device", "mixed precision", "LoRA, cache host", "replicas",
    "4 bits, cache device",
)  # fmt: skip
_DEEP = 16
"""The layers of the programs whose operations are counted."""
_COUNTED = ("cache none", "cache host", "4 bits, cache device")
_OFFLOADED = ("offload", "offload, cache host", "offload, 8 bits")
_OF_MESSAGES = ("guard/comparison.py", "shard/crossing.py")
"""Where the host waits for messages of other hosts, and for no device."""


@campaign_row("overlap", section="device")
def overlap(bench: Bench) -> Row:
    """Sums and gathers that compute waits for although it has work."""
    names = [name for name, program in ENGINE.items() if program.backend == "nccl"][: 4 if bench.quick else None]
    found = {name: list(moved_on(_tape(name))) for name in names}
    exposed = {name: Counter(str(each) for each in of if each.is_exposed) for name, of in found.items()}
    all_moved = [each for of in found.values() for each in of]
    beside = sum(bool(each.products) for each in all_moved)
    ends = sum(each.is_at_an_end and not each.products for each in all_moved)
    num_clean = sum(not of for of in exposed.values())
    odd = "; ".join(f"{name}: {', '.join(of)}" for name, of in exposed.items() if of)
    return Row(
        claim="transfers beside which compute may run a product: all but a pass's first gathers and last sums",
        required="all, in every program",
        measured=f"{beside:,} of {len(all_moved) - ends:,}; {num_clean} of {len(names)} programs",
        is_met=beside == len(all_moved) - ends,
        note=(
            f"Vector clocks of warm runs of {_BLOCKS} layers on NCCL: no event orders the transfer before or after the "
            f"product. {ends:,} transfers are at an end: the first product of a forward or backward needs them, or "
            f"none is issued after them. Exposed: {odd or 'none'}. Units that run in another order than before are not "
            "gathered ahead of use."
        ),
    )


@campaign_row("host-waits", section="device")
def host_waits(bench: Bench) -> Row:
    """Waits of the host in a warm step, by place."""
    exact, offloaded = _waits(_EXACT), _waits(_OFFLOADED)
    messages = {place: max(of[place] for of in (*exact, *offloaded)) for place in _OF_MESSAGES}
    for of in (*exact, *offloaded):
        for place in _OF_MESSAGES:
            del of[place]
    worst = [max(sum(of.values()) for of in each) for each in (exact, offloaded)]
    places = sorted({place for of in (*exact, *offloaded) for place in of})
    return Row(
        claim="waits of the host for the device in a warm step, weights on the device / offload, worst program",
        required="0 / <= 1",
        measured=f"{worst[0]:g} / {worst[1]:g}",
        is_met=worst[0] == 0 and worst[1] <= 1,
        note=(
            f"Programs: {', '.join(_EXACT)} / {', '.join(_OFFLOADED)}. What the program reads itself is not counted. "
            f"Places: {', '.join(places) or 'none'}. With offload, one wait is for gradients that arrive on the host "
            "and for the last read of weights there. An edit between forward and backward waits for the forward's "
            "reads; a step without one does not. Besides, hosts wait for small messages of other hosts: "
            + ", ".join(f"{count:g} a step in {place}" for place, count in messages.items())
            + " (the comparison of ranks, sent before the last sums; the agreement on copies, in few bits)."
        ),
    )


@campaign_row("lane-operations", section="device")
def lane_operations(bench: Bench) -> Row:
    """Operations on the engine's lanes for a unit in a step: kernels, copies and collectives."""
    found = {name: _operations(name) for name in _COUNTED}
    exact, coded = (max(sum(found[name].values()) for name in names) for names in (_COUNTED[:2], _COUNTED[2:]))
    each = "; ".join(
        f"{name}: {', '.join(f'{kind} {count:.1f}' for kind, count in of.most_common())}" for name, of in found.items()
    )
    return Row(
        claim="operations on the lanes for a unit in a warm step, exact / in four bits",
        required="<= 8.5 / <= 20",
        measured=f"{exact:.1f} / {coded:.1f}",
        is_met=exact <= 8.5 and coded <= 20,
        note=(
            f"{_DEEP} layers and the root on NCCL, 2 x 2 ranks, fp32; a codec's kernel is one operation, as on a GPU. "
            f"{each}. A step has three more, of the flags of used parameters."
        ),
    )


def _operations(name: str) -> Counter[str]:
    """The operations on streams other than compute in a step, by kind, for each unit."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of settings that are odd on purpose
        tape = ENGINE[name].record(num_blocks=_DEEP, is_warm=True, counts=True).tape
    counted = Counter(
        entry.name.removeprefix("aten::")
        for entry in tape.entries
        if isinstance(entry, Step)
        and tape.timelines[entry.timeline] == "stream"
        and (entry.cost is not None or entry.transfer is not None)
    )
    return Counter({kind: count / (_DEEP + 1) / _backwards(tape) for kind, count in counted.items()})


def _waits(names: Sequence[str]) -> list[Counter[str]]:
    """The engine's waits of the host in a step of each program, by file."""
    found = []
    for name in names:
        tape, waits = _tape(name), Counter[str]()
        for entry in tape.entries:
            if isinstance(entry, Wait) and entry.timeline in tape.threads and entry.site is not None:
                waits[entry.site.file] += 1
        found.append(Counter({place: count / _backwards(tape) for place, count in waits.items()}))
    return found


def _backwards(tape: Tape) -> int:
    return sum(isinstance(entry, Mark) and entry.label == "backward" for entry in tape.entries)


@functools.cache
def _tape(name: str) -> Tape:
    """A warm run of a program, with marks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of settings that are odd on purpose
        return ENGINE[name].record(num_blocks=_BLOCKS, is_warm=True).tape


# -- lines ------------------------------------------------------------------------------------------------------------

_LEAST_SHARE = 0.98


@campaign_row("device-lines", section="device")
def lines(bench: Bench) -> Row:
    """Run the rehearsed programs and the tests with stand-ins; a quick run takes the programs only."""
    places = device_places()
    missing = not_passed(places, WATCHES[:1] if bench.quick else WATCHES)
    share = 1 - len(missing) / len(places)
    return Row(
        claim="lines that run on an accelerator only, executed by some test without one",
        required=f">= {100 * _LEAST_SHARE:g} %",
        measured=f"{len(places) - len(missing)} of {len(places)}, {100 * share:.1f} %",
        is_met=share >= _LEAST_SHARE,
        note="Read from the code: statements, and arms of expressions, of the core that no CPU comes to. "
        f"Left: {'; '.join(told(missing)) or 'none'}.",
        measures=tuple(f"laconic.{room.removesuffix('.py')}" for room in ROOMS),
    )


# -- kernels ----------------------------------------------------------------------------------------------------------

_MOST_REGISTERS, _MOST_KERNELS = 96, 2
_MOST_BYTES = {"encode": 8.0, "decode": 5.0}
"""The bytes of memory for each value: fp32 values and codes, without what is subtracted or added to."""
_DATA = {"encode": ("reads values", "writes codes"), "decode": ("reads codes", "writes out")}
_OTHERWISE = {"difference": "encode", "sum": "decode"}
_MEASURES = ("laconic.codec", "laconic.optim.adamw8bit_triton")
_MOST_LOSSLESS_BYTES = 12.0
_MOST_GRADIENT_BYTES = 8.0
_TIMEOUT_S = 1500.0


@campaign_row("kernels-compiled", section="device")
def compiled(bench: Bench) -> Row:
    """Compile every kernel for three generations of GPUs; a quick run for one."""
    found = told_apart("tests.kernels.compiled", *(["sm_90"] if bench.quick else []), timeout_s=_TIMEOUT_S)
    most_spilled, spills = _worst((facts["spilled"], name) for name, facts in found.items())
    most_registers, crowded = _worst((facts["registers"], name) for name, facts in found.items())
    most_kernels, launched = _worst((num, name) for name, num in _interpreted()["kernels_a_piece"].items())
    moved: dict[str, list[tuple[float, str]]] = {"encode": [], "decode": []}
    for name, facts in found.items():
        if not name.startswith("AdamW8bit"):
            way = name.split(", ")[1]
            way = _OTHERWISE.get(way, way)
            moved[way].append((sum(facts["moved"][each] for each in _DATA[way]), name))
    (encode_bytes, encodes), (decode_bytes, decodes) = _worst(moved["encode"]), _worst(moved["decode"])
    return Row(
        claim="Triton kernels for sm_80, sm_90, sm_100: spills; registers; kernels a piece; bytes a value, "
        "encode / decode",
        required=f"0; <= {_MOST_REGISTERS}; <= {_MOST_KERNELS}; <= {_MOST_BYTES['encode']:g} / <= "
        f"{_MOST_BYTES['decode']:g}",
        measured=f"{most_spilled:g}; {most_registers:g}; {most_kernels:g}; {encode_bytes:g} / {decode_bytes:g}",
        is_met=most_spilled == 0
        and most_registers <= _MOST_REGISTERS
        and most_kernels <= _MOST_KERNELS
        and encode_bytes <= _MOST_BYTES["encode"]
        and decode_bytes <= _MOST_BYTES["decode"],
        note=f"the worst of {len(found)} compilations: {f'spills of {spills}' if most_spilled else 'none spills'}; "
        f"registers of {crowded}; kernels of {launched}; bytes of {encodes} / {decodes}. Bytes are those of fp32 "
        "values and of codes, counted in the generated code. A difference reads 4 more of its base, a sum 4 more of "
        "what it adds to. Not counted: scales, which are 0.0003 to 0.07 bytes a value (with them int8 decodes in "
        "5.02), and the tables of e2m1, e3m0 and nf4, 64 bytes at most. Several threads ask for each, of a cache.",
        measures=_MEASURES,
    )


@campaign_row("kernels-equal", section="device")
def equal(bench: Bench) -> Row:
    """Run every kernel in triton's interpreter beside its twin."""
    found = _interpreted()
    different = sum(len(each) for each in found["different"].values())
    return Row(
        claim="kernels equal to their twins in Triton's interpreter, fp32 and bf16",
        required="to the bit",
        measured=f"{found['compared']:,} comparisons, {different} different",
        is_met=not different,
        note="block codecs, plain and rotated, scaled formats and AdamW8bit: odd sizes, zeros of both signs, "
        "denormals, huge values, ties, NaN and infinity; of AdamW8bit in bf16 the moments only. The sign of a NaN is "
        "not compared." + "".join(f" {name}: {each[:3]}." for name, each in found["different"].items()),
        measures=_MEASURES,
    )


@campaign_row("kernels-lossless", section="device")
def lossless(bench: Bench) -> Row:
    """Compile the kernels of lossless differences, and run them beside their twin."""
    found = told_apart("tests.kernels.compiled", "lossless", *(["sm_90"] if bench.quick else []), timeout_s=_TIMEOUT_S)
    own = {name: facts for name, facts in found.items() if "FP4" not in name}
    most_spilled, spills = _worst((facts["spilled"], name) for name, facts in own.items())
    most_registers, _ = _worst((facts["registers"], name) for name, facts in own.items())
    moved = {
        kernel: max(_uncached(facts["moved"]) for name, facts in own.items() if name.split(", ")[1] == kernel)
        for kernel in ("write", "read")
    }
    run = told_apart("tests.kernels.lossless", timeout_s=_TIMEOUT_S, TRITON_INTERPRET="1")
    launched = {way: takes["triton"] for way, takes in run["takes"].items()}
    reads = max(takes.get("reads of the host", 0) for takes in run["takes"].values())
    most_bytes = max(moved.values())
    return Row(
        claim="Triton kernels of lossless differences: spills; registers; bytes a value, encode / decode; kernels a "
        "piece; reads of the host; payloads and values beside the plain twin",
        required=f"0; <= 128; <= {_MOST_LOSSLESS_BYTES:g}; <= 4 / <= 2; 1; to the bit",
        measured=f"{most_spilled:g}; {most_registers:g}; {moved['write']:g} / {moved['read']:g}; "
        f"{launched['encode']} / {launched['decode']}; {reads}; {len(run['different'])} of {run['compared']} differ",
        is_met=most_spilled == 0
        and most_registers <= 128
        and most_bytes <= _MOST_LOSSLESS_BYTES
        and (launched["encode"], launched["decode"], reads) == (4, 2, 1)
        and not run["different"],
        note=f"{len(own)} compilations for sm_80, sm_90 and sm_100: bf16, float8 and plain bytes, with and without the "
        f"last differences{f'; spills of {spills}' if most_spilled else ''}. With two patterns a byte, which no wire "
        f"sends, kernels spill up to {max(facts['spilled'] for facts in found.values()):g} bytes a thread. Bytes are "
        "those that threads ask for in the generated code, of values, last differences and scratch places. Not "
        "counted: the table of 192 bytes, and the payload, some bits a value, which several threads ask for, of a "
        "cache; nor the six bytes a tile that the last program moves alone. Of the four kernels one is over a table, "
        "and one is over a sample of some tiles." + "".join(f" {name}." for name in run["different"][:3]),
        measures=(*_MEASURES, "laconic.codec.lossless_triton"),
    )


@campaign_row("kernels-gradients", section="device")
def gradients(bench: Bench) -> Row:
    """Compile the kernels of lossless gradients, and run them beside their twin."""
    found = told_apart("tests.kernels.compiled", "gradients", *(["sm_90"] if bench.quick else []), timeout_s=_TIMEOUT_S)
    most_spilled, spills = _worst((facts["spilled"], name) for name, facts in found.items())
    most_registers, _ = _worst((facts["registers"], name) for name, facts in found.items())
    moved = {
        way: sum(
            max(_of_gradients(facts["moved"]) for name, facts in found.items() if f"bfloat16, {kernel}" in name)
            for kernel in kernels
        )
        for way, kernels in {"encode": ("measure", "write"), "decode": ("count_outside", "read")}.items()
    }
    run = told_apart("tests.kernels.gradients", timeout_s=_TIMEOUT_S, TRITON_INTERPRET="1")
    launched = {way: sum(takes.values()) for way, takes in run["takes"].items()}
    reads = sum(takes.get("reads of the host", 0) for takes in run["takes"].values())
    return Row(
        claim="Triton kernels of lossless gradients: spills; registers; bytes a value of bf16, encode / decode; "
        "launches; reads of the host; messages and values beside the plain twin",
        required=f"0; <= 128; <= {_MOST_GRADIENT_BYTES:g}; <= 3 / <= 5; 0; to the bit",
        measured=f"{most_spilled:g}; {most_registers:g}; {moved['encode']:.1f} / {moved['decode']:.1f}; "
        f"{launched['encode']} / {launched['decode']}; {reads}; {len(run['different'])} of {run['compared']} differ",
        is_met=most_spilled == 0
        and most_registers <= 128
        and max(moved.values()) <= _MOST_GRADIENT_BYTES
        and (launched["encode"], launched["decode"], reads) == (3, 5, 0)
        and not run["different"],
        note=f"{len(found)} compilations{f'; spills of {spills}' if most_spilled else ''}. Bytes are those that "
        "threads ask for in the generated code, as if every exponent lay outside of its window, which takes one more. "
        "Values are read twice to encode, and codes twice to decode. Not counted: counts of programs, which all of its "
        "threads ask for, of a cache, and a message of the values themselves. The launches include sums of counts by "
        "torch. Messages, values and buffers lie between pages that no process may touch, damaged messages, too."
        + "".join(f" {name}." for name in run["different"][:3]),
        measures=("laconic.codec",),
    )


def _of_gradients(moved: dict[str, float]) -> float:
    return sum(each for what, each in moved.items() if not what.endswith(("ends", "counts", "length", "_values")))


def _uncached(moved: dict[str, float]) -> float:
    return sum(each for what, each in moved.items() if what.split()[-1] not in ("table", "payload", "payload_words"))


def _worst(found: Iterable[tuple[float, str]]) -> tuple[float, str]:
    """The largest number and the name that has it, or the first of several with how many more have it."""
    known = list(found)
    most = max(number for number, _ in known)
    names = [name for number, name in known if number == most]
    return most, names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


@functools.cache
def _interpreted() -> dict[str, Any]:
    return told_apart("tests.kernels.interpreted", timeout_s=_TIMEOUT_S, TRITON_INTERPRET="1")


# -- kernel paths -----------------------------------------------------------------------------------------------------

_MESHES = ((2, 1), (2, 2), (1, 3))
"""(nodes, ranks of a node)."""


@campaign_row("kernel-paths", section="mend")
def kernel_paths(bench: Bench) -> Row:
    """Try all paths under all strategies on each mesh; a quick run takes one mesh."""
    runnable, reasons, wrong = sort_out(paths())
    outcomes: list[Outcome] = []
    for nodes, local in _MESHES[:1] if bench.quick else _MESHES:
        by_rank = launch(job, runnable, STRATEGIES, num_ranks=nodes * local, num_local=local, timeout_s=_TIMEOUT_S)
        wrong += [f"{nodes}x{local}, {fault}" for fault in faults(by_rank)]
        outcomes += _worst_of_ranks(by_rank)
    print("\n".join(wrong), file=sys.stderr, flush=True)
    compared = [each for each in outcomes if not each.refusal]
    refused = sorted({f"{each.strategy} of {each.path}" for each in outcomes if each.refusal})
    largest = max(each.difference for each in compared)
    elsewhere = sorted({path.implementation for path in reasons})
    return Row(
        claim="default kernel paths x strategies against unsharded, relative difference of gradients in fp32",
        required=f"every cell <= {LIMIT:.0e}",
        measured=f"{len(compared)} cells, the largest difference {largest:.1e}; {len(wrong)} faults",
        is_met=not wrong and largest <= LIMIT,
        note=f"{len(runnable)} paths of transformers' registries and forms of models, {len(STRATEGIES)} strategies, "
        f"{len(_MESHES[:1] if bench.quick else _MESHES)} meshes. Refused by name: {', '.join(refused)}. The library "
        f"itself cannot train on this machine with {', '.join(elsewhere)}.",
    )


def _worst_of_ranks(by_rank: list[list[Outcome]]) -> list[Outcome]:
    return [max(cell, key=lambda each: each.difference) for cell in zip(*by_rank, strict=True)]
