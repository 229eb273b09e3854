"""A recipe: all that a run is made of, in the words a YAML file uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import yaml

from ..data.detokenizers import DETOKENIZERS
from ..files import FORMAT_VERSION, known_version
from ..models.transformer import check_sizes
from ..models.unet import check_widths
from ..sampling import Nucleus, parse_kappa
from ..training import Settings
from ..training.log import check_tracker
from ..types import as_count, check_unit
from .config import merge, nearest, override, read


@dataclass(frozen=True)
class TextData:
    """Documents from .txt, .jsonl, folders, archives, or `datasets:NAME`.

    valid: held-out text; without it the last `valid_documents`, or the last `valid_share` of
    the tokens. tokenizer: characters, text8, bytes, gpt2, bert, bpe (trained on the corpus to
    `vocab_size`), a tokenizers JSON file, or a name on the Hub.
    """

    train: str
    length: int
    kind: Literal["text"] = "text"
    valid: str | None = None
    valid_documents: int | None = None
    valid_share: float = 0.05
    tokenizer: str = "characters"
    vocab_size: int | None = None
    pad_token: bool = False  # one id more for [PAD], as Duo's GPT-2 vocabulary has
    detokenizer: str | None = None
    field: str = "text"
    split: str | None = None  # of a `datasets:` source
    valid_split: str | None = None
    packing: Literal["packed", "crops", "padded"] = "packed"
    separators: bool = True  # a separator after each document, if the tokenizer has one
    block_ends: bool = False  # each packed block begins with bos and ends with eos
    padding: Literal["masked", "learned"] = "masked"

    def __post_init__(self) -> None:
        as_count("length", self.length)
        if self.detokenizer is not None and self.detokenizer not in DETOKENIZERS:
            known = ", ".join(DETOKENIZERS)
            raise ValueError(f"detokenizer must be one of {known}, got {self.detokenizer!r}")
        if (self.tokenizer == "bpe") != (self.vocab_size is not None):
            raise ValueError("vocab_size goes with tokenizer: bpe, and with no other")


@dataclass(frozen=True)
class ImageData:
    """Images: `digits` (shipped), an .npz, a folder, CIFAR-10's or MNIST's own files.

    Where there is no test set the last `valid_share` of the images is held out.
    """

    path: str
    kind: Literal["images"] = "images"
    levels: int = 256
    flip: bool = False
    labels: bool = True
    valid_share: float = 0.1

    def __post_init__(self) -> None:
        if not 0 < self.valid_share < 1:
            raise ValueError(f"valid_share must be between 0 and 1, got {self.valid_share:g}")


@dataclass(frozen=True)
class SudokuData:
    """Complete grids, generated; symmetries make every row a new one.

    minimal: so many puzzles with one solution and no needless clue are learnt from beside the
    grids with random clues.
    """

    kind: Literal["sudoku"] = "sudoku"
    grids: int = 96_000
    minimal: int = 0
    valid_grids: int = 1_000
    seed: int = 0


@dataclass(frozen=True)
class RandomData:
    """Tokens without meaning, to measure speed and memory; image (C, H, W) for a U-Net."""

    vocab_size: int
    length: int
    kind: Literal["random"] = "random"
    classes: int = 0
    image: tuple[int, int, int] | None = None


@dataclass(frozen=True)
class TransformerModel:
    """vocab_size and length, if given, are checked against the data."""

    kind: Literal["transformer"] = "transformer"
    hidden_size: int = 768
    num_blocks: int = 12
    num_heads: int = 12
    cond_dim: int = 128
    dropout: float = 0.1
    time_conditioning: bool = True
    per_position_levels: bool = True
    learned_positions: bool = False  # for images and boards
    tied: bool = False  # the output layer reads the table of the input
    vocab_size: int | None = None
    length: int | None = None

    def __post_init__(self) -> None:
        check_sizes(self.hidden_size, self.num_blocks, self.num_heads, self.cond_dim)
        check_unit("dropout", self.dropout)


@dataclass(frozen=True)
class UNetModel:
    """The D3PM U-Net for square images; vocab_size and length are checked against the data."""

    kind: Literal["unet"] = "unet"
    width: int = 128
    width_mult: tuple[int, ...] = (1, 2, 2, 2)
    num_res_blocks: int = 2
    attention_scales: tuple[int, ...] = (1,)
    dropout: float = 0.1
    time_conditioning: bool = True
    vocab_size: int | None = None
    length: int | None = None

    def __post_init__(self) -> None:
        check_widths(self.width, self.width_mult, self.num_res_blocks)
        check_unit("dropout", self.dropout)


@dataclass(frozen=True)
class MaskedNoise:
    kind: Literal["masked"] = "masked"


@dataclass(frozen=True)
class UniformNoise:
    kind: Literal["uniform"] = "uniform"


@dataclass(frozen=True)
class MixedNoise:
    kind: Literal["mixed"] = "mixed"
    uniform: float = 0.1


@dataclass(frozen=True)
class UnigramNoise:
    """Noise with the frequencies of the training tokens."""

    kind: Literal["unigram"] = "unigram"


@dataclass(frozen=True)
class LogLinearSchedule:
    kind: Literal["loglinear"] = "loglinear"
    eps: float = 1e-3


@dataclass(frozen=True)
class CosineSchedule:
    kind: Literal["cosine"] = "cosine"
    eps: float = 1e-3


@dataclass(frozen=True)
class Relaxed:
    """The curriculum: soft tokens for the first `share` of the steps. top_k null: all K weights
    (Duo); a number: so many (Duo++)."""

    share: float = 0.5
    top_k: int | None = 2
    temperature: float = 1e-3
    final_temperature: float | None = None
    alpha_range: tuple[float, float] = (0.945, 0.049)


@dataclass(frozen=True)
class Evaluation:
    """What happens every eval_every steps: a held-out NLL on so many sequences (0: on all), and
    so many samples."""

    sequences: int = 512
    samples: int = 16
    steps: int = 128
    kappa: str = "cap:0.005"
    top_p: float | None = None

    def __post_init__(self) -> None:
        as_count("sequences", self.sequences, least=0)
        as_count("samples", self.samples, least=0)
        as_count("steps", self.steps)
        if self.top_p is not None:
            Nucleus(None, self.top_p)
        try:
            parse_kappa(self.kappa)
        except ValueError as error:
            raise ValueError(f"kappa: {error}") from error


@dataclass(frozen=True)
class Recipe:
    """One experiment. init: a model (name or folder) whose parameters it begins with."""

    name: str
    data: TextData | ImageData | SudokuData | RandomData
    model: TransformerModel | UNetModel
    train: Settings
    prior: MaskedNoise | UniformNoise | MixedNoise | UnigramNoise = UniformNoise()
    schedule: LogLinearSchedule | CosineSchedule = LogLinearSchedule()
    objective: Literal["nelbo", "cross-entropy", "plain-cross-entropy", "next-token"] = "nelbo"
    curriculum: Relaxed | None = None
    eval: Evaluation = Evaluation()
    init: str | None = None
    tracker: str = "auto"

    def __post_init__(self) -> None:
        check_tracker(self.tracker)
        if self.curriculum is not None:
            if self.prior.kind != "uniform" or self.objective != "nelbo":
                raise ValueError("curriculum needs prior: uniform and objective: nelbo")
            if not 0 < self.curriculum.share < 1:
                got = self.curriculum.share
                raise ValueError(f"curriculum.share must be between 0 and 1, got {got:g}")


def read_recipe(name_or_path: str, overrides: Sequence[str] = ()) -> Recipe:
    """A shipped recipe by name, or a YAML file; then key=value overrides."""
    before = _values(name_or_path)
    values = override(before, overrides)
    return read(Recipe, _for_masks(before, override({}, overrides), values))


def stored_recipe(folder: Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe of a run folder; what is wrong with the file is said of the file."""
    path = str(folder / "config.yaml")
    try:
        recipe = read_recipe(path)
    except ValueError as error:
        said = str(error)
        raise ValueError(said if path in said else f"{path} is damaged: {said}") from error
    return read_recipe(path, overrides) if overrides else recipe


def as_yaml(recipe: Recipe) -> str:
    """Every key with its value, as a file that `read_recipe` takes."""
    values = {"format_version": FORMAT_VERSION, **_lists(asdict(recipe))}
    return yaml.safe_dump(values, sort_keys=False)


def shipped() -> dict[str, str]:
    """The recipes in the package, and the first line of each."""
    found = sorted(files("psidiff.recipes").iterdir(), key=lambda f: f.name)
    texts = {f.name.removesuffix(".yaml"): f for f in found if f.name.endswith(".yaml")}
    return {
        name: text.read_text(encoding="utf-8").splitlines()[0].lstrip("# ")
        for name, text in texts.items()
    }


def _values(name_or_path: str, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The values of a recipe on those of its base; above: the recipes that build on it."""
    path = Path(name_or_path)
    inside = files("psidiff.recipes").joinpath(f"{name_or_path}.yaml")
    if _is_yaml(path):
        if not path.is_file():
            raise ValueError(f"there is no recipe at {name_or_path}")
        if path.resolve() in above:
            raise ValueError(f"{name_or_path} builds on itself: its base leads back to it")
        text = path.read_bytes()
    elif inside.is_file():
        text = inside.read_bytes()
    else:
        raise ValueError(
            f"{name_or_path!r} is no recipe{nearest(name_or_path, shipped())}; a recipe is a "
            f".yaml file, or one of {', '.join(shipped())}"
        )
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{name_or_path} is not YAML: {_in_a_line(error)}") from error
    if not isinstance(values, Mapping):
        raise ValueError(f"{name_or_path} is not a recipe: it holds no keys")
    rest = {"name": path.stem} | known_version(name_or_path, dict(values))
    base = rest.pop("base", None)
    if base is None:
        below = _default_sections()
    else:
        below = _values(_found(str(base), path), (*above, path.resolve()))
    return _for_masks(below, rest, merge(below, rest))


def _is_yaml(path: Path) -> bool:
    return path.suffix in (".yaml", ".yml")


def _found(base: str, path: Path) -> str:
    """A base that is a file lies beside the recipe at `path`, or else where it says."""
    beside = path.parent / base
    return str(beside) if _is_yaml(beside) and beside.is_file() else base


def _default_sections() -> dict[str, Any]:
    """What a recipe need not say, where there are several kinds of it."""
    sections: dict[str, Any] = {field.name: field.default for field in fields(Recipe)}
    return {name: asdict(s) for name, s in sections.items() if hasattr(s, "kind")}


def _in_a_line(error: yaml.YAMLError) -> str:
    """Where a file stops being YAML, and why."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return " ".join(str(error).split())
    problem = getattr(error, "problem", None) or getattr(error, "context", None)
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}"


def _for_masks(
    before: Mapping[str, Any], over: Mapping[str, Any], both: dict[str, Any]
) -> dict[str, Any]:
    """`both` is `over` on `before`. Where that turns to masks without a rule of its own, the
    rule is ancestral: one that was chosen for other noise is bad advice."""
    asked, now = over.get("eval", {}), both.get("eval", {})
    plain = isinstance(asked, Mapping) and isinstance(now, Mapping)
    turns = _noise(both) == "masked" != _noise(before)
    if not plain or not turns or "kappa" in asked:
        return both
    return both | {"eval": {**now, "kappa": "ancestral"}}


def _noise(values: Mapping[str, Any]) -> Any:
    prior = values.get("prior")
    return prior.get("kind") if isinstance(prior, Mapping) else prior


def _lists(value: Any) -> Any:
    """YAML knows no tuples."""
    if isinstance(value, dict):
        return {k: _lists(v) for k, v in value.items()}
    return [_lists(v) for v in value] if isinstance(value, tuple) else value
