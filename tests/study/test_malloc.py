"""What the C library makes of blocks, on sums that can be done by hand. Blocks of up to 128 KiB stand in one heap."""

from __future__ import annotations

import pytest

from everyformer.study.malloc import FREED, resident

KIB, MIB = 1 << 10, 1 << 20


def taken(numbers: range, size: int) -> list[tuple[int, int]]:
    return [(number, size) for number in numbers]


def freed(numbers: range) -> list[tuple[int, int]]:
    return [(number, FREED) for number in numbers]


ALL, HALF, MORE = range(100), range(0, 100, 2), range(100, 150)
FULL = taken(ALL, 64 * KIB)
A_WHILE = 100 * [(1000, 64), (1000, FREED)]  # until the small objects beside the blocks are gone
SUMS = {
    "what is alive is resident": (FULL, 100 * 64 * KIB),
    "what fits fills the holes": (FULL + freed(HALF) + taken(MORE, 60 * KIB), 100 * 64 * KIB),
    "holes too small for it are kept": (FULL + freed(HALF) + taken(MORE, 100 * KIB), 100 * 64 * KIB + 50 * 100 * KIB),
    "holes beside each other are one": (FULL + freed(ALL) + A_WHILE + taken(MORE, 120 * KIB), 100 * 64 * KIB),
    "what fills a hole is not the end": (
        [*FULL, (0, FREED), (100, 60 * KIB), (101, 40 * MIB)],
        100 * 64 * KIB + 40 * MIB,
    ),
    "a large block is given back": (
        taken(ALL, 40 * MIB) + freed(HALF) + taken(MORE, 100 * MIB),
        50 * 40 * MIB + 50 * 100 * MIB,
    ),
    "blocks are not touched": ([(1, 1 << 33), (2, 1 << 33), (1, FREED), (3, 1 << 33)], 2 << 33),
    "nor need there be room for them": ([(1, 1 << 60)], 1 << 60),
    "what a step left, the next replaces": (3 * taken(ALL, 40 * MIB), 100 * 40 * MIB),
}


@pytest.mark.parametrize("events, wanted", SUMS.values(), ids=SUMS)
def test_resident_memory_is_the_sum_by_hand(events, wanted):
    assert resident(events) == pytest.approx(wanted, rel=0.1)  # there are headers and small objects between the blocks


def test_settings_of_the_library_hold(monkeypatch):
    """Told to give every block back, it keeps nothing: at the peak are the 50 that were left and the 50 new ones, and the little
    that the end of the heap has room for anyhow."""
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "4096")
    alive = 50 * 64 * KIB + 50 * 100 * KIB
    assert alive <= resident(FULL + freed(HALF) + taken(MORE, 100 * KIB)) < 1.02 * alive
