"""Rows of `benchmarks/gpu.py` about training: transformer and U-Net, objective by objective."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import straightforward
import torch
from gpu_measure import Bench, Record, parameters_of, transformer_flops
from gpu_sampling import image_flops
from torch import Generator, Tensor, nn

from psidiff.kernels import fused_linear_loss
from psidiff.models import Parameterized
from psidiff.process import LogLinear, Uniform
from psidiff.training import (
    Curriculum,
    Nelbo,
    Objective,
    Phase,
    Processes,
    RelaxedNelbo,
    Settings,
    Trainer,
)
from psidiff.types import Rows

OBJECTIVES: dict[str, Callable[[int], Objective]] = {
    "exact": lambda vocab: Nelbo(Uniform(vocab), LogLinear()),
    "sparse": lambda vocab: RelaxedNelbo(vocab, 2),
    "sparse-3": lambda vocab: RelaxedNelbo(vocab, 3),
    "sparse-5": lambda vocab: RelaxedNelbo(vocab, 5),
    "dense": lambda vocab: RelaxedNelbo(vocab),
}
PLAIN: dict[str, Callable[[Tensor, int], straightforward.Noised]] = {
    "exact": straightforward.exact,
    "sparse": straightforward.sparse,
    "dense": straightforward.dense,
}
_WARM_UP = 2  # windows of the log


class RandomTokens:
    """A dataset in memory that has nothing to teach."""

    def __init__(self, count: int, length: int, vocab: int) -> None:
        generator = Generator().manual_seed(0)
        self.tokens = torch.randint(vocab, (count, length), generator=generator)

    @property
    def length(self) -> int:
        return self.tokens.shape[1]

    def __len__(self) -> int:
        return len(self.tokens)

    def rows(self, indices: Tensor, generator: Generator | None = None) -> Rows:
        return Rows(self.tokens[indices])


class _Enough(Exception):
    """The last number that was wanted has come: the run need not save itself."""


def plain_training(bench: Bench, objective: str) -> Record:
    s, network = bench.sizes, bench.transformer(dropout=0.1)
    logits_of = partial(straightforward.transformer_logits, network)
    tokens = bench.tokens(s.train_batch)
    return _plain_steps(bench, network, objective, logits_of, tokens, s.vocab)


def our_training(bench: Bench, objective: str, entries: int | None = None) -> Record:
    """The trainer; entries: how many logits the fused loss holds at once."""
    s, network = bench.sizes, bench.transformer(dropout=0.1)
    count = parameters_of(network)
    before = fused_linear_loss._ENTRIES_GPU
    fused_linear_loss._ENTRIES_GPU = entries or before
    try:
        found = _train(
            bench,
            Parameterized(network, Uniform(s.vocab)),
            OBJECTIVES[objective](s.vocab),
            RandomTokens(512, s.length, s.vocab),
            s.train_batch,
        )
    finally:
        fused_linear_loss._ENTRIES_GPU = before
    tokens = s.train_batch * s.length
    flops = 3 * transformer_flops(s, tokens, tokens, s.vocab)
    return found | {
        "flops": flops,
        "parameters": count,
        "bytes": _optimizer_bytes(count),
        "entries": entries or before,
    }


def plain_images(bench: Bench) -> Record:
    """The U-Net in float32."""
    s, network = bench.sizes, bench.unet(dropout=0.1)
    tokens = bench.tokens(s.train_images, network.channels * s.image**2, network.vocab_size)
    return _plain_steps(bench, network, "exact", network, tokens, network.vocab_size)


def our_images(bench: Bench) -> Record:
    s, network = bench.sizes, bench.unet(dropout=0.1)
    flops = 3 * image_flops(bench, network) * s.train_images
    count, vocab = parameters_of(network), network.vocab_size
    found = _train(
        bench,
        Parameterized(network, Uniform(vocab)),
        OBJECTIVES["exact"](vocab),
        RandomTokens(512, network.channels * s.image**2, vocab),
        s.train_images,
    )
    return found | {"flops": flops, "bytes": _optimizer_bytes(count)}


def _plain_steps(
    bench: Bench, network: nn.Module, objective: str, logits_of: Any, tokens: Tensor, vocab: int
) -> Record:
    training = straightforward.Training(network)

    def step() -> None:
        training.step(PLAIN[objective], logits_of, tokens, vocab)

    step()  # the optimizer's moments exist from here on
    with bench.peak() as memory:
        step()
    ms = bench.ms(step, 5, 1)
    return {
        "ms": ms,
        **memory,
        "batch": len(tokens),
        "samples_per_second": len(tokens) / ms * 1e3,
    }


def _train(
    bench: Bench, denoiser: nn.Module, objective: Objective, data: RandomTokens, batch: int
) -> Record:
    """Samples a second, the median of the log's windows once graphs are recorded. The peak is
    that of the whole run: a replayed graph asks for no memory, so only its recording shows what
    it holds."""
    s, records = bench.sizes, []

    def on_log(record: Record) -> None:
        records.append(record)
        if record["step"] >= s.train_steps:
            raise _Enough

    settings = Settings(
        steps=10**9,
        batch_size=batch,
        precision="bfloat16",
        log_every=s.log_every,
        save_every=10**9,
        eval_every=10**9,
    )
    with tempfile.TemporaryDirectory() as folder, bench.peak() as memory:
        trainer = Trainer(
            denoiser,
            Curriculum((Phase(objective),)),
            data,
            settings,
            Path(folder),
            group=Processes.join(bench.device),
            on_log=on_log,
        )
        with suppress(_Enough):
            trainer.run()
    speeds = [record["samples_per_second"] for record in records]
    speed = median(speeds[_WARM_UP:])
    return {
        "ms": batch / speed * 1e3,
        **memory,
        "batch": batch,
        "samples_per_second": speed,
        "windows": speeds,
        "loss": records[-1]["loss"],
    }


def _optimizer_bytes(count: int) -> int:
    """What AdamW and the average move: p, g, m, v and average read, all but g written."""
    return 4 * count * 9
