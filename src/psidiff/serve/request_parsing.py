"""What a body asks for, made definite: for each prompt a `Request`, and where its answer is."""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..request import Request, build_request, encode_labels
from ..sampling import OPTIONS, parse_options, preset, read_option
from .config import Settings
from .errors import ApiError, errors_for_field
from .rows import Row, at_most, rows_of, token_id, whole_number
from .samples import SHAPING, Bias, passes_of
from .schemas import CompletionBody, SamplingBody

if TYPE_CHECKING:
    from ..model import Model

_STOPS, _STOP = 4, 512  # strings, and characters of each
_BIASES = 1024
_SWEEPS = 16
_WINDOW = 64  # tokens: a window of fewer is as much work


@dataclass(frozen=True)
class Prompt:
    """One prompt: its samples, where their answers are, and what is done to logits.

    stops: strings that end an open-ended answer.
    """

    request: Request
    row: Row
    bias: Bias = ()
    stops: tuple[str, ...] = ()


def parse_request(model: Model, body: SamplingBody, settings: Settings) -> list[Prompt]:
    """Every mistake in a body whose fields are right by themselves is said here."""
    seed = secrets.randbits(63) if body.seed is None else body.seed % 2**63
    n = body.n or 1
    at_most("n", n, settings.samples, "samples", "--max-samples")
    _check_offered(model, body, n)
    options = _options(model, body)
    steps = body.diffusion_steps or options.pop("steps", settings.steps)
    if isinstance(grid := options.get("grid"), tuple):
        steps = body.diffusion_steps or len(grid)
    at_most("diffusion_steps", steps, settings.most_steps, "steps", "--max-steps")
    rows = rows_of(model, body, settings)
    bias, stops = _bias(model, body), _stops(body)
    walked = 1 if model.prior is None else steps + 1  # left to right each token is made once
    found = []
    for number, row in enumerate(rows):
        length = len(row.tokens)
        window, overlap = _window(model, body, length)
        windows = 1 - (window - length) // (window - overlap)
        _check_work(settings, passes_of(options), walked, windows, n * len(rows), window)
        if "guidance" in options and "labels" not in options:
            said = "diffusion_guidance needs a diffusion_label to be guided by"
            raise ApiError(400, said, "diffusion_label")
        if (corrector := options.get("corrector")) is not None:
            at_most("diffusion_corrector", corrector.sweeps, _SWEEPS, "sweeps at a level")
            at_most("diffusion_corrector", corrector.size, length, "tokens in a sweep")
        shared = {"num_steps": steps, "seed": seed, "first_index": number * n, **options}
        request = build_request(model, n, infill=row.tokens, **shared)
        request = replace(request, window=window, overlap=overlap)
        found.append(Prompt(request, row, bias, stops))
    return found


def _check_offered(model: Model, body: SamplingBody, n: int) -> None:
    if isinstance(body, CompletionBody) and body.best_of not in (None, n):
        raise ApiError(400, "best_of is not offered by this server", "best_of", "unsupported")
    for name in (field_of(option) for option in (*OPTIONS, "preset") if option not in SHAPING):
        if model.prior is None and getattr(body, name, None) is not None:
            raise ApiError(400, f"an autoregressive model takes no {name}", name)


def field_of(option: str) -> str:
    """The field of a body that an option of a sampler has; OpenAI's where there is one."""
    return option if option in SamplingBody.model_fields else f"diffusion_{option}"


def _options(model: Model, body: SamplingBody) -> dict[str, Any]:
    """What `build_request` takes, each option read by itself: a mistake names its field."""
    found = _in_words(body.diffusion_sampler)
    if body.diffusion_preset is not None:
        with errors_for_field("diffusion_preset"):
            preset(body.diffusion_preset)
        found["preset"] = body.diffusion_preset
    for name in OPTIONS:
        value = getattr(body, field_of(name), None)
        if name == "steps" or value is None or (name == "kappa" and value in ("", "auto")):
            continue
        with errors_for_field(field_of(name)):
            found[name] = read_option(name, value, found.get("preset"))
    if body.temperature == 0:  # the limit: x_theta is its most probable token
        del found["temperature"]
        found["top_k"] = 1
    if body.diffusion_guidance_on is not None:
        if "guidance" not in found:
            said = "diffusion_guidance_on says what diffusion_guidance acts on: give that too"
            raise ApiError(400, said, "diffusion_guidance_on")
        found["guidance"] = replace(found["guidance"], on=body.diffusion_guidance_on)
    if (label := body.diffusion_label) is not None:
        with errors_for_field("diffusion_label"):
            words = label.strip().lstrip("-") if isinstance(label, str) else ""
            if words.isdecimal() and len(words) > 9:
                raise ValueError(f"there is no label {words[:20]}")
            encode_labels(model, label, 1)
        found["labels"] = label
    return found


def _in_words(sampler: str | None) -> dict[str, Any]:
    """What a body's sampler in words says, but what the server decides itself."""
    if sampler is None:
        return {}
    with errors_for_field("diffusion_sampler"):
        said = parse_options(sampler)
        preset(said.get("preset", "ancestral"))
        for name in ("head", "micro_batch"):
            if name in said:
                raise ValueError(f"a server decides about {name} itself: leave it out")
    return {name: value for name, value in said.items() if value != "auto"}


def _check_work(
    settings: Settings, passes: int, steps: int, windows: int, samples: int, window: int
) -> None:
    """No request takes the engine for itself, whatever it multiplies."""
    name = "diffusion_canvas_length"
    at_most(name, windows, settings.windows, "windows of a sample", "--max-windows")
    factors = steps, windows, samples, max(window, _WINDOW), passes
    if (work := math.prod(factors)) > settings.work:
        shown = factors if passes > 1 else factors[:-1]
        raise ApiError(
            400,
            f"this server allows {settings.work:,} steps x windows x samples x tokens of a "
            f"window{' x passes of a step' if passes > 1 else ''} (--max-work), got "
            f"{' x '.join(f'{each:,}' for each in shown)} = {work:,}: ask for less of one of "
            "them",
            code="too_much_work",
        )


def _window(model: Model, body: SamplingBody, length: int) -> tuple[int, int]:
    """How many tokens the network sees at a time, and how many of them it has seen before.

    With a canvas smaller than the model's length it sees less.
    """
    window = min(model.length or length, length)
    window = min(body.diffusion_canvas_length or window, window)
    overlap, name = body.diffusion_overlap, "diffusion_overlap"
    if length <= window:
        if overlap is not None:
            said = f"{name} is of windows, and {length} tokens fit into one"
            hint = "leave it out, or give a smaller diffusion_canvas_length"
            raise ApiError(400, f"{said}: {hint}", name)
        return window, window // 2
    overlap = window // 2 if overlap is None else overlap
    if not 0 < overlap < window:
        said = f"{name} must be between 1 and {window - 1}, got {str(overlap)[:20]}"
        raise ApiError(400, said, name)
    return window, overlap


def _bias(model: Model, body: SamplingBody) -> Bias:
    found, given = [], body.logit_bias or {}
    at_most("logit_bias", len(given), _BIASES, "tokens")
    for word, value in given.items():
        token = whole_number(word)
        if token is None:
            raise ApiError(400, f"logit_bias: {word[:20]!r} is no token id", "logit_bias")
        found.append((token_id(model, "logit_bias", token), value))
    return tuple(sorted(found))


def _stops(body: SamplingBody) -> tuple[str, ...]:
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    at_most("stop", len(stops), _STOPS, "strings")
    at_most("stop", max(map(len, stops), default=0), _STOP, "characters")
    if "" in stops:
        raise ApiError(400, "stop must not be empty", "stop")
    return tuple(stops)
