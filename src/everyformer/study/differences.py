"""The differences between two models, by path."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from everyformer.study.family_listing import cache_of
from everyformer.value import Value, flatten, snake

if TYPE_CHECKING:
    from everyformer.network.model import EncoderDecoder, Model

# Fields that change the size of a model, or how it trains, but not its architecture.
NUMBERS = {
    *(
        "width",
        "heads",
        "layers",
        "num_layers",
        "hidden",
        "vocabulary",
        "length",
        "classes",
        "key_width",
        "value_width",
    ),
    *("size", "channels", "base", "dropout", "eps", "std", "max_distance", "max_span", "ramp", "cost", "start"),
}


def differences(a: Model | EncoderDecoder, b: Model | EncoderDecoder) -> dict[str, tuple[Any, Any]]:
    """The paths at which two values differ, each with both leaves. A leaf is None where a value has none.

    An absent field and one that is off (False, 0, empty) are equal. Fields inside a value that the other lacks are left out.
    """
    from everyformer.network.model import EncoderDecoder

    one, two = _leaves(a, isinstance(b, EncoderDecoder)), _leaves(b, isinstance(a, EncoderDecoder))
    pairs: dict[str, tuple[Any, Any]] = {}
    for path in sorted(one | two, key=lambda path: (path != "model", path)):
        pair = one.get(path), two.get(path)
        inside_absent = any(path.startswith(f"{above}.") and None in pairs[above] for above in pairs)
        if pair[0] != pair[1] and not inside_absent:
            pairs[path] = pair
    return pairs


@lru_cache(maxsize=64)  # a model is compared with all members
def _leaves(value: Model | EncoderDecoder, with_pair: bool) -> dict[str, Any]:
    """All leaves of a value by path. A single model is compared with the side of an encoder-decoder that is like it."""
    from everyformer.network.model import Model

    tree = tree_of(value)
    if isinstance(value, Model) and with_pair:
        tree = {"type": tree["type"], "decoder" if value.body.is_causal() else "encoder": tree}
    return {path: leaf or None for path, leaf in flatten(tree)}


def tree_of(part: Any) -> Any:
    """A value as dictionaries and lists, with patterns as text and the cache of a model in words."""
    from everyformer.attention.pattern import Pattern
    from everyformer.network.model import Model

    if isinstance(part, Pattern):
        return str(part)
    if isinstance(part, Value):
        names = part.__struct_fields__
        fields = {
            name: tree_of(getattr(part, name)) for name in names if not (name == "memory" and isinstance(part, Model))
        }
        cache = {"cache": cache_of(part)} if isinstance(part, Model) else {}
        return {"type": snake(type(part).__name__)} | fields | cache
    return [tree_of(one) for one in part] if isinstance(part, tuple) else part


def is_size(path: str, pair: tuple[Any, Any]) -> bool:
    """Whether a difference is one of size. Two segment memories differ in their length alone."""
    name = path.rpartition(".")[2]
    if name == "cache":
        return all(str(leaf).startswith("segment memory") for leaf in pair)
    return name in NUMBERS and not any(isinstance(leaf, str) for leaf in pair)
