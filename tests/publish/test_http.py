"""Versions over HTTP: the bytes of the folder arrive whatever the network does, and nothing else leaves the machine.

The network is a value here: what a client sends goes to the server's own handler, and a test may change each piece of
the answer. A few tests, marked `machine`, have real sockets.
"""

from __future__ import annotations

import contextlib
import gc
import http.client
import io
import itertools
import json
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import StreamRequestHandler
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from laconic.publish import FolderSource, HttpSource, PublishError, Reader, WeightServer, serving
from laconic.publish import cli as publish_cli
from laconic.publish.http_source import TOKEN_VARIABLE
from laconic.publish.versions import MANIFEST, Registration, VanishedError, version_name
from laconic.store.folder import FileRecord
from tests.support.published import (
    assert_refused,
    assert_same,
    model_with,
    published,
    read,
    snapshot,
    weights_of_versions,
)  # fmt: skip

TOKEN = "a-secret-of-the-tests"
PIECE_BYTES = 512
Change = Callable[[bytes], bytes | None]


class Answer(io.RawIOBase):
    """The bytes of an answer. Who waits for more of them waits too long, unless the connection has ended."""

    def __init__(self, data: bytes, has_ended: bool) -> None:
        self.left, self.has_ended = data, has_ended

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self.left and not self.has_ended:
            raise TimeoutError("timed out")
        data, self.left = self.left[: len(buffer)], self.left[len(buffer) :]
        buffer[: len(data)] = data
        return len(data)


class Server:
    """A handler of HTTP and what it knows, without a socket. `change` sees each piece of an answer; None breaks off."""

    def __init__(self, handler: type[StreamRequestHandler], *, change: Change | None = None, **known: Any) -> None:
        self.handler, self.change, self.known = handler, change, SimpleNamespace(**known)

    def answer(self, asked: bytes) -> Answer:
        said = io.BytesIO()
        end = mock.Mock(makefile=lambda *_: io.BytesIO(asked), sendall=said.write)
        self.handler(end, ("a reader", 0), self.known)  # type: ignore[arg-type]
        data, passed = said.getvalue(), bytearray()
        for begin in range(0, len(data), PIECE_BYTES):
            piece = data[begin : begin + PIECE_BYTES]
            changed = self.change(piece) if self.change is not None else piece
            if changed is None:
                return Answer(bytes(passed), True)
            passed += changed
        return Answer(bytes(passed), b"Connection: close" in data)


def server_of(
    folder: Path, token: str | None = None, change: Change | None = None, *, is_local: bool = False
) -> Server:
    """Serve a folder as `WeightServer` does; with `is_local` on this machine alone."""
    known = {"source": FolderSource(folder), "token": token, "is_local": is_local, "open": set()}
    return Server(serving._Handler, change=change, **known)


class Network(dict[str, Server]):
    """The servers that `socket.create_connection` finds, by host."""

    def connect(self, address: tuple[str, int], *_: Any) -> Any:
        if address[0] not in self:
            raise ConnectionRefusedError("Connection refused")
        asked = bytearray()

        def makefile(*_: Any) -> io.BufferedReader:
            data = bytes(asked)
            asked.clear()
            return io.BufferedReader(self[address[0]].answer(data))

        return mock.Mock(sendall=asked.extend, makefile=makefile, gettimeout=lambda: 60.0)

    def add(self, server: Server) -> str:
        self[f"host-{len(self)}"] = server
        return f"http://host-{len(self) - 1}:1"

    def serve(self, folder: Path, token: str | None = None, change: Change | None = None) -> str:
        """Serve a folder as `WeightServer` does, and return the address."""
        return self.add(server_of(folder, token, change))


@pytest.fixture(autouse=True)
def network(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Network:
    """A network in this process. This machine has no token of its own."""
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    found = Network()
    if not request.node.get_closest_marker("machine"):
        monkeypatch.setattr(socket, "create_connection", found.connect)
    return found


def test_from_every_version_to_the_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, network: Network) -> None:
    """As from the folder: the same values by the same bytes. An address is enough where the token is a variable."""
    weights = published(tmp_path, base_every=4, encoding="smallest")
    url = network.serve(tmp_path, TOKEN)
    for start in range(7):
        far = read(HttpSource(url, token=TOKEN), weights, start)
        assert far.bytes_read == read(tmp_path, weights, start).bytes_read
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    reader = read(url + "/", weights, 3, name="far")
    assert not reader.wait(0.01, poll_s=0.001)
    assert FolderSource(tmp_path).registrations() == {"far": Registration(version=6)}


def test_a_folder_that_is_not_there_yet_and_a_server_that_is_not(tmp_path: Path, network: Network) -> None:
    reader = Reader(network.serve(tmp_path / "later"), name="early")
    assert not reader.wait(0)
    with pytest.raises(PublishError, match="has no version yet"):
        reader.update({})
    with pytest.raises(PublishError, match="start the publisher"):
        reader.source.register("early", Registration(version=None))
    assert not (tmp_path / "later").exists()
    published(tmp_path / "later", num_versions=1)
    assert reader.wait(0)
    assert_refused("http://nowhere:1", weights_of_versions(1), 1, r"http://nowhere:1 does not answer: .*refused")
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"500 .*is no folder of versions"):
        HttpSource(network.serve(tmp_path / "file")).versions()


# -- a network that fails ----------------------------------------------------------------------------------------------


def test_a_transfer_that_breaks_off_goes_on_where_it_ended(tmp_path: Path, network: Network) -> None:
    """Every connection ends after some pieces."""
    weights = published(tmp_path)
    chance, passed, left = random.Random(0), [0], [6]

    def cut(data: bytes) -> bytes | None:
        left[0] -= 1
        if not left[0]:
            left[0] = chance.randint(3, 4)  # more than a head, so that there is progress
            return None
        passed[0] += len(data)
        return data

    url = network.serve(tmp_path, change=cut)
    for start in (0, 3, 5) * 3:
        passed[0] = 0
        reader = read(url, weights, start)
    source = FolderSource(tmp_path)
    manifests = sum((tmp_path / version_name(each) / MANIFEST).stat().st_size for each in source.versions())
    assert passed[0] < 3 * (reader.bytes_read + manifests), "nothing begins anew again and again"


def test_flipped_bits_are_noticed_or_do_no_harm(tmp_path: Path, network: Network) -> None:
    """Anywhere in the answers that an update takes; `python -m tests.faults --rows publish-damage` has real sockets."""
    weights, chance, noticed, at = published(tmp_path), random.Random(0), 0, [0]

    def flipped(data: bytes) -> bytes:
        begin, at[0] = at[0], at[0] - len(data)
        if 0 <= begin < len(data):
            return data[:begin] + bytes([data[begin] ^ 1 << chance.randrange(8)]) + data[begin + 1 :]
        return data

    url = network.serve(tmp_path, change=flipped)
    Reader(url).update(model_with(weights[5]))
    num_bytes = -at[0]
    for place in range(0, num_bytes, num_bytes // 80):
        at[0], model, problem = place, model_with(weights[5]), ""
        try:
            Reader(url).update(model)
        except (PublishError, OSError) as error:
            problem = str(error)
        assert "\n" not in problem
        assert_same(snapshot(model), weights[5 if problem else 6])
        noticed += bool(problem)
    assert noticed > 40


@pytest.mark.parametrize("is_replaced", [False, True])
def test_only_the_rest_of_the_same_file_is_asked_for(is_replaced: bool, tmp_path: Path, network: Network) -> None:
    """A file that is another one meanwhile comes from its beginning."""
    published(tmp_path)
    (file,) = FolderSource(tmp_path).manifest(1).files_of("whole")
    path, left, passed = tmp_path / version_name(1) / file.name, [file.size_bytes // 2], [0]
    wanted = bytes(file.size_bytes) if is_replaced else path.read_bytes()

    def cut_once(data: bytes) -> bytes | None:
        before, left[0] = left[0], left[0] - len(data)
        if before > 0 >= left[0]:
            if is_replaced:
                path.with_name("other").write_bytes(wanted)
                path.with_name("other").replace(path)
            return None
        passed[0] += len(data)
        return data

    assert HttpSource(network.serve(tmp_path, change=cut_once)).read(1, file) == wanted
    assert passed[0] < (2 if is_replaced else 1) * file.size_bytes + 2 * PIECE_BYTES


# -- requests that the server refuses ----------------------------------------------------------------------------------


def ask(url: str, method: str, place: str, body: bytes | None = None, **headers: str) -> tuple[int, Any, bytes]:
    connection = http.client.HTTPConnection(url.removeprefix("http://"))
    connection.putrequest(method, place, skip_accept_encoding=True)
    for name, value in {**headers, **({} if body is None else {"Content-Length": str(len(body))})}.items():
        connection.putheader(name.replace("_", "-"), value)
    connection.endheaders(body)
    response = connection.getresponse()
    return response.status, response.headers, response.read()


ESCAPES = (
    "/publisher.json", "/readers/far.json", "/", "/weight_v000001", "/weight_v000001/",
    "/weight_v000001/../publisher.json",
    "/weight_v000001/..%2fpublisher.json", "/../secret", "//secret", "/weight_v000001/.hidden", "/weight_v000001/link",
    "/weight_v000001/folder", "/weight_v000001.tmp/manifest.json", "/weight_v1/manifest.json",
    "/weight_v000001/manifest.json/x",
    "http://elsewhere/secret", "*", "/weight_v000001/manifest.json%00",
)  # fmt: skip


def test_nothing_but_versions_leaves_the_folder(tmp_path: Path, network: Network) -> None:
    folder = tmp_path / "versions"
    published(folder, num_versions=1)
    (tmp_path / "secret").write_text("secret")
    (folder / "weight_v000001" / "link").symlink_to(tmp_path / "secret")
    (folder / "weight_v000001" / "folder").mkdir()
    (folder / "weight_v000001" / ".hidden").write_text("secret")
    shutil.copytree(folder / "weight_v000001", folder / "weight_v000001.tmp", symlinks=True)
    url = network.serve(folder)
    for place in ESCAPES:
        status, _, body = ask(url, "GET", place)
        assert status >= 400, place
        assert b"secret" not in body, place
        assert list(json.loads(body)) == ["error"], place
    for method in ("POST", "DELETE", "PATCH"):
        assert ask(url, method, "/weight_v000001/manifest.json")[0] == 501
    assert ask(url, "PUT", "/weight_v000001/manifest.json", b"{}")[0] == 400


LENGTH, CHUNKED, TWICE = "Content-Length: 30", "Transfer-Encoding: chunked", "Content-Length: 0\r\nContent-Length: 30"
SMUGGLED = "GET /versions HTTP/1.1\r\nHost: x\r\n\r\n"
HEADS = (
    LENGTH, CHUNKED, f"{CHUNKED}\r\n{LENGTH}", "Content-Length: " + "9" * 5000, TWICE,
    "Content-Length: 0\r\nContent-length: 0",
    "Content-Length : 30", "Transfer-Encoding : chunked", "Transfer-Encoding:\tchunked", "X: y\r\n Content-Length: 30",
    "no header", ": empty", "X\0: y", "X: a\0b", "X: a\rContent-Length: 30", "X: y\r\r", "\x0bX: y",
    "Content_Length\x85: 30",
    "Host: elsewhere", "Range: bytes=0-1\r\nRange: bytes=1-2", "Authorization: Bearer a\r\nAuthorization: Bearer b",
    "Content-Length: +30", "Content-Length: 0x1e", "Content-Length: 3 0", "Content-Length: 30, 30",
    "Content-Length: -1",
    "X: " + "y" * 70_000, "\r\n".join(f"X{number}: y" for number in range(120)),
)  # fmt: skip
"""Headers that two parsers may read in two ways, or that are no headers."""
LINES = (
    "GET", "GET /versions", "GET /versions HTTP/1.1 x", "get /versions HTTP/1.1", "GET  /versions HTTP/1.1", "\x00",
    "GET /vers ions HTTP/1.1", "GET /\xe9 HTTP/1.1", "GET /versions HTTP/11", "GET /versions\x0bHTTP/1.1", "",
    "GET //[ HTTP/1.1", "GET http://[/versions HTTP/1.1", "GET /versions HTTP/3.0", "GET /versions HTTP/1.1\rX: y",
    "PRI * HTTP/2.0", "CONNECT host:1 HTTP/1.1", "OPTIONS * HTTP/1.1",
)  # fmt: skip


def read_twice(folder: Path, token: str | None, methods: Sequence[str]) -> tuple[int, list[str]]:
    """The number of raw requests, and those that get more than one answer, or no refusal."""
    server, given = server_of(folder, token), f"Host: x\r\nAuthorization: Bearer {TOKEN}"
    requests = [f"{method} /readers/far HTTP/1.1\r\n{given}\r\n{head}\r\n\r\n" for head in HEADS for method in methods]
    requests.remove(f"PUT /readers/far HTTP/1.1\r\n{given}\r\n{LENGTH}\r\n\r\n")  # the body of that one is the other
    requests += [f"{line}\r\n{given}\r\n\r\n" for line in LINES]
    requests += ["GET /versions HTTP/1.1\r\nX: y\r\n\r\n", "GET /versions HTTP/1.1\r\n"]
    found = []
    for request in requests:
        answer = server.answer((request + SMUGGLED).encode("latin-1"))
        is_refused = answer.left.count(b"HTTP/1.1 ") == 1 and 400 <= int(answer.left.split(b" ", 2)[1]) <= 505
        if not answer.has_ended or not is_refused:
            found.append(repr(request))
    return len(requests), found


@pytest.mark.parametrize("token", [None, TOKEN])
def test_a_request_has_one_reading(token: str | None, tmp_path: Path) -> None:
    """Others are refused, and the connection ends: nothing after the head is taken for another request."""
    assert read_twice(tmp_path, token, ("GET", "PUT", "POST", "DELETE", "HEAD"))[1] == []


def test_requests_come_within_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that comes a byte a second, and one whose body does, get no thread for longer."""
    for head in ("GET /versions HTTP/1.1\r\nHost: x\r\n", f"PUT /readers/far HTTP/1.1\r\nHost: x\r\n{LENGTH}\r\n\r\n"):
        letters = itertools.chain(head.encode(), itertools.repeat(ord("a")))

        def read1(_: int, letters: Any = letters) -> bytes:
            time.sleep(1)
            return bytes([next(letters)])

        begun_s, said = time.monotonic(), io.BytesIO()
        end = mock.Mock(makefile=lambda *_, read1=read1: mock.Mock(read1=read1), sendall=said.write)
        with contextlib.suppress(TimeoutError):
            serving._Handler(end, ("a reader", 0), server_of(tmp_path).known)  # type: ignore[arg-type]
        assert time.monotonic() - begun_s < 70
        assert said.getvalue() == b""


def test_without_a_token_only_this_machine_is_answered(tmp_path: Path) -> None:
    """A page in a browser may find a name that leads to this machine, but asks for that name."""
    published(tmp_path, num_versions=1)
    for host, is_answered in {
        "localhost": True, "127.0.0.1:8377": True, "[::1]:8377": True, "evil.example": False,
        "evil.example:8377": False, "127.0.0.1.evil.example": False, "192.0.2.1": False, "localhost.evil": False,
        "": False,
    }.items():  # fmt: skip
        for token in (None, TOKEN):
            request = f"GET /versions HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {TOKEN}\r\n\r\n"
            answer = server_of(tmp_path, token, is_local=True).answer(request.encode()).left
            assert answer.startswith(b"HTTP/1.1 200" if is_answered or token else b"HTTP/1.1 421"), (host, token)


def test_links_are_neither_served_nor_written_through(tmp_path: Path, network: Network) -> None:
    folder, elsewhere = tmp_path / "versions", tmp_path / "elsewhere"
    published(folder, num_versions=1)
    elsewhere.mkdir()
    (elsewhere / "manifest.json").write_text("secret")
    (folder / "weight_v000009").symlink_to(elsewhere)
    (folder / "readers").symlink_to(elsewhere)
    url = network.serve(folder)
    status, _, body = ask(url, "GET", "/weight_v000009/manifest.json")
    assert status >= 400
    assert b"secret" not in body
    assert ask(url, "PUT", "/readers/far", b'{"version": 1, "reading": []}')[0] == 400
    assert [path.name for path in elsewhere.iterdir()] == ["manifest.json"]


def test_requests_without_the_token_learn_nothing(tmp_path: Path, network: Network) -> None:
    weights = published(tmp_path)
    url = network.serve(tmp_path, TOKEN)
    for place in ("/versions", "/weight_v000001/manifest.json", "/nowhere"):
        for given in ("", TOKEN, f"Bearer {TOKEN}x", "Bearer é".encode().decode("latin-1")):
            given_headers: Any = {"Authorization": given} if given else {}
            status, headers, body = ask(url, "GET", place, **given_headers)
            assert (status, headers["WWW-Authenticate"]) == (401, "Bearer")
            assert body == b'{"error": "the token is wrong"}'
    assert ask(url, "PUT", "/readers/far", b'{"version": 1, "reading": []}')[0] == 401
    for source in (HttpSource(url), HttpSource(url, token="another")):
        assert_refused(source, weights, 1, f"refuses the token; give token=, or set {TOKEN_VARIABLE}")
    assert not (tmp_path / "readers").exists()


def test_registrations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, network: Network) -> None:
    """And readers do not fill the disk."""
    monkeypatch.setattr(serving, "_MOST_READERS", 2)
    url = network.serve(tmp_path)
    source = HttpSource(url)
    for reader, body, wanted in (
        ("far", b"{", 400),
        ("far", b'{"version": 3}{', 400),
        ("..%2ffar", b'{"version": 3, "reading": []}', 400),
        ("f" * 65, b'{"version": 3, "reading": []}', 400),
        ("far", b" " * (1 << 17), 413),
        ("far", None, 413),
        ("far", b'{"version": 3, "reading": [4]}', 204),
    ):
        assert FolderSource(tmp_path).registrations() == {}
        assert ask(url, "PUT", f"/readers/{reader}", body)[0] == wanted
    assert FolderSource(tmp_path).registrations() == {"far": Registration(version=3, reading=(4,))}
    assert source.versions() == []
    for name in ("b", "far"):
        source.register(name, Registration(version=1))
    with pytest.raises(PublishError, match="there are 2 readers already"):
        source.register("c", Registration(version=1))


def test_marks_and_parts_of_files(tmp_path: Path, network: Network) -> None:
    """RFC 9110: ETag, If-None-Match, Range, If-Range, HEAD."""
    published(tmp_path, num_versions=1)
    place, path = "/weight_v000001/manifest.json", tmp_path / "weight_v000001" / MANIFEST
    whole, url = path.read_bytes(), network.serve(tmp_path)
    status, headers, body = ask(url, "GET", place)
    assert (status, body, headers["Content-Length"]) == (200, whole, str(len(whole)))
    assert headers["Content-Type"] == "application/octet-stream"
    tag = headers["ETag"]
    for wanted, given in [
        ((304, b""), {"If_None_Match": f'"x", {tag}'}),
        ((200, whole), {"If_None_Match": '"x"'}),
        ((206, whole[10:]), {"Range": "bytes=10-", "If_Range": tag}),
        ((200, whole), {"Range": "bytes=10-", "If_Range": '"x"'}),
        ((206, whole[5:]), {"Range": f"bytes=5-{10**9}"}),
        ((200, whole), {"Range": "bytes=-5"}),  # kinds that it does not know
        ((200, whole), {"Range": "bytes=0-1,4-5"}),
    ]:
        assert ask(url, "GET", place, **given)[0::2] == wanted, given
    status, headers, body = ask(url, "GET", place, Range="bytes=10-19")
    assert (status, body, headers["Content-Range"]) == (206, whole[10:20], f"bytes 10-19/{len(whole)}")
    status, headers, _ = ask(url, "GET", place, Range=f"bytes={len(whole)}-")
    assert (status, headers["Content-Range"]) == (416, f"bytes */{len(whole)}")
    status, headers, body = ask(url, "HEAD", place)
    assert (status, headers["Content-Length"], body) == (200, str(len(whole)), b"")
    path.write_bytes(whole + b" ")
    assert ask(url, "GET", place, If_None_Match=tag)[0] == 200


def test_versions_that_are_gone_and_files_that_are(tmp_path: Path, network: Network) -> None:
    weights = published(tmp_path)
    (patch,) = FolderSource(tmp_path).manifest(6).files_of("patch")
    source = HttpSource(network.serve(tmp_path))
    with pytest.raises(VanishedError, match=r"weight_v000009/manifest.json is not there any more"):
        source.manifest(9)
    shutil.rmtree(tmp_path / version_name(2))
    with pytest.raises(VanishedError):
        source.read(2, patch)
    (tmp_path / version_name(6) / patch.name).unlink()
    assert_refused(source, weights, 5, r"is damaged: weight_v000006 has no patch-00000.*whole values again")
    with pytest.raises(PublishError, match="give the address that `laconic publish serve`"):
        Reader(f"{network.serve(tmp_path)}/weights").update({})


# -- servers that are not ours -----------------------------------------------------------------------------------------


class Stub(BaseHTTPRequestHandler):
    """Gives one answer to all who ask."""

    protocol_version = "HTTP/1.1"
    server: Any

    def do_GET(self) -> None:
        self.send_response(self.server.status)
        for name, value in {"Content-Length": str(len(self.server.body)), **self.server.headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(self.server.body)

    def log_message(self, *_: object) -> None: ...


@pytest.mark.parametrize(
    ("status", "body", "headers", "message"),
    [
        (200, b"<html>hello</html>", {}, "does not list versions; give the address of `laconic publish serve`"),
        (200, b'{"versions": ["a"]}', {}, "does not list versions"),
        (404, b"no", {}, "there is no .*/versions; give the address of `laconic publish serve`"),
        (302, b"", {"Location": "http://127.0.0.1:1/"}, "302"),
        (200, b"x", {"Content-Length": str(1 << 40)}, f"has {1 << 40} bytes, and at most"),
        (206, b"{}", {"Content-Range": "bytes 5-6/9"}, "answers with another part"),
        (400, json.dumps({"error": "a\nb " * 100}).encode(), {}, "400 a b a b"),
        (400, json.dumps({"error": "\x1b[2J\x9bred"}).encode(), {}, r"400 \[2J red$"),
        (503, b'{"error": "busy"}', {}, r"does not answer: .*503 busy"),
    ],
)
def test_other_servers(status: int, body: bytes, headers: dict[str, str], message: str, network: Network) -> None:
    url = network.add(Server(Stub, status=status, body=body, headers=headers))
    source = HttpSource(url)
    for _ in range(2):
        begun = time.monotonic()
        with pytest.raises(OSError if status == 503 else PublishError, match=message) as error:
            source.versions()
        assert (time.monotonic() - begun > 0.09) == (status == 503), "a refusal is not tried again"
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 400
    if status == 200:
        with pytest.raises(PublishError, match=r"has \d+ bytes, and at most 0 are read"):
            HttpSource(url).read(1, FileRecord(name="file", size_bytes=0, sha256=None))


def test_heads_of_answers_come_within_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many lines come before: each of these takes a second."""

    def read1(_: int) -> bytes:
        time.sleep(1)
        return b"HTTP/1.1 100 Continue\r\n\r\n"

    connection = mock.Mock(makefile=lambda *_: mock.Mock(read1=read1), gettimeout=lambda: 60.0)
    monkeypatch.setattr(socket, "create_connection", lambda *_: connection)
    begun_s = time.monotonic()
    with pytest.raises(OSError, match="http://slow:1 does not answer: timed out"):
        HttpSource("http://slow:1").versions()
    assert time.monotonic() - begun_s < 4 * 62 + 5


def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A password in an address is not repeated; other machines need a token."""
    no_server, no_token = "give (http://HOST:PORT|token=)", "without a token"
    makes: list[tuple[Callable[[str], Any], str, Sequence[str]]] = [
        (HttpSource, no_server,
         ("http://", "ftp://host", "http://host:port", "http://me:secret@host", "http://host/?a=b", "host:80",
          "http://a b", "http://[::1", f"http://{'a' * 70}:1", "http://a..b",
          "http://host/\r\nX: y", "http://host:99999", "http://me:sec ret@host", "http://é/", "http://host/\x1b[2J")),
        (lambda host: WeightServer(tmp_path, host=host), no_token, ("0.0.0.0", "::", "192.0.2.1", "some-host")),
        (lambda token: WeightServer(tmp_path, token=token), "one word of ASCII", ("", "two words", "line\n", "é")),
    ]  # fmt: skip
    for make_it, message, values in makes:
        for value in values:
            with pytest.raises(PublishError, match=message) as error:
                make_it(value)
            assert "sec" not in str(error.value)
    for wrong, said in ((["--host", "0.0.0.0"], no_token), (["--token-file", str(tmp_path / "nowhere")], "nowhere")):
        assert publish_cli.main(["serve", str(tmp_path), *wrong]) == 2
        assert said in capsys.readouterr().err
    with pytest.raises(PublishError, match="can be the name of no machine"):
        WeightServer(tmp_path, host="a" * 70, token=TOKEN)
    for command in (["serve", str(tmp_path), "--port", "70000"], ["watch", str(tmp_path), "--every", "inf"]):
        with pytest.raises(SystemExit):
            publish_cli.main(command)


# -- by hand, and with real sockets ------------------------------------------------------------------------------------


@pytest.mark.machine
def test_a_server_with_sockets_and_its_end(tmp_path: Path) -> None:
    """A server that is closed answers nobody, nor those whose connections are open."""
    weights = published(tmp_path)
    server = WeightServer(tmp_path, host="0.0.0.0", token=TOKEN)
    server.start()
    read(HttpSource(server.url, token=TOKEN), weights, 1)
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=10)
    connection.request("GET", "/versions", headers={"Authorization": f"Bearer {TOKEN}"})
    assert connection.getresponse().read() == b'{"versions": [1, 2, 3, 4, 5, 6]}'
    kept = connection.sock
    server.close()
    assert kept.recv(10) == b""
    connection.close()


@pytest.mark.machine
def test_the_command_serves_until_it_is_interrupted(tmp_path: Path) -> None:
    weights = published(tmp_path / "versions")
    (tmp_path / "token").write_text(TOKEN + "\n")
    command = ["serve", str(tmp_path / "versions"), "--port", "0", "--token-file", str(tmp_path / "token")]
    started = subprocess.Popen(
        [sys.executable, "-m", "laconic.cli", "publish", *command], stdout=subprocess.PIPE, text=True
    )
    with started as process:
        assert process.stdout is not None
        url, *rest = process.stdout.readline().split()
        assert rest == ["serves", str(tmp_path / "versions")]
        read(HttpSource(url, token=TOKEN), weights, 4)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0


def test_the_command_at_a_distance(tmp_path: Path, capsys: pytest.CaptureFixture[str], network: Network) -> None:
    published(tmp_path / "versions")
    url = network.serve(tmp_path / "versions")
    assert publish_cli.main(["verify", url]) == 0
    assert capsys.readouterr().out.count(": intact\n") == 6


def test_a_refusal_keeps_nothing_of_its_connection(tmp_path: Path) -> None:
    """An error that is made once and raised again would keep the frames of all requests that it refused."""
    server = server_of(tmp_path)
    for target in ("/nowhere", "http://[", "/versions/more"):
        for _ in range(2):
            answer = server.answer(f"GET {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            assert b"there is no such place" in answer.left
    gc.collect()
    assert [each for each in gc.get_objects() if type(each) is serving._Handler] == []
