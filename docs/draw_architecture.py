"""Draw docs/pictures/architecture.png from the imports of src/psidiff.

    python docs/draw_architecture.py

A box is a package; the modules at the root are two boxes: those that import no package (base),
and those that do (model). A box stands above all that it imports. An arrow is an import that no
longer way explains.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1] / "src" / "psidiff"
PICTURE = Path(__file__).parent / "pictures" / "architecture.png"
DATA_ONLY = ("recipes", "pretrained")  # folders of files, without code
SAID = {
    "base": "shapes, files, limits, locks",
    "kernels": "random numbers, draws, Triton",
    "process": "priors, schedules, posteriors",
    "duality": "the curriculum's transform",
    "models": "transformer, U-Net",
    "sampling": "the Sampler, the step, states",
    "data": "text, images, puzzles, codecs",
    "training": "objectives, trainer",
    "evaluation": "likelihoods, metrics, verify",
    "model": "load, save, sample, wrap",
    "html": "the replay's page",
    "integrations": "diffusers, transformers",
    "experiment": "recipes, runs, comparisons",
    "serve": "the server",
    "cli": "verbs and the terminal",
}


def imports_of(path: Path) -> set[str]:
    """The parts of psidiff that a file imports: names at the root of the package."""
    inside = ("psidiff", *path.relative_to(ROOT).with_suffix("").parts)
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            base = inside[: len(inside) - node.level] if node.level else ()
            whole = (*base, *(node.module.split(".") if node.module else ()))
            names = [(*whole, each.name) for each in node.names]
        elif isinstance(node, ast.Import):
            names = [tuple(each.name.split(".")) for each in node.names]
        else:
            continue
        found |= {name[1] for name in names if name[0] == "psidiff" and len(name) > 1}
    return found


@cache
def boxes() -> dict[str, tuple[Path, ...]]:
    """The files of each box."""
    packages = {p.name for p in ROOT.iterdir() if p.is_dir() and p.name not in DATA_ONLY}
    packages = {name for name in packages if (ROOT / name / "__init__.py").is_file()}
    found = {name: tuple((ROOT / name).rglob("*.py")) for name in packages}
    modules = [path for path in ROOT.glob("*.py") if not path.name.startswith("__")]
    above = {path for path in modules if imports_of(path) & packages}
    while more := {m for m in modules if imports_of(m) & {a.stem for a in above}} - above:
        above |= more
    found["model"] = tuple(above)
    found["base"] = tuple(path for path in modules if path not in above)
    return found


def box_of(part: str) -> str | None:
    for name in ("base", "model"):
        if part in {path.stem for path in boxes()[name]}:
            return name
    return part if part in boxes() else None


def imported_boxes() -> dict[str, set[str]]:
    """Which boxes each box imports."""
    found = {}
    for name, paths in boxes().items():
        parts = {part for path in paths for part in imports_of(path)}
        found[name] = {box for part in parts if (box := box_of(part))} - {name}
    return found


def heights(below: dict[str, set[str]]) -> dict[str, int]:
    """One more than the highest of what a box imports."""

    @cache
    def height(name: str) -> int:
        return 1 + max((height(each) for each in below[name]), default=-1)

    return {name: height(name) for name in below}


def direct(below: dict[str, set[str]]) -> set[tuple[str, str]]:
    """The imports that no longer way explains."""

    @cache
    def all_below(name: str) -> frozenset[str]:
        return frozenset(below[name]).union(*(all_below(each) for each in below[name]))

    return {
        (name, each)
        for name in below
        for each in below[name]
        if not any(each in all_below(other) for other in below[name])
    }


def lines_of(name: str) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in boxes()[name])


def draw() -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    below = imported_boxes()
    level = heights(below)
    rows: dict[int, list[str]] = {}
    for name in sorted(level, key=lambda n: (level[n], n)):
        rows.setdefault(level[name], []).append(name)
    place = {
        name: (3.4 * (i - (len(row) - 1) / 2), 1.35 * y)
        for y, row in rows.items()
        for i, name in enumerate(row)
    }
    figure, ax = plt.subplots(figsize=(10, 0.95 * len(rows) + 1), dpi=130)
    for name, each in direct(below):
        (x0, y0), (x1, y1) = place[name], place[each]
        start, bend = (x0, y0 - 0.42), 0.0
        if level[name] - level[each] > 1:  # around the boxes between them
            side = 1 if x1 >= x0 else -1
            start, bend = (x0 + 1.5 * side, y0), -0.3 * side
        arrow = {"arrowstyle": "-|>", "color": "#8a93a3", "lw": 1.1, "shrinkA": 0, "shrinkB": 0}
        arrow["connectionstyle"] = f"arc3,rad={bend}"
        ax.annotate("", (x1, y1 + 0.42), start, arrowprops=arrow)
    for name, (x, y) in place.items():
        shape = plt.Rectangle((x - 1.5, y - 0.42), 3, 0.84, fc="#eef3fb", ec="#3b6fb5", lw=1.2)
        ax.add_patch(shape).set_zorder(3)
        ax.text(x, y + 0.13, name, ha="center", va="center", weight="bold", zorder=4)
        said = f"{SAID[name]}\n{lines_of(name):,} lines"
        ax.text(x, y - 0.19, said, ha="center", va="center", size=6.5, zorder=4)
    ax.set_axis_off()
    ax.autoscale_view()
    ax.set_aspect("equal")
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, bbox_inches="tight", facecolor="white")


if __name__ == "__main__":
    draw()
