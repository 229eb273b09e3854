"""`psidiff data`: what is there of a data set, a recipe's data or a file."""

import hashlib
import json
import sys

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from psidiff.cli.main import app
from psidiff.data.tokenizers import Subwords
from psidiff.evaluation.multiple_choice import TASKS
from psidiff.evaluation.zero_shot import SUITE
from psidiff.experiment import document_counts
from psidiff.experiment.data_report import names, report

RUNNER = CliRunner()
PTB = " the firm 's N cars \n <unk> did n't move \n"


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("PSIDIFF_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("PSIDIFF_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data/ptb").mkdir(parents=True)
    (tmp_path / "data/ptb/ptb.valid.txt").write_text(PTB)
    return tmp_path / "data"


def lines(path, texts):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def test_every_data_set_of_the_paper_has_a_name(root):
    assert set(names()) == {"openwebtext", *SUITE, *TASKS}
    done = RUNNER.invoke(app, ["data"])
    assert done.exit_code == 0 and done.output.count("not here") == len(names()) - 1
    there = json.loads(RUNNER.invoke(app, ["data", "--json"]).output)
    assert there.pop("ptb") == [str(root / "ptb/ptb.valid.txt")] and not any(there.values())


def test_a_corpus_is_counted_and_shown_as_people_write(root):
    found = report("ptb")
    (source,) = found.sources
    assert (source.documents, source.complete, source.bytes) == (2, True, len(PTB))
    assert source.characters == len("the firm 's N cars") + len("<unk> did n't move")
    assert found.rows == ["the firm's 1 cars", "? didn't move"]
    digest = hashlib.sha256(b"17 the firm's 1 cars13 ? didn't move").hexdigest()
    assert source.sha256 == digest and found.detokenizer == "ptb"
    assert json.loads(RUNNER.invoke(app, ["data", "ptb", "--json"]).output) == {
        **json.loads(json.dumps(found.to_dict())),
        "complete": True,
    }
    shown = RUNNER.invoke(app, ["data", "ptb"]).output
    for words in ("2 rows, 36 characters", digest, "the validation split", "? didn't move"):
        assert words in shown


def test_a_recipe_shows_the_rows_that_its_model_meets(root):
    texts = ["a bc", "defg hi", "j"] * 3
    lines(root / "owner/name/train-0.jsonl", texts)
    lines(root / "owner/name/test.jsonl", ["k"])
    codec = Subwords.train_bpe(texts, 260)
    (root / "tokenizer.json").write_text(codec.json)
    recipe = root / "mine.yaml"
    recipe.write_text(
        "{base: lm1b-mdlm, data: {train: 'datasets:owner/name', tokenizer: tokenizer.json, "
        "length: 6, packing: packed, detokenizer: null}}"
    )
    found = report(str(recipe))
    assert [source.part for source in found.sources] == ["train", "validation"]
    assert [source.documents for source in found.sources] == [9, 1]
    assert found.split == "the test split of datasets:owner/name is for validation"
    assert "blocks of 6 tokens, end to end" in found.packing
    ids = [id for text in texts for id in (*codec.encode(text).tolist(), codec.separator_id)]
    rows = torch.tensor(ids[:18]).view(3, 6)
    assert found.rows == [codec.decode(row) for row in rows]
    assert found.rows_sha256 == hashlib.sha256(rows.numpy().tobytes()).hexdigest()
    shown = RUNNER.invoke(app, ["data", str(recipe)]).output
    assert found.rows_sha256 in shown
    recipe.write_text(recipe.read_text().replace("packed", "padded"))
    with pytest.raises(ValueError, match="pad_id is missing"):
        report(str(recipe))


def test_the_split_of_openwebtext_is_said(root):
    lines(root / "openwebtext/train.jsonl", ["one", "two"])
    assert report("openwebtext").split == "the last 100,000 documents are for validation"
    found = report("owt-duo")
    assert found.split == "the last 100,000 documents are for validation"
    assert "blocks of 1,024 tokens, between bos and eos" in found.packing
    assert "gpt2 is not here" in found.tokenizer and found.rows == ["one", "two"]


def test_files_images_tokens_and_questions_are_data_too(root):
    lines(root / "mine.jsonl", ["x" * 5000])
    (only,) = report("mine.jsonl").rows
    assert len(only) == 1000
    assert "x" * 95 + "…" in RUNNER.invoke(app, ["data", "mine.jsonl"]).output
    np.save(root / "ids.npy", np.arange(8).reshape(2, 4))
    assert report("ids.npy").rows == ["0 1 2 3", "4 5 6 7"]
    assert [source.documents for source in report("digits").sources] == [1500, 297]
    (root / "piqa").mkdir()
    row = {"goal": "dresser", "sol1": "sing", "sol2": "pull", "label": 1}
    (root / "piqa/validation.jsonl").write_text(json.dumps(row))
    found = report("piqa")
    asks = "Question: dresser\nAnswer:"
    assert found.kind == "multiple choice" and found.rows == [f"  {asks} sing\n* {asks} pull"]


def test_whoever_stops_it_sees_what_was_counted(root, monkeypatch):
    lines(root / "mine.jsonl", [str(number) for number in range(50)])
    monkeypatch.setattr(document_counts, "_EVERY", 10)

    def stop(documents, characters, total):
        assert total is None
        if documents == 20:
            raise KeyboardInterrupt

    (source,) = report("mine.jsonl", stop).sources
    assert (source.documents, source.complete) == (20, False)
    monkeypatch.setattr("psidiff.cli.data._PATIENCE", -1.0)
    monkeypatch.setattr("psidiff.cli.progress.Progress.show", lambda *_: stop(20, 0, None))
    done = RUNNER.invoke(app, ["data", "mine.jsonl"])
    assert done.exit_code == 130 and "at least 10 rows" in done.output


def test_what_is_not_here_is_one_sentence_that_says_where_to_get_it(root, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    where = {"lm1b": "lm1b", "owt-duo": "openwebtext", "mathqa": "mathqa", "arxiv": "arxiv"}
    for name, folder in where.items():
        with pytest.raises(
            ValueError, match=f"^{folder} is not here: put the Parquet"
        ) as found:
            report(name)
        assert str(root / folder) in str(found.value) and "column" in str(found.value)
    with pytest.raises(ValueError, match=r"there is no .*nothing and no .*PSIDIFF_DATA"):
        report("nothing")
    (root / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match=r"empty\.jsonl has no documents"):
        report("empty.jsonl")
