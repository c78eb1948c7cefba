"""Small checkpoints of several architectures, made once."""

import shutil

import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
)

from assay.core.checkpoint import quiet
from assay.reference import tiny_lm

_COMMON = {
    "vocab_size": 1024,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}

_KINDS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**_COMMON)),
    "tied": lambda: LlamaForCausalLM(LlamaConfig(**_COMMON, tie_word_embeddings=True)),
    "odd": lambda: LlamaForCausalLM(LlamaConfig(**(_COMMON | {"hidden_size": 100, "num_hidden_layers": 1}))),
    "phi3": lambda: Phi3ForCausalLM(Phi3Config(**_COMMON, pad_token_id=0)),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**_COMMON, num_local_experts=4)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=1024, n_embd=32, n_layer=2, n_head=2, n_positions=64)),
    "bert": lambda: BertForMaskedLM(
        BertConfig(
            vocab_size=1024,
            hidden_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=48,
            max_position_embeddings=64,
        )
    ),
}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """The directory of a random model of a kind, with the built-in tokenizer; every call is given the same one."""
    made = {}

    def make(kind, dtype=torch.float32, **saving):
        key = (kind, dtype, *saving.items())
        if key not in made:
            torch.manual_seed(0)
            model = _KINDS[kind]().to(dtype)
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):
                    torch.nn.init.normal_(parameter, std=0.1)
            made[key] = tmp_path_factory.mktemp(kind) / kind
            with quiet():
                model.save_pretrained(made[key], **saving)
            for file in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copy(tiny_lm.load() / file, made[key])
        return made[key]

    return make
