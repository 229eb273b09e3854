"""Make tables and figures of the paper again, by the commands of docs/reproduce.md.

    python benchmarks/paper/reproduce.py --list
    python benchmarks/paper/reproduce.py tab:zero-shot-results --set duo++=runs/owt --set ...
    python benchmarks/paper/reproduce.py --small            all of them, on stand-ins
    python benchmarks/paper/reproduce.py --small --quick    few samplers of each

Each runs in a folder of its own below --out; what is finished is not run again. index.html
shows the tables and figures, with the command of each.
"""

from __future__ import annotations

import argparse
import html
import json
import os
import re
import shlex
import subprocess
import sys
import time
from base64 import b64encode
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import stand_ins

from experiments import EXPERIMENTS, STEPS, Experiment
from psidiff.experiment.report.results import read

ROOT = Path(__file__).parents[2]
BY_LABEL = {each.label: each for each in EXPERIMENTS}
REAL = {
    "steps": STEPS,
    "image_steps": STEPS,
    "samples": "512",
    "images": "50000",
    "draws": "1024",
    "weights": "4000",
    "order": "200000",
    "device": "auto",
    "owt": "openwebtext",
    "lm1b": "lm1b",
}
SMALL = {
    "steps": "4,8",
    "image_steps": "4",
    "samples": "8",
    "images": "10",
    "draws": "2",
    "weights": "200",
    "order": "20000",
    "device": "cpu",
}
"""Sizes for stand-ins."""


def commands(
    experiment: Experiment, names: dict[str, str], small: bool, most: int
) -> list[str]:
    """Its commands with names put in; small: with at most so many samplers, if not 0."""
    words = []
    for command in experiment.commands:
        if small:
            command += f" {experiment.small}" if experiment.small else ""
            if most:
                command = _few(command, most)
        words.append(re.sub(r"{([^}]+)}", lambda found: names[found[1]], command))
    return words


def _few(command: str, most: int) -> str:
    """A command with the first and last of its samplers."""
    found = re.findall(r"--sampler '[^']*'", command)
    for extra in found[most - 1 : -1]:
        command = command.replace(extra + " ", "", 1)
    return command


def run(command: str, folder: Path, data: str | None) -> dict[str, Any]:
    """Run it; what it printed goes to log.txt."""
    words = shlex.split(command)
    program = [sys.executable, "-m", "psidiff"] if words[0] == "psidiff" else [sys.executable]
    environment = {**os.environ, "COLUMNS": "120"}
    if data:
        environment |= {"PSIDIFF_DATA": data}
    begun = time.monotonic()
    with (folder / "log.txt").open("a", encoding="utf-8") as log:
        log.write(f"$ {command}\n")
        log.flush()
        done = subprocess.run(
            program + words[1:], cwd=ROOT, env=environment, stdout=log, stderr=log, check=False
        )
    return {"command": command, "seconds": time.monotonic() - begun, "status": done.returncode}


def missing_package(command: str) -> str | None:
    """What a command needs that is not installed."""
    if "--harness" in command and find_spec("lm_eval") is None:
        return "the evaluation harness is not installed: pip install 'psidiff[harness]'"
    return None


def results(folder: Path, metric: str | None = None) -> list[list[str]]:
    """The numbers that commands left in a folder, as a table with a head.

    metric: a word of the measure that is shown instead of the quality of samples.
    """
    cells, measures = [], []
    for path in sorted(folder.rglob("*.jsonl")):
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        if path.name.startswith("cells-"):
            cells += lines
        else:
            measures += lines
    return _grid(cells, metric) if cells else _list(measures)


def _grid(records: list[dict[str, Any]], metric: str | None) -> list[list[str]]:
    """Models and samplers down, steps across."""
    cells = read(records)
    steps = sorted({cell.steps for cell in cells})
    rows: dict[tuple[str, str], dict[int, str]] = {}
    for cell in cells:
        shown = cell.quality
        if metric is not None:
            shown = next(m for name, m in cell.measures.items() if metric in name.lower())
        words = f"{shown.value:.4g}"
        if cell.entropy is not None and metric is None:
            words += f" ({cell.entropy.value:.2f})"
        rows.setdefault((Path(cell.model).name, cell.name), {})[cell.steps] = words
    quality = metric or ", ".join(dict.fromkeys(cell.quality.name for cell in cells))
    head = ["model", f"sampler · {quality}", *(f"{n} steps" for n in steps)]
    return [head, *([*name, *(of.get(n, "") for n in steps)] for name, of in rows.items())]


def _list(measures: list[dict[str, Any]]) -> list[list[str]]:
    if not measures:
        return []
    if "name" not in measures[0]:  # of a script: its numbers as they are
        head = [key for key, value in measures[0].items() if not isinstance(value, list)]
        return [head, *([_short(each.get(key, "")) for key in head] for each in measures)]
    rows = []
    for each in measures:
        of = str((each.get("protocol") or {}).get("data", ""))
        rows.append([each["name"], of, _short(each["value"]), _short(each.get("error"))])
    return [["what", "of", "value", "standard error"], *rows]


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)


def page(out: Path, done: list[tuple[Experiment, list[dict[str, Any]]]], small: bool) -> Path:
    """index.html: one page that needs nothing beside it."""
    look = files("psidiff.html").joinpath("look.css").read_text(encoding="utf-8")
    title = "The paper's tables and figures" + (", on stand-ins" if small else "")
    body = [f"<h1>{title}</h1>"]
    if small:
        body.append(
            "<p>Random networks of the published formats, small files: the numbers say that "
            "each command works, and nothing about the paper.</p>"
        )
    for experiment, ran in done:
        body.append(f"<section><h2>{html.escape(experiment.label)}</h2>")
        body.append(f"<p>{html.escape(experiment.shows)}</p>")
        for each in ran:
            state = "" if each["status"] == 0 else f" <b>ended with {each['status']}</b>"
            state = f" not run: {html.escape(each['why'])}" if "why" in each else state
            body.append(
                f"<details><summary>{each['seconds']:.0f} s{state}</summary>"
                f"<pre>{html.escape(each['command'])}</pre></details>"
            )
        folder = out / folder_name(experiment)
        if experiment.same_as:
            folder = out / folder_name(BY_LABEL[experiment.same_as])
            body.append(f"<p class=soft>The runs of {experiment.same_as}.</p>")
        elif not ran:
            body.append("<p class=soft>A drawing: there is nothing to run.</p>")
        body.append(_table(results(folder, experiment.metric)))
        body += [_picture(path) for path in pictures(folder)]
        body.append("</section>")
    style = (
        "table{border-collapse:collapse;font-size:.85rem}td,th{padding:.15rem .6rem;"
        "text-align:left;border-bottom:1px solid var(--line)}figure{margin:.6rem 0}"
        "img{max-width:min(100%,60rem);max-height:38rem}"
        "section{margin-top:2rem;overflow-x:auto}pre{white-space:pre-wrap;font-size:.8rem}"
    )
    text = (
        f"<!doctype html><meta charset=utf-8><title>{title}</title>"
        f"<style>{look}{style}</style>{''.join(body)}"
    )
    path = out / "index.html"
    path.write_text(text, encoding="utf-8")
    return path


def _table(rows: list[list[str]]) -> str:
    if not rows:
        return ""
    lines = []
    for number, row in enumerate(rows):
        tag = "td" if number else "th"
        cells = "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row)
        lines.append(f"<tr>{cells}</tr>")
    return f"<table>{''.join(lines)}</table>"


def pictures(folder: Path) -> list[Path]:
    """The figures in a folder; of a comparison of several models the one that has them all."""
    found = sorted(folder.rglob("*.png"))
    return [path for path in found if path.stem == "quality-all"] or found


def _picture(path: Path) -> str:
    data = b64encode(path.read_bytes()).decode()
    name = html.escape(path.stem)
    return f"<figure><img alt='{name}' src='data:image/png;base64,{data}'></figure>"


def folder_name(experiment: Experiment) -> str:
    return re.sub(r"[^a-z0-9]+", "-", experiment.label.lower()).strip("-")


def make(
    experiment: Experiment, names: dict[str, str], out: Path, small: bool, most: int
) -> Any:
    """Run the commands of one that are not finished. Returns what each took."""
    folder = out / folder_name(experiment)
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / "done.json"
    ran = json.loads(kept.read_text(encoding="utf-8")) if kept.is_file() else []
    finished = {each["command"] for each in ran if each["status"] == 0}
    ran = [each for each in ran if each["status"] == 0]
    for number, command in enumerate(
        commands(experiment, {**names, "out": str(folder / "part")}, small, most)
    ):
        command = command.replace(str(folder / "part"), str(folder / f"part-{number + 1}"))
        if command in finished:
            continue
        if small and (why := missing_package(command)):
            ran.append({"command": command, "seconds": 0.0, "status": 0, "why": why})
            continue
        print(f"{experiment.label}: {command[:110]}", flush=True)
        ran.append(run(command, folder, names.get("data")))
        kept.write_text(json.dumps(ran), encoding="utf-8")
    return ran


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("labels", nargs="*", help="of the paper; all with --small")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--small", action="store_true", help="on stand-ins")
    parser.add_argument("--quick", action="store_true", help="with --small: two samplers each")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args(arguments)
    if options.list:
        for each in EXPERIMENTS:
            print(f"{each.label}: {each.shows}; needs {', '.join(each.needs) or 'nothing'}")
        return 0
    for label in options.labels:
        if label not in BY_LABEL:
            parser.error(f"there is no {label!r}: --list names them")
    if not options.labels and not options.small:
        parser.error("name a table or a figure, or say --small")
    out = (options.out or Path("out/paper-small" if options.small else "out/paper")).resolve()
    names = dict(SMALL, **stand_ins.make(out / "stand-ins")) if options.small else dict(REAL)
    for word in options.set:
        name, _, value = word.partition("=")
        names[name] = value
    chosen = [BY_LABEL[label] for label in options.labels] or list(EXPERIMENTS)
    others = [BY_LABEL[each.same_as] for each in chosen if each.same_as]
    chosen = list(dict.fromkeys([*chosen, *others]))
    missing = {name: each.label for each in chosen for name in each.needs if name not in names}
    if missing:
        parser.error("say " + ", ".join(f"--set {name}=..." for name in missing))
    most = 2 if options.quick else 0
    done = [(each, make(each, names, out, options.small, most)) for each in chosen]
    print(f"the page: {page(out, done, options.small)}")
    failed = [each.label for each, ran in done if any(one["status"] for one in ran)]
    for label in failed:
        print(f"{label} failed: see {out / folder_name(BY_LABEL[label]) / 'log.txt'}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
