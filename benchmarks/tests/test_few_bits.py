"""benchmarks.few_bits: its models against those of batched.py, its sums against the engine's, and its bits."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.few_bits import study
from benchmarks.few_bits.__main__ import Bench, least_bits, table
from benchmarks.few_bits.candidates import CONTINUED, EXACT, FLOOR, MORE, plan
from benchmarks.few_bits.codes import Columns, Flipped, Product, Signs, Uniform, bits_of
from benchmarks.few_bits.crossing import Coding, Crossing, Lost
from benchmarks.few_bits.model import Nodes, Slot, losses
from benchmarks.local_steps import batched
from benchmarks.local_steps.islands import Shape
from laconic.codec import CODECS
from laconic.codec.payload import Payload, Piece
from laconic.codec.sums import CodedSum

pytestmark = pytest.mark.machine

SHAPE = Shape(hidden=32, intermediate=64, layers=2, heads=2)
NUMEL = 3 * 1024
SLOTS = [
    Slot(name="model.embed_tokens.weight", shape=(8, 128), begin=0, end=1024),
    Slot(name="model.layers.0.mlp.up_proj.weight", shape=(4, 256), begin=1024, end=2048),
    Slot(name="lm_head.weight", shape=(8, 128), begin=2048, end=3072),
]


def rows_of(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(1))


def test_each_node_has_the_gradient_of_its_own_rows() -> None:
    nodes = Nodes(SHAPE, seeds=2, nodes=3, length=16, device=torch.device("cpu"))
    rows = rows_of(2, 3, 2, 17)
    nodes.differentiate(rows)
    seed, node = 1, 2
    values = {
        slot.name: flat[seed, slot.begin : slot.end].view(1, *slot.shape).clone().requires_grad_()
        for flat, slots in ((nodes.matrices, nodes.matrix_slots), (nodes.vectors, nodes.vector_slots))
        for slot in slots
    }
    loss = batched.losses(values, SHAPE, rows[seed, node][None])
    torch.testing.assert_close(losses(values, SHAPE, rows[seed, node][None]), loss)
    loss.sum().backward()
    for flat, slots in (
        (nodes.gradients, nodes.matrix_slots),
        (nodes.vector_gradients, nodes.vector_slots),
    ):
        for slot in slots:
            own = flat[seed, node, slot.begin : slot.end].view(slot.shape)
            torch.testing.assert_close(own, values[slot.name].grad[0], rtol=1e-4, atol=1e-7, msg=slot.name)


class _Wire:
    """The ways of all ranks in one thread: what they have sent arrives when somebody waits."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.sent: dict[int, Tensor] = {}


@dataclasses.dataclass
class _Way:
    wire: _Wire
    rank: int

    @property
    def size(self) -> int:
        return self.wire.size

    def start_all_to_all(self, landings: Tensor, messages: Tensor, /) -> Any:
        self.wire.sent[self.rank] = messages
        return _Pending(self.wire, self.rank, landings)

    def all_gather(self, whole: Tensor, piece: Tensor, purpose: Any, /) -> Any:
        raise AssertionError("only the first trip")


@dataclasses.dataclass
class _Pending:
    wire: _Wire
    rank: int
    landings: Tensor

    def wait(self) -> None:
        for sender, messages in self.wire.sent.items():
            self.landings[sender] = messages[self.rank]


@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize("codec", ["int4", "int2"])
def test_sums_are_those_of_the_engine(codec: str, feedback: bool) -> None:
    nodes, part = 3, NUMEL // 3
    way = "feedback" if feedback else "plain"
    coding = Coding(name="a", make=lambda slots, count: Product(CODECS[codec]), way=way)  # type: ignore[arg-type]
    crossing = Crossing(coding, SLOTS, seeds=2, nodes=nodes)
    piece = Piece(slice(0, part), slice(0, CODECS[codec].payload_bytes(part)), CODECS[codec], is_rotated=True)
    wires = [_Wire(nodes) for _ in range(2)]
    engines = [
        [
            CodedSum(
                _Way(wire, rank), Payload([[piece]] * nodes, [part] * nodes), lambda _: None,
                keeps_own=True, feedback=feedback,
            )
            for rank in range(nodes)
        ]
        for wire in wires
    ]  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        gradients = torch.randn(2, nodes, NUMEL, generator=generator)
        total = crossing.sum(gradients.clone(), probes=True)
        for seed, of_seed in enumerate(engines):
            transfers = [each.start_reduce_scatter(gradients[seed, rank]) for rank, each in enumerate(of_seed)]
            whole = torch.cat([transfer.finish() for transfer in transfers])
            torch.testing.assert_close(total[seed], whole, rtol=1e-5, atol=1e-6)
    assert all(0 < fact["error_of_sum"] < fact["error_of_term"] * 1.5 < 0.9 for fact in crossing.facts)


def test_exact_sums_are_exact_in_both_orders() -> None:
    gradients = torch.randn(2, 3, NUMEL)
    for coding in (EXACT, FLOOR):
        crossing = Crossing(coding, SLOTS, seeds=2, nodes=3)
        torch.testing.assert_close(crossing.sum(gradients), gradients.sum(1))


def test_a_part_must_have_whole_blocks() -> None:
    with pytest.raises(ValueError, match="no whole blocks of 4096"):
        Crossing(Coding(name="a", make=lambda slots, nodes: Product(CODECS["top64"])), SLOTS, seeds=1, nodes=3)


@pytest.mark.parametrize("coding", [*CONTINUED, *MORE], ids=lambda coding: coding.name)
def test_repeated_gradients_arrive_on_average_if_errors_are_fed_back(coding: Coding) -> None:
    """The error returns with the next gradient.

    A code without feedback errs on average as at once, unless its errors are random.
    """
    slots = [dataclasses.replace(slot, begin=4 * slot.begin, end=4 * slot.end) for slot in SLOTS]
    slots = [dataclasses.replace(slot, shape=(slot.shape[0] * 4, slot.shape[1])) for slot in slots]
    gradients = torch.randn(1, 3, 4 * NUMEL, generator=torch.Generator().manual_seed(0))
    crossing = Crossing(coding, slots, seeds=1, nodes=3)
    torch.manual_seed(0)
    count = 64
    sums = [crossing.sum(gradients.clone()) for _ in range(count)]
    exact = gradients.sum(1)
    mean_error, error = (
        float(torch.linalg.vector_norm(each - exact) / torch.linalg.vector_norm(exact))
        for each in (torch.stack(sums).mean(0), sums[0])
    )
    is_random = "dither" in coding.name or "stochastic" in coding.name
    if is_random or coding.way == "ef21" or (coding.way == "feedback" and coding.returned == 1):
        is_slow = coding.name.startswith(("top64", "int2,"))  # large values are clipped, or only a few cross at once
        assert mean_error < (0.9 if is_slow else 0.3) * error
    elif coding.way in ("plain", "feedback"):
        assert mean_error <= error * 1.001 + 1e-6


def test_codes_are_right_on_average_or_near() -> None:
    values = torch.randn(4, 4096, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)

    def error(arrived: Tensor) -> float:
        return float(torch.linalg.vector_norm(arrived - values) / torch.linalg.vector_norm(values))

    assert error(Uniform(0.5).cross(values)) == pytest.approx(0.5 / 12**0.5, rel=0.02)
    assert error(Uniform(2.0).cross(values)) == pytest.approx(0.51, abs=0.02), "of a normal distribution, by integrals"
    assert error(Signs().cross(values)) == pytest.approx((1 - 2 / math.pi) ** 0.5, rel=0.02)
    dithered, stochastic = (Uniform(1.0, rotates=False, rounding=each) for each in ("dithered", "stochastic"))  # type: ignore[arg-type]
    assert error(dithered.cross(values)) == pytest.approx(1 / 12**0.5, rel=0.05)
    mean = torch.stack([stochastic.cross(values) for _ in range(200)]).mean(0)
    assert error(mean) < 0.05
    for tiny in (0.0, 1e-40, 1e-25, 1e-17):
        uneven = torch.cat([values[:2], values[2:] * tiny])
        arrived = Uniform(1.5).cross(uneven)
        torch.testing.assert_close(arrived[:2], Uniform(1.5).cross(values[:2]), rtol=0.05, atol=0.05)
        assert arrived[2:].abs().amax() <= 8 * tiny
    peaks = Uniform(0.0, limit=7, rounding="stochastic")
    assert error(torch.stack([peaks.cross(values) for _ in range(200)]).mean(0)) < 0.03
    assert peaks.nominal_bits == 4.125


def test_random_signs_change_by_step_and_columns_have_sizes() -> None:
    values = torch.randn(2, NUMEL, generator=torch.Generator().manual_seed(0))
    flipped = Flipped(Product(CODECS["int2"]))
    first = flipped.cross(values)
    torch.testing.assert_close(flipped.cross(values), first)
    flipped.next_step()
    assert not torch.equal(flipped.cross(values), first)

    sizes = torch.cat([torch.logspace(-3, 0, slot.shape[1]).repeat(slot.shape[0]) for slot in SLOTS])
    uneven = values * sizes
    by_column = Columns(Product(CODECS["int2"]), SLOTS, nodes=2)
    errors = [((code.cross(uneven) - uneven) / sizes).norm() / values.norm() for code in (by_column, by_column.inner)]
    assert errors[0] < 0.5 < errors[1]


def numbered(counts: Sequence[int]) -> Uniform:
    """A code whose codes are 0, 1, -1 and so on, as often as `counts` says, in blocks of one kind each."""

    class Numbered(Uniform):
        def numbers(self, values: Tensor) -> tuple[Tensor, Tensor]:
            codes = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts) * 8).view(-1, 8)
            return codes, torch.tensor([0.0, 1.0, -1.0, 2.0])[: len(counts)]

    return Numbered(1.0, block=8)


def test_bits_of_codes() -> None:
    bits = bits_of(numbered([2, 1, 1]), torch.zeros(1, 32))
    assert bits["entropy"] == pytest.approx(1.5 + 2)
    # by block, only the choice between +1 and -1 is open; and the kind of a block costs one bit of eight values
    assert bits["entropy_by_block"] == pytest.approx(0.5 + 1 / 8 + 2)
    # of a block of zeros each takes one bit; of one with +1 and -1 two, or two and three
    assert bits["rice"] == pytest.approx(0.5 * 1 + 0.5 * 2.5 + 1 / 8 + 2)


@pytest.mark.parametrize("name", ["int8", "int4", "int3", "int2", "ternary", "e2m1"])
@pytest.mark.parametrize("rotates", [False, True])
def test_numbers_are_those_that_arrive(name: str, rotates: bool) -> None:
    code = Product(CODECS[name], rotates=rotates)
    values = torch.randn(1, 1024, generator=torch.Generator().manual_seed(0))
    codes, levels = code.numbers(values) or (torch.empty(0), torch.empty(0))
    from laconic.codec.rotation import rotate

    arrived = code.cross(values).view(-1)
    seen = (rotate(arrived) if rotates else arrived).view(codes.shape)
    numbers = levels[codes]
    steps = (seen * numbers).sum(1) / numbers.square().sum(1)
    torch.testing.assert_close(numbers * steps[:, None], seen, rtol=1e-4, atol=1e-5)


def test_what_was_lost_is_kept_in_few_bits() -> None:
    values = torch.randn(2, NUMEL, generator=torch.Generator().manual_seed(0))
    kept = Lost("int4")
    assert torch.equal(kept.add_to(values), values)
    kept.keep(values)
    torch.testing.assert_close(
        kept.add_to(torch.zeros_like(values)), Product(CODECS["int4"], rotates=False).cross(values)
    )
    of = {name: Coding(name="", way="feedback", kept=name).memory_bytes(4) for name in ("fp32", "bf16", "int4")}
    assert of == {"fp32": 3.0, "bf16": 1.5, "int4": pytest.approx(0.387, abs=1e-3)}


def test_a_study_goes_on_after_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(slots: Sequence[Slot], nodes: int) -> Any:
        raise RuntimeError("no such kernel")

    def some() -> list[tuple[Coding, Any]]:
        chosen: list[tuple[Coding, Any]] = [(FLOOR, "continued"), (CONTINUED[1], "continued")]
        return [*chosen[:1], (Coding(name="bad", make=fail), "continued"), *chosen[1:], (FLOOR, "scratch")]

    monkeypatch.setattr(study, "plan", some)
    setting = dataclasses.replace(study.QUICK, steps=4, fork=2)
    found = study.study(tmp_path, setting)
    keys = ["continued: exact, summed in another order", "continued: int4 rotated"]
    assert list(found["runs"]) == [*keys, "scratch: exact, summed in another order"]
    assert list(found["failed"]) == ["continued: bad"]
    assert found["runs"][keys[0]]["excess"] == pytest.approx(0, abs=1e-5), "continued runs begin with the exact half"
    assert found["runs"][keys[1]]["excess"] != 0

    again = study.study(tmp_path, setting)
    assert len(again["exact"]) == 2, "the exact run is made anew, since another run was missing"
    assert again["exact"][0] == again["exact"][1]
    assert again["runs"] == found["runs"]

    monkeypatch.setattr(study, "plan", lambda: [each for each in some() if each[0].name != "bad"])
    assert len(study.study(tmp_path, setting)["exact"]) == 2
    with pytest.raises(ValueError, match="another setting"):
        study.study(tmp_path, dataclasses.replace(setting, lr=1.0))


def run(excess: float, **rest: float) -> dict[str, Any]:
    losses = [2.0 * (1 + excess), 4.0 * (1 + excess)]
    return {"losses": losses, "exact": [2.0, 4.0], "excess": excess, "error": 0.0, "memory_bytes": 0.0, **rest}


def test_the_least_bits_are_those_of_a_coding_within_the_limit() -> None:
    runs = {"a": run(0.0, nominal_bits=4.1, rice=3.6), "b": run(0.002, nominal_bits=2.1), "c": run(0.002, rice=1.7)}
    assert least_bits(runs, 0.001, coded=False) == (4.1, "a")
    assert least_bits(runs, 0.001, coded=True) == (3.6, "a")
    assert least_bits(runs, 0.003, coded=False) == (2.1, "b")
    assert least_bits(runs, 0.003, coded=True) == (1.7, "c")
    assert least_bits({"b": runs["b"] | {"error": 0.002}}, 0.003, coded=True) == (math.inf, "none")


def test_the_reference_is_the_mean_of_two_exact_runs() -> None:
    floor = run(0.002, nominal_bits=32.0)
    bench = Bench(
        {"runs": {f"continued: {FLOOR.name}": floor, "continued: int4 rotated": run(0.001, nominal_bits=4.1)}}
    )
    assert bench.runs("continued")["int4 rotated"]["excess"] == pytest.approx(0, abs=1e-6)
    assert bench.runs("continued")[FLOOR.name]["excess"] == pytest.approx(0.002)
    assert "+0.00%" in table(bench)


def test_no_run_is_planned_twice() -> None:
    keys = [(coding.name, protocol) for coding, protocol in plan()]
    assert len(set(keys)) == len(keys) > 40
