"""Translate: teacher forcing and label smoothing as literal loops, buckets, padding, and BLEU."""

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
    work = Translate(**({"vocabulary": 400} | fields)).open(data, None)
    torch.manual_seed(0)
    network = build("transformer", "tiny", vocabulary=work.tokenizer.vocabulary).eval()
    work.fit(network.value)
    return work, network


@pytest.fixture(scope="module")
def plain(cache_folder):
    return opened(smoothing=0.0, longest=40)


@pytest.mark.spec(62)
def test_the_decoder_is_given_the_target_so_far(plain):
    """[CLS] y_1 ... y_n in, y_1 ... y_n [SEP] out; a source ends in [SEP]."""
    work, _ = plain
    sources, targets = work.sides("train")
    batch = work.batch(0, 8, 0)
    rows = work.order(0, 8, 0)[0].tolist()
    for row, given, target, seen, source, source_seen in zip(
        rows,
        *(batch[name].tolist() for name in ("given_BT", "target_BT", "visible_BT", "source_BS", "source_visible_BS")),
        strict=True,
    ):
        length = sum(seen)
        assert target[:length] == [*targets[row].tolist(), END]
        for t in range(length):
            assert given[t] == (START if t == 0 else target[t - 1])
        assert source[: sum(source_seen)] == sources[row].tolist()
        assert source[sum(source_seen) - 1] == END


@pytest.mark.spec(62)
def test_the_loss_is_that_of_each_token_from_its_prefix(plain):
    """Every prefix alone, without padding, through encoder and decoder: -log p of the token that comes next."""
    work, network = plain
    batch = work.batch(5, 3, 0)
    total = 0.0
    with torch.no_grad():
        for row in range(3):
            source = batch["source_BS"][row : row + 1][:, batch["source_visible_BS"][row]]
            target = batch["target_BT"][row][batch["visible_BT"][row]].tolist()
            for t in range(len(target)):
                logits = network(source, torch.tensor([[START, *target[:t]]])).logits[0, -1]
                total -= float(logits.log_softmax(-1)[target[t]])
        loss = float(work.loss(network, batch, "auto"))
    assert loss == pytest.approx(total, rel=1e-5)
    assert work.count(batch) == int(batch["visible_BT"].sum())


def test_padding_and_neighbours_change_no_loss(plain):
    work, network = plain
    batch = work._pairs("train", sorted(range(40), key=lambda row: len(work.sides("train")[1][row]))[::8])
    assert not bool(batch["visible_BT"].all()) and not bool(batch["source_visible_BS"].all())
    other = {name: x.clone() for name, x in batch.tensors.items()}
    other["source_BS"][~batch["source_visible_BS"]] = 9
    other["given_BT"][~batch["visible_BT"]] = 9
    other["target_BT"][~batch["visible_BT"]] = 9
    with torch.no_grad():
        whole = float(work.loss(network, batch, "auto"))
        assert float(work.loss(network, type(batch)(other), "auto")) == pytest.approx(whole, rel=1e-6)
        assert sum(float(work.loss(network, batch.rows(n, n + 1), "auto")) for n in range(5)) == pytest.approx(
            whole, rel=1e-5
        )


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.3])
def test_label_smoothing_is_its_formula(smoothing):
    """(1 - e) (-log p(y)) + e / V sum_v -log p(v), at every token."""
    work, _ = opened(smoothing=smoothing)
    batch = work.batch(0, 4, 0)
    size = work.tokenizer.vocabulary
    logits_BTV = torch.randn(*batch["given_BT"].shape, size, generator=torch.Generator().manual_seed(0))
    network = lambda *_, **__: Output(logits_BTV, logits_BTV)  # noqa: E731
    smooth = plain = 0.0
    for row in range(4):
        for t in range(int(batch["visible_BT"][row].sum())):
            log_V = logits_BTV[row, t].log_softmax(-1)
            token = -float(log_V[batch["target_BT"][row, t]])
            smooth += (1 - smoothing) * token + smoothing / size * -float(log_V.sum())
            plain += token
    assert float(work.loss(network, batch, "auto")) == pytest.approx(smooth, rel=1e-5)
    _, answer_NV, target_N = work._answer(network, batch, "auto")
    assert float(F.cross_entropy(answer_NV, target_N, reduction="sum")) == pytest.approx(plain, rel=1e-5)


def test_batches_are_of_like_lengths_and_follow_from_seed_and_step(plain):
    work, _ = plain
    other, _ = opened(smoothing=0.0, longest=40)
    steps = work.examples() // 16
    epoch = [work.order(0, 16, 7)[step].tolist() for step in range(steps)]
    rows = [row for batch in epoch for row in batch]
    assert len(rows) == len(set(rows)) > work.examples() - 16  # once each, but for what is left over
    lengths = np.array([len(one) for one in work.sides("train")[1]])
    spread = np.mean([lengths[batch].max() - lengths[batch].min() for batch in epoch])
    random = np.mean([np.ptp(np.random.RandomState(n).choice(lengths, 16)) for n in range(steps)])
    assert spread < random / 3
    firsts = [lengths[batch].mean() for batch in epoch]
    assert abs(np.corrcoef(firsts, np.arange(steps))[0, 1]) < 0.3  # in an order of no length
    for step in (0, 3, steps, 5 * steps + 1):
        assert torch.equal(work.batch(step, 16, 7)["source_BS"], other.batch(step, 16, 7)["source_BS"])
    assert work.order(1, 16, 7).tolist() != work.order(0, 16, 7).tolist() != work.order(0, 16, 8).tolist()


def test_perplexity_is_of_the_loss_without_smoothing():
    work, network = opened(smoothing=0.2)
    found = work.evaluate(network, "valid", 20, "auto")
    sources, targets = work.pairs.splits["valid"]
    assert found["perplexity"] == pytest.approx(np.exp(found["loss"]))
    assert found["smoothed_loss"] != pytest.approx(found["loss"], rel=1e-3)
    assert found["pairs"] == 20 and "bleu" not in found
    count = sum(len(ids) + 1 for ids in work.tokenizer.encode_all(targets[:20]))
    assert found["targets"] == count
    assert len(sources) == 500


def test_bleu_comes_with_its_signature(plain, monkeypatch):
    work, network = plain
    sources, targets = work.pairs.splits["valid"]
    known = dict(zip(sources, targets, strict=True))
    monkeypatch.setattr(work, "translate", lambda network, texts, beam=None: [known[text] for text in texts])
    found = work.bleu(network, "valid")
    assert found["bleu"] == pytest.approx(100)
    assert found["bleu_signature"].startswith("nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:")
    monkeypatch.setattr(work, "translate", lambda network, texts, beam=None: [known[text][3:] for text in texts])
    assert 0 < work.bleu(network, "valid")["bleu"] < 90


def test_translations_come_in_the_order_of_their_sources(plain):
    """Batched by length, but each equal to that of its sentence alone."""
    work, network = plain
    texts = work.pairs.splits["valid"][0][:4]
    assert work.translate(network, texts, beam=1) == [work.translate(network, [text], beam=1)[0] for text in texts]
    assert work.write(network, texts[0], beam=1) == work.translate(network, texts[:1], beam=1)[0]
    with pytest.raises(ValueError, match="nothing to translate"):
        work.write(network, "\n")


def test_test_sets_are_splits_by_their_names(tmp_path):
    for name in ("train", "val", "test_2016", "test_2017"):
        for side in ("en", "de"):
            (tmp_path / f"{name}.{side}").write_text("".join(f"{name} {side} {n}\n" for n in range(30)))
    work = Translate(vocabulary=300).open(str(tmp_path), None)
    assert work._split("test") == "test_2016"
    assert work._split("test_2017") == "test_2017"
    with pytest.raises(ValueError, match="has no split 'test_2018'; it has"):
        work._split("test_2018")


def test_long_pairs_are_left_out_and_long_sources_cut(tmp_path):
    lines = ["a b c", "a " * 50, "b c", "c a"]
    for side in ("en", "de"):
        (tmp_path / f"train.{side}").write_text("\n".join(lines))
        (tmp_path / f"val.{side}").write_text("\n".join(lines))
    work = Translate(vocabulary=300, longest=12).open(str(tmp_path), None)
    assert work.examples() == 3
    assert max(map(len, work.sides("valid")[0])) == 12
    with pytest.raises(ValueError, match=r"0 of the 4 pairs of .* have fewer than 1 tokens; raise task\.longest"):
        Translate(vocabulary=300, longest=1).open(str(tmp_path), None).examples()


def test_models_that_do_not_fit_are_refused():
    work = Translate(vocabulary=400).open(None, None)
    with pytest.raises(ValueError, match="needs an encoder and a decoder; choose the member transformer"):
        work.fit(build("gpt2", "tiny").value)
    with pytest.raises(ValueError, match=r"has 400 tokens, but the model knows 256; set model\.vocabulary"):
        work.fit(build("transformer", "tiny").value)


@pytest.fixture
def few(monkeypatch):
    """Few pairs of digits, and short ones."""
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


def test_what_is_right_is_told_by_length_and_whole_sequences_are_those_it_writes(few):
    """The characters by hand, the target so far being given; nothing of a long source is cut."""
    work, network = opened("addition")
    assert (
        work.tokenizer.vocabulary == 5 + 11 and work.tokenizer.decode(work.sides("test150")[0][0][:-1]).count("+") == 1
    )
    found = work.evaluate(network, "test", None, "auto")
    for length in synthetic.TEST_LENGTHS:
        right = whole = count = 0
        for source, target in zip(*work.sides(f"test{length}"), strict=True):
            with torch.no_grad():
                given = torch.tensor([[START, *target.tolist()]])
                told = network(torch.from_numpy(source.astype(np.int64))[None], given).logits.argmax(-1)[0]
            hits = (told == torch.tensor([*target.tolist(), END])).tolist()
            right, whole, count = right + sum(hits), whole + all(hits), count + len(hits)
        assert found[f"character_accuracy_{length}"] == pytest.approx(right / count)
        assert found[f"sequence_accuracy_{length}"] == whole / 2
    # One that has learned by heart is right where what it writes is right.
    work, network = opened("copy", smoothing=0.0)
    rows = sorted(range(40), key=lambda row: len(work.pairs.splits["train"][0][row]))[2:6]
    learn(work, network, rows[:2])
    right = []
    for row in rows:
        source, target = (side[row] for side in work.pairs.splits["train"])
        right.append(work.translate(network, [source], beam=1) == [target])
        batch = work._pairs("train", [row])
        told = network(batch["source_BS"], batch["given_BT"], visible=batch["visible_BT"]).logits.argmax(-1)
        assert bool(((told == batch["target_BT"]) | ~batch["visible_BT"]).all()) == right[-1]
    assert right[:2] == [True, True]


def test_the_steps_of_halting_sides_are_told_without_padding(few):
    work, _ = opened("copy")
    network = build("universal-transformer", "tiny-pair", vocabulary=work.tokenizer.vocabulary, bias=-2.0).eval()
    network.encoder.body.unit.bias.data.fill_(9.0)  # halts at once
    found = work.evaluate(network, "valid", None, "auto")
    assert found["encoder_steps"] == 1 and found["decoder_steps"] == 3
    assert work.evaluate(network, "test", None, "auto")["decoder_steps_150"] == 3
    assert "encoder_steps" not in work.evaluate(opened("copy")[1], "valid", None, "auto")


def test_characters_and_the_marks_before_them_are_kept_with_a_run(few, tmp_path):
    work, _ = opened("reverse")
    work.save(tmp_path)
    again = Translate().open("reverse", None, tmp_path)
    assert again.tokenizer.key == work.tokenizer.key and again.tokenizer.special_id("[SEP]") == END
    assert again.tokenizer.decode(again.tokenizer.encode(b"2024")) == "2024"
    alone = Translate(source="fr").reopen("reverse", None, tmp_path)
    network = build("transformer", "tiny", vocabulary=work.tokenizer.vocabulary)
    assert len(alone.write(network, "20")) <= 3  # as long as what it is given, and an end
    plain, _ = opened(tokenizer="characters")  # of sentences too
    assert (
        plain.tokenizer.decode(plain.tokenizer.encode(b"red apples")) == "red apples"
        and plain.tokenizer.vocabulary < 80
    )


def learn(work, network, rows):
    optimizer = torch.optim.Adam(network.parameters(), 3e-3)
    for _ in range(40):
        optimizer.zero_grad()
        (work.loss(network, work._pairs("train", rows), "auto") / 20).backward()
        optimizer.step()


def test_positions_begin_anywhere_in_training_alone(few):
    """At one place for source and target, drawn from seed and step; the loss is of those positions."""
    work, network = opened("copy", shift=300, smoothing=0.0)
    batch, again = work.batch(3, 4, 0), work.batch(3, 4, 0)
    assert torch.equal(batch["begin_B"], again["begin_B"]) and len(set(batch["begin_B"].tolist())) > 1
    assert "begin_B" not in work._pairs("valid", [0, 1]).tensors
    seen: list[torch.Tensor] = []
    for side in (network.encoder, network.decoder):
        side.position.register_forward_pre_hook(lambda _, given: seen.append(given[1]))
    moved = work.loss(network, batch, "auto").item()
    for name, position_BT in zip(("source_visible_BS", "visible_BT"), seen, strict=True):
        visible = batch[name]
        wanted = batch["begin_B"][:, None] + visible.long().cumsum(1) - 1
        assert torch.equal(position_BT[visible], wanted[visible])
    plain = {name: x for name, x in batch.tensors.items() if name != "begin_B"}
    assert work.loss(network, type(batch)(plain), "auto").item() != moved
    with pytest.raises(ValueError, match=r"task.shift moves positions, but the model has a table of 9"):
        work.fit(tabled(network.value))


def tabled(pair):
    sides = (replace(side, position=Learned(9)) for side in (pair.encoder, pair.decoder))
    return replace(pair, **dict(zip(("encoder", "decoder"), sides, strict=True)))
