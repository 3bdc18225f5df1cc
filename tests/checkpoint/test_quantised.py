"""Quantised weights in files: a checkpoint has their codes, and files of 16 bits are encoded as they are read."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import hetmem
from hetmem import testing
from hetmem.errors import CheckpointError, ManageError
from tests.engine import harness

FORMATS = ("nf4", "nf4-nested", "mxfp4", "fp8", "int8")
WIDTH = 64


def built(seed: int = 0) -> nn.Sequential:
    """Frozen layers with one that is trained behind them."""
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH), nn.Linear(WIDTH, 8))).bfloat16()
    model[:2].requires_grad_(False)
    return model


def managed(model: nn.Module, frozen: Any, directory: Path, placement: str = "host") -> Any:
    room: dict[str, Any] = {"device": "8MiB", "host": "8MiB"}
    if placement == "nvme":
        room |= {"host": "128KiB", "nvme": "8MiB", "nvme_dir": directory}
    return harness.manage(model, hetmem.Budget(**room), directory, frozen=frozen)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> torch.Tensor:
    torch.manual_seed(seed)
    loss = model(torch.randn(4, WIDTH, dtype=torch.bfloat16)).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@pytest.mark.each
@pytest.mark.parametrize("frozen", FORMATS)
@pytest.mark.parametrize("placement", ["host", "nvme"])
def test_training_goes_on_from_a_checkpoint_with_the_same_codes(frozen: str, placement: str, tmp_path: Path) -> None:
    model, other = (managed(built(seed), frozen, tmp_path, placement) for seed in (0, 1))
    optimizers = [hetmem.AdamW(each[2].parameters()) for each in (model, other)]
    train(model, optimizers[0], 1)
    train(other, optimizers[1], 2)  # its copies are of its own codes
    file = tmp_path / "model.safetensors"
    hetmem.save(file, model, optimizers[0])
    hetmem.load(file, other, optimizers[1])
    harness.assert_same_weights(model, other)
    losses = [train(each, optimizer, 3) for each, optimizer in zip((model, other), optimizers, strict=True)]
    harness.assert_same(*losses, "the loss")
    coded = 4 * WIDTH * WIDTH
    assert file.stat().st_size < coded * 2 + 24_000, "codes, not values"


def test_a_checkpoint_of_another_format_changes_nothing(tmp_path: Path) -> None:
    model = managed(built(), "nf4", tmp_path)
    before = testing.of(model).home("0.weight")
    for frozen, saved in (("int8", "codes of int8"), ("nf4-nested", "codes of nf4-nested"), (None, "not quantised")):
        file = tmp_path / "model.safetensors"
        hetmem.save(file, managed(built(1), frozen, tmp_path))
        with pytest.raises(CheckpointError, match=rf"0\.weight is {saved} .* in the checkpoint and codes of nf4 of"):
            hetmem.load(file, model)
        harness.assert_same(before, testing.of(model).home("0.weight"), "the weight")
    hetmem.save(file, model)
    with pytest.raises(CheckpointError, match=r"0\.weight is codes of nf4 .* not quantised in the model.*frozen='nf4'"):
        hetmem.load(file, built())


@pytest.mark.each
@pytest.mark.parametrize("frozen", FORMATS)
@pytest.mark.parametrize("placement", ["host", "nvme"])
def test_weights_of_16_bits_are_encoded_as_they_are_read(frozen: str, placement: str, tmp_path: Path) -> None:
    """To the codes that `manage` makes of them; what was copied to the device before is dropped."""
    source, expected = built(1), managed(built(1), frozen, tmp_path, placement)
    model = managed(built(), frozen, tmp_path, placement)
    x = torch.randn(2, WIDTH, dtype=torch.bfloat16)
    model(x)
    hetmem.save(tmp_path / "model.safetensors", source)
    assert hetmem.load_weights(tmp_path / "model.safetensors", model) == ([], [])
    harness.assert_same_weights(expected, model)
    harness.assert_same(expected(x), model(x), "the output")


def test_weights_of_another_shape_change_nothing_and_infinities_have_no_code(tmp_path: Path) -> None:
    model, other = managed(built(), "nf4", tmp_path), built(1)
    before, file = testing.of(model).home("0.weight"), tmp_path / "model.safetensors"
    wrong = copy.deepcopy(other)
    wrong[1].weight = nn.Parameter(torch.ones(WIDTH, WIDTH, dtype=torch.bfloat16), requires_grad=False)
    hetmem.save(file, wrong)
    with pytest.raises(CheckpointError, match=r"1\.weight has the shape"):
        hetmem.load_weights(file, model)
    harness.assert_same(before, testing.of(model).home("0.weight"), "the weight")
    other[1].weight.data[-1, -1] = torch.inf
    hetmem.save(file, other)
    with pytest.raises(CheckpointError, match=r"1\.weight has an infinity or NaN in the file.* partly loaded"):
        hetmem.load_weights(file, model)


@pytest.mark.parametrize("frozen", ["nf4", "mxfp4", "fp8"])
def test_a_base_on_meta_is_never_in_memory_in_16_bits(frozen: str, tmp_path: Path) -> None:
    """Its weights are filled by `load_weights`, and are no numbers until then."""
    expected, file = managed(built(1), frozen, tmp_path), tmp_path / "model.safetensors"
    hetmem.save(file, built(1))
    model = built()
    for layer in model[:2]:
        layer.weight = nn.Parameter(layer.weight.to("meta"), requires_grad=False)
    model[1].bias = nn.Parameter(model[1].bias.to("meta"), requires_grad=False)
    weight = model[0].weight
    managed(model, frozen, tmp_path)
    assert model[0].weight is weight
    x = torch.randn(2, WIDTH, dtype=torch.bfloat16)
    assert not model(x).isfinite().any()
    hetmem.load_weights(file, model)
    harness.assert_same_weights(expected, model)
    harness.assert_same(expected(x), model(x), "the output")


def test_what_is_trained_has_to_have_values(tmp_path: Path) -> None:
    model = built()
    model[2].weight = nn.Parameter(model[2].weight.to("meta"))
    with pytest.raises(ManageError, match=r"2\.weight is on meta, without values, and trained"):
        managed(model, "nf4", tmp_path)
    model[2].weight.requires_grad_(False)
    model.register_buffer("scale", torch.ones(1, device="meta"))
    with pytest.raises(ManageError, match="the buffer scale is on meta"):
        managed(model, "nf4", tmp_path)


def published(model: Any) -> dict[str, torch.Tensor]:
    """The weights of `model` as other programs save them."""
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        found, shape = testing.of(model).codes(parameter), parameter.shape
        if found is None:
            tensors[name] = parameter.detach().clone()
            continue
        format_, codes, scales, levels = found.format, found.codes, found.scales, found.nested
        if format_.startswith("nf4"):
            state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(shape)}
            tensors |= {name: codes.view(-1, 1), f"{name}.quant_map": found.code_values}
            if format_ == "nf4-nested":
                state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": levels[0].item()}
                tensors |= {f"{name}.nested_absmax": levels[1:], f"{name}.nested_quant_map": found.scale_values}
            tensors[f"{name}.absmax"] = scales if format_ == "nf4-nested" else scales.view(torch.float32)
            text = json.dumps(state).encode()
            tensors[f"{name}.quant_state.bitsandbytes__nf4"] = torch.tensor([*text], dtype=torch.uint8)
        elif format_ == "fp8":
            tensors[name] = codes.view(torch.float8_e4m3fn).view(shape)
            tensors[f"{name}_scale_inv"] = scales.view(torch.float32).view(-(-shape[0] // 128), -(-shape[1] // 128))
        elif format_ == "int8":
            tensors[name] = codes.view(torch.int8).view(shape)
            tensors[f"{name.removesuffix('.weight')}.SCB"] = scales.view(torch.float32)
            tensors[f"{name.removesuffix('.weight')}.weight_format"] = torch.zeros((), dtype=torch.uint8)
        else:
            tensors[f"{name}_blocks"] = codes.view(shape[0], -1, 16)
            tensors[f"{name}_scales"] = scales.view(shape[0], -1)
    return tensors


@pytest.mark.parametrize("frozen", FORMATS)
def test_quantised_files_of_others_are_taken_as_they_are(frozen: str, tmp_path: Path) -> None:
    expected, model = (managed(built(seed), frozen, tmp_path) for seed in (1, 0))
    x = torch.randn(2, WIDTH, dtype=torch.bfloat16)
    model(x)
    file = tmp_path / "base.safetensors"
    save_file({f"base.{name}": value for name, value in published(expected).items()}, file)
    own = {f"base.{name}": name for name, _ in model.named_parameters()}
    assert hetmem.load_weights(file, model, rename=own.get) == ([], [])
    harness.assert_same_weights(expected, model)
    harness.assert_same(expected(x), model(x), "the output")
    with pytest.raises(CheckpointError, match=rf"quantised in the files, as {frozen}, and not in the model.*frozen="):
        hetmem.load_weights(file, built(), rename=own.get)


Tensors = dict[str, torch.Tensor]


def _state(tensors: Tensors, **changes: Any) -> None:
    name = "0.weight.quant_state.bitsandbytes__nf4"
    text = json.dumps({**json.loads(bytes(tensors[name].tolist())), **changes}).encode()
    tensors[name] = torch.tensor([*text], dtype=torch.uint8)


BAD: dict[str, tuple[str, Callable[[Tensors], object], str]] = {
    "codes without scales": ("nf4", lambda t: t.pop("1.weight.absmax"), r"have no 1\.weight\.absmax"),
    "a block of another size": ("nf4", lambda t: _state(t, blocksize=128), "blocksize 128: only 64"),
    "fp4": ("nf4", lambda t: _state(t, quant_type="fp4"), "quant_type 'fp4': only nf4"),
    "another map": ("nf4", lambda t: t["0.weight.quant_map"].neg_(), "quant_map in the files has other values"),
    "a scale that is NaN": ("nf4", lambda t: t["0.weight.absmax"][0].fill_(torch.nan), "no finite number"),
    "too few scales": ("nf4", lambda t: t.update({"0.weight.absmax": t["0.weight.absmax"][1:]}), "expected 128"),
    "another shape": ("nf4", lambda t: _state(t, shape=[WIDTH, 2 * WIDTH]), "shape .* in the files"),
    "no JSON": ("nf4", lambda t: t["0.weight.quant_state.bitsandbytes__nf4"].fill_(255), "not understood"),
    "a state of another kind": ("nf4", lambda t: _state(t, shape="all"), "not understood: shape"),
    "a nested state that is cut": ("nf4-nested", lambda t: t.pop("0.weight.nested_absmax"), "have no .*nested_absmax"),
    "nested scales without offset": ("nf4-nested", lambda t: _state(t, nested_offset="1"), "not understood"),
    "scales of a row": ("fp8", lambda t: t.update({"0.weight_scale_inv": torch.ones(2 * WIDTH, 1)}), "expected"),
    "a scale that is infinite": ("fp8", lambda t: t["0.weight_scale_inv"].fill_(torch.inf), "no finite number"),
    "too few rows": ("int8", lambda t: t.update({"0.SCB": torch.ones(3)}), "expected 128 of torch.float32"),
    "an exponent that is NaN": ("mxfp4", lambda t: t["0.weight_scales"][0].fill_(255), "no finite number"),
    "blocks of 8": ("mxfp4", lambda t: t.update({"0.weight_blocks": t["0.weight_blocks"].view(-1, 8)}), "expected"),
    "another format": ("int8", lambda t: t, "is int8 in the files and nf4 in the model"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_files_change_nothing(what: str, tmp_path: Path) -> None:
    frozen, spoil, message = BAD[what]
    tensors = published(managed(built(1), frozen, tmp_path))
    spoil(tensors)
    save_file({name: value.contiguous() for name, value in tensors.items()}, tmp_path / "bad.safetensors")
    model = managed(built(), "nf4" if what == "another format" else frozen, tmp_path)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(CheckpointError, match=message):
        hetmem.load_weights(tmp_path / "bad.safetensors", model)
    for name, value in model.state_dict().items():
        harness.assert_same(before[name], value, name)


@pytest.mark.nightly
def test_experts_of_gpt_oss_are_taken_from_its_files_and_decoded_transposed(tmp_path: Path) -> None:
    """Their blocks run along the dimension that the module multiplies, which its weights have last but one."""
    transformers: Any = pytest.importorskip("transformers")
    reference: Any = pytest.importorskip("transformers.integrations.mxfp4")
    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 1, "num_local_experts": 4}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 80}
    config = transformers.GptOssConfig(**sizes, **heads, num_experts_per_tok=2, dtype=torch.bfloat16)

    def base(seed: int) -> Any:
        torch.manual_seed(seed)
        return transformers.GptOssForCausalLM(config).bfloat16().requires_grad_(False)

    plain, model = base(1), base(2)
    experts = {name for name, parameter in plain.named_parameters() if parameter.dim() == 3}
    files: dict[str, torch.Tensor] = {}
    found = plain.state_dict()
    for name in experts:
        rows = found[name].transpose(1, 2).contiguous()
        codes = torch.randint(0, 256, (*rows.shape[:2], rows.shape[2] // 32, 16), dtype=torch.uint8)
        scales = torch.randint(118, 122, codes.shape[:3], dtype=torch.uint8)
        found[name] = reference.convert_moe_packed_tensors(codes, scales)
        files |= {f"{name}_blocks": codes, f"{name}_scales": scales}
    plain.load_state_dict(found)
    save_file(files | {n: v for n, v in plain.state_dict().items() if n not in experts}, tmp_path / "gpt.safetensors")
    room = hetmem.Budget(device="8MiB", device_chunks="512KiB", host="8MiB")
    hetmem.manage(model, room, device="sim", frozen={"*.experts.*_proj": "mxfp4"}, chunk_bytes="64KiB")
    hetmem.load_weights(tmp_path / "gpt.safetensors", model)
    assert len(experts) == 2
    harness.assert_same_weights(plain, model)
    tokens = torch.arange(12).view(2, 6)
    harness.assert_same(plain(tokens).logits, model(tokens).logits, "the logits")
    hetmem.save(tmp_path / "own.safetensors", model)
    again = base(3)
    hetmem.manage(again, room, device="sim", frozen={"*.experts.*_proj": "mxfp4"}, chunk_bytes="64KiB")
    hetmem.load(tmp_path / "own.safetensors", again)
    harness.assert_same_weights(plain, again)
