"""The log of a run: one JSON object a line, always; TensorBoard or wandb beside it."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..files import write_whole

TRACKERS = ("auto", "none", "tensorboard", "wandb")


class Log:
    """Appends records to log.jsonl. Resumed at a step, it forgets what came after it.

    tracker "auto": TensorBoard if it is installed.
    """

    def __init__(self, folder: Path, resumed_at: int = 0, tracker: str = "auto") -> None:
        self.path = folder / "log.jsonl"
        kept = [r for r in read_log(self.path) if r["step"] <= resumed_at and resumed_at]
        write_whole(self.path, "".join(json.dumps(record) + "\n" for record in kept))
        self._file = self.path.open("a", encoding="utf-8")
        self._tracker = _tracker(tracker, folder, resumed_at)

    def write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        if self._tracker is not None:
            self._tracker(record)

    def close(self) -> None:
        self._file.close()


def read_log(path: Path) -> list[dict[str, Any]]:
    """All records; a last line that was cut off is left out."""
    if not path.is_file():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]
    return [_record(line, f"line {number} of {path}") for number, line in enumerate(lines, 1)]


def _record(line: bytes, place: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{place} is damaged: {error}") from error
    if not isinstance(record, dict) or "step" not in record:
        raise ValueError(f"{place} is damaged: it names no step")
    return record


def check_tracker(name: str) -> str:
    """A tracker that exists and, unless it is "auto", is installed."""
    if name not in TRACKERS:
        raise ValueError(f"tracker must be one of {', '.join(TRACKERS)}, got {name!r}")
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
