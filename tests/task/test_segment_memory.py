"""Language models with a segment memory: contiguous batches, a cache carried from step to step, and evaluation that reads each
token once."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from everyformer import Cache, build, generate
from everyformer.infer.estimate import Estimate
from everyformer.infer.evaluate import streaming_nll, streaming_rows, window_nll
from everyformer.study.positions import bits_by_position
from everyformer.task.batch import Batch
from everyformer.task.language import Language, LanguageObjective
from everyformer.train import checkpoint
from everyformer.train.loop import resume, train
from everyformer.train.recipe import Recipe, override
from everyformer.train.trained import load
from tests.train.small import BASE, same, text

SMALL = [setting for setting in BASE if "context" not in setting] + ["run.steps=6", "run.save=2", "run.evaluate=0"]


def recipe(data: Path, *settings: str) -> Recipe:
    start = Recipe(member="transformer-xl", size="tiny", task=Language(context=5), data=str(data))
    return override(start, [*SMALL, "model.memory=8", "model.dropout=0.1", *settings])


def small(vocabulary=11, **changes):
    torch.manual_seed(0)
    network = build("transformer-xl", "tiny", width=16, heads=2, vocabulary=vocabulary, **changes).double().eval()
    with torch.no_grad():
        for weight in network.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.2)
    return network


@pytest.mark.spec(86)
def test_rows_continue_where_they_ended_and_cover_the_text(tmp_path):
    """Batches are a function of seed and step; in an epoch every token is a target once."""
    task = Language(context=5, restart=0).open(str(text(tmp_path))).fit(build("transformer-xl", "tiny").value)
    token_N = task.data.splits["train"]
    batches = [task.data.batch(step, 4, 3)["token_BT"] for step in range(9)]
    assert task.data.context == 5 and batches[0].shape == (4, 6)
    for before, after in pairwise(batches):
        assert torch.equal(before[:, -1], after[:, 0])
    assert torch.equal(batches[7], task.data.batch(7, 4, 3)["token_BT"])
    assert not torch.equal(batches[0], task.data.batch(0, 4, 4)["token_BT"])
    ring = np.concatenate((token_N, token_N))
    steps = -(-len(token_N) // 20)
    rows = [torch.cat([task.data.batch(step, 4, 3)["token_BT"][row, :-1] for step in range(steps)]) for row in range(4)]
    begin = next(n for n in range(len(token_N)) if np.array_equal(ring[n : n + len(rows[0])], rows[0].numpy()))
    for number, row in enumerate(rows):
        start = (begin + number * len(token_N) // 4) % len(token_N)
        assert np.array_equal(ring[start : start + len(row)], row.numpy())


def test_rows_take_turns_to_begin_anew(tmp_path):
    """Each row once in `restart` segments, and not all in one step; the text itself is read on."""
    plain, anew = (
        Language(context=5, restart=restart).open(str(text(tmp_path))).fit(build("transformer-xl", "tiny").value).data
        for restart in (0, 4)
    )
    batches = [anew.batch(step, 6, 3) for step in range(9)]
    assert "restart_B" not in plain.batch(0, 6, 3).tensors
    for step, batch in enumerate(batches):
        assert torch.equal(batch["token_BT"], plain.batch(step, 6, 3)["token_BT"])
    restart_SB = torch.stack([batch["restart_B"] for batch in batches])
    assert (restart_SB[:4].sum(0) == 1).all() and torch.equal(restart_SB[:4], restart_SB[4:8])
    assert (restart_SB.sum(1) < 3).all()


@pytest.mark.parametrize("memory, context, restart", [(64, 64, 4), (512, 64, 32), (65, 64, 8), (64, None, 4)])
def test_by_default_a_row_begins_anew_after_its_memory_was_filled_four_times(tmp_path, memory, context, restart):
    value = build("transformer-xl", "tiny", memory=memory).value
    data = Language(context=context).open(str(text(tmp_path))).fit(value).data
    assert (data.restart, data.context) == (restart, 64)


@pytest.mark.parametrize("tokenizer", ["bytes", "characters", "bpe"])
def test_rows_begin_anew_at_the_start_of_a_document(tmp_path, tokenizer):
    """Where one starts soon; in a long document they begin anew inside it."""
    long = "".join(np.random.default_rng(0).choice(list("xyzvw"), 400))
    documents = ["a short one", "Ein längeres Dokument, das mehrere Segmente füllt.", long, "the end"]
    (tmp_path / "some.jsonl").write_text("".join(json.dumps({"text": one}) + "\n" for one in documents * 3))
    task = Language(context=4, restart=5, tokenizer=tokenizer, vocabulary=270, valid=0.2)
    data = task.open(str(tmp_path / "some.jsonl"))
    data.fit(build("transformer-xl", "tiny", vocabulary=data.tokenizer.vocabulary).value)
    started, inside = set(), 0
    for step in range(200):
        batch = data.batch(step, 3, 0)
        for row in batch["token_BT"][batch["restart_B"]]:
            begun = data.tokenizer.decode(row[:2].tolist())
            inside += begun in long[1:]
            started |= {document for document in documents if document.startswith(begun)}
    assert inside and len(started) >= 3
    token_N = data.splits["train"]
    for start in data.document_N:
        assert any(
            document.startswith(data.tokenizer.decode(token_N[start : start + 2].tolist())) for document in documents
        )


@pytest.mark.parametrize("name", ["transformer-xl", "gtrxl", "adaptive-span", "lstm", "ablated-lstm", "act-rnn"])
def test_a_row_that_begins_anew_is_read_like_the_start_of_a_text(tmp_path, name):
    """Its loss is that of an empty memory; the other rows keep theirs."""
    torch.manual_seed(0)
    length = {"span": 8, "ramp": 4} if name == "adaptive-span" else {"memory": 8}
    network = build(name, "tiny", width=16, dropout=0.0, **length).double()
    task, cache = Language(context=5, restart=3).open(str(text(tmp_path))).fit(network.value), None

    @torch.no_grad()
    def loss(batch, cache):
        total, after = task.objective.loss_with_cache(network, batch, "auto", cache)
        return float(total), after

    for step in range(4):
        batch, losses = task.data.batch(step, 3, 0), []
        for row in range(3):
            begins = cache is None or bool(batch["restart_B"][row])
            tokens = Batch({"token_BT": batch["token_BT"][row : row + 1]})
            losses.append(loss(tokens, None if begins else cache.reorder(torch.tensor([row])))[0])
        total, cache = loss(batch, cache)
        assert total == pytest.approx(sum(losses), rel=1e-6)


def test_a_trained_memory_can_begin(tmp_path):
    """From an empty memory a token costs little more than one in the middle of the text, and what few tokens leave open."""
    period = np.random.default_rng(0).integers(0, 8, 23) + ord("a")
    (tmp_path / "period.txt").write_bytes(bytes(np.tile(period, 200).astype(np.uint8)))
    task = Language(context=8, restart=4)
    start = Recipe(member="transformer-xl", size="tiny", task=task, data=str(tmp_path / "period.txt"))
    sizes = ["model.width=32", "model.layers=1", "model.memory=8", "model.dropout=0", "run.batch=8", "run.device=cpu"]
    run = train(override(start, [*sizes, "run.steps=80", "run.evaluate=0", "optim.warmup=10", "optim.lr=5e-3"]))
    bits = bits_by_position(run.network, run.task.data.splits["valid"], 8, windows=200)
    for position, cost in enumerate(bits):
        assert cost < open_bits(period, position + 1) + run.metrics["bits_per_byte"] + 0.6, bits


def open_bits(period, known):
    """The entropy of the next letter of a periodic text, given that many letters before it."""
    text = np.tile(period, 3).tolist()
    following: dict[tuple[int, ...], list[int]] = {}
    for start in range(len(period)):
        following.setdefault(tuple(text[start : start + known]), []).append(text[start + known])
    shares = ([some.count(one) / len(some) for one in set(some)] for some in following.values())
    entropies = [-sum(share * np.log2(share) for share in some) for some in shares]
    return sum(len(some) * entropy for some, entropy in zip(following.values(), entropies, strict=True)) / len(period)


@pytest.mark.spec(86)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_loop_carries_the_cache_from_step_to_step(tmp_path, accumulate):
    """The loss of a step equals that of reading all segments so far, each with the cache of those before."""

    def keep(record):
        if record["kind"] == "step":
            losses.append(record["loss"])

    losses: list[float] = []
    data = text(tmp_path)
    still = (
        "optim.lr=1e-12",
        "model.dropout=0.0",
        "task.restart=0",
        "run.evaluate=0",
        f"run.accumulate={accumulate}",
        "run.steps=4",
    )
    run = train(recipe(data, *still), callbacks=(keep,))
    cache = Cache(segment_memory=True)
    for step, loss in enumerate(losses):
        token_BT = run.task.data.batch(step, 4, 0)["token_BT"]
        with torch.no_grad():
            output, alone = run.network(token_BT[:, :-1], cache=cache), run.network(token_BT[:, :-1])
        cache = output.cache
        expected, other = (
            float(F.cross_entropy(one.logits.flatten(0, 1), token_BT[:, 1:].flatten())) for one in (output, alone)
        )
        assert loss == pytest.approx(expected, rel=1e-6)
        assert (step == 0) == (abs(other - expected) < 1e-5)  # the cache matters
    assert len(losses) == 4 and cache.length == 8


@pytest.mark.spec(86)
@pytest.mark.parametrize("settings", [(), ("run.accumulate=2", "run.batch_schedule=[[3, 6]]")], ids=["plain", "pieces"])
def test_a_resumed_run_restores_the_cache(tmp_path, settings):
    """Resumed from any step, its weights and its cache are bitwise equal."""
    data = text(tmp_path)
    train(recipe(data, *settings), tmp_path / "whole")
    train(recipe(data, *settings), tmp_path / "cut")
    for step in (4, 6):
        for file in checkpoint.path_of(tmp_path / "cut", step).iterdir():
            file.unlink()
        checkpoint.path_of(tmp_path / "cut", step).rmdir()
    resume(tmp_path / "cut")
    one, two = (checkpoint.path_of(tmp_path / name, 6) for name in ("whole", "cut"))
    assert same(one, two, ("model", "optimizer", "ema", "cache"))
    carried = load_file(one / "cache.safetensors")
    assert carried["inputs.1"].shape == (4 if not settings else 6, 8, 16)


def test_without_its_cache_a_resumed_run_has_other_weights(tmp_path, monkeypatch):
    """So the test above would notice a lost cache."""
    data = text(tmp_path)
    whole = train(recipe(data), tmp_path / "whole")
    train(recipe(data, "run.steps=3"), tmp_path / "cut")
    monkeypatch.setattr(checkpoint, "load_extra", lambda folder, step, name: {})
    again = resume(tmp_path / "cut", steps=6)
    pairs = zip(whole.network.parameters(), again.network.parameters(), strict=True)
    assert not all(torch.equal(one, two) for one, two in pairs)


def test_the_cache_of_a_skipped_step_is_dropped(tmp_path, monkeypatch):
    original = LanguageObjective.loss_with_cache

    def broken(task, network, batch, kernel, cache):
        calls.append(cache)
        loss, cache = original(task, network, batch, kernel, cache)
        if len(calls) == 3:
            entries = tuple(entry.map(lambda x: x * float("nan")) for entry in cache.entries)
            return loss * float("nan"), replace(cache, entries=entries)
        return loss, cache

    calls: list[Cache | None] = []
    kinds: list[str] = []
    monkeypatch.setattr(LanguageObjective, "loss_with_cache", broken)
    train(recipe(text(tmp_path)), callbacks=(lambda record: kinds.append(record["kind"]),))
    assert kinds.count("skip") == 1 and kinds.count("step") == 6
    assert [cache is None for cache in calls] == [True, False, False, True, False, False]


@pytest.mark.spec(88, 89)
def test_streaming_evaluation_reads_each_token_once_and_equals_windows():
    """With a mask of equal length both are the same function."""
    network, token_N = small(memory=6, pattern="causal & window(6)"), np.random.default_rng(0).integers(0, 11, 41)
    read = []
    network.embed.register_forward_hook(lambda module, inputs, out: read.append(inputs[0].numel()))
    result, targets = streaming_nll(network, token_N, 7)
    assert sum(read) == 40
    read.clear()
    deep = 2 * 6  # the receptive field of two layers
    total, count = window_nll(network, token_N, deep, 1)
    assert result == pytest.approx(total, rel=1e-9) and targets == count == 40
    assert sum(read) > 8 * 40
    whole = F.cross_entropy(
        network(torch.from_numpy(token_N)[None, :-1]).logits[0], torch.from_numpy(token_N)[1:], reduction="sum"
    )
    assert result == pytest.approx(float(whole.detach()), rel=1e-9)


@pytest.mark.spec(88)
@pytest.mark.parametrize("rows, length", [(2, 101), (3, 101), (3, 115), (4, 116)])
def test_several_rows_score_each_target_once_and_equal_one_row(rows, length):
    """If the lead is as long as the receptive field."""
    network, token_N = small(memory=6, pattern="causal & window(6)"), np.random.default_rng(0).integers(0, 11, length)
    scored: list[int] = []
    estimate = Estimate(lambda n, _: scored.append(n))
    result, targets = streaming_nll(network, token_N, 7, rows=rows, lead=12, estimate=estimate)
    total, count = streaming_nll(network, token_N, 7)
    assert result == pytest.approx(total, rel=1e-9) and targets == count == scored[-1] == length - 1


@pytest.mark.parametrize("length", [2, 5])
def test_a_text_that_is_shorter_than_a_segment_is_read_at_once(length):
    network, token_N = small(memory=6), np.random.default_rng(0).integers(0, 11, length)
    whole = F.cross_entropy(
        network(torch.from_numpy(token_N)[None, :-1]).logits[0], torch.from_numpy(token_N)[1:], reduction="sum"
    )
    result, targets = streaming_nll(network, token_N, 7)
    assert result == pytest.approx(float(whole.detach()), rel=1e-9) and targets == length - 1


def test_without_a_lead_each_row_is_read_like_a_text_of_its_own():
    network, token_N = small(memory=6), np.random.default_rng(0).integers(0, 11, 29)
    parts = [streaming_nll(network, token_N[start : start + 15], 7)[0] for start in (0, 14)]
    result, targets = streaming_nll(network, token_N, 7, rows=2)
    assert result == pytest.approx(sum(parts), rel=1e-9) and targets == 28


def test_a_long_text_is_split_into_rows():
    assert streaming_rows(5_000_000, 128, 512) == (32, 512)
    assert streaming_rows(100_000, 128, 512) == (6, 512)
    assert streaming_rows(30_000, 128, 512) == (1, 0)
    with pytest.raises(ValueError, match=r"100 targets in 2 rows with a lead of 98: give fewer rows, or 1"):
        streaming_nll(small(memory=6), np.zeros(101, int), 7, rows=2, lead=98)


@pytest.mark.parametrize("limit", [12_800, 3_200, 640])
def test_a_limited_evaluation_of_a_model_with_a_memory_is_spread_over_the_text(limit):
    count, segment = 98_896, 64
    estimate, network = Estimate(), small(memory=6, pattern="causal & window(6)")
    rows, lead = streaming_rows(count, segment, 64, limit)
    _, scored = streaming_nll(
        network, np.zeros(count + 1, int), segment, rows=rows, lead=lead, limit=limit, estimate=estimate
    )
    tenth_N = np.bincount(estimate.target_indices() * 10 // (count + 1), minlength=10)
    assert scored <= limit and tenth_N.min() > 0 and tenth_N.max() <= scored / 5


@pytest.mark.spec(88)
def test_a_longer_memory_in_evaluation_changes_the_metrics_and_is_reported(tmp_path):
    data = text(tmp_path)
    train(recipe(data), tmp_path / "run")
    plain, longer = (load(tmp_path / "run", device="cpu", **how) for how in ({}, {"memory": 20, "stride": 3}))
    first, second = (one.evaluate(limit=10) for one in (plain, longer))
    assert (first["segment"], first["memory"], first["targets"]) == (5, 8, 50)
    assert first["start"] == "with an empty memory, then carried over"
    assert (second["segment"], second["memory"], second["targets"]) == (3, 20, 50)
    assert first["bits_per_byte"] != second["bits_per_byte"] and math.isfinite(second["bits_per_byte"])
    assert plain.generate("the quick", tokens=5, temperature=0.0).startswith("the quick")


@pytest.mark.spec(88)
def test_generation_attends_to_the_length_of_the_memory():
    """With a mask of equal length the next token equals that of the whole text; prompts may differ in length."""
    network, prompts = small(memory=5, pattern="causal & window(5)"), [[1, 2, 3, 4, 5, 6, 7, 8], [9, 3, 1]]
    result = generate(network, prompts, 12, temperature=0.0)
    for row, prompt in zip(result, prompts, strict=True):
        expected = list(prompt)
        for _ in range(12):
            expected.append(int(network(torch.tensor([expected])).logits[0, -1].argmax()))
        assert row == expected
    for wrong in ({"cached": False}, {"context": 4}):
        with pytest.raises(ValueError, match="outputs of a model with a segment memory depend on that memory"):
            generate(network, prompts, 1, **wrong)
