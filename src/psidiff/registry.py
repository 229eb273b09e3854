"""Objects by name: in words, as plain data of files, and out of Python files of the user's.

`cap:.01`, `cap:eta=.01,clipped=no` and `rules.py:Pulse:every=4` are words;
{"name": "uniform", "vocab_size": 9} is plain data. A Python file is imported only when the user
names it (`import_file`, `--import`, or FILE.py:NAME on a command line). Names in saved models
and in requests reach what was imported so, and never cause an import.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
import traceback
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

from .checksums import in_short
from .options import check_options

C = TypeVar("C", bound=type)
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


def import_named(*texts: str | None) -> None:
    """Import each file that words of the user's name as FILE.py:NAME."""
    for text in texts:
        for match in _FILE.finditer(text or ""):
            import_file(match[1])


def load_object(text: str) -> Any:
    """FILE.py:NAME -> what the file defines under that name. The file is imported.

    Raises:
        ValueError: the words, the file or the name in it are wrong.
    """
    path, _, name = text.rpartition(":")
    if not path.endswith(".py"):
        raise ValueError(f"{text!r} is not FILE.py:NAME")
    return _defined(import_file(path), Path(path).name, name)


def describe_error(error: Exception, path: str) -> str:
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
    """Classes and constants of one kind, by name.

    Words are `name:value,field=value`, with the fields of the dataclass; the first field may
    go without its name. `kind` completes "... is no KIND"; `base` is the class that a user's
    own must have, if there is one.
    """

    def __init__(self, kind: str, base: type | None = None) -> None:
        self.kind, self.base = kind, base
        self._classes: dict[str, type] = {}
        self._constants: dict[str, Any] = {}
        self._short: dict[str, dict[str, tuple[str, Any]]] = {}
        self._examples: list[str] = []

    def register(
        self, name: str, *examples: str, short: Mapping[str, tuple[str, Any]] | None = None
    ) -> Callable[[C], C]:
        """A decorator: from here on the class can be named in words and files.

        Args:
            name: its name.
            examples: words that an error shows; none shows the name.
            short: words that stand for a field and its value, such as margin for by=margin.
        """

        def add(cls: C) -> C:
            self._classes[name] = cls
            self._short[name] = dict(short or {})
            self._examples += examples or (name,)
            return cls

        return add

    def constant(self, name: str, value: Any) -> None:
        """A name for one value, which takes no parameters."""
        self._constants[name] = value
        self._examples.append(name)

    @property
    def names(self) -> tuple[str, ...]:
        """All names, in the order they came."""
        return (*self._constants, *self._classes)

    def parse(self, text: str, **known: Any) -> Any:
        """The value that words mean; FILE.py:NAME of files that were imported, too.

        Args:
            text: the words.
            known: fields that the words may leave out; a class that has no such field does
                without it.

        Raises:
            ValueError: the words mean nothing, or the value refuses its parameters.
        """
        made, short, rest = self._find(str(text).strip())
        if isinstance(made, type):
            return made(**self._parameters(text, made, short, rest, known))
        if rest:
            raise ValueError(f"{text!r}: {text.removesuffix(':' + rest)} takes no parameters")
        return made

    def parameters(self, text: str) -> tuple[str, ...]:
        """The names of what the words' class is made from; none of a constant."""
        made = self._find(str(text).strip())[0]
        return tuple(inspect.signature(made).parameters) if isinstance(made, type) else ()

    def arguments(self, text: str, **known: Any) -> tuple[str, dict[str, Any]]:
        """The name of the class that words mean, and what it is made from."""
        made, short, rest = self._find(str(text).strip())
        name = str(text).strip().removesuffix(f":{rest}") if rest else str(text).strip()
        name = name.rpartition("/")[2]  # of a file: where it lies is no part of its name
        return name, self._parameters(text, made, short, rest, known)

    def find_class(self, name: Any) -> type:
        """The class of a name in a file, which never imports anything."""
        if isinstance(name, str) and (match := _FILE.fullmatch(name)):
            return self._own(match)
        if not isinstance(name, str) or name not in self._classes:
            raise ValueError(f"{in_short(name)} is not one of {', '.join(self._classes)}")
        return self._classes[name]

    def _find(self, text: str) -> tuple[Any, Mapping[str, tuple[str, Any]], str]:
        """The class or the constant that words name, its short words, and its parameters."""
        if text in self._constants:
            return self._constants[text], {}, ""
        if match := _FILE.match(text):
            return self._own(match), {}, text[match.end() :].removeprefix(":")
        name, colon, rest = text.partition(":")
        if name not in self._classes or bool(colon) != bool(rest):
            raise self._unknown(text)
        return self._classes[name], self._short[name], rest

    def format(self, value: Any) -> str:
        """The shortest words for a value; its repr, if it has no name."""
        for name, constant in self._constants.items():
            if value is constant or value == constant:
                return name
        known = self._name(value)
        if known is None:
            return repr(value)
        said = []
        if is_dataclass(value):
            short = {pair: word for word, pair in self._short.get(known, {}).items()}
            for place, each in enumerate(fields(value)):
                here = getattr(value, each.name)
                if each.default is not MISSING and here == each.default:
                    continue
                first = place == 0 and not short
                told = f"{'' if first else each.name + '='}{_format_value(here)}"
                said.append(short.get((each.name, here), told))
        return ":".join((known, ",".join(said))) if said else known

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
                f'{self.kind} must be a dict with a "name" ({", ".join(self._classes)}) and '
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
        made = _defined(_modules[file], file, match[2])
        kind = made if isinstance(made, type) else type(made)
        if self.base is not None and not issubclass(kind, self.base):
            raise ValueError(f"{match[0]!r} is no {self.kind}: make it a {self.base.__name__}")
        return made

    def _name(self, value: Any) -> str | None:
        """The name of a value's class, or of a value that an imported file defines."""
        for name, cls in self._classes.items():
            if type(value) is cls:
                return name
        for file, module in _modules.items():
            for name, held in vars(module).items():
                if held is value and getattr(value, "__module__", None) == module.__name__:
                    return f"{file}:{name}"
        cls = type(value)
        if cls.__module__ == "builtins" or "<" in cls.__qualname__:
            return None
        try:
            return f"{Path(inspect.getfile(cls)).name}:{cls.__qualname__}"
        except (TypeError, OSError):  # a class that was typed, and is in no file
            return None

    def _parameters(
        self,
        text: str,
        cls: Any,
        short: Mapping[str, tuple[str, Any]],
        rest: str,
        known: Mapping[str, Any],
    ) -> dict[str, Any]:
        """`value,field=value` as the arguments of a class."""
        hints = get_type_hints(cls if is_dataclass(cls) else cls.__init__)
        taken = inspect.signature(cls).parameters
        names = list(taken)
        found: dict[str, Any] = {}
        for place, word in enumerate(rest.split(",") if rest else ()):
            word = word.strip()
            name, equals, value = word.partition("=")
            if word in short:
                name, parsed = short[word]
            else:
                if not equals and place == 0 and names and not short:
                    name, value = names[0], word
                name = name.strip().replace("-", "_")
                parsed = parse_value(hints.get(name), value) if name in names else None
            if parsed is None or name in found:
                raise self._unknown(text)
            found[name] = parsed
        found = {**{n: v for n, v in known.items() if n in names}, **found}
        if any(p.default is p.empty and name not in found for name, p in taken.items()):
            raise self._unknown(text)
        return found

    def _unknown(self, text: str) -> ValueError:
        known = ", ".join(self._examples) or "FILE.py:NAME of your own"
        return ValueError(f"{text!r} is no {self.kind}; these are: {known}")


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


def _format_value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return str(value)
    return format_number(value) if isinstance(value, float) else str(value)
