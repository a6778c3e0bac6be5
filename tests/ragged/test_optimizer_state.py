"""State that comes whole, from a full state dict or a plain one, is cut and trains on as without sharding."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict as dsd
from torch.optim import AdamW, Optimizer

from laconic.checkpoint import load_checkpoint, save_checkpoint
from laconic.optim import AdamW8bit
from laconic.ragged.tensor import RaggedTensor
from tests.ragged.test_state_dict import Mixed, assert_ragged, set_gradients, sharded
from tests.support import sharded_net
from tests.support.launch import on_ranks

OPTIMIZERS: dict[str, Callable[[Iterable[Tensor]], Optimizer]] = {
    "foreach": lambda parameters: AdamW(parameters, lr=1e-2, foreach=True, amsgrad=True),
    "adamw8bit": lambda parameters: AdamW8bit(parameters, lr=1e-2),
}
WAYS: list[tuple[str, tuple[int, ...]]] = [("plain", ()), ("full", (7,)), ("set", (7,))]
"""How the state is loaded, and the steps that the optimizer has taken before."""
FULL = dsd.StateDictOptions(full_state_dict=True)
STATE = tuple[dict[str, Tensor], list[dict[str, Any]]]
"""Parameters by name, and the optimizer's state by parameter."""


def take_steps(model: Any, optimizer: Optimizer, *seeds: int) -> None:
    for seed in seeds:
        set_gradients(model, seed)
        optimizer.step()
    optimizer.zero_grad()


def whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, RaggedTensor) else copy.deepcopy(value)


def state_of(model: Any, optimizer: Optimizer) -> STATE:
    """Everything, gathered."""
    parameters = {name: whole(parameter.detach()) for name, parameter in model.named_parameters()}
    states = [{key: whole(value) for key, value in state.items()} for state in optimizer.state.values()]
    return parameters, states


def assert_equals(got: STATE, want: STATE) -> None:
    torch.testing.assert_close(got, want)  # bfloat16 differs by a bit, where torch's vectorised loops end


def load(how: str, model: Any, optimizer: Optimizer, plain: dict[str, Any], full: dict[str, Any]) -> None:
    if how == "plain":
        optimizer.load_state_dict(copy.deepcopy(plain))  # torch shares `step` with what it loads
    elif how == "full":
        dsd.set_optimizer_state_dict(model, optimizer, copy.deepcopy(full), options=FULL)
    else:  # code that sets the state itself
        for index, parameter in enumerate(optimizer.param_groups[0]["params"]):
            optimizer.state[parameter] = copy.deepcopy(plain["state"][index])


def job_loads(name: str, folder: Path) -> None:
    make = OPTIMIZERS[name]
    oracle = sharded_net.build(Mixed)
    oracle_optimizer = make(filter(lambda each: each.requires_grad, oracle.parameters()))
    take_steps(oracle, oracle_optimizer, 0, 1)
    middle = state_of(oracle, oracle_optimizer)
    plain = copy.deepcopy(oracle_optimizer.state_dict())
    full: Any = copy.deepcopy(dsd.get_optimizer_state_dict(oracle, oracle_optimizer, options=FULL))
    weights = copy.deepcopy(oracle.state_dict())
    take_steps(oracle, oracle_optimizer, 2, 3)
    after = state_of(oracle, oracle_optimizer)

    def fresh(*seeds: int) -> tuple[Any, Optimizer]:
        model = sharded(seed=5)
        optimizer = make(list(filter(lambda each: each.requires_grad, model.parameters())))
        take_steps(model, optimizer, *seeds)
        model.load_state_dict(weights)
        return model, optimizer

    is_own = isinstance(oracle_optimizer, AdamW8bit)
    for index, (how, seeds) in enumerate(WAYS if name == "foreach" else WAYS[:2]):
        model, optimizer = fresh(*seeds)
        load(how, model, optimizer, plain, full)
        assert_equals(state_of(model, optimizer), middle)
        if not seeds:  # a save cuts as well, so the other ways go without
            save_checkpoint(folder / f"{index}", 2, model=model, optimizer=optimizer, extra={})
            assert_equals(state_of(model, optimizer), middle)
        take_steps(model, optimizer, 2, 3)
        if not is_own:
            assert_ragged(model, optimizer)
        assert_equals(state_of(model, optimizer), after)
        save_checkpoint(folder / f"{index}", 4, model=model, optimizer=optimizer, extra={})
        other, other_optimizer = fresh(8)
        load_checkpoint(folder / f"{index}", model=other, optimizer=other_optimizer)
        assert_equals(state_of(other, other_optimizer), after)


@on_ranks(3, local=1)
def test_whole_state_trains_on_as_without_sharding(tmp_path: Path) -> None:
    for name in OPTIMIZERS:
        job_loads(name, tmp_path / name)
