"""A stage: consecutive blocks of a model as one module.

[Note: Stages]
A stage is a module that maps tensors to a tensor or a tuple of tensors. Its outputs are the inputs of the next stage;
outputs that require no gradient (masks, positions, rotary angles) are carried along. Stages share the model's own
parameters, under the model's own names. So patterns of names, checkpoints and the whole model go on working.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor, nn

Values = tuple[Tensor, ...]


class ModelBlock(Protocol):
    """The smallest part of a model that `cut` keeps whole."""

    modules: dict[str, nn.Module]
    """The modules of the block, by their names in the model."""
    shells: Sequence[nn.Module]
    """Copies of the modules around the block's modules. Their forward runs, and may look at `training`."""

    def __call__(self, *values: Tensor) -> Values:
        """Run the block; the outputs are the inputs of the next block."""
        ...


class Stage(nn.Module):
    """Consecutive blocks of a model: `forward(*hidden) -> Tensor | tuple[Tensor, ...]`; see [Note: Stages]."""

    def __init__(self, blocks: Sequence[ModelBlock]) -> None:
        super().__init__()
        self._blocks = tuple(blocks)
        for block in blocks:
            for path, module in block.modules.items():
                self._graft(path, module)

    def _graft(self, path: str, module: nn.Module) -> None:
        """Register a module under its path in the model, with empty modules for its parents."""
        *parents, name = path.split(".")
        root: nn.Module = self
        for parent in parents:
            if parent not in root._modules:
                root.add_module(parent, nn.Module())
            root = root.get_submodule(parent)
        root.add_module(name, module)

    @property
    def num_blocks(self) -> int:
        """The number of blocks in this stage."""
        return len(self._blocks)

    def train(self, mode: bool = True) -> Stage:
        """See nn.Module.train."""
        for block in self._blocks:
            for shell in block.shells:
                shell.training = mode
        return super().train(mode)

    def forward(self, *hidden: Tensor) -> Tensor | Values:
        """Run all blocks."""
        for block in self._blocks:
            hidden = block(*hidden)
        return hidden[0] if len(hidden) == 1 else hidden


def unstage(stages: Sequence[nn.Module]) -> dict[str, Tensor]:
    """The state dict of the model that was cut into `stages`, under the model's names; tensors are not copied."""
    return {name: value for stage in stages for name, value in stage.state_dict().items()}


def trainable(stage: nn.Module) -> dict[str, nn.Parameter]:
    """The trainable parameters of a stage by name; a shared parameter has one name only."""
    return {name: p for name, p in stage.named_parameters() if p.requires_grad}


def refuse_shared(by_stage: Sequence[Mapping[str, nn.Parameter]]) -> None:
    """Raise ValueError if two stages share one of these parameters."""
    first_use: dict[int, tuple[int, str]] = {}
    for stage, parameters in enumerate(by_stage):
        for name, parameter in parameters.items():
            first_stage, first_name = first_use.setdefault(id(parameter), (stage, name))
            if first_stage != stage:
                raise ValueError(
                    f"{first_name} in stage {first_stage} and {name} in stage {stage} are one parameter, whose "
                    "gradient would be complete at two different times; untie them (transformers: "
                    "tie_word_embeddings=False), or cut so that both are in one stage"
                )
