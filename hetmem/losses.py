"""`hetmem.chunked_loss(…)`: the loss of a causal language model without the logits of all tokens.

The model's class and forward stay: during one call of it the output layer computes the loss of its inputs, a chunk of
tokens after the other, with their gradients. So only a chunk has logits, in the forward and in the backward. Knows
nothing of chunks of parameters: a plain model gets the same bits as a managed one. Of a managed one it notes for the
report which kernel ran.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from hetmem.errors import ManageError
from hetmem.intercept import registry

_ROWS = 1024
"""Tokens of a chunk."""
KernelName = Literal["liger"]
"""The kernels beside chunks of torch's operators."""
_CAUSAL = ("ForCausalLM", "LMHeadModel")
"""Ends of the names of classes whose loss is that of the next token."""
_KNOWN = ("final_logit_softcapping", "logit_scale", "logits_scaling", "attn_logit_softcapping")
"""What a configuration may say of logits: see `_Logits`, and that of attention."""


class _Logits:
    """What a model does to the output of its head: a factor (Cohere's `logit_scale`, Granite's `logits_scaling`), or a
    soft cap (Gemma's `final_logit_softcapping`)."""

    def __init__(self, config: Any) -> None:
        self.factor = float(getattr(config, "logit_scale", None) or 1.0)
        self.divisor = float(getattr(config, "logits_scaling", None) or 1.0)
        self.cap = float(getattr(config, "final_logit_softcapping", None) or 0.0)

    def of(self, made: torch.Tensor) -> torch.Tensor:
        """Return the logits in float32 for `made`, the output of the head, as the model computes them."""
        if self.factor != 1.0:
            made = made * self.factor
        if self.divisor != 1.0:
            made = made / self.divisor
        if self.cap:
            made = torch.tanh(made / self.cap) * self.cap
        return made.float()

    def gradient(self, of_logits: torch.Tensor, logits: torch.Tensor | None) -> torch.Tensor:
        """Return the gradient of the output of the head, in the memory of that of `logits`, which only a cap needs."""
        if logits is not None:
            of_logits.mul_(logits.div(self.cap).square_().neg_().add_(1.0))
        return of_logits.mul_(self.factor / self.divisor)


class _CrossEntropy(torch.autograd.Function):
    """The sum of the cross entropies of rows; gradients are made in the forward, where a chunk's logits are."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        how: _Logits,
        ignored: int,
    ) -> torch.Tensor:
        """Return the sum for `hidden` of shape (rows, width) and `targets` of shape (rows,), a float32 scalar."""
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        of_hidden = torch.empty_like(hidden) if wants_hidden else None
        of_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        of_bias = torch.zeros_like(bias, dtype=torch.float32) if wants_bias and bias is not None else None
        for begin in range(0, len(hidden), _ROWS):
            rows, target = hidden[begin : begin + _ROWS], targets[begin : begin + _ROWS]
            logits = how.of(nn.functional.linear(rows, weight, bias))
            logs, capped = torch.log_softmax(logits, dim=-1), logits if how.cap else None
            del logits
            total += nn.functional.nll_loss(logs, target, ignore_index=ignored, reduction="sum")
            if not (wants_hidden or wants_weight or wants_bias):
                continue
            counted = (target != ignored).unsqueeze(1)
            made = logs.exp_().scatter_add_(1, target.clamp(min=0).unsqueeze(1), -counted.to(logs.dtype)).mul_(counted)
            made = how.gradient(made, capped).to(weight.dtype)
            del logs
            if of_hidden is not None:
                of_hidden[begin : begin + _ROWS] = made @ weight
            if of_weight is not None:
                of_weight += made.t() @ rows
            if of_bias is not None:
                of_bias += made.sum(0)
            del made, capped  # before the next chunk's
        ctx.save_for_backward(of_hidden, of_weight, of_bias)
        ctx.dtypes = hidden.dtype, weight.dtype, weight.dtype if bias is None else bias.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *given: torch.Tensor) -> Any:
        """Return the gradients that the forward has made, times the one `given`."""
        made = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        times = [None if each is None else (each.float() * given[0]).to(dtype) for each, dtype in made]
        return *times, None, None, None


_Kernel = Callable[[torch.Tensor, torch.Tensor, "torch.Tensor | None", torch.Tensor, int], torch.Tensor]
"""Sums the cross entropies of hidden states, for weight and bias of a head, targets and the index that is ignored."""


def _chunks(how: _Logits) -> _Kernel:
    def summed(
        rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor, ignored: int
    ) -> torch.Tensor:
        made: torch.Tensor = _CrossEntropy.apply(rows, weight, bias, targets, how, ignored)
        return made

    return summed


def _liger(how: _Logits) -> _Kernel:
    """Return the kernel of Liger. Raises `ManageError` if it is not installed, or knows no such logits."""
    if how.factor != 1.0 or how.divisor != 1.0:
        raise ManageError('kernel="liger" knows no scale of logits, which this configuration has: leave kernel out')
    try:
        liger = importlib.import_module("liger_kernel.transformers.fused_linear_cross_entropy")
    except ImportError as error:
        raise ManageError('kernel="liger" needs Liger: pip install liger-kernel, or leave kernel out') from error

    def summed(
        rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor, ignored: int
    ) -> torch.Tensor:
        kernel = liger.LigerFusedLinearCrossEntropyLoss(ignore_index=ignored, reduction="sum", softcap=how.cap or None)
        made: torch.Tensor = kernel(weight, rows, targets, bias)
        return made

    return summed


class ChunkedLoss:
    """Computes the loss of `model`, called as the model is; see `chunked_loss`."""

    def __init__(self, model: nn.Module, head: nn.Module | None, kernel: KernelName | None) -> None:
        self._model = model
        inner: Any = model
        inner = inner.get_base_model() if hasattr(inner, "get_base_model") else inner
        config = getattr(inner, "config", None)
        name = type(inner).__name__
        if kernel not in (None, *get_args(KernelName)):
            raise ManageError(f'kernel must be "liger", or None for chunks of torch\'s operators, got {kernel!r}')
        if config is None or not name.endswith(_CAUSAL):
            raise ManageError(
                f"chunked_loss knows the loss of causal language models of transformers (classes …ForCausalLM and "
                f"…LMHeadModel), got {name}: compute the loss of others in chunks within the model"
            )
        loss = getattr(inner, "loss_function", None)
        if getattr(loss, "__name__", "") != "ForCausalLMLoss":
            raise ManageError(f"{name} computes a loss of its own, {loss!r}, which chunked_loss does not know")
        values: Mapping[str, Any] = config.to_dict()
        unknown = [key for key, value in values.items() if "logit" in key and key not in _KNOWN and value]
        if unknown:
            raise ManageError(
                f"{name}: its configuration says {unknown[0]}={values[unknown[0]]!r}, which chunked_loss does not "
                f"know: it would compute another loss than the model; use the model's own"
            )
        found = inner.get_output_embeddings() if head is None else head
        if not isinstance(found, nn.Linear):
            raise ManageError(
                f"{name}: expected an output layer of class torch.nn.Linear, got {type(found).__name__}: pass it as "
                f"head="
            )
        self._head, self._how, self._checked = found, _Logits(config), False
        self._sum = (_chunks if kernel is None else _liger)(self._how)
        self._ran = f"chunks of {_ROWS} tokens, by torch's operators" if kernel is None else "Liger's kernel"

    def __call__(self, **batch: Any) -> torch.Tensor:
        """Return the scalar that `model(**batch).loss` is, up to rounding. `batch` has `labels`."""
        kwargs, head = self.begin(batch)
        try:
            output = self._model(**kwargs)
        finally:
            head.restore()
        return self.end(output, head)

    def begin(self, batch: Mapping[str, Any]) -> tuple[dict[str, Any], _Head]:
        """Have the output layer compute the loss for `batch` until `restore`, and return what the model is called
        with: all but `labels` and other keywords of the loss."""
        kwargs = dict(batch)
        if "labels" not in kwargs:
            raise TypeError("chunked_loss expects labels, as the model does for a loss")
        labels, ignored = kwargs.pop("labels"), kwargs.pop("ignore_index", -100)
        targets = kwargs.pop("shift_labels", None)
        if targets is None:
            targets = nn.functional.pad(labels, (0, 1), value=ignored)[..., 1:]
        return kwargs, _Head(
            self._head, self._sum, targets.reshape(-1), ignored, kwargs.pop("num_items_in_batch", None)
        )

    def end(self, output: Any, head: _Head) -> torch.Tensor:
        """Return the loss that `head` has computed while the model made `output`. Raises `ManageError` if the model
        does with logits what is not known of it."""
        self._check(output)
        if len(head.sums) != 1:
            raise ManageError(f"the forward has called its output layer {len(head.sums)} times, expected once")
        managed = registry.of_parameter(self._head.weight)
        if managed is not None:
            managed[0].runtime.loss = self._ran
        counted: Any = (head.targets != head.ignored).sum() if head.items is None else head.items
        if isinstance(counted, torch.Tensor):
            counted = counted.to(head.sums[0].device)
        loss: torch.Tensor = head.sums[0] / counted
        return loss

    def _check(self, output: Any) -> None:
        """Raise `ManageError`, at the first call, if the model has not done what is known of it to the stand-in for
        logits, which is 1."""
        if self._checked:
            return
        logits = getattr(output, "logits", None)
        if not isinstance(logits, torch.Tensor) or not logits.numel():
            raise ManageError(
                "chunked_loss expects a model that returns an output with `.logits`: leave return_dict out"
            )
        if logits.is_meta:
            return  # a plan, which sees no values
        made, expected = float(logits.detach().reshape(-1)[0]), float(self._how.of(torch.ones(())))
        if abs(made - expected) > 0.02 * abs(expected):
            raise ManageError(
                f"the model makes {made:.3g} of a logit of 1, expected {expected:.3g}: it changes logits in a way that "
                f"chunked_loss does not know; use the model's own loss"
            )
        self._checked = True


class _Head:
    """The output layer `module` while it sums the cross entropies of `targets` in place of making logits: `sums` has
    one for each of its calls. `items`: what the sum is divided by; None: the targets that are not `ignored`."""

    def __init__(self, module: nn.Linear, kernel: _Kernel, targets: torch.Tensor, ignored: int, items: Any) -> None:
        self.targets, self.ignored, self.items = targets, ignored, items
        self.sums: list[torch.Tensor] = []
        self._module, self._before = module, vars(module).get("forward")

        def forward(hidden: torch.Tensor) -> torch.Tensor:
            rows = hidden.reshape(-1, hidden.shape[-1])
            self.sums.append(kernel(rows, module.weight, module.bias, targets.to(rows.device), ignored))
            return hidden.new_ones(()).expand(*hidden.shape[:-1], 1)  # in place of logits

        module.__dict__["forward"] = forward

    def restore(self) -> None:
        """Let the module make logits again."""
        if self._before is None:
            self._module.__dict__.pop("forward", None)
        else:
            self._module.__dict__["forward"] = self._before


def chunked_loss(model: nn.Module, head: nn.Module | None = None, kernel: KernelName | None = None) -> ChunkedLoss:
    """Return a function for the loss of `model`, a causal language model of transformers, without all tokens' logits.

    `loss_of(**batch)` is the scalar that `model(**batch).loss` is, up to rounding: of the next token, `ignore_index`
    -100, the mean or the sum by `num_items_in_batch`, with the soft cap or scale of logits that the configuration says.
    The model's forward runs with its output layer `head` (None: what `get_output_embeddings()` returns) computing the
    loss and the gradients, which the backward uses once. Nothing of the model stays changed. There is no double
    backward. `kernel`: None for torch's operators, 1024 tokens at a time, with which a managed model and a plain one
    get the same bits; "liger" for Liger's fused linear cross entropy, on a GPU. The report of a managed model names it.

    Raises `ManageError` for other models, losses and heads, for configurations that change logits in other ways, and
    for a kernel that is not installed or knows no such logits.
    """
    return ChunkedLoss(model, head, kernel)


def while_training(model: nn.Module, kernel: KernelName | None = None) -> Callable[[], None]:
    """Have each forward of `model` that trains and is given `labels` compute `.loss` as `chunked_loss` does, without
    `.logits`, until the returned function is called. Raises what `chunked_loss` does."""
    loss, running = ChunkedLoss(model, None, kernel), list[_Head]()

    def before(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        if not module.training or kwargs.get("labels") is None:
            return None
        kwargs, head = loss.begin(kwargs)
        running.append(head)
        return args, kwargs

    def after(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        if not running:
            return None
        head = running.pop()
        head.restore()
        if output is None:  # the forward has raised
            return None
        return replace(output, loss=loss.end(output, head), logits=None)

    handles = [
        model.register_forward_pre_hook(before, with_kwargs=True),
        model.register_forward_hook(after, with_kwargs=True, always_call=True),
    ]

    def end() -> None:
        for handle in handles:
            handle.remove()

    return end
