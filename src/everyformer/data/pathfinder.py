"""Drawings of dashed paths with two marked ends, which lie on one path or on two: Linsley et al. 2018, Tay et al. 2020.

Paths are walks of unit steps with small turns. Pixels of one path are at most two apart, those of different paths at least three, so
that a drawing has one answer. Departure: the drawings are small (16 x 16 by default) and have no gray.
"""

from __future__ import annotations

import math

from numpy.random import RandomState

TURN = 0.35  # standard deviation of the turn in a step, in radians
TRIES = 4  # turns that are tried before a walk is given up
DASH = 3  # every third pixel of a path is left out
Pixel = tuple[int, int]


def draw_pathfinder(random: RandomState, side: int) -> tuple[str, bool]:
    """Returns the pixels of a drawing row by row (. background, # path, o end), and whether the ends lie on one path."""
    connected, paths, taken = bool(random.randint(2)), list[list[Pixel]](), set[Pixel]()
    while len(paths) < 2:  # else there was no room for the second
        paths, taken = [], set()
        for length in (side, side, side // 2, side // 2):  # the last two distract
            path = next(filter(None, (_walk(random, side, length, taken) for _ in range(TRIES))), None)
            if path is None:
                break
            paths.append(path)
            taken |= {(y + v, x + u) for y, x in path for v in range(-2, 3) for u in range(-2, 3)}
    drawing = [["."] * side for _ in range(side)]
    for path in paths:
        for step, (y, x) in enumerate(path, 1):
            if step % DASH or step == len(path):
                drawing[y][x] = "#"
    for y, x in (paths[0][0], paths[0][-1] if connected else paths[1][-1]):
        drawing[y][x] = "o"
    return "".join(map("".join, drawing)), connected


def _walk(random: RandomState, side: int, length: int, taken: set[Pixel]) -> list[Pixel] | None:
    """Returns a walk of some pixels that are not taken, and that does not come back to itself; None if it finds no way."""
    (y, x, angle), path, near = random.rand(3) * (side, side, 2 * math.pi), list[Pixel](), set[Pixel]()
    turns = iter(random.normal(0, TURN, size=2 * TRIES * length).tolist())
    while len(path) < length:
        for turn in turns:
            one = angle + turn * (1 + len(path) / length)
            v, u = y + math.sin(one), x + math.cos(one)
            pixel = (int(v), int(u))
            if 0 <= v < side and 0 <= u < side and pixel not in taken and pixel not in near:
                y, x, angle = v, u, one
                break
        else:
            return None
        if not path or path[-1] != pixel:
            path.append(pixel)
            near |= (
                {(path[-3][0] + b, path[-3][1] + a) for b in (-1, 0, 1) for a in (-1, 0, 1)} if len(path) > 2 else set()
            )
            near -= {path[-1]}
    return path
