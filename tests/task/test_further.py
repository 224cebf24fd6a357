"""The losses of Al-Rfou et al. 2018: every position, every layer until l/(2n) of the training, the token after the next at half weight."""

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
from everyformer.train.capture import unsupported_reason
from everyformer.train.init_from import load_weights
from everyformer.train.loop import resume, train
from everyformer.train.recipe import Recipe, Run, override
from everyformer.train.record import read
from tests.network import close, model, ready, tokens
from tests.spec import auxiliary_losses as spec
from tests.train.small import BASE, same, text

LAYERS, AHEAD = 3, 2


def work(folder: Any, value: Any, **fields: Any) -> Any:
    found = LanguageTask(**fields).open(str(text(folder)), 8, None)
    value = found.adapt(value)
    found.fit(value)
    return found, value


@pytest.mark.spec(74, 75, 76)
@pytest.mark.parametrize("done", [0.0, 0.2, 0.4, 0.9])
@pytest.mark.parametrize("residual", [PostNorm(), PreNorm(), Gated()], ids=["post", "pre", "gated"])
def test_the_loss_is_the_papers(tmp_path, residual, done):
    """On a member that has none of it, by the task's settings alone."""
    value = model("causal", layers=LAYERS, residual=residual, embed=Tokens(256), outputs=(Language(),))
    one, value = work(tmp_path, value, ahead=AHEAD, every_layer=True)
    network, batch = ready(value), one.batch(0, 3, 0)
    one.done = done
    token_BT = batch["token_BT"]
    hidden = hidden_of_layers(network, token_BT[:, :-1])
    maps = [[maps[after].weight for after in range(AHEAD + 1)] for maps in list(network.auxiliary)[:-1]]
    maps.append([network.embed.table.weight, *(one.weight for one in network.auxiliary[-1])])
    wanted = sum(
        spec.loss([z_BTD[row] for z_BTD in hidden], maps, token_BT[row].tolist(), done, 0.5) for row in range(3)
    )
    assert (one.loss(network, batch, "auto") / wanted).item() == pytest.approx(1, rel=1e-6)  # it is taken in float32


def hidden_of_layers(network: Any, x_BT: Any) -> list[Any]:
    """What the first l layers alone would give to a head."""
    found, layers = [], list(network.body.layers)
    for count in range(1, LAYERS + 1):
        network.body.layers = torch.nn.ModuleList(layers[:count])
        found.append(network(x_BT).hidden)
    network.body.layers = torch.nn.ModuleList(layers)
    return found


@pytest.mark.spec(75)
def test_layers_stop_one_after_the_other_and_the_last_never(tmp_path):
    """Layer l of n ends after l/(2n) of the training: none but the last is left after half of it."""
    one, _ = work(tmp_path, member("deep-character", "tiny", layers=4))
    lengths: dict[int, int] = {}
    for percent in range(100):
        one.done = percent / 100
        for layer in range(1, 5):
            lengths[layer] = lengths.get(layer, 0) + one.counts(layer)
        assert one.lowest() == (1 if percent < 38 else 4)
    assert lengths == {1: 13, 2: 25, 3: 38, 4: 100}


@pytest.mark.spec(75, 76)
def test_what_serves_training_alone_changes_no_answer_and_every_map_has_a_gradient():
    """Several processes wait for a gradient of every weight; that of a layer that has stopped is 0."""
    network, x_BT = ready(member("deep-character", "tiny", width=8, heads=2, layers=3, vocabulary=17)), tokens(2, 6)
    plain = network(x_BT)
    for lowest in (1, 2, 3):
        output, predictions = AuxiliaryNetwork(network)(x_BT, lowest_layer=lowest)
        assert torch.equal(output.logits, plain.logits)
        told = sum(logits.square().sum() for _, _, logits in predictions) + sum(output.aux.values())
        network.zero_grad()
        (told + output.logits.sum()).backward()
        for number, maps in enumerate(network.auxiliary, 1):
            for one in maps:
                assert bool((one.weight.grad != 0).any()) == (number >= lowest)


@pytest.mark.spec(77)
def test_every_layer_adds_positions_of_its_own():
    """The network is that of the same layers with x + P_l[i] put before layer l by hand."""
    layer = member("deep-character", "tiny", width=8, heads=2, context=9, dropout=0.0).body.layers[0]
    value = Model(width=8, embed=Tokens(17), body=Stack(3, (layer,), PostNorm()))
    network, x_BT = ready(value), tokens(2, 6)
    tables = [one.position.table.weight for one in network.body.layers]
    assert len({id(table) for table in tables}) == 3
    wanted = network(x_BT).hidden
    for one in network.body.layers:
        one.position = None
    handles = [
        one.register_forward_pre_hook(lambda module, given, table=table: (given[0] + table[:6], *given[1:]))
        for one, table in zip(network.body.layers, tables, strict=True)
    ]
    close(network(x_BT).hidden, wanted)
    for handle in handles:
        handle.remove()
    with pytest.raises(ValueError, match="9"):
        ready(value)(tokens(1, 10))


def test_what_cannot_be_is_refused():
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
    assert "lower layers stop" in (unsupported_reason(Run(), member("deep-character", "tiny"), 1) or "")


@pytest.mark.spec(75, 76)
def test_a_run_knows_how_far_it_is_and_goes_on_to_the_same_weights(tmp_path):
    """The training loss falls by the losses that stop; a stop in between changes nothing."""
    data = text(tmp_path)
    start = Recipe(member="deep-character", size="tiny", task=LanguageTask(), data=str(data))
    recipe = override(start, [*BASE, "model.dropout=0.1"])
    train(recipe, tmp_path / "whole")
    losses = [line["loss"] for line in read(tmp_path / "whole" / "records.jsonl") if line["kind"] == "step"]
    assert losses[2] > 1.9 * losses[3]  # two layers of two targets until a quarter is done, then one of them
    resume(tmp_path / "whole", step=6)
    train(recipe, tmp_path / "other")
    places = [tmp_path / name / "checkpoints" / "00000012" for name in ("whole", "other")]
    assert same(*places)
    body = build("deep-character", "tiny", **recipe.model | {"context": 16})
    with pytest.raises(ValueError, match=r"position\S* is \(8, 16\), not \(16, 16\)"):
        load_weights(body, tmp_path / "whole")
    plain = LanguageTask(ahead=0, every_layer=False).open(str(data), None).adapt(recipe.value({"vocabulary": 256}))
    assert any(
        "layers.1" in name for name in load_weights(plain.build(), tmp_path / "whole")
    )  # what told further stays behind


@pytest.mark.spec(76)
@pytest.mark.parametrize("depth", [Stack, partial(Halt, cost=0.0)], ids=["reversible", "halt"])
def test_the_tokens_after_the_next_need_no_layers(tmp_path, depth):
    """A reversible or repeated depth has no state after each layer; its output tells them."""
    value = model(embed=Tokens(256), outputs=(Language(),))
    body = depth(2, value.body.layers, residual=Reversible() if depth is Stack else PreNorm())
    one, value = work(tmp_path, replace(value, body=body), ahead=2)
    network, batch = ready(value), one.batch(0, 2, 0)
    token_BT, maps = batch["token_BT"], [network.embed.table.weight, *(one.weight for one in network.auxiliary[0])]
    wanted = sum(
        spec.loss([network(token_BT[:, :-1]).hidden[row]], [maps], token_BT[row].tolist(), 0.9, 0.5) for row in range(2)
    )
    assert (one.loss(network, batch, "auto") / wanted).item() == pytest.approx(1, rel=1e-6)
