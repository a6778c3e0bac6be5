"""Chromium without a window, driven over a pipe by its DevTools protocol."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_LIMIT_S = 60.0
_TROUBLE = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded", "Network.loadingFailed")


class BrowserError(RuntimeError):
    """There is no browser here, or it does not answer."""


class Chromium:
    """A browser with one page. The network is blocked: every name of a host is unknown to it."""

    def __init__(self, reader: int, writer: int, log: Path) -> None:
        self._reader, self._writer, self._log = reader, writer, log
        self._arrived, self._number, self._session = b"", 0, ""
        self.events: list[dict[str, Any]] = []
        """All that the page has reported so far."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def open(self, page: Path, *, width: int, dark: bool = False) -> None:
        """Load a file as on a screen `width` pixels wide, in light or dark mode; forget earlier events."""
        self.events.clear()
        screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **screen)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=page.resolve().as_uri())
        self._until(lambda event: event.get("method") == "Page.loadEventFired", "the page to load")

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in answer:
            raise BrowserError(f"{expression} failed in the page: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def trouble(self) -> list[str]:
        """All errors and messages of the page's console since it was opened, and all requests but that for the page."""
        self.call("Runtime.evaluate", expression="1")  # events before this answer have arrived
        found = [json.dumps(event["params"]) for event in self.events if event["method"] in _TROUBLE]
        requests = [
            event["params"]["request"]["url"] for event in self.events if event["method"] == "Network.requestWillBeSent"
        ]
        return [*found, *(f"asks for {url[:80]}" for url in requests[1:] if not url.startswith("data:"))]

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the DevTools protocol, and return its result."""
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._writer, json.dumps(message).encode() + b"\0")
        answer = self._until(lambda event: event.get("id") == number, method)
        self.events.remove(answer)
        if "error" in answer:
            raise BrowserError(f"{method}: {answer['error']}")
        result: dict[str, Any] = answer["result"]
        return result

    def _until(self, is_awaited: Callable[[dict[str, Any]], bool], awaited: str) -> dict[str, Any]:
        """Take in events until one is the awaited one; return it."""
        end_s = time.monotonic() + _LIMIT_S
        while (found := next(filter(is_awaited, self.events), None)) is None:
            if not select.select([self._reader], [], [], max(0.0, end_s - time.monotonic()))[0]:
                raise BrowserError(f"the browser has not answered within {_LIMIT_S:.0f} s: {awaited}\n{self._output()}")
            received = os.read(self._reader, 1 << 16)
            if not received:
                raise BrowserError(f"the browser ended while {awaited} was awaited:\n{self._output()}")
            *complete, self._arrived = (self._arrived + received).split(b"\0")
            self.events += map(json.loads, complete)
        return found

    def _output(self) -> str:
        return self._log.read_text(errors="replace")[-3000:]


@contextmanager
def chromium() -> Iterator[Chromium]:
    """Start a browser, and end it after the block.

    Raises:
        BrowserError: there is none here.
    """
    path = next(filter(None, map(shutil.which, _NAMES)), None)
    if path is None:
        raise BrowserError(f"no browser here; looked for {', '.join(_NAMES)}. On Debian: apt-get install chromium")
    with tempfile.TemporaryDirectory(prefix="laconic-browser-", ignore_cleanup_errors=True) as folder:
        log = Path(folder) / "output.txt"
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        options = [
            "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--host-resolver-rules=MAP * ~NOTFOUND",
            f"--user-data-dir={folder}/profile", "--remote-debugging-pipe",
        ]  # fmt: skip
        # The browser reads from its file descriptor 3 and writes to 4.
        script = f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}'
        with log.open("wb") as output:
            process = subprocess.Popen(
                ["bash", "-c", script, path, *options], pass_fds=(theirs_in, theirs_out), stdout=output, stderr=output
            )
        os.close(theirs_in)
        os.close(theirs_out)
        try:
            yield Chromium(ours_in, ours_out, log)
        finally:
            process.kill()
            process.wait()
            os.close(ours_in)
            os.close(ours_out)
