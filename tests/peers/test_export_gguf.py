"""`everyformer export --to gguf`: the file alone gives equal logits and equal tokens, by a literal reading of llama.cpp's conventions."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

import everyformer
from everyformer.attention.rotary import LinearScaling, Llama3Scaling, NtkScaling, YarnScaling
from everyformer.cli.export import reasons
from everyformer.cli.main import main
from everyformer.data.gguf_tokenizer import SPLITS
from everyformer.data.subwords import HuggingFaceTokenizer
from everyformer.data.tokenizer import ByteTokenizer, TokenIds
from tests.peers.llama_cpp import File, logits
from tests.peers.test_export import TOKENIZERS, save
from tests.peers.test_import import CORPUS, TEXTS, byte_level, llama, refused, unigrams

MODELS = {
    "gpt2": ("gpt2", {"context": 40}),
    "llama": ("llama", {}),
    "mistral": ("mistral", {"window": 24}),
    "qwen2": ("llama", {"bias": True, "tied": True}),
    "qwen3": ("qwen3", {}),
    "gemma2": ("gemma2", {"window": 5, "scale": 0.25, "layers": 3}),
    "gemma": ("gemma", {"window": 5, "sliding": 2, "layers": 5, "scale": 0.25, "scaling": LinearScaling(8.0)}),
    "gemma2 of 46 layers": ("gemma2", {"window": 5, "layers": 46, "width": 8, "heads": 1, "key_heads": 1, "head_width": 4}),
    "linear": ("llama", {"scaling": LinearScaling(4.0)}),
    "llama3": ("llama", {"scaling": Llama3Scaling(8.0, context=32)}),
    "yarn": ("qwen3", {"scaling": YarnScaling(4.0, context=16)}),
    "yarn with its own factor": ("llama", {"scaling": YarnScaling(4.0, 16, attention=1.3)}),
}  # fmt: skip


def exported(run, file, *options):
    assert main(["export", str(run), "--to", "gguf", "--out", str(file), *options]) == 0
    return File(file)


@pytest.mark.parametrize("name", MODELS)
def test_a_file_alone_gives_equal_logits(name, tmp_path):
    member, settings = MODELS[name]
    network = save(tmp_path / "saved", member, ByteTokenizer(), **settings).double()
    file = exported(tmp_path / "saved", tmp_path / "a.gguf")
    tokens = torch.randint(256, (20,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.no_grad():
        expected = network(torch.tensor([tokens])).logits[0]
    rounding = 1e-7 * max(20, settings.get("layers", 1))  # the file has weights of norms plus 1, in float32
    assert (logits(file, tokens) - expected).abs().max() < rounding * expected.abs().max()


@pytest.mark.parametrize("precision, error", [("fp16", 2**-11), ("bf16", 2**-8)])
def test_maps_are_rounded_to_the_given_precision_and_vectors_are_not(precision, error, tmp_path):
    save(tmp_path / "saved", "gpt2", ByteTokenizer(), context=40)
    whole = exported(tmp_path / "saved", tmp_path / "a.gguf")
    half = exported(tmp_path / "saved", tmp_path / "b.gguf", "--precision", precision)
    for name, x in whole.tensors.items():
        is_map = x.ndim == 2 and name != "position_embd.weight"
        assert half.types[name] == ({"fp16": "F16", "bf16": "BF16"}[precision] if is_map else "F32")
        assert ((half.tensors[name] - x).abs() <= (error if is_map else 0) * x.abs() + 1e-7).all()
    assert half.fields["general.file_type"] == {"fp16": 1, "bf16": 32}[precision]


def unescaped(token):
    """A token of llama.cpp's vocabulary `rwkv` as bytes: \\xHH is a byte."""
    out, rest = b"", token
    while rest:
        size = 4 if rest.startswith("\\x") else 1
        out += bytes.fromhex(rest[2:4]) if size == 4 else rest[0].encode()
        rest = rest[size:]
    return out


def longest(tokens, text):
    """The longest token at each place, as llama.cpp's tokenizer `rwkv` finds it."""
    names, ids, rest = {unescaped(name): id_ for id_, name in enumerate(tokens)}, [], text.encode()
    while rest:
        found = max((name for name in names if rest.startswith(name)), key=len)
        ids.append(names[found])
        rest = rest[len(found) :]
    return ids


@pytest.mark.parametrize("name", ["bytes", "characters"])
def test_bytes_and_characters_are_tokens_of_which_the_longest_is_taken(name, tmp_path):
    tokenizer = TOKENIZERS[name]()
    save(tmp_path / "saved", "gpt2", tokenizer, context=40)
    fields = exported(tmp_path / "saved", tmp_path / "a.gguf").fields
    assert fields["tokenizer.ggml.model"] == "rwkv" and "tokenizer.ggml.eos_token_id" not in fields
    assert len(fields["tokenizer.ggml.tokens"]) == tokenizer.vocabulary
    for text in TEXTS:
        assert longest(fields["tokenizer.ggml.tokens"], text) == tokenizer.encode(text.encode()).tolist()


def split(name):
    """A byte-level BPE of our own that splits a text as llama.cpp does under this name."""
    inner = Tokenizer.from_str(TOKENIZERS["bpe"]().inner.to_str())
    pattern = next(pattern for pattern, one in SPLITS.items() if one == name)
    steps = [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    inner.pre_tokenizer = pre_tokenizers.Sequence(steps)
    return HuggingFaceTokenizer(inner)


def from_fields(fields):
    """A BPE from the file's vocabulary, merges and name of the split."""
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(one.split(" ", 1)) for one in fields["tokenizer.ggml.merges"]]
    inner = Tokenizer(models.BPE({name: id_ for id_, name in enumerate(tokens)}, merges))
    inner.decoder, name = decoders.ByteLevel(), fields["tokenizer.ggml.pre"]
    if name == "gpt-2":
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        digits = {"llama-bpe": r"\p{N}{1,3}", "qwen2": r"\p{N}"}[name]
        pattern = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        step = pre_tokenizers.Split(Regex(pattern.replace("DIGITS", digits)), "isolated")
        inner.pre_tokenizer = pre_tokenizers.Sequence([step, pre_tokenizers.ByteLevel(False, use_regex=False)])
    return inner


@pytest.mark.parametrize("name", ["gpt-2", *SPLITS.values()])
def test_a_byte_level_bpe_has_its_merges_and_the_name_of_its_split(name, tmp_path):
    tokenizer = TOKENIZERS["bpe"]() if name == "gpt-2" else split(name)
    save(tmp_path / "saved", "gpt2", tokenizer, context=40)
    fields = exported(tmp_path / "saved", tmp_path / "a.gguf").fields
    assert fields["tokenizer.ggml.model"] == "gpt2" and fields["tokenizer.ggml.pre"] == name
    inner, types = from_fields(fields), fields["tokenizer.ggml.token_type"]
    for text in TEXTS:
        assert inner.encode(text).ids == tokenizer.encode(text.encode()).tolist()
    assert {id_ for id_, type_ in enumerate(types) if type_ == 3} == tokenizer.special
    assert fields["tokenizer.ggml.eos_token_id"] == tokenizer.special_id("[SEP]")  # a token that no text has
    assert fields["tokenizer.ggml.add_bos_token"] is False


def spm(fields, text):
    """SentencePiece's BPE: join the neighbours whose token has the highest score, the first of equal ones; then bytes."""
    ids = {name: id_ for id_, name in enumerate(fields["tokenizer.ggml.tokens"])}
    scores, parts = fields["tokenizer.ggml.scores"], list(text.replace(" ", "▁"))
    parts = ["▁"] * fields["tokenizer.ggml.add_space_prefix"] + parts
    while True:
        pairs = [(scores[ids[a + b]], -n) for n, (a, b) in enumerate(pairwise(parts)) if a + b in ids]
        if not pairs:
            break
        n = -max(pairs)[1]
        parts[n : n + 2] = [parts[n] + parts[n + 1]]
    return [
        ids[name] for one in parts for name in ([one] if one in ids else [f"<0x{byte:02X}>" for byte in one.encode()])
    ]


def test_sentencepieces_bpe_has_scores_and_begins_texts(tmp_path):
    tokenizer = HuggingFaceTokenizer(llama())
    save(tmp_path / "saved", "llama", tokenizer)
    fields = exported(tmp_path / "saved", tmp_path / "a.gguf").fields
    assert fields["tokenizer.ggml.model"] == "llama" and fields["tokenizer.ggml.add_bos_token"] is True
    assert (fields["tokenizer.ggml.bos_token_id"], fields["tokenizer.ggml.eos_token_id"]) == (1, 2)
    for text in (*TEXTS, *CORPUS):
        assert spm(fields, text) == tokenizer.encode(text.encode()).tolist()


def test_a_larger_table_has_unused_tokens_and_token_ids_have_no_tokenizer(tmp_path, capsys):
    tokenizer = TOKENIZERS["bpe"]()
    torch.manual_seed(0)
    everyformer.save(everyformer.build("gpt2", "tiny", vocabulary=tokenizer.vocabulary + 3), tmp_path / "a")
    tokenizer.save(tmp_path / "a")
    fields = exported(tmp_path / "a", tmp_path / "a.gguf").fields
    assert fields["tokenizer.ggml.token_type"][-3:] == [5, 5, 5]
    assert len(set(fields["tokenizer.ggml.tokens"])) == fields["gpt2.vocab_size"] == tokenizer.vocabulary + 3
    everyformer.save(everyformer.build("gpt2", "tiny", vocabulary=50), tmp_path / "b")
    TokenIds(50).save(tmp_path / "b")
    assert exported(tmp_path / "b", tmp_path / "b.gguf").fields["tokenizer.ggml.model"] == "none"
    assert "so there is no tokenizer" in capsys.readouterr().err


def test_what_llama_cpp_has_not_is_refused_in_one_line(tmp_path, capsys):
    def message(folder, *options):
        return refused(capsys, "export", folder, "--to", "gguf", "--out", tmp_path / "out.gguf", *options)

    for value, why in (
        (everyformer.member("bert", "tiny"), "not for a BertForPreTraining"),
        (everyformer.member("transformer-xl", "tiny"), "transformers has no such model"),
        (everyformer.member("gemma2", "tiny", soft_cap=None), "attn_logit_softcapping is none"),
        (everyformer.member("llama", "tiny", scaling=NtkScaling(2.0)), "ntk_scaling"),
        (everyformer.member("llama", "tiny", scaling=YarnScaling(2.0, 64, fast=4.0)), "beta_fast = 4.0"),
    ):
        everyformer.save(everyformer.build(value), tmp_path / "saved")
        assert why in message(tmp_path / "saved")
        assert reasons(everyformer.build(value))["gguf"] is not None
    for name, inner, why in (("a", unigrams(), "the vocabulary of Unigram"), ("b", byte_level(), "no special token")):
        save(tmp_path / name, "gpt2", HuggingFaceTokenizer(inner), context=40)
        assert why in message(tmp_path / name)
    assert "--precision is not an option of --to hf" in refused(
        capsys, "export", tmp_path / "a", "--to", "hf", "--out", tmp_path / "hf", "--precision", "fp16"
    )
    assert not list(tmp_path.glob("out*")) and not (tmp_path / "hf").exists()


def test_a_folder_gets_the_file_too(tmp_path):
    save(tmp_path / "saved", "gpt2", ByteTokenizer(), context=40)
    assert main(["export", str(tmp_path / "saved"), "--to", "gguf", "--out", str(tmp_path / "out")]) == 0
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.gguf"]
    assert File(tmp_path / "out" / "model.gguf")["context_length"] == 40
