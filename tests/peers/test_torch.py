"""Models equal torch.nn's MultiheadAttention, TransformerEncoder, TransformerDecoder and Transformer with the same weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import everyformer as ef
from everyformer.attention.context import Context, EncoderContext

WIDTH, HEADS, HIDDEN, LAYERS, LIMIT = 24, 4, 40, 2, 1e-10

pytestmark = pytest.mark.filterwarnings(
    "ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning",  # raised by their fast path
    "ignore:enable_nested_tensor is True, but self.use_nested_tensor is False:UserWarning",  # it does not support pre-norm
)


def randn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def perturbed(module: Any) -> Any:
    """Returns the module in float64, with noise added so that no weight is 0 or 1."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in module.double().parameters():
            weight.add_(0.3 * torch.randn(weight.shape, dtype=torch.float64, generator=generator))
    return module


def error(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return (a - b).abs().max().item()


def visible(side: str | None, lengths: tuple[int, ...], longest: int) -> Tensor | None:
    if side is None:
        return None
    visible_BT = torch.arange(longest) < torch.tensor(lengths)[:, None]
    return visible_BT.flip(1) if side == "left" else visible_BT


def renamed(state: dict[str, Tensor], *names: tuple[str, str]) -> dict[str, Tensor]:
    renamed = {}
    for name, weight in state.items():
        for theirs, ours in (*names, ("in_proj_", "qkv."), ("out_proj.", "out.")):
            name = name.replace(theirs, ours)
        renamed[name] = weight
    return renamed


# MultiheadAttention


def attention(pattern: ef.Pattern) -> tuple[nn.MultiheadAttention, Any]:
    theirs = perturbed(nn.MultiheadAttention(WIDTH, HEADS, batch_first=True))
    ours = ef.Attention(ef.Standard(HEADS, bias=True), pattern).build(WIDTH).double()
    ours.heads.load_state_dict(renamed(theirs.state_dict()))
    return theirs, ours


# Each mask as a pattern, and as a boolean mask that is True where a key is hidden.
EDGES = [(i, j) for i in range(7) for j in range(7) if i * j % 3 != 1]
GRAPH, CAUSAL_QK = ef.Graph(tuple(EDGES)), torch.ones(7, 7, dtype=torch.bool).triu(1)
HIDDEN_QK = torch.tensor([[(i, j) not in EDGES for j in range(7)] for i in range(7)])
MASKS: dict[str, tuple[ef.Pattern, Tensor | None]] = {
    "full": (ef.Full(), None),
    "causal": (ef.Causal(), CAUSAL_QK),
    "boolean": (GRAPH, HIDDEN_QK),
    "both": (ef.Causal() & GRAPH, CAUSAL_QK | HIDDEN_QK),
}


@pytest.mark.spec(5, 6, 13, 19, 55)
@pytest.mark.parametrize("side", [None, "right"])
@pytest.mark.parametrize("kernel", ["reference", "sdpa", "blocked"])
@pytest.mark.parametrize("mask", MASKS)
def test_multihead_attention_is_equal_with_masks(mask, kernel, side):
    pattern, hidden_QK = MASKS[mask]
    theirs, ours = attention(pattern)
    x_BTD, seen_BT = randn(2, 7, WIDTH), visible(side, (7, 4), 7)
    position_BT = None if seen_BT is None else torch.arange(7).masked_fill(~seen_BT, -1)
    context = Context.of(7, 7, x_BTD.device, key_BK=position_BT, kernel=kernel)
    expected_BTD, weights_BHQK = theirs(
        x_BTD,
        x_BTD,
        x_BTD,
        attn_mask=hidden_QK,
        key_padding_mask=None if seen_BT is None else ~seen_BT,
        average_attn_weights=False,
    )
    seen_BT = torch.ones(2, 7, dtype=torch.bool) if seen_BT is None else seen_BT
    output_BTD, _ = ours(x_BTD, context, None)
    assert error(output_BTD[seen_BT], expected_BTD[seen_BT]) < LIMIT

    probe = ef.Probe()
    ours(x_BTD, Context.of(7, 7, x_BTD.device, key_BK=position_BT, probe=probe), None)
    row_BHQ = seen_BT[:, None, :].expand(-1, HEADS, -1)
    assert error(probe.weights[0][row_BHQ], weights_BHQK[row_BHQ]) < LIMIT


@pytest.mark.spec(15)
@pytest.mark.parametrize("side", [None, "left", "right"])
def test_cross_attention_is_equal(side):
    theirs, self_attention = attention(ef.Full())
    ours = ef.CrossAttention(ef.Standard(HEADS, bias=True)).build(WIDTH).double()
    ours.heads.load_state_dict(self_attention.heads.state_dict())
    x_BTD, source_BSD, seen_BS = randn(2, 4, WIDTH), randn(2, 7, WIDTH, seed=2), visible(side, (7, 3), 7)
    position_BS = None if seen_BS is None else torch.arange(7).masked_fill(~seen_BS, -1)
    probe = ef.Probe()
    context = Context.of(4, 7, x_BTD.device, query_BQ=torch.arange(4)[None], key_BK=position_BS, probe=probe)
    expected_BTD, weights_BHQK = theirs(
        x_BTD,
        source_BSD,
        source_BSD,
        key_padding_mask=None if seen_BS is None else ~seen_BS,
        average_attn_weights=False,
    )
    output_BTD, _ = ours(x_BTD, replace(context, encoder=EncoderContext(source_BSD, context)), None)
    assert error(output_BTD, expected_BTD) < LIMIT
    assert error(probe.cross_weights[0], weights_BHQK) < LIMIT


# TransformerEncoder, TransformerDecoder, Transformer


def layer_options(norm_first: bool, activation: str) -> dict[str, Any]:
    return {
        "dim_feedforward": HIDDEN,
        "dropout": 0.0,
        "activation": activation,
        "batch_first": True,
        "norm_first": norm_first,
    }


def their_stack(kind: str, norm_first: bool, activation: str) -> Any:
    norm = nn.LayerNorm(WIDTH) if norm_first else None
    options = layer_options(norm_first, activation)
    if kind == "encoder":
        return perturbed(nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, HEADS, **options), LAYERS, norm))
    return perturbed(nn.TransformerDecoder(nn.TransformerDecoderLayer(WIDTH, HEADS, **options), LAYERS, norm))


def our_model(kind: str, norm_first: bool, activation: str, pattern: ef.Pattern) -> ef.Model:
    heads = ef.Standard(HEADS, bias=True)
    cross = (ef.CrossAttention(heads),) if kind == "decoder" else ()
    layer = ef.Layer((ef.Attention(heads, pattern), *cross, ef.FeedForward(HIDDEN, activation)))
    residual = ef.PreNorm() if norm_first else ef.PostNorm()
    return ef.Model(width=WIDTH, embed=ef.Features(WIDTH), body=ef.Stack(LAYERS, (layer,), residual))


def our_state(state: dict[str, Tensor], kind: str) -> dict[str, Tensor]:
    """Their weights under our names, and an identity embedding."""
    net = 1 if kind == "encoder" else 2
    names = (
        ("norm1.", "residuals.0.norm."),
        ("norm2.", "residuals.1.norm."),
        ("norm3.", "residuals.2.norm."),
        ("self_attn.", "sublayers.0.heads."),
        ("multihead_attn.", "sublayers.1.heads."),
        ("linear1.", f"sublayers.{net}.hidden.0."),
        ("linear2.", f"sublayers.{net}.out."),
    )
    body = {
        f"body.{'stream.' if name.startswith('norm.') else ''}{name}": weight
        for name, weight in renamed(state, *names).items()
    }
    eye = torch.eye(WIDTH, dtype=torch.float64)
    return body | {"embed.map.weight": eye, "embed.map.bias": torch.zeros(WIDTH, dtype=torch.float64)}


def stacks(kind: str, norm_first: bool, activation: str, pattern: ef.Pattern) -> tuple[Any, ef.Network]:
    theirs = their_stack(kind, norm_first, activation)
    ours = our_model(kind, norm_first, activation, pattern).build().double()
    ours.load_state_dict(our_state(theirs.state_dict(), kind))
    return theirs, ours


def gradient_error(theirs: nn.Module, ours: nn.Module, kind: str) -> float:
    """Returns the largest difference between gradients of corresponding weights."""
    expected = our_state({name: weight.grad for name, weight in theirs.named_parameters()}, kind)
    gradients = {name: weight.grad for name, weight in ours.named_parameters() if not name.startswith("embed.")}
    assert gradients.keys() == {name for name in expected if not name.startswith("embed.")}
    return max(error(gradient, expected[name]) for name, gradient in gradients.items() if gradient is not None)


RESIDUALS = pytest.mark.parametrize("norm_first", [False, True], ids=["post-norm", "pre-norm"])
ACTIVATIONS = pytest.mark.parametrize("activation", ["relu", "gelu"])


@pytest.mark.spec(20, 21, 23)
@RESIDUALS
@ACTIVATIONS
@pytest.mark.parametrize(
    ("pattern", "side"), [("full", None), ("full", "left"), ("full", "right"), ("causal", "right")]
)
def test_encoder_outputs_and_gradients_are_equal(norm_first, activation, pattern, side):
    theirs, ours = stacks("encoder", norm_first, activation, ef.parse(pattern))
    x_BTD, seen_BT = randn(3, 6, WIDTH), visible(side, (6, 2, 4), 6)
    mask = CAUSAL_QK[:6, :6] if pattern == "causal" else None
    expected_BTD = theirs(x_BTD, mask=mask, src_key_padding_mask=None if seen_BT is None else ~seen_BT)
    output_BTD = ours(x_BTD, visible=seen_BT).hidden
    seen_BT = torch.ones(3, 6, dtype=torch.bool) if seen_BT is None else seen_BT
    assert error(output_BTD[seen_BT], expected_BTD[seen_BT]) < LIMIT
    expected_BTD[seen_BT].square().sum().backward()
    output_BTD[seen_BT].square().sum().backward()
    assert gradient_error(theirs, ours, "encoder") < LIMIT


@RESIDUALS
@ACTIVATIONS
def test_encoder_equals_their_fast_path_at_visible_tokens(norm_first, activation):
    """In evaluation mode their fast path skips padding."""
    theirs, ours = stacks("encoder", norm_first, activation, ef.Full())
    x_BTD, seen_BT = randn(3, 6, WIDTH), visible("right", (6, 2, 4), 6)
    assert seen_BT is not None
    with torch.inference_mode():
        expected_BTD = theirs.eval()(x_BTD, src_key_padding_mask=~seen_BT)
        output_BTD = ours.eval()(x_BTD, visible=seen_BT).hidden
    assert error(output_BTD[seen_BT], expected_BTD[seen_BT]) < LIMIT


@pytest.mark.spec(15, 20, 21, 62)
@RESIDUALS
@ACTIVATIONS
@pytest.mark.parametrize("side", [None, "left", "right"])
def test_decoder_outputs_and_gradients_are_equal(norm_first, activation, side):
    """The encoder output is padded on either side, the target on the right."""
    theirs, ours = stacks("decoder", norm_first, activation, ef.Causal())
    x_BTD, source_BSD = randn(3, 6, WIDTH), randn(3, 5, WIDTH, seed=2)
    seen_BS, seen_BT = visible(side, (5, 3, 1), 5), visible(side and "right", (4, 6, 2), 6)
    expected_BTD = theirs(
        x_BTD,
        source_BSD,
        tgt_mask=CAUSAL_QK[:6, :6],
        tgt_key_padding_mask=None if seen_BT is None else ~seen_BT,
        memory_key_padding_mask=None if seen_BS is None else ~seen_BS,
    )
    output_BTD = ours(x_BTD, visible=seen_BT, encoder_output=ef.EncoderOutput(source_BSD, seen_BS)).hidden
    seen_BT = torch.ones(3, 6, dtype=torch.bool) if seen_BT is None else seen_BT
    assert error(output_BTD[seen_BT], expected_BTD[seen_BT]) < LIMIT
    expected_BTD[seen_BT].square().sum().backward()
    output_BTD[seen_BT].square().sum().backward()
    assert gradient_error(theirs, ours, "decoder") < LIMIT


@pytest.mark.spec(15, 21, 60, 62)
@ACTIVATIONS
def test_encoder_decoder_is_equal_in_one_pass_and_with_a_cache(activation):
    theirs = perturbed(
        nn.Transformer(WIDTH, HEADS, LAYERS, LAYERS, **layer_options(norm_first=True, activation=activation))
    )
    ours = ef.EncoderDecoder(
        encoder=our_model("encoder", True, activation, ef.Full()),
        decoder=our_model("decoder", True, activation, ef.Causal()),
    ).build()
    ours.double().encoder.load_state_dict(our_state(theirs.encoder.state_dict(), "encoder"))
    ours.decoder.load_state_dict(our_state(theirs.decoder.state_dict(), "decoder"))
    source_BSD, target_BTD, seen_BS = randn(3, 5, WIDTH), randn(3, 6, WIDTH, seed=2), visible("right", (5, 3, 1), 5)
    assert seen_BS is not None
    expected_BTD = theirs(
        source_BSD,
        target_BTD,
        tgt_mask=CAUSAL_QK[:6, :6],
        src_key_padding_mask=~seen_BS,
        memory_key_padding_mask=~seen_BS,
    )
    assert error(ours(source_BSD, target_BTD, source_visible=seen_BS).hidden, expected_BTD) < LIMIT

    memory, cache, outputs = ours.encode(source_BSD, visible=seen_BS), ef.Cache(), []
    for step in range(6):
        output = ours.decode(target_BTD[:, step : step + 1], memory, cache=cache)
        cache = output.cache or cache
        outputs.append(output.hidden)
    assert error(torch.cat(outputs, dim=1), expected_BTD) < LIMIT
