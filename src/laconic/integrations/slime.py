"""`PullFolder`: published versions as SGLang's `/pull_weights` takes them, which slime's engines have.

    relay = PullFolder(Reader("/shared/weights"), "/shared/pull", model_folder="/models/base")
    while relay.reader.wait():
        number = relay.update()
        ...  # POST to each engine: /pull_weights, then /update_weights_from_disk

One process relays. The engines see new weights by two requests: `/pull_weights` with `source_dir` (the folder),
`local_checkpoint_dir` (a folder of the engine's own, which it fills) and `target_version` (the number); and
`/update_weights_from_disk` with this local folder as `model_path`.

[Note: Versions that are pulled]
An engine brings a checkpoint on its own disk to a version by files alone. Versions are numbered without gaps, from 1.
A full version is a folder of a model: safetensors files and, if these are several, their index. A delta names the
version before it in its index. Each tensor that changes is there under its name, as bytes that zstd has compressed:
`overwrite` is the number of bytes that change, their places and their new values; `xor` is the old bytes XOR the new
ones. The file's metadata has the Adler-32 of all new bytes of each such tensor, which the engine compares.

A version of ours is no such folder: it may have parts of tensors, and patches in the coding of publish/versions.py.
So the relay holds a copy of the values, reads by `Reader`, and writes what differs. Deltas need not follow our versions
one by one: those that were read as one are one delta.

Tests run against a stand-in with the conditions of SGLang's `local_checkpoint.py`. By hand, they ran against the file
of this name in slime's patch of SGLang (slime 624b824). The release 0.5.23 of SGLang has no `/pull_weights` without it.
"""

from __future__ import annotations

import importlib
import json
import shutil
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from laconic.comm.agreement import ranks_or_self
from laconic.extras import how_to_install
from laconic.hf.folder import INDEX, MAX_FILE_BYTES, whole_or_nothing, write_tensors
from laconic.publish import PublishError, Reader
from laconic.publish.changes import put
from laconic.publish.staging import StagedTensor
from laconic.publish.versions import MANIFEST, VERSION_NAME, version_name
from laconic.store.files import make_folder
from laconic.store.folder import remove_folders
from laconic.store.tensors import write_named

_DELTA_FILE = "model-00001-of-00001.safetensors"
_MOST_PLACES = 1 << 32
"""A byte further on has no place in `overwrite`."""
_MODEL_FILES = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".py")
"""The endings of a model folder's files that are not weights."""


class PullFolder:
    """Writes what a reader reads into a folder for `/pull_weights`: [Note: Versions that are pulled].

    It begins with a full version, also in a folder in which it has written before. A version has its name when all of
    it is on the disk. A number that was seen once keeps its contents.

    Args:
        reader: a reader, which serves this folder alone. Publish with `names="hub"`, which the engines load.
        to: a folder that the engines see. It has nothing else in it.
        model_folder: the folder with the model's config and tokenizer, which full versions get, as an engine replaces
            all files of its checkpoint by theirs. None if the engines need no such files there.
        full_every: a version in so many is full. The last two full ones are kept, and those after them.
        encoding: `overwrite`, which an engine may apply twice, or `xor`. A version with a changed tensor of 4 GiB or
            more is written as `xor` in any case.

    Cost: host memory for one copy of the model, and for one patch.

    Raises:
        PublishError: `to` is a folder that a `Publisher` writes, or `model_folder` is none.
        ImportError: pyarrow, which compresses, is not installed.
    """

    def __init__(
        self,
        reader: Reader,
        to: str | Path,
        *,
        model_folder: str | Path | None = None,
        full_every: int = 50,
        encoding: Literal["overwrite", "xor"] = "overwrite",
    ) -> None:
        if full_every < 1 or encoding not in ("overwrite", "xor"):
            raise PublishError(f"full_every={full_every}, encoding={encoding!r}: give 1 or more, and overwrite or xor")
        self.reader, self.folder, self.encoding, self.full_every = reader, Path(to), encoding, full_every
        self._model_folder = None if model_folder is None else Path(model_folder)
        if self._model_folder is not None and not self._model_folder.is_dir():
            raise PublishError(f"model_folder={str(model_folder)!r} is no folder; give one with config.json")
        self._arrow = _arrow()
        make_folder(self.folder)
        written = _numbers(self.folder)
        if any((self.folder / version_name(number) / MANIFEST).exists() for number in written):
            raise PublishError(f"{self.folder} has versions of a Publisher; give the relay a folder of its own")
        self.number = max(written, default=0)
        """The newest version in the folder; 0 if there is none."""
        self._values: dict[str, Tensor] = {}
        self._since_full = 0

    def update(self) -> int:
        """Write what has changed, if anything has, and return the number of the folder's newest version.

        Raises:
            PublishError: see `Reader.update`. Nothing was written.
            OSError, JobError: the folder cannot be written. The next version is full.
        """
        if not self._values:
            self.reader.version = None  # all values, whatever it has read before
            values = {patch.name: patch.values.contiguous() for patch in self.reader.patches()}
            self._write_full(values)
            self._values = values
            return self.number
        plan = self.reader.plan(self._values)
        if not plan.path:  # the version differs in nothing
            self.reader.apply(plan, {})
            return self.number
        staged = self.reader.stage(plan)
        values, self._values = self._values, {}  # an error from here on leaves none, so that the next one is full
        if self._since_full + 1 < self.full_every:
            self._write_delta(values, staged)
            self.reader.apply(plan, staged)
        else:
            self.reader.apply(plan, staged)
            self._write_full(values)
        self._values = values
        return self.number

    def _write_full(self, values: Mapping[str, Tensor]) -> None:
        with whole_or_nothing(self._next, ranks_or_self(None)) as temporary:
            for path in sorted(self._model_folder.iterdir()) if self._model_folder else ():
                if path.is_file() and path.name.endswith(_MODEL_FILES) and not path.name.endswith(".index.json"):
                    shutil.copyfile(path, temporary / path.name)
            write_tensors(
                temporary,
                values,
                lambda names: (values[name] for name in names),
                dtype=None,
                max_file_bytes=MAX_FILE_BYTES,
                ranks=ranks_or_self(None),
            )
        self.number, self._since_full = self.number + 1, 0
        numbers = _numbers(self.folder)
        full = [number for number in numbers if not _is_delta(self.folder / version_name(number))]
        old = [number for number in numbers if number < full[-2:][0]]
        remove_folders([self.folder / version_name(number) for number in old])

    def _write_delta(self, values: Mapping[str, Tensor], staged: Mapping[str, StagedTensor]) -> None:
        encoding = self.encoding
        if any(values[name].nbytes >= _MOST_PLACES for name, each in staged.items() if _may_differ(each)):
            encoding = "xor"
        changed: dict[str, Tensor] = {}
        checksums: dict[str, str] = {}
        for name, each in staged.items():
            for delta, new in _delta_of(values[name], each, encoding):
                packed = self._arrow.compress(delta.numpy(), codec="zstd", asbytes=True)
                changed[name] = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
                checksums[name] = f"{zlib.adler32(new.numpy().data):08x}"
        index = {
            "metadata": {
                "version": f"{self.number + 1:06d}",
                "base_version": f"{self.number:06d}",
                "delta_encoding": encoding,
                "compression_format": "zstd",
                "checksum_format": "adler32",
            },
            "weight_map": dict.fromkeys(changed, _DELTA_FILE),
        }
        with whole_or_nothing(self._next, ranks_or_self(None)) as temporary:
            write_named(temporary / _DELTA_FILE, changed, checksums)
            (temporary / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")
        self.number, self._since_full = self.number + 1, self._since_full + 1

    @property
    def _next(self) -> Path:
        return self.folder / version_name(self.number + 1)


def _delta_of(old: Tensor, staged: StagedTensor, encoding: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the delta of a tensor before compression, and its new bytes, (n,), uint8 each, if it differs.

    Cost: host memory for the tensor twice.
    """
    if not _may_differ(staged):
        return
    if staged.full is None:
        new = old.clone()
        put(new, *staged.changes)
    else:
        new = staged.full
    before, after = (each.contiguous().view(-1).view(torch.uint8) for each in (old, new))
    difference = before ^ after
    places = difference.nonzero().view(-1)
    if not len(places):
        return
    if encoding == "xor":
        yield difference, after
        return
    counted = torch.cat([torch.tensor([len(places)]), places])
    # torch has few operations on uint32; so the lower half of little-endian int64
    words = counted.view(torch.int32)[::2].contiguous().view(torch.uint8)
    yield torch.cat([words, after[places]]), after


def _may_differ(staged: StagedTensor) -> bool:
    return staged.full is not None or len(staged.changes[0]) > 0


def _numbers(folder: Path) -> list[int]:
    """The versions in a folder, ascending."""
    return sorted(int(found[1]) for path in folder.iterdir() if (found := VERSION_NAME.fullmatch(path.name)))


def _is_delta(version: Path) -> bool:
    try:
        return "delta_encoding" in json.loads((version / INDEX).read_text(encoding="utf-8")).get("metadata", {})
    except FileNotFoundError:
        return False


def _arrow() -> Any:
    try:
        return importlib.import_module("pyarrow")
    except ImportError as error:
        raise ImportError(f"{error}: deltas need it; {how_to_install('train')}") from error
