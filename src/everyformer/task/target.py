"""What is predicted of an example: its class, or a number.

ClassTarget    loss -log p(class); accuracy
NumberTarget   loss (f - y)^2, where y is the number minus the mean of the training numbers, over their standard deviation;
               mean squared error, R2 and Pearson's correlation of the numbers themselves

MSE = 1/n sum (f_i - y_i)^2       R2 = 1 - sum (f_i - y_i)^2 / sum (y_i - mean y)^2
Pearson = sum (f_i - mean f)(y_i - mean y) / sqrt(sum (f_i - mean f)^2 sum (y_i - mean y)^2)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from everyformer.infer.estimate import Estimate, proportion_interval
from everyformer.infer.predict import Predictions
from everyformer.network.depth import Stack
from everyformer.network.model import Model
from everyformer.network.output_head import Classify, Language, Masked, OutputHead, PerToken, Regress, ReplacedToken


class Target:
    """The outputs of the network for one example, and what they mean."""

    task: str  # for error messages
    outputs: int  # of the network, for each example
    classes: tuple[str, ...] = ()
    metric: str
    higher_is_better = False

    def head(self, model: Model) -> OutputHead:
        """Returns a head that predicts the target from one vector of the sequence, which is read as the model's own head does."""
        raise NotImplementedError

    def node_head(self) -> OutputHead:
        """Returns a head that predicts the target of every position."""
        return PerToken(self.outputs)

    def labels(self, label_N: NDArray[Any]) -> Tensor:
        """Returns the labels of the data as the loss takes them."""
        raise NotImplementedError

    def losses(self, output_BC: Tensor, label_B: Tensor) -> Tensor:
        """Returns the loss of each example."""
        raise NotImplementedError

    def sums(self, output_BC: Tensor, label_B: Tensor) -> Tensor:
        """Returns sums over some examples from which the metrics follow, in float64."""
        raise NotImplementedError

    def metrics(self, sums: Tensor, estimate: Estimate) -> dict[str, float]:
        """Returns the metrics from the `sums` over all examples and the estimate of the mean loss."""
        raise NotImplementedError

    def predictions(self, output_NC: Tensor) -> Predictions:
        raise NotImplementedError

    def describe(self, output_C: Tensor) -> str:
        """Returns the prediction of one example as a text."""
        raise NotImplementedError

    def describe_label(self, label: Tensor) -> str:
        raise NotImplementedError

    def saved(self) -> dict[str, Any]:
        """Returns what a run's folder keeps of the target."""
        raise NotImplementedError


def _reading(model: Model) -> dict[str, Any]:
    """How the model's own head reads the sequence. Without one, the head that the field gives such a model: of a language model the
    last token, without a bias; of a masked model, or of such an encoder alone, the first token and a pooler (tanh in BERT, ReLU in
    DistilBERT, which has no segments, GELU in ELECTRA, whose embedding is narrow and whose layers are not repeated); of any other the
    mean, or the last token if it is causal."""
    own = next((head for head in model.outputs if isinstance(head, Classify | Regress)), None)
    if own is not None:
        names = ("reading", "pooler", "dropout", "pooler_activation", "bias")
        return {name: getattr(own, name) for name in names}
    first = model.outputs[0] if model.outputs else None
    bare = (
        first is None and model.norm is not None and not model.body.is_causal()
    )  # an encoder like BERT, imported without a head
    if bare or isinstance(first, Masked | ReplacedToken):
        replaced = isinstance(first, ReplacedToken) or (bare and model.embed_width and isinstance(model.body, Stack))
        activation = "gelu" if replaced else "tanh" if model.segments else "relu"
        return {"reading": "first", "pooler": True, "pooler_activation": activation, "dropout": model.dropout}
    if model.body.is_causal():
        return {"reading": "last", "bias": not (first is None or isinstance(first, Language))}
    return {"reading": "mean"}


class ClassTarget(Target):
    """One of some classes. Those of a run (`saved`) keep their indices."""

    task, metric, higher_is_better = "classify", "accuracy", True

    def __init__(self, classes: tuple[str, ...], saved: Mapping[str, Any] | None = None):
        self.given = classes
        known = tuple((saved or {}).get("classes", ()))
        self.classes = known if set(classes) <= set(known) else classes
        self.outputs = len(self.classes)

    def head(self, model: Model) -> OutputHead:
        return Classify(self.outputs, **_reading(model))

    def labels(self, label_N: NDArray[Any]) -> Tensor:
        index_C = np.array([self.classes.index(name) for name in self.given], dtype=np.int64)
        return torch.from_numpy(index_C[label_N])

    def losses(self, output_BC: Tensor, label_B: Tensor) -> Tensor:
        return F.cross_entropy(output_BC, label_B, reduction="none")

    def sums(self, output_BC: Tensor, label_B: Tensor) -> Tensor:
        return (output_BC.argmax(-1) == label_B).sum(0, keepdim=True).double().cpu()

    def metrics(self, sums: Tensor, estimate: Estimate) -> dict[str, float]:
        low, high = proportion_interval(int(sums), estimate.scored)
        return {"accuracy": int(sums) / estimate.scored, "low": low, "high": high, "loss": estimate.mean}

    def predictions(self, output_NC: Tensor) -> Predictions:
        probability_NC = output_NC.softmax(-1).numpy()[:, : len(self.classes)]
        return Predictions(np.array(self.classes)[probability_NC.argmax(-1)], probability_NC, self.classes)

    def describe(self, output_C: Tensor) -> str:
        probability_C = output_C.softmax(-1)
        order = probability_C.argsort(descending=True).tolist()
        return ", ".join(f"{self.classes[index]} {probability_C[index]:.1%}" for index in order[:5])

    def describe_label(self, label: Tensor) -> str:
        return self.classes[int(label)]

    def saved(self) -> dict[str, Any]:
        return {"classes": self.classes}


class NumberTarget(Target):
    """A real number. The network predicts it in units of the standard deviation of the training numbers, from their mean on."""

    task, metric, outputs = "regress", "mean_squared_error", 1

    def __init__(self, mean: float, std: float):
        self.mean, self.std = mean, std

    def head(self, model: Model) -> OutputHead:
        return Regress(1, **_reading(model))

    def labels(self, label_N: NDArray[Any]) -> Tensor:
        return torch.from_numpy((label_N.astype(np.float64) - self.mean) / self.std).float()

    def losses(self, output_BC: Tensor, label_B: Tensor) -> Tensor:
        return F.mse_loss(output_BC[:, 0], label_B, reduction="none")

    def sums(self, output_BC: Tensor, label_B: Tensor) -> Tensor:
        f, y = output_BC[:, 0].double(), label_B.double()
        return torch.stack([one.sum() for one in (f, y, f * f, y * y, f * y)]).cpu()

    def metrics(self, sums: Tensor, estimate: Estimate) -> dict[str, float]:
        """R2 and Pearson's correlation are left out where they are undefined: if all numbers, or all predictions, are equal."""
        (f, y, ff, yy, fy), count, unit = sums.tolist(), estimate.scored, self.std**2
        f_variance, y_variance, covariance = ff - f * f / count, yy - y * y / count, fy - f * y / count
        metrics = {"mean_squared_error": estimate.mean * unit, "low": estimate.low * unit, "high": estimate.high * unit}
        if y_variance > 1e-9 * yy:
            metrics["r2"] = 1 - estimate.total / y_variance
            if f_variance > 1e-9 * ff:
                metrics["pearson"] = covariance / (f_variance * y_variance) ** 0.5
        return metrics | {"loss": estimate.mean}

    def predictions(self, output_NC: Tensor) -> Predictions:
        return Predictions(output_NC[:, 0].double().numpy() * self.std + self.mean)

    def describe(self, output_C: Tensor) -> str:
        return f"{float(output_C[0]) * self.std + self.mean:.6g}"

    def describe_label(self, label: Tensor) -> str:
        return f"{float(label) * self.std + self.mean:.6g}"

    def saved(self) -> dict[str, Any]:
        return {"mean": self.mean, "std": self.std}
