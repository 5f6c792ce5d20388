"""A real Chromium, driven through the pipe of its DevTools protocol: no driver, no package."""

from __future__ import annotations

import base64
import fcntl
import itertools
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser")
MISSING = "needs Chromium, got none; Debian has it as the package: apt-get install chromium"
START = 'exec "${@:3}" 3<&"$1" 4>&"$2"'
"""Chromium reads requests from descriptor 3 and writes answers to 4."""
SECONDS = 60
KEYS = {" ": ("Space", 32), "ArrowLeft": ("ArrowLeft", 37), "ArrowRight": ("ArrowRight", 39)}


class Chromium:
    """One window without a screen."""

    def __init__(self, profile: Path) -> None:
        assert PROGRAM is not None
        read, self._to = os.pipe()
        self._from, write = os.pipe()
        # Above those that are about to be put in place.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 20) for end in (read, write)]
        options = ["--headless=new", "--disable-gpu", "--remote-debugging-pipe", "--mute-audio"]
        # Root may not have the sandbox.
        options += ["--no-sandbox"] if os.geteuid() == 0 else []
        self.process = subprocess.Popen(
            [
                *("bash", "-c", START, "bash", *map(str, ends), PROGRAM, *options),
                *(f"--user-data-dir={profile}", "about:blank"),
            ],
            pass_fds=ends,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for end in (read, write, *ends):
            os.close(end)
        self._numbers, self._rest, self._session = itertools.count(1), b"", ""
        self.problems: list[Any] = []
        """Exceptions of the page, and what its console got."""
        page = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=page, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Chromium:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(SECONDS)
        os.close(self._to)
        os.close(self._from)

    def call(self, method: str, **arguments: Any) -> Any:
        """The result of a method of the protocol."""
        number = next(self._numbers)
        said = {"id": number, "method": method, "params": arguments}
        if self._session:
            said["sessionId"] = self._session
        os.write(self._to, json.dumps(said).encode() + b"\0")
        while True:
            while b"\0" not in self._rest:
                more = os.read(self._from, 2**16)
                assert more, "Chromium has ended"
                self._rest += more
            line, _, self._rest = self._rest.partition(b"\0")
            answer = json.loads(line)
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]
            if answer.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.problems.append(answer["params"])

    def run(self, code: str) -> Any:
        """The value of an expression in the page."""
        options = {"awaitPromise": True, "returnByValue": True}
        answer = self.call("Runtime.evaluate", expression=code, **options)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait(self, condition: str) -> None:
        """Until an expression in the page is true."""
        end = time.monotonic() + SECONDS
        while not self.run(condition):
            assert time.monotonic() < end, f"{condition} was not true after {SECONDS} s"
            time.sleep(0.1)

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def resize(self, width: int, height: int) -> None:
        mobile = width < 600
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": mobile}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def theme(self, name: str) -> None:
        """`dark` or `light`."""
        feature = {"name": "prefers-color-scheme", "value": name}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def drag(self, points: list[tuple[float, float]]) -> None:
        """Draw with the left button from point to point."""
        kinds = ["mousePressed", *["mouseMoved"] * (len(points) - 1), "mouseReleased"]
        for kind, (x, y) in zip(kinds, [*points, points[-1]], strict=True):
            button = {"button": "left", "buttons": 1, "clickCount": 1}
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **button)

    def press(self, key: str) -> None:
        code, number = KEYS[key]
        said: dict[str, Any] = {"key": key, "code": code, "windowsVirtualKeyCode": number}
        self.call("Input.dispatchKeyEvent", type="keyDown", **said)
        self.call("Input.dispatchKeyEvent", type="keyUp", **said)

    def screenshot(self, file: Path) -> None:
        """The whole page as a PNG file."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(shot["data"]))
