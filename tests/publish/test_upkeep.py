"""`laconic publish`: what it finds, and what it shows; and the device memory that publishing adds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from laconic.publish import FolderSource, Publisher, Reader
from laconic.publish import cli as publish_cli
from laconic.publish.staging import VersionVerdict, verify
from laconic.publish.versions import MANIFEST, VersionManifest, version_name
from tests.checkpoint.zoo import make_zoo, train
from tests.support.published import assert_same
from tests.support.published_on_device import AddedMemory, Trained, publish_on_device


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Five versions; the first and the fourth are whole."""
    model = make_zoo(seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    folder = tmp_path / "versions"
    with Publisher(model, folder, base_every=3, keep=9, encoding="smallest") as publisher:
        for step in range(5):
            publisher.publish(step=100 * step)
            train(model, optimizer, 1)
    return folder


def problems(folder: Path) -> dict[int, str]:
    return {verdict.version: verdict.problem for verdict in verify(FolderSource(folder)) if verdict.problem}


def test_intact_versions_a_damaged_one_and_those_after_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert list(verify(FolderSource(folder))) == [VersionVerdict(version, "", True) for version in range(1, 6)]
    assert publish_cli.main(["verify", str(folder)]) == 0
    (path,) = (folder / version_name(2)).glob("patch-*")
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    capsys.readouterr()
    assert list(problems(folder)) == [2]
    assert publish_cli.main(["verify", str(folder)]) == 1
    first, second, third, fourth, _ = capsys.readouterr().out.splitlines()
    assert first == "weight_v000001: intact"
    assert "does not have the contents that were written" in second
    assert third == "weight_v000003: files intact; the values that it changes are not here"
    assert fourth == "weight_v000004: intact"
    (path,) = (folder / version_name(3)).glob("patch-*")
    path.write_bytes(path.read_bytes()[:-1])
    assert list(problems(folder)) == [2, 3], "files are checked where values cannot be"


def test_values_that_are_not_what_the_digests_say(folder: Path) -> None:
    """The files are as they were written, and the manifest lies: of a patch, and of whole values."""
    for version in (2, 4):
        path = folder / version_name(version) / MANIFEST
        body = json.loads(path.read_text())
        del body["checksum"]
        body["tensors"][2]["after"] = "0123456789abcdef"
        VersionManifest.from_json(body).write(path)
    found = problems(folder)
    assert sorted(found) == [2, 4]
    (folder / version_name(4)).rename(folder / "aside")
    assert all("would have the digest" in problem for problem in (found[2], found[4], problems(folder)[2]))


def test_what_watch_shows(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Reader(folder, name="near").update(make_zoo(seed=1).bfloat16())
    for reader, version in (("far", "2"), ("new", "null")):
        (folder / "readers" / f"{reader}.json").write_text(f'{{"version": {version}, "reading": []}}')
    (folder / version_name(3) / MANIFEST).unlink()
    assert publish_cli.main(["watch", "--once", str(folder)]) == 0
    shown = capsys.readouterr().out
    for part in ("manifest.json is missing", "far is 3 behind", "near is at the newest", "new has no version"):
        assert part in shown


def test_mistakes(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in (
        (["verify", str(tmp_path / "nowhere")], "is no folder of versions"),
        (["verify", str(tmp_path)], "has no version"),
        (["watch", "--once", str(tmp_path / "nowhere")], "is no folder of versions"),
    ):
        assert publish_cli.main(words) == 2
        said = capsys.readouterr().err
        assert message in said
        assert said.count("\n") == 1
    for wrong in (["squash", str(folder)], ["watch", "--every", "0", str(folder)], []):
        with pytest.raises(SystemExit):
            publish_cli.main(wrong)


# -- device memory -----------------------------------------------------------------------------------------------------


WIDTH, LAYERS = 256, 4  # shares take several pieces


def build(device: torch.device) -> nn.Module:
    with device:
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def loss(model: nn.Module, step: int) -> torch.Tensor:
    batch = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(step)).to("cuda")
    found: torch.Tensor = model(batch).square().mean()
    return found


TRAINED = Trained(build=build, units=lambda model: [*model.children()], loss=loss)


def added(folder: Path, local: int = 2, **keys: Any) -> AddedMemory:
    return publish_on_device(TRAINED, folder, versions=4, nodes=local, local=local, base_every=3, **keys)


@pytest.mark.machine
@pytest.mark.parametrize("encoding", ["gaps", "smallest"])
def test_a_version_takes_less_than_a_unit_and_leaves_nothing(encoding: str, tmp_path: Path) -> None:
    """Whole values, a patch of all elements, patches of some, and both."""
    found = added(tmp_path, encoding=encoding)
    assert found.unit == 4 * (WIDTH * WIDTH + WIDTH) // 4
    assert all(0 < peak < found.unit for peak in found.peaks), found.peaks
    assert found.left == 0
    assert found.peaks[1] == max(found.peaks), "the places of changes are found on the device"


@pytest.mark.machine
def test_one_rank_alone_publishes_its_weights(tmp_path: Path) -> None:
    found = added(tmp_path, local=1, encoding="lossless")
    held = {name: torch.zeros_like(values) for name, values in found.weights.items()}
    assert Reader(tmp_path).update(held) == 4
    assert_same(held, found.weights)
    assert max(found.peaks) < found.unit
