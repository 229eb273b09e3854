"""Recipes: read strictly, built at full size, trained from the command line."""

import json
import math
import signal
from dataclasses import replace

import pytest
import torch
import yaml
from toys import generator
from typer.testing import CliRunner

import psidiff
from psidiff.cli.main import app, main
from psidiff.cli.progress import Progress
from psidiff.data.characters import Characters
from psidiff.evaluation.nll import cubic_alpha, likelihood
from psidiff.experiment.build import build_curriculum, build_model, objective_of
from psidiff.experiment.datasets import Corpus, RandomTokens, corpus
from psidiff.experiment.held_out import held_out
from psidiff.experiment.recipe import CosineSchedule, LogLinearSchedule, RandomData
from psidiff.experiment.recipe_files import as_yaml, read_recipe, shipped
from psidiff.experiment.results_log import Protocol, ResultsLog
from psidiff.experiment.sample_evaluators import build_evaluator
from psidiff.process import LogLinear, Masked, Mixed, Uniform, Unigram
from psidiff.training import (
    CrossEntropy,
    Nelbo,
    NextToken,
    RelaxedNelbo,
    Trainer,
    checkpoint,
    read_log,
)

RUNNER = CliRunner()
SMALL = (
    "model.hidden_size=16",
    "model.num_blocks=1",
    "model.num_heads=2",
    "train.steps=6",
    "train.batch_size=4",
    "train.log_every=2",
    "train.save_every=3",
    "eval.sequences=4",
    "eval.samples=2",
    "eval.steps=3",
    "tracker=none",
)
PAPER = {  # recipe -> parameters, and the real tokens that its data would have
    "owt-ar": (162_246_482, 50_257),
    "owt-mdlm": (169_627_218, 50_257),
    "owt-duo": (169_627_218, 50_258),
    "owt-duo++": (169_627_218, 50_258),
    "lm1b-duo": (139_292_986, 30_522),
    "lm1b-duo++": (139_292_986, 30_522),
    "cifar10-mdlm": (35_755_398, 256),
    "cifar10-duo": (35_755_398, 256),
}


def train(*arguments):
    return RUNNER.invoke(app, ["train", *map(str, arguments)])


def said(monkeypatch, capsys, *arguments):
    """Exit code and the sentence of a command that fails."""
    monkeypatch.setattr("sys.argv", ["psidiff", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        main()
    return end.value.code, capsys.readouterr().err.strip()


@pytest.mark.parametrize("name", shipped())
def test_every_shipped_recipe_reads_and_its_yaml_reads_back_equal(name, tmp_path):
    recipe = read_recipe(name)
    assert recipe.name == name
    (tmp_path / "again.yaml").write_text(as_yaml(recipe))
    assert read_recipe(str(tmp_path / "again.yaml")) == recipe


@pytest.mark.parametrize("name", PAPER)
def test_the_recipes_of_the_paper_have_the_paper_s_size(name):
    count, tokens = PAPER[name]
    recipe = read_recipe(name)
    image = (3, 32, 32) if recipe.model.kind == "unet" else None
    data = RandomData(tokens, recipe.model.length, classes=10 if image else 0, image=image)
    with torch.device("meta"):
        model = build_model(replace(recipe, data=data), corpus(data))
    assert sum(p.numel() for p in model.network.parameters()) == count


def test_the_recipes_of_the_paper_have_its_hyperparameters():
    owt, duo, images = (read_recipe(n) for n in ("owt-mdlm", "owt-duo++", "cifar10-duo"))
    assert (owt.train.batch_size, owt.train.steps) == (512, 1_000_000)
    assert (owt.train.learning_rate, owt.train.warmup, owt.train.ema) == (3e-4, 2500, 0.9999)
    assert owt.train.precision == "bfloat16" and owt.model.dropout == 0.1
    assert not owt.model.time_conditioning and duo.model.time_conditioning
    assert duo.curriculum.top_k == 2 and duo.curriculum.temperature == 1e-3
    assert duo.curriculum.share * duo.train.steps == 500_000
    assert read_recipe("owt-duo").curriculum.top_k is None
    soft = RelaxedNelbo(50_258, 2, alpha_range=duo.curriculum.alpha_range)
    assert soft.gamma_range == pytest.approx((-3.55, -1.85), abs=2e-3)
    assert (images.train.batch_size, images.train.steps) == (128, 1_500_000)
    assert images.train.class_dropout == 0.1 and images.data.flip


BAD = [
    ("train.step=5", "train.step is not a key; the nearest is train.steps"),
    ("steps=5", "steps is not a key; the nearest is train.steps"),
    ("model.hiden_size=5", "the nearest is model.hidden_size"),
    ("train.steps=many", "train.steps must be a whole number, got 'many'"),
    ("train.steps=1.5", "train.steps must be a whole number, got 1.5"),
    ("train.compile=3", "train.compile must be true or false, got 3"),
    ("train.betas=0.9", "train.betas must be a list"),
    ("train.betas=[0.9]", "train.betas must be a list of 2"),
    ("train.micro_batch=5", "train.micro_batch must divide batch_size"),
    ("prior=mask", "prior.kind must be one of masked, uniform"),
    ("prior=5", "prior.kind must be one of masked, uniform, mixed, unigram, got 5"),
    ("prior.kind=[]", "prior.kind must be one of masked, uniform, mixed, unigram, got []"),
    ("prior.uniform=0.1", "prior.uniform is not a key"),
    ("data.path=nowhere.npz", "there is no"),
    ("data.levels=16", "data.levels must be 17"),
    ("data.valid_share=5", "data.valid_share must be between 0 and 1, got 5"),
    ("data.valid_share=.2", "valid_share=0.2 is for images without a test set, and digits has"),
    ("model.vocab_size=18", "model.vocab_size is 18, but the data with its prior has 17"),
    ("model.length=63", "sequences of 64 tokens are longer than model.length=63"),
    ("eval.kappa=cup:1", "eval.kappa: 'cup:1' is no kappa rule; these are"),
    ("eval.kappa=cap:2", "eval.kappa: eta must be in [0, 1], got 2"),
    ("eval.samples=-1", "eval.samples must be an integer of at least 0, got -1"),
    ("eval.sequences=-1", "eval.sequences must be an integer of at least 0, got -1"),
    ("eval.steps=0", "eval.steps must be an integer of at least 1, got 0"),
    ("eval.top_p=4", "eval.top_p must be in (0, 1], got 4"),
    ("tracker=paper", "tracker must be 'auto'"),
    ("curriculum.share=2", "curriculum.share must be between 0 and 1"),
    ("curriculum.top_k=1000", "curriculum.top_k must be below vocab_size = 17, got 1000"),
    ("curriculum.top_k=0", "curriculum.top_k must be an integer of at least 1, got 0"),
    ("curriculum.temperature=0", "curriculum.temperature must be above 0, got 0"),
    ("curriculum.final_temperature=-1", "curriculum.final_temperature must be above 0, got -1"),
    ("curriculum.alpha_range=[.1, .9]", "curriculum.alpha_range must fall, between 1 and 0"),
    ("model.num_heads=3", "model.hidden_size must be num_heads times an even number"),
    ("model.num_heads=0", "model.num_heads must be an integer of at least 1, got 0"),
    ("model.hidden_size=0", "model.hidden_size must be an integer of at least 1, got 0"),
    ("model.num_blocks=0", "model.num_blocks must be an integer of at least 1, got 0"),
    ("model={kind: unet, width: 0}", "model.width must be an integer of at least 4, got 0"),
    ("nonsense", "an override is key=value"),
    ("train.steps=[", "is not YAML after the ="),
    ("train.steps=!!bool zz", "is not YAML after the ="),
    ("train.steps=!!int ''", "is not YAML after the ="),
    ("train.steps=2001-99-99", "is not YAML after the ="),
    ("train.steps=1" + ":1" * 400 + ".0", "is not YAML after the ="),
    ("objective=guess", "objective must be one of nelbo"),
]


@pytest.mark.parametrize(("override", "sentence"), BAD)
def test_a_bad_recipe_fails_before_training_in_one_sentence(
    override, sentence, monkeypatch, capsys, tmp_path
):
    code, error = said(
        monkeypatch, capsys, "train", "digits", override, "--out", tmp_path / "run"
    )
    assert code == 2
    assert sentence in error and "\n" not in error and "Traceback" not in error
    assert not (tmp_path / "run").exists()


def test_a_bad_corpus_is_said_in_one_sentence(monkeypatch, capsys, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "short.txt").write_text("too short")
    (tmp_path / "broken.yaml").write_text("name: [")
    for arguments, sentence in (
        (("shakespeare", f"data.train={tmp_path}/empty.txt"), "has no documents in it"),
        (
            ("shakespeare", f"data.train={tmp_path}/short.txt", "data.valid_share=0.5"),
            "data.length=128: the corpus has",
        ),
        (("shakespeare", "data.train=/nowhere.txt"), "there is no /nowhere.txt"),
        (
            ("shakespeare", "data.block_ends=true"),
            "data.block_ends needs tokens that begin and end a block, and "
            "data.tokenizer=characters has none",
        ),
        (("shakespear",), "the nearest is shakespeare"),
        (
            (str(tmp_path / "broken.yaml"),),
            f"{tmp_path}/broken.yaml is not YAML: line 1, column 8: expected the node content",
        ),
        ((str(tmp_path / "none.yaml"),), "there is no recipe at"),
        (("digits", "--resume", "--out", str(tmp_path / "x")), "holds no run to resume"),
    ):
        code, error = said(monkeypatch, capsys, "train", *arguments)
        assert code == 2 and sentence in error, error


def test_without_a_recipe_train_lists_them_and_show_prints_every_key():
    listed = train().output
    assert all(name in listed for name in ("digits", "owt-duo++", "sudoku"))
    shown = yaml.safe_load(train("digits", "--show", "train.steps=7").output)
    assert shown["train"]["steps"] == 7 and shown["prior"] == {"kind": "uniform"}


def test_a_recipe_of_one_s_own_may_build_on_another(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("base: digits\ntrain: {steps: 11}\nprior: {kind: mixed, uniform: 0.5}\n")
    recipe = read_recipe(str(path), ["prior.uniform=0.25", "train.learning_rate=1e-4"])
    assert recipe.name == "mine" and recipe.train.steps == 11
    assert recipe.prior.uniform == 0.25 and recipe.train.learning_rate == 1e-4
    assert recipe.data == read_recipe("digits").data


def test_an_override_goes_into_the_default_of_its_section():
    for assignments, schedule in (
        (["schedule.eps=.01"], LogLinearSchedule(eps=0.01)),
        (["schedule.eps=.01", "schedule.kind=loglinear"], LogLinearSchedule(eps=0.01)),
        (["schedule.kind=cosine", "schedule.eps=.01"], CosineSchedule(eps=0.01)),
        (["schedule=cosine"], CosineSchedule()),
    ):
        assert read_recipe("digits", assignments).schedule == schedule


def test_a_key_goes_into_a_section_that_the_base_names_in_a_word(tmp_path):
    (tmp_path / "mixed.yaml").write_text("base: digits\nprior: mixed\n")
    (tmp_path / "mine.yaml").write_text("base: mixed.yaml\nprior: {uniform: 0.5}\n")
    assert read_recipe(f"{tmp_path}/mine.yaml").prior.uniform == 0.5


def test_a_base_lies_beside_its_recipe_or_where_it_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.yaml").write_text("base: digits\ntrain: {steps: 1}\n")
    (tmp_path / "sub/b.yaml").write_text("base: a.yaml\n")
    assert read_recipe("sub/b.yaml").train.steps == 1
    (tmp_path / "sub/a.yaml").write_text("base: digits\ntrain: {steps: 2}\n")
    assert read_recipe("sub/b.yaml").train.steps == 2


def test_a_recipe_that_builds_on_itself_is_said_in_one_sentence(tmp_path):
    for name, base in (("self", "self"), ("a", "b"), ("b", "c"), ("c", "a")):
        (tmp_path / f"{name}.yaml").write_text(f"base: {base}.yaml\n")
    for name in ("self", "a"):
        path = tmp_path / f"{name}.yaml"
        with pytest.raises(ValueError, match=f"^{path} builds on itself: its base leads back"):
            read_recipe(str(path))


def test_digits_are_mirrored_if_the_recipe_says_so():
    some = torch.arange(32)
    plain, flipped = (
        corpus(read_recipe("digits", [f"data.flip={flip}"]).data).train.rows(some, generator())
        for flip in ("false", "true")
    )
    images = plain.tokens.view(-1, 8, 8)
    same = (flipped.tokens == plain.tokens).all(1)
    mirrored = (flipped.tokens == images.flip(-1).flatten(1)).all(1)
    assert (same | mirrored).all() and not same.all() and not mirrored.all()


def test_a_network_without_classes_trains_on_labelled_images(tmp_path):
    folder, options = tmp_path / "run", (*SMALL, "objective=next-token", "--device", "cpu")
    done = train("digits", *options, "--out", folder)
    assert done.exit_code == 0, done.output + str(done.exception)
    assert list((folder / "samples").glob("*.png"))
    model = psidiff.load(folder)
    assert (
        model.num_classes is None
        and build_evaluator(str(folder), model).sampling_inputs(3) == {}
    )
    assert psidiff.load("digits").num_classes == 10


def test_an_evaluation_on_0_sequences_is_on_all(tmp_path):
    found = []
    for count in (0, 297):
        folder = tmp_path / str(count)
        options = (*SMALL, f"eval.sequences={count}", "eval.samples=0", "--device", "cpu")
        assert train("digits", *options, "--out", folder).exit_code == 0
        found.append(read_log(folder / "log.jsonl")[-1]["valid_nll"])
    assert found[0] == found[1] > 0


def test_training_leaves_a_run_folder_that_loads_and_samples(tmp_path):
    folder = tmp_path / "run"
    done = train("digits", *SMALL, "--out", folder, "--device", "cpu")
    assert done.exit_code == 0, done.output
    assert {p.name for p in folder.iterdir()} >= {
        "config.yaml",
        "run.json",
        "log.jsonl",
        "checkpoints",
        "samples",
        "model.safetensors",
        "psidiff.json",
        "codec.json",
    }
    assert read_recipe(f"{folder}/config.yaml").train.steps == 6
    start = json.loads((folder / "run.json").read_text())["starts"][0]
    assert start["seed"] == 0 and start["versions"]["torch"] and "command" in start
    records = read_log(folder / "log.jsonl")
    assert records[-1]["valid_nll"] > 0 and records[-1]["valid_nll_error"] > 0
    assert list((folder / "samples").glob("*.png"))
    model = psidiff.load(folder)
    made = model.sample(3, num_steps=3, labels=torch.tensor([1, 2, 3]))
    assert made.images[0].shape == (8, 8) and made.tokens.max() < 17
    again = train("digits", *SMALL, "--out", folder)
    assert again.exit_code != 0 and "--resume continues it" in str(again.exception)
    other = train("sudoku", "--out", folder, "--resume")
    assert "holds a run of 'digits', not of 'sudoku'" in str(other.exception)


KEPT = (
    ("data.levels=9", "data.levels"),
    ("model.hidden_size=32", "model.hidden_size"),
    ("model=unet", "model"),
    ("prior=masked", "prior"),
    ("schedule=cosine", "schedule"),
    ("schedule.eps=.01", "schedule.eps"),
    ("objective=cross-entropy", "objective"),
    ("curriculum.share=.2", "curriculum"),
    ("init=shakespeare", "init"),
    ("train.seed=1", "train.seed"),
    ("train.batch_size=8", "train.batch_size"),
    ("train.micro_batch=2", "train.micro_batch"),
    ("train.optimizer=adamw", "train.optimizer"),
    ("train={optimizer: adamw}", "train.optimizer"),
)


def test_a_resumed_run_keeps_what_it_is_and_stores_what_may_change(tmp_path):
    folder, options = tmp_path / "run", ("--out", tmp_path / "run", "--device", "cpu")
    done = train("digits", *SMALL, *options)
    assert done.exit_code == 0, done.output
    before = (folder / "config.yaml").read_text()
    for override, key in KEPT:
        changed = train("digits", override, *options, "--resume")
        wanted = f"{key} cannot change in a run that is resumed"
        assert str(changed.exception) == wanted, override
    assert (folder / "config.yaml").read_text() == before
    assert train("digits", "train.steps=8", *options, "--resume").exit_code == 0
    assert read_recipe(f"{folder}/config.yaml").train.steps == 8
    again = train("digits", *options, "--resume")
    assert again.exit_code == 0 and "resumed at step 8" in again.output


@pytest.mark.parametrize("part", ["held-out NLL of", "held-out NLL, 4 of", "samples, step 2"])
def test_a_signal_ends_an_evaluation_and_resume_makes_it_up(tmp_path, monkeypatch, part):
    options = ("digits", *SMALL, "--out", tmp_path / "run", "--device", "cpu")
    with monkeypatch.context() as patch:
        shown = Progress.show

        def show_and_hear(progress, text):
            shown(progress, text)
            if f"step 6: evaluating: {part}" in text:
                signal.raise_signal(signal.SIGTERM)

        patch.setattr(Progress, "show", show_and_hear)
        patch.setattr("psidiff.cli.progress._EVERY", 0.0)
        done = train(*options)
    assert done.exit_code == 128 + signal.SIGTERM
    for said in (f"step 6: evaluating: {part}", "stopping as soon as all is saved", "--resume"):
        assert said in done.output.replace("\n", " ")
    assert checkpoint.steps(tmp_path / "run/checkpoints")[-1] == 6
    assert psidiff.load(tmp_path / "run").config.name == "digits"
    assert "valid_nll" not in read_log(tmp_path / "run/log.jsonl")[-1]
    done = train(*options, "--resume")
    assert done.exit_code == 0 and "step 6: held-out NLL" in done.output
    assert "valid_nll" in read_log(tmp_path / "run/log.jsonl")[-1]


def test_a_damaged_run_folder_is_said_in_one_sentence(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "run"
    done = train("digits", *SMALL, "--out", folder, "--device", "cpu")
    assert done.exit_code == 0, done.output
    resume = ("train", "digits", "--out", folder, "--device", "cpu", "--resume")
    evaluate = ("evaluate", folder, "--sequences", "4", "--device", "cpu")
    whole = (folder / "config.yaml").read_text()
    plain = whole.rpartition("\n# format_version")[0]  # as somebody leaves it who edits it
    for text, sentence in (
        (b"name: [", "is not YAML: line 1, column 8: expected the node content"),
        (b"\xff\xfe\xff", "is not YAML: "),
        (b"", "is not a recipe: it holds no keys"),
        (b"just words", "is not a recipe: it holds no keys"),
        (b"name: digits", "is damaged: data is missing"),
        (whole.replace("steps: 6", "steps: six").encode(), "is damaged: its last line tells"),
        (plain.replace("steps: 6", "steps: six").encode(), "is damaged: train.steps must be"),
        (b"format_version: 9\nname: digits\n", "has format_version 9; this psi"),
    ):
        (folder / "config.yaml").write_bytes(text)
        for arguments in (resume, evaluate):
            code, error = said(monkeypatch, capsys, *arguments)
            assert code == 2 and error.startswith(f"psidiff: {folder}/config.yaml {sentence}")
            assert "\n" not in error
    (folder / "config.yaml").write_text(whole)
    for name in ("run.json", "codec.json"):
        kept = (folder / name).read_text()
        for text in ("{", "[]", '{"name": "pixels", "sides": 3}', '{"format_version": 9}'):
            if name == "run.json" and "pixels" in text:
                continue
            (folder / name).write_text(text)
            code, error = said(monkeypatch, capsys, *resume)
            assert code == 2 and f"{folder}/{name}" in error and "\n" not in error, error
        (folder / name).write_text(kept)


def test_what_a_run_writes_says_its_version_from_the_first(tmp_path, monkeypatch):
    folder, first = tmp_path / "run", {}
    ran = Trainer.run

    def look_and_run(trainer):
        first.update({p.name: p.read_text() for p in folder.iterdir() if p.is_file()})
        first.pop(".lock")
        return ran(trainer)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "run", look_and_run)
        done = train("digits", *SMALL, "--out", folder, "--device", "cpu")
    assert done.exit_code == 0, done.output
    assert first.keys() == {"config.yaml", "codec.json", "run.json"}
    assert all(yaml.safe_load(text)["format_version"] == 2 for text in first.values())
    assert first["codec.json"] == (folder / "codec.json").read_text()  # as Model.save has it
    again = train(folder / "config.yaml", "--out", tmp_path / "again", "--device", "cpu")
    assert again.exit_code == 0, again.output
    assert (tmp_path / "again/config.yaml").read_text() == first["config.yaml"]


def test_the_protocol_of_a_comparison_says_its_version(tmp_path):
    stored = tmp_path / "protocol.json"
    ResultsLog(tmp_path, Protocol(), 0)
    values = json.loads(stored.read_text())
    assert values.pop("format_version") == 2 and values.pop("checksum")
    stored.write_text(json.dumps(values))  # as older ones are
    ResultsLog(tmp_path, Protocol(), 0)
    for text, sentence in (
        (json.dumps({**values, "format_version": 9}), "has format_version 9"),
        ("{", "is damaged: it is not JSON"),
    ):
        stored.write_text(text)
        with pytest.raises(ValueError, match=f"{stored} {sentence}"):
            ResultsLog(tmp_path, Protocol(), 0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_a_signal_stopped_exits_with_128_and_its_number(
    number, tmp_path, monkeypatch
):
    update = Trainer._update

    def update_and_hear(trainer, batches):
        signal.raise_signal(number)
        return update(trainer, batches)

    monkeypatch.setattr(Trainer, "_update", update_and_hear)
    done = train("digits", *SMALL, "--out", tmp_path / "run", "--device", "cpu")
    assert done.exit_code == 128 + number and "stopped at step 1, saved" in done.output


def test_options_of_training_that_would_do_nothing_are_refused(monkeypatch, capsys, tmp_path):
    folder = tmp_path / "run"
    done = train("digits", *SMALL, "--out", folder, "--device", "cpu")
    assert done.exit_code == 0, done.output
    for arguments, sentence in (
        (("--resume",), "--resume is of a recipe: name it"),
        (("--out", folder), "--out is of a recipe: name it"),
        (("--show",), "--show is of a recipe: name it"),
        (
            ("digits", "train.steps=3", "--resume", "--out", folder),
            f"{folder} is at step 6 already, past train.steps=3",
        ),
        (
            ("owt-mdlm", "train.matrix_rate=.5"),
            "train.matrix_rate=0.5 is Muon's, and optimizer is adamw",
        ),
    ):
        code, error = said(monkeypatch, capsys, "train", *arguments)
        assert code == 2 and sentence in error and "\n" not in error, error
    assert read_recipe("owt-mdlm", ["train.optimizer=muon", "train.matrix_rate=.5"])
    for name in ("books-duo", "sudoku"):  # their bases say the usual rate
        assert read_recipe(name, ["train.optimizer=adamw"]).train.optimizer == "adamw"


TEXTS = [
    ("shakespeare", ()),
    ("shakespeare", ("prior=masked", "curriculum=null")),
    ("shakespeare", ("prior=mixed", "curriculum=null", "objective=cross-entropy")),
    ("shakespeare", ("prior=unigram", "curriculum=null", "objective=plain-cross-entropy")),
    ("shakespeare", ("objective=next-token", "curriculum=null", "train.given=0")),
    ("shakespeare", ("curriculum.top_k=null", "curriculum.final_temperature=1e-2")),
    ("shakespeare", ("data.tokenizer=bytes",)),
    ("shakespeare", ("data.tokenizer=bpe", "data.vocab_size=300")),
    ("shakespeare", ("train.precision=bfloat16",)),
]


@pytest.mark.parametrize(("name", "options"), TEXTS, ids=lambda v: " ".join(v) or "plain")
def test_text_trains_with_every_prior_objective_and_tokenizer(
    name, options, tmp_path, monkeypatch
):
    monkeypatch.setenv("PSIDIFF_CACHE", str(tmp_path / "cache"))
    (tmp_path / "corpus.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 30)
    corpus_ = (f"data.train={tmp_path}/corpus.txt", "data.length=16", "data.valid_share=0.2")
    folder = tmp_path / "run"
    done = train(name, *SMALL, *corpus_, *options, "--out", folder, "--device", "cpu")
    assert done.exit_code == 0, done.output + str(done.exception)
    assert list((folder / "samples").glob("*.txt"))
    losses = [r["loss"] for r in read_log(folder / "log.jsonl") if "loss" in r]
    assert all(0 < loss < 100 for loss in losses)
    made = psidiff.load(folder).sample(2, num_steps=3, top_p=0.9)
    assert len(made.text) == 2 and all(isinstance(text, str) for text in made.text)


def test_padded_rows_train(tmp_path, monkeypatch):
    monkeypatch.setenv("PSIDIFF_CACHE", str(tmp_path / "cache"))
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "quick", "brown", "fox"]
    (tmp_path / "tokenizers/bert_base_uncased").mkdir(parents=True)
    (tmp_path / "tokenizers/bert_base_uncased/vocab.txt").write_text("\n".join(words))
    monkeypatch.setenv("PSIDIFF_DATA", str(tmp_path))
    rows = [{"text": "the quick fox"}, {"text": "fox"}, {"text": "brown fox the quick"}] * 8
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = (
        f"data.train={tmp_path}/rows.jsonl",
        "data.split=null",
        "data.valid_split=null",
        "data.length=8",
        "model.vocab_size=9",
        "train.micro_batch=4",
        "train.precision=float32",
    )
    for name, padding in (("lm1b-mdlm", "masked"), ("lm1b-duo++", "learned")):
        folder = tmp_path / name
        done = train(
            name,
            *SMALL,
            *options,
            f"data.padding={padding}",
            "--out",
            folder,
            "--device",
            "cpu",
        )
        assert done.exit_code == 0, done.output + str(done.exception)
        model = psidiff.load(folder)
        assert isinstance(model.prior, Masked if name == "lm1b-mdlm" else Uniform)
    assert psidiff.load(tmp_path / "lm1b-mdlm").prior.mask_id == 4


def test_sudoku_trains_and_counts_its_valid_grids(tmp_path, monkeypatch):
    monkeypatch.setenv("PSIDIFF_CACHE", str(tmp_path / "cache"))
    options = (
        "data.grids=64",
        "data.minimal=8",
        "data.valid_grids=8",
        "train.precision=float32",
    )
    done = train("sudoku", *SMALL, *options, "--out", tmp_path / "run", "--device", "cpu")
    assert done.exit_code == 0, done.output + str(done.exception)
    assert read_log(tmp_path / "run/log.jsonl")[-1]["valid_grids"] == 0
    assert len(psidiff.load(tmp_path / "run").sample(1, 3).text[0].splitlines()) == 9


def test_a_u_net_trains_on_a_folder_of_images(tmp_path):
    from PIL import Image

    for label in ("cat", "dog"):
        (tmp_path / "pictures" / label).mkdir(parents=True)
        for number in range(8):
            pixels = torch.randint(256, (8, 8, 3), dtype=torch.uint8).numpy()
            Image.fromarray(pixels).save(tmp_path / f"pictures/{label}/{number}.png")
    options = [option for option in SMALL if not option.startswith("model.")]
    options += ["model.width=8", "model.width_mult=[1,2]", "model.num_res_blocks=1"]
    options += [f"data.path={tmp_path}/pictures", "data.levels=16", "model.vocab_size=16"]
    done = train("cifar10-duo", *options, "--out", tmp_path / "run", "--device", "cpu")
    assert done.exit_code == 0, done.output + str(done.exception)
    model = psidiff.load(tmp_path / "run")
    assert model.codec.classes == ("cat", "dog")
    assert model.sample(1, 3, labels=torch.tensor([1])).images[0].shape == (8, 8, 3)


@pytest.mark.parametrize(
    ("options", "kind", "objective"),
    [
        (("prior=uniform",), Uniform, Nelbo),
        (("prior=masked",), Masked, Nelbo),
        (("prior={kind: mixed, uniform: 0.2}",), Mixed, Nelbo),
        (("prior=unigram", "objective=cross-entropy"), Unigram, CrossEntropy),
        (("objective=next-token",), type(None), NextToken),
    ],
)
def test_a_name_in_a_recipe_meets_its_class(options, kind, objective):
    data = RandomData(11, 6)
    recipe = replace(read_recipe("shakespeare", ("curriculum=null", *options)), data=data)
    model = build_model(recipe, corpus(data))
    assert type(model.prior) is kind
    assert isinstance(objective_of(recipe, model), objective)
    assert len(build_curriculum(recipe, model).phases) == 1


def test_a_tokenizer_s_own_mask_is_the_mask_of_the_prior():
    class Bert(Characters):
        mask_id = 3

    tokens = RandomTokens(11, 6)
    recipe = read_recipe("shakespeare", ("curriculum=null", "prior=masked"))
    model = build_model(recipe, Corpus(tokens, tokens, Bert("abcdefghijk"), 11))
    assert model.prior == Masked(11, 3)


def test_a_random_row_is_a_function_of_its_number_and_of_nothing_else():
    data = RandomTokens(11, 6, classes=3)
    whole = data.rows(torch.arange(600), torch.Generator().manual_seed(1))
    some = data.rows(torch.tensor([599, 7, 7]), torch.Generator().manual_seed(2))
    assert torch.equal(some.tokens, whole.tokens[[599, 7, 7]]) and some.labels.tolist() == [
        2,
        1,
        1,
    ]
    assert torch.equal(data.rows(torch.arange(600)).tokens, whole.tokens)
    counts = whole.tokens.flatten().bincount(minlength=11)
    assert ((counts - 3600 / 11).square() / (3600 / 11)).sum() < 45  # chi-square of 10


def test_an_untrained_model_of_the_bound_pays_log_k():
    """A network that says nothing yet costs log K, whatever the schedule's own ends are."""
    data = RandomData(11, 6)
    recipe = replace(read_recipe("shakespeare", ["curriculum=null"]), data=data)
    model = build_model(recipe, corpus(data))
    known = (model.denoiser, model.prior, model.schedule, corpus(data).train)
    found = likelihood(*known, sequences=4000, batch_size=500).nats_per_token
    log_k = torch.tensor(11.0).log().item()
    assert abs(found.value - log_k) < 5 * found.stderr
    assert found.stderr < 0.05 * log_k


@pytest.mark.parametrize("objective", ["nelbo", "next-token"])
def test_validation_is_what_evaluate_measures(objective, tmp_path):
    options = (*SMALL, f"objective={objective}", "curriculum=null", "train.given=0")
    result = train("digits", *options, "--out", tmp_path / "run", "--device", "cpu")
    assert result.exit_code == 0, result.output
    model = psidiff.load(tmp_path / "run", "cpu")
    known = (model.denoiser, model.prior, model.schedule, held_out("digits", model))
    how = {"sequences": 4, "batch_size": 4, "bos_id": model.config.bos_id}
    found = likelihood(*known, **how).nats_per_token
    lines = read_log(tmp_path / "run/log.jsonl")
    logged = [line for line in lines if "valid_nll" in line][-1]
    assert logged["valid_nll"] == pytest.approx(found.value, rel=1e-5)
    assert logged["valid_nll_error"] == pytest.approx(found.stderr, rel=1e-4)


def test_training_at_the_third_power_of_time_meets_the_levels_of_evaluation():
    times = torch.linspace(0, 1, 100, dtype=torch.float64)
    ours = Nelbo(Uniform(11), LogLinear(eps=0.0), time_power=3.0).levels(times)
    alpha, slope = cubic_alpha(times)
    assert torch.equal(ours[0], alpha) and torch.allclose(ours[1], slope, atol=0, rtol=1e-15)


def test_the_error_bar_of_validation_is_honest():
    """The true value, log K, lies within two of them 95 times of 100; 90 at least."""
    data = RandomData(50, 8)
    recipe = replace(read_recipe("shakespeare", ["curriculum=null"]), data=data)
    model = build_model(recipe, corpus(data))
    known = (model.denoiser, model.prior, model.schedule, corpus(data).train)
    far = 0
    for seed in range(100):
        nats = likelihood(*known, sequences=64, batch_size=64, seed=seed).nats_per_token
        far += abs(nats.value - math.log(50)) > 2 * nats.stderr
    assert far < 10  # 14 with alpha = 1 - t


MASKED = [  # recipe, overrides -> the rule that its model recommends
    ("sudoku-masked", (), "ancestral"),
    ("books-mdlm", (), "ancestral"),
    ("books-duo", (), "cap:0.01"),
    ("books-duo++", (), "cap:0.01"),
    ("owt-mdlm", (), "rescale-released:0.05"),
    ("sudoku", ("prior=masked",), "ancestral"),
    ("sudoku", ("prior.kind=masked", "eval.steps=9"), "ancestral"),
    ("sudoku", ("eval.kappa=cap:.01", "prior=masked"), "cap:.01"),
    ("sudoku", (), "constant:0@.05-.8"),
    ("owt-mdlm", ("prior=masked",), "rescale-released:0.05"),
]


@pytest.mark.parametrize(("name", "overrides", "rule"), MASKED)
def test_masks_get_no_rule_that_was_chosen_for_other_noise(name, overrides, rule):
    assert read_recipe(name, overrides).eval.kappa == rule


def test_a_masked_recipe_of_one_s_own_recommends_ancestral_unless_it_says_a_rule(tmp_path):
    path, data = tmp_path / "mine.yaml", RandomData(11, 6)
    for text, rule in (
        ("base: shakespeare\ncurriculum: null\nprior: masked\n", "ancestral"),
        ("base: shakespeare\ncurriculum: null\nprior: masked\neval: {kappa: fb}\n", "fb"),
    ):
        path.write_text(text)
        recipe = read_recipe(str(path))
        assert build_model(replace(recipe, data=data), corpus(data)).config["kappa"] == rule
        assert recipe.eval.top_p == 0.9


def test_a_run_begins_with_the_parameters_of_another_model(tmp_path):
    small = ["model.hidden_size=16", "model.num_blocks=1", "model.num_heads=2"]
    recipe = read_recipe("digits", small)
    data = corpus(recipe.data)
    first = build_model(recipe, data)
    for parameter in first.network.parameters():
        torch.nn.init.normal_(parameter)
    first.save(tmp_path / "first")
    begun = build_model(read_recipe("digits", [*small, f"init={tmp_path}/first"]), data)
    ours, theirs = begun.network.state_dict(), first.network.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    other = read_recipe("digits", [*small, "model.num_blocks=2", f"init={tmp_path}/first"])
    with pytest.raises(ValueError, match=r"is another network than model: .*blocks\.1"):
        build_model(other, data)
    with pytest.raises(ValueError, match="was trained on other tokens"):
        build_model(read_recipe("digits", [*small, "init=shakespeare"]), data)
