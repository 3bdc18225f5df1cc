"""`hetmem.chunked_loss(…)`: the loss of a causal language model without the logits of all tokens.

The model's class and forward stay: during one call of it the output layer computes the loss of its inputs, a chunk of
tokens after the other, with their gradients. So only a chunk has logits, in the forward and in the backward. Knows
nothing of chunks of parameters: a plain model gets the same bits as a managed one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from hetmem.errors import ManageError

_ROWS = 1024
"""Tokens of a chunk."""
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


class ChunkedLoss:
    """Computes the loss of `model`, called as the model is; see `chunked_loss`."""

    def __init__(self, model: nn.Module, head: nn.Module | None) -> None:
        self._model = model
        inner: Any = model
        inner = inner.get_base_model() if hasattr(inner, "get_base_model") else inner
        config = getattr(inner, "config", None)
        name = type(inner).__name__
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

    def __call__(
        self,
        *,
        labels: torch.Tensor,
        num_items_in_batch: torch.Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: torch.Tensor | None = None,
        **batch: Any,
    ) -> torch.Tensor:
        """Return the scalar that `model(labels=labels, **batch).loss` is, up to rounding."""
        if shift_labels is None:
            shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        head, targets, found = self._head, shift_labels.reshape(-1), list[torch.Tensor]()

        def forward(hidden: torch.Tensor) -> torch.Tensor:
            rows = hidden.reshape(-1, hidden.shape[-1])
            given = targets.to(rows.device)
            found.append(_CrossEntropy.apply(rows, head.weight, head.bias, given, self._how, ignore_index))
            return hidden.new_ones(()).expand(*hidden.shape[:-1], 1)  # in place of logits

        before = vars(head).get("forward")
        head.__dict__["forward"] = forward
        try:
            output = self._model(**batch)
        finally:
            if before is None:
                del head.__dict__["forward"]
            else:
                head.__dict__["forward"] = before
        self._check(output)
        if len(found) != 1:
            raise ManageError(f"the forward has called its output layer {len(found)} times, expected once")
        counted: Any = (targets != ignore_index).sum() if num_items_in_batch is None else num_items_in_batch
        if isinstance(counted, torch.Tensor):
            counted = counted.to(found[0].device)
        loss: torch.Tensor = found[0] / counted
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
        made, expected = float(logits.detach().reshape(-1)[0]), float(self._how.of(torch.ones(())))
        if abs(made - expected) > 0.02 * abs(expected):
            raise ManageError(
                f"the model makes {made:.3g} of a logit of 1, expected {expected:.3g}: it changes logits in a way that "
                f"chunked_loss does not know; use the model's own loss"
            )
        self._checked = True


def chunked_loss(model: nn.Module, head: nn.Module | None = None) -> ChunkedLoss:
    """Return a function for the loss of `model`, a causal language model of transformers, without all tokens' logits.

    `loss_of(**batch)` is the scalar that `model(**batch).loss` is, up to rounding: of the next token, `ignore_index`
    -100, the mean or the sum by `num_items_in_batch`, with the soft cap or scale of logits that the configuration says.
    The model's forward runs with its output layer `head` (None: what `get_output_embeddings()` returns) computing the
    loss of 1024 tokens at a time, with torch's operators, and the gradients, which the backward uses once. Nothing of
    the model stays changed. A managed model and a plain one get the same bits. There is no double backward.

    Raises `ManageError` for other models, losses and heads, and for configurations that change logits in other ways.
    """
    return ChunkedLoss(model, head)
