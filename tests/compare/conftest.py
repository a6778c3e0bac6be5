"""A job that is small enough to run in a test."""

from __future__ import annotations

from pathlib import Path

import pytest

TINY = """
[model.config]
model_type = "llama"
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 2
num_attention_heads = 2
num_key_value_heads = 1

[lora]
rank = 1
targets = ["q_proj"]
[data]
kind = "text"
path = "corpus.txt"
sequence_length = 16
[train]
micro_batch_size = 1
[log]
tensorboard = false
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus.txt").write_text("little is said on the wire, and little is enough\n" * 100)
    path = tmp_path / "job.toml"
    path.write_text(TINY)
    return path
