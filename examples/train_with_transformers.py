"""transformers' Trainer trains a uniform-state diffusion model of Shakespeare's characters.

    python examples/train_with_transformers.py out/hf --steps 1200
    psidiff evaluate out/hf --sequences 0
    psidiff sample out/hf --prompt "KING"

Of ours are the model and the collator, which draws noise levels and noise.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

from psidiff.experiment.datasets import corpus
from psidiff.experiment.recipe_files import read_recipe
from psidiff.integrations.transformers import (
    DataCollatorForDiffusion,
    PsidiffConfig,
    PsidiffForMaskedLM,
)

SIZES = {"hidden_size": 128, "num_blocks": 3, "num_heads": 4, "cond_dim": 64, "dropout": 0.0}


class Rows(Dataset):
    """Pieces of a text, each beginning anywhere."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.data.rows(torch.tensor([i])).tokens[0]}


def main(arguments: Sequence[str] | None = None) -> Trainer:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out")
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--warmup", type=int, default=100)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args(arguments)
    torch.manual_seed(chosen.seed)
    text = corpus(read_recipe("shakespeare").data)
    model = PsidiffForMaskedLM(
        PsidiffConfig(
            vocab_size=text.vocab_size,
            length=text.train.length,
            codec=text.codec.describe(),
            card={"name": "shakespeare by Trainer", "recipe": "shakespeare"},
            **SIZES,
        )
    )
    settings = TrainingArguments(
        chosen.out,
        max_steps=chosen.steps,
        per_device_train_batch_size=16,
        learning_rate=chosen.learning_rate,
        warmup_steps=chosen.warmup,
        lr_scheduler_type="cosine",
        logging_steps=100,
        save_strategy="no",
        report_to="none",
        seed=chosen.seed,
    )
    collator = DataCollatorForDiffusion(model, given=0.1)
    trainer = Trainer(model, settings, collator, Rows(text.train))
    trainer.train()
    trainer.save_model(chosen.out)
    return trainer


if __name__ == "__main__":
    main()
