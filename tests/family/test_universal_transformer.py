"""The Universal Transformer: decoder and encoder-decoder, its settings, and learned halting."""

from __future__ import annotations

import pytest
import torch

import everyformer
from everyformer import Convolution, EncoderDecoder, Halt, Model, Probe, Repeat, TimePosition, member
from everyformer.family.table import parameters
from everyformer.task.language import Language
from everyformer.train.loop import train
from everyformer.train.recipe import Recipe, override
from everyformer.train.trained import load
from tests.train.small import BASE, text


@pytest.mark.spec(121, 122, 123, 125)
def test_the_member_is_the_papers():
    base, language = member("universal-transformer", "base"), member("universal-transformer", "language")
    assert isinstance(base, EncoderDecoder) and isinstance(language, Model)
    for side in (base.encoder, base.decoder):
        assert isinstance(side.body, Repeat) and (side.body.steps, side.width) == (6, 1024)
        assert side.body.position == TimePosition() and side.position is None
        assert side.body.layers[0].sublayers[-1].hidden == 4096 and side.body.layers[0].sublayers[0].heads.heads == 16
    assert isinstance(language.body, Halt) and language.body.mode == "freeze"
    pair = member(
        "universal-transformer",
        "tiny-pair",
        transition=Convolution(256),
        encoder_transition=Convolution(256, causal=False),
    )
    assert isinstance(pair, EncoderDecoder)
    nets = [side.body.layers[0].sublayers[-1] for side in (pair.encoder, pair.decoder)]
    assert all(isinstance(net, Convolution) for net in nets)
    assert [net.causal for net in nets if isinstance(net, Convolution)] == [False, True]
    counts = {parameters(member("universal-transformer", "tiny", steps=steps)) for steps in (1, 9)}
    assert len(counts) == 1  # steps share their weights


@pytest.mark.spec(84, 124)
@pytest.mark.parametrize("mode", ("graves", "freeze", "t2t"))
def test_a_high_cost_learns_to_take_fewer_steps(mode):
    torch.manual_seed(0)
    network = everyformer.build("universal-transformer", "tiny", halting=mode, cost=1.0, bias=-1.0, width=32, heads=2)
    optimizer, x_BT = torch.optim.Adam(network.parameters(), 3e-2), torch.randint(0, 256, (4, 12))
    steps_taken = []
    for _ in range(60):
        probe = Probe()
        output = network(x_BT, probe=probe)
        steps_taken.append((probe.halts[0] > 0).sum(-1).float().mean().item())
        if steps_taken[-1] == 1:  # no position can halt earlier
            break
        optimizer.zero_grad()
        output.aux["ponder"].backward()
        optimizer.step()
    assert steps_taken[0] > 3 and steps_taken[-1] < 1.5


def test_a_run_gathers_running_positions_or_gives_the_reason_why_not(tmp_path):
    start = Recipe(member="universal-transformer", size="tiny", task=Language(context=8), data=str(text(tmp_path)))
    small = [one for one in BASE if "context" not in one and "layers" not in one]
    recipe = override(start, [*small, "run.steps=1", "run.evaluate=0", "run.gather=true"])
    train(recipe, tmp_path / "run")
    assert load(tmp_path / "run").network.body.gather
    for setting in ("run.kernel=blocked", "run.compile=yes", "model.halting=graves"):
        with pytest.raises(ValueError, match=r"run\.gather"):
            train(override(recipe, [setting]), tmp_path / "other")
