"""Debian's Chromium by its own driver, over the WebDriver protocol: no package between."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--hide-scrollbars", "--force-device-scale-factor=1",
)  # fmt: skip
KEYS = {"Tab": "\ue004", "Enter": "\ue007", "Space": "\ue00d", "Shift": "\ue008", "Down": "\ue015"}
AXE = Path(__file__).parents[2] / ".venv" / "browser" / "axe.min.js"


def missing() -> str:
    """Return why no browser can be driven here; "" where one can."""
    names = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"{' and '.join(names)} not installed: tools/install_browser.sh" if names else ""


class Browser:
    """A window of Chromium."""

    def __init__(self, address: str, profile: str) -> None:
        self._address = address
        options = {"args": [*FLAGS, f"--user-data-dir={profile}"], "binary": shutil.which("chromium")}
        logs = {"browser": "ALL", "performance": "ALL"}
        wishes = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": logs}
        answer = self._ask("POST", "/session", {"capabilities": {"alwaysMatch": wishes}})
        self._address += f"/session/{answer['sessionId']}"
        self.devtools("Performance.enable", {"timeDomain": "threadTicks"})

    def _ask(self, method: str, path: str, values: object = None) -> Any:
        data = None if values is None else json.dumps(values).encode()
        request = urllib.request.Request(
            self._address + path, data=data, method=method, headers={"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=90) as answer:
                return json.loads(answer.read())["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(json.loads(error.read())["value"]["message"]) from error

    def size(self, width: int, height: int = 900) -> None:
        """Give the page a width, as a phone or a screen has."""
        values = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.devtools("Emulation.setDeviceMetricsOverride", values)

    def prefer(self, theme: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": theme}]
        self.devtools("Emulation.setEmulatedMedia", {"features": features})

    def devtools(self, command: str, values: dict[str, Any] | None = None) -> Any:
        return self._ask("POST", "/goog/cdp/execute", {"cmd": command, "params": values or {}})

    def open(self, page: Path) -> None:
        """Open a file, and forget what was logged before."""
        self.console()
        self.requests()
        self._ask("POST", "/url", {"url": page.resolve().as_uri()})

    def run(self, script: str, *arguments: object) -> Any:
        """Return what a function body returns in the page."""
        return self._ask("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def run_async(self, script: str) -> Any:
        """Return what a function body gives to its last argument."""
        return self._ask("POST", "/execute/async", {"script": script, "args": []})

    def wait_for(self, script: str, seconds: float = 20.0) -> None:
        deadline = time.monotonic() + seconds
        while not self.run(script):
            assert time.monotonic() < deadline, f"never true: {script}"
            time.sleep(0.05)

    def press(self, *names: str) -> None:
        """Press keys one after the other, wherever the focus is."""
        actions = [{"type": kind, "value": KEYS.get(name, name)} for name in names for kind in ("keyDown", "keyUp")]
        self._ask("POST", "/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": actions}]})

    def console(self) -> list[str]:
        """Return what the page complained of since the last call."""
        return [entry["message"] for entry in self._ask("POST", "/se/log", {"type": "browser"})]

    def requests(self) -> list[str]:
        """Return the addresses that were asked for since the last call."""
        entries = [
            json.loads(entry["message"])["message"] for entry in self._ask("POST", "/se/log", {"type": "performance"})
        ]
        return [each["params"]["request"]["url"] for each in entries if each["method"] == "Network.requestWillBeSent"]

    def work_seconds(self) -> float:
        """Return the processor's seconds that the page took since it was opened."""
        metrics = self.devtools("Performance.getMetrics")["metrics"]
        return float(next(each["value"] for each in metrics if each["name"] == "TaskDuration"))

    def draw_all(self) -> None:
        """Draw the charts again, and let the page settle."""
        self.run("drawAll();")
        self.run_async("const done = arguments[0]; requestAnimationFrame(() => setTimeout(done, 150));")

    def picture(self, place: Path, *, whole: bool = False) -> None:
        """Write a picture of what is seen, or of the whole page."""
        values: dict[str, Any] = {"format": "png", "captureBeyondViewport": whole}
        if whole:
            height = self.run("return document.documentElement.scrollHeight")
            width = self.run("return innerWidth")
            values["clip"] = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        place.write_bytes(base64.b64decode(self.devtools("Page.captureScreenshot", values)["data"]))

    def close(self) -> None:
        with contextlib.suppress(OSError, AssertionError):
            self._ask("DELETE", "")


@contextlib.contextmanager
def driving() -> Iterator[Browser]:
    """Yield a browser with a profile of its own; driver and browser end with the block."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    driver = subprocess.Popen(
        ["chromedriver", f"--port={port}", "--log-level=OFF"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={name: value for name, value in os.environ.items() if "proxy" not in name.lower()},
    )
    profile = tempfile.mkdtemp(prefix="holdfast-browser-")
    browser = None
    try:
        _wait_for(f"http://127.0.0.1:{port}/status")
        browser = Browser(f"http://127.0.0.1:{port}", profile)
        yield browser
    finally:
        if browser is not None:
            browser.close()
        driver.terminate()
        try:
            driver.wait(10)
        except subprocess.TimeoutExpired:
            driver.kill()
            driver.wait()
        shutil.rmtree(profile, ignore_errors=True)


def _wait_for(address: str) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(address, timeout=5) as answer:
                if json.loads(answer.read())["value"]["ready"]:
                    return
        except OSError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.1)
