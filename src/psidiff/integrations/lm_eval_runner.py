"""lm-evaluation-harness, run on our models with tasks from local files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml

from ..checksums import reading
from ..data.hub import hub_offline, unreachable_reason
from ..data.text_sources import find
from ..files import read_json_lines
from ..limits import read_text
from ..model import Model
from .lm_eval import INSTALLED, NEEDS, PsidiffLM


def check_installed() -> None:
    """The harness is there.

    Raises:
        ValueError: it is not.
    """
    if not INSTALLED:
        raise ValueError(NEEDS)


def run_harness(
    model: str | Path | Model | PsidiffLM,
    tasks: Sequence[str],
    *,
    limit: int | None = None,
    include_path: str | Path | None = None,
    num_fewshot: int | None = None,
    num_samples: int = 1024,
    **options: Any,
) -> dict[str, Any]:
    """Each metric of each task with its standard error over questions, as plain data.

    limit         only the first so many questions of a task
    include_path  a folder of tasks, such as `local_tasks` writes; None: the harness's own,
                  whose data come from a network

    The other options are those of PsidiffLM; one that is given keeps its own. `draws` says how
    sure the bounds are. acc_norm divides by the length of the continuation: it is meant for
    likelihood="suffix".
    """
    check_installed()
    manager = import_module("lm_eval.tasks").TaskManager(
        include_path=None if include_path is None else str(include_path),
        include_defaults=include_path is None,
    )
    for task in tasks:
        if task not in manager.all_tasks:
            where = "the harness" if include_path is None else str(include_path)
            raise ValueError(f"there is no task {task!r} in {where}")
    if not isinstance(model, PsidiffLM):
        model = PsidiffLM(model, num_samples=num_samples, **options)
    silent = unreachable_reason() if include_path is None else None
    with hub_offline() if silent else nullcontext():
        if include_path is None:
            _check_data(manager, tasks, silent)
        found = import_module("lm_eval").simple_evaluate(
            model=model,
            tasks=list(tasks),
            num_fewshot=num_fewshot,
            limit=limit,
            task_manager=manager,
            log_samples=False,
            random_seed=None,
            numpy_random_seed=None,
            torch_random_seed=None,
        )
    version = import_module("lm_eval").__version__
    about = {"harness": version, "num_fewshot": num_fewshot or 0, "limit": limit}
    return {
        "tasks": {name: _metrics(found, name) for name in found["results"]},
        "protocol": model.protocol | about,
        "draws": model.summary(),
    }


def _check_data(manager: Any, tasks: Sequence[str], silent: str | None) -> None:
    """The data of tasks must be there, or come: the harness fetches them while it loads."""
    fetch = getattr(manager, "load", None) or manager.load_task_or_group  # its older name
    for task in tasks:
        try:
            fetch([task])
        except Exception as error:  # of the hub, of the files, of the library: of many kinds
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ValueError(
                f"the data of {task} are not in PSIDIFF_DATA, not in the Hub's cache, and "
                f"cannot be fetched: {silent or first}"
            ) from error


def local_tasks(folder: str | Path) -> str:
    """Tasks of the harness whose files are at hand, written to a folder: its include_path.

    arc_easy, arc_challenge, openbookqa   mcq/NAME.jsonl (query, choices, gold)
    piqa        piqa/valid.jsonl (goal, sol1, sol2) and piqa/valid-labels.lst, or mcq/piqa.jsonl
    hellaswag   mcq/hellaswag_val_full.txt, six lines a question

    The files are looked for under PSIDIFF_DATA. Words and metrics are those of the harness; of
    hellaswag the words are as the file has them.
    """
    folder = Path(folder).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    written = False
    for name, sources in _LOCAL.items():
        for read, *files in sources:
            try:
                paths = [find(file) for file in files]
            except ValueError:
                continue
            with reading(paths[0]):
                questions = list(read(*paths))
            _write_task(folder, name, questions)
            written = True
            break
    if not written:
        raise ValueError(
            "there is no file of a known task: PSIDIFF_DATA may name the folder that has "
            "mcq/arc_easy.jsonl or piqa/valid.jsonl"
        )
    return str(folder)


def _plain(path: Path) -> Iterator[dict[str, Any]]:
    """A query with its choices; one that opens with "Question:" is closed by "Answer:"."""
    for record in read_json_lines(path, whole=True):
        query = record["query"].strip()
        asks = query + "\nAnswer:" * query.startswith("Question:")
        yield {"text": asks, "choices": record["choices"], "gold": record["gold"]}


def _piqa(path: Path, labels: Path) -> Iterator[dict[str, Any]]:
    golds = read_text(labels).split()
    for record, gold in zip(read_json_lines(path, whole=True), golds, strict=True):
        asks = f"Question: {record['goal']}\nAnswer:"
        yield {"text": asks, "choices": [record["sol1"], record["sol2"]], "gold": int(gold)}


def _hellaswag(path: Path) -> Iterator[dict[str, Any]]:
    lines = read_text(path).splitlines()
    for first in range(0, len(lines) - 5, 6):
        asks, gold, *choices = lines[first : first + 6]
        yield {"text": asks, "choices": choices, "gold": int(gold)}


_LOCAL: dict[str, list[Any]] = {  # how to read which files; the first that are there
    "arc_easy": [(_plain, "mcq/arc_easy.jsonl")],
    "arc_challenge": [(_plain, "mcq/arc_challenge.jsonl")],
    "openbookqa": [(_plain, "mcq/openbook_qa.jsonl")],
    "piqa": [(_piqa, "piqa/valid.jsonl", "piqa/valid-labels.lst"), (_plain, "mcq/piqa.jsonl")],
    "hellaswag": [(_hellaswag, "mcq/hellaswag_val_full.txt")],
}


def _write_task(folder: Path, name: str, questions: list[dict[str, Any]]) -> None:
    lines = (json.dumps(question) + "\n" for question in questions)
    data = folder / f"{name}.jsonl"
    data.write_text("".join(lines), encoding="utf-8")
    means = {"aggregation": "mean", "higher_is_better": True}
    task = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {
            "data_files": {"test": str(data)},
            "cache_dir": str(folder / "cache"),
        },
        "output_type": "multiple_choice",
        "test_split": "test",
        "doc_to_text": "text",
        "doc_to_target": "gold",
        "doc_to_choice": "choices",
        "metric_list": [{"metric": metric, **means} for metric in ("acc", "acc_norm")],
    }
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(task), encoding="utf-8")


def _metrics(found: dict[str, Any], task: str) -> dict[str, Any]:
    """{metric: {value, error}} and the number of questions, from the harness's own words."""
    numbers = found["results"][task]
    metrics: dict[str, Any] = {"questions": found["n-samples"].get(task, {}).get("effective")}
    for key, value in numbers.items():
        name, _, rest = key.partition(",")
        if rest and not name.endswith("_stderr"):
            error = numbers.get(f"{name}_stderr,{rest}")
            known = isinstance(error, (int, float))
            label = name if rest == "none" else f"{name},{rest}"
            metrics[label] = {"value": value, "error": error if known else None}
    return metrics
