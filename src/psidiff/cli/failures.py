"""What ends the command, as one sentence and an exit code. Nothing hides a bug.

2: what the user can mend, 70: a bug (its traceback goes into a file), 130: stopped, 1: nobody
reads any more, or another process of the run ended.
"""

from __future__ import annotations

import dis
import errno
import os
import platform
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import typer

from .. import __version__
from .terminal import plain

UsageError: Any = typer.BadParameter.__base__  # click's, or that of the click inside typer

_PACKAGE = Path(__file__).resolve().parents[1]
_MOST = 2000  # characters of a sentence
_RAISE = dis.opmap["RAISE_VARARGS"]
_OF_OTHERS = ("Connection closed by peer", "Connection reset by peer", "gloo/transport")


def exit_message(error: BaseException) -> tuple[str, int]:
    """The words for standard error, "" for none, and the exit code."""
    if isinstance(error, typer.Exit):
        return "", int(error.exit_code)
    if isinstance(error, UsageError):
        return _usage(error), 2
    if isinstance(error, (KeyboardInterrupt, typer.Abort)):
        return _sentence(str(error) or "stopped"), 130
    if isinstance(error, BrokenPipeError):
        return "", 1
    if isinstance(error, OSError):
        return _sentence(_of_system(error)), 2
    first = _first_line(error)
    if _out_of_memory(error):
        words = "there is not enough memory for this"
        return _sentence(f"{words}: {first}" if first else words), 2
    if isinstance(error, (ValueError, ImportError)) and _on_purpose(error):
        return _sentence(str(error)), 2
    if (own := _of_own_file(error)) is not None:
        return _sentence(own), 2
    if _ended_elsewhere(error):
        return _sentence(f"another process of this run ended; it says why itself ({first})"), 1
    return _sentence(_bug(error)), 70


def _sentence(words: str) -> str:
    words = plain(words)
    return f"psidiff: {words if len(words) <= _MOST else words[:_MOST] + ' ...'}"


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0]


def _usage(error: Any) -> str:
    """One line that says what was typed wrong; without any words, the help."""
    words = error.format_message()
    if type(error).__name__ == "NoArgsIsHelpError":
        return words
    cause = error.__cause__  # has the value, where the words lack it
    got = f", got {cause.errors()[0]['input']}" if hasattr(cause, "errors") else ""
    words = " ".join(words.split()).rstrip(".").replace(": Input should", ": it should")
    return _sentence(f"{words[:1].lower()}{words[1:]}{got}")


def _of_system(error: OSError) -> str:
    """What the system says, without its number."""
    number, words = error.errno, error.strerror
    if number is None or words is None:
        return _first_line(error)
    if number in (errno.ENOSPC, errno.EDQUOT) and words == os.strerror(number):
        return f"standard output or a file cannot be written: {words}"
    names = [str(name) for name in (error.filename, error.filename2) if name is not None]
    return f"{words}{': ' if names else ''}{' -> '.join(names)}"


def _out_of_memory(error: BaseException) -> bool:
    if isinstance(error, RuntimeError):
        from ..generate import out_of_memory

        return out_of_memory(error)
    return isinstance(error, MemoryError)


def _on_purpose(error: BaseException) -> bool:
    """Whether a `raise` of this package said it: a sentence for the user.

    The same type out of numpy, or out of int() in our own line, is a bug: somebody should have
    looked before.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return False
    code = trace.tb_frame.f_code
    ours = Path(code.co_filename).resolve().is_relative_to(_PACKAGE)
    return ours and code.co_code[trace.tb_lasti] == _RAISE


def _ended_elsewhere(error: BaseException) -> bool:
    """What a process hears when another one of torchrun's is gone."""
    many = int(os.environ.get("WORLD_SIZE") or 1) > 1
    return many and isinstance(error, RuntimeError) and any(w in str(error) for w in _OF_OTHERS)


def _of_own_file(error: BaseException) -> str | None:
    """What went wrong in a Python file that the user named, if it passed through one."""
    from ..registry import describe_error, imported_files

    passed = {frame.filename for frame in traceback.extract_tb(error.__traceback__)}
    file = next((name for name in imported_files() if name in passed), None)
    return file and f"{Path(file).name} failed: {describe_error(error, file)}"


def _bug(error: BaseException) -> str:
    """Say that it is one; the traceback goes into a file."""
    first = _first_line(error)[:200]
    last = traceback.extract_tb(error.__traceback__)[-1:]
    where = "".join(f" ({Path(frame.filename).name}, line {frame.lineno})" for frame in last)
    words = f"this is a bug: {type(error).__name__}{': ' if first else ''}{first}{where}"
    report = _report(error)
    try:
        handle, path = tempfile.mkstemp(prefix="psidiff-bug-", suffix=".txt")
        with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(report)
    except OSError:  # a full disk may be the reason
        print(plain(report, keep="\n"), file=sys.stderr)
        return f"{words}; the traceback is above: please report it"
    return f"{words}; the traceback is in {path}: please report it with that file"


def _report(error: BaseException) -> str:
    torch = sys.modules.get("torch")
    versions = [f"psidiff {__version__}", f"Python {platform.python_version()}"]
    versions += [f"torch {torch.__version__}"] if torch is not None else []
    about = f"{', '.join(versions)}, {platform.platform()}\n{sys.argv}\n\n"
    return about + "".join(traceback.format_exception(error))
