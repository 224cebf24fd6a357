"""How a published model generates text, by the generation_config.json beside its tokenizer: where a text ends, and how it is sampled.

Older folders have the tokens in config.json. The file is kept as it came.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from everyformer.data.files import parse_json

FILE = "generation_config.json"
IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
SAMPLING = ("temperature", "top_k", "top_p", "min_p")
Generation = Mapping[str, Any]


def load_generation(folder: Path) -> dict[str, Any]:
    """Returns the content of the file, or the tokens of config.json; empty if there is neither.

    Raises ValueError if a field that is used is not what it has to be.
    """
    for name in (FILE, "config.json"):
        if (folder / name).is_file():
            try:
                content = parse_json((folder / name).read_bytes())
            except ValueError as error:
                raise ValueError(f"{folder / name} is not valid JSON ({error}); restore it") from None
            if not isinstance(content, dict):
                raise ValueError(f"{folder / name} holds a {type(content).__name__}, not an object; restore it")
            end_tokens(content, 0)
            default_sampling(content)
            return content if name == FILE else {key: content[key] for key in IDS if content.get(key) is not None}
    return {}


def end_tokens(generation: Generation, vocabulary: int) -> tuple[int, ...]:
    """Returns the tokens that end a text; empty if none are given."""
    given = generation.get("eos_token_id")
    ids = [] if given is None else given if isinstance(given, list) else [given]
    for one in ids:
        if not isinstance(one, int) or isinstance(one, bool) or one < 0:
            raise ValueError(f"eos_token_id is {given!r} in {FILE} or config.json; give the number of a token")
    return tuple(one for one in ids if one < vocabulary)


def default_sampling(generation: Generation) -> dict[str, Any]:
    """Returns the options of sampling that the model was published with; empty if it says none."""
    if generation.get("do_sample") is not True:
        return {}
    found = {name: generation[name] for name in SAMPLING if generation.get(name) is not None}
    for name, value in found.items():
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ValueError(f"{name} is {value!r} in {FILE}; give a number, or leave it out")
    return {"temperature": 1.0} | {name: value for name, value in found.items() if (name, value) != ("top_k", 0)}
