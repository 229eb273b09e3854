"""A folder of shards: many processes share it, and what is damaged in it is made good."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from psidiff import files, load
from psidiff.cli.main import main
from psidiff.experiment import sample_shards
from psidiff.experiment.sample_files import read_manifest, read_samples, read_shard
from psidiff.experiment.sample_shards import ShardedRun
from psidiff.locks import Lock
from psidiff.request import build_request

ASKED = ("sample", "shakespeare", "-n", 5, "--steps", 4, "--shard-size", 2, "--out", "few")
BIG = ("sample", "digits", "-n", 2000, "--steps", 8, "--out", "big", "--shard-size", 50)
QUIET = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


def contents(folder):
    return {f.name: f.read_bytes() for f in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """What ASKED makes, once."""
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as m:
        m.chdir(folder)
        m.setattr(sys, "argv", ["psidiff", *map(str, ASKED)])
        with pytest.raises(SystemExit):
            main()
    return folder / "few"


@pytest.fixture
def few(made, psidiff, tmp_path):
    shutil.copytree(made, tmp_path / "few")
    return tmp_path / "few"


def cut(data, chance):
    return data[: chance.randrange(len(data))]


def flipped(data, chance):
    place = chance.randrange(len(data))
    return data[:place] + bytes([data[place] ^ 1 << chance.randrange(8)]) + data[place + 1 :]


def emptied(data, chance):
    return b""


def replaced(data, chance):
    return chance.randbytes(len(data))


@pytest.mark.parametrize("damage", [cut, flipped, emptied, replaced])
@pytest.mark.parametrize("name", ["shard-00000.npz", "shard-00001.jsonl"])
def test_a_damaged_shard_is_said_and_made_again(name, damage, few, psidiff):
    before = contents(few)
    (few / name).write_bytes(damage(before[name], random.Random(3)))
    done = psidiff(*ASKED, "--resume")
    assert name in done.stderr and done.stderr.count("is damaged") == 1, done.stderr
    assert "5 of 5 samples in 3 shards" in done.stderr
    assert contents(few) == before


def test_shards_without_their_text_or_of_another_number_are_made_again(few, psidiff):
    before = contents(few)
    (few / "shard-00001.jsonl").unlink()
    arrays = files.load_arrays(few / "shard-00000.npz")
    del arrays["number"]  # earlier versions did not say it
    files.save_arrays(few / "shard-00002.npz", arrays)
    done = psidiff(*ASKED, "--resume")
    assert "shard-00001.jsonl is damaged" in done.stderr
    assert "shard-00002.npz is damaged: it has not 1 samples" in done.stderr
    assert contents(few) == before


def test_a_shard_in_the_place_of_another_is_made_again(tmp_path, psidiff):
    asked = ("sample", "shakespeare", "-n", 6, "--steps", 4, "--shard-size", 2, "--out", "few")
    psidiff(*asked)
    few = tmp_path / "few"
    before = contents(few)
    (few / "shard-00001.npz").write_bytes(before["shard-00002.npz"])
    done = psidiff(*asked, "--resume")
    assert "shard-00001.npz is damaged: it holds shard 2; it is made anew\n" in done.stderr
    assert contents(few) == before


@pytest.mark.parametrize("name", ["shard-00001.npz", "shard-00001.jsonl"])
def test_what_cannot_be_opened_or_unpacked_is_made_again(name, few, psidiff, monkeypatch):
    """As a decompressor or a disk says it: an OSError, without the file."""
    before, tried = contents(few), []

    def reads(name, real):
        def read(path, *rest):
            if path.name == name and len(tried) < 2:  # before the claim, and with it
                tried.append(path)
                raise OSError(22, "Invalid argument")
            return real(path, *rest)

        return read

    for reader in ("read_shard", "check_lines"):
        monkeypatch.setattr(sample_shards, reader, reads(name, getattr(sample_shards, reader)))
    done = psidiff(*ASKED, "--resume")
    assert f"few/{name} is damaged: " in done.stderr and "Invalid argument" in done.stderr
    assert contents(few) == before


def test_a_version_1_shard_whose_compression_is_another_is_made_again(few, psidiff):
    before = contents(few)
    path = few / "shard-00001.npz"
    np.savez_compressed(path, **files.load_arrays(path))
    whole = bytearray(path.read_bytes())
    for method in (12, 14, 9, 99):  # bzip2, LZMA, and none that is known
        changed = bytearray(whole)
        changed[8] = changed[changed.find(b"PK\1\2") + 10] = method
        path.write_bytes(changed)
        done = psidiff(*ASKED, "--resume")
        assert "shard-00001.npz is damaged" in done.stderr, done.stderr
        assert done.stderr.count("made anew") == 1 and "copy it again" not in done.stderr
        assert contents(few) == before


def test_a_folder_in_the_place_of_a_shard_is_said_before_the_work(few, psidiff):
    (few / "shard-00001.npz").unlink()
    (few / "shard-00001.npz").mkdir()
    done = psidiff(*ASKED, "--resume", check=False)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "few/shard-00001.npz is a folder in the place of a shard" in done.stderr


def test_a_pipe_in_the_place_of_a_shard_is_not_waited_for(few, psidiff):
    (few / "shard-00001.jsonl").unlink()
    os.mkfifo(few / "shard-00001.jsonl")
    done = psidiff(*ASKED, "--resume", check=False)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "few/shard-00001.jsonl is a link, a pipe or a device" in done.stderr


def test_a_link_in_the_place_of_a_shard_is_not_written_through(few, psidiff, tmp_path):
    (few / "shard-00001.npz").unlink()
    (few / "shard-00001.npz").symlink_to(tmp_path / "mine")
    done = psidiff(*ASKED, "--resume", check=False)
    assert done.returncode == 2 and "shard-00001.npz is a link" in done.stderr
    assert not (tmp_path / "mine").exists()


def test_hidden_files_do_not_make_a_folder_full(tmp_path, psidiff):
    (tmp_path / "few").mkdir()
    (tmp_path / "few/.DS_Store").write_bytes(b"x")
    psidiff(*ASKED)
    (tmp_path / "few2").mkdir()
    (tmp_path / "few2/notes.txt").write_bytes(b"x")
    done = psidiff(*ASKED[:-1], "few2", check=False)
    assert "few2 is not empty" in done.stderr


def test_no_single_flipped_bit_passes(few):
    chance, paths = random.Random(5), sorted(few.iterdir())
    for trial in range(150):
        path = paths[trial % len(paths)]
        kept = path.read_bytes()
        path.write_bytes(flipped(kept, chance))
        with pytest.raises(ValueError, match=path.name):
            if path.suffix == ".npz":
                read_shard(path)
            elif path.name == "sampling.json":
                read_manifest(few)
            else:
                number = int(path.stem[-5:])
                sample_shards.check_lines(path, 2 * number, min(2, 5 - 2 * number))
        path.write_bytes(kept)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format_version": 3}, "few/sampling.json has format_version 3; this psidiff reads"),
        ({"batch_size": "many"}, "few/sampling.json is damaged: its 'batch_size' cannot be"),
        ({"batch_size": -1}, "its 'batch_size' cannot be '-1'"),
        ({"shard_size": True}, "its 'shard_size' cannot be 'True'"),
        ({"asked": ["digits"]}, "its 'asked' cannot be"),
        ({"parameters": None}, "its 'parameters' cannot be 'None'"),
    ],
)
def test_what_a_manifest_says_is_checked(change, words, few, psidiff):
    path = few / "sampling.json"
    held = {**json.loads(path.read_text()), "format_version": 1, **change}
    held.pop("checksum")
    path.write_text(json.dumps(held))
    done = psidiff(*ASKED, "--resume", check=False)
    assert done.returncode == 2 and words in done.stderr, done.stderr
    assert done.stderr.count("\n") == 1


def test_a_damaged_manifest_is_one_sentence(few, psidiff):
    (few / "sampling.json").write_bytes(b"")
    done = psidiff(*ASKED, "--resume", check=False)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "few/sampling.json is damaged: it is not JSON" in done.stderr


def test_a_folder_of_version_1_goes_on(few, psidiff):
    before = contents(few)
    held = json.loads(before["sampling.json"])
    held.pop("checksum")
    (few / "sampling.json").write_text(json.dumps({**held, "format_version": 1}))
    for name in ("shard-00000", "shard-00001"):
        arrays = files.load_arrays(few / f"{name}.npz")
        np.savez_compressed(few / f"{name}.npz", **arrays)
        old = [json.loads(line) for line in before[f"{name}.jsonl"].decode().splitlines()]
        kept = [{k: v for k, v in line.items() if k != "checksum"} for line in old]
        lines = [json.dumps({**line, "format_version": 1}) for line in kept]
        (few / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    (few / "shard-00002.npz").unlink()
    (few / "shard-00002.npz.part").write_bytes(b"half")
    first = contents(few)
    done = psidiff(*ASKED, "--resume")
    assert "5 of 5 samples in 3 shards" in done.stderr and "damaged" not in done.stderr
    after = contents(few)
    assert after["shard-00002.npz"] == before["shard-00002.npz"]
    assert after["shard-00001.npz"] == first["shard-00001.npz"]
    assert "shard-00002.npz.part" not in after, "what a killed run left"
    assert read_samples(few)[0].shape == (5, 128)


def test_what_killed_processes_left_goes_away(few, psidiff):
    before = contents(few)
    for name in (
        ".shard-00001.npz.123-0123abcd.part",
        ".samples.png.99-0123abcd.part",
        ".worker-0123456789abcdef.lock",
        ".shard-00001.lock",
        ".gate.lock",
    ):
        (few / name).write_text('{"pid": 1, "host": "elsewhere"}')
    psidiff(*ASKED, "--resume")
    assert contents(few) == before


def test_a_second_sampler_shares_the_work_and_both_end_with_all(tmp_path, monkeypatch, capsys):
    """Two runs in threads: locks are of open files, so they hold between threads, too."""
    monkeypatch.chdir(tmp_path)
    model = load("digits", device="cpu")
    words = {"model": "digits", "num_samples": 24}
    request = build_request(model, 24, 2)
    made, both, real = [], threading.Barrier(2), sample_shards.generate

    def slow(model, request, first, count, **options):
        if not made:
            both.wait(timeout=60)  # the first shard is claimed before the other one comes
        made.append((threading.current_thread().name, first))
        return real(model, request, first, count, **options)

    monkeypatch.setattr(sample_shards, "generate", slow)
    ended = {}

    def run(resume):
        run = ShardedRun(model, request, tmp_path / "both", words, 4, print)
        ended[threading.current_thread().name] = run.run(resume, None, False, None)
        assert len(run.whole) == 6

    first = threading.Thread(target=run, args=(False,), name="first")
    first.start()
    while not list(tmp_path.glob("both/.worker-*.lock")):
        time.sleep(0.01)
    second = threading.Thread(target=run, args=(False,), name="second")
    second.start()
    for thread in (first, second):
        thread.join(timeout=120)
    assert ended == {"first": True, "second": True}
    assert sorted(place for _, place in made) == list(range(0, 24, 4)), "each once"
    assert len({name for name, _ in made}) == 2
    one = ShardedRun(model, request, tmp_path / "one", words, 4, print)
    one.run(False, None, False, None)
    assert contents(tmp_path / "both") == contents(tmp_path / "one")


def test_a_shard_that_another_process_makes_is_waited_for(few, psidiff, monkeypatch):
    """The other one dies: its lock goes with it, and this process makes the shard."""
    (few / "shard-00001.npz").unlink()
    lock = Lock(few / ".shard-00001.lock", "sampling")
    with Lock(few / ".worker-0123456789abcdef.lock", "sampling"):
        lock.__enter__()

        def sleep(seconds):
            if seconds == sample_shards._PAUSE:
                lock.__exit__(None, None, None)

        monkeypatch.setattr(sample_shards.time, "sleep", sleep)
        done = psidiff(*ASKED)  # without --resume: somebody is at work there
    assert "waiting for 1 shard that others make" in done.stderr
    assert "5 of 5 samples in 3 shards" in done.stderr


def test_somebody_stuck_at_the_gate_is_named(few, psidiff, monkeypatch):
    monkeypatch.setattr(sample_shards, "_PATIENCE", 0.0)
    with Lock(few / ".gate.lock", "sampling"):
        done = psidiff(*ASKED, "--resume", check=False)
    assert done.returncode == 2
    assert f"few is in use: process {os.getpid()} on " in done.stderr, done.stderr


def test_half_a_surrogate_pair_is_written_as_its_escape(tmp_path, psidiff, monkeypatch):
    from psidiff.data.characters import Characters

    def decode(self, tokens):
        return "a\udcffb"

    monkeypatch.setattr(Characters, "decode", decode)
    psidiff(*ASKED)
    line = (tmp_path / "few/shard-00000.jsonl").read_bytes().splitlines()[0]
    assert json.loads(line)["text"] == "a\udcffb"
    sample_shards.check_lines(tmp_path / "few/shard-00000.jsonl", 0, 2)
    for out in ("few.txt", "few.jsonl"):
        psidiff("sample", "shakespeare", "-n", 1, "--steps", 2, "--out", out)
        assert rb"a\udcffb" in (tmp_path / out).read_bytes()
    assert r"a\udcffb" in psidiff("sample", "shakespeare", "-n", 1, "--steps", 2).stdout


@pytest.mark.slow
def test_two_commands_in_one_folder_killed_and_begun_again_make_what_one_makes(
    psidiff, tmp_path
):
    psidiff(*BIG)
    unbroken = contents(tmp_path / "big")
    (tmp_path / "big").rename(tmp_path / "whole")
    command = [sys.executable, "-m", "psidiff", *map(str, BIG)]
    chance = random.Random(1)
    running = [begin(command, tmp_path), begin(command, tmp_path)]
    for _ in range(8):
        time.sleep(3 + 3 * chance.random())
        place = chance.randrange(2)
        running[place].kill()
        running[place].communicate()
        running[place] = begin([*command, "--resume"], tmp_path)
    for each in running:
        said = each.communicate(timeout=300)[1]
        assert each.returncode == 0 and "2,000 of 2,000 samples in 40 shards" in said, said
    assert contents(tmp_path / "big") == unbroken


def begin(command, folder):
    return subprocess.Popen(
        command,
        cwd=folder,
        env=QUIET,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
