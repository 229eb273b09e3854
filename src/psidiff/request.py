"""What is asked of a model, made definite: prompts become tokens, names become rules.

Everything a user can get wrong is said here, before anything runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .conditions import check_length, given_rows, label_ids
from .data.template import FREE
from .process import NoiseSchedule
from .sampling import (
    Confident,
    Guidance,
    Kappa,
    Preset,
    Step,
    parse_corrector,
    parse_guidance,
    parse_kappa,
    parse_predictor,
    plan,
    preset,
)
from .types import as_count

if TYPE_CHECKING:
    from .model import Model

_OPTIONS = (
    "guidance",
    "temperature",
    "min_p",
    "top_k",
    "nucleus",
    "predictor",
    "corrector",
    "head",
    "micro_batch",
    "graph",
)
_OWN = (
    *("num_samples", "num_steps", "kappa", "top_p", "seed", "prompt", "suffix", "infill"),
    *("labels", "length", "overlap", "preset", "schedule", "last", "first_index"),
    *("batch_size", "record", "whole", "split", "on_step"),
)
_LEFT_TO_RIGHT = ("temperature", "top_p", "min_p", "top_k", "nucleus")


@dataclass(frozen=True)
class Request:
    """All that decides the tokens of `num_samples` samples.

    given (1 or num_samples, length) holds -1 where free. The network sees `window` positions at
    a time; a longer sample is made by windows of which each sees `overlap` tokens of the one
    before. `sampler` says in words what `steps` and `options` do.
    """

    num_samples: int
    length: int
    window: int
    overlap: int
    seed: int
    steps: tuple[Step, ...]
    given: Tensor | None = None
    labels: Tensor | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    sampler: str = ""
    first_index: int = 0

    @property
    def starts(self) -> list[int]:
        """Where windows begin."""
        stride = self.window - self.overlap
        last = max(self.length - self.window, 0)
        return [*range(0, last, stride), last]

    def rows(self, first: int, count: int) -> Tensor | None:
        """What is given of some samples, (count, length)."""
        if self.given is None:
            return None
        if len(self.given) == 1:
            return self.given.expand(count, -1)
        return self.given[first : first + count]


def request_of(
    model: Model,
    num_samples: int,
    num_steps: int = 256,
    kappa: str | Kappa = "auto",
    top_p: float | None = None,
    seed: int = 0,
    prompt: str | Sequence[str] | None = None,
    infill: Any = None,
    labels: Any = None,
    *,
    suffix: str | None = None,
    length: int | None = None,
    overlap: int | None = None,
    preset: str | None = None,
    schedule: NoiseSchedule | None = None,
    last: str | None = None,
    first_index: int = 0,
    **options: Any,
) -> Request:
    """A request from what `Model.sample` takes."""
    as_count("num_samples", num_samples)
    as_count("first_index", first_index, least=0)
    if as_count("seed", seed, least=0) >= 2**63:
        raise ValueError(f"seed must be below 2**63, got {seed}")
    window = model.config.get("length") or getattr(model.codec, "length", None)
    if length is not None:
        as_count("length", length)
    _check_options(options)
    given = given_rows(model, num_samples, prompt, suffix, infill, length or window, length)
    length = given.shape[1] if given is not None else length or window
    if length is None:
        raise ValueError("this model does not say how long its sequences are: give length")
    window = min(window or length, length)
    check_length(model, length)
    overlap = _overlap(overlap, length, window)
    chosen = _sampler(model, num_steps, kappa, top_p, preset, schedule, last, options)
    return Request(
        num_samples,
        length,
        window,
        overlap,
        seed,
        given=given,
        labels=label_ids(model, labels, num_samples),
        first_index=first_index,
        **chosen,
    )


def about_trace(model: Model, request: Request) -> dict[str, Any]:
    """What a replay says of a run."""
    about: dict[str, Any] = {
        "model": model.config.get("name") or model.config.get("network") or "a model",
        "sampler": request.sampler,
        "seed": request.seed,
        "codec": None if model.codec is None else model.codec.describe(),
    }
    if request.given is not None:
        rows = request.rows(0, request.num_samples)
        assert rows is not None
        about["given"] = (rows != FREE).int().tolist()
    if request.labels is not None:
        about["labels"] = request.labels.tolist()
    return about


def _overlap(overlap: int | None, length: int, window: int) -> int:
    """What a window sees of the one before: half of it unless somebody says."""
    if overlap is None:
        return window // 2
    if length == window:
        raise ValueError(
            f"overlap is of windows, and {length} tokens fit into one: give a length beyond "
            "the model's, or leave it out"
        )
    if not 0 < as_count("overlap", overlap, least=0) < window:
        raise ValueError(f"overlap must be between 1 and {window - 1}, got {overlap}")
    return overlap


def _sampler(
    model: Model,
    num_steps: int,
    kappa: str | Kappa,
    top_p: float | None,
    named: str | None,
    schedule: NoiseSchedule | None,
    last: str | None,
    options: dict[str, Any],
) -> dict[str, Any]:
    """The plan, the options of the loop, and both in words."""
    options = {name: value for name, value in options.items() if value is not None}
    typed = dict(options)
    _read_words(options)
    base = preset(named) if named is not None else _recommended(model, options)
    top_p = base.top_p if top_p is None else top_p
    if top_p is not None:
        options["top_p"] = typed["top_p"] = top_p
        options.setdefault("nucleus", base.nucleus)
    if model.prior is None:
        if model.config.get("bos_id") is None:
            raise ValueError(
                "this autoregressive model does not say which token its rows open with: set "
                "config['bos_id']"
            )
        rule = None if kappa == "auto" else kappa
        others = {"kappa": rule, "preset": named, "schedule": schedule, "last": last}
        said = [*options, *(name for name, value in others.items() if value is not None)]
        wrong = next((name for name in said if name not in _LEFT_TO_RIGHT), None)
        if wrong is not None:
            raise ValueError(
                f"an autoregressive model is sampled left to right: it takes no {wrong}"
            )
        return {"steps": (), "options": options, "sampler": _words("left to right", typed)}
    if isinstance(kappa, str) and kappa == "auto":
        word, rule = named or base.kappa, base.rule(model.prior)
    elif isinstance(kappa, str):
        word, rule = kappa, parse_kappa(kappa)
    else:
        word, rule = repr(kappa), kappa
    schedule = schedule or base.schedule or model.schedule
    steps = plan(num_steps, schedule, rule, last=last or base.last)
    if isinstance(options.get("predictor"), Confident) and any(s.kappa != 1 for s in steps):
        extra = "preset" if isinstance(kappa, str) and kappa == "auto" else "kappa"
        raise ValueError(f"predictor 'confident' renoises by itself: leave {extra} out")
    ending = ", greedy last step" if (last or base.last) == "greedy" else ""
    words = _words(f"{word}, {num_steps} steps{ending}", typed)
    return {"steps": steps, "options": options, "sampler": words}


def _recommended(model: Model, options: Mapping[str, Any]) -> Preset:
    """What the model's card says, else cap:0.005."""
    if isinstance(options.get("predictor"), Confident):
        return preset("ancestral")
    return Preset(str(model.config.get("kappa", "cap:0.005")), "as the model recommends")


def _check_options(options: Mapping[str, Any]) -> None:
    """Only what the loop takes and nothing here decides."""
    for name in options:
        if name not in _OPTIONS:
            near = get_close_matches(name, (*_OPTIONS, *_OWN), n=1)
            hint = f": did you mean {near[0]}?" if near else ""
            raise ValueError(f"Model.sample takes no option {name!r}{hint}")


def _read_words(options: dict[str, Any]) -> None:
    """Guidance, predictor and corrector may be words or numbers."""
    guidance = options.get("guidance")
    if isinstance(guidance, (int, float)):
        options["guidance"] = Guidance(float(guidance))
    for name, read in (
        ("guidance", parse_guidance),
        ("predictor", parse_predictor),
        ("corrector", parse_corrector),
    ):
        if isinstance(options.get(name), str):
            options[name] = read(options[name])
    if options.get("predictor") == "confident":
        options["predictor"] = Confident()


def _said(value: Any) -> Any:
    """A value as a person would type it."""
    if isinstance(value, Guidance) and not callable(value.weight):
        return f"{value.weight:g}" + (" on the posterior" if value.on == "posterior" else "")
    return value


def _words(first: str, options: Mapping[str, Any]) -> str:
    usual = {"nucleus": "keep", "head": "lazy"}
    shown = (
        f"{name.replace('_', '-')} {_said(value)}"
        for name, value in options.items()
        if usual.get(name) != value and name != "graph"  # which decides no token
    )
    return ", ".join((first, *shown))
