"""Embeddings: one vector of each example, pooled from the last layer over the positions that are not padding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from everyformer.infer.predict import in_batches
from everyformer.network.output_head import Reading, read
from everyformer.value import nearest


def embeddings(
    rows: Sequence[Any], hidden: Callable[[list[Any]], tuple[Tensor, Tensor | None]], pooling: Reading, normalize: bool
) -> NDArray[np.float32]:
    """Returns the vectors of some rows: N, D. `hidden` returns the last layer of some rows, and which positions are visible.

    With `normalize` each vector has the length 1, so that dot products are cosines.
    """
    if pooling not in get_args(Reading):
        raise ValueError(f"pooling is {pooling!r}; {nearest(str(pooling), get_args(Reading))}")

    def pooled(some: list[Any]) -> Tensor:
        x_BTD, visible_BT = hidden(some)
        if visible_BT is not None:  # a class token that the network adds is visible
            visible_BT = F.pad(visible_BT, (x_BTD.shape[1] - visible_BT.shape[1], 0), value=True)
        x_BD = read(x_BTD.float(), visible_BT, pooling)
        return F.normalize(x_BD, dim=-1) if normalize else x_BD

    if not rows:
        raise ValueError("there is nothing to embed; give a list with at least one input")
    return in_batches(rows, pooled).numpy()
