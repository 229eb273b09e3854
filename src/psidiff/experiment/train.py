"""A recipe becomes a run folder: training with evaluations, samples and checkpoints."""

from __future__ import annotations

import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from datetime import UTC, datetime
from functools import cached_property, partial
from importlib.metadata import version
from operator import attrgetter
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from .. import __version__
from ..checksums import damaged
from ..data.codec import Codec, load_codec
from ..data.images import grid, write_png
from ..data.puzzle import Puzzle
from ..evaluation.nll import likelihood
from ..files import (
    advising,
    check_plain,
    read_object,
    remove_parts,
    write_atomic,
    write_checked_text,
    write_object,
)
from ..locks import Lock
from ..model import Model
from ..training import Processes, Trainer
from ..training.checkpoint import steps as saved_steps
from ..training.signals import StopSignal
from .build import build_curriculum, build_model
from .datasets import Corpus, corpus, shipped_text
from .recipe import ImageData, Recipe, TextData, TokenData
from .recipe_files import as_yaml, read_recipe, stored_recipe

_FREE = ("name", "train", "eval", "tracker")  # what a resumed run can change, but for these
_FIXED = [field.name for field in fields(Recipe) if field.name not in _FREE]
_FIXED += [f"train.{name}" for name in ("seed", "batch_size", "micro_batch", "optimizer")]


@runtime_checkable
class Progress(Protocol):
    """What shows a run while it goes on."""

    def reading(self, documents: int, tokens: int) -> None: ...
    def start(
        self, recipe: Recipe, model: Model, data: Corpus, folder: Path, begun: int, group: Any
    ) -> None: ...
    def log(self, record: dict[str, Any]) -> None: ...
    def show(self, text: str) -> None: ...
    def stopping(self) -> None: ...
    def end(self, folder: Path, step: int, finished: bool) -> None: ...


def train(
    recipe: str,
    overrides: Sequence[str],
    out: Path | None,
    resume: bool,
    device: str,
    shown: Callable[[bool], AbstractContextManager[Progress]],
    *,
    force: bool = False,
    skip_damaged: bool = False,
    data_changed: bool = False,
) -> int:
    """Train, or go on training: 0, or 128 + the signal that stopped it before the end.

    shown: makes what shows the run; its argument is whether this process is the first.
    force: take the folder from an owner that cannot be asked. skip_damaged, data_changed: go on
    from the last checkpoint that is whole, and though the data are others.
    """
    group = Processes.join(device)
    with ExitStack() as held:
        held.callback(group.leave)
        named = [text for text in overrides if text.startswith("name=")]
        chosen, codec = placed(read_recipe(recipe, named if resume else overrides)), None
        folder = out or Path("runs") / chosen.name
        group.told(lambda: _lock_folder(folder, resume, force, held))
        if resume:
            chosen, codec = _resumed_recipe(folder, chosen.name, overrides)
        progress = held.enter_context(shown(group.first))
        data = _in_order(group, lambda: corpus(chosen.data, codec, progress.reading))
        before = group.told(lambda: _data_before(folder, data.content, data_changed))
        run = Run(chosen, data, folder, group, progress)
        return run.train(resume, skip_damaged, before)


def _lock_folder(folder: Path, resume: bool, force: bool, held: ExitStack) -> None:
    """The first process holds the folder for all, if it is as it should be."""
    if resume and not (folder / "config.yaml").is_file():
        raise ValueError(f"{folder} holds no run to resume: there is no config.yaml in it")
    if not folder.exists():
        held.callback(_remove_if_empty, folder)
    for each in (folder, folder / "samples"):
        check_plain(each)
    held.enter_context(Lock(folder / ".lock", "training", force))
    if not resume and (folder / "config.yaml").exists():
        raise ValueError(
            f"{folder} holds a run: --resume continues it, --out names another folder"
        )
    for each in (folder, folder / "samples"):
        remove_parts(each)


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


def _data_before(folder: Path, content: str | None, allowed: bool) -> str | None:
    """What stands for the data that the run was trained on, if these are others."""
    known = [start["data"] for start in _starts(folder) if start.get("data")]
    if not known or content in (None, known[-1]):
        return None
    if not allowed:
        raise ValueError(
            f"the data of the recipe have changed since {folder} was trained on them: bring "
            "them back, or add --data-changed to go on with what they are now"
        )
    return known[-1]


@dataclass(frozen=True)
class Run:
    """A run while it goes on: it trains, and shows held-out NLL, samples and the model."""

    recipe: Recipe
    data: Corpus
    folder: Path
    group: Processes
    progress: Progress

    @cached_property
    def model(self) -> Model:
        return build_model(self.recipe, self.data)

    @cached_property
    def stopping(self) -> StopSignal:
        return StopSignal(self.progress.stopping)

    def train(self, resume: bool, skip_damaged: bool, data_before: str | None) -> int:
        """0, or 128 + the signal that stopped it; data_before: as in `_data_before`."""
        recipe, folder, progress = self.recipe, self.folder, self.progress
        trainer = Trainer(
            self.model.denoiser,
            build_curriculum(recipe, self.model),
            self.data.train,
            recipe.train,
            folder,
            num_classes=self.data.num_classes or 0,
            group=self.group,
            tracker=recipe.tracker,
            on_log=progress.log,
            on_eval=self.evaluate,
            on_save=self.save,
            stopping=self.stopping,
        )
        skip = partial(print, "passed over:", file=sys.stderr) if skip_damaged else None
        begun = trainer.resume(skip) if resume else 0
        if begun > recipe.train.steps:
            raise ValueError(
                f"{folder} is at step {begun} already, past train.steps={recipe.train.steps}"
            )
        self.group.told(lambda: self._note_start(data_before))
        progress.start(recipe, self.model, self.data, folder, begun, self.group)
        finished = trainer.run()
        progress.end(folder, trainer.step, finished)
        return 0 if finished else 128 + self.stopping.signal

    def _note_start(self, data_before: str | None) -> None:
        """The recipe as it is now and what its tokens mean; run.json: what this start of the
        run was made with, after those before it."""
        folder, codec, before = self.folder, self.data.codec, _starts(self.folder)
        write_checked_text(folder / "config.yaml", as_yaml(self.recipe))
        if codec is not None:
            write_object(folder / "codec.json", codec.describe())
        start: dict[str, Any] = {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": shlex.join(["psidiff", *sys.argv[1:]]),
            "seed": self.recipe.train.seed,
            "processes": self.group.world,
            "commit": commit_of(Path(__file__)),
            "python": platform.python_version(),
            "versions": {"psidiff": __version__}
            | {package: version(package) for package in ("torch", "numpy", "tokenizers")},
            "machine": platform.machine(),
            "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            "data": self.data.content,
        }
        if data_before is not None:
            start["data_changed_from"] = data_before
        write_object(folder / "run.json", {"starts": [*before, start]}, indent=1)

    def evaluate(self, step: int, denoiser: nn.Module) -> dict[str, Any]:
        """The held-out NLL in nats a token with its standard error; samples go into a file."""
        piece = min(self.recipe.train.piece, 64)
        count = self.recipe.eval.sequences or len(self.data.valid)
        self._progress(step, f"held-out NLL of {count:,} sequences")
        found = likelihood(
            denoiser,
            self.model.prior,
            self.model.schedule,
            self.data.valid,
            sequences=count,
            batch_size=piece,
            device=self.group.device,
            bos_id=self.model.config.bos_id,
            group=self.group,
            on_batch=lambda done, of: self._progress(step, f"held-out NLL, {done:,} of {of:,}"),
        ).nats_per_token
        known = found.to_dict()["error"]  # None: that of one sequence is unknown
        record: dict[str, Any] = {"valid_nll": found.value, "valid_nll_error": known}
        if self.recipe.eval.samples:
            record |= self._samples(step, replace(self.model, denoiser=denoiser))
        return record

    def save(self, step: int, denoiser: nn.Module) -> None:
        """The averaged model, which `psidiff.load(folder)` reads."""
        if self.group.first:
            replace(self.model, denoiser=denoiser).save(self.folder)

    def _progress(self, step: int, what: str) -> None:
        """Say how far an evaluation is. One process leaves it here if a signal asked to; of
        many each would wait for the others, so they end it."""
        self.progress.show(f"step {step:,}: evaluating: {what}")
        if self.group.world == 1:
            self.stopping.check()

    def _samples(self, step: int, model: Model) -> dict[str, Any]:
        wanted, codec = self.recipe.eval, self.data.codec
        classes = model.num_classes
        labels = None if classes is None else torch.arange(wanted.samples) % classes
        made = model.sample(
            wanted.samples,
            wanted.steps,
            "auto",  # eval.kappa, which is the model's own
            labels=labels,
            top_p=wanted.top_p,
            split=False,  # a sharded network needs all processes at every pass
            on_step=lambda i, *_: self._progress(step, f"samples, step {i + 1:,}"),
        )
        if not self.group.first or codec is None:
            return {}
        suffix = "png" if codec.kind == "image" else "txt"
        path = self.folder / "samples" / f"step-{step:08d}.{suffix}"
        path.parent.mkdir(exist_ok=True)
        record: dict[str, Any] = {"samples": str(path.relative_to(self.folder))}
        if codec.kind == "image":
            scale = max(1, 64 // len(made.images[0]))
            write_png(grid(made.images, classes or 8, scale, gap=2 + scale), path)
            return record
        text = ("\n" + "-" * 40 + "\n").join(made.text) + "\n"
        write_atomic(path, text.encode("utf-8", "replace"))
        if isinstance(codec, Puzzle):
            right = codec.valid(made.tokens.cpu())
            record["valid_puzzles"] = right.double().mean().item()
        return record


def _resumed_recipe(
    folder: Path, name: str, overrides: Sequence[str]
) -> tuple[Recipe, Codec | None]:
    """The recipe that a folder's run was begun with, and its codec."""
    before = stored_recipe(folder)
    if before.name != name:
        raise ValueError(f"{folder} holds a run of {before.name!r}, not of {name!r}")
    recipe = placed(stored_recipe(folder, overrides))
    if key := _changed(placed(before), recipe):
        raise ValueError(f"{key} cannot change in a run that is resumed")
    saved = saved_steps(folder / "checkpoints")
    if not saved:
        print(f"{folder} has no checkpoint yet: the run begins again", file=sys.stderr)
    stored = folder / "codec.json"
    with advising("delete the file, and it is made again from the data"):
        return recipe, load_codec(stored) if stored.is_file() else None


def _changed(then: Recipe, now: Recipe) -> str | None:
    """The first key that differs of those that cannot change."""
    for key in _FIXED:
        old, new = attrgetter(key)(then), attrgetter(key)(now)
        if old == new:
            continue
        if not is_dataclass(old) or type(old) is not type(new):
            return key
        names = [field.name for field in fields(old)]
        return next(f"{key}.{n}" for n in names if getattr(old, n) != getattr(new, n))
    return None


def placed(recipe: Recipe) -> Recipe:
    """A recipe whose data are found from any folder: what is here gets its whole path.

    Names of the package and of the Hub stay, and so does what only PSIDIFF_DATA has.
    """
    data, given = recipe.data, dict[str, str | None]()
    if isinstance(data, (ImageData, TokenData)) and data.path != "digits":
        given = {"path": data.path}
    elif isinstance(data, TextData):
        given = {"train": data.train, "valid": data.valid}
        if data.tokenizer.endswith(".json"):
            given["tokenizer"] = data.tokenizer
    found: dict[str, Any] = {
        name: _whole_path(source)
        for name, source in given.items()
        if source and shipped_text(source) == source
    }
    return replace(recipe, data=replace(data, **found))


def _whole_path(source: str) -> str:
    """With the folder we are in, if that has it: a file, a folder, or a file in an archive."""
    path = Path(source).absolute()
    here = path.exists() or any(parent.is_file() for parent in path.parents)
    return str(path) if here else source


def _starts(folder: Path) -> list[dict[str, Any]]:
    """What each start of a run was made with."""
    path = folder / "run.json"
    with advising(
        "delete the file, and the run goes on without knowing how it was begun, nor whether "
        "its data are the same"
    ):
        starts = read_object(path).get("starts") if path.is_file() else []
        if not isinstance(starts, list) or not all(isinstance(each, dict) for each in starts):
            raise damaged(path, "it lists no starts of a run")
    return starts


def commit_of(file: Path) -> str | None:
    """The commit that is checked out where git tracks the file; None: it does not, as in an
    environment inside another project's checkout, or there is no git."""
    git = ["git", "-C", str(file.parent)]
    try:
        for command in (["ls-files", "--error-unmatch", file.name], ["rev-parse", "HEAD"]):
            done = subprocess.run([*git, *command], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _in_order(group: Processes, work: Any) -> Any:
    """The first process works, the others find the result in the cache."""
    made: list[Any] = []
    group.told(lambda: made.append(work()))
    return made[0] if made else work()
