"""PyTorch's FlexAttention: pattern and score terms compiled into one kernel that skips the blocks without an allowed pair.

The forward pass runs anywhere, the backward pass on CUDA only. On a CPU it is PyTorch's unfused form. Scores with learned tables
work, but their gradient is slow; train those with `sdpa` or `blocked`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from everyformer.attention.context import Context, Positions, SideInputs
from everyformer.attention.has_data import has_data
from everyformer.attention.kernels.request import Request
from everyformer.attention.pattern import Pattern

# Fraction of computed blocks up to which it is faster than a masked dense kernel. On an H200 with 16,384 positions, forward and backward
# take 1.6 ms at 0.03, 5.1 ms at 0.39 and 6.6 ms at 0.5, a masked SDPA 15.2 ms; a gather of the keys takes 2.7 ms at 0.03.
LIMIT = 0.75
BLOCK = 128  # positions in a block
MIN_WIDTH = 16  # of a head on CUDA


def unsupported_reason(request: Request) -> str | None:
    if reason := request.needs_weights_reason():
        return reason
    if request.dropout:
        return "FlexAttention has no dropout on the weights; set the attention's dropout to 0"
    device = request.q_BHQE.device.type
    if device != "cuda" and torch.is_grad_enabled() and request.requires_grad:
        return f"FlexAttention has no backward pass on {device}; train with sdpa, blocked or reference"
    if device == "cuda" and request.q_BHQE.dtype == torch.float64:
        return "FlexAttention on CUDA has no float64; use float32 or less, or sdpa"
    return None


def computed_fraction(request: Request) -> float:
    positions, pattern = request.context.positions, request.pattern
    if positions.in_order and pattern.superset() == pattern:
        return _static_fraction(pattern, positions.queries, positions.keys, request.heads, positions.device)
    return _fraction(_make(pattern, request.context, request.batch, request.heads))


def auto_limit(request: Request) -> float:
    """`auto` uses it for whole passes on a GPU with a pattern that `fused` has no program for."""
    q, v = request.q_BHQE, request.v_BHKE
    if not request.is_sparse or q.device.type != "cuda" or min(q.shape[-1], v.shape[-1]) < MIN_WIDTH:
        return -1
    if not has_data(q):  # torch.compile needs values; a memory plan assumes another kernel, which needs no less
        return -1
    # Terms with learned tables have slow gradients here, and a block mask that depends on data is made anew in each call.
    is_static = request.pattern.superset() == request.pattern
    return LIMIT if is_static and not request.terms and request.partial_pass_reason() is None else -1


def run(request: Request) -> Tensor:
    context = request.context
    score = None
    if request.terms or request.soft_cap is not None:

        def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            if request.soft_cap is not None:
                s = request.soft_cap * (s / request.soft_cap).tanh()
            for term in request.terms:
                s = s + term(b, h, i, j)
            return s

    block_mask = _block_mask(request.pattern, context, request.batch, request.heads)
    result = _kernel(context.positions.device.type)(
        request.q_BHQE,
        request.k_BHKE,
        request.v_BHKE,
        score_mod=score,
        block_mask=block_mask,
        scale=request.scale,
        enable_gqa=request.key_heads != request.heads,
        return_aux=None if request.sink_H is None else AuxRequest(lse=True),
    )
    if request.sink_H is None:
        assert isinstance(result, Tensor)
        return result
    output, aux = result  # without the sink, which takes its share of the denominator
    share_BHQ = (aux.lse - request.sink_H.to(aux.lse.dtype)[:, None]).sigmoid()
    return output * share_BHQ[..., None].to(output.dtype)


def _block_mask(pattern: Pattern, context: Context, batch: int, heads: int) -> BlockMask:
    positions = context.positions
    if positions.in_order and pattern.superset() == pattern:
        return _static_block_mask(pattern, positions.queries, positions.keys, heads, positions.device)
    return _make(pattern, context, batch, heads)


@lru_cache(maxsize=64)
def _static_block_mask(pattern: Pattern, queries: int, keys: int, heads: int, device: torch.device) -> BlockMask:
    """Returns the block mask of a pattern that reads no data, computed in rows of blocks. create_block_mask would need 8 bytes for
    each head and pair: 18 GiB for 8 heads and 16,384 positions."""
    positions, predicate, zero = (
        Positions(queries, keys, device),
        pattern.bind(SideInputs()),
        torch.zeros((), dtype=torch.long, device=device),
    )

    def allows(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return predicate(b, h, positions.query_at(b, i), j)

    with torch.inference_mode(False):  # what is cached must serve training too
        h, j = torch.arange(heads, device=device).view(-1, 1, 1), torch.arange(keys, device=device)
        some, every = [], []
        for start in range(0, queries, BLOCK):
            i = torch.arange(start, min(start + BLOCK, queries), device=device)[:, None]
            allowed = allows(zero, h, i, j).expand(heads, len(i), keys)
            allowed = F.pad(allowed, (0, -keys % BLOCK, 0, BLOCK - len(i))).unflatten(2, (-1, BLOCK))
            some.append(allowed.any(3).any(1))
            every.append(allowed.all(3).all(1))
        full = torch.stack(every, dim=1)[None]
        partial = torch.stack(some, dim=1)[None] & ~full
        return BlockMask.from_kv_blocks(
            *_ordered(partial), *_ordered(full), BLOCK_SIZE=BLOCK, mask_mod=allows, seq_lengths=(queries, keys)
        )


@lru_cache(maxsize=64)
def _static_fraction(pattern: Pattern, queries: int, keys: int, heads: int, device: torch.device) -> float:
    """Cached, because reading the block mask waits for the GPU."""
    return _fraction(_static_block_mask(pattern, queries, keys, heads, device))


def _fraction(block_mask: BlockMask) -> float:
    return 1 - float(block_mask.sparsity()) / 100


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the number of marked blocks in each row, and the indices of the row with the marked ones first."""
    indices = blocks.to(torch.int32).argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1).to(torch.int32), indices.to(torch.int32)


def _make(pattern: Pattern, context: Context, batch: int, heads: int) -> BlockMask:
    predicate, positions = pattern.bind(context.side), context.positions

    def allows(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        k = positions.key_at(b, j)
        allowed = predicate(b, h, positions.query_at(b, i), k)
        return allowed if positions.key_BK is None else allowed & (k >= 0)

    return create_block_mask(allows, batch, heads, positions.queries, positions.keys, device=positions.device)


@lru_cache(maxsize=2)
def _kernel(device: str) -> Callable[..., Any]:
    if device == "cuda":
        compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=False)

        def fused(*tensors: Tensor, **options: Any) -> Any:
            # Every pattern and score modification compiles to its own program. Past its limit of programs torch would continue
            # unfused and only warn: the limit is set high, and reaching it is an error.
            with (
                _quiet(),
                torch._dynamo.config.patch(
                    recompile_limit=4096, accumulated_recompile_limit=4096, fail_on_recompile_limit_hit=True
                ),
            ):
                return compiled(*tensors, **options)

        return fused

    def unfused(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        with _quiet():
            # Detached, because it refuses tensors that require a gradient even under no_grad.
            return flex_attention(q.detach(), k.detach(), v.detach(), **options)

    return unfused


@contextmanager
def _quiet() -> Iterator[None]:
    """Hides torch's warnings that the kernel is unfused, which is intended on a CPU, and that it reads inner gradients."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
