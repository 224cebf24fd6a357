"""Problems: questions with one right answer, drawn without a file. Each tests one ability of a model.

    PROBLEMS["mqar"].examples("train", seed=0, indices=[7], length=8)        # [("q3B7A0z3=z", "3", "B", "7", ...)]

An example has pieces: what is given and what is to be answered, by turns. It is a function of (split, seed, index, length). A hash of
the question decides whether it belongs to training, validation or test, so no question is in two of them.

copy, reverse, addition    digits; numbers have the lowest digit first, as in tensor2tensor: Dehghani et al. 2019
sorting                    digits in order: Deletang et al. 2022
mqar                       keys (letters) and values (digits), then every key once, in random order: Arora et al. 2023, without filler
noisy-recall               the same, with other characters between the pairs: Poli et al. 2024
induction                  the character after the first star, asked for by a second one: Olsson et al. 2022, Gu & Dao 2023
selective-copy             the letters among many dots, in order: Gu & Dao 2023
needle                     a sentence with a number planted in the embedded Shakespeare, the number asked for at the end: Kamradt 2023
listops                    < minimum, > maximum, ~ median rounded down, + sum modulo 10, up to ]: Nangia & Bowman 2018. Expressions have
                           a given length; all ten answers are equally frequent
parity, even-pairs, modular-arithmetic, cycle-navigation     regular languages: Deletang et al. 2022
dyck                       the closing brackets that are missing, of four kinds and at most 8 deep: Hewitt et al. 2020
pathfinder                 whether two ends lie on one dashed path of a drawing, read row by row: Linsley et al. 2018
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from hashlib import blake2b
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.random import RandomState

from everyformer.data.pathfinder import draw_pathfinder
from everyformer.data.synthetic import shakespeare

SPLITS = ("train", "valid", "test")
SHARES = 8  # one part of the questions is for validation, one for test, the rest for training
TRIES = 2000  # draws until a question is of the split
DIGITS, BITS, LETTERS = "0123456789", "01", "abcdefghijklmnop"
KEYS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
NOISE = ".,;:!?-~"
OPENING, CLOSING, MAX_DEPTH = "([{<", ")]}>", 8
COPIED = 8  # letters of a selective copy
MAX_LISTOPS_DEPTH = 6
NAMES = ("Juliet", "Romeo", "Richard", "Ariel", "Miranda", "Leontes", "Angelo", "Warwick")
TEXT = "\n !$&',-.:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"  # the characters of the embedded Shakespeare
SENTENCE = "The number of {} is "
Pieces = tuple[str, ...]


@dataclass(frozen=True)
class Problem:
    """What a problem tests, its characters and lengths, and the function that draws one example of a length.

    The length is the number of characters that are given before the first answer, without the = that ends them.
    """

    name: str
    tests: str
    draw: Callable[[RandomState, int], Pieces] | None  # None: examples are not drawn
    answers: str  # the characters of answers
    others: str  # the other characters
    length: int = 40  # the longest in training, by default
    test_length: tuple[int, ...] = (40, 80, 160)  # by default
    shortest: int = 8  # in training; shorter ones have too few questions
    longest: int | None = None  # that can be drawn
    answer_length: int | None = None  # characters to answer, at most; None: as many as the length
    fixed: bool = False  # whether all questions in training have the same length
    splits: tuple[str, ...] = SPLITS

    @property
    def chance(self) -> float:
        """The share of right characters of answers that are guessed with equal probabilities."""
        return 1 / len(self.answers)

    @property
    def alphabet(self) -> str:
        return "".join(sorted({*self.answers, *self.others, "="}))

    @property
    def is_label(self) -> bool:
        """Whether the answer is a single character."""
        return self.answer_length == 1

    def check(self, length: int) -> None:
        """Raises ValueError if no example has this length."""
        if not self.shortest <= length <= (self.longest or length):
            bounds = f"from {self.shortest} to {self.longest}" if self.longest else f"of {self.shortest} or more"
            raise ValueError(f"{self.name} has no questions of length {length}; give a length {bounds}")

    def size(self, length: int) -> int:
        """Returns the largest number of characters of an example."""
        return length + 1 + (self.answer_length or length)

    def examples(self, split: str, seed: int, indices: Iterable[int], length: int) -> list[Pieces]:
        """Returns of each example what is given and what is to be answered, by turns."""
        random = RandomState()  # takes longer to make than to seed
        return [self.example(random, split, (seed % 2**32, index % 2**32, length), length) for index in indices]

    def example(self, random: RandomState, split: str, numbers: tuple[int, ...], length: int) -> Pieces:
        """Returns the example of a seed, an index and a length, which are the numbers."""
        assert self.draw is not None
        random.seed((SPLITS.index(split), *numbers))
        for _ in range(TRIES):
            pieces = self.draw(random, length)
            if split_of("".join(pieces[::2])) == split:
                return pieces
        raise ValueError(f"no question of {self.name} of length {length} is for {split}; give a greater length")


def split_of(question: str) -> str:
    """Returns the split to which a question belongs."""
    part = blake2b(question.encode(), digest_size=1).digest()[0] % SHARES
    return {0: "valid", 1: "test"}.get(part, "train")


def problem_name(data: str | None) -> str | None:
    """Returns the name of the problem that `data` names, if there is no such file; else None."""
    return data if data in PROBLEMS and not Path(data).exists() else None


def _characters(random: RandomState, alphabet: str, count: int) -> str:
    return "".join(alphabet[index] for index in random.randint(len(alphabet), size=count))


def _copy(random: RandomState, length: int) -> Pieces:
    digits = _characters(random, DIGITS, length)
    return f"{digits}=", digits


def _reverse(random: RandomState, length: int) -> Pieces:
    question, digits = _copy(random, length)
    return question, digits[::-1]


def _sorting(random: RandomState, length: int) -> Pieces:
    question, digits = _copy(random, length)
    return question, "".join(sorted(digits))


def _addition(random: RandomState, length: int) -> Pieces:
    digits, sign = _characters(random, DIGITS, length), random.randint(1, length - 1)
    first, second = digits[:sign], digits[sign + 1 :]
    return f"{first}+{second}=", str(int(first[::-1]) + int(second[::-1]))[::-1]


def _recall(random: RandomState, length: int, noise: str = "") -> Pieces:
    count = length // (4 if noise else 2)
    keys = [KEYS[index] for index in random.permutation(len(KEYS))[:count]]
    values = _characters(random, DIGITS, count)
    gap_N = np.bincount(random.randint(count + 1, size=length - 2 * count if noise else 0), minlength=count + 1)
    gaps = [_characters(random, noise, gap) for gap in gap_N]
    given = "".join(gap + key + value for gap, key, value in zip(gaps, keys, values, strict=False)) + gaps[-1]
    first, *rest = random.permutation(count).tolist()
    return f"{given}={keys[first]}", values[first], *chain.from_iterable((keys[one], values[one]) for one in rest)


def _induction(random: RandomState, length: int) -> Pieces:
    letters, star = _characters(random, LETTERS, length), random.randint(length - 1)
    return f"{letters[:star]}*{letters[star + 1 :]}*", letters[star + 1]


def _selective_copy(random: RandomState, length: int) -> Pieces:
    count = min(COPIED, length // 2)
    letters, given = _characters(random, LETTERS, count), ["."] * length
    for place, letter in zip(sorted(random.permutation(length)[:count]), letters, strict=True):
        given[place] = letter
    return f"{''.join(given)}=", letters


@cache
def _shakespeare() -> str:
    return shakespeare()


def _needle(random: RandomState, length: int) -> Pieces:
    name, number = NAMES[random.randint(len(NAMES))], _characters(random, DIGITS, 4)
    asked = SENTENCE.format(name)
    planted = f"\n{asked}{number}.\n"
    text, size = _shakespeare(), length - len(planted) - len(asked) - 1
    start, place = random.randint(len(text) - size), random.randint(size + 1)
    hay = text[start : start + size]
    return f"{hay[:place]}{planted}{hay[place:]}\n{asked}", number


def _listops(random: RandomState, length: int) -> Pieces:
    wanted, value = random.randint(10), -1
    while value != wanted:
        text, value = _expression(iter(random.rand(4 * length).tolist()), length, MAX_LISTOPS_DEPTH)
    return f"{text}=", str(value)


def _expression(random: Iterator[float], length: int, depth: int) -> tuple[str, int]:
    """Returns an expression of a length, 1 or at least 4, and its value."""
    if length == 1:
        digit = int(10 * next(random))
        return str(digit), digit
    operator, texts, values, left = "<>~+"[int(4 * next(random))], list[str](), list[int](), length - 2
    while left:
        room = left if texts else left - 1  # there are two arguments at least
        size = int(next(random) * (room - 3)) + 4 if depth > 1 and room >= 4 and next(random) < 0.5 else 1
        text, value = _expression(random, size, depth - 1)
        texts.append(text)
        values.append(value)
        left -= size
    ordered, count = sorted(values), len(values)
    median = (ordered[(count - 1) // 2] + ordered[count // 2]) // 2
    results = {"<": ordered[0], ">": ordered[-1], "~": median, "+": sum(values) % 10}
    return f"{operator}{''.join(texts)}]", results[operator]


def _parity(random: RandomState, length: int) -> Pieces:
    bits = _characters(random, BITS, length)
    return f"{bits}=", str(bits.count("1") % 2)


def _even_pairs(random: RandomState, length: int) -> Pieces:
    letters = _characters(random, "ab", length)
    return f"{letters}=", str(int(letters[0] == letters[-1]))


def _modular_arithmetic(random: RandomState, length: int) -> Pieces:
    count = (length + 1) // 2
    numbers, operators = random.randint(5, size=count).tolist(), _characters(random, "+-*", count - 1)
    terms = [numbers[0]]
    for operator, number in zip(operators, numbers[1:], strict=True):
        if operator == "*":
            terms[-1] = terms[-1] * number % 5
        else:
            terms.append(number if operator == "+" else -number)
    text = "".join(map(str, chain.from_iterable(zip(numbers, [*operators, "="], strict=True))))
    return text, str(sum(terms) % 5)


def _cycle_navigation(random: RandomState, length: int) -> Pieces:
    moves = _characters(random, "<.>", length)
    return f"{moves}=", str((moves.count(">") - moves.count("<")) % 5)


def _dyck(random: RandomState, length: int) -> Pieces:
    open_kinds = list[int]()
    while not open_kinds:
        given, opens, kinds = "", random.rand(length) < 0.5, random.randint(4, size=length)
        for opening, kind in zip(opens.tolist(), kinds.tolist(), strict=True):
            if not open_kinds or (opening and len(open_kinds) < MAX_DEPTH):
                open_kinds.append(kind)
                given += OPENING[kind]
            else:
                given += CLOSING[open_kinds.pop()]
    return f"{given}=", "".join(CLOSING[kind] for kind in reversed(open_kinds))


def _pathfinder(random: RandomState, length: int) -> Pieces:
    pixels, connected = draw_pathfinder(random, int(length**0.5))
    return f"{pixels}=", str(int(connected))


_ROWS = (
    Problem("copy", "reading a sequence again from its start", _copy, DIGITS, "", test_length=(40, 80, 120, 200, 400)),
    Problem("reverse", "reading a sequence backwards", _reverse, DIGITS, "", test_length=(40, 80, 120, 200, 400)),
    Problem("addition", "aligning two numbers and carrying", _addition, DIGITS, "+",
            test_length=(40, 80, 120, 200, 400)),
    Problem("sorting", "counting every character of a sequence", _sorting, DIGITS, ""),
    Problem("mqar", "finding many values by their keys (associative recall)", _recall, DIGITS, KEYS, 32, (32, 64, 104),
            longest=2 * len(KEYS)),
    Problem("noisy-recall", "finding values by keys among noise", partial(_recall, noise=NOISE), DIGITS, KEYS + NOISE,
            test_length=(40, 80, 160), longest=4 * len(KEYS)),
    Problem("induction", "recalling what followed a character the last time", _induction, LETTERS, "*",
            test_length=(40, 80, 160, 400), answer_length=1),
    Problem("selective-copy", "keeping what matters and leaving out the rest", _selective_copy, LETTERS, ".",
            64, (64, 128, 256), answer_length=COPIED),
    Problem("needle", "finding one sentence in a long text", _needle, DIGITS, TEXT,
            256, (256, 512, 1024), shortest=96, answer_length=4),
    Problem("listops", "evaluating nested expressions", _listops, DIGITS, "<>~+]", answer_length=1),
    Problem("parity", "keeping one bit that any character may flip", _parity, BITS, "", answer_length=1),
    Problem("even-pairs", "comparing the first character with the last", _even_pairs, BITS, "ab", answer_length=1),
    Problem("modular-arithmetic", "calculating modulo 5, products before sums", _modular_arithmetic, "01234", "+-*",
            answer_length=1),
    Problem("cycle-navigation", "counting steps modulo 5", _cycle_navigation, "01234", "<.>", answer_length=1),
    Problem("dyck", "keeping a stack of brackets", _dyck, CLOSING, OPENING, answer_length=MAX_DEPTH),
    Problem("pathfinder", "following a path in a drawing that is read row by row", _pathfinder, BITS, ".#o",
            256, (256,), 144, answer_length=1, fixed=True),
)  # fmt: skip
PROBLEMS = {problem.name: problem for problem in _ROWS}
