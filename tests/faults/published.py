"""Published weights: damage to them, forged manifests, and kills. A reader changes nothing where something is wrong."""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import random
import shutil
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from laconic.publish import FolderSource, Publisher, PublishError, Reader
from laconic.publish.staging import verify
from laconic.publish.versions import MANIFEST, VanishedError, version_name
from laconic.store.folder import _checksum
from tests.faults.bench import Bench, Found, campaign
from tests.faults.damage import damage, tries
from tests.faults.power_loss import attached
from tests.faults.victims import at_call
from tests.support.published import assert_same, model_with, published, snapshot

MEASURES = ("laconic.publish", "laconic.store")
_LONGEST_LINE = 500


_ODD: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2**63, 10**30, 0.5, "", "../x", "/etc/passwd", "bfloat16", "float8_e4m3fn", [], [1],
    [10**9], {}, "0" * 16,
)  # fmt: skip


def _forge(manifest: Path, chance: random.Random) -> None:
    """Another value somewhere in the manifest, and a checksum that fits."""
    body = json.loads(manifest.read_text())
    del body["checksum"]
    holder, key = chance.choice(list(_places(body)))
    before = copy.deepcopy(holder[key])
    more = (before + 1, before - 1, before * 2) if isinstance(before, int) and not isinstance(before, bool) else ()
    holder[key] = chance.choice([*more, *_ODD])
    manifest.write_text(json.dumps({**body, "checksum": _checksum(body)}))


def _places(value: Any) -> list[tuple[Any, Any]]:
    """All (container, key) of a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, each in items for place in ((value, key), *_places(each))]


def damaged_folders(folder: Path, num_damages: int, *, seed: int = 0) -> Counter[str]:
    """Damage a folder of versions anew, again and again, and let a reader update from some version.

    Returns: how often the damage was told, how often it did not matter, and each other outcome, which is wrong.
    """
    weights = published(folder / "intact", base_every=4, encoding="smallest", run="run")
    starts = random.Random(seed)

    def spoil(place: Path, chance: random.Random) -> str:
        files = sorted(place.glob("weight_v*/*"))
        newest = [file for file in files if file.parent.name == version_name(6)]
        path = chance.choice(newest if chance.random() < 0.7 else files)
        if chance.random() < 0.3:
            _forge(path.parent / MANIFEST, chance)
            return f"forged manifest of {path.parent.name}"
        others = [each for each in files if each.name == path.name]
        return f"{damage(path, others, chance)} in {path.parent.name}"

    def use(place: Path) -> str:
        start = starts.randrange(7)
        model = model_with(weights[start])
        try:
            version = Reader(place).update(model)
        except (PublishError, OSError) as error:
            assert_same(snapshot(model), weights[start])
            return "told" if "\n" not in str(error) and len(str(error)) < _LONGEST_LINE else f"{error}"
        except Exception as error:
            return f"from {start}: {error!r}"
        has_right = all((model.state_dict()[name] == tensor).all() for name, tensor in weights[version].items())
        return "harmless" if has_right else f"from {start}: other values"

    found = Counter[str]()
    for what, outcome in tries(folder / "intact", num_damages, spoil, use, seed=seed):
        found[outcome if outcome in ("told", "harmless") else f"{what}: {outcome}"] += 1
    return found


@campaign(
    "publish-damage",
    "damaged, forged and missing files of published weights; applied, or not told in a line",
    harms=("wrong",),
    section="publish",
    measures=MEASURES,
)
def damages(bench: Bench) -> Found:
    """Damage files, and forge manifests; tests/publish/test_http.py damages messages."""
    num = 20 if bench.quick else 1000
    found = damaged_folders(bench.out / "damaged", num)
    told, harmless = found.pop("told", 0), found.pop("harmless", 0)
    return num, [f"wrong: {each}" for each in found], f"{told} told, {harmless} in what the reader does not need."


# -- kills -------------------------------------------------------------------------------------------------------------


def weights_of(version: int) -> dict[str, Tensor]:
    """The weights of a version, which differ from those of the one before in a few places; 0 stands for none."""
    if version == 0:
        return {name: torch.zeros_like(tensor) for name, tensor in weights_of(1).items()}
    torch.manual_seed(0)
    large, small = torch.randn(300, 70), torch.randn(9)
    for number in range(version % 7, version + 1, 7):
        large.view(-1)[number % 20_000 :: 997] += number
    small[version % 9] = version
    return {"large": large.bfloat16(), "small": small.bfloat16()}


def publishing(folder: Path, **options: Any) -> Callable[[], int]:
    """A function that publishes the next version, after those that are there, and returns its number."""
    model = nn.Module()
    for name, value in weights_of(1).items():
        model.register_parameter(name, nn.Parameter(value.float()))
    publisher = Publisher(model, folder, run="run", **{"base_every": 4, "keep": 2} | options)

    def publish() -> int:
        version = max(FolderSource(folder).versions(), default=0) + 1
        for name, value in weights_of(version).items():
            model.get_parameter(name).data.copy_(value)
        assert publisher.publish(step=version) == version
        publisher.wait()
        return version

    return publish


def update(folder: Path, held: dict[str, Tensor]) -> int:
    """Let a new reader update, and compare each value."""
    version = Reader(folder).update(held)
    assert_same(held, weights_of(version))
    return version


def lives(folder: Path, num_kills: int) -> int:
    """Kill a publisher before every 7th of its operations on files, and go on from what it leaves.

    Returns the number of updates of a reader that looks before each operation.
    """
    live, left, held = folder / "live", list[Path](), weights_of(0)
    reader, passed, updates = Reader(live, name="reader"), itertools.count(1), 0
    is_free = threading.Lock()

    def look(**_: object) -> None:
        nonlocal updates
        if not is_free.acquire(blocking=False):  # a thread of the publisher is here
            return
        if live.is_dir() and FolderSource(live).versions():
            with contextlib.suppress(VanishedError):
                assert_same(held, weights_of(reader.update(held)))
                updates += 1
            if next(passed) % 7 == 0:
                left.append(folder / f"left-{len(left)}")
                shutil.copytree(live, left[-1])
        is_free.release()

    publish = publishing(live)
    with attached(look):
        while len(left) < num_kills:
            publish()
    for place in left:
        assert not [verdict.problem for verdict in verify(FolderSource(place)) if verdict.problem]
        assert update(place, weights_of(0)) == FolderSource(place).versions()[-1]
        version = publishing(place)()
        assert update(place, weights_of(0)) == version
        shutil.rmtree(place)
    return updates


class _KilledError(BaseException):
    """In place of SIGKILL."""


def _die() -> None:
    raise _KilledError


def lives_of_readers(folder: Path, num_kills: int) -> int:
    """Kill readers at every 97th call of laconic's functions, and at every one that applies what was read.

    Returns how often their model was no version any more.
    """
    publish, newest, num_halves, kills, applies = publishing(folder, keep=100), 9, 0, 0, list[bool]()
    assert [publish() for _ in range(newest)][-1] == newest
    versions = [weights_of(version) for version in range(newest + 1)]
    apply = Reader.apply

    def noted(*arguments: Any) -> int:
        applies.append(True)
        return apply(*arguments)

    for begins, every in ((lambda: True, 97), (lambda: bool(applies), 1)):
        call, start, goal = 1, 0, kills + num_kills // 2
        while kills < goal:
            held = copy.deepcopy(versions[start % newest])
            applies.clear()
            try:
                with mock.patch.object(Reader, "apply", noted):
                    at_call(call, _die, begins)
                    update(folder, held)
                call, start = 1, start + 1  # it has ended before
            except _KilledError:
                kills, call = kills + 1, call + every
            finally:
                sys.setprofile(None)
            num_halves += not any(all(torch.equal(held[name], of[name]) for name in of) for of in versions)
            assert update(folder, held) == newest
    return num_halves


@campaign(
    "publish-kills",
    "kills of publishers and readers at calls of laconic; wrong or half versions served",
    harms=("wrong",),
    section="publish",
    measures=MEASURES,
)
def kills(bench: Bench) -> Found:
    """Kill publishers while they write, and readers while they read and apply. What is wrong fails an assertion."""
    num_publishers, num_readers = (5, 5) if bench.quick else (300, 220)
    updates = lives(bench.out / "publishers", num_publishers)
    repaired = lives_of_readers(bench.out / "readers", num_readers)
    note = f"{updates} updates of a reader meanwhile; {repaired} models that were no version, and were mended."
    return num_publishers + num_readers, [], note
