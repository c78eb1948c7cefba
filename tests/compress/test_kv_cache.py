"""The shrinking cache: the quantiser, the exact step to half the width, storage, budgets, and `generate`."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MistralConfig

from assay.compress import CacheFull, ProgressiveKVCache, layer_bytes, quantize_kv, shrink_codes
from assay.compress._kv_cache import decode, encode
from assay.core.errors import InputError, NotApplicable

INF = [math.inf] * 2


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def llama(**changes):
    settings = {
        "vocab_size": 60,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.3,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": None,
    }
    return LlamaConfig(**settings | changes)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return LlamaForCausalLM(llama()).eval()


def feed(cache, x, steps, layers=(0, 1)):
    """Give keys and values of `x`, [2, batch, heads, tokens, width], in pieces; what the last call returned."""
    for piece in x.split(steps, dim=3):
        for layer in layers:
            out = cache.update(piece[0], piece[1], layer)
    return torch.stack(out)


# ---- the step to half the width ----------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_shrinking_is_rounded_division_for_every_code(bits):
    x = torch.arange(4**bits)
    expected = torch.div(2 * x + 2**bits + 1, 2 * (2**bits + 1), rounding_mode="floor")
    assert torch.equal(shrink_codes(x, bits).long(), expected)
    # The multiplier of the shift is the inverse of 2^bits + 1, up to one in 8^bits.
    assert (4**bits - 2**bits + 1) * (2**bits + 1) == 8**bits + 1


def test_known_table_of_two_bits():
    assert shrink_codes(torch.arange(16), 2).tolist() == [0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 3, 3, 3]


def test_known_codes_of_four_bits():
    x = torch.tensor([8, 9, 127, 128, 200, 246, 247, 255])
    assert shrink_codes(x, 4).tolist() == [0, 1, 7, 8, 12, 14, 15, 15]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_shrinking_takes_any_integers_and_any_layout(dtype):
    x = torch.arange(16, dtype=dtype).view(4, 4)
    before = x.clone()
    assert torch.equal(shrink_codes(x.T, 2), shrink_codes(x, 2).T)
    assert torch.equal(x, before)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_shrunk_codes_are_those_of_rounding_at_once(bits):
    # The border between two codes is half-way on both grids, for 2^bits + 1 is odd; so double rounding changes nothing.
    x = normal(200, 128, dtype=torch.float64)
    codes, scale, zero = encode(x, 16, 128)
    for width in (8, 4, 2, 1):
        if width >= bits:
            codes, scale = shrink_codes(codes, width), scale * (2**width + 1)
    fresh, fresh_scale, fresh_zero = encode(x, bits, 128)
    assert torch.equal(codes, fresh)
    torch.testing.assert_close(scale, fresh_scale, rtol=1e-13, atol=0)
    assert torch.equal(zero, fresh_zero)


def gaussian_groups():
    return torch.from_numpy(np.random.default_rng(0).standard_normal((2000, 128))).float()


@pytest.mark.parametrize(("bits", "mse", "naive"), [(4, 0.0100, 0.0360), (2, 0.2514, 0.5760)])
def test_known_errors_of_gaussian_groups(bits, mse, naive):
    x = gaussian_groups()
    codes, scale, zero = encode(x, 16, 128)
    coarse, grown = codes, scale
    for width in (8, 4, 2):
        if width >= bits:
            coarse, grown = shrink_codes(coarse, width), grown * (2**width + 1)
    assert (decode(coarse, grown, zero) - x).square().mean().item() == pytest.approx(mse, abs=5e-5)
    assert (quantize_kv(x, bits) - x).square().mean().item() == pytest.approx(mse, abs=5e-5)
    shifted = decode(codes >> (16 - bits), scale * 2 ** (16 - bits), zero)
    assert (shifted - x).square().mean().item() == pytest.approx(naive, abs=5e-5)


@pytest.mark.parametrize("bits", [3, 16, 0])
def test_there_are_four_widths_to_shrink_to(bits):
    with pytest.raises(InputError, match="codes shrink to 8, 4, 2 or 1 bits"):
        shrink_codes(torch.arange(4), bits)


def test_codes_must_be_integers():
    with pytest.raises(InputError, match="pass integers"):
        shrink_codes(torch.zeros(3), 2)


# ---- the quantiser -----------------------------------------------------------------------------------------------


@given(
    bits=st.integers(1, 16),
    group=st.sampled_from([1, 2, 4, 8, 64]),
    power=st.integers(-20, 20),
    seed=st.integers(0, 99),
)
def test_error_is_at_most_half_a_step_and_ends_are_kept(bits, group, power, seed):
    x = normal(3, 8, seed=seed, dtype=torch.float64) * 2.0**power
    parts = x.unflatten(-1, (-1, min(group, 8)))
    out = quantize_kv(x, bits, group).view_as(parts)
    step = (parts.amax(-1) - parts.amin(-1)) / (2**bits - 1)
    assert ((out - parts).abs() <= step[..., None] * (0.5 + 1e-9) + 1e-300).all()
    torch.testing.assert_close(out.amin(-1), parts.amin(-1))
    torch.testing.assert_close(out.amax(-1), parts.amax(-1))


def test_small_ranges_are_not_coarsened():
    # A floor of 1e-5 under the scale would leave 8 codes for a range of 1e-4 at 16 bits.
    x = 1e-4 * torch.rand(64, generator=torch.Generator().manual_seed(0))
    assert (quantize_kv(x, 16) - x).abs().max() < 1e-8


def test_group_without_range_is_exact():
    codes, _, _ = encode(torch.full((2, 8), -3.7), 16, 8)
    assert not codes.any()
    for value in (-3.7, 0.0, 1e30):
        assert torch.equal(quantize_kv(torch.full((2, 8), value), 2), torch.full((2, 8), value))


def test_scaling_and_shifting_go_through_the_quantiser():
    x = normal(4, 32, dtype=torch.float64)
    torch.testing.assert_close(quantize_kv(3 * x - 7, 4), 3 * quantize_kv(x, 4) - 7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_types_are_kept(dtype):
    x = normal(5, 16).to(dtype)
    out = quantize_kv(x, 4)
    assert out.dtype == dtype
    torch.testing.assert_close(out, quantize_kv(x.double(), 4).to(dtype), rtol=1e-2, atol=1e-2)


def test_strides_do_not_matter():
    x = normal(16, 6)
    assert torch.equal(quantize_kv(x.T, 3), quantize_kv(x.T.contiguous(), 3))


@pytest.mark.parametrize(
    ("x", "bits", "group", "message"),
    [
        (torch.arange(4), 2, 4, "pass floating-point keys or values"),
        ([1.0], 2, 4, "x is list"),
        (torch.zeros(4), 0, 4, "bits is 0"),
        (torch.zeros(4), 17, 4, "bits is 17"),
        (torch.zeros(4), 2.0, 4, "bits is 2.0"),
        (torch.zeros(4), 2, 0, "group is 0"),
        (torch.zeros(192), 2, 128, "use a divisor, say 96"),
        (torch.tensor([1.0, math.nan]), 2, 2, "x has non-finite entries"),
    ],
)
def test_bad_input_of_the_quantiser(x, bits, group, message):
    with pytest.raises(InputError, match=message):
        quantize_kv(x, bits, group)


def test_nothing_in_nothing_out():
    assert quantize_kv(torch.zeros(0, 8), 4).shape == (0, 8)


# ---- storage and budgets -----------------------------------------------------------------------------------------


def test_new_tokens_are_returned_as_they_came_and_the_past_as_it_decodes():
    x = normal(2, 1, 2, 30, 8)
    cache = ProgressiveKVCache(llama(), INF, sink=1, window=8)
    first = feed(cache, x[:, :, :, :20], 20)
    assert torch.equal(first, x[:, :, :, :20])
    out = feed(cache, x[:, :, :, 20:], 10)
    assert torch.equal(out[:, :, :, 20:], x[:, :, :, 20:])
    assert torch.equal(out[:, :, :, :20], quantize_kv(x[:, :, :, :20], 16))


@pytest.mark.parametrize("bits", [16, 8, 4, 2, 1])
@pytest.mark.parametrize("steps", [1, 7, 50])
def test_what_is_stored_is_the_rounded_past_however_it_came(bits, steps):
    x = normal(2, 3, 2, 50, 8)
    cache = ProgressiveKVCache(llama(), INF, sink=2, window=8, start_bits=bits, min_bits=1)
    feed(cache, x, steps)
    out = feed(cache, torch.zeros(2, 3, 2, 1, 8), 1)[:, :, :, :50]
    # 2 in the sink, 48 in six windows, all of which have left.
    assert torch.equal(out[:, :, :, :2], quantize_kv(x[:, :, :, :2], 16))
    torch.testing.assert_close(out[:, :, :, 2:], quantize_kv(x[:, :, :, 2:], bits), rtol=1e-5, atol=1e-5)


def test_widths_fall_only_when_the_budget_makes_them():
    config = llama()
    budget = layer_bytes(config, 100, 4, window=8)
    cache = ProgressiveKVCache(config, [budget, math.inf], window=8)
    x = normal(2, 1, 2, 100, 8)
    seen = []
    for piece in x.split(1, dim=3):
        feed(cache, piece, 1)
        seen.append(cache.bits)
        stored = sum(t.untyped_storage().nbytes() for r in cache.layers[0].regions for t in r.tensors)
        assert stored <= budget
    firsts = [seen.index((b, 16)) for b in (16, 8, 4)]
    assert firsts == sorted(firsts)
    assert firsts[1] > 20
    assert cache.bits == (4, 16)
    # It did not shrink before it had to: at the step before, the wider codes still fitted.
    size = cache.layers[0].size
    for narrow, wide in ((8, 16), (4, 8)):
        tokens = seen.index((narrow, 16)) + 1
        late = (tokens - 1) % 8
        assert size(1 + late, tokens - 1 - late, wide) > budget


def test_progressive_shrinking_ends_where_rounding_at_once_ends():
    config = llama()
    x = normal(2, 2, 2, 80, 8)
    budgets = [layer_bytes(config, 81, 2, window=8)] * 2
    slow, fast = (ProgressiveKVCache(config, budgets, window=8, start_bits=b) for b in (16, 2))
    a, b = feed(slow, x, 1), feed(fast, x, 1)
    assert slow.bits == fast.bits == (2, 2)
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("count_scales", [True, False])
@pytest.mark.parametrize(("heads", "width", "group"), [(2, 8, 128), (1, 20, 5), (4, 6, 3)])
def test_bytes_are_counted_as_they_are_held(heads, width, group, count_scales):
    config = llama(num_attention_heads=4, num_key_value_heads=heads, head_dim=width)
    options = {"window": 8, "group": group, "count_scales": count_scales}
    for bits in (16, 8, 4, 2, 1):
        cache = ProgressiveKVCache(config, INF, start_bits=bits, min_bits=1, **options)
        feed(cache, normal(2, 1, heads, 1 + 5 * 8 + 7, width), 1)
        held = cache.nbytes if count_scales else cache.code_bytes
        # One token less at 16 bits than the window can hold.
        a_token = layer_bytes(config, 1, 16, **options)
        assert held == 2 * (layer_bytes(config, 1 + 5 * 8 + 8, bits, **options) - a_token)


@pytest.mark.parametrize("sink", [0, 1, 3])
@pytest.mark.parametrize("extra", [0, 100, 777, 2000])
def test_capacity_is_where_it_becomes_full(sink, extra):
    config = llama()
    budget = layer_bytes(config, sink + 8, 16, sink=sink, window=8) + extra
    cache = ProgressiveKVCache(config, [budget] * 2, sink=sink, window=8)
    token = torch.zeros(2, 1, 2, 1, 8)
    with pytest.raises(CacheFull):
        feed(cache, token.expand(-1, -1, -1, 10_000, -1), 1)
    assert cache.get_seq_length() == cache.capacity


def test_a_budget_for_so_many_tokens_holds_so_many():
    config = llama()
    for tokens, bits in itertools.product((9, 20, 64, 101), (16, 8, 4, 2)):
        budget = layer_bytes(config, tokens, bits, window=8)
        cache = ProgressiveKVCache(config, [budget] * 2, window=8, min_bits=bits, start_bits=16)
        assert cache.capacity >= tokens
        feed(cache, normal(2, 1, 2, tokens, 8), 1)


def test_full_cache_says_so_and_is_unchanged():
    config = llama()
    roomy, tight = layer_bytes(config, 900, 2, window=8), layer_bytes(config, 40, 2, window=8)
    cache = ProgressiveKVCache(config, [roomy, tight], window=8)
    feed(cache, normal(2, 1, 2, 40, 8), 1)
    held, bits = cache.nbytes, cache.bits
    message = r"layer 1 of the cache needs [\d,]+ bytes for 100 tokens at 2 bits and has a budget of [\d,]+"
    with pytest.raises(CacheFull, match=message) as caught:
        cache.update(torch.zeros(1, 2, 60, 8), torch.zeros(1, 2, 60, 8), 0)
    assert isinstance(caught.value, MemoryError)
    assert (cache.nbytes, cache.bits, cache.get_seq_length(0)) == (held, bits, 40)


def test_budget_must_hold_what_never_shrinks():
    config = llama()
    least = layer_bytes(config, 129, 16)
    ProgressiveKVCache(config, [least] * 2)
    with pytest.raises(InputError, match=r"the budget of layer 1 is .* the 129 tokens that stay at 16 bits take"):
        ProgressiveKVCache(config, [least, least - 1])


@pytest.mark.parametrize(
    ("budgets", "options", "message"),
    [
        ([1e9], {}, "budgets has 1 entries and the model has 2 layers"),
        (INF, {"start_bits": [16]}, "start_bits has 1 entries"),
        (INF, {"start_bits": 3}, "use 16, 8, 4, 2 or 1"),
        (INF, {"start_bits": 2, "min_bits": 4}, "the start not below"),
        (INF, {"sink": -1}, "sink is -1"),
        (INF, {"window": 0}, "window is 0"),
        (INF, {"group": 3}, "use a divisor, say 2"),
        ([math.nan, 1e9], {}, "the budget of layer 0 is nan"),
    ],
)
def test_bad_options(budgets, options, message):
    with pytest.raises(InputError, match=message):
        ProgressiveKVCache(llama(), budgets, **options)


def test_layers_that_forget_are_refused():
    with pytest.raises(NotApplicable, match="layers of sliding_attention"):
        ProgressiveKVCache(MistralConfig(num_hidden_layers=2, sliding_window=64), INF)


def test_other_shapes_and_batches_are_refused():
    cache = ProgressiveKVCache(llama(), INF)
    with pytest.raises(InputError, match="values of layer 0 have 2 heads of width 9"):
        cache.update(torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 9), 0)
    cache.update(torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 8), 0)
    with pytest.raises(InputError, match=r"the batch has 4 rows and the cache holds 1: call reset"):
        cache.update(torch.zeros(4, 2, 3, 8), torch.zeros(4, 2, 3, 8), 0)


@pytest.mark.parametrize("removed", [1, 5, 30, 48, 49, 50])
def test_crop_removes_from_the_end(removed):
    x = normal(2, 2, 2, 50, 8)
    cache = ProgressiveKVCache(llama(), INF, window=8, start_bits=4)
    whole = ProgressiveKVCache(llama(), INF, window=8, start_bits=4)
    feed(cache, x, 50)
    feed(whole, x, 50)
    cache.crop(-removed)
    assert cache.get_seq_length() == 50 - removed
    new = normal(2, 2, 2, 1, 8, seed=1)
    out, expected = feed(cache, new, 1), feed(whole, new, 1)
    assert torch.equal(out[:, :, :, : 50 - removed], expected[:, :, :, : 50 - removed])
    assert out.shape[3] == 51 - removed
    feed(cache, x, 3)
    assert cache.get_seq_length() == 101 - removed


def test_crop_wants_a_negative_number_and_is_not_a_rollback():
    cache = ProgressiveKVCache(llama(), INF)
    assert not cache.is_croppable
    with pytest.raises(InputError, match="as a negative number"):
        cache.crop(3)


def test_reset_begins_again_at_the_first_width():
    config = llama()
    cache = ProgressiveKVCache(config, [layer_bytes(config, 60, 2, window=8)] * 2, window=8)
    x = normal(2, 1, 2, 60, 8)
    first = feed(cache, x, 1)
    assert cache.bits == (2, 2)
    cache.reset()
    assert (cache.bits, cache.nbytes, cache.get_seq_length()) == ((16, 16), 0, 0)
    assert torch.equal(feed(cache, x, 1), first)
    cache.reset()
    feed(cache, normal(2, 5, 2, 3, 8), 1)


def test_rows_of_the_batch_follow_beams():
    x = normal(2, 3, 2, 40, 8)
    order = torch.tensor([2, 0, 0])
    moved, other = (ProgressiveKVCache(llama(), INF, window=8, start_bits=4) for _ in range(2))
    feed(moved, x, 40)
    feed(other, x[:, order], 40)
    moved.reorder_cache(order)
    new = normal(2, 3, 2, 1, 8, seed=1)
    assert torch.equal(feed(moved, new, 1), feed(other, new, 1))
    moved.batch_repeat_interleave(2)
    moved.batch_select_indices(torch.tensor([0, 2, 4]))
    assert torch.equal(feed(moved, new, 1), feed(other, new, 1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_type_of_the_model_is_returned(dtype):
    x = normal(2, 1, 2, 20, 8).to(dtype)
    cache = ProgressiveKVCache(llama(), INF, window=8, start_bits=8)
    out = feed(cache, x, 1)
    assert out.dtype == dtype
    assert cache.layers[0].sink.scale.dtype == torch.float32
    # A step of 8 bits, and the type's own rounding.
    assert (out - x).abs().max() < 0.03


def test_non_contiguous_keys_are_stored_alike():
    x = normal(2, 1, 20, 2, 8).transpose(2, 3)
    a, b = (ProgressiveKVCache(llama(), INF, window=8, start_bits=4) for _ in range(2))
    assert torch.equal(feed(a, x, 3), feed(b, x.contiguous(), 3))


# ---- generation --------------------------------------------------------------------------------------------------


def test_at_sixteen_bits_it_generates_what_the_plain_cache_generates(model):
    prompt = torch.randint(1, 60, (3, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(prompt)
    mask[1, :5] = 0
    prompt[1, :5] = 0
    options = {"attention_mask": mask, "max_new_tokens": 40, "do_sample": False}
    plain = model.generate(prompt, **options)
    cache = ProgressiveKVCache(model.config, INF, window=8)
    assert torch.equal(model.generate(prompt, past_key_values=cache, **options), plain)
    assert cache.get_seq_length() == plain.shape[1] - 1
    assert cache.get_mask_sizes(1, 0) == (plain.shape[1], 0)


def test_beam_search_follows_the_plain_cache(model):
    prompt = torch.randint(1, 60, (2, 9), generator=torch.Generator().manual_seed(2))
    options = {"max_new_tokens": 20, "num_beams": 3, "do_sample": False}
    plain = model.generate(prompt, **options)
    cache = ProgressiveKVCache(model.config, INF, window=4)
    assert torch.equal(model.generate(prompt, past_key_values=cache, **options), plain)


def test_generation_within_a_budget_shrinks(model):
    budget = layer_bytes(model.config, 70, 2, window=8)
    cache = ProgressiveKVCache(model.config, [budget] * 2, window=8)
    prompt = torch.randint(1, 60, (1, 20), generator=torch.Generator().manual_seed(3))
    out = model.generate(prompt, past_key_values=cache, max_length=70, do_sample=False)
    assert out.shape[1] == 70
    assert cache.bits == (2, 2)
    assert cache.nbytes <= 2 * budget


def test_logits_move_less_with_more_bits(model):
    ids = torch.randint(1, 60, (2, 60), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        exact = model(ids).logits[:, -1]

        def gap(bits):
            cache = ProgressiveKVCache(model.config, INF, window=8, start_bits=bits, min_bits=1)
            model(ids[:, :-1], past_key_values=cache)
            return (model(ids[:, -1:], past_key_values=cache).logits[:, 0] - exact).abs().max().item()

        gaps = [gap(bits) for bits in (16, 8, 4, 1)]
    assert gaps[0] < 1e-3
    assert gaps == sorted(gaps)


def test_a_model_without_rotary_embedding_can_use_it():
    torch.manual_seed(0)
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_positions=64, n_embd=24, n_layer=2, n_head=3)).eval()
    prompt = torch.arange(1, 11)[None]
    options = {"max_new_tokens": 30, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    cache = ProgressiveKVCache(gpt2.config, INF, window=8)
    assert torch.equal(gpt2.generate(prompt, past_key_values=cache, **options), gpt2.generate(prompt, **options))


def test_it_holds_less_than_the_plain_cache(model):
    ids = torch.randint(1, 60, (2, 200), generator=torch.Generator().manual_seed(5))
    plain = DynamicCache(config=model.config)
    cache = ProgressiveKVCache(model.config, [layer_bytes(model.config, 200, 2, window=8)] * 2, window=8)
    with torch.no_grad():
        for c in (plain, cache):
            model(ids, past_key_values=c)
    held = sum(t.untyped_storage().nbytes() for layer in plain.layers for t in (layer.keys, layer.values))
    # Heads of 8: 2 bytes of codes and 8 of constants for 32 bytes in float32.
    assert cache.nbytes < 0.4 * held
    assert cache.code_bytes < 0.12 * held
