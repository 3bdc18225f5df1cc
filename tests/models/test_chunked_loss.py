"""The loss of a causal language model without the logits of all tokens: its value, its bits, its memory."""

from __future__ import annotations

import copy
import sys
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import hetmem
from hetmem.errors import ManageError

transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"num_key_value_heads": 2},
    "Gemma2": {"num_key_value_heads": 2, "head_dim": 8, "final_logit_softcapping": 0.5},
    "Cohere": {"logit_scale": 0.25},
    "Granite": {"logits_scaling": 3.0},
}


def built(family: str, vocabulary: int = 96, **options: Any) -> nn.Module:
    torch.manual_seed(3)
    if family == "GPT2":
        config = transformers.GPT2Config(
            n_embd=32, n_layer=2, n_head=4, vocab_size=vocabulary, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
        )
        return transformers.GPT2LMHeadModel(config)  # type: ignore[no-any-return]
    sizes = {**SIZES, "vocab_size": vocabulary, "pad_token_id": 0, **FAMILIES[family], **options}
    config = getattr(transformers, f"{family}Config")(**sizes)
    return getattr(transformers, f"{family}ForCausalLM")(config)  # type: ignore[no-any-return]


def batch(rows: int = 2, length: int = 600, vocabulary: int = 96) -> dict[str, Any]:
    """Of more tokens than one chunk, some of them ignored."""
    tokens = torch.randint(1, vocabulary, (rows, length), generator=torch.Generator().manual_seed(1))
    labels = tokens.clone()
    labels[:, : length // 5] = -100
    return {"input_ids": tokens, "labels": labels}


@pytest.mark.parametrize("items", [None, 777])
@pytest.mark.parametrize("family", [*FAMILIES, "GPT2"])
def test_it_is_the_loss_of_the_model_with_its_gradients(family: str, items: int | None) -> None:
    model, given = built(family), batch() | ({} if items is None else {"num_items_in_batch": torch.tensor(items)})
    gradients = []
    for loss in (model(**given).loss, hetmem.chunked_loss(model)(**given)):
        loss.backward()
        gradients.append((loss.detach(), *(parameter.grad for parameter in model.parameters())))
        model.zero_grad()
    for expected, found in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=1e-7)
    assert "forward" not in vars(model.get_output_embeddings())  # type: ignore[operator]


@pytest.mark.in_turn
@pytest.mark.parametrize("precision", [None, torch.bfloat16])
def test_a_managed_model_gets_the_bits_of_a_plain_one(precision: Any) -> None:
    plain, given = built("Gemma2"), batch(length=520)
    model = copy.deepcopy(plain)
    if precision is not None:
        plain = plain.to(precision)
        model = model.to(precision)
    hetmem.manage(model, hetmem.Budget(device="96MiB", device_chunks="64KiB", host="8MiB"), device="sim")
    optimizers = torch.optim.AdamW(plain.parameters(), fused=True), hetmem.AdamW(model.parameters())
    for _ in range(2):
        losses = []
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            losses.append(hetmem.chunked_loss(each)(**given))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(*losses)
    for name, value in plain.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name


def test_a_step_runs_in_less_memory_than_the_logits_of_all_tokens() -> None:
    given = batch(rows=4, length=1024, vocabulary=4096)
    logits = given["input_ids"].numel() * 4096 * 4
    assert logits == 64 << 20
    model = built("Llama", 4096)
    hetmem.manage(model, hetmem.Budget(device="60MiB", device_chunks="2MiB", host="64MiB"), device="sim")
    hetmem.chunked_loss(model)(**given).backward()
    with pytest.raises(torch.OutOfMemoryError, match=r"take\shetmem\.chunked_loss\(model\)"):
        model(**given).loss.backward()


class Fused:
    """In place of Liger's class, which runs on a GPU alone: what it computes, and the options it was given."""

    given: ClassVar[list[dict[str, Any]]] = []

    def __init__(self, **options: Any) -> None:
        self.given.append(options)

    def __call__(self, weight: Tensor, rows: Tensor, target: Tensor, bias: Tensor | None) -> Tensor:
        options = self.given[-1]
        logits, cap = nn.functional.linear(rows, weight, bias), options["softcap"]
        logits = torch.tanh(logits / cap) * cap if cap else logits
        ignored, reduction = options["ignore_index"], options["reduction"]
        return nn.functional.cross_entropy(logits, target, ignore_index=ignored, reduction=reduction)


def test_ligers_kernel_runs_where_it_is_asked_for_and_the_report_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model, given = built("Gemma2"), batch(length=40)
    expected = model(**given).loss
    with pytest.raises(ManageError, match="pip install liger-kernel"):
        hetmem.chunked_loss(model, kernel="liger")
    where = "liger_kernel.transformers.fused_linear_cross_entropy"
    monkeypatch.setitem(sys.modules, where, SimpleNamespace(LigerFusedLinearCrossEntropyLoss=Fused))
    hetmem.manage(model, hetmem.Budget(device="96MiB", host="8MiB"), device="sim")
    loss = hetmem.chunked_loss(model, kernel="liger")(**given)
    torch.testing.assert_close(loss, expected)
    assert Fused.given[-1] == {"ignore_index": -100, "reduction": "sum", "softcap": 0.5}
    loss.backward()
    assert hetmem.report(model).to_dict()["loss"] == "Liger's kernel"
    assert "chunked loss: Liger's kernel" in str(hetmem.report(model))
    with pytest.raises(ManageError, match="knows no scale of logits"):
        hetmem.chunked_loss(built("Cohere"), kernel="liger")
    with pytest.raises(ManageError, match="kernel must be"):
        hetmem.chunked_loss(model, kernel="triton")  # type: ignore[arg-type]


def doubling(model: Any) -> Any:
    """`model`, whose class doubles logits, of which its configuration says nothing."""

    class DoublingForCausalLM(type(model)):  # type: ignore[misc]
        def forward(self, **given: Any) -> Any:
            output = super().forward(**given)
            output.logits = output.logits * 2
            return output

    model.__class__ = DoublingForCausalLM
    return model


def test_what_would_be_another_loss_is_refused_by_name() -> None:
    with pytest.raises(ManageError, match="got Linear"):
        hetmem.chunked_loss(nn.Linear(2, 2))
    model = built("Llama")
    model.config.logit_bias_of_another_kind = 2.0  # type: ignore[union-attr]
    with pytest.raises(ManageError, match=r"logit_bias_of_another_kind=2\.0"):
        hetmem.chunked_loss(model)
    model = built("Llama")
    model.loss_function = lambda *_, **__: None  # type: ignore[assignment]
    with pytest.raises(ManageError, match="a loss of its own"):
        hetmem.chunked_loss(model)
    with pytest.raises(ManageError, match="makes 2 of a logit of 1, expected 1"):
        hetmem.chunked_loss(doubling(built("Llama")))(**batch())
    with pytest.raises(ManageError, match="expected an output layer"):
        hetmem.chunked_loss(built("Llama"), head=nn.Identity())
