"""The loop: batches in, a trained model, its checkpoints and its records out.

    run = train(recipe, "runs/first")          # begins
    run = resume("runs/first")                 # goes on from the last checkpoint, to the same weights to the last bit

Everything random in a step follows from (seed, step, process), and batches from (seed, step): nothing of it has to be
saved, and nothing depends on when a run was interrupted.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from msgspec.structs import replace

from everyformer.network.model import EncoderDecoder, Model
from everyformer.network.network import Network, PairNetwork
from everyformer.task.work import Batch, Work
from everyformer.train import checkpoint
from everyformer.train.distributed import World, restarted, world
from everyformer.train.folder import changed, check_data, placed, read_model, read_recipe, write_recipe
from everyformer.train.learner import Learner
from everyformer.train.loggers import check, listen
from everyformer.train.memory import peak
from everyformer.train.recipe import Recipe
from everyformer.train.record import Listener, Records, writing
from everyformer.train.schedule import batch_size, rate
from everyformer.train.watch import Watch
from everyformer.value import to_json


@dataclass
class Trained:
    """What a run left: the network (with averaged weights, if any), its work, and the last metrics."""

    network: Network | PairNetwork
    work: Work
    recipe: Recipe
    step: int
    metrics: dict[str, Any]
    stopped: str | None = None  # why it ended early
    best: dict[str, Any] | None = None  # the step of the best checkpoint, and its metric

    @property
    def writes(self) -> bool:
        """Can it generate?"""
        return self.work.writes


def train(recipe: Recipe, folder: str | Path | None = None, *, listeners: tuple[Listener, ...] = ()) -> Trained:
    """Begin a run. Without a folder nothing is written. Begun anew by torchrun after a process died, it goes on instead."""
    if not isinstance(recipe, Recipe):
        raise ValueError(f"{recipe!r} is not a recipe; write train(Recipe.of({recipe!r}), folder)")
    target, recipe = None if folder is None else Path(folder), placed(recipe)
    check(recipe.run.loggers, target)
    if target is not None and restarted() and (target / "recipe.json").is_file() and read_recipe(target) == recipe:
        return resume(target, listeners=listeners)
    with world(recipe.run.device) as here:
        with _unless_refused(target):
            with here.in_turn():
                if here.first and target is not None:
                    if target.exists() and any(target.iterdir()):
                        raise ValueError(
                            f"{target} already exists and is not empty; give another --out, or go on with resume {target}"
                        )
                    target.mkdir(parents=True, exist_ok=True)
                work = _open(recipe, None if recipe.init_from is None else Path(recipe.init_from), here)
            value = work.adapt(recipe.value(work.changes()))
            loop = Loop(recipe, work, value, target, here, listeners)
        if here.first and target is not None:
            with writing(target):
                work.save(target)
                (target / "model.json").write_text(to_json(value) + "\n")
            write_recipe(recipe, target)  # last: where it is, the rest is
        here.wait()
        return loop.run(None)


@contextmanager
def _unless_refused(folder: Path | None) -> Iterator[None]:
    """What is refused leaves no empty folder behind, which would take its name."""
    try:
        yield
    except Exception:
        if folder is not None:
            with suppress(OSError):  # not made, or not empty
                folder.rmdir()
        raise


def resume(
    folder: str | Path,
    *,
    step: int | Literal["best"] | None = None,
    steps: int | None = None,
    settings: Sequence[str] = (),
    listeners: tuple[Listener, ...] = (),
) -> Trained:
    """Go on with a run from its last checkpoint (or from `step`), to its end (or to `steps`).

    `settings` of the run, as run.accumulate=4, are kept in its recipe, so that the next time need not name them.
    """
    target = Path(folder)
    settings = [*settings, *([] if steps is None else [f"run.steps={steps}"])]
    recipe = changed(read_recipe(target), settings)
    check_data(recipe, target)
    check(recipe.run.loggers, target)
    with world(recipe.run.device) as here:
        start = checkpoint.find(target, step) if step is not None or checkpoint.steps(target) else None
        if recipe.run.steps < (start or 0):
            raise ValueError(
                f"{target} is at step {start}, which is past run.steps={recipe.run.steps}; give more, or begin at an earlier --step"
            )
        with here.in_turn():
            work = _open(recipe, target, here)
        value = read_model(target)
        return Loop(recipe, work, value, target, here, listeners).run(start)


def _open(recipe: Recipe, folder: Path | None, here: World) -> Work:
    if recipe.data == "-" and here.size > 1:
        raise ValueError("only one process can read standard input; write the data to a file and give that as --data")
    return recipe.task.open(recipe.data, recipe.model.get("context"), folder)


class Stopped(Exception):
    """Asked to stop in the middle of an evaluation, which may be long."""


class Loop:
    """One run in one process."""

    def __init__(
        self,
        recipe: Recipe,
        work: Work,
        value: Model | EncoderDecoder,
        folder: Path | None,
        here: World,
        listeners: tuple[Listener, ...],
    ):
        self.recipe, self.work, self.value, self.folder, self.here = recipe, work, value, folder, here
        self.listeners = listeners if here.first else ()
        begun = folder is not None and bool(checkpoint.steps(folder))  # then it does not begin from another's weights
        self.learner = Learner(replace(recipe, init_from=None) if begun else recipe, work, value, here)
        self.watch = Watch(recipe.optim.patience)
        self.best: dict[str, Any] | None = None
        self.interrupted: str | None = None
        self.evaluating = False
        self.step = 0

    def run(self, start: int | None) -> Trained:
        step, run = 0, self.recipe.run
        if start is not None:
            assert self.folder is not None
            self.step = step = self._restore(start)
        if self.folder is not None and self.here.first and read_recipe(self.folder) != self.recipe:
            write_recipe(self.recipe, self.folder)  # with its new settings, now that nothing has refused them
        path, others = None, self.listeners
        if self.folder is not None and self.here.first:
            path, others = self.folder / "records.jsonl", others + listen(self.recipe, self.folder, step)
        records = Records(path, others, after=step)
        records.write(
            "begin", step, steps=run.steps, parameters=sum(p.numel() for p in self.learner.network.parameters()),
            metric=self.work.metric, bytes=self.work.bytes_per_target,
        )  # fmt: skip
        metrics: dict[str, Any] = {}
        saved = start
        try:
            with self._signals(records):
                while step < run.steps and self.interrupted is None:
                    self._step(step, records)
                    self.step, step, metrics = step + 1, step + 1, {}
                    last, save = step == run.steps, bool(run.save and step % run.save == 0)
                    if last or (run.evaluate and step % run.evaluate == 0):
                        try:
                            metrics = self._evaluate(step, records, judge=last or save)
                        except Exception:
                            if self.here.size == 1:  # else the others would be waited for
                                self._save(step, records)
                            raise
                    if self.here.any(self.interrupted is not None) and self.interrupted is None:
                        self.interrupted = "another process was asked to stop"
                    if last or save or self.interrupted:
                        self._save(step, records)
                        saved = step
            if self.folder is not None and saved != step:
                self._save(step, records)
        except Exception as error:
            with suppress(ValueError):  # the disk may be full
                records.write("end", step, error=f"{type(error).__name__}: {error}")
            raise
        records.write("end", step, **({"stopped": self.interrupted} if self.interrupted else {}), **metrics)
        self.learner.use_average()
        early = self.interrupted if step < run.steps else None
        return Trained(
            self._whole() or self.learner.network.eval(), self.work, self.recipe, step, metrics, early, self.best
        )

    def _step(self, step: int, records: Records) -> None:
        run, optim, learner, began = self.recipe.run, self.recipe.optim, self.learner, time.perf_counter()
        size = batch_size(run, step)
        if step and size != batch_size(run, step - 1):  # other rows: nothing of the last ones goes on
            learner.begin_anew()
        self.work.done = step / run.steps
        with learner.precision():
            self.work.gather(learner.network, run.seed, run.kernel)
        batch = self.work.batch(step, size, run.seed)
        count = self.work.count(batch)
        torch.manual_seed((run.seed * 1_000_003 + step) * 4099 + self.here.rank)
        total, norm = learner.gradients(batch, count)
        loss_now, norm_now = float(self.here.sum(total)), float(norm)
        reason = self.watch.look(loss_now, norm_now)
        share = rate(optim, step, run.steps)
        if reason is None:
            learner.step(share, norm if optim.clip and norm_now > optim.clip else None)
        else:
            records.write("skip", step + 1, reason=reason)
            learner.begin_anew()  # what it left may be no numbers
        learner.scaler.update()
        learner.zero_grad()
        seconds = time.perf_counter() - began
        records.write(
            "step", step + 1, loss=loss_now, norm=norm_now, lr=optim.lr * share, batch=size,
            targets=count, rate=count / seconds, memory=peak(self.here.device), **self.work.facts(),
        )  # fmt: skip

    def _evaluate(self, step: int, records: Records, judge: bool) -> dict[str, Any]:
        """Metrics of the network (of its average, if there is one), and a sample; at the last step on all examples.

        `judge` says that there will be a checkpoint: is it the best?
        """
        run, work, metrics, sample = self.recipe.run, self.work, {}, None
        with self.learner.averaged(), torch.no_grad(), self.learner.precision():
            network = self._whole()
            if network is not None:
                last, self.evaluating = step == run.steps, True
                try:
                    metrics = work.evaluate(network, "valid", None if last else run.examples, run.kernel)
                    sample = work.sample(network, run.seed)
                    # Only numbers on the same examples can be compared.
                    again = last and run.examples is not None and run.evaluate
                    judged = work.evaluate(network, "valid", run.examples, run.kernel) if again and judge else metrics
                    if judge and self._better(judged[work.metric]):
                        self.best = {"step": step, work.metric: judged[work.metric]}
                except Stopped:
                    metrics = {}
                finally:
                    self.evaluating = False
        if metrics:
            records.write("evaluate", step, **metrics, **({} if sample is None else {"sample": sample}))
        self.here.wait()
        return metrics

    def _better(self, score: float) -> bool:
        if self.best is None or not math.isfinite(score):
            return math.isfinite(score)
        sign = 1 if self.work.higher_is_better else -1
        return bool(sign * score > sign * self.best[self.work.metric])

    def _whole(self) -> Network | PairNetwork | None:
        """For the first process, the network with all its weights: itself, or a copy where each process has a part of it."""
        if not self.recipe.run.shard or self.here.size == 1:
            return self.learner.network.eval() if self.here.first else None
        weights = checkpoint.gathered(self.learner.network)  # all take part in it
        if not self.here.first:
            return None
        with torch.random.fork_rng(devices=[]):
            network = self.value.build()
        network.load_state_dict(weights)
        return network.to(self.here.device).eval()

    def _save(self, step: int, records: Records) -> None:
        if self.folder is None:
            return
        learner = self.learner
        state = {
            "step": step,
            "data": self.work.fingerprint,
            "watch": self.watch.state(),
            "scaler": learner.scaler.state_dict(),
            "best": self.best,
        }
        model_json = to_json(self.value)
        checkpoint.write(
            self.folder, learner.network, learner.optimizers, learner.average,
            {"carried": learner.left(), "work": self.work.state()}, state, model_json, self.here, self.recipe.run.keep,
        )  # fmt: skip
        records.write("save", step, best=self.best)

    def _restore(self, start: int) -> int:
        assert self.folder is not None
        learner = self.learner
        state = checkpoint.read(self.folder, start, learner.network, learner.optimizers, learner.average)
        if state["data"] != self.work.fingerprint:
            raise ValueError(
                f"the data of {self.folder} have changed since the run began ({self.recipe.data}), or an older everyformer began it, "
                "which told fewer data apart: give it the same data, or begin a new run"
            )
        if found := checkpoint.kept(self.folder, start, "work"):
            self.work.restore(found, self.recipe.run.seed)
        found = checkpoint.kept(self.folder, start, "carried")
        if found and len(Batch(found)) == batch_size(self.recipe.run, start):  # else other rows come, which begin anew
            learner.go_on(found)
        self.watch = Watch(**state["watch"])
        best = state.get("best")
        self.best = best if best and best["step"] in checkpoint.steps(self.folder) else None
        if learner.scaler.is_enabled() and state["scaler"]:  # which was empty in another precision
            learner.scaler.load_state_dict(state["scaler"])
        return int(state["step"])

    @contextmanager
    def _signals(self, records: Records) -> Iterator[None]:
        """SIGINT and SIGTERM end the run after the step in hand, with a checkpoint. A second SIGINT ends it at once.

        An evaluation is given up; the checkpoint is written as ever.
        """

        def stop(number: int, frame: Any) -> None:
            if self.interrupted is not None and number == signal.SIGINT:
                raise KeyboardInterrupt
            self.interrupted = f"asked to stop by {signal.Signals(number).name}"
            records.write("stop", self.step, reason=self.interrupted)
            if self.evaluating:
                raise Stopped

        before: dict[int, Any] = {}
        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                before[number] = signal.signal(number, stop)
        except ValueError:  # not in the main thread: then the signals belong to someone else
            before = {}
        try:
            yield
        finally:
            for name, handler in before.items():
                signal.signal(name, handler)
