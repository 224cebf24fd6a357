"""Paper: Jordan et al. 2024, modded-nanogpt and Muon; the parts are those of So et al. 2021 (squared ReLU), Zhang & Sennrich 2019
(RMSNorm), Su et al. 2021 (rotary), Henry et al. 2020 (norm of queries and keys), Gemma Team 2024 (soft cap of the logits), Zhou et al.
2024 (values of tokens), Pagnoni et al. 2024 (hashed n-grams).

Equations: pre-norm causal layers with RMSNorm, also on the embedded tokens; the queries and keys of each head are normed before they
are rotated; W_2 relu(W_1 x)^2; no biases. The maps that end a branch and the output map start at 0, so that the model starts as the
identity with equal logits, which are bounded: c tanh(z / c). Each attention adds a vector of each token to its values, each layer but
the first reads a sum of the stream and the embedded tokens, and the first layer begins with vectors of the last tokens.
Symbols: `hidden` the width of the nets, `soft_cap` c, `base` the base of the rotary angles.
Departures: the sizes, and tokens of its own instead of GPT-2's; no windows, no connections between halves of the stack, no gates.

A size comes with its recipe: `everyformer train speedrun --data enwik8` trains for about 15 seconds on one H200. It learns a vocabulary of
8,192 tokens first, so a step reads three times as much text as with bytes, and n-grams help no more.
"""

from __future__ import annotations

from everyformer.attention.pattern import Causal
from everyformer.attention.projection import Standard
from everyformer.attention.score_mod import Rotary
from everyformer.family.member import Member
from everyformer.network.depth import Stack
from everyformer.network.embed import Tokens
from everyformer.network.feedforward import FeedForward
from everyformer.network.initial import Normal
from everyformer.network.layer import Layer
from everyformer.network.model import Model
from everyformer.network.multi_head_attention import Attention
from everyformer.network.ngrams import Ngrams
from everyformer.network.norm import RMSNorm
from everyformer.network.output_head import Language
from everyformer.network.residual import PreNorm
from everyformer.value import Few, Positive, Share, Size


def speedrun(
    width: Size = 512, heads: Few | None = None, layers: Few = 8, hidden: Size | None = None, vocabulary: Size = 256,
    token_values: bool = True, shortcut: bool = True, ngrams: tuple[Size, ...] = (2, 3), rows: Size = 65536, features: Size = 128,
    base: Positive = 10000.0, soft_cap: Positive | None = 15.0, dropout: Share = 0.0,
) -> Model:  # fmt: skip
    norm, projection = RMSNorm(), Standard(heads or max(1, width // 128), merge_bias=False, qk_norm=RMSNorm())
    values = vocabulary if token_values else None
    attention = Attention(projection, Causal(), (Rotary(base, "halves"),), token_values=values)
    sublayers = (attention, FeedForward(hidden or 4 * width, "relu_squared", bias=False))
    first = (Ngrams(ngrams, rows, features), *sublayers) if ngrams else sublayers
    later = (Layer(sublayers, shortcut=shortcut),) * (layers - 1)
    return Model(
        width=width,
        embed=Tokens(vocabulary),
        norm=norm,
        body=Stack(layers, (Layer(first), *later), PreNorm(norm, dropout)),
        outputs=(Language(tied=False, soft_cap=soft_cap),),
        initial=Normal(0.02, zero_ends=True),
    )


MUON = (
    "optim.name=muon", "optim.schedule=linear", "optim.min_lr=0", "optim.warmup=20", "optim.weight_decay=0.01", "optim.beta2=0.95",
    "run.precision=auto", "run.evaluate=0", "run.save=0", "run.sample=false", "run.final_examples=1000000",
)  # fmt: skip
SHORT = (
    "run.steps=200",
    "run.batch=16",
    "task.context=128",
    "optim.lr=2e-2",
    "optim.muon_lr=0.02",
    "run.final_examples=2000",
)
FAST = (
    "run.steps=620",
    "run.batch=64",
    "task.context=512",
    "task.tokenizer=bpe",
    "optim.lr=8e-3",
    "optim.muon_lr=0.03",
    "run.compile=yes",
)
LONG = (
    "run.steps=20000",
    "run.batch=64",
    "task.context=1024",
    "optim.lr=2e-3",
    "optim.muon_lr=0.02",
    "run.compile=yes",
)
MEMBER = Member(
    "speedrun",
    "Jordan et al. 2024",
    idea=(
        "The parts with which a small language model learns most in a minute: squared ReLU, norms of queries and keys, branches that "
        "start at 0, bounded logits. It has a training recipe of its own, with Muon."
    ),
    make=speedrun,
    sizes={
        "tiny": {"width": 64, "heads": 2, "layers": 2, "hidden": 128, "rows": 1024, "features": 16},
        "enwik8": {"width": 512, "layers": 8, "ngrams": (), "vocabulary": 8192},
        "20m": {"width": 768, "layers": 12, "dropout": 0.1},
    },
    size="enwik8",
    paper_parameters={"enwik8": None, "20m": None},
    recipes={"tiny": (*MUON, *SHORT), "enwik8": (*MUON, *FAST), "20m": (*MUON, *LONG)},
)
