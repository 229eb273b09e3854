"""Bad input: two hundred requests that nobody should send, each answered in OpenAI's shape."""

import json
import socket

import pytest
from serving import serving, tiny, tiny_images, tiny_puzzle

httpx = pytest.importorskip("httpx")
pytest.importorskip("uvicorn", reason="the extra serve is not installed")

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
JSON = {"content-type": "application/json"}
TYPES = (None, True, -1, 1.5, 10**30, "x", "", [], {}, [[]], [None], {"a": []})
FIELDS = {  # of each field the values above that are right
    "model": (),
    "prompt": (None, "", [[]]),
    "suffix": (None, ""),
    "max_tokens": (None,),
    "temperature": (None, 1.5),
    "top_p": (None,),
    "n": (None,),
    "seed": (None, -1),
    "stop": (None, "x", []),
    "stream_options": (None, {}),
    "logit_bias": (None, {}),
    "diffusion_steps": (None,),
    "diffusion_kappa": (None, ""),
    "diffusion_predictor": (None,),
    "diffusion_label": (None,),
    "diffusion_guidance": (None,),
    "diffusion_pinned": (None, {}, [], [None]),
    "diffusion_infill": (None,),
    "diffusion_deadline": (None, 1.5, 10**30),
    "diffusion_canvas_length": (None, 10**30),
}
VALUES = [
    {"model": "gpt-4"},
    {"model": "../../etc/passwd"},
    {"max_tokens": 10**9},
    {"max_tokens": 0},
    {"prompt": "a" * 5000},
    {"prompt": [0] * 5000},
    {"prompt": [0, -1]},
    {"prompt": [0, 10**6]},
    {"prompt": ["a"] * 100},
    {"prompt": ["a", 1]},
    {"prompt": "é"},
    {"prompt": "a\u0000"},
    {"n": 10**9},
    {"seed": 2**63},
    {"temperature": -0.1},
    {"temperature": 2.1},
    {"top_p": 0},
    {"stop": ["a", "b", "c", "d", "e"]},
    {"stop": [""]},
    {"logprobs": 5},
    {"best_of": 3},
    {"presence_penalty": 1},
    {"frequency_penalty": -2.0},
    {"logit_bias": {"x": 1}},
    {"logit_bias": {"-1": 1}},
    {"logit_bias": {"99999": 1}},
    {"logit_bias": {"9" * 5000: 1}},
    {"logit_bias": {"0": 101}},
    {"logit_bias": {str(i): 1 for i in range(2000)}},
    {"diffusion_steps": -5},
    {"diffusion_steps": 10**9},
    {"diffusion_steps": 3, "num_denoising_steps": 3},
    {"diffusion_kappa": "cap:1e999"},
    {"diffusion_kappa": "cap:-1"},
    {"diffusion_kappa": "constant:.5@.9-.1"},
    {"diffusion_kappa": "a" * 100_000},
    {"diffusion_kappa": "confidence:1e308"},
    {"diffusion_preset": "best"},
    {"diffusion_sampler": ""},
    {"diffusion_sampler": "cap:.1 steps=99999999999999"},
    {"diffusion_sampler": "cap:.1 head=dense"},
    {"diffusion_sampler": "cap:.1 corrector=999999999x1"},
    {"diffusion_sampler": "cap:.1 preset=best"},
    {"diffusion_sampler": "cap:.1 temperature=1e-999"},
    {"diffusion_sampler": "a" * 100_000},
    {"diffusion_sampler": "left-to-right"},
    {"diffusion_grid": "0,1"},
    {"diffusion_grid": "1,1e999"},
    {"diffusion_grid": "alpha", "diffusion_kappa": "loop:.1"},
    {"diffusion_grid": "1,.5", "diffusion_steps": 7},
    {"diffusion_predictor": "confident:threshold=1e999"},
    {"diffusion_corrector": "999999999x1"},
    {"diffusion_corrector": f"1x{'9' * 30}"},
    {"diffusion_corrector": f"1x{'9' * 5000}"},
    {"diffusion_last": "maybe"},
    {"diffusion_top_k": 0},
    {"diffusion_min_p": 2},
    {"diffusion_nucleus": "half"},
    {"diffusion_label": "7" * 40},
    {"diffusion_label": 10**12},
    {"diffusion_label": "cat"},
    {"diffusion_label": "cat" * 1000},
    {"diffusion_guidance": "2" * 1000, "diffusion_label": 0},
    {"diffusion_guidance": "1e999"},
    {"diffusion_guidance": 2, "diffusion_label": 0},
    {"diffusion_guidance_on": "x"},
    {"diffusion_infill": "{{1000000000}}"},
    {"diffusion_infill": f"{{{{{'9' * 5000}}}}}"},
    {"diffusion_infill": "{{-3}}"},
    {"diffusion_infill": "no blank"},
    {"diffusion_infill": "{{" * 1000},
    {"diffusion_infill": "a{{3}}", "prompt": "b"},
    {"diffusion_infill": "a{{3}}", "max_tokens": 3},
    {"diffusion_pinned": {"0": 0}, "max_tokens": 1},
    {"diffusion_pinned": {"7": 0}, "max_tokens": 3},
    {"diffusion_pinned": {"0": -7}},
    {"diffusion_pinned": [0] * 5000},
    {"diffusion_pinned": {"²": 0}},
    {"diffusion_deadline": 0},
    {"diffusion_canvas_length": 4, "diffusion_overlap": 9, "max_tokens": 12},
    {"stream_options": {"include_usage": "yes"}},
    {"stream_options": {"x": 1}},
    {"__class__": "x"},
    {"dffusion_steps": 3},
    {"tools": [{"type": "function"}]},
]
BODIES = [
    b"",
    b"null",
    b"[]",
    b"3",
    b'"text"',
    b"{",
    b"{}",
    b'{"model": "tiny",}',
    b"{'model': 'tiny'}",
    b'{"model": "tiny"} {}',
    b"\xff\xfe{}",
    b'{"model": "tiny", "prompt": "\xff"}',
    b'{"model": "tiny", "prompt": "\xc3"}',
    b'{"model": "tiny", "prompt": "\\ud800"}',
    b'{"\\ud800": 1}',
    b'{"model": "tiny", "temperature": NaN}',
    b'{"model": "tiny", "temperature": Infinity}',
    b'{"model": "tiny", "temperature": 1e999}',
    b'{"model": "tiny", "top_p": -1e999}',
    b'{"model": "tiny", "n": ' + b"9" * 5000 + b"}",
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b'{"model": "tiny", "prompt": ' + b"[" * 2000 + b"]" * 2000 + b"}",
    b'{"model": "tiny", "prompt": "' + b"a" * 2**20 + b'"}',
    b" " * (2**20 + 1),
    b"\x00" * 100,
    b"model=tiny&prompt=a",
    b"<xml/>",
]
CHATS = [
    {},
    {"messages": []},
    {"messages": "hello"},
    {"messages": [{}]},
    {"messages": [{"role": "user"}]},
    {"messages": [{"role": "king", "content": "a"}]},
    {"messages": [{"role": "user", "content": None}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
    {"messages": [{"role": "user", "content": "a", "x": 1}]},
    {"messages": [{"role": "user", "content": "a"}]},  # this model has no template
    {"messages": [{"role": "user", "content": "a"}] * 20_000},
    {"messages": [{"role": "user", "content": "a"}], "tools": [{}]},
    {"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "json"}},
]


def same(value, allowed):
    return any(type(value) is type(each) and value == each for each in allowed)


def requests():
    """Method, path, body and headers of each."""
    for field, right in FIELDS.items():
        wrong = [value for value in TYPES if not same(value, right)]
        for value in wrong[:: 2 if field not in ("prompt", "seed") else 1]:
            body = {"model": "tiny", "diffusion_steps": 2, field: value}
            yield "POST", COMPLETIONS, json.dumps(body).encode(), JSON
    for i, fields in enumerate(VALUES):
        body = {"model": "tiny", "stream": bool(i % 2), **fields}
        yield "POST", COMPLETIONS, json.dumps(body).encode(), JSON
    for raw in BODIES:
        yield "POST", COMPLETIONS, raw, JSON
    for fields in CHATS:
        yield "POST", CHAT, json.dumps({"model": "tiny", **fields}).encode(), JSON
    good = json.dumps({"model": "tiny"}).encode()
    for kind in ("text/plain", "application/x-www-form-urlencoded", "", "multipart/form-data"):
        yield "POST", COMPLETIONS, good, {"content-type": kind}
    for method in ("GET", "PUT", "DELETE", "PATCH", "OPTIONS"):
        yield method, COMPLETIONS, b"", {}
    for path in ("/v1", "/v1/complete", "/v1/models/gpt", "/v2/x", "/%00", "/redoc", "/.env"):
        yield "GET", path, b"", {}
    yield "POST", "/v1/models", good, JSON
    yield "POST", "/v1/embeddings", good, JSON


def check(answer, asked):
    """4xx, and OpenAI's shape, and nothing of our inside."""
    assert 400 <= answer.status_code < 500, (asked[1:3], answer.status_code, answer.text[:300])
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}, asked
    assert isinstance(error["message"], str) and 0 < len(error["message"]) < 600, asked
    assert isinstance(error["type"], str) and "Traceback" not in answer.text


def test_two_hundred_hostile_requests_are_answered_4xx_and_the_server_is_well(caplog):
    with serving(tiny(), length=64, steps=64, most_steps=64, samples=4) as (address, app):
        count = 0
        with httpx.Client(base_url=address, timeout=60) as client:
            for asked in requests():
                method, path, body, headers = asked
                made = client.request(method, path, content=body, headers=headers)
                check(made, asked)
                count += 1
            assert count >= 200
            assert client.get("/health").json()["status"] == "ok"
            body = {"model": "tiny", "prompt": "ab", "max_tokens": 4, "diffusion_steps": 3}
            assert client.post(COMPLETIONS, json=body).status_code == 200
        engine = app.state.engine
        assert engine.running == engine.waiting == 0
        assert not [record for record in caplog.records if record.exc_info]


def test_bodies_without_end_and_bodies_that_lie_are_cut_off():
    with serving(tiny()) as (address, _):
        host, port = address.removeprefix("http://").split(":")
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
        with socket.create_connection((host, int(port)), timeout=30) as link:
            link.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
            chunk = b"10000\r\n" + b"a" * 0x10000 + b"\r\n"
            for _ in range(17):
                link.sendall(chunk)
            assert b"413" in link.recv(4096).split(b"\r\n")[0]
        with socket.create_connection((host, int(port)), timeout=30) as link:
            link.sendall(f"{head}Content-Length: 100000000000\r\n\r\n".encode())
            assert b"413" in link.recv(4096).split(b"\r\n")[0]
        with socket.create_connection((host, int(port)), timeout=30) as link:
            link.sendall(f"{head}Content-Length: 10\r\n\r\n{{".encode())  # and hangs up
        assert httpx.get(f"{address}/health").status_code == 200


@pytest.mark.parametrize(
    "model, wrong",
    [
        (
            tiny_images(),
            [
                {"prompt": "a cat"},
                {"suffix": "a"},
                {"max_tokens": 5},
                {"diffusion_label": 7},
                {"diffusion_label": "seven"},
                {"diffusion_guidance": 1e308, "diffusion_label": 0},
                {"diffusion_infill": "a{{3}}"},
                {"diffusion_pinned": {"16": 0}},
                {"echo": True},
            ],
        ),
        (
            tiny_puzzle(),
            [
                {"prompt": "11" + "." * 79},
                {"prompt": "12"},
                {"prompt": "x" * 81},
                {"prompt": ["1" + "." * 80, "2"]},
                {"prompt": [1, 2]},
                {"prompt": "123456789" * 9},
                {"suffix": "1"},
                {"diffusion_infill": "1"},
                {"diffusion_label": 1},
                {"diffusion_pinned": {"0": 9}},
            ],
        ),
    ],
    ids=("images", "puzzles"),
)
def test_other_kinds_of_models_refuse_what_is_not_theirs(model, wrong):
    name = model.config.name
    with serving(model, steps=3) as (address, _):
        for fields in wrong:
            body = {"model": name, **fields}
            made = httpx.post(f"{address}{COMPLETIONS}", json=body, timeout=60)
            check(made, ("POST", COMPLETIONS, body))
        made = httpx.post(f"{address}{COMPLETIONS}", json={"model": name}, timeout=60)
        assert made.status_code == 200
