"""Islands in one process: a Llama whose parameters have a first dim of islands, so that a GPU runs them all at once.

The numbers are those of `islands.py`, whose islands are processes, to rounding: benchmarks/tests/test_local_steps.py
compares the two. Slices, fragments, codecs and the learning rate are laconic's own. Inner steps, which take all the
time, are batched matrix products; frozen slices have gradients here, which a mask takes away.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.local_steps.islands import (
    BETAS,
    DECAY,
    MAX_NORM,
    Job,
    Shape,
    held_rows,
    lr_of,
    open_corpus,
    rows_of,
    start_of,
)
from laconic.codec import Codec, codec_named
from laconic.islands.fragments import SyncSchedule, fragment_of
from laconic.optim.muon import orthogonalize
from laconic.partial.patterns import Kind
from laconic.partial.updates import partial_updates, unsliced_state_dict

Values = dict[str, Tensor]
"""A tensor for each parameter, by its name in the model."""
Key = TypeVar("Key")
Run = Generator[None, None, Values]
"""A training that pauses after each step, and returns its parameters."""
_EVAL_ROWS_AT_ONCE = 64
_RUNS_AT_ONCE = 8
_MUON_MOMENTUM = 0.95


@dataclass(frozen=True, kw_only=True)
class BatchedJob(Job):
    """A job of local steps, or of data parallel over the rows of all islands, on one device. There is no `mixing`."""

    name: str = ""
    islands: int = 8
    include: tuple[Kind, ...] = ("mlp", "attention")
    """The kinds of layers that are sliced."""
    sliced_inner_lr: float = 1.0
    """The inner learning rate of slices, as a share of that of other parameters."""
    rotate: int = 0
    """After so many syncs of a fragment every island trains the next slice of it; 0: slices stay."""
    inner: Literal["adamw", "muon"] = "adamw"
    """The inner optimizer: AdamW, or Muon for the matrices of layers, with steps as large as AdamW's."""
    last_codec: str = ""
    """The codec of the last exchange, which sends the feedback that is left, too; "": as of all others."""
    speeds: tuple[float, ...] = ()
    """The steps of each island in one of the fastest, which all syncs wait for alone; means weigh by tokens. Empty: all
    are equally fast."""

    @property
    def tokens(self) -> float:
        """The tokens of all islands in the whole job."""
        return self.steps * self.rows * self.length * (sum(self.speeds) or self.islands)


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
    """The inner steps of all islands: AdamW that touches no frozen slice, after clipping island by island.

    On a GPU a step is one CUDA graph, because its launches take more time than its kernels.
    """

    _EAGER_STEPS = 2
    """The steps that make the states of the optimizer, before the graph is captured."""

    def __init__(
        self,
        values: Values,
        decayed: set[str],
        masks: Values,
        sliced_lr: float,
        shape: Shape,
        *,
        has_muon: bool = False,
        speeds: tuple[float, ...] = (),
    ) -> None:
        self.values, self._masks, self._shape = values, masks, shape
        self._decayed = [name for name in values if name in decayed]
        device = next(iter(values.values())).device
        self._averages = {
            name: torch.zeros_like(value)
            for name, value in values.items()
            if has_muon and ".layers." in name and name in decayed
        }
        self._speeds = torch.tensor(speeds, device=device) if speeds else None
        self._taken = torch.zeros((), device=device)
        groups = [
            {
                "params": [
                    value
                    for name, value in values.items()
                    if (name in masks) == is_sliced and name not in self._averages
                ],
                "lr": torch.zeros((), device=device),
                "scale": scale,
            }
            for is_sliced, scale in ((False, 1.0), (True, sliced_lr))
        ]
        self._rates = {name: groups[name in masks]["lr"] for name in values}
        self._adam = torch.optim.AdamW(
            [group for group in groups if group["params"]], betas=BETAS, weight_decay=0.0,  # decay is in `_take`
            fused=True, capturable=device.type == "cuda",
        )  # fmt: skip
        self._eager_left = self._EAGER_STEPS if device.type == "cuda" else math.inf
        self._tokens: Tensor | None = None
        self._graph: torch.cuda.CUDAGraph | None = None

    def step(self, tokens: Tensor, lr: float) -> None:
        """Take a step on the rows of all islands, (islands, rows, length)."""
        for group in self._adam.param_groups:
            group["lr"].fill_(lr * group["scale"])
        if self._tokens is None:
            self._tokens = torch.empty_like(tokens, device=next(iter(self.values.values())).device)
        self._tokens.copy_(tokens)
        if self._eager_left > 0:
            self._eager_left -= 1
            self._take(self._tokens)
            return
        if self._graph is None:
            self._graph = torch.cuda.CUDAGraph()
            # captured on its own stream, whose workspace of cuBLAS no run beside it uses
            with torch.cuda.graph(self._graph, stream=torch.cuda.current_stream()):
                self._take(self._tokens)
        self._graph.replay()

    def _take(self, tokens: Tensor) -> None:
        loss = losses(self.values, self._shape, tokens).sum()
        # not `backward`, whose accumulation belongs to the stream of the first step, where nothing can be captured;
        # and contiguous, because the fused optimizer takes no notice of strides
        found = torch.autograd.grad(loss, list(self.values.values()))
        gradients = {name: each.contiguous() for name, each in zip(self.values, found, strict=True)}
        with torch.no_grad():
            for name, mask in self._masks.items():
                gradients[name].mul_(mask)
            norms = torch.stack([torch.linalg.vector_norm(each.flatten(1), dim=1) for each in gradients.values()])
            factors = (MAX_NORM / (torch.linalg.vector_norm(norms, dim=0) + 1e-6)).clamp(max=1.0)
            for name, gradient in gradients.items():
                self.values[name].grad = gradient.mul_(factors.view(-1, *[1] * (gradient.dim() - 1)))
            before = self._kept()
            for name in self._decayed:
                rate = self._rates[name] * DECAY
                self.values[name].mul_(1 - rate * self._masks[name] if name in self._masks else 1 - rate)
            self._take_muon(gradients)
        self._adam.step()
        self._adam.zero_grad()
        with torch.no_grad():
            self._undo(before)

    def _take_muon(self, gradients: Values) -> None:
        """A step of torch's Muon with Nesterov's momentum, as large as one of AdamW: `match_rms_adamw`."""
        by_shape: dict[torch.Size, list[str]] = {}
        for name, average in self._averages.items():
            by_shape.setdefault(average.shape, []).append(name)
        for shape, names in by_shape.items():
            for name in names:
                self._averages[name].lerp_(gradients[name], 1 - _MUON_MOMENTUM)
            ahead = torch.cat([gradients[name].lerp(self._averages[name], _MUON_MOMENTUM) for name in names])
            directions = torch.vmap(orthogonalize)(ahead).to(ahead.dtype).split(shape[0])
            size = 0.2 * math.sqrt(max(shape[1:]))
            for name, direction in zip(names, directions, strict=True):
                self.values[name].sub_(self._rates[name] * size * direction)
                self.values[name].grad = None

    def _states(self) -> list[Tensor]:
        states = [state[key] for state in self._adam.state.values() for key in ("exp_avg", "exp_avg_sq")]
        return [*self.values.values(), *self._averages.values(), *states]

    def _kept(self) -> list[Tensor]:
        """Copies of the tensors that a step changes, for islands that skip it; empty if no island skips steps."""
        return [] if self._speeds is None else [each.clone() for each in self._states()]

    def _undo(self, before: list[Tensor]) -> None:
        """Let islands that are slower take fewer steps."""
        if self._speeds is None:
            return
        takes = (self._speeds * (self._taken + 1)).floor() > (self._speeds * self._taken).floor()
        for new, old in zip(self._states(), before, strict=False):  # the first step has made the states of AdamW
            new.copy_(torch.where(takes.view(-1, *[1] * (new.dim() - 1)), new, old))
        self._taken += 1

    def forget(self, name: str) -> None:
        """Drop the state of slices that an island does not train now."""
        state = self._adam.state[self.values[name]]
        for key in ("exp_avg", "exp_avg_sq"):
            state[key].mul_(self._masks[name])


class Fragment:
    """The outer parameters of one fragment, in the order in which they cross: shared ones, then slice by slice."""

    def __init__(self, job: BatchedJob, values: Values, masks: Values) -> None:
        self._job, self._values, self._masks = job, values, masks
        some = next(iter(values.values()))
        slices = torch.arange(1, job.slices + 1, device=some.device)
        order = [
            torch.einsum("s...,s->...", masks[name][: job.slices], slices.to(some.dtype)).flatten()
            if name in masks
            else torch.zeros(value[0].numel(), device=some.device)
            for name, value in values.items()
        ]
        slice_of = torch.cat(order)
        self._places = slice_of.argsort(stable=True)
        self._back = self._places.argsort()
        is_sliced = slice_of[self._places] > 0
        sliced_lr = job.outer_lr if job.sliced_lr is None else job.sliced_lr
        sliced_momentum = job.outer_momentum if job.sliced_momentum is None else job.sliced_momentum
        self._lr = torch.where(is_sliced, sliced_lr, job.outer_lr)
        self._beta = torch.where(is_sliced, sliced_momentum, job.outer_momentum)
        self._codec = codec_named(job.codec)
        self._last_codec = codec_named(job.last_codec or job.codec)
        self.flat = self._inner()[0].clone()
        self._momentum = torch.zeros_like(self.flat)
        self._lost = torch.zeros_like(self._inner()) if job.error_feedback else None
        self._syncs = 0

    def _flat(self, values: Mapping[str, Tensor]) -> Tensor:
        return torch.cat([values[name].flatten(1) for name in self._values], dim=1)[:, self._places]

    def _inner(self) -> Tensor:
        """The inner parameters of all islands, (islands, numel)."""
        return self._flat({name: value.detach() for name, value in self._values.items()})

    def mean(self, tokens: Tensor | None = None, *, is_last: bool = False) -> Tensor:
        """Return the mean pseudo-gradient, (numel,), after the two trips of a coded all-reduce, or one if it is sparse.

        With `tokens`, (islands,), islands weigh by them.
        """
        codec = self._last_codec if is_last else self._codec
        whole = {name: torch.ones_like(value) for name, value in self._values.items()}
        trained = self._flat({**whole, **{name: self._masks[name] for name in self._values if name in self._masks}})
        given = (self.flat - self._inner()) * trained
        if self._lost is not None:
            given += self._job.error_feedback * self._lost
        terms = self._coded(given, codec)
        if self._lost is not None:
            self._lost = given - terms
        if tokens is not None:
            trained = trained * tokens[:, None]
        mean = (terms * trained).sum(0) / trained.sum(0)
        return mean if codec.is_sparse else self._coded(mean[None], codec)[0]

    def _coded(self, rows: Tensor, codec: Codec) -> Tensor:
        """Return rows (n, numel) as they arrive: whole if the codec is sparse, else cut for the islands."""
        islands, (count, numel) = 1 if codec.is_sparse else self._job.islands, rows.shape
        part = math.ceil(numel / islands)
        parts = functional.pad(rows, (0, islands * part - numel)).view(count * islands, part)
        block = getattr(codec, "block", 1)
        padded = functional.pad(parts, (0, -part % block)).flatten()  # every part begins a block
        decoded = codec.decode(codec.encode(padded), padded.numel())
        return decoded.view(count * islands, -1)[:, :part].reshape(count, -1)[:, :numel]

    def apply(self, mean: Tensor, inner: Inner) -> None:
        """Take the outer step, let all islands go on from its result, and rotate slices if it is time."""
        self._momentum = self._beta * self._momentum + mean
        self.flat = self.flat - self._lr * (mean + self._beta * self._momentum)
        for name, part in self.parts().items():
            self._values[name].copy_(part.expand_as(self._values[name]))
        self._syncs += 1
        if self._job.rotate and self._syncs % self._job.rotate == 0:
            for name in self._values:
                if name in self._masks:
                    self._masks[name].copy_(self._masks[name].roll(1, 0))
                    inner.forget(name)

    def parts(self) -> Values:
        """Return the outer parameters by name, (1, *shape)."""
        numel = [value[0].numel() for value in self._values.values()]
        cut = self.flat[self._back].split(numel)
        return {name: part.view(1, *self._values[name].shape[1:]) for name, part in zip(self._values, cut, strict=True)}


def masks_of(job: BatchedJob, device: torch.device) -> Values:
    """Return 1 where an island trains a sliced parameter and 0 elsewhere, (islands, *shape): see `partial_updates`."""
    if job.slices == 1:
        return {}
    found = []
    for index in range(job.slices):
        model = job.shape.build(job.length, seed=0, device="meta")
        partial_updates(model, slice_index=index, num_slices=job.slices, include=job.include)
        model.to_empty(device=device)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float(parameter.requires_grad))
        found.append(unsliced_state_dict(model))
    stacked = {name: torch.stack([each[name] for each in found]) for name in found[0]}
    return {
        name: stack.repeat(job.islands // job.slices, *[1] * (stack.dim() - 1))
        for name, stack in stacked.items()
        if not bool(stack.bool().all())
    }


class Batched:
    """The trainings on one device. Jobs that begin with equal warm steps share them."""

    def __init__(self, folder: Path, length: int, device: torch.device) -> None:
        torch.set_float32_matmul_precision("high")  # this changes nothing on a CPU
        self._tokens, self._device = open_corpus(folder, length), device
        self._warm: dict[tuple[Job, int], Values] = {}

    def train(self, job: BatchedJob) -> float:
        """Return the loss of the outer parameters on held-out rows after a job."""
        return next(self.train_each([job]))[1]

    def train_each(self, jobs: Sequence[BatchedJob]) -> Iterator[tuple[BatchedJob, float]]:
        """Yield each job as it ends, with the loss of its outer parameters on held-out rows.

        Raises:
            ValueError: a job asks for `mixing`.
        """
        for job in jobs:
            if job.mixing:
                raise ValueError(f"batched islands do not mix; got {job}")
        firsts = {(start_of(job), job.islands): job for job in jobs}
        missing = {key: job for key, job in firsts.items() if key not in self._warm}
        for key, values in self._in_turns({key: self._warmed(job) for key, job in missing.items()}):
            self._warm[key] = {name: value[0] for name, value in values.items()}
        for job, values in self._in_turns({job: self._trained(job) for job in jobs}):
            yield job, self._evaluated(values, job)

    def _in_turns(self, runs: Mapping[Key, Run]) -> Iterator[tuple[Key, Values]]:
        """Yield the parameters of each run as it ends.

        On a GPU several runs take steps in turns, each on a stream of its own, because the kernels of one run leave
        most of the device idle.
        """
        left, under_way = list(runs), dict[Any, Any]()
        at_once = _RUNS_AT_ONCE if self._device.type == "cuda" else 1
        while left or under_way:
            while left and len(under_way) < at_once:
                under_way[left.pop(0)] = self._stream()
            for key, stream in list(under_way.items()):
                try:
                    with stream:
                        next(runs[key])
                except StopIteration as end:
                    del under_way[key]
                    if self._device.type == "cuda":
                        torch.cuda.synchronize()
                    yield key, end.value

    def _stream(self) -> Any:
        return torch.cuda.stream(torch.cuda.Stream()) if self._device.type == "cuda" else nullcontext()

    def _trained(self, job: BatchedJob) -> Run:
        """The outer parameters, (1, *shape), after the steps of a job."""
        start = self._warm[start_of(job), job.islands]
        if job.kind == "ddp":
            return (yield from self._data_parallel(job, start, has_muon=job.inner == "muon"))
        values = {name: _stacked(value, job.islands) for name, value in start.items()}
        masks = masks_of(job, self._device)
        inner = Inner(
            values, _matrices(start), masks, job.sliced_inner_lr, job.shape, has_muon=job.inner == "muon",
            speeds=job.speeds,
        )  # fmt: skip
        tokens = torch.tensor(job.speeds, device=self._device) if job.speeds else None
        schedule = SyncSchedule(every=job.every, fragments=job.fragments, overlap=job.overlap)
        assigned = fragment_of(values, schedule.fragments, schedule.pattern)
        fragments = [
            Fragment(job, {name: value for name, value in values.items() if assigned[name] == index}, masks)
            for index in range(schedule.fragments)
        ]
        under_way: tuple[Fragment, Tensor] | None = None
        for step in range(job.steps):
            inner.step(self._rows(job, step, job.islands), lr_of(job, step))
            position = schedule.position(step + 1)
            with torch.no_grad():
                if position.since == 0:
                    fragment = fragments[position.rounds % len(fragments)]
                    is_last = step + 1 + job.every > job.steps
                    under_way = fragment, fragment.mean(tokens, is_last=is_last)
                if under_way is not None and (position.since >= schedule.overlap or step + 1 == job.steps):
                    under_way[0].apply(under_way[1], inner)
                    under_way = None
            yield
        return {name: part for fragment in fragments for name, part in fragment.parts().items()}

    def _warmed(self, job: BatchedJob) -> Run:
        """The parameters, (1, *shape), after the warm steps: data parallel, whose batch has the rows of all islands."""
        start = start_of(job)
        model: nn.Module = start.shape.build(start.length, seed=start.seed).to(self._device)
        named = {name: parameter.detach() for name, parameter in model.named_parameters()}
        return (yield from self._data_parallel(dataclasses.replace(job, **vars(start)), named))

    def _data_parallel(self, job: BatchedJob, begin: Values, *, has_muon: bool = False) -> Run:
        """The parameters, (1, *shape), after steps whose batches have the rows of all islands."""
        values = {name: _stacked(value, 1) for name, value in begin.items()}
        inner = Inner(values, _matrices(begin), {}, 1.0, job.shape, has_muon=has_muon)
        for step in range(job.steps):
            inner.step(self._rows(job, step, job.islands).flatten(0, 1)[None], lr_of(job, step))
            yield
        return {name: value.detach() for name, value in values.items()}

    def _rows(self, job: Job, step: int, islands: int) -> Tensor:
        """The rows of all islands in a step, (islands, rows, length)."""
        each = [rows_of(job, self._tokens, step, island=island, islands=islands) for island in range(islands)]
        return torch.stack(each)

    @torch.no_grad()
    def _evaluated(self, values: Values, job: BatchedJob) -> float:
        rows = held_rows(job, self._tokens).to(self._device).split(_EVAL_ROWS_AT_ONCE)
        return float(sum(losses(values, job.shape, some[None])[0] * len(some) for some in rows)) / job.eval_rows


def _matrices(values: Values) -> set[str]:
    return {name for name, value in values.items() if value.dim() >= 2}


def _stacked(value: Tensor, islands: int) -> Tensor:
    return value.expand(islands, *value.shape).clone().requires_grad_()
