"""The same facts on a GPU, in float32: skipped where there is none."""

import copy
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from dense_reference import top_p_by_sort
from serving import tiny
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from toys import IDS, JOINT, PRIORS, chi_square, generator

import psidiff
from psidiff.distributed import compile_blocks
from psidiff.duality import diffusion_transform, gamma_at, relax_dense, relax_sparse
from psidiff.evaluation.exact_distribution import (
    every_state,
    propagate,
    psi_function,
    sampler_distribution,
    state_number,
    step_probs,
)
from psidiff.kernels import fused_sampling
from psidiff.models import Parameterized, Transformer, UNet
from psidiff.process import LogLinear, Masked, Mixed, Uniform, corrupt, nelbo
from psidiff.request import build_request
from psidiff.sampling import (
    Constant,
    Corrector,
    Guidance,
    Sampler,
    parse_kappa,
    parse_predictor,
    plan,
    sample,
)
from psidiff.sampling.cuda_graph import CudaGraphStepper
from psidiff.sampling.logit_sources import LazyLogits
from psidiff.sampling.loop import diffusion_context
from psidiff.sampling.state import SampleLayout, advance, batch_of
from psidiff.sampling.step_batch import StepBatch
from psidiff.serve.samples import Sampling, shared_graphs, shared_source
from psidiff.training import (
    Batch,
    CrossEntropy,
    Nelbo,
    RelaxedNelbo,
    random_spans,
    stratified_times,
)
from psidiff.training.objective import FusedLossInputs
from psidiff.training.row_losses import nelbo_rows
from psidiff.types import Levels

FUSED = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
each_prior = pytest.mark.parametrize("prior", PRIORS, ids=IDS)


class NoFloat64(TorchDispatchMode):
    """Any operation that makes a float64 tensor on the GPU is a mistake."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(value, torch.Tensor) and value.is_cuda:
                assert value.dtype != torch.float64, func
        return result


def on_gpu(prior):
    """The toy's denoiser as a float32 table on the GPU."""
    states = every_state(prior.vocab_size, JOINT.length)

    def denoiser(z, alpha, labels=None):
        if isinstance(alpha, torch.Tensor):
            alpha = alpha[:1].cpu().double()
        table = JOINT.denoiser(prior)(states, alpha).float().cuda()
        return table[state_number(z.cpu(), prior.vocab_size).cuda()]

    return denoiser


@each_prior
@pytest.mark.parametrize(
    "options",
    [{}, {"predictor": "maximal"}, {"top_p": 0.7}, {"head": "dense"}],
    ids=["plain", "maximal", "top_p", "dense"],
)
def test_the_loop_runs_without_float64(prior, options):
    steps = plan(6, LogLinear(), Constant(0.6, 0.8, 0.1))
    with NoFloat64():
        made = sample(
            on_gpu(prior), prior, steps, (20_000, 3), generator(), device="cuda", **options
        )
    assert made.tokens.is_cuda and made.tokens.max() < 3
    if not {"predictor", "top_p"} & set(options):
        law = sampler_distribution(JOINT, prior, steps)
        numbers = state_number(made.tokens.cpu(), prior.vocab_size)
        assert chi_square(torch.bincount(numbers, minlength=len(law)), law) < 5.5


@each_prior
@pytest.mark.parametrize("text", ["cap:.1", "confidence:1", "loop:.05"])
def test_every_option_runs_there(prior, text):
    steps = plan(5, LogLinear(), parse_kappa(text), last="greedy")
    more = {"labels": torch.zeros(8, dtype=torch.int64), "guidance": Guidance(2.0, "posterior")}
    given = torch.full((8, 3), -1)
    given[:, 1] = 2
    with NoFloat64():
        for options in (
            {},
            {"given": given},
            more,
            {"temperature": 0.7, "min_p": 0.1, "top_k": 2},
        ):
            made = sample(
                on_gpu(prior), prior, steps, (8, 3), generator(), device="cuda", **options
            )
            assert made.tokens.shape == (8, 3)
        if (prior.probs(torch.zeros(())) > 0).all():
            sample(
                on_gpu(prior),
                prior,
                steps,
                (8, 3),
                generator(),
                device="cuda",
                corrector=Corrector(),
            )


def test_the_same_key_gives_the_same_numbers_on_both_devices():
    prior = Uniform(50)
    rows = torch.randn(50, 50, generator=generator()).log_softmax(-1)
    steps = plan(20, LogLinear(), Constant(0.9))

    def tokens_on(device):
        def denoiser(z, alpha, labels=None):
            return rows.to(device)[z]

        made = sample(denoiser, prior, steps, (64, 32), generator(), device=device)
        return made.tokens.cpu()

    here, there = tokens_on("cpu"), tokens_on("cuda")
    assert (here == there).double().mean() > 0.99  # float32 and float64 coins part now and then


def test_corruption_loss_and_relaxation_run_there():
    K, g = 1000, generator()
    tokens = torch.randint(K, (16, 512), generator=g).cuda()
    gamma = torch.full((16,), gamma_at(0.4, K)).cuda()
    with NoFloat64():
        alpha, dalpha = diffusion_transform(gamma, K)
        z = corrupt(Uniform(K), tokens, alpha[:, None, None], g)
        log_x = torch.randn(16, 512, K, device="cuda").log_softmax(-1)
        loss = nelbo(Uniform(K), z, tokens, log_x, alpha[:, None, None], dalpha[:, None, None])
        soft = relax_sparse(tokens, gamma, K, 3, 1e-3, g)
        probs, hard = relax_dense(tokens, gamma, K, 1e-3, g)
    exact = nelbo(
        Uniform(K), z.cpu(), tokens.cpu(), log_x.double().cpu(), 0.4, dalpha[0].item()
    )
    torch.testing.assert_close(loss.double().cpu(), exact, rtol=1e-3, atol=1e-3)
    for hits in (z == tokens, soft.hard == tokens, hard == tokens):
        assert hits.double().mean().item() == pytest.approx(0.4 + 0.6 / K, abs=0.03)
    assert probs.shape == (16, 512, K) and alpha.is_cuda


@each_prior
def test_objectives_and_networks_run_there(prior):
    torch.manual_seed(0)
    K, g = prior.vocab_size, generator()
    denoiser = Parameterized(Transformer(K, 32, 2, 4, 16), prior).cuda()
    tokens = torch.randint(3, (8, 6), generator=g).cuda()
    given = random_spans((8, 6), 0.5, g).cuda()
    batch = Batch(tokens, stratified_times(8, g), given=given)
    objectives = [Nelbo(prior, LogLinear()), CrossEntropy(prior, LogLinear())]
    if prior.mask_id is None:
        objectives += [RelaxedNelbo(K, None), RelaxedNelbo(K, 2)]
    with NoFloat64():
        for objective in objectives:
            loss = objective(denoiser, batch, g)
            assert loss.is_cuda and loss.isfinite().all() and (loss[given] == 0).all()
            loss.mean().backward()
        steps = plan(6, LogLinear(), parse_kappa("cap:.1"))
        made = sample(denoiser.eval(), prior, steps, (4, 6), g, device="cuda", top_p=0.9)
    assert made.tokens.is_cuda


@pytest.mark.parametrize(
    "objective",
    [Nelbo(Uniform(40), LogLinear()), Nelbo(Masked(40, 39), LogLinear()), RelaxedNelbo(40, 2)],
    ids=["exact", "masked", "sparse"],
)
def test_a_question_is_asked_without_waiting_for_the_gpu(objective):
    tokens, g = torch.randint(39, (8, 16), generator=generator()), generator(1)
    batch = Batch(tokens, stratified_times(8, g), given=random_spans((8, 16), 0.5, g))
    batch = batch.pinned().to(torch.device("cuda"))
    FusedLossInputs.of(objective.prepare(batch, g), batch)  # what is made once is made now
    try:
        torch.cuda.set_sync_debug_mode("error")
        asked = FusedLossInputs.of(objective.prepare(batch, g), batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(column.is_cuda for column in asked.row_loss.columns)


@each_prior
@pytest.mark.parametrize("words", ["confident", "confident:entropy,threshold=.5,gumbel=1"])
def test_the_confident_decoder_runs_there(prior, words):
    steps = plan(5, LogLinear(), parse_kappa("ancestral"))
    with NoFloat64():
        made = sample(
            *(on_gpu(prior), prior, steps, (8, 3), generator()),
            device="cuda",
            predictor=parse_predictor(words),
        )
    assert made.tokens.is_cuda and made.tokens.max() < 3


@pytest.mark.parametrize(
    "name, options",
    [
        ("digits", {"labels": 3, "guidance": 2}),
        ("shakespeare", {"prompt": "ROMEO:", "top_p": 0.9, "length": 200}),
        ("shakespeare", {"infill": "To be, or {{6}} to be", "predictor": "confident:margin"}),
        ("shakespeare", {"preset": "paper-text", "corrector": "1x4:uncertain"}),
    ],
)
def test_shipped_models_sample_there(name, options):
    model = psidiff.load(name)
    assert model.device.type == "cuda"
    with NoFloat64():
        made = model.sample(6, 16, record=True, batch_size=4, **options)
    assert made.tokens.is_cuda and len(made.trace) % 17 == 0
    again = model.sample(6, 16, batch_size=4, **options)
    assert torch.equal(made.tokens, again.tokens)


def test_a_batch_too_large_for_the_gpu_is_halved():
    model = psidiff.load("shakespeare")
    inner = model.denoiser.hidden

    def greedy_for_memory(z, alpha, labels=None):
        if len(z) > 8:
            torch.empty(2**44, dtype=torch.uint8, device="cuda")
        return inner(z, alpha, labels)

    model.denoiser.hidden = greedy_for_memory
    with pytest.warns(UserWarning, match="out of memory with 32 samples at a time"):
        assert model.sample(32, 2, batch_size=32).tokens.shape == (32, 128)


@pytest.mark.parametrize("top_p", (None, 0.9))
@pytest.mark.parametrize("given", (False, True))
@pytest.mark.parametrize("prior", (Masked(50, 7), Uniform(50), Mixed(50, 7)), ids=IDS[:3])
def test_steps_as_graphs_give_the_tokens_of_steps(prior, top_p, given):
    torch.manual_seed(0)
    network = Transformer(50, 64, 2, 2, 32, 0.0)
    torch.nn.init.normal_(network.output_layer.linear.weight, std=0.2)
    denoiser = Parameterized(network, prior).cuda().eval()
    fixed = torch.full((16, 32), -1)
    fixed[:, ::3] = 8
    made = [
        sample(
            denoiser,
            prior,
            plan(64, LogLinear(), parse_kappa("cap:.02")),
            (16, 32),
            generator(1),
            given=fixed if given else None,
            top_p=top_p,
            device="cuda",
            graph=graph,
        )
        for graph in (True, False)
    ]
    same = (made[0].tokens == made[1].tokens).double().mean()
    assert (
        same > 0.99
    )  # other shapes of the head round otherwise, and a coin may fall otherwise
    assert abs(made[0].head_rows - made[1].head_rows) < 0.01 * made[1].head_rows


@pytest.mark.parametrize("top_p", (None, 0.8))
@pytest.mark.parametrize("prior", (Masked(4, 3), Uniform(4), Mixed(4, 3)), ids=IDS[:3])
def test_steps_as_graphs_have_the_exact_law(prior, top_p):
    """Chi-square of recorded steps and the row kernel against the law of the same network, in
    float64 over all states."""
    torch.manual_seed(0)
    network = Transformer(4, 32, 1, 2, 16, 0.0)
    torch.nn.init.normal_(network.output_layer.linear.weight, std=0.3)
    denoiser = Parameterized(network, prior).eval()
    exact = copy.deepcopy(denoiser).double()
    steps = plan(6, LogLinear(), parse_kappa("constant:.5@.1-.8"))

    def probs_at(at, states):
        with torch.no_grad():
            log_x = exact(states, at.alpha_t)
        if top_p is not None:
            log_x = top_p_by_sort(log_x, top_p).log_softmax(-1)
        return step_probs(psi_function(), prior, states, log_x.exp(), at)

    law = propagate(prior, 3, steps, probs_at)
    options = {"top_p": top_p, "device": "cuda", "graph": True}
    made = sample(denoiser.cuda(), prior, steps, (50_000, 3), generator(), **options)
    numbers = state_number(made.tokens.cpu(), prior.vocab_size)
    assert chi_square(torch.bincount(numbers, minlength=len(law)), law) < 5.5


@pytest.mark.parametrize("keep", (True, False), ids=("keep", "drop"))
@pytest.mark.parametrize("width", (9, 4096, 50_258))
def test_rows_are_drawn_by_kernel_with_a_nucleus_of_their_own(width, keep):
    """Each row as with its p for all; p = 1 is no truncation."""
    g, rows = generator(0), 60
    logits = 3 * torch.randn(rows, width, generator=g).cuda()
    z = torch.randint(width, (rows,), generator=g).cuda()
    bits = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=g).cuda()
    each = (0.5, 0.9, 1.0)
    p = torch.tensor(each, device="cuda").repeat(rows // 3)[:, None]
    x_z, drawn = fused_sampling.by_kernel(logits, z, bits, p, keep)
    for i, one in enumerate(each):
        top_p = None if one == 1 else one
        x_want, want = fused_sampling.by_kernel(logits, z, bits, top_p, keep)
        torch.testing.assert_close(x_z[i::3], x_want[i::3], rtol=1e-5, atol=0.0)
        assert torch.equal(drawn[i::3], want[i::3])


MIXED = (
    (16, "ancestral", {"length": 24}),
    (16, "cap:.05", {"length": 24, "top_p": 0.8}),
    (20, "cap:.1", {"length": 12, "top_k": 3, "temperature": 0.7}),
    (24, "rescale:.3", {"length": 17, "min_p": 0.1, "top_p": 0.9}),
)


def mixed_states(prior, graphs=None):
    """Eight samples of each request, each a state by itself; and the model's source."""
    model = tiny(prior=prior, num_classes=3)
    model.denoiser.cuda()
    assert model.device.type == "cuda"
    source = shared_source(model)
    found = None
    if graphs is not None:
        found = shared_graphs(model, source, pytest.fail)
        assert found is not None
        found.run.warm_up = 2
    states = []
    for i, (steps, kappa, options) in enumerate(MIXED):
        request = build_request(model, 8, steps, kappa, seed=i, **options)
        sampling = Sampling(model, request, (), source, found)
        states += [sampling.context.start(j, 1) for j in range(8)]
    return states, found


def walked(states):
    """All to their ends, in one batch."""
    states = list(states)
    while running := [i for i, state in enumerate(states) if not state.done]:
        moved = advance([states[i] for i in running])
        for i, (state, _) in zip(running, moved, strict=True):
            states[i] = state
    return states


@pytest.mark.parametrize("prior", (Uniform(12), Masked(13, 12), Mixed(13, 12)), ids=IDS[:3])
def test_a_server_s_steps_as_graphs_give_the_tokens_of_lazy_ones(prior):
    lazy, (begun, graphs) = walked(mixed_states(prior)[0]), mixed_states(prior, graphs=True)
    made = walked(begun)
    same = [(a.tokens == b.tokens).double().mean() for a, b in zip(made, lazy, strict=True)]
    assert sum(same) / len(same) > 0.97  # other shapes round otherwise
    recorded = [each for each in graphs.run.kinds.values() if each.graph is not None]
    assert 1 <= len(recorded) <= 16, "different filters, levels and lengths share graphs"


def test_a_server_s_recorded_step_never_waits_for_the_host():
    states, graphs = mixed_states(Uniform(12), graphs=True)
    batch = StepBatch.join([batch_of(state) for state in states])
    for _ in range(4):  # warmed up, and recorded
        graphs.run(*graphs.inputs(batch))
    (kind,) = graphs.run.kinds.values()
    assert kind.graph is not None
    try:
        torch.cuda.set_sync_debug_mode("error")
        z, route, found = graphs.run(*graphs.inputs(batch))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert z.is_cuda and route.is_cuda and not bool(found[:2].any())


@pytest.mark.parametrize("prior", (Masked(4, 3), Uniform(4), Mixed(4, 3)), ids=IDS[:3])
def test_graphs_of_mixed_filters_have_the_exact_law_of_each(prior):
    """Chi-square of three requests in one recorded batch against the law of each by itself."""
    torch.manual_seed(0)
    network = Transformer(4, 32, 1, 2, 16, 0.0)
    torch.nn.init.normal_(network.output_layer.linear.weight, std=0.3)
    denoiser = Parameterized(network, prior).eval()
    exact = copy.deepcopy(denoiser).double()
    steps = plan(6, LogLinear(), parse_kappa("constant:.5@.1-.8"))
    source, count = LazyLogits(denoiser.cuda(), prior), 20_000
    graphs = CudaGraphStepper(source, torch.device("cuda:0"), True, longest=4)
    graphs.run.warm_up = 1
    chains = [Sampler(Constant(1.0), **o) for o in ({}, {"top_p": 0.8}, {"temperature": 0.6})]

    def begun(sampler, key):
        layout = SampleLayout(count, 3, (key,), 3, torch.device("cuda:0"))
        context = diffusion_context(denoiser, prior, steps, layout, sampler, graph=False)
        context = replace(context, open_source=lambda: source, graphs=graphs, shared=True)
        return context.start(0, count)

    for key in (10, 20):  # the first walk warms up, the second one is recorded
        states = walked([begun(sampler, key + i) for i, sampler in enumerate(chains)])
    for state, sampler in zip(states, chains, strict=True):
        chain = sampler.chain()

        def probs_at(at, z, chain=chain):
            with torch.no_grad():
                log_x = exact(z, at.alpha_t)
            probs = chain(log_x.flatten(0, 1)).view_as(log_x).softmax(-1)
            return step_probs(psi_function(), prior, z, probs, at)

        law = propagate(prior, 3, steps, probs_at)
        numbers = state_number(state.tokens, prior.vocab_size)
        assert chi_square(torch.bincount(numbers, minlength=len(law)), law) < 5.5


@cache
def trained(device, *options):
    """Twelve steps in float32: the loss of each, and the way the parameters went. By AdamW, as
    Muon works in bfloat16 on a GPU."""
    from psidiff.experiment.build import build_curriculum, build_model
    from psidiff.experiment.datasets import corpus
    from psidiff.experiment.recipe_files import read_recipe
    from psidiff.training import Processes, Trainer, read_log

    small = ["data.grids=64", "data.minimal=0", "train.steps=12", "eval.samples=0"]
    small += ["model.hidden_size=32", "model.num_blocks=2", "model.num_heads=2"]
    small += ["train.batch_size=16", "train.precision=float32", "train.log_every=1"]
    small += ["train.optimizer=adamw", "train.warmup=0"]

    def numbers():
        return {n: p.detach().cpu().clone() for n, p in model.denoiser.named_parameters()}

    recipe = read_recipe("sudoku", [*small, *options])
    data = corpus(recipe.data)
    model = build_model(recipe, data)
    start = numbers()
    with TemporaryDirectory() as folder:
        run = Trainer(
            model.denoiser,
            build_curriculum(recipe, model),
            data.train,
            recipe.train,
            Path(folder),
            group=Processes.join(device),
        )
        assert run.run()
        records = read_log(Path(folder) / "log.jsonl")
    way = {name: number - start[name] for name, number in numbers().items()}
    return [r["loss"] for r in records if "loss" in r], way


@pytest.mark.parametrize("loss", ("plain", "fused"))
@pytest.mark.parametrize("compiled", ("false", "true"), ids=("eager", "compiled"))
def test_training_is_that_of_the_formula_on_a_cpu(loss, compiled):
    """Each part alone; fused and compiled together are recorded as a graph."""
    formula = "train.loss=plain", "train.compile=false"
    losses, way = trained("cuda", f"train.loss={loss}", f"train.compile={compiled}")
    right, right_way = trained("cpu", *formula)
    assert len(losses) == 12 and losses == pytest.approx(right, rel=1e-4)
    apart = {name: float((way[name] - right_way[name]).norm()) for name in way}
    far = torch.cat([v.flatten() for v in right_way.values()]).norm()
    assert torch.tensor([*apart.values()]).norm() < 5e-3 * far, apart


@pytest.mark.parametrize("batch, width, heads", ((512, 192, 6), (16, 32, 2), (16, 96, 2)))
def test_compiled_blocks_have_the_gradients_of_eager_ones(batch, width, heads):
    """What compilers join and pad depends on sizes: that of a recipe; and heads 16 and 48 wide,
    whose 81 rows are no multiple of 32 numbers."""
    torch.manual_seed(0)
    network = Transformer(9, width, 2, heads, cond_dim=64, dropout=0.0).cuda()
    for parameter in network.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.05)
    z = torch.randint(9, (batch, 81), device="cuda")
    levels = Levels(torch.rand(batch, 1, 1, device="cuda"), z < 4)
    grads = []
    for each in (network, copy.deepcopy(network)):
        if grads:
            compile_blocks(each)
        each(z, levels).log_softmax(-1)[..., 0].mean().backward()
        grads.append({name: p.grad for name, p in each.named_parameters()})
    for name, right in grads[0].items():
        assert (grads[1][name] - right).norm() < 1e-3 * right.norm(), name


def unet(vocab_size=256):
    torch.manual_seed(0)
    network = UNet(vocab_size, 16, 3, 32, (1, 2), 1, dropout=0.0, num_classes=None)
    for parameter in network.parameters():
        if parameter.std() < 1e-3:  # layers that begin as nothing
            torch.nn.init.normal_(parameter, std=0.02)
    return network


@pytest.fixture
def whole_float32(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.mark.parametrize("vocab_size", (256, 257))
def test_a_compiled_unet_has_the_loss_and_gradients_of_the_formula(vocab_size, whole_float32):
    prior = Uniform(256) if vocab_size == 256 else Masked(257, 256)
    network, objective = unet(vocab_size), Nelbo(prior, LogLinear())
    tokens, times = torch.randint(256, (8, 768), generator=generator()), stratified_times(8)
    found = []
    for device, fused in (("cpu", False), ("cuda", False), ("cuda", True)):
        module = Parameterized(copy.deepcopy(network), prior).to(device)
        if fused:
            compile_blocks(module)
        batch = Batch(tokens, times).to(torch.device(device))
        if fused:
            loss = FusedLossInputs.of(objective.prepare(batch, generator()), batch).loss(
                module, True
            )
        else:
            loss = batch.mean(objective(module, batch, generator()))
        loss.backward()
        found.append((loss.item(), {n: p.grad.cpu() for n, p in module.named_parameters()}))
    (right, grads), *others = found
    static = torch.cat([g.flatten() for g in grads.values()]).norm()
    for loss, there in others:
        assert loss == pytest.approx(right, rel=1e-4)
        apart = torch.cat([(there[n] - grads[n]).flatten() for n in grads]).norm()
        assert apart < 5e-3 * static


def test_a_unet_s_steps_are_recorded_and_draw_what_unrecorded_ones_draw(whole_float32):
    denoiser = Parameterized(unet(), Uniform(256)).eval().cuda()
    steps = plan(60, LogLinear(), parse_kappa("cap:.02"))
    recorded, usual = (
        sample(denoiser, Uniform(256), steps, (4, 768), generator(), device="cuda", graph=graph)
        for graph in (True, False)
    )
    assert (recorded.tokens == usual.tokens).double().mean() > 0.98  # the network is not exact


def test_a_unet_keeps_channels_last_and_attends_by_a_fused_kernel():
    network, seen = unet().cuda().eval(), []
    for module in network.modules():
        if isinstance(module, torch.nn.Conv2d) and module is not network.input_conv:
            module.register_forward_pre_hook(
                lambda _, given: seen.append(
                    given[0].is_contiguous(memory_format=torch.channels_last)
                )
            )
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16), sdpa_kernel(FUSED):
        network(torch.randint(256, (2, 768), device="cuda"), 0.5)
    assert len(seen) > 10 and all(seen)


@pytest.mark.parametrize("low", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("width", (9, 256, 4096, 50_258))
@pytest.mark.parametrize("shifted", (True, False))
def test_the_uniform_loss_by_kernel_is_the_formula(width, low, shifted):
    """Losses, slopes and zeros beyond the vocabulary, from logits that are peaked here, flat
    there."""
    g, rows = generator(0), 64
    z, x = (torch.randint(width, (rows, 1), generator=g) for _ in range(2))
    x[::2] = z[::2]
    alpha = torch.linspace(0.05, 0.99, rows).double()[:, None]
    loss = nelbo_rows(Uniform(width), z, x, alpha, -torch.ones_like(alpha))
    logits = torch.randn(rows, width, generator=g) * torch.linspace(0.1, 5, rows)[:, None]
    offset, weights = torch.randn(width, generator=g), torch.rand(rows, generator=g)
    logits, offset = (logits, offset) if shifted else (logits + offset, torch.zeros(width))
    columns = [c.expand(rows, 1).flatten() for c in loss.columns]
    want, slope = loss.form.plain(
        (logits + offset).double(),
        *(c.double() if c.is_floating_point() else c for c in columns),
    )
    wide, more = (torch.nn.functional.pad(v, (0, 7)).cuda() for v in (logits, offset))
    there = weights.cuda(), *(c.cuda() for c in columns)
    got = loss.form.kernel(low, width, wide, more if shifted else None, *there)
    torch.testing.assert_close(got[0].cpu().double(), want * weights, rtol=1e-5, atol=1e-7)
    slope = slope * weights[:, None]
    error = (got[1][:, :width].cpu().double() - slope).norm(dim=1)
    assert (error < (1e-4 if low is torch.float32 else 1e-2) * slope.norm(dim=1)).all()
    assert got[1].dtype is low and not got[1][:, width:].any()


@pytest.mark.parametrize("keep", (True, False), ids=("keep", "drop"))
@pytest.mark.parametrize("top_p", (None, 0.9))
@pytest.mark.parametrize("width", (2, 9, 4096, 50_258, 70_000, 262_144))
def test_rows_drawn_by_kernel_are_those_of_torch(width, top_p, keep):
    g, rows = generator(0), 200 if width < 70_000 else 60
    logits = 3 * torch.randn(rows, width, generator=g).cuda()
    z = torch.randint(width, (rows,), generator=g).cuda()
    bits = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=g).cuda()
    assert fused_sampling.available(logits)
    x_z, drawn = fused_sampling.by_kernel(logits, z, bits, top_p, keep)
    x_want, want = fused_sampling.plain(logits, z, bits, top_p, keep)
    assert (drawn == want).double().mean() > 0.98  # sums in another order, now and then a tie
    near = (x_z - x_want).abs() <= 1e-4 * x_want.abs() + 1e-7
    assert near.double().mean() > 0.98


@pytest.mark.parametrize("keep", (True, False), ids=("keep", "drop"))
@pytest.mark.parametrize("width", (9, 4096, 50_258, 70_000, 262_144))
def test_rows_drawn_by_kernel_are_cut_where_a_sort_cuts_them(width, keep):
    """x_theta is above 0 before the edge and 0 after it, for the tokens on both sides."""
    logits = 3 * torch.randn(4, width, generator=generator(0))
    kept = top_p_by_sort(logits.double(), 0.9, keep) > -torch.inf
    about = kept.sum(-1, keepdim=True) + torch.arange(-16, 16)
    z = logits.argsort(-1, descending=True).gather(-1, about.clamp(0, width - 1))
    rows = logits.repeat_interleave(32, 0).cuda()
    bits = torch.zeros(len(rows), dtype=torch.int64, device="cuda")
    x_z, _ = fused_sampling.by_kernel(rows, z.flatten().cuda(), bits, 0.9, keep)
    differ = ((x_z.cpu().view(4, 32) > 0) != kept.gather(-1, z)).sum(-1)
    assert (differ <= 1).all() and differ.sum() <= 2  # the one that crosses p, by rounding


def test_a_kernel_draws_what_is_likely():
    """Chi-square of 1e6 draws from one row."""
    logits = torch.randn(1, 300, generator=generator(0)) * 2
    bits = torch.randint(-(2**63), 2**63 - 1, (1_000_000,), generator=generator(1)).cuda()
    law, rows = logits.double().softmax(-1)[0], logits.cuda().expand(10_000, -1).contiguous()
    z = torch.zeros(10_000, dtype=torch.int64, device="cuda")
    drawn = [fused_sampling.by_kernel(rows, z, part, None)[1] for part in bits.split(10_000)]
    counts = torch.bincount(torch.cat(drawn), minlength=300).cpu()
    assert chi_square(counts, law) < 5.5
