"""Llamas of several seeds on several nodes, in one process: a gradient for each node, all from one set of kernels.

All matrices of a model lie in one flat fp32 vector, and all vectors (norms) in another. Forward and backward use copies
in the compute dtype, one for each seed and node, as FSDP2's do with `param_dtype=bf16`. So each node has a gradient of
its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.local_steps.islands import Shape

_EVAL_ROWS_AT_ONCE = 64


@dataclass(frozen=True, kw_only=True)
class Slot:
    """The place of one parameter in its flat vector."""

    name: str
    shape: tuple[int, ...]
    begin: int
    end: int


def losses(values: Mapping[str, Tensor], shape: Shape, rows: Tensor) -> Tensor:
    """Return the next-token loss of each model, (models,), on rows (models, rows, length + 1) of tokens.

    `values` has the parameters by name, (models, *shape), in the compute dtype.
    """
    inputs, targets = rows[..., :-1], rows[..., 1:]
    models, count, length = inputs.shape
    size = shape.hidden // shape.heads
    table = values["model.embed_tokens.weight"]

    def linear(x: Tensor, name: str) -> Tensor:
        result: Tensor = _Linear.apply(x, values[f"{name}.weight"])
        return result

    def norm(x: Tensor, name: str) -> Tensor:
        return values[f"{name}.weight"][:, None] * functional.rms_norm(x, (shape.hidden,), eps=1e-6)

    def heads(x: Tensor) -> Tensor:
        return x.view(models * count, length, shape.heads, size)

    frequencies = 10_000.0 ** (-torch.arange(0, size, 2, device=rows.device) / size)
    angles = torch.outer(torch.arange(length, device=rows.device), frequencies).repeat(1, 2)[:, None]
    cos, sin = angles.cos().to(table.dtype), angles.sin().to(table.dtype)

    def turned(x: Tensor) -> Tensor:
        left, right = x.chunk(2, dim=-1)
        return torch.addcmul(x * cos, torch.cat((-right, left), dim=-1), sin)

    # a product with zeros and ones, since the backward of a lookup sorts, and adds in no fixed order
    chosen = inputs.flatten(1)[..., None] == torch.arange(table.shape[1], device=rows.device)
    x = torch.bmm(chosen.to(table.dtype), table)
    for index in range(shape.layers):
        layer = f"model.layers.{index}"
        y = norm(x, f"{layer}.input_layernorm")
        q, k, v = (heads(linear(y, f"{layer}.self_attn.{kind}_proj")) for kind in "qkv")
        q, k, v = (each.transpose(1, 2) for each in (turned(q), turned(k), v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + linear(y.transpose(1, 2).reshape(models, count * length, -1), f"{layer}.self_attn.o_proj")
        y = norm(x, f"{layer}.post_attention_layernorm")
        y = functional.silu(linear(y, f"{layer}.mlp.gate_proj")) * linear(y, f"{layer}.mlp.up_proj")
        x = x + linear(y, f"{layer}.mlp.down_proj")
    logits = linear(norm(x, "model.norm"), "lm_head").flatten(0, 1).float()
    return functional.cross_entropy(logits, targets.flatten(), reduction="none").view(models, -1).mean(1)


class _Linear(torch.autograd.Function):
    """x @ weight^T, model by model. Autograd's own product would return the weight's gradient transposed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.bmm(x, weight.transpose(1, 2))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return torch.bmm(gradient, weight), torch.bmm(gradient.transpose(1, 2), x)


class Nodes:
    """The models of some seeds, each on some nodes, and the gradients of these.

    On a GPU a step is one CUDA graph, because the launches of an eager backward may take longer than its kernels.
    """

    _EAGER_STEPS = 2

    def __init__(self, shape: Shape, *, seeds: int, nodes: int, length: int, device: torch.device) -> None:
        self.shape, self.seeds, self.nodes, self.device = shape, seeds, nodes, device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        named: list[dict[str, Tensor]] = []
        for seed in range(seeds):
            model: nn.Module = shape.build(length, seed=seed)
            named.append({name: parameter.detach() for name, parameter in model.named_parameters()})
        self.matrix_slots = _slots({name: value for name, value in named[0].items() if value.dim() > 1})
        self.vector_slots = _slots({name: value for name, value in named[0].items() if value.dim() == 1})
        self.matrices = _flat(named, self.matrix_slots).to(device)
        """The matrices of each seed, (seeds, n), fp32."""
        self.vectors = _flat(named, self.vector_slots).to(device)
        self.gradients = torch.zeros(seeds, nodes, self.matrices.shape[1], device=device)
        """The gradients of the matrices on each node, (seeds, nodes, n), fp32."""
        self.vector_gradients = torch.zeros(seeds, nodes, self.vectors.shape[1], device=device)
        self._leaves = {
            slot.name: torch.zeros(seeds * nodes, *slot.shape, device=device, dtype=self.dtype, requires_grad=True)
            for slot in (*self.matrix_slots, *self.vector_slots)
        }
        self._rows: Tensor | None = None
        self._eager_left = self._EAGER_STEPS
        self._graph: torch.cuda.CUDAGraph | None = None
        self._may_capture = device.type == "cuda"

    @property
    def parameters(self) -> int:
        """The parameters of one model."""
        return self.matrices.shape[1] + self.vectors.shape[1]

    def differentiate(self, rows: Tensor) -> None:
        """Write the gradients of all nodes on rows (seeds, nodes, rows, length + 1) of tokens."""
        if self._rows is None:
            self._rows = torch.zeros(rows.shape, dtype=torch.int64, device=self.device)
        self._rows.copy_(rows)
        if self._graph is not None:
            self._graph.replay()
        elif self._eager_left > 0 or not self._may_capture:
            self._eager_left -= 1
            self._differentiate(self._rows)
        else:
            self._capture(self._rows)

    def _capture(self, rows: Tensor) -> None:
        graph = torch.cuda.CUDAGraph()
        try:
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                self._differentiate(rows)
        except RuntimeError as error:
            print(f"no CUDA graph, so steps are eager: {error}", flush=True)
            self._may_capture = False
            torch.cuda.synchronize()
            self._differentiate(rows)
            return
        self._graph = graph
        graph.replay()

    def _differentiate(self, rows: Tensor) -> None:
        models = self.seeds * self.nodes
        parts = (self.matrices, self.matrix_slots), (self.vectors, self.vector_slots)
        with torch.no_grad():
            for flat, slots in parts:
                for slot in slots:
                    leaf = self._leaves[slot.name].view(self.seeds, self.nodes, -1)
                    leaf.copy_(flat[:, None, slot.begin : slot.end].expand_as(leaf))
        loss = losses(self._leaves, self.shape, rows.view(models, *rows.shape[2:])).sum()
        # not `backward`, whose accumulation belongs to the stream of the first step, where nothing can be captured
        found = torch.autograd.grad(loss, list(self._leaves.values()))
        with torch.no_grad():
            slots = (
                *((self.gradients, s) for s in self.matrix_slots),
                *((self.vector_gradients, s) for s in self.vector_slots),
            )
            for (flat, slot), gradient in zip(slots, found, strict=True):
                flat.view(models, -1)[:, slot.begin : slot.end].copy_(gradient.reshape(models, -1))

    @torch.no_grad()
    def evaluate(self, rows: Tensor) -> list[float]:
        """Return the loss of each seed's fp32 parameters on rows (rows, length + 1)."""
        values = {
            slot.name: flat[:, slot.begin : slot.end].view(self.seeds, *slot.shape)
            for flat, slots in ((self.matrices, self.matrix_slots), (self.vectors, self.vector_slots))
            for slot in slots
        }
        total = torch.zeros(self.seeds, dtype=torch.float64, device=self.device)
        for some in rows.split(_EVAL_ROWS_AT_ONCE):
            shared = some.to(self.device, torch.int64).expand(self.seeds, *some.shape)
            total += losses(values, self.shape, shared).double() * len(some)
        return [float(each) for each in total / len(rows)]


def _slots(values: Mapping[str, Tensor]) -> list[Slot]:
    slots: list[Slot] = []
    for name, value in values.items():
        begin = slots[-1].end if slots else 0
        slots.append(Slot(name=name, shape=tuple(value.shape), begin=begin, end=begin + value.numel()))
    return slots


def _flat(named: list[dict[str, Tensor]], slots: list[Slot]) -> Tensor:
    return torch.stack([torch.cat([values[slot.name].flatten() for slot in slots]) for values in named])
