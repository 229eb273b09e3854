"""`psidiff verify`: the findings as tables a person can read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ..evaluation.exact_distribution import StepFunction
from ..evaluation.verify import (
    PRIORS,
    RULES,
    STEPS,
    CheckResult,
    converges,
    verify,
    verify_given,
)
from ..registry import describe_error, load_object

_LEGEND = """\
marg.   largest error of a step's output against the forward process, x given
TV n    total variation between what n steps make and the data, denoiser perfect
right   mean chance that one of 32 steps changes a token that is right
wrong   the same for a token that was made wrong on purpose
flat    the marginals are right, but more steps do not come closer to the data
Rules that look at values (confidence) do not keep the marginals: TV from draws."""


def load_step(text: str) -> StepFunction:
    """FILE.py:FUNCTION -> a step function, whose own errors come as one sentence."""
    function, path = load_object(text), text.rpartition(":")[0]
    if not callable(function):
        raise ValueError(f"{text} is no function")

    def guarded(*arguments: Any) -> Any:
        try:
            return function(*arguments)
        except Exception as error:
            words = describe_error(error, str(Path(path).resolve()))
            raise ValueError(f"{text} failed: {words}") from error

    return guarded


def show(
    console: Console,
    rules: Sequence[str] | None,
    step: StepFunction | None,
    priors: Sequence[str] | None = None,
) -> bool:
    """Print a table for each prior; say whether every promise was kept."""
    findings: list[CheckResult] = []
    named = tuple(priors or PRIORS)
    stream = verify(step, tuple(rules) if rules else RULES, priors=named)
    for prior, group in groupby(stream, key=lambda finding: finding.prior):
        table = _table(f"{prior} prior")
        with console.status(f"{prior} prior") as status:
            for finding in group:
                status.update(f"{prior} prior, {finding.predictor}, {finding.rule}: done")
                table.add_row(*_row(finding))
                findings.append(finding)
        console.print(table, "")
    if step is None:
        table = _table("With one given token: ancestral, distance to the exact conditional")
        for prior, distances in verify_given(priors=named):
            verdict = "[green]ok[/]" if converges(distances) else "[yellow]flat[/]"
            table.add_row(verdict, prior, "", "", *map(_short, distances), "", "")
        console.print(table, "")
        if rules is None and not priors:
            findings += _schedulers(console)
    console.print(_LEGEND, style="dim", highlight=False)
    return _conclude(console, findings)


def _schedulers(console: Console) -> list[CheckResult]:
    """The same of schedulers in diffusers, ours beside theirs."""
    if find_spec("diffusers") is None:
        console.print("diffusers is not installed: its schedulers are not checked.\n")
        return []
    findings: list[CheckResult] = []
    table = _table("Schedulers in diffusers, by drawing; wrong: their correction rate")
    with console.status("schedulers in diffusers"):
        from ..integrations.verify_schedulers import scheduler_findings

        for finding in scheduler_findings():
            named = replace(finding, predictor=f"{finding.predictor}, {finding.prior.lower()}")
            table.add_row(*_row(named))
            findings.append(finding)
    console.print(table, "")
    return findings


def _conclude(console: Console, findings: Sequence[CheckResult]) -> bool:
    broken = [finding for finding in findings if finding.keeps_marginals is False]
    flat = [
        finding for finding in findings if finding.keeps_marginals and not finding.converges
    ]
    if flat:
        console.print(
            f"[yellow]{len(flat)} of {len(findings)} come no closer to the data with more "
            f"steps[/], first {flat[0].prior} {flat[0].predictor} {flat[0].rule}"
        )
    if broken:
        first = broken[0]
        console.print(
            f"[bold red]{len(broken)} of {len(findings)} do not keep the marginals[/], first "
            f"{first.prior} {first.predictor} {first.rule}: off by {first.marginal_error:.2g}"
        )
        return False
    exact = sum(finding.keeps_marginals is True for finding in findings)
    console.print(f"[bold green]All {exact} samplers that promise it keep the marginals.[/]")
    return True


def _table(title: str) -> Table:
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=None,
        padding=(0, 1, 0, 0),
        header_style="dim",
    )
    for name in ("", "sampler", "kappa rule"):
        table.add_column(name, no_wrap=True)
    for name in ("marg.", *(f"TV {n}" for n in STEPS), "right", "wrong"):
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _row(finding: CheckResult) -> list[str]:
    verdict = {True: "[green]ok[/]", False: "[bold red]WRONG[/]", None: "[dim]drawn[/]"}
    if finding.keeps_marginals and not finding.converges:
        verdict[True] = "[yellow]flat[/]"
    error = finding.marginal_error
    rates = (finding.revised_if_correct, finding.revised_if_wrong)
    return [
        verdict[finding.keeps_marginals],
        finding.predictor,
        finding.rule,
        "" if error is None else f"{error:.0e}",
        *map(_short, finding.distances),
        *("" if r is None else _short(r, 3) for r in rates),
    ]


def _short(number: float, digits: int = 4) -> str:
    return f"{number:.{digits}f}".lstrip("0") if abs(number) < 10 else f"{number:.0e}"
