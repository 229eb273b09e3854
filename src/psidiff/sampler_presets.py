"""Named samplers in words, each with where it comes from, and the rows of the paper's tables.

Labels such as tab:openwebtext-ancestral-sampling are those of the paper's source. It imports
nothing heavy, as `sampler_options`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product


@dataclass(frozen=True)
class Preset:
    """A named sampler: its words, and where they come from."""

    words: str
    about: str


_TEXT = "tab:openwebtext-remdm-non-distilled and -distilled, for Duo and MDLM"
_EQUAL = "tab:cifar10-d3pm-psi-remdm-equivalent"
_OWN = "tab:cifar10-d3pm-remdm-fid, MDLM in ReMDM's own code, where alpha = 1 - t"
_REMDM = "top_p=.9 nucleus=drop last=greedy"
PRESET_WORDS: dict[str, Preset] = {
    "ancestral": Preset(
        "ancestral", "the posterior alone: the sampler that every other refines"
    ),
    "paper-text": Preset(
        "rescale-released:.05 top_p=.9",
        "what the paper recommends for text, and plots in Fig. 1 left. Its rows fit only the "
        "released formula (about cap:.0025), not its equation, which is rescale:.05",
    ),
    "paper-text-ancestral": Preset(
        "ancestral schedule=loglinear",
        "tab:openwebtext-ancestral-sampling, p = 1; with top_p=.9, top_p=.95, schedule=cosine",
    ),
    "paper-text-cap": Preset(
        "cap:.01 schedule=loglinear",
        f"{_TEXT}, p = 1, eta = .01; with cap:.005, top_p=.9, top_p=.95",
    ),
    "paper-text-rescale": Preset(
        "rescale-released:.02 schedule=loglinear",
        f"{_TEXT}, p = 1, eta = .02; .01 to .05, top_p=.9, top_p=.95. As for paper-text, the "
        "released formula",
    ),
    "paper-text-loop": Preset(
        "loop-released:.02 schedule=loglinear",
        f"{_TEXT}, p = 1, eta = .02; with loop-released:.01, top_p=.9, top_p=.95. The paper's "
        "words for it are loop:.02",
    ),
    "paper-images": Preset(
        "constant:.95@.1-.5 schedule=cosine last=greedy",
        "what the paper recommends for Duo on CIFAR-10, labels without guidance: FID 15.05 at "
        "4096 steps; constant:.95@.1-.6 is better up to 2048. Greedy at the end by the caption "
        "of tab:cifar10-d3pm-ancestral-fid, the others name none",
    ),
    "paper-images-masked": Preset(
        "constant:.99@.1-1 schedule=cosine last=greedy",
        "what the paper recommends for MDLM on CIFAR-10: FID 17.86 at 4096 steps",
    ),
    "paper-images-ancestral": Preset(
        "ancestral schedule=cosine last=greedy",
        "tab:cifar10-d3pm-ancestral-fid and -fid-all, p = 1, for Duo and MDLM; with "
        "schedule=loglinear, top_p=.9, last=sample",
    ),
    "paper-images-constant": Preset(
        "constant-released:.95@.1-.5 schedule=cosine last=greedy",
        "tab:cifar10-d3pm-psi-constant-kappa-fid and -inception-score, for Duo and MDLM: any "
        "kappa and interval, and schedule=loglinear; the interval in points of the grid, as "
        "released",
    ),
    "paper-images-cap": Preset(
        "cap:.005 schedule=loglinear last=greedy", f"{_EQUAL}, MDLM, eta = .005"
    ),
    "paper-images-rescale": Preset(
        "rescale:.01 schedule=cosine last=greedy",
        f"{_EQUAL}, MDLM, eta = .01, and Duo, whose eta it leaves out; with "
        "schedule=loglinear. These rows are near ReMDM's own, and so the equation",
    ),
    "paper-images-loop": Preset(
        "loop-released:.01 schedule=loglinear last=greedy",
        f"{_EQUAL}, MDLM, t_on = .55, t_off = .05, alpha_on = .9, eta = .01",
    ),
    "remdm-cap": Preset(
        f"cap:.008,clipped=no {_REMDM}",
        "ReMDM's own scripts for text; for masks the full sigma",
    ),
    "remdm-rescale": Preset(
        f"rescale:.015,clipped=no {_REMDM}",
        "ReMDM's own scripts for text; for masks the full sigma",
    ),
    "remdm-loop": Preset(
        f"loop:.02 {_REMDM}",
        "ReMDM's own scripts for text: alpha stays .9 from t = .55 to t = .05",
    ),
    "remdm-images-cap": Preset(
        "cap:.005,clipped=no schedule=loglinear:0 nucleus=drop last=greedy",
        f"{_OWN}, eta = .005, p = 1; .01, .02 and .05, and top_p=.9",
    ),
    "remdm-images-rescale": Preset(
        "rescale:.01,clipped=no schedule=loglinear:0 nucleus=drop last=greedy",
        f"{_OWN}, eta = .01, p = 1; .02, .04 and .05, and top_p=.9",
    ),
    "remdm-images-loop": Preset(
        "loop:.01 schedule=loglinear:0 nucleus=drop last=greedy",
        f"{_OWN}, eta = .01, p = 1, t_on = .55, t_off = .05, alpha_on = .9; .02, .04 and .06, "
        "and top_p=.9",
    ),
}


@dataclass(frozen=True)
class PaperRow:
    """A row of a table of the paper.

    table    its label in the paper's source, without "tab:"
    model    Duo or MDLM; distilled models say so
    sampler  its words
    steps    its columns
    """

    table: str
    model: str
    sampler: str
    steps: tuple[int, ...] = (32, 64, 128, 256, 512, 1024, 2048, 4096)


_BOTH = ("Duo", "MDLM")
_COSINE_TOO = ("", " schedule=loglinear")  # presets of images have cosine
_WINDOWS = (
    *(".02@.15-.2", ".02@.45-.5", ".02@.7-.8", ".5@.1-.2", ".5@.4-.6", ".5@.65-.9"),
    *(".95@.1-.5", ".95@.1-.6", ".95@.3-.9", ".95@.4-.9"),
    *(".98@.05-1", ".98@.1-1", ".99@.05-1", ".99@.1-1"),
)


def _images() -> Iterator[PaperRow]:
    few = (64, 256, 1024, 2048)
    plain = "preset=paper-images-ancestral"
    for model, more, levels in product(_BOTH, ("", " top_p=.9", " last=sample"), _COSINE_TOO):
        yield PaperRow("cifar10-d3pm-ancestral-fid", model, plain + levels + more, few)
    for model, levels, more in product(_BOTH, _COSINE_TOO, ("", " top_p=.9")):
        yield PaperRow("cifar10-d3pm-ancestral-fid-all", model, plain + levels + more)
    strengths = {"cap": "005 01 02 05", "loop": "01 02 04 06", "rescale": "01 02 04 05"}
    for more, (rule, etas) in product(("", " top_p=.9"), strengths.items()):
        for eta in etas.split():
            words = f"preset=remdm-images-{rule} {rule}:.{eta}{more}"
            yield PaperRow("cifar10-d3pm-remdm-fid", "MDLM", words)
    for more in ("", " top_p=.9"):
        words = f"{plain} schedule=loglinear{more}"
        yield PaperRow("cifar10-d3pm-remdm-fid", "MDLM", words)
    for measure in ("fid", "inception-score"):
        for model, levels, window in product(_BOTH, _COSINE_TOO, _WINDOWS):
            words = f"preset=paper-images-constant constant-released:{window}{levels}"
            yield PaperRow(f"cifar10-d3pm-psi-constant-kappa-{measure}", model, words)
    for model, levels in product(_BOTH, _COSINE_TOO):
        words = f"preset=paper-images-rescale{levels}"
        yield PaperRow("cifar10-d3pm-psi-remdm-equivalent", model, words)
    for rule in ("cap", "loop"):
        yield PaperRow(
            "cifar10-d3pm-psi-remdm-equivalent", "MDLM", f"preset=paper-images-{rule}"
        )


def _text() -> Iterator[PaperRow]:
    plain, nuclei = "preset=paper-text-ancestral", ("", " top_p=.95", " top_p=.9")
    for model, state, more, levels in product(
        _BOTH, ("", ", distilled"), ("", " top_p=.9"), (" schedule=cosine", "")
    ):
        words = plain + levels + more
        yield PaperRow("openwebtext-ancestral-sampling", model + state, words)
    rules = {"cap": "cap:.005 cap:.01", "loop": "loop-released:.01 loop-released:.02"}
    rules["rescale"] = "rescale-released:.01 rescale-released:.02"
    for state, model in product(("non-distilled", "distilled"), _BOTH):
        table = f"openwebtext-remdm-{state}"
        name = model if state == "non-distilled" else f"{model}, distilled"
        for more in nuclei:
            yield PaperRow(table, name, plain + more)
            for kind, said in rules.items():
                for rule in said.split():
                    yield PaperRow(table, name, f"preset=paper-text-{kind} {rule}{more}")
        for eta in ("03", "04", "05") if state == "non-distilled" else ():
            words = f"preset=paper-text-rescale rescale-released:.{eta} top_p=.9"
            yield PaperRow(table, name, words)


PAPER_ROWS = (*_images(), *_text())
