import itertools
import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertModel,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Model,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTModel,
)

from assay.core.checkpoint import open_checkpoint
from assay.core.errors import InputError, NotApplicable
from assay.core.results import jsonable
from assay.core.text import token_windows
from assay.lens import _noise_stability as module
from assay.lens._noise_stability import (
    HardAttention,
    NoiseStabilityRegularizer,
    Sensitivity,
    StabilityCurve,
    average_sensitivity,
    noise_stability,
    propagate_interval,
    relu_kernel,
    token_influence,
)
from assay.reference import tiny_lm
from assay.reference._text import sample

GRID = (0.0, 0.3, 0.5, 0.9, 1.0)
BIG = {"n_pairs": 60_000, "batch_size": 60_000}


def normal(d):
    return lambda n, rng: torch.randn(n, d, generator=rng, dtype=torch.float64)


def uniform(n_tokens, vocab=2):
    return lambda n, rng: torch.randint(vocab, (n, n_tokens), generator=rng)


def signs(bits):
    return 1.0 - 2.0 * bits.double()


def parity(k):
    return lambda bits: signs(bits[:, :k]).prod(1, keepdim=True)


def majority(bits):
    return signs(bits[:, :3]).sum(1, keepdim=True).sign()


def exact_curve(rho, share, kernel="bonami", se=0.0, n_windows=100):
    rho, share = torch.tensor(rho, dtype=torch.float64), torch.as_tensor(share, dtype=torch.float64)
    error = torch.full_like(share, se)
    return StabilityCurve(rho, share, error, 1.0, share, error, 100, n_windows, 200, kernel, False, "output")


def assert_close(curve, expected, z=4.5):
    expected = torch.tensor(expected, dtype=torch.float64)
    assert bool(((curve.value - expected).abs() <= z * curve.stderr + 1e-12).all()), (curve.value, expected)


# Exact values


def test_linear_function_has_stability_rho_times_norm():
    w = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    curve = noise_stability(lambda x: x @ w[:, None], normal(3), GRID, **BIG)
    assert_close(curve, [r * 5.25 for r in GRID])
    assert curve.norm2 == pytest.approx(5.25, rel=0.02)


@pytest.mark.parametrize("kernel", ["gaussian", "bonami", "paper"])
def test_constant_has_stability_c_squared_exactly(kernel):
    draw = normal(3) if kernel == "gaussian" else uniform(3)
    curve = noise_stability(lambda x: torch.full((len(x), 1), -1.5), draw, GRID, kernel=kernel, vocab=2, n_pairs=50)
    assert curve.value.tolist() == [2.25] * 5
    assert curve.share.tolist() == [1.0] * 5
    assert curve.stderr.tolist() == [0.0] * 5
    assert curve.tail_bound(1) == 0


def test_product_of_two_has_stability_rho_squared():
    curve = noise_stability(lambda x: x[:, :1] * x[:, 1:2], normal(4), GRID, **BIG)
    assert_close(curve, [r**2 for r in GRID])


@pytest.mark.parametrize("k", [1, 2, 3])
def test_hermite_polynomial_has_stability_rho_to_the_k(k):
    polynomial = {1: lambda x: x, 2: lambda x: x**2 - 1, 3: lambda x: x**3 - 3 * x}[k]
    curve = noise_stability(lambda x: polynomial(x) / math.sqrt(math.factorial(k)), normal(1), GRID, **BIG)
    assert_close(curve, [r**k for r in GRID])


@pytest.mark.parametrize("k", [1, 3, 5])
def test_parity_has_stability_rho_to_the_k_under_bonami(k):
    curve = noise_stability(parity(k), uniform(6), GRID, kernel="bonami", vocab=2, **BIG)
    assert_close(curve, [r**k for r in GRID])
    assert curve.norm2 == 1


@pytest.mark.parametrize("k", [1, 3])
def test_parity_has_stability_half_of_one_plus_rho_to_the_k_under_the_papers_kernel(k):
    curve = noise_stability(parity(k), uniform(6), GRID, kernel="paper", vocab=2, **BIG)
    assert_close(curve, [((1 + r) / 2) ** k for r in GRID])


def test_majority_of_three_has_stability_three_quarters_rho_plus_a_quarter_rho_cubed():
    curve = noise_stability(majority, uniform(5), GRID, kernel="bonami", vocab=2, **BIG)
    assert_close(curve, [0.75 * r + 0.25 * r**3 for r in GRID])


@pytest.mark.parametrize(
    ("rho", "kappa"), [(0.0, 0.159155), (0.25, 0.226655), (0.5, 0.304499), (0.9, 0.454769), (1.0, 0.5)]
)
def test_relu_kernel_table(rho, kappa):
    assert float(relu_kernel(rho)) == pytest.approx(kappa, abs=5e-7)
    assert float(relu_kernel(rho, normalised=True)) == 2 * float(relu_kernel(rho))


def test_relu_kernel_agrees_with_monte_carlo():
    rhos = (0.0, 0.25, 0.5, 0.9, 1.0)
    curve = noise_stability(torch.relu, normal(1), rhos, **BIG)
    assert_close(curve, [float(relu_kernel(r)) for r in rhos])


def test_tail_bound_of_parity_is_one_at_its_degree():
    for k in (1, 2, 4, 8):
        curve = exact_curve((0.3, 0.5, 0.9), [0.3**k, 0.5**k, 0.9**k])
        assert curve.tail_bound(k) == pytest.approx(1.0, abs=1e-12)
        assert curve.tail_bound(k + 1) == pytest.approx(min((1 - r**k) / (1 - r ** (k + 1)) for r in (0.3, 0.5, 0.9)))
        halved = exact_curve((0.0, 0.5), [0.5**k, 0.75**k], kernel="paper")
        assert halved.tail_bound(k) == pytest.approx(1.0, abs=1e-12)


def test_total_influence_of_parity_is_k_and_its_bound_at_k_is_one():
    k = 3
    sensitivity = average_sensitivity(parity(k), uniform(6), 2, n_pairs=60_000, batch_size=60_000)
    assert abs(sensitivity.value - k) <= 4.5 * sensitivity.stderr
    exact = Sensitivity(float(k), 0.0, 1.0, float(k), 0.0, 1, 1, 2, False, "output")
    assert exact.tail_bound(k) == 1
    assert exact.tail_bound(2 * k) == 0.5
    influence = token_influence(parity(k), uniform(6), 2, n_windows=4000, batch_size=24_000)
    assert influence.influence[k:].tolist() == [0.0] * (6 - k)
    assert bool(((influence.influence[:k] - 2).abs() <= 4.5 * influence.stderr[:k]).all())
    assert influence.total == pytest.approx(k, rel=0.05)
    assert influence.influential() == k


@settings(max_examples=15, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10_000), vocab=st.integers(2, 3), n=st.integers(1, 4))
def test_stability_equals_enumeration_and_rises_with_rho(seed, vocab, n):
    rng = torch.Generator().manual_seed(seed)
    inputs = torch.tensor(list(itertools.product(range(vocab), repeat=n)))
    table = torch.randn(len(inputs), 2, generator=rng, dtype=torch.float64)
    place = vocab ** torch.arange(n - 1, -1, -1)

    def f(x):
        return table[(x * place).sum(1)]

    same = (inputs[:, None] == inputs).double()
    exact = []
    for r in GRID:
        transition = (r * same + (1 - r) / vocab).prod(-1)
        exact.append(float((table * (transition @ table)).sum() / len(inputs)))
    # Windows that are all inputs once: what is left to chance is the noise within each.
    curve = noise_stability(
        f, inputs, GRID, kernel="bonami", vocab=vocab, n_pairs=2000 * len(inputs), batch_size=100_000
    )
    spread = float(table.square().sum(-1).max()) / math.sqrt(2000 * len(inputs))
    assert np.allclose(curve.value, exact, atol=5 * spread)
    assert curve.norm2 == pytest.approx(exact[-1])
    assert curve.value[-1] == pytest.approx(curve.norm2)
    assert exact[0] == pytest.approx(float(table.mean(0).square().sum()))
    assert bool((curve.value.diff() >= -10 * spread).all())


def test_rho_zero_and_one_are_the_squared_mean_and_the_second_moment():
    f = lambda x: (x + 1.0).double()  # noqa: E731
    gaussian = noise_stability(f, normal(1), (0.0, 1.0), **BIG)
    assert_close(gaussian, [1.0, 2.0])
    assert gaussian.value[1] == gaussian.norm2
    bonami = noise_stability(lambda b: b.double(), uniform(1), (0.0, 1.0), kernel="bonami", vocab=2, **BIG)
    assert_close(bonami, [0.25, 0.5])


@pytest.mark.parametrize("output", ["probs", "logits"])
def test_regulariser_at_rho_one_is_minus_the_squared_norm(output):
    model, ids = classifier(), torch.randint(7, (5, 2), generator=torch.Generator().manual_seed(0))
    term = NoiseStabilityRegularizer(0.5, 1.0, vocab=7, output=output)(model, ids)
    logits = model(ids)
    m = logits.softmax(-1) if output == "probs" else logits
    torch.testing.assert_close(term, -0.5 * m.square().sum(-1).mean())


def classifier(seed=0, vocab=7):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Embedding(vocab, 6), nn.Flatten(), nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, vocab))


def trained(gamma, steps=15, seed=0, **options):
    model = classifier()
    term = None if gamma is None else NoiseStabilityRegularizer(gamma, 0.25, vocab=7, seed=seed, **options)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=1.0)
    a, b = torch.meshgrid(torch.arange(7), torch.arange(7), indexing="ij")
    ids, target = torch.stack([a, b], -1).reshape(-1, 2), ((a + b) % 7).reshape(-1)
    for _ in range(steps):
        out = model(ids)
        loss = nn.functional.cross_entropy(out, target)
        if term is not None:
            loss = loss + term(model, ids, out)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return model.state_dict()


def test_gamma_zero_trains_bit_identically():
    plain, with_term = trained(None), trained(0.0)
    assert all(torch.equal(plain[k], with_term[k]) for k in plain)
    assert not all(torch.equal(plain[k], v) for k, v in trained(0.5).items())


def test_fixed_points_of_the_relu_kernel():
    exact = linear = 0.9
    for _ in range(200):
        exact = float(relu_kernel(exact))
        linear = 1 / (2 * math.pi) + linear / 4
    assert exact == pytest.approx(0.2172336, abs=5e-8)
    assert linear == pytest.approx(2 / (3 * math.pi), abs=1e-12)
    assert linear == pytest.approx(0.212207, abs=5e-7)
    cosine = 0.1
    for _ in range(3000):
        cosine = float(relu_kernel(cosine, normalised=True))
    assert cosine == pytest.approx(1, abs=1e-4)


def test_relu_kernel_second_order_expansion_and_range():
    r = torch.linspace(-0.05, 0.05, 11, dtype=torch.float64)
    series = 1 / (2 * math.pi) + r / 4 + r**2 / (4 * math.pi)
    torch.testing.assert_close(relu_kernel(r), series, rtol=0, atol=1e-6)
    grid = torch.linspace(-1, 1, 1001, dtype=torch.float64)
    assert bool((relu_kernel(grid).diff() >= 0).all())
    assert float(relu_kernel(-1.0)) == pytest.approx(0, abs=1e-12)
    assert torch.autograd.gradcheck(relu_kernel, (grid[100:900:50].clone().requires_grad_(),))
    with pytest.raises(InputError, match=r"\[-1,1\]"):
        relu_kernel(1.01)


# Estimator


def test_pairs_of_a_window_count_as_dependent_and_errors_are_honest():
    f = lambda x: (x.exp() / 2).double()  # noqa: E731
    truth = math.exp(1 + 0.6) / 4
    estimates, errors = [], []
    for seed in range(300):
        x = torch.randn(40, 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        curve = noise_stability(f, x, (0.6,), n_pairs=400, batch_size=400, seed=seed)
        estimates.append(float(curve.value[0]))
        errors.append(float(curve.stderr[0]))
        assert curve.n_windows == 40
    spread = np.std(estimates)
    assert abs(np.mean(estimates) - truth) < 4 * spread / math.sqrt(300)
    assert math.sqrt(np.mean(np.square(errors))) / spread == pytest.approx(1, abs=0.2)


def test_the_error_of_the_share_covers_the_truth():
    inside = 0
    for seed in range(200):
        curve = noise_stability(
            majority, uniform(3), 0.5, kernel="bonami", vocab=2, n_pairs=300, batch_size=300, seed=seed
        )
        inside += abs(float(curve.share[0]) - 0.40625) <= 1.96 * float(curve.share_stderr[0])
    assert 180 <= inside <= 199


def test_centred_stability_is_the_covariance():
    f = lambda x: torch.cat([x + 3.0, x**2], 1).double()  # noqa: E731
    for size in (60_000, 64):
        options = {"n_pairs": 60_000 if size > 64 else 6000, "batch_size": size}
        curve = noise_stability(f, normal(1), GRID, centre=True, **options)
        assert_close(curve, [r + 2 * r**2 for r in GRID])
        assert curve.norm2 == pytest.approx(3, rel=0.15)
        assert curve.value[-1] == curve.norm2
        assert curve.centred


def test_centred_estimates_are_unbiased_with_few_windows():
    values = []
    for seed in range(400):
        x = torch.randn(3, 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        curve = noise_stability(lambda x: x + 10, x, (0.5, 1.0), centre=True, n_pairs=3, seed=seed)
        values.append(curve.value.tolist())
    mean, error = np.mean(values, 0), np.std(values, 0) / 20
    assert np.all(np.abs(mean - [0.5, 1.0]) < 4 * error)


def test_centring_changes_the_share_of_sensitivity_and_not_its_value():
    f = lambda bits: parity(2)(bits) + 2  # noqa: E731
    options = {"n_pairs": 4000, "batch_size": 4000}
    plain = average_sensitivity(f, uniform(4), 2, **options)
    centred = average_sensitivity(f, uniform(4), 2, centre=True, **options)
    assert plain.value == centred.value
    assert plain.norm2 == pytest.approx(5, rel=0.05)
    assert centred.norm2 == pytest.approx(1, rel=0.05)


def test_windows_are_evaluated_once_whatever_the_number_of_pairs():
    calls = []

    def f(x):
        calls.append(len(x))
        return x.double()

    ids = torch.randint(5, (4, 3), generator=torch.Generator().manual_seed(0))
    curve = noise_stability(f, ids, (0.0, 0.5, 1.0), kernel="bonami", vocab=5, n_pairs=10, batch_size=6)
    assert sum(calls) == curve.n_passes == 4 + 2 * 10
    assert max(calls) <= 6
    assert (curve.n_pairs, curve.n_windows) == (10, 4)
    few = noise_stability(f, ids, 0.5, kernel="bonami", vocab=5, n_pairs=2)
    assert (few.n_pairs, few.n_windows) == (2, 2)
    assert noise_stability(f, ids, 0.5, kernel="bonami", vocab=5, n_pairs=1).stderr.isnan().all()


def test_the_batch_size_does_not_change_token_results():
    f = lambda x: torch.stack([x.double().sin().sum(1), x[:, 0] * x[:, 1].double()], 1)  # noqa: E731
    ids = torch.randint(9, (7, 5), generator=torch.Generator().manual_seed(0))
    options = {"kernel": "bonami", "vocab": 9, "n_pairs": 50}
    whole, parts = (noise_stability(f, ids, GRID, batch_size=b, **options) for b in (64, 3))
    torch.testing.assert_close(whole.value, parts.value)
    assert whole.norm2 == pytest.approx(parts.norm2)
    a, b = (average_sensitivity(f, ids, 9, n_pairs=50, batch_size=b) for b in (64, 3))
    assert a.value == pytest.approx(b.value)
    c, d = (token_influence(f, ids, 9, batch_size=b) for b in (64, 3))
    torch.testing.assert_close(c.influence, d.influence)


def test_the_same_seed_gives_the_same_curve():
    ids = torch.randint(9, (7, 5), generator=torch.Generator().manual_seed(0))
    run = lambda seed: noise_stability(  # noqa: E731
        lambda x: x.double().cos(), ids, (0.3, 0.8), kernel="paper", vocab=9, n_pairs=40, seed=seed
    )
    before = torch.get_rng_state()
    assert torch.equal(run(1).value, run(1).value)
    assert not torch.equal(run(1).value, run(2).value)
    assert torch.equal(before, torch.get_rng_state())


def test_positions_are_spread_evenly():
    seen = torch.zeros(10)

    def f(x):
        seen.add_((x != 0).sum(0))
        return x.double()

    average_sensitivity(f, torch.zeros(5, 10, dtype=torch.long), 10_000, n_pairs=1000)
    assert seen.min() >= 98
    assert seen.max() <= 102


def test_tail_bounds_of_sensitivity_and_stability_agree_near_rho_one():
    curve = noise_stability(majority, uniform(3), (0.3, 0.6, 0.9, 0.98), kernel="bonami", vocab=2, **BIG)
    sensitivity = average_sensitivity(majority, uniform(3), 2, n_pairs=60_000, batch_size=60_000)
    assert sensitivity.value == pytest.approx(1.5, abs=0.03)
    assert sensitivity.tail_bound(3, level=0.999) >= 0.25
    assert curve.tail_bound(3, level=0.999) >= 0.25
    near = exact_curve((0.9999,), [0.75 * 0.9999 + 0.25 * 0.9999**3])
    assert near.tail_bound(3) == pytest.approx(0.5, abs=1e-3)


def test_tail_bound_with_a_level_is_wider_and_corrected_for_the_grid():
    one = exact_curve((0.9,), [0.95], se=0.01)
    delta = one.tail_bound(15) * (1 - 0.9**15)
    assert delta == pytest.approx(0.05)
    wide = one.tail_bound(15, level=0.95) * (1 - 0.9**15)
    assert wide == pytest.approx(0.05 + 1.6604 * 0.01, abs=1e-5)
    two = exact_curve((0.9, 0.0), [0.95, 0.0], se=0.01)
    assert two.tail_bound(15, level=0.95) > one.tail_bound(15, level=0.95)
    assert exact_curve((0.5,), [1.02]).tail_bound(3) == 0


def test_degree_is_where_the_tail_bound_reaches_epsilon():
    curve = exact_curve((0.5, 0.9, 0.95), [0.6, 0.9, 0.96])
    for epsilon in (0.05, 0.1, 0.2, 0.5):
        degree = curve.degree(epsilon)
        assert curve.tail_bound(int(degree)) <= epsilon * (1 + 1e-9)
        if degree > 1:
            assert curve.tail_bound(int(degree) - 1) > epsilon
    assert curve.degree(0.03) == math.inf
    assert exact_curve((0.0,), [0.9]).degree(0.2) == 1
    with pytest.raises(InputError, match="above 0"):
        curve.degree(0)


def test_a_function_that_is_zero_has_no_share():
    curve = noise_stability(lambda x: 0 * x.double(), uniform(3), (0.0, 0.5), kernel="bonami", vocab=2, n_pairs=8)
    assert curve.norm2 == 0
    assert math.isnan(curve.tail_bound(2))
    json.dumps(jsonable(curve.to_dict()), allow_nan=False)
    assert math.isnan(average_sensitivity(lambda x: 0 * x.double(), uniform(3), 2, n_pairs=8).tail_bound(2))


# Protected tokens


def test_protected_tokens_are_neither_resampled_nor_drawn():
    seen = []

    def f(x):
        seen.append(x.clone())
        return x.double()

    ids = torch.tensor([[0, 5, 3, 1], [0, 4, 4, 1]])
    noise_stability(f, ids, (0.0, 0.4), kernel="bonami", vocab=6, n_pairs=400, protect=[0, 1, 99])
    average_sensitivity(f, ids, 6, n_pairs=400, protect=[0, 1])
    token_influence(f, ids, 6, protect=[0, 1])
    every = torch.cat(seen)
    assert every[:, 0].unique().tolist() == [0]
    assert every[:, 3].unique().tolist() == [1]
    assert every[:, 1:3].unique().tolist() == [2, 3, 4, 5]


def test_influence_of_a_protected_position_is_zero_and_windows_may_differ():
    f = lambda x: x[:, :, None].eq(torch.arange(4)).double().flatten(1)  # noqa: E731
    ids = torch.tensor([[0, 2, 0], [0, 3, 2]])
    found = token_influence(f, ids.repeat(500, 1), 4, n_windows=1000, protect=[0])
    assert found.influence[0] == 0
    # A new token among three differs in two cases of three, and then by 2; position 2 is free in half of the windows.
    assert found.influence[1] == pytest.approx(4 / 3, rel=0.1)
    assert found.influence[2] == pytest.approx(2 / 3, rel=0.2)
    total = average_sensitivity(f, ids, 4, n_pairs=6000, protect=[0], batch_size=6000)
    assert total.value == pytest.approx(1.0, rel=0.05)
    assert found.total == pytest.approx(1.0, rel=0.1)


# Models


def llama(**changes):
    torch.manual_seed(0)
    settings = {
        "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "max_position_embeddings": 32,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**(settings | changes)))


def bert_config():
    torch.manual_seed(0)
    return BertConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=32, num_labels=3,
    )  # fmt: skip


IDS = torch.randint(3, 40, (6, 9), generator=torch.Generator().manual_seed(3))


def by_hand(model, f, rho=(0.0, 0.6, 1.0), **options):
    """The curve of a model and that of a plain function which should be the same."""
    common = {"kernel": "bonami", "n_pairs": 20, "protect": [0, 1, 2]}
    of_model = noise_stability(model, IDS, rho, **common, **options)
    model.eval()
    of_function = noise_stability(f, IDS, rho, vocab=40, **common)
    torch.testing.assert_close(of_model.value, of_function.value, rtol=1e-4, atol=1e-7)
    assert of_model.norm2 == pytest.approx(of_function.norm2, rel=1e-4)
    return of_model


def test_a_causal_model_gives_the_next_token_at_the_last_position():
    model = llama().train()
    curve = by_hand(model, lambda x: model(x).logits[:, -1].softmax(-1))
    assert "next-token probabilities (last position)" in curve.table().title
    by_hand(model, lambda x: model(x).logits[:, -1], output="logits")
    by_hand(model, lambda x: model(x).logits[:, 3].softmax(-1), position=3)


def test_a_soft_cap_is_applied():
    torch.manual_seed(0)
    model = Gemma2ForCausalLM(
        Gemma2Config(
            vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, head_dim=8, max_position_embeddings=32, final_logit_softcapping=0.01,
        )
    )  # fmt: skip
    by_hand(model, lambda x: model(x).logits[:, -1], output="logits")


def test_the_head_runs_at_the_last_position_only():
    model, shapes = llama(), []
    model.lm_head.register_forward_pre_hook(lambda _m, a: shapes.append(a[0].shape))
    noise_stability(model, IDS, 0.5, kernel="bonami", n_pairs=6)
    assert all(s.numel() == 6 * 16 for s in shapes)


def test_a_masked_model_gives_the_mean_over_positions_that_are_not_protected():
    model = BertForMaskedLM(bert_config())
    ids = torch.cat([torch.full((6, 1), 1), IDS[:, 2:], torch.full((6, 1), 2)], 1)
    common = {"kernel": "bonami", "n_pairs": 12, "protect": [0, 1, 2]}
    of_model = noise_stability(model, ids, 0.5, **common)
    model.eval()
    f = lambda x: model(x).logits[:, 1:-1].softmax(-1).mean(1)  # noqa: E731
    of_function = noise_stability(f, ids, 0.5, vocab=40, **common)
    torch.testing.assert_close(of_model.value, of_function.value, rtol=1e-4, atol=1e-7)
    ids[:, 4] = 0
    of_mask = noise_stability(model, ids, 0.5, position=4, **common)
    of_function = noise_stability(lambda x: model(x).logits[:, 4].softmax(-1), ids, 0.5, vocab=40, **common)
    torch.testing.assert_close(of_mask.value, of_function.value, rtol=1e-4, atol=1e-7)


def test_a_sequence_classifier_gives_its_classes():
    model = BertForSequenceClassification(bert_config())
    curve = by_hand(model, lambda x: model(x).logits.softmax(-1))
    assert curve.of == "class probabilities"


def test_models_without_a_head_give_hidden_states():
    encoder = BertModel(bert_config())
    by_hand(encoder, lambda x: encoder(x).last_hidden_state.mean(1))
    torch.manual_seed(0)
    decoder = GPT2Model(GPT2Config(vocab_size=40, n_positions=16, n_embd=16, n_layer=1, n_head=2))
    by_hand(decoder, lambda x: decoder(x).last_hidden_state[:, -1])


def test_influence_and_sensitivity_of_a_model_equal_those_of_its_function():
    model = llama().eval()
    f = lambda x: model(x).logits[:, -1].softmax(-1)  # noqa: E731
    a, b = average_sensitivity(model, IDS, n_pairs=30), average_sensitivity(f, IDS, 40, n_pairs=30)
    assert a.value == pytest.approx(b.value, rel=1e-3)
    c, d = token_influence(model, IDS), token_influence(f, IDS, 40)
    torch.testing.assert_close(c.influence, d.influence, rtol=1e-3, atol=1e-9)
    causal = token_influence(model, IDS, position=4)
    assert causal.influence[5:].tolist() == [0.0] * 4
    assert bool((causal.influence[:5] > 0).all())


def test_noise_on_the_embeddings_of_a_model():
    model = llama().eval()
    curve = noise_stability(model, IDS, (0.0, 0.5, 1.0), kernel="gaussian", n_pairs=600, protect=[0], output="logits")
    assert curve.value[-1] == curve.norm2
    assert curve.share[0] < curve.share[1] < 1
    # By hand on the embeddings themselves, in standard units.
    embeddings = model.model.embed_tokens(IDS).detach().double()
    mean, std = embeddings.flatten(0, 1).mean(0), embeddings.flatten(0, 1).std(0, correction=0)
    units = (embeddings - mean) / std
    f = lambda u: model(inputs_embeds=(mean + std * u).float()).logits[:, -1]  # noqa: E731
    same = noise_stability(f, units, (0.0, 0.5, 1.0), n_pairs=600)
    torch.testing.assert_close(curve.value, same.value, rtol=1e-3, atol=1e-6)
    # Positions that are protected keep their embedding.
    fixed = noise_stability(model, IDS, 0.0, kernel="gaussian", n_pairs=6, protect=IDS[:, 1:].unique().tolist())
    assert fixed.n_pairs == 6


def test_a_model_is_left_in_its_mode():
    model = llama().train()
    model.model.layers[0].eval()
    noise_stability(model, IDS, 0.5, kernel="bonami", n_pairs=2)
    assert model.training
    assert not model.model.layers[0].training
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtypes_of_models(dtype):
    expected = noise_stability(llama(), IDS, (0.3, 0.9), kernel="bonami", n_pairs=30)
    curve = noise_stability(llama().to(dtype), IDS, (0.3, 0.9), kernel="bonami", n_pairs=30)
    assert curve.value.dtype == torch.float64
    torch.testing.assert_close(curve.value, expected.value, rtol=0.02 if dtype == torch.bfloat16 else 1e-5, atol=0)


def test_inputs_that_are_not_contiguous_or_of_another_integer_type():
    options = {"kernel": "bonami", "n_pairs": 12}
    expected = noise_stability(llama(), IDS, 0.5, **options)
    strided = noise_stability(llama(), IDS.T.contiguous().T, 0.5, **options)
    narrow = noise_stability(llama(), IDS.int(), 0.5, **options)
    assert torch.equal(strided.value, expected.value)
    assert torch.equal(narrow.value, expected.value)


def test_the_built_in_model_is_stable_at_high_correlation_only():
    checkpoint = open_checkpoint(tiny_lm.load())
    tokenizer = checkpoint.tokenizer()
    ids = token_windows(tokenizer, [sample()], tokens=32 * 64, context=32).input_ids
    curve = noise_stability(
        checkpoint.load(), ids, (0.0, 0.9), kernel="bonami", n_pairs=64, protect=tokenizer.all_special_ids
    )
    assert curve.share[0] + 4 * curve.share_stderr[0] < curve.share[1]
    assert 0.3 < curve.share[1] < 1


def test_a_real_model_listens_to_its_last_tokens(shared_data):
    checkpoint = open_checkpoint(shared_data("stories260k") / "hf")
    tokenizer = checkpoint.tokenizer()
    ids = token_windows(tokenizer, [sample()], tokens=32 * 16, context=32).input_ids
    found = token_influence(checkpoint.load(), ids, n_windows=16, protect=tokenizer.all_special_ids)
    assert int(found.influence.argmax()) >= 29


# Regulariser


def test_gradient_flows_through_both_passes():
    model = classifier().double()
    ids = torch.randint(7, (6, 2), generator=torch.Generator().manual_seed(0))

    def gradient(**which):
        term = NoiseStabilityRegularizer(1.0, 0.0, vocab=7, seed=3)
        model.zero_grad()
        outputs = model(ids)
        term(model, ids, outputs.detach() if which.get("first") == 0 else outputs).backward()
        return model[2].weight.grad.clone()

    both, second = gradient(), gradient(first=0)
    # What is left is the first pass alone: the noisy output held fixed.
    alphabet = module._Alphabet(7, ())
    noisy = module._token_noise(ids, alphabet, "paper", module.generator(3, "noise"))(0.0)
    model.zero_grad()
    (-(model(ids).softmax(-1) * model(noisy).softmax(-1).detach()).sum(-1).mean()).backward()
    first = model[2].weight.grad
    assert first.abs().max() > 1e-6
    assert second.abs().max() > 1e-6
    torch.testing.assert_close(both, first + second)


def test_regulariser_has_bounds_and_a_sign():
    model, ids = classifier(), torch.randint(7, (64, 2), generator=torch.Generator().manual_seed(0))
    reward = NoiseStabilityRegularizer(0.75, 0.25, vocab=7)(model, ids)
    punish = NoiseStabilityRegularizer(0.75, 0.25, vocab=7, reward=False)(model, ids)
    assert -0.75 <= reward < 0
    assert reward == -punish


def test_regulariser_takes_models_with_a_position_and_saves_a_pass():
    model, calls = llama(), []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    term = NoiseStabilityRegularizer(1.0, 1.0, vocab=40)
    out = model(IDS)
    value = term(model, IDS, out)
    assert len(calls) == 2
    torch.testing.assert_close(value, -out.logits[:, -1].softmax(-1).square().sum(-1).mean())
    at = NoiseStabilityRegularizer(1.0, 1.0, vocab=40, position=2)(model, IDS)
    torch.testing.assert_close(at, -out.logits[:, 2].softmax(-1).square().sum(-1).mean())


def test_regulariser_resumes_its_noise():
    model, ids = classifier(), torch.randint(7, (8, 2), generator=torch.Generator().manual_seed(0))
    term = NoiseStabilityRegularizer(1.0, 0.25, vocab=7, seed=1)
    term(model, ids)
    saved = term.state_dict()
    expected = term(model, ids)
    other = NoiseStabilityRegularizer(1.0, 0.25, vocab=7, seed=9)
    other.load_state_dict(saved)
    assert other(model, ids) == expected
    again = NoiseStabilityRegularizer(1.0, 0.25, vocab=7, seed=9)
    assert again(model, ids) != expected
    assert all(torch.equal(v, trained(0.5)[k]) for k, v in trained(0.5).items())


def test_regulariser_on_real_inputs_and_in_bfloat16():
    model = nn.Linear(4, 3)
    x = torch.randn(2000, 4, generator=torch.Generator().manual_seed(0))
    term = NoiseStabilityRegularizer(1.0, 0.5, kernel="gaussian", output="logits")(model, x)
    expected = -(0.5 * model.weight.square().sum() + model.bias.square().sum())
    assert float(term.detach()) == pytest.approx(float(expected.detach()), rel=0.2)
    low = NoiseStabilityRegularizer(1.0, 0.25, vocab=7)(classifier().bfloat16(), torch.zeros(4, 2, dtype=torch.long))
    assert low.dtype == torch.float32


def test_the_regulariser_alone_makes_a_model_stable():
    a, b = torch.meshgrid(torch.arange(7), torch.arange(7), indexing="ij")
    ids = torch.stack([a, b], -1).reshape(-1, 2)
    for reward in (True, False):
        model = classifier()
        term = NoiseStabilityRegularizer(1.0, 0.25, vocab=7, kernel="bonami", reward=reward)
        measure = lambda model=model: float(  # noqa: E731
            noise_stability(lambda x: model(x).softmax(-1), ids, 0.25, kernel="bonami", vocab=7, n_pairs=980).value[0]
        )
        before = measure()
        optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
        for _ in range(100):
            optimiser.zero_grad()
            term(model, ids).backward()
            optimiser.step()
        after = measure()
        assert after > 0.9 if reward else after < before


# Layers


def test_propagation_of_cosines_is_the_normalised_kernel():
    # √2·I makes up for the half that a ReLU takes.
    weight = math.sqrt(2) * torch.eye(3)
    found = propagate_interval([weight, nn.ReLU()] * 3, (0.2, 0.7), normalised=True)
    low, high = 0.2, 0.7
    for step in (1, 3, 5):
        low, high = (float(relu_kernel(r, normalised=True)) for r in (low, high))
        assert found[step][0].tolist() == pytest.approx([low] * 3)
        assert found[step][1].tolist() == pytest.approx([high] * 3)
    raw = propagate_interval([nn.ReLU()], 0.4)
    assert raw[0][0].tolist() == raw[0][1].tolist() == [pytest.approx(float(relu_kernel(0.4)))]


def test_a_linear_map_scales_rho_by_the_squared_norms_of_its_rows():
    weight = torch.tensor([[3.0, 4.0], [1.0, 0.0]])
    (low, high), (low2, high2) = propagate_interval([weight, nn.Linear(2, 2, bias=False)], (0.25, 0.5))
    assert low.tolist() == [6.25, 0.25]
    assert high.tolist() == [12.5, 0.5]
    assert len(low2) == len(high2) == 2
    cosines = propagate_interval([weight], (0.25, 0.5), normalised=True)[0]
    assert cosines[0].tolist() == [0.25, 0.25]


def test_one_relu_layer_agrees_exactly_with_monte_carlo():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 4, bias=False), nn.ReLU(), nn.Linear(4, 3, bias=False)).double()
    rhos = (0.0, 0.4, 0.8)
    for unit in range(3):
        curve = noise_stability(lambda x, unit=unit: net(x)[:, unit : unit + 1], normal(5), rhos, **BIG)
        assert_close(curve, [float(propagate_interval([net], r)[2][0][unit]) for r in rhos])


def test_deep_layers_agree_with_monte_carlo_in_the_mean_over_random_weights():
    torch.manual_seed(0)
    measured, predicted = torch.zeros(2, 24, dtype=torch.float64), torch.zeros(2, 24, dtype=torch.float64)
    for i in range(24):
        layers = []
        for a, b in itertools.pairwise((256, 192, 192, 192)):
            linear = nn.Linear(a, b, bias=False)
            nn.init.normal_(linear.weight, std=math.sqrt(2 / a))
            layers += [linear, nn.ReLU()]
        net = nn.Sequential(*layers)
        draw = lambda n, rng: torch.randn(n, 256, generator=rng)  # noqa: E731
        measured[:, i] = noise_stability(net, draw, (0.2, 0.6), n_pairs=300, batch_size=300, seed=i).value
        predicted[:, i] = torch.stack([v.sum() for v in propagate_interval([net], (0.2, 0.6))[-1]])
    error = (measured - predicted).std(1) / math.sqrt(24)
    assert bool(((measured - predicted).mean(1).abs() < 3 * error).all())
    assert bool((error < 0.1 * predicted.mean(1)).all())


def test_hard_attention_on_oneself_keeps_rho():
    d, value = 256, torch.randn(4, 256, generator=torch.Generator().manual_seed(0))
    for w in (torch.eye(d), (u := torch.randn(d, d, generator=torch.Generator().manual_seed(1)) / 16) @ u.T):
        attention = HardAttention(w, value, n_tokens=4, n_samples=64)
        assert attention.kept(0.5) > 0.99
        low, high = propagate_interval([attention], (0.3, 0.5))[0]
        torch.testing.assert_close(high, 0.5 * value.double().square().sum(1), rtol=0.01, atol=0)
        torch.testing.assert_close(low, 0.3 * value.double().square().sum(1), rtol=0.01, atol=0)


def test_hard_attention_by_a_gaussian_matrix_loses_what_changes():
    rng = torch.Generator().manual_seed(0)
    d, n = 512, 4
    w, value = torch.randn(d, d, generator=rng), torch.randn(3, d, generator=rng)
    attention = HardAttention(w, value, n_tokens=n, n_samples=512)
    kept = [attention.kept(r) for r in (0.0, 0.5, 0.9, 1.0)]
    assert kept == sorted(kept)
    assert kept[0] == pytest.approx(1 / n, abs=0.04)
    assert kept[-1] == 1

    def f(x):
        scores = x @ w.double() @ x.mT
        chosen = scores.argmax(-1)[:, :1]
        return x[torch.arange(len(x)), chosen[:, 0]] @ value.double().T

    draw = lambda k, g: torch.randn(k, n, d, generator=g, dtype=torch.float64)  # noqa: E731
    curve = noise_stability(f, draw, 0.9, n_pairs=4000, batch_size=500)
    expected = float(propagate_interval([attention], 0.9)[0][0].sum())
    assert float(curve.value[0]) == pytest.approx(expected, rel=0.05)


def test_hard_attention_after_a_linear_map_sees_its_covariance():
    rng = torch.Generator().manual_seed(0)
    w, first = torch.randn(8, 8, generator=rng), torch.randn(8, 8, generator=rng)
    plain = HardAttention(first.T @ w @ first, torch.eye(8), 5, n_samples=2048)
    after = HardAttention(w, torch.eye(8), 5, n_samples=2048)
    assert after.kept(0.8, first @ first.T) == pytest.approx(plain.kept(0.8), abs=0.02)


# Results and errors


def test_results_have_tables_figures_and_json():
    curve = noise_stability(majority, uniform(5), GRID, kernel="bonami", vocab=2, n_pairs=200)
    sensitivity = average_sensitivity(majority, uniform(5), 2, n_pairs=200)
    influence = token_influence(majority, uniform(5), 2, n_windows=40)
    for result in (curve, sensitivity, influence):
        assert str(result.table())
        assert len(result.figure().data) == 1
        json.dumps(jsonable(result.to_dict()), allow_nan=False)
    assert len(curve.table()) == 5
    assert curve.to_dict()["tail_bound"]["15"] == curve.tail_bound(15)
    assert influence.table().records()[0]["position"] in (0, 1, 2)
    only_one = noise_stability(majority, uniform(5), 1.0, kernel="bonami", vocab=2, n_pairs=20)
    assert str(only_one.table())
    assert only_one.to_dict()["tail_bound"] == {}


def test_progress_counts_evaluated_inputs():
    seen = []
    ids = torch.randint(5, (6, 3), generator=torch.Generator().manual_seed(0))
    note = lambda done, total, what: seen.append((done, total))  # noqa: E731
    f = lambda x: x.double()  # noqa: E731
    noise_stability(f, ids, (0.0, 0.5), kernel="bonami", vocab=5, n_pairs=20, batch_size=4, progress=note)
    assert seen[-1] == (46, 46)
    average_sensitivity(f, ids, 5, n_pairs=20, batch_size=4, progress=note)
    assert seen[-1] == (26, 26)
    token_influence(f, ids, 5, batch_size=4, progress=note)
    assert seen[-1] == (24, 24)


@pytest.mark.parametrize("rho", [-0.1, 1.1, math.nan, (0.5, 2)])
def test_rho_must_be_in_zero_one(rho):
    with pytest.raises(InputError, match=r"rho must be in \[0,1\]"):
        noise_stability(majority, uniform(3), rho, kernel="bonami", vocab=2)
    with pytest.raises(InputError, match=r"rho must be in \[0,1\]"):
        NoiseStabilityRegularizer(0.1, rho[1] if isinstance(rho, tuple) else rho, vocab=2)
    with pytest.raises(InputError, match=r"rho must be in \[0,1\]"):
        propagate_interval([nn.ReLU()], rho)


def test_a_token_kernel_needs_vocab():
    for run in (
        lambda: noise_stability(majority, uniform(3), 0.5, kernel="paper"),
        lambda: average_sensitivity(majority, uniform(3)),
        lambda: token_influence(majority, uniform(3)),
        lambda: NoiseStabilityRegularizer(0.1, 0.5),
    ):
        with pytest.raises(InputError, match="token kernel needs vocab"):
            run()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rho": ()}, "rho is empty"),
        ({"kernel": "bonami2"}, "kernel is 'bonami2'"),
        ({"vocab": 1}, r"ids from 0 to 1, outside vocab=1"),
        ({"vocab": 0}, "vocab is 0"),
        ({"protect": [0, 1]}, "none left"),
        ({"n_pairs": 0}, "n_pairs is 0"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"output": "odds"}, "output is 'odds'"),
        ({"kernel": "gaussian"}, "gaussian kernel needs real numbers"),
        ({"inputs": torch.rand(3, 4)}, "whole token ids"),
        ({"inputs": torch.zeros(4, dtype=torch.long)}, r"inputs are \(4,\)"),
        ({"inputs": torch.zeros(0, 4, dtype=torch.long)}, r"inputs are \(0, 4\)"),
        ({"f": "model"}, "f is a str"),
        ({"f": lambda x: x.double().sum()}, r"f gave \(\)"),
        ({"f": lambda x: x.double() / 0}, "not finite"),
        ({"n_pairs": 1, "centre": True}, "at least two windows"),
    ],
)
def test_errors_name_what_is_wrong(changes, message):
    arguments = {"f": majority, "inputs": uniform(4), "rho": 0.5, "kernel": "bonami", "vocab": 2, "n_pairs": 20}
    with pytest.raises(InputError, match=message):
        noise_stability(**(arguments | changes))


def test_errors_of_bounds_layers_and_regulariser():
    curve = exact_curve((1.0,), [1.0])
    for bad in (0, 2.5, True):
        with pytest.raises(InputError, match="whole number from 1"):
            exact_curve((0.5,), [0.5]).tail_bound(bad)
    with pytest.raises(InputError, match="every rho is 1"):
        curve.tail_bound(3)
    with pytest.raises(InputError, match="level is 95"):
        exact_curve((0.5,), [0.5]).tail_bound(3, level=95)
    with pytest.raises(InputError, match="one window"):
        exact_curve((0.5,), [0.5], n_windows=1).tail_bound(3, level=0.9)
    for layers, message in (
        ([nn.Linear(2, 2)], "bias"),
        ([nn.GELU()], "GELU"),
        ([torch.zeros(3)], r"\(3,\)"),
        ([torch.eye(2), torch.eye(3)], "3 inputs after one of 2"),
        ([torch.eye(2), nn.ReLU(), HardAttention(torch.eye(2), torch.eye(2), 3)], "after a ReLU"),
    ):
        with pytest.raises(InputError, match=message):
            propagate_interval(layers, 0.5)
    for arguments, message in (
        ({"gamma": -1.0}, "gamma is -1"),
        ({"gamma": math.inf}, "gamma is inf"),
        ({"kernel": "normal"}, "kernel is"),
        ({"output": "odds"}, "output is"),
    ):
        with pytest.raises(InputError, match=message):
            NoiseStabilityRegularizer(**({"gamma": 0.1, "rho": 0.5, "vocab": 3} | arguments))
    with pytest.raises(InputError, match="real numbers"):
        NoiseStabilityRegularizer(0.1, 0.5, kernel="gaussian")(classifier(), IDS)


def test_an_image_model_is_refused():
    config = ViTConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, image_size=8, patch_size=4
    )
    with pytest.raises(NotApplicable, match="does not read tokens"):
        noise_stability(ViTModel(config), IDS, 0.5, kernel="bonami", vocab=40)


def test_a_gpt2_with_its_own_vocabulary_needs_no_vocab():
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_positions=16, n_embd=16, n_layer=1, n_head=2))
    assert torch.equal(
        noise_stability(model, IDS, 0.5, kernel="bonami", n_pairs=6).value,
        noise_stability(model, IDS, 0.5, kernel="bonami", n_pairs=6, vocab=40).value,
    )
