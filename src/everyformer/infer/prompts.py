"""Prompts as every way of generation reads them, and the checks of its options."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from operator import index

import torch
from torch import Tensor

from everyformer.attention.context import SideInputs
from everyformer.network.model import Model
from everyformer.network.network import Network, PairNetwork
from everyformer.network.output_head import Language

Prompts = Sequence[Sequence[int]] | Tensor


def language_head(network: Network) -> int:
    """Returns the index of the output head that predicts the next token."""
    if isinstance(network, PairNetwork):
        raise ValueError(
            "an encoder-decoder generates with its decoder; give pair.decoder and encoder_output=pair.encode(...), or use beam_search"
        )
    if isinstance(network, Model):
        raise ValueError("a Model is a description without weights; give model.build(), or a trained network")
    for position, head in enumerate(network.value.outputs):
        if isinstance(head, Language):
            return position
    raise ValueError(
        "the model has no Language output head to predict the next token; build it with outputs=(Language(),)"
    )


def prefix_inputs(network: Network, lengths: Sequence[int] | Tensor) -> SideInputs | None:
    """Returns the side inputs that state the prefix of each sequence; None if the network reads none."""
    if "prefix" not in network.reads:
        return None
    return SideInputs(prefix=torch.as_tensor(lengths, device=next(network.parameters()).device))


def fixed_prefix(network: Network) -> int:
    """Returns the number of first tokens that the network does not predict, because they are always its prefix."""
    prefix = network.value.body.prefix()
    return 0 if prefix is None else prefix.length or 0


def check_prefix(network: Network, rows: Sequence[Sequence[int]]) -> None:
    """Raises ValueError if a prompt is shorter than the prefix, which the network does not predict."""
    shortest, length = min(map(len, rows)), fixed_prefix(network)
    if shortest < length:
        raise ValueError(
            f"a prompt has {shortest} tokens, but the first {length} are the model's prefix, which it does not predict; give at least "
            f"{length}"
        )


def prompt_rows(prompts: Prompts) -> list[list[int]]:
    """Returns the prompts as new lists. Raises ValueError if they are not token ids, or if one is empty."""
    try:
        plain = prompts.tolist() if isinstance(prompts, Tensor) else prompts
        rows = [[index(token) for token in row] for row in plain]
    except TypeError:
        raise ValueError(f"prompts are {prompts!r}: give a list of lists of token ids, one for each prompt") from None
    if not rows or not all(rows):
        raise ValueError(
            "a prompt is empty, but the first new token needs a token before it; begin with a start token or a newline"
        )
    return rows


def pad_left(rows: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns the rows as one batch, padded on the left so that all end together, and which tokens are visible."""
    longest = max(map(len, rows))
    token_BT = torch.tensor([[0] * (longest - len(row)) + row for row in rows], device=device)
    visible_BT = torch.tensor([[False] * (longest - len(row)) + [True] * len(row) for row in rows], device=device)
    return token_BT, visible_BT


def check_tokens(tokens: int, stop: Collection[int]) -> None:
    """Raises ValueError if the number of tokens or the stop tokens are not such numbers."""
    if not isinstance(tokens, int) or tokens < 0:
        raise ValueError(f"tokens is {tokens!r}: give 0 tokens or more, a whole number")
    if not isinstance(stop, Collection) or not all(isinstance(token, int) and token >= 0 for token in stop):
        raise ValueError(f"stop is {stop!r}: give a list of token ids, empty for none")
