"""Whole models: the causal mask, one forward for all conditionals, pairs, sets, graphs, segments and initialization."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from everyformer import (
    Causal,
    Classify,
    CrossAttention,
    EncoderDecoder,
    EncoderOutput,
    FanIn,
    Features,
    FeedForward,
    Graph,
    Language,
    LayerNorm,
    Learned,
    Lstm,
    Model,
    Nodes,
    Normal,
    PerToken,
    PostNorm,
    PreNorm,
    Probe,
    Rotary,
    ScoreMod,
    ScoreModModule,
    Shared,
    SideInputs,
    Sinusoidal,
    Standard,
    Tokens,
    Xavier,
)
from everyformer.value import Value
from tests.network import close, model, placed, randn, ready, stack, tokens
from tests.spec import network as spec


def changed(x: Tensor, place: int) -> Tensor:
    """The same tokens but one."""
    other = x.clone()
    other[:, place] = (x[:, place] + 1) % 17
    return other


def test_a_probe_has_the_buckets_of_every_head_and_round():
    """Keys of equal tokens without positions are equal, and share a bucket in every round."""
    network, probe = ready(model("hashed(3, 8, 2)", form=Standard(2), layers=1)), Probe()
    network(x_BT := tokens(2, 12), probe=probe)
    (bucket_BHRK,) = probe.buckets
    assert bucket_BHRK.shape == (2, 2, 3, 12) and set(bucket_BHRK.flatten().tolist()) <= set(range(8))
    together_BHRKK = bucket_BHRK[..., None] == bucket_BHRK[..., None, :]
    same_BKK = x_BT[:, :, None] == x_BT[:, None]
    assert together_BHRKK[same_BKK[:, None, None].expand_as(together_BHRKK)].all() and not together_BHRKK.all()


# Causality


@pytest.mark.spec(55)
def test_the_causal_pattern_is_minus_infinity_above_the_diagonal():
    """B adds -inf before the softmax over rows; in K's convention, the transpose, what is kept is upper triangular."""
    network, x = ready(model("causal", form=Standard(2, bias=True), residual=PostNorm(), layers=1)), tokens()
    network(x, probe=(probe := Probe()))
    q_BHQE, k_BHKE, _ = network.body.layers[0].sublayers[0].heads.project(network.embed.table.weight[x])
    for b in range(2):
        for h in range(2):
            score = q_BHQE[b, h] @ k_BHKE[b, h].T / math.sqrt(4)
            close(probe.weights[0][b, h], spec.masked_weights(score))
            close(probe.weights[0][b, h].T, spec.masked_columns(score.T))
    assert torch.equal(Causal().mask(6)[0], torch.ones(6, 6).tril().bool())
    assert torch.equal(Causal().mask(6)[0].T, torch.ones(6, 6).triu().bool())


CAUSAL = ["causal", "causal & window(3)", "causal & (window(2) | stride(3))", "by_head(causal, causal & block(4))"]


@pytest.mark.spec(60)
@pytest.mark.parametrize("pattern", CAUSAL)
@pytest.mark.parametrize("position", [None, Learned(9), Sinusoidal()])
def test_later_tokens_do_not_change_earlier_outputs(pattern, position):
    """K: X^(n) = X^(n+1)[:, :n]. A model that looks ahead has no such thing."""
    network, free, x = ready(model(pattern, position=position)), ready(model("full", position=position)), tokens()
    for n in range(1, 6):
        close(network(x[:, :n]).hidden, network(x[:, : n + 1]).hidden[:, :n])
        assert (free(x[:, :n]).hidden - free(x[:, : n + 1]).hidden[:, :n]).abs().max() > 1e-3


@pytest.mark.spec(54, 60)
def test_one_forward_gives_all_conditional_probabilities():
    network, x = ready(model(outputs=(Language(),))), tokens()
    at_once = network(x).logits.log_softmax(-1)
    for n in range(1, 6):
        for b in range(2):
            alone = spec.softmax(network(x[b : b + 1, :n]).logits[0, -1])
            close(at_once[b, n - 1, x[b, n]], alone[x[b, n]].log())


# Encoder and decoder


def pair(**more: Any) -> Any:
    decoder = model("causal", cross=CrossAttention(Standard(2)), position=Sinusoidal(), outputs=(Language(),))
    return ready(EncoderDecoder(encoder=model("full", position=Sinusoidal()), decoder=decoder, **more))


@pytest.mark.spec(15, 62)
def test_the_encoder_output_is_a_sequence_and_the_decoder_sees_the_target_so_far():
    network, source, target = pair(), tokens(length=4), tokens(length=6, seed=1)
    memory = network.encode(source)
    assert memory.x_BSD.shape == (2, 4, 8)  # one vector for each token of the source, not one for all
    before = network.decode(target, memory).hidden
    close(network(source, target).hidden, before)
    for t in range(6):  # the target from t on is not seen before t
        moved = (network.decode(changed(target, t), memory).hidden - before).abs().amax(-1)
        assert (moved[:, :t] == 0).all() and (moved[:, t:] > 0).all()
    for s in range(4):  # every token of the source is seen by all, each through its own place in the memory
        moved = (network(changed(source, s), target).hidden - before).abs().amax(-1)
        assert (moved > 0).all()
        x_BSD = memory.x_BSD.clone()
        x_BSD[:, s] += 1
        assert ((network.decode(target, EncoderOutput(x_BSD)).hidden - before).abs().amax(-1) > 0).all()


@pytest.mark.spec(15, 62)
def test_padding_of_the_source_changes_nothing():
    network, source, target = pair(), tokens(length=5), tokens(length=3, seed=1)
    seen_BS = torch.tensor([[True, True, True, False, False], [False, True, True, True, True]])
    found = network(source, target, source_visible=seen_BS).logits
    for row in range(2):
        close(found[row : row + 1], network(source[row : row + 1, seen_BS[row]], target[row : row + 1]).logits)


@pytest.mark.spec(62)
def test_a_shared_embedding_is_one_tensor_for_source_target_and_output():
    shared, own = pair(share_embedding=True), pair()
    assert shared.encoder.embed.table.weight is shared.decoder.embed.table.weight
    count = [sum(p.numel() for p in network.parameters()) for network in (own, shared)]
    assert count[0] - count[1] == 17 * 8
    output = shared(tokens(), tokens(seed=1))
    close(output.logits, output.hidden @ shared.encoder.embed.table.weight.T)


# Sets and graphs


@pytest.mark.spec(2, 64)
@pytest.mark.parametrize("reading", ["mean", "max"])
def test_a_set_has_no_order(reading):
    """Without positions the tokens move with their order, and what is pooled from them does not move at all."""
    heads = (Classify(3, reading), PerToken(2))
    network, x = ready(model("full", embed=Features(5), outputs=heads)), randn(2, 7, 5)
    order = torch.randperm(7, generator=torch.Generator().manual_seed(0))
    one, two = network(x), network(x[:, order])
    close(one.hidden[:, order], two.hidden)
    close(one.logits[0], two.logits[0])
    close(one.logits[1][:, order], two.logits[1])
    placed_ = ready(model("full", embed=Features(5), outputs=heads, position=Sinusoidal()))
    assert (placed_(x).logits[0] - placed_(x[:, order]).logits[0]).abs().max() > 1e-3


EDGES = {(0, 1), (1, 2), (2, 3), (3, 3), (4, 0), (5, 4), (2, 5), (6, 6)}


def table(edges: set[tuple[int, int]]) -> Tensor:
    seen_NN = torch.zeros(7, 7, dtype=torch.bool)
    for i, j in edges:
        seen_NN[i, j] = True
    return seen_NN


@pytest.mark.spec(7, 71, 72)
@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("given", ["value", "call"])
def test_a_change_travels_one_edge_per_layer(layers, given):
    """A change of node j reaches those from which a path of at most `layers` edges leads to j, the others by exactly 0."""
    pattern = Graph(tuple(sorted(EDGES))) if given == "value" else Graph()
    options = {} if given == "value" else {"side_inputs": SideInputs(edges=table(EDGES))}
    network, x = ready(model(pattern, embed=Nodes(5), layers=layers)), randn(2, 7, 5)
    before = network(x, **options).hidden
    for node in range(7):
        other = x.clone()
        other[:, node] += 1
        moved = (network(other, **options).hidden - before).abs().amax(-1) > 0
        assert moved.tolist() == [[i in spec.reachable_nodes(node, EDGES, layers) for i in range(7)]] * 2


@pytest.mark.spec(71, 72)
def test_edges_of_the_value_the_call_and_the_batch_agree():
    other = {(j, i) for i, j in EDGES} | {(0, 6)}
    x = randn(2, 7, 5)
    called, fixed = (
        ready(model(pattern, embed=Nodes(5), position=Learned(7))) for pattern in (Graph(), Graph(tuple(sorted(EDGES))))
    )
    wanted = fixed(x).hidden
    close(called(x, side_inputs=SideInputs(edges=table(EDGES))).hidden, wanted)
    close(called(x, side_inputs=SideInputs(edges=table(EDGES).expand(2, 7, 7))).hidden, wanted)
    mixed = called(x, side_inputs=SideInputs(edges=torch.stack((table(EDGES), table(other))))).hidden
    close(mixed[0], wanted[0])
    close(mixed[1], called(x[1:], side_inputs=SideInputs(edges=table(other))).hidden[0])
    assert (mixed[1] - wanted[1]).abs().max() > 1e-3


@pytest.mark.spec(72)
def test_packed_documents_equal_each_document_alone():
    network, x = ready(model("causal & same_document", score_mods=(Rotary(),))), tokens(length=9)
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2], [5, 5, 3, 3, 3, 3, 3, 3, 3]])
    found = network(x, side_inputs=SideInputs(documents=documents)).hidden
    for b in range(2):
        for document in documents[b].unique():
            here = documents[b] == document
            alone = network(x[b : b + 1, here], side_inputs=SideInputs(documents=documents[b : b + 1, here])).hidden
            close(found[b : b + 1, here], alone)


# Marks, costs, beginnings


def test_segments_and_positions_are_added_then_normed():
    network = ready(model("full", position=Learned(9), segments=2, norm=LayerNorm(1e-3)))
    x, segments = tokens(), torch.tensor([[0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 1]])
    for given in (segments, None):  # none given are all of the first kind
        kinds = segments * 0 if given is None else given
        for b, row in enumerate(placed(network, x, side_inputs=SideInputs(segments=given))):
            for i, found in enumerate(row):
                token, kind = network.embed.table.weight[x[b, i]], network.segments.weight[kinds[b, i]]
                summed = token + kind + network.position.table.weight[i]
                close(found, spec.layer_norm(summed, network.norm.weight, network.norm.bias, 1e-3))


class Costly(ScoreMod, Value, frozen=True):
    def build(self, heads: int, key_width: int, value_width: int) -> ScoreModModule:
        return CostlyRule()


class CostlyRule(ScoreModModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))

    def penalty(self, context) -> Tensor:
        return 3 * self.weight


def test_the_penalties_of_all_layers_are_summed():
    network = model(score_mods=(Costly(), Costly()), layers=4).build()
    cost = network(tokens()).aux["penalty"]
    assert cost == 4 * 2 * 3
    cost.backward()
    assert network.body.layers[0].sublayers[0].score_mods[0].weight.grad == 3
    assert model().build()(tokens()).aux == {}


@pytest.mark.spec(110)
def test_maps_are_initialized_by_the_number_of_their_inputs():
    """Child et al. 2019: 0.125 / sqrt(d_in), and sqrt(2N) smaller at the end of a branch; tables 0.125 / sqrt(d)."""
    torch.manual_seed(0)
    net, initial = FeedForward(256), Normal(0.125, by_depth=True, by_width=True)
    network = model(width=64, embed=Tokens(999), layers=8, net=net, initial=initial).build()
    layer = network.body.layers[3]
    ends = (2 * 8) ** 0.5
    for weight, std in (
        (network.embed.table.weight, 0.125 / 64**0.5),
        (layer.sublayers[0].heads.qkv.weight, 0.125 / 64**0.5),
        (layer.sublayers[0].heads.out.weight, 0.125 / 64**0.5 / ends),
        (layer.sublayers[-1].hidden[0].weight, 0.125 / 64**0.5),
        (layer.sublayers[-1].out.weight, 0.125 / 256**0.5 / ends),
    ):
        assert abs(weight.std() / std - 1) < 0.05


def test_maps_that_end_a_branch_are_initialized_smaller_by_the_root_of_their_number():
    torch.manual_seed(0)
    network = model(width=64, embed=Tokens(999), layers=8, initial=Normal(0.1, by_depth=True, reference=None)).build()
    for layer in network.body.layers:
        assert abs(layer.sublayers[0].heads.qkv.weight.std() / 0.1 - 1) < 0.05
        assert abs(layer.sublayers[0].heads.out.weight.std() / (0.1 / 16**0.5) - 1) < 0.05
        assert (layer.sublayers[0].heads.out.bias == 0).all()
        assert (layer.sublayers[-1].out.weight.std() / (0.1 / 16**0.5) - 1).abs() < 0.15  # 64 x 12 numbers
    assert abs(network.embed.table.weight.std() / 0.1 - 1) < 0.05


def test_narrow_models_have_weights_of_a_larger_std():
    """0.02 from the width of the published models on, sqrt(768 / width) times that below: the sums over inputs are equally large."""
    torch.manual_seed(0)
    for width, reference, std in ((64, 768, 0.02 * 12**0.5), (64, None, 0.02), (64, 256, 0.04), (64, 16, 0.02)):
        initial = Normal(by_depth=True, reference=reference)
        network = model(width=width, embed=Tokens(999), layers=2, initial=initial).build()
        heads = network.body.layers[0].sublayers[0].heads
        assert abs(network.embed.table.weight.std() / std - 1) < 0.05
        assert abs(heads.qkv.weight.std() / std - 1) < 0.05
        assert abs(heads.out.weight.std() / (std / 4**0.5) - 1) < 0.05
    assert [Normal().std_of(width) for width in (768, 1600)] == [0.02, 0.02]
    assert Normal(by_width=True).std_of(64) == 0.02


def test_branches_that_end_with_zeros_leave_the_stream_as_it_is():
    """With `zero_ends` a new model is its embedding and its final norm, and all tokens are equally likely."""
    torch.manual_seed(0)
    network = model(
        width=64, layers=4, residual=PreNorm(), outputs=(Language(tied=False),), initial=Normal(zero_ends=True)
    ).build()
    output = network(tokens())
    assert torch.equal(output.hidden, network.body.stream.finish(network.embed(tokens()), None))
    assert (output.logits == 0).all()
    assert (network.body.layers[0].sublayers[0].heads.qkv.weight != 0).all()
    tied = model(width=64, outputs=(Language(), Classify(3)), initial=Normal(zero_ends=True)).build()
    assert (tied.embed.table.weight != 0).all()  # a head without a map of its own is the table
    assert (tied.outputs[1].map.weight != 0).all()  # and one of classes has no tokens


@pytest.mark.spec(29)
def test_xavier_is_uniform_by_fan_in_and_fan_out():
    torch.manual_seed(0)
    network = model(width=64, embed=Tokens(999), initial=Xavier()).build()
    weight = network.body.layers[0].sublayers[0].heads.out.weight
    bound = (6 / (64 + 64)) ** 0.5
    assert 0.99 * bound < weight.abs().max() <= bound
    assert abs(weight.std() / (bound / 3**0.5) - 1) < 0.05
    assert abs(network.embed.table.weight.std() * 8 - 1) < 0.05  # so that sqrt(D) times a token has variance 1


def test_fan_in_gives_each_map_the_variance_1_over_its_inputs():
    """Tables have the std 1, biases are 0, and queries without a scale are smaller by the root of the width of a head."""
    torch.manual_seed(0)
    for scale, queries in ((None, 1.0), (1.0, 32**-0.5)):
        form, net = Standard(2, bias=True, scale=scale), FeedForward(256)
        network = model(width=64, embed=Tokens(999), form=form, net=net, initial=FanIn()).build()
        attention, net = network.body.layers[0].sublayers
        maps = *attention.heads.qkv.weight.chunk(3), attention.heads.out.weight, net.hidden[0].weight, net.out.weight
        for weight, std in zip(maps, (queries / 8, 1 / 8, 1 / 8, 1 / 8, 1 / 8, 1 / 16), strict=True):
            assert abs(weight.std() / std - 1) < 0.05
        assert abs(network.embed.table.weight.std() - 1) < 0.05
        assert all((one.bias == 0).all() for one in network.modules() if isinstance(one, torch.nn.Linear))


def test_a_shared_table_is_initialized_so_that_the_first_loss_is_that_of_a_guess():
    """With torch's deviation of 1 a model would echo its input: the first loss is that of a guess."""
    torch.manual_seed(0)
    value = model(width=64, embed=Tokens(256), outputs=(Language(),))
    network, x_BT = value.build(), torch.randint(0, 256, (8, 32))
    assert abs(network.embed.table.weight.std() * 8 - 1) < 0.05
    loss = F.cross_entropy(network(x_BT).logits[:, :-1].flatten(0, 1), x_BT[:, 1:].flatten())
    assert loss < math.log(256) + 1
    other = model(width=64, embed=Tokens(256), outputs=(Language(tied=False),)).build()
    assert abs(other.embed.table.weight.std() - 1) < 0.05


@pytest.mark.parametrize("initial", [Normal(), FanIn(), Xavier()])
def test_a_weight_that_its_module_initializes_is_kept(initial):
    cell = (
        Model(width=8, embed=Tokens(9), body=stack(1, Lstm()), initial=initial)
        .build()
        .body.layers[0]
        .sublayers[0]
        .cells[0]
    )
    assert (cell.of_x.bias.view(4, 8)[cell.gates.index("f")] == 1).all()
    table = model("full", width=64, embed=Features(99, std=0.5), initial=initial).build().embed.map
    assert abs(table.weight.std() * 2 - 1) < 0.05 and (table.bias == 0).all()


def test_the_contents_of_padding_change_nothing_even_nan():
    network, x_BTF = ready(model("full", embed=Features(3), outputs=(Classify(2),))), randn(2, 5, 3)
    visible_BT = torch.tensor([[True] * 3 + [False] * 2, [True] * 5])
    wanted = network(x_BTF, visible=visible_BT).logits
    for filler in (torch.nan, 1e200, -torch.inf):
        found = network(x_BTF.masked_fill(~visible_BT[..., None], filler), visible=visible_BT).logits
        assert torch.equal(found, wanted)


@pytest.mark.spec(20)
def test_a_stack_takes_its_layers_in_turn():
    """Layers alternate, each with weights of its own."""
    one, two = (model(pattern).body.layers[0] for pattern in ("causal & window(2)", "causal"))
    body: Any = model(layers=5).body
    stacked = type(body)(5, (one, two), body.residual).build(8)
    patterns = [str(layer.sublayers[0].value.pattern) for layer in stacked.layers]
    assert patterns == ["causal & window(2)", "causal", "causal & window(2)", "causal", "causal & window(2)"]
    assert len({id(p) for p in stacked.parameters()}) == len(list(stacked.parameters()))


def test_a_probe_shows_the_buckets_of_the_keys_of_each_attention():
    network, x_BT, probe = ready(model("hashed(2, 4, 3)", form=Shared(2), layers=2)), tokens(2, 12), Probe()
    inputs, attentions = list[Tensor](), [layer.sublayers[0] for layer in network.body.layers]
    for one in attentions:
        one.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
    network(x_BT, probe=probe)
    wanted = [one.hash.buckets(one.heads.project(x_BTD)[1]) for one, x_BTD in zip(attentions, inputs, strict=True)]
    assert [torch.equal(shown, one.mT) for shown, one in zip(probe.buckets, wanted, strict=True)] == [True, True]


@pytest.mark.parametrize("name", ["documents", "edges", "encoder_output"])
def test_an_input_that_nothing_reads_is_refused(name):
    options: dict[str, Any] = {
        "documents": {"side_inputs": SideInputs(documents=torch.zeros(1, 4, dtype=torch.long))},
        "edges": {"side_inputs": SideInputs(edges=torch.ones(4, 4, dtype=torch.bool))},
        "encoder_output": {"encoder_output": EncoderOutput(torch.zeros(1, 4, 8))},
    }
    with pytest.raises(ValueError, match=f"{name} is given, but nothing in the model reads it; leave it out"):
        model().build()(torch.zeros(1, 4, dtype=torch.long), **options[name])
