"""The words of a case: [Note: A case]."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

Axes = tuple[int, ...] | None
"""The mesh: (islands, nodes, local ranks), (nodes, local ranks), (ranks,), or None for the default of `fully_shard`."""


@dataclass(frozen=True)
class Precision:
    """The fields of torch's MixedPrecisionPolicy, dtypes by name."""

    param_dtype: str | None = None
    reduce_dtype: str | None = None
    output_dtype: str | None = None
    cast_forward_inputs: bool = True


@dataclass(frozen=True)
class Unit:
    """The options of one call of `fully_shard`."""

    cache: str = "none"
    gradients: str = "node"
    """Where they wait between micro-batches; "auto" chooses."""
    budget: int = 0
    """The bytes of the device that "auto" has, and half of them on the host."""
    reshard_after_forward: bool | None = None
    granularity: str | None = None
    checks: int | None = None
    """The interval of checksums; odd ones also look for edits without notice, and gather damaged caches again."""
    precision: Precision | None = None
    offloads: bool = False
    """Shards rest in host memory."""


@dataclass(frozen=True)
class Node:
    """A module: what it is, how its parent calls it, and what it returns."""

    kind: str
    children: tuple[Node, ...] = ()
    unit: Unit | None = None
    dtype: str = "float64"
    bias: bool = True
    size: int = 3
    """The hidden width of an MLP, the channels of a convolution, the rows of an embedding."""
    frozen: int = 0
    """A mask: bit i freezes the module's i-th own or inner parameter that no child node has."""
    style: str = "plain"
    """How the parent runs it: plain, checkpoint, reentrant, no_grad or detach."""
    takes: str = "args"
    """How the parent gives it the inputs: args, kwargs, dict, tuple or dataclass."""
    returns: str = "tensor"
    """The structure that it returns."""

    def walk(self) -> Iterator[Node]:
        """Yield this node and all below, parents first."""
        yield self
        for child in self.children:
            yield from child.walk()


@dataclass(frozen=True)
class Forward:
    """One call of the model."""

    rows: int = 2
    """Rank r has (rows + r) % 4 rows."""
    needs_grad: bool = False
    turn: int = 0
    takes: str = "args"
    outputs: int = -1
    """A mask of the output tensors in the loss; a mask without any means all."""


@dataclass(frozen=True)
class Micro:
    """Some forwards, and what follows them."""

    mode: str = "together"
    """One of `MODES`."""
    forwards: tuple[Forward, ...] = (Forward(),)
    same_input: bool = False


MODES = {
    "together": "one backward of the sum of all losses",
    "each": "all forwards, then a backward of each",
    "reversed": "all forwards, then a backward of each, last first",
    "retained": "backward(retain_graph=True), then backward",
    "outputs": "torch.autograd.backward of the outputs with gradients",
    "grad": "autograd.grad of the inputs, then backward",
    "grad_only": "autograd.grad of the inputs",
    "inputs_only": "backward(inputs=the inputs)",
    "penalty": "autograd.grad of the inputs with create_graph, then backward of the loss and the penalty",
    "penalty_only": "autograd.grad of the inputs with create_graph, then backward of the penalty",
}
NEED_INPUT_GRADIENT = ("grad", "grad_only", "inputs_only", "penalty", "penalty_only")


@dataclass(frozen=True)
class Step:
    """An optimizer step, with all forwards and backwards before it."""

    before: str = ""
    """A forward before the step: "", eval, no_grad, inference_mode or abandoned."""
    micros: tuple[Micro, ...] = (Micro(),)
    syncs_all: bool = True
    """False: only the last micro-batch sends gradients."""
    clips: bool = False
    steps: bool = True
    zero: str = "none"
    """What `zero_grad` sets: none, zeros, or keep (no call)."""
    edits: str = ""
    """How a parameter changes after the step: "" (not at all), noticed, or unnoticed, which needs `invalidate`."""
    toggles: int | None = None
    """The parameter, modulo their number, whose `requires_grad` changes after the step."""
    moves: int | None = None
    """Units rest elsewhere after the step: the nth where the sum of this number and n says."""


@dataclass(frozen=True)
class Case:
    """A model, its units, and its use."""

    world: int
    root: Node
    steps: tuple[Step, ...] = (Step(),)
    axes: Axes = None
    width: int = 3
    seed: int = 0
    optimizer: str = "sgd"
    shares: tuple[int, ...] | None = None
    """The shares of an island's ranks."""
    ties: bool = False
    """Tie the first two equal linear layers of each unit."""
    ignored: int | None = None
    """The parameter, modulo their number, that no unit takes."""
