"""PM-KVQ: sensitivities, the allocation, the move of outliers to the queries, and the plan made of them."""

import copy
import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    DynamicCache,
    FalconConfig,
    FalconForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from assay.compress import (
    PmKvqResult,
    SmoothingResult,
    allocate_bits,
    bof4,
    kv_sensitivity,
    layer_bytes,
    pm_kvq,
    quantize_kv,
    smooth_keys,
)
from assay.compress import _pm_kvq as method
from assay.core.anatomy import anatomy
from assay.core.errors import InputError, NotApplicable
from assay.core.trace import Reducer, attach
from assay.reference import tiny_lm
from assay.reference._text import sample

SMALL = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2 = {"vocab_size": 60, "n_positions": 256, "n_embd": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.2}
NEOX = {k: v for k, v in SMALL.items() if k != "num_key_value_heads"}
FALCON = {
    "vocab_size": 60,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_kv_heads": 2,
    "new_decoder_architecture": True,
    "initializer_range": 0.3,
}


def made(kind, config, seed=0):
    torch.manual_seed(seed)
    model = kind(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            # Biases and norms begin at 0 and 1, where a forgotten factor would not show.
            p.add_(0.1 * torch.randn(p.shape))
    return model


def llama(**changes):
    return made(LlamaForCausalLM, LlamaConfig(**SMALL | changes))


MODELS = {
    "llama": llama,
    "llama with biases": lambda: llama(attention_bias=True),
    "one head a group": lambda: llama(num_key_value_heads=4),
    "qwen2": lambda: made(Qwen2ForCausalLM, Qwen2Config(**SMALL)),
    "qwen3": lambda: made(Qwen3ForCausalLM, Qwen3Config(**SMALL, head_dim=8)),
    "olmo2": lambda: made(Olmo2ForCausalLM, Olmo2Config(**SMALL)),
    "phi3": lambda: made(Phi3ForCausalLM, Phi3Config(**SMALL)),
    "gpt_neox": lambda: made(GPTNeoXForCausalLM, GPTNeoXConfig(**NEOX, rotary_pct=0.5)),
    "falcon": lambda: made(FalconForCausalLM, FalconConfig(**FALCON)),
    "gpt2": lambda: made(GPT2LMHeadModel, GPT2Config(**GPT2)),
}
every = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)


def tokens(batch=2, length=24, seed=0):
    return torch.randint(3, 60, (batch, length), generator=torch.Generator().manual_seed(seed))


# ---- sensitivity -------------------------------------------------------------------------------------------------


class _Spy(DynamicCache):
    """Keeps keys and values with their gradients."""

    def __init__(self):
        super().__init__()
        self.kept = []

    def update(self, keys, values, layer_idx, *args, **kwargs):
        keys.retain_grad()
        values.retain_grad()
        self.kept.append((keys, values))
        return keys, values


def by_hand(model, ids, bits):
    """The definition, with parameters' own graph and every gradient kept, sequence by sequence."""
    total = torch.zeros(2, dtype=torch.float64)
    for row in ids:
        spy = _Spy()
        logits = model(row[None], past_key_values=spy, use_cache=True).logits
        F.cross_entropy(logits[0, :-1], row[1:]).backward()
        for layer, pair in enumerate(spy.kept):
            total[layer] += sum(((x - quantize_kv(x, bits)) * x.grad).abs().mean().double().item() for x in pair)
    return total / len(ids)


@every
def test_sensitivity_is_its_definition(make):
    model = make()
    ids = tokens()
    found = kv_sensitivity(model, [ids], bits=(4, 2))
    for bits in (4, 2):
        torch.testing.assert_close(found[bits], by_hand(model, ids, bits), rtol=1e-3, atol=0)


def test_sequences_count_alike_in_any_batches(monkeypatch):
    model = llama()
    ids = tokens(6)
    whole = kv_sensitivity(model, [ids])
    parts = kv_sensitivity(model, [ids[:1], ids[1:4], ids[4:]])
    monkeypatch.setattr(method, "_LOGITS_BYTES", 4 * 60 * 6 * 5)
    sliced = kv_sensitivity(model, [ids])
    for bits in (8, 4, 2):
        torch.testing.assert_close(whole[bits], parts[bits], rtol=1e-4, atol=0)
        torch.testing.assert_close(whole[bits], sliced[bits], rtol=1e-4, atol=0)


def test_sensitivity_leaves_the_model_as_it_was():
    model = llama().train()
    model.model.embed_tokens.weight.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    kv_sensitivity(model, [tokens()])
    assert model.training
    assert not model.model.embed_tokens.weight.requires_grad
    assert model.lm_head.weight.requires_grad
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_sensitivity_falls_with_bits_and_repeats():
    model = llama()
    found = kv_sensitivity(model, [tokens()], bits=(16, 8, 4, 2))
    assert all((found[a] < found[b]).all() for a, b in itertools.pairwise((16, 8, 4, 2)))
    assert all(torch.equal(v, kv_sensitivity(model, [tokens()], bits=(b,))[b]) for b, v in found.items())


def test_sensitivity_under_no_grad_and_in_bfloat16():
    with torch.no_grad():
        exact = kv_sensitivity(llama(), [tokens()])
    coarse = kv_sensitivity(llama().bfloat16(), [tokens()])
    torch.testing.assert_close(coarse[2], exact[2], rtol=0.1, atol=0)


# ---- positions ---------------------------------------------------------------------------------------------------


def test_scale_one_is_plain_calibration_bit_for_bit():
    model = llama()
    plain = kv_sensitivity(model, [tokens()])
    first = kv_sensitivity(model, [tokens()], position_scale=1)
    assert all(torch.equal(plain[b], first[b]) for b in plain)


@pytest.mark.parametrize("scale", [2, 4])
def test_stretched_positions_are_faster_frequencies(scale):
    # Token t at position s·t turns as at position t with every frequency times s.
    model, fast = llama(), llama()
    fast.model.rotary_emb.inv_freq.mul_(scale)
    a = kv_sensitivity(model, [tokens()], position_scale=scale)
    b = kv_sensitivity(fast, [tokens()])
    assert not torch.allclose(a[2], kv_sensitivity(model, [tokens()])[2], rtol=1e-3)
    for bits in a:
        torch.testing.assert_close(a[bits], b[bits], rtol=1e-3, atol=0)
    moved, also = (smooth_keys(m, [tokens()], position_scale=s)[1] for m, s in ((model, scale), (fast, 1)))
    assert moved.alphas == also.alphas
    for x, y in zip(moved.factors, also.factors, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("call", [kv_sensitivity, smooth_keys])
@pytest.mark.parametrize(
    ("batches", "scale", "message"),
    [
        ([], 1, "there are no token batches"),
        ([torch.zeros(2, 8)], 1, "pass token ids"),
        ([torch.arange(8)], 1, "pass token ids"),
        ([torch.zeros(2, 1, dtype=torch.long)], 1, "at least 2 tokens"),
        ([[1, 2, 3]], 1, "a token batch is list"),
        ([tokens()], 0, "position_scale is 0"),
        ([tokens()], 1.5, "position_scale is 1.5"),
        ([tokens()], 90, "puts the last of 24 tokens at 2070, and the model has 2048 positions"),
    ],
)
def test_bad_calibration(call, batches, scale, message):
    with pytest.raises(InputError, match=message):
        call(llama(), batches, position_scale=scale)


@pytest.mark.parametrize(("bits", "message"), [((), "bits is empty"), ((0,), "bits has 0"), ((2.5,), "bits has 2.5")])
def test_bad_widths(bits, message):
    with pytest.raises(InputError, match=message):
        kv_sensitivity(llama(), [tokens()], bits=bits)


def test_encoders_are_refused():
    bert = BertForMaskedLM(BertConfig(vocab_size=60, hidden_size=32, num_hidden_layers=1, num_attention_heads=4))
    for call in (kv_sensitivity, smooth_keys):
        with pytest.raises(NotApplicable, match="this is an encoder"):
            call(bert, [tokens()])


# ---- allocation --------------------------------------------------------------------------------------------------


def best_by_trying(sensitivity, sizes, budget):
    widths = sorted(sizes)
    n_layers = len(sensitivity[widths[0]])
    allowed = [c for c in itertools.product(widths, repeat=n_layers) if sum(sizes[b] for b in c) <= budget]
    return min(sum(float(sensitivity[b][i]) for i, b in enumerate(c)) for c in allowed)


def test_four_layers_of_two_widths_match_the_best_of_sixteen():
    g = torch.Generator().manual_seed(0)
    sizes = {2: 100, 4: 200}
    for _ in range(20):
        four = torch.rand(4, generator=g)
        sensitivity = {2: four + torch.rand(4, generator=g), 4: four}
        for budget in (400, 500, 640, 700, 800):
            chosen = allocate_bits(sensitivity, sizes, budget)
            assert sum(sizes[b] for b in chosen) <= budget
            cost = sum(float(sensitivity[b][i]) for i, b in enumerate(chosen))
            assert cost == pytest.approx(best_by_trying(sensitivity, sizes, budget))


@given(
    rows=st.lists(st.tuples(*[st.floats(0, 1)] * 3), min_size=1, max_size=5),
    sizes=st.tuples(st.integers(1, 10**9), st.integers(1, 10**9), st.integers(1, 10**9)),
    share=st.floats(0, 1),
    power=st.integers(-30, 30),
)
def test_allocation_matches_trying_everything(rows, sizes, share, power):
    # Sizes in any order, and sensitivities that need not fall with bits: the best is the best all the same.
    values = torch.tensor(rows, dtype=torch.float64).T * 2.0**power
    sensitivity, sizes = dict(zip((2, 4, 8), values, strict=True)), dict(zip((2, 4, 8), sizes, strict=True))
    low, high = len(rows) * min(sizes.values()), len(rows) * max(sizes.values())
    budget = low + math.floor(share * (high - low))
    chosen = allocate_bits(sensitivity, sizes, budget)
    assert sum(sizes[b] for b in chosen) <= budget
    cost = sum(float(sensitivity[b][i]) for i, b in enumerate(chosen))
    # The solver's own tolerance is 1e-6 of the largest difference.
    assert cost == pytest.approx(best_by_trying(sensitivity, sizes, budget), abs=3e-6 * 2.0**power)


def test_enough_room_takes_the_best_and_no_room_says_so():
    sensitivity = {2: torch.tensor([2.0, 2.0]), 4: torch.tensor([1.0, 1.0])}
    assert allocate_bits(sensitivity, {2: 10, 4: 20}, math.inf) == (4, 4)
    assert allocate_bits(sensitivity, {2: 10, 4: 20}, 20) == (2, 2)
    with pytest.raises(InputError, match="the budget is 19 bytes and 2 layers at 2 bits take 20"):
        allocate_bits(sensitivity, {2: 10, 4: 20}, 19)
    with pytest.raises(InputError, match="the budget is nan"):
        allocate_bits(sensitivity, {2: 10, 4: 20}, math.nan)


@pytest.mark.parametrize(
    ("sensitivity", "sizes", "message"),
    [
        ({2: torch.ones(2)}, {2: 1, 4: 2}, r"names \[2, 4\]"),
        ({2: torch.ones(2)}, {}, "give at least one width"),
        ({2: torch.ones(2), 4: torch.ones(3)}, {2: 1, 4: 2}, "differs in length"),
        ({2: torch.ones(0)}, {2: 1}, "or is empty"),
        ({2: torch.tensor([1.0, math.nan])}, {2: 1}, "not finite everywhere"),
    ],
)
def test_bad_allocations(sensitivity, sizes, message):
    with pytest.raises(InputError, match=message):
        allocate_bits(sensitivity, sizes, 100)


# ---- from keys to queries ----------------------------------------------------------------------------------------


class _Views(Reducer):
    sites = ("attn",)

    def __init__(self):
        self.kept = {}

    def update(self, site, layer, value, batch):
        self.kept[layer] = value


def views(model, ids):
    seen = _Views()
    with torch.no_grad(), attach(model, [seen]):
        model(ids, use_cache=False)
    return seen.kept


@every
def test_the_move_leaves_scores_and_outputs_unchanged(make):
    model = make()
    ids = tokens(length=40)
    with torch.no_grad():
        before, logits = views(model, ids), model(ids).logits
        _, moved = smooth_keys(model, [tokens(seed=1)], position_scale=1)
        after = views(model, ids)
        torch.testing.assert_close(model(ids).logits, logits, rtol=1e-3, atol=1e-3)
    for layer, (factor, alpha) in enumerate(zip(moved.factors, moved.alphas, strict=True)):
        old, new = before[layer], after[layer]
        groups = old.q.shape[1] // old.k.shape[1]
        scores = [v.q @ v.k.repeat_interleave(groups, dim=1).mT * v.scaling for v in (old, new)]
        assert (scores[0] - scores[1]).abs().max() < 1e-4 * max(1.0, scores[0].abs().max().item())
        by = factor.repeat_interleave(old.k.shape[1] // len(factor), dim=0)[None, :, None]
        torch.testing.assert_close(new.k * by, old.k, rtol=1e-3, atol=1e-4)
        assert (alpha == 0) == bool((factor == 1).all())
    assert any(moved.alphas)


def test_scores_break_where_a_pair_does_not_share_its_factor():
    rotary = anatomy(llama()).blocks[0].attention.rotary
    g = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 64, 8, generator=g).unbind(0)
    position = torch.randint(0, 2000, (64,), generator=g)
    whole = rotary.rotate(q, position) @ rotary.rotate(k, position).mT

    def gap(factor):
        turned = rotary.rotate(q * factor, position) @ rotary.rotate(k / factor, position).mT
        return (turned - whole).abs().max().item()

    single = torch.rand(8, generator=g) + 0.5
    shared = single.clone()
    shared[rotary.pairs[:, 1]] = shared[rotary.pairs[:, 0]]
    assert gap(shared) < 1e-4
    assert gap(single) > 0.1


def test_pairs_and_heads_share_what_they_must():
    for make in (MODELS["llama"], MODELS["gpt_neox"], MODELS["qwen3"]):
        model = make()
        _, moved = smooth_keys(model, [tokens()])
        for block, factor in zip(anatomy(model).blocks, moved.factors, strict=True):
            first, second = block.attention.rotary.pairs.unbind(1)
            assert torch.equal(factor[:, first], factor[:, second])
            shared = block.attention.k_norm is not None
            assert shared == bool((factor == factor[0]).all()) or (factor == 1).all()


def test_an_outlying_channel_is_moved_and_the_error_falls():
    model = llama()
    with torch.no_grad():
        # A pair whose keys are thirty times the others, and whose queries are as much smaller.
        for rows, by in ((slice(1, 32, 8), 1 / 30), (slice(5, 32, 8), 1 / 30)):
            model.model.layers[0].self_attn.q_proj.weight[rows] *= by
        for rows in (slice(1, 16, 8), slice(5, 16, 8)):
            model.model.layers[0].self_attn.k_proj.weight[rows] *= 30
    _, moved = smooth_keys(model, [tokens()], position_scale=1)
    assert moved.alphas[0] > 0.5
    assert moved.error_after[0] < 0.1 * moved.error_before[0]
    by_size = moved.factors[0].argsort(dim=1)[:, -2:].sort().values
    assert by_size.tolist() == [[1, 5], [1, 5]]
    # Nothing is left to gain by moving again as far.
    _, again = smooth_keys(model, [tokens()], position_scale=1)
    assert again.error_before[0] == pytest.approx(moved.error_after[0], rel=1e-3)


def test_the_search_measures_the_output_of_the_attention_module():
    model = llama(attention_bias=True)
    ids = tokens()
    seen = views(model, ids)[0]
    _, moved = smooth_keys(copy.deepcopy(model), [ids], position_scale=1)
    attention = anatomy(model).blocks[0].attention

    def out(k, v):
        k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
        scores = (seen.q @ k.mT * seen.scaling).masked_fill(torch.ones(24, 24).triu(1).bool(), -math.inf)
        return attention.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))

    with torch.no_grad():
        gap = out(quantize_kv(seen.k, 4), quantize_kv(seen.v, 4)) - out(seen.k, seen.v)
    assert moved.error_before[0] == pytest.approx(gap.square().mean().item(), rel=1e-3)


def test_no_layer_gets_worse_on_its_calibration_text():
    for seed in range(3):
        _, moved = smooth_keys(made(LlamaForCausalLM, LlamaConfig(**SMALL), seed), [tokens(seed=seed)])
        assert all(a <= b for a, b in zip(moved.error_after, moved.error_before, strict=True))
        assert set(moved.alphas) <= {i / 20 for i in range(21)}


def test_moving_repeats_and_does_not_depend_on_batches():
    ids = tokens(4)
    (_, a), (_, b), (_, c) = (smooth_keys(llama(), batches) for batches in ([ids], [ids], [ids[:1], ids[1:]]))
    assert a.to_dict() == b.to_dict()
    assert a.alphas == c.alphas
    assert a.error_before == pytest.approx(c.error_before, rel=1e-4)


def test_a_dimension_without_keys_stays():
    model = llama()
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight[[0, 4]] = 0
    _, moved = smooth_keys(model, [tokens()])
    assert moved.factors[0][0, [0, 4]].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: made(Gemma2ForCausalLM, Gemma2Config(**SMALL, head_dim=8)), "soft-caps its scores"),
        (lambda: made(Gemma3ForCausalLM, Gemma3TextConfig(**SMALL, head_dim=8)), "does not multiply by its weight"),
        (
            lambda: made(OlmoeForCausalLM, OlmoeConfig(**SMALL, clip_qkv=1.0, num_experts=2, num_experts_per_tok=1)),
            "clamps its queries",
        ),
        (lambda: bof4(llama(), skip=("lm_head",))[0], "before the weights are quantised"),
    ],
)
def test_what_cannot_be_moved_is_refused(make, message):
    model = make()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(NotApplicable, match=message):
        smooth_keys(model, [tokens()])
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_weights_beyond_their_type_are_refused_and_nothing_is_changed():
    model = llama().half()
    with torch.no_grad():
        layer = model.model.layers[1].self_attn
        layer.q_proj.weight.fill_(3e4)
        layer.k_proj.weight[:, 0] = 50
    before = copy.deepcopy(model.state_dict())
    factors = [torch.ones(2, 8), torch.full((2, 8), 10.0)]
    with pytest.raises(InputError, match=r"would leave the range of torch\.float16"):
        method._move(anatomy(model), factors)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_grid_must_be_a_number():
    with pytest.raises(InputError, match="grid is 0"):
        smooth_keys(llama(), [tokens()], grid=0)


# ---- the plan ----------------------------------------------------------------------------------------------------


def plan_for(model, tokens_long=200, mixed=(2, 4), **options):
    budget = sum(layer_bytes(model.config, tokens_long, b, window=16) for b in mixed)
    return pm_kvq(model, [tokens()], max_tokens=tokens_long, budget_bytes=budget, window=16, **options)


def test_the_plan_gives_the_more_sensitive_layer_more_bits_and_fits():
    model, plan = plan_for(llama())
    gain = plan.sensitivity[2] - plan.sensitivity[4]
    assert plan.bits[int(gain.argmax())] == 4
    assert sorted(plan.bits) == [2, 4]
    assert plan.total_bytes == sum(plan.budgets) <= plan.budget_bytes
    cache = plan.cache(model.config)
    out = model.generate(tokens(1), past_key_values=cache, max_length=200, min_length=200, do_sample=False)
    assert out.shape == (1, 200)
    assert cache.bits == plan.bits
    assert cache.nbytes <= plan.total_bytes
    assert cache.capacity >= 200


def test_the_plan_counts_codes_alone_where_asked():
    model = llama()
    budget = 2 * layer_bytes(model.config, 200, 2, window=16, count_scales=False)
    options = {"max_tokens": 200, "window": 16, "smooth": False}
    _, plan = pm_kvq(model, [tokens()], budget_bytes=budget, count_scales=False, **options)
    assert plan.bits == (2, 2)
    assert plan.cache(model.config).capacity >= 200
    with pytest.raises(InputError, match="give more bytes, fewer tokens or a smaller width"):
        pm_kvq(model, [tokens()], budget_bytes=budget, **options)


def test_short_sequences_get_room_for_the_window():
    model, plan = plan_for(llama(), tokens_long=5)
    plan.cache(model.config)


def test_an_error_leaves_the_weights(monkeypatch):
    model = llama()
    before = copy.deepcopy(model.state_dict())

    def fail(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(method, "kv_sensitivity", fail)
    with pytest.raises(KeyboardInterrupt):
        plan_for(model)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_without_smoothing_the_weights_stay():
    model = llama()
    before = copy.deepcopy(model.state_dict())
    _, plan = plan_for(model, smooth=False)
    assert plan.smoothing is None
    assert plan.table().records()[0]["alpha"] is None
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"choices": (3,)}, "name widths of 16, 8, 4, 2 and 1"),
        ({"choices": ()}, "name widths"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"budget_bytes": 10}, "the budget is 10 bytes"),
        ({"window": 0}, "window is 0"),
        ({"group": 3}, "use a divisor"),
    ],
)
def test_bad_plans_are_told_before_any_calibration(options, message):
    def never():
        raise AssertionError("calibrated")
        yield

    with pytest.raises(InputError, match=message):
        pm_kvq(llama(), never(), **{"max_tokens": 100, "budget_bytes": 1e9} | options)


def test_results_print_draw_and_save():
    _, plan = plan_for(llama())
    assert isinstance(plan, PmKvqResult)
    assert isinstance(plan.smoothing, SmoothingResult)
    for result in (plan, plan.smoothing):
        assert len(result.table()) == 2
        assert str(result.table())
        assert result.figure().data
    assert plan.to_dict()["smoothing"]["alphas"] == list(plan.smoothing.alphas)


def test_on_the_built_in_model_widths_that_are_chosen_cost_less_than_their_opposite():
    from transformers import AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tiny_lm.load())
    ids = AutoTokenizer.from_pretrained(tiny_lm.load())(sample()[:6000])["input_ids"]
    batch = torch.tensor(ids[:1024]).view(16, 64)
    budget = sum(layer_bytes(model.config, 256, b, window=16) for b in (2, 2, 4, 4))
    _, plan = pm_kvq(model, [batch], max_tokens=256, budget_bytes=budget, window=16)

    def total(bits):
        return sum(float(plan.sensitivity[b][i]) for i, b in enumerate(bits))

    assert sorted(plan.bits) == [2, 2, 4, 4]
    assert total(plan.bits) < total([6 - b for b in plan.bits])
