"""Generating: the next token, again and again.

The definition: the next token is drawn from softmax(logits / temperature) of the model on the last `context` tokens;
temperature 0 is the most likely one. The cache is a way of computing that, so cached and uncached runs agree. Once the
context is full the window slides, and as every position in it has moved it is read anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from everyformer.network.head import Language
from everyformer.network.model import Network, PairNetwork
from everyformer.network.past import Past


def sample(logits_BV: Tensor, temperature: float = 1.0, generator: torch.Generator | None = None) -> Tensor:
    """One token id for each row. The generator lives on the CPU, so a seed means the same on every device."""
    if not temperature >= 0:  # not a number is refused too
        raise ValueError(f"temperature is {temperature}: give 0 (the most likely token) or more")
    if temperature == 0:
        return logits_BV.argmax(-1)
    share_BV = (logits_BV.double().cpu() / temperature).softmax(-1)
    return torch.multinomial(share_BV, 1, generator=generator)[:, 0].to(logits_BV.device)


@torch.no_grad()
def generate(
    network: Network,
    prompts: Sequence[Sequence[int]] | Tensor,
    tokens: int,
    *,
    temperature: float = 1.0,
    seed: int | None = None,
    context: int | None = None,
    cached: bool = True,
    **options: Any,
) -> list[list[int]]:
    """Each prompt with `tokens` more; prompts may differ in length. Options go to the network (`source=`, ...)."""
    number = _language(network)
    token_BT, visible_BT = _pad(prompts, next(network.parameters()).device)
    if tokens < 0 or (context is not None and context < 1):
        raise ValueError(
            f"{tokens} tokens from a context of {context}: give 0 tokens or more, and a context of 1 or more"
        )
    context = context or network.limit or token_BT.shape[1] + tokens
    if network.limit is not None and context > network.limit:
        raise ValueError(
            f"a context of {context} is more than the {network.limit} positions that the model knows; give at most those"
        )
    generator = torch.Generator().manual_seed(seed) if seed is not None else None
    was_training = network.training
    network.eval()
    past, fed = Past(), 0
    for _ in range(tokens):
        visible = None if bool(visible_BT.all()) else visible_BT
        if cached and token_BT.shape[1] <= context:
            part = None if visible is None else visible[:, fed:]
            output = network(token_BT[:, fed:], visible=part, past=past, **options)
            past, fed = output.past or past, token_BT.shape[1]
        else:
            part = None if visible is None else visible[:, -context:]
            output = network(token_BT[:, -context:], visible=part, **options)
        logits_BTV = output.logits if isinstance(output.logits, Tensor) else output.logits[number]
        new_B = sample(logits_BTV[:, -1], temperature, generator)
        token_BT = torch.cat((token_BT, new_B[:, None]), dim=1)
        visible_BT = torch.cat((visible_BT, visible_BT.new_ones(len(new_B), 1)), dim=1)
    network.train(was_training)
    return [row[seen].tolist() for row, seen in zip(token_BT, visible_BT, strict=True)]


def _language(network: Network) -> int:
    """Which of the heads tells the next token."""
    if isinstance(network, PairNetwork):
        raise ValueError("a pair is generated from by its decoder: give pair.decoder and source=pair.encode(...)")
    for number, head in enumerate(network.value.heads):
        if isinstance(head, Language):
            return number
    raise ValueError("the model has no language head to tell the next token; build it with heads=(Language(),)")


def _pad(prompts: Sequence[Sequence[int]] | Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Prompts as one batch, padded on the left so that all end together."""
    try:
        rows = [[int(token) for token in row] for row in prompts]
    except (TypeError, ValueError):
        raise ValueError(f"prompts are {prompts!r}: give a list of lists of token ids, one for each prompt") from None
    if not rows or not all(rows):
        raise ValueError(
            "an empty prompt: the first token needs something before it; begin with a start token or a newline"
        )
    longest = max(map(len, rows))
    token_BT = torch.tensor([[0] * (longest - len(row)) + row for row in rows], device=device)
    visible_BT = torch.tensor([[False] * (longest - len(row)) + [True] * len(row) for row in rows], device=device)
    return token_BT, visible_BT
