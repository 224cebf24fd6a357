"""Draws docs/pictures/data_path.png: the way of the data through the layers of the code in one training step.

python docs/pictures/data_path.py           # needs matplotlib
"""

from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch

BLUE, ORANGE, GREEN, GRAY = "#dce9f8", "#fdebd6", "#e0f2e3", "#eef1f4"

# Each lane: the folder, what it does, its color, and its boxes (text, left edge, width) from left to right.
LANES: list[tuple[str, str, str, list[tuple[str, float, float]]]] = [
    (
        "data/ task/ train/",
        "one step",
        GREEN,
        [
            ("text, images, graph,\nepisodes", 0, 20),
            ("batch\nf(seed, step)", 25, 15),
            ("Network", 45, 14),
            ("Objective:\nloss, a sum", 64, 15),
            ("optimizer,\ncheckpoint", 84, 16),
        ],
    ),
    (
        "network/",
        "a model",
        BLUE,
        [
            ("tokens\nB, T", 0, 12),
            ("Embed +\nPosition", 17, 15),
            ("Depth: Stack,\nRepeat, Halt", 37, 22),
            ("OutputHead", 64, 16),
            ("logits\nB, T, V", 85, 15),
        ],
    ),
    (
        "network/",
        "a layer, repeated",
        BLUE,
        [
            ("stream\nB, T, D", 0, 12),
            ("Residual:\nnorm", 17, 15),
            ("Sublayer (x, context, entry)\nattention, feed-forward, LSTM, ...", 37, 32),
            ("Residual:\nadd or gate", 74, 13),
            ("stream", 92, 8),
        ],
    ),
    (
        "network/",
        "attention",
        BLUE,
        [
            ("x\nB, T, D", 0, 10),
            ("Projection:\nq, k, v", 15, 16),
            ("append to the\nKVCache entry", 36, 18),
            ("attend (q, k, v,\npattern, score_mods)", 59, 23),
            ("Projection:\nmerge heads", 87, 13),
        ],
    ),
    (
        "attention/",
        "one function",
        ORANGE,
        [
            ("ScoreMod:\ntransform, bias", 0, 19),
            ("Pattern:\nallows (b, h, q, k)", 24, 20),
            ("choose a kernel,\nor the run names it", 49, 22),
            ("output B, H, Q, E\nthe same for all kernels", 76, 24),
        ],
    ),
    (
        "attention/kernels/",
        "speed",
        GRAY,
        [
            ("reference", 0, 11),
            ("sdpa", 14, 9),
            ("flex", 26, 9),
            ("plan: disjoint\ndense parts", 40, 18),
            ("fused   tiled   blocked   hashed", 63, 37),
        ],
    ),
]
BELOW = {
    (0, 2): 1,
    (1, 2): 2,
    (2, 2): 3,
    (3, 3): 4,
    (4, 2): 5,
}  # the box (lane, index) that the lane below shows in detail


def draw_lane(axis: Axes, top: float, lane: int) -> None:
    folder, what, color, boxes = LANES[lane]
    axis.text(-2.5, top - 3.4, folder, ha="right", va="center", fontsize=9, fontweight="bold", family="monospace")
    axis.text(-2.5, top - 6.2, what, ha="right", va="center", fontsize=9, color="#4b5563")
    for index, (text, left, width) in enumerate(boxes):
        shown = (lane, index) in BELOW
        axis.add_patch(
            FancyBboxPatch(
                (left, top - 9),
                width,
                8.4,
                boxstyle="round,pad=0,rounding_size=1",
                facecolor=color,
                edgecolor="#1f5fa8" if shown else "#9aa5b1",
                linewidth=1.8 if shown else 0.9,
            )
        )
        axis.text(left + width / 2, top - 4.8, text, ha="center", va="center", fontsize=8.6, linespacing=1.35)
        if index and (lane < 5 or index == 4):
            end = boxes[index - 1][1] + boxes[index - 1][2]
            axis.annotate("", (left, top - 4.8), (end, top - 4.8), arrowprops={"arrowstyle": "-|>", "color": "#4b5563"})
        if shown:
            for edge, corner in ((left, 0.0), (left + width, 100.0)):
                axis.plot(
                    (edge, corner), (top - 9.1, top - 14.1), color="#1f5fa8", linewidth=0.8, linestyle=(0, (3, 3))
                )


def main() -> None:
    figure, axis = plt.subplots(figsize=(9.6, 6.6), dpi=100, facecolor="white", layout="constrained")
    axis.set(xlim=(-25, 101), ylim=(-85.5, 1.5))
    axis.axis("off")
    for lane in range(len(LANES)):
        draw_lane(axis, -14.6 * lane, lane)
    axis.text(
        100,
        -84.5,
        "Above attend there is only mathematics, below it only speed.",
        ha="right",
        fontsize=9,
        style="italic",
    )
    figure.savefig(Path(__file__).with_name("data_path.png"))


if __name__ == "__main__":
    main()
