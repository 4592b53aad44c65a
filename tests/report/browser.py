"""Chromium for tests, controlled over its DevTools pipe with the standard library and started once."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

TIMEOUT = 60.0  # seconds
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def find_chromium() -> str | None:
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """Page of a headless Chromium without a network: `with Browser() as browser: browser.open(path)`."""

    def __enter__(self) -> Browser:
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        child_in, self._out = os.pipe()
        self._in, child_out = os.pipe()
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        flags += ["--disable-background-networking", "--remote-debugging-pipe", f"--user-data-dir={self._profile.name}"]
        pipes = f'exec "$@" 3<&{child_in} 4>&{child_out}'
        self._process = subprocess.Popen(
            ["bash", "-c", pipes, "browser", str(find_chromium()), *flags, "about:blank"],
            pass_fds=(child_in, child_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(child_in)
        os.close(child_out)
        self._buffer, self._count, self._session = b"", 0, None
        self.events: list[dict] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")
        self.send("Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=0, uploadThroughput=0)
        return self

    def __exit__(self, *_) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)
        os.close(self._out)
        self._profile.cleanup()

    def open(self, place: Path | str) -> None:
        """Open a file or an address, and wait until it is loaded."""
        self.events.clear()
        self.send("Page.navigate", url=place if isinstance(place, str) else place.resolve().as_uri())
        self._until(lambda: any(event["method"] == "Page.loadEventFired" for event in self.events))

    def window(self, width: int, height: int = 900, dark: bool = False, media: str = "screen") -> None:
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", media=media, features=[scheme])

    def run(self, script: str):
        """Return the value of a JavaScript expression."""
        answer = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def click(self, script: str) -> None:
        """Click the middle of an element."""
        self.run(f"({script}).scrollIntoView({{block: 'center', behavior: 'instant'}})")
        x, y = self.run(f"(r => [r.left + r.width / 2, r.top + r.height / 2])(({script}).getBoundingClientRect())")
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key: str, code: int) -> None:
        for kind in ("keyDown", "keyUp"):
            text = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **text)

    @property
    def complaints(self) -> list[str]:
        """Exceptions, errors and warnings of the console."""
        found = []
        for event in self.events:
            given = event["params"]
            if event["method"] == "Runtime.exceptionThrown":
                found.append(json.dumps(given["exceptionDetails"]))
            if event["method"] == "Runtime.consoleAPICalled" and given["type"] in ("error", "warning", "assert"):
                found.append(json.dumps(given["args"]))
            if event["method"] == "Log.entryAdded" and given["entry"]["level"] in ("error", "warning"):
                found.append(given["entry"]["text"])
        return found

    @property
    def requests(self) -> list[str]:
        """Requested addresses, without data: addresses."""
        asked = [e["params"]["request"]["url"] for e in self.events if e["method"] == "Network.requestWillBeSent"]
        return [url for url in asked if not url.startswith("data:")]

    def send(self, method: str, **params) -> dict:
        self._count += 1
        number = self._count
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        answers: list[dict] = []
        self._until(lambda: bool(answers), lambda one: answers.append(one) if one.get("id") == number else None)
        assert "error" not in answers[0], (method, answers[0]["error"])
        return answers[0].get("result", {})

    def _until(self, done, hear=lambda one: None) -> None:
        """Read messages until the condition holds."""
        end = time.monotonic() + TIMEOUT
        while not done():
            while b"\0" in self._buffer and not done():
                raw, self._buffer = self._buffer.split(b"\0", 1)
                message = json.loads(raw)
                hear(message)
                if "method" in message:
                    self.events.append(message)
            if done():
                return
            ready, *_ = select.select([self._in], [], [], max(0.0, end - time.monotonic()))
            assert ready, "the browser does not answer"
            block = os.read(self._in, 1 << 16)
            assert block, "the browser has ended"
            self._buffer += block


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    if find_chromium() is None:
        pytest.skip("no chromium on this machine (apt-get install chromium)")
    with Browser() as opened:
        yield opened
