"""Objects by name: in words, as plain data of files, and out of Python files of the user's.

`cap:.01`, `cap:eta=.01,clipped=no` and `rules.py:Pulse:every=4` are words;
{"name": "uniform", "vocab_size": 9} is plain data. A Python file is imported only when the user
names it (`import_file`, `--import`, or FILE.py:NAME on a command line). Names in saved models
and in requests reach what was imported so, and never cause an import.
"""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import re
import sys
import traceback
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from .checksums import in_short

T = TypeVar("T")
NUMBER = r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?"
_FILE = re.compile(r"([^\s=,:]+\.py):([A-Za-z_]\w*)")
_YES_NO = {"yes": True, "no": False}
_modules: dict[str, types.ModuleType] = {}  # by the names of their files


def import_file(path: str | Path) -> types.ModuleType:
    """Import a Python file, once, so that FILE.py:NAME means what it defines.

    Raises:
        ValueError: the file is missing, fails, or another one of the same name was imported.
    """
    path = Path(path)
    if path.suffix != ".py" or not path.is_file():
        raise ValueError(f"{path} is not a Python file that exists")
    full = str(path.resolve())
    if (module := _modules.get(path.name)) is not None:
        if module.__file__ != full:
            raise ValueError(f"{path} and {module.__file__} have one name: rename one of them")
        return module
    spec = importlib.util.spec_from_file_location(f"psidiff_file_{path.stem}", full)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses and type hints look
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[spec.name]
        raise ValueError(f"{path} cannot be imported: {describe_error(error, full)}") from error
    _modules[path.name] = module
    return module


def optional_module(name: str, needs: str) -> Any:
    """A module of a package that need not be installed; needs: the sentence where it is not."""
    try:
        return import_module(name)
    except ImportError as error:
        raise ValueError(needs) from error


def import_named(*texts: str | None) -> None:
    """Import each file that words of the user's name as FILE.py:NAME."""
    for text in texts:
        for match in _FILE.finditer(text or ""):
            import_file(match[1])


def imported_files() -> tuple[str, ...]:
    """The paths of the files that were imported, for processes that need them too."""
    return tuple(str(module.__file__) for module in _modules.values())


def load_object(text: str) -> Any:
    """FILE.py:NAME -> what the file defines under that name. The file is imported.

    Raises:
        ValueError: the words, the file or the name in it are wrong.
    """
    path, _, name = text.rpartition(":")
    if not path.endswith(".py"):
        raise ValueError(f"{text!r} is not FILE.py:NAME")
    return _defined(import_file(path), Path(path).name, name)


def describe_error(error: BaseException, path: str) -> str:
    """An error and the last line of a file that it passed through."""
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == path]
    where = f"line {lines[-1]}: " if lines else ""
    first = str(error).strip().splitlines()
    return f"{where}{type(error).__name__}: {first[0] if first else 'no message'}"


def _defined(module: types.ModuleType, file: str, name: str) -> Any:
    """What a module defines itself; what it imported is out of reach."""
    value = vars(module).get(name)
    owner = value if isinstance(value, (type, types.FunctionType)) else type(value)
    if value is None or owner.__module__ != module.__name__:
        raise ValueError(f"{file} defines no {in_short(name)}")
    return value


class Registry:
    """Classes and single values of one kind, by name.

    Words are `name:value,field=value`, with the fields of the dataclass; the first field may
    go without its name. `kind` completes "... is no KIND"; `base` is what a user's own must be
    an instance of: a class of ours, or Callable.
    """

    def __init__(self, kind: str, base: Any = None) -> None:
        self.kind = kind
        self.base = base
        self._named: dict[str, Any] = {}
        self._short: dict[str, Mapping[str, tuple[str, Any]]] = {}
        self._examples: list[str] = []

    def register(
        self, name: str, *examples: str, short: Mapping[str, tuple[str, Any]] | None = None
    ) -> Callable[[T], T]:
        """A decorator: a class or a single value can be named in words and files from here on.

        Args:
            name: its name.
            examples: words that an error shows; none shows the name.
            short: words that stand for a field and its value, such as margin for by=margin.
        """

        def add(value: T) -> T:
            self._named[name], self._short[name] = value, short or {}
            self._examples += examples or (name,)
            return value

        return add

    @property
    def names(self) -> tuple[str, ...]:
        """All names, in the order they came."""
        return tuple(self._named)

    def parse(self, text: str, **known: Any) -> Any:
        """The value that words mean; FILE.py:NAME of files that were imported, too.

        Args:
            text: the words.
            known: fields that the words may leave out; a class that has no such field does
                without it.

        Raises:
            ValueError: the words mean nothing, or the value refuses its parameters.
        """
        name, value, rest = self._find(text)
        if isinstance(value, type):
            return value(**self._arguments(text, name, value, rest, known))
        if rest:
            raise ValueError(f"{text!r}: {name} takes no parameters")
        return value

    def parameters(self, text: str) -> tuple[str, ...]:
        """The names of what the words' class is made from; none of a single value."""
        value = self._find(text)[1]
        return tuple(inspect.signature(value).parameters) if isinstance(value, type) else ()

    def arguments(self, text: str, **known: Any) -> tuple[str, dict[str, Any]]:
        """The name of the class that words mean, and what it is made from."""
        name, value, rest = self._find(text)
        arguments = self._arguments(text, name, value, rest, known)
        return name.rpartition("/")[2], arguments  # where a file lies is no part of its name

    def find_class(self, name: Any) -> Any:
        """The class of a name in a file, which never imports anything."""
        if isinstance(name, str) and (match := _FILE.fullmatch(name)):
            return self._own(match)
        if not isinstance(name, str) or name not in self._named:
            raise ValueError(f"{in_short(name)} is not one of {', '.join(self._named)}")
        return self._named[name]

    def _find(self, text: str) -> tuple[str, Any, str]:
        """The name in words, the class or the value that it is of, and the parameters."""
        text = str(text).strip()
        if match := _FILE.match(text):
            return match[0], self._own(match), text[match.end() :].removeprefix(":")
        name, colon, rest = text.partition(":")
        value = self._named.get(name)
        if value is None or bool(colon) != bool(rest) or (rest and not isinstance(value, type)):
            raise self._unknown(text)
        return name, value, rest

    def format(self, value: Any) -> str:
        """The shortest words for a value; its repr, if it has no name."""
        for name, each in self._named.items():
            if value is each or (not isinstance(each, type) and value == each):
                return name
        known = self._name(value)
        if known is None or not is_dataclass(value):
            return known or repr(value)
        short = {pair: word for word, pair in self._short.get(known, {}).items()}
        words = []
        for place, field in enumerate(fields(value)):
            held = getattr(value, field.name)
            if field.default is not MISSING and held == field.default:
                continue
            name = "" if place == 0 and not short else f"{field.name}="
            words.append(short.get((field.name, held), name + format_value(held)))
        return ":".join((known, ",".join(words))) if words else known

    def to_dict(self, value: Any) -> dict[str, Any]:
        """A value as plain data, for files."""
        name = self._name(value)
        if name is None or not is_dataclass(value):
            raise ValueError(
                f"{value!r} cannot be saved: a {self.kind} is saved by the name of its "
                "dataclass, registered or defined in a Python file"
            )
        assert not isinstance(value, type)
        return {"name": name, **asdict(value)}

    def from_dict(self, described: Any) -> Any:
        """The value that plain data describe; every mistake in them is a ValueError."""
        if not isinstance(described, dict):
            raise ValueError(
                f'{self.kind} must be a dict with a "name" ({", ".join(self._named)}) and '
                f"what it needs, got {in_short(described)}"
            )
        options = dict(described)
        name = options.pop("name", None)
        cls = self.find_class(name)
        if not is_dataclass(cls) or not isinstance(cls, type):
            raise ValueError(f"{in_short(name)} is no {self.kind}: it must be a dataclass")
        check_options(f"{self.kind} {name}", cls, options)
        return cls(**options)

    def _own(self, match: re.Match[str]) -> Any:
        """What an imported file defines."""
        file = Path(match[1]).name
        if file not in _modules:
            raise ValueError(
                f"{match[0]!r} is in a file that was not imported: psidiff imports {file} only "
                f"when you name it, by psidiff --import {file} ... or import_file({file!r})"
            )
        value = _defined(_modules[file], file, match[2])
        cls = value if isinstance(value, type) else type(value)
        if self.base is not None and not issubclass(cls, self.base):
            remedy = f"make it a {self.base.__name__}"
            why = "nothing can call it" if self.base is Callable else remedy
            raise ValueError(f"{match[0]!r} is no {self.kind}: {why}")
        return value

    def _name(self, value: Any) -> str | None:
        """The name of a value's class, or of a value that an imported file defines."""
        cls = type(value)
        for name, each in self._named.items():
            if each is cls:
                return name
        for file, module in _modules.items():
            for name, held in vars(module).items():
                if held is value and getattr(value, "__module__", None) == module.__name__:
                    return f"{file}:{name}"
        if cls.__module__ == "builtins" or "<" in cls.__qualname__:
            return None
        try:
            return f"{Path(inspect.getfile(cls)).name}:{cls.__qualname__}"
        except (TypeError, OSError):  # a class that was typed, and is in no file
            return None

    def _arguments(
        self, text: str, name: str, cls: Any, rest: str, known: Mapping[str, Any]
    ) -> dict[str, Any]:
        """`value,field=value` as the arguments of a class."""
        hints, short = _hints(cls), self._short.get(name, {})
        parameters = inspect.signature(cls).parameters
        found: dict[str, Any] = {}
        for place, word in enumerate(rest.split(",") if rest else ()):
            field, equals, value = word.strip().partition("=")
            if field in short and not equals:
                field, parsed = short[field]
            else:
                if not equals and place == 0 and not short:
                    field, value = next(iter(parameters), ""), field
                field = field.strip().replace("-", "_")
                if equals and field not in parameters:
                    near = nearest(field, parameters)
                    raise self._unknown(text, f": {name} has no {in_short(field)}{near}")
                parsed = parse_value(hints.get(field), value) if field in parameters else None
            if parsed is None or field in found:
                raise self._unknown(text)
            found[field] = parsed
        found = {**{n: v for n, v in known.items() if n in parameters}, **found}
        if any(p.default is p.empty and n not in found for n, p in parameters.items()):
            raise self._unknown(text)
        return found

    def _unknown(self, text: str, why: str = "") -> ValueError:
        known, name = ", ".join(self._examples), text.partition(":")[0]
        why = why or ("" if name in self._named else nearest(name, self._named))
        these = known or "FILE.py:NAME of your own"
        return ValueError(f"{text!r} is no {self.kind}{why}; these are: {these}")


def nearest(word: str, known: Iterable[str]) -> str:
    """What a sentence adds about a wrong word: the known one that is like it."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; the nearest is {close[0]}" if close else ""


def check_options(what: str, cls: Any, options: Mapping[str, Any]) -> None:
    """Raise ValueError unless a class takes these options, of these types.

    So what a file says can end in no TypeError, and one that comes is a bug of ours.
    """
    parameters, hints = inspect.signature(cls).parameters, _hints(cls)
    for name, value in options.items():
        if name not in parameters:
            known = ", ".join(parameters)
            raise ValueError(f"{what} has no option {in_short(name)}, but {known}")
        if not fits(value, hints.get(name, Any)):
            raise ValueError(f"{name} of {what} cannot be {in_short(value)}")
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty and name not in options:
            raise ValueError(f"{what} needs the option {name}")


def _hints(cls: Any) -> dict[str, Any]:
    """The types of what a class is made from."""
    return get_type_hints(cls if is_dataclass(cls) else cls.__init__)


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


def format_number(value: float) -> str:
    """The shortest decimal that reads as exactly this number: .05, 1, 2e-05."""
    text = repr(float(value)).removesuffix(".0")
    return re.sub(r"^(-?)0\.", r"\1.", text)


def parse_value(hint: Any, text: str) -> Any:
    """A parameter of this type from a word; None if it is none."""
    kinds = [each for each in get_args(hint) or (hint,) if each is not type(None)]
    if bool in kinds:
        return _YES_NO.get(text)
    if int in kinds and re.fullmatch(r"-?[0-9]{1,18}", text):
        return int(text)
    if float in kinds and re.fullmatch(rf"-?{NUMBER}", text):
        return float(text)
    return text if str in kinds and text else None


def format_value(value: Any) -> str:
    """The word that `parse_value` reads as this value."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return str(value)
    return format_number(value) if isinstance(value, float) else str(value)
