"""A config.json with any value in any of its fields is read, or refused by a ValueError of one line."""

from __future__ import annotations

import json

import pytest
import transformers

from everyformer.train.imported import read_folder
from tests.peers.test_import import BERT, word_pieces

VALUES = [0, -1, 2.5, 1e308, "x", None, [], {}, True, 10**20, 2**31 - 1]
DECODER = {
    "vocab_size": 97, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "num_hidden_layers": 2,
    "intermediate_size": 24, "max_position_embeddings": 32,
}  # fmt: skip
MODELS = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**DECODER)),
    "gemma2": lambda: transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**DECODER)),
    "bert": lambda: transformers.BertForSequenceClassification(transformers.BertConfig(**BERT, num_labels=3)),
    "electra": lambda: transformers.ElectraForPreTraining(transformers.ElectraConfig(**BERT, embedding_size=8)),
}


@pytest.mark.parametrize("name", MODELS)
def test_any_value_of_any_field_is_read_or_refused_in_one_line(name, tmp_path):
    MODELS[name]().save_pretrained(tmp_path)
    if name in ("bert", "electra"):
        word_pieces().save(str(tmp_path / "tokenizer.json"))
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    for field in config:
        for value in VALUES:
            path.write_text(json.dumps(config | {field: value}))
            try:
                read_folder(tmp_path)
            except ValueError as error:  # anything else fails the test
                assert "\n" not in str(error), (field, value)


def test_the_field_that_does_not_fit_is_named(tmp_path):
    MODELS["gemma2"]().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for changes, reason in (
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0"),
        ({"num_hidden_layers": 3}, "num_hidden_layers is 3, but layer_types has 2 layers"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "do not take turns in one rhythm"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | changes))
        with pytest.raises(ValueError, match=reason):
            read_folder(tmp_path)
