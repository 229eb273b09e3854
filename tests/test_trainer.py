"""The trainer: stopped, killed, resumed or spread over processes, it is the same run."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch

from psidiff.data.toy import Chain, Joint
from psidiff.distributed import CheckpointedBlock
from psidiff.evaluation.nll import likelihood
from psidiff.kernels import fused_linear_loss
from psidiff.models import Parameterized, Transformer, UNet
from psidiff.process import LogLinear, Masked, Mixed, Uniform
from psidiff.training import (
    Batch,
    Curriculum,
    Nelbo,
    NextToken,
    Order,
    Phase,
    Processes,
    RelaxedNelbo,
    Settings,
    Trainer,
    checkpoint,
    read_log,
    stratified_times,
)
from psidiff.training.signals import StopSignal
from psidiff.types import Rows

CHAIN = Chain.syllables(12)
MEASURED = ("samples_per_second", "tokens_per_second", "memory_gib", "seconds_left")


class Held:
    """A dataset in memory."""

    def __init__(self, tokens, labels=None, real=None):
        self.tokens, self.labels, self.real = tokens, labels, real

    @property
    def length(self):
        return self.tokens.shape[1]

    def __len__(self):
        return len(self.tokens)

    def rows(self, indices, generator=None):
        pick = lambda v: None if v is None else v[indices]  # noqa: E731
        return Rows(self.tokens[indices], pick(self.labels), pick(self.real))


DATA = Held(CHAIN.sample(200, torch.Generator().manual_seed(0)))


def trainer_in(folder, steps=24, objective=None, **options):
    """A small run: soft tokens first, dropout, given spans, pieces of a batch."""
    torch.manual_seed(0)
    prior = Uniform(24)
    network = Transformer(24, 16, 1, 2, 16, dropout=0.1)
    exact = objective or Nelbo(prior, LogLinear())
    curriculum = Curriculum.relaxed(RelaxedNelbo(24), exact, 9)
    chosen = {
        "batch_size": 8,
        "micro_batch": 4,
        "given": 0.3,
        "log_every": 5,
        "save_every": 4,
        "warmup": 3,
        "ema": 0.9,
    }
    return Trainer(
        Parameterized(network, prior),
        curriculum,
        DATA,
        Settings(steps=steps, **(chosen | options)),
        folder,
    )


def outcome(trainer):
    """Everything that a run leaves behind, as plain tensors."""
    found = {}
    for name, value in trainer._tensors().items():
        kind, _, parameter = name.partition(".")
        if kind == "moments":
            parameter, _, kind = parameter.rpartition(".")
        found[f"{kind.removesuffix('s')} {parameter}"] = value.clone()
    return found


def lasting(folder):
    """The log without what the clock says."""
    records = read_log(folder / "log.jsonl")
    return [{k: v for k, v in r.items() if k not in MEASURED} for r in records]


def assert_same(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("stop", [4, 7, 12, 13])
def test_a_run_that_was_stopped_and_resumed_is_bit_identical(tmp_path, stop):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir(), parts.mkdir()
    reference = trainer_in(whole)
    assert reference.run()
    first = trainer_in(parts)
    first.on_log = lambda record: None
    update = first._update

    def update_and_stop(batches):
        if first.step == stop - 1:
            first.stopping.asked = True
        return update(batches)

    first._update = update_and_stop
    assert not first.run() and first.step == stop
    second = trainer_in(parts)
    assert second.resume() == stop
    assert second.run()
    assert_same(outcome(reference), outcome(second))
    assert lasting(whole) == lasting(parts)


def test_many_processes_agree_on_stopping_every_16_steps_and_at_saves(tmp_path, monkeypatch):
    def steps_and_questions(world, stop):
        """The first of `world` processes, told to stop in step `stop`; others are silent."""
        trainer, asked = trainer_in(tmp_path, steps=50, save_every=40), []
        trainer.group, update = Processes(world=world), trainer._update

        def told(batches):
            trainer.stopping.asked |= trainer.step + 1 == stop
            return update(batches)

        def heard(group, flag):
            asked.append(trainer.step)
            return flag

        trainer._update = told
        monkeypatch.setattr(Processes, "any", heard)
        trainer.run()
        return trainer.step, asked

    monkeypatch.setattr(Processes, "mean", lambda group, values: values)
    monkeypatch.setattr(checkpoint, "save", lambda *arguments: None)
    assert steps_and_questions(2, None) == (50, [16, 32, 40, 48, 50])
    assert steps_and_questions(2, 5) == (16, [16])
    assert steps_and_questions(2, 33) == (40, [16, 32, 40])
    assert steps_and_questions(1, 5) == (5, [1, 2, 3, 4, 5])


def test_saving_takes_no_time_from_the_speed(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("psidiff.training.metrics_log.time.monotonic", lambda: now[0])
    trainer = trainer_in(tmp_path)
    update = trainer._update

    def a_second(batches):
        now[0] += 1
        return update(batches)

    def an_hour(step, denoiser):
        now[0] += 3600
        return {}

    trainer._update, trainer.on_save, trainer.on_eval = a_second, an_hour, an_hour
    assert trainer.run()
    speeds = [r["samples_per_second"] for r in read_log(tmp_path / "log.jsonl") if "loss" in r]
    assert speeds == [trainer.settings.batch_size] * 5


def test_a_run_is_saved_before_it_is_evaluated(tmp_path):
    trainer, saved = trainer_in(tmp_path, eval_every=10, save_every=7), []

    def saved_first(step, denoiser):
        saved.append((step, checkpoint.steps(tmp_path / "checkpoints")[-1]))
        return {}

    trainer.on_eval = saved_first
    assert trainer.run()
    assert saved == [(10, 10), (20, 20), (24, 24)]


@pytest.mark.parametrize("when", [10, 24])
@pytest.mark.parametrize("during", [False, True])
def test_an_evaluation_that_a_signal_ended_is_made_up_for_by_resume(tmp_path, when, during):
    def evaluated_in(folder, heard=None, **options):
        """A trainer that is told to stop in the step `heard`, or in its evaluation."""
        folder.mkdir(exist_ok=True)
        trainer = trainer_in(folder, eval_every=10, **options)
        update = trainer._update

        def updated(batches):
            trainer.stopping.asked |= not during and trainer.step + 1 == heard
            return update(batches)

        def evaluate(step, denoiser):
            trainer.stopping.asked |= during and step == heard
            trainer.stopping.check()
            return {"valid": sum(p.sum().item() for p in denoiser.parameters())}

        trainer._update, trainer.on_eval = updated, evaluate
        return trainer

    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert evaluated_in(whole).run()
    first = evaluated_in(parts, when)
    assert not first.run() and checkpoint.steps(parts / "checkpoints")[-1] == when
    assert not any("valid" in r and r["step"] == when for r in lasting(parts))
    second = evaluated_in(parts)
    assert second.resume() == when and second.run()
    assert lasting(parts) == lasting(whole)
    third = evaluated_in(parts)  # and it is made up for once
    assert third.resume() == 24 and third.run() and lasting(parts) == lasting(whole)


def test_being_asked_to_stop_is_answered_at_once():
    said, before = [], signal.getsignal(signal.SIGTERM)
    with StopSignal(lambda: said.append(signal.getsignal(signal.SIGTERM))) as stopping:
        stopping.check()
        signal.raise_signal(signal.SIGTERM)
        assert said == [before] and stopping.asked


def test_files_of_a_run_say_their_version_and_damage_is_said_of_the_file(tmp_path):
    trainer_in(tmp_path).run()
    facts, log = tmp_path / "checkpoints/step-00000024/facts.json", tmp_path / "log.jsonl"
    stored = json.loads(facts.read_text())
    assert stored.pop("format_version") == 2 and stored.pop("checksum")
    assert trainer_in(tmp_path).resume() == 24
    for text, sentence in (
        (json.dumps({**stored, "format_version": 9}), "has format_version 9; this psidiff rea"),
        (json.dumps({**stored, "format_version": 2}), "is damaged: its checksum does not fit"),
        ('{"step": 2', "is damaged: it is not JSON: Expecting"),
        ("[24]", "is damaged: it must hold a mapping, got a list"),
    ):
        facts.write_text(text)
        with pytest.raises(ValueError, match=f"{facts} {sentence}"):
            trainer_in(tmp_path).resume()
    for line in ("{", "7", "{}", "\x00"):
        log.write_text(f'{{"step": 5}}\n{line}\n')
        with pytest.raises(ValueError, match=f"line 2 of {log} is damaged"):
            read_log(log)


def killed_and_resumed(folder, delay):
    """Fork, train, kill -9 after a while, then train on to the end in this process."""
    folder.mkdir()
    child = os.fork()
    if child == 0:
        try:
            trainer_in(folder, steps=40).run()
        finally:
            os._exit(0)
    time.sleep(delay)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    for step in checkpoint.steps(folder / "checkpoints"):  # whatever was left is whole
        path = folder / "checkpoints" / f"step-{step:08d}"
        assert json.loads((path / "facts.json").read_text())["step"] == step
        checkpoint.load(
            folder / "checkpoints", step, trainer_in(folder)._tensors(), Processes()
        )
    trainer = trainer_in(folder, steps=40)
    begun = trainer.resume()
    assert trainer.run()
    return begun, outcome(trainer)


@pytest.mark.parametrize("rounds", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_kill_9_at_any_moment_leaves_a_run_that_ends_bit_identical(tmp_path, rounds):
    folder = tmp_path / "whole"
    folder.mkdir()
    reference = trainer_in(folder, steps=40)
    started = time.monotonic()
    reference.run()
    wanted, took = outcome(reference), time.monotonic() - started
    begun = set()
    for number in range(rounds):
        delay = random.Random(number).uniform(0.1, 1.1) * took
        first, found = killed_and_resumed(tmp_path / f"{number}", delay)
        begun.add(first)
        assert_same(wanted, found)
        assert lasting(tmp_path / f"{number}") == lasting(folder)
    assert rounds == 3 or len(begun) > 2  # it was killed at different places


def small(kind):
    """A network with dropout whose every layer matters, and the length it reads."""
    torch.manual_seed(0)
    unet = kind == "unet"
    network = UNet(24, 8, 1, 16, (1, 2), 1) if unet else Transformer(24, 16, 3, 2, 16)
    for parameter in network.parameters():
        parameter.data.normal_(std=0.1)
    return network.train(), 64 if unet else 12


def learnt(network, tokens):
    """The loss, the gradients, and how many numbers wait for the backward pass."""
    kept = {}

    def keep(value):
        kept[value.data_ptr()] = value.numel()
        return value

    held = {p.data_ptr() for p in network.parameters()}
    torch.manual_seed(1)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        loss = network(tokens, torch.full((4, 1, 1), 0.4)).log_softmax(-1)[..., 0].mean()
    loss.backward()
    waiting = sum(size for place, size in kept.items() if place not in held)
    return loss, [p.grad for p in network.parameters()], waiting


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["transformer", "unet"])
def test_blocks_that_are_recomputed_give_the_same_gradients_and_keep_less(kind, precision):
    found, low = [], precision == "bfloat16"
    for recompute in (False, True):
        network, length = small(kind)
        names = list(network.state_dict())
        call = Processes().spread(network, "ddp", recompute=recompute)
        assert any(isinstance(m, CheckpointedBlock) for m in network.modules()) == recompute
        assert call is network and list(network.state_dict()) == names
        tokens = torch.randint(24, (4, length), generator=torch.Generator().manual_seed(2))
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            found.append(learnt(network, tokens))
    (loss, grads, kept), (again, same, less) = found
    assert torch.equal(loss, again) and less < 0.6 * kept
    assert all(torch.equal(a, b) for a, b in zip(grads, same, strict=True))


def test_the_averaged_network_takes_memory_only_while_it_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr("psidiff.training.trainer.whole", torch.clone)  # as sharded ones are
    trainer = trainer_in(tmp_path, steps=8, eval_every=4)
    shapes = {n: p.shape for n, p in trainer.denoiser.named_parameters()}
    seen = []

    def look(step, denoiser):
        assert {n: p.shape for n, p in denoiser.named_parameters()} == shapes
        assert all(
            torch.equal(p, trainer.ema.shadow[n]) for n, p in denoiser.named_parameters()
        )
        seen.append(denoiser)
        return {}

    trainer.on_eval, trainer.on_save = look, look
    assert trainer.run() and len(seen) == 4
    (copy,) = {id(each): each for each in seen}.values()
    assert copy is not trainer.denoiser and not sum(p.numel() for p in copy.parameters())


def test_a_run_with_recomputed_blocks_is_bit_identical(tmp_path):
    ends = []
    for recompute in (False, True):
        folder = tmp_path / str(recompute)
        folder.mkdir()
        trainer = trainer_in(folder, recompute=recompute)
        assert trainer.run()
        assert not any(isinstance(m, CheckpointedBlock) for m in trainer.averaged().modules())
        ends.append(outcome(trainer))
    assert_same(*ends)


def test_a_network_without_blocks_cannot_be_recomputed():
    with pytest.raises(ValueError, match=r"train\.recompute needs a network with `blocks`"):
        Processes().spread(torch.nn.Linear(2, 2), "ddp", recompute=True)


def flat(module):
    return torch.nn.utils.parameters_to_vector(module.parameters()).detach().clone()


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("soft", [False, True])
def test_the_unet_has_no_linear_readout_and_its_loss_is_fused_from_logits(
    tmp_path, precision, soft, monkeypatch
):
    monkeypatch.setattr(fused_linear_loss, "_ENTRIES", 64 * 24)  # several chunks
    ends, prior = [], Uniform(24)
    for loss in ("fused", "plain"):
        folder = tmp_path / loss
        folder.mkdir()
        objective = RelaxedNelbo(24) if soft else Nelbo(prior, LogLinear())
        pixels = torch.randint(24, (32, 64), generator=torch.Generator().manual_seed(0))
        options = {"batch_size": 4, "warmup": 1, "loss": loss, "precision": precision}
        settings = Settings(
            steps=3, log_every=1, given=0.5, recompute=loss == "plain", **options
        )
        trainer = Trainer(
            Parameterized(small("unet")[0], prior),
            Curriculum((Phase(objective),)),
            Held(pixels),
            settings,
            folder,
        )
        assert trainer.fused == (loss == "fused")
        assert trainer.run()
        losses = [r["loss"] for r in read_log(folder / "log.jsonl") if "loss" in r]
        ends.append((losses, flat(trainer.denoiser)))
    (fused, end), (plain, right) = ends
    near, apart = (1e-5, 1e-3) if precision == "float32" else (1e-4, 5e-2)
    assert fused == pytest.approx(plain, rel=near)
    way = right - flat(Parameterized(small("unet")[0], prior))
    assert (end - right).norm() < apart * way.norm()


def test_only_the_last_checkpoints_are_kept_and_nothing_unfinished(tmp_path):
    trainer_in(tmp_path, keep=3).run()
    (tmp_path / "checkpoints/unfinished-9").mkdir()
    checkpoint.rotate(tmp_path / "checkpoints", 2)
    assert checkpoint.steps(tmp_path / "checkpoints") == [20, 24]
    names = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert names == {"step-00000020", "step-00000024"}


def test_a_run_that_was_killed_before_it_forgot_old_checkpoints_forgets_them(tmp_path):
    trainer_in(tmp_path, keep=3).run()
    trainer = trainer_in(tmp_path, keep=2)
    assert trainer.resume() == 24
    assert trainer.run()
    assert checkpoint.steps(tmp_path / "checkpoints") == [20, 24]


def test_a_run_that_was_killed_after_its_last_checkpoint_hands_on_that_state(tmp_path):
    saved = {}

    def keep(step, denoiser):
        saved[step] = flat(denoiser)

    for resumed in (False, True):
        trainer = trainer_in(tmp_path)
        trainer.on_save = keep
        if resumed:
            wanted = saved.pop(24)
            saved.clear()
            trainer.resume()
        trainer.run()
    assert list(saved) == [24]
    assert torch.equal(saved[24], wanted)


def test_a_loss_that_is_no_number_stops_and_keeps_the_last_good_checkpoint(tmp_path):
    exact = Nelbo(Uniform(24), LogLinear())
    trainer = trainer_in(tmp_path)

    class Breaks:
        def __call__(self, denoiser, batch, generator=None):
            return exact(denoiser, batch, generator) * (torch.nan if trainer.step == 17 else 1)

    trainer.curriculum = Curriculum((Phase(Breaks()),))
    with pytest.raises(ValueError, match=r"loss of step 18 is nan.*of step 16 is kept"):
        trainer.run()
    assert checkpoint.steps(tmp_path / "checkpoints") == [12, 16]


def test_a_checkpoint_of_another_network_is_refused_in_a_sentence(tmp_path):
    trainer_in(tmp_path).run()
    other = trainer_in(tmp_path)
    other.denoiser.network.blocks[0].mlp[0] = torch.nn.Linear(16, 32)
    for parameter in other.denoiser.network.blocks[0].mlp[0].parameters():
        other.optimizers[0].state[parameter] = {"step": torch.zeros(())}
    with pytest.raises(
        ValueError, match=r"does not fit this run: its parameters\.network.* has the"
    ):
        other.resume()


def test_the_batch_does_not_depend_on_how_many_processes_share_it(tmp_path):
    one = trainer_in(tmp_path)
    pieces = [one.batch(5, piece)[0] for piece in range(2)]
    times = torch.cat([piece.times for piece in pieces]).sort().values
    strata = (times * 8).long().clamp(max=7)
    assert strata.tolist() == list(range(8))  # stratified over the whole batch
    again, _ = trainer_in(tmp_path).batch(5, 1)
    assert torch.equal(again.tokens, pieces[1].tokens)
    assert torch.equal(again.given, pieces[1].given)


def test_every_epoch_is_a_new_shuffle_of_all_rows():
    order = Order(7, seed=3)
    places = order.rows(0, 21).view(3, 7)
    assert all(sorted(epoch.tolist()) == list(range(7)) for epoch in places)
    assert len({tuple(epoch.tolist()) for epoch in places}) == 3
    assert torch.equal(order.rows(5, 9), places.flatten()[5:14])


def test_the_rate_warms_up_then_stays_or_falls_as_a_cosine():
    constant = Settings(steps=100, warmup=10, learning_rate=1.0)
    assert [constant.rate(s) for s in (0, 4, 9, 10, 99)] == [0.1, 0.5, 1.0, 1.0, 1.0]
    cosine = Settings(steps=110, warmup=10, learning_rate=1.0, decay="cosine")
    assert cosine.rate(9) == 1.0
    assert cosine.rate(60) == pytest.approx(0.5)
    assert 0 < cosine.rate(109) < 0.001


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"micro_batch": 5}, "micro_batch must divide batch_size"),
        ({"learning_rate": 0.0}, "learning_rate must be above 0"),
        ({"decay": "linear"}, "decay must be 'constant' or 'cosine'"),
        ({"precision": "half"}, "precision must be 'float32' or 'bfloat16'"),
        ({"ema": 1.0}, "ema must be in"),
        ({"given": 1.5}, "given must be in"),
        ({"clip": -1.0}, "clip must be above 0"),
        ({"betas": (2.0, 3.0)}, r"betas must be two numbers in \[0, 1\), got \[2.0, 3.0\]"),
        ({"betas": (0.9, 1.0)}, "betas must be"),
        ({"eps": -1.0}, "eps must be at least 0, got -1"),
        ({"weight_decay": -0.1}, "weight_decay must be at least 0, got -0.1"),
        ({"save_every": 0}, "save_every must be an integer of at least 1"),
    ],
)
def test_settings_say_what_is_wrong(options, said):
    with pytest.raises(ValueError, match=said):
        Settings(steps=10, **options)


def test_three_processes_cannot_share_two_pieces():
    with pytest.raises(ValueError, match="3 processes cannot share 2 pieces"):
        Processes(rank=1, world=3).share(2)


def test_padding_costs_nothing_and_is_not_looked_at(tmp_path):
    torch.manual_seed(0)
    network = Transformer(24, 16, 1, 2, 16, dropout=0.0)
    torch.nn.init.normal_(network.output_layer.linear.weight)
    denoiser = Parameterized(network, Uniform(24))
    tokens, real = DATA.tokens[:4].clone(), torch.ones(4, 12, dtype=torch.bool)
    real[:, 8:] = False
    objective, times = Nelbo(Uniform(24), LogLinear()), stratified_times(4)
    losses = []
    for padding in (0, 5):
        tokens[:, 8:] = padding
        batch = Batch(tokens, times, real=real)
        losses.append(objective(denoiser, batch, torch.Generator().manual_seed(1)))
    assert torch.equal(losses[0][:, 8:], torch.zeros(4, 4))
    torch.testing.assert_close(losses[0], losses[1])
    assert batch.mean(losses[0]) == losses[0][:, :8].mean()


def test_validation_of_the_perfect_denoiser_is_the_entropy():
    joint = Joint.random(3, 3)
    prior = Masked(4, 3)
    rows = joint.sequences[torch.multinomial(joint.weights, 20_000, replacement=True)]
    known, held = (joint.denoiser(prior), prior, LogLinear(eps=0.0)), Held(rows)
    nats = likelihood(*known, held, batch_size=1000).nats_per_token
    entropy = -(joint.weights * joint.weights.log()).sum().item() / 3
    assert abs(nats.value - entropy) < 5 * nats.stderr
    assert nats.stderr < 0.02 * entropy


def test_validation_says_how_far_it_is_and_ends_between_pieces():
    seen = []

    def third(done, of):
        seen.append((done, of))
        if done > 50:
            raise InterruptedError

    prior = Uniform(24)
    denoiser, how = Parameterized(small("transformer")[0], prior), {"on_batch": third}
    with pytest.raises(InterruptedError):
        likelihood(denoiser, prior, LogLinear(), DATA, sequences=100, batch_size=20, **how)
    assert seen == [(20, 100), (40, 100), (60, 100)]


JOINT = Joint.random(3, 3)
ENTROPY = -(JOINT.weights * JOINT.weights.log()).sum().item() / 3


class Drawn:
    """Rows of the enumerated toy, new ones for ever."""

    length = 3

    def __len__(self):
        return 2**20

    def rows(self, indices, generator=None):
        chosen = torch.multinomial(JOINT.weights, len(indices), True, generator=generator)
        return Rows(JOINT.sequences[chosen])


@pytest.mark.slow
@pytest.mark.parametrize("prior", [Masked(4, 3), Uniform(3), Mixed(4, 3, 0.3), None], ids=str)
def test_the_trained_nelbo_comes_within_one_percent_of_the_entropy(prior, tmp_path):
    torch.manual_seed(0)
    size, causal = (4 if prior is None else prior.vocab_size), prior is None
    network = Transformer(size, 64, 2, 4, 32, dropout=0.0, causal=causal, learned_positions=3)
    denoiser = network if prior is None else Parameterized(network, prior)
    objective = NextToken(3) if prior is None else Nelbo(prior, LogLinear(eps=1e-3))
    settings = Settings(
        steps=1500, batch_size=256, learning_rate=3e-3, warmup=100, decay="cosine", ema=0.99
    )
    trainer = Trainer(denoiser, Curriculum((Phase(objective),)), Drawn(), settings, tmp_path)
    trainer.run()
    held = Held(Drawn().rows(torch.arange(100_000), torch.Generator()).tokens)
    if prior is None:  # every sequence and its probability: no chance in the figure
        loss = objective(trainer.averaged(), Batch(JOINT.sequences, torch.ones(27)))
        nats = (loss.sum(-1) * JOINT.weights).sum().item() / 3
        assert nats / ENTROPY < 1.005
        return
    mine, perfect = (
        likelihood(each, prior, LogLinear(eps=0.0), held, batch_size=2000).nats_per_token
        for each in (trainer.averaged(), JOINT.denoiser(prior))
    )
    assert mine.value / perfect.value < 1.01  # on common random numbers
    assert abs(perfect.value - ENTROPY) < 5 * perfect.stderr


def psidiff(*arguments, processes=1, **options):
    command = [sys.executable, "-m", "psidiff"]
    if processes > 1:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(processes), "-m", "psidiff"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
        **options,
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_saves_and_the_second_is_the_process_s_own(tmp_path, number):
    def heard(number, frame):
        raise InterruptedError

    before = signal.signal(number, heard)
    try:
        for signals, folder in ((1, tmp_path / "one"), (2, tmp_path / "two")):
            folder.mkdir()
            trainer = trainer_in(folder)
            update = trainer._update

            def update_and_hear(batches, trainer=trainer, update=update, signals=signals):
                if trainer.step == 5:
                    for _ in range(signals):
                        signal.raise_signal(number)
                return update(batches)

            trainer._update = update_and_hear
            if signals == 1:
                assert not trainer.run() and trainer.stopping.signal == number
                assert checkpoint.steps(folder / "checkpoints")[-1] == 6
            else:
                with pytest.raises(InterruptedError):
                    trainer.run()
            assert signal.getsignal(number) is heard
    finally:
        signal.signal(number, before)


TINY = (
    "model.hidden_size=16",
    "model.num_blocks=2",
    "model.num_heads=2",
    "train.batch_size=8",
    "train.micro_batch=4",
    "train.log_every=1",
    "train.save_every=10",
    "train.eval_every=1000",
    "eval.samples=10",
    "eval.steps=4",
    "eval.sequences=16",
    "tracker=none",
)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_follow_one_and_are_resumed_as_one(tmp_path, parallel):
    optimizer = "muon" if parallel == "ddp" else "adamw"
    options = (*TINY, "--device", "cpu", f"train.parallel={parallel}")
    options = (*options, f"train.optimizer={optimizer}")
    one, two = tmp_path / "one", tmp_path / "two"
    done = psidiff("train", "digits", *options, "train.steps=30", "--out", one)
    assert done.returncode == 0, done.stderr
    shared_options = (*options, "train.steps=20", "train.recompute=true", "--out", two)
    done = psidiff("train", "digits", *shared_options, processes=2)
    assert done.returncode == 0, done.stderr
    alone = [r["loss"] for r in read_log(one / "log.jsonl") if "loss" in r]
    shared = [r["loss"] for r in read_log(two / "log.jsonl") if "loss" in r]
    assert len(shared) == 20
    assert max(abs(a - b) for a, b in zip(alone, shared, strict=False)) < 1e-5
    done = psidiff("train", "digits", "train.steps=30", "--out", two, "--resume")
    assert done.returncode == 0, done.stderr
    resumed = [r["loss"] for r in read_log(two / "log.jsonl") if "loss" in r]
    assert len(resumed) == 30
    assert max(abs(a - b) for a, b in zip(alone, resumed, strict=True)) < 1e-4


@pytest.mark.slow
def test_sigterm_writes_a_checkpoint_and_the_command_goes_on_with_resume(tmp_path):
    options = ("train", "digits", *TINY, "--device", "cpu", "--out", tmp_path / "run")
    command = [sys.executable, "-m", "psidiff", *map(str, options), "train.steps=100000"]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    log = tmp_path / "run/log.jsonl"
    for _ in range(600):
        if log.is_file() and len(read_log(log)) > 12:
            break
        time.sleep(0.1)
    running.send_signal(signal.SIGTERM)
    said, _ = running.communicate(timeout=60)
    assert running.returncode == 143
    assert "saved: the same command with --resume goes on" in said.replace("\n", " ")
    (step, *_) = checkpoint.steps(tmp_path / "run/checkpoints")[-1:]
    done = psidiff(*options, "--resume", f"train.steps={step + 3}")
    assert done.returncode == 0, done.stderr
    assert f"resumed at step {step:,}" in done.stdout
    starts = json.loads((tmp_path / "run/run.json").read_text())["starts"]
    assert len(starts) == 2 and starts[0]["seed"] == 0 and "train" in starts[0]["command"]
