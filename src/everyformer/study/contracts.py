"""The contracts: what every legal model keeps, checked on the model itself.

    future      changing tokens from time t on moves no earlier output, by exactly 0
    cache       token by token, or in pieces, with a past: the same as all at once
    segments    the same with a memory of what entered the layers, as in Transformer-XL's training
    rewind      rolling back and reordering a past: the same as never having gone on, or having begun in that order
    padding     padding on the left or right changes nothing
    neighbours  the other sequences of the batch change nothing
    kernels     every kernel that serves, or the fast way of a recurrent body, gives the reference's answer and its gradients
    flex        FlexAttention gives the reference's answer; apart, because each pattern and rule is compiled for it first
    gradient    gradients equal finite differences
    chunks      a feed-forward net in chunks: the same output and gradients
    halting     what the steps of a halting depth weigh in the output sums to 1 (not asked of t2t, whose weights do not)
    store       saved and loaded: equal to the last bit
    compile     torch.compile takes it whole, without a break, and the answer is the same
    overfit     it can learn one batch by heart

All in float64, on a copy in evaluation mode, with limits that are the same for every model.
"""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.nn import functional as F

from everyformer.attention.attend import KERNELS, UnsupportedKernel
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
from everyformer.study.example import Example, example, parts
from everyformer.value import nearest

LIMITS = {"future": 0.0, "store": 0.0, "gradient": 1e-5, "overfit": 0.1}  # by contract; for the others:
LIMIT = 1e-9


@dataclass(frozen=True)
class Finding:
    """One contract on one model: the error seen, and the most that is allowed."""

    contract: str
    cell: str
    error: float
    limit: float

    @property
    def kept(self) -> bool:
        return self.error <= self.limit  # not a number is not kept


@dataclass
class Report:
    """What was checked. Prints as a table: contract, cells, worst error, limit."""

    findings: list[Finding] = field(default_factory=list)
    refused: int = 0  # combinations that are illegal and were not built
    unasked: list[str] = field(default_factory=list)  # contracts that were named, but do not speak of the model

    @property
    def broken(self) -> list[Finding]:
        return [finding for finding in self.findings if not finding.kept]

    @property
    def ok(self) -> bool:
        """Was all that was named checked, and kept?"""
        return not self.broken and not self.unasked

    def rows(self) -> Iterator[tuple[str, int, float, float, bool]]:
        for name in CONTRACTS:
            found = [finding for finding in self.findings if finding.contract == name]
            if found:
                worst = max(found, key=lambda finding: (not finding.kept, finding.error))
                yield name, len(found), worst.error, worst.limit, all(finding.kept for finding in found)

    def __str__(self) -> str:
        lines = [f"{'contract':<12}{'cells':>7}{'worst error':>14}{'limit':>9}"]
        for name, cells, error, limit, kept in self.rows():
            lines.append(f"{name:<12}{cells:>7}{error:>14.1e}{limit:>9.0e}  {'kept' if kept else 'BROKEN'}")
        lines += [f"{name:<12}does not speak of this model: nothing was checked" for name in self.unasked]
        lines += [f"broken: {found.contract} by {found.error:.1e} in {found.cell}" for found in self.broken[:10]]
        return "\n".join(lines)


def contracts(
    model: Network | PairNetwork | Model | EncoderDecoder | str,
    only: Iterable[str] | None = None,
    *,
    inputs: Example | None = None,
    name: str | None = None,
    device: str = "cpu",
) -> Report:
    """Check the contracts on a network, a value, or a member by name (its tiny size). Nothing of yours is changed.

    `inputs` are used instead of random ones, for models whose inputs are not of a known kind.
    """
    chosen = list(CONTRACTS) if only is None else [only] if isinstance(only, str) else list(only)
    if not chosen:
        raise ValueError(f"only={only!r} names no contract; give some of {', '.join(CONTRACTS)}, or None for all")
    for contract in chosen:
        if contract not in CONTRACTS:
            raise ValueError(f"no contract is named {contract!r}; {nearest(contract, CONTRACTS)}")
    report = Report()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network: Any
        if isinstance(model, str):
            found = find(model)
            name, network = name or found.name, found.value("tiny" if "tiny" in found.sizes else None).build()
        else:
            plain: Any = getattr(model, "_orig_mod", model)  # what torch.compile is around
            network = copy.deepcopy(plain) if isinstance(plain, nn.Module) else plain.build()
        network = network.double().to(device).eval()
        for part, source_width in parts(network):
            given = (inputs or example(part.value, source_width=source_width)).to(device, torch.float64)
            for contract in chosen:
                error = CONTRACTS[contract](part, given)
                if error is not None:
                    limit = LIMITS.get(contract, LIMIT)
                    report.findings.append(Finding(contract, name or _describe(part.value), error, limit))
    checked = {finding.contract for finding in report.findings}
    report.unasked = [contract for contract in chosen if only is not None and contract not in checked]
    return report


def _describe(value: Model) -> str:
    attention = value.body.layers[0].sublayers[0]
    if not isinstance(attention, Attention):
        return repr(value.body)
    score_mods = ", ".join(type(score_mod).__name__ for score_mod in attention.score_mods) or "no rule"
    place = type(value.position).__name__ if value.position else "no position"
    return (
        f"{attention.pattern} / {score_mods} / {type(value.body.residual).__name__}({type(value.body.residual.norm).__name__})"
        f" / {type(attention.heads).__name__} / {place}"
    )


def _future(network: Network, given: Example) -> float | None:
    if not (network.value.body.is_causal() and given.is_sequence):
        return None
    before = given.run(network).hidden
    worst = 0.0
    for time in (1, given.length // 2, given.length - 1):
        after = given.change_after(time).run(network).hidden
        worst = max(worst, _distance(before[:, :time], after[:, :time]))
    return worst


def _cache(network: Network, given: Example) -> float | None:
    return _in_pieces(network, given, Cache())


def _segments(network: Network, given: Example) -> float | None:
    return _in_pieces(network, given, Cache(segment_memory=True))


def _in_pieces(network: Network, given: Example, begin: Cache) -> float | None:
    """Token by token after some padding; and a long piece, a single token, a long piece without any.

    Memories hold all of the past, because a shorter one is another function.
    """
    if not _goes_on(network, given):
        return None
    network = _unlimited(network)
    whole, half = given.run(network), given.length // 2
    worst = 0.0
    for start, cuts in ((2, range(1, given.length)), (0, (half, half + 1))):
        data = given.pad(start, 0) if start else given
        cache, hidden = begin, []
        for left, right in pairwise((0, *(cut + start for cut in cuts), data.length)):
            output = data.cut(left, right).run(network, cache=cache)
            cache = output.cache or cache
            hidden.append(output.hidden)
        worst = max(worst, _distance(torch.cat(hidden, dim=1)[:, start:], whole.hidden))
    return worst


def _unlimited(network: Network) -> Network:
    """The network with a cache that keeps every position."""
    network = copy.copy(network)
    network.value = replace(network.value, memory=None)
    return network


def _rewind(network: Network, given: Example) -> float | None:
    if not _goes_on(network, given):
        return None
    network = _unlimited(network)
    half = given.length // 2
    other = given.change_after(half)
    straight, worst = given.run(network).hidden[:, half:], 0.0
    order = torch.arange(len(given.inputs), device=given.inputs.device).flip(0)
    for begin in (Cache(), Cache(segment_memory=True)):
        begun = given.cut(0, half).run(network, cache=begin).cache
        assert begun is not None
        astray = other.cut(half).run(network, cache=begun).cache
        assert astray is not None
        again = given.cut(half).run(network, cache=astray.roll_back(given.length - half)).hidden
        turned = given.cut(half).rows(order).run(network, cache=begun.reorder(order)).hidden
        worst = max(worst, _distance(again, straight), _distance(turned, straight[order]))
    return worst


def _padding(network: Network, given: Example) -> float | None:
    if not given.is_sequence or network.class_token is not None:
        return None
    whole = given.run(network)
    worst = 0.0
    for left, right in ((3, 0), (0, 3), (2, 1)):
        padded = given.pad(left, right).run(network)
        worst = max(worst, _distance(padded.hidden[:, left : left + given.length], whole.hidden))
        for one, two in zip(_logits(padded), _logits(whole), strict=True):
            here = one if one.dim() == 2 else one[:, left : left + given.length]
            worst = max(worst, _distance(here, two))
    return worst


def _neighbours(network: Network, given: Example) -> float | None:
    if not given.is_sequence:
        return None
    together = given.run(network).hidden
    alone = torch.cat(
        [given.rows(torch.tensor([row], device=together.device)).run(network).hidden for row in range(len(together))]
    )
    return _distance(alone, together)


def _kernels(network: Network, given: Example) -> float | None:
    wanted = given.run(network, kernel="reference")
    direction = torch.randn_like(wanted.hidden)
    gradients = _gradients(network, wanted, direction)
    worst = 0.0
    for kernel in KERNELS if any(network.value.body.patterns()) else ("auto",):  # a recurrent body has one fast way
        if kernel in ("reference", "flex"):
            continue
        try:
            found = given.run(network, kernel=kernel)
        except UnsupportedKernel:
            continue
        worst = max(worst, _distance(found.hidden, wanted.hidden))
        for one, two in zip(_gradients(network, found, direction), gradients, strict=True):
            worst = max(worst, _distance(one, two))
    return worst


def _flex(network: Network, given: Example) -> float | None:
    with torch.no_grad():  # it has no gradient on a CPU
        try:
            found = given.run(network, kernel="flex").hidden
        except UnsupportedKernel:
            return None
        return _distance(found, given.run(network, kernel="reference").hidden)


def _gradient(network: Network, given: Example) -> float | None:
    """Slopes along random directions in the space of weights, by autograd and by central differences.

    A difference that crosses the kink of a ReLU is wrong, so one of the steps along a direction, to one side or to both, must
    agree; the first that does counts, else the best, and of the directions the worst.
    """
    weights = [p for p in network.parameters() if p.requires_grad]
    random = torch.Generator().manual_seed(0)
    readout = torch.randn_like(given.run(network).hidden)

    def value() -> Tensor:
        output = given.run(network)
        return (output.hidden * readout).sum() + sum(logits.square().sum() for logits in _logits(output))

    def moved(direction: list[Tensor], step: float) -> float:
        with torch.no_grad():
            for weight, d in zip(weights, direction, strict=True):
                weight.add_(d, alpha=step)
            found = float(value())
            for weight, d in zip(weights, direction, strict=True):
                weight.sub_(d, alpha=step)
        return found

    if not weights:
        return None  # all of it is frozen
    here = value()
    slopes, middle, worst = torch.autograd.grad(here, weights, allow_unused=True), here.item(), 0.0
    for _ in range(2):
        direction = [torch.randn(p.shape, generator=random, dtype=p.dtype).to(p.device) for p in weights]
        slope = sum(float((s * d).sum()) for s, d in zip(slopes, direction, strict=True) if s is not None)
        error = math.inf
        for step in (1e-5, 1e-6, 1e-7, 1e-8):
            up, down = moved(direction, step) - middle, middle - moved(direction, -step)
            found = ((up + down) / 2, up, down)
            error = min(error, *(abs(one / step - slope) / max(1.0, abs(slope)) for one in found))
            if error <= LIMITS["gradient"] / 10:
                break
        worst = max(worst, error)
    return worst


def _chunks(network: Network, given: Example) -> float | None:
    layers = [module for module in network.modules() if isinstance(module, FeedForwardModule)]
    if not layers:
        return None
    whole = given.run(network)
    direction = torch.randn_like(whole.hidden)
    wanted = _gradients(network, whole, direction)
    before = [layer.chunk for layer in layers]
    for layer in layers:
        layer.chunk = 2
    chunked = given.run(network)
    found = _gradients(network, chunked, direction)
    for layer, chunk in zip(layers, before, strict=True):
        layer.chunk = chunk
    return max(
        [
            _distance(chunked.hidden, whole.hidden),
            *(_distance(a, b) for a, b in zip(found, wanted, strict=True)),
        ]
    )


def _halting(network: Network, given: Example) -> float | None:
    body = network.value.body
    ponders = any(isinstance(sublayer, PonderRnn) for sublayer in body.sublayers())
    if not (isinstance(body, Halt) or ponders) or (isinstance(body, Halt) and body.mode == "t2t"):
        return None
    probe, padded = Probe(), given.pad(1, 2) if given.is_sequence and network.class_token is None else given
    padded.run(network, probe=probe)
    share_LBTN = torch.stack(probe.halts).detach()
    total_LBT = share_LBTN.sum(-1)
    visible = padded.per_token.get("visible", torch.ones_like(total_LBT[0]))
    return max(_distance(total_LBT, visible.to(total_LBT)), float(-share_LBTN.min()))


def _store(network: Network, given: Example) -> float | None:
    with tempfile.TemporaryDirectory() as folder:
        save(network, folder)
        again = load(folder)
    assert isinstance(again, Network)
    if again.value != network.value:
        return float("inf")
    again.to(next(network.parameters()).device)
    return _distance(given.run(again).hidden, given.run(network).hidden)


def _compile(network: Network, given: Example) -> float | None:
    torch._dynamo.reset()
    compiled: Any = torch.compile(network, fullgraph=True, backend="eager")
    with torch.no_grad():
        return _distance(given.run(compiled).hidden, given.run(network).hidden)


def _overfit(network: Network, given: Example) -> float | None:
    """The loss after at most 300 steps on one batch, as a share of what blind guessing has."""
    heads = _logits(given.run(network))
    if not heads:
        return None
    if not any(p.requires_grad for p in network.parameters()):
        return None
    learner = copy.deepcopy(network).float().train()
    for module in learner.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    data = given.to(dtype=torch.float32)
    random = torch.Generator().manual_seed(1)  # not the example's: its own tokens would be the easiest targets
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


def _goes_on(network: Network, given: Example) -> bool:
    """May the model read its sequence piece by piece?"""
    return network.value.body.is_causal() and given.is_sequence and network.class_token is None


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
    found = torch.autograd.grad((output.hidden * direction).sum(), weights, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(weights, found, strict=True)]
