"""Models that transformers has quantised, beside a run that publishes; run as a program, all that concerns torchao.

torchao is in `.venv/torchao`, which must be on PYTHONPATH before transformers is imported.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from laconic.hf.requantizing import Requantizer
from laconic.publish import Publisher, PublishError, Reader
from tests.support.published import assert_same

_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 67,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
SIZES: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "tied": {**_LLAMA, "tie_word_embeddings": True},
    "mixtral": {**_LLAMA, "model_type": "mixtral", "num_local_experts": 3, "num_experts_per_tok": 2},
}


def _torchao() -> Any:
    import torchao.quantization

    return torchao.quantization


def int8() -> Any:
    return transformers.TorchAoConfig(_torchao().Int8WeightOnlyConfig())


def float8() -> Any:
    return transformers.TorchAoConfig(_torchao().Float8WeightOnlyConfig())


def blocks() -> Any:
    return transformers.FineGrainedFP8Config(weight_block_size=(32, 32))


class Run:
    """A model that trains and publishes, and what a user quantises of its export."""

    def __init__(self, folder: Path, kind: str, names: Any) -> None:
        self.folder, self.steps = folder, 0
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(**SIZES[kind])
        self.model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        self.publisher = Publisher(self.model, folder / "versions", names=names, base_every=100)

    def step(self) -> None:
        """Change a few weights of one layer, of the embeddings and of a norm, and publish."""
        self.steps += 1
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if "layers.0." in name or "embed" in name or name.endswith("norm.weight"):
                    parameter.view(-1)[self.steps :: 89] += 0.05
        self.publisher.publish()
        self.publisher.wait()

    def quantized(self, config: Any, **options: Any) -> Any:
        """The oracle: `from_pretrained` of the weights in bf16."""
        copy.deepcopy(self.model).bfloat16().save_pretrained(self.folder / "export")
        keys = {"dtype": torch.bfloat16, "quantization_config": config, **options}
        return transformers.AutoModelForCausalLM.from_pretrained(self.folder / "export", **keys)


def plain_parts(model: nn.Module) -> dict[str, Tensor]:
    """All plain tensors of a model, those inside of others, too."""
    found: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        keys = tensor.__tensor_flatten__()[0] if hasattr(tensor, "__tensor_flatten__") else []
        found |= {f"{name}.{key}": getattr(tensor, key) for key in keys} if keys else {name: tensor}
    return {name: t.detach().reshape(-1).view(torch.uint8).clone() for name, t in found.items()}


def follow(folder: Path, kind: str, make_config: Callable[[], Any], names: str) -> None:
    """Read versions into a quantised model. The library's own operation encodes; tensors stay where they are."""
    run = Run(folder, kind, names)
    model, reader = run.quantized(make_config()), Reader(folder / "versions")
    first = plain_parts(model)
    places = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    for _ in range(2):
        run.step()
        run.step()
        reader.update(model)
        assert_same(plain_parts(model), plain_parts(run.quantized(make_config())))
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == places
    changed = {name for name, part in plain_parts(model).items() if not torch.equal(part, first[name])}
    assert any(name.endswith((".qdata", "_proj.weight", "_proj")) for name in changed), "some codes have changed"
    fresh = run.quantized(make_config())
    for parameter in fresh.parameters():
        if parameter.dtype == torch.bfloat16 and type(parameter) is nn.Parameter:
            parameter.data.zero_()
    assert Reader(folder / "versions").update(fresh) == 4
    assert_same(plain_parts(fresh), plain_parts(model))


def one_model(folder: Path) -> None:
    """Values are cast before they are quantised, as `from_pretrained` does, and only if the reader casts.

    Tensors without their model are refused, and a method that needs calibration. The model without memory stays
    without, also after an error.
    """
    run = Run(folder, "llama", "huggingface")
    model = run.quantized(int8(), dtype=torch.float32)
    run.step()
    reader = Reader(folder / "versions", cast=True)
    with pytest.raises(PublishError, match=r"is float32 in the model and bfloat16 in the version.*Reader\(cast=True\)"):
        Reader(folder / "versions").update(model)
    reader.update(model)
    assert_same(plain_parts(model), plain_parts(run.quantized(int8(), dtype=torch.float32)))
    with pytest.raises(PublishError, match="weight is a Int8Tensor, and a reader fills plain tensors; give it the"):
        reader.update(model.state_dict())
    requantizer = Requantizer(model)
    name = min(requantizer.names)
    assert list(requantizer.quantize(name, torch.ones(requantizer.shapes[name], dtype=torch.bfloat16))) == [name]
    with pytest.raises(AssertionError, match="Unsupported input dtype"):
        requantizer.quantize(name, torch.ones(3, dtype=torch.int64))
    assert all(tensor.is_meta for tensor in requantizer.plain.parameters())
    model.hf_quantizer.requires_calibration = True
    with pytest.raises(PublishError, match="quantised by torchao, which transformers cannot do anew; serve it plain"):
        Reader(folder / "versions", cast=True).update(model)


def main(folder: Path) -> None:
    for kind, make_config, names in (("tied", int8, "huggingface"), ("mixtral", float8, "hub")):
        follow(folder / kind, kind, make_config, names)
    one_model(folder / "one")
    print("all as they should be")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
