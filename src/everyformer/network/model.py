"""Whole models: `Model` (one sequence) and `EncoderDecoder` (two). Values; `build` makes the network that is trained.

network = Model(width=64, embed=Tokens(256), position=Learned(128), body=Stack(...), outputs=(Language(),)).build()
output = network(tokens_BT)                      # output.logits, output.hidden
output = network(tokens_BT, past=Past())         # the same, and output.past to go on from
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from everyformer.attention.context import Call, Context, Positions, Probe, SideInputs
from everyformer.attention.hashing import hashing
from everyformer.network.cache import Cache, KVCache, RecurrentState
from everyformer.network.depth import Depth, DepthLayer, Source
from everyformer.network.embed import Embed, EmbedModule, Mixed, Patches, check_limit
from everyformer.network.initial import AsTorch, Initial
from everyformer.network.inputs import (
    by_position,
    check_begin,
    check_ids,
    check_range,
    check_visible,
    checked_edges,
    count,
    joined_documents,
    positions,
)
from everyformer.network.legal import illegal_pair_reasons, illegal_reasons, refuse
from everyformer.network.norm import Norm
from everyformer.network.output_head import Language, OutputHead
from everyformer.network.position import Position
from everyformer.value import Count, Share, Size, Value


class Model(Value, frozen=True, kw_only=True):
    """One choice per question. Everything a network is follows from this value, and it round-trips through JSON."""

    width: Size
    embed: Embed
    body: Depth
    outputs: tuple[OutputHead, ...] = ()  # one gives its logits, several a tuple of them
    position: Position | None = None
    class_token: bool = False  # a learned token put before the others
    segments: Count = 0  # kinds of segments (BERT's sentences A and B), marked by learned vectors
    norm: Norm | None = None  # of the embedded tokens
    dropout: Share = 0.0  # of the embedded tokens
    memory: Count = 0  # how many positions of the past are kept (Transformer-XL's memory length); 0: all
    initial: Initial = AsTorch()

    def limit(self) -> int | None:
        """How many positions its tables have, or None where there is no end."""
        places = (self.position, *(layer.position for layer in self.body.each))
        return min((end for place in places if place and (end := place.limit()) is not None), default=None)

    def build(self) -> Network:
        refuse(illegal_reasons(self))
        network = Network(self)
        self.initial.fill(network)
        return network


class EncoderDecoder(Value, frozen=True, kw_only=True):
    """A model whose decoder attends to what its encoder makes of another sequence.

    The encoder gives a memory sequence, not a single vector; the decoder is given the target so far.
    """

    encoder: Model
    decoder: Model
    share_embedding: bool = False

    def build(self) -> PairNetwork:
        refuse(illegal_pair_reasons(self))
        return PairNetwork(self)


@dataclass(frozen=True)
class Output:
    """What a network answers. `aux` holds costs to be added to the loss."""

    hidden: Tensor  # B, T, D
    logits: Any = None  # the head's answer, or a tuple where there are several heads
    cache: Cache | None = None
    aux: dict[str, Tensor] = field(default_factory=dict)
    further: tuple[
        tuple[int, int, Tensor], ...
    ] = ()  # layer (from 1), tokens after the next, logits: for training alone

    def head(self, number: int) -> Any:
        """The answer of one of the heads."""
        return self.logits[number] if isinstance(self.logits, tuple) else self.logits


@dataclass(frozen=True)
class EncoderOutput:
    """An encoded source: what cross-attention looks at."""

    x_BSD: Tensor
    visible_BS: Tensor | None = None
    aux: dict[str, Tensor] = field(default_factory=dict)  # what encoding it costs

    def __post_init__(self) -> None:
        if self.x_BSD.dim() != 3:
            raise ValueError(f"a memory has the shape batch, time, width, not {tuple(self.x_BSD.shape)}")
        check_visible(self.visible_BS, self.x_BSD.shape[0], self.x_BSD.shape[1])


@contextmanager
def evaluating(network: nn.Module) -> Iterator[None]:
    """The network without dropout; afterwards it is as it was."""
    training = network.training
    network.eval()
    try:
        yield
    finally:
        network.train(training)


GROWTH = 64  # positions beyond what any head sees that a memory keeps in training, because spans may grow
READS = {
    "documents": "document_BP",
    "edges": "edges_BNN",
}  # what is given to a call, and the field of a scene by which patterns ask for it


class Network(nn.Module):
    """Embed, place, run the depth, read. Built from a `Model`, which it keeps as `value`."""

    def __init__(self, value: Model):
        super().__init__()
        self.value = value
        position = value.position
        self.embed: EmbedModule = value.embed.build(position.content_width(value.width) if position else value.width)
        self.class_token = nn.Parameter(torch.randn(1, 1, value.width) * 0.02) if value.class_token else None
        self.segments = nn.Embedding(value.segments, value.width) if value.segments else None
        self.position = position.build(value.width) if position else None
        self.limit = value.limit()
        self.norm = value.norm.build(value.width) if value.norm else None
        self.dropout = nn.Dropout(value.dropout)
        self.body = value.body.build(value.width)
        self.layers = tuple(module for module in self.body.modules() if isinstance(module, DepthLayer))
        attentions = [layer.attention for layer in value.body.each if layer.attention]
        self.ahead = [one for one in attentions if one.pattern.attends_to_future(heads=one.heads.heads)]
        self.spreads = any(layer.spreads() for layer in value.body.each)
        needs = {part.needs for part in value.body.parts()}
        crosses = any(layer.cross for layer in value.body.each)
        self.reads = {name for name, field in READS.items() if field in needs} | ({"source"} if crosses else set())
        self.outputs = nn.ModuleList(head.build(value.width, value.embed) for head in value.outputs)
        telling = [head for head in value.outputs if isinstance(head, Language)]
        self.further = telling[0].further(value.width, value.embed, len(self.layers)) if telling else None

    def forward(
        self,
        inputs: Any,
        *,
        visible: Tensor | None = None,
        cache: Cache | None = None,
        source: EncoderOutput | None = None,
        segments: Tensor | None = None,
        documents: Tensor | None = None,
        edges: Tensor | None = None,
        begin: Tensor | None = None,
        memory: int | None = None,
        further: int | None = None,
        kernel: str = "auto",
        probe: Probe | None = None,
    ) -> Output:
        """Run the model on inputs (tokens B, T; images; features; a tuple of parts).

        visible    B, T booleans: False where a token is padding, on either side
        past       `Past()` to begin one, the last output's to go on; without it nothing is kept
        source     the encoded other sequence, for a decoder
        segments   B, T whole numbers, where the model has segments
        documents  B, T whole numbers, for the pattern same_document
        edges      N, N or B, N, N booleans, for the pattern graph
        begin      B whole numbers: where the positions of each sequence begin; None: at 0
        memory     how many positions of the past are kept, 0 for all; None: as the model says
        further    the lowest layer, from 1, whose predictions for training alone are told too
        kernel     how attention is computed; see everyformer.attention.attend
        probe      collects the attention weights
        """
        self.embed.check(inputs)
        x_BTD = self.embed(inputs)
        batch, length = x_BTD.shape[:2]
        check_visible(visible, batch, length)
        if visible is not None:  # whatever stands there, and be it no numbers
            x_BTD = x_BTD.masked_fill(~visible[..., None], 0.0)
        self._check_used(documents=documents, edges=edges, source=source)
        if cache is not None:
            self._check_cache(cache, batch, source)
        elif memory is not None:
            raise ValueError(f"memory={memory} is of a past, and none is kept; give past=Past() too")
        if self.class_token is not None:
            x_BTD = torch.cat((self.class_token.expand(batch, -1, -1), x_BTD), dim=1)
            visible = None if visible is None else torch.cat((visible.new_ones(batch, 1), visible), dim=1)
        before = cache or Cache()
        if begin is not None:
            check_begin(begin, batch, before)
        position_BK = positions(before, visible, x_BTD, begin)
        document_BK = joined_documents(before, documents, x_BTD)
        keys = before.length + x_BTD.shape[1]
        wanted = further is not None and self.further is not None and len(self.further) > 1
        context = Context(
            Positions(x_BTD.shape[1], keys, x_BTD.device, key_BK=position_BK),
            SideInputs(by_position(document_BK, position_BK), checked_edges(edges, batch, keys, position_BK)),
            Call(kernel, probe, segment_memory=before.hidden, layer_outputs=[] if wanted else None),
        )
        if before.length:
            self._check_unseen(before.length, batch, context)
        x_BTD = self._place(x_BTD, context, segments)
        x_BTD, layers, aux = self.body(
            x_BTD, context, None if cache is None else before.layers, self._source(source, x_BTD, context)
        )
        for name, cost in context.call.losses:
            aux[name] = aux[name] + cost if name in aux else cost
        if cache is not None:
            keep = self.value.memory if memory is None else memory
            if keep and (end := self.max_distance()) is not None:
                spare = GROWTH if self.training and self.value.body.each else 0
                keep = min(keep, max(1, end + spare))
            cache = Cache(keys, layers, position_BK, document_BK, before.hidden, before.holes or visible is not None)
            cache = cache.trim(keep) if keep else cache
        visible_BT = context.positions.visible_BQ()
        logits = tuple(head(x_BTD, visible_BT, self.embed) for head in self.outputs)
        return Output(
            hidden=x_BTD,
            logits=logits if len(logits) > 1 else logits[0] if logits else None,
            cache=cache,
            aux=aux,
            further=() if further is None else self._further(x_BTD, context, further, aux),
        )

    def _further(
        self, x_BTD: Tensor, context: Context, lowest: int, aux: dict[str, Tensor]
    ) -> tuple[tuple[int, int, Tensor], ...]:
        if self.further is None:
            raise ValueError(
                "the model has no predictions for training alone; build it with Language(ahead=1, every_layer=True)"
            )
        found: list[tuple[int, int, Tensor]] = []
        ends: Any = getattr(self.body, "ends", None)  # of a stack
        states = [*(context.call.layer_outputs or (x_BTD,))[:-1], None]  # of the last layer there is the output
        for number, (maps, state) in enumerate(zip(self.further, states, strict=True), 1):
            assert isinstance(maps, nn.ModuleList)
            if number < lowest:  # a gradient of 0, because several processes wait for one of every weight
                idle = [0 * weight.sum() for weight in maps.parameters()]
                aux["idle"] = sum(idle, aux.get("idle", x_BTD.new_zeros(())))
            elif len(maps):
                z_BTD = x_BTD if state is None else ends.close(state, context.positions.visible_BQ())
                first = int(state is None)  # there the next token is the head's
                found += [(number, tokens, one(z_BTD)) for tokens, one in enumerate(maps, first)]
        return tuple(found)

    def max_distance(self) -> int | None:
        """How far back any layer can look with the weights as they are: a past needs no more. None: there is no end."""
        ends = [end for layer in self.layers for end in layer.max_distance()]
        known = [end for end in ends if end is not None]
        return max(known) if ends and len(known) == len(ends) else None

    def _place(self, x_BTD: Tensor, context: Context, segments: Tensor | None) -> Tensor:
        """Add what marks a token besides itself: its segment and its position."""
        if self.segments is not None:
            segments = (
                torch.zeros(x_BTD.shape[:2], dtype=torch.long, device=x_BTD.device) if segments is None else segments
            )
            check_ids(segments, x_BTD, "segments")
            check_range(segments, self.segments.num_embeddings, "segment")
            x_BTD = x_BTD + self.segments(segments)
        elif segments is not None:
            raise ValueError("segments are given, but the model has none; build it with segments=2")
        position_BT = context.positions.query_positions()
        if self.limit is not None:
            self._check_limit(x_BTD.shape[1], position_BT, context)
        if self.position is not None:
            x_BTD = self.position(x_BTD, position_BT.clamp(min=0))
        x_BTD = x_BTD if self.norm is None else self.norm(x_BTD, context.positions.visible_BQ())
        return self.dropout(x_BTD)

    def _check_limit(self, length: int, position_BT: Tensor, context: Context) -> None:
        if isinstance(self.value.embed, Patches) and length != self.limit:
            raise ValueError(
                f"the image has {length} tokens with the class token, the model's positions are for {self.limit}; "
                "give images of the size it was built for"
            )
        if context.positions.key_BK is None:
            check_limit(context.positions.keys, self.limit)
        elif not torch.compiler.is_compiling():
            check_limit(int(position_BT.max()) + 1, self.limit)

    def _check_used(self, **given: Any) -> None:
        for name, x in given.items():
            if x is not None and name not in self.reads:
                raise ValueError(f"{name} are given, but nothing in the model reads them; leave them out")

    def _check_cache(self, cache: Cache, batch: int, source: EncoderOutput | None) -> None:
        if not isinstance(cache, Cache):
            raise ValueError(f"past is a {type(cache).__name__}: give Past() to begin, then the last output's past")
        if self.class_token is not None:
            raise ValueError("a model with a class token reads its sequence at once; call it without past")
        if isinstance(self.value.embed, Mixed):
            raise ValueError("a mixed sequence has all its parts in one call; call it without past")
        if cache.batch not in (None, batch):
            raise ValueError(
                f"the past has {cache.batch} sequences, the input {batch}; reorder it, or begin with Past()"
            )
        if any(isinstance(one, RecurrentState) == bool(self.value.body.each) for one in cache.layers):
            raise ValueError("the past is of a model of another kind; begin with Past()")
        known = {one.k_BHKE.shape[2] for one in cache.layers if isinstance(one, KVCache) and one.fixed}
        if source is not None and known - {source.x_BSD.shape[1]}:
            raise ValueError(
                f"the past is of a source of {max(known)} positions, this one has {source.x_BSD.shape[1]}; begin with Past()"
            )

    def _check_unseen(self, before: int, batch: int, context: Context) -> None:
        """What the past has answered must not change: none of its positions may see one that comes now."""
        if self.spreads:
            raise ValueError(
                "a convolution to both sides lets the past see what comes now, but it has answered already; read the "
                "sequence at once, or use a causal one"
            )
        if not self.ahead or torch.compiler.is_compiling():
            return
        whole = replace(context, positions=replace(context.positions, queries=context.positions.keys))
        for attention in self.ahead:
            if hashing(attention.pattern):
                raise ValueError(
                    f"in the pattern {attention.pattern} positions to come decide whom the past sees, but it has answered already; "
                    "read the sequence at once, or use hashed"
                )
            seen = whole.mask(attention.pattern, batch, attention.heads.heads)[..., :before, before:]
            if bool(seen.any()):
                raise ValueError(
                    f"the pattern {attention.pattern} lets the past see what comes now, but it has answered already; "
                    "read the sequence at once, or add causal &"
                )

    def _source(self, memory: EncoderOutput | None, x_BTD: Tensor, context: Context) -> Source | None:
        if memory is None:
            return None
        if not isinstance(memory, EncoderOutput):
            raise ValueError(f"source is a {type(memory).__name__}: give a Memory, as encode() returns it")
        batch, length, width = memory.x_BSD.shape
        if (batch, width) != (x_BTD.shape[0], self.value.width):
            raise ValueError(
                f"the source is of {batch} sequences and {width} wide, the model's input of {x_BTD.shape[0]} and "
                f"{self.value.width} wide; they must be equal"
            )
        if memory.x_BSD.dtype != x_BTD.dtype and not torch.is_autocast_enabled(x_BTD.device.type):
            raise ValueError(f"the source is {memory.x_BSD.dtype}, the model {x_BTD.dtype}; make them one")
        visible_BS = memory.visible_BS
        position_BS = None if visible_BS is None else count(visible_BS, 0)
        here = context.positions
        seen = Context(
            Positions(here.queries, length, here.device, here.query_positions(), position_BS),
            SideInputs(),
            context.call,
        )
        return Source(memory.x_BSD, seen)


class PairNetwork(nn.Module):
    """Encoder and decoder. `encode` once, then `decode` as often as needed."""

    def __init__(self, value: EncoderDecoder):
        super().__init__()
        self.value = value
        self.encoder, self.decoder = value.encoder.build(), value.decoder.build()
        if value.share_embedding:
            self.decoder.embed = self.encoder.embed

    def encode(
        self,
        inputs: Any,
        *,
        visible: Tensor | None = None,
        begin: Tensor | None = None,
        kernel: str = "auto",
        probe: Probe | None = None,
    ) -> EncoderOutput:
        output: Output = self.encoder(inputs, visible=visible, begin=begin, kernel=kernel, probe=probe)
        return EncoderOutput(output.hidden, visible, output.aux)

    def decode(self, inputs: Any, memory: EncoderOutput, **options: Any) -> Output:
        """The decoder's output; the options are those of `Network`."""
        output: Output = self.decoder(inputs, source=memory, **options)
        return output

    def forward(
        self,
        source: Any,
        target: Any,
        *,
        source_visible: Tensor | None = None,
        visible: Tensor | None = None,
        begin: Tensor | None = None,
        kernel: str = "auto",
        probe: Probe | None = None,
    ) -> Output:
        memory = self.encode(source, visible=source_visible, begin=begin, kernel=kernel, probe=probe)
        output = self.decode(target, memory, visible=visible, begin=begin, kernel=kernel, probe=probe)
        costs = {name: cost + output.aux.get(name, 0) for name, cost in memory.aux.items()}
        return replace(output, aux=output.aux | costs)
