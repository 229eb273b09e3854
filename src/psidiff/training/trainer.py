"""The trainer: the objective of each step, worked off piece by piece, saved, resumed exactly.

All chance is a function of (seed, step, piece): the order of the data, times, noise, spans,
dropout. So a checkpoint holds parameters, moments and averages, and no generator.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..distributed import Processes, whole
from ..types import Dataset, traits
from . import checkpoint
from .batch import Batch, Order, derive_seed, random_spans, seeded, stratified_times
from .config import Settings
from .cuda_graph import CudaGraphStep
from .curriculum import Curriculum
from .metrics_log import Log, StepTimer, memory_gib, read_log
from .objective import DenoisingObjective, FusedLossInputs
from .optimizers import EMA, optimizers_of
from .signals import StopRequested, StopSignal

Record = dict[str, Any]
_ASK_EVERY = 16  # steps, with many processes, until one that was told to stop is heard


class Trainer:
    """Trains a denoiser in place, with checkpoints and a log in a folder.

    on_log, on_eval and on_save are called as below; on_eval and on_save in every process, with
    the averaged denoiser, which has its parameters until they return. There is a checkpoint
    before every evaluation, so on_eval may leave it (`stopping.check`), if all processes do: a
    run that is resumed makes it up.

    Args:
        denoiser: the module to train, such as a `Parameterized`.
        curriculum: its objectives by step.
        data: the examples.
        settings: the numbers of the run.
        folder: of the run.
        num_classes: number of labels; 0: unconditional.
        group: the processes that train together; None: this one.
        tracker: as `Log` takes it.
        on_log: called with the record, every log_every steps.
        on_eval: called with (step, denoiser), every eval_every steps and at the end; returns a
            record for the log.
        on_save: called with (step, denoiser) after each checkpoint, and where a run is resumed.
        stopping: what hears signals to stop; None: one of its own.

    Example:
        >>> from psidiff.training import Trainer
        >>> trainer = Trainer(denoiser, curriculum, data, settings, folder)  # doctest: +SKIP
        >>> trainer.resume(), trainer.run()  # doctest: +SKIP
        (0, True)
    """

    def __init__(
        self,
        denoiser: nn.Module,
        curriculum: Curriculum,
        data: Dataset,
        settings: Settings,
        folder: Path,
        *,
        num_classes: int = 0,
        group: Processes | None = None,
        tracker: str = "none",
        on_log: Callable[[Record], None] | None = None,
        on_eval: Callable[[int, nn.Module], Record] | None = None,
        on_save: Callable[[int, nn.Module], None] | None = None,
        stopping: StopSignal | None = None,
    ) -> None:
        self.curriculum = curriculum
        self.data = data
        self.settings = settings
        self.group: Processes = group or Processes()
        self.num_classes = num_classes
        self.folder = folder
        self.checkpoints: Path = folder / "checkpoints"
        self.tracker = tracker
        self.on_log = on_log
        self.on_eval = on_eval
        self.on_save = on_save
        self.mine: range = self.group.share(settings.pieces)
        self.order: Order = Order(len(data), settings.seed)
        self.denoiser: nn.Module = denoiser.to(self.group.device).train()
        self._averaged = copy.deepcopy(denoiser).requires_grad_(False).eval()
        self._release_average()
        self.compiled: bool = (
            self.group.compiles() if settings.compile is None else settings.compile
        )
        self.call = self.group.spread(
            self.denoiser, settings.parallel, self.compiled, settings.recompute
        )
        self.ema: EMA = EMA(self.denoiser, settings.ema)
        self.optimizers = optimizers_of(self.denoiser, settings)
        self.fused: bool = settings.loss == "fused" and traits(denoiser).fusible
        self._graphed = self._as_graph()
        self.step = 0
        self._past: list[Record] = []  # what was logged before the run was resumed
        self._unread: list[Tensor] = []  # loss and gradient norm of steps not yet logged
        self.stopping: StopSignal = stopping or StopSignal()

    def resume(self, skip: Callable[[str], None] | None = None) -> int:
        """Go back to the last checkpoint; without one the run begins at step 0.

        skip: pass over checkpoints and lines of the log that are damaged; it is told what is
        wrong with each.
        """
        found = self.group.told(
            lambda: checkpoint.last(self.checkpoints, skip, self._tensors())
        )
        if found is not None:
            facts = checkpoint.load(self.checkpoints, found, self._tensors(), self.group)
            self._past = self.group.told(lambda: read_log(self.folder / "log.jsonl", skip))
            self.step, self.ema.updates = facts["step"], facts["ema_updates"]
            self._unread = list(torch.tensor(facts["unread"], device=self.group.device))
        return self.step

    def run(self) -> bool:
        """Train to the end. False: a signal asked to stop first; a checkpoint was written.

        An evaluation that was left before the run was resumed is made up for first.
        """
        log = None
        with ExitStack() as held:
            if self.group.first:
                checkpoint.forget_after(self.checkpoints, self.step)
                checkpoint.rotate(self.checkpoints, self.settings.keep)  # of a killed process
                log = Log(self.folder, self.step, self.tracker, self._past)
                held.callback(log.close)
            if self.step > 0:  # what was killed after its checkpoint may not have handed it on
                self._call_on_save()
            held.enter_context(self.stopping)
            ahead = held.enter_context(ThreadPoolExecutor(1))
            if self._missed_evaluation() and not self._evaluate(log):
                return False
            return self._loop(log, ahead)

    def averaged(self) -> nn.Module:
        """The denoiser with averaged parameters, in eval mode and in one piece.

        Its parameters are the averages themselves, or gathered where these are sharded.
        """
        for name, parameter in self._averaged.named_parameters():
            parameter.data = whole(self.ema.shadow[name])
        return self._averaged

    def _release_average(self) -> None:
        """While a run goes on, no process holds all of a network that is sharded."""
        for parameter in self._averaged.parameters():
            parameter.data = parameter.data.new_empty(0)

    def batch(self, step: int, piece: int) -> tuple[Batch, torch.Generator]:
        """One piece of a step's batch, on the CPU, and the generator of its noise."""
        settings, count = self.settings, self.settings.piece
        generator = seeded(settings.seed, 1, step, piece)
        place = step * settings.batch_size + piece * count
        tokens, labels, real, given = self.data.rows(self.order.rows(place, count), generator)
        times = stratified_times(
            count, seeded(settings.seed, 2, step), piece, settings.pieces, settings.t_min
        )
        if labels is not None and settings.class_dropout:
            hidden = torch.rand(count, generator=generator) < settings.class_dropout
            labels = torch.where(hidden, self.num_classes, labels)
        given = self._given(tokens, real, given, generator) if settings.given else None
        batch = Batch(tokens, times, labels, given, real)
        return batch.pinned() if self.group.device.type == "cuda" else batch, generator

    def _given(
        self, tokens: Tensor, real: Any, clues: Any, generator: torch.Generator
    ) -> Tensor:
        """What is shown clean: the data's own clues, or spans, in a share of the sequences."""
        share = self.settings.given
        if clues is not None:
            chosen = torch.rand(len(tokens), 1, generator=generator) < share
            given = clues & chosen & ~clues.all(-1, keepdim=True)
        else:
            given = random_spans((len(tokens), tokens.shape[1]), share, generator)
        if real is not None:
            given = given & real & (real & ~given).any(-1, keepdim=True)
        return given

    def _loop(self, log: Log | None, ahead: ThreadPoolExecutor) -> bool:
        settings, clock = self.settings, StepTimer(self.step)
        waiting = self._fetch(ahead, self.step)
        while self.step < settings.steps:
            batches, waiting = waiting, self._fetch(ahead, self.step + 1)
            self._unread.append(self._update(batches))
            self.step += 1
            if self._due(settings.log_every):
                self._log(log, self._read() | self._speed(*clock.lap(self.step)))
            evaluates = self._evaluates()
            saves = evaluates or self._due(settings.save_every)
            stopped = self._should_stop(saves)
            if saves or stopped:
                unread = self._checked().tolist()  # what it waits for is training still
                with clock.stopped():
                    self._save(unread)
            if stopped:
                return self.step == settings.steps and not evaluates
            if evaluates:
                with clock.stopped():
                    if not self._evaluate(log):
                        return False
        return True

    def _due(self, every: int) -> bool:
        return self.step % every == 0 or self.step == self.settings.steps

    def _evaluates(self) -> bool:
        return self.on_eval is not None and self._due(self.settings.eval_every)

    def _missed_evaluation(self) -> bool:
        """Whether the step that a run was resumed at was to be evaluated, and was not."""
        made = any(r["step"] == self.step and "loss" not in r for r in self._past)
        return self.step > 0 and self._evaluates() and not made

    def _evaluate(self, log: Log | None) -> bool:
        """False: it was left, because a signal asked to stop."""
        assert self.on_eval is not None
        try:
            record = self.on_eval(self.step, self.averaged())
        except StopRequested:
            return False
        finally:
            self._release_average()
        self._log(log, {"step": self.step} | record)
        return True

    def _should_stop(self, saves: bool) -> bool:
        """Whether a process was asked to stop. Many talk of it seldom: they have to wait."""
        asks = saves or self.group.world == 1 or self.step % _ASK_EVERY == 0
        return asks and self.group.any(self.stopping.asked)

    def _fetch(self, ahead: ThreadPoolExecutor, step: int) -> list[Future]:
        """The next step's pieces are made while this one's are learnt from."""
        pieces = self.mine if step < self.settings.steps else ()
        return [ahead.submit(self.batch, step, piece) for piece in pieces]

    def _update(self, batches: list[Future]) -> Tensor:
        """One step of the optimizer: (loss, norm of the gradient), on the device."""
        settings, total = self.settings, torch.zeros((), device=self.group.device)
        objective = self.curriculum.at(self.step)
        for number, (piece, waiting) in enumerate(zip(self.mine, batches, strict=True)):
            batch, generator = waiting.result()
            batch = batch.to(self.group.device)
            torch.manual_seed(derive_seed(settings.seed, 3, self.step, piece))  # for dropout
            last = number == len(batches) - 1
            with self.group.accumulating(self.call, self.denoiser, last):
                total += self._forward_backward(objective, batch, generator, 1 / len(batches))
        norm = nn.utils.clip_grad_norm_(
            self.denoiser.parameters(), settings.clip or math.inf, foreach=True
        )
        for optimizer in self.optimizers:
            for options in optimizer.param_groups:
                options["lr"] = options["initial_rate"] * settings.lr_factor(self.step)
            optimizer.step()
            optimizer.zero_grad()
        self.ema.update(self.denoiser)
        return torch.stack((total, whole(norm).detach().to(total)))

    def _forward_backward(
        self, objective: Any, batch: Batch, generator: torch.Generator, share: float
    ) -> Tensor:
        """`share` of the mean loss of one piece; its gradients are added to the parameters'."""
        if self.fused and isinstance(objective, DenoisingObjective):
            noised = objective.prepare(batch, generator)
            if noised.row_loss is not None:
                inputs = FusedLossInputs.of(noised, batch)
                dense = isinstance(noised.z, Tensor) and noised.z.is_floating_point()
                if self._graphed is not None and not dense:  # of (B, L, K) a copy would stay
                    return self._graphed(inputs)
                return _backward(inputs.loss(self._denoise, self.compiled) * share)
        return _backward(batch.mean(objective(self._denoise, batch, generator)) * share)

    def _as_graph(self) -> CudaGraphStep | None:
        """A compiled network that can be recorded and is alone on its GPU, a piece a step."""
        settings, group = self.settings, self.group
        alone = group.world == 1 and group.device.type == "cuda" and settings.pieces == 1
        if not (alone and self.compiled and traits(self.denoiser).recordable):
            return None
        parameters = list(self.denoiser.parameters())
        return CudaGraphStep(
            lambda inputs: inputs.loss(self._denoise, compiled=True), parameters
        )

    def _denoise(self, *arguments: Any, **options: Any) -> Tensor:
        """The network in the chosen precision; probabilities begin at float32 (models)."""
        low = self.settings.precision == "bfloat16"
        with torch.autocast(self.group.device.type, torch.bfloat16, enabled=low):
            return self.call(*arguments, **options)

    def _read(self) -> Record:
        """Loss and norm since the last reading."""
        values = self._checked()
        self._unread = []
        loss, norm = values.double().mean(0).tolist()
        rate = self.settings.rate(self.step - 1)
        return {"step": self.step, "loss": loss, "grad_norm": norm, "learning_rate": rate}

    def _checked(self) -> Tensor:
        """(loss, norm) of each step not yet read; one that is no number ends the run."""
        if not self._unread:
            return torch.empty(0, 2)
        values = self.group.mean(torch.stack(self._unread)).cpu()
        bad = ~values.isfinite().all(-1)
        if bad.any():
            place = int(bad.nonzero()[0])
            step, (loss, norm) = self.step - len(values) + 1 + place, values[place].tolist()
            kept = checkpoint.steps(self.checkpoints)
            good = f"the checkpoint of step {kept[-1]} is kept" if kept else "none was saved"
            raise ValueError(
                f"the loss of step {step} is {loss:g} (gradient norm {norm:g}); {good}: resume "
                "with a lower train.learning_rate or train.precision=float32"
            )
        return values

    def _speed(self, steps: int, seconds: float) -> Record:
        """None: nobody knows, because the clock stands still or was set back."""
        known = seconds > 0
        samples = steps * self.settings.batch_size / seconds if known else None
        left = (self.settings.steps - self.step) * seconds / steps if known else None
        return {
            "samples_per_second": samples,
            "tokens_per_second": None if samples is None else samples * self.data.length,
            "memory_gib": memory_gib(self.group.device),
            "seconds_left": left,
        }

    def _log(self, log: Log | None, record: Record) -> None:
        if log is not None:
            log.write(record)
        if self.on_log is not None:
            self.on_log(record)

    def _save(self, unread: list[list[float]]) -> None:
        facts = {"step": self.step, "ema_updates": self.ema.updates, "unread": unread}
        checkpoint.save(self.checkpoints, self.step, self._tensors(), facts, self.group)
        if self.group.first:
            checkpoint.rotate(self.checkpoints, self.settings.keep)
        self._call_on_save()

    def _call_on_save(self) -> None:
        if self.on_save:
            self.on_save(self.step, self.averaged())
            self._release_average()

    def _tensors(self) -> dict[str, Tensor]:
        """All that a checkpoint holds, by the names of the parameters."""
        parameters = dict(self.denoiser.named_parameters())
        found = {f"parameters.{name}": p.detach() for name, p in parameters.items()}
        found |= {f"average.{name}": average for name, average in self.ema.shadow.items()}
        for name, parameter in parameters.items():
            state = next(o.state[parameter] for o in self.optimizers if parameter in o.state)
            found |= {f"moments.{name}.{key}": moment for key, moment in state.items()}
        return found


def _backward(loss: Tensor) -> Tensor:
    loss.backward()
    return loss.detach()
