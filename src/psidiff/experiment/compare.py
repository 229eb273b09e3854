"""Models x steps x rules x truncation, measured by one protocol.

One line of JSON a cell, written when it is finished: a run that was killed goes on with the
cells that are missing. Under torchrun each process takes every n-th cell.
"""

from __future__ import annotations

import base64
import json
import os
import platform
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..data.characters import Characters
from ..data.images import grid, png_bytes
from ..data.toy import Chain, perturbed
from ..distributed import Processes
from ..evaluation.metric_result import as_json
from ..evaluation.metrics import metrics_named
from ..files import FORMAT_VERSION
from ..model import Decoded, Model, load
from ..model_config import ModelConfig
from ..process import LogLinear, Masked, Uniform
from ..request import build_request, recommended_sampler
from ..sampling import LEFT_TO_RIGHT, Sampler, format_options, parse_options
from .image_evaluator import ImageEvaluator
from .judges import load_judges
from .report.formatting import pluralize
from .report.results import settings_of
from .results_log import Cell, Protocol, ResultsLog
from .sample_evaluator import SampleEvaluator
from .sample_evaluators import OracleEvaluator, build_evaluator, kind_of

ORACLES = ("toy-uniform", "toy-masked")
_SHOWN = 4


class EvaluatorCache:
    """Each model with its evaluator, made once; the judge is loaded once for all."""

    def __init__(self, protocol: Protocol, device: str, compiled: bool = False) -> None:
        self.protocol, self.device, self.compiled = protocol, device, compiled
        self._model, self._evaluator = cache(self._load), cache(self._make_evaluator)
        self._judges = cache(lambda: load_judges(protocol, device))

    def kind(self, name: str) -> str:
        """What a model makes: text, image, puzzle or toy."""
        return "toy" if name in ORACLES else kind_of(self._model(name))

    def prepare(self, name: str) -> tuple[Model, SampleEvaluator]:
        return self._model(name), self._evaluator(name)

    def _load(self, name: str) -> Model:
        if name in ORACLES:
            return self._oracle(name)
        model = load(name, self.device, self.protocol.dtype)
        return model.compile() if self.compiled else model

    def _make_evaluator(self, name: str) -> SampleEvaluator:
        if name in ORACLES:
            return OracleEvaluator(Chain.syllables())
        wanted, model = self.protocol, self._model(name)
        return build_evaluator(
            name, model, wanted.reference, self._judges(), wanted.clues, wanted.seed
        )

    def _oracle(self, name: str) -> Model:
        """The syllables' exact denoiser with errors on its logits, as a network has them."""
        chain = Chain.syllables()
        K = chain.num_tokens
        prior = Uniform(K) if name == "toy-uniform" else Masked(K + 1, K)
        denoiser = chain.denoiser(prior)
        if self.protocol.error:
            denoiser = perturbed(denoiser, self.protocol.error)
        config = ModelConfig(length=chain.length, name=name)
        return Model(denoiser, prior, LogLinear(), Characters(chain.alphabet), config)


def fill_grid(
    cells: Sequence[Cell],
    protocol: Protocol,
    folder: Path,
    evaluators: EvaluatorCache,
    group: Processes,
    notify: Callable[[str], None],
) -> tuple[list[dict[str, Any]], list[str]]:
    """Measure the cells that are missing in a folder.

    Returns the records of all cells of these models that the folder has, in the order of the
    cells, and in words how many it has of other models.
    """
    metrics_named(protocol.metrics)  # an error of theirs comes before anything is measured
    wanted: dict[str, Cell] = {}  # each once: cap:.02 and cap:0.02 are the same rule
    for cell in cells:
        definite = _definite(cell, protocol, *evaluators.prepare(cell.model))
        wanted.setdefault(_key(asdict(definite)), definite)
    book = ResultsLog(folder, protocol, group.rank)
    with book.lock:
        done, warm = {_key(record["cell"]) for record in book.records()}, set()
        share = list(wanted)[group.rank :: group.world]  # whatever the others have done by now
        mine = [wanted[key] for key in share if key not in done]
        for number, cell in enumerate(mine, 1):
            notify(f"[{number}/{len(mine)}] {_words(cell)}")
            model, evaluator = evaluators.prepare(cell.model)
            if cell.model not in warm:  # what is slow only once is no sampler's fault
                sampler = replace(_sampler(cell, Protocol(samples=1), model), steps=1)
                model.sample(1, sampler=sampler, **evaluator.sampling_inputs(1), split=False)
            warm.add(cell.model)
            book.add(measure(cell, protocol, model, evaluator))
    group.wait()
    return _of_models(book.records(), wanted)


def _definite(cell: Cell, protocol: Protocol, model: Model, evaluator: SampleEvaluator) -> Cell:
    """The same cell with the rule that "auto" stands for.

    What is wrong with a cell is said here, before the first one is measured.
    """
    cell = _with_its_steps(cell)
    said = parse_options(cell.kappa)
    rule = said.get("kappa", "auto")
    if model.prior is None:  # it goes left to right, whatever rules others get
        length = model.config.length or cell.steps
        words = format_options({**said, "kappa": LEFT_TO_RIGHT})
        cell = replace(cell, steps=length, kappa=words)
    elif rule is LEFT_TO_RIGHT:
        raise ValueError(f"{cell.model} is no autoregressive model: left-to-right is none")
    sampler = _sampler(cell, protocol, model)
    inputs = evaluator.sampling_inputs(protocol.samples)
    if isinstance(evaluator, ImageEvaluator):
        evaluator.check_counts(protocol.samples)
    build_request(model, protocol.samples, seed=protocol.seed, sampler=sampler, **inputs)
    if rule != "auto" or "preset" in said or model.prior is None:
        return cell
    return replace(cell, kappa=format_options({**said, "kappa": sampler.kappa}))


def _with_its_steps(cell: Cell) -> Cell:
    """Steps that the words say, or a grid of times, come before those of the grid of cells."""
    said = parse_options(cell.kappa)
    steps = said.pop("steps", cell.steps)
    if isinstance(said.get("grid"), tuple):
        steps = len(said["grid"])
    words = format_options(said) if "steps" in parse_options(cell.kappa) else cell.kappa
    return replace(cell, steps=steps, kappa=words or "auto")


def _of_models(
    records: Sequence[dict[str, Any]], wanted: Mapping[str, Cell]
) -> tuple[list[dict[str, Any]], list[str]]:
    """The records of the cells' models, in the order of the cells and then those of earlier
    runs, which were not `asked` for; and in words those of other models."""
    models = {cell.model for cell in wanted.values()}
    place = {key: number for number, key in enumerate(wanted)}
    ours = [
        {**record, "asked": _key(record["cell"]) in place}
        for record in records
        if record["cell"]["model"] in models
    ]
    others = Counter(r["cell"]["model"] for r in records if r["cell"]["model"] not in models)
    told = [f"{pluralize(count, 'cell')} of {name}" for name, count in others.items()]
    return sorted(ours, key=lambda r: place.get(_key(r["cell"]), len(place))), told


def measure(
    cell: Cell, protocol: Protocol, model: Model, evaluator: SampleEvaluator
) -> dict[str, Any]:
    """One cell: its samples, what they cost, and what they are worth."""
    sampler = _sampler(cell, protocol, model)
    inputs = evaluator.sampling_inputs(protocol.samples)
    with _peak_memory(model.device) as peak:
        made = model.sample(
            protocol.samples, sampler=sampler, seed=protocol.seed, split=False, **inputs
        )
    found = evaluator.evaluate(made)
    known = {each.name for each in found}
    more = metrics_named(protocol.metrics)
    found += evaluator.chosen(made, [each for each in more if each.name not in known])
    length = made.tokens.shape[1]
    return {
        "format_version": FORMAT_VERSION,
        "cell": asdict(cell),
        "kind": "toy" if isinstance(evaluator, OracleEvaluator) else kind_of(model),
        "samples": protocol.samples,
        "length": length,
        "seed": protocol.seed,
        "sampler": str(sampler),
        "nfe": made.nfe,
        "head_rows_per_token": made.head_rows / made.tokens.numel(),
        "seconds": made.seconds,
        "tokens_per_pass": length / made.nfe,
        "peak_memory_mib": peak.get("mib"),
        "quality": evaluator.quality,
        "better": evaluator.better,
        "entropy": evaluator.entropy,
        "measures": [each.to_dict() for each in found],
        "reference": as_json(evaluator.reference),
        "shown": _shown(made),
        "psidiff": __version__,
        "torch": torch.__version__,
        "device": str(model.device),
        "dtype": protocol.dtype,
        "machine": f"{os.cpu_count()} {platform.machine()} cores",
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _sampler(cell: Cell, protocol: Protocol, model: Model) -> Sampler:
    """The words of a cell, with what the grid and the protocol add to them."""
    said = parse_options(cell.kappa)
    asked: dict[str, Any] = {
        "steps": cell.steps,
        "top_p": cell.top_p,
        "temperature": cell.temperature,
        "last": None if model.prior is None else protocol.last,
    }
    for name in said:
        if asked.get(name) is not None:
            option = "--" + name.replace("_", "-")
            raise ValueError(f"the sampler {cell.kappa!r} says {name} itself: no {option}")
    return Sampler.of({**asked, **said}, recommended_sampler(model))


def _shown(made: Decoded) -> list[Any]:
    """A few samples to look at."""
    if made.codec is not None and made.codec.kind == "image":
        images = made.images[:32]
        sheet = grid(images, min(len(images), 8), max(1, 48 // images[0].shape[0]), 3)
        return [{"png": base64.b64encode(png_bytes(sheet)).decode()}]
    if made.codec is None:
        return [" ".join(map(str, ids)) for ids in made.tokens[:_SHOWN].tolist()]
    return replace(made, whole=True).text[:_SHOWN]  # all that is judged


@contextmanager
def _peak_memory(device: torch.device) -> Iterator[dict[str, float]]:
    """MiB at the peak: what torch allocated on a GPU, resident memory on Linux."""
    found: dict[str, float] = {}
    status = Path("/proc/self/status")
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif status.is_file():
        with Path("/proc/self/clear_refs").open("w") as file:
            file.write("5")
    yield found
    if device.type == "cuda":
        found["mib"] = torch.cuda.max_memory_allocated(device) / 2**20
    elif status.is_file():
        found["mib"] = int(status.read_text().split("VmHWM:")[1].split()[0]) / 1024


def _key(cell: dict[str, Any]) -> str:
    """What cells have in common that mean the same: cap:.02 and cap:0.02 do."""
    with suppress(ValueError):  # a record may name a file that nobody imported
        cell = {**cell, "kappa": format_options(parse_options(cell["kappa"]))}
    return json.dumps(cell, sort_keys=True)


def _words(cell: Cell) -> str:
    settings = settings_of({"cell": asdict(cell)})
    parts = [cell.model, pluralize(cell.steps, "step"), cell.kappa, settings]
    return ", ".join(filter(None, parts))
