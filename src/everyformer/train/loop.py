"""The training loop: batches in; a trained model, its checkpoints and its records out.

    run = train(recipe, "runs/first")          # starts a run
    run = resume("runs/first")                 # resumes it from its last checkpoint, to bitwise equal weights

All random numbers of a step follow from (seed, step, process), and batches from (seed, step): none of it is saved, and nothing
depends on when a run was interrupted.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from msgspec import convert
from msgspec.structs import replace

from everyformer.network.model import EncoderDecoder, Model
from everyformer.network.network import Network, PairNetwork
from everyformer.task.batch import Batch
from everyformer.task.task import TaskData
from everyformer.train import checkpoint
from everyformer.train.distributed import World, init_world, restarted
from everyformer.train.draw import Batches
from everyformer.train.evaluation import Evaluator, StopEvaluation
from everyformer.train.folder import check_data, override_run, read_model, read_recipe, resolve, write_recipe, write_run
from everyformer.train.gradient_watch import GradientWatch, Unstable
from everyformer.train.in_flight import Arrived, InFlight, Sent, steps_ahead
from everyformer.train.learner import Learner
from everyformer.train.lock import only_writer
from everyformer.train.loggers import check_loggers, make_loggers
from everyformer.train.memory import peak_memory
from everyformer.train.progress import show_if
from everyformer.train.provenance import provenance
from everyformer.train.recipe import Recipe
from everyformer.train.record import Callback, Records
from everyformer.train.run_data import changed_splits, check_classes, with_data
from everyformer.train.schedule import batch_size, lr_factor
from everyformer.train.stop_signals import stop_signals
from everyformer.train.trained import TrainedRun


def train(
    recipe: Recipe,
    folder: str | Path | None = None,
    *,
    until: int | None = None,
    progress: bool = False,
    callbacks: tuple[Callback, ...] = (),
) -> TrainedRun:
    """Start a run of a `recipe`: `train(Recipe.of("gpt2", "run.steps=500", size="tiny", data="my.txt"), "runs/first", progress=True)`.

    Returns the trained run; without a `folder` nothing is written. After the step `until` the run is evaluated, saved and paused;
    its schedules are still those of all its steps. With `progress` a bar, the metrics and samples are shown. `callbacks` are
    called with each record, a dict; see `everyformer.train.record`. If torchrun restarts the run after a process died, it is
    resumed instead.
    """
    if not isinstance(recipe, Recipe):
        raise ValueError(f"{recipe!r} is not a recipe; write train(Recipe.of({recipe!r}), folder)")
    target, recipe = None if folder is None else Path(folder), resolve(recipe)
    check_loggers(recipe.run.loggers, target)
    if target is not None and restarted() and (target / "recipe.json").is_file() and read_recipe(target) == recipe:
        return resume(target, until=until, progress=progress, callbacks=callbacks)
    with init_world(recipe.run.device) as world, only_writer(target, world) as is_new, show_if(progress) as shown:
        with world.main_first():
            if world.is_main and target is not None and not is_new:
                raise ValueError(
                    f"{target} already exists and is not empty; choose another folder, or resume the run in it"
                )
            data = _open(recipe, None if recipe.init_from is None else Path(recipe.init_from), world)
        model = data.adapt(recipe.value(data.member_settings()))
        loop = Loop(recipe, data, model, target, world, callbacks + shown)
        if world.is_main and target is not None:
            write_run(recipe, data, model, target)
        world.barrier()
        return loop.run(None, until=until)


def resume(
    folder: str | Path,
    *,
    step: int | Literal["best"] | None = None,
    steps: int | None = None,
    settings: Sequence[str] = (),
    data: str | Path | None = None,
    until: int | None = None,
    progress: bool = False,
    callbacks: tuple[Callback, ...] = (),
) -> TrainedRun:
    """Resume the run in `folder` from its last checkpoint (or from `step`), to its end (or to `steps`): `resume("runs/first", steps=20)`.

    `settings` of the run or the optimizer, such as optim.lr=1e-4, are saved in its recipe, for later calls too. The schedule of the
    learning rate is that of the new settings, from the step at which the run resumes. `data` are where the data are now, or
    other data to train on from now on. Returns the trained run. `until`, `progress` and `callbacks` are as in `train`.
    """
    target = Path(folder)
    settings = [*settings, *([] if steps is None else [f"run.steps={steps}"])]
    recipe = with_data(override_run(read_recipe(target), settings), data)
    check_data(recipe, target)
    check_loggers(recipe.run.loggers, target)
    with init_world(recipe.run.device) as world, only_writer(target, world), show_if(progress) as shown:
        start = checkpoint.find_step(target, step) if step is not None or checkpoint.steps(target) else None
        if recipe.run.steps < (start or 0):
            raise ValueError(
                f"{target} is at step {start}, past run.steps={recipe.run.steps}; raise run.steps, or give an earlier --step"
            )
        with world.main_first():
            opened = _open(recipe, target, world)
            check_classes(opened, target)
        loop = Loop(recipe, opened, read_model(target), target, world, callbacks + shown)
        return loop.run(start, other_data=data is not None, until=until)


def _open(recipe: Recipe, folder: Path | None, world: World) -> TaskData:
    if recipe.data == "-" and world.world_size > 1:
        raise ValueError("only one process can read standard input; write the data to a file and give that as --data")
    return recipe.task.open(recipe.data, folder)


class Loop:
    """One run in one process."""

    def __init__(
        self,
        recipe: Recipe,
        data: TaskData,
        model: Model | EncoderDecoder,
        folder: Path | None,
        world: World,
        callbacks: tuple[Callback, ...],
    ):
        self.recipe, self.model, self.folder, self.world = recipe, model, folder, world
        self.callbacks = callbacks if world.is_main else ()
        has_checkpoint = folder is not None and bool(checkpoint.steps(folder))  # then init_from is not loaded again
        self.learner = Learner(replace(recipe, init_from=None) if has_checkpoint else recipe, data, model, world)
        self.task = self.learner.task
        self.watch = GradientWatch(recipe.optim.patience, recipe.optim.skip_spikes)
        ahead = steps_ahead(world.device)
        self.batches = Batches(self.task.data, recipe.run, world, 0 if self.task.data.has_state else ahead)
        self.in_flight = InFlight(ahead)
        self.evaluator = Evaluator(recipe.run, self.task)
        self.stop_reason: str | None = None
        self.signalled = False  # whether a signal asked to stop, and the records do not say so yet
        self.changed: tuple[str, ...] = ()  # the splits that differ from those of the checkpoint
        self.step, self.end = 0, recipe.run.steps
        self.is_first = True  # whether no step has been taken yet

    def run(self, start: int | None, *, other_data: bool = False, until: int | None = None) -> TrainedRun:
        """Train to the last step, or to `until`, from the checkpoint of the step `start` if it is given.

        With `other_data` the training data may differ from those of the checkpoint.
        """
        run = self.recipe.run
        self.end = min(run.steps, run.steps if until is None else until)
        if start is not None:
            self.step = self._restore(start, other_data)
        records = self._open_records()
        metrics: dict[str, Any] = {}
        try:
            with stop_signals(lambda: self.stop_reason is not None, partial(self._stop, records)):
                metrics = self._steps(start, records)
        except Exception as error:
            with suppress(ValueError, RuntimeError):  # the disk may be full, or the device in an error
                self._wait(records)
            with suppress(ValueError):
                records.write("end", self.step, error=f"{type(error).__name__}: {error}")
            raise
        finally:
            self.batches.close()
        reasons = {"stopped": self.stop_reason, "early_stop": self.evaluator.early_stop}
        metrics = metrics and metrics | {"skipped_steps": self.watch.skipped_steps}
        given = {name: reason for name, reason in reasons.items() if reason}
        records.write("end", self.step, **given, **metrics | {"skipped_steps": self.watch.skipped_steps})
        self.learner.use_ema()
        return TrainedRun(
            self._full_network() or self.learner.network.eval(), self.task, self.recipe, self.step,
            self._data_state(), self.watch.skipped_steps, metrics, self.evaluator.best,
            self.stop_reason if self.step < self.end else None, self.evaluator.early_stop,
        )  # fmt: skip

    def _open_records(self) -> Records:
        """Open the records and the loggers, and write the first record."""
        if self.folder is not None and self.world.is_main and read_recipe(self.folder) != self.recipe:
            write_recipe(self.recipe, self.folder)  # with its new settings, after they have been accepted
        path, callbacks = None, self.callbacks
        if self.folder is not None and self.world.is_main:
            path = self.folder / "records.jsonl"
            callbacks = callbacks + make_loggers(self.recipe, self.folder, self.step)
        objective, data = self.task.objective, self.task.data
        again = ("evaluate", "final") if self.evaluator.aborted else ()
        records = Records(path, callbacks, after=self.step, again=again)
        records.write(
            "begin", self.step, steps=self.recipe.run.steps,
            parameters=sum(p.numel() for p in self.learner.network.parameters()),
            metric=objective.metric, bytes=objective.bytes_per_target, includes=objective.includes,
            changed=list(self.changed), provenance=provenance(self.recipe.run.seed),
            batch=batch_size(self.recipe.run, self.step), context=data.context_at(self.step), pads=data.pads, notes=data.notes,
            compilation=self.learner.compilation._asdict(),
        )  # fmt: skip
        return records

    def _steps(self, saved: int | None, records: Records) -> dict[str, Any]:
        """Train, evaluate and save up to the last step. Returns the metrics of the last step, if it was evaluated."""
        run, metrics = self.recipe.run, dict[str, Any]()
        if self.evaluator.aborted:
            (metrics, _), saved = self._evaluate(self.step, records), None
        while self.step < self.end and self.stop_reason is None and self.evaluator.early_stop is None:
            self._step(self.step, records)
            self.step, metrics, improved = self.step + 1, {}, False
            last, save = self.step == self.end, bool(run.save and self.step % run.save == 0)
            if last or (run.evaluate and self.step % run.evaluate == 0):
                self._wait(records)
                try:
                    metrics, improved = self._evaluate(self.step, records)
                except Exception:
                    if self.world.world_size == 1:  # with more, saving would wait for the other processes
                        self._save(self.step, records)
                    raise
            if self.world.any(self.stop_reason is not None) and self.stop_reason is None:
                self.stop_reason = "another process was asked to stop"
            if last or save or improved or self.stop_reason or self.evaluator.early_stop:
                self._save(self.step, records)
                saved = self.step
        self._wait(records)
        if self.folder is not None and saved != self.step:
            self._save(self.step, records)
        return metrics

    def _step(self, step: int, records: Records) -> None:
        run, optim, learner, start_time = self.recipe.run, self.recipe.optim, self.learner, time.perf_counter()
        data = self.task.data
        if step and batch_size(run, step) != batch_size(
            run, step - 1
        ):  # the rows are other ones: the cache does not fit them
            learner.reset_cache()
        self.task.objective.progress = step / run.steps
        with learner.autocast():
            data.collect(learner.network, run.seed, run.kernel)
        drawn = self.batches.take(step)
        torch.manual_seed((run.seed * 1_000_003 + step) * 4099 + self.world.rank)
        factor = lr_factor(optim, step, run.steps)
        numbers = learner.step(drawn.rows, drawn.count, factor)
        is_first, self.is_first = self.is_first, False
        record = {
            "lr": optim.lr * factor, "batch": drawn.size, "targets": drawn.count,
            "memory": peak_memory(self.world.device), **data.statistics(),
            **({"kernels": learner.kernel_lines()} if is_first else {}),
        }  # fmt: skip
        self.in_flight.send(Sent(step + 1, start_time, record), numbers)
        # A skipped step resets the cache that the next one starts with.
        for arrived in self.in_flight.arrived(all_steps=learner.carries_cache):
            self._record(arrived, records)

    def _wait(self, records: Records) -> None:
        """Wait for the numbers of all steps, and record them."""
        for arrived in self.in_flight.arrived(all_steps=True):
            self._record(arrived, records)
        if self.signalled:
            self.signalled = False
            records.log("stop", self.step, reason=self.stop_reason)

    def _record(self, arrived: Arrived, records: Records) -> None:
        """Record a step whose numbers have arrived. Raises Unstable if too many steps in a row were skipped."""
        loss, norm, record = *arrived.numbers[:2], arrived.record
        try:
            skip_reason = self.watch.take(arrived.numbers)
        except Unstable:
            self.step = arrived.step - 1
            self.in_flight.queue.clear()
            raise
        if skip_reason is not None:
            records.write("skip", arrived.step, reason=skip_reason, skipped_steps=self.watch.skipped_steps)
            self.learner.reset_cache()  # it may hold NaN
        rate = record["targets"] / arrived.seconds
        records.write("step", arrived.step, loss=loss, norm=norm, rate=rate, **record)

    def _evaluate(self, step: int, records: Records) -> tuple[dict[str, Any], bool]:
        """Evaluate the network (with its EMA weights, if any). Returns the metrics, and whether they are the best so far."""
        metrics, improved = dict[str, Any](), False
        with self.learner.ema_weights(), torch.no_grad(), self.learner.autocast():
            network = self._full_network()
            if network is not None:
                metrics, improved = self.evaluator.evaluate(network, step, records)
        self.world.barrier()
        improved, self.evaluator.early_stop, self.evaluator.best = self.world.all_gather(
            (improved, self.evaluator.early_stop, self.evaluator.best)
        )[0]
        return metrics, improved

    def _full_network(self) -> Network | PairNetwork | None:
        """In the main process the network with all its weights: itself, or a copy if it is sharded. None in the others."""
        if not self.recipe.run.shard or self.world.world_size == 1:
            return self.learner.network.eval() if self.world.is_main else None
        weights = checkpoint.full_state_dict(self.learner.network)  # all processes take part
        if not self.world.is_main:
            return None
        with torch.random.fork_rng(devices=[]):
            network = self.model.build()
        network.load_state_dict(weights)
        return network.to(self.world.device).eval()

    def _data_state(self) -> dict[str, Any]:
        return {"data": self.task.data.fingerprint, "splits": self.task.data.fingerprints}

    def _save(self, step: int, records: Records) -> None:
        self._wait(records)  # so that the state of the watch is that of the weights
        if self.folder is None:
            return
        learner = self.learner
        state = {
            "step": step,
            **self._data_state(),
            "watch": self.watch.state(),
            "scaler": learner.scaler.state_dict(),
            "best": self.evaluator.best,
            "unevaluated": self.evaluator.aborted,
        }
        extra = {"cache": learner.cache_tensors(), "data": self.task.data.state()}
        contents = checkpoint.Contents(learner.network, learner.optimizers, learner.ema, extra, state)
        checkpoint.save(self.folder, contents, self.world, self.recipe.run.keep)
        records.write("save", step, best=self.evaluator.best)

    def _restore(self, start: int, other_data: bool = False) -> int:
        """Load a checkpoint. Returns its step."""
        assert self.folder is not None
        learner, data, run = self.learner, self.task.data, self.recipe.run
        state = checkpoint.load(self.folder, start, learner.network, learner.optimizers, learner.ema)
        self.changed = changed_splits(state, data)
        if not other_data and {"train", "data"} & set(self.changed):
            raise ValueError(
                f"the training data of {self.folder} ({self.recipe.data}) have changed since the run began ({', '.join(self.changed)} "
                "differ); restore them, or give --data (in Python data=) to train on the new ones"
            )
        if data_state := checkpoint.load_extra(self.folder, start, "data"):
            data.load_state(data_state, run.seed)
        cache = checkpoint.load_extra(self.folder, start, "cache")
        if cache and len(Batch(cache)) == batch_size(run, start):  # else the rows are other ones
            learner.load_cache(cache)
        optim = self.recipe.optim
        watch = convert(state["watch"], GradientWatch)
        self.watch = dataclasses.replace(watch, patience=optim.patience, skip_spikes=optim.skip_spikes)
        learner.check.load(self.watch)
        self.evaluator.aborted = state.get("unevaluated", False)
        best = None if {"valid", "data"} & set(self.changed) else state.get("best")  # else it is of other examples
        if best and not isinstance(best.get(self.task.objective.metric), float):
            raise ValueError(
                f"{checkpoint.path_of(self.folder, start) / 'state.json'} has a best evaluation without its "
                f"{self.task.objective.metric}; restore the file that train wrote"
            )
        self.evaluator.best = best if best and best["step"] in checkpoint.steps(self.folder) else None
        if learner.scaler.is_enabled() and state["scaler"]:  # it is empty after another precision
            learner.scaler.load_state_dict(state["scaler"])
        return int(state["step"])

    def _stop(self, records: Records, reason: str) -> None:
        """End the run after the current step, with a checkpoint. An evaluation is aborted."""
        self.stop_reason, self.signalled = reason, True  # it is written when the records of the steps before are
        records.tell("stop", self.step, reason=reason)
        if self.evaluator.running:
            raise StopEvaluation
