"""The contracts: properties that every legal model has, checked on the model itself.

    pattern     what the patterns state (max_distance, is_causal, ...) agrees with their predicates, tried on 64 positions
    future      changing the tokens from time t on changes earlier outputs by exactly 0
    prefix      with a prefix, changing one token changes the outputs of exactly the positions that see it: the whole prefix inside it,
                the past after it, nothing later; in pieces, of which the first has the prefix, the output is the same
    cache       token by token, or in pieces, with a cache: the same output as in one pass
    segments    the same with a segment memory of layer inputs, as in Transformer-XL's training
    rewind      a cache rolled back or reordered gives the same output as one that was never advanced, or was in that order
    padding     padding on the left or right changes nothing, nor in later calls with the cache
    neighbours  the other sequences of the batch and their padding change nothing, nor in later calls with the cache
    kernels     every kernel that supports the model, or the fast path of a recurrent body, equals the reference, with gradients
    flex        FlexAttention equals the reference; apart, because it compiles every pattern and score modification first
    gradient    gradients equal finite differences
    chunks      a feed-forward net computed in chunks has the same output and gradients
    halting     the weights of a halting depth's steps sum to 1 (not checked for mode t2t, whose weights do not)
    store       a saved and loaded model is bit-equal
    compile     torch.compile(fullgraph=True) gives the same output
    overfit     the model can fit one batch (not checked if it cannot tell two positions apart that have different targets)

All checks run in float64, on a copy in evaluation mode, with the same limits for every model.
"""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from everyformer.attention.check_pattern import check_pattern
from everyformer.attention.context import Probe
from everyformer.family.table import find
from everyformer.network.model import EncoderDecoder, Model
from everyformer.network.multi_head_attention import Attention
from everyformer.network.network import Network, PairNetwork
from everyformer.network.ponder_rnn import PonderRnn
from everyformer.network.repeat import Halt
from everyformer.network.store import load_network, save
from everyformer.study import gradient_contracts, time_contracts
from everyformer.study.contract_report import LIMIT, LIMITS, BrokenContract, Report, Result, distance
from everyformer.study.example import Example, example, parts
from everyformer.value import nearest


def contracts(
    model: Network | PairNetwork | Model | EncoderDecoder | str,
    only: Iterable[str] | None = None,
    *,
    inputs: Example | None = None,
    name: str | None = None,
    device: str = "cpu",
) -> Report:
    """Check the contracts on a `model`: a network, a value, or a member by name (at its tiny size). A network is not changed.

    only     the contracts to check. Default: all
    inputs   used instead of random inputs, for models whose inputs are of an unknown kind
    name     how the report names the model. Default: its parts
    device   where the checks are computed: cpu or cuda
    Returns a report, which is printed as a table. Raises ValueError if a name in `only` is not a contract.
    Example: `print(contracts("gpt2", only=["future", "cache"]))`.
    """
    chosen = list(CONTRACTS) if only is None else [only] if isinstance(only, str) else list(only)
    if not chosen:
        raise ValueError(f"only={only!r} is empty; give some of {', '.join(CONTRACTS)}, or None for all")
    for contract in chosen:
        if contract not in CONTRACTS:
            raise ValueError(f"no contract is named {contract!r}; {nearest(contract, CONTRACTS)}")
    report = Report()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network: Any
        if isinstance(model, str):
            member = find(model)
            name, network = name or member.name, member.value("tiny" if "tiny" in member.sizes else None).build()
        else:
            plain: Any = getattr(model, "_orig_mod", model)  # the module inside torch.compile's
            network = copy.deepcopy(plain) if isinstance(plain, nn.Module) else plain.build()
        network = network.double().to(device).eval()
        for part, source_width in parts(network):
            data = (inputs or example(part.value, source_width=source_width)).to(device, torch.float64)
            for contract in chosen:
                try:
                    error, reason = CONTRACTS[contract](part, data), ""
                except BrokenContract as broken:
                    error, reason = math.inf, str(broken)
                if error is not None:
                    limit = LIMITS.get(contract, LIMIT)
                    report.results.append(Result(contract, name or _describe(part.value), error, limit, reason))
    checked = {result.contract for result in report.results}
    report.not_applicable = [contract for contract in chosen if only is not None and contract not in checked]
    return report


def _describe(value: Model) -> str:
    attention = value.body.layers[0].sublayers[0]
    if not isinstance(attention, Attention):
        return repr(value.body)
    score_mods = ", ".join(type(score_mod).__name__ for score_mod in attention.score_mods) or "no score mods"
    position = type(value.position).__name__ if value.position else "no position"
    return (
        f"{attention.pattern} / {score_mods} / {type(value.body.residual).__name__}({type(value.body.residual.norm).__name__})"
        f" / {type(attention.heads).__name__} / {position}"
    )


def _pattern(network: Network, inputs: Example) -> float | None:
    patterns = dict.fromkeys(one for sublayer in network.value.body.sublayers() for one in sublayer.patterns())
    for pattern in patterns:
        try:
            check_pattern(pattern)
        except ValueError as error:
            raise BrokenContract(str(error)) from None
    return 0.0 if patterns else None


def _halting(network: Network, inputs: Example) -> float | None:
    body = network.value.body
    ponders = any(isinstance(sublayer, PonderRnn) for sublayer in body.sublayers())
    if not (isinstance(body, Halt) or ponders) or (isinstance(body, Halt) and body.mode == "t2t"):
        return None
    probe, padded = Probe(), inputs.pad(1, 2) if inputs.is_sequence and network.class_token is None else inputs
    padded.run(network, probe=probe)
    worst = 0.0
    for share_BTN in map(Tensor.detach, probe.halts):  # the numbers of steps may differ
        total_BT = share_BTN.sum(-1)
        visible_BT = padded.per_token.get("visible", torch.ones_like(total_BT))
        worst = max(worst, distance(total_BT, visible_BT.to(total_BT)), float(-share_BTN.min()))
    return worst if probe.halts else None


def _store(network: Network, inputs: Example) -> float | None:
    with tempfile.TemporaryDirectory() as folder:
        save(network, folder)
        again = load_network(folder)
    assert isinstance(again, Network)
    if again.value != network.value:
        return float("inf")
    again.to(next(network.parameters()).device)
    return distance(inputs.run(again).hidden, inputs.run(network).hidden)


def _compile(network: Network, inputs: Example) -> float | None:
    torch._dynamo.reset()
    compiled: Any = torch.compile(network, fullgraph=True, backend="eager")
    with torch.no_grad():
        return distance(inputs.run(compiled).hidden, inputs.run(network).hidden)


Check = Callable[[Network, Example], float | None]
CONTRACTS: dict[str, Check] = {
    "pattern": _pattern,
    "future": time_contracts.future,
    "prefix": time_contracts.prefix,
    "cache": time_contracts.cache,
    "segments": time_contracts.segments,
    "rewind": time_contracts.rewind,
    "padding": time_contracts.padding,
    "neighbours": time_contracts.neighbours,
    "kernels": gradient_contracts.kernels,
    "flex": gradient_contracts.flex,
    "gradient": gradient_contracts.gradient,
    "chunks": gradient_contracts.chunks,
    "halting": _halting,
    "store": _store,
    "compile": _compile,
    "overfit": gradient_contracts.overfit,
}
