"""Output heads: what a model predicts from its last layer z.

    Language   logits of the next token at every position, softmax(W z) (Thickstun (source T) eq. 9); W may be the embedding table
    ReplacedToken   one logit at every position: was this token replaced? (Clark et al. 2020)
    Masked     logits of the token itself, for masked language modelling (BERT): W_e LN(gelu(W z)) + b
    Classify   logits of classes, from one vector of the sequence (mean, max, last or first token)
    Regress    real numbers, y = W z + b, from the same vector
    PerToken   logits at every position
    Logistics  a mixture of logistic distributions of the next pixel's channels (Salimans et al. 2017, PixelCNN++; Parmar et al. 2018)

A mixture of K logistics for the C channels of a pixel, values scaled to -1 .. 1, h half the distance of two values:
    p(x) = sum_k pi_k prod_c P(x_c | mu_kc, s_kc),   mu_kc = m_kc + sum_{d<c} tanh(a_kcd) x_d
    P(x | mu, s) = sigma((x + h - mu) / s) - sigma((x - h - mu) / s), without the second term for the least value and with 1 for
    the first for the greatest. With a the larger and b the smaller argument this is sigma(a) sigma(-b) (1 - e^{b - a}), and
    b - a = -2 h / s: exact in the tails, where PixelCNN++ uses the density instead.

Departures: the sum of eq. 9 of source T runs to m, but the classes are o. Pooling leaves padding out; source B's includes it.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import torch
from msgspec import Meta
from torch import Tensor, nn
from torch.nn import functional as F

from everyformer.network.embed import Embed, EmbedModule, Mixed, Tokens
from everyformer.network.feedforward import Activation, activate
from everyformer.network.linear_cross_entropy import LogitMap
from everyformer.network.norm import LayerNorm
from everyformer.value import Positive, Share, Size, Value

Reading = Literal["mean", "max", "last", "first"]
PoolerActivation = Literal["tanh", "relu", "gelu"]


class OutputHead:
    """A value that builds a module `head(z_BTD, visible_BT, embed)`. A tied head uses the weights of `embed`.

    A module with the method `logit_map` of the same arguments, which returns a `LogitMap`, is trained without storing its logits.

    Example: `class Rank(OutputHead, Value, frozen=True)`.
    """

    __slots__ = ()

    @property
    def uses_table(self) -> bool:
        """Whether the embedding table is also the output map."""
        return False

    def build(self, width: int, embed: Embed) -> nn.Module:
        """Returns the module for a model of this width and embedding."""
        raise NotImplementedError


class Language(OutputHead, Value, frozen=True):
    """Predicts the next token. The model must be causal. Example: `Language(tied=False)`.

    tied         whether the embedding table is also the map to the logits; `scaled` multiplies its input by width^-0.5, as in T5
    bias         whether each logit has a bias
    vocabulary   the number of logits. Default: that of the embedding; needed if the inputs are not tokens
    soft_cap     keeps the logits z between -c and c: c tanh(z / c) (Gemma Team 2024)
    """

    tied: bool = True
    bias: bool = False
    vocabulary: Size | None = None
    scaled: bool = False
    soft_cap: Positive | None = None

    @property
    def uses_table(self) -> bool:
        return self.tied and not self.vocabulary

    def build(self, width: int, embed: Embed) -> nn.Module:
        size = self.vocabulary or vocabulary_size(embed)
        return LanguageModule(width, size, self)


class Masked(OutputHead, Value, frozen=True):
    """Predicts the masked token, as in BERT: a dense layer, GELU, a norm, then the embedding table and a bias.

    `width` is that of the dense layer: of the embedding table, if it is narrower than the model. `activation` stands in place of
    GELU, and `eps` is that of the norm. Example: `Masked(eps=1e-12)`.
    """

    eps: float = 1e-12
    width: Size | None = None
    activation: Activation = "gelu"

    @property
    def uses_table(self) -> bool:
        return True

    def build(self, width: int, embed: Embed) -> nn.Module:
        return MaskedModule(width, vocabulary_size(embed), self)


class ReplacedToken(OutputHead, Value, frozen=True):
    """Predicts whether each token was replaced (ELECTRA): w . act(W z + b) + c, one logit per token: B, T, 1; act is `activation`.

    Example: `Model(width=64, embed=Tokens(256), body=body, outputs=(ReplacedToken(),))`.
    """

    activation: Activation = "gelu"

    def build(self, width: int, embed: Embed) -> nn.Module:
        return ReplacedTokenModule(width, self.activation)


class Classify(OutputHead, Value, frozen=True):
    """Predicts one of `classes` of the sequence. Example: `Classify(10, reading="first")`.

    reading     the vector that is classified: the mean or the maximum of the tokens, or that of the first or last one
    pooler      whether BERT's dense layer comes before the logits, with `pooler_activation` (ReLU in DistilBERT, GELU in ELECTRA)
    dropout     before the logits; `bias`: whether each logit has a bias
    distilled   the logits are the mean of two maps, of the first token and of the second (DeiT: Touvron et al. 2021)
    """

    classes: Size
    reading: Reading = "mean"
    pooler: bool = False
    dropout: Share = 0.0
    pooler_activation: PoolerActivation = "tanh"
    bias: bool = True
    distilled: bool = False

    def build(self, width: int, embed: Embed) -> nn.Module:
        return ClassifyModule(width, self.classes, self)


class Regress(OutputHead, Value, frozen=True):
    """Predicts `numbers` real numbers of the sequence. Example: `Regress(numbers=2)`.

    `reading`, `pooler`, `dropout`, `pooler_activation` and `bias` are those of `Classify`.
    """

    numbers: Size = 1
    reading: Reading = "mean"
    pooler: bool = False
    dropout: Share = 0.0
    pooler_activation: PoolerActivation = "tanh"
    bias: bool = True

    def build(self, width: int, embed: Embed) -> nn.Module:
        return ClassifyModule(width, self.numbers, self)


class PerToken(OutputHead, Value, frozen=True):
    """Predicts `outputs` logits at every position. Example: `PerToken(outputs=7)`."""

    outputs: Size

    def build(self, width: int, embed: Embed) -> nn.Module:
        return PerTokenModule(width, self.outputs)


class Logistics(OutputHead, Value, frozen=True):
    """Predicts the next pixel, as a mixture of `components`: for each its weight, the means and log scales of the `channels`, and the
    coefficients by which means depend on earlier channels. A channel has `levels` values. The model must be causal.
    Example: `Logistics(channels=3, components=10)`.
    """

    channels: Size = 3
    levels: Annotated[int, Meta(ge=2, le=65536)] = 256
    components: Size = 10

    def build(self, width: int, embed: Embed) -> nn.Module:
        return PerTokenModule(width, self.components * (1 + 2 * self.channels + math.comb(self.channels, 2)))

    def log_share(self, mixture: Tensor, value_BTC: Tensor) -> Tensor:
        """Returns log p(x) of pixels with channels 0 to levels - 1: B, T. `mixture` is the output of the module: B, T, numbers."""
        weight_BTN, logistic_BTNC = self._channels(mixture, value_BTC)
        return (weight_BTN + logistic_BTNC.sum(-1)).logsumexp(-1)

    def next_logits(self, mixture: Tensor, earlier_BC: Tensor) -> Tensor:
        """Returns log p(x_c, earlier) for every value of the next channel: B, V. The softmax is p(x_c | earlier). `mixture`: B, numbers."""
        channel, later = earlier_BC.shape[1], self.channels - earlier_BC.shape[1] - 1
        value_BVC = torch.cat(
            (
                earlier_BC[:, None].expand(-1, self.levels, -1),
                torch.arange(self.levels, device=earlier_BC.device)[None, :, None].expand(len(earlier_BC), -1, -1),
                earlier_BC.new_zeros(len(earlier_BC), self.levels, later),
            ),
            dim=-1,
        )
        weight_BVN, logistic_BVNC = self._channels(mixture[:, None].expand(-1, self.levels, -1), value_BVC)
        return (weight_BVN + logistic_BVNC[..., : channel + 1].sum(-1)).logsumexp(-1)

    def _channels(self, mixture: Tensor, value_BTC: Tensor) -> tuple[Tensor, Tensor]:
        """Returns log pi_k: B, T, N, and log P(x_c | mu_kc, s_kc): B, T, N, C."""
        sizes = [1, self.channels, self.channels, math.comb(self.channels, 2)]
        weight, mean_BTNC, scale, earlier = mixture.unflatten(-1, (self.components, -1)).split(sizes, dim=-1)
        x_BTC = 2 * value_BTC.to(mean_BTNC.dtype) / (self.levels - 1) - 1
        mean, pairs = list(mean_BTNC.unbind(-1)), [(c, d) for c in range(self.channels) for d in range(c)]
        for number, (c, d) in enumerate(pairs):
            mean[c] = mean[c] + earlier[..., number].tanh() * x_BTC[:, :, None, d]
        inverse_BTNC = (-scale.clamp(min=-7.0)).exp()
        from_mean_BTNC, half = x_BTC[:, :, None] - torch.stack(mean, dim=-1), 1 / (self.levels - 1)
        above, under = (from_mean_BTNC + half) * inverse_BTNC, (from_mean_BTNC - half) * inverse_BTNC
        least, most = (value_BTC == 0)[:, :, None], (value_BTC == self.levels - 1)[:, :, None]
        inside = (-torch.expm1(-2 * half * inverse_BTNC)).log().masked_fill(least | most, 0)
        share = F.logsigmoid(above).masked_fill(most, 0) + F.logsigmoid(-under).masked_fill(least, 0) + inside
        return weight[..., 0].log_softmax(-1), share


def vocabulary_size(embed: Embed) -> int:
    """Returns the vocabulary of a token embedding. Raises ValueError if the inputs are not tokens."""
    if isinstance(embed, Tokens):
        return embed.vocabulary
    kind = "mixed tokens" if isinstance(embed, Mixed) else type(embed).__name__.lower()
    raise ValueError(
        f"a language head needs a vocabulary, but the inputs are {kind}; give Language(vocabulary=..., tied=False)"
    )


class LanguageModule(nn.Module):
    def __init__(self, width: int, vocabulary: int, value: Language):
        super().__init__()
        self.scale = width**-0.5 if value.scaled else 1.0
        self.soft_cap = value.soft_cap
        self.map = None if value.tied else nn.Linear(width, vocabulary, bias=False)
        self.bias = nn.Parameter(torch.zeros(vocabulary)) if value.bias else None

    def weight(self, embed: EmbedModule) -> Tensor:
        """The map V, D from a vector to its logits."""
        return _tied(embed) if self.map is None else self.map.weight

    def logit_map(self, z_BTD: Tensor, visible_BT: Tensor | None, embed: EmbedModule) -> LogitMap:
        z_BTD = z_BTD if self.scale == 1.0 else z_BTD * self.scale
        return LogitMap(z_BTD, self.weight(embed), self.bias, self.soft_cap)

    def forward(self, z_BTD: Tensor, visible_BT: Tensor | None, embed: EmbedModule) -> Tensor:
        return self.logit_map(z_BTD, visible_BT, embed).logits()


class MaskedModule(nn.Module):
    def __init__(self, width: int, vocabulary: int, value: Masked):
        super().__init__()
        self.activation = value.activation
        self.map = nn.Linear(width, value.width or width)
        self.norm = LayerNorm(value.eps).build(value.width or width)
        self.bias = nn.Parameter(torch.zeros(vocabulary))

    def logit_map(self, z_BTD: Tensor, visible_BT: Tensor | None, embed: EmbedModule) -> LogitMap:
        return LogitMap(self.norm(activate(self.map(z_BTD), self.activation)), _tied(embed), self.bias)

    def forward(self, z_BTD: Tensor, visible_BT: Tensor | None, embed: EmbedModule) -> Tensor:
        return self.logit_map(z_BTD, visible_BT, embed).logits()


class ReplacedTokenModule(nn.Module):
    def __init__(self, width: int, activation: Activation):
        super().__init__()
        self.activation = activation
        self.map, self.out = nn.Linear(width, width), nn.Linear(width, 1)

    def forward(self, z_BTD: Tensor, visible_BT: Tensor | None, embed: EmbedModule) -> Tensor:
        return self.out(activate(self.map(z_BTD), self.activation))


class ClassifyModule(nn.Module):
    """The module of Classify and Regress."""

    def __init__(self, width: int, outputs: int, value: Classify | Regress):
        super().__init__()
        self.reading, self.activation = value.reading, value.pooler_activation
        self.pooler = nn.Linear(width, width) if value.pooler else None
        self.dropout = nn.Dropout(value.dropout)
        self.map = nn.Linear(width, outputs, bias=value.bias)
        distilled = isinstance(value, Classify) and value.distilled
        self.distilled = nn.Linear(width, outputs, bias=value.bias) if distilled else None

    def forward(self, z_BTD: Tensor, visible_BT: Tensor | None, embed: EmbedModule) -> Tensor:
        z_BD = read(z_BTD, visible_BT, self.reading)
        if self.pooler is not None:
            z_BD = getattr(torch if self.activation == "tanh" else F, self.activation)(self.pooler(z_BD))
        logits = self.map(self.dropout(z_BD))
        if self.distilled is None:
            return logits
        return (logits + self.distilled(self.dropout(z_BTD[:, 1]))) / 2


class PerTokenModule(nn.Module):
    """The module of PerToken and Logistics."""

    def __init__(self, width: int, outputs: int):
        super().__init__()
        self.map = nn.Linear(width, outputs)

    def forward(self, z_BTD: Tensor, visible_BT: Tensor | None, embed: EmbedModule) -> Tensor:
        return self.map(z_BTD)


def read(z_BTD: Tensor, visible_BT: Tensor | None, reading: Reading) -> Tensor:
    """Returns one vector of each sequence, without padding."""
    if visible_BT is None:
        visible_BT = torch.ones(z_BTD.shape[:2], dtype=torch.bool, device=z_BTD.device)
    if reading == "mean":
        weight_BT1 = visible_BT[..., None].to(z_BTD.dtype)
        return (z_BTD * weight_BT1).sum(1) / weight_BT1.sum(1).clamp(min=1)
    if reading == "max":
        return z_BTD.masked_fill(~visible_BT[..., None], -torch.inf).amax(1)
    count_BT = visible_BT.long().cumsum(1) * visible_BT
    index_B = count_BT.argmax(1) if reading == "last" else (count_BT == 1).long().argmax(1)
    return z_BTD.gather(1, index_B.view(-1, 1, 1).expand(-1, 1, z_BTD.shape[2]))[:, 0]


def _tied(embed: EmbedModule) -> Tensor:
    table = embed.table
    assert isinstance(table, nn.Embedding)
    return table.weight
