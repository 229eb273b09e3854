"""The measured cells of benchmarks/sudoku.py as Markdown and as a figure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from psidiff.evaluation.metric_result import wilson
from psidiff.evaluation.puzzle_metrics import clue_count
from psidiff.experiment.report.plot_style import LIGHT, look, matplotlib

Record = dict[str, Any]

PSI, EARLY_PSI = "constant:0@.05-.6", "constant:0@.05-.8"
CONFIDENT, GUMBEL = "predictor=confident", "predictor=confident:gumbel=1"
MOST_CONFIDENT = "predictor=confident:argmax"
COMMITTED = "predictor=confident:argmax,commit"
LINES = {  # of the figure: whether with masks, the sampler; its name, colour and marker
    (False, EARLY_PSI): ("Ψ: κ = 0 on [.05, .8]", LIGHT.samplers[0], "o"),
    (False, PSI): ("Ψ: κ = 0 on [.05, .6]", LIGHT.samplers[1], "s"),
    (False, GUMBEL): ("confident, Gumbel noise", LIGHT.samplers[2], "^"),
    (False, CONFIDENT): ("confident", LIGHT.samplers[3], "D"),
    (False, COMMITTED): ("most confident first", LIGHT.samplers[5], "X"),
    (False, "ancestral"): ("ancestral", LIGHT.soft, "v"),
    (True, MOST_CONFIDENT): ("masks, most confident first", LIGHT.samplers[5], "X"),
    (True, PSI): ("masks, Ψ", LIGHT.samplers[1], "s"),
    (True, "ancestral"): ("masks, ancestral", LIGHT.soft, "v"),
}


def newest(records: list[Record]) -> list[Record]:
    """Of each model the parameters measured last, with the most puzzles."""
    weights = {record["model"]: record["weights"] for record in records}
    ours = [record for record in records if record["weights"] == weights[record["model"]]]
    most = max((record["puzzles"] for record in ours), default=0)
    return [record for record in ours if record["puzzles"] == most]


def stated(record: Record) -> str:
    """.973 [.961, .982]: the share and its 95% Wilson interval."""
    low, high = wilson(record["solved"], record["puzzles"])
    return f"{short(record['solved'] / record['puzzles'])} [{short(low)}, {short(high)}]"


def short(share: float) -> str:
    return f"{share:.3f}".removeprefix("0")


def table(records: list[Record]) -> str:
    """Markdown: for each kind of clues, samplers down and steps across."""
    parts = []
    for clues in sorted({record["clues"] for record in records}, key=order):
        ours = [record for record in records if record["clues"] == clues]
        steps = sorted({record["steps"] for record in ours})
        lines = [
            f"Clues: {clues}; {ours[0]['puzzles']:,} puzzles, share solved [95% interval]",
            "",
        ]
        lines += ["| model | sampler | " + " | ".join(f"{n} steps" for n in steps) + " |"]
        lines += ["|" + "---|" * (len(steps) + 2)]
        for model, sampler in dict.fromkeys((r["model"], r["sampler"]) for r in ours):
            row = [r for r in ours if (r["model"], r["sampler"]) == (model, sampler)]
            told = {r["steps"]: stated(r) for r in row}
            shown = " | ".join(told.get(n, "") for n in steps)
            lines.append(f"| {Path(model).name} | {sampler}{passes(row)} | {shown} |")
        parts.append("\n".join([*lines, *distinct(ours)]))
    return "\n\n".join(parts)


def passes(row: list[Record]) -> str:
    """Where a step is more than one pass of the network, as a corrector makes it."""
    each = max(record["nfe"] / (record["steps"] + 1) for record in row)
    return f" ({each:.1f} passes a step)" if each > 1.05 else ""


def distinct(records: list[Record]) -> list[str]:
    """Of grids without clues, whether any came twice."""
    if order(records[0]["clues"]) > 0:
        return []
    again = [r for r in records if r["distinct"] < r["solved"]]
    told = [
        f"{r['sampler']}, {r['steps']} steps: {r['distinct']} of {r['solved']}" for r in again
    ]
    return ["", "Distinct among the valid: " + ("; ".join(told) if again else "all.")]


def order(clues: str) -> int:
    """none first, minimal last"""
    count = clue_count(clues)
    return 81 if count is None else count


def figure(records: list[Record], path: Path) -> None:
    """Share solved against steps on minimal puzzles, of the model and of the masked twin."""
    mpl = matplotlib()
    drawn = [r for r in records if (r["masks"], r["sampler"]) in LINES]
    ours = [record for record in drawn if record["clues"] == "minimal"]
    if not ours:
        raise ValueError("none of the figure's samplers was measured on minimal puzzles")
    models = {record["masks"]: record["model"] for record in ours}
    ours = [record for record in ours if record["model"] == models[record["masks"]]]
    with mpl.rc_context(look(LIGHT)):
        sheet = mpl.figure.Figure(figsize=(7.2, 4.4), dpi=200, layout="constrained")
        mpl.backends.backend_agg.FigureCanvasAgg(sheet)
        ax = sheet.subplots()
        for which, style in LINES.items():
            line = [r for r in ours if (r["masks"], r["sampler"]) == which]
            if line:
                draw(ax, sorted(line, key=lambda r: r["steps"]), *style)
        title = "Minimal Sudokus solved: one solution, no clue to spare"
        sheet.suptitle(title, x=0.015, ha="left", fontsize=12, weight="bold")
        one = ours[0]
        note = (
            f"{one['puzzles']:,} puzzles of {one['shown']:.1f} clues on average · 95% intervals"
        )
        ax.set_title(note, loc="left", fontsize=9, color=LIGHT.soft)
        finish(mpl, ax, sorted({record["steps"] for record in ours}))
        path.parent.mkdir(parents=True, exist_ok=True)
        sheet.savefig(path)


def draw(ax: Any, line: list[Record], name: str, color: str, mark: str) -> None:
    """A line in its interval; dashed with masks."""
    steps = [record["steps"] for record in line]
    shares = [record["solved"] / record["puzzles"] for record in line]
    low, high = zip(*(wilson(r["solved"], r["puzzles"]) for r in line), strict=True)
    ax.fill_between(steps, low, high, color=color, alpha=0.15, lw=0)
    dashes = (0, (4, 2)) if line[0]["masks"] else "-"
    ax.plot(steps, shares, ls=dashes, color=color, marker=mark, ms=4.5, lw=1.8, label=name)


def finish(mpl: Any, ax: Any, steps: list[int]) -> None:
    """Axes, and the names beside the lines, the highest first."""
    ax.set_xscale("log", base=2)
    ax.set_xticks(steps, [str(n) for n in steps])
    ax.xaxis.set_minor_locator(mpl.ticker.NullLocator())
    ax.set_xlabel("steps")
    ax.set_ylabel("share solved")
    ax.set_ylim(0, 1)
    handles, names = ax.get_legend_handles_labels()
    ranked = sorted(zip(handles, names, strict=True), key=lambda p: -p[0].get_ydata()[-1])
    where = {"loc": "center left", "bbox_to_anchor": (1.01, 0.5)}
    ax.legend(*zip(*ranked, strict=True), **where, frameon=False, handlelength=3)
