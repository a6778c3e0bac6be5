"""Readers of models in another form than the published one: in few bits, and in another float dtype.

The oracle is the plain model of the version, cast or quantised as a user would.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from transformers.core_model_loading import ConversionOps
from transformers.integrations.finegrained_fp8 import Fp8Quantize
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

import laconic
from laconic.layers.linear import QuantizedLinear, WeightFormat
from laconic.publish import Publisher, PublishError, Reader, ReaderGroup
from laconic.publish.forms import CodedWeight
from laconic.publish.staging import StagedTensor
from tests.support import quantized
from tests.support.launch import on_ranks
from tests.support.published import assert_same, cast, edit, make, model_with, published, snapshot, weights_of_versions

# -- laconic.quantize_ -------------------------------------------------------------------------------------------------


def coded(weights: dict[str, Tensor], weight_format: WeightFormat = "nf4") -> nn.Module:
    """The oracle: the model with these weights, quantised."""
    return laconic.quantize_(model_with(weights), weight_format)


@pytest.mark.parametrize(("weight_format", "encoding"), [("nf4", "gaps"), ("int8", "smallest")])
def test_weights_in_few_bits(weight_format: WeightFormat, encoding: str, tmp_path: Path) -> None:
    """Version by version, from far behind, and by a new reader, it is what quantising the version gives."""
    weights = published(tmp_path, base_every=4, encoding=encoding)
    model, reader = coded(weights[0], weight_format), Reader(tmp_path)
    for version in (1, 2, 2, 6):
        assert reader.update(model, to=version) == version
        assert_same(snapshot(model), snapshot(coded(weights[version], weight_format)))
    far, late = coded(weights[0], weight_format), Reader(tmp_path)
    assert Reader(tmp_path).update(far, to=1) == 1
    assert late.update(far) == 6
    assert_same(snapshot(far), snapshot(model))
    assert model.head.weight is model.embed.weight


@pytest.mark.parametrize("verify", ["each", "first"])
def test_only_what_has_changed_is_read_and_encoded(
    verify: Literal["each", "first"], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`up` changes in each version, and `frozen` in none. A tensor of the model stays where it is.

    Codes that others have changed are made anew of the kept values, without reading; and so is another model.
    """
    weights = published(tmp_path, num_versions=3, base_every=100)
    model, reader = coded(weights[0]), Reader(tmp_path, verify=verify)
    places = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    encoded, encode = list[tuple[int, ...]](), QuantizedLinear.encode
    monkeypatch.setattr(QuantizedLinear, "encode", lambda self, w: encoded.append(tuple(w.shape)) or encode(self, w))
    reader.update(model, to=1)
    assert sorted(encoded) == [(5, 5), (40, 24)]
    whole = reader.bytes_read
    reader.update(model, to=2)
    assert encoded[2:] == [(40, 24)]
    assert reader.bytes_read - whole == reader.source.manifest(2).nbytes("patch")
    reader.update(model, to=2)
    assert len(encoded) == 3
    assert {name: tensor.data_ptr() for name, tensor in model.state_dict().items()} == places
    wanted, read = snapshot(model), reader.bytes_read
    for tensor in (model.frozen.weight_codes, model.up.weight_scales):
        with torch.no_grad():
            tensor[3] ^= 5
        assert reader.update(model, to=2) == 2
        assert_same(snapshot(model), wanted)
    assert reader.bytes_read == read
    other = coded(weights[2])
    with torch.no_grad():
        other.frozen.weight_codes.zero_()
    assert reader.update(other, to=2) == 2
    assert_same(snapshot(other), wanted)


class Interrupted(BaseException):
    """No Exception, as a signal's."""


@pytest.mark.parametrize(
    ("error", "cls", "method", "at"),
    [
        (RuntimeError, CodedWeight, "encode", 1),
        (Interrupted, CodedWeight, "encode", 1),
        *((Interrupted, StagedTensor, "apply", at) for at in range(1, 7)),
    ],
)
@pytest.mark.parametrize(("verify", "same"), [("each", False), ("each", True), ("first", True)])
def test_a_stop_while_values_are_applied_or_encoded(
    error: Any, cls: type, method: str, at: int, verify: Any, same: bool, tmp_path: Path, monkeypatch: Any
) -> None:
    """The next update of that reader does the rest; a new one, as after a kill, begins with whole values."""
    weights = published(tmp_path, num_versions=3)
    model, reader = coded(weights[0]), Reader(tmp_path, verify=verify)
    reader.update(model, to=1)
    calls, real = list[int](), getattr(cls, method)

    def stop(*args: Any) -> None:
        calls.append(1)
        if len(calls) == at:
            raise error("no room")
        real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(cls, method, stop)
        with pytest.raises(PublishError if error is RuntimeError else error, match="no room") as told:
            reader.update(model, to=2)
    said = "up.weight cannot be encoded (no room); the model has parts of two"
    assert (said in str(told.value)) == (error is RuntimeError)
    assert reader.version == 1
    read, reader = reader.bytes_read, reader if same else Reader(tmp_path, verify=verify)
    assert reader.update(model, to=2) == 2
    assert not (same and method == "encode") or reader.bytes_read == read, "the values are there"
    assert_same(snapshot(model), snapshot(coded(weights[2])))
    assert reader.update(model) == 3
    assert_same(snapshot(model), snapshot(coded(weights[3])))


# -- another float dtype -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_models_in_another_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    """Tied names, a transposed tensor and integers, version by version, and by a new reader."""
    weights = published(tmp_path, base_every=4, encoding="smallest")
    net = make(seed=3).to(dtype)
    model: Any = net if dtype is torch.float32 else dict(net.state_dict())
    reader = Reader(tmp_path, cast=True)
    for version in (1, 2, 6):
        assert reader.update(model, to=version) == version
        assert_same(snapshot(net), cast(weights[version], dtype))
    before = reader.bytes_read
    with torch.no_grad():
        net.up.weight[3, 4] += 1
    reader.update(model)
    assert reader.bytes_read == before
    assert_same(snapshot(net), cast(weights[6], dtype))
    assert Reader(tmp_path, cast=True).update(model, to=5) == 5
    assert_same(snapshot(net), cast(weights[5], dtype))


def test_casts_must_be_asked_for_and_are_between_floats(tmp_path: Path) -> None:
    published(tmp_path, num_versions=1)
    model = make(seed=3)
    before = snapshot(model)
    with pytest.raises(
        PublishError, match=r"is float32 in the model and bfloat16 in the version.*; Reader\(cast=True\)"
    ):
        Reader(tmp_path).update(model)
    assert_same(snapshot(model), before)
    Reader(tmp_path, cast=True).update(model)
    state = model.bfloat16().state_dict()
    for name, tensor, message in (
        ("seen", torch.zeros(3, dtype=torch.int32), "is int32 in the model.*published$"),
        ("up.bias", torch.zeros(40, dtype=torch.int64), "is int64 in the model.*published$"),
        ("up.weight", state["up.weight"].to(torch.float8_e4m3fn), "is float8_e4m3fn in the model and bfloat16 in the"),
        ("up.weight", torch.zeros(40, 23), r"is \[40, 23\] in the model"),
    ):
        with pytest.raises(PublishError, match=f"{name} {message}"):
            Reader(tmp_path, cast=True).update(state | {name: tensor})


@pytest.mark.parametrize(
    ("value", "form", "message"),
    [
        (torch.inf, laconic.quantize_, r"up.weight has NaN or infinity, which nf4 cannot code; nothing was applied"),
        (1e5, nn.Module.half, r"up.weight has values beyond 65504, the largest of torch.float16; nothing"),
        (torch.inf, nn.Module.half, ""),
    ],
)
def test_values_that_have_no_form_are_told_before_anything_changes(
    value: float, form: Any, message: str, tmp_path: Path
) -> None:
    net = make()
    with Publisher(net, tmp_path) as publisher:
        publisher.publish()
        publisher.wait()
        model, reader = form(make(seed=1).bfloat16()), Reader(tmp_path, cast=True)
        reader.update(model)
        before = snapshot(model)
        edit(net, 2)
        net.up.weight.data[3, 4] = value
        publisher.publish()
    if not message:  # infinite already
        reader.update(model)
        assert_same(snapshot(model), cast(snapshot(net.bfloat16()), torch.float16))
        return
    with pytest.raises(PublishError, match=message):
        reader.update(model)
    assert_same(snapshot(model), before)


def test_tensors_that_do_not_count_their_changes(tmp_path: Path) -> None:
    weights = published(tmp_path, num_versions=1)
    with torch.inference_mode():
        model = make(seed=1)
        assert Reader(tmp_path, cast=True).update(model) == 1
        state = {name: tensor.clone() for name, tensor in weights[0].items() if name != "head.weight"}  # tied
    for held in (model, state):
        with pytest.raises(PublishError, match=r'inference_mode.*verify="each"'):
            Reader(tmp_path, cast=True, verify="first").update(held)
    assert_same(state, {name: weights[0][name] for name in state})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three versions, of which the first has all values."""
    published(tmp_path / "versions", num_versions=3, base_every=100)
    return tmp_path / "versions"


# -- models that transformers has quantised ----------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "names"), [("llama", "huggingface"), ("mixtral", "hub")])
def test_a_model_in_float8(kind: str, names: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By transformers' own quantiser, in blocks; stacked experts, too."""
    monkeypatch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda *_, **__: None)  # it wants a GPU
    quantized.follow(tmp_path, kind, quantized.blocks, names)


@pytest.mark.campaign  # of the start of another library
def test_a_model_of_torchao(tmp_path: Path) -> None:
    """In a process of its own: transformers asks once whether torchao is there."""
    paths = [str(Path(sys.prefix) / "torchao"), *sys.path]
    command = [sys.executable, "-m", "tests.support.quantized", str(tmp_path)]
    told = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}, capture_output=True, text=True
    )
    assert told.returncode == 0, told.stderr
    assert told.stdout.split("\n")[-2] == "all as they should be"


class StepParameter(nn.Parameter):
    """Whole numbers, whose step is an attribute, as bitsandbytes' parameters have theirs."""

    step: Tensor

    @classmethod
    def of(cls, values: Tensor) -> StepParameter:
        step = values.float().abs().amax(-1, keepdim=True) / 127
        self = cls((values.float() / step).round().to(torch.int8), requires_grad=False)
        self.step = step
        return self


@register_quantization_config("steps")
class StepsConfig(QuantizationConfigMixin):
    def __init__(self, **_: Any) -> None:
        self.quant_method = "steps"


class Steps(ConversionOps):
    def convert(self, input_dict: dict[str, Any], **_: Any) -> dict[str, Any]:
        return {name: StepParameter.of(tensors[0]) for name, tensors in input_dict.items()}


@register_quantizer("steps")
class StepsQuantizer(HfQuantizer):
    is_trainable = False

    def is_serializable(self) -> bool:
        return False

    def param_needs_quantization(self, model: Any, param_name: str, **_: Any) -> bool:
        return param_name.endswith("_proj.weight")

    def get_quantize_ops(self) -> Steps:
        return Steps()


def test_a_version_with_the_codes_of_a_model_needs_no_quantiser(tmp_path: Path) -> None:
    trained, served = nn.LayerNorm(8), nn.LayerNorm(8).bfloat16()
    trained.register_buffer("codes", torch.arange(8, dtype=torch.int32))
    served.register_buffer("codes", torch.zeros(8, dtype=torch.int32))
    served.hf_quantizer = "a method that needs calibration"
    with Publisher(trained, tmp_path, names="model") as publisher, torch.no_grad():
        trained.weight.add_(1)
        publisher.publish()
    Reader(tmp_path).update(served)
    assert_same(snapshot(served), cast(snapshot(trained), torch.bfloat16))


def test_parameters_that_only_their_library_writes(tmp_path: Path) -> None:
    """They are replaced, as `from_pretrained` sets them, with all that they carry."""
    run = quantized.Run(tmp_path, "llama", "huggingface")
    model, reader = run.quantized(StepsConfig()), Reader(tmp_path / "versions")
    for _ in range(2):
        run.step()
        reader.update(model)
        wanted = run.quantized(StepsConfig())
        assert_same(quantized.plain_parts(model), quantized.plain_parts(wanted))
        steps = {name: p.step for name, p in model.named_parameters() if isinstance(p, StepParameter)}
        assert len(steps) == 14
        assert_same(steps, {name: p.step for name, p in wanted.named_parameters() if isinstance(p, StepParameter)})


def test_a_form_that_a_library_does_not_make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model keeps what it has, and the next update is right."""
    monkeypatch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda *_, **__: None)
    run = quantized.Run(tmp_path, "llama", "huggingface")
    run.step()
    model, reader = run.quantized(quantized.blocks()), Reader(tmp_path / "versions")
    before = quantized.plain_parts(model)
    with monkeypatch.context() as patch:
        patch.setattr(Fp8Quantize, "convert", lambda self, tensors, **_: {n: t[0] for n, t in tensors.items()})
        with pytest.raises(PublishError, match=r"_proj.weight: its library makes .*bfloat16.* and the model has"):
            reader.update(model)
    assert reader.update(model) == 1
    assert_same(quantized.plain_parts(model), before)


@on_ranks(3)
def test_sharded_models_and_readers_of_a_group(folder: Path) -> None:
    """FSDP2's model takes a dict of whole tensors. In the group, rank 0 has no reader, 1 reads fp32, and 2 few bits."""
    rank, weights = dist.get_rank(), weights_of_versions(3)
    net = model_with(weights[2])
    net.across.data = net.across.data.contiguous()  # FSDP2 takes no other
    fully_shard(net)
    message = r"a DTensor, and .* whole tensors; .*set_model_state_dict\(\), or take patches"
    with pytest.raises(PublishError, match=message):
        Reader(folder).update(net)
    whole = {name: torch.zeros_like(tensor) for name, tensor in weights[3].items()}
    whole["head.weight"] = whole["embed.weight"]
    Reader(folder).update(whole, to=1)
    set_model_state_dict(net, whole, options=StateDictOptions(full_state_dict=True))
    found: dict[str, Any] = dict(net.state_dict())
    assert_same({n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in found.items()}, weights[1])
    group = ReaderGroup(source=folder if rank == 0 else None, cast=True)
    model = [None, make(seed=1), coded(weights[0])][rank]
    for version in (1, 3):
        assert group.update(model, to=version) == version
        if rank == 1:
            assert_same(snapshot(model), cast(weights[version], torch.float32))
        if rank == 2:
            assert_same(snapshot(model), snapshot(coded(weights[version])))
