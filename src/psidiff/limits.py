"""What a file may ask of the machine: every bound that readers hold, in one place.

A file from a stranger may be small and still ask for gigabytes: a compressed stream, a header
with large shapes, values nested a thousand deep. Readers call what is here before they
allocate. PSIDIFF_LIMITS raises a bound: PSIDIFF_LIMITS="unpacked=64GiB depth=200".
"""

from __future__ import annotations

import io
import itertools
import json
import os
import re
import stat
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import yaml

_UNITS = {"": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_JSON_TEXT = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_NUMBER = 1000  # characters of a number or a date in YAML
_ALWAYS = 2**26  # bytes that anything may unpack to, whatever the ratio


@dataclass(frozen=True)
class Limits:
    """The bounds; all are counts, or bytes.

    text        bytes of a file of JSON, YAML or settings that is read whole
    line        bytes of one line of a corpus or of JSON lines
    document    bytes of a corpus that is one document
    unpacked    bytes that one compressed or pickled file becomes in memory
    ratio       unpacked bytes for each packed byte, beyond the first 64 MiB
    members     entries of an archive
    depth       how deeply values nest
    nodes       values in a YAML document, those behind aliases counted every time
    values      values in a JSON document, keys counted too
    opcodes     steps of a pickle
    parameters  numbers in a network that a file describes
    blocks      layers of such a network
    classes     classes that labels may name
    tokens      ids of a tokenizer or of an .npy file
    pixels      pixels of one picture
    length      tokens of one sequence
    """

    text: int = 256 * 2**20
    line: int = 32 * 2**20
    document: int = 4 * 2**30
    unpacked: int = 16 * 2**30
    ratio: int = 200
    members: int = 100_000
    depth: int = 100
    nodes: int = 1_000_000
    values: int = 5_000_000
    opcodes: int = 4_000_000
    parameters: int = 20 * 10**9
    blocks: int = 1000
    classes: int = 1_000_000
    tokens: int = 2_000_000
    pixels: int = 100_000_000
    length: int = 16_777_216


def limits() -> Limits:
    """The bounds in force, with what PSIDIFF_LIMITS raises or lowers."""
    said = os.environ.get("PSIDIFF_LIMITS", "")
    known = [field.name for field in fields(Limits)]
    changed = {}
    for word in said.replace(",", " ").split():
        found = re.fullmatch(r"(\w+)=(\d+)([a-z]*)", word, re.IGNORECASE)
        if not found or found[1] not in known or found[3].lower() not in _UNITS:
            raise ValueError(
                f"PSIDIFF_LIMITS has {word[:40]!r}: write NAME=NUMBER, such as unpacked=64GiB; "
                f"the names are {', '.join(known)}"
            )
        changed[found[1]] = int(found[2]) * _UNITS[found[3].lower()]
    return replace(Limits(), **changed)


def check_limit(name: str, value: int, path: Any, what: str, enough: int = 0) -> None:
    """Raise ValueError where `value` is beyond the bound `name`.

    enough: what the bound should be, where `value` is not all that there is to come.
    """
    most = getattr(limits(), name)
    if value > most:
        raise ValueError(
            f"{path} {what}, and at most {most:,} is allowed: if you trust the file, set "
            f"PSIDIFF_LIMITS={name}={enough or value}"
        )


def regular_file(path: str | Path) -> Path:
    """The path, if a file of bytes is there: no folder, pipe, socket or device."""
    path = Path(path)
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise ValueError(f"there is no file {path}") from None
    except (OSError, ValueError) as error:  # a name too long, a null byte, a loop of links
        raise ValueError(f"{str(path)[:200]!r} cannot be opened: {error}") from None
    if stat.S_ISDIR(mode):
        raise ValueError(f"{path} is a folder, and a file is needed")
    if not stat.S_ISREG(mode):
        raise ValueError(f"{path} is no regular file (a pipe or a device), and is not opened")
    return path


def read_bytes(path: str | Path, limit: str = "text") -> bytes:
    """All of a regular file that is no larger than the bound."""
    path = regular_file(path)
    check_limit(limit, path.stat().st_size, path, f"has {path.stat().st_size:,} bytes")
    return path.read_bytes()


def read_text(path: str | Path) -> str:
    """A file of text in UTF-8."""
    try:
        return read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 at byte {error.start}") from None


def parse_json(text: str | bytes, path: Any, pairs: Callable[[Any], Any] | None = None) -> Any:
    """JSON that nests no deeper than the bound, with numbers that are numbers.

    pairs: what makes an object of its names and values, a dict unless given.
    """
    try:
        if isinstance(text, bytes):
            text = text.decode(json.detect_encoding(text), "surrogatepass")
        _check_values(text, path)
        value = json.loads(text, parse_constant=no_constant, object_pairs_hook=pairs)
        check_depth(value, path)
    except RecursionError:
        raise ValueError(f"{path} nests too deeply") from None
    except ValueError as error:
        raise (
            error if str(path) in str(error) else ValueError(f"{path} is not JSON: {error}")
        ) from None
    return value


def _check_values(text: str, path: Any) -> None:
    """No more values than the bound, by the marks that stand before or after each."""
    if len(text) <= limits().values or _marks(text) <= limits().values:
        return
    count = _marks(_JSON_TEXT.sub("", text))
    check_limit("values", count, path, f"has about {count:,} values")


def _marks(text: str) -> int:
    return sum(map(text.count, ",:[{"))


def no_constant(name: str) -> float:
    """Refuse NaN and Infinity, which JSON does not have."""
    raise ValueError(f"{name} is no number of JSON")


def check_depth(value: Any, path: Any) -> None:
    """Raise ValueError where dicts and lists nest deeper than the bound. No recursion."""
    most, level = limits().depth, [value]
    for _ in range(most + 1):
        level = [
            inner
            for each in level
            if isinstance(each, (dict, list, tuple))
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return
    raise ValueError(f"{path} nests deeper than {most} levels")


def parse_yaml(text: str | bytes, path: Any) -> Any:
    """Plain YAML. Aliases count every time they are used, so a few lines cannot be billions.

    Raises yaml.YAMLError as `yaml.safe_load` does, ValueError where a bound is met.
    """
    loader = _BoundedLoader(text, path)
    try:
        return loader.get_single_data()
    except RecursionError:
        raise ValueError(f"{path} nests too deeply") from None
    finally:
        loader.dispose()


class _BoundedLoader(yaml.SafeLoader):
    """SafeLoader, whose documents have a depth and a size with aliases written out."""

    def __init__(self, text: str | bytes, path: Any) -> None:
        super().__init__(text)
        self.path, self.bounds = path, limits()
        self.depth = 0
        self.sizes: dict[int, int] = {}  # of finished nodes, by id

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        kind = node.tag.rpartition(":")[2]
        if isinstance(node, yaml.ScalarNode) and kind in _SCALARS and len(node.value) > _NUMBER:
            raise _no_value(f"no {kind} has {len(node.value):,} characters", node)
        try:
            return super().construct_object(node, deep)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            raise _no_value(f"this is no {kind}", node) from None

    def compose_node(self, parent: Any, index: Any) -> Any:
        self.depth += 1
        if self.depth > self.bounds.depth:
            raise ValueError(f"{self.path} nests deeper than {self.bounds.depth} levels")
        is_alias = self.check_event(yaml.AliasEvent)
        node = super().compose_node(parent, index)
        self.depth -= 1
        if id(node) not in self.sizes:
            if is_alias:  # of a node that is not finished
                raise ValueError(f"{self.path} has a value that contains itself")
            self.sizes[id(node)] = 1 + sum(self.sizes[id(each)] for each in _inside(node))
        if self.sizes[id(node)] > self.bounds.nodes:
            raise ValueError(
                f"{self.path} has more than {self.bounds.nodes:,} values once its aliases are "
                "written out"
            )
        return node


_SCALARS = ("int", "float", "timestamp", "bool", "null")  # numbers to base 60 take squares


def _no_value(problem: str, node: Any) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


def _inside(node: Any) -> Iterable[Any]:
    if isinstance(node, yaml.MappingNode):
        return itertools.chain.from_iterable(node.value)
    return node.value if isinstance(node, yaml.SequenceNode) else ()


def check_zip(file: str | Path | io.BufferedIOBase, path: Any) -> None:
    """Raise ValueError where a zip archive asks for more than it may: entries, bytes, ratio,
    or entries that lie on top of each other."""
    try:
        with zipfile.ZipFile(file) as archive:
            entries, end_of_entries = archive.infolist(), archive.start_dir
    except (zipfile.BadZipFile, NotImplementedError, ValueError, EOFError, OSError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    check_limit("members", len(entries), path, f"has {len(entries):,} entries")
    packed = sum(entry.compress_size for entry in entries)
    check_ratio(sum(entry.file_size for entry in entries), packed, path)
    spans = sorted((e.header_offset, e.header_offset + e.compress_size) for e in entries)
    spans.append((end_of_entries, end_of_entries))
    if any(end > after for (_, end), (after, _) in itertools.pairwise(spans)):
        raise ValueError(f"{path} is damaged: its entries lie on top of each other")


def check_ratio(unpacked: int, packed: int, path: Any) -> None:
    """Raise ValueError where so many bytes out of so few are beyond the bounds."""
    check_limit("unpacked", unpacked, path, f"unpacks to {unpacked:,} bytes")
    if unpacked > _ALWAYS and unpacked > limits().ratio * packed:
        ratio = unpacked // max(packed, 1)
        check_limit("ratio", ratio, path, f"unpacks to {ratio:,} times its size")


def check_given(given: int, packed: int, path: Any) -> None:
    """Raise ValueError where a reader has given so many bytes, more than a file of `packed`
    bytes may become; there may be more to come."""
    if given > _ALWAYS and given > limits().ratio * packed:
        ratio, all_of_it = (
            most // max(packed, 1) + 1 for most in (given, max(limits().unpacked, 16 * given))
        )
        said = f"unpacks to over {ratio:,} times its size"
        check_limit("ratio", ratio, path, said, all_of_it)


class BoundedStream(io.RawIOBase):
    """A decompressing stream that stops with a ValueError where it gives too much.

    packed: the bytes of the compressed file.
    """

    def __init__(self, stream: Any, packed: int, path: Any) -> None:
        self.stream = stream
        self.packed = packed
        self.path = path
        self.given: int = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self.stream.read(len(buffer))
        buffer[: len(data)] = data
        self.given += len(data)
        check_given(self.given, self.packed, self.path)
        return len(data)
