"""The records of a comparison: sealed, checked, and written by one process at a time."""

import errno
import json
import os

import pytest
from test_report import record

from psidiff import files
from psidiff.experiment.results_log import Protocol, ResultsLog
from psidiff.files import append_json_lines, read_json_lines

ONE, TWO, THREE = (record("fb", steps, 1.0) for steps in (2, 4, 8))


@pytest.fixture
def two(tmp_path):
    """A book of two records."""
    made = ResultsLog(tmp_path, Protocol(), 0)
    made.add(ONE)
    made.add(TWO)
    return made


def test_records_come_back_as_they_were_added(two, tmp_path):
    assert ResultsLog(tmp_path, Protocol(), 0).records() == [ONE, TWO]
    assert all("checksum" in json.loads(line) for line in two.path.read_text().splitlines())


def test_a_damaged_record_is_one_sentence(two, tmp_path):
    kept = two.path.read_bytes()
    for place in range(0, len(kept), 97):
        two.path.write_bytes(kept[:place] + bytes([kept[place] ^ 4]) + kept[place + 1 :])
        with pytest.raises(ValueError, match=r"of .*cells-0.jsonl is damaged: "):
            two.records()


def test_a_book_of_version_1_goes_on_with_checksums(tmp_path):
    old = [{**each, "format_version": 1} for each in (ONE, TWO)]
    half = json.dumps(old[0])[:40]  # of a run that was killed, before the next one went on
    path = tmp_path / "cells-0.jsonl"
    path.write_text(f"{json.dumps(old[0])}\n{half}\n{json.dumps(old[1])}\n{half}")
    made = ResultsLog(tmp_path, Protocol(), 0)
    assert made.records() == old
    made.add(THREE)
    assert made.records() == read_json_lines(path) == [*old, THREE]
    assert path.read_bytes().count(b"checksum") == 3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"cell": 3}, "its cell is not one"),
        ({"cell": {**ONE["cell"], "steps": "many"}}, "its steps \\('many'\\) is not one"),
        ({"measures": [[]]}, "its list of measures is not one"),
        ({"measures": [{"name": "NLL", "value": "x"}]}, "its measure's value \\('x'\\) is not"),
        ({"nfe": None}, "its nfe \\('None'\\) is not one"),
        ({"format_version": 7}, "record 2 of .*cells-0.jsonl has format_version 7"),
    ],
)
def test_what_a_record_says_is_checked(change, words, tmp_path):
    made = ResultsLog(tmp_path, Protocol(), 0)
    append_json_lines(made.path, [ONE, {**TWO, **change}])
    with pytest.raises(ValueError, match=words):
        made.records()


def test_two_processes_do_not_add_to_the_same_part(tmp_path):
    words = f"process {os.getpid()} on .* comparing there"
    with ResultsLog(tmp_path, Protocol(), 0).lock, ResultsLog(tmp_path, Protocol(), 1).lock:
        other = ResultsLog(tmp_path, Protocol(), 0)
        with pytest.raises(ValueError, match=words), other.lock:
            pass
    with ResultsLog(tmp_path, Protocol(), 0).lock:
        pass


def test_half_a_line_of_a_killed_run_does_not_count(two, tmp_path):
    with two.path.open("a") as file:
        file.write('{"cell": {"a": 2}, "unfini')
    again = ResultsLog(tmp_path, Protocol(), 0)
    assert again.records() == [ONE, TWO]
    again.add(THREE)
    assert again.records() == [ONE, TWO, THREE]


def test_a_full_disk_names_the_file_and_leaves_no_half_record(two, monkeypatch):
    before = two.path.read_bytes()

    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match=r"cells-0.jsonl cannot be written: No space left"):
        two.add(THREE)
    assert two.path.read_bytes() == before


def test_lines_of_no_record_are_refused(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n{"half\n{"a": 2}\n')
    assert (
        read_json_lines(path, cut_lines=True) == [{"a": 1}, {"a": 2}]
        and read_json_lines(tmp_path / "none") == []
    )
    for text in ("\x00\x01\n", "[1]\n"):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"line 1 of .*a.jsonl is damaged"):
            read_json_lines(path, cut_lines=True)
