"""Runs whose messages cross in few bits equal the oracle to the bit, send what a formula says, and resume."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from laconic.codec import CODECS
from laconic.cyclic.coding import RingWire, StageCoding, check_wire
from laconic.cyclic.links import ByteLayout, Links
from laconic.cyclic.placement import VersionError
from laconic.cyclic.runtime import CyclicDataParallel
from laconic.cyclic.schedule import Rule, Schedule, StatePlacement
from laconic.shard.policies import Wire
from tests.cyclic.toys import OPTIMIZERS, Course, assert_equals_oracle, make_stages
from tests.reference.cyclic import coded_like
from tests.reference.messages import int8_bytes, message_bytes
from tests.reference.wire import ROTATED
from tests.support.launch import on_ranks

torch.set_num_threads(1)

loss_fn = nn.functional.cross_entropy
RING = Wire(weights="int8", gradients="int8", feedback=True, exact_every=3)
VALUES = Wire(weights="int8", as_values=True, gradients="int8", feedback=True)
SUMS = Wire(gradients="int8", feedback=True)
WIRES: dict[StatePlacement, Wire] = {"replicated": RING, "sharded": VALUES, "shared": SUMS}


def widened_stages(count: int, seed: int) -> list[nn.Module]:
    """Stages of which one has a matrix of several blocks and an odd size."""
    stages: list[Any] = make_stages(count, seed)
    torch.manual_seed(7)
    stages[0].idle = nn.Parameter(torch.randn(13, 37))  # no batch uses it, so only weight decay changes it
    stages[-1].linear.register_parameter("wide", nn.Parameter(torch.randn(5, 3, 11)))
    return stages


def course_of(states: StatePlacement, rule: str, **options: Any) -> Course:
    fixed: dict[str, Any] = {"states": states, "rule": rule, "optimizer": "adamw", "make": widened_stages}
    return Course(**{**fixed, "wire": WIRES[states], "local": 1, **options})


# -- the same numbers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "local", "count", "courses"),
    [
        (3, 1, 3, (("replicated", "v1"), ("replicated", "lag2"), ("sharded", "v1"), ("sharded", "lag2"))),
        (3, 1, 3, (("replicated", "dp"),)),
        (4, 2, 4, (("replicated", "v2"), ("sharded", "v2"))),
        (6, 2, 3, (("shared", "v2"),)),
    ],
)
@on_ranks("ranks", local="local")
def test_workers_equal_the_oracle(local: int, count: int, courses: Any) -> None:
    """Odd sizes, each worker on a node of its own; or two on each node."""
    for states, rule in courses:
        saves = (3,) if local == 1 and rule != "v1" else ()
        assert_equals_oracle(course_of(states, rule, count=count, local=local, saves=saves))


@pytest.mark.parametrize("codec", ["int8", "int4", "int2", "bf16"])
def test_a_stage_is_coded_as_the_oracle_codes_tensors(codec: str) -> None:
    """Sizes that fit no block, neighbours that fill whole blocks, vectors between them, and several dtypes."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(13, 37), (128,), (4, 64), (3, 5, 7), (64, 2), (7,), (1, 1), (0, 4)]
    tensors = [torch.randn(shape, generator=generator) for shape in shapes]
    tensors += [tensors[0].bfloat16(), tensors[5].half()]
    layout = ByteLayout(tensors)
    coding = StageCoding(layout, CODECS[codec], "cpu", rotates=codec in ROTATED)
    buffer = layout.pack(tensors, torch.device("cpu"))
    base = layout.pack([tensor.roll(1) for tensor in tensors], torch.device("cpu"))
    message = coding.encode(buffer)
    assert message.shape == (coding.num_bytes,)
    for own, tensor in zip(layout.views(coding.decode(message)), tensors, strict=True):
        torch.testing.assert_close(own, coded_like(tensor.float(), codec).to(tensor.dtype), rtol=0, atol=2e-6)
    near = coding.decode(coding.encode(buffer, base), base)
    for own, tensor, old in zip(layout.views(near), tensors, layout.views(base), strict=True):
        want = tensor if tensor.ndim < 2 else old + coded_like(tensor.float() - old.float(), codec).to(tensor.dtype)
        torch.testing.assert_close(own, want, rtol=0, atol=2e-6 if tensor.dtype == torch.float32 else 4e-2)


# -- bytes -------------------------------------------------------------------------------------------------------------


def stage_bytes(stage: nn.Module) -> tuple[int, int]:
    """The bytes of a message with a stage in int8 and exactly; an exact tensor begins at a multiple of 16 bytes."""
    tensors = [p for p in stage.parameters() if p.requires_grad]
    begins = list(itertools.accumulate((-(-p.numel() // 4) * 4 for p in tensors), initial=0))
    runs = [(begin, begin + p.numel(), p.ndim < 2) for begin, p in zip(begins, tensors, strict=False)]
    return message_bytes(runs, int8_bytes), 4 * begins[-1]


_sent: dict[int, Counter[tuple[int, str]]] = {}


def count_sent(links: Links, peer: int, purpose: str, *, sent_bytes: int = 0, received_bytes: int = 0) -> None:
    """In place of `Links._count`, which ranks in one process share."""
    _sent[dist.get_rank()][peer, purpose] += sent_bytes


@pytest.mark.parametrize("count", [2, 3])
@on_ranks("count", local=1)
def test_every_link_carries_the_bytes_of_the_formula(count: int) -> None:
    rank, batches, rule = dist.get_rank(), 4, Rule.named("lag2", count)
    course = course_of("replicated", "lag2", count=count, wire=Wire(weights="int8", gradients="int8"))
    run = course.run()
    _sent[rank] = Counter()
    dist.barrier()
    Links._count = count_sent  # type: ignore[assignment, method-assign]
    course.train(run, range(batches))
    run.drain()
    sent = _sent[rank]
    expected: Counter[tuple[int, str]] = Counter()
    for number, stage in enumerate(run.stages):
        owner, (coded, exact) = rule.owner(number), stage_bytes(stage)
        following = (rank + 1) % count
        if following != owner:
            expected[following, "weights"] += (batches - 1) * coded + exact  # the last version is exact
        if rank < count - 1:
            expected[following, "gradients"] += batches * coded
        elif rank != owner:
            expected[owner, "gradients"] += batches * coded
    assert {key: n for key, n in sent.items() if key[1] != "control" and n} == dict(expected)
    run.close()


# -- edits -------------------------------------------------------------------------------------------------------------


def assert_all_equal(run: Any) -> None:
    """All workers have the same parameters."""
    own = torch.cat([p.detach().flatten() for stage in run.stages for p in stage.parameters()])
    others = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(others, own)
    assert all(torch.equal(own, other) for other in others)


@on_ranks(2, local=1)
def test_an_edit_of_copies_is_refused_but_after_a_drain() -> None:
    course = course_of("replicated", "v2", count=2)
    run = course.run()
    course.train(run, range(2))
    run.drain()
    with torch.no_grad(), run.consistent_parameters():
        run.stages[0].linear.weight.zero_()
    with torch.no_grad():
        run.stages[1].linear.weight.fill_(0.5)
    course.train(run, range(2, 4))
    run.drain()
    assert_all_equal(run)
    course.train(run, range(4, 6))
    with torch.no_grad():
        run.stages[0].linear.weight.fill_(0.5)
    with pytest.raises(VersionError, match=r"stage 0 were changed in place in the middle of a run.*after `drain\(\)`"):
        run._placement._base(0)
    run._placement._counted.clear()  # so that the run can end
    run.close()


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_what_a_wire_cannot_do_is_refused() -> None:
    def trainer(**arguments: Any) -> CyclicDataParallel:
        return CyclicDataParallel(make_stages(2), loss_fn, OPTIMIZERS["sgd"], **arguments)

    for states, wire in (("sharded", "8bit"), ("shared", Wire(weights="bf16", as_values=True))):
        with pytest.raises(ValueError, match=rf"states='{states}'.*use "):
            check_wire(Wire.of(wire), states)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"frozen=True\) has nothing to act on"):
        trainer(wire=Wire(weights="int8", as_values=True, frozen=True))
    with pytest.raises(ValueError, match="wire='6bit' is not known"):
        trainer(wire="6bit")
    with pytest.warns(UserWarning, match=r"wire= does nothing here: all workers are on one node.*LOCAL_WORLD_SIZE"):
        trainer(wire="8bit")
    layouts = [ByteLayout([torch.zeros(3, 3, dtype=torch.float64)])] * 2
    schedule = Schedule(Rule.named("v2", 2))
    with pytest.raises(ValueError, match=r"stage 0 has parameters of torch\.float64"):
        RingWire(RING, schedule, layouts, torch.device("cpu"), [0, 1])
