"""Small files in the formats of the paper's: checkpoints, corpora, images, a judge, Inception.

Everything is made here from seeds, so that the commands of docs/reproduce.md run anywhere. The
networks are random: what they make says that a command works, and nothing about the paper.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from psidiff.evaluation.inception import InceptionV3
from psidiff.models import Transformer, UNet

EOS = "<|endoftext|>"
MODELS = (
    *("duo", "duo-distilled", "duo++", "lm1b-duo++"),
    *("mdlm", "mdlm-distilled", "lm1b-mdlm"),
)
SHAPE = {"hidden_size": 32, "num_blocks": 1, "num_heads": 2, "cond_dim": 16}
LENGTH, IMAGE, IMAGES = 64, 8, 40
CHOICES = (
    *("arc_easy", "arc_challenge", "hellaswag", "winogrande"),
    *("piqa", "mathqa", "openbookqa"),
)


def make(folder: Path) -> dict[str, str]:
    """All of them in a folder that may have them already. Returns name -> path."""
    data, done = folder / "data", folder / "made.json"
    if done.is_file():
        return json.loads(done.read_text(encoding="utf-8"))
    folder.mkdir(parents=True, exist_ok=True)
    texts = list(_documents(400))
    tokenizer = _tokenizer(folder / "tokenizer", texts)
    K = tokenizer.get_vocab_size()
    made = {"data": data, "owt": data / "openwebtext.jsonl", "lm1b": data / "lm1b.jsonl"}
    for number, name in enumerate(MODELS):
        kind = "mdlm" if "mdlm" in name else "duo"
        made[name] = _language_model(folder / name, K, kind, number, tokenizer)
    for name in ("cifar10-duo", "cifar10-mdlm"):
        made[name] = _image_model(folder / f"{name}.ckpt", name.split("-")[1])
    made["judge"] = _judge(folder / "judge", tokenizer)
    made["inception"] = _inception(folder / "inception.pt")
    made["cifar10"] = _images(folder / "cifar10.npz")
    _corpora(data, texts)
    words = {name: str(path) for name, path in made.items()}
    done.write_text(json.dumps(words), encoding="utf-8")
    return words


def _documents(count: int) -> Iterator[str]:
    """Sentences of a small language: a few hundred words with a law of their order."""
    rng = np.random.default_rng(0)
    syllables = ["ka", "lo", "mi", "ter", "an", "su", "re", "vo", "pel", "no"]
    words = ["".join(rng.choice(syllables, rng.integers(1, 4))) for _ in range(300)]
    follow = rng.integers(300, size=(300, 6))
    for _ in range(count):
        word, said = int(rng.integers(300)), []
        for _ in range(int(rng.integers(30, 120))):
            said.append(words[word] + ("." if rng.random() < 0.1 else ""))
            word = int(follow[word, rng.integers(6)])
        yield " ".join(said)


def _tokenizer(folder: Path, texts: list[str]) -> Any:
    """A byte-level BPE as GPT-2's is, with its end of text as the last token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=399, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([EOS])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def _language_model(folder: Path, K: int, kind: str, seed: int, tokenizer: Any) -> Path:
    """A folder as the published ones on the Hub: config.json and model.safetensors."""
    K = K + 1 if kind == "mdlm" else K  # the mask is the last token
    torch.manual_seed(seed)
    network = _shaken(Transformer(K, **SHAPE))
    folder.mkdir(parents=True, exist_ok=True)
    state = {f"backbone.{name}": value for name, value in network.state_dict().items()}
    save_file(
        {name: value.contiguous() for name, value in state.items()},
        folder / "model.safetensors",
    )
    config = {"model_type": kind, "vocab_size": K, "model_length": LENGTH, "dropout": 0.1}
    config |= {"hidden_dim": SHAPE["hidden_size"], "cond_dim": SHAPE["cond_dim"]}
    config |= {"n_blocks": SHAPE["num_blocks"], "n_heads": SHAPE["num_heads"]}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def _image_model(path: Path, kind: str) -> Path:
    """A Lightning file of a U-Net for RGB images, as training on CIFAR-10 leaves it."""
    torch.manual_seed(len(kind))
    network = _shaken(
        UNet(width=16, image_size=IMAGE, channels=3, width_mult=(1, 2), num_classes=10)
    )
    state = {f"backbone.{name}": value for name, value in network.state_dict().items()}
    shape = {"ch": 16, "ch_mult": [1, 2], "num_res_blocks": 2, "num_scales": 2, "name": "unet"}
    shape |= {"input_channels": 3, "scale_count_to_put_attn": 1, "skip_rescale": True}
    shape |= {"time_embed_dim": 16, "time_scale_factor": 1000, "size": IMAGE**2}
    config = {
        "model": {**shape, "length": 3 * IMAGE**2, "dropout": 0.1},
        "algo": {
            "name": kind,
            "backbone": "unet",
            "causal_attention": False,
            "time_conditioning": kind == "mdlm",
        },
        "data": {"tokenizer_name_or_path": "raw_pixels", "train": "cifar10", "num_classes": 10},
        "noise": {"type": "cosine" if kind == "mdlm" else "log-linear", "eps": 1e-3},
    }
    shadow = [parameter.detach() for parameter in network.parameters()]
    torch.save(
        {
            "state_dict": state,
            "hyper_parameters": {"config": config},
            "ema": {"decay": 0.9999, "num_updates": 5, "shadow_params": shadow},
            "epoch": 3,
            "global_step": 1000,
        },
        path,
    )
    return path


def _shaken(network: Any) -> Any:
    """Random weights everywhere: networks begin with zeros in the last layer."""
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return network


def _judge(folder: Path, tokenizer: Any) -> Path:
    """A causal language model of transformers with GPT-2's architecture."""
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    torch.manual_seed(7)
    eos = tokenizer.token_to_id(EOS)
    config = GPT2Config(
        vocab_size=tokenizer.get_vocab_size(),
        n_positions=1024,
        n_embd=32,
        n_layer=1,
        n_head=2,
        bos_token_id=eos,
        eos_token_id=eos,
    )
    GPT2LMHeadModel(config).save_pretrained(folder)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=EOS, eos_token=EOS, unk_token=EOS
    )
    fast.save_pretrained(folder)
    return folder


def _inception(path: Path) -> Path:
    """Random weights in the shapes of FID's network; its numbers are not called FID."""
    g, network = torch.Generator().manual_seed(0), InceptionV3()
    with torch.no_grad():
        for weight in network.parameters():
            if weight.ndim == 4:  # so that features do not fade from layer to layer
                spread = (2 / weight[0].numel()) ** 0.5
                weight.copy_(spread * torch.randn(weight.shape, generator=g))
    torch.save(network.state_dict(), path)
    return path


def _images(path: Path) -> Path:
    """Blobs of ten colours, one a class."""
    rng = np.random.default_rng(1)
    labels = np.arange(IMAGES) % 10
    y, x = np.mgrid[:IMAGE, :IMAGE]
    colours = rng.integers(60, 255, (10, 3))
    centres = rng.uniform(2, IMAGE - 3, (IMAGES, 2))
    distance = (y - centres[:, :1, None]) ** 2 + (x - centres[:, 1:, None]) ** 2
    blob = np.exp(-distance / 6)[..., None] * colours[labels][:, None, None]
    images = np.clip(blob + rng.normal(0, 8, blob.shape), 0, 255).astype(np.uint8)
    np.savez(path, images=images, labels=labels)
    return path


def _corpora(data: Path, texts: list[str]) -> None:
    """OpenWebText and LM1B, the zero-shot corpora, each in a format that people have."""
    data.mkdir(parents=True, exist_ok=True)
    _json_lines(data / "openwebtext.jsonl", [{"text": text} for text in texts[:300]])
    _json_lines(data / "lm1b.jsonl", [{"text": text[:80]} for text in texts[:200]])
    some = texts[300:320]
    for name, field in (("lm1b", "text"), ("pubmed", "article"), ("arxiv", "article")):
        (data / name).mkdir(exist_ok=True)
        _json_lines(data / name / "validation.jsonl", [{field: text} for text in some])
        _json_lines(data / name / "test.jsonl", [{field: text} for text in some])
    for name, file in (("ptb", "ptb.valid.txt"), ("wikitext2", "valid.txt")):
        (data / name).mkdir(exist_ok=True)
        (data / name / file).write_text(
            "".join(f" {text} \n" for text in some), encoding="utf-8"
        )
    _choices(data, some)
    (data / "lambada").mkdir(exist_ok=True)
    _json_lines(data / "lambada" / "lambada_test.jsonl", [{"text": text} for text in some])
    (data / "ag_news").mkdir(exist_ok=True)
    with (data / "ag_news" / "test.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows((1, "news", text) for text in some)


def _choices(data: Path, texts: list[str]) -> None:
    """The seven tasks: how a text goes on, with the beginnings of others to choose from."""
    for task in CHOICES:
        rows = []
        for number, text in enumerate(texts[:6]):
            words = text.split()
            others = [each.split()[8:12] for each in texts[number + 1 : number + 3]]
            choices = [" ".join(each) for each in (words[8:12], *others)]
            rows.append({"query": " ".join(words[:8]), "choices": choices, "gold": 0})
        _json_lines(data / f"{task}.jsonl", rows)


def _json_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
