"""T5, ALBERT and ELECTRA equal Hugging Face transformers on the same random weights, and have as many parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AlbertConfig,
    AlbertForMaskedLM,
    AlbertForPreTraining,
    ElectraConfig,
    ElectraForMaskedLM,
    ElectraForPreTraining,
    T5Config,
    T5ForConditionalGeneration,
)

import everyformer
from everyformer import Masked, SideInputs
from everyformer.family.names_encoder import HEADS, ROWS
from everyformer.family.table import parameters

T5_TINY = {"d_model": 32, "d_kv": 6, "num_heads": 4, "num_layers": 2, "d_ff": 40, "vocab_size": 97}


def t5_model(gated: bool = False, **fields: Any) -> Any:
    """The configs of v1.1 ask for an output of its own, which this version makes of the shared table if the file has none."""
    form = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False} if gated else {}
    theirs = T5ForConditionalGeneration(T5Config(**fields, **form, decoder_start_token_id=0))
    if gated:
        theirs.lm_head.weight = torch.nn.Parameter(theirs.lm_head.weight.detach().clone())
    return theirs


def noisy(theirs: Any) -> Any:
    """Noise is added, so that no weight is 0 or 1."""
    with torch.no_grad():
        for weight in theirs.parameters():
            weight.add_(0.2 * torch.randn_like(weight))
    return theirs.double().eval()


def renamed(theirs: Any, name: str, folder: Any, layers: int) -> dict[str, Tensor]:
    """Saves their weights as a published file, and returns them under our names, by the rows of names_encoder.py."""
    theirs.save_pretrained(folder)
    state = {key.removeprefix(f"{name}."): x for key, x in load_file(folder / "model.safetensors").items()}
    rows = dict(ROWS[name])
    heads = [of_head for key, of_head in HEADS[name].items() if key in state]
    for number, of_head in enumerate(heads):
        rows |= {f"outputs.{number}.{ours}": theirs for ours, theirs in of_head.items()}
    if "embeddings_project.weight" not in state and name == "electra":
        del rows["widen.*"]
    found = {}
    for ours, names in rows.items():
        for n in range(layers if "{n}" in ours else 1):
            for kind in ("weight", "bias") if "*" in ours else ("",):
                row = [one.replace("{n}", str(n)).replace("*", kind) for one in (ours, *names)]
                found[row[0]] = torch.cat([state[one] for one in row[1:]])
    return found


def error(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return (a - b).abs().max().item()


def tokens(batch: int = 3, length: int = 11, seed: int = 1) -> Tensor:
    return torch.randint(97, (batch, length), generator=torch.Generator().manual_seed(seed))


def t5_pair(gated: bool, folder: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    theirs = noisy(t5_model(gated, **T5_TINY))
    sizes = {"width": 32, "heads": 4, "head_width": 6, "layers": 2, "hidden": 40, "vocabulary": 97, "gated": gated}
    theirs.save_pretrained(folder)
    ours = everyformer.from_pretrained(folder)
    assert ours.value == everyformer.member("t5", "tiny", **sizes)
    return theirs, ours


@pytest.mark.parametrize("gated", [False, True], ids=["v1.0", "v1.1"])
def test_the_logits_of_t5_are_equal(gated, tmp_path):
    """Also with padding in the source, and over distances that share a bucket. Their norms and softmax are in float32 always."""
    theirs, ours = t5_pair(gated, tmp_path)
    source_BS, target_BT = tokens(3, 150), tokens(3, 140, 2)
    visible_BS = torch.arange(150) < torch.tensor([[150], [40], [9]])
    with torch.no_grad():
        expected = theirs(source_BS, attention_mask=visible_BS.long(), decoder_input_ids=target_BT).logits
        assert error(ours(source_BS, target_BT, source_visible=visible_BS).logits, expected) < 5e-5 * expected.std()


@pytest.mark.parametrize("gated", [False, True], ids=["v1.0", "v1.1"])
def test_greedy_text_of_t5_is_equal(gated, tmp_path):
    theirs, ours = t5_pair(gated, tmp_path)
    theirs.generation_config.eos_token_id = None
    source_BS = tokens(8, 12)
    expected = theirs.generate(source_BS, max_new_tokens=12, do_sample=False).tolist()
    with torch.no_grad():
        encoder_output = ours.encode(source_BS)
    options = {"temperature": 0, "encoder_output": encoder_output}
    assert len({token for row in expected for token in row}) > 5
    for cached in (True, False):
        assert everyformer.generate(ours.decoder, [[0]] * 8, 12, cached=cached, **options) == expected


T5_PUBLISHED = {  # the config.json of the published models
    "small": {"d_model": 512, "d_ff": 2048, "num_heads": 8, "num_layers": 6},
    "base": {"d_model": 768, "d_ff": 3072, "num_heads": 12, "num_layers": 12},
    "large": {"d_model": 1024, "d_ff": 4096, "num_heads": 16, "num_layers": 24},
    "3b": {"d_model": 1024, "d_ff": 16384, "d_kv": 128, "num_heads": 32, "num_layers": 24},
    "11b": {"d_model": 1024, "d_ff": 65536, "d_kv": 128, "num_heads": 128, "num_layers": 24},
    "v1.1-small": {"d_model": 512, "d_ff": 1024, "num_heads": 6, "num_layers": 8, "gated": True},
    "v1.1-base": {"d_model": 768, "d_ff": 2048, "num_heads": 12, "num_layers": 12, "gated": True},
    "v1.1-large": {"d_model": 1024, "d_ff": 2816, "num_heads": 16, "num_layers": 24, "gated": True},
    "v1.1-xl": {"d_model": 2048, "d_ff": 5120, "num_heads": 32, "num_layers": 24, "gated": True},
    "v1.1-xxl": {"d_model": 4096, "d_ff": 10240, "num_heads": 64, "num_layers": 24, "gated": True},
}


def count(theirs: Any) -> int:
    return sum(weight.numel() for weight in theirs.parameters())


@pytest.mark.parametrize("size", T5_PUBLISHED)
def test_parameters_of_t5_are_those_of_transformers(size):
    with torch.device("meta"):
        theirs = t5_model(**T5_PUBLISHED[size], vocab_size=32128)
    assert parameters(everyformer.member("t5", size)) == count(theirs)


SMALL = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 3, "intermediate_size": 48, "vocab_size": 97}
SMALL |= {"max_position_embeddings": 40}
OURS = {"width": 32, "heads": 4, "layers": 3, "hidden": 48, "vocabulary": 97, "context": 40, "dropout": 0.0}


def call(batch: int = 3, length: int = 11) -> tuple[Tensor, dict[str, Tensor], dict[str, Any]]:
    """Tokens, and the options of both libraries: padding on the right, and two segments."""
    visible_BT = torch.arange(length) < torch.tensor([[11], [4], [7]])
    segment_BT = (torch.arange(length) > 2).long().expand(batch, -1) * visible_BT
    theirs = {"attention_mask": visible_BT.long(), "token_type_ids": segment_BT}
    return tokens(batch, length), theirs, {"visible": visible_BT, "side_inputs": SideInputs(segments=segment_BT)}


@pytest.mark.parametrize("kind", [AlbertForPreTraining, AlbertForMaskedLM])
def test_the_logits_of_albert_are_equal(kind, tmp_path):
    torch.manual_seed(0)
    theirs = noisy(kind(AlbertConfig(**SMALL, embedding_size=12)))
    value = everyformer.member("albert", "tiny", **OURS, embed_width=12)
    value = value if kind is AlbertForPreTraining else replace(value, outputs=value.outputs[:1])
    ours = value.build().double().eval()
    ours.load_state_dict(renamed(theirs, "albert", tmp_path, 1))
    token_BT, their_options, our_options = call()
    with torch.no_grad():
        expected, output = theirs(token_BT, **their_options), ours(token_BT, **our_options)
    visible_BT = our_options["visible"]
    if kind is AlbertForMaskedLM:
        assert error(output.logits[visible_BT], expected.logits[visible_BT]) < 1e-10
    else:
        assert error(output.logits[0][visible_BT], expected.prediction_logits[visible_BT]) < 1e-10
        assert error(output.logits[1], expected.sop_logits) < 1e-10


@pytest.mark.parametrize("embed_width", [12, None])
@pytest.mark.parametrize("kind", [ElectraForPreTraining, ElectraForMaskedLM])
def test_the_logits_of_electra_are_equal(kind, embed_width, tmp_path):
    """The discriminator, and the generator as a model of its own; with a narrow and a wide embedding."""
    torch.manual_seed(0)
    theirs = noisy(kind(ElectraConfig(**SMALL, embedding_size=embed_width or 32)))
    value = everyformer.member("electra", "tiny", **OURS, embed_width=embed_width, generator=None)
    value = value if kind is ElectraForPreTraining else replace(value, outputs=(Masked(width=embed_width),))
    ours = value.build().double().eval()
    ours.load_state_dict(renamed(theirs, "electra", tmp_path, 3))
    token_BT, their_options, our_options = call()
    with torch.no_grad():
        expected, output = theirs(token_BT, **their_options).logits, ours(token_BT, **our_options).logits
    output = output[..., 0] if kind is ElectraForPreTraining else output
    assert error(output[our_options["visible"]], expected[our_options["visible"]]) < 1e-10


ALBERT_PUBLISHED = {  # the config.json of the published models
    "base": {"hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 12, "intermediate_size": 3072},
    "large": {"hidden_size": 1024, "num_attention_heads": 16, "num_hidden_layers": 24, "intermediate_size": 4096},
    "xlarge": {"hidden_size": 2048, "num_attention_heads": 16, "num_hidden_layers": 24, "intermediate_size": 8192},
    "xxlarge": {"hidden_size": 4096, "num_attention_heads": 64, "num_hidden_layers": 12, "intermediate_size": 16384},
}
ELECTRA_PUBLISHED = {
    "small": {"hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024, "embedding_size": 128},
    "base": {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072, "embedding_size": 768},
    "large": {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096, "embedding_size": 1024},
}


@pytest.mark.parametrize("size", ALBERT_PUBLISHED)
def test_parameters_of_albert_are_those_of_transformers(size):
    with torch.device("meta"):
        theirs = AlbertForPreTraining(AlbertConfig(**ALBERT_PUBLISHED[size], embedding_size=128))
    assert parameters(everyformer.member("albert", size)) == count(theirs)


@pytest.mark.parametrize("size", ELECTRA_PUBLISHED)
def test_parameters_of_electra_are_those_of_transformers(size):
    """The generator has the heads, the width and the hidden layer of the paper's share; it shares the embedding with the discriminator."""
    layers, value = 24 if size == "large" else 12, everyformer.member("electra", size)
    fields = ELECTRA_PUBLISHED[size] | {"num_hidden_layers": layers}
    smaller = {
        name: round(fields[name] * (1 / 3 if size == "base" else 1 / 4)) for name in fields if "ing_size" not in name
    }
    with torch.device("meta"):
        discriminator = ElectraForPreTraining(ElectraConfig(**fields))
        generator = ElectraForMaskedLM(ElectraConfig(**fields | smaller | {"num_hidden_layers": layers}))
    assert parameters(replace(value, generator=None)) == count(discriminator)
    assert parameters(value.generator) == count(generator)
    shared = count(generator.electra.embeddings)
    assert parameters(value) == count(discriminator) + count(generator) - shared
