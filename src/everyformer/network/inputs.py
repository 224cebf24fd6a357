"""Checks of the inputs of a call besides its tokens, and joining them with those of the cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from everyformer.attention.context import Positions
from everyformer.attention.has_data import can_read
from everyformer.network.cache import Cache
from everyformer.network.describe import describe
from everyformer.network.embed import INDEX_DTYPES


def check_visible(visible: Tensor | None, batch: int, length: int) -> None:
    """Raises ValueError if `visible` is not B, T booleans with a token in every sequence."""
    if visible is None:
        return
    if not isinstance(visible, Tensor) or visible.dtype != torch.bool or tuple(visible.shape) != (batch, length):
        raise ValueError(
            f"visible is {describe(visible)}: give booleans of the shape ({batch}, {length}), True where a token is real"
        )
    if can_read(visible) and not bool(visible.any(1).all()):
        row = int((~visible.any(1)).nonzero()[0])
        raise ValueError(f"sequence {row} of the batch is all padding; leave it out, or give it a token")


def hide_padding(inputs: Any, visible_BT: Tensor) -> Any:
    """The inputs with 0 for the features of padding, which may be NaN: 0 times NaN would be NaN in the gradients of the embedding."""
    if isinstance(inputs, tuple | list):
        return tuple(hide_padding(x, visible_BT) for x in inputs)
    is_features = isinstance(inputs, Tensor) and inputs.is_floating_point() and inputs.dim() == 3
    if not is_features or inputs.shape[:2] != visible_BT.shape:
        return inputs
    return inputs.masked_fill(~visible_BT[..., None], 0.0)


def check_ids(x: Tensor, x_BTD: Tensor, name: str) -> None:
    if not isinstance(x, Tensor) or x.dtype not in INDEX_DTYPES or x.shape != x_BTD.shape[:2]:
        raise ValueError(
            f"{name} are {describe(x)}: give integers (int64 or int32) of the shape {tuple(x_BTD.shape[:2])}, one per token"
        )


def check_range(x: Tensor, size: int, name: str) -> None:
    if can_read(x) and not 0 <= int(x.min()) <= int(x.max()) < size:
        raise ValueError(
            f"{name}s go from {int(x.min())} to {int(x.max())}, but the model has 0 to {size - 1}; build it with more"
        )


def count_positions(visible_BT: Tensor, start: Tensor | int) -> Tensor:
    """The position of each visible token, counted from `start`; -1 for padding."""
    return torch.where(visible_BT, visible_BT.long().cumsum(1) - 1 + start, -1)


def check_position_offset(position_offset: Tensor, batch: int, cache: Cache) -> None:
    if (
        not isinstance(position_offset, Tensor)
        or position_offset.dtype not in INDEX_DTYPES
        or tuple(position_offset.shape) != (batch,)
    ):
        raise ValueError(
            f"position_offset is {describe(position_offset)}: give {batch} integers (int64 or int32), one per sequence"
        )
    if cache.length:
        raise ValueError("positions continue from those of the cache; give position_offset= with the first call only")
    if can_read(position_offset) and int(position_offset.min()) < 0:
        raise ValueError(f"a position_offset must be 0 or more, not {int(position_offset.min())}")


def joined_positions(
    cache: Cache, visible: Tensor | None, x_BTD: Tensor, position_offset: Tensor | None
) -> Tensor | None:
    """The positions of cached and new keys, or None if key j has position j."""
    batch, length = x_BTD.shape[:2]
    if position_offset is not None:
        check_position_offset(position_offset, batch, cache)
    if visible is None and cache.position_BK is None and position_offset is None:
        return None
    visible = torch.ones(batch, length, dtype=torch.bool, device=x_BTD.device) if visible is None else visible
    cached_BK = cache.position_BK
    if cached_BK is None:
        cached_BK = torch.arange(cache.length, device=x_BTD.device)[None]
    if cache.length == 0:
        return count_positions(visible, 0 if position_offset is None else position_offset[:, None])
    start_B1 = cached_BK.amax(1, keepdim=True) + 1
    return torch.cat((cached_BK.expand(batch, -1), count_positions(visible, start_B1)), dim=1)


def joined_documents(cache: Cache, documents: Tensor | None, x_BTD: Tensor) -> Tensor | None:
    """The documents of cached and new keys."""
    if documents is None:
        if cache.document_BK is not None:
            raise ValueError("the cache has documents, these tokens have none; give documents with every call")
        return None
    check_ids(documents, x_BTD, "documents")
    if cache.length and cache.document_BK is None:
        raise ValueError("these tokens have documents, the cache has none; give documents from the first call on")
    return documents if cache.document_BK is None else torch.cat((cache.document_BK, documents), dim=1)


def by_position(document_BK: Tensor | None, positions: Positions) -> Tensor | None:
    """The documents indexed by position instead of by key, if the two differ."""
    position_BK = positions.key_BK
    if document_BK is None or position_BK is None:
        return document_BK
    padding = positions.table_size()  # the last column takes the documents of padding
    table_BP = document_BK.new_full((document_BK.shape[0], padding + 1), -1)
    return table_BP.scatter(1, position_BK.masked_fill(position_BK < 0, padding).expand_as(document_BK), document_BK)


def checked_edges(edges: Tensor | None, batch: int, keys: int, position_BK: Tensor | None) -> Tensor | None:
    """The edges as B or 1, N, N. Raises ValueError if they are not booleans of that shape for every node."""
    if edges is None:
        return None
    nodes = keys
    if position_BK is not None:  # a node without a row in the table has no edges, should its position not be readable
        nodes = int(position_BK.max()) + 1 if can_read(position_BK) else 0
    fits = isinstance(edges, Tensor) and edges.dtype == torch.bool and edges.dim() in (2, 3)
    fits = fits and nodes <= edges.shape[-1] == edges.shape[-2] and (edges.dim() == 2 or edges.shape[0] in (1, batch))
    if not fits:
        raise ValueError(
            f"edges are {describe(edges)}: give booleans of the shape N, N or {batch}, N, N, for N nodes, at least {nodes}"
        )
    return edges if edges.dim() == 3 else edges[None]


def checked_prefix(prefix: Tensor | None, batch: int) -> Tensor | None:
    """The lengths of the prefixes. Raises ValueError if they are not B whole numbers of 0 or more."""
    if prefix is None:
        return None
    if not isinstance(prefix, Tensor) or prefix.dtype not in INDEX_DTYPES or prefix.shape not in ((1,), (batch,)):
        raise ValueError(f"prefix is {describe(prefix)}: give {batch} integers (int64 or int32), one per sequence")
    if can_read(prefix) and int(prefix.min()) < 0:
        raise ValueError(f"a prefix has 0 tokens or more, not {int(prefix.min())}")
    return prefix
