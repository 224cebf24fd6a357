"""The table of the family: every member by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from everyformer.family import (
    act_rnn,
    adaptive_span,
    albert,
    bert,
    byte,
    deep_character,
    electra,
    gemma,
    gpt2,
    graph,
    gtrxl,
    image_transformer,
    llama,
    lstm,
    mistral,
    qwen3,
    reformer,
    sparse_transformer,
    speedrun,
    t5,
    transformer,
    transformer_xl,
    universal_transformer,
    vit,
)
from everyformer.family.member import Member
from everyformer.network.model import EncoderDecoder, Model
from everyformer.network.network import Network, PairNetwork
from everyformer.network.size import parameters as parameters
from everyformer.network.store import model_from_json
from everyformer.value import UnknownPart, nearest

MEMBERS: dict[str, Member] = {
    member.name: member
    for member in (
        transformer.MEMBER,
        byte.LANGUAGE,
        byte.CLASSIFIER,
        bert.MEMBER,
        albert.MEMBER,
        electra.MEMBER,
        gpt2.MEMBER,
        llama.MEMBER,
        mistral.MEMBER,
        qwen3.MEMBER,
        gemma.MEMBER,
        gemma.GEMMA2,
        speedrun.MEMBER,
        t5.MEMBER,
        deep_character.MEMBER,
        transformer_xl.MEMBER,
        gtrxl.MEMBER,
        adaptive_span.MEMBER,
        image_transformer.MEMBER,
        sparse_transformer.MEMBER,
        reformer.MEMBER,
        universal_transformer.MEMBER,
        lstm.MEMBER,
        lstm.ABLATED,
        act_rnn.MEMBER,
        graph.MEMBER,
        vit.MEMBER,
    )
}


def members() -> list[str]:
    """The names of all members. Example: `members()`."""
    return list(MEMBERS)


def find(name: str | Model | EncoderDecoder) -> Member:
    """Returns a member by name. A model of your own is wrapped as a member: a value, a .json file, or a folder with model.json."""
    if isinstance(name, Model | EncoderDecoder):
        return _wrap("model", name)
    if str(name).endswith(".json"):
        return _wrap(Path(name).stem, _read(Path(name).expanduser()))
    if name not in MEMBERS and (Path(name).expanduser() / "model.json").is_file():
        return _wrap(Path(name).name, _read(Path(name).expanduser() / "model.json"))
    if name not in MEMBERS:
        raise ValueError(f"no member of the family is named {name!r}; {nearest(name, MEMBERS)}")
    return MEMBERS[name]


def _wrap(name: str, value: Model | EncoderDecoder) -> Member:
    def make() -> Model | EncoderDecoder:
        return value

    return Member(name, "a model of your own", make, {"own": {}}, "own")


def _read(path: Path) -> Model | EncoderDecoder:
    try:
        return model_from_json(path.read_bytes())
    except OSError:
        raise ValueError(
            f"there is no model in {path}; write one with everyformer family gpt2 --size tiny --json > {path.name}"
        ) from None
    except UnknownPart as error:
        raise UnknownPart(f"{path}: {error}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}; everyformer family gpt2 --json prints a model as an example") from None


def member(name: str | Model | EncoderDecoder, size: str | None = None, **changes: Any) -> Model | EncoderDecoder:
    """Returns the value of a member of the family.

    name      of a member (`members()` lists them), a value, or a .json file with one
    size      one of the member's sizes, as `everyformer family` lists them. Default: that of the paper
    changes   settings of the member, as `everyformer settings NAME` lists them
    Example: `member("gpt2", "tiny", layers=3)`.
    """
    return find(name).value(size, **changes)


def build(name: str | Model | EncoderDecoder, size: str | None = None, **changes: Any) -> Network | PairNetwork:
    """Returns the network of a member with new weights; `name`, `size` and the settings are those of `member`.

    Example: `build("gpt2", "tiny", width=32)`.
    """
    return member(name, size, **changes).build()
