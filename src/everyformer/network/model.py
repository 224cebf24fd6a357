"""Models as values: `Model` (one sequence) and `EncoderDecoder` (two). `build` makes the network that is trained.

network = Model(width=64, embed=Tokens(256), position=Learned(128), body=Stack(...), outputs=(Language(),)).build()
output = network(tokens_BT)                      # output.logits, output.hidden
output = network(tokens_BT, cache=Cache())       # the same, and output.cache to continue from
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

# Values are found by name among the imported classes, so whoever reads a model from JSON needs all of them.
from everyformer.network import convolution, feedforward, grid, lstm, ngrams, ponder_rnn, sandwich_norm, sinusoid  # noqa: F401
from everyformer.network.auxiliary import AuxiliaryPredictions
from everyformer.network.cache import SegmentMemory
from everyformer.network.depth import Depth
from everyformer.network.embed import Embed
from everyformer.network.initial import AsTorch, Initial
from everyformer.network.legal import illegal_pair_reasons, illegal_reasons, refuse
from everyformer.network.norm import Norm
from everyformer.network.output_head import OutputHead
from everyformer.network.position import Position
from everyformer.network.size import check_memory
from everyformer.value import Count, Share, Size, Value

if TYPE_CHECKING:
    from everyformer.network.network import Network, PairNetwork


class Model(Value, frozen=True, kw_only=True):
    """One choice per question. A network follows from this value alone, and the value round-trips through JSON.

    width         of the stream; `embed` maps the input to it, and `body` is the depth with its layers
    outputs       the output heads: one gives its logits, several a tuple of them
    position      of the tokens. Default: none, or those of the score modifications
    class_token   a learned token before the others; 2: and one for distillation
    segments      the number of segment embeddings (BERT's sentences A and B); 0: none
    embed_width   of the tokens, positions and segments, which a linear map then widens. Default: `width`
    norm          of the embedded tokens, and `dropout` on them
    memory        what is carried from segment to segment. Default: nothing
    auxiliary     additional predictions in training
    generator     replaces masked tokens in training, for `ReplacedToken`; it shares the embedding (ELECTRA)
    initial       how the weights are initialized
    Example: `Model(width=64, embed=Tokens(256), body=body, outputs=(Language(),))`, with a `body` such as a `Stack`.
    """

    width: Size
    embed: Embed
    body: Depth
    outputs: tuple[OutputHead, ...] = ()
    position: Position | None = None
    class_token: bool | Literal[2] = False
    segments: Count = 0
    embed_width: Size | None = None
    norm: Norm | None = None
    dropout: Share = 0.0
    memory: SegmentMemory | None = None
    auxiliary: AuxiliaryPredictions | None = None
    generator: Model | None = None
    initial: Initial = AsTorch()

    @property
    def output_width(self) -> int:
        """The width of the last layer's output, which the output heads read."""
        return self.body.residual.output_width(self.width)

    def limit(self) -> int | None:
        """The number of positions that the model can handle, or None if any."""
        positions = (self.position, *(layer.position for layer in self.body.layers))
        limits = [one.limit() for one in positions if one] + [one.position_limit() for one in self.body.sublayers()]
        return min((limit for limit in limits if limit is not None), default=None)

    def cache_kinds(self) -> tuple[str, ...]:
        """What the model keeps in a cache, in words. Empty if it cannot use one."""
        if not self.body.is_language_model():
            return ()
        if self.memory is not None:
            return (f"segment memory of {self.memory.length}",)
        return tuple(dict.fromkeys(one.carries for one in self.body.sublayers() if one.carries))

    def build(self) -> Network:
        """Returns the network with new weights. Raises ValueError if the model is illegal, with the reasons."""
        from everyformer.network.network import Network

        refuse(illegal_reasons(self))
        check_memory(self)
        network = Network(self)
        self.initial.fill(network)
        return network


class EncoderDecoder(Value, frozen=True, kw_only=True):
    """A `decoder` that attends to the output of an `encoder`, a sequence of vectors; `share_embedding`: both have one embedding.

    Example: `EncoderDecoder(encoder=encoder, decoder=decoder)`, of two models of the same width.
    """

    encoder: Model
    decoder: Model
    share_embedding: bool = False

    def build(self) -> PairNetwork:
        """Returns the networks with new weights. Raises ValueError if the models are illegal, with the reasons."""
        from everyformer.network.network import PairNetwork

        refuse(illegal_pair_reasons(self))
        check_memory(self)
        return PairNetwork(self)
