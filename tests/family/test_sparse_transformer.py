"""The Sparse Transformer: its attention is Attend(X, S), its sets reach every earlier position, a hundred layers learn."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from everyformer import ByHead, Causal, Context, build, fixed, member, strided
from everyformer.attention.attend import attend
from everyformer.family.sparse_transformer import (
    column_groups,
    fixed_sets,
    interleaved,
    merged,
    split_by_head,
    strided_sets,
)
from everyformer.train.learner import set_checkpoint_segments
from tests.network import close, randn, ready
from tests.spec import sparse

STRIDE, COLUMNS, LENGTH = 4, 2, 14
KINDS = {"strided": strided(STRIDE), "fixed": fixed(STRIDE, COLUMNS)}
USES = {"interleaved": interleaved, "merged": merged, "by_head": split_by_head}


def sets_of(kind: str, head: int) -> list[tuple[set[int], set[int]]]:
    """A1 and A2 of each position; with `fixed`, heads have columns of their own."""
    at = range(LENGTH)
    return [sparse.strided(i, STRIDE) if kind == "strided" else sparse.fixed(i, STRIDE, COLUMNS, head) for i in at]


both = pytest.mark.parametrize("kind", KINDS)
all_uses = pytest.mark.parametrize("uses", USES)


def small(kind: str, uses: str, **changes):
    numbers = {"width": 8, "heads": 2, "stride": STRIDE, "context": LENGTH, "dropout": 0.0}
    sets = strided_sets(STRIDE) if kind == "strided" else fixed_sets(STRIDE, COLUMNS, 1 if uses == "by_head" else 2)
    return build("sparse-transformer", "tiny", patterns=USES[uses](*sets), **(numbers | changes))


@pytest.mark.spec(103, 108)
@both
@all_uses
def test_attention_is_attend_over_the_sets(kind, uses):
    """Layer r of p = 2 has the sets r mod p; or every head has the union; or head h has the sets h mod p."""
    network, x_TD = ready(small(kind, uses)), randn(LENGTH, 8)
    first, second = zip(*sets_of(kind, 0), strict=True)
    _, other = zip(*sets_of(kind, 1), strict=True)
    for number, layer in enumerate(network.body.layers):
        sets_of_heads = {
            "interleaved": [[first] * 2, [second, other]][number],
            "merged": [sparse.merged(first, second), sparse.merged(first, other)],
            "by_head": [first, second],  # one head has the second sets
        }
        heads = layer.sublayers[0].heads
        q, k, v = (
            (w.chunk(2), b.chunk(2)) for w, b in zip(heads.qkv.weight.chunk(3), heads.qkv.bias.chunk(3), strict=True)
        )
        one = torch.cat((x_TD, torch.ones(LENGTH, 1, dtype=x_TD.dtype)), dim=1)  # the biases as one more input
        outputs: list[Tensor] = []
        sets: list[set[int]]
        for h, sets in enumerate(sets_of_heads[uses]):
            w_q, w_k, w_v = (torch.cat((weight[h], bias[h][:, None]), dim=1) for weight, bias in (q, k, v))
            outputs.append(sparse.attend(one, sets, w_q, w_k, w_v))
        y_BTD, _ = layer.sublayers[0](x_TD[None], Context.of(LENGTH, LENGTH, x_TD.device), None)
        close(y_BTD[0], torch.cat(outputs, dim=1) @ heads.out.weight.T + heads.out.bias)


@pytest.mark.spec(107)
@both
@pytest.mark.parametrize("length", [1, 5, 16, 37])
def test_every_earlier_position_is_reached_in_two_steps(kind, length):
    """For all j <= i: j in A1 of a and a in A2 of i for some a, or one of the two steps stays at its position (the residual)."""
    stay = torch.eye(length)
    near, far = (one.mask(length)[0].float() for one in KINDS[kind])
    for first, second in ((near, far), (near.logical_or(far).float(),) * 2):
        assert torch.equal(((second + stay) @ (first + stay)) > 0, torch.ones(length, length).tril() > 0)
    assert length < 2 * STRIDE or not torch.equal(near.logical_or(far), torch.ones(length, length).tril() > 0)


@pytest.mark.spec(107, 108)
@both
@all_uses
def test_two_layers_depend_on_every_earlier_position_and_no_later_one(kind, uses):
    """Measured by gradients through the member. Split by head, each of the two layers has both kinds of sets."""
    network = ready(small(kind, uses))
    token_BT = torch.arange(LENGTH)[None] % 7
    start = network.embed(token_BT).detach().requires_grad_()
    network.embed.forward = lambda tokens: start
    hidden = network(token_BT).hidden
    for i in range(LENGTH):
        (gradient,) = torch.autograd.grad(hidden[0, i].square().sum(), start, retain_graph=True)
        assert (gradient[0].abs().sum(-1) > 0).tolist() == [j <= i for j in range(LENGTH)]


@pytest.mark.spec(109)
@pytest.mark.parametrize("kind, factor", [("strided", 1.5), ("fixed", 1.0)])
def test_there_are_n_sqrt_n_elements(kind, factor):
    """With l = sqrt(n) and c = 1 as many as the paper's sets have: strided l and on average l / 2 more keys for each query, fixed
    l / 2 and l / 2; so 3/2 n sqrt(n) and n sqrt(n) as n grows."""
    for root in (2, 4, 8, 16, 32):
        n = root**2
        near, far = strided(root) if kind == "strided" else fixed(root, 1)
        elements = (near | far).density(n) * n**2
        if root <= 8:
            sets = [sparse.strided(i, root) if kind == "strided" else sparse.fixed(i, root, 1) for i in range(n)]
            assert round(elements) == sum(len(one | two) for one, two in sets)
        else:
            assert abs(elements / n**1.5 - factor) < 1.5 / root


@pytest.mark.spec(109)
@both
def test_the_blocked_kernel_computes_n_sqrt_n_scores(kind):
    """Counted from the products that run. Four times the length costs at most 8 times as much; dense attention 16 times as much."""

    def scores(root: int) -> float:
        near, far = strided(root) if kind == "strided" else fixed(root, 1)
        q, k, v = (torch.randn(1, 1, root**2, 4) for _ in range(3))
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        fused = {flash: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v)}
        with FlopCounterMode(display=False, custom_mapping=fused) as counter:
            attend(q, k, v, near | far, kernel="blocked")
        return counter.get_total_flops() / (2 * 2 * 4)  # a score takes two products of 4 features

    assert scores(64) < 8 * scores(32)
    assert 0.5 * 64**3 < scores(64) < 5 * 64**3  # of 64**4 pairs


def patterns_of(**changes):
    value = member("sparse-transformer", "tiny", stride=STRIDE, columns=COLUMNS, **changes)
    return [layer.sublayers[0].pattern for layer in value.body.layers]


def test_sets_are_interleaved_merged_or_split_by_head():  # eq. W23
    for kind, (near, far) in KINDS.items():
        sets = strided_sets(STRIDE) if kind == "strided" else fixed_sets(STRIDE, COLUMNS)
        for uses, patterns in {
            "interleaved": [near, far],
            "merged": [near | far],
            "by_head": [ByHead((near, far))],
        }.items():
            assert patterns_of(patterns=USES[uses](*sets)) == patterns
    (near, last), (_, before) = fixed(STRIDE, COLUMNS), fixed(STRIDE, COLUMNS, COLUMNS)
    for uses, patterns in {
        "interleaved": [near, ByHead((last, before))],
        "merged": [ByHead((near | last, near | before))],
        "by_head": [ByHead((near, last, near, before))],
    }.items():
        assert patterns_of(patterns=USES[uses](*fixed_sets(STRIDE, COLUMNS, groups=2))) == patterns
    with pytest.raises(ValueError, match="by_head assigns 2 patterns to 1 heads"):
        build("sparse-transformer", "tiny", heads=1, patterns=split_by_head(*strided_sets(STRIDE)))


def test_by_default_groups_of_heads_have_columns_of_their_own():
    (near, last), (_, before) = fixed(STRIDE, COLUMNS), fixed(STRIDE, COLUMNS, COLUMNS)
    assert patterns_of() == [ByHead((near | last, near | before))]
    assert patterns_of(heads=3, width=48) == [near | last]
    assert [column_groups(128, 32, heads) for heads in (1, 2, 6, 8)] == [1, 2, 3, 4]


def test_patterns_of_the_layers_are_read_from_text():
    assert patterns_of(patterns="causal") == [Causal()]
    near, far = strided(STRIDE)
    assert patterns_of(patterns=[str(near), str(far)]) == [near, far]
    with pytest.raises(ValueError, match=r"no pattern is named 'strided' .*did you mean stride"):
        member("sparse-transformer", patterns="strided(8)")


def test_sizes_that_the_paper_states():
    """Layers, width, heads, length, stride, width of the queries and of the net: the last two halved for CIFAR-10."""
    stated = {
        "enwik8": (30, 512, 8, 12_288, 128, 64, 2048),
        "cifar10": (128, 256, 2, 32 * 32 * 3, 96, 64, 512),
        "imagenet64": (48, 512, 16, 64 * 64 * 3, 128, 32, 2048),
    }
    for size, numbers in stated.items():
        value = member("sparse-transformer", size)
        layer, body, position = value.body.layers[0], value.body, value.position
        form = layer.sublayers[0].heads
        sizes = (body.num_layers, value.width, form.heads, math.prod(position.sizes), position.sizes[1], form.key_width)
        assert (*sizes, layer.sublayers[-1].hidden) == numbers


@pytest.mark.spec(110)
def test_weights_are_scaled_by_the_depth_at_initialization():
    """By 1 / sqrt(2 N) on the branches of N layers, so that the residual stream does not grow with the depth."""
    torch.manual_seed(0)
    shallow, deep = (small("fixed", "interleaved", layers=n, width=64, vocabulary=8) for n in (2, 32))
    ratios = [
        one.sublayers[index].get_submodule(name).weight.std() / two.sublayers[index].get_submodule(name).weight.std()
        for one, two in zip(shallow.body.layers, deep.body.layers, strict=False)
        for index, name in ((0, "heads.out"), (1, "out"))
    ]
    assert all(ratio.item() == pytest.approx(4, rel=0.1) for ratio in ratios)


@pytest.mark.spec(110)
def test_a_hundred_layers_learn_in_mixed_precision():
    """Eight steps in bfloat16 with recomputed activations, the first by the block-sparse kernel. Gradients have the same size in
    the first and the last layer. tests/device has 16,384 positions, and docs/results/claims.md both together."""
    torch.manual_seed(0)
    network = small("fixed", "interleaved", layers=104, width=16, vocabulary=8).train()
    set_checkpoint_segments(network, 13)
    optimizer = torch.optim.AdamW(network.parameters(), lr=2e-2, weight_decay=0.0)
    x = (torch.arange(4)[:, None] + torch.arange(9)) % 8
    losses: list[float] = []
    for _ in range(8):
        with torch.autocast("cpu", torch.bfloat16):
            logits = network(x[:, :-1], kernel="auto" if losses else "blocked").logits
        assert logits.dtype == torch.bfloat16
        loss = F.cross_entropy(logits.float().flatten(0, 1), x[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        if not losses:
            first, last = (network.body.layers[n].sublayers[-1].out.weight.grad.norm() for n in (0, -1))
            assert 0.5 < first / last < 2
        optimizer.step()
        losses.append(loss.item())
    assert abs(losses[0] - math.log(8)) < 0.1 and losses[-1] < losses[0] - 0.2
    assert all(p.isfinite().all() for p in network.parameters())
