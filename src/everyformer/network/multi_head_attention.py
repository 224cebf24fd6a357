"""Multi-head attention as a sublayer: self-attention (`Attention`) and attention to an encoder output (`CrossAttention`).

    y = merge(attend(q, k, v, pattern, score_mods)),   q, k, v = project(x)        Vaswani et al. 2017

How heads are projected and merged is in attention/projection.py, the attention function itself in attention/attend.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from everyformer.attention.attend import attend
from everyformer.attention.context import Context
from everyformer.attention.has_data import is_recorded
from everyformer.attention.hashing import Hash, hashing
from everyformer.attention.legal import attention_reasons, head_reasons, position_limit
from everyformer.attention.pattern import And, Full, Pattern, Visible
from everyformer.attention.projection import Projection, ProjectionModule
from everyformer.attention.score_mod import ScoreMod, ScoreModModule, narrow_pattern
from everyformer.network.cache import EncoderKV, Entry, KVCache, LayerInputs
from everyformer.network.sublayer import Execution, Sublayer, SublayerModule
from everyformer.value import Share, Size, Value


class Attention(Sublayer, Value, frozen=True):
    """Self-attention: who attends to whom (`pattern`), how strongly (`score_mods`), through which `heads`.

    `dropout` is that of the attention weights. `token_values` is the vocabulary of a table of values, one vector for each token,
    that are added to those of the heads. Example: `Attention(Standard(8), Causal() & Window(64), (Rotary(),))`.
    """

    heads: Projection
    pattern: Pattern = Full()
    score_mods: tuple[ScoreMod, ...] = ()
    dropout: Share = 0.0
    token_values: Size | None = None
    carries: ClassVar[str | None] = "key-value cache"

    def build(self, width: int) -> AttentionModule:
        return AttentionModule(width, self)

    def mixes_positions(self) -> bool:
        return True

    def attends_to_future(self) -> bool:
        return self.pattern.attends_to_future(heads=self.heads.heads)

    def patterns(self) -> tuple[Pattern, ...]:
        return (self.pattern,)

    def reads(self) -> set[str]:
        return {part.needs for part in self.pattern.walk() if part.needs} | ({"tokens"} if self.token_values else set())

    def whole_sequence_reason(self, before: int, batch: int, context: Context) -> str | None:
        if hashing(self.pattern):
            return f"in the pattern {self.pattern} later positions decide to which keys earlier queries attend"
        allowed = context.mask(self.pattern, batch, self.heads.heads)[..., :before, before:]
        return f"the pattern {self.pattern} lets cached positions attend to new ones" if bool(allowed.any()) else None

    def position_limit(self) -> int | None:
        return position_limit(self.score_mods)

    def illegal_reasons(self, width: int) -> Iterator[str]:
        yield from attention_reasons(width, self.heads, self.pattern, self.score_mods, self.dropout)


class CrossAttention(Sublayer, Value, frozen=True):
    """Attention of a decoder to the encoder output.

    `heads`, `pattern` (on positions of the decoder and the encoder) and `dropout` are as in `Attention`.
    Example: `Layer((Attention(Standard(8), Causal()), CrossAttention(Standard(8)), FeedForward(256)))`.
    """

    heads: Projection
    pattern: Pattern = Full()
    dropout: Share = 0.0
    carries: ClassVar[str | None] = "encoder keys and values"

    def build(self, width: int) -> CrossAttentionModule:
        return CrossAttentionModule(width, self)

    def reads(self) -> set[str]:
        return {"encoder_output"}

    def illegal_reasons(self, width: int) -> Iterator[str]:
        yield from head_reasons(width, self.heads, self.pattern)
        if not all(isinstance(part, Full | Visible | And) for part in self.pattern.walk()):
            yield f"the pattern {self.pattern} compares positions of two different sequences; use full in cross-attention"


class TokenValues(nn.Module):
    """v <- a v + b sqrt(E) W[t], with a table W of vectors of the width E of a head, one for each token t and head, and learned
    numbers a and b, 1/2 at first (Zhou et al. 2024; Jordan et al. 2024, value embeddings)."""

    def __init__(self, vocabulary: int, heads: ProjectionModule):
        super().__init__()
        self.width = heads.value_width
        self.table = nn.Embedding(vocabulary, getattr(heads, "key_heads", heads.heads) * self.width)
        self.mix_2 = nn.Parameter(torch.full((2,), 0.5))

    def forward(self, v_BHTE: Tensor, context: Context) -> Tensor:
        assert context.side.tokens is not None
        token_BTHE = self.table(context.side.tokens).unflatten(-1, (-1, self.width)) * math.sqrt(self.width)
        return (self.mix_2[0] * v_BHTE + self.mix_2[1] * token_BTHE.transpose(1, 2)).to(v_BHTE.dtype)


class SharedScoreMod(nn.Module):
    """Stands for the module of a shared score modification, which the depth owns."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.owned_elsewhere = (module,)  # in a tuple, so that it is not registered here


class ScoreModList(nn.ModuleList):
    """The modules of the score modifications of an attention. It has the shared ones too, but does not own them."""

    def __iter__(self) -> Iterator[nn.Module]:
        for one in self._modules.values():
            assert one is not None
            yield one.owned_elsewhere[0] if isinstance(one, SharedScoreMod) else one

    def __getitem__(self, index: Any) -> Any:
        return list(self)[index]


class AttentionModule(SublayerModule):
    """Projects the input, appends keys and values to those of the cache, attends, merges the heads."""

    updates: ClassVar[bool] = True

    def __init__(self, width: int, value: Attention):
        super().__init__()
        self.value = value
        self.heads = value.heads.build(width)
        sizes = (self.heads.heads, self.heads.key_width, self.heads.value_width)
        self.score_mods = ScoreModList(score_mod.build(*sizes) for score_mod in value.score_mods)
        self.token_values = TokenValues(value.token_values, self.heads) if value.token_values else None
        self.hash = next((Hash(part, *sizes[:2]) for part in hashing(value.pattern)), None)
        self.gathers = not value.score_mods and self.hash is None

    def share_score_mods(self, known: dict[Any, nn.Module]) -> None:
        """Takes the modules of shared score modifications from `known`, and adds those that are new to it.

        The depth owns them: a module that is registered twice is not restored by `torch.func.functional_call`.
        """
        for i, score_mod in enumerate(self.value.score_mods):
            if score_mod.shared:
                key = (score_mod, self.heads.heads, self.heads.key_width, self.heads.value_width)
                self.score_mods[i] = SharedScoreMod(known.setdefault(key, self.score_mods[i]))

    def new_entry(self, segment_memory: bool = False) -> Entry:
        # Layer inputs have no tokens; while the weights do not change, keys and values give the same outputs.
        return LayerInputs(detached=True) if segment_memory and self.token_values is None else KVCache()

    def max_distance(self) -> int | None:
        # A hashed key that is too far away to be attended to still decides whether a query is alone in its bucket.
        if self.hash is not None or is_recorded():
            return None
        return narrow_pattern(self.value.pattern, self._score_mods()).max_distance()

    def output_map(self) -> nn.Linear | None:
        return self.heads.out

    def execution(self, context: Context, entry: Entry | None) -> Execution:
        # The second computation of a reversible stack starts from a stream that is equal to rounding only: a key could fall into
        # another bucket. So the hashes of the first are kept.
        hashes: list[Tensor] = []
        return lambda x_BTD: self(x_BTD, context, entry, hashes)

    def forward(
        self, x_BTD: Tensor, context: Context, entry: Entry | None, hashes: list[Tensor] | None = None
    ) -> tuple[Tensor, Entry | None]:
        q_BHQE, k_BHTE, v_BHTE = self.heads.project(x_BTD)  # eq. M6
        new = self._hashed(KVCache((k_BHTE, self._values(v_BHTE, context))))
        transformed = isinstance(entry, KVCache) and self.caches_transformed
        if transformed:
            q_BHQE, new = self._transformed(q_BHQE, new, context)
        if isinstance(entry, LayerInputs):
            context, memory = self._from_memory(context, entry)
            keys = memory.append(new)  # eq. W11
        elif entry is None or isinstance(entry, KVCache):
            keys = new if entry is None else self._hashed(entry).append(new)
        else:
            raise ValueError(
                "the cache entry is not that of an attention: it is the cache of another model; start with Cache()"
            )
        if self.value.score_mods and any(score_mod.reads_inputs for score_mod in self._score_mods()):
            context = replace(context, side=replace(context.side, query_inputs=x_BTD))
        if self.hash is not None:
            hashes = [] if hashes is None else hashes
            if not hashes:
                hashes.append(self.hash(keys.bucket_BHKR, context))
            if context.call.probe is not None and keys.bucket_BHKR is not None:
                context.call.probe.buckets.append(keys.bucket_BHKR.mT)
            context = context.with_hashes(hashes[0])
        return self._attend(q_BHQE, keys, context, transformed), keys

    def update(self, x_BTD: Tensor, context: Context, entry: Entry | None) -> Entry:
        k_BHTE, v_BHTE = self.heads.keys_values(x_BTD)
        new = self._hashed(KVCache((k_BHTE, self._values(v_BHTE, context))))
        if isinstance(entry, KVCache) and self.caches_transformed:
            _, new = self._transformed(self.heads.query(x_BTD), new, context)
        return self._hashed(entry).append(new) if isinstance(entry, KVCache) else new

    def gather(self, x_BQD: Tensor, context: Context, entry: Entry) -> Tensor:
        assert isinstance(entry, KVCache)
        return self._attend(self.heads.query(x_BQD), entry, context)

    def _values(self, v_BHTE: Tensor, context: Context) -> Tensor:
        """The values, with those of the tokens if there are some."""
        return v_BHTE if self.token_values is None else self.token_values(v_BHTE, context)

    def _from_memory(self, context: Context, entry: LayerInputs) -> tuple[Context, KVCache]:
        """The keys and values of the segment memory, and the context without the keys that no query can attend to."""
        distance = self.max_distance()
        cropped = context if distance is None else context.crop(distance)
        memory_BMD = entry.rows(context.positions.keys - cropped.positions.keys)
        if memory_BMD is None:
            return cropped, KVCache()
        return cropped, self._hashed(KVCache(self.heads.keys_values(memory_BMD)))

    def _hashed(self, entry: KVCache) -> KVCache:
        """With the buckets of the keys, if this attention hashes and they have none yet."""
        if self.hash is None or not entry.tensors or entry.bucket_BHKR is not None:
            return entry
        return KVCache((*entry.tensors, self.hash.buckets(entry.k_BHKE)))

    @property
    def caches_transformed(self) -> bool:
        """Whether keys are cached as the score modifications transform them, so that each is transformed once."""
        return bool(self.value.score_mods) and all(
            score_mod.transforms_keys_once or type(score_mod).transform is ScoreModModule.transform
            for score_mod in self._score_mods()
        )

    def _transformed(self, q_BHQE: Tensor, new: KVCache, context: Context) -> tuple[Tensor, KVCache]:
        """The queries and the new keys as the score modifications transform them."""
        context, k_BHTE = context.of_new_keys(), new.k_BHKE
        for score_mod in self._score_mods():
            q_BHQE, k_BHTE = score_mod.transform(q_BHQE, k_BHTE, context)
        return q_BHQE, KVCache((k_BHTE, *new.tensors[1:]))

    def _score_mods(self) -> list[ScoreModModule]:
        return list(self.score_mods) if self.value.score_mods else []  # type: ignore[arg-type]

    def _attend(self, q_BHQE: Tensor, keys: KVCache, context: Context, transformed: bool = False) -> Tensor:
        output_BHQE = attend(
            q_BHQE,
            keys.k_BHKE,
            keys.v_BHKE,
            self.value.pattern,
            self._score_mods(),
            context=keys.placed(context),
            scale=self.heads.scale,
            dropout=self.value.dropout if self.training else 0.0,
            transformed=transformed,
        )
        return self.heads.merge(output_BHQE)


class CrossAttentionModule(SublayerModule):
    """Attends to the encoder output. Its keys and values are computed once and then come from the cache."""

    pointwise: ClassVar[bool] = True

    def __init__(self, width: int, value: CrossAttention):
        super().__init__()
        self.value = value
        self.heads = value.heads.build(width)

    def new_entry(self, segment_memory: bool = False) -> Entry:
        return EncoderKV()

    def output_map(self) -> nn.Linear | None:
        return self.heads.out

    def forward(self, x_BTD: Tensor, context: Context, entry: Entry | None) -> tuple[Tensor, Entry]:
        if context.encoder is None:
            raise ValueError("the model attends to an encoder output, but none is given; call it with encoder_output=")
        if entry is not None and not isinstance(entry, EncoderKV):
            raise ValueError(
                "the cache entry is not that of cross-attention: it is the cache of another model; start with Cache()"
            )
        if entry is None or not entry.tensors:
            entry = EncoderKV(self.heads.keys_values(context.encoder.x_BSD), context.encoder.x_BSD)
        k_BHSE, v_BHSE = entry.tensors
        output_BHQE = attend(
            self.heads.query(x_BTD),
            k_BHSE,
            v_BHSE,
            self.value.pattern,
            context=context.encoder.context,
            scale=self.heads.scale,
            dropout=self.value.dropout if self.training else 0.0,
        )
        if (probe := context.call.probe) is not None:
            probe.cross_weights.append(probe.weights.pop())
            del probe.products[len(probe.weights) :]
        return self.heads.merge(output_BHQE), entry
