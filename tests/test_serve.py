"""The server as OpenAI's own client meets it."""

import json
import re
import socket
import subprocess
import sys
import time
import urllib.request

import pytest
import torch
from serving import LETTERS, serving, slow, tiny, tiny_images, tiny_masked, tiny_puzzle
from typer.testing import CliRunner

from psidiff.data.tokenizers import Subwords
from psidiff.process import Masked
from psidiff.sampling import Guidance

openai = pytest.importorskip("openai", reason="the official client is not installed")
httpx = pytest.importorskip("httpx")
pytest.importorskip("uvicorn", reason="the extra serve is not installed")

TEMPLATE = "{% for m in messages %}{{ m.content }}.{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}a {% endif %}"


def client_of(address, key="none"):
    return openai.OpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def model():
    return tiny(dtype=torch.float64, chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def address(model):
    with serving(model, steps=12, most_steps=64, length=96, samples=8, deadline=60.0) as (
        at,
        _,
    ):
        yield at


@pytest.fixture(scope="module")
def client(address):
    return client_of(address)


def complete(client, prompt="", **options):
    extra = {name: options.pop(name) for name in list(options) if name.startswith("diffusion")}
    return client.completions.create(
        model=options.pop("model", "tiny"), prompt=prompt, extra_body=extra, **options
    )


def expected(model, prompt, free, suffix="", **options):
    """The same answer from the library."""
    length = len(prompt) + free + len(suffix)
    made = model.sample(
        options.pop("n", 1), 12, length=length, prompt=prompt, suffix=suffix or None, **options
    )
    return [text[len(prompt) : len(prompt) + free] for text in made.text]


# --- completions ---


def test_a_completion_is_what_the_library_samples(client, model):
    made = complete(client, "abc ", max_tokens=14, seed=5, n=3, temperature=0.8, top_p=0.9)
    wanted = expected(model, "abc ", 14, n=3, seed=5, temperature=0.8, top_p=0.9)
    assert [choice.text for choice in made.choices] == wanted
    assert [choice.index for choice in made.choices] == [0, 1, 2]
    assert {choice.finish_reason for choice in made.choices} == {"length"}
    assert made.object == "text_completion" and made.model == "tiny"
    assert (made.usage.prompt_tokens, made.usage.completion_tokens) == (4, 42)
    assert made.diffusion["seed"] == 5 and "steps=12" in made.diffusion["sampler"]
    tokens = made.choices[0].diffusion["tokens"]
    assert LETTERS.decode(torch.tensor(tokens)) == "abc " + wanted[0]


def test_a_suffix_is_infilled_to(client, model):
    made = complete(client, "abc", suffix="fed", max_tokens=9, seed=2)
    assert [made.choices[0].text] == expected(model, "abc", 9, "fed", seed=2)
    whole = complete(client, "abc", suffix="fed", max_tokens=9, seed=2, echo=True)
    assert whole.choices[0].text == f"abc{made.choices[0].text}", "the suffix is not echoed"
    assert made.choices[0].finish_reason == whole.choices[0].finish_reason == "stop"


def test_without_max_tokens_an_answer_fills_the_length_of_the_model(client):
    assert len(complete(client, "abcd", seed=1).choices[0].text) == 20
    assert len(complete(client, "abcd" * 6, seed=1).choices[0].text) == 12


def test_a_text_with_blanks_comes_back_whole(client, model):
    template = "ab{{5}}cd{{3}}"
    made = complete(client, None, diffusion_infill=template, seed=4)
    text = made.choices[0].text
    assert re.fullmatch(r"(?s)ab.{5}cd.{3}", text)
    assert [text] == model.sample(1, 12, infill=template, seed=4).text
    assert made.usage.completion_tokens == 8
    assert made.choices[0].finish_reason == "stop", "nothing could follow"


def test_pinned_tokens_stay(client):
    pins = {"0": 3, "7": 2}
    text = complete(client, "ab", max_tokens=10, seed=1, diffusion_pinned=pins).choices[0].text
    assert (text[0], text[7]) == ("d", "c")
    row = [None, 1, None, -1, 4]
    text = complete(client, max_tokens=5, diffusion_pinned=row).choices[0].text
    assert (text[1], text[4]) == ("b", "e")


def test_many_prompts_and_prompts_of_token_ids(client):
    made = complete(client, ["ab", "cde"], max_tokens=6, n=2, seed=3, temperature=2)
    assert [choice.index for choice in made.choices] == [0, 1, 2, 3]
    alone = complete(client, "ab", max_tokens=6, n=2, seed=3, temperature=2)
    assert [c.text for c in made.choices[:2]] == [c.text for c in alone.choices]
    assert len({choice.text for choice in made.choices}) == 4
    ids = complete(client, [0, 1], max_tokens=6, n=2, seed=3, temperature=2)
    assert [c.text for c in ids.choices] == [c.text for c in alone.choices]
    lists = complete(client, [[0, 1], [2, 3, 4]], max_tokens=6, n=2, seed=3, temperature=2)
    assert [c.text for c in lists.choices] == [c.text for c in made.choices]


def test_seeds_repeat_and_a_request_without_one_says_which_it_had(client):
    first = complete(client, max_tokens=20)
    second = complete(client, max_tokens=20)
    assert first.diffusion["seed"] != second.diffusion["seed"]
    again = complete(client, max_tokens=20, seed=first.diffusion["seed"])
    assert again.choices[0].text == first.choices[0].text


def test_logit_bias_forbids_and_demands(client):
    never = {str(i): -100 for i in range(LETTERS.vocab_size) if i not in (1, 2)}
    text = complete(client, "a", max_tokens=30, logit_bias=never, seed=1).choices[0].text
    assert set(text) == {"b", "c"}


def test_temperature_zero_takes_the_most_probable_token(client, model):
    made = complete(client, "ab", max_tokens=12, temperature=0, seed=6)
    assert [made.choices[0].text] == expected(model, "ab", 12, seed=6, top_k=1)


def test_stop_ends_an_answer_before_it(client):
    whole = complete(client, "ab", max_tokens=20, seed=9).choices[0].text
    stop = whole[8:10]
    cut = complete(client, "ab", max_tokens=20, seed=9, stop=[stop, "zz"]).choices[0]
    assert cut.text == whole[: whole.index(stop)] and cut.finish_reason == "stop"


WORDS = "constant:.9@.1-.8 steps=5 schedule=cosine:1e-05 grid=alpha top_p=.9 last=greedy"
QUADRATIC = {"kappa": "cap:.1", "grid": "quadratic"}


def test_the_sampler_is_a_choice(client, model):
    for extra, options in (
        ({"diffusion_kappa": "cap:.1"}, {"kappa": "cap:.1"}),
        ({"diffusion_preset": "remdm-cap"}, {"preset": "remdm-cap"}),
        ({"diffusion_predictor": "confident"}, {"predictor": "confident"}),
        ({"diffusion_corrector": "1x3"}, {"corrector": "1x3"}),
        ({"diffusion_last": "greedy"}, {"last": "greedy"}),
        ({"diffusion_sampler": WORDS}, {"sampler": WORDS}),
        ({"diffusion_sampler": "cap:.1", "diffusion_grid": "quadratic"}, QUADRATIC),
        (
            {"diffusion_preset": "remdm-cap", "diffusion_kappa": "cap:.3"},
            {"preset": "remdm-cap", "kappa": "cap:.3"},
        ),
        ({"diffusion_top_k": 3, "diffusion_min_p": 0.1}, {"top_k": 3, "min_p": 0.1}),
    ):
        made = complete(client, "ab", max_tokens=12, seed=7, **extra).choices[0].text
        assert [made] == expected(model, "ab", 12, seed=7, **options), extra
    for name in ("diffusion_steps", "diffusion_max_steps", "num_denoising_steps"):
        made = client.completions.create(
            model="tiny", prompt="ab", max_tokens=5, extra_body={name: 3}, seed=1
        )
        assert "steps=3" in made.diffusion["sampler"]


def test_a_smaller_canvas_means_more_windows(client, model):
    made = complete(
        client, max_tokens=20, seed=3, diffusion_canvas_length=8, diffusion_overlap=2
    )
    assert len(made.choices[0].text) == 20
    whole = complete(client, max_tokens=20, seed=3)
    assert made.diffusion["passes"] > 2 * whole.diffusion["passes"]


def test_an_overlap_where_one_window_is_enough_is_not_ignored(client, model):
    for free in (24, 9):
        words = f"is of windows, and {free} tokens fit into one: leave it out"
        with pytest.raises(openai.BadRequestError, match=words):
            complete(client, max_tokens=free, diffusion_overlap=free)
    made = complete(client, max_tokens=40, seed=3, diffusion_overlap=5).choices[0].text
    assert [made] == expected(model, "", 40, seed=3, overlap=5)


# --- streams ---


def test_a_stream_says_what_a_whole_answer_says(client):
    whole = complete(client, "ab", max_tokens=40, n=2, seed=8, stop=["cc"])
    stream = complete(
        client,
        "ab",
        max_tokens=40,
        n=2,
        seed=8,
        stop=["cc"],
        stream=True,
        stream_options={"include_usage": True},
    )
    texts, reasons, usage = ["", ""], [None, None], None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [choice.text for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert usage == whole.usage


def events_of(address, body):
    """Server-sent events as (name, data)."""
    with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=60) as answer:
        assert answer.headers["content-type"] == "text/event-stream"
        raw = "".join(answer.iter_text())
    for block in raw.strip().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        done = fields["data"] == "[DONE]"
        yield fields.get("event"), None if done else json.loads(fields["data"])


def test_long_texts_come_window_by_window_and_end_early_at_a_stop(address):
    body = {"model": "tiny", "max_tokens": 60, "seed": 1, "stream": True}
    texts = [d["choices"][0]["text"] for _, d in events_of(address, body) if d]
    sizes = [len(text) for text in texts if text]
    assert sizes[0] == 24 and sizes[1] == 12 and sum(sizes) == 60
    stop = texts[0][-3:]
    cut = list(events_of(address, body | {"stop": stop}))
    assert cut[-1] == (None, None)
    assert cut[-2][1]["choices"][0]["finish_reason"] == "stop"
    assert "".join(d["choices"][0]["text"] for _, d in cut if d) == texts[0][:21]


def test_what_masks_settle_is_streamed_while_the_rest_forms():
    model = tiny_masked()
    with serving(model) as (address, _):
        body = {"model": "tiny", "max_tokens": 24, "seed": 1, "stream": True}
        body |= {"diffusion_kappa": "ancestral", "diffusion_steps": 40}
        texts = [d["choices"][0]["text"] for _, d in events_of(address, body) if d]
        whole = httpx.post(f"{address}/v1/completions", json=body | {"stream": False}).json()
    assert len([text for text in texts if text]) > 2
    assert "".join(texts) == whole["choices"][0]["text"]


def test_drafts_are_named_events_that_add_up_to_the_sample(address, model):
    body = {"model": "tiny", "prompt": "ab", "max_tokens": 10, "seed": 3, "stream": True}
    body |= {"diffusion_drafts": True, "n": 2}
    events = list(events_of(address, body))
    (name, start), *_ = events
    assert name == "diffusion.start" and start["choices"] == []
    assert start["diffusion"]["seed"] == 3 and len(start["diffusion"]["samples"]) == 2
    sample = start["diffusion"]["samples"][0]
    assert sample["given"] == [1, 1] + [0] * 10 and sample["windows"] == 1
    assert len(start["diffusion"]["plan"]) == 13
    drafts = [data for name, data in events if name == "diffusion.draft"]
    assert [d["step"] for d in drafts if d["index"] == 1] == list(range(13))
    recorded = model.sample(2, 12, prompt="ab", length=12, seed=3, record=True).trace
    for index in range(2):
        row = [0] * 12
        frames = [d for d in drafts if d["index"] == index]
        for draft, (tokens, routes) in zip(frames, recorded.frames(), strict=True):
            assert all(
                routes[index][at] == route
                for at, route in zip(draft["at"], draft["routes"], strict=True)
            )
            for at, token, piece in zip(
                draft["at"], draft["tokens"], draft["pieces"], strict=True
            ):
                row[at] = token
                assert LETTERS.alphabet[token] == piece
            assert row == tokens[index].tolist()
            assert draft["text"] == LETTERS.decode(tokens[index][2:])


def test_the_official_client_finds_no_choices_in_drafts(client):
    stream = complete(client, "ab", max_tokens=8, seed=1, stream=True, diffusion_drafts=True)
    chunks = list(stream)
    said = "".join(choice.text for chunk in chunks for choice in chunk.choices)
    assert said == complete(client, "ab", max_tokens=8, seed=1).choices[0].text
    assert len(chunks) > 13


# --- chats ---


def test_a_chat_goes_by_the_template_of_the_model(client):
    messages = [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "de"}]
    messages += [{"role": "user", "content": [{"type": "text", "text": "f"}]}]
    options = {"model": "tiny", "messages": messages, "max_completion_tokens": 9, "seed": 2}
    made = client.chat.completions.create(**options)
    alone = complete(client, "abc.de.f.a ", max_tokens=9, seed=2).choices[0]
    assert made.choices[0].message.content == alone.text and made.object == "chat.completion"
    stream = client.chat.completions.create(**options, stream=True)
    parts = [choice.delta.content for chunk in stream for choice in chunk.choices]
    assert "".join(filter(None, parts)) == alone.text


def test_a_model_without_a_template_does_not_chat():
    with serving(tiny()) as (address, _):
        with pytest.raises(openai.BadRequestError, match="no chat template") as caught:
            client_of(address).chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "a"}]
            )
        assert caught.value.code == "no_chat_template"


# --- other kinds of models ---


def test_puzzles_are_prompts_and_keep_their_clues():
    with serving(tiny_puzzle(), steps=6) as (address, _):
        puzzle = "53..7...." + "." * 72
        made = complete(client_of(address), puzzle, model="sudoku", seed=1).choices[0]
        assert made.finish_reason == "stop"
        cells = made.text.replace("\n", "")
        assert re.fullmatch("[1-9]{81}", cells) and cells[:2] == "53" and cells[4] == "7"
        with pytest.raises(openai.BadRequestError, match="the clues clash"):
            complete(client_of(address), "11" + "." * 79, model="sudoku")


def test_images_have_labels_and_their_tokens_are_in_the_answer():
    model = tiny_images()
    with serving(model, steps=6) as (address, _):
        client = client_of(address)
        options = {"diffusion_label": "bar", "diffusion_guidance": 2, "seed": 1, "n": 2}
        made = complete(client, "", **options)
        again = model.sample(2, 6, labels="bar", guidance=2.0, seed=1).tokens.tolist()
        assert [choice.diffusion["tokens"] for choice in made.choices] == again
        assert {choice.finish_reason for choice in made.choices} == {"stop"}
        assert made.diffusion["sampler"].endswith(" guidance=2")
        made = complete(client, "", diffusion_guidance_on="posterior", **options)
        guidance = Guidance(2.0, "posterior")
        again = model.sample(2, 6, labels="bar", guidance=guidance, seed=1).tokens.tolist()
        assert [choice.diffusion["tokens"] for choice in made.choices] == again
        assert made.diffusion["sampler"].endswith(" guidance=2,posterior")
        card = client.models.retrieve("tiny").diffusion
        assert card["kind"] == "image" and card["size"] == [1, 4, 4]
        assert card["classes"] == ["ring", "bar"]
        with pytest.raises(openai.BadRequestError, match="leave it empty"):
            complete(client, "a cat")


# --- mistakes ---


def test_mistakes_are_the_exceptions_of_the_client(client):
    for options, kind, param in (
        ({"model": "gpt"}, openai.NotFoundError, "model"),
        ({"temperature": 3}, openai.BadRequestError, "temperature"),
        ({"diffusion_steps": -1}, openai.BadRequestError, "diffusion_steps"),
        ({"diffusion_steps": 65}, openai.BadRequestError, "diffusion_steps"),
        ({"diffusion_kappa": "cup:.1"}, openai.BadRequestError, "diffusion_kappa"),
        ({"diffusion_preset": "best"}, openai.BadRequestError, "diffusion_preset"),
        ({"diffusion_predictor": "bold"}, openai.BadRequestError, "diffusion_predictor"),
        ({"diffusion_corrector": "2"}, openai.BadRequestError, "diffusion_corrector"),
        ({"diffusion_guidance": "up"}, openai.BadRequestError, "diffusion_guidance"),
        ({"diffusion_label": 3}, openai.BadRequestError, "diffusion_label"),
        ({"diffusion_last": "maybe"}, openai.BadRequestError, "diffusion_last"),
        ({"diffusion_nucleus": "half"}, openai.BadRequestError, "diffusion_nucleus"),
        ({"diffusion_overlap": 24}, openai.BadRequestError, "diffusion_overlap"),
        (
            {"diffusion_overlap": 24, "max_tokens": 40},
            openai.BadRequestError,
            "diffusion_overlap",
        ),
        ({"max_tokens": 97}, openai.BadRequestError, "max_tokens"),
        ({"n": 9}, openai.BadRequestError, "n"),
        ({"prompt": "ü"}, openai.BadRequestError, "prompt"),
        ({"logprobs": 2}, openai.BadRequestError, "logprobs"),
        ({"logit_bias": {"99": 1}}, openai.BadRequestError, "logit_bias"),
        ({"diffusion_pinned": {"99": 1}}, openai.BadRequestError, "diffusion_pinned"),
        ({"diffusion_pinned": {"0": 99}}, openai.BadRequestError, "diffusion_pinned"),
        ({"diffusion_infill": "{{x}}"}, openai.BadRequestError, "diffusion_infill"),
        ({"diffusion_guidance": 2.0}, openai.BadRequestError, "diffusion_label"),
        ({"diffusion_stepps": 3}, openai.BadRequestError, "diffusion_stepps"),
    ):
        for stream in (False, True):
            with pytest.raises(kind) as caught:
                complete(client, stream=stream, **options)
            assert caught.value.param == param, options
            assert caught.value.type == "invalid_request_error"
            assert "\n" not in caught.value.message


def test_an_unknown_field_names_the_nearest_right_one(client):
    with pytest.raises(openai.BadRequestError, match="did you mean diffusion_steps"):
        complete(client, diffusion_stepps=3)


def test_a_key_is_asked_for_where_one_is_set():
    with serving(tiny(), api_key="sesame") as (address, _):
        for wrong in ("other", "sesam", "ÿ".encode("latin-1").decode("latin-1")):
            headers = {"authorization": f"Bearer {wrong}".encode("latin-1")}
            assert httpx.get(f"{address}/v1/models", headers=headers).status_code == 401
        for value, status in (
            ("Bearer sesame", 200),
            ("bearer sesame", 200),
            ("BEARER  sesame", 200),
            ("sesame", 401),
            ("Basic sesame", 401),
            ("Bearersesame", 401),
            ("Bearer", 401),
        ):
            headers = {"authorization": value}
            answer = httpx.get(f"{address}/v1/models", headers=headers)
            assert answer.status_code == status, value
        with pytest.raises(openai.AuthenticationError):
            complete(client_of(address, "other"))
        assert complete(client_of(address, "sesame"), max_tokens=3).choices
        for path in ("/", "/health", "/metrics"):
            assert httpx.get(address + path).status_code == 200


def test_a_full_queue_answers_429_and_a_late_request_408():
    with serving(slow(), batch=1, queue=1, samples=1) as (address, app):
        body = {"model": "tiny", "diffusion_steps": 400, "max_tokens": 4, "stream": True}
        with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=60) as first:
            assert first.status_code == 200
            with pytest.raises(openai.APIStatusError, match=r"within its 0\.2 sec") as caught:
                complete(client_of(address), max_tokens=4, diffusion_deadline=0.2)
            assert caught.value.status_code == 408
            waits = socket_post(address, body)
            until(lambda: app.state.engine.waiting == 1)
            with pytest.raises(openai.RateLimitError, match="queue"):  # it would be done last
                complete(client_of(address), max_tokens=4, diffusion_steps=400)
            waits.close()
            until(lambda: app.state.engine.waiting == 0)


def test_the_official_client_does_not_repeat_what_missed_its_deadline():
    with serving(slow()) as (address, _):
        client = client_of(address).with_options(max_retries=2)
        with pytest.raises(openai.APIStatusError) as caught:
            complete(client, max_tokens=4, diffusion_deadline=0.1)
        assert caught.value.response.headers["x-should-retry"] == "false"
        asked = 'psidiff_requests_total{path="/v1/completions",status="408"}'
        assert metrics_of(address)[asked] == 1


def socket_post(address, body):
    """A request whose answer nobody reads yet."""
    host, port = address.removeprefix("http://").split(":")
    raw = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    )
    link = socket.create_connection((host, int(port)))
    link.sendall(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
    return link


def until(condition, seconds=10):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("extra", [{}, {"diffusion_predictor": "confident"}], ids=str)
def test_the_slot_of_a_client_that_hangs_up_is_free_within_a_step(stream, extra):
    model = slow(seconds=0.05)
    with serving(model) as (address, app):
        body = {"model": "tiny", "diffusion_steps": 1000, "max_tokens": 6, "stream": stream}
        body |= {"diffusion_kappa": "ancestral", "diffusion_drafts": stream, **extra}
        link, engine = socket_post(address, body), app.state.engine
        until(lambda: engine.metrics.value("sample_steps_total") >= 3)
        assert engine.running == 1
        link.close()
        steps = engine.metrics.value("sample_steps_total")
        until(lambda: engine.running == 0)
        # the step that ran when the client left, and one if it had just begun
        assert engine.metrics.value("sample_steps_total") <= steps + 2
        assert engine.metrics.value("samples_total", how="cancelled") == 1


@pytest.mark.parametrize("stream", [True, False])
def test_going_down_ends_what_is_under_way(stream, caplog):
    with serving(slow()) as (address, app):
        body = {"model": "tiny", "diffusion_steps": 1000, "max_tokens": 4, "stream": stream}
        link = socket_post(address, body)
        until(lambda: app.state.engine.running == 1)
    raw = b""
    while part := link.recv(1 << 16):
        raw += part
    link.close()
    assert b"shutting_down" in raw
    assert raw.startswith(b"HTTP/1.1 200" if stream else b"HTTP/1.1 503")
    assert not caplog.records


# --- around it ---


def test_health_metrics_and_the_list_of_models(address, client):
    assert httpx.get(f"{address}/health").json()["status"] == "ok"
    (card,) = client.models.list().data
    assert card.id == "tiny" and card.diffusion["kind"] == "text" and card.diffusion["chat"]
    limits = {"steps": 64, "length": 96, "samples": 8, "windows": 512, "work": 300_000_000}
    assert card.diffusion["limits"] == limits
    before = metrics_of(address)
    complete(client, max_tokens=7, diffusion_steps=5)
    after = metrics_of(address)

    def gained(name):
        return after.get(name, 0) - before.get(name, 0)

    assert gained('psidiff_requests_total{path="/v1/completions",status="200"}') == 1
    assert gained('psidiff_samples_total{how="finished"}') == 1
    assert gained("psidiff_tokens_total") == 7
    assert gained("psidiff_sample_steps_total") == 6 and gained("psidiff_ticks_total") == 6
    assert gained("psidiff_sample_seconds_count") == 1
    assert gained('psidiff_sample_seconds_bucket{le="+Inf"}') == 1
    assert after["psidiff_samples_running"] == after["psidiff_samples_waiting"] == 0


def metrics_of(address):
    text = httpx.get(f"{address}/metrics").text
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    for line in lines:
        assert re.fullmatch(r'psidiff_[a-z_]+(\{[a-z]+="[^"]*"(,[a-z]+="[^"]*")*\})? \S+', line)
    kinds = re.findall(r"# TYPE (\w+) (counter|gauge|histogram)", text)
    assert len(kinds) == len(re.findall("# HELP", text)) == len(dict(kinds))
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def test_the_page_is_one_file_that_may_only_talk_to_its_server(address):
    page = httpx.get(f"{address}/")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert not re.search(r"https?://|src=|@import|url\(", page.text)
    assert "__DATA__" in httpx.get(f"{address}/replay.html").text


def test_settings_that_cannot_be_are_said_at_the_start():
    from psidiff.serve.config import Settings

    for wrong, words in (
        ({"batch": 0}, "batch must be an integer of at least 1"),
        ({"deadline": 0.0}, "deadline must be above 0"),
        ({"samples": 9, "queue": 8}, "the queue only has 8 places"),
        ({"steps": 5000}, "5000 steps, but this server allows 4096 at most"),
        ({"api_key": "a\nb"}, "no header can carry"),
        ({"api_key": "schlüssel"}, "no header can carry"),
        ({"api_key": " a"}, "no header can carry"),
        ({"api_key": ""}, "the API key is empty"),
        ({"api_key": "  "}, "the API key is empty"),
    ):
        with pytest.raises(ValueError, match=words):
            Settings(**wrong)


@pytest.mark.parametrize(
    "options, key, words",
    [
        (["--steps", "5000"], None, "allows 4096 at most"),
        (["--api-key", ""], None, "the API key is empty"),
        (["--api-key", ""], "sesame", "the API key is empty"),
        ([], "", "the API key is empty"),
        (["--api-key", "é"], None, "no header can carry"),
        (["--max-steps", "64"], None, "served with 64 steps and the key None"),
        (["--api-key", "a"], "", "served with 128 steps and the key a"),
        ([], "b", "served with 128 steps and the key b"),
    ],
    ids=str,
)
def test_the_command_refuses_what_the_server_could_not_keep(monkeypatch, options, key, words):
    import psidiff.model
    import psidiff.serve.server
    from psidiff.cli.main import app

    def run(model, settings, host, port, listening):
        said = f"served with {settings.steps} steps and the key {settings.api_key}"
        raise ValueError(said)

    monkeypatch.setattr(psidiff.serve.server, "run", run)
    monkeypatch.setattr(psidiff.model, "load", lambda *_: tiny())
    made = CliRunner().invoke(app, ["serve", "x", *options], env={"PSIDIFF_API_KEY": key})
    assert isinstance(made.exception, ValueError) and words in str(made.exception)


def test_a_port_that_is_taken_is_said_in_one_sentence():
    from psidiff.serve.config import Settings
    from psidiff.serve.server import run

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"cannot listen at 127.0.0.1, port {port}"):
            run(tiny(), Settings(), "127.0.0.1", port, print)


def test_without_the_extra_the_command_says_what_to_install(monkeypatch):
    from psidiff.cli.main import app

    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "psidiff.serve.server", raising=False)
    made = CliRunner().invoke(app, ["serve", "digits"])
    assert isinstance(made.exception, ValueError)
    assert "needs uvicorn: pip install 'psidiff[serve]'" in str(made.exception)


def test_subwords_in_a_frame_are_completed_streamed_and_infilled():
    texts = ["the cat sat on the mat", "a cat and a hat", "the hat on a mat"] * 5
    codec = Subwords.train_bpe(texts, 280)
    prior = Masked(codec.vocab_size + 1, codec.vocab_size)
    model = tiny(codec, prior, framed=True, dtype=torch.float64)
    with serving(model, steps=10) as (address, _):
        client = client_of(address)
        made = complete(client, "the cat", max_tokens=9, seed=3, n=2)
        ids = codec.encode("the cat")
        library = model.sample(2, 10, prompt="the cat", length=1 + len(ids) + 9, seed=3)
        assert ["the cat" + choice.text for choice in made.choices] == library.text
        assert made.usage.prompt_tokens == len(ids) + 1
        stream = complete(client, "the cat", max_tokens=9, seed=3, n=2, stream=True)
        said = ["", ""]
        for chunk in stream:
            for choice in chunk.choices:
                said[choice.index] += choice.text
        assert said == [choice.text for choice in made.choices]
        filled = complete(client, None, diffusion_infill="the {{3}} mat", seed=1)
        text = filled.choices[0].text
        assert text.startswith("the") and text.endswith(" mat") and "endoftext" not in text


def test_a_prompt_that_ends_in_a_space_has_the_same_tokens_as_in_the_library():
    codec = Subwords.train_bpe(["the king and the queen and the king"] * 20, 300)
    model = tiny(codec, dtype=torch.float64)
    with serving(model, steps=10) as (address, _):
        client = client_of(address)
        prompt, first = "the king and ", int(codec.encode(" king")[0])
        made = complete(client, prompt, seed=3, diffusion_pinned={"0": first})
        row = [*codec.encode("the king and"), first]
        library = model.sample(1, 10, infill=row, length=24, seed=3).text[0]
        assert made.usage.prompt_tokens == len(row)
        assert prompt + made.choices[0].text == library
        echo = complete(client, prompt, seed=3, diffusion_pinned={"3": first}, echo=True)
        assert echo.choices[0].text == library
        free = complete(client, prompt, seed=3).choices[0].diffusion["tokens"]
        assert free == model.sample(1, 10, prompt=prompt, seed=3).tokens[0].tolist()
        stream = complete(client, prompt, seed=3, diffusion_pinned={"0": first}, stream=True)
        said = "".join(choice.text for chunk in stream for choice in chunk.choices)
        assert said == made.choices[0].text


@pytest.mark.slow
def test_the_command_serves_a_model_that_ships_until_it_is_interrupted():
    command = [sys.executable, "-m", "psidiff", "serve", "digits", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        first = process.stderr.readline()
        address = re.search(r"http://127\.0\.0\.1:\d+", first)[0]
        body = {"model": "digits", "diffusion_label": 3, "diffusion_steps": 4}
        asked = urllib.request.Request(
            f"{address}/v1/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(asked) as answer:
            made = json.load(answer)
        assert len(made["choices"][0]["diffusion"]["tokens"]) == 64
        process.send_signal(2)
        assert process.wait(timeout=20) in (0, -2, 130)
        assert "Traceback" not in process.stderr.read()
