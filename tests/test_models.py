"""The networks: the released parameters, golden outputs, and what our own code adds."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from toys import IDS, JOINT, PRIORS, generator

from psidiff.evaluation.exact_distribution import every_state
from psidiff.model import Model, load
from psidiff.model_config import ModelConfig
from psidiff.models import Parameterized, Transformer, UNet, unet, unet_blocks
from psidiff.models.embedding import sinusoid
from psidiff.models.unet import truncated_logistic
from psidiff.models.unet_blocks import NiN, Upsample
from psidiff.process import LogLinear, Masked, Uniform, posterior, to_leave_one_out, to_plain
from psidiff.sampling import Cap, Guidance, plan, sample
from psidiff.sampling.filters import Cached, Temperature
from psidiff.types import SoftTokens, Traits, traits
from psidiff.wrapping import wrap

HERE = Path(__file__).parent
KEYS = json.loads((HERE / "keys.json").read_text())
GOLDEN = json.loads((HERE / "golden.json").read_text())
each_prior = pytest.mark.parametrize("prior", PRIORS, ids=IDS)


def tiny(**options):
    return Transformer(11, 32, 2, 4, 16, **options).eval()


def waved(network, scaled=False):
    """Parameters as the golden outputs have them: 0.1 sin(0.7 (offset + j) + 0.3)."""
    offset = 0
    for name, p in network.named_parameters():
        j = torch.arange(p.numel(), dtype=torch.float64)
        value = 0.1 * torch.sin(0.7 * (offset + j) + 0.3)
        norm = "norm" in name.lower() or (scaled and name.startswith("output_modules.0"))
        if norm and name.endswith("weight"):
            value = value + 1
        elif scaled and not norm:
            value = value / math.sqrt(p.numel() / p.shape[0])
        p.data.copy_(value.view(p.shape))
        offset += p.numel()
    return network


def shaken(network):
    """Random parameters: a fresh network's zeros would hide what it listens to."""
    torch.manual_seed(0)
    for p in network.parameters():
        p.data.normal_(std=0.2)
    return network


@pytest.mark.parametrize(
    ("build", "keys", "count"),
    [
        (lambda: Transformer(50_258), "dit", 169_627_218),
        (lambda: Transformer(50_258, causal=True), "ar", 162_246_482),
        (lambda: UNet(), "unet", 35_755_398),
        (lambda: UNet(vocab_size=257), "unet", 35_755_398),
    ],
    ids=["transformer", "causal", "unet", "unet of 257"],
)
def test_parameters_are_those_of_the_released_checkpoints(build, keys, count):
    with torch.device("meta"):
        network = build()
    have = {name: list(value.shape) for name, value in network.state_dict().items()}
    assert have == dict(KEYS[keys])
    assert sum(p.numel() for p in network.parameters()) == count
    if f"{keys}_ema" in KEYS:
        assert [name for name, _ in network.named_parameters()] == KEYS[f"{keys}_ema"]


@torch.no_grad()
def test_the_transformer_gives_the_golden_logits():
    network, alpha = waved(tiny()), math.exp(-GOLDEN["dit_tiny_forward"]["inputs"]["sigma"])
    z = torch.tensor(GOLDEN["dit_tiny_forward"]["inputs"]["x"])
    want = torch.tensor(GOLDEN["dit_tiny_forward"]["value"])
    torch.testing.assert_close(network(z, alpha)[0], want, atol=1e-5, rtol=0)
    soft = (5 * torch.sin(torch.arange(88.0))).view(1, 8, 11).softmax(-1)
    want = torch.tensor(GOLDEN["dit_tiny_forward_soft"]["value"])
    torch.testing.assert_close(network(soft, alpha)[0], want, atol=1e-5, rtol=0)


@torch.no_grad()
def test_the_unet_gives_the_golden_logits():
    network = waved(UNet(width=16).eval(), scaled=True)
    z = ((torch.arange(3072) * 37) % 256)[None]
    log_x = network(z, math.exp(-0.4), torch.tensor([3])).log_softmax(-1)[0]
    want = GOLDEN["unet_tiny_forward"]["value"]
    assert log_x.mean().item() == pytest.approx(want["mean"], abs=5e-4)
    for place in (0, 1000, 3071):
        bins = log_x[place, [0, 64, 128, 192, 255]]
        want_bins = torch.tensor(want[f"pos{place}_bins"])
        rounding = 2**-24 / want_bins.exp()  # a bin is the difference of two sigmoids
        assert ((bins - want_bins).abs() <= 1e-5 + rounding).all()


def test_the_logistic_head_integrates_a_density():
    """Without truncation the bins add up to what the logistic has inside [-1, 1]."""
    mean, log_scale = torch.zeros(1, 1).double(), torch.full((1, 1), -3.0).double()
    mass = truncated_logistic(mean, log_scale, 256).exp().sum().item()
    assert mass == pytest.approx(math.tanh(math.exp(5.0) / 2), abs=1e-3)
    assert truncated_logistic(mean, log_scale, 17).shape == (1, 1, 17)


def test_noise_levels_as_waves():
    entry = GOLDEN["timestep_embedding_dim8"]
    got = sinusoid(torch.tensor(entry["inputs"]["sigma"]), 8, 4, sine_first=False)
    torch.testing.assert_close(got, torch.tensor(entry["value"]), atol=1e-6, rtol=0)


@torch.no_grad()
def test_soft_tokens_are_mixtures_of_embeddings():
    network, g = waved(tiny()), generator()
    ids = torch.stack([torch.randperm(11, generator=g)[:3] for _ in range(8)])[None]
    weights = torch.rand(1, 8, 3, generator=g)
    soft = SoftTokens(ids, weights, ids[..., 0])
    dense = torch.zeros(1, 8, 11).scatter_(-1, ids, weights)
    torch.testing.assert_close(network(soft, 0.5), network(dense, 0.5), atol=1e-5, rtol=0)
    hard = SoftTokens(ids[..., :1], torch.ones(1, 8, 1), ids[..., 0])
    torch.testing.assert_close(network(hard, 0.5), network(ids[..., 0], 0.5), atol=1e-5, rtol=0)
    torch.manual_seed(0)
    pixels = UNet(vocab_size=11, image_size=8, channels=1, width=16, num_classes=None).eval()
    ids = torch.randint(11, (2, 64, 3), generator=g)
    hard = SoftTokens(ids[..., :1], torch.full((2, 64, 1), 0.9), ids[..., 0])
    want = pixels(ids[..., 0], 0.5)
    torch.testing.assert_close(pixels(hard, 0.5), want, atol=1e-3, rtol=1e-4)
    one_hot = torch.nn.functional.one_hot(ids[..., 0], 11).float()
    torch.testing.assert_close(pixels(one_hot, 0.5), want, atol=1e-3, rtol=1e-4)


@torch.no_grad()
def test_levels_may_differ_by_position():
    network, z = shaken(tiny()), torch.randint(11, (2, 6), generator=generator())
    common = network(z, 0.3)
    torch.testing.assert_close(network(z, torch.full((2, 6, 1), 0.3)), common)
    torch.testing.assert_close(network(z, torch.full((2, 1, 1), 0.3)), common)
    level = torch.full((2, 6, 1), 0.3)
    level[:, 0] = 1.0
    assert not torch.allclose(network(z, level)[:, 1:], common[:, 1:])
    blunt = shaken(tiny(per_position_levels=False))
    torch.testing.assert_close(blunt(z, level), common)
    timeless = shaken(tiny(time_conditioning=False))
    torch.testing.assert_close(timeless(z, 0.3), timeless(z, 0.9))


@torch.no_grad()
def test_labels_and_the_null_class():
    network = shaken(tiny(num_classes=3))
    z = torch.randint(11, (2, 6), generator=generator())
    one, two = (network(z, 0.3, torch.tensor([c, c])) for c in (0, 1))
    assert not torch.allclose(one, two)
    torch.testing.assert_close(network(z, 0.3), network(z, 0.3, torch.tensor([3, 3])))
    with pytest.raises(ValueError, match="without classes"):
        tiny()(z, 0.3, torch.tensor([0, 0]))
    images = UNet(vocab_size=17, image_size=8, channels=1, width=16, num_classes=3).eval()
    pixels = torch.randint(17, (2, 64), generator=generator())
    torch.testing.assert_close(images(pixels, 0.3), images(pixels, 0.3, torch.tensor([3, 3])))


@torch.no_grad()
def test_a_causal_transformer_sees_the_past_only():
    network, z = waved(tiny(causal=True)), torch.randint(11, (1, 6), generator=generator())
    other = z.clone()
    other[0, 4:] = (other[0, 4:] + 1) % 11
    torch.testing.assert_close(network(z)[:, :4], network(other)[:, :4])
    assert not torch.allclose(network(z)[:, 4:], network(other)[:, 4:])


@torch.no_grad()
@pytest.mark.parametrize("causal", [False, True])
def test_padding_is_not_looked_at(causal):
    network, z = waved(tiny(causal=causal)), torch.randint(11, (1, 6), generator=generator())
    mask = torch.tensor([[True] * 4 + [False] * 2])
    other = z.clone()
    other[0, 4:] = (other[0, 4:] + 1) % 11
    seen, changed = (network(s, 0.3, mask=mask)[:, :4] for s in (z, other))
    torch.testing.assert_close(seen, changed)
    torch.testing.assert_close(seen, network(z[:, :4], 0.3), atol=1e-5, rtol=0)


@each_prior
@torch.no_grad()
def test_parameterized_networks_are_denoisers(prior):
    network = shaken(Transformer(prior.vocab_size, 32, 1, 2, 16).eval())
    denoiser = Parameterized(network, prior)
    z = torch.randint(prior.vocab_size, (3, 5), generator=generator())
    log_x = denoiser(z, 0.4)
    torch.testing.assert_close(log_x.logsumexp(-1), torch.zeros(3, 5), atol=1e-5, rtol=0)
    if prior.mask_id is not None:
        noisy = prior.probs(like=log_x)[z] > 0
        assert log_x[..., prior.mask_id][noisy].isneginf().all()
    carried = prior.probs(like=log_x)[z] == 0
    assert (log_x.gather(-1, z[..., None])[..., 0][carried] == 0).all()
    steps, given = plan(8, LogLinear(), Cap(0.1)), torch.full((4, 5), -1)
    given[:, 2] = 1
    for options in ({}, {"top_p": 0.9}, {"given": given}):
        lazy = sample(denoiser, prior, steps, (4, 5), generator(), **options)
        plain = sample(lambda *a: denoiser(*a), prior, steps, (4, 5), generator(), **options)
        assert (lazy.tokens == plain.tokens).all()


@each_prior
def test_plain_and_leave_one_out_denoisers_convert_into_each_other(prior):
    """p(x_l | z) of the toy by Bayes' rule is its leave-one-out denoiser, shifted."""
    states, alpha = every_state(prior.vocab_size, 3), 0.35
    exact = JOINT.denoiser(prior)
    loo = exact(states, alpha)
    noisy = prior.probs(like=loo)[states] > 0
    plain = to_plain(prior, states, loo, alpha).log_softmax(-1)
    x = loo.exp()
    clean = posterior(prior, states, x, 1.0, alpha).probs(prior, states, x)
    torch.testing.assert_close(plain.exp()[noisy], clean[noisy], atol=1e-12, rtol=0)
    back = to_leave_one_out(prior, states, plain, alpha).log_softmax(-1)
    torch.testing.assert_close(back.exp()[noisy], x[noisy], atol=1e-12, rtol=0)
    wrapped = Parameterized(
        lambda z, a, labels=None: to_plain(prior, z, exact(z, a), a), prior, predicts="plain"
    )
    torch.testing.assert_close(wrapped(states, alpha).exp(), x, atol=1e-6, rtol=0)


def test_a_class_conditional_network_is_guided():
    prior, network = Uniform(11), Transformer(11, 32, 1, 4, 16, num_classes=2).eval()
    options = {"labels": torch.tensor([0, 1]), "guidance": Guidance(2.0)}
    steps = plan(4, LogLinear(), Cap(0.1))
    made = sample(Parameterized(network, prior), prior, steps, (2, 6), generator(), **options)
    assert made.tokens.shape == (2, 6) and made.nfe == 10


def test_networks_say_what_they_cannot_be():
    with pytest.raises(ValueError, match="num_heads times an even number, got 30 and 4"):
        Transformer(11, 30, 1, 4)
    with pytest.raises(ValueError, match="'clean'"):
        Parameterized(tiny(), Masked(11, 10), predicts="clean")


@pytest.mark.slow
def test_the_networks_compile_without_graph_breaks():
    """In a process of its own: the type checker around every function is not compiled."""
    code = """
import torch
from psidiff.models import Transformer, UNet
torch.manual_seed(0)
for network, length in ((Transformer(11, 32, 2, 4, 16), 6), (UNet(11, 8, 1, 16), 64)):
    network.eval()
    [p.data.normal_(std=0.2) for p in network.parameters()]
    z = torch.randint(11, (2, length))
    compiled = torch.compile(network, fullgraph=True, backend="aot_eager")
    for alpha in (torch.full((2, 1, 1), 0.3), torch.full((2, length, 1), 0.3)):
        with torch.no_grad():
            torch.testing.assert_close(
                compiled(z, alpha), network(z, alpha), atol=1e-3, rtol=1e-3
            )
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
def test_steps_at_other_levels_compile_nothing_anew():
    """Blocks once; the U-Net once, and its head twice: for so many rows, and for any number."""
    code = """
import torch
from torch._dynamo.utils import counters
from psidiff.models import Parameterized, Transformer, UNet
from psidiff.process import LogLinear, Uniform
from psidiff.sampling import parse_kappa, plan, sample
from psidiff.distributed import compile_blocks

for network, length, graphs in (
    (Transformer(11, 32, 3, 4, 16), 6, 1), (UNet(11, 8, 1, 16), 64, 3)
):
    denoiser = Parameterized(network, Uniform(11)).eval().requires_grad_(False)
    steps = plan(8, LogLinear(), parse_kappa("cap:.1"))
    made = []
    for _ in range(2):
        counters.clear()
        key = torch.Generator().manual_seed(0)
        made.append(sample(denoiser, Uniform(11), steps, (2, length), key).tokens)
        compile_blocks(denoiser, fullgraph=True, backend="eager")
    assert counters["stats"]["unique_graphs"] == graphs, counters["stats"]
    assert torch.equal(*made)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
def test_networks_that_are_recomputed_and_compiled_learn_the_same():
    """Dropout and bfloat16 included; the transformer's blocks make one graph, the U-Net two."""
    code = """
import torch
from torch._dynamo.utils import counters
from psidiff.models import Parameterized, Transformer, UNet
from psidiff.process import Uniform
from psidiff.distributed import Processes, compile_blocks

def learnt(recompute, compiled, build, length):
    torch.manual_seed(0)
    network = Parameterized(build(), Uniform(11)).train()
    [p.data.normal_(std=0.1) for p in network.parameters()]
    Processes().spread(network, "ddp", recompute=recompute)
    if compiled:
        compile_blocks(network, fullgraph=True, backend="aot_eager")
    torch.manual_seed(1)
    z, alpha = torch.randint(11, (2, length)), torch.full((2, 1, 1), 0.3)
    with torch.autocast("cpu", torch.bfloat16):
        loss = -network(z, alpha).gather(-1, z[..., None]).mean()
    loss.backward()
    return loss.detach(), [p.grad for p in network.parameters()]

for build, length, graphs in (
    (lambda: Transformer(11, 32, 10, 4, 16, dropout=0.3), 6, 1),
    (lambda: UNet(11, 8, 1, 16, (1, 2), 1, dropout=0.3), 64, 2),
):
    want = learnt(False, False, build, length)
    counters.clear()
    got = learnt(True, True, build, length)
    assert counters["stats"]["unique_graphs"] == graphs, counters["stats"]
    torch.testing.assert_close(got, want, atol=1e-3, rtol=2e-2)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@torch.no_grad()
def test_the_unets_distribution_is_float32_in_any_precision():
    """bfloat16 has eight bits: a logistic over 256 bins made of them would be stairs."""
    network = waved(UNet(width=16).eval(), scaled=True)
    z, label = ((torch.arange(3072) * 37) % 256)[None], torch.tensor([3])
    exact = network(z, 0.7, label).log_softmax(-1)
    with torch.autocast("cpu", torch.bfloat16):
        rough = network(z, 0.7, label)
    low = network.bfloat16()(z, 0.7, label)
    for logits in (rough, low):
        assert logits.dtype == torch.float32
        distance = (logits.softmax(-1) - exact.exp()).abs().sum(-1) / 2
        assert distance.max() < 0.01


def test_a_saved_unet_is_loaded_and_sampled_in_bfloat16(tmp_path):
    prior = Uniform(11)
    options = {"vocab_size": 11, "image_size": 8, "channels": 1, "width": 16}
    options["num_classes"] = 10
    denoiser = Parameterized(shaken(UNet(**options).eval()), prior)
    config = {"network": "unet", "options": options, "predicts": "loo", "length": 64}
    Model(denoiser, prior, LogLinear(), None, ModelConfig.from_dict(config)).save(tmp_path)
    model = load(tmp_path, "cpu", "bfloat16")
    assert {p.dtype for p in model.network.parameters()} == {torch.bfloat16}
    log_x = model.denoiser(torch.zeros(2, 64, dtype=torch.int64), 0.5)
    assert log_x.dtype == torch.float32
    assert model.sample(2, 4, labels=3).tokens.shape == (2, 64)


@torch.no_grad()
def test_the_unet_is_the_same_with_channels_last(monkeypatch):
    """As on a GPU: every convolution but the first then reads channels last."""
    network = waved(UNet(width=16).eval(), scaled=True)
    z, label = ((torch.arange(3072) * 37) % 256)[None], torch.tensor([3])
    want = network(z, 0.7, label).softmax(-1)
    last, orders = torch.channels_last, []
    for module in (unet, unet_blocks):
        monkeypatch.setattr(
            module, "to_channels_last", lambda x: x.contiguous(memory_format=last)
        )
    for module in network.modules():
        if isinstance(module, torch.nn.Conv2d | NiN) and module is not network.input_conv:
            module.register_forward_pre_hook(
                lambda _, read: orders.append(read[0].is_contiguous(memory_format=last))
            )
    got = network(z, 0.7, label).softmax(-1)
    torch.testing.assert_close(got, want, atol=1e-6, rtol=0)
    assert len(orders) > 80 and all(orders)


@torch.no_grad()
def test_the_unet_s_head_reads_two_numbers_a_pixel():
    network = waved(UNet(width=16).eval(), scaled=True)
    z, label = ((torch.arange(3072) * 37) % 256)[None], torch.tensor([3])
    rows = network.hidden(z, 0.7, label)
    assert rows.shape == (1, 3072, 2)
    some = torch.tensor([5, 1024, 3071])
    assert torch.equal(network.head(rows[0, some]), network(z, 0.7, label)[0, some])


def test_upsampling_is_that_of_nearest_neighbours():
    layer = Upsample(4)
    x = torch.randn(2, 4, 3, 5, generator=generator())
    want = layer.conv(torch.nn.functional.interpolate(x, scale_factor=2.0, mode="nearest"))
    assert torch.equal(layer(x, torch.empty(0)), want)


@torch.no_grad()
def test_bfloat16_is_close():
    network, z = waved(tiny()), torch.randint(11, (2, 6), generator=generator())
    exact = network(z, 0.3)
    with torch.autocast("cpu", torch.bfloat16):
        rough = network(z, 0.3)
    torch.testing.assert_close(rough.float(), exact, atol=0.05, rtol=0.05)
    torch.testing.assert_close(network.bfloat16()(z, 0.3).float(), exact, atol=0.1, rtol=0.1)


def test_what_a_denoiser_can_do_is_one_value():
    def plain(z, alpha, labels=None):
        return torch.zeros(*z.shape, 11)

    class Padded(torch.nn.Module):
        num_classes = 3

        def forward(self, z, alpha, labels=None, mask=None):
            return plain(z, alpha)

    every = Traits(
        head=True, levels=True, padding=True, recordable=True, fusible=True, num_classes=2
    )
    network = tiny(num_classes=2)
    assert traits(plain) == Traits() and traits(network) == every
    assert traits(Padded()) == Traits(padding=True, num_classes=3)

    class Called:
        @torch.no_grad()
        def __call__(self, z, alpha, labels=None, mask=None):
            return plain(z, alpha)

    def inside(z, alpha, labels=None):
        mask = z == 3
        return mask

    assert traits(Called()) == Traits(padding=True) and traits(inside) == Traits()
    assert traits(torch.nn.Identity()) == traits(len) == Traits()
    assert traits(Parameterized(network, Uniform(11))) == every
    shifted = Parameterized(network, Uniform(11), "plain")  # needs z, which a head has not
    assert traits(shifted) == Traits(padding=True, num_classes=2)
    assert traits(Parameterized(Padded(), Uniform(11))) == Traits(
        padding=True, fusible=True, num_classes=3
    )
    for each in (Temperature(network, 0.5), Cached(network)):
        assert traits(each) == Traits(head=True, num_classes=2)
    wrapped = wrap(network, Uniform(11), LogLinear()).denoiser
    assert traits(wrapped) == Traits(head=True, fusible=True, num_classes=2)
    assert traits(tiny(causal=True)).reader and not traits(network).reader
