"""Loss scaling: an overflow skips an update and lowers the scale, on every device alike."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from laconic.cyclic.runtime import CyclicDataParallel
from laconic.cyclic.schedule import Rule, StatePlacement
from laconic.shard.policies import Wire
from tests.cyclic.test_snapshot import together
from tests.cyclic.toys import OPTIMIZERS, assert_equal, make_batch, make_stages, train, train_oracle
from tests.reference.cyclic import Oracle
from tests.support.launch import on_ranks

torch.set_num_threads(1)
END = 7


def scaler() -> torch.amp.GradScaler:
    """A scaler that begins too high, so that some batches overflow, and then grows again."""
    return torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_factor=4.0, growth_interval=2)


class Narrow(torch.autograd.Function):
    """The identity; its gradient passes through fp16."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return (grad * 20).half().float() / 20


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(Narrow.apply(output), target)


def make(
    rule: str, mesh: DeviceMesh | None, states: StatePlacement, max_grad_norm: float | None, wire: Wire
) -> CyclicDataParallel:
    return CyclicDataParallel(
        make_stages(3),
        loss_fn,
        OPTIMIZERS["sgd"],
        mesh,
        rule=rule,
        states=states,
        grad_scaler=scaler(),
        max_grad_norm=max_grad_norm,
        wire=wire,
    )


def assert_scales(mesh: DeviceMesh | None, states: StatePlacement, wire: Wire | None = None) -> None:
    """With a wire, each rank is a node."""
    wire, nodes = wire or Wire(), range(dist.get_world_size()) if mesh is not None else ()
    worker = dist.get_rank() if mesh is not None and states != "shared" else None
    cases = ("dp", 0.1), ("v1", None), ("clip", 0.1)
    for rule, max_grad_norm in cases[1:] if states == "shared" else cases:
        oracle = Oracle(
            make_stages(3),
            loss_fn,
            OPTIMIZERS["sgd"],
            Rule.named(rule, 3),
            max_grad_norm,
            grad_scaler=scaler(),
            wire=wire,
            nodes=nodes,
        )
        run, saved, scales = make(rule, mesh, states, max_grad_norm, wire), {}, []
        for step in range(END):
            if step in (1, 4):
                state = together(run.state_dict())
                saved[step] = {k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()}
            train(run, range(step, step + 1), worker)
            train_oracle(oracle, range(step, step + 1))
            assert run.loss_scale == oracle.scale
            scales.append(oracle.scale)
        assert min(scales) < 2.0**14  # something overflowed
        assert any(after > before for before, after in pairwise(scales))
        run.drain()
        oracle.restart()
        resumed = make(rule, mesh, states, max_grad_norm, wire)
        for step, state in saved.items():
            resumed.load_state_dict(state)
            train(resumed, range(step, END), worker)
            resumed.drain()
            for which in (run, resumed):
                assert which.loss_scale == oracle.scale
                with which.consistent_parameters():
                    assert_equal(which, oracle, f"{states}, {rule}, {max_grad_norm}, from {step}")
        run.close()
        resumed.close()


def test_single_device() -> None:
    assert_scales(None, "single")


@pytest.mark.parametrize(
    ("states", "ranks"), [("replicated", 3), ("sharded", 3), pytest.param("shared", 6, marks=pytest.mark.heavy)]
)
@on_ranks("ranks")
def test_devices_agree(states: StatePlacement) -> None:
    assert_scales(init_device_mesh("cpu", (dist.get_world_size(),)), states)


@on_ranks(3, local=1)
def test_devices_agree_on_what_crosses_in_few_bits() -> None:
    """A skipped update still brings a version, with what the codec has lost of earlier ones."""
    wire = Wire(weights="int8", gradients="int8", exact_every=3)
    assert_scales(init_device_mesh("cpu", (dist.get_world_size(),)), "replicated", wire)


def test_rules_without_a_global_norm_are_refused() -> None:
    for rule in ("v2", "lag2"):
        with pytest.raises(ValueError, match=r"loss scaling need .* rules that can: dp, v1, clip\."):
            CyclicDataParallel(make_stages(4), loss_fn, OPTIMIZERS["sgd"], rule=rule, grad_scaler=scaler())


def test_a_scaler_that_is_off_changes_nothing() -> None:
    off = torch.amp.GradScaler("cpu", enabled=False)
    run = CyclicDataParallel(make_stages(3), loss_fn, OPTIMIZERS["sgd"], rule="v2", grad_scaler=off)
    plain = CyclicDataParallel(make_stages(3), loss_fn, OPTIMIZERS["sgd"], rule="v2")
    for which in (run, plain):
        which.step(make_batch(3, 0))
        which.drain()
    assert run.loss_scale == 1.0
    own, others = ([p for stage in which.stages for p in stage.parameters()] for which in (run, plain))
    assert all(torch.equal(a, b) for a, b in zip(own, others, strict=True))
