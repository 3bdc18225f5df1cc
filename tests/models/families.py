"""Tiny models of many families of transformers that read tokens, by their configurations' usual names."""

from __future__ import annotations

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

FAMILIES = """
    afmoe albert apertus arcee aria_text bart beam bert bert-generation big_bird bigbird_pegasus biogpt bitnet
    blenderbot blenderbot-small bloom camembert cohere cohere2 cohere2_moe convbert ctrl cwm data2vec-text
    deberta deberta-v2 deepseek_v4 diffllama distilbert doge electra ernie ernie4_5 ernie4_5_moe esm esmc
    eurobert exaone4 exaone_moe falcon_mamba flaubert flex_olmo flint fnet gemma gemma2 gemma3_text glm glm4
    glm4_moe gpt-sw3 gpt2 gpt_bigcode gpt_neox gpt_neox_japanese gpt_oss granite granite_swa granitemoe
    granitemoe_swa granitemoeshared gte helium hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax ibert
    inkling2_text inkling_text internlm3 iquestcoder jais2 jetmoe jina_embeddings_v3 kolibri1 laguna layoutlm
    lfm2 llama llama4_text longformer
""".split()
"""Those that `build` makes, and that train in plain torch with its sizes."""
VOCABULARY = 96
_SIZES = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "emb_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "d_ff", "hidden_dim"), 64),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "moe_intermediate_size", "n_positions"), 64),
    **dict.fromkeys(("max_position_embeddings", "shared_expert_intermediate_size"), 64),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4),
    "num_experts_per_tok": 2,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def build(name: str) -> nn.Module:
    """A model of two layers; raises whatever such a configuration does not suit."""
    default = AutoConfig.for_model(name)
    sizes = {key: value for key, value in _SIZES.items() if hasattr(default, key)}
    config = AutoConfig.for_model(name, **sizes)
    auto = AutoModelForCausalLM if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES else AutoModelForMaskedLM
    torch.manual_seed(0)
    model: nn.Module = auto.from_config(config)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Of guessing each token."""
    loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss
