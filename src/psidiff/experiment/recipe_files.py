"""Recipes as files: what ships, what builds on what, and what is said on the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from ..checksums import in_short, one_line, reading
from ..files import FORMAT_VERSION, known_version, read_checked_text
from ..limits import check_limit, parse_yaml
from .recipe import Recipe
from .strict_config import merge, nearest, override, read


def read_recipe(name_or_path: str, overrides: Sequence[str] = ()) -> Recipe:
    """A shipped recipe by name, or a YAML file; then key=value overrides."""
    before = _values(name_or_path)
    values = override(before, overrides)
    return read(Recipe, _for_masks(before, override({}, overrides), values))


def stored_recipe(folder: Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe of a run folder; what is wrong with the file is said of the file."""
    path = str(folder / "config.yaml")
    try:
        recipe = read_recipe(path)
    except ValueError as error:
        said = str(error)
        raise ValueError(said if path in said else f"{path} is damaged: {said}") from error
    return read_recipe(path, overrides) if overrides else recipe


def as_yaml(recipe: Recipe) -> str:
    """Every key with its value, as a file that `read_recipe` takes."""
    values = {"format_version": FORMAT_VERSION, **_lists(asdict(recipe))}
    return yaml.safe_dump(values, sort_keys=False)


def shipped() -> dict[str, str]:
    """The recipes in the package, and the first line of each."""
    found = sorted(files("psidiff.recipes").iterdir(), key=lambda f: f.name)
    texts = {f.name.removesuffix(".yaml"): f for f in found if f.name.endswith(".yaml")}
    return {
        name: text.read_text(encoding="utf-8").splitlines()[0].lstrip("# ")
        for name, text in texts.items()
    }


def _values(name_or_path: str, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The values of a recipe on those of its base; above: the recipes that build on it."""
    path = Path(name_or_path)
    inside = files("psidiff.recipes").joinpath(f"{name_or_path}.yaml")
    if _is_yaml(path):
        if not path.exists():
            raise ValueError(f"there is no recipe at {name_or_path}")
        if path.resolve() in above:
            raise ValueError(f"{name_or_path} builds on itself: its base leads back to it")
        text = read_checked_text(path)
    elif inside.is_file():
        text = inside.read_bytes()
    else:
        raise ValueError(
            f"{name_or_path!r} is no recipe{nearest(name_or_path, shipped())}; a recipe is a "
            f".yaml file, or one of {', '.join(shipped())}"
        )
    with reading(name_or_path):
        try:
            values = parse_yaml(text, name_or_path)
        except yaml.YAMLError as error:
            raise ValueError(f"{name_or_path} is not YAML: {_in_a_line(error)}") from error
    if not isinstance(values, Mapping):
        raise ValueError(f"{name_or_path} is not a recipe: it holds no keys")
    if not all(isinstance(key, str) for key in values):
        raise ValueError(f"{name_or_path} is not a recipe: it has a key that is no word")
    rest = {"name": path.stem} | known_version(name_or_path, dict(values))
    base = rest.pop("base", None)
    if base is None:
        below = _default_sections()
    else:
        if not isinstance(base, str):
            raise ValueError(f"{name_or_path}: base must be a recipe, got {in_short(base)}")
        check_limit("depth", len(above), name_or_path, "builds on so many recipes")
        below = _values(_found(base, path), (*above, path.resolve()))
    return _for_masks(below, rest, merge(below, rest))


def _is_yaml(path: Path) -> bool:
    return path.suffix in (".yaml", ".yml")


def _found(base: str, path: Path) -> str:
    """A base that is a file lies beside the recipe at `path`, or else where it says."""
    beside = path.parent / base
    return str(beside) if _is_yaml(beside) and beside.is_file() else base


def _default_sections() -> dict[str, Any]:
    """What a recipe need not say, where there are several kinds of it."""
    sections: dict[str, Any] = {field.name: field.default for field in fields(Recipe)}
    return {name: asdict(s) for name, s in sections.items() if hasattr(s, "kind")}


def _in_a_line(error: yaml.YAMLError) -> str:
    """Where a file stops being YAML, and why."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return one_line(" ".join(str(error).split()))
    problem = getattr(error, "problem", None) or getattr(error, "context", None)
    where = f"line {mark.line + 1}, column {mark.column + 1}"
    return f"{where}: {one_line(str(problem))}"


def _for_masks(
    before: Mapping[str, Any], over: Mapping[str, Any], both: dict[str, Any]
) -> dict[str, Any]:
    """`both` is `over` on `before`. Where that turns to masks without a rule of its own, the
    rule is ancestral: one that was chosen for other noise is bad advice."""
    asked, now = over.get("eval", {}), both.get("eval", {})
    plain = isinstance(asked, Mapping) and isinstance(now, Mapping)
    turns = _noise(both) == "masked" != _noise(before)
    if not plain or not turns or "kappa" in asked:
        return both
    return both | {"eval": {**now, "kappa": "ancestral"}}


def _noise(values: Mapping[str, Any]) -> Any:
    prior = values.get("prior")
    return prior.get("kind") if isinstance(prior, Mapping) else prior


def _lists(value: Any) -> Any:
    """YAML knows no tuples."""
    if isinstance(value, dict):
        return {k: _lists(v) for k, v in value.items()}
    return [_lists(v) for v in value] if isinstance(value, tuple) else value
