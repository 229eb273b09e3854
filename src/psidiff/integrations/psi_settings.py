"""What the config of a PsiScheduler says, as objects: the sampler, the prior, the plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..process import LogLinear, Masked, Prior, Uniform
from ..process.conversion import own_odds
from ..process.posterior import PREDICTORS
from ..process.prior import PRIORS
from ..process.schedule import SCHEDULES
from ..sampling import Constant, Sampler, Step, plan
from ..types import Tokens, as_count, working_dtype
from .given_logits import Shaping

_EXPECTS = {"plugin": "loo", "marginal": "plain"}  # what the network's answer is taken for


@dataclass(frozen=True)
class Settings:
    """The config of a PsiScheduler, checked.

    posterior, predicts, prior   as in the config
    temperature  as in the config; None leaves it to the pipeline
    usual        the schedule, where the sampler has none
    """

    sampler: Sampler
    posterior: str
    predicts: str | None
    prior: dict[str, Any] | None
    temperature: float | None
    usual: LogLinear

    @classmethod
    def of(
        cls,
        posterior: str,
        predicts: str | None,
        prior: dict[str, Any] | None,
        schedule: str | None,
        eps: float,
        temperature: float | None,
        **options: Any,
    ) -> Settings:
        """From the config; options are the other settings of a `Sampler`, None says nothing."""
        usual, named = LogLinear(eps), None
        if schedule is not None:
            named = SCHEDULES.from_dict({"name": schedule, "eps": eps})
        sampler = Sampler.of({**options, "schedule": named})
        return cls(sampler, posterior, predicts, prior, temperature, usual)

    def __post_init__(self) -> None:
        _one_of("posterior", self.posterior, tuple(_EXPECTS))
        _one_of("predicts", self.predicts, ("loo", "plain", None))
        self.shaping(None, None, None)
        if self.prior is not None:
            PRIORS.from_dict(self.prior)
        if getattr(self.advance, "commit", False):
            raise ValueError(
                "predictor 'confident:commit' tells the network what it kept, which "
                "a scheduler cannot: leave commit out"
            )
        if self.sampler.confident and self.posterior == "marginal":
            raise ValueError("predictor 'confident' has no posterior: leave 'marginal' out")

    @property
    def advance(self) -> Any:
        """A Predictor, or the Confident decoder."""
        return PREDICTORS.get(self.sampler.predictor, self.sampler.predictor)

    def plan(
        self, num_steps: int, times: Sequence[float] | None, prior: Prior
    ) -> tuple[Step, ...]:
        """N steps, from t = 1, 1 - 1/N, ... (or the given times) to the next, the last to 0."""
        as_count("num_inference_steps", num_steps)
        schedule, last = self.sampler.schedule or self.usual, self.sampler.last
        # the only step is the last
        rule = Constant(1.0) if num_steps == 1 else self.sampler.rule(prior)
        if times is None and getattr(rule, "levels", None) is not None:
            return plan(num_steps - 1, schedule, rule, last=last)
        grid = [1 - i / num_steps for i in range(num_steps)] if times is None else times
        return plan(None, schedule, rule, grid, last)

    def prior_for(self, vocab_size: int, mask_id: int | None) -> Prior:
        """The config's prior; else all mass on the mask, or spread evenly if there is none."""
        if self.prior is None:
            return Uniform(vocab_size) if mask_id is None else Masked(vocab_size, mask_id)
        prior = PRIORS.from_dict(self.prior)
        if mask_id is not None and prior.mask_id != mask_id:
            raise ValueError(
                f"the pipeline masks with token {mask_id}, the config's prior is {prior}"
            )
        return prior

    def shaping(
        self, temperature: float | None, top_p: float | None, top_k: int | None
    ) -> Shaping:
        """The config's; what it leaves open, the caller's; what nobody says, none.

        As diffusers counts, a caller's top_k of 0 is none.
        """
        asked = Shaping(_first(temperature, 1.0), top_k or None, top_p)
        sampler = self.sampler
        return Shaping(
            _first(self.temperature, asked.temperature),
            _first(sampler.top_k, asked.top_k),
            _first(sampler.top_p, asked.top_p),
            sampler.min_p,
            sampler.nucleus,
        )

    def shift(self, prior: Prior, z: Tokens, alpha: float, wanted: str) -> Tensor | None:
        """What turns the network's answer into the wanted one, "loo" or "plain"."""
        have = self.predicts or _EXPECTS[self.posterior]
        if have == wanted:
            return None
        like = torch.zeros((), dtype=working_dtype(z.device), device=z.device)
        return own_odds(prior, z, alpha, like) * (-1 if wanted == "loo" else 1)


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _one_of(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if value not in allowed:
        words = ", ".join(repr(each) for each in allowed if each is not None)
        raise ValueError(f"{name} must be one of {words}, got {value!r}")
