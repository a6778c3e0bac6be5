"""The parts of a model under DeepSpeed's ZeRO-3 as tensors that laconic's checkpoints read and write in place.

[Note: ZeRO-3's partitions]
DeepSpeed cuts every parameter, flattened, into as many equal parts as there are ranks, the last of them padded: rank r
of W has the elements from r * C on, C = ceil(numel / W). Trainable parts lie one behind the other in one float32 buffer
for each group of the optimizer, and AdamW's two moments in buffers of the same order. A `RaggedTensor` over a layout
of one tensor describes such a part. So a checkpoint has the same tensors as under any other strategy.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from laconic.checkpoint.state import named_parameters
from laconic.comm.cluster import Cluster
from laconic.layout.bucket import BucketLayout, Slot
from laconic.ragged.spec import RaggedSpec
from laconic.ragged.tensor import RaggedTensor

_MOMENTS = ("exp_avg", "exp_avg_sq")


class Partitions:
    """The parts of all parameters on this rank, and the optimizer's state for them."""

    def __init__(self, model: nn.Module, zero: Any, groups: list[dict[str, Any]], mesh: DeviceMesh) -> None:
        """Take a model that DeepSpeed has partitioned over the one axis of `mesh`. Collective at the first call.

        `zero` is DeepSpeed's optimizer of stage 3, and `groups` are the groups of the torch optimizer in it, as they
        were before DeepSpeed took them.
        """
        self._model, self._zero, self._mesh = model, zero, mesh
        self._cluster = Cluster.of(mesh, num_local=1)
        self._names = {id(parameter): name for name, parameter in named_parameters(model).items()}
        self._groups = groups
        self._masters: dict[int, tuple[Tensor, int]] = {}  # by parameter: the buffer, and where the part begins in it
        for parameters, buffer in zip(zero.fp16_groups, zero.fp32_partitioned_groups_flat, strict=True):
            start = 0
            for parameter in parameters:
                self._masters[id(parameter)] = buffer, start
                start += parameter.ds_tensor.ds_numel

    @torch.no_grad()
    def set_masters(self, parts: dict[int, Tensor]) -> None:
        """Copy this rank's part of each trainable parameter, by the parameter's id, into the float32 buffers."""
        for key, (buffer, start) in self._masters.items():
            buffer.detach()[start : start + parts[key].numel()].copy_(parts[key])
        self._publish()

    @contextlib.contextmanager
    def shown(self) -> Iterator[torch.optim.Optimizer]:
        """Show `RaggedTensor`s as the model's parameters inside the block; yield an optimizer of them.

        Both share the memory of DeepSpeed's, apart from frozen parameters in bfloat16, which are shown in float32. What
        is loaded into them is DeepSpeed's at the end of the block.
        """
        shown: dict[int, nn.Parameter] = {}
        wide: list[tuple[Tensor, Tensor]] = []
        for parameter in self._model.parameters():
            if id(parameter) not in shown:
                shown[id(parameter)] = self._show(parameter, wide)
        own = [(module, module._parameters) for module in self._model.modules()]
        for module, parameters in own:
            module._parameters = {
                name: None if parameter is None else shown[id(parameter)] for name, parameter in parameters.items()
            }
        try:
            optimizer = self._twin(shown)
            yield optimizer
            self._take_state(optimizer, shown)
        finally:
            for module, parameters in own:
                module._parameters = parameters
        for narrow, part in wide:
            narrow.copy_(part)
        self._publish()

    def _show(self, parameter: Any, wide: list[tuple[Tensor, Tensor]]) -> nn.Parameter:
        spec = self._spec(parameter)
        numel = spec.extent.numel if spec.extent else 0
        if id(parameter) in self._masters:
            buffer, start = self._masters[id(parameter)]
            part = buffer.detach()[start : start + numel]
        else:
            part = parameter.ds_tensor.detach()[:numel]
            if part.dtype == torch.bfloat16:
                narrow, part = part, part.float()
                wide.append((narrow, part))
        return nn.Parameter(RaggedTensor(part, spec), requires_grad=parameter.requires_grad)

    def _spec(self, parameter: Any) -> RaggedSpec:
        slot = Slot(name=self._names[id(parameter)], shape=tuple(parameter.ds_shape), block=1, offset=0)
        layout = BucketLayout(
            slots=(slot,), num_shards=self._cluster.size, shard_numel=max(1, parameter.ds_tensor.ds_numel)
        )
        return RaggedSpec(cluster=self._cluster, layout=layout, index=0)

    def _twin(self, shown: dict[int, nn.Parameter]) -> torch.optim.Optimizer:
        """AdamW over `shown`, whose state are views of the state of DeepSpeed's."""
        inner = self._zero.optimizer
        groups = [
            {**{key: value for key, value in current.items() if key != "params"}, "params": given["params"]}
            for given, current in zip(self._groups, inner.param_groups, strict=True)
        ]
        for group in groups:
            group["params"] = [shown[id(parameter)] for parameter in group["params"]]
        twin = torch.optim.AdamW(groups, lr=inner.param_groups[0]["lr"])
        for key, (buffer, start) in self._masters.items():
            if state := inner.state.get(buffer):
                parameter = shown[key]
                numel = parameter.to_local().numel()  # type: ignore[attr-defined]
                moments = {
                    name: RaggedTensor(state[name][start : start + numel], parameter.spec)  # type: ignore[attr-defined]
                    for name in _MOMENTS
                }
                twin.state[parameter] = {"step": state["step"].clone(), **moments}
        return twin

    @torch.no_grad()
    def _take_state(self, twin: torch.optim.Optimizer, shown: dict[int, nn.Parameter]) -> None:
        """Copy the state and the settings of `twin`, which a checkpoint may have replaced."""
        inner = self._zero.optimizer
        for current, group in zip(inner.param_groups, twin.param_groups, strict=True):
            current.update({key: value for key, value in group.items() if key != "params"})
        for key, (buffer, start) in self._masters.items():
            state = twin.state.get(shown[key])
            if not state:
                continue
            if not inner.state.get(buffer):
                inner.state[buffer] = {name: torch.zeros_like(buffer, requires_grad=False) for name in _MOMENTS}
            own = inner.state[buffer]
            own["step"] = state["step"].clone()
            for name in _MOMENTS:
                part = state[name].to_local()
                own[name][start : start + part.numel()].copy_(part)

    def _publish(self) -> None:
        """Copy the float32 buffers to the partitions that DeepSpeed gathers from, as its optimizer's step does."""
        for low, high in zip(
            self._zero.fp16_partitioned_groups_flat, self._zero.fp32_partitioned_groups_flat, strict=True
        ):
            low.data.copy_(high.data)


def local_part(whole: Tensor, rank: int, num_ranks: int) -> Tensor:
    """A copy of the elements of `whole`, flattened, that DeepSpeed leaves on `rank`: [Note: ZeRO-3's partitions]."""
    size = -(-whole.numel() // num_ranks)
    return whole.detach().reshape(-1)[rank * size : (rank + 1) * size].clone()
