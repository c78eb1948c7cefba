import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from assay.core.errors import InputError
from assay.models import (
    GatedLinearAttention,
    SelectiveRoPE,
    SelectiveRoPECache,
    SoftmaxAttention,
    rfa_temperature,
    rope_temperature,
)
from assay.models._linear_attention import gated_linear_attention
from assay.models._selective_rope import _running_angle
from assay.reference.sequences import load
from assay.trials.models.selective_rope import TRIAL, prepare


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64).to(dtype)


def build(cls, *args, seed=0, **options):
    torch.manual_seed(seed)
    return cls(*args, **options)


def set_constant_phase(rope, value):
    """Make every phase `value`: no contribution from the input, and a drift of log(value)."""
    with torch.no_grad():
        rope.phase_out.weight.zero_()
        rope.log_drift.fill_(math.log(value))


def plain_rope(x, positions, base):
    """Half-split RoPE written with complex numbers."""
    r = x.shape[-1] // 2
    frequency = base ** (-torch.arange(r, dtype=torch.float64) * 2 / x.shape[-1])
    turn = torch.polar(torch.ones(len(positions), r, dtype=torch.float64), positions[:, None] * frequency)
    turned = torch.complex(x[..., :r], x[..., r:]) * turn[:, None]
    return torch.cat([turned.real, turned.imag], -1)


def token_loop(q, k, v, g):
    """The recurrence as it is written, one token at a time."""
    state = torch.zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3], dtype=q.dtype)
    outs = []
    for t in range(q.shape[1]):
        state = state * g[:, t].exp().unsqueeze(-1) + k[:, t].unsqueeze(-1) * v[:, t].unsqueeze(-2)
        outs.append((q[:, t].unsqueeze(-1) * state).sum(-2))
    return torch.stack(outs, 1), state


# Known values


@pytest.fixture(scope="module")
def parity():
    """Layer, tokens and answers of the construction that counts bits in half turns."""
    rope = SelectiveRoPE(2, 1, 2, rank=None, conv=1, base=1.0).double()
    with torch.no_grad():
        rope.phase_weight.copy_(torch.tensor([[[0.0], [1.0]]]))
        rope.phase_scale.fill_(math.pi)
        rope.conv_weight.fill_(1.0)
    task = load(task="parity", length=10_000, n=2, seed=0)
    return rope, torch.from_numpy(task.tokens), torch.from_numpy(task.targets)


def test_parity_by_construction_at_length_ten_thousand(parity):
    rope, tokens, answers = parity
    # A one is the second unit vector, zero and the start token are the first.
    hidden = F.one_hot((tokens == 1).long(), 2).double()
    q = torch.tensor([1.0, 0.0], dtype=torch.float64).expand(*tokens.shape, 1, 2)
    v = (tokens == 2).double()[..., None, None]
    q_rot, k_rot, _ = rope(q, q, hidden)
    out, _ = gated_linear_attention(q_rot, k_rot, v)
    expected = 1.0 - 2.0 * answers
    assert (out[..., 0, 0] - expected).abs().max() < 1e-9


def test_fixed_angles_cannot_do_that_parity(parity):
    _, tokens, answers = parity
    q = torch.tensor([1.0, 0.0], dtype=torch.float64).expand(*tokens.shape, 1, 2)
    turned = plain_rope(q, torch.arange(tokens.shape[1], dtype=torch.float64), 1.0)
    out, _ = gated_linear_attention(turned, turned, (tokens == 2).double()[..., None, None])
    right = ((out[..., 0, 0] < 0).long() == answers).double().mean()
    assert abs(float(right) - 0.5) < 0.03


def test_constant_phase_is_rope_at_positions_from_one():
    rope = build(SelectiveRoPE, 24, 3, 8, bias=True, base=10_000.0).double()
    set_constant_phase(rope, 1.0)
    q, k, hidden = (randn(2, 40, *s, seed=i, dtype=torch.float64) for i, s in enumerate(((3, 8), (3, 8), (24,))))
    q_rot, k_rot, _ = rope(q, k, hidden)
    positions = torch.arange(1, 41, dtype=torch.float64)
    torch.testing.assert_close(q_rot, plain_rope(q, positions, 10_000.0), rtol=0, atol=1e-12)
    scores = torch.einsum("bthd,bshd->bhts", q_rot, k_rot)
    q0, k0 = plain_rope(q, positions - 1, 10_000.0), plain_rope(k, positions - 1, 10_000.0)
    torch.testing.assert_close(scores, torch.einsum("bthd,bshd->bhts", q0, k0), rtol=0, atol=1e-12)


def test_zero_phase_is_the_identity():
    rope = build(SelectiveRoPE, 16, 2, 8)
    torch.nn.init.zeros_(rope.phase_out.weight)
    q, k = randn(2, 9, 2, 8), randn(2, 9, 2, 8, seed=1)
    q_rot, k_rot, _ = rope(q, k, randn(2, 9, 16, seed=2))
    assert torch.equal(q_rot, q)
    assert torch.equal(k_rot, k)


def test_norms_are_kept():
    rope = build(SelectiveRoPE, 16, 2, 8, init_scale=3.0)
    q = randn(2, 300, 2, 8)
    q_rot, _, _ = rope(q, q, randn(2, 300, 16, seed=2))
    assert not torch.allclose(q_rot, q)
    ratio = q_rot.norm(dim=-1) / q.norm(dim=-1)
    assert (ratio - 1).abs().max() < 1e-6


def test_scores_ignore_a_constant_added_to_all_angles():
    rope = build(SelectiveRoPE, 16, 2, 8).double()
    q, k, hidden = randn(1, 12, 2, 8), randn(1, 12, 2, 8, seed=1), randn(1, 12, 16, seed=2)
    q, k, hidden = q.double(), k.double(), hidden.double()
    _, empty = rope.angles(hidden[:, :1])
    start = SelectiveRoPECache(torch.zeros_like(empty.inputs), torch.full_like(empty.angle, 1.7))
    plain, shifted = rope(q, k, hidden), rope(q, k, hidden, cache=start)
    assert not torch.allclose(plain[0], shifted[0])
    scores = [torch.einsum("bthd,bshd->bhts", a, b) for a, b, _ in (plain, shifted)]
    torch.testing.assert_close(scores[0], scores[1], rtol=0, atol=1e-12)


def test_rfa_temperature_is_the_tangent_of_the_half_angle():
    expected = torch.tensor([0.0, 0.41421356, 1.0], dtype=torch.float64)
    torch.testing.assert_close(rfa_temperature(3, theta=0.5, dtype=torch.float64), expected, rtol=0, atol=1e-8)
    torch.testing.assert_close(
        rfa_temperature(3, theta=0.5, temp_max=0.25, dtype=torch.float64), expected / 4, rtol=0, atol=1e-8
    )


@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
def test_recurrent_chunked_and_parallel_forms_agree(chunk):
    q, k = (randn(2, 50, 3, 4, seed=i, dtype=torch.float64) for i in (0, 1))
    v = randn(2, 50, 3, 5, seed=2, dtype=torch.float64)
    g = F.logsigmoid(randn(2, 50, 3, 4, seed=3, dtype=torch.float64)) / 4
    total = g.cumsum(1)
    scores = torch.einsum("bthd,bshd->bhts", q * total.exp(), k * (-total).exp()).tril()
    parallel = torch.einsum("bhts,bshv->bthv", scores, v)
    out, state = gated_linear_attention(q, k, v, g, chunk=chunk)
    looped, last = token_loop(q, k, v, g)
    assert (out - parallel).abs().max() < 1e-9
    assert (out - looped).abs().max() < 1e-9
    assert (state - last).abs().max() < 1e-9


def test_without_convolution_the_summed_phase_is_the_projection():
    rope = build(SelectiveRoPE, 16, 2, 8, conv=None, base=1.0).double()
    hidden = randn(2, 300, 16, dtype=torch.float64)
    angle, _ = rope.angles(hidden)
    unit = F.normalize(hidden.unflatten(-1, (2, 8)), dim=-1).flatten(-2)
    projection = rope.phase_out(rope.phase_in(unit)).unflatten(-1, (2, 4))
    gap = torch.remainder(angle - projection + math.pi, 2 * math.pi) - math.pi
    assert gap.abs().max() < 1e-12


def test_softmax_weights_are_a_mean_of_rotations():
    q, k = torch.tensor([0.4, -0.3]), torch.tensor([0.1, 0.5])
    omega = randn(200_000, 2, seed=5)
    scale = math.exp(float(q @ q + k @ k) / 2)
    mean = scale * torch.cos(omega @ (q - k)).mean()
    # Six standard errors of the cosine's mean.
    assert abs(float(mean) - math.exp(float(q @ k))) < 6 * scale / math.sqrt(200_000)


# Invariances and limits

ROPES = [
    {},
    {"rank": None},
    {"conv": None},
    {"act": "silu", "bias": True},
    {"gate": "head", "temp": "rfa", "temp_max": 0.25},
    {"gate": "angle", "bias": True, "rank": None, "conv": None},
    {"n_kv_heads": 2, "gate": "angle", "train_temp": True},
]


@pytest.mark.parametrize("options", ROPES)
@pytest.mark.parametrize("cuts", [[1] * 9, [4, 1, 3, 1], [2, 7]])
def test_decoding_in_pieces_equals_the_full_pass(options, cuts):
    rope = build(SelectiveRoPE, 32, 4, 8, init_scale=1.0, **options)
    kv = options.get("n_kv_heads", 4)
    q, k, hidden = randn(2, 9, 4, 8), randn(2, 9, kv, 8, seed=1), randn(2, 9, 32, seed=2)
    full = rope(q, k, hidden)
    cache, pieces = None, []
    for a, b, c in zip(q.split(cuts, 1), k.split(cuts, 1), hidden.split(cuts, 1), strict=True):
        a, b, cache = rope(a, b, c, cache=cache)
        pieces.append((a, b))
    for which in (0, 1):
        torch.testing.assert_close(torch.cat([p[which] for p in pieces], 1), full[which], rtol=0, atol=1e-5)
    torch.testing.assert_close(cache.inputs, full[2].inputs)


LAYERS = [
    (GatedLinearAttention, {"pos": "selective"}),
    (GatedLinearAttention, {"pos": "rope", "short_conv": 4}),
    (GatedLinearAttention, {"pos": "none", "decay": False}),
    (GatedLinearAttention, {"pos": "selective", "short_conv": 4, "qk_norm": True, "pos_options": {"conv": None}}),
    (SoftmaxAttention, {"pos": "selective", "n_kv_heads": 2}),
    (SoftmaxAttention, {"pos": "rope"}),
    (SoftmaxAttention, {"pos": "none", "n_kv_heads": 1}),
]


@pytest.mark.parametrize(("cls", "options"), LAYERS)
@pytest.mark.parametrize("cuts", [[1] * 6, [17, 1, 5, 20]])
def test_layers_decode_as_they_train(cls, options, cuts):
    layer = build(cls, 32, 4, **options)
    hidden = randn(2, sum(cuts), 32)
    full, _ = layer(hidden)
    cache, pieces = None, []
    for part in hidden.split(cuts, 1):
        out, cache = layer(part, cache=cache)
        pieces.append(out)
    torch.testing.assert_close(torch.cat(pieces, 1), full, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("cls", "options"), LAYERS)
def test_padding_on_either_side_changes_nothing(cls, options):
    layer = build(cls, 32, 4, **options)
    hidden, filler = randn(1, 11, 32), randn(1, 5, 32, seed=1)
    alone, _ = layer(hidden)
    for left in (True, False):
        padded = torch.cat([filler, hidden] if left else [hidden, filler], 1)
        mask = torch.zeros(1, 16, dtype=torch.bool)
        tokens = slice(5, None) if left else slice(11)
        mask[:, tokens] = True
        out, cache = layer(padded, mask=mask)
        torch.testing.assert_close(out[:, tokens], alone, rtol=0, atol=1e-5)
        assert not out[~mask].any()
        if left:
            more = randn(1, 1, 32, seed=2)
            after, _ = layer(more, cache=cache)
            expected, _ = layer(torch.cat([hidden, more], 1))
            torch.testing.assert_close(after, expected[:, -1:], rtol=0, atol=1e-5)


@pytest.mark.parametrize(("cls", "options"), LAYERS)
def test_layers_are_causal(cls, options):
    layer = build(cls, 32, 4, **options)
    hidden = randn(1, 30, 32)
    changed = hidden.clone()
    changed[:, 20:] += 1
    a, b = layer(hidden)[0], layer(changed)[0]
    torch.testing.assert_close(a[:, :20], b[:, :20], rtol=0, atol=1e-6)
    assert (a[:, 20:] - b[:, 20:]).abs().min(dim=-1).values.max() > 0


@pytest.mark.parametrize(("cls", "options"), LAYERS)
def test_gradients_reach_every_parameter(cls, options):
    layer = build(cls, 32, 4, **options)
    layer(randn(2, 20, 32))[0].square().mean().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name


def test_gradients_are_right():
    layer = build(
        GatedLinearAttention, 8, 2, chunk=5, short_conv=2, pos_options={"bias": True, "gate": "angle"}
    ).double()
    hidden = randn(1, 9, 8, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: layer(x)[0], (hidden,))


def test_grouped_queries_share_the_angles_of_their_key_head():
    rope = build(SelectiveRoPE, 32, 4, 8, n_kv_heads=2)
    x, hidden = randn(1, 7, 2, 8), randn(1, 7, 32, seed=1)
    q_rot, k_rot, _ = rope(x.repeat_interleave(2, 2), x, hidden)
    torch.testing.assert_close(q_rot, k_rot.repeat_interleave(2, 2))


def test_grouped_attention_equals_attention_with_repeated_heads():
    grouped = build(SoftmaxAttention, 16, 4, n_kv_heads=2, pos="rope")
    full = build(SoftmaxAttention, 16, 4, pos="rope")
    q, k, v = grouped.qkv.weight.detach().split(grouped._widths)
    k, v = (x.unflatten(0, (2, 4)).repeat_interleave(2, 0).flatten(0, 1) for x in (k, v))
    with torch.no_grad():
        full.qkv.weight.copy_(torch.cat([q, k, v]))
        full.out_proj.weight.copy_(grouped.out_proj.weight)
    hidden = randn(2, 13, 16)
    torch.testing.assert_close(grouped(hidden)[0], full(hidden)[0], rtol=0, atol=1e-6)


def test_no_positions_without_decay_forgets_the_order():
    layer = build(GatedLinearAttention, 16, 2, pos="none", decay=False)
    hidden = randn(1, 12, 16)
    mixed = torch.cat([hidden[:, :11].flip(1), hidden[:, 11:]], 1)
    torch.testing.assert_close(layer(hidden)[0][:, -1], layer(mixed)[0][:, -1], rtol=0, atol=1e-5)
    rotating = build(GatedLinearAttention, 16, 2, pos="selective", decay=False)
    assert (rotating(hidden)[0][:, -1] - rotating(mixed)[0][:, -1]).abs().max() > 1e-3


@settings(max_examples=25, deadline=None)
@given(
    tokens=st.integers(1, 70),
    chunk=st.integers(1, 80),
    strength=st.sampled_from([0.01, 1.0, 40.0]),
    seed=st.integers(0, 100),
)
def test_any_chunk_size_and_any_decay_equal_the_token_loop(tokens, chunk, strength, seed):
    q, k, v = (randn(1, tokens, 2, 3, seed=seed + i, dtype=torch.float64) for i in range(3))
    g = -strength * randn(1, tokens, 2, 3, seed=seed + 3, dtype=torch.float64).abs()
    out, state = gated_linear_attention(q, k, v, g, chunk=chunk)
    looped, last = token_loop(q, k, v, g)
    assert (out - looped).abs().max() < 1e-9
    assert (state - last).abs().max() < 1e-9


def test_strong_decay_over_a_long_sequence_stays_finite_in_float32():
    q, k, v = (randn(1, 5000, 2, 4, seed=i) for i in range(3))
    g = torch.full((1, 5000, 2, 4), -30.0, requires_grad=True)
    out, _ = gated_linear_attention(q, k, v, g)
    out.sum().backward()
    assert out.isfinite().all()
    assert g.grad.isfinite().all()
    # At this decay only the current token is left.
    torch.testing.assert_close(out, (q * k).sum(-1, keepdim=True) * v, rtol=1e-5, atol=1e-5)


# Precision


def test_running_angle_keeps_its_digits_over_two_hundred_thousand_tokens():
    steps = randn(1, 200_000, 1, 4) + 3.0
    exact = steps.double().cumsum(1)
    angle = _running_angle(steps)
    assert float(exact.max()) > 5e5
    assert (angle.double().cos() - exact.cos()).abs().max() < 2e-3
    naive = (exact.float().double().cos() - exact.cos()).abs().max()
    assert naive > 5 * (angle.double().cos() - exact.cos()).abs().max()


def test_long_plain_rotation_in_float32_matches_float64():
    rope = build(SelectiveRoPE, 8, 1, 4, bias=True, base=100.0)
    set_constant_phase(rope, 1.0)
    q, hidden = randn(1, 100_000, 1, 4), randn(1, 100_000, 8, seed=1)
    single, _, _ = rope(q, q, hidden)
    double, _, _ = rope.double()(q.double(), q.double(), hidden.double())
    assert (single.double() - double).abs().max() < 5e-3


def test_bfloat16_sums_angles_in_float32():
    rope = build(SelectiveRoPE, 16, 2, 8, bias=True).bfloat16()
    set_constant_phase(rope, 1.0)
    q, hidden = randn(1, 5000, 2, 8, dtype=torch.bfloat16), randn(1, 5000, 16, seed=1, dtype=torch.bfloat16)
    q_rot, _, cache = rope(q, q, hidden)
    assert q_rot.dtype == torch.bfloat16
    assert cache.angle.dtype == torch.float32
    expected = plain_rope(q.double(), torch.arange(1, 5001, dtype=torch.float64), 500_000.0)
    assert (q_rot.double() - expected).abs().max() < 0.03


@pytest.mark.parametrize(("cls", "options"), LAYERS)
def test_layers_run_in_bfloat16_and_under_autocast(cls, options):
    layer, hidden = build(cls, 32, 4, **options), randn(2, 40, 32)
    expected, _ = layer(hidden)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed, _ = layer(hidden)
    low, cache = layer.bfloat16()(hidden.bfloat16())
    assert low.dtype == torch.bfloat16
    step, _ = layer(hidden[:, :1].bfloat16(), cache=cache)
    assert step.isfinite().all()
    for out in (mixed, low):
        assert (out.float() - expected).norm() < 0.1 * expected.norm()


def test_inputs_need_not_be_contiguous():
    layer = build(GatedLinearAttention, 16, 2, pos="selective")
    hidden = randn(6, 16, 2).transpose(1, 2).transpose(0, 1)
    assert not hidden.is_contiguous()
    torch.testing.assert_close(layer(hidden)[0], layer(hidden.contiguous())[0])


def test_rope_temperature_is_the_usual_spectrum():
    torch.testing.assert_close(
        rope_temperature(4, base=10_000.0), torch.tensor([1.0, 0.1, 0.01, 0.001]), rtol=1e-6, atol=0
    )
    assert torch.equal(rope_temperature(5, base=1.0), torch.ones(5))


def test_rfa_temperature_keeps_its_digits_near_the_pole():
    x = np.linspace(0, 0.9999 * np.pi, 32)
    exact = np.sqrt((1 - np.cos(x)) / (1 + np.cos(x)))
    got = rfa_temperature(32).numpy()
    np.testing.assert_allclose(got, exact / exact[-1], rtol=2e-5, atol=1e-11)
    assert got.max() == 1.0


# The contract of a module


def test_state_dict_restores_the_layer():
    options = {"pos": "selective", "short_conv": 4, "pos_options": {"bias": True, "gate": "head", "train_temp": True}}
    one, two = build(GatedLinearAttention, 16, 2, **options), build(GatedLinearAttention, 16, 2, seed=1, **options)
    hidden = randn(1, 8, 16)
    assert not torch.allclose(one(hidden)[0], two(hidden)[0])
    two.load_state_dict(one.state_dict())
    assert torch.equal(one(hidden)[0], two(hidden)[0])


@pytest.mark.parametrize(("cls", "options"), LAYERS)
def test_compiles_without_graph_breaks(cls, options):
    layer, hidden = build(cls, 32, 4, **options), randn(1, 20, 32)
    torch.compiler.reset()
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(hidden)[0], layer(hidden)[0])


def test_same_seed_same_layer():
    a, b = (build(SelectiveRoPE, 16, 2, 8, seed=3) for _ in range(2))
    x, hidden = randn(1, 9, 2, 8), randn(1, 9, 16, seed=1)
    assert torch.equal(a(x, x, hidden)[0], b(x, x, hidden)[0])


def test_init_scale_sets_the_size_of_the_phases():
    small = build(SelectiveRoPE, 64, 4, 16, init_scale=0.02)
    large = build(SelectiveRoPE, 64, 4, 16, init_scale=1.0)
    assert float(small.phase_out.weight.detach().std()) == pytest.approx(0.02, rel=0.2)
    assert float(large.phase_out.weight.detach().std()) == pytest.approx(1.0, rel=0.2)
    assert float(build(SelectiveRoPE, 64, 4, 16, rank=None, init_scale=2.0).phase_scale[0].detach()) == 2.0


def test_only_the_weight_norm_scale_is_spared_from_decay():
    full = SelectiveRoPE(16, 2, 8, rank=None)
    assert full.no_weight_decay() == {"phase_scale"}
    assert full.no_weight_decay() <= dict(full.named_parameters()).keys()
    assert SelectiveRoPE(16, 2, 8).no_weight_decay() == set()


# Bad input

BAD_LAYERS = [
    ({"head_dim": 7}, "head_dim=7"),
    ({"d_model": 30}, "d_model=30 does not split into 4 heads"),
    ({"n_kv_heads": 3}, "n_heads=4 is not a multiple of n_kv_heads=3"),
    ({"d_model": 0}, "d_model=0: must be a whole number of at least 1"),
    ({"d_model": -4}, "d_model=-4"),
    ({"d_model": 32.0}, "d_model=32.0"),
    ({"n_heads": 2.5}, "n_heads=2.5"),
    ({"n_kv_heads": 0}, "n_kv_heads=0"),
    ({"head_dim": "8"}, "head_dim='8'"),
    ({"rank": 0}, "rank=0"),
    ({"rank": True}, "rank=True"),
    ({"rank": 2.5}, "rank=2.5"),
    ({"conv": 0}, "conv=0"),
    ({"act": "relu"}, "act='relu'"),
    ({"act": "silu", "conv": None}, "act='silu' follows the convolution"),
    ({"temp": "linear"}, "temp='linear'"),
    ({"gate": "token"}, "gate='token'"),
    ({"base": 0.5}, "base=0.5"),
    ({"temp": "rfa", "theta": 1.0}, "theta=1.0"),
    ({"temp_max": 0.0}, "temp_max=0.0"),
    ({"init_scale": -1.0}, "init_scale=-1.0"),
    ({"temp": "rfa", "head_dim": 2}, "n_angles=1"),
]


@pytest.mark.parametrize(("options", "message"), BAD_LAYERS)
def test_options_that_do_not_fit_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        SelectiveRoPE(**{"d_model": 32, "n_heads": 4, "head_dim": 8} | options)


def test_shapes_that_do_not_fit_are_refused():
    rope = SelectiveRoPE(32, 4, 8)
    q, hidden = randn(2, 5, 4, 8), randn(2, 5, 32)
    with pytest.raises(InputError, match=r"q has shape \(2, 5, 2, 8\)"):
        rope(q[:, :, :2], q, hidden)
    with pytest.raises(InputError, match=r"k has shape \(2, 4, 4, 8\)"):
        rope(q, q[:, :4], hidden)
    for wrong in (hidden[..., :16], hidden[:, :0], hidden[0]):
        with pytest.raises(
            InputError, match=r"hidden has shape .*expected \(batch, tokens, 32\) with at least one token"
        ):
            rope(q, q, wrong)
    with pytest.raises(InputError, match="mask is list: expected"):
        rope.angles(hidden, mask=[[True] * 5] * 2)
    with pytest.raises(InputError, match=r"mask is torch\.float32"):
        rope.angles(hidden, mask=torch.ones(2, 5))
    with pytest.raises(InputError, match=r"mask is torch\.bool of shape"):
        rope.angles(hidden, mask=torch.ones(2, 6, dtype=torch.bool))


@pytest.mark.parametrize("name", ["q", "k", "hidden"])
def test_what_is_no_floating_point_tensor_is_refused(name):
    rope = SelectiveRoPE(32, 4, 8)
    given = {"q": randn(2, 5, 4, 8), "k": randn(2, 5, 4, 8), "hidden": randn(2, 5, 32)}
    with pytest.raises(InputError, match=rf"{name} is torch\.int64: pass a floating-point tensor"):
        rope(**given | {name: given[name].long()})
    with pytest.raises(InputError, match=f"{name} is list: pass a floating-point tensor"):
        rope(**given | {name: given[name].tolist()})


@pytest.mark.parametrize("rank", [16, None])
def test_hidden_states_of_another_dtype_are_named_and_autocast_takes_them(rank):
    rope = SelectiveRoPE(32, 4, 8, rank=rank)
    q, hidden = randn(2, 5, 4, 8, dtype=torch.bfloat16), randn(2, 5, 32, dtype=torch.bfloat16)
    message = r"hidden is torch\.bfloat16 and the layer's weights are torch\.float32: cast one of them"
    with pytest.raises(InputError, match=message):
        rope(q, q, hidden)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert rope(q, q, hidden)[0].dtype == torch.bfloat16
    # Queries and keys are only rotated, in whatever type they come.
    assert rope(q, q, hidden.float())[0].dtype == torch.bfloat16


@pytest.mark.parametrize("cls", [GatedLinearAttention, SoftmaxAttention])
def test_layers_name_hidden_states_of_another_dtype(cls):
    layer = cls(32, 4)
    with pytest.raises(InputError, match=r"hidden is torch\.float16 and the layer's weights are torch\.float32"):
        layer(randn(2, 5, 32, dtype=torch.float16))
    with pytest.raises(InputError, match=r"hidden is torch\.int64: pass a floating-point tensor"):
        layer(torch.zeros(2, 5, 32, dtype=torch.int64))


def test_a_cache_from_elsewhere_is_refused():
    hidden = randn(2, 5, 32)
    _, wrong = SelectiveRoPE(32, 4, 8).angles(hidden[:1])
    with pytest.raises(
        InputError, match=r"the cache holds inputs of shape \(1, 3, 16\) and this call needs \(2, 3, 16\)"
    ):
        SelectiveRoPE(32, 4, 8).angles(hidden, cache=wrong)
    with pytest.raises(
        InputError, match="the cache is of type int: pass the SelectiveRoPECache that this layer's last call"
    ):
        SelectiveRoPE(32, 4, 8).angles(hidden, cache=5)
    for cls, pos in ((GatedLinearAttention, "none"), (SoftmaxAttention, "rope"), (GatedLinearAttention, "rope")):
        layer = cls(32, 4, pos=pos)
        _, cache = layer(hidden[:1])
        with pytest.raises(InputError, match=r"the cache holds (state|k) of shape"):
            layer(hidden, cache=cache)


@pytest.mark.parametrize("cls", [GatedLinearAttention, SoftmaxAttention])
def test_a_cache_of_another_kind_is_refused(cls):
    hidden = randn(2, 5, 32)
    layer = cls(32, 4, pos="rope")
    other = SoftmaxAttention if cls is GatedLinearAttention else GatedLinearAttention
    for wrong in (5, other(32, 4)(hidden)[1], SelectiveRoPE(32, 4, 8).angles(hidden)[1]):
        with pytest.raises(
            InputError, match=f"the cache is of type {type(wrong).__name__}: pass the {cls.__name__}Cache"
        ):
            layer(hidden, cache=wrong)
    with pytest.raises(InputError, match="the cache holds another kind of positions than this layer"):
        layer(hidden, cache=cls(32, 4, pos="none")(hidden)[1])
    with pytest.raises(InputError, match="the cache holds another kind of positions than this layer"):
        cls(32, 4, pos="none")(hidden, cache=layer(hidden)[1])


def test_a_cache_without_what_the_short_convolution_needs_is_refused():
    hidden = randn(2, 5, 32)
    _, cache = GatedLinearAttention(32, 4)(hidden)
    with pytest.raises(InputError, match=r"the cache holds inputs of shape None and this call needs \(2, 3, 96\)"):
        GatedLinearAttention(32, 4, short_conv=4)(hidden, cache=cache)


@pytest.mark.parametrize("cls", [GatedLinearAttention, SoftmaxAttention])
def test_layers_refuse_what_they_cannot_take(cls):
    with pytest.raises(InputError, match="d_model=30 does not split into 4 heads"):
        cls(30, 4)
    with pytest.raises(InputError, match="d_model=0: must be a whole number of at least 1"):
        cls(0, 4, head_dim=8)
    with pytest.raises(InputError, match="head_dim=3"):
        cls(12, 4)
    with pytest.raises(InputError, match="pos='alibi'"):
        cls(32, 4, pos="alibi")
    with pytest.raises(InputError, match="pos_options has rank"):
        cls(32, 4, pos="rope", pos_options={"rank": 4})
    with pytest.raises(InputError, match="hidden has shape"):
        cls(32, 4)(randn(2, 5, 16))
    with pytest.raises(InputError, match="mask is"):
        cls(32, 4)(randn(2, 5, 32), mask=torch.ones(2, 5))


def test_gated_linear_attention_refuses_sizes_below_one():
    with pytest.raises(InputError, match="chunk=0"):
        GatedLinearAttention(32, 4, chunk=0)
    with pytest.raises(InputError, match="short_conv=0"):
        GatedLinearAttention(32, 4, short_conv=0)


# The trial

TINY = {
    "batch": 8,
    "width": 16,
    "parity_length": 6,
    "parity_learning_rates": (1e-2, 1e30),
    "parity_steps": 3,
    "copy_length": 4,
    "copy_layers": 1,
    "copy_learning_rates": (1e-2,),
    "copy_steps": 3,
    "rows": 60,
    "test_rows": 40,
}


def test_trial_tests_stretches_that_training_never_reached():
    data = prepare("builtin:sequences", seed=0, budget=TINY)
    assert data.running.train.tokens.shape[1] == 7
    scored = {m: p.mask.any(0).nonzero().flatten().tolist() for m, p in data.running.test.items()}
    assert scored == {1: list(range(1, 7)), 2: list(range(7, 14)), 4: list(range(14, 28))}
    assert data.copying.test[2].tokens.shape[1] == 18
    again = prepare("builtin:sequences", seed=0, budget=TINY)
    assert torch.equal(data.copying.train.tokens, again.copying.train.tokens)


def test_trial_arms_are_repeatable_and_pass_over_a_rate_that_diverges():
    data = prepare("builtin:sequences", seed=0, budget=TINY)
    for arm in TRIAL.arms:
        measured = arm.run(data, seed=0, budget=TINY)
        assert measured == arm.run(data, seed=0, budget=TINY)
        assert measured.keys() == {m.name for m in TRIAL.metrics}
        assert measured["parity learning rate"] == 1e-2
        assert all(0 <= measured[m.name] <= 1 for m in TRIAL.metrics if m.better)


def test_trial_reads_a_file_and_leaves_copying_out(tmp_path):
    task = load(task="parity", length=15, n=120, seed=0)
    np.savez(tmp_path / "a.npz", tokens=task.tokens, targets=task.targets, mask=task.mask)
    data = prepare(str(tmp_path / "a.npz"), seed=0, budget=TINY)
    assert data.running.train.tokens.shape[1] == 4
    assert len(data.running.train.tokens) + len(data.running.valid.tokens) + len(data.running.test[1].tokens) == 120
    measured = TRIAL.arms[0].run(data, seed=0, budget=TINY)
    assert math.isnan(measured["copy 2x"])
    assert 0 <= measured["parity 4x"] <= 1


def test_trial_refuses_files_that_it_cannot_split_by_length(tmp_path):
    late = load(task="copy", length=10, n=80, seed=0)
    np.savez(tmp_path / "a.npz", tokens=late.tokens, targets=late.targets, mask=late.mask)
    with pytest.raises(InputError, match="0 sequences of 22 tokens that are scored in their first quarter"):
        prepare(str(tmp_path / "a.npz"), seed=0, budget=TINY)
    early = load(task="parity", length=15, n=80, seed=0)
    early.mask[:, 8:] = False
    np.savez(tmp_path / "b.npz", tokens=early.tokens, targets=early.targets, mask=early.mask)
    with pytest.raises(InputError, match="scores nothing at 4 times the training length of 4 tokens"):
        prepare(str(tmp_path / "b.npz"), seed=0, budget=TINY)
