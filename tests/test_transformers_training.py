"""transformers' Trainer trains our models: batches of the collator, and what comes out."""

import json
import math
import runpy
from pathlib import Path

import pytest
import torch
from toys import generator

import psidiff as package
from psidiff.process import LogLinear, Masked, Mixed, Uniform, corrupt
from psidiff.training import stratified_times
from psidiff.training.batch import derive_seed, seeded

transformers = pytest.importorskip("transformers", "5.11")
pytest.importorskip("accelerate", reason="transformers' Trainer needs it")

from psidiff.integrations import hf_collator  # noqa: E402
from psidiff.integrations.transformers import (  # noqa: E402
    DataCollatorForDiffusion,
    PsidiffConfig,
    PsidiffForMaskedLM,
)
from psidiff.model import Model  # noqa: E402

EXAMPLES = Path(__file__).parents[1] / "examples"
SIZES = {"hidden_size": 16, "num_blocks": 1, "num_heads": 2, "cond_dim": 8, "dropout": 0.0}


def process(prior):
    return Model(None, prior, LogLinear())


def rows(count=8, length=10, size=8):
    return torch.randint(0, size, (count, length), generator=generator(1))


@pytest.mark.parametrize("prior", [Masked(9, 8), Uniform(8), Mixed(9, 8)])
def test_a_batch_is_a_draw_of_the_forward_process_at_stratified_times(prior):
    x = rows()
    batch = DataCollatorForDiffusion(process(prior), generator=generator(3))(list(x))
    seed = int(torch.randint(2**62, (), generator=generator(3)))
    times = stratified_times(8, seeded(seed))
    alpha = LogLinear().alpha(times)
    z = corrupt(prior, x, alpha[:, None, None], seeded(derive_seed(seed, 0)))
    assert torch.equal(batch["input_ids"], z) and torch.equal(batch["labels"], x)
    torch.testing.assert_close(batch["timesteps"], -alpha.log().float())
    assert batch.keys() == {"input_ids", "labels", "timesteps"}


def test_processes_share_the_strata_and_draw_noise_of_their_own(monkeypatch):
    x, found = rows(), []
    for rank in range(2):
        monkeypatch.setattr(hf_collator, "_place", lambda rank=rank: (rank, 2))
        torch.manual_seed(5)  # Trainer gives every process the same seed
        found.append(DataCollatorForDiffusion(process(Masked(9, 8)))(list(x)))
    alpha = torch.cat([batch["timesteps"] for batch in found]).neg().exp()
    strata = (LogLinear().time(alpha.double()) * 16).floor().long().clamp(max=15)
    assert sorted(strata.tolist()) == list(range(16))
    masked = [batch["input_ids"] == 8 for batch in found]
    assert not torch.equal(*masked)


def test_given_spans_are_clean_cost_nothing_and_say_so():
    x = rows(64)
    batch = DataCollatorForDiffusion(process(Masked(9, 8)), given=0.5)(list(x))
    known = batch["labels"] == -100
    assert batch["timesteps"].shape == x.shape and (batch["timesteps"][known] == 0).all()
    assert torch.equal(batch["input_ids"][known], x[known])
    assert (batch["timesteps"][~known] > 0).all() and not known.all(1).any()
    assert 16 <= known.any(1).sum() <= 40


def test_padding_is_neither_seen_nor_counted():
    ids = [[1, 2, 3, 4], [5, 6], [7]]
    tokenized = {"input_ids": [3, 3, 0], "attention_mask": [1, 1, 0]}
    features = [*({"input_ids": each} for each in ids), tokenized]
    batch = DataCollatorForDiffusion(process(Uniform(8)))(features)
    assert batch["attention_mask"].sum(1).tolist() == [4, 2, 1, 2]
    assert torch.equal(batch["labels"] == -100, batch["attention_mask"] == 0)
    assert batch["labels"][3].tolist() == [3, 3, -100, -100]
    model = PsidiffForMaskedLM(PsidiffConfig(vocab_size=8, **SIZES))
    loss = model(**batch).loss
    other = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, 5)
    assert torch.equal(loss, model(**{**batch, "input_ids": other}).loss)


def test_classes_go_along():
    features = [{"input_ids": row, "label": i % 3} for i, row in enumerate(rows())]
    batch = DataCollatorForDiffusion(process(Uniform(8)))(features)
    assert batch["cond"].tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    model = PsidiffForMaskedLM(PsidiffConfig(vocab_size=8, num_classes=3, **SIZES))
    assert model(**batch).loss > 0


@pytest.mark.parametrize(
    ("features", "sentence"),
    [([[1, 2, 8]], "tokens must"), ([], "a batch needs a sequence")],
)
def test_a_mistake_in_the_data_is_a_sentence(features, sentence):
    with pytest.raises(ValueError, match=sentence):
        DataCollatorForDiffusion(process(Uniform(8)))(features)
    with pytest.raises(ValueError, match="no noise for a collator"):
        DataCollatorForDiffusion(Model(None, None, LogLinear()))


class Rows(torch.utils.data.Dataset):
    def __init__(self, tokens):
        self.tokens = tokens

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, i):
        return {"input_ids": self.tokens[i]}


def test_trainer_trains_evaluates_and_saves_what_we_load(tmp_path):
    """Sequences of one token each: after training, one token tells the others."""
    data = Rows(torch.arange(4)[:, None].expand(4, 8).repeat(16, 1))
    model = PsidiffForMaskedLM(PsidiffConfig(vocab_size=4, length=8, **SIZES))
    settings = transformers.TrainingArguments(
        tmp_path,
        max_steps=60,
        per_device_train_batch_size=16,
        gradient_accumulation_steps=2,
        gradient_checkpointing=True,
        learning_rate=1e-2,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
    )
    collator = DataCollatorForDiffusion(model)
    trainer = transformers.Trainer(model, settings, collator, data, eval_dataset=data)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    assert abs(before - math.log(4)) < 0.3 and after < 0.6
    trainer.save_model(tmp_path / "model")
    loaded = package.load(tmp_path / "model", device="cpu")
    made = loaded.sample(64, 8, seed=0).tokens
    assert (made == made[:, :1]).all(1).double().mean() > 0.6


@pytest.mark.slow
def test_trainer_reaches_the_held_out_nll_of_psidiff_train(psidiff, tmp_path):
    """The short form of what docs/log.md has: 100 steps of a smaller network, within 2%."""
    main = runpy.run_path(str(EXAMPLES / "train_with_transformers.py"))["main"]
    main.__globals__["SIZES"].update(hidden_size=64, num_blocks=2)
    main(
        [
            str(tmp_path / "trainer"),
            "--steps",
            "100",
            "--warmup",
            "10",
            "--learning-rate",
            "8e-3",
        ]
    )
    sizes = ["model.hidden_size=64", "model.num_blocks=2", "eval.samples=1", "eval.steps=2"]
    same = ["curriculum=null", "train.optimizer=adamw", "train.learning_rate=8e-3"]
    same += ["train.time_power=1", "train.ema=0", "train.steps=100", "train.warmup=10"]
    out = tmp_path / "native"
    psidiff("train", "shakespeare", *sizes, *same, "eval.sequences=2", "--out", out)
    nats = []
    for name in ("trainer", "native"):
        lines = tmp_path / f"{name}.jsonl"
        options = ("--sequences", 100, "--draws", 4, "--out", lines)
        psidiff("evaluate", tmp_path / name, *options)
        nats.append(json.loads(lines.read_text().splitlines()[0])["value"])
    assert abs(nats[0] / nats[1] - 1) < 0.02, nats
