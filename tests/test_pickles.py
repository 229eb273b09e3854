"""Pickles are data: nothing they name lives, and a small file asks for little."""

import io
import os
import pickle
import resource
import struct
import zipfile
from multiprocessing import get_context

import pytest
import torch

from psidiff.checksums import Damaged
from psidiff.pickles import Name, Refused, StandIn, read_pickle
from psidiff.released_checkpoints import plain
from psidiff.torch_files import read_torch_file

DCP = {"pathlib", "torch.Size", "torch.distributed", "torch.serialization", "torch.float32"}


def name(path):
    """The opcodes of protocol 4 that name a global."""
    module, _, word = path.rpartition(".")
    return text(module) + text(word) + b"\x93"


def text(word):
    return b"\x8c" + bytes([len(word)]) + word.encode()


def archive(path, code):
    """A file of torch.save whose pickle is these bytes."""
    whole = io.BytesIO()
    torch.save({"a": torch.ones(3)}, whole)
    with zipfile.ZipFile(whole) as old, zipfile.ZipFile(path, "w") as new:
        for item in old.namelist():
            new.writestr(item, code if item.endswith("data.pkl") else old.read(item))
    return path


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_values_are_read_as_they_were_written(protocol):
    shared = [1, 2]
    value = {
        "numbers": [0, -1, 255, 256, 70_000, 2**40, -(2**70), 1.5, float("inf"), True, None],
        "text": ("", "a", "é" * 300, "x" * 7_000),
        "bytes": (b"", b"a\xff", b"x" * 300),
        "shared": [shared, shared],
        (1, "a")[1]: (1, (2, (3, 4), 5, 6)),
        ("a", "b"): {3: 4, None: 5, 1.5: 6},
    }
    data = pickle.dumps(value, protocol)
    assert read_pickle(data, "a.pkl") == value
    assert read_pickle(data, "a.pkl")["shared"][0] is not None
    for cut in (*range(60), *range(60, len(data), 997)):
        with pytest.raises(ValueError, match=r"a\.pkl"):
            read_pickle(data[:cut], "a.pkl")


def test_a_set_is_read_and_a_key_that_nests_is_not():
    assert read_pickle(pickle.dumps({1, "a"}, 4), "a.pkl") == {1, "a"}
    for key in ((1, 2), frozenset("ab"), 2**64, ("a",) * 16):
        with pytest.raises(Refused, match="as a key"):
            read_pickle(pickle.dumps({key: 1}, 4), "a.pkl")


def test_an_object_is_what_the_file_says_of_it():
    code = b"\x80\x04" + name("omegaconf.nodes.Node") + text("x") + b"\x85R" + b"}" + text("a")
    made = read_pickle(code + b"K\x01sb.", "a.pkl", {"omegaconf"})
    assert isinstance(made, StandIn) and made.name == "omegaconf.nodes.Node"
    assert made.args == ("x",) and made.state == {"a": 1}


POISONS = {  # a live function, type or module whose attributes a pickle would set
    "defaults": name("torch._utils._rebuild_tensor_v2")
    + b"N}"
    + text("__defaults__")
    + b"Ns\x86b.",
    "type": name("collections.OrderedDict") + b"N}" + text("__init__") + b"Ns\x86b.",
    "class": name("torch.storage.UntypedStorage") + b"}" + text("new") + b"Nsb.",
}


@pytest.mark.parametrize("kind", POISONS)
def test_no_state_is_set_on_what_lives(tmp_path, kind):
    path = archive(tmp_path / "a.ckpt", b"\x80\x04" + POISONS[kind])
    with pytest.raises(Refused, match="sets the state of what is no object"):
        read_torch_file(path)
    assert torch._utils._rebuild_tensor_v2.__defaults__ == (None,)
    torch.save({"a": torch.ones(3)}, tmp_path / "b.ckpt")
    assert torch.load(tmp_path / "b.ckpt")["a"].sum() == 3


@pytest.mark.parametrize(
    "path", ["os.system", "posix.system", "builtins.eval", "builtins.getattr", "torch.load"]
)
def test_a_name_that_runs_code_is_refused(tmp_path, path):
    code = b"\x80\x04" + name(path) + text(f"touch {tmp_path / 'ran'}") + b"\x85R."
    for read in (
        lambda: read_pickle(code, "a.pkl"),
        lambda: read_torch_file(archive(tmp_path / "a.ckpt", code)),
    ):
        with pytest.raises(Refused, match=f"asks for {path}, which is refused"):
            read()
    assert not (tmp_path / "ran").exists()
    old = b"\x80\x02c" + path.replace(".", "\n").encode() + b"\n."
    with pytest.raises(Refused, match="which is refused"):
        read_pickle(old, "a.pkl")


def test_a_name_is_never_walked_to_what_a_package_imported():
    with pytest.raises(Refused):
        read_pickle(
            b"\x80\x04" + text("omegaconf") + text("os.system") + b"\x93.", "a", {"omegaconf"}
        )
    assert read_pickle(b"\x80\x04" + name("typing.Any") + b".", "a", {"typing"}) == Name(
        "typing.Any"
    )


GREEDY = {
    "memo index": b"\x80\x04K\x01r\x00\x00\x00\x20.",
    "text of 4 EiB": b"\x80\x04\x8d" + struct.pack("<Q", 2**62) + b"a.",
    "bytes of 4 GiB": b"\x80\x04B" + struct.pack("<I", 2**32 - 1) + b"a.",
    "bytearray": b"\x80\x05\x96" + struct.pack("<Q", 2**40) + b"a.",
    "integer of 2 GiB": b"\x80\x04\x8b" + struct.pack("<i", 2**31 - 1) + b"a.",
    "marks": b"\x80\x04" + b"(" * 20_000 + b".",
    "tuples in tuples": b"\x80\x04)" + b"\x85" * 30_000 + b".",
    "sets": b"\x80\x04(" + b"\x8f" * 30_000 + b"t.",
    "one text encoded often": b"\x80\x04("
    + (
        b"X"
        + struct.pack("<I", 10**6)
        + b"a" * 10**6
        + b"\x940"
        + name("_codecs.encode")
        + b"\x940"
    )
    + b"h\x01h\x00\x85R" * 5_000
    + b"t.",
    "one tuple given often": b"\x80\x04("
    + b"N" * 10_000
    + b"t\x940"
    + name("collections.OrderedDict")
    + b"\x940("
    + b"h\x01h\x00R" * 5_000
    + b"t.",
    "one long key compared often": b"\x80\x04}("
    + 2 * (b"X" + struct.pack("<I", 10**6) + b"a" * 10**6 + b"\x94N")
    + b"h\x00Nh\x01N" * 4_000
    + b"u.",
    "texts as codecs": b"\x80\x04)\x94"
    + b"".join(b"h" + bytes([i]) + b"h" + bytes([i]) + b"\x86\x94" for i in range(40))
    + b"0" * 40
    + name("_codecs.encode")
    + text("a")
    + b"h\x28\x86R.",
    "a number encoded": b"\x80\x04" + name("_codecs.encode") + b"K\x05\x85R.",
    "an extension": b"\x80\x04\x82\x01.",
    "buffers": b"\x80\x05\x97.",
    "a persistent id": b"\x80\x04K\x01Q.",
    "text opcodes": b"\x80\x04I1\n.",
    "protocol 0": b"I1\n.",
    "no end": b"\x80\x04N",
    "nothing": b"",
    "an empty stack": b"\x80\x040.",
    "a list as key": b"\x80\x04}]Ns.",
}


def _greedy(code, answers):
    resource.setrlimit(resource.RLIMIT_AS, (3 * 2**30, 3 * 2**30))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        answers.put(repr(read_pickle(code, "a.pkl")))
    except Exception as error:
        after = resource.getrusage(resource.RUSAGE_SELF)
        answers.put(
            (type(error).__name__, str(error), after.ru_maxrss - before, after.ru_utime)
        )


@pytest.mark.parametrize("kind", GREEDY)
def test_a_small_pickle_asks_for_little(monkeypatch, kind):
    monkeypatch.setenv(
        "PSIDIFF_LIMITS", "opcodes=20000"
    )  # types are checked here, which is slow
    context = get_context("fork")
    answers = context.SimpleQueue()
    child = context.Process(target=_greedy, args=(GREEDY[kind], answers))
    child.start()
    child.join()
    error, sentence, kib, _ = answers.get()
    assert error in ("Refused", "Damaged", "ValueError") and sentence.startswith("a.pkl ")
    assert len(sentence) < 250 and kib < 2**20


def colliding(count):
    """Numbers that a table of CPython tries one place after another for, each of them."""
    return [(1 + i * 2**40) for i in range(count)]


@pytest.mark.parametrize(
    "pickle_of",
    [
        lambda numbers: b"\x80\x04}(" + b"".join(n + b"N" for n in numbers) + b"u.",
        lambda numbers: b"\x80\x04\x8f(" + b"".join(numbers) + b"\x90.",
        lambda numbers: b"\x80\x04(" + b"".join(numbers) + b"\x91.",
    ],
    ids=["dict", "set", "frozenset"],
)
def test_numbers_that_collide_are_few(monkeypatch, pickle_of):
    numbers = [b"\x8a\x08" + struct.pack("<q", n) for n in colliding(3_000)]
    assert read_pickle(pickle_of(numbers[:300]), "a.pkl")
    monkeypatch.setenv("PSIDIFF_LIMITS", "opcodes=100000")
    with pytest.raises(ValueError, match=r"a\.pkl is a pickle of .* steps"):
        read_pickle(pickle_of(numbers), "a.pkl")
    ordered = [b"M" + struct.pack("<H", n) for n in range(20_000)]
    assert len(read_pickle(pickle_of(ordered), "a.pkl")) == 20_000


def test_empty_containers_count_for_what_they_take(monkeypatch):
    monkeypatch.setenv("PSIDIFF_LIMITS", "opcodes=10000")
    for code in (b"\x8f", b"]", b"}"):
        assert len(read_pickle(b"\x80\x04(" + code * 1_500 + b"t.", "a.pkl")) == 1_500
        with pytest.raises(ValueError, match="steps"):
            read_pickle(b"\x80\x04(" + code * 4_000 + b"t.", "a.pkl")


def test_values_that_are_used_often_are_counted_every_time(monkeypatch):
    monkeypatch.setenv("PSIDIFF_LIMITS", "nodes=10000")
    bomb = b"\x80\x04]\x94" + b"".join(
        b"]" + bytes([0x94]) + b"(" + b"h" + bytes([i]) + (b"h" + bytes([i])) * 9 + b"e"
        for i in range(12)
    )
    value = read_pickle(bomb + b".", "a.pkl")
    with pytest.raises(ValueError, match=r"a\.pkl has .* values or more"):
        plain(value, "a.pkl")
    with pytest.raises(ValueError, match=r"a\.pkl nests"):
        plain(read_pickle(b"\x80\x04)" + b"\x85" * 2_000 + b".", "a.pkl"), "a.pkl")


def test_torch_s_own_files_are_read_as_torch_reads_them(tmp_path):
    base = torch.randn(4, 6)
    value = {
        "whole": base,
        "view": base[1:3, ::2],
        "turned": base.T,
        "scalar": torch.tensor(2.5, dtype=torch.bfloat16),
        "none": torch.zeros(0, 3),
        "ids": torch.arange(5),
        "flags": torch.tensor([True, False]),
        "half": torch.ones(3, dtype=torch.float16),
        "complex": torch.ones(2, dtype=torch.complex64),
        "beside": {"step": 3, "names": ["a", "b"], "rate": 1e-3},
    }
    for crc in (True, False):
        torch.serialization.set_crc32_options(crc)
        try:
            torch.save(value, tmp_path / "a.pt")
        finally:
            torch.serialization.set_crc32_options(True)
        read = read_torch_file(tmp_path / "a.pt")
        assert read.keys() == value.keys() and read["beside"] == value["beside"]
        for key, tensor in value.items():
            if isinstance(tensor, torch.Tensor):
                assert torch.equal(read[key], tensor) and read[key].dtype == tensor.dtype
                assert read[key].stride() == tensor.stride()
        assert read["view"].untyped_storage().data_ptr() == read["whole"].data_ptr()


def test_a_flipped_bit_in_torch_s_file_is_found(tmp_path):
    path = tmp_path / "a.pt"
    torch.save({"a": torch.arange(12.0)}, path)
    whole = path.read_bytes()
    numbers = whole.index(struct.pack("<3f", 1, 2, 3))
    for place in (numbers, whole.index(b"_rebuild_tensor_v2"), numbers + 40):
        changed = bytearray(whole)
        changed[place] ^= 4
        path.write_bytes(changed)
        with pytest.raises(Damaged, match=r"a\.pt is damaged: "):
            read_torch_file(path)
    for cut in range(0, len(whole), 7):
        path.write_bytes(whole[:cut])
        with pytest.raises(ValueError, match=r"a\.pt"):
            read_torch_file(path)


VIEWS = {  # offset, size, stride
    "beyond its end": (0, (4,), (1,)),
    "an offset beyond": (3, (1,), (1,)),
    "strides beyond": (0, (2,), (3,)),
    "many times one number": (0, (10**9,), (0,)),
    "a negative size": (0, (-1,), (1,)),
    "a negative offset": (-1, (1,), (1,)),
    "a large empty one": (0, (2**60, 0), (1, 1)),
    "a huge empty one": (0, (0, 2**39, 2**39), (1, 1, 1)),
    "no numbers": (0, ("a",), (1,)),
    "no size": (0, 3, (1,)),
}


@pytest.mark.parametrize("kind", VIEWS)
def test_a_tensor_lies_in_its_storage(tmp_path, kind):
    offset, size, stride = VIEWS[kind]
    storage = b"(" + text("storage") + name("torch.FloatStorage") + text("0") + text("cpu")
    storage += b"K\x03tQ"
    parts = [pickle.dumps(part, 2)[2:-1] for part in (offset, size, stride)]
    code = b"\x80\x04" + name("torch._utils._rebuild_tensor_v2") + b"(" + storage
    code += b"".join(parts) + b"tR."
    with pytest.raises(ValueError, match=r"a\.pt "):
        read_torch_file(archive(tmp_path / "a.pt", code))


def test_the_index_of_a_sharded_checkpoint_is_read_as_data(tmp_path):
    from torch.distributed import checkpoint as dcp

    weights = torch.arange(6.0).view(2, 3)
    dcp.save({"w": weights, "rate": 0.1}, checkpoint_id=tmp_path, no_dist=True)
    index = read_pickle((tmp_path / ".metadata").read_bytes(), tmp_path / ".metadata", DCP)
    assert index.name == "torch.distributed.checkpoint.metadata.Metadata"
    tensor = index.state["state_dict_metadata"]["w"].state
    assert tensor["size"].name == "torch.Size" and tensor["size"].args == ((2, 3),)
    assert tensor["properties"].state[0] == Name("torch.float32")
    for key, place in index.state["storage_data"].items():
        with (tmp_path / place.state["relative_path"]).open("rb") as file:
            file.seek(place.state["offset"])
            held = read_torch_file(io.BytesIO(file.read(place.state["length"])), "shard")
        if key.state["fqn"] == "w":
            assert torch.equal(held, weights)
        else:
            assert held == 0.1


def test_a_pipe_is_not_opened(tmp_path):
    os.mkfifo(tmp_path / "a.ckpt")
    with pytest.raises(ValueError, match="no regular file"):
        read_torch_file(tmp_path / "a.ckpt")
