"""Area requests: a server of a model that ships, under hostile and mutated requests.

Right: no answer of 500 or more, an honest request is answered, /health in under a second at
the 99th percentile all the time, memory within 200 MB of what it was, no traceback in the log.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from . import mutations as m
from .report import Outcome
from .workers import _QUIET, _status

MODEL = "shakespeare"
PATIENCE = 8.0  # seconds, after which a client hangs up
HONEST = 90.0  # seconds that an honest client waits
FLAT = 200e6  # bytes that the server may grow by
_MOST_HEALTH = 1.0
_COMPLETIONS, _CHAT = "/v1/completions", "/v1/chat/completions"


@dataclass(frozen=True)
class Asked:
    """What is sent, in pieces; what is waited between them and after the last."""

    name: str
    pieces: tuple[bytes, ...]
    pause: float = 0.0
    patience: float = PATIENCE
    honest: bool = False
    slow: bool = False  # 4 KiB are read, and then a while nothing


class Requests:
    """The tries of this area, one request each; a few run at the same time."""

    together = 4

    def __init__(self, seed: int, root: Path) -> None:
        self.seed, self.root = seed, root
        self.server: subprocess.Popen[bytes] | None = None
        self.pool = ThreadPoolExecutor(self.together)
        self.made: dict[int, Future[Outcome]] = {}

    def try_one(self, number: int) -> Outcome:
        if self.server is None:
            self._begin()
        for near in range(number, number + self.together):
            if near not in self.made:
                self.made[near] = self.pool.submit(self._ask, near)
        return self.made.pop(number).result()

    def _ask(self, number: int) -> Outcome:
        rng = np.random.default_rng((self.seed, 6, number))
        asked = WAYS[number % len(WAYS)](rng)
        begun = time.monotonic()
        status, body = _send(self.port, asked)
        seconds = time.monotonic() - begun
        failure = _wrong(asked, status, body)
        assert self.server is not None
        if self.server.poll() is not None:
            failure = f"the server is gone: exit code {self.server.returncode}"
        said = f"{status or 'hung up'} {body[:120]!r}"
        return Outcome(asked.name, failure, said, seconds, counts={f"status {status}": 1})

    def _begin(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.log = (self.root / "serve.log").open("wb")
        command = [sys.executable, "-m", "psidiff", "serve", MODEL, "--port", str(self.port)]
        env = {**os.environ, **_QUIET, "PYTHONPATH": sys.path[0]}
        self.server = subprocess.Popen(
            [*command, "--device", "cpu"], stdout=self.log, stderr=self.log, env=env
        )
        end = time.monotonic() + 120
        while not _health(self.port)[1]:
            if self.server.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"no server: {self._said()[-2000:]}")
            time.sleep(0.1)
        for rows in (1, 16, 16):  # what honest work takes
            honest = _honest(np.random.default_rng(0), n=rows, max_tokens=100)
            status, body = _send(self.port, honest)
            if status != 200:
                raise RuntimeError(f"an honest request gave {status}: {body[:500]!r}")
        self.held = _status("VmRSS", self.server.pid)
        self.watch = self.root / "health.txt"
        self.watcher = _watch(self.port, self.server.pid, self.watch)

    def end(self) -> Iterator[Outcome]:
        """How the server was all the time, and that it ends when it is asked."""
        self.pool.shutdown(cancel_futures=True)
        if self.server is None:
            return
        time.sleep(1.0)
        os.kill(self.watcher, signal.SIGTERM)
        os.waitpid(self.watcher, 0)
        lines = [list(map(float, line.split())) for line in self.watch.read_text().splitlines()]
        waits, sizes = np.array([line[:2] for line in lines]).T
        yield self._health(waits)
        grown, now = sizes.max() - self.held, _status("VmRSS", self.server.pid) - self.held
        yield Outcome(
            "memory",
            f"it grew by {grown / 1e6:,.0f} MB" if grown > FLAT else None,
            peak=int(max(grown, 0)),
            counts={"max growth (MB)": grown / 1e6, "max growth left (MB)": now / 1e6},
        )
        yield self._stop()

    def _health(self, waits: np.ndarray) -> Outcome:
        near, most = float(np.quantile(waits, 0.99)), float(waits.max())
        failure = f"/health took {near:.2f} s at the 99th percentile, {most:.2f} s at most"
        return Outcome(
            "health",
            failure if near > _MOST_HEALTH else None,
            seconds=most,
            counts={"polls": len(waits), "max health p99 (s)": near, "max health (s)": most},
        )

    def _stop(self) -> Outcome:
        assert self.server is not None
        self.server.send_signal(signal.SIGINT)
        begun = time.monotonic()
        with suppress(subprocess.TimeoutExpired):
            self.server.wait(30)
        seconds = time.monotonic() - begun
        failure = None
        if self.server.poll() is None:
            self.server.kill()
            self.server.wait()
            failure = "it does not end within 30 s of SIGINT"
        said = self._said()
        if "Traceback" in said:
            failure = f"tracebacks in its log: {said[said.index('Traceback') :][:1500]}"
        lines = float(len(said.splitlines()))
        return Outcome("end", failure, said[-300:], seconds, counts={"lines of log": lines})

    def _said(self) -> str:
        return (self.root / "serve.log").read_text(errors="replace")


def _watch(port: int, server: int, path: Path) -> int:
    """A process that asks for /health 20 times a second and notes time and memory."""
    pid = os.fork()
    if pid:
        return pid
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    with path.open("w", buffering=1) as file:
        while True:
            seconds, _ = _health(port)
            with suppress(OSError):
                file.write(f"{seconds:.4f} {_status('VmRSS', server)}\n")
            time.sleep(0.05)


def _health(port: int) -> tuple[float, bool]:
    """Seconds to an answer, and whether it was 200."""
    begun, status = time.monotonic(), None
    with suppress(OSError):
        status, _ = _send(port, Asked("", (_http("GET", "/health"),), patience=30.0))
    return time.monotonic() - begun, status == 200


def _send(port: int, asked: Asked) -> tuple[int | None, bytes]:
    """The status and the body of the answer; None where the client hung up first."""
    found, end = b"", time.monotonic() + asked.patience
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=asked.patience) as link:
            for number, piece in enumerate(asked.pieces):
                if number:
                    time.sleep(asked.pause)
                link.sendall(piece)
            while (left := end - time.monotonic()) > 0:
                link.settimeout(left)
                part = link.recv(2**12 if asked.slow else 2**16)
                if not part:
                    break
                if asked.slow:
                    time.sleep(0.2)
                found += part
    except OSError:
        pass
    head, _, body = found.partition(b"\r\n\r\n")
    words = head.split(b"\r\n")[0].split()
    status = int(words[1]) if len(words) > 1 and words[1].isdigit() else None
    return status, body


def _wrong(asked: Asked, status: int | None, body: bytes) -> str | None:
    if status is not None and status >= 500:
        return f"{status}: {body[:500]!r}"
    if b"Traceback" in body:
        return f"a traceback in the answer: {body[:500]!r}"
    if asked.honest and status not in (200, 429):
        return f"an honest request gave {status}: {body[:500]!r}"
    if status is not None and status >= 400 and len(body) > 4000:
        return f"an error of {len(body):,} bytes: {body[:300]!r}"
    return None


def _http(
    method: str, path: str, body: bytes = b"", kind: str = "application/json", more: str = ""
) -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n{more}"
    if body or method == "POST":
        head += f"Content-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
    return f"{head}\r\n".encode("utf-8", "replace") + body


def _post(name: str, fields: Any, path: str = _COMPLETIONS, **more: Any) -> Asked:
    try:
        raw = json.dumps(fields).encode("utf-8", "replace")
    except (ValueError, RecursionError):
        raw = b"{"
    return Asked(name, (_http("POST", path, raw),), **more)


_BASE = {"model": MODEL, "prompt": "the ", "max_tokens": 4, "diffusion_steps": 2}


def _honest(rng: m.Rng, **fields: Any) -> Asked:
    """A small request as anybody sends it."""
    body = {**_BASE, "seed": int(rng.integers(1000)), **fields}
    return _post("honest", body, honest=True, patience=HONEST)


FIELDS = (
    *("model", "prompt", "suffix", "max_tokens", "temperature", "top_p", "n", "seed", "stop"),
    *("stream", "stream_options", "logit_bias", "logprobs", "best_of", "echo", "user", "min_p"),
    *("presence_penalty", "frequency_penalty", "diffusion_steps", "diffusion_kappa"),
    *("diffusion_preset", "diffusion_predictor", "diffusion_corrector", "diffusion_last"),
    *("diffusion_top_k", "diffusion_min_p", "diffusion_label", "diffusion_guidance"),
    *("diffusion_guidance_on", "diffusion_pinned", "diffusion_infill", "diffusion_deadline"),
    *("diffusion_canvas_length", "diffusion_overlap", "diffusion_drafts", "diffusion_schedule"),
    *("diffusion_sampler", "diffusion_grid"),
)


def _fields(rng: m.Rng) -> Asked:
    """One to three fields that are not as they should be."""
    body: dict[str, Any] = dict(_BASE)
    names = [str(name) for name in rng.choice(FIELDS, int(rng.integers(1, 4)))]
    if rng.random() < 0.1:  # a field that nobody has, with a name that acts on terminals, say
        names.append(
            str(m.pick(rng, ("[", "]", "a[b]", "", "\x1b[31m\n", "\u202e", "x" * 9999)))
        )
    for name in names:
        body[name] = m.hostile_value(rng)
    return _post(f"fields {', '.join(names)}", body)


def _heavy(rng: m.Rng) -> Asked:
    """All that a request may ask for, and more, all at once."""
    body = {
        "model": MODEL,
        "prompt": "a" * int(m.pick(rng, (0, 1, 100, 4000))),
        "max_tokens": int(m.pick(rng, (1, 128, 1000, 4000, 4096, 10**6))),
        "diffusion_steps": int(m.pick(rng, (1, 128, 2048, 4096, 10**6))),
        "n": int(m.pick(rng, (1, 4, 16, 64, 10**4))),
        "stream": bool(rng.random() < 0.5),
    }
    if rng.random() < 0.7:
        body["diffusion_canvas_length"] = int(m.pick(rng, (1, 2, 3, 16, 128)))
        body["diffusion_overlap"] = int(m.pick(rng, (0, 1, 2, 64)))
    if rng.random() < 0.4:
        body |= {"stream": True, "diffusion_drafts": True}
    if rng.random() < 0.3:
        body["diffusion_corrector"] = m.pick(rng, ("8x8", "100x64", "4096x4096"))
    if rng.random() < 0.3:
        body["diffusion_kappa"] = m.pick(rng, ("cap:.01", "loop:.02", "rescale:.05", "cap:1"))
    return _post("heavy", body, patience=float(m.pick(rng, (0.05, 0.5, 2.0))))


def _long(rng: m.Rng) -> Asked:
    """A body near the most bytes, whose parts are many."""
    many = int(m.pick(rng, (1000, 20_000, 90_000)))
    fields: dict[str, Any] = m.pick(
        rng,
        [
            {"diffusion_infill": "{{4096}}" * many},
            {"diffusion_infill": "{{1}}" * many},
            {"diffusion_infill": "a{{1}}" * many},
            {"prompt": [[]] * many},
            {"prompt": ["a"] * 16, "diffusion_steps": 4096},
            {"prompt": '[{,\\"' * many},
            {"diffusion_infill": "{{" * many},
            {"prompt": ["a"] * many},
            {"prompt": [0] * many},
            {"prompt": "é" * many},
            {"prompt": [[0]] * many},
            {"stop": ["a"] * many},
            {"stop": ["ab" * many]},
            {"logit_bias": {str(i): 1 for i in range(many)}},
            {"diffusion_pinned": {str(i): 1 for i in range(many)}},
            {"diffusion_pinned": [0] * many},
            {"diffusion_kappa": "cap:.01" * many},
            {"diffusion_kappa": "constant:" + "9" * many},
            {"diffusion_predictor": "confident:" + "a=1," * many},
            {"diffusion_guidance": "1@" * many},
            {"seed": 10**4000},
            {f"x{i}": i for i in range(many)},
            {"user": "x" * many, "prompt": "\ud800" * 10},
        ],
    )
    return _post(f"long {next(iter(fields))}", {**_BASE, **fields})


def _chat(rng: m.Rng) -> Asked:
    """Conversations, for a model that may not have a template."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "a"}]}
    body = m.changed_value(rng, body)
    if rng.random() < 0.3:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "a"}] * 20_000}
    return _post("chat", body, _CHAT)


def _text(rng: m.Rng) -> Asked:
    """Bytes that are no JSON, or hardly."""
    body = m.json_file(rng, json.dumps(_BASE).encode())[: 2**21]
    return Asked("text", (_http("POST", m.pick(rng, (_COMPLETIONS, _CHAT)), body),))


def _bytes(rng: m.Rng) -> Asked:
    """A right request whose bytes are damaged."""
    whole = _http("POST", _COMPLETIONS, json.dumps(_BASE).encode())
    return Asked("bytes", (m.damaged_bytes(rng, whole),), patience=2.0)


def _protocol(rng: m.Rng) -> Asked:
    """What is no HTTP, or lies, or never ends."""
    head = f"POST {_COMPLETIONS} HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    head += "Content-Type: application/json\r\n"
    body = json.dumps(_BASE)
    lies = [
        f"{head}Content-Length: 100000000000\r\n\r\n{{",
        f"{head}Content-Length: -1\r\n\r\n{{",
        f"{head}Content-Length: 5\r\nContent-Length: 6\r\n\r\n{{}}",
        f"{head}Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        f"{head}Transfer-Encoding: chunked\r\n\r\nFFFFFFFFFFFFFFFF\r\na",
        f"{head}Transfer-Encoding: chunked\r\n\r\n" + "10000\r\n" + "a" * 65536 + "\r\n",
        f"{head}Transfer-Encoding: chunked\r\n\r\n" + "1\r\n \r\n" * 100_000,
        f"{head}Transfer-Encoding: x\r\n\r\n{body}",
        f"{head}Content-Encoding: gzip\r\nContent-Length: {len(body)}\r\n\r\n{body}",
        f"{head}Content-Length: {len(body)}\r\nExpect: 100-continue\r\n\r\n{body}",
        f"{head}X: {'a' * 10**6}\r\n\r\n",
        head + "".join(f"X{i}: a\r\n" for i in range(5000)) + "\r\n",
        f"GET /{'a' * 10**6} HTTP/1.1\r\n\r\n",
        "GET / HTTP/9.9\r\n\r\n",
        "GET /\r\n\r\n",
        "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\n"
        "Connection: Upgrade\r\n\r\n",
        "GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 200,
        "GET /%00/../../etc/passwd HTTP/1.1\r\nHost: a\r\n\r\n",
        "OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n",
        "\r\n" * 10_000,
        "\x00" * 10_000,
    ]
    raw = m.pick(rng, lies).encode("latin1")
    if rng.random() < 0.4:  # slowly
        size = max(1, min(len(raw), 4000) // 10)
        pieces = tuple(raw[i : i + size] for i in range(0, min(len(raw), 4000), size))
        return Asked("protocol, slowly", pieces, pause=0.05, patience=3.0)
    return Asked("protocol", (raw,), patience=3.0)


def _dropped(rng: m.Rng) -> Asked:
    """A right request, streamed, whose client goes away; or goes away in mid-body."""
    body = {**_BASE, "max_tokens": 100, "diffusion_steps": 64, "stream": True, "n": 4}
    whole = _http("POST", _COMPLETIONS, json.dumps(body).encode())
    if rng.random() < 0.5:
        whole = whole[: int(rng.integers(len(whole)))]
    return Asked("dropped", (whole,), patience=float(rng.uniform(0.01, 0.5)))


def _unread(rng: m.Rng) -> Asked:
    """Drafts of long samples that are read slowly, or not at all."""
    body = {**_BASE, "max_tokens": int(m.pick(rng, (100, 1000, 4000))), "diffusion_steps": 500}
    body |= {"n": 4, "stream": True, "diffusion_drafts": True, "diffusion_canvas_length": 16}
    whole = _http("POST", _COMPLETIONS, json.dumps(body).encode())
    return Asked("unread", (whole,), slow=True, patience=float(rng.uniform(0.5, 3.0)))


def _elsewhere(rng: m.Rng) -> Asked:
    """Other paths, methods, hosts and kinds of body."""
    method = m.pick(rng, ("GET", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "POST", "TRACE"))
    path = m.pick(
        rng,
        (
            *("/", "/v1", "/v1/models", "/v1/models/..%2f..%2fetc", "/metrics", "/health"),
            *("/docs", "/openapi.json", "/.env", "/%ff", "/%00", "//", "/?" + "a=b&" * 9000),
            *("/v1/completions", "/v1/chat/completions", "/replay", "/v1/embeddings"),
        ),
    )
    kind = m.pick(
        rng, ("application/json", "text/plain", "", "multipart/form-data", "x" * 5000)
    )
    hosts = ("Host: evil.example\r\n", "Host: \r\n", "Authorization: Bearer x\r\n", "")
    more = m.pick(
        rng, (*hosts, "Origin: http://evil.example\r\n", "Cookie: " + "a" * 5000 + "\r\n")
    )
    return Asked(f"{method} {path[:40]}", (_http(method, path, b"{}", kind, more),))


WAYS = (
    *(_fields, _fields, _heavy, _long, _text, _fields, _dropped, _elsewhere, _fields, _honest),
    *(_fields, _chat, _bytes, _protocol, _fields, _heavy, _text, _unread, _dropped, _honest),
)
