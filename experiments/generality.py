"""Takeaway 1: Psi with the kappa of ReMDM's schedules is ReMDM, and works for any prior.

    python experiments/generality.py

Everything is exact: a sampler's output law is a vector over all K^L sequences of a toy whose
distribution is known, moved by one step at a time in float64. ReMDM's posterior is written here
as its paper has it, and shares no code with the Psi step.
"""

from __future__ import annotations

import torch
from cells import Cell, measure
from torch.nn import functional as F

from psidiff.data.toy import Joint
from psidiff.evaluation.exact_distribution import (
    data_distribution,
    propagate,
    sampler_distribution,
    total_variation,
)
from psidiff.evaluation.verify import toy_priors
from psidiff.process import LogLinear
from psidiff.sampling import Step, parse_kappa, plan
from psidiff.sampling.kappa import max_remasking

SCHEDULE = LogLinear()
STEPS = (8, 16, 32, 64, 128)
RULES = ("ancestral", "cap:.05", "rescale:.1", "loop:.02", "fb", "dfm")
PRIORS = ("Masked", "Uniform", "Mixed", "Unigram")


def remasking(rule: str, t: float, alpha_s: float, alpha_t: float) -> float:
    """sigma_t of ReMDM's schedules, forward-backward and DFM, as their papers state them."""
    name, _, eta = rule.partition(":")
    most = max_remasking(alpha_s, alpha_t)
    if name == "ancestral":
        return 0.0
    if name == "cap":
        return min(float(eta), most)
    if name == "rescale":
        return float(eta) * most
    if name == "loop":  # eta on the plateau (.05, .55] at alpha = .9; less in the step off it
        return float(eta) * (1 - alpha_s) / (1 - 0.9) if 0.05 < t <= 0.55 else 0.0
    scale = 1.0 if name == "fb" else 10 * (t * (1 - t)) ** 0.25
    return min(scale * (alpha_s - alpha_t) / alpha_t, most)


def remdm_probs(
    z: torch.Tensor, x: torch.Tensor, mask: int, sigma: float, at: Step
) -> torch.Tensor:
    """ReMDM's posterior: an unmasked token is masked again with probability sigma_t; a mask
    becomes x with probability (alpha_s - (1 - sigma_t) alpha_t) / (1 - alpha_t)."""
    stays = F.one_hot(z, x.shape[-1]).double()
    noise = F.one_hot(torch.tensor(mask), x.shape[-1]).double()
    unmask = (at.alpha_s - (1 - sigma) * at.alpha_t) / (1 - at.alpha_t)
    of_mask = unmask * x + (1 - unmask) * noise
    of_token = (1 - sigma) * stays + sigma * noise
    return torch.where((z == mask)[..., None], of_mask, of_token)


def against_remdm(rule: str, num_steps: int) -> Cell:
    """The largest difference between the two output laws, and which steps Psi cannot follow."""
    joint = Joint.random()
    prior = next(p for p in toy_priors(joint.num_tokens) if type(p).__name__ == "Masked")
    steps = plan(num_steps, SCHEDULE, parse_kappa(rule))
    denoiser = joint.denoiser(prior)
    sigmas = {at: remasking(rule, at.t, at.alpha_s, at.alpha_t) for at in steps}
    beyond = [at for at in steps if at.alpha_s < 1 and sigmas[at] > 1 - at.alpha_s + 1e-12]

    def law(clip: bool) -> torch.Tensor:
        def probs_at(at: Step, states: torch.Tensor) -> torch.Tensor:
            sigma = min(sigmas[at], 1 - at.alpha_s) if clip else sigmas[at]
            x = denoiser(states, at.alpha_t).exp()
            return remdm_probs(states, x, prior.mask_id, sigma if at.alpha_s < 1 else 0.0, at)

        return propagate(prior, joint.length, steps, probs_at)

    ours = sampler_distribution(joint, prior, steps)
    data = data_distribution(joint, prior)
    return {
        "largest_difference": float((ours - law(clip=True)).abs().max()),
        "steps_beyond": len(beyond),
        "tv_unclipped": total_variation(ours, law(clip=False)),
        "tv_psi_to_data": total_variation(ours, data),
        "tv_remdm_to_data": total_variation(law(clip=False), data),
    }


def on_prior(name: str, rule: str, num_steps: int) -> Cell:
    """Total variation between the sampler's law and the data."""
    joint = Joint.random()
    prior = next(p for p in toy_priors(joint.num_tokens) if type(p).__name__ == name)
    steps = plan(num_steps, SCHEDULE, parse_kappa(rule))
    law = sampler_distribution(joint, prior, steps)
    return {"tv_to_data": total_variation(law, data_distribution(joint, prior))}


def main() -> None:
    torch.set_num_threads(1)
    cells = [{"rule": rule, "steps": n} for rule in RULES for n in STEPS]
    measure("generality_remdm", cells, lambda cell: against_remdm(cell["rule"], cell["steps"]))
    cells = [{"prior": p, "rule": r, "steps": n} for p in PRIORS for r in RULES for n in STEPS]
    measure("generality_priors", cells, lambda c: on_prior(c["prior"], c["rule"], c["steps"]))


if __name__ == "__main__":
    main()
