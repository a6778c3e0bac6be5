"""From documents to token files: every source, every way to be wrong."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from laconic.config import DataConfig, JobError
from laconic.data import tokens as data
from laconic.data.corpus import open_corpus
from laconic.models.tokenizer import ByteTokenizer, load_tokenizer


def tokens_of(folder: Path, **settings: Any) -> data.TokenFiles:
    config = DataConfig(**{"kind": "text", "sequence_length": 4, "eval_fraction": 0.0, **settings})
    index = data.prepare(config, load_tokenizer(config.tokenizer), folder / "tokens")
    return data.open_tokens(index, config)


def text(tokens: np.ndarray) -> str:
    return bytes(tokens).decode()


def test_texts_of_a_file_and_of_a_folder_in_byte_order(tmp_path: Path) -> None:
    (tmp_path / "source" / "sub").mkdir(parents=True)
    files = {"b.txt": "bee", "a.txt": "ä", "sub/c.md": "sea", ".hidden": "no"}
    for name, content in files.items():
        (tmp_path / "source" / name).write_text(content)
    for path, wanted in [("source/b.txt", "bee\0"), ("source", "ä\0bee\0sea\0")]:
        assert text(tokens_of(tmp_path, path=str(tmp_path / path)).train) == wanted


def test_lines_of_json(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "one", "body": "1"}\n{"text": "twö", "body": "2"}\n')
    for settings, wanted in [({}, "one\0twö\0"), ({"text_field": "body"}, "1\0002\0")]:
        assert text(tokens_of(tmp_path, kind="datasets", path=str(path), **settings).train) == wanted


def test_datasets_on_disk(tmp_path: Path) -> None:
    import datasets

    rows = datasets.Dataset.from_dict({"text": ["one", "two"], "n": [1, 2]})
    rows.save_to_disk(tmp_path / "rows")
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(tmp_path / "splits")
    datasets.DatasetDict({"test": rows}).save_to_disk(tmp_path / "no-train")
    for name in ("rows", "splits"):
        assert text(tokens_of(tmp_path, kind="datasets", path=str(tmp_path / name)).train) == "one\0two\0"
    for name, field, part in [
        ("no-train", "text", "no 'train'"),
        ("rows", "body", "it has only ['n', 'text']"),
        ("rows", "n", "no text in the field 'n'"),
    ]:
        with pytest.raises(JobError) as refused:
            tokens_of(tmp_path, kind="datasets", path=str(tmp_path / name), text_field=field)
        assert part in str(refused.value)


def test_the_standard_library_needs_nothing(tmp_path: Path) -> None:
    corpus = open_corpus(DataConfig())
    root = Path(sysconfig.get_path("stdlib"))
    names = [Path(document.name).relative_to(root).as_posix() for document in corpus.documents()]
    assert {"json/decoder.py", "ast.py"} <= set(names)
    assert names == sorted(names)
    assert not any("site-packages" in name or name.startswith("test/") for name in names)


def test_a_local_tokenizer_folder(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<eos>": 0, "?": 1, "take": 2, "one": 3, "down": 4}
    backend = Tokenizer(models.WordLevel(words, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    lone = tmp_path / "lone"
    lone.mkdir()
    backend.save(str(lone / "tokenizer.json"))
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>").save_pretrained(tmp_path / "whole")
    path = tmp_path / "a.txt"
    path.write_text("take one, down")
    for name, separator in (("whole", [0]), ("lone", [])):
        found = tokens_of(tmp_path, path=str(path), tokenizer=str(tmp_path / name)).train
        assert found.tolist() == [2, 3, 1, 4, *separator]
    assert load_tokenizer(str(lone)).vocab_size == 5


@pytest.mark.parametrize(
    ("kind", "content", "part"),
    [
        ("text", b"", "is empty: no text in 1 documents"),
        ("text", b"GIF8\0\1\2", "is binary, not text: a NUL byte at offset 4"),
        ("text", b"abc", "shorter than one sequence of data.sequence_length = 16"),
        ("datasets", b'{"text": "a"}\nplain', "cannot read"),
        ("datasets", b'{"txt": "a"}', "row 0 has no text in the field 'text' (data.text_field): it has only ['txt']"),
        ("datasets", b'{"text": 3}', "it holds 3 there"),
        ("datasets", b'{"text": "a\\u0000"}', "is binary"),
    ],
)
def test_bad_corpora_are_refused(tmp_path: Path, kind: str, content: bytes, part: str) -> None:
    path = tmp_path / ("corpus.jsonl" if kind == "datasets" else "corpus")
    path.write_bytes(content)
    with pytest.raises(JobError) as refused:
        tokens_of(tmp_path, kind=kind, path=str(path), sequence_length=16)
    assert part in str(refused.value)
    assert "corpus" in str(refused.value)
    assert not list((tmp_path / "tokens").glob("*.tmp"))


def test_missing_paths_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "a").write_text("abcdef")
    refusals = [({"path": "nowhere"}, "does not exist"), ({"path": "empty"}, "holds no file")]
    refusals += [({"path": "empty", "kind": "datasets"}, "save_to_disk"), ({"path": "a"}, "cannot create the folder")]
    for settings, part in refusals:
        if settings["path"] == "a":
            (tmp_path / "tokens").write_text("a file where the folder should be")
        with pytest.raises(JobError, match=part):
            tokens_of(tmp_path, **{**settings, "path": str(tmp_path / settings["path"])})
    for name, part in (("nowhere", "neither 'bytes' nor a folder"), ("empty", "does not hold a tokenizer")):
        with pytest.raises(JobError, match=part):
            load_tokenizer(str(tmp_path / name))


def test_tokenised_once_until_the_corpus_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    path.write_text("abcdef")
    first = tokens_of(tmp_path, path=str(path))
    assert isinstance(first.train, np.memmap)
    with monkeypatch.context() as patch:
        patch.setattr(ByteTokenizer, "encode", None)  # would fail if anything were tokenised
        assert text(tokens_of(tmp_path, path=str(path)).train) == "abcdef\0"
    path.write_text("another text")
    assert text(tokens_of(tmp_path, path=str(path)).train) == "another text\0"
    assert text(first.train) == "abcdef\0"


@pytest.mark.parametrize(("pattern", "keeps"), [("train-*.bin", None), ("eval-*.bin", 3), ("corpus-*.json", 0)])
def test_a_file_that_is_missing_or_short_is_written_again(tmp_path: Path, pattern: str, keeps: int | None) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps({"text": f"document {number};"}) + "\n" for number in range(40)))
    settings: dict[str, Any] = {"kind": "datasets", "path": str(path), "eval_fraction": 0.25}
    first = tokens_of(tmp_path, **settings)
    (file,) = (tmp_path / "tokens").glob(pattern)
    content = file.read_bytes()
    file.unlink()  # the mapped tokens keep the old file
    if keeps is not None:
        file.write_bytes(content[:keeps])
    again = tokens_of(tmp_path, **settings)
    assert file.read_bytes() == content
    assert text(again.train) == text(first.train)
    assert text(again.evaluation) == text(first.evaluation)


def test_documents_are_held_out_whole(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    documents = [f"document {number};" for number in range(400)]
    path.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
    tokens = tokens_of(tmp_path, kind="datasets", path=str(path), eval_fraction=0.25)
    train, held_out = text(tokens.train).split("\0")[:-1], text(tokens.evaluation).split("\0")[:-1]
    assert sorted(train + held_out) == sorted(documents)
    assert 60 < len(held_out) < 140
    assert tokens.num_documents == 400


def test_one_document_is_split_at_its_tail(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("abcdefghijklmnopqrs")
    tokens = tokens_of(tmp_path, path=str(path), eval_fraction=0.25)
    assert (text(tokens.train), text(tokens.evaluation)) == ("abcdefghijklmno", "pqrs\0")
    with pytest.raises(JobError, match=r"0 tokens to train on once 20 are held out"):
        tokens_of(tmp_path, path=str(path), sequence_length=20, eval_fraction=0.25)


def test_rows() -> None:
    rows = data.rows_at(np.arange(10, dtype=np.uint8), np.array([[0, 7], [3, 4]]), 3)
    assert rows.dtype == np.int64
    assert rows.tolist() == [[[0, 1, 2], [7, 8, 9]], [[3, 4, 5], [4, 5, 6]]]
