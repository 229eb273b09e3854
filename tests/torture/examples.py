"""Whole examples of every kind of file, made once by the commands that make them."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import os
import pickle
import shutil
import struct
import sys
import tarfile
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .workers import GIB, command_here, run

RECIPE: dict[str, Any] = {
    "name": "tiny",
    "data": {
        "kind": "text",
        "train": "words.txt",
        "valid_share": 0.2,
        "tokenizer": "characters",
        "length": 16,
        "packing": "crops",
    },
    "model": {
        "kind": "transformer",
        "hidden_size": 16,
        "num_blocks": 1,
        "num_heads": 2,
        "cond_dim": 8,
        "dropout": 0.1,
    },
    "prior": "uniform",
    "train": {
        "steps": 4,
        "batch_size": 4,
        "warmup": 2,
        "ema": 0.9,
        "log_every": 1,
        "save_every": 2,
        "eval_every": 4,
    },
    "eval": {"sequences": 4, "samples": 2, "steps": 2},
    "tracker": "none",
}
HUB = {
    "model_type": "duo",
    "vocab_size": 11,
    "model_length": 16,
    "hidden_dim": 16,
    "n_blocks": 1,
    "n_heads": 2,
    "cond_dim": 8,
    "dropout": 0.1,
    "time_conditioning": True,
}
LIGHTNING = {
    "model": {
        "hidden_size": 16,
        "cond_dim": 8,
        "n_heads": 2,
        "n_blocks": 1,
        "length": "${.max_length}",
        "max_length": 16,
        "dropout": 0.1,
    },
    "algo": {"name": "duo", "causal_attention": False, "time_conditioning": True},
    "data": {"tokenizer_name_or_path": "gpt2", "cache": "${cwd:}/x"},
    "noise": {"type": "log-linear", "eps": 1e-3},
}


class Examples:
    """One folder for each group of files; each is made when it is first asked for."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(parents=True, exist_ok=True)
        self.words = root / "words.txt"  # runs know it by its whole path
        if not self.words.is_file():
            write_words(self.words)

    def copy(self, group: str, to: Path) -> None:
        """The files of a group, in a folder of their own."""
        folder = self.root / group
        if not folder.is_dir():
            fresh = self.root / f".{group}"
            shutil.rmtree(fresh, ignore_errors=True)
            fresh.mkdir()
            getattr(self, f"_make_{group}")(fresh)
            for left in fresh.glob(".said*"):
                left.unlink()
            os.replace(fresh, folder)
        shutil.copytree(folder, to, symlinks=True)

    def _run(self, folder: Path, *arguments: Any) -> None:
        work = arguments[0] if callable(arguments[0]) else arguments
        ended = run(work, folder, seconds=120, memory=8 * GIB)
        if ended.code != 0:
            raise RuntimeError(f"{arguments} gave {ended.code}: {ended.err}")

    def _make_run(self, folder: Path) -> None:
        """A finished training with its data, recipe and checkpoints."""
        write_recipe(folder / "tiny.yaml", self.words)
        self._run(folder, "train", "tiny.yaml", "--out", "run", "--device", "cpu")

    def _make_oldrun(self, folder: Path) -> None:
        """The same, whose checkpoints are those of version 1: parts and an index in pickles."""
        from psidiff.training import checkpoint

        write_recipe(folder / "tiny.yaml", self.words)

        def work() -> int:
            checkpoint.save = save_as_version_1
            return command_here(("train", "tiny.yaml", "--out", "run", "--device", "cpu"))

        self._run(folder, work)

    def _make_shards(self, folder: Path) -> None:
        """A model, and samples of it in a folder."""
        self.copy("run", folder / "made")
        shutil.copytree(folder / "made" / "run", folder / "model")
        shutil.rmtree(folder / "model" / "checkpoints")
        shutil.rmtree(folder / "made")
        self._run(folder, *SAMPLE, "--out", "shards")

    def _make_trace(self, folder: Path) -> None:
        self.copy("shards", folder / "made")
        shutil.move(folder / "made" / "model", folder / "model")
        shutil.rmtree(folder / "made")
        self._run(folder, "sample", "model", "-n", 2, "--steps", 3, "--trace", "a.trace")

    def _make_report(self, folder: Path) -> None:
        """A comparison that goes on by the same command."""
        self._run(folder, *COMPARE)

    def _make_corpus(self, folder: Path) -> None:
        """Text in every form that a recipe may name."""
        write_recipe(folder / "tiny.yaml", self.words, steps=1, save_every=1, eval_every=1)
        write_words(folder / "a.txt")
        text = (folder / "a.txt").read_bytes()
        lines = "".join(json.dumps({"text": each}) + "\n" for each in text.decode().split(". "))
        (folder / "a.jsonl").write_text(lines)
        np.save(folder / "a.npy", np.arange(400).reshape(25, 16) % 23)
        for name, data in (("a.txt", text), ("a.jsonl", lines.encode())):
            (folder / f"{name}.gz").write_bytes(gzip.compress(data, mtime=0))
            (folder / f"{name}.xz").write_bytes(lzma.compress(data, preset=0))
        with tarfile.open(folder / "a.tar.gz", "w:gz") as archive:
            archive.add(folder / "a.txt", "a.txt")
        (folder / "tokenizer.json").write_text(_tokenizer(text))

    def _make_store(self, folder: Path) -> None:
        """The tokens of a corpus as they are kept between runs."""
        write_recipe(folder / "tiny.yaml", self.words, steps=1, save_every=1, eval_every=1)
        self._run(folder, "train", "tiny.yaml", "--out", "run", "--device", "cpu")
        shutil.rmtree(folder / "run")

    def _make_images(self, folder: Path) -> None:
        """Pictures in every form that a recipe may name."""
        from PIL import Image

        rng = np.random.default_rng(0)
        pixels = rng.integers(0, 256, (12, 4, 4), dtype=np.uint8)
        recipe = {
            **RECIPE,
            "data": {"kind": "images", "path": "set.npz", "levels": 16},
            "train": {**RECIPE["train"], "steps": 1, "save_every": 1, "eval_every": 1},
        }
        (folder / "tiny.yaml").write_text(json.dumps(recipe))
        np.savez_compressed(
            folder / "set.npz", images=pixels, labels=np.arange(12) % 3, classes=["a", "b", "c"]
        )
        for name in ("ring", "bar"):
            (folder / "pictures" / name).mkdir(parents=True)
            for i in range(3):
                Image.fromarray(pixels[i]).save(folder / "pictures" / name / f"{i}.png")
                Image.fromarray(pixels[i]).save(folder / "pictures" / name / f"{i}.jpeg")
        idx = folder / "idx"
        idx.mkdir()
        raw = struct.pack(">IIII", 2051, 12, 4, 4) + pixels.tobytes()
        (idx / "train-images-idx3-ubyte").write_bytes(raw)
        labels = struct.pack(">II", 2049, 12) + bytes(i % 3 for i in range(12))
        (idx / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(labels, mtime=0))
        cifar, binary = folder / "cifar-py", folder / "cifar-bin"
        for place, suffix in ((cifar, ""), (binary, ".bin")):
            place.mkdir()
            for i in range(1, 6):
                data = rng.integers(0, 256, (2, 3072), dtype=np.uint8)
                batch = {b"data": data, b"labels": [0, 1]}
                raw = pickle.dumps(batch, 2)
                if suffix:
                    raw = b"".join(bytes([n]) + row.tobytes() for n, row in enumerate(data))
                (place / f"data_batch_{i}{suffix}").write_bytes(raw)
        (cifar / "batches.meta").write_bytes(pickle.dumps({b"label_names": [b"a", b"b"]}, 2))
        (binary / "batches.meta.txt").write_text("a\nb\n")

    def _make_picture(self, folder: Path) -> None:
        """A picture with free pixels for a model of pictures."""
        from PIL import Image

        rng = np.random.default_rng(0)
        pixels = rng.integers(0, 256, (8, 8, 2), dtype=np.uint8)
        pixels[..., 1] = 255 * (pixels[..., 1] > 128)
        Image.fromarray(pixels, "LA").save(folder / "given.png")

    def _make_official(self, folder: Path) -> None:
        """What Lightning writes, with the classes of packages that are not here."""
        from psidiff.models import Transformer

        network = Transformer(11, 16, 1, 2, 8, per_position_levels=False)
        with omegaconf() as (tree, tokenizer):
            content = {
                "state_dict": {f"backbone.{k}": v for k, v in network.state_dict().items()},
                "hyper_parameters": {"config": tree(LIGHTNING), "tokenizer": tokenizer()},
                "epoch": 3,
                "ema": {
                    "decay": 0.9999,
                    "num_updates": 5,
                    "shadow_params": [p.detach() + 1 for p in network.parameters()],
                },
            }
            torch.save(content, folder / "model.ckpt")
            torch.save(content, folder / "old.ckpt", _use_new_zipfile_serialization=False)
        (folder / "vocab.txt").write_text("\n".join(_WORDPIECES))

    def _make_hub(self, folder: Path) -> None:
        """A folder as released models have on the Hub, with its tokenizer."""
        from safetensors.torch import save_file

        from psidiff.models import Transformer

        network = Transformer(11, 16, 1, 2, 8, per_position_levels=False)
        state = {f"backbone.{k}": v.contiguous() for k, v in network.state_dict().items()}
        (folder / "hub").mkdir()
        save_file(state, folder / "hub" / "model.safetensors")
        (folder / "hub" / "config.json").write_text(json.dumps(HUB))
        (folder / "hub" / "vocab.txt").write_text("\n".join(_WORDPIECES))

    def _make_judged(self, folder: Path) -> None:
        """Samples in lines of JSON, for a model that ships."""
        rows = np.random.default_rng(0).integers(0, 17, (6, 64)).tolist()
        lines = (json.dumps({"tokens": row, "label": 3}) for row in rows)
        (folder / "samples.jsonl").write_text("\n".join(lines) + "\n")
        torch.save({"x": torch.zeros(2)}, folder / "features.pt")


SAMPLE = (
    *("sample", "model", "-n", 4, "--shard-size", 2, "--steps", 2, "--kappa", "cap:.02"),
    *("--device", "cpu"),
)
COMPARE = (
    *("compare", "--oracle", "--steps", "2,3", "--kappa", "ancestral", "--samples", 4),
    *("--out", "report", "--device", "cpu"),
)
_WORDPIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "##a", "##b"]


def write_words(path: Path, count: int = 4000) -> None:
    """Text of a few syllables."""
    rng = np.random.default_rng(0)
    words = ["".join(rng.choice(["ba", "do", "ke", "mi", "su"], 2)) for _ in range(count // 5)]
    path.write_text(" ".join(w + "." if i % 9 == 8 else w for i, w in enumerate(words)))


def write_recipe(path: Path, words: Path, **train: Any) -> None:
    """JSON is YAML too."""
    recipe = {**RECIPE, "train": {**RECIPE["train"], **train}}
    recipe["data"] = {**RECIPE["data"], "train": str(words)}
    path.write_text(json.dumps(recipe, indent=1))


def _tokenizer(text: bytes) -> str:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel()
    made.train_from_iterator([text.decode()], trainers.BpeTrainer(vocab_size=64))
    return made.to_str()


def save_as_version_1(
    folder: Path, step: int, tensors: dict[str, Any], facts: dict[str, Any], group: Any
) -> None:
    """A checkpoint as it was before: torch's own files, and facts without a checksum."""
    from torch.distributed import checkpoint as dcp

    final = folder / f"step-{step:08d}"
    dcp.save(tensors, checkpoint_id=final, no_dist=True)
    (final / "facts.json").write_text(json.dumps({"format_version": 1, **facts}))


class omegaconf:
    """Classes that pickle under omegaconf's names, while it is entered."""

    def __enter__(self) -> Any:
        self.before = {n: sys.modules.get(n) for n in ("omegaconf", "omegaconf.dictconfig")}
        module = types.ModuleType("omegaconf.dictconfig")
        kinds = {}
        for name in ("DictConfig", "ListConfig", "AnyNode", "Tokenizer"):
            kinds[name] = type(name, (), {"__module__": module.__name__, "__qualname__": name})
            setattr(module, name, kinds[name])
        parent: Any = types.ModuleType("omegaconf")
        parent.dictconfig = module
        sys.modules.update({"omegaconf": parent, module.__name__: module})

        def tree(value: Any) -> Any:
            if isinstance(value, dict):
                node = kinds["DictConfig"]()
                node._content = {key: tree(each) for key, each in value.items()}
            elif isinstance(value, list):
                node = kinds["ListConfig"]()
                node._content = [tree(each) for each in value]
            else:
                node = kinds["AnyNode"]()
                node._val = value
            return node

        return tree, kinds["Tokenizer"]

    def __exit__(self, *error: Any) -> None:
        for name, module in self.before.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module


def torch_is_well() -> bool:
    """Whether torch still saves and loads."""
    held = io.BytesIO()
    torch.save({"a": torch.arange(3)}, held)
    held.seek(0)
    return bool((torch.load(held, weights_only=False)["a"] == torch.arange(3)).all())
