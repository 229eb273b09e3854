"""Options that a file names, held against what takes them before it is called with them."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from inspect import Parameter, signature
from typing import Any, Union, get_args, get_origin, get_type_hints

from .checksums import in_short


def check_options(what: str, kind: Any, options: Mapping[str, Any]) -> None:
    """Raise ValueError unless a class takes these options, of these types.

    So what a file says can end in no TypeError, and one that comes is a bug of ours.
    """
    known = signature(kind).parameters
    hints = get_type_hints(kind if is_dataclass(kind) else kind.__init__)
    for name, value in options.items():
        if name not in known:
            raise ValueError(f"{what} has no option {in_short(name)}, but {', '.join(known)}")
        if not fits(value, hints.get(name, Any)):
            raise ValueError(f"{name} of {what} cannot be {in_short(value)}")
    for name, parameter in known.items():
        if parameter.default is Parameter.empty and name not in options:
            raise ValueError(f"{what} needs the option {name}")


def fits(value: Any, hint: Any) -> bool:
    """Whether a value of a file is of a type; true and false are no numbers."""
    origin, inside = get_origin(hint), get_args(hint)
    if hint is Any or value is None:
        return hint is Any or hint is type(None) or type(None) in inside
    if origin in (Union, types.UnionType):
        return any(fits(value, each) for each in inside)
    if origin in (Sequence, tuple, list):
        return isinstance(value, (list, tuple)) and all(fits(v, inside[0]) for v in value)
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, (int, float) if hint is float else hint)
