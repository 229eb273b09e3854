"""A recipe becomes a run folder: training with evaluations, samples and checkpoints."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import fields, is_dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from operator import attrgetter
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from ..checksums import damaged
from ..data.codec import Codec, load_codec
from ..data.images import grid, write_png
from ..data.sudoku import valid
from ..evaluation.nll import likelihood
from ..files import (
    advising,
    read_object,
    remove_parts,
    write_checked_text,
    write_object,
    write_whole,
)
from ..locks import Lock
from ..model import Model
from ..training import Processes, Trainer
from ..training.checkpoint import steps as saved_steps
from ..training.signals import Stopping
from .build import curriculum_of, model_of
from .datasets import Corpus, _shipped, corpus
from .recipe import ImageData, Recipe, TextData, TokenData
from .recipe_files import as_yaml, read_recipe, stored_recipe

_FIXED = (  # what a resumed run cannot change
    "data",
    "model",
    "prior",
    "schedule",
    "objective",
    "curriculum",
    "init",
    "train.seed",
    "train.batch_size",
    "train.micro_batch",
    "train.optimizer",
)


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
    try:
        named = [text for text in overrides if text.startswith("name=")]
        chosen = placed(read_recipe(recipe, named if resume else overrides))
        folder = out or Path("runs") / chosen.name
        with _alone_in(folder, group, resume, force):
            codec = None
            if resume:
                chosen, codec = _stored(folder, chosen.name, overrides)
            with shown(group.first) as progress:
                data = _in_turn(group, lambda: corpus(chosen.data, codec, progress.reading))
                before = group.told(lambda: _other_data(folder, data.content, data_changed))
                skip = _say_damage if skip_damaged else None
                return _train(chosen, data, folder, group, resume, skip, before, progress)
    finally:
        group.leave()


@contextmanager
def _alone_in(folder: Path, group: Processes, resume: bool, force: bool) -> Iterator[None]:
    """The first process holds the folder for all, if it is as it should be."""
    with ExitStack() as held:

        def take() -> None:
            if resume and not (folder / "config.yaml").is_file():
                raise ValueError(
                    f"{folder} holds no run to resume: there is no config.yaml in it"
                )
            if not folder.exists():
                held.callback(_remove_if_empty, folder)
            held.enter_context(Lock(folder / ".lock", "training", force))
            if not resume and (folder / "config.yaml").exists():
                raise ValueError(
                    f"{folder} holds a run: --resume continues it, --out names another folder"
                )
            for each in (folder, folder / "samples"):
                remove_parts(each)

        group.told(take)
        yield


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


def _other_data(folder: Path, content: str | None, allowed: bool) -> str | None:
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


def _say_damage(what: str) -> None:
    print(f"passed over: {what}", file=sys.stderr)


def _train(
    recipe: Recipe,
    data: Corpus,
    folder: Path,
    group: Processes,
    resume: bool,
    skip: Any,
    before: str | None,
    progress: Progress,
) -> int:
    model = model_of(recipe, data)
    stopping = Stopping(progress.stopping)
    report = Report(recipe, model, data, folder, group, progress, stopping)
    trainer = Trainer(
        model.denoiser,
        curriculum_of(recipe, model),
        data.train,
        recipe.train,
        folder,
        num_classes=data.num_classes or 0,
        group=group,
        tracker=recipe.tracker,
        on_log=progress.log,
        on_eval=report.evaluate,
        on_save=report.save,
        stopping=stopping,
    )
    begun = trainer.resume(skip) if resume else 0
    if begun > recipe.train.steps:
        raise ValueError(
            f"{folder} is at step {begun} already, past train.steps={recipe.train.steps}"
        )
    group.told(lambda: _note_run(folder, recipe, data, before))
    progress.start(recipe, model, data, folder, begun, group)
    finished = trainer.run()
    progress.end(folder, trainer.step, finished)
    return 0 if finished else 128 + stopping.signal


class Report:
    """What a run shows of itself: held-out NLL, samples, the model."""

    def __init__(
        self,
        recipe: Recipe,
        model: Model,
        data: Corpus,
        folder: Path,
        group: Processes,
        progress: Progress,
        stopping: Stopping,
    ) -> None:
        self.recipe, self.model, self.data = recipe, model, data
        self.folder, self.group = folder, group
        self.progress, self.stopping = progress, stopping

    def evaluate(self, step: int, denoiser: nn.Module) -> dict[str, Any]:
        """The held-out NLL in nats a token with its standard error; samples go into a file."""
        piece = min(self.recipe.train.piece, 64)
        count = self.recipe.eval.sequences or len(self.data.valid)
        self._going(step, f"held-out NLL of {count:,} sequences")
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
            on_batch=lambda done, of: self._going(step, f"held-out NLL, {done:,} of {of:,}"),
        ).nats_per_token
        known = found.to_dict()["error"]  # None: that of one sequence is unknown
        record: dict[str, Any] = {"valid_nll": found.value, "valid_nll_error": known}
        if self.recipe.eval.samples:
            record |= self._samples(step, self._as_model(denoiser))
        return record

    def save(self, step: int, denoiser: nn.Module) -> None:
        """The averaged model, which `psidiff.load(folder)` reads."""
        if self.group.first:
            self._as_model(denoiser).save(self.folder)

    def _going(self, step: int, what: str) -> None:
        """Say how far an evaluation is. One process leaves it here if a signal asked to; of
        many each would wait for the others, so they end it."""
        self.progress.show(f"step {step:,}: evaluating: {what}")
        if self.group.world == 1:
            self.stopping.check()

    def _as_model(self, denoiser: nn.Module) -> Model:
        return replace(self.model, denoiser=denoiser)

    def _samples(self, step: int, model: Model) -> dict[str, Any]:
        wanted, codec = self.recipe.eval, self.data.codec
        labels = None
        if model.num_classes is not None:
            labels = torch.arange(wanted.samples) % model.num_classes
        made = model.sample(
            wanted.samples,
            wanted.steps,
            "auto",  # eval.kappa, which is the model's own
            labels=labels,
            top_p=wanted.top_p,
            split=False,  # a sharded network needs all processes at every pass
            on_step=lambda i, *_: self._going(step, f"samples, step {i + 1:,}"),
        )
        if not self.group.first or codec is None:
            return {}
        folder = self.folder / "samples"
        folder.mkdir(exist_ok=True)
        path = folder / f"step-{step:08d}"
        if codec.kind == "image":
            columns = model.num_classes or 8
            scale = max(1, 64 // len(made.images[0]))
            picture = grid(made.images, columns, scale, gap=2 + scale)
            write_png(picture, path.with_suffix(".png"))
            return {"samples": str(path.with_suffix(".png").relative_to(self.folder))}
        line = "\n" + "-" * 40 + "\n"
        text = line.join(made.text) + "\n"
        write_whole(path.with_suffix(".txt"), text.encode("utf-8", "replace"))
        record: dict[str, Any] = {
            "samples": str(path.with_suffix(".txt").relative_to(self.folder))
        }
        if codec.kind == "puzzle":
            record["valid_grids"] = valid(made.tokens.cpu()).double().mean().item()
        return record


def _stored(folder: Path, name: str, overrides: Sequence[str]) -> tuple[Recipe, Codec | None]:
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
    data = recipe.data
    if isinstance(data, (ImageData, TokenData)) and data.path != "digits":
        return replace(recipe, data=replace(data, path=_whole_path(data.path)))
    if not isinstance(data, TextData):
        return recipe
    given = {"train": data.train, "valid": data.valid}
    if data.tokenizer.endswith(".json"):
        given["tokenizer"] = data.tokenizer
    found: dict[str, Any] = {
        k: _whole_path(v) for k, v in given.items() if v and _shipped(v) == v
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


def _note_run(folder: Path, recipe: Recipe, data: Corpus, data_before: str | None) -> None:
    """The recipe as it is now and what its tokens mean; run.json: what this start of the run
    was made with, after those before it."""
    before = _starts(folder)
    write_checked_text(folder / "config.yaml", as_yaml(recipe))
    if data.codec is not None:
        write_object(folder / "codec.json", data.codec.describe())
    start: dict[str, Any] = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["psidiff", *sys.argv[1:]]),
        "seed": recipe.train.seed,
        "processes": int(os.environ.get("WORLD_SIZE", "1")),
        "commit": commit_of(Path(__file__)),
        "python": platform.python_version(),
        "versions": {n: _version(n) for n in ("psidiff", "torch", "numpy", "tokenizers")},
        "machine": platform.machine(),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "data": data.content,
    }
    if data_before is not None:
        start["data_changed_from"] = data_before
    write_object(folder / "run.json", {"starts": [*before, start]}, indent=1)


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


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _in_turn(group: Processes, work: Any) -> Any:
    """The first process works, the others find the result in the cache."""
    made: list[Any] = []
    group.told(lambda: made.append(work()))
    return made[0] if made else work()
