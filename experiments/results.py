"""Write docs/results.md from the measured lines in docs/results.

    python experiments/results.py

No number of that page is typed by hand: this script reads every one from the lines.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import known_truth_page
from cells import ROOT, lines, markdown
from generality import PRIORS, RULES, STEPS

PAGE = ROOT / "docs" / "results.md"
OPEN = {
    4: ("on CIFAR-10, Duo++ with Ψ is ahead of MDLM with ancestral sampling and ReMDM", 115),
    5: ("the sparse curriculum costs less memory and time at equal likelihood", 130),
}


def page() -> str:
    """The whole page as Markdown."""
    same = lines("generality_remdm")
    return "\n".join(
        [
            "# The paper's claims, measured",
            "",
            "Each claim of *The Diffusion Duality, Chapter II* at a small scale, with errors.",
            "This page is written by `make results` from the lines in `docs/results/`;",
            "`experiments/QUEUE.md` says what is measured next and what it costs.",
            "",
            *markdown(
                ("takeaway", "verdict", "the number behind it", "command"),
                [
                    _first(same),
                    *known_truth_page.validity_flags(),
                    *(_unmeasured(*item) for item in OPEN.items()),
                ],
            ),
            "",
            *_generality(same),
            *known_truth_page.section(),
        ]
    )


def _first(same: list[dict[str, Any]]) -> tuple[str, ...]:
    largest = max(line["largest_difference"] for line in same)
    return (
        "1. Ψ contains earlier predictor-correctors and works for any prior",
        "yes, where ReMDM's σ is at most 1 - α_s; beyond that Ψ is another sampler",
        f"output laws differ by at most {largest:.0e} over {len(same)} settings",
        "`python experiments/generality.py`",
    )


def _unmeasured(number: int, item: tuple[str, int]) -> tuple[str, ...]:
    claim, minutes = item
    return (f"{number}. {claim}", "open", "not measured yet", f"about {minutes} GPU minutes")


def _generality(same: list[dict[str, Any]]) -> Iterable[str]:
    beyond = [line for line in same if line["steps_beyond"]]
    worse = max(line["tv_psi_to_data"] - line["tv_remdm_to_data"] for line in beyond)
    better = max(line["tv_remdm_to_data"] - line["tv_psi_to_data"] for line in beyond)
    yield from (
        "## 1. Generality",
        "",
        "**Protocol.** A toy whose distribution is known, the perfect denoiser, log-linear",
        "schedule. The law of a sampler's output is a vector over all sequences, moved by one",
        "step at a time in float64, so there is no sampling error. ReMDM's posterior is",
        "written as in its paper and shares no code with Ψ. Cost: seconds on a CPU.",
        "",
        "**The masked prior.** With κ = 1 - σ/(1 - α_s), Ψ and ReMDM give the same law of",
        "outputs (column 3: largest difference of a probability) as long as σ is at most 1 -",
        "α_s. ReMDM allows σ up to (1 - α_s)/α_t; there κ would be negative, Ψ clips it, and",
        "the two differ (column 4: in how many steps; column 5: total variation between the",
        "two laws). On this toy clipping does no harm: where they differ, the clipped",
        f"sampler is at most {worse:.0e} further from the data, and up to {better:.3f}",
        "closer.",
        "",
    )
    yield from markdown(
        (
            "rule",
            "steps",
            "largest difference, σ clipped",
            "steps with σ > 1 - α_s",
            "TV to unclipped ReMDM",
            "TV to data: Ψ",
            "ReMDM",
        ),
        [
            (
                f"`{line['rule']}`",
                str(line["steps"]),
                f"{line['largest_difference']:.0e}",
                str(line["steps_beyond"]),
                f"{line['tv_unclipped']:.1e}",
                f"{line['tv_psi_to_data']:.5f}",
                f"{line['tv_remdm_to_data']:.5f}",
            )
            for line in same
            if line["steps"] in (STEPS[0], STEPS[2], STEPS[-1])
        ],
    )
    yield from (
        "",
        "**Every prior.** The same rules on four priors: total variation between output and",
        "data. Each falls with the number of steps. `cap` falls slowest: its σ does not",
        "shrink with the step, so several tokens are redrawn at once however many steps there",
        "are. With the perfect denoiser of a toy no corrector is ahead of ancestral sampling",
        "at 128 steps; correctors repair the errors of a learned denoiser, and this toy has",
        "none.",
        "",
    )
    found = {(x["prior"], x["rule"], x["steps"]): x for x in lines("generality_priors")}
    yield from markdown(
        ("prior", "rule", *(f"{n} steps" for n in STEPS)),
        [
            (p, f"`{r}`", *(f"{found[p, r, n]['tv_to_data']:.4f}" for n in STEPS))
            for p in PRIORS
            for r in RULES
        ],
    )


if __name__ == "__main__":
    known_truth_page.draw()
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
