"""Encoding: a stream of documents as a stream of tokens, by one process or several."""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import chain, islice
from multiprocessing import get_context
from typing import Any, NamedTuple

import numpy as np

from ..registry import import_file, imported_files
from .codec import Codec, codec_from
from .detokenizers import DETOKENIZERS

CHUNK = 2**20  # characters that are encoded at once
SMALL = 8  # groups of chunks that are not worth the start of other processes
_CUT = re.compile(r"(?<=[A-Za-z]\n)(?=[A-Za-z])")  # no token of GPT-2, BERT or text8 crosses it

Encoded = tuple[np.ndarray, np.ndarray]  # tokens; where documents end among them


def tokenize_documents(
    texts: Iterable[str], codec: Codec, detokenizer: str | None, workers: int
) -> Iterator[Encoded]:
    """The documents in order, many at a time; the same whatever the number of `workers`."""
    jobs = _jobs(texts, detokenizer)
    head = list(islice(jobs, SMALL))
    jobs = chain(head, jobs)
    if workers == 1 or len(head) < SMALL:
        return (_encode(codec, detokenizer, job) for job in jobs)
    return _in_processes(jobs, codec, detokenizer, workers)


def dtype_of(codec: Codec) -> np.dtype:
    """The smallest that holds every id."""
    return np.min_scalar_type(codec.vocab_size - 1)


class TextChunk(NamedTuple):
    """A document, or a part of a long one, which is detokenized before it is cut."""

    text: str
    raw: bool = True
    last: bool = True


def _jobs(texts: Iterable[str], detokenizer: str | None) -> Iterator[list[TextChunk]]:
    """Chunks in groups of about CHUNK characters."""
    job: list[TextChunk] = []
    size = 0
    for text in texts:
        for chunk in _chunks(text, detokenizer):
            job.append(chunk)
            size += len(chunk.text)
            if size >= CHUNK:
                yield job
                job, size = [], 0
    if job:
        yield job


def _chunks(text: str, detokenizer: str | None) -> Iterator[TextChunk]:
    """The document itself, or lines of it that make up about CHUNK characters."""
    if len(text) <= CHUNK:
        yield TextChunk(text)
        return
    text = _detokenized(text, detokenizer)
    start = 0
    while (cut := _CUT.search(text, start + CHUNK)) is not None:
        yield TextChunk(text[start : cut.start()], raw=False, last=False)
        start = cut.start()
    yield TextChunk(text[start:], raw=False)


def _detokenized(text: str, detokenizer: str | None) -> str:
    return text if detokenizer is None else DETOKENIZERS[detokenizer](text)


def _encode(codec: Codec, detokenizer: str | None, job: list[TextChunk]) -> Encoded:
    texts = [_detokenized(p.text, detokenizer) if p.raw else p.text for p in job]
    found = codec.encode_all(texts)
    ends = np.cumsum([len(ids) for ids in found], dtype=np.int64)
    return np.concatenate(found).astype(dtype_of(codec)), ends[[chunk.last for chunk in job]]


def _in_processes(
    jobs: Iterator[list[TextChunk]], codec: Codec, detokenizer: str | None, workers: int
) -> Iterator[Encoded]:
    """A few jobs wait for each process, no more: corpora are larger than memory."""
    start = (codec.describe(), imported_files(), detokenizer)
    waiting: deque[Any] = deque()
    try:
        with ProcessPoolExecutor(workers, get_context("spawn"), _start_worker, start) as pool:
            for job in jobs:
                waiting.append(pool.submit(_work, job))
                if len(waiting) > 2 * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise ValueError(
            "a process that tokenizes has died: scripts need `if __name__ == '__main__':` "
            "around what they do, or workers=1"
        ) from error


_worker: dict[str, Any] = {}  # of a process started by _in_processes


def _start_worker(
    described: dict[str, Any], files: Sequence[str], detokenizer: str | None
) -> None:
    """The codec may be in a file that was imported where the work comes from."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    for file in files:
        import_file(file)
    _worker.update(codec=codec_from(described), detokenizer=detokenizer)


def _work(job: list[TextChunk]) -> Encoded:
    return _encode(_worker["codec"], _worker["detokenizer"], job)
