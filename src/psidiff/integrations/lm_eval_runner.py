"""lm-evaluation-harness, run on our models with tasks from local files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml

from ..data.hub import hub_offline, unreachable_reason
from ..data.source_files import NotHere
from ..evaluation.multiple_choice import TASKS, Question
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
    for task in sorted(tasks, key=_is_here):  # what is not here first: it is what is said
        try:
            fetch([task])
        except Exception as error:  # of the hub, of the files, of the library: of many kinds
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            get = f" ({TASKS[task].data.how_to_get()})" if task in TASKS else ""
            raise ValueError(
                f"the data of {task} are not in PSIDIFF_DATA{get}, not in the Hub's cache, and "
                f"cannot be fetched: {silent or first}"
            ) from error


def _is_here(task: str) -> bool:
    return task in TASKS and TASKS[task].data.local() is not None


def local_tasks(folder: str | Path, names: Iterable[str] = tuple(TASKS)) -> str:
    """Tasks of the harness whose files are at hand, written to a folder: its include_path.

    Those of `psidiff.evaluation.multiple_choice.TASKS`: arc_easy, arc_challenge, openbookqa,
    piqa, hellaswag, winogrande and mathqa. Each is a folder of its name, or of its name on the
    Hub, below PSIDIFF_DATA, with Parquet or JSON lines in the columns of the Hub; or it is
    NAME.parquet, NAME.jsonl, mcq/NAME.jsonl (query, choices, gold), piqa/valid.jsonl with
    piqa/valid-labels.lst, or mcq/hellaswag_val_full.txt with six lines a question. Words and
    metrics are those of the harness; where a file has a query, the words are the file's.
    """
    folder = Path(folder).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    wanted = [TASKS[name] for name in names if name in TASKS]
    here = [(task, parts) for task in wanted if (parts := task.data.local()) is not None]
    for task, parts in here:
        _write_task(folder, task.data.name, task.questions(parts))
    if not here:
        raise NotHere(
            "there is no file of a known task: PSIDIFF_DATA may name the folder that has "
            "mcq/arc_easy.jsonl, piqa/valid.jsonl or arc_easy/test.parquet"
        )
    return str(folder)


def _write_task(folder: Path, name: str, questions: Iterable[Question]) -> None:
    """Its questions as JSON lines, and how the harness reads them."""
    data, each = folder / f"{name}.jsonl", None
    with data.open("w", encoding="utf-8") as file:
        for each in questions:
            file.write(json.dumps(_for_harness(each)) + "\n")
    if each is None:
        raise ValueError(f"the file of {name} has no questions in it")
    several = len(each.contexts) > 1
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
        "doc_to_text": "gold" if several else "text",
        "doc_to_target": "continuation" if several else "gold",
        "doc_to_choice": "choices",
        "metric_list": [{"metric": metric, **means} for metric in ("acc", "acc_norm")],
    }
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(task), encoding="utf-8")


def _for_harness(question: Question) -> dict[str, Any]:
    """A question as a row; contexts that differ are what the harness chooses from."""
    contexts, answers, gold = question
    if len(contexts) > 1:
        return {"choices": contexts, "continuation": answers[0], "gold": gold}
    return {"text": contexts[0], "choices": answers, "gold": gold}


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
