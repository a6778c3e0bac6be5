"""Versions over HTTP: the bytes of the folder arrive whatever the network does, and nothing else leaves the machine."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from laconic.publish import FolderSource, HttpSource, PublishError, Reader, WeightServer, http_source, serving
from laconic.publish import cli as publish_cli
from laconic.publish.http_source import TOKEN_VARIABLE
from laconic.publish.source import Registration, VanishedError
from laconic.publish.versions import MANIFEST, version_name
from laconic.store.folder import FileRecord
from tests.faults.published_damage import Proxy, flipped_answers, served
from tests.support.published import assert_same, model_with, published, snapshot

TOKEN = "a-secret-of-the-tests"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attempts follow each other at once, and this machine has no token of its own."""
    monkeypatch.setattr(http_source, "_PAUSES_S", (0.0, 0.01, 0.02))
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)


@pytest.mark.machine
@pytest.mark.parametrize("token", [None, TOKEN])
@pytest.mark.parametrize("encoding", ["gaps", "smallest"])
def test_from_every_version_to_the_newest(encoding: str, token: str | None, tmp_path: Path) -> None:
    """As from the folder: the same values by the same bytes."""
    weights = published(tmp_path, base_every=4, encoding=encoding)
    with served(tmp_path, token=token) as server:
        for start in range(7):
            model, near = model_with(weights[start]), Reader(tmp_path)
            reader = Reader(HttpSource(server.url, token=token))
            near.update(model_with(weights[start]))
            assert reader.update(model) == 6
            assert reader.bytes_read == near.bytes_read
            assert_same(snapshot(model), weights[6])


@pytest.mark.machine
def test_an_address_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = published(tmp_path)
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    with served(tmp_path, token=TOKEN) as server:
        reader, model = Reader(server.url + "/", name="far"), model_with(weights[3])
        assert reader.wait(0)
        assert reader.update(model) == 6
        assert not reader.wait(0.01, poll_s=0.001)
        assert FolderSource(tmp_path).registrations() == {"far": Registration(version=6)}


@pytest.mark.machine
def test_a_folder_that_is_not_there_yet_has_no_version(tmp_path: Path) -> None:
    with served(tmp_path / "later") as server:
        reader = Reader(server.url, name="early")
        assert not reader.wait(0)
        with pytest.raises(PublishError, match="has no version yet"):
            reader.update({})
        with pytest.raises(PublishError, match="start the publisher"):
            reader.source.register("early", Registration(version=None))
        assert not (tmp_path / "later").exists()
        published(tmp_path / "later", num_versions=1)
        assert reader.wait(0)


# -- a network that fails ----------------------------------------------------------------------------------------------


@pytest.mark.machine
def test_a_transfer_that_breaks_off_goes_on_where_it_ended(tmp_path: Path) -> None:
    """Every connection ends after some pieces."""
    weights = published(tmp_path)
    chance, passed, left = random.Random(0), [0], [6]

    def cut(data: bytes) -> bytes | None:
        left[0] -= 1
        if not left[0]:
            left[0] = chance.randint(4, 12)  # more than a head, so that there is progress
            return None
        passed[0] += len(data)
        return data

    with served(tmp_path) as server, Proxy(server.url, cut) as proxy:
        for start in (0, 3, 5) * 3:
            passed[0] = 0
            reader, model = Reader(proxy.url), model_with(weights[start])
            reader.update(model)
            assert_same(snapshot(model), weights[6])
    source = FolderSource(tmp_path)
    manifests = sum((tmp_path / version_name(each) / MANIFEST).stat().st_size for each in source.versions())
    assert passed[0] < 3 * (reader.bytes_read + manifests), "nothing begins anew again and again"


@pytest.mark.machine
def test_only_the_rest_is_asked_for(tmp_path: Path) -> None:
    published(tmp_path)
    (file,) = FolderSource(tmp_path).manifest(1).files_of("whole")
    wanted, left, passed = (tmp_path / version_name(1) / file.name).read_bytes(), [file.size_bytes // 2], [0]

    def cut_once(data: bytes) -> bytes | None:
        before, left[0] = left[0], left[0] - len(data)
        if before > 0 >= left[0]:
            return None
        passed[0] += len(data)
        return data

    with served(tmp_path) as server, Proxy(server.url, cut_once) as proxy:
        assert HttpSource(proxy.url).read(1, file) == wanted
    assert passed[0] < file.size_bytes + 2048


@pytest.mark.machine
def test_a_file_that_is_another_one_meanwhile_comes_from_its_beginning(tmp_path: Path) -> None:
    published(tmp_path)
    (file,) = FolderSource(tmp_path).manifest(1).files_of("whole")
    path, seen = tmp_path / version_name(1) / file.name, [0]

    def cut_and_replace(data: bytes) -> bytes | None:
        seen[0] += 1
        if seen[0] == 4:
            path.with_name("other").write_bytes(bytes(file.size_bytes))
            path.with_name("other").replace(path)
            return None
        return data

    with served(tmp_path) as server, Proxy(server.url, cut_and_replace) as proxy:
        assert HttpSource(proxy.url).read(1, file) == bytes(file.size_bytes)


@pytest.mark.machine
def test_a_server_that_is_gone(tmp_path: Path) -> None:
    weights = published(tmp_path)
    with served(tmp_path) as server:
        url = server.url
    model = model_with(weights[2])
    with pytest.raises(OSError, match=rf"{url} does not answer: .*refused") as error:
        Reader(url).update(model)
    assert "\n" not in str(error.value)
    assert_same(snapshot(model), weights[2])


@pytest.mark.machine
def test_flipped_bits_are_noticed_or_do_no_harm(tmp_path: Path) -> None:
    assert flipped_answers(tmp_path, 40) > 5


@pytest.mark.campaign
@pytest.mark.timeout(300)  # some wait for bytes that do not come
def test_many_flipped_bits(tmp_path: Path) -> None:
    assert flipped_answers(tmp_path, 300) > 20


# -- requests that the server refuses ----------------------------------------------------------------------------------


def ask(
    server: WeightServer, method: str, place: str, body: bytes | None = None, **headers: str
) -> tuple[int, Any, bytes]:
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=10)
    connection.putrequest(method, place, skip_accept_encoding=True)
    for name, value in {**headers, **({} if body is None else {"Content-Length": str(len(body))})}.items():
        connection.putheader(name.replace("_", "-"), value)
    connection.endheaders(body)
    response = connection.getresponse()
    try:
        return response.status, response.headers, response.read()
    finally:
        connection.close()


ESCAPES = (
    "/publisher.json", "/readers/far.json", "/", "/weight_v000001", "/weight_v000001/",
    "/weight_v000001/../publisher.json",
    "/weight_v000001/..%2fpublisher.json", "/../secret", "//secret", "/weight_v000001/.hidden", "/weight_v000001/link",
    "/weight_v000001/folder", "/weight_v000001.tmp/manifest.json", "/weight_v1/manifest.json",
    "/weight_v000001/manifest.json/x",
    "http://elsewhere/secret", "*", "/weight_v000001/manifest.json%00",
)  # fmt: skip


@pytest.mark.machine
def test_nothing_but_versions_leaves_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "versions"
    published(folder)
    (tmp_path / "secret").write_text("secret")
    (folder / "weight_v000001" / "link").symlink_to(tmp_path / "secret")
    (folder / "weight_v000001" / "folder").mkdir()
    (folder / "weight_v000001" / ".hidden").write_text("secret")
    shutil.copytree(folder / "weight_v000001", folder / "weight_v000001.tmp", symlinks=True)
    with served(folder) as server:
        for place in ESCAPES:
            status, _, body = ask(server, "GET", place)
            assert status >= 400, place
            assert b"secret" not in body, place
            assert list(json.loads(body)) == ["error"], place
        for method in ("POST", "DELETE", "PATCH"):
            assert ask(server, method, "/weight_v000001/manifest.json")[0] == 501
        assert ask(server, "PUT", "/weight_v000001/manifest.json", b"{}")[0] == 400


BODIES: dict[str, tuple[str, dict[str, str]]] = {
    "of a GET": ("GET", {"Content-Length": "4"}),
    "in chunks": ("GET", {"Transfer-Encoding": "chunked"}),
    "in chunks, with a length": ("PUT", {"Transfer-Encoding": "chunked", "Content-Length": "30"}),
    "of a length that is no number": ("PUT", {"Content-Length": "9" * 5000}),
}


@pytest.mark.machine
@pytest.mark.parametrize("name", BODIES)
def test_bodies_that_a_proxy_could_take_for_requests(name: str, tmp_path: Path) -> None:
    """The server refuses, and the connection ends, so nothing after the head is taken for another request."""
    method, headers = BODIES[name]
    head = "".join(f"{key}: {value}\r\n" for key, value in headers.items())
    with served(tmp_path, token=TOKEN) as server:
        address = server.url.removeprefix("http://").split(":")
        with socket.create_connection((address[0], int(address[1])), timeout=10) as connection:
            connection.sendall(f"{method} /readers/far HTTP/1.1\r\nHost: x\r\n{head}\r\n".encode())
            connection.sendall(b"GET /versions HTTP/1.1\r\nHost: x\r\n\r\n")
            answer = b""
            with contextlib.suppress(ConnectionResetError):
                while more := connection.recv(4096):
                    answer += more
    assert answer.count(b"HTTP/1.1") <= 1
    assert answer.startswith(b"HTTP/1.1 400") or not answer


@pytest.mark.machine
def test_a_server_that_is_closed_answers_nobody(tmp_path: Path) -> None:
    """Nor those whose connections are open."""
    server = WeightServer(tmp_path)
    server.start()
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=10)
    connection.request("GET", "/versions")
    assert connection.getresponse().read() == b'{"versions": []}'
    kept = connection.sock
    server.close()
    assert kept.recv(10) == b""
    connection.close()


@pytest.mark.machine
def test_a_folder_that_cannot_be_listed_is_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with served(tmp_path / "file") as server, pytest.raises(OSError, match=r"500 .*is no folder of versions"):
        HttpSource(server.url).versions()


@pytest.mark.machine
def test_an_address_with_a_path_too_much(tmp_path: Path) -> None:
    published(tmp_path, num_versions=1)
    with served(tmp_path) as server, pytest.raises(PublishError, match="give the address that `laconic publish serve`"):
        Reader(f"{server.url}/weights").update({})


def test_a_reader_that_cannot_tell_its_version_has_not_moved_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that takes patches asks for them again."""
    published(tmp_path)
    reader = Reader(tmp_path, name="engine")
    register = reader.source.register

    def fail_at_the_end(name: str, registration: Registration) -> None:
        if registration.version == 6:
            raise OSError("disk full")
        register(name, registration)

    monkeypatch.setattr(reader.source, "register", fail_at_the_end)
    with pytest.raises(OSError, match="disk full"):
        list(reader.patches())
    assert reader.version is None
    monkeypatch.undo()
    assert len(list(reader.patches())) == len(FolderSource(tmp_path).manifest(6).tensors)
    assert reader.version == 6


@pytest.mark.machine
def test_requests_without_the_token_learn_nothing(tmp_path: Path) -> None:
    weights = published(tmp_path)
    with served(tmp_path, token=TOKEN) as server:
        for place in ("/versions", "/weight_v000001/manifest.json", "/nowhere"):
            for given in (
                {},
                {"Authorization": TOKEN},
                {"Authorization": f"Bearer {TOKEN}x"},
                {"Authorization": "Bearer é"},
            ):
                status, headers, body = ask(
                    server, "GET", place, **{k: v.encode().decode("latin-1") for k, v in given.items()}
                )
                assert (status, headers["WWW-Authenticate"]) == (401, "Bearer")
                assert body == b'{"error": "the token is wrong"}'
        assert ask(server, "PUT", "/readers/far", b'{"version": 1, "reading": []}')[0] == 401
        model = model_with(weights[1])
        for source in (HttpSource(server.url), HttpSource(server.url, token="another")):
            with pytest.raises(PublishError, match=f"refuses the token; give token=, or set {TOKEN_VARIABLE}"):
                Reader(source).update(model)
        assert_same(snapshot(model), weights[1])
    assert not (tmp_path / "readers").exists()


@pytest.mark.machine
def test_other_machines_need_a_token(tmp_path: Path) -> None:
    for host in ("0.0.0.0", "::", "192.0.2.1", "some-host"):
        with pytest.raises(PublishError, match=r"without a token; give token="):
            WeightServer(tmp_path, host=host)
    for token in ("", "two words", "line\n", "é"):
        with pytest.raises(PublishError, match="one word of ASCII"):
            WeightServer(tmp_path, token=token)
    with served(tmp_path, host="0.0.0.0", token=TOKEN) as server:
        assert HttpSource(server.url, token=TOKEN).versions() == []


REGISTRATIONS: dict[str, tuple[str, bytes | None, int]] = {
    "right": ("far", b'{"version": 3, "reading": [4]}', 204),
    "no JSON": ("far", b"{", 400),
    "other fields": ("far", b'{"version": 3}{', 400),
    "a path": ("..%2ffar", b'{"version": 3, "reading": []}', 400),
    "a long name": ("f" * 65, b'{"version": 3, "reading": []}', 400),
    "too long": ("far", b" " * (1 << 17), 413),
    "no length": ("far", None, 413),
}


@pytest.mark.machine
@pytest.mark.parametrize("name", REGISTRATIONS)
def test_registrations(name: str, tmp_path: Path) -> None:
    reader, body, wanted = REGISTRATIONS[name]
    with served(tmp_path) as server:
        assert ask(server, "PUT", f"/readers/{reader}", body)[0] == wanted
        assert FolderSource(tmp_path).registrations() == (
            {"far": Registration(version=3, reading=(4,))} if wanted == 204 else {}
        )
        assert HttpSource(server.url).versions() == []


@pytest.mark.machine
def test_readers_do_not_fill_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "_MOST_READERS", 2)
    with served(tmp_path) as server:
        source = HttpSource(server.url)
        for name in ("a", "b", "a"):
            source.register(name, Registration(version=1))
        with pytest.raises(PublishError, match="there are 2 readers already"):
            source.register("c", Registration(version=1))


@pytest.mark.machine
def test_marks_and_parts_of_files(tmp_path: Path) -> None:
    """RFC 9110: ETag, If-None-Match, Range, If-Range, HEAD."""
    published(tmp_path)
    place, path = "/weight_v000001/manifest.json", tmp_path / "weight_v000001" / MANIFEST
    whole = path.read_bytes()
    with served(tmp_path) as server:
        status, headers, body = ask(server, "GET", place)
        assert (status, body, headers["Content-Length"]) == (200, whole, str(len(whole)))
        tag = headers["ETag"]
        assert ask(server, "GET", place, If_None_Match=f'"x", {tag}')[0::2] == (304, b"")
        assert ask(server, "GET", place, If_None_Match='"x"')[0] == 200
        status, headers, body = ask(server, "GET", place, Range="bytes=10-19")
        assert (status, body, headers["Content-Range"]) == (206, whole[10:20], f"bytes 10-19/{len(whole)}")
        assert ask(server, "GET", place, Range="bytes=10-", If_Range=tag)[0::2] == (206, whole[10:])
        assert ask(server, "GET", place, Range="bytes=10-", If_Range='"x"')[0::2] == (200, whole)
        assert ask(server, "GET", place, Range=f"bytes=5-{10**9}")[0::2] == (206, whole[5:])
        assert ask(server, "GET", place, Range="bytes=-5")[0::2] == (200, whole), "kinds that it does not know"
        assert ask(server, "GET", place, Range="bytes=0-1,4-5")[0::2] == (200, whole)
        status, headers, _ = ask(server, "GET", place, Range=f"bytes={len(whole)}-")
        assert (status, headers["Content-Range"]) == (416, f"bytes */{len(whole)}")
        status, headers, body = ask(server, "HEAD", place)
        assert (status, headers["Content-Length"], body) == (200, str(len(whole)), b"")
        path.write_bytes(whole + b" ")
        assert ask(server, "GET", place, If_None_Match=tag)[0] == 200


@pytest.mark.machine
def test_versions_that_are_gone_and_files_that_are(tmp_path: Path) -> None:
    weights = published(tmp_path)
    (patch,) = FolderSource(tmp_path).manifest(6).files_of("patch")
    with served(tmp_path) as server:
        source = HttpSource(server.url)
        with pytest.raises(VanishedError, match=r"weight_v000009/manifest.json is not there any more"):
            source.manifest(9)
        shutil.rmtree(tmp_path / version_name(2))
        with pytest.raises(VanishedError):
            source.read(2, patch)
        (tmp_path / version_name(6) / patch.name).unlink()
        model = model_with(weights[5])
        with pytest.raises(PublishError, match=r"is damaged: weight_v000006 has no patch-00000.*whole values again"):
            Reader(source).update(model)
        assert_same(snapshot(model), weights[5])


# -- servers that are not ours -----------------------------------------------------------------------------------------


@contextmanager
def stub(status: int, body: bytes, **headers: str) -> Iterator[str]:
    """A server that gives one answer to everything."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


OTHERS: dict[str, tuple[int, bytes, dict[str, str], str]] = {
    "a page": (200, b"<html>hello</html>", {}, "does not list versions; give the address of `laconic publish serve`"),
    "other JSON": (200, b'{"versions": ["a"]}', {}, "does not list versions"),
    "not found": (404, b"no", {}, "there is no .*/versions; give the address of `laconic publish serve`"),
    "elsewhere": (302, b"", {"Location": "http://127.0.0.1:1/"}, "302"),
    "endless": (200, b"x", {"Content-Length": str(1 << 40)}, f"has {1 << 40} bytes, and at most"),
    "another part": (206, b"{}", {"Content-Range": "bytes 5-6/9"}, "answers with another part"),
    "a long message": (400, json.dumps({"error": "a\nb " * 100}).encode(), {}, "400 a b a b"),
}


@pytest.mark.machine
@pytest.mark.parametrize("name", OTHERS)
def test_other_servers(name: str) -> None:
    status, body, headers, message = OTHERS[name]
    with stub(status, body, **headers) as url, pytest.raises(PublishError, match=message) as error:
        HttpSource(url).versions()
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400


@pytest.mark.machine
def test_a_server_with_troubles(tmp_path: Path) -> None:
    with stub(503, b'{"error": "busy"}') as url, pytest.raises(OSError, match=r"does not answer: .*503 busy"):
        HttpSource(url).versions()


@pytest.mark.machine
def test_a_file_that_is_longer_than_its_record(tmp_path: Path) -> None:
    with stub(200, b"12345") as url, pytest.raises(PublishError, match="has 5 bytes, and at most 4 are read"):
        HttpSource(url).read(1, FileRecord(name="file", size_bytes=4, sha256=None))


@pytest.mark.parametrize(
    "url", ["http://", "ftp://host", "http://host:port", "http://me:secret@host", "http://host/?a=b", "host:80"]
)
def test_addresses_that_make_no_sense(url: str) -> None:
    with pytest.raises(PublishError, match=r"give (http://HOST:PORT|token=)") as error:
        HttpSource(url)
    assert "secret" not in str(error.value)


# -- by hand -----------------------------------------------------------------------------------------------------------


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
        model = model_with(weights[4])
        Reader(HttpSource(url, token=TOKEN)).update(model)
        assert_same(snapshot(model), weights[6])
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0


@pytest.mark.machine
def test_the_command_verifies_and_squashes_at_a_distance(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = published(tmp_path / "versions")
    with served(tmp_path / "versions") as server:
        assert publish_cli.main(["verify", server.url]) == 0
        assert capsys.readouterr().out.count(": intact\n") == 6
        assert publish_cli.main(["squash", server.url, str(tmp_path / "out")]) == 0
    model = model_with(weights[0])
    assert Reader(tmp_path / "out").update(model) == 6
    assert_same(snapshot(model), weights[6])


@pytest.mark.machine
def test_mistakes_at_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert publish_cli.main(["serve", str(tmp_path), "--host", "0.0.0.0"]) == 2
    assert "without a token" in capsys.readouterr().err
    assert publish_cli.main(["serve", str(tmp_path), "--token-file", str(tmp_path / "nowhere")]) == 2
    assert publish_cli.main(["serve", str(tmp_path), "--port", "0", "--tell", "nowhere"]) == 2
    assert "is no address to tell of versions" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        publish_cli.main(["serve", str(tmp_path), "--port", "70000"])
