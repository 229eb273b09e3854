"""`psidiff train`: a recipe becomes a run folder, watched while it grows."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console
from torch import nn

from ..data.codec import codec_from
from ..data.images import grid, write_png
from ..data.puzzles import valid
from ..model import FORMAT_VERSION, Model
from ..training import Processes, Trainer
from ..training.checkpoint import steps as saved_steps
from ..training.validation import validate
from .build import bound_of, curriculum_of, model_of
from .config import override
from .corpus import Corpus, _shipped, corpus
from .progress import Progress
from .recipe import ImageData, Recipe, TextData, as_recipe, as_yaml, read_recipe

_FIXED = ("name", "data", "model", "prior", "objective")  # what a resumed run cannot change


def run(
    console: Console,
    recipe: str,
    overrides: Sequence[str],
    out: Path | None,
    resume: bool,
    device: str,
) -> int:
    """Train, or go on training: 0, or 128 + the signal that stopped it before the end."""
    group = Processes.join(device)
    try:
        chosen = placed(read_recipe(recipe, overrides))
        folder = out or Path("runs") / chosen.name
        codec = None
        if resume:
            chosen, codec = _stored(folder, chosen.name, overrides)
        elif (folder / "config.yaml").exists():
            raise ValueError(
                f"{folder} holds a run: --resume continues it, --out names another folder"
            )
        with Progress(console if group.first else Console(quiet=True)) as progress:
            data = _in_turn(group, lambda: corpus(chosen.data, codec, progress.reading))
            return _train(chosen, data, folder, group, resume, progress)
    finally:
        group.leave()


def _train(
    recipe: Recipe, data: Corpus, folder: Path, group: Processes, resume: bool, progress: Any
) -> int:
    model = model_of(recipe, data)
    report = Report(recipe, model, data, folder, group)
    if group.first:
        folder.mkdir(parents=True, exist_ok=True)
        if not resume:
            (folder / "config.yaml").write_text(as_yaml(recipe), encoding="utf-8")
            if data.codec is not None:
                described = json.dumps(data.codec.describe())
                (folder / "codec.json").write_text(described, encoding="utf-8")
        _note_run(folder, recipe)
    group.wait()
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
    )
    begun = trainer.resume() if resume else 0
    progress.start(recipe, model, data, folder, begun, group)
    finished = trainer.run()
    progress.end(folder, trainer.step, finished)
    return 0 if finished else 128 + trainer.stopping.signal


class Report:
    """What a run shows of itself: held-out NLL, samples, the model."""

    def __init__(
        self, recipe: Recipe, model: Model, data: Corpus, folder: Path, group: Processes
    ) -> None:
        self.recipe, self.model, self.data = recipe, model, data
        self.folder, self.group = folder, group
        self.bound = bound_of(model)

    def evaluate(self, step: int, denoiser: nn.Module) -> dict[str, Any]:
        """The held-out NLL in nats a token with its standard error; samples go into a file."""
        piece = min(self.recipe.train.piece, 64)
        count = self.recipe.eval.sequences
        nll, error, _ = validate(
            self.bound, denoiser, self.data.valid, count, piece, group=self.group
        )
        record: dict[str, Any] = {"valid_nll": nll, "valid_nll_error": error}
        if self.recipe.eval.samples:
            record |= self._samples(step, self._as_model(denoiser))
        return record

    def save(self, step: int, denoiser: nn.Module) -> None:
        """The averaged model, which `psidiff.load(folder)` reads."""
        if self.group.first:
            self._as_model(denoiser).save(self.folder)

    def _as_model(self, denoiser: nn.Module) -> Model:
        return replace(self.model, denoiser=denoiser)

    def _samples(self, step: int, model: Model) -> dict[str, Any]:
        wanted, codec = self.recipe.eval, self.data.codec
        labels = None
        if self.data.num_classes is not None:
            labels = torch.arange(wanted.samples) % self.data.num_classes
        made = model.sample(
            wanted.samples,
            wanted.steps,
            wanted.kappa,
            labels=labels,
            top_p=wanted.top_p,
            split=False,  # a sharded network needs all processes at every pass
        )
        if not self.group.first or codec is None:
            return {}
        folder = self.folder / "samples"
        folder.mkdir(exist_ok=True)
        path = folder / f"step-{step:08d}"
        if codec.kind == "image":
            columns = self.data.num_classes or 8
            scale = max(1, 64 // codec.height)
            picture = grid(made.images, columns, scale, gap=2 + scale)
            write_png(picture, path.with_suffix(".png"))
            return {"samples": str(path.with_suffix(".png").relative_to(self.folder))}
        line = "\n" + "-" * 40 + "\n"
        path.with_suffix(".txt").write_text(line.join(made.text) + "\n", encoding="utf-8")
        record: dict[str, Any] = {
            "samples": str(path.with_suffix(".txt").relative_to(self.folder))
        }
        if codec.kind == "puzzle":
            record["valid_grids"] = valid(made.tokens.cpu()).double().mean().item()
        return record


def _stored(folder: Path, name: str, overrides: Sequence[str]) -> tuple[Recipe, Any]:
    """The recipe that a folder's run was begun with, and its codec."""
    path = folder / "config.yaml"
    if not path.is_file():
        raise ValueError(f"{folder} holds no run to resume: there is no config.yaml in it")
    before = yaml.safe_load(path.read_text(encoding="utf-8"))
    if before["name"] != name:
        raise ValueError(f"{folder} holds a run of {before['name']!r}, not of {name!r}")
    for assignment in overrides:
        section = assignment.split("=")[0].split(".")[0]
        key = assignment.split("=")[0]
        if section in _FIXED or key in ("train.seed", "train.batch_size", "train.micro_batch"):
            now, then = as_recipe(override(before, [assignment])), as_recipe(before)
            if placed(now) != placed(then):
                raise ValueError(f"{key} cannot change in a run that is resumed")
    recipe = placed(as_recipe(override(before, overrides)))
    saved = saved_steps(folder / "checkpoints")
    if not saved:
        print(f"{folder} has no checkpoint yet: the run begins again", file=sys.stderr)
    elif saved[-1] > recipe.train.steps:
        raise ValueError(
            f"{folder} is at step {saved[-1]} already, past train.steps={recipe.train.steps}"
        )
    codec = folder / "codec.json"
    known = json.loads(codec.read_text(encoding="utf-8")) if codec.is_file() else None
    return recipe, known and codec_from(known)


def placed(recipe: Recipe) -> Recipe:
    """A recipe whose data are found from any folder: what is here gets its whole path.

    Names of the package and of the Hub stay, and so does what only PSIDIFF_DATA has.
    """
    data = recipe.data
    if isinstance(data, ImageData) and data.path != "digits":
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


def _note_run(folder: Path, recipe: Recipe) -> None:
    """run.json: what this start of the run was made with, after those before it."""
    path = folder / "run.json"
    before = json.loads(path.read_text(encoding="utf-8"))["starts"] if path.is_file() else []
    start = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["psidiff", *sys.argv[1:]]),
        "seed": recipe.train.seed,
        "processes": int(os.environ.get("WORLD_SIZE", "1")),
        "commit": _commit(),
        "python": platform.python_version(),
        "versions": {n: _version(n) for n in ("psidiff", "torch", "numpy", "tokenizers")},
        "machine": platform.machine(),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }
    text = json.dumps({"format_version": FORMAT_VERSION, "starts": [*before, start]}, indent=1)
    path.write_text(text, encoding="utf-8")


def _commit() -> str | None:
    """The commit of the sources, if they are a checkout."""
    here = Path(__file__).parent
    asked = subprocess.run(
        ["git", "-C", str(here), "rev-parse", "HEAD"], capture_output=True, text=True
    )
    return asked.stdout.strip() if asked.returncode == 0 else None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _in_turn(group: Processes, work: Any) -> Any:
    """The first process works, the others find the result in the cache."""
    made = work() if group.first else None
    group.wait()
    return made if group.first else work()
