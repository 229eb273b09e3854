"""The settings of a sampler, by name: command lines, request bodies and words are made of them.

It imports nothing heavy, so that a command line can be shown before torch is loaded.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Option:
    """One setting.

    help     what it is, for command lines
    must_be  completes "... must be", for errors
    kind     int, float or str: what a command line takes
    """

    help: str
    must_be: str
    kind: type = str


_COUNT = "a whole number of at least 1"
OPTIONS: dict[str, Option] = {
    "kappa": Option(
        "The rule: ancestral, cap:.01, constant:0@.05-.6, rescale:.05, loop:.02, ...",
        "a rule in words, such as cap:.01",
    ),
    "steps": Option("Steps of the sampler.", _COUNT, int),
    "schedule": Option(
        "Noise levels other than the model's: loglinear, cosine, loglinear:1e-5, cosine:0.",
        "a schedule in words, such as cosine",
    ),
    "grid": Option(
        "Times: linear, quadratic, alpha (even in alpha), or falling, 1,.5,.2.",
        "linear, alpha, quadratic, or falling times",
    ),
    "predictor": Option(
        "markov, maximal, confident, confident:argmax,commit, ...",
        "markov, maximal, confident, ...",
    ),
    "corrector": Option(
        "Sweeps x size at every level: 2x12, 1x8:uncertain.", "sweeps x size, such as 2x12"
    ),
    "guidance": Option(
        "Towards the label: 2, ramp:3, 2@.1-.6.", "a weight, or words such as ramp:3"
    ),
    "temperature": Option("Of x_theta.", "a number above 0", float),
    "top_k": Option("The k most probable tokens only.", _COUNT, int),
    "top_p": Option("The nucleus: tokens of this mass.", "a number above 0, at most 1", float),
    "min_p": Option("Least share of the best token.", "a number from 0 to 1", float),
    "nucleus": Option("The token that crosses the mass: keep or drop.", "keep or drop"),
    "processor": Option(
        "Your own change of logits (N, K), before top-k: FILE.py:NAME.",
        "FILE.py:NAME, a function of rows of logits",
    ),
    "last": Option("The last step: sample or greedy.", "sample or greedy"),
    "head": Option("lazy or dense, for the same tokens.", "lazy or dense"),
    "micro_batch": Option("The batch the network always sees.", _COUNT, int),
}
