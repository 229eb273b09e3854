"""What the demo leaves: one page that needs nothing beside it; a chart of the shares solved."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...data.codec import codec_from
from ...data.sudoku import Sudoku
from ...experiment.report.labels import spread
from ...files import write_atomic
from ...html import json_for_script, template
from ...html.replay import encode_frames, pieces
from ...model import Model
from ...sampling import Trace
from .puzzles import Puzzles, Runs, name_of, verdict
from .samples import BLANKS, GUIDANCE, KAPPA, PROMPT, TOP_P, Pieces

_WIDTH, _HEIGHT = 388, 270
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 300, 16, 226  # of the axes
_GAP = 16.0  # between the names of two lines, at least
_APART = 2.5  # how far each line is moved aside, so that bars do not hide one another


@dataclass(frozen=True)
class Shown:
    """All that the page shows; of the runs the last two are played back."""

    seed: int
    model: Model
    kappa: str
    puzzles: Puzzles
    runs: Sequence[Runs]
    passage: Trace
    filled: Sequence[Pieces]
    digits: Trace


def write_page(path: Path, shown: Shown) -> Path:
    """The template with style, script, words and data put in."""
    page, style, script = (
        template(__package__, name) for name in ("page.html", "page.css", "page.js")
    )
    parts = {"style": style, "script": script, "data": json_for_script(_data(shown))}
    parts |= _words(shown)
    page = re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], page)
    write_atomic(path, page.encode("utf-8", "backslashreplace"))
    return path


def commands(shown: Shown) -> list[tuple[str, str]]:
    """What to type next, and what it does."""
    clues = Sudoku().decode(shown.puzzles.clues[0]).replace("\n", "")
    steps = 4 * shown.runs[-1].steps
    return [
        (
            f"psidiff sample sudoku --given {clues} -n 1 --steps {steps} --last greedy --watch",
            "The first of these puzzles in four times as many steps.",
        ),
        (
            f'psidiff sample books --prompt "{PROMPT}" --top-p {TOP_P} -n 1 --watch',
            "Another passage; --seed makes it another again.",
        ),
        (f'psidiff sample books --infill "{BLANKS}" -n 4', "Blanks in a sentence of yours."),
        (
            f"psidiff sample digits --label 3 --guidance {GUIDANCE:g} -n 20",
            "Threes, as a picture.",
        ),
        (
            "psidiff compare sudoku --clues minimal --last greedy --steps 16,64 --samples 32",
            "Which sampler, how many steps, at what cost: your own report.",
        ),
        ("psidiff verify", "Every sampler keeps the marginals it promises, checked exactly."),
        ("psidiff train digits", "A model of your own, in minutes on two cores."),
        (
            f"psidiff demo --seed {shown.seed + 1}",
            "All of this with other puzzles and other chances.",
        ),
    ]


def _words(shown: Shown) -> dict[str, str]:
    """The texts of the page, as HTML."""
    ancestral, psi = shown.runs[-2:]
    kappas = [step.kappa for step in psi.trace.steps]
    asked = sum(callable(kappa) or kappa < 1 for kappa in kappas)
    words: dict[str, Any] = {
        "seed": shown.seed,
        "parameters": f"{shown.model.num_parameters / 1e6:.1f} million parameters",
        "puzzles": len(shown.puzzles),
        "clues": f"{(shown.puzzles.clues >= 0).sum(1).float().mean():.0f}",
        "steps": psi.steps,
        "kappa": shown.kappa,
        "asked": asked,
        "ancestral": ancestral.hits,
        "psi": psi.hits,
        "verdict": verdict(ancestral, psi),
        "prompt": PROMPT,
        "passage_steps": len(shown.passage) - 1,
        "passage_sampler": f"{KAPPA}, top-p {TOP_P}",
        "drawing_steps": len(shown.digits) - 1,
        "guidance": f"{GUIDANCE:g}",
    }
    texts = {name: escape(str(word)) for name, word in words.items()}
    texts |= {"curve": curve(shown.runs), "table": _table(shown.runs)}
    texts["filled"] = "".join(f"<p>{_sentence(each)}</p>" for each in shown.filled)
    texts["commands"] = "".join(
        f"<div><dt><code>{_unbroken(line)}</code></dt><dd>{escape(about)}</dd></div>"
        for line, about in commands(shown)
    )
    return texts


def _table(runs: Sequence[Runs]) -> str:
    rows = []
    for each in runs:
        hits = f"{each.hits} of {len(each.solved)}"
        cells = (each.steps, name_of(each.sampler), hits, each.percent)
        rows.append("".join(f"<td>{cell}</td>" for cell in cells))
    return "".join(f"<tr>{row}</tr>" for row in rows)


def _unbroken(line: str) -> str:
    """A command that is broken between its words; only a long word is broken itself."""
    words = [escape(word) for word in line.split()]
    return " ".join(word if len(word) > 30 else f"<span>{word}</span>" for word in words)


def _sentence(sentence: Pieces) -> str:
    """What was given as it is, what was made marked."""
    texts = ((escape(text), given) for text, given in sentence)
    return "".join(text if given else f"<mark>{text}</mark>" for text, given in texts)


def _data(shown: Shown) -> dict[str, Any]:
    """What is played back."""
    clues, solutions = (
        encode_frames(_bytes([cells]))  # -1 becomes 255
        for cells in (shown.puzzles.clues, shown.puzzles.solutions)
    )
    runs = [
        {
            "name": name_of(each.sampler),
            "solved": each.solved.tolist(),
            "tokens": encode_frames(_bytes(each.trace.tokens)),
        }
        for each in shown.runs[-2:]
    ]
    pixels = _bytes(shown.digits.tokens)
    levels = shown.digits.about["codec"]["levels"]
    return {
        "sudoku": {"clues": clues, "solutions": solutions, "runs": runs},
        "passage": _passage(shown.passage),
        "digits": {"tokens": encode_frames(pixels), "count": pixels.shape[1], "levels": levels},
    }


def _passage(trace: Trace) -> dict[str, Any]:
    tokens = torch.stack(trace.tokens)[:, 0].numpy()
    ids = np.unique(tokens)
    return {
        "tokens": encode_frames(np.searchsorted(ids, tokens).astype("<u2")),
        "routes": encode_frames(_bytes(trace.routes)[:, 0]),
        "given": trace.about["given"][0],
        "pieces": pieces(codec_from(trace.about["codec"]), ids.tolist()),
    }


def _bytes(frames: Sequence[Tensor]) -> np.ndarray:
    """Numbers below 256 after each step, (steps, samples, positions)."""
    return torch.stack(list(frames)).numpy().astype("u1")


def curve(runs: Sequence[Runs]) -> str:
    """An SVG; colours come from the classes of the page."""
    samplers = list(dict.fromkeys(each.sampler for each in runs))
    steps = sorted({each.steps for each in runs})
    lines = [[each for each in runs if each.sampler == name] for name in samplers]
    ends = [_down(line[-1].hits / len(line[-1].solved)) for line in lines]
    order = sorted(range(len(lines)), key=lambda i: ends[i])
    heights = dict(zip(order, spread([ends[i] for i in order], _GAP), strict=True))
    parts = _axes(steps)
    for i, line in enumerate(lines):
        aside = _APART * (2 * i - len(lines) + 1)
        parts.append(_line(line, [_across(n, steps) + aside for n in steps], i, heights[i]))
    alt = escape("Share of the puzzles solved against steps, one line for each sampler")
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{alt}">'
        + "".join(parts)
        + "</svg>"
    )


def _axes(steps: Sequence[int]) -> list[str]:
    parts = []
    for percent in range(0, 101, 25):
        y = _down(percent / 100)
        parts.append(f'<path class="rule" d="M{_LEFT} {y:.1f}H{_RIGHT}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" class="end">{percent}%</text>')
    for n in steps:
        x = _across(n, steps)
        parts.append(f'<text x="{x:.1f}" y="{_BOTTOM + 20}" class="middle">{n}</text>')
    middle = (_LEFT + _RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{_BOTTOM + 40}" class="middle">steps</text>')
    return parts


def _line(line: Sequence[Runs], xs: Sequence[float], number: int, height: float) -> str:
    """Points joined, their 95% intervals, and the name where the line ends."""
    ys = [_down(each.hits / len(each.solved)) for each in line]
    bars = "".join(
        f'<path class="interval" d="M{x:.1f} {_down(low):.1f}V{_down(high):.1f}"/>'
        for x, (low, high) in zip(xs, (each.interval for each in line), strict=True)
    )
    points = list(zip(xs, ys, strict=True))
    way = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4"/>' for x, y in points)
    name = f'<text class="name" x="{_RIGHT + 14}" y="{height + 4:.1f}">'
    name += f"{escape(name_of(line[0].sampler))}</text>"
    return f'<g class="line s{number}">{bars}<path d="M{way}"/>{dots}{name}</g>'


def _across(n: int, steps: Sequence[int]) -> float:
    low, high = math.log2(steps[0]), math.log2(steps[-1])
    part = (math.log2(n) - low) / (high - low) if high > low else 0.5
    return _LEFT + 16 + part * (_RIGHT - _LEFT - 32)


def _down(share: float) -> float:
    return _BOTTOM - share * (_BOTTOM - _TOP)
