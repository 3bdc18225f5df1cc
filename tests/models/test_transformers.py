"""Models of Hugging Face transformers, managed, do bit for bit what they do in plain torch.

Chunks of every managed model get a third of the bytes of its states, on device and host together, so most of it lives
on NVMe. `sanitize` poisons what is freed and fails where a GPU would have.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import safetensors.torch
import torch
from torch import Tensor, nn

import hetmem
from hetmem.errors import CheckpointError
from tests.models.zoo import MODELS
from tests.pairs import case, mostly

STEPS = 2
CHUNK_BYTES = 16 * 1024
PARAMETER_BYTES = 4
UPDATED_BYTES = 12
"""Of one float32 parameter, an AdamW step reads and writes the parameter itself and two states."""
STATE_BYTES = 16
"""These and its gradient."""

MODES = ("gpt2", "llama", "t5")
"""Decoder, modern decoder, encoder with decoder: enough for what does not depend on the family's operators."""

PRECISIONS = (*MODES, "mixtral", "vit", "whisper")
"""And what rounds elsewhere: chosen experts, images and sound that are cast on the way in."""


def families(*names: str, of: Iterable[str] = MODELS) -> Any:
    """A test of the families `names`, and with `--all-cases` of all."""
    return pytest.mark.parametrize("name", [case(name, nightly=name not in names) for name in of])


class Pair:
    """A plain model and its managed copy, driven alike and compared after every move.

    With `mixed_precision` the plain side keeps float32 weights and computes in a 16-bit copy of them.
    """

    def __init__(self, name: str, directory: Path, mixed_precision: torch.dtype | None = None) -> None:
        self.plain, self.inputs = MODELS[name]()
        self.managed, self._dtype = copy.deepcopy(self.plain), mixed_precision
        self.compute = self.plain if mixed_precision is None else _in_dtype(self.plain, mixed_precision)
        self.trained = sum(p.numel() for p in self.plain.parameters() if p.requires_grad)
        third = STATE_BYTES * self.trained // 3
        self.device_chunks, self.host = third * 3 // 8, third * 5 // 8
        hetmem.manage(
            self.managed,
            hetmem.Budget(
                device="16MiB",
                device_chunks=self.device_chunks,
                host=self.host,
                nvme="32MiB",
                nvme_dir=directory,
            ),
            device="sim",
            mixed_precision=mixed_precision,
            chunk_bytes=CHUNK_BYTES,
            sanitize=True,
        )
        hyper_parameters: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1, "eps": 1e-8}
        self._optimizers = (
            torch.optim.AdamW(self.plain.parameters(), fused=True, **hyper_parameters),
            hetmem.AdamW(self.managed.parameters(), **hyper_parameters),
        )

    def both(self, run: Callable[[nn.Module], Any]) -> tuple[Any, Any]:
        """What `run` returns for the plain and for the managed model, from the same random numbers (dropout)."""
        seed = int(torch.randint(1 << 30, ()))
        results = []
        for model in (self.compute, self.managed):
            torch.manual_seed(seed)
            results.append(run(model))
        return results[0], results[1]

    def train(self, steps: int) -> None:
        """`steps` steps, asserting equal bits of loss, gradients and weights at each."""
        for step in range(steps):
            plain, managed = self.both(self._forward_backward)
            assert torch.equal(plain, managed), f"step {step}: the losses are {plain} and {managed}"
            self._collect_gradients()
            for name, ours, theirs in self._parameters():
                assert _same(theirs.grad, ours.grad), f"step {step}: the gradient of {name} differs"
            for optimizer in self._optimizers:
                optimizer.step()
                optimizer.zero_grad()
            _copy_weights(self.plain, self.compute)
            for name, ours, theirs in self._parameters():
                assert torch.equal(theirs, ours), f"step {step}: {name} differs after the update"

    def _forward_backward(self, model: nn.Module) -> Tensor:
        loss: Tensor = model(**self._given(model, self.inputs)).loss
        loss.backward()
        return loss.detach()

    def _given(self, model: nn.Module, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """A 16-bit model wants 16-bit images and sound; a managed one casts them itself."""
        if model is self.plain or model is self.managed:
            return inputs
        return {name: each.to(self._dtype) if each.is_floating_point() else each for name, each in inputs.items()}

    def _collect_gradients(self) -> None:
        """What mixed precision means for gradients: 16-bit from backward, float32 from there on."""
        for weight, computed in zip(self.plain.parameters(), self.compute.parameters(), strict=True):
            if weight is not computed and computed.grad is not None:
                weight.grad, computed.grad = computed.grad.float(), None

    def _parameters(self) -> list[tuple[str, nn.Parameter, nn.Parameter]]:
        plain = dict(self.plain.named_parameters())
        return [(name, managed, plain[name]) for name, managed in self.managed.named_parameters()]

    def evaluate(self, mode: Callable[[], AbstractContextManager[Any]]) -> None:
        """A forward without gradients, of the first sample alone, gives the same output."""
        inputs = {name: tensor[:1] for name, tensor in self.inputs.items()}
        for model in (self.compute, self.managed):
            model.eval()
        with mode():
            plain, managed = self.both(lambda model: model(**self._given(model, inputs)))
        for model in (self.compute, self.managed):
            model.train()
        assert torch.equal(plain.loss, managed.loss)
        assert torch.equal(plain.logits, managed.logits)


def _in_dtype(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy with float32 parameters in `dtype`; buffers stay as they are."""
    computing = copy.deepcopy(model)
    for parameter in computing.parameters():
        parameter.data = parameter.data.to(dtype)
    return computing


def _copy_weights(source: nn.Module, target: nn.Module) -> None:
    if source is not target:
        with torch.no_grad():
            for theirs, ours in zip(source.parameters(), target.parameters(), strict=True):
                ours.copy_(theirs)


def _same(plain: Tensor | None, managed: Tensor | None) -> bool:
    if plain is None or managed is None:
        return plain is managed
    return torch.equal(plain, managed)


@families("gpt2", "mixtral", "t5", "mamba")
def test_trains_bit_equal_to_plain_torch_within_a_third_of_its_states(name: str, tmp_path: Path) -> None:
    pair = Pair(name, tmp_path)
    pair.train(STEPS)

    report = hetmem.report(pair.managed).to_dict()
    tiers, links = report["tiers"], {link: use["bytes"] for link, use in report["links"].items()}
    assert all(tier["peak_bytes"] <= tier["capacity_bytes"] for tier in tiers.values())
    assert tiers["device"]["chunk_peak_bytes"] <= pair.device_chunks
    assert tiers["host"]["peak_bytes"] <= pair.host
    # Every step brings every weight to the device, and turns over what has no room on the host (the first step has no
    # states to read yet).
    assert links["host_to_device"] >= STEPS * PARAMETER_BYTES * pair.trained
    assert links["device_to_host"] == STEPS * PARAMETER_BYTES * pair.trained
    assert links["nvme_read"] >= (STEPS - 1) * (UPDATED_BYTES * pair.trained - pair.host)
    assert links["nvme_write"] >= STEPS * (UPDATED_BYTES * pair.trained - pair.host)


@families("vit", "whisper")
def test_evaluation_between_steps_gives_the_same_output_and_leaves_training_alone(name: str, tmp_path: Path) -> None:
    pair = Pair(name, tmp_path)
    pair.evaluate(torch.inference_mode)
    pair.train(1)
    pair.evaluate(torch.no_grad)
    pair.train(1)

    plain, managed = pair.plain.state_dict(), pair.managed.state_dict()
    assert list(plain) == list(managed)
    assert all(torch.equal(plain[key], managed[key]) for key in plain)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")  # its name in 4.x
@pytest.mark.parametrize(("name", "use_reentrant"), mostly(MODES, [False, True]))
def test_trains_bit_equal_with_gradient_checkpointing(name: str, use_reentrant: bool, tmp_path: Path) -> None:
    pair = Pair(name, tmp_path)
    for model in (pair.plain, pair.managed):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    pair.train(2)


@families("mixtral", "whisper", of=PRECISIONS)
def test_trains_bit_equal_with_bfloat16_compute_and_float32_weights(name: str, tmp_path: Path) -> None:
    pair = Pair(name, tmp_path, mixed_precision=torch.bfloat16)
    pair.train(2)
    pair.evaluate(torch.no_grad)


@families("gpt2", "t5", of=MODES)
def test_generates_the_same_tokens(name: str, tmp_path: Path) -> None:
    """Call after call with other batch sizes: what was planned for one is wrong for the next."""
    pair = Pair(name, tmp_path)
    pair.train(1)
    prompt = pair.inputs["input_ids"][:, :5]
    for choice in ({"num_beams": 3}, {"do_sample": True, "top_k": 20}):
        plain, managed = pair.both(partial(_generate, prompt=prompt, **choice))
        assert torch.equal(plain, managed), choice


def _generate(model: nn.Module, prompt: Tensor, **choice: Any) -> Tensor:
    model.eval()
    tokens: Tensor = model.generate(prompt, max_new_tokens=5, **choice)
    return tokens


class Adapted(nn.Module):
    """A linear layer that is frozen, and a low-rank change of it that is not: LoRA."""

    def __init__(self, base: nn.Module, rank: int = 4) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)  # type: ignore[arg-type]
        self.up = nn.Linear(rank, base.out_features, bias=False)  # type: ignore[arg-type]

    def forward(self, value: Tensor) -> Tensor:
        result: Tensor = self.base(value) + self.up(self.down(value))
        return result


@families("llama", of=["llama", "bert", "whisper"])
def test_adapters_of_a_frozen_base_train_as_in_plain_torch(name: str, tmp_path: Path) -> None:
    plain, inputs = MODELS[name]()
    plain.requires_grad_(False)
    for parent in list(plain.modules()):
        for key, child in parent.named_children():
            if isinstance(child, nn.Linear) and child.out_features == child.in_features:
                setattr(parent, key, Adapted(child))
    managed = copy.deepcopy(plain)
    budget = hetmem.Budget(device="16MiB", device_chunks="256KiB", host="384KiB", nvme="32MiB", nvme_dir=tmp_path)
    hetmem.manage(managed, budget, device="sim", chunk_bytes=CHUNK_BYTES, sanitize=True)
    sides = []
    for model, optimizer in ((plain, partial(torch.optim.AdamW, fused=True)), (managed, hetmem.AdamW)):
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        stepper: Any = optimizer(model.parameters(), lr=1e-2)
        torch.manual_seed(3)
        losses = []
        for _ in range(STEPS):
            losses.append(model(**inputs).loss)
            losses[-1].backward()
            stepper.step()
            stepper.zero_grad()
        sides.append(losses)
    assert all(torch.equal(*pair) for pair in zip(*sides, strict=True))
    for (key, ours), theirs in zip(managed.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(theirs, ours), key
        assert theirs.requires_grad == ours.requires_grad == (".up." in key or ".down." in key)
    assert set(stepper.state) == set(trained), "what is frozen has states"
    homes: Counter[str] = Counter()
    for tier in hetmem.report(managed).to_dict()["tiers"].values():
        homes.update(tier["homes"])
    adapters = PARAMETER_BYTES * sum(parameter.numel() for parameter in trained)
    for role in ("grad", "exp_avg", "exp_avg_sq"):
        assert adapters <= homes[role] < adapters + CHUNK_BYTES, f"{role} takes more than adapters need"
    assert homes["param"] > 3 * homes["exp_avg"]


@pytest.mark.parametrize("name", ["mixtral", "vit", "whisper"])
def test_from_pretrained_reads_what_a_managed_model_saves(name: str, tmp_path: Path) -> None:
    pair = Pair(name, tmp_path)
    pair.train(1)
    pair.managed.save_pretrained(tmp_path / "theirs", max_shard_size="60KB")
    (tmp_path / "ours").mkdir()
    hetmem.save(tmp_path / "ours" / "model.safetensors", pair.managed)
    pair.plain.config.save_pretrained(tmp_path / "ours")
    for directory in ("theirs", "ours"):
        read = type(pair.plain).from_pretrained(tmp_path / directory).state_dict()
        for key, value in pair.plain.state_dict().items():
            assert torch.equal(read[key], value), f"{directory}: {key}"


@pytest.mark.each
@pytest.mark.parametrize("shards", ["one file", "many files"])
@families("mixtral", "vit")
def test_what_a_family_saves_arrives_as_from_pretrained_reads_it(name: str, shards: str, tmp_path: Path) -> None:
    """Mixtral and ViT are saved under other names than they have, Mixtral's experts one by one."""
    pair = Pair(name, tmp_path)
    saved = _changed(pair.plain)
    saved.save_pretrained(tmp_path / "saved", **({} if shards == "one file" else {"max_shard_size": "60KB"}))
    pair.plain.load_state_dict(type(saved).from_pretrained(tmp_path / "saved").state_dict())
    assert hetmem.load_weights(tmp_path / "saved", pair.managed) == ([], [])
    for key, (ours, theirs) in _states(pair).items():
        assert torch.equal(ours, theirs), key
    pair.train(1)


@pytest.mark.parametrize("name", ["gpt2", "mixtral", "vit", "bert"])
def test_a_managed_class_is_filled_as_the_one_it_is_derived_from(name: str, tmp_path: Path) -> None:
    """Also the bare model of one with a head, and back: what transformers declares goes by the class's name."""
    saved = _changed(MODELS[name]()[0])
    saved.save_pretrained(tmp_path / "head")
    bare = type(getattr(saved, saved.base_model_prefix))
    read = bare.from_pretrained(tmp_path / "head")
    read.save_pretrained(tmp_path / "bare")
    for base, directory in ((bare, "head"), (type(saved), "bare"), (bare, "bare")):

        @hetmem.managed(hetmem.Budget(device="16MiB", host="16MiB"), device="sim")
        class Managed(base):  # type: ignore[misc, valid-type]
            pass

        managed = Managed(saved.config)
        missing, _ = hetmem.load_weights(tmp_path / directory, managed, strict=False)
        read, told = base.from_pretrained(tmp_path / directory, output_loading_info=True)
        assert set(missing) <= set(told["missing_keys"])  # which has tied ones under all of their names
        expected = read.state_dict()
        for key, value in managed.state_dict().items():
            assert key in missing or torch.equal(value, expected[key]), key


def test_conversions_that_do_more_than_move_elements_are_made_by_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loading = pytest.importorskip("transformers.core_model_loading")
    from transformers import conversion_mapping

    doubled = type("Doubled", (loading.ConversionOps,), {"convert": staticmethod(_doubled)})
    converters = [
        loading.WeightConverter(r"self_attn\.q_proj\.weight", "self_attn.q_proj.weight", [loading.Interleave(dim=0)]),
        loading.WeightConverter("input_layernorm.weight", "input_layernorm.weight", [doubled()]),
    ]
    monkeypatch.setattr(conversion_mapping, "get_model_conversion_mapping", lambda model: converters)
    pair = Pair("llama", tmp_path)
    saved = _changed(pair.plain)
    safetensors.torch.save_model(saved, tmp_path / "saved")
    assert hetmem.load_weights(tmp_path / "saved", pair.managed) == ([], [])
    pair.plain.load_state_dict(saved.state_dict())
    with torch.no_grad():
        for layer in pair.plain.model.layers:
            weight = layer.self_attn.q_proj.weight
            weight.copy_(weight.view(-1, 2, weight.shape[1]).transpose(0, 1).reshape(weight.shape))
            layer.input_layernorm.weight.mul_(2)
    pair.train(1)


def _doubled(input_dict: dict[str, Any], target_patterns: list[str], **_: Any) -> dict[str, Tensor]:
    ((tensor,),) = input_dict.values()
    return {target_patterns[0]: tensor * 2}


def test_experts_that_are_not_all_there_are_named_and_nothing_changes(tmp_path: Path) -> None:
    pair = Pair("mixtral", tmp_path)
    pair.plain.save_pretrained(tmp_path / "saved")
    if not any("experts.1.w1" in name for name in safetensors.torch.load_file(tmp_path / "saved/model.safetensors")):
        pytest.skip("this transformers does not save experts one by one")
    for left_out, match in (
        ("1.w1", r"layers.0.mlp.experts.gate_up_proj cannot be made of 7 tensors \(model.*0.w1.weight … model.*3.w3"),
        ("3.w2", r"down_proj has the shape \(3, 64, 64\) in the files, made of 3 tensors .*, and \(4, 64, 64\) in"),
        (".experts.", r"the files have no model.layers.0.mlp.experts.gate_up_proj; .*; rename= translates names"),
    ):
        with pytest.raises(CheckpointError, match=match):
            hetmem.load_weights(tmp_path / "saved", pair.managed, rename=partial(_unless, left_out))
    pair.train(1)


def test_tensors_that_would_make_one_that_the_model_lacks_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A conversion may ask the model for the tensor that it makes."""
    loading = pytest.importorskip("transformers.core_model_loading")
    from transformers import conversion_mapping

    asking = loading.WeightConverter("q_proj.weight", "q_proj.weight", [loading.Transpose(0, 1, check_dims=True)])
    monkeypatch.setattr(conversion_mapping, "get_model_conversion_mapping", lambda model: [asking])
    saved = _changed(MODELS["llama"]()[0])
    state = dict(saved.state_dict())
    state["model.layers.7.self_attn.q_proj.weight"] = torch.rand(4, 4)
    safetensors.torch.save_file(state, tmp_path / "saved")
    model = MODELS["llama"]()[0]
    with pytest.raises(CheckpointError, match=r"the model has no model.layers.7.self_attn.q_proj.weight; rename="):
        hetmem.load_weights(tmp_path / "saved", model)
    found = hetmem.load_weights(tmp_path / "saved", model, strict=False)
    assert found == ([], ["model.layers.7.self_attn.q_proj.weight"])
    for key, value in saved.state_dict().items():
        assert torch.equal(model.state_dict()[key], value), key


def test_experts_arrive_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    """Of which the tenth comes before the second in the order of letters."""
    config = MODELS["mixtral"]()[0].config
    config.num_hidden_layers, config.num_local_experts = 1, 12
    saved = _changed(type(MODELS["mixtral"]()[0])(config))
    saved.save_pretrained(tmp_path)
    model = type(saved)(config)
    hetmem.load_weights(tmp_path, model)
    for key, value in saved.state_dict().items():
        assert torch.equal(model.state_dict()[key], value), key


def test_what_older_versions_saved_beside_weights_is_left_out(tmp_path: Path) -> None:
    saved = _changed(MODELS["llama"]()[0])
    state = {key: value.clone() for key, value in saved.state_dict().items()}
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.rand(8)}
    safetensors.torch.save_file({**state, **old}, tmp_path / "old")
    model = MODELS["llama"]()[0]
    assert hetmem.load_weights(tmp_path / "old", model) == ([], [])
    assert torch.equal(model.lm_head.weight, saved.lm_head.weight)
    safetensors.torch.save_file({**state, **old, "model.other": torch.rand(8)}, tmp_path / "other")
    with pytest.raises(CheckpointError, match=r"another model: the model has no model\.other; rename="):
        hetmem.load_weights(tmp_path / "other", model)


def _unless(left_out: str, name: str) -> str | None:
    return None if left_out in name else name


def _changed(model: nn.Module) -> Any:
    """A copy with all parameters moved, those too that a family begins with zeros or ones."""
    changed: Any = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.add_(torch.randn_like(parameter))
    return changed


def _states(pair: Pair) -> dict[str, tuple[Tensor, Tensor]]:
    plain, managed = pair.plain.state_dict(), pair.managed.state_dict()
    assert list(plain) == list(managed)
    return {key: (plain[key], managed[key]) for key in plain}
