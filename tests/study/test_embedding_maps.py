"""Embeddings in a plane: the projection is that of the singular value decomposition, the labels are those of the tokens."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import everyformer as ef
from everyformer.data.tokenizer import ByteTokenizer
from everyformer.study.embedding_maps import draw, embedding_maps, principal_plane


@pytest.mark.parametrize("shape", [(40, 7), (5, 12), (6, 1), (1, 4)])
def test_the_plane_is_that_of_the_largest_singular_values(shape):
    torch.manual_seed(0)
    vector_ND = torch.randn(shape)
    point_N2, share = principal_plane(vector_ND)
    u_NR, s_R, _ = torch.linalg.svd((vector_ND - vector_ND.mean(0)).double(), full_matrices=False)
    wanted_NR = (u_NR * s_R)[:, :2].float()
    wanted_N2 = torch.nn.functional.pad(wanted_NR, (0, 2 - wanted_NR.shape[1]))
    torch.testing.assert_close(point_N2.abs(), wanted_N2.abs(), rtol=1e-4, atol=1e-5)
    wanted = [*(s_R**2 / s_R.square().sum().clamp(min=1e-30)).tolist(), 0.0][:2]
    assert share == pytest.approx(wanted, abs=1e-5)


def test_tokens_are_named_and_positions_are_in_order():
    network = ef.build("gpt2", "tiny")
    tokens, positions = embedding_maps(network, SimpleNamespace(tokenizer=ByteTokenizer()))
    assert (tokens.title, positions.title) == ("tokens", "positions")
    assert tokens.labels[65] == "A" and len(tokens.labels) == len(tokens.point_N2) == 256
    assert positions.in_order and not tokens.in_order and len(positions.labels) == network.limit
    assert torch.equal(positions.point_N2, principal_plane(network.position.table.weight.detach())[0])
    assert embedding_maps(network)[0].labels[65] == "65"  # without a tokenizer
    figure = draw([tokens, positions])
    written = {text.get_text() for text in figure.axes[0].texts}
    assert {"A", "z", r"\$", "\\n"} <= written and "\N{REPLACEMENT CHARACTER}" not in written


def test_names_stand_inside_the_axes_and_over_no_other_name():
    torch.manual_seed(0)
    figure = draw(embedding_maps(ef.build("gpt2", "tiny"), SimpleNamespace(tokenizer=ByteTokenizer())))
    for axes in figure.axes[:2]:
        boxes = [name.get_window_extent() for name in axes.texts]
        assert len(boxes) > 20
        assert all(axes.bbox.x0 <= box.x0 and box.x1 <= axes.bbox.x1 for box in boxes)
        assert all(axes.bbox.y0 <= box.y0 and box.y1 <= axes.bbox.y1 for box in boxes)
        assert all(box.count_overlaps(boxes) == 1 for box in boxes)  # with itself alone


def test_an_encoder_decoder_has_those_of_both_sides():
    titles = [one.title for one in embedding_maps(ef.build("transformer", "tiny"))]
    assert titles == ["encoder tokens", "encoder positions", "decoder positions"]  # the sides share their tokens
    with pytest.raises(ValueError, match="no embedding of tokens or positions; give a run that reads text"):
        embedding_maps(ef.build("graph-classifier", "tiny"))
