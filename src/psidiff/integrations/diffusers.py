"""PsiScheduler: Psi-samplers in the pipelines of diffusers.

pipe.scheduler = PsiScheduler(kappa="cap:0.01", temperature=1.0)

It stands where DiscreteDDIMScheduler stands in DiffusionGemmaPipeline and, for masks, where
BlockRefinementScheduler stands in LLaDA2Pipeline. A pipeline that was saved with it loads once
this module is imported: diffusers itself imports no library that a file names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Generator, Tensor

from ..process import Prior
from ..sampling import Corrector, Step
from ..types import as_count, check_choice
from .foreign_configs import refuse_foreign, warn_of_foreign
from .noised_views import noised_views
from .psi_settings import Settings
from .psi_steps import PsiStep, PsiSteps
from .scored_corrector import SELECTIONS, ScoredCorrector

try:
    _diffusers: Any = import_module("diffusers")
    _Output: Any = import_module("diffusers.utils").BaseOutput
except ImportError as error:
    raise ImportError("PsiScheduler needs: pip install 'psidiff[diffusers]'") from error

SchedulerMixin: Any = _diffusers.SchedulerMixin  # by this name pipelines see what to load
ConfigMixin: Any = _diffusers.ConfigMixin
_register: Any = import_module("diffusers.configuration_utils").register_to_config


@dataclass
class PsiSchedulerOutput(_Output):
    """What a step made, (B, L) each but pred_logits (B, L, K).

    prev_sample     z_s
    sampled_tokens  where a token was predicted, and everywhere on the last step, that of z_s;
                    elsewhere the most probable one
    sampled_probs   their probabilities
    pred_logits     the network's logits at the temperature and truncation they were drawn with;
                    made when they are read, and where nothing is shaped the logits themselves
    transfer_index, editing_transfer_index   which masks, and which other tokens, changed
    route           0 kept, 1 predicted, 2 renoised
    """

    prev_sample: Tensor
    sampled_tokens: Tensor
    sampled_probs: Tensor
    pred_logits: Any
    transfer_index: Tensor | None = None
    editing_transfer_index: Tensor | None = None
    route: Tensor | None = None

    @classmethod
    def of(cls, made: PsiStep, mask_id: int | None = None) -> PsiSchedulerOutput:
        """From a step."""
        logits: Any = made.pred_logits if made.shaping.changes else made.logits
        return cls(
            made.z, made.tokens, made.probs, logits, *made.transfers(mask_id), made.route
        )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.__dict__["_ready"] = True

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name == "pred_logits" and callable(value) and "_ready" in self.__dict__:
            value = self.pred_logits = value()
        return value

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice):
            return self.to_tuple()[key]
        return getattr(self, key if isinstance(key, str) else list(self.keys())[key])

    def items(self) -> Any:
        """Names and values, with the logits made."""
        return dict(zip(self.keys(), self.values(), strict=True)).items()

    def values(self) -> Any:
        """All that is not None, with the logits made."""
        return self.to_tuple()


class PsiScheduler(SchedulerMixin, ConfigMixin):
    """A scheduler of diffusers that samples by Psi.

    z_s ~ Psi_{s|t}(. | z_t) = kappa q_{s|t} + (1 - kappa) q_s(. | q_{0|t})  (Eq. 12)

    Step 0 forgets what `confidence` rules remember. Each step takes one key from the generator.

    Args:
        num_inference_steps: N; pipelines set it by `set_timesteps`. What the sampler says of
            steps, or a grid of times, comes first.
        kappa: a rule in words: ancestral, constant:.95@.1-.5, cap:.01, rescale:.05, loop:.02,
            confidence:.05, fb, dfm. None: the preset's, or else cap:0.005.
        preset: a named sampler (`psidiff.sampling.PRESETS`) for all that is None here.
        sampler: a sampler in words, "cap:.01 grid=alpha top_p=.9", for all that is None here.
        posterior: "plugin": the posterior at x_theta, as in the paper. "marginal": x_0 is drawn
            first, as DiscreteDDIMScheduler does.
        predicts: what the logits are: "loo", p(x_l | z without z_l), as the NELBO trains them,
            or "plain", p(x_l | z), as cross-entropy does (DiffusionGemma). They are converted
            to what the posterior expects. None: taken as that, loo for plugin.
        predictor: markov, maximal, or confident with its settings. None: markov.
        schedule: loglinear or cosine; None: the preset's, or else loglinear.
        eps: of the schedule; loglinear and 0 is alpha = 1 - t.
        last: "sample", or "greedy" on the last step.
        temperature: of x_theta. None: what the pipeline passes, and 1 if it passes none; so are
            top_p and top_k.
        top_p: mass of the most probable tokens that are kept.
        top_k: number of tokens that are kept.
        min_p: least probability that is kept, as a share of the largest.
        grid: linear, alpha, quadratic or falling times, 1,.5,.2. None: the sampler's, and
            linear.
        nucleus: "keep" or "drop" the token that crosses top_p.
        prior: such as {"name": "mixed", "vocab_size": 9, "mask_id": 8, "uniform": 0.1}. None:
            the mask that the pipeline names, else uniform.
        timestep_type: what `timesteps` holds: "discrete" indices 0 to N - 1, "continuous" times
            falling from 1. `step` takes both.
        block_length: the pipeline's, where it asks.
        corrector_steps: leave-one-out sweeps after steps, for pipelines that offer them.
        corrector_k: tokens that a sweep redraws.
        corrector_selection: which ones: "random"; or as DiscreteDDIMScheduler chooses them, by
            scores that look at the token itself and so move the marginals a little:
            "lowest_log_margin", "lowest_maxprob", "lowest_current_prob"; or "uncertain".
        corrector_selection_tau: temperature of such a choice; lower is greedier.
        corrector_doubt: "random", but more often where x_theta is in doubt, which leaves the
            marginals as they are; "uncertain" means this, too.

    Raises:
        ValueError: if a value is out of range, or two of them do not go together.

    Example:
        >>> from psidiff.integrations.diffusers import PsiScheduler
        >>> scheduler = PsiScheduler(8, kappa="cap:0.01", temperature=1.0)
        >>> scheduler.timesteps
        tensor([0, 1, 2, 3, 4, 5, 6, 7])
    """

    order = 1
    _compatibles = [  # noqa: RUF012  # diffusers reads a list
        "DiscreteDDIMScheduler",
        "EntropyBoundScheduler",
        "BlockRefinementScheduler",
    ]

    @_register
    def __init__(
        self,
        num_inference_steps: int = 32,
        kappa: str | None = None,
        preset: str | None = None,
        posterior: str = "plugin",
        predicts: str | None = None,
        predictor: str | None = None,
        schedule: str | None = None,
        eps: float = 0.0,
        last: str | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        min_p: float | None = None,
        nucleus: str | None = None,
        prior: dict[str, Any] | None = None,
        timestep_type: str = "discrete",
        block_length: int = 32,
        corrector_steps: int = 0,
        corrector_k: int = 1,
        corrector_selection: str = "random",
        corrector_selection_tau: float = 1.0,
        corrector_doubt: bool = False,
        sampler: str | None = None,
        grid: str | None = None,
    ) -> None:
        check_choice("timestep_type", timestep_type, ("discrete", "continuous"))
        as_count("block_length", block_length)
        if corrector_selection == "uncertain":  # a word that diffusers' own would not know
            corrector_selection, corrector_doubt = "random", True
            self.register_to_config(corrector_selection="random", corrector_doubt=True)
        corrector = _corrector(
            corrector_k, corrector_selection, corrector_selection_tau, corrector_doubt
        )
        count = as_count("corrector_steps", corrector_steps, least=0)
        settings = Settings.of(self.config)
        steps = settings.num_steps or num_inference_steps
        self.steps = PsiSteps(settings, steps, corrector if count else None)
        self.__dict__["check_eos_finished"] = self._finished_if_settled
        self.set_timesteps(steps)

    @classmethod
    def from_config(cls, config: Any = None, *args: Any, **kwargs: Any) -> Any:
        """From a config, also of DiscreteDDIM-, EntropyBound- and BlockRefinementScheduler.

        Args:
            config: the config, such as `pipe.scheduler.config`.
            args: as diffusers takes them.
            kwargs: options that come before the config's.

        Returns:
            The scheduler.

        Raises:
            ValueError: if an option belongs to another scheduler.

        Example:
            >>> from diffusers import DiscreteDDIMScheduler
            >>> from psidiff.integrations.diffusers import PsiScheduler
            >>> theirs = DiscreteDDIMScheduler(num_inference_steps=48)
            >>> PsiScheduler.from_config(theirs.config, kappa="cap:.01").num_inference_steps
            48
        """
        refuse_foreign(kwargs)
        if isinstance(config, dict):
            warn_of_foreign(config)
        return super().from_config(config, *args, **kwargs)

    @classmethod
    def _get_compatibles(cls) -> list[Any]:
        return [cls, *super()._get_compatibles()]  # which knows diffusers' own classes only

    @property
    def settings(self) -> Settings:
        """The config as objects."""
        return self.steps.settings

    @property
    def num_inference_steps(self) -> int:
        """N."""
        return self.steps.num_steps

    @property
    def taken(self) -> Step | None:
        """The step of the plan that was taken last."""
        return self.steps.taken

    @property
    def route(self) -> Tensor | None:
        """What it did, (B, L): 0 kept, 1 predicted, 2 renoised."""
        return self.steps.route

    def set_timesteps(
        self,
        num_inference_steps: int | None = None,
        device: str | torch.device | None = None,
        block_length: int | None = None,
        timesteps: Sequence[float] | None = None,
    ) -> None:
        """Compute the steps: N from t = 1 in equal parts, or one from each of given times.

        Args:
            num_inference_steps: N.
            device: where `timesteps` and `times` are.
            block_length: the pipeline's; it is checked and not used.
            timesteps: falling times, which replace N.

        Raises:
            ValueError: if a number is no whole number of at least 1.

        Example:
            >>> from psidiff.integrations.diffusers import PsiScheduler
            >>> scheduler = PsiScheduler()
            >>> scheduler.set_timesteps(4)
            >>> scheduler.times
            tensor([1.0000, 0.7500, 0.5000, 0.2500])
        """
        if block_length is not None:
            as_count("block_length", block_length)
        self.steps.set(num_inference_steps, timesteps)
        self.times = torch.tensor(self.steps.times, device=device)
        self.timesteps = self.times
        if self.config.timestep_type == "discrete":
            self.timesteps = torch.arange(self.num_inference_steps, device=device)

    def plan_for(self, prior: Prior) -> tuple[Step, ...]:
        """All N steps; a mask may follow some presets further than other priors."""
        return self.steps.plan_for(prior)

    def step(
        self,
        model_output: Tensor,
        timestep: int | float | Tensor,
        sample: Tensor,
        *,
        mask_token_id: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        sampling_method: str = "auto",
        threshold: float | None = None,
        editing_threshold: float | None = None,
        minimal_topk: int | None = None,
        prompt_mask: Tensor | None = None,
        generator: Generator | None = None,
        return_dict: bool = True,
    ) -> PsiSchedulerOutput | tuple[Tensor, ...]:
        """Draw z_s, one step of the plan from z_t.

        The config's temperature, top_p and top_k come first. The thresholds and minimal_topk
        are of schedulers that commit by confidence: a mixture has none.

        Args:
            model_output: logits (B, L, K) of the network at `sample`.
            timestep: the index of the step, or its time as a float.
            sample: z_t, token ids (B, L).
            mask_token_id: the mask that the pipeline fills in; None: it has none.
            temperature: of x_theta, where the config has none; 0 draws the most probable token.
            top_p: mass of the tokens that are kept, where the config has none.
            top_k: number of tokens that are kept, where the config has none; 0 is all.
            sampling_method: "greedy" is temperature 0.
            threshold: not used.
            editing_threshold: not used.
            minimal_topk: not used.
            prompt_mask: (L,) or (B, L), True where a token never changes.
            generator: where one random key is drawn from; None: torch's global generator.
            return_dict: False: a tuple of prev_sample, then with a mask_token_id transfer_index
                and editing_transfer_index, then sampled_tokens, sampled_probs and pred_logits.

        Returns:
            `PsiSchedulerOutput`, whose prev_sample is z_s.

        Raises:
            ValueError: if shapes differ, an id is no token, or the plan has no such step.

        Example:
            >>> from psidiff.integrations.diffusers import PsiScheduler
            >>> scheduler, z = PsiScheduler(8), torch.tensor([[3, 1, 4]])
            >>> for i in scheduler.timesteps:
            ...     logits = torch.zeros(1, 3, 5)  # of your network at z
            ...     z = scheduler.step(logits, i, z).prev_sample
            >>> z.shape
            torch.Size([1, 3])
        """
        if sampling_method == "greedy":
            temperature = 0.0
        made = self.steps.step(
            model_output,
            timestep,
            sample,
            mask_id=mask_token_id,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            fixed=prompt_mask,
            generator=generator,
        )
        if return_dict:
            return PsiSchedulerOutput.of(made, mask_token_id)
        transfers = () if mask_token_id is None else made.transfers(mask_token_id)
        return (made.z, *transfers, made.tokens, made.probs, made.pred_logits())

    def step_correct(
        self,
        model_output: Tensor,
        timestep: int | float | Tensor,
        sample: Tensor,
        *,
        mask_token_id: int | None = None,
        generator: Generator | None = None,
        return_dict: bool = True,
    ) -> PsiSchedulerOutput | tuple[Tensor, ...]:
        """A sweep at the level that step `timestep` reached: corrector_k tokens redrawn."""
        made = self.steps.correct(
            model_output, timestep, sample, mask_id=mask_token_id, generator=generator
        )
        if return_dict:
            return PsiSchedulerOutput.of(made)
        return made.z, made.tokens, made.probs, made.pred_logits()

    @staticmethod
    def check_eos_finished(
        cur_x: Tensor,
        sampled_tokens: Tensor,
        final_transfer: Tensor,
        finished: Tensor,
        eos_token_id: int,
        mask_token_id: int,
        prompt_length: int,
    ) -> Tensor:
        """Rows that were finished, and those with an end of text and no mask before it.

        A scheduler's own says so only once nothing can change them any more.
        """
        made = cur_x[:, prompt_length:]
        unmasked = (made == mask_token_id).cumsum(-1) == 0
        return finished | ((made == eos_token_id) & unmasked).any(-1)

    def _finished_if_settled(self, *args: Any, **options: Any) -> Tensor:
        """`check_eos_finished` once what has no mask before it stays."""
        if self.steps.settled:
            return PsiScheduler.check_eos_finished(*args, **options)
        return options["finished"] if "finished" in options else args[3]

    def add_noise(
        self,
        original_samples: Tensor,
        attention_mask: Tensor | None = None,
        *,
        prompt_length: int = 0,
        block_length: int | None = None,
        mask_token_id: int | None = None,
        vocab_size: int | None = None,
        generator: Generator | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Noise clean sequences block by block, for training.

        Every block after the prompt gets a time of its own, uniform in [0, 1], and each of its
        tokens is noise with probability 1 - alpha there.

        Args:
            original_samples: clean token ids, (B, L).
            attention_mask: (B, L), 0 at padding, which stays clean; None: there is none.
            prompt_length: tokens at the start that stay clean.
            block_length: of a block; None: the config's.
            mask_token_id: the mask, where the config's prior does not say it.
            vocab_size: K, where neither says it: for the uniform prior.
            generator: where one random key is drawn from; None: torch's global generator.

        Returns:
            noisy and noisy_rev, of which each is noise where the other is clean, and where they
            are: masked and masked_rev, (B, L) each.

        Raises:
            ValueError: if the prior is not known, or shapes differ.

        Example:
            >>> from psidiff.integrations.diffusers import PsiScheduler
            >>> clean = torch.arange(6)[None]
            >>> views = PsiScheduler().add_noise(clean, mask_token_id=9, block_length=3)
            >>> bool((views[2] ^ views[3]).all())
            True
        """
        known = self.config.prior or {}
        size = known.get("vocab_size", vocab_size)
        if size is None and mask_token_id is not None:
            size = max(int(original_samples.max()), mask_token_id) + 1
        if size is None:
            raise ValueError("add_noise needs mask_token_id, or vocab_size for uniform noise")
        schedule = self.settings.sampler.schedule
        assert schedule is not None
        return noised_views(
            original_samples,
            torch.ones_like(original_samples) if attention_mask is None else attention_mask,
            self.settings.prior_for(size, mask_token_id),
            schedule,
            prompt_length,
            self.config.block_length if block_length is None else block_length,
            generator,
        )

    def check_block_should_continue(
        self,
        step_idx: int,
        masks_remaining: bool | Tensor,
        editing_enabled: bool,
        editing_transfer_index: Tensor,
        post_steps: int,
        max_post_steps: int,
        finished: Tensor,
    ) -> bool:
        """Until the plan ends, or all there was to unmask is and stays so.

        LLaDA2Pipeline does not count a step that began without masks. The plan does: it may
        mask again.
        """
        if not masks_remaining:
            self.steps.uncounted += 1
            if self.steps.settled and not bool(editing_transfer_index.any()):
                return False
        over = step_idx + self.steps.uncounted >= self.num_inference_steps
        return not over and not bool(finished.all())


def _corrector(size: int, select: str, tau: float, doubt: bool) -> Corrector | ScoredCorrector:
    if select in SELECTIONS:
        if doubt:
            raise ValueError(f"corrector_doubt goes with 'random', not with {select!r}")
        return ScoredCorrector(size, select, tau)
    check_choice("corrector_selection", select, ("random", "uncertain", *SELECTIONS))
    return Corrector(1, size, "uncertain" if doubt else "random")
