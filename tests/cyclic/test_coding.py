"""Runs whose messages cross in few bits equal the oracle to the bit, send what a formula says, and resume."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from laconic.codec import CODECS
from laconic.cyclic.coding import RingWire, StageCoding, check_wire
from laconic.cyclic.links import ByteLayout, Links
from laconic.cyclic.placement import VersionError
from laconic.cyclic.runtime import CyclicDataParallel
from laconic.cyclic.schedule import Rule, Schedule, StatePlacement
from laconic.shard.policies import Wire
from tests.cyclic.test_snapshot import together
from tests.cyclic.toys import OPTIMIZERS, assert_equal, make_stages, train, train_oracle
from tests.reference.cyclic import Oracle, coded_like
from tests.reference.messages import int8_bytes, message_bytes
from tests.reference.wire import ROTATED
from tests.support.launch import on_ranks, run_ranks

torch.set_num_threads(1)

loss_fn = nn.functional.cross_entropy
RING = Wire(weights="int8", gradients="int8", feedback=True, exact_every=3)
VALUES = Wire(weights="int8", as_values=True, gradients="int8", feedback=True)
SUMS = Wire(gradients="int8", feedback=True)
WIRES: dict[StatePlacement, Wire] = {"replicated": RING, "sharded": VALUES, "shared": SUMS}


def widened(stages: list[nn.Module]) -> list[nn.Module]:
    """The stages, of which one has a matrix of several blocks and an odd size."""
    torch.manual_seed(7)
    stages[0].idle = nn.Parameter(torch.randn(13, 37))  # no batch uses it, so only weight decay changes it
    stages[-1].linear.register_parameter("wide", nn.Parameter(torch.randn(5, 3, 11)))  # type: ignore[union-attr]
    return stages


def make(count: int, states: Any, wire: Wire, rule: str) -> CyclicDataParallel:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    stages = widened(make_stages(count))
    return CyclicDataParallel(stages, loss_fn, OPTIMIZERS["adamw"], mesh, rule=rule, states=states, wire=wire)


def oracle_of(count: int, states: str, wire: Wire, rule: str, local: int) -> Oracle:
    nodes, optimizer = [rank // local for rank in range(dist.get_world_size())], OPTIMIZERS["adamw"]
    stages = widened(make_stages(count))
    return Oracle(stages, loss_fn, optimizer, Rule.named(rule, count), wire=wire, nodes=nodes, states=states)


def worker_of(states: str) -> int | None:
    return None if states == "shared" else dist.get_rank()


# -- the same numbers --------------------------------------------------------------------------------------------------


def job_trajectory(count: int, local: int, placements: tuple[StatePlacement, ...], rules: tuple[str, ...]) -> None:
    for states in placements:
        for rule in rules:
            assert_run_equals_the_oracle(count, local, states, rule)


def assert_run_equals_the_oracle(count: int, local: int, states: StatePlacement, rule: str) -> None:
    case, wire, rank = f"{states}, {rule}", WIRES[states], dist.get_rank()
    run, oracle = make(count, states, wire, rule), oracle_of(count, states, wire, rule, local)
    exact = Oracle(widened(make_stages(count)), loss_fn, OPTIMIZERS["adamw"], Rule.named(rule, count))
    for steps in (range(4), range(4, 6)):
        versions, expected = [oracle.newest], []
        for step in steps:
            expected += train_oracle(oracle, range(step, step + 1))
            versions.append(oracle.newest)
        losses = train(run, steps, worker_of(states))
        train_oracle(exact, steps)
        if states != "shared":
            assert losses == [row[rank] for row in expected], case
            assert_copies_equal(run, versions, states, case)
        run.drain()
        oracle.restart()
        exact.restart()
        with run.consistent_parameters() as version:
            assert version == steps.stop
            assert_equal(run, oracle, case)
        if states == "replicated":
            assert_equal(run, oracle, case)
    with run.consistent_parameters(), pytest.raises(AssertionError, match="differs"):  # coding changed something
        assert_equal(run, exact, "")
    run.close()


def assert_copies_equal(run: Any, versions: list[Any], states: str, case: str) -> None:
    """In the middle of a run, a device computes with the bits that the oracle has for the device's version."""
    placement = run._placement
    for stage in range(len(run.stages)) if states == "replicated" else placement.updated:
        own = placement.layouts[stage].views(placement.buffers[stage])
        assert all(map(torch.equal, own, versions[placement.version[stage]][stage])), f"{case}, stage {stage}"


@pytest.mark.parametrize(
    ("ranks", "local", "count", "states", "rules"),
    [
        (3, 1, 3, ("replicated", "sharded"), ("v1", "lag2")),
        (4, 2, 4, ("replicated", "sharded"), ("v2",)),
        (6, 2, 3, ("shared",), ("v2",)),
    ],
)
def test_workers_equal_the_oracle(ranks: int, local: int, count: int, states: Any, rules: Any) -> None:
    """Odd sizes, each worker on a node of its own; or two on each node."""
    run_ranks(job_trajectory, ranks, count, local, states, rules, local=local)


@pytest.mark.parametrize("codec", ["int8", "int4", "int2", "ternary", "bf16"])
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
    run = make(count, "replicated", Wire(weights="int8", gradients="int8"), "lag2")
    _sent[rank] = Counter()
    dist.barrier()
    Links._count = count_sent  # type: ignore[assignment, method-assign]
    train(run, range(batches), rank)
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


# -- snapshots and edits -----------------------------------------------------------------------------------------------


@on_ranks(3, local=1)
def test_a_resumed_run_goes_on_to_the_same_bits() -> None:
    for states, rule in (("replicated", "v2"), ("replicated", "v1"), ("replicated", "dp"), ("sharded", "lag2")):
        run = make(3, states, WIRES[states], rule)
        train(run, range(3), dist.get_rank())
        state = together(run.state_dict())
        resumed = make(3, states, WIRES[states], rule)
        resumed.load_state_dict(state)
        resumed.drain()  # without a batch
        assert_all_equal(resumed, state if rule == "dp" else None)
        resumed.load_state_dict(state)
        for which in (run, resumed):
            train(which, range(3, 6), dist.get_rank())
            which.drain()
        with run.consistent_parameters(), resumed.consistent_parameters():
            for own, other in zip(run.stages, resumed.stages, strict=True):
                assert all(map(torch.equal, own.parameters(), other.parameters())), f"{states}, {rule}"
        run.close()
        resumed.close()


def assert_all_equal(run: Any, state: dict[str, Any] | None) -> None:
    """All workers have the same parameters and, if given, the exact ones of a state."""
    if run.schedule.states == "sharded":
        return
    own = torch.cat([p.detach().flatten() for stage in run.stages for p in stage.parameters()])
    others = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(others, own)
    assert all(torch.equal(own, other) for other in others)
    for name, p in run.stages[0].named_parameters() if state else ():
        assert torch.equal(p, state[f"stages.0.parameters.{name}"])  # type: ignore[index]


@on_ranks(2, local=1)
def test_an_edit_of_copies_is_refused_but_after_a_drain() -> None:
    run = make(2, "replicated", RING, "v2")
    train(run, range(2), dist.get_rank())
    run.drain()
    with torch.no_grad(), run.consistent_parameters():
        run.stages[0].linear.weight.zero_()
    with torch.no_grad():
        run.stages[1].linear.weight.fill_(0.5)
    train(run, range(2, 4), dist.get_rank())
    run.drain()
    assert_all_equal(run, None)
    train(run, range(4, 6), dist.get_rank())
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
    scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(ValueError, match=r"feedback=True\) cannot feed errors back under a loss scale"):
        trainer(rule="v1", wire=SUMS, grad_scaler=scaler)
    with pytest.raises(ValueError, match="wire='6bit' is not known"):
        trainer(wire="6bit")
    with pytest.warns(UserWarning, match=r"wire= does nothing here: all workers are on one node.*LOCAL_WORLD_SIZE"):
        trainer(wire="8bit")
    layouts = [ByteLayout([torch.zeros(3, 3, dtype=torch.float64)])] * 2
    schedule = Schedule(Rule.named("v2", 2))
    with pytest.raises(ValueError, match=r"stage 0 has parameters of torch\.float64"):
        RingWire(RING, schedule, layouts, torch.device("cpu"), [0, 1])
