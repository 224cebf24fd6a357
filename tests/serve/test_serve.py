"""The service answers what the model computes, to OpenAI's client and to any other.

It holds the first commands of docs/serve.md.
"""

from __future__ import annotations

import asyncio
import base64
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest

import everyformer
from everyformer.cli.main import main
from everyformer.serve import engine as engine_module
from everyformer.serve.app import Service
from everyformer.serve.engine import Limits
from tests.serve.conftest import LIMITS, client_of


@pytest.fixture(scope="module")
def official(address):
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_the_official_client_gets_the_text_of_generate(official, model):
    for prompt in ("ROMEO:", list(b"ROMEO:")):
        answer = official.completions.create(model="tiny", prompt=prompt, max_tokens=12, temperature=0.8, seed=3)
        assert "ROMEO:" + answer.choices[0].text == model.generate("ROMEO:", tokens=12, temperature=0.8, seed=3)
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (6, 12)
        assert answer.choices[0].finish_reason == "length"


def test_a_stream_has_the_same_text(official):
    options = {"model": "tiny", "prompt": ["ROMEO:", "A"], "max_tokens": 12, "seed": 3, "n": 2}
    whole = official.completions.create(**options)
    texts, reasons = [""] * 4, [None] * 4
    for chunk in official.completions.create(**options, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason
    assert texts == [choice.text for choice in whole.choices] and reasons == ["length"] * 4
    assert chunk.usage == whole.usage and len(set(texts)) == 4


def test_a_text_ends_before_a_stop_string(official):
    options = {"model": "tiny", "prompt": "ROMEO:", "max_tokens": 40, "seed": 3, "temperature": 1.5}
    text = official.completions.create(**options).choices[0].text
    stop = text[10:12]
    cut = official.completions.create(**options, stop=[stop, "never there"], logprobs=0).choices[0]
    assert cut.text == text[: text.find(stop)] and cut.finish_reason == "stop"
    assert len(cut.logprobs.text_offset) <= len(cut.text) + 3 and max(cut.logprobs.text_offset) < 6 + len(cut.text)


def test_echo_has_the_log_probabilities_of_score(client, model):
    """What lm-evaluation-harness adds up: the tokens after the context, without the one that is generated."""
    prompts = [list(b"the fox jumps"), list(b"ab")]
    body = {"prompt": prompts, "max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True, "seed": 1234}
    choices = client.post("/v1/completions", json=body).json()["choices"]
    for prompt, choice, score in zip(prompts, choices, model.score(prompts), strict=True):
        logprobs = choice["logprobs"]
        assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
        assert sum(logprobs["token_logprobs"][1:-1]) == pytest.approx(score.log_likelihood, abs=1e-4)
        assert len(logprobs["tokens"]) == len(prompt) + 1
        assert all(
            max(top.values()) >= one
            for one, top in zip(logprobs["token_logprobs"][1:], logprobs["top_logprobs"][1:], strict=True)
        )
    (alone,) = client.post("/v1/completions", json=body | {"prompt": "ab", "max_tokens": 0}).json()["choices"]
    assert alone["text"] == "ab" and alone["logprobs"]["tokens"] == ["a", "b"]


def test_embeddings_are_those_of_the_model(official, client, model):
    texts = ["the fox", "a"]
    expected = model.embed(texts, normalize=True)
    data = official.embeddings.create(model="tiny", input=texts).data  # the client asks for base64
    assert np.allclose([one.embedding for one in data], expected, atol=1e-6)
    body = {"input": [list(b"the fox"), [97]], "pooling": "first", "normalize": False}
    data = client.post("/v1/embeddings", json=body).json()["data"]
    assert np.allclose([one["embedding"] for one in data], model.embed(texts, "first"), atol=1e-6)
    encoded = client.post("/v1/embeddings", json={"input": texts, "encoding_format": "base64"}).json()["data"]
    vectors = [np.frombuffer(base64.b64decode(one["embedding"]), np.float32) for one in encoded]
    assert np.allclose(vectors, expected, atol=1e-6)


def test_models_are_listed_and_unknown_ones_refused(official):
    assert [one.id for one in official.models.list()] == ["tiny"] and official.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt-4'; this service has 'tiny'"):
        official.completions.create(model="gpt-4", prompt="x")


def test_a_classifier_serves_classes_and_no_completions(tmp_path):
    lines = (f'{{"text": "{word} {n}", "label": "{word}"}}\n' for n in range(9) for word in ("good", "bad"))
    (tmp_path / "words.jsonl").write_text("".join(lines))
    settings = (
        "run.steps=1", "run.batch=4", "run.evaluate=0", "run.device=cpu", "model.width=16", "model.heads=2", "task.context=16"
    )  # fmt: skip
    recipe = everyformer.Recipe.of("byte-classifier", *settings, size="tiny", data=tmp_path / "words.jsonl")
    model = everyformer.train(recipe, str(tmp_path / "run"))
    with client_of(Service(model, "words", LIMITS)) as client:
        answer = client.post("/v1/classify", json={"input": ["good 1", "bad"]}).json()
        expected = model.classify(["good 1", "bad"])
        assert answer["classes"] == list(expected.classes) == ["bad", "good"]
        assert np.allclose([one["probs"] for one in answer["data"]], expected.probabilities, atol=1e-6)
        assert [one["label"] for one in answer["data"]] == expected.values.tolist()
        assert client.post("/v1/classify", json={"input": [1, 2]}).status_code == 400
        refused = client.post("/v1/completions", json={"prompt": "x"})
        assert refused.status_code == 404
        assert refused.json()["error"]["message"] == "this model has no completions; it has embeddings, classify"


def test_the_harness_finds_a_tokenizer(client):
    assert client.get("/tokenizer_info").json()["eos_token"] == "\n"
    assert client.post("/tokenize", json={"prompt": "té", "add_special_tokens": False}).json()["tokens"] == [
        116,
        195,
        169,
    ]
    assert client.post("/detokenize", json={"tokens": [116, 195, 169]}).json() == {"prompt": "té"}


def test_a_key_is_asked_of_every_path_but_health(model):
    with client_of(Service(model, "tiny", LIMITS, "secret")) as client:
        for given in (None, b"Bearer wrong", b"Basic secret", b"Bearer s\xe9cret", b"Bearer"):
            for path in ("/v1/models", "/metrics"):
                answer = client.get(path, headers={} if given is None else {b"Authorization": given})
                assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
        assert client.get("/v1/models", headers={"Authorization": "Bearer secret"}).status_code == 200
        assert client.get("/health").json()["status"] == "ok"


def test_pages_of_other_sites_cannot_ask_a_local_service(model):
    with client_of(Service(model, "tiny", LIMITS, local=True)) as client:
        for headers in ({"Host": "evil.example"}, {"Host": "localhost:8000", "Origin": "http://evil.example"}):
            answer = client.post("/v1/completions", headers=headers, json={"prompt": "a", "max_tokens": 1})
            assert answer.status_code == 403
        for host in ("localhost", "127.0.0.1:8000", "[::1]:8000"):
            assert client.get("/v1/models", headers={"Host": host}).status_code == 200


def slow_steps(monkeypatch, seconds):
    step = engine_module.Batcher.step

    def slow(self):
        time.sleep(seconds)
        return step(self)

    monkeypatch.setattr(engine_module.Batcher, "step", slow)


def test_a_full_queue_is_answered_with_429_and_then_empties(model, monkeypatch):
    slow_steps(monkeypatch, 0.02)
    with client_of(service := Service(model, "tiny", Limits(rows=1, queue=2, timeout=20))) as client:
        too_many = client.post("/v1/completions", json={"prompt": "x", "n": 4})
        assert too_many.status_code == 400 and "at most 3 fit into the queue" in too_many.json()["error"]["message"]
        body = {"prompt": "x", "n": 2, "max_tokens": 40}

        async def together():
            async with httpx.AsyncClient(transport=httpx.ASGITransport(service.app), base_url="http://test") as many:
                return await asyncio.gather(*(many.post("/v1/completions", json=body) for _ in range(4)))

        answers = client.portal.call(together)
        assert sorted(answer.status_code for answer in answers) == [200, 429, 429, 429]
        refused = next(answer for answer in answers if answer.status_code == 429)
        assert refused.headers["retry-after"] == "1" and refused.json()["error"]["code"] == "queue_full"
        assert client.post("/v1/completions", json=body).status_code == 200


def test_an_answer_that_takes_too_long_is_given_up_and_its_row_is_free(model, monkeypatch):
    slow_steps(monkeypatch, 0.05)
    with client_of(service := Service(model, "tiny", Limits(rows=1, queue=2, timeout=0.3))) as client:
        answer = client.post("/v1/completions", json={"prompt": "x", "max_tokens": 100})
        assert answer.status_code == 504 and answer.json()["error"]["code"] == "timeout"
        stream = client.post("/v1/completions", json={"prompt": "x", "max_tokens": 100, "stream": True}).text
        assert "the stream took longer than 0.3 seconds" in stream and "[DONE]" not in stream
        assert service.engine.completions == {}


def test_a_body_that_does_not_arrive_is_given_up(model):
    async def ask():
        sent = []

        async def receive():
            await asyncio.sleep(60)

        async def send(message):
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
        await Service(model, "tiny", Limits(timeout=0.1)).app(scope, receive, send)
        return sent

    sent = asyncio.run(ask())
    assert sent[0]["status"] == 408 and b"did not arrive within 0.1 seconds" in sent[1]["body"]


def test_a_failure_of_the_model_loses_no_other_request(client, monkeypatch):
    step = engine_module.Batcher.step

    def fails(self):
        monkeypatch.setattr(engine_module.Batcher, "step", step)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine_module.Batcher, "step", fails)
    answer = client.post("/v1/completions", json={"prompt": "x"})
    assert answer.status_code == 500 and answer.json()["error"]["type"] == "server_error"
    assert "memory" not in answer.text and client.post("/v1/completions", json={"prompt": "x"}).status_code == 200


def test_a_client_that_went_away_before_a_failure_cancels_nobody_after_it(model, monkeypatch):
    """After a failure the numbers of the sequences begin anew."""

    async def ended() -> int:
        service_engine = engine_module.Engine(model, Limits())
        service_engine.loop = asyncio.get_running_loop()
        service_engine.submit([1], 4).cancel()
        with monkeypatch.context() as patched:
            patched.setattr(engine_module.Batcher, "step", lambda _: 1 / 0)
            service_engine._step()
        sequence = service_engine.submit([1], 4)
        service_engine.start()
        events = [event async for event in sequence]
        service_engine.stop()
        return len(events)

    assert asyncio.run(asyncio.wait_for(ended(), 20)) == 4


def test_a_client_that_goes_away_frees_its_row(address, official):
    stream = official.completions.create(model="tiny", prompt="x", max_tokens=400, stream=True, n=4)
    next(iter(stream))
    stream.close()
    deadline = time.monotonic() + 10
    while "everyformer_active_sequences 0" not in (text := httpx.get(f"{address}/metrics").text):
        assert time.monotonic() < deadline, text


def test_a_service_that_is_told_to_stop_finishes_what_it_began(model, tmp_path):
    everyformer.save(model.network, tmp_path / "model")
    command = [sys.executable, "-m", "everyformer", "serve", str(tmp_path / "model"), "--port", "0", "--name", "tiny"]
    environment = os.environ | {"PYTHONPATH": str(Path(everyformer.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            line = process.stdout.readline()
            assert line.startswith("tiny at http://127.0.0.1:") and "completions, embeddings" in line
            url = line.split()[2].rstrip(":")
            body = {"prompt": "x", "max_tokens": 200, "stream": True, "n": 2}
            with httpx.stream("POST", f"{url}/completions", json=body, timeout=60) as answer:
                lines = answer.iter_lines()
                assert next(lines).startswith("data: ")
                process.send_signal(signal.SIGTERM)
                *_, last, _ = lines
            assert last == "data: [DONE]"
            assert process.wait(30) == 0 and "Traceback" not in process.stderr.read()
        finally:
            process.kill()


def test_metrics_are_read_by_prometheus(client):
    client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 2})
    answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = [line for line in answer.text.splitlines() if not line.startswith("#")]
    values = {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines}
    assert values['everyformer_requests_total{path="/v1/completions",status="200"}'] >= 1
    assert values['everyformer_request_seconds_bucket{le="+Inf"}'] == values["everyformer_request_seconds_count"]
    assert all(math.isfinite(value) for value in values.values())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--host", "0.0.0.0"], "--host 0.0.0.0 can be reached from other machines; give --api-key"),
        (["--port", "70000"], "--port 70000 is not a port"),
        (["--rows", "0"], "--rows is 0; give more than 0"),
        (["--timeout", "nan"], "--timeout is nan; give more than 0"),
    ],
)
def test_a_wrong_option_is_named(words, message, tmp_path, capsys):
    assert main(["serve", str(tmp_path), *words]) == 2
    assert message in capsys.readouterr().err


def test_a_port_that_is_taken_and_a_model_with_nothing_to_serve_are_named(address, model, tmp_path, capsys):
    everyformer.save(model.network, tmp_path / "model")
    assert main(["serve", str(tmp_path / "model"), "--port", address.rsplit(":", 1)[1]]) == 2
    assert "Address already in use" in capsys.readouterr().err
    everyformer.save(everyformer.build("vit", "tiny"), tmp_path / "vit")
    assert main(["serve", str(tmp_path / "vit"), "--port", "0"]) == 2
    assert "no completions, embeddings or classes to serve" in capsys.readouterr().err


def test_hostile_json_is_refused_with_one_sentence(client):
    for body, message in HOSTILE.items():
        answer = client.post("/v1/completions", content=body if isinstance(body, bytes) else body.encode())
        assert answer.status_code in (400, 413), (body[:60], answer.text)
        error = answer.json()["error"]
        assert message in error["message"] and "\n" not in error["message"] and len(error["message"]) < 500


HOSTILE: dict[str | bytes, str] = {
    "": "not valid JSON",
    "[" * 60_000: "the body: expected object",
    '{"prompt": ' + "[" * 25_000 + "]" * 25_000 + "}": "JSON",
    b'{"prompt": "\xff"}': "not valid JSON",
    '{"prompt": "\\ud800"}': "not valid JSON",
    '{"prompt": NaN}': "not valid JSON",
    '{"prompt": "x", "temperature": 1e999}': "temperature: number out of range",
    '{"prompt": "x", "temperature": -1}': "temperature: expected float >= 0.0",
    '{"prompt": "x", "temperature": "hot"}': "temperature: expected float | null, got str",
    '{"prompt": "x", "max_tokens": -5}': "max_tokens: expected int >= 0",
    '{"prompt": "x", "max_tokens": 1e99}': "max_tokens: expected int",
    '{"prompt": "x", "max_tokens": 401}': "max_tokens is 401; this service generates at most 400",
    '{"prompt": "x", "seed": 99999999999999999999}': "seed: expected int",
    '{"prompt": "x", "n": 0}': "n: expected int >= 1",
    '{"prompt": "x", "best_of": 3}': "best_of is 3",
    '{"prompt": "x", "suffix": "y"}': "suffix is not supported",
    '{"prompt": "x", "logit_bias": {"1": 2}}': "logit_bias is not supported",
    '{"prompt": "x", "stop": [""]}': "stop has an empty",
    '{"prompt": "x", "stream_options": {}}': "stream_options are given without stream",
    '{"prompt": "x", "foo": 1}': "there is no field 'foo'; the fields are prompt, model",
    '{"prompt": ""}': "a prompt is empty",
    '{"prompt": []}': "prompt is neither a text",
    '{"prompt": [1, "a"]}': "prompt is neither a text",
    '{"prompt": [[]]}': "prompt is neither a text",
    '{"prompt": {"a": 1}}': "prompt is neither a text",
    '{"prompt": [-1]}': "prompt is neither a text",
    '{"prompt": [true]}': "prompt is neither a text",
    '{"prompt": [256]}': "the token ids 256 to 256 are not all from 0 to 255",
    '{"prompt": "' + "x" * 301 + '"}': "the prompt has 301 tokens; this service reads at most 300",
    '{"model": "tiny"}': "the request has no prompt",
    "[1]": "the body: expected object, got array",
    '{"prompt": "' + "x" * (1 << 20) + '"}': "the body has more than 65536 bytes",
}
