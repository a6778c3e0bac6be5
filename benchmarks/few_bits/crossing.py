"""Sums of gradients over nodes as the engine makes them: each node codes the parts of others, its own stays exact.

Node i owns the i-th part of the flat matrices. See `CodedSum` in laconic/codec/sums.py, whose twin this is for all
nodes at once; benchmarks/tests/test_few_bits.py compares the two. Vectors are few and cross exactly, as in the engine.

[Note: Ways to feed an error back]
`feedback`: a node adds to its gradients what the code has lost of earlier ones. It keeps that for all parts but its
own, in fp32 as the engine does, in bf16, or in few bits itself. `ef21`: node and owner hold an estimate of the
gradient, to which the coded differences are added (arXiv 2510.00643). `predicted`: the same, but the estimate is a mean
over steps. `momentum`: nodes code their momentum, with feedback, and the owner's second moment is frozen (1-bit Adam,
arXiv 2102.02888). The owner's part has no error, so it needs no feedback, and owners know nothing of the errors of
others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from benchmarks.few_bits.codes import Code, Product, bits_of
from benchmarks.few_bits.model import Slot
from laconic.codec import CODECS

Way = Literal["plain", "feedback", "ef21", "predicted", "momentum"]
BETA = 0.9
"""The decay of momentum, that of AdamW in this study."""


@dataclass(frozen=True, kw_only=True)
class Coding:
    """A way of gradients over the wire."""

    name: str
    make: Callable[[Sequence[Slot], int], Code] | None = None
    """Makes the code for matrices and a number of nodes; None: gradients cross exactly."""
    way: Way = "plain"
    """[Note: Ways to feed an error back]"""
    kept: str = "fp32"
    """With feedback: the codec in which a node keeps what was lost."""
    returned: float = 1.0
    """With feedback: the share of what was lost that is kept. All of it comes late, in noise that alternates."""
    is_reversed: bool = False
    """Sum the nodes in the reverse order: how far do roundings alone carry?"""

    def memory_bytes(self, nodes: int) -> float:
        """The bytes a parameter that one node of `nodes` keeps for it, the ranks of the node together."""
        others = (nodes - 1) / nodes
        some = 1 << 14
        match self.way:
            case "plain":
                return 0.0
            case "feedback":
                return others * CODECS[self.kept].payload_bytes(some) / some
            case "ef21" | "predicted":
                return others * 4 + 4 / nodes  # the sum of all estimates suffices its owner
            case "momentum":
                return others * (4 + CODECS[self.kept].payload_bytes(some) / some)


class Lost:
    """The error of a code, kept in a codec."""

    def __init__(self, codec: str) -> None:
        self._code = Product(CODECS[codec], rotates=False)
        self._payload: Tensor | None = None

    def add_to(self, values: Tensor) -> Tensor:
        """Return values (models, n) and what was lost, a new tensor."""
        total = values.clone()
        if self._payload is not None:
            self._code.codec.decode_into(total.view(-1), self._payload, adds=True)
        return total

    def keep(self, lost: Tensor) -> None:
        """Keep (models, n) in place of what was kept."""
        if self._payload is None:
            size = self._code.codec.payload_bytes(lost.numel())
            self._payload = torch.empty(size, dtype=torch.uint8, device=lost.device)
        self._code.codec.encode_into(self._payload, lost.view(-1), check=False)


class Crossing:
    """The sums of one run."""

    def __init__(self, coding: Coding, slots: Sequence[Slot], *, seeds: int, nodes: int) -> None:
        numel = slots[-1].end
        self.coding, self._seeds, self._nodes = coding, seeds, nodes
        self.code = None if coding.make is None else coding.make(slots, nodes)
        block = 1 if self.code is None else self.code.block
        if numel % nodes or (numel // nodes) % block:
            raise ValueError(
                f"{numel} values are no whole blocks of {block} on each of {nodes} nodes; change the shape"
            )
        self._lost = Lost(coding.kept) if coding.way in ("feedback", "momentum") else None
        self._estimate: Tensor | None = None
        self._momentum: Tensor | None = None
        self.facts: list[dict[str, float]] = []
        """The errors and the bits of codes in the probed steps."""

    def sum(self, gradients: Tensor, *, probes: bool = False) -> Tensor:
        """Return the sum of gradients (seeds, nodes, n) as its owners have it, (seeds, n)."""
        if self.code is None:
            return (gradients.flip(1) if self.coding.is_reversed else gradients).sum(1)
        self.code.next_step()
        whole = gradients.view(-1, gradients.shape[-1])
        if self.coding.way == "momentum":
            whole = self._moved(whole)
        sent = whole
        if self._lost is not None:
            sent = self._lost.add_to(whole)
        elif self.coding.way != "plain":
            if self._estimate is None:
                self._estimate = torch.zeros_like(whole)
            sent = whole - self._estimate
        arrived = self.code.cross(sent)
        if probes:
            self._note(sent, arrived)
        if self._lost is not None:
            rest = sent.sub_(arrived)
            self._own(rest).zero_()
            self._lost.keep(rest if self.coding.returned == 1 else rest.mul_(self.coding.returned))
        elif self._estimate is not None:
            arrived.add_(self._estimate)
            if self.coding.way == "ef21":
                self._estimate.copy_(arrived)
            else:
                self._estimate.lerp_(arrived, 1 - BETA)
        self._own(arrived).copy_(self._own(whole))
        total = arrived.view(self._seeds, self._nodes, -1).sum(1)
        if probes:
            exact = whole.view(self._seeds, self._nodes, -1).sum(1)
            self.facts[-1]["error_of_sum"] = _relative(total - exact, exact)
        return total

    def _moved(self, gradients: Tensor) -> Tensor:
        if self._momentum is None:
            self._momentum = torch.zeros_like(gradients)
        return self._momentum.lerp_(gradients, 1 - BETA)

    def start_momentum(self, mean: Tensor) -> None:
        """Let all nodes begin with a momentum (seeds, n)."""
        self._momentum = mean[:, None].repeat(1, self._nodes, 1).view(-1, mean.shape[-1])

    def _own(self, values: Tensor) -> Tensor:
        """The parts that stay on their node, (seeds, n / nodes, nodes): a view of values (seeds * nodes, n)."""
        return values.view(self._seeds, self._nodes, self._nodes, -1).diagonal(dim1=1, dim2=2)

    def _note(self, sent: Tensor, arrived: Tensor) -> None:
        assert self.code is not None
        of_one_seed = sent[: self._nodes]
        self.facts.append(
            {"error_of_term": _relative(arrived[: self._nodes] - of_one_seed, of_one_seed)}
            | bits_of(self.code, of_one_seed)
        )


def _relative(difference: Tensor, values: Tensor) -> float:
    return float(torch.linalg.vector_norm(difference) / torch.linalg.vector_norm(values).clamp(min=1e-30))
