"""`ReaderGroup`: readers that share a process group with the trainer, and go to each version together.

[Note: Versions within a process group]
Rank 0 of the group has the versions. An update has four parts, and all ranks take part in each:

1. Rank 0 sends the manifests that are new.
2. Each reader finds out which files it needs, and tells the others.
3. Rank 0 reads each of these files once. The bytes go along a chain: from rank 0 to one rank of each other node that
   needs them, and within a node from rank to rank. So each byte enters a machine once and leaves it at most once. A
   rank passes on one chunk while it receives the next.
4. Each reader checks all digests. When every reader has all it needs, each one changes its model, and all ranks learn
   whether every one could.

Ranks are on one node if they have one host name and one network.
"""

from __future__ import annotations

import json
import os
import socket
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from laconic import _compat
from laconic.comm.agreement import RankGroup
from laconic.comm.groups import destroy_with
from laconic.comm.journal import issue
from laconic.comm.messages import new_host_group
from laconic.comm.watch import waiting_for
from laconic.publish.reader import Reader, UpdatePlan, source_of
from laconic.publish.staging import StagedTensor
from laconic.publish.versions import (
    PublishError,
    Registration,
    VanishedError,
    VersionManifest,
    VersionSource,
    parse_manifest,
)
from laconic.store.folder import FileRecord

_CHUNK_BYTES = 1 << 17
_ATTEMPTS = 5
"""How often an update begins anew when a version was removed while it was read."""


class _BrokenOffError(Exception):
    """Rank 0 cannot send a file. Raised on all ranks at the same transfer."""

    def __init__(self, message: str, *, is_vanished: bool) -> None:
        super().__init__(message)
        self.is_vanished = is_vanished


class ReaderGroup:
    """Updates readers over a process group: [Note: Versions within a process group].

        readers = ReaderGroup(group, source="/shared/weights")  # the source is that of rank 0, a trainer
        ...
        readers.update(model)  # on every rank, between requests; a rank without a reader gives None

    All ranks of the group make it and call its methods together. It has a Gloo group of its own.

    Args:
        group: the process group of trainers and readers. Default: all ranks.
        source: where rank 0 finds versions; see `Reader`. Other ranks need none.
        run, verify: see `Reader`.

    Raises:
        PublishError: torch.distributed is not initialised, or rank 0 has no source.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        source: VersionSource | str | Path | None = None,
        run: str | None = None,
        verify: Literal["each", "first"] = "each",
    ) -> None:
        with waiting_for("the process group of a ReaderGroup"):
            own = new_host_group(group)
        if own is None:
            raise PublishError("a ReaderGroup needs a process group; call torch.distributed.init_process_group before")
        self._group = own
        destroy_with(self, [self._group])
        self._ranks = RankGroup(self._group, error=PublishError)
        self._source: VersionSource | None = None
        self._ranks.agree(lambda: self._take_source(source), only=self._ranks.rank == 0)
        self._nodes = self._ranks.gather(_node())
        self._received = _Received()
        self.reader = Reader(self._received, run=run, verify=verify)
        """The reader of this rank: its version, and the bytes that it has read."""

    def update(self, model: nn.Module | Mapping[str, Tensor] | None = None, *, to: int | None = None) -> int:
        """Bring the models of all ranks to a version, and return its number. Collective.

        `to` is the version, the same on all ranks; default: the newest. A rank without a reader gives no model. Models
        may be behind by different versions.

        Cost: see `Reader.update`. Besides, a rank that needs a file or passes it on has it in memory.

        Raises:
            PublishError: one rank cannot go on; see `Reader.update`. All ranks raise it, with the rank, and nothing was
                applied. Or a device had no room for what had come: then the other ranks have the version, the error
                says so, and the next update repairs the model of that rank.
        """
        for _ in range(_ATTEMPTS):
            try:
                newest = self._share_manifests()
                plan = self._ranks.agree(lambda: self._plan(model, to))
                staged = self._receive(plan, to)
            except _BrokenOffError as broken:
                if broken.is_vanished:
                    continue
                raise PublishError(f"{broken} (on rank 0)") from broken
            self._ranks.agree(partial(self._apply, plan, staged))
            return newest if to is None else to
        raise PublishError("versions are removed faster than they are read; publish with a larger keep=")

    # -- the parts of an update: [Note: Versions within a process group] -----------------------------------------------

    def _take_source(self, source: VersionSource | str | Path | None) -> None:
        if source is None:
            raise PublishError("rank 0 of a ReaderGroup has the versions; give source=, the publisher's folder")
        self._source = source_of(source) if isinstance(source, str | Path) else source

    def _share_manifests(self) -> int:
        """Send the manifests that are new to all ranks, which know the same. Returns the newest version."""
        news = bytearray()

        def look() -> list[Any]:
            nonlocal news
            assert self._source is not None
            versions, texts = _new_manifests(self._source, self._received.manifests)
            news = bytearray(zlib.compress(json.dumps(texts).encode()))
            return [versions, len(news)]

        versions, nbytes = self._ranks.on_rank_0(look, "no version can be read")
        sent = self._pass_on(news, nbytes, range(self._ranks.size))
        self._received.take(versions, json.loads(zlib.decompress(sent)))
        return int(versions[-1])

    def _plan(self, model: nn.Module | Mapping[str, Tensor] | None, to: int | None) -> UpdatePlan | None:
        if model is not None:
            return self.reader.plan(model, to=to)
        if to is not None:
            self.reader.target_of(to)
        return None

    def _receive(self, plan: UpdatePlan | None, to: int | None) -> dict[str, StagedTensor]:
        """Read and check all that this rank needs, and pass on what others need. Raises: PublishError on all ranks."""
        own: list[list[Any]] = [] if plan is None else [[version, record.name] for version, record in plan.files()]
        needing: dict[tuple[int, str], list[int]] = defaultdict(list)
        gathered: list[Any] = self._ranks.gather([to, own])
        if any(other != to for other, _ in gathered):
            raise PublishError(f"to={[other for other, _ in gathered]} differs by rank; give one version on all ranks")
        for rank, (_, needs) in enumerate(gathered):
            for version, name in needs:
                needing[version, name].append(rank)
        left = deque(  # in the order in which every rank takes part in sending them
            (version, record)
            for version in sorted({version for version, _ in needing})
            for record in self._received.manifests[version].files
            if (version, record.name) in needing
        )

        def send_next() -> tuple[int, FileRecord, bytearray]:
            version, record = left.popleft()
            return version, record, self._send(version, record, needing[version, record.name])

        def read(version: int, file: FileRecord) -> bytearray:
            while left:
                *sent, data = send_next()
                if sent == [version, file]:
                    return data
            raise PublishError(f"{file.name} of version {version} was not asked for")

        self._received.read = read
        staged: dict[str, StagedTensor] = {}
        problem: Exception | None = None
        try:
            staged = staged if plan is None else self.reader.stage(plan)
        except (PublishError, OSError) as error:
            problem = error
        while left:
            send_next()
        self._ranks.agree(lambda: _raise(problem))
        return staged

    def _apply(self, plan: UpdatePlan | None, staged: Mapping[str, StagedTensor]) -> None:
        """Change the model of this rank, if it has one. Raises: PublishError, also where memory is missing."""
        try:
            if plan is not None:
                self.reader.apply(plan, staged)
        except (PublishError, OSError):  # of a registration, which comes when the model has the version
            raise
        except Exception as error:  # of any kind: others would wait for this rank
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise PublishError(
                f"values could not be applied ({reason}); the model has parts of two versions. Update again"
            ) from error

    def _send(self, version: int, record: FileRecord, ranks: Sequence[int]) -> bytearray:
        """Bring a file to the ranks that need it. Returns it there; nothing on others. Collective."""
        data, problem, is_vanished = bytearray(), "", False
        if self._ranks.rank == 0:
            assert self._source is not None
            try:
                data = self._source.read(version, record)
            except (OSError, PublishError) as error:
                problem, is_vanished = str(error), isinstance(error, VanishedError)
        told: dict[str, Any] = self._ranks.broadcast({"problem": problem, "vanished": is_vanished, "nbytes": len(data)})
        if told["problem"]:
            raise _BrokenOffError(told["problem"], is_vanished=told["vanished"])
        return self._pass_on(data, told["nbytes"], ranks)

    def _pass_on(self, data: bytearray, nbytes: int, ranks: Collection[int]) -> bytearray:
        """Send bytes of rank 0 along a chain of ranks. Returns them on each rank of the chain."""
        ticket = issue(self._group, "published files")
        sends = chain(self._nodes, ranks)
        own = self._ranks.rank
        following = sends.get(own, [])
        before = next((rank for rank, targets in sends.items() if own in targets), None)
        held = data if before is None else bytearray(nbytes)  # rank 0 alone has any data
        if not held:
            return held
        chunks = torch.frombuffer(held, dtype=torch.uint8).split(_CHUNK_BYTES)
        with waiting_for("published files", ticket):
            arriving = [] if before is None else [_compat.irecv(chunk, self._group, before) for chunk in chunks]
            leaving = []
            for index, chunk in enumerate(chunks):
                if arriving:
                    arriving[index].wait()
                leaving += [_compat.isend(chunk, self._group, target) for target in following]
            for work in leaving:
                work.wait()
        return held


def _node() -> str:
    """The name of this rank's node: [Note: Versions within a process group]."""
    try:
        network = os.stat("/proc/self/ns/net").st_ino
    except OSError:  # not on Linux
        network = 0
    return f"{socket.gethostname()} {network}"


def chain(nodes: Sequence[str], ranks: Collection[int]) -> dict[int, list[int]]:
    """The targets of each rank that sends, so that bytes of rank 0 get to `ranks`.

    `nodes` are the names of all ranks' nodes. A rank sends to the next node first, since that takes longer.
    """
    by_node: dict[str, list[int]] = defaultdict(list)
    for rank in sorted({0, *ranks}):
        by_node[nodes[rank]].append(rank)
    sends: dict[int, list[int]] = defaultdict(list)
    for line in ([members[0] for members in by_node.values()], *by_node.values()):
        for rank, target in pairwise(line):
            sends[rank].append(target)
    return dict(sends)


class _Received:
    """The source of each rank's reader: what the group has sent."""

    def __init__(self) -> None:
        self.manifests: dict[int, VersionManifest] = {}
        self.read: Callable[[int, FileRecord], bytearray]
        """See `VersionSource.read`. It takes part in sending files until this one has come."""

    def __str__(self) -> str:
        return "rank 0 of the group"

    def take(self, versions: Sequence[int], texts: Mapping[str, str]) -> None:
        """Add manifests, and forget those of versions that rank 0 has not any more."""
        self.manifests |= {
            int(version): parse_manifest(text.encode(), int(version), str(self)) for version, text in texts.items()
        }
        self.manifests = {version: self.manifests[version] for version in versions}

    def versions(self) -> list[int]:
        """See `VersionSource.versions`."""
        return sorted(self.manifests)

    def manifest(self, version: int) -> VersionManifest:
        """See `VersionSource.manifest`."""
        if version not in self.manifests:
            raise VanishedError(f"version {version} is not there any more; update again")
        return self.manifests[version]

    def register(self, reader: str, registration: Registration) -> None:
        """Nothing: these readers have no names."""


def _new_manifests(
    source: VersionSource, known: Collection[int], attempts: int = _ATTEMPTS
) -> tuple[list[int], dict[int, str]]:
    """The versions of a source, and the texts of manifests that are not known.

    Raises:
        PublishError: there is no version, or the newest one is damaged; others that are damaged are left out.
    """
    versions, texts = source.versions(), {}
    for version in versions:
        if version in known:
            continue
        try:
            manifest = source.manifest(version)
        except VanishedError:
            if attempts > 1:
                return _new_manifests(source, known, attempts - 1)  # newer versions are there then
            continue
        except PublishError:
            if version == versions[-1]:
                raise
            continue
        texts[version] = json.dumps({**manifest.to_json(), "checksum": manifest.checksum})
    found = [version for version in versions if version in known or version in texts]
    if not found:
        raise PublishError(f"{source} has no version yet; wait until the trainer has published one")
    return found, texts


def _raise(problem: Exception | None) -> None:
    if problem is not None:
        raise problem
