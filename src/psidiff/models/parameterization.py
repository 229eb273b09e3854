"""From a network's logits to log x_theta: what the prior already knows is put in.

The mask never occurs in data, so it is impossible; a token that cannot be noise (pi_z = 0) is
itself.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..process.posterior import to_leave_one_out
from ..process.prior import Prior
from ..types import (
    Levels,
    Probs,
    SoftTokens,
    Tokens,
    at_least_float32,
    check_choice,
    check_denoiser_output,
    traits,
)


class Parameterized(nn.Module):
    """A denoiser: log x_theta (B, L, K) in float32 from a network's logits.

    The mask gets no probability, and a token that cannot be noise (pi_z = 0) is itself.

    Args:
        network: called as network(z, alpha, labels), gives logits (B, L, K).
        prior: the noise it was trained with.
        predicts: "loo" for a network trained by the NELBO, "plain" for one trained by
            cross-entropy on p(x_l | z), which is converted to leave-one-out.

    Example:
        >>> from psidiff.models import Parameterized
        >>> from psidiff.process import Masked
        >>> def network(z, alpha, labels=None):
        ...     return torch.zeros(*z.shape, 3)
        >>> denoiser = Parameterized(network, Masked(3, mask_id=2))
        >>> denoiser(torch.tensor([[2, 0]]), 0.5).exp()
        tensor([[[0.5000, 0.5000, 0.0000],
                 [1.0000, 0.0000, 0.0000]]])
    """

    def __init__(self, network: Any, prior: Prior, predicts: str = "loo") -> None:
        super().__init__()
        check_choice("predicts", predicts, ("loo", "plain"))
        self.network = network
        self.prior = prior
        self.predicts = predicts
        self._inside = inside = traits(network)
        split = inside.head and predicts == "loo"  # the shift of a plain one needs z
        if split:
            self.hidden: Any = network.hidden
            self.head = self._head
        self.traits = replace(
            inside,
            head=split,
            levels=split and inside.levels,
            recordable=split and inside.recordable,
            fusible=predicts == "loo",
            reader=False,
        )

    def forward(
        self,
        z: Tokens | SoftTokens | Probs,
        alpha: Any,
        labels: Tensor | None = None,
        mask: Tensor | None = None,
        then: Any = None,
    ) -> Tensor:
        """log x_theta; mask (B, L) is False at padding, for networks that know of it.

        then: the fused loss of the last layer, or of logits (`kernels.fused_linear_loss`).
        """
        padding = () if mask is None else (mask,)
        if then is not None and self._inside.fusible:
            return self.network(z, alpha, labels, *padding, then=then)
        if isinstance(alpha, Levels) and not self._inside.levels:
            alpha = alpha.per_position()
        logits = self.network(z, alpha, labels, *padding)
        if then is not None:
            check_denoiser_output(logits, self.prior.vocab_size)
            return then.of_logits(logits)
        log_x = self._exclude_mask(logits)
        if isinstance(z, SoftTokens) or z.is_floating_point():
            return log_x.log_softmax(-1)
        if self.predicts == "plain":
            log_x = to_leave_one_out(self.prior, z, log_x, alpha)
        carried = (self.prior.probs(like=log_x)[z] == 0)[..., None]
        itself = F.one_hot(z, self.prior.vocab_size).to(log_x).log()
        return torch.where(carried, itself, log_x.log_softmax(-1))

    def _head(self, rows: Tensor) -> Tensor:
        return self._exclude_mask(self.network.head(rows))

    def _exclude_mask(self, logits: Tensor) -> Tensor:
        check_denoiser_output(logits, self.prior.vocab_size)
        return self.prior.without_mask(at_least_float32(logits))
