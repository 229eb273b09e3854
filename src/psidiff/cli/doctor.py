"""`psidiff doctor`: what is installed, what would be used, what is missing for what."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .. import __version__
from ..files import folder_of
from ..model import list_pretrained, load
from .terminal import say

NEEDED = [
    "torch",
    "numpy",
    "safetensors",
    "huggingface-hub",
    "tokenizers",
    "PyYAML",
    "typer",
    "rich",
]
OPTIONAL = (  # package, the module it brings, the extra that has it if one does, what needs it
    ("pillow", "PIL", "images", "train: PNG and JPEG folders, the JPEG copy of CIFAR-10"),
    ("pyarrow", "pyarrow", "data", "train, evaluate, data: Parquet files"),
    ("datasets", "datasets", "data", "train: data.train=datasets:NAME that is not here"),
    ("matplotlib", "matplotlib", "compare", "compare: figures and the report"),
    ("transformers", "transformers", "judge", "--judge with a causal LM"),
    ("accelerate", "accelerate", "transformers", "transformers' Trainer"),
    ("gguf", "gguf", "judge", "--judge with a .gguf file"),
    ("scikit-learn", "sklearn", "judge", "evaluate: MAUVE"),
    ("mauve-text", "mauve", "mauve", "evaluate: the metric mauve-text"),
    ("lm_eval", "lm_eval", "harness", "evaluate: --harness"),
    ("diffusers", "diffusers", "diffusers", "integrations.diffusers: PsiScheduler"),
    ("fastapi", "fastapi", "serve", "serve"),
    ("uvicorn", "uvicorn", "serve", "serve"),
    ("pydantic", "pydantic", "serve", "serve"),
    ("jinja2", "jinja2", "serve", "serve: templates of chats"),
    ("tensorboard", "tensorboard", "", "train: tracker=tensorboard"),
    ("wandb", "wandb", "", "train: tracker=wandb"),
)


def examine(console: Console, checkpoint: str | None) -> bool:
    """Print the findings. False: something that is needed is missing or broken."""
    console.print(f"psidiff {__version__}, Python {platform.python_version()}", highlight=False)
    healthy = _packages(console)
    device, dtype = device_and_dtype()
    console.print(f"device: {device}; dtype: {dtype}", highlight=False)
    _folders(console)
    if checkpoint is not None:
        healthy &= _checkpoint(console, checkpoint)
    return healthy


def device_and_dtype() -> tuple[str, str]:
    """What `--device auto` is, and the precision a network runs in there by default."""
    if torch.cuda.is_available():
        return f"cuda ({torch.cuda.get_device_name()})", "float32, bfloat16 on request"
    if torch.backends.mps.is_available():
        return "cpu (mps is there, untested: --device mps)", "float32"
    return f"cpu ({torch.get_num_threads()} threads)", "float32, bfloat16 on request"


def _packages(console: Console) -> bool:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("package", "version", "for"):
        table.add_column(column)
    versions = {name: _version(name) for name in NEEDED}
    for name, number in versions.items():
        table.add_row(name, number or "[bold red]missing[/]", "everything")
    for name, module, extra, purpose in OPTIONAL:
        number = _version(name) if find_spec(module) else None
        more = "" if number else f"\n{install(name, extra)}"
        table.add_row(name, number or "[yellow]not installed[/]", escape(purpose + more))
    console.print(table)
    return all(versions.values())


def install(package: str, extra: str) -> str:
    """What to type to get a package."""
    return f"pip install 'psidiff[{extra}]'" if extra else f"pip install {package}"


def _folders(console: Console) -> None:
    for name, purpose in (("PSIDIFF_DATA", "data"), ("PSIDIFF_CACHE", "tokens made of it")):
        folder = folder_of(name)
        state = "" if folder.is_dir() else " (not there yet)"
        say(console, f"{purpose}: {folder}{state}, set {name} to change it")
    console.print(f"models that ship: {', '.join(list_pretrained())}", highlight=False)


def _checkpoint(console: Console, name: str) -> bool:
    """Load it on the CPU, ask it once, and say what it is."""
    model = load(name, device="cpu")
    say(
        console,
        f"{name}: {model.config.network}, {model.num_parameters:,} parameters, "
        f"{model.prior or 'next token'}, {model.schedule}, "
        f"length {model.config.length}, "
        f"codec {type(model.codec).__name__ if model.codec else 'none'}",
    )
    bad = [n for n, p in model.network.named_parameters() if not bool(p.isfinite().all())]
    if bad:
        say(console, f"{name}: {bad[0]} holds numbers that are not finite", style="bold red")
        return False
    length = model.config.length or 16
    length = length if model.config.network == "unet" else min(length, 16)
    tokens = torch.zeros(1, length, dtype=torch.int64)
    with torch.no_grad():
        log_probs = model.denoiser(tokens, 0.5)
    good = bool((log_probs.isfinite() | log_probs.isneginf()).all())
    verdict = ("it answers", "green") if good else ("its answer is not finite", "bold red")
    say(console, f"{name}: ", verdict)
    return good


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
