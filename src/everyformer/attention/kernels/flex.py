"""PyTorch's FlexAttention: the pattern and the rules compiled into one kernel that skips the blocks nobody sees.

Forward anywhere; training on CUDA only. On a CPU it runs PyTorch's own unfused form. Scores with learned tables are
served, but their gradient is slow there; `sdpa` and `blocked` are the kernels to train those with.
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


def unsupported_reason(request: Request) -> str | None:
    if reason := request.needs_weights_reason():
        return reason
    if request.dropout:
        return "FlexAttention has no dropout on the weights; set the attention's dropout to 0"
    device = request.q_BHQE.device.type
    if device != "cuda" and torch.is_grad_enabled() and request.wants_gradient:
        return f"FlexAttention has no backward pass on {device}; train with sdpa, blocked or reference"
    if device == "cuda" and request.q_BHQE.dtype == torch.float64:
        return "FlexAttention on CUDA knows no float64; use float32 or less, or sdpa"
    return None


def run(request: Request) -> Tensor:
    context = request.context
    score = None
    if request.terms:

        def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            for term in request.terms:
                s = s + term(b, h, i, j)
            return s

    block_mask = _block_mask(request.pattern, context, request.batch, request.heads)
    answer = _kernel(context.positions.device.type)(
        request.q_BHQE,
        request.k_BHKE,
        request.v_BHKE,
        score_mod=score,
        block_mask=block_mask,
        scale=request.scale,
    )
    assert isinstance(answer, Tensor)
    return answer


def _block_mask(pattern: Pattern, context: Context, batch: int, heads: int) -> BlockMask:
    if context.positions.in_order and pattern.bound() == pattern:
        return _static_block_mask(
            pattern, context.positions.queries, context.positions.keys, heads, context.positions.device
        )
    return _make(pattern, context, batch, heads)


@lru_cache(maxsize=64)
def _static_block_mask(pattern: Pattern, queries: int, keys: int, heads: int, device: torch.device) -> BlockMask:
    with torch.inference_mode(False):  # what is kept must serve training too
        return _make(pattern, Context.of(queries, keys, device), 1, heads)


def _make(pattern: Pattern, context: Context, batch: int, heads: int) -> BlockMask:
    predicate = pattern.bind(context.side)

    def allows(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        k = context.positions.key_at(b, j)
        seen = predicate(b, h, context.positions.query_at(b, i), k)
        return seen if context.positions.key_BK is None else seen & (k >= 0)

    return create_block_mask(
        allows, batch, heads, context.positions.queries, context.positions.keys, device=context.positions.device
    )


@lru_cache(maxsize=2)
def _kernel(device: str) -> Callable[..., Any]:
    if device == "cuda":
        compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=False)

        def fused(*tensors: Tensor, **options: Any) -> Any:
            # Every pattern and rule is a program of its own. Past its limit of programs torch would go on unfused and
            # say so only in a warning: the limit is set far away, and reaching it is an error.
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
            # Detached, because it refuses tensors that want a gradient even under no_grad.
            return flex_attention(q.detach(), k.detach(), v.detach(), **options)

    return unfused


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's warnings: that it is unfused (on a CPU that is the choice), that it looks at inner gradients."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
