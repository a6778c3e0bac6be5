"""The exponential moving average of a model's weights, in the cut of the weights.

`torch.optim.swa_utils.AveragedModel` copies the module, which a sharded module refuses. Here only tensors are copied.
Its function makes the averages, so they are equal to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from laconic.shard.sharded_module import reshard_all
from laconic.store import files


class EMA:
    """Averages of a model's trainable parameters; frozen ones are their own averages.

    Make it after `fully_shard`, and call `update` after each optimizer step. To use the averages, such as to evaluate
    or to write them with `laconic.save_safetensors`, do so inside `with ema.swap():`.

    Cost: memory for one more shard of the trainable parameters, in float32 at least. Nothing is sent.
    Reference: torch.optim.swa_utils.AveragedModel.
    """

    def __init__(self, model: nn.Module, decay: float = 0.999, *, use_buffers: bool = False) -> None:
        """Begin averages. The first update copies; each later one keeps `decay` of an average.

        Args:
            model: any module, sharded or not.
            decay: from 0 to 1.
            use_buffers: average buffers too. By default the model uses its present buffers with the averages.

        Raises:
            ValueError: `decay` is out of its range.
        """
        self._model, self._use_buffers = model, use_buffers
        self._average = get_ema_multi_avg_fn(decay)
        self._is_swapped = False
        self.n_averaged = torch.tensor(0)
        """The number of updates so far."""
        self.averages = {name: _begun(tensor) for name, tensor in self._tensors().items()}
        """The averages by name, cut as the model's tensors. Before the first update: the values at the beginning."""

    @torch.no_grad()
    def update(self) -> None:
        """Take the model's present values into the averages. Every rank calls it.

        Raises:
            RuntimeError: the model has the averages now; or other parameters are trainable than at the beginning.
        """
        if self._is_swapped:
            raise RuntimeError("EMA.update inside swap() would average the averages; call it outside")
        tensors = self._tensors()
        if changed := sorted(tensors.keys() ^ self.averages.keys()):
            raise RuntimeError(
                f"parameters began or ceased to be trainable after EMA(model) was made: {', '.join(changed[:8])}; make "
                "a new EMA(model) when requires_grad changes"
            )
        by_kind: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
        for name, average in self.averages.items():
            averages, values = by_kind.setdefault((average.device, average.dtype), ([], []))
            averages.append(average)
            values.append(tensors[name].to(average.dtype))
        for averages, values in by_kind.values():
            if self.n_averaged == 0:
                for average, value in zip(averages, values, strict=True):
                    average.copy_(value)
            else:
                self._average(averages, values, self.n_averaged)
        self.n_averaged += 1

    @contextmanager
    def swap(self) -> Iterator[None]:
        """Give the model the averages inside the `with` block, and its own values again afterwards.

        Every rank calls it. Do not train inside: changes of the values are lost. Cost: memory for one more shard of the
        averaged tensors.

        Raises:
            RuntimeError: the model has the averages already.
        """
        if self._is_swapped:
            raise RuntimeError("the model has the averages already: swap() blocks cannot be nested")
        own = {name: tensor.clone() for name, tensor in self._tensors().items()}
        self._is_swapped = True
        try:
            self._give(self.averages)
            yield
        finally:
            self._give(own)
            self._is_swapped = False

    @torch.no_grad()
    def _give(self, values: Mapping[str, Tensor]) -> None:
        for name, tensor in self._tensors().items():
            if name in values:
                tensor.copy_(values[name])

    def _tensors(self) -> dict[str, Tensor]:
        """The tensors to average by name, detached; sharded parameters in their sharded form."""
        reshard_all(self._model)
        tensors = {name: p.detach() for name, p in self._model.named_parameters() if p.requires_grad}
        return tensors | (dict(self._model.named_buffers()) if self._use_buffers else {})

    # -- saving --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The averages and their number, for torch.distributed.checkpoint. They share memory with this object."""
        return {"averages": dict(self.averages), "n_averaged": self.n_averaged}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the values of a `state_dict`, whose tensors may also be whole. Every rank calls it.

        Raises:
            ValueError: `state` has averages of other tensors. The message names them.
        """
        averages = state["averages"]
        if differing := sorted(averages.keys() ^ self.averages.keys()):
            raise ValueError(
                f"the state has averages of other tensors than this model: {', '.join(differing[:8])}; load it for the "
                "model that it was saved from"
            )
        for name, average in self.averages.items():
            if averages[name] is not average:
                average.copy_(averages[name])
        self.n_averaged.copy_(torch.as_tensor(state["n_averaged"]))

    def save(self, folder: str | Path) -> None:
        """Write the averages to a folder of torch.distributed.checkpoint. Collective; one rank writes its buffers."""
        _storage().save({"ema": self.state_dict()}, Path(folder), aliases={})
        rank = dist.get_rank() if dist.is_initialized() else 0
        for path in (*Path(folder).glob(f"__{rank}_*"), *Path(folder).glob(".metadata")):
            files.sync(path)

    def load(self, folder: str | Path) -> None:
        """Read what `save` wrote, also on another number of ranks. Collective."""
        state = self.state_dict()
        stored = {f"ema.averages.{name}": average for name, average in state["averages"].items()}
        _storage().load(stored | {"ema.n_averaged": state["n_averaged"]}, Path(folder))
        self.load_state_dict(state)


def _storage() -> Any:
    """The module that reads and writes folders of DCP without pickles; its room, `checkpoint`, lies above this one."""
    return import_module("laconic.checkpoint.storage")


def _begun(tensor: Tensor) -> Tensor:
    """A copy of `tensor`; of floating-point values in float32 at least."""
    dtype = torch.promote_types(tensor.dtype, torch.float32) if tensor.is_floating_point() else tensor.dtype
    return tensor.to(dtype, copy=True)
