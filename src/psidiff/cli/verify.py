"""`psidiff verify`: the findings as tables a person can read."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table

from ..evaluation.law import StepFunction
from ..evaluation.verify import RULES, STEPS, Finding, verify

_LEGEND = """\
marg.   largest error of a step's output against the forward process, x given
TV n    total variation between what n steps make and the data, denoiser perfect
right   mean chance that one of 32 steps changes a token that is right
wrong   the same for a token that was made wrong on purpose
Rules that look at values (confidence) do not keep the marginals: sampled."""


def show(console: Console, rules: Sequence[str] | None, step: StepFunction | None) -> bool:
    """Print a table for each prior; say whether every promise was kept."""
    findings = verify(step, tuple(rules) if rules else RULES)
    table, prior, broken, checked = Table(), "", [], 0
    with Live(console=console, auto_refresh=False) as live:
        for finding in findings:
            if finding.prior != prior:
                if prior:
                    live.update(table, refresh=True)
                    live.console.print(table)
                table, prior = _table(finding.prior), finding.prior
            table.add_row(*_row(finding))
            checked += 1
            if finding.holds is False:
                broken.append(finding)
            live.update(table, refresh=console.is_terminal)
        live.update(table, refresh=True)
    console.print(_LEGEND, style="dim")
    if broken:
        first = broken[0]
        console.print(
            f"[bold red]{len(broken)} of {checked} do not keep the marginals[/], first "
            f"{first.prior} {first.predictor} {first.rule}: off by {first.marginal_error:.2g}"
        )
    else:
        console.print(f"[bold green]All {checked} samplers do what they promise.[/]")
    return not broken


def _table(prior: str) -> Table:
    table = Table(
        title=f"{prior} prior",
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("predictor", no_wrap=True)
    table.add_column("kappa rule", no_wrap=True)
    for name in ("marg.", *(f"TV {n}" for n in STEPS), "right", "wrong"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    return table


def _row(finding: Finding) -> list[str]:
    verdict = {True: "[green]ok[/]", False: "[bold red]WRONG[/]", None: "[dim]sampled[/]"}
    error, rates = (
        finding.marginal_error,
        (finding.revised_if_correct, finding.revised_if_wrong),
    )
    return [
        finding.predictor,
        finding.rule,
        "" if error is None else f"{error:.0e}",
        *(f"{d:.4f}" for d in finding.distances),
        *("" if r is None else f"{r:.3f}" for r in rates),
        verdict[finding.holds],
    ]
