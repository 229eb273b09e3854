"""`psidiff compare`: models x steps x rules x truncation, measured by one protocol.

One line of JSON a cell, written when it is finished: a run that was killed goes on with the
cells that are missing. Under torchrun each process takes every n-th cell.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import platform
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .. import __version__
from ..data.characters import Characters
from ..data.images import grid, write_png
from ..data.toy import Chain, perturbed
from ..evaluation.exact import Exact
from ..evaluation.judge import Judge
from ..model import Decoded, Model, load
from ..process import LogLinear, Masked, Uniform
from ..request import request_of
from ..training.parallel import Processes
from . import report
from .benches import Bench, OracleBench, bench_of, features_of, judge_of, truth_of

FORMAT_VERSION = 1
ORACLES = ("toy-uniform", "toy-masked")
_SHOWN = 4


@dataclass(frozen=True)
class Cell:
    """One setting of one model."""

    model: str
    steps: int
    kappa: str
    top_p: float | None = None
    temperature: float | None = None


@dataclass(frozen=True)
class Protocol:
    """What all cells have in common."""

    samples: int = 64
    seed: int = 0
    judge: str | None = None
    reference: str | None = None
    features: str | None = None
    clues: int = 24
    error: float = 4.0  # of the toys' denoiser, in nats on its logits
    truth: str | None = None


def cells_of(
    models: Sequence[str],
    steps: Sequence[int],
    kappas: Sequence[str],
    top_ps: Sequence[float | None],
    temperatures: Sequence[float | None],
) -> list[Cell]:
    """The grid, model by model."""
    return [
        Cell(*each) for each in itertools.product(models, steps, kappas, top_ps, temperatures)
    ]


def run(
    console: Console,
    cells: Sequence[Cell],
    protocol: Protocol,
    folder: Path,
    device: str = "auto",
    tolerance: float | None = None,
) -> list[dict[str, Any]]:
    """Measure the cells that are missing, then write tables, figures and a page."""
    group = Processes.join(device)
    bench = Benches(protocol, str(group.device))
    for cell in cells:  # what is wrong with one is said before the first is measured
        model, judged = bench.prepare(cell.model)
        request_of(model, **_asked(cell, protocol), **judged.asks(protocol.samples))
    book = Book(folder, protocol, group.rank)
    done = {_key(record["cell"]) for record in book.records()}
    missing = [cell for cell in cells if _key(asdict(cell)) not in done]
    mine = missing[group.rank :: group.world]
    for number, cell in enumerate(mine, 1):
        console.print(f"[{number}/{len(mine)}] {_words(cell)}", highlight=False, markup=False)
        book.add(measure(cell, protocol, *bench.prepare(cell.model)))
    group.wait()
    wanted = {_key(asdict(cell)) for cell in cells}
    records = [record for record in book.records() if _key(record["cell"]) in wanted]
    if group.first:
        held = report.TOLERANCE if tolerance is None else tolerance
        page = report.write_report(records, folder, held)
        _show(console, records)
        if tolerance is not None:
            for sentence in report.recommend(records, tolerance):
                console.print(sentence, highlight=False, markup=False)
        console.print(f"the report: [bold]{page}[/]", highlight=False)
    group.leave()
    return records


def measure(cell: Cell, protocol: Protocol, model: Model, bench: Bench) -> dict[str, Any]:
    """One cell: its samples, what they cost, and what they are worth."""
    with _peak_memory(model.device) as peak:
        asked = {**_asked(cell, protocol), **bench.asks(protocol.samples)}
        made = model.sample(**asked, split=False)
    found = bench.measures(made)
    length = made.tokens.shape[1]
    settings = {"top-p": cell.top_p, "temperature": cell.temperature}
    words = [f"{name} {value:g}" for name, value in settings.items() if value is not None]
    return {
        "format_version": FORMAT_VERSION,
        "cell": asdict(cell),
        "kind": "toy" if isinstance(bench, OracleBench) else model.codec.kind,
        "samples": protocol.samples,
        "length": length,
        "seed": protocol.seed,
        "sampler": ", ".join([cell.kappa, f"{cell.steps} steps", *words]),
        "nfe": made.nfe,
        "head_rows_per_token": made.head_rows / made.tokens.numel(),
        "seconds": made.seconds,
        "tokens_per_pass": length / made.nfe,
        "peak_memory_mib": peak.get("mib"),
        "quality": bench.quality,
        "better": bench.better,
        "entropy": bench.entropy,
        "measures": [asdict(each) for each in found],
        "reference": bench.reference(),
        "shown": _shown(made),
        "psidiff": __version__,
        "torch": torch.__version__,
        "device": str(model.device),
        "machine": f"{os.cpu_count()} {platform.machine()} cores",
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _asked(cell: Cell, protocol: Protocol) -> dict[str, Any]:
    return {
        "num_samples": protocol.samples,
        "num_steps": cell.steps,
        "kappa": cell.kappa,
        "top_p": cell.top_p,
        "temperature": cell.temperature,
        "seed": protocol.seed,
    }


class Book:
    """The records of a folder; what was being written when a run was killed does not count."""

    def __init__(self, folder: Path, protocol: Protocol, rank: int) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"cells-{rank}.jsonl"
        stored, mine = folder / "protocol.json", asdict(protocol)
        if stored.is_file():
            before = json.loads(stored.read_text(encoding="utf-8"))
            for name, value in mine.items():
                if before.get(name) != value:
                    raise ValueError(
                        f"{folder} was begun with {name} = {before.get(name)}, and this asks "
                        f"for {value}: name another --out"
                    )
        elif rank == 0:
            temporary = stored.with_suffix(".tmp")
            temporary.write_text(json.dumps(mine, indent=1), encoding="utf-8")
            os.replace(temporary, stored)

    def records(self) -> list[dict[str, Any]]:
        found = []
        for path in sorted(self.folder.glob("cells-*.jsonl")):
            for line in path.read_text(encoding="utf-8").split("\n"):
                try:
                    found.append(json.loads(line))
                except ValueError:  # the end of a run that was killed
                    continue
        return found

    def add(self, record: dict[str, Any]) -> None:
        """On a line of its own, even after half a line."""
        text = json.dumps(record, ensure_ascii=False)
        with self.path.open("a+", encoding="utf-8") as file:
            file.write(f"\n{text}\n")
            file.flush()
            os.fsync(file.fileno())


class Benches:
    """Each model with its bench, made once; the judge is loaded once for all."""

    def __init__(self, protocol: Protocol, device: str) -> None:
        self.protocol, self.device = protocol, device
        self._made: dict[str, tuple[Model, Bench]] = {}
        self._judge: Judge | None = None
        self._truth: Exact | None = None

    def prepare(self, name: str) -> tuple[Model, Bench]:
        if name not in self._made:
            self._made[name] = self._oracle(name) if name in ORACLES else self._model(name)
        return self._made[name]

    def _model(self, name: str) -> tuple[Model, Bench]:
        model, wanted = load(name, self.device), self.protocol
        features = features_of(wanted.features, self.device)
        judge = self._judged(model)
        bench = bench_of(
            name,
            model,
            wanted.reference,
            judge,
            features,
            wanted.clues,
            wanted.seed,
            self._known(model),
        )
        return model, bench

    def _judged(self, model: Model) -> Judge | None:
        if self.protocol.judge is None or model.codec is None or model.codec.kind != "text":
            return None
        if self._judge is None:
            self._judge = judge_of(self.protocol.judge, self.device)
        return self._judge

    def _known(self, model: Model) -> Exact | None:
        if self.protocol.truth is None or model.codec is None or model.codec.kind != "text":
            return None
        if self._truth is None:
            self._truth = truth_of(self.protocol.truth, self.device)
        return self._truth

    def _oracle(self, name: str) -> tuple[Model, Bench]:
        """The syllables' exact denoiser with errors on its logits, as a network has them."""
        chain = Chain.syllables()
        K = chain.num_tokens
        prior = Uniform(K) if name == "toy-uniform" else Masked(K + 1, K)
        denoiser = chain.denoiser(prior)
        if self.protocol.error:
            denoiser = perturbed(denoiser, self.protocol.error)
        config = {"length": chain.length, "name": name}
        model = Model(denoiser, prior, LogLinear(), Characters(chain.alphabet), config)
        return model, OracleBench(chain)


def _shown(made: Decoded) -> list[Any]:
    """A few samples to look at."""
    if made.codec is not None and made.codec.kind == "image":
        images = made.images[:32]
        with tempfile.TemporaryDirectory() as folder:
            sheet = Path(folder) / "sheet.png"
            write_png(
                grid(images, min(len(images), 8), max(1, 48 // images[0].shape[0]), 3), sheet
            )
            return [{"png": base64.b64encode(sheet.read_bytes()).decode()}]
    return made.text[:_SHOWN]


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


def _show(console: Console, records: list[dict[str, Any]]) -> None:
    """A table a model."""
    for model in sorted({record["cell"]["model"] for record in records}):
        ours = [record for record in records if record["cell"]["model"] == model]
        head, *rows = report.table(ours, bold="[bold]{}[/]", brief=True)
        table = Table(*head[1:], title=escape(model), title_justify="left")
        for row in rows:
            table.add_row(*row[1:])
        console.print(table)


def _key(cell: dict[str, Any]) -> str:
    return json.dumps(cell, sort_keys=True)


def _words(cell: Cell) -> str:
    more = [f"top-p {cell.top_p:g}"] if cell.top_p is not None else []
    more += [f"temperature {cell.temperature:g}"] if cell.temperature is not None else []
    return ", ".join([cell.model, f"{cell.steps} steps", cell.kappa, *more])
