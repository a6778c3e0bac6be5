"""Damage to published weights, in a folder and on their way, and forged manifests: readers change nothing."""

from __future__ import annotations

import copy
import dataclasses
import json
import random
import re
import select
import socket
import socketserver
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from laconic.publish import HttpSource, PublishError, Reader, WeightServer
from laconic.publish.versions import MANIFEST, VersionManifest, version_name
from tests.faults.bench import Bench, campaign_row, faults_row
from tests.faults.damage import damage, tries
from tests.support.published import assert_same, model_with, published, snapshot
from tests.support.record import Row

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
    _sealed(manifest, body)


def _places(value: Any) -> list[tuple[Any, Any]]:
    """All (container, key) of a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found: list[tuple[Any, Any]] = []
    for key, each in items:
        found += [(value, key), *_places(each)]
    return found


def _sealed(path: Path, body: dict[str, Any]) -> None:
    """Write a manifest of any contents with the checksum of these contents."""

    class Forged(VersionManifest):
        def __init__(self) -> None: ...

        def to_json(self) -> dict[str, Any]:
            return body

    Forged().write(path)


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


@contextmanager
def served(folder: Path, **options: Any) -> Iterator[WeightServer]:
    with WeightServer(folder, **options) as server:
        server.start()
        yield server


class Proxy:
    """Passes connections on to a server, and does something to each piece of an answer."""

    def __init__(self, url: str, change: Callable[[bytes], bytes | None]) -> None:
        target = (re.findall(r"//(.*):", url)[0], int(url.rpartition(":")[2]))

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                with socket.create_connection(target) as behind:
                    while True:
                        for ready in select.select([self.request, behind], [], [])[0]:
                            data = ready.recv(1024)
                            answer = data if ready is self.request else change(data)
                            if not data or answer is None:
                                return
                            (behind if ready is self.request else self.request).sendall(answer)

        socketserver.ThreadingTCPServer.allow_reuse_address = True
        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.block_on_close = False
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Proxy:
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def flipped_answers(folder: Path, num_flips: int) -> int:
    """Flip a bit of what the server answers, again and again. Returns how often it was noticed."""
    weights = published(folder)
    chance, noticed, at = random.Random(0), 0, [0]

    def flipped(data: bytes) -> bytes:
        begin, at[0] = at[0], at[0] - len(data)
        if 0 <= begin < len(data):
            bad = bytearray(data)
            bad[begin] ^= 1 << chance.randrange(8)
            return bytes(bad)
        return data

    with served(folder) as server, Proxy(server.url, flipped) as proxy:
        for _ in range(num_flips):
            at[0] = chance.randrange(40_000)
            model = model_with(weights[5])
            problem = ""
            try:
                Reader(HttpSource(proxy.url, timeout_s=0.3)).update(model)
            except (PublishError, OSError) as error:
                problem = str(error)
            assert "\n" not in problem
            assert_same(snapshot(model), weights[5 if problem else 6])
            noticed += bool(problem)
    return noticed


@campaign_row("publish-damage", section="publish")
def row(bench: Bench) -> Row:
    """Damage files and messages, and forge manifests."""
    num_files, num_messages = (20, 20) if bench.quick else (700, 500)
    found = damaged_folders(bench.out / "damaged", num_files)
    noticed = flipped_answers(bench.out / "flipped", num_messages)
    told, harmless = found.pop("told", 0), found.pop("harmless", 0)
    told_row = faults_row(
        claim="damaged, forged and missing files, and damaged messages of HTTP; applied, or not told in a line",
        tried=num_files + num_messages,
        at_least=1000,
        harms={"wrong": sum(found.values())},
        note=f"{num_files} folders with a flipped bit, a cut, longer, empty, overwritten, exchanged or missing file, "
        f"or a manifest with one value forged and a checksum that fits: {told} told, {harmless} in what the reader "
        f"does not need. {num_messages} answers with a flipped bit: {noticed} told; the others were asked for again, "
        "or changed nothing that counts. " + "; ".join(found),
    )
    return dataclasses.replace(told_row, measures=MEASURES)
