"""Sums over the tokens of sequences: the batched pass that all likelihoods share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional as F

from ..distributed import Processes
from ..types import Dataset, as_count

OnBatch = Callable[[int, int], None]
"""Called after each batch: how many passes over a sequence are done, and of how many."""


class EvalBatch(NamedTuple):
    """Sequences of one forward pass: which they are, which draw of each, and their tokens.

    score_mask is True at the tokens that count, attention_mask at those that are not padding.
    """

    rows: Any  # (n,)
    draws: Any  # (n,)
    tokens: Any  # (n, L)
    score_mask: Any  # (n, L)
    attention_mask: Any = None  # (n, L), or None: nothing is padded
    labels: Any = None  # (n,) or None


TokenValues = Callable[[EvalBatch], Tensor]
"""A batch -> values of its tokens, (m, n, L): one or more quantities to be summed."""


@runtime_checkable
class SequenceSource(Protocol):
    """Sequences by number; those of length 0 have nothing to score."""

    @property
    def lengths(self) -> Sequence[int]: ...

    def batch(self, rows: Tensor, draws: Tensor) -> EvalBatch: ...


def sum_over_tokens(
    source: SequenceSource,
    values: TokenValues,
    num_values: int,
    draws: int = 1,
    batch_size: int = 32,
    *,
    mixed: bool = True,
    group: Processes | None = None,
    on_batch: OnBatch | None = None,
) -> Tensor:
    """Sums of the values of scored tokens, for each sequence and draw.

    Args:
        source: the sequences.
        values: gives `num_values` values m of each token of a batch.
        draws: number of draws of each sequence.
        batch_size: at most so many sequences are in a forward pass.
        mixed: whether sequences of several lengths may share a batch, padded on the right.
        group: processes that share the batches.
        on_batch: called after each batch of this process.
    Returns:
        float64 (m, number of sequences, draws), the same in all processes; 0 for a sequence
        that has nothing to score.
    """
    group, lengths = group or Processes(), source.lengths
    sums = torch.zeros(num_values, len(lengths), draws, dtype=torch.float64)
    done, total = 0, draws * sum(n > 0 for n in lengths)
    for number, (rows, draw) in enumerate(_batches(lengths, draws, batch_size, mixed)):
        done += len(rows)
        if number % group.world != group.rank:
            continue
        batch = source.batch(rows, draw)
        found = values(batch).cpu().double()
        sums[:, rows, draw] = torch.where(batch.score_mask, found, 0).sum(-1)
        if on_batch is not None:
            on_batch(done, total)
    return group.mean(sums).cpu() * group.world


def _batches(
    lengths: Sequence[int], draws: int, batch_size: int, mixed: bool
) -> Iterator[tuple[Tensor, Tensor]]:
    """Numbers of rows and of draws (n,) of each batch: all draws of all rows, short ones first.

    Unless lengths may be mixed, a batch has one of them. Rows of length 0 are left out.
    """
    size = as_count("batch_size", batch_size)
    order = sorted((i for i, n in enumerate(lengths) if n), key=lengths.__getitem__)
    groups = [order] if mixed else [list(g) for _, g in groupby(order, lengths.__getitem__)]
    for rows in map(torch.tensor, groups):
        for first in range(0, len(rows) * draws, size):
            place = torch.arange(first, min(first + size, len(rows) * draws))
            yield rows[place // draws], place % draws


class EvaluationSubset:
    """A number of sequences, spread evenly over a dataset.

    Args:
        data: the dataset.
        count: how many of its sequences; None, or more than there are: all of them.
        bos_id: a token that is read before each sequence, and not scored; None: there is none.
    """

    def __init__(
        self, data: Dataset, count: int | None = None, bos_id: int | None = None
    ) -> None:
        total = as_count("the number of sequences in the data", len(data))
        wanted = total if count is None else as_count("sequences", count)
        self.count, self.data, self.bos_id = min(wanted, total), data, bos_id
        self.numbers = torch.arange(self.count) * total // self.count

    @property
    def lengths(self) -> Sequence[int]:
        return [1] * self.count  # all the same

    def batch(self, rows: Tensor, draws: Tensor) -> EvalBatch:
        tokens, labels, real, _ = self.data.rows(self.numbers[rows])
        score = torch.ones_like(tokens, dtype=torch.bool) if real is None else real.bool()
        if self.bos_id is not None:
            tokens, score = F.pad(tokens, (1, 0), value=self.bos_id), F.pad(score, (1, 0))
        return EvalBatch(rows, draws, tokens, score, real, labels)
