"""transformers' Trainer trains a uniform-state diffusion model of Shakespeare's characters.

    python examples/train_with_transformers.py out/hf --steps 1200
    psidiff evaluate out/hf --sequences 0
    psidiff sample out/hf --prompt "KING"

Of ours are the model and the collator, which draws noise levels and noise; with --muon also the
optimizer of the matrices.
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
from psidiff.training import Settings
from psidiff.training.optimizers import optimizers_of

SIZES = {"hidden_size": 128, "num_blocks": 3, "num_heads": 4, "cond_dim": 64, "dropout": 0.0}


class Rows(Dataset):
    """Pieces of a text, each beginning anywhere."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.data.rows(torch.tensor([i])).tokens[0]}


class Muon(torch.optim.Optimizer):
    """Muon for the matrices inside blocks and AdamW for the rest, as one optimizer."""

    def __init__(self, network: torch.nn.Module, learning_rate: float) -> None:
        self.parts = optimizers_of(
            network, Settings(steps=1, optimizer="muon", learning_rate=learning_rate)
        )
        super().__init__([dict(group) for group in self._groups()], {})

    def _groups(self) -> list[dict[str, Any]]:
        return [group for part in self.parts for group in part.param_groups]

    def step(self, closure: Any = None) -> None:
        for mine, group in zip(self.param_groups, self._groups(), strict=True):
            group["lr"] = mine["lr"]  # the scheduler changes mine
        for part in self.parts:
            part.step()


def main(arguments: Sequence[str] | None = None) -> Trainer:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out")
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--warmup", type=int, default=100)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--muon", action="store_true")
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
    optimizer = Muon(model.backbone, chosen.learning_rate) if chosen.muon else None
    trainer = Trainer(model, settings, collator, Rows(text.train), optimizers=(optimizer, None))
    trainer.train()
    trainer.save_model(chosen.out)
    return trainer


if __name__ == "__main__":
    main()
