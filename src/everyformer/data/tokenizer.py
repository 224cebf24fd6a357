"""Tokenizers: map text to token ids and back.

bytes       the 256 bytes of UTF-8; not trained
characters  the characters of the text
bpe         byte-level byte-pair encoding, trained on the training split     Sennrich et al. 2016, Radford et al. 2019
gpt2        GPT-2's published merges, from its encoder.json and vocab.bpe    Radford et al. 2019
wordpiece   WordPiece, uncased and without accents, trained on the training split     Devlin et al. 2019
ids         none: the data are lists of token ids, which is found from the data

Trained tokenizers have the special tokens [PAD] [UNK] [CLS] [SEP] [MASK]. Training is deterministic.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from everyformer.data.datasets import GPT2_FILES, dataset_files
from everyformer.data.files import atomic_write, cache_folder, digest, read_json
from everyformer.data.subwords import HuggingFaceTokenizer, load_json
from everyformer.data.subwords import Kind as SubwordKind
from everyformer.data.subwords import Marks as Marks

Kind = Literal["bytes", "characters", "bpe", "gpt2", "wordpiece", "ids"]
Texts = Callable[[], Iterable[str]]  # returns a new iterator over the texts at each call
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
MAX_ALPHABET = 1000  # characters in a WordPiece vocabulary; a word with any other character is [UNK]
MAX_TRAINING_TEXT = 1 << 30  # characters of text that a tokenizer is trained on
Ids = NDArray[Any]
NO_MARKS: Marks = ((), ())


class Tokenizer(Protocol):
    """Encodes and decodes text, and can be saved to a run's folder."""

    vocabulary: int
    marks: Marks  # the tokens that are put before and after a text that a model reads as a whole
    special: frozenset[int]  # the ids of tokens that are no text
    end: tuple[int, ...]  # the tokens that end a text; the first is the one that is written
    key: str  # a cache key; equal keys encode alike
    bytes_per_token: NDArray[np.int64] | None  # bytes of text in each token; None if decoding does not restore the text

    @property
    def kind(self) -> Kind | SubwordKind: ...

    @property
    def start(self) -> tuple[int, ...]:
        """The tokens before a text that a model continues."""
        ...

    def encode(self, text: bytes) -> Ids: ...

    def encode_all(self, texts: Sequence[str]) -> list[Ids]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def special_id(self, name: str) -> int | None:
        """Returns the id of a special token such as [CLS], or None if the vocabulary has none."""
        ...

    def save(self, folder: Path) -> None: ...


class ByteTokenizer:
    """Each byte of UTF-8 is a token."""

    kind: Kind | SubwordKind = "bytes"
    marks: Marks = NO_MARKS
    start: tuple[int, ...] = ()
    special: frozenset[int] = frozenset()
    end: tuple[int, ...] = ()
    vocabulary = 256
    key = "bytes"
    bytes_per_token: NDArray[np.int64] | None = np.ones(256, dtype=np.int64)

    def encode(self, text: bytes) -> Ids:
        return np.frombuffer(text, dtype=np.uint8)

    def encode_all(self, texts: Sequence[str]) -> list[Ids]:
        return [self.encode(text.encode()) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode("utf-8", errors="replace")

    def special_id(self, name: str) -> int | None:
        return None

    def save(self, folder: Path) -> None:
        """Does nothing: there is nothing to save."""


class CharacterTokenizer:
    """Each character of the training text is a token. Encoding raises ValueError for any other character."""

    kind: Kind | SubwordKind = "characters"
    start: tuple[int, ...] = ()
    end: tuple[int, ...] = ()

    def __init__(self, characters: str, names: Sequence[str] = ()):
        self.characters, self.names = characters, list(names)  # names: special tokens, with the lowest ids
        self.special = frozenset(range(len(names)))
        first, last = ([self.names.index(name)] if name in names else [] for name in ("[CLS]", "[SEP]"))
        self.marks: Marks = (tuple(first), tuple(last))
        self.ids = {character: id_ for id_, character in enumerate(characters, len(names))}
        self.vocabulary = len(names) + len(characters)
        self.key = digest("characters", characters, *names)
        sizes = [0] * len(names) + [len(one.encode()) for one in characters]
        self.bytes_per_token: NDArray[np.int64] | None = np.array(sizes, dtype=np.int64)

    def encode(self, text: bytes) -> Ids:
        return self.encode_all([text.decode("utf-8")])[0]

    def encode_all(self, texts: Sequence[str]) -> list[Ids]:
        try:
            return [np.array([self.ids[character] for character in text], dtype=np.uint32) for text in texts]
        except KeyError as error:
            raise ValueError(
                f"the character {error} is not in the training text; use task.tokenizer={'bpe' if self.names else 'bytes'}, "
                "or remove the character"
            ) from None

    def decode(self, ids: Sequence[int]) -> str:
        return "".join([*self.names, *self.characters][id_] for id_ in ids)

    def special_id(self, name: str) -> int | None:
        return self.names.index(name) if name in self.names else None

    def save(self, folder: Path) -> None:
        content = {"characters": self.characters, "names": self.names} if self.names else self.characters
        (folder / "characters.json").write_text(json.dumps(content))


class TokenIds:
    """The data are token ids already; their text is their numbers, separated by spaces."""

    kind: Kind | SubwordKind = "ids"
    marks: Marks = NO_MARKS
    start: tuple[int, ...] = ()
    special: frozenset[int] = frozenset()
    key = "ids"

    def __init__(self, vocabulary: int, end: Sequence[int] = ()):
        self.vocabulary = vocabulary
        self.end: tuple[int, ...] = tuple(end)
        self.bytes_per_token: NDArray[np.int64] | None = np.ones(vocabulary, dtype=np.int64)  # the unit is the token

    def encode(self, text: bytes) -> Ids:
        try:
            ids = np.array(text.split(), dtype=np.int64)
        except (ValueError, OverflowError):
            ids = np.empty(0, np.int64)
        if len(ids) == 0:
            raise ValueError(f"{text.decode()!r} has no token ids; give numbers, such as --prompt '1 2 3'")
        return self.encode_all([ids])[0]

    def encode_all(self, texts: Sequence[Any]) -> list[Ids]:
        rows = [self.encode(one.encode()) if isinstance(one, str) else np.asarray(one) for one in texts]
        for row in rows:
            if len(row) and not 0 <= row.min() <= row.max() < self.vocabulary:
                raise ValueError(
                    f"the token ids {row.min()} to {row.max()} are not all below {self.vocabulary}, the number of ids that training had; "
                    "encode the text with the same tokenizer"
                )
        return rows

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(f"{id_} " for id_ in ids)

    def special_id(self, name: str) -> int | None:
        return None

    def save(self, folder: Path) -> None:
        (folder / "ids.json").write_text(json.dumps({"vocabulary": self.vocabulary, "end": self.end}))


def load(folder: Path) -> Tokenizer | None:
    """Loads the tokenizer that was saved in a folder. Returns None if there is none."""
    saved = read_json(folder / "characters.json")
    if saved is not None:
        return CharacterTokenizer(saved) if isinstance(saved, str) else CharacterTokenizer(**saved)
    if (saved := read_json(folder / "ids.json")) is not None:
        return TokenIds(**saved)
    if (folder / "tokenizer.json").is_file():
        return load_json(folder / "tokenizer.json")
    return None


def load_ids(arrays: Iterable[Ids], folder: Path | None) -> Tokenizer:
    """Returns the tokenizer of data that are token ids: the one saved in `folder`; otherwise one of all ids up to the largest."""
    saved = None if folder is None else load(folder)
    return saved or TokenIds(max((int(np.max(ids)) for ids in arrays if len(ids)), default=0) + 1)


def bytes_per_token(tokenizer: Tokenizer) -> NDArray[np.int64]:
    """Returns the bytes of text in each token. Raises ValueError if decoding does not restore the text."""
    if tokenizer.bytes_per_token is None:
        raise ValueError(
            f"the saved tokenizer ({tokenizer.kind}) does not keep all of a text, as a language model needs; leave out --init-from, "
            "or give a run of the task language or image"
        )
    return tokenizer.bytes_per_token


def load_or_train(
    kind: Kind,
    texts: Texts,
    vocabulary: int,
    fingerprint: str,
    folder: Path | None = None,
    files: str | None = None,
    names: Sequence[str] = (),
) -> Tokenizer:
    """Returns the tokenizer saved in `folder`; otherwise one of the given kind, trained on `texts` if need be.

    A trained tokenizer is cached under the `fingerprint` of the texts. GPT-2's files are read from the folder `files`; by default they
    are found, or downloaded, as a data set is. `names` are the special tokens of a character tokenizer; a trained one gets those that it
    does not have.
    Raises ValueError if `folder` is a run's folder whose tokenizer is missing: a newly trained one would assign other ids.
    """
    if folder is not None and (saved := load(folder)) is not None:
        return saved
    if kind == "gpt2":
        return load_gpt2(files)
    if kind == "bytes":
        return ByteTokenizer()
    if kind == "ids":
        raise ValueError(
            "task.tokenizer=ids is for lists of token ids, but the data are texts; choose another tokenizer"
        )
    if folder is not None and (folder / "recipe.json").is_file():
        missing = "characters" if kind == "characters" else "tokenizer"
        raise ValueError(
            f"{folder} has no {missing}.json, the tokenizer that the run was trained with; restore the file that train wrote"
        )
    if kind == "characters":
        return train_characters(texts, names)
    import tokenizers

    target = cache_folder() / digest("tokenizer", tokenizers.__version__, kind, vocabulary, fingerprint)
    if isinstance(cached := load(target), HuggingFaceTokenizer):
        return with_names(cached, names)
    trained = train(kind, texts, vocabulary)
    target.mkdir(exist_ok=True)
    with atomic_write(target / "tokenizer.json") as file:
        file.write(trained.inner.to_str().encode())
    return with_names(trained, names)


def with_names(tokenizer: HuggingFaceTokenizer, names: Sequence[str]) -> HuggingFaceTokenizer:
    """Returns the tokenizer with these special tokens; new ones have the highest ids."""
    new = [name for name in names if tokenizer.special_id(name) is None]
    if not new:
        return tokenizer
    tokenizer.inner.add_special_tokens(new)
    return HuggingFaceTokenizer(tokenizer.inner, tokenizer.generation)


def train_characters(texts: Texts, names: Sequence[str] = ()) -> CharacterTokenizer:
    """Returns a tokenizer of all characters of the texts, sorted, after the special tokens `names`."""
    characters: set[str] = set()
    for text in texts():
        characters.update(text)
    return CharacterTokenizer("".join(sorted(characters)), names)


def train(kind: Literal["bpe", "wordpiece"], texts: Texts, vocabulary: int) -> HuggingFaceTokenizer:
    """Trains a BPE or WordPiece vocabulary of the given size on the texts."""
    fixed = (256 if kind == "bpe" else 0) + len(SPECIAL)
    if vocabulary <= fixed:
        raise ValueError(
            f"task.vocabulary={vocabulary} is too small for {kind}, which always has {fixed} tokens; raise task.vocabulary"
        )
    return _train_bpe(texts, vocabulary) if kind == "bpe" else _train_wordpiece(texts, vocabulary)


def _train_bpe(texts: Texts, vocabulary: int) -> HuggingFaceTokenizer:
    from tokenizers import models, pre_tokenizers, trainers

    inner = _byte_level(models.BPE())
    trainer: Any = trainers.BpeTrainer(
        vocab_size=vocabulary,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL,
        show_progress=False,
    )
    inner.train_from_iterator(_limit(texts), trainer)
    return HuggingFaceTokenizer(inner)


def _train_wordpiece(texts: Texts, vocabulary: int) -> HuggingFaceTokenizer:
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

    def as_bert(model: Any) -> Any:
        inner = Inner(model)
        inner.normalizer = normalizers.BertNormalizer()
        inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        inner.decoder = decoders.WordPiece()
        return inner

    inner = as_bert(models.WordPiece(unk_token="[UNK]"))
    count: Counter[str] = Counter()
    for text in _limit(texts):
        count.update(text)
    normalized: Counter[str] = Counter()
    for character, times in count.items():
        for one in inner.normalizer.normalize_str(character):
            normalized[one] += 0 if one.isspace() else times
    alphabet = sorted(normalized, key=lambda one: (-normalized[one], one))[:MAX_ALPHABET]
    alphabet = sorted(one for one in alphabet if normalized[one])
    # The trainer numbers the pieces inside words in the order of a hash table, and breaks ties by these numbers. Passing them
    # as special tokens fixes their numbers; the vocabulary then moves to a new model, in which they are not special.
    inside = [f"##{one}" for one in alphabet]
    trainer: Any = trainers.WordPieceTrainer(
        vocab_size=vocabulary,
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        special_tokens=[*SPECIAL, *inside],
        show_progress=False,
    )
    inner.train_from_iterator(_limit(texts), trainer)
    inner = as_bert(models.WordPiece(inner.get_vocab(), unk_token="[UNK]"))
    inner.add_special_tokens(SPECIAL)
    return HuggingFaceTokenizer(inner)


def _limit(texts: Texts) -> Iterator[str]:
    """Yields the texts, up to MAX_TRAINING_TEXT characters."""
    length = 0
    for text in texts():
        yield text
        length += len(text)
        if length > MAX_TRAINING_TEXT:
            return


def _byte_level(model: Any) -> Any:
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, pre_tokenizers

    inner = Inner(model)
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return inner


def load_gpt2(folder: str | None = None) -> Tokenizer:
    """Loads GPT-2's tokenizer from its two published files."""
    from tokenizers import models

    if folder is not None and not Path(folder).is_dir():
        raise ValueError(
            f"task.tokenizer_files={folder} is not a folder; give the folder with encoder.json and vocab.bpe"
        )
    files = dataset_files(GPT2_FILES, folder)
    return HuggingFaceTokenizer(_byte_level(models.BPE.from_file(str(files["encoder.json"]), str(files["vocab.bpe"]))))
