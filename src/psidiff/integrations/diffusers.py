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
from .psi_settings import Settings
from .psi_steps import PsiStep, PsiSteps

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
        vars(self)["_ready"] = True

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name == "pred_logits" and callable(value) and "_ready" in vars(self):
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
        num_inference_steps: N; pipelines set it by `set_timesteps`.
        kappa: a rule in words: ancestral, constant:.95@.1-.5, cap:.01, rescale:.05, loop:.02,
            confidence:.05, fb, dfm. None: the preset's, or else cap:0.005.
        preset: a named sampler (`psidiff.sampling.PRESETS`) for all that is None here.
        posterior: "plugin": the posterior at x_theta, as in the paper. "marginal": x_0 is drawn
            first, as DiscreteDDIMScheduler does.
        predicts: what the logits are: "loo", p(x_l | z without z_l), as the NELBO trains them,
            or "plain", p(x_l | z), as cross-entropy does (DiffusionGemma). They are converted
            to what the posterior expects. None: taken as that, loo for plugin.
        predictor: markov, maximal, or confident with its settings.
        schedule: loglinear or cosine; None: the preset's, or else loglinear.
        eps: of the schedule; loglinear and 0 is alpha = 1 - t.
        last: "sample", or "greedy" on the last step.
        temperature: of x_theta. None: what the pipeline passes, and 1 if it passes none; so are
            top_p and top_k.
        top_p: mass of the most probable tokens that are kept.
        top_k: number of tokens that are kept.
        min_p: least probability that is kept, as a share of the largest.
        nucleus: "keep" or "drop" the token that crosses top_p.
        prior: such as {"name": "mixed", "vocab_size": 9, "mask_id": 8, "uniform": 0.1}. None:
            the mask that the pipeline names, else uniform.
        timestep_type: what `timesteps` holds: "discrete" indices 0 to N - 1, "continuous" times
            falling from 1. `step` takes both.
        block_length: the pipeline's, where it asks.
        corrector_steps: leave-one-out sweeps after steps, for pipelines that offer them.
        corrector_k: tokens that a sweep redraws.
        corrector_selection: which ones: "random" or "uncertain".

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
        predictor: str = "markov",
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
    ) -> None:
        check_choice("timestep_type", timestep_type, ("discrete", "continuous"))
        as_count("block_length", block_length)
        corrector = None
        if as_count("corrector_steps", corrector_steps, least=0):
            corrector = Corrector(1, corrector_k, corrector_selection)
        settings = Settings.of(self.config)
        self.steps = PsiSteps(settings, num_inference_steps, corrector)
        self.set_timesteps(num_inference_steps)

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

    def check_eos_finished(
        self,
        cur_x: Tensor,
        sampled_tokens: Tensor,
        final_transfer: Tensor,
        finished: Tensor,
        eos_token_id: int,
        mask_token_id: int,
        prompt_length: int,
    ) -> Tensor:
        """Rows with an end of text and no mask before it, once nothing can change them."""
        if not self.steps.settled:
            return finished
        made = cur_x[:, prompt_length:]
        unmasked = (made == mask_token_id).cumsum(-1) == 0
        return finished | ((made == eos_token_id) & unmasked).any(-1)

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
