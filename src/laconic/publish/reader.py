"""`Reader`: brings a model to a version that was published, the newest by default, whole or not at all."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from laconic.checkpoint import state
from laconic.publish.changes import digests_of
from laconic.publish.holdings import contents_of, in_folder
from laconic.publish.http_source import HttpSource
from laconic.publish.staging import StagedTensor, stage_version
from laconic.publish.versions import (
    FolderSource,
    Kind,
    PublishedTensor,
    PublishError,
    Registration,
    VanishedError,
    VersionManifest,
    VersionSource,
    check_reader_name,
)

_T = TypeVar("_T")
_ATTEMPTS = 5
"""How often a reader looks anew when a version was removed while it was read."""


Steps = tuple[tuple[VersionManifest, Kind], ...]
"""The versions that a reader reads on its way, in order, and whether the patch or the whole values of each."""


@dataclass(frozen=True, kw_only=True)
class UpdatePlan:
    """The way of a model to a version."""

    target: VersionManifest
    path: Steps
    own: Mapping[str, Tensor]
    """The model's tensors by their published names; empty for `patches`."""
    digests: Mapping[str, str]
    num_applied: int = 0
    """The plans that the reader had applied when it made this one."""


class WeightPatch(NamedTuple):
    """The new values of one tensor, for an engine that has it in a form of its own."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    indices: Tensor | None
    """The places in the flattened tensor that change, (c,), int64, ascending; None if `values` are all."""
    values: Tensor
    """The new values, (c,); or all, in the tensor's shape. On the host."""


class Reader:
    """Reads versions that a `Publisher` writes.

        reader = Reader("/shared/weights", name="sampler-0")
        while serving:
            ...                      # between requests
            reader.update(model)

    `update` finds out by digests which version a model holds, so a reader may be restarted, or killed in the middle, at
    any time. It takes patches from there, or whole values where these are fewer bytes or the model holds no version.
    Nothing is applied before all of it is there and every digest is right.

    The model has the dtype that was published, and whole tensors. For a model in another dtype or in few bits, or a
    sharded one, update a dict of whole tensors, and load or quantise those.

    Args:
        source: the publisher's folder; the address of `laconic publish serve`; or any other `VersionSource`.
        name: a name that no other reader has. Then the publisher keeps the versions that this reader still needs.
        run: the name of the run to read. Default: that of the first version it reads; another one is refused later.
        verify: `each`: each update takes the digests of all values that the model holds. `first`: the first one does,
            and one with other tensors, or tensors that torch's operations have changed since. Others trust that nobody
            else has changed the model: by `tensor.data`, a collective, a replayed CUDA graph, a kernel of an engine, or
            its sleep. That saves a pass over the model, whose tensors the reader then holds.
    """

    def __init__(
        self,
        source: VersionSource | str | Path,
        *,
        name: str | None = None,
        run: str | None = None,
        verify: Literal["each", "first"] = "each",
    ) -> None:
        if name is not None:
            check_reader_name(name)
        if verify not in ("each", "first"):
            raise PublishError(f'verify={verify!r}: give "each" or "first"')
        self.source: VersionSource = source_of(source) if isinstance(source, str | Path) else source
        self.name, self.run, self.verify = name, run, verify
        self._left: _Left | None = None
        """The tensors as the last update left them, if later ones trust them."""
        self.version: int | None = None
        """The version that was read last; None before the first."""
        self._num_applied = 0
        self._last: VersionManifest | None = None
        """Its manifest, which the next patch is mostly for."""
        self.bytes_read = 0
        """The bytes of all files that were read."""

    def update(self, model: nn.Module | Mapping[str, Tensor], *, to: int | None = None) -> int:
        """Bring a model, or a dict of whole tensors by name, to a version, in place. Returns its number.

        `to` is the version; default: the newest. A tied tensor may have any of its names. The model must not be in use
        meanwhile.

        Cost: one pass over the model for its digests, and host memory for what is read: a patch, or one copy of the
            model for whole values.

        Raises:
            PublishError: there is no such version, or it is damaged, older than the last one, of another run, or of
                another architecture, vocabulary or dtype. Nothing was applied.
            OSError: the source cannot be read, and nothing was applied; or, of a reader with a name, it cannot be told
                of the version, which the model then has. Update again.
        """
        return self._retried(lambda: self._update(model, to))

    def num_behind(self) -> int:
        """How many versions are newer than the last one that was read. Reads names alone, so ask as often as you like.

        Raises: see `VersionSource.versions`.
        """
        return sum(version > (self.version or 0) for version in self.source.versions())

    def wait(self, timeout_s: float = math.inf, *, poll_s: float = 0.2) -> bool:
        """Wait for a version newer than the last one that was read, and return whether there is one.

        Raises: see `VersionSource.versions`.
        """
        deadline_s = time.monotonic() + timeout_s
        while not (is_behind := self.num_behind() > 0) and time.monotonic() < deadline_s:
            time.sleep(min(poll_s, max(0.0, deadline_s - time.monotonic())))
        return is_behind

    def patches(self, since: int | None = None, *, to: int | None = None) -> Iterator[WeightPatch]:
        """Yield what has changed since a version, tensor by tensor, for engines that hold tensors in other forms.

        `since` is the version that the engine holds; by default that of the last call that was read to its end. None
        stands for no version, and then all values come. Several versions come as one. All is read and checked before
        the first tensor comes. `to` is the version to go to; default: the newest. When the last tensor has been taken,
        `version` is that one.

        Raises:
            PublishError: see `update`; and values are coded without loss, which needs those before.
        """
        since = self.version if since is None else since
        target, staged = self._retried(lambda: self._changes(since, to))
        for each in staged:
            name, shape, dtype = each.published.name, each.published.shape, each.published.torch_dtype
            if each.full is not None:
                yield WeightPatch(name, shape, dtype, None, each.full)
            elif len(each.changes[0]):
                yield WeightPatch(name, shape, dtype, *each.changes)
        self._has(target)

    # -- an update -----------------------------------------------------------------------------------------------------

    def _update(self, model: nn.Module | Mapping[str, Tensor], to: int | None) -> int:
        plan = self.plan(model, to=to)
        return self.apply(plan, self.stage(plan))

    def plan(self, model: nn.Module | Mapping[str, Tensor], *, to: int | None = None) -> UpdatePlan:
        """The first third of `update`: find out what the model holds, and which files lead to the version."""
        target = self._target_of(to)
        found = _tensors_of(model, target)
        _check_fit(target.tensors, found, f"version {target.version}")
        own = {each.name: found[each.name] for each in target.tensors}
        if self.verify == "first" and any(each.is_inference() for each in own.values()):
            raise PublishError(
                "the model was made in torch.inference_mode(), which does not count changes; make it outside, or give "
                'verify="each"'
            )
        left = self._left
        digests = left.digests if left is not None and left.marks == _marks_of(own) else digests_of(own)
        path = self._path(target, lambda manifest: manifest.digests == digests)
        return UpdatePlan(target=target, path=path, own=own, digests=digests, num_applied=self._num_applied)

    def stage(self, plan: UpdatePlan) -> dict[str, StagedTensor]:
        """The second third of `update`: read the files, and check every digest. Nothing is applied."""
        return self._staged(plan, self.version)

    def apply(self, plan: UpdatePlan, staged: Mapping[str, StagedTensor]) -> int:
        """The last third of `update`: change the model. Returns the number of the version.

        Raises:
            PublishError: another plan was applied since this one was made; and see `update`.
        """
        if plan.num_applied != self._num_applied:
            raise PublishError(
                f"the plan for version {plan.target.version} was made before another one was applied; plan anew"
            )
        self._num_applied += 1
        self._left = None
        for each in staged.values():
            each.apply()
        if self.verify == "first":
            self._left = _Left(plan.own, _marks_of(plan.own), plan.target.digests)
        self._has(plan.target)
        return plan.target.version

    def _changes(self, since: int | None, to: int | None) -> tuple[VersionManifest, list[StagedTensor]]:
        target = self._target_of(to)
        path = self._path(target, lambda manifest: manifest.version == since)
        return target, list(self._staged(UpdatePlan(target=target, path=path, own={}, digests={}), since).values())

    def _staged(self, plan: UpdatePlan, version: int | None) -> dict[str, StagedTensor]:
        """Read the files of a plan, and check every digest. `version` is the one that the reader has."""
        self._register(tuple(manifest.version for manifest, _ in plan.path), version)
        staged = {
            each.name: StagedTensor(each, plan.own.get(each.name), plan.digests.get(each.name))
            for each in plan.target.tensors
        }
        for manifest, kind in plan.path:
            self.bytes_read += stage_version(self.source, manifest, kind, staged)
        for each in plan.target.tensors:
            staged[each.name].check(each.after)
        return staged

    @staticmethod
    def _retried(action: Callable[[], _T]) -> _T:
        """Run an action anew when a version was removed meanwhile: newer ones are there then."""
        for _ in range(_ATTEMPTS - 1):
            with contextlib.suppress(VanishedError):
                return action()
        return action()

    def _target_of(self, to: int | None) -> VersionManifest:
        """The manifest of a version, or of the newest. Raises: PublishError if it is not there, or not to be read."""
        versions = self.source.versions()
        if not versions:
            raise PublishError(f"{self.source} has no version yet; wait until the trainer has published one")
        if to is not None and self.version is not None and to < self.version:
            raise PublishError(f"to={to}: this reader has read version {self.version}; make a new Reader to go back")
        if to is not None and to not in versions:
            raise PublishError(
                f"{self.source} has no version {to}, and its newest is {versions[-1]}; wait for it, or ask for one "
                "that is there"
            )
        target = self.source.manifest(versions[-1] if to is None else to)
        if self.run not in (None, target.run):
            raise PublishError(
                f"{self.source} has versions of the run {target.run!r}, and this reader reads {self.run!r}; read "
                f"another folder, or make a Reader(run={target.run!r})"
            )
        if self.version is not None and target.version < self.version:
            raise PublishError(
                f"{self.source} has version {target.version} as its newest, and this reader has read {self.version}; "
                "read the folder that the publisher writes, or make a new Reader to go back"
            )
        return target

    def _path(self, target: VersionManifest, is_held: Callable[[VersionManifest], bool]) -> Steps:
        """The versions to read, in order: patches from the one that is held, or whole values and the patches since.

        Raises:
            PublishError: neither leads to the target. VanishedError, if versions have gone meanwhile.
        """
        patches: Steps = ()
        from_whole: Steps | None = None
        manifest, patch_bytes, whole_bytes = target, 0, 0
        problem: PublishError | None = None
        while not is_held(manifest):
            if manifest.is_whole and from_whole is None:
                from_whole = ((manifest, "whole"), *patches)
                whole_bytes = patch_bytes + manifest.nbytes("whole")
            if manifest.base is None or (from_whole is not None and patch_bytes > whole_bytes):
                break
            patches = ((manifest, "patch"), *patches)
            patch_bytes += manifest.nbytes("patch")
            try:
                manifest = self._before(manifest, target, is_held)
            except PublishError as error:  # removed or damaged: whole values lead on
                problem = error
                break
        else:
            if from_whole is None or patch_bytes <= whole_bytes:
                return patches
        if from_whole is None:
            why = f" ({problem})" if problem else ""
            raise (VanishedError if isinstance(problem, VanishedError) else PublishError)(
                f"no whole values lead to version {target.version} of {self.source}{why}; nothing was applied. Let the "
                "publisher write whole values again"
            )
        return from_whole

    def _before(
        self, manifest: VersionManifest, target: VersionManifest, is_held: Callable[[VersionManifest], bool]
    ) -> VersionManifest:
        """The manifest of the version that a patch applies to. Raises: PublishError if it does not fit."""
        assert manifest.base is not None
        needed = {each.name: each.before for each in manifest.tensors}
        last = self._last  # is parsed already, and serves where nothing is read of it
        if last is not None and last.version == manifest.base and last.digests == needed and is_held(last):
            return last
        before = self.source.manifest(manifest.base)
        if before.run != target.run or before.digests != needed:
            raise PublishError(f"version {manifest.version} is no patch of version {before.version} of this run")
        return before

    def _has(self, target: VersionManifest) -> None:
        self._register((), target.version)  # before: an engine that sees its error has not moved on
        self.run, self.version, self._last = target.run, target.version, target

    def _register(self, reading: tuple[int, ...], version: int | None) -> None:
        if self.name is not None:
            self.source.register(self.name, Registration(version=version, reading=reading))


def source_of(place: str | Path) -> VersionSource:
    """The source at an address with http or https, or of a folder. Raises: PublishError for a wrong address."""
    return HttpSource(str(place)) if str(place).startswith(("http://", "https://")) else FolderSource(place)


# -- what a model holds ------------------------------------------------------------------------------------------------


class _Left(NamedTuple):
    """Tensors as an update has left them."""

    tensors: Mapping[str, Tensor]
    """They are held, so that no others come to lie where they are."""
    marks: dict[str, tuple[object, ...]]
    digests: Mapping[str, str]


def _marks_of(tensors: Mapping[str, Tensor]) -> dict[str, tuple[object, ...]]:
    """Where tensors lie, and how often torch's operations have changed them."""
    return {name: (each.data_ptr(), each.shape, each.stride(), each._version) for name, each in tensors.items()}


def _tensors_of(model: nn.Module | Mapping[str, Tensor], target: VersionManifest) -> dict[str, Tensor]:
    """The whole tensors of a model, or of a dict, under the names of a version.

    Raises:
        PublishError: a tensor is sharded, on the meta device, or no plain one.
    """
    if not isinstance(model, nn.Module):
        for name, tensor in model.items():
            _check_plain(name, tensor)
        return dict(model)
    contents = contents_of(model, target.names)
    runs = in_folder(contents, target.names)
    for name, tensor in contents.tensors.items():
        _check_plain(name, tensor)
    found: dict[str, Tensor] = {}
    for name, run in runs.items():
        tensor = found[name] = contents.tensors[run.name]
        if run.shape != tuple(tensor.shape):
            if not tensor.is_contiguous():
                raise PublishError(
                    f"{run.name} is not contiguous, and the version has it in pieces; make it contiguous"
                )
            flat = tensor.detach().view(-1)[run.start : run.start + math.prod(run.shape)]
            found[name] = flat.view(run.shape)
    tied = {} if contents.model is None or target.names == "hub" else state.tied_names(model)
    return found | {name: found[first] for name, first in tied.items() if first in found}


def _check_plain(name: str, tensor: object) -> None:
    """Raise PublishError unless a reader can fill this tensor."""
    if isinstance(tensor, DTensor):
        raise PublishError(
            f"{name} is a {type(tensor).__name__}, and a reader fills whole tensors; update a dict of whole tensors "
            "and give it to set_model_state_dict(), or take patches() and keep this rank's part"
        )
    if not isinstance(tensor, Tensor) or is_traceable_wrapper_subclass(tensor):
        raise PublishError(
            f"{name} is a {type(tensor).__name__}, and a reader fills plain tensors; leave it out, or update a dict of "
            "tensors as they are published, and load or quantise those"
        )
    if tensor.is_meta:
        raise PublishError(f"{name} is on the meta device; call model.to_empty(device=...) before reading")


def _check_fit(published: Sequence[PublishedTensor], tensors: Mapping[str, Tensor], where: str) -> None:
    """Refuse tensors that are not those of a version: of another architecture, vocabulary or dtype.

    Raises:
        PublishError: names, shapes or dtypes differ. It names the first that do.
    """
    by_name = {each.name: each for each in published}
    memory = {_memory_of(tensors[name]) for name in by_name if name in tensors}
    problems = [f"{name} is not in the model" for name in by_name if name not in tensors]
    problems += [
        f"{name} is not in the version"
        for name, tensor in tensors.items()
        if name not in by_name and _memory_of(tensor) not in memory  # a tied tensor under a further name
    ]
    further = ""
    for name, each in by_name.items():
        own = tensors.get(name)
        if own is not None and tuple(own.shape) != each.shape:
            problems.append(f"{name} is {list(own.shape)} in the model and {list(each.shape)} in the version")
        elif own is not None and own.dtype != each.torch_dtype:
            own_dtype = str(own.dtype).removeprefix("torch.")
            problems.append(f"{name} is {own_dtype} in the model and {each.dtype} in the version")
            further = "; or update a dict of tensors as they are published, and load those"
    if problems:
        more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise PublishError(
            f"{where} does not fit the model ({'; '.join(problems[:3])}{more}); read it into the architecture, "
            f"vocabulary and dtype that are published{further}"
        )


def _memory_of(tensor: Tensor) -> tuple[object, ...]:
    """The key that tied tensors share. Each empty tensor has a key of its own."""
    place = tensor.data_ptr() if math.prod(tensor.shape) else id(tensor)
    return place, tensor.shape, tensor.stride(), tensor.dtype
