"""Translate: teacher forcing and label smoothing equal literal loops; batches by length, padding, and BLEU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from everyformer import Output, build
from everyformer.task.translate import END, START, Translate


def opened(data=None, **fields):
    task_data = Translate(**({"vocabulary": 400} | fields)).open(data, None)
    torch.manual_seed(0)
    network = build("transformer", "tiny", vocabulary=task_data.tokenizer.vocabulary).eval()
    return task_data.fit(network.value), network


@pytest.fixture(scope="module")
def plain(cache_folder):
    return opened(smoothing=0.0, context=40)


@pytest.mark.spec(62)
def test_the_decoder_reads_the_target_shifted_by_one(plain):
    """[CLS] y_1 ... y_n in, y_1 ... y_n [SEP] out; a source ends in [SEP]."""
    task, _ = plain
    sources, targets = task.data.sides("train")
    batch = task.data.batch(0, 8, 0)
    rows = task.data.epoch_batches(0, 8, 0)[0].tolist()
    for row, inputs, target, visible, source, source_visible in zip(
        rows,
        *(batch[name].tolist() for name in ("input_BT", "target_BT", "visible_BT", "source_BS", "source_visible_BS")),
        strict=True,
    ):
        length = sum(visible)
        assert target[:length] == [*targets[row].tolist(), END]
        for t in range(length):
            assert inputs[t] == (START if t == 0 else target[t - 1])
        assert source[: sum(source_visible)] == sources[row].tolist()
        assert source[sum(source_visible) - 1] == END


@pytest.mark.spec(62)
def test_the_loss_equals_that_of_every_prefix_computed_alone(plain):
    """The sum of -log p of the next token after every prefix, without padding."""
    task, network = plain
    batch = task.data.batch(5, 3, 0)
    total = 0.0
    with torch.no_grad():
        for row in range(3):
            source = batch["source_BS"][row : row + 1][:, batch["source_visible_BS"][row]]
            target = batch["target_BT"][row][batch["visible_BT"][row]].tolist()
            for t in range(len(target)):
                logits = network(source, torch.tensor([[START, *target[:t]]])).logits[0, -1]
                total -= float(logits.log_softmax(-1)[target[t]])
        loss = float(task.objective.loss(network, batch, "auto"))
    assert loss == pytest.approx(total, rel=1e-5)
    assert task.data.count(batch) == int(batch["visible_BT"].sum())


def test_padding_and_other_rows_do_not_change_the_loss(plain):
    task, network = plain
    batch = task.data.batch_of("train", sorted(range(40), key=lambda row: len(task.data.sides("train")[1][row]))[::8])
    assert not bool(batch["visible_BT"].all()) and not bool(batch["source_visible_BS"].all())
    other = {name: x.clone() for name, x in batch.tensors.items()}
    other["source_BS"][~batch["source_visible_BS"]] = 9
    other["input_BT"][~batch["visible_BT"]] = 9
    other["target_BT"][~batch["visible_BT"]] = 9
    with torch.no_grad():
        whole = float(task.objective.loss(network, batch, "auto"))
        assert float(task.objective.loss(network, type(batch)(other), "auto")) == pytest.approx(whole, rel=1e-6)
        assert sum(
            float(task.objective.loss(network, batch.rows(n, n + 1), "auto")) for n in range(5)
        ) == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.3])
def test_label_smoothing_equals_its_formula(smoothing):
    """(1 - e) (-log p(y)) + e / V sum_v -log p(v), at every token."""
    task, _ = opened(smoothing=smoothing)
    batch = task.data.batch(0, 4, 0)
    size = task.data.tokenizer.vocabulary
    logits_BTV = torch.randn(*batch["input_BT"].shape, size, generator=torch.Generator().manual_seed(0))
    network = lambda *_, **__: Output(logits_BTV, logits_BTV)  # noqa: E731
    smooth = plain = 0.0
    for row in range(4):
        for t in range(int(batch["visible_BT"][row].sum())):
            log_V = logits_BTV[row, t].log_softmax(-1)
            token = -float(log_V[batch["target_BT"][row, t]])
            smooth += (1 - smoothing) * token + smoothing / size * -float(log_V.sum())
            plain += token
    assert float(task.objective.loss(network, batch, "auto")) == pytest.approx(smooth, rel=1e-5)
    _, logits_NV, target_N = task.objective.forward(network, batch, "auto")
    assert float(F.cross_entropy(logits_NV, target_N, reduction="sum")) == pytest.approx(plain, rel=1e-5)


def test_batches_have_similar_lengths_and_are_a_function_of_seed_and_step(plain):
    task, _ = plain
    other, _ = opened(smoothing=0.0, context=40)
    steps = task.data.examples() // 16
    epoch = [task.data.epoch_batches(0, 16, 7)[step].tolist() for step in range(steps)]
    rows = [row for batch in epoch for row in batch]
    assert len(rows) == len(set(rows)) > task.data.examples() - 16  # each once, except an incomplete batch
    lengths = np.array([len(one) for one in task.data.sides("train")[1]])
    spread = np.mean([lengths[batch].max() - lengths[batch].min() for batch in epoch])
    random = np.mean([np.ptp(np.random.RandomState(n).choice(lengths, 16)) for n in range(steps)])
    assert spread < random / 3
    firsts = [lengths[batch].mean() for batch in epoch]
    assert abs(np.corrcoef(firsts, np.arange(steps))[0, 1]) < 0.3  # batches are not sorted by length
    for step in (0, 3, steps, 5 * steps + 1):
        assert torch.equal(task.data.batch(step, 16, 7)["source_BS"], other.data.batch(step, 16, 7)["source_BS"])
    assert (
        task.data.epoch_batches(1, 16, 7).tolist()
        != task.data.epoch_batches(0, 16, 7).tolist()
        != task.data.epoch_batches(0, 16, 8).tolist()
    )


def test_perplexity_is_computed_without_label_smoothing():
    task, network = opened(smoothing=0.2)
    metrics = task.objective.evaluate(network, "valid", 20, "auto")
    sources, targets = task.data.pairs.splits["valid"]
    assert metrics["perplexity"] == pytest.approx(np.exp(metrics["loss"]))
    assert metrics["smoothed_loss"] != pytest.approx(metrics["loss"], rel=1e-3)
    assert metrics["pairs"] == 20 and "bleu" not in metrics
    count = sum(len(ids) + 1 for ids in task.data.tokenizer.encode_all(targets[::25]))
    assert metrics["targets"] == count and metrics["low"] < metrics["perplexity"] < metrics["high"]
    assert len(sources) == 500


def test_bleu_has_its_signature(plain, monkeypatch):
    task, network = plain
    sources, targets = task.data.pairs.splits["valid"]
    known = dict(zip(sources, targets, strict=True))
    monkeypatch.setattr(task.inference, "translate", lambda network, texts, beam=None: [known[text] for text in texts])
    metrics = task.objective.bleu(network, "valid")
    assert metrics["bleu"] == pytest.approx(100)
    assert metrics["bleu_signature"].startswith("nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:")
    monkeypatch.setattr(
        task.inference, "translate", lambda network, texts, beam=None: [known[text][3:] for text in texts]
    )
    assert 0 < task.objective.bleu(network, "valid")["bleu"] < 90


def test_translations_are_in_the_order_of_their_sources(plain):
    """They are batched by length, but each equals the translation of its sentence alone."""
    task, network = plain
    texts = task.data.pairs.splits["valid"][0][:4]
    assert task.inference.translate(network, texts, beam=1) == [
        task.inference.translate(network, [text], beam=1)[0] for text in texts
    ]
    assert (
        task.inference.generate_text(network, texts[0], beam=1)
        == task.inference.translate(network, texts[:1], beam=1)[0]
    )
    with pytest.raises(ValueError, match="has nothing to translate"):
        task.inference.generate_text(network, "\n")


def test_test_sets_are_splits_with_their_names(tmp_path):
    for name in ("train", "val", "test_2016", "test_2017"):
        for side in ("en", "de"):
            (tmp_path / f"{name}.{side}").write_text("".join(f"{name} {side} {n}\n" for n in range(30)))
    data = Translate(vocabulary=300).open(str(tmp_path), None)
    assert data.find_split("test") == "test_2016"
    assert data.find_split("test_2017") == "test_2017"
    with pytest.raises(ValueError, match="has no split 'test_2018'; it has"):
        data.find_split("test_2018")


def test_long_training_pairs_are_left_out_and_long_sources_truncated(tmp_path):
    lines = ["a b c", "a " * 50, "b c", "c a"]
    for side in ("en", "de"):
        (tmp_path / f"train.{side}").write_text("\n".join(lines))
        (tmp_path / f"val.{side}").write_text("\n".join(lines))
    data = Translate(vocabulary=300, context=12).open(str(tmp_path), None)
    assert data.examples() == 3
    assert max(map(len, data.sides("valid")[0])) == 12
    with pytest.raises(ValueError, match=r"0 of the 4 pairs of .* have fewer than 1 tokens; raise task\.context"):
        Translate(vocabulary=300, context=1).open(str(tmp_path), None).examples()


def test_unsuitable_models_are_refused():
    data = Translate(vocabulary=400).open(None, None)
    with pytest.raises(ValueError, match="needs an encoder and a decoder; choose the member transformer"):
        data.fit(build("gpt2", "tiny").value)
    with pytest.raises(ValueError, match=r"has 400 tokens, but the model has 256; set model\.vocabulary"):
        data.fit(build("transformer", "tiny").value)


def test_a_character_tokenizer_reads_both_languages_and_is_saved_with_a_run(tmp_path):
    task, _ = opened(tokenizer="characters")
    task.data.save(tmp_path)
    again = Translate().open(None, tmp_path)
    assert again.tokenizer.key == task.data.tokenizer.key and again.tokenizer.special_id("[SEP]") == END
    assert again.tokenizer.decode(again.tokenizer.encode(b"red apples")) == "red apples"
    assert again.tokenizer.vocabulary < 80
