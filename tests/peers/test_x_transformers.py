"""Models equal x-transformers with the same weights, for the options that both libraries have.

Not compared, because the mathematics differs:
    gate_residual (GRU gates)     x-transformers gates each sublayer with nn.GRUCell, without a bias towards the identity
    residual attention, talking heads, learned sinks, dynamic position bias, xPos: not in everyformer
    Shaw's relative positions and the image-relative bias: not in x-transformers
The copy of the weights accounts for these differences: its RMSNorm has no epsilon under the root (ours gets a negligible one); it stores
norm weights as differences from 1; its T5 bias is one table for all layers, multiplied by sqrt(E); its learned positions are divided
by sqrt(D); its gated feed-forward net gates with the second half of the projection, ours with the first.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor
from x_transformers import Decoder, Encoder, TransformerWrapper

import everyformer as ef

WIDTH, LAYERS, LENGTH, VOCABULARY = 24, 2, 21, 31


class Case(NamedTuple):
    theirs: dict[str, Any]  # arguments of AttentionLayers
    ours: dict[str, Any]  # arguments of `our_model`
    limit: float = 1e-10


FLOAT32 = (
    1e-5  # theirs computes sinusoid frequencies, and the softmax with the T5 bias, in float32 even in a float64 model
)
CASES = {
    "learned positions": Case({}, {"position": ef.Learned(LENGTH)}),
    "sinusoids": Case({}, {"position": ef.Sinusoidal("halves")}, FLOAT32),
    "post-norm": Case({"pre_norm": False}, {"residual": ef.PostNorm(ef.LayerNorm(bias=False))}),
    "alibi": Case({"alibi_pos_bias": True}, {"score_mods": (ef.Alibi(),)}),
    "alibi with 6 heads": Case({"alibi_pos_bias": True, "heads": 6}, {"heads": 6, "score_mods": (ef.Alibi(),)}),
    "rotary": Case({"rotary_pos_emb": True, "rotary_emb_dim": 8}, {"score_mods": (ef.Rotary(),)}, FLOAT32),
    "t5": Case(
        {"rel_pos_bias": True, "rel_pos_num_buckets": 10, "rel_pos_max_distance": 18, "attn_flash": False},
        {"score_mods": (ef.T5Bias(10, 18),)},
        FLOAT32,
    ),
    "rms norm": Case({"use_rmsnorm": True}, {"residual": ef.PreNorm(ef.RMSNorm(1e-30))}),
    "gelu gate": Case({"ff_glu": True}, {"feedforward": ef.FeedForward(4 * WIDTH, "gelu", gated=True)}),
    "silu gate": Case(
        {"ff_glu": True, "ff_swish": True}, {"feedforward": ef.FeedForward(4 * WIDTH, "silu", gated=True)}
    ),
    "no biases": Case({"ff_no_bias": True}, {"feedforward": ef.FeedForward(4 * WIDTH, "gelu", bias=False)}),
    "wider values": Case({"attn_value_dim_head": 10}, {"value_width": 10}),
    "window": Case({"attn_max_attend_past": 4}, {"pattern": ef.Window(5)}),
    "llama": Case(
        {"rotary_pos_emb": True, "rotary_emb_dim": 8, "use_rmsnorm": True, "ff_glu": True, "ff_swish": True},
        {
            "score_mods": (ef.Rotary(),),
            "residual": ef.PreNorm(ef.RMSNorm(1e-30)),
            "feedforward": ef.FeedForward(4 * WIDTH, "silu", gated=True),
        },
        FLOAT32,
    ),
}


def our_model(
    pattern: ef.Pattern = ef.Full(),
    heads: int = 4,
    value_width: int = 8,
    score_mods: tuple[ef.ScoreMod, ...] = (),
    feedforward: ef.FeedForward = ef.FeedForward(4 * WIDTH, "gelu"),
    residual: ef.Residual = ef.PreNorm(ef.LayerNorm(bias=False)),
    position: ef.Position | None = None,
    causal: bool = True,
    cross: bool = False,
) -> ef.Model:
    if not causal:
        score_mods = tuple(
            replace(score_mod, bidirectional=True) if isinstance(score_mod, ef.T5Bias) else score_mod
            for score_mod in score_mods
        )
    projections = ef.Standard(heads, 8, value_width, merge_bias=False)
    attention = ef.Attention(projections, pattern & ef.Causal() if causal else pattern, score_mods)
    layer = ef.Layer((attention, *((ef.CrossAttention(projections),) if cross else ()), feedforward))
    body = ef.Stack(LAYERS, (layer,), residual)
    return ef.Model(width=WIDTH, embed=ef.Tokens(VOCABULARY), position=position, body=body)


def their_model(case: Case, causal: bool = True, cross: bool = False) -> Any:
    """Returns a float64 model without output head; noise is added so that no weight is 0 or 1."""
    kind = Decoder if causal else Encoder
    options: dict[str, Any] = {"heads": 4, "attn_dim_head": 8, "attn_flash": True, "verbose": False} | case.theirs
    position = case.ours.get("position")
    torch.manual_seed(0)
    theirs = TransformerWrapper(
        num_tokens=VOCABULARY,
        max_seq_len=LENGTH,
        use_abs_pos_emb=position is not None,
        scaled_sinu_pos_emb=isinstance(position, ef.Sinusoidal),
        return_only_embed=True,
        attn_layers=kind(dim=WIDTH, depth=LAYERS, cross_attend=cross, **options),
    ).double()
    with torch.no_grad():
        for weight in theirs.parameters():
            weight.add_(0.3 * torch.randn_like(weight))
        if isinstance(position, ef.Sinusoidal):
            theirs.pos_emb.scale.fill_(1)  # a learned factor that is not in the paper
    return theirs


def our_state(theirs: Any) -> dict[str, Tensor]:
    """Returns their weights under our names. Raises AssertionError for a weight that has no counterpart."""
    state: dict[str, Tensor] = {}
    kinds = theirs.attn_layers.layer_types
    parts = {"1.to_out.weight": "heads.out.weight", "1.ff.2.weight": "out.weight", "1.ff.2.bias": "out.bias"}
    parts |= {f"1.ff.0.{name}.{kind}": f"hidden.0.{kind}" for name in ("0", "proj") for kind in ("weight", "bias")}
    for name, weight in theirs.state_dict().items():
        if match := re.fullmatch(r"attn_layers\.layers\.(\d+)\.(.+)", name):
            number, part = int(match[1]), match[2]
            layer, sublayer = f"body.layers.{number // len(set(kinds))}.", number % len(set(kinds))
            if part.startswith("0."):
                state[f"{layer}residuals.{sublayer}.norm.weight"] = weight + 1
            elif part.startswith("1.to_") and "out" not in part:  # q, k and v come in this order
                key = f"{layer}sublayers.{sublayer}.heads.qkv.weight"
                state[key] = torch.cat((state[key], weight)) if key in state else weight
            else:
                gated = part.startswith("1.ff.0.proj")  # theirs is (values, gates), ours (gates, values)
                state[f"{layer}sublayers.{sublayer}.{parts[part]}"] = (
                    torch.cat(weight.chunk(2)[::-1]) if gated else weight
                )
        elif name == "attn_layers.rel_pos.relative_attention_bias.weight":
            state |= {f"body.layers.{n}.sublayers.0.score_mods.0.bias_RH": weight * 8**0.5 for n in range(LAYERS)}
        elif name == "pos_emb.emb.weight":
            state["position.table.weight"] = weight * WIDTH**-0.5
        elif name.startswith("attn_layers.final_norm."):
            state["body.stream.norm.weight"] = weight + 1
        elif name == "token_emb.emb.weight":
            state["embed.table.weight"] = weight
        else:
            assert name in ("attn_layers.rotary_pos_emb.inv_freq", "pos_emb.scale"), name
    return state


def pair(case: Case, causal: bool = True) -> tuple[Any, ef.Network]:
    theirs = their_model(case, causal)
    ours = our_model(**case.ours, causal=causal).build().double()
    ours.load_state_dict(our_state(theirs))
    return theirs, ours


def tokens(length: int = LENGTH, seed: int = 1) -> Tensor:
    return torch.randint(VOCABULARY, (3, length), generator=torch.Generator().manual_seed(seed))


def error(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return (a - b).abs().max().item()


@pytest.mark.spec(5, 6, 13, 20, 21, 34, 55)
@pytest.mark.parametrize("kernel", ["reference", "sdpa", "blocked"])
@pytest.mark.parametrize("name", CASES)
def test_decoder_is_equal(name, kernel):
    theirs, ours = pair(CASES[name])
    output_BTD, expected_BTD = ours(tokens(), kernel=kernel).hidden, theirs(tokens())
    assert error(output_BTD, expected_BTD) < CASES[name].limit


@pytest.mark.parametrize("name", [name for name in CASES if name != "window"])  # theirs limits past keys only
def test_encoder_is_equal_with_padding(name):
    theirs, ours = pair(CASES[name], causal=False)
    seen_BT = torch.arange(LENGTH) < torch.tensor([[LENGTH], [13], [2]])
    output_BTD, expected_BTD = ours(tokens(), visible=seen_BT).hidden, theirs(tokens(), mask=seen_BT)
    assert error(output_BTD[seen_BT], expected_BTD[seen_BT]) < CASES[name].limit


@pytest.mark.spec(60)
@pytest.mark.parametrize("name", ["learned positions", "alibi", "rotary", "t5", "window"])
def test_decoding_with_our_cache_equals_their_single_pass(name):
    theirs, ours = pair(CASES[name])
    cache, outputs = ef.Cache(), []
    for part_BT in tokens().split((1, 7, 1, 1, 11), dim=1):
        output = ours(part_BT, cache=cache)
        cache = output.cache
        outputs.append(output.hidden)
    expected_BTD = theirs(tokens())
    assert error(torch.cat(outputs, dim=1), expected_BTD) < CASES[name].limit


@pytest.mark.parametrize("name", CASES)
def test_embedding_gradients_are_equal(name):
    """The gradient of the embedding depends on every layer of the model."""
    theirs, ours = pair(CASES[name])
    weight_BTD = torch.randn(3, LENGTH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    (theirs(tokens()) * weight_BTD).sum().backward()
    (ours(tokens()).hidden * weight_BTD).sum().backward()
    gradient_VD, expected_VD = ours.embed.table.weight.grad, theirs.token_emb.emb.weight.grad
    assert expected_VD.abs().max() > 0.1
    assert error(gradient_VD, expected_VD) < 10 * CASES[name].limit


@pytest.mark.spec(15, 62)
def test_encoder_decoder_is_equal():
    case = CASES["learned positions"]
    encoder, decoder = their_model(case, causal=False), their_model(case, cross=True)
    ours = ef.EncoderDecoder(
        encoder=our_model(**case.ours, causal=False), decoder=our_model(**case.ours, cross=True)
    ).build()
    ours.double().encoder.load_state_dict(our_state(encoder))
    ours.decoder.load_state_dict(our_state(decoder))
    seen_BS = torch.arange(9) < torch.tensor([[9], [4], [1]])
    source_BS, target_BT = tokens(9, seed=2), tokens(12)
    expected_BTD = decoder(target_BT, context=encoder(source_BS, mask=seen_BS), context_mask=seen_BS)
    assert error(ours(source_BS, target_BT, source_visible=seen_BS).hidden, expected_BTD) < case.limit
