"""Files we write are whole, checked and locked; files we read are bounded."""

import errno
import io
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
import yaml

from psidiff import files, limits
from psidiff.checksums import Damaged, check_zip_seal
from psidiff.locks import Lock, Locked, held_by

TENSORS = {
    "a": torch.randn(3, 4),
    "ids": torch.arange(5),
    "none": torch.zeros(0),
    "scale": torch.tensor(1.5, dtype=torch.bfloat16),
}
RECORDS = [{"step": i, "loss": i / 10} for i in range(3)]


def _lines(path):
    with path.open("ab") as file:
        for record in RECORDS:
            files.append_json_line(file, record)


KINDS = {
    "model.safetensors": (
        lambda path: files.save_tensors(path, TENSORS, {"format": "pt"}),
        files.load_tensors,
    ),
    "shard.npz": (
        lambda path: files.save_arrays(path, {"tokens": np.arange(40), "nfe": np.zeros(2)}),
        files.load_arrays,
    ),
    "facts.json": (
        lambda path: files.write_object(path, {"step": 3, "unread": [[1.5, 2]]}, indent=1),
        files.read_object,
    ),
    "config.yaml": (
        lambda path: files.write_checked_text(path, "name: a\nseed: 3\n"),
        files.read_checked_text,
    ),
    "log.jsonl": (_lines, files.read_json_lines),
}


@pytest.mark.parametrize("name", KINDS)
def test_every_single_flipped_bit_is_found(tmp_path, name):
    write, read = KINDS[name]
    path = tmp_path / name
    write(path)
    whole = path.read_bytes()
    read(path)
    for bit in range(8 * len(whole)):
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        with pytest.raises(ValueError):
            read(path)


def test_what_is_written_is_what_is_read(tmp_path):
    for name, (write, _) in KINDS.items():
        write(tmp_path / name)
    tensors, about = files.load_tensors(tmp_path / "model.safetensors")
    assert all(torch.equal(tensors[name], TENSORS[name]) for name in TENSORS)
    assert about["format"] == "pt"
    arrays = files.load_arrays(tmp_path / "shard.npz")
    assert arrays["tokens"].tolist() == list(range(40))
    assert files.read_object(tmp_path / "facts.json") == {"step": 3, "unread": [[1.5, 2]]}
    assert files.read_checked_text(tmp_path / "config.yaml").startswith(b"name: a\nseed: 3\n")
    assert files.read_json_lines(tmp_path / "log.jsonl") == RECORDS
    assert not list(tmp_path.glob(".*"))  # no file under another name is left


def test_files_without_checksums_are_read_as_before(tmp_path):
    np.savez_compressed(tmp_path / "old.npz", tokens=np.arange(3))
    assert not check_zip_seal(tmp_path / "old.npz")
    assert files.load_arrays(tmp_path / "old.npz")["tokens"].tolist() == [0, 1, 2]
    (tmp_path / "old.json").write_text('{"format_version": 1, "a": 2}')
    assert files.read_object(tmp_path / "old.json") == {"a": 2}
    (tmp_path / "old.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert files.read_json_lines(tmp_path / "old.jsonl") == [{"step": 1}, {"step": 2}]


def test_a_write_that_fails_leaves_what_was_there(tmp_path):
    path = tmp_path / "a.json"
    files.write_object(path, {"a": 1})
    with pytest.raises(KeyError), files.writing(path) as file:
        file.write(b"half")
        raise KeyError
    assert files.read_object(path) == {"a": 1}
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_file_keeps_the_rights_that_others_have(tmp_path):
    files.write_object(tmp_path / "a.json", {})
    files.save_tensors(tmp_path / "a.safetensors", TENSORS)
    modes = {path.stat().st_mode for path in tmp_path.iterdir()}
    assert len(modes) == 1


def test_only_regular_files_are_opened(tmp_path):
    os.mkfifo(tmp_path / "a.png")
    with pytest.raises(ValueError, match="no regular file"):
        limits.regular_file(tmp_path / "a.png")
    with pytest.raises(ValueError, match="is a folder"):
        limits.regular_file(tmp_path)
    with pytest.raises(ValueError, match="there is no file"):
        limits.regular_file(tmp_path / "none")


BOMBS = {
    "aliases": "a0: &a0 [x]\n"
    + "".join(f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12)),
    "depth": "[" * 500,
    "recursion": "&a {b: *a}",
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_few_lines_of_yaml_cannot_fill_the_machine(name):
    with pytest.raises(ValueError, match=r"bomb\.yaml") as found:
        limits.parse_yaml(BOMBS[name], "bomb.yaml")
    assert len(str(found.value)) < 200


@pytest.mark.parametrize(
    "text",
    [
        *("!!bool zz", "!!int ''", "!!int _", "!!float zz", "!!timestamp zz", "2001-99-99"),
        *("1" + ":1" * 400 + ".0", "!!int [a]", "!!binary [a]", "<<: 3", "? [a]\n: b"),
    ],
)
def test_a_value_that_is_none_of_its_kind_is_an_error_of_yaml(text):
    with pytest.raises(yaml.YAMLError):
        limits.parse_yaml(f"a: {text}" if "\n" not in text else text, "a.yaml")


def test_a_number_to_base_60_has_no_thousand_digits():
    assert limits.parse_yaml("a: 190:20:30", "a.yaml") == {"a": 685230}
    for kind in ("", "!!int ", "!!float "):
        with pytest.raises(yaml.YAMLError, match="characters"):
            limits.parse_yaml(f"a: {kind}1" + ":1" * 500_000, "a.yaml")


def test_json_of_too_many_values_is_refused_before_it_is_made(monkeypatch):
    for text in (b"[" + b"{}," * 4_000_000 + b"1]", "[" + "[]," * 4_000_000 + "1]"):
        with pytest.raises(ValueError, match=r"a\.json has about .* PSIDIFF_LIMITS=values="):
            limits.parse_json(text, "a.json")
    long = '"' + ",[{" * 3_000_000 + '\\\\\\",' * 10 + '"'
    assert len(limits.parse_json(f"[{long}, 1]", "a.json")) == 2
    monkeypatch.setenv("PSIDIFF_LIMITS", "values=9")
    assert limits.parse_json('{"a": [1, 2, "\\",,,,,,"]}', "a.json")["a"][0] == 1
    with pytest.raises(ValueError, match="has about 10 values"):
        limits.parse_json("[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]", "a.json")


def test_a_place_that_an_archive_names_and_that_is_none_is_damage(tmp_path):
    def fails(number):
        raise OSError(number, os.strerror(number))

    for number, kind in ((errno.EINVAL, Damaged), (errno.EIO, OSError)):
        with pytest.raises(kind), files._damaged_where_it_fails(tmp_path / "a.npz"):
            fails(number)


def test_a_stream_that_gives_too_much_says_once_what_lets_it_pass(monkeypatch):
    def read():
        stream = limits.BoundedStream(io.BytesIO(bytes(2**27)), 1_000, "a.gz")
        return len(io.BufferedReader(stream, 2**20).read())

    with pytest.raises(ValueError, match="set PSIDIFF_LIMITS=") as found:
        read()
    monkeypatch.setenv("PSIDIFF_LIMITS", str(found.value).rpartition("PSIDIFF_LIMITS=")[2])
    assert read() == 2**27


def test_json_that_nests_too_deeply_is_refused(tmp_path):
    for depth in (200, 100_000):
        (tmp_path / "a.json").write_text('{"a":' * depth + "1" + "}" * depth)
        with pytest.raises(ValueError, match="deep"):
            files.read_json(tmp_path / "a.json")


def test_an_archive_that_unpacks_to_too_much_is_refused(tmp_path, monkeypatch):
    np.savez_compressed(tmp_path / "zeros.npz", a=np.zeros(20_000_000))
    with pytest.raises(ValueError, match=r"times its size.*PSIDIFF_LIMITS=ratio="):
        files.load_arrays(tmp_path / "zeros.npz")
    monkeypatch.setenv("PSIDIFF_LIMITS", "ratio=100000")
    assert files.load_arrays(tmp_path / "zeros.npz")["a"].shape == (20_000_000,)
    monkeypatch.setenv("PSIDIFF_LIMITS", "ratios=3")
    with pytest.raises(ValueError, match="the names are text"):
        limits.limits()


def test_a_lock_keeps_a_second_process_out_and_names_the_first(tmp_path):
    path = tmp_path / "run" / "lock"
    with Lock(path, "training"):
        assert held_by(path)["pid"] == os.getpid()
        with pytest.raises(Locked, match=f"process {os.getpid()} .* is training there"):
            Lock(path, "training").__enter__()
    assert held_by(path) is None and not path.exists()


def test_an_owner_that_nests_is_none(tmp_path):
    (tmp_path / "lock").write_bytes(b"[" * 4096)
    with Lock(tmp_path / "lock", "training"):
        assert held_by(tmp_path / "lock")["pid"] == os.getpid()


def test_a_killed_process_leaves_no_lock(tmp_path):
    code = (
        "import os, sys; from pathlib import Path; from psidiff.locks import Lock\n"
        "Lock(Path(sys.argv[1]), 'training').__enter__(); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "lock")], check=False)
    assert (tmp_path / "lock").exists() and held_by(tmp_path / "lock") is None
    with Lock(tmp_path / "lock", "training"):
        pass


def test_without_kernel_locks_the_owner_in_the_file_decides(tmp_path, monkeypatch):
    monkeypatch.setattr("psidiff.locks.fcntl", None)
    path = tmp_path / "lock"
    with Lock(path, "training"):
        with pytest.raises(Locked, match="--force"):
            Lock(path, "training").__enter__()
        with Lock(path, "training", force=True):
            pass
        path.write_text('{"pid": 999999999, "host": "' + os.uname().nodename + '"}')
        with Lock(path, "training"):  # that process is gone
            pass


def test_damage_is_a_value_error_with_the_file_and_what_to_do(tmp_path):
    path = tmp_path / "a.json"
    files.write_object(path, {"a": 1})
    path.write_text(path.read_text().replace('"a": 1', '"a": 2'))
    with pytest.raises(Damaged, match=r"a\.json is damaged: its checksum .*; copy it again"):
        files.read_object(path)
