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
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from everyformer.attention.context import Context
from everyformer.attention.kernels.request import Request
from everyformer.attention.pattern import Pattern

LIMIT = 0.5  # fraction of computed blocks up to which it is faster than a masked dense kernel on a GPU


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
    block_mask = _block_mask(request.pattern, request.context, request.batch, request.heads)
    return 1 - float(block_mask.sparsity()) / 100


def auto_limit(request: Request) -> float:
    """`auto` uses it for whole passes on a GPU with a pattern that no other sparse kernel computes."""
    if not request.is_sparse or request.q_BHQE.device.type != "cuda":
        return -1
    # Terms with learned tables have slow gradients here, and a block mask that depends on data is made anew in each call.
    is_static = request.pattern.superset() == request.pattern
    return LIMIT if is_static and not request.terms and request.partial_pass_reason() is None else -1


def run(request: Request) -> Tensor:
    context = request.context
    score = None
    if request.terms:

        def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            for term in request.terms:
                s = s + term(b, h, i, j)
            return s

    block_mask = _block_mask(request.pattern, context, request.batch, request.heads)
    output = _kernel(context.positions.device.type)(
        request.q_BHQE,
        request.k_BHKE,
        request.v_BHKE,
        score_mod=score,
        block_mask=block_mask,
        scale=request.scale,
    )
    assert isinstance(output, Tensor)
    return output


def _block_mask(pattern: Pattern, context: Context, batch: int, heads: int) -> BlockMask:
    positions = context.positions
    if positions.in_order and pattern.superset() == pattern:
        return _static_block_mask(pattern, positions.queries, positions.keys, heads, positions.device)
    return _make(pattern, context, batch, heads)


@lru_cache(maxsize=64)
def _static_block_mask(pattern: Pattern, queries: int, keys: int, heads: int, device: torch.device) -> BlockMask:
    with torch.inference_mode(False):  # what is cached must serve training too
        return _make(pattern, Context.of(queries, keys, device), 1, heads)


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
