"""Positions against equations 10 and 11 of source T and Vaswani's sinusoids, and their behaviour past their length."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch

from everyformer import (
    Axial,
    Cache,
    Classify,
    Concatenated,
    Grid,
    JointMlp,
    Language,
    Learned,
    OneHot,
    Rotary,
    SeparateMlp,
    SideInputs,
    Sinusoidal,
    TimePosition,
    Tokens,
)
from everyformer.network.legal import illegal_reasons
from tests.network import close, model, placed, randn, ready, tokens
from tests.spec import network as spec
from tests.spec.image import block_raster

WIDTH, LENGTH = 8, 6
PLACES = torch.arange(LENGTH)[None]


def sin_cos(positions, width: int) -> torch.Tensor:
    return torch.tensor([[spec.sinusoid(k, width) for k in row] for row in positions.tolist()], dtype=torch.float64)


@pytest.mark.spec(31)
def test_one_hot_is_the_token_and_its_unit_vector():
    x_BTC = randn(2, LENGTH, 3)
    found = Concatenated(OneHot(7), 7).build(10)(x_BTC, PLACES)
    literal = [[torch.cat((x_BTC[b, i], spec.unit(i, 7))) for i in range(LENGTH)] for b in range(2)]
    close(found, torch.stack([torch.stack(row) for row in literal]), 1e-300)


@pytest.mark.spec(32)
def test_joint_mlp_is_equation_10():
    x_BTD, module = randn(2, LENGTH, WIDTH), ready(JointMlp(9, 5).build(WIDTH))
    weights = module.x.weight.T, module.e.weight, module.zx.weight.T
    literal = [[spec.joint_mlp(x, k, *weights) for k, x in enumerate(row)] for row in x_BTD]
    close(module(x_BTD, PLACES), torch.stack([torch.stack(row) for row in literal]))


@pytest.mark.spec(33)
def test_separate_mlp_is_equation_11():
    x_BTD, module = randn(2, LENGTH, WIDTH), ready(SeparateMlp(9, 5).build(WIDTH))
    weights = module.x.weight.T, module.e.weight, module.zx.weight.T, module.ze.weight.T
    literal = [[spec.separate_mlp(x, k, *weights) for k, x in enumerate(row)] for row in x_BTD]
    close(module(x_BTD, PLACES), torch.stack([torch.stack(row) for row in literal]))


@pytest.mark.spec(34)
def test_sinusoids_are_the_papers_and_start_at_position_0():
    table = Sinusoidal().build_table(WIDTH)
    close(table(PLACES), sin_cos(PLACES, WIDTH))
    assert table(PLACES)[0, 0].tolist() == [0, 1] * (WIDTH // 2)


@pytest.mark.spec(34)
def test_the_two_layouts_are_a_permutation_of_the_features():
    order = [*range(0, WIDTH, 2), *range(1, WIDTH, 2)]
    interleaved, halves = (Sinusoidal(layout).build_table(WIDTH)(PLACES) for layout in ("interleaved", "halves"))
    close(halves, interleaved[..., order], 1e-300)
    close(halves[..., : WIDTH // 2], interleaved[..., 0::2], 1e-300)  # all sines first


@pytest.mark.spec(34)
def test_wavelengths_are_2_pi_to_10000_times_2_pi():
    width, start = 512, torch.tensor([[0.0, 3.0, 17.5]], dtype=torch.float64)
    table = Sinusoidal().build_table(width)
    lengths = [2 * math.pi * 10000 ** (2 * m / width) for m in range(width // 2)]
    for m, length in enumerate(lengths):
        pair = slice(2 * m, 2 * m + 2)
        close(table(start + length)[..., pair], table(start)[..., pair])
        assert (table(start + length / 2)[..., pair] - table(start)[..., pair]).abs().max() > 1  # and no shorter
    assert lengths[0] == 2 * math.pi
    assert 0.96 < lengths[-1] / (10000 * 2 * math.pi) < 1  # the paper's end, one pair beyond the last


@pytest.mark.spec(34)
@pytest.mark.parametrize("layout", ["interleaved", "halves"])
def test_sinusoids_are_added_to_the_scaled_embedding(layout):  # eq. T12, M2
    network, x = ready(model(position=Sinusoidal(layout), embed=Tokens(17, scaled=True))), tokens()
    order = list(range(WIDTH)) if layout == "interleaved" else [*range(0, WIDTH, 2), *range(1, WIDTH, 2)]
    literal = math.sqrt(WIDTH) * network.embed.table.weight[x] + sin_cos(torch.arange(6)[None], WIDTH)[..., order]
    close(placed(network, x), literal)


@pytest.mark.spec(34, 36)
def test_sinusoids_stay_exact_far_out_in_float32():
    far = torch.tensor([[100_000]])
    found = Sinusoidal().build(WIDTH)(torch.zeros(1, 1, WIDTH), far)
    assert found.dtype == torch.float32
    close(found.double(), sin_cos(far, WIDTH), 1e-7)


@pytest.mark.spec(35)
@pytest.mark.parametrize(
    "position",
    [
        *(
            Learned(6),
            JointMlp(6, 4),
            SeparateMlp(6, 4),
            Grid(2, 3),
            Grid(2, 3, learned=True),
            Grid(2, 3, block=(1, 3)),
        ),
        *(Axial((2, 3)), Concatenated(OneHot(6), 6)),
    ],
)
@pytest.mark.parametrize("cached", [False, True])
def test_a_table_refuses_positions_past_its_length(position, cached):
    network = ready(model(position=position))
    network(tokens(length=6))
    with pytest.raises(ValueError, match=r"position 6 is past the 6 positions .* longer table"):
        if cached:
            cache = network(tokens(length=6), cache=Cache()).cache
            network(tokens(length=1), cache=cache)
        else:
            network(tokens(length=7))


@pytest.mark.spec(35)
def test_learned_positions_are_rows_of_a_table():
    network, x = ready(model(position=Learned(9))), tokens()
    literal = [
        [network.embed.table.weight[x[b, i]] + network.position.table.weight[i] for i in range(6)] for b in (0, 1)
    ]
    close(placed(network, x), torch.stack([torch.stack(row) for row in literal]))


@pytest.mark.spec(36)
@pytest.mark.parametrize(
    "position", [None, Sinusoidal(), Sinusoidal("halves"), TimePosition(), Concatenated(Sinusoidal(), 4)]
)
def test_sinusoids_have_no_last_position(position):
    network, x = ready(model(position=position)), tokens(length=300)
    close(network(x).hidden[:, :6], network(x[:, :6]).hidden)
    assert network(x).hidden.isfinite().all()


@pytest.mark.spec(39)
@pytest.mark.parametrize("step", [0, 3])
def test_time_and_position_are_ordinary_sums_of_sinusoids(step):  # eq. W33
    x_BTD = randn(2, LENGTH, WIDTH)
    literal = x_BTD + sin_cos(PLACES, WIDTH) + torch.tensor(spec.sinusoid(step, WIDTH), dtype=torch.float64)
    close(TimePosition().build(WIDTH)(x_BTD, PLACES, step), literal)


@pytest.mark.spec(40)
@pytest.mark.parametrize("scheme", [Sinusoidal(), Learned(9)])
def test_concatenated_positions_are_the_last_features(scheme):
    network, x = ready(model(position=Concatenated(scheme, 2))), tokens()
    found = placed(network, x)
    place = sin_cos(PLACES, 2)[0] if isinstance(scheme, Sinusoidal) else network.position.table.weight[:LENGTH]
    assert network.embed.table.weight.shape == (17, WIDTH - 2)
    close(found[..., :-2], network.embed.table.weight[x])
    close(found[..., -2:], place.expand(2, -1, -1))


@pytest.mark.spec(41)
def test_concatenated_positions_leave_room_for_class_tokens_and_segments():
    more = {"class_token": True, "position": Concatenated(Sinusoidal(), 4)}
    network = ready(model("full", outputs=(Classify(3, "first"),), **more))
    assert network(tokens()).hidden.shape == (2, 7, 8)
    network = ready(model("full", segments=2, position=Concatenated(Sinusoidal(), 4)))
    segment_BT = torch.tensor([[0, 0, 1, 1, 1, 1]] * 2)
    one, other = (network(tokens(), side_inputs=SideInputs(segments=x)).hidden for x in (segment_BT, 1 - segment_BT))
    assert one.shape == (2, 6, 8) and not torch.equal(one, other)


def test_positions_wider_than_the_model_are_a_reason_and_not_an_exception():
    reason = next(illegal_reasons(model(position=Concatenated(Sinusoidal(), 8), outputs=(Language(),))))
    assert reason == "positions take 8 of 8 features and leave none for the token; widen the model"


@pytest.mark.parametrize("learned", [False, True])
def test_a_grid_encodes_the_row_in_one_half_and_the_column_in_the_other(learned):
    table = ready(Grid(2, 3, learned=learned).build_table(WIDTH))
    for place in range(6):
        row, column = place // 3, place % 3
        if learned:
            halves = (table.row.weight[row], table.column.weight[column])
        else:
            halves = tuple(torch.tensor(spec.sinusoid(at, WIDTH // 2), dtype=torch.float64) for at in (row, column))
        close(table(torch.tensor([[place]]))[0, 0], torch.cat(halves))


@pytest.mark.spec(98, 100)
def test_a_grid_of_blocks_is_counted_in_block_raster_order():
    grid = Grid(4, 6, block=(2, 3))
    plain, blocks = (one.build_table(WIDTH) for one in (Grid(4, 6), grid))
    raster = [y * 6 + x for y, x in block_raster(4, 6, 2, 3)]
    assert torch.equal(blocks(torch.arange(24)[None]), plain(torch.tensor([raster])))
    with pytest.raises(ValueError, match="6 columns do not divide into blocks of 4; give a divisor of 6"):
        Grid(4, 6, block=(2, 4))


@pytest.mark.spec(41)
def test_an_array_has_one_vector_for_each_coordinate():
    """sum_a W_a[i_a] with i = (row * columns + column) * channels + channel."""
    table = ready(Axial((2, 3, 4)).build_table(WIDTH))
    rows, columns, channels = (axis.weight for axis in table.axes)
    for row, column, channel in product(range(2), range(3), range(4)):
        found = table(torch.tensor([[(row * 3 + column) * 4 + channel]]))[0, 0]
        close(found, rows[row] + columns[column] + channels[channel])
    both = ready(Axial((2, 3), (WIDTH - 3, 3)).build_table(WIDTH))
    for row, column in product(range(2), range(3)):
        parts = both.axes[0].weight[row], both.axes[1].weight[column]
        close(both(torch.tensor([[row * 3 + column]]))[0, 0], torch.cat(parts))
    with pytest.raises(ValueError, match=r"axial\.widths has 1 numbers for 2 axes"):
        Axial((2, 3), (WIDTH,))
    with pytest.raises(ValueError, match=r"axial\.widths sum to 9, but 8 features are added to"):
        model(width=WIDTH, position=Axial((2, 3), (WIDTH - 2, 3))).build()
    with pytest.raises(ValueError, match=r"axial\.widths sum to 9, but 8 features are added to"):
        Axial((2, 3), (WIDTH - 2, 3)).build_table(WIDTH)
    with pytest.raises(ValueError, match="give the length of each axis"):
        Axial(())


def test_positions_start_at_the_position_offset():
    """One place for each sequence, past padding and in what comes after; a model of distances knows no difference."""
    begin, x_BT = torch.tensor([5, 0]), tokens(2, LENGTH)
    visible_BT = torch.tensor([[False] + [True] * 5, [True] * 6])
    network = ready(model(position=Sinusoidal()))
    embedded = network.embed(x_BT)
    wanted = embedded + sin_cos(begin[:, None] + torch.arange(LENGTH), WIDTH)
    close(placed(network, x_BT, position_offset=begin), wanted)
    moved = placed(network, x_BT, position_offset=begin, visible=visible_BT)
    close(moved[0, 1:], (embedded[0, 1:] + sin_cos(PLACES + 5, WIDTH)[0, :5]))
    cache = network(x_BT[:, :4], position_offset=begin, cache=Cache()).cache
    close(network(x_BT[:, 4:], cache=cache).hidden, network(x_BT, position_offset=begin).hidden[:, 4:])
    turned = ready(model(score_mods=(Rotary(),)))
    close(turned(x_BT, position_offset=begin).hidden, turned(x_BT).hidden)


@pytest.mark.parametrize(
    "begin, message",
    [
        (torch.tensor([1]), "give 2 integers"),
        (torch.tensor([1.0, 2.0]), "position_offset is torch.float32 of the shape (2,)"),
        (torch.tensor([0, -1]), "a position_offset must be 0 or more, not -1"),
        (torch.tensor([0, 3]), "position 8 is past the 8 positions of the model"),
    ],
)
def test_a_wrong_position_offset_is_refused(begin, message):
    network = ready(model(position=Learned(8)))
    with pytest.raises(ValueError) as caught:
        network(tokens(2, LENGTH), position_offset=begin)
    assert message in str(caught.value)
    cache = network(tokens(2, 2), cache=Cache()).cache
    with pytest.raises(ValueError, match="give position_offset= with the first call only"):
        network(tokens(2, 2), cache=cache, position_offset=torch.tensor([1, 1]))
