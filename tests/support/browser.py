"""Headless Chromium for tests, driven through its DevTools protocol.

Source: chromedevtools.github.io/devtools-protocol.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--remote-debugging-port=0", "--hide-scrollbars",
)  # fmt: skip
_START_S = 60.0


def find_browser() -> str | None:
    """Return the path of Chromium; None when it is not installed."""
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


@dataclass
class PageView:
    """An opened page: its requests of other files, errors, results of scripts, screenshot."""

    requests: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    answers: list[Any] = field(default_factory=list)
    screenshot: bytes = b""


@dataclass(frozen=True)
class View:
    """Size and color scheme of a page. `scripts`: JavaScript expressions to evaluate in order."""

    width: int = 1280
    height: int = 900
    dark: bool = False
    scripts: tuple[str, ...] = ()


def open_page(browser: str, page: Path, view: View, profile: Path) -> PageView:
    """Open a file in a new browser. `profile`: an empty folder for the browser's files."""
    process = subprocess.Popen(
        [browser, *_FLAGS, f"--user-data-dir={profile}", "about:blank"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "HOME": str(profile)},
    )
    try:
        return asyncio.run(_open_page(_address(process, profile), page, view))
    finally:
        process.kill()
        process.wait()


def _address(process: subprocess.Popen[bytes], profile: Path) -> str:
    """Return the address on which the browser listens, from the file that it writes."""
    file, deadline_s = profile / "DevToolsActivePort", time.monotonic() + _START_S
    while time.monotonic() < deadline_s and process.poll() is None:
        with suppress(OSError):
            lines = file.read_text().splitlines()
            if len(lines) == 2:
                return f"ws://127.0.0.1:{lines[0]}{lines[1]}"
        time.sleep(0.05)
    raise RuntimeError(f"{process.args!r} does not start")


async def _open_page(address: str, page: Path, view: View) -> PageView:
    from aiohttp import ClientSession

    async with ClientSession() as session, session.ws_connect(address, max_msg_size=0) as socket:
        view_of_page, loaded = PageView(), asyncio.Event()
        tab = _Tab(socket, lambda event: _record(view_of_page, loaded, page.as_uri(), event))
        reading = asyncio.create_task(tab.read())
        await tab.open()
        for domain in ("Page", "Runtime", "Log", "Network"):
            await tab.call(f"{domain}.enable")
        size = {"width": view.width, "height": view.height, "deviceScaleFactor": 1}
        await tab.call("Emulation.setDeviceMetricsOverride", **size, mobile=view.width < 600)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if view.dark else "light"}
        await tab.call("Emulation.setEmulatedMedia", features=[scheme])
        await tab.call("Page.navigate", url=page.as_uri())
        await asyncio.wait_for(loaded.wait(), _START_S)
        for script in view.scripts:
            done = await tab.call("Runtime.evaluate", expression=script, returnByValue=True)
            view_of_page.answers.append(done["result"].get("value"))
        shot = await tab.call("Page.captureScreenshot")
        view_of_page.screenshot = base64.b64decode(shot["data"])
        reading.cancel()
        return view_of_page


def _record(
    view_of_page: PageView, loaded: asyncio.Event, page: str, event: dict[str, Any]
) -> None:
    method, parameters = event["method"], event["params"]
    if method == "Page.loadEventFired":
        loaded.set()
    elif method == "Network.requestWillBeSent":
        url = parameters["request"]["url"]
        if url.partition("#")[0] != page and not url.startswith("data:"):
            view_of_page.requests.append(url)
    elif method == "Runtime.exceptionThrown":
        view_of_page.errors.append(parameters["exceptionDetails"]["text"])
    elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning"):
        view_of_page.errors.append(str(parameters["args"]))
    elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
        view_of_page.errors.append(parameters["entry"]["text"])


class _Tab:
    """A page of the browser: sends calls, receives answers and events."""

    def __init__(self, socket: Any, on_event: Callable[[dict[str, Any]], None]) -> None:
        self._socket, self._on_event = socket, on_event
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._session: dict[str, str] = {}

    async def open(self) -> None:
        target = await self.call("Target.createTarget", url="about:blank")
        session = await self.call("Target.attachToTarget", flatten=True, **target)
        self._session = {"sessionId": session["sessionId"]}

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = len(self._answers) + 1
        self._answers[number] = asyncio.get_running_loop().create_future()
        message = {"id": number, "method": method, "params": parameters, **self._session}
        await self._socket.send_json(message)
        return await asyncio.wait_for(self._answers[number], _START_S)

    async def read(self) -> None:
        async for message in self._socket:
            event = json.loads(message.data)
            if "id" not in event:
                self._on_event(event)
            elif "error" in event:
                self._answers[event["id"]].set_exception(RuntimeError(str(event["error"])))
            else:
                self._answers[event["id"]].set_result(event["result"])
