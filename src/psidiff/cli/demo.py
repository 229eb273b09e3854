"""`psidiff demo`: a toy text denoised in the terminal, ancestral beside Psi, scored exactly."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from rich.columns import Columns
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ..data.toy import Chain, perturbed
from ..process import LogLinear, Uniform
from ..sampling import Trace, parse_kappa, plan, sample

SHOWN, SCORED = 4, 256
ERROR = 4.0  # how wrong the denoiser is, in nats on its logits
_STYLE = {0: "white", 1: "bold green", 2: "bold red"}


@dataclass(frozen=True)
class Score:
    """Against the truth: pairs that the language does not have, and the distance of pairs."""

    sampler: str
    steps: int
    illegal: float
    divergence: float
    excess: float
    nfe: float
    head_rows: float


def run(console: Console, out: Path, num_steps: int, kappa: str, seed: int) -> None:
    """Show two runs, score a few hundred more, leave a page."""
    rule = parse_kappa(kappa)
    if rule == parse_kappa("ancestral"):
        raise ValueError("the demo sets a rule beside ancestral sampling: name another --kappa")
    out.mkdir(parents=True, exist_ok=True)
    chain = Chain.syllables()
    prior = Uniform(chain.num_tokens)
    denoiser = perturbed(chain.denoiser(prior), ERROR, seed=0)
    rules = {"ancestral": parse_kappa("ancestral"), kappa: rule}
    console.print(
        "A language of nonsense syllables: consonant, vowel, at times a closing n, r, s, t. "
        f"All {chain.length} letters start as noise. One denoiser, wrong the way networks "
        f"are wrong, takes {num_steps} steps twice: once by ancestral sampling, once by the "
        f"Psi-sampler [bold]{kappa}[/], which keeps re-noising and asking again.\n"
        "[bold green]green[/] just predicted   [bold red]red[/] just re-noised\n"
    )
    traces = {}
    for name, rule in rules.items():
        trace, generator = Trace(), torch.Generator().manual_seed(seed)
        steps = plan(num_steps, LogLinear(), rule)
        sample(denoiser, prior, steps, (SHOWN, chain.length), generator, on_step=trace)
        traces[name] = trace
    _play(console, chain, traces)

    scores = []
    for count in sorted({32, num_steps, 2 * num_steps}):
        for name, rule in rules.items():
            with console.status(f"{SCORED} samples, {count} steps, {name}"):
                scores.append(_score(chain, prior, denoiser, name, rule, count, seed))
    console.print(_table(scores))
    console.print(_verdict(chain, scores, kappa))
    page = write_page(out, chain, traces, scores)
    console.print(f"See it step by step: [bold]{page}[/]")


def _play(console: Console, chain: Chain, traces: dict[str, Trace]) -> None:
    """An animation in a terminal; a few frames elsewhere."""
    last = len(next(iter(traces.values())).steps) - 1
    frames = range(last + 1) if console.is_terminal else [last // 4, last // 2, last]
    with Live(console=console, auto_refresh=False) as live:
        for i in frames:
            panels = [
                Panel(_frame(chain, trace, i), title=name, width=chain.length + 4)
                for name, trace in traces.items()
            ]
            view = Columns(panels)
            if console.is_terminal:
                live.update(view, refresh=True)
                time.sleep(min(8 / (last + 1), 0.1))
            else:
                console.print(f"after step {i + 1}", view)


def _frame(chain: Chain, trace: Trace, i: int) -> Text:
    text = Text()
    finished = i == len(trace.steps) - 1
    for row, route in zip(trace.tokens[i], trace.routes[i], strict=True):
        wrong = chain.illegal(row[None].long())[0].tolist()
        for place, (token, r) in enumerate(zip(row.tolist(), route.tolist(), strict=True)):
            flagged = finished and place > 0 and wrong[place - 1]
            style = "bold white on red" if flagged else _STYLE[0 if finished else r]
            text.append(chain.alphabet[token], style)
        text.append("\n")
    text.rstrip()
    return text


def _score(
    chain: Chain, prior: Uniform, denoiser: Any, name: str, rule: Any, count: int, seed: int
) -> Score:
    generator = torch.Generator().manual_seed(seed + 1)
    shape = (SCORED, chain.length)
    made = sample(denoiser, prior, plan(count, LogLinear(), rule), shape, generator)
    excess = -chain.log_prob(made.tokens).mean().item() - chain.entropy()
    return Score(
        name,
        count,
        chain.illegal(made.tokens).double().mean().item(),
        chain.pair_divergence(made.tokens),
        excess / chain.length,
        made.nfe,
        made.head_rows / made.tokens.numel(),
    )


def _table(scores: list[Score]) -> Table:
    table = Table(title=f"{SCORED} samples each, judged by the language itself")
    columns = (
        "steps",
        "sampler",
        "illegal pairs",
        "KL of pairs",
        "excess nats",
        "passes",
        "rows",
    )
    for column in columns:
        table.add_column(column, justify="left" if column == "sampler" else "right")
    table.caption = "passes: forward passes a sample; rows: rows of the head a letter"
    for s in scores:
        table.add_row(
            str(s.steps),
            s.sampler,
            f"{s.illegal:.2%}",
            f"{s.divergence:.4f}",
            f"{s.excess:+.4f}",
            f"{s.nfe:.1f}",
            f"{s.head_rows:.1f}",
        )
    return table


def _verdict(chain: Chain, scores: list[Score], kappa: str) -> str:
    ancestral, psi = scores[-2:]
    return (
        f"At {psi.steps} steps ancestral sampling leaves {ancestral.illegal:.2%} illegal "
        f"pairs, {kappa} {psi.illegal:.2%}; the language itself has {_slips(chain):.2%}."
    )


def _slips(chain: Chain) -> float:
    """How often the language breaks its own rules."""
    return chain.pairs()[~chain.legal].sum().item() if chain.legal is not None else 0.0


def write_page(out: Path, chain: Chain, traces: dict[str, Trace], scores: list[Score]) -> Path:
    """One self-contained page: the runs with a slider, and the scores."""
    runs = {
        name: {
            "tokens": torch.stack(trace.tokens, 1).tolist(),
            "routes": torch.stack(trace.routes, 1).tolist(),
            "alpha": [step.alpha_s for step in trace.steps],
        }
        for name, trace in traces.items()
    }
    data = {
        "alphabet": chain.alphabet,
        "legal": [] if chain.legal is None else chain.legal.int().tolist(),
        "runs": runs,
        "scores": [vars(s) for s in scores],
        "truth": _slips(chain),
    }
    template = files("psidiff.cli").joinpath("demo.html").read_text(encoding="utf-8")
    page = out / "index.html"
    page.write_text(template.replace("__DATA__", json.dumps(data)), encoding="utf-8")
    return page
