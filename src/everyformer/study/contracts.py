"""The contracts: properties that every legal model has, checked on the model itself.

    pattern     what the patterns state (max_distance, is_causal, ...) agrees with their predicates, tried on 64 positions
    future      changing the tokens from time t on changes earlier outputs by exactly 0
    cache       token by token, or in pieces, with a cache: the same output as in one pass
    segments    the same with a segment memory of layer inputs, as in Transformer-XL's training
    rewind      a cache rolled back or reordered gives the same output as one that was never advanced, or was in that order
    padding     padding on the left or right changes nothing
    neighbours  the other sequences of the batch change nothing
    kernels     every kernel that supports the model, or the fast path of a recurrent body, equals the reference, with gradients
    flex        FlexAttention equals the reference; apart, because it compiles every pattern and score modification first
    gradient    gradients equal finite differences
    chunks      a feed-forward net computed in chunks has the same output and gradients
    halting     the weights of a halting depth's steps sum to 1 (not checked for mode t2t, whose weights do not)
    store       a saved and loaded model is bit-equal
    compile     torch.compile(fullgraph=True) gives the same output
    overfit     the model can fit one batch

All checks run in float64, on a copy in evaluation mode, with the same limits for every model.
"""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from everyformer.attention.attend import KERNELS, UnsupportedKernel
from everyformer.attention.check_pattern import check_pattern
from everyformer.attention.context import Probe
from everyformer.family.table import find
from everyformer.network.cache import Cache
from everyformer.network.feedforward import FeedForwardModule
from everyformer.network.model import EncoderDecoder, Model
from everyformer.network.multi_head_attention import Attention
from everyformer.network.network import Network, Output, PairNetwork
from everyformer.network.ponder_rnn import PonderRnn
from everyformer.network.repeat import Halt
from everyformer.network.store import load, save
from everyformer.study.contract_report import BrokenContract, Report, Result
from everyformer.study.example import Example, example, parts
from everyformer.value import nearest

LIMITS = {"pattern": 0.0, "future": 0.0, "store": 0.0, "gradient": 1e-5, "overfit": 0.1}
LIMIT = 1e-9  # for all other contracts


def contracts(
    model: Network | PairNetwork | Model | EncoderDecoder | str,
    only: Iterable[str] | None = None,
    *,
    inputs: Example | None = None,
    name: str | None = None,
    device: str = "cpu",
) -> Report:
    """Check the contracts on a network, a value, or a member by name (at its tiny size). The network is not changed.

    only: the contracts to check. Default: all.
    inputs: used instead of random inputs, for models whose inputs are of an unknown kind.
    name: how the report names the model. Default: its parts.
    Raises ValueError if a name in `only` is not a contract. Example: `print(contracts("gpt2", only=["future", "cache"]))`.
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


def _future(network: Network, inputs: Example) -> float | None:
    if not (network.value.body.is_causal() and inputs.is_sequence):
        return None
    before = inputs.run(network).hidden
    worst = 0.0
    for time in (1, inputs.length // 2, inputs.length - 1):
        after = inputs.change_after(time).run(network).hidden
        worst = max(worst, _distance(before[:, :time], after[:, :time]))
    return worst


def _cache(network: Network, inputs: Example) -> float | None:
    return _in_pieces(network, inputs, Cache(max_length=2 * inputs.length))


def _segments(network: Network, inputs: Example) -> float | None:
    return _in_pieces(network, inputs, Cache(max_length=2 * inputs.length, segment_memory=True))


def _in_pieces(network: Network, inputs: Example, begin: Cache) -> float | None:
    """Once token by token after some padding; once in a long piece, a single token and a long piece, without padding.

    The memory holds all earlier positions, because a shorter one is another function.
    """
    if not _continues(network, inputs):
        return None
    whole, half = inputs.run(network), inputs.length // 2
    worst = 0.0
    for start, cuts in ((2, range(1, inputs.length)), (0, (half, half + 1))):
        data = inputs.pad(start, 0) if start else inputs
        cache, hidden = begin, []
        for left, right in pairwise((0, *(cut + start for cut in cuts), data.length)):
            output = data.cut(left, right).run(network, cache=cache)
            cache = output.cache or cache
            hidden.append(output.hidden)
        worst = max(worst, _distance(torch.cat(hidden, dim=1)[:, start:], whole.hidden))
    return worst


def _rewind(network: Network, inputs: Example) -> float | None:
    if not _continues(network, inputs):
        return None
    half = inputs.length // 2
    other = inputs.change_after(half)
    straight, worst = inputs.run(network).hidden[:, half:], 0.0
    order = torch.arange(len(inputs.inputs), device=inputs.inputs.device).flip(0)
    for segment_memory in (False, True):
        begin = Cache(max_length=2 * inputs.length, segment_memory=segment_memory)
        started = inputs.cut(0, half).run(network, cache=begin).cache
        assert started is not None
        astray = other.cut(half).run(network, cache=started).cache
        assert astray is not None
        again = inputs.cut(half).run(network, cache=astray.roll_back(inputs.length - half)).hidden
        turned = inputs.cut(half).rows(order).run(network, cache=started.reorder(order)).hidden
        worst = max(worst, _distance(again, straight), _distance(turned, straight[order]))
    return worst


def _padding(network: Network, inputs: Example) -> float | None:
    if not inputs.is_sequence or network.class_token is not None:
        return None
    whole = inputs.run(network)
    worst = 0.0
    for left, right in ((3, 0), (0, 3), (2, 1)):
        padded = inputs.pad(left, right).run(network)
        worst = max(worst, _distance(padded.hidden[:, left : left + inputs.length], whole.hidden))
        for one, two in zip(_logits(padded), _logits(whole), strict=True):
            cropped = one if one.dim() == 2 else one[:, left : left + inputs.length]
            worst = max(worst, _distance(cropped, two))
    return worst


def _neighbours(network: Network, inputs: Example) -> float | None:
    if not inputs.is_sequence:
        return None
    together = inputs.run(network).hidden
    alone = torch.cat(
        [inputs.rows(torch.tensor([row], device=together.device)).run(network).hidden for row in range(len(together))]
    )
    return _distance(alone, together)


def _kernels(network: Network, inputs: Example) -> float | None:
    wanted = inputs.run(network, kernel="reference")
    direction = torch.randn_like(wanted.hidden)
    gradients = _gradients(network, wanted, direction)
    worst = 0.0
    for kernel in KERNELS if any(network.value.body.patterns()) else ("auto",):  # a recurrent body has one fast path
        if kernel in ("reference", "flex"):
            continue
        try:
            output = inputs.run(network, kernel=kernel)
        except UnsupportedKernel:
            continue
        worst = max(worst, _distance(output.hidden, wanted.hidden))
        for one, two in zip(_gradients(network, output, direction), gradients, strict=True):
            worst = max(worst, _distance(one, two))
    return worst


def _flex(network: Network, inputs: Example) -> float | None:
    with torch.no_grad():  # it has no backward pass on a CPU
        try:
            hidden = inputs.run(network, kernel="flex").hidden
        except UnsupportedKernel:
            return None
        return _distance(hidden, inputs.run(network, kernel="reference").hidden)


def _gradient(network: Network, inputs: Example) -> float | None:
    """Directional derivatives along random directions of the weights, by autograd and by finite differences.

    A difference across the kink of a ReLU is wrong, so several steps are tried along each direction, to one side and to both:
    the smallest error counts. Of the directions, the largest error counts.
    """
    weights = [p for p in network.parameters() if p.requires_grad]
    random = torch.Generator().manual_seed(0)
    readout = torch.randn_like(inputs.run(network).hidden)

    def value() -> Tensor:
        output = inputs.run(network)
        return (output.hidden * readout).sum() + sum(logits.square().sum() for logits in _logits(output))

    def moved(direction: list[Tensor], step: float) -> float:
        with torch.no_grad():
            for weight, d in zip(weights, direction, strict=True):
                weight.add_(d, alpha=step)
            result = float(value())
            for weight, d in zip(weights, direction, strict=True):
                weight.sub_(d, alpha=step)
        return result

    if not weights:
        return None  # all weights are frozen
    current = value()
    gradients, middle, worst = torch.autograd.grad(current, weights, allow_unused=True), current.item(), 0.0
    for _ in range(2):
        direction = [torch.randn(p.shape, generator=random, dtype=p.dtype).to(p.device) for p in weights]
        wanted = sum(float((g * d).sum()) for g, d in zip(gradients, direction, strict=True) if g is not None)
        error = math.inf
        for step in (1e-5, 1e-6, 1e-7, 1e-8):
            up, down = moved(direction, step) - middle, middle - moved(direction, -step)
            differences = ((up + down) / 2, up, down)
            error = min(error, *(abs(one / step - wanted) / max(1.0, abs(wanted)) for one in differences))
            if error <= LIMITS["gradient"] / 10:
                break
        worst = max(worst, error)
    return worst


def _chunks(network: Network, inputs: Example) -> float | None:
    layers = [module for module in network.modules() if isinstance(module, FeedForwardModule)]
    if not layers:
        return None
    whole = inputs.run(network)
    direction = torch.randn_like(whole.hidden)
    wanted = _gradients(network, whole, direction)
    before = [layer.chunk for layer in layers]
    for layer in layers:
        layer.chunk = 2
    chunked = inputs.run(network)
    gradients = _gradients(network, chunked, direction)
    for layer, chunk in zip(layers, before, strict=True):
        layer.chunk = chunk
    return max(
        [
            _distance(chunked.hidden, whole.hidden),
            *(_distance(a, b) for a, b in zip(gradients, wanted, strict=True)),
        ]
    )


def _halting(network: Network, inputs: Example) -> float | None:
    body = network.value.body
    ponders = any(isinstance(sublayer, PonderRnn) for sublayer in body.sublayers())
    if not (isinstance(body, Halt) or ponders) or (isinstance(body, Halt) and body.mode == "t2t"):
        return None
    probe, padded = Probe(), inputs.pad(1, 2) if inputs.is_sequence and network.class_token is None else inputs
    padded.run(network, probe=probe)
    share_LBTN = torch.stack(probe.halts).detach()
    total_LBT = share_LBTN.sum(-1)
    visible = padded.per_token.get("visible", torch.ones_like(total_LBT[0]))
    return max(_distance(total_LBT, visible.to(total_LBT)), float(-share_LBTN.min()))


def _store(network: Network, inputs: Example) -> float | None:
    with tempfile.TemporaryDirectory() as folder:
        save(network, folder)
        again = load(folder)
    assert isinstance(again, Network)
    if again.value != network.value:
        return float("inf")
    again.to(next(network.parameters()).device)
    return _distance(inputs.run(again).hidden, inputs.run(network).hidden)


def _compile(network: Network, inputs: Example) -> float | None:
    torch._dynamo.reset()
    compiled: Any = torch.compile(network, fullgraph=True, backend="eager")
    with torch.no_grad():
        return _distance(inputs.run(compiled).hidden, inputs.run(network).hidden)


def _overfit(network: Network, inputs: Example) -> float | None:
    """The loss after at most 300 steps on one batch, relative to that of uniform guessing."""
    heads = _logits(inputs.run(network))
    if not heads:
        return None
    if not any(p.requires_grad for p in network.parameters()):
        return None
    learner = copy.deepcopy(network).float().train()
    for module in learner.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    data = inputs.to(dtype=torch.float32)
    random = torch.Generator().manual_seed(1)  # another seed than the example's, whose tokens would be easy targets
    targets = [
        torch.randint(0, logits.shape[-1], logits.shape[:-1], generator=random).to(logits.device) for logits in heads
    ]
    optimizer = torch.optim.AdamW(learner.parameters(), lr=3e-3, weight_decay=0.0)
    chance, left = sum(math.log(max(2, logits.shape[-1])) for logits in heads), math.inf
    for _ in range(300):
        logits = _logits(data.run(learner))
        loss = sum(
            (F.cross_entropy(one.flatten(0, -2), two.flatten()) for one, two in zip(logits, targets, strict=True)),
            torch.zeros(()),
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        left = loss.item() / chance
        if left < LIMITS["overfit"]:
            break
    return left


Check = Callable[[Network, Example], float | None]
CONTRACTS: dict[str, Check] = {
    "pattern": _pattern,
    "future": _future,
    "cache": _cache,
    "segments": _segments,
    "rewind": _rewind,
    "padding": _padding,
    "neighbours": _neighbours,
    "kernels": _kernels,
    "flex": _flex,
    "gradient": _gradient,
    "chunks": _chunks,
    "halting": _halting,
    "store": _store,
    "compile": _compile,
    "overfit": _overfit,
}


def _continues(network: Network, inputs: Example) -> bool:
    """Whether the model can read a sequence piece by piece."""
    return network.value.body.is_causal() and inputs.is_sequence and network.class_token is None


def _distance(one: Tensor, two: Tensor) -> float:
    return float((one - two).detach().abs().max()) if one.numel() else 0.0


def _logits(output: Output) -> tuple[Tensor, ...]:
    if output.logits is None:
        return ()
    return output.logits if isinstance(output.logits, tuple) else (output.logits,)


def _gradients(network: Network, output: Output, direction: Tensor) -> list[Tensor]:
    weights = [p for p in network.parameters() if p.requires_grad]
    if not weights:
        return []
    gradients = torch.autograd.grad((output.hidden * direction).sum(), weights, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(weights, gradients, strict=True)]
