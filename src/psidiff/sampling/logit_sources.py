"""Where rows of logits come from: a network that runs where they are needed, logits that a
pipeline has computed, or a network that reads from left to right."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..process.prior import Prior
from ..types import Levels, Tokens, at_least_float32, check_denoiser_output, traits
from .filters import Cached, find_cache, head_of, hidden_of
from .guidance import combine
from .step import OutputBuilder, WeightRows
from .step_batch import BatchSegment, StepBatch

LEAST_LEVEL = 1e-9  # denoisers take -log alpha; a plan may start at alpha = 0 all the same
_CHUNK = {"cpu": 2**20, "cuda": 2**24}
"""Logits in memory at a time, by device, beyond what the denoiser itself returns."""
_FIXED_ROWS = 32  # of the output layer at a time, with a micro-batch


@dataclass
class LazyLogits:
    """A network, run on the sequences and the rows that are needed.

    micro_batch  the batch the network always sees
    max_tokens   of a forward pass; None: any number
    max_padding  tokens of padding that a pass may have, so that sequences of unequal lengths
                 share it; 0 for networks that know no padding
    """

    denoiser: Any
    prior: Prior
    micro_batch: int | None = None
    dense: bool = False
    max_tokens: int | None = None
    max_padding: int = 0
    cache: Cached | None = field(init=False)
    builder = OutputBuilder

    def __post_init__(self) -> None:
        self.cache = find_cache(self.denoiser)

    def rows(
        self, out: OutputBuilder, needed: Tensor, pair: bool = False
    ) -> Iterator[tuple[WeightRows, ...]]:
        batch = out.batch
        if self.cache is not None:
            self.cache.size = max(self.cache.size, 2 * len(batch.z))
        for members in self._groups(batch, needed.any(1).tolist()):
            every = members == list(range(len(batch.z)))
            index: Any = slice(None)
            if not every:
                index = torch.tensor(members, device=needed.device)
            length = batch.owners[members[0]].length
            states = self._states(out, members, index, length)
            which, position = needed[index, :length].nonzero(as_tuple=True)
            sequence = which if every else index[which]
            at = sequence * batch.z.shape[1] + position
            size = rows_at_once(self.prior, at, self.micro_batch)
            for i in range(0, len(at), size):
                chunk = slice(i, i + size)
                here = which[chunk], position[chunk]
                raw = [self._head(each[here], size) for each in states]
                out.head_rows += len(here[0]) * len(raw)
                yield processed(batch, self.prior, at[chunk], raw, pair)

    def level(self, alpha: Tensor, given: Tensor, guided: bool = False) -> Tensor | Levels:
        """alpha (1, 1, 1) or (B, 1, 1), and 1 where tokens are given."""
        levels = Levels(alpha.expand(len(given), 1, 1), given)
        knows = traits(self.denoiser).levels and not guided
        return levels if knows else levels.per_position()

    def _groups(self, batch: StepBatch, active: list[bool]) -> Iterator[list[int]]:
        """Sequences of one kind that go through the network together, the longest first."""
        owners, kinds = batch.owners, dict[Any, list[int]]()
        order = [i for i, yes in enumerate(active) if yes]
        if len(batch.segments) == 1:
            kinds |= {None: order} if order else {}
        else:
            for i in sorted(order, key=lambda i: -owners[i].length):
                kinds.setdefault((owners[i].passes, owners[i].one_level), []).append(i)
        for members in kinds.values():
            lengths = [owners[i].length for i in members]
            start = 0
            while start < len(members):
                count = self._fitting(lengths[start:])
                yield members[start : start + count]
                start += count

    def _fitting(self, lengths: Sequence[int]) -> int:
        """How many of these falling lengths share a pass: at least one."""
        longest, padding = lengths[0], 0
        most = self.micro_batch or len(lengths)
        if self.max_tokens is not None:
            most = min(most, max(self.max_tokens // longest, 1))
        if lengths[-1] == longest:
            return min(most, len(lengths))
        for count, length in enumerate(lengths[:most]):
            padding += longest - length
            if padding > self.max_padding:
                return count
        return min(most, len(lengths))

    def _states(
        self, out: OutputBuilder, members: list[int], index: Any, length: int
    ) -> list[Tensor]:
        """Hidden states (n, length, d) of each pass; a short micro-batch is filled up."""
        batch, count = out.batch, len(members)
        segments = [batch.owners[i] for i in members]
        if self.micro_batch is not None and count < self.micro_batch:
            members = [*members, *[members[-1]] * (self.micro_batch - count)]
            index = torch.tensor(members, device=batch.z.device)
        z = batch.z[index, :length]
        given = None
        if batch.given is not None and any(segment.conditioned for segment in segments):
            given = batch.given[index, :length]
        level = self._level(segments, len(z), batch.pi, given)
        lengths = [segment.length for segment in segments]
        mask = None if lengths[-1] == length else not_padding(lengths, z)
        states = []
        for labelled in segments[0].passes:
            labels = batch.labels[index] if labelled and batch.labels is not None else None
            before = self.cache.passes if self.cache else 0
            states.append(self.hidden(z, level, labels, mask)[:count])
            self._count(out, members[:count], before)
        return states

    def _count(self, out: OutputBuilder, members: list[int], before: int) -> None:
        """A pass of each; behind a cache only of those it did not know, whichever they are."""
        if self.cache is not None:
            members = members[: self.cache.passes - before]
        for i in members:
            out.passes[i] += 1

    def _level(
        self, segments: list[BatchSegment], count: int, like: Tensor, given: Tensor | None
    ) -> Any:
        """One float if all agree, (n, 1, 1), or of each token; a float gives networks one
        condition for all, and other last bits than a tensor does."""
        levels = [max(segment.level, LEAST_LEVEL) for segment in segments]
        level: Any = levels[0]
        if len(set(levels)) > 1:
            levels += levels[-1:] * (count - len(levels))
            level = torch.tensor(levels, dtype=torch.float64).to(like)[:, None, None]
        if given is None:
            return level
        if not isinstance(level, Tensor):
            level = torch.full((1, 1, 1), level, device=given.device)  # in the default dtype
        return self.level(level, given, any(segment.one_level for segment in segments))

    def hidden(
        self, z: Tokens, level: Any, labels: Tensor | None, mask: Tensor | None
    ) -> Tensor:
        """What the head reads; mask (B, L) is False at padding."""
        hidden = hidden_of(self.denoiser, z, level, labels, mask)
        if not isinstance(hidden, Tensor) or hidden.shape[:-1] != z.shape:
            kind = tuple(hidden.shape) if isinstance(hidden, Tensor) else type(hidden).__name__
            raise ValueError(
                f"the denoiser got tokens of shape {tuple(z.shape)} and answered "
                f"with {kind}; it should give (B, L, K)"
            )
        return hidden

    def _head(self, states: Tensor, size: int) -> Tensor:
        """Logits of the states; with a micro-batch the output layer, too, sees one shape."""
        count = len(states)
        if self.micro_batch is not None and count < size:
            states = torch.cat((states, states[-1:].expand(size - count, -1)))
        return head_of(self.denoiser, states)[:count]


@dataclass(frozen=True)
class PrecomputedLogits:
    """Logits (B, L, K) that a pipeline has computed; shift (B, L) is added to that of z."""

    prior: Prior
    logits: Tensor
    shift: Tensor | None = None
    dense: ClassVar[bool] = False
    builder: ClassVar[type[OutputBuilder]] = OutputBuilder

    def rows(
        self, out: OutputBuilder, needed: Tensor, pair: bool = False
    ) -> Iterator[tuple[WeightRows, ...]]:
        every, flat = needed.flatten().nonzero()[:, 0], self.logits.flatten(0, 1)
        for at in every.split(rows_at_once(self.prior, every, None)) if len(every) else ():
            logits = at_least_float32(flat[at])
            if self.shift is not None:
                z, shift = out.batch.z.view(-1)[at], self.shift.flatten()[at]
                logits = logits.scatter_add(-1, z[:, None], shift[:, None].to(logits))
            out.head_rows += len(at)
            yield processed(out.batch, self.prior, at, [logits], pair)


@dataclass
class CausalLogits:
    """An autoregressive network: `read(tokens)` gives logits (B, l, K).

    It reads `bos_id` first, and never gives it unless `allow_bos`: in some vocabularies the
    same token ends a text.
    """

    read: Any
    bos_id: int
    allow_bos: bool = False
    dense = False

    def next_probs(self, out: OutputBuilder, position: int) -> Tensor:
        """p(. | the tokens before this position) of each sequence, (B, K)."""
        z, segment = out.batch.z, out.batch.segments[0]
        bos = z.new_full((len(z), 1), self.bos_id)
        logits = self.read(torch.cat((bos, z[:, :position]), 1))[:, -1].float()
        if not self.allow_bos:
            logits[:, self.bos_id] = -torch.inf
        out.passes, out.head_rows = [1] * len(z), len(z)
        return segment.logits_processor(logits).softmax(-1)


def not_padding(lengths: Any, z: Tensor) -> Tensor:
    """True (B, L) where a sequence of its length has tokens."""
    lengths = torch.as_tensor(lengths, device=z.device)
    return torch.arange(z.shape[1], device=z.device) < lengths[:, None]


def processed(
    batch: StepBatch, prior: Prior, at: Tensor, logits: Sequence[Tensor], pair: bool
) -> tuple[WeightRows, ...]:
    """Rows of logits (n, K) of one or two passes: guided on x unless `pair`, then filtered."""
    logits = [checked(prior, each) for each in logits]
    if len(logits) == 2 and not pair:
        weights = [segment.guidance_weight for segment in batch.segments]
        logits = [by_value(batch, at, weights, lambda w, c, u: combine(c, u, w), *logits)]
    filters = [segment.logits_processor for segment in batch.segments]
    filtered = (by_value(batch, at, filters, operator.call, each) for each in logits)
    return tuple(WeightRows.of_logits(at, each) for each in filtered)


def checked(prior: Prior, logits: Tensor) -> Tensor:
    """K wide, at least float32, and without the mask."""
    check_denoiser_output(logits, prior.vocab_size)
    return prior.without_mask(at_least_float32(logits))


def rows_at_once(prior: Prior, at: Tensor, micro_batch: int | None) -> int:
    size = max(_CHUNK.get(at.device.type, _CHUNK["cpu"]) // prior.vocab_size, 1)
    return size if micro_batch is None else min(size, _FIXED_ROWS)


def by_value(
    batch: StepBatch, at: Tensor, values: Sequence[Any], work: Any, *rows: Tensor
) -> Tensor:
    """`work(value, *rows)` with the value of each row's segment; equal ones go together."""
    if all(value == values[0] for value in values):
        return work(values[0], *rows)
    owner = at // batch.z.shape[1]
    each = [v for v, s in zip(values, batch.segments, strict=True) for _ in range(s.count)]
    groups: dict[Any, list[int]] = {}
    for i in owner.unique().tolist():
        groups.setdefault(each[i], []).append(i)
    made = torch.empty_like(rows[0])
    for value, members in groups.items():
        inside = torch.isin(owner, torch.tensor(members, device=owner.device))
        made[inside] = work(value, *(each[inside] for each in rows))
    return made
