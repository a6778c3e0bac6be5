"""The names that the pages' Python blocks take as given, such as a model and batches: a scene for every page."""

from __future__ import annotations

import tempfile
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import laconic
from laconic.comm.agreement import RankGroup
from laconic.publish import Publisher
from tests.support.sharded_net import Block

Layer = partial(Block, 48, 96)


class Model(nn.Module):
    """A model with `layers`, whose forward returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(48, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()


def scene(page: str) -> dict[str, Any]:
    """The given names of a page, the same weights on all ranks and other batches on each."""
    torch.manual_seed(0)
    scenes = {
        "docs/cyclic.md": _cyclic, "docs/layouts.md": _FreshLayers,
        "docs/publish.md": _publish, "docs/serve.md": _serve,
    }  # fmt: skip
    names = scenes.get(page, _model)()
    names.update(torch=torch, laconic=laconic, device="cpu")
    return names


def _model() -> dict[str, Any]:
    model = Model()
    generator = torch.Generator().manual_seed(dist.get_rank())
    batches = [torch.randn(6, 48, generator=generator) for _ in range(3)]
    return {"model": model, "batches": batches, "evaluate": lambda model: model(batches[0])}


def _publish() -> dict[str, Any]:
    """A folder that all ranks share."""
    return {**_model(), "folder": RankGroup().broadcast(tempfile.mkdtemp() if dist.get_rank() == 0 else "")}


def _serve() -> dict[str, Any]:
    """The folder with a version, and the model of a sampler."""
    names = _publish()
    with Publisher(names["model"], names["folder"]) as publisher:
        publisher.publish()
    return {**names, "sampler": Model().bfloat16()}


class _FreshLayers(dict[str, Any]):
    """The name `layer` stands for a new layer wherever it is used."""

    def __init__(self) -> None:
        super().__init__(mesh=laconic.init_mesh("cpu"))

    def __missing__(self, name: str) -> Any:
        if name != "layer":
            raise KeyError(name)
        return Layer()


def _cyclic() -> dict[str, Any]:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=50, max_position_embeddings=64))
    tokens = torch.randint(50, (2, 9))

    def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    names = {"model": model, "tokens": tokens, "loss_fn": loss_fn, "batches": [(tokens, tokens.roll(-1, 1))] * 3}
    return {**names, "world_size": dist.get_world_size()}
