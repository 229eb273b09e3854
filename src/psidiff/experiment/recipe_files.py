"""Reading recipes, strictly: YAML on its base, then key=value, become a `Recipe`, or a
sentence says why not."""

from __future__ import annotations

import difflib
import json
import re
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, fields, is_dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

from ..checksums import in_short, one_line, reading
from ..files import FORMAT_VERSION, known_version, read_checked_text
from ..limits import check_limit, parse_yaml
from ..registry import fits
from .recipe import Own, Recipe

_SURROGATE = re.compile("[\ud800-\udfff]")
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a word"}


def read_recipe(name_or_path: str, overrides: Sequence[str] = ()) -> Recipe:
    """A shipped recipe by name, or a YAML file; then key=value overrides."""
    before = _values(name_or_path)
    values = _override(before, overrides)
    return _read(Recipe, _for_masks(before, _override({}, overrides), values))


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
    plain = json.loads(json.dumps(asdict(recipe)))  # YAML knows no tuples
    values = {"format_version": FORMAT_VERSION, **plain}
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
            f"{name_or_path!r} is no recipe{_nearest(name_or_path, shipped())}; a recipe is a "
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
    if base is None:  # what need not be said, where there are several kinds of it
        sections: Any = [(field.name, field.default) for field in fields(Recipe)]
        below = {name: asdict(value) for name, value in sections if hasattr(value, "kind")}
    else:
        if not isinstance(base, str):
            raise ValueError(f"{name_or_path}: base must be a recipe, got {in_short(base)}")
        check_limit("depth", len(above), name_or_path, "builds on so many recipes")
        below = _values(_base_path(base, path), (*above, path.resolve()))
    return _for_masks(below, rest, _merge(below, rest))


def _is_yaml(path: Path) -> bool:
    return path.suffix in (".yaml", ".yml")


def _base_path(base: str, path: Path) -> str:
    """A base that is a file lies beside the recipe at `path`, or else where it says."""
    beside = path.parent / base
    return str(beside) if _is_yaml(beside) and beside.is_file() else base


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


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` on top of `base`, key by key; a section of another kind replaces the old one.

    `prior: uniform` is short for {kind: uniform}, also where a key goes into it.
    """
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        old = {"kind": old} if isinstance(old, str) else old
        if isinstance(value, Mapping) and isinstance(old, Mapping):
            same = value.get("kind", old.get("kind")) == old.get("kind")
            merged[key] = _merge(old, value) if same else value
        else:
            merged[key] = value
    return merged


def _override(values: Mapping[str, Any], assignments: Sequence[str]) -> dict[str, Any]:
    """`train.steps=1000` set in nested values; what stands after = is YAML."""
    result = dict(values)
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not key:
            raise ValueError(f"an override is key=value, such as train.steps=1000, got {key!r}")
        try:
            value = parse_yaml(text, key)
        except yaml.YAMLError as error:
            raise ValueError(f"{key}={text[:100]} is not YAML after the =") from error
        for part in reversed(key.split(".")):
            value = {part: value}
        result = _merge(result, value)
    return result


def _read(kind: Any, value: Any, path: str = "") -> Any:
    """`value` as the type `kind`: a dataclass, a choice of them by `kind:`, or plain data."""
    if is_dataclass(kind):
        return _section(kind, value, path)
    if get_origin(kind) in (Union, types.UnionType):
        return _choice(get_args(kind), value, path)
    if get_origin(kind) is Literal:
        if not isinstance(value, (str, int)) or value not in get_args(kind):
            _refuse(path, f"one of {', '.join(map(str, get_args(kind)))}", value)
        return value
    if get_origin(kind) is tuple:
        return _tuple(get_args(kind), value, path)
    return _plain(kind, value, path)


def _section(kind: Any, value: Any, path: str) -> Any:
    if not isinstance(value, Mapping):
        _refuse(path, f"a section with {', '.join(f.name for f in fields(kind))}", value)
    hints = get_type_hints(kind)
    known = {field.name: field.default for field in fields(kind)}
    for key in value:
        if key not in known:
            shown = str(key) if str(key).isidentifier() else in_short(key)
            near = _nearest_key(str(key)[:100], kind, path)
            raise ValueError(f"{_at(path, shown)} is not a key{near}")
    made = {key: _read(hints[key], item, _at(path, key)) for key, item in value.items()}
    for name, default in known.items():
        if default is MISSING and name not in made:
            raise ValueError(f"{_at(path, name)} is missing")
    try:
        return kind(**made)
    except ValueError as error:
        raise ValueError(_at(path, str(error))) from error


def _choice(kinds: tuple[Any, ...], value: Any, path: str) -> Any:
    if value is None and type(None) in kinds:
        return None
    sections = {k.kind: k for k in kinds if is_dataclass(k) and hasattr(k, "kind")}
    if sections:
        name = value.get("kind") if isinstance(value, Mapping) else value
        if Own in kinds and isinstance(name, str) and ".py:" in name:
            sections[name] = Own
        if not isinstance(name, str) or name not in sections:
            _refuse(f"{path}.kind", f"one of {', '.join(sections)}", name)
        return _read(sections[name], {"kind": name} if isinstance(value, str) else value, path)
    (kind,) = (k for k in kinds if k is not type(None))
    return _read(kind, value, path)


def _tuple(kinds: tuple[Any, ...], value: Any, path: str) -> tuple:
    if not isinstance(value, (list, tuple)):
        _refuse(path, "a list", value)
    if kinds[-1] is Ellipsis:
        kinds = (kinds[0],) * len(value)
    if len(kinds) != len(value):
        _refuse(path, f"a list of {len(kinds)}", value)
    pairs = enumerate(zip(kinds, value, strict=True))
    return tuple(_read(k, v, f"{path}[{i}]") for i, (k, v) in pairs)


def _plain(kind: Any, value: Any, path: str) -> Any:
    if kind is float and isinstance(value, str):  # YAML reads 3e-4 as a word
        try:
            value = float(value)
        except ValueError:
            _refuse(path, _WORDS[kind], value)
    if isinstance(value, int) and abs(value) >= 2**63:
        _refuse(path, "a number that a machine has", value)
    if kind is str and isinstance(value, str) and _SURROGATE.search(value):
        _refuse(path, "text of Unicode", value)
    if not fits(value, kind):
        _refuse(path, _WORDS[kind], value)
    return float(value) if kind is float else value


def _refuse(path: str, wanted: str, value: Any) -> None:
    raise ValueError(f"{path} must be {wanted}, got {in_short(value)}")


def _at(path: str, rest: Any) -> str:
    return f"{path}.{rest}" if path else str(rest)


def _nearest(word: str, known: Iterable[str], path: str = "") -> str:
    """What looks most like this word, as the end of a sentence."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; the nearest is {_at(path, close[0])}" if close else ""


def _nearest_key(key: str, kind: Any, path: str) -> str:
    """The right key that looks most like this one."""
    own = [field.name for field in fields(kind)]
    if close := _nearest(key, own, path):
        return close
    below = [k for k in _keys(kind) if k.rsplit(".", 1)[-1] == key]
    if below:
        return f"; the nearest is {_at(path, below[0])}"
    return f"; {path or 'a recipe'} has {', '.join(own)}"


def _keys(kind: Any, path: str = "") -> Iterator[str]:
    """Every dotted key below a dataclass."""
    for name, hint in get_type_hints(kind).items():
        yield _at(path, name)
        for part in (hint, *get_args(hint)):
            if is_dataclass(part):
                yield from _keys(part, _at(path, name))
