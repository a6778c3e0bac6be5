"""`laconic export RUN OUT`: a checkpoint as a Hugging Face folder that transformers' `from_pretrained` loads.

Offline: one process reads the ranks' shards from disk, one output file at a time, so that a model larger than this
machine's memory can be exported and nothing has to be gathered over the wire during training.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from laconic.checkpoint import StoredCheckpoint, open_checkpoint
from laconic.config.job import DataConfig, JobError, LoraConfig, ModelConfig, from_dict
from laconic.hf import lora as lora_
from laconic.hf.models import build_model

_TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "chat_template*",
)
_DTYPES = ("float32", "bfloat16", "float16")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="laconic export", description=__doc__.splitlines()[0])
    parser.add_argument("run", help="the output folder of a run (its newest intact checkpoint) or a step-N folder")
    parser.add_argument("out", help="the folder to make")
    parser.add_argument("--adapter", action="store_true", help="write the LoRA adapter alone, for peft, not merged")
    parser.add_argument("--dtype", choices=_DTYPES, help="convert to this dtype (default: as trained)")
    parser.add_argument("--base", help="where the run's model.path, or its config.json, lies now")
    parser.add_argument(
        "--max-file-bytes", type=int, default=5_000_000_000, help="size of an output file, and the memory needed"
    )
    arguments = parser.parse_args(argv)
    try:
        stored = export(
            arguments.run,
            arguments.out,
            adapter=arguments.adapter,
            dtype=getattr(torch, arguments.dtype) if arguments.dtype else None,
            base=arguments.base,
            max_file_bytes=arguments.max_file_bytes,
        )
    except (ValueError, OSError) as error:
        print(f"laconic export: {error}", file=sys.stderr)
        return 2
    print(f"{arguments.out}: {stored.folder} (step {stored.step})")
    return 0


def export(
    run: str | Path,
    out: str | Path,
    *,
    adapter: bool = False,
    dtype: torch.dtype | None = None,
    base: str | Path | None = None,
    max_file_bytes: int = 5_000_000_000,
) -> StoredCheckpoint:
    """Write `out`, whole or not at all; LoRA adapters are merged into the model unless `adapter`.

    Cost: host memory for one output file, `max_file_bytes` or the largest tensor. Raises: JobError, CheckpointError.
    """
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise JobError(f"{out} exists already; give a folder that does not")
    run = Path(run)
    stored = open_checkpoint(run / "checkpoints" if (run / "checkpoints").is_dir() else run)
    model_config, lora_config, tokenizer = _job(stored, base)
    if adapter and not lora_config.enabled:
        raise JobError(f"{stored.folder} was trained without LoRA and has no adapter; leave --adapter out")
    model = build_model(model_config, lora_config)
    writing = out.with_name(out.name + ".writing")
    shutil.rmtree(writing, ignore_errors=True)
    writing.mkdir(parents=True)
    if adapter:
        _write_adapter(model, stored, writing, dtype)
    else:
        _write_model(model, stored, writing, dtype, max_file_bytes)
        _write_configuration(lora_.base_model(model), model_config, writing, dtype)
    if tokenizer != "bytes":
        _copy_tokenizer(Path(tokenizer), writing)
    if out.exists():
        out.rmdir()
    writing.rename(out)
    return stored


def _job(stored: StoredCheckpoint, base: str | Path | None) -> tuple[ModelConfig, LoraConfig, str]:
    try:
        job = stored.extra["config"]
        moved = {"path" if "path" in job["model"] else "config": str(base)} if base else {}
        model_config = from_dict(ModelConfig, {**job["model"], **moved}, "model.")
        lora_config = from_dict(LoraConfig, job["lora"], "lora.")
        return model_config, lora_config, job["data"].get("tokenizer", DataConfig.tokenizer)
    except (KeyError, TypeError) as error:
        raise JobError(
            f"{stored.folder} was not written by laconic train: it does not say which model it holds"
        ) from error


def _write_model(
    model: nn.Module, stored: StoredCheckpoint, out: Path, dtype: torch.dtype | None, max_file_bytes: int
) -> None:
    from safetensors.torch import save_file

    values = _values(model, stored)
    sizes = {}
    for name, (shape, held, _) in values.items():
        converted = dtype if dtype is not None and held.is_floating_point else held
        sizes[name] = shape.numel() * converted.itemsize
    files = _fill(sizes, max_file_bytes)
    names = (
        ["model.safetensors"]
        if len(files) == 1
        else [f"model-{index:05d}-of-{len(files):05d}.safetensors" for index in range(1, len(files) + 1)]
    )
    for file_name, tensor_names in zip(names, files, strict=True):
        tensors = {name: _as(values[name][2](), dtype) for name in tensor_names}
        save_file(tensors, out / file_name, metadata={"format": "pt"})
    if len(files) > 1:
        weight_map = {name: file_name for file_name, group in zip(names, files, strict=True) for name in group}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def _values(
    model: nn.Module, stored: StoredCheckpoint
) -> dict[str, tuple[torch.Size, torch.dtype, Callable[[], Tensor]]]:
    """For each tensor of the base model by its name there: shape, dtype, and how to get its (merged) value.

    Raises: JobError if the checkpoint does not hold what the model needs.
    """
    stored_as = {id(tensor): name for name, tensor in _tensors(model)}
    if stored_as_missing := sorted(set(stored_as.values()) - stored.tensors.keys()):
        raise JobError(f"{stored.folder} lacks {', '.join(stored_as_missing[:8])}; it is a checkpoint of another model")
    adapted: dict[int, Any] = {}
    for _, _, layer in lora_.adapted_layers(model):
        for parameter in layer.get_base_layer().parameters():
            adapted.setdefault(id(parameter), layer)  # the outermost, where peft has wrapped a layer several times
    values: dict[str, tuple[torch.Size, torch.dtype, Callable[[], Tensor]]] = {}
    with lora_.adapters_put_aside(model):
        for name, tensor in _tensors(lora_.base_model(model)):
            if layer := adapted.get(id(tensor)):
                value = _merged(layer, tensor, stored, stored_as)
            else:
                value = _read(stored, stored_as[id(tensor)])
            values[name] = (tensor.shape, tensor.dtype, value)
    return values


def _read(stored: StoredCheckpoint, name: str) -> Callable[[], Tensor]:
    return lambda: stored.read([name])[name]


def _merged(layer: Any, parameter: Tensor, stored: StoredCheckpoint, stored_as: dict[int, str]) -> Callable[[], Tensor]:
    """Fill one adapted layer with its values, let peft merge it, take the parameter, and empty the layer again."""

    def value() -> Tensor:
        slots = [(m, key, p) for m in layer.modules() for key, p in m._parameters.items() if p is not None]
        filled = stored.read({stored_as[id(p)] for _, _, p in slots})
        try:
            for module, key, p in slots:
                module._parameters[key] = nn.Parameter(filled[stored_as[id(p)]], requires_grad=False)
            inner = [m for m in layer.modules() if hasattr(m, "merged_adapters")]
            for wrapper in reversed(inner):
                wrapper.merge()
                wrapper.merged_adapters.clear()
            module, key = next((m, key) for m, key, p in slots if p is parameter)
            return module._parameters[key].data
        finally:
            for module, key, p in slots:
                module._parameters[key] = p

    return value


def _write_adapter(model: Any, stored: StoredCheckpoint, out: Path, dtype: torch.dtype | None) -> None:
    names = {id(tensor): name for name, tensor in _tensors(model)}
    for _, _, layer in lora_.adapted_layers(model):
        for module in lora_.adapter_modules(layer):
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    name = names[id(parameter)]
                    module._parameters[key] = nn.Parameter(_as(stored.read([name])[name], dtype), requires_grad=False)
    model.save_pretrained(out, save_embedding_layers=False)


def _write_configuration(base: Any, config: ModelConfig, out: Path, dtype: torch.dtype | None) -> None:
    if dtype is not None:
        base.config.dtype = dtype
    base.config.architectures = [type(base).__name__]
    base.config.save_pretrained(out)
    given = Path(config.path) / "generation_config.json" if config.path else None
    if given is not None and given.is_file():
        shutil.copy(given, out)
    elif base.can_generate():
        base.generation_config.save_pretrained(out)


def _copy_tokenizer(folder: Path, out: Path) -> None:
    if not folder.is_dir():
        print(
            f"laconic export: the tokenizer's folder {folder} is gone; copy its files to {out} yourself",
            file=sys.stderr,
        )
        return
    for pattern in _TOKENIZER_FILES:
        for path in folder.glob(pattern):
            if path.is_file():
                shutil.copy(path, out)


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters (tied ones once) and persistent buffers, as a checkpoint names them."""
    yield from model.named_parameters()
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield (f"{prefix}.{name}" if prefix else name), buffer


def _fill(sizes_bytes: dict[str, int], max_file_bytes: int) -> list[list[str]]:
    files: list[list[str]] = [[]]
    in_last_bytes = 0
    for name, size_bytes in sizes_bytes.items():
        if files[-1] and in_last_bytes + size_bytes > max_file_bytes:
            files.append([])
            in_last_bytes = 0
        files[-1].append(name)
        in_last_bytes += size_bytes
    return files


def _as(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    converted = tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
    return converted.contiguous()
