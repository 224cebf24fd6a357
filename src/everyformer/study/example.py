"""Random example inputs for any model, which can be sliced and padded along time."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from everyformer.attention.context import SideInputs
from everyformer.attention.pattern import Graph, Prefix, SameDocument
from everyformer.infer.signature import grid_of
from everyformer.network.embed import Embed, Features, Mixed, Nodes, Patches, Tokens
from everyformer.network.model import EncoderDecoder, Model
from everyformer.network.network import EncoderOutput, Network, Output, PairNetwork


@dataclass(frozen=True)
class Example:
    """The arguments of one call: inputs, tensors with one entry per token, and arguments for the whole call."""

    inputs: Any
    per_token: dict[str, Tensor] = field(default_factory=dict)
    whole: dict[str, Any] = field(default_factory=dict)

    @property
    def is_sequence(self) -> bool:
        """Whether it can be sliced along time."""
        return isinstance(self.inputs, Tensor) and self.inputs.dim() in (2, 3)

    @property
    def length(self) -> int:
        return int(self.inputs.shape[1])

    def cut(self, start: int, end: int | None = None) -> Example:
        return self._each(lambda x: x[:, start:end])

    def rows(self, index: Tensor) -> Example:
        whole = {
            name: EncoderOutput(x.x_BSD[index], None if x.visible_BS is None else x.visible_BS[index])
            if isinstance(x, EncoderOutput)
            else x[index]
            if name == "prefix"
            else x
            for name, x in self.whole.items()
        }
        return replace(self._each(lambda x: x[index]), whole=whole)

    def change_after(self, time: int) -> Example:
        """The same tokens before `time`, others from there on."""
        return self._each(lambda x: torch.cat((x[:, :time], x[:, time:].flip(0).roll(1, 1)), dim=1), only_inputs=True)

    def change_at(self, time: int) -> Example:
        """Another token at one position: that of the next sequence, or other numbers."""
        other = self.inputs.roll(1, 0) if self.inputs.is_floating_point() else self.inputs
        other = other.clone()
        other[:, time] = other[:, time] + 1 if other.is_floating_point() else (other[:, time] == 0).to(other.dtype)
        at_T = torch.arange(self.length, device=other.device) == time
        chosen = at_T.view(1, -1, *[1] * (other.dim() - 2))
        return replace(self, inputs=torch.where(chosen, other, self.inputs))

    def pad(self, left: int, right: int, uneven: bool = False) -> Example:
        """With arbitrary tokens on both sides, marked as padding. `uneven`: the next sequence has one more on the left each time,
        and one less on the right, in turn."""
        length, device = self.length, self.inputs.device
        row_B1 = torch.arange(len(self.inputs), device=device)[:, None]
        left_B1 = (left + row_B1) % (left + right + 1) if uneven else torch.full_like(row_B1, left)
        index_BT = torch.arange(left + length + right, device=device) - left_B1
        wide = self._each(lambda x: x[row_B1, index_BT.clamp(0, length - 1)])
        return replace(wide, per_token=wide.per_token | {"visible": (index_BT >= 0) & (index_BT < length)})

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Example:
        """On another device, with floating-point tensors in another precision."""

        def move(x: Any) -> Any:
            if isinstance(x, tuple):
                return tuple(move(part) for part in x)
            if isinstance(x, EncoderOutput):
                return EncoderOutput(move(x.x_BSD), move(x.visible_BS))
            if isinstance(x, Tensor):
                return x.to(device, dtype if x.is_floating_point() else None)
            return x

        per_token, whole = ({name: move(x) for name, x in some.items()} for some in (self.per_token, self.whole))
        return replace(self, inputs=move(self.inputs), per_token=per_token, whole=whole)

    def _each(self, change: Any, only_inputs: bool = False) -> Example:
        per_token = self.per_token if only_inputs else {name: change(x) for name, x in self.per_token.items()}
        return replace(self, inputs=change(self.inputs), per_token=per_token)

    def run(self, network: Network, **options: Any) -> Output:
        given = self.per_token | self.whole | options
        side = {name: given.pop(name) for name in ("documents", "edges", "segments", "prefix") if name in given}
        if side:
            given["side_inputs"] = SideInputs(**side)
        output: Output = network(self.inputs, **given)
        return output


def example(value: Model, batch: int = 3, length: int = 9, seed: int = 0, source_width: int | None = None) -> Example:
    """Random inputs for a model, at most `length` tokens long."""
    random = torch.Generator().manual_seed(seed)
    limit = value.limit()
    length = min(length, (limit or length + 1) - value.class_token)
    inputs = _inputs(value.embed, grid_of(value, length), batch, length, random)
    length = _tokens(value.embed, inputs)
    patterns = list(value.body.patterns())
    per_token: dict[str, Tensor] = {}
    whole: dict[str, Any] = {}
    if any(isinstance(part, SameDocument) for part in patterns):
        per_token["documents"] = torch.randint(0, 2, (batch, length), generator=random).cumsum(1)
    if value.segments:
        per_token["segments"] = torch.randint(0, value.segments, (batch, length), generator=random)
    if any(isinstance(part, Graph) and part.edges is None for part in patterns):
        edges = torch.rand(length, length, generator=random) < 0.5
        whole["edges"] = edges | torch.eye(length, dtype=torch.bool)
    if Prefix() in patterns:
        whole["prefix"] = torch.arange(batch) % (1 + length // 2)
    if source_width is not None:
        visible = torch.ones(batch, 5, dtype=torch.bool)
        visible[0, 3:] = False
        whole["encoder_output"] = EncoderOutput(
            torch.randn(batch, 5, source_width, generator=random, dtype=torch.float64), visible
        )
    return Example(inputs, per_token, whole)


def parts(network: Network | PairNetwork) -> list[tuple[Network, int | None]]:
    """The networks inside, each with the width of the encoder output that it needs, or None."""
    if isinstance(network, PairNetwork):
        return [(network.encoder, None), (network.decoder, network.value.encoder.width)]
    crosses = "encoder_output" in network.reads
    return [(network, network.value.width if crosses else None)]


def models(value: Model | EncoderDecoder) -> list[Model]:
    """The models inside: encoder and decoder, or the model itself."""
    return [value.encoder, value.decoder] if isinstance(value, EncoderDecoder) else [value]


def _inputs(embed: Embed, grid: tuple[int, int], batch: int, length: int, random: torch.Generator) -> Any:
    if isinstance(embed, Tokens):
        return torch.randint(0, embed.vocabulary, (batch, length), generator=random)
    if isinstance(embed, Patches):
        shape = (batch, embed.channels, *(side * embed.size for side in grid))
        return torch.randn(shape, generator=random, dtype=torch.float64)
    if isinstance(embed, Features | Nodes):
        x_BTF = torch.randn(batch, length, embed.inputs, generator=random, dtype=torch.float64)
        if isinstance(embed, Nodes) and embed.kinds:
            return x_BTF, torch.randint(0, embed.kinds, (batch, length), generator=random)
        return x_BTF
    if isinstance(embed, Mixed):
        share = max(1, length // len(embed.parts))
        limits = [(position and position.limit()) or share for _, position in embed.parts]
        sizes = [min(share, limit) for limit in limits]
        return tuple(
            _inputs(part, (1, size), batch, size, random) for (part, _), size in zip(embed.parts, sizes, strict=True)
        )
    raise ValueError(f"there are no example inputs for {type(embed).__name__}; call contracts with inputs=")


def _tokens(embed: Embed, inputs: Any) -> int:
    """The number of tokens that an embedding makes of these inputs."""
    if isinstance(embed, Mixed):
        return sum(_tokens(part, x) for (part, _), x in zip(embed.parts, inputs, strict=True))
    if isinstance(embed, Patches):
        return int(inputs.shape[2] * inputs.shape[3]) // embed.size**2
    return int((inputs[0] if isinstance(inputs, tuple) else inputs).shape[1])
