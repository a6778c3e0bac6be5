"""A run of the engine as a row of a table, and the oracle that trains beside it.

    @pytest.mark.parametrize("scenario", [Scenario(cache="host"), Scenario(nodes=3, local=2, micro_batches=2)])
    def test_it_trains_as_one_process(scenario: Scenario) -> None:
        runs = scenario.run()
        assert_equals_oracle(scenario, runs)
        assert runs[0].sent[1].weights == 0

`Scenario.run` starts the ranks. In a body under `@on_ranks`, `play(scenario)` is what this rank does. Outside of
`make test` the functions of a scenario must lie at the top level of a module, and a run comes back without its model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import laconic
from tests.reference.step import Loss, Oracle
from tests.support.launch import run_ranks
from tests.support.sharded_net import (
    Moved,
    Net,
    assert_nothing_gathered,
    build,
    full_gradients,
    full_parameters,
    inputs,
    moved,
    squared_error,
)


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def nothing_of(model: nn.Module) -> None:
    """Do nothing with a model."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A model, the ranks that share it, and its training."""

    nodes: int = 2
    """All nodes, those of all islands."""
    local: int = 1
    """The ranks of a node."""
    islands: int = 1
    """Replicas of the model: `fully_shard` gets a mesh with as many islands."""
    make: Callable[[], nn.Module] = Net
    """Builds the model, the same on all ranks, frozen parameters and all."""
    prepare: Callable[[Any], Any] = nothing_of
    """What is done with a rank's model before `fully_shard`, and not with the oracle's."""
    units: Sequence[str] | None = None
    """The modules that are units below the root. Default: `blocks`, or the children of a model without any."""
    cache: Any = "none"
    precision: MixedPrecisionPolicy | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    """Other arguments of `fully_shard`, for all units."""
    own: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Arguments of single units, by name, in place of those for all; the root is ""."""
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] = sgd
    """SGD shows a wrong scale of gradients, which Adam does not."""
    steps: int = 2
    micro_batches: int = 1
    """Those of a step; only the last sends gradients."""
    keeps_gradients: bool = False
    """True: a run has the whole gradients of each step, which takes half as long again."""
    max_norm: float | None = None
    """Gradients are clipped to it."""
    batch: Callable[[int, int], Any] = inputs
    """Draws a batch from the number of the micro-batch in the run, and the rank."""
    loss: Loss = squared_error
    oracle_loss: Loss | None = None
    """The loss of the oracle, where it rounds what `fully_shard` rounds by itself. Default: `loss`."""
    events: Mapping[int, Callable[[Any], Any]] = field(default_factory=dict)
    """What is done with a rank's model before a step, by step."""
    edits: Mapping[int, Callable[[Any], Any]] = field(default_factory=dict)
    """What is done, without gradients, with a rank's model and with the oracle's before a step, by step."""
    look: Callable[[Any], Any] = nothing_of
    """What a test wants to know of a rank's model after each step, and before the first."""

    def batches(self, step: int) -> list[list[Any]]:
        """The batches of a step, by micro-batch and rank."""
        numbers = range(step * self.micro_batches, (step + 1) * self.micro_batches)
        return [[self.batch(number, rank) for rank in range(self.nodes * self.local)] for number in numbers]

    def sharded(self) -> Any:
        """The model of this rank. Collective."""
        model, mesh = build(self.make), laconic.init_mesh("cpu", islands=self.islands)
        self.prepare(model)
        children = model.blocks if hasattr(model, "blocks") else model
        names = {module: name for name, module in model.named_modules()}
        units = [names[child] for child in children.children()] if self.units is None else self.units  # type: ignore[union-attr]
        shared = {"mesh": mesh, "cache": self.cache, "mp_policy": self.precision, **self.options}
        for name in (*units, ""):
            laconic.fully_shard(model.get_submodule(name), **{**shared, **self.own.get(name, {})})
        return model

    def run(self) -> list[Run]:
        """Play on ranks, and return what they have seen, by rank."""
        return run_ranks(play, self.nodes * self.local, self, local=self.local)


@dataclass(kw_only=True)
class Run:
    """What one rank has seen of a scenario. Whole tensors are equal on all ranks."""

    model: Any
    optimizer: Any
    losses: list[Tensor] = field(default_factory=list)
    """The loss of each micro-batch."""
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    """The whole gradients of each step, before they are clipped, if they are kept."""
    norms: list[Tensor] = field(default_factory=list)
    """The norm of the gradients of each step, where they are clipped."""
    sent: list[Moved] = field(default_factory=list)
    """The bytes of forward and backward of each step, by level and purpose."""
    memory: list[Any] = field(default_factory=list)
    """What the engine holds after each step, with the peak of the step."""
    looks: list[Any] = field(default_factory=list)
    """What `look` has returned, first before the first step."""
    parameters: dict[str, Tensor] = field(default_factory=dict)
    """The whole parameters after the last step."""

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "model": None, "optimizer": None}  # they stay with their rank


def play(scenario: Scenario) -> Run:
    """Train on this rank. Collective. No unit may stay gathered after a step."""
    model = scenario.sharded()
    run = Run(model=model, optimizer=scenario.optimizer([p for p in model.parameters() if p.requires_grad]))
    run.looks.append(scenario.look(model))
    for step in range(scenario.steps):
        _before(step, scenario.events, model)
        with torch.no_grad():
            _before(step, scenario.edits, model)
        model.reset_peak_memory()
        with moved(model) as sent:
            for number, batches in enumerate(scenario.batches(step)):
                model.set_requires_gradient_sync(number == scenario.micro_batches - 1)
                loss = scenario.loss(model, batches[dist.get_rank()])
                loss.backward()
                run.losses.append(loss.detach())
        run.sent.append(sent)
        if scenario.keeps_gradients:
            run.gradients.append(full_gradients(model))
        if scenario.max_norm is not None:
            run.norms.append(nn.utils.clip_grad_norm_(model.parameters(), scenario.max_norm))
        run.optimizer.step()
        run.optimizer.zero_grad()
        run.memory.append(model.memory())
        assert_nothing_gathered(model)
        run.looks.append(scenario.look(model))
    run.parameters = {name: value.detach().clone() for name, value in full_parameters(model).items()}
    return run


def _before(step: int, deeds: Mapping[int, Callable[[Any], Any]], model: nn.Module) -> None:
    if step in deeds:
        deeds[step](model)


def assert_equals_oracle(scenario: Scenario, runs: Sequence[Run], **tolerance: float) -> None:
    """Assert that losses, norms, parameters and kept gradients of all ranks are those of training in one process.

    Args:
        scenario: what the ranks have played.
        runs: what they have seen, by rank.
        tolerance: `rtol` and `atol` of all comparisons.
    """
    precision = scenario.precision or MixedPrecisionPolicy()
    oracle = Oracle(
        build(scenario.make),
        scenario.oracle_loss or scenario.loss,
        num_nodes=scenario.nodes,
        num_local=scenario.local,
        param_dtype=precision.param_dtype,
        reduce_dtype=precision.reduce_dtype,
    )
    parameters = oracle.parameters()
    optimizer = scenario.optimizer([p for p in parameters.values() if p.requires_grad])
    for step in range(scenario.steps):
        with torch.no_grad():
            _before(step, scenario.edits, oracle.model)
        losses, gradients = oracle.gradients(scenario.batches(step))
        for rank, run in enumerate(runs):
            own = [each[rank] for each in losses]
            first = step * scenario.micro_batches
            _assert_close(run.losses[first : first + len(own)], own, f"losses of step {step}, rank {rank}", tolerance)
            if scenario.keeps_gradients:
                _assert_close(run.gradients[step], gradients, f"gradients of step {step}, rank {rank}", tolerance)
        for name, parameter in parameters.items():
            parameter.grad = gradients.get(name)
        if scenario.max_norm is not None:
            norm = nn.utils.clip_grad_norm_(parameters.values(), scenario.max_norm)
            _assert_close([run.norms[step] for run in runs], [norm] * len(runs), f"norms of step {step}", tolerance)
        optimizer.step()
    trained = {name: parameter.detach() for name, parameter in parameters.items()}
    for rank, run in enumerate(runs):
        _assert_close(run.parameters, trained, f"parameters, rank {rank}", tolerance)


def _assert_close(got: Any, want: Any, what: str, tolerance: Mapping[str, Any]) -> None:
    torch.testing.assert_close(got, want, **tolerance, msg=lambda text: f"{what}: {text}")


def assert_same_bits(one: Run, other: Run) -> None:
    """Assert that two runs have the same losses and parameters, to the bit."""
    assert one.losses == other.losses
    assert one.parameters.keys() == other.parameters.keys()
    for name, value in one.parameters.items():
        assert torch.equal(value, other.parameters[name]), name
