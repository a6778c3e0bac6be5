"""The device memory that a publisher adds, on the accelerator of `laconic.rehearse`: no GPU is needed."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers.models.llama import modeling_llama  # noqa: F401  before a rehearsal, whose streams are no classes

from benchmarks.llama import decoder_layers, loss_of
from laconic.publish import Reader
from tests.support.published_on_device import AddedMemory, Trained, publish_on_device
from tests.support.record import Row, ratio_row

_ENCODINGS = ("gaps", "lossless", "smallest")
_VERSIONS = 4
_MEASURES = ("laconic.codec.lossless", "laconic.publish", "laconic.rehearse")


def memory_row(bench: Any) -> Row:
    """The device memory of versions, against the largest unit's shard."""
    found = {local: {each: _added(bench, local, each) for each in _ENCODINGS} for local in (2, 1)}
    row = ratio_row(
        claim="device memory that a publisher adds at any moment, against one unit's shard, 2 x 2 / one rank",
        ratio=max(max(added.peaks) / added.unit for of in found.values() for added in of.values()),
        note=f"{_llama(bench)}, fp32 with bf16 compute, on the emulated accelerator of laconic.rehearse, with values. "
        + "; ".join(_in_words(local, of) for local, of in found.items())
        + f". All that a version allocates between the begin of `publish` and its commit, without what training frees "
        f"meanwhile. Of {_VERSIONS} versions the first has all values, in the second one all elements change, and the "
        "third one has a patch and all values. The other three ranks are not there, so rank 0 commits no version. One "
        "rank alone commits them; a reader had the last one, to the bit. A kernel's own memory, as `nonzero` takes on "
        "a GPU, is not seen: `python -m benchmarks.gpu --rows publish-memory` measures the same on one.",
    )  # fmt: skip
    measured = " / ".join(f"{max(max(a.peaks) / a.unit for a in of.values()):.3f}x" for of in found.values())
    return dataclasses.replace(row, measured=measured, measures=_MEASURES)


def _llama(bench: Any) -> Any:
    """The benchmark's model, on few tokens: they do not change what a publisher takes."""
    return dataclasses.replace(bench.job.llama, batch=1, sequence=16)


def _added(bench: Any, local: int, encoding: str) -> AddedMemory:
    llama = _llama(bench)
    device = torch.device("cuda")
    trained = Trained(
        build=lambda device: llama.build(device, torch.float32),
        units=decoder_layers,
        loss=lambda model, step: loss_of(model, llama.tokens(device, seed=step)),
    )
    with tempfile.TemporaryDirectory(dir=bench.out) as folder:
        added = publish_on_device(
            trained, Path(folder), versions=_VERSIONS, nodes=local, local=local, encoding=encoding, base_every=3
        )
        if added.left:
            raise RuntimeError(f"{encoding}: {added.left} bytes of device memory stay after a version")
        if local == 1:
            held = {name: torch.zeros_like(values) for name, values in added.weights.items()}
            Reader(folder).update(held)
            if wrong := [name for name, values in added.weights.items() if not torch.equal(held[name], values)]:
                raise RuntimeError(f"{encoding}: read back differently: {wrong}")
    return added


def _in_words(local: int, of: dict[str, AddedMemory]) -> str:
    unit = next(iter(of.values())).unit
    each = ", ".join(f"{name} {' '.join(f'{peak / 1e6:.3f}' for peak in added.peaks)}" for name, added in of.items())
    where = "One rank alone" if local == 1 else f"Rank 0 of {local} x {local}"
    return f"{where}, whose largest unit has {unit / 1e6:.3f} MB: {each} MB"
