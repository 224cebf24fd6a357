"""Small data sets that come with the library. They are generated, always the same, and a tiny model is trained on them in seconds.

plays        passages of the embedded Shakespeare; the class is the play, the number the year in which it was written
sets         points around three centres; the class is the centre that most points are near to, the number their mean first coordinate
shapes       images of 28 x 28 pixels; the class is the shape drawn, the number its radius
communities  a graph with more edges inside groups than between them, and words that indicate the group only roughly; the number is
             the mean group of a node and its neighbours
sentences    simple sentences in English and German: "twenty-two" is "zweiundzwanzig", and word order differs
"""

from __future__ import annotations

import re
from importlib import resources
from typing import Any

import numpy as np
from numpy.typing import NDArray

from everyformer.data.files import read_text

# The first line of each play, after the first speaker's name.
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
YEARS = {  # the latest that scholars usually give
    "Coriolanus": 1608, "Richard III": 1593, "Richard II": 1595, "Romeo and Juliet": 1595, "Henry VI, part 3": 1591,
    "The Winter's Tale": 1611, "Measure for Measure": 1604, "The Taming of the Shrew": 1592, "The Tempest": 1611,
}  # fmt: skip
MIN_PASSAGE = 300  # characters
SHAPES = ("bar", "cross", "disc", "line")
Examples = tuple[Any, Any]  # inputs and labels


def shakespeare() -> str:
    """Returns the embedded text of nine plays."""
    with resources.as_file(resources.files("everyformer.data") / "embedded" / "shakespeare.txt.xz") as file:
        return read_text(file)


def plays() -> dict[str, Examples]:
    """Returns passages of whole speeches, each with the name of its play."""
    speeches = re.split(r"\n{2,}", shakespeare())
    passages: list[tuple[str, str]] = []
    play, passage = "", ""
    openings = {line: name for name, line in PLAYS.items()}
    for speech in speeches:
        line = speech.split("\n")[1] if "\n" in speech else ""
        if line in openings:
            play, passage = openings.pop(line), ""
        passage += speech + "\n"
        if len(passage) >= MIN_PASSAGE:
            passages.append((passage, play))
            passage = ""
    return {"train": ([text for text, _ in passages], [name for _, name in passages])}


def years() -> dict[str, Examples]:
    """Returns passages, each with the year of its play."""
    return {split: (texts, [YEARS[name] for name in names]) for split, (texts, names) in plays().items()}


def sets(count: int = 1500) -> dict[str, Examples]:
    """Returns sets of 3 to 11 points in 3 dimensions, each with the index of the centre that most points belong to."""
    random = np.random.RandomState(0)
    centre_33 = np.array([[1.5, 0, 0], [0, 1.5, 0], [0, 0, 1.5]])
    sets: list[NDArray[np.float32]] = []
    labels: list[int] = []
    while len(sets) < count:
        near_T = random.randint(3, size=random.randint(3, 12))
        counts = np.sort(np.bincount(near_T, minlength=3))
        if counts[-1] > counts[-2]:  # one centre has the most
            sets.append((centre_33[near_T] + random.normal(size=(len(near_T), 3)) * 0.5).astype(np.float32))
            labels.append(int(np.bincount(near_T).argmax()))
    return {"train": (sets, labels)}


def mean_points() -> dict[str, Examples]:
    """Returns the sets of points, each with the mean of their first coordinates."""
    return {split: (points, [float(one[:, 0].mean()) for one in points]) for split, (points, _) in sets().items()}


def shapes(count: int = 2000, numbers: bool = False) -> dict[str, Examples]:
    """Returns images of white shapes on black, of random size and position, with noise; with `numbers` labelled by their radius."""
    random = np.random.RandomState(0)
    y, x = np.mgrid[:28, :28]
    images, labels = np.zeros((count, 1, 28, 28), dtype=np.uint8), list[Any]()
    for number in range(count):
        name = SHAPES[random.randint(len(SHAPES))]
        radius = random.uniform(5, 10)
        dy, dx = y - random.uniform(radius, 27 - radius), x - random.uniform(radius, 27 - radius)
        distance, extent = np.hypot(dy, dx), np.maximum(abs(dy), abs(dx))
        shape = {
            "bar": (abs(dy) < 2) & (extent < radius),
            "cross": (np.minimum(abs(dy), abs(dx)) < 2) & (extent < radius),
            "disc": distance < radius,
            "line": (abs(dx) < 2) & (extent < radius),
        }[name]
        images[number, 0] = np.clip(shape * 200 + random.normal(size=(28, 28)) * 20, 0, 255)
        labels.append(radius if numbers else name)
    return {"train": (images, labels)}


def communities(nodes: int = 240, groups: int = 4, words: int = 40, numbers: bool = False) -> dict[str, Any]:
    """Returns a graph in the format of Cora's JSON file, labelled by groups or, with `numbers`, by mean groups."""
    random = np.random.RandomState(0)
    label_N = np.arange(nodes) % groups
    same_NN = label_N[:, None] == label_N[None]
    edge_NN = np.triu(random.rand(nodes, nodes) < np.where(same_NN, 0.12, 0.01), 1)
    # A quarter of the words are more frequent in the node's group than elsewhere.
    typical_NW = np.arange(words)[None] % groups == label_N[:, None]
    word_NW = random.rand(nodes, words) < np.where(typical_NW, 0.2, 0.1)
    order = random.permutation(nodes).tolist()
    near_NN = edge_NN | edge_NN.T | np.eye(nodes, dtype=bool)
    return {
        "num_nodes": nodes,
        "num_features": words,
        "num_classes": groups,
        "features": [np.flatnonzero(row).tolist() for row in word_NW],
        "labels": (near_NN @ label_N / near_NN.sum(1)).tolist() if numbers else label_N.tolist(),
        "edges": np.argwhere(edge_NN).tolist(),
        "train": order[:40],
        "val": order[40:120],
        "test": order[120:],
    }


SUBJECTS = {
    "the child": "das Kind", "my mother": "meine Mutter", "the teacher": "der Lehrer",
    "our neighbour": "unser Nachbar", "the girl": "das Mädchen", "a friend": "ein Freund",
}  # fmt: skip
VERBS = {
    "sees": "sieht", "buys": "kauft", "counts": "zählt", "paints": "malt", "finds": "findet", "sells": "verkauft",
}  # fmt: skip
ADJECTIVES = {"red": "rote", "old": "alte", "small": "kleine", "green": "grüne", "beautiful": "schöne", "new": "neue"}
OBJECTS = {
    "apples": "Äpfel", "books": "Bücher", "houses": "Häuser", "birds": "Vögel",
    "flowers": "Blumen", "pictures": "Bilder", "boxes": "Kisten", "cups": "Tassen",
}  # fmt: skip
TIMES = {"": "", "today ": "heute ", "often ": "oft ", "on Monday ": "am Montag ", "in the evening ": "am Abend "}
ONES = [
    ("two", "zwei"), ("three", "drei"), ("four", "vier"), ("five", "fünf"), ("six", "sechs"), ("seven", "sieben"),
    ("eight", "acht"), ("nine", "neun"),
]  # fmt: skip
TENS = [("twenty", "zwanzig"), ("thirty", "dreißig"), ("forty", "vierzig"), ("fifty", "fünfzig"), ("sixty", "sechzig")]


def sentences(count: int = 5000) -> dict[str, tuple[list[str], list[str]]]:
    """Returns English and German sentences. After a leading adverb of time, the German verb precedes the subject."""
    random = np.random.RandomState(0)
    german: dict[str, str] = {}  # by English sentence
    while len(german) < count:
        time, subject, verb, adjective, noun = (
            list(words.items())[random.randint(len(words))] for words in (TIMES, SUBJECTS, VERBS, ADJECTIVES, OBJECTS)
        )
        one, ten = ONES[random.randint(len(ONES))], TENS[random.randint(len(TENS))]
        number = (f"{ten[0]}-{one[0]}", f"{one[1]}und{ten[1]}") if random.randint(2) else one
        first, second = (verb[1], subject[1]) if time[1] else (subject[1], verb[1])
        german[f"{time[0]}{subject[0]} {verb[0]} {number[0]} {adjective[0]} {noun[0]}."] = (
            f"{time[1]}{first} {second} {number[1]} {adjective[1]} {noun[1]}."
        )
    return {"train": (list(german), list(german.values()))}
