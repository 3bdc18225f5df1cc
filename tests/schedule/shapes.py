"""Parameter lists of well-known models, in order of use, generated from the formulas of their architectures.

Tied weights are listed once. All are fp32 and trainable: one group. `PARAMETERS` are the published totals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod

from tests.schedule.tested import ParameterSpec

Shapes = Iterator[tuple[str, tuple[int, ...]]]


def _linear(name: str, out: int, inp: int) -> Shapes:
    yield f"{name}.weight", (out, inp)
    yield f"{name}.bias", (out,)


def _norm(name: str, width: int) -> Shapes:
    yield f"{name}.weight", (width,)
    yield f"{name}.bias", (width,)


def gpt2(width: int, layers: int, vocabulary: int = 50257, positions: int = 1024) -> Shapes:
    yield "wte", (vocabulary, width)
    yield "wpe", (positions, width)
    for layer in range(layers):
        yield from _norm(f"h.{layer}.ln_1", width)
        yield from _linear(f"h.{layer}.attn.c_attn", 3 * width, width)
        yield from _linear(f"h.{layer}.attn.c_proj", width, width)
        yield from _norm(f"h.{layer}.ln_2", width)
        yield from _linear(f"h.{layer}.mlp.c_fc", 4 * width, width)
        yield from _linear(f"h.{layer}.mlp.c_proj", width, 4 * width)
    yield from _norm("ln_f", width)


def bert(width: int, layers: int, vocabulary: int = 30522, positions: int = 512) -> Shapes:
    yield "embeddings.word", (vocabulary, width)
    yield "embeddings.token_type", (2, width)
    yield "embeddings.position", (positions, width)
    yield from _norm("embeddings.norm", width)
    for layer in range(layers):
        for name in ("query", "key", "value", "output"):
            yield from _linear(f"layer.{layer}.{name}", width, width)
        yield from _norm(f"layer.{layer}.attention.norm", width)
        yield from _linear(f"layer.{layer}.intermediate", 4 * width, width)
        yield from _linear(f"layer.{layer}.dense", width, 4 * width)
        yield from _norm(f"layer.{layer}.norm", width)
    yield from _linear("pooler", width, width)


def _attention(prefix: str, width: int, key_value_width: int) -> Shapes:
    yield f"{prefix}.input_norm", (width,)
    yield f"{prefix}.q_proj", (width, width)
    yield f"{prefix}.k_proj", (key_value_width, width)
    yield f"{prefix}.v_proj", (key_value_width, width)
    yield f"{prefix}.o_proj", (width, width)
    yield f"{prefix}.post_attention_norm", (width,)


def llama(width: int, key_value_width: int, hidden: int, layers: int, vocabulary: int) -> Shapes:
    yield "embed_tokens", (vocabulary, width)
    for layer in range(layers):
        yield from _attention(f"layers.{layer}", width, key_value_width)
        yield f"layers.{layer}.gate_proj", (hidden, width)
        yield f"layers.{layer}.up_proj", (hidden, width)
        yield f"layers.{layer}.down_proj", (width, hidden)
    yield "norm", (width,)
    yield "lm_head", (vocabulary, width)


def mixtral(fused: bool, width: int = 4096, hidden: int = 14336, layers: int = 32, experts: int = 8) -> Shapes:
    """Fused: all experts of a layer in two 3-D tensors (transformers 5); else w1, w3, w2 of each expert."""
    yield "embed_tokens", (32000, width)
    for layer in range(layers):
        yield from _attention(f"layers.{layer}", width, 1024)
        yield f"layers.{layer}.router", (experts, width)
        if fused:
            yield f"layers.{layer}.gate_up_proj", (experts, 2 * hidden, width)
            yield f"layers.{layer}.down_proj", (experts, width, hidden)
            continue
        for expert in range(experts):
            yield f"layers.{layer}.experts.{expert}.w1", (hidden, width)
            yield f"layers.{layer}.experts.{expert}.w3", (hidden, width)
            yield f"layers.{layer}.experts.{expert}.w2", (width, hidden)
    yield "norm", (width,)
    yield "lm_head", (32000, width)


def t5(width: int, inner: int, hidden: int, heads: int, layers: int, vocabulary: int = 32128) -> Shapes:
    yield "shared", (vocabulary, width)
    for stack, attentions in (("encoder", ("self",)), ("decoder", ("self", "cross"))):
        for layer in range(layers):
            for attention in attentions:
                prefix = f"{stack}.{layer}.{attention}"
                yield f"{prefix}.norm", (width,)
                for name in ("q", "k", "v"):
                    yield f"{prefix}.{name}", (inner, width)
                if layer == 0 and attention == "self":
                    yield f"{prefix}.relative_attention_bias", (32, heads)
                yield f"{prefix}.o", (width, inner)
            yield f"{stack}.{layer}.ff.norm", (width,)
            yield f"{stack}.{layer}.wi", (hidden, width)
            yield f"{stack}.{layer}.wo", (width, hidden)
        yield f"{stack}.final_norm", (width,)


MODELS: dict[str, Callable[[], Shapes]] = {
    "gpt2": lambda: gpt2(768, 12),
    "gpt2-xl": lambda: gpt2(1600, 48),
    "bert-base": lambda: bert(768, 12),
    "bert-large": lambda: bert(1024, 24),
    "llama-2-7b": lambda: llama(4096, 4096, 11008, 32, 32000),
    "llama-3-8b": lambda: llama(4096, 1024, 14336, 32, 128256),
    "llama-3-70b": lambda: llama(8192, 1024, 28672, 80, 128256),
    "mixtral-8x7b-fused": lambda: mixtral(fused=True),
    "mixtral-8x7b-separate": lambda: mixtral(fused=False),
    "t5-11b": lambda: t5(1024, 128 * 128, 65536, 128, 24),
}

PARAMETERS = {
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "bert-base": 109_482_240,
    "bert-large": 335_141_888,
    "llama-2-7b": 6_738_415_616,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "mixtral-8x7b-fused": 46_702_792_704,
    "mixtral-8x7b-separate": 46_702_792_704,
    "t5-11b": 11_307_321_344,
}


def parameter_specs(model: str, itemsize: int = 4, group: str = "fp32 trainable") -> list[ParameterSpec]:
    """The parameters of `model` (a key of `MODELS`) in order of use."""
    return [ParameterSpec(name, prod(shape), group, itemsize) for name, shape in MODELS[model]()]
