"""What an imported model was published with is kept: its type, the fields of its config, where texts end and how they are sampled."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file

import everyformer
from everyformer.cli.main import main
from everyformer.train.imported import import_run
from everyformer.train.trained import load
from tests.peers.test_import import BERT, SIZE, byte_level, refused, roberta, write_gpt2


def exported(run, folder):
    assert main(["export", str(run), "--to", "hf", "--out", str(folder)]) == 0
    return json.loads((folder / "config.json").read_text())


ROBERTA = BERT | {
    "max_position_embeddings": 66,
    "type_vocab_size": 1,
    "bos_token_id": 395,
    "eos_token_id": 397,
    "pad_token_id": 1,
}


@pytest.mark.parametrize("head", ["ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "Model"])
def test_a_roberta_comes_back_as_a_roberta(head, tmp_path):
    options = {"add_pooling_layer": False} if head == "Model" else {}
    labels = {0: "name", 1: "place", 2: "other"}
    published = transformers.RobertaConfig(**ROBERTA, **({"id2label": labels} if "Class" in head else {}))
    theirs = getattr(transformers, f"Roberta{head}")(published, **options).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    roberta().save(str(tmp_path / "theirs" / "tokenizer.json"))
    import_run(tmp_path / "theirs", tmp_path / "run")
    config = exported(tmp_path / "run", tmp_path / "hf")
    assert config["model_type"] == "roberta" and config["architectures"] == [f"Roberta{head}"]
    given = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert {name: given[name] for name in ROBERTA} == {name: config[name] for name in ROBERTA}
    state, back = (load_file(tmp_path / one / "model.safetensors") for one in ("theirs", "hf"))
    name = "embeddings.position_embeddings.weight"  # whose first two rows are never used
    assert state.keys() == back.keys()
    assert all(
        torch.equal(x[2:], back[one][2:]) if name in one else torch.equal(x, back[one]) for one, x in state.items()
    )
    again = getattr(transformers, f"Roberta{head}").from_pretrained(tmp_path / "hf").eval()
    assert again.config.id2label == theirs.config.id2label
    token_BT = torch.randint(4, SIZE, (2, 9))
    with torch.no_grad():
        assert (again(token_BT)[0] - theirs(token_BT)[0]).abs().max() < 1e-6


def test_a_fine_tuned_model_keeps_the_type_it_began_with(tmp_path):
    theirs = transformers.RobertaForSequenceClassification(transformers.RobertaConfig(**ROBERTA, num_labels=3))
    theirs.save_pretrained(tmp_path / "theirs")
    roberta().save(str(tmp_path / "theirs" / "tokenizer.json"))
    import_run(tmp_path / "theirs", tmp_path / "run")
    rows = "text,label\n" + "a rose,good\na fox,bad\n" * 20
    (tmp_path / "data.csv").write_text(rows)
    settings = ("run.steps=1", "run.batch=4", "run.evaluate=0", "run.examples=2")
    recipe = everyformer.Recipe.of(
        str(tmp_path / "run"), *settings, task="classify", data=tmp_path / "data.csv", init_from=tmp_path / "run"
    )
    everyformer.train(recipe, tmp_path / "tuned")
    config = exported(tmp_path / "tuned", tmp_path / "hf")
    assert config["architectures"] == ["RobertaForSequenceClassification"]
    assert config["id2label"] == {"0": "bad", "1": "good"} and config["eos_token_id"] == 397


def steered(tmp_path, **generation):
    """A GPT-2 that writes its end token 0 for sure at some point, and its folder."""
    theirs = write_gpt2(tmp_path / "gpt2")
    with torch.no_grad():
        theirs.transformer.wte.weight.mul_(8)
    theirs.generation_config.update(**generation)
    theirs.save_pretrained(tmp_path / "gpt2")
    return theirs


def test_generation_ends_where_the_published_model_does(tmp_path, capsys):
    theirs = steered(tmp_path)
    prompt = "a rose is"
    ids = byte_level().encode(prompt).ids
    endless = theirs.generate(
        torch.tensor([ids]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    ends = [endless[0, len(ids) + 3].item(), endless[0, len(ids) + 5].item()]  # two tokens that it writes
    path = tmp_path / "gpt2" / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": ends, "bos_token_id": 0, "max_length": 17}))
    import_run(tmp_path / "gpt2", tmp_path / "run")
    run = load(tmp_path / "run")
    tokenizer = run.task.data.tokenizer
    row = endless[0].tolist()
    first = next(n for n in range(len(ids), len(row)) if row[n] in ends)
    short, long = tokenizer.decode(row[:first]), tokenizer.decode(row)
    assert run.generate(prompt, tokens=12, temperature=0) == short
    assert run.generate([prompt, prompt], tokens=12, temperature=0) == [short, short]
    assert prompt + "".join(run.stream(prompt, tokens=12, temperature=0)) == short
    assert run.generate(prompt, tokens=12, temperature=0, ignore_end=True) == long
    command = ["generate", str(tmp_path / "run"), "--prompt", prompt, "--tokens", "12", "--temperature", "0"]
    assert main(command) == 0 and capsys.readouterr().out.count("\n") >= 1
    config = exported(tmp_path / "run", tmp_path / "hf")
    assert json.loads((tmp_path / "hf" / "generation_config.json").read_text()) == json.loads(path.read_text())
    assert config["eos_token_id"] == ends
    assert load(tmp_path / "hf").generate(prompt, tokens=12, temperature=0) == short  # again, from what was exported


def test_sampling_is_that_of_the_published_model(tmp_path):
    write_gpt2(tmp_path / "gpt2")
    path = tmp_path / "gpt2" / "generation_config.json"
    path.write_text(json.dumps({"do_sample": True, "top_k": 1, "temperature": 0.7}))
    run = load(tmp_path / "gpt2")
    assert run.task.inference.sampling == {"temperature": 0.7, "top_k": 1}
    assert run.generate("a rose", tokens=8, seed=1) == run.generate("a rose", tokens=8, temperature=0)
    path.write_text(json.dumps({"top_k": 1}))  # no sampling
    assert load(tmp_path / "gpt2").task.inference.sampling == {"temperature": 0.8}


@pytest.mark.parametrize(
    "content, reason",
    [
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
        ({"eos_token_id": [1, -2]}, "eos_token_id is [1, -2]"),
        ({"do_sample": True, "top_p": "most"}, "top_p is 'most'"),
        ([1], "holds a list, not an object"),
    ],
)
def test_a_hostile_generation_config_is_refused_in_one_line(content, reason, tmp_path, capsys):
    write_gpt2(tmp_path / "gpt2")
    (tmp_path / "gpt2" / "generation_config.json").write_text(json.dumps(content))
    assert reason in refused(capsys, "import", tmp_path / "gpt2", "--out", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_an_imported_llama_keeps_its_context_and_the_code_of_others_is_left_out(tmp_path, capsys):
    sizes = {
        "hidden_size": 16,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "intermediate_size": 40,
        "vocab_size": SIZE,
    }
    config = transformers.LlamaConfig(**sizes, max_position_embeddings=77)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    byte_level().save(str(tmp_path / "llama" / "tokenizer.json"))
    given = json.loads((tmp_path / "llama" / "config.json").read_text())
    (tmp_path / "llama" / "config.json").write_text(json.dumps(given | {"auto_map": {"AutoModel": "code.Model"}}))
    import_run(tmp_path / "llama", tmp_path / "run")
    config = exported(tmp_path / "run", tmp_path / "hf")
    assert config["max_position_embeddings"] == 77 and "auto_map" not in config
    (tmp_path / "llama" / "config.json").write_text(json.dumps(given | {"max_position_embeddings": "many"}))
    import_run(tmp_path / "llama", tmp_path / "other")
    message = refused(capsys, "export", tmp_path / "other", "--to", "gguf", "--out", tmp_path / "a.gguf")
    assert "max_position_embeddings is 'many'" in message and not (tmp_path / "a.gguf").exists()
