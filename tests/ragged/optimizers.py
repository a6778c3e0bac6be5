"""torch's database of optimizers, on sharded and whole models: `python -m tests.ragged.optimizers 3`.

It prints a JSON object: the number of configurations, and what went wrong. It has a process of its own, as the database
changes settings of torch.

Each optimizer has taken steps before the model is sharded, so that it has state, and takes more afterwards. It is
*right* if the weights are those of the whole model, *refused* if it names what to do instead, and *wrong* otherwise.
"""

from __future__ import annotations

import copy
import json
import sys
import warnings
from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
from torch import nn
from torch.testing._internal.common_optimizers import optim_db

from laconic.ragged.optimizer_state import move_state
from laconic.rehearse import ranks
from tests.support.sharded_net import Block, build, full_parameters, shard

_REFUSALS = ("shard the model first", "full_tensor", "laconic.optim", "RaggedTensor")
_STEPS = 2


def sweep(names: Sequence[str]) -> tuple[int, list[str]]:
    """Run configurations of the optimizers, of all without names, on the ranks that call this.

    Returns:
        The number of configurations, and what went wrong.
    """
    found, num = [], 0
    for info in optim_db:
        name = info.optim_cls.__name__
        if names and name not in names:
            continue
        ways = [each for each in info.supported_impls if each == "foreach" or "cpu" in info.supports_fused_on]
        for given, way, has_state in product(
            info.optim_inputs_func(device="cpu"), ["", *(each for each in ways if each != "differentiable")], (0, 1)
        ):
            num += 1
            options = {key: value for key, value in given.kwargs.items() if key != "differentiable"}
            problem = _compare(info.optim_cls, options | ({way: True} if way else {}), has_state=bool(has_state))
            words = f"{name} ({given.desc}) {way}, {'with' if has_state else 'without'} state"
            found += [f"{words}: {problem}"] if problem else []
    return num, found


def _compare(optimizer_class: Any, options: dict[str, Any], *, has_state: bool) -> str:
    """The difference between a sharded and a whole model; "" if there is none, or it is refused by name."""
    plain: Any = build(_net)
    ours = copy.deepcopy(plain)
    dims = (2,) if optimizer_class is torch.optim.Muon else (1, 2)
    wanted, optimizer = (
        optimizer_class([each for each in model.parameters() if each.dim() in dims], **copy.deepcopy(options))
        for model in (plain, ours)
    )
    try:
        for model, own in ((plain, wanted), (ours, optimizer)):
            _train(model, own, _STEPS if has_state else 0)
        _train(plain, wanted, _STEPS)
    except RuntimeError:  # it wants sparse gradients
        return ""
    try:
        before = list(ours.parameters())
        model = shard(ours, list(ours))
        after = list(model.parameters())
        replaced = dict(zip(before, after, strict=True))
        for group in optimizer.param_groups:
            group["params"][:] = [replaced[each] for each in group["params"]]  # LBFGS holds the list, too
        move_state(optimizer, replaced.items())
        _train(model, optimizer, _STEPS)
    except Exception as error:
        return "" if any(each in str(error) for each in _REFUSALS) else f"unclear: {type(error).__name__}: {error}"
    found = full_parameters(model)
    for key, value in plain.named_parameters():
        try:
            torch.testing.assert_close(found[key], value.detach(), rtol=1e-5, atol=1e-6)
        except AssertionError as error:
            return f"{key} differs: {str(error).splitlines()[2]}"
    return ""


def _net() -> nn.Module:
    return nn.Sequential(Block(5, 7), Block(5, 3))


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    rows = torch.randn(4, 5, generator=torch.Generator().manual_seed(1))
    for _ in range(steps):

        def closure() -> Any:
            optimizer.zero_grad()
            loss = model(rows).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    configurations, problems = ranks(sweep, sys.argv[2:], local=int(sys.argv[1]), timeout_s=900)[0]
    print(json.dumps({"configurations": configurations, "problems": problems}))
