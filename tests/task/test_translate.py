"""Translate: teacher forcing and label smoothing as literal loops, buckets, padding, and BLEU."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from everyformer import build
from everyformer.task.translate import END, START, Translate


def opened(data=None, **fields):
    work = Translate(**({"vocabulary": 400} | fields)).open(data, None)
    torch.manual_seed(0)
    network = build("transformer", "tiny", vocabulary=work.tokenizer.vocabulary).eval()
    work.fit(network.value)
    return work, network


@pytest.fixture(scope="module")
def plain(cache):
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
    """(1 - e) (-log p(y)) + e / V sum_v -log p(v), at every token; and the loss without it is told as well."""
    work, _ = opened(smoothing=smoothing)
    batch = work.batch(0, 4, 0)
    size = work.tokenizer.vocabulary
    logits_BTV = torch.randn(*batch["given_BT"].shape, size, generator=torch.Generator().manual_seed(0))
    network = lambda *_, **__: SimpleNamespace(logits=logits_BTV, aux={})  # noqa: E731
    smooth = plain = 0.0
    for row in range(4):
        for t in range(int(batch["visible_BT"][row].sum())):
            log_V = logits_BTV[row, t].log_softmax(-1)
            token = -float(log_V[batch["target_BT"][row, t]])
            smooth += (1 - smoothing) * token + smoothing / size * -float(log_V.sum())
            plain += token
    assert float(work.loss(network, batch, "auto")) == pytest.approx(smooth, rel=1e-5)
    _, found, without = work._losses(network, batch, "auto")
    assert float(found) == pytest.approx(smooth, rel=1e-5)
    assert float(without) == pytest.approx(plain, rel=1e-5)


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
    assert work.write(network, texts[0], 0, beam=1) == work.translate(network, texts[:1], beam=1)[0]


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
