"""The server behind LiteLLM, which many programs speak through: `make test-peers`."""

import os

import pytest
import torch
from serving import serving, tiny

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it asks the network otherwise
litellm = pytest.importorskip("litellm", reason="make test-peers installs it")
pytest.importorskip("uvicorn", reason="the extra serve is not installed")

TEMPLATE = "{% for m in messages %}{{ m.content }}.{% endfor %}"
QUESTIONS = ("ab", "cd", "ef")


@pytest.fixture(scope="module")
def options():
    model = tiny(dtype=torch.float64, chat_template=TEMPLATE)
    with serving(model, steps=8, most_steps=64, length=96, samples=4) as (address, _):
        yield {"api_base": f"{address}/v1", "api_key": "none", "num_retries": 0}


def test_a_conversation_of_three_turns_and_its_streams(options):
    messages = []
    for turn, question in enumerate(QUESTIONS):
        messages.append({"role": "user", "content": question})
        asked = {**options, "model": "openai/tiny", "messages": messages, "max_tokens": 12}
        asked |= {"seed": turn, "temperature": 1.5}
        made = litellm.completion(**asked)
        chunks = list(litellm.completion(**asked, stream=True))
        rebuilt = litellm.stream_chunk_builder(chunks, messages=messages)
        whole = made.choices[0].message
        assert rebuilt.choices[0].message.content == whole.content
        assert rebuilt.choices[0].finish_reason == made.choices[0].finish_reason
        assert len(whole.content) == 12 and made.usage.completion_tokens == 12
        messages.append(whole if turn else whole.model_dump())


def test_a_completion_and_its_stream(options):
    asked = {**options, "model": "text-completion-openai/tiny", "prompt": "ab"}
    asked |= {"max_tokens": 9, "seed": 1, "temperature": 2}
    made = litellm.text_completion(**asked)
    chunks = litellm.text_completion(**asked, stream=True)
    said = "".join(choice.text or "" for chunk in chunks for choice in chunk.choices)
    assert said == made.choices[0].text and len(said) == 9
    several = litellm.text_completion(**asked, n=2).choices  # its streams lose their numbers
    assert [len(choice.text) for choice in several] == [9, 9]


def test_our_fields_pass_and_mistakes_are_its_exceptions(options):
    asked = {**options, "model": "openai/tiny", "messages": [{"role": "user", "content": "a"}]}
    made = litellm.completion(**asked, max_tokens=4, extra_body={"diffusion_steps": 3})
    assert "steps=3" in made.diffusion["sampler"]
    made = litellm.completion(**asked, max_tokens=4, user="me", parallel_tool_calls=True)
    assert len(made.choices[0].message.content) == 4
    with pytest.raises(litellm.BadRequestError, match="n: this server allows"):
        litellm.completion(**asked, n=99)
    with pytest.raises(litellm.NotFoundError, match="no model"):
        litellm.completion(**asked | {"model": "openai/gpt-4"})
