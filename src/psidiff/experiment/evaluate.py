"""Likelihood of data, multiple choice, and the worth of samples made before."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..checksums import said_of
from ..data.text_sources import HUB, NotHere, parts
from ..evaluation.metric_result import UNKNOWN, MetricResult
from ..evaluation.metrics import SampleSet, metrics_named
from ..evaluation.nll import Likelihood, OnBatch, likelihood
from ..evaluation.psi_nelbo import psi_nelbo
from ..evaluation.zero_shot import SUITE, corpus
from ..model import Decoded, Model
from ..process import Masked
from ..sampling import OPTIONS, Sampler
from ..types import Dataset
from .held_out import held_out, rows_of
from .image_evaluator import ImageEvaluator
from .image_sets import as_arrays, has_tokens, read_reference
from .judges import load_judges
from .report.formatting import pluralize
from .sample_evaluators import MOST_ROWS, build_evaluator, kind_of
from .sample_files import check_same_codec, read_samples
from .text_evaluator import TextEvaluator

_OF_BOUNDS = ("kappa", "steps", "schedule", "grid")  # of a sampler


@dataclass(frozen=True)
class Asked:
    """What to measure: of real data, of multiple choice, or of samples in files."""

    data: Sequence[str] = ()
    protocol: str = "exact"  # of likelihoods, and of the judge of samples
    sequences: int = 1000  # 0: all
    draws: int = 1
    psi: str | None = None
    steps: int = 256
    harness: Sequence[str] = ()
    questions: int | None = None
    harness_draws: int = 1024
    samples: Path | None = None
    metrics: str | None = None  # names apart by commas
    judge: str | None = None
    truth: str | None = None
    reference: str | None = None
    features: str | None = None
    drop_unknown: bool = False
    seed: int = 0
    batch_size: int = 32
    out: Path | None = None


def of_data(
    model: Model,
    source: str | None,
    data: Dataset,
    asked: Asked,
    counter: Callable[[str], AbstractContextManager[OnBatch]],
) -> list[MetricResult]:
    """A bound on -log p of real data, in every unit that is used for it.

    counter: shows how far it is, given what is measured.
    """
    shared: dict[str, Any] = {
        "sequences": asked.sequences or None,
        "draws": asked.draws,
        "batch_size": asked.batch_size,
        "seed": asked.seed,
        "device": model.device,
    }
    if model.prior is None and asked.draws > 1:
        raise ValueError("--draws is for diffusion: an autoregressive likelihood is exact")
    about: dict[str, Any] = {"data": source or "held-out part of its own corpus"}
    if asked.drop_unknown:
        about["unknown"] = "dropped"
    count = min(asked.sequences or len(data), len(data))
    what = f"{source or 'held-out data'}, {pluralize(f'{count:,}', 'row')}"
    with counter(what) as on_batch:
        shared["on_batch"] = on_batch
        if asked.psi is not None:
            numbers = [_psi(model, data, asked.psi, asked.steps, shared)]
        else:
            known, bos_id = (model.denoiser, model.prior, model.schedule), model.config.bos_id
            result = likelihood(*known, data, protocol=asked.protocol, bos_id=bos_id, **shared)
            numbers = [result.nats_per_token, result.bits_per_token, result.perplexity]
            numbers += _per_character(model, data, result, count)
    return [replace(number, protocol={**about, **number.protocol}) for number in numbers]


def check_extras(asked: Asked) -> None:
    """What needs a package that is missing is said before anything is loaded or measured."""
    metrics_named(asked.metrics)
    if asked.harness:
        from ..integrations.lm_eval_runner import check_installed

        check_installed()


def of_choices(model: Model, asked: Asked) -> list[MetricResult]:
    """Multiple choice through the evaluation harness, from PSIDIFF_DATA where it has them."""
    from ..integrations.lm_eval_runner import local_tasks, run_harness

    with tempfile.TemporaryDirectory() as folder:
        with suppress(NotHere):  # no file of a known task: the harness asks a network
            local_tasks(folder, asked.harness)
        here = all((Path(folder) / f"{task}.yaml").is_file() for task in asked.harness)
        found = run_harness(
            model,
            list(asked.harness),
            limit=asked.questions,
            include_path=folder if here else None,
            num_samples=asked.harness_draws,
            seed=asked.seed,
        )
    numbers = []
    for task, metrics in found["tasks"].items():
        about = {"data": task, "questions": metrics.pop("questions"), **found["protocol"]}
        for metric, number in metrics.items():
            error = UNKNOWN if number["error"] is None else number["error"]
            numbers.append(MetricResult(metric, number["value"], error, "", about))
    return numbers


def of_samples(name: str, model: Model, asked: Asked) -> list[MetricResult]:
    """The numbers that `compare` prints, of samples in a file or folder."""
    assert asked.samples is not None
    metrics = metrics_named(asked.metrics)
    foreign = kind_of(model) == "image" and not has_tokens(asked.samples)
    if not foreign:
        tokens, labels = read_samples(asked.samples)
        check_same_codec(asked.samples, tokens, model)
    judges = load_judges(asked, str(model.device))
    evaluator = build_evaluator(name, model, asked.reference, judges, clues=None)
    if isinstance(evaluator, ImageEvaluator):
        if foreign:
            return evaluator.evaluate_files(asked.samples, metrics, asked.protocol)
        evaluator.wanted = labels
        if labels is None:  # nobody knows what to see
            evaluator.labels = None
        evaluator.follow(asked.protocol, len(tokens))
    elif asked.protocol != "exact" and not asked.data and kind_of(model) != "text":
        raise ValueError(f"--protocol {asked.protocol} is for images and for real data")
    made = Decoded(tokens, 0.0, 0, codec=model.codec)
    if not metrics:
        return evaluator.evaluate(made)
    judged = evaluator.judged(made) if isinstance(evaluator, TextEvaluator) else []
    return judged + evaluator.chosen(made, metrics)


def of_images(asked: Asked, device: str) -> list[MetricResult]:
    """Images in files, whoever made them, held against real ones; no model is needed."""
    if asked.samples is None or asked.reference is None:
        raise ValueError(
            "name a model to measure; or name images by --samples, and real ones to compare "
            "them with by --reference"
        )
    metrics, held = metrics_named(asked.metrics), read_reference(asked.reference)
    real = SampleSet(None, (), as_arrays(held.some(MOST_ROWS).pixels))
    evaluator = ImageEvaluator(real, None, held, load_judges(asked, device).features)
    return evaluator.evaluate_files(asked.samples, metrics, asked.protocol)


def dataset_of(name: str, model: Model, source: str | None, drop_unknown: bool) -> Dataset:
    """Real data in rows; whatever is wrong with it is said with its name."""
    if source is None:
        try:
            return held_out(name, model)
        except ValueError as error:
            if kind_of(model) != "text":
                raise
            raise ValueError(f"{error}; --data novel.txt names a text of yours") from error
    is_text = kind_of(model) == "text" and not source.endswith(".npy")
    length = model.config.length
    if is_text and source not in SUITE and not source.startswith(HUB):
        try:
            parts(source)
        except ValueError as error:
            if not str(error).startswith("there is no "):
                raise
            raise ValueError(
                f"there is no data {source}: give a file of text (from here or from the folder "
                f"that PSIDIFF_DATA names), or one of {', '.join(SUITE)}"
            ) from error
    with said_of(source):
        if source not in SUITE or (not is_text and Path(source).exists()):
            return rows_of(source, model, drop_unknown)
        if length is None:
            raise ValueError("this model does not say how long its sequences are")
        return corpus(source, model.codec, length, model.config.framed, drop_unknown)


def _psi(
    model: Model, data: Dataset, rule: str, num_steps: int, shared: dict[str, Any]
) -> MetricResult:
    """The bound of the sampler itself, step by step."""
    if model.prior is None:
        raise ValueError("a Psi-NELBO is of a diffusion model, not of an autoregressive one")
    sampler = Sampler.parse(rule, Sampler(steps=num_steps))
    for name in sampler.options([name for name in OPTIONS if name not in _OF_BOUNDS]):
        raise ValueError(f"--psi is the bound of a rule and its levels: leave {name} out")
    sampler.check(model.prior, labelled=False)
    schedule: Any = sampler.schedule or model.schedule
    if isinstance(model.prior, Masked):  # a token still clean at t = 1 would cost infinitely
        schedule = replace(schedule, eps=0.0)
    steps = replace(sampler, schedule=None).plan(schedule, model.prior)
    found = psi_nelbo(model.denoiser, model.prior, steps, data, **shared)
    return replace(found, protocol={"kappa": rule, **found.protocol})


def _per_character(
    model: Model, data: Dataset, result: Likelihood, count: int
) -> list[MetricResult]:
    """Bits a character of text, bits a dimension of images."""
    codec, kind = model.codec, kind_of(model)
    if kind == "image":
        return [result.per(result.tokens, "dimension")]
    if codec is None or kind != "text":
        return []
    rows = data.rows(torch.arange(count) * len(data) // count).tokens
    characters = sum(len(codec.decode(row)) for row in rows)
    return [result.per(characters, "character")]
