"""`psidiff evaluate`: likelihood, multiple choice, and the worth of samples made before."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from .. import __version__
from ..evaluation.generation import Texts, text_metric
from ..evaluation.likelihood import Likelihood, likelihood
from ..evaluation.measure import Measure
from ..evaluation.psi_nelbo import psi_nelbo
from ..evaluation.zero_shot import SUITE, corpus
from ..model import Decoded, Model, load
from ..process import Masked
from ..sampling import parse_kappa, plan
from ..types import Dataset
from .benches import ImageBench, TextBench, bench_of, features_of, judge_of, truth_of
from .reference import held_out

FORMAT_VERSION = 1


@dataclass(frozen=True)
class Asked:
    """What to measure: of real data, of multiple choice, or of samples in files."""

    data: Sequence[str] = ()
    protocol: str = "exact"
    sequences: int | None = 1000
    draws: int = 1
    psi: str | None = None
    steps: int = 256
    harness: Sequence[str] = ()
    questions: int | None = None
    likelihood_draws: int = 1024
    samples: Path | None = None
    metrics: Sequence[str] = ()
    judge: str | None = None
    truth: str | None = None
    reference: str | None = None
    features: str | None = None
    drop_unknown: bool = False
    seed: int = 0
    batch_size: int = 32
    out: Path | None = None


def run(console: Console, name: str, device: str, asked: Asked) -> None:
    """Measure, print a table, and append a line of JSON for each number."""
    model = load(name, device)
    found: list[Measure] = []
    if asked.samples is not None:
        found += of_samples(name, model, asked)
    if asked.harness:
        found += of_choices(model, asked)
    if asked.data or not found:
        for source in asked.data or (None,):
            found += of_data(console, name, model, source, asked)
    _show(console, name, found)
    if asked.out is not None:
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        with asked.out.open("a", encoding="utf-8") as file:
            for measure in found:
                line = {"format_version": FORMAT_VERSION, "model": name, **asdict(measure)}
                line["psidiff"] = __version__
                file.write(json.dumps(line, ensure_ascii=False) + "\n")


def of_data(
    console: Console, name: str, model: Model, source: str | None, asked: Asked
) -> list[Measure]:
    """A bound on -log p of real data, in every unit that is used for it."""
    data = _dataset(name, model, source, asked.drop_unknown)
    shared: dict[str, Any] = {
        "sequences": asked.sequences,
        "batch_size": asked.batch_size,
        "seed": asked.seed,
        "device": model.device,
    }
    with console.status(f"{source or 'held-out data'}: {len(data):,} rows"):
        if asked.psi is not None:
            return [_named(_psi(model, data, asked, shared), source)]
        result = likelihood(
            model.denoiser,
            model.prior,
            model.schedule,
            data,
            draws=asked.draws,
            protocol=asked.protocol,
            bos_id=model.config.get("bos_id"),
            **shared,
        )
    numbers = [result.nats_per_token, result.bits_per_token, result.perplexity]
    numbers += _characters(model, data, result, asked.sequences)
    return [_named(number, source) for number in numbers]


def of_choices(model: Model, asked: Asked) -> list[Measure]:
    """Multiple choice through the evaluation harness, from PSIDIFF_DATA where it has them."""
    from ..integrations.harness import local_tasks, run_harness

    with tempfile.TemporaryDirectory() as folder:
        with suppress(ValueError):  # no file of a known task: the harness asks a network
            local_tasks(folder)
        here = all((Path(folder) / f"{task}.yaml").is_file() for task in asked.harness)
        found = run_harness(
            model,
            list(asked.harness),
            limit=asked.questions,
            include_path=folder if here else None,
            num_samples=asked.likelihood_draws,
            seed=asked.seed,
        )
    numbers = []
    for task, metrics in found["tasks"].items():
        about = {"data": task, "questions": metrics.pop("questions"), **found["protocol"]}
        for metric, number in metrics.items():
            numbers.append(Measure(metric, number["value"], number["error"], "", about))
    return numbers


def of_samples(name: str, model: Model, asked: Asked) -> list[Measure]:
    """The numbers that `compare` prints, of samples in a file or folder."""
    assert asked.samples is not None
    tokens, labels = read_samples(asked.samples)
    _check_fit(asked.samples, tokens, model)
    judge = judge_of(asked.judge, str(model.device)) if asked.judge is not None else None
    features = features_of(asked.features, str(model.device))
    truth = truth_of(asked.truth, str(model.device)) if asked.truth is not None else None
    wanted = [text_metric(metric) for metric in asked.metrics]
    bench = bench_of(name, model, asked.reference, judge, features, clues=0, truth=truth)
    if isinstance(bench, ImageBench):
        bench.wanted = labels
        bench.labels = bench.labels if labels is not None else None  # nobody knows what to see
    made = Decoded(tokens, 0.0, 0, codec=model.codec)
    if wanted and isinstance(bench, TextBench):
        return [metric(Texts(tokens, made.text), bench.real) for metric in wanted]
    return bench.measures(made)


def read_samples(path: Path) -> tuple[Tensor, Tensor | None]:
    """Tokens, and labels if there are any, from shards or from lines of JSON with "tokens"."""
    if path.is_dir():
        parts: list[Tensor] = []
        labels: list[Any] = []
        for shard in sorted(path.glob("shard-*.npz")):
            with np.load(shard) as held:
                parts.append(torch.from_numpy(held["tokens"]).long())
                labels += held["labels"].tolist() if "labels" in held.files else []
        if not parts:
            raise ValueError(f"{path} has no shards of samples in it")
        return torch.cat(parts), torch.tensor(labels) if labels else None
    if not path.is_file():
        raise ValueError(f"there are no samples at {path}")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        held = [json.loads(line) for line in lines if line.strip()]
        rows, labels = [line["tokens"] for line in held], [line.get("label") for line in held]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f'{path} has a line that is no JSON with "tokens"') from error
    if not rows:
        raise ValueError(f"{path} is empty: there are no samples to judge")
    if len({len(row) for row in rows}) > 1:
        raise ValueError(f"{path} has samples of unequal length")
    known = None not in labels
    return torch.tensor(rows), torch.tensor(labels) if known else None


def _check_fit(path: Path, tokens: Tensor, model: Model) -> None:
    """Samples of another model are not judged."""
    size = getattr(model.codec, "vocab_size", None)
    length = getattr(model.codec, "length", None)
    if size is not None and bool(((tokens < 0) | (tokens >= size)).any()):
        raise ValueError(
            f"{path} has token ids that this model does not have: they end at {size}"
        )
    if length is not None and tokens.shape[1] != length:
        raise ValueError(f"{path} has samples of {tokens.shape[1]} tokens, this model {length}")


def _dataset(name: str, model: Model, source: str | None, drop_unknown: bool) -> Dataset:
    if source in SUITE:
        length = model.config.get("length")
        if length is None:
            raise ValueError("this model does not say how long its sequences are")
        framed = bool(model.config.get("framed"))
        return corpus(source, model.codec, length, framed, drop_unknown)
    if source is not None and not Path(source).exists():
        raise ValueError(
            f"there is no data {source}: give a file of text, or one of {', '.join(SUITE)}"
        )
    return held_out(name, model, source)


def _psi(model: Model, data: Dataset, asked: Asked, shared: dict[str, Any]) -> Measure:
    """The bound of the sampler itself, step by step."""
    if model.prior is None:
        raise ValueError("a Psi-NELBO is of a diffusion model, not of an autoregressive one")
    schedule: Any = model.schedule
    if isinstance(model.prior, Masked):  # a token still clean at t = 1 would cost infinitely
        schedule = replace(schedule, eps=0.0)
    steps = plan(asked.steps, schedule, parse_kappa(asked.psi or "ancestral"))
    return psi_nelbo(model.denoiser, model.prior, steps, data, **shared)


def _characters(
    model: Model, data: Dataset, result: Likelihood, sequences: int | None
) -> list[Measure]:
    """Bits a character of text, bits a dimension of images."""
    if model.codec is None or model.codec.kind == "puzzle":
        return []
    if model.codec.kind == "image":
        bits = result.bits_per_token
        return [Measure("nll", bits.value, bits.error, "bits/dimension", bits.protocol)]
    count = min(sequences or len(data), len(data))
    rows = data.rows(torch.arange(count) * len(data) // count).tokens
    characters = sum(len(model.codec.decode(row)) for row in rows)
    return [result.per(characters, "character")]


def _named(measure: Measure, source: str | None) -> Measure:
    about = {"data": source or "held-out part of its own corpus", **measure.protocol}
    return Measure(measure.name, measure.value, measure.error, measure.unit, about)


def _show(console: Console, name: str, found: Sequence[Measure]) -> None:
    table = Table("what", "value", "standard error", "unit", "of", title=name)
    for measure in found:
        error = "exact" if measure.error is None else f"{measure.error:.4g}"
        of = measure.protocol.get("data") or measure.protocol.get("judge") or ""
        table.add_row(measure.name, f"{measure.value:.5g}", error, measure.unit, str(of))
    console.print(table)
    shown: set[str] = set()
    for measure in found:
        words = ", ".join(f"{k} {v}" for k, v in measure.protocol.items())
        if words not in shown:
            shown.add(words)
            console.print(
                f"{measure.name}: {words}", style="dim", highlight=False, markup=False
            )
