import itertools
import json
import math
from types import SimpleNamespace

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
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from assay.core.anatomy import anatomy
from assay.core.errors import InputError, NotApplicable
from assay.core.trace import AttentionView, Batch, Reducer, trace
from assay.lens._rope_heads import (
    RopeHeadsReducer,
    RopeHeadsResult,
    block_swap_scores,
    exclusion_bound,
    rope_heads,
)
from assay.reference import tiny_lm
from assay.reference.positional_tasks import positional_head, symbolic_head

DOUBLE = torch.float64


def normal(*shape, seed=0, dtype=DOUBLE):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def rotate(x, positions, theta, interleaved=False):
    """The rotary embedding, one pair at a time."""
    out = x.clone()
    half = len(theta)
    for f in range(half):
        a, b = (2 * f, 2 * f + 1) if interleaved else (f, f + half)
        angle = positions.to(x.dtype) * theta[f]
        out[..., a] = x[..., a] * angle.cos() - x[..., b] * angle.sin()
        out[..., b] = x[..., a] * angle.sin() + x[..., b] * angle.cos()
    return out


def cosine(a, b):
    return float(a @ b / (a.norm() * b.norm()))


def brute_force(logits_of, keys, blocks, keep_first=0, weighting="moved", tau=0.1):
    """Exchange the keys of every two blocks in full, one pair at a time.

    `logits_of(keys)` applies the rotary embedding and gives the logits of one query.
    """
    n = len(keys)
    m = min(blocks, n - keep_first)
    size = (n - keep_first) // m
    first = n - m * size
    spans = [slice(first + b * size, first + (b + 1) * size) for b in range(m)]
    clean = torch.softmax(logits_of(keys), -1)
    means = torch.stack([clean[s].mean() for s in spans])
    found = []
    for i, j in itertools.combinations(range(m), 2):
        swapped = keys.clone()
        swapped[spans[i]], swapped[spans[j]] = keys[spans[j]], keys[spans[i]]
        after = torch.softmax(logits_of(swapped), -1)
        v = torch.stack([means[i], means[j]])
        w = torch.stack([after[spans[i]].mean(), after[spans[j]].mean()])
        mass = float((clean[spans[i]].sum() - clean[spans[j]].sum()).abs())
        uniform = 1 / n
        found.append(
            (cosine(w, v), cosine(w, v.flip(0)), cosine(w - uniform, v - uniform),
             cosine(w - uniform, v.flip(0) - uniform), mass)
        )  # fmt: skip
    table = torch.tensor(found, dtype=DOUBLE)
    mass = table[:, 4]
    weights = {
        "moved": torch.softmax(mass / tau, 0),
        "proportional": mass / mass.sum(),
        "uniform": torch.full_like(mass, 1 / len(mass)),
    }[weighting]
    return table, dict(zip(("pos", "sym", "pos_c", "sym_c", "moved"), (weights @ table).tolist(), strict=True))


# The engine against the definition


@pytest.mark.parametrize("weighting", ["moved", "proportional", "uniform"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("softcap", "freqs", "keep_first"), [(None, 4, 0), (2.0, 4, 1), (None, 2, 3), (None, 0, 0)])
def test_equals_brute_force_in_float64(weighting, interleaved, softcap, freqs, keep_first):
    n, d = 43, 8
    q, k, theta = normal(d), normal(n, d, seed=1), torch.tensor([0.9, 0.2, 0.05, 0.001], dtype=DOUBLE)[:freqs]
    positions = torch.arange(n) + 5

    def logits_of(keys):
        turned = rotate(keys, positions, theta, interleaved)
        logits = turned @ rotate(q, positions[-1], theta, interleaved) / math.sqrt(d)
        return logits if softcap is None else softcap * torch.tanh(logits / softcap)

    table, expected = brute_force(logits_of, k, 5, keep_first, weighting)
    scores = block_swap_scores(
        q, k, theta=theta, positions=positions, interleaved=interleaved, softcap=softcap, blocks=5,
        keep_first=keep_first, weighting=weighting,
    )  # fmt: skip
    for name, value in expected.items():
        assert float(getattr(scores, name)) == pytest.approx(value, abs=1e-10), name
    for column, name in ((0, "pair_pos"), (1, "pair_sym"), (4, "pair_moved")):
        assert torch.allclose(getattr(scores, name), table[:, column], atol=1e-10, rtol=0)
    clean = torch.softmax(logits_of(k), -1)
    assert float(scores.entropy) == pytest.approx(float(torch.special.entr(clean).sum()), abs=1e-10)
    assert float(scores.distance) == pytest.approx(float(clean @ (n - 1 - torch.arange(n)).double()), abs=1e-9)


def test_equals_brute_force_with_uneven_positions():
    n, theta = 24, torch.tensor([0.3, 0.05], dtype=DOUBLE)
    q, k = normal(4), normal(n, 4, seed=1)
    positions = torch.from_numpy(np.sort(np.random.default_rng(0).choice(200, n, replace=False)))

    def logits_of(keys):
        return rotate(keys, positions, theta) @ rotate(q, torch.tensor(210), theta) / 2

    _, expected = brute_force(logits_of, k, 6)
    scores = block_swap_scores(q, k, theta=theta, positions=positions, query_position=210, blocks=6)
    assert float(scores.pos) == pytest.approx(expected["pos"], abs=1e-10)
    assert float(scores.sym) == pytest.approx(expected["sym"], abs=1e-10)


class Capture(Reducer):
    """Hidden states before attention, and what the tracer shows of it."""

    sites = ("attn",)

    def __init__(self):
        self.views = {}

    def update(self, site, layer, value, batch):
        self.views[layer] = value


TINY = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def build(kind):
    torch.manual_seed(0)
    wide = {"initializer_range": 0.5}
    if kind == "llama, grouped keys":
        return LlamaForCausalLM(LlamaConfig(**TINY, intermediate_size=16, num_key_value_heads=2, **wide))
    if kind == "neox, partial rotary":
        return GPTNeoXForCausalLM(
            GPTNeoXConfig(
                **TINY, intermediate_size=16, rope_parameters={"rope_type": "default", "rope_theta": 1e4,
                                                               "partial_rotary_factor": 0.5}, **wide
            )
        )  # fmt: skip
    if kind == "gemma2, soft cap and window":
        config = Gemma2Config(
            **TINY, intermediate_size=16, num_key_value_heads=2, head_dim=8, sliding_window=20,
            attn_logit_softcapping=3.0, query_pre_attn_scalar=4, **wide,
        )  # fmt: skip
        return Gemma2ForCausalLM(config)
    raise KeyError(kind)


@pytest.mark.parametrize("kind", ["llama, grouped keys", "neox, partial rotary", "gemma2, soft cap and window"])
def test_model_equals_brute_force_with_reapplied_rope(kind):
    model = build(kind).eval()
    parts = anatomy(model)
    ids = torch.randint(60, (3, 37), generator=torch.Generator().manual_seed(1))
    entering = {}
    hooks = [
        block.attention.module.register_forward_pre_hook(
            lambda _m, args, kwargs, i=block.index: entering.update({i: args[0] if args else kwargs["hidden_states"]}),
            with_kwargs=True,
        )
        for block in parts.blocks
    ]
    result = rope_heads(model, [ids[:2], ids[2:]], blocks=6)
    trace(model, [ids], [])
    for hook in hooks:
        hook.remove()
    positions = torch.arange(ids.shape[1])
    for block in parts.blocks:
        attention = block.attention
        with torch.no_grad():
            queries, keys = attention.queries(entering[block.index]), attention.keys(entering[block.index])
        visible = attention.visible(ids.shape[1])[-1]
        seen = visible.nonzero()[:, 0]
        means = {name: torch.zeros(4) for name in ("pos", "sym", "pos_c", "sym_c", "moved")}
        for head in range(4):
            for prompt in range(3):
                q = attention.rotary.rotate(queries[prompt, head], positions)[-1]

                def logits_of(some, q=q, attention=attention, seen=seen):
                    logits = attention.rotary.rotate(some.float(), positions[seen]) @ q * attention.scaling
                    cap = attention.softcap
                    return (logits if cap is None else cap * torch.tanh(logits / cap)).double()

                k = keys[prompt, attention.kv_head[head]][seen].double()
                _, expected = brute_force(logits_of, k, 6, keep_first=int(visible[0]))
                for name, value in expected.items():
                    means[name][head] += value / 3
        for name, value in means.items():
            assert torch.allclose(getattr(result, name)[block.index].float(), value, atol=2e-4), (name, block.index)


# Known values


def test_nope_head_is_symbolic():
    scores = block_swap_scores(normal(5, 6), normal(5, 70, 6, seed=1), theta=torch.zeros(3, dtype=DOUBLE))
    assert torch.allclose(scores.sym, torch.ones(5, dtype=DOUBLE), atol=1e-6)


def test_equal_keys_are_positional():
    keys = normal(5, 1, 6, seed=1).expand(5, 70, 6)
    scores = block_swap_scores(3 * normal(5, 6), keys, theta=torch.tensor([0.5, 0.1, 0.01], dtype=DOUBLE))
    assert torch.allclose(scores.pos, torch.ones(5, dtype=DOUBLE), atol=1e-6)
    assert float(scores.moved.min()) > 0.01


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_uniform_attention_is_both_and_centred_scores_are_zero(dtype):
    scores = block_swap_scores(
        torch.zeros(6, dtype=dtype), normal(70, 6, dtype=dtype), theta=torch.tensor([0.5, 0.1, 0.01], dtype=dtype)
    )
    assert float(scores.pos) == pytest.approx(1, abs=1e-6)
    assert float(scores.sym) == pytest.approx(1, abs=1e-6)
    assert abs(float(scores.pos_c)) < 1e-3
    assert abs(float(scores.sym_c)) < 1e-3
    assert float(scores.entropy) == pytest.approx(math.log(70), abs=1e-5)


def enumerate_bound(logits):
    m = len(logits)
    standing = np.diag(logits)
    total = 0.0
    for order in itertools.permutations(range(m)):
        at = list(order)
        total += ((logits[at, range(m)] - standing) ** 2).sum()  # other contents, same positions
        total += ((logits[range(m), at] - standing) ** 2).sum()  # same contents, other positions
    return standing.var(), total / (math.factorial(m) * m)


@pytest.mark.parametrize("kind", ["positional", "symbolic"])
def test_theorem_1_pure_head_is_exactly_twice(kind):
    logits = torch.arange(3, dtype=DOUBLE).expand(3, 3)
    logits = logits if kind == "positional" else logits.T
    variance, bound = exclusion_bound(logits)
    assert float(variance) == pytest.approx(2 / 3, abs=1e-12)
    assert float(bound) == pytest.approx(4 / 3, abs=1e-12)
    assert enumerate_bound(logits.numpy()) == pytest.approx((2 / 3, 4 / 3))


def test_theorem_1_closed_form_equals_enumeration():
    tables = normal(20, 4, 4)
    variance, bound = exclusion_bound(tables)
    expected = np.array([enumerate_bound(t) for t in tables.numpy()])
    assert np.allclose(np.stack([variance, bound], axis=1), expected, atol=1e-12)


def test_theorem_1_is_not_violated_by_random_tables():
    variance, bound = exclusion_bound(normal(1000, 4, 4, seed=3))
    ratio = variance / bound
    assert float(ratio.max()) <= 1
    assert 0.3 < float(ratio.max()) < 0.9


@pytest.mark.parametrize(
    ("theta", "half"),
    [(0.1, (0.2234, 0.1859, 0.1638, 0.1522, 0.1486)), (0.3, (0.5439, 0.4035, 0.3770, 0.3738, 0.3735))],
)
def test_constructed_positional_head_weight_on_target(theta, half):
    weights = []
    for target in range(9):
        q, k = (torch.from_numpy(a) for a in positional_head(9, theta=theta, target=target, sharpness=10))
        angle = torch.tensor([theta], dtype=DOUBLE)
        logits = rotate(k, torch.arange(9), angle) @ rotate(q, torch.tensor(8), angle)
        assert torch.allclose(logits, 10 * torch.cos(theta * (torch.arange(9) - target)).double())
        weights.append(float(torch.softmax(logits, -1)[target]))
    assert weights == pytest.approx([*half, *half[-2::-1]], abs=5e-5)


@pytest.mark.parametrize(
    ("theta", "pos", "sym"),
    [(0.0, 0.05, 1.0), (0.01, 0.09, 0.996), (0.03, 0.18, 0.91), (0.1, 0.36, 0.75), (1.0, 0.49, 0.62)],
)
def test_theta_slides_random_key_heads_from_symbolic_to_positional(theta, pos, sym):
    keys = 2 * normal(3000, 32, 2)
    scores = block_swap_scores(
        torch.tensor([3.0, 0.0], dtype=DOUBLE), keys, theta=torch.tensor([theta], dtype=DOUBLE), blocks=8,
        query_position=32, scaling=1.0, weighting="proportional",
    )  # fmt: skip
    # The reference values are means over 30 draws, to two or three digits.
    for found, reference in ((scores.pos, pos), (scores.sym, sym)):
        error = float(found.std()) / math.sqrt(30)
        assert float(found.mean()) == pytest.approx(reference, abs=3 * error + 0.005)


@pytest.mark.parametrize(("theta", "pos", "sym"), [(0.03, 0.99, 0.54), (0.1, 0.999, 0.08), (0.3, 0.998, 0.08)])
def test_near_constant_keys_are_positional(theta, pos, sym):
    keys = torch.tensor([2.0, 0.0], dtype=DOUBLE) + 0.1 * normal(3000, 32, 2)
    scores = block_swap_scores(
        torch.tensor([3.0, 0.0], dtype=DOUBLE), keys, theta=torch.tensor([theta], dtype=DOUBLE), blocks=8,
        query_position=32, scaling=1.0, weighting="proportional",
    )  # fmt: skip
    for found, reference in ((scores.pos, pos), (scores.sym, sym)):
        error = float(found.std()) / math.sqrt(30)
        assert float(found.mean()) == pytest.approx(reference, abs=3 * error + 0.005)


def test_adding_a_constant_to_all_logits_changes_nothing():
    theta = torch.tensor([0.4, 0.05], dtype=DOUBLE)
    q, k = normal(4), normal(40, 4, seed=1)
    plain = block_swap_scores(q, k, theta=theta, scaling=1.0)
    # A dimension that does not rotate and is the same in all keys adds 7 to every logit.
    shifted = block_swap_scores(
        torch.cat([q, torch.tensor([7.0], dtype=DOUBLE)]),
        torch.cat([k, torch.ones(40, 1, dtype=DOUBLE)], dim=1),
        theta=theta,
        scaling=1.0,
    )
    for name in ("pos", "sym", "pos_c", "sym_c", "moved", "entropy", "distance"):
        assert float(getattr(plain, name)) == pytest.approx(float(getattr(shifted, name)), abs=1e-12)


def test_common_rotation_changes_nothing():
    theta = torch.tensor([0.4, 0.05], dtype=DOUBLE)
    q, k = normal(4), normal(40, 4, seed=1)
    plain = block_swap_scores(q, k, theta=theta)
    ones = torch.tensor([1.1, 1.1], dtype=DOUBLE)
    turned = block_swap_scores(rotate(q, torch.tensor(1), ones), rotate(k, torch.ones(40), ones), theta=theta)
    later = block_swap_scores(q, k, theta=theta, positions=torch.arange(40) + 1000)
    for name in ("pos", "sym", "pos_c", "sym_c", "moved", "entropy"):
        assert float(getattr(plain, name)) == pytest.approx(float(getattr(turned, name)), abs=1e-12)
        assert float(getattr(plain, name)) == pytest.approx(float(getattr(later, name)), abs=1e-10)


def test_exchanging_twice_is_the_identity():
    n, theta = 40, torch.tensor([0.4, 0.05], dtype=DOUBLE)
    q, k = normal(4), normal(n, 4, seed=1)
    once = k.clone()
    once[:10], once[30:] = k[30:], k[:10]
    clean = block_swap_scores(q, k, theta=theta, blocks=4)
    swapped = block_swap_scores(q, once, theta=theta, blocks=4)
    # Exchanging the two blocks again leads from one state to the other, so that their cosines agree.
    index = int(((clean.pairs == torch.tensor([0, 3])).all(-1)).nonzero())
    assert float(clean.pair_pos[index]) == pytest.approx(float(swapped.pair_pos[index]), abs=1e-12)
    assert float(clean.pair_sym[index]) == pytest.approx(float(swapped.pair_sym[index]), abs=1e-12)


# Frequencies


def view_of(q, k, theta, *, rotary_dims=None, scaling=1.0, causal=True, mask=None, heads=1):
    half = (rotary_dims or q.shape[-1]) // 2
    pairs = torch.arange(2 * half).view(2, half).T
    rotary = SimpleNamespace(inv_freq=theta, pairs=pairs, attention_scaling=1.0)
    block = SimpleNamespace(index=0, attention=SimpleNamespace(rotary=rotary, causal=causal))
    return AttentionView(q, k, k, q, scaling, None, mask, causal, block)


def test_frequency_sub_logits_sum_to_the_full_logit():
    from assay.lens._rope_heads import _Head, _logits, _unrotate

    theta = torch.tensor([0.7, 0.1], dtype=torch.float32)
    q, k = normal(1, 2, 30, 6, dtype=torch.float32), normal(1, 1, 30, 6, seed=1, dtype=torch.float32)
    head = _Head.of(view_of(q, k, theta, rotary_dims=4))
    place = torch.arange(30)[None, None]
    frames = _unrotate(q[:, :, -1:].expand_as(q), place, head.theta, head.pairs, head.rest)[:, None]
    bare = _unrotate(k, place, head.theta, head.pairs, head.rest)
    fixed, every = _logits(frames, bare, 4, 7, 1.0, None)
    parts = [_logits(a, b, 4, 7, 1.0, None) for a, b in head.split(frames, bare, at_once=1)]
    assert len(parts) == 3  # two frequencies and the dimensions that do not rotate
    assert torch.allclose(sum(p[0].sum(2) for p in parts), fixed, atol=1e-5)
    assert torch.allclose(sum(p[1].sum(2) for p in parts), every, atol=1e-5)
    direct = (k[0, 0] @ q[0, 0, -1])[2:].view(4, 7)
    assert torch.allclose(torch.diagonal(every[0, 0, 0], dim1=0, dim2=1).T, direct, atol=1e-5)


def test_each_frequency_scores_as_a_head_of_its_own():
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**TINY, intermediate_size=16, num_key_value_heads=2, initializer_range=0.5))
    ids = torch.randint(60, (2, 40), generator=torch.Generator().manual_seed(1))
    capture = Capture()
    trace(model, [ids], [capture])
    result = rope_heads(model, [ids], per_frequency=True, blocks=8)
    assert result.theta.shape == (2, 4)
    view = capture.views[1]
    f, head = 2, 3
    q, k = view.q[:, head, -1][:, [f, f + 4]], view.k[:, head // 2][:, :, [f, f + 4]]
    theta = view.block.attention.rotary.inv_freq[f : f + 1]
    bare = torch.stack([rotate(x, -torch.arange(40), theta) for x in k])
    alone = block_swap_scores(
        torch.stack([rotate(x, torch.tensor(-39), theta) for x in q]), bare, theta=theta, scaling=view.scaling,
        blocks=8, keep_first=1,
    )  # fmt: skip
    assert float(result.freq_pos[1, head, f]) == pytest.approx(float(alone.pos.mean()), abs=1e-4)
    assert float(result.freq_sym[1, head, f]) == pytest.approx(float(alone.sym.mean()), abs=1e-4)
    assert torch.allclose(result.usage.sum(-1), torch.ones(2, 4, dtype=DOUBLE))


def test_slow_frequencies_are_symbolic_and_all_shapes_stand():
    model = build("neox, partial rotary")
    result = rope_heads(model, [torch.arange(60)[None, :48]], per_frequency=True)
    assert result.theta.shape == (2, 3)
    assert result.theta[:, -1].tolist() == [0, 0]
    assert torch.allclose(result.freq_sym[..., -1], torch.ones(2, 4, dtype=DOUBLE), atol=1e-5)


# Models with known heads


@pytest.fixture(scope="module")
def tiny():
    model = LlamaForCausalLM.from_pretrained(tiny_lm.load()).eval()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 1000, (12, 128), generator=generator)
    ids[:, 64:] = ids[:, :64]
    return model, ids


def test_recovers_the_planted_heads_of_the_built_in_model(tiny):
    result = rope_heads(tiny[0], tiny[1].split(6), queries=2)
    layer, head = tiny_lm.GROUND_TRUTH["positional_head"]
    assert result.label[layer][head] == "positional"
    assert float(result.pos[layer, head]) > 0.99
    layer, head = tiny_lm.GROUND_TRUTH["induction_head"]
    assert result.label[layer][head] == "symbolic"
    assert float(result.sym[layer, head]) > 0.99


def test_constructed_symbolic_head_is_labelled_symbolic():
    rng = np.random.default_rng(0)
    symbols = rng.integers(8, size=(20, 48))
    q, k = (torch.from_numpy(a) for a in symbolic_head(symbols, symbols[:, 7], vocab=8, sharpness=5.0))
    scores = block_swap_scores(q, k, theta=torch.zeros(4, dtype=DOUBLE), scaling=1.0)
    assert float((scores.sym_c - scores.pos_c).mean()) > 0.5


# The reducer


def test_padding_is_as_if_it_were_not_there():
    model = build("llama, grouped keys")
    short, long = torch.arange(2, 32)[None], torch.arange(10, 50)[None]
    padded = torch.cat([torch.cat([short, torch.zeros(1, 10, dtype=torch.long)], 1), long])
    mask = torch.ones_like(padded)
    mask[0, 30:] = 0
    together = rope_heads(model, [{"input_ids": padded, "attention_mask": mask}], queries=2, per_frequency=True)
    apart = rope_heads(model, [short, long], queries=2, per_frequency=True)
    for name in ("pos", "sym", "pos_c", "sym_c", "moved", "entropy", "distance", "freq_pos", "usage", "pos_se"):
        assert torch.allclose(getattr(together, name), getattr(apart, name), atol=1e-4), name
    assert together.n_prompts == 2


def test_prefix_queries_equal_shorter_prompts():
    model = build("llama, grouped keys")
    ids = torch.randint(60, (2, 40), generator=torch.Generator().manual_seed(1))
    both = rope_heads(model, [ids], queries=2)
    half, whole = rope_heads(model, [ids[:, :20]]), rope_heads(model, [ids])
    assert torch.allclose(both.pos, (half.pos + whole.pos) / 2, atol=1e-5)
    assert torch.allclose(both.sym, (half.sym + whole.sym) / 2, atol=1e-5)


def test_window_layers_use_only_the_keys_in_the_window():
    torch.manual_seed(0)
    model = MistralForCausalLM(MistralConfig(**TINY, intermediate_size=16, num_key_value_heads=2, sliding_window=16))
    ids = torch.randint(60, (2, 40), generator=torch.Generator().manual_seed(1))
    result = rope_heads(model, [ids])
    assert float(result.entropy.max()) <= math.log(16) + 1e-6
    assert float(result.distance.max()) < 16


def test_shared_pass_equals_own_pass_and_only_named_layers_are_seen():
    model = build("llama, grouped keys")
    ids = torch.randint(60, (2, 40), generator=torch.Generator().manual_seed(1))
    one, two = RopeHeadsReducer(), RopeHeadsReducer(layers=[1], blocks=4)
    trace(model, [ids], [one, two])
    assert torch.equal(one.result().pos, rope_heads(model, [ids]).pos)
    assert two.result().layers == (1,)
    assert two.result().pos.shape == (1, 4)


def test_batching_does_not_matter_and_runs_repeat():
    model = build("llama, grouped keys")
    ids = torch.randint(60, (5, 40), generator=torch.Generator().manual_seed(1))
    a, b = rope_heads(model, ids.split(1)), rope_heads(model, [ids])
    assert torch.allclose(a.pos, b.pos, atol=1e-5)
    assert torch.allclose(a.sym_se, b.sym_se, atol=1e-5)
    assert torch.equal(b.pos, rope_heads(model, [ids]).pos)


def test_standard_error_is_that_of_the_mean_over_prompts():
    model = build("llama, grouped keys")
    ids = torch.randint(60, (5, 40), generator=torch.Generator().manual_seed(1))
    each = torch.stack([rope_heads(model, [row[None]]).pos for row in ids])
    result = rope_heads(model, [ids])
    assert torch.allclose(result.pos_se, each.std(0) / math.sqrt(5), atol=1e-5)
    assert bool(rope_heads(model, [ids[:1]]).pos_se.isnan().all())


def test_chunks_do_not_matter(monkeypatch):
    model = build("neox, partial rotary")
    ids = torch.randint(60, (5, 40), generator=torch.Generator().manual_seed(1))
    whole = rope_heads(model, [ids], per_frequency=True)
    monkeypatch.setattr("assay.lens._rope_heads._CHUNK_ELEMENTS", 1)
    parts = rope_heads(model, [ids], per_frequency=True)
    assert torch.allclose(whole.pos, parts.pos, atol=1e-5)
    assert torch.allclose(whole.freq_sym, parts.freq_sym, atol=1e-5)


def test_bfloat16_model_agrees_with_float32():
    model = build("llama, grouped keys")
    ids = torch.randint(60, (4, 40), generator=torch.Generator().manual_seed(1))
    full = rope_heads(model, [ids])
    low = rope_heads(model.bfloat16(), [ids])
    assert low.pos.dtype == DOUBLE
    assert float((full.pos - low.pos).abs().mean()) < 0.02


# The result


def test_result_has_table_figure_and_json():
    model = build("llama, grouped keys")
    ids = torch.randint(60, (4, 40), generator=torch.Generator().manual_seed(1))
    result = rope_heads(model, [ids], per_frequency=True)
    assert isinstance(result, RopeHeadsResult)
    assert len(result.table()) == 8
    assert {row["label"] for row in result.table().records()} <= {"positional", "symbolic", "mixed", "diffuse"}
    json.dumps(result.to_dict())
    assert len(result.figure().data) == 2 + 1 + 3
    scores = block_swap_scores(normal(3, 4), normal(3, 40, 4), theta=torch.zeros(2))
    assert len(scores.table()) == 3
    assert scores.figure().data
    json.dumps(scores.to_dict())


# Properties


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(2, 40),
    blocks=st.integers(2, 20),
    freqs=st.integers(0, 3),
    sharpness=st.floats(0, 300),
    seed=st.integers(0, 10**6),
    dtype=st.sampled_from([torch.float32, DOUBLE, torch.bfloat16]),
)
def test_scores_stay_in_range(n, blocks, freqs, sharpness, seed, dtype):
    q, k = normal(2, 6, seed=seed, dtype=DOUBLE) * sharpness, normal(2, n, 6, seed=seed + 1, dtype=DOUBLE)
    scores = block_swap_scores(q.to(dtype), k.to(dtype), theta=torch.rand(freqs), blocks=blocks)
    for name in ("pos", "sym", "moved", "pair_pos", "pair_sym", "pair_moved"):
        values = getattr(scores, name)
        assert float(values.min()) >= -1e-6, name
        assert float(values.max()) <= 1 + 1e-5, name
    for name in ("pos_c", "sym_c"):
        assert float(getattr(scores, name).abs().max()) <= 1 + 1e-5, name
    assert float(scores.entropy.max()) <= math.log(n) + 1e-5
    assert len(scores.pairs) == math.comb(min(blocks, n), 2)
    assert scores.n_fixed + min(blocks, n) * scores.block_size == n


def test_non_contiguous_and_broadcast_inputs():
    theta = torch.tensor([0.4, 0.05], dtype=DOUBLE)
    q, k = normal(3, 4), normal(40, 3, 4, seed=1).transpose(0, 1)
    a = block_swap_scores(q, k, theta=theta)
    b = block_swap_scores(q.clone(), k.contiguous(), theta=theta)
    assert torch.equal(a.pos, b.pos)
    shared = block_swap_scores(q, k[0], theta=theta)
    assert float(shared.pos[0]) == pytest.approx(float(a.pos[0]), abs=1e-12)


# What it refuses


def test_fewer_than_two_blocks():
    with pytest.raises(InputError, match="need at least 2 full blocks, got 1"):
        block_swap_scores(normal(4), normal(1, 4), theta=torch.zeros(2))
    with pytest.raises(ValueError, match="need at least 2 full blocks"):
        block_swap_scores(normal(4), normal(9, 4), theta=torch.zeros(2), blocks=1)
    with pytest.raises(InputError, match="need at least 2 full blocks, got 0"):
        rope_heads(build("llama, grouped keys"), [torch.zeros(1, 1, dtype=torch.long)])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": torch.zeros(9, 3)}, "last dimension must agree"),
        ({"theta": torch.zeros(3)}, "at most 2 frequencies"),
        ({"positions": torch.arange(4)}, "one for each of the 9 keys"),
        ({"weighting": "loud"}, "weighting is 'loud'"),
        ({"tau": 0.0}, "tau is 0.0"),
    ],
)
def test_bad_arguments(change, message):
    arguments = {"q": torch.zeros(4), "k": torch.zeros(9, 4), "theta": torch.zeros(2)} | change
    q, k = arguments.pop("q"), arguments.pop("k")
    with pytest.raises(InputError, match=message):
        block_swap_scores(q, k, **arguments)


def test_bad_reducer_arguments():
    with pytest.raises(InputError, match="keep_first is -1"):
        RopeHeadsReducer(keep_first=-1)
    with pytest.raises(InputError, match="queries is 0"):
        RopeHeadsReducer(queries=0)
    with pytest.raises(InputError, match="no prompts were seen"):
        RopeHeadsReducer().result()


def test_bound_needs_square_tables():
    with pytest.raises(InputError, match="square"):
        exclusion_bound(torch.zeros(3, 4))


def test_models_without_rotary_or_causality_are_refused():
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=60, n_embd=16, n_layer=1, n_head=2, n_positions=64))
    bert = BertModel(
        BertConfig(vocab_size=60, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    )
    for model in (gpt2, bert):
        with pytest.raises(NotApplicable, match="no rotary position embedding"):
            rope_heads(model, [torch.arange(40)[None]])
    q = normal(1, 1, 20, 4)
    with pytest.raises(NotApplicable, match="looks ahead"):
        RopeHeadsReducer().update("attn", 0, view_of(q, q, torch.ones(2), causal=False), Batch({}, None, 0))


def test_masks_per_head_and_key_caches_are_refused():
    q = normal(1, 2, 20, 4)
    mask = torch.ones(1, 2, 20, 20, dtype=torch.bool)
    with pytest.raises(NotApplicable, match="one attention mask"):
        RopeHeadsReducer().update("attn", 0, view_of(q, q, torch.ones(2), mask=mask), Batch({}, None, 0))
    with pytest.raises(NotApplicable, match="without a key cache"):
        RopeHeadsReducer().update("attn", 0, view_of(q[:, :, -1:], q, torch.ones(2)), Batch({}, None, 0))


def test_real_checkpoint(shared_data):
    from assay.core.checkpoint import open_checkpoint

    model = open_checkpoint(shared_data("stories260k") / "hf").load()
    ids = torch.randint(3, 500, (2, 64), generator=torch.Generator().manual_seed(0))
    result = rope_heads(model, [ids], per_frequency=True)
    assert result.pos.shape == (5, 8)
    assert bool(torch.isfinite(result.freq_pos).all())
