"""A data collator that draws noise levels and noise: what transformers' Trainer needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass
from typing import Any

import torch
from torch import Generator, Tensor
from torch import distributed as dist

from ..process import corrupt
from ..training import random_spans, stratified_times
from ..training.batch import derive_seed, seeded
from ..types import check_unit

IGNORED = -100  # labels that transformers leaves out of a loss


@dataclass
class DataCollatorForDiffusion:
    """Make batches for `Trainer` of clean sequences: noised tokens, their level, and labels.

    The loss of `PsidiffForMaskedLM` on such a batch estimates the NELBO, in nats a token; the
    levels are stratified over the batches of all processes.

    Args:
        model: a PsidiffForMaskedLM or a `psidiff.Model`, whose prior and schedule are taken.
        given: the share of the sequences that have a span of clean tokens, which trains a
            model for prompts and blanks.
        t_min: the smallest time.
        generator: of all draws; None: torch's global generator.

    Raises:
        ValueError: if a share is out of range, or the model has no prior.

    Example:
        >>> from psidiff.integrations.transformers import (
        ...     DataCollatorForDiffusion, PsidiffConfig, PsidiffForMaskedLM
        ... )
        >>> model = PsidiffForMaskedLM(
        ...     PsidiffConfig(vocab_size=9, hidden_size=8, num_blocks=1, num_heads=2)
        ... )
        >>> collate = DataCollatorForDiffusion(model)
        >>> batch = collate([{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}])
        >>> batch["labels"]
        tensor([[   1,    2,    3],
                [   4,    5, -100]])
        >>> bool(model(**batch).loss > 0)
        True
    """

    model: InitVar[Any]
    given: float = 0.0
    t_min: float = 1e-3
    generator: Generator | None = None

    def __post_init__(self, model: Any) -> None:
        check_unit("given", self.given)
        check_unit("t_min", self.t_min)
        if model.prior is None:
            raise ValueError("an autoregressive model has no noise for a collator to draw")
        self.prior, self.schedule = model.prior, model.schedule

    def __call__(self, features: Sequence[Any]) -> dict[str, Tensor]:
        """A batch of `features`, each a mapping with input_ids, or the ids (L,) themselves.

        Args:
            features: also with attention_mask (0 at padding), and cond or label, the class.
                Sequences may differ in length.

        Returns:
            input_ids and labels (B, L), timesteps (B,), or (B, L) with given spans; where there
            is any, attention_mask (B, L) and cond (B,).
        """
        if not features:
            raise ValueError("a batch needs a sequence at least, got none")
        rows = [f if isinstance(f, Mapping) else {"input_ids": f} for f in features]
        tokens, real = _padded(rows)
        seed = int(torch.randint(2**62, (), generator=self.generator))
        rank, world = _place()
        times = stratified_times(len(rows), seeded(seed), rank, world, self.t_min)
        noise = seeded(derive_seed(seed, rank))
        known = ~real
        if self.given:
            known |= random_spans((len(rows), tokens.shape[1]), self.given, noise) & real
        alpha = self.schedule.alpha(times)[:, None]
        levels = torch.where(known, 1.0, alpha) if self.given else alpha
        z = torch.where(known, tokens, corrupt(self.prior, tokens, levels[..., None], noise))
        sigma = -levels.log().float()
        batch = {
            "input_ids": z,
            "labels": tokens.masked_fill(known, IGNORED),
            "timesteps": sigma if self.given else sigma[:, 0],
        }
        if not bool(real.all()):
            batch["attention_mask"] = real.long()
        classes = [row.get("cond", row.get("label")) for row in rows]
        if classes[0] is not None:
            batch["cond"] = torch.as_tensor(classes)
        return batch


def _padded(rows: Sequence[Mapping[str, Any]]) -> tuple[Tensor, Tensor]:
    """Token ids (B, L), 0 at padding, and where there are any."""
    ids = [torch.as_tensor(row["input_ids"], dtype=torch.long) for row in rows]
    masks = [
        torch.as_tensor(row.get("attention_mask", torch.ones(len(each)))).bool()
        for row, each in zip(rows, ids, strict=True)
    ]
    pad = torch.nn.utils.rnn.pad_sequence
    real = pad(masks, batch_first=True)
    return pad(ids, batch_first=True).masked_fill(~real, 0), real


def _place() -> tuple[int, int]:
    """Rank and number of processes."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1
