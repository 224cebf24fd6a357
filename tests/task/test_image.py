"""Images as sequences: their order, the loss of each channel from what came before, painting with and without the cache."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
import torch
from PIL import Image as Pillow

from everyformer import Local, Local2d, build, member
from everyformer.data.images import downsample, open_unlabelled_images, save_image_grid
from everyformer.infer.paint import Scan, paint
from everyformer.network.grid import Grid
from everyformer.network.network import PairNetwork
from everyformer.task import Image
from everyformer.task.table import task_for
from everyformer.task.work import epoch_rows
from everyformer.train.recipe import Recipe, override
from tests.network import ready
from tests.spec import image as spec

SMALL = {
    "width": 8,
    "heads": 2,
    "layers": 1,
    "dropout": 0.0,
}
WAYS = list(product(["categorical", "logistics"], ["1d", "2d"], [1, 2]))
ways = pytest.mark.parametrize("output, local, shrink", WAYS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Twelve small pictures in colour; all of one size."""
    place, random = tmp_path_factory.mktemp("pictures"), np.random.RandomState(0)
    for number in range(12):
        Pillow.fromarray(random.randint(0, 256, (4, 4, 3), dtype=np.uint8)).save(place / f"{number:02}.png")
    return str(place)


def opened(folder, output, local, shrink, **fields):
    work = Image(**({"levels": 5, "shrink": shrink, "valid": 0.25} | fields)).open(folder, None)
    known = {name: number for name, number in work.changes().items() if name not in ("vocabulary", "context")}
    logistics, row = (10, work.columns) if output == "logistics" else (None, work.columns * work.channels)
    pattern = Local(5, 3) if local == "1d" else Local2d(row, 2, 2, 1, 1)
    network = ready(build("image-transformer", "tiny", logistics=logistics, pattern=pattern, **SMALL, **known)).float()
    work.fit(network.value)
    return work, network


def picture(work, number):
    """The picture of a row of the first batch, as it is shown."""
    row = int(epoch_rows(work.examples(), 0, 2, 0)[number])
    return torch.from_numpy(work.pictures.splits["train"][row].astype(int) * 5 // 256 * 255 // 4)


@pytest.mark.spec(98, 100)
@pytest.mark.parametrize("joint", [False, True])
def test_a_picture_is_its_steps_in_the_order_of_generation(joint):
    """One channel of a pixel a step, raster order inside blocks in raster order; joint: the pixel with all channels."""
    image_BCYX = torch.arange(2 * 3 * 4 * 6).view(2, 3, 4, 6)
    across = 6 if joint else 18
    for block in (None, (2, 3)):
        scan = Scan(3, 256, Grid(4, across, block=block), joint)
        step_BPN = scan.unfold(image_BCYX)
        for p, (y, x) in enumerate(spec.block_raster(4, across, *(block or (1, across)))):
            wanted = image_BCYX[:, :, y, x] if joint else image_BCYX[:, x % 3, y, x // 3, None]
            assert torch.equal(step_BPN[:, p], wanted)
        assert torch.equal(scan.fold(step_BPN), image_BCYX)


@pytest.mark.spec(98)
def test_a_channel_has_tokens_of_its_own_and_pixels_are_scaled():
    step_BPN = torch.tensor([[[0], [4], [2], [1]]])
    scan = Scan(3, 5, Grid(1, 6), joint=False)
    assert scan.begin(step_BPN).tolist() == [[15, 0, 5 + 4, 10 + 2, 1]]  # after three channels the first again
    assert scan.read(step_BPN[:, 2:], 2).tolist() == [[10 + 2, 1]]
    joint = Scan(3, 5, Grid(1, 2), joint=True)
    assert joint.begin(torch.tensor([[[0, 2, 4]]])).tolist() == [[[0, 0, 0], [-1, 0, 1]]]


@pytest.mark.spec(98, 101, 102)
@ways
def test_the_loss_is_that_of_each_step_from_those_before_it(folder, output, local, shrink):
    """Every prefix alone through the network: -log p of the step that comes next, channel by channel."""
    work, network = opened(folder, output, local, shrink)
    batch = work.batch(0, 2, 0)
    assert torch.equal(batch["given"], work.scan.begin(batch["step_BPN"])[:, :-1])  # each from the one before
    assert torch.equal(work.scan.fold(batch["step_BPN"])[0] * 255 // 4, picture(work, 0))
    total, count = 0.0, 0
    with torch.no_grad():
        for row, end in product(range(2), range(1, batch["given"].shape[1] + 1)):
            given = batch["given"][row : row + 1, :end]
            inputs = (batch["source"][row : row + 1], given) if shrink > 1 else (given,)
            answer, wanted = network(*inputs).logits[0, -1], batch["step_BPN"][row, end - 1]
            if output == "categorical":
                total -= float(answer.log_softmax(-1)[wanted])
            else:
                mixture = [answer.tolist()[start : start + 10] for start in range(0, 100, 10)]
                pairs = [(1, 0), (2, 0), (2, 1)]
                parts = [
                    {
                        "weight": m[0],
                        "mean": m[1:4],
                        "log_scale": m[4:7],
                        "earlier": dict(zip(pairs, m[7:], strict=True)),
                    }
                    for m in mixture
                ]
                total -= math.log(spec.pixel_probability(wanted.tolist(), parts, 5))
            count += len(wanted)
        assert float(work.loss(network, batch, "auto")) == pytest.approx(total, rel=1e-5)
    assert work.count(batch) == count == 2 * 4 * 4 * 3


@pytest.mark.spec(101)
def test_the_encoder_reads_the_picture_made_smaller(folder):
    """Means of squares, rounded, each channel in raster order; it changes what is painted."""
    work, network = opened(folder, "categorical", "2d", 2)
    image_BCYX = work.pictures.splits["train"][:1]
    small = [
        [round(float(image_BCYX[0, c, y : y + 2, x : x + 2].mean()) + 1e-6) for x in range(0, 4, 2) for c in range(3)]
        for y in range(0, 4, 2)
    ]
    assert downsample(image_BCYX, 2)[0].transpose(1, 2, 0).reshape(2, 6).tolist() == small
    tokens = [value * 5 // 256 + 5 * (place % 3) for row in small for place, value in enumerate(row)]
    source = work._source(image_BCYX)
    assert source.tolist() == [tokens]
    step = torch.zeros(1, 0, 1, dtype=torch.long)
    one, other = (
        paint(network.decoder, work.scan, step, encoder_output=network.encode(x), temperature=0.0)
        for x in (source, source.flip(1))
    )
    assert not torch.equal(one, other)


@pytest.mark.spec(98, 101)
@ways
def test_painting_with_the_cache_is_painting_without(folder, output, local, shrink):
    """The same pictures, from nothing and from a beginning; a picture does not depend on its neighbours."""
    work, network = opened(folder, output, local, shrink)
    image_BCYX, one = work.pictures.splits["train"][:2], getattr(network, "decoder", network)
    source = None
    if isinstance(network, PairNetwork):
        source = network.encode(work._source(image_BCYX))
    begun = work.scan.unfold(work._levels(image_BCYX))
    for first in (0, 2 * work.scan.grid.columns):
        options = {"encoder_output": source, "seed": 3}
        found = paint(one, work.scan, begun[:, :first], **options)
        assert torch.equal(found, paint(one, work.scan, begun[:, :first], cached=False, **options))
        assert found.shape == begun.shape and torch.equal(found[:, :first], begun[:, :first])
        assert int(found.min()) >= 0 and int(found.max()) < 5 and not torch.equal(found[0], found[1])
        if source is None:
            assert torch.equal(paint(one, work.scan, begun[:1, :first], seed=3)[0], found[0])


@pytest.mark.spec(102)
@pytest.mark.parametrize("output", ["categorical", "logistics"])
def test_bits_per_dimension_are_the_mean_over_all_channels(folder, output):
    """A model that tells nothing needs log2 of the levels; on a split, the mean of what its pictures need."""
    work, network = opened(folder, output, "2d", 1, levels=8)
    found = work.evaluate(network, "valid", None, "auto")
    assert (found["pictures"], found["dimensions"], found["levels"]) == (3, 3 * 48, 8)
    batches = [work._batch("valid", torch.tensor([row])) for row in range(3)]
    with torch.no_grad():
        bits = sum(float(work.loss(network, batch, "auto")) for batch in batches) / math.log(2) / (3 * 48)
    assert found["bits_per_dimension"] == pytest.approx(bits, rel=1e-5)
    if output == "categorical":
        for weight in network.outputs.parameters():
            torch.nn.init.zeros_(weight)
        assert work.evaluate(network, "valid", None, "auto")["bits_per_dimension"] == pytest.approx(3, rel=1e-6)


@pytest.mark.parametrize("name, changes", [("gpt2", {}), ("sparse-transformer", {"stride": 12}), ("byte-language", {})])
def test_other_members_that_read_tokens_paint_in_raster_order(folder, name, changes):
    work = Image(levels=5, valid=0.25).open(folder, None)
    asked = {key: number for key, number in work.changes().items() if key in ("vocabulary", "context")}
    network = build(name, "tiny", **asked, **changes).eval()
    work.fit(network.value)
    assert work.scan.grid == Grid(4, 12)
    assert work.evaluate(network, "valid", 1, "auto")["bits_per_dimension"] > 0
    assert paint(network, work.scan, work._batch("valid", torch.tensor([0]))["step_BPN"][:, :46]).max() < 5


def test_a_sheet_shows_what_is_given_what_was_painted_and_the_truth(folder, tmp_path):
    work, network = opened(folder, "categorical", "2d", 1)
    file = tmp_path / "sheet.png"
    said = work.paint(network, file, pictures=2, given=0.8, seed=0)
    assert said == f"2 pictures (given 2 of 4 rows, painted, true): {file}"  # whole blocks of two rows
    zoom, gap = 84 // 4, 4
    sheet = np.asarray(Pillow.open(file))
    assert sheet.shape == (3 * (4 * zoom + gap) + gap, 2 * (4 * zoom + gap) + gap, 3)

    def shown(row, column):
        top, left = gap + row * (4 * zoom + gap), gap + column * (4 * zoom + gap)
        return sheet[top : top + 4 * zoom : zoom, left : left + 4 * zoom : zoom].astype(int)

    for number in range(2):
        truth = work.pictures.splits["valid"][number].transpose(1, 2, 0).astype(int) * 5 // 256 * 255 // 4
        given, painted, true = (shown(row, number) for row in range(3))
        assert np.array_equal(true, truth) and np.array_equal(given[:2], truth[:2]) and (given[2:] == 127).all()
        assert np.array_equal(painted[:2], truth[:2]) and not np.array_equal(painted, truth)
    assert work.paint(network, file, pictures=3) == f"3 pictures: {file}"
    save_image_grid([np.zeros((1, 1, 2, 2), np.uint8)], file, target=2)
    assert np.asarray(Pillow.open(file)).shape == (10, 10)


def test_pictures_of_any_size_are_cropped_to_squares(tmp_path):
    (tmp_path / "train" / "cats").mkdir(parents=True)
    (tmp_path / "test").mkdir()
    for number in range(4):
        wide = np.full((8, 20, 3), 200, np.uint8)
        wide[:, 6:14] = 40  # the middle
        Pillow.fromarray(wide).save(tmp_path / "train" / "cats" / f"{number}.jpg", quality=100)
    Pillow.new("RGB", (8, 16), (40, 40, 40)).save(tmp_path / "test" / "one.png")
    (tmp_path / "notes.txt").write_text("no picture")
    found = open_unlabelled_images(str(tmp_path), 0.25, size=4)
    assert {split: images.shape for split, images in found.splits.items()} == {
        "train": (3, 3, 4, 4),
        "valid": (1, 3, 4, 4),
        "test": (1, 3, 4, 4),
    }
    assert abs(found.splits["train"].astype(int) - 40).max() < 12 and (found.splits["test"] == 40).all()
    with pytest.raises(
        ValueError, match="8 x 16 pixels, but the images before it have 20 x 8; resize all images to one size"
    ):
        Pillow.new("RGB", (8, 16)).save(tmp_path / "train" / "z.png")
        open_unlabelled_images(str(tmp_path), 0.25)


@pytest.mark.parametrize(
    "fields, model, message",
    [
        ({"shrink": 3}, {}, r"task.shrink=3 does not divide the 4 rows of .*; give a divisor, or another task.size"),
        ({}, {"downsample": 2}, "task.shrink=1 and a model with an encoder do not go together"),
        ({"shrink": 2}, {"downsample": 1}, "task.shrink=2 and a model without an encoder do not go together"),
        ({}, {"rows": 8}, "are 4 rows of 12 steps, the model's 8 of 12; leave model.rows"),
        (
            {"levels": 9},
            {"levels": 5},
            "3 channels of 9 levels and a start are 28 tokens, but the model's inputs are Tokens",
        ),
        ({"levels": 9}, {"levels": 5, "logistics": 10}, "tells 3 channels of 5 levels, the pictures have 3 of 9"),
        ({"size": 2}, {"rows": 2}, "are 2 rows of 6 steps, the model's 2 of 12"),
    ],
)
def test_what_does_not_fit_is_refused(folder, fields, model, message):
    with pytest.raises(ValueError, match=message):
        work = Image(**({"levels": 5, "valid": 0.25} | fields)).open(folder, None)
        sizes = {"rows": 4, "columns": 4, "channels": 3, "levels": 5}
        work.fit(member("image-transformer", "tiny", **(sizes | model)))


def test_too_large_too_few_and_wrong_pictures_are_refused(tmp_path):
    Pillow.new("RGB", (200, 200)).save(tmp_path / "a.png")
    with pytest.raises(ValueError, match="has 1 training image; give at least 2"):
        Image().open(str(tmp_path), None)
    Pillow.new("RGB", (200, 200)).save(tmp_path / "b.png")
    with pytest.raises(
        ValueError, match=r"200 x 200 points, which is 120,000 steps; make them smaller with task\.size=32"
    ):
        Image().open(str(tmp_path), None)
    (tmp_path / "c.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"c\.png cannot be read as an image"):
        Image().open(str(tmp_path), None)
    with pytest.raises(
        ValueError, match="28 x 28 pixels and can only be reduced by an integer factor; give a size that divides 28"
    ):
        Image(size=5).open(None, None)
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "a.txt").write_text("a")
    with pytest.raises(ValueError, match="has no training images"):
        Image().open(str(tmp_path / "none"), None)
    with pytest.raises(ValueError, match="imdb does not hold images"):
        Image().open("imdb", None)


def test_two_dimensional_attention_orders_the_image_by_its_blocks():
    recipe = Recipe(member="image-transformer", size="tiny", task=Image())
    assert recipe.value({}).position.block is None
    recipe = override(recipe, ["model.pattern=local2d(28, 4, 7, 7, 7)"])
    assert recipe.value({}).position.block == (4, 7)


def test_the_task_follows_the_member():
    assert task_for("image-transformer") == Image() and task_for("image-transformer", "celeba") == Image(shrink=4)
    assert type(task_for("transformer")).__name__ == "Translate" and type(task_for("gpt2")).__name__ == "Language"
    assert task_for("gpt2", name="image") == Image() and task_for("transformer", name="image") == Image()
