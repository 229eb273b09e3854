"""What the design promises of the code, counted: lines, functions, files on a way, docstrings.

    python tests/count_code.py             prints the numbers
    python tests/count_code.py --write     lowers the bounds of tests/size.json to them

A bound never rises. Files on a way are those with a function that ran in a command, leaving out
what ran because a module was imported.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import io
import json
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
import tokenize
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "psidiff"
BOUNDS = Path(__file__).with_name("size.json")
LONGEST_BODY = 40
WEIGHTS = {"predict", "predict_slope"}
"""Attributes that hold the chance that a token is predicted."""
WAYS = {
    "sample": ["sample", "books", "--prompt", "The king", "--steps", "2", "--length", "24"],
    "train": ["train", "digits", "train.steps=2", "train.batch_size=4", "--out", "run"],
}

_NOT_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    tokenize.ENDMARKER,
}
Function = ast.FunctionDef | ast.AsyncFunctionDef


def sources() -> Iterator[tuple[Path, str]]:
    for path in sorted(SOURCE.rglob("*.py")):
        yield path, path.read_text(encoding="utf-8")


def lines_of_code(text: str) -> int:
    """Lines with a token on them; none of a comment, and no string that is a statement."""
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NOT_CODE:
            code |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if _is_text(node):
            code -= set(range(node.lineno, node.end_lineno + 1))  # type: ignore[attr-defined]
    return len(code)


def total_lines() -> int:
    return sum(lines_of_code(text) for _, text in sources())


def _is_text(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def functions(tree: ast.AST, around: str = "") -> Iterator[tuple[str, Function]]:
    """All functions of a module with their qualified names."""
    for node in ast.iter_child_nodes(tree):
        named = isinstance(node, Function | ast.ClassDef)
        name = f"{around}.{node.name}".lstrip(".") if named else around
        if isinstance(node, Function):
            yield name, node
        yield from functions(node, name)


def body_lines(function: Function) -> int:
    """From the first statement after the docstring to the last line."""
    body = function.body[1:] if _is_text(function.body[0]) else function.body
    return (function.end_lineno or 0) - body[0].lineno + 1 if body else 0


def long_functions() -> dict[str, int]:
    """Those with a body beyond 40 lines, by name; kernels are one formula and exempt."""
    found: dict[str, int] = {}
    for _, text in sources():
        for name, function in functions(ast.parse(text)):
            kernel = any("jit" in ast.unparse(each) for each in function.decorator_list)
            if (size := body_lines(function)) > LONGEST_BODY and not kernel:
                found[name] = max(size, found.get(name, 0))
    return found


def mixture_places() -> list[str]:
    """Functions that apply the Psi mixture: they compare something with the weight of predict.

    Of what forms mixtures (process/) and what multiplies them out (evaluation/) nothing counts.
    """
    found = []
    for path, text in sources():
        part = path.relative_to(SOURCE).parts[0]
        if part not in ("process", "evaluation"):
            named = functions(ast.parse(text))
            found += [f"{path.stem}.{name}" for name, function in named if _applies(function)]
    return found


def _applies(function: Function) -> bool:
    weights: set[str] = set()  # names of what the weight went into
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and _has_weight(node.value, weights):
            targets = [name for target in node.targets for name in ast.walk(target)]
            weights |= {name.id for name in targets if isinstance(name, ast.Name)}
    compared = [node for node in ast.walk(function) if isinstance(node, ast.Compare)]
    coins = [node for node in compared if not isinstance(node.comparators[0], ast.Constant)]
    return any(_has_weight(node, weights) for node in coins)


def _has_weight(node: ast.AST, names: set[str]) -> bool:
    methods = {id(each.func) for each in ast.walk(node) if isinstance(each, ast.Call)}
    return any(
        (isinstance(each, ast.Attribute) and each.attr in WEIGHTS and id(each) not in methods)
        or (isinstance(each, ast.Name) and each.id in names)
        for each in ast.walk(node)
    )


def public_names() -> dict[str, Any]:
    """What the packages offer in `__all__`, and the names of design.md, section 5, beside."""
    packages = ["psidiff"]
    packages += [
        f"psidiff.{each.name}" for each in pkgutil.iter_modules([str(SOURCE)]) if each.ispkg
    ]
    found: dict[str, Any] = {}
    for package in packages:
        module = importlib.import_module(package)
        found |= {f"{package}.{name}": getattr(module, name) for name in _offered(module)}
    for name, owner, attributes in CONTRACT:
        try:
            module = importlib.import_module(owner)
        except ImportError:  # of a package that need not be installed
            continue
        held = getattr(module, name)
        found[f"{owner}.{name}"] = held
        for attribute in attributes:
            found[f"{owner}.{name}.{attribute}"] = getattr(held, attribute)
    return {name: held for name, held in found.items() if callable(held)}


def _offered(module: Any) -> list[str]:
    return [name for name in getattr(module, "__all__", ()) if not name.startswith("__")]


# beside `__all__`, of design.md, section 5
CONTRACT: list[tuple[str, str, tuple[str, ...]]] = [
    ("Prior", "psidiff.process", ("probs", "sample")),
    ("LogLinear", "psidiff.process", ("alpha", "dalpha", "time")),
    ("Cosine", "psidiff.process", ("alpha", "dalpha", "time")),
    ("Mixture", "psidiff.process", ("probs", "sample")),
    ("SoftTokens", "psidiff.types", ()),
    ("Model", "psidiff", ("sample", "save", "compile", "from_pretrained", "push_to_hub")),
    ("load", "psidiff.integrations.official", ()),
    ("PsiScheduler", "psidiff.integrations.diffusers", ("step", "set_timesteps")),
    ("PsidiffLM", "psidiff.integrations.lm_eval", ()),
]


def missing_in_docstring(held: Any) -> list[str]:
    """Which of Args (each by name), Returns and an example a docstring lacks."""
    text = inspect.getdoc(held) if held.__doc__ else None
    if not text or (inspect.isclass(held) and not _own_docstring(held)):
        return ["docstring"]
    lacks = []
    named = [
        name for name in _parameters(held) if not re.search(rf"^\s+.*\b{name}\b", text, re.M)
    ]
    if _parameters(held) and "Args:" not in text:
        lacks.append("Args")
    elif named:
        lacks.append(f"Args: {', '.join(named)}")
    if _answers(held) and not re.search(r"^(Returns|Yields):", text, re.M):
        lacks.append("Returns")
    if ">>>" not in text:
        lacks.append("Example")
    return lacks


def _own_docstring(held: type) -> bool:
    """Not the signature that a dataclass writes where nobody wrote anything."""
    return not (held.__doc__ or "").startswith(f"{held.__name__}(")


def _parameters(held: Any) -> list[str]:
    try:
        signature = inspect.signature(held)
    except (TypeError, ValueError):
        return []
    if getattr(held, "_is_protocol", False):
        return []
    plain = [
        p
        for p in signature.parameters.values()
        if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    ]
    return [p.name for p in plain if p.name not in ("self", "cls")]


def _answers(held: Any) -> bool:
    if inspect.isclass(held):
        return False
    return inspect.signature(held).return_annotation not in (
        None,
        "None",
        inspect.Parameter.empty,
    )


def undocumented() -> dict[str, str]:
    """Public names whose docstring is not complete, and what it lacks."""
    lacking = {name: missing_in_docstring(held) for name, held in public_names().items()}
    return {name: ", ".join(lacks) for name, lacks in sorted(lacking.items()) if lacks}


def files_on_the_way(way: str) -> list[str]:
    """Files of src with a function that runs in a command, imports left out."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "files.json"
        done = subprocess.run(
            [sys.executable, __file__, "--trace", str(found), *WAYS[way]],
            cwd=folder, capture_output=True, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SOURCE.parent)},
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"psidiff {' '.join(WAYS[way])} failed: {done.stderr[-2000:]}")
        return json.loads(found.read_text())


def trace(found: str, command: list[str]) -> None:
    """Run a command, and write down the files whose functions it calls."""
    import threading

    seen: set[Any] = set()
    files: set[str] = set()

    def on_call(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if code in seen or not code.co_filename.startswith(str(SOURCE)):
            return
        if code.co_flags & inspect.CO_OPTIMIZED and not _importing(frame):
            seen.add(code)
            files.add(str(Path(code.co_filename).relative_to(SOURCE)))

    sys.argv = ["psidiff", *command]
    from psidiff.cli.main import main

    threading.settrace(on_call)
    sys.settrace(on_call)
    try:
        main()
    except SystemExit as stopped:
        if stopped.code:
            raise
    finally:
        sys.settrace(None)
    Path(found).write_text(json.dumps(sorted(files)))


def _importing(frame: FrameType) -> bool:
    """Whether a module of psidiff is being imported, and its body called this."""
    at: FrameType | None = frame
    while at is not None:
        if at.f_code.co_name == "<module>" and at.f_code.co_filename.startswith(str(SOURCE)):
            return True
        at = at.f_back
    return False


def counted() -> dict[str, Any]:
    """All numbers, in the form of tests/size.json."""
    return {
        "lines of code": total_lines(),
        "long functions": dict(sorted(long_functions().items())),
        "places that apply the mixture": mixture_places(),
        "files on the way": {way: files_on_the_way(way) for way in WAYS},
        "incomplete docstrings": undocumented(),
    }


def lowered(bounds: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """The bounds where they are lower already, else the numbers of now."""
    ways = {way: len(files) for way, files in now["files on the way"].items()}
    told = bounds["incomplete docstrings"]
    long = now["long functions"]
    return {
        "lines of code": min(bounds["lines of code"], now["lines of code"]),
        "long functions": {
            name: min(size, long[name])
            for name, size in bounds["long functions"].items()
            if name in long
        },
        "places that apply the mixture": min(
            bounds["places that apply the mixture"], len(now["places that apply the mixture"])
        ),
        "files on the way": {
            way: min(most, ways[way]) for way, most in bounds["files on the way"].items()
        },
        "incomplete docstrings": [
            name for name in told if name in now["incomplete docstrings"]
        ],
    }


def main() -> None:
    if sys.argv[1:2] == ["--trace"]:
        return trace(sys.argv[2], sys.argv[3:])
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="lower the bounds")
    write = parser.parse_args().write
    now = counted()
    print(json.dumps(now, indent=1))
    for way, files in now["files on the way"].items():
        print(f"psidiff {' '.join(WAYS[way])}: {len(files)} files")
    if write:
        bounds = json.loads(BOUNDS.read_text())
        BOUNDS.write_text(json.dumps(lowered(bounds, now), indent=1) + "\n")
    return None


if __name__ == "__main__":
    main()
