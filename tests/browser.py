"""Chromium without a window, driven over a pipe by its protocol: a page as people see it."""

import base64
import fcntl
import json
import os
import shutil
import subprocess
import sys
import time

import pytest

# chromium reads commands from its file 3 and answers into 4
LAUNCH = """
import os, sys
into, out, *command = sys.argv[1:]
os.dup2(int(into), 3)
os.dup2(int(out), 4)
os.execv(command[0], command)
"""


def high(fd):
    """The same file under a number above 4."""
    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(fd)
    return moved


def find_browser():
    """The path of a chromium, or a skipped test."""
    names = ("chromium", "chromium-browser", "google-chrome")
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        pytest.skip("there is no chromium to open the page with")
    return found


class Browser:
    """One page. `do` runs JavaScript in it; what went wrong on the page is in `failures`."""

    def __init__(self, folder):
        (self._read, out), (into, self._write) = os.pipe(), os.pipe()
        into, out = high(into), high(out)
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"]
        options += ["--remote-debugging-pipe", f"--user-data-dir={folder}", "about:blank"]
        command = [sys.executable, "-c", LAUNCH, str(into), str(out), find_browser(), *options]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(command, pass_fds=(into, out), **quiet)
        os.close(into)
        os.close(out)
        self._rest, self._number, self._session, self.failures = b"", 0, None, []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._process.kill()
        self._process.wait()
        os.close(self._read)
        os.close(self._write)

    def send(self, method, **params):
        """A command of the protocol, and its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def size(self, width, height):
        metrics = {"deviceScaleFactor": 1, "mobile": width < 600}
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, **metrics)

    def open(self, address):
        self.send("Page.navigate", url=address)
        self.until("document.readyState === 'complete'")

    def do(self, script):
        """The value of an expression, or of the body of an async function."""
        body = f"(async () => {{ {script} }})()" if "return" in script else script
        made = self.send(
            "Runtime.evaluate", expression=body, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in made, made["exceptionDetails"]
        return made["result"].get("value")

    def until(self, condition, seconds=30):
        """Wait for an expression to be true."""
        end = time.monotonic() + seconds
        while not self.do(condition):
            assert time.monotonic() < end, f"never: {condition}"
            time.sleep(0.02)

    def key(self, key, code=0, text=None, modifiers=0):
        """A key, as the keyboard sends it; modifiers: 2 is Ctrl, 8 is Shift."""
        shared = {"key": key, "windowsVirtualKeyCode": code, "modifiers": modifiers}
        typed = {"text": text} if text else {}
        kind = "keyDown" if text else "rawKeyDown"
        self.send("Input.dispatchKeyEvent", type=kind, **shared, **typed)
        self.send("Input.dispatchKeyEvent", type="keyUp", **shared)

    def type(self, text):
        self.send("Input.insertText", text=text)

    def screenshot(self, path):
        made = self.send("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(made["data"]))

    def _next(self):
        """The next message; those about mistakes on the page are kept."""
        while b"\0" not in self._rest:
            part = os.read(self._read, 1 << 16)
            assert part, "the browser is gone"
            self._rest += part
        raw, self._rest = self._rest.split(b"\0", 1)
        message = json.loads(raw)
        kind, params = message.get("method"), message.get("params", {})
        if kind == "Runtime.exceptionThrown":
            self.failures.append(params["exceptionDetails"]["text"])
        if kind == "Runtime.consoleAPICalled" and params["type"] == "error":
            self.failures.append(str(params["args"]))
        if kind == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.failures.append(params["entry"]["text"])
        return message
