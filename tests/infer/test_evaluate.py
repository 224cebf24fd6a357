"""Evaluation: the sum over windows equals the literal loop, for every stride, batch and length of text."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from everyformer import Classify, Halt, Language, Learned, PreNorm, Repeat, Span, Stack, generate
from everyformer.infer import evaluate
from everyformer.infer.estimate import Estimate
from everyformer.infer.evaluate import adaptive_metrics, bits_per_byte, mean_steps, perplexity, window_nll
from everyformer.network import linear_cross_entropy
from everyformer.study.spans import spans
from tests.infer import spec
from tests.network import VOCABULARY, model, ready

HEAD, WINDOW = (Language(tied=False, bias=True),), 8
VALUE = model(position=Learned(WINDOW), outputs=HEAD)
TEXT = np.random.default_rng(0).integers(0, VOCABULARY, 40)


@pytest.fixture(scope="module")
def literal():
    """A network, and the literal sum with every log P computed once."""
    network, known = ready(VALUE), dict[tuple[int, ...], list[float]]()

    @torch.no_grad()
    def log_p(text: tuple[int, ...]) -> list[float]:
        if text not in known:
            known[text] = network(torch.tensor([text])).logits[0, -1].log_softmax(-1).tolist()
        return known[text]

    return network, lambda text, stride: spec.window_nll(log_p, text.tolist(), WINDOW, stride)


@pytest.mark.spec(56, 59)
@pytest.mark.parametrize("stride", [1, 3, WINDOW // 2, 5, 7, WINDOW])
@pytest.mark.parametrize("length", [2, 5, WINDOW, WINDOW + 1, WINDOW + 2, 2 * WINDOW + 1, 30, 40])
def test_the_sum_equals_the_literal_loop(literal, length, stride):
    network, expected = literal
    for batch in (1, 2, 3, 32, None):
        total, count = window_nll(network, TEXT[:length], WINDOW, stride, batch=batch)
        assert count == length - 1
        assert math.isclose(total, expected(TEXT[:length], stride), rel_tol=1e-12)


def test_perplexity_overflows_to_infinity():
    assert perplexity(2 * math.log(5), 2) == pytest.approx(5)
    assert perplexity(709, 1) == math.exp(709) < math.inf == perplexity(710, 1)
    assert perplexity(1e6, 2) == math.inf and math.isnan(perplexity(math.nan, 2))


@pytest.mark.spec(56)
def test_stride_1_gives_every_target_a_full_window(literal):
    network, _ = literal
    total = 0.0
    for target in range(1, len(TEXT)):
        window = torch.tensor(TEXT[max(0, target - WINDOW) : target])[None]
        total -= network(window).logits[0, -1].log_softmax(-1)[TEXT[target]].item()
    assert math.isclose(window_nll(network, TEXT, WINDOW, 1)[0], total, rel_tol=1e-12)


@pytest.mark.parametrize("kind", [np.uint8, np.uint16, np.uint32, np.int64])
def test_tokens_may_have_any_integer_type_and_be_memory_mapped(literal, kind, tmp_path):
    network, expected = literal
    TEXT.astype(kind).tofile(tmp_path / "tokens")
    mapped = np.memmap(tmp_path / "tokens", dtype=kind, mode="r")
    assert math.isclose(window_nll(network, mapped, WINDOW, 3)[0], expected(TEXT, 3), rel_tol=1e-12)


def test_progress_counts_the_targets_scored(literal):
    network, _ = literal
    for stride in (1, 5, WINDOW):
        calls: list[tuple[int, int]] = []
        window_nll(
            network,
            TEXT,
            WINDOW,
            stride,
            batch=4,
            estimate=Estimate(lambda done, of, calls=calls: calls.append((done, of))),
        )
        done = [one for one, _ in calls]
        assert done == sorted(set(done)) and calls[-1] == (39, 39) and {of for _, of in calls} == {39}


def test_every_call_has_whole_windows_and_no_padding(literal):
    """Stride 1 on 40 tokens is 32 windows, in batches of at most 10."""
    network, _ = literal
    shapes: list[tuple[int, ...]] = []
    handle = network.body.register_forward_pre_hook(lambda module, arguments: shapes.append(arguments[0].shape))
    window_nll(network, TEXT, WINDOW, 1, batch=10)
    handle.remove()
    assert sum(shape[0] for shape in shapes) == 32
    assert all(shape[1] == WINDOW for shape in shapes) and [shape[0] for shape in shapes] == [1, 10, 10, 10, 1]


def test_by_default_a_call_has_as_many_windows_as_its_hidden_states_allow_and_one_at_least(literal, monkeypatch):
    """The limit depends on the device."""
    network, shapes, size = literal[0], list[tuple[int, ...]](), WINDOW * 8
    monkeypatch.setattr(evaluate, "MAX_HIDDEN", 20 * size)
    handle = network.body.register_forward_pre_hook(lambda module, arguments: shapes.append(arguments[0].shape))
    for most, sizes in ((12 * size + 7, [1, 12, 12, 7]), (1, [1] * 32)):
        shapes.clear()
        monkeypatch.setattr(evaluate, "MAX_CPU_HIDDEN", most)
        window_nll(network, TEXT, WINDOW, 1)
        assert [shape[0] for shape in shapes] == sizes
    handle.remove()
    assert [evaluate._fitting(window, 8, torch.device("cuda")) for window in (WINDOW, 21 * WINDOW)] == [20, 1]


def test_logits_are_computed_of_new_targets_alone_and_never_whole(literal, monkeypatch):
    network, expected = literal
    computed: list[int] = []

    def logits(self):
        computed.append(len(self.hidden))
        return linear_cross_entropy.F.linear(self.hidden, self.weight_VD, self.bias_V)

    monkeypatch.setattr(linear_cross_entropy.LogitMap, "logits", logits)
    monkeypatch.setattr(linear_cross_entropy, "CHUNK_ON_CPU", 6 * VOCABULARY)
    total, count = window_nll(network, TEXT, WINDOW, 4, batch=3)
    assert sum(computed) == count == 39 and max(computed) <= 6
    monkeypatch.undo()
    assert math.isclose(total, expected(TEXT, 4), rel_tol=1e-12)


def test_dropout_is_off_and_the_training_mode_is_restored(literal):
    network = ready(model(position=Learned(WINDOW), outputs=HEAD, residual=PreNorm(dropout=0.5)))
    expected = window_nll(network, TEXT, WINDOW, 4)
    assert window_nll(network.train(), TEXT, WINDOW, 4) == expected
    assert network.training and torch.is_grad_enabled()


def test_among_several_heads_the_language_head_is_scored():
    network = ready(model(position=Learned(WINDOW), outputs=(Classify(3), *HEAD)))
    total, _ = window_nll(network, TEXT[:5], WINDOW, WINDOW)
    log_TV = network(torch.tensor(TEXT[:4])[None]).logits[1][0].log_softmax(-1)
    assert math.isclose(total, -sum(log_TV[t, TEXT[t + 1]].item() for t in range(4)), rel_tol=1e-12)


def test_windows_may_move_by_all_targets_that_follow_a_fixed_prefix_and_no_farther():
    """The first 2 targets of a window are in a prefix of 3 tokens; those of the text are not scored."""
    network = ready(model("causal | prefix(3)", position=Learned(WINDOW), outputs=HEAD))
    total, count = window_nll(network, TEXT[:15], WINDOW, WINDOW - 2)
    expected = 0.0
    for start in (0, WINDOW - 2):
        log_TV = network(torch.tensor(TEXT[start : start + WINDOW])[None]).logits[0].log_softmax(-1)
        expected -= sum(log_TV[t, TEXT[start + t + 1]].item() for t in range(2, WINDOW))
    assert count == 2 * (WINDOW - 2) and math.isclose(total, expected, rel_tol=1e-12)
    with pytest.raises(ValueError, match="give a stride of at most 6"):
        window_nll(network, TEXT[:15], WINDOW, WINDOW - 1)


@pytest.mark.spec(59)
def test_a_uniform_model_needs_log2_of_its_vocabulary():
    network = ready(VALUE)
    with torch.no_grad():
        for weight in network.outputs.parameters():
            weight.zero_()
    total, count = window_nll(network, TEXT, WINDOW, 4)
    assert math.isclose(bits_per_byte(total, count), math.log2(VOCABULARY), rel_tol=1e-12)


@pytest.mark.spec(59, 60)
def test_the_score_of_a_generated_text_equals_its_log_probability():
    """Generation and evaluation agree."""
    network, log_p = ready(VALUE), 0.0
    text = generate(network, [[3]], WINDOW - 1, temperature=0)[0]
    for end in range(1, WINDOW):
        log_p += network(torch.tensor([text[:end]])).logits[0, -1].log_softmax(-1).max().item()
    assert math.isclose(window_nll(network, np.array(text), WINDOW, WINDOW)[0], -log_p, rel_tol=1e-12)


@pytest.mark.parametrize(
    "text, window, stride, batch, remedy",
    [
        (TEXT, 8, 0, None, "a stride of 1 to 8"),
        (TEXT, 8, 9, None, "a stride of 1 to 8"),
        (TEXT[:1], 8, 4, None, "at least 2"),
        (TEXT, 8, 4, 0, "1 or more"),
        (TEXT, 16, 4, None, "at most 8 tokens"),
    ],
)
def test_bad_values_are_refused_with_the_remedy(literal, text, window, stride, batch, remedy):
    with pytest.raises(ValueError, match=remedy):
        window_nll(literal[0], text, window, stride, batch=batch)


def test_repeated_layers_report_their_spans_at_every_step():
    layers = model(score_mods=(Span(6, 2),), outputs=HEAD, layers=2).body.layers
    once, three_times = (
        spans(ready(replace(model(outputs=HEAD), body=body)), TEXT)
        for body in (Stack(1, layers, PreNorm()), Repeat(3, layers, PreNorm()))
    )
    assert three_times.each == once.each * 3 and three_times.keys == pytest.approx(once.keys)
    outside = 2 * VOCABULARY * 8  # the output head is not repeated
    assert three_times.flops - outside == 3 * (once.flops - outside)


def test_the_probed_text_is_no_longer_than_the_models_positions():
    body = Halt(3, VALUE.body.layers, PreNorm())
    network = ready(replace(VALUE, body=body))
    assert 1 <= adaptive_metrics(network, TEXT)["steps_per_token"] <= 3


def test_the_steps_of_a_token_are_those_with_a_weight():
    halts = [torch.tensor([[[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]]), torch.tensor([[[0.2, 0.3, 0.5], [0.9, 0.1, 0.0]]])]
    assert mean_steps(halts) == (2 + 1 + 3 + 2) / 4
    assert mean_steps(halts[:1], torch.tensor([[False, True]])) == 1
