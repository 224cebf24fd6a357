"""The table of the family: every member by name, with its paper and its sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, get_type_hints

import torch
from torch.overrides import TorchFunctionMode

from everyformer.family.act_rnn import SIZES as ACT_SIZES
from everyformer.family.act_rnn import act_rnn
from everyformer.family.adaptive_span import SIZES as SPAN_SIZES
from everyformer.family.adaptive_span import adaptive_span
from everyformer.family.bert import SIZES as BERT_SIZES
from everyformer.family.bert import bert
from everyformer.family.byte import CLASSIFIER_SIZES, LANGUAGE_SIZES, byte_classifier, byte_language
from everyformer.family.deep_character import SIZES as DEEP_SIZES
from everyformer.family.deep_character import deep_character
from everyformer.family.gpt2 import SIZES as GPT2_SIZES
from everyformer.family.gpt2 import gpt2
from everyformer.family.graph import SIZES as GRAPH_SIZES
from everyformer.family.graph import graph
from everyformer.family.gtrxl import SIZES as GTRXL_SIZES
from everyformer.family.gtrxl import gtrxl
from everyformer.family.image_transformer import SIZES as IMAGE_SIZES
from everyformer.family.image_transformer import image_transformer
from everyformer.family.lstm import ABLATED_SIZES, LSTM_SIZES, ablated_lstm, lstm
from everyformer.family.reformer import SIZES as REFORMER_SIZES
from everyformer.family.reformer import reformer
from everyformer.family.sparse_transformer import SIZES as SPARSE_SIZES
from everyformer.family.sparse_transformer import sparse_transformer
from everyformer.family.transformer import SIZES as TRANSFORMER_SIZES
from everyformer.family.transformer import transformer
from everyformer.family.transformer_xl import SIZES as XL_SIZES
from everyformer.family.transformer_xl import transformer_xl
from everyformer.family.universal_transformer import SIZES as UNIVERSAL_SIZES
from everyformer.family.universal_transformer import universal_transformer
from everyformer.family.vit import SIZES as VIT_SIZES
from everyformer.family.vit import vit
from everyformer.network.model import EncoderDecoder, Model
from everyformer.network.network import Network, PairNetwork
from everyformer.network.store import model_from_json
from everyformer.value import checked, nearest


@dataclass(frozen=True)
class Member:
    """A name, the paper, the function that makes its value, its sizes, and the size meant when none is named."""

    name: str
    paper: str
    make: Callable[..., Model | EncoderDecoder]
    sizes: Mapping[str, Mapping[str, Any]]
    size: str

    def settings(self) -> dict[str, Any]:
        """What can be set, by name, with its type."""
        kinds = get_type_hints(self.make, include_extras=True)
        del kinds["return"]
        return kinds

    def value(self, size: str | None = None, **changes: Any) -> Model | EncoderDecoder:
        size = size or self.size
        if size not in self.sizes:
            raise ValueError(f"{self.name} has no size {size!r}; {nearest(size, self.sizes)}")
        kinds = self.settings()
        for name, given in changes.items():
            if name not in kinds:
                raise ValueError(f"{self.name} has no {name!r} to set; {nearest(name, kinds)}")
            checked(f"{self.name}.{name}", given, kinds[name])
        numbers = dict(self.sizes[size])
        if "heads" in numbers and changes.get("width", 0) % numbers["heads"]:
            del numbers["heads"]  # as many as the width asks for
        return self.make(**(numbers | changes))


MEMBERS = {
    member.name: member
    for member in (
        Member("transformer", "Vaswani et al. 2017", transformer, TRANSFORMER_SIZES, "base"),
        Member("byte-language", "Bloem 2019", byte_language, LANGUAGE_SIZES, "paper"),
        Member("byte-classifier", "Bloem 2019", byte_classifier, CLASSIFIER_SIZES, "paper"),
        Member("bert", "Devlin et al. 2018", bert, BERT_SIZES, "base"),
        Member("gpt2", "Radford et al. 2019", gpt2, GPT2_SIZES, "small"),
        Member("deep-character", "Al-Rfou et al. 2018", deep_character, DEEP_SIZES, "64"),
        Member("transformer-xl", "Dai et al. 2019", transformer_xl, XL_SIZES, "enwik8-12"),
        Member("gtrxl", "Parisotto et al. 2019", gtrxl, GTRXL_SIZES, "paper"),
        Member("adaptive-span", "Sukhbaatar et al. 2019", adaptive_span, SPAN_SIZES, "enwik8"),
        Member("image-transformer", "Parmar et al. 2018", image_transformer, IMAGE_SIZES, "cifar10"),
        Member("sparse-transformer", "Child et al. 2019", sparse_transformer, SPARSE_SIZES, "enwik8"),
        Member("reformer", "Kitaev et al. 2020", reformer, REFORMER_SIZES, "enwik8"),
        Member("universal-transformer", "Dehghani et al. 2019", universal_transformer, UNIVERSAL_SIZES, "language"),
        Member("lstm", "Hochreiter & Schmidhuber 1997", lstm, LSTM_SIZES, "byte"),
        Member("ablated-lstm", "Levy et al. 2018", ablated_lstm, ABLATED_SIZES, "byte"),
        Member("act-rnn", "Graves 2016", act_rnn, ACT_SIZES, "wikipedia"),
        Member("graph-classifier", "Velickovic et al. 2017", graph, GRAPH_SIZES, "cora"),
        Member("vit", "Dosovitskiy et al. 2020", vit, VIT_SIZES, "b16"),
    )
}


def members() -> list[str]:
    return list(MEMBERS)


def find(name: str | Model | EncoderDecoder) -> Member:
    """A member by its name; or a model of one's own, given as a value or as a .json file of one, in the place of a member."""
    if isinstance(name, Model | EncoderDecoder):
        return _own("model", name)
    if str(name).endswith(".json"):
        return _own(Path(name).stem, _read(Path(name).expanduser()))
    if name not in MEMBERS:
        raise ValueError(f"no member of the family is named {name!r}; {nearest(name, MEMBERS)}")
    return MEMBERS[name]


def _own(name: str, value: Model | EncoderDecoder) -> Member:
    def make() -> Model | EncoderDecoder:
        return value

    return Member(name, "a model of one's own", make, {"own": {}}, "own")


def _read(path: Path) -> Model | EncoderDecoder:
    try:
        return model_from_json(path.read_bytes())
    except OSError:
        raise ValueError(
            f"there is no model in {path}; write one with everyformer family gpt2 --size tiny --json > {path.name}"
        ) from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}; everyformer family gpt2 --json shows how a model is written") from None


def member(name: str | Model | EncoderDecoder, size: str | None = None, **changes: Any) -> Model | EncoderDecoder:
    """The value of a member: `member("gpt2", "tiny", layers=3)`."""
    return find(name).value(size, **changes)


def build(name: str | Model | EncoderDecoder, size: str | None = None, **changes: Any) -> Network | PairNetwork:
    """The network of a member, with fresh weights: `build("gpt2", width=256)`."""
    return member(name, size, **changes).build()


class NoInit(TorchFunctionMode):
    """Skips the initialization of weights. On the meta device it has no effect, but imports torch's compiler (seconds)."""

    IN_PLACE = frozenset({"normal_", "uniform_", "trunc_normal_", "zero_", "fill_", "mul_", "copy_"})

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in self.IN_PLACE:
            return args[0] if args else kwargs["tensor"]
        if func in (torch.randn, torch.rand):
            func = torch.empty
        return func(*args, **kwargs)


@lru_cache(maxsize=256)
def parameters(value: Model | EncoderDecoder) -> int:
    """Returns the number of parameters, counted on a network on the meta device."""
    with torch.device("meta"), NoInit():
        network = value.build()
    return sum(p.numel() for p in {id(p): p for p in network.parameters()}.values())
