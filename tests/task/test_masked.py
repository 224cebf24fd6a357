"""Masked language modelling equals its definition, position by position and row by row."""

from __future__ import annotations

import pytest
import torch

from everyformer import Output, build
from everyformer.data.tokenizer import SPECIAL
from everyformer.network.linear_cross_entropy import NO_TARGET
from everyformer.task.batch import step_generator
from everyformer.task.masked import CLS, FIRST_WORD, MASK, SEP, Masked, mask

VOCABULARY = 300


def opened(context=48, **fields):
    """The task on three files of numbered sentences, whose order can be checked."""
    task_data = Masked(vocabulary=VOCABULARY, context=context, **fields).open(opened.data)
    return task_data.fit(build("bert", "tiny", vocabulary=task_data.tokenizer.vocabulary).value)


@pytest.fixture(autouse=True, scope="module")
def data(tmp_path_factory, cache_folder):
    folder = tmp_path_factory.mktemp("documents")
    for split, count in (("train", 60), ("valid", 30)):
        (folder / split).mkdir()
        for letter in "abc":
            lines = [f"{letter} {number // 10} {number % 10} says it" for number in range(count)]
            (folder / f"{split}.{letter}.txt").write_text("\n".join(lines))
    opened.data = str(folder)


def within(share, count, p):
    """Inside four times the std of a binomial: once in 16,000 draws outside by chance."""
    return abs(share - p) < 4 * (p * (1 - p) / count) ** 0.5


@pytest.mark.spec(66)
def test_tokens_are_masked_with_berts_probabilities():
    """15 % of each row's words; of these 80 % [MASK], 10 % random, 10 % unchanged."""
    random = step_generator(0, 0)
    token_BT = torch.randint(FIRST_WORD, VOCABULARY, (400, 100), generator=random)
    visible_BT = torch.ones_like(token_BT, dtype=torch.bool)
    input_BT, target_BT = mask(token_BT, visible_BT, 0.15, VOCABULARY, random)
    selected_BT = target_BT != NO_TARGET
    assert torch.equal(selected_BT.sum(1), torch.full((400,), 15))
    assert torch.equal(target_BT[selected_BT], token_BT[selected_BT])
    assert torch.equal(input_BT[~selected_BT], token_BT[~selected_BT])
    hidden = (input_BT == MASK)[selected_BT]
    unchanged = (input_BT == token_BT)[selected_BT]
    other = input_BT[selected_BT][~hidden & ~unchanged]
    count = int(selected_BT.sum())
    # A random word equals the original one with probability 1/V.
    same = 0.1 / (VOCABULARY - FIRST_WORD)
    assert within(float(hidden.float().mean()), count, 0.8)
    assert within(float(unchanged.float().mean()), count, 0.1 + same)
    assert within(len(other) / count, count, 0.1 - same)
    assert int(other.min()) >= FIRST_WORD and len(other.unique()) > 200
    # Every position is selected equally often.
    assert all(within(float(share), 400, 0.15) for share in selected_BT.float().mean(0))


@pytest.mark.spec(66)
def test_special_tokens_and_padding_are_never_selected():
    token_BT = torch.randint(0, 20, (200, 30), generator=step_generator(0, 1))
    visible_BT = torch.rand(200, 30, generator=step_generator(0, 2)) < 0.7
    visible_BT[:, 0] = True
    token_BT[:, 0] = 19  # a word at least
    input_BT, target_BT = mask(token_BT, visible_BT, 0.15, 20, step_generator(0, 3))
    selected_BT = target_BT != NO_TARGET
    assert bool((visible_BT & (token_BT >= FIRST_WORD))[selected_BT].all())
    words_B = (visible_BT & (token_BT >= FIRST_WORD)).sum(1)
    assert selected_BT.sum(1).tolist() == [max(1, round(0.15 * int(count))) for count in words_B]
    assert torch.equal(input_BT[~selected_BT], token_BT[~selected_BT])


@pytest.mark.spec(66)
def test_b_follows_a_or_is_from_elsewhere_half_the_time():
    task = opened()
    sentences = task.data.splits["train"]
    stream = sentences.token_N.tolist()
    texts = [
        task.data.tokenizer.decode(stream[a:b]) for a, b in zip(sentences.start_S, sentences.start_S[1:], strict=False)
    ]
    ends = sentences.first_D.tolist()
    of = {text: n for n, text in enumerate(texts)}
    others = 0
    for step in range(20):
        chance = torch.rand(32, 4, generator=step_generator(1, step), dtype=torch.float64).tolist()
        for numbers in chance:
            row, second, other = task.data.row("train", *numbers)
            a, b = row[1 : second - 1].tolist(), row[second:-1].tolist()
            assert (row[0], row[second - 1], row[-1]) == (CLS, SEP, SEP)
            assert 4 < len(row) <= 48 and a and b
            where = [n for n in range(len(stream) - len(a) + 1) if stream[n : n + len(a)] == a]
            follows = any(stream[n + len(a) : n + len(a) + len(b)] == b for n in where)
            document = [sum(end <= of_sentence(sentences, n) for end in ends) for n in where]
            b_where = [n for n in range(len(stream) - len(b) + 1) if stream[n : n + len(b)] == b]
            b_document = [sum(end <= of_sentence(sentences, n) for end in ends) for n in b_where]
            assert follows == (not other)
            assert set(document).isdisjoint(b_document) == bool(other)
            others += other
    assert len(of) == 180
    assert within(others / 640, 640, 0.5)


def of_sentence(sentences, token):
    return int((sentences.start_S <= token).sum()) - 1


@pytest.mark.spec(66)
def test_a_is_unchanged_when_b_is_from_elsewhere():
    task = opened(context=64)
    for start, end, other_start in torch.rand(50, 3, generator=step_generator(0, 0), dtype=torch.float64).tolist():
        (one, middle, is_other), (other, place_of_b, _) = (
            task.data.row("train", start, end, chance, other_start) for chance in (0.9, 0.1)
        )
        assert is_other == 0
        # B from elsewhere is never longer, so A is not truncated.
        assert one[:middle].tolist() == other[:place_of_b].tolist()
        assert len(other) <= len(one)


def test_with_one_document_b_is_from_elsewhere_in_it(tmp_path):
    """Then B overlaps neither A nor the sentences that follow A."""
    (tmp_path / "a.txt").write_text("\n".join(f"x {n // 100} {n // 10 % 10} {n % 10} says it" for n in range(300)))
    task_data = Masked(vocabulary=VOCABULARY, valid=0.2, context=32).open(str(tmp_path / "a.txt"))
    task = task_data.fit(build("bert", "tiny", vocabulary=task_data.tokenizer.vocabulary).value)
    stream = task_data.splits["train"].token_N.tolist()

    def position_of(run):
        (position,) = [n for n in range(len(stream)) if stream[n : n + len(run)] == run]
        return position

    for start, end, where in torch.rand(100, 3, generator=step_generator(0, 0), dtype=torch.float64).tolist():
        (near, at, _), (far, far_at, _) = (task.data.row("train", start, end, chance, where) for chance in (0.9, 0.1))
        first, last = position_of(near[1 : at - 1].tolist()), position_of(near[at:-1].tolist()) + len(near) - at - 1
        b = position_of(far[far_at:-1].tolist())
        assert b + len(far) - far_at - 1 <= first or b >= last


def test_without_next_sentence_a_row_is_one_run_of_a_document():
    task = opened(next_sentence=False)
    stream = task.data.splits["train"].token_N.tolist()
    batch = task.data.batch(3, 32, 0)
    assert "other_B" not in batch.tensors and not bool(batch["segment_BT"].any())
    for row, target in zip(batch["token_BT"].tolist(), batch["target_BT"].tolist(), strict=True):
        whole = [one if hidden == NO_TARGET else hidden for one, hidden in zip(row, target, strict=True)]
        assert whole[0] == CLS and whole.count(SEP) == 1
        run = whole[1 : whole.index(SEP)]
        assert len(run) == 46  # documents are longer than the context
        assert any(stream[n : n + len(run)] == run for n in range(len(stream)))


def test_segment_ids_are_1_for_b():
    batch = opened().data.batch(0, 16, 0)
    visible_BT = batch.tensors.get("visible_BT", torch.ones_like(batch["token_BT"], dtype=torch.bool))
    for row, segment, visible in zip(
        batch["token_BT"].tolist(), batch["segment_BT"].tolist(), visible_BT.tolist(), strict=True
    ):
        middle, end = row.index(SEP) + 1, sum(visible)
        assert row[end - 1] == SEP
        assert segment == [0] * middle + [1] * (end - middle) + [0] * (len(row) - end)


def test_batches_are_a_function_of_seed_and_step():
    one, other = opened(), opened()
    for step, seed in ((0, 0), (7, 0), (7, 3)):
        first, second = one.data.batch(step, 8, seed), other.data.batch(step, 8, seed)
        assert all(torch.equal(first[name], second[name]) for name in first.tensors)
    drawn = [one.data.batch(step, 8, seed)["token_BT"].tolist() for step, seed in ((0, 0), (1, 0), (0, 1))]
    assert drawn[0] != drawn[1] != drawn[2] != drawn[0]


@pytest.mark.spec(66)
@pytest.mark.parametrize("pairs", [True, False])
def test_only_selected_tokens_have_a_loss(pairs):
    """Equals a loop over positions; the logits of other positions have no gradient."""
    task = opened(next_sentence=pairs)
    batch = task.data.batch(0, 6, 0)
    shape = (*batch["token_BT"].shape, task.data.tokenizer.vocabulary)
    token_BTV = torch.randn(shape, generator=step_generator(0, 0), requires_grad=True)
    other_B2 = torch.randn(6, 2, generator=step_generator(0, 1), requires_grad=True)
    network = lambda *_, **__: Output(token_BTV, (token_BTV, other_B2))  # noqa: E731
    loss = task.objective.loss(network, batch, "auto")
    total, count = 0.0, 0
    for b in range(6):
        for t in range(shape[1]):
            target = int(batch["target_BT"][b, t])
            if target != NO_TARGET:
                total += float(-token_BTV.detach()[b, t].log_softmax(-1)[target])
                count += 1
    pair_loss = (
        sum(float(-other_B2.detach()[b].log_softmax(-1)[int(batch["other_B"][b])]) for b in range(6)) if pairs else 0.0
    )
    assert task.data.count(batch) == count
    # Divided by the count, the loss is the mean over tokens plus the mean over rows.
    assert float(loss.detach()) / count == pytest.approx(total / count + pair_loss / 6, rel=1e-5)
    loss.backward()
    assert bool((token_BTV.grad[batch["target_BT"] == NO_TARGET] == 0).all())
    assert bool((token_BTV.grad[batch["target_BT"] != NO_TARGET].abs().sum(-1) > 0).all())

    # The sum over pieces, as in gradient accumulation, is the same.
    def piece(start, end):
        part = lambda *_, **__: Output(token_BTV, (token_BTV[start:end], other_B2[start:end]))  # noqa: E731
        return float(task.objective.loss(part, batch.rows(start, end), "auto").detach())

    assert piece(0, 2) + piece(2, 6) == pytest.approx(float(loss.detach()), rel=1e-5)


def test_padding_does_not_change_the_loss():
    task = opened(context=64)
    torch.manual_seed(0)
    network = build("bert", "tiny", vocabulary=task.data.tokenizer.vocabulary).eval()
    batch = task.data.batch(0, 8, 0)
    more = {
        name: torch.cat((x, torch.full((8, 16), fill, dtype=x.dtype)), 1)
        for name, x in batch.tensors.items()
        for fill in ({"target_BT": NO_TARGET, "visible_BT": False}.get(name, 3),)
        if name.endswith("BT")
    }
    more["segment_BT"] = more["segment_BT"].clamp(max=1)
    more.setdefault("visible_BT", torch.arange(80)[None].expand(8, -1) < 64)
    longer = type(batch)(
        {name: x[:, :64] for name, x in more.items()} | {name: batch[name] for name in ("other_B", "weight_B")}
    )
    with torch.no_grad():
        plain, padded = (float(task.objective.loss(network, one, "auto")) for one in (batch, longer))
    assert padded == pytest.approx(plain, rel=1e-5)


def test_a_perfect_network_has_accuracy_1_and_perplexity_1():
    task = opened()
    vocabulary = task.data.tokenizer.vocabulary

    class Perfect(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))
            self.number = 0

        def forward(self, token_BT, **_):
            batch = task.data.random_batch("valid", len(token_BT), step_generator(0, self.number))
            self.number += 1
            assert torch.equal(batch["token_BT"], token_BT)
            known = torch.nn.functional.one_hot(batch["target_BT"].clamp(min=0), vocabulary) * 100.0
            return Output(known, (known, torch.eye(2)[batch["other_B"]] * 100))

    result = task.objective.evaluate(Perfect(), "valid", 50, "auto")
    assert (result["masked_accuracy"], result["next_sentence_accuracy"]) == (1, 1)
    assert result["masked_perplexity"] == pytest.approx(1)
    assert (result["split"], result["share"]) == ("valid", 0.15)


@pytest.mark.parametrize(
    "content, message",
    [
        ("only one line here", r"has 1 sentences for train, 0 of them .*task\.next_sentence=false"),
        ("", "is empty; give some text"),
    ],
)
def test_too_little_text_is_refused(tmp_path, content, message):
    (tmp_path / "a.txt").write_text(content)
    with pytest.raises(ValueError, match=message):
        Masked(vocabulary=100, valid=0.0).open(str(tmp_path / "a.txt"))


def test_unsuitable_models_are_refused():
    task_data = Masked(vocabulary=VOCABULARY).open(opened.data, None)
    with pytest.raises(ValueError, match=r"has \d+ tokens, but the model has 20; set model\.vocabulary"):
        task_data.fit(build("bert", "tiny", vocabulary=20).value)
    with pytest.raises(ValueError, match="needs an output head Masked, the model has Language"):
        task_data.fit(build("gpt2", "tiny", vocabulary=400).value)
    with pytest.raises(ValueError, match="needs a model of one sequence"):
        task_data.fit(build("transformer", "tiny", vocabulary=400).value)
    with pytest.raises(ValueError, match="has no split 'test'; it has train, valid"):
        task = task_data.fit(build("bert", "tiny", vocabulary=400).value)
        task.objective.evaluate(build("bert", "tiny", vocabulary=400), "test", None, "auto")


def test_adapt_adds_the_output_heads_of_the_task():
    body = build("gpt2", "tiny").value
    for pairs, heads in ((True, ["Masked", "Classify"]), (False, ["Masked"])):
        task = opened(next_sentence=pairs)
        assert [type(head).__name__ for head in task.data.adapt(body).outputs] == heads
        bert = build("bert", "tiny").value
        assert task.data.adapt(bert).outputs == bert.outputs[: len(heads)]
    assert SPECIAL[MASK] == "[MASK]"
