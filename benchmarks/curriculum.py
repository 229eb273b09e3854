"""Dense and sparse curricula at equal steps: differences of held-out NLL with intervals.

python benchmarks/curriculum.py --out FILE [--data books.tar.xz] [--steps 3000] [--workers 6]

27 characters (text8's folding) of the books; `none` is the exact NELBO from the start,
`released-2` the released code's rule (z_t is the clean token whenever that is among the kept).
Every run of a seed sees the same rows, and all are judged on the same random numbers.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor

from psidiff.evaluation.nll import likelihood
from psidiff.experiment.build import build_model, objective_of
from psidiff.experiment.datasets import corpus
from psidiff.experiment.recipe import Recipe
from psidiff.experiment.recipe_files import read_recipe
from psidiff.training import Batch, Curriculum, Phase, Processes, RelaxedNelbo, Trainer

KINDS = ("none", "dense", "1", "2", "3", "5", "released-2")
K = 27


@dataclass(frozen=True)
class Released(RelaxedNelbo):
    """z_t = x whenever x is kept, as the released code has it; ours is the argmax."""

    def relax(
        self, batch: Batch, gamma: Tensor, generator: Generator | None = None
    ) -> tuple[Any, Any]:
        soft, z = super().relax(batch, gamma, generator)
        kept = (soft.ids == batch.tokens[..., None]).any(-1)
        z = torch.where(kept, batch.tokens, z)
        return soft._replace(hard=z), z


def recipe_of(data: str, steps: int, batch: int, seed: int) -> Recipe:
    return read_recipe(
        "books-mdlm",
        [
            f"data.train={data}/train.jsonl",
            f"data.valid={data}/valid.jsonl",
            "data.tokenizer=text8",
            "data.vocab_size=null",
            "data.length=256",
            "model.hidden_size=256",
            "model.num_heads=8",
            "model.time_conditioning=true",
            "prior=uniform",
            f"train.steps={steps}",
            f"train.batch_size={batch}",
            f"train.seed={seed}",
            "train.given=0",
            "train.log_every=100",
            "train.save_every=1000000",
        ],
    )


def run(job: tuple[str, int, dict[str, Any]]) -> dict[str, Any]:
    kind, seed, options = job
    torch.set_num_threads(2)
    recipe = recipe_of(options["data"], options["steps"], options["batch"], seed)
    data = corpus(recipe.data)
    model = build_model(recipe, data)
    exact = objective_of(recipe, model)
    half = options["steps"] // 2
    phases = [Phase(exact)]
    if kind == "released-2":
        phases = [Phase(Released(K, 2), half), Phase(exact)]
    elif kind != "none":
        soft = RelaxedNelbo(K, None if kind == "dense" else int(kind))
        phases = [Phase(soft, half), Phase(exact)]
    group, started = Processes.join(), time.time()
    found: dict[str, Any] = {}

    def judge(step: int, denoiser: Any) -> dict[str, Any]:
        known = (denoiser, model.prior, model.schedule, data.valid)
        how = {"sequences": 4096, "batch_size": 256, "device": group.device, "group": group}
        nll = likelihood(*known, **how).nats_per_token
        found[str(step)] = [nll.value, nll.stderr]
        return {"valid_nll": nll.value, "valid_nll_error": nll.stderr}

    with tempfile.TemporaryDirectory() as folder:
        settings = replace(recipe.train, eval_every=half)
        trainer = Trainer(
            model.denoiser,
            Curriculum(tuple(phases)),
            data.train,
            settings,
            Path(folder),
            group=group,
            on_eval=judge,
        )
        trainer.run()
    return {"kind": kind, "seed": seed, "nll": found, "seconds": time.time() - started}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", default="books.tar.xz")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--kinds", nargs="*", default=list(KINDS))
    parser.add_argument("--workers", type=int, default=6)
    options = parser.parse_args()
    shared = {"data": options.data, "steps": options.steps, "batch": options.batch}
    corpus(recipe_of(options.data, options.steps, options.batch, 0).data)  # into the cache
    jobs = [(kind, seed, shared) for seed in options.seeds for kind in options.kinds]
    context = multiprocessing.get_context("spawn")
    with context.Pool(options.workers, maxtasksperchild=1) as pool:
        for found in pool.imap_unordered(run, jobs):
            print(json.dumps(found), flush=True)
            with options.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
