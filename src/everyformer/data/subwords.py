"""Tokenizers of the `tokenizers` library: those that training made, and those of models of transformers.

tokenizer.json             any tokenizer of the library: byte-level BPE, WordPiece, SentencePiece's BPE or unigrams, whole words
vocab.json and merges.txt  byte-level BPE, as GPT-2 and RoBERTa were published
vocab.txt                  WordPiece, as BERT was published
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from everyformer.data.files import decode_utf8, digest, parse_json
from everyformer.data.generation import FILE, Generation, end_tokens, load_generation

Ids = NDArray[Any]
Kind = Literal["bpe", "wordpiece", "unigram", "words"]
Marks = tuple[tuple[int, ...], tuple[int, ...]]  # tokens before a text, and after it
KINDS: dict[str, Kind] = {"WordPiece": "wordpiece", "Unigram": "unigram", "WordLevel": "words"}
OTHER_NAMES = {"[PAD]": "<pad>", "[UNK]": "<unk>", "[CLS]": "<s>", "[SEP]": "</s>", "[MASK]": "<mask>"}
ENDS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>")  # names of tokens at which published models end a text
PROBES = ("a", "A", "1", "the")  # texts that show which tokens are put around a text
BYTE = re.compile(r"<0x[0-9A-F]{2}>")
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's sign of a space
MAX_TOKEN = 1 << 16  # characters of a token's name


class HuggingFaceTokenizer:
    """A tokenizer of the `tokenizers` library. `generation` is how the model that it was published with generates."""

    def __init__(self, inner: Any, generation: Generation | None = None):
        inner.no_padding()
        inner.no_truncation()
        text = inner.to_str()
        tree = parse_json(text)
        self.inner, self.key = inner, digest(text)
        self.kind: Kind = KINDS.get(type(inner.model).__name__, "bpe")
        names = inner.get_vocab(with_added_tokens=True)
        self.vocabulary = max(names.values(), default=-1) + 1
        self.special = frozenset(int(one["id"]) for one in tree["added_tokens"] if one["special"])
        self.has_template = inner.post_processor is not None
        self.marks = self._marks()
        self.generation = dict(generation or {})
        known = tuple(names[name] for name in ENDS if name in names)
        self.end = end_tokens(self.generation, self.vocabulary) or known
        self.bytes_per_token: NDArray[np.int64] | None = _bytes_per_token(tree, names, self.vocabulary)

    def _marks(self) -> Marks:
        """The tokens around a text: those of the tokenizer's template; without one, BERT's, if it has them."""
        if not self.has_template:
            first, last = (self.special_id(name) for name in ("[CLS]", "[SEP]"))
            return () if first is None else (first,), () if last is None else (last,)
        for probe in PROBES:
            plain, marked = (self.inner.encode(probe, add_special_tokens=one).ids for one in (False, True))
            for start in range(len(marked) - len(plain) + 1):
                if plain and marked[start : start + len(plain)] == plain:
                    return tuple(marked[:start]), tuple(marked[start + len(plain) :])
        return (), ()

    @property
    def start(self) -> tuple[int, ...]:
        """The tokens with which the template begins a text that is to be continued."""
        return self.marks[0] if self.has_template else ()

    def encode(self, text: bytes) -> Ids:
        return self.encode_all([text.decode("utf-8", errors="replace")])[0]

    def encode_all(self, texts: Sequence[str]) -> list[Ids]:
        """Returns the tokens of each text, without marks around it."""
        try:
            encodings = self.inner.encode_batch_fast(list(texts), add_special_tokens=False)
        except Exception as error:  # the library raises nothing narrower, as for a character without a token
            raise ValueError(f"the tokenizer cannot read a text ({error}); restore its tokenizer.json") from None
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.inner.decode(list(ids)))

    def special_id(self, name: str) -> int | None:
        """Returns the id of a special token by BERT's name for it, also if it has RoBERTa's."""
        id_: int | None = self.inner.token_to_id(name)
        return self.inner.token_to_id(OTHER_NAMES[name]) if id_ is None and name in OTHER_NAMES else id_

    def save(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text(self.inner.to_str(pretty=True), "utf-8")
        if self.generation:
            (folder / FILE).write_text(json.dumps(self.generation, indent=2) + "\n", "utf-8")


def _bytes_per_token(tree: Any, names: Mapping[str, int], vocabulary: int) -> NDArray[np.int64] | None:
    """The bytes of text in each token; None if decoding does not restore the text.

    In a byte-level vocabulary each letter of a token's name stands for one byte. SentencePiece's BPE writes a space as a sign of its
    own, and spells characters that it has not by their bytes.
    """
    byte_level = (tree["decoder"] or {}).get("type") == "ByteLevel"
    if not byte_level and not (tree["model"].get("type") == "BPE" and tree["model"].get("byte_fallback")):
        return None
    sizes = np.zeros(vocabulary, dtype=np.int64)
    for name, id_ in names.items():
        sizes[id_] = len(name) if byte_level else 1 if BYTE.fullmatch(name) else len(name.replace(SPACE, " ").encode())
    return sizes


def load_json(path: Path) -> HuggingFaceTokenizer:
    """Loads a tokenizer.json. Raises ValueError if it is none."""
    from tokenizers import Tokenizer as Inner

    generation = load_generation(path.parent)
    try:
        _check_ids(parse_json(path.read_bytes()))
        return HuggingFaceTokenizer(Inner.from_file(str(path)), generation)
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{path} is not a tokenizer ({error}); restore the file") from None


def _check_ids(tree: Any) -> None:
    """Raises ValueError if a token has an id far above the size of the vocabulary: the library takes memory for all ids below."""
    vocabulary = tree["model"]["vocab"]
    count = len(vocabulary) + len(tree["added_tokens"])
    added = {one["content"]: one["id"] for one in tree["added_tokens"]}
    for name, id_ in {**(vocabulary if isinstance(vocabulary, dict) else {}), **added}.items():
        if isinstance(id_, int) and id_ >= 2 * count + 4096:
            raise ValueError(f"the token {name!r} has the id {id_}, but there are {count} tokens")


def load_published(folder: Path, model_type: str) -> HuggingFaceTokenizer | None:
    """Loads the tokenizer of a folder of transformers. Returns None if it has none."""
    settings = _settings(folder / "tokenizer_config.json")
    if (folder / "tokenizer.json").is_file():
        loaded = load_json(folder / "tokenizer.json")
        return loaded if loaded.has_template else HuggingFaceTokenizer(_without_marks(loaded.inner), loaded.generation)
    if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        return _byte_level(folder, model_type, settings)
    if (folder / "vocab.txt").is_file():
        return _wordpiece(folder / "vocab.txt", settings)
    if found := sorted(path.name for path in folder.glob("*.model")):
        raise ValueError(
            f"{folder} has its tokenizer as {found[0]} alone; open it with transformers and save it, so that there is a tokenizer.json"
        )
    return None


def _without_marks(inner: Any) -> Any:
    """The tokenizer with a template that adds nothing, as transformers uses a tokenizer that has none."""
    from tokenizers import processors

    inner.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B", special_tokens=[])
    return inner


def _settings(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        settings = parse_json(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); restore it") from None
    return settings if isinstance(settings, dict) else {}


def _byte_level(folder: Path, model_type: str, settings: Mapping[str, Any]) -> HuggingFaceTokenizer:
    from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
    from tokenizers import Tokenizer as Inner

    try:
        inner = Inner(models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt")))
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{folder} has a vocab.json and merges.txt that are no BPE ({error}); restore both") from None
    prefix = bool(settings.get("add_prefix_space", False))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    inner.decoder = decoders.ByteLevel()
    known = [name for name in ("<s>", "<pad>", "</s>", "<unk>", "<|endoftext|>") if inner.token_to_id(name) is not None]
    inner.add_special_tokens(known)
    if inner.token_to_id("<mask>") is not None:
        inner.add_special_tokens([AddedToken("<mask>", lstrip=True, special=True)])
    start, end = (inner.token_to_id(name) for name in ("<s>", "</s>"))
    if model_type == "roberta" and start is not None and end is not None:
        marks = (("</s>", end), ("<s>", start))
        inner.post_processor = processors.RobertaProcessing(*marks, trim_offsets=True, add_prefix_space=prefix)
    return HuggingFaceTokenizer(inner if inner.post_processor else _without_marks(inner), load_generation(folder))


def _wordpiece(path: Path, settings: Mapping[str, Any]) -> HuggingFaceTokenizer:
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

    names = [line.strip() for line in decode_utf8(path.read_bytes(), str(path)).splitlines()]
    vocabulary = {name: number for number, name in enumerate(names) if len(name) < MAX_TOKEN}
    if "[UNK]" not in vocabulary:
        raise ValueError(f"{path} is not the vocabulary of a BERT: it has no [UNK]; give the one of the model")
    cased = any(name != name.lower() for name in vocabulary if not name.startswith("["))
    inner = Inner(models.WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=100))
    inner.normalizer = normalizers.BertNormalizer(
        lowercase=bool(settings.get("do_lower_case", not cased)),
        strip_accents=settings.get("strip_accents"),
        handle_chinese_chars=bool(settings.get("tokenize_chinese_chars", True)),
    )
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece()
    inner.add_special_tokens([name for name in OTHER_NAMES if name in vocabulary])
    if "[CLS]" in vocabulary and "[SEP]" in vocabulary:
        inner.post_processor = processors.BertProcessing(("[SEP]", vocabulary["[SEP]"]), ("[CLS]", vocabulary["[CLS]"]))
    return HuggingFaceTokenizer(inner)
