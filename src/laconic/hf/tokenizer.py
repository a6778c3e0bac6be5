"""Bytes, or a local Hugging Face tokenizer."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from laconic.config.job import JobError


class Tokenizer(Protocol):
    """Turns documents into tokens."""

    vocab_size: int
    """Tokens are below this."""
    separator: int | None
    """Written after each document."""
    identity: str
    """Changes whenever the tokens of some text would."""

    def encode(self, documents: Sequence[bytes]) -> list[np.ndarray]:
        """One array of tokens per document."""
        ...


class ByteTokenizer:
    """Every byte is a token. Byte 0 never occurs in text, which makes it the separator at no cost in vocabulary."""

    vocab_size = 256
    separator: int | None = 0
    identity = "bytes"

    def encode(self, documents: Sequence[bytes]) -> list[np.ndarray]:
        return [np.frombuffer(document, dtype=np.uint8) for document in documents]


class FolderTokenizer:
    """A tokenizer from a local folder, as `AutoTokenizer` reads it, or a lone `tokenizer.json`."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = _load(folder)
        self.vocab_size = len(self._tokenizer)
        self.separator: int | None = self._tokenizer.eos_token_id
        digest = hashlib.sha256()
        for path in sorted(folder.iterdir()):
            if path.is_file() and path.suffix in (".json", ".model", ".txt"):
                digest.update(path.name.encode() + path.read_bytes())
        self.identity = f"folder-{digest.hexdigest()}"

    def encode(self, documents: Sequence[bytes]) -> list[np.ndarray]:
        texts = [document.decode("utf-8", errors="replace") for document in documents]
        rows = self._tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        return [np.asarray(row, dtype=np.int64) for row in rows]


def _load(folder: Path) -> Any:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if not (folder / "tokenizer_config.json").is_file() and (folder / "tokenizer.json").is_file():
        return PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)


def load_tokenizer(name: str) -> Tokenizer:
    """`bytes`, or the tokenizer in the folder `name`."""
    if name == "bytes":
        return ByteTokenizer()
    folder = Path(name)
    if not folder.is_dir():
        raise JobError(f"data.tokenizer = {name!r} is neither 'bytes' nor a folder on this machine")
    try:
        return FolderTokenizer(folder)
    except Exception as error:  # transformers raises whatever its parsers raise
        reason = str(error).strip().splitlines()
        raise JobError(
            f"data.tokenizer = {name!r} does not hold a tokenizer that transformers can read: "
            f"{reason[0] if reason else type(error).__name__}"
        ) from error
