"""A warm step under NCCL, counted: for what the host waits, and what hosts send to each other."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from laconic import fully_shard, init_mesh
from laconic.rehearse import Tape, mark, rehearsal
from laconic.rehearse.tape import Mark, Step, Wait
from laconic.shard import extension
from tests.rehearse.engine import Net, add_idle

NUM_STEPS = 4
WARM = 2
"""The first step that is like all later ones."""


def add_idle_after_first_step(model: Net) -> None:
    """As `add_idle`, but the first forward uses the parameter."""
    add_idle(model)
    first = iter([True])
    model.register_forward_hook(lambda model, args, y: y + model.idle.sum() if next(first, False) else y)


def counted(
    prepare: Callable[[Net], None] = lambda model: None, *, has_values: bool = True, has_guard: bool = False,
    islands: int = 1, has_hooks: bool = False, keeps_gradients: bool = False, **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """Return the waits of the host in each warm step, its messages to other hosts, and the bytes of flags by level.

    With `keeps_gradients` gradients become zero, not None, after each step. `options` are those of `fully_shard`.
    """
    torch.manual_seed(0)
    shape = {"islands": islands, "nodes": 3, "local": 5}
    observer = extension.observer_class if has_guard else lambda: extension.Observer
    with mock.patch.object(extension, "observer_class", observer), rehearsal(has_values=has_values, **shape) as machine:
        mesh = init_mesh("cuda", **shape)
        model: Any = Net(16).to("cuda")
        prepare(model)
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh, **options)
        for parameter in model.blocks.parameters() if has_hooks else ():
            parameter.register_post_accumulate_grad_hook(lambda parameter: None)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        x = torch.ones(4, 16).to("cuda")
        idle = []
        with machine.recording() as tape:
            for step in range(NUM_STEPS):
                mark(step)
                model(x).square().mean().backward()
                idle.append([name for name, each in model.named_parameters() if each.grad is None])
                optimizer.step()
                optimizer.zero_grad(set_to_none=not keeps_gradients)
            mark(NUM_STEPS)
    return {"idle": idle, **_of_warm_steps(tape)}


def _of_warm_steps(tape: Tape) -> dict[str, Any]:
    waits, sent, flags = [], [], defaultdict(int)
    step, seen = -1, set[int]()
    for entry in tape.entries:
        if isinstance(entry, Mark):
            step = entry.label
        if not WARM <= step < NUM_STEPS:
            continue
        if isinstance(entry, Wait) and entry.timeline in tape.threads:
            waits.append(f"{entry.site.file} {entry.site.function}" if entry.site else "the program")
        if isinstance(entry, Step) and entry.transfer is not None and id(entry.transfer) not in seen:
            seen.add(id(entry.transfer))
            if tape.timelines[entry.timeline].startswith("Gloo"):
                sent.append(entry.transfer.purpose)
            elif entry.transfer.purpose == "control":
                flags[entry.transfer.level] += int(entry.transfer.route.sent[entry.transfer.level])
    return {"waits": waits, "sent": sent, "flags": dict(flags)}


WAITS = (NUM_STEPS - WARM) * ["shard/grad.py _unite_on_lane"]


@pytest.mark.parametrize(("has_values", "islands"), [(True, 1), (False, 2)])
def test_ranks_that_use_all_parameters_neither_wait_nor_send_between_hosts(has_values: bool, islands: int) -> None:
    found = counted(has_values=has_values, islands=islands)
    assert (found["waits"], found["sent"]) == ([], [])
    assert found["idle"] == [[]] * NUM_STEPS
    flags = 4  # a byte for each parameter
    of_islands = {"island": flags} if islands == 2 else {}
    each = {"local": 2 * 4 * flags // 5, "node": 2 * 2 * flags // 3, **of_islands}
    assert found["flags"] == {level: (NUM_STEPS - WARM) * nbytes for level, nbytes in each.items()}


def test_the_comparison_of_ranks_is_all_that_hosts_send() -> None:
    found = counted(has_values=False, has_guard=True)
    assert found["waits"] == (NUM_STEPS - WARM) * ["guard/comparison.py settle"]
    assert found["sent"] == (NUM_STEPS - WARM) * ["the comparison of what ranks have issued"]


@pytest.mark.parametrize("has_hooks", [False, True])
def test_a_rank_with_an_unused_parameter_waits_once_a_step(has_hooks: bool) -> None:
    """Without the others' flags of this backward, nobody knows whether the parameter has a gradient.

    Hooks of parameters in units where all are used run without a wait.
    """
    found = counted(add_idle, has_hooks=has_hooks)
    assert (found["waits"], found["sent"]) == (WAITS, [])
    assert found["idle"] == [["idle"]] * NUM_STEPS
    assert counted(has_hooks=True)["waits"] == []


def test_an_answer_that_changes_nothing_is_not_awaited() -> None:
    """A `.grad` that was there before the backward stays, whatever the others say."""
    found = counted(add_idle_after_first_step, keeps_gradients=True)
    assert (found["waits"], found["sent"], found["idle"]) == ([], [], [[]] * NUM_STEPS)
    found = counted(add_idle_after_first_step)
    assert found["waits"] == WAITS
    assert found["idle"] == [[], *[["idle"]] * (NUM_STEPS - 1)], "no use is remembered from an earlier step"


def test_lossless_crossings_let_the_host_wait_once_a_unit() -> None:
    """In each pass for the lengths of messages, and in forward for what ranks agree on. Nothing waits for the coder."""
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    waits = Counter(counted(cache="host", wire="lossless", mp_policy=half)["waits"])
    num_units, num_steps = 4, NUM_STEPS - WARM
    assert waits.pop("shard/crossing.py _ask_all_ranks") == num_steps
    assert waits == {"the program": 3 * num_units * num_steps}, "reads, which have no site: lengths, faults and lengths"
