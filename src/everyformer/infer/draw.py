"""Drawing the next tokens on a GPU: `choose` in two programs, for any temperatures, where no filter needs the tokens sorted."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 1024  # logits of one program
Sampling = tuple[float, int | None, float | None, float | None]  # temperature, top_k, top_p, min_p


def draws(sampling: Sampling) -> bool:
    """Returns whether tokens with these options are drawn by programs: greedily, or without filters."""
    temperature, top_k, top_p, min_p = sampling
    return temperature == 0 or (top_k is None and top_p in (None, 1) and not min_p)


def draw(
    logits_BV: Tensor, uniform_NB: Tensor, step_1: Tensor, temperature_B: Tensor, token_B: Tensor, finite_B: Tensor
) -> None:
    """Writes the tokens that `choose` returns for the uniform numbers of a step, and 0 into `finite_B` where logits are broken.

    A temperature of 0 takes the most likely token. The uniform numbers and the temperatures are float64.
    """
    from everyformer.infer import draw_programs

    logits_BV = logits_BV.contiguous()
    (rows, vocabulary), device = logits_BV.shape, logits_BV.device
    blocks = -(-vocabulary // BLOCK)
    tops, sums = torch.empty(2, rows, blocks, dtype=torch.float64, device=device)
    tokens = torch.empty(rows, blocks, dtype=torch.int32, device=device)
    draw_programs.scan_blocks[rows, blocks](
        logits_BV, temperature_B, tops, tokens, sums, vocabulary, blocks, N=BLOCK, num_warps=4
    )
    draw_programs.draw_token[rows,](
        logits_BV, temperature_B, tops, tokens, sums, uniform_NB, step_1, token_B, finite_B, rows, vocabulary,
        blocks, N=BLOCK, BLOCKS=max(2, 1 << (blocks - 1).bit_length()), num_warps=4,
    )  # fmt: skip
