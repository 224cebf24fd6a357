"""Fine-tuning: the body of a pretrained model, its tokenizer, and a new head."""

from __future__ import annotations

import pytest
import torch

import everyformer
from everyformer import build
from everyformer.data.synthetic import shakespeare
from everyformer.network.store import save
from everyformer.task import Classify, Masked
from everyformer.train.init_from import load_weights
from everyformer.train.loop import train
from everyformer.train.recipe import Optim, Recipe, Run


@pytest.fixture(scope="module")
def run(tmp_path_factory, cache_folder):
    """A short pretraining run, with an average of its weights."""
    home = tmp_path_factory.mktemp("runs")
    (home / "little.txt").write_text(shakespeare()[:50_000])
    folder = home / "masked"
    recipe = Recipe(
        member="bert",
        size="tiny",
        task=Masked(vocabulary=300),
        data=str(home / "little.txt"),
        model={"context": 32},
        run=Run(steps=3, batch=4, evaluate=0, examples=4, device="cpu"),
        optim=Optim(ema=0.5),
    )
    return folder, train(recipe, folder)


@pytest.mark.spec(66)
@pytest.mark.parametrize("source", ["run", "saved"])
def test_all_but_the_heads_is_taken(run, tmp_path, source):
    folder, trained = run
    folder = folder if source == "run" else save(trained.network, tmp_path / "saved")
    torch.manual_seed(1)
    network = build("bert", "tiny", vocabulary=300, context=32)
    before = {name: weight.clone() for name, weight in network.state_dict().items()}
    taken = load_weights(network, folder)
    for name, weight in network.state_dict().items():
        if name.startswith("outputs."):
            assert name not in taken and torch.equal(weight, before[name])
        else:
            assert name in taken and torch.equal(weight, trained.network.state_dict()[name])
    assert {name.split(".")[0] for name in taken} == {"embed", "position", "segments", "norm", "body"}


@pytest.mark.spec(66)
def test_a_pretrained_body_is_tuned_with_a_new_head(run):
    """The tokenizer is the pretraining run's; every weight then moves."""
    folder, trained = run
    work = Classify(vocabulary=2000).open(None, 32, folder)
    assert work.tokenizer.key == trained.work.tokenizer.key
    value = work.adapt(trained.network.value)
    assert [type(head).__name__ for head in value.outputs] == ["Classify"] and value.outputs[0].classes == 9
    work.fit(value)
    network = value.build()
    load_weights(network, folder)
    work.loss(network, work.batch(0, 4, 0), "auto").backward()
    without = {name for name, weight in network.named_parameters() if weight.grad is None}
    assert not without


@pytest.mark.spec(66)
def test_a_run_begins_from_another(run):
    """Through the recipe: at no learning rate to speak of, the new run's body is still the old one's."""
    folder, trained = run
    recipe = Recipe(
        member="bert",
        size="tiny",
        task=Classify(),
        model={"context": 32},
        init_from=str(folder),
        run=Run(steps=1, batch=4, evaluate=0, examples=4, device="cpu"),
        optim=Optim(lr=1e-12, weight_decay=0.0),
    )
    tuned = train(recipe)
    assert tuned.work.tokenizer.key == trained.work.tokenizer.key
    assert len(tuned.network.value.outputs) == 1
    old = trained.network.state_dict()
    for name, weight in tuned.network.state_dict().items():
        if not name.startswith("outputs."):
            assert torch.allclose(weight, old[name], atol=1e-9)


def test_what_does_not_fit_is_named_and_nothing_is_taken(run):
    folder, _ = run
    for changes, message in [
        ({"context": 64}, r"position\.table\.weight is \(32, 64\), not \(64, 64\)"),
        ({"layers": 3}, r"body\.layers\.2\.\S+ is not in it"),
        ({"layers": 1}, r"body\.layers\.1\.\S+ is left over"),
        ({"vocabulary": 301}, r"embed\.table\.weight is \(300, 64\), not \(301, 64\)"),
    ]:
        network = build("bert", "tiny", **({"vocabulary": 300, "context": 32} | changes))
        before = {name: weight.clone() for name, weight in network.state_dict().items()}
        with pytest.raises(ValueError, match=rf"does not fit the model: .*{message}.*give the new model the member"):
            load_weights(network, folder)
        assert all(torch.equal(weight, before[name]) for name, weight in network.state_dict().items())


def test_a_pair_with_a_shared_embedding_is_taken_whole(tmp_path):
    torch.manual_seed(0)
    one = build("transformer", "tiny")
    save(one, tmp_path / "pair")
    other = build("transformer", "tiny")
    load_weights(other, tmp_path / "pair")
    for name, weight in other.state_dict().items():
        assert torch.equal(weight, one.state_dict()[name])
    assert other.decoder.embed is other.encoder.embed


def test_folders_without_weights_are_named(run, tmp_path):
    network = build("bert", "tiny")
    with pytest.raises(ValueError, match="has no weights to begin from; give a run's folder"):
        load_weights(network, tmp_path)
    saved = save(network, tmp_path / "saved")
    (saved / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be read"):
        load_weights(network, saved)
    assert everyformer.save is save
