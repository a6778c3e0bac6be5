"""laconic in transformers' `Trainer`, and in every trainer that is a subclass of it.

[Note: Where a trainer is changed]
`Trainer.__init__` builds the accelerator, and TRL's trainers add adapters and patch the model's forward there. So the
model is sharded at the end of `__init__`, in place, and before `train` makes the optimizer. The mixin then keeps
accelerate from putting DDP around the model: `prepare_model(evaluation_mode=True)` adds the autocast of bf16 and fp16
and marks the model as prepared. All else is Trainer's own: its loop, gradient accumulation (`no_sync`), clipping and
logs work on a sharded model as they are. Only methods that read or write weights are replaced.
"""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import register_fsdp_forward_method
from transformers import Trainer, TrainerCallback, trainer_utils
from transformers.trainer_utils import get_last_checkpoint

import laconic
from laconic.hf.layers import base_model
from laconic.hf.saving import gathered_state
from laconic.integrations.options import ArgumentError, LaconicArguments
from laconic.integrations.sharding import mesh_for, shard_model
from laconic.integrations.trained_state import (
    has_shards,
    incomplete,
    load_trained,
    mark_complete,
    newest_complete,
    save_trained,
)
from laconic.islands.local_steps import LocalSteps
from laconic.shard.hooks import map_tensors

__all__ = ["LaconicArguments", "LaconicMixin", "LaconicTrainer", "laconic_trainer"]

_Base: Any = object  # the mixin goes before a Trainer, whose attributes it uses

_SCHEDULER = "scheduler.pt"  # Trainer's name of the file
_OPTIMIZERS = (
    "adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop", "adafactor",
    "schedule_free_adamw", "schedule_free_radam", "schedule_free_sgd",
)  # fmt: skip
"""The names of TrainingArguments.optim whose optimizers are element-wise, or reduce over rows and columns only."""
_DDP_ARGUMENTS = ("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_static_graph")
_REFUSED = {
    "deepspeed": "laconic takes its place; leave it out",
    "fsdp": "laconic takes its place; leave it out",
    "parallelism_config": "laconic shards over all ranks; leave it out",
    "auto_find_batch_size": "a rank that runs out of memory would leave the others waiting; set "
    "per_device_train_batch_size",
    "save_on_each_node": "all ranks write a checkpoint together; give an output_dir that all nodes share",
    "sync_ref_model": "it writes to the reference model behind the engine's back; leave it out",
    "use_vllm": "TRL would send vLLM each rank's own shards; leave it out, publish the weights (laconic.publish), and "
    "generate with rollout_func=",
    "use_transformers_continuous_batching": "each rank would run as many forwards as its own prompts need, and others "
    "would wait for it; leave it out, or generate with rollout_func=",
}
"""Arguments of trainers that cannot be set, with the reason and the remedy."""
_FROZEN_MODELS = ("ref_model", "teacher_model")
"""The attributes of trainers that hold a second model, which is not trained."""


class LaconicMixin(_Base):
    """Makes a Trainer subclass shard its model: `class MyTrainer(LaconicMixin, SFTTrainer)`.

    Started by torchrun on several ranks, the model is sharded when the trainer is made, adapters included, and so is
    a reference model. In one process the trainer is what it was.

    Checkpoints can be resumed on any number of ranks, on a file system that all ranks share. `save_model` writes what
    `from_pretrained` reads, or peft's adapter files. With `laconic.local_steps`, evaluation, prediction and
    `save_model` use the parameters that all islands share.

    Args:
        laconic: the options. Default: those of `LaconicArguments()`.

    Raises:
        ArgumentError: an argument of the trainer cannot work with a sharded model; the message has the remedy.
    """

    laconic_defaults: LaconicArguments | None = None
    """The options of this class, where its caller gives none."""

    def __init__(self, *args: Any, laconic: LaconicArguments | None = None, **kwargs: Any) -> None:
        self.laconic_arguments = laconic or self.laconic_defaults or LaconicArguments()
        self.laconic_mesh: DeviceMesh | None = None
        self._local_steps: LocalSteps | None = None
        self._audited_step: int | None = None
        self._unmarked: str | None = None
        """The checkpoint folder that is being written."""
        super().__init__(*args, **kwargs)
        if not self._is_sharding:
            return
        if self.optimizer is not None:
            raise ArgumentError(
                "optimizers=(...) holds the parameters of the model before it was sharded; pass "
                "optimizer_cls_and_kwargs=(cls, kwargs) instead, and the trainer makes the optimizer"
            )
        self.laconic_mesh = mesh_for(self.laconic_arguments, self.args.device.type)
        self.model_wrapped = self._shard(self.model)
        for name in _FROZEN_MODELS:
            other = getattr(self, name, None)
            if isinstance(other, nn.Module):
                shard_model(other.requires_grad_(False), self.laconic_arguments, mesh=self.laconic_mesh)
        if self.laconic_arguments.local_steps:
            self.add_callback(_SyncIslands(self))

    @property
    def _is_sharding(self) -> bool:
        return self.args.world_size > 1

    def create_accelerator_and_postprocess(self) -> None:
        """See `Trainer`. Refuses first what cannot work."""
        if self.args.world_size > 1:
            _check_arguments(self.args, self.laconic_arguments)
            if getattr(self.model, "is_distributed_loading_by_transformers", False):
                raise ArgumentError(
                    "the model is sharded already, by from_pretrained(distributed_config=...); load it without, and "
                    "laconic shards it"
                )
        super().create_accelerator_and_postprocess()
        if self.args.world_size > 1 and (self.is_fsdp_enabled or self.is_deepspeed_enabled):
            raise ArgumentError(
                "accelerate's configuration turns on FSDP or DeepSpeed, and laconic takes their place; start the "
                "script with torchrun, or with a configuration of type MULTI_GPU or MULTI_CPU"
            )

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        # A rank need not hold the whole model on its device: `shard_model` moves one layer at a time. DPO computes the
        # reference's log-probabilities in its __init__, though.
        if not self._is_sharding or getattr(self.args, "precompute_ref_log_probs", False):
            super()._move_model_to_device(model, device)

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """See `Trainer`. The model of `train` is sharded; that of `__init__` is sharded at its end."""
        model = super().call_model_init(trial)
        return model if self.laconic_mesh is None else self._shard(model)

    def _shard(self, model: nn.Module) -> nn.Module:
        """Shard the trained model, and return it as the loop calls it: with autocast, and compiled if asked."""
        arguments = self.laconic_arguments
        dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
        policy = arguments.policy.precision.mp_policy(autocast=dtypes.get(self.accelerator.mixed_precision))
        broadcasts = self.args.ddp_broadcast_buffers is not False
        shard_model(model, arguments, mesh=self.laconic_mesh, mp_policy=policy, broadcast_buffers=broadcasts)
        # transformers then lets all ranks generate equally many tokens.
        base_model(model)._is_fsdp_managed_module = True
        if hasattr(model, "generate"):
            register_fsdp_forward_method(model, "generate")
        return self.accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)

    # -- training ------------------------------------------------------------------------------------------------------

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """See `Trainer`. With local steps it also begins the islands' first round. Collective then."""
        is_new = self.optimizer is None
        optimizer = super().create_optimizer(*args, **kwargs)
        if is_new and self.laconic_mesh is not None and self.laconic_arguments.local_steps:
            every = self.laconic_arguments.local_steps
            self._local_steps = LocalSteps(self.model, optimizer, mesh=self.laconic_mesh, every=every)
        return optimizer

    def training_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """See `Trainer`. Every `audit_every` steps the first micro-batch is audited: see `laconic.audit`.

        Raises:
            ArgumentError: it is time for an audit, but the model does not take the trainer's batches as they are.
            CorruptionError: two ranks computed different bits from the same batch.
        """
        every, step = self.laconic_arguments.audit_every, self.state.global_step
        is_due = self._audited_step is None or step >= self._audited_step + every
        if every and is_due and self.laconic_mesh is not None:
            self._audited_step = step
            self._audit(inputs)
        return super().training_step(model, inputs, *args, **kwargs)

    def _audit(self, inputs: Any) -> None:
        taken = inspect.signature(base_model(self.model).forward).parameters
        batch = {name: inputs[name] for name in taken if name in inputs} if isinstance(inputs, Mapping) else {}
        if not any(isinstance(value, torch.Tensor) for value in batch.values()):
            raise ArgumentError(
                f"audit_every={self.laconic_arguments.audit_every} gives batches to the model as they are, but those "
                f"of {type(self).__name__} are made into others before; leave it out, or use check_every"
            )
        device = self.args.device
        laconic.audit(self.model.train(), map_tensors(lambda tensor: tensor.to(device), batch), _any_loss)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """See `Trainer`. `resume_from_checkpoint=True` takes the newest checkpoint that is complete.

        Raises:
            ArgumentError: the checkpoint is not complete, or was written without laconic.
        """
        if resume_from_checkpoint and self._is_sharding:
            resume_from_checkpoint = self._complete_checkpoint(resume_from_checkpoint)
        elif resume_from_checkpoint is True and has_shards(get_last_checkpoint(self.args.output_dir) or ""):
            resume_from_checkpoint = self._complete_checkpoint(True)
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _complete_checkpoint(self, wanted: str | bool) -> str:
        if isinstance(wanted, str):
            if reason := incomplete(wanted):
                raise ArgumentError(f"cannot resume from {wanted}: {reason}")
            return wanted
        newest, skipped = newest_complete(self.args.output_dir)
        if skipped and self.is_world_process_zero():
            warnings.warn(f"skipped checkpoints that are not complete: {'; '.join(skipped)}", stacklevel=3)
        if newest is None:
            raise ArgumentError(f"{self.args.output_dir} has no complete checkpoint to resume from")
        return str(newest)

    # -- evaluation ----------------------------------------------------------------------------------------------------

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """See `Trainer`. All ranks call it."""
        with self._shared_parameters():
            return super().evaluate(*args, **kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """See `Trainer`. All ranks call it."""
        with self._shared_parameters():
            return super().predict(*args, **kwargs)

    @contextmanager
    def _shared_parameters(self) -> Iterator[None]:
        """Let the model hold the parameters that all islands share, inside the block."""
        if self._local_steps is None:
            yield
            return
        with self._local_steps.outer_parameters():
            yield

    # -- saving --------------------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """See `Trainer`. All ranks call it, and the first one writes, with the whole model in host memory.

        `laconic.save_safetensors` needs the memory of one file only.
        """
        if not self._is_sharding:
            super().save_model(output_dir, _internal_call)
            return
        with self._shared_parameters():
            state = gathered_state(self.model)
        self._save(output_dir or self.args.output_dir, state_dict=state)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self._is_sharding:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        save_trained(output_dir, self.state.global_step, self.model, self._plain_optimizer(), self._local_steps)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, _SCHEDULER))

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        limit = self.args.save_total_limit
        self._unmarked = None
        try:
            super()._save_checkpoint(*args, **kwargs)
        finally:
            self.args.save_total_limit = limit
        if self._unmarked is not None:
            mark_complete(self._unmarked)
            if self.args.should_save:
                self._remove_old_checkpoints(os.path.dirname(self._unmarked))

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        if self._is_sharding:  # Trainer would now remove old checkpoints, although this one is not safe on the disk
            self._unmarked, self.args.save_total_limit = output_dir, None

    def _remove_old_checkpoints(self, folder: str) -> None:
        if hasattr(super(), "_rotate_checkpoints"):  # of transformers 5.0
            super()._rotate_checkpoints(use_mtime=True, output_dir=folder)
            return
        trainer_utils.rotate_checkpoints(
            folder, self.args.save_total_limit, self.state.best_model_checkpoint, use_mtime=True
        )

    # -- loading -------------------------------------------------------------------------------------------------------

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if not has_shards(resume_from_checkpoint):  # `train` has refused it, if this run is sharded
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not has_shards(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        load_trained(checkpoint, self.model, self._plain_optimizer(), self._local_steps)
        self.lr_scheduler.load_state_dict(torch.load(os.path.join(checkpoint, _SCHEDULER), weights_only=True))

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        if best is None or not has_shards(best):
            super()._load_best_model()
        else:
            load_trained(best, self.model)

    def _plain_optimizer(self) -> torch.optim.Optimizer:
        """Return the optimizer inside accelerate's wrapper."""
        optimizer: Any = self.optimizer
        return getattr(optimizer, "optimizer", optimizer)


class LaconicTrainer(LaconicMixin, Trainer):
    """transformers' `Trainer` with a sharded model; see `LaconicMixin`."""


def laconic_trainer(cls: type[Trainer], arguments: LaconicArguments | None = None) -> type[Trainer]:
    """Return the subclass of a Trainer class that shards its model, with options for all its trainers.

    It is for frameworks that make the trainer themselves. In a script, write `class MyTrainer(LaconicMixin, cls)`.
    """
    return type(cls.__name__, (LaconicMixin, cls), {"laconic_defaults": arguments, "__module__": cls.__module__})


def _any_loss(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    """A loss for audits: that of the model, or without labels any number that all outputs have a part in."""
    outputs = model(**batch)
    loss = getattr(outputs, "loss", None)
    return outputs[0].float().square().mean() if loss is None else loss


class _SyncIslands(TrainerCallback):
    """Counts the inner steps of a trainer's islands."""

    def __init__(self, trainer: LaconicMixin) -> None:
        self._trainer = trainer

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Count an inner step; sync if it is time."""
        local_steps = self._trainer._local_steps
        assert local_steps is not None
        local_steps.advance()


def _check_arguments(args: Any, arguments: LaconicArguments) -> None:
    """Refuse arguments of a trainer that cannot work with a sharded model, and name those that do nothing.

    Raises:
        ArgumentError: see the messages.
    """
    for name, reason in _REFUSED.items():
        if value := getattr(args, name, None):
            raise ArgumentError(f"{name}={value!r} does not work with a sharded model: {reason}")
    optimizer, loads_best = getattr(args.optim, "value", args.optim), args.load_best_model_at_end
    refusals = {
        f"optim={optimizer!r} is not known to step parts of parameters as it steps whole ones; use one of "
        f"{', '.join(_OPTIMIZERS)}, or pass optimizer_cls_and_kwargs=(cls, kwargs) with an optimizer "
        "of laconic.optim, such as AdamW8bit": optimizer not in _OPTIMIZERS,
        "accelerator_config even_batches=False gives ranks unequal numbers of batches, and a rank without a batch "
        "would leave the others waiting; leave it True": args.accelerator_config.even_batches is False,
        "load_best_model_at_end needs the sharded tensors, which save_only_model=True leaves out; set one of "
        "them": loads_best and args.save_only_model,
        "load_best_model_at_end would load a model beside the islands' own state; with local_steps leave it out, "
        "and load the best checkpoint's model.safetensors after training": loads_best and arguments.local_steps,
    }
    for message, is_refused in refusals.items():
        if is_refused:
            raise ArgumentError(message)
    given = [name for name in _DDP_ARGUMENTS if getattr(args, name, None) is not None]
    if given:
        warnings.warn(f"{', '.join(given)}: no effect, since laconic takes the place of DDP", stacklevel=4)
