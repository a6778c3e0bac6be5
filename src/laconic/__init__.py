"""Communication-efficient training for PyTorch: FSDP2's call, with less traffic between machines."""

import ast
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from laconic.shard import extension

__version__ = "0.1.0"

_HOMES = {
    alias.name: node.module
    for node in ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")).body
    if isinstance(node, ast.ImportFrom) and node.module is not None
    for alias in node.names
}
"""The module of each public name, as the stub beside this file has it. `import laconic` itself imports no torch: a
command first checks its arguments and its job description, and reports a mistake at once. `load_safetensors` and
`save_safetensors` need the package safetensors; all other names need torch alone."""

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    """Import a public name, or a room, when it is first used."""
    if name in _HOMES:
        value = globals()[name] = getattr(import_module(_HOMES[name]), name)
        return value
    if not name.startswith("_") and find_spec(f"laconic.{name}") is not None:
        return import_module(f"laconic.{name}")
    raise AttributeError(f"module 'laconic' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _save_pretrained(model: Any, *args: Any, **options: Any) -> Any:
    """Save a sharded transformers or peft model; see `laconic.hf.saving.save_pretrained`. Collective."""
    return import_module("laconic.hf.saving").save_pretrained(model, *args, **options)


def _push_to_hub(model: Any, *args: Any, **options: Any) -> Any:
    """Push a sharded transformers or peft model; see `laconic.hf.saving.push_to_hub`. Collective."""
    return import_module("laconic.hf.saving").push_to_hub(model, *args, **options)


extension.overrides.update(save_pretrained=_save_pretrained, push_to_hub=_push_to_hub)


def _guard() -> Any:
    """The observer of the engine: the engine does not know the room above it that looks for mistakes and damage."""
    return import_module("laconic.guard.guard").Guard


extension.observer_class = _guard
