"""What a model computes on one example: attention, predictions, and the spans, steps, buckets and gates of the models that have them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from msgspec import Meta, Struct
from torch import Tensor

from everyformer.attention.score_mod import ScoreModModule
from everyformer.explore.answer import Answer, Ask, quantised
from everyformer.explore.library import Library
from everyformer.network.network import Network, PairNetwork
from everyformer.study.ablation import attention_layers, without_heads
from everyformer.study.attention_pictures import layout, neighbourhood
from everyformer.study.head_profile import profile
from everyformer.study.inner_maps import InnerMap, bucket_maps, gate_maps, halting_maps, span_maps
from everyformer.study.predicted import Predicted, predicted
from everyformer.study.segments import probe_segments
from everyformer.task.attention_maps import PARTS, AttentionMaps, ProbedSide, maps_of, probe
from everyformer.task.classify_objective import TextClassifierInference
from everyformer.task.denoise import DenoiseInference
from everyformer.task.language_inference import LanguageInference
from everyformer.task.probe_input import ProbeInput
from everyformer.task.token_inference import TokenInference
from everyformer.task.translate import TranslateInference
from everyformer.train.trained import TrainedRun

MAX_BYTES = 1 << 30  # of the attention weights of one example
KEPT = 4  # examples whose weights are kept
MAX_PRODUCTS = 1 << 20  # of queries and keys, that are sent with the weights: 1,024 positions
THUMBNAIL = 48  # cells on a side
Name = Annotated[str, Meta(max_length=500)]
Natural = Annotated[int, Meta(ge=0, le=1 << 31)]
INNER: dict[str, Callable[[Network | PairNetwork, ProbeInput], list[InnerMap]]] = {
    "halting": halting_maps, "buckets": bucket_maps, "gates": gate_maps, "spans": span_maps,
}  # fmt: skip


class ReadRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """An example that a run reads: a text, or one of its validation data. `off` are heads that are switched off."""

    run: Name
    text: Annotated[str, Meta(max_length=200_000)] | None = None
    example: Natural | None = None
    segment: Annotated[int, Meta(ge=1, le=1 << 20)] | None = (
        None  # tokens of a segment, for a model with a segment memory
    )
    off: list[tuple[str, Natural, Natural]] = []


class HeadRequest(ReadRequest, forbid_unknown_fields=True, kw_only=True):
    part: str = ""
    layer: Natural
    head: Natural


class GraphRequest(ReadRequest, forbid_unknown_fields=True, kw_only=True):
    node: Natural


class InnerRequest(ReadRequest, forbid_unknown_fields=True, kw_only=True):
    kind: str


@dataclass(frozen=True)
class Reading:
    """What was recorded while a model read an example."""

    model: TrainedRun
    inputs: ProbeInput
    sides: Sequence[ProbedSide]
    maps: dict[str, AttentionMaps]  # by part
    predicted: Predicted | None


class Inside:
    """Answers what the view of a model's inside asks."""

    def __init__(self, library: Library):
        self.library = library
        self.readings: OrderedDict[Any, Reading] = OrderedDict()
        self.asks = {
            "/api/inside": Ask(ReadRequest, self.read),
            "/api/inside/head": Ask(HeadRequest, self.head),
            "/api/inside/inner": Ask(InnerRequest, self.inner),
            "/api/inside/graph": Ask(GraphRequest, self.graph),
        }

    def read(self, request: ReadRequest) -> Answer:
        """The positions, a thumbnail of each head, and what is predicted."""
        with self.library.lock, torch.no_grad():
            reading = self._reading(request)
        side, arrays = reading.sides[-1], list[Any]()
        parts = [self._part(reading, name, arrays) for name in reading.maps]
        data: dict[str, Any] = {
            "parts": parts, "labels": list(side.labels), "reads": _reads(reading.model),
            "inner": [kind for kind in INNER if _has(kind, reading.sides)],
            "segment": _segment(request, reading) if _has_memory(reading) else None,
            "writes": isinstance(reading.model.task.inference, LanguageInference),
            "image": _image(reading.inputs, arrays), "source": list(reading.inputs.source_labels),
            "target": "Translation by the model" if isinstance(reading.model.task.inference, TranslateInference) else "Target",
            "graph": None if reading.inputs.graph is None else {"node": reading.inputs.graph.node},
        }  # fmt: skip
        if (found := reading.predicted) is not None:
            data["predicted"] = {"of": found.of, "names": found.names, "total": found.total, "at": len(arrays)}
            arrays += [found.id_PN.numpy().astype(np.float32), found.probability_PN.numpy()]
            if found.surprisal_T is not None:
                data["predicted"]["surprisal"] = len(arrays)
                arrays += [found.surprisal_T.numpy(), found.came_T.numpy().astype(np.float32)]  # type: ignore[union-attr]
        return Answer(data, arrays)

    def head(self, request: HeadRequest) -> Answer:
        """The weights of one head, in 65,536 steps, and what describes it."""
        with self.library.lock, torch.no_grad():
            reading = self._reading(request)
        if request.part not in reading.maps:
            raise ValueError(f"the model has no attention in {request.part!r}; it has {', '.join(reading.maps)}")
        maps = reading.maps[request.part]
        if request.layer >= len(maps.weight_LHQK) or request.head >= len(maps.weight_LHQK[request.layer]):
            raise ValueError(f"there is no {maps.column} {request.head} in {maps.row} {request.layer}")
        weight_QK = maps.weight_LHQK[request.layer][request.head]
        code_QK, largest = quantised(weight_QK.numpy())
        data: dict[str, Any] = {"largest": largest, "profile": profile(weight_QK, request.part != "cross")}
        data |= _described(reading, request)
        arrays: list[Any] = [code_QK]
        side = reading.sides[0 if request.part == "encoder" else -1]
        is_short = weight_QK.numel() <= MAX_PRODUCTS
        if is_short and request.part != "cross" and request.layer < len(side.probe.products):
            product_QK = side.probe.products[request.layer][0, request.head, : len(weight_QK), : weight_QK.shape[1]]
            arrays.append(product_QK.float().cpu().numpy().astype(np.float32))
        return Answer(data, arrays)

    def inner(self, request: InnerRequest) -> Answer:
        """Spans, halting steps, buckets or gates by position."""
        if request.kind not in INNER:
            raise ValueError(f"there is nothing named {request.kind[:50]!r} to show; the names are {', '.join(INNER)}")
        with self.library.lock, torch.no_grad():
            reading = self._reading(request)
            with without_heads(reading.model.network, request.off):
                maps = INNER[request.kind](reading.model.network, reading.inputs)
        rows = [
            {"title": one.title, "rows": list(one.rows), "kind": one.kind, "labels": list(one.labels)} for one in maps
        ]
        return Answer({"maps": rows}, [np.ascontiguousarray(one.value_RT.numpy(), np.float32) for one in maps])

    def graph(self, request: GraphRequest) -> Answer:
        """The nodes around one, with their places in a plane."""
        with self.library.lock, torch.no_grad():
            graph = self._reading(request).inputs.graph
        if graph is None or request.node >= len(graph.class_N):
            raise ValueError(f"the run reads no graph with a node {request.node}; choose another node or run")
        nodes = neighbourhood(graph.edge_NN, request.node)
        edge_NN = graph.edge_NN[nodes][:, nodes]
        joined_NN = (edge_NN | edge_NN.T) & ~torch.eye(len(nodes), dtype=torch.bool)
        data = {
            "node": request.node, "nodes": nodes, "classes": graph.class_N[nodes].tolist(),
            "edges": joined_NN.triu().nonzero().tolist(), "places": layout(joined_NN).round(4).tolist(),
        }  # fmt: skip
        return Answer(data)

    def _reading(self, request: ReadRequest) -> Reading:
        key = (request.run, request.text, request.example, request.segment, tuple(request.off))
        model = self.library.model(request.run)
        if key not in self.readings or self.readings[key].model is not model:
            self.readings[key] = self._record(model, request)
            while len(self.readings) > KEPT:
                self.readings.popitem(last=False)
        self.readings.move_to_end(key)
        return self.readings[key]

    def _record(self, model: TrainedRun, request: ReadRequest) -> Reading:
        model.require("attention", "reads no text or example that can be probed")
        network, inference = model.network, model.task.inference
        if request.text is None and not isinstance(inference, LanguageInference):
            inference = model.task_with_data.inference
        inputs = inference.probe_input(network, request.text, request.example)
        _check_size(network, inputs)
        with without_heads(network, request.off):
            if request.segment is not None and isinstance(network, Network) and network.value.memory is not None:
                sides = [probe_segments(network, inputs, request.segment, products=True)]
            else:
                sides = probe(network, inputs, products=True)
        maps = {}
        for part in ("",) if len(sides) == 1 else PARTS:
            try:
                maps[part] = maps_of(sides, inputs, part or None)
            except ValueError:  # it has no attention
                continue
        return Reading(model, inputs, sides, maps, predicted(inference, inputs, sides[-1]))

    def _part(self, reading: Reading, name: str, arrays: list[Any]) -> dict[str, Any]:
        """One attention of the model: its heads, each with the place of its thumbnail."""
        maps = reading.maps[name]
        data = {
            "name": name, "title": maps.title, "row": maps.row, "column": maps.column, "at": len(arrays),
            "queries": list(maps.queries), "keys": list(maps.keys),
            "layers": [len(weight_HQK) for weight_HQK in maps.weight_LHQK],
            "switches": bool(attention_layers(reading.model.network, name)),
        }  # fmt: skip
        arrays += [thumbnails(weight_HQK) for weight_HQK in maps.weight_LHQK]
        return data


def thumbnails(weight_HQK: Tensor) -> Any:
    """Small images of heads, H, Y, X: in each cell the largest weight, relative to the largest of its query."""
    relative_HQK = weight_HQK / weight_HQK.amax(2, keepdim=True).clamp(min=1e-12)
    sides = [min(THUMBNAIL, size) for size in weight_HQK.shape[1:]]
    small_HYX = torch.nn.functional.adaptive_max_pool2d(relative_HQK[:, None], sides)[:, 0]
    return (small_HYX * 255).round().to(torch.uint8).numpy()


def _described(reading: Reading, request: HeadRequest) -> dict[str, Any]:
    """The pattern and the score modifications of the head, as text."""
    layers = attention_layers(reading.model.network, request.part)
    if not layers:
        return {}
    attention: Any = layers[request.layer % len(layers)]
    modules = list(getattr(attention, "score_mods", ()))
    changed = [type(one).transform is not ScoreModModule.transform for one in modules]
    score_mods = [str(one) for one in getattr(attention.value, "score_mods", ())]
    return {
        "pattern": str(attention.value.pattern.for_head(request.head)), "score_mods": score_mods,
        "in_product": [text for text, one in zip(score_mods, changed, strict=True) if one],  # change queries and keys
    }  # fmt: skip


def _check_size(network: Network | PairNetwork, inputs: ProbeInput) -> None:
    """Raises ValueError if the weights of all heads would take too much memory."""
    sides = [network] if isinstance(network, Network) else [network.encoder, network.decoder]
    heads = sum(_maps_of(side) for side in sides)
    length = max(len(inputs.labels), len(inputs.source_labels), 1)
    if (needed := 8 * heads * length**2) > MAX_BYTES:
        longest = int((MAX_BYTES / 8 / max(1, heads)) ** 0.5)
        raise ValueError(
            f"the weights of {heads} heads over {length:,} positions take {needed / 2**30:.1f} GiB; give at most {longest:,} positions"
        )


def _maps_of(network: Network) -> int:
    """The number of matrices over all pairs of positions that a probe records."""
    body, count = network.value.body, 0
    for sublayer in body.sublayers():
        heads: Any = getattr(sublayer, "heads", None)
        count += heads.heads if heads is not None else network.value.width if sublayer.mixes_positions() else 0
    layers = len(network.body.layer_modules()) * network.body.executions
    return count * max(1, layers // max(1, len(body.layers)))


def _reads(model: TrainedRun) -> list[str]:
    """What the model can be given: a text, or the number of an example of its data."""
    inference = model.task.inference
    is_text = isinstance(inference, TokenInference | TextClassifierInference | TranslateInference | DenoiseInference)
    has_data = inference.reads_examples and bool(model.step or model.open_data)
    return ["text"] * is_text + ["example"] * has_data


def _has(kind: str, sides: Sequence[ProbedSide]) -> bool:
    def recorded(side: ProbedSide) -> Iterator[Any]:
        one = side.probe
        yield from {"halting": one.halts, "buckets": one.buckets, "spans": one.spans}.get(
            kind, [*one.gates, *one.cell_gates]
        )

    return any(any(True for _ in recorded(side)) for side in sides)


def _has_memory(reading: Reading) -> bool:
    network = reading.model.network
    return (
        isinstance(network, Network)
        and network.value.memory is not None
        and isinstance(reading.model.task.inference, LanguageInference)
    )


def _segment(request: ReadRequest, reading: Reading) -> dict[str, Any]:
    network = reading.model.network
    assert isinstance(network, Network) and network.value.memory is not None
    return {"length": request.segment, "memory": network.value.memory.length}


def _image(inputs: ProbeInput, arrays: list[Any]) -> dict[str, Any] | None:
    """An image of the example, of which the keys read cells."""
    if (image := inputs.image) is None:
        return None
    at = len(arrays)
    arrays.append((image.pixel_CYX * 255).round().to(torch.uint8).numpy())
    arrays.append(image.cell_P2.numpy().astype(np.float32))
    channels, height, width = image.pixel_CYX.shape
    return {"at": at, "channels": channels, "height": height, "width": width, "size": image.size, "query": image.query}
