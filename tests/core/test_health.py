"""Weight health finds what was put there, and nothing else."""

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from assay.core.anatomy import anatomy
from assay.core.health import OUTLIER_RATIO, weight_health


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40, hidden_size=32, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def of(health, name):
    return next(t for t in health.tensors if t.name == name)


def test_a_healthy_model(model):
    health = weight_health(model, anatomy=anatomy(model))
    assert health.not_finite == 0
    assert not health.dead_units
    assert not health.dead_heads
    assert not health.suspicious()
    assert len(health.tensors) == sum(1 for _ in model.parameters())


def test_everything_planted_is_found(model):
    layer = model.model.layers[1]
    with torch.no_grad():
        layer.self_attn.q_proj.weight[3, 4] = float("nan")
        layer.self_attn.k_proj.weight[1, 1] = float("inf")
        layer.self_attn.v_proj.weight[8:].zero_()
        layer.mlp.gate_proj.weight[5].zero_()
        layer.mlp.down_proj.weight[:, 7].zero_()
        layer.mlp.up_proj.weight[:, 2] *= 50
        model.model.embed_tokens.weight[[9, 11, 30]] = model.model.embed_tokens.weight[4].clone()
    health = weight_health(model, anatomy=anatomy(model))
    assert health.not_finite == 2
    assert health.dead_units == ((1, 5), (1, 7))
    assert health.dead_heads == ((1, 2), (1, 3))
    assert of(health, "model.embed_tokens.weight").duplicate_rows == 3
    assert of(health, "model.layers.1.mlp.gate_proj.weight").dead_rows == 1
    assert of(health, "model.layers.1.mlp.down_proj.weight").dead_columns == 1
    up = of(health, "model.layers.1.mlp.up_proj.weight")
    assert up.outlier_columns == 1
    assert up.largest_column > OUTLIER_RATIO
    assert health.suspicious()[0].not_finite
    assert "largest column" in str(health.table())


def test_a_bias_keeps_a_unit_alive():
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=2, n_positions=8))
    with torch.no_grad():
        model.transformer.h[0].mlp.c_fc.weight[:, 3].zero_()
        model.transformer.h[0].mlp.c_fc.bias[3] = 1.0
        model.transformer.h[0].mlp.c_fc.weight[:, 4].zero_()
        model.transformer.h[0].mlp.c_fc.bias[4] = 0.0
    assert weight_health(model, anatomy=anatomy(model)).dead_units == ((0, 4),)


def test_rows_that_nearly_agree_are_no_duplicates():
    layer = nn.Linear(8, 4, bias=False)
    with torch.no_grad():
        layer.weight[1] = layer.weight[0]
        layer.weight[2] = layer.weight[0]
        layer.weight[2, 0] += 1e-6
    assert weight_health(layer).tensors[0].duplicate_rows == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_dtypes(model, dtype):
    with torch.no_grad():
        model.model.layers[0].mlp.gate_proj.weight[5].zero_()
    assert weight_health(model.to(dtype), anatomy=anatomy(model)).dead_units == ((0, 5),)
