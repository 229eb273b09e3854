"""The log of a run: one JSON object a line, always; TensorBoard or wandb beside it.

And what stands in it of a run's costs: time and memory.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from ..checksums import damaged
from ..files import (
    advising,
    append_json_line,
    naming_what_cannot_be_written,
    read_json_lines,
    writing,
)
from ..types import check_choice

DAMAGED_LOG = (
    "delete the file, and the run goes on without its past, or keep the lines that are whole "
    "with --resume --skip-damaged"
)
TRACKERS = ("auto", "none", "tensorboard", "wandb")


class Log:
    """The log of a run: appends records to log.jsonl in its folder.

    Args:
        folder: of the run.
        resumed_at: the step at which it goes on; what `past` holds of later ones is dropped.
        tracker: "tensorboard", "wandb", "none", or "auto": TensorBoard if it is installed.
        past: what `read_log` read before.

    Example:
        >>> from pathlib import Path
        >>> from psidiff.training import Log, read_log
        >>> log = Log(Path("."), tracker="none")
        >>> log.write({"step": 10, "loss": 2.5})
        >>> log.close()
        >>> read_log(Path("log.jsonl"))
        [{'step': 10, 'loss': 2.5}]
    """

    def __init__(
        self,
        folder: Path,
        resumed_at: int = 0,
        tracker: str = "auto",
        past: Iterable[dict[str, Any]] = (),
    ) -> None:
        self.path: Path = folder / "log.jsonl"
        with writing(self.path) as file:
            for record in past:
                if record["step"] <= resumed_at:
                    append_json_line(file, record)
        self._file = self.path.open("ab")
        self._tracker = _tracker(tracker, folder, resumed_at)

    def write(self, record: dict[str, Any]) -> None:
        with naming_what_cannot_be_written(self.path):
            append_json_line(self._file, record)
        if self._tracker is not None:
            self._tracker(record)

    def close(self) -> None:
        with suppress(OSError):  # what a full disk did not take was said when it was written
            self._file.close()


def read_log(path: Path, skip: Callable[[str], None] | None = None) -> list[dict[str, Any]]:
    r"""Read the records of a log; a last line that was cut off is left out.

    Args:
        path: of log.jsonl.
        skip: pass over damaged lines, and call this with what is wrong with each; None: raise.

    Returns:
        The records, by line.

    Raises:
        ValueError: if a line is damaged and skip is None.

    Example:
        >>> from pathlib import Path
        >>> from psidiff.training import read_log
        >>> _ = Path("few.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"ste')
        >>> read_log(Path("few.jsonl"))
        [{'step': 1}, {'step': 2}]
    """
    with advising(DAMAGED_LOG):
        return read_json_lines(path, check=_check_step, skip=skip)


def _check_step(place: str, record: dict[str, Any]) -> None:
    step = record.get("step")
    if type(step) is not int or step < 0:
        raise damaged(place, "it names no step")


def check_tracker(name: str) -> str:
    """A tracker that exists and, unless it is "auto", is installed."""
    check_choice("tracker", name, TRACKERS)
    if name in ("tensorboard", "wandb") and find_spec(name) is None:
        raise ValueError(f"tracker is {name}, which is not installed: pip install {name}")
    return name


def _tracker(name: str, folder: Path, resumed_at: int) -> Any:
    if name == "auto":
        name = "tensorboard" if find_spec("tensorboard") else "none"
    if name == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        board = SummaryWriter(str(folder / "tensorboard"), purge_step=resumed_at)

        def to_board(record: dict[str, Any]) -> None:
            for key, value in _numbers(record).items():
                board.add_scalar(key, value, record["step"])
            board.flush()

        return to_board
    if name == "wandb":
        import wandb  # type: ignore[import-not-found]

        run = wandb.init(dir=str(folder), name=folder.name, id=folder.name, resume="allow")
        return lambda record: run.log(_numbers(record), step=record["step"])
    return None


def _numbers(record: dict[str, Any]) -> dict[str, float]:
    return {k: v for k, v in record.items() if k != "step" and isinstance(v, (int, float))}


class StepTimer:
    """Steps and seconds since it was last looked at, but for evaluating and saving."""

    def __init__(self, step: int) -> None:
        self.step, self.started = step, time.monotonic()

    def lap(self, step: int) -> tuple[int, float]:
        now = time.monotonic()
        passed = step - self.step, now - self.started
        self.step = step
        self.started = now
        return passed

    @contextmanager
    def stopped(self) -> Iterator[None]:
        paused = time.monotonic()
        yield
        self.started += time.monotonic() - paused


def memory_gib(device: torch.device) -> float | None:
    """The most memory that was in use, in GiB; None: this system does not say."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    try:
        import resource
    except ImportError:  # Windows
        return None
    unit = 1 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
