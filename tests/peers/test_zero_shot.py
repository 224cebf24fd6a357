"""GPT-2 on a text that it was not trained on: bits per byte as transformers computes them, from the published formats of its files."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel, GPT2Tokenizer

from everyformer import build
from everyformer.data.synthetic import shakespeare
from everyformer.family.names import from_transformers
from everyformer.task import Language

CONTEXT, VOCABULARY = 24, 2256


@pytest.mark.spec(59, 67)
@pytest.mark.parametrize("stride", [1, 12, 24])
def test_zero_shot_bits_per_byte_are_those_of_transformers(stride, gpt2_files, tmp_path):
    """With random weights; the published ones would give the paper's number by the same path."""
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": CONTEXT, "vocab_size": VOCABULARY}
    theirs = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).double().eval()
    ours = build("gpt2", "tiny", width=32, heads=4, layers=2, context=CONTEXT, vocabulary=VOCABULARY).double()
    ours.load_state_dict(from_transformers("gpt2", theirs.state_dict()))

    text = shakespeare()[:900]
    (tmp_path / "text.txt").write_text(text)
    task = Language(tokenizer="gpt2", tokenizer_files=str(gpt2_files), stride=stride, valid=0.5, context=CONTEXT)
    data = task.open(str(tmp_path / "text.txt"))
    metrics = data.fit(ours.value).objective.evaluate(ours, "valid", None, "auto")

    names = {"vocab": str(gpt2_files / "encoder.json"), "merges": str(gpt2_files / "vocab.bpe")}
    held_out = bytes(data.text.splits["valid"]).decode()
    token_N = torch.tensor(GPT2Tokenizer(**names).encode(held_out))
    assert token_N.tolist() == data.splits["valid"].tolist() and len(token_N) > 100
    nats, scored = 0.0, 1
    while scored < len(token_N):  # each token once, from the window that ends `stride` tokens later than the last one
        end = min(len(token_N), max(scored + stride, CONTEXT + 1))
        token_T = token_N[max(0, end - CONTEXT - 1) : end]
        with torch.no_grad():
            logits_TV = theirs(token_T[None, :-1]).logits[0]
        new = end - scored
        nats += float(F.cross_entropy(logits_TV[-new:], token_T[-new:], reduction="sum"))
        scored = end
    counted = len(held_out.encode()) - len(
        GPT2Tokenizer(**names).decode(token_N[:1]).encode()
    )  # the first is not predicted
    assert metrics["targets"] == len(token_N) - 1
    assert metrics["bits_per_byte"] == pytest.approx(nats / math.log(2) / counted, rel=1e-12)
