"""What the tests of the server share: tiny models of each kind, and a server around one."""

import socket
import threading
import time
from contextlib import contextmanager

import torch

from psidiff.data.characters import Characters
from psidiff.data.images import Pixels
from psidiff.data.sudoku import Sudoku
from psidiff.model import Model
from psidiff.model_config import ModelConfig
from psidiff.models import Parameterized, Transformer
from psidiff.process import LogLinear, Masked, Uniform

LETTERS = Characters("abcdefgh .\n<")


def tiny(codec=LETTERS, prior=None, length=24, dtype=torch.float32, **config):
    """An untrained transformer that has opinions all the same."""
    prior = prior or Uniform(codec.vocab_size)
    options = {"hidden_size": 16, "num_blocks": 2, "num_heads": 2, "cond_dim": 8}
    options |= {"vocab_size": prior.vocab_size, "dropout": 0.0}
    options |= {"num_classes": config.pop("num_classes", None)}
    network = Transformer(**options).to(dtype).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    for parameter in network.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
    described = {"network": "transformer", "options": options, "length": length, **config}
    denoiser = Parameterized(network, prior).eval()
    return Model(
        denoiser,
        prior,
        LogLinear(),
        codec,
        ModelConfig.from_dict({"name": "tiny", **described}),
    )


def tiny_masked(**config):
    return tiny(prior=Masked(LETTERS.vocab_size + 1, LETTERS.vocab_size), **config)


def tiny_puzzle():
    return tiny(Sudoku(), Masked(10, 9), 81, name="sudoku")


def tiny_images():
    codec = Pixels(1, 4, 4, levels=6, classes=("ring", "bar"))
    return tiny(codec, length=16, num_classes=2)


@contextmanager
def serving(model, names=None, send_buffer=None, **settings):
    """A server in a thread: its address, and its app.

    names: that it answers to; send_buffer: bytes that the kernel takes for a slow reader.
    """
    from psidiff.serve.app import create_app
    from psidiff.serve.config import Settings
    from psidiff.serve.server import Server, config_of

    chosen = Settings(model.config.name, **settings)
    app = create_app(model, chosen, names)
    listening = socket.create_server(("127.0.0.1", 0))
    if send_buffer is not None:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    config = config_of(app, chosen)
    config.timeout_graceful_shutdown = 1
    server = Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", app
    finally:
        server.should_exit = True
        thread.join()
        listening.close()


class Slow:
    """A denoiser that takes its time, and counts the sequences it was shown."""

    def __init__(self, denoiser, seconds):
        self.denoiser, self.seconds, self.shown = denoiser, seconds, 0

    def __call__(self, z, alpha, labels=None):
        self.shown += len(z)
        time.sleep(self.seconds)
        return self.denoiser(z, alpha, labels)


def slow(seconds=0.02, **config):
    """A model whose every step takes a while."""
    model = tiny(**config)
    denoiser = Slow(model.denoiser, seconds)
    return Model(denoiser, model.prior, model.schedule, model.codec, model.config)
