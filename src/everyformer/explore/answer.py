"""What the page asks, and how it is answered: JSON, with arrays behind it as raw bytes.

    length of the JSON (4 bytes, little-endian) | JSON | padding | array | padding | array ...

Every array begins at a multiple of 8 bytes. The JSON has the field `arrays` with the type and shape of each. An answer without
arrays is plain JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

ALIGNMENT = 8  # bytes
TYPES = {"uint8": "Uint8Array", "uint16": "Uint16Array", "float32": "Float32Array"}  # as JavaScript calls them


@dataclass(frozen=True)
class Answer:
    """Plain data, and arrays."""

    data: dict[str, Any]
    arrays: Sequence[NDArray[Any]] = ()

    def encode(self) -> bytes:
        if not self.arrays:
            return msgspec.json.encode(self.data)
        described = [{"type": TYPES[str(array.dtype)], "shape": array.shape} for array in self.arrays]
        head = msgspec.json.encode(self.data | {"arrays": described})
        message = len(head).to_bytes(4, "little") + head
        for array in self.arrays:
            message += b"\0" * (-len(message) % ALIGNMENT) + array.tobytes()
        return message

    @property
    def media_type(self) -> str:
        return "application/octet-stream" if self.arrays else "application/json"


@dataclass(frozen=True)
class Ask:
    """Something that the page asks: the type of the request, and the function that answers it."""

    kind: type[Any]
    answer: Callable[[Any], Answer]


def key_of(path: str, body: dict[str, Any]) -> str:
    """Returns the name of a recorded answer, as the page makes it too."""
    return f"{path} {json.dumps(body, sort_keys=True, separators=(',', ':'), ensure_ascii=False)}"


def quantised(weight_QK: NDArray[np.floating[Any]]) -> tuple[NDArray[np.uint16], float]:
    """Returns an array of values of at least 0 as 16-bit integers, and the value of 65,535: its largest one."""
    largest = float(weight_QK.max(initial=0.0))
    scaled = np.rint(weight_QK * (65535 / largest)) if largest > 0 else np.zeros_like(weight_QK)
    return scaled.astype(np.uint16), largest
