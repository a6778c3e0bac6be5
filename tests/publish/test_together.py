"""Readers that share a process group: each byte enters a node once, and all readers go to a version or none does."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch import nn

from laconic.publish import FolderSource, PublishError, Reader, ReaderGroup, VersionSource, together
from laconic.publish.staging import StagedTensor
from laconic.publish.together import chain
from laconic.publish.versions import MANIFEST, version_name
from tests.support.launch import on_ranks
from tests.support.published import (
    Overtaken,
    Vanishing,
    assert_same,
    make,
    model_with,
    published,
    snapshot,
    weights_of_versions,
)

NODES = ["a", "a", "b", "b", "b", "c", "a"]


def test_chains() -> None:
    """Every rank that needs bytes gets them once; they enter a node once, and leave it at most once."""
    chance = random.Random(0)
    for size in range(1, 8):
        for _ in range(60):
            nodes = [chance.choice("abcd") for _ in range(size)]
            ranks = {rank for rank in range(size) if chance.random() < 0.6}
            sends = chain(nodes, ranks)
            targets = Counter(itertools.chain.from_iterable(sends.values()))
            assert targets == Counter(ranks - {0})
            has, todo = {0}, [0]
            while todo:
                todo += (found := sends.get(todo.pop(), []))
                has |= set(found)
            assert has == {0, *ranks}, "all are led to from rank 0"
            crossings = [
                (nodes[rank], nodes[to]) for rank, tos in sends.items() for to in tos if nodes[rank] != nodes[to]
            ]
            assert len(crossings) == len({nodes[rank] for rank in {0, *ranks}}) - 1
            assert len({begin for begin, _ in crossings}) == len({end for _, end in crossings}) == len(crossings)


@pytest.fixture(autouse=True)
def _nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank is on the node that `NODES` names."""
    monkeypatch.setattr(together.socket, "gethostname", lambda: NODES[dist.get_rank()])


def readers(source: VersionSource | Path, **options: Any) -> ReaderGroup:
    return ReaderGroup(source=source if dist.get_rank() == 0 else None, **options)


@pytest.fixture
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """Six versions; the first and the fifth have all values. Or other numbers, from `request`."""
    num_versions, base_every = getattr(request, "param", (6, 5))
    published(tmp_path / "versions", num_versions, base_every=base_every, encoding="smallest")
    return tmp_path / "versions"


@on_ranks(7)
def test_readers_that_are_behind_by_different_versions(folder: Path) -> None:
    """Ranks 0 and 3 have no reader."""
    rank, weights = dist.get_rank(), weights_of_versions(6)
    group = readers(folder)
    model = None if rank in (0, 3) else model_with(weights[rank])
    assert group.update(model) == 6
    if model is not None:
        assert_same(snapshot(model), weights[6])
        alone = Reader(folder)
        alone.update(model_with(weights[rank]))
        assert group.reader.bytes_read == alone.bytes_read
    assert group.update(model) == 6, "and again, with nothing to do"
    assert group.reader.version == (None if model is None else 6)


@on_ranks(3)
def test_a_version_that_all_name(folder: Path) -> None:
    """Rank 0 has no reader. All ranks raise if the version is missing, or if they name different ones."""
    rank, weights = dist.get_rank(), weights_of_versions(6)
    group, model = readers(folder), None if dist.get_rank() == 0 else model_with(weights[2 * dist.get_rank() - 1])
    assert group.update(model, to=4) == 4
    for held in (model, None):
        with pytest.raises(PublishError, match="has no version 7, and its newest is 6"):
            group.update(held, to=7)
    with pytest.raises(PublishError, match=r"to=\[4, 5, 6\] differs by rank; give one version on all ranks"):
        group.update(model, to=4 + rank)
    if model is not None:
        assert_same(snapshot(model), weights[4])
    assert group.update(model) == 6
    if model is not None:
        assert_same(snapshot(model), weights[6])


def test_manifests_that_are_known_are_not_read_again(folder: Path) -> None:
    versions, texts = together._new_manifests(FolderSource(folder), known={1, 5})
    assert versions[-1] == 6
    assert texts.keys() == {*versions} - {1, 5}


@on_ranks(4)
def test_all_readers_or_none(folder: Path) -> None:
    """Of four ranks one has another model; then a file is damaged, and then it is gone."""
    rank, weights = dist.get_rank(), weights_of_versions(6)
    group = readers(folder)
    model: nn.Module = model_with(weights[4])
    with pytest.raises(PublishError, match=r"and \[31, 24\] in the version.*\(on rank 2\)") as error:
        group.update(make(vocabulary=37).bfloat16() if rank == 2 else model)
    assert "\n" not in str(error.value)
    assert_same(snapshot(model), weights[4])
    (path,) = (folder / version_name(6)).glob("patch-*")
    intact = path.read_bytes()
    dist.barrier()
    for damaged, message in (
        (intact[:-1] + bytes([intact[-1] ^ 1]), "does not have the contents that were written"),
        (None, r"patch-00000.* is missing.*\(on rank 0\)"),
    ):
        if rank == 0:
            path.write_bytes(damaged) if damaged else path.unlink()
        dist.barrier()
        with pytest.raises(PublishError, match=message):
            group.update(model if rank else None)
        assert_same(snapshot(model), weights[4])
        dist.barrier()
    if rank == 0:
        path.write_bytes(intact)
    assert group.update(model if rank else None) == 6
    assert_same(snapshot(model), weights[6 if rank else 4])


@on_ranks(3)
def test_versions_that_vanish_and_damaged_manifests(folder: Path) -> None:
    rank, weights = dist.get_rank(), weights_of_versions(6)
    model = model_with(weights[4])
    assert readers(Vanishing(folder, 4)).update(model) == 6
    assert_same(snapshot(model), weights[6])
    with pytest.raises(PublishError, match="versions are removed faster than they are read"):
        readers(Vanishing(folder, 5)).update(model_with(weights[2]))
    if rank == 0:
        (folder / version_name(4) / MANIFEST).unlink()
    dist.barrier()
    model = model_with(weights[2])
    assert readers(folder).update(model) == 6, "whole values lead around it"
    assert_same(snapshot(model), weights[6])
    dist.barrier()
    if rank == 0:
        (folder / version_name(6) / MANIFEST).unlink()
    dist.barrier()
    with pytest.raises(PublishError, match=r"weight_v000006 is damaged: its manifest.json is missing"):
        readers(folder).update(model)


@pytest.mark.parametrize("folder", [(7, 6)], indirect=True)
@on_ranks(2)
def test_a_version_whose_base_goes_before_its_manifest_is_read(folder: Path) -> None:
    rank, weights = dist.get_rank(), weights_of_versions(7)
    model = model_with(weights[1])
    assert readers(Overtaken(folder)).update(model if rank else None) == 7
    assert_same(snapshot(model), weights[7 if rank else 1])


@on_ranks(3)
def test_a_rank_that_cannot_apply_what_has_come(folder: Path) -> None:
    """All learn that one of three readers failed in the middle, and the next update repairs its model."""
    rank, weights = dist.get_rank(), weights_of_versions(6)
    group, model = readers(folder), model_with(weights[2])
    assert group.update(model, to=3) == 3
    message = r"\(.*no room\); the model has parts of two versions. Update again \(on rank 2\)"
    calls, apply = itertools.count(), StagedTensor.apply

    def fail(staged: StagedTensor) -> None:
        if dist.get_rank() == 2 and next(calls) == 1:
            raise RuntimeError("no\nroom")
        apply(staged)

    with mock.patch.object(StagedTensor, "apply", fail) if rank == 2 else nullcontext():
        with pytest.raises(PublishError, match=message) as told:
            group.update(model, to=4)
        dist.barrier()
    assert "\n" not in str(told.value)
    assert group.reader.version == (3 if rank == 2 else 4)
    for version in (4, 6):
        assert group.update(model, to=version) == version
        assert_same(snapshot(model), weights[version])


def test_without_a_process_group(tmp_path: Path) -> None:
    with pytest.raises(PublishError, match=r"needs a process group; call torch.distributed.init_process_group"):
        ReaderGroup(source=tmp_path)


@on_ranks(2)
def test_mistakes(tmp_path: Path) -> None:
    with pytest.raises(PublishError, match=r"rank 0 of a ReaderGroup has the versions; give source="):
        ReaderGroup(source=tmp_path if dist.get_rank() else None)
    with pytest.raises(PublishError, match=r"give http://HOST:PORT"):
        ReaderGroup(source="http://h:x")  # that of rank 0 is made there alone; all ranks hear of it
    (tmp_path / "empty").mkdir(exist_ok=True)
    group = readers(tmp_path / "empty")
    with pytest.raises(PublishError, match="has no version yet"):
        group.update({})
