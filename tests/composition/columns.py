"""The columns that the code itself asks for: keywords of `fully_shard`, converters, encodings of published versions.

Each keyword of `fully_shard` and each function that converts a model's layers stands in a table here, and a test
compares the tables with the signature and with the public names, so what is new has a column or fails.
"""

from __future__ import annotations

import inspect
import shutil
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import Shard

import laconic
from laconic.publish import Publisher, PublishPolicy, Reader
from tests.support.sharded_net import full_parameters

ROWS, EVERY = "the rows", "every cell"
KEYWORDS = {
    "mesh": EVERY,
    "cache": ROWS,
    "wire": ROWS,
    "checks": EVERY,
    "mp_policy": "mixed precision",
    "granularity": "AdamW8bit",
    "reshard_after_forward": "stays gathered",
    "shard_placement_fn": "placement",
    "offload_policy": "offload",
    "ignored_params": "ignored",
    "dp_mesh_dims": "named axes",
    "broadcast": "broadcast",
    "broadcast_buffers": "buffers",
    "prefetch": "prefetch",
    "shares": "shares",
}
"""Where the table tries each keyword of `fully_shard`: in a column, in the rows, or in every cell."""
CONVERTERS = {"convert_to_scaled_training": "scaled", "quantize_": "QLoRA", "partial_updates": ROWS}
"""Where it tries each public function that changes the layers of a model."""
PUBLISHED = "published"
ENCODINGS: tuple[str, ...] = get_args(get_type_hints(PublishPolicy)["encoding"])
"""The ways to publish changes, all of which a cell of that column tries."""
OF_KEYWORDS = tuple(name for name in KEYWORDS.values() if name not in (ROWS, EVERY, "mixed precision", "AdamW8bit"))
OF_CONVERTERS = tuple(name for name in CONVERTERS.values() if name != ROWS)
MORE = (*OF_KEYWORDS, *OF_CONVERTERS, PUBLISHED)
"""The columns beside those of optimizers and of other parallelisms."""
MEANING = {
    "stays gathered": "`fully_shard(reshard_after_forward=False)`",
    "placement": "`fully_shard(shard_placement_fn=)` that returns `Shard(0)`",
    "offload": "`fully_shard(offload_policy=CPUOffloadPolicy())`",
    "ignored": "`fully_shard(ignored_params=)` with a frozen parameter",
    "named axes": "`fully_shard(dp_mesh_dims=)` that names axes of a larger mesh",
    "broadcast": "`fully_shard(broadcast=True)` of weights that differ between ranks",
    "buffers": "`fully_shard(broadcast_buffers=True)` of a buffer that differs between ranks",
    "prefetch": "`fully_shard(prefetch=laconic.Prefetch(units=2))`",
    "shares": "`fully_shard(shares=)` of three to one",
    "scaled": '`convert_to_scaled_training(model, "mxfp8")`',
    "QLoRA": '`quantize_(model, "nf4")`, then adapters',
    PUBLISHED: f"a `Publisher` and a reader of each encoding: {', '.join(ENCODINGS)}",
}
_SHARED = (3.0, 1.0)


def keywords() -> list[str]:
    """The keywords of `fully_shard`."""
    return [name for name in inspect.signature(laconic.fully_shard).parameters if name != "module"]


def converters() -> list[str]:
    """The public functions that take a model and change its layers."""
    rooms = ("laconic.layers.", "laconic.partial.")
    found = [(name, getattr(laconic, name)) for name in laconic.__all__]
    return [
        name for name, each in found
        if inspect.isfunction(each) and each.__module__.startswith(rooms)
        and inspect.signature(each).return_annotation in ("nn.Module", nn.Module)
    ]  # fmt: skip


def arguments(features: frozenset[str], model: Any, mesh: Any, whole: Any) -> dict[str, Any]:
    """The arguments of `fully_shard` for the columns among `features`; `mesh` is a part of the mesh `whole`."""
    size = mesh.size() // (mesh.shape[0] if mesh.ndim > 1 and mesh.mesh_dim_names[0] in ("island", "replicate") else 1)
    named: dict[str, Callable[[], dict[str, Any]]] = {
        "stays gathered": lambda: {"reshard_after_forward": False},
        "placement": lambda: {"shard_placement_fn": lambda parameter: Shard(0) if parameter.ndim else None},
        "offload": lambda: {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
        "ignored": lambda: {"ignored_params": {each for each in [model.gain] if each is not None}},
        "named axes": lambda: _named_axes(mesh, whole),
        "broadcast": lambda: {"broadcast": True},
        "buffers": lambda: {"broadcast_buffers": True},
        "prefetch": lambda: {"prefetch": laconic.Prefetch(units=2)},
        "shares": lambda: {"shares": [_SHARED[each % 2] for each in range(size)]},
    }
    found: dict[str, Any] = {}
    for name, make in named.items():
        found |= make() if name in features else {}
    return found


def _named_axes(mesh: Any, whole: Any) -> dict[str, Any]:
    names = mesh.mesh_dim_names
    has_islands = names[0] in ("island", "replicate")
    dims = SimpleNamespace(replicate=names[0] if has_islands else None, shard=names[1:] if has_islands else names)
    return {"mesh": whole, "dp_mesh_dims": dims}


@torch.no_grad()
def spoil(features: frozenset[str], model: nn.Module, *, rank: int, first: int, first_of_island: int) -> None:
    """Give ranks other weights than the first rank, and other buffers than the first of those that sum gradients."""
    for name, parameter in model.named_parameters() if "broadcast" in features and rank != first else ():
        if name == "gain":  # which is ignored, so nobody broadcasts it
            continue
        held = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        if held.is_floating_point():
            held.mul_(3)
    for buffer in model.buffers() if "buffers" in features and rank != first_of_island else ():
        if buffer.is_floating_point():
            buffer.add_(1)


class Followers:
    """A reader of every encoding, each of which follows a publisher of its own."""

    def __init__(self, model: nn.Module, local_steps: Any = None) -> None:
        self._model = model
        told = [tempfile.mkdtemp()]
        dist.broadcast_object_list(told, src=0)
        self._folder = Path(told[0])
        keys: dict[str, Any] = {"dtype": torch.float32, "names": "model", "local_steps": local_steps}
        folders = {name: self._folder / name for name in ENCODINGS}
        self._publishers = [Publisher(model, folder, encoding=name, **keys) for name, folder in folders.items()]
        self._readers = {name: Reader(folder) for name, folder in folders.items()}
        self._held: dict[str, dict[str, Tensor]] = {}

    def follow(self, shown: Callable[[], Any] = nullcontext) -> None:
        """Publish the model as `shown()` shows it, and compare what each reader has with that. Collective."""
        with shown():
            for publisher in self._publishers:
                publisher.publish()
                publisher.wait()
            wanted = full_parameters(self._model)
        for name, reader in self._readers.items() if dist.get_rank() == 0 else ():
            if name not in self._held:
                tensors = reader.source.manifest(reader.source.versions()[-1]).tensors
                self._held[name] = {each.name: torch.zeros(each.shape, dtype=each.torch_dtype) for each in tensors}
            held = self._held[name]
            reader.update(held)
            shared = wanted.keys() & held.keys()
            assert shared, f"{name} has {sorted(held)}, not {sorted(wanted)}"
            for key in shared:
                assert torch.equal(held[key], wanted[key]), f"{name} has another {key}"
        dist.barrier()

    def close(self) -> None:
        """Remove the folders. Collective."""
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(self._folder)
