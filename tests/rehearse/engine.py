"""Programs of the engine: one or two optimizer steps of each way to train."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
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


class Beside(nn.Module):
    """Layers, the first ones in turn, beside a frozen one."""

    def __init__(self, *own: nn.Module) -> None:
        super().__init__()
        self.own = nn.Sequential(*own)  # first, so no wait for its crossing includes the other's copy
        self.base = square().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """Add both outputs."""
        return self.own(x) + self.base(x)


class Around(nn.Module):
    """A layer around another one, which is a unit of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.own = square(), square()

    def forward(self, x: Tensor) -> Tensor:
        """Run both layers."""
        return self.own(torch.tanh(self.inner(x)))


def square() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, bias=False)


def batch(seed: int, width: int = WIDTH) -> Tensor:
    """A batch on the device."""
    return torch.randn(4, width, generator=torch.Generator().manual_seed(seed)).to("cuda")


def loss_of(model: Any, seed: int, **kwargs: Any) -> Tensor:
    """The loss of one batch."""
    return model(batch(seed, model.out.in_features), **kwargs).square().mean()


def take(optimizer: torch.optim.Optimizer) -> None:
    """Take a step; gradients are None afterwards."""
    optimizer.step()
    optimizer.zero_grad()


def halve(parameters: Iterable[Tensor]) -> None:
    """Edit weights."""
    with torch.no_grad():
        for parameter in parameters:
            parameter.mul_(0.5)


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
            take(optimizer)
            loss.item()

    return run


def two_forwards(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """One backward through two forwards."""
    for step in range(2):
        (loss_of(model, step) + loss_of(model, step + 5)).backward()
        take(optimizer)


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
        take(optimizer)


def without_reading(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Train without a read by the host, which would wait for the device."""
    x = batch(0)
    for _ in range(4):
        model(x).square().mean().backward()
        take(optimizer)


def read_by_host(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """The host reads parameters, where it can, right after they were used."""
    for step in range(2):
        loss_of(model, step).backward()
        for parameter in model.parameters():
            if parameter.to_local().device.type == "cpu":
                parameter.to_local().sum().item()
        take(optimizer)


def edited_by_host(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """The host edits weights that rest with it, right after a forward has used them."""
    for step in range(2):
        loss_of(model, step).backward()
        with torch.no_grad():
            model(batch(7))
        take(optimizer)
        with torch.no_grad():
            model(batch(8))
        halve(model.parameters())


def edited_before_backward(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """The host edits weights that rest with it between a forward and its backward, which takes the edited ones."""
    for step in range(2):
        loss = loss_of(model, step)
        halve(optimizer.param_groups[0]["params"])
        loss.backward()
        take(optimizer)


def edited_after_backward(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """The host edits weights, also those of a block that backward leaves out: their gather begins in vain."""
    model.blocks[0].register_forward_hook(lambda block, args, output: args[0])
    for step in range(2):
        loss_of(model, step).backward()
        take(optimizer)
        halve(model.parameters())


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
    _replace_blocks(model, lambda: Beside(nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)))
    model.out.requires_grad_(False)


def freeze_blocks(model: Net) -> None:
    """Train the last layer only."""
    model.blocks.requires_grad_(False)


def nest(model: Net) -> None:
    """Let each block have a unit inside."""
    _replace_blocks(model, Around)


def add_frozen(model: Net) -> None:
    """Give each block a frozen layer: each unit has a bucket that stays and one that crosses."""
    _replace_blocks(model, lambda: Beside(square()))


def _replace_blocks(model: Net, make: Callable[[], nn.Module]) -> None:
    model.blocks = nn.ModuleList(make() for _ in model.blocks)
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


def program(kind: Any = Program, *, steps: int = 2, micro_batches: int = 1, **given: Any) -> Any:
    """A program; what is given and no field of it is an option of `fully_shard`."""
    own = {"train": training(steps=steps, micro_batches=micro_batches)}
    own |= {name: given.pop(name) for name in [*given] if name in kind.__dataclass_fields__}
    return kind(options=given, **own)


_HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
_BUDGET = Cache(where="host", device_budget_bytes=2 * WIDTH * WIDTH * 4)
_AUTO = Cache(where="auto", device_bytes=5 * WIDTH * WIDTH * 4, host_bytes=2 * WIDTH * WIDTH * 4)
_AUTO_HOST = Cache(where="auto", device_bytes=0, host_bytes=1 << 30)
_CHECKS = Checks(interval=1, on_damage="regather", unnoticed_edits=True)
_ZERO = Wire(weights="int8", as_values=True, gradients="int4", feedback=True)
_FEEDBACK = Wire(weights="int4", gradients="int2", feedback=True, exact_every=2)
_LOSSLESS: dict[str, Any] = {"cache": "host", "wire": "lossless", "mp_policy": _HALF}
_OFFLOAD: dict[str, Any] = {"offload_policy": CPUOffloadPolicy()}
_SKIPS = training(micro_batches=2, skip=0)

ENGINE: dict[str, Program] = {
    "cache none": program(),
    "cache host": program(cache="host"),
    "cache device": program(cache="device"),
    "cache budget": program(cache=_BUDGET),
    "one node": program(nodes=1),
    "one rank per node": program(local=1, cache="host"),
    "frozen, cache host": program(cache="host", prepare=freeze_blocks, steps=3),
    "LoRA, cache host": program(cache="host", prepare=adapt, steps=3, micro_batches=2),
    "LoRA, cache budget": program(cache=_BUDGET, prepare=adapt, steps=3),
    "LoRA, cache host until backward": program(cache=Cache(where="host", until="backward"), prepare=adapt, steps=3),
    "LoRA, cache device until backward": program(
        cache=Cache(where="device", until="backward"), prepare=adapt, micro_batches=2
    ),
    "frozen, read by the host": program(cache="host", prepare=freeze_blocks, train=read_by_host),
    "thawed, cache host": program(cache="host", prepare=freeze_blocks, train=thawed),
    "accumulation": program(micro_batches=3),
    "accumulation, a block skipped": program(cache="host", train=_SKIPS),
    "a parameter unused": program(prepare=add_idle),
    "accumulation into .grad": program(cache="device", train=training(micro_batches=2, syncs_all=True)),
    "prefetch": program(cache="host", sharded=prefetch),
    "prefetch three units": program(cache="host", prefetch=Prefetch(units=3)),
    "prefetch bytes": program(wire=_ZERO, prefetch=Prefetch(budget_bytes=3 * WIDTH * WIDTH * 4)),
    "recomputation": program(cache="host", prepare=recompute),
    "recomputation, accumulation": program(prepare=recompute, micro_batches=2),
    "two forwards": program(cache="host", train=two_forwards),
    "no reshard": program(cache="host", reshard_after_forward=False),
    "cache rank": program(cache="rank", steps=3, micro_batches=2),
    "cache rank, evaluation": program(cache="rank", train=evaluated),
    "cache rank, LoRA, mixed precision": program(cache="rank", mp_policy=_HALF, prepare=adapt, steps=3),
    "cache rank, offload": program(cache="rank", **_OFFLOAD, steps=3),
    "cache rank, 4 bits": program(cache="rank", wire="4bit", steps=3),
    "cache auto": program(cache=_AUTO, steps=4, micro_batches=2),
    "cache auto, 4 bits": program(cache=_AUTO_HOST, wire="4bit", steps=4),
    "placed by hand": program(prepare=freeze_blocks, train=moved_between_steps),
    "gradients wait whole": program(cache=Cache(where="host", gradients="rank"), steps=3, micro_batches=3),
    "gradients wait whole, a block skipped": program(cache=Cache(gradients="rank"), train=_SKIPS),
    "Gloo, cache rank": program(backend="gloo", cache="rank", steps=3),
    "mixed precision": program(cache="host", mp_policy=_HALF, micro_batches=2),
    "clipping": program(train=clipped),
    "evaluation": program(cache="host", train=evaluated),
    "failed backward": program(cache="host", train=abandoned),
    "another stream": program(cache="host", train=on_another_stream),
    "late reduction": program(train=late_reduction),
    "step in backward": program(train=step_in_backward),
    "overlapped optimizer": program(train=overlapped_optimizer, optimizer=_sgd),
    "Muon": program(optimizer=partial(Muon, lr=1e-2)),
    "Shampoo": program(optimizer=partial(Shampoo, lr=1e-2)),
    "AdamW8bit": program(optimizer=partial(AdamW8bit, lr=1e-2)),
    "8 bits, cache host": program(cache="host", wire="8bit", steps=3),
    "4 bits, cache device": program(cache="device", wire="4bit", steps=3),
    "4 bits, cache host, evaluation": program(cache="host", wire="4bit", train=evaluated),
    "lossless, cache device": program(cache="device", wire="lossless", mp_policy=_HALF, steps=3),
    "lossless, cache host, evaluation": program(cache="host", wire="lossless-4bit", mp_policy=_HALF, train=evaluated),
    "lossless, a block skipped": program(**_LOSSLESS, train=training(steps=3, micro_batches=2, skip=0)),
    "lossless, recomputation": program(**_LOSSLESS, prepare=recompute, steps=3),
    "lossless, prefetch": program(**_LOSSLESS, sharded=prefetch, steps=3),
    "lossless, nested units": program(**_LOSSLESS, prepare=nest, steps=3),
    "lossless, failed forward": program(**_LOSSLESS, train=abandoned_forward),
    "lossless, half frozen": program(**_LOSSLESS, prepare=add_frozen, steps=3),
    "copies compared": program(cache="host", wire=_FEEDBACK, train=without_reading),
    "feedback": program(cache="host", wire=_FEEDBACK, steps=3, micro_batches=2),
    "ZeRO++": program(wire=_ZERO),
    "checks": program(cache="host", checks=_CHECKS),
    "checks, LoRA": program(cache="host", checks=_CHECKS, prepare=adapt),
    "checks, 4 bits": program(cache="host", wire="4bit", checks=_CHECKS),
    "replicas": program(islands=2, local=1),
    "replicas, late sums": program(islands=2, local=1, train=training(micro_batches=2, late_sums=True)),
    "replicas, 4 bits": program(islands=2, local=1, width=32, cache="host", wire="4bit", steps=3),
    "replicas, feedback, accumulation": program(islands=2, width=32, cache="host", wire=_FEEDBACK, micro_batches=2),
    "offload": program(**_OFFLOAD),
    "offload, cache host": program(**_OFFLOAD, cache="host"),
    "offload, accumulation": program(**_OFFLOAD, train=training(micro_batches=2, syncs_all=True)),
    "offload, edited by the host": program(**_OFFLOAD, train=edited_by_host),
    "offload, edited before backward": program(**_OFFLOAD, reshard_after_forward=False, train=edited_before_backward),
    "offload, edited after backward": program(**_OFFLOAD, train=edited_after_backward),
    "shares": program(cache="host", shares=[3, 1, 2, 2], micro_batches=2),
    "shares, LoRA": program(cache="device", shares=[2, 5, 3, 3], prepare=adapt, steps=3),
    "Gloo, shares": program(backend="gloo", cache="host", shares=[3, 1, 2, 2]),
    "Gloo, cache none": program(backend="gloo", micro_batches=2),
    "Gloo, cache host": program(backend="gloo", cache="host", prepare=recompute),
    "Gloo, cache device": program(backend="gloo", cache="device", train=two_forwards),
    "Gloo, LoRA": program(backend="gloo", cache="host", prepare=adapt, steps=3),
    "Gloo, replicas": program(backend="gloo", islands=2, local=1, cache="host"),
    "Gloo, replicas, feedback": program(
        backend="gloo", islands=2, width=32, cache="host", wire=_FEEDBACK, micro_batches=2
    ),
    "offload, 8 bits": program(**_OFFLOAD, cache="host", wire="8bit"),
}
