"""Islands as one stack: all of them train in one process, as one batch of models, for machines with fewer cores.

A job's islands have small models, and a processor spends most of its time between their operations. Here each parameter
has a first dim of islands, and each operation computes for all. The rest is the library's own: which parts an island
trains (`partial_updates`), the fragments and their turns, the codec, and the outer optimizer of each fragment. A test
compares a job's losses with those of islands that are ranks (`run_jobs`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import laconic
from benchmarks.local_steps.islands import BETAS, DECAY, MAX_NORM, Answer, Job, Rows
from laconic.codec import codec_named
from laconic.islands.all_reduce import sent_bytes_of
from laconic.islands.fragments import SyncSchedule, fragment_of
from laconic.islands.outer_optimizer import Holders, OuterFragment
from laconic.ragged.parts import slice_of_parameters, sliced_parameters

Stack = dict[str, Tensor]
"""Parameters by name, each of shape (islands, *its own)."""
_EVAL_ROWS_AT_ONCE = 64


class Llama:
    """The arithmetic of a job's model for a stack of parameters."""

    def __init__(self, job: Job, model: nn.Module) -> None:
        """Read from `model`, which may be sliced, how parts of parameters are joined."""
        self._shape, self._size = job.shape, job.shape.hidden // job.shape.heads
        self._sliced = sliced_parameters(model)
        frequencies = 10_000.0 ** (-torch.arange(0, self._size, 2) / self._size)
        angles = torch.outer(torch.arange(job.length), frequencies).repeat(1, 2)
        self._cos, self._sin = angles.cos().to(job.device), angles.sin().to(job.device)

    def losses(self, stack: Stack, rows: Tensor) -> Tensor:
        """The mean next-token loss of each island, (islands,), on its rows, (islands, rows, length)."""
        islands, num_rows, length = rows.shape
        places = torch.arange(islands, device=rows.device)[:, None]
        x = stack["model.embed_tokens.weight"][places, rows.flatten(1)]  # (islands, rows * length, hidden)
        for layer in range(self._shape.layers):
            x = x + self._attention(stack, f"model.layers.{layer}", x, num_rows)
            y = self._normed(stack, f"model.layers.{layer}.post_attention_layernorm", x)
            mlp = f"model.layers.{layer}.mlp"
            gate, up = (self._linear(stack, f"{mlp}.{name}_proj", y) for name in ("gate", "up"))
            x = x + self._linear(stack, f"{mlp}.down_proj", functional.silu(gate) * up)
        logits = self._linear(stack, "lm_head", self._normed(stack, "model.norm", x))
        logits = logits.unflatten(1, (num_rows, length))[:, :, :-1]
        told = functional.cross_entropy(logits.flatten(0, 2), rows[:, :, 1:].flatten(), reduction="none")
        return told.view(islands, -1).mean(1)

    def _attention(self, stack: Stack, layer: str, x: Tensor, num_rows: int) -> Tensor:
        y = self._normed(stack, f"{layer}.input_layernorm", x)

        def heads(name: str) -> Tensor:  # (islands * rows, heads, length, size)
            flat = self._linear(stack, f"{layer}.self_attn.{name}_proj", y)
            return flat.view(len(x) * num_rows, -1, self._shape.heads, self._size).transpose(1, 2)

        q, k, v = self._rotated(heads("q")), self._rotated(heads("k")), heads("v")
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        return self._linear(stack, f"{layer}.self_attn.o_proj", mixed.reshape(x.shape))

    def _rotated(self, x: Tensor) -> Tensor:
        left, right = x.chunk(2, dim=-1)
        return x * self._cos + torch.cat((-right, left), dim=-1) * self._sin

    def _normed(self, stack: Stack, name: str, x: Tensor) -> Tensor:
        return stack[f"{name}.weight"][:, None] * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))

    def _linear(self, stack: Stack, name: str, x: Tensor) -> Tensor:
        return torch.bmm(x, self._whole(stack, f"{name}.weight").mT)

    def _whole(self, stack: Stack, name: str) -> Tensor:
        sliced = self._sliced.get(name)
        if sliced is None:
            return stack[name]
        prefix = name.removesuffix(sliced.name)
        parts = [stack[prefix + part] for part in sliced.part_names]
        assert len(parts) == sliced.num_slices  # no shared part, so slices follow one another
        return torch.cat(parts, dim=1 + sliced.dim)


class _Counted(Holders):
    """The holders of each part where island i trains slice i mod `num_slices`."""

    def __init__(self, model: nn.Module, job: Job) -> None:
        self.num_islands = job.islands
        self._slices = {name: each for name, each in slice_of_parameters(model).items() if each is not None}
        self._holders = {name: len(range(each, job.islands, job.slices)) for name, each in self._slices.items()}


def run_stacked(folder: str, job: Job) -> Answer:
    """Run a job of islands in this process. `folder` keeps the tokens, and the weights with which jobs begin."""
    torch.set_num_threads(1)
    rows = Rows(Path(folder), job)
    model = job.shape.build(job.length, seed=job.seed, device=job.device)
    if job.warm_steps:
        rows.keep(job.start, model, lambda: _train_together(job.start, model, rows))
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    if job.slices > 1:
        laconic.partial_updates(model, slice_index=0, num_slices=job.slices, include=job.include)
    islands = _Islands(job, model)
    evaluations = [(0, islands.evaluate(rows))]
    sent = []
    for step in range(job.steps):
        islands.inner.step(job.lr_of(step), rows.of_all(job, step))
        sent.append(islands.sync(step + 1))
        if step + 1 == job.steps or (job.eval_every and (step + 1) % job.eval_every == 0):
            evaluations.append((step + 1, islands.evaluate(rows)))
    return Answer(num_parameters=num_parameters, evaluations=evaluations, sent_bytes=sent, wire_bytes=[])


def _train_together(job: Job, model: nn.Module, rows: Rows) -> None:
    """Every-step data parallel: one model on the rows of all islands."""
    llama = Llama(job, model)
    stack = {name: parameter.detach()[None].clone() for name, parameter in model.named_parameters()}
    inner = _Inner(llama, stack, {name: torch.ones(1, device=job.device) for name in stack})
    for step in range(job.steps):
        inner.step(job.lr_of(step), rows.of_all(job, step).flatten(0, 1)[None])
    for name, parameter in model.named_parameters():
        parameter.data.copy_(stack[name][0])


class _Inner:
    """AdamW and clipping of every island by itself, as `adamw_of` and `clip_grad_norm_` do them."""

    def __init__(self, llama: Llama, stack: Stack, trains: Stack) -> None:
        self._llama, self._stack, self._trains = llama, stack, trains
        for value in stack.values():
            value.requires_grad_()
        self._adam = torch.optim.AdamW(stack.values(), lr=1.0, betas=BETAS, weight_decay=0.0, fused=True)

    def step(self, lr: float, rows: Tensor) -> None:
        """Take one step of all islands. What an island does not train has no gradient, no decay, and does not move."""
        self._llama.losses(self._stack, rows).sum().backward()
        with torch.no_grad():
            squares = torch.zeros(len(rows), device=rows.device)
            for name, value in self._stack.items():
                assert value.grad is not None
                value.grad.mul_(_as(self._trains[name], value))
                squares += value.grad.flatten(1).square().sum(1)
            scale = (MAX_NORM / (squares.sqrt() + 1e-6)).clamp(max=1.0)
            for name, value in self._stack.items():
                value.grad.mul_(_as(scale, value))  # type: ignore[union-attr]
                if value.dim() > 2:
                    value.mul_(1 - lr * DECAY * _as(self._trains[name], value))
        self._adam.param_groups[0]["lr"] = lr
        self._adam.step()
        self._adam.zero_grad()


def _as(by_island: Tensor, value: Tensor) -> Tensor:
    return by_island.view(-1, *[1] * (value.dim() - 1))


class _Islands:
    """The stack of all islands, their outer parameters, and the fragment in flight."""

    def __init__(self, job: Job, model: nn.Module) -> None:
        self._job, self._codec = job, codec_named(job.codec)
        self._schedule = SyncSchedule(every=job.every, fragments=job.fragments, overlap=job.overlap)
        self._llama, of = Llama(job, model), slice_of_parameters(model)
        outer = laconic.OuterSGD(
            lr=job.outer_lr, momentum=job.outer_momentum, sliced_lr=job.sliced_lr, sliced_momentum=job.sliced_momentum
        )
        parameters = dict(model.named_parameters())
        assigned, holders = fragment_of(parameters, job.fragments), _Counted(model, job)
        self._fragments = [
            OuterFragment({n: p for n, p in parameters.items() if assigned[n] == index}, outer, holders)
            for index in range(job.fragments)
        ]
        self._stack = {n: p.detach().expand(job.islands, *p.shape).clone() for n, p in parameters.items()}
        numbers = torch.arange(job.islands, device=job.device) % job.slices
        always = torch.ones(job.islands, device=job.device)
        trains = {n: always if (own := of.get(n)) is None else (numbers == own).float() for n in parameters}
        self._trains = trains
        self.inner = _Inner(self._llama, self._stack, trains)
        self._in_flight: tuple[int, Tensor] | None = None

    @torch.no_grad()
    def sync(self, steps: int) -> int:
        """Send and apply what is due after so many steps. Returns the bytes of an exchange that was applied."""
        since = steps % self._schedule.interval
        if since == 0:
            index = self._schedule.rounds(steps) % self._job.fragments
            self._in_flight = index, self._mean(self._fragments[index])
        if self._in_flight is None or (since < self._schedule.overlap and steps < self._job.steps):
            return 0
        (index, mean), self._in_flight = self._in_flight, None
        fragment = self._fragments[index]
        with torch.enable_grad():
            fragment.step(mean)
        for name, value in fragment.named(fragment.flat).items():
            self._stack[name].copy_(value)
        return sent_bytes_of(mean.numel(), self._job.islands, self._codec)

    def _mean(self, fragment: OuterFragment) -> Tensor:
        """The mean of all pseudo-gradients over the islands that train each part, coded on both trips."""
        numel = fragment.flat.numel()
        drifts = torch.cat([
            (fragment.named(fragment.flat)[name].to(self._stack[name].device) - self._stack[name]).flatten(1)
            for name in fragment.parameters
        ], dim=1).cpu()  # fmt: skip
        divisor: Any = float(self._job.islands) if fragment.divisor is None else fragment.divisor
        total = sum(self._coded(drift) for drift in drifts)
        assert isinstance(total, Tensor)
        assert total.numel() == numel
        return self._coded(total / divisor)

    def _coded(self, values: Tensor) -> Tensor:
        return self._codec.decode(self._codec.encode(values), values.numel())

    @torch.no_grad()
    def evaluate(self, rows: Rows) -> float:
        """The mean loss of the outer parameters on the held-out rows."""
        outer = {n: v[None].to(self._job.device) for f in self._fragments for n, v in f.named(f.flat).items()}
        batches = rows.held(self._job).split(_EVAL_ROWS_AT_ONCE)
        return (
            sum(float(self._llama.losses(outer, batch[None])) * len(batch) for batch in batches) / self._job.eval_rows
        )
