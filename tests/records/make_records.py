"""What sampling gives today, as records: tokens, routes, passes, head rows and traces.

    python tests/records/make_records.py

makes `records.json` beside this file, and says in it of which commit it is. All of it is
computed in float64, from networks and toys that use no random numbers of torch, with draws that
are functions of the seed alone, so the records hold on every CPU. A run whose outcome would
change if x_theta changed by a billionth is refused: it would hang on the last bit.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

import psidiff
from psidiff.data.toy import Chain
from psidiff.evaluation.verify import toy_priors
from psidiff.model import Model
from psidiff.model_config import ModelConfig
from psidiff.models import Parameterized, Transformer
from psidiff.process import Cosine, LogLinear, Masked, Mixed, Uniform, Unigram
from psidiff.sampling import (
    Guidance,
    Trace,
    parse_corrector,
    parse_guidance,
    parse_kappa,
    parse_predictor,
    plan,
    sample,
)

RECORDS = Path(__file__).with_name("records.json")
SHAKE = 1e-9  # relative: far above rounding, far below what a draw in these runs turns on
LENGTH = 10
PRIORS = {type(prior).__name__: prior for prior in toy_priors(5)}
GIVEN = torch.tensor([[1, -1, -1, 2, -1, -1, -1, 0, -1, -1]] * 3)
RULES = (
    "ancestral",
    "constant:0",
    "constant:.5@.1-.8",
    "cap:.1",
    "rescale:.3",
    "rescale-released:.6",
    "loop:.05",
    "confidence:.5",
    "fb",
    "dfm",
)
FILTERS: dict[str, dict[str, Any]] = {
    "": {},
    "top_p=.8": {"top_p": 0.8},
    "temperature=.6 top_k=3": {"temperature": 0.6, "top_k": 3},
    "min_p=.2 last=greedy": {"min_p": 0.2, "last": "greedy"},
    "top_p=.7 drop": {"top_p": 0.7, "nucleus": "drop"},
}
CONFIDENT = (
    "confident",
    "confident:gumbel=1",
    "confident:margin,gumbel=1",
    "confident:entropy,threshold=.3",
    "confident:argmax",
    "confident:take-back,threshold=.9",
    "confident:argmax,commit",
)
GUIDANCE = ("2", "0", "1", "2@.2-.7", "ramp:3^2", "2 posterior", "2@.2-.7 posterior")


@dataclass(frozen=True)
class Case:
    """A run: `call` gives tokens, nfe, head_rows and, in `trace`, all steps."""

    name: str
    call: Callable[[float], Ran]  # of how much x_theta is shaken: 0, or SHAKE


@dataclass(frozen=True)
class Ran:
    made: Any
    trace: Trace
    about: dict[str, Any] = field(default_factory=dict)


def recorded(case: Case, shake: float = 0.0) -> dict[str, Any]:
    """A run in short: hashes of what it made, and a few numbers to compare by eye."""
    ran = case.call(shake)
    routes = torch.stack(ran.trace.routes)
    sums = np.array([_numbers(step) for step in ran.trace.steps]).sum(0)
    return {
        "tokens": _hash(ran.made.tokens),
        "frames": _hash(torch.stack(ran.trace.tokens)),
        "routes": _hash(routes),
        "file": _file(ran.trace),
        "row": " ".join(map(str, ran.made.tokens[0, :6].tolist())),
        "kept, predicted, renoised": [(routes == r).sum().item() for r in range(3)],
        "nfe": round(ran.made.nfe, 6),
        "head_rows": ran.made.head_rows,
        "plan": [round(float(each), 6) for each in sums],
        **ran.about,
    }


def _numbers(step: Any) -> list[float]:
    kappa = -1.0 if callable(step.kappa) else step.kappa  # it depends on the tokens
    return [step.t, step.alpha_t, step.alpha_s, kappa, step.greedy]


def _hash(ids: torch.Tensor) -> str:
    return hashlib.sha256(ids.contiguous().long().numpy().tobytes()).hexdigest()[:10]


def _file(trace: Trace) -> str:
    """What a trace's file holds of tokens and routes; its header and plan have own tests."""
    with tempfile.TemporaryDirectory() as folder:
        trace.save(path := Path(folder) / "trace.npz")
        with np.load(path) as held:
            names = ("first", "counts", "places", "tokens", "routes")
            parts = [held[name].astype(np.int64) for name in names]
    return hashlib.sha256(b"".join(part.tobytes() for part in parts)).hexdigest()[:10]


def waves(shape: tuple[int, ...], phase: float = 0.0) -> torch.Tensor:
    """Numbers in [-1, 1] with no pattern that matters; the same in every release of torch."""
    count = torch.Size(shape).numel()
    at = torch.arange(count, dtype=torch.float64)
    return (at * 12.9898 + phase + 0.1 * (at * 0.7548).sin()).sin().view(shape)


def shaken(rows: torch.Tensor, size: float) -> torch.Tensor:
    """Other last digits, so that what hangs on them is seen."""
    return rows + size * waves(tuple(rows.shape), 3.0) if size else rows


def chain() -> Chain:
    """Five tokens, of which each has likely and unlikely neighbours."""
    probs = (2 * waves((6, 5), 0.4)).softmax(-1)
    return Chain(probs[0], probs[1:], LENGTH)


def toy(prior: Any, size: float, scale: float = 0.7, phase: float = 0.0) -> Any:
    """The chain's denoiser with errors as of a network, which depend on all of z."""
    exact, K = chain().denoiser(prior), prior.vocab_size

    def log_x_theta(z: Any, alpha: Any, labels: Any = None) -> torch.Tensor:
        log_x = exact(z, alpha)
        basis, readout = waves((z.shape[1], K), phase), waves((z.shape[1], K), phase + 1.0)
        seen = basis[torch.arange(z.shape[1]), z].sum(1)[:, None, None]
        error = (3 * seen + 7 * readout).sin()
        return shaken(log_x + scale * error, size).log_softmax(-1)

    return log_x_theta


def labelled(prior: Any, size: float) -> Any:
    """A toy of each of two classes, and of both together where there is no label."""
    both, each = toy(prior, size, 0.5), [toy(prior, size, 0.8, phase) for phase in (1.5, 2.5)]

    def log_x_theta(z: Any, alpha: Any, labels: Any = None) -> torch.Tensor:
        if labels is None:
            return both(z, alpha)
        found = torch.stack([denoiser(z, alpha) for denoiser in each])
        return found[labels, torch.arange(len(z))]

    return log_x_theta


def network(prior: Any, size: float, causal: bool = False, **options: Any) -> Model:
    """A small transformer in float64 with opinions; without a prior it reads left to right."""
    vocab_size = 13 if causal else prior.vocab_size
    options = {"hidden_size": 16, "num_blocks": 2, "num_heads": 2, "cond_dim": 8, **options}
    options |= {"vocab_size": vocab_size, "causal": causal}
    net = Transformer(**options).double().eval().requires_grad_(False)
    for number, parameter in enumerate(net.parameters()):
        parameter.copy_(shaken(0.7 * waves(tuple(parameter.shape), number), size))
    config = ModelConfig("transformer", options, length=12, bos_id=12 if causal else None)
    if causal:
        return Model(net, None, LogLinear(), None, config)
    return Model(Parameterized(net, prior).eval(), prior, LogLinear(), None, config)


@lru_cache(maxsize=1)
def shipped(name: str, size: float) -> Model:
    model = psidiff.load(name, device="cpu", dtype="float64")
    if size:
        for number, parameter in enumerate(model.network.parameters()):
            parameter.mul_(1 + size * waves(tuple(parameter.shape), number))
    return model


def of_loop(
    name: str, denoiser: Callable[[float], Any], prior: Any, rule: str, *,
    steps: int = 7, count: int = 3, seed: int = 3, last: str = "sample", schedule: Any = None,
    grid: Any = "linear", **options: Any,
) -> Case:  # fmt: skip
    """A case of `psidiff.sampling.sample`, its options in words."""
    readers = {"predictor": parse_predictor, "corrector": parse_corrector}
    for each, read in readers.items():
        if isinstance(options.get(each), str):
            options[each] = read(options[each])
    if isinstance(options.get("guidance"), str):
        options["guidance"] = parse_guidance(*options["guidance"].split())

    def call(size: float) -> Ran:
        walked = plan(steps, schedule or LogLinear(), parse_kappa(rule), grid, last)
        generator, trace = torch.Generator().manual_seed(seed), Trace()
        shape = (count, LENGTH)
        made = sample(denoiser(size), prior, walked, shape, generator, on_step=trace, **options)
        return Ran(made, trace)

    return Case(name, call)


def of_model(name: str, model: Callable[[float], Model], *asked: Any, **options: Any) -> Case:
    """A case of `Model.sample`."""

    def call(size: float) -> Ran:
        made = model(size).sample(*asked, record=True, **options)
        about = {n: v for n, v in made.trace.about.items() if n in ("model", "seed", "labels")}
        if "given" in made.trace.about:
            about["given"] = _hash(torch.tensor(made.trace.about["given"]))
        return Ran(made, made.trace, {"about": about})

    return Case(name, call)


def toys(every: bool) -> Iterator[Case]:
    """Rules x predictors x filters for each prior: all of them, or two for each rule and prior,
    such that every pair of predictor and filter meets every prior and nearly every rule."""
    pairs = [(p, f) for f in FILTERS for p in ("markov", "maximal")]
    for p, (name, prior) in enumerate(PRIORS.items()):
        for r, rule in enumerate(RULES):
            chosen = pairs if every else [pairs[(3 * p + r + j) % len(pairs)] for j in range(2)]
            for predictor, words in chosen:
                yield of_loop(
                    f"{name} {rule} {predictor} {words}".strip(), _toy(prior), prior, rule,
                    predictor=predictor, **FILTERS[words],
                )  # fmt: skip


def _toy(prior: Any) -> Callable[[float], Any]:
    return lambda size: toy(prior, size)


def held_tokens() -> Iterator[Case]:
    for p, (name, prior) in enumerate(PRIORS.items()):
        for r, rule in enumerate(("ancestral", "cap:.1", "confidence:.5", "loop:.05")):
            words = list(FILTERS)[(p + r) % len(FILTERS)]
            yield of_loop(
                f"{name} {rule} {words}", _toy(prior), prior, rule, given=GIVEN, seed=1,
                steps=9, **FILTERS[words],
            )  # fmt: skip


def guided() -> Iterator[Case]:
    rest = ("ancestral", "cap:.2 top_p=.9", "constant:.3 last=greedy")
    for p, (name, prior) in enumerate(PRIORS.items()):
        for g, weight in enumerate(GUIDANCE):
            rule, *more = rest[(p + g) % len(rest)].split()
            options: dict[str, Any] = {"top_p": 0.9} if more == ["top_p=.9"] else {}
            yield of_loop(
                f"{name} {rule} guidance={weight}",
                lambda size, prior=prior: labelled(prior, size), prior, rule,
                labels=torch.tensor([0, 1, 1]), guidance=weight, seed=2, steps=6,
                last="greedy" if more == ["last=greedy"] else "sample", **options,
            )  # fmt: skip


def confident() -> Iterator[Case]:
    for p, (name, prior) in enumerate(PRIORS.items()):
        for c, words in enumerate(CONFIDENT):
            given = GIVEN if (p + c) % 2 else None
            yield of_loop(
                f"{name} {words}{' given' if given is not None else ''}", _toy(prior), prior,
                "ancestral", predictor=words, given=given, seed=4,
                top_p=0.9 if c % 3 == 0 else None,
            )  # fmt: skip


def corrected() -> Iterator[Case]:
    for name, prior in PRIORS.items():
        for words in ("1x2", "3x4:uncertain") if name != "Masked" else ():
            for given in (None, GIVEN):
                yield of_loop(
                    f"{name} {words}{' given' if given is not None else ''}", _toy(prior),
                    prior, "cap:.1", corrector=words, given=given, seed=4, steps=6,
                )  # fmt: skip


def plans() -> Iterator[Case]:
    """Other grids, schedules, heads, batches: what a run may be told beside its sampler."""
    for name, prior in PRIORS.items():
        options: dict[str, dict[str, Any]] = {
            "dense": {"head": "dense"},
            "cosine": {"schedule": Cosine()},
            "grid": {"steps": None, "grid": (1.0, 0.7, 0.35, 0.3, 0.05)},
            "first_index": {"first_index": 1000},
            "micro_batch": {"micro_batch": 2},
        }
        for words, each in options.items():
            yield of_loop(f"{name} cap:.1 {words}", _toy(prior), prior, "cap:.1", **each)


def presets() -> Iterator[Case]:
    names = ("ancestral", "paper-text", "paper-images", "remdm-cap", "remdm-rescale")
    for name, prior in PRIORS.items():
        for preset in (*names, "remdm-loop"):
            yield of_model(
                f"{name} {preset}", _wrapped(prior), 2, 6, preset=preset, seed=5, length=LENGTH
            )


def _wrapped(prior: Any) -> Callable[[float], Model]:
    return lambda size: psidiff.wrap(toy(prior, size), prior, LogLinear())


def networks() -> Iterator[Case]:
    """Hidden states and a head, labels, windows, a cache, batches of one shape."""
    priors = (Uniform(12), Masked(13, 12), Mixed(13, 12), Unigram(range(1, 13)))
    infill = torch.tensor([1, -1, -1, 2, -1, -1, -1, 0, -1, -1, -1])
    for p, prior in enumerate(priors):
        kinds: dict[str, tuple[Any, dict[str, Any]]] = {
            "plain": ({}, {"kappa": "cap:.2", "top_p": 0.8}),
            "card": ({}, {}),
            "confidence": ({"tied": True}, {"kappa": "confidence:.5", "temperature": 0.7}),
            "labels": ({"num_classes": 3}, {"kappa": "constant:.3", "labels": [0, 2, 1]}),
            "guided": ({"num_classes": 3}, {"kappa": "cap:.2", "labels": 1, "guidance": 2}),
            "posterior": (
                {"num_classes": 3},
                {"kappa": "cap:.2", "labels": 1, "guidance": Guidance(2.0, on="posterior")},
            ),
            "infill": ({}, {"kappa": "loop:.05", "infill": infill}),
            "windows": ({}, {"kappa": "rescale:.3", "length": 30, "overlap": 4}),
            "cache": ({"time_conditioning": False}, {"kappa": "fb", "top_k": 3}),
            "micro_batch": ({}, {"kappa": "dfm", "min_p": 0.1, "micro_batch": 2}),
            "batches": ({}, {"kappa": "cap:.1", "batch_size": 2, "first_index": 7}),
            "gumbel": ({}, {"kappa": "ancestral", "predictor": "confident:gumbel=1"}),
        }
        for kind, (options, asked) in list(kinds.items())[p % 2 :: 2]:
            yield of_model(
                f"{type(prior).__name__} {kind}",
                lambda size, prior=prior, options=options: network(prior, size, **options),
                3, 6, seed=9, **asked,
            )  # fmt: skip


def left_to_right() -> Iterator[Case]:
    prompt = torch.tensor([3, 1, 4, *[-1] * 9])
    options: dict[str, dict[str, Any]] = {
        "plain": {},
        "top_p": {"top_p": 0.8},
        "temperature top_k": {"temperature": 0.6, "top_k": 3},
        "min_p": {"min_p": 0.2},
        "drop": {"top_p": 0.7, "nucleus": "drop"},
        "prompt": {"infill": prompt},
        "windows": {"length": 26, "overlap": 5},
    }
    for words, asked in options.items():
        yield of_model(words, lambda size: network(None, size, causal=True), 3, seed=6, **asked)


def list_pretrained() -> Iterator[Case]:
    row, column = torch.arange(81) // 9, torch.arange(81) % 9
    solved = (3 * (row % 3) + row // 3 + column) % 9
    clues = torch.where(torch.arange(81) % 5 == 0, solved, -1)
    seen = torch.full((64,), -1)
    seen[:24] = torch.tensor([0, 0, 5, 13, 9, 1, 0, 0] * 3)
    text: dict[str, dict[str, Any]] = {
        "card": {},
        "prompt": {"top_p": 0.9, "prompt": "The door"},
        "paper-text": {"preset": "paper-text"},
        "remdm-cap": {"preset": "remdm-cap"},
        "rescale": {"kappa": "rescale:.1", "temperature": 0.8, "top_k": 12},
        "confidence": {"kappa": "confidence:.2", "min_p": 0.05, "predictor": "maximal"},
        "confident": {"predictor": "confident:margin,gumbel=1"},
        "corrector": {"kappa": "ancestral", "corrector": "1x3"},
        "micro_batch": {"kappa": "cap:.02", "micro_batch": 1},
    }
    board: dict[str, dict[str, Any]] = {
        "card": {"infill": clues, "last": "greedy"},
        "free": {"top_p": 0.9},
        "confident": {"infill": clues, "predictor": "confident:entropy,threshold=.2"},
        "commit": {"infill": clues, "predictor": "confident:argmax,commit"},
        "loop": {"infill": clues, "kappa": "loop:.05", "micro_batch": 2},
    }
    image: dict[str, dict[str, Any]] = {
        "card": {"labels": [3, 7, 1]},
        "free": {"kappa": "ancestral", "top_k": 5},
        "guided": {"labels": 4, "guidance": 2, "preset": "paper-images"},
        "posterior": {"labels": 4, "guidance": Guidance(2.0, on="posterior")},
        "ramp": {"labels": 8, "guidance": "ramp:3", "kappa": "dfm"},
        "infill": {"infill": seen, "labels": 0, "kappa": "cap:.1"},
        "maximal": {"labels": 2, "predictor": "maximal", "last": "greedy", "batch_size": 2},
    }
    long = {"length": 150, "overlap": 64, "kappa": "cap:.1"}
    for name, count, options in (
        ("shakespeare", 2, {w: {"length": 24, **o} for w, o in text.items()}),
        ("shakespeare", 1, {"windows": long}),
        ("books", 2, {w: {"length": 16, **o} for w, o in text.items()}),
        ("digits", 3, image),
        ("sudoku", 2, board),
    ):
        for words, asked in options.items():
            yield of_model(
                f"{name} {words}", lambda size, n=name: shipped(n, size), count,
                3 if name == "sudoku" else 5, **{"seed": 11, **asked},
            )  # fmt: skip


GROUPS: dict[str, Callable[[], Iterator[Case]]] = {
    "toys": lambda: toys(every=False),
    "given": held_tokens,
    "guidance": guided,
    "confident": confident,
    "corrector": corrected,
    "plans": plans,
    "presets": presets,
    "networks": networks,
    "left to right": left_to_right,
    "shipped": list_pretrained,
}
SLOW: dict[str, Callable[[], Iterator[Case]]] = {"all toys": lambda: toys(every=True)}


@contextmanager
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def all_of(group: str, case: Case, shake: float = 0.0) -> Any:
    """The record of a case; one hash of it where there are hundreds."""
    record = recorded(case, shake)
    if group not in SLOW:
        return record
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:10]


def make() -> dict[str, dict[str, Any]]:
    """All records; it stops at a run that hangs on the last bit."""
    found: dict[str, dict[str, Any]] = {}
    for group, cases in {**GROUPS, **SLOW}.items():
        found[group] = {}
        for case in cases():
            record = all_of(group, case)
            if all_of(group, case, SHAKE) != record:
                raise SystemExit(f"{group}: {case.name} hangs on the last bits: change it")
            if case.name in found[group]:
                raise SystemExit(f"{group}: there are two cases {case.name}")
            found[group][case.name] = record
    return found


def as_lines(whole: dict[str, Any]) -> str:
    """JSON with a record a line, so that a difference is one."""
    head = {name: value for name, value in whole.items() if name != "groups"}
    groups = [
        f'  "{group}": {{\n'
        + ",\n".join(f"   {json.dumps(n)}: {json.dumps(r)}" for n, r in records.items())
        + "\n  }"
        for group, records in whole["groups"].items()
    ]
    opening = json.dumps(head, indent=1).rstrip("}\n")
    return f'{opening},\n "groups": {{\n' + ",\n".join(groups) + "\n }\n}\n"


def main() -> None:
    with one_thread():
        found = make()
    commit = subprocess.run(
        ["git", "log", "-1", "--format=%H", "--", "src"], cwd=RECORDS.parents[2],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    whole = {"made_with": commit.stdout.strip(), "torch": torch.__version__, "groups": found}
    RECORDS.write_text(as_lines(whole))
    print(f"{sum(map(len, found.values()))} records, {RECORDS.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
