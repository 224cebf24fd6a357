"""Adaptive span: the member is the paper's equation, its memory is as long as its longest span, its spans follow the loss."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from everyformer import Cache, Context, DynamicSpan, Language, Reversible, Rotary, Span, build, generate, member
from everyformer.attention import span as span_module
from everyformer.network import network as network_module
from everyformer.study.spans import spans, spans_of
from everyformer.task.language import Language as LanguageTask
from everyformer.train.learner import set_checkpoint_segments
from everyformer.train.loop import train
from everyformer.train.recipe import Recipe, override
from everyformer.train.record import read
from tests.network import close, model, randn, ready, tokens
from tests.spec import score_mods as spec
from tests.train.small import BASE, text

LENGTH = 14


@pytest.fixture
def fine(monkeypatch):
    """Windows are exactly as long as the spans: no rounding, no reserve."""
    monkeypatch.setattr(span_module, "coarse", lambda size: max(1, size))


def small(**changes) -> Any:
    numbers = {"width": 8, "heads": 2, "span": 6, "ramp": 3, "vocabulary": 17, "dropout": 0.0, "initial_span": 0.3}
    return ready(build("adaptive-span", "tiny", **(numbers | changes)))


@pytest.mark.spec(92, 93, 94, 96)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("attends_to_self", [False, True])
def test_attention_is_the_papers(dynamic, attends_to_self):
    """Over the keys 1 (with itself: 0) to S back, with p of the distance; the same p in both heads and layers."""
    network, x_TD = small(dynamic=dynamic, **({"pattern": "causal"} if attends_to_self else {})), randn(LENGTH, 8)
    context = Context.of(LENGTH, LENGTH, x_TD.device)
    for layer in network.body.layers:
        heads, (distance, span) = layer.sublayers[0].heads, layer.sublayers[0].score_mods
        p_RE = distance.key_RE.flip(0)
        assert distance.key_RE is network.body.layers[0].sublayers[0].score_mods[0].key_RE and p_RE.shape == (7, 4)
        outputs = []
        for h in range(2):
            q, k, v = (x_TD @ weight.chunk(2)[h].T for weight in heads.qkv.weight.chunk(3))
            z = torch.stack([spec.dynamic_span(x, span.v_HD[h], span.b_H[h], 6) for x in x_TD]) if dynamic else None
            z = 6 * span.fraction_H[h] if z is None else z
            outputs.append(spec.adaptive_span(q, k, v, z, 3, 6, nearest=0 if attends_to_self else 1, p_RE=p_RE))
        y_BTD, _ = layer.sublayers[0](x_TD[None], context, None)
        close(y_BTD[0], torch.cat(outputs, dim=1) @ heads.out.weight.T)


def spied(monkeypatch, owner: Any, name: str, look: Any) -> None:
    original = getattr(owner, name)

    def spy(*given: Any) -> Any:
        look(*given)
        return original(*given)

    monkeypatch.setattr(owner, name, spy)


def in_pieces(network: Any, x_BT: Tensor, cuts: list[int], cache: Cache, **options: Any) -> tuple[Tensor, list[int]]:
    hidden, lengths = [], []
    for left, right in pairwise([0, *cuts, x_BT.shape[1]]):
        output = network(x_BT[:, left:right], cache=cache, **options)
        cache = output.cache
        hidden.append(output.hidden)
        lengths.append(cache.length)
    return torch.cat(hidden, dim=1), lengths


@pytest.mark.spec(97)
@pytest.mark.usefixtures("fine")
@pytest.mark.parametrize("hidden", [False, True], ids=["keys", "hidden"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_segments_with_a_memory_as_long_as_the_spans_equal_one_long_pass(hidden, dynamic, monkeypatch):
    """Layers have different spans: the memory has the longest, and each layer computes the keys that it needs."""
    network, x_BT = small(dynamic=dynamic, span=9), tokens(2, 30)
    if not dynamic:
        spans = [layer.sublayers[0].score_mods[1].fraction_H for layer in network.body.layers]
        with torch.no_grad():
            spans[0].copy_(torch.tensor([0.0, 0.1]))  # 0.9 + 3 > 3 positions back
            spans[1].copy_(torch.tensor([0.4, 0.2]))  # 3.6 + 3 > 6 positions back
    most, widths = 9 if dynamic else 6, []
    for layer in network.body.layers:
        spied(monkeypatch, layer.sublayers[0].heads, "keys_values", lambda x: widths.append(x.shape[1]))
    hidden_BTD, lengths = in_pieces(network, x_BT, [10, 20, 25], Cache(segment_memory=hidden))
    close(hidden_BTD, in_pieces(network, x_BT, [], Cache())[0])
    assert lengths == [most] * 4 and network.max_distance() == most
    if hidden:
        assert widths == [min(most, 3 if number % 2 == 0 and not dynamic else most) for number in range(6)]
    network.train()
    monkeypatch.setattr(network_module, "SPARE", 2)
    assert in_pieces(network, x_BT, [10, 20], Cache(segment_memory=hidden))[1] == [min(9, most + 2)] * 3


@pytest.mark.spec(97)
@pytest.mark.usefixtures("fine")
@pytest.mark.parametrize("score_mods", [(Rotary(), Span(6, ramp=3, start=0.3)), (DynamicSpan(8, 6, ramp=3),), ()])
def test_generation_drops_keys_beyond_every_span(score_mods, monkeypatch):
    """The text equals that of generation without a cache, for prompts of two lengths, and for a window without spans."""
    network = ready(
        model("causal" if score_mods else "causal & window(5)", score_mods=score_mods, outputs=(Language(),))
    )
    prompts = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9], [2, 7]]
    lengths: list[int] = []
    spied(monkeypatch, Cache, "trim", lambda cache, length: lengths.append(length))
    cached, uncached = (generate(network, prompts, 30, seed=0, cached=cached) for cached in (True, False))
    assert cached == uncached and lengths and set(lengths) == {network.max_distance()}


@pytest.mark.spec(95, 96)
@pytest.mark.parametrize("how", ["sections", "reversible"])
def test_the_penalty_has_its_gradients_in_recomputed_layers(how):
    score_mod, x_BT = DynamicSpan(8, 6, ramp=3, cost=0.5), tokens(2, 9)
    value = model(
        score_mods=(score_mod,), outputs=(Language(),), **({"residual": Reversible()} if how == "reversible" else {})
    )
    network = ready(value).train()
    gradients = []
    for again in (False, True):
        if how == "sections":
            set_checkpoint_segments(network, 2 * again)
        cache = None if again else Cache()  # a reversible stack that keeps a past is computed plainly
        output = network(x_BT, cache=cache)
        loss = output.logits.square().mean() + output.aux["penalty"]
        gradients.append(torch.autograd.grad(loss, list(network.parameters())))
    for one, two in zip(*gradients, strict=True):
        close(one, two)


@pytest.mark.spec(95, 97)
def test_a_high_cost_shortens_spans_in_training_and_records_them(tmp_path):
    """From half of the maximum towards 0, never below; an evaluation records the span of each layer and head."""
    settings = [one for one in BASE if "context" not in one] + ["run.steps=10", "run.evaluate=0", "run.save=0"]
    recipe = Recipe(member="adaptive-span", size="tiny", task=LanguageTask(context=5), data=str(text(tmp_path)))
    recipe = override(recipe, [*settings, "model.span=16", "model.initial_span=0.5", "model.cost=1"])
    run = train(override(recipe, ["optim.lr=0.1", "optim.warmup=0", "optim.clip=0"]), tmp_path / "run")
    (line,) = (line for line in read(tmp_path / "run" / "records.jsonl") if line["kind"] == "final")
    spans_LH = torch.tensor(line["spans"])
    assert spans_LH.shape == (run.network.value.body.num_layers, 2) and spans_LH.min() >= 0
    assert line["span"] == pytest.approx(float(spans_LH.mean())) and line["span"] < 3
    parts_LH = torch.stack([layer.sublayers[0].score_mods[1].fraction_H.detach() for layer in run.network.body.layers])
    torch.testing.assert_close(spans_LH, 16 * parts_LH)


@pytest.mark.spec(96, 97)
def test_spans_are_reported_with_the_operations_that_they_save():
    """Per token: 2 operations per weight of the maps, 2 per number of each key, value and distance vector in the span."""
    network, x_T = small(dynamic=True), tokens(1, 20)[0].numpy()
    with torch.no_grad():
        for layer in network.body.layers:
            layer.sublayers[0].score_mods[1].v_HD.zero_()  # then all tokens have the same
    report = spans(network, x_T)
    spans_LH = [6 * layer.sublayers[0].score_mods[1].b_H.sigmoid() for layer in network.body.layers]
    close(torch.tensor(report.each, dtype=torch.float64), torch.stack(spans_LH).detach())
    keys_LH = (torch.stack(spans_LH) + 3).clamp(max=6).detach()
    maps = 2 * 2 * (4 * 8 * 8 + 2 * 8 * 32) + 2 * 8 * 17  # two layers, and the output
    assert (report.most, report.most_flops) == (6, maps + 4 * 6 * 2 * 3 * 4)
    assert report.keys == pytest.approx(float(keys_LH.mean())) and report.flops == round(
        maps + float(keys_LH.sum()) * 24
    )
    assert spans(build("gpt2", "tiny"), x_T) is None
    with pytest.raises(ValueError, match="no learned spans; give the run of adaptive-span"):
        spans_of(build("gpt2", "tiny"), object())


def test_sizes_are_those_of_the_published_scripts():
    """Layers, width, heads, net, span, memory, ramp."""
    stated = {
        "small": (8, 256, 4, 1024, 1024, 1024, 32),
        "enwik8": (12, 512, 8, 2048, 8192, 8192, 32),
        "enwik8-large": (24, 768, 8, 4096, 8192, 8192, 32),
    }
    for size, numbers in stated.items():
        value = member("adaptive-span", size)
        layer = value.body.layers[0]
        span = layer.sublayers[0].score_mods[1]
        numbers_here = (value.body.num_layers, value.width, layer.sublayers[0].heads.heads, layer.sublayers[-1].hidden)
        assert (*numbers_here, span.max_span, value.memory.length, span.ramp) == numbers
