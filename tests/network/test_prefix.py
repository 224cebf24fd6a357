"""Prefix language models: who sees whom, the contract, training, evaluation, generation with and without a cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import everyformer
from everyformer import Cache, Language, PerToken, Prefix, SideInputs, parse
from everyformer.attention.prefix import NOTHING, prefix_of
from everyformer.data.synthetic import shakespeare
from everyformer.infer.beam import beam_search
from everyformer.infer.evaluate import window_nll
from everyformer.infer.score import row_nll
from everyformer.task.language import Language as LanguageTask
from everyformer.task.prefix_model import with_prefix
from tests.network import model, ready, tokens


def prefix_model(pattern: str = "causal | prefix", **changes: Any) -> Any:
    return ready(model(pattern, outputs=(Language(),), **changes))


@pytest.mark.parametrize(
    "pattern, expected",
    [
        ("causal", NOTHING),
        ("causal | prefix(3)", Prefix(3)),
        ("causal & window(2) | prefix", Prefix()),
        ("by_head(causal | prefix(2), causal | prefix(5))", Prefix(5)),
        ("by_head(causal, causal | prefix)", Prefix()),
        ("(causal | prefix(3)) & window(4)", Prefix(3)),
        ("prefix(3)", Prefix(3)),
        ("full", None),
        ("causal | window(2)", None),
        ("by_head(causal | prefix, causal | prefix(2))", None),
        ("~prefix(3)", None),
        ("chunked(1, 2, 4)", None),
    ],
)
def test_the_prefix_of_a_pattern_is_outside_of_what_sees_the_future(pattern, expected):
    found = prefix_of(parse(pattern), heads=2)
    assert found == expected
    if expected is not None and expected.length is not None:
        mask_HQK = parse(pattern).mask(12, heads=2)
        ahead = torch.ones(12, 12).triu(1).bool() & (torch.arange(12) >= expected.length)
        assert not (mask_HQK & ahead).any()


def test_positions_see_the_prefix_inside_it_and_the_past_after_it():
    """The definition, pair by pair, for prefixes of 0, 2 and 5 of 6 positions."""
    context = everyformer.Context.of(6, 6, prefix=torch.tensor([0, 2, 5]))
    mask_BHQK = context.mask(parse("causal | prefix"), 3, 1)
    for b, length in enumerate((0, 2, 5)):
        for i in range(6):
            for j in range(6):
                assert bool(mask_BHQK[b, 0, i, j]) == (j <= i or j < length)


@pytest.mark.parametrize("pattern", ["causal | prefix", "causal & window(3) | prefix", "causal | prefix(4)"])
def test_the_contract_holds_and_a_leak_breaks_it(pattern, monkeypatch):
    value = model(pattern, outputs=(Language(),))
    report = everyformer.contracts(value, only=["prefix", "padding", "neighbours", "kernels", "compile"])
    assert report.ok and len(report.results) == 5
    assert not everyformer.contracts(model("causal"), only="prefix").results
    bind = Prefix.bind
    wide = lambda self, side: lambda b, h, q, k: bind(self, side)(b, h, q, k - 1)  # noqa: E731  # one position too many
    monkeypatch.setattr(Prefix, "bind", wide)
    assert not everyformer.contracts(value, only="prefix").ok


def test_illegal_prefixes_are_refused_with_the_reason():
    for pattern, reason in (
        ("full", "write causal | prefix\\(8\\)"),
        ("by_head(causal | prefix, causal | prefix(2))", "attends to the future"),
    ):
        with pytest.raises(ValueError, match=reason):
            model(pattern, outputs=(Language(),)).build()
    model("causal | prefix", outputs=(PerToken(2),)).build()
    network = prefix_model()
    with pytest.raises(ValueError, match="the pattern prefix has no length: call the model with side_inputs"):
        network(tokens(2, 5))
    with pytest.raises(ValueError, match="give 2 integers"):
        network(tokens(2, 5), side_inputs=SideInputs(prefix=torch.tensor([1.0, 2.0])))
    with pytest.raises(ValueError, match="prefix is given, but nothing in the model reads it"):
        ready(model("causal"))(tokens(2, 5), side_inputs=SideInputs(prefix=torch.tensor([1, 2])))
    side = SideInputs(prefix=torch.tensor([4, 4]))
    started = network(tokens(2, 3), cache=Cache(), side_inputs=side)
    with pytest.raises(ValueError, match="lets cached positions attend to new ones"):
        network(tokens(2, 2), cache=started.cache, side_inputs=side)


@pytest.mark.parametrize("pattern", ["causal | prefix", "causal & window(3) | prefix", "causal | prefix(2)"])
@pytest.mark.parametrize("lengths", [(5, 5), (7, 2)])
def test_generation_from_a_prefix_is_equal_with_and_without_a_cache(pattern, lengths):
    """Greedy: also equal to the definition, the argmax of a whole pass with the prompt as the prefix."""
    network = prefix_model(pattern)
    prompts = [row[:length].tolist() for row, length in zip(tokens(2, 9), lengths, strict=True)]
    texts = [everyformer.generate(network, prompts, 8, temperature=0, cached=cached) for cached in (True, False)]
    assert texts[0] == texts[1]
    for prompt, text in zip(prompts, texts[0], strict=True):
        side = SideInputs(prefix=torch.tensor([len(prompt)])) if "prefix" in network.reads else None
        for end in range(len(prompt), len(text)):
            logits = network(torch.tensor([text[:end]]), side_inputs=side).logits[0, -1]
            assert int(logits.argmax()) == text[end]
    beams = [beam_search(network, prompts, end=0, max_tokens=5, beam=3, cached=cached) for cached in (True, False)]
    assert beams[0] == beams[1]


def test_a_window_keeps_what_it_has_of_the_prompt_and_many_prompts_are_generated_alike():
    network = prefix_model()
    long, short = tokens(2, 9)[0].tolist(), [3, 1]
    together = everyformer.generate(network, [long, short], 6, temperature=0, context=6)
    assert together == [everyformer.generate(network, [one], 6, temperature=0, context=6)[0] for one in (long, short)]
    text = together[0]
    side = SideInputs(
        prefix=torch.tensor([5])
    )  # of 9 tokens the window of 6 begins at the fifth after the first new one
    assert int(network(torch.tensor([text[4:10]]), side_inputs=side).logits[0, -1].argmax()) == text[10]
    many = [[3, 1]] * 70
    assert (
        everyformer.generate(network, many, 2, temperature=0)
        == [everyformer.generate(network, [[3, 1]], 2, temperature=0)[0]] * 70
    )
    with pytest.raises(ValueError, match="a prompt has 1 tokens, but the first 3 are the model's prefix"):
        everyformer.generate(prefix_model("causal | prefix(3)"), [[1]], 2)


@torch.no_grad()
def nll(network: Any, window: list[int], prefix: int) -> float:
    """-log p of the tokens after a prefix, each from a pass over those before it."""
    total = 0.0
    for end in range(max(prefix, 1), len(window)):
        side = SideInputs(prefix=torch.tensor([prefix])) if "prefix" in network.reads else None
        total -= float(
            network(torch.tensor([window[:end]]), side_inputs=side).logits[0, -1].log_softmax(-1)[window[end]]
        )
    return total


def test_an_evaluation_gives_the_tokens_that_it_does_not_score_as_the_prefix():
    network, token_N = prefix_model(), tokens(1, 13)[0].numpy()
    total, count = window_nll(network, token_N, 6, 3)
    expected = nll(network, token_N[:7].tolist(), 1) + sum(
        nll(network, token_N[at : at + 7].tolist(), 4) for at in (3, 6)
    )
    assert count == 12 and total == pytest.approx(expected, rel=1e-5)
    fixed = prefix_model("causal | prefix(3)")
    total, count = window_nll(fixed, token_N, 6, 3)
    expected = nll(fixed, token_N[:7].tolist(), 3) + sum(nll(fixed, token_N[at : at + 7].tolist(), 4) for at in (3, 6))
    assert count == 10 and total == pytest.approx(expected, rel=1e-5)
    with pytest.raises(ValueError, match="stride is 5 with a window of 6, but its first 3 tokens"):
        window_nll(fixed, token_N, 6, 5)
    assert row_nll(network, [token_N[:5]], 6)[0] == pytest.approx(nll(network, token_N[:5].tolist(), 1), rel=1e-5)


@pytest.fixture
def little(tmp_path):
    (tmp_path / "little.txt").write_text(shakespeare()[:20_000])
    return str(tmp_path / "little.txt")


def adapted(task: LanguageTask, little: str, **changes: Any) -> Any:
    data = task.open(little)
    value = data.adapt(everyformer.member("gpt2", "tiny", dropout=0.0, context=task.context, **changes))
    return data, value, data.fit(value)


@pytest.mark.parametrize("prefix", ["random", 5, 0])
def test_the_loss_counts_the_targets_after_the_prefix_alone(prefix, little):
    data, value, fitted = adapted(LanguageTask(context=12, prefix=prefix), little)
    network, batch = value.build().double().eval(), data.batch(2, 4, seed=1)
    rows = zip(batch["token_BT"].tolist(), batch["prefix_B"].tolist(), strict=True)
    loss = float(fitted.objective.loss(network, batch, "auto").detach())
    assert loss == pytest.approx(sum(nll(network, row, length) for row, length in rows), rel=1e-6)
    assert data.count(batch) == sum(13 - max(length, 1) for length in batch["prefix_B"].tolist())
    assert torch.equal(batch["prefix_B"], data.batch(2, 4, seed=1)["prefix_B"])
    if prefix == "random":
        drawn = torch.cat([data.batch(step, 64, seed=0)["prefix_B"] for step in range(20)])
        assert set(drawn.tolist()) == set(range(1, 13))
    metrics = fitted.objective.evaluate(network, "valid", 4, "auto")
    assert "leaks" not in metrics and metrics["bits_per_byte"] > 0


def test_a_prefix_model_learns_and_its_run_continues_prompts(little, tmp_path):
    settings = ["run.steps=3", "run.batch=4", "run.evaluate=0", "run.save=0", "task.context=16", "task.prefix=random"]
    recipe = everyformer.Recipe.of("gpt2", *settings, size="tiny", data=little)
    run = everyformer.train(recipe, tmp_path / "run")
    assert run.network.reads == {"prefix"} and run.metrics["bits_per_byte"] < 9
    again: Any = everyformer.load(tmp_path / "run")
    assert again.generate("ROMEO:", tokens=5, seed=1) == run.generate("ROMEO:", tokens=5, seed=1)


@pytest.mark.parametrize(
    "task, changes, reason",
    [
        ({"prefix": 20}, {}, "a prefix of 20 leaves no target in a context of 12"),
        ({"prefix": 4}, {"member": "lstm"}, "the model has no attention"),
    ],
)
def test_a_prefix_that_cannot_be_is_refused(task, changes, reason, little):
    with pytest.raises(ValueError, match=reason):
        data = LanguageTask(context=12, **task).open(little)
        member = changes.get("member", "gpt2")
        settings = {"context": 12} if member == "gpt2" else {}
        data.fit(data.adapt(everyformer.member(member, "tiny", **settings)))


def test_a_model_with_its_own_prefix_needs_no_setting_and_one_that_reads_it_does(little):
    own = model("causal | prefix(3)", outputs=(Language(),), embed=everyformer.Tokens(256))
    data = LanguageTask(context=12).open(little)
    data.fit(own)
    assert data.batch(0, 2, seed=0)["prefix_B"].tolist() == [3, 3]
    with pytest.raises(ValueError, match="the model's own prefix has 3 tokens"):
        LanguageTask(context=12, prefix=4).open(little).adapt(own)
    with pytest.raises(ValueError, match="prefix to a number, or to random"):
        data.fit(with_prefix(model("causal", outputs=(Language(),), embed=everyformer.Tokens(256))))
