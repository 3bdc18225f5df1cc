"""Tiny models of well-known families, built from their configurations: nothing is downloaded.

Two to four layers each and what makes the family special: tied embeddings, encoder and decoder, experts, a scan.
Dropout is left as the family has it; whoever compares two runs seeds before each forward.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import transformers
from torch import Tensor, nn

Inputs = dict[str, Tensor]
"""Keyword arguments of the model's forward, the batch in dimension 0; `labels` among them if it computes a loss."""

BATCH = 2
TOKENS = 16
VOCABULARY = 256
HIDDEN = 64


def _tokens(seed: int = 1, length: int = TOKENS) -> Tensor:
    return torch.randint(3, VOCABULARY, (BATCH, length), generator=torch.Generator().manual_seed(seed))


def _noise(*shape: int) -> Tensor:
    return torch.randn(BATCH, *shape, generator=torch.Generator().manual_seed(2))


def _text() -> Inputs:
    """A batch for a model that predicts tokens; the second sequence is padded."""
    mask = torch.ones(BATCH, TOKENS, dtype=torch.long)
    mask[1, -3:] = 0
    tokens = _tokens()
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


def gpt2() -> tuple[nn.Module, Inputs]:
    """Learned positions, transposed weights (Conv1D), the embedding tied to the head, dropout."""
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=64, n_embd=HIDDEN, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2
    )
    return transformers.GPT2LMHeadModel(config), _text()


def llama() -> tuple[nn.Module, Inputs]:
    """Rotary positions, grouped key and value heads, gated feed-forward."""
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return transformers.LlamaForCausalLM(config), _text()


def mixtral() -> tuple[nn.Module, Inputs]:
    """Four experts, two for each token: which weights a step uses depends on the data."""
    config = transformers.MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_local_experts=4,
        num_experts_per_tok=2,
        output_router_logits=True,
    )
    return transformers.MixtralForCausalLM(config), _text()


def t5() -> tuple[nn.Module, Inputs]:
    """Encoder and decoder share one embedding; a relative position bias is computed once and reused by every layer."""
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=HIDDEN, d_kv=16, d_ff=160, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config), {**_text(), "labels": _tokens(seed=3, length=8)}


def bert() -> tuple[nn.Module, Inputs]:
    """Bidirectional, three summed embeddings, a bias tied within the head, a pooler."""
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=160,
        max_position_embeddings=64,
    )
    return transformers.BertForMaskedLM(config), _text()


def vit() -> tuple[nn.Module, Inputs]:
    """Images: a convolution cuts patches, a class token and positions are bare parameters."""
    config = transformers.ViTConfig(
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=160,
        image_size=32,
        patch_size=8,
        num_labels=10,
    )
    return transformers.ViTForImageClassification(config), {
        "pixel_values": _noise(3, 32, 32),
        "labels": torch.tensor([3, 7]),
    }


def whisper() -> tuple[nn.Module, Inputs]:
    """Sound: 1-D convolutions, frozen encoder positions, cross-attention, the head tied to the decoder's embedding."""
    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY,
        num_mel_bins=16,
        d_model=HIDDEN,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=160,
        decoder_ffn_dim=160,
        max_source_positions=32,
        max_target_positions=32,
        dropout=0.1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        suppress_tokens=[],
        begin_suppress_tokens=[],
    )
    inputs = {"input_features": _noise(16, 64), "labels": _tokens(length=8)}
    return transformers.WhisperForConditionalGeneration(config), inputs


def mamba() -> tuple[nn.Module, Inputs]:
    """A selective scan: weights used as bare tensors (`-exp(A_log)`, `D`), a depthwise convolution."""
    config = transformers.MambaConfig(vocab_size=VOCABULARY, hidden_size=HIDDEN, state_size=8, num_hidden_layers=3)
    inputs = _text()
    del inputs["attention_mask"]
    return transformers.MambaForCausalLM(config), inputs


def falcon() -> tuple[nn.Module, Inputs]:
    """One key and value head for all, attention and feed-forward in parallel, the embedding tied to the head."""
    config = transformers.FalconConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, num_hidden_layers=2, num_attention_heads=4
    )
    return transformers.FalconForCausalLM(config), _text()


MODELS: dict[str, Callable[[], tuple[nn.Module, Inputs]]] = {
    build.__name__: build for build in (gpt2, llama, mixtral, t5, bert, vit, whisper, mamba, falcon)
}
"""Each call builds a model in train mode, and a batch for it. The weights come from torch's global seed."""
