"""Tokenizers as the metadata of a GGUF file, from which llama.cpp encodes and decodes equally.

model   ours
gpt2    byte-level BPE, with llama.cpp's name for the way in which it splits a text into words
llama   SentencePiece's BPE with bytes for unknown characters; a token's score is the rank of its merge
rwkv    bytes, and characters: the longest token that fits is taken, which is the only one
none    token ids
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from everyformer.data.files import parse_json
from everyformer.data.subwords import BYTE, HuggingFaceTokenizer
from everyformer.data.tokenizer import ByteTokenizer, CharacterTokenizer, TokenIds, Tokenizer

Header = dict[str, Any]
NORMAL, UNKNOWN, CONTROL, UNUSED, BYTE_TOKEN = 1, 2, 3, 5, 6  # llama.cpp's types of tokens
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {  # regular expressions between words, and llama.cpp's names of them
    _CONTRACTIONS + r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST: "llama-bpe",
    _CONTRACTIONS + r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST: "qwen2",
}


def gguf_tokenizer(tokenizer: Tokenizer, rows: int) -> Header:
    """Returns the metadata of a tokenizer of a model with so many rows of embeddings. Raises ValueError if GGUF cannot express it."""
    header = _header(tokenizer)
    tokens, types = header.get("tokens"), header.get("token_type")
    if tokens is not None and types is not None:
        unused = rows - len(tokens)
        header["tokens"], header["token_type"] = (
            tokens + [f"[UNUSED{n}]" for n in range(unused)],
            types + [UNUSED] * unused,
        )
        if "scores" in header:
            header["scores"] += [0.0] * unused
    return {f"tokenizer.ggml.{name}": value for name, value in header.items()}


def _header(tokenizer: Tokenizer) -> Header:
    if isinstance(tokenizer, TokenIds):
        return {"model": "none"}
    if isinstance(tokenizer, ByteTokenizer):
        return {"model": "rwkv", "tokens": [f"\\x{byte:02x}" for byte in range(256)], "token_type": [NORMAL] * 256}
    if isinstance(tokenizer, CharacterTokenizer):
        tokens = [_escaped(one) for one in (*tokenizer.names, *tokenizer.characters)]
        return {"model": "rwkv", "tokens": tokens, "token_type": [NORMAL] * len(tokens)}
    if isinstance(tokenizer, HuggingFaceTokenizer):
        return _bpe(tokenizer)
    raise ValueError(f"gguf has no tokenizer of the kind {tokenizer.kind}")


def _escaped(text: str) -> str:
    """A token of the vocabulary rwkv: its bytes as hexadecimal numbers, unless they are letters and digits."""
    return "".join(
        one if one.isascii() and one.isalnum() else "".join(f"\\x{x:02x}" for x in one.encode()) for one in text
    )


def _bpe(tokenizer: HuggingFaceTokenizer) -> Header:
    tree = parse_json(tokenizer.inner.to_str())
    model = tree["model"]
    if model["type"] != "BPE":
        raise ValueError(f"gguf has no tokenizer with the vocabulary of {model['type']}")
    names: dict[str, int] = tokenizer.inner.get_vocab(with_added_tokens=True)
    by_id = {id_: name for name, id_ in names.items()}
    tokens = [by_id.get(id_, f"[UNUSED-{id_}]") for id_ in range(tokenizer.vocabulary)]
    merges = [tuple(one.split(" ", 1)) if isinstance(one, str) else tuple(one) for one in model["merges"]]
    types = [CONTROL if id_ in tokenizer.special else NORMAL if id_ in by_id else UNUSED for id_ in range(len(tokens))]
    header: Header = {"tokens": tokens, "token_type": types, **_ends(tokenizer, by_id)}
    if model.get("byte_fallback"):
        return {"model": "llama", "add_space_prefix": _has_prefix(tree), **header} | _pieces(
            tokens, types, merges, model
        )
    if not merges:
        raise ValueError("gguf needs merges in a BPE, and this one has none")
    return {"model": "gpt2", "pre": _split(tree), **header, "merges": [" ".join(one) for one in merges]}


def _pieces(tokens: list[str], types: list[int], merges: list[tuple[str, ...]], model: Mapping[str, Any]) -> Header:
    """Types and scores of SentencePiece's tokens: what is merged first has the highest score."""
    rank: dict[str, int] = {}
    for number, parts in enumerate(merges):
        rank.setdefault("".join(parts), number)
    found = [BYTE_TOKEN if BYTE.fullmatch(name) else type_ for name, type_ in zip(tokens, types, strict=True)]
    if model.get("unk_token") in tokens:
        found[tokens.index(model["unk_token"])] = UNKNOWN
    return {"token_type": found, "scores": [-float(rank.get(name, len(merges))) for name in tokens]}


def _ends(tokenizer: HuggingFaceTokenizer, names: Mapping[int, str]) -> Header:
    """The tokens that begin and end a text. llama.cpp stops at a token of its own choice where a file has none."""
    unused = [id_ for id_ in sorted(tokenizer.special) if id_ not in tokenizer.start]
    last = tokenizer.special_id("[SEP]")
    ends = [*tokenizer.end, *([] if last is None else [last]), *unused]
    if not ends:
        raise ValueError("gguf needs a token that ends a text, and this tokenizer has no special token")
    first = tokenizer.start[0] if tokenizer.start else ends[0]
    header: Header = {"bos_token_id": first, "eos_token_id": ends[0], "add_bos_token": bool(tokenizer.start)}
    header |= {"add_eos_token": False}
    others = (("padding_token_id", "[PAD]"), ("unknown_token_id", "[UNK]"))
    return header | {key: id_ for key, name in others if (id_ := tokenizer.special_id(name)) is not None}


def _has_prefix(tree: Mapping[str, Any]) -> bool:
    """Whether a text is read with a space before it."""
    steps = [one for one in (tree["normalizer"], tree["pre_tokenizer"]) if one]
    steps += [part for one in steps for part in one.get("normalizers", one.get("pretokenizers", ()))]
    return any(one["type"] == "Prepend" or one.get("prepend_scheme") in ("first", "always") for one in steps)


def _split(tree: Mapping[str, Any]) -> str:
    """llama.cpp's name of the way in which a text is split into words."""
    step, normalizer = tree["pre_tokenizer"] or {}, tree["normalizer"]
    steps = step.get("pretokenizers", [step])
    plain = normalizer is None or normalizer["type"] == "NFC"
    if (
        plain
        and len(steps) == 1
        and step.get("type") == "ByteLevel"
        and step["use_regex"]
        and not step["add_prefix_space"]
    ):
        return "gpt-2"
    if plain and [one.get("type") for one in steps] == ["Split", "ByteLevel"] and not steps[1]["use_regex"]:
        name = SPLITS.get(steps[0]["pattern"].get("Regex", ""))
        if name is not None:
            return name
    raise ValueError("llama.cpp does not know the way in which this tokenizer splits a text into words")
