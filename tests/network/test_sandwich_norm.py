"""Norms before and after each sublayer are their equation."""

from __future__ import annotations

from functools import partial

import torch

from everyformer import FeedForward, RMSNorm, SandwichNorm
from tests.network import close, model, ready, tokens
from tests.spec import network as spec

EPS = 1e-3


def test_a_sandwich_is_its_equation_with_a_norm_at_the_end():
    for final in (True, False):
        residual = SandwichNorm(RMSNorm(EPS, unit_offset=True), final_norm=final)
        network, x_BT = ready(model(None, net=FeedForward(12, bias=False), residual=residual)), tokens(1, 5)
        rows = list(network.embed(x_BT)[0])
        for layer in network.body.layers:
            (net,), (step,) = layer.sublayers, layer.residuals
            f = partial(spec.feed_forward, W_1=net.hidden[0].weight.T, W_2=net.out.weight.T)
            rows = spec.sandwich_norm(rows, [(f, step.norm.weight, step.norm.weight)], [step.after.weight], EPS)
        if final:
            rows = [spec.offset_rms_norm(x, network.body.stream.norm.weight, EPS) for x in rows]
        close(network(x_BT).hidden[0], torch.stack(rows))
