"""Takeaways 2 and 3 on text whose distribution is known: what samplers lose against the truth.

    python experiments/known_truth.py --work DIR            everything, on one GPU
    python experiments/known_truth.py --work DIR --tiny     that it runs, on a CPU in a minute

The truth is an autoregressive network trained on books: 100 million tokens are drawn from it at
temperature 1, and two diffusion models learn from these alone, with the same network, steps and
rates. So the judge of their samples is the very distribution that they should have learnt. Each
stage is kept in DIR and is not made again; each cell is one line of DIR/known_truth.jsonl.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, replace
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cells import Cell, measure
from rich.console import Console

from psidiff.cli.progress import Progress
from psidiff.distributed import Processes
from psidiff.evaluation.metric_result import mean_of
from psidiff.evaluation.nll import likelihood
from psidiff.evaluation.scoring_lm import PsidiffScoringLM
from psidiff.evaluation.text_metrics import sample_entropy
from psidiff.experiment.build import build_curriculum, build_model
from psidiff.experiment.datasets import Corpus
from psidiff.experiment.recipe_files import read_recipe
from psidiff.experiment.train import train
from psidiff.files import write_atomic, writing
from psidiff.model import Model, load
from psidiff.training import Trainer
from psidiff.types import Rows

RULES = ("ancestral", "cap:.01", "rescale:.05", "rescale-released:.05", "loop:.02")
STUDENTS = {"mdlm": "books-mdlm", "duo++": "books-duo++"}
RATES = ("train.learning_rate=4e-3", "train.matrix_rate=0.02", "train.ema=0.999")


@dataclass(frozen=True)
class Size:
    """How much of everything; `tiny` only shows that it runs."""

    teacher_steps: int = 3500
    student_steps: int = 6000
    rows: int = 400_000
    held_out: int = 32_768
    drawn_at_once: int = 8192
    samples: int = 256
    steps: tuple[int, ...] = (32, 64, 128, 256, 512, 1024)
    long_steps: tuple[int, ...] = (2048, 4096)
    overrides: tuple[str, ...] = ()


TINY = Size(
    teacher_steps=20,
    student_steps=20,
    rows=300,
    held_out=64,
    drawn_at_once=100,
    samples=4,
    steps=(8, 16),
    long_steps=(32,),
    overrides=(
        *("model.hidden_size=32", "model.num_blocks=2", "model.num_heads=2"),
        *("train.batch_size=8", "train.warmup=5", "data.length=32", "train.precision=float32"),
    ),
)


@dataclass(frozen=True, eq=False)
class Drawn:
    """Rows of tokens in an array (N, L)."""

    tokens: np.ndarray

    @property
    def length(self) -> int:
        return self.tokens.shape[1]

    def __len__(self) -> int:
        return len(self.tokens)

    def rows(self, indices: torch.Tensor, generator: torch.Generator | None = None) -> Rows:
        return Rows(torch.from_numpy(self.tokens[indices.cpu().numpy()].astype(np.int64)))


class Experiment:
    """The stages, in a folder."""

    def __init__(self, work: Path, size: Size, train_text: str) -> None:
        self.work, self.size, self.train_text = work, size, train_text
        self.begun = time.perf_counter()
        work.mkdir(parents=True, exist_ok=True)

    def say(self, what: str) -> None:
        print(f"{time.perf_counter() - self.begun:6.0f} s  {what}", flush=True)

    def teacher(self) -> Model:
        """The truth: its 16-bit file, read as float32."""
        folder = self.work / "teacher"
        if not (folder / "model.safetensors").is_file():
            tokenizer = self.work / "tokenizer.json"
            shipped = files("psidiff.pretrained").joinpath("books", "codec.json").read_text()
            write_atomic(tokenizer, json.loads(shipped)["json"])
            run = self.work / "teacher-run"
            overrides = [
                f"data.train={self.train_text}/train.jsonl",
                f"data.valid={self.train_text}/valid.jsonl",
                *(f"data.tokenizer={tokenizer}", "data.vocab_size=null"),
                *("train.learning_rate=5e-3", "train.ema=0.999", "train.given=0"),
                *(f"train.steps={self.size.teacher_steps}", "eval.samples=0"),
                *(f"train.save_every={self.size.teacher_steps}", "eval.sequences=2048"),
                *(f"train.eval_every={self.size.teacher_steps}", "train.log_every=500"),
                *self.size.overrides,
            ]
            shown = Progress(Console(width=100))
            train("books-ar", overrides, run, False, "auto", lambda first: shown)
            load(run, device="cpu").save(folder, torch.float16)
        return load(folder)

    def drawn(self, name: str, first: int, count: int) -> Drawn:
        """Rows that the teacher says at temperature 1, in float32; row i depends on i alone."""
        path = self.work / f"{name}.npy"
        if not path.is_file():
            teacher = self.teacher()
            length = int(teacher.config.length)
            made = np.empty((count, length), dtype=np.uint16)
            for start in range(0, count, self.size.drawn_at_once):
                here = min(self.size.drawn_at_once, count - start)
                made[start : start + here] = (
                    teacher.sample(here, seed=0, batch_size=here, first_index=first + start)
                    .tokens.cpu()
                    .numpy()
                )
            with writing(path) as file:
                np.save(file, made)
            self.say(f"{count * length:,} tokens drawn for {name}")
        return Drawn(np.load(path, mmap_mode="r"))

    def sets(self) -> tuple[Drawn, Drawn]:
        held_out = self.drawn("held_out", 0, self.size.held_out)
        return self.drawn("train", self.size.held_out, self.size.rows), held_out

    def student(self, name: str) -> Path:
        """A diffusion model that has seen nothing but the teacher's rows."""
        folder = self.work / name
        if not (folder / "model.safetensors").is_file():
            train, held_out = self.sets()
            codec = self.teacher().codec
            recipe = read_recipe(
                STUDENTS[name],
                [
                    *RATES,
                    *("train.given=0", f"train.steps={self.size.student_steps}"),
                    *(f"train.save_every={self.size.student_steps}", "train.log_every=500"),
                    *self.size.overrides,
                ],
            )
            corpus = Corpus(train, held_out, codec, codec.vocab_size)
            model, group = build_model(recipe, corpus), Processes.join()
            model.denoiser.to(group.device)
            run = self.work / f"{name}-run"
            run.mkdir(exist_ok=True)
            trainer = Trainer(
                model.denoiser,
                build_curriculum(recipe, model),
                train,
                recipe.train,
                run,
                group=group,
                on_log=lambda r: self.say(f"{name} {r['step']}: {r['loss']:.4f}"),
            )
            trainer.run()
            averaged = replace(model, denoiser=trainer.averaged())
            averaged.save(folder, torch.float16)
        return folder

    def bound(self, cell: Cell) -> Cell:
        """The NELBO of the teacher's held-out rows beside their entropy."""
        _, held_out = self.sets()
        nats = -self._judge().log_prob(torch.from_numpy(held_out.tokens.astype(np.int64)))
        entropy = mean_of("entropy", (nats / held_out.length).tolist())
        model = load(self.student(cell["model"]))
        group, known = Processes.join(), (model.denoiser, model.prior, model.schedule)
        found = likelihood(*known, held_out, batch_size=64, device=group.device, group=group)
        return {
            "nelbo": found.nats_per_token.value,
            "nelbo_error": found.nats_per_token.stderr,
            "entropy_of_truth": entropy.value,
            "entropy_of_truth_error": entropy.stderr,
            "rows": len(held_out),
        }

    def sampled(self, models: dict[str, Model], cell: Cell) -> Cell:
        """-log p of samples by the truth, and the entropy within each of them."""
        model = models[cell["model"]]
        begun = time.perf_counter()
        options: dict[str, Any] = {"temperature": cell["temperature"]}
        if cell["temperature"] == 1:
            options = {}
        made = model.sample(
            self.size.samples,
            cell["steps"],
            cell["rule"],
            None if cell["top_p"] == 1 else cell["top_p"],
            batch_size=self.size.samples,
            **options,
        )
        seconds = time.perf_counter() - begun
        return self._judged(cell, made.tokens, {"nfe": made.nfe, "sampling_seconds": seconds})

    def real(self, cell: Cell) -> Cell:
        """The same numbers of the truth's own rows: what a perfect sampler would get."""
        _, held_out = self.sets()
        rows = torch.from_numpy(held_out.tokens[: 16 * self.size.samples].astype(np.int64))
        return self._judged(cell, rows, {})

    def _judged(self, cell: Cell, tokens: torch.Tensor, more: Cell) -> Cell:
        tokens = tokens.cpu()
        kept = self.work / "tokens"
        kept.mkdir(exist_ok=True)
        np.save(kept / f"{'_'.join(map(str, cell.values()))}.npy", tokens.numpy().astype("u2"))
        nats = -self._judge().log_prob(tokens) / tokens.shape[1]
        nll, entropy = mean_of("nll", nats.tolist()), sample_entropy(tokens)
        return {
            "nll": nll.value,
            "nll_error": nll.stderr,
            "sample_entropy": entropy.value,
            "sample_entropy_error": entropy.stderr,
            "samples": len(tokens),
            **more,
        }

    def _judge(self) -> PsidiffScoringLM:
        if not hasattr(self, "_kept_judge"):
            self._kept_judge = PsidiffScoringLM(self.teacher(), 256)
        return self._kept_judge

    def cells(self) -> list[Cell]:
        """In the order of their worth: whoever is cut off has the main rows."""
        size = self.size
        names = ("model", "rule", "steps", "top_p", "temperature")
        main = [
            (m, r, n, p, 1)
            for p in (1, 0.9)
            for n in size.steps
            for r in RULES
            for m in STUDENTS
        ]
        long = [
            (m, r, n, p, 1)
            for n in size.long_steps
            for p in (0.9, 1)
            for r in ("ancestral", "rescale-released:.05", "cap:.01")
            for m in STUDENTS
        ]
        knobs = [
            (m, r, n, p, 1)
            for n in size.steps[1::2]
            for p in (0.95, 0.98, 0.85)
            for r in RULES
            for m in STUDENTS
        ]
        cold = [
            (m, r, n, 1, tau)
            for n in size.steps[1::2]
            for tau in (0.9, 0.95)
            for r in RULES[:2]
            for m in STUDENTS
        ]
        return [dict(zip(names, cell, strict=True)) for cell in (*main, *long, *knobs, *cold)]

    def run(self) -> None:
        self.say("the teacher")
        self.teacher()
        self.sets()
        for name in STUDENTS:
            self.say(name)
            self.student(name)
        keep = partial(measure, "known_truth", folder=self.work)
        keep([{"bound": True, "model": name} for name in STUDENTS], self.bound)
        keep([{"model": "truth"}], self.real)
        low = torch.bfloat16 if torch.cuda.is_available() else torch.float32
        models = {name: load(self.student(name), dtype=low) for name in STUDENTS}
        if torch.cuda.is_available():
            models = {name: model.compile() for name, model in models.items()}
        keep(self.cells(), partial(self.sampled, models))
        self.say("done")


def main() -> None:
    read = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    read.add_argument("--work", type=Path, required=True, help="where everything is kept")
    read.add_argument("--text", default="books.tar.xz", help="the archive of the books")
    read.add_argument("--tiny", action="store_true", help="only show that it runs")
    asked = read.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    size = TINY if asked.tiny else Size()
    Experiment(asked.work, size, asked.text).run()


if __name__ == "__main__":
    main()
