"""Sidecars: each rank's own values in a checkpoint, as JSON and never as pickle; and random number states."""

import base64
import json
import math
import random
import sys
from pathlib import Path
from typing import Any

import torch

from laconic.comm.launch import initialized_accelerator

_TENSOR = "__tensor__"


def name(rank: int) -> str:
    """Return the file name of a rank's sidecar."""
    return f"rank-{rank:05d}.json"


def encode(tree: dict[str, Any]) -> str:
    """Return JSON for a tree of dicts with string keys, lists, tuples, str, int, float, bool, None and small tensors.

    Raises:
        ValueError: the tree has a value of another type; the message names the place.
    """
    return json.dumps(_encode(tree, "extra"))


def decode(text: str) -> dict[str, Any]:
    """Return the tree of `encode`. Tuples have become lists."""
    return json.loads(text, object_hook=_decode)


def read(folder: Path, rank: int = 0) -> dict[str, Any]:
    """Read the tree of a rank that has written one. Tuples have become lists."""
    return decode((folder / name(rank)).read_text())


def rng_state() -> dict[str, Any]:
    """Return this rank's random number states: torch's, Python's, and numpy's if numpy is imported.

    torch's states are those of the CPU and, if this process has used it, of the accelerator's current device.
    """
    kind, words, gauss = random.getstate()
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": [kind, list(words), gauss]}
    device = initialized_accelerator()
    if device is not None:
        state[device.type] = torch.get_device_module(device).get_rng_state()
    if "numpy" in sys.modules:
        name, key, position, has_gauss, cached = sys.modules["numpy"].random.get_state()
        state["numpy"] = [name, key.tolist(), position, has_gauss, cached]
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore the states that `rng_state` returned, so that the same numbers are drawn next."""
    torch.set_rng_state(state["torch"])
    kind, words, gauss = state["python"]
    random.setstate((kind, tuple(words), gauss))
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None and accelerator.type in state:
        torch.get_device_module(accelerator).set_rng_state(state[accelerator.type])
    if "numpy" in state and "numpy" in sys.modules:
        name, key, position, has_gauss, cached = state["numpy"]
        numpy = sys.modules["numpy"]
        numpy.random.set_state((name, numpy.array(key, dtype=numpy.uint32), position, has_gauss, cached))


def _encode(value: Any, place: str) -> Any:
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1)
        data = base64.b64encode(bytes(flat.view(torch.uint8).tolist())).decode() if flat.numel() else ""
        return {_TENSOR: data, "dtype": str(flat.dtype).removeprefix("torch."), "shape": list(value.shape)}
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value) or _TENSOR in value:
            raise ValueError(f"{place} has keys that are not strings or that are {_TENSOR!r}; use other keys")
        return {key: _encode(item, f"{place}[{key!r}]") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_encode(item, f"{place}[{index}]") for index, item in enumerate(value)]
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    raise ValueError(
        f"{place} is a {type(value).__name__}, expected dicts, lists, strings, numbers and tensors: a checkpoint holds "
        "no pickled objects; convert it, for example with its state_dict()"
    )


def _decode(value: dict[str, Any]) -> Any:
    if _TENSOR not in value:
        return value
    dtype, shape = getattr(torch, value["dtype"]), value["shape"]
    if not math.prod(shape):
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(base64.b64decode(value[_TENSOR])), dtype=dtype).reshape(shape).clone()
