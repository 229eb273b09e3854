"""Every table and figure of the paper: its command, what it needs, what to expect.

A command is words with {names} in it: files of the reader's, or sizes. `reproduce.py` runs
them, `docs/write_tables.py` makes docs/reproduce.md of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from psidiff.sampler_presets import PAPER_ROWS

STEPS = "32,64,128,256,512,1024,2048,4096"
FILES = {
    "duo": "the published Duo on OpenWebText (s-sahoo/duo), GPT-2's tokenizer beside it",
    "mdlm": "the published MDLM on OpenWebText, GPT-2's tokenizer beside it",
    "duo-distilled": "the published distilled Duo (s-sahoo/duo-distilled)",
    "mdlm-distilled": "MDLM distilled by SDTT, 5 rounds",
    "duo++": "a run of `psidiff train owt-duo++` (k = 3: `curriculum.top_k=3`), or a file",
    "cifar10-duo": "a run of `psidiff train cifar10-duo`, or a Lightning file",
    "cifar10-mdlm": "a run of `psidiff train cifar10-mdlm`, or a Lightning file",
    "judge": "gpt2-large, a folder of transformers",
    "inception": "the published Inception network of FID, by path",
    "cifar10": "CIFAR-10: the folder of its own files, or an .npz",
    "lm1b-duo++": "a run of `psidiff train lm1b-duo++`",
    "lm1b-mdlm": "a run of `psidiff train lm1b-mdlm`",
    "owt": "OpenWebText below PSIDIFF_DATA, as Parquet, .jsonl, .txt or its archives",
    "lm1b": "One Billion Words likewise",
    "data": "the folder that PSIDIFF_DATA names, if it is another one",
}


@dataclass(frozen=True)
class Experiment:
    """A table or a figure.

    label     of the paper
    shows     what of it, in a few words
    commands  words of a shell, with {names}
    small     options for stand-ins
    numbers   the paper's to expect, a few
    deviates  what is known to differ, and why
    cost      on one H200, estimated where "about"
    same_as   the label whose runs it shows
    metric    shown instead of the quality
    """

    label: str
    shows: str
    commands: tuple[str, ...] = ()
    small: str = ""
    samples: str = "–"
    numbers: str = "–"
    deviates: str = "–"
    cost: str = "–"
    same_as: str | None = None
    metric: str | None = None

    @property
    def needs(self) -> list[str]:
        """Names of files that the commands have."""
        words = " ".join(self.commands)
        return [name for name in FILES if f"{{{name}}}" in words]


_TEXT = "--samples {samples} --protocol released --judge {judge}"
_IMAGES = "--samples {images} --features {inception} --reference {cifar10}"
_NAMES = {
    "Duo": "{duo}",
    "MDLM": "{mdlm}",
    "Duo, distilled": "{duo-distilled}",
    "MDLM, distilled": "{mdlm-distilled}",
}


def _compare(table: str, more: str, names: dict[str, str] = _NAMES) -> tuple[str, ...]:
    """A comparison for each set of models of a table that share their samplers."""
    samplers: dict[str, list[str]] = {}
    for row in PAPER_ROWS:
        if row.table == table:
            model = names[row.model]
            if table.startswith("cifar10"):
                model = model.replace("{", "{cifar10-")
            samplers.setdefault(model, []).append(row.sampler)
    shared: dict[tuple[str, ...], list[str]] = {}
    for model, words in samplers.items():
        shared.setdefault(tuple(words), []).append(model)
    steps = "image_steps" if more == _IMAGES else "steps"
    return tuple(
        f"psidiff compare {' '.join(models)} --steps {{{steps}}} --kappa '' "
        + " ".join(f"--sampler '{each}'" for each in words)
        + f" {more} --device {{device}} --out {{out}}"
        for words, models in shared.items()
    )


_FIGURE_1 = {"Duo": "{duo++}", "MDLM": "{mdlm}"}
_OWT = "openwebtext-remdm-non-distilled"
_CONSTANT = "cifar10-d3pm-psi-constant-kappa-fid"

EXPERIMENTS = (
    Experiment(
        "fig:fig1-abstract",
        "Figure 1, left: Gen. PPL and entropy of text against NFE",
        _compare(_OWT, f"{_TEXT} --choose paper", _FIGURE_1),
        samples="512 a cell",
        numbers="at 1,024 steps Duo++ 26.94 (5.28), MDLM 30.29 (5.30) by rescale .05, p = .9",
        deviates="`rescale-released` is the rule that made the paper's rows; the paper's "
        "equation is `rescale`",
        cost="about 30 GPU hours for all cells, 20 minutes for one at 1,024 steps",
    ),
    Experiment(
        "fig:fig1-abstract (right)",
        "Figure 1, right: FID on CIFAR-10 against NFE",
        samples="50,000 a cell",
        numbers="Duo 25.63 -> 15.05, MDLM 24.73 -> 17.86",
        same_as=f"tab:{_CONSTANT}",
    ),
    Experiment("fig:psi-samplers-visuals", "a drawing of predictor and corrector"),
    Experiment("fig:curriculum-visuals", "a drawing of the curriculum"),
    Experiment(
        "tab:downstream-evaluation",
        "accuracy on seven multiple-choice sets",
        (
            "psidiff evaluate {duo++} --harness "
            "arc_easy,arc_challenge,hellaswag,winogrande,piqa,mathqa,openbookqa "
            "--harness-draws {draws} --device {device} --out {out}.jsonl",
        ),
        samples="all questions, 1,024 draws each",
        numbers="k = 2: 27.32, 26.11, 26.26, 49.64, 52.12, 20.40, 27.80",
        deviates="draws are shared by the answers of a question, so fewer decide it",
    ),
    Experiment(
        "fig:profile-and-kappa",
        "t and kappa, step by step",
        ("python benchmarks/paper/profiles.py --out {out}",),
        cost="seconds, CPU",
    ),
    Experiment(
        "tab:main-lm-results",
        "test perplexity on LM1B and OpenWebText",
        (
            "psidiff evaluate {duo++} --data {owt} --protocol released --device {device} "
            "--out {out}.jsonl",
            "psidiff evaluate {mdlm} --data {owt} --protocol released --device {device} "
            "--out {out}.jsonl",
            "psidiff evaluate {lm1b-duo++} --data {lm1b} --protocol released "
            "--device {device} --out {out}.jsonl",
            "psidiff evaluate {lm1b-mdlm} --data {lm1b} --protocol released "
            "--device {device} --out {out}.jsonl",
        ),
        samples="all rows",
        numbers="OWT: Duo++ k = 2 25.2, MDLM 23.2; LM1B: 30.0, 27.0",
        deviates="packing: rows of 1,024 tokens, bos and eos as in training",
    ),
    Experiment(
        "tab:arch-cifar10",
        "the U-Net: 35.8M parameters",
        ("psidiff train cifar10-duo --show",),
        numbers="256 levels, width 128, (1, 2, 2, 2), attention at 16, 35.8M parameters",
        cost="seconds, CPU",
    ),
    Experiment(
        "fig:poly-approx-figures",
        "polynomials and a sigmoid for the transformation operator",
        ("python benchmarks/paper/transform_fits.py --out {out}",),
        small="--points 2001",
        numbers="degree 9 beats degree 5 and the sigmoid by orders of magnitude",
        cost="seconds, CPU",
    ),
    Experiment(
        "alg:reverse-sampling-order-stats",
        "the laws of the largest Gaussians",
        ("python benchmarks/paper/order_statistics.py --out {out} --draws {order}",),
        numbers="uniform numbers from each proposition's law",
        deviates="Floyd's algorithm is replaced: the order of its tuples is not uniform",
        cost="seconds, CPU",
    ),
    Experiment(
        "fig:is-cifar10",
        "Inception Score on CIFAR-10 against NFE",
        samples="50,000 a cell",
        numbers="best of each number of steps",
        same_as=f"tab:{_CONSTANT}",
        metric="score",
    ),
    Experiment(
        "tab:training-efficiency",
        "throughput and peak memory of the curricula",
        ("python benchmarks/paper/training_efficiency.py --out {out} --device {device}",),
        small="--tiny",
        samples="180 steps of 32 rows",
        numbers="Duo 81.8 samples/s, 94.3 GiB; Duo++ 121.9 samples/s, 63.4 GiB a GPU of 8",
        deviates="one GPU instead of eight; output layer and loss in one, so all need less",
        cost="5 minutes",
    ),
    Experiment(
        "tab:zero-shot-results",
        "zero-shot perplexity on seven sets",
        (
            "psidiff evaluate {duo++} --data ptb,wikitext2,lm1b,lambada,ag_news,pubmed,arxiv "
            "--protocol released --device {device} --out {out}.jsonl",
        ),
        samples="all rows",
        numbers="k = 2: 94.96, 34.05, 73.80, 48.67, 67.14, 43.98, 38.93",
        cost="minutes",
    ),
    *(
        Experiment(
            f"fig:marginal-distributions-{name}-*",
            f"the top-5 weights, dense and sparse, {K:,} tokens (four figures)",
            (
                f"python benchmarks/paper/top_weights.py --vocab-sizes {K} --out {{out}} "
                "--draws {weights}",
            ),
            samples="4,000 draws",
            numbers="the histograms match",
            deviates="captions call gamma the log signal-to-noise ratio; it is its negative",
            cost="2 minutes, CPU",
        )
        for name, K in (("100k", 100_000), ("gpt2", 50_257))
    ),
    Experiment(
        "tab:cifar10-d3pm-ancestral-fid",
        "FID by ancestral sampling: schedules of training and sampling",
        _compare("cifar10-d3pm-ancestral-fid", _IMAGES),
        samples="50,000 a cell",
        numbers="Duo, log-linear, 1,024 cosine steps: 26.00; MDLM, cosine, time: 24.67",
        deviates="rows of other trainings: `psidiff train cifar10-duo schedule.name=cosine` "
        "and `model.time_conditioning=true`",
    ),
    Experiment(
        "tab:cifar10-d3pm-ancestral-fid-all",
        "FID by ancestral sampling, a finer grid of steps",
        _compare("cifar10-d3pm-ancestral-fid-all", _IMAGES),
        samples="50,000 a cell",
        numbers="Duo 25.63 and MDLM 23.93 at 4,096 cosine steps",
    ),
    Experiment(
        "tab:cifar10-d3pm-remdm-fid",
        "FID of MDLM by ReMDM",
        _compare("cifar10-d3pm-remdm-fid", _IMAGES),
        samples="50,000 a cell",
        numbers="rescale .01, p = 1, 4,096 steps: 23.71",
        deviates="made in ReMDM's code; here by Psi with its kappa, which is the same law",
    ),
    Experiment(
        f"tab:{_CONSTANT}",
        "FID by Psi with a constant kappa on windows",
        _compare(_CONSTANT, _IMAGES),
        samples="50,000 a cell",
        cost="about 7 GPU hours a cell of 1,024 steps",
        numbers="Duo, .95 on [.1, .5], cosine, 4,096: 15.05; MDLM 17.86",
    ),
    Experiment(
        "tab:cifar10-d3pm-psi-constant-kappa-inception-score",
        "Inception Score of the same samples",
        samples="50,000 a cell",
        numbers="Duo, .5 on [.4, .6], log-linear, 4,096: 9.50",
        same_as=f"tab:{_CONSTANT}",
        metric="score",
    ),
    Experiment(
        "tab:cifar10-d3pm-psi-remdm-equivalent",
        "FID by Psi with the kappa of ReMDM",
        _compare("cifar10-d3pm-psi-remdm-equivalent", _IMAGES),
        samples="50,000 a cell",
        numbers="Duo, cosine, 4,096: 25.02; MDLM 23.25",
    ),
    Experiment(
        "tab:openwebtext-ancestral-sampling",
        "Gen. PPL and entropy by ancestral sampling, before and after distillation",
        _compare("openwebtext-ancestral-sampling", _TEXT),
        samples="512 a cell",
        numbers="1,024 log-linear steps: Duo 75.02 (5.53), MDLM 105.64 (5.64)",
    ),
    Experiment(
        "tab:openwebtext-remdm-non-distilled",
        "Gen. PPL and entropy by Psi with the kappa of ReMDM",
        _compare(_OWT, f"{_TEXT} --choose paper"),
        samples="512 a cell",
        numbers="rescale .05, p = .9, 1,024 steps: Duo 26.94 (5.28), MDLM 30.29 (5.30)",
        deviates="as Figure 1",
    ),
    Experiment(
        "tab:openwebtext-remdm-distilled",
        "the same after distillation",
        _compare("openwebtext-remdm-distilled", _TEXT),
        samples="512 a cell",
        numbers="cap .01, p = .9, 1,024 steps: Duo 13.22 (5.00), MDLM 10.91 (4.95)",
        deviates="as Figure 1; a distilled MDLM is trained elsewhere until `distill` is here",
    ),
)
