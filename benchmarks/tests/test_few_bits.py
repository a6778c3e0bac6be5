"""benchmarks.few_bits: its models against those of batched.py, its sums against the engine's, and its bits."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.few_bits.candidates import CONTINUED, MORE
from benchmarks.few_bits.codes import Product, Signs, Uniform
from benchmarks.few_bits.crossing import Coding, Crossing
from benchmarks.few_bits.model import Nodes, Slot, losses
from benchmarks.local_steps import batched
from benchmarks.local_steps.islands import Shape
from laconic.codec import CODECS
from laconic.codec.payload import Payload, Piece
from laconic.codec.sums import CodedSum

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


class _Way:
    """The way of one of three ranks in one thread: what all have sent arrives when somebody waits."""

    size = 3

    def __init__(self, sent: dict[int, Tensor], rank: int) -> None:
        self.sent, self.rank = sent, rank

    def start_all_to_all(self, landings: Tensor, messages: Tensor) -> Any:
        self.sent[self.rank] = messages
        return SimpleNamespace(
            wait=lambda: [landings[sender].copy_(each[self.rank]) for sender, each in self.sent.items()]
        )


@pytest.mark.parametrize(("codec", "way"), [("int4", "plain"), ("int2", "feedback")])
def test_sums_are_those_of_the_engine(codec: str, way: Any) -> None:
    part = NUMEL // 3
    crossing = Crossing(Coding(name="a", make=lambda *_: Product(CODECS[codec]), way=way), SLOTS, seeds=2, nodes=3)
    piece = Piece(slice(0, part), slice(0, CODECS[codec].payload_bytes(part)), CODECS[codec], is_rotated=True)
    payload, options = Payload([[piece]] * 3, [part] * 3), {"keeps_own": True, "feedback": way == "feedback"}
    wires: list[dict[int, Tensor]] = [{}, {}]
    engines: list[list[Any]] = [
        [CodedSum(_Way(wire, rank), payload, lambda _: None, **options) for rank in range(3)]  # type: ignore[arg-type]
        for wire in wires
    ]
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        gradients = torch.randn(2, 3, NUMEL, generator=generator)
        total = crossing.sum(gradients.clone(), probes=True)
        for seed, of_seed in enumerate(engines):
            transfers = [each.start_reduce_scatter(gradients[seed, rank]) for rank, each in enumerate(of_seed)]
            whole = torch.cat([transfer.finish() for transfer in transfers])
            torch.testing.assert_close(total[seed], whole, rtol=1e-5, atol=1e-6)
    assert all(0 < fact["error_of_sum"] < fact["error_of_term"] * 1.5 < 0.9 for fact in crossing.facts)


@pytest.mark.parametrize("name", ["int2 rotated, feedback in int4", "int2 rotated, EF21", "int4 rotated stochastic"])
def test_repeated_gradients_arrive_on_average_if_errors_return_or_are_random(name: str) -> None:
    (coding,) = (each for each in (*CONTINUED, *MORE) if each.name == name)
    torch.manual_seed(0)
    gradients = torch.randn(1, 3, NUMEL)
    crossing, exact = Crossing(coding, SLOTS, seeds=1, nodes=3), gradients.sum(1)
    sums = torch.stack([crossing.sum(gradients.clone()) for _ in range(32)])
    assert (sums.mean(0) - exact).norm() < 0.3 * (sums[0] - exact).norm()


def test_codes_are_right_on_average_or_near() -> None:
    values = torch.randn(4, 4096, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)

    def error(arrived: Tensor) -> float:
        return float(torch.linalg.vector_norm(arrived - values) / torch.linalg.vector_norm(values))

    assert error(Uniform(0.5).cross(values)) == pytest.approx(0.5 / 12**0.5, rel=0.02)
    assert error(Uniform(2.0).cross(values)) == pytest.approx(0.51, abs=0.02), "of a normal distribution, by integrals"
    assert error(Signs().cross(values)) == pytest.approx((1 - 2 / math.pi) ** 0.5, rel=0.02)
    dithered, stochastic = (Uniform(1.0, rotates=False, rounding=each) for each in ("dithered", "stochastic"))
    assert error(dithered.cross(values)) == pytest.approx(1 / 12**0.5, rel=0.05)
    mean = torch.stack([stochastic.cross(values) for _ in range(200)]).mean(0)
    assert error(mean) < 0.05
