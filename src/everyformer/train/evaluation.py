"""The evaluations of a run: on the same examples each time, so that they make a curve, and at the end on more.

The best checkpoint and early stopping follow from the evaluations on the same examples; with run.evaluate=0 there is only the
final one.
"""

from __future__ import annotations

import math
import time
from typing import Any

from everyformer.infer.estimate import Progress
from everyformer.network.network import Network, PairNetwork
from everyformer.task.task import FittedTask
from everyformer.train.recipe import Run
from everyformer.train.record import Records

EVERY = 0.5  # seconds between reports of the progress


class StopEvaluation(Exception):
    """Raised by a stop signal during an evaluation, which may take long."""


class Evaluator:
    """Evaluates the networks of a run, in its main process."""

    def __init__(self, run: Run, task: FittedTask):
        self.run, self.task = run, task
        self.best: dict[str, Any] | None = None  # the step of the best evaluation, and its metric
        self.running = False
        self.aborted = False  # by a stop signal: the resumed run makes up for it
        self.early_stop: str | None = None  # why the run ends early

    def evaluate(self, network: Network | PairNetwork, step: int, records: Records) -> tuple[dict[str, Any], bool]:
        """Evaluate and record the metrics, after the last step on more examples.

        Returns the metrics, which are empty if a signal stopped the evaluation, and whether they are the best so far.
        """
        metrics, improved, self.running, self.aborted = dict[str, Any](), False, True, False
        try:
            if self.run.evaluate:
                metrics = self._score(network, step, records, self.run.examples)
                records.write("evaluate", step, **metrics, **self._sample(network))
                improved = self._compare(step, metrics)
                self.early_stop = self._out_of_patience(step)
            if step == self.run.steps or self.early_stop:
                metrics, evaluated = {}, metrics
                metrics = self._finally(network, step, records, evaluated)
                if not self.run.evaluate:
                    improved = self._compare(step, metrics)
        except StopEvaluation:
            metrics, self.aborted = {}, True
        finally:
            self.running = False
        return metrics, improved

    def _finally(
        self, network: Network | PairNetwork, step: int, records: Records, evaluated: dict[str, Any]
    ) -> dict[str, Any]:
        """The final metrics; they are the given ones if those are of the whole split."""
        metrics = evaluated
        if not evaluated or evaluated.get("targets") != evaluated.get("targets_in_split", math.nan):
            limit = self.run.final_examples or self.task.objective.default_limit
            metrics = self._score(network, step, records, limit, final=True)
        records.write("final", step, **metrics, **({} if self.run.evaluate else self._sample(network)))
        return metrics

    def _score(
        self, network: Network | PairNetwork, step: int, records: Records, limit: int | None, final: bool = False
    ) -> dict[str, Any]:
        def report(done: int, of: int) -> None:
            records.tell("evaluating", step, done=done, of=of, final=final)

        return self.task.objective.evaluate(network, "valid", limit, self.run.kernel, throttled(report))

    def _sample(self, network: Network | PairNetwork) -> dict[str, str]:
        sample = self.task.inference.sample(network, self.run.seed) if self.run.sample else None
        return {} if sample is None else {"sample": sample}

    def _compare(self, step: int, metrics: dict[str, Any]) -> bool:
        """Returns True if these metrics are the best so far, and keeps them."""
        metric, score = self.task.objective.metric, metrics[self.task.objective.metric]
        sign = 1 if self.task.objective.higher_is_better else -1
        improved = math.isfinite(score) and (self.best is None or sign * score > sign * self.best[metric])
        if improved:
            self.best = {"step": step, metric: score}
        return improved

    def _out_of_patience(self, step: int) -> str | None:
        """The reason to end the run, if its last evaluations were all worse than the best."""
        patience, since = self.run.patience, 0 if self.best is None else self.best["step"]
        if not patience or step - since < patience * self.run.evaluate:
            return None
        name = self.task.objective.metric.replace("_", " ")
        return f"no better {name} in {patience} evaluation{'s' * (patience > 1)} (run.patience={patience})"


def throttled(progress: Progress) -> Progress:
    """Returns a function that calls `progress` at most every half second, and not in the first one."""
    last = time.monotonic()

    def report(done: int, of: int) -> None:
        nonlocal last
        if time.monotonic() - last > EVERY:
            last = time.monotonic()
            progress(done, of)

    return report
