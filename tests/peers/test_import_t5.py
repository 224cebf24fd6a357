"""T5: folders of transformers become runs that fill blanks and answer, and trained runs become folders, with equal logits and text."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken

import everyformer
from everyformer.cli.main import main
from everyformer.task.corruption import MARKS
from everyformer.train.imported import import_run
from everyformer.train.trained import load
from tests.peers.test_import import refused, unigrams

TINY = {"vocab_size": 140, "d_model": 16, "d_kv": 6, "d_ff": 20, "num_layers": 2, "num_heads": 2}
FORMS = {  # of the net, and whether the output is the shared table and its input is scaled
    "v1.0": ({"feed_forward_proj": "relu"}, True),
    "v1.1": ({"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}, False),
    "gated and tied": ({"feed_forward_proj": "gated-silu"}, True),
    "plain, scaled and not tied": ({"feed_forward_proj": "gelu", "scale_decoder_outputs": True}, False),
    "other distances": ({"relative_attention_num_buckets": 8, "relative_attention_max_distance": 20}, True),
}


def t5_tokenizer():
    inner = unigrams()
    inner.add_special_tokens([AddedToken(name, special=True) for name in MARKS])
    return inner


def write_t5(folder, form="v1.0", **changes):
    torch.manual_seed(0)
    fields, tied = FORMS[form]
    config = transformers.T5Config(**TINY | fields | changes, decoder_start_token_id=0)
    theirs = transformers.T5ForConditionalGeneration(config).eval()
    if not tied:
        theirs.lm_head.weight = torch.nn.Parameter(torch.randn(config.vocab_size, 16))
    with torch.no_grad():
        for weight in theirs.parameters():
            weight.add_(0.2 * torch.randn_like(weight))
    theirs.save_pretrained(folder)
    return theirs


def assert_equal_logits(ours, theirs):
    source_BS, target_BT = (
        torch.randint(140, (2, size), generator=torch.Generator().manual_seed(size)) for size in (30, 9)
    )
    with torch.no_grad():
        expected = theirs(source_BS, decoder_input_ids=target_BT).logits
        assert (ours(source_BS, target_BT).logits - expected).abs().max() < 1e-5 * expected.abs().max()


def exported(run, folder):
    assert main(["export", str(run), "--to", "hf", "--out", str(folder)]) == 0
    return transformers.AutoModelForSeq2SeqLM.from_pretrained(
        folder
    ).eval(), transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_t5_loads_and_comes_back_with_equal_logits(form, tmp_path):
    theirs = write_t5(tmp_path / "t5", form)
    t5_tokenizer().save(str(tmp_path / "t5" / "tokenizer.json"))
    import_run(tmp_path / "t5", tmp_path / "run")
    network = load(tmp_path / "run").network
    assert_equal_logits(network, theirs)
    again, _ = exported(tmp_path / "run", tmp_path / "hf")
    assert_equal_logits(network, again)
    state, back = (load_file(tmp_path / one / "model.safetensors") for one in ("t5", "hf"))
    assert state.keys() == back.keys() and all(torch.equal(x, back[name]) for name, x in state.items())
    given, config = (json.loads((tmp_path / one / "config.json").read_text()) for one in ("t5", "hf"))
    same = (
        *TINY,
        "feed_forward_proj",
        "scale_decoder_outputs",
        "decoder_start_token_id",
        "eos_token_id",
        "pad_token_id",
    )
    assert {name: given[name] for name in same} == {name: config[name] for name in same}


def test_an_imported_t5_fills_blanks_and_answers_other_texts(tmp_path):
    theirs = write_t5(tmp_path / "t5", "v1.1")
    t5_tokenizer().save(str(tmp_path / "t5" / "tokenizer.json"))
    run = load(tmp_path / "t5")
    names = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "t5" / "tokenizer.json"))
    source = torch.tensor([names("a rose is a rose")["input_ids"]])
    assert source[0, -1] == 1  # </s>
    expected = theirs.generate(source, max_new_tokens=12, do_sample=False, pad_token_id=0)[0]
    answer = names.decode(expected, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert run.generate("a rose is a rose", tokens=12) == answer and answer
    assert run.generate("a ___ is a rose", tokens=12).startswith("a")
    ids = run.task.inference.source("a ___ is").tolist()
    assert ids == names("a<extra_id_0> is")["input_ids"]


def test_a_t5_that_was_trained_here_opens_there(tmp_path):
    settings = (
        "run.steps=1",
        "run.batch=2",
        "run.evaluate=0",
        "run.examples=1",
        "task.context=16",
        "task.vocabulary=300",
    )
    (tmp_path / "text.txt").write_text("a rose is a rose is a rose.\n" * 100)
    recipe = everyformer.Recipe.of("t5", *settings, size="tiny", data=tmp_path / "text.txt")
    run = everyformer.train(recipe, tmp_path / "run")
    theirs, names = exported(tmp_path / "run", tmp_path / "hf")
    source = run.task.inference.source("a rose ___ a rose")
    assert names("a rose<extra_id_0> a rose")["input_ids"] == source.tolist()
    written = theirs.generate(torch.from_numpy(source)[None], max_new_tokens=12, do_sample=False)[0].tolist()
    assert written[1:] == run.task.inference.targets(run.network, [source], 12)[0]
    marks = run.task.inference.marks
    config = theirs.generation_config
    assert (config.decoder_start_token_id, config.eos_token_id) == (marks.start, marks.end)


def test_what_does_not_fit_a_t5_is_named(tmp_path, capsys):
    def message():
        return refused(capsys, "import", tmp_path / "t5", "--out", tmp_path / "run")

    write_t5(tmp_path / "t5")
    assert "no tokenizer with marks of spans (<extra_id_0>" in message()
    t5_tokenizer().save(str(tmp_path / "t5" / "tokenizer.json"))
    config = json.loads((tmp_path / "t5" / "config.json").read_text())
    for changes, reason in (
        ({"num_decoder_layers": 3}, "num_decoder_layers is 3 and num_layers 2"),
        ({"feed_forward_proj": "xielu", "dense_act_fn": None}, "feed_forward_proj is 'xielu'"),
        ({"dense_act_fn": "xielu"}, "dense_act_fn is 'xielu'"),
        ({"layer_norm_epsilon": -1}, "layer_norm_epsilon is -1: expected float > 0.0"),
        ({"num_heads": "2"}, "num_heads"),
        ({"d_model": 1 << 62}, "d_model"),
        ({"relative_attention_num_buckets": 4096}, "max_distance"),
    ):
        (tmp_path / "t5" / "config.json").write_text(json.dumps(config | changes))
        assert reason in message()
    (tmp_path / "t5" / "config.json").write_text(json.dumps(config))
    state = load_file(tmp_path / "t5" / "model.safetensors")
    name = "decoder.block.1.layer.1.EncDecAttention.q.weight"
    for weights, reason in (
        ({one: x for one, x in state.items() if one != name}, f"{name} is missing"),
        (state | {"classification_head.dense.weight": torch.ones(2)}, "classification_head.dense.weight is left over"),
        (state | {name: torch.ones(5, 16)}, "29 x 16, not 36 x 16"),
    ):
        save_file(weights, tmp_path / "t5" / "model.safetensors")
        assert reason in message()
    assert not (tmp_path / "run").exists()
