"""Requests that schemathesis makes of /openapi.json, right ones and wrong ones: every answer is
as described, what is wrong is refused, and nothing is a failure of ours. `make test-peers`."""

import json
import subprocess
import sys

import pytest
from serving import serving, tiny

schemathesis = pytest.importorskip("schemathesis", reason="make test-peers installs it")
httpx = pytest.importorskip("httpx")
pytest.importorskip("uvicorn", reason="the extra serve is not installed")

TEMPLATE = "{% for m in messages %}{{ m.content }}.{% endfor %}"
# A body of right fields may ask for more than the server allows, or for what does not go
# together, so 400 is a right answer to it.
NOT_PROMISED = "positive_data_acceptance"


LIMITS = {"steps": 2, "most_steps": 8, "length": 64, "samples": 4, "deadline": 5.0}


def test_every_answer_is_as_described_and_what_is_wrong_is_refused(tmp_path, caplog):
    with serving(tiny(chat_template=TEMPLATE), **LIMITS) as (address, app):
        described = httpx.get(f"{address}/openapi.json").json()
        for name in ("CompletionBody", "ChatBody"):
            described["components"]["schemas"][name]["properties"]["model"] = {"const": "tiny"}
        schema = tmp_path / "openapi.json"
        schema.write_text(json.dumps(described))
        command = [sys.executable, "-m", "schemathesis.cli", "run", str(schema)]
        command += ["--url", address, "--max-examples", "50", "--seed", "1"]
        command += ["--exclude-checks", NOT_PROMISED, "--no-color"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
        assert app.state.engine.running == app.state.engine.waiting == 0
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize(
    "path, fields",
    [
        ("/v1/completions", {"prompt": "ab", "n": 2}),
        ("/v1/completions", {"prompt": [[0, 1], [2]], "suffix": "c", "max_tokens": 4}),
        ("/v1/completions", {"stream": True, "max_tokens": 4}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "ab"}]}),
    ],
    ids=str,
)
def test_answers_to_right_bodies_are_as_described(path, fields):
    with serving(tiny(chat_template=TEMPLATE), **LIMITS) as (address, _):
        described = httpx.get(f"{address}/openapi.json").json()
        post = schemathesis.openapi.from_dict(described)[path]["POST"]
        case = post.Case(body={"model": "tiny", **fields}, media_type="application/json")
        assert case.call_and_validate(base_url=address).status_code == 200
