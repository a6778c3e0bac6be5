"""Readers: behind, restarted, killed in the middle, and before versions that they must not apply."""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.two_tensor import TwoTensor

import laconic
from laconic.publish import FolderSource, Publisher, PublishError, Reader, WeightPatch
from laconic.publish.changes import digests_of
from laconic.publish.staging import StagedTensor
from laconic.publish.versions import MANIFEST, Registration, VersionManifest, superseded, version_name
from laconic.store.folder import FileRecord
from tests.faults.published import damaged_folders, lives, lives_of_readers
from tests.support.launch import on_ranks
from tests.support.published import (
    Overtaken,
    Vanishing,
    assert_refused,
    assert_same,
    cast,
    edit,
    make,
    model_with,
    published,
    read,
    snapshot,
    weights_of_versions,
    write,
)

# -- where a reader begins ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("base_every", "encoding"), [(1, "gaps"), (3, "lossless"), (3, "smallest"), (100, "gaps")])
def test_from_every_version_to_the_newest(base_every: int, encoding: str, tmp_path: Path) -> None:
    """A new reader finds out by digests what a model holds."""
    weights = published(tmp_path, base_every=base_every, encoding=encoding)
    for start in range(7):
        reader = read(tmp_path, weights, start)
        assert reader.update(model_with(weights[6])) == 6, "and again, with nothing to do"


@pytest.mark.parametrize("encoding", ["gaps", "smallest"])
def test_to_a_version_that_is_named(encoding: str, tmp_path: Path) -> None:
    """By patches or from whole values, though newer versions are there; and never back."""
    weights = published(tmp_path, base_every=4, encoding=encoding)
    model, reader = model_with(weights[0]), Reader(tmp_path)
    for version in (1, 3, 3, 5):
        assert reader.update(model, to=version) == reader.version == version
        assert_same(snapshot(model), weights[version])
    assert reader.num_behind() == 1
    with pytest.raises(PublishError, match="to=4: this reader has read version 5; make a new Reader to go back"):
        reader.update(model, to=4)
    with pytest.raises(PublishError, match=f"{tmp_path} has no version 7, and its newest is 6; wait for it, or ask"):
        reader.update(model, to=7)
    assert_same(snapshot(model), weights[5])
    assert reader.update(model) == 6
    assert Reader(tmp_path).update(model, to=4) == 4, "a new reader goes back"
    assert_same(snapshot(model), weights[4])


@pytest.mark.parametrize(("base_every", "held"), [(1, 4), (100, 5)])
def test_a_version_that_the_reader_knows_may_be_gone(base_every: int, held: int, tmp_path: Path) -> None:
    """A model that holds it needs only the patch after it; for an older model, whole values lead on."""
    weights = published(tmp_path, base_every=base_every)
    reader = Reader(tmp_path)
    reader.update(model_with(weights[5]), to=5)
    shutil.rmtree(tmp_path / version_name(5))
    model = model_with(weights[held])
    assert reader.update(model) == 6
    assert_same(snapshot(model), weights[6])


def test_a_plan_from_before_another_update_is_refused(tmp_path: Path) -> None:
    weights = published(tmp_path)
    model, other, reader = model_with(weights[0]), model_with(weights[0]), Reader(tmp_path)
    plan = reader.plan(model, to=4)
    staged = reader.stage(plan)
    reader.update(other)
    with pytest.raises(PublishError, match="the plan for version 4 was made before another one was applied; plan anew"):
        reader.apply(plan, staged)
    assert_same(snapshot(model), weights[0])


@pytest.mark.parametrize("verify", ["each", "first"])
def test_an_update_that_fails_in_the_middle_is_repaired_by_the_next(verify: Any, tmp_path: Path) -> None:
    weights = published(tmp_path)
    model, reader = model_with(weights[2]), Reader(tmp_path, verify=verify)
    reader.update(model, to=3)
    calls, apply = itertools.count(), StagedTensor.apply

    def fail(staged: StagedTensor) -> None:
        if next(calls) == 1:
            raise RuntimeError("no room")
        apply(staged)

    with mock.patch.object(StagedTensor, "apply", fail), pytest.raises(RuntimeError, match="no room"):
        reader.update(model, to=4)
    assert reader.version == 3
    for version in (4, 6):
        assert reader.update(model, to=version) == version
        assert_same(snapshot(model), weights[version])


def test_only_what_is_needed_is_read(tmp_path: Path) -> None:
    """Patches, or whole values where patches would be more bytes."""
    weights = published(tmp_path, num_versions=40, base_every=39)
    source = FolderSource(tmp_path)
    patches = [source.manifest(version).nbytes("patch") for version in range(2, 41)]
    assert source.manifest(40).kinds == ["patch", "whole"]
    whole = source.manifest(40).nbytes("whole")
    for start, wanted in ((0, whole), (1, whole), (37, sum(patches[36:])), (39, patches[38])):
        assert read(tmp_path, weights, start).bytes_read == wanted
    assert read(tmp_path, weights, 0, to=3).bytes_read == source.manifest(1).nbytes("whole") + sum(patches[:2])


def test_a_reader_that_verifies_first_takes_digests_when_it_must(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the first update; after an edit, or with another model; and not otherwise."""
    taken: list[int] = []
    count = lambda tensors: taken.append(1) or digests_of(tensors)  # noqa: E731
    monkeypatch.setattr("laconic.publish.reader.digests_of", count)
    weights = published(tmp_path, num_versions=2, run="run")
    reader, model = Reader(tmp_path, verify="first"), model_with(weights[0])
    for version in (1, 2, 2):
        assert reader.update(model, to=version) == version
        assert_same(snapshot(model), weights[version])
    assert len(taken) == 1
    with torch.no_grad():
        model.up.weight[3, 4] += 1
    reader.update(model)
    assert_same(snapshot(model), weights[2])
    assert len(taken) == 2
    reader.update(other := model_with(weights[1]))
    assert_same(snapshot(other), weights[2])
    assert len(taken) == 3
    with pytest.raises(PublishError, match=r'verify=.never.: give "each" or "first"'):
        Reader(tmp_path, verify="never")  # type: ignore[arg-type]
    with torch.inference_mode():
        uncounted = make(seed=1).bfloat16()
        assert Reader(tmp_path).update(uncounted) == 2
    with pytest.raises(PublishError, match=r'inference_mode.*verify="each"'):
        Reader(tmp_path, verify="first").update(uncounted)


def test_a_state_dict_with_tied_names_or_without(tmp_path: Path) -> None:
    weights = published(tmp_path)
    tied = dict(make(seed=3).bfloat16().state_dict())
    Reader(tmp_path).update(tied)
    assert_same(tied, weights[6])
    plain = {name: torch.zeros_like(tensor) for name, tensor in weights[6].items() if name != "head.weight"}
    Reader(tmp_path).update(plain)
    assert_same(plain | {"head.weight": plain["embed.weight"]}, weights[6])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three versions, of which the first has all values."""
    published(tmp_path, num_versions=3, base_every=100, encoding="smallest")
    return tmp_path


@on_ranks(2)
def test_models_in_another_form_are_filled_from_a_dict(folder: Path) -> None:
    """In another dtype, or sharded: the dict has what was published, and the model takes it from there."""
    weights, net, reader = weights_of_versions(3), make(seed=3), Reader(folder)
    sharded = model_with(weights[2])
    sharded.across.data = sharded.across.data.contiguous()  # FSDP2 takes no other
    fully_shard(sharded)
    held = {name: torch.zeros_like(tensor) for name, tensor in weights[3].items()}
    held["head.weight"] = held["embed.weight"]
    for model, message in (
        (net, r"is float32 in the model .*; or update a dict of tensors as they are published, and load those"),
        (sharded, r"a DTensor, and .* whole tensors; .*set_model_state_dict\(\), or take patches"),
    ):
        with pytest.raises(PublishError, match=message):
            reader.update(model)
    for version in (1, 3):
        reader.update(held, to=version)
        net.load_state_dict(held)
        assert_same(snapshot(net), cast(weights[version], torch.float32))
        set_model_state_dict(sharded, dict(held), options=StateDictOptions(full_state_dict=True))
        found: dict[str, Any] = dict(sharded.state_dict())
        whole = {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in found.items()}
        assert_same(whole, weights[version])


def test_engines_take_patches(tmp_path: Path) -> None:
    """An engine that applies what the iterator yields has the newest version."""
    weights = published(tmp_path, base_every=100)

    def take(state: dict[str, Tensor], patches: Any) -> set[str]:
        names = set()
        for patch in patches:
            assert isinstance(patch, WeightPatch)
            names.add(patch.name)
            assert state[patch.name].shape == patch.shape
            assert patch.values.dtype == patch.dtype == state[patch.name].dtype
            if patch.indices is None:
                state[patch.name].copy_(patch.values)
            else:
                assert patch.indices.dtype == torch.int64
                state[patch.name].view(-1)[patch.indices] = patch.values
        return names

    del weights[6]["head.weight"]
    state, reader = {name: torch.zeros_like(tensor) for name, tensor in weights[6].items()}, Reader(tmp_path)
    assert take(state, reader.patches()) == state.keys()
    assert_same(state, weights[6])
    assert reader.version == 6
    assert take(state, reader.patches()) == set()
    behind, later = {name: weights[4][name].clone().contiguous() for name in state}, Reader(tmp_path)
    for since, to in ((4, 5), (4, 6)):
        changed = take(behind, later.patches(since=since, to=to))
        assert changed == {"embed.weight", "up.weight", "across", "seen"}
        assert_same(behind, {name: weights[to][name] for name in state})
        assert later.version == to
    shutil.rmtree(tmp_path)
    published(tmp_path, base_every=100, encoding="lossless")
    with pytest.raises(PublishError, match="coded by the values before, which are elsewhere; update"):
        list(Reader(tmp_path).patches(since=4))


def test_a_forged_size_is_told(tmp_path: Path) -> None:
    """The parts are said to cover it, and no file has them."""
    published(tmp_path, num_versions=1)

    def enlarge(body: dict[str, Any]) -> None:
        tensor = body["tensors"][0]
        tensor["whole"] *= 2
        tensor["whole"][1] = {**tensor["whole"][1], "start": [24 * 40], "sizes": [2**61]}
        tensor["shape"] = [24 * 40 + 2**61]

    rewritten(tmp_path / version_name(1), enlarge)
    with pytest.raises(PublishError, match="does not fit into host memory"):
        next(Reader(tmp_path).patches())


# -- what must not be applied ------------------------------------------------------------------------------------------


def rewritten(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the manifest of a version, and give it the checksum that belongs to it."""
    body = json.loads((folder / MANIFEST).read_text())
    del body["checksum"]
    change(body)
    VersionManifest.from_json(body).write(folder / MANIFEST)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)


def forge_values(folder: Path) -> None:
    """Change values in a file, and its record."""
    (path,) = folder.glob("patch-*")
    flip(path)
    record = FileRecord(
        name=path.name, size_bytes=path.stat().st_size, sha256=hashlib.sha256(path.read_bytes()).hexdigest()
    )
    rewritten(folder, lambda body: body.update(files=[vars(record)]))


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "a flipped bit": (lambda v: flip(next(v.glob("patch-*"))), "does not have the contents that were written"),
    "a short file": (lambda v: next(v.glob("patch-*")).write_bytes(b"short"), "has another size"),
    "no file": (lambda v: next(v.glob("patch-*")).unlink(), "patch-00000.safetensors is missing"),
    "no manifest": (lambda v: (v / MANIFEST).unlink(), "its manifest.json is missing"),
    "an altered manifest": (lambda v: flip(v / MANIFEST), "does not match its own checksum|is unreadable"),
    "values and hashes forged": (forge_values, "would have the digest"),
    "a digest forged": (
        lambda v: rewritten(v, lambda body: next(t for t in body["tensors"] if t["patch"]).update(after="0" * 16)),
        "and its version has 0000000000000000; nothing was applied",
    ),
    "a base forged": (lambda v: rewritten(v, lambda body: body.update(base=2)), "is no patch of version 2"),
    "another version": (lambda v: rewritten(v, lambda body: body.update(version=7)), "holds version 7, not what"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_told_in_a_line_and_nothing_is_applied(name: str, tmp_path: Path) -> None:
    """The newest version, of 6, is damaged; or the one before, which a reader at 4 needs, too. Whole values help."""
    damage, message = DAMAGES[name]
    weights = published(tmp_path / "a", base_every=100)
    for version in (6, 5):
        damage(tmp_path / "a" / version_name(version))
        assert_refused(tmp_path / "a", weights, 4, message if version == 6 else None)
    if name == "no manifest":
        weights = published(tmp_path / "b", base_every=5)
        damage(tmp_path / "b" / version_name(5))
        read(tmp_path / "b", weights, 4)


def test_any_damage_is_told_or_does_no_harm(tmp_path: Path) -> None:
    """A sample of `python -m tests.faults --rows publish-damage`."""
    found = damaged_folders(tmp_path, 40)
    assert found.keys() <= {"told", "harmless"}, found
    assert found["told"] > 10


MISFITS: dict[str, tuple[Callable[[], Any], str]] = {
    "dtype": (lambda: make(seed=1), r"embed.weight is float32 in the model and bfloat16 in the version"),
    "vocabulary": (
        lambda: make(seed=1, vocabulary=37).bfloat16(),
        r"embed.weight is \[37, 24\] in the model and \[31, 24\]",
    ),
    "architecture": (
        lambda: nn.Linear(3, 3).bfloat16(),
        "across is not in the model; embed.weight is not in the model; .* and 6 more",
    ),
    "more layers": (
        lambda: {**make(seed=1).bfloat16().state_dict(), "more": torch.zeros(2)},
        "more is not in the version",
    ),
    "no tensor": (lambda: {**make(seed=1).bfloat16().state_dict(), "seen": 3}, "seen is a int, and a reader fills"),
    "no plain tensor": (
        lambda: {"seen": TwoTensor(torch.ones(3), torch.ones(3))},
        "seen is a TwoTensor, and a reader fills plain tensors; leave it out, or update a dict",
    ),
    "few bits": (
        lambda: laconic.quantize_(make(seed=1).bfloat16(), "int8"),
        "has weights in few bits, .* read into a dict of tensors in the published dtype",
    ),
    "no memory": (lambda: make(seed=1).bfloat16().to("meta"), "is on the meta device"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_another_model_is_told_in_a_line_and_nothing_is_applied(name: str, tmp_path: Path) -> None:
    published(tmp_path)
    make_model, message = MISFITS[name]
    model = make_model()
    has_state = name not in ("no memory", "no plain tensor")
    state: Any = {} if not has_state else dict(model.state_dict()) if isinstance(model, nn.Module) else model
    before = copy.deepcopy(state)
    with pytest.raises(PublishError, match=message) as error:
        Reader(tmp_path).update(model)
    assert "\n" not in str(error.value)
    assert_same(*({key: torch.as_tensor(each[key]) for key in each} for each in (state, before)))


def test_another_run_an_older_version_and_no_version(tmp_path: Path) -> None:
    """Names of others are no versions, and their registrations are passed over."""
    source = FolderSource(tmp_path / "a")
    weights = published(source.folder, run="a")
    published(tmp_path / "b", run="b")
    for name in ("weight_v000009.tmp", "weight_v000009.removed", "weight_v9", "weight_v00000٩", "weights", "latest"):
        (source.folder / name).mkdir()
    assert source.versions() == [1, 2, 3, 4, 5, 6]
    source.register("good", Registration(version=3, reading=(4,)))
    for name, text in {
        "bad": "{",
        "more": '{"version": 1, "reading": [], "x": 1}',
        "text": '{"version": "1"}',
        "long": " " * 100_000,
    }.items():
        (source.folder / "readers" / f"{name}.json").write_text(text)
    assert source.registrations() == {"good": Registration(version=3, reading=(4,))}
    model, reader = model_with(weights[0]), Reader(source.folder)
    reader.update(model)
    shutil.rmtree(source.folder)
    shutil.copytree(tmp_path / "b", source.folder)
    with pytest.raises(PublishError, match=r"has versions of the run 'b', and this reader reads 'a'; .*run='b'"):
        reader.update(model)
    shutil.rmtree(source.folder)
    published(source.folder, num_versions=2, run="a")
    with pytest.raises(PublishError, match="has version 2 as its newest, and this reader has read 6"):
        reader.update(model)
    assert_same(snapshot(model), weights[6])
    assert Reader(source.folder).update(model) == 2, "a new reader goes back"
    (tmp_path / "empty").mkdir()
    for folder, message in (("empty", "has no version yet"), ("nowhere", "is no folder of versions")):
        with pytest.raises(PublishError, match=message):
            Reader(tmp_path / folder).update(model)
    with pytest.raises(PublishError, match="is no name of a reader"):
        Reader(tmp_path / "a", name="../other")


# -- versions that go while they are read ------------------------------------------------------------------------------


def test_a_version_that_vanishes_is_looked_for_anew(tmp_path: Path) -> None:
    """Also one whose base goes before its manifest is read."""
    weights = published(tmp_path / "six")
    read(Vanishing(tmp_path / "six", 4), weights, 2)
    names = [patch.name for patch in Reader(Vanishing(tmp_path / "six", 4)).patches(since=5)]
    assert names == ["across", "embed.weight", "up.weight", "seen"]
    assert_refused(Vanishing(tmp_path / "six", 5), weights, 2, "is not there any more")
    weights = published(tmp_path / "seven", num_versions=7, base_every=6)
    assert [FolderSource(tmp_path / "seven").manifest(version).is_whole for version in (6, 7)] == [False, True]
    read(Overtaken(tmp_path / "seven"), weights, 1)


def test_versions_that_registered_readers_need_stay(tmp_path: Path) -> None:
    """Without readers, the newest whole version and its successors stay. A reader keeps what follows its own."""
    net = make()
    model = make(seed=1).bfloat16()
    with Publisher(net, tmp_path, base_every=4, patience=10) as publisher:
        write(publisher)
        reader = Reader(tmp_path, name="slow")
        reader.update(model)
        kept = []
        for version in range(2, 15):
            edit(net, version)
            write(publisher)
            kept.append(FolderSource(tmp_path).versions())
    assert kept[4] == [2, 3, 4, 5, 6], "all since version 1"
    assert kept[9] == list(range(2, 12)), "10 versions behind"
    assert kept[10] == [9, 10, 11, 12], "and now it is too far"
    assert reader.update(model) == 14
    assert FolderSource(tmp_path).registrations() == {"slow": Registration(version=14)}
    assert (reader.num_behind(), Reader(tmp_path).num_behind()) == (0, 2)


@pytest.mark.parametrize(
    ("readers", "first"),
    [
        ([], 15),
        ([Registration(version=20)], 15),
        ([Registration(version=12)], 13),
        ([Registration(version=12), Registration(version=10)], 11),
        ([Registration(version=9)], 15),  # beyond patience
        ([Registration(version=None)], 15),
        ([Registration(version=10**9)], 15),  # a lie
        ([Registration(version=-3)], 15),
    ],
)
def test_what_is_superseded(readers: list[Registration], first: int) -> None:
    """Never a version that is being read; and nothing where no whole values are left."""
    has_whole = {version: version in (1, 8, 15) for version in range(1, 21)}
    assert superseded(has_whole, readers, keep=2, patience=10) == list(range(1, first))
    assert superseded(has_whole, readers, keep=30, patience=10) == []
    assert superseded(dict.fromkeys(has_whole, False), readers, keep=2, patience=1) == []
    reading = Registration(version=None, reading=(12, 13, 2, -1, 10**9))
    assert superseded(has_whole, [reading], keep=2, patience=10) == [*range(1, 12), 14]


@pytest.mark.machine
def test_torch_is_enough() -> None:
    code = "import sys, laconic.publish; print(sorted({'transformers', 'peft', 'safetensors'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


@pytest.mark.campaign
def test_many_kills(tmp_path: Path) -> None:
    """Of publishers and of readers; test_publisher.py goes through a publisher's crash points."""
    lives(tmp_path / "versions", 30)
    lives_of_readers(tmp_path, 10)
