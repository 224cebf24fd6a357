"""One example as the network of a task reads it, with labels for its positions: the input of every picture and probe.

inputs = run.task.inference.probe_input(run.network, "To be")
run.network(*inputs.inputs, **inputs.options, probe=probe)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from everyformer.data.tokenizer import SPECIAL, Ids, Tokenizer

EXAMPLE = "Shall I compare thee to a summer"  # the default text


@dataclass(frozen=True)
class ImageCells:
    """An image of which each position reads a cell."""

    pixel_CYX: Tensor  # from 0 to 1
    cell_P2: Tensor  # row and column of the cell that each position reads; -1 if it reads none
    size: int  # pixels of a side of a cell
    query: int | None  # the position whose attention is of interest; None: the mean of all


@dataclass(frozen=True)
class GraphNodes:
    """A graph whose nodes are the positions."""

    edge_NN: Tensor
    class_N: Tensor
    node: int  # the node of interest


@dataclass(frozen=True)
class ProbeInput:
    """The arguments of the network for a batch of one example. Padding, if there is any, follows the labelled positions."""

    inputs: tuple[Any, ...]
    labels: Sequence[str]  # of the positions (of the decoder, if there is an encoder)
    options: Mapping[str, Any] = field(default_factory=dict)
    source_labels: Sequence[str] = ()  # of the positions of the encoder
    image: ImageCells | None = None
    graph: GraphNodes | None = None


def token_labels(tokenizer: Tokenizer, ids: Ids | Sequence[int]) -> list[str]:
    """The tokens as text, without line breaks; special tokens by name, and parts of characters by their bytes."""
    names = {tokenizer.special_id(name): name for name in SPECIAL}
    return [names.get(int(token)) or _label(tokenizer, int(token)) for token in ids]


def _label(tokenizer: Tokenizer, token: int) -> str:
    """A token as text; control characters, and a byte that is only a part of a character, by their numbers."""
    text = tokenizer.decode([token]).replace("\n", "\\n")
    if text == "\N{REPLACEMENT CHARACTER}" and tokenizer.kind == "bytes":
        return f"\\x{token:02x}"
    return "".join(one if one.isprintable() else f"\\x{ord(one):02x}" for one in text)


def refuse_text(text: str | None, reads: str) -> None:
    """Raises ValueError if a text is given to a task that reads none."""
    if text is not None:
        raise ValueError(f"this run reads {reads}, not text; give the number of an example")


def check_index(index: int, count: int, what: str) -> int:
    """Returns the index. Raises ValueError if there is no such example."""
    if not 0 <= index < count:
        raise ValueError(f"example {index} is not one of the {count:,} {what} (0 to {count - 1})")
    return index
