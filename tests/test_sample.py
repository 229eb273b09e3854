"""`psidiff sample` as a newcomer types it, and a large set that is killed and resumed."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from psidiff.cli.progress import place
from psidiff.data.images import Pixels, write_png
from psidiff.experiment import sample_shards
from psidiff.model import load
from psidiff.models import Transformer
from psidiff.request import build_request

QUIET = {**os.environ, "OMP_NUM_THREADS": "1"}


def test_a_digit_becomes_a_picture(psidiff, tmp_path):
    done = psidiff("sample", "digits", "--label", 3, "--steps", 16, "--num", 3)
    assert "3 images: out/digits.png" in done.stderr and "passes a sample" in done.stderr
    assert (tmp_path / "out/digits.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("where", [(), ("--out", "few", "--shard-size", 8)])
def test_where_memory_ran_out_the_batches_stay_smaller(where, psidiff, monkeypatch):
    sizes, hidden = [], Transformer.hidden

    def hungry(self, z, *arguments):
        sizes.append(len(z))
        if len(z) > 2:
            raise torch.OutOfMemoryError("no more")
        return hidden(self, z, *arguments)

    monkeypatch.setattr(Transformer, "hidden", hungry)
    done = psidiff("sample", "digits", "-n", 16, "--batch-size", 8, "--steps", 1, *where)
    assert done.stderr.count("out of memory") == 2
    assert sizes == [8, 4] + [2] * (8 * 2), "two passes for each two samples"


def test_romeo_speaks_and_is_watched(psidiff, tmp_path):
    done = psidiff(
        *("sample", "shakespeare", "--prompt", "ROMEO:", "--watch", "--steps", 12, "--num", 1),
        *("--replay", "r.html", "--trace", "r.trace"),
    )
    assert done.stdout.startswith("ROMEO:") and len(done.stdout) == 129
    assert "step" in done.stderr and (tmp_path / "r.html").stat().st_size > 1000
    psidiff("replay", "r.trace", "r.trace", "--out", "two.html")
    assert (tmp_path / "two.html").stat().st_size > 1000


def test_a_template_is_filled_in(psidiff, tmp_path):
    text = "To be, or {{6}} to be:\nthat is the {{8}}"
    done = psidiff(
        *("sample", "shakespeare", "--infill", text, "--steps", 12, "--num", 2, "--json"),
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["index"] for line in lines] == [0, 1]
    for line in lines:
        assert re.fullmatch(r"To be, or .{6} to be:\nthat is the .{8}", line["text"], re.S)
        assert line["seed"] == 0 and line["nfe"] > 1 and line["seconds"] > 0
        assert len(line["tokens"]) == len(line["text"])


def test_known_pixels_stay(psidiff, tmp_path):
    pillow = pytest.importorskip("PIL.Image")
    codec = Pixels(1, 8, 8, levels=17)
    picture = np.zeros((8, 8, 2), np.uint8)
    picture[:4, :, 1], picture[:4, 3:5, 0] = 255, 255  # the upper half is known: a stroke
    pillow.fromarray(picture, "LA").save(tmp_path / "half.png")
    arguments = ("sample", "digits", "--given", "half.png", "--label", 1, "--steps", 8)
    done = psidiff(*arguments, "--num", 2, "--json")
    for line in done.stdout.splitlines():
        image = codec.decode(__import__("torch").tensor(json.loads(line)["tokens"]))
        assert (image[:4] == picture[:4, :, 0]).all()
    write_png(np.zeros((3, 3), np.uint8), tmp_path / "wrong.png")
    done = psidiff("sample", "digits", "--given", "wrong.png", check=False)
    assert done.returncode == 2 and "images of this model are 8 x 8, grey" in done.stderr


MISTAKES = [
    (("shakespeare", "--infill", "a {{x}} b"), "a blank is {{n}}"),
    (("shakespeare", "--infill", "nothing missing"), "the template has no blank"),
    (("digits", "--label", "12"), "there is no label 12: the classes are 0 to 9"),
    (("digits", "--label", "cow"), "there is no label 'cow'"),
    (("shakespeare", "--label", "1"), "this model has no classes"),
    (("shakespeare", "--prompt", "a" * 200), "the prompt has 200 tokens, and a sample has 128"),
    (("shakespeare", "--prompt", "né"), "the character 'é' is not in the alphabet"),
    (("digits", "--prompt", "a"), "prompts are for models of text; this one makes images"),
    (("shakespeare", "--given", "53"), "--given is for puzzles"),
    (("digits", "--given", "nowhere.png"), "there is no picture nowhere.png"),
    (("shakespeare", "--kappa", "cup:3"), "no kappa rule"),
    (("shakespeare", "--preset", "paper"), "paper-text"),
    (("shakespeare", "--top-p", "1.5"), "top_p must be in (0, 1]"),
    (("shakespeare", "--guidance", "2"), "guidance needs labels"),
    (("shakespeare", "--out", "a.png"), "a .png is for images"),
    (("shakespeare", "--resume"), "name it with --out"),
    (("shakespeare", "--out", "folder", "--watch"), "--watch is for samples that are shown"),
    (("hamlet",), "there is no model at hamlet"),
    (("shakespeare", "--predictor", "best"), "confident"),
    (("shakespeare", "--corrector", "2"), "2x12"),
    (("digits", "--guidance-on", "x"), "give that too"),
    (("digits", "--label", "1", "--guidance", "2", "--guidance-on", "y"), "'x' or 'posterior'"),
    (("shakespeare", "--given", "[1.5, -1]"), "--given must be whole numbers, -1 where free"),
    (("digits", "--given", "[null]"), "-1 where free, got [None]"),
    (("digits", "--given", "[1,"), "--given is not JSON"),
    (("digits", "--given", "[" * 5000), "--given nests"),
    (("sudoku", "--given", f"[0, 0{', -1' * 79}]"), "row 1 has more than one 1"),
    (("",), "a model has a name, a path or an id"),
    (("shakespeare", "--given", "[1, -1, 99]"), "--given must hold token ids in [0, 65), got"),
    (("shakespeare", "--shard-size", "3"), "--shard-size is of a folder of shards"),
    (("shakespeare", "--out", "x.foo"), "a folder, got x.foo"),
    (
        ("digits", "--predictor", "confident", "--kappa", "cap:.02"),
        "leave kappa and preset out",
    ),
    (("digits", "--num", "0"), "psidiff: invalid value for '--num'"),
    (("digits", "--top-p", "x"), "got x"),
    (("digits", "--nm", "3"), "psidiff: no such option: --nm"),
    (("digits", "--json", "true"), "psidiff: got unexpected extra argument"),
    (("shakespeare", "--out", "a.txt", "--json"), "--json goes to standard output"),
    (("shakespeare", "--out", "a.jsonl", "--json"), "a file is JSON if it ends in .jsonl"),
    (("digits", "--device", "nonsense"), "device must be auto, cpu, cuda, cuda:N or mps"),
    (("digits", "--device", "meta"), "cuda:N or mps, got 'meta'"),
    (("digits", "--dtype", "float8_e4m3fn"), "'float16' or 'float64', got 'float8_e4m3fn'"),
]


@pytest.mark.parametrize("arguments, words", MISTAKES, ids=lambda v: str(v)[:40])
def test_a_mistake_is_one_sentence(arguments, words, psidiff, tmp_path):
    done = psidiff("sample", *arguments, "--steps", "4", check=False)
    assert done.returncode == 2 and words in done.stderr, done.stderr
    assert done.stderr.count("\n") == 1 and not list(tmp_path.iterdir())


def test_help_shows_flags_as_flags(psidiff):
    said = psidiff("sample", "--help").stdout
    assert "<bool>" not in said and "9223372036854775806" not in said
    assert "float16 or float64" in said
    assert psidiff("--version").stdout.startswith("psidiff ")
    done = psidiff("sample", check=False)
    assert done.returncode == 2 and done.stderr == "psidiff: missing argument 'model'\n"
    done = psidiff(check=False)
    assert done.returncode == 2 and "Usage: " in done.stdout


def test_a_file_that_is_written_again_is_said_to_be(psidiff, tmp_path):
    arguments = ("sample", "shakespeare", "-n", 1, "--steps", 2, "--out", "s.jsonl")
    assert "1 sample: s.jsonl\n" in psidiff(*arguments).stderr
    assert (
        "1 sample: s.jsonl, in place of the file that was there" in psidiff(*arguments).stderr
    )
    done = psidiff(*arguments[:-1], "v1.2")
    assert "1 of 1 sample in 1 shard in v1.2" in done.stderr


SOLVED = "534678912672195348198342567859761423426853791713924856961537284287419635345286179"


def test_grids_are_said_to_be_valid_or_not(psidiff, tmp_path):
    clues = "." * 3 + SOLVED[3:]
    asked = ("sample", "sudoku", "-n", 2, "--steps", 8)
    done = psidiff(*asked, "--given", clues, "--json")
    assert "2 of 2 puzzles valid, every clue kept\n" in done.stderr
    assert [json.loads(line)["valid"] for line in done.stdout.splitlines()] == [True, True]
    done = psidiff(*asked[:-1], 1, "--temperature", 50, "--out", "s.jsonl")
    assert "0 of 2 puzzles valid\n" in done.stderr
    lines = (tmp_path / "s.jsonl").read_text().splitlines()
    assert [json.loads(line)["valid"] for line in lines] == [False, False]
    done = psidiff(*asked, "--given", clues, "--out", "grids")
    assert "; 2 of 2 puzzles valid" in done.stderr
    lines = (tmp_path / "grids/shard-00000.jsonl").read_text().splitlines()
    assert [json.loads(line)["valid"] for line in lines] == [True, True]


def test_watching_counts_as_the_bar_does(psidiff):
    done = psidiff("sample", "shakespeare", "-n", 1, "--steps", 4, "--watch")
    places = [line.split("   ")[0] for line in done.stderr.splitlines() if "   kept " in line]
    assert places == ["step 2/4", "step 3/4", "step 4/4", "the last step"]
    done = psidiff("sample", "shakespeare", "-n", 1, "--steps", 2, "--watch", "--length", 200)
    places = [line.split("   ")[0] for line in done.stderr.splitlines() if "   kept " in line]
    assert places == ["the last step", "step 2/2", "step 1/2", "the last step"]


def test_compiling_is_said(psidiff, monkeypatch):
    monkeypatch.setattr("psidiff.model.compile_blocks", lambda network: None)
    done = psidiff("sample", "digits", "--steps", 2, "--compile", "--json")
    assert done.stderr.startswith("compiling: ")


def test_an_empty_prompt_samples_freely(psidiff, tmp_path):
    made = [
        psidiff("sample", "shakespeare", *more, "--steps", 8, "--num", 1).stdout
        for more in ((), ("--prompt", ""))
    ]
    assert made[0] == made[1] and len(made[0]) == 129


def test_confident_decoding_says_what_it_gives_up(psidiff, tmp_path):
    done = psidiff(
        *("sample", "shakespeare", "--predictor", "confident", "--steps", 4, "--num", 1),
    )
    assert "does not keep the marginals" in done.stderr


def test_options_without_effect_and_places_of_the_bar(psidiff):
    done = psidiff("sample", "shakespeare", "--length", 20, "--overlap", 4, check=False)
    assert done.returncode == 2 and "overlap is of windows" in done.stderr
    done = psidiff("sample", "digits", "--temperature", 0, check=False)
    assert done.returncode == 2 and "say last=greedy" in done.stderr
    model = load("digits", device="cpu")
    request = build_request(model, 1, 16)
    assert [place(i, request) for i in (0, 15, 16)] == [
        "step 1/16",
        "step 16/16",
        "the last step",
    ]


BIG = ("sample", "digits", "-n", 2000, "--steps", 8, "--out", "big", "--shard-size", 50)
SMALL = ("sample", "shakespeare", "-n", 5, "--steps", 4, "--out", "few", "--shard-size", 2)


def files_of(folder):
    return {f.name: f.read_bytes() for f in sorted(folder.iterdir())}


def test_a_folder_of_shards_is_made_once_and_resumed_only_as_it_was_begun(psidiff, tmp_path):
    done = psidiff(*SMALL)
    assert "5 of 5 samples in 3 shards" in done.stderr
    first = files_of(tmp_path / "few")
    lines = b"".join(first[f"shard-0000{i}.jsonl"] for i in range(3)).decode().splitlines()
    assert [json.loads(line)["index"] for line in lines] == list(range(5))
    for arguments, words in {
        SMALL: "already holds samples: add --resume",
        (*SMALL[:3], 6, *SMALL[4:], "--resume"): "begun with num_samples = 5",
        (*SMALL, "--resume", "--seed", 1): "begun with seed = 0, and this asks for 1",
        (*SMALL[:-1], 3, "--resume"): "has shards of 2, not 3",
        ("sample", "digits", *SMALL[2:], "--resume"): "other parameters of the model",
    }.items():
        done = psidiff(*arguments, check=False)
        assert done.returncode == 2 and words in done.stderr, done.stderr
    (tmp_path / "few/shard-00001.npz").unlink()
    psidiff(*SMALL, "--resume")
    assert files_of(tmp_path / "few") == first
    (tmp_path / "other").mkdir()
    (tmp_path / "other/thing.txt").write_text("mine")
    done = psidiff(*SMALL[:7], "other", *SMALL[8:], check=False)
    assert done.returncode == 2 and "is not empty" in done.stderr


@pytest.mark.slow
def test_two_processes_make_the_same_shards(psidiff, tmp_path):
    psidiff(*SMALL)
    alone = files_of(tmp_path / "few")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    arguments = [str(a) for a in (*SMALL[:7], "both", *SMALL[8:])]
    done = subprocess.run(
        [*command, "--standalone", "-m", "psidiff", *arguments],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=QUIET,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    both = files_of(tmp_path / "both")
    both.pop("sampling.json"), alone.pop("sampling.json")
    assert both == alone


def test_ctrl_c_leaves_what_is_finished(psidiff, tmp_path):
    command = [sys.executable, "-m", "psidiff", *map(str, BIG)]
    begun = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=QUIET,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored below nohup
    )
    wait_for_shards(tmp_path / "big", 1, begun)
    begun.send_signal(signal.SIGINT)
    said = begun.communicate(timeout=60)[1]
    assert begun.returncode == 130 and "go on with --resume" in said, said
    assert not list((tmp_path / "big").glob("*.part"))


def test_ctrl_c_before_the_first_shard_leaves_a_run_to_resume(psidiff, tmp_path, monkeypatch):
    def stopped(*arguments, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as m:
        m.setattr(sample_shards, "generate", stopped)
        done = psidiff(*SMALL, check=False)
    assert done.returncode == 130 and not list((tmp_path / "few").glob("shard-*"))
    assert "0 of 5 samples in 0 shards in few; go on with --resume" in done.stderr
    assert "5 of 5 samples in 3 shards" in psidiff(*SMALL, "--resume").stderr


def wait_for_shards(folder, count, process, seconds=120):
    end = time.time() + seconds
    while len(list(folder.glob("*.npz"))) < count and process.poll() is None:
        assert time.time() < end, "no shard came"
        time.sleep(0.02)


@pytest.mark.slow
def test_killed_ten_times_and_resumed_the_files_are_those_of_an_unbroken_run(psidiff, tmp_path):
    psidiff(*BIG)
    unbroken = files_of(tmp_path / "big")
    (tmp_path / "big").rename(tmp_path / "whole")
    chance, kills = random.Random(0), 0
    command = [sys.executable, "-m", "psidiff", *map(str, BIG)]
    for attempt in range(40):
        more = ["--resume"] if attempt else []
        run = subprocess.Popen(
            [*command, *more], cwd=tmp_path, env=QUIET, stderr=subprocess.PIPE
        )
        if kills < 10:
            before = len(list((tmp_path / "big").glob("*.npz")))
            wait_for_shards(tmp_path / "big", before + chance.randint(0, 2), run)
            time.sleep(chance.random())
            run.kill()
            kills += run.wait() == -signal.SIGKILL
        elif run.wait() == 0:
            break
    assert kills == 10 and files_of(tmp_path / "big") == unbroken


def test_a_picture_that_is_none_or_too_large_is_one_sentence(psidiff, tmp_path, monkeypatch):
    from PIL import Image, PngImagePlugin

    words = PngImagePlugin.PngInfo()
    words.add_text("a", "x" * 2**21, zip=True)  # Pillow stops at 1 MiB
    Image.new("LA", (8, 8)).save(tmp_path / "words.png", pnginfo=words)
    Image.new("1", (3000, 3000)).save(tmp_path / "large.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "large.png").read_bytes()[:60])
    os.mkfifo(tmp_path / "pipe.png")
    monkeypatch.setenv("PSIDIFF_LIMITS", "pixels=1000000")
    for name, said in {
        "words.png": "words.png cannot be read as an image (",
        "cut.png": "cut.png ",
        "large.png": "large.png has 9,000,000 pixels, and at most 1,000,000 is allowed",
        "pipe.png": "pipe.png is no regular file",
        ".": ". is a folder",
    }.items():
        done = psidiff("sample", "digits", "--given", name, check=False)
        assert done.returncode == 2 and said in done.stderr, done.stderr
        assert done.stderr.count("\n") == 1


def test_a_clock_that_stands_still_leaves_the_speed_out(psidiff, monkeypatch):
    for clock in ("perf_counter", "monotonic", "time"):
        monkeypatch.setattr(time, clock, lambda: 5.0)
    done = psidiff("sample", "shakespeare", "-n", 1, "--steps", 2)
    assert "1 x 128 tokens in 0.0 s: 3.0 passes a sample" in done.stderr
