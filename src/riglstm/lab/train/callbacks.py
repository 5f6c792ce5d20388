"""What happens beside the updates, in one order: log, evaluate and choose, save, stop.

One callback does it all, and its state is in every checkpoint: wherever a kill falls, the run goes
on from a checkpoint after which everything is still to come.
"""

from __future__ import annotations

import time
from typing import Any, Literal, NoReturn

import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from riglstm.lab.tasks.base import Task, means
from riglstm.lab.train.average import Average
from riglstm.lab.train.checkpoints import Checkpoints
from riglstm.lab.train.choice import Choice
from riglstm.lab.train.config import Fit, rate
from riglstm.lab.train.diverged import Diverged, in_words
from riglstm.lab.train.evaluation import score
from riglstm.lab.train.folder import RunFolder
from riglstm.lab.train.log import Log
from riglstm.lab.train.meter import Meter, first_bad
from riglstm.lab.train.progress import Progress
from riglstm.lab.train.rng import RandomState, kept, sow
from riglstm.lab.train.signals import Wish
from riglstm.lab.train.weights import save_weights


class Stopped(BaseException):
    """The run was asked to stop, and has been saved."""


class Steward(pl.Callback):
    """Looks after a run: says when it has something to do, and does it."""

    def __init__(
        self,
        net: nn.Module,
        task: Task,
        config: Fit,
        seed: int,
        folder: RunFolder,
        checkpoints: Checkpoints,
        progress: Progress,
        wish: Wish,
    ) -> None:
        self.net, self.task, self.config, self.folder = net, task, config, folder
        self.checkpoints, self.progress, self.wish = checkpoints, progress, wish
        self.meter = Meter()
        self.average = Average(net, config.average)
        self.choice = Choice(task.trained_on, task.metric.higher_is_better, config.patience)
        self.random = RandomState(seed, task.device)
        self.stopped: Literal["updates", "patience"] | None = None
        self.seconds = 0.0
        """Of the whole run, until the last checkpoint."""
        self.pause = 0.0
        """Seconds of the last evaluation; 0 before the first, for which no time is kept free."""
        self.step = 0
        """Updates so far."""
        self.handled = 0
        """The step whose log, evaluation and checkpoint are done."""
        self.saved: int | None = None
        """Updates in the last checkpoint."""
        self.needed: set[int] = set()
        """Weights that the last checkpoint refers to."""
        self.record: Log | None = None
        """From the start of the training on."""
        self.speed = 0.0
        """Updates per second between the last two lines of the log, evaluations left out."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin, or go on."""
        self.record = Log(self.folder, self.step, self.config.tensorboard)
        self.progress.start(self.step)
        self.wish.listen()
        self.random.start(trainer.global_rank, self.step)
        self.average.start()
        self.began = self.resting = time.monotonic()
        self.worked, self.logged = 0.0, self.step

    def count(self, loss: Tensor, metric: Tensor, norm: Tensor) -> None:
        """An update is done."""
        self.step += 1
        self.average.add(self.step)
        self.meter.add(loss, metric, norm)
        self.progress.tick(self.step)

    def due(self, shared: bool) -> bool:
        """Whether there is something to do before the next update."""
        # Several processes hear of each other's wishes at the log only, and stop together.
        wished = not shared and self.wish.due(self.pause)
        return self.step != self.handled and (wished or any(self._due()))

    def _due(self) -> tuple[bool, bool, bool]:
        """A line of the log, an evaluation, a checkpoint."""
        config, last = self.config, self.step == self.config.updates
        return (
            last or len(self.meter) == config.log_every,
            last or self.step % config.evaluate_every == 0,
            last or self.step % config.checkpoint_every == 0,
        )

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Everything that is due after an update, in the order that makes it repeatable."""
        log, evaluate, save = self._due()
        self.handled = self.step
        alone = trainer.world_size == 1
        stop = self.wish.due(self.pause) if alone else log and self._wished(trainer)
        self._check(trainer)
        began = time.monotonic()
        self.worked += began - self.resting
        if log:
            self._log()
        if evaluate:
            with self.average.in_place():
                self._evaluate(trainer)
            # Before the checkpoint, which holds it: who goes on from there has to know.
            self.pause = time.monotonic() - began
        if self.choice.exhausted or self.step == self.config.updates:
            self.stopped = "patience" if self.choice.exhausted else "updates"
            trainer.should_stop = True
        if save or stop or self.stopped:
            self._save(trainer)
        self.resting = time.monotonic()
        if stop and not self.stopped:
            raise Stopped

    def close(self) -> None:
        """Whatever ended the run, it writes and shows no more."""
        self.progress.close()
        if self.record is not None:
            self.record.close()

    def _check(self, trainer: pl.Trainer) -> None:
        """No evaluation, no choice and no checkpoint of what is no longer a number."""
        if len(self.meter):
            rows = _everywhere(trainer, self.meter.rows(), "mean")
            bad = first_bad(rows)
            if bad is not None:
                self._diverged(f"the loss of update {self.step - len(rows) + bad + 1}")
            # All processes now hold the means over all, as one checkpoint has to serve them all.
            self.meter.replace(rows)
        norm = torch.nn.utils.get_total_norm([p.detach() for p in self.net.parameters()])
        if not torch.isfinite(norm):
            self._diverged(f"a weight after update {self.step}")

    def _diverged(self, what: str) -> NoReturn:
        saved = None if self.saved is None else self.checkpoints.path(self.saved)
        seconds = self.seconds + time.monotonic() - self.began
        raise Diverged(in_words(what, saved, self.config), self.step, seconds)

    def _log(self) -> None:
        step, figures = self.step, self.meter.take()
        self.speed = (step - self.logged) / max(self.worked, 1e-9)
        self.worked, self.logged = 0.0, step
        assert self.record is not None
        self.record.add(
            step,
            {
                "train/loss": figures.loss,
                f"train/{self.task.metric.name}": figures.metric,
                "gradient_norm": figures.norm,
                "gradient_norm_max": figures.largest,
                "lr": rate(self.config, step - 1),
                "updates_per_second": self.speed,
            },
        )
        self.progress.training(step, figures.loss, figures.metric)

    def _evaluate(self, trainer: pl.Trainer) -> None:
        step = self.step
        share, precision = (trainer.global_rank, trainer.world_size), self.config.precision
        found: dict[str, dict[str, float]] = {}
        for condition in self.task.conditions:
            # Some models draw in eval mode too; when they are evaluated must not change the run.
            with kept(self.task.device):
                sow(self.random.seed, self.task.device)
                totals = score(
                    self.net, self.task, condition, "validation", precision=precision, share=share
                )
            found[condition] = means(
                {name: _everywhere(trainer, total, "sum") for name, total in totals.items()}
            )
        assert self.record is not None
        self.record.add(
            step, {f"validation/{k}@{c}": v for c, kinds in found.items() for k, v in kinds.items()}
        )
        values = {c: kinds[self.task.metric.name] for c, kinds in found.items()}
        losses = {c: kinds["loss"] for c, kinds in found.items()}
        if self.choice.hear(step, values, losses) and self.folder.writes:
            save_weights(self.net, self.folder.weights_of(step))
        self.progress.evaluation(step, values, self.speed)

    def _save(self, trainer: pl.Trainer) -> None:
        assert self.record is not None
        self.record.flush()
        self.random.gather(trainer.world_size)
        now = time.monotonic()
        self.seconds, self.began = self.seconds + now - self.began, now
        trainer.save_checkpoint(self.checkpoints.path(self.step))
        self.saved = self.step
        # The checkpoint before this one may yet be gone on from: what it refers to stays.
        chosen = self.choice.steps()
        self.folder.keep_weights(chosen | self.needed)
        self.needed = chosen

    def _wished(self, trainer: pl.Trainer) -> bool:
        wish = torch.tensor(float(self.wish.due(self.pause)), device=self.task.device)
        return bool(_everywhere(trainer, wish, "sum") > 0)

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {
            "step": self.step,
            "meter": self.meter.rows().cpu() if len(self.meter) else None,
            "choice": self.choice.state_dict(),
            "random": self.random.state_dict(),
            "average": self.average.state_dict(),
            "stopped": self.stopped,
            "seconds": self.seconds,
            "pause": self.pause,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """From a checkpoint."""
        self.step = self.handled = self.saved = state_dict["step"]
        if state_dict["meter"] is not None:
            self.meter.replace(state_dict["meter"].to(self.task.device))
        self.choice.load_state_dict(state_dict["choice"])
        self.random.load_state_dict(state_dict["random"])
        self.average.load_state_dict(state_dict["average"])
        self.stopped = state_dict["stopped"]
        self.seconds = state_dict["seconds"]
        self.pause = state_dict["pause"]
        self.needed = self.choice.steps()


def _everywhere(trainer: pl.Trainer, x: Tensor, how: Literal["sum", "mean"]) -> Tensor:
    """Over all processes; the tensor that was given stays as it is."""
    if trainer.world_size == 1:
        return x
    total: Tensor = trainer.strategy.reduce(x.clone(), reduce_op=how)
    return total
