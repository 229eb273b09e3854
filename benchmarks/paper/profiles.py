"""Figure "possible evolution of t and the associated kappa_t": both, step by step.

    python benchmarks/paper/profiles.py [--out out/paper] [--steps 128]

Each panel is a sampler in words; what is drawn is the plan that `psidiff sample` walks.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from drawing import COLOURS, keep, panels

from psidiff.process import LogLinear
from psidiff.sampling import Sampler

RULES = (
    "ancestral",
    "cap:.005",
    "rescale-released:.05",
    "loop:.01",
    "constant:.95@.1-.5",
    "fb",
)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out/paper"))
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--rules", nargs="+", default=list(RULES))
    options = parser.parse_args(arguments)
    columns = min(3, len(options.rules))
    rows = -(-len(options.rules) // columns)
    titles = [*options.rules, *[""] * (rows * columns - len(options.rules))]
    figure, axes = panels(rows, columns, titles)
    numbers = []
    for rule, ax in zip(options.rules, axes, strict=False):
        steps = Sampler.parse(f"{rule} steps={options.steps}").plan(LogLinear())
        t = [step.t for step in steps]
        kappa = [float(step.kappa) for step in steps]
        ax.plot(t, color=COLOURS[0], label="t")
        ax.plot(kappa, color=COLOURS[1], label="κ")
        ax.set_xlabel("step")
        ax.set_ylim(-0.03, 1.05)
        numbers.append({"rule": rule, "steps": len(steps), "t": t, "kappa": kappa})
    for ax in axes[len(options.rules) :]:
        ax.set_axis_off()
    axes[0].legend(frameon=False)
    keep(figure, numbers, options.out, "profiles")


if __name__ == "__main__":
    main()
