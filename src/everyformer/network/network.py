"""Networks: the modules that `Model` and `EncoderDecoder` build. Embed, add positions, run the body, compute the outputs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from everyformer.attention.context import Call, Context, EncoderContext, Positions, Probe, SideInputs
from everyformer.attention.has_data import can_read, is_exporting, is_transformed
from everyformer.network.cache import Cache
from everyformer.network.check_call import check_call
from everyformer.network.depth import DepthModule
from everyformer.network.embed import EmbedModule, Patches, check_limit
from everyformer.network.generator import replace_tokens
from everyformer.network.inputs import (
    by_position,
    check_ids,
    check_range,
    check_visible,
    checked_edges,
    checked_prefix,
    count_positions,
    hide_padding,
    joined_documents,
    joined_positions,
)
from everyformer.network.model import EncoderDecoder, Model
from everyformer.network.output import EncoderOutput as EncoderOutput
from everyformer.network.output import Output as Output
from everyformer.network.output_head import Language

SPARE = 64  # positions beyond the longest span that a segment memory keeps in training, because spans may grow


@contextmanager
def evaluating(network: nn.Module) -> Iterator[None]:
    """Switches the network to evaluation mode, and back to its mode afterwards."""
    training = network.training
    network.eval()
    try:
        yield
    finally:
        network.train(training)


class Network(nn.Module):
    """Built from a `Model`, which it keeps as `value`. Example: `Network(member("gpt2", "tiny"))(token_BT).logits`."""

    def __init__(self, value: Model):
        super().__init__()
        self.value = value
        position, inner = value.position, value.embed_width or value.width
        width = position.content_width(inner) if position else inner
        self.embed: EmbedModule = value.embed.build(width)
        self.class_token = (
            nn.Parameter(torch.randn(int(value.class_token), 1, width) * 0.02) if value.class_token else None
        )
        self.segments = nn.Embedding(value.segments, width) if value.segments else None
        self.position = position.build(inner) if position else None
        self.limit = value.limit()
        self.norm = value.norm.build(inner) if value.norm else None
        self.dropout = nn.Dropout(value.dropout)
        self.widen = nn.Linear(inner, value.width) if value.embed_width else None
        self.body: DepthModule = value.body.build(value.width)
        self.reads = set[str]().union(*(sublayer.reads() for sublayer in value.body.sublayers()))
        self.outputs = nn.ModuleList(head.build(value.output_width, value.embed) for head in value.outputs)
        language = next((head for head in value.outputs if isinstance(head, Language)), None)
        self.auxiliary: nn.ModuleList | None = None
        if value.auxiliary is not None and language is not None:
            layers = len(self.body.layer_modules())
            self.auxiliary = value.auxiliary.build(value.output_width, value.embed, language, layers)
        self.generator = value.generator.build() if value.generator else None
        if self.generator is not None:
            for name in ("embed", "segments", "position", "norm"):
                if (part := getattr(self, name)) is not None:
                    _tie(getattr(self.generator, name), part)

    def forward(
        self,
        inputs: Any,
        *,
        visible: Tensor | None = None,
        cache: Cache | None = None,
        encoder_output: EncoderOutput | None = None,
        side_inputs: SideInputs | None = None,
        position_offset: Tensor | None = None,
        kernel: str = "auto",
        probe: Probe | None = None,
    ) -> Output:
        """Runs the model on inputs (tokens B, T; images; features; a tuple of parts).

        visible           B, T booleans: False where a token is padding, on either side. Default: no padding
        cache             `Cache()` to start one, the last output's to continue. Default: nothing is kept
        encoder_output    what `PairNetwork.encode` returns, for a decoder
        side_inputs       documents, edges, segments, prefix and replacement, for models that read them
        position_offset   B whole numbers: the first position of each sequence. Default: 0
        kernel            how attention is computed; see everyformer.attention.attend
        probe             records the attention weights of every layer
        """
        replaced = None if side_inputs is None else replace_tokens(self.generator, inputs, visible, side_inputs, kernel)
        inputs = inputs if replaced is None else replaced.token_BT
        x_BTD, visible = self._embed(inputs, visible)
        side, before = SideInputs() if side_inputs is None else side_inputs, Cache() if cache is None else cache
        check_call(self, side, cache, encoder_output, x_BTD.shape[0], kernel)
        side = replace(side, tokens=inputs) if "tokens" in self.reads else side
        position_BK = joined_positions(before, visible, x_BTD, position_offset)
        if position_BK is not None and (position_offset is not None or before.position_BK is not None):
            self._check_table(position_BK)
        document_BK = joined_documents(before, side.documents, x_BTD)
        keys = before.length + x_BTD.shape[1]
        context = self._context(x_BTD, keys, position_BK, document_BK, side, Call.of(kernel, probe))
        context = replace(context, encoder=self.encoder_context(encoder_output, x_BTD, context))
        if before.length:
            self._check_causal(before.length, x_BTD.shape[0], context)
        x_BTD = self.add_positions(x_BTD, context, side.segments)
        entries = None if cache is None else before.entries or self.body.new_entries(before.segment_memory)
        x_BTD, new_entries = self.body(x_BTD, context, entries)
        visible_BT = context.positions.visible_BQ()
        if probe is not None and context.call.layer_outputs is not None:
            probe.layers += [self.body.stream.finish(x, visible_BT) for x in context.call.layer_outputs[:-1]]
        if new_entries is not None:
            self._check_model(before)
            changes: dict[str, Any] = {"length": keys, "entries": new_entries, "model": self.value}
            padding = before.has_padding or visible is not None
            cache = replace(before, **changes, position_BK=position_BK, document_BK=document_BK, has_padding=padding)
            cache = self._trim(cache)
        logits = self.predict(x_BTD, visible_BT, logits=probe is None or probe.logits)
        return Output(x_BTD, logits, cache, _sums(context.call.losses), replaced)

    def predict(self, x_BTD: Tensor, visible_BT: Tensor | None = None, logits: bool = True) -> Any:
        """The logits of the output head, or a tuple if there are several. With `logits` False a `LogitMap` where a head has one."""
        heads: list[Any] = [getattr(head, "logit_map", head) if not logits else head for head in self.outputs]
        outputs = tuple(head(x_BTD, visible_BT, self.embed) for head in heads)
        return outputs if len(outputs) > 1 else outputs[0] if outputs else None

    def _context(
        self,
        x_BTD: Tensor,
        keys: int,
        position_BK: Tensor | None,
        document_BK: Tensor | None,
        side: SideInputs,
        call: Call,
    ) -> Context:
        """Positions, side inputs by position, and the options of the call."""
        batch = x_BTD.shape[0]
        edges = checked_edges(side.edges, batch, keys, position_BK)
        prefix = checked_prefix(side.prefix, batch)
        positions = Positions(x_BTD.shape[1], keys, x_BTD.device, key_BK=position_BK)
        documents = by_position(document_BK, positions)
        return Context(positions, SideInputs(documents, edges, prefix=prefix, tokens=side.tokens), call)

    def max_distance(self) -> int | None:
        """How far back any layer can attend with the weights as they are: a cache needs no more. None: to the start."""
        distances = self.body.max_distances()
        known = [distance for distance in distances if distance is not None]
        return max(known) if distances and len(known) == len(distances) else None

    def _embed(self, inputs: Any, visible: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The embedded tokens, with the class token before them, and which of them are visible."""
        self.embed.check(inputs)
        x_BTD = self.embed(inputs if visible is None else hide_padding(inputs, visible))
        batch, length = x_BTD.shape[:2]
        check_visible(visible, batch, length)
        if visible is not None:  # padding may contain anything, NaN too
            x_BTD = x_BTD.masked_fill(~visible[..., None], 0.0)
        if self.class_token is not None:
            x_BTD = torch.cat((self.class_token.transpose(0, 1).expand(batch, -1, -1), x_BTD), dim=1)
            more = int(self.value.class_token)
            visible = None if visible is None else torch.cat((visible.new_ones(batch, more), visible), dim=1)
        return x_BTD, visible

    def add_positions(self, x_BTD: Tensor, context: Context, segments: Tensor | None = None) -> Tensor:
        """Adds the segment embedding and the position, then the norm and the dropout of the embedding."""
        if self.segments is not None:
            if segments is None:
                segments = torch.zeros(x_BTD.shape[:2], dtype=torch.long, device=x_BTD.device)
            check_ids(segments, x_BTD, "segments")
            check_range(segments, self.segments.num_embeddings, "segment")
            x_BTD = x_BTD + self.segments(segments)
        elif segments is not None:
            raise ValueError("segments are given, but the model has no segment embeddings; build it with segments=2")
        position_BT = context.positions.query_positions()
        if self.limit is not None:
            self._check_limit(x_BTD.shape[1], position_BT, context)
        if self.position is not None:
            x_BTD = self.position(x_BTD, position_BT.clamp(min=0))
        x_BTD = x_BTD if self.norm is None else self.norm(x_BTD, context.positions.visible_BQ())
        x_BTD = self.dropout(x_BTD)
        return x_BTD if self.widen is None else self.widen(x_BTD)

    def _trim(self, cache: Cache) -> Cache:
        """Drops the positions beyond `max_length`, or beyond the model's memory and what the layers can read of it."""
        if cache.forget:
            distance = self.max_distance()
            cache = cache if distance is None else cache.trim(max(1, distance))
            cache = cache.without_far_keys(self.body.max_distances())
        if cache.max_length is not None:
            return cache.trim(cache.max_length)
        if self.value.memory is None:
            return cache
        length, distance = self.value.memory.length, self.max_distance()
        if distance is not None:
            spare = SPARE if self.training and any(self.value.body.patterns()) else 0
            length = min(length, max(1, distance + spare))
        return cache.trim(length)

    def _check_table(self, position_BK: Tensor) -> None:
        """Raises ValueError if a table by position is needed whose size cannot be known."""
        if self.reads & {"documents", "hashes"} and is_transformed() and not can_read(position_BK):
            raise ValueError(
                "inside vmap the last position cannot be read, which patterns with documents or hashes need if positions do not start "
                "at 0; give whole sequences without cache= and position_offset="
            )

    def _check_limit(self, length: int, position_BT: Tensor, context: Context) -> None:
        if isinstance(self.value.embed, Patches) and length != self.limit:
            raise ValueError(
                f"the image has {length} tokens with the class token, but the model's positions are for {self.limit}; "
                "give images of the size it was built for"
            )
        if context.positions.key_BK is None:
            of_cache = context.positions.keys != length
            if not (of_cache and is_exporting()):  # a graph limits each open size, not a sum of two
                check_limit(context.positions.keys, self.limit)
        elif can_read(position_BT):
            check_limit(int(position_BT.max()) + 1, self.limit)

    def _check_model(self, cache: Cache) -> None:
        """Raises ValueError if the cache fits by its shapes alone."""
        same = cache.model is None or cache.model is self.value or torch.compiler.is_compiling()
        if not same and cache.model != self.value:
            raise ValueError(
                "the shapes in the cache fit, but the model that made it is not equal to this one: it is the cache of another model; "
                "start with Cache()"
            )

    def _check_causal(self, before: int, batch: int, context: Context) -> None:
        """Raises ValueError if a cached position would depend on a new one: its output is already computed."""
        if torch.compiler.is_compiling():
            return
        whole = replace(context, positions=replace(context.positions, queries=context.positions.keys))
        for sublayer in self.value.body.sublayers():
            if sublayer.attends_to_future() and (reason := sublayer.whole_sequence_reason(before, batch, whole)):
                raise ValueError(
                    f"{reason}; give the whole sequence in one call without cache=, or make the model causal"
                )

    def encoder_context(
        self, encoder_output: EncoderOutput | None, x_BTD: Tensor, context: Context
    ) -> EncoderContext | None:
        """What cross-attention reads of an encoder output, or None if there is none."""
        if encoder_output is None:
            return None
        x_BSD, visible_BS = encoder_output.x_BSD, encoder_output.visible_BS
        if (x_BSD.shape[0], x_BSD.shape[2]) != (x_BTD.shape[0], self.value.width):
            raise ValueError(
                f"the encoder output has {x_BSD.shape[0]} sequences of width {x_BSD.shape[2]}, the model's input {x_BTD.shape[0]} of width "
                f"{self.value.width}; make them equal"
            )
        if x_BSD.dtype != x_BTD.dtype and not torch.is_autocast_enabled(x_BTD.device.type):
            raise ValueError(f"the encoder output is {x_BSD.dtype}, the model {x_BTD.dtype}; use one dtype")
        position_BS = None if visible_BS is None else count_positions(visible_BS, 0)
        here = context.positions
        positions = Positions(here.queries, x_BSD.shape[1], here.device, here.query_positions(), position_BS)
        return EncoderContext(x_BSD, Context(positions, SideInputs(), context.call))


def _sums(losses: list[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """The auxiliary losses by name."""
    sums: dict[str, Tensor] = {}
    for name, loss in losses:
        sums[name] = sums[name] + loss if name in sums else loss
    return sums


def _tie(module: nn.Module, to: nn.Module) -> None:
    """Gives a module the weights of another one. They stay two modules, as `torch.func.functional_call` needs it."""
    for name, weight in to.named_parameters():
        path, _, last = name.rpartition(".")
        setattr(module.get_submodule(path), last, weight)


class PairNetwork(nn.Module):
    """Encoder and decoder, built from an `EncoderDecoder`, which it keeps as `value`. Call `encode` once, then `decode` as often as needed.

    Example: `PairNetwork(member("transformer", "tiny"))(source_BS, target_BT).logits`.
    """

    def __init__(self, value: EncoderDecoder):
        super().__init__()
        self.value = value
        self.encoder, self.decoder = value.encoder.build(), value.decoder.build()
        if value.share_embedding:
            _tie(self.decoder.embed, self.encoder.embed)

    def encode(
        self,
        inputs: Any,
        *,
        visible: Tensor | None = None,
        position_offset: Tensor | None = None,
        kernel: str = "auto",
        probe: Probe | None = None,
    ) -> EncoderOutput:
        """Returns the encoder's output, which `decode` reads."""
        output: Output = self.encoder(
            inputs, visible=visible, position_offset=position_offset, kernel=kernel, probe=probe
        )
        return EncoderOutput(output.hidden, visible, output.aux)

    def decode(self, inputs: Any, encoder_output: EncoderOutput, **options: Any) -> Output:
        """The decoder's output; the options are those of `Network`."""
        output: Output = self.decoder(inputs, encoder_output=encoder_output, **options)
        return output

    def forward(
        self,
        source: Any,
        target: Any,
        *,
        source_visible: Tensor | None = None,
        visible: Tensor | None = None,
        position_offset: Tensor | None = None,
        kernel: str = "auto",
        probe: Probe | None = None,
    ) -> Output:
        """Returns the decoder's output for the source and the target."""
        options: dict[str, Any] = {"position_offset": position_offset, "kernel": kernel, "probe": probe}
        encoder_output = self.encode(source, visible=source_visible, **options)
        output = self.decode(target, encoder_output, visible=visible, **options)
        losses = {name: loss + output.aux.get(name, 0) for name, loss in encoder_output.aux.items()}
        return replace(output, aux=output.aux | losses)
