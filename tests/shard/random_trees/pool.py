"""Ranks that play cases: threads of this process, which take turns."""

from __future__ import annotations

import linecache
import traceback
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, seed, settings
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import laconic
from laconic import rehearse
from laconic.comm.speed import AS_IN_A_RACK
from laconic.shard import choosing
from tests.shard.random_trees.case import Axes, Case
from tests.shard.random_trees.compare import differences
from tests.shard.random_trees.play import play_oracle, play_rank
from tests.shard.random_trees.strategies import cases

_LIBRARY = str(Path(laconic.__file__).parent)
_REFUSALS = (ValueError, RuntimeError, TypeError, NotImplementedError)


@dataclass(frozen=True)
class Outcome:
    """The result of a case: "equal", "differs", "refused", "foreign", or "invalid" if torch itself cannot run it."""

    kind: str
    details: tuple[str, ...] = ()
    text: str = ""
    """The whole traceback."""

    @classmethod
    def of(cls, error: BaseException) -> Outcome:
        """That of a rank's exception: refused, if laconic raised it with words of its own."""
        frames = traceback.extract_tb(error.__traceback__)
        ours = [frame for frame in frames if frame.filename.startswith(_LIBRARY)]
        summary = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        line = linecache.getline(frames[-1].filename, frames[-1].lineno or 0).strip()
        is_refusal = frames[-1] in ours and line.startswith("raise ") and isinstance(error, _REFUSALS)
        if not is_refusal:
            places = [f"{Path(frame.filename).name}:{frame.name}" for frame in (*ours[-1:], frames[-1])]
            summary += f" at {' > '.join(dict.fromkeys(places))}"
        text = "".join(traceback.format_exception(error))
        return cls("refused" if is_refusal else "foreign", (summary,), text)


def check(case: Case) -> Outcome:
    """Play a case on ranks and on the oracle, and compare."""
    torch.set_num_threads(1)
    with warnings.catch_warnings(action="ignore"):
        try:
            wanted = play_oracle(case)
        except Exception as error:
            return replace(Outcome.of(error), kind="invalid")
        with mock.patch.object(choosing, "measure_gathers", lambda cluster, level: AS_IN_A_RACK[level]):
            found = rehearse.ranks(play, case, local=case.world, goes_on=True)  # a case has one choice
    failures = [Outcome.of(answer) for answer in found if isinstance(answer, BaseException)]
    if failures:
        return min(failures, key=lambda failure: (failure.kind == "refused", "peer" in failure.details[0]))
    details = tuple(differences(case, found, wanted))
    return Outcome("differs" if details else "equal", details)


def explore(world: int, num_cases: int, first_seed: int, failures: Sequence[str]) -> Counter[str]:
    """Try random cases, and count the kinds of their outcomes.

    Raises:
        AssertionError: an outcome is one of `failures`. It shows the smallest such case that hypothesis has found.
    """
    kinds = Counter[str]()

    @seed(first_seed)
    @settings(
        database=None, deadline=None, suppress_health_check=list(HealthCheck), max_examples=num_cases,
        phases=(Phase.generate, Phase.shrink), report_multiple_bugs=False,
    )  # fmt: skip
    @given(cases(world))
    def count(case: Case) -> None:
        outcome = check(case)
        kinds[outcome.kind] += 1
        assert outcome.kind not in failures, f"{case}\n{outcome.kind}: {outcome.details[:5]}\n{outcome.text}"

    count()
    return kinds


def play(case: Case) -> Any:
    """Play a case on a rank, which joins the others first. Returns its trace."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return play_rank(case, dist.get_rank(), mesh_of(case.axes))


def mesh_of(axes: Axes) -> DeviceMesh | None:
    """The mesh of a case. Collective."""
    if axes is None:
        return None
    names = ("island", "node", "local")[-len(axes) :] if len(axes) > 1 else ("dp",)
    return init_device_mesh("cpu", axes, mesh_dim_names=names)
