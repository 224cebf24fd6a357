"""How much memory blocks take from the system: more than is alive, because the C library keeps much of what is freed.

    resident([(1, 4096), (2, 1 << 20), (1, FREED), (3, 8192)])    # bytes at the peak

Each event is the number of a block and its size, or FREED. glibc gives a freed block back only where it was large or
the last of the heap, and fills its place again only with what fits. Tensors are aligned to 64 bytes, and the slivers
beside them are soon taken by small objects; then the place of a freed tensor is a little too small for the next one of
its size, and the heap can grow to twice what is alive.

None of these rules is written here, so the answer is that of any version and setting of the library: a new process asks
it for the blocks, in their order, with small objects between them. It touches none, so they take addresses and no
memory. From the addresses follows what would be resident: the heap up to the highest block, and the blocks that stand
outside of it.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from array import array
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from random import Random

FREED = -1
ALIGNED = 64  # as torch asks
HOLDER = 96  # bytes of torch's object that holds a block, and is let go with it
# Bytes of others that come with a tensor, most of them autograd's, and for how many events they live on the mean. Fewer do not
# fill slivers, and with these lives the plans of bench.plan_memory are right within a tenth.
SMALL = {16: 20, 24: 20, 32: 60, 64: 20, 96: 20, 128: 20}
TRIES = 5  # with other lives, as much can hang on where a small object stands; of the answers the second largest counts


def resident(events: Iterable[tuple[int, int]]) -> int:
    """Bytes resident at the peak."""
    numbers = array("q", (number for event in events for number in event)).tobytes()
    command = [sys.executable, "-I", "-S", __file__]
    tries = [int(subprocess.check_output([*command, str(seed)], input=numbers)) for seed in range(TRIES)]
    return sorted(tries)[-2]


def replay(numbers: Sequence[int], seed: int) -> int:
    """Ask this process's C library for the blocks. Events stand one after the other, two numbers each."""
    libc, chance = ctypes.CDLL(None), Random(seed)
    malloc, free, memalign, sbrk = libc.malloc, libc.free, libc.posix_memalign, libc.sbrk
    malloc.restype = sbrk.restype = ctypes.c_size_t
    malloc.argtypes, free.argtypes, sbrk.argtypes = [ctypes.c_size_t], [ctypes.c_size_t], [ctypes.c_ssize_t]
    memalign.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]
    found = ctypes.c_size_t()
    place = ctypes.byref(found)
    blocks: dict[int, tuple[int, int, int]] = {}  # of each its address, its holder's, and its size outside of the heap
    small: list[tuple[float, int]] = []  # when they end, and where they are
    begin = high = sbrk(0)
    outside = peak = 0
    for time in range(0, len(numbers), 2):
        number, size = numbers[time], numbers[time + 1]
        while small and small[0][0] < time:
            free(heappop(small)[1])
        if number in blocks:  # also one that an earlier step left
            address, holder, beyond = blocks.pop(number)
            free(address)
            free(holder)
            outside -= beyond
            high = min(high, sbrk(0))  # the end of the heap may have been given back
        if size > 0:
            holder = malloc(HOLDER)
            address = 0 if memalign(place, ALIGNED, size) else found.value  # refused where the machine has no such room
            for other, lived in SMALL.items():
                heappush(small, (time + 2 * chance.expovariate(1 / lived), malloc(other)))
            within = 0 < address < sbrk(0)
            blocks[number] = (address, holder, 0 if within else size)
            if within:
                high = max(high, address + size)
            else:
                outside += size
            peak = max(peak, high - begin + outside)
    return int(peak)


if __name__ == "__main__":
    print(replay(array("q", sys.stdin.buffer.read()), int(sys.argv[1])))
