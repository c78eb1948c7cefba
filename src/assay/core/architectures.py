"""Where each architecture keeps its parts, as data: the one place to add an architecture.

This module imports no torch, so that a command can tell from `config.json` alone what applies to a checkpoint.

A row is made of dotted paths. A path may list alternatives with `|`, of which the first that exists is taken; an empty
alternative (`"lm_head|"`) says that the part may be absent, and the empty path that there is none. A flag is either
settled (`True`) or the name of a configuration key, optionally after `not `.

To add an architecture: read its `modeling_*.py` in transformers, write its row in `ARCHITECTURES` with the differences
from a row that it resembles, and add a tiny configuration of it to `tests/core/test_anatomy.py`, which rebuilds every
block from the named parts and compares it with the model's own output.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

Flag = bool | str


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One row: where the parts of a transformer are, and how its block joins them.

    Attributes:
        input: what the model reads.
        backbone: where the model without its head may stand inside the model that a user holds; "" is the model itself.
        blocks: the list of blocks, from the backbone.
        embedding: the token embedding (text) or the patch embedding (image), from the backbone.
        final_norm: the norm after the last block, from the backbone.
        head: what maps last hidden states to vocabulary logits, from the model.
        final_softcap: the configuration key of the soft cap on the logits.
        attention: the module that computes attention weights, from the block, as are all paths below.
        q: the query projection.
        k: the key projection.
        v: the value projection.
        qkv: the fused projection that stands for the three.
        qkv_layout: "stacked" has all queries, then all keys, then all values; "grouped" has, for each key-value head,
            the queries that share it, its key and its value.
        o: the output projection.
        q_norm: the norm of the queries, of each head or of all together, whichever fits its width.
        k_norm: the norm of the keys.
        clip: the configuration key of the bound to which queries, keys and values are clamped.
        scaling: the attribute of the attention module that multiplies the scores.
        softcap: the attribute of the attention module that soft-caps the scores.
        window: the configuration key of the sliding window. Where the configuration has `layer_types`, it holds for the
            blocks that are called "sliding_attention".
        causal: whether a token sees only what stands before it.
        rotary: the module that keeps the rotary frequencies, from the backbone. Its pairs are dimensions half the
            rotated width apart.
        alibi: whether attention has linear position biases in place of rotary embeddings.
        interface: whether attention goes through `transformers.AttentionInterface`.
        gated: whether the dense MLP is gated.
        gate: the projection that goes through the activation in a gated MLP.
        up: the projection into the MLP.
        gate_up: the fused projection that stands for the two, gate first.
        down: the projection out of the MLP.
        act: the activation.
        router: the router of a mixture of experts.
        experts: the module with the experts' fused parameters `gate_up_proj` and `down_proj`.
        shared: the expert that every token passes, an MLP whose parts have the names of a dense one's.
        shared_gate: the projection whose sigmoid weighs the shared expert.
        pre_attention: the norm before attention.
        post_attention: the norm after attention.
        pre_mlp: the norm before the MLP.
        post_mlp: the norm after the MLP.
        norm_sum: whether the norms after act on the sum with the residual stream, not on the branch alone.
        attention_scale: the layer scale of the attention branch.
        mlp_scale: the layer scale of the MLP branch.
        parallel: whether attention and MLP read the same input.
    """

    input: Literal["text", "image"] = "text"
    backbone: tuple[str, ...]
    blocks: str
    embedding: str
    final_norm: str = ""
    head: str = ""
    final_softcap: str = ""
    attention: str
    q: str = ""
    k: str = ""
    v: str = ""
    qkv: str = ""
    qkv_layout: Literal["stacked", "grouped"] = "stacked"
    o: str
    q_norm: str = ""
    k_norm: str = ""
    clip: str = ""
    scaling: str = "scaling"
    softcap: str = ""
    window: str = ""
    causal: Flag = True
    rotary: str = ""
    alibi: Flag = False
    interface: bool = True
    gated: Flag = False
    gate: str = ""
    up: str = ""
    gate_up: str = ""
    down: str = ""
    act: str = ""
    router: str = ""
    experts: str = ""
    shared: str = ""
    shared_gate: str = ""
    pre_attention: str = ""
    post_attention: str = ""
    pre_mlp: str = ""
    post_mlp: str = ""
    norm_sum: bool = False
    attention_scale: str = ""
    mlp_scale: str = ""
    parallel: Flag = False


_LLAMA = Architecture(
    backbone=("model", ""),
    blocks="layers",
    embedding="embed_tokens",
    final_norm="norm",
    head="lm_head|",
    attention="self_attn",
    q="self_attn.q_proj",
    k="self_attn.k_proj",
    v="self_attn.v_proj",
    o="self_attn.o_proj",
    rotary="rotary_emb",
    gated=True,
    gate="mlp.gate_proj",
    up="mlp.up_proj",
    down="mlp.down_proj",
    act="mlp.act_fn",
    pre_attention="input_layernorm",
    pre_mlp="post_attention_layernorm",
)

_MIXTRAL = replace(
    _LLAMA,
    window="sliding_window",
    gate="",
    up="",
    down="",
    act="",
    router="mlp.gate",
    experts="mlp.experts",
)

_GEMMA2 = replace(
    _LLAMA,
    softcap="attn_logit_softcapping",
    final_softcap="final_logit_softcapping",
    window="sliding_window",
    post_attention="post_attention_layernorm",
    pre_mlp="pre_feedforward_layernorm",
    post_mlp="post_feedforward_layernorm",
)

# Gemma 3 keeps the attribute `attn_logit_softcapping` and does not apply it.
_GEMMA3 = replace(
    _GEMMA2,
    softcap="",
    causal="not use_bidirectional_attention",
    q_norm="self_attn.q_norm",
    k_norm="self_attn.k_norm",
)

_BERT = Architecture(
    backbone=("bert", ""),
    blocks="encoder.layer",
    embedding="embeddings.word_embeddings",
    head="cls.predictions|",
    attention="attention.self",
    q="attention.self.query",
    k="attention.self.key",
    v="attention.self.value",
    o="attention.output.dense",
    causal="is_decoder",
    up="intermediate.dense",
    down="output.dense",
    act="intermediate.intermediate_act_fn",
    post_attention="attention.output.LayerNorm",
    post_mlp="output.LayerNorm",
    norm_sum=True,
)

_VIT = Architecture(
    input="image",
    backbone=("vit", ""),
    blocks="layers",
    embedding="embeddings",
    final_norm="layernorm",
    attention="attention",
    q="attention.q_proj",
    k="attention.k_proj",
    v="attention.v_proj",
    o="attention.o_proj",
    causal=False,
    up="mlp.fc1",
    down="mlp.fc2",
    act="mlp.activation_fn",
    pre_attention="layernorm_before",
    pre_mlp="layernorm_after",
)

ARCHITECTURES: dict[str, Architecture] = {
    "gpt2": Architecture(
        backbone=("transformer", ""),
        blocks="h",
        embedding="wte",
        final_norm="ln_f",
        head="lm_head|",
        attention="attn",
        qkv="attn.c_attn",
        o="attn.c_proj",
        up="mlp.c_fc",
        down="mlp.c_proj",
        act="mlp.act",
        pre_attention="ln_1",
        pre_mlp="ln_2",
    ),
    "gpt_neox": Architecture(
        backbone=("gpt_neox", ""),
        blocks="layers",
        embedding="embed_in",
        final_norm="final_layer_norm",
        head="lm_head|",
        attention="attention",
        qkv="attention.query_key_value",
        qkv_layout="grouped",
        o="attention.dense",
        rotary="rotary_emb",
        up="mlp.dense_h_to_4h",
        down="mlp.dense_4h_to_h",
        act="mlp.act",
        pre_attention="input_layernorm",
        pre_mlp="post_attention_layernorm",
        parallel="use_parallel_residual",
    ),
    "llama": _LLAMA,
    "mistral": replace(_LLAMA, window="sliding_window"),
    "mixtral": _MIXTRAL,
    "qwen2": replace(_LLAMA, window="sliding_window"),
    "qwen3": replace(_LLAMA, window="sliding_window", q_norm="self_attn.q_norm", k_norm="self_attn.k_norm"),
    "qwen2_moe": replace(
        _LLAMA,
        window="sliding_window",
        router="mlp.gate|",
        experts="mlp.experts|",
        shared="mlp.shared_expert",
        shared_gate="mlp.shared_expert_gate",
    ),
    "gemma2": _GEMMA2,
    "gemma3_text": _GEMMA3,
    # With images: the language model inside, whose logits have no soft cap.
    "gemma3": replace(_GEMMA3, backbone=("model.language_model", "language_model"), final_softcap=""),
    "phi3": replace(
        _LLAMA,
        q="",
        k="",
        v="",
        qkv="self_attn.qkv_proj",
        window="sliding_window",
        gate="",
        up="",
        gate_up="mlp.gate_up_proj",
        act="mlp.activation_fn",
    ),
    "olmo2": replace(
        _LLAMA,
        pre_attention="",
        post_attention="post_attention_layernorm",
        pre_mlp="",
        post_mlp="post_feedforward_layernorm",
        q_norm="self_attn.q_norm",
        k_norm="self_attn.k_norm",
    ),
    "olmoe": replace(_MIXTRAL, window="", clip="clip_qkv", q_norm="self_attn.q_norm", k_norm="self_attn.k_norm"),
    "falcon": Architecture(
        backbone=("transformer", ""),
        blocks="h",
        embedding="word_embeddings",
        final_norm="ln_f",
        head="lm_head|",
        attention="self_attention",
        qkv="self_attention.query_key_value",
        qkv_layout="grouped",
        o="self_attention.dense",
        scaling="inv_norm_factor",
        rotary="rotary_emb",
        alibi="alibi",
        interface=False,
        up="mlp.dense_h_to_4h",
        down="mlp.dense_4h_to_h",
        act="mlp.act",
        pre_attention="ln_attn|input_layernorm",
        pre_mlp="ln_mlp|post_attention_layernorm|input_layernorm",
        parallel="parallel_attn",
    ),
    "bert": _BERT,
    "roberta": replace(_BERT, backbone=("roberta", ""), head="lm_head|"),
    "vit": _VIT,
    "dinov2": replace(
        _VIT,
        backbone=("dinov2", ""),
        blocks="encoder.layer",
        gated="use_swiglu_ffn",
        gate="mlp.gate_proj|",
        up="mlp.fc1|mlp.up_proj",
        down="mlp.fc2|mlp.down_proj",
        act="mlp.activation_fn|mlp.act_fn",
        pre_attention="norm1",
        pre_mlp="norm2",
        attention_scale="layer_scale1",
        mlp_scale="layer_scale2",
    ),
}


def holds(flag: Flag, config: Mapping[str, Any]) -> bool:
    """Whether a flag of a row is true for a configuration.

    Args:
        flag: settled, or the name of a key of the configuration, optionally after `not `; a missing key is false.
        config: the configuration as a mapping.

    >>> holds("is_decoder", {"is_decoder": True}), holds("not alibi", {})
    (True, True)
    """
    if isinstance(flag, bool):
        return flag
    key = flag.removeprefix("not ")
    return bool(config.get(key)) != (key != flag)


def is_causal(row: Architecture, config: Mapping[str, Any]) -> bool:
    """Whether a token sees only what stands before it; any configuration may say `is_causal: false`."""
    return holds(row.causal, config) and bool(config.get("is_causal", True))


def facts(config: Mapping[str, Any]) -> frozenset[str]:
    """What a checkpoint's `config.json` tells about it.

    Args:
        config: the parsed `config.json`; a value of an unexpected type tells nothing.

    Returns:
        Some of: "known" (its architecture has a row), "text" and "image" (what it reads), "causal" and "encoder"
        (whether a token sees only what stands before it, or all), "attention", "rotary", "mlp" (some block has a dense
        MLP), "gated" (its MLPs or experts are gated), "moe". Of an architecture without a row, only what its
        configuration says by itself.

    >>> sorted(facts({"model_type": "gpt2"}))
    ['attention', 'causal', 'known', 'mlp', 'text']
    >>> sorted(facts({"model_type": "gptx", "architectures": ["GPTXForCausalLM"]}))
    ['causal', 'text']
    """
    model_type, inner = config.get("model_type"), config.get("text_config")
    row = ARCHITECTURES.get(model_type) if isinstance(model_type, str) else None
    merged = {**config, **inner} if isinstance(inner, Mapping) else config
    return frozenset(_of_row(row, merged) if row else _of_config(merged))


def _of_row(row: Architecture, config: Mapping[str, Any]) -> set[str]:
    some_dense = bool(config.get("mlp_only_layers")) or config.get("decoder_sparse_step", 1) != 1
    told = {
        "known": True,
        row.input: True,
        "attention": True,
        "causal": is_causal(row, config),
        "encoder": not is_causal(row, config),
        "rotary": bool(row.rotary) and not holds(row.alibi, config),
        "moe": bool(row.experts),
        "mlp": bool(row.down) and (not row.experts or some_dense),
        "gated": holds(row.gated, config),
    }
    return {fact for fact, true in told.items() if true}


def _of_config(config: Mapping[str, Any]) -> set[str]:
    classes = config.get("architectures")
    heads = tuple(c for c in classes if isinstance(c, str)) if isinstance(classes, list | tuple) else ()

    def any_ends(*endings: str) -> bool:
        return any(c.endswith(endings) for c in heads)

    def any_key(*keys: str) -> bool:
        return any(config.get(k) for k in keys)

    causal, masked = any_ends("ForCausalLM", "LMHeadModel"), any_ends("ForMaskedLM")
    told = {
        "text": causal or masked or any_key("vocab_size"),
        "image": any_ends("ForImageClassification") or any_key("image_size", "vision_config"),
        "diffusion": any_ends("DiT", "DiTTransformer2DModel", "PixArtTransformer2DModel"),
        "causal": causal,
        "encoder": masked,
        "attention": any_key("num_attention_heads", "n_head", "num_heads"),
        "rotary": any_key("rope_theta", "rope_parameters", "rope_scaling"),
        "moe": any_key("num_experts", "num_local_experts", "n_routed_experts"),
    }
    return {fact for fact, true in told.items() if true}
