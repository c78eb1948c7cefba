import copy
import json
import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    BertConfig,
    BertModel,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from assay.core import trace as trace_module
from assay.core.errors import InputError, NotApplicable
from assay.core.results import jsonable
from assay.core.trace import Reducer, trace
from assay.lens import _inactive_heads as module
from assay.lens._inactive_heads import (
    ALL_SCORES,
    FRACTIONS,
    SCORES,
    HeadScoreReducer,
    ablate_heads,
    compare_scores,
    head_scores,
    inactive_heads,
    thresholds,
    zeroable_fraction,
)
from assay.reference.tiny_lm import GROUND_TRUTH, load
from assay.trials.lens.inactive_heads import TRIAL

TINY = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "olmo2": (Olmo2Config, Olmo2ForCausalLM, {}),
    "gemma2": (Gemma2Config, Gemma2ForCausalLM, {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 9}),
}


def build(family="llama", seed=0, **changes):
    config, model, extra = FAMILIES[family]
    torch.manual_seed(seed)
    made = model(config(**(TINY | extra | changes)))
    for name, parameter in made.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    return made.eval()


def tokens(n, length, seed=0):
    return torch.randint(1, 60, (n, length), generator=torch.Generator().manual_seed(seed))


def reference_scores(model, ids, mask=None):
    """The scores from what Hugging Face's own eager attention returns, by loops over heads."""
    blocks = model.model.layers
    seen = {}
    hooks = []
    for i, block in enumerate(blocks):
        attention = block.self_attn
        hooks.append(attention.o_proj.register_forward_pre_hook(lambda _m, a, i=i: seen.update({("o", i): a[0]})))
        hooks.append(attention.v_proj.register_forward_hook(lambda _m, _a, o, i=i: seen.update({("v", i): o})))
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.no_grad():
        out = model(ids, attention_mask=mask, output_attentions=True, use_cache=False)
    model.set_attn_implementation(before)
    for hook in hooks:
        hook.remove()
    n_heads = model.config.num_attention_heads
    lengths = [ids.shape[1]] * len(ids) if mask is None else mask.sum(1).tolist()
    names = ("awft", "aeqd", "ftvvn", "avvn", "lthon", "ahon", "ahon_full")
    result = {n: np.zeros((len(ids), len(blocks), n_heads)) for n in names}
    for layer, block in enumerate(blocks):
        pattern = out.attentions[layer].double()
        o = seen["o", layer].double().unflatten(-1, (n_heads, -1))
        d = o.shape[-1]
        v = seen["v", layer].double().unflatten(-1, (-1, d))
        weight = block.self_attn.o_proj.weight.detach().double()
        for b, length in enumerate(lengths):
            for h in range(n_heads):
                a = pattern[b, h, :length, :length].numpy()
                values = v[b, :length, h // (n_heads // v.shape[2])].numpy()
                outputs = o[b, :length, h].numpy()
                full = outputs @ weight[:, h * d : (h + 1) * d].numpy().T
                result["awft"][b, layer, h] = a[:, 0].mean()
                result["aeqd"][b, layer, h] = -(a * np.log(np.where(a > 0, a, 1))).sum(1).mean()
                result["ftvvn"][b, layer, h] = np.linalg.norm(values[0])
                result["avvn"][b, layer, h] = np.linalg.norm(values, axis=1).mean()
                result["lthon"][b, layer, h] = np.linalg.norm(outputs[-1])
                result["ahon"][b, layer, h] = np.linalg.norm(outputs, axis=1).mean()
                result["ahon_full"][b, layer, h] = np.linalg.norm(full, axis=1).mean()
    for n in (*names[:4], "ahon", "ahon_full"):
        result[n + "_ln"] = result[n] / result[n].mean(-1, keepdims=True)
    result["lthon_ln"] = result["lthon"] / result["ahon"].mean(-1, keepdims=True)
    result["lthon_ln_strict"] = result["lthon"] / result["lthon"].mean(-1, keepdims=True)
    result["lthon_hn"] = result["lthon"] / result["ahon"]
    return result, out.logits


def uniform_pattern(length):
    lower = torch.ones(1, 1, length, length).tril()
    return lower / lower.sum(-1, keepdim=True)


def random_pattern(batch, heads, length, generator):
    logits = torch.randn(batch, heads, length, length, generator=generator)
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    return logits.masked_fill(future, -torch.inf).softmax(-1)


# Known values


def test_exact_1_uniform_causal_attention():
    scores = head_scores(uniform_pattern(4), torch.randn(1, 1, 4, 3))
    assert scores["awft"].item() == pytest.approx((1 + 1 / 2 + 1 / 3 + 1 / 4) / 4, abs=1e-6)
    assert scores["awft"].item() == pytest.approx(0.5208333, abs=1e-6)
    assert scores["aeqd"].item() == pytest.approx(math.log(24) / 4, abs=1e-6)
    assert scores["aeqd"].item() == pytest.approx(0.7945135, abs=1e-6)


def test_exact_1_uniform_attention_in_a_model_whose_queries_are_zero():
    model = build()
    for block in model.model.layers:
        block.self_attn.q_proj.weight.data.zero_()
    scores = inactive_heads(model, [tokens(2, 4)], which=("awft", "aeqd"))
    torch.testing.assert_close(scores["awft"], torch.full((2, 3, 4), 25 / 48))
    torch.testing.assert_close(scores["aeqd"], torch.full((2, 3, 4), math.log(24) / 4))


def test_exact_2_pure_sink_head():
    sink = torch.zeros(1, 1, 6, 6)
    sink[..., 0] = 1
    v = torch.randn(1, 1, 6, 5, generator=torch.Generator().manual_seed(0))
    scores = head_scores(sink, v, which=ALL_SCORES, o_slices=torch.eye(5)[None])
    assert scores["awft"].item() == 1
    assert scores["aeqd"].item() == 0
    norm = v[0, 0, 0].norm().item()
    assert scores["ahon"].item() == pytest.approx(norm, rel=1e-6)
    assert scores["lthon"].item() == pytest.approx(norm, rel=1e-6)
    assert scores["lthon_hn"].item() == pytest.approx(1, rel=1e-6)


def test_exact_3_normalised_scores_have_layer_mean_one():
    scores = inactive_heads(build(), [tokens(3, 20)], which=ALL_SCORES)
    normalised = [n for n in ALL_SCORES if "_ln" in n and n != "lthon_ln"]
    assert len(normalised) == 7
    for name in normalised:
        torch.testing.assert_close(scores[name].mean(-1), torch.ones(3, 3), rtol=1e-6, atol=1e-6)
    assert (scores["lthon_ln"].mean(-1) - 1).abs().max() > 0.01


def test_exact_4_head_without_values():
    model = build(num_key_value_heads=4)
    pattern_scores = ("awft", "aeqd")
    before = inactive_heads(model, [tokens(2, 16)], which=pattern_scores)
    value = model.model.layers[1].self_attn.v_proj.weight
    value.data[2 * 8 : 3 * 8] = 0
    after = inactive_heads(model, [tokens(2, 16)])
    for name in ("ahon", "avvn", "lthon", "ftvvn", "ahon_ln"):
        assert after[name][:, 1, 2].tolist() == [0, 0]
        others = after[name].flatten(1)[:, [i for i in range(12) if i != 6]]
        assert (others > 0).all()
    # The patterns of its own layer come from what stands before the values.
    for name in pattern_scores:
        assert torch.equal(before[name][:, :2], after[name][:, :2])


def test_exact_4_zeroing_a_head_without_values_leaves_logits_bit_identical():
    model = build(num_key_value_heads=4)
    model.model.layers[1].self_attn.v_proj.weight.data[2 * 8 : 3 * 8] = 0
    none = torch.zeros(3, 4, dtype=torch.bool)
    dead = none.clone()
    dead[1, 2] = True
    with torch.no_grad():
        with ablate_heads(model, mask=none):
            clean = model(tokens(2, 16)).logits
        with ablate_heads(model, mask=dead) as static:
            silenced = model(tokens(2, 16)).logits
        with ablate_heads(model, "ahon", 1e-30) as dynamic:
            chosen = model(tokens(2, 16)).logits
    assert torch.equal(clean, silenced)
    assert torch.equal(clean, chosen)
    assert static.zeroed.tolist() == dynamic.zeroed.tolist() == (2 * dead).tolist()
    assert static.fraction_zeroed == dynamic.fraction_zeroed == 1 / 12


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("ignore:texts of")
def test_exact_5_padding_changes_no_score(family):
    model = build(family)
    ids = tokens(2, 14)
    mask = torch.ones(2, 25, dtype=torch.long)
    mask[:, 14:] = 0
    padded = torch.cat([ids, tokens(2, 11, seed=9)], dim=1)
    which = [n for n in ALL_SCORES if n != "random"]
    alone = inactive_heads(model, [ids], which=which)
    together = inactive_heads(model, [{"input_ids": padded, "attention_mask": mask}], which=which)
    assert together.tokens.tolist() == [14, 14]
    for name in which:
        torch.testing.assert_close(together[name], alone[name], rtol=1e-6, atol=1e-6)


def test_exact_6_scaling_values_scales_outputs_and_leaves_normalised_scores():
    model = build(num_hidden_layers=1)
    plain = inactive_heads(model, [tokens(2, 12)])
    model.model.layers[0].self_attn.v_proj.weight.data.mul_(4)
    scaled = inactive_heads(model, [tokens(2, 12)])
    for name in ("ahon", "lthon", "avvn", "ftvvn"):
        torch.testing.assert_close(scaled[name], 4 * plain[name])
    for name in ("ahon_ln", "lthon_ln", "avvn_ln", "ftvvn_ln", "awft", "aeqd"):
        torch.testing.assert_close(scaled[name], plain[name])


def test_exact_6_scaling_queries_against_keys_changes_nothing():
    model = build(num_hidden_layers=1)
    plain = inactive_heads(model, [tokens(2, 12)])
    model.model.layers[0].self_attn.q_proj.weight.data.mul_(4)
    model.model.layers[0].self_attn.k_proj.weight.data.div_(4)
    scaled = inactive_heads(model, [tokens(2, 12)])
    for name in SCORES:
        torch.testing.assert_close(scaled[name], plain[name])


@pytest.mark.parametrize("name", ALL_SCORES)
def test_exact_7_fraction_zero_flags_none(name):
    scores = inactive_heads(build(), [tokens(3, 12)], which=(name,))
    assert not scores.flagged(name, scores.thresholds(name, (0.0,))[0]).any()
    assert scores.flagged(name, scores.thresholds(name, (0.3,))[0]).any()


def test_exact_8_full_output_is_the_norm_after_the_output_projection():
    generator = torch.Generator().manual_seed(0)
    pattern = random_pattern(2, 3, 7, generator)
    v = torch.randn(2, 3, 7, 4, generator=generator)
    slices = torch.randn(3, 10, 4, generator=generator)
    scores = head_scores(pattern, v, which=("ahon_full",), o_slices=slices)
    expected = torch.einsum("hmd,bhqk,bhkd->bhqm", slices, pattern, v).norm(dim=-1).mean(-1)
    torch.testing.assert_close(scores["ahon_full"], expected)


def test_exact_8_orthonormal_output_slices_change_no_norm():
    generator = torch.Generator().manual_seed(0)
    pattern = random_pattern(2, 3, 7, generator)
    v = torch.randn(2, 3, 7, 4, generator=generator)
    slices = torch.linalg.qr(torch.randn(3, 10, 4, generator=generator)).Q
    scores = head_scores(pattern, v, which=("ahon", "ahon_ln", "ahon_full", "ahon_full_ln"), o_slices=slices)
    torch.testing.assert_close(scores["ahon_full"], scores["ahon"])
    torch.testing.assert_close(scores["ahon_full_ln"], scores["ahon_ln"])


def test_values_wider_than_the_model_are_projected_all_the_same():
    generator = torch.Generator().manual_seed(0)
    pattern = random_pattern(1, 2, 5, generator)
    v = torch.randn(1, 2, 5, 6, generator=generator)
    slices = torch.randn(2, 4, 6, generator=generator)
    scores = head_scores(pattern, v, which=("ahon_full",), o_slices=slices)
    expected = torch.einsum("hmd,bhqk,bhkd->bhqm", slices, pattern, v).norm(dim=-1).mean(-1)
    torch.testing.assert_close(scores["ahon_full"], expected)


# Against Hugging Face's own attention


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("ignore:texts of")
def test_scores_equal_those_from_eager_attentions(family):
    model = build(family)
    ids, mask = tokens(3, 22), torch.ones(3, 22, dtype=torch.long)
    mask[1, 15:] = 0
    mask[2, 4:] = 0
    expected, _ = reference_scores(model, ids, mask)
    scores = inactive_heads(
        model, [{"input_ids": ids[:2], "attention_mask": mask[:2]}, {"input_ids": ids[2:, :4]}], which=ALL_SCORES
    )
    for name, values in expected.items():
        np.testing.assert_allclose(scores[name].numpy(), values, rtol=2e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("slice_bytes", [1, 4 * 2 * 22 * 16])
def test_scores_do_not_depend_on_how_the_pattern_is_cut(monkeypatch, slice_bytes):
    model, ids = build(), tokens(2, 40)
    whole = inactive_heads(model, [ids])
    monkeypatch.setattr(trace_module, "_SLICE_BYTES", slice_bytes)
    pieces = []

    class Count(Reducer):
        sites = ("attn.pattern",)

        def update(self, site, layer, value, batch):
            pieces.append(value.weights.shape)

    reducer = HeadScoreReducer()
    trace(model, [ids], [Count(), reducer])
    assert len(pieces) > 3 * 2
    cut = reducer.result()
    for name in SCORES:
        torch.testing.assert_close(cut[name], whole[name], rtol=1e-5, atol=1e-6)


def test_gpt2_with_fused_projections():
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=60, n_positions=32, n_embd=32, n_layer=2, n_head=4, bos_token_id=None, eos_token_id=None
    )
    model = GPT2LMHeadModel(config).eval()
    scores = inactive_heads(model, [tokens(2, 12)], which=ALL_SCORES)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = torch.stack(model(tokens(2, 12), output_attentions=True).attentions, dim=1)
    torch.testing.assert_close(scores["awft"], attentions[..., 0].mean(-1))


# Silencing


def silenced(model, mask):
    """A copy whose output projections lack the columns of the masked heads."""
    other = copy.deepcopy(model)
    for block, row in zip(other.model.layers, mask, strict=True):
        block.self_attn.o_proj.weight.data[:, row.repeat_interleave(8)] = 0
    return other


@pytest.mark.parametrize("family", FAMILIES)
def test_a_mask_is_the_same_as_zero_columns_in_the_output_projection(family):
    model = build(family)
    mask = torch.rand(3, 4, generator=torch.Generator().manual_seed(1)) < 0.4
    with torch.no_grad():
        with ablate_heads(model, mask=mask) as stats:
            logits = model(tokens(2, 20)).logits
        torch.testing.assert_close(logits, silenced(model, mask)(tokens(2, 20)).logits, rtol=1e-4, atol=1e-4)
    assert stats.fraction_zeroed == pytest.approx(mask.float().mean().item())


def test_scores_are_computed_within_the_silenced_pass():
    model, told_apart = build(), 0
    for seed in range(12):
        ids = tokens(1, 24, seed=seed)
        clean, _ = reference_scores(model, ids)
        tau = float(np.quantile(clean["ahon_ln"], 0.4))
        with torch.no_grad(), ablate_heads(model, "ahon_ln", tau) as stats:
            logits = model(ids).logits
        mask = torch.zeros(3, 4, dtype=torch.bool)
        for layer in range(3):
            upstream, _ = reference_scores(silenced(model, mask), ids)
            mask[layer] = torch.from_numpy(upstream["ahon_ln"][0, layer] < tau)
        assert stats.zeroed.bool().tolist() == mask.tolist()
        _, expected = reference_scores(silenced(model, mask), ids)
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        told_apart += mask.tolist() != (clean["ahon_ln"][0] < tau).tolist()
    assert told_apart, "no case tells scores of the silenced pass from scores of the clean one"


@pytest.mark.parametrize("name", ALL_SCORES)
def test_every_score_can_choose_what_to_silence(name):
    model = build()
    scores = inactive_heads(model, [tokens(4, 16)], which=(name,))
    tau = float(scores.thresholds(name, (0.25,))[0])
    with torch.no_grad(), ablate_heads(model, name, tau) as stats:
        model(tokens(4, 16))
    # The first layer is not yet touched by what was silenced.
    assert stats.zeroed[0].tolist() == scores.flagged(name, tau)[:, 0].sum(0).tolist()
    assert 0 < stats.fraction_zeroed < 1
    assert stats.samples == 4


def test_a_planted_dead_head_is_found_by_outputs_and_not_by_attention():
    model = build(num_key_value_heads=4)
    planted = torch.zeros(3, 4, dtype=torch.bool)
    planted[0, 1] = planted[2, 3] = True
    for layer, head in planted.nonzero().tolist():
        model.model.layers[layer].self_attn.v_proj.weight.data[head * 8 : head * 8 + 8] = 0
    scores = inactive_heads(model, [tokens(3, 24)])
    for name in ("ahon_ln", "ahon", "avvn", "ftvvn", "lthon"):
        tau = scores.thresholds(name, (0.2,))[0]
        assert scores.flagged(name, tau).all(0).tolist() == planted.tolist(), name
    for name in ("awft", "aeqd"):
        tau = scores.thresholds(name, (0.2,))[0]
        assert scores.flagged(name, tau).all(0).tolist() != planted.tolist()


def test_the_model_is_left_as_it_was_also_after_an_error():
    model, ids = build(), tokens(1, 8)
    implementation = model.config._attn_implementation
    with torch.no_grad():
        before = model(ids).logits

    def fail():
        with ablate_heads(model, "ahon", 1.0):
            model(ids)
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert model.config._attn_implementation == implementation
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    with torch.no_grad():
        assert torch.equal(model(ids).logits, before)


def test_gradients_flow_through_what_is_not_silenced():
    model = build()
    mask = torch.zeros(3, 4, dtype=torch.bool)
    mask[1, 2] = True
    with ablate_heads(model, mask=mask):
        model(tokens(1, 8), labels=tokens(1, 8)).loss.backward()
    gradient = model.model.layers[1].self_attn.o_proj.weight.grad.unflatten(1, (4, 8)).abs().sum((0, 2))
    assert (gradient > 0).tolist() == [True, True, False, True]


def test_a_mask_works_while_generating_and_a_score_does_not():
    model, ids = build(), tokens(1, 6)
    mask = torch.ones(3, 4, dtype=torch.bool)
    with ablate_heads(model, mask=mask):
        grown = model.generate(ids, max_new_tokens=3, do_sample=False)
    assert grown.shape == (1, 9)
    with ablate_heads(model, "ahon", 1.0), pytest.raises(NotApplicable, match="use_cache=False"):
        model.generate(ids, max_new_tokens=3, do_sample=False)


# Sharing a pass


def test_a_pass_is_shared_with_other_reducers():
    model, ids = build(), tokens(2, 12)

    class Outputs(Reducer):
        sites = ("attn", "resid")
        seen = 0

        def update(self, site, layer, value, batch):
            self.seen += 1

    other, reducer = Outputs(), HeadScoreReducer(ALL_SCORES)
    trace(model, [ids, ids], [reducer, other])
    assert other.seen == 2 * 2 * 3
    alone = inactive_heads(model, [ids, ids], which=ALL_SCORES)
    for name in ALL_SCORES:
        assert torch.equal(reducer.result()[name], alone[name])


def test_the_pattern_is_only_looked_at_when_a_score_needs_it():
    assert HeadScoreReducer(("ahon_ln", "avvn")).sites == ("attn",)
    assert HeadScoreReducer(("awft_ln",)).sites == ("attn.pattern", "attn")


# Properties


@settings(max_examples=40, deadline=None)
@given(
    batch=st.integers(1, 3),
    n_kv=st.integers(1, 3),
    group=st.integers(1, 3),
    length=st.integers(1, 9),
    width=st.integers(1, 6),
    seed=st.integers(0, 1000),
)
def test_scores_equal_plain_loops(batch, n_kv, group, length, width, seed):
    generator = torch.Generator().manual_seed(seed)
    heads = n_kv * group
    pattern = random_pattern(batch, heads, length, generator)
    v = torch.randn(batch, n_kv, length, width, generator=generator)
    lengths = torch.randint(1, length + 1, (batch,), generator=generator)
    valid = torch.arange(length) < lengths[:, None]
    scores = head_scores(pattern, v, valid=valid)
    for b in range(batch):
        n = int(lengths[b])
        for h in range(heads):
            a, values = pattern[b, h, :n, :n].double(), v[b, h // group, :n].double()
            out = a @ values
            expected = {
                "awft": a[:, 0].mean(),
                "aeqd": -torch.xlogy(a, a).sum(1).mean(),
                "ftvvn": values[0].norm(),
                "avvn": values.norm(dim=1).mean(),
                "lthon": out[-1].norm(),
                "ahon": out.norm(dim=1).mean(),
            }
            for name, value in expected.items():
                assert scores[name][b, h].item() == pytest.approx(value.item(), rel=1e-5, abs=1e-6)


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.floats(-5, 5, width=32), min_size=1, max_size=50),
    fraction=st.floats(0, 1),
    direction=st.sampled_from(["<", ">"]),
)
def test_a_threshold_flags_no_more_than_its_fraction(values, fraction, direction):
    scores = torch.tensor(values)
    tau = thresholds(scores, (fraction,), direction=direction)[0]
    flagged = scores.double() < tau if direction == "<" else scores.double() > tau
    assert flagged.sum() <= math.ceil(fraction * len(values))


def test_thresholds_interpolate_the_distribution_function():
    scores = torch.tensor([4.0, 1.0, 3.0, 2.0])
    assert thresholds(scores, (0, 0.25, 0.375, 0.5, 1)).tolist() == [1, 1, 1.5, 2, 4]
    assert thresholds(scores, (0, 0.25, 0.5), direction=">").tolist() == [4, 3, 2]
    assert len(thresholds(scores)) == len(FRACTIONS) == 7


def test_thresholds_flag_the_wanted_fraction_of_many_scores():
    scores = torch.randn(20, 10, 10, generator=torch.Generator().manual_seed(0))
    taus = thresholds(scores, (0.1, 0.3))
    assert [(scores < t).float().mean().item() for t in taus] == pytest.approx([0.1, 0.3], abs=0.001)
    taus = thresholds(scores, (0.1, 0.3), direction=">")
    assert [(scores > t).float().mean().item() for t in taus] == pytest.approx([0.1, 0.3], abs=0.001)


def test_grouped_queries_tie_in_the_scores_of_their_values():
    scores = inactive_heads(build(), [tokens(2, 10)])
    for name in ("ftvvn", "avvn"):
        pairs = scores[name].unflatten(-1, (2, 2))
        assert torch.equal(pairs[..., 0], pairs[..., 1])
        assert not torch.equal(pairs[..., 0, 0], pairs[..., 1, 0])


def test_a_layer_without_any_output_keeps_zeros_and_not_nan():
    scores = head_scores(uniform_pattern(4).expand(1, 2, 4, 4), torch.zeros(1, 2, 4, 3))
    for name in ("ahon_ln", "avvn_ln", "lthon_ln", "ftvvn_ln"):
        assert scores[name].tolist() == [[0, 0]]
    hn = head_scores(uniform_pattern(4), torch.zeros(1, 1, 4, 3), which=("lthon_hn",))
    assert hn["lthon_hn"].item() == 0


def test_a_text_of_one_token():
    scores = inactive_heads(build(), [tokens(2, 1)], which=ALL_SCORES)
    assert torch.equal(scores["awft"], torch.ones(2, 3, 4))
    assert torch.equal(scores["aeqd"], torch.zeros(2, 3, 4))
    assert all(v.isfinite().all() for v in scores.scores.values())


def test_a_sliding_window_gives_the_first_token_no_weight_and_warns():
    model = build("gemma2")
    with pytest.warns(UserWarning, match="sliding window of 9"):
        scores = inactive_heads(model, [tokens(1, 40)], which=("awft", "ahon"))
    expected, _ = reference_scores(model, tokens(1, 40))
    np.testing.assert_allclose(scores["awft"].numpy(), expected["awft"], rtol=1e-5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        inactive_heads(model, [tokens(1, 9)], which=("awft",))
        inactive_heads(model, [tokens(1, 40)], which=("ahon",))


# Numbers and determinism


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtypes_of_tensors(dtype):
    generator = torch.Generator().manual_seed(0)
    pattern = random_pattern(2, 4, 9, generator)
    v = torch.randn(2, 2, 9, 8, generator=generator)
    scores = head_scores(pattern.to(dtype), v.to(dtype))
    expected = head_scores(pattern.double(), v.double())
    tolerance = {torch.float16: 4e-3, torch.bfloat16: 3e-2}.get(dtype, 1e-5)
    for name in SCORES:
        assert scores[name].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        torch.testing.assert_close(scores[name].double(), expected[name], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtypes_of_models(dtype):
    model = build()
    expected = inactive_heads(model, [tokens(2, 12)], which=ALL_SCORES)
    scores = inactive_heads(model.to(dtype), [tokens(2, 12)], which=ALL_SCORES)
    tolerance = 0.1 if dtype == torch.bfloat16 else 1e-4
    for name in ALL_SCORES:
        torch.testing.assert_close(scores[name].float(), expected[name], rtol=tolerance, atol=tolerance)


def test_norms_beyond_the_range_of_float16():
    v = torch.full((1, 1, 3, 64), 3e4, dtype=torch.float16)
    scores = head_scores(uniform_pattern(3).half(), v, which=("avvn", "ahon"))
    assert scores["avvn"].item() == pytest.approx(8 * 3e4, rel=1e-3)
    assert scores["ahon"].item() == pytest.approx(8 * 3e4, rel=1e-3)


def test_inputs_that_are_not_contiguous():
    generator = torch.Generator().manual_seed(0)
    pattern = random_pattern(2, 4, 9, generator)
    v = torch.randn(2, 2, 9, 8, generator=generator)
    strided = head_scores(
        pattern.permute(3, 1, 2, 0).contiguous().permute(3, 1, 2, 0), v.transpose(1, 2).contiguous().transpose(1, 2)
    )
    for name, values in head_scores(pattern, v).items():
        torch.testing.assert_close(strided[name], values)


def test_the_same_seed_gives_the_same_random_scores():
    model = build()
    first, again, other = (
        inactive_heads(model, [tokens(2, 6)], which=("random",), seed=s)["random"] for s in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.unique().numel() == first.numel()


# Reports


def distance_from(model, ids):
    """How far the logits are from those of the model as it is now."""
    with torch.no_grad():
        clean = model(ids).logits

    def evaluate(model):
        with torch.no_grad():
            return (model(ids).logits - clean).abs().max().item()

    return evaluate


def test_zeroable_fraction_counts_what_was_really_zeroed():
    model = build(num_key_value_heads=4)
    model.model.layers[1].self_attn.v_proj.weight.data[2 * 8 : 3 * 8] = 0
    calibration = inactive_heads(model, [tokens(6, 16)], which=("avvn", "random"))
    evaluate = distance_from(model, tokens(4, 16, seed=5))
    result = zeroable_fraction(
        model, evaluate, calibration, fractions=(0.0, 0.085, 0.3), tolerance=1e-3, better="lower", seed=1
    )
    assert result.reference == 0
    assert result.values.shape == (2, 3)
    # One score in twelve is 0, so that the second threshold lies just above it.
    assert result.zeroed[0].tolist()[:2] == [0, 1 / 12]
    assert result.values[0, 1] < 1e-3 < result.values[0, 2]
    assert result.zeroable["avvn"] == pytest.approx(1 / 12)
    assert result.zeroable["random"] == 0
    free = zeroable_fraction(model, evaluate, calibration, scores=["random"], tolerance=100, better="lower", seed=1)
    assert free.zeroable["random"] == free.zeroed.max()


def test_zeroable_fraction_knows_which_direction_is_worse():
    model = build()
    calibration = inactive_heads(model, [tokens(2, 8)], which=("ahon",))
    with ablate_heads(model, "ahon", float(calibration.thresholds("ahon", (0.3,))[0])) as stats:
        model(tokens(1, 8))
    falling = iter([1.0, 0.5])

    def evaluate(model):
        model(tokens(1, 8))
        return next(falling)

    result = zeroable_fraction(model, evaluate, calibration, fractions=(0.3,), better="higher")
    assert result.zeroable == {"ahon": 0.0}
    assert result.cost.tolist() == [[0.5]]
    falling = iter([1.0, 0.5])
    result = zeroable_fraction(model, evaluate, calibration, fractions=(0.3,), better="lower")
    assert result.zeroable == {"ahon": pytest.approx(stats.fraction_zeroed)}
    assert result.cost.tolist() == [[-0.5]]


def test_comparison_of_scores():
    a = torch.arange(20.0).view(2, 2, 5)
    same = compare_scores(a, 2 * a, fractions=(0.25, 0.5))
    assert same.wasserstein == pytest.approx(9.5)
    assert same.iou.tolist() == same.precision.tolist() == [1, 1]
    opposite = compare_scores(a, a, directions=("<", ">"), fractions=(0.25,))
    assert opposite.iou.tolist() == [0]
    shifted = compare_scores(a, (a - 2) % 20, fractions=(0.25,))
    # Flagged are {0…3} and {2…5}: ties and interpolation leave four of twenty strictly below.
    assert shifted.iou.tolist() == [2 / 6]
    assert shifted.precision.tolist() == [0.5]
    other = compare_scores(a, torch.arange(7.0))
    assert other.iou.isnan().all()
    assert other.wasserstein > 0


def test_results_have_tables_figures_and_json():
    model = build()
    scores = inactive_heads(model, [tokens(2, 8)], which=ALL_SCORES)
    evaluate = distance_from(model, tokens(1, 8))
    zeroable = zeroable_fraction(model, evaluate, scores, scores=["ahon_ln", "awft"], fractions=(0, 0.3))
    comparison = compare_scores(scores["ahon"], scores["avvn"])
    assert len(scores.table()) == 12
    first = scores.table().records()[5]
    assert (first["layer"], first["head"]) == (1, 1)
    assert first["ahon"] == pytest.approx(scores["ahon"][:, 1, 1].mean().item())
    assert [r[0] for r in zeroable.table()] == sorted(zeroable.scores, key=lambda n: -zeroable.zeroable[n])
    assert len(scores.figure().data) == 1
    assert len(zeroable.figure().data) == 2
    assert len(comparison.figure().data) == 2
    for result in (scores, zeroable, comparison):
        assert str(result.table())
        json.dumps(jsonable(result.to_dict()), allow_nan=False)


# Errors


def test_errors_name_what_is_wrong():
    model, ids = build(), tokens(2, 8)
    left = torch.ones(2, 8, dtype=torch.long)
    left[0, :3] = 0
    hole = torch.ones(2, 8, dtype=torch.long)
    hole[0, 3] = 0
    with pytest.raises(InputError, match=r"'ahn'.*ahon_ln"):
        inactive_heads(model, [ids], which=("ahn",))
    with pytest.raises(InputError, match="no scores"):
        inactive_heads(model, [ids], which=())
    with pytest.raises(InputError, match="no batches"):
        inactive_heads(model, [])
    with pytest.raises(InputError, match="left"):
        inactive_heads(model, [{"input_ids": ids, "attention_mask": left}])
    with pytest.raises(InputError, match="pad on the right"):
        inactive_heads(model, [{"input_ids": ids, "attention_mask": hole}])
    with ablate_heads(model, "ahon", 1.0), pytest.raises(InputError, match="pad on the right"):
        model(ids, attention_mask=left)
    with pytest.raises(InputError, match="no attention was seen"):
        HeadScoreReducer().result()
    scores = inactive_heads(model, [ids], which=("ahon",))
    with pytest.raises(InputError, match="'awft' was not computed"):
        scores.thresholds("awft")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "not given"),
        ({"score": "ahon"}, "not given"),
        ({"score": "nothing", "tau": 1.0}, "'nothing'"),
        ({"score": "ahon", "tau": 1.0, "mask": torch.zeros(3, 4, dtype=torch.bool)}, "both"),
        ({"mask": torch.zeros(3, 5, dtype=torch.bool)}, r"give torch.bool \(3, 4\)"),
        ({"mask": torch.zeros(3, 4)}, "torch.float32"),
    ],
)
def test_errors_of_ablate_heads(arguments, message):
    with pytest.raises(InputError, match=message), ablate_heads(build(), **arguments):
        pass


def test_errors_of_the_functions_of_tensors():
    v = torch.ones(1, 1, 4, 3)
    with pytest.raises(InputError, match="o_slices"):
        head_scores(uniform_pattern(4), v, which=("ahon_full",))
    with pytest.raises(InputError, match="pattern is"):
        head_scores(uniform_pattern(5), v)
    with pytest.raises(InputError, match="cannot share"):
        head_scores(uniform_pattern(4).expand(1, 3, 4, 4), torch.ones(1, 2, 4, 3))
    with pytest.raises(InputError, match="direction"):
        thresholds(v, direction="<=")
    with pytest.raises(InputError, match="between 0 and 1"):
        thresholds(v, (5,))
    with pytest.raises(InputError, match="empty"):
        thresholds(torch.empty(0))
    with pytest.raises(InputError, match="not finite"):
        compare_scores(v, v * torch.nan)
    model = build()
    scores = inactive_heads(model, [tokens(1, 8)], which=("ahon",))
    with pytest.raises(InputError, match="tolerance"):
        zeroable_fraction(model, len, scores, tolerance=-1)
    with pytest.raises(InputError, match="better"):
        zeroable_fraction(model, len, scores, better="up")


def test_an_encoder_is_refused():
    config = BertConfig(vocab_size=60, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=32)
    with pytest.raises(NotApplicable, match="causal"):
        inactive_heads(BertModel(config).eval(), [tokens(1, 8)])


def test_the_twelve_scores_of_the_paper():
    assert len(SCORES) == 12
    assert {n for n, s in module._SCORES.items() if s.direction == ">"} == {"awft", "awft_ln"}


# The trial

SMALL = {"seeds": 1, "context": 32, "calibration": 6, "evaluation": 4}


def test_the_trial_runs_every_arm_on_disjoint_windows():
    data = TRIAL.prepare("builtin:tiny-lm", seed=0, budget=SMALL)
    assert data.planted == GROUND_TRUTH["zero_value_head"]
    rows = torch.cat([data.calibration, data.evaluation])
    assert len(rows.unique(dim=0)) == len(rows) == 10
    found = {arm.name: arm.run(data, seed=0, budget=SMALL) for arm in TRIAL.arms}
    assert all(set(measured) == {m.name for m in TRIAL.metrics} for measured in found.values())
    assert found["ahon_ln"]["planted"] == found["ahon"]["planted"] == 100
    assert found["awft"]["planted"] == 0
    again = TRIAL.prepare("builtin:tiny-lm", seed=0, budget=SMALL)
    assert torch.equal(data.evaluation, again.evaluation)
    assert TRIAL.arm("random").run(again, seed=0, budget=SMALL) == found["random"]
    other = TRIAL.prepare("builtin:tiny-lm", seed=1, budget=SMALL)
    assert not torch.equal(data.evaluation, other.evaluation)


def test_the_trial_takes_a_checkpoint_of_the_users():
    data = TRIAL.prepare(str(load()), seed=0, budget=SMALL)
    measured = TRIAL.arm("ahon_ln").run(data, seed=0, budget=SMALL)
    assert math.isnan(measured["planted"])
    assert math.isfinite(measured["zeroable"])


def test_the_trial_says_when_the_text_is_too_short():
    with pytest.raises(InputError, match="windows of 32 tokens"):
        TRIAL.prepare("builtin:tiny-lm", seed=0, budget=SMALL | {"calibration": 10**6})
