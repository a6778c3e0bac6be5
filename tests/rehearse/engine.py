"""Programs of the engine: one or two optimizer steps of each way to train."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

from laconic import Cache, Checks, Placement, Prefetch, Wire, fully_shard, init_mesh
from laconic.optim import AdamW8bit, Muon, Shampoo
from laconic.rehearse import Machine, mark, rehearsal
from laconic.rehearse.operations import kind_of

WIDTH = 16
Body = Callable[[Any, torch.optim.Optimizer], None]


class Net(nn.Module):
    """Residual blocks."""

    def __init__(self, width: int, num_blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(num_blocks))
        self.out = nn.Linear(width, width, bias=False)
        self.recomputes = False

    def forward(self, x: Tensor, skip: int | None = None) -> Tensor:
        """Run the blocks but `skip`."""
        for index, block in enumerate(self.blocks):
            if index != skip:
                y = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
                x = x + torch.tanh(y)
        return self.out(x)


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Add the adapter's output."""
        return self.base(x) + self.up(self.down(x))


class Around(nn.Module):
    """A layer around another one, which is a unit of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.own = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Run both layers."""
        return self.own(torch.tanh(self.inner(x)))


class HalfFrozen(nn.Module):
    """A layer beside a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(WIDTH, WIDTH, bias=False)  # first, so no wait for its crossing includes the other's copy
        self.base = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """Add both outputs."""
        return self.own(x) + self.base(x)


def batch(seed: int, width: int = WIDTH) -> Tensor:
    """A batch on the device."""
    return torch.randn(4, width, generator=torch.Generator().manual_seed(seed)).to("cuda")


def loss_of(model: Any, seed: int, **kwargs: Any) -> Tensor:
    """The loss of one batch."""
    return model(batch(seed, model.out.in_features), **kwargs).square().mean()


def training(
    *, steps: int = 2, micro_batches: int = 1, syncs_all: bool = False, skip: int | None = None, late_sums: bool = False
) -> Body:
    """Train, and read the loss after each step."""

    def run(model: Any, optimizer: torch.optim.Optimizer) -> None:
        for step in range(steps):
            for micro in range(micro_batches):
                is_last = micro == micro_batches - 1
                if late_sums:
                    model.set_requires_all_reduce(is_last)
                else:
                    model.set_requires_gradient_sync(is_last or syncs_all)
                loss = loss_of(model, 10 * step + micro, skip=skip if is_last else None)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            loss.item()

    return run


def two_forwards(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """One backward through two forwards."""
    for step in range(2):
        (loss_of(model, step) + loss_of(model, step + 5)).backward()
        optimizer.step()
        optimizer.zero_grad()


def clipped(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Clip gradients, zero them in place, and add to them again."""
    for step in range(3):
        loss_of(model, step).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


def moved_between_steps(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Let all units rest elsewhere before each step."""
    for step, (weights, gradients) in enumerate((("rank", "rank"), ("host", "node"), ("device", "rank"))):
        names = model.placements()
        model.set_placements({name: Placement(weights=weights, gradients=gradients) for name in names})
        training(steps=2, micro_batches=1 + step)(model, optimizer)


def evaluated(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Evaluate between steps, edit weights, look at whole ones, and at a state dict."""
    for _ in range(2):
        training(steps=1)(model, optimizer)
        with torch.no_grad():
            loss_of(model, 99).item()
            next(iter(model.parameters())).mul_(0.5)
            loss_of(model, 99).item()
            loss_of(model, 98).item()
        for parameter in model.parameters():
            parameter.full_tensor()
        model.state_dict()


class _Failure(Exception):
    pass


def _fail(*_: Any) -> None:
    raise _Failure


def abandoned(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """A backward that raises in the middle, and steps after it."""
    training(steps=1)(model, optimizer)
    output = model.blocks[1].register_forward_hook(lambda module, args, output: output.register_hook(_fail) and None)
    with pytest.raises(_Failure):
        loss_of(model, 3).backward()
    output.remove()
    training(steps=2)(model, optimizer)


def abandoned_forward(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """A forward that raises in a block, whose successor's gather has begun; an evaluation and steps after it."""
    training(steps=1)(model, optimizer)
    hook = model.blocks[0].register_forward_pre_hook(_fail)
    with pytest.raises(_Failure):
        loss_of(model, 3)
    hook.remove()
    with torch.no_grad():
        loss_of(model, 4, skip=1).item()
    training(steps=2)(model, optimizer)


def on_another_stream(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Train on a stream of the program's own."""
    streams = torch.get_device_module("cuda")
    side = streams.Stream()
    side.wait_stream(streams.current_stream())
    with streams.stream(side):
        training()(model, optimizer)
    streams.current_stream().wait_stream(side)


def late_reduction(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """A backward that need not wait for its last reductions, before one that does."""
    for step in range(2):
        model.set_is_last_backward(False)
        loss_of(model, step).backward()
        model.set_is_last_backward(True)
        loss_of(model, step + 5).backward()
        optimizer.step()
        optimizer.zero_grad()


def without_reading(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Train without a read by the host, which would wait for the device."""
    x = batch(0)
    for _ in range(4):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def read_by_host(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """The host reads parameters, where it can, right after they were used."""
    for step in range(2):
        loss_of(model, step).backward()
        for parameter in model.parameters():
            if parameter.to_local().device.type == "cpu":
                parameter.to_local().sum().item()
        optimizer.step()
        optimizer.zero_grad()


def edited_by_host(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """The host edits weights that rest with it, right after a forward has used them."""
    for step in range(2):
        loss_of(model, step).backward()
        with torch.no_grad():
            model(batch(7))
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model(batch(8))
            for parameter in model.parameters():
                parameter.mul_(0.5)


def edited_before_backward(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """The host edits weights that rest with it between a forward and its backward, which takes the edited ones."""
    for step in range(2):
        loss = loss_of(model, step)
        with torch.no_grad():
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.mul_(0.5)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def edited_after_backward(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """The host edits weights, also those of a block that backward leaves out: their gather begins in vain."""
    model.blocks[0].register_forward_hook(lambda block, args, output: args[0])
    for step in range(2):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)


def thawed(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Frozen weights train later on."""
    training(steps=2)(model, optimizer)
    for block in model.blocks:
        block.requires_grad_(True)
    training(steps=2)(model, optimizer)


def step_in_backward(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Each parameter takes its step as soon as its gradient is there."""
    own = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def step(parameter: Tensor) -> None:
        own[parameter].step()
        own[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for seed in range(3):
        loss_of(model, seed).backward()


def overlapped_optimizer(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """The optimizer runs on a stream of its own; the next forward waits for its event."""
    streams = torch.get_device_module("cuda")
    side = streams.Stream()
    for step in range(2):
        loss_of(model, step).backward()
        side.wait_stream(streams.current_stream())
        with streams.stream(side):
            optimizer.step()
        model.set_post_optim_event(side.record_event())
        x = batch(step + 1)
        model(x)
        optimizer.zero_grad()


def adapt(model: Net) -> None:
    """Give each block a low-rank adapter."""
    model.blocks = nn.ModuleList(Adapted() for _ in model.blocks)
    model.out.requires_grad_(False)
    model.to("cuda")


def freeze_blocks(model: Net) -> None:
    """Train the last layer only."""
    model.blocks.requires_grad_(False)


def nest(model: Net) -> None:
    """Let each block have a unit inside."""
    model.blocks = nn.ModuleList(Around() for _ in model.blocks)
    model.to("cuda")


def add_frozen(model: Net) -> None:
    """Give each block a frozen layer: each unit has a bucket that stays and one that crosses."""
    model.blocks = nn.ModuleList(HalfFrozen() for _ in model.blocks)
    model.to("cuda")


def add_idle(model: Net) -> None:
    """Give the last layer's unit a parameter that no rank uses."""
    model.idle = nn.Parameter(torch.ones(3, WIDTH).to("cuda"))


def recompute(model: Net) -> None:
    """Recompute activations."""
    model.recomputes = True


def prefetch(model: Any) -> None:
    """Set what each block prefetches."""
    for block, following in pairwise(model.blocks):
        block.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([block])


def _one_kernel(function: Any, args: Any, kwargs: Any, result: Any) -> int | None:
    """The cost of an operation, in kernels: none for views, and for memory that nobody writes."""
    if not hasattr(function, "_schema"):
        return 1  # a chain that runs as one
    kind = kind_of(function)
    return None if kind.is_view or kind.is_empty else 1


def _mark_its_backward(module: nn.Module, args: Any, output: Tensor) -> None:
    if output.requires_grad:
        output.register_hook(lambda gradient: mark("backward"))


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@dataclass(frozen=True, kw_only=True)
class Program:
    """A model, how it is sharded, and how it is trained."""

    options: dict[str, Any] = field(default_factory=dict)
    """Arguments of `fully_shard`."""
    nodes: int = 2
    local: int = 2
    islands: int = 1
    width: int = WIDTH
    """The parts of islands have whole blocks of 128 values, so coded sums over islands need 32."""
    backend: str = "nccl"
    """With "gloo", waiting blocks the host, and transfers leave the lane."""
    optimizer: Callable[[Any], torch.optim.Optimizer] = _adamw
    train: Body = field(default_factory=training)
    prepare: Callable[[Net], None] = lambda model: None
    sharded: Callable[[Any], None] = lambda model: None
    """What happens to the sharded model before the first step."""
    wrap: Callable[[Any, torch.optim.Optimizer, Any], Any] = lambda model, optimizer, mesh: optimizer
    """Makes what takes the steps, of the sharded model, its optimizer and the mesh."""

    def make_mesh(self) -> Any:
        """The mesh over which the model is sharded."""
        return init_mesh("cuda", nodes=self.nodes, local=self.local, islands=self.islands)

    def shard(self, module: nn.Module, mesh: Any) -> None:
        """Make a unit of a module."""
        fully_shard(module, mesh=mesh, **self.options)

    def record(
        self, *, has_values: bool = True, num_blocks: int = 3, is_warm: bool = False, counts: bool = False
    ) -> Machine:
        """Run the program on a machine, which has its tape.

        If it `is_warm` it has run before, and the tape has a mark where each forward and each backward begins. If it
        `counts`, there are no values, each step on the tape is a kernel or a copy, and its cost is 1.
        """
        torch.manual_seed(0)
        shape = {"nodes": self.nodes, "local": self.local, "islands": self.islands}
        has_values = has_values and not counts
        cost_of = _one_kernel if counts else None
        with rehearsal(backend=self.backend, has_values=has_values, cost_of=cost_of, **shape) as machine:
            mesh = self.make_mesh()
            model = Net(self.width, num_blocks).to("cuda")
            self.prepare(model)
            inner = [block.inner for block in model.blocks if isinstance(block, Around)]
            for module in (*inner, *model.blocks, model):
                self.shard(module, mesh)
            self.sharded(model)
            optimizer = self.optimizer([p for p in model.parameters() if p.requires_grad])
            optimizer = self.wrap(model, optimizer, mesh)
            if is_warm:
                self.train(model, optimizer)
                model.register_forward_pre_hook(lambda *_: mark("forward"))
                model.register_forward_hook(_mark_its_backward)
            with machine.recording():
                self.train(model, optimizer)
            if has_values:
                machine.keep_last_contents()
            del model, optimizer, module  # now, so that it frees its locked pages on this machine
            gc.collect()
        return machine


_HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
_BUDGET = Cache(where="host", device_budget_bytes=2 * WIDTH * WIDTH * 4)
_CHECKS = Checks(interval=1, on_damage="regather", unnoticed_edits=True)
_ZERO = Wire(weights="int8", as_values=True, gradients="int4", feedback=True)
_FEEDBACK = Wire(weights="int4", gradients="int2", feedback=True, exact_every=2)

_HOST: dict[str, Any] = {"cache": "host"}
_OFFLOAD: dict[str, Any] = {"offload_policy": CPUOffloadPolicy()}
_LOSSLESS: dict[str, Any] = {"cache": "host", "wire": "lossless", "mp_policy": _HALF}
_LONGER = training(steps=3)
_BY_MICRO_BATCHES = training(micro_batches=2)

ENGINE: dict[str, Program] = {
    "cache none": Program(),
    "cache host": Program(options=_HOST),
    "cache device": Program(options={"cache": "device"}),
    "cache budget": Program(options={"cache": _BUDGET}),
    "one node": Program(nodes=1),
    "one rank per node": Program(local=1, options=_HOST),
    "frozen, cache host": Program(options=_HOST, prepare=freeze_blocks, train=_LONGER),
    "LoRA, cache host": Program(options=_HOST, prepare=adapt, train=training(steps=3, micro_batches=2)),
    "LoRA, cache budget": Program(options={"cache": _BUDGET}, prepare=adapt, train=_LONGER),
    "LoRA, cache host until backward": Program(
        options={"cache": Cache(where="host", until="backward")}, prepare=adapt, train=_LONGER
    ),
    "LoRA, cache device until backward": Program(
        options={"cache": Cache(where="device", until="backward")}, prepare=adapt, train=_BY_MICRO_BATCHES
    ),
    "frozen, read by the host": Program(options=_HOST, prepare=freeze_blocks, train=read_by_host),
    "thawed, cache host": Program(options=_HOST, prepare=freeze_blocks, train=thawed),
    "accumulation": Program(train=training(micro_batches=3)),
    "accumulation, a block skipped": Program(options=_HOST, train=training(micro_batches=2, skip=0)),
    "a parameter unused": Program(prepare=add_idle),
    "accumulation into .grad": Program(options={"cache": "device"}, train=training(micro_batches=2, syncs_all=True)),
    "prefetch": Program(options=_HOST, sharded=prefetch),
    "prefetch three units": Program(options={"cache": "host", "prefetch": Prefetch(units=3)}),
    "prefetch bytes": Program(options={"wire": _ZERO, "prefetch": Prefetch(budget_bytes=3 * WIDTH * WIDTH * 4)}),
    "recomputation": Program(options=_HOST, prepare=recompute),
    "recomputation, accumulation": Program(prepare=recompute, train=_BY_MICRO_BATCHES),
    "two forwards": Program(options=_HOST, train=two_forwards),
    "no reshard": Program(options={"cache": "host", "reshard_after_forward": False}),
    "cache rank": Program(options={"cache": "rank"}, train=training(steps=3, micro_batches=2)),
    "cache rank, evaluation": Program(options={"cache": "rank"}, train=evaluated),
    "cache rank, LoRA, mixed precision": Program(
        options={"cache": "rank", "mp_policy": _HALF}, prepare=adapt, train=_LONGER
    ),
    "cache rank, offload": Program(options={"cache": "rank", "offload_policy": CPUOffloadPolicy()}, train=_LONGER),
    "cache rank, 4 bits": Program(options={"cache": "rank", "wire": "4bit"}, train=_LONGER),
    "cache auto": Program(
        options={"cache": Cache(where="auto", device_bytes=5 * WIDTH * WIDTH * 4, host_bytes=2 * WIDTH * WIDTH * 4)},
        train=training(steps=4, micro_batches=2),
    ),
    "cache auto, 4 bits": Program(
        options={"cache": Cache(where="auto", device_bytes=0, host_bytes=1 << 30), "wire": "4bit"},
        train=training(steps=4),
    ),
    "placed by hand": Program(prepare=freeze_blocks, train=moved_between_steps),
    "gradients wait whole": Program(
        options={"cache": Cache(where="host", gradients="rank")}, train=training(steps=3, micro_batches=3)
    ),
    "gradients wait whole, a block skipped": Program(
        options={"cache": Cache(gradients="rank")}, train=training(micro_batches=2, skip=0)
    ),
    "Gloo, cache rank": Program(backend="gloo", options={"cache": "rank"}, train=_LONGER),
    "mixed precision": Program(options={"cache": "host", "mp_policy": _HALF}, train=_BY_MICRO_BATCHES),
    "clipping": Program(train=clipped),
    "evaluation": Program(options=_HOST, train=evaluated),
    "failed backward": Program(options=_HOST, train=abandoned),
    "another stream": Program(options=_HOST, train=on_another_stream),
    "late reduction": Program(train=late_reduction),
    "step in backward": Program(train=step_in_backward),
    "overlapped optimizer": Program(train=overlapped_optimizer, optimizer=_sgd),
    "Muon": Program(optimizer=partial(Muon, lr=1e-2)),
    "Shampoo": Program(optimizer=partial(Shampoo, lr=1e-2)),
    "AdamW8bit": Program(optimizer=partial(AdamW8bit, lr=1e-2)),
    "8 bits, cache host": Program(options={"cache": "host", "wire": "8bit"}, train=_LONGER),
    "4 bits, cache device": Program(options={"cache": "device", "wire": "4bit"}, train=_LONGER),
    "4 bits, cache host, evaluation": Program(options={"cache": "host", "wire": "4bit"}, train=evaluated),
    "lossless, cache device": Program(
        options={"cache": "device", "wire": "lossless", "mp_policy": _HALF}, train=_LONGER
    ),
    "lossless, cache host, evaluation": Program(
        options={"cache": "host", "wire": "lossless-4bit", "mp_policy": _HALF}, train=evaluated
    ),
    "lossless, a block skipped": Program(options=_LOSSLESS, train=training(steps=3, micro_batches=2, skip=0)),
    "lossless, recomputation": Program(prepare=recompute, options=_LOSSLESS, train=_LONGER),
    "lossless, prefetch": Program(sharded=prefetch, options=_LOSSLESS, train=_LONGER),
    "lossless, nested units": Program(prepare=nest, options=_LOSSLESS, train=_LONGER),
    "lossless, failed forward": Program(options=_LOSSLESS, train=abandoned_forward),
    "lossless, half frozen": Program(prepare=add_frozen, options=_LOSSLESS, train=_LONGER),
    "copies compared": Program(options={"cache": "host", "wire": _FEEDBACK}, train=without_reading),
    "feedback": Program(options={"cache": "host", "wire": _FEEDBACK}, train=training(steps=3, micro_batches=2)),
    "ZeRO++": Program(options={"wire": _ZERO}),
    "checks": Program(options={"cache": "host", "checks": _CHECKS}),
    "checks, LoRA": Program(options={"cache": "host", "checks": _CHECKS}, prepare=adapt),
    "checks, 4 bits": Program(options={"cache": "host", "wire": "4bit", "checks": _CHECKS}),
    "replicas": Program(islands=2, local=1),
    "replicas, late sums": Program(islands=2, local=1, train=training(micro_batches=2, late_sums=True)),
    "replicas, 4 bits": Program(islands=2, local=1, width=32, options={"cache": "host", "wire": "4bit"}, train=_LONGER),
    "replicas, feedback, accumulation": Program(
        islands=2, width=32, options={"cache": "host", "wire": _FEEDBACK}, train=_BY_MICRO_BATCHES
    ),
    "offload": Program(options=_OFFLOAD),
    "offload, cache host": Program(options={**_OFFLOAD, "cache": "host"}),
    "offload, accumulation": Program(options=_OFFLOAD, train=training(micro_batches=2, syncs_all=True)),
    "offload, edited by the host": Program(options=_OFFLOAD, train=edited_by_host),
    "offload, edited before backward": Program(
        options={**_OFFLOAD, "reshard_after_forward": False}, train=edited_before_backward
    ),
    "offload, edited after backward": Program(options=_OFFLOAD, train=edited_after_backward),
    "shares": Program(options={"cache": "host", "shares": [3, 1, 2, 2]}, train=_BY_MICRO_BATCHES),
    "shares, LoRA": Program(options={"cache": "device", "shares": [2, 5, 3, 3]}, prepare=adapt, train=_LONGER),
    "Gloo, shares": Program(backend="gloo", options={"cache": "host", "shares": [3, 1, 2, 2]}),
    "Gloo, cache none": Program(backend="gloo", train=_BY_MICRO_BATCHES),
    "Gloo, cache host": Program(backend="gloo", options=_HOST, prepare=recompute),
    "Gloo, cache device": Program(backend="gloo", options={"cache": "device"}, train=two_forwards),
    "Gloo, LoRA": Program(backend="gloo", options=_HOST, prepare=adapt, train=_LONGER),
    "Gloo, replicas": Program(backend="gloo", islands=2, local=1, options=_HOST),
    "Gloo, replicas, feedback": Program(
        backend="gloo", islands=2, width=32, options={"cache": "host", "wire": _FEEDBACK}, train=_BY_MICRO_BATCHES
    ),
    "offload, 8 bits": Program(options={**_OFFLOAD, "cache": "host", "wire": "8bit"}),
}
