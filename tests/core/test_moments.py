import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.core import moments
from assay.core.errors import InputError
from assay.core.moments import Covariance, Histogram, Mean, Reservoir, TopK


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    """Buffer, chunk and panel bounds that small inputs cross."""
    monkeypatch.setattr(moments, "_BUFFER_ROWS", 8)
    monkeypatch.setattr(moments, "_CHUNK_ROWS", 16)
    monkeypatch.setattr(moments, "_CHUNK_VALUES", 32)
    monkeypatch.setattr(moments, "_PANEL", 3)


def stream(make, pieces, ways):
    """The pieces dealt out to `ways` accumulators in turn, merged."""
    parts = [make() for _ in range(ways)]
    for i, piece in enumerate(pieces):
        parts[i % ways].update(piece)
    total = parts[0]
    for part in parts[1:]:
        total = total.merge(part)
    return total


cuts = st.lists(st.integers(0, 40), max_size=6).map(sorted)


def cut(x, at):
    return [x[a:b] for a, b in zip([0, *at], [*at, len(x)])]


@given(st.integers(2, 40), st.integers(1, 7), cuts, st.integers(1, 3), st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_covariance_of_any_split_is_one_pass(n, d, at, ways, seed):
    x = torch.randn(n, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 3 + 5
    c = stream(lambda: Covariance(d, torch.float64), cut(x, at), ways)
    assert c.n == n
    torch.testing.assert_close(c.mean, x.mean(0), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(c.covariance, torch.cov(x.T).reshape(d, d), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(c.second_moment, x.T @ x / n, rtol=1e-12, atol=1e-12)


@given(cuts, st.integers(1, 3), st.integers(0, 2**31))
@settings(max_examples=30, deadline=None)
def test_covariance_in_float32_with_a_mean_of_ten_thousand_spreads(at, ways, seed):
    x = (torch.randn(40, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) + 1e4).float()
    c = stream(lambda: Covariance(5), cut(x, at), ways)
    exact = torch.cov(x.double().T)
    # The values are taken as float32 stores them; what is added on top is rounding of the sums.
    assert (c.covariance.double() - exact).abs().max() <= 1e-5 * exact.diagonal().max()
    torch.testing.assert_close(c.mean.double(), x.double().mean(0), rtol=1e-7, atol=0)


def test_covariance_of_a_long_stream_in_float32():
    g = torch.Generator().manual_seed(0)
    c, exact = Covariance(6), Covariance(6, torch.float64)
    for k in range(2000):
        x = torch.randn(10, 6, generator=g) * 2 + k / 100
        c.update(x)
        exact.update(x)
    torch.testing.assert_close(c.covariance.double(), exact.covariance, rtol=2e-5, atol=2e-5)


def test_covariance_leaves_out_and_counts_nonfinite_rows():
    x = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
    x[3, 1], x[17, 0], x[18, 2] = math.nan, math.inf, -math.inf
    c = Covariance(4)
    for piece in x.split(7):
        c.update(piece)
    good = x[torch.isfinite(x).all(1)]
    assert (c.n, c.n_nonfinite) == (27, 3)
    torch.testing.assert_close(c.covariance, torch.cov(good.T))


def test_covariance_of_only_nonfinite_rows_has_no_mean():
    c = Covariance(2)
    c.update(torch.full((20, 2), math.nan))
    assert (c.n, c.n_nonfinite) == (0, 20)
    with pytest.raises(InputError, match="only 0 finite rows"):
        _ = c.mean


def test_covariance_of_values_whose_sum_overflows():
    x = torch.full((20, 1), 3e38)
    c = Covariance(1)
    c.update(x)
    assert c.n == 20
    assert c.mean.item() == pytest.approx(3e38, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_covariance_takes_any_float(dtype):
    x = torch.randn(3, 10, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    c = Covariance(4)
    c.update(x)
    assert c.covariance.dtype == torch.float32
    torch.testing.assert_close(c.covariance.double(), torch.cov(x.double().reshape(-1, 4).T), rtol=1e-5, atol=1e-6)


def test_covariance_leaves_its_input_and_parts_as_they_were():
    x = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    kept = x.clone()
    a, b = Covariance(4), Covariance(4)
    a.update(x)
    b.update(x.T.contiguous().T)
    before = a.covariance
    a.merge(b).update(x)
    assert torch.equal(x, kept)
    assert torch.equal(a.covariance, before)
    torch.testing.assert_close(b.covariance, before)


def test_covariance_merges_with_an_empty_one_either_way():
    x = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    a, empty = Covariance(4), Covariance(4)
    a.update(x)
    for both in (a.merge(empty), empty.merge(a)):
        assert both.n == 20
        assert torch.equal(both.covariance, a.covariance)


def test_covariance_is_symmetric_and_holds_no_more_than_its_bound():
    c = Covariance(5)
    for _ in range(50):
        c.update(torch.randn(3, 5))
    assert torch.equal(c.covariance, c.covariance.T)
    assert sum(t.numel() for t in vars(c).values() if isinstance(t, torch.Tensor)) == 5 + 25 + 8 * 5


@given(
    st.lists(st.lists(st.floats(width=32), min_size=2, max_size=2), min_size=1, max_size=40),
    cuts,
    st.integers(1, 3),
)
@settings(max_examples=80, deadline=None)
def test_mean_of_any_split_is_one_pass(rows, at, ways):
    x = torch.tensor(rows, dtype=torch.float64)
    m = stream(lambda: Mean(2), cut(x, at), ways)
    for j in range(2):
        good = x[:, j][torch.isfinite(x[:, j])].numpy()
        assert (m.n[j], m.n_nonfinite[j]) == (len(good), len(x) - len(good))
        if len(good) == 0:
            assert math.isnan(m.mean[j])
            assert math.isnan(m.min[j])
            continue
        size = np.abs(good).max()
        assert m.mean[j].item() == pytest.approx(good.mean(), rel=1e-12, abs=1e-13 * size)
        assert (m.min[j], m.max[j]) == (good.min(), good.max())
        if len(good) > 1:
            assert m.variance[j].item() == pytest.approx(good.var(ddof=1), rel=1e-9, abs=1e-15 * size**2)
        else:
            assert math.isnan(m.variance[j])


def test_mean_of_nothing():
    m = Mean(1)
    m.update(torch.empty(0, 1))
    assert m.n.item() == 0
    assert math.isnan(m.mean)


@given(st.lists(st.floats(width=32), min_size=1, max_size=60), cuts, st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_histogram_of_any_split_is_numpys(values, at, ways):
    edges = [-2.0, -0.5, 0.0, 1.0, 1e6]
    x = torch.tensor(values, dtype=torch.float32)
    h = stream(lambda: Histogram(edges), cut(x, at), ways)
    good = x[torch.isfinite(x)].double().numpy()
    assert h.counts.tolist() == np.histogram(good, edges)[0].tolist()
    assert (h.below, h.above) == ((good < -2).sum(), (good > 1e6).sum())
    assert (h.n, h.n_nonfinite) == (len(good), len(x) - len(good))


@given(st.lists(st.sampled_from([0.0, 1.0, 2.0, 2.5, math.nan]), max_size=60), cuts, st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_topk_of_any_split_is_a_sort_with_ties_by_id(values, at, ways):
    x = torch.tensor(values)
    ids = torch.stack([torch.arange(len(x)) // 4, torch.arange(len(x)) % 4], dim=-1)
    tops = [TopK(5) for _ in range(ways)]
    for i, (v, w) in enumerate(zip(cut(x, at), cut(ids, at))):
        tops[i % ways].update(v, w)
    top = tops[0]
    for other in tops[1:]:
        top = top.merge(other)
    expected = sorted((-v, *w) for v, w in zip(x.tolist(), ids.tolist()) if not math.isnan(v))[:5]
    assert [(-v, *w) for v, w in zip(top.values.tolist(), top.ids.reshape(-1, 2).tolist())] == expected
    assert top.n + top.n_nonfinite == len(x)


def test_topk_takes_matrices_and_integers():
    top = TopK(2)
    top.update(torch.tensor([[1, 9], [8, 3]]), torch.tensor([[0, 1], [2, 3]]))
    assert top.values.tolist() == [9.0, 8.0]
    assert top.ids.tolist() == [1, 2]


@given(cuts)
@settings(max_examples=20, deadline=None)
def test_reservoir_does_not_depend_on_the_cuts(at):
    x = torch.arange(40)
    one, other = (Reservoir(6, torch.Generator().manual_seed(3)) for _ in range(2))
    one.update(x)
    for piece in cut(x, at):
        other.update(piece)
    assert torch.equal(one.rows, other.rows)
    assert torch.equal(one.indices, one.rows)


def test_reservoir_is_uniform_alone_and_merged():
    counts = np.zeros((2, 20))
    for seed in range(2000):
        a = Reservoir(4, torch.Generator().manual_seed(seed))
        b = Reservoir(4, torch.Generator().manual_seed(10_000 + seed))
        a.update(torch.arange(12))
        b.update(torch.arange(12, 20))
        both = a.merge(b)
        assert torch.equal(both.rows, both.indices)
        counts[0, both.rows.numpy()] += 1
        whole = Reservoir(4, torch.Generator().manual_seed(20_000 + seed))
        for piece in torch.arange(20).split(3):
            whole.update(piece)
        counts[1, whole.rows.numpy()] += 1
    # Each count is binomial(2000, 0.2) with standard deviation 17.9; 40 counts within 4 of it.
    assert np.abs(counts - 400).max() < 4 * 17.9
    assert (counts.sum(1) == 8000).all()


def test_reservoir_keeps_all_of_a_short_stream():
    r = Reservoir(5, torch.Generator())
    r.update(torch.arange(6).reshape(3, 2))
    assert r.rows.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert r.n == 3


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Covariance(3, torch.bfloat16), "dtype is torch.bfloat16"),
        (lambda: Covariance(3).update(torch.ones(2, 4)), "the last dimension must be 3"),
        (lambda: Covariance(3).update(torch.ones(2, 3, dtype=torch.int64)), "give a tensor of floats"),
        (lambda: Covariance(3).covariance, "needs at least 2"),
        (lambda: Covariance(3).merge(Covariance(4)), "cannot merge rows of 4 features into rows of 3"),
        (lambda: Mean(3).merge(Mean(4)), "cannot merge rows of 4 features into rows of 3"),
        (lambda: Histogram([1.0, 1.0]), "two rising numbers"),
        (lambda: Histogram([0.0, 1.0]).merge(Histogram([0.0, 2.0])), "different edges"),
        (lambda: TopK(0), "k is 0"),
        (lambda: TopK(1).update(torch.ones(3), torch.arange(2)), "do not fit values"),
        (lambda: Reservoir(0, torch.Generator()), "k is 0"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(InputError) as caught:
        call()
    assert message in str(caught.value)


def test_topk_refuses_ids_of_another_length():
    top, other = TopK(2), TopK(2)
    top.update(torch.ones(2), torch.arange(2))
    other.update(torch.ones(2), torch.ones(2, 3, dtype=torch.int64))
    with pytest.raises(InputError, match="before they were"):
        top.update(torch.ones(2), torch.ones(2, 3, dtype=torch.int64))
    with pytest.raises(InputError, match="different lengths"):
        top.merge(other)


def test_reservoir_refuses_rows_of_another_shape():
    r, other = Reservoir(2, torch.Generator()), Reservoir(2, torch.Generator())
    r.update(torch.ones(2, 3))
    other.update(torch.ones(2, 4))
    with pytest.raises(InputError, match="after rows of shape"):
        r.update(torch.ones(2, 4))
    with pytest.raises(InputError, match="different shapes"):
        r.merge(other)
