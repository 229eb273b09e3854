"""PsiScheduler: Psi-samplers in the pipelines of diffusers.

pipe.scheduler = PsiScheduler(kappa="cap:0.01", temperature=1.0)

It stands where DiscreteDDIMScheduler stands in DiffusionGemmaPipeline and, for masks, where
BlockRefinementScheduler stands in LLaDA2Pipeline. A pipeline that was saved with it loads once
this module is imported: diffusers itself imports no library that a file names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from numbers import Integral, Real
from typing import Any

import torch
from torch import Generator, Tensor

from ..kernels.counter_rng import fold_in, new_key
from ..process import Masked, Prior, Uniform
from ..sampling import Confident, Corrector, Step
from ..sampling.kappa import Memory
from ..sampling.logit_sources import PrecomputedLogits
from ..sampling.plan import last_change
from ..sampling.step import KEPT, PREDICTED, StepOutput, psi_step
from ..sampling.step_batch import BatchSegment, StepBatch, step_numbers
from ..sampling.steppers import Stepper, sample_x0_first
from ..types import as_count, as_tokens, check_choice, check_shape, working_dtype
from .psi_settings import Settings, Shaping

try:
    _diffusers: Any = import_module("diffusers")
    _Output: Any = import_module("diffusers.utils").BaseOutput
except ImportError as error:
    raise ImportError("PsiScheduler needs: pip install 'psidiff[diffusers]'") from error

_CLOSE = 1e-5  # times come back from float32 tensors
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
    pred_logits     the network's logits at the temperature and truncation they were drawn with
    transfer_index, editing_transfer_index   which masks, and which other tokens, changed
    route           0 kept, 1 predicted, 2 renoised
    """

    prev_sample: Tensor
    sampled_tokens: Tensor
    sampled_probs: Tensor
    pred_logits: Tensor
    transfer_index: Tensor | None = None
    editing_transfer_index: Tensor | None = None
    route: Tensor | None = None


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
        sampler: str | None = None,
        grid: str | None = None,
    ) -> None:
        check_choice("timestep_type", timestep_type, ("discrete", "continuous"))
        as_count("block_length", block_length)
        if as_count("corrector_steps", corrector_steps, least=0):
            self._corrector = Corrector(1, corrector_k, corrector_selection)
        self.settings = Settings.of(self.config)
        self.set_timesteps(self.settings.num_steps or num_inference_steps)

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
        if timesteps is not None:
            timesteps = [float(t) for t in timesteps]
            num_inference_steps = len(timesteps)
        self.num_inference_steps = as_count("num_inference_steps", num_inference_steps)
        self._times = timesteps
        self._plans: dict[bool, tuple[Step, ...]] = {}
        times = [step.t for step in self.plan_for(Uniform(2))]
        self.times = torch.tensor(times, device=device)
        self.timesteps = self.times
        if self.config.timestep_type == "discrete":
            self.timesteps = torch.arange(self.num_inference_steps, device=device)
        self._confidence: Tensor | None = None
        self._uncounted = 0  # steps of this block that the pipeline did not count
        self._settled = False
        self.route: Tensor | None = None
        self.taken: Step | None = None

    def plan_for(self, prior: Prior) -> tuple[Step, ...]:
        """All N steps; a mask may follow some presets further than other priors."""
        masked = isinstance(prior, Masked)
        if masked not in self._plans:
            self._plans[masked] = self.settings.plan(
                self.num_inference_steps, self._times, prior
            )
        return self._plans[masked]

    @torch.no_grad()
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
        shaping = self.settings.shaping(temperature, top_p, top_k)
        batch, prior, index = self._batch(
            model_output, timestep, sample, shaping, mask_token_id, generator, prompt_mask
        )
        plan = self.plan_for(prior)
        self.taken, self._settled = plan[index], self._nothing_follows(prior, plan, index)
        wanted = "plain" if self.settings.posterior == "marginal" else "loo"
        shift = self.settings.shift(prior, batch.z, self.taken.alpha_t, wanted)
        out = self._move(self._stepper(self.taken), batch, model_output, shift)
        self.route = out.route
        predicted = out.route == PREDICTED if self.taken.alpha_s < 1 else out.route >= KEPT
        reported = shaping.report(model_output, torch.where(predicted, out.z, -1))
        changed, masks = out.z != batch.z, torch.zeros_like(batch.free)
        if mask_token_id is not None:
            masks = batch.z == mask_token_id
        transfers = masks & changed, ~masks & changed
        if return_dict:
            return PsiSchedulerOutput(out.z, *reported, *transfers, out.route)
        return (out.z, *(() if mask_token_id is None else transfers), *reported)

    @torch.no_grad()
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
        if not self.config.corrector_steps:
            raise ValueError("corrector_steps is 0 in this scheduler's config")
        shaping = self.settings.shaping(None, None, None)
        batch, prior, index = self._batch(
            model_output, timestep, sample, shaping, mask_token_id, generator
        )
        if prior.mask_id is not None:
            raise ValueError("a leave-one-out corrector needs a prior without a mask")
        level = self.plan_for(prior)[index].alpha_s
        shift = self.settings.shift(prior, batch.z, level, "loo")
        batch = replace(batch, draw=-1 - index)
        out = self._move(self._corrector, batch, model_output, shift)
        drawn = torch.where(out.route == PREDICTED, out.z, -1)
        reported = shaping.report(model_output, drawn)
        if return_dict:
            return PsiSchedulerOutput(out.z, *reported, route=out.route)
        return out.z, *reported

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
        if not self._settled:
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
            self._uncounted += 1
            if self._settled and not bool(editing_transfer_index.any()):
                return False
        over = step_idx + self._uncounted >= self.num_inference_steps
        return not over and not bool(finished.all())

    def _index(self, timestep: Any, plan: tuple[Step, ...]) -> int:
        """Which step: by its number, or by its time. The first begins anew."""
        one = isinstance(timestep, Tensor) and timestep.numel() == 1
        value = timestep.item() if one else timestep
        if isinstance(value, bool) or not isinstance(value, Real):
            raise ValueError(f"timestep must be an index or a time, got {timestep!r}")
        number = int(value) if isinstance(value, Integral) else _nearest(float(value), plan)
        if number == 0:
            self._confidence, self._uncounted = None, 0
        index = number + self._uncounted
        if not 0 <= index < len(plan):
            raise ValueError(f"timestep must be in [0, {len(plan)}), got {timestep}")
        return index

    def _batch(
        self,
        logits: Tensor,
        timestep: Any,
        sample: Tensor,
        shaping: Shaping,
        mask_id: int | None,
        generator: Generator | None,
        fixed: Tensor | None = None,
    ) -> tuple[StepBatch, Prior, int]:
        """A step as the sampler takes it, with its prior and number in the plan.

        fixed (L,) or (B, L): where no token changes.
        """
        prior = self.settings.prior_for(logits.shape[-1], mask_id)
        z = as_tokens("sample", sample, prior.vocab_size).contiguous()
        check_shape("model_output", logits, (*z.shape, prior.vocab_size))
        plan, predictor = self.plan_for(prior), self.settings.predictor
        index = self._index(timestep, plan)
        free = torch.ones_like(z, dtype=torch.bool)
        if fixed is not None:
            free &= ~fixed.to(z.device, torch.bool)
        pi = prior.probs(like=torch.zeros((), dtype=working_dtype(z.device), device=z.device))
        confidence = self._confidence
        if confidence is None or confidence.shape != z.shape:
            confidence = torch.full_like(z, torch.inf, dtype=pi.dtype)
        predictor = None if isinstance(predictor, Confident) else predictor
        numbers = step_numbers(plan[index], predictor, Memory(confidence))
        segment = BatchSegment(len(z), z.shape[1], plan[index].alpha_t, index, shaping.drawing)
        key = torch.full((), new_key(generator), dtype=torch.int64, device=z.device)
        samples = fold_in(key, torch.arange(len(z), device=z.device))
        batch = StepBatch(
            prior, pi, (segment,), numbers, samples, index, z, free, confidence=confidence
        )
        return batch, prior, index

    def _stepper(self, step: Step) -> Stepper:
        if isinstance(self.settings.predictor, Confident):
            return self.settings.predictor
        marginal = self.settings.posterior == "marginal" and not step.greedy
        return sample_x0_first if marginal else psi_step

    def _move(
        self, stepper: Stepper, batch: StepBatch, logits: Tensor, shift: Tensor | None
    ) -> StepOutput:
        """The step; what a rule will remember is kept."""
        assert batch.prior is not None
        out = stepper(batch, PrecomputedLogits(batch.prior, logits, shift))
        self._confidence = out.confidence
        return out

    def _nothing_follows(self, prior: Prior, plan: tuple[Step, ...], index: int) -> bool:
        """Whether later steps can only unmask: then a token without a mask before stays."""
        unmasking = index + 1 >= last_change(prior, plan)
        takes_back = getattr(self.settings.predictor, "take_back", False)
        return index + 1 == len(plan) or (unmasking and not takes_back)


def _nearest(t: float, plan: tuple[Step, ...]) -> int:
    """The step at time t."""
    index = min(range(len(plan)), key=lambda i: abs(plan[i].t - t))
    if not abs(plan[index].t - t) <= _CLOSE:
        raise ValueError(
            f"t = {t:g} is no time of this plan, the nearest is {plan[index].t:g}: "
            "set_timesteps(timesteps=[...]) takes others"
        )
    return index
