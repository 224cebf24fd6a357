"""Translate: teacher forcing and label smoothing equal literal loops; batches by length, padding, and BLEU."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch.nn import functional as F

from everyformer import Learned, Output, build
from everyformer.data import synthetic
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


@pytest.fixture
def few(monkeypatch):
    """Few and short pairs of digits."""
    monkeypatch.setattr(synthetic, "TEST_LENGTHS", (40, 150))
    monkeypatch.setattr(synthetic, "algorithm", partial(synthetic.algorithm, count=40, held_out=2))


@pytest.mark.parametrize("name", synthetic.ALGORITHMS)
def test_digits_are_copied_reversed_and_added(name):
    parts = synthetic.algorithm(name, count=50, held_out=5)
    assert parts == synthetic.algorithm(name, count=50, held_out=5)  # deterministic
    assert [len(sources) for sources, _ in parts.values()] == [50] + [5] * 6
    for split, (sources, targets) in parts.items():
        for source, target in zip(sources, targets, strict=True):
            assert len(source) == int(split[4:]) if split.startswith("test") else 1 <= len(source) <= 40
            if name == "addition":  # the last digit first
                one, two = source.split("+")
                assert int(target[::-1]) == int(one[::-1]) + int(two[::-1])
            else:
                assert target == (source if name == "copy" else source[::-1])


def test_accuracies_are_reported_by_length_and_whole_sequences_equal_generated_ones(few):
    """Equals a loop over characters with the true prefix given; long sources are not truncated."""
    task, network = opened("addition")
    assert (
        task.data.tokenizer.vocabulary == 5 + 11
        and task.data.tokenizer.decode(task.data.sides("test150")[0][0][:-1]).count("+") == 1
    )
    metrics = task.objective.evaluate(network, "test", None, "auto")
    for length in synthetic.TEST_LENGTHS:
        right = whole = count = 0
        for source, target in zip(*task.data.sides(f"test{length}"), strict=True):
            with torch.no_grad():
                inputs = torch.tensor([[START, *target.tolist()]])
                predicted = network(torch.from_numpy(source.astype(np.int64))[None], inputs).logits.argmax(-1)[0]
            hits = (predicted == torch.tensor([*target.tolist(), END])).tolist()
            right, whole, count = right + sum(hits), whole + all(hits), count + len(hits)
        assert metrics[f"character_accuracy_{length}"] == pytest.approx(right / count)
        assert metrics[f"sequence_accuracy_{length}"] == whole / 2
    # A memorized pair is right in both ways of counting.
    task, network = opened("copy", smoothing=0.0)
    rows = sorted(range(40), key=lambda row: len(task.data.pairs.splits["train"][0][row]))[2:6]
    memorize(task, network, rows[:2])
    right = []
    for row in rows:
        source, target = (side[row] for side in task.data.pairs.splits["train"])
        right.append(task.inference.translate(network, [source], beam=1) == [target])
        batch = task.data.batch_of("train", [row])
        predicted = network(batch["source_BS"], batch["input_BT"], visible=batch["visible_BT"]).logits.argmax(-1)
        assert bool(((predicted == batch["target_BT"]) | ~batch["visible_BT"]).all()) == right[-1]
    assert right[:2] == [True, True]


def test_the_steps_per_token_of_encoder_and_decoder_are_reported_without_padding(few):
    task, _ = opened("copy")
    network = build("universal-transformer", "tiny-pair", vocabulary=task.data.tokenizer.vocabulary, bias=-2.0).eval()
    network.encoder.body.unit.bias.data.fill_(9.0)  # halts at once
    metrics = task.objective.evaluate(network, "valid", None, "auto")
    assert metrics["encoder_steps"] == 1 and metrics["decoder_steps"] == 3
    assert task.objective.evaluate(network, "test", None, "auto")["decoder_steps_150"] == 3
    assert "encoder_steps" not in task.objective.evaluate(opened("copy")[1], "valid", None, "auto")


def test_the_character_tokenizer_is_saved_with_a_run(few, tmp_path):
    task, _ = opened("reverse")
    task.data.save(tmp_path)
    again = Translate().open("reverse", tmp_path)
    assert again.tokenizer.key == task.data.tokenizer.key and again.tokenizer.special_id("[SEP]") == END
    assert again.tokenizer.decode(again.tokenizer.encode(b"2024")) == "2024"
    alone = Translate(source="fr").open_for_inference("reverse", tmp_path)
    network = build("transformer", "tiny", vocabulary=task.data.tokenizer.vocabulary)
    assert (
        len(alone.fit(network.value).inference.generate_text(network, "20")) <= 3
    )  # the length of the source, and an end
    plain, _ = opened(tokenizer="characters")  # of sentences too
    assert (
        plain.data.tokenizer.decode(plain.data.tokenizer.encode(b"red apples")) == "red apples"
        and plain.data.tokenizer.vocabulary < 80
    )


def memorize(task, network, rows):
    optimizer = torch.optim.Adam(network.parameters(), 3e-3)
    for _ in range(40):
        optimizer.zero_grad()
        (task.objective.loss(network, task.data.batch_of("train", rows), "auto") / 20).backward()
        optimizer.step()


def test_random_position_offsets_are_used_in_training_only(few):
    """The offsets are equal for source and target, and a function of seed and step."""
    task, network = opened("copy", shift=300, smoothing=0.0)
    batch, again = task.data.batch(3, 4, 0), task.data.batch(3, 4, 0)
    assert torch.equal(batch["offset_B"], again["offset_B"]) and len(set(batch["offset_B"].tolist())) > 1
    assert "offset_B" not in task.data.batch_of("valid", [0, 1]).tensors
    positions: list[torch.Tensor] = []
    for side in (network.encoder, network.decoder):
        side.position.register_forward_pre_hook(lambda _, inputs: positions.append(inputs[1]))
    moved = task.objective.loss(network, batch, "auto").item()
    for name, position_BT in zip(("source_visible_BS", "visible_BT"), positions, strict=True):
        visible = batch[name]
        expected = batch["offset_B"][:, None] + visible.long().cumsum(1) - 1
        assert torch.equal(position_BT[visible], expected[visible])
    plain = {name: x for name, x in batch.tensors.items() if name != "offset_B"}
    assert task.objective.loss(network, type(batch)(plain), "auto").item() != moved
    with pytest.raises(ValueError, match=r"task.shift offsets positions, but the model has a table of 9"):
        task.data.fit(tabled(network.value))


def tabled(pair):
    sides = (replace(side, position=Learned(9)) for side in (pair.encoder, pair.decoder))
    return replace(pair, **dict(zip(("encoder", "decoder"), sides, strict=True)))
