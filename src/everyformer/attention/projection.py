"""Multi-head attention's projections: how tokens become queries, keys and values, and how the outputs of the heads are merged.

Papers: Vaswani et al. 2017; Kitaev et al. 2020 (shared); Shazeer 2019, Ainslie et al. 2023 (grouped); Henry et al. 2020, Dehghani et
al. 2023 (norm of queries and keys). Sources: Thickstun (source T) eq. 1-3; Bloem 2019 (source B: wide, sliced);
Katsaros (source K) eq. 3-6 (symmetric, asymmetric, sum form).

Equations (rows are tokens; Katsaros (source K) writes columns, the transpose of everything here) and numbers of parameters:
    parameter-free   y_i = sum_j softmax_j(x_i . x_j) x_j                                    no parameters, no scale
    symmetric        A ~ exp(x_i U^T U x_j / sqrt(r)), values x                              r D
    asymmetric       A ~ exp((U_q x_i) . (U_k x_j) / sqrt(r)), values x                      2 r D
    standard         concat_h(softmax(Q_h K_h^T / sqrt(E)) V_h) W_O, E = D / H               4 D^2 (+ D)
    wide             the same with E = D                                                     4 H D^2 (+ D)
    shared           standard with K_h = Q_h / |Q_h| row by row, and no 1 / sqrt(E)          3 D^2 (+ D)
    sliced           head h has only slice h of the input, and its own E x E matrices        3 D^2/H + D^2 (+ D)
    narrow           one E x E triple for all slices, no W_O (pbloem/former)                 3 (D/H)^2
    sum form         sum_h V_h X A_h, V_h of D x D; of rank r it is values and W_O           2 H E D + H D^2
    grouped          standard, head h with the keys and values of h // (H / G), G of them    (2 H + 2 G) E D (+ D)

Symbols: D width, H heads, E head width (d_k, k or K in the sources), r rank, G key heads (one: multi-query).
`qk_norm` norms the queries and keys of every head over their E numbers, before anything depends on positions: q <- norm_q(q),
k <- norm_k(k), with a weight for all heads. Keys are cached with their norm.
Departures: Katsaros (source K) scales by sqrt(D) where the projected width sqrt(r) is meant; Weng 2020 (source W) scales narrow
heads by sqrt(d_k) where sqrt(d_k/h) is meant; the report (source M) stacks heads vertically where they are concatenated. The
equation 3 that is missing in source T is the merge of the standard form, sum_h W_{c,h}^T sum_j alpha_ij V_h(x_j).
"""

from __future__ import annotations

from math import isqrt
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from everyformer.attention.norm import Norm
from everyformer.value import Few, Positive, Size, Value

Keys = Literal["own", "queries", "unit_queries"]  # keys of their own; the queries; the queries divided by their lengths


class Projection:
    """A form of multi-head attention: a value that builds the module with its projections.

    Example: `class Twin(Projection, Value, frozen=True)`.
    """

    __slots__ = ()
    heads: int

    def build(self, width: int) -> ProjectionModule:
        """Returns the module for a model of this width."""
        raise NotImplementedError


class ProjectionModule(nn.Module):
    """Projects x_BTD to q, k (B, H, T, E) and v (B, H, T, E'), and merges outputs B, H, T, E' to B, T, D.

    Keys and values may have fewer heads, of which H is a multiple.
    """

    heads: int
    key_width: int
    value_width: int
    scale: float
    out: nn.Linear | None

    def project(self, x_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries, keys and values of one sequence."""
        return (self.query(x_BTD), *self.keys_values(x_BTD))

    def query(self, x_BTD: Tensor) -> Tensor:
        raise NotImplementedError

    def keys_values(self, x_BSD: Tensor) -> tuple[Tensor, Tensor]:
        """Returns keys and values, of the same sequence or of another one (cross-attention)."""
        raise NotImplementedError

    def merge(self, y_BHTE: Tensor) -> Tensor:
        y_BTD = y_BHTE.transpose(1, 2).flatten(2)
        return y_BTD if self.out is None else self.out(y_BTD)  # eq. T3, M6a, W3

    def _heads(self, x_BTF: Tensor, heads: int | None = None) -> Tensor:
        heads = heads or self.heads
        return x_BTF.view(*x_BTF.shape[:2], heads, x_BTF.shape[2] // heads).transpose(1, 2)


class Standard(Projection, Value, frozen=True):
    """Each head projects the full vector. Example: `Attention(Standard(8), Causal())`.

    heads       the number of heads; `key_width` and `value_width` are their widths. Default: D / H
    bias        whether the maps to queries, keys and values have biases, `merge_bias` whether the map that merges the heads has
    key_heads   fewer heads of keys and values, the only ones in a cache: grouped-query attention, or multi-query attention with
                one (Ainslie et al. 2023)
    qk_norm     a norm of the queries and keys of each head
    scale       the factor of their product. Default: 1 / sqrt(head width)
    Example: `Attention(Standard(8, key_heads=2, qk_norm=RMSNorm()), Causal(), (Rotary(),))`.
    """

    heads: Few
    key_width: Size | None = None
    value_width: Size | None = None
    bias: bool = False
    merge_bias: bool = True
    key_heads: Few | None = None
    qk_norm: Norm | None = None
    scale: Positive | None = None

    def build(self, width: int) -> ProjectionModule:
        share = None if self.key_width and self.value_width else head_width(width, self.heads)
        return LinearProjectionModule(
            width,
            self.heads,
            self.key_width or share,
            self.value_width or share,
            bias=self.bias,
            merge_bias=self.merge_bias,
            key_heads=self.key_heads,
            qk_norm=self.qk_norm,
            scale=self.scale,
        )


class Shared(Projection, Value, frozen=True):
    """Reformer's form (Kitaev et al. 2020): query and key are one projection, keys are normalized to length 1, and there is no scale.

    `heads`, `key_width`, `value_width`, `bias` and `merge_bias` are those of `Standard`.
    Example: `Attention(Shared(8), Hashed(2, 8, 16))`.
    """

    heads: Few
    key_width: Size | None = None
    value_width: Size | None = None
    bias: bool = False
    merge_bias: bool = False

    def build(self, width: int) -> ProjectionModule:
        share = None if self.key_width and self.value_width else head_width(width, self.heads)
        sizes = (self.key_width or share, self.value_width or share)
        return LinearProjectionModule(
            width, self.heads, *sizes, bias=self.bias, merge_bias=self.merge_bias, keys="unit_queries"
        )


class Wide(Projection, Value, frozen=True):
    """Each of the `heads` is as wide as the model (the code of Bloem 2019, source B). Example: `Attention(Wide(8))`."""

    heads: Few

    def build(self, width: int) -> ProjectionModule:
        return LinearProjectionModule(width, self.heads, width, width)


class Sum(Projection, Value, frozen=True):  # eq. K4
    """The sum form of Katsaros (source K): Y = sum_h V_h X A_h over the `heads`. `rank` is that of V_h. Default: full D x D matrices.

    Example: `Attention(Sum(8, rank=16))`.
    """

    heads: Few
    rank: Size | None = None

    def build(self, width: int) -> ProjectionModule:
        return LinearProjectionModule(width, self.heads, head_width(width, self.heads), self.rank, merge_bias=False)


class ParameterFree(Projection, Value, frozen=True):  # eq. B2, K2a
    """Basic self-attention: queries, keys and values are the tokens themselves. Example: `Attention(ParameterFree())`."""

    @property
    def heads(self) -> int:  # type: ignore[override]
        """One head."""
        return 1

    def build(self, width: int) -> ProjectionModule:
        return LinearProjectionModule(width, 1, None, None, merge_bias=None)


class Symmetric(Projection, Value, frozen=True):  # eq. K2b, K2c
    """Query and key are the same projection U x of width `rank`; the values are the tokens. Example: `Attention(Symmetric(rank=16))`."""

    rank: Size

    @property
    def heads(self) -> int:  # type: ignore[override]
        """One head."""
        return 1

    def build(self, width: int) -> ProjectionModule:
        return LinearProjectionModule(width, 1, self.rank, None, merge_bias=None, keys="queries")


class Asymmetric(Projection, Value, frozen=True):  # eq. K3
    """Query U_q x and key U_k x of width `rank`; the values are the tokens. Example: `Attention(Asymmetric(rank=16))`."""

    rank: Size

    @property
    def heads(self) -> int:  # type: ignore[override]
        """One head."""
        return 1

    def build(self, width: int) -> ProjectionModule:
        return LinearProjectionModule(width, 1, self.rank, None, merge_bias=None)


class Sliced(Projection, Value, frozen=True):
    """The efficient form of Bloem 2019 (source B): each of the `heads` projects its slice of the input, by its own E x E matrices.

    Example: `Attention(Sliced(8))`.
    """

    heads: Few

    def build(self, width: int) -> ProjectionModule:
        return SlicedModule(width, self.heads, share=False, merge=True)


class Narrow(Projection, Value, frozen=True):
    """The narrow form of pbloem/former: the same E x E matrices for the slices of all `heads`, and no output projection.

    Example: `Attention(Narrow(8))`.
    """

    heads: Few

    def build(self, width: int) -> ProjectionModule:
        return SlicedModule(width, self.heads, share=True, merge=False)


def head_width(width: int, heads: int) -> int:
    """Returns width / heads. Raises ValueError if it is not whole."""
    if width % heads:
        small = [n for n in range(1, isqrt(width) + 1) if width % n == 0]
        divisor = min((*small, *(width // n for n in small)), key=lambda n: (abs(n - heads), n))
        multiple = max(1, round(width / heads)) * heads
        raise ValueError(
            f"a width of {width} does not divide into {heads} heads; take for example heads={divisor}, or a width of {multiple}"
        )
    return width // heads


def few_key_heads(heads: int, key_heads: int) -> str:
    """Why heads cannot share these key heads equally, with a remedy."""
    divisors = [n for n in range(1, heads + 1) if heads % n == 0]
    near = min(divisors, key=lambda n: (abs(n - key_heads), n))
    return f"heads={heads} cannot share key_heads={key_heads} equally; take a divisor, for example key_heads={near}"


class LinearProjectionModule(ProjectionModule):
    """One linear map to queries, keys and values; a width of None means the tokens themselves.

    With a `merge_bias` of None the heads are not mapped back to the width of the model.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        key_width: int | None,
        value_width: int | None,
        *,
        bias: bool = False,
        merge_bias: bool | None = True,
        keys: Keys = "own",
        key_heads: int | None = None,
        qk_norm: Norm | None = None,
        scale: float | None = None,
    ):
        super().__init__()
        self.heads, self.key_heads = heads, key_heads or heads
        if heads % self.key_heads:
            raise ValueError(few_key_heads(heads, self.key_heads))
        self.key_width, self.value_width = key_width or width, value_width or width
        self.share_keys, self.unit_keys = keys != "own", keys == "unit_queries"
        self.scale = scale or (self.key_width**-0.5 if key_width and not self.unit_keys else 1.0)
        self.queries = heads * key_width if key_width else 0
        self.keys = 0 if self.share_keys or not key_width else self.key_heads * key_width
        self.values = self.key_heads * value_width if value_width else 0
        total = self.queries + self.keys + self.values
        self.qkv = nn.Linear(width, total, bias=bias) if total else None
        self.q_norm = qk_norm.build(self.key_width) if qk_norm else None
        self.k_norm = qk_norm.build(self.key_width) if qk_norm else None
        self.out = nn.Linear(heads * self.value_width, width, bias=merge_bias) if merge_bias is not None else None

    def project(self, x_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.keys and self.values:
            assert self.qkv is not None
            q, k, v = self.qkv(x_BTD).split((self.queries, self.keys, self.values), dim=-1)  # eq. T1, M2a, B4, K6
            return self._normed_query(q), self._normed_key(k), self._heads(v, self.key_heads)
        if self.share_keys and self.values:
            assert self.qkv is not None
            q, v = self.qkv(x_BTD).split((self.queries, self.values), dim=-1)
            return self._heads(q), self._unit(self._heads(q)), self._heads(v)
        return super().project(x_BTD)

    def query(self, x_BTD: Tensor) -> Tensor:
        return self._normed_query(self._map(x_BTD, 0, self.queries) if self.queries else x_BTD)

    def keys_values(self, x_BSD: Tensor) -> tuple[Tensor, Tensor]:
        start = self.queries + self.keys
        if self.keys and self.values:
            k, v = self._map(x_BSD, self.queries, start + self.values).split((self.keys, self.values), dim=-1)
            return self._normed_key(k), self._heads(v, self.key_heads)
        k = self._map(x_BSD, start - self.queries, start) if self.queries else x_BSD
        v_BHSD = x_BSD[:, None].expand(-1, self.heads, -1, -1)
        v_BHSE = self._heads(self._map(x_BSD, start, start + self.values)) if self.values else v_BHSD
        return self._unit(self._heads(k)), v_BHSE

    def _normed_query(self, q_BTF: Tensor) -> Tensor:
        q_BHTE = self._heads(q_BTF)
        return q_BHTE if self.q_norm is None else self.q_norm(q_BHTE).to(q_BHTE.dtype)  # autocast may widen a norm

    def _normed_key(self, k_BTF: Tensor) -> Tensor:
        k_BHTE = self._heads(k_BTF, self.key_heads)
        return k_BHTE if self.k_norm is None else self.k_norm(k_BHTE).to(k_BHTE.dtype)

    def _unit(self, k_BHTE: Tensor) -> Tensor:  # eq. W27
        if not self.unit_keys:
            return k_BHTE
        return F.normalize(k_BHTE, dim=-1).to(k_BHTE.dtype)  # CUDA's autocast computes a norm in float32

    def _map(self, x_BTD: Tensor, start: int, end: int) -> Tensor:
        assert self.qkv is not None
        bias = self.qkv.bias[start:end] if self.qkv.bias is not None else None
        return F.linear(x_BTD, self.qkv.weight[start:end], bias)


class SlicedModule(ProjectionModule):
    """Each head projects its own slice of the input; the matrices are per head or shared by all heads."""

    def __init__(self, width: int, heads: int, *, share: bool, merge: bool):
        super().__init__()
        size = head_width(width, heads)
        self.heads, self.key_width, self.value_width, self.scale = heads, size, size, size**-0.5
        self.qkv_3HEE = nn.Parameter(
            torch.empty(3, 1 if share else heads, size, size).uniform_(-(size**-0.5), size**-0.5)
        )
        self.out = nn.Linear(width, width) if merge else None

    def query(self, x_BTD: Tensor) -> Tensor:
        return self._heads(x_BTD) @ self.qkv_3HEE[0]

    def keys_values(self, x_BSD: Tensor) -> tuple[Tensor, Tensor]:
        slice_BHSE = self._heads(x_BSD)
        return slice_BHSE @ self.qkv_3HEE[1], slice_BHSE @ self.qkv_3HEE[2]
