"""The loss, the metrics and the predictions of models that predict a class or a number of each example."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from everyformer.attention.context import SideInputs
from everyformer.data.inputs import Inputs
from everyformer.infer.embed import embeddings
from everyformer.infer.estimate import Estimate, Progress
from everyformer.infer.predict import Predictions, in_batches
from everyformer.network.network import Network, PairNetwork
from everyformer.network.output_head import Reading
from everyformer.task.batch import Batch
from everyformer.task.check import check_split
from everyformer.task.probe_input import (
    EXAMPLE,
    GraphNodes,
    ImageCells,
    ProbeInput,
    check_index,
    refuse_text,
    token_labels,
)
from everyformer.task.task import Inference, Objective

if TYPE_CHECKING:
    from everyformer.task.classify_data import ClassifyData, GraphData, LabelledData, TextData

EVALUATION_ROWS = 64  # examples in one call
SHOWN = 160  # characters of a text in a sample


class ClassifyObjective(Objective):
    """The loss of the target of whole examples: cross-entropy of classes, or squared error of numbers."""

    def __init__(self, data: ClassifyData, head: int):
        self.data, self.head = data, head
        self.metric, self.higher_is_better = data.target.metric, data.target.higher_is_better

    def arguments(self, batch: Batch) -> tuple[Tensor, dict[str, Any]]:
        """Returns the network's input and the options of its call."""
        return batch[self.data.inputs], {"visible": batch.tensors.get("visible_BT")}

    def forward(self, network: Any, batch: Batch, kernel: str) -> tuple[Any, Tensor]:
        """Returns the network's output, and its outputs for the target of each example."""
        inputs, options = self.arguments(batch)
        output = network(inputs, **options, kernel=kernel)
        return output, output.logits_of(self.head).float()

    def loss(self, network: Network | PairNetwork, batch: Batch, kernel: str) -> Tensor:
        output, output_BC = self.forward(network, batch, kernel)
        return self.data.target.losses(output_BC, batch["label_B"]).sum() + sum(output.aux.values()) * len(batch)

    @torch.no_grad()
    def evaluate(
        self,
        network: Network | PairNetwork,
        split: str,
        limit: int | None,
        kernel: str,
        progress: Progress | None = None,
    ) -> dict[str, Any]:
        data, device = self.data, next(network.parameters()).device
        check_split(split, data.rows, data.name)
        # Examples are spread over the split, so that a part has all classes even if they are sorted.
        count = data.rows[split] if limit is None else min(limit, data.rows[split])
        row_N = torch.arange(count) * data.rows[split] // count
        sums, estimate = list[Tensor](), Estimate(progress)
        estimate.expect(count)
        for row_B in row_N.split(EVALUATION_ROWS):
            batch = Batch(data.tensors(split, row_B, None), data.shared()).to(device)
            _, output_BC = self.forward(network, batch, kernel)
            estimate.add(data.target.losses(output_BC, batch["label_B"]), 1)
            sums.append(data.target.sums(output_BC, batch["label_B"]))
        metrics = data.target.metrics(torch.stack(sums).sum(0), estimate)
        return metrics | {"split": split, "targets": count, "targets_in_split": data.rows[split]}


class NodeObjective(ClassifyObjective):
    """The loss of the targets of some nodes of a graph; the network always reads the whole graph."""

    def arguments(self, batch: Batch) -> tuple[Tensor, dict[str, Any]]:
        assert batch.shared is not None
        return batch.shared["feature_1NF"], {"side_inputs": SideInputs(edges=batch.shared["edge_NN"])}

    def forward(self, network: Any, batch: Batch, kernel: str) -> tuple[Any, Tensor]:
        inputs, options = self.arguments(batch)
        output = network(inputs, **options, kernel=kernel)
        return output, output.logits_of(self.head)[0, batch["node_B"]].float()


class ClassifyInference(Inference):
    """Predictions of new examples."""

    can_predict = predicts_targets = True
    reads = "sets of vectors"

    def __init__(self, data: ClassifyData, objective: ClassifyObjective):
        self.data, self.objective, self.classes = data, objective, data.target.classes

    def outputs(self, network: Network | PairNetwork, rows: Sequence[Any]) -> Tensor:
        """Returns the outputs for the targets of encoded examples."""
        device = next(network.parameters()).device

        def forward(some: list[Any]) -> Tensor:
            return self.objective.forward(network, Batch(self.data.collate(some)).to(device), "auto")[1]

        return in_batches(rows, forward)

    def predict(self, network: Network | PairNetwork, inputs: Sequence[Any]) -> Predictions:
        return self.data.target.predictions(self.outputs(network, self.data.encode(inputs)))

    def embed(
        self, network: Network | PairNetwork, inputs: Sequence[Any], pooling: Reading = "mean", normalize: bool = False
    ) -> NDArray[np.float32]:
        device = next(network.parameters()).device

        def hidden(some: list[Any]) -> tuple[Tensor, Tensor | None]:
            read, options = self.objective.arguments(Batch(self.data.collate(some)).to(device))
            return network(read, **options).hidden, options["visible"]

        return embeddings(self.data.encode(inputs), hidden, pooling, normalize)

    def read_inputs(self, data: str, column: str | None = None) -> Inputs:
        return self.data.read_inputs(data, column)

    def _probe_input(self, network: Network | PairNetwork, text: str | None, example: int | None) -> ProbeInput:
        """An example of the validation data."""
        refuse_text(text, self.reads)
        row = check_index(example or 0, self.data.rows["valid"], f"validation examples of {self.data.name}")
        batch = Batch(self.data.tensors("valid", torch.tensor([row]), None), self.data.shared())
        inputs, options = self.objective.arguments(batch.to(next(network.parameters()).device))
        return self.labelled(network, ProbeInput((inputs,), (), options), row)

    def labelled(self, network: Any, inputs: ProbeInput, row: int) -> ProbeInput:
        """Returns the input with the labels of its positions."""
        return replace(inputs, labels=[str(index) for index in range(int(inputs.options["visible"].sum()))])


class ImageClassifierInference(ClassifyInference):
    data: LabelledData
    reads = "images"

    def labelled(self, network: Any, inputs: ProbeInput, row: int) -> ProbeInput:
        pixel_CYX = torch.from_numpy(self.data.examples_of("valid", torch.tensor([row]))[0]).float() / 255
        size = network.value.embed.size
        rows, columns = (length // size for length in pixel_CYX.shape[1:])
        cell_P2 = torch.cartesian_prod(torch.arange(rows), torch.arange(columns))
        labels = [f"{y},{x}" for y, x in cell_P2.tolist()]
        return replace(inputs, labels=labels, image=ImageCells(pixel_CYX, cell_P2, size, None))


class TextClassifierInference(ClassifyInference):
    data: TextData
    can_generate = True

    def _probe_input(self, network: Network | PairNetwork, text: str | None, example: int | None) -> ProbeInput:
        """A text with the marks that the classifier adds. Default: EXAMPLE; of token ids, the first validation example."""
        if text == "":
            raise ValueError("the text is empty; give one, or leave it out")
        given: Any = text
        if text is None:
            inputs = self.data.labelled.splits["valid"][0]
            is_text = isinstance(inputs[0], str) and example is None
            given = EXAMPLE if is_text else inputs[check_index(example or 0, len(inputs), "examples")]
        (ids,) = self.data.encode([given])
        batch = Batch(self.data.collate([ids])).to(next(network.parameters()).device)
        read, options = self.objective.arguments(batch)
        return ProbeInput((read,), token_labels(self.data.tokenizer, ids), options)

    @torch.no_grad()
    def generate_text(self, network: Network | PairNetwork, prompt: str) -> str:  # type: ignore[override]
        """Returns the classes of a text with their probabilities, the most likely first, or its number."""
        if not prompt.strip():
            verb = "predict" if self.data.target.task == "regress" else "classify"
            raise ValueError(f"the prompt {prompt!r} has nothing to {verb}; give a text with --prompt")
        return self.data.target.describe(self.outputs(network, self.data.encode([prompt]))[0])

    def sample(self, network: Network | PairNetwork, seed: int) -> str | None:
        texts, _ = self.data.labelled.splits["valid"]
        row = seed % len(texts)
        text = " ".join(self.data.as_text(texts[row]).split())
        short = text[:SHOWN] + ("..." if len(text) > SHOWN else "")
        predicted = self.data.target.describe(self.outputs(network, self.data.encode([texts[row]]))[0])
        return f"{short}\n-> {predicted} (label: {self.data.target.describe_label(self.data.label['valid'][row])})"


class NodeInference(ClassifyInference):
    data: GraphData
    takes_graph = True
    reads = "a graph"

    def labelled(self, network: Any, inputs: ProbeInput, row: int) -> ProbeInput:
        graph = GraphNodes(self.data.whole["edge_NN"], self.data.label_N, int(self.data.node["valid"][row]))
        return replace(inputs, labels=[str(node) for node in range(len(self.data.label_N))], graph=graph)

    def embed(
        self, network: Network | PairNetwork, inputs: Any, pooling: Reading = "mean", normalize: bool = False
    ) -> NDArray[np.float32]:
        """Returns the vectors of all nodes of a graph, without pooling."""
        shared = self.data.read_whole(inputs)
        batch = Batch({"node_B": torch.zeros(1)}, shared).to(next(network.parameters()).device)
        read, options = self.objective.arguments(batch)
        x_ND = network(read, **options).hidden[0].float()
        return (F.normalize(x_ND, dim=-1) if normalize else x_ND).cpu().numpy()

    def predict(self, network: Network | PairNetwork, inputs: Any) -> Predictions:
        """Returns the predictions of all nodes of a graph: a JSON file, or its content."""
        device = next(network.parameters()).device
        shared = self.data.read_whole(inputs)
        node_B = torch.arange(len(shared["edge_NN"]))
        with torch.no_grad():
            _, output_NC = self.objective.forward(network, Batch({"node_B": node_B}, shared).to(device), "auto")
        return self.data.target.predictions(output_NC.cpu())
