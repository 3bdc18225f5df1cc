"""Integrates hetmem with training frameworks; docs/integrations.md shows each in ten lines.

A framework is imported only when its function is called, and nothing in it is patched: `for_trainer` and
`layer_by_layer` are for the `Trainer` of transformers and those of TRL, `LightningCallback` for Lightning; accelerate
needs neither. `among_ranks` is for all four of them, where several ranks train a model.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary

import torch

import hetmem
from hetmem.engine.runtime import Runtime
from hetmem.errors import ManageError
from hetmem.intercept import registry
from hetmem.losses import while_training
from hetmem.report.live import Watch, watch

if TYPE_CHECKING:
    import transformers

__all__ = ["LightningCallback", "among_ranks", "for_trainer", "layer_by_layer", "scalars", "write"]  # noqa: F822 - by `__getattr__`

_watched: WeakKeyDictionary[Runtime, Watch] = WeakKeyDictionary()


def __getattr__(name: str) -> Any:
    if name == "LightningCallback":
        return _lightning()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# ---- numbers for any logger -----------------------------------------------------------------------------------------


def scalars(model: torch.nn.Module) -> dict[str, float]:
    """Return numbers to plot about `model` since the last call: seconds of a step, tokens a second, share of stalls,
    bytes a second on each link; and the peak of each tier in bytes. Unknown numbers are left out.

    Raises `ManageError` if `model` is not managed.
    """
    status = watch(model, _watched).look()
    found = {name: status[name] for name in ("step_seconds", "tokens_per_second", "stall_share") if status[name]}
    found |= {f"{tier}_peak_bytes": used for tier, (used, capacity) in status["tiers"].items() if capacity}
    found |= {f"{link}_bytes_per_second": speed for link, speed in status["links"].items() if speed}
    return {f"hetmem/{name}": float(value) for name, value in found.items()}


def write(target: Any, values: Mapping[str, float], step: int) -> None:
    """Log `values` of `step` to `target`: a TensorBoard `SummaryWriter`, a W&B run, the module `mlflow`, an
    `Accelerator`, a logger of Lightning, or a function of `values` and `step`. Raises TypeError for anything else."""
    if hasattr(target, "add_scalar"):
        for name, value in values.items():
            target.add_scalar(name, value, step)
    elif hasattr(target, "log_metrics"):
        target.log_metrics(dict(values), step=step)
    elif hasattr(target, "log"):
        target.log(dict(values), step=step)
    elif callable(target):
        target(values, step)
    else:
        raise TypeError(f"expected a SummaryWriter, a W&B run, mlflow, a logger or a function, got {target!r}")


def _log(model: torch.nn.Module, targets: Iterable[Any], step: int) -> None:
    """Write the `scalars` of `model` to each of `targets`."""
    values = scalars(model)
    for target in targets:
        write(target, values, step)


def _save(model: torch.nn.Module, report: str | os.PathLike[str] | None) -> None:
    """Save the report of `model` to the path `report`, if given."""
    if report is not None:
        hetmem.report(model).save(report)


# ---- several ranks --------------------------------------------------------------------------------------------------


@cache
def among_ranks(kind: Any) -> Any:
    """Return a subclass of `kind` for the ranks of torchrun that train a managed model together: it does not wrap that
    in `DistributedDataParallel`, as hetmem adds gradients up itself.

    `kind`: the `Trainer` of transformers or one of TRL, accelerate's `Accelerator`, or Lightning's `DDPStrategy`.
    Batches are divided among ranks, and numbers gathered, as `kind` does it; other models are wrapped as before. Raises
    `ManageError` for another class.
    """
    if hasattr(kind, "create_accelerator_and_postprocess"):

        class RanksTrainer(kind):  # type: ignore[misc, unused-ignore]
            """A trainer whose accelerator leaves managed models as they are."""

            def create_accelerator_and_postprocess(self) -> None:
                super().create_accelerator_and_postprocess()
                self.accelerator.prepare_model = partial(_prepared, self.accelerator.prepare_model)

            def _get_grad_norm(self, model: torch.nn.Module, grad_norm: Any = None) -> Any:
                if grad_norm is None:  # as clipping to infinity would return it, which writes to all gradients
                    gradients = [p.grad for p in model.parameters() if p.grad is not None]
                    grad_norm = torch.nn.utils.get_total_norm(gradients)
                return super()._get_grad_norm(model, grad_norm=grad_norm)

        return RanksTrainer
    if hasattr(kind, "prepare_model"):

        class RanksAccelerator(kind):  # type: ignore[misc, unused-ignore]
            """An accelerator that leaves managed models as they are."""

            def prepare_model(self, *args: Any, **kwargs: Any) -> Any:
                return _prepared(super().prepare_model, *args, **kwargs)

        return RanksAccelerator
    if hasattr(kind, "_setup_model"):

        class RanksStrategy(kind):  # type: ignore[misc, unused-ignore]
            """A strategy that leaves managed models as they are."""

            def _setup_model(self, model: torch.nn.Module) -> Any:
                return model if _is_managed(model) else super()._setup_model(model)

        return RanksStrategy
    raise ManageError(f"among_ranks takes a Trainer, accelerate's Accelerator or Lightning's DDPStrategy, got {kind!r}")


def _prepared(
    prepare: Callable[..., Any], model: Any, device_placement: Any = None, evaluation_mode: Any = False
) -> Any:
    """Call `prepare`, a `prepare_model`: as for an evaluation, which wraps nothing, if `model` is managed."""
    return prepare(model, device_placement, evaluation_mode or _is_managed(model))


def _is_managed(model: torch.nn.Module) -> bool:
    return bool(registry.managed_among(model.parameters()))


# ---- transformers and TRL -------------------------------------------------------------------------------------------


def for_trainer(
    arguments: transformers.TrainingArguments,
    *,
    report: str | os.PathLike[str] | None = None,
    log: Sequence[Any] = (),
    loss: Literal["chunked"] | None = None,
    norms: bool = True,
    checkpoints: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Return keywords for a `Trainer` over a managed model: `Trainer(model, arguments, …, **for_trainer(arguments))`.

    They make the trainer use a `hetmem.AdamW` with the values in `arguments` (learning rate, betas, epsilon, weight
    decay, and `max_grad_norm`, which is clipped within the update) and `options`, keywords of `hetmem.AdamW`; and add a
    callback. Whenever the trainer logs, that writes the `scalars` of the model to the entries of `arguments.report_to`
    among TensorBoard, W&B and MLflow, and to `log` (see `write`). It updates the status for `hetmem top` after each
    step, and saves the report to `report` at the end.

    A trainer reads the norm of the gradients before each step. So they stay visible, and updates run after the
    backward, whatever `overlap` is: it is "off". Without `norms`, for a trainer of `layer_by_layer`, none is read or
    logged, and `overlap` holds.

    `checkpoints=True`: with each checkpoint of the trainer, `hetmem.save` writes `checkpoint-N/hetmem.safetensors` in
    the background, with the states of the optimizer and, as `extra`, the "step", the state of the "scheduler" and the
    "rng" of the host; an error of it is raised before the next checkpoint, or at the end. With
    `TrainingArguments(save_only_model=True)` the trainer writes no states of its own beside it.

    `loss="chunked"`: while the model trains, its `.loss` is that of `hetmem.chunked_loss`, and `.logits` None.

    Raises `ManageError` if `arguments.optim` is not an AdamW, and for a chunked loss with smoothed labels or with a
    trainer of TRL, whose metrics read logits. Where training begins, `chunked_loss` refuses a model that it does not
    know.
    """
    if loss not in (None, "chunked"):
        raise ManageError(f'loss must be "chunked", or None for the model\'s own, got {loss!r}')
    if loss is not None and (arguments.label_smoothing_factor or type(arguments).__module__.startswith("trl.")):
        raise ManageError(
            'loss="chunked" makes no logits, which smoothed labels and the metrics of TRL\'s trainers need: leave it '
            "out"
        )
    if not str(getattr(arguments.optim, "value", arguments.optim)).startswith("adamw"):
        raise ManageError(f"for_trainer makes a hetmem.AdamW: leave optim out of the arguments, got {arguments.optim}")
    made = {
        "lr": arguments.learning_rate,
        "betas": (arguments.adam_beta1, arguments.adam_beta2),
        "eps": arguments.adam_epsilon,
        "max_grad_norm": arguments.max_grad_norm or None,
        **options,
    }
    if norms:
        made["overlap"] = "off"  # a trainer reads the norm of the gradients, and only visible ones have one
    callback = _trainer_callback()(report, tuple(log), loss, checkpoints=checkpoints)
    return {"optimizer_cls_and_kwargs": (hetmem.AdamW, made), "callbacks": [callback]}


@cache
def layer_by_layer(trainer: Any) -> Any:
    """Return a subclass of `trainer`, the `Trainer` of transformers or one of TRL, whose steps of several micro-batches
    (`gradient_accumulation_steps`) are computed by `hetmem.accumulate`: weights cross the link twice a step.

    Batches, losses, their normalisation, logs, callbacks and checkpoints are those of `trainer`, with its bits, but for
    random numbers: those of a micro-batch follow from `seed` of the arguments, the step and its place in it.

    Raises `ManageError` where the trainer computes on several devices, or by DeepSpeed.
    """

    class LayerByLayer(trainer):  # type: ignore[misc, unused-ignore]
        """Computes all micro-batches of a step where the first one is asked for, and returns the loss of each."""

        _batches: Sequence[Any] = ()
        _losses: tuple[torch.Tensor, ...] = ()

        def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
            found = super().get_batch_samples(*args, **kwargs)
            self._batches, self._losses = found[0], ()
            return found

        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            batches = self._batches
            if len(batches) < 2 or (not self._losses and inputs is not batches[0]):
                found: torch.Tensor = super().training_step(model, inputs, *args, **kwargs)
                return found
            if not self._losses:
                self._losses = self._compute(model, [*batches], *args, **kwargs)
            first, *others = self._losses
            self._losses = tuple(others)
            return first

        def _get_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
            _, options = getattr(self, "optimizer_cls_and_kwargs", None) or (None, dict[str, Any]())
            return None if options.get("overlap", "off") != "off" else super()._get_grad_norm(*args, **kwargs)

        def _compute(self, model: Any, batches: list[Any], *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
            accelerator = self.accelerator
            if (
                accelerator.num_processes > 1
                or self.args.n_gpu > 1
                or accelerator.distributed_type.value == "DEEPSPEED"
            ):
                raise ManageError("a trainer that computes layer by layer takes one device, and no DeepSpeed")
            asked, told = threading.local(), [torch.empty(0)] * len(batches)
            step, scaler = super().training_step, getattr(accelerator, "scaler", None)

            def differentiated(loss: torch.Tensor, **_: Any) -> None:
                loss = loss / accelerator.gradient_accumulation_steps
                asked.loss = loss if scaler is None else scaler.scale(loss)

            def forward(model: Any, numbered: tuple[int, Any]) -> torch.Tensor:
                number, batch = numbered
                told[number] = step(model, batch, *args, **kwargs)
                loss: torch.Tensor = asked.loss
                return loss

            generator = torch.Generator().manual_seed(hash((self.args.seed, self.state.global_step)))
            accelerator.backward = differentiated  # in place of the method, for as long as forwards ask for it
            try:
                hetmem.accumulate(model, [*enumerate(batches)], forward, generator=generator)
            finally:
                del accelerator.backward
            return tuple(told)

    return LayerByLayer


@cache
def _trainer_callback() -> Any:
    """Return the class of the callback; imports transformers."""
    from transformers import TrainerCallback

    class Reporting(TrainerCallback):
        """Turns the trainer's own clipping off, as the optimizer clips; logs scalars and saves the report. Has the
        model compute its `loss` in chunks, if asked to."""

        def __init__(
            self, report: str | os.PathLike[str] | None, log: tuple[Any, ...], loss: str | None, *, checkpoints: bool
        ) -> None:
            self._report, self._log, self._loss, self._checkpoints = report, log, loss, checkpoints
            self._saving: Any = None
            self._own_loss: Callable[[], object] = int
            self._targets: list[Any] = []
            self._clips = 0.0

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self._own_loss()  # of a training that has raised
            self._own_loss = int if self._loss is None else while_training(kwargs["model"])
            self._clips, args.max_grad_norm = args.max_grad_norm, 0.0
            self._targets = [*self._log, *(_target(name, args) for name in args.report_to if name in _TARGETS)]

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            hetmem.progress(kwargs["model"])
            if control.should_save:  # the trainer may delete the last checkpoint, whose file may not be there yet
                self._end_save()

        def _end_save(self) -> None:
            saving, self._saving = self._saving, None
            if saving is not None:
                saving.wait()

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if not self._checkpoints:
                return
            self._end_save()
            optimizer, scheduler = kwargs["optimizer"], kwargs["lr_scheduler"]
            optimizer = getattr(optimizer, "optimizer", optimizer)  # that of accelerate has ours within
            extra = {"step": state.global_step, "scheduler": scheduler.state_dict(), "rng": torch.get_rng_state()}
            folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
            folder.mkdir(parents=True, exist_ok=True)
            self._saving = hetmem.save(
                folder / "hetmem.safetensors", kwargs["model"], optimizer, extra=extra, wait=False
            )

        def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.is_world_process_zero:
                _log(kwargs["model"], self._targets, state.global_step)

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            args.max_grad_norm = self._clips
            self._own_loss()
            self._end_save()
            for target in self._targets:
                getattr(target, "flush", int)()
            _save(kwargs["model"], self._report)

    return Reporting


_TARGETS = ("tensorboard", "wandb", "mlflow")


def _target(name: str, arguments: Any) -> Any:
    """Return the target of `write` for the trainer's `report_to` entry `name`; its own callbacks have begun the run."""
    if name == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(str(Path(arguments.output_dir, "runs", "hetmem")))
    if name == "wandb":
        import wandb

        return lambda values, step: wandb.log({**values, "train/global_step": step})  # the trainer's own step metric
    import mlflow

    return mlflow


# ---- Lightning ------------------------------------------------------------------------------------------------------


@cache
def _lightning() -> Any:
    """Return the class `LightningCallback`. Raises ImportError if Lightning is not installed."""
    from lightning.pytorch import Callback

    class LightningCallback(Callback):  # type: ignore[misc, unused-ignore]  # Any without Lightning
        """Writes the `scalars` of `model`, a managed module, to the trainer's loggers every `log_every_n_steps`,
        updates the status for `hetmem top` after each step, and saves the report to `report` at the end of `fit`.

        Clip with `hetmem.AdamW(max_grad_norm=…)` in place of `gradient_clip_val`: in the update, with any overlap.
        """

        def __init__(self, model: torch.nn.Module, *, report: str | os.PathLike[str] | None = None) -> None:
            self._model, self._report = model, report
            self._logged = 0

        def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
            step = trainer.global_step
            if step == self._logged:  # a micro-batch without an optimizer step
                return
            hetmem.progress(self._model)
            if step // trainer.log_every_n_steps > self._logged // trainer.log_every_n_steps:
                _log(self._model, trainer.loggers, step)
            self._logged = step

        def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
            _save(self._model, self._report)

    return LightningCallback
