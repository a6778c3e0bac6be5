"""The folder for SGLang's `/pull_weights`: engines that pull from it have what was published.

SGLang's own code is called where it is installed with slime's patch, else a stand-in with its conditions. By hand, the
tests passed with `pull` of slime 624b824.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import pytest
from safetensors.torch import load_file
from torch import Tensor

from laconic.errors import JobError
from laconic.integrations import slime
from laconic.integrations.slime import PullFolder
from laconic.publish import PublishError, Reader
from laconic.publish.versions import version_name
from tests.support import pull_stand_in
from tests.support.published import Run, assert_same

try:
    from sglang.srt.weight_sync.local_checkpoint import pull
except ImportError:
    from tests.support.pull_stand_in import pull


def once(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without the second name of a tied tensor."""
    return {name: tensor for name, tensor in weights.items() if name != "head.weight"}


def pulled(local: Path, source: Path, number: int) -> dict[str, Tensor]:
    """The weights of an engine's own checkpoint after a pull."""
    pull(str(local), str(local.parent / "base"), str(source), number)
    return {name: tensor for path in local.glob("*.safetensors") for name, tensor in load_file(path).items()}


def kinds(folder: Path) -> dict[int, str]:
    """The versions in a folder; the encoding of each delta."""
    found = {}
    for path in sorted(folder.iterdir()):
        index = path / pull_stand_in.INDEX
        about = json.loads(index.read_text())["metadata"] if index.exists() else {}
        found[int(path.name.removeprefix("weight_v"))] = about.get("delta_encoding", "full")
    return found


@pytest.mark.parametrize("coding", ["gaps", "lossless"])
@pytest.mark.parametrize("encoding", ["overwrite", "xor"])
def test_engines_pull_what_was_published(encoding: Literal["overwrite", "xor"], coding: str, tmp_path: Path) -> None:
    """One engine pulls each version, one the last alone; and one does while the last full version is deltas behind."""
    run = Run(tmp_path / "weights", encoding=coding)
    relay = PullFolder(Reader(tmp_path / "weights"), tmp_path / "pull", encoding=encoding, full_every=4)
    assert relay.update() == 1
    for number in range(2, 8):
        weights = once(run.step())
        if number == 3:
            weights = once(run.step())  # two of ours in one delta
        assert relay.update() == relay.number == number
        assert relay.update() == number, "nothing is new"
        assert_same(pulled(tmp_path / "each", relay.folder, number), weights)
        if number in (3, 6):
            assert_same(pulled(tmp_path / "rare", relay.folder, number), weights)
    assert_same(pulled(tmp_path / "late", relay.folder, 7), weights)
    assert kinds(relay.folder) == {1: "full", **dict.fromkeys((2, 3, 4), encoding), 5: "full", 6: encoding, 7: encoding}
    assert relay.reader.num_behind() == 0
    run.publisher.publish()  # a version that differs in nothing
    run.publisher.wait()
    assert relay.update() == 7
    assert relay.reader.version == 9
    assert not relay.reader.wait(0.0)


def test_files_of_the_model_and_older_versions(tmp_path: Path) -> None:
    """Full versions have them; all before the last full version but one goes."""
    base = tmp_path / "base"
    base.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors.index.json", "model-00001-of-00002.safetensors"):
        (base / name).write_text("{}")
    run = Run(tmp_path / "weights")
    relay = PullFolder(Reader(tmp_path / "weights"), tmp_path / "pull", model_folder=base, full_every=2)
    for _ in range(6):
        weights = once(run.step())
        relay.update()
    assert kinds(relay.folder) == {3: "full", 4: "overwrite", 5: "full", 6: "overwrite"}
    files = {path.name for path in (relay.folder / version_name(5)).iterdir()}
    assert files == {"config.json", "tokenizer.json", "model.safetensors"}
    assert_same(pulled(tmp_path / "local", relay.folder, 6), weights)
    assert (tmp_path / "local" / "config.json").exists()


def test_a_relay_that_is_started_again_and_one_without_space_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an error while a delta is written, no version is new, and the next one is full, as after a start."""
    run, folder = Run(tmp_path / "weights"), tmp_path / "pull"
    for number in range(1, 4):
        weights = once(run.step())
        relay = PullFolder(Reader(tmp_path / "weights"), folder)
        assert relay.update() == number
        assert_same(pulled(tmp_path / "local", folder, number), weights)
    assert kinds(folder) == {2: "full", 3: "full"}
    run.step()
    monkeypatch.setattr(slime, "write_named", mock.Mock(side_effect=OSError("no space left on device")))
    with pytest.raises(OSError, match="no space left"):
        relay.update()
    monkeypatch.undo()
    assert kinds(folder) == {2: "full", 3: "full"}
    weights = once(run.step())
    assert relay.update() == 4
    assert kinds(folder)[4] == "full"
    assert_same(pulled(tmp_path / "local", folder, 4), weights)


def test_large_tensors_are_never_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes of more than 32 bits have no place there. A threshold of a few bytes stands for 4 GiB."""
    monkeypatch.setattr(slime, "_MOST_PLACES", 24 * 40 * 2)
    run = Run(tmp_path / "weights", base_every=1)
    relay = PullFolder(Reader(tmp_path / "weights"), tmp_path / "pull")
    relay.update()
    weights = once(run.step())
    assert relay.update() == 2
    assert kinds(relay.folder) == {1: "full", 2: "xor"}
    assert_same(pulled(tmp_path / "local", relay.folder, 2), weights)
    with pytest.raises(AssertionError):  # a version that a publisher wrote needs the relay
        assert_same(pulled(tmp_path / "other", tmp_path / "weights", 2), weights)


class Engine:
    """An engine with a checkpoint on its own disk."""

    def __init__(self, base: Path) -> None:
        self.base, self.weights = base, dict[str, Tensor]()

    def post(self, address: str, body: dict[str, Any]) -> None:
        if address == "/pull_weights":
            places = (body["local_checkpoint_dir"], self.base, body["source_dir"])
            pull(*map(str, places), body["target_version"])
        else:
            assert address == "/update_weights_from_disk"
            self.weights = load_file(Path(body["model_path"]) / "model.safetensors")


def relayed(weights: Path, pull_folder: Path, base: Path, local: Path, engines: list[Engine], timeout_s: float) -> None:
    """The loop of docs/serve.md, until no version comes."""
    relay = PullFolder(Reader(weights), pull_folder, model_folder=base)
    while relay.reader.wait(timeout_s):
        body = {"source_dir": pull_folder, "target_version": relay.update(), "local_checkpoint_dir": local}
        for engine in engines:
            engine.post("/pull_weights", body)
            engine.post("/update_weights_from_disk", {"model_path": local})


def test_engines_that_are_told(tmp_path: Path) -> None:
    base, engines = tmp_path / "base", [Engine(tmp_path / "base")] * 2
    base.mkdir()
    weights = once(Run(tmp_path / "weights").step())
    relayed(tmp_path / "weights", tmp_path / "pull", base, tmp_path / "local", engines, 0.0)
    for engine in engines:
        assert_same(engine.weights, weights)


def test_mistakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Run(tmp_path / "weights")
    reader = Reader(tmp_path / "weights")
    with pytest.raises(PublishError, match="has versions of a Publisher; give the relay a folder of its own"):
        PullFolder(reader, tmp_path / "weights")
    with pytest.raises(PublishError, match=r"is no folder; give one with config\.json"):
        PullFolder(reader, tmp_path / "pull", model_folder=tmp_path / "nowhere")
    with pytest.raises(PublishError, match=r"full_every=0, encoding='overwrite': give 1 or more"):
        PullFolder(reader, tmp_path / "pull", full_every=0)
    relay = PullFolder(reader, tmp_path / "pull")
    (relay.folder / version_name(1)).mkdir()
    (relay.folder / version_name(1) / "file").touch()
    with pytest.raises(JobError, match="exists already"):
        relay.update()
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match="deltas need it; pip install"):
        PullFolder(reader, tmp_path / "pull")
