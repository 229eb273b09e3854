"""What several tests share: a toy of each kind of prior."""

import torch

from psidiff.data.toy import Joint
from psidiff.evaluation.verify import toy_priors

JOINT = Joint.random()
PRIORS = toy_priors(JOINT.num_tokens)
IDS = [type(p).__name__ for p in PRIORS]


def random_x(prior, shape, generator):
    """Denoiser outputs: no mass on the mask."""
    x = torch.rand(*shape, prior.vocab_size, generator=generator, dtype=torch.float64)
    if prior.mask_id is not None:
        x[..., prior.mask_id] = 0
    return x / x.sum(-1, keepdim=True)


def carry_over(prior, z, x):
    """Where pi_z = 0, x_theta is z."""
    one_hot = torch.nn.functional.one_hot(z, prior.vocab_size).to(x)
    return torch.where((prior.probs(like=x)[z] == 0)[..., None], one_hot, x)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def chi_square(counts, probs):
    """How many standard deviations the statistic lies above its mean; cells of 10 and more."""
    expected = probs / probs.sum() * counts.sum()
    small = expected < 10
    counts = torch.cat([counts[~small].double(), counts[small].sum()[None].double()])
    expected = torch.cat([expected[~small], expected[small].sum()[None]])
    if bool((counts[expected == 0] > 0).any()):
        return float("inf")  # what cannot happen did
    counts, expected = counts[expected > 0], expected[expected > 0]
    statistic = ((counts - expected) ** 2 / expected).sum().item()
    freedom = max(len(counts) - 1, 1)
    return (statistic - freedom) / (2 * freedom) ** 0.5
