"""Images: pixels as tokens and back, and the files they come in."""

import gzip
import io
import os
import pickle
import resource
import struct
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from toys import generator

from psidiff.data.codec import Codec
from psidiff.data.image_files import read_images
from psidiff.data.images import Images, Pixels, digits, grid, write_png
from psidiff.experiment.datasets import corpus
from psidiff.experiment.recipe import ImageData
from psidiff.types import Dataset

RNG = np.random.default_rng(0)
CLASSES = [f"class{i}" for i in range(10)]


def random_pixels(*shape):
    return RNG.integers(0, 256, shape, dtype=np.uint8)


def test_decoding_gives_back_the_pixels_of_an_image():
    pixels = random_pixels(2, 3, 4, 5)
    tokens = Images(pixels).rows(torch.arange(2)).tokens
    assert tokens.dtype == torch.int64 and tokens.shape == (2, 60)
    assert np.array_equal(Pixels(3, 4, 5).decode(tokens[1]), pixels[1].transpose(1, 2, 0))
    grey = Images(pixels[:, :1]).rows(torch.arange(2)).tokens
    assert np.array_equal(Pixels(1, 4, 5).decode(grey[0]), pixels[0, 0])


def test_levels_are_spread_from_black_to_white_and_a_mask_is_mid_grey():
    image = Pixels(1, 1, 6, levels=4).decode(torch.tensor([0, 1, 2, 3, 4, -1]))
    assert image.tolist() == [[0, 85, 170, 255, 128, 128]]


def test_pixels_is_a_codec_that_its_description_makes_again():
    codec = Pixels(3, 4, 5, levels=16, classes=("cat", "dog"))
    assert isinstance(codec, Codec) and codec.kind == "image"
    assert (codec.vocab_size, codec.length) == (16, 60)
    described = codec.describe()
    assert described.pop("name") == "pixels" and Pixels(**described) == codec
    assert hash(Pixels(**described)) == hash(codec)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Pixels(2, 4, 4), r"channels must be 1 \(grey\) or 3 \(RGB\), got 2"),
        (lambda: Pixels(1, 0, 4), "height must be an integer of at least 1, got 0"),
        (lambda: Pixels(1, 4, 4, levels=257), "levels must be at most 256, got 257"),
        (lambda: Pixels(1, 4, 4).decode(torch.zeros(15)), r"shape \(16,\), got \(15,\)"),
        (lambda: Images(np.zeros((2, 4, 4), np.uint8)), r"shape \(N, C, H, W\)"),
        (lambda: Images(np.zeros((2, 1, 4, 4))), "must be uint8"),
        (lambda: Images(np.zeros((0, 1, 4, 4), np.uint8)), "no pixels"),
        (lambda: Images(np.full((1, 1, 4, 4), 17, np.uint8), levels=17, values=17), "got 17"),
        (lambda: Images(np.zeros((1, 1, 4, 4), np.uint8), levels=8, values=4), "at most 4"),
        (lambda: Images(np.zeros((2, 1, 4, 4), np.uint8), np.zeros(3)), r"labels .* \(2,\)"),
        (lambda: digits("test"), "train and valid, got 'test'"),
        (lambda: read_images(".", "valid"), "split must be 'train' or 'test', got 'valid'"),
        (lambda: grid([], 3), "at least one image"),
        (lambda: grid([np.zeros((2, 2)), np.zeros((2, 3))], 3), "one shape"),
        (lambda: write_png(np.zeros((2, 2)), "x.png"), "a PNG needs uint8"),
    ],
)
def test_what_is_no_image_is_refused_in_words(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_fewer_levels_divide_the_256_values_evenly():
    pixels = np.arange(256, dtype=np.uint8).reshape(1, 1, 16, 16)
    tokens = Images(pixels, levels=8).rows(torch.tensor([0])).tokens[0]
    assert torch.equal(tokens, torch.arange(8).repeat_interleave(32))


def test_a_source_of_few_values_is_taken_as_it_is():
    pixels = np.arange(17, dtype=np.uint8).reshape(1, 1, 1, 17)
    tokens = Images(pixels, levels=17, values=17).rows(torch.tensor([0])).tokens[0]
    assert torch.equal(tokens, torch.arange(17))


def test_a_flip_mirrors_half_of_the_images_and_only_by_the_generator():
    pixels, indices = torch.from_numpy(random_pixels(400, 3, 2, 5)), torch.arange(400)
    images = Images(pixels, flip=True)
    assert torch.equal(images.rows(indices).tokens, pixels.flatten(1).long())
    tokens = images.rows(indices, generator(0)).tokens
    kept = (tokens == pixels.flatten(1)).all(1)
    mirrored = (tokens == pixels.flip(-1).flatten(1)).all(1)
    assert (kept ^ mirrored).all() and 150 < mirrored.sum() < 250
    assert torch.equal(tokens, images.rows(indices, generator(0)).tokens)
    still = Images(pixels).rows(indices, generator(0)).tokens
    assert torch.equal(still, pixels.flatten(1).long())


def test_rows_carry_the_labels_of_their_images():
    images = Images(random_pixels(5, 1, 2, 2), np.arange(5, dtype=np.uint8))
    assert isinstance(images, Dataset) and len(images) == 5 and images.length == 4
    assert images.rows(torch.tensor([3, 1])).labels.tolist() == [3, 1]
    assert Images(random_pixels(5, 1, 2, 2)).rows(torch.tensor([3, 1])).labels is None


def test_the_digits_are_1500_to_learn_from_and_297_to_validate():
    train, valid = digits("train"), digits("valid")
    assert (len(train), len(valid), train.length, train.levels) == (1500, 297, 64, 17)
    rows = train.rows(torch.arange(1500))
    assert (rows.tokens.min(), rows.tokens.max()) == (0, 16)
    assert set(rows.labels.tolist()) == set(range(10)) == set(valid.labels.tolist())


def test_the_digits_are_those_of_scikit_learn_in_another_order():
    datasets = pytest.importorskip("sklearn.datasets")
    order, source = np.random.RandomState(0).permutation(1797), datasets.load_digits()
    pixels = torch.cat((digits("train").pixels, digits("valid").pixels))
    labels = torch.cat((digits("train").labels, digits("valid").labels))
    assert np.array_equal(pixels[:, 0], source.images[order])
    assert np.array_equal(labels, source.target[order])


def test_a_grid_sets_images_side_by_side():
    a, b, c = (np.full((2, 3), shade, np.uint8) for shade in (1, 2, 3))
    sheet = grid([a, b, c], columns=2, scale=2, gap=1)
    assert sheet.shape == (9, 13) and sheet.dtype == np.uint8
    assert (sheet[:4, :6] == 1).all() and (sheet[:4, 7:] == 2).all()
    assert (sheet[5:, :6] == 3).all() and (sheet[4] == 255).all() and (sheet[:, 6] == 255).all()
    assert grid([random_pixels(2, 3, 3)] * 3, columns=3, gap=0).shape == (2, 9, 3)


@pytest.mark.parametrize("shape", [(5, 7), (5, 7, 3)])
def test_pillow_reads_what_write_png_wrote(shape, tmp_path):
    image = pytest.importorskip("PIL.Image")
    array = random_pixels(*shape)
    write_png(array, tmp_path / "a.png")
    assert np.array_equal(np.asarray(image.open(tmp_path / "a.png")), array)


@pytest.mark.parametrize("keys", [("pixels", "labels"), ("images", "y"), ("x", "label")])
def test_an_npz_file_names_its_arrays_in_one_of_several_ways(keys, tmp_path):
    pixels = random_pixels(4, 5, 6, 3)
    np.savez(tmp_path / "a.npz", **{keys[0]: pixels, keys[1]: np.array([[0], [1], [2], [1]])})
    found = read_images(tmp_path / "a.npz", "train")
    assert np.array_equal(found.pixels, pixels.transpose(0, 3, 1, 2))
    assert found.labels.tolist() == [0, 1, 2, 1] and found.classes == ("0", "1", "2")
    with pytest.raises(ValueError, match="without a test split"):
        read_images(tmp_path / "a.npz", "test")


def test_one_npz_file_or_two_hold_both_splits(tmp_path):
    train, test = random_pixels(3, 4, 4), random_pixels(2, 4, 4)
    np.savez(tmp_path / "a.npz", x_train=train, x_test=test)
    (tmp_path / "two").mkdir()
    np.savez(tmp_path / "two" / "train.npz", pixels=train)
    np.savez(tmp_path / "two" / "test.npz", pixels=test)
    for place in ("a.npz", "two"):
        found = read_images(tmp_path / place, "test")
        assert np.array_equal(found.pixels[:, 0], test) and found.labels is None
        assert np.array_equal(read_images(tmp_path / place, "train").pixels[:, 0], train)


def test_a_damaged_test_set_is_refused_and_none_is_split_from_what_there_is(tmp_path):
    section = ImageData(str(tmp_path), valid_share=0.25)
    np.savez(tmp_path / "train.npz", pixels=random_pixels(8, 4, 4))
    assert [len(part) for part in (corpus(section).train, corpus(section).valid)] == [6, 2]
    test = tmp_path / "test.npz"
    np.savez(test, pixels=random_pixels(3, 4, 4))
    test.write_bytes(test.read_bytes()[:-40])
    with pytest.raises(ValueError, match=r"test\.npz is damaged"):
        corpus(section)
    test.unlink()
    (tmp_path / "test").mkdir()
    with pytest.raises(ValueError, match="no images were recognised"):
        corpus(section)


def test_half_a_test_set_of_mnist_is_refused_and_none_is_split(tmp_path):
    section = ImageData(str(tmp_path))
    pixels, labels = random_pixels(10, 4, 4), np.arange(10, dtype=np.uint8)
    head = {
        "images": struct.pack(">4I", 2051, 10, 4, 4),
        "labels": struct.pack(">2I", 2049, 10),
    }
    for part in ("train", "t10k"):
        for name, rank, held in (("images", 3, pixels), ("labels", 1, labels)):
            path = tmp_path / f"{part}-{name}-idx{rank}-ubyte"
            path.write_bytes(head[name] + held.tobytes())
    assert len(corpus(section).train) == len(corpus(section).valid) == 10
    (tmp_path / "t10k-images-idx3-ubyte").unlink()
    with pytest.raises(ValueError, match="lacks t10k-images-idx3-ubyte"):
        corpus(section)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    assert (len(corpus(section).train), len(corpus(section).valid)) == (9, 1)


def test_jpegs_end_to_end_in_an_npz_file_are_decoded(tmp_path):
    image = pytest.importorskip("PIL.Image")
    shades = [10, 200, 90]
    files = []
    for shade in shades:
        image.new("RGB", (8, 8), (shade,) * 3).save(tmp_path / "one.jpg", quality=95)
        files.append((tmp_path / "one.jpg").read_bytes())
    arrays = {
        "jpeg": np.frombuffer(b"".join(files), np.uint8),
        "offset": np.cumsum([0, *map(len, files)]),
        "label": np.array([1, 0, 1], np.uint8),
    }
    path = tmp_path / "a.npz"
    named = {f"{split}_{k}": v for split in ("train", "test") for k, v in arrays.items()}
    np.savez(path, **named, classes=np.array(["cat", "dog"]))
    found = read_images(path, "test")
    assert found.pixels.shape == (3, 3, 8, 8) and found.classes == ("cat", "dog")
    assert np.abs(found.pixels[:, 0, 0, 0].astype(int) - shades).max() <= 2


def test_the_jpeg_copy_of_cifar10_has_ten_classes_of_a_thousand_test_images():
    pytest.importorskip("PIL.Image")
    path = Path(os.environ.get("PSIDIFF_DATA", "~/.cache/psidiff")) / "cifar10_jpeg.npz"
    if not path.expanduser().is_file():
        pytest.skip("the folder PSIDIFF_DATA has no cifar10_jpeg.npz")
    found = read_images(path.expanduser(), "test")
    assert found.pixels.shape == (10_000, 3, 32, 32) and found.classes[0] == "airplane"
    assert np.bincount(found.labels).tolist() == [1000] * 10


def folder_of_pictures(path, names, size=(4, 6)):
    arrays = [random_pixels(*size, 3) for _ in names]
    for name, array in zip(names, arrays, strict=True):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        write_png(array, path / name)
    return np.stack(arrays).transpose(0, 3, 1, 2)


def test_sub_folders_of_pictures_are_classes(tmp_path):
    pytest.importorskip("PIL.Image")
    pixels = folder_of_pictures(tmp_path, ["cat/1.png", "cat/2.PNG", "dog/1.png"])
    found = read_images(tmp_path, "train")
    assert np.array_equal(found.pixels, pixels)
    assert found.labels.tolist() == [0, 0, 1] and found.classes == ("cat", "dog")


def test_a_folder_may_hold_a_folder_for_each_split(tmp_path):
    pytest.importorskip("PIL.Image")
    folder_of_pictures(tmp_path, ["train/1.png"])
    with pytest.raises(ValueError, match="has train but nothing of that kind for test"):
        read_images(tmp_path, "test")
    pixels = folder_of_pictures(tmp_path, ["test/1.png", "test/2.png"])
    found = read_images(tmp_path, "test")
    assert np.array_equal(found.pixels, pixels) and found.labels is None


def test_grey_pictures_have_one_channel_unless_a_coloured_one_is_among_them(tmp_path):
    pytest.importorskip("PIL.Image")
    grey = random_pixels(4, 6)
    write_png(grey, tmp_path / "1.png")
    assert np.array_equal(read_images(tmp_path, "train").pixels, grey[None, None])
    folder_of_pictures(tmp_path, ["2.png"])
    found = read_images(tmp_path, "train").pixels
    assert np.array_equal(found[0], np.stack([grey] * 3)) and found.shape == (2, 3, 4, 6)


def test_a_picture_of_another_size_is_named_unless_a_size_is_asked_for(tmp_path):
    pytest.importorskip("PIL.Image")
    folder_of_pictures(tmp_path, ["1.png", "2.png"])
    folder_of_pictures(tmp_path, ["3.png"], size=(5, 6))
    with pytest.raises(ValueError, match=r"3.png has 6x5 pixels but 1.png has 6x4"):
        read_images(tmp_path, "train")
    assert read_images(tmp_path, "train", size=4).pixels.shape == (3, 3, 4, 4)


def test_a_size_cuts_from_the_middle(tmp_path):
    pytest.importorskip("PIL.Image")
    array = random_pixels(4, 8)
    write_png(array, tmp_path / "1.png")
    assert np.array_equal(read_images(tmp_path, "train", size=4).pixels[0, 0], array[:, 2:6])


def test_a_file_that_is_no_picture_is_named(tmp_path):
    pytest.importorskip("PIL.Image")
    folder_of_pictures(tmp_path, ["1.png"])
    (tmp_path / "2.png").write_bytes((tmp_path / "1.png").read_bytes()[:60])
    with pytest.raises(ValueError, match=r"2.png cannot be read as an image"):
        read_images(tmp_path, "train")


def test_without_pillow_pictures_say_which_extra_is_missing(tmp_path, monkeypatch):
    folder_of_pictures(tmp_path, ["1.png"])
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    with pytest.raises(ValueError, match=r"needs Pillow: pip install 'psidiff\[images\]'"):
        read_images(tmp_path, "train")


def cifar(count):
    return random_pixels(count, 3, 32, 32), np.arange(count) % 10


def batches(pixels, labels):
    """Five batches to train on and one to test on, of two images each."""
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    for i, name in enumerate(names):
        yield name, pixels[2 * i : 2 * i + 2].reshape(2, -1), labels[2 * i : 2 * i + 2]


def check_cifar(path, pixels, labels):
    train, test = read_images(path, "train"), read_images(path, "test")
    assert np.array_equal(train.pixels, pixels[:10])
    assert np.array_equal(test.pixels, pixels[10:])
    assert np.array_equal(np.concatenate((train.labels, test.labels)), labels)
    assert list(train.classes) == CLASSES


@pytest.mark.parametrize("inner", ["", "cifar-10-batches-bin"])
def test_the_binary_records_of_cifar10_are_read(inner, tmp_path):
    folder = tmp_path / inner
    folder.mkdir(exist_ok=True)
    pixels, labels = cifar(12)
    for name, data, label in batches(pixels, labels):
        records = np.concatenate((label[:, None].astype(np.uint8), data), 1)
        (folder / f"{name}.bin").write_bytes(records.tobytes())
    (folder / "batches.meta.txt").write_text("\n".join(CLASSES) + "\n\n")
    check_cifar(tmp_path, pixels, labels)
    (folder / "data_batch_3.bin").write_bytes(b"1234")
    with pytest.raises(ValueError, match=r"data_batch_3.bin .* 3073 bytes, got 4 bytes"):
        read_images(tmp_path, "train")
    (folder / "data_batch_3.bin").unlink()
    with pytest.raises(ValueError, match=r"lacks data_batch_3.bin"):
        read_images(tmp_path, "train")


def python2_string(text):
    return b"U" + bytes([len(text)]) + text


def python2_batch(data, labels):
    """A batch as Python 2 and its numpy wrote it: protocol 2, strings of bytes."""
    raw = data.tobytes()
    text = python2_string
    dtype = b"cnumpy\ndtype\n(" + text(b"u1") + b"K\x00K\x01tR("
    dtype += b"K\x03" + text(b"|") + b"NNN" + 2 * b"J\xff\xff\xff\xff" + b"K\x00tb"
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + text(b"b")
    array += b"\x87R(K\x01K\x02M\x00\x0c\x86" + dtype
    array += b"\x89T" + struct.pack("<I", len(raw)) + raw + b"tb"
    numbers = b"](" + b"".join(b"K" + bytes([i]) for i in labels) + b"e"
    return b"\x80\x02}(" + text(b"data") + array + text(b"labels") + numbers + b"u."


def python3_batch(data, labels):
    return pickle.dumps({b"data": data, b"labels": labels.tolist()}, protocol=2)


@pytest.mark.parametrize("written", [python2_batch, python3_batch])
def test_the_pickles_of_cifar10_are_read(written, tmp_path):
    pixels, labels = cifar(12)
    for name, data, label in batches(pixels, labels):
        content = written(data, label)
        (tmp_path / name).write_bytes(content)
        known = pickle.loads(content, encoding="bytes")
        assert np.array_equal(known[b"data"], data)
    meta = {b"label_names": [name.encode() for name in CLASSES]}
    (tmp_path / "batches.meta").write_bytes(pickle.dumps(meta, protocol=2))
    check_cifar(tmp_path, pixels, labels)


class Malice:
    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("call", [os.mkdir, eval])
def test_a_batch_whose_pickle_runs_code_is_refused_and_the_code_does_not_run(call, tmp_path):
    victim = tmp_path / "victim"
    argument = str(victim) if call is os.mkdir else f"__import__('os').mkdir({str(victim)!r})"
    bad = {b"data": Malice(call, argument), b"labels": [0]}
    (tmp_path / "test_batch").write_bytes(pickle.dumps(bad, protocol=2))
    with pytest.raises(
        ValueError, match=r"test_batch was not loaded: its pickle asks for .* refused"
    ):
        read_images(tmp_path, "test")
    assert not victim.exists()
    pickle.loads((tmp_path / "test_batch").read_bytes())  # the code would have run
    assert victim.exists()


@pytest.mark.parametrize("content", [b"", b"nonsense", pickle.dumps([1]), pickle.dumps({})])
def test_a_batch_that_is_none_is_refused_in_words(content, tmp_path):
    (tmp_path / "test_batch").write_bytes(content)
    with pytest.raises(ValueError, match=r"is damaged|was not loaded|must hold|does not hold"):
        read_images(tmp_path, "test")


def hostile_batches():
    """Pickles that change what lives, fill the memory, or print without an end."""
    slots = b"N}X\x0c\0\0\0__defaults__)s\x86b."
    codec = b"c_codecs\nencode\n"
    nest = b")q\x010" + b"h\x01h\x01\x86q\x010" * 60
    array = python3_batch(np.zeros((2, 3072), np.uint8), np.zeros(2, int))
    return {
        "slots of a function": b"\x80\x02" + codec + slots,
        "slots of an array": b"\x80\x02cnumpy\nndarray\n" + slots,
        "a memo index": b"\x80\x02}r\x00\x00\x00\x20.",
        "a codec that nests": b"\x80\x02" + codec + b"X\x01\0\0\0a" + nest + b"h\x01\x86R.",
        "more bytes than there are": array.replace(b"M\x00\x0c\x86", b"M\x00\x0d\x86", 1),
        "labels that are none": array.replace(b"K\x00K\x00e", b"K\x00]e", 1),
    }


@pytest.mark.parametrize("kind", hostile_batches())
def test_a_hostile_batch_is_refused_and_changes_nothing(kind, tmp_path):
    content = hostile_batches()[kind]
    (tmp_path / "test_batch").write_bytes(content)
    begun, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match=r"test_batch ") as found:
        read_images(tmp_path, "test")
    assert len(str(found.value)) < 500 and time.process_time() - begun < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # KiB
    (tmp_path / "test_batch").write_bytes(python3_batch(*cifar_batch()))
    assert len(read_images(tmp_path, "test").pixels) == 2


def cifar_batch():
    return random_pixels(2, 3, 32, 32).reshape(2, -1), np.array([3, 4])


def test_pictures_that_are_pipes_are_not_opened(tmp_path):
    os.mkfifo(tmp_path / "a.png")
    with pytest.raises(ValueError, match="no regular file"):
        read_images(tmp_path, "train")


def test_a_picture_of_too_many_pixels_is_refused_before_it_is_decoded(tmp_path, monkeypatch):
    write_png(np.zeros((200, 300), np.uint8), tmp_path / "a.png")
    monkeypatch.setenv("PSIDIFF_LIMITS", "pixels=50000")
    with pytest.raises(ValueError, match=r"a\.png has 60,000 pixels, and at most 50,000"):
        read_images(tmp_path, "train")


def test_pictures_that_unpack_to_far_more_than_their_files_are_refused(tmp_path):
    for i in range(2):
        write_png(np.zeros((6_000, 6_000), np.uint8), tmp_path / f"{i}.png")
    with pytest.raises(ValueError, match="times its size"):
        read_images(tmp_path, "train")


def npy_header(shape, kind="|u1"):
    held = io.BytesIO()
    about = {"descr": kind, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(held, about)
    return held.getvalue()


@pytest.mark.parametrize("kind", ["|u1", "|S0", "|O"])
def test_an_array_that_promises_more_than_its_file_has_is_damaged(tmp_path, kind):
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("images.npy", npy_header((10**12,), kind))
    with pytest.raises(ValueError, match=r"a\.npz is damaged: .*10\d*, *\)"):
        read_images(tmp_path / "a.npz", "train")


def test_an_npz_of_zeros_is_not_unpacked(tmp_path):
    zeros = np.zeros((400, 512, 512), np.uint8)
    np.savez_compressed(tmp_path / "a.npz", images=zeros)
    with pytest.raises(ValueError, match="times its size"):
        read_images(tmp_path / "a.npz", "train")


def test_idx_files_of_zeros_are_not_unpacked(tmp_path):
    packed = gzip.compress(struct.pack(">IIII", 2051, 120, 1024, 1024))
    packed += gzip.compress(bytes(2**20)) * 120
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(packed)
    with pytest.raises(ValueError, match="times its size"):
        read_images(tmp_path, "train")
    packed = gzip.compress(struct.pack(">IIII", 2051, *3 * [2**32 - 1]) + bytes(99))
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(packed)
    with pytest.raises(ValueError, match="says that it holds"):
        read_images(tmp_path, "train")


@pytest.mark.parametrize(
    "hostile",
    [
        {"y": np.array([0, 10**12])},
        {"y": np.array(["a", "b"])},
        {"y": np.array([0.0, np.nan])},
        {"y": np.array([0, 1]), "classes": np.array(3)},
    ],
)
def test_hostile_labels_are_refused_in_words(hostile, tmp_path):
    np.savez(tmp_path / "a.npz", x=random_pixels(2, 4, 4), **hostile)
    with pytest.raises(ValueError, match=r"a\.npz"):
        read_images(tmp_path / "a.npz", "train")


def test_jpegs_at_offsets_that_repeat_are_refused(tmp_path):
    for offset in (np.array([0, 9] * 5), np.array([0, 10**9]), np.array([0.5, 1.5])):
        np.savez(tmp_path / "a.npz", jpeg=np.zeros(20, np.uint8), offset=offset)
        with pytest.raises(ValueError, match="offsets"):
            read_images(tmp_path / "a.npz", "train")


def idx(array):
    return struct.pack(f">{1 + array.ndim}I", 2048 + array.ndim, *array.shape) + array.tobytes()


@pytest.mark.parametrize("compressed", [False, True])
def test_the_idx_files_of_mnist_are_read(compressed, tmp_path):
    pixels, labels = random_pixels(6, 5, 4), np.array([3, 1, 2, 0, 9, 1], np.uint8)
    for part, rows in (("train", slice(0, 4)), ("t10k", slice(4, 6))):
        for kind, array in (("images-idx3", pixels[rows]), ("labels-idx1", labels[rows])):
            content, name = idx(array), f"{part}-{kind}-ubyte"
            if compressed:
                content, name = gzip.compress(content), name + ".gz"
            (tmp_path / name).write_bytes(content)
    train, test = read_images(tmp_path, "train"), read_images(tmp_path, "test")
    assert np.array_equal(train.pixels[:, 0], pixels[:4]) and train.labels.tolist() == [
        3,
        1,
        2,
        0,
    ]
    assert np.array_equal(test.pixels[:, 0], pixels[4:]) and test.labels.tolist() == [9, 1]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (idx(np.zeros(3, np.uint8)), "magic number 2051"),
        (b"", "magic number 2051"),
        (idx(np.zeros((2, 3, 3), np.uint8))[:-1], "must hold 18 bytes, got 17"),
        (idx(np.zeros((2, 3, 3), np.uint8)), "lacks train-labels-idx1-ubyte"),
    ],
)
def test_a_wrong_idx_file_is_refused_in_words(content, words, tmp_path):
    (tmp_path / "train-images-idx3-ubyte").write_bytes(content)
    with pytest.raises(ValueError, match=words):
        read_images(tmp_path, "train")


def test_a_place_without_images_is_told_what_is_accepted(tmp_path):
    (tmp_path / "notes.txt").write_text("")
    for place in (tmp_path, tmp_path / "notes.txt"):
        with pytest.raises(
            ValueError, match=r"no images were recognised .* \.npz .* PNG .* idx"
        ):
            read_images(place, "train")
    with pytest.raises(ValueError, match="no file or folder"):
        read_images(tmp_path / "absent", "train")
    (tmp_path / "a.npz").write_bytes(b"PK\x03\x04 and no more")
    with pytest.raises(ValueError, match=r"a\.npz is damaged"):
        read_images(tmp_path / "a.npz", "train")
    np.savez(tmp_path / "b.npz", other=np.zeros(3))
    with pytest.raises(ValueError, match="pixels, images, x or arr_0; it holds other"):
        read_images(tmp_path / "b.npz", "train")


def test_labels_must_fit_images_and_classes(tmp_path):
    np.savez(tmp_path / "a.npz", x=random_pixels(2, 4, 4), y=np.arange(3))
    with pytest.raises(ValueError, match="a label >= 0 for each of its 2 images"):
        read_images(tmp_path / "a.npz", "train")
    np.savez(
        tmp_path / "b.npz", x=random_pixels(2, 4, 4), y=np.array([0, 2]), classes=["a", "b"]
    )
    with pytest.raises(ValueError, match="names 2 classes but has the label 2"):
        read_images(tmp_path / "b.npz", "train")
