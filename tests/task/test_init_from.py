"""Fine-tuning: the weights of a pretrained model, its tokenizer, and a new output head."""

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
    """A short pretraining run with an EMA of its weights."""
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
def test_all_weights_except_output_heads_are_loaded(run, tmp_path, source):
    folder, trained = run
    folder = folder if source == "run" else save(trained.network, tmp_path / "saved")
    torch.manual_seed(1)
    network = build("bert", "tiny", vocabulary=300, context=32)
    before = {name: weight.clone() for name, weight in network.state_dict().items()}
    loaded = load_weights(network, folder)
    for name, weight in network.state_dict().items():
        if name.startswith("outputs."):
            assert name not in loaded and torch.equal(weight, before[name])
        else:
            assert name in loaded and torch.equal(weight, trained.network.state_dict()[name])
    assert {name.split(".")[0] for name in loaded} == {"embed", "position", "segments", "norm", "body"}


@pytest.mark.spec(66)
def test_every_weight_of_a_fine_tuned_model_has_a_gradient(run):
    """The tokenizer is that of the pretraining run."""
    folder, trained = run
    data = Classify(vocabulary=2000, context=32).open(None, folder)
    assert data.tokenizer.key == trained.task.data.tokenizer.key
    value = data.adapt(trained.network.value)
    assert [type(head).__name__ for head in value.outputs] == ["Classify"] and value.outputs[0].classes == 9
    task = data.fit(value)
    network = value.build()
    load_weights(network, folder)
    task.objective.loss(network, task.data.batch(0, 4, 0), "auto").backward()
    without = {name for name, weight in network.named_parameters() if weight.grad is None}
    assert not without


@pytest.mark.spec(66)
def test_a_run_is_initialized_from_another(run):
    """At a negligible learning rate the weights stay those of the old run."""
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
    assert tuned.task.data.tokenizer.key == trained.task.data.tokenizer.key
    assert len(tuned.network.value.outputs) == 1
    old = trained.network.state_dict()
    for name, weight in tuned.network.state_dict().items():
        if not name.startswith("outputs."):
            assert torch.allclose(weight, old[name], atol=1e-9)


def test_weights_that_do_not_fit_are_refused_by_name_and_none_is_loaded(run):
    folder, _ = run
    for changes, message in [
        ({"context": 64}, r"position\.table\.weight is \(32, 64\), not \(64, 64\)"),
        ({"layers": 3}, r"body\.layers\.2\.\S+ is not in it"),
        ({"layers": 1}, r"body\.layers\.1\.\S+ is not in the model"),
        ({"vocabulary": 301}, r"embed\.table\.weight is \(300, 64\), not \(301, 64\)"),
    ]:
        network = build("bert", "tiny", **({"vocabulary": 300, "context": 32} | changes))
        before = {name: weight.clone() for name, weight in network.state_dict().items()}
        with pytest.raises(ValueError, match=rf"do not fit the model: .*{message}.*give the new model the member"):
            load_weights(network, folder)
        assert all(torch.equal(weight, before[name]) for name, weight in network.state_dict().items())


def test_an_encoder_decoder_with_a_shared_embedding_is_loaded(tmp_path):
    torch.manual_seed(0)
    one = build("transformer", "tiny")
    save(one, tmp_path / "pair")
    other = build("transformer", "tiny")
    load_weights(other, tmp_path / "pair")
    for name, weight in other.state_dict().items():
        assert torch.equal(weight, one.state_dict()[name])
    assert other.decoder.embed.table.weight is other.encoder.embed.table.weight


def test_folders_without_weights_are_refused(run, tmp_path):
    network = build("bert", "tiny")
    with pytest.raises(ValueError, match="has no weights to load; give a run's folder"):
        load_weights(network, tmp_path)
    saved = save(network, tmp_path / "saved")
    (saved / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be read"):
        load_weights(network, saved)
    assert everyformer.save is save
