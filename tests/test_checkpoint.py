"""Checkpoints of runs are data: checked, bounded, read by any number of processes."""

import dataclasses
import json
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from test_trainer import MEASURED, assert_same, outcome, trainer_in
from torch.distributed import checkpoint as dcp

from psidiff.checksums import with_checksum
from psidiff.training import Processes, checkpoint, read_log
from psidiff.training.checkpoint_parts import DAMAGED_CHECKPOINT
from psidiff.training.signals import StopSignal


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of 8 steps with checkpoints at 4 and 8: the folder and the trainer."""
    folder = tmp_path_factory.mktemp("run")
    trainer = trainer_in(folder, steps=8)
    assert trainer.run()
    return folder, trainer


def copied(run, folder):
    """The run again, in a folder of its own: where its last checkpoint is."""
    shutil.copytree(run[0], folder, dirs_exist_ok=True)
    return folder / "checkpoints/step-00000008"


def rewritten(path, **changed):
    """Facts that say something else, with the right checksum."""
    facts = json.loads(path.read_text())
    facts.pop("checksum")
    path.write_text(json.dumps(with_checksum({**facts, **changed})))


def test_a_checkpoint_is_safetensors_and_json(run):
    folder = run[0] / "checkpoints/step-00000008"
    assert sorted(os.listdir(folder)) == ["facts.json", "part-00000.safetensors"]
    held = outcome(run[1])
    with safe_open(folder / "part-00000.safetensors", "pt") as file:
        names = set(file.keys())
        weight = "network.blocks.0.mlp.0.weight"
        stored = file.get_tensor(f"parameters.{weight}")
        moment = file.get_tensor(f"moments.{weight}.exp_avg")
    assert len(names) == len(held)
    assert torch.equal(stored, held[f"parameter {weight}"])
    assert torch.equal(moment, held[f"exp_avg {weight}"])


def test_a_flipped_bit_anywhere_in_a_checkpoint_is_found(run, tmp_path):
    folder, draw = copied(run, tmp_path), random.Random(0)
    for path in sorted(folder.iterdir()):
        whole = path.read_bytes()
        header = int.from_bytes(whole[:8], "little") if path.suffix == ".safetensors" else 0
        places = [*range(0, 8 * 8, 3), *(draw.randrange(8 * header + 64) for _ in range(20))]
        places += [draw.randrange(8 * len(whole)) for _ in range(40)]
        for bit in places:
            changed = bytearray(whole)
            changed[bit // 8] ^= 1 << bit % 8
            path.write_bytes(changed)
            with pytest.raises(ValueError, match=path.name) as found:
                checkpoint.verify(tmp_path / "checkpoints", 8)
            assert "\n" not in str(found.value)
        path.write_bytes(whole)
    checkpoint.verify(tmp_path / "checkpoints", 8)


@pytest.mark.parametrize("damage", ["flipped", "short", "absent", "empty"])
def test_resume_refuses_what_is_damaged_and_passes_over_it_when_asked(run, tmp_path, damage):
    part = copied(run, tmp_path) / "part-00000.safetensors"
    data = bytearray(part.read_bytes())
    data[-5] ^= 4
    held = {"flipped": bytes(data), "short": bytes(data[:-9]), "empty": b""}
    if damage == "absent":
        part.unlink()
    else:
        part.write_bytes(held[damage])
    wanted = r"part-0.* is damaged: .*; copy the checkpoint again"
    wanted = r"step-0.* is damaged: it has no part-0.*; copy" if damage == "absent" else wanted
    with pytest.raises(ValueError, match=wanted):
        trainer_in(tmp_path, steps=8).resume()
    again, passed = trainer_in(tmp_path, steps=8), []
    assert again.resume(passed.append) == 4
    assert len(passed) == 1 and "part-00000.safetensors" in passed[0]
    assert again.run()
    assert_same(outcome(run[1]), outcome(again))
    checkpoint.verify(tmp_path / "checkpoints", 8)  # made anew
    logs = [
        [{k: v for k, v in r.items() if k not in MEASURED} for r in read_log(f / "log.jsonl")]
        for f in (run[0], tmp_path)
    ]
    assert logs[0] == logs[1]


def test_without_a_whole_checkpoint_the_run_does_not_begin_by_itself(run, tmp_path):
    copied(run, tmp_path)
    for facts in tmp_path.glob("checkpoints/*/facts.json"):
        facts.write_text("{")
    with pytest.raises(ValueError, match=r"no checkpoint in .* is whole: begin"):
        trainer_in(tmp_path).resume(lambda said: None)


FACTS = {
    "another step": ({"step": 4}, "its folder is of step 8, and it says step 4"),
    "a step below 0": ({"step": -5}, "its folder is of step 8, and it says step -5"),
    "a true step": ({"step": True}, "and it says step True"),
    "updates": ({"ema_updates": 9}, "ema_updates must be between 0 and 8, and is 9"),
    "no updates": ({"ema_updates": None}, "ema_updates must be"),
    "unread": ({"unread": [[1.0, 2.0, 3.0]]}, "unread must be at most 8 pairs of numbers"),
    "endless": ({"unread": [[1.0, 1e999]]}, "Infinity is no number"),
    "nan": ({"unread": [[float("nan"), 1.0]]}, "NaN is no number"),
    "many": ({"unread": [[1.0, 2.0]] * 9}, "unread must be"),
    "a step that is no integer": (
        {"step": 8.0},
        "its folder is of step 8, and it says step 8.0",
    ),
    "no float": ({"unread": [[10**400, 1.0]]}, "unread must be at most 8 pairs of numbers"),
    "no number of a tensor": ({"unread": [[10**30, 1.0]]}, "unread must be"),
    "no float32": ({"unread": [[1e300, 1.0]]}, "unread must be"),
    "no index": ({"tensors": 3}, "its index is not one"),
    "no files": ({"files": {}}, "its index is not one"),
    "elsewhere": (
        {"files": {"../../model.safetensors": {"begin": 0, "bytes": 9, "header": "crc32:0"}}},
        "no part is named '../../model.safetensors'",
    ),
}


@pytest.mark.parametrize("name", FACTS)
def test_facts_that_cannot_be_are_refused_in_a_sentence(run, tmp_path, name):
    changed, sentence = FACTS[name]
    facts = copied(run, tmp_path) / "facts.json"
    rewritten(facts, **changed)
    with pytest.raises(ValueError, match=sentence) as found:
        trainer_in(tmp_path).resume()
    assert str(facts) in str(found.value) and "\n" not in str(found.value)


def test_an_index_that_cannot_be_is_refused(run, tmp_path):
    facts = copied(run, tmp_path) / "facts.json"
    whole = facts.read_text()
    tensors = json.loads(whole)["tensors"]
    name = next(iter(tensors))
    for key, value in (
        ("start", -8),
        ("start", 10**12),
        ("shape", [10**9]),
        ("offset", [1, 1]),
        ("file", "part-00007.safetensors"),
        ("crc32", 7),
    ):
        chunks = [{**tensors[name]["chunks"][0], key: value}]
        changed = {**tensors, name: {**tensors[name], "chunks": chunks}}
        facts.write_text(whole)
        rewritten(facts, tensors=changed)
        with pytest.raises(ValueError, match=r"facts\.json is damaged: its index is not one"):
            trainer_in(tmp_path).resume()
    facts.write_text(whole)
    rewritten(facts, tensors={**tensors, name: {**tensors[name], "chunks": []}})
    with pytest.raises(ValueError, match="is not all there"):
        trainer_in(tmp_path).resume()


@pytest.mark.parametrize("change", ["no name", "no shape"])
@pytest.mark.parametrize("older", [False, True])
def test_a_checkpoint_without_what_the_run_needs_is_passed_over(run, tmp_path, change, older):
    path = as_older(run, tmp_path) if older else copied(run, tmp_path)
    name = "parameters.network.blocks.0.mlp.0.weight"
    if older:
        metadata = pickle.loads((path / ".metadata").read_bytes())
        stored = metadata.state_dict_metadata
        if change == "no shape":
            stored[name].size = torch.Size((5, 7))
        else:
            stored[name[:-1]] = stored.pop(name)
            (index,) = (i for i in metadata.storage_data if i.fqn == name)
            place = metadata.storage_data.pop(index)
            metadata.storage_data[dataclasses.replace(index, fqn=name[:-1])] = place
        (path / ".metadata").write_bytes(pickle.dumps(metadata))
    else:
        tensors = json.loads((path / "facts.json").read_text())["tensors"]
        stored = tensors.pop(name)
        if change == "no shape":
            tensors[name] = {**stored, "shape": [5, 0], "chunks": []}
        rewritten(path / "facts.json", tensors=tensors)
    checkpoint.verify(tmp_path / "checkpoints", 8)  # it is what was written
    why = {"no name": f"it has no {name}", "no shape": f"its {name} has the shape (5, "}[change]
    with pytest.raises(ValueError, match=re.escape(f"{path} does not fit this run: {why}")):
        trainer_in(tmp_path, steps=8).resume()
    passed = []
    assert trainer_in(tmp_path, steps=8).resume(passed.append) == 4
    assert len(passed) == 1 and why in passed[0]


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_whatever_is_wrong_with_an_older_checkpoint_is_said_with_what_to_do(
    run, tmp_path, name
):
    path = as_older(run, tmp_path) / name
    whole, draw = path.read_bytes(), random.Random(4)
    for trial in range(12):
        changed, bit = bytearray(whole), draw.randrange(8 * len(whole))
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed if trial else changed[:-900])
        try:
            checkpoint.verify(tmp_path / "checkpoints", 8)
        except ValueError as error:
            said = str(error)
            assert str(path.parent) in said and "\n" not in said
            assert DAMAGED_CHECKPOINT in said
        path.write_bytes(whole)


def test_what_pickles_and_archives_raise_is_said_of_the_file(run, tmp_path, monkeypatch):
    path = as_older(run, tmp_path) / "__0_0.distcp"

    def read(*arguments):
        raise ValueError("negative seek value -128")

    monkeypatch.setattr("psidiff.training.legacy_checkpoint.read_torch_file", read)
    with pytest.raises(ValueError) as found:
        checkpoint.verify(tmp_path / "checkpoints", 8)
    wanted = f"{path} is damaged: negative seek value -128; {DAMAGED_CHECKPOINT}"
    assert str(found.value) == wanted


def test_folders_with_other_names_are_no_checkpoints(run, tmp_path):
    copied(run, tmp_path)
    for name in ("step-abc", "step-", "step-12", "step-00000012.old", "step-000000000012"):
        (tmp_path / "checkpoints" / name).mkdir()
    (tmp_path / "checkpoints/step-00000016").write_text("a file")
    assert checkpoint.steps(tmp_path / "checkpoints") == [4, 8]
    assert trainer_in(tmp_path).resume() == 8


def full_disk(monkeypatch):
    """From now on nothing can be written."""

    def no_space(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("psidiff.files.os.fsync", no_space)


def test_a_full_disk_is_said_and_leaves_what_was_there(tmp_path, monkeypatch):
    trainer, update = trainer_in(tmp_path), None
    update = trainer._update

    def update_and_fill(batches):
        if trainer.step == 6:
            full_disk(monkeypatch)
        return update(batches)

    trainer._update = update_and_fill
    with pytest.raises(OSError, match=r"part-0.* cannot be written: No space left"):
        trainer.run()
    monkeypatch.undo()
    assert os.listdir(tmp_path / "checkpoints") == ["step-00000004"]
    assert trainer_in(tmp_path).resume() == 4


def test_a_second_ctrl_c_during_a_save_ends_it_and_leaves_what_was_there(tmp_path, monkeypatch):
    trainer, wrote = trainer_in(tmp_path), checkpoint.write_part

    def write_and_hear(*arguments):
        written = wrote(*arguments)
        if trainer.step > 4:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        return written

    monkeypatch.setattr(checkpoint, "write_part", write_and_hear)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored below nohup
    try:
        with pytest.raises(KeyboardInterrupt):
            trainer.run()
    finally:
        signal.signal(signal.SIGINT, before)
    assert isinstance(trainer.stopping, StopSignal) and trainer.stopping.asked
    assert os.listdir(tmp_path / "checkpoints") == ["step-00000004"]
    assert trainer_in(tmp_path).resume() == 4


def test_a_clock_that_stands_still_leaves_the_speed_unknown(tmp_path, monkeypatch):
    monkeypatch.setattr("psidiff.training.metrics_log.time.monotonic", lambda: 5.0)
    assert trainer_in(tmp_path, steps=6).run()
    for record in read_log(tmp_path / "log.jsonl"):
        assert record["samples_per_second"] is None and record["seconds_left"] is None


def test_every_line_of_a_log_is_checked(run, tmp_path):
    copied(run, tmp_path)
    log = tmp_path / "log.jsonl"
    assert all("checksum" in json.loads(line) for line in log.read_text().splitlines())
    log.write_text(log.read_text().replace('"step": 5', '"step": 4'))
    with pytest.raises(ValueError, match=r"line 1 of .*log\.jsonl is damaged: its checksum"):
        read_log(log)


def as_older(run, folder):
    """The run as earlier versions saved it: torch's own files and facts without checksums."""
    shutil.copytree(run[0], folder, dirs_exist_ok=True)
    for step in (4, 8):
        path = folder / f"checkpoints/step-{step:08d}"
        trainer = trainer_in(folder, steps=8)
        checkpoint.load(folder / "checkpoints", step, trainer._tensors(), Processes())
        facts = json.loads((path / "facts.json").read_text())
        shutil.rmtree(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(trainer._tensors(), checkpoint_id=path, no_dist=True)
        kept = {name: facts[name] for name in ("step", "ema_updates", "unread")}
        (path / "facts.json").write_text(json.dumps({"format_version": 1, **kept}))
    return folder / "checkpoints/step-00000008"


def test_checkpoints_of_earlier_versions_are_resumed_as_they_were(run, tmp_path):
    as_older(run, tmp_path)
    checkpoint.verify(tmp_path / "checkpoints", 8)
    trainer = trainer_in(tmp_path, steps=8)
    assert trainer.resume() == 8
    assert_same(outcome(run[1]), outcome(trainer))
    shutil.rmtree(tmp_path / "checkpoints/step-00000008")
    again = trainer_in(tmp_path, steps=8)
    assert again.resume() == 4 and again.run()
    assert_same(outcome(run[1]), outcome(again))
    assert not (tmp_path / "checkpoints/step-00000008/.metadata").exists()


class Touches:
    """Unpickled, it makes a file."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.open, (self.path, os.O_CREAT)


@pytest.mark.parametrize("older", [False, True])
def test_a_checkpoint_from_somebody_else_runs_nothing(run, tmp_path, older):
    path = as_older(run, tmp_path / "run") if older else copied(run, tmp_path / "run")
    planted, metadata = tmp_path / "planted", path / ".metadata"
    payloads = [pickle.dumps(Touches(planted))]
    if older:
        whole = pickle.loads(metadata.read_bytes())
        whole.planner_data = Touches(planted)
        payloads.append(pickle.dumps(whole))
    for payload in payloads:
        metadata.write_bytes(payload)
        trainer = trainer_in(tmp_path / "run", steps=8)
        if older:
            with pytest.raises(ValueError, match=r"\.metadata .*refused"):
                trainer.resume()
        else:
            assert trainer.resume() == 8
    if older:
        metadata.write_bytes(pickle.dumps({"state_dict_metadata": {}}))
        with pytest.raises(ValueError, match=r"\.metadata is damaged: it describes no"):
            trainer_in(tmp_path / "run", steps=8).resume()
    for part in path.glob("*.distcp"):
        as_older(run, tmp_path / "run")
        part.write_bytes(part.read_bytes()[:-3000] + payloads[0])
        with pytest.raises(ValueError, match="distcp"):
            trainer_in(tmp_path / "run", steps=8).resume()
    assert not planted.exists()


@pytest.mark.slow
def test_eight_shards_are_read_by_any_number_of_processes_bit_by_bit():
    """And as torch's own format has them: the benchmark compares both."""
    root = Path(__file__).parents[1]
    options = ("--width", "64", "--rounds", "1", "--readers", "1", "2", "4")
    done = subprocess.run(
        [sys.executable, root / "benchmarks/checkpoints.py", *options],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    assert "every load is equal to what was saved" in done.stdout
