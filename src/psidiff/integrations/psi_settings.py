"""What the config of a PsiScheduler says, as objects: the sampler, the prior, the plan, and
what becomes of logits before tokens are drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..kernels.logit_rows import LogitBlock, RowFilters, shaped
from ..process import Masked, Prior, Uniform
from ..process.posterior import PREDICTORS, self_log_odds
from ..process.prior import PRIORS
from ..process.schedule import SCHEDULES
from ..sampling import Constant, Sampler, Step, parse_options
from ..sampling.dense_logits import row_filters
from ..sampling.filters import Chain, LogitsProcessor
from ..sampling.plan import sets_levels
from ..types import Tokens, check_choice, working_dtype

_EXPECTS = {"plugin": "loo", "marginal": "plain"}  # what the network's answer is taken for
_CHOICES = {"posterior": tuple(_EXPECTS), "predicts": ("loo", "plain", None)}
_OF_SAMPLER = (
    *("sampler", "kappa", "preset", "predictor", "last", "grid"),
    *("top_p", "top_k", "min_p", "nucleus"),
)
_NAMES = (*_OF_SAMPLER, "schedule", "predicts", "prior", "temperature")
_OF_PIPELINES = {  # settings of a sampler that a scheduler cannot follow, and who can
    "corrector": "give corrector_steps and corrector_k",
    "guidance": "the pipeline guides",
    "head": "the pipeline calls the network",
    "micro_batch": "the pipeline calls the network",
}


@dataclass(frozen=True)
class Shaping:
    """What becomes of logits before tokens are drawn, and for others to look at.

    chain    None: only the most probable token is drawn
    changes  whether what others see differs from the logits. With chain None it does not: a
             row without doubt would tell a pipeline that the network has none
    """

    chain: Chain | None
    changes: bool = False

    @property
    def drawing(self) -> LogitsProcessor:
        """What tokens are drawn from, as a function of rows."""
        return _only_the_largest if self.chain is None else self.chain

    @property
    def filters(self) -> RowFilters:
        """What becomes of rows that are read at once; of the largest alone, nothing."""
        return row_filters(Chain(()) if self.chain is None else self.chain)

    def shown(self, logits: Tensor) -> Tensor:
        """The logits as they were shaped, (B, L, K): themselves if they were not."""
        block = LogitBlock(logits, logits.new_empty(0))
        return shaped(block, self.filters) if self.changes else logits


@dataclass(frozen=True)
class Settings:
    """The config of a PsiScheduler, checked.

    posterior, predicts, prior   as in the config
    temperature  as in the config or its sampler; None leaves it to the pipeline
    num_steps    what the sampler or the grid says; None leaves it to the config
    """

    sampler: Sampler
    posterior: str
    predicts: str | None
    prior: dict[str, Any] | None
    temperature: float | None
    num_steps: int | None = None

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Settings:
        """From the config; what is None or left out says nothing."""
        config = {"posterior": "plugin", "eps": 0.0, **config}
        config = {**dict.fromkeys(_NAMES), **config}
        sampler = Sampler.of({name: config[name] for name in _OF_SAMPLER})
        for name in sampler.options(tuple(_OF_PIPELINES)):
            raise ValueError(f"a scheduler takes no {name}: {_OF_PIPELINES[name]}")
        if sampler.left_to_right:
            raise ValueError("a scheduler denoises: it takes no left-to-right")
        described = {"name": config["schedule"] or "loglinear", "eps": config["eps"]}
        schedule = SCHEDULES.from_dict(described)
        if config["schedule"] is not None or sampler.schedule is None:
            sampler = replace(sampler, schedule=schedule)
        temperature = config["temperature"]
        if temperature is None and sampler.temperature != 1:
            temperature = sampler.temperature
        said = parse_options(config["sampler"]) if config["sampler"] is not None else {}
        steps = said.get("steps") if isinstance(sampler.grid, str) else len(sampler.grid)
        names = ("posterior", "predicts", "prior")
        kept = {name: config[name] for name in names}
        return cls(sampler, **kept, temperature=temperature, num_steps=steps)

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            check_choice(name, getattr(self, name), allowed)
        self.shaping(None, None, None)
        if self.prior is not None:
            PRIORS.from_dict(self.prior)
        if getattr(self.predictor, "commit", False):
            raise ValueError(
                "predictor 'confident:commit' tells the network what it kept, which "
                "a scheduler cannot: leave commit out"
            )
        if self.sampler.confident and self.posterior == "marginal":
            raise ValueError("predictor 'confident' has no posterior: leave 'marginal' out")

    @property
    def predictor(self) -> Any:
        """A Predictor, or the Confident decoder."""
        return PREDICTORS.get(self.sampler.predictor, self.sampler.predictor)

    def plan(
        self, num_steps: int, times: Sequence[float] | None, prior: Prior
    ) -> tuple[Step, ...]:
        """N steps, from t = 1, 1 - 1/N, ... (or the given times) to the next, the last to 0.

        The sampler's grid comes before the even one; N counts its last step.
        """
        sampler = self.sampler
        if num_steps == 1:  # the only step is the last
            sampler = replace(sampler, kappa=Constant(1.0), grid="linear")
        own = sets_levels(sampler.kappa) or sampler.grid != "linear"
        if times is None and own:
            if isinstance(sampler.grid, str):
                sampler = replace(sampler, steps=num_steps - 1)
            elif len(sampler.grid) != num_steps:
                raise ValueError(
                    f"the grid has {len(sampler.grid)} times, but there are {num_steps} steps"
                )
        else:
            even = (1 - i / num_steps for i in range(num_steps))
            sampler = replace(sampler, grid=tuple(even if times is None else times))
        assert sampler.schedule is not None
        return sampler.plan(sampler.schedule, prior)

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
        self,
        temperature: float | None,
        top_p: float | None,
        top_k: int | None,
        static: bool = False,
    ) -> Shaping:
        """The config's; what it leaves open, the caller's; what nobody says, none.

        As diffusers counts, a caller's top_k of 0 is none. static: without asking the host.
        """
        said = [each for each in (self.temperature, temperature) if each is not None]
        for each in said:
            if not each >= 0:
                raise ValueError(f"temperature must be >= 0, got {each:g}")
        if said[:1] == [0]:
            return Shaping(None)
        own = self.sampler
        sampler = replace(
            own,
            temperature=said[0] if said else 1.0,
            top_p=top_p if own.top_p is None else own.top_p,
            top_k=(top_k or None) if own.top_k is None else own.top_k,
        )
        changes = sampler.options(("temperature", "top_k", "top_p", "min_p", "processor"))
        return Shaping(sampler.chain(static), bool(changes))

    def shift(self, prior: Prior, z: Tokens, alpha: float, wanted: str) -> Tensor | None:
        """What turns the network's answer into the wanted one, "loo" or "plain"."""
        have = self.predicts or _EXPECTS[self.posterior]
        if have == wanted:
            return None
        like = torch.zeros((), dtype=working_dtype(z.device), device=z.device)
        return self_log_odds(prior, z, alpha, like) * (-1 if wanted == "loo" else 1)


def _only_the_largest(logits: Tensor) -> Tensor:
    best = logits.argmax(-1, keepdim=True)
    return torch.full_like(logits, -torch.inf).scatter(-1, best, 0.0)
