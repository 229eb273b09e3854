"""Multiple choice: the seven tasks of the paper, read from files as the harness asks them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..checksums import in_short, one_line
from ..data.published import Published
from ..data.source_files import SourceFile
from ..data.text_sources import rows, text_of
from ..limits import read_text


class Question(NamedTuple):
    """A question with its answers, of which number `gold` is right.

    Args:
        contexts: what stands before the answers: one text, or one for each answer.
        answers: a text for each, or one that follows every context.
        gold: which pair of them is right.
    Example:
        >>> Question(("Two and two are",), ("four", "five"), 0).pairs()
        [('Two and two are', ' four'), ('Two and two are', ' five')]
    """

    contexts: tuple[str, ...]
    answers: tuple[str, ...]
    gold: int

    def pairs(self) -> list[tuple[str, str]]:
        """(context, continuation) of each answer, a space between them."""
        count = max(len(self.contexts), len(self.answers))
        before, after = (
            each if len(each) == count else each * count
            for each in (self.contexts, self.answers)
        )
        return [(b, f" {a}") for b, a in zip(before, after, strict=True)]


Row = dict[str, Any]
Found = tuple[Any, Any, Any]  # contexts, answers, the number of the right one


@dataclass(frozen=True)
class Task:
    """A task: its data, and how a row of them becomes contexts, answers and the right one."""

    data: Published
    read: Callable[[Row, str], Found]

    def questions(self, parts: Iterable[SourceFile] | None = None) -> Iterator[Question]:
        """The questions of its files, in order; parts: of these instead of its own."""
        parts = self.data.local() if parts is None else parts
        if parts is None:
            raise self.data.missing()
        for part in parts:
            if part.kind == ".txt":
                yield from _six_lines(part)
            else:
                yield from self._rows(part)

    def question(self, row: Any, place: str) -> Question:
        """The question of a row; place: where it is, for the sentence where it is none."""
        if not isinstance(row, dict):
            raise ValueError(f"{place} must be an object, got {in_short(row)}")
        return _checked(*(_plain if _is_plain(row) else self.read)(row, place), place)

    def _rows(self, part: SourceFile) -> Iterator[Question]:
        labels, number = _labels_beside(part), 0
        for number, (place, row) in enumerate(rows(part), 1):
            if isinstance(row, dict) and number <= len(labels) and "label" not in row:
                row = {**row, "label": labels[number - 1]}
            yield self.question(row, place)
        if labels and len(labels) != number:
            raise ValueError(f"{part} has {number:,} questions, and {len(labels):,} labels")


def _checked(contexts: Any, answers: Any, gold: Any, place: str) -> Question:
    """A question whose parts are text, two pairs or more, one of which is right."""
    texts = [*contexts, *answers] if isinstance(contexts, list | tuple) else []
    count = max(len(contexts), len(answers)) if texts else 0
    if count < 2 or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{place} must have two answers or more, all of them text")
    said = str(gold).strip()
    if isinstance(gold, bool) or not said.isdecimal() or int(said) >= count:
        raise ValueError(
            f"{place} must say which of its {count} answers is right, got {in_short(gold)}"
        )
    return Question(tuple(contexts), tuple(answers), int(said))


def _is_plain(row: Row) -> bool:
    return "gold" in row and ("query" in row or "context_options" in row)


def _plain(row: Row, place: str) -> Found:
    """A row that has its answers and the number of the right one; a query that opens with
    "Question:" is closed by "Answer:"."""
    if "context_options" in row:
        return row["context_options"], [text_of(row, "continuation", place)], row["gold"]
    query = text_of(row, "query", place).strip()
    asks = query + "\nAnswer:" * query.startswith("Question:")
    return [asks], _list(row, "choices", place), row["gold"]


def _list(row: Row, name: str, place: str) -> list[Any]:
    if not isinstance(row.get(name), list):
        known = ", ".join(map(str, list(row)[:8])) or "none"
        raise ValueError(f"{place} has no list in {name!r}; its columns are {one_line(known)}")
    found: list[Any] = row[name]
    return found


def _with_key(stem: str, asks: str) -> Callable[[Row, str], Found]:
    """A reader of rows whose choices have labels, and whose answerKey is one of them. As they
    came, the question is an object with a stem and a list of choices."""

    def read(row: Row, place: str) -> Found:
        held = row.get("question")
        if isinstance(held, dict):
            pairs = [each for each in _list(held, "choices", place) if isinstance(each, dict)]
            choices = {name: [each.get(name) for each in pairs] for name in ("text", "label")}
            row = {**row, stem: held.get("stem"), "choices": choices}
        question, held = text_of(row, stem, place), row.get("choices")
        if not isinstance(held, dict):
            raise ValueError(f"{place} has no choices with text and label")
        labels = _list(held, "label", place)
        key = text_of(row, "answerKey", place).strip()
        gold = labels.index(key) if key in labels else None
        return [asks.format(question)], _list(held, "text", place), gold

    return read


def _piqa(row: Row, place: str) -> Found:
    answers = [text_of(row, name, place) for name in ("sol1", "sol2")]
    return [f"Question: {text_of(row, 'goal', place)}\nAnswer:"], answers, row.get("label")


def _hellaswag(row: Row, place: str) -> Found:
    activity, first, second = (
        text_of(row, name, place) for name in ("activity_label", "ctx_a", "ctx_b")
    )
    endings = _list(row, "endings", place)
    asks = _without_brackets(f"{activity}: {first} {second.capitalize()}")
    return [asks], [_without_brackets(each) for each in endings], row.get("label")


def _without_brackets(text: Any) -> str:
    """WikiHow's text without its marks in brackets, of which [title] ends a sentence."""
    title = str(text).strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", title).replace("  ", " ")


def _winogrande(row: Row, place: str) -> Found:
    """The blank is filled in the context, and what follows it is the continuation."""
    before, blank, after = text_of(row, "sentence", place).partition("_")
    if not blank:
        raise ValueError(f"{place} has no blank _ in its sentence")
    options = [text_of(row, name, place) for name in ("option1", "option2")]
    gold = {"1": 0, "2": 1}.get(text_of(row, "answer", place))
    return [before + option for option in options], [after.strip()], gold


_MARKED = re.compile(r"(?P<mark>[a-d]) \) (?P<text>.*?), |e \) (?P<last>.*?)$")


def _mathqa(row: Row, place: str) -> Found:
    """Answers are marked a ) to e ) in one text; as in the harness, each ends at its first
    comma but the last."""
    found = _MARKED.finditer(text_of(row, "options", place))
    answers = [(each["text"] if each["mark"] else each["last"]).rstrip(" ,") for each in found]
    asks = f"Question: {text_of(row, 'Problem', place)}\nAnswer:"
    key = text_of(row, "correct", place).strip()
    return [asks], answers, "abcde".index(key) if key in set("abcde") else None


def _labels_beside(part: SourceFile) -> list[str]:
    """Of PIQA as it came: labels are in a file of their own."""
    beside = part.path.with_name(f"{part.path.stem}-labels.lst")
    return read_text(beside).split() if part.member is None and beside.is_file() else []


def _six_lines(part: SourceFile) -> Iterator[Question]:
    """HellaSwag with six lines a question: what is asked, the right number, four answers."""
    lines = read_text(part.path).splitlines()
    for first in range(0, len(lines) - 5, 6):
        asks, gold, *choices = lines[first : first + 6]
        yield _checked([asks], choices, gold, f"line {first + 1} of {part}")


def _arc(name: str, config: str) -> Task:
    there = (f"mcq/{name}.jsonl",)
    columns = ("question", "choices", "answerKey")
    data = Published(name, f"allenai/ai2_arc/{config}", "test", columns, there)
    return Task(data, _with_key("question", "Question: {}\nAnswer:"))


def _task(name: str, hub: str, split: str, columns: str, files: str, read: Any) -> Task:
    there = tuple(files.split())
    return Task(Published(name, hub, split, tuple(columns.split()), there), read)


TASKS = {
    task.data.name: task
    for task in (
        _arc("arc_easy", "ARC-Easy"),
        _arc("arc_challenge", "ARC-Challenge"),
        _task(
            "openbookqa",
            "allenai/openbookqa/main",
            "test",
            "question_stem choices answerKey",
            "mcq/openbook_qa.jsonl",
            _with_key("question_stem", "{}"),
        ),
        _task(
            "piqa",
            "baber/piqa",
            "validation",
            "goal sol1 sol2 label",
            "piqa/valid.jsonl+piqa/valid-labels.lst mcq/piqa.jsonl",
            _piqa,
        ),
        _task(
            "hellaswag",
            "Rowan/hellaswag",
            "validation",
            "activity_label ctx_a ctx_b endings label",
            "mcq/hellaswag_val_full.txt",
            _hellaswag,
        ),
        _task(
            "winogrande",
            "allenai/winogrande/winogrande_xl",
            "validation",
            "sentence option1 option2 answer",
            "mcq/winogrande.jsonl winogrande_1.1/dev.jsonl "
            "winogrande_1.1.zip/winogrande_1.1/dev.jsonl",
            _winogrande,
        ),
        _task(
            "mathqa",
            "regisss/math_qa",
            "test",
            "Problem options correct",
            "MathQA/test.json MathQA.zip/test.json",
            _mathqa,
        ),
    )
}
"""The tasks of the paper, with the words and the parts of the harness."""
