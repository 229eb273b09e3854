"""Psi steps over logits that a pipeline has computed: a PsiScheduler, without diffusers.

On a GPU no step waits for the host. What only the device sees, an id that is no token or a row
without a number, is said after the last step of the plan; on a CPU at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any

import torch
from torch import Generator, Tensor

from ..kernels.counter_rng import fold_in, new_key_on
from ..kernels.logit_rows import LogitBlock, RowResults, begin
from ..process import Masked, Prior, Uniform
from ..sampling import Confident, Step
from ..sampling.dense_logits import DenseLogits
from ..sampling.kappa import Memory
from ..sampling.logit_sources import PrecomputedLogits
from ..sampling.plan import last_change
from ..sampling.step import KEPT, NO_NUMBER, PREDICTED, StepOutput, psi_step
from ..sampling.step_batch import BatchSegment, StepBatch, step_numbers
from ..sampling.steppers import Stepper, sample_x0_first
from ..types import as_count, as_tokens, check_shape, working_dtype
from .psi_settings import Settings, Shaping
from .step_graph import StepGraph, reported_tokens

_CLOSE = 1e-5  # times come back from float32 tensors
_NO_TOKEN = "sample must hold token ids in [0, K): a step of this plan was given others"


@dataclass(frozen=True)
class PsiStep:
    """What a step made, (B, L) each.

    z       z_s
    tokens  where a token was predicted, and everywhere on the last step, that of z_s;
            elsewhere the most probable one
    probs   their probabilities
    route   0 kept, 1 predicted, 2 renoised
    before  z_t
    """

    z: Tensor
    tokens: Tensor
    probs: Tensor
    route: Tensor
    before: Tensor
    shaping: Shaping
    logits: Tensor

    def pred_logits(self) -> Tensor:
        """The logits as they were shaped, (B, L, K); themselves where they were not."""
        return self.shaping.shown(self.logits)

    def transfers(self, mask_id: int | None) -> tuple[Tensor, Tensor]:
        """Which masks, and which other tokens, changed."""
        changed, masks = self.z != self.before, torch.zeros_like(self.z, dtype=torch.bool)
        if mask_id is not None:
            masks = self.before == mask_id
        return masks & changed, ~masks & changed


class PsiSteps:
    """The plan of a scheduler, and its steps.

    Args:
        settings: the config, checked.
        num_steps: N.
        corrector: leave-one-out sweeps of `correct`; None: there are none.
    """

    def __init__(
        self, settings: Settings, num_steps: int = 32, corrector: Stepper | None = None
    ) -> None:
        self.settings, self.corrector = settings, corrector
        self._known: dict[Any, tuple[Prior, Tensor]] = {}
        self._graphs: dict[Any, StepGraph] = {}
        self.set(num_steps)

    def set(self, num_steps: int | None, times: Sequence[float] | None = None) -> None:
        """N steps from t = 1 in equal parts, or one from each of given falling times."""
        if times is not None:
            times = [float(t) for t in times]
            num_steps = len(times)
        self.num_steps = as_count("num_inference_steps", num_steps)
        self._times = times
        self._plans: dict[bool, tuple[Step, ...]] = {}
        self.times = [step.t for step in self.plan_for(Uniform(2))]
        self._tables: dict[Any, Tensor] = {}  # the plan's numbers, where they are used
        self.confidence: Tensor | None = None
        self.uncounted = 0  # steps of this block that the pipeline did not count
        self.settled = False  # whether what has no mask before it stays
        self.route: Tensor | None = None
        self.taken: Step | None = None
        self._wrong: list[tuple[str, Tensor]] = []  # what to say, and whether

    def plan_for(self, prior: Prior) -> tuple[Step, ...]:
        """All N steps; a mask may follow some presets further than other priors."""
        masked = isinstance(prior, Masked)
        if masked not in self._plans:
            self._plans[masked] = self.settings.plan(self.num_steps, self._times, prior)
        return self._plans[masked]

    @torch.no_grad()
    def step(
        self,
        logits: Tensor,
        timestep: Any,
        sample: Tensor,
        *,
        mask_id: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        fixed: Tensor | None = None,
        generator: Generator | None = None,
    ) -> PsiStep:
        """z_s from z_t, (B, L), by logits (B, L, K) of the network at z_t."""
        shaping = self.settings.shaping(temperature, top_p, top_k, logits.is_cuda)
        batch, prior, index = self._batch(
            logits, timestep, sample, shaping, mask_id, generator, fixed
        )
        plan = self.plan_for(prior)
        step = self.taken = plan[index]
        self.settled = self._nothing_follows(prior, plan, index)
        wanted = "plain" if self.settings.posterior == "marginal" else "loo"
        shift = self.settings.shift(prior, batch.z, step.alpha_t, wanted)
        if isinstance(self.settings.predictor, Confident):
            source: Any = PrecomputedLogits(prior, logits, shift)
            out = self.settings.predictor(batch, source)
        elif self.records(batch) and not step.greedy:
            block = LogitBlock(logits, batch.z, shift, prior.mask_id)
            return self._replayed(batch, block, shaping)
        else:
            block = LogitBlock(logits, batch.z, shift, prior.mask_id)
            source = DenseLogits(block, shaping.filters, batch, shaping.chain is None)
            marginal = self.settings.posterior == "marginal" and not step.greedy
            out = (sample_x0_first if marginal else psi_step)(batch, source)
            self._note(NO_NUMBER, source.wrong, index + 1 == len(plan))
        self.confidence, self.route = out.confidence, out.route
        predicted = out.route == PREDICTED if step.alpha_s < 1 else out.route >= KEPT
        return self._reported(batch, logits, shaping, out, predicted, source)

    @torch.no_grad()
    def correct(
        self,
        logits: Tensor,
        timestep: Any,
        sample: Tensor,
        *,
        mask_id: int | None = None,
        generator: Generator | None = None,
    ) -> PsiStep:
        """A sweep at the level that step `timestep` reached."""
        if self.corrector is None:
            raise ValueError("corrector_steps is 0 in this scheduler's config")
        shaping = self.settings.shaping(None, None, None, logits.is_cuda)
        batch, prior, index = self._batch(logits, timestep, sample, shaping, mask_id, generator)
        if prior.mask_id is not None:
            raise ValueError("a leave-one-out corrector needs a prior without a mask")
        level = self.plan_for(prior)[index].alpha_s
        shift = self.settings.shift(prior, batch.z, level, "loo")
        source = PrecomputedLogits(prior, logits, shift)
        out = self.corrector(replace(batch, draw=-1 - index), source)
        self.confidence = out.confidence
        return self._reported(batch, logits, shaping, out, out.route == PREDICTED, source)

    def _reported(
        self,
        batch: StepBatch,
        logits: Tensor,
        shaping: Shaping,
        out: StepOutput,
        predicted: Tensor,
        source: Any,
    ) -> PsiStep:
        """The step, with the tokens and probabilities of the logits as others see them."""
        found = getattr(source, "found", None)
        if found is None or not source.block.raw:
            found = _seen(logits, out.z, shaping)
        reported = reported_tokens(out.z, predicted, found)
        return PsiStep(out.z, *reported, out.route, batch.z, shaping, logits)

    def records(self, batch: StepBatch) -> bool:
        """Whether steps are recorded: on a GPU, if their numbers are those of the plan."""
        return batch.z.is_cuda and batch.confidence is None

    def _replayed(self, batch: StepBatch, block: LogitBlock, shaping: Shaping) -> PsiStep:
        """The same step, of which all but the reading is recorded."""
        assert batch.prior is not None
        index, largest = batch.segments[0].index, shaping.chain is None
        marginal = self.settings.posterior == "marginal"
        read = begin(block, shaping.filters, not largest)
        kind = (batch.z.shape, batch.prior, batch.z.device, marginal, largest)
        if kind not in self._graphs:
            self._graphs = {kind: StepGraph(batch, marginal, largest)}
        graph = self._graphs[kind]
        graph.load(self._key, index, self._numbers(batch)[index], batch.z, batch.free)
        found = read(None if largest else graph.words(), None)
        z, route, tokens, probs, wrong = graph.outcome(found)
        self._note(NO_NUMBER, wrong, index + 1 == self.num_steps)
        self.confidence, self.route = None, route
        if not block.raw:
            last = self.plan_for(batch.prior)[index].alpha_s == 1
            predicted = route >= KEPT if last else route == PREDICTED
            tokens, probs = reported_tokens(z, predicted, _seen(block.logits, z, shaping))
        return PsiStep(z, tokens, probs, route, batch.z, shaping, block.logits)

    def _numbers(self, batch: StepBatch) -> Tensor:
        """Of all steps of the plan, where the batch is; of those that are not recorded, 0."""
        assert batch.prior is not None
        where = isinstance(batch.prior, Masked), batch.z.device
        if where not in self._tables:
            plan, predictor = self.plan_for(batch.prior), self.settings.predictor
            rows = [list(step_numbers(step, predictor)) for step in plan]
            table = torch.tensor(rows, dtype=torch.float64)
            self._tables[where] = table.to(batch.pi)
        return self._tables[where]

    def _index(self, timestep: Any, plan: tuple[Step, ...]) -> int:
        """Which step: by its number, or by its time. The first begins anew."""
        one = isinstance(timestep, Tensor) and timestep.numel() == 1
        value = timestep.item() if one else timestep
        if isinstance(value, bool) or not isinstance(value, Real):
            raise ValueError(f"timestep must be an index or a time, got {timestep!r}")
        number = int(value) if isinstance(value, Integral) else _nearest(float(value), plan)
        if number == 0:
            self.confidence, self.uncounted, self._wrong = None, 0, []
        index = number + self.uncounted
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
        prior, pi = self._prior(logits.shape[-1], mask_id, sample.device)
        plan, predictor = self.plan_for(prior), self.settings.predictor
        index = self._index(timestep, plan)
        z = self._tokens(sample, prior.vocab_size)
        check_shape("model_output", logits, (*z.shape, prior.vocab_size))
        free = torch.ones_like(z, dtype=torch.bool)
        if fixed is not None:
            free &= ~fixed.to(z.device, torch.bool)
        confidence, memory = self.confidence, None
        if isinstance(predictor, Confident) or any(callable(step.kappa) for step in plan):
            if confidence is None or confidence.shape != z.shape:
                confidence = torch.full_like(z, torch.inf, dtype=pi.dtype)
            memory = Memory(confidence)
        predictor = None if isinstance(predictor, Confident) else predictor
        numbers = step_numbers(plan[index], predictor, memory)
        segment = BatchSegment(len(z), z.shape[1], plan[index].alpha_t, index, shaping.drawing)
        key = self._key = new_key_on(z.device, generator)
        samples = fold_in(key, torch.arange(len(z), device=z.device))
        batch = StepBatch(
            prior, pi, (segment,), numbers, samples, index, z, free, confidence=confidence
        )
        return batch, prior, index

    def _prior(
        self, vocab_size: int, mask_id: int | None, device: torch.device
    ) -> tuple[Prior, Tensor]:
        """The prior, and its probabilities on the device; made once."""
        key = vocab_size, mask_id, device
        if key not in self._known:
            prior = self.settings.prior_for(vocab_size, mask_id)
            like = torch.zeros((), dtype=working_dtype(device), device=device)
            self._known = {key: (prior, prior.probs(like=like))}
        return self._known[key]

    def _tokens(self, sample: Tensor, vocab_size: int) -> Tensor:
        """Ids (B, L); on a GPU those that are no tokens become some, and are said later."""
        if not (isinstance(sample, Tensor) and sample.is_cuda):
            return as_tokens("sample", sample, vocab_size).contiguous()
        as_tokens("sample", sample[:0], vocab_size)
        z = sample.long().clamp(0, vocab_size - 1).contiguous()
        self._note(_NO_TOKEN, (z != sample).any())
        return z

    def _note(self, sentence: str, wrong: Tensor | None, last: bool = False) -> None:
        """What may be wrong: said at once where the host knows it, else on the last step."""
        if wrong is not None:
            self._wrong.append((sentence, wrong))
        if not self._wrong or (self._wrong[0][1].is_cuda and not last):
            return
        noted, self._wrong = self._wrong, []
        flags = torch.stack([flag for _, flag in noted]).tolist()
        for (said, _), flag in zip(noted, flags, strict=True):
            if flag:
                raise ValueError(said)

    def _nothing_follows(self, prior: Prior, plan: tuple[Step, ...], index: int) -> bool:
        """Whether later steps can only unmask: then a token without a mask before stays."""
        unmasking = index + 1 >= last_change(prior, plan)
        takes_back = getattr(self.settings.predictor, "take_back", False)
        return index + 1 == len(plan) or (unmasking and not takes_back)


def _seen(logits: Tensor, z: Tensor, shaping: Shaping) -> RowResults:
    """The rows as others see them, asked for z; nothing is drawn."""
    found = begin(LogitBlock(logits, z), shaping.filters, False)(None, None)
    return found._replace(drawn=z.flatten(), at_drawn=found.at_z)


def _nearest(t: float, plan: tuple[Step, ...]) -> int:
    """The step at time t."""
    index = min(range(len(plan)), key=lambda i: abs(plan[i].t - t))
    if not abs(plan[index].t - t) <= _CLOSE:
        raise ValueError(
            f"t = {t:g} is no time of this plan, the nearest is {plan[index].t:g}: "
            "set_timesteps(timesteps=[...]) takes others"
        )
    return index
