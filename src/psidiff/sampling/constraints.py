"""Given tokens: prompts, blanks, known pixels, clues."""

from __future__ import annotations

import torch
from torch import Tensor

from ..process.prior import Prior
from ..types import FREE, Tokens, as_ids, check_shape


def known_positions(
    prior: Prior, given: Tensor | None, shape: tuple[int, int], device: torch.device | str
) -> tuple[Tokens, Tensor] | None:
    """The given ids and where they are, or None. -1 marks a free position."""
    if given is None:
        return None
    given = torch.as_tensor(given).to(device)
    check_shape("given", given, shape)
    known = torch.as_tensor(given != FREE)
    as_ids("given", given[known], prior.vocab_size)
    if prior.mask_id is not None and bool((given == prior.mask_id).any()):
        raise ValueError(
            f"given holds the mask id {prior.mask_id}; mark free positions with -1"
        )
    return given.long(), known
