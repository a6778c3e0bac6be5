"""Tokenizers of a job: bytes, or a local Hugging Face tokenizer; their files beside a run and in exports."""

import functools
import hashlib
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from laconic.config import JobError, ModelConfig


class ByteTokenizer:
    """Every byte is a token. Byte 0 never occurs in text, so it is the separator and adds no token."""

    vocab_size = 256
    """The number of tokens; every token is smaller."""
    separator: int | None = 0
    """The token after each document; None if there is none."""
    identity = "bytes"
    """A text that is equal only for tokenizers that encode all texts equally."""

    def encode(self, documents: Sequence[bytes]) -> list[np.ndarray]:
        """Encode UTF-8 documents. Shapes: one array (tokens,) per document, of any integer dtype."""
        return [np.frombuffer(document, dtype=np.uint8) for document in documents]


class FolderTokenizer:
    """A tokenizer from a local folder, as `AutoTokenizer` reads it, or a lone `tokenizer.json`: see `ByteTokenizer`."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = load_folder_tokenizer(folder)
        self.vocab_size = len(self._tokenizer)
        self.separator: int | None = self._tokenizer.eos_token_id
        digest = hashlib.sha256()
        for path in sorted(folder.iterdir()):
            if path.is_file() and path.suffix in (".json", ".model", ".txt", ".jinja"):
                digest.update(path.name.encode() + path.read_bytes())
        self.identity = f"folder-{digest.hexdigest()}"

    def encode(self, documents: Sequence[bytes]) -> list[np.ndarray]:
        """See `ByteTokenizer.encode`."""
        texts = [document.decode("utf-8", errors="replace") for document in documents]
        rows = self._tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        return [np.asarray(row, dtype=np.int64) for row in rows]


Tokenizer = ByteTokenizer | FolderTokenizer
"""Turns documents into tokens."""


@functools.cache
def transformers_bytes() -> Any:
    """The byte tokenizer as transformers has tokenizers: it knows which characters a token belongs to."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models
    from transformers import PreTrainedTokenizerFast

    names = {f"<0x{byte:02X}>": byte for byte in range(256)}  # the names under which unknown characters fall back
    backend = Backend(models.BPE(vocab=names, merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    # a text that spells a token's name is text
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<0x00>", split_special_tokens=True)


def load_folder_tokenizer(folder: Path) -> Any:
    """The tokenizer of a folder, as transformers has tokenizers."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if not (folder / "tokenizer_config.json").is_file() and (folder / "tokenizer.json").is_file():
        return PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)


def with_vocabulary(model: ModelConfig, tokenizer: Callable[[], Tokenizer]) -> ModelConfig:
    """The model with the tokenizer's `vocab_size` in its table, if it has a table without one."""
    table = model.config
    if not isinstance(table, dict) or "vocab_size" in table:
        return model
    return replace(model, config={**table, "vocab_size": tokenizer().vocab_size})


def load_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer that `data.tokenizer` names: "bytes", or a folder.

    Raises:
        JobError: there is no such folder, or transformers cannot read a tokenizer from it.
    """
    if name == "bytes":
        return ByteTokenizer()
    folder = Path(name)
    if not os.path.isdir(folder):  # unlike Path.is_dir, it is false for a name that is too long
        raise JobError(f"data.tokenizer = {name!r} is neither 'bytes' nor a folder on this machine")
    try:
        return FolderTokenizer(folder)
    except Exception as error:  # transformers raises whatever its parsers raise
        reason = str(error).strip().splitlines()
        raise JobError(
            f"data.tokenizer = {name!r} does not hold a tokenizer that transformers can read: "
            f"{reason[0] if reason else type(error).__name__}"
        ) from error


KEPT = "tokenizer"
"""The folder in a run's output that keeps the files, in case the tokenizer's own folder moves."""

_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "chat_template*",
)


def save_tokenizer(name: str, out: Path) -> None:
    """Write the tokenizer that `data.tokenizer` names into `out`: its folder's files, or bytes in transformers' form.

    Raises:
        JobError: the tokenizer's folder is gone.
    """
    out.mkdir(parents=True, exist_ok=True)
    folder = Path(name)
    if name == "bytes":
        transformers_bytes().save_pretrained(out)
    elif not folder.is_dir():
        raise JobError(f"the tokenizer's folder {name!r} is gone; put it back, so that the export has a tokenizer")
    elif (folder / "tokenizer_config.json").is_file():
        for path in {path for pattern in _FILES for path in folder.glob(pattern) if path.is_file()}:
            shutil.copy(path, out)
    else:  # a lone tokenizer.json, which AutoTokenizer would not load
        load_folder_tokenizer(folder).save_pretrained(out)
