"""The network on sequences of unequal lengths: which of them go through it together.

A pass pads on the right, where the network knows of padding and it costs less than a pass more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..models import Parameterized, Transformer
from ..process.prior import Prior
from ..sampling.filters import head_of, hidden_of
from ..sampling.guidance import combine
from ..sampling.network import LEAST_LEVEL, Where
from ..types import at_least_float32, has_head, working_dtype
from .lanes import Lane

if TYPE_CHECKING:
    from ..model import Model

_CHUNK = 2**20  # logits in memory at a time
_TOKENS = {"cpu": 1024}  # of a pass: more leave the cache; on a GPU as many as there are
_PADDING = {"cpu": 64}  # what costs as much as a pass more; on a GPU that is far away
_MANY = 2**16


@dataclass(frozen=True)
class Pass:
    """Lanes, by number, of which the network sees `length` tokens at once."""

    lanes: list[int]
    length: int
    labelled: bool
    guided: bool


class Passes:
    """A denoiser for lanes. `advance` asks it for rows of logits."""

    def __init__(self, model: Model) -> None:
        assert model.prior is not None
        self.prior: Prior = model.prior
        self.denoiser, self.device = model.denoiser, model.device
        self.dtype = working_dtype(self.device)
        known = isinstance(model.denoiser, Parameterized)
        self.pads = known and isinstance(model.network, Transformer)

    def rows(
        self, lanes: Sequence[Lane], z: Tensor, needed: Tensor, asked: list[bool]
    ) -> Iterator[tuple[Where, Tensor]]:
        """Shaped logits (N, K) of the needed positions, and where they belong.

        asked: which lanes have any.
        """
        size = max(_CHUNK // self.prior.vocab_size, 1)
        for group in self._groups(lanes, asked):
            rows = torch.tensor(group.lanes, device=self.device)
            here = needed[rows, : group.length]
            states = [self._forward(lanes, z, group, group.labelled)[here]]
            if group.guided:
                states.append(self._forward(lanes, z, group, False)[here])
            which, position = here.nonzero(as_tuple=True)
            for i in range(0, len(which), size):
                part = slice(i, i + size)
                owner = rows[which[part]]
                logits = [self._head(each[part]) for each in states]
                made = _guided(lanes, owner, logits) if group.guided else logits[0]
                yield (owner, position[part]), _shaped(lanes, owner, made)

    def column(self, values: Sequence[float]) -> Tensor:
        """(B, 1), made in float64."""
        return torch.tensor(values, dtype=torch.float64)[:, None].to(self.dtype).to(self.device)

    def _groups(self, lanes: Sequence[Lane], asked: list[bool]) -> Iterator[Pass]:
        """Lanes by kind, then from the longest on, as many as a pass should have."""
        kinds: dict[tuple[bool, bool], list[int]] = {}
        for i in sorted(range(len(lanes)), key=lambda i: -len(lanes[i].z)):
            if asked[i]:
                weight = guidance_weight(lanes[i])
                labelled = lanes[i].label is not None and weight != 0
                kinds.setdefault((labelled, weight not in (0, 1)), []).append(i)
        for (labelled, guided), members in kinds.items():
            while members:
                lengths = [len(lanes[i].z) for i in members]
                count = self._fitting(lengths)
                yield Pass(members[:count], lengths[0], labelled, guided)
                members = members[count:]

    def _fitting(self, lengths: list[int]) -> int:
        """How many of these falling lengths are padded to the first: at least one."""
        longest, padding = lengths[0], 0
        most = max(_TOKENS.get(self.device.type, _MANY) // longest, 1)
        allowed = _PADDING.get(self.device.type, _MANY) if self.pads else 0
        for count, length in enumerate(lengths[:most]):
            padding += longest - length
            if padding > allowed:
                return count
        return min(most, len(lengths))

    def _forward(self, lanes: Sequence[Lane], z: Tensor, group: Pass, labelled: bool) -> Tensor:
        """Hidden states of a pass, (n, length, d)."""
        members = [lanes[i] for i in group.lanes]
        tokens = z[torch.tensor(group.lanes, device=self.device), : group.length]
        level = self.column([max(lane.step.alpha_t, LEAST_LEVEL) for lane in members])
        level = level[..., None]
        if any(lane.conditioned for lane in members):
            fixed = pad_sequence([~lane.free for lane in members], batch_first=True)
            level = level.expand(-1, group.length, 1).masked_fill(fixed[..., None], 1.0)
        labels = None
        if labelled:
            labels = torch.tensor([lane.label for lane in members], device=self.device)
        if all(len(lane.z) == group.length for lane in members):
            return hidden_of(self.denoiser, tokens, level, labels)
        real = pad_sequence([torch.ones_like(lane.free) for lane in members], batch_first=True)
        run = self.denoiser.hidden if has_head(self.denoiser) else self.denoiser
        return run(tokens, level, labels, real)

    def _head(self, states: Tensor) -> Tensor:
        return self.prior.without_mask(at_least_float32(head_of(self.denoiser, states)))


def guidance_weight(lane: Lane) -> float:
    """At the lane's time; 1 is none."""
    return 1.0 if lane.guidance is None else lane.guidance.at(lane.step.t)


def _guided(lanes: Sequence[Lane], owner: Tensor, logits: Sequence[Tensor]) -> Tensor:
    """Conditional and unconditional rows, combined by the weight of their lane."""
    mixed = logits[0].clone()
    for i in set(owner.tolist()):
        at = owner == i
        mixed[at] = combine(logits[0][at], logits[1][at], guidance_weight(lanes[i]))
    return mixed


def _shaped(lanes: Sequence[Lane], owner: Tensor, logits: Tensor) -> Tensor:
    """Each row by the filter of its lane; lanes with equal filters go together."""
    alike: dict[object, list[int]] = {}
    for i in set(owner.tolist()):
        alike.setdefault(lanes[i].shaping, []).append(i)
    if len(alike) == 1:
        return lanes[int(owner[0])].shaping.rows(logits)
    shaped = torch.empty_like(logits)
    for members in alike.values():
        at = torch.isin(owner, torch.tensor(members, device=owner.device))
        shaped[at] = lanes[members[0]].shaping.rows(logits[at])
    return shaped
