"""Images as sequences: their order, the loss of each channel given the earlier ones, generation with and without the cache."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
import torch
from PIL import Image as Pillow

from everyformer import Local, Local2d, build, member
from everyformer.data.images import downsample, open_unlabelled_images, save_image_grid
from everyformer.infer.generate_images import ImageSequence, generate_images
from everyformer.network.grid import Grid
from everyformer.network.network import PairNetwork
from everyformer.task import Image
from everyformer.task.batch import epoch_rows
from everyformer.task.table import task_for
from everyformer.train.recipe import Recipe, override
from tests.network import ready
from tests.spec import image as spec

SMALL = {
    "width": 8,
    "heads": 2,
    "layers": 1,
    "dropout": 0.0,
}
VARIANTS = list(product(["categorical", "logistics"], ["1d", "2d"], [1, 2]))
variants = pytest.mark.parametrize("output, local, shrink", VARIANTS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Twelve small colour images of one size."""
    path, random = tmp_path_factory.mktemp("images"), np.random.RandomState(0)
    for number in range(12):
        Pillow.fromarray(random.randint(0, 256, (4, 4, 3), dtype=np.uint8)).save(path / f"{number:02}.png")
    return str(path)


def opened(folder, output, local, shrink, **fields):
    task_data = Image(**({"levels": 5, "shrink": shrink, "valid": 0.25} | fields)).open(folder, None)
    settings = {name: x for name, x in task_data.member_settings().items() if name not in ("vocabulary", "context")}
    columns, channels = task_data.columns, task_data.channels
    logistics, row = (10, columns) if output == "logistics" else (None, columns * channels)
    settings |= {"logistics": logistics, "pattern": Local(5, 3) if local == "1d" else Local2d(row, 2, 2, 1, 1)}
    network = ready(build("image-transformer", "tiny", **SMALL, **settings)).float()
    return task_data.fit(network.value), network


def image_of(task, number):
    """The image of a row of the first batch, with its levels spread over 0 to 255."""
    row = int(epoch_rows(task.data.examples(), 0, 2, 0)[number])
    return torch.from_numpy(task.data.images.splits["train"][row].astype(int) * 5 // 256 * 255 // 4)


@pytest.mark.spec(98, 100)
@pytest.mark.parametrize("joint", [False, True])
def test_images_are_flattened_in_the_order_of_generation(joint):
    """A step is one channel of a pixel, or with `joint` all of them; blocks are in raster order, and so are their pixels."""
    image_BCYX = torch.arange(2 * 3 * 4 * 6).view(2, 3, 4, 6)
    across = 6 if joint else 18
    for block in (None, (2, 3)):
        layout = ImageSequence(3, 256, Grid(4, across, block=block), joint)
        step_BPN = layout.flatten(image_BCYX)
        for p, (y, x) in enumerate(spec.block_raster(4, across, *(block or (1, across)))):
            expected = image_BCYX[:, :, y, x] if joint else image_BCYX[:, x % 3, y, x // 3, None]
            assert torch.equal(step_BPN[:, p], expected)
        assert torch.equal(layout.unflatten(step_BPN), image_BCYX)


@pytest.mark.spec(98)
def test_each_channel_has_its_own_tokens_and_joint_pixels_are_scaled():
    step_BPN = torch.tensor([[[0], [4], [2], [1]]])
    layout = ImageSequence(3, 5, Grid(1, 6), joint=False)
    assert layout.encode_from_start(step_BPN).tolist() == [
        [15, 0, 5 + 4, 10 + 2, 1]
    ]  # the fourth step is the first channel again
    assert layout.encode(step_BPN[:, 2:], 2).tolist() == [[10 + 2, 1]]
    joint = ImageSequence(3, 5, Grid(1, 2), joint=True)
    assert joint.encode_from_start(torch.tensor([[[0, 2, 4]]])).tolist() == [[[0, 0, 0], [-1, 0, 1]]]


@pytest.mark.spec(98, 101, 102)
@variants
def test_the_loss_equals_that_of_every_prefix_computed_alone(folder, output, local, shrink):
    """The sum of -log p of the next step after every prefix, channel by channel."""
    task, network = opened(folder, output, local, shrink)
    batch = task.data.batch(0, 2, 0)
    assert torch.equal(batch["input"], task.data.layout.encode_from_start(batch["step_BPN"])[:, :-1])  # shifted by one
    assert torch.equal(task.data.layout.unflatten(batch["step_BPN"])[0] * 255 // 4, image_of(task, 0))
    total, count = 0.0, 0
    with torch.no_grad():
        for row, end in product(range(2), range(1, batch["input"].shape[1] + 1)):
            prefix = batch["input"][row : row + 1, :end]
            inputs = (batch["source"][row : row + 1], prefix) if shrink > 1 else (prefix,)
            logits, expected = network(*inputs).logits[0, -1], batch["step_BPN"][row, end - 1]
            if output == "categorical":
                total -= float(logits.log_softmax(-1)[expected])
            else:
                mixture = [logits.tolist()[start : start + 10] for start in range(0, 100, 10)]
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
                total -= math.log(spec.pixel_probability(expected.tolist(), parts, 5))
            count += len(expected)
        assert float(task.objective.loss(network, batch, "auto")) == pytest.approx(total, rel=1e-5)
    assert task.data.count(batch) == count == 2 * 4 * 4 * 3


@pytest.mark.spec(101)
def test_the_encoder_reads_the_smaller_image(folder):
    """Rounded means of squares, each channel in raster order; other inputs change the generated image."""
    task, network = opened(folder, "categorical", "2d", 2)
    image_BCYX = task.data.images.splits["train"][:1]
    small = [
        [round(float(image_BCYX[0, c, y : y + 2, x : x + 2].mean()) + 1e-6) for x in range(0, 4, 2) for c in range(3)]
        for y in range(0, 4, 2)
    ]
    assert downsample(image_BCYX, 2)[0].transpose(1, 2, 0).reshape(2, 6).tolist() == small
    tokens = [value * 5 // 256 + 5 * (index % 3) for row in small for index, value in enumerate(row)]
    source = task.data.encoder_input(image_BCYX)
    assert source.tolist() == [tokens]
    step = torch.zeros(1, 0, 1, dtype=torch.long)
    one, other = (
        generate_images(network.decoder, task.data.layout, step, encoder_output=network.encode(x), temperature=0.0)
        for x in (source, source.flip(1))
    )
    assert not torch.equal(one, other)


@pytest.mark.spec(98, 101)
@variants
def test_images_generated_with_and_without_the_cache_are_equal(folder, output, local, shrink):
    """From nothing and from a prefix; an image does not depend on the others of the batch."""
    task, network = opened(folder, output, local, shrink)
    image_BCYX, one = task.data.images.splits["train"][:2], getattr(network, "decoder", network)
    source = None
    if isinstance(network, PairNetwork):
        source = network.encode(task.data.encoder_input(image_BCYX))
    steps = task.data.layout.flatten(task.data.quantize(image_BCYX))
    for first in (0, 2 * task.data.layout.grid.columns):
        options = {"encoder_output": source, "seed": 3}
        result = generate_images(one, task.data.layout, steps[:, :first], **options)
        assert torch.equal(result, generate_images(one, task.data.layout, steps[:, :first], cached=False, **options))
        assert result.shape == steps.shape and torch.equal(result[:, :first], steps[:, :first])
        assert int(result.min()) >= 0 and int(result.max()) < 5 and not torch.equal(result[0], result[1])
        if source is None:
            assert torch.equal(generate_images(one, task.data.layout, steps[:1, :first], seed=3)[0], result[0])


@pytest.mark.spec(102)
@pytest.mark.parametrize("output", ["categorical", "logistics"])
def test_bits_per_dimension_is_the_mean_over_all_channels(folder, output):
    """A uniform model needs log2 of the levels."""
    task, network = opened(folder, output, "2d", 1, levels=8)
    result = task.objective.evaluate(network, "valid", None, "auto")
    assert (result["images"], result["targets"], result["levels"]) == (3, 3 * 48, 8)
    batches = [task.data.batch_of("valid", torch.tensor([row])) for row in range(3)]
    with torch.no_grad():
        bits = sum(float(task.objective.loss(network, batch, "auto")) for batch in batches) / math.log(2) / (3 * 48)
    assert result["bits_per_dimension"] == pytest.approx(bits, rel=1e-5)
    if output == "categorical":
        for weight in network.outputs.parameters():
            torch.nn.init.zeros_(weight)
        assert task.objective.evaluate(network, "valid", None, "auto")["bits_per_dimension"] == pytest.approx(
            3, rel=1e-6
        )


@pytest.mark.parametrize("name, changes", [("gpt2", {}), ("sparse-transformer", {"stride": 12}), ("byte-language", {})])
def test_other_members_generate_images_in_raster_order(folder, name, changes):
    task_data = Image(levels=5, valid=0.25).open(folder, None)
    settings = {key: x for key, x in task_data.member_settings().items() if key in ("vocabulary", "context")}
    network = build(name, "tiny", **settings, **changes).eval()
    task = task_data.fit(network.value)
    assert task.data.layout.grid == Grid(4, 12)
    assert task.objective.evaluate(network, "valid", 1, "auto")["bits_per_dimension"] > 0
    assert (
        generate_images(
            network, task.data.layout, task.data.batch_of("valid", torch.tensor([0]))["step_BPN"][:, :46]
        ).max()
        < 5
    )


def test_a_sheet_shows_the_given_part_the_generated_and_the_true_image(folder, tmp_path):
    task, network = opened(folder, "categorical", "2d", 1)
    file = tmp_path / "sheet.png"
    description = task.inference.generate_images(network, file, images=2, given=0.8, seed=0)
    assert description == f"2 images (given 2 of 4 rows, generated, true): {file}"  # whole blocks of two rows
    zoom, gap = 84 // 4, 4
    sheet = np.asarray(Pillow.open(file))
    assert sheet.shape == (3 * (4 * zoom + gap) + gap, 2 * (4 * zoom + gap) + gap, 3)

    def shown(row, column):
        top, left = gap + row * (4 * zoom + gap), gap + column * (4 * zoom + gap)
        return sheet[top : top + 4 * zoom : zoom, left : left + 4 * zoom : zoom].astype(int)

    for number in range(2):
        truth = task.data.images.splits["valid"][number].transpose(1, 2, 0).astype(int) * 5 // 256 * 255 // 4
        given, generated, true = (shown(row, number) for row in range(3))
        assert np.array_equal(true, truth) and np.array_equal(given[:2], truth[:2]) and (given[2:] == 127).all()
        assert np.array_equal(generated[:2], truth[:2]) and not np.array_equal(generated, truth)
    assert task.inference.generate_images(network, file, images=3) == f"3 images: {file}"
    save_image_grid([np.zeros((1, 1, 2, 2), np.uint8)], file, target=2)
    assert np.asarray(Pillow.open(file)).shape == (10, 10)


def test_images_of_any_size_are_cropped_to_squares(tmp_path):
    (tmp_path / "train" / "cats").mkdir(parents=True)
    (tmp_path / "test").mkdir()
    for number in range(4):
        wide = np.full((8, 20, 3), 200, np.uint8)
        wide[:, 6:14] = 40  # the middle
        Pillow.fromarray(wide).save(tmp_path / "train" / "cats" / f"{number}.jpg", quality=100)
    Pillow.new("RGB", (8, 16), (40, 40, 40)).save(tmp_path / "test" / "one.png")
    (tmp_path / "notes.txt").write_text("not an image")
    result = open_unlabelled_images(str(tmp_path), 0.25, size=4)
    assert {split: images.shape for split, images in result.splits.items()} == {
        "train": (3, 3, 4, 4),
        "valid": (1, 3, 4, 4),
        "test": (1, 3, 4, 4),
    }
    assert abs(result.splits["train"].astype(int) - 40).max() < 12 and (result.splits["test"] == 40).all()
    with pytest.raises(ValueError, match="8 x 16 pixels, but the images before it have 20 x 8; resize all"):
        Pillow.new("RGB", (8, 16)).save(tmp_path / "train" / "z.png")
        open_unlabelled_images(str(tmp_path), 0.25)


@pytest.mark.parametrize(
    "fields, model, message",
    [
        ({"shrink": 3}, {}, r"task.shrink=3 does not divide the 4 rows of .*; give a divisor, or another task.size"),
        ({}, {"downsample": 2}, "task.shrink=1 does not fit a model with an encoder"),
        ({"shrink": 2}, {"downsample": 1}, "task.shrink=2 does not fit a model without an encoder"),
        ({}, {"rows": 8}, "are 4 rows of 12 steps, the model's 8 of 12; leave model.rows"),
        (
            {"levels": 9},
            {"levels": 5},
            "3 channels of 9 levels and a start token are 28 tokens, but the model's inputs are Tokens",
        ),
        (
            {"levels": 9},
            {"levels": 5, "logistics": 10},
            "predicts 3 channels of 5 levels, the images have 3 of 9",
        ),
        ({"size": 2}, {"rows": 2}, "are 2 rows of 6 steps, the model's 2 of 12"),
    ],
)
def test_unsuitable_models_are_refused(folder, fields, model, message):
    with pytest.raises(ValueError, match=message):
        data = Image(**({"levels": 5, "valid": 0.25} | fields)).open(folder, None)
        sizes = {"rows": 4, "columns": 4, "channels": 3, "levels": 5}
        data.fit(member("image-transformer", "tiny", **(sizes | model)))


def test_too_large_too_few_and_unreadable_images_are_refused(tmp_path):
    Pillow.new("RGB", (200, 200)).save(tmp_path / "a.png")
    with pytest.raises(ValueError, match="has 1 training image; give at least 2"):
        Image().open(str(tmp_path), None)
    Pillow.new("RGB", (200, 200)).save(tmp_path / "b.png")
    with pytest.raises(
        ValueError, match=r"200 x 200 pixels, which is 120,000 steps; make them smaller with task\.size=32"
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


def test_the_default_task_follows_from_the_member():
    assert task_for("image-transformer") == Image() and task_for("image-transformer", "celeba") == Image(shrink=4)
    assert type(task_for("transformer")).__name__ == "Translate" and type(task_for("gpt2")).__name__ == "Language"
    assert task_for("gpt2", name="image") == Image() and task_for("transformer", name="image") == Image()
