"""`LaconicAccelerator` against `Accelerator` with DDP: a loop, its checkpoints, its weights; and its refusals."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from accelerate.test_utils.training import RegressionModel
from accelerate.utils import DistributedType
from safetensors.torch import load_file
from torch.utils.data import DataLoader

import laconic
from laconic.integrations import LaconicArguments
from laconic.integrations.accelerate import LaconicAccelerator
from laconic.integrations.options import ArgumentError
from laconic.integrations.sharding import find_units, shard_model
from tests.faults.accelerate_scripts import CHECKS, Check, run_checks
from tests.support.accelerate_jobs import Loop, train
from tests.support.language_model import loss_of, make_model, make_rows
from tests.support.launch import on_ranks
from tests.support.sharded_net import build, full_parameters


def assert_equal(got: dict[str, Any], want: dict[str, Any]) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def same_as_ddp(folder: Path) -> None:
    reference, loop = train("ddp", 5), Loop("laconic")
    torch.testing.assert_close(loop.run(5), reference, rtol=1e-5, atol=1e-5)
    assert len(reference["norms"]) == 5
    assert isinstance(loop.accelerator.unwrap_model(loop.model), laconic.ShardedModule)
    assert loop.accelerator.is_fsdp2


def no_sync(folder: Path) -> None:
    """Micro-batches but the last of a step send neither gradients nor, with a cache, weights over the network."""
    loop = Loop("laconic", LaconicArguments(cache="host"))
    loop.run(1)
    rows, accelerator = make_rows(3), loop.accelerator
    accelerator.backward(loss_of(loop.model, rows))  # fills the cache
    before = loop.model.traffic.snapshot()
    for _ in range(2):
        with accelerator.no_sync(loop.model):
            accelerator.backward(loss_of(loop.model, rows))
    sent = loop.model.traffic.snapshot() - before
    assert sent.wire(purpose="gradients") == sent.wire(purpose="weights") == 0
    accelerator.backward(loss_of(loop.model, rows))
    assert (loop.model.traffic.snapshot() - before).wire() > 0


def checkpoints(folder: Path) -> None:
    """A resumed run is equal to the bit; so is one from whole files."""
    for kind in ("SHARDED_STATE_DICT", "FULL_STATE_DICT"):
        loop = Loop("laconic", state_dict_type=kind)
        loop.run(3)
        loop.accelerator.save_state(str(folder / kind))
        after = loop.run(2)
        resumed = Loop("laconic", state_dict_type=kind)
        resumed.accelerator.load_state(str(folder / kind))
        assert_equal(resumed.run(2), {key: values[3:] for key, values in after.items()})
        assert_equal(full_parameters(resumed.model), full_parameters(loop.model))


def whole_weights(folder: Path) -> None:
    """`get_state_dict` and `save_model` give whole weights that the plain model takes."""
    loop = Loop("laconic")
    loop.run(2)
    rows = make_rows(4)
    with torch.no_grad():
        want = loop.model(rows)
    state = loop.accelerator.get_state_dict(loop.model)
    loop.accelerator.save_model(loop.model, str(folder))
    loop.accelerator.wait_for_everyone()
    plain = make_model(seed=1)
    if dist.get_rank() == 0:
        plain.load_state_dict(state)
        assert torch.equal(plain(rows), want)
    plain.load_state_dict(load_file(folder / "model.safetensors"), strict=False)  # it leaves the tied name out
    assert torch.equal(plain(rows), want)


def bf16(folder: Path) -> None:
    """Weights and wire are bfloat16, the optimizer's fp32; outputs are fp32, as with accelerate's DDP."""
    loop = Loop("laconic", mixed_precision="bf16")
    want = Loop("ddp", mixed_precision="bf16").run(3)
    torch.testing.assert_close(loop.run(3), want, rtol=0.05, atol=0.02)
    with torch.no_grad():
        assert loop.model(make_rows(2)).dtype is torch.float32
    assert {parameter.dtype for parameter in loop.model.parameters()} == {torch.float32}


def evaluation(folder: Path) -> None:
    """A loader that is prepared without a model, and `gather_for_metrics` over its last, uneven batch."""
    loop = Loop("laconic")
    loader = loop.accelerator.prepare(DataLoader(make_rows(11), batch_size=3))  # type: ignore[arg-type]
    loop.model.eval()
    with torch.no_grad():
        outputs = torch.cat([loop.accelerator.gather_for_metrics(loop.model(rows)) for rows in loader])
    assert outputs.shape[0] == 11
    torch.testing.assert_close(outputs, make_model()(make_rows(11)))


def other_states(folder: Path) -> None:
    """A state that is reset leaves nothing of the one before; a state that another Accelerator has chosen stays."""
    AcceleratorState._reset_state()
    again = LaconicAccelerator(mixed_precision="bf16")
    assert again.is_fsdp2
    assert again.mixed_precision == "bf16"
    AcceleratorState._reset_state(reset_partial_state=True)
    plain = Accelerator(cpu=True)
    with pytest.raises(ArgumentError, match=r"has chosen DistributedType\.MULTI_CPU before"):
        LaconicAccelerator()
    assert plain.distributed_type is DistributedType.MULTI_CPU
    assert PartialState().distributed_type is DistributedType.MULTI_CPU


def whole_models(folder: Path) -> None:
    """A model that is one unit comes without an optimizer, too."""
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = LaconicAccelerator(LaconicArguments(units=["RegressionModel"]))
    assert isinstance(accelerator.prepare(RegressionModel()), laconic.ShardedModule)
    assert accelerator._optimizers == []


def state_before_prepare(folder: Path) -> None:
    """An optimizer that has loaded its state before `prepare`, as DDP's scripts do, goes on with it."""
    found = {}
    for make in (lambda: Accelerator(cpu=True), LaconicAccelerator):
        AcceleratorState._reset_state(reset_partial_state=True)
        accelerator: Any = make()
        model = make_model()
        earlier, optimizer = (torch.optim.AdamW(model.parameters(), lr=1e-2) for _ in range(2))
        loss_of(model, make_rows(3)).backward()
        earlier.step()
        earlier.zero_grad()
        optimizer.load_state_dict(earlier.state_dict())
        model, prepared = accelerator.prepare(model, optimizer)
        for seed in (1, 2):
            accelerator.backward(loss_of(model, make_rows(3, seed=seed)))
            prepared.step()
            prepared.zero_grad()
        found[type(accelerator)] = full_parameters(accelerator.unwrap_model(model))
    torch.testing.assert_close(found[LaconicAccelerator], found[Accelerator])
    accelerator.save_state(str(folder))
    AcceleratorState._reset_state(reset_partial_state=True)
    model = make_model()
    loss_of(model, make_rows(3)).backward()
    factored = torch.optim.Adafactor(model.parameters())
    factored.step()
    with pytest.raises(ArgumentError, match=r"Adafactor has the state 'row_var' .*shard the model first"):
        LaconicAccelerator().prepare(model, factored)


CHECKS_OF_A_LOOP = (
    same_as_ddp, no_sync, checkpoints, whole_weights, bf16, evaluation, whole_models, state_before_prepare,
    other_states,
)  # fmt: skip


@pytest.mark.machine
@on_ranks(2, local=1)
def test_a_loop_its_checkpoints_and_its_weights(tmp_path: Path) -> None:
    for check in CHECKS_OF_A_LOOP:
        check(tmp_path / check.__name__)


def test_a_model_without_layers_is_one_unit_by_itself_or_by_its_name() -> None:
    message = "RegressionModel names no layers (_no_split_modules) and has no ModuleList, so it is one unit"
    with pytest.warns(UserWarning, match=re.escape(message)):
        assert find_units(RegressionModel()) == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert find_units(RegressionModel(), ["RegressionModel"]) == []


@on_ranks(2)
def test_layers_that_the_user_has_cut_stay() -> None:
    model: Any = build()
    laconic.fully_shard(model.blocks[0])
    shard_model(model, LaconicArguments(units=["Linear"]))
    sharded = {name for name, each in model.named_modules() if isinstance(each, laconic.ShardedModule)}
    assert sharded == {"", "blocks.0", "inp", "out", *(f"blocks.{i}.{name}" for i in (1, 2) for name in ("up", "down"))}


def test_settings_that_do_not_go_with_laconic(monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any]
    for settings, variable, message in (
        ({"fsdp_plugin": object()}, "NO_VARIABLE", "fsdp_plugin asks for another way to shard"),
        ({"arguments": LaconicArguments(local_steps=5)}, "NO_VARIABLE", "local_steps=5"),
        ({"arguments": LaconicArguments(audit_every=5)}, "NO_VARIABLE", "call laconic.audit"),
        ({"arguments": {"cache": "host"}}, "NO_VARIABLE", "takes LaconicArguments first, got dict"),
        ({}, "FSDP_OFFLOAD_PARAMS", "FSDP_OFFLOAD_PARAMS is set"),
        ({"arguments": LaconicArguments(broadcast=False)}, "FSDP_CPU_RAM_EFFICIENT_LOADING", "needs broadcast=True"),
    ):
        monkeypatch.setenv(variable, "true")
        with pytest.raises(ArgumentError, match=message):
            LaconicAccelerator(**settings)
        monkeypatch.delenv(variable)


@pytest.mark.machine
@pytest.mark.parametrize("trains", [False, True])
@on_ranks(2)
def test_accelerates_own_scripts(trains: bool, tmp_path: Path) -> None:
    """Unchanged but for the import; training gives the weights of one process, to 1e-6, in fp32, bf16 and fp16."""
    training = {check for check in CHECKS if check.function == "training_check"} | {Check("test_script", "main")}
    checks = [check for check in CHECKS if (check in training) == trains]
    errors = run_checks(checks, "laconic-whole" if trains else "laconic", tmp_path)
    assert not [error for error in errors.values() if error]
