"""What a call is given besides its tokens: checked, and joined to what its past knows, for the scene of the call."""

from __future__ import annotations

import torch
from torch import Tensor

from everyformer.network.cache import Cache
from everyformer.network.embed import WHOLE, describe


def check_visible(visible: Tensor | None, batch: int, length: int) -> None:
    if visible is None:
        return
    if not isinstance(visible, Tensor) or visible.dtype != torch.bool or tuple(visible.shape) != (batch, length):
        raise ValueError(
            f"visible is {describe(visible)}: give booleans of the shape ({batch}, {length}), True where a token is real"
        )
    if not torch.compiler.is_compiling() and not bool(visible.any(1).all()):
        row = int((~visible.any(1)).nonzero()[0])
        raise ValueError(f"sequence {row} of the batch is all padding; leave it out or give it a token")


def check_ids(x: Tensor, x_BTD: Tensor, name: str) -> None:
    if not isinstance(x, Tensor) or x.dtype not in WHOLE or x.shape != x_BTD.shape[:2]:
        raise ValueError(
            f"{name} are {describe(x)}: give whole numbers (int64 or int32) of the shape {tuple(x_BTD.shape[:2])}, one a token"
        )


def check_range(x: Tensor, size: int, name: str) -> None:
    if not torch.compiler.is_compiling() and not 0 <= int(x.min()) <= int(x.max()) < size:
        raise ValueError(
            f"{name}s go from {int(x.min())} to {int(x.max())}, but the model knows 0 to {size - 1}; build it for more"
        )


def count(visible_BT: Tensor, start: Tensor | int) -> Tensor:
    """The position of each visible token, counted from `start`; -1 where there is none."""
    return torch.where(visible_BT, visible_BT.long().cumsum(1) - 1 + start, -1)


def check_begin(begin: Tensor, batch: int, cache: Cache) -> None:
    if not isinstance(begin, Tensor) or begin.dtype not in WHOLE or tuple(begin.shape) != (batch,):
        raise ValueError(f"begin is {describe(begin)}: give {batch} whole numbers (int64 or int32), one a sequence")
    if cache.length:
        raise ValueError("positions go on from those of the past; give begin= only with the first call")
    if not torch.compiler.is_compiling() and int(begin.min()) < 0:
        raise ValueError(f"positions begin at 0 or later, not at {int(begin.min())}")


def positions(cache: Cache, visible: Tensor | None, x_BTD: Tensor, begin: Tensor | None) -> Tensor | None:
    """Where past and new keys stand, or None when key j stands at j."""
    if visible is None and cache.position_BK is None and begin is None:
        return None
    batch, length = x_BTD.shape[:2]
    visible = torch.ones(batch, length, dtype=torch.bool, device=x_BTD.device) if visible is None else visible
    before_BK = cache.position_BK
    if before_BK is None:
        before_BK = torch.arange(cache.length, device=x_BTD.device)[None]
    if cache.length == 0:
        return count(visible, 0 if begin is None else begin[:, None])
    start_B1 = before_BK.amax(1, keepdim=True) + 1
    return torch.cat((before_BK.expand(batch, -1), count(visible, start_B1)), dim=1)


def joined_documents(cache: Cache, documents: Tensor | None, x_BTD: Tensor) -> Tensor | None:
    if documents is None:
        if cache.document_BK is not None:
            raise ValueError("the past has documents, these tokens have none; give documents= with every call")
        return None
    check_ids(documents, x_BTD, "documents")
    if cache.length and cache.document_BK is None:
        raise ValueError("these tokens have documents, the past has none; give documents= from the first call on")
    return documents if cache.document_BK is None else torch.cat((cache.document_BK, documents), dim=1)


def by_position(document_BK: Tensor | None, position_BK: Tensor | None) -> Tensor | None:
    """Documents as a table by position, where the keys are not in place."""
    if document_BK is None or position_BK is None:
        return document_BK
    spare = int(position_BK.max()) + 1  # where padding goes
    table_BP = document_BK.new_full((document_BK.shape[0], spare + 1), -1)
    return table_BP.scatter(1, position_BK.masked_fill(position_BK < 0, spare).expand_as(document_BK), document_BK)


def checked_edges(edges: Tensor | None, batch: int, keys: int, position_BK: Tensor | None) -> Tensor | None:
    if edges is None:
        return None
    nodes = keys if position_BK is None or torch.compiler.is_compiling() else int(position_BK.max()) + 1
    fits = isinstance(edges, Tensor) and edges.dtype == torch.bool and edges.dim() in (2, 3)
    fits = fits and nodes <= edges.shape[-1] == edges.shape[-2] and (edges.dim() == 2 or edges.shape[0] in (1, batch))
    if not fits:
        raise ValueError(
            f"edges are {describe(edges)}: give booleans of the shape N, N or {batch}, N, N, for N nodes, at least {nodes}"
        )
    return edges if edges.dim() == 3 else edges[None]
