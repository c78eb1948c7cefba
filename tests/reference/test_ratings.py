import numpy as np
import pytest

from assay.reference import builtin
from assay.reference.ratings import KIND, load


def test_is_a_built_in_subject():
    assert builtin("builtin:ratings").load is load
    assert KIND == "ratings"


def test_same_seed_same_matrix_and_another_seed_another():
    first, again, other = load(seed=3), load(seed=3), load(seed=4)
    assert first.shape == (2000, 300)
    assert (first != again).nnz == 0
    assert (first != other).nnz > 1000


def test_is_zeros_and_ones_sparse_and_long_tailed():
    R = load()
    assert set(np.unique(R.data)) == {1.0}
    assert 0.02 < R.nnz / np.prod(R.shape) < 0.15
    counts = np.sort(np.asarray(R.sum(axis=0)).ravel())[::-1]
    assert counts[:30].sum() > 3 * counts[150:180].sum()


def test_has_tastes_beyond_popularity_and_activity():
    R = load().toarray()
    expected = R.sum(1, keepdims=True) * R.sum(0, keepdims=True) / R.sum()
    residual = (R - expected) / np.sqrt(expected + 1e-9)
    generator = np.random.default_rng(0)
    shuffled = generator.permuted(residual, axis=0)
    found, chance = (np.linalg.svd(x, compute_uv=False) for x in (residual, shuffled))
    # Eight factors were put in; noise alone gives none above the shuffled spectrum.
    assert (found > 1.1 * chance[0]).sum() == pytest.approx(8, abs=2)


@pytest.mark.parametrize("shape", [(1, 1), (3, 500)])
def test_any_size(shape):
    assert load(n_users=shape[0], n_items=shape[1]).shape == shape
