"""`laconic plan layout`: the table, the rules beside it, the picture, and refusals."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import matplotlib
import pytest

from laconic import cli
from laconic.layout.granularity import rows
from laconic.plan.known import models
from laconic.plan.padding import UnitShapes, fsdp2_numel, layout_rows, lcm_numel, plan_of, shapes_of
from laconic.plan.pictures import draw_layout
from tests.support.layers import DEEPSEEK_V3, GPT_OSS_120B, LLAMA_3_70B

LLAMA_CONFIG = {
    "model_type": "llama", "vocab_size": 96, "hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("layer", "numel", "num_ranks", "fsdp2", "lcm"),
    [(LLAMA_3_70B, 855654400, 384, 1.84, 0.37), (GPT_OSS_120B, 3213080192, 100, 55.8, 3.26),
     (DEEPSEEK_V3, 11507286272, 384, 8.82, 1.04)],
)  # fmt: skip
def test_rules_of_others_pad_as_published(
    layer: UnitShapes, numel: int, num_ranks: int, fsdp2: float, lcm: float
) -> None:
    assert layer.numel == numel
    assert 100 * (fsdp2_numel(layer.shapes, num_ranks) / layer.numel - 1) == pytest.approx(fsdp2, rel=0.02)
    assert 100 * (lcm_numel(layer.shapes, num_ranks) / layer.numel - 1) == pytest.approx(lcm, rel=0.02)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_CONFIG), encoding="utf-8")
    return tmp_path


def test_units_of_a_config_are_those_of_the_trainer_or_neighbouring_layers(folder: Path) -> None:
    model = shapes_of(str(folder))
    layer, rest = model.units()
    assert (layer.count, layer.name, rest.count) == (3, "LlamaDecoderLayer", 1)
    assert dict(zip(layer.names, layer.shapes, strict=True))["mlp.down_proj.weight"] == (32, 80)
    assert set(rest.names) == {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    assert shapes_of(str(folder / "config.json")) == model
    pair, single, _ = model.units(2)
    assert (pair.count, single.count) == (1, 1)
    assert pair.shapes == single.shapes * 2
    assert pair.names == tuple(f"{index}.{name}" for index in (0, 1) for name in single.names), "as fully_shard's list"


@pytest.mark.parametrize("name", ["gemma-3-27b", "qwen3-235b-a22b"])
def test_published_models_have_as_many_parameters_as_their_makers_say(name: str) -> None:
    """benchmarks.layout checks all of them."""
    assert shapes_of(name).numel / 1e9 == pytest.approx(models()[name].billions, rel=0.01)


def test_padding_of_a_model_weighs_its_units() -> None:
    units = (
        UnitShapes(name="a", names=("w",), shapes=((3, 8),), count=2),
        UnitShapes(name="b", names=("w",), shapes=((4, 8),)),
    )
    (row,) = layout_rows(units, [2], [1], itemsize=2)
    assert row.padding == pytest.approx(2 * 8 / (2 * 24 + 32))
    assert row.num_buckets == 1
    assert [unit for unit, _ in row.explanations] == ["a", "b"]


def test_the_command_shows_a_table_explanations_and_remedies(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model", "gpt-oss-120b", "--ranks", "64,1024", "--rows", "1,32", "--explain"]
    assert cli.main(["plan", "layout", *options]) == 0
    shown = capsys.readouterr().out
    words = " ".join(shown.split())
    assert "116,829,156,672 elements in 36 x GptOssDecoderLayer, rest" in words
    assert re.search(r"1024 +0\.07% \(2\) +4\.06% \(2\)", shown)
    assert "a block of self_attn.o_proj.weight has 131,072 elements, an even share only 11,520" in words
    flat, rows_kept = [line for line in shown.splitlines() if line.startswith("1024 ranks, 32 rows: 4.06% -> ")]
    assert "flat blocks of 256: for layer in layers:" in flat
    assert '2 replicas of 512 ranks: mesh = laconic.init_mesh("cuda", islands=2)' in rows_kept


def test_json_holds_the_numbers_of_the_table(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "layout", "--model", str(folder), "--ranks", "2,100", "--rows", "16", "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert (first["num_ranks"], second["num_ranks"], second["num_rows"]) == (2, 100, 16)
    model = shapes_of(str(folder))
    layer, rest = second["buckets"]  # as each has a single one
    assert 3 * layer["numel"] + rest["numel"] == model.numel
    assert second["padding"] == pytest.approx((3 * layer["padding"] + rest["padding"]) / model.numel)
    assert {"cause", "tensors", "text", "shard_numel"} <= set(layer)
    assert first["remedies"] == []
    assert [each["blocks"] for each in second["remedies"]] == ["flat", "rows"]
    assert all(call in each["text"] for each in second["remedies"] for call in each["calls"])


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        (["--model", "no-such-model"], ["'no-such-model'", "deepseek-v3"]),
        (["--model", "{folder}"], ["no causal language model"]),
        (["--model", "llama-3-70b", "--ranks=8,x"], ["--ranks: 'x' is not a positive number"]),
        (["--model", "llama-3-70b", "--ranks=2", "--draw", "{folder}/missing/layer.svg"], ["missing first"]),
        (["--model", "llama-3-70b", "--ranks=2", "--draw", "layer.docx"], ["end it in .png, .svg, .pdf"]),
    ],
)
def test_mistakes_are_named_before_the_work(
    tmp_path: Path, arguments: list[str], messages: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "vit"}', encoding="utf-8")
    try:
        code = cli.main(["plan", "layout", *(each.format(folder=tmp_path) for each in arguments)])
    except SystemExit as stopped:
        code = stopped.code
    shown = capsys.readouterr()
    assert (code, shown.out) == (2, "")
    assert all(message in shown.err for message in messages), shown.err


def test_without_matplotlib_the_message_says_how_to_install_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert cli.main(["plan", "layout", "--model", str(folder), "--ranks", "2", "--draw", "a.png"]) == 2
    assert "--draw needs matplotlib; pip install '.[bench]' in a clone" in capsys.readouterr().err


def drawn(unit: UnitShapes, num_ranks: int, num_rows: int) -> Any:
    return draw_layout(plan_of(unit, num_ranks, rows(num_rows), itemsize=2), "a picture")


def test_the_picture_shows_every_extent_to_scale() -> None:
    (axes,) = drawn(LLAMA_3_70B, 12, 16).axes
    (bucket,) = plan_of(LLAMA_3_70B, 12, rows(16), itemsize=2).buckets
    extents = [bucket.extent(index, shard) for shard in range(12) for index in range(len(bucket.slots))]
    bars = [path.get_extents() for line in axes.collections for path in line.get_paths()]
    assert [bar.width for bar in bars] == pytest.approx([each.numel for each in extents if each is not None])
    assert len(axes.patches) == 12, "a frame for each rank, white where nothing covers it"


def test_the_picture_of_many_ranks_leaves_some_out(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "layer.svg"
    arguments = ["--model", str(folder), "--ranks", "2", "--rows", "1", "--draw", str(file)]
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # letters stay letters
        assert cli.main(["plan", "layout", *arguments]) == 0
    assert "LlamaDecoderLayer on 2 ranks, blocks of 1 row" in file.read_text()
    labels = [label.get_text() for label in drawn(GPT_OSS_120B, 1024, 16).axes[0].get_yticklabels()]
    assert labels == [f"rank {rank}" for rank in [*range(12), 1021, 1022, 1023]]
