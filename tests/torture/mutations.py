"""Seeded damage: to bytes, to JSON and YAML, to archives, pictures, pickles and names.

Every function takes a generator and the whole bytes of a file, and gives other bytes. Most
damage to a file with a checksum would be found by it alone, so half of it is sealed again.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import lzma
import pickle
import re
import struct
import zipfile
import zlib
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import yaml

from psidiff.checksums import (
    KEY,
    seal_zip,
    text_with_checksum,
    with_checksum,
)

Rng = np.random.Generator
Mutation = Callable[[Rng, bytes], bytes]
MARKER = "CODE-RAN"  # what planted code would make, in the folder it runs in


def pick(rng: Rng, choices: Any) -> Any:
    return choices[int(rng.integers(len(choices)))]


# Bytes


def damaged_bytes(rng: Rng, data: bytes) -> bytes:
    """One to three of: bits flipped, cut, moved, repeated, filled, put in."""
    for _ in range(int(rng.integers(1, 4))):
        data = pick(rng, _BYTES)(rng, data)
    return data


def flip_bit(rng: Rng, data: bytes) -> bytes:
    """One bit, anywhere."""
    place = int(rng.integers(max(len(data) * 8, 1)))
    held = bytearray(data or b"\0")
    held[place // 8] ^= 1 << place % 8
    return bytes(held)


def _span(rng: Rng, data: bytes) -> tuple[int, int]:
    first = int(rng.integers(len(data) + 1))
    return first, min(len(data), first + int(rng.integers(1, max(2, min(len(data), 4096)))))


def _cut(rng: Rng, data: bytes) -> bytes:
    return data[: int(rng.integers(len(data) + 1))]


def _behead(rng: Rng, data: bytes) -> bytes:
    return data[int(rng.integers(len(data) + 1)) :]


def _remove(rng: Rng, data: bytes) -> bytes:
    first, last = _span(rng, data)
    return data[:first] + data[last:]


def _repeat(rng: Rng, data: bytes) -> bytes:
    first, last = _span(rng, data)
    return data[:last] + data[first:last] * int(rng.integers(1, 50)) + data[last:]


def _fill(rng: Rng, data: bytes) -> bytes:
    first, last = _span(rng, data)
    return (
        data[:first] + pick(rng, (b"\0", b"\xff", b"\n", b"9")) * (last - first) + data[last:]
    )


def _random(rng: Rng, data: bytes) -> bytes:
    first, last = _span(rng, data)
    return data[:first] + rng.bytes(last - first) + data[last:]


def _number(rng: Rng, data: bytes) -> bytes:
    """Eight bytes somewhere become a number that no size should be."""
    first = int(rng.integers(len(data) + 1))
    value = pick(rng, (2**63 - 1, 2**64 - 1, 2**31 - 1, 2**32, 10**12, 0))
    size, order = pick(rng, ((8, "little"), (4, "little"), (4, "big")))
    raw = (value % 2 ** (8 * size)).to_bytes(size, order)
    return data[:first] + raw + data[first + size :]


def _digits(rng: Rng, data: bytes) -> bytes:
    """A number in the text becomes another."""
    found = list(re.finditer(rb"\d+", data[:200_000]))
    if not found:
        return flip_bit(rng, data)
    where = pick(rng, found)
    new = pick(rng, (b"0", b"-1", b"1e999", b"9" * 5000, b"100000000000", b"0x10", b"1.5", b""))
    return data[: where.start()] + new + data[where.end() :]


def _empty(rng: Rng, data: bytes) -> bytes:
    return pick(rng, (b"", b"\0", b"\n", b"\xef\xbb\xbf", b"\xff\xfe", b"PK\x03\x04", b"{}"))


def _swap(rng: Rng, data: bytes) -> bytes:
    middle = int(rng.integers(len(data) + 1))
    return data[middle:] + data[:middle]


_BYTES: list[Mutation] = [
    *(flip_bit, flip_bit, flip_bit, _cut, _cut, _behead, _remove, _repeat, _fill, _random),
    *(_random, _number, _number, _digits, _digits, _empty, _swap),
]


# Values of JSON and YAML


def hostile_value(rng: Rng) -> Any:
    """What nobody expects in a file."""
    deep: Any = 0
    for _ in range(int(rng.integers(2, 400))):
        deep = [deep] if rng.random() < 0.5 else {"a": deep}
    return pick(
        rng,
        [
            *(None, True, False, 0, -1, 1, 2, 3, 1.5, -0.0, 1e308, 5e-324, 10**30, 2**63),
            *(-(2**63), 10**5, 10**9, 10**12, float("nan"), float("inf"), "", "x", "auto"),
            *("\ud800", "\x1b[31mred\x1b[0m\x07", "[bold]x[/]", "../../outside", "/etc/passwd"),
            *(
                "a" * 100_000,
                "\0",
                "é" * 50,
                "9" * 5000,
                "nan",
                "None",
                "1e400",
                "{{1}}",
                "${x}",
            ),
            *([], {}, [[]], [None], [1, 2], [-1, 10**9], ["a", 1], {"a": []}, {"kind": "x"}),
            *([0] * 5000, [10**12] * 4, {"": 0}, {"__class__": "x"}, [float("nan")]),
            *(deep, deep),
        ],
    )


def changed_value(rng: Rng, value: Any) -> Any:
    """The same tree with one to three places changed, removed or added."""
    value = json.loads(json.dumps(value))
    for _ in range(int(rng.integers(1, 4))):
        value = _change(rng, value)
    return value


def _change(rng: Rng, value: Any) -> Any:
    if not isinstance(value, (dict, list)) or not value or rng.random() < 0.04:
        return hostile_value(rng)
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    key = pick(rng, keys)
    inside = value[key]
    if isinstance(inside, (dict, list)) and inside and rng.random() < 0.75:
        value[key] = _change(rng, inside)
        return value
    way = rng.random()
    if way < 0.6:
        value[key] = _near(rng, inside) if rng.random() < 0.4 else hostile_value(rng)
    elif way < 0.8:
        del value[key]
    elif isinstance(value, dict):
        value[pick(rng, (f"{key} ", "x", "", "format_version", "kind"))] = hostile_value(rng)
    else:
        value.insert(0, hostile_value(rng))
    return value


def _near(rng: Rng, value: Any) -> Any:
    """Of the same type, and wrong all the same."""
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int):
        return value + int(
            pick(rng, (-1, 1, -value, -2 * value, 7, 10**4, 10**7, 2**31, 2**62))
        )
    if isinstance(value, float):
        return pick(rng, (-value, 0.0, value * 1e6, 1.0, 2.0, 5e-324))
    if isinstance(value, str):
        return pick(rng, (value[:-1], value * 2, value.upper(), value + "\n", value + " "))
    return [value]


def json_file(rng: Rng, data: bytes) -> bytes:
    """A file of JSON: its values changed and sealed, as of an older version, or not sealed."""
    if rng.random() < 0.3:
        return pick(rng, _JSON_TEXTS)(rng, data)
    try:
        values = json.loads(data)
    except ValueError:
        return damaged_bytes(rng, data)
    return _dumped(_resealed(rng, values)).encode("utf-8", "surrogatepass")


def _resealed(rng: Rng, values: Any) -> Any:
    sealed = isinstance(values, dict) and KEY in values
    if not isinstance(values, dict):
        return changed_value(rng, values)
    rest = {name: each for name, each in values.items() if name != KEY}
    if not sealed:
        return changed_value(rng, rest)
    way = rng.random()
    if way < 0.6:
        rest = changed_value(rng, rest)
        with contextlib.suppress(Exception):
            return with_checksum(rest)
    if way < 0.85 and isinstance(rest, dict):
        rest.pop("format_version", None)
        return changed_value(rng, rest)
    return changed_value(rng, values)


def _dumped(value: Any) -> str:
    try:
        return json.dumps(value)
    except (ValueError, RecursionError):
        return "{}"


def _deep_json(rng: Rng, data: bytes) -> bytes:
    opening = pick(rng, (b"[", b'{"a":', b'[{"a":'))
    return opening * int(pick(rng, (200, 2000, 100_000)))


_JSON_TEXTS: list[Mutation] = [
    *(damaged_bytes, damaged_bytes, damaged_bytes, _deep_json, _digits, _digits),
    lambda rng, data: b"[" + b"0," * 300_000 + b"0]",
    lambda rng, data: b"[" + b"{}," * 20_000_000 + b"0]",
    lambda rng, data: data.decode("utf-8", "replace").encode("utf-16"),
    lambda rng, data: b"\xef\xbb\xbf" + data,
    lambda rng, data: data.rstrip(b"}\n ") + b', "x": 1, "x": 2}',
    lambda rng, data: pick(rng, (b"null", b"3", b'"text"', b"[]", b"{}", b"NaN", b"-")),
]


def json_lines(rng: Rng, data: bytes) -> bytes:
    """Some lines of a file changed, lost, doubled, in another order, or cut."""
    lines = data.split(b"\n")
    for _ in range(int(rng.integers(1, 4))):
        place = int(rng.integers(len(lines)))
        way = rng.random()
        if way < 0.6:
            lines[place] = json_file(rng, lines[place])
        elif way < 0.7 and len(lines) > 1:
            del lines[place]
        elif way < 0.8:
            lines.insert(place, lines[place])
        elif way < 0.9:
            lines.reverse()
        else:
            return damaged_bytes(rng, data)
    return b"\n".join(lines)


def yaml_file(rng: Rng, data: bytes) -> bytes:
    """A recipe: its values changed, or its text, or another document altogether."""
    way = rng.random()
    text = data.decode("utf-8", "replace")
    if way < 0.55:
        with contextlib.suppress(Exception):
            value = yaml.safe_load(text)
            text = yaml.dump(changed_value(rng, value), Dumper=yaml.SafeDumper, sort_keys=False)
            sealed = b"checksum" in data and rng.random() < 0.7
            return (text_with_checksum(text) if sealed else text).encode("utf-8", "replace")
    if way < 0.75:
        return damaged_bytes(rng, data)
    bomb = pick(rng, _YAML)
    if rng.random() < 0.5:
        return bomb.encode("utf-8", "replace")
    return (text + "\n" + bomb).encode("utf-8", "replace")


def _aliases(wide: int, deep: int) -> str:
    lines = ["a0: &a0 [x, x]"]
    for i in range(1, deep):
        lines.append(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * wide)}]")
    return "\n".join(lines)


def _merges(deep: int) -> str:
    lines = ["m0: &m0 {a: 1, b: 2}"]
    for i in range(1, deep):
        lines.append(f"m{i}: &m{i} {{<<: [{', '.join([f'*m{i - 1}'] * 9)}], c{i}: 1}}")
    return "\n".join(lines)


_YAML = [
    _aliases(10, 12),
    _aliases(200, 6),
    "name: " + "[" * 5000 + "]" * 5000,
    "name: " + "{a: " * 5000,
    _merges(30),
    _merges(9),
    "name: &a [*a]",
    "<<: &a {b: *a}",
    f'name: !!python/object/apply:os.system ["touch {MARKER}"]',
    f'!!python/object/new:subprocess.check_output [["touch", "{MARKER}"]]',
    f"!!python/object/apply:builtins.eval [\"open('{MARKER}', 'w')\"]",
    "train: {steps: 1e400}",
    "train: {steps: .nan}",
    "train: {steps: 0b1}",
    "train: {steps: 190:20:30}",
    "name: 2001-12-14t21:59:43.10-05:00",
    "name: 9999-99-99",
    "name: !!binary '=='",
    "name: !!int x",
    "name: !!float x",
    "name: !!timestamp x",
    "name: ? [a, b] : c",
    "? [a, b]\n: c",
    "? {a: b}\n: c",
    "name: *nothing",
    "--- a\n--- b",
    "%YAML 9.9\n---\na: b",
    "\ta: b",
    "name: '\\x00'",
    'name: "\\ud800"',
    'name: "\\e[31m"',
    "name: ../../outside",
    "name: /tmp/outside",
    "1: 2\nnull: 3\ntrue: 4",
    "name: " + "9" * 100_000,
    "name: 1" + ":1" * 150_000,
    "name: 1" + ":1" * 400 + ".0",
    "name: !!bool zz",
    "name: !!int ''",
    "name: !!int 1" + ":1" * 100_000,
    "name: 2001-99-99",
    "a: " + "x" * 3_000_000,
]


# Compressed streams


@cache
def zeros(kind: str) -> bytes:
    """Compressed streams that become 8 GiB of zeros."""
    packed = gzip.compress(bytes(2**26), 9) if kind == "gz" else lzma.compress(bytes(2**26))
    return packed * 128


def compressed(kind: str, inner: Mutation) -> Mutation:
    pack, unpack = (gzip.compress, gzip.decompress) if kind == "gz" else (_xz, lzma.decompress)

    def mutate(rng: Rng, data: bytes) -> bytes:
        way = rng.random()
        if way < 0.06:
            return zeros(kind)
        if way < 0.5:
            return pack(inner(rng, unpack(data)))
        if way < 0.6:
            return data + pick(rng, (b"\0" * 9, b"x" * 64, data, data[: len(data) // 2]))
        return damaged_bytes(rng, data)

    return mutate


def _xz(data: bytes) -> bytes:
    return lzma.compress(data, preset=0)


# Zip archives: .npz, .ckpt


def zip_file(inner: Mutation, sealed: bool = False) -> Mutation:
    """An archive whose entries change, with right checksums of zip, or that is no right one."""

    def mutate(rng: Rng, data: bytes) -> bytes:
        way = rng.random()
        if way < 0.4:
            return damaged_bytes(rng, data)
        entries = _entries(data)
        if not entries:
            return damaged_bytes(rng, data)
        name = pick(rng, list(entries))
        if way < 0.8:
            entries[name] = inner(rng, entries[name])
        elif way < 0.84:
            del entries[name]
        elif way < 0.88:
            entries["../outside"] = b"x"
            entries[f"{name}/../x.npy"] = entries[name]
        elif way < 0.92:
            other = pick(rng, list(entries))
            entries[name], entries[other] = entries[other], entries[name]
        elif way < 0.96:
            return _bomb(name)
        else:
            return _overlapping(entries, name)
        return _zipped(entries, sealed and rng.random() < 0.7)

    return mutate


def _entries(data: bytes) -> dict[str, bytes]:
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return {entry.filename: archive.read(entry) for entry in archive.infolist()}
    except Exception:
        return {}


def _zipped(entries: dict[str, bytes], sealed: bool = False) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:  # stored, as torch wants it
        for name, value in entries.items():
            archive.writestr(name, value)
    if sealed:
        seal_zip(packed)
    return packed.getvalue()


@cache
def _bomb(name: str) -> bytes:
    """An entry of 3 GB of zeros in 3 MB, which says so or says that it is small."""
    packed = io.BytesIO()
    with (
        zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
        archive.open(name, "w", force_zip64=True) as entry,
    ):
        head = io.BytesIO()
        np.lib.format.write_array_header_1_0(
            head, {"descr": "|u1", "fortran_order": False, "shape": (3 * 10**9,)}
        )
        entry.write(head.getvalue())
        for _ in range(3 * 1000):
            entry.write(bytes(10**6))
    return packed.getvalue()


def _overlapping(entries: dict[str, bytes], name: str) -> bytes:
    """A directory whose entries all point at the first one's bytes."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for each, value in entries.items():
            archive.writestr(each, value)
        for entry in archive.filelist:
            entry.header_offset = 0
    return packed.getvalue()


def npy(rng: Rng, data: bytes) -> bytes:
    """An array in a file: another shape, type or order in its header; objects; its bytes."""
    way = rng.random()
    if way < 0.3:
        return damaged_bytes(rng, data)
    shape = pick(
        rng,
        (
            "(10**12,)",
            "(1000000000000,)",
            "(-1,)",
            "(2, 3, 4)",
            "()",
            "(0,)",
            "(1, 0)",
            "(1,)*40",
        ),
    )
    kind = pick(rng, ("|u1", "<i4", "<f8", "|O", "<U3", "|S5", "<M8[s]", "<c16", "<i8", "|b1"))
    if way < 0.4:
        return _npy_of("|O", "(1,)", pickled(rng))
    if way < 0.5:
        return _npy_of(pick(rng, ("|u1", "|S0", "<f8")), f"({10**12},)", b"")
    if way < 0.7:
        return _npy_of(kind, shape, data[128:])
    array = pick(
        rng,
        (
            lambda: np.full((3, 4), -1),
            lambda: np.full((4, 16), 10**12),
            lambda: np.full((2, 16), np.nan),
            lambda: np.zeros((0, 16), np.int32),
            lambda: np.array(["a", "b"]),
            lambda: np.zeros((4, 4, 4, 4, 4), np.uint8),
            lambda: np.array(10**12),
            lambda: np.zeros((2, 17), np.int32),
        ),
    )()
    raw = io.BytesIO()
    np.save(raw, array)
    return raw.getvalue()


def _npy_of(kind: str, shape: str, rest: bytes) -> bytes:
    header = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}".encode()
    header = header.ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + rest


# Pickles


class Planted:
    """An object whose pickle calls a function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def payloads() -> list[bytes]:
    """Pickles that run code, poison torch, or ask for memory; protocol 2 and by hand."""
    import os
    import subprocess

    touch = f"touch {MARKER}"
    made = [
        pickle.dumps(Planted(os.system, touch), 2),
        pickle.dumps(Planted(exec, f"open('{MARKER}', 'w')"), 2),
        pickle.dumps(Planted(subprocess.call, ["touch", MARKER]), 4),
        pickle.dumps({"state_dict": Planted(eval, f"open('{MARKER}', 'w')")}, 4),
        f"cos\nsystem\n(S'{touch}'\ntR.".encode(),
        f"(S'{touch}'\nios\nsystem\n.".encode(),
        f"(cos\nsystem\nS'{touch}'\no.".encode(),
        b"ctorch._utils\n_rebuild_tensor_v2\n}(S'__defaults__'\nNS'__code__'\nNub.",
        b"ctorch._utils\n_rebuild_tensor_v2\n(N}S'__defaults__'\nNstb.",
        b"ccollections\nOrderedDict\n}(S'update'\nNub.",
        b"cbuiltins\ndict\n}(S'x'\nNub.",
        b"cbuiltins\ngetattr\n(ctorch\nload\nS'__globals__'\ntR.",
        b"ctorch.serialization\n_load\n(tR.",
        b"cpsidiff.model\nload\n(S'/etc/passwd'\ntR.",
        b"cnumpy\nload\n(S'x'\ntR.",
        b"ccodecs\ndecode\n(S'x'\nS'rot13'\ntR.",
        b"\x80\x02Nr\xff\xff\xff\x1f.",  # memo index of 2^29
        b"\x80\x02]r\x00\x00\x00\x40.",
        b"\x80\x04\x8d" + struct.pack("<Q", 2**62) + b"x.",  # a string of 2^62
        b"\x80\x04\x8e" + struct.pack("<Q", 2**40) + b"x.",
        b"\x80\x04\x96" + struct.pack("<Q", 2**35) + b"x.",
        b"\x80\x02\x8b" + struct.pack("<i", 2**31 - 1) + b"1.",  # LONG4
        b"\x80\x02" + b"(" * 10**6 + b".",
        b"\x80\x02" + b"]" * 10**5 + b"a" * (10**5 - 1) + b".",
        b"\x80\x02" + b"N" * 10**6 + b".",
        b"\x80\x02]" + b"q\x00h\x00a" * 10**5 + b".",
        b"\x80\x02" + b"h\x00" * 3 + b".",
        b"\x80\x02\x82\x01.",  # extension registry
        b"\x80\x05\x97.",  # out-of-band buffer
        b"\x80\x02U\x01xQ.",  # persistent id of another kind
        b"\x80\x02c_codecs\nencode\nN}X\x0c\0\0\0__defaults__)s\x86b.",
        b"\x80\x02cnumpy\nndarray\nN}X\x0c\0\0\0__setstate__)s\x86b.",
        b"\x80\x02c_codecs\nencode\nK\x05\x85R.",
        b"\x80\x02c_codecs\nencode\nX\x01\0\0\0a)q\x010"
        + b"h\x01h\x01\x86q\x010" * 28
        + b"h\x01\x86R.",
        b"\x80\x02}r\x00\x00\x00\x20.",
        b"\x80\x02(" + b"\x8f" * 3_900_000 + b"t.",  # empty sets
        b"\x80\x02("
        + b"N" * 10**5
        + b"tq\x000ccollections\nOrderedDict\nq\x010"
        + b"h\x01h\x00R0" * 50_000
        + b"N.",
        _colliding(),
        _references(),
        b"P\n.",
        b"I" + b"9" * 10**6 + b"\n.",
        b"\x80\xff.",
        b".",
        b"",
    ]
    bomb = b"\x80\x02]q\x00"
    for i in range(1, 30):  # lists of ten times the one before
        bomb += b"](" + (b"h" + bytes([i - 1])) * 10 + b"eq" + bytes([i])
    made.append(bomb + b".")
    tuples = b"\x80\x02)" + b"\x85" * 10**5 + b"."
    made.append(tuples)
    return made


def _colliding() -> bytes:
    """A dict of numbers that its table has to try one after another."""
    numbers = (b"\x8a\x08" + struct.pack("<q", 1 + i * 2**40) + b"N" for i in range(30_000))
    return b"\x80\x02}(" + b"".join(numbers) + b"u."


def _references() -> bytes:
    """A config whose lists refer to lists that refer to lists."""
    wide: dict[str, Any] = {f"k{i}": [f"${{k{i + 1}}}"] * 10 for i in range(18)}
    held = {"state_dict": {}, "hyper_parameters": {"config": {**wide, "k18": 1}}}
    return pickle.dumps(held, 2)


_PAYLOADS = cache(payloads)


def pickled(rng: Rng) -> bytes:
    return pick(rng, _PAYLOADS())


def pickle_bytes(rng: Rng, data: bytes) -> bytes:
    """A pickle that is damaged, or another one, or one that runs code before it is itself."""
    way = rng.random()
    if way < 0.35:
        return damaged_bytes(rng, data)
    if way < 0.7:
        return pickled(rng)
    if way < 0.8:  # the payload first, its result dropped
        first = pickled(rng)
        body = first[2:-1] if first[:1] == b"\x80" else first[:-1]
        return data[:2] + body + b"0" + data[2:]
    return pick(rng, (_names, _digits, _texts))(rng, data)


def _names(rng: Rng, data: bytes) -> bytes:
    """Another name where the pickle asks for a global."""
    found = list(re.finditer(rb"c([\w.]+)\n([\w.]+)\n", data))
    if not found:
        return flip_bit(rng, data)
    where = pick(rng, found)
    new = pick(
        rng,
        (
            b"cos\nsystem\n",
            b"cbuiltins\neval\n",
            b"ctorch\nload\n",
            b"ctorch\nUntypedStorage\n",
            b"ctorch\nDoubleStorage\n",
            b"ctorch._utils\n_rebuild_parameter\n",
            b"ctorch._utils\n_rebuild_tensor_v2\n",
            b"comegaconf.dictconfig\nDictConfig\n",
            b"ctransformers.x\n__reduce__\n",
            b"ccollections\nOrderedDict\n",
            b"cbuiltins\nint\n",
        ),
    )
    return data[: where.start()] + new + data[where.end() :]


def _texts(rng: Rng, data: bytes) -> bytes:
    """Another text of the same length, such as a key or the name of a storage."""
    found = list(re.finditer(rb"X(.)\0\0\0", data, re.DOTALL))
    if not found:
        return flip_bit(rng, data)
    where = pick(rng, found)
    size = where[1][0]
    raw = pick(rng, (b"../" * size, b"9" * size, b"\0" * size, rng.bytes(size)))[:size]
    return data[: where.end()] + raw + data[where.end() + size :]


# Tokenizers


def _replace(old: str, new: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: old}, "content": new}


_WORDS = {"a": 0, "b": 1, "<eos>": 2}
_TOKENIZERS: list[dict[str, Any]] = [
    {"model": {"type": "WordLevel", "vocab": {"a": 4 * 10**9}, "unk_token": "a"}},
    {"model": {"type": "WordLevel", "vocab": {}, "unk_token": "a"}},
    {"model": {"type": "WordLevel", "vocab": {"a": 0, "b": 0}, "unk_token": "a"}},
    {"model": {"type": "WordLevel", "vocab": {"<eos>": 0}, "unk_token": "zz"}},
    {"model": {"type": "Unigram", "unk_id": 7, "vocab": [["a", -1e308], ["b", 1e308]]}},
    {"model": {"type": "Unigram", "unk_id": None, "vocab": [["b", 0.0]]}},
    {"model": {"type": "BPE", "vocab": {"z": 0}, "merges": []}},
    {"model": {"type": "BPE", "dropout": 5.0, "vocab": {"a": 0}, "merges": []}},
    {"normalizer": _replace("(a|a|aa)+$c", "x", "Regex")},
    {"normalizer": _replace("", "aaaa")},
    {"normalizer": {"type": "Sequence", "normalizers": [_replace("a", "a" * 100)] * 5}},
    {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    {"decoder": {"type": "Sequence", "decoders": [_replace("e", "e" * 100)] * 5}},
    {"decoder": _replace("(.|.|..)+\0", "", "Regex")},
    {"decoder": {"type": "Strip", "content": "a", "start": 10**9, "stop": 10**9}},
    {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    {"padding": {"strategy": {"Fixed": 10**12}}},
    {"added_tokens": [{"id": 10**9, "content": "x", "special": True}]},
]


def tokenizer_file(rng: Rng, data: bytes) -> bytes:
    """A tokenizer.json or a codec.json, damaged, or one that asks for much."""
    if rng.random() < 0.6:
        return json_file(rng, data)
    held = json.loads(data)
    parts = pick(rng, _TOKENIZERS)
    if rng.random() < 0.3:
        held["model"] = {"type": "WordLevel", "vocab": _WORDS, "unk_token": "a"}
    return json.dumps({**held, **parts}).encode()


def codec_file(rng: Rng, data: bytes) -> bytes:
    """A codec.json, damaged, or one with a tokenizer that asks for much."""
    if rng.random() < 0.6:
        return json_file(rng, data)
    model = {"model": {"type": "WordLevel", "vocab": _WORDS, "unk_token": "a"}}
    text = json.dumps({"version": "1.0", "added_tokens": [], **model, **pick(rng, _TOKENIZERS)})
    held = {"format_version": 1, "name": "subwords", "json": text, "separator": None}
    return json.dumps(held).encode()


# Pictures, safetensors


def png(rng: Rng, data: bytes) -> bytes:
    """A picture whose chunks say something else, with right checksums, or whose bytes are
    damaged."""
    if rng.random() < 0.4:
        return damaged_bytes(rng, data)
    chunks, place = [], 8
    while place + 8 <= len(data):
        (size,) = struct.unpack_from(">I", data, place)
        chunks.append((data[place + 4 : place + 8], data[place + 8 : place + 8 + size]))
        place += 12 + size
    way, head = rng.random(), bytearray(chunks[0][1])
    if way < 0.4:
        sizes = pick(
            rng, ((2**31 - 1, 2**31 - 1), (30_000, 30_000), (0, 5), (10**6, 1), (4, 5))
        )
        head[:8] = struct.pack(">II", *sizes)
    elif way < 0.6:
        head[8:13] = rng.bytes(5)
    elif way < 0.8:
        bomb = zlib.compress(bytes(10**8), 1)
        chunks.insert(1, (pick(rng, (b"zTXt", b"iCCP", b"iTXt")), b"x\0\0" + bomb))
    else:
        chunks.insert(1, (b"IDAT", zlib.compress(bytes(10**8), 1)))
    chunks[0] = (b"IHDR", bytes(head))
    made = data[:8]
    for kind, body in chunks:
        raw = kind + body
        made += struct.pack(">I", len(body)) + raw + struct.pack(">I", zlib.crc32(raw))
    return made


def safetensors(rng: Rng, data: bytes) -> bytes:
    """A header that says something else, or other bytes."""
    if rng.random() < 0.35:
        return damaged_bytes(rng, data)
    size = int.from_bytes(data[:8], "little")
    try:
        header = json.loads(data[8 : 8 + size])
    except ValueError:
        return damaged_bytes(rng, data)
    rest = data[8 + size :]
    way = rng.random()
    if way < 0.15:
        claimed = pick(rng, (2**63, 2**40, 0, 7, size + 1, size - 1, 100 * 10**6))
        return claimed.to_bytes(8, "little") + data[8:]
    about = header.get("__metadata__", {})
    if rng.random() < 0.6:  # as a file of ours that never had a checksum
        about.pop(KEY, None)
        about.pop("format_version", None)
    names = [name for name in header if name != "__metadata__"]
    name = pick(rng, names) if names else "x"
    entry = header.get(name, {})
    if way < 0.3:
        entry["shape"] = pick(
            rng, ([2**40, 2**40], [0], [], [10**12], [-1], entry.get("shape"))
        )
    elif way < 0.4:
        entry["dtype"] = pick(rng, ("F64", "F16", "BOOL", "I8", "X", "F8_E4M3", "U64"))
    elif way < 0.5:
        entry["data_offsets"] = pick(rng, ([0, 0], [0, 2**60], [4, 0], [-1, 4], [0, 4]))
    elif way < 0.6:
        header[pick(rng, ("x", "", "a" * 10_000, "../x", "\x1b[31m"))] = header.pop(name, {})
    elif way < 0.7:
        header.pop(name, None)
    elif way < 0.8:
        rest = rng.bytes(len(rest)) if len(rest) < 10**6 else rest
    elif way < 0.9:
        header["__metadata__"] = pick(
            rng,
            (
                {},
                {"format_version": "9"},
                {"format_version": "2"},
                {"x": "y" * 10**6},
                {"x": 3},
            ),
        )
    else:
        header = changed_value(rng, header)
    raw = _dumped(header).encode("utf-8", "replace")
    raw += b" " * (-len(raw) % 8)
    return len(raw).to_bytes(8, "little") + raw + rest
