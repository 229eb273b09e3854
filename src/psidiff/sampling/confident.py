"""The confident decoder: redraw everything, keep what x_theta is sure of, renoise the rest.

For masks it is the usual most-confident-first decoder; for other priors its self-correcting
twin. It looks at values, so it does not keep the marginals of the forward process.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..kernels.counter_rng import Purpose, exponential, fold_in
from ..types import check_choice, check_unit
from .step import LogitSource, OutputBuilder, StepOutput
from .step_batch import StepBatch


@dataclass(frozen=True)
class Confident:
    """A predictor that keeps the tokens x_theta is most confident of, and renoises the rest.

    For masks this is MaskGIT's decoder (Chang et al., 2022). It looks at values, so it does not
    keep the marginals of the forward process.

    Args:
        gumbel: how many times t of Gumbel noise are added to the score before positions are
            ranked, at least 0.
        argmax: take the most probable token instead of sampling x_hat.
        by: the score, of x_theta's row: "probability" of the drawn token (its log is ranked),
            "margin" of the most probable token over the next, or "entropy", negated.
        threshold: None keeps the share alpha_s of the free positions. A number keeps those
            whose probability or margin is at least it, or whose entropy in nats is at most it:
            always one position more than the step before, and all of them at alpha_s = 1.
        take_back: False: a token that cannot be noise (for masks: any but the mask) stays.
            True: it competes by the score it had when it was predicted, and may be noise again.
        commit: what is kept counts as given from then on: the network is called with level 1
            there, and it is never redrawn. For networks that were trained with given tokens.

    Raises:
        ValueError: if an argument is out of range, or commit and take_back are both set.

    Example:
        >>> from psidiff.process import LogLinear, Uniform
        >>> from psidiff.sampling import Confident, Constant, plan, sample
        >>> def denoiser(z, alpha, labels=None):
        ...     return torch.zeros(*z.shape, 5).log_softmax(-1)
        >>> steps = plan(4, LogLinear(), Constant(1.0))
        >>> surest = Confident(by="margin", argmax=True)
        >>> sample(denoiser, Uniform(5), steps, (1, 6), predictor=surest).tokens.shape
        torch.Size([1, 6])
    """

    gumbel: float = 0.0
    argmax: bool = False
    by: str = "probability"
    threshold: float | None = None
    take_back: bool = False
    commit: bool = False

    def __post_init__(self) -> None:
        if self.commit and self.take_back:
            raise ValueError("a token that is committed cannot be taken back: choose one")
        if not self.gumbel >= 0:
            raise ValueError(f"gumbel must be >= 0, got {self.gumbel:g}")
        check_choice("by", self.by, ("probability", "margin", "entropy"))
        if self.threshold is None:
            return
        if self.by != "entropy":
            check_unit("threshold", self.threshold)
        elif not self.threshold >= 0:
            raise ValueError(f"an entropy threshold must be >= 0, got {self.threshold:g}")

    def __call__(self, batch: StepBatch, source: LogitSource) -> StepOutput:
        """x_hat ~ x_theta everywhere; the best of it stays. Confidence holds the scores."""
        free, before = batch.free, batch.confidence
        assert before is not None
        drawn = free & (batch.pi_z > 0)  # elsewhere x_theta is z, beyond doubt
        if self.commit:
            known = ~free | before.isfinite()
            segments = tuple(replace(each, conditioned=True) for each in batch.segments)
            batch, drawn = replace(batch, given=known, segments=segments), drawn & ~known
        out = OutputBuilder(batch)
        assert out.confidence is not None
        for (rows,) in source.rows(out, drawn):
            greedy = batch.at(batch.numbers.greedy, rows.at) > 0
            out.predict(rows, True if self.argmax else greedy)
            if self.by != "probability":
                out.remember(rows.at, self._score(rows.x))
        committed = free & ~drawn if not self.take_back else torch.zeros_like(drawn)
        rank = self._order(batch, out.confidence, committed)
        first = torch.arange(free.shape[1], device=free.device) < self._count(batch, before)
        best = torch.zeros_like(drawn).scatter(-1, rank, first)
        lost = free & ~(best | committed | self._above_threshold(out.confidence))
        out.renoise(lost)
        out.confidence[lost] = torch.inf  # nothing is predicted there any more
        return out.done()

    def _score(self, x: Tensor) -> Tensor:
        """Of rows (N, K), the more the surer: (N,)."""
        if self.by == "entropy":
            return torch.xlogy(x, x).sum(-1)
        first, second = x.topk(2).values.unbind(-1)
        return first - second

    def _order(self, batch: StepBatch, confidence: Tensor, committed: Tensor) -> Tensor:
        """Positions by falling score: the committed ones first, the given ones last."""
        score = confidence.log() if self.by == "probability" else confidence
        if self.gumbel:
            race = exponential(fold_in(batch.rng_state, int(Purpose.SELECT)), score.dtype)
            score = score - self.gumbel * batch.numbers.t * race.log()
        score = score.masked_fill(committed, torch.inf).masked_fill(~batch.free, -torch.inf)
        return score.argsort(dim=-1, descending=True, stable=True)

    def _count(self, batch: StepBatch, before: Tensor) -> Tensor:
        """How many stay at least, (B, 1)."""
        free, alpha_s = batch.free.sum(-1, keepdim=True), batch.numbers.alpha_s
        if self.threshold is None:
            return (alpha_s * free + 0.5).floor()
        more = before.isfinite().sum(-1, keepdim=True) + 1
        return torch.where(torch.as_tensor(alpha_s == 1, device=free.device), free, more)

    def _above_threshold(self, score: Tensor) -> Tensor:
        """Where the score, without noise, passes the threshold."""
        if self.threshold is None:
            return torch.zeros_like(score, dtype=torch.bool)
        return score >= (-self.threshold if self.by == "entropy" else self.threshold)
