"""`WeightServer`: a folder of versions over HTTP, for readers on machines that do not share it.

[Note: Versions over HTTP]
    GET  /versions                       {"versions": [6, 7]}, ascending
    GET  /weight_v000007/manifest.json   the manifest
    GET  /weight_v000007/NAME            a file of the version
    PUT  /readers/NAME                   what a reader has and needs: [Note: Registered readers] in source.py

Files have an ETag, and may be asked for in part (RFC 9110, sections 8.8.3 and 14). 410 says that a version is not there
any more, 404 that it lacks the file. A refusal of GET, HEAD or PUT is a JSON object with one line, {"error": "..."}.

The server reads nothing but versions and writes nothing but registrations. With a token each request needs
`Authorization: Bearer TOKEN`. Without one the server binds to this machine alone, and answers requests for this machine
alone: a page in a browser here may find other names for it, but not change the name that it asks for. The server does
not encrypt: put a proxy with TLS before it where others can listen, and give `HttpSource` the https address.
"""

from __future__ import annotations

import contextlib
import hmac
import io
import ipaddress
import json
import os
import re
import socket
import socketserver
import stat
import sys
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from laconic.comm.entries import EntryError
from laconic.publish.http_heads import HeadError, TimedReads, is_host, read_head
from laconic.publish.source import (
    MOST_REGISTRATION_BYTES,
    READERS,
    FolderSource,
    Registration,
    check_reader_name,
)
from laconic.publish.versions import FILE_NAME, VERSION_NAME, PublishError

_MOST_READERS = 4096
_PATIENCE_S = 60.0
"""How long a connection may say nothing, and how long a request may take to come."""
_CHUNK_BYTES = 1 << 20
_RANGE = re.compile(r"bytes=([0-9]{1,18})-([0-9]{0,18})")
_Headers = dict[str, str]


class WeightServer:
    """Serves the versions of a folder over HTTP: [Note: Versions over HTTP].

        with WeightServer("/shared/weights", host="0.0.0.0", port=8377, token=token) as server:
            server.serve_forever()

    Args:
        folder: the folder that the publisher writes. It may come into being later.
        host: the address to serve at; 0.0.0.0 for all of this machine, and then readers give its name.
        port: a port; 0 takes a free one, and `url` has it.
        token: a secret that readers give; None only on this machine.

    Raises:
        PublishError: there is no token, and `host` is not this machine alone; or the token is no word of ASCII, or
            `host` no name.
        OSError: the port is not free, or the address is not this machine's.
    """

    def __init__(self, folder: str | Path, *, host: str = "127.0.0.1", port: int = 0, token: str | None = None) -> None:
        if token is None and not _is_loopback(host):
            raise PublishError(
                f"host={host!r} lets other machines read the weights without a token; give token=, or host='127.0.0.1'"
            )
        check_token(token)
        if not is_host(host):
            raise PublishError(f"host={host!r} can be the name of no machine")
        self._server = _Server(FolderSource(folder), host, port, token)
        self._has_served = False
        number = self._server.server_address[1]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{number}"
        """The address for readers, as this machine knows it."""

    def start(self) -> None:
        """Serve in a thread until `close`."""
        self._has_served = True
        threading.Thread(target=self.serve_forever, name="laconic-publish-http", daemon=True).start()

    def serve_forever(self) -> None:
        """Serve until `close` is called in another thread, or KeyboardInterrupt."""
        self._has_served = True
        self._server.serve_forever(poll_interval=0.1)

    def close(self) -> None:
        """End the server. Transfers that have begun break off."""
        if self._has_served:
            self._server.shutdown()
        self._server.server_close()

    def __enter__(self) -> WeightServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_token(token: str | None) -> None:
    """Raise PublishError unless a token can stand in a header."""
    if token is not None and not (token.isascii() and token.isprintable() and token and " " not in token):
        raise PublishError("a token is one word of ASCII, without spaces and line ends, and not empty")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _without_port(host: str) -> str:
    """The name or address in a header Host."""
    return host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, source: FolderSource, host: str, port: int, token: str | None) -> None:
        self.source, self.token, self.is_local = source, token, _is_loopback(host)
        self._open: set[Any] = set()
        """The sockets of connections."""
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        """Bind without asking a name server for this machine's name."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a connection in a thread."""
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """End a connection."""
        self._open.discard(request)
        super().shutdown_request(request)

    def server_close(self) -> None:
        """End the server and all connections."""
        super().server_close()
        for each in list(self._open):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A reader that has gone is no error; anything else is said in one line."""
        error = sys.exception()
        if not isinstance(error, ConnectionError | TimeoutError):
            print(f"laconic publish: {client_address[0]}: {error!r}", file=sys.stderr)


class _RefusedError(Exception):
    """A request that is not answered as it asks."""

    def __init__(self, status: HTTPStatus, message: str, headers: _Headers | None = None) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers or {}


_NO_PLACE = _RefusedError(
    HTTPStatus.BAD_REQUEST, "there is no such place; give the address that `laconic publish serve` has"
)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "laconic", ""
    timeout = _PATIENCE_S
    disable_nagle_algorithm = True  # or a body waits until its head is acknowledged, which takes 40 ms
    server: _Server
    raw_requestline: bytes
    _has_read_body = False

    def setup(self) -> None:
        """Let each request come within a time."""
        super().setup()
        self._reads = TimedReads(self.rfile, self.connection.settimeout, self.timeout)
        self.rfile = io.BufferedReader(self._reads)

    def handle_one_request(self) -> None:
        """Answer one request."""
        self._reads.begin(waits=True)
        super().handle_one_request()

    def parse_request(self) -> bool:
        """Parse a request, or refuse it: [Note: One reading of a head]."""
        refused, file = None, self.rfile
        try:
            head = read_head(self.raw_requestline, file)
        except HeadError as error:
            refused, head, self.raw_requestline = error, b"\r\n", b"GET / HTTP/1.1\r\n"
        try:
            self.rfile = io.BytesIO(head)
            is_parsed = super().parse_request()
        finally:
            self.rfile = file
        if refused is not None:
            self._send_json({"error": str(refused)}, HTTPStatus.BAD_REQUEST, {"Connection": "close"})
            return False
        return is_parsed

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_HEAD(self) -> None:
        self._answer(self._get)

    def do_PUT(self) -> None:
        self._answer(self._put)

    def log_request(self, code: Any = "-", size: Any = "-") -> None:
        """Nothing: a reader asks twice a second."""

    def log_error(self, format: str, *args: Any) -> None:  # noqa: A002  http.server's name
        """Nothing: the reader is told."""

    def _answer(self, action: Callable[[list[str]], None]) -> None:
        self._has_read_body = False
        try:
            self._check_body()
            self._check_token()
            self._check_host()
            action(self._place())
        except _RefusedError as refused:
            self._drain()
            self._send_json({"error": str(refused)}, refused.status, {"Connection": "close", **refused.headers})

    def _check_body(self) -> None:
        """Refuse a body that is not read: a proxy could take it for another reader's request."""
        length = self.headers.get("Content-Length", "0")
        if "Transfer-Encoding" in self.headers or len(length) > 18 or (self.command != "PUT" and length != "0"):
            self._has_read_body = True  # the connection ends instead
            raise _RefusedError(HTTPStatus.BAD_REQUEST, "a body is for PUT, with its length; leave it out")

    def _drain(self) -> None:
        """Read the rest of a request's body: a connection that ends with unread bytes takes the answer with it."""
        self.close_connection = True
        length = self.headers.get("Content-Length", "")
        if not self._has_read_body and length.isdecimal() and int(length) <= _CHUNK_BYTES:
            self.rfile.read(int(length))

    def _check_token(self) -> None:
        given = self.headers.get("Authorization", "")
        wanted = f"Bearer {self.server.token}"
        if self.server.token is not None and not hmac.compare_digest(
            given.encode("latin-1", "replace"), wanted.encode()
        ):
            raise _RefusedError(HTTPStatus.UNAUTHORIZED, "the token is wrong", {"WWW-Authenticate": "Bearer"})

    def _check_host(self) -> None:
        """Without a token, answer what asks for this machine alone: another name leads a browser here."""
        host = self.headers.get("Host", "localhost")
        if self.server.token is None and self.server.is_local and not _is_loopback(_without_port(host)):
            raise _RefusedError(
                HTTPStatus.MISDIRECTED_REQUEST, "without a token, ask for localhost; or give the server a token"
            )

    def _place(self) -> list[str]:
        try:
            return urlsplit(self.path).path.strip("/").split("/")
        except ValueError:
            raise _NO_PLACE from None

    def _get(self, path: list[str]) -> None:
        match path:
            case ["versions"]:
                self._send_json({"versions": self._versions()})
            case [version, name] if VERSION_NAME.fullmatch(version) and FILE_NAME.fullmatch(name):
                self._send_file(self.server.source.folder / version, name)
            case _:
                raise _NO_PLACE

    def _versions(self) -> list[int]:
        try:
            return self.server.source.versions()
        except PublishError as error:
            if self.server.source.folder.exists():
                raise _RefusedError(HTTPStatus.INTERNAL_SERVER_ERROR, str(error)) from error
            return []  # the publisher has not begun

    def _put(self, path: list[str]) -> None:
        match path:
            case ["readers", name]:
                self._register(name)
            case _:
                raise _NO_PLACE

    def _register(self, name: str) -> None:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > MOST_REGISTRATION_BYTES:
            raise _RefusedError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"at most {MOST_REGISTRATION_BYTES} bytes")
        source = self.server.source
        try:
            check_reader_name(name)
            self._has_read_body, body = True, self.rfile.read(int(length))
            registration = Registration.parse(body)
            known = source.folder / READERS
            if known.is_symlink():
                raise PublishError(f"{known} is a link; the server writes into its own folder alone")
            if not (known / f"{name}.json").exists() and known.is_dir() and len(os.listdir(known)) >= _MOST_READERS:
                raise PublishError(f"there are {_MOST_READERS} readers already; remove {known}")
            if not source.folder.is_dir():
                raise PublishError(f"{source.folder} is not there; start the publisher")
            source.register(name, registration)
        except (EntryError, PublishError) as error:
            raise _RefusedError(HTTPStatus.BAD_REQUEST, str(error)) from error
        except OSError as error:
            raise _RefusedError(HTTPStatus.INTERNAL_SERVER_ERROR, f"it cannot be written: {error}") from error
        self.send_response(HTTPStatus.NO_CONTENT)
        self.end_headers()

    # -- files ---------------------------------------------------------------------------------------------------------

    def _send_file(self, folder: Path, name: str) -> None:
        try:
            opened = _open_plain(folder, name)
        except FileNotFoundError as error:
            if not folder.is_dir():
                raise _RefusedError(HTTPStatus.GONE, f"{folder.name} is not there any more") from error
            raise _RefusedError(HTTPStatus.NOT_FOUND, f"{folder.name} has no {name}") from error
        except OSError as error:
            raise _RefusedError(HTTPStatus.INTERNAL_SERVER_ERROR, f"{name} cannot be read: {error.strerror}") from error
        with opened:
            facts = os.fstat(opened.fileno())
            tag = f'"{facts.st_size:x}-{facts.st_mtime_ns:x}-{facts.st_ino:x}"'
            if tag in map(str.strip, self.headers.get("If-None-Match", "").split(",")):
                self.send_response(HTTPStatus.NOT_MODIFIED)
                self.send_header("ETag", tag)
                self.end_headers()
                return
            begin, end = self._asked_for(facts.st_size, tag)
            is_part = (begin, end) != (0, facts.st_size)
            self.send_response(HTTPStatus.PARTIAL_CONTENT if is_part else HTTPStatus.OK)
            if is_part:
                self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{facts.st_size}")
            self.send_header("ETag", tag)
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("Content-Type", "application/octet-stream")
            self.send_header("Content-Length", str(end - begin))
            self.end_headers()
            if self.command == "GET":
                self._send_bytes(opened, begin, end)

    def _asked_for(self, size: int, tag: str) -> tuple[int, int]:
        """The begin and the end of the bytes that are asked for: all, unless one range is asked for, of this file."""
        found = self.command == "GET" and _RANGE.fullmatch(self.headers.get("Range", ""))
        if not found or self.headers.get("If-Range", tag) != tag:
            return 0, size
        begin, end = int(found[1]), min(int(found[2]) + 1 if found[2] else size, size)
        if begin >= end:
            headers = {"Content-Range": f"bytes */{size}"}
            raise _RefusedError(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, f"the file has {size} bytes", headers)
        return begin, end

    def _send_bytes(self, opened: IO[bytes], begin: int, end: int) -> None:
        opened.seek(begin)
        while begin < end:
            chunk = opened.read(min(_CHUNK_BYTES, end - begin))
            if not chunk:  # somebody cuts the file; the reader finds out by the length
                self.close_connection = True
                return
            self.wfile.write(chunk)
            begin += len(chunk)

    def _send_json(self, value: Any, status: HTTPStatus = HTTPStatus.OK, headers: _Headers | None = None) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        for name, text in {
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            **(headers or {}),
        }.items():
            self.send_header(name, text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _open_plain(folder: Path, name: str) -> IO[bytes]:
    """Open a file of a folder; neither is a link to another. Raises: OSError."""
    inside = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY)
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=inside)
    finally:
        os.close(inside)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FileNotFoundError(folder / name)
    return os.fdopen(descriptor, "rb")
