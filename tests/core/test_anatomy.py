"""Every architecture: each block, rebuilt from the parts that the anatomy names, against the model's own output."""

import json
import subprocess
import sys
from dataclasses import dataclass, field, replace

import pytest
import torch
import transformers as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers.models.falcon.modeling_falcon import build_alibi_tensor
from transformers.pytorch_utils import Conv1D

from assay.core import architectures
from assay.core.anatomy import Rotary, alibi_slopes, anatomy
from assay.core.architectures import ARCHITECTURES, facts, holds
from assay.core.errors import NotApplicable, UnknownArchitecture

TOKENS = 13
TINY = {
    "vocab_size": 50,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
IMAGE = {k: TINY[k] for k in ("hidden_size", "num_hidden_layers", "num_attention_heads")} | {
    "image_size": 12,
    "patch_size": 4,
}
FALCON = {k: v for k, v in TINY.items() if k != "intermediate_size"} | {"ffn_hidden_size": 40}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 100.0,
    "partial_rotary_factor": 1.0,
    "short_factor": [1.0, 1.1, 1.2],
    "long_factor": [2.0, 2.5, 3.0],
    "original_max_position_embeddings": 8,
}


@dataclass(frozen=True)
class Case:
    name: str
    model: str
    options: dict = field(default_factory=dict)
    base: dict = field(default_factory=lambda: TINY)
    attention: str = "eager"

    def build(self, seed: int = 0) -> nn.Module:
        model_class = getattr(tf, self.model)
        options = self.base | self.options
        if self.model.startswith("Gemma3For") and "text_config" in options:
            config = tf.Gemma3Config(**options)
        else:
            config = model_class.config_class(**options)
        config._attn_implementation = self.attention
        model = model_class(config).eval()
        randomise(model, seed)
        return model


def randomise(model: nn.Module, seed: int) -> None:
    """No parameter keeps the value of its initialisation, which would hide a norm or a bias that was left out."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.normal_(0, 0.3, generator=generator)
            if p.ndim == 1 and name.endswith("weight"):
                p.add_(1)


GPT2 = {"vocab_size": 50, "n_embd": 24, "n_layer": 3, "n_head": 4, "n_positions": 64}
MOE = {"num_experts": 5, "num_experts_per_tok": 2}
QWEN_MOE = MOE | {
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 20,
    "num_key_value_heads": 2,
    "use_sliding_window": True,
    "sliding_window": 4,
    "max_window_layers": 3,
}
GEMMA = {"num_key_value_heads": 2, "head_dim": 10, "query_pre_attn_scalar": 7, "sliding_window": 4}
GEMMA3 = GEMMA | {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 8.0},
    },
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}

# Falcon with alibi runs under sdpa: the eager path of transformers 5.24 adds the bias to the scores twice.
CASES = [
    Case("gpt2", "GPT2LMHeadModel", {}, GPT2),
    Case("gpt2 scaled by layer", "GPT2LMHeadModel", {"scale_attn_by_inverse_layer_idx": True, "n_inner": 30}, GPT2),
    Case(
        "gpt2 unscaled, upcast", "GPT2LMHeadModel", {"scale_attn_weights": False, "reorder_and_upcast_attn": True}, GPT2
    ),
    Case(
        "gpt_neox parallel, partial rotary",
        "GPTNeoXForCausalLM",
        {
            "hidden_size": 32,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.25},
        },
    ),
    Case(
        "gpt_neox sequential, no attention bias",
        "GPTNeoXForCausalLM",
        {"use_parallel_residual": False, "attention_bias": False},
    ),
    Case("llama", "LlamaForCausalLM"),
    Case(
        "llama grouped, biases, own head_dim, llama3 rope",
        "LlamaForCausalLM",
        {
            "num_key_value_heads": 2,
            "attention_bias": True,
            "mlp_bias": True,
            "head_dim": 10,
            "rope_parameters": LLAMA3_ROPE,
        },
    ),
    Case("llama yarn", "LlamaForCausalLM", {"rope_parameters": YARN_ROPE}, attention="sdpa"),
    Case(
        "llama dynamic rope",
        "LlamaForCausalLM",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 3.0}, "max_position_embeddings": 8},
    ),
    Case("mistral windowed, one key head", "MistralForCausalLM", {"num_key_value_heads": 1, "sliding_window": 4}),
    Case("mistral without window", "MistralForCausalLM", {"num_key_value_heads": 2, "sliding_window": None}),
    Case(
        "mixtral",
        "MixtralForCausalLM",
        {"num_key_value_heads": 2, "num_local_experts": 5, "num_experts_per_tok": 3, "sliding_window": 4},
    ),
    Case(
        "qwen2 windowed from a layer on",
        "Qwen2ForCausalLM",
        {"num_key_value_heads": 2, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    ),
    Case("qwen2 without window", "Qwen2ForCausalLM", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    Case("qwen3", "Qwen3ForCausalLM", {"num_key_value_heads": 2, "head_dim": 10, "attention_bias": True}),
    Case("qwen2_moe with dense layers", "Qwen2MoeForCausalLM", QWEN_MOE | {"mlp_only_layers": [1]}),
    Case("qwen2_moe all sparse", "Qwen2MoeForCausalLM", QWEN_MOE | {"norm_topk_prob": True, "qkv_bias": False}),
    Case("gemma2", "Gemma2ForCausalLM", GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    Case("gemma3_text", "Gemma3ForCausalLM", GEMMA3 | {"final_logit_softcapping": 3.0, "attn_logit_softcapping": 2.0}),
    Case("gemma3_text bidirectional", "Gemma3ForCausalLM", GEMMA3 | {"use_bidirectional_attention": True}),
    Case(
        "gemma3 with images",
        "Gemma3ForConditionalGeneration",
        {
            "text_config": TINY | GEMMA3 | {"final_logit_softcapping": 3.0},
            "vision_config": VISION,
            "mm_tokens_per_image": 4,
        },
        {"image_token_id": 49, "boi_token_index": 47, "eoi_token_index": 48},
    ),
    Case(
        "phi3 grouped, partial rotary, windowed",
        "Phi3ForCausalLM",
        {
            "num_key_value_heads": 2,
            "hidden_size": 32,
            "sliding_window": 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
        },
    ),
    Case(
        "phi3 longrope beyond the original length",
        "Phi3ForCausalLM",
        {"rope_parameters": LONG_ROPE, "original_max_position_embeddings": 8},
    ),
    Case("olmo2", "Olmo2ForCausalLM", {"num_key_value_heads": 2, "attention_bias": True}),
    Case("olmoe", "OlmoeForCausalLM", MOE | {"num_key_value_heads": 2, "clip_qkv": 0.5}),
    Case("olmoe normalised", "OlmoeForCausalLM", MOE | {"norm_topk_prob": True, "attention_bias": True}),
    Case(
        "falcon one query group per head, sequential, alibi",
        "FalconForCausalLM",
        {"multi_query": False, "parallel_attn": False, "alibi": True, "bias": True},
        FALCON,
        "sdpa",
    ),
    Case(
        "falcon alibi, heads no power of two",
        "FalconForCausalLM",
        {"alibi": True, "num_attention_heads": 6},
        FALCON,
        "sdpa",
    ),
    Case("falcon one query group per head, parallel", "FalconForCausalLM", {"multi_query": False}, FALCON),
    Case("falcon multi-query", "FalconForCausalLM", {"bias": True}, FALCON),
    Case("falcon multi-query, sdpa", "FalconForCausalLM", {"parallel_attn": False}, FALCON, "sdpa"),
    Case(
        "falcon new decoder, two norms",
        "FalconForCausalLM",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True},
        FALCON,
    ),
    Case(
        "falcon new decoder, one norm",
        "FalconForCausalLM",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
        FALCON,
        "sdpa",
    ),
    Case("bert", "BertForMaskedLM"),
    Case("bert as decoder", "BertLMHeadModel", {"is_decoder": True}),
    Case("roberta", "RobertaForMaskedLM"),
    Case("roberta as decoder", "RobertaForCausalLM", {"is_decoder": True}),
    Case("vit", "ViTForImageClassification", {"intermediate_size": 40}, IMAGE),
    Case("vit without qkv bias", "ViTModel", {"intermediate_size": 40, "qkv_bias": False}, IMAGE, "sdpa"),
    Case("dinov2", "Dinov2Model", {"mlp_ratio": 2}, IMAGE),
    Case("dinov2 swiglu", "Dinov2ForImageClassification", {"mlp_ratio": 2, "use_swiglu_ffn": True}, IMAGE),
]
TEXT = [c for c in CASES if c.base is not IMAGE]
each_case = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
each_text = pytest.mark.parametrize("case", TEXT, ids=lambda c: c.name)


def inputs_for(parts, batch: int = 2) -> dict:
    generator = torch.Generator().manual_seed(1)
    if parts.architecture.input == "image":
        return {"pixel_values": torch.randn(batch, 3, 12, 12, generator=generator)}
    return {"input_ids": torch.randint(3, 40, (batch, TOKENS), generator=generator)}


def seen_by_blocks(parts, inputs: dict) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What enters and what leaves each block in the model's own forward pass."""
    seen = {}

    def note(index):
        def hook(module, args, kwargs, output):
            entered = args[0] if args else kwargs["hidden_states"]
            seen[index] = entered, output[0] if isinstance(output, tuple) else output

        return hook

    handles = [b.module.register_forward_hook(note(b.index), with_kwargs=True) for b in parts.blocks]
    with torch.no_grad():
        parts.backbone(**inputs)
    for handle in handles:
        handle.remove()
    return [seen[b.index] for b in parts.blocks]


def attend(block, x: torch.Tensor, valid: torch.Tensor | None = None) -> torch.Tensor:
    a = block.attention
    tokens = x.shape[1]
    positions = torch.arange(tokens)
    q, k, v = a.queries(x), a.keys(x), a.values(x)
    if a.rotary is not None:
        q, k = a.rotary.rotate(q, positions), a.rotary.rotate(k, positions)
    scores = q @ k[:, a.kv_head].mT * a.scaling
    if a.softcap is not None:
        scores = torch.tanh(scores / a.softcap) * a.softcap
    if a.alibi is not None:
        scores = scores + a.alibi[:, None, None] * positions
    visible = a.visible(tokens)
    if valid is not None:
        visible = visible & valid[:, None, None, :]
    weights = scores.masked_fill(~visible, torch.finfo(scores.dtype).min).softmax(-1)
    out = torch.einsum("bhtd,hmd->btm", weights @ v[:, a.kv_head], a.o_slices())
    return out if a.o.bias is None else out + a.o.bias


def feed(block, x: torch.Tensor) -> torch.Tensor:
    if block.mlp is not None:
        return block.mlp(x)
    moe, flat = block.moe, x.flatten(0, 1)
    weights, chosen = moe.route(flat)
    share = torch.zeros(len(flat), moe.n_experts).scatter(1, chosen, weights)
    out = sum(share[:, [i]] * moe.expert(i)(flat) for i in range(moe.n_experts))
    if moe.shared is not None:
        out = out + moe.shared_gate(flat).sigmoid() * moe.shared(flat)
    return out.view_as(x)


@each_case
@torch.no_grad()
def test_blocks_are_rebuilt_from_their_parts(case):
    parts = anatomy(case.build())
    for block, (entered, left) in zip(parts.blocks, seen_by_blocks(parts, inputs_for(parts)), strict=True):
        rebuilt = block.assemble(entered, lambda h: attend(block, h), lambda h: feed(block, h))  # noqa: B023
        torch.testing.assert_close(rebuilt, left, rtol=1e-5, atol=1e-5)


@each_case
def test_the_cases_would_notice_a_part_left_out(case):
    parts = anatomy(case.build())
    block = parts.blocks[-1]
    entered, left = seen_by_blocks(parts, inputs_for(parts))[-1]

    def without(**changed):
        crippled = replace(block, **changed)
        return crippled.assemble(entered, lambda h: attend(crippled, h), lambda h: feed(crippled, h))

    optional = {
        name: getattr(block, name)
        for name in ("pre_attention", "post_attention", "pre_mlp", "post_mlp", "attention_scale", "mlp_scale")
    }
    changes = [{name: None} for name, module in optional.items() if module is not None]
    a = block.attention
    changes += [
        {"attention": replace(a, **{name: None})}
        for name in ("window", "softcap", "clip", "rotary", "alibi", "q_norm", "k_norm")
        if getattr(a, name) is not None
    ]
    changes += [{"parallel": not block.parallel}, {"attention": replace(a, causal=not a.causal)}]
    if a.k.path != a.v.path:
        changes.append({"attention": replace(a, k=a.v)})
    for changed in changes:
        with torch.no_grad():
            assert (without(**changed) - left).abs().max() > 1e-3, changed


@each_case
@torch.no_grad()
def test_projections_are_what_their_modules_give(case):
    parts = anatomy(case.build())
    for block in parts.blocks:
        mlps = [m for m in (block.mlp, block.moe and block.moe.shared) if m is not None]
        named = [block.attention.q, block.attention.k, block.attention.v, block.attention.o]
        named += [p for m in mlps for p in (m.gate, m.up, m.down) if p is not None]
        for p in named:
            assert parts.model.get_submodule(p.path) is p.module
            assert p.weight.shape == (p.out_features, p.in_features)
            x = torch.randn(2, 3, p.in_features, generator=torch.Generator().manual_seed(2))
            torch.testing.assert_close(p.take(p.module(x)), p(x), rtol=1e-5, atol=1e-5)


@each_case
def test_projections_lists_every_linear_layer_of_the_blocks_once(case):
    parts = anatomy(case.build())
    listed = [path for path, _ in parts.projections()]
    linear = [
        f"{b.path}.{name}"
        for b in parts.blocks
        for name, module in b.module.named_modules()
        if isinstance(module, nn.Linear | Conv1D)
    ]
    assert sorted(listed) == sorted(linear)
    for path, projection in parts.projections():
        assert projection.module is parts.model.get_submodule(path)
        assert projection.rows is None


@each_case
def test_facts_of_the_config_agree_with_the_model(case):
    parts = anatomy(case.build())
    told = facts(json.loads(parts.model.config.to_json_string()))
    blocks = parts.blocks
    assert "known" in told
    assert "attention" in told
    assert parts.architecture.input in told
    assert ("causal" in told) == parts.causal == all(b.attention.causal for b in blocks)
    assert ("encoder" in told) != parts.causal
    assert ("rotary" in told) == all(b.attention.rotary is not None for b in blocks)
    assert ("mlp" in told) == any(b.mlp is not None for b in blocks)
    assert ("moe" in told) == any(b.moe is not None for b in blocks)
    assert ("gated" in told) == all(b.moe is not None or b.mlp.gated for b in blocks)


@each_text
@torch.no_grad()
def test_logits_of_the_backbone_are_the_models(case):
    model = case.build()
    parts = anatomy(model)
    inputs = inputs_for(parts)
    hidden = parts.backbone(**inputs).last_hidden_state
    torch.testing.assert_close(parts.logits(hidden), model(**inputs).logits, rtol=1e-5, atol=1e-5)
    assert parts.vocab_size == 50
    assert parts.logits(hidden).shape[-1] == 50
    assert parts.hidden_size == hidden.shape[-1]


@each_case
def test_a_bare_model_has_the_same_parts_as_one_with_a_head(case):
    parts = anatomy(case.build())
    bare = anatomy(parts.model.base_model)
    inside = parts.backbone_path.removeprefix(parts.model.base_model_prefix).lstrip(".")
    assert bare.backbone is parts.backbone
    assert bare.backbone_path == (parts.backbone_path if parts.model is parts.model.base_model else inside)
    assert bare.lm_head is None
    assert not bare.tied
    assert [b.module for b in bare.blocks] == [b.module for b in parts.blocks]
    assert bare.embedding is parts.embedding
    for path, projection in bare.projections():
        assert bare.model.get_submodule(path) is projection.module


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["llama grouped, biases, own head_dim, llama3 rope", "bert", "gemma2", "olmoe"])
@torch.no_grad()
def test_blocks_are_rebuilt_under_padding(name, side):
    parts = anatomy(next(c for c in CASES if c.name == name).build())
    valid = torch.ones(2, TOKENS, dtype=torch.bool)
    valid[0, slice(0, 5) if side == "left" else slice(-5, None)] = False
    inputs = inputs_for(parts) | {"attention_mask": valid.long()}
    if side == "left" and parts.causal:
        inputs["position_ids"] = torch.arange(TOKENS)[None]
    for block, (entered, left) in zip(parts.blocks, seen_by_blocks(parts, inputs), strict=True):
        rebuilt = block.assemble(entered, lambda h: attend(block, h, valid), lambda h: feed(block, h))  # noqa: B023
        torch.testing.assert_close(rebuilt[valid], left[valid], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "tied"),
    [
        ("gpt2", True),
        ("llama", False),
        ("qwen2 without window", True),
        ("bert", True),
        ("roberta", True),
        ("gemma3 with images", True),
        ("falcon multi-query", True),
    ],
)
def test_tied_weights_are_noticed(name, tied):
    parts = anatomy(next(c for c in CASES if c.name == name).build())
    assert parts.tied is tied


def test_untying_is_noticed():
    model = Case("", "GPT2LMHeadModel", {}, GPT2).build()
    parts = anatomy(model)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.clone())
    assert not parts.tied


def test_every_row_has_a_case():
    assert {getattr(tf, c.model).config_class.model_type for c in CASES} == set(ARCHITECTURES)


def test_key_heads_and_layouts_of_known_configurations():
    parts = anatomy(
        Case("", "FalconForCausalLM", {"new_decoder_architecture": True, "num_kv_heads": 2}, FALCON).build()
    )
    a = parts.blocks[0].attention
    assert (a.n_heads, a.n_kv_heads, a.head_dim) == (4, 2, 6)
    assert a.kv_head.tolist() == [0, 0, 1, 1]
    assert a.q.rows.tolist() == [*range(12), *range(24, 36)]
    assert a.k.rows.tolist() == [*range(12, 18), *range(36, 42)]
    assert a.v.rows.tolist() == [*range(18, 24), *range(42, 48)]
    assert not a.interface


def test_window_counts_the_token_itself():
    case = Case("", "MistralForCausalLM", {"sliding_window": 2})
    assert anatomy(case.build()).blocks[0].attention.visible(4).int().tolist() == [
        [1, 0, 0, 0],
        [1, 1, 0, 0],
        [0, 1, 1, 0],
        [0, 0, 1, 1],
    ]


def test_windows_per_layer():
    def windows(name):
        parts = anatomy(next(c for c in CASES if c.name == name).build())
        return [b.attention.window for b in parts.blocks]

    assert windows("qwen2 windowed from a layer on") == [None, 4, 4]
    assert windows("gemma2") == [4, None, 4]
    assert windows("qwen2 without window") == [None, None, None]
    assert windows("mistral windowed, one key head") == [4, 4, 4]


def test_gemma3_turns_by_other_frequencies_in_its_windowed_layers():
    parts = anatomy(next(c for c in CASES if c.name == "gemma3_text").build())
    windowed, full = (parts.blocks[i].attention.rotary.inv_freq for i in (0, 1))
    exponent = torch.arange(0, 10, 2) / 10
    torch.testing.assert_close(windowed, 50.0**-exponent)
    torch.testing.assert_close(full, 1000.0**-exponent / 8)


def test_partial_rotary_leaves_the_other_dimensions():
    parts = anatomy(next(c for c in CASES if c.name == "phi3 grouped, partial rotary, windowed").build())
    rotary = parts.blocks[0].attention.rotary
    assert rotary.pairs.tolist() == [[0, 2], [1, 3]]
    x = torch.randn(2, 3, 5, 8, generator=torch.Generator().manual_seed(0))
    turned = rotary.rotate(x, torch.arange(5))
    assert torch.equal(turned[..., 4:], x[..., 4:])
    assert not torch.allclose(turned[..., 1:, :4], x[..., 1:, :4])


def test_yarn_scales_the_rotated_dimensions():
    parts = anatomy(next(c for c in CASES if c.name == "llama yarn").build())
    assert parts.blocks[0].attention.rotary.attention_scaling == pytest.approx(0.1 * torch.log(torch.tensor(4.0)) + 1)


@given(st.integers(0, 2000), st.integers(0, 2000), st.integers(0, 2000), st.integers(0, 2**31 - 1))
@settings(max_examples=50, deadline=None)
def test_scores_depend_on_the_distance_only(m, n, shift, seed):
    module = nn.Module()
    module.inv_freq = 100.0 ** -(torch.arange(0, 8, 2) / 8)
    module.attention_scaling = 1.0
    rotary = Rotary(module)
    q, k = torch.randn(2, 1, 8, generator=torch.Generator().manual_seed(seed))

    def score(i, j):
        return (rotary.rotate(q, torch.tensor([i])) * rotary.rotate(k, torch.tensor([j]))).sum()

    torch.testing.assert_close(score(m, n), score(m + shift, n + shift), rtol=0, atol=1e-2)
    torch.testing.assert_close(rotary.rotate(q, torch.tensor([m])).norm(), q.norm())


def test_rotary_takes_a_position_per_sequence_and_other_dtypes():
    rotary = anatomy(Case("", "LlamaForCausalLM").build()).blocks[0].attention.rotary
    x = torch.randn(2, 4, 5, 6, generator=torch.Generator().manual_seed(0))
    positions = torch.stack([torch.arange(5), torch.arange(5) + 3])
    both = rotary.rotate(x, positions[:, None])
    torch.testing.assert_close(both[1], rotary.rotate(x[1], positions[1]))
    torch.testing.assert_close(rotary.rotate(x.transpose(1, 2).contiguous().transpose(1, 2), positions[:, None]), both)
    half = rotary.rotate(x.bfloat16(), positions[:, None])
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), both, rtol=0.02, atol=0.03)
    assert rotary.rotate(x.double(), positions[:, None]).dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_parts_follow_the_model_to_another_dtype(dtype):
    model = Case("", "Phi3ForCausalLM").build()
    parts = anatomy(model)
    model.to(dtype)
    block = parts.blocks[0]
    x = torch.randn(1, 4, 24, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert block.attention.q.weight.dtype == dtype
    assert block.attention.queries(x).dtype == block.mlp(x).dtype == dtype
    torch.testing.assert_close(block.mlp(x), block.module.mlp(x), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("n_heads", [1, 3, 4, 6, 8, 12, 16, 71])
def test_alibi_slopes_are_those_of_the_model(n_heads):
    ones = torch.ones(1, 2, dtype=torch.long)
    theirs = build_alibi_tensor(ones, n_heads, torch.float32)[:, 0, 1]
    torch.testing.assert_close(alibi_slopes(n_heads), theirs, rtol=2**-8, atol=0)  # theirs are rounded to bfloat16


def test_expert_weights_are_views():
    model = Case("", "MixtralForCausalLM", {"num_local_experts": 3}).build()
    moe = anatomy(model).blocks[0].moe
    with torch.no_grad():
        moe.expert(2).up.weight.fill_(7)
    assert (model.model.layers[0].mlp.experts.gate_up_proj[2, 40:] == 7).all()
    assert torch.equal(moe.expert(-1).gate.weight, moe.expert(2).gate.weight)
    with pytest.raises(IndexError):
        moe.expert(3)


@pytest.mark.parametrize(
    ("name", "act_name"),
    [
        ("gpt2", "gelu_new"),
        ("llama", "silu"),
        ("gemma2", "gelu_pytorch_tanh"),
        ("bert", "gelu"),
        ("dinov2 swiglu", "silu"),
    ],
)
def test_activations_are_named(name, act_name):
    parts = anatomy(next(c for c in CASES if c.name == name).build())
    assert {b.mlp.act_name for b in parts.blocks} == {act_name}


def test_gradients_flow_through_a_fused_slice():
    parts = anatomy(Case("", "GPTNeoXForCausalLM").build())
    k = parts.blocks[0].attention.k
    k.weight.sum().backward()
    grad = k.module.weight.grad
    assert grad[k.rows].eq(1).all()
    assert grad.sum() == k.weight.numel()


def test_a_conv1d_that_became_a_linear_layer_is_not_transposed():
    model = Case("", "GPT2Model", {}, GPT2).build()
    old = model.h[0].mlp.c_fc
    new = nn.Linear(24, 96)
    new.weight.data, new.bias.data = old.weight.data.T.clone(), old.bias.data
    before = anatomy(model).blocks[0].mlp.up
    model.h[0].mlp.c_fc = new
    after = anatomy(model).blocks[0].mlp.up
    assert before.transposed
    assert not after.transposed
    assert torch.equal(before.weight, after.weight)


def test_unknown_architecture_names_the_entry_to_add():
    model = tf.GPTJModel(tf.GPTJConfig(vocab_size=20, n_embd=8, n_layer=1, n_head=2, n_positions=8, rotary_dim=4))
    with pytest.raises(UnknownArchitecture) as error:
        anatomy(model)
    message = str(error.value)
    assert "GPTJModel has the model_type 'gptj'" in message
    assert "add an entry 'gptj' to assay/core/architectures.py" in message
    assert "gpt_neox" in message
    assert "\n" not in message


def test_a_module_without_a_config_is_an_unknown_architecture():
    with pytest.raises(UnknownArchitecture, match=r"Sequential has no config with a model_type.*add an entry"):
        anatomy(nn.Sequential(nn.Linear(2, 2)))


@pytest.mark.parametrize(
    ("changed", "missing"),
    [
        ({"o": "self_attn.out"}, "'model.layers.0.self_attn.out'"),
        ({"blocks": "stack"}, r"'model.stack\|stack'"),
        ({"pre_mlp": "ln_2|norm_2"}, r"'model.layers.0.ln_2\|norm_2'"),
    ],
)
def test_a_row_that_does_not_fit_names_the_entry_to_correct(monkeypatch, changed, missing):
    model = Case("", "LlamaForCausalLM").build()
    monkeypatch.setitem(ARCHITECTURES, "llama", replace(ARCHITECTURES["llama"], **changed))
    with pytest.raises(UnknownArchitecture, match=f"has no {missing}.*correct the entry"):
        anatomy(model)


def test_a_row_without_a_needed_path_says_so(monkeypatch):
    model = Case("", "LlamaForCausalLM").build()
    monkeypatch.setitem(ARCHITECTURES, "llama", replace(ARCHITECTURES["llama"], down=""))
    with pytest.raises(UnknownArchitecture, match=r"'llama' of assay/core/architectures.py lacks a path"):
        anatomy(model)


def test_logits_without_a_head_are_not_applicable():
    parts = anatomy(Case("", "LlamaModel").build())
    with pytest.raises(NotApplicable, match="LlamaModel has no language-model head"):
        parts.logits(torch.zeros(1, 24))


def test_a_classifier_has_no_language_model_head():
    parts = anatomy(Case("", "BertForNextSentencePrediction").build())
    assert parts.lm_head is None


def test_architectures_import_without_torch():
    code = "import sys, assay.core.architectures; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("flag", "config", "expected"),
    [
        (True, {}, True),
        (False, {}, False),
        ("alibi", {}, False),
        ("alibi", {"alibi": True}, True),
        ("not alibi", {"alibi": True}, False),
        ("not alibi", {"alibi": None}, True),
    ],
)
def test_flags(flag, config, expected):
    assert holds(flag, config) is expected


GATED_LLAMA = {"known", "text", "attention", "rotary", "mlp", "gated"}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, set()),
        ({"model_type": ["llama"], "architectures": "LlamaForCausalLM", "text_config": 3}, set()),
        ({"model_type": "new", "architectures": [None, "NewLMHeadModel"]}, {"causal", "text"}),
        ({"model_type": "new", "architectures": ["NewForMaskedLM"], "n_head": 4}, {"encoder", "text", "attention"}),
        ({"model_type": "new", "architectures": ["NewForImageClassification"], "image_size": 32}, {"image"}),
        (
            {"architectures": ["NewForCausalLM"], "text_config": {"rope_theta": 1e4, "num_experts": 8}},
            {"causal", "text", "rotary", "moe"},
        ),
        ({"model_type": "llama"}, GATED_LLAMA | {"causal"}),
        ({"model_type": "llama", "is_causal": False}, GATED_LLAMA | {"encoder"}),
        ({"model_type": "mixtral"}, GATED_LLAMA - {"mlp"} | {"causal", "moe"}),
        ({"model_type": "falcon", "alibi": True}, {"known", "text", "causal", "attention", "mlp"}),
        ({"model_type": "gemma3", "text_config": {"use_bidirectional_attention": True}}, GATED_LLAMA | {"encoder"}),
    ],
)
def test_facts_of_known_configurations(config, expected):
    assert facts(config) == expected


def test_every_row_is_data():
    plain = str | bool | tuple
    for row in ARCHITECTURES.values():
        assert all(isinstance(getattr(row, f), plain) for f in architectures.Architecture.__dataclass_fields__)
