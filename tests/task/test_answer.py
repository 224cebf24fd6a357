"""Answer: each form of an example equals a literal one, only answers have a loss, and accuracies equal a loop over characters."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace

from everyformer import Learned
from everyformer.data.pixels import GRAYS
from everyformer.data.problems import PROBLEMS
from everyformer.data.synthetic import shapes
from everyformer.data.tokenizer import SPECIAL
from everyformer.network.linear_cross_entropy import NO_TARGET
from everyformer.task.answer import END, MASK, START, Answer, arguments
from everyformer.task.table import task_for
from everyformer.train.loop import train
from everyformer.train.recipe import Recipe

SHORT = {"length": 12, "test_length": (12, 20)}


def opened(member, name, task=None, size="tiny", **settings):
    """An untrained tiny network, fitted to a problem."""
    torch.manual_seed(0)
    data = (task or Answer(**SHORT)).open(name)
    recipe = Recipe(member=member, size=size, task=data.task, model=settings)
    network = data.adapt(recipe.value(data.member_settings())).build().eval()
    return data.fit(network.value), network


def encoded(task, text):
    return [len(SPECIAL) + task.data.problem.alphabet.index(one) for one in text]


PIECES = ("B7q1=q", "1", "B", "7")


def test_a_language_model_reads_an_example_and_predicts_its_answers():
    task, _ = opened("gpt2", "mqar")
    batch = task.data.collate([PIECES])
    text = [*encoded(task, "B7q1=q1B7"), END]
    none = [NO_TARGET]
    targets = none * 5 + encoded(task, "1") + none + encoded(task, "7") + [END]
    assert batch["token_BT"][0].tolist() == text[:-1] + [0] * (16 - 9)
    assert batch["target_BT"][0].tolist() == targets + none * (16 - 9)
    assert batch["visible_BT"][0].tolist() == [True] * 9 + [False] * 7
    assert task.data.count(batch) == 3


def test_a_masked_model_fills_blanks_in_place_of_answers():
    task, _ = opened("bert", "mqar")
    batch = task.data.collate([PIECES])
    assert batch["token_BT"][0, :9].tolist() == [*encoded(task, "B7q1=q"), MASK, *encoded(task, "B"), MASK]
    targets = [NO_TARGET] * 6 + encoded(task, "1") + [NO_TARGET] + encoded(task, "7")
    assert batch["target_BT"][0].tolist() == targets + [NO_TARGET] * 7


def test_an_encoder_decoder_reads_what_is_given_and_predicts_the_answers():
    task, _ = opened("transformer", "mqar")
    batch = task.data.collate([PIECES])
    assert batch["source_BS"][0].tolist() == [*encoded(task, "B7q1=qB"), 0]
    assert batch["token_BT"][0, :3].tolist() == [START, *encoded(task, "17")]
    assert batch["target_BT"][0].tolist() == [*encoded(task, "17"), END] + [NO_TARGET] * 5


def test_a_classifier_predicts_the_answer_as_its_class():
    task, network = opened("byte-classifier", "cycle-navigation")
    batch = task.data.collate([(">>>.>=", "4"), ("<.=", "4")])
    assert batch["token_BT"][1].tolist() == [*encoded(task, "<.="), *[0] * 5]
    assert batch["target_BT"].tolist() == [[4], [4]]
    assert network.value.outputs[0].classes == 5
    with pytest.raises(
        ValueError, match="the answers of copy have several characters, but the model predicts one class"
    ):
        opened("byte-classifier", "copy")


@pytest.mark.parametrize(
    "member, name",
    [("gpt2", "noisy-recall"), ("bert", "sorting"), ("transformer", "addition"), ("byte-classifier", "listops")],
)
def test_accuracies_equal_a_loop_over_characters(member, name):
    """One example at a time, without padding, with the true characters of answers given."""
    task, network = opened(member, name)
    data = task.data
    metrics = task.objective.evaluate(network, "test", 8, "auto")
    right = whole = count = 0
    for length in SHORT["test_length"]:
        start = 8 * SHORT["test_length"].index(length)
        for pieces in data.problem.examples("test", 0, range(start, start + 8), length):
            batch = data.collate([pieces])
            visible = batch["visible_BT"][0]
            inputs = (batch["source_BS"][batch["source_visible_BS"]][None],) if "source_BS" in batch.tensors else ()
            with torch.no_grad():
                predicted = network(*inputs, batch["token_BT"][0][visible][None]).logits.argmax(-1).flatten()
            answer = "".join(pieces[1::2])
            wanted = [data.problem.answers.index(answer)] if data.form == "class" else encoded(task, answer)
            target = batch["target_BT"][0][: len(predicted)]
            hits = [int(p) == int(t) for p, t in zip(predicted, target, strict=True) if t not in (NO_TARGET, *data.end)]
            assert len(hits) == len(wanted)
            right, whole, count = right + sum(hits), whole + all(hits), count + len(hits)
    assert metrics["character_accuracy"] == pytest.approx(right / count)
    assert metrics["sequence_accuracy"] == whole / 16 and metrics["targets"] == count
    assert metrics["chance"] == 1 / len(PROBLEMS[name].answers)
    parts = [task.objective.evaluate(network, f"test{length}", 8, "auto") for length in SHORT["test_length"]]
    assert metrics["character_accuracy_12"] == pytest.approx(parts[0]["character_accuracy"])


@pytest.mark.parametrize("member", ["gpt2", "transformer-xl", "lstm", "reformer", "universal-transformer", "act-rnn"])
def test_members_of_every_kind_read_every_problem(member):
    """And padding changes no loss: the sum over examples alone is that of the batch."""
    task, network = opened(member, "dyck")
    batch = task.data.batch(0, 4, 0)
    assert not bool(batch["visible_BT"].all())
    with torch.no_grad():
        whole = task.objective.loss(network, batch, "auto")
        alone = sum(task.objective.loss(network, batch.rows(row, row + 1), "auto") for row in range(4))
    torch.testing.assert_close(whole, alone, rtol=1e-4, atol=1e-4)


def test_batches_are_functions_of_seed_and_step_and_have_all_lengths():
    task, _ = opened("gpt2", "parity")
    data = task.data
    assert torch.equal(data.batch(3, 4, 0)["token_BT"], data.batch(3, 4, 0)["token_BT"])
    assert not torch.equal(data.batch(3, 4, 0)["token_BT"][:, :8], data.batch(3, 4, 1)["token_BT"][:, :8])
    lengths = {int(data.batch(step, 2, 0)["visible_BT"][0].sum()) for step in range(60)}
    assert lengths == set(range(9, 14))  # of questions, with their =
    assert (data.splits["test"], data.splits["test20"], task.data.longest()) == ((12, 20), (20,), 22)


def test_random_position_offsets_are_used_in_training_only():
    """They are equal for source and target."""
    task, network = opened("transformer", "copy", Answer(**SHORT, shift=300))
    batch = task.data.batch(3, 4, 0)
    assert len(set(batch["offset_B"].tolist())) > 1 and "offset_B" not in task.data.collate([("12=", "12")]).tensors
    positions: list[torch.Tensor] = []
    for side in (network.encoder, network.decoder):
        side.position.register_forward_pre_hook(lambda _, inputs: positions.append(inputs[1]))
    task.objective.loss(network, batch, "auto")
    for name, position_BT in zip(("source_visible_BS", "visible_BT"), positions, strict=True):
        visible = batch[name]
        expected = batch["offset_B"][:, None] + visible.long().cumsum(1) - 1
        assert torch.equal(position_BT[visible], expected[visible])
    pair = replace(network.value, decoder=replace(network.value.decoder, position=Learned(9)))
    with pytest.raises(
        ValueError, match=r"the model has 9 positions, but the examples of copy take 342; lower task.length"
    ):
        task.data.fit(pair)


def test_the_steps_per_token_of_encoder_and_decoder_are_reported():
    task, network = opened("universal-transformer", "copy", size="tiny-pair", bias=-2.0)
    network.encoder.body.unit.bias.data.fill_(9.0)  # halts at once
    metrics = task.objective.evaluate(network, "valid", 4, "auto")
    assert metrics["encoder_steps"] == 1 and metrics["decoder_steps"] == 3


def test_refusals_name_the_remedy():
    with pytest.raises(ValueError, match="there is no problem and no file mqa; did you mean mqar"):
        Answer().open("mqa")
    with pytest.raises(ValueError, match="parity has no questions of length 3; give a length of 8 or more"):
        Answer(length=3).open("parity")
    with pytest.raises(ValueError, match="has tokens, but the model's inputs are patches"):
        opened("vit", "parity", image=28, patch=7)
    assert (
        type(task_for("gpt2", data="mqar")) is Answer
        and type(task_for("gpt2", name="language", data="mqar")) is not Answer
    )


def test_a_problem_is_learned(tmp_path):
    """Far better than the one in ten of guessing, in two seconds."""
    settings = ("run.steps=100", "run.batch=16", "run.evaluate=0", "run.save=0", "run.device=cpu", "optim.lr=5e-3")
    recipe = Recipe.of("gpt2", *settings, "task.length=8", "task.test_length=8", size="tiny", data="sorting")
    metrics = train(recipe, tmp_path / "run").metrics
    assert metrics["character_accuracy"] > 0.25 > 2 * metrics["chance"]


@pytest.mark.parametrize("member", ["gpt2", "bert", "transformer", "byte-classifier"])
def test_questions_are_answered_in_every_form(member):
    """By the most likely one of the characters that answers have."""
    task, network = opened(member, "even-pairs")
    inference = task.inference
    question = inference.question_of(("abbababa=", "1"))
    assert question == ("abbababa=_" if member == "bert" else "abbababa=")
    answer = inference.answer(network, question)
    batch = task.data.collate([("abbababa=", "1")])
    inputs, options = arguments(batch)
    with torch.no_grad():
        logits_NV = network(*inputs, **options).logits.flatten(0, -2)
    if member != "byte-classifier":
        logits_NV = logits_NV[batch["target_BT"].flatten() >= 0][:, encoded(task, "01")]
    assert answer == "01"[int(logits_NV.argmax())]
    assert inference.generate_text(network, question) == "abbababa=" + answer
    assert inference.predict(network, [question + "\n"]).values.tolist() == [answer]
    assert "(right: " in inference.sample(network, 0)
    for wrong in ("abx=", ""):
        with pytest.raises(ValueError, match="; write one as in --prompt"):
            inference.generate_text(network, wrong)


def test_blanks_between_given_characters_are_filled_in_order():
    task, network = opened("gpt2", "mqar")
    text = task.inference.generate_text(network, "B7q1=q_B_")
    first = task.inference.answer(network, "B7q1=q_")
    assert text.startswith(f"B7q1=q{first}B") and text == task.inference.generate_text(network, f"B7q1=q{first}B_")


def test_images_are_read_pixel_by_pixel(tmp_path):
    """The text of an image is its gray levels; its class is the answer, of the split that the data have."""
    data = Answer(length=49).open(None)  # the embedded shapes, of 28 x 28 pixels
    images, labels = shapes()["train"]
    names = sorted(set(labels))
    texts = {}
    for split in ("train", "valid"):
        for question, answer in data.problem.examples(split, 0, range(40), 49):
            texts[question] = names[int(answer)]
    expected = {}
    for image, label in zip(images[:, 0].astype(int), labels, strict=True):
        text = ""
        for y in range(0, 28, 4):
            for x in range(0, 28, 4):
                text += GRAYS[(int(image[y : y + 4, x : x + 4].sum()) + 8) // 16 * 10 // 256]
        expected[text + "="] = label
    assert len(texts) > 70 and texts.items() <= expected.items()
    assert [*data.splits] == ["train", "valid"] and data.problem.chance == 0.25 and data.test_lengths == (49,)
    with pytest.raises(ValueError, match="cannot have 50 pixels; give one of the lengths 16, 49, 196, 784"):
        Answer(length=50).open(None)
    task, _ = opened("lstm", None, Answer(length=49))
    assert task.data.count(task.data.batch(0, 4, 0)) == 4
    (tmp_path / "text.txt").write_text("no image")
    with pytest.raises(ValueError, match="is a file; give the folder with the images"):
        Answer().open(str(tmp_path / "text.txt"))
