"""Islands in one process: a Llama whose parameters have a first dim of islands, so that a GPU runs them all at once.

The numbers are those of `islands.py`, whose islands are processes, to rounding: benchmarks/tests/test_local_steps.py
compares the two. Slices, fragments, codecs and the learning rate are laconic's own. Inner steps, which take all the
time, are batched matrix products; frozen slices have gradients here, which a mask takes away.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.local_steps.islands import Shape
from laconic.codec import codec_named
from laconic.config import DataConfig, OptimizerConfig
from laconic.data import tokens as data
from laconic.data.batches import Sampler
from laconic.hf.tokenizer import load_tokenizer
from laconic.islands.fragments import SyncSchedule, fragment_of
from laconic.partial.patterns import Kind
from laconic.partial.updates import partial_updates, unsliced_state_dict
from laconic.strategies.optimizers import lr_at

Values = dict[str, Tensor]
"""A tensor for each parameter, by its name in the model."""
_BLOCK = 128  # the values that share a scale in the codecs of these runs
_DECAY, _BETAS, _CLIP = 0.1, (0.9, 0.95), 1.0
_EVAL_ROWS_AT_ONCE = 64


@dataclass(frozen=True, kw_only=True)
class Run:
    """A training of all islands; see `islands.Job` for fields of the same name."""

    islands: int = 8
    seed: int = 0
    steps: int
    warm_steps: int
    rows: int = 4
    length: int = 128
    shape: Shape = field(default_factory=Shape)
    lr: float = 1e-3
    warmup_steps: int = 20
    schedule: SyncSchedule
    codec: str = "int4"
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    slices: int = 1
    include: tuple[Kind, ...] = ("mlp", "attention")
    """The kinds of layers that are sliced."""
    sliced_lr: float | None = None
    sliced_momentum: float | None = None
    sliced_inner_lr: float = 1.0
    """The inner learning rate of slices, as a share of that of other parameters."""
    rotate: int = 0
    """After so many syncs of a fragment every island trains the next slice of it; 0: slices stay."""
    eval_rows: int = 1024

    @property
    def last_step(self) -> int:
        """The steps of the schedule of the learning rate."""
        return self.warm_steps + self.steps


class Corpus:
    """The tokens of the trainer's corpus, as `islands.py` reads them."""

    def __init__(self, folder: Path, length: int, device: torch.device) -> None:
        config = DataConfig(sequence_length=length)
        self._files = data.open_tokens(data.prepare(config, load_tokenizer(config.tokenizer), folder), config)
        self._length, self._device = length, device

    def batch(self, run: Run, step: int) -> Tensor:
        """Return the rows of all islands in a step, (islands, rows, length)."""
        offsets = []
        for island in range(run.islands):
            sampler = Sampler(
                seed=run.seed, num_tokens=len(self._files.train), sequence_length=run.length,
                micro_batch_size=run.rows, rank=island, world_size=run.islands,
            )  # fmt: skip
            offsets += list(sampler.offsets(step)[0])
        rows = data.rows_at(self._files.train, torch.tensor(offsets).numpy(), run.length)
        return torch.from_numpy(rows).to(self._device).view(run.islands, run.rows, run.length)

    def held(self, count: int) -> Tensor:
        """Return `count` held-out rows, (count, length), the same every time."""
        spread = len(self._files.evaluation) - self._length
        starts = torch.tensor([row * spread // count for row in range(count)])
        return torch.from_numpy(data.rows_at(self._files.evaluation, starts.numpy(), self._length)).to(self._device)


def losses(values: Mapping[str, Tensor], shape: Shape, tokens: Tensor) -> Tensor:
    """Return the next-token loss of each island, (islands,), on tokens (islands, rows, length)."""
    islands, rows, length = tokens.shape
    size = shape.hidden // shape.heads

    def linear(x: Tensor, name: str) -> Tensor:
        return torch.bmm(x, values[f"{name}.weight"].transpose(1, 2))

    def norm(x: Tensor, name: str) -> Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        return values[f"{name}.weight"][:, None] * (x * scale)

    def heads(x: Tensor) -> Tensor:
        return x.view(islands * rows, length, shape.heads, size).transpose(1, 2)

    frequencies = 10_000.0 ** (-torch.arange(0, size, 2, device=tokens.device) / size)
    angles = torch.outer(torch.arange(length, device=tokens.device), frequencies).repeat(1, 2)
    cos, sin = angles.cos(), angles.sin()

    def turned(x: Tensor) -> Tensor:
        left, right = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-right, left), dim=-1) * sin

    embeddings = values["model.embed_tokens.weight"]
    vocab = embeddings.shape[1]
    first = torch.arange(islands, device=tokens.device)[:, None] * vocab
    x = functional.embedding(tokens.flatten(1) + first, embeddings.flatten(0, 1))
    for index in range(shape.layers):
        layer = f"model.layers.{index}"
        y = norm(x, f"{layer}.input_layernorm")
        q, k, v = (heads(linear(y, f"{layer}.self_attn.{kind}_proj")) for kind in "qkv")
        y = functional.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True)
        x = x + linear(y.transpose(1, 2).reshape(islands, rows * length, -1), f"{layer}.self_attn.o_proj")
        y = norm(x, f"{layer}.post_attention_layernorm")
        y = functional.silu(linear(y, f"{layer}.mlp.gate_proj")) * linear(y, f"{layer}.mlp.up_proj")
        x = x + linear(y, f"{layer}.mlp.down_proj")
    logits = linear(norm(x, "model.norm"), "lm_head").view(islands, rows, length, vocab)[:, :, :-1]
    each = functional.cross_entropy(logits.flatten(0, 2), tokens[:, :, 1:].flatten(), reduction="none")
    return each.view(islands, -1).mean(1)


class Inner:
    """The inner optimizer of all islands: AdamW that touches no frozen slice, after clipping island by island."""

    def __init__(self, values: Values, decayed: set[str], masks: Values, sliced_lr: float) -> None:
        self.values, self._masks = values, masks
        sliced = [name for name in values if name in masks]
        whole = [name for name in values if name not in masks]
        self._decayed = [name for name in values if name in decayed]
        self._scales = {name: sliced_lr if name in masks else 1.0 for name in values}
        self._groups = [(whole, 1.0), (sliced, sliced_lr)]
        self.adam = torch.optim.AdamW(
            [{"params": [values[name] for name in names]} for names, _ in self._groups if names],
            lr=1.0, betas=_BETAS, weight_decay=0.0, fused=True,
        )  # fmt: skip

    def step(self, lr: float) -> None:
        """Take a step along `.grad` of the values, and forget it."""
        with torch.no_grad():
            for name, mask in self._masks.items():
                self.values[name].grad.mul_(mask)  # type: ignore[union-attr]
            gradients: list[Any] = [value.grad for value in self.values.values()]
            norms = torch.stack([torch.linalg.vector_norm(gradient.flatten(1), dim=1) for gradient in gradients])
            factors = (_CLIP / (torch.linalg.vector_norm(norms, dim=0) + 1e-6)).clamp(max=1.0)
            for gradient in gradients:
                gradient.mul_(factors.view(-1, *[1] * (gradient.dim() - 1)))
            for name in self._decayed:
                rate = lr * self._scales[name] * _DECAY
                value = self.values[name]
                value.mul_(1 - rate * self._masks[name] if name in self._masks else 1 - rate)
        scales = [scale for names, scale in self._groups if names]
        for group, scale in zip(self.adam.param_groups, scales, strict=True):
            group["lr"] = lr * scale
        self.adam.step()
        self.adam.zero_grad()

    def forget(self, name: str) -> None:
        """Drop the state of slices that an island does not train now."""
        state = self.adam.state[self.values[name]]
        for key in ("exp_avg", "exp_avg_sq"):
            state[key].mul_(self._masks[name])


class Fragment:
    """The outer parameters of one fragment, in the order in which they cross: shared ones, then slice by slice."""

    def __init__(self, run: Run, values: Values, masks: Values) -> None:
        self._run, self._values, self._masks = run, values, masks
        some = next(iter(values.values()))
        slices = torch.arange(1, run.slices + 1, device=some.device)
        order = [
            torch.einsum("s...,s->...", masks[name][: run.slices], slices.to(some.dtype)).flatten()
            if name in masks
            else torch.zeros(value[0].numel(), device=some.device)
            for name, value in values.items()
        ]
        slice_of = torch.cat(order)
        self._places = slice_of.argsort(stable=True)
        self._back = self._places.argsort()
        is_sliced = slice_of[self._places] > 0
        sliced_lr = run.outer_lr if run.sliced_lr is None else run.sliced_lr
        sliced_momentum = run.outer_momentum if run.sliced_momentum is None else run.sliced_momentum
        self._lr = torch.where(is_sliced, sliced_lr, run.outer_lr)
        self._beta = torch.where(is_sliced, sliced_momentum, run.outer_momentum)
        self._codec = codec_named(run.codec)
        self.flat = self._inner()[0].clone()
        self._momentum = torch.zeros_like(self.flat)
        self._syncs = 0

    def _flat(self, values: Mapping[str, Tensor]) -> Tensor:
        return torch.cat([values[name].flatten(1) for name in self._values], dim=1)[:, self._places]

    def _inner(self) -> Tensor:
        """The inner parameters of all islands, (islands, numel)."""
        return self._flat({name: value.detach() for name, value in self._values.items()})

    def mean(self) -> Tensor:
        """Return the mean pseudo-gradient, (numel,), after the two trips of a coded all-reduce."""
        whole = {name: torch.ones_like(value) for name, value in self._values.items()}
        trained = self._flat({**whole, **{name: self._masks[name] for name in self._values if name in self._masks}})
        terms = self._coded((self.flat - self._inner()) * trained)
        return self._coded((terms.sum(0) / trained.sum(0))[None])[0]

    def _coded(self, rows: Tensor) -> Tensor:
        """What arrives of rows (n, numel) that cross in as many parts as there are islands."""
        islands, (count, numel) = self._run.islands, rows.shape
        part = math.ceil(numel / islands)
        parts = functional.pad(rows, (0, islands * part - numel)).view(count * islands, part)
        padded = functional.pad(parts, (0, -part % _BLOCK)).flatten()  # every part begins a block
        decoded = self._codec.decode(self._codec.encode(padded), padded.numel())
        return decoded.view(count * islands, -1)[:, :part].reshape(count, -1)[:, :numel]

    def apply(self, mean: Tensor, inner: Inner) -> None:
        """Take the outer step, let all islands go on from its result, and rotate slices if it is time."""
        self._momentum = self._beta * self._momentum + mean
        self.flat = self.flat - self._lr * (mean + self._beta * self._momentum)
        for name, part in self.parts().items():
            self._values[name].copy_(part.expand_as(self._values[name]))
        self._syncs += 1
        if self._run.rotate and self._syncs % self._run.rotate == 0:
            for name in self._values:
                if name in self._masks:
                    self._masks[name].copy_(self._masks[name].roll(1, 0))
                    inner.forget(name)

    def parts(self) -> Values:
        """Return the outer parameters by name, (1, *shape)."""
        numel = [value[0].numel() for value in self._values.values()]
        cut = self.flat[self._back].split(numel)
        return {name: part.view(1, *self._values[name].shape[1:]) for name, part in zip(self._values, cut, strict=True)}


def masks_of(run: Run, device: torch.device) -> Values:
    """Return 1 where an island trains a sliced parameter and 0 elsewhere, (islands, *shape): see `partial_updates`."""
    if run.slices == 1:
        return {}
    found = []
    for index in range(run.slices):
        model = run.shape.build(run.length, seed=0, device="meta")
        partial_updates(model, slice_index=index, num_slices=run.slices, include=run.include)
        model.to_empty(device=device)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float(parameter.requires_grad))
        found.append(unsliced_state_dict(model))
    stacked = {name: torch.stack([each[name] for each in found]) for name in found[0]}
    return {
        name: stack.repeat(run.islands // run.slices, *[1] * (stack.dim() - 1))
        for name, stack in stacked.items()
        if not bool(stack.bool().all())
    }


class Batched:
    """The trainings on one device. Runs that begin with equal warm steps share them."""

    def __init__(self, folder: Path, length: int, device: torch.device) -> None:
        torch.set_float32_matmul_precision("high")  # this changes nothing on a CPU
        self.corpus, self._device = Corpus(folder, length, device), device
        self._warm: dict[tuple[Any, ...], Values] = {}

    def train(self, run: Run) -> float:
        """Return the loss of the outer parameters on held-out rows after a run."""
        start = self._begin(run)
        values = {name: _stacked(value, run.islands) for name, value in start.items()}
        decayed = {name for name, value in start.items() if value.dim() >= 2}
        masks = masks_of(run, self._device)
        inner = Inner(values, decayed, masks, run.sliced_inner_lr)
        assigned = fragment_of(values, run.schedule.fragments, run.schedule.pattern)
        fragments = [
            Fragment(run, {name: value for name, value in values.items() if assigned[name] == index}, masks)
            for index in range(run.schedule.fragments)
        ]
        under_way: tuple[int, Tensor] | None = None
        interval = run.schedule.interval
        for step in range(run.steps):
            tokens = self.corpus.batch(run, run.warm_steps + step)
            losses(values, run.shape, tokens).sum().backward()
            inner.step(_rate(run, run.warm_steps + step) * min(1.0, (step + 1) / run.warmup_steps))
            rounds, since = divmod(step + 1, interval)
            with torch.no_grad():
                if since == 0:
                    index = rounds % len(fragments)
                    under_way = index, fragments[index].mean()
                if under_way is not None and (since >= run.schedule.overlap or step + 1 == run.steps):
                    fragments[under_way[0]].apply(under_way[1], inner)
                    under_way = None
        outer = {name: part for fragment in fragments for name, part in fragment.parts().items()}
        return self._evaluated(outer, run)

    def _begin(self, run: Run) -> Values:
        """The parameters after the warm steps: data parallel, whose batch has the rows of all islands."""
        key = (
            run.islands,
            run.seed,
            run.warm_steps,
            run.rows,
            run.length,
            run.shape,
            run.lr,
            run.warmup_steps,
            run.last_step,
        )
        if key not in self._warm:
            model: nn.Module = run.shape.build(run.length, seed=run.seed).to(self._device)
            values = {name: _stacked(p.detach(), 1) for name, p in model.named_parameters()}
            inner = Inner(values, {name for name, p in model.named_parameters() if p.dim() >= 2}, {}, 1.0)
            for step in range(run.warm_steps):
                tokens = self.corpus.batch(run, step).flatten(0, 1)[None]
                losses(values, run.shape, tokens).sum().backward()
                inner.step(_rate(run, step))
            self._warm[key] = {name: value.detach()[0] for name, value in values.items()}
        return self._warm[key]

    @torch.no_grad()
    def _evaluated(self, values: Values, run: Run) -> float:
        rows = self.corpus.held(run.eval_rows).split(_EVAL_ROWS_AT_ONCE)
        return float(sum(losses(values, run.shape, some[None])[0] * len(some) for some in rows)) / run.eval_rows


def _rate(run: Run, step: int) -> float:
    schedule = OptimizerConfig(lr=run.lr, warmup_steps=run.warmup_steps, lr_schedule="cosine")
    return lr_at(step, schedule, total_steps=run.last_step)


def _stacked(value: Tensor, islands: int) -> Tensor:
    return value.expand(islands, *value.shape).clone().requires_grad_()
