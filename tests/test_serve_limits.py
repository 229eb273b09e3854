"""Limits: what one request, one client or one body may ask for, and what is said beyond it."""

import json
import logging
import socket
import threading
import time

import pytest
from serving import LETTERS, serving, slow, tiny

from psidiff.data.characters import Characters

httpx = pytest.importorskip("httpx")
pytest.importorskip("uvicorn", reason="the extra serve is not installed")

from psidiff.serve import chat_template  # noqa: E402
from psidiff.serve.app import InFlight  # noqa: E402
from psidiff.serve.body_reader import read_body  # noqa: E402
from psidiff.serve.config import Settings  # noqa: E402
from psidiff.serve.errors import ApiError  # noqa: E402
from psidiff.serve.metrics import Metrics  # noqa: E402
from psidiff.serve.request_parsing import parse_request  # noqa: E402  # they need the extra
from psidiff.serve.schemas import ChatBody, CompletionBody  # noqa: E402

PATH = "/v1/completions"
JSON = {"content-type": "application/json"}
FREEZES = {  # of the server as it was: 262 billion, for which it made the plans at the start
    "model": "tiny",
    "max_tokens": 4000,
    "diffusion_steps": 4096,
    "diffusion_canvas_length": 2,
    "diffusion_overlap": 1,
    "diffusion_drafts": True,
    "stream": True,
    "n": 4,
}


def refused(body, model=None, **settings):
    with pytest.raises(ApiError) as caught:
        parse_request(model or tiny(), CompletionBody(**body), Settings("tiny", **settings))
    assert caught.value.status == 400
    return caught.value.message


# --- work ---


def test_work_is_bounded_and_the_answer_names_the_limit_and_its_option():
    said = refused(FREEZES, windows=10_000)
    assert "300,000,000" in said and "--max-work" in said
    assert "4,097 x 3,999 x 4 x 64" in said
    said = refused(FREEZES)
    assert "512 windows" in said and "--max-windows" in said and "got 3999" in said
    for field, option in (
        ({"n": 17}, "--max-samples"),
        ({"diffusion_steps": 5000}, "--max-steps"),
        ({"max_tokens": 5000}, "--max-length"),
        ({"prompt": ["a"] * 17}, "--max-samples"),
    ):
        assert option in refused({"model": "tiny", **field})


def test_work_counts_the_passes_of_a_step():
    body = {"model": "tiny", "max_tokens": 64, "diffusion_steps": 99}
    for more, passes in (({"diffusion_corrector": "7x2"}, 8), ({"diffusion_guidance": 2.0}, 2)):
        said = refused(body | more, work=32_000 * passes - 1)
        assert f"passes of a step (--max-work), got 100 x 5 x 1 x 64 x {passes} = " in said


def test_the_work_of_the_defaults_is_allowed():
    model, settings = tiny(length=128), Settings("tiny")
    body = CompletionBody(model="tiny", max_tokens=4096, n=16)
    assert len(parse_request(model, body, settings)) == 1
    model = tiny(length=4096)
    body = CompletionBody(model="tiny", max_tokens=4096, n=16, diffusion_steps=4096)
    assert len(parse_request(model, body, settings)) == 1


def test_the_body_that_froze_the_server_is_refused_while_others_are_answered():
    with serving(tiny()) as (address, _), httpx.Client(base_url=address, timeout=30) as client:
        begun = time.monotonic()
        assert client.post(PATH, json=FREEZES).status_code == 400
        assert client.get("/health").json()["status"] == "ok"
        assert time.monotonic() - begun < 5  # of 75 seconds


def test_a_plan_is_sent_once_however_many_samples_and_windows_walk_it():
    with serving(tiny(length=8)) as (address, _):
        body = {"model": "tiny", "max_tokens": 400, "diffusion_steps": 50, "n": 4}
        body |= {"stream": True, "diffusion_drafts": True}
        with httpx.stream("POST", address + PATH, json=body, timeout=30) as answer:
            line = next(line for line in answer.iter_lines() if line.startswith("data:"))
        start = json.loads(line.removeprefix("data:"))["diffusion"]
        assert len(start["plan"]) == 51 and len(start["samples"]) == 4
        assert all(each["windows"] == 99 for each in start["samples"])
        assert len(line) < 20_000  # steps x windows x samples are 20,000


# --- bodies ---


class Untouched(Characters):
    """A tokenizer that must not be asked."""

    def encode(self, text):
        raise AssertionError("it was tokenized")


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"diffusion_infill": "{{4096}}" * 3}, "blanks may have 4096 tokens in all"),
        ({"diffusion_infill": "{{00000000004096}}" * 3}, "blanks may have 4096 tokens in all"),
        ({"diffusion_infill": "{{4096}}" * 100_000}, "65536 characters"),
        ({"prompt": "ab " * 300_000}, "65536 characters"),
        ({"prompt": "ab", "suffix": "c" * 70_000}, "65536 characters"),
        ({"prompt": [0] * 5000}, "4096 tokens"),
        ({"prompt": ["a" * 40_000] * 20}, "16 samples in all"),
        ({"stop": "a" * 600}, "512 characters"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_sums_are_bounded_before_anything_is_tokenized(fields, words):
    model = tiny(Untouched(LETTERS.alphabet))
    if fields.get("suffix") or fields.get("stop"):
        model = tiny()
    assert words in refused({"model": "tiny", **fields}, model)


MISTAKES = [
    (CompletionBody, b'{"model": "tiny", "prompt": [' + b"null," * 180_000 + b"null]}"),
    (CompletionBody, b'{"model": "tiny", "prompt": [' + b"[]," * 300_000 + b"[]]}"),
    (CompletionBody, b'{"model": "tiny", "prompt": [' + b"null," * 100_000 + b"null]}"),
    (CompletionBody, b'{"model": "tiny", "prompt": [' + b"[null]," * 60_000 + b"null]}"),
    (CompletionBody, b"{" + b",".join(b'"a%d": 1' % i for i in range(80_000)) + b"}"),
    (CompletionBody, b"{" + b",".join(b'"a%d": 1' % i for i in range(4000)) + b"}"),
    (CompletionBody, b'{"model": "tiny", "stop": {"a": "' + b"x" * 10**6 + b'"}}'),
    (CompletionBody, b'{"model": "tiny", "' + b"steps" * 200_000 + b'": 1}'),
    (
        CompletionBody,
        b'{"model": "tiny", "logit_bias": {'
        + b",".join(b'"%d": "x"' % i for i in range(60_000))
        + b"}}",
    ),
    (ChatBody, b'{"model": "tiny", "messages": [' + b'{"a": 1},' * 60_000 + b"3]}"),
]


@pytest.mark.parametrize("kind, raw", MISTAKES, ids=lambda value: str(value)[:50])
def test_a_megabyte_of_mistakes_is_one_short_sentence_at_once(kind, raw):
    begun = time.process_time()
    with pytest.raises(ApiError) as caught:
        read_body(kind, raw, Settings("tiny"))
    assert len(caught.value.message) <= 500
    assert time.process_time() - begun < 2.0  # a tenth of it, on a quiet machine


@pytest.mark.parametrize("name", ["[", "x\x1b[31m\n", "]", "a[b]", ""])
def test_a_field_with_any_name_is_one_mistake_of_the_client(name):
    raw = json.dumps({"model": "tiny", name: 1}).encode()
    with pytest.raises(ApiError, match="there is no field") as caught:
        read_body(CompletionBody, raw, Settings("tiny"))
    assert caught.value.status == 400 and "\x1b" not in caught.value.message


def test_a_wrong_value_inside_of_an_object_is_named_by_its_own_field():
    raw = json.dumps({"model": "tiny", "logit_bias": {"seed": "3"}}).encode()
    with pytest.raises(ApiError, match="logit_bias must be an object from token ids"):
        read_body(CompletionBody, raw, Settings("tiny"))


def test_what_looks_like_values_inside_of_strings_does_not_count():
    text = '[{,"\\' * 10_000
    raw = json.dumps({"model": "tiny", "prompt": text}).encode()
    assert read_body(CompletionBody, raw, Settings("tiny")).prompt == text
    begun = time.process_time()
    for tail in (b'"', b"\\", b'\\"', b"[", b""):  # a string without an end, and what is in it
        with pytest.raises(ApiError):
            read_body(CompletionBody, b'{"a": "' + b'\\"[' * 300_000 + tail, Settings("tiny"))
    assert time.process_time() - begun < 2.0


def test_bytes_of_all_bodies_together_are_bounded_and_given_back():
    flight = InFlight(100)
    with flight.bytes() as more:
        more(60)
        with flight.bytes() as another, pytest.raises(ApiError, match="--max-in-flight") as got:
            another(30)
            another(30)
        assert got.value.status == 429 and flight.held == 60
    assert flight.held == 0
    with serving(tiny(), body=1000, in_flight=1500) as (address, _):
        links = [opened(address, 900, b"x" * 800) for _ in range(2)]
        raw = links[1].recv(4096) + links[1].recv(4096)
        assert b" 429 " in raw and b"--max-in-flight" in raw
        for link in links:
            link.close()
        ask = {"model": "tiny", "max_tokens": 3, "diffusion_steps": 2}
        until(lambda: httpx.post(address + PATH, json=ask).status_code == 200)


# --- clients ---


def opened(address, length=None, body=b"", more=""):
    """A connection on which a request has begun."""
    host, port = address.removeprefix("http://").split(":")
    link = socket.create_connection((host, int(port)), timeout=20)
    head = f"POST {PATH} HTTP/1.1\r\nHost: {host}\r\n{more}"
    if length is not None:
        head += f"Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
    link.sendall(head.encode() + body)
    return link


def until(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def is_closed(link):
    """Whether the server closes it, perhaps after some words."""
    try:
        while link.recv(4096):
            pass
    except ConnectionError:
        pass
    return True


def test_a_client_that_drops_in_the_middle_of_a_body_is_no_error_of_ours(caplog):
    with caplog.at_level(logging.INFO), serving(tiny()) as (address, app):
        for _ in range(3):
            opened(address, 100, b'{"model"').close()
        dropped = {"path": PATH, "status": "499"}
        until(lambda: app.state.metrics.value("requests_total", **dropped) == 3)
        assert httpx.get(f"{address}/health").status_code == 200
    lines = [r for r in caplog.records if r.name.startswith(("uvicorn", "psidiff"))]
    assert not [r for r in lines if r.levelno >= logging.WARNING or r.exc_info]


def test_headers_that_never_end_and_bodies_that_stall_are_closed():
    with serving(tiny(), stall=0.5) as (address, _):
        silent = socket.create_connection(address.removeprefix("http://").split(":"), 20)
        half, body = opened(address), opened(address, 100, b"{")
        trickle, over = opened(address), threading.Event()

        def drip():
            while not over.wait(0.1):
                try:
                    trickle.sendall(b"X: y\r\n")
                except OSError:
                    return

        threading.Thread(target=drip, daemon=True).start()
        assert b" 408 " in body.recv(4096)
        assert is_closed(silent) and is_closed(half) and is_closed(trickle)
        over.set()
        assert httpx.get(f"{address}/health").status_code == 200


def test_connections_are_bounded_and_places_come_back():
    with serving(tiny(), connections=3, stall=5.0) as (address, _):
        links = [opened(address) for _ in range(3)]
        time.sleep(0.1)
        fourth = socket.create_connection(address.removeprefix("http://").split(":"), 20)
        assert b" 429 " in (said := fourth.recv(4096)) and b"--max-connections" in said
        for link in (*links, fourth):
            link.close()

        def well():
            try:
                return httpx.get(f"{address}/health").status_code == 200
            except httpx.TransportError:
                return False

        until(well)


def test_a_body_in_tiny_chunks_is_cut_off_at_once():
    """Each chunk costs as much as a long one: a connection that sends nothing else is work."""
    with serving(tiny(), api_key="sesame") as (address, _):
        for path in (PATH, "/health"):  # which takes no bodies
            host, port = address.removeprefix("http://").split(":")
            link = socket.create_connection((host, int(port)), timeout=20)
            head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nTransfer-Encoding: chunked\r\n\r\n"
            link.sendall(head.encode())
            with pytest.raises(OSError):
                for _ in range(10_000):
                    link.sendall(b"1\r\n \r\n" * 1000)
            link.close()


def test_a_body_that_is_answered_already_is_not_read_for_ever():
    with serving(tiny(), body=1000) as (address, _):
        link = opened(address, 5000, b"x" * 100)
        assert b" 413 " in link.recv(4096)
        begun = time.monotonic()
        assert is_closed(link) and time.monotonic() - begun < 10  # of the 30 that may stall


def test_what_waits_for_a_slow_reader_is_bounded_in_bytes():
    import asyncio

    import torch

    from psidiff.sampling import Step
    from psidiff.serve.responses import EventQueue
    from psidiff.serve.samples import Update

    def frame(number, length):
        tokens, route = torch.zeros(length, dtype=torch.int32), torch.zeros(length)
        return Update(number, Step(0.5, 0.5, 0.6), tokens, route.to(torch.int8), 0)

    async def fill(length):
        outbox = EventQueue()
        for number in range(1000):
            outbox._put(number % 3, frame(number, length))
        outbox._put(0, ApiError(400, "the end"))
        found = []
        while not found or not isinstance(found[-1], ApiError):
            found.append((await outbox.get())[1])
        return [each.number for each in found[:-1]]

    short, long = asyncio.run(fill(16)), asyncio.run(fill(4096))
    assert len(long) * 4096 * 5 <= 2**20 and len(short) > 400
    assert short == list(range(1000 - len(short), 1000))  # the newest
    assert long == list(range(1000 - len(long), 1000))


def test_a_reader_that_does_not_read_is_cut_off():
    with serving(tiny(), stall=0.5, send_buffer=4096) as (address, app):
        body = {"model": "tiny", "max_tokens": 500, "diffusion_steps": 4000}
        body |= {"stream": True, "diffusion_drafts": True}
        raw = json.dumps(body).encode()
        link = opened(address, len(raw), raw)
        until(lambda: app.state.engine.running == 1)
        until(lambda: app.state.engine.running == 0)
        assert app.state.metrics.value("samples_total", how="cancelled") == 1
        link.close()


def test_a_slow_reader_of_a_long_answer_is_not():
    model = slow(0.05)
    with serving(model, stall=0.5) as (address, _):
        body = {"model": "tiny", "max_tokens": 4, "diffusion_steps": 30, "stream": True}
        with httpx.stream("POST", address + PATH, json=body, timeout=30) as answer:
            assert answer.read().endswith(b"[DONE]\n\n")  # 1.5 seconds for a few bytes


# --- names and keys ---


def test_large_counts_keep_all_their_digits():
    metrics = Metrics()
    metrics.count("tokens_total", 123_456_789)
    assert "psidiff_tokens_total 123456789\n" in metrics.text()


def test_without_a_key_only_names_of_this_machine_are_answered():
    from psidiff.serve.hosts import names_of

    assert names_of("127.0.0.1", "key", ()) is None and names_of("0.0.0.0", None, ()) is None
    assert names_of("127.1", None, (), "127.0.0.1") == {"localhost", "127.1"}
    names = names_of("127.0.0.1", None, ("Box.lan",))
    with serving(tiny(), names) as (address, _):
        port = address.rpartition(":")[2]
        for host, status in (
            ("evil.example", 403),
            (f"evil.example:{port}", 403),
            ("localhost.evil.example", 403),
            ("127.0.0.1.evil.example", 403),
            ("", 403),
            (f"localhost:{port}", 200),
            ("LOCALHOST.", 200),
            (f"127.0.0.1:{port}", 200),
            (f"[::1]:{port}", 200),
            (f"box.lan:{port}", 200),
        ):
            for path in ("/", "/health", "/v1/models"):
                answer = httpx.get(address + path, headers={"host": host})
                assert answer.status_code == status, host
        answer = httpx.post(address + PATH, json={"model": "tiny"}, headers={"host": "a.b"})
        error = answer.json()["error"]
        assert answer.status_code == 403 and "--allow-host" in error["message"]
        assert error["code"] == "host_not_allowed"


def test_health_and_metrics_may_be_behind_the_key():
    private = {"private_health": True, "private_metrics": True}
    with serving(tiny(), api_key="sesame", **private) as (address, _):
        for path in ("/health", "/metrics"):
            assert httpx.get(address + path).status_code == 401
            key = {"authorization": "Bearer sesame"}
            assert httpx.get(address + path, headers=key).status_code == 200
    with pytest.raises(ValueError, match="--private-health asks for a key"):
        Settings(private_health=True)
    with pytest.raises(ValueError, match="stall must be above 0"):
        Settings(stall=0.0)
    with pytest.raises(ValueError, match="--max-in-flight"):
        Settings(in_flight=5)


# --- templates ---


HOSTILE_TEMPLATES = {
    "loops": "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "product": "{{ 'a' * 10000000000 }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "codec": "{{ 'é'.encode('ascii') }}",
    "classes": "{{ messages.__class__.__mro__ }}",
}


@pytest.mark.parametrize("name", HOSTILE_TEMPLATES)
def test_a_template_of_a_stranger_costs_little_and_is_a_mistake_in_a_sentence(
    name, monkeypatch
):
    monkeypatch.setattr(chat_template, "_LINES", 50_000)  # tests look at each call's types
    model, begun = tiny(chat_template=HOSTILE_TEMPLATES[name]), time.monotonic()
    with pytest.raises(ApiError, match="the chat template refuses this") as caught:
        chat_template.apply_chat_template(model, [{"role": "user", "content": "a"}])
    assert caught.value.status == 400 and time.monotonic() - begun < 5
    usual = "{% for m in messages %}{{ m.content * 2 }}{{ '-' * 3 }}{% endfor %}"
    model = tiny(chat_template=usual)
    assert (
        chat_template.apply_chat_template(model, [{"role": "user", "content": "ab"}] * 2)
        == "abab---abab---"
    )
