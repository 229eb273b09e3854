"""What the config of a PsiScheduler says, as objects: plans, priors, shaping."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..process import Cosine, LogLinear, Masked, NoiseSchedule, Prior, Uniform
from ..process.conversion import own_odds
from ..process.described import prior_from
from ..process.posterior import PREDICTORS
from ..sampling import Confident, Constant, Kappa, Step, parse_kappa, parse_predictor, plan
from ..sampling.presets import Preset, preset
from ..types import Tokens, as_count, working_dtype
from .given_logits import Shaping

_SCHEDULES: dict[str, Any] = {"loglinear": LogLinear, "cosine": Cosine}
_EXPECTS = {"plugin": "loo", "marginal": "plain"}  # what the network's answer is taken for


@dataclass(frozen=True)
class Settings:
    """A sampler in words and numbers, checked. None leaves the choice to `preset`.

    Names and meanings are those of PsiScheduler's config.
    """

    kappa: str | None
    preset: str | None
    posterior: str
    predicts: str | None
    predictor: str
    schedule: str | None
    eps: float
    last: str | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    nucleus: str | None
    prior: dict[str, Any] | None

    def __post_init__(self) -> None:
        _one_of("posterior", self.posterior, tuple(_EXPECTS))
        _one_of("predicts", self.predicts, ("loo", "plain", None))
        _one_of("schedule", self.schedule, (*_SCHEDULES, None))
        self.shaping(None, None, None)
        if self.prior is not None:
            prior_from(self.prior)
        renoises = isinstance(self.advance, Confident)
        if renoises and self._rule(Uniform(2)) != Constant(1.0):
            raise ValueError("predictor 'confident' renoises by itself: leave kappa out")
        if getattr(self.advance, "commit", False):
            raise ValueError(
                "predictor 'confident:commit' tells the network what it kept, which "
                "a scheduler cannot: leave commit out"
            )
        if renoises and self.posterior == "marginal":
            raise ValueError("predictor 'confident' has no posterior: leave 'marginal' out")

    @property
    def base(self) -> Preset:
        """The preset, or what stands in for one."""
        if self.preset is not None:
            return preset(self.preset)
        usual = "ancestral" if isinstance(self.advance, Confident) else "cap:0.005"
        return Preset(usual, "the default")

    @property
    def advance(self) -> Any:
        """A Predictor, or the Confident decoder."""
        found = parse_predictor(self.predictor)
        return PREDICTORS[found] if isinstance(found, str) else found

    def plan(
        self, num_steps: int, times: Sequence[float] | None, prior: Prior
    ) -> tuple[Step, ...]:
        """N steps, from t = 1, 1 - 1/N, ... (or the given times) to the next, the last to 0."""
        as_count("num_inference_steps", num_steps)
        rule, schedule = self._rule(prior), self._schedule()
        last = self.last or self.base.last
        if num_steps == 1:
            rule = Constant(1.0)  # the only step is the last
        if times is None and getattr(rule, "levels", None) is not None:
            return plan(num_steps - 1, schedule, rule, last=last)
        grid = [1 - i / num_steps for i in range(num_steps)] if times is None else times
        return plan(None, schedule, rule, grid, last)

    def prior_for(self, vocab_size: int, mask_id: int | None) -> Prior:
        """The config's prior; else all mass on the mask, or spread evenly if there is none."""
        if self.prior is None:
            return Uniform(vocab_size) if mask_id is None else Masked(vocab_size, mask_id)
        prior = prior_from(self.prior)
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
        return Shaping(
            _first(self.temperature, asked.temperature),
            _first(self.top_k, asked.top_k),
            _first(self.top_p, self.base.top_p, asked.top_p),
            self.min_p,
            _first(self.nucleus, self.base.nucleus),
        )

    def shift(self, prior: Prior, z: Tokens, alpha: float, wanted: str) -> Tensor | None:
        """What turns the network's answer into the wanted one, "loo" or "plain"."""
        have = self.predicts or _EXPECTS[self.posterior]
        if have == wanted:
            return None
        like = torch.zeros((), dtype=working_dtype(z.device), device=z.device)
        return own_odds(prior, z, alpha, like) * (-1 if wanted == "loo" else 1)

    def _rule(self, prior: Prior) -> Kappa:
        return self.base.rule(prior) if self.kappa is None else parse_kappa(self.kappa)

    def _schedule(self) -> NoiseSchedule:
        if self.schedule is None and self.base.schedule is not None:
            return self.base.schedule
        return _SCHEDULES[self.schedule or "loglinear"](self.eps)


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _one_of(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if value not in allowed:
        words = ", ".join(repr(each) for each in allowed if each is not None)
        raise ValueError(f"{name} must be one of {words}, got {value!r}")
