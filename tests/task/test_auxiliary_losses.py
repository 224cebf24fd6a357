"""The auxiliary losses of Al-Rfou et al. 2018: every layer until l/(2n) of the training, later tokens at half weight."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from everyformer import Gated, Halt, Language, Learned, Model, PostNorm, PreNorm, Reversible, Tokens, build, member
from everyformer.network.auxiliary import AuxiliaryNetwork, AuxiliaryPredictions
from everyformer.network.depth import Stack
from everyformer.network.layer import Layer
from everyformer.task.language import Language as LanguageTask
from everyformer.train.cuda_graphs import unsupported_reason
from everyformer.train.init_from import load_weights
from everyformer.train.loop import resume, train
from everyformer.train.recipe import Recipe, Run, override
from everyformer.train.record import read
from tests.network import close, model, ready, tokens
from tests.spec import auxiliary_losses as spec
from tests.train.small import BASE, same, text

LAYERS, EXTRA = 3, 2


def fitted(folder: Any, value: Any, **fields: Any) -> Any:
    data = LanguageTask(context=8, **fields).open(str(text(folder)))
    value = data.adapt(value)
    return data.fit(value), value


@pytest.mark.spec(74, 75, 76)
@pytest.mark.parametrize("progress", [0.0, 0.2, 0.4, 0.9])
@pytest.mark.parametrize("residual", [PostNorm(), PreNorm(), Gated()], ids=["post", "pre", "gated"])
def test_the_loss_equals_that_of_the_paper(tmp_path, residual, progress):
    """For a member without auxiliary losses, by the settings of the task."""
    value = model("causal", layers=LAYERS, residual=residual, embed=Tokens(256), outputs=(Language(),))
    task, value = fitted(tmp_path, value, extra_targets=EXTRA, auxiliary_layers=True)
    network, batch = ready(value), task.data.batch(0, 3, 0)
    task.objective.progress = progress
    token_BT = batch["token_BT"]
    hidden = hidden_of_layers(network, token_BT[:, :-1])
    maps = [[maps[after].weight for after in range(EXTRA + 1)] for maps in list(network.auxiliary)[:-1]]
    maps.append([network.embed.table.weight, *(one.weight for one in network.auxiliary[-1])])
    expected = sum(
        spec.loss([z_BTD[row] for z_BTD in hidden], maps, token_BT[row].tolist(), progress, 0.5) for row in range(3)
    )
    assert (task.objective.loss(network, batch, "auto") / expected).item() == pytest.approx(
        1, rel=1e-6
    )  # it is taken in float32


def hidden_of_layers(network: Any, x_BT: Any) -> list[Any]:
    """The hidden states of the first l layers, for each l."""
    states, layers = [], list(network.body.layers)
    for count in range(1, LAYERS + 1):
        network.body.layers = torch.nn.ModuleList(layers[:count])
        states.append(network(x_BT).hidden)
    network.body.layers = torch.nn.ModuleList(layers)
    return states


@pytest.mark.spec(75)
def test_the_losses_of_lower_layers_end_one_after_the_other(tmp_path):
    """That of layer l of n ends after l/(2n) of the training; that of the last layer never ends."""
    task, _ = fitted(tmp_path, member("deep-character", "tiny", layers=4))
    lengths: dict[int, int] = {}
    for percent in range(100):
        task.objective.progress = percent / 100
        for layer in range(1, 5):
            lengths[layer] = lengths.get(layer, 0) + task.objective.layer_losses.counts[layer - 1]
        assert task.objective.layer_losses.lowest == (1 if percent < 38 else 4)
    assert lengths == {1: 13, 2: 25, 3: 38, 4: 100}


@pytest.mark.spec(75, 76)
def test_auxiliary_predictions_do_not_change_the_output_and_every_map_has_a_gradient():
    """DDP needs a gradient of every weight; that of a layer whose loss has ended is 0."""
    network, x_BT = ready(member("deep-character", "tiny", width=8, heads=2, layers=3, vocabulary=17)), tokens(2, 6)
    plain = network(x_BT)
    for lowest in (1, 2, 3):
        output, predictions = AuxiliaryNetwork(network)(x_BT, lowest_layer=lowest)
        assert torch.equal(output.logits, plain.logits)
        auxiliary = sum(logits.square().sum() for _, _, logits in predictions) + sum(output.aux.values())
        network.zero_grad()
        (auxiliary + output.logits.sum()).backward()
        for number, maps in enumerate(network.auxiliary, 1):
            for one in maps:
                assert bool((one.weight.grad != 0).any()) == (number >= lowest)


@pytest.mark.spec(77)
def test_every_layer_adds_its_own_positions():
    """Equals the same layers with x + P_l[i] added before layer l by hooks."""
    layer = member("deep-character", "tiny", width=8, heads=2, context=9, dropout=0.0).body.layers[0]
    value = Model(width=8, embed=Tokens(17), body=Stack(3, (layer,), PostNorm()))
    network, x_BT = ready(value), tokens(2, 6)
    tables = [one.position.table.weight for one in network.body.layers]
    assert len({id(table) for table in tables}) == 3
    expected = network(x_BT).hidden
    for one in network.body.layers:
        one.position = None
    handles = [
        one.register_forward_pre_hook(lambda module, inputs, table=table: (inputs[0] + table[:6], *inputs[1:]))
        for one, table in zip(network.body.layers, tables, strict=True)
    ]
    close(network(x_BT).hidden, expected)
    for handle in handles:
        handle.remove()
    with pytest.raises(ValueError, match="9"):
        ready(value)(tokens(1, 10))


def test_unsupported_models_are_refused():
    layer = Layer(member("gpt2", "tiny").body.layers[0].sublayers[:1], position=Learned(8))
    start = member("gpt2", "tiny")
    for body, auxiliary, reason in (
        (Stack(2, (layer,), Reversible()), None, "cannot be added to the input of each layer"),
        (Stack(2, start.body.layers, Reversible()), AuxiliaryPredictions(0), "every_layer needs one output"),
        (Halt(2, start.body.layers, PreNorm()), AuxiliaryPredictions(0), "every_layer needs one output"),
    ):
        value = Model(width=64, embed=Tokens(256), body=body, outputs=(Language(),), auxiliary=auxiliary)
        with pytest.raises(ValueError, match=reason):
            value.build()
    with pytest.raises(ValueError, match="no auxiliary predictions"):
        AuxiliaryNetwork(build("gpt2", "tiny"))
    assert "auxiliary losses of lower layers" in (unsupported_reason(Run(), member("deep-character", "tiny"), 1) or "")


@pytest.mark.spec(75, 76)
def test_the_training_loss_follows_the_progress_and_a_resumed_run_is_equal(tmp_path):
    """The training loss falls when auxiliary losses end; an interruption changes nothing."""
    data = text(tmp_path)
    start = Recipe(member="deep-character", size="tiny", task=LanguageTask(), data=str(data))
    recipe = override(start, [*BASE, "model.dropout=0.1"])
    train(recipe, tmp_path / "whole")
    losses = [line["loss"] for line in read(tmp_path / "whole" / "records.jsonl") if line["kind"] == "step"]
    assert losses[2] > 1.9 * losses[3]  # two layers with two targets until a quarter of the steps, then one layer
    resume(tmp_path / "whole", step=6)
    train(recipe, tmp_path / "other")
    paths = [tmp_path / name / "checkpoints" / "00000012" for name in ("whole", "other")]
    assert same(*paths)
    body = build("deep-character", "tiny", **recipe.model | {"context": 16})
    with pytest.raises(ValueError, match=r"position\S* is \(8, 16\), not \(16, 16\)"):
        load_weights(body, tmp_path / "whole")
    plain = (
        LanguageTask(extra_targets=0, auxiliary_layers=False)
        .open(str(data), None)
        .adapt(recipe.value({"vocabulary": 256, "context": 8}))
    )
    assert any(
        "layers.1" in name for name in load_weights(plain.build(), tmp_path / "whole")
    )  # auxiliary predictions are not loaded


@pytest.mark.spec(76)
@pytest.mark.parametrize("depth", [Stack, partial(Halt, cost=0.0)], ids=["reversible", "halt"])
def test_extra_targets_work_with_reversible_and_repeated_depths(tmp_path, depth):
    """These have no separate state after each layer; the extra targets are predicted from the output."""
    value = model(embed=Tokens(256), outputs=(Language(),))
    body = depth(2, value.body.layers, residual=Reversible() if depth is Stack else PreNorm())
    task, value = fitted(tmp_path, replace(value, body=body), extra_targets=2)
    network, batch = ready(value), task.data.batch(0, 2, 0)
    token_BT, maps = batch["token_BT"], [network.embed.table.weight, *(one.weight for one in network.auxiliary[0])]
    expected = sum(
        spec.loss([network(token_BT[:, :-1]).hidden[row]], [maps], token_BT[row].tolist(), 0.9, 0.5) for row in range(2)
    )
    assert (task.objective.loss(network, batch, "auto") / expected).item() == pytest.approx(1, rel=1e-6)
