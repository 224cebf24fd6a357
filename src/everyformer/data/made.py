"""The sets that come with the library, made by rule and always the same: small, and learned in seconds.

plays        passages of the embedded Shakespeare, classified by the play they are from
sets         points around three centres, classified by the centre that most are near to
shapes       drawings of 28 x 28 points, classified by what is drawn
communities  a graph of groups whose members know each other better, and words that tell the group only roughly
algorithm    digits to copy, to reverse or to add, for sequences longer than those trained on: Dehghani et al. 2019
sentences    simple sentences in English and German: "twenty-two" is "zweiundzwanzig", and verbs change their place
"""

from __future__ import annotations

import re
from importlib import resources
from typing import Any

import numpy as np
from numpy.typing import NDArray

from everyformer.data.files import read_text

# Each play with its first line after the first speaker's name.
PLAYS = {
    "Coriolanus": "Before we proceed any further, hear me speak.",
    "Richard III": "Now is the winter of our discontent",
    "Richard II": "Old John of Gaunt, time-honour'd Lancaster,",
    "Romeo and Juliet": "Gregory, o' my word, we'll not carry coals.",
    "Henry VI, part 3": "I wonder how the king escaped our hands.",
    "The Winter's Tale": "If you shall chance, Camillo, to visit Bohemia, on",
    "Measure for Measure": "Escalus.",
    "The Taming of the Shrew": "I'll pheeze you, in faith.",
    "The Tempest": "Boatswain!",
}
PASSAGE = 300  # characters at least
SHAPES = ("bar", "cross", "disc", "line")
Part = tuple[Any, Any]


def shakespeare() -> str:
    with resources.as_file(resources.files("everyformer.data") / "embedded" / "shakespeare.txt.xz") as file:
        return read_text(file)


def plays() -> dict[str, Part]:
    speeches = re.split(r"\n{2,}", shakespeare())
    passages: list[tuple[str, str]] = []
    play, passage = "", ""
    openings = {line: name for name, line in PLAYS.items()}
    for speech in speeches:
        line = speech.split("\n")[1] if "\n" in speech else ""
        if line in openings:
            play, passage = openings.pop(line), ""
        passage += speech + "\n"
        if len(passage) >= PASSAGE:
            passages.append((passage, play))
            passage = ""
    return {"train": ([text for text, _ in passages], [name for _, name in passages])}


def sets(count: int = 1500) -> dict[str, Part]:
    random = np.random.RandomState(0)
    centre_33 = np.array([[1.5, 0, 0], [0, 1.5, 0], [0, 0, 1.5]])
    found: list[NDArray[np.float32]] = []
    labels: list[int] = []
    while len(found) < count:
        near_T = random.randint(3, size=random.randint(3, 12))
        times = np.sort(np.bincount(near_T, minlength=3))
        if times[-1] > times[-2]:  # one centre has the most
            found.append((centre_33[near_T] + random.normal(size=(len(near_T), 3)) * 0.5).astype(np.float32))
            labels.append(int(np.bincount(near_T).argmax()))
    return {"train": (found, labels)}


def shapes(count: int = 2000) -> dict[str, Part]:
    """White on black, of any size and place, with noise."""
    random = np.random.RandomState(0)
    y, x = np.mgrid[:28, :28]
    images, labels = np.zeros((count, 1, 28, 28), dtype=np.uint8), []
    for number in range(count):
        name = SHAPES[random.randint(len(SHAPES))]
        radius = random.uniform(5, 10)
        dy, dx = y - random.uniform(radius, 27 - radius), x - random.uniform(radius, 27 - radius)
        far, wide = np.hypot(dy, dx), np.maximum(abs(dy), abs(dx))
        drawn = {
            "bar": (abs(dy) < 2) & (wide < radius),
            "cross": (np.minimum(abs(dy), abs(dx)) < 2) & (wide < radius),
            "disc": far < radius,
            "line": (abs(dx) < 2) & (wide < radius),
        }[name]
        images[number, 0] = np.clip(drawn * 200 + random.normal(size=(28, 28)) * 20, 0, 255)
        labels.append(name)
    return {"train": (images, labels)}


def communities(nodes: int = 240, groups: int = 4, words: int = 40) -> dict[str, Any]:
    """A graph in the form of Cora's JSON."""
    random = np.random.RandomState(0)
    label_N = np.arange(nodes) % groups
    same_NN = label_N[:, None] == label_N[None]
    edge_NN = np.triu(random.rand(nodes, nodes) < np.where(same_NN, 0.12, 0.01), 1)
    # One word in four is of the group, the others are anyone's.
    own_NW = np.arange(words)[None] % groups == label_N[:, None]
    word_NW = random.rand(nodes, words) < np.where(own_NW, 0.2, 0.1)
    order = random.permutation(nodes).tolist()
    return {
        "num_nodes": nodes,
        "num_features": words,
        "num_classes": groups,
        "features": [np.flatnonzero(row).tolist() for row in word_NW],
        "labels": label_N.tolist(),
        "edges": np.argwhere(edge_NN).tolist(),
        "train": order[:40],
        "val": order[40:120],
        "test": order[120:],
    }


ALGORITHMS = ("copy", "reverse", "addition")
TRAINED = 40  # characters of a sequence at most
TESTED = (40, 80, 120, 200, 400)  # and exactly


def algorithm(name: str, count: int = 100_000, held: int = 200) -> dict[str, tuple[list[str], list[str]]]:
    """Pairs to learn from, of all lengths up to 40, and as many as `held` of them and of each longer length to test.

    Numbers are written from their last digit on, as in tensor2tensor (lower endian); both together with the sign have the length.
    """
    random = np.random.RandomState(ALGORITHMS.index(name))
    shortest = 3 if name == "addition" else 1

    def pairs(length_N: NDArray[np.int64]) -> tuple[list[str], list[str]]:
        sources, targets = [], []
        for length in length_N.tolist():
            digits = (random.randint(10, size=length) + ord("0")).astype(np.uint8).tobytes().decode()
            if name == "addition":
                sign = random.randint(1, length - 1)
                one, two = digits[:sign], digits[sign + 1 :]
                sources.append(f"{one}+{two}")
                targets.append(str(int(one[::-1]) + int(two[::-1]))[::-1])
            else:
                sources.append(digits)
                targets.append(digits if name == "copy" else digits[::-1])
        return sources, targets

    parts = {
        split: pairs(random.randint(shortest, TRAINED + 1, size=size))
        for split, size in (("train", count), ("valid", held))
    }
    return parts | {f"test{length}": pairs(np.full(held, length)) for length in TESTED}


WHO = {
    "the child": "das Kind", "my mother": "meine Mutter", "the teacher": "der Lehrer",
    "our neighbour": "unser Nachbar", "the girl": "das Mädchen", "a friend": "ein Freund",
}  # fmt: skip
DOES = {
    "sees": "sieht", "buys": "kauft", "counts": "zählt", "paints": "malt", "finds": "findet", "sells": "verkauft",
}  # fmt: skip
LIKE = {"red": "rote", "old": "alte", "small": "kleine", "green": "grüne", "beautiful": "schöne", "new": "neue"}
WHAT = {
    "apples": "Äpfel", "books": "Bücher", "houses": "Häuser", "birds": "Vögel",
    "flowers": "Blumen", "pictures": "Bilder", "boxes": "Kisten", "cups": "Tassen",
}  # fmt: skip
WHEN = {"": "", "today ": "heute ", "often ": "oft ", "on Monday ": "am Montag ", "in the evening ": "am Abend "}
ONES = [
    ("two", "zwei"), ("three", "drei"), ("four", "vier"), ("five", "fünf"), ("six", "sechs"), ("seven", "sieben"),
    ("eight", "acht"), ("nine", "neun"),
]  # fmt: skip
TENS = [("twenty", "zwanzig"), ("thirty", "dreißig"), ("forty", "vierzig"), ("fifty", "fünfzig"), ("sixty", "sechzig")]


def sentences(count: int = 5000) -> dict[str, tuple[list[str], list[str]]]:
    """English and German sentences. A time at the front puts the German verb before who does it."""
    random = np.random.RandomState(0)
    found: dict[str, str] = {}
    while len(found) < count:
        when, who, does, like, what = (
            list(words.items())[random.randint(len(words))] for words in (WHEN, WHO, DOES, LIKE, WHAT)
        )
        one, ten = ONES[random.randint(len(ONES))], TENS[random.randint(len(TENS))]
        many = (f"{ten[0]}-{one[0]}", f"{one[1]}und{ten[1]}") if random.randint(2) else one
        order = (does[1], who[1]) if when[1] else (who[1], does[1])
        found[f"{when[0]}{who[0]} {does[0]} {many[0]} {like[0]} {what[0]}."] = (
            f"{when[1]}{order[0]} {order[1]} {many[1]} {like[1]} {what[1]}."
        )
    return {"train": (list(found), list(found.values()))}
