"""A recipe: all that a run is made of, in the words a YAML file uses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..checksums import in_short
from ..data.detokenizers import DETOKENIZERS
from ..models.transformer import check_sizes
from ..models.unet import check_widths
from ..sampling import Nucleus, Sampler
from ..training import Settings
from ..training.metrics_log import check_tracker
from ..training.objective import OBJECTIVES
from ..types import as_count, check_choice, check_unit


@dataclass(frozen=True)
class Own:
    """What a Python file of the user's defines, in words: FILE.py:NAME:field=value."""

    kind: str


@dataclass(frozen=True)
class TextData:
    """Documents from .txt, .jsonl, folders, archives, or `datasets:NAME`.

    valid: held-out text; without it the last `valid_documents`, or the last `valid_share` of
    the tokens. tokenizer: characters, text8, bytes, gpt2, bert, bpe (trained on the corpus to
    `vocab_size`), a tokenizers JSON file, FILE.py:NAME, or a name on the Hub.
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
        if self.detokenizer is not None:
            check_choice("detokenizer", self.detokenizer, tuple(DETOKENIZERS))
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
        _check_share("valid_share", self.valid_share)


@dataclass(frozen=True)
class TokenData:
    """Sequences of token ids: an .npy file of whole numbers (N, L).

    vocab_size: how many tokens there are; None: one more than the largest id, or those of the
    codec. codec: what they mean, such as FILE.py:NAME; None: nobody knows. The last
    `valid_share` of the sequences, once shuffled, is held out.
    """

    path: str
    kind: Literal["tokens"] = "tokens"
    vocab_size: int | None = None
    valid_share: float = 0.1
    codec: str | None = None

    def __post_init__(self) -> None:
        _check_share("valid_share", self.valid_share)
        if self.codec is not None and self.vocab_size is not None:
            raise ValueError("vocab_size is that of the codec: leave it out")
        if self.vocab_size is not None:
            as_count("vocab_size", self.vocab_size, least=2)


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
class PuzzleData:
    """Puzzles that are generated; their questions are given in training."""

    count: int = 200_000
    valid_count: int = 1_000
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("count", "valid_count"):
            as_count(name, getattr(self, name))


@dataclass(frozen=True)
class CountdownData(PuzzleData):
    """Four numbers and a target."""

    kind: Literal["countdown"] = "countdown"


@dataclass(frozen=True)
class SatisfiabilityData(PuzzleData):
    """Formulas of nine variables in 38 clauses."""

    kind: Literal["3sat"] = "3sat"


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
    so many samples. kappa: the sampler that the model recommends, in words."""

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
            Sampler.parse(self.kappa).kappa(0.5, 0.6, 0.5)  # left-to-right is no rule of a plan
        except ValueError as error:
            raise ValueError(f"kappa: {error}") from error


@dataclass(frozen=True)
class Recipe:
    """One experiment. init: a model (name or folder) whose parameters it begins with.

    model, prior, schedule and objective may be FILE.py:NAME:field=value of an imported file.
    """

    name: str
    data: (
        TextData
        | ImageData
        | TokenData
        | SudokuData
        | CountdownData
        | SatisfiabilityData
        | RandomData
    )
    model: TransformerModel | UNetModel | Own
    train: Settings
    prior: MaskedNoise | UniformNoise | MixedNoise | UnigramNoise | Own = UniformNoise()
    schedule: LogLinearSchedule | CosineSchedule | Own = LogLinearSchedule()
    objective: str = "nelbo"
    curriculum: Relaxed | None = None
    eval: Evaluation = Evaluation()
    init: str | None = None
    tracker: str = "auto"

    def __post_init__(self) -> None:
        outside = any(c in "/\\:" or not c.isprintable() for c in self.name)
        if outside or not self.name.strip(". ") or len(self.name.encode()) > 200:
            raise ValueError(
                f"name must be the name of a folder below runs/, got {in_short(self.name)}"
            )
        check_tracker(self.tracker)
        if self.objective not in OBJECTIVES.names and ".py:" not in self.objective:
            names = ", ".join(OBJECTIVES.names)
            raise ValueError(
                f"objective must be one of {names}, got {in_short(self.objective)}"
            )
        if self.curriculum is not None:
            if self.prior.kind != "uniform" or self.objective != "nelbo":
                raise ValueError("curriculum needs prior: uniform and objective: nelbo")
            _check_share("curriculum.share", self.curriculum.share)


def _check_share(name: str, share: float) -> None:
    if not 0 < share < 1:
        raise ValueError(f"{name} must be between 0 and 1, got {share:g}")
