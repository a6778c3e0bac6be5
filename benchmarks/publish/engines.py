"""Engines that take what is published: the conditions of their loaders and, where it is installed, their own code.

Their code needs no GPU. To have it here, put folders on PYTHONPATH: the wheels of vLLM and verl, each by
`pip install --no-deps --target FOLDER`, with what they import, but not their torch; and
`sglang/srt/weight_sync/local_checkpoint.py`, which slime's patch docker/patch/latest/sglang-pull_weights.patch adds to
SGLang.
"""

from __future__ import annotations

import copy
import hashlib
import importlib
import importlib.metadata
import importlib.util
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from benchmarks.publish.job import fine_tuned, train_step
from laconic.integrations.slime import PullFolder
from laconic.integrations.verl import delta_flushes
from laconic.integrations.vllm import load_version
from laconic.publish import Publisher, Reader
from tests.support import pull_stand_in, vllm_stand_in
from tests.support.record import Row

_RATE, _ADAPTER_RATE = 1e-5, 1e-3
_WHOLE_EVERY = 3
"""A version in so many has whole values, too; the reader that comes rarely reads as many at once."""
_RANKS = 2
"""The ranks over which an engine cuts its model."""
_PACKED = {
    "q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}  # fmt: skip
_MEASURES = (
    "laconic.integrations.masked", "laconic.integrations.slime", "laconic.integrations.verl",
    "laconic.integrations.vllm", "laconic.publish",
)  # fmt: skip

_Follow = Callable[[Mapping[str, Tensor]], bool]
"""Brings an engine to the newest version, of which the weights are given; whether it has them, to the bit."""


class _Engine(NamedTuple):
    """An engine, and the code that takes its weights."""

    package: str
    module: str
    """Of the package: that which takes weights."""
    recorded: Any
    """The stand-in with its conditions."""
    begin: Callable[[Any, Path, Mapping[str, Tensor], Path], _Follow]
    """Makes an engine, of the module or the stand-in, the folder of versions, the names and shapes, and a folder."""


class _Served(nn.Module):
    """A rank's part of an engine's model, with a loader of its own: packed parameters, cut by rows where they can be.

    So are the models of vLLM and SGLang. Names are those of the hub.
    """

    def __init__(self, weights: Mapping[str, Tensor], rank: int) -> None:
        super().__init__()
        self._places: dict[str, tuple[str, int, int, int]] = {}
        """By name: the parameter, its first row, the number of rows, and the first row of the whole tensor."""
        shapes: dict[str, tuple[int, ...]] = {}
        for name, whole in weights.items():
            *path, module, kind = name.split(".")
            key = "__".join([*path, _PACKED.get(module, module), kind])
            is_cut = whole.ndim > 1 and whole.shape[0] % _RANKS == 0
            rows = whole.shape[0] // _RANKS if is_cut else whole.shape[0]
            begin = shapes[key][0] if key in shapes else 0
            self._places[name] = (key, begin, rows, rank * rows if is_cut else 0)
            shapes[key] = (begin + rows, *whole.shape[1:])
        for key, shape in shapes.items():
            parameter: Any = nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16), requires_grad=False)
            parameter.weight_loader = self._load
            self.register_parameter(key, parameter)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Take whole tensors by their names."""
        loaded = set()
        for name, whole in weights:
            parameter: Any = getattr(self, self._places[name][0])
            parameter.weight_loader(parameter, whole, name)
            loaded.add(name)
        return loaded

    def _load(self, param: Tensor, whole: Tensor, name: str) -> None:  # vLLM's reload gives `param` by its name
        _, begin, rows, first = self._places[name]
        param.data[begin : begin + rows].copy_(whole.narrow(0, first, rows))

    def has(self, weights: Mapping[str, Tensor]) -> bool:
        """Say whether these are the values, to the bit."""
        return all(
            _is_same(getattr(self, key)[begin : begin + rows], weights[name].narrow(0, first, rows))
            for name, (key, begin, rows, first) in self._places.items()
        )


def _is_same(found: Tensor, wanted: Tensor) -> bool:
    return found.dtype == wanted.dtype and torch.equal(found, wanted)


def _vllm(code: Any, folder: Path, shapes: Mapping[str, Tensor], out: Path) -> _Follow:
    def within() -> AbstractContextManager[Any]:
        return mock.patch.dict(sys.modules, code.modules()) if code is vllm_stand_in else nullcontext()

    config = SimpleNamespace(
        quant_config=None,
        model_config=SimpleNamespace(dtype=torch.bfloat16, is_moe=False),
        kernel_config=SimpleNamespace(moe_backend="auto"),
    )
    workers = [(_Served(shapes, rank), Reader(folder)) for rank in range(_RANKS)]
    with within():
        for served, _ in workers:
            importlib.import_module("vllm.model_executor.model_loader.reload").record_metadata_for_reloading(served)

    def follow(weights: Mapping[str, Tensor]) -> bool:
        with within():
            for served, reader in workers:
                load_version(served, reader, config)
        return all(served.has(weights) for served, _ in workers)

    return follow


def _slime(code: Any, folder: Path, shapes: Mapping[str, Tensor], out: Path) -> _Follow:
    relay = PullFolder(Reader(folder), out / "pull", full_every=_WHOLE_EVERY)

    def follow(weights: Mapping[str, Tensor]) -> bool:
        code.pull(*map(str, (out / "local", out / "base", relay.folder)), relay.update())
        found = {name: each for path in (out / "local").glob("*.safetensors") for name, each in load_file(path).items()}
        return found.keys() == weights.keys() and all(_is_same(found[name], each) for name, each in weights.items())

    return follow


def _verl(code: Any, folder: Path, shapes: Mapping[str, Tensor], out: Path) -> _Follow:
    reader, ranks = Reader(folder), [_Served(shapes, rank) for rank in range(_RANKS)]

    def follow(weights: Mapping[str, Tensor]) -> bool:
        for flush in delta_flushes(reader.patches()):
            for served in ranks:
                code.apply_delta(served, flush)
        return all(served.has(weights) for served in ranks)

    return follow


_ENGINES = {
    "vLLM": _Engine("vllm", "vllm.model_executor.model_loader.checkpoint_weight_patch", vllm_stand_in, _vllm),
    "slime": _Engine("sglang", "sglang.srt.weight_sync.local_checkpoint", pull_stand_in, _slime),
    "verl": _Engine("verl", "verl.workers.rollout.sglang_rollout.delta_loader", vllm_stand_in, _verl),
}


def accepted_row(bench: Any) -> Row:
    """How many versions engines take."""
    codes, words = {}, {}
    for name, engine in _ENGINES.items():
        own, words[name] = _own_code(engine)
        codes[name] = [engine.recorded] + ([] if own is None else [own])
    counts = {(name, number): [0, 0] for name, each in codes.items() for number in range(len(each))}
    for is_merged in (False, True):
        _publish(bench, codes, counts, is_merged=is_merged)
    return Row(
        claim="vLLM's patch loader, slime's folder, verl's receiver: versions that they have to the bit",
        required="all that are published",
        measured="; ".join(
            f"{name}{', own code' * number} {num_taken} of {num_tried}"
            for (name, number), (num_taken, num_tried) in counts.items()
        ),
        is_met=all(num_taken == num_tried > 0 for num_taken, num_tried in counts.values()),
        note=f"{bench.job.llama}, {_num_versions(bench)} versions of AdamW at {_RATE:g} and as many of LoRA adapters "
        f'that are published merged, as engines take no adapters this way; `names="hub"`, patches are gaps, one in '
        f"{_WHOLE_EVERY} has all values, too. One engine takes each version, and another one {_WHOLE_EVERY} at once. "
        f"Models of vLLM and verl are cut over {_RANKS} ranks, with packed weights. Recorded conditions of each loader "
        f"(tests/support), and: {'; '.join(f'{name}: {text}' for name, text in words.items())}. On a CPU.",
        measures=_MEASURES,
    )


def _num_versions(bench: Any) -> int:
    return max(2 * _WHOLE_EVERY, int(bench.versions)) + 1


def _own_code(engine: _Engine) -> tuple[Any, str]:
    """The module of an engine that takes weights, None if it is not here; and what was run, in words."""
    if importlib.util.find_spec(engine.package) is None:
        return None, f"no code of its own, as {engine.package} is not installed"
    try:
        code = importlib.import_module(engine.module)
    except ImportError as error:
        return None, f"no code of its own, as it does not import ({error})"
    try:
        version = importlib.metadata.version(engine.package)
    except importlib.metadata.PackageNotFoundError:
        version = f"as a file of SHA-256 {hashlib.sha256(Path(str(code.__file__)).read_bytes()).hexdigest()[:12]}"
    return code, f"its own {engine.module.rpartition('.')[2]}.py, {engine.package} {version}"


def _publish(
    bench: Any, codes: Mapping[str, list[Any]], counts: Mapping[tuple[str, int], list[int]], *, is_merged: bool
) -> None:
    """Publish versions of a run, and count those that engines have and those that they were given, by their code."""
    torch.set_num_threads(2)
    model, optimizer = fine_tuned(bench.job, _RATE)
    keys: dict[str, Any] = {}
    if is_merged:
        model, optimizer = _adapted(model)
        keys["adapters"] = "merged"
    with tempfile.TemporaryDirectory(dir=bench.out) as out:
        folder, num_versions = Path(out) / "weights", _num_versions(bench)
        publisher = Publisher(model, folder, names="hub", base_every=_WHOLE_EVERY, keep=num_versions, **keys)
        engines: list[tuple[tuple[str, int], int, _Follow]] = []
        for version in range(num_versions):
            publisher.publish(step=version)
            publisher.wait()
            weights = _weights(model, is_merged=is_merged)
            for key in counts if not engines else ():
                for every in (1, _WHOLE_EVERY):
                    own = Path(out) / f"{key[0]}-{key[1]}-{every}"
                    follow = _ENGINES[key[0]].begin(codes[key[0]][key[1]], folder, weights, own)
                    engines.append((key, every, follow))
            for key, every, follow in engines:
                if version % every == 0:
                    counts[key][0] += follow(weights)
                    counts[key][1] += 1
            train_step(bench.job, model, optimizer, 3000 + version)


def _adapted(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model with adapters, which alone are trained."""
    from peft import LoraConfig, get_peft_model

    adapted: Any = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))  # type: ignore[arg-type]
    trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    return adapted, torch.optim.AdamW(trained, lr=_ADAPTER_RATE)


def _weights(model: nn.Module, *, is_merged: bool) -> dict[str, Tensor]:
    """The tensors that engines must have, in bf16. peft merges the adapters."""
    whole: Any = copy.deepcopy(model).merge_and_unload() if is_merged else model  # type: ignore[operator]
    return {name: tensor.detach().to(torch.bfloat16, copy=True) for name, tensor in whole.state_dict().items()}
