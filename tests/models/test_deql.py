import itertools
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import coo_array, csr_matrix, random_array
from sklearn.exceptions import NotFittedError
from sklearn.metrics import ndcg_score
from sklearn.pipeline import make_pipeline
from sklearn.utils.estimator_checks import parametrize_with_checks

from assay.core.errors import InputError
from assay.core.ratings import read_ratings
from assay.models import DEQL, EASE, EDLAE, deql_grid, ndcg_at_k, recall_at_k
from assay.reference.ratings import load

# A matrix of interactions whose Gram matrix is [[3, 1], [1, 2]].
R2 = csr_matrix([[1.0, 1.0], [1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
SIDES = ("items", "users")


def interactions(m: int, n: int, seed: int = 0, density: float = 0.3) -> csr_matrix:
    """Random 0/1 interactions without an empty column, of full asymmetry between items."""
    generator = np.random.default_rng(seed)
    dense = generator.random((m, n)) < density * np.linspace(0.3, 2, n)
    dense[generator.integers(m, size=n), np.arange(n)] = True
    return csr_matrix(dense.astype(float))


def column_by_column(R: csr_matrix, a: float, b: float, p: float, l2: float, zero_diag: bool = False) -> np.ndarray:
    """The normal equations H_i w_i = v_i as they are written down, one dense solve a column."""
    C, q, e = (R.T @ R).toarray(), 1 - p, p * a**2 + (1 - p) * b**2
    n = len(C)
    W = np.empty((n, n))
    for i in range(n):
        weight = np.full((n, n), q**2 * e)
        weight[i, :] = weight[:, i] = q**2 * b**2
        np.fill_diagonal(weight, q * e)
        weight[i, i] = q * b**2
        H = C * weight + l2 * np.eye(n)
        v = C[:, i] * q * e
        v[i] = C[i, i] * q * b**2
        w = np.linalg.solve(H, v)
        if zero_diag:
            c = np.linalg.solve(H, np.eye(n)[i])
            w -= c * w[i] / c[i]
        W[:, i] = w
    return W


def over_all_masks(R: np.ndarray, a: float, b: float, p: float) -> np.ndarray:
    """Minimise the expected loss by listing every dropout mask of every user."""
    n = R.shape[1]
    left, right = np.zeros((n, n, n)), np.zeros((n, n))
    for kept in itertools.product((0.0, 1.0), repeat=n):
        mask = np.array(kept)
        chance = (1 - p) ** mask.sum() * p ** (n - mask.sum())
        emphasis = np.where(mask == 1, b**2, a**2)
        for x in R:
            seen = mask * x
            left += chance * emphasis[:, None, None] * np.outer(seen, seen)
            right += chance * emphasis[:, None] * np.outer(x, seen)
    return np.stack([np.linalg.solve(left[i], right[i]) for i in range(n)], axis=1)


@parametrize_with_checks(
    [DEQL(), DEQL(zero_diag=True, solver="items"), DEQL(b=1.5, solver="users"), EDLAE(), EASE(dtype="float32")]
)
def test_sklearn_conformance(estimator, check):
    check(estimator)


@settings(max_examples=40, deadline=None)
@given(
    a=st.floats(0.2, 2),
    b=st.floats(0.1, 2.5),
    p=st.floats(0.02, 0.95),
    l2=st.sampled_from([0.0, 0.3, 5.0, 200.0]),
    zero_diag=st.booleans(),
    solver=st.sampled_from(SIDES),
    shape=st.sampled_from([(30, 9), (6, 17)]),
    seed=st.integers(0, 10_000),
)
def test_known_1_fast_form_is_the_column_wise_solve(a, b, p, l2, zero_diag, solver, shape, seed):
    R = interactions(*shape, seed)
    W = DEQL(a, b, p, l2, zero_diag, solver=solver).fit(R).item_weights_
    np.testing.assert_allclose(W, column_by_column(R, a, b, p, l2, zero_diag), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("solver", SIDES)
@pytest.mark.parametrize(("a", "b", "p"), [(1.0, 0.5, 0.5), (1.0, 1.7, 0.3), (0.6, 1.0, 0.8)])
def test_known_2_fast_form_minimises_the_expectation_over_all_masks(a, b, p, solver):
    R = interactions(6, 4, seed=3, density=0.5)
    W = DEQL(a, b, p, l2=0.0, solver=solver).fit(R).item_weights_
    np.testing.assert_allclose(W, over_all_masks(R.toarray(), a, b, p), atol=1e-13)


@pytest.mark.parametrize("solver", SIDES)
def test_known_3_equal_emphasis(solver):
    W = DEQL(a=1, b=1, p=0.5, l2=0, solver=solver).fit(R2).item_weights_
    np.testing.assert_allclose(W, [[0.95652174, 0.17391304], [0.26086957, 0.95652174]], atol=5e-9)
    R, p, q = interactions(25, 8), 0.3, 0.7
    C = (R.T @ R).toarray()
    np.testing.assert_allclose(
        DEQL(a=2, b=2, p=p, l2=0, solver=solver).fit(R).item_weights_,
        np.linalg.solve(C + p / q * np.diag(np.diag(C)), C) / q,
        atol=1e-12,
    )


@pytest.mark.parametrize("solver", SIDES)
def test_known_4_no_dropout_and_zero_diagonal_is_ease(solver):
    expected = [[0, 0.25], [0.33333333, 0]]
    np.testing.assert_allclose(EASE(l2=1, solver=solver).fit(R2).item_weights_, expected, atol=5e-9)
    limit = DEQL(a=1, b=1, p=1e-9, l2=1, zero_diag=True, solver=solver).fit(R2)
    np.testing.assert_allclose(limit.item_weights_, expected, atol=1e-8)
    np.testing.assert_allclose(EDLAE(p=0, l2=1, solver=solver).fit(R2).item_weights_, expected, atol=5e-9)


@pytest.mark.parametrize("solver", SIDES)
def test_known_5_ridge_with_and_without_diagonal(solver):
    options = {"a": 1, "b": 0.5, "p": 0.5, "l2": 1, "solver": solver}
    np.testing.assert_allclose(
        DEQL(**options).fit(R2).item_weights_, [[0.26444834, 0.15508885], [0.1821366, 0.19224556]], atol=5e-9
    )
    np.testing.assert_allclose(
        DEQL(**options, zero_diag=True).fit(R2).item_weights_, [[0, 0.16129032], [0.19230769, 0]], atol=5e-9
    )


@pytest.mark.parametrize("solver", SIDES)
def test_known_6_vanishing_b_is_edlae(solver):
    R, p, q = interactions(40, 10), 0.4, 0.6
    W = DEQL(a=1, b=1e-4, p=p, l2=0, solver=solver).fit(R).item_weights_
    C = (R.T @ R).toarray()
    P = np.linalg.inv(C + p / q * np.diag(np.diag(C)))
    off = ~np.eye(10, dtype=bool)
    np.testing.assert_allclose(W[off], (-P / (q * np.diag(P)))[off], atol=1e-6)
    np.testing.assert_allclose(W[off], EDLAE(p=p, l2=0, solver=solver).fit(R).item_weights_[off] / q, atol=1e-6)


def test_zero_diagonal_leaves_a_and_b_nothing_but_the_scale_of_l2():
    R, p, q = interactions(40, 10), 0.4, 0.6
    expected = EDLAE(p=p, l2=3.0).fit(R).item_weights_ / q
    for a, b in ((1.0, 0.0), (1.0, 0.5), (2.0, 3.0)):
        l2 = 3.0 * q**2 * (p * a**2 + q * b**2)
        np.testing.assert_allclose(DEQL(a, b, p, l2, zero_diag=True).fit(R).item_weights_, expected, atol=1e-12)


def test_columns_of_deql_are_those_of_edlae_rescaled():
    R, p, b = interactions(60, 12), 0.3, 0.6
    l2 = 5.0 * (1 - p) ** 2 * (p + (1 - p) * b**2)
    off = ~np.eye(12, dtype=bool)
    ours, theirs = DEQL(1.0, b, p, l2).fit(R).item_weights_, EDLAE(p, 5.0).fit(R).item_weights_
    by_column = (ours.T[off] / theirs.T[off]).reshape(12, 11)
    np.testing.assert_allclose(by_column, by_column[:, :1].repeat(11, axis=1), rtol=1e-9)
    assert np.ptp(by_column[:, 0]) > 0.01


def test_only_the_ratio_of_a_and_b_matters_up_to_the_scale_of_l2():
    R = interactions(40, 10)
    np.testing.assert_allclose(
        DEQL(1, 0.5, 0.3, 7.0).fit(R).item_weights_, DEQL(3, 1.5, 0.3, 63.0).fit(R).item_weights_, atol=1e-13
    )


@pytest.mark.parametrize("shape", [(50, 30), (30, 50), (12, 200)])
@pytest.mark.parametrize(
    "estimator",
    [DEQL(b=0.3, p=0.2, l2=2.0), DEQL(b=2, p=0.7, l2=0.0), DEQL(l2=1.0, zero_diag=True), EDLAE(0.2, 0.0), EASE(3.0)],
    ids=repr,
)
def test_both_sides_give_the_same_numbers(estimator, shape):
    R = interactions(*shape, density=0.2)
    items = estimator.set_params(solver="items").fit(R)
    weights, scores = items.item_weights_, items.score_items(R)
    users = estimator.set_params(solver="users").fit(R)
    np.testing.assert_allclose(users.item_weights_, weights, rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(users.score_items(R), scores, rtol=1e-8, atol=1e-10)


def test_the_cheaper_side_is_chosen():
    assert DEQL().fit(interactions(20, 60)).solver_ == "users"
    assert DEQL().fit(interactions(60, 20)).solver_ == "items"


@pytest.mark.parametrize("solver", SIDES)
def test_scores_are_rows_times_weights_not_their_transpose(solver):
    R = interactions(30, 12)
    model = DEQL(b=0.4, l2=2.0, solver=solver).fit(R)
    W, X = model.item_weights_, R[:7].toarray()
    assert np.abs(W - W.T).max() > 0.05
    np.testing.assert_allclose(model.score_items(R[:7]), X @ W, atol=1e-12)
    assert np.abs(X @ W - X @ W.T).max() > 0.05
    ids, scores = model.recommend(R[:7], k=3)
    masked = np.where(X > 0, -np.inf, X @ W)
    np.testing.assert_array_equal(ids, np.argsort(-masked, axis=1)[:, :3])
    assert (ids != np.argsort(-np.where(X > 0, -np.inf, X @ W.T), axis=1)[:, :3]).any()
    np.testing.assert_allclose(scores, np.take_along_axis(masked, ids, axis=1), atol=1e-12)


def test_recommend_on_a_worked_asymmetric_example():
    model = EASE(l2=1).fit(R2)
    np.testing.assert_allclose(model.score_items([[1.0, 0.0]]), [[0, 0.25]], atol=1e-12)
    np.testing.assert_allclose(model.score_items([[0.0, 1.0]]), [[1 / 3, 0]], atol=1e-12)


def test_recommend_fills_up_with_minus_one_and_breaks_ties_by_id():
    R = csr_matrix(np.eye(4)[[0, 1, 2, 3, 0, 1, 2, 3]])
    ids, scores = DEQL(l2=1.0).fit(R).recommend(np.array([[1.0, 0, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]), k=3)
    assert ids.tolist() == [[1, 2, 3], [3, -1, -1], [-1, -1, -1]]
    assert np.isneginf(scores[1:, 1:]).all()
    assert DEQL(l2=1.0).fit(R).recommend(np.eye(4)[:1], k=4, exclude_seen=False)[0].tolist() == [[0, 1, 2, 3]]


def test_results_do_not_depend_on_the_size_of_blocks(monkeypatch):
    for solver in SIDES:
        model = DEQL(b=0.3, l2=1.0, solver=solver)
        R = interactions(23, 17)
        monkeypatch.setattr("assay.models._deql._BLOCK", 1 << 22)
        whole = model.fit(R).item_weights_, *model.recommend(R, 5)
        for size in (1, 40, 100):
            monkeypatch.setattr("assay.models._deql._BLOCK", size)
            cut = model.fit(R).item_weights_, *model.recommend(R, 5)
            for expected, found in zip(whole, cut):
                np.testing.assert_allclose(found, expected, atol=1e-13)


@pytest.mark.parametrize("solver", SIDES)
def test_ordering_of_users_and_items_does_not_matter(solver):
    R = interactions(20, 12)
    generator = np.random.default_rng(1)
    users, items = generator.permutation(20), generator.permutation(12)
    W = DEQL(l2=1.0, solver=solver).fit(R).item_weights_
    permuted = DEQL(l2=1.0, solver=solver).fit(R[users][:, items]).item_weights_
    np.testing.assert_allclose(permuted, W[np.ix_(items, items)], atol=1e-12)


@pytest.mark.parametrize("solver", SIDES)
def test_every_way_to_hand_over_the_same_matrix_gives_the_same_result(solver):
    R = interactions(20, 12)
    W = DEQL(l2=1.0, solver=solver).fit(R).item_weights_
    twice = coo_array(
        (np.repeat(R.tocoo().data, 2) / 2, (np.repeat(R.tocoo().row, 2), np.repeat(R.tocoo().col, 2))), shape=R.shape
    )
    zeroed = (csr_matrix(np.ones(R.shape)) - csr_matrix(np.ones(R.shape))) + R
    for form in (R.toarray(), np.asfortranarray(R.toarray()), R.tocsc(), R.astype(int), R.astype(bool), twice, zeroed):
        np.testing.assert_allclose(DEQL(l2=1.0, solver=solver).fit(form).item_weights_, W, atol=1e-13)


def test_the_input_is_left_alone():
    R = interactions(20, 12)
    R.data[0] = 0
    before = R.copy()
    DEQL().fit(R).recommend(R, 3)
    assert R.nnz == before.nnz
    np.testing.assert_array_equal(R.data, before.data)


@pytest.mark.parametrize("solver", SIDES)
def test_weighted_and_negative_interactions_hold_too(solver):
    R = csr_matrix(
        random_array((25, 8), density=0.5, rng=np.random.default_rng(0), data_sampler=np.random.default_rng(1).normal)
    )
    W = DEQL(1, 0.5, 0.4, 0.2, solver=solver).fit(R).item_weights_
    np.testing.assert_allclose(W, column_by_column(R, 1, 0.5, 0.4, 0.2), atol=1e-10)


@pytest.mark.parametrize("solver", SIDES)
def test_float32_stays_float32_and_near_float64(solver):
    R = interactions(40, 30)
    single = DEQL(l2=5.0, solver=solver, dtype="float32").fit(R)
    assert single.item_weights_.dtype == single.score_items(R).dtype == single.recommend(R, 3)[1].dtype == np.float32
    double = DEQL(l2=5.0, solver=solver).fit(R.astype(np.float32))
    assert double.item_weights_.dtype == np.float64
    np.testing.assert_allclose(single.item_weights_, double.item_weights_, atol=1e-5)


@pytest.mark.parametrize("solver", SIDES)
def test_same_input_same_bits(solver):
    R = interactions(40, 30)
    np.testing.assert_array_equal(DEQL(solver=solver).fit(R).item_weights_, DEQL(solver=solver).fit(R).item_weights_)


def test_refitting_replaces_the_weights_and_pickling_keeps_them():
    model = DEQL(l2=1.0).fit(interactions(20, 12, seed=1))
    first = model.item_weights_
    second = model.fit(interactions(20, 12, seed=2)).item_weights_
    assert np.abs(first - second).max() > 0.01
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(model)).item_weights_, second)


def test_scoring_from_the_user_side_builds_no_item_by_item_matrix(monkeypatch):
    R = csr_matrix(random_array((20, 3000), density=0.02, rng=np.random.default_rng(0)))
    biggest = 0
    allocate = np.empty

    def spy(shape, *args, **kwargs):
        nonlocal biggest
        biggest = max(biggest, int(np.prod(shape)))
        return allocate(shape, *args, **kwargs)

    monkeypatch.setattr(np, "empty", spy)
    model = DEQL(l2=1.0).fit(R)
    model.recommend(R, 10)
    assert model.solver_ == "users"
    assert "item_weights_" not in vars(model)
    assert 0 < biggest < 100_000


def test_empty_items_are_refused_without_a_ridge_and_taken_with_one():
    R = interactions(20, 6).tolil()
    R[:, [1, 4]] = 0
    R = csr_matrix(R)
    for solver in SIDES:
        with pytest.raises(InputError, match=r"item columns \[1, 4\] of R are empty: drop them or set l2 > 0"):
            DEQL(l2=0, solver=solver).fit(R)
        W = DEQL(l2=0.5, solver=solver).fit(R).item_weights_
        np.testing.assert_allclose(W, column_by_column(R, 1, 0.5, 0.5, 0.5), atol=1e-12)
        np.testing.assert_allclose(W[[1, 4]], 0, atol=1e-14)
    with pytest.raises(InputError, match=r"0, 1, 2, 3, 4, 5, 6, 7, 8, 9, …"):
        DEQL(l2=0).fit(csr_matrix((5, 30)))


def test_b_of_zero_with_a_ridge_has_a_zero_diagonal_by_itself():
    R = interactions(30, 9)
    W = DEQL(b=0, p=0.4, l2=2.0).fit(R).item_weights_
    np.testing.assert_allclose(W, DEQL(b=0, p=0.4, l2=2.0, zero_diag=True).fit(R).item_weights_, atol=1e-12)


@pytest.mark.parametrize(
    ("estimator", "message"),
    [
        (DEQL(a=0), "a=0: it must be a number above 0"),
        (DEQL(b=-1), "b=-1: it must be a number of at least 0"),
        (DEQL(p=0), "p=0: it must be between 0 and 1, both excluded"),
        (DEQL(p=1), "p=1: it must be between"),
        (DEQL(p=True), "p=True: it must be between"),
        (DEQL(l2=-1.0), "l2=-1.0: it must be a number of at least 0"),
        (DEQL(l2=float("nan")), "l2=nan: it must be a number"),
        (DEQL(b=0, l2=0), "b=0 with l2=0 leaves the diagonal of W undetermined: set zero_diag=True, or l2 > 0"),
        (DEQL(solver="gpu"), "solver='gpu': it must be one of 'auto', 'items', 'users'"),
        (DEQL(dtype="float16"), "dtype='float16': it must be float32 or float64"),
        (DEQL(zero_diag="x"), "zero_diag='x': it must be True or False"),
        (DEQL(zero_diag=None), "zero_diag=None: it must be True or False"),
        (DEQL(zero_diag=1), "zero_diag=1: it must be True or False"),
        (DEQL(solver=np.array(["items", "users"])), "it must be one of 'auto', 'items', 'users'"),
        (DEQL(dtype=np.array([1, 2])), "it must be float32 or float64"),
        (EDLAE(p=1), "p=1: it must be at least 0 and below 1"),
        (EDLAE(p=0, l2=0), "p=0 with l2=0 leaves W unregularised"),
        (EASE(l2=0), "l2=0: it must be above 0"),
    ],
)
def test_bad_parameters_are_named(estimator, message):
    with pytest.raises(InputError) as caught:
        estimator.fit(R2)
    assert message in str(caught.value)


@pytest.mark.parametrize("k", [0, 3, 1.5])
def test_bad_k_is_named(k):
    with pytest.raises(InputError, match="it must be a whole number from 1 to 2"):
        EASE().fit(R2).recommend(R2, k)


def test_a_setting_beyond_the_precision_is_refused_rather_than_answered():
    R = csr_matrix(np.ones((5, 40)))
    for solver in SIDES:
        with pytest.raises(InputError, match="numerically singular"):
            EASE(l2=1e-18, solver=solver).fit(R)


def test_unfitted_says_so():
    with pytest.raises(NotFittedError):
        DEQL().recommend(R2)
    assert not hasattr(DEQL(), "item_weights_")


def test_stands_in_a_pipeline():
    R = interactions(20, 12)
    out = make_pipeline(DEQL(l2=1.0)).fit_transform(R)
    np.testing.assert_allclose(out, DEQL(l2=1.0).fit(R).score_items(R))


@pytest.mark.parametrize("solver", SIDES)
def test_grid_gives_what_single_fits_give_with_fewer_factorisations(solver, monkeypatch):
    R = interactions(25, 18)
    inversions = 0
    from assay.models import _deql

    original = _deql._Gram.invert

    def counting(self, ridge):
        nonlocal inversions
        inversions += 1
        return original(self, ridge)

    points = [
        {"b": b, "p": p, "l2": r * (1 - p) ** 2 * (p + (1 - p) * b**2)}
        for r in (1.0, 4.0)
        for b in (0.2, 1.0, 2.0)
        for p in (0.3, 0.6)
    ]
    single = [DEQL(**point).fit(R).item_weights_.sum() for point in points]
    monkeypatch.setattr(_deql._Gram, "invert", counting)
    rows = deql_grid(R, points, lambda model: {"total": model.item_weights_.sum()}, estimator=DEQL(solver=solver))
    assert [{name: row[name] for name in ("b", "p", "l2")} for row in rows] == points
    np.testing.assert_allclose([row["total"] for row in rows], single, rtol=1e-10)
    assert inversions == 4


def test_grid_crosses_a_mapping_and_takes_the_baselines():
    R = interactions(25, 18)
    rows = deql_grid(R, {"l2": [1.0, 2.0], "p": (0.0, 0.5)}, lambda m: m.item_weights_[0, 1], estimator=EDLAE())
    assert len(rows) == 4
    for row in rows:
        assert row["value"] == pytest.approx(EDLAE(row["p"], row["l2"]).fit(R).item_weights_[0, 1], abs=1e-14)
    (row,) = deql_grid(R, [{"l2": 3.0}], lambda m: m.recommend(R, 2)[1].sum(), estimator=EASE())
    assert row["value"] == pytest.approx(EASE(3.0).fit(R).recommend(R, 2)[1].sum(), abs=1e-12)


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ([], "grid is empty"),
        ([{"solver": "users"}], "grid sets 'solver'"),
        ([{"p": 2.0}], "p=2.0: it must be between"),
    ],
)
def test_bad_grids_are_named_before_any_work(grid, message):
    with pytest.raises(InputError, match=message):
        deql_grid(R2, grid, lambda model: pytest.fail("evaluated"))


def test_ndcg_is_that_of_sklearn():
    generator = np.random.default_rng(0)
    scores = generator.random((30, 40))
    held_out = (generator.random((30, 40)) < 0.1) * 1.0
    held_out[:, 0] = 1
    ranked = np.argsort(-scores, axis=1)
    for k in (1, 5, 40):
        expected = ndcg_score(held_out, scores, k=k)
        assert ndcg_at_k(csr_matrix(held_out), ranked, k).mean() == pytest.approx(expected, abs=1e-12)


def test_recall_by_hand_in_both_conventions():
    held_out = csr_matrix([[1, 1, 1, 0, 0], [0, 0, 0, 0, 1], [0, 0, 0, 0, 0]])
    ranked = np.array([[0, 3, 1], [-1, 4, 0], [0, 1, 2]])
    np.testing.assert_allclose(recall_at_k(held_out, ranked, 2), [0.5, 1, np.nan])
    np.testing.assert_allclose(recall_at_k(held_out, ranked, 2, capped=False), [1 / 3, 1, np.nan])
    np.testing.assert_allclose(ndcg_at_k(held_out, ranked, 1), [1, 0, np.nan])


def test_metrics_do_not_count_the_filler_as_the_last_item():
    assert recall_at_k(np.array([[0, 0, 1]]), np.array([[-1, -1]]), 2).tolist() == [0.0]


@pytest.mark.parametrize(
    ("ranked", "k", "message"),
    [
        (np.zeros((1, 2)), 1, "ranked must be item ids"),
        (np.zeros(2, int), 1, "ranked must be item ids"),
        (np.zeros((2, 2), int), 1, "held_out has 1 users and ranked has 2"),
        (np.zeros((1, 2), int), 3, "k=3: ranked holds 2 items"),
        (np.full((1, 2), 3), 1, "item ids outside -1 … 2"),
    ],
)
def test_bad_metric_input_is_named(ranked, k, message):
    for metric in (ndcg_at_k, recall_at_k):
        with pytest.raises(InputError, match=message):
            metric(np.array([[0, 1, 0]]), ranked, k)


def check_better_than_popularity(R: csr_matrix) -> None:
    """Half of each user's items are found better by DEQL than by popularity."""
    R.data[:] = 1
    generator = np.random.default_rng(0)
    users = generator.permutation(R.shape[0])
    n_test = R.shape[0] // 5
    train, test = R[users[n_test:]], R[users[:n_test]]
    mask = generator.random(test.nnz) < 0.5
    shown, held_out = test.copy(), test.copy()
    shown.data[mask] = 0
    held_out.data[~mask] = 0
    held_out.eliminate_zeros()
    model = DEQL(b=0.5, p=0.5, l2=20.0).fit(train)
    ours = ndcg_at_k(held_out, model.recommend(shown, 50)[0], 50)
    popular = np.where(shown.toarray() != 0, -1, np.asarray(train.sum(axis=0)))
    theirs = ndcg_at_k(held_out, np.argsort(-popular, axis=1)[:, :50], 50)
    gain = (ours - theirs)[~np.isnan(ours)]
    assert gain.mean() > 3 * gain.std() / np.sqrt(len(gain))


def test_recommends_better_than_popularity_on_made_up_users():
    check_better_than_popularity(load())


def test_recommends_better_than_popularity_on_movielens(shared_data):
    check_better_than_popularity(read_ratings(shared_data("movielens_small") / "ratings.csv"))


def test_both_sides_agree_on_movielens(shared_data):
    R = read_ratings(shared_data("movielens_small") / "ratings.csv")
    R.data[:] = 1
    R = R[:, np.flatnonzero(np.diff(R.tocsc().indptr) >= 20)]
    users, items = (DEQL(l2=20.0, solver=side).fit(R).score_items(R) for side in ("users", "items"))
    np.testing.assert_allclose(users, items, atol=1e-10)
