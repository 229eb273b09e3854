"""Takeaways 2 and 3 on the page of results, from the lines of known_truth.py."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

from cells import ROOT, Cell, lines, markdown
from known_truth import RULES, STUDENTS

from psidiff.experiment.report.plot_style import LIGHT, look, matplotlib

NAMES = {"mdlm": "MDLM", "duo++": "Duo++"}
PICTURES = ROOT / "docs" / "results"
COMMAND = "`python experiments/known_truth.py --work DIR`"
ENTROPIES = (4.83, 4.78)
DISTANCES = {"js_1": "JS, 1-grams", "js_2": "2-grams", "js_3": "3-grams", "mauve": "MAUVE"}


class Number(NamedTuple):
    """A value and its standard error."""

    value: float
    error: float

    def __sub__(self, other: Number) -> Number:
        return Number(self.value - other.value, math.hypot(self.error, other.error))

    def __str__(self) -> str:
        return f"{self.value:.3f} ± {self.error:.3f}"


class Found:
    """The measured cells, by model, rule, steps and top-p at temperature 1."""

    def __init__(self) -> None:
        everything = lines("known_truth")
        self.bounds = {line["model"]: line for line in everything if "bound" in line}
        self.truth = next(line for line in everything if line["model"] == "truth")
        self.cells = {
            (x["model"], x["rule"], x["steps"], x["top_p"]): x
            for x in everything
            if x.get("temperature") == 1
        }
        self.samples = next(iter(self.cells.values()))["samples"]
        self.steps = sorted({steps for _, _, steps, _ in self.cells})

    def nll(self, model: str, rule: str, steps: int, top_p: float) -> Number:
        """-log p of a token by the truth."""
        return number(self.cells[model, rule, steps, top_p], "nll")

    def excess(self, model: str, rule: str, steps: int, top_p: float) -> Number:
        """What samples lose: their -log p less that of the truth's own rows."""
        return self.nll(model, rule, steps, top_p) - number(self.truth, "nll")

    def at_entropy(self, model: str, rule: str, steps: int, entropy: float) -> Number | None:
        """The excess where the entropy is this one, on the line from top-p .9 to 1."""
        ends = [self.cells.get((model, rule, steps, p)) for p in (0.9, 1)]
        if ends[0] is None or ends[1] is None:
            return None
        low, high = ends[0]["sample_entropy"], ends[1]["sample_entropy"]
        if not low <= entropy <= high:
            return None
        share = (entropy - low) / (high - low)
        parts = [(1 - share, ends[0]), (share, ends[1])]
        slope = (ends[1]["nll"] - ends[0]["nll"]) / (high - low)
        errors = [
            part * math.hypot(end["nll_error"], slope * end["sample_entropy_error"])
            for part, end in parts
        ]
        between = Number(sum(part * end["nll"] for part, end in parts), math.hypot(*errors))
        return between - number(self.truth, "nll")


def number(line: Cell, name: str) -> Number:
    return Number(line[name], line[f"{name}_error"])


def validity_flags() -> Iterable[tuple[str, ...]]:
    """The two rows of the page's first table."""
    found = Found()
    last = max(n for n in found.steps if ("duo++", "loop:.02", n, 1) in found.cells)
    plain, best = (found.nll("duo++", rule, last, 1) for rule in ("ancestral", "loop:.02"))
    even, entropy = 256, ENTROPIES[0]
    there = [found.nll("duo++", rule, even, 1) for rule in ("ancestral", "loop:.02")]
    equal = [found.at_entropy("duo++", r, even, entropy) for r in ("ancestral", "loop:.02")]
    assert equal[0] is not None and equal[1] is not None
    yield (
        "2. Ψ-samplers lower generative perplexity, most where passes exceed the length",
        "yes, for uniform and for masked noise, and more with more steps; at equal entropy a"
        " part of the gain stays",
        f"Duo++, {last:,} steps, `loop:.02`: {best - plain} nats a token against ancestral, a"
        f" perplexity of {math.exp(best.value):.0f} instead of {math.exp(plain.value):.0f}; at"
        f" {even} steps {there[1] - there[0]}, at the entropy {entropy} {equal[1] - equal[0]}",
        COMMAND,
    )
    first = 256
    changes = {
        rule: found.nll("duo++", rule, last, 1) - found.nll("duo++", rule, first, 1)
        for rule in ("ancestral", "loop:.02", "cap:.01")
    }
    masked, uniform = (
        min((found.nll(model, rule, last, 1) for rule in RULES), key=lambda n: n.value)
        for model in STUDENTS
    )
    yield (
        "3. Ψ-samplers keep improving with steps where ancestral sampling stops, and close the"
        " gap to masked models",
        "yes at equal top-p, where Duo++ passes MDLM; not at equal entropy, where MDLM stays"
        " ahead near the truth's entropy",
        f"Duo++ from {first} to {last:,} steps: ancestral {changes['ancestral']}, `cap:.01`"
        f" {changes['cap:.01']}, `loop:.02` {changes['loop:.02']}; best Duo++ less best MDLM"
        f" {uniform - masked} nats a token",
        COMMAND,
    )


def section() -> Iterable[str]:
    found = Found()
    truth, entropy = number(found.truth, "nll"), number(found.truth, "sample_entropy")
    bounds = [
        f"{NAMES[model]} {number(line, 'nelbo')}"
        for model, line in sorted(found.bounds.items())
    ]
    yield from (
        "## 2 and 3. Text whose distribution is known",
        "",
        "**Protocol.** An autoregressive network of 7.4M parameters is trained on books (BPE",
        "4,096, 256 tokens) and then taken as the truth: 102 million tokens are drawn from",
        "it at temperature 1, and MDLM and Duo++ learn from these alone (7.3M parameters,",
        "6,000 steps of 65,536 tokens, the same optimizer and rates; nothing was tuned for",
        "either). So the judge of their samples is the very distribution that they should",
        "have learnt, and a perfect sampler has an excess of 0 at the truth's entropy.",
        f"{found.samples} samples a cell, standard errors over samples, bfloat16 network.",
        "",
        f"The truth's own rows: -log p {truth} nats a token, entropy within a sample",
        f"{entropy}. Held-out NELBO in nats a token: {', '.join(bounds)}; the entropy of the",
        f"truth is {number(found.bounds['mdlm'], 'entropy_of_truth')}.",
        "",
        "![Excess against steps](results/known_truth_steps.png)",
        "",
        "Excess of -log p in nats a token; in brackets the entropy within a sample.",
        "",
    )
    yield from _rules(found)
    yield from _equal_entropy(found)
    yield from _distances(found)
    yield from _reading(found)


def _rules(found: Found) -> Iterable[str]:
    for top_p in (1, 0.9):
        yield from (f"Top-p {top_p}:", "")
        yield from markdown(
            ("model", "rule", *(f"{n:,} steps" for n in found.steps)),
            [
                (NAMES[m], f"`{rule}`", *(_cell(found, m, rule, n, top_p) for n in found.steps))
                for m in STUDENTS
                for rule in RULES
            ],
        )
        yield ""


def _cell(found: Found, model: str, rule: str, steps: int, top_p: float) -> str:
    line = found.cells.get((model, rule, steps, top_p))
    if line is None:
        return "-"
    excess = found.excess(model, rule, steps, top_p)
    return f"{excess.value:.3f} ± {excess.error:.3f} ({line['sample_entropy']:.2f})"


def _equal_entropy(found: Found) -> Iterable[str]:
    yield from (
        "### At equal entropy",
        "",
        "Top-p lowers both -log p and entropy, so an excess alone says little. Here every",
        "cell is read where its entropy is the same: on the straight line between its points",
        "at top-p .9 and 1. The true line is curved, so these are upper bounds, and cells",
        "with few points at other top-p are still in the queue. A dash: that entropy is not",
        "between the two.",
        "",
        "![Excess against entropy](results/known_truth_frontier.png)",
        "",
    )
    for entropy in ENTROPIES:
        rows = []
        for model in STUDENTS:
            for rule in RULES:
                at = partial(found.at_entropy, model, rule, entropy=entropy)
                told = [at(steps=n) for n in found.steps]
                if any(told):
                    rows.append((NAMES[model], f"`{rule}`", *(str(x or "-") for x in told)))
        yield from (
            f"Entropy {entropy} (the truth has {found.truth['sample_entropy']:.2f}):",
            "",
        )
        yield from markdown(("model", "rule", *(f"{n:,} steps" for n in found.steps)), rows)
        yield ""


def _distances(found: Found) -> Iterable[str]:
    measured = {
        (x["model"], x.get("rule"), x.get("steps"), x.get("top_p")): x
        for x in lines("known_truth_distances")
    }
    own = measured["truth", None, None, None]
    yield from (
        "### Distances that see both",
        "",
        "Jensen-Shannon divergence of n-grams (nats, less is better) and MAUVE by character",
        "trigrams (more is better), against 3,840 rows of the truth. A finite set is never",
        f"at 0: {found.samples} other rows of the truth give the first line.",
        "",
    )

    def values(line: Cell) -> list[str]:
        return [str(number(line, name)) for name in DISTANCES]

    last = max(n for m, r, n, p in measured if r == "loop:.02" and n)
    yield from markdown(
        ("model", "rule", "steps", "top-p", *DISTANCES.values()),
        [
            ("truth", "", "", "", *values(own)),
            *(
                (NAMES[m], f"`{r}`", f"{n:,}", str(p), *values(measured[m, r, n, p]))
                for p in (1, 0.9)
                for m in STUDENTS
                for n in (64, 256, last)
                for r in RULES
                if (m, r, n, p) in measured
            ),
        ],
    )
    yield ""


def _reading(found: Found) -> Iterable[str]:
    yield from (
        "**What the data can and cannot tell.** The judge is exact, so no gain is an artefact",
        "of a judge. Most of what a rule gains at equal top-p goes with a lower entropy:",
        "entropy, not scale or judge, is why verdicts differ between equal top-p and equal",
        "entropy. The 3-grams say the same: rules bring the divergence down to that of the",
        "truth's own rows and below, which narrower text does too. Not told apart: scale (7M",
        "parameters, 256 tokens; both students stay far from the truth, so there is much to",
        "correct), and how much of the gap between the priors is training, since both had",
        "equal steps and no tuning. Measured once, with one training each: 20 GPU minutes.",
        "",
    )


def draw() -> None:
    """The two figures, beside the lines."""
    found = Found()
    with matplotlib().rc_context(look(LIGHT)):
        _against_steps(found)
        _against_entropy(found)


def _style(model: str, rule: str) -> dict[str, Any]:
    """A colour a rule, ancestral grey; uniform noise filled, masks open and dashed."""
    i = RULES.index(rule) - 1
    colour = LIGHT.soft if i < 0 else LIGHT.samplers[i]
    if model == "duo++":
        return {"color": colour, "marker": "o", "ls": "-", "ms": 4.5}
    return {"color": colour, "marker": "s", "ls": "--", "ms": 4.5, "mfc": LIGHT.paper}


def _panels(count: int, y: str) -> tuple[Any, Sequence[Any]]:
    mpl = matplotlib()
    figure = mpl.figure.Figure(figsize=(8.6, 4.2), dpi=180, layout="constrained")
    mpl.backends.backend_agg.FigureCanvasAgg(figure)
    panels = figure.subplots(1, count, sharey=True)
    panels[0].set_ylabel(y)
    return figure, panels


def _legend(figure: Any, panel: Any) -> None:
    handles, labels = panel.get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=5, fontsize=8, frameon=False
    )


def _against_steps(found: Found) -> None:
    figure, panels = _panels(2, "excess -log p, nats a token")
    for panel, top_p in zip(panels, (1, 0.9), strict=True):
        for rule in RULES:
            for model in STUDENTS:
                steps = [n for n in found.steps if (model, rule, n, top_p) in found.cells]
                got = [found.excess(model, rule, n, top_p) for n in steps]
                panel.errorbar(
                    steps,
                    [x.value for x in got],
                    [x.error for x in got],
                    label=f"{NAMES[model]} {rule}",
                    lw=1.3,
                    elinewidth=0.8,
                    **_style(model, rule),
                )
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_formatter(matplotlib().ticker.StrMethodFormatter("{x:,.0f}"))
        panel.set_xlabel("sampling steps")
        panel.set_title(f"top-p {top_p}", fontsize=10)
    _legend(figure, panels[0])
    figure.savefig(PICTURES / "known_truth_steps.png", metadata={"Software": None})


def _against_entropy(found: Found) -> None:
    figure, panels = _panels(3, "excess -log p, nats a token")
    for panel, steps in zip(panels, (64, 256, 1024), strict=True):
        for rule in RULES:
            for model in STUDENTS:
                cells = [(model, rule, steps, p) for p in (1, 0.9)]
                panel.plot(
                    [found.cells[c]["sample_entropy"] for c in cells],
                    [found.excess(*c).value for c in cells],
                    label=f"{NAMES[model]} {rule}",
                    lw=1.3,
                    **_style(model, rule),
                )
        star = {"marker": "*", "ms": 12, "color": LIGHT.ink, "ls": ""}
        panel.plot(found.truth["sample_entropy"], 0, **star)
        panel.annotate(
            "the truth", (found.truth["sample_entropy"], 0.05), ha="center", fontsize=8
        )
        panel.set_xlabel("entropy within a sample, nats")
        panel.set_title(f"{steps:,} steps", fontsize=10)
    _legend(figure, panels[0])
    figure.savefig(PICTURES / "known_truth_frontier.png", metadata={"Software": None})
