"""Other programs are told of each new version by HTTP."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from laconic.publish import Publisher, PublishError
from laconic.publish.announcing import Announcer
from tests.support.published import edit, make

WAIT_S = 20.0


class Hook(ThreadingHTTPServer):
    """An address that takes news, and answers with the next of `statuses`, then with 200."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.news: list[tuple[str, dict[str, object]]] = []
        self.statuses: list[int] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def wait_for(self, version: int) -> None:
        deadline_s = time.monotonic() + WAIT_S
        while not any(news["version"] == version for _, news in self.news):
            assert time.monotonic() < deadline_s, self.news
            time.sleep(0.01)


class _Handler(BaseHTTPRequestHandler):
    server: Hook

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        status = self.server.statuses.pop(0) if self.server.statuses else 200
        if status == 200:
            self.server.news.append((self.path, body))
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hook() -> Iterator[Hook]:
    server = Hook()
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.mark.machine
def test_each_new_version_is_told(tmp_path: Path, hook: Hook) -> None:
    """Not those that were there before; and an address that does not answer holds up no other."""
    net = make()
    with Publisher(net, tmp_path / "versions", run="run") as publisher:
        publisher.publish()
        publisher.wait()
        with Announcer(tmp_path / "versions", [hook.url + "/new?a=b", "http://127.0.0.1:1/"]):
            for version in (2, 3):
                edit(net, version)
                publisher.publish(step=10 * version)
                publisher.wait()
                hook.wait_for(version)
    assert hook.news == [("/new?a=b", {"run": "run", "version": each, "step": 10 * each}) for each in (2, 3)]


@pytest.mark.machine
def test_a_folder_that_comes_later(tmp_path: Path, hook: Hook) -> None:
    with Announcer(tmp_path / "versions", [hook.url]), Publisher(make(), tmp_path / "versions", run="run") as publisher:
        publisher.publish()
        publisher.wait()
        hook.wait_for(1)
    assert hook.news == [("/", {"run": "run", "version": 1, "step": None})]


@pytest.mark.machine
def test_an_address_that_refuses(tmp_path: Path, hook: Hook, capfd: pytest.CaptureFixture[str]) -> None:
    """Three attempts; a line; and the next version is told."""
    net, hook.statuses = make(), [500, 500, 404, 500]
    with (
        Announcer(tmp_path / "versions", [hook.url]),
        Publisher(net, tmp_path / "versions", run="run") as publisher,
    ):
        publisher.publish()
        publisher.wait()
        said, deadline_s = "", time.monotonic() + WAIT_S
        while "\n" not in said:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
            said += capfd.readouterr().err
        assert said == f"laconic publish: {hook.url} was not told of version 1: status 404\n"
        publisher.publish()
        publisher.wait()
        hook.wait_for(2)
    assert len(hook.news) == 1


def test_addresses_that_make_no_sense(tmp_path: Path) -> None:
    for url in ("nowhere", "ftp://host", "http://", "http://host:99999", "http://me:secret@host/"):
        with pytest.raises(PublishError, match="is no address to tell of versions") as error:
            Announcer(tmp_path, [url])
        assert "secret" not in str(error.value)
