"""Files we write are whole, checked and locked; files we read are bounded."""

import errno
import io
import json
import os
import stat
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors import safe_open

from psidiff import files, limits
from psidiff.checksums import Damaged, bytes_of, check_zip_seal, reading, with_checksum
from psidiff.data.images import write_png
from psidiff.locks import Lock, Locked, held_by

TENSORS = {
    "a": torch.randn(3, 4),
    "ids": torch.arange(5),
    "none": torch.zeros(0),
    "scale": torch.tensor(1.5, dtype=torch.bfloat16),
}
RECORDS = [{"step": i, "loss": i / 10, "norm": 1e16 * 2**0.5 + i} for i in range(3)]


def _lines(path, records=RECORDS):
    with path.open("ab") as file:
        for record in records:
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
    "line.jsonl": (
        lambda path: _lines(path, [{"step": 7, "loss": 2.0000000000000004}]),
        files.read_json_lines,
    ),
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


def test_lines_whose_checksum_is_of_their_values_are_read_as_before(tmp_path):
    path = tmp_path / "a.jsonl"
    lines = [json.dumps(with_checksum(record)) for record in RECORDS]
    path.write_text("\n".join(lines[:2]) + "\n")
    _lines(path, RECORDS[2:])  # a run that goes on
    assert files.read_json_lines(path) == RECORDS
    path.write_text(path.read_text().replace('"step": 1', '"step": 3'))
    with pytest.raises(Damaged, match=r"line 2 of .* is damaged: its checksum"):
        files.read_json_lines(path)


def test_lines_that_are_damaged_are_left_out_and_said_when_asked(tmp_path):
    path, said = tmp_path / "a.jsonl", []
    _lines(path)
    path.write_bytes(path.read_bytes().replace(b'"step": 1', b'"step": 3'))
    assert files.read_json_lines(path, skip=said.append) == [RECORDS[0], RECORDS[2]]
    assert len(said) == 1 and said[0].startswith(f"line 2 of {path} is damaged")


def test_a_write_that_fails_leaves_what_was_there(tmp_path):
    path = tmp_path / "a.json"
    files.write_object(path, {"a": 1})
    with pytest.raises(KeyError), files.writing(path) as file:
        file.write(b"half")
        raise KeyError
    assert files.read_object(path) == {"a": 1}
    assert os.listdir(tmp_path) == ["a.json"]


def test_two_writers_of_one_file_never_share_a_name(tmp_path):
    path = tmp_path / "a.bin"
    with files.writing(path) as one, files.writing(path) as other:
        assert one.name != other.name and str(path) not in (str(one.name), str(other.name))
        other.write(b"other")
        one.write(b"one")
    assert path.read_bytes() == b"one" and os.listdir(tmp_path) == ["a.bin"]


def test_a_picture_that_cannot_be_written_whole_leaves_what_was_there(tmp_path, monkeypatch):
    path, image = tmp_path / "a.png", np.zeros((2, 2), np.uint8)
    write_png(image, path)
    held = path.read_bytes()
    monkeypatch.setattr(os, "fsync", lambda file: (_ for _ in ()).throw(OSError(28, "full")))
    with pytest.raises(OSError, match=r"a\.png cannot be written"):
        write_png(image + 1, path)
    assert path.read_bytes() == held and os.listdir(tmp_path) == ["a.png"]


def test_a_file_keeps_the_rights_that_others_have(tmp_path):
    files.write_object(tmp_path / "a.json", {})
    files.save_tensors(tmp_path / "a.safetensors", TENSORS)
    modes = {path.stat().st_mode for path in tmp_path.iterdir()}
    assert len(modes) == 1


def test_equal_tensors_make_equal_bytes_in_every_process(tmp_path):
    """safetensors itself orders a file's metadata anew in each process."""
    write = (
        "import sys, torch; from pathlib import Path; from psidiff.files import save_tensors; "
        "save_tensors(Path(sys.argv[1]), {'w': torch.arange(3.0)}, {'format': 'pt', 'a': 'b'})"
    )
    for i in range(4):
        subprocess.run([sys.executable, "-c", write, tmp_path / str(i)], check=True)
    assert len({path.read_bytes() for path in tmp_path.iterdir()}) == 1


@pytest.mark.parametrize("name", files.DTYPES)
def test_tensors_of_every_kind_are_what_safetensors_reads(tmp_path, name):
    dtype = files.DTYPES[name]
    value = torch.arange(6).view(2, 3).to(dtype)
    tensors = {"a": value, "one": value[1, 2], "none": value[:0], "odd": torch.ones(3) == 1}
    files.write_safetensors(tmp_path / "a", tensors, {"format": "pt", "ü": '"'})
    with safe_open(tmp_path / "a", "pt") as file:
        assert file.metadata() == {"format": "pt", "ü": '"'}
        assert set(file.keys()) == set(tensors)
        for key, wanted in tensors.items():
            found = file.get_tensor(key)
            assert found.dtype == wanted.dtype
            assert found.shape == wanted.shape
            assert bytes_of(found).tobytes() == bytes_of(wanted).tobytes()


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

    for number, words in ((errno.EINVAL, "is damaged: "), (errno.EIO, "cannot be read: ")):
        failing = pytest.raises(ValueError, match=rf"a\.npz {words}")
        with failing as found, reading(tmp_path / "a.npz"):
            fails(number)
        assert isinstance(found.value, Damaged) == (number == errno.EINVAL)


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


@pytest.mark.parametrize("header", [b"-" * 9000 + b"1\n", b"(" * 9000, b"[" * 900, b"{}"])
def test_an_array_whose_header_is_none_is_damage(tmp_path, header):
    size = len(header).to_bytes(2, "little")
    (tmp_path / "a.npy").write_bytes(b"\x93NUMPY\x01\x00" + size + header)
    with pytest.raises(Damaged, match=r"a\.npy is damaged"):
        files.load_array(tmp_path / "a.npy")


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


def reader_of(pipe):
    """What comes out of a pipe, read by a thread until it is closed."""
    found = []
    thread = threading.Thread(target=lambda: found.append(pipe.read_bytes()), daemon=True)
    thread.start()
    return thread, found


def test_a_pipe_gets_what_is_written_and_stays_a_pipe(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    thread, found = reader_of(pipe)
    files.save_arrays(pipe, {"a": np.arange(3)})
    thread.join(timeout=60)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    (tmp_path / "a.npz").write_bytes(found[0])
    assert files.load_arrays(tmp_path / "a.npz")["a"].tolist() == [0, 1, 2]


def test_a_device_is_written_to_and_stays_a_device():
    first, second = os.openpty()
    name = Path(os.ttyname(second))
    files.write_atomic(name, "words")
    assert os.read(first, 9) == b"words" and stat.S_ISCHR(name.stat().st_mode)
    os.close(first), os.close(second)


def test_standard_output_takes_files_too(tmp_path):
    link = tmp_path / "stdout"  # not the machine's own, which code that is wrong could replace
    link.symlink_to("/proc/self/fd/1")
    code = f"from psidiff import files; files.write_atomic(files.Path({str(link)!r}), 'a')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert done.stdout == b"a" and link.is_symlink()


def test_a_link_is_written_through(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "link.json").symlink_to("there/a.json")
    for value in (1, 2):  # a new file, and one that is there
        files.write_object(tmp_path / "link.json", {"a": value})
        assert (tmp_path / "link.json").is_symlink()
        assert files.read_object(tmp_path / "there/a.json") == {"a": value}


def test_a_file_that_is_written_again_keeps_its_mode(tmp_path):
    for path in (tmp_path / "a.json", tmp_path / "a.safetensors"):
        path.touch()
        path.chmod(0o600)
    files.write_object(tmp_path / "a.json", {})
    files.save_tensors(tmp_path / "a.safetensors", TENSORS)
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o600}


@pytest.mark.parametrize("letter", ["y", "\u00fc", "\U0001f600"])
def test_the_longest_names_can_be_written(tmp_path, letter):
    name = letter * (255 // len(letter.encode()))
    files.write_object(tmp_path / name, {"a": 1})
    assert os.listdir(tmp_path) == [name]


def test_only_what_killed_processes_left_is_removed(tmp_path):
    with suppress(KeyboardInterrupt), files.writing(tmp_path / "a b\nc.json") as part:
        left = Path(part.name).name
        raise KeyboardInterrupt
    kept = ["a.json", "mine.part", ".hidden.part", ".a.json.12-0123abcd.parts"]
    for name in (*kept, left, ".log.jsonl.12-0123abcd.part"):
        (tmp_path / name).touch()
    files.remove_parts(tmp_path)
    files.remove_parts(tmp_path / "absent")
    assert sorted(os.listdir(tmp_path)) == sorted(kept)
