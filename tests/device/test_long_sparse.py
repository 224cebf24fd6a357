"""The Sparse Transformer at its length: 16,384 positions in bfloat16, with recomputed activations."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from everyformer import build
from everyformer.train.learner import set_checkpoint_segments


@pytest.mark.spec(110)
def test_sixteen_thousand_positions_are_learned_in_mixed_precision():
    """Sixteen layers on counting, in 16 GiB; dense scores of one head and layer alone would take 0.5 GiB in bfloat16."""
    torch.manual_seed(0)
    length, layers = 16_384, 16
    network = build("sparse-transformer", layers=layers, width=128, heads=2, context=length, dropout=0.0).cuda()
    set_checkpoint_segments(network, layers)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3, weight_decay=0.0)
    x = (torch.arange(length + 1, device="cuda")[None] * 7) % 32
    torch.cuda.reset_peak_memory_stats()
    losses = []
    for _ in range(12):
        with torch.autocast("cuda", torch.bfloat16):
            logits = network(x[:, :-1]).logits
        assert logits.dtype == torch.bfloat16
        loss = F.cross_entropy(logits.float().flatten(0, 1), x[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0] and all(p.isfinite().all() for p in network.parameters())
    assert torch.cuda.max_memory_allocated() < 16 * 2**30
