"""What clients of OpenAI's API take for granted, and a strict reading of a body would break."""

import html
import json
import re

import pytest
import torch
from serving import serving, tiny

openai = pytest.importorskip("openai", reason="the official client is not installed")
httpx = pytest.importorskip("httpx")
pytest.importorskip("uvicorn", reason="the extra serve is not installed")

TEMPLATE = "{% for m in messages %}{{ m.content }}.{% endfor %}"
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
ASKS = {"model": "tiny", "diffusion_steps": 4, "seed": 3}


@pytest.fixture(scope="module")
def address():
    model = tiny(dtype=torch.float64, chat_template=TEMPLATE)
    with serving(model, steps=8, most_steps=64, length=96, samples=4) as (at, _):
        yield at


@pytest.fixture(scope="module")
def client(address):
    return openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=60)


def chat(address, *messages, **fields):
    body = {**ASKS, "max_tokens": 6, "messages": list(messages), **fields}
    return httpx.post(address + CHATS, json=body, timeout=60)


def complete(address, **fields):
    return httpx.post(address + COMPLETIONS, json={**ASKS, "max_tokens": 6, **fields})


# --- a conversation ---


def test_a_conversation_goes_round_and_its_stream_ends_as_the_unstreamed_answer(client):
    messages = []
    for turn, question in enumerate(("ab", "cd", "ef")):
        messages.append({"role": "user", "content": question})
        options = {"model": "tiny", "messages": messages, "max_tokens": 24, "seed": turn}
        options["temperature"] = 2
        long = client.chat.completions.create(**options).choices[0].message.content
        options["stop"] = long[12:16]  # the client's stream raises where "length" ends it
        made = client.chat.completions.create(**options)
        with client.chat.completions.stream(**options) as stream:
            final = stream.until_done().get_final_completion()
        whole, said = made.choices[0], final.choices[0]
        assert said.message.model_dump(exclude={"parsed"}) == whole.message.model_dump()
        assert said.finish_reason == whole.finish_reason == "stop"
        assert whole.message.role == "assistant" and whole.message.content
        messages.append(said.message if turn else whole.message)
    assert len(messages) == 6


def test_fields_of_a_message_that_say_nothing_are_taken(address):
    said = {"role": "assistant", "content": "cd", "refusal": None, "annotations": []}
    said |= {"audio": None, "tool_calls": None, "function_call": None, "parsed": None}
    said |= {"reasoning_content": None, "name": None, "provider_specific_fields": {"a": None}}
    asked, plain = {"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}
    made, alone = chat(address, asked, said, asked), chat(address, asked, plain, asked)
    assert made.status_code == 200, made.text
    assert made.json()["choices"] == alone.json()["choices"]


@pytest.mark.parametrize("content", [{}, {"content": None}], ids=str)
def test_an_assistant_may_have_said_nothing_or_have_refused(address, content):
    asked = {"role": "user", "content": "ab"}
    nothing = chat(address, asked, {"role": "assistant", **content}, asked)
    empty = chat(address, asked, {"role": "assistant", "content": ""}, asked)
    assert nothing.json()["choices"] == empty.json()["choices"]
    refused = chat(address, asked, {"role": "assistant", "refusal": "cd", **content}, asked)
    spoken = chat(address, asked, {"role": "assistant", "content": "cd"}, asked)
    assert refused.json()["choices"] == spoken.json()["choices"]


@pytest.mark.parametrize(
    "message, words",
    [
        ({"role": "tool", "content": "a", "tool_call_id": "x"}, "offers no tools"),
        ({"role": "function", "content": "a", "name": "x"}, "offers no tools"),
        ({"role": "assistant", "tool_calls": [{"id": "x"}]}, "offers no tools"),
        ({"role": "user", "content": None}, r"messages\[1\].content is missing"),
        ({"role": "system"}, r"messages\[1\].content is missing"),
        ({"role": "user", "content": "a", "mood": "good"}, r"no field 'messages\[1\].mood'"),
    ],
    ids=str,
)
def test_what_a_message_cannot_be_is_said_with_its_place(address, message, words):
    made = chat(address, {"role": "user", "content": "ab"}, message)
    error = made.json()["error"]
    assert made.status_code == 400 and error["param"] == "messages"
    assert re.search(words, error["message"]), error["message"]


def test_the_role_stands_in_the_first_delta_of_each_choice_and_usage_in_the_last_chunk(address):
    body = {**ASKS, "messages": [{"role": "user", "content": "ab"}], "max_tokens": 40, "n": 2}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    lines = httpx.post(address + CHATS, json=body, timeout=60).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line[6:7] == "{"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1]) and chunks[-1]["usage"]
    for number in range(2):
        of_one = [c for chunk in chunks for c in chunk["choices"] if c["index"] == number]
        first, *others = [choice["delta"] for choice in of_one]
        assert first["role"] == "assistant" and first["refusal"] is None and others
        assert all(set(delta) <= {"content"} for delta in others)


# --- fields ---


@pytest.mark.parametrize("logprobs", [0, 1, 5, True])
@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
def test_log_probabilities_are_refused_however_few_are_asked_for(address, path, logprobs):
    more = {"messages": [{"role": "user", "content": "a"}]} if path == CHATS else {}
    made = httpx.post(address + path, json={**ASKS, "logprobs": logprobs, **more})
    assert made.status_code == 400 and made.json()["error"]["param"] == "logprobs"


def test_what_clients_send_without_being_asked_is_ignored_and_named_in_a_header(address):
    sent = {"user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "flex"}
    sent |= {"safety_identifier": "x", "prompt_cache_key": "y", "parallel_tool_calls": True}
    sent |= {"tools": [], "tool_choice": "auto", "verbosity": "medium", "modalities": None}
    for stream in (False, True):
        made = complete(address, **sent, stream=stream)
        assert made.status_code == 200, made.text
        assert made.headers["x-psidiff-ignored"] == (
            "metadata, parallel_tool_calls, prompt_cache_key, safety_identifier, service_tier, "
            "store, user"
        )
    for nothing in ({}, {"user": None, "store": None}):
        assert "x-psidiff-ignored" not in complete(address, **nothing).headers
    obfuscated = complete(address, stream=True, stream_options={"include_obfuscation": False})
    assert obfuscated.headers["x-psidiff-ignored"] == "stream_options.include_obfuscation"


def test_whole_numbers_may_have_a_point(address):
    plain = complete(address, prompt=[0, 1], n=2, logit_bias={"3": 2})
    raw = b'{"model": "tiny", "max_tokens": 6.0, "diffusion_steps": 4.0, "seed": 3.0, "n": 2e0,'
    raw += b'"prompt": [0.0, 1.0], "logit_bias": {"3": 2.0}, "temperature": 1.0}'
    headers = {"content-type": "application/json"}
    made = httpx.post(address + COMPLETIONS, content=raw, headers=headers)
    assert made.status_code == 200, made.text
    assert made.json()["choices"] == plain.json()["choices"]
    half = complete(address, n=1.5)
    assert half.status_code == 400 and half.json()["error"]["message"].endswith("got 1.5")


def test_fields_that_are_null_are_not_given(address):
    from psidiff.serve.schemas import ALIASES, NOT_OFFERED, CompletionBody

    nulls = dict.fromkeys({*ALIASES, *NOT_OFFERED, *CompletionBody.model_fields} - {*ASKS})
    made = complete(address, **{**nulls, "max_tokens": 6})
    assert made.status_code == 200, made.text
    assert made.json()["choices"] == complete(address).json()["choices"]


@pytest.mark.parametrize("seed", [-1, -(2**63)])
def test_a_negative_seed_is_another_seed(address, seed):
    first, second = complete(address, seed=seed), complete(address, seed=seed)
    assert first.status_code == 200, first.text
    assert first.json()["choices"] == second.json()["choices"]
    told = first.json()["diffusion"]["seed"]
    assert 0 <= told < 2**63
    assert complete(address, seed=told).json()["choices"] == first.json()["choices"]
    assert complete(address, seed=-(2**63) - 1).status_code == 400


# --- around them ---


def test_every_answer_has_an_id_that_clients_may_choose(address, client):
    ids = set()
    for path in ("/", "/health", "/v1/models", "/v1/nothing"):
        ids.add(httpx.get(address + path).headers["x-request-id"])
    ids.add(complete(address, n=0).headers["x-request-id"])
    ids.add(complete(address, stream=True).headers["x-request-id"])
    assert len(ids) == 6 and all(re.fullmatch("req_[0-9a-f]{32}", each) for each in ids)
    for own, taken in (("mine-1.2", True), ("a" * 129, False), ("a b", False), ("", False)):
        made = httpx.get(f"{address}/health", headers={"x-request-id": own})
        assert (made.headers["x-request-id"] == own) == taken
    made = client.completions.create(model="tiny", prompt="a", max_tokens=3)
    assert made._request_id.startswith("req_")
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="a", max_tokens=-3)
    assert caught.value.request_id.startswith("req_")


def test_a_failure_of_ours_has_an_id_too(monkeypatch):
    from psidiff.serve import app

    def broken(*_):
        raise RuntimeError("secret")

    with serving(tiny()) as (address, _):
        monkeypatch.setattr(app, "about_model", broken)
        made = httpx.get(f"{address}/v1/models", headers={"x-request-id": "mine"})
        assert made.status_code == 500 and made.headers["x-request-id"] == "mine"
        assert "secret" not in made.text


def test_the_description_says_what_is_read_and_the_page_shows_it_offline(address):
    from psidiff.serve.schemas import ALIASES, IGNORED, NOT_OFFERED, CompletionBody

    made = httpx.get(f"{address}/openapi.json")
    assert made.headers["content-type"] == "application/json"
    described = made.json()
    assert described["openapi"].startswith("3.1")
    paths = {"/health", "/metrics", "/v1/models", "/v1/models/{name}", COMPLETIONS, CHATS}
    assert set(described["paths"]) == paths
    fields = described["components"]["schemas"]["CompletionBody"]["properties"]
    assert set(fields) == {*CompletionBody.model_fields, *ALIASES, *IGNORED, *NOT_OFFERED}
    assert references(described) <= set(described["components"]["schemas"])
    page = httpx.get(f"{address}/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert not re.search(r"https?://|src=|@import|url\(|<script", page.text)
    shown = html.unescape(page.text)
    assert all(f">{name}<" in shown for name in fields) and all(path in shown for path in paths)


def references(value):
    """Names of all schemas that are referred to."""
    if isinstance(value, dict):
        own = (
            {value["$ref"].removeprefix("#/components/schemas/")} if "$ref" in value else set()
        )
        return own.union(*map(references, value.values()))
    return set().union(*map(references, value)) if isinstance(value, list) else set()


def test_the_description_holds_nothing_that_a_key_guards():
    with serving(tiny(name="secretive"), api_key="sesame") as (address, _):
        assert httpx.get(f"{address}/v1/models").status_code == 401
        for path in ("/openapi.json", "/docs"):
            made = httpx.get(address + path)
            assert made.status_code == 200 and "secretive" not in made.text
