"""The generator of ELECTRA: a small masked language model that replaces tokens in the input of the network to be trained.

Paper: Clark et al. 2020, ELECTRA: Pre-training Text Encoders as Discriminators Rather Than Generators.
Equations, with the masked positions m of a text x and the generator's p_G:
    x^_i ~ p_G(x_i | x^masked),  i in m;    x^corrupt = x with x^_i in the place of x_i
The network reads x^corrupt. A sampled token is drawn by one uniform number u: it is the first at which the cumulative probability
exceeds u. No gradient passes through the draw. The generator shares the embedding of tokens, segments and positions with the network.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from everyformer.attention.context import Probe, SideInputs
from everyformer.network.linear_cross_entropy import LogitMap


@dataclass(frozen=True)
class Replaced:
    """What the generator did: its logits B, M, V at the masked positions, and the tokens with its samples."""

    logits_BMV: Tensor
    token_BT: Tensor


@dataclass(frozen=True)
class Replacement:
    """The masked positions of a batch, and a uniform number for each.

    Example: `Replacement(token_BT, position_BM, uniform_BM)`, with position -1 where a sequence has fewer than M of them.
    """

    token_BT: Tensor  # the text
    position_BM: Tensor
    uniform_BM: Tensor

    def run(self, generator: Any, inputs: Tensor, **options: Any) -> Replaced:
        """Returns what the generator does with the masked inputs."""
        if generator is None:
            raise ValueError(
                "the model has no generator that could replace tokens; build it with generator=, or leave replacement out"
            )
        output = generator(inputs, probe=Probe(records_weights=False, logits=False), **options)
        logits: Any = next(one for one in _tuple(output.logits) if isinstance(one, LogitMap))
        index_BMD = self.position_BM.clamp(min=0)[..., None].expand(-1, -1, logits.hidden.shape[-1])
        at_BMD = logits.hidden.gather(1, index_BMD)
        logits_BMV = LogitMap(at_BMD, logits.weight_VD, logits.bias_V, logits.soft_cap).logits()
        sampled_BM = draw(logits_BMV.detach(), self.uniform_BM)
        length = self.token_BT.shape[1]
        at_BM = self.position_BM.masked_fill(self.position_BM < 0, length)  # one more column, which is dropped
        wide_BT = torch.nn.functional.pad(self.token_BT, (0, 1))
        return Replaced(logits_BMV, wide_BT.scatter(1, at_BM, sampled_BM.to(wide_BT.dtype))[:, :length])


def replace_tokens(
    generator: Any, inputs: Any, visible_BT: Tensor | None, side: SideInputs, kernel: str
) -> Replaced | None:
    """Returns what the generator does if the side inputs have a `Replacement`, else None."""
    if not isinstance(side, SideInputs) or side.replacement is None:
        return None
    if not isinstance(side.replacement, Replacement):
        raise ValueError(
            f"replacement is a {type(side.replacement).__name__}: give a Replacement(token_BT, position_BM, uniform_BM)"
        )
    options = {"visible": visible_BT, "side_inputs": replace(side, replacement=None), "kernel": kernel}
    return side.replacement.run(generator, inputs, **options)


def draw(logits_BMV: Tensor, uniform_BM: Tensor) -> Tensor:
    """Returns the first token at which the cumulative probability exceeds the uniform number."""
    sum_BMV = logits_BMV.double().softmax(-1).cumsum(-1)
    threshold_BM1 = uniform_BM[..., None].double() * sum_BMV[..., -1:]
    return (sum_BMV <= threshold_BM1).sum(-1).clamp(max=logits_BMV.shape[-1] - 1)


def _tuple(logits: Any) -> tuple[Any, ...]:
    return logits if isinstance(logits, tuple) else (logits,)
