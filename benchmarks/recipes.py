"""Every recipe of the paper at full size: 20 steps on tokens without meaning, on one GPU.

python benchmarks/recipes.py [NAME ...] [--steps 20] [--out FILE]

Parameter counts are asserted; samples a second and peak memory are printed. For the curricula
both phases are run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Generator, Tensor

from psidiff.experiment.build import build_curriculum, build_model
from psidiff.experiment.datasets import RandomTokens, corpus
from psidiff.experiment.recipe import RandomData, Recipe
from psidiff.experiment.recipe_files import read_recipe
from psidiff.training import Processes, Trainer
from psidiff.types import Rows

PARAMETERS = {
    "owt-ar": 162_246_482,
    "owt-mdlm": 169_627_218,
    "owt-duo": 169_627_218,
    "owt-duo++": 169_627_218,
    "lm1b-ar": None,
    "lm1b-mdlm": 139_292_986,
    "lm1b-duo": 139_292_986,
    "lm1b-duo++": 139_292_986,
    "cifar10-mdlm": 35_755_398,
    "cifar10-duo": 35_755_398,
}
BATCH = {"owt": 32, "lm1b": 256, "cifar10": 128}


def synthetic(recipe: Recipe) -> RandomData:
    """Random tokens of the recipe's K and length."""
    size = recipe.model.vocab_size
    assert size is not None and recipe.model.length is not None
    adds_one = recipe.objective == "next-token" or (
        recipe.prior.kind == "masked" and not recipe.name.startswith("lm1b")
    )
    if recipe.model.kind == "unet":
        return RandomData(size - adds_one, 3072, classes=10, image=(3, 32, 32))
    return RandomData(size - adds_one, recipe.model.length)


def measure(name: str, steps: int, exact_only: bool = False) -> dict:
    recipe = read_recipe(name)
    batch = BATCH[name.split("-")[0]]
    train = replace(
        recipe.train, steps=steps, batch_size=batch, micro_batch=batch, log_every=5, warmup=10
    )
    soft = recipe.curriculum
    if soft is not None:
        soft = None if exact_only else replace(soft, share=1 - 1e-9)
    data = synthetic(recipe)
    prior = recipe.prior
    recipe = replace(recipe, data=data, train=train, curriculum=soft, tracker="none")
    tokens = corpus(data)
    if name.startswith("lm1b") and prior.kind == "masked" and recipe.objective == "nelbo":
        tokens = replace(tokens, codec=WithMask(), train=Unmasked(tokens.train))
    model = build_model(recipe, tokens)
    count = sum(p.numel() for p in model.network.parameters())
    assert PARAMETERS[name] in (None, count), (name, count)
    group = Processes.join()
    rates, losses = [], []

    def note(record: dict) -> None:
        rates.append(record["samples_per_second"])
        losses.append(record["loss"])

    torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as folder:
        curriculum = build_curriculum(recipe, model)
        trainer = Trainer(
            model.denoiser,
            curriculum,
            tokens.train,
            replace(train, save_every=10**9),
            Path(folder),
            num_classes=tokens.num_classes or 0,
            group=group,
            on_log=note,
        )
        trainer._save = lambda: None  # type: ignore[method-assign]  # a checkpoint is not timed
        trainer.run()
    return {
        "recipe": name + (" (after the curriculum)" if exact_only else ""),
        "parameters": count,
        "batch": batch,
        "precision": train.precision,
        "samples_per_second": statistics.median(rates[1:]),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "loss": losses,
    }


class WithMask:
    """BERT's vocabulary has its mask inside."""

    mask_id = 103


@dataclass(frozen=True)
class Unmasked:
    """Data never holds the mask."""

    data: RandomTokens

    @property
    def length(self) -> int:
        return self.data.length

    def __len__(self) -> int:
        return len(self.data)

    def rows(self, indices: Tensor, generator: Generator | None = None) -> Rows:
        tokens = self.data.rows(indices, generator).tokens
        return Rows(torch.where(tokens == WithMask.mask_id, 0, tokens))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(PARAMETERS))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    for name in options.names:
        for exact_only in (False, True) if "duo" in name and "cifar" not in name else (False,):
            try:
                found = measure(name, options.steps, exact_only)
            except torch.cuda.OutOfMemoryError:
                found = {"recipe": name, "out_of_memory": True}
            torch.cuda.empty_cache()
            print(json.dumps(found), flush=True)
            if options.out:
                with options.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
