"""Model: a denoiser with prior, schedule, codec and config; loaded, saved, sampled."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from .checksums import reading, said_of
from .data.codec import Codec, load_codec
from .distributed import compile_blocks
from .files import load_tensors, read_object, save_tensors, write_atomic, write_object
from .generate import Decoded, generate, generate_distributed, under_torchrun
from .model_card import readme
from .model_config import ModelConfig, ModelParts
from .models import NETWORKS, Parameterized
from .process import NoiseSchedule, Prior
from .process.prior import PRIORS
from .process.schedule import SCHEDULES
from .registry import check_options
from .released_checkpoints import read_released
from .request import build_request, trace_metadata
from .sampling import Kappa
from .sampling.loop import OnStep
from .types import align_memory, check_choice, check_float64, device_here

_DTYPES = ("float32", "bfloat16", "float16", "float64")


class Model(ModelParts):
    """A trained network with all that sampling, evaluation and training need beside it.

    Args:
        denoiser: callable (z, alpha, labels=None) -> log x_theta (B, L, K) in float32, in eval
            mode; for an autoregressive model the network itself.
        prior: the noise it was trained with; None for an autoregressive model.
        schedule: the noise schedule.
        codec: what tokens mean (psidiff.data.codec); None: unknown.
        config: the description of the network, a ModelConfig.

    Example:
        >>> import psidiff
        >>> model = psidiff.load("sudoku", device="cpu")
        >>> model.prior.vocab_size, model.length
        (9, 81)
    """

    def sample(
        self,
        num_samples: int,
        num_steps: int | None = None,
        kappa: str | Kappa = "auto",
        top_p: float | None = None,
        seed: int = 0,
        prompt: str | Sequence[str] | None = None,
        infill: Any = None,
        labels: Any = None,
        *,
        batch_size: int | None = None,
        record: bool = False,
        whole: bool = False,
        split: bool = True,
        on_step: OnStep | None = None,
        **options: Any,
    ) -> Decoded:
        """Draw samples. Equal seeds draw equal random numbers, whatever the batches.

        Args:
            num_samples: how many samples B.
            num_steps: number of sampling steps; None: as the sampler says, else 256.
            kappa: a rule, or one in words such as "cap:0.01"; "auto": what the model
                recommends,
                else cap:0.005.
            top_p: mass of the nucleus; None: no truncation.
            seed: of all random numbers.
            prompt: what a text begins with, one for all or one for each (`suffix=`: its end).
            infill: a template ("Once upon a {{8}} there was": a blank of 8 tokens), a puzzle
                with
                blanks, an image with transparent pixels, or ids (L,) or (B, L), -1 where free.
            labels: one for all or one for each, by number or by name; "each": all classes in
                turn.
            batch_size: samples at a time; None: what fits into memory.
            record: keep a `Trace` of every step in `.trace`.
            whole: do not cut text at an end-of-text token.
            split: under torchrun each process makes its share, and all get all.
            on_step: called with (i, step, z, route) after each step; see
                `psidiff.sampling.sample`.
            **options: those of a `Sampler`, in words or as objects (schedule, grid, last,
                temperature, min_p, top_k, nucleus, guidance, predictor, corrector, head,
                micro_batch), and graph; `sampler`, a Sampler or its words ("cap:.01
                steps=64"), or
                `preset`, a named one, which the other options overrule; `length` beyond the
                model's
                for windows that see `overlap` tokens of the last; `first_index`. An
                autoregressive
                model takes temperature, top_p, min_p and top_k.

        Returns:
            Samples with .tokens (B, L), .text or .images, .nfe and .trace.

        Raises:
            ValueError: if an option does not exist, is out of range, or does not fit the model.

        Example:
            >>> import psidiff
            >>> model = psidiff.load("digits", device="cpu")
            >>> made = model.sample(2, num_steps=4, labels=7, seed=1)
            >>> made.tokens.shape, made.images[0].shape
            (torch.Size([2, 64]), (8, 8))
        """
        request = build_request(
            self, num_samples, num_steps, kappa, top_p, seed, prompt, infill, labels, **options
        )
        how: dict[str, Any] = {"batch_size": batch_size, "on_step": on_step}
        if split and not record and under_torchrun():
            made = generate_distributed(self, request, **how)
        else:
            made = generate(self, request, record=record, **how)
        if made.trace is not None:
            made.trace.about.update(trace_metadata(self, request))
        return replace(made, whole=whole)

    def compile(self) -> Model:
        """Compile the network's blocks in place.

        The first passes of a shape take long, the others are faster, most of all on a GPU.

        Returns:
            The model itself.

        Example:
            >>> import psidiff
            >>> model = psidiff.load("digits", device="cpu").compile()
        """
        compile_blocks(self.network)
        return self

    def save(self, folder: str | Path, dtype: torch.dtype | None = None) -> None:
        """Write model.safetensors, psidiff.json and, with a codec, codec.json, which `load`
        reads.

        The parameters are written last and at once, so a reader never sees half of them.

        Args:
            folder: where to; it is made if it does not exist.
            dtype: how parameters are stored, such as torch.float16; None: as they are.

        Raises:
            ValueError: if the network is a wrapped callable.

        Example:
            >>> import psidiff
            >>> psidiff.load("digits", device="cpu").save("copy", dtype=torch.float16)
            >>> psidiff.load("copy", device="cpu").length
            64
        """
        if self.config.network is None:
            raise ValueError(
                "only a transformer or a U-Net can be saved, not a wrapped callable"
            )
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        described = {
            "prior": None if self.prior is None else PRIORS.to_dict(self.prior),
            "schedule": SCHEDULES.to_dict(self.schedule),
            **self.config.to_dict(),
        }
        write_object(folder / "psidiff.json", described, indent=1)
        if self.codec is not None:
            write_object(folder / "codec.json", self.codec.describe())
        state = self.network.state_dict()
        weights = {n: v.to(dtype or v.dtype) for n, v in state.items()}
        about = {"format": "pt", "library": "psidiff", "network": self.config.network}
        save_tensors(folder / "model.safetensors", weights, about)

    save_pretrained = save

    @classmethod
    def from_pretrained(
        cls, name_or_path: str | Path, device: str = "auto", dtype: str | torch.dtype = "auto"
    ) -> Model:
        """`psidiff.load`, by the name that the libraries of the Hub use.

        Args:
            name_or_path: as in `psidiff.load`: a name, a folder, an id on the Hub.
            device: cpu, cuda, cuda:N or mps; "auto": the GPU if there is one.
            dtype: float32, bfloat16, float16 or float64; "auto": float32.

        Returns:
            The model, in eval mode.

        Raises:
            ValueError: if there is no such model, or the device is missing.

        Example:
            >>> from psidiff import Model
            >>> Model.from_pretrained("digits", device="cpu").length
            64
        """
        return load(name_or_path, device, dtype)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        card: str | None = None,
        license: str | None = None,
        private: bool | None = None,
        token: str | None = None,
        dtype: torch.dtype | None = None,
        commit_message: str = "Upload a psidiff model",
    ) -> str:
        """Upload what `save` writes and a README to the Hub; `psidiff.load(repo_id)` reads it.

        Args:
            repo_id: owner/name; the repository is made if it does not exist.
            card: Markdown for the README; numbers of a table below "## Scores" become metrics
                of its header. None: the card of the shipped model of this name, or a few words.
            license: an id of the Hub, such as "apache-2.0"; None: none is named.
            private: for a new repository; None: as the owner's default is.
            token: of the Hub; None: the one that is stored.
            dtype: how parameters are stored; None: as they are.
            commit_message: of the one commit that is made.

        Returns:
            The address of the commit.

        Raises:
            ValueError: if repo_id is not owner/name, the network is a wrapped callable, or the
                Hub refuses.

        Example:
            >>> import psidiff
            >>> model = psidiff.load("digits", device="cpu")
            >>> address = model.push_to_hub("me/digits", license="mit")  # doctest: +SKIP
        """
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo_id):
            raise ValueError(f"repo_id must be owner/name, got {repo_id!r}")
        from huggingface_hub import HfApi

        with TemporaryDirectory() as made:
            folder = Path(made)
            self.save(folder, dtype)
            write_atomic(folder / "README.md", readme(self, repo_id, card, license))
            try:
                api = HfApi(token=token)
                place = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
                done = api.upload_folder(
                    repo_id=place, folder_path=folder, commit_message=commit_message
                )
            except Exception as error:
                raise ValueError(f"the Hub did not take {repo_id}: {_reason(error)}") from error
        return str(getattr(done, "commit_url", done))


def assemble(
    state: dict[str, Tensor],
    prior: Prior | None,
    schedule: NoiseSchedule,
    config: Mapping[str, Any],
    codec: Codec | None = None,
) -> Model:
    """A model from parameters and a description; every parameter must find its place."""
    described = config if isinstance(config, ModelConfig) else ModelConfig.from_dict(config)
    kind = NETWORKS.find_class(described.network)
    check_options(f"the {described.network}", kind, described.options)
    with torch.device("meta"):
        network = kind(**described.options)
    wanted = {name: tuple(value.shape) for name, value in network.state_dict().items()}
    given = {name: tuple(value.shape) for name, value in state.items()}
    for name in (*wanted, *given):
        if wanted.get(name) != given.get(name):
            raise ValueError(
                f"parameter {name} does not fit: the network has {wanted.get(name)}, "
                f"the file {given.get(name)}"
            )
    network.load_state_dict({n: align_memory(v) for n, v in state.items()}, assign=True)
    network.eval().requires_grad_(False)
    if prior is None:
        return Model(network, None, schedule, codec, described)
    size = described.options.get("vocab_size", prior.vocab_size)
    if size != prior.vocab_size:
        raise ValueError(
            f"the prior is of {prior.vocab_size:,} tokens, the network of {size:,}"
        )
    denoiser = Parameterized(network, prior, described.predicts).eval()
    return Model(denoiser, prior, schedule, codec, described)


def load(
    name_or_path: str | Path, device: str = "auto", dtype: str | torch.dtype = "auto"
) -> Model:
    """Load a model.

    Args:
        name_or_path: the name of a model that ships, a run folder, a folder that `Model.save`
            wrote, a released .ckpt, a hub-style folder, or an id on the Hub (owner/name).
        device: cpu, cuda, cuda:N or mps; "auto": the GPU if there is one.
        dtype: float32, bfloat16, float16 or float64; "auto": float32.

    Returns:
        The `Model`, in eval mode.

    Raises:
        ValueError: if there is no such model, its files are damaged, or the device is missing.

    Example:
        >>> import psidiff
        >>> psidiff.load("shakespeare", device="cpu").length
        128
    """
    place = device_here(device)
    kind = _dtype(dtype, place)
    path = _resolve_path(str(name_or_path))
    lone = path.is_file() and path.suffix == ".safetensors"
    weights = path if lone else path / "model.safetensors"
    if (weights.parent / "psidiff.json").is_file():
        model = _load_native(weights)
    elif lone and not (
        path.name == "model.safetensors" and path.with_name("config.json").is_file()
    ):
        raise ValueError(
            f"{path} holds parameters only: what is loaded is a folder that has psidiff.json "
            "beside model.safetensors"
        )
    else:
        model = load_released(path.parent if lone else path)
    try:
        model.denoiser.to(place, kind)
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"device {place} cannot be used here: {reason}") from error
    return model


from_pretrained = load  # by the name that the libraries of the Hub use


def load_released(path: Path, ema: bool = True) -> Model:
    """A released checkpoint in float32 on the CPU: averaged weights, or the raw ones."""
    found = read_released(path, ema)
    with said_of(path):
        state = found.state
        if found.averaged is not None:
            raw = assemble(state, found.prior, found.schedule, found.config)
            names = [name for name, _ in raw.network.named_parameters()]
            if len(found.averaged) != len(names):
                raise ValueError(
                    f"the file averages {len(found.averaged)} parameters, its network has "
                    f"{len(names)}"
                )
            state = {**state, **dict(zip(names, found.averaged, strict=True))}
        state = {k: v.float() if v.is_floating_point() else v for k, v in state.items()}
        return assemble(state, found.prior, found.schedule, found.config, found.codec)


def _dtype(name: str | torch.dtype, device: torch.device) -> torch.dtype:
    """A precision that networks run in."""
    word = str(name).removeprefix("torch.")
    check_choice("dtype", word, ("auto", *_DTYPES))
    if word == "float64":
        check_float64(device)
    return torch.float32 if word == "auto" else getattr(torch, word)


def list_pretrained() -> list[str]:
    """The names of the models in the package."""
    inside = files("psidiff").joinpath("pretrained").iterdir()
    return sorted(f.name for f in inside if f.joinpath("psidiff.json").is_file())


def _resolve_path(name: str) -> Path:
    """Where a model is: a path, the package, or the cache of what the Hub sent."""
    path = Path(name)
    if not str(name).strip():
        raise ValueError("a model has a name, a path or an id on the Hub, got none")
    if path.is_dir() and not any(path.glob("*.json")) and not any(path.glob("*.ckpt")):
        raise ValueError(f"{name} is a folder without a model in it")
    if path.exists():
        return path
    if name in list_pretrained():
        return Path(str(files("psidiff").joinpath("pretrained", name)))
    if name.count("/") == 1 and not name.startswith((".", "/", "~")):
        return _from_hub(name)
    known = ", ".join(list_pretrained()) or "none"
    raise ValueError(
        f"there is no model at {name}: give a folder, a .ckpt file, an id on the Hub "
        f"(owner/name), or one that ships ({known})"
    )


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        wanted = ["*.json", "*.safetensors", "*.txt", "*.bpe"]
        return Path(snapshot_download(name, allow_patterns=wanted))
    except Exception as error:
        raise ValueError(
            f"there is no folder {name} here, and the Hub did not send it: {_reason(error)}"
        ) from error


def _reason(error: Exception) -> str:
    """The first line of what the Hub's library says."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _load_native(weights: Path) -> Model:
    """The model of these parameters; the files beside them say what it is."""
    folder = weights.parent
    described = read_object(folder / "psidiff.json")
    if not {"prior", "schedule", "network"} <= described.keys():
        raise ValueError(f"{folder}/psidiff.json does not say its prior, schedule and network")
    prior, schedule = described.pop("prior"), described.pop("schedule")
    if not weights.is_file():
        raise ValueError(f"{folder} has no {weights.name} yet")
    codec_file = folder / "codec.json"
    codec = load_codec(codec_file) if codec_file.is_file() else None
    state, _ = load_tensors(weights)
    with reading(folder / "psidiff.json"):
        noise = None if prior is None else PRIORS.from_dict(prior)
        levels = SCHEDULES.from_dict(schedule)
    with said_of(folder / "psidiff.json"):
        return assemble(state, noise, levels, described, codec)
