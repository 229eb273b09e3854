"""What the demo leaves: one page that needs nothing beside it."""

from __future__ import annotations

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
from ...files import write_whole
from ...html import as_script, template
from ...html.replay import pack, pieces
from ...model import Model
from ...sampling import Trace
from .puzzles import Puzzles, Runs, name_of, verdict
from .samples import BLANKS, GUIDANCE, KAPPA, PROMPT, TOP_P, Pieces
from .solved_chart import curve


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
    parts = {"style": style, "script": script, "data": as_script(_data(shown))}
    parts |= _words(shown)
    page = re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], page)
    write_whole(path, page.encode("utf-8", "backslashreplace"))
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
    count = sum(parameter.numel() for parameter in shown.model.network.parameters())
    words: dict[str, Any] = {
        "seed": shown.seed,
        "parameters": f"{count / 1e6:.1f} million parameters",
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
        pack(_bytes([cells]))  # -1 becomes 255
        for cells in (shown.puzzles.clues, shown.puzzles.solutions)
    )
    runs = [
        {
            "name": name_of(each.sampler),
            "solved": each.solved.tolist(),
            "tokens": pack(_bytes(each.trace.tokens)),
        }
        for each in shown.runs[-2:]
    ]
    pixels = _bytes(shown.digits.tokens)
    levels = shown.digits.about["codec"]["levels"]
    return {
        "sudoku": {"clues": clues, "solutions": solutions, "runs": runs},
        "passage": _passage(shown.passage),
        "digits": {"tokens": pack(pixels), "count": pixels.shape[1], "levels": levels},
    }


def _passage(trace: Trace) -> dict[str, Any]:
    tokens = torch.stack(trace.tokens)[:, 0].numpy()
    ids = np.unique(tokens)
    return {
        "tokens": pack(np.searchsorted(ids, tokens).astype("<u2")),
        "routes": pack(_bytes(trace.routes)[:, 0]),
        "given": trace.about["given"][0],
        "pieces": pieces(codec_from(trace.about["codec"]), ids.tolist()),
    }


def _bytes(frames: Sequence[Tensor]) -> np.ndarray:
    """Numbers below 256 after each step, (steps, samples, positions)."""
    return torch.stack(list(frames)).numpy().astype("u1")
