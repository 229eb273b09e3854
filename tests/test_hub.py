"""What goes to the Hub: files, a README with a header, and names that its libraries use."""

import json
from types import SimpleNamespace

import pytest
import torch
import yaml
from huggingface_hub import HfApi
from safetensors import safe_open

import psidiff
from psidiff.model import Model, list_pretrained
from psidiff.model_card import readme, scores, shipped_card
from psidiff.process import LogLinear, Uniform


@pytest.fixture
def hub(monkeypatch):
    """The Hub: what it is sent."""
    sent = {}

    def create_repo(api, repo_id, private=None, exist_ok=False):
        assert exist_ok
        sent.update(repo=repo_id, private=private, token=api.token)
        return SimpleNamespace(repo_id=repo_id)

    def upload_folder(api, repo_id, folder_path, commit_message):
        sent["files"] = {f.name: f.read_bytes() for f in folder_path.iterdir()}
        return SimpleNamespace(commit_url=f"https://hub/{repo_id}/commit/1")

    monkeypatch.setattr(HfApi, "create_repo", create_repo)
    monkeypatch.setattr(HfApi, "upload_folder", upload_folder)
    return sent


def header(text):
    start, values, _ = text.split("---\n", 2)
    assert start == ""
    return yaml.safe_load(values)


def test_a_model_is_pushed_with_all_that_loads_it(hub, tmp_path):
    model = psidiff.load("digits", device="cpu")
    address = model.push_to_hub("me/digits", license="mit", private=True, token="t")
    assert address == "https://hub/me/digits/commit/1"
    assert (hub["repo"], hub["private"], hub["token"]) == ("me/digits", True, "t")
    files = hub["files"]
    assert set(files) == {"README.md", "codec.json", "model.safetensors", "psidiff.json"}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    same = Model.from_pretrained(tmp_path, device="cpu")
    made = (each.sample(1, 2, labels=3).tokens for each in (model, same))
    assert torch.equal(*made)
    text = files["README.md"].decode()
    assert 'psidiff.load("me/digits")' in text and "## Scores" in text


def test_the_header_has_library_tags_license_and_the_scores_of_the_card():
    said = header(readme(psidiff.load("shakespeare", device="cpu"), "a/b", license="mit"))
    assert said["library_name"] == "psidiff" and said["license"] == "mit"
    assert {"discrete-diffusion", "uniform-noise"} <= set(said["tags"])
    (entry,) = said["model-index"]
    metrics = [metric for result in entry["results"] for metric in result["metrics"]]
    assert (metrics[0]["type"], metrics[0]["value"]) == ("nll", 2.1151)
    assert said["metrics"] == ["nll"] and said["pipeline_tag"] == "text-generation"


def test_a_model_without_a_card_says_what_it_is():
    model = psidiff.wrap(lambda z, alpha: torch.zeros(*z.shape, 5), Uniform(5), LogLinear())
    text = readme(model, "a/b")
    assert "model-index" not in text and "license" not in text
    assert "A discrete diffusion model, 0 parameters" in text
    assert "metrics" not in header(readme(model, "a/b", card="# mine\n\nno table"))


def test_scores_are_the_value_column_or_the_row_of_this_model():
    card = """# x
| a | value |
|---|---|
| not a score | 9 |
## Scores
| | value | command |
|---|---|---|
| NLL | 2.5 ± .1 nats | `run` |
| words | .25 | |
| unknown | none | |

| | valid | `test` |
|---|---|---|
| this model | 1.5 | -2 |
| another | 7 | 8 |
## Limits
| | value |
| late | 1 |
"""
    assert scores(card) == {"NLL": 2.5, "words": 0.25, "valid": 1.5, "test": -2.0}
    assert all("## Scores" in shipped_card(name) for name in list_pretrained())
    assert shipped_card("../../secrets") is None and shipped_card(None) is None


def test_the_names_of_the_hub_are_aliases(tmp_path):
    model = psidiff.from_pretrained("digits", device="cpu")
    model.save_pretrained(tmp_path)
    assert Model.from_pretrained(tmp_path, "cpu").config == model.config
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        about = file.metadata()
    assert about["format"] == "pt" and about["library"] == "psidiff"
    assert about["network"] == json.loads((tmp_path / "psidiff.json").read_text())["network"]


def test_what_the_hub_refuses_is_a_sentence(hub, monkeypatch):
    model = psidiff.load("digits", device="cpu")
    with pytest.raises(ValueError, match="repo_id must be owner/name, got 'digits'"):
        model.push_to_hub("digits")

    def refuse(*_, **__):
        raise OSError("401: log in first\nmore")

    monkeypatch.setattr(HfApi, "create_repo", refuse)
    with pytest.raises(ValueError, match=r"the Hub did not take me/x: 401: log in first$"):
        model.push_to_hub("me/x")
    with pytest.raises(ValueError, match="not a wrapped callable"):
        psidiff.wrap(lambda z, alpha: z, Uniform(5), LogLinear()).push_to_hub("me/x")
