"""What every model that reads tokens is used for, whatever its output heads predict: embeddings and attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from everyformer.attention.context import SideInputs
from everyformer.data.tokenizer import NO_MARKS, Ids, Marks, Tokenizer
from everyformer.infer.embed import embeddings
from everyformer.infer.prompts import prefix_inputs
from everyformer.network.network import Network, PairNetwork
from everyformer.network.output_head import Reading
from everyformer.task.batch import pad
from everyformer.task.probe_input import EXAMPLE, ProbeInput, token_labels
from everyformer.task.task import Inference

MULTIPLE = 8


class TokenInference(Inference):
    """Reads texts through a tokenizer. `context` is the largest number of tokens of a text with its marks; None: no limit."""

    reads_examples = False

    def __init__(self, tokenizer: Tokenizer, context: int | None = None, marks: Marks = NO_MARKS):
        self.tokenizer, self.context, self.marks = tokenizer, context, marks

    def encode(self, inputs: Sequence[Any]) -> list[Ids]:
        """Returns the tokens of texts, or of lists of token ids, without marks."""
        rows = []
        for one in inputs:
            if isinstance(one, str):
                rows.append(self.tokenizer.encode(one.encode()))
                continue
            ids = np.asarray(one)
            if ids.ndim != 1 or (len(ids) and ids.dtype.kind not in "iu"):
                raise ValueError(f"{one!r} is neither a text nor a list of token ids; give one of them")
            if len(ids) and not 0 <= ids.min() <= ids.max() < self.tokenizer.vocabulary:
                raise ValueError(
                    f"the token ids {ids.min()} to {ids.max()} are not all from 0 to {self.tokenizer.vocabulary - 1}; give ids of "
                    "this model's tokenizer"
                )
            rows.append(ids)
        return rows

    def marked(self, ids: Ids) -> Ids:
        """Returns the tokens within the context, with the marks around them; an empty text becomes one token."""
        first, last = self.marks
        ids = ids if len(ids) or first or last else np.zeros(1, np.int64)
        length = None if self.context is None else self.context - len(first + last)
        return np.concatenate((first, ids[:length], last)).astype(np.int64)

    def embed(
        self, network: Network | PairNetwork, inputs: Sequence[Any], pooling: Reading = "mean", normalize: bool = False
    ) -> NDArray[np.float32]:
        device = next(network.parameters()).device

        def hidden(some: list[Ids]) -> Any:
            token_BT, visible_BT = (x.to(device) for x in pad(some, MULTIPLE))
            token_BT, visible_BT = token_BT[:, : self.context], visible_BT[:, : self.context]
            return network(
                token_BT, visible=visible_BT, side_inputs=whole_prefix(network, visible_BT)
            ).hidden, visible_BT

        return embeddings([self.marked(ids) for ids in self.encode(inputs)], hidden, pooling, normalize)

    def _probe_input(self, network: Network | PairNetwork, text: str | None, example: int | None) -> ProbeInput:
        """A text with its marks. Default: EXAMPLE."""
        if text == "":
            raise ValueError("the text is empty; give one, or leave it out")
        (ids,) = self.encode([text or EXAMPLE])
        token_T = self.marked(ids)
        token_BT = torch.from_numpy(token_T)[None].to(next(network.parameters()).device)
        options = {"side_inputs": whole_prefix(network, torch.ones_like(token_BT))}
        return ProbeInput((token_BT,), token_labels(self.tokenizer, token_T.tolist()), options)


def whole_prefix(network: Network | PairNetwork, visible_BT: Tensor) -> SideInputs | None:
    """Returns the side input with which whole texts are the prefix, for a network that reads one."""
    return prefix_inputs(network, visible_BT.sum(1)) if isinstance(network, Network) else None
