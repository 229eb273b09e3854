"""What the training loop costs beside the model: a bare loop and `Trainer`, alternating.

python benchmarks/train_overhead.py [--pairs 7] [--steps 40]

Both do the same forward and backward passes, clipping and AdamW on the digits network. The
trainer also fetches rows, stratifies times, logs, averages and checks; the share is its speed
over the bare loop's, the median of the pairs.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from psidiff.experiment.build import build_curriculum, build_model
from psidiff.experiment.datasets import corpus
from psidiff.experiment.recipe_files import read_recipe
from psidiff.training import Batch, Trainer, stratified_times


def bare(steps: int) -> float:
    """One batch again and again, nothing else."""
    recipe = read_recipe("digits")
    data = corpus(recipe.data)
    model = build_model(recipe, data)
    objective = build_curriculum(recipe, model).at(0)
    optimizer = torch.optim.AdamW(model.denoiser.parameters(), lr=1e-3, weight_decay=0.0)
    tokens, labels, *_ = data.train.rows(torch.arange(32))
    batch = Batch(tokens, stratified_times(32), labels)
    started = 0.0
    for step in range(steps + 5):
        if step == 5:
            started = time.perf_counter()
        loss = batch.mean(objective(model.denoiser, batch))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.denoiser.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return steps / (time.perf_counter() - started)


def trained(steps: int) -> float:
    """The trainer with its log and its average; checkpoints and evaluation apart."""
    recipe = read_recipe("digits", ["train.given=0"])
    settings = replace(recipe.train, steps=steps + 5, log_every=5, save_every=10**9)
    data = corpus(recipe.data)
    model = build_model(recipe, data)
    times: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model.denoiser,
            build_curriculum(recipe, model),
            data.train,
            settings,
            Path(folder),
            num_classes=10,
            on_log=lambda record: times.append(time.perf_counter()),
        )
        trainer.run()
    return steps / (times[-1] - times[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    shares = []
    for pair in range(options.pairs):
        ways = (bare, trained) if pair % 2 else (trained, bare)
        speed = {way.__name__: way(options.steps) for way in ways}
        shares.append(speed["trained"] / speed["bare"])
        print(
            f"bare {speed['bare']:.2f} steps/s, trainer {speed['trained']:.2f}, "
            f"share {shares[-1]:.3f}",
            flush=True,
        )
    print(f"median share of the bare loop's speed: {statistics.median(shares):.3f}")


if __name__ == "__main__":
    main()
