"""The public methods and hooks of FSDP2, DDP and torch, each called on a sharded model.

`python -m tests.docs.methods` calls each, and writes the table in docs/from-fsdp2.md. A method *works* if the call has
its effect. Otherwise the call must raise.
"""

from __future__ import annotations

import inspect
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.ragged.tensor import RaggedTensor
from laconic.rehearse import ranks
from laconic.shard.states import GatherState

PAGE = Path(__file__).parents[2] / "docs" / "from-fsdp2.md"
BEGIN, _END = "<!-- from a run of each: python -m tests.docs.methods -->\n", "<!-- end -->\n"
WORKS, NO_EFFECT = "works", "NO EFFECT"
_NUM_RANKS = 4
_TOKENS = torch.arange(8)


class Net(nn.Module):
    """An embedding, whose backward needs no weight, a layer, and a layer that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.unused = nn.Embedding(8, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(tokens))


def sharded() -> Any:
    """The model over two islands of two ranks: the embedding is a unit, and the root has the rest."""
    torch.manual_seed(0)
    model, mesh = Net(), laconic.init_mesh("cpu", islands=2, nodes=2, local=1)
    laconic.fully_shard(model.first, mesh=mesh, cache="none")
    return laconic.fully_shard(model, mesh=mesh, cache="none")


def backward(model: Any) -> float:
    """Take a backward, and return the norm of the last layer's gradient."""
    model(_TOKENS).square().sum().backward()
    return float(model.last.weight.grad.norm())


def weights_sent(model: Any) -> int:
    """The bytes of weights that a forward and a backward send."""
    before = model.traffic.snapshot()
    backward(model)
    return (model.traffic.snapshot() - before).total("node", "weights", "sent")


def is_gathered(module: Any) -> bool:
    return not isinstance(next(module.parameters()), RaggedTensor)


def _waits(model: Any) -> bool:
    return backward(model) == 0.0


def _with(call: Callable[[Any], Any], effect: Callable[[Any], bool]) -> Callable[[Any], bool]:
    def run(model: Any) -> bool:
        call(model)
        return effect(model)

    return run


def _changes_gradient(call: Callable[[Any], Any], factor: float) -> Callable[[Any], bool]:
    def run(model: Any) -> bool:
        before = backward(model)
        model.zero_grad()
        call(model)
        return abs(backward(model) - factor * before) <= 1e-5 * before

    return run


def _sends_less(call: Callable[[Any], Any]) -> Callable[[Any], bool]:
    def run(model: Any) -> bool:
        backward(model)
        before = weights_sent(model)
        call(model)
        return weights_sent(model) < before

    return run


def _is_called(register: Callable[[Any, Callable[..., None]], Any], use: Callable[[Any], Any]) -> Callable[[Any], bool]:
    def run(model: Any) -> bool:
        called: list[object] = []
        register(model, lambda *given, **_: called.append(given))
        use(model)
        return bool(called)

    return run


def _event(model: Any) -> bool:
    waited: list[bool] = []
    backward(model)
    model.set_post_optim_event(SimpleNamespace(wait=lambda: waited.append(True)))
    backward(model)
    return waited == [True]


def _in_no_sync(model: Any) -> bool:
    with model.no_sync():
        return _waits(model)


def _begins_ahead(setter: str, watch: Callable[[Any, Callable[..., None]], Any]) -> Callable[[Any], bool]:
    def run(model: Any) -> bool:
        backward(model)  # the order is known
        seen: list[GatherState] = []
        watch(model, lambda *_: seen.append(model.first._laconic_unit.gather.state))
        for ahead in ([], [model.first]):
            getattr(model, setter)(ahead)
            backward(model)
        return seen[0] is GatherState.IDLE and seen[1] is not GatherState.IDLE

    return run


def _optimizer(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def _of_optimizer(name: str) -> Callable[[Any], bool]:
    def run(model: Any) -> bool:
        optimizer, called = _optimizer(model), list[object]()
        getattr(optimizer, name)(lambda *given: called.append(given))
        backward(model)
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        return bool(called)

    return run


def _of(model: Any) -> Any:
    return model.first.weight


def _copied(model: Any) -> DTensor:
    mesh = _of(model).device_mesh
    copied: DTensor = _of(model).redistribute(mesh, [Replicate()] * mesh.ndim)
    return copied


def _cut_like(model: Any, whole: torch.Tensor) -> DTensor:
    return distribute_tensor(whole, _of(model).device_mesh, _of(model).placements)


def _first_index(model: Any) -> MetadataIndex:
    return MetadataIndex("weight", _of(model).__create_chunk_list__()[0].offsets)


def _all(model: Any) -> None:
    backward(model)
    model.load_state_dict(model.state_dict())


_FSDP: dict[str, Callable[[Any], bool]] = {
    "unshard": _with(lambda m: m.first.unshard(), lambda m: is_gathered(m.first)),
    "reshard": _with(lambda m: (m.first.unshard(), m.first.reshard()), lambda m: not is_gathered(m.first)),
    "set_requires_gradient_sync": _with(lambda m: m.set_requires_gradient_sync(False), _waits),
    "set_requires_all_reduce": _with(lambda m: m.set_requires_all_reduce(False), _waits),
    "set_reshard_after_forward": _with(
        lambda m: m.set_reshard_after_forward(False), lambda m: m(_TOKENS) is not None and is_gathered(m.first)
    ),
    "set_reshard_after_backward": _with(
        lambda m: m.first.set_reshard_after_backward(False), lambda m: backward(m) > 0 and is_gathered(m.first)
    ),
    "set_unshard_in_backward": _sends_less(lambda m: m.first.set_unshard_in_backward(False)),
    "set_modules_to_forward_prefetch": _begins_ahead(
        "set_modules_to_forward_prefetch", lambda m, note: m.register_forward_pre_hook(note)
    ),
    "set_modules_to_backward_prefetch": _begins_ahead(
        "set_modules_to_backward_prefetch", lambda m, note: m.last.register_full_backward_pre_hook(note)
    ),
    "set_gradient_divide_factor": _changes_gradient(lambda m: m.set_gradient_divide_factor(1.0), _NUM_RANKS),
    "set_reduce_scatter_divide_factor": _changes_gradient(
        lambda m: m.set_reduce_scatter_divide_factor(1.0), _NUM_RANKS
    ),
    "set_force_sum_reduction_for_comms": _changes_gradient(lambda m: m.set_force_sum_reduction_for_comms(True), 1),
    "set_all_reduce_hook": _changes_gradient(lambda m: m.set_all_reduce_hook(lambda shard: shard.mul_(3)), 3),
    "set_is_last_backward": _changes_gradient(
        lambda m: (m.set_is_last_backward(False), backward(m), m.set_is_last_backward(True)), 2
    ),
    "set_post_optim_event": _event,
    "reset_iter_state": _changes_gradient(lambda m: (m(_TOKENS), m.reset_iter_state()), 1),
    "set_reduce_scatter_max_input_buffers": _changes_gradient(lambda m: m.set_reduce_scatter_max_input_buffers(2), 1),
    "set_reduce_scatter_unused_params": _with(
        lambda m: m.set_reduce_scatter_unused_params(True),
        lambda m: backward(m) > 0 and m.unused.weight.grad is not None,
    ),
    "set_separate_reduce_scatter_group": _changes_gradient(lambda m: m.set_separate_reduce_scatter_group(True), 1),
    **{
        name: lambda m, name=name: getattr(m, name)(None)
        for name in (
            "set_allocate_memory_from_process_group_for_comm", "set_custom_all_gather", "set_custom_reduce_scatter",
            "set_symm_mem_for_comm",
        )
    },
}  # fmt: skip
_DDP: dict[str, Callable[[Any], bool]] = {
    "no_sync": _in_no_sync,
    **{
        name: lambda m, name=name: getattr(m, name)
        for name in ("join", "join_hook", "register_comm_hook", "will_sync_module_buffers")
    },
}
_OF_DDP_ITSELF = {"forward", "gather", "scatter", "to_kwargs", "train"}
"""What DDP defines for its own work, or as every module does."""
_MODULE: dict[str, Callable[[Any], bool]] = {
    name: _is_called(lambda m, hook, name=name: getattr(m.first, name)(hook), _all)
    for name in dir(nn.Module)
    if name.startswith("register_") and name.endswith("_hook") and name != "register_backward_hook"  # torch's old one
}
_PARAMETER: dict[str, Callable[[Any], bool]] = {
    "register_hook": _is_called(lambda m, hook: m.last.weight.register_hook(hook), backward),
    "register_post_accumulate_grad_hook": _is_called(
        lambda m, hook: m.last.weight.register_post_accumulate_grad_hook(hook), backward
    ),
    "requires_grad_": _with(
        lambda m: m.first.weight.requires_grad_(False), lambda m: backward(m) > 0 and m.first.weight.grad is None
    ),
}
_OPTIMIZER: dict[str, Callable[[Any], bool]] = {
    name: _of_optimizer(name)
    for name in dir(torch.optim.Optimizer)
    if name.startswith("register_") and name.endswith("_hook")
}
_DTENSOR: dict[str, Callable[[Any], bool]] = {
    "from_local": lambda m: DTensor.from_local(_of(m).to_local(), _of(m).device_mesh, _of(m).placements) is not None,
    "to_local": lambda m: _of(m).to_local().numel() * _NUM_RANKS == 2 * _of(m).numel(),
    "full_tensor": lambda m: _of(m).full_tensor().shape == (8, 4),
    "redistribute": lambda m: torch.equal(_copied(m).to_local(), _of(m).full_tensor()),
    "device_mesh": lambda m: distribute_tensor(torch.ones(4), _of(m).device_mesh).full_tensor().sum() == 4,
    "placements": lambda m: torch.equal(_cut_like(m, torch.ones(8, 4)).full_tensor(), torch.ones(8, 4)),
    "__create_write_items__": lambda m: len(_of(m).__create_write_items__("weight", _of(m))) > 0,
    "__create_chunk_list__": lambda m: len(_of(m).__create_chunk_list__()) > 0,
    "__get_tensor_shard__": lambda m: _of(m).__get_tensor_shard__(_first_index(m)).numel() > 0,
    "__tensor_flatten__": lambda m: len(_of(m).__tensor_flatten__()[0]) == 1,
    "_spec": lambda m: _of(m)._spec,
    "T": lambda m: _of(m).T,
    "pickle": lambda m: len(pickle.dumps(_of(m))) > 0,
    "share_memory_": lambda m: _of(m).share_memory_(),
}
"""The questions that torch and libraries ask of a DTensor."""
METHODS = {
    "FSDPModule": _FSDP, "DistributedDataParallel": _DDP, "Module": _MODULE, "Parameter": _PARAMETER,
    "Optimizer": _OPTIMIZER, "DTensor": _DTENSOR,
}  # fmt: skip


def missing() -> set[str]:
    """The public methods of FSDP2 and DDP that are not tried."""
    fsdp = {name for name, _ in inspect.getmembers(FSDPModule, inspect.isfunction) if not name.startswith("_")}
    ddp = {
        name
        for name, method in inspect.getmembers(DistributedDataParallel, inspect.isfunction)
        if not name.startswith("_") and method is not getattr(nn.Module, name, None)
    }
    dtensor = {name for name in vars(DTensor) if not name.startswith("_")}
    return (fsdp - {*_FSDP}) | (ddp - {*_DDP} - _OF_DDP_ITSELF) | (dtensor - {*_DTENSOR})


def _job() -> list[tuple[str, str, str]]:
    found = []
    for owner, methods in METHODS.items():
        for name, call in methods.items():
            try:
                with warnings.catch_warnings(action="ignore"):
                    result = WORKS if call(sharded()) else NO_EFFECT
            except (NotImplementedError, AttributeError, RuntimeError, TypeError) as error:
                result = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            found.append((owner, name, result))
    return found


def results() -> list[tuple[str, str, str]]:
    """(class, method, WORKS, NO_EFFECT or the error) of each."""
    found: list[tuple[str, str, str]] = ranks(_job, nodes=_NUM_RANKS)[0]
    return found


def table(found: list[tuple[str, str, str]]) -> str:
    """The rows of the page: one for the methods of a class that work, and one for each other."""
    rows = ["| of | methods | |", "|---|---|---|"]
    for owner in METHODS:
        own = [(name, result) for of, name, result in found if of == owner]
        rows.append(f"| {owner} | {', '.join(f'`{name}`' for name, result in own if result == WORKS)} | work |")
        rows += [f"| | `{name}` | {result} |" for name, result in own if result != WORKS]
    return "\n".join(rows) + "\n"


def render(page: str, found: list[tuple[str, str, str]]) -> str:
    """The page with the table of today."""
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + table(found) + _END + rest.partition(_END)[2]


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8"), results()), encoding="utf-8")
