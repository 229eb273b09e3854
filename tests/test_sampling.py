"""The sampling loop against the exact law, and what it promises about randomness and cost."""

import pytest
import torch
from torch import nn
from toys import IDS, JOINT, PRIORS, chi_square, generator

from psidiff.data.toy import Chain
from psidiff.evaluation.exact_distribution import (
    Tabulated,
    conditional_distribution,
    data_distribution,
    every_state,
    psi_function,
    sampler_distribution,
    state_number,
)
from psidiff.process import LogLinear, Masked, Uniform, Unigram, maximal
from psidiff.process.posterior import markov
from psidiff.sampling import (
    Cached,
    Cap,
    Confidence,
    Confident,
    Constant,
    Corrector,
    Guidance,
    Interval,
    MinP,
    Nucleus,
    Ramp,
    Step,
    Temperature,
    TopK,
    Trace,
    parse_kappa,
    plan,
    sample,
)

each_prior = pytest.mark.parametrize("prior", PRIORS, ids=IDS)
PLAN = plan(6, LogLinear(), Constant(0.6, t_on=0.8, t_off=0.1))
N = 10_000


def counts(tokens, prior):
    return torch.bincount(
        state_number(tokens, prior.vocab_size), minlength=prior.vocab_size**JOINT.length
    )


def follows(law, prior, steps=PLAN, denoiser=None, **options):
    """The loop's samples have this law; 20,000 of them."""
    denoiser = denoiser or Tabulated(JOINT, prior)
    made = sample(denoiser, prior, steps, (N, JOINT.length), generator(1), **options)
    return chi_square(counts(made.tokens, prior), law) < 5.5


def guided_by_table(prior):
    """Two classes: one tilts the toy's denoiser towards token 0, one away from it."""
    base = Tabulated(JOINT, prior)

    def denoiser(z, alpha, labels=None):
        tilt = torch.zeros(len(z), prior.vocab_size, dtype=torch.float64)
        if labels is not None:
            tilt[:, 0] = torch.where(labels == 0, 1.0, -1.0)
        return (base(z, alpha) + tilt[:, None]).log_softmax(-1)

    return denoiser


def law_of(prior, change, steps=PLAN, predictor=markov):
    """The exact law when x_theta is changed row by row."""

    def step(prior, z, x, alpha_s, alpha_t, kappa):
        carried = (prior.probs(like=x)[z] == 0)[..., None]
        changed = change(x.log().flatten(0, 1)).softmax(-1).view_as(x)
        x = torch.where(carried, x, changed)
        return psi_function(predictor)(prior, z, x, alpha_s, alpha_t, kappa).probs(prior, z, x)

    return sampler_distribution(JOINT, prior, steps, step)


@each_prior
@pytest.mark.parametrize("text", ["ancestral", "constant:.3@.1-.8", "cap:.1", "loop:.05", "fb"])
def test_the_loop_has_the_exact_law(prior, text):
    steps = plan(6, LogLinear(), parse_kappa(text))
    assert follows(sampler_distribution(JOINT, prior, steps), prior, steps)


@each_prior
def test_the_loop_has_the_exact_law_of_maximal_coupling(prior):
    law = sampler_distribution(JOINT, prior, PLAN, psi_function(maximal))
    assert follows(law, prior, predictor="maximal")


@each_prior
@pytest.mark.parametrize(
    ("options", "wrapper"),
    [
        ({"temperature": 0.5}, lambda d: Temperature(d, 0.5)),
        ({"top_p": 0.7}, lambda d: Nucleus(d, 0.7)),
        ({"top_p": 0.7, "nucleus": "drop"}, lambda d: Nucleus(d, 0.7, "drop")),
        ({"min_p": 0.4}, lambda d: MinP(d, 0.4)),
        ({"top_k": 2}, lambda d: TopK(d, 2)),
    ],
    ids=["temperature", "top_p", "top_p drop", "min_p", "top_k"],
)
def test_truncation_acts_on_x_theta(prior, options, wrapper):
    law = law_of(prior, lambda rows: wrapper(None).rows(rows))
    assert follows(law, prior, **options)
    shape = (200, JOINT.length)
    inside = sample(Tabulated(JOINT, prior), prior, PLAN, shape, generator(2), **options)
    around = sample(wrapper(Tabulated(JOINT, prior)), prior, PLAN, shape, generator(2))
    assert (inside.tokens == around.tokens).all()


@each_prior
def test_given_tokens_never_change_and_are_conditioned_on(prior):
    given = torch.tensor([1, -1, 2])
    steps = plan(60, LogLinear(), Constant(1.0))
    seen = []

    def denoiser(z, alpha, labels=None):
        seen.append(alpha)
        return JOINT.denoiser(prior)(z, alpha)

    def watch(i, step, z, route):
        assert (z[:, 0] == 1).all() and (z[:, 2] == 2).all() and (route[:, [0, 2]] == 0).all()

    made = sample(
        denoiser,
        prior,
        steps,
        (4000, 3),
        generator(),
        given=given.expand(4000, 3),
        on_step=watch,
    )
    law = conditional_distribution(JOINT, prior, given)
    assert chi_square(counts(made.tokens, prior), law) < 6
    assert all(level.shape[1:] == (3, 1) and (level[:, [0, 2]] == 1).all() for level in seen)


@each_prior
@pytest.mark.parametrize("weight", [0.0, 1.0, 2.0, -0.5])
def test_guidance_on_x_combines_logits(prior, weight):
    denoiser, states = guided_by_table(prior), every_state(prior.vocab_size, 3)
    label = torch.zeros(len(states), dtype=torch.int64)

    def step(prior, z, x, alpha_s, alpha_t, kappa):
        with_label, without = (denoiser(z, alpha_t, y) for y in (label, None))
        possible = without > -torch.inf
        mixed = weight * torch.where(possible, with_label, 0)
        mixed = mixed + (1 - weight) * torch.where(possible, without, 0)
        guided = torch.where(possible, mixed, -torch.inf).softmax(-1)
        mixture = psi_function()(prior, z, guided, alpha_s, alpha_t, kappa)
        return mixture.probs(prior, z, guided)

    law = sampler_distribution(JOINT, prior, PLAN, step)
    labels = torch.zeros(N, dtype=torch.int64)
    assert follows(law, prior, denoiser=denoiser, labels=labels, guidance=Guidance(weight))


@each_prior
def test_guidance_on_posteriors_multiplies_them(prior):
    denoiser, states = guided_by_table(prior), every_state(prior.vocab_size, 3)
    label, weight = torch.zeros(len(states), dtype=torch.int64), 2.0

    def product(p, q):
        mixed = torch.where(p > 0, p**weight * torch.where(q > 0, q, 1) ** (1 - weight), 0)
        return mixed / mixed.sum(-1, keepdim=True)

    def step(prior, z, x, alpha_s, alpha_t, kappa):
        xs = [denoiser(z, alpha_t, y).exp() for y in (label, None)]

        def guided(s):
            one = psi_function()
            return product(*(one(prior, z, x, s, alpha_t, 1.0).probs(prior, z, x) for x in xs))

        corrector = alpha_s * guided(1.0) + (1 - alpha_s) * prior.probs(like=x)
        return kappa * guided(alpha_s) + (1 - kappa) * corrector

    law = sampler_distribution(JOINT, prior, PLAN, step)
    options = {
        "labels": torch.zeros(N, dtype=torch.int64),
        "guidance": Guidance(2.0, "posterior"),
    }
    assert follows(law, prior, denoiser=denoiser, **options)


@each_prior
def test_guidance_works_with_a_greedy_last_step_and_rules_of_time(prior):
    options = {"labels": torch.tensor([0, 1]), "guidance": Guidance(Ramp(3.0), "posterior")}
    steps = plan(5, LogLinear(), Constant(1.0), last="greedy")
    made = sample(guided_by_table(prior), prior, steps, (2, 3), generator(), **options)
    assert (made.tokens < 3).all()
    rule = Interval(3.0, t_on=0.5, t_off=0.2)
    assert rule(0.3) == 3 and rule(0.6) == 1 and Ramp(3.0)(1.0) == 1 and Ramp(3.0)(0.0) == 3
    made = sample(
        guided_by_table(prior),
        prior,
        steps,
        (2, 3),
        generator(),
        labels=torch.tensor([0, 1]),
        guidance=Guidance(Interval(2.0, t_on=0.0)),
    )
    assert made.nfe <= 6  # outside its interval, guidance costs no second pass


@each_prior
def test_labels_reach_the_denoiser_as_given(prior):
    seen = []

    def denoiser(z, alpha, labels=None):
        seen.append(labels)
        return Tabulated(JOINT, prior)(z, alpha)

    sample(denoiser, prior, PLAN, (2, 3), generator())
    assert all(labels is None for labels in seen)
    seen.clear()
    sample(
        denoiser, prior, PLAN, (2, 3), generator(), labels=torch.tensor([1, 0]), head="dense"
    )
    assert seen[0].tolist() == [1, 0]
    seen.clear()
    options = {"labels": torch.tensor([1, 0]), "guidance": Guidance(2.0)}
    sample(denoiser, prior, PLAN, (2, 3), generator(), head="dense", **options)
    assert seen[0].tolist() == [1, 0] and seen[1] is None


@each_prior
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"top_p": 0.8, "temperature": 0.7},
        {"predictor": "maximal"},
        {"predictor": "confident"},
        {"given": torch.tensor([[-1, 1, -1]]).expand(16, 3)},
        {"labels": torch.arange(16) % 2, "guidance": Guidance(1.5)},
        {"labels": torch.arange(16) % 2, "guidance": Guidance(1.5, "posterior")},
    ],
    ids=["plain", "top_p", "maximal", "confident", "given", "guided", "guided posterior"],
)
def test_tokens_do_not_depend_on_batch_chunk_or_head(prior, options):
    denoiser = guided_by_table(prior) if "labels" in options else JOINT.denoiser(prior)
    steps = plan(9, LogLinear(), Constant(1.0 if "predictor" in options else 0.5))

    def run(first, count, **more):
        part = {
            k: v[first : first + count] if isinstance(v, torch.Tensor) else v
            for k, v in options.items()
        }
        shape = (count, 3)
        made = sample(
            denoiser, prior, steps, shape, generator(4), first_index=first, **part, **more
        )
        return made.tokens

    whole = run(0, 16)
    for size in (1, 3):
        pieces = [run(i, min(size, 16 - i)) for i in range(0, 16, size)]
        assert (torch.cat(pieces) == whole).all()
    assert (run(0, 16, head="dense") == whole).all()
    assert (run(0, 16, micro_batch=5) == whole).all()


def test_a_micro_batch_always_has_its_size():
    prior, sizes = Uniform(3), set()

    def denoiser(z, alpha, labels=None):
        sizes.add(len(z))
        return JOINT.denoiser(prior)(z, alpha)

    sample(
        denoiser,
        prior,
        plan(20, LogLinear(), Constant(1.0)),
        (7, 3),
        generator(),
        micro_batch=4,
    )
    assert sizes == {4}


def flat(vocab_size):
    """A denoiser that knows nothing; it costs nothing either."""
    row = torch.zeros(1, 1, vocab_size).log_softmax(-1)
    return lambda z, alpha, labels=None: row.expand(*z.shape, vocab_size)


@pytest.mark.parametrize(
    ("num_steps", "text", "rows"),
    [
        (64, "ancestral", 10.2),
        (256, "ancestral", 12.8),
        (64, "cap:.0025", 10.8),
        (256, "cap:.0025", 16.1),
    ],
)
def test_the_head_is_evaluated_where_the_coin_asks(num_steps, text, rows):
    """Head rows a token over a log-linear plan, the last step's one included."""
    prior = Uniform(1000)  # x_z is so small that hardly any row is spared by the network
    steps = plan(num_steps, LogLinear(), parse_kappa(text))
    made = sample(flat(1000), prior, steps, (8, 64), generator())
    assert made.head_rows / 512 == pytest.approx(rows, rel=0.05)
    assert made.nfe <= num_steps + 1


def test_a_mask_needs_one_row_of_the_head():
    prior = Masked(10, 9)
    steps = plan(100, LogLinear(), Constant(1.0))
    made = sample(flat(10), prior, steps, (4, 32), generator())
    assert made.head_rows == 4 * 32 and (made.tokens != 9).all()
    assert made.nfe < 34  # steps in which nothing is unmasked cost no forward pass


class Tiny(nn.Module):
    """A network with hidden states and a head, which counts what it computes."""

    def __init__(self, vocab_size=11, width=8):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.out = nn.Embedding(vocab_size, width), nn.Linear(width, vocab_size)
        self.rows = 0

    def hidden(self, z, alpha, labels=None):
        h = self.embed(z)
        return (h + h.mean(1, keepdim=True)).tanh()

    def head(self, rows):
        self.rows += len(rows)
        return self.out(rows)

    def forward(self, z, alpha, labels=None):
        return self.out(self.hidden(z, alpha, labels)).log_softmax(-1)


def test_a_network_with_a_head_gives_the_same_tokens_as_one_without():
    net, prior = Tiny(), Uniform(11)
    steps = plan(30, LogLinear(), Cap(0.02))
    lazy = sample(net, prior, steps, (4, 12), generator(), top_p=0.9)
    assert net.rows == lazy.head_rows < 4 * 12 * 31 / 2
    plain = sample(
        lambda z, a, labels=None: net(z, a), prior, steps, (4, 12), generator(), top_p=0.9
    )
    assert (plain.tokens == lazy.tokens).all() and plain.nfe == lazy.nfe


def test_a_module_named_head_is_not_taken_for_a_split_denoiser():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head, self.hidden = nn.Embedding(5, 5), nn.Linear(5, 5), 8

        def forward(self, z, alpha, labels=None):
            return self.head(self.embed(z)).log_softmax(-1)

    made = sample(Net(), Uniform(5), PLAN, (2, 3), generator())
    assert made.tokens.shape == (2, 3)


def test_a_bfloat16_denoiser_is_read_in_float32():
    def denoiser(z, alpha, labels=None):
        return torch.zeros(*z.shape, 6, dtype=torch.bfloat16).log_softmax(-1)

    made = sample(Nucleus(denoiser, 0.9), Uniform(6), PLAN, (2, 3), generator(), min_p=0.1)
    assert made.tokens.max() < 6


def test_a_cache_saves_passes_and_changes_nothing():
    calls = []

    def timeless(z, alpha, labels=None):
        calls.append(len(z))
        return Tabulated(JOINT, Masked(4, 3))(z, 0.5)

    prior, steps = Masked(4, 3), plan(40, LogLinear(), Cap(0.2))
    plain = sample(timeless, prior, steps, (6, 3), generator())
    without = sum(calls)
    calls.clear()
    for wrapped in (Cached(timeless), Temperature(Cached(timeless), 1.0)):
        calls.clear()
        cached = sample(wrapped, prior, steps, (6, 3), generator())
        assert (cached.tokens == plain.tokens).all()
        assert sum(calls) < without and cached.nfe == sum(calls) / 6
    filled = sample(Cached(timeless), prior, steps, (1, 3), generator(), micro_batch=4)
    assert 0 < filled.nfe <= 41
    log_x = Cached(Tiny())(torch.zeros(2, 3, dtype=torch.int64), 0.5)
    torch.testing.assert_close(log_x.logsumexp(-1), torch.zeros(2, 3), atol=1e-5, rtol=0)


@each_prior
def test_routes_tell_what_happened(prior):
    trace, before = Trace(), []

    def watch(i, step, z, route):
        trace(i, step, z, route)
        before.append(z.clone())

    steps = plan(30, LogLinear(), Constant(0.7))
    made = sample(JOINT.denoiser(prior), prior, steps, (50, 3), generator(), on_step=watch)
    assert len(trace.steps) == 31 and (trace.tokens[-1] == made.tokens).all()
    for earlier, later, route in zip(before, before[1:], trace.routes[1:], strict=False):
        assert (earlier == later)[route == 0].all()
    assert trace.counts().sum(0).unique().tolist() == [31]
    assert {0, 1, 2} == set(torch.stack(trace.routes).unique().tolist())


@each_prior
def test_a_greedy_last_step_takes_the_most_probable_token(prior):
    steps = plan(5, LogLinear(), Constant(1.0), last="greedy")
    seen = []
    made = sample(
        JOINT.denoiser(prior),
        prior,
        steps,
        (50, 3),
        generator(),
        on_step=lambda i, step, z, route: seen.append(z),
    )
    x = JOINT.denoiser(prior)(seen[-2], steps[-1].alpha_t)
    assert (made.tokens == x.argmax(-1)).all()


@each_prior
def test_any_tuple_of_steps_is_legal(prior):
    for steps in (
        (Step(1.0, 0.001, 0.5),),
        (Step(0.5, 0.5, 0.5, 0.0),),
        (Step(1.0, 0.0, 0.3, 0.5), Step(0.6, 0.3, 1.0)),
        (Step(0.1, 1.0, 1.0, 0.5),),
        (s for s in PLAN),
    ):
        made = sample(JOINT.denoiser(prior), prior, steps, (5, 3), generator())
        assert made.tokens.shape == (5, 3)


def test_exact_remdm_is_open_to_masks_only():
    rule = Cap(0.5, clipped=False)
    steps = plan(6, LogLinear(), rule)
    assert min(s.kappa for s in steps) < 0
    made = sample(JOINT.denoiser(PRIORS[0]), PRIORS[0], steps, (500, 3), generator())
    assert (made.tokens < 3).all()
    with pytest.raises(ValueError, match="kappa must be in"):
        sample(JOINT.denoiser(PRIORS[1]), PRIORS[1], steps, (5, 3), generator())


@each_prior
def test_confidence_renoises_what_was_doubtful(prior):
    steps = plan(40, LogLinear(), Confidence(1.0))
    trace, memories = Trace(), []

    def remember(step):
        def kappa(memory):
            memories.append(memory.confidence.clone())
            return step.kappa(memory)

        return Step(step.t, step.alpha_t, step.alpha_s, kappa if callable(step.kappa) else 1.0)

    made = sample(
        JOINT.denoiser(prior), prior, map(remember, steps), (200, 3), generator(), on_step=trace
    )
    assert made.tokens.max() < 3 and (memories[0] == torch.inf).all()
    predicted = torch.zeros(200, 3, dtype=torch.bool)
    for memory, tokens, route in zip(memories[1:], trace.tokens, trace.routes, strict=False):
        predicted |= route == 1
        if prior.mask_id is not None:
            predicted &= tokens != prior.mask_id
        assert (memory.isfinite() == predicted).all()
        assert ((memory[predicted] > 0) & (memory[predicted] <= 1)).all()


@each_prior
@pytest.mark.parametrize(
    "predictor", ["confident", Confident(gumbel=1.0), Confident(argmax=True)]
)
def test_confident_keeps_the_share_alpha_s(prior, predictor):
    steps = plan(10, LogLinear(), Constant(1.0))
    trace = Trace()
    chain = Chain.random(num_tokens=3, length=12)
    given = torch.full((8, 12), -1)
    given[:, :2] = 1
    made = sample(
        chain.denoiser(prior),
        prior,
        steps,
        (8, 12),
        generator(),
        predictor=predictor,
        given=given,
        on_step=trace,
    )
    assert made.tokens.max() < 3 and (made.tokens[:, :2] == 1).all()
    for step, route in zip(trace.steps, trace.routes, strict=True):
        renoised = (route == 2).sum(-1)
        assert (renoised == 10 - int(step.alpha_s * 10 + 0.5)).all()
    if prior.mask_id is not None and isinstance(prior, Masked):
        for a, b in zip(trace.tokens, trace.tokens[1:], strict=False):
            assert ((a == b) | (a == prior.mask_id)).all() or predictor != "confident"


def sweep_matrix(prior, alpha, select):
    """One sweep of a corrector of size 1 over all states, exactly."""
    states, K = every_state(prior.vocab_size, 3), prior.vocab_size
    x = JOINT.denoiser(prior)(states, alpha).exp()
    fresh = alpha * x + (1 - alpha) * prior.probs(like=x)
    stay = nn.functional.one_hot(states, K).double()

    def moves(chance):  # each position by itself, with its own chance
        probs = chance[..., None] * fresh + (1 - chance[..., None]) * stay
        return torch.stack([probs[:, i][:, states[:, i]] for i in range(3)]).prod(0)

    if select == "random":
        return sum(moves(row.expand(len(states), 3)) for row in torch.eye(3).double()) / 3
    return moves((1 - x.amax(-1)) * K / (K - 1) / 3)


@pytest.mark.parametrize("prior", [PRIORS[1], PRIORS[3]], ids=["Uniform", "Unigram"])
@pytest.mark.parametrize("select", ["random", "uncertain"])
def test_a_corrector_redraws_from_the_conditional_of_the_noisy_data(prior, select):
    law = prior.probs(like=JOINT.weights)[every_state(prior.vocab_size, 3)].prod(-1)
    for step in PLAN:
        law = one_step(law, prior, step)
        if step.alpha_s < 1:
            law = law @ torch.linalg.matrix_power(sweep_matrix(prior, step.alpha_s, select), 2)
    assert follows(law, prior, corrector=Corrector(sweeps=2, size=1, select=select))


@pytest.mark.parametrize("prior", [PRIORS[1], PRIORS[3]], ids=["Uniform", "Unigram"])
def test_one_random_token_at_a_time_leaves_the_noisy_data_as_it_is(prior):
    states, alpha = every_state(prior.vocab_size, 3), 0.6
    same = states[None] == JOINT.sequences[:, None]
    pi = prior.probs(like=JOINT.weights)
    noisy = JOINT.weights @ (alpha * same.double() + (1 - alpha) * pi[states]).prod(-1)
    after = noisy @ sweep_matrix(prior, alpha, "random")
    torch.testing.assert_close(after, noisy, atol=1e-14, rtol=0)


def one_step(law, prior, step):
    states = every_state(prior.vocab_size, 3)
    x = JOINT.denoiser(prior)(states, step.alpha_t).exp()
    mixture = psi_function()(prior, states, x, step.alpha_s, step.alpha_t, step.kappa)
    probs = mixture.probs(prior, states, x)
    return law @ torch.stack([probs[:, i][:, states[:, i]] for i in range(3)]).prod(0)


def test_the_start_is_the_prior_whatever_the_first_level():
    prior = Unigram([1.0, 2.0, 5.0])
    made = sample(flat(3), prior, (Step(0.2, 1.0, 1.0),), (2000, 5), generator())
    assert (
        chi_square(torch.bincount(made.tokens.flatten()), prior.probs(torch.zeros(())).double())
        < 5
    )
    assert made.nfe == 0


def test_equal_seeds_equal_samples_and_none_is_torch_s_own():
    prior = Uniform(3)
    runs = [sample(flat(3), prior, PLAN, (4, 3), generator(s)).tokens for s in (1, 1, 2)]
    assert (runs[0] == runs[1]).all() and not (runs[0] == runs[2]).all()
    torch.manual_seed(5)
    one = sample(flat(3), prior, PLAN, (4, 3)).tokens
    torch.manual_seed(5)
    assert (sample(flat(3), prior, PLAN, (4, 3), device="cpu").tokens == one).all()


def test_the_chain_is_sampled_close_to_its_entropy():
    chain = Chain.syllables(length=32)
    prior = Uniform(chain.num_tokens)
    steps = plan(64, LogLinear(), Constant(1.0))
    made = sample(chain.denoiser(prior), prior, steps, (128, 32), generator())
    excess = -chain.log_prob(made.tokens).mean().item() - chain.entropy()
    assert abs(excess) / 32 < 0.08


def test_a_long_plan_of_every_rule_ends_in_data():
    for text in ("dfm", "rescale-released:.3", "rescale:.3", "confidence:2"):
        for prior in PRIORS:
            steps = plan(50, LogLinear(), parse_kappa(text))
            made = sample(JOINT.denoiser(prior), prior, steps, (20, 3), generator())
            assert made.tokens.max() < 3


def test_data_law_sums_to_one():
    assert data_distribution(JOINT, PRIORS[0]).sum() == pytest.approx(1)
