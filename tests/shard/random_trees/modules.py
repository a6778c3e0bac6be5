"""The modules of a case: built, tied, frozen and sharded."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

import laconic
from laconic.shard.policies import Placement, SumsWhere, Where
from tests.shard.random_trees.case import Case, Node, Precision, Unit

_WEIGHTS: tuple[Where, ...] = ("rank", "none", "host", "device")
_SUMS: tuple[SumsWhere, ...] = ("node", "rank")


@dataclass
class Batch:
    x: Tensor
    ids: Tensor | None = None


@dataclass
class Output:
    y: Tensor
    more: Any = None


class Pair(NamedTuple):
    y: Tensor
    more: Any


def tensors(value: Any) -> list[Tensor]:
    """Return all floating tensors of a structure, in order."""
    found: list[Tensor] = []
    map_tensors(lambda tensor: found.append(tensor) or tensor, value)
    return found


def map_tensors(function: Any, value: Any) -> Any:
    """Map the floating tensors of a structure, dataclasses included."""
    each = functools.partial(map_tensors, function)
    if isinstance(value, Tensor):
        return function(value) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: each(item) for key, item in value.items()}
    if isinstance(value, Pair):
        return Pair(*map(each, value))
    if isinstance(value, list | tuple):
        return type(value)(map(each, value))
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: each(getattr(value, field.name)) for field in fields(value)})
    return value


def total(value: Any) -> Tensor:
    """Sum the tensors of a module's output; all have one shape."""
    first, *others = tensors(value)
    return sum(others, first)


def call(child: nn.Module, x: Tensor, ids: Tensor, turn: int, takes: str) -> Any:
    """Give a module its inputs, as `takes` says if it is one of ours."""
    if isinstance(child, Tree):
        given: dict[str, Any] = {"dict": {"x": x, "ids": ids}, "tuple": (x, [ids]), "dataclass": Batch(x, ids)}
        if takes in given:
            return child(given[takes], turn=turn)
        return child(x=x, ids=ids, turn=turn) if takes == "kwargs" else child(x, ids, turn)
    if isinstance(child, nn.Embedding):
        return x + child(ids % child.num_embeddings)
    parameter = next(child.parameters(), x)
    x = x.to(parameter.dtype)
    if isinstance(child, nn.Conv1d):
        return child(x.unsqueeze(1)).mean(1)
    return child(input=x) if takes == "kwargs" else child(x)


def run(node: Node, child: nn.Module, x: Tensor, ids: Tensor, turn: int) -> Tensor:
    """Run a child in its style; return the sum of its outputs."""

    def plain(x: Tensor) -> Tensor:
        return total(call(child, x, ids, turn, node.takes))

    match node.style:
        case "checkpoint":
            return checkpoint(plain, x, use_reentrant=False)
        case "reentrant":
            return checkpoint(plain, x, use_reentrant=True)
        case "no_grad":
            with torch.no_grad():
                return plain(x)
        case "detach":
            return plain(x.detach())
    return plain(x)


class Scale(torch.autograd.Function):
    """x * weight, written by hand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum(0)


class Tree(nn.Module):
    """A module of ours: it takes its inputs in any form, and returns its output in the form of its node."""

    rank = 0

    def __init__(self, node: Node, width: int) -> None:
        super().__init__()
        self.node, self.width = node, width
        self.build()

    def build(self) -> None:
        """Make the parts; containers get their children later."""

    def forward(self, x: Any, ids: Any = None, turn: int = 0) -> Any:
        if isinstance(x, dict):
            x, ids = x["x"], x["ids"]
        elif isinstance(x, tuple):
            x, (ids,) = x
        elif isinstance(x, Batch):
            x, ids = x.x, x.ids
        if ids is None:
            ids = torch.arange(len(x))
        y = self.compute(x, ids, turn)
        match self.node.returns:
            case "tuple":
                return y, torch.tanh(y)
            case "list":
                return [y, None, 3]
            case "dict":
                return {"y": y, "more": torch.sin(y), "ids": ids}
            case "nested":
                return {"a": (y, [torch.tanh(y), "text"]), "none": None}
            case "dataclass":
                return Output(y, more=[torch.tanh(y)])
            case "namedtuple":
                return Pair(y, None)
            case "input":
                return y, x
        return y

    def compute(self, x: Tensor, ids: Tensor, turn: int) -> Tensor:
        raise NotImplementedError


CONTAINERS = {
    "chain": "runs its children one after the other",
    "residual": "adds what they return to its input",
    "branches": "adds up what each returns",
    "twice": "runs its child twice",
    "alias": "has its child under two names",
    "gate": "runs one child in each call, as the call's turn says",
    "spare": "runs its first child only",
    "inplace": "changes its child's output in place",
}


class Container(Tree):
    """A module with children: `CONTAINERS`."""

    def adopt(self, children: list[nn.Module]) -> None:
        """Take the children."""
        self.in_order = children  # a plain list, which registers nothing
        match self.node.kind:
            case "branches":
                self.by_name = nn.ModuleDict({f"part{index}": child for index, child in enumerate(children)})
            case "alias":
                self.first = self.second = children[0]
            case _:
                self.parts = nn.ModuleList(children)

    def compute(self, x: Tensor, ids: Tensor, turn: int) -> Tensor:
        def run_child(index: int, x: Tensor) -> Tensor:
            index %= len(self.in_order)
            return run(self.node.children[index], self.in_order[index], x, ids, turn)

        places = range(len(self.in_order))
        match self.node.kind:
            case "chain" | "residual":
                y = functools.reduce(lambda y, index: run_child(index, y), places, x)
                return y if self.node.kind == "chain" else x + torch.tanh(y)
            case "branches":
                results = [run_child(index, x) for index in places]
                return sum(map(torch.tanh, results[1:]), results[0])
            case "twice":
                return run_child(0, torch.tanh(run_child(0, x)))
            case "gate":
                return run_child(turn, x)
            case "inplace":
                return run_child(0, x * 1.0).mul_(0.5)
        return run_child(0, x)


class Expert(Tree):
    """Two layers of which each rank runs one."""

    def build(self) -> None:
        dtype = getattr(torch, self.node.dtype)
        self.layers = nn.ModuleList(nn.Linear(self.width, self.width, dtype=dtype) for _ in range(2))

    def compute(self, x: Tensor, ids: Tensor, turn: int) -> Tensor:
        return call(self.layers[(self.rank + turn) % 2], x, ids, turn, "args")


class Custom(Tree):
    """Parameters of odd shapes: none, one and no dims' elements, three dims, two dtypes, and one that is never used."""

    def build(self) -> None:
        dtype = getattr(torch, self.node.dtype)
        other = torch.float32 if dtype == torch.float64 else dtype
        self.scale = nn.Parameter(torch.tensor(1.1, dtype=other))
        self.empty = nn.Parameter(torch.zeros(0, 3, dtype=dtype))
        self.unused = nn.Parameter(torch.ones(self.width, dtype=dtype))
        self.cube = nn.Parameter(0.3 * torch.randn(2, 1, self.width, dtype=dtype))
        self.factor = nn.Parameter(1 + 0.1 * torch.randn(self.width, dtype=dtype))
        self.register_parameter("none", None)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(self.width, dtype=dtype), persistent=False)

    def compute(self, x: Tensor, ids: Tensor, turn: int) -> Tensor:
        self.count += 1
        with torch.no_grad():
            self.mean += 0.1 * x.detach().sum(0).to(self.mean.dtype)
        x = Scale.apply(x.to(self.factor.dtype), self.factor)
        return x * self.scale + self.cube.sum((0, 1)) + self.empty.sum()


OWN_LEAVES = {"expert": Expert, "custom": Custom}


class Model:
    """The model of a case on one rank, not sharded yet."""

    def __init__(self, case: Case, rank: int) -> None:
        torch.manual_seed(case.seed)
        self.case = case
        self.made: list[tuple[Node, nn.Module]] = []
        """The nodes and their modules, parents first."""
        self.module = self._make(case.root)
        for module in self.module.modules():
            if isinstance(module, Tree):
                module.rank = rank
        if case.ties:
            self._tie()
        self._freeze()
        named = list(self.module.named_parameters())
        self.ignored = [] if case.ignored is None or not named else [named[case.ignored % len(named)][1]]

    def _make(self, node: Node) -> nn.Module:
        place = len(self.made)
        self.made.append((node, nn.Identity()))  # keeps the place
        children = [self._make(child) for child in node.children]
        module = _make_module(node, self.case.width, children)
        self.made[place] = node, module
        return module

    def owners(self) -> dict[nn.Module, nn.Module | None]:
        """The innermost unit's module of each module below the root; None outside of all units."""
        units = {module for node, module in self.made if node.unit is not None}
        owner: dict[nn.Module, nn.Module | None] = {}

        def visit(module: nn.Module, unit: nn.Module | None) -> None:
            owner[module] = unit = module if module in units else unit
            for child in module.children():
                if child not in owner:
                    visit(child, unit)

        visit(self.module, None)
        return owner

    def _tie(self) -> None:
        seen: dict[Any, nn.Linear] = {}
        for module, unit in self.owners().items():
            if type(module) is nn.Linear:
                first = seen.setdefault((unit, module.weight.shape, module.weight.dtype), module)
                module.weight = first.weight

    def _freeze(self) -> None:
        of_nodes = {module for _, module in self.made}
        for node, module in self.made:
            for index, parameter in enumerate(_own_parameters(module, of_nodes)):
                if node.frozen >> index & 1 and node.kind != "expert":
                    parameter.requires_grad_(False)

    def units(self) -> Iterator[tuple[nn.Module, Unit]]:
        """Yield the modules to shard with their options, innermost first."""
        for node, module in reversed(self.made):
            if node.unit is not None:
                yield module, node.unit

    def shard(self, mesh: Any) -> None:
        """Call `fully_shard` on the units."""
        granularities = {"rows": laconic.rows(2), "elements": laconic.elements(3), "whole": laconic.whole(), None: None}
        for module, unit in self.units():
            laconic.fully_shard(
                module,
                mesh=mesh,
                cache=_cache(unit),
                reshard_after_forward=unit.reshard_after_forward,
                granularity=granularities[unit.granularity],
                checks=_checks(unit.checks),
                mp_policy=policy(unit.precision),
                offload_policy=CPUOffloadPolicy() if unit.offloads else None,
                shares=self.case.shares,
                ignored_params=self.ignored,
            )

    def move(self, number: int) -> None:
        """Let the units that have run rest elsewhere."""
        units: list[Any] = [module._laconic_unit for module, _ in self.units()]
        for root in dict.fromkeys(unit.root for unit in units if unit.has_root):
            places = {
                unit.name: Placement(weights=_WEIGHTS[(number + index) % 4], gradients=_SUMS[(number + index) // 4 % 2])
                for index, unit in enumerate(root.units)
            }
            root.set_placements(places)

    def managed(self) -> set[str]:
        """The names of the parameters that units take."""
        owner = self.owners()
        return {
            f"{prefix}.{name}" if prefix else name
            for prefix, module in self.module.named_modules()
            for name, parameter in module.named_parameters(recurse=False)
            if owner[module] is not None and all(parameter is not other for other in self.ignored)
        }

    def emulate_precision(self) -> None:
        """Let an unsharded model cast as `fully_shard` would."""
        owner = self.owners()
        for module, unit in self.units():
            if unit.precision is not None:
                parts = [part for part, own in owner.items() if own is module]
                _Casts(module, unit.precision, parts, self.ignored)


def _make_module(node: Node, width: int, children: list[nn.Module]) -> nn.Module:
    dtype: Any = {"dtype": getattr(torch, node.dtype)}
    match node.kind:
        case "linear":
            return nn.Linear(width, width, bias=node.bias, **dtype)
        case "mlp":
            up, down = nn.Linear(width, node.size, **dtype), nn.Linear(node.size, width, bias=node.bias, **dtype)
            return nn.Sequential(up, nn.Tanh(), down)
        case "norm":
            return nn.LayerNorm(width, bias=node.bias, **dtype)
        case "embedding":
            return nn.Embedding(node.size, width, padding_idx=None if node.bias else 0, **dtype)
        case "conv":
            return nn.Conv1d(1, node.size, 3, padding=1, bias=node.bias, **dtype)
        case "identity":
            return nn.Identity()
        case "sequential":
            return nn.Sequential(*children)
    if node.kind in OWN_LEAVES:
        return OWN_LEAVES[node.kind](node, width)
    tree = Container(node, width)
    tree.adopt(children)
    return tree


def _own_parameters(module: nn.Module, of_nodes: set[nn.Module]) -> Iterator[nn.Parameter]:
    yield from module.parameters(recurse=False)
    for child in module.children():
        if child not in of_nodes:
            yield from _own_parameters(child, of_nodes)


def _cache(unit: Unit) -> laconic.Cache:
    if unit.cache == "auto":
        return laconic.Cache(where="auto", device_bytes=unit.budget, host_bytes=unit.budget // 2)
    return laconic.Cache(where=unit.cache, gradients=unit.gradients)  # type: ignore[arg-type]


def _checks(interval: int | None) -> laconic.Checks | None:
    if interval is None:
        return None
    is_odd = interval % 2 == 1
    return laconic.Checks(
        interval=interval, on_damage="regather" if is_odd else "raise", unnoticed_edits=is_odd or not interval
    )


def policy(precision: Precision | None) -> MixedPrecisionPolicy | None:
    """Make torch's policy."""
    if precision is None:
        return None
    names = precision.param_dtype, precision.reduce_dtype, precision.output_dtype
    dtypes = [None if name is None else getattr(torch, name) for name in names]
    return MixedPrecisionPolicy(*dtypes, cast_forward_inputs=precision.cast_forward_inputs)


class _Casts:
    """The casts of one unit: its parameters and inputs before its forward, its outputs after it.

    The parameters stay cast, because activation checkpointing may run parts of the unit again in backward.
    """

    def __init__(
        self, module: nn.Module, precision: Precision, parts: list[nn.Module], ignored: list[nn.Parameter]
    ) -> None:
        self.policy = policy(precision) or MixedPrecisionPolicy()
        self.parts = [(part, dict(part._parameters)) for part in parts]
        self.ignored = set(ignored)
        module.register_forward_pre_hook(self._before, with_kwargs=True)
        module.register_forward_hook(self._after)

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        dtype = self.policy.param_dtype
        if dtype is None:
            return args, kwargs
        cast: dict[Any, Tensor] = {}
        for part, parameters in self.parts:
            for name, parameter in parameters.items():
                if parameter is not None and parameter not in self.ignored:
                    if parameter not in cast:
                        cast[parameter] = parameter.to(dtype)
                    part._parameters[name] = cast[parameter]  # type: ignore[assignment]
        if self.policy.cast_forward_inputs:
            args, kwargs = map_tensors(lambda tensor: tensor.to(dtype), (args, kwargs))
        return args, kwargs

    def _after(self, module: nn.Module, args: Any, output: Any) -> Any:
        dtype = self.policy.output_dtype
        return output if dtype is None else map_tensors(lambda tensor: tensor.to(dtype), output)
