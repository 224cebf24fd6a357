"""What imported models are used for: blanks are filled and replaced tokens found as by transformers, and a run keeps its task."""

from __future__ import annotations

import pytest
import torch
import transformers

import everyformer
from everyformer.cli.main import main
from everyformer.task.denoise import Denoise
from everyformer.task.masked import Masked
from everyformer.train.imported import import_run
from everyformer.train.trained import load
from tests.peers.test_import import BERT, SIZE, refused, roberta, word_pieces
from tests.peers.test_import_t5 import t5_tokenizer, write_t5

BLANKS = ["the quick ___ fox", "___ rose is a ___ is a rose", "lines 12345 and ___"]
MASKED = {
    "bert": (transformers.BertForPreTraining, transformers.BertConfig, word_pieces, "[MASK]", BERT),
    "roberta": (
        transformers.RobertaForMaskedLM, transformers.RobertaConfig, roberta, "<mask>",
        BERT | {"max_position_embeddings": 66, "type_vocab_size": 1},
    ),
}  # fmt: skip


def write(folder, kind, config, tokenizer, sizes):
    torch.manual_seed(0)
    theirs = kind(config(**sizes)).eval()
    with torch.no_grad():
        for weight in theirs.parameters():
            weight.add_(0.2 * torch.randn_like(weight))
    theirs.save_pretrained(folder)
    tokenizer().save(str(folder / "tokenizer.json"))
    return theirs, transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))


def ids_of(names, text):
    return torch.tensor([names(text, truncation=False, padding=False)["input_ids"]])


@pytest.mark.parametrize("name", MASKED)
def test_blanks_are_filled_with_the_most_likely_tokens(name, tmp_path, capsys):
    kind, config, tokenizer, mark, sizes = MASKED[name]
    theirs, names = write(tmp_path / name, kind, config, tokenizer, sizes)
    mask, expected = names.convert_tokens_to_ids(mark), []
    for text in BLANKS:
        token_BT = ids_of(names, text.replace("___", mark))
        with torch.no_grad():
            logits_BTV = theirs(token_BT)[0]
        filled_BT = torch.where(token_BT == mask, logits_BTV.argmax(-1), token_BT)
        assert (token_BT == mask).sum() == text.count("___")
        expected.append(names.decode(filled_BT[0, 1:-1], skip_special_tokens=True, clean_up_tokenization_spaces=False))
    import_run(tmp_path / name, tmp_path / "run")
    run = load(tmp_path / "run")
    assert run.generate(BLANKS) == run.predict(BLANKS).values.tolist() == expected
    assert run.generate(BLANKS[0].replace("___", mark)) == expected[0]
    assert main(["generate", str(tmp_path / "run"), "--prompt", BLANKS[1]]) == 0
    assert capsys.readouterr().out == expected[1] + "\n"
    assert "has no blank to fill" in refused(capsys, "generate", tmp_path / "run", "--prompt", "a rose")
    long = "a rose " * 40 + "___"
    assert "but the model reads 64 with their marks" in refused(capsys, "generate", tmp_path / "run", "--prompt", long)


def test_a_discriminator_finds_tokens_and_says_that_it_has_no_generator(tmp_path, capsys):
    sizes = BERT | {"embedding_size": 8}
    model = (transformers.ElectraForPreTraining, transformers.ElectraConfig)
    theirs, names = write(tmp_path / "electra", *model, word_pieces, sizes)
    run, text = tmp_path / "run", tmp_path / "text.txt"
    assert main(["import", str(tmp_path / "electra"), "--out", str(run)]) == 0
    inference = load(run).task.inference
    for one in BLANKS:
        token_BT = ids_of(names, one)
        with torch.no_grad():
            found_T = theirs(token_BT).logits[0] > 0
        assert load(run).generate(one) == inference.text(token_BT[0].numpy(), found_T)
    text.write_text("a rose is a rose is a rose.\n" * 50)
    assert "has no generator that replaces tokens" in refused(capsys, "evaluate", run, "--data", text)
    words = ("train", run, "--init-from", run, "--data", text, "--out", tmp_path / "new")
    assert "has no generator that replaces tokens" in refused(capsys, *words) and not (tmp_path / "new").exists()


def test_a_run_in_place_of_a_member_keeps_its_task(tmp_path, capsys):
    """A T5 fills spans and is no translator, and a BERT without a head for pairs gets none."""
    write_t5(tmp_path / "t5")
    t5_tokenizer().save(str(tmp_path / "t5" / "tokenizer.json"))
    write(tmp_path / "bert", transformers.BertForMaskedLM, transformers.BertConfig, word_pieces, BERT)
    text = tmp_path / "text.txt"
    text.write_text("a rose is a rose is a rose.\n" * 400)
    for name, task in (("t5", Denoise()), ("bert", Masked(next_sentence=False))):
        run = tmp_path / f"{name}-run"
        import_run(tmp_path / name, run)
        recipe = everyformer.Recipe.of(str(run), data=text, init_from=run)
        assert recipe.task == task == load(run).recipe.task
        assert everyformer.Recipe.of(str(run), task="language").task != task
        capsys.readouterr()
        assert main(["plan", str(run), "--data", str(text), "run.batch=2"]) == 0
        assert f"next: everyformer train {run} --data {text} --init-from {run}" in capsys.readouterr().err.replace(
            "\n", ""
        )
        few = ("run.steps=1", "run.batch=2", "run.evaluate=0", "run.final_examples=1")
        assert (
            everyformer.train(everyformer.Recipe.of(str(run), *few, data=text, init_from=run)).network.value
            == load(run).network.value
        )


def test_data_without_a_word_that_the_model_knows_are_refused_in_one_line(tmp_path, capsys):
    write(tmp_path / "bert", transformers.BertForMaskedLM, transformers.BertConfig, word_pieces, BERT)
    import_run(tmp_path / "bert", tmp_path / "run")
    (tmp_path / "text.txt").write_text("漢 字 仮 名\n" * 50)
    message = refused(capsys, "evaluate", tmp_path / "run", "--data", tmp_path / "text.txt")
    assert "no token of these data is one that this model predicts" in message


def test_a_model_without_a_head_proposes_to_embed(tmp_path, capsys):
    theirs = transformers.BertModel(transformers.BertConfig(**BERT), add_pooling_layer=False)
    theirs.save_pretrained(tmp_path / "bert")
    word_pieces().save(str(tmp_path / "bert" / "tokenizer.json"))
    run, proposed = str(tmp_path / "run"), "--data FILE --out vectors.npy"
    assert main(["import", str(tmp_path / "bert"), "--out", run]) == 0
    assert f"everyformer embed {run} {proposed}" in capsys.readouterr().err.replace("\n", "")
    assert main(["export", run, "--to", "hf", "--out", str(tmp_path / "hf")]) == 0
    assert proposed in capsys.readouterr().err.replace("\n", "")
    assert "so generate does not apply; it has embed, attention" in refused(
        capsys, "generate", run, "--prompt", "a rose"
    )
    assert load(run).network.value.embed.vocabulary == SIZE
