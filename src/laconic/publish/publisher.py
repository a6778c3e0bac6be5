"""`Publisher`: a training run writes versions of its weights, which others read while training goes on.

[Note: Publishing in the background]
`publish` compares this rank's shares with what was published last, and notes the differences: [Note: The copy published
last] in shares.py. From then on the version shares nothing with the run. A thread encodes and writes it: each rank its
own files, and rank 0 the manifest and the commit. The ranks' threads talk over a Gloo group of their own, so the
version and the run's collectives never wait for each other. The next `publish` waits for the version before.

A version that could not be written is never seen, and its number is not used again. The version after it is whole.
A publisher that begins in a folder with versions of its run goes on from the last number, with a whole version. It
leaves its mark in the folder, and a publisher that finds another mark there ends: the younger one has taken over.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from laconic.checkpoint.asynchronous import BackgroundWriter
from laconic.checkpoint.state import is_held_in_part
from laconic.comm.entries import typed
from laconic.errors import listing
from laconic.hf.hub_names import FolderRun
from laconic.islands.local_steps import LocalSteps
from laconic.policy import Count, Policy, option, with_keys
from laconic.publish.changes import EncodedPart, added, as_text
from laconic.publish.holdings import CheckpointContents, Holding, contents_of, holding_of, in_folder, shares_of
from laconic.publish.shares import Changes, OwnShares, TensorShare
from laconic.publish.versions import (
    VERSION_NAME,
    FolderSource,
    Kind,
    Names,
    PublishedPart,
    PublishedTensor,
    PublishError,
    VersionManifest,
    dtype_name,
    superseded,
    version_name,
)
from laconic.shard.policies import DtypeName
from laconic.store import folder as store
from laconic.store.files import make_folder, remove, write_text
from laconic.store.folder import CrashPoint, FileRecord, reached
from laconic.store.series import MANIFEST, Series
from laconic.store.tensors import STORABLE, write_named

_T = TypeVar("_T")
MARK = "publisher.json"
_PATIENCE_S = 10.0
"""How long rank 0 waits to see the files of other ranks."""


@dataclass(frozen=True, kw_only=True)
class PublishPolicy(Policy):
    """The contents of versions, and the number of versions that are kept."""

    dtype: DtypeName = option("bfloat16", of=dtype_name)
    """The dtype of floating-point tensors, also as a `torch.dtype`."""
    names: Names = "huggingface"
    """`huggingface`: as `laconic export` writes them; of a peft model the adapters, as peft does. `hub`: as folders of
    the hub have them, where transformers stacks or renames tensors. `model`: the model's own."""
    adapters: Literal["alone", "merged"] = "alone"
    """Of a peft model, its adapters alone, or its base model with adapters merged."""
    encoding: Literal["gaps", "lossless", "smallest"] = "gaps"
    """How changes are written. Anybody can read gaps. `lossless` is much smaller, `smallest` chooses for each tensor,
    and both need laconic to read, and the values before."""
    base_every: Count = 50
    """A version in so many has all values besides its patch, for readers that begin."""
    keep: Count = 2
    """The newest versions that are kept in any case."""
    patience: Count = 100
    """A registered reader that is further behind does not keep versions."""
    max_file_bytes: Count = 1 << 30
    """The size of a file, and the memory that its reader needs. A larger tensor has a file of its own."""

    def _check_keys(self) -> None:
        does_fit = self.adapters == "alone" or self.names != "model"
        self._check("adapters", does_fit, 'needs {names="huggingface"} or {names="hub"}')


class Publisher(BackgroundWriter):
    """Weight sync: publishes versions of a model's weights into a folder. All its ranks make it and call its methods.

        publisher = Publisher(model, "/shared/weights", base_every=50)
        for step in range(steps):
            ...
            optimizer.step()
            publisher.publish(step=step)
        publisher.wait()

    The model may be plain, under DDP, FSDP2 or `fully_shard` with any placement, with partial updates or adapters, or
    held in part by the ranks of a pipeline. Call `publish` between optimizer steps. If a version cannot be written, the
    next call raises the error on every rank.
    `Reader` reads versions, and [Note: A published version] in versions.py says what they are.

    Args:
        model: the model.
        to: a folder that all ranks share. It has nothing else in it.
        local_steps: the model's `LocalSteps`, if there are islands: what they last agreed on is published.
        group: the process group of the ranks that hold the model. Default: all ranks.
        run: a name of the run. Give it again to go on in the same folder. Default: a name of its own.
        policy: see `PublishPolicy`.
        keys: other values of fields of the policy, such as `dtype=torch.bfloat16, keep=4`.

    Cost: host memory for one copy of the weights in `dtype`, cut over all ranks; until a version is written, for each
        element that has changed its place (4 bytes) and its old value; and for one patch. Nothing but names, sizes and
        digests crosses between ranks.

    Raises:
        PublishError: the folder cannot be written, or has versions of another run. Every rank raises it.
    """

    def __init__(
        self,
        model: nn.Module,
        to: str | Path,
        *,
        local_steps: LocalSteps | None = None,
        group: dist.ProcessGroup | None = None,
        run: str | None = None,
        policy: PublishPolicy | None = None,
        **keys: Any,
    ) -> None:
        self.policy = with_keys(policy or PublishPolicy(), **keys)
        super().__init__("a Publisher", group, PublishError)
        self.folder = Path(to)
        self._model, self._local_steps = model, local_steps
        begun = self._ranks.on_rank_0(lambda: self._begin_run(run), f"cannot publish into {self.folder}")
        self.run, self._mark, self._last = begun
        self._since_whole = 0
        self._has_whole: dict[int, bool] = {}
        """Whether a version has whole values, of those whose manifests rank 0 has written or read."""
        self._told: list[Any] = []
        """What all ranks know of this rank's part of the tensors that are published: see `_look`."""
        self._runs: tuple[dict[str, tuple[int, ...]], dict[str, FolderRun]] | None = None
        self._shares: OwnShares | None = None
        self.is_copy_published = False
        """Whether the copies are of the last version. The next one has a patch then."""

    def publish(self, *, step: int | None = None) -> int:
        """Begin to write a version with the weights of this instant, and return its number. Collective.

        `step` is the optimizer step, for readers to know. Training waits for the version before to be written, and
        while each rank casts and compares its own share.

        Raises:
            PublishError: the version before could not be written, on all ranks; the next one will be whole. Or tensors
                have no memory, or are not whole over all ranks.
        """
        self.wait()
        contents = contents_of(
            self._model, self.policy.names, merges=self.policy.adapters == "merged", local_steps=self._local_steps
        )
        is_patch, self.is_copy_published = self.is_copy_published, False  # even if what follows fails
        (holdings, told, changes), is_divided = self._together(
            lambda: self._look(contents, compares=is_patch), lambda found: found[1] == self._told
        )
        changes = changes if is_divided else None
        if changes is None:
            everyone = None if is_divided else self._ranks.gather(told)
            self._together(lambda: self._take(holdings, everyone))
        head = _Head(version=self._last + 1, base=None if changes is None else self._last, step=step)
        self._last = head.version
        self._writing = self._thread.submit(self._write, head, changes)
        return head.version

    def _together(
        self, action: Callable[[], _T], question: Callable[[_T], bool] = lambda result: True
    ) -> tuple[_T, bool]:
        """See `RankGroup.agree_and_ask`; also where memory is missing, all ranks fail."""

        def run() -> _T:
            try:
                return action()
            except (MemoryError, RuntimeError) as error:
                raise PublishError(f"a version could not be made ({type(error).__name__}: {error})") from error

        return self._ranks.agree_and_ask(run, question)

    # -- before a version ----------------------------------------------------------------------------------------------

    def _begin_run(self, run: str | None) -> list[Any]:
        """Leave a mark in the folder. Returns the run's name, the mark, and the last version's number. On rank 0."""
        make_folder(self.folder)
        last, found = 0, None
        source = FolderSource(self.folder)
        for version in source.versions():
            last = version
            try:
                found = source.manifest(version).run
            except PublishError:  # damaged, or removed since
                continue
        if found is not None and found != run:
            raise PublishError(
                f"{self.folder} has versions of the run {found!r}, and this is {run!r}; give run={found!r} to go on "
                "there, or another folder"
            )
        own, mark = run or uuid.uuid4().hex, uuid.uuid4().hex
        write_text(self.folder / MARK, json.dumps({"run": own, "mark": mark}))
        return [own, mark, last]

    def _holdings(self, contents: CheckpointContents) -> dict[str, Holding]:
        """The part that this rank holds of each published tensor. Raises: PublishError: one cannot be published."""
        tensors = contents.tensors
        missing = [name for name, tensor in tensors.items() if tensor.is_meta]
        if missing and not is_held_in_part(self._model):
            raise PublishError(
                f"{listing(missing)}: no memory, on the meta device; call model.to_empty(device=...) before publishing"
            )
        if unknown := [name for name, tensor in tensors.items() if tensor.dtype not in STORABLE]:
            raise PublishError(
                f"{listing(unknown)}: no safetensors file holds {tensors[unknown[0]].dtype}; convert them"
            )
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if self._runs is None or self._runs[0] != shapes:  # with stacked experts they are thousands
            self._runs = shapes, in_folder(contents, self.policy.names)
        whole = {
            name: Holding(shape=tuple(tensor.shape), dtype=tensor.dtype, regions=())  # other ranks hold it
            if tensor.is_meta
            else holding_of(tensor, contents.addends.get(name), is_buffer=name in contents.buffers)
            for name, tensor in tensors.items()
        }
        return {name: whole[run.name].run(run.start, run.shape) for name, run in self._runs[1].items()}

    def _look(
        self, contents: CheckpointContents, *, compares: bool
    ) -> tuple[dict[str, Holding], list[Any], dict[str, list[Changes]] | None]:
        """Find this rank's holdings, and their changes if all is where it was in the last version.

        Returns the holdings; as JSON a hash of all names, shapes and dtypes, which are alike on all ranks, and the
        places of this rank's regions; and the changes, or None if readers cannot have them.
        """
        holdings = self._holdings(contents)
        kinds = json.dumps({name: [each.shape, str(each.dtype)] for name, each in holdings.items()})
        places = {name: [list(map(list, held.place)) for held in each.regions] for name, each in holdings.items()}
        told = [hashlib.sha256(kinds.encode()).hexdigest(), places]
        own = self._shares if compares and told == self._told else None
        return holdings, told, None if own is None else own.compare(holdings)

    def _take(self, holdings: dict[str, Holding], everyone: Sequence[list[Any]] | None) -> None:
        """Copy the present values; before, divide the elements among the ranks by what `everyone` has told of `_look`.

        With None they stay divided.
        """
        if everyone is not None:
            if len({kinds for kinds, _ in everyone}) > 1:
                raise PublishError(
                    "ranks hold tensors of other names, shapes or dtypes; publish one model from all ranks"
                )
            shares = shares_of([places for _, places in everyone], holdings, self._ranks.rank)
            self._shares, self._told = None, []  # their memory goes before there is new
            self._shares = OwnShares(holdings, shares, getattr(torch, self.policy.dtype), self.policy.encoding)
            self._told = everyone[self._ranks.rank]
        assert self._shares is not None
        self._shares.take(holdings)

    # -- in the background: [Note: Publishing in the background] -------------------------------------------------------

    def _write(self, head: _Head, changes: dict[str, list[Changes]] | None) -> Path:
        threading.current_thread().name = f"publish version {head.version}"
        own = self._shares
        assert own is not None
        shares, _ = self._together(lambda: own.encoded(changes))
        patch_bytes = sum(part.nbytes for share in shares.values() for part in share.patch)
        nbytes = self._ranks.gather([patch_bytes, own.nbytes])
        if sum(patch for patch, _ in nbytes) >= sum(whole for _, whole in nbytes):  # nobody wants such a patch
            head.base = None
        head.is_whole = head.base is None or self._since_whole + 1 >= self.policy.base_every
        final = self.folder / version_name(head.version)
        failure = f"version {head.version} could not be written into {self.folder}"
        temporary = Path(self._ranks.on_rank_0(lambda: str(self._begin(final)), failure))
        reached(CrashPoint.BEGUN)
        try:
            told = self._ranks.on_all(lambda: self._write_own(temporary, head, own, shares), failure)
            self._ranks.on_rank_0(lambda: self._commit(temporary, final, head, own, told), failure)
        except PublishError:
            if self._ranks.rank == 0:
                remove(temporary)
            raise
        self._since_whole = 0 if head.is_whole else self._since_whole + 1
        self.is_copy_published = True
        return final

    def _begin(self, final: Path) -> Path:
        self._check_mark()
        if final.exists():
            raise PublishError(f"{final} is there already; another publisher writes into the folder")
        return store.begin(final, writer=self._mark)

    def _youngest(self) -> Any:
        """The mark of the youngest publisher."""
        return json.loads((self.folder / MARK).read_text(encoding="utf-8"))["mark"]

    def _check_mark(self) -> None:
        if self._youngest() != self._mark:
            raise PublishError(
                f"another publisher, which began after this one, writes into {self.folder}; stop one of them"
            )

    def _write_own(
        self, temporary: Path, head: _Head, own: OwnShares, shares: Mapping[str, TensorShare]
    ) -> dict[str, Any]:
        """Write the files of this rank. Returns their records, and what the manifest says of each tensor, as JSON."""
        told: dict[str, Any] = {
            name: {"before": str(share.before), "after": str(share.after), "patch": [], "whole": []}
            for name, share in shares.items()
        }
        if head.is_whole and (damaged := own.damaged()):
            raise PublishError(
                f"{listing(damaged)}: the copies in host memory are not what was published; the next version is made "
                "of the weights, but test this machine's memory"
            )
        kinds: dict[Kind, Iterable[tuple[str, EncodedPart]]] = {}
        if head.base is not None:
            kinds["patch"] = ((name, part) for name, share in shares.items() for part in share.patch)
        if head.is_whole:
            kinds["whole"] = own.whole()
        files = []
        for kind, parts in kinds.items():
            for number, group in enumerate(_grouped(parts, self.policy.max_file_bytes)):
                file = f"{kind}-{self._ranks.rank:05d}{f'-{number}' if number else ''}.safetensors"
                tensors: dict[str, Tensor] = {}
                for name, part in group:
                    key = part.key_in(name, own.shapes[name])
                    tensors |= {key + ending: tensor for ending, tensor in part.tensors.items()}
                    told[name][kind].append(vars(part.stored_as(file, key)))
                # as safetensors itself does: then all tensors lie at multiples of their elements' sizes
                ordered = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))
                files.append(vars(write_named(temporary / file, ordered, {"format": "pt"})))
                reached(CrashPoint.WRITTEN)
        reached(CrashPoint.SYNCED)
        plain: dict[str, Any] = json.loads(json.dumps({"files": files, "tensors": told}))
        return plain

    def _commit(self, temporary: Path, final: Path, head: _Head, own: OwnShares, told: list[dict[str, Any]]) -> None:
        """Write the manifest, rename the folder, and remove versions that nobody needs. On rank 0."""
        files = tuple(FileRecord(**record) for of_rank in told for record in of_rank["files"])
        missing = store.not_seen(temporary, files, _PATIENCE_S)
        if missing is not None:
            raise PublishError(f"rank 0 does not see {missing}; give a folder on a file system that all nodes share")
        tensors = []
        for name, shape in own.shapes.items():
            shares = [each["tensors"][name] for each in told if name in each["tensors"]]
            before, after = (as_text(added(*(int(share[key]) for share in shares))) for key in ("before", "after"))
            patch, whole = (
                tuple(typed(PublishedPart, part) for share in shares for part in share[kind])
                for kind in ("patch", "whole")
            )
            tensors.append(
                PublishedTensor(
                    name=name,
                    shape=shape,
                    dtype=dtype_name(own.dtypes[name]),
                    before=None if head.base is None else before,
                    after=after,
                    patch=patch,
                    whole=whole,
                )
            )
        manifest = VersionManifest(
            files=files, run=self.run, names=self.policy.names, tensors=tuple(tensors), **vars(head)
        )
        self._check_mark()
        store.commit(temporary, final, manifest, MANIFEST)
        self._has_whole[head.version] = head.is_whole
        self._prune()

    def _prune(self) -> None:
        """Remove the versions that no reader needs, and the remains of interrupted writes: see `superseded`."""
        source = FolderSource(self.folder)
        found: dict[int, bool] = {}
        for version in source.versions():
            with contextlib.suppress(PublishError):  # a person may want to look at what is damaged
                is_whole = self._has_whole.get(version)
                found[version] = source.manifest(version).is_whole if is_whole is None else is_whole
        self._has_whole = found
        readers = list(source.registrations().values())
        old = superseded(found, readers, keep=self.policy.keep, patience=self.policy.patience)
        series = Series(
            folder=self.folder,
            names=VERSION_NAME.pattern,
            kind=VersionManifest,
            name_of=lambda made: version_name(made.version),
        )
        # the youngest publisher may have just begun
        series.prune(lambda name: int(name[1]) in old, lambda name: self._youngest() not in name[0])
        reached(CrashPoint.PRUNED)


@dataclass(kw_only=True)
class _Head:
    """The facts about a version that are known before it is written: see `VersionManifest`."""

    version: int
    base: int | None
    step: int | None
    is_whole: bool = False


def _grouped(parts: Iterable[tuple[str, EncodedPart]], most_bytes: int) -> Iterator[list[tuple[str, EncodedPart]]]:
    """Cut parts into groups of up to `most_bytes`, of one part at least."""
    group: list[tuple[str, EncodedPart]] = []
    nbytes = 0
    for name, part in parts:
        if group and nbytes + part.nbytes > most_bytes:
            yield group
            group, nbytes = [], 0
        group.append((name, part))
        nbytes += part.nbytes
    if group:
        yield group
