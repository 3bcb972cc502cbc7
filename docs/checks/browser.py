"""A page as a reader sees it: headless Chromium, by its DevTools protocol over two pipes.

python -m docs.checks.browser PAGE PICTURE [WIDTH]    a screenshot of a whole page
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
TOO_WIDE = """[...document.querySelectorAll("body *")].filter(element =>
    element.getBoundingClientRect().right > document.documentElement.clientWidth + 1
).map(element => element.outerHTML.slice(0, 80))"""
"""What reaches over the right edge of the page."""


class Browser:
    """Opens local pages, until `close`."""

    def __init__(self) -> None:
        assert CHROMIUM is not None
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        theirs, self._to = os.pipe()
        self._from, answers = os.pipe()
        command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                   f"--user-data-dir={self._profile.name}", "--remote-debugging-pipe"]  # fmt: skip
        # The protocol's ends are 3 and 4 in the browser.
        script = f'exec 3<&{theirs} 4>&{answers}; exec "$@"'
        self._process = subprocess.Popen(
            ["bash", "-c", script, "bash", *command], pass_fds=(theirs, answers),
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(theirs)
        os.close(answers)
        self._answers = os.fdopen(self._from, "rb")
        self._count, self._session = 0, {}
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        session = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": session["sessionId"]}
        self._call("Page.enable")

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()
        os.close(self._to)
        self._answers.close()
        self._profile.cleanup()

    def open(self, page: Path, width: int) -> None:
        """In a window so many pixels wide; returns once it is loaded."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self._call("Emulation.setDeviceMetricsOverride", **size)
        self._call("Page.navigate", url=page.absolute().as_uri())
        while self._read().get("method") != "Page.loadEventFired":
            pass

    def value(self, expression: str) -> Any:
        """Of JavaScript, on the page."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def picture(self) -> bytes:
        """The whole page, as PNG."""
        width, height = self.value("[innerWidth, document.body.getBoundingClientRect().bottom]")
        whole = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        answer = self._call("Page.captureScreenshot", captureBeyondViewport=True, clip=whole)
        return base64.b64decode(answer["data"])

    def _call(self, method: str, **parameters: Any) -> Any:
        self._count += 1
        call = {"id": self._count, "method": method, "params": parameters, **self._session}
        os.write(self._to, json.dumps(call).encode() + b"\0")
        while (answer := self._read()).get("id") != self._count:
            pass
        assert "error" not in answer, answer
        return answer["result"]

    def _read(self) -> dict[str, Any]:
        text = bytearray()
        while (byte := self._answers.read(1)) != b"\0":
            assert byte, "the browser has ended"
            text += byte
        return dict(json.loads(text))


if __name__ == "__main__":
    source, target, *more = sys.argv[1:]
    with closing(Browser()) as browser:
        browser.open(Path(source), int(*more or [1400]))
        Path(target).write_bytes(browser.picture())
