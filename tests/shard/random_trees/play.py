"""A case's steps, on one rank or on the oracle: an unsharded copy of the model for every rank, in one process.

[Note: What the oracle does]
Every copy runs the steps of its rank on that rank's data. After each backward that sends gradients, `.grad` of each
parameter in a unit becomes the mean of the copies' gradients on all copies. A copy without a gradient adds zero. If no
copy has one, `.grad` stays None. So all copies keep equal parameters, and their optimizers do the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import laconic
from tests.shard.random_trees.case import Case, Forward, Micro, Step
from tests.shard.random_trees.modules import Model, call, tensors

_LEARNING_RATE = 0.05
_EPSILON = 0.1
"""Adam's: a small one would turn rounding errors of gradients near zero into whole steps."""


@dataclass
class Entry:
    """A value at one point of a run."""

    label: str
    """The name of the value, and the place in the run."""
    value: Any
    """A tensor, None, or plain data. A rank's part of a sharded tensor is a `Part`."""
    scale: float = 0.0
    """The size of the values that it was summed from."""


@dataclass
class Part:
    """A rank's part of a sharded tensor."""

    start: int
    values: Tensor
    """(n,)"""
    shape: tuple[int, ...]


Trace = list[Entry]


def keep(value: Tensor | None) -> Any:
    """Copy a tensor for a trace."""
    if value is None:
        return None
    if hasattr(value, "to_local"):
        extent = value.extent  # type: ignore[attr-defined]
        return Part(0 if extent is None else extent.start, value.to_local().detach().clone(), tuple(value.shape))  # type: ignore[attr-defined]
    return value.detach().clone()


def make_optimizer(name: str, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Make the optimizer of a case: sgd, momentum or adamw, perhaps with "foreach" or "fused" behind it."""
    kind, _, way = name.partition(" ")
    options: dict[str, Any] = {"lr": _LEARNING_RATE, "foreach": way == "foreach", "fused": way == "fused"}
    if kind == "adamw":
        return torch.optim.AdamW(parameters, eps=_EPSILON, weight_decay=0.1, **options)
    return torch.optim.SGD(parameters, momentum=0.9 if kind == "momentum" else 0.0, weight_decay=0.1, **options)


class Player:
    """One rank's model, which takes the steps of the case and keeps a trace."""

    def __init__(
        self,
        case: Case,
        rank: int,
        module: nn.Module,
        managed: set[str],
        set_sync: Callable[[bool], None] | None = None,
        move: Callable[[int], None] | None = None,
    ) -> None:
        """`set_sync` says whether the next backward sends gradients; on the oracle it is None, as is `move`."""
        self.case, self.rank, self.module = case, rank, module
        self.managed, self.set_sync, self.move = managed, set_sync, move
        self.named = dict(module.named_parameters())
        self.trace: Trace = []
        self.scales: dict[str, float] = {}
        self._where = ""
        self._num_drawn = 0
        self._optimizer: torch.optim.Optimizer | None = None
        if self.named:
            self._optimizer = make_optimizer(case.optimizer, list(self.named.values()))

    def play(self) -> Iterator[bool]:
        """Take all steps; yield after each backward, True if it sent gradients."""
        for number, step in enumerate(self.case.steps):
            self._where = f"step {number}"
            if step.before:
                self._forward_before(step)
            for index, micro in enumerate(step.micros):
                is_last = index == len(step.micros) - 1
                syncs = step.syncs_all or is_last
                self._where = f"step {number}.{index}, {micro.mode}" + ("" if step.syncs_all else ", accumulated")
                if self.set_sync is not None:
                    self.set_sync(syncs)
                for _ in self._micro(micro):
                    yield syncs
                if syncs:
                    self._keep_gradients()
            self._end(step)

    def _record(self, label: str, value: Any, scale: float = 0.0) -> None:
        self.trace.append(Entry(f"{label} ({self._where})", value, scale))

    # -- forward -------------------------------------------------------------------------------------------------------

    def _draw(self, forward: Forward, *, needs_grad: bool) -> tuple[Tensor, Tensor]:
        """Draw this rank's inputs: x, (rows, width), and ids, (rows,)."""
        self._num_drawn += 1
        generator = torch.Generator().manual_seed(1_000_003 * self.case.seed + 101 * self._num_drawn + self.rank)
        rows = (forward.rows + self.rank) % 4
        x = torch.randn(rows, self.case.width, generator=generator, dtype=torch.float64)
        ids = torch.randint(0, 100, (rows,), generator=generator)
        return x.to(getattr(torch, self.case.root.dtype)).requires_grad_(needs_grad), ids

    def _outputs(self, forward: Forward, x: Tensor, ids: Tensor) -> list[Tensor]:
        found = tensors(call(self.module, x, ids, forward.turn, forward.takes))
        for index, output in enumerate(found):
            self._record(f"output {index}", keep(output))
        chosen = [output for index, output in enumerate(found) if forward.outputs >> index & 1]
        return chosen or found

    def _loss(self, outputs: list[Tensor]) -> Tensor:
        return sum((0.1 * (output.double() - 0.3).square().sum() for output in outputs), torch.zeros(()).double())

    def _forward_before(self, step: Step) -> None:
        forward = step.micros[0].forwards[0]
        x, ids = self._draw(forward, needs_grad=forward.needs_grad)
        modes = {"abandoned": torch.enable_grad, "inference_mode": torch.inference_mode}
        self.module.train(step.before != "eval")
        with modes.get(step.before, torch.no_grad)():
            self._outputs(forward, x, ids)
        self.module.train()

    # -- backward ------------------------------------------------------------------------------------------------------

    def _micro(self, micro: Micro) -> Iterator[None]:
        """Run the forwards and what follows; yield after each backward."""
        inputs: list[Tensor] = []
        losses: list[Tensor] = []
        outputs: list[Tensor] = []
        shared = None
        for forward in micro.forwards:
            x, ids = shared if shared is not None else self._draw(forward, needs_grad=forward.needs_grad)
            if shared is None:
                inputs.append(x)
            shared = (x, ids) if micro.same_input else None
            found = self._outputs(forward, x, ids)
            outputs += found
            losses.append(self._loss(found))
        self._record("needs grad", [loss.requires_grad for loss in losses])
        losses = [loss for loss in losses if loss.requires_grad]
        if losses:
            yield from self._backward(micro.mode, losses, outputs, inputs)
        for index, x in enumerate(inputs):
            self._record(f"x{index}.grad", keep(x.grad))

    def _backward(self, mode: str, losses: list[Tensor], outputs: list[Tensor], inputs: list[Tensor]) -> Iterator[None]:
        loss = sum(losses[1:], losses[0])
        wanted = [x for x in inputs if x.requires_grad]
        match mode:
            case "together":
                yield loss.backward()
            case "each" | "reversed":
                losses = losses if mode == "each" else losses[::-1]
                for index, each in enumerate(losses):
                    yield each.backward(retain_graph=index < len(losses) - 1)
            case "retained":
                yield loss.backward(retain_graph=True)
                yield loss.backward()
            case "outputs":
                outputs = [output for output in outputs if output.requires_grad]
                yield torch.autograd.backward(outputs, [torch.sin(output.detach()) for output in outputs])
            case "grad":
                self._keep_input_gradients(loss, wanted, retain_graph=True)
                yield loss.backward()
            case "grad_only":
                self._keep_input_gradients(loss, wanted)
            case "inputs_only":
                yield loss.backward(inputs=wanted)
            case "penalty" | "penalty_only":
                found = self._keep_input_gradients(loss, wanted, create_graph=True)
                penalty = sum((each.double().square().sum() for each in found), torch.zeros(()).double())
                objective = penalty if mode == "penalty_only" else loss + penalty
                if objective.requires_grad:
                    yield objective.backward()

    def _keep_input_gradients(self, loss: Tensor, inputs: list[Tensor], **options: bool) -> list[Tensor]:
        found = torch.autograd.grad(loss, inputs, allow_unused=True, **options)
        for index, gradient in enumerate(found):
            self._record(f"autograd.grad of x{index}", keep(gradient))
        return [gradient for gradient in found if gradient is not None]

    # -- between steps -------------------------------------------------------------------------------------------------

    def _keep_gradients(self) -> None:
        for name, parameter in self.named.items():
            self._record(f"{name}.grad", keep(parameter.grad), self.scales.get(name, 0.0))

    def _end(self, step: Step) -> None:
        self._where += ", end"
        if self._optimizer is None:
            return
        if step.clips:
            # The norm of parameters outside of units is another on each rank, as their gradients are.
            clipped = [p for name, p in self.named.items() if name in self.managed or self.case.world == 1]
            norm = torch.nn.utils.clip_grad_norm_(clipped, 0.5)
            self._record("norm", keep(norm.double()))  # laconic sums bfloat16 in float32
        if step.steps:
            self._optimizer.step()
            for name, parameter in self.named.items():
                self._record(name, keep(parameter), self.scales.get(name, 0.0))
        if step.zero != "keep":
            by_module = isinstance(self.module, laconic.ShardedModule) and len(step.micros) > 1
            (self.module if by_module else self._optimizer).zero_grad(set_to_none=step.zero == "none")
            self._keep_gradients()
        if step.edits and self.named:
            self._edit(next(iter(self.named.values())), is_noticed=step.edits == "noticed")
        if step.toggles is not None:
            names = [name for name in self.named if "layers." not in name]  # experts: all ranks need equal graphs
            for name in names[step.toggles % len(names) :][:1] if names else []:
                self.named[name].requires_grad_(not self.named[name].requires_grad)
        if step.moves is not None and self.move is not None:
            self.move(step.moves)
        for name, buffer in self.module.named_buffers():
            self._record(name, keep(buffer))

    @torch.no_grad()
    def _edit(self, parameter: Any, *, is_noticed: bool) -> None:
        """Change a parameter between steps, as an optimizer of the user's might."""
        if is_noticed or not hasattr(parameter, "to_local"):
            parameter.mul_(0.5)
            return
        parameter.to_local().data.mul_(0.5)
        for module in self.module.modules():
            if isinstance(module, laconic.ShardedModule):
                module.invalidate(recurse=False)


def play_rank(case: Case, rank: int, mesh: Any) -> Trace:
    """Play a case on one rank of its world. Collective."""
    model = Model(case, rank)
    managed = model.managed()
    model.shard(mesh)
    units = [module for module, _ in model.units()]

    def set_sync(syncs: bool) -> None:
        for unit in units:
            unit.set_requires_gradient_sync(syncs, recurse=False)  # type: ignore[operator]

    player = Player(case, rank, model.module, managed, set_sync, model.move)
    for _ in player.play():
        pass
    return player.trace


def play_oracle(case: Case) -> list[Trace]:
    """Play a case without sharding: [Note: What the oracle does]. Returns the ranks' traces."""
    models = [Model(case, rank) for rank in range(case.world)]
    managed = models[0].managed()
    for model in models:
        model.emulate_precision()
    players = [Player(case, rank, model.module, managed) for rank, model in enumerate(models)]
    for sends in zip(*(player.play() for player in players), strict=True):
        if sends[0]:
            for name in managed & players[0].named.keys():
                _average(name, players)
    return [player.trace for player in players]


def _average(name: str, players: list[Player]) -> None:
    parameters = [player.named[name] for player in players]
    gradients = [parameter.grad.double() for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return
    mean = sum(gradients[1:], gradients[0]) / len(players)
    largest = max((float(gradient.abs().max()) for gradient in gradients if gradient.numel()), default=0.0)
    for player, parameter in zip(players, parameters, strict=True):
        parameter.grad = mean.to(parameter.dtype, copy=True)
        player.scales[name] = max(player.scales.get(name, 0.0), largest)
