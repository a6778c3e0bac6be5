"""Programs without values do what programs with values do, at any size."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

from laconic import fully_shard, init_mesh, rehearse
from laconic.rehearse import Machine, rehearsal
from laconic.rehearse.tape import Free, Record, Step, Wait
from laconic.shard.unit import unit_of
from tests.rehearse.fsdp2 import FSDP2
from tests.rehearse.programs import PROGRAMS

_NAMES = [
    "cache budget",
    "LoRA, cache host",
    "feedback",
    "replicas, 4 bits",
    "LocalSteps",
    "FSDP2, offload",
]
_OF_VALUES = "an agreement of the ranks"
"""Messages as long as the digits of what they tell."""


def _course(machine: Machine) -> list[Any]:
    """The transfers of a program, its waits, and the sizes that it allocates and frees, in order."""
    found: list[Any] = []
    last = None
    for entry in machine.tape.entries:
        if isinstance(entry, Step) and entry.transfer is not None:
            if entry.transfer is not last and entry.transfer.purpose != _OF_VALUES:
                last = entry.transfer
                found.append((last.op, last.level, last.purpose, last.unit, last.sent_bytes, last.received_bytes))
        elif isinstance(entry, Record | Wait):
            if entry.site is not None:
                found.append((type(entry).__name__, str(entry.site)))
        elif isinstance(entry, Step | Free):
            number = entry.memory if isinstance(entry, Free) else entry.allocates
            if number is not None and machine.tape.memories[number].is_device:
                found.append((type(entry).__name__, machine.tape.memories[number].nbytes))
    return found


@pytest.mark.parametrize("name", _NAMES)
def test_a_program_without_values_moves_waits_and_allocates_as_with_values(name: str) -> None:
    recorded: Any = {**PROGRAMS, **FSDP2}[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of settings that are odd on purpose
        with_values, without = (_course(recorded.record(has_values=each)) for each in (True, False))
    assert with_values == without


def sharded(count: int, *more: nn.Module, nodes: int, local: int, **options: Any) -> Any:
    """Linear layers in a row, and `more`, each a unit of its own."""
    mesh = init_mesh("cuda", nodes=nodes, local=local)
    layers = [each.to("cuda") for each in (*(nn.Linear(64, 64, bias=False) for _ in range(count)), *more)]
    for layer in layers[:count]:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(nn.Sequential(*layers), mesh=mesh, **options)


def program() -> None:
    """A step as on a cluster of 64 nodes."""
    sharded(3, nodes=64, local=8)(torch.randn(4, 64, device="cuda")).sum().backward()


def test_the_lines_of_the_page_on_races_run() -> None:
    # docs/races.md shows these lines
    tape = rehearse.run(program, nodes=64, local=8)  # `program` makes its mesh, model and steps as on the cluster
    for each in rehearse.overlap(tape):  # the compute that no event orders before or after each transfer
        print(each.transfer.level, each.transfer.purpose, len(each.compute))
    assert len(rehearse.overlap(tape)) >= 2 * 2 * 3


def test_512_ranks_in_one_process_send_what_the_engine_counts() -> None:
    with rehearsal(nodes=64, local=8, rank=100) as machine:
        model = sharded(4, nodes=64, local=8, cache="host")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        before = model.traffic.snapshot()
        with machine.recording() as tape:
            model(torch.randn(16, 64, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        counted = (model.traffic.snapshot() - before).sizes
    on_tape: Counter[str] = Counter()
    for transfer in {id(e.transfer): e.transfer for e in tape.entries if isinstance(e, Step)}.values():
        if transfer is not None and transfer.purpose in ("weights", "gradients"):
            on_tape[f"{transfer.level} {transfer.purpose}"] += transfer.sent_bytes
    assert on_tape == {f"{k[0]} {k[1]}": v for k, v in counted.items() if k[2] == "sent" and k[1] != "control"}
    weight = 4 * 64 * 64 * 4
    assert on_tape["node weights"] == weight // 512 * 63  # once a step: the cache holds them for backward
    assert on_tape["local weights"] == 2 * weight // 8 * 7


def test_offloaded_weights_rest_on_the_host_and_are_gathered_on_the_device() -> None:
    places: dict[str, Any] = {}

    def program() -> None:
        mesh = init_mesh("cuda", nodes=2, local=2)
        layer = fully_shard(nn.Linear(64, 64), mesh=mesh, offload_policy=CPUOffloadPolicy())
        places["rests"] = layer.weight.device.type
        places["is_page_locked"] = unit_of(layer).buckets[0].shard.is_pinned()
        layer.register_forward_hook(lambda module, args, output: places.update(computes=module.weight.device.type))
        layer(torch.randn(4, 64, device="cuda")).sum().backward()
        places["gradient"] = layer.weight.grad.device.type

    rehearse.run(program, nodes=2, local=2)
    assert places == {"rests": "cpu", "is_page_locked": True, "computes": "cuda", "gradient": "cpu"}


def test_the_copy_of_a_root_stands_before_no_other() -> None:
    """Compute waits for the copy of each layer before it frees the layer: [Note: Late copies] in shard/gather.py."""

    def program() -> None:
        model = sharded(3, nn.Linear(64, 100, bias=False), nodes=2, local=2, cache="host")
        model(torch.randn(4, 64, device="cuda")).sum().backward()

    tape = rehearse.run(program, nodes=2, local=2)
    copied = [
        access.end - access.begin
        for entry in tape.entries
        if isinstance(entry, Step) and entry.place.startswith("shard/cache.py") and entry.name == "aten::copy_"
        for access in entry.accesses
        if access.is_write and not tape.memories[access.memory].is_device
    ]
    assert copied == [4 * 64 * 64 // 2] * 3 + [4 * 64 * 100 // 2]
