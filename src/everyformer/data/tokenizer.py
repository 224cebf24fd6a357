"""Tokenizers: text to whole numbers and back.

bytes       the 256 bytes of UTF-8                                  nothing to learn
characters  the characters of the text
bpe         byte-level pairs learned from the training text         Sennrich et al. 2016, GPT-2's way
gpt2        GPT-2's published pairs, from its encoder.json and vocab.bpe
wordpiece   pieces of words learned from the training text, without case and accents     BERT's way

Those that are learned know the tokens [PAD] [UNK] [CLS] [SEP] [MASK]. Learning gives the same tokens every time.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from everyformer.data.files import cache_folder, digest, whole, written
from everyformer.data.named import find

Kind = Literal["bytes", "characters", "bpe", "gpt2", "wordpiece"]
Texts = Callable[[], Iterable[str]]  # gives the texts anew each time
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
ALPHABET = 1000  # characters that wordpiece knows; a word with another one is [UNK]
ENOUGH = 1 << 30  # characters of text from which a tokenizer is learned, at most
Ids = NDArray[Any]


class Tokenizer(Protocol):
    """Encodes and decodes, and can be written to a run's folder."""

    kind: Kind
    vocabulary: int
    key: str  # differs where tokens differ
    sizes: NDArray[np.int64] | None  # bytes of text in each token; None where tokens do not give the text back

    def encode(self, text: bytes) -> Ids: ...

    def encode_all(self, texts: Sequence[str]) -> list[Ids]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def special(self, name: str) -> int | None:
        """The number of a token such as [CLS], or None."""
        ...

    def save(self, folder: Path) -> None: ...


class Bytes:
    kind: Kind = "bytes"
    vocabulary = 256
    key = "bytes"
    sizes: NDArray[np.int64] | None = np.ones(256, dtype=np.int64)

    def encode(self, text: bytes) -> Ids:
        return np.frombuffer(text, dtype=np.uint8)

    def encode_all(self, texts: Sequence[str]) -> list[Ids]:
        return [self.encode(text.encode()) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode("utf-8", errors="replace")

    def special(self, name: str) -> int | None:
        return None

    def save(self, folder: Path) -> None:
        """Nothing is learned."""


class Characters:
    """Characters that the text has; an unknown one is an error that names it."""

    kind: Kind = "characters"

    def __init__(self, characters: str, names: Sequence[str] = ()):
        self.characters, self.names = characters, list(names)  # names: of the tokens that stand for no character
        self.number = {character: number for number, character in enumerate(characters, len(names))}
        self.vocabulary = len(names) + len(characters)
        self.key = digest("characters", characters, *names)
        sizes = [0] * len(names) + [len(one.encode()) for one in characters]
        self.sizes: NDArray[np.int64] | None = np.array(sizes, dtype=np.int64)

    def encode(self, text: bytes) -> Ids:
        return self.encode_all([text.decode("utf-8")])[0]

    def encode_all(self, texts: Sequence[str]) -> list[Ids]:
        try:
            return [np.array([self.number[character] for character in text], dtype=np.uint32) for text in texts]
        except KeyError as error:
            raise ValueError(
                f"the character {error} is not in the text learned from; use task.tokenizer={'bpe' if self.names else 'bytes'}, "
                "or leave it out"
            ) from None

    def decode(self, ids: Sequence[int]) -> str:
        return "".join([*self.names, *self.characters][number] for number in ids)

    def special(self, name: str) -> int | None:
        return self.names.index(name) if name in self.names else None

    def save(self, folder: Path) -> None:
        found = {"characters": self.characters, "names": self.names} if self.names else self.characters
        (folder / "characters.json").write_text(json.dumps(found))


class Trained:
    """A tokenizer of the `tokenizers` library."""

    def __init__(self, inner: Any):
        self.inner = inner
        self.kind: Kind = "wordpiece" if type(inner.model).__name__ == "WordPiece" else "bpe"
        self.vocabulary = int(inner.get_vocab_size())
        self.key = digest(inner.to_str())
        # On the level of bytes each letter of a token's name stands for one byte.
        reversible = type(inner.decoder).__name__ == "ByteLevel"
        names = [inner.id_to_token(number) for number in range(self.vocabulary)]
        self.sizes: NDArray[np.int64] | None = np.array([len(name) for name in names]) if reversible else None

    def encode(self, text: bytes) -> Ids:
        return self.encode_all([text.decode("utf-8", errors="replace")])[0]

    def encode_all(self, texts: Sequence[str]) -> list[Ids]:
        return [np.array(found.ids, dtype=np.uint32) for found in self.inner.encode_batch_fast(list(texts))]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.inner.decode(list(ids)))

    def special(self, name: str) -> int | None:
        number: int | None = self.inner.token_to_id(name)
        return number

    def save(self, folder: Path) -> None:
        self.inner.save(str(folder / "tokenizer.json"))


def load(folder: Path) -> Tokenizer | None:
    """The tokenizer that a run wrote, or None."""
    found = written(folder / "characters.json")
    if found is not None:
        return Characters(found) if isinstance(found, str) else Characters(**found)
    if (folder / "tokenizer.json").is_file():
        from tokenizers import Tokenizer as Inner

        try:
            return Trained(Inner.from_file(str(folder / "tokenizer.json")))
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(
                f"{folder / 'tokenizer.json'} is not a tokenizer ({error}); restore it from a copy"
            ) from None
    return None


def make(
    kind: Kind,
    texts: Texts,
    vocabulary: int,
    mark: str,
    folder: Path | None = None,
    files: str | None = None,
    names: Sequence[str] = (),
) -> Tokenizer:
    """The tokenizer found in a folder; otherwise one of a kind. A run's folder must have what was learned.

    What is learned is kept in the cache folder under the texts' `mark`. GPT-2's comes from `files`, or where sets are kept.
    `names` are of tokens that are put before characters.
    """
    if folder is not None and (saved := load(folder)) is not None:
        return saved
    if kind == "gpt2":
        return gpt2(files)
    if kind == "bytes":
        return Bytes()
    if folder is not None and (folder / "recipe.json").is_file():  # else a run's tokens would mean something else
        lost = "characters" if kind == "characters" else "tokenizer"
        raise ValueError(
            f"{folder} has no {lost}.json, which says what its tokens mean; bring the file back that train wrote, or give a new run "
            "the tokenizer of the old one"
        )
    if kind == "characters":
        return characters(texts, names)
    import tokenizers

    target = cache_folder() / digest("tokenizer", tokenizers.__version__, kind, vocabulary, mark)
    if (kept := load(target)) is not None:
        return kept
    learned = learn(kind, texts, vocabulary)
    target.mkdir(exist_ok=True)
    with whole(target / "tokenizer.json") as file:
        file.write(learned.inner.to_str().encode())
    return learned


def characters(texts: Texts, names: Sequence[str] = ()) -> Characters:
    """All characters of the texts, in order."""
    seen: set[str] = set()
    for text in texts():
        seen.update(text)
    return Characters("".join(sorted(seen)), names)


def learn(kind: Literal["bpe", "wordpiece"], texts: Texts, vocabulary: int) -> Trained:
    """Pieces of words learned from the texts."""
    least = 256 if kind == "bpe" else 0
    if vocabulary <= least + len(SPECIAL):
        raise ValueError(
            f"task.vocabulary={vocabulary} leaves no room to learn {kind} beside {least + len(SPECIAL)} tokens that it always "
            "has; give more"
        )
    return _bpe(texts, vocabulary) if kind == "bpe" else _wordpiece(texts, vocabulary)


def _bpe(texts: Texts, vocabulary: int) -> Trained:
    from tokenizers import models, pre_tokenizers, trainers

    inner = _byte_level(models.BPE())
    trainer: Any = trainers.BpeTrainer(
        vocab_size=vocabulary,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL,
        show_progress=False,
    )
    inner.train_from_iterator(_some(texts), trainer)
    return Trained(inner)


def _wordpiece(texts: Texts, vocabulary: int) -> Trained:
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

    def dressed(model: Any) -> Any:
        inner = Inner(model)
        inner.normalizer = normalizers.BertNormalizer()
        inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        inner.decoder = decoders.WordPiece()
        return inner

    inner = dressed(models.WordPiece(unk_token="[UNK]"))
    count: Counter[str] = Counter()
    for text in _some(texts):
        count.update(text)
    plain: Counter[str] = Counter()
    for character, times in count.items():
        for one in inner.normalizer.normalize_str(character):
            plain[one] += 0 if one.isspace() else times
    alphabet = sorted(plain, key=lambda one: (-plain[one], one))[:ALPHABET]
    alphabet = sorted(one for one in alphabet if plain[one])
    # The trainer numbers the pieces within words in the order of a hash table, and breaks ties by these numbers: named
    # beforehand they have the same numbers every time. They must not stay special, so the words are put into a new model.
    inside = [f"##{one}" for one in alphabet]
    trainer: Any = trainers.WordPieceTrainer(
        vocab_size=vocabulary,
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        special_tokens=[*SPECIAL, *inside],
        show_progress=False,
    )
    inner.train_from_iterator(_some(texts), trainer)
    inner = dressed(models.WordPiece(inner.get_vocab(), unk_token="[UNK]"))
    inner.add_special_tokens(SPECIAL)
    return Trained(inner)


def _some(texts: Texts) -> Iterator[str]:
    """The texts, up to as much as is enough to learn from."""
    length = 0
    for text in texts():
        yield text
        length += len(text)
        if length > ENOUGH:
            return


def _byte_level(model: Any) -> Any:
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, pre_tokenizers

    inner = Inner(model)
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return inner


def gpt2(files: str | None = None) -> Tokenizer:
    """GPT-2's tokenizer from its two published files."""
    from tokenizers import models

    if files is not None and not Path(files).is_dir():
        raise ValueError(f"task.tokenizer_files={files} is not a folder; give the one with encoder.json and vocab.bpe")
    found = find("gpt2_bpe", files)
    return Trained(_byte_level(models.BPE.from_file(str(found["encoder.json"]), str(found["vocab.bpe"]))))
