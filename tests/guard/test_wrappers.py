"""Wrappers of torch around sharded modules, sharding inside wrappers, and pickling: refused, with the remedy."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.nn.parallel import DataParallel, DistributedDataParallel

import laconic
from tests.support import sharded_net
from tests.support.launch import on_ranks

USE_IT = "cannot wrap a model that laconic.fully_shard has sharded.*se the sharded model as it is"


class Outer(nn.Module):
    """A plain module around a sharded one."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.own = nn.Linear(3, 3)


def fsdp1(module: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(module, device_id=torch.device("cpu"))


def ddp_without_sync(module: nn.Module) -> nn.Module:
    return DistributedDataParallel(module, init_sync=False)


AROUND: list[tuple[Callable[..., Any], str, str]] = [
    (DistributedDataParallel, USE_IT, USE_IT),
    (ddp_without_sync, USE_IT, USE_IT),
    (DataParallel, USE_IT, USE_IT),
    (fsdp1, USE_IT, USE_IT),
    (fsdp2, "fully_shard has already been applied", "fully_shard cannot shard the parameters of laconic.fully_shard"),
    (replicate, "already managed by `fully_shard`", ""),  # around an inner one it replicates the rest, which is right
]
"""A wrapper, its error around a sharded module, and around a plain module with a sharded one inside."""

INSIDE: list[tuple[Callable[[nn.Module], Any], str]] = [
    (DistributedDataParallel, "the module is wrapped in DistributedDataParallel: take the wrapper away"),
    (DataParallel, "the module is wrapped in DataParallel: take the wrapper away"),
    (fsdp1, "the module is wrapped in FullyShardedDataParallel: take the wrapper away"),
    (fsdp2, "the module was sharded by torch's own fully_shard"),
]


@on_ranks(2, local=1)
def test_what_cannot_go_together_is_refused() -> None:
    model = sharded_net.shard(sharded_net.build())
    for wrap, error, error_of_outer in AROUND:
        for module, pattern in ((model, error), (Outer(model), error_of_outer)):
            if pattern:
                with pytest.raises((TypeError, AttributeError, AssertionError, RuntimeError), match=pattern):
                    wrap(module)
    for wrap, error in INSIDE:
        with pytest.raises(ValueError, match=error):
            laconic.fully_shard(wrap(sharded_net.build()))
    plain: Any = sharded_net.build()
    fsdp2(plain.blocks[1])
    with pytest.raises(ValueError, match=r"blocks.1, a module of Net, was sharded by torch's own fully_shard"):
        laconic.fully_shard(plain)

    optimizer = torch.optim.AdamW(model.parameters())
    sharded_net.train_step(model, optimizer)  # no refusal has harmed the model
    for value in (model, model.blocks, model.state_dict(), optimizer.state_dict()):
        for save in (lambda each: torch.save(each, io.BytesIO()), pickle.dumps):
            with pytest.raises(TypeError, match=r"cannot be pickled.*checkpoint.save_checkpoint.*save_safetensors"):
                save(value)
    with pytest.raises(AssertionError, match="copy the model before fully_shard"):
        copy.deepcopy(model)
