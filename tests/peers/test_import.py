"""`everyformer import`: a folder of transformers becomes a run like any other, with equal tokens and equal outputs.

It holds the first commands of docs/import_export.md.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

import everyformer
from everyformer.cli.main import main
from everyformer.data.subwords import load_published
from everyformer.data.tokenizer import train
from everyformer.train.imported import import_run, read_folder
from everyformer.train.trained import load

TEXTS = [
    "Once upon a time, there was a rose.",
    "  two  spaces\nand lines\n",
    "Ünïcode ⅷ naïve — 木",
    "UPPER lower 12345",
    "a",
]
CORPUS = [*TEXTS, "the quick brown fox jumps over the lazy dog", "a rose is a rose is a rose"] * 3
SIZE = 400
BERT = {
    "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 40, "vocab_size": SIZE,
    "max_position_embeddings": 64,
}  # fmt: skip


def byte_level():
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options = {"vocab_size": SIZE - 5, "initial_alphabet": alphabet, "show_progress": False}
    inner.train_from_iterator(CORPUS, trainers.BpeTrainer(**options))
    return inner


def word_pieces():
    inner = train("wordpiece", lambda: CORPUS, SIZE).inner
    marks = [(name, inner.token_to_id(name)) for name in ("[SEP]", "[CLS]")]
    inner.post_processor = processors.BertProcessing(*marks)
    inner.enable_truncation(6)
    inner.enable_padding(length=6)
    return inner


def roberta():
    """Byte-level BPE with RoBERTa's marks."""
    inner = byte_level()
    inner.add_special_tokens(["<s>", "<pad>", "</s>", AddedToken("<mask>", lstrip=True)])
    start, end = (inner.token_to_id(name) for name in ("<s>", "</s>"))
    inner.post_processor = processors.RobertaProcessing(("</s>", end), ("<s>", start), add_prefix_space=False)
    return inner


def llama():
    """SentencePiece's BPE as in Llama 2: spaces are letters, unknown characters are bytes, and a text begins with <s>."""
    characters = sorted({one for text in CORPUS[:2] for one in text if one != " "} - {"木"})
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *characters, "▁a"]
    vocabulary = {name: number for number, name in enumerate(names)}
    inner = Tokenizer(models.BPE(vocabulary, [("▁", "a")], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    inner.add_special_tokens(["<unk>", "<s>", "</s>"])
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return inner


def unigrams():
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *((one, -3.0) for one in "▁abcdefghijklmnoprstuwy.,")]
    inner = Tokenizer(models.Unigram(pieces, unk_id=2, byte_fallback=False))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    inner.add_special_tokens(["<pad>", "</s>", "<unk>"])
    inner.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return inner


TOKENIZERS = {one.__name__: one for one in (byte_level, word_pieces, roberta, llama, unigrams)}


def write_gpt2(folder, tokenizer=byte_level, **changes):
    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_head": 2, "n_layer": 2, "n_positions": 32, "vocab_size": SIZE}
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes | changes, bos_token_id=0, eos_token_id=0))
    theirs.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer().save(str(folder / "tokenizer.json"))
    return theirs.eval()


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_tokenizer_encodes_and_decodes_as_theirs(name, tmp_path):
    TOKENIZERS[name]().save(str(tmp_path / "tokenizer.json"))
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    ours = load_published(tmp_path, "any")
    for text, ids in zip(TEXTS, ours.encode_all(TEXTS), strict=True):
        marked = [*ours.marks[0], *ids.tolist(), *ours.marks[1]]
        assert marked == theirs(text, truncation=False, padding=False)["input_ids"]
        assert ours.decode(ids.tolist()) == theirs.decode(
            ids.tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        if ours.bytes_per_token is not None:  # SentencePiece puts a space before a text
            spare = int(name == "llama")
            assert ours.bytes_per_token[ids].sum() == len(text.encode()) + spare
    assert (ours.bytes_per_token is None) == (name in ("word_pieces", "unigrams"))


def test_vocabularies_without_a_tokenizer_json_are_read(tmp_path):
    for make, kind in ((byte_level, "gpt2"), (word_pieces, "bert")):
        folder = tmp_path / kind
        folder.mkdir()
        inner = make()
        inner.no_truncation()
        inner.no_padding()
        inner.model.save(str(folder))
        ours = load_published(folder, kind)
        for text in TEXTS:
            plain, marked = (inner.encode(text, add_special_tokens=one).ids for one in (False, True))
            assert ours.encode(text.encode()).tolist() == plain
            if kind == "bert":
                assert [*ours.marks[0], *plain, *ours.marks[1]] == marked


def test_a_language_model_becomes_a_run_that_generates_and_is_fine_tuned(tmp_path):
    theirs = write_gpt2(tmp_path / "gpt2")
    import_run(tmp_path / "gpt2", tmp_path / "run")
    run = load(tmp_path / "run")
    ids = run.task.data.tokenizer.encode(b"a rose is").tolist()
    with torch.no_grad():
        assert (run.network(torch.tensor([ids])).logits - theirs(torch.tensor([ids])).logits).abs().max() < 1e-5
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected = theirs.generate(torch.tensor([ids]), **options)
    text = run.task.data.tokenizer.decode(expected[0].tolist())
    assert run.generate("a rose is", tokens=12, temperature=0, ignore_end=True) == text
    (tmp_path / "text.txt").write_text("a rose is a rose is a rose.\n" * 200)
    settings = ("run.steps=1", "run.batch=2", "run.evaluate=0", "run.examples=1")
    recipe = everyformer.Recipe.of(
        str(tmp_path / "run"), *settings, data=tmp_path / "text.txt", init_from=tmp_path / "run"
    )
    tuned = everyformer.train(recipe)
    assert tuned.task.data.tokenizer.key == run.task.data.tokenizer.key
    assert tuned.network.value == run.network.value


def test_a_masked_model_is_evaluated_with_its_own_special_tokens(tmp_path):
    config = transformers.RobertaConfig(**BERT | {"max_position_embeddings": 66, "type_vocab_size": 1})
    transformers.RobertaForMaskedLM(config).save_pretrained(tmp_path / "roberta")
    roberta().save(str(tmp_path / "roberta" / "tokenizer.json"))
    import_run(tmp_path / "roberta", tmp_path / "run")
    (tmp_path / "text.txt").write_text("a rose is a rose is a rose.\n" * 50)
    run = load(tmp_path / "run", data=tmp_path / "text.txt")
    batch = run.task.data.random_batch("train", 8, torch.Generator().manual_seed(0))
    inner = run.task.data.tokenizer.inner
    start, end, mask = (inner.token_to_id(name) for name in ("<s>", "</s>", "<mask>"))
    assert (batch["token_BT"][:, 0] == start).all() and (batch["token_BT"] == end).sum() == 8
    assert (batch["token_BT"] == mask).any() and not torch.isin(
        batch["target_BT"], torch.tensor([start, end, mask])
    ).any()
    assert run.evaluate(limit=2)["masked_perplexity"] > 1


def test_classes_have_their_names_and_their_probabilities(tmp_path):
    config = transformers.BertConfig(**BERT, id2label={0: "bad", 1: "good", 2: "odd"}, hidden_dropout_prob=0.0)
    theirs = transformers.BertForSequenceClassification(config).eval()
    with torch.no_grad():
        theirs.classifier.weight.mul_(50)
    theirs.save_pretrained(tmp_path / "bert")
    word_pieces().save(str(tmp_path / "bert" / "tokenizer.json"))
    import_run(tmp_path / "bert", tmp_path / "run")
    predictions = load(tmp_path / "run").predict(TEXTS)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "bert" / "tokenizer.json"))
    for text, row in zip(TEXTS, predictions.probabilities, strict=True):
        ids = torch.tensor([tokenizer(text, truncation=False, padding=False)["input_ids"]])
        with torch.no_grad():
            assert np.abs(theirs(ids).logits.softmax(-1)[0].numpy() - row).max() < 1e-5
    assert predictions.classes == ("bad", "good", "odd") and set(predictions.values) <= set(predictions.classes)


def test_images_are_scaled_as_the_preprocessor_does(tmp_path):
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 40}
    config = transformers.ViTConfig(**sizes, image_size=8, patch_size=4, id2label={0: "cat", 1: "dog"})
    theirs = transformers.ViTForImageClassification(config).eval()
    theirs.save_pretrained(tmp_path / "vit")
    scaling = {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.1]}
    settings = {"size": {"height": 8, "width": 8}, **scaling}
    (tmp_path / "vit" / "preprocessor_config.json").write_text(json.dumps(settings))
    import_run(tmp_path / "vit", tmp_path / "run")
    image_YXC = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    mean, std = (torch.tensor(scaling[name]) for name in scaling)
    pixel_CYX = ((torch.from_numpy(image_YXC) / 255 - mean) / std).permute(2, 0, 1)
    for wrong, reason in (
        ({"rescale_factor": 0}, "rescale_factor is 0"),
        ({"size": {"height": "big"}}, "reads images of 8 x 8"),
        ({"image_std": [0.1, 0.0, 0.1]}, "image_mean and image_std"),
    ):
        (tmp_path / "vit" / "preprocessor_config.json").write_text(json.dumps(settings | wrong))
        with pytest.raises(ValueError, match=reason):
            import_run(tmp_path / "vit" / "model.safetensors", tmp_path / "other")
    with torch.no_grad():
        expected = theirs(pixel_CYX[None]).logits.softmax(-1)[0].numpy()
    predictions = load(tmp_path / "run").predict([image_YXC])
    assert np.abs(predictions.probabilities[0] - expected).max() < 1e-5 and predictions.classes == ("cat", "dog")


POOLED = {"mean": "pooling_mode_mean_tokens", "first": "pooling_mode_cls_token", "max": "pooling_mode_max_tokens"}


def write_sentence_encoder(folder, pooling, normalize):
    """A sentence encoder with the files of sentence-transformers; returns the model of transformers."""
    theirs = transformers.BertModel(transformers.BertConfig(**BERT), add_pooling_layer=False).eval()
    theirs.save_pretrained(folder)
    word_pieces().save(str(folder / "tokenizer.json"))
    kinds = ["Transformer", "Pooling", *["Normalize"] * normalize]
    modules = [{"idx": n, "path": f"{n}_{kind}" if n else "", "type": f"models.{kind}"} for n, kind in enumerate(kinds)]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(
        json.dumps({name: one == pooling for one, name in POOLED.items()} | {"word_embedding_dimension": 16})
    )
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 12}))
    return theirs


@pytest.mark.parametrize("pooling, normalize", [("mean", True), ("first", False), ("max", True)])
def test_sentence_vectors_are_those_of_the_encoders_own_files(pooling, normalize, tmp_path, capsys):
    theirs = write_sentence_encoder(tmp_path / "encoder", pooling, normalize)
    import_run(tmp_path / "encoder", tmp_path / "run")
    texts = ["a rose", "the quick brown fox jumps over the lazy dog again and again", "naive lines"]
    (tmp_path / "lines.txt").write_text("\n".join(texts) + "\n")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "encoder" / "tokenizer.json"), pad_token="[PAD]"
    )
    batch = tokenizer(texts, padding=True, truncation=True, max_length=12, return_tensors="pt")
    visible = batch["attention_mask"].bool()[..., None]
    with torch.no_grad():
        x = theirs(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state
    pooled = {
        "mean": (x * visible).sum(1) / visible.sum(1),
        "first": x[:, 0],
        "max": x.masked_fill(~visible, -torch.inf).amax(1),
    }[pooling]
    expected = (torch.nn.functional.normalize(pooled, dim=-1) if normalize else pooled).numpy()
    command = ["embed", str(tmp_path / "run"), "--data", str(tmp_path / "lines.txt"), "--out", str(tmp_path / "v.npy")]
    assert main(command) == 0
    assert np.abs(np.load(tmp_path / "v.npy") - expected).max() < 1e-5
    assert np.abs(load(tmp_path / "encoder").embed(texts) - expected).max() < 1e-5  # without a run
    other = load(tmp_path / "run").embed(texts, pooling="last", normalize=False)
    assert np.abs(other - expected).max() > 1e-3
    assert "no output head to train or evaluate" in refused(capsys, "evaluate", tmp_path / "run")
    assert "is no .npy file" in refused(capsys, *command[:-1], tmp_path / "v.txt")


def test_a_sentence_encoder_with_a_part_that_we_have_not_is_refused(tmp_path):
    write_sentence_encoder(tmp_path, "mean", False)
    modules = json.loads((tmp_path / "modules.json").read_text())
    (tmp_path / "modules.json").write_text(json.dumps([*modules, {"type": "sentence_transformers.models.Dense"}]))
    with pytest.raises(ValueError, match="has a Dense, which everyformer has not"):
        load(tmp_path)
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_weightedmean_tokens": True}))
    with pytest.raises(ValueError, match="pooling_mode_weightedmean_tokens; the names are"):
        load(tmp_path)


def test_weights_of_a_head_that_we_have_not_are_left_out_by_name(tmp_path):
    theirs = transformers.BertForMaskedLM(transformers.BertConfig(**BERT))
    theirs.save_pretrained(tmp_path / "bert")
    torch.save(theirs.state_dict() | {"cls.species.weight": torch.ones(6, 16)}, tmp_path / "bert" / "pytorch_model.bin")
    (tmp_path / "bert" / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"cls\.species\.weight is left over.*import --leave-out"):
        import_run(tmp_path / "bert", tmp_path / "run")
    with pytest.raises(ValueError, match=r"begins with 'cls\.specie\.'; did you mean cls\.species\.weight"):
        import_run(tmp_path / "bert", tmp_path / "run", ["cls.specie."])
    import_run(tmp_path / "bert", tmp_path / "run", ["cls.species"])
    run = load(tmp_path / "run")
    assert run.network.value.outputs[0].eps == theirs.config.layer_norm_eps
    assert run.embed([[5, 6, 7]]).shape == (1, 16)  # without a tokenizer, texts are token ids


def refused(capsys, *words):
    capsys.readouterr()
    assert main([str(word) for word in words]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and message.count("\n") == 1
    return message


def test_what_cannot_be_imported_is_refused_in_one_line_and_leaves_nothing(tmp_path, capsys):
    out = tmp_path / "runs" / "mine"
    assert "there is no folder" in refused(capsys, "import", tmp_path / "nothing", "--out", out)
    (tmp_path / "text.txt").write_text("to be")
    assert "text.txt is not a file of a saved model" in refused(capsys, "import", tmp_path / "text.txt", "--out", out)
    source = tmp_path / "gpt2"
    write_gpt2(source, vocab_size=300)
    assert "tokens, but the model has 300" in refused(capsys, "import", source, "--out", out)
    (source / "tokenizer.json").write_text('{"model": 3}')
    assert "is not a tokenizer" in refused(capsys, "import", source, "--out", out)
    (source / "tokenizer.json").unlink()
    (source / "tokenizer.model").write_bytes(b"\0")
    assert "so that there is a tokenizer.json" in refused(capsys, "import", source, "--out", out)
    assert not out.exists() or not list(out.iterdir())
    (source / "tokenizer.model").unlink()
    assert main(["import", str(source), "--out", str(out)]) == 0
    assert "there is no tokenizer, so texts are token ids" in capsys.readouterr().err
    assert load(out).generate("1 2 3", tokens=2, temperature=0).startswith("1 2 3 ")
    assert "is a model of everyformer already" in refused(capsys, "import", out, "--out", tmp_path / "again")
    before = sorted(out.rglob("*"))
    assert "already exists and is not empty" in refused(capsys, "import", source, "--out", out)
    assert sorted(out.rglob("*")) == before


def test_a_tokenizer_that_may_be_that_of_another_model_is_named(tmp_path):
    write_gpt2(tmp_path / "gpt2", vocab_size=2 * SIZE)
    (note,) = read_folder(tmp_path / "gpt2").notes
    assert note.startswith(
        f"the tokenizer has 357 of the model's {2 * SIZE} tokens; if it belongs to another model, copy"
    )
    transformers.BertForMaskedLM(transformers.BertConfig(**BERT)).save_pretrained(tmp_path / "bert")
    byte_level().save(str(tmp_path / "bert" / "tokenizer.json"))
    (note,) = read_folder(tmp_path / "bert").notes
    assert note.startswith(
        "the tokenizer has no [CLS], [SEP], [MASK], so the masked model only gives vectors of texts; if"
    )
    word_pieces().save(str(tmp_path / "bert" / "tokenizer.json"))
    assert not any("[CLS]" in note for note in read_folder(tmp_path / "bert").notes)


def test_a_language_model_whose_tokenizer_loses_text_gives_vectors_and_says_so(tmp_path, capsys):
    write_gpt2(tmp_path / "gpt2", word_pieces)
    assert main(["import", str(tmp_path / "gpt2"), "--out", str(tmp_path / "run")]) == 0
    assert "the tokenizer does not keep all of a text, so the language model only gives" in capsys.readouterr().err
    for folder in ("run", "gpt2"):
        assert load(tmp_path / folder).methods == ("embed", "attention")
        assert load(tmp_path / folder).embed(["a rose"]).shape == (1, 16)
    assert "does not generate text" in refused(capsys, "generate", tmp_path / "run", "--prompt", "a rose")


def test_the_windows_of_a_language_model_are_no_longer_than_its_config_says(tmp_path):
    sizes = {name: size for name, size in BERT.items() if name != "max_position_embeddings"}
    for positions, context in ((40, 40), (4096, 256)):
        config = transformers.LlamaConfig(**sizes, max_position_embeddings=positions)
        transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / f"{positions}")
        import_run(tmp_path / f"{positions}", tmp_path / f"run{positions}")
        np.save(tmp_path / "tokens.npy", np.arange(3000) % SIZE)
        run = load(tmp_path / f"run{positions}", data=tmp_path / "tokens.npy")
        assert run.evaluate(limit=2)["window"] == context
