"""What the page shows of a model equals what the library computes."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from starlette.testclient import TestClient

import everyformer
from everyformer.explore.app import Explorer
from everyformer.explore.library import Library
from everyformer.explore.patterns import NoRequest
from everyformer.explore.runs import CurvesRequest, Runs
from everyformer.train.lock import LOCK, only_writer
from tests.explore.conftest import unpack

TEXT = "To be, or not to be"


@pytest.fixture(scope="module")
def model(folder):
    return everyformer.load(folder / "first", device="cpu")


def ask(client, path, **body):
    answer = client.post(path, json={"run": "first"} | body)
    assert answer.status_code == 200, answer.text
    return unpack(answer.content) if "octet" in answer.headers["Content-Type"] else (answer.json(), [])


def test_the_weights_of_a_head_are_the_librarys(client, model):
    weights = model.attention(TEXT).weights
    for layer, head in ((0, 1), (1, 0)):
        data, (code_QK, product_QK) = ask(client, "/api/inside/head", text=TEXT, layer=layer, head=head)
        assert np.abs(code_QK * (data["largest"] / 65535) - weights[layer][head]).max() < 1e-5
        allowed = np.tril(np.ones_like(product_QK, bool))
        score_QK = np.where(allowed, product_QK, -np.inf)
        softmax_QK = np.exp(score_QK - score_QK.max(1, keepdims=True))
        assert np.abs(softmax_QK / softmax_QK.sum(1, keepdims=True) - weights[layer][head]).max() < 1e-5


def test_a_small_image_has_each_query_relative_to_its_largest_weight(client, model):
    data, arrays = ask(client, "/api/inside", text=TEXT)
    weight_HQK = np.stack(model.attention(TEXT).weights[1])
    expected = weight_HQK / weight_HQK.max(2, keepdims=True)
    assert np.abs(arrays[data["parts"][0]["at"] + 1].reshape(expected.shape) / 255 - expected).max() < 0.003


def test_the_surprisal_is_the_librarys_score(client, model):
    data, arrays = ask(client, "/api/inside", text=TEXT)
    bits_T = arrays[data["predicted"]["surprisal"]]
    assert math.isnan(bits_T[0])
    score = model.score([list(TEXT.encode())])[0]
    assert np.nansum(bits_T) == pytest.approx(-score.log_likelihood / math.log(2), rel=1e-4)
    assert data["predicted"]["total"] == pytest.approx(float(np.nansum(bits_T)), rel=1e-4)


def test_the_predictions_are_the_softmax_of_the_logits(client, model):
    data, arrays = ask(client, "/api/inside", text=TEXT)
    logits_TV = model.network(torch.tensor([list(TEXT.encode())])).logits[0]
    ids, shares = (arrays[data["predicted"]["at"] + number] for number in (0, 1))
    expected = logits_TV.softmax(-1).gather(1, torch.from_numpy(ids.astype(np.int64)))
    assert np.abs(expected.detach().numpy() - shares).max() < 1e-5
    assert (np.diff(shares) <= 0).all()


def test_a_head_that_is_switched_off_adds_nothing(client, model):
    off = [["", 0, 0]]
    data, arrays = ask(client, "/api/inside", text=TEXT, off=off)
    out, width = model.network.body.layer_modules()[0].sublayers[0].heads.out, 8
    kept = out.weight.detach().clone()
    with torch.no_grad():
        out.weight[:, :width] = 0  # the columns of head 0
        expected = model.network(torch.tensor([list(TEXT.encode())])).logits[0].softmax(-1)
        out.weight.copy_(kept)
    top = arrays[data["predicted"]["at"] + 1]
    assert np.abs(expected.topk(top.shape[1]).values.detach().numpy() - top).max() < 1e-5
    again, _ = ask(client, "/api/inside", text=TEXT)
    assert again["predicted"]["total"] != pytest.approx(data["predicted"]["total"], abs=1e-6)


def test_segments_that_the_memory_covers_give_the_weights_of_one_pass(client):
    whole, (one_QK, *_) = ask(client, "/api/inside/head", run="memory", text=TEXT[:16], layer=1, head=1)
    parts, (two_QK, *_) = ask(client, "/api/inside/head", run="memory", text=TEXT[:16], layer=1, head=1, segment=5)
    first = one_QK * (whole["largest"] / 65535)
    assert np.abs(first - two_QK * (parts["largest"] / 65535)).max() < 1e-4


def test_a_segment_does_not_reach_beyond_the_memory(client):
    _, (code_QK, *_) = ask(client, "/api/inside/head", run="memory", text="x" * 60, layer=0, head=0, segment=4)
    assert (code_QK[56:, :40] == 0).all() and (code_QK[56:60, 40] > 0).any()


def test_the_next_token_is_the_librarys(client, model):
    prompt = list(b"ROMEO")
    for seed in range(3):
        tokens = list(prompt)
        for _ in range(3):
            data, _ = ask(client, "/api/generate/step", tokens=tokens, temperature=0.8, top_k=5, seed=seed)
            assert sum(one["kept"] for one in data["candidates"]) == pytest.approx(1)
            assert sum(one["kept"] > 0 for one in data["candidates"]) == 5
            tokens.append(data["chosen"])
    data, _ = ask(client, "/api/generate/step", tokens=prompt, temperature=0)
    assert [*prompt, data["chosen"]] == everyformer.generate(model.network, [prompt], 1, temperature=0)[0]


@pytest.mark.parametrize("run", ["first", "memory"])
def test_the_candidates_are_those_of_a_text_that_was_generated_token_by_token(client, folder, run):
    network, tokens, given = everyformer.load(folder / run, device="cpu").network, list(b"ROMEO: where is he? Gone"), 8
    with torch.no_grad():  # as everyformer.generate: the prompt in one pass, beyond the memory of 16 positions
        output = network(torch.tensor([tokens[:given]]), cache=everyformer.Cache())
        for token in tokens[given:]:
            output = network(torch.tensor([[token]]), cache=output.cache)
    expected_V = output.logits[0, -1].softmax(-1)
    for length in (len(tokens), given + 1, len(tokens)):  # at once, and when the last text has left the way
        data, _ = ask(client, "/api/generate/step", run=run, tokens=tokens[:length], prompt=given)
    shown = {one["id"]: one["probability"] for one in data["candidates"]}
    assert shown == pytest.approx({one: float(expected_V[one]) for one in shown}, abs=1e-6)


def test_a_new_token_is_read_alone_and_another_temperature_reads_nothing(client, explorer):
    read = list[int]()
    network = explorer.library.model("first").network
    hook = network.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0].shape[1]))
    tokens = list(b"JULIET: a")
    for length, temperature in ((8, 1.0), (8, 0.5), (9, 0.5), (8, 0.0), (7, 0.0)):
        ask(client, "/api/generate/step", tokens=tokens[:length], prompt=8, temperature=temperature)
    hook.remove()
    assert read == [8, 1, 7]


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/api/inside", {"run": "../first"}, "there is no run"),
        ("/api/inside", {"run": "/etc"}, "there is no run"),
        ("/api/inside", {"run": "notes"}, "there is no run"),
        ("/api/inside", {"text": "x" * 40}, "positions"),
        ("/api/inside", {"off": [["", 0, 9]]}, "has no head 9"),
        ("/api/inside", {"off": [["encoder", 0, 0]]}, "no part"),
        ("/api/inside/head", {"layer": 7, "head": 0}, "no head 0 in layer 7"),
        ("/api/inside/inner", {"kind": "halting"}, "does not halt"),
        ("/api/inside/inner", {"kind": "x"}, "nothing named 'x'"),
        ("/api/generate/step", {"tokens": [300]}, "below 256"),
        ("/api/generate/prompt", {"text": ""}, "empty"),
        ("/api/runs/curves", {"runs": ["no"]}, "there is no run"),
    ],
)
def test_what_cannot_be_shown_is_refused_with_the_reason(client, path, body, says):
    body = body if path.startswith("/api/runs") else {"run": "first"} | body
    answer = client.post(path, json=body)
    assert answer.status_code == 400 and says in answer.json()["error"]["message"]


def test_a_text_whose_weights_do_not_fit_is_refused(client):
    answer = client.post("/api/inside", json={"run": "memory", "text": "x" * 20_000})
    assert answer.status_code == 400 and "give at most" in answer.json()["error"]["message"]


def test_the_list_of_runs_has_what_the_folders_have(client):
    runs = {one["name"]: one for one in client.post("/api/runs", json={}).json()["runs"]}
    assert set(runs) == {"first", "memory", "<script>alert(1)<|script>"}
    assert (runs["first"]["step"], runs["first"]["steps"], runs["first"]["state"]) == (6, 6, "ended")


def test_a_run_whose_process_was_killed_is_not_called_training(folder, tmp_path):
    run = shutil.copytree(folder / "first", tmp_path / "killed")
    (run / "records.jsonl").write_text("".join((run / "records.jsonl").read_text().splitlines(keepends=True)[:2]))
    with only_writer(run):
        owner = json.loads((run / LOCK).read_text())
        assert state_of(run) == "training"
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    (run / LOCK).write_text(json.dumps(owner | {"process": int(ended.stdout)}))
    assert state_of(run) == "stopped"


def state_of(run):
    return Runs(Library([run])).overview(NoRequest()).data["runs"][0]["state"]


def test_the_curves_are_those_of_the_records(client):
    answer = client.post("/api/runs/curves", json={"runs": ["first", "memory"]})
    data, arrays = unpack(answer.content)
    run = data["runs"][0]
    assert run["unit"] == "bits per byte" and run["step"] == 6 and run["samples"]
    assert arrays[run["series"]["learning rate"]].tolist() == [1, 2, 3, 4, 5, 6]
    assert arrays[run["series"]["valid"]].tolist() == [3, 6]


def test_two_hundred_runs_take_little_time(folder, tmp_path):
    for number in range(200):
        (tmp_path / f"r{number}").mkdir()
        for name in ("recipe.json", "records.jsonl"):
            (tmp_path / f"r{number}" / name).write_bytes((folder / "first" / name).read_bytes())
    runs, start = Runs(Library([tmp_path])), time.process_time()
    assert len(runs.overview(NoRequest()).data["runs"]) == 200
    assert len(runs.curves(CurvesRequest([f"r{number}" for number in range(12)])).data["runs"]) == 12
    assert time.process_time() - start < 2


def test_a_run_that_is_deleted_or_broken_has_a_reason_and_no_crash(folder, tmp_path):
    shutil.copytree(folder / "first", tmp_path / "runs" / "first")
    recipe, records = (tmp_path / "runs" / "first" / name for name in ("recipe.json", "records.jsonl"))
    with TestClient(Explorer(Library([tmp_path / "runs"], "cpu")).app, base_url="http://127.0.0.1") as client:
        for file, text, says in (
            (recipe, "[]", "recipe.json of first is no recipe"),
            (recipe, '{"task"', "recipe.json of first cannot be read"),
            (recipe, "{}", "no valid 'member'"),
            (records, '{"kind": "step"}\n', "no valid 'step'"),
        ):
            kept = file.read_text()
            file.write_text(text)
            (about,) = client.post("/api/runs", json={}).json()["runs"]
            assert about["state"] == "cannot be read" and says in about["error"]
            assert client.post("/api/runs/curves", json={"runs": ["first"]}).status_code in (200, 400)
            assert client.post("/api/runs/recipes", json={"runs": ["first"]}).status_code in (200, 400)
            file.write_text(kept)
        shutil.rmtree(tmp_path / "runs")
        assert client.post("/api/runs", json={}).json() == {"runs": []}
        answer = client.post("/api/runs/curves", json={"runs": ["first"]})
        assert answer.status_code == 400 and "there is no run 'first'" in answer.json()["error"]["message"]


def test_recipes_are_compared_without_the_paths_of_this_machine(client, folder):
    data = client.post("/api/runs/recipes", json={"runs": ["first", "memory"]}).json()
    assert {"path": "member", "values": ["byte-language", "transformer-xl"]} in data["different"]
    assert str(folder) not in str(data)


def test_an_example_that_the_run_does_not_read_is_refused(client):
    answer = client.post("/api/inside", json={"run": "first", "example": 3})
    assert answer.status_code == 400 and "reads no examples by number; give a text" in answer.json()["error"]["message"]
    texts = {"run": "first", "text": "To be", "example": 3}
    assert client.post("/api/inside", json=texts).status_code == 400
