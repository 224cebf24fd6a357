"""The members lstm and ablated-lstm: training and resuming, the state carried through a text, plans and images."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import everyformer as ef
from everyformer import build
from everyformer.infer.evaluate import streaming_nll, window_nll
from everyformer.study.attention_pictures import draw
from everyformer.study.plan import plan
from everyformer.task.attention_maps import GROUPS, AttentionMaps, attention_maps, grouped, probe
from everyformer.task.language import Language
from everyformer.task.probe_input import ProbeInput
from everyformer.train import checkpoint
from everyformer.train.loop import resume, train
from everyformer.train.recipe import Recipe, override
from tests.train.small import BASE, same, text

MEMBERS = ("lstm", "ablated-lstm")
SMALL = [one for one in BASE if "context" not in one and "heads" not in one] + ["run.steps=6", "run.save=2"]


@pytest.mark.parametrize("name, memory", [("lstm", 8), ("ablated-lstm", 8), ("ablated-lstm", None)])
def test_a_resumed_run_is_the_run_that_did_not_stop(name, memory, tmp_path):
    """Weights, optimizer and the carried state, one per layer, are equal."""
    start = Recipe(member=name, size="tiny", task=Language(context=5), data=str(text(tmp_path)))
    recipe = override(start, [*SMALL, "run.evaluate=0", f"model.memory={memory or 'null'}", "model.dropout=0.1"])
    train(recipe, tmp_path / "whole")
    train(override(recipe, ["run.steps=4"]), tmp_path / "cut")
    resume(tmp_path / "cut", steps=6)
    one, two = (checkpoint.path_of(tmp_path / folder, 6) for folder in ("whole", "cut"))
    assert same(one, two, ("model", "optimizer", "ema", *(["cache"] if memory else [])))
    if memory:
        carried = load_file(one / "cache.safetensors")
        assert carried["state.1"].shape == (4, 1, 32 if name == "lstm" else 16) and int(carried["position"].max()) == 29


@pytest.mark.parametrize("name", (*MEMBERS, "act-rnn"))
def test_streaming_evaluation_equals_one_window_over_the_whole_text(name):
    """The state carries everything: segments of any length, with a memory of one position, equal one long pass."""
    network = build(name, "tiny", width=16).double().eval()
    token_N = torch.randint(0, 256, (50,), generator=torch.Generator().manual_seed(0)).numpy()
    total, count = streaming_nll(network, token_N, 7, 1)
    assert (total, count) == (pytest.approx(window_nll(network, token_N, 49, 49)[0], rel=1e-12), 49)


@pytest.mark.parametrize("name", MEMBERS)
def test_a_plan_counts_every_product(name, tmp_path):
    """Forward once, backward twice, two operations for each weight of a map and token."""
    recipe = override(
        Recipe(member=name, size="tiny", task=Language(context=16), data=str(text(tmp_path))), ["run.batch=3"]
    )
    network = build(name, "tiny")
    maps = sum(p.numel() for p in network.parameters() if p.dim() == 2) - network.embed.table.weight.numel()
    assert plan(recipe).flops == 6 * maps * 3 * 16


def test_groups_of_a_state_are_ordered_by_their_mean_distance():
    apart_QK = torch.arange(5)[:, None] - torch.arange(5)
    weight_HQK = torch.stack([0.25 * (apart_QK == far) for far in (3, 0, 2, 1, 3, 0, 1, 2)])
    assert torch.equal(grouped(weight_HQK), weight_HQK[[1, 3, 2, 0]])


def maps_of(network: ef.Network, folder: Path, words: str) -> AttentionMaps:
    """The maps of a text as the task reads it."""
    fitted = Language(context=16).open(str(text(folder))).fit(network.value)
    return attention_maps(network, fitted.inference.probe_input(network, words))


@pytest.mark.spec(44, 46)
@pytest.mark.parametrize("name", MEMBERS)
def test_the_weights_of_a_state_are_drawn_beside_attention(name, tmp_path):
    """Like attention: a row per layer, the numbers of the state in groups; beside it a Transformer on the same text."""
    network, other = build(name, "tiny"), build("gpt2", "tiny", vocabulary=256).eval()
    (side,) = probe(network, ProbeInput((torch.arange(9)[None],), [str(position) for position in range(9)]))
    maps_L = [one[0] for one in side.probe.state_weights]
    assert [one.shape for one in maps_L] == [(64, 9, 9)] * 2 and all(0 <= one.min() <= one.max() <= 1 for one in maps_L)
    shown = [maps_of(one, tmp_path, "to be or not") for one in (network, other)]
    left, right = draw(*shown).subfigs
    titles = [f"group {number}" for number in range(GROUPS)] + [""] * GROUPS
    assert [plot.get_title() for plot in left.axes[:-1]] == titles
    inputs = ProbeInput((torch.tensor([list(b"to be or not")]),), "to be or not")
    states, attentions = probe(network, inputs)[0].probe.state_weights, probe(other, inputs)[0].probe.weights
    for figure, wanted in ((left, [grouped(one[0]) for one in states]), (right, [one[0] for one in attentions])):
        *plots, scale = figure.axes
        weight_LQK = torch.cat(wanted)
        assert scale.get_ylim() == (0, float(weight_LQK.max())) and scale.get_ylabel() == "weight"
        for plot, weight_QK in zip(plots, weight_LQK, strict=True):
            assert plot.images[0].get_array().data.tolist() == weight_QK.tolist()


@pytest.mark.parametrize(("name", "row"), [("gpt2", "layer"), ("universal-transformer", "step")])
def test_rows_of_an_image_are_labelled_layer_or_step(name, row, tmp_path):
    (part,) = draw(maps_of(build(name, "tiny", vocabulary=256), tmp_path, "to be")).subfigs
    labels = [label for plot in part.axes[:-1] if (label := plot.get_ylabel())]
    assert labels == [f"{row} {number}" for number in range(len(labels))] != []


def test_a_state_without_weights_is_not_drawn(tmp_path):
    with pytest.raises(ValueError, match="has no attention weights to draw"):
        maps_of(build("act-rnn", "tiny"), tmp_path, "to be or not")


def test_of_a_hybrid_the_attention_is_drawn(tmp_path):
    """A column for each head, a row for each attention: the states of its LSTMs are no heads."""
    hybrid = ef.Layer((ef.Lstm(), ef.Attention(ef.Standard(2), ef.Causal())))
    model = ef.Model(width=8, embed=ef.Tokens(256), body=ef.Stack(2, (hybrid,), ef.PreNorm()), outputs=(ef.Language(),))
    maps = maps_of(model.build(), tmp_path, "to be")
    assert [tuple(weight.shape) for weight in maps.weight_LHQK] == [(2, 5, 5)] * 2
    torch.testing.assert_close(maps.weight_LHQK[0].sum(-1), torch.ones(2, 5))
