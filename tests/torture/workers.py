"""Commands of psidiff in forked workers: bounded, silent, killed at will.

A worker is a fork of this process, which has imported everything: it starts in milliseconds,
and what it does to itself dies with it.
"""

from __future__ import annotations

import ast
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

import psidiff
from psidiff.cli import main as command_line

GIB = 2**30
MEMORY = 3 * GIB  # of addresses, beyond those at the start
MOST = 2 * GIB  # that a try may take and still be right
SECONDS = 10.0
_IMPORTED = (
    "PIL.Image",
    "numpy.ma",
    "pydantic.main",
    "pydantic.type_adapter",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.distributed.checkpoint",
    "psidiff.cli.compare",
    "psidiff.cli.evaluate",
    "psidiff.cli.sample",
    "psidiff.evaluation.inception",
    "psidiff.experiment.train",
    "psidiff.integrations.official",
)
_ROOT = str(Path(psidiff.__file__).parent)
_TICKS = os.sysconf("SC_CLK_TCK")
_BROKE, _NOTE = 99, "exception.txt"  # exit code of an exception that came through
_QUIET = {
    "OMP_NUM_THREADS": "1",
    "COLUMNS": "200",
    "NO_COLOR": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}


def prepare() -> None:
    """Import what workers need, once; one thread, so that a fork is a whole process."""
    torch.set_num_threads(1)
    for name in _IMPORTED:
        import_module(name)


@dataclass(frozen=True)
class Ended:
    """How a worker ended.

    code: its exit code; negative: the signal that ended it. seconds: at work or asleep, without
    those in which it was ready and others had the processor. peak: bytes beyond those at the
    start. strange: why its exception is none of our sentences, if so.
    """

    code: int
    seconds: float
    peak: int
    out: str
    err: str
    late: bool
    strange: str | None
    traceback: str  # of a bug, which psidiff keeps in a file

    @property
    def sentence(self) -> str:
        """The last line of what it said."""
        lines = self.err.strip().splitlines()
        return lines[-1] if lines else ""

    def failure(self, codes: Sequence[int] = (0, 2)) -> str | None:
        """Why it did not end as psidiff may end: done, or refused in one sentence."""
        if self.late:
            return f"it hangs: over {SECONDS:g} s"
        if self.peak > MOST:
            return f"it took {self.peak / 2**20:,.0f} MiB"
        if self.code not in codes or "Traceback" in self.err:
            said = self.traceback[-1500:] + self.err[-1000:]
            return f"exit code {self.code}: {said or 'not a word'}"
        if self.code != 2:
            return None
        said = self.sentence.removeprefix("psidiff: ")
        if said == self.sentence or not said:
            return f"its last line is no sentence of ours: {self.err[-500:]!r}"
        if len(self.err) > 4000:
            return f"it says {len(self.err):,} characters: {self.err[:300]!r}"
        if any(not c.isprintable() and c not in "\n\t" for c in self.err):
            return f"control characters reach the terminal: {self.err[-500:]!r}"
        return self.strange and f"{self.strange}: {said[:500]}"


class Worker:
    """A process of ours at work on a command.

    folder: where it works. size: how large the files that it writes may get. said_in: the
    folder of the files that hold what it said.
    """

    def __init__(
        self,
        arguments: Sequence[Any] | Callable[[], Any],
        folder: Path,
        env: Mapping[str, str] | None = None,
        memory: int | None = MEMORY,
        size: int | None = None,
        nice: int = 0,
        says: str = "said",
        said_in: Path | None = None,
    ) -> None:
        self.folder, self.begun = folder, time.monotonic()
        place = said_in or folder
        self._out, self._err = place / f".{says}.out", place / f".{says}.err"
        self._note = place / f".{says}.{_NOTE}"
        if said_in is not None:
            for path in (self._out, self._err):
                path.unlink(missing_ok=True)
        self._note.unlink(missing_ok=True)
        self._held = _status("VmRSS")
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            code = _BROKE
            try:
                code = self._be(arguments, env or {}, memory, size, nice)
            except BaseException:
                traceback.print_exc()
            finally:
                with suppress(BaseException):
                    sys.stdout.flush()
                    sys.stderr.flush()
                os._exit(code)
        self._ended: tuple[int, Any] | None = None
        self._slept, self._used, self._looked = 0.0, 0.0, time.monotonic()

    def _be(
        self, arguments: Any, env: Mapping[str, str], memory: Any, size: Any, nice: int
    ) -> int:
        os.setsid()
        os.chdir(self.folder)
        for number, path in ((1, self._out), (2, self._err)):
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(handle, number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
        sys.stdout, sys.stderr = (
            open(number, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
            for number in (1, 2)
        )
        for name in (signal.SIGINT, signal.SIGTERM):
            signal.signal(name, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.update({**_QUIET, "PSIDIFF_CACHE": str(self.folder / "cache"), **env})
        os.environ["TMPDIR"] = tempfile.tempdir = str(self.folder)
        os.nice(nice)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if memory is not None:
            most = _status("VmSize") + memory
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
        if size is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        global _note
        _note = self._note
        if callable(arguments):
            return int(arguments() or 0)
        return command_here(arguments)

    def alive(self) -> bool:
        if self._ended is None:
            self._look()
            pid, status, usage = os.wait4(self.pid, os.WNOHANG)
            if pid == 0:
                return True
            self._ended = (os.waitstatus_to_exitcode(status), usage)
        return False

    def _look(self) -> None:
        now = time.monotonic()
        sleeps, self._used = _clock(self.pid)
        if sleeps:
            self._slept += now - self._looked
        self._looked = now

    def kill(self, number: int = signal.SIGKILL) -> None:
        """One signal to it alone."""
        if self.alive():
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def wait(self, seconds: float = SECONDS) -> Ended:
        """Until it ends; after so many seconds of its own it is killed with its children."""
        late = False
        while self.alive():
            if self._slept + self._used > seconds:
                late = True
                self._kill_all()
            time.sleep(0.003 if self._used < 0.5 else 0.02)
        self._kill_all()  # what it may have started
        assert self._ended is not None
        code, usage = self._ended
        note = self._note.read_text() if self._note.is_file() else None
        return Ended(
            code,
            max(self._slept + usage.ru_utime + usage.ru_stime, 0.0),
            max(usage.ru_maxrss * 1024 - self._held, 0),
            _text(self._out),
            _text(self._err),
            late,
            note,
            "".join(_text(path) for path in self.folder.glob("psidiff-bug-*")),
        )

    def _kill_all(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


_note = Path(os.devnull)  # where a worker says what was strange


def command_here(arguments: Sequence[Any]) -> int:
    """In a worker: the command line; an exception that it puts into words is looked at."""
    sys.argv = ["psidiff", *map(str, arguments)]
    exit_message = command_line.exit_message

    def watched(error: BaseException) -> tuple[str, int]:
        if isinstance(error, Exception) and (why := _strange(error)):
            _note.write_text(why)
        return exit_message(error)

    command_line.exit_message = watched
    try:
        command_line.main()
    except SystemExit as stopped:
        return stopped.code if isinstance(stopped.code, int) else int(bool(stopped.code))
    return 0


def run(arguments: Any, folder: Path, seconds: float = SECONDS, **options: Any) -> Ended:
    """A command from its start to its end."""
    return Worker(arguments, folder, **options).wait(seconds)


def _strange(error: BaseException) -> str | None:
    """Why an exception is none of our sentences; None if it is one."""
    if not isinstance(error, (ValueError, OSError)):
        return None  # not put into words: the exit code tells
    chain: BaseException | None = error
    while chain is not None:
        if isinstance(chain, MemoryError):
            return "memory ran out before it was refused"
        chain = chain.__cause__ or chain.__context__
    if isinstance(error, OSError) and error.filename:
        return None
    last = traceback.extract_tb(error.__traceback__)[-1]
    kind = type(error)
    # the kind of an OSError follows from its number
    ours = kind is ValueError or isinstance(error, OSError)
    ours = ours or kind.__module__.startswith("psidiff")
    if ours and last.filename.startswith(_ROOT) and last.lineno in _raising(last.filename):
        return None
    return f"{kind.__name__} of {Path(last.filename).name}:{last.lineno} passes as a sentence"


@cache
def _raising(filename: str) -> set[int]:
    """The lines of the raise statements of a file."""
    tree = ast.parse(Path(filename).read_text())
    return {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }


def _text(path: Path) -> str:
    try:
        return path.read_bytes()[-20_000:].decode("utf-8", "backslashreplace")
    except OSError:
        return ""


def _status(name: str, pid: int | str = "self") -> int:
    """A line of /proc/PID/status, in bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0


def _clock(pid: int) -> tuple[bool, float]:
    """Whether a process sleeps, and the seconds of processor that it has used."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False, 0.0
    return words[0] not in "R", (int(words[11]) + int(words[12])) / _TICKS
