"""The loss, the accuracy and the predictions of classifiers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from everyformer.attention.context import SideInputs
from everyformer.infer.estimate import Estimate, Progress, proportion_interval
from everyformer.network.network import Network, PairNetwork
from everyformer.task.batch import Batch
from everyformer.task.check import check_split
from everyformer.task.task import Inference, Objective

if TYPE_CHECKING:
    from everyformer.task.classify_data import ClassifyData, TextData

EVALUATION_ROWS = 64  # examples in one call
SHOWN = 160  # characters of a text in a sample


class ClassifyObjective(Objective):
    """Cross-entropy of the classes of whole examples."""

    metric = "accuracy"
    higher_is_better = True

    def __init__(self, data: ClassifyData, head: int):
        self.data, self.head = data, head

    def forward(self, network: Any, batch: Batch, kernel: str) -> tuple[Any, Tensor]:
        """Returns the network's output and the logits of the examples' classes."""
        output = network(batch[self.data.inputs], visible=batch.tensors.get("visible_BT"), kernel=kernel)
        return output, output.logits_of(self.head).float()

    def loss(self, network: Network | PairNetwork, batch: Batch, kernel: str) -> Tensor:
        output, logits_BC = self.forward(network, batch, kernel)
        loss = F.cross_entropy(logits_BC, batch["label_B"], reduction="sum")
        return loss + sum(output.aux.values()) * len(batch)

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
        correct, estimate = 0, Estimate(progress)
        estimate.expect(count)
        for row_B in row_N.split(EVALUATION_ROWS):
            batch = Batch(data.tensors(split, row_B, None), data.shared()).to(device)
            _, logits_BC = self.forward(network, batch, kernel)
            correct += int((logits_BC.argmax(-1) == batch["label_B"]).sum())
            estimate.add(F.cross_entropy(logits_BC, batch["label_B"], reduction="none"), 1)
        low, high = proportion_interval(correct, count)
        sizes = {"targets": count, "targets_in_split": data.rows[split]}
        return {
            "accuracy": correct / count, "low": low, "high": high, "loss": estimate.mean, "split": split, **sizes,
        }  # fmt: skip


class NodeObjective(ClassifyObjective):
    """Cross-entropy of the classes of some nodes of a graph; the network always reads the whole graph."""

    def forward(self, network: Any, batch: Batch, kernel: str) -> tuple[Any, Tensor]:
        assert batch.shared is not None
        side_inputs = SideInputs(edges=batch.shared["edge_NN"])
        output = network(batch.shared["feature_1NF"], side_inputs=side_inputs, kernel=kernel)
        return output, output.logits_of(self.head)[0, batch["node_B"]].float()


class TextClassifierInference(Inference):
    can_generate = True

    def __init__(self, data: TextData, objective: ClassifyObjective):
        self.data, self.objective = data, objective

    @torch.no_grad()
    def generate_text(self, network: Network | PairNetwork, prompt: str) -> str:  # type: ignore[override]
        """Returns the classes of a text with their probabilities, the most likely first."""
        if not prompt.strip():
            raise ValueError(f"the prompt {prompt!r} has nothing to classify; give a text with --prompt")
        batch = Batch(self.data.pad(self.data.encode([prompt]))).to(next(network.parameters()).device)
        probability_C = self.objective.forward(network, batch, "auto")[1][0].softmax(-1)
        order = probability_C.argsort(descending=True).tolist()
        return ", ".join(f"{self.data.classes[index]} {probability_C[index]:.1%}" for index in order[:5])

    def sample(self, network: Network | PairNetwork, seed: int) -> str | None:
        texts, label_N = self.data.labelled.splits["valid"]
        row = seed % len(texts)
        text = " ".join(str(texts[row]).split())
        short = text[:SHOWN] + ("..." if len(text) > SHOWN else "")
        predicted = self.generate_text(network, str(texts[row]))
        return f"{short}\n-> {predicted} (label: {self.data.labelled.classes[label_N[row]]})"
