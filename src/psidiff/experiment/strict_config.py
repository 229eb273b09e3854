"""Strict reading: YAML and dotted overrides become dataclasses, or a sentence says why not."""

from __future__ import annotations

import difflib
import re
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

from ..checksums import in_short
from ..limits import parse_yaml

_SURROGATE = re.compile("[\ud800-\udfff]")
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a word"}


@dataclass(frozen=True)
class Own:
    """What a Python file of the user's defines, in words: FILE.py:NAME:field=value."""

    kind: str


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` on top of `base`, key by key; a section of another kind replaces the old one.

    `prior: uniform` is short for {kind: uniform}, also where a key goes into it.
    """
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        old = {"kind": old} if isinstance(old, str) else old
        if isinstance(value, Mapping) and isinstance(old, Mapping):
            same = value.get("kind", old.get("kind")) == old.get("kind")
            merged[key] = merge(old, value) if same else value
        else:
            merged[key] = value
    return merged


def override(values: Mapping[str, Any], assignments: Sequence[str]) -> dict[str, Any]:
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
        result = merge(result, value)
    return result


def read(kind: Any, value: Any, path: str = "") -> Any:
    """`value` as the type `kind`: a dataclass, a choice of them by `kind:`, or plain data."""
    if is_dataclass(kind):
        return _section(kind, value, path)
    if get_origin(kind) in (Union, types.UnionType):
        return _choice(get_args(kind), value, path)
    if get_origin(kind) is Literal:
        if not isinstance(value, (str, int)) or value not in get_args(kind):
            _wrong(path, f"one of {', '.join(map(str, get_args(kind)))}", value)
        return value
    if get_origin(kind) is tuple:
        return _tuple(get_args(kind), value, path)
    return _plain(kind, value, path)


def _section(kind: Any, value: Any, path: str) -> Any:
    if not isinstance(value, Mapping):
        _wrong(path, f"a section with {', '.join(f.name for f in fields(kind))}", value)
    hints = get_type_hints(kind)
    known = {f.name: f for f in fields(kind) if f.init}
    for key in value:
        if key not in known:
            shown = str(key) if str(key).isidentifier() else in_short(key)
            near = _nearest(str(key)[:100], kind, path)
            raise ValueError(f"{_at(path, shown)} is not a key{near}")
    made = {key: read(hints[key], item, _at(path, key)) for key, item in value.items()}
    for name, field in known.items():
        missing = field.default is MISSING and field.default_factory is MISSING
        if missing and name not in made:
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
            _wrong(f"{path}.kind", f"one of {', '.join(sections)}", name)
        return read(sections[name], {"kind": name} if isinstance(value, str) else value, path)
    (kind,) = (k for k in kinds if k is not type(None))
    return read(kind, value, path)


def _tuple(kinds: tuple[Any, ...], value: Any, path: str) -> tuple:
    if not isinstance(value, (list, tuple)):
        _wrong(path, "a list", value)
    if kinds[-1] is Ellipsis:
        kinds = (kinds[0],) * len(value)
    if len(kinds) != len(value):
        _wrong(path, f"a list of {len(kinds)}", value)
    pairs = enumerate(zip(kinds, value, strict=True))
    return tuple(read(k, v, f"{path}[{i}]") for i, (k, v) in pairs)


def _plain(kind: Any, value: Any, path: str) -> Any:
    if kind is float and isinstance(value, str):  # YAML reads 3e-4 as a word
        try:
            value = float(value)
        except ValueError:
            _wrong(path, _WORDS[kind], value)
    if isinstance(value, int) and abs(value) >= 2**63:
        _wrong(path, "a number that a machine has", value)
    if kind is str and isinstance(value, str) and _SURROGATE.search(value):
        _wrong(path, "text of Unicode", value)
    fits = isinstance(value, (int, float) if kind is float else kind)
    if not fits or (isinstance(value, bool) and kind is not bool):
        _wrong(path, _WORDS[kind], value)
    return float(value) if kind is float else value


def _wrong(path: str, wanted: str, value: Any) -> None:
    raise ValueError(f"{path} must be {wanted}, got {in_short(value)}")


def _at(path: str, rest: Any) -> str:
    return f"{path}.{rest}" if path else str(rest)


def nearest(word: str, known: Iterable[str], path: str = "") -> str:
    """What looks most like this word, as the end of a sentence."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; the nearest is {_at(path, close[0])}" if close else ""


def _nearest(key: str, kind: Any, path: str) -> str:
    """The right key that looks most like this one."""
    own = [f.name for f in fields(kind) if f.init]
    if close := nearest(key, own, path):
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
