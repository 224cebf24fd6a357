"""Replaced-token detection: the loss as the paper writes it, batches, evaluation, what is shared, and what is used afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from msgspec.structs import replace

import everyformer
from everyformer import ReplacedToken
from everyformer.data.synthetic import shakespeare
from everyformer.network.generator import draw
from everyformer.network.network import Network
from everyformer.task import Classify, Masked, Replaced
from everyformer.task.replaced import ReplacedData
from everyformer.train.init_from import load_weights
from everyformer.train.loop import train
from everyformer.train.recipe import Optim, Recipe, Run
from tests.spec import electra as spec


@pytest.fixture
def little(tmp_path):
    (tmp_path / "little.txt").write_text(shakespeare()[:60_000])
    return str(tmp_path / "little.txt")


@pytest.fixture
def data(little):
    return Replaced(vocabulary=300, context=24, valid=0.1).open(little)


def small(data: ReplacedData, **changes: Any) -> Any:
    settings = {"vocabulary": data.tokenizer.vocabulary, "context": 24, "dropout": 0.0} | changes
    return everyformer.member("electra", "tiny", **settings)


def ready(value: Any) -> Network:
    torch.manual_seed(0)
    network: Network = value.build().double().eval()
    with torch.no_grad():
        for weight in network.parameters():
            weight.add_(0.3 * torch.randn_like(weight))
    return network


@torch.no_grad()
def test_the_loss_is_that_of_the_paper(data):
    """Row by row from the generator's and the head's own outputs; the parts of a batch have the gradients of the whole."""
    fitted, network = data.fit(small(data)), ready(small(data))
    batch = data.batch(1, 4, seed=0)
    generator_loss = detection_loss = 0.0
    visible_BT = batch.tensors.get("visible_BT", torch.ones_like(batch["token_BT"], dtype=torch.bool))
    replaced = 0
    for row in range(4):
        one = batch.rows(row, row + 1)
        length = int(visible_BT[row].sum())
        p_TV = network.generator(one["input_BT"][:, :length]).logits[0].softmax(-1)
        masked = [at for at in one["position_BM"][0].tolist() if at >= 0]
        assert masked == (one["input_BT"][0] == data.rows.special.mask).nonzero()[:, 0].tolist()
        x, p = one["token_BT"][0, :length].tolist(), {at: p_TV[at].tolist() for at in masked}
        u = dict(zip(masked, one["uniform_BM"][0].tolist(), strict=False))
        x_corrupt = spec.corrupt(x, p, u)
        replaced += sum(a != b for a, b in zip(x, x_corrupt, strict=True))
        d_T = torch.sigmoid(-network(torch.tensor([x_corrupt])).logits[0, :, 0]).tolist()
        generator_loss += spec.generator_loss(x, p)
        detection_loss += spec.discriminator_loss(x, x_corrupt, d_T)
    assert replaced > 0
    count = data.count(batch)
    expected = generator_loss / count + 50 * detection_loss / int(visible_BT.sum())
    loss = fitted.objective.loss(network, batch, "auto")
    assert float(loss) / count == pytest.approx(expected, rel=1e-5)
    parts = sum(fitted.objective.loss(network, batch.rows(at, at + 2), "auto") for at in (0, 2))
    torch.testing.assert_close(parts, loss, rtol=1e-5, atol=1e-5)


def test_samples_have_the_generators_distribution():
    p_V = torch.tensor([0.1, 0.0, 0.6, 0.3])
    uniform_BM = (torch.arange(1000) + 0.5)[None] / 1000
    drawn = draw(p_V.log().expand(1, 1000, 4), uniform_BM)
    assert torch.bincount(drawn[0], minlength=4).tolist() == [100, 0, 600, 300]
    assert all(spec.sample(p_V.tolist(), float(u)) == int(v) for u, v in zip(uniform_BM[0], drawn[0], strict=True))


def test_no_gradient_of_the_head_reaches_the_generator_except_through_the_embedding(data):
    data.fit(small(data))
    network, batch = ready(small(data)), data.batch(0, 2, seed=0)
    objective = data.fit(small(data)).objective
    _, loss_BT, _, _ = objective.forward(network, batch, "auto")
    loss_BT.sum().backward()
    own = {
        name: x
        for name, x in network.generator.named_parameters()
        if not any(x is y for y in network.embed.parameters())
    }
    shared = [network.embed.table.weight, network.position.table.weight, network.norm.weight, network.segments.weight]
    assert all(x.grad is None for name, x in own.items() if not any(x is y for y in [*shared, network.norm.bias]))
    for name in ("embed", "position", "segments", "norm"):
        ours, theirs = (list(getattr(one, name).parameters()) for one in (network, network.generator))
        assert all(a is b for a, b in zip(ours, theirs, strict=True))


def test_batches_are_a_function_of_seed_and_step(data):
    data.fit(small(data))
    one, two, other = (data.batch(step, 4, seed=1) for step in (3, 3, 4))
    assert all(torch.equal(x, two[name]) for name, x in one.tensors.items())
    assert not torch.equal(one["uniform_BM"], other["uniform_BM"])


def test_an_evaluation_compares_with_chance(data):
    fitted, network = data.fit(small(data)), ready(small(data)).float()
    first, again = (fitted.objective.evaluate(network, "valid", 40, "auto") for _ in range(2))
    assert first == again and first["rows"] == 40
    share = first["replaced_share"]
    assert 0.05 < share < 0.2 and first["chance_accuracy"] == 1 - share
    assert first["chance_f1"] == pytest.approx(2 * share / (1 + share))
    with torch.no_grad():
        network.outputs[0].out.weight.zero_()
        network.outputs[0].out.bias.fill_(1.0)  # every token is replaced
    all_replaced = fitted.objective.evaluate(network, "valid", 40, "auto")
    assert all_replaced["f1"] == pytest.approx(all_replaced["chance_f1"])
    assert all_replaced["accuracy"] == pytest.approx(all_replaced["replaced_share"])


def test_models_without_a_fitting_generator_are_refused(data):
    value = small(data)
    fitted = data.fit(data.adapt(everyformer.member("bert", "tiny", vocabulary=data.tokenizer.vocabulary)))
    with pytest.raises(ValueError, match="has no generator that replaces tokens, as training and evaluating it need"):
        fitted.data.examples()
    network = replace(value, generator=None).build()
    batch = data.fit(value).data.batch(0, 2, seed=0)
    with pytest.raises(ValueError, match="the model has no generator that could replace tokens"):
        data.fit(value).objective.loss(network, batch, "auto")


def learn(member: str, task: Any, data: str, steps: int, init_from: Any = None, out: Any = None) -> Any:
    run = Run(steps=steps, batch=16, evaluate=0, save=0, device="cpu")
    model = {"dropout": 0.0}
    recipe = Recipe(
        member=member, size="tiny", task=task, data=data, model=model, run=run, optim=Optim(lr=4e-3, warmup=5),
        init_from=None if init_from is None else str(init_from),
    )  # fmt: skip
    return train(recipe, out)


def test_replaced_words_are_found_and_the_discriminator_is_fine_tuned(tmp_path):
    """Lines of one repeated word: a word that differs from its line was replaced. A classifier and a masked language model start from
    the weights of the discriminator, without the generator."""
    words = ["alpha", "beta", "gamma", "delta", "theta", "kappa", "sigma", "omega"]
    lines = [" ".join([words[number * 5 % 8]] * 10) for number in range(400)]
    (tmp_path / "lines.txt").write_text("\n".join(lines))
    task = Replaced(vocabulary=90, context=12, share=0.3)
    run = learn("electra", task, str(tmp_path / "lines.txt"), 40, out=tmp_path / "run")
    assert run.metrics["f1"] > run.metrics["chance_f1"] + 0.1
    marked = run.generate("alpha alpha alpha beta alpha alpha")
    assert marked.replace("[", "").replace("]", "") == "alpha alpha alpha beta alpha alpha"
    assert run.predict(["beta beta"]).values.tolist()[0].replace("[", "").replace("]", "") == "beta beta"
    rows = "".join(f"{line.split()[0]} {line.split()[0]},{line.split()[0]}\n" for line in lines[:80])
    (tmp_path / "rows.csv").write_text("text,label\n" + rows)
    tuned = learn("electra", Classify(vocabulary=90, context=12), str(tmp_path / "rows.csv"), 1, tmp_path / "run")
    assert tuned.network.generator is None
    value = replace(run.network.value, outputs=(ReplacedToken(),), generator=None)
    network = value.build()
    loaded = load_weights(network, tmp_path / "run")
    assert not any(name.startswith("generator") for name in loaded)
    assert torch.equal(network.embed.table.weight, run.network.embed.table.weight)
    masked = learn(
        "electra",
        Masked(vocabulary=90, context=12, next_sentence=False),
        str(tmp_path / "lines.txt"),
        1,
        tmp_path / "run",
    )
    assert masked.network.generator is None and masked.metrics["masked_perplexity"] > 1


def test_albert_learns_masked_words(little):
    run = learn("albert", Masked(vocabulary=300, context=24), little, 25)
    assert run.metrics["masked_perplexity"] < 250 and len(run.network.body.layers) == 1
