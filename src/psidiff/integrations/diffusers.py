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

from ..kernels.counter_rng import absorb, draw_key
from ..process import Masked, Prior, Uniform
from ..sampling import Confident, Corrector, Step
from ..sampling.kappa import Memory
from ..sampling.logit_sources import PrecomputedLogits
from ..sampling.step import KEPT, PREDICTED, StepOutput, psi_step
from ..sampling.step_batch import BatchSegment, StepBatch, step_numbers
from ..sampling.steppers import Stepper, sample_x0_first
from ..types import as_count, as_tokens, check_shape, working_dtype
from .given_logits import Shaping, looked_at
from .psi_settings import Settings

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
    """z_s ~ Psi_{s|t}(. | z_t) = kappa q_{s|t} + (1 - kappa) q_s(. | q_{0|t})  (Eq. 12)

    kappa       a rule in words: ancestral, constant:.95@.1-.5, cap:.01, rescale:.05, loop:.02,
                confidence:.05, fb, dfm. None: the preset's, or else cap:0.005
    preset      a named sampler (`psidiff.sampling.PRESETS`) for all that is None here
    posterior   "plugin": the posterior at x_theta, as in the paper. "marginal": x_0 is drawn
                first, as DiscreteDDIMScheduler does
    predicts    what the logits are: "loo", p(x_l | z without z_l), as the NELBO trains them, or
                "plain", p(x_l | z), as cross-entropy does (DiffusionGemma). They are converted
                to what the posterior expects. None: taken as that, loo for plugin
    predictor   markov, maximal, or confident with its settings
    schedule    loglinear or cosine, with eps; loglinear and 0 is alpha = 1 - t
    last        "sample", or "greedy" on the last step
    temperature, top_p, top_k   None: what the pipeline passes, and 1 if it passes none
    min_p, nucleus              as `psidiff.sampling.sample` takes them
    prior       such as {"name": "mixed", "vocab_size": 9, "mask_id": 8, "uniform": 0.1}. None:
                the mask that the pipeline names, else uniform
    timestep_type   what `timesteps` holds: "discrete" indices 0 to N - 1, "continuous" times
                falling from 1. `step` takes both
    block_length    the pipeline's, where it asks
    corrector_steps, corrector_k, corrector_selection   leave-one-out sweeps after steps, for
                pipelines that offer them; the selections are random and uncertain

    Step 0 forgets what `confidence` rules remember. Each step takes one key from the generator.
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
        if timestep_type not in ("discrete", "continuous"):
            raise ValueError(
                f"timestep_type must be 'discrete' or 'continuous', got {timestep_type!r}"
            )
        as_count("block_length", block_length)
        if as_count("corrector_steps", corrector_steps, least=0):
            self._corrector = Corrector(1, corrector_k, corrector_selection)
        self.settings = Settings.of(
            posterior,
            predicts,
            prior,
            schedule,
            eps,
            temperature,
            kappa=kappa,
            preset=preset,
            predictor=predictor,
            last=last,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            nucleus=nucleus,
        )
        self.set_timesteps(num_inference_steps)

    def set_timesteps(
        self,
        num_inference_steps: int | None = None,
        device: str | torch.device | None = None,
        block_length: int | None = None,
        timesteps: Sequence[float] | None = None,
    ) -> None:
        """N steps from t = 1 in equal parts, or from each of the falling `timesteps`."""
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
        """One step of the plan.

        model_output  logits (B, L, K) of the network at `sample`
        timestep      the index of the step, or its time as a float
        prompt_mask   (L,) or (B, L), True where a token never changes
        sampling_method   "greedy" is temperature 0

        The config's temperature, top_p and top_k come first. The thresholds and minimal_topk
        are of schedulers that commit by confidence: a mixture has none.
        """
        if sampling_method == "greedy":
            temperature = 0.0
        shaping = self.settings.shaping(temperature, top_p, top_k)
        prior = self.settings.prior_for(model_output.shape[-1], mask_token_id)
        z, plan = as_tokens("sample", sample, prior.vocab_size), self.plan_for(prior)
        index = self._index(timestep, plan)
        wanted = "plain" if self.settings.posterior == "marginal" else "loo"
        shift = self.settings.shift(prior, z, plan[index].alpha_t, wanted)
        batch = self._batch(z, prior, index, shaping, generator, prompt_mask)
        out = self._move(self._stepper(plan[index]), batch, model_output, shift)
        z_s, self.route = out.z, out.route
        self.taken, self._settled = plan[index], self._nothing_follows(prior, plan, index)
        predicted = self.route == PREDICTED if plan[index].alpha_s < 1 else self.route >= KEPT
        drawn = torch.where(predicted, z_s, -1)
        masks = torch.zeros_like(batch.free) if mask_token_id is None else z == mask_token_id
        made = z_s, masks & (z_s != z), ~masks & (z_s != z)
        shown = looked_at(model_output, shaping, drawn)
        if not return_dict:
            return (*made[:1], *shown) if mask_token_id is None else (*made, *shown)
        return PsiSchedulerOutput(*made[:1], *shown, *made[1:], self.route)

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
        prior = self.settings.prior_for(model_output.shape[-1], mask_token_id)
        if prior.mask_id is not None:
            raise ValueError("a leave-one-out corrector needs a prior without a mask")
        z, plan = as_tokens("sample", sample, prior.vocab_size), self.plan_for(prior)
        index = self._index(timestep, plan)
        shift = self.settings.shift(prior, z, plan[index].alpha_s, "loo")
        batch = self._batch(z, prior, index, shaping, generator)
        out = self._move(self._corrector, replace(batch, draw=-1 - index), model_output, shift)
        shown = looked_at(model_output, shaping, torch.where(out.route == PREDICTED, out.z, -1))
        if not return_dict:
            return out.z, *shown
        return PsiSchedulerOutput(out.z, *shown, route=out.route)

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
        value = timestep
        if isinstance(timestep, Tensor) and timestep.numel() == 1:
            value = timestep.item()
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
        z: Tensor,
        prior: Prior,
        index: int,
        shaping: Shaping,
        generator: Generator | None,
        fixed: Tensor | None = None,
    ) -> StepBatch:
        """The step as the sampler takes it; fixed (L,) or (B, L): where no token changes."""
        z, step, advance = z.contiguous(), self.plan_for(prior)[index], self.settings.advance
        free = torch.ones_like(z, dtype=torch.bool)
        if fixed is not None:
            free &= ~fixed.to(z.device, torch.bool)
        pi = prior.probs(like=torch.zeros((), dtype=working_dtype(z.device), device=z.device))
        confidence = self._confidence
        if confidence is None or confidence.shape != z.shape:
            confidence = torch.full_like(z, torch.inf, dtype=pi.dtype)
        predictor = None if isinstance(advance, Confident) else advance
        numbers = step_numbers(step, predictor, Memory(confidence))
        segment = BatchSegment(len(z), z.shape[1], step.alpha_t, index, shaping.drawing())
        key = torch.full((), draw_key(generator), dtype=torch.int64, device=z.device)
        samples = absorb(key, torch.arange(len(z), device=z.device))
        return StepBatch(
            prior, pi, (segment,), numbers, samples, index, z, free, confidence=confidence
        )

    def _stepper(self, step: Step) -> Stepper:
        if isinstance(self.settings.advance, Confident):
            return self.settings.advance
        marginal = self.settings.posterior == "marginal" and not step.greedy
        return sample_x0_first if marginal else psi_step

    def _move(
        self, stepper: Stepper, batch: StepBatch, logits: Tensor, shift: Tensor | None
    ) -> StepOutput:
        """The step; what a rule will remember is kept."""
        assert batch.prior is not None
        check_shape("model_output", logits, (*batch.z.shape, batch.prior.vocab_size))
        out = stepper(batch, PrecomputedLogits(batch.prior, logits, shift))
        self._confidence = out.confidence
        return out

    def _nothing_follows(self, prior: Prior, plan: tuple[Step, ...], index: int) -> bool:
        """Whether later steps can only unmask: then a token without a mask before stays."""
        if index + 1 == len(plan):
            return True
        takes_back = getattr(self.settings.advance, "take_back", False)
        ancestral = all(step.kappa == 1 for step in plan[index + 1 :])
        return isinstance(prior, Masked) and ancestral and not takes_back


def _nearest(t: float, plan: tuple[Step, ...]) -> int:
    """The step at time t."""
    index = min(range(len(plan)), key=lambda i: abs(plan[i].t - t))
    if not abs(plan[index].t - t) <= _CLOSE:
        raise ValueError(
            f"t = {t:g} is no time of this plan, the nearest is {plan[index].t:g}: "
            "set_timesteps(timesteps=[...]) takes others"
        )
    return index
