"""How to train: every number of a run that is neither data nor network nor objective."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..types import as_count, check_choice, check_unit


@dataclass(frozen=True)
class Settings:
    """How to train: every number of a run that is neither data nor network nor objective.

    The batch is worked off in micro-batches, which processes share out; random numbers belong
    to
    the micro-batch, so the run is the same on one process or many.

    Args:
        steps: number of steps.
        optimizer: "adamw", or "muon" for the matrices inside with AdamW for the rest.
        batch_size: sequences of a step over all processes.
        micro_batch: sequences that go through the network at once; None: batch_size.
        learning_rate: of AdamW, after the warm-up.
        matrix_rate: of Muon, warmed up and decayed like the other.
        warmup: steps of the linear warm-up.
        decay: "constant" or "cosine" after it.
        betas: of AdamW.
        eps: of AdamW.
        weight_decay: of both.
        clip: largest norm of the gradient; None: not clipped.
        ema: decay of the averaged weights.
        precision: "float32" or "bfloat16".
        given: share of sequences with a random span (or clues) shown clean.
        class_dropout: how often a label is withheld.
        t_min: the smallest time.
        time_power: of `Nelbo`.
        seed: of all random numbers.
        log_every: steps between lines of the log.
        eval_every: steps between evaluations.
        save_every: steps between checkpoints.
        keep: checkpoints that are kept.
        parallel: "ddp" or "fsdp" on several processes.
        compile: compile the network; None: on a GPU.
        recompute: keep no activations inside blocks, and compute them twice.
        loss: "fused": without a tensor of all logits; "plain": the formula as it stands.

    Example:
        >>> from psidiff.training import Settings
        >>> Settings(steps=100, batch_size=8, micro_batch=4).piece
        4
    """

    steps: int
    optimizer: str = "adamw"
    batch_size: int = 64
    micro_batch: int | None = None
    learning_rate: float = 3e-4
    matrix_rate: float = 2e-2  # Muon's, warmed up and decayed like the other
    warmup: int = 2500
    decay: str = "constant"
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip: float | None = 1.0
    ema: float = 0.9999
    precision: str = "float32"
    given: float = 0.0  # the share of sequences with a random span (or clues) shown clean
    class_dropout: float = 0.0  # how often a label is withheld
    t_min: float = 1e-3
    time_power: float = 1.0  # the NELBO at time t^p: above 1 it looks at little noise more
    seed: int = 0
    log_every: int = 10
    eval_every: int = 1000
    save_every: int = 500
    keep: int = 2
    parallel: str = "ddp"
    compile: bool | None = None  # None: on a GPU, where that pays
    recompute: bool = False  # blocks keep no activations, and are computed twice
    loss: str = "fused"  # fused: no tensor of all logits; plain: the formula as it stands

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "log_every", "eval_every", "save_every", "keep"):
            as_count(name, getattr(self, name))
        for name in ("warmup", "seed"):
            as_count(name, getattr(self, name), least=0)
        for name in ("given", "class_dropout", "t_min"):
            check_unit(name, getattr(self, name))
        if self.batch_size % as_count("micro_batch", self.piece):
            raise ValueError(
                f"micro_batch must divide batch_size, got {self.piece} and {self.batch_size}"
            )
        for name in ("learning_rate", "matrix_rate", "time_power"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name):g}")
        for name in ("eps", "weight_decay"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name):g}")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must be two numbers in [0, 1), got {list(self.betas)}")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"clip must be above 0 or null, got {self.clip:g}")
        if not 0 <= self.ema < 1:
            raise ValueError(f"ema must be in [0, 1), got {self.ema:g}")
        check_choice("optimizer", self.optimizer, ("adamw", "muon"))
        if self.optimizer != "muon" and self.matrix_rate != type(self).matrix_rate:
            raise ValueError(
                f"matrix_rate={self.matrix_rate:g} is Muon's, and optimizer is {self.optimizer}"
            )
        if self.optimizer == "muon" and self.parallel == "fsdp":
            raise ValueError(
                "optimizer=muon needs whole matrices, which parallel=fsdp cuts: take "
                "parallel=ddp or optimizer=adamw"
            )
        check_choice("loss", self.loss, ("fused", "plain"))
        check_choice("decay", self.decay, ("constant", "cosine"))
        check_choice("precision", self.precision, ("float32", "bfloat16"))
        check_choice("parallel", self.parallel, ("ddp", "fsdp"))

    @property
    def piece(self) -> int:
        """Sequences that go through the network at once."""
        return self.batch_size if self.micro_batch is None else self.micro_batch

    @property
    def pieces(self) -> int:
        return self.batch_size // self.piece

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        return self.learning_rate * self.lr_factor(step)

    def lr_factor(self, step: int) -> float:
        """What part of its rate an optimizer takes at a step: warm-up, then decay."""
        warm = min(1.0, (step + 1) / max(self.warmup, 1))
        if self.decay == "constant" or step < self.warmup:
            return warm
        passed = (step - self.warmup) / max(self.steps - self.warmup, 1)
        return (1 + math.cos(math.pi * passed)) / 2
