"""Models that bitsandbytes, torchao or transformers has quantised: their codes become homes, and they compute as plain
layers over the decoded values. Where a library is not installed, its layout is made by hand."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hetmem
from hetmem import testing
from hetmem.errors import BudgetError, ManageError
from tests.engine import harness

WIDTH = 128


# ---- The layouts of bitsandbytes, by hand. ----


class Params4bit(nn.Parameter):
    quant_state: Any


class Int8Params(nn.Parameter):
    CB: Any
    SCB: Any


Params4bit.__module__ = Int8Params.__module__ = "bitsandbytes.nn.modules"


class Linear4bit(nn.Linear):
    compute_dtype, compute_type_is_set, quant_state = torch.bfloat16, True, None


class Linear8bitLt(nn.Linear):
    state: Any = None


class FP8Linear(nn.Linear):
    block_size = (128, 128)


def quantised(frozen: str, directory: Path) -> Any:
    """Layers in the format `frozen`, whose decoded `values` the model has, and one that is trained."""
    torch.manual_seed(0)
    kind: Any = {"int8": Linear8bitLt, "fp8": FP8Linear}.get(frozen, Linear4bit)
    layers = kind(WIDTH, 2 * WIDTH), nn.GELU(), kind(2 * WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, 8)
    model: Any = nn.Sequential(*layers).bfloat16()
    model[:3].requires_grad_(False)
    twin = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)).bfloat16()
    twin.requires_grad_(False)
    coded = testing.of(harness.manage(twin, "host", directory, frozen=frozen))
    model.values = [coded.home(f"{n}.weight") for n in (0, 1)]
    for layer, name in ((model[0], "0.weight"), (model[2], "1.weight")):
        _quantise(layer, coded.codes(name), frozen)
    return model


def _quantise(layer: Any, found: Any, frozen: str) -> None:
    shape, scales = layer.weight.shape, found.scales
    if frozen == "int8":
        layer.weight = Int8Params(found.codes.view(torch.int8).view(shape), requires_grad=False)
        layer.weight.CB = layer.weight.SCB = None
        layer.state = SimpleNamespace(CB=layer.weight.data, SCB=scales.view(torch.float32))
    elif frozen == "fp8":
        layer.weight = nn.Parameter(found.codes.view(torch.float8_e4m3fn).view(shape), requires_grad=False)
        tiles = scales.view(torch.float32).view(-(-shape[0] // 128), -(-shape[1] // 128))
        layer.weight_scale_inv = nn.Parameter(tiles, requires_grad=False)
    else:
        layer.weight = Params4bit(found.codes.view(-1, 1), requires_grad=False)
        nested = frozen == "nf4-nested"
        outer = SimpleNamespace(absmax=found.nested[1:], blocksize=256, code=found.scale_values) if nested else None
        layer.weight.quant_state = SimpleNamespace(
            quant_type="nf4",
            blocksize=64,
            shape=shape,
            dtype=torch.bfloat16,
            code=found.code_values,
            nested=nested,
            state2=outer,
            absmax=scales if nested else scales.view(torch.float32),
            offset=found.nested[0] if nested else None,
        )


def plain_twin(model: Any) -> Any:
    twin: Any = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH, bias=False))
    twin.append(copy.deepcopy(model[3])).bfloat16()[:3].requires_grad_(False)
    twin[0].bias.copy_(model[0].bias)
    for layer, values in zip((twin[0], twin[2]), model.values, strict=True):
        layer.weight.copy_(values)
    return twin


def room(placement: str, directory: Path) -> hetmem.Budget:
    more: dict[str, Any] = {"nvme": "8MiB", "nvme_dir": directory} if placement == "nvme" else {}
    return hetmem.Budget(device="8MiB", host="200KiB" if more else "8MiB", **more)


@pytest.mark.each
@pytest.mark.parametrize("frozen", ["nf4", "nf4-nested", "int8", "fp8"])
@pytest.mark.parametrize("placement", ["host", "nvme"])
@pytest.mark.filterwarnings("ignore:.*quantised its inputs")
def test_a_quantised_model_trains_over_its_decoded_values(frozen: str, placement: str, tmp_path: Path) -> None:
    """Its modules and parameters are the same objects; homes have the codes."""
    model = quantised(frozen, tmp_path)
    with torch.no_grad():
        plain = plain_twin(model)
    weight, kind = model[0].weight, type(model[0])
    hetmem.manage(model, room(placement, tmp_path), device=harness.DEVICE())
    assert model[0].weight is weight
    assert type(model[0]) is kind
    assert getattr(weight, "quant_state", None) is None
    found = testing.of(model).codes("0.weight")
    assert found is not None
    assert found.format == frozen
    for number in range(2):
        x = torch.randn(4, WIDTH, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(number))
        outputs = plain(x), model(x)
        harness.assert_same(*outputs, "the output")
        for module, output in zip((plain, model), outputs, strict=True):
            output.float().square().sum().backward()
            torch.optim.SGD(module[3].parameters(), 0.1).step()
            module.zero_grad()
    harness.assert_same(plain[0].weight, model.state_dict()["0.weight"], "the state dict")
    hetmem.release(model)
    harness.assert_same(plain(x), model(x), "released")
    assert type(model[0].weight) is nn.Parameter


@pytest.mark.filterwarnings("error")
def test_layers_that_quantise_their_inputs_do_so_no_more_and_say_it(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="FP8Linear quantised its inputs, too"):
        hetmem.manage(quantised("fp8", tmp_path), device="sim")


def test_a_budget_that_is_too_small_leaves_the_library_its_weights(tmp_path: Path) -> None:
    model = quantised("nf4", tmp_path)
    weight, codes, state = model[0].weight, model[0].weight.data.clone(), model[0].weight.quant_state
    with pytest.raises(BudgetError):
        hetmem.manage(model, hetmem.Budget(device="8MiB", device_chunks="64KiB", host="16KiB"), device="sim")
    assert type(weight) is Params4bit
    assert weight.quant_state is state
    harness.assert_same(codes, weight.data, "the codes")
    assert "forward" not in vars(model[0])


def test_codes_are_not_kept_twice(tmp_path: Path) -> None:
    model = quantised("nf4", tmp_path)
    storage = model[0].weight.data.untyped_storage()
    held = torch.UntypedStorage._weak_ref(storage)
    del storage
    hetmem.manage(model, device="sim")
    gc.collect()
    assert torch.UntypedStorage._expired(held)
    with pytest.raises(ManageError, match=r"no quant_state of bitsandbytes any more.*merge it into a base of 16 bits"):
        _ = model[0].weight.quant_state


def _changed(**changes: Any) -> Callable[[Any], None]:
    return lambda model: vars(model[0].weight.quant_state).update(changes)


def _as(kind: str, module: str) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        model[0].weight = nn.Parameter(torch.zeros(2, 2, dtype=torch.uint8), requires_grad=False)
        model[0].weight.__class__ = type(kind, (nn.Parameter,), {"__module__": module})

    return change


def _buffer(name: str) -> Callable[[Any], None]:
    return lambda model: model[0].register_buffer(name, torch.zeros(4, dtype=torch.int32))


BAD: dict[str, tuple[Callable[[Any], Any], str]] = {
    "fp4": (_changed(quant_type="fp4"), r"0\.weight has the quant_type 'fp4', of which only 'nf4'"),
    "a block of another size": (_changed(blocksize=128), "blocksize 128"),
    "another table": (_changed(code=torch.zeros(16)), "other values of codes than nf4"),
    "scales that are cut": (_changed(absmax=torch.zeros(3)), "bytes of codes and scales, expected"),
    "packed for the CPU": (_changed(packing_format_for_cpu=True), "packed for kernels of the CPU"),
    "not quantised yet": (lambda model: setattr(model[0].weight, "quant_state", None), "has not quantised"),
    "an embedding": (lambda model: setattr(model[0], "__class__", nn.Embedding), "quantised weight of a Embedding"),
    "NF4Tensor": (_as("NF4Tensor", "torchao.dtypes.nf4tensor"), r"0\.weight is torchao's NF4Tensor"),
    "GPTQ": (_buffer("qweight"), "'qweight', of GPTQ, AWQ"),
    "compressed-tensors": (_buffer("weight_packed"), "of compressed-tensors"),
    "fp8 with scales of rows": (_buffer("weight_scale"), "fp8 with scales of rows or tensors"),
    "GGUF": (lambda model: model.append(type("GgufLinear", (nn.Linear,), {})(4, 4)), "of GGUF"),
}


@pytest.mark.parametrize("what", BAD)
def test_what_cannot_be_taken_is_refused_by_name_and_changes_nothing(what: str, tmp_path: Path) -> None:
    model = quantised("nf4", tmp_path)
    spoil, message = BAD[what]
    spoil(model)
    before = {name: (type(p), p.data.clone()) for name, p in model.named_parameters()}
    with pytest.raises(ManageError, match=message):
        hetmem.manage(model, device="sim")
    for name, parameter in model.named_parameters():
        assert type(parameter) is before[name][0]
        harness.assert_same(before[name][1], parameter.data, name)


# ---- The libraries themselves, where they are installed. ----


def _of_bitsandbytes(nested: bool, dtype: torch.dtype, compute: torch.dtype | None) -> tuple[Any, Any]:
    layers: Any = pytest.importorskip("bitsandbytes.nn")
    options = {"compute_dtype": compute, "compress_statistics": nested, "quant_type": "nf4"}
    linear = layers.Linear4bit(WIDTH, 2 * WIDTH, **options), layers.Linear4bit(2 * WIDTH, WIDTH, bias=False, **options)
    model = nn.Sequential(linear[0], nn.GELU(), linear[1], nn.Linear(WIDTH, 8)).to(dtype)
    model[:3].requires_grad_(False)
    model.to("cpu")  # which quantises
    return model, copy.deepcopy(model)


@pytest.mark.nightly
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("compute", [None, torch.bfloat16, torch.float16, torch.float32])
def test_a_model_of_bitsandbytes_has_the_bits_that_it_had(
    nested: bool, dtype: torch.dtype, compute: torch.dtype | None
) -> None:
    model, theirs = _of_bitsandbytes(nested, dtype, compute)
    hetmem.manage(model, device="sim")
    x = torch.randn(4, WIDTH, dtype=dtype)
    outputs = theirs(x), model(x)
    harness.assert_same(*outputs, "the output")
    for output in outputs:
        output.float().sum().backward()
    harness.assert_same(theirs[3].weight.grad, model[3].weight.grad, "the gradient")


@pytest.mark.nightly
def test_int8_of_bitsandbytes_is_decoded() -> None:
    layers: Any = pytest.importorskip("bitsandbytes.nn")
    functional: Any = pytest.importorskip("bitsandbytes.functional")
    model: Any = nn.Sequential(layers.Linear8bitLt(WIDTH, 2 * WIDTH, has_fp16_weights=False), nn.Linear(2 * WIDTH, 8))
    model = model.half().to("cpu")
    weight = functional.int8_vectorwise_dequant(model[0].weight.data, model[0].weight.SCB).half()
    model[0].requires_grad_(False)
    x = torch.randn(4, WIDTH, dtype=torch.float16)
    with pytest.warns(UserWarning, match="Linear8bitLt quantised its inputs"):
        hetmem.manage(model, device="sim")
    harness.assert_same(weight, model[0].weight.detach(), "the weight")
    harness.assert_same(F.linear(x, weight, model[0].bias), model[0](x), "the output")
    assert "0.SCB" not in model.state_dict()


def _of_torchao(kind: str) -> Any:
    quantization: Any = pytest.importorskip("torchao.quantization")
    model: Any = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, 8)).bfloat16()
    if kind == "int8":
        config = quantization.Int8WeightOnlyConfig(version=2)
        quantization.quantize_(model, config, filter_fn=lambda module, name: name == "0")
    else:
        formats: Any = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
        made = formats.MXTensor.to_mx(model[0].weight.detach(), torch.float4_e2m1fn_x2)
        model[0].weight = nn.Parameter(made, requires_grad=False)
    model[0].requires_grad_(False)
    return model


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["int8", "mxfp4"])
def test_a_weight_of_torchao_is_decoded(kind: str, tmp_path: Path) -> None:
    model = _of_torchao(kind)
    weight, values = model[0].weight, model[0].weight.dequantize()
    with torch.no_grad():
        plain = nn.Linear(WIDTH, 2 * WIDTH, dtype=torch.bfloat16)
        plain.weight.copy_(values)
        plain.bias.copy_(model[0].bias)
    with pytest.raises(BudgetError):
        hetmem.manage(model, hetmem.Budget(device="8MiB", host="4KiB"), device="sim")
    harness.assert_same(values, model[0].weight.dequantize(), "what it was before")
    hetmem.manage(model, device="sim")
    assert model[0].weight is weight
    x = torch.randn(4, WIDTH, dtype=torch.bfloat16)
    harness.assert_same(values, model[0].weight.detach(), "the weight")
    harness.assert_same(plain(x), model[0](x), "the output")
    hetmem.save(tmp_path / "model.safetensors", model)
    other = _of_torchao(kind)
    hetmem.manage(other, device="sim")
    hetmem.load(tmp_path / "model.safetensors", other)
    harness.assert_same_weights(model, other)


@pytest.mark.nightly
@pytest.mark.parametrize("later", [False, True], ids=["adapters before", "adapters after"])
def test_adapters_of_peft_train_over_a_model_of_bitsandbytes(later: bool) -> None:
    pytest.importorskip("bitsandbytes.nn")
    peft: Any = pytest.importorskip("peft")

    def adapted(model: Any) -> Any:
        torch.manual_seed(3)
        model.is_loaded_in_4bit = True  # as transformers says
        return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["0", "2"], init_lora_weights=False))

    model, theirs = _of_bitsandbytes(True, torch.bfloat16, torch.bfloat16)
    theirs = adapted(theirs)
    model = adapted(hetmem.manage(model, device="sim")) if later else hetmem.manage(adapted(model), device="sim")
    x = torch.randn(4, WIDTH, dtype=torch.bfloat16)
    outputs = theirs(x), model(x)
    harness.assert_same(*outputs, "the output")
    for output in outputs:
        output.float().sum().backward()
    grads = [{n: p.grad for n, p in each.named_parameters() if "lora" in n} for each in (theirs, model)]
    for name, grad in grads[0].items():
        harness.assert_same(grad, grads[1][name], name)
    with (
        pytest.warns(UserWarning, match="may get different"),
        pytest.raises(ManageError, match="merge it into a base of 16 bits"),
    ):
        model.merge_and_unload()


@pytest.mark.parametrize("frozen", ["nf4-nested", "int8"])
@pytest.mark.filterwarnings("ignore:.*quantised its inputs")
def test_a_plan_of_a_quantised_model_has_the_bytes_of_its_run_and_leaves_it_as_it_is(
    frozen: str, tmp_path: Path
) -> None:
    model, x = quantised(frozen, tmp_path), torch.randn(4, WIDTH, dtype=torch.bfloat16)
    before, kind = model[0].weight.data.clone(), type(model[0].weight)
    limits = hetmem.Budget(device="8MiB", device_chunks="384KiB", host="8MiB")

    def loss(output: torch.Tensor) -> torch.Tensor:
        return output.float().square().sum()

    plan = hetmem.plan(lambda: model, x, limits, loss=loss)
    assert type(model[0].weight) is kind
    harness.assert_same(before, model[0].weight.data, "the codes")
    hetmem.manage(model, plan=plan, device="sim")
    optimizer, crossed = hetmem.AdamW(model[3].parameters()), []
    for _ in range(3):
        loss(model(x)).backward()
        optimizer.step()
        optimizer.zero_grad()
        crossed.append(hetmem.report(model).to_dict()["links"]["host_to_device"]["bytes"])
    assert crossed[2] - crossed[1] == plan.link_bytes["host_to_device"]
    tiers = hetmem.report(model).to_dict()["tiers"]
    for tier in ("device", "host"):
        assert tiers[tier]["homes"].get(f"{frozen} codes", 0) == plan.role_bytes[tier].get(f"{frozen} codes", 0)
    assert plan.role_bytes["host"].get(f"{frozen} codes") or plan.role_bytes["device"][f"{frozen} codes"]
