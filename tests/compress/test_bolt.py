import copy
import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import log_softmax, softmax
from sklearn.metrics import log_loss

from assay.compress import (
    BudgetRouter,
    OptionLog,
    OptionScorer,
    odd_loss,
    option_agreement,
    option_metrics,
    option_probs,
    option_temperature,
    risk_coverage,
    routing_features,
    same_type_neighbours,
)
from assay.core.errors import InputError, NotApplicable
from assay.trials.compress.bolt import TRIAL


def scores(n=6, k=4, seed=0, dtype=torch.float64):
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def log(n=300, k=4, seed=0, strength=(1.0, 2.0, 1.5)):
    """Questions that look harder or easier at first, and actions that help by different amounts."""
    rng = np.random.default_rng(seed)
    answer = rng.integers(k, size=n)
    truth = np.eye(k)[answer]
    base = truth * rng.uniform(0, 3, size=(n, 1)) + rng.normal(size=(n, k))
    hr, rag, qd = strength
    actions = {
        "HR": base + hr * truth + 0.5 * rng.normal(size=(n, k)),
        "tmRAG": rag * truth + rng.normal(size=(n, k)),
        "QD": (qd * truth)[:, None] + rng.normal(size=(n, 3, k)),
    }
    return OptionLog(base, actions, answer, rng.uniform(size=n))


class Given(BudgetRouter):
    """A router whose gains are given."""

    def __init__(self, gains, **options):
        super().__init__(**options)
        self.given = np.asarray(gains)
        self.temperature_, self.models_ = 1.0, {}

    def gains(self, features):
        return np.broadcast_to(self.given, (len(features), len(self.costs)))


CARD_GAINS = (0.2, 0.1, 0.3)
ONE = OptionLog(np.zeros((1, 2)), {name: np.zeros((1, 2)) for name in ("HR", "tmRAG", "QD")})


# ---- known values ------------------------------------------------------------------------------------------------


def test_loss_by_hand():
    teacher = option_probs(torch.tensor([[2.0, 0.0]], dtype=torch.float64), 2.0)
    assert teacher[0].tolist() == pytest.approx([0.731059, 0.268941], abs=1e-6)
    loss, kl, ce = odd_loss(torch.zeros(1, 2, dtype=torch.float64), teacher, torch.tensor([0]))
    assert float(kl) == pytest.approx(0.110944, abs=1e-6)
    assert float(ce) == pytest.approx(0.693147, abs=1e-6)
    assert float(loss) == pytest.approx(0.180259, abs=1e-6)


def test_gradient_of_kl_is_student_minus_teacher():
    student = scores().requires_grad_()
    teacher = option_probs(scores(seed=1), 2.0)
    odd_loss(student, teacher, lam_ce=0.0).loss.backward()
    torch.testing.assert_close(student.grad * len(student), student.detach().softmax(-1) - teacher)


def test_gradient_of_the_whole_loss():
    student = scores(3, 3).requires_grad_()
    teacher, target = option_probs(scores(3, 3, seed=1)), torch.tensor([0, 2, 1])
    mask = torch.tensor([[True, True, True], [True, False, True], [True, True, True]])
    teacher = option_probs(scores(3, 3, seed=1), mask=mask)
    assert torch.autograd.gradcheck(lambda s: odd_loss(s, teacher, target, mask).loss, student)


def test_features_by_hand():
    found = routing_features(np.array([[0.5, 0.3, 0.2]]), 0.25)
    np.testing.assert_allclose(found, [[0.5, 0.2, 1.029653, 0.25]], atol=1e-6)


def test_agreement_by_hand():
    # The divergence of opposite certainties is ln 2.
    assert option_agreement(np.eye(2)) == pytest.approx(1 - 0.693147, abs=1e-6)
    assert option_agreement(np.array([[0.2, 0.8]] * 3)) == 1.0


def test_policy_by_hand():
    routed = Given(CARD_GAINS, threshold=0.4).route(ONE)
    assert routed.names == ("HR", "tmRAG", "QD")
    assert routed.actions.tolist() == [[2, 0]]
    np.testing.assert_allclose(routed.utility, [[0.857143, 0.4]], atol=1e-6)
    assert routed.cost[0] == pytest.approx(1.85)


def test_policy_stops_below_the_threshold():
    assert Given(CARD_GAINS, threshold=0.41).route(ONE).actions.tolist() == [[2, -1]]
    assert Given(CARD_GAINS, threshold=1.0).route(ONE).cost.tolist() == [1.0]


def test_policy_on_a_budget_that_pays_for_one_action_alone():
    # 1.3 - 1.0 is a little more than 0.3 in binary; 1 + 0.3 a little off too.
    routed = Given(CARD_GAINS, threshold=0.0, budget=1.3).route(ONE)
    assert routed.actions.tolist() == [[1, -1]]
    assert routed.cost[0] == pytest.approx(1.3)


def test_aurc_by_hand():
    probs = np.array([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3]])
    answer = np.array([0, 1, 0])
    coverage, risk = risk_coverage(probs, answer)
    np.testing.assert_allclose(coverage, [1 / 3, 2 / 3, 1])
    np.testing.assert_allclose(risk, [0, 0.5, 1 / 3])
    assert option_metrics(probs, answer).aurc == pytest.approx(0.277778, abs=1e-6)


# ---- loss --------------------------------------------------------------------------------------------------------


def test_a_constant_added_to_all_scores_changes_nothing():
    s, t = scores(), scores(seed=1)
    target = torch.arange(6) % 4
    torch.testing.assert_close(option_probs(s + 7, 2.0), option_probs(s, 2.0))
    torch.testing.assert_close(odd_loss(s + 7, option_probs(t), target), odd_loss(s, option_probs(t), target))


def test_loss_agrees_with_torch():
    s, teacher, target = scores(), option_probs(scores(seed=1)), torch.arange(6) % 4
    found = odd_loss(s, teacher, target, lam_kl=0.7, lam_ce=0.3)
    kl = torch.nn.functional.kl_div(s.log_softmax(-1), teacher, reduction="batchmean")
    ce = torch.nn.functional.cross_entropy(s, target)
    torch.testing.assert_close(found.loss, 0.7 * kl + 0.3 * ce)


def test_student_that_is_the_teacher_has_no_kl():
    assert float(odd_loss(scores(), option_probs(scores())).kl) == pytest.approx(0, abs=1e-12)
    assert float(odd_loss(scores(), option_probs(scores())).ce) == 0


def test_masked_options_are_as_if_they_were_not_there():
    s, t, target = scores(), scores(seed=1), torch.arange(6) % 2
    mask = torch.tensor([True, True, True, False]).expand(6, 4)
    padded = s.clone().requires_grad_()
    found = odd_loss(padded, option_probs(t, mask=mask), target, mask)
    torch.testing.assert_close(found, odd_loss(s[:, :3], option_probs(t[:, :3]), target))
    found.loss.backward()
    assert torch.isfinite(padded.grad).all()
    assert (padded.grad[:, 3] == 0).all()


def test_a_certain_teacher_gives_a_finite_loss():
    found = odd_loss(scores(2, 3), torch.eye(3, dtype=torch.float64)[:2])
    assert float(found.kl) == pytest.approx(float(-scores(2, 3).log_softmax(-1)[[0, 1], [0, 1]].mean()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_dtypes_and_views(dtype):
    s = scores(4, 6, dtype=dtype).T[:, ::2]
    assert not s.is_contiguous()
    wide = odd_loss(s.double(), option_probs(scores(6, 2, seed=1)))
    found = odd_loss(s, option_probs(scores(6, 2, seed=1, dtype=dtype)))
    assert found.loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert float(found.kl) == pytest.approx(float(wide.kl), abs=1e-2 if dtype == torch.bfloat16 else 2e-3)


def test_no_gradient_reaches_the_teacher():
    t = scores(seed=1).requires_grad_()
    odd_loss(scores().requires_grad_(), option_probs(t)).loss.backward()
    assert t.grad is None


def test_compiles_in_one_graph():
    compiled = torch.compile(odd_loss, backend="eager", fullgraph=True)
    mask = torch.tensor([True, True, True, False]).expand(6, 4)
    inputs = scores(), option_probs(scores(seed=1), mask=mask), torch.arange(6) % 3, mask
    torch.testing.assert_close(compiled(*inputs), odd_loss(*inputs))


@given(st.integers(2, 6), st.integers(0, 1000), st.floats(0.1, 10))
def test_kl_is_never_negative(k, seed, temperature):
    found = odd_loss(5 * scores(5, k, seed), option_probs(scores(5, k, seed + 1), temperature))
    assert float(found.kl) >= -1e-12


# ---- temperature and metrics -------------------------------------------------------------------------------------


def test_temperature_has_the_least_loss():
    s, y = log(seed=3).base * 3, log(seed=3).answer
    tau = option_temperature(s, y)

    def nll(t):
        return -log_softmax(s / t, axis=1)[np.arange(len(y)), y].mean()

    assert 1 < tau < 10
    assert all(nll(tau) < nll(t) for t in (0.99 * tau, 1.01 * tau, 1.0))


def test_temperature_scales_with_the_scores():
    s, y = log().base, log().answer
    assert option_temperature(4 * s, y) == pytest.approx(4 * option_temperature(s, y))


def test_temperature_where_there_is_no_optimum():
    s = np.array([[3.0, 0.0], [2.0, 0.0]])
    assert option_temperature(s, np.array([0, 0])) == 0.01
    assert option_temperature(s, np.array([1, 1])) == 100.0


def test_temperature_passes_over_absent_options():
    s, y = log(k=3).base, log(k=3).answer
    wide = np.column_stack([s, np.full(len(s), -np.inf)])
    assert option_temperature(wide, y) == pytest.approx(option_temperature(s, y))


def test_metrics_agree_with_scikit_learn():
    y = log(seed=5).answer
    p = softmax(log(seed=5).base, axis=1)
    found = option_metrics(p, y)
    assert found.nll == pytest.approx(log_loss(y, p))
    assert found.brier == pytest.approx(np.square(p - np.eye(4)[y]).sum(1).mean())
    assert found.accuracy == (p.argmax(1) == y).mean()


def test_calibration_error_by_hand():
    # Two answers in the bin (0.6, 0.667], one of them right; one in the last bin, right.
    p = np.array([[0.65, 0.35], [0.35, 0.65], [1.0, 0.0]])
    found = option_metrics(p, np.array([0, 0, 0]))
    assert found.ece == pytest.approx(2 / 3 * 0.15)
    assert found.overconfident_wrong == 0.0


def test_equal_confidence_does_not_depend_on_the_order():
    p = np.full((6, 2), 0.5)
    first, last = np.array([1, 1, 0, 0, 0, 0]), np.array([0, 0, 0, 0, 1, 1])
    assert option_metrics(p, first).aurc == pytest.approx(1 / 3)
    assert option_metrics(p, first).aurc == pytest.approx(option_metrics(p, last).aurc)


def test_overconfident_wrong_and_none_of_the_above():
    p = np.array([[0.7, 0.3], [0.6, 0.4], [0.1, 0.9], [0.2, 0.8]])
    found = option_metrics(p, np.array([1, 1, 1, 0]), none_option=np.array([0, -1, 1, 1]))
    assert found.overconfident_wrong == pytest.approx(2 / 3)
    assert found.none_misuse == pytest.approx(2 / 4)
    assert option_metrics(p, np.array([0, 0, 1, 1])).overconfident_wrong == 0.0
    assert option_metrics(p, np.array([0, 0, 1, 1])).none_misuse is None


def test_metrics_table_figure_and_json():
    found = option_metrics(softmax(log().base, axis=1), log().answer)
    assert len(found.table()) == 1
    assert len(found.figure().data[0].x) == 300
    assert json.loads(json.dumps(found.to_dict()))["n"] == 300


# ---- features and neighbours -------------------------------------------------------------------------------------


@given(st.integers(2, 6), st.integers(0, 1000))
def test_features_stay_in_their_ranges(k, seed):
    p = softmax(3 * scores(8, k, seed).numpy(), axis=1)
    top, margin, entropy, _ = routing_features(p).T
    assert ((top >= 1 / k - 1e-12) & (top <= 1)).all()
    assert ((margin >= 0) & (margin <= top)).all()
    assert ((entropy >= 0) & (entropy <= np.log(k) + 1e-12)).all()


def test_agreement_of_absent_options_and_batches():
    p = softmax(scores(12, 3).numpy(), axis=1).reshape(2, 2, 3, 3)
    padded = np.concatenate([p, np.zeros((2, 2, 3, 1))], axis=-1)
    np.testing.assert_allclose(option_agreement(padded), option_agreement(p))
    assert option_agreement(p).shape == (2, 2)


def test_neighbours_are_of_the_same_type_and_not_oneself():
    rng = np.random.default_rng(0)
    bank = rng.normal(size=(40, 5))
    kinds = rng.integers(3, size=40)
    found = same_type_neighbours(bank, bank, kinds, kinds, k=3, exclude=np.arange(40))
    assert (kinds[found.index] == kinds[:, None]).all()
    assert (found.index != np.arange(40)[:, None]).all()
    unit = bank / np.linalg.norm(bank, axis=1, keepdims=True)
    cosine = unit @ unit.T
    cosine[(kinds[:, None] != kinds) | np.eye(40, dtype=bool)] = -2
    np.testing.assert_allclose(found.similarity, -np.sort(-cosine, axis=1)[:, :3])
    np.testing.assert_allclose(found.affinity, found.similarity.mean(1))


def test_neighbours_that_are_fewer_than_asked_for():
    found = same_type_neighbours(np.eye(2), np.eye(2), np.array([0, 7]), np.array([0, 1]), k=4)
    assert found.index.tolist() == [[0, -1, -1, -1], [-1] * 4]
    assert found.affinity.tolist() == [1.0, 0.0]


def test_neighbours_in_pieces(monkeypatch):
    q, b = scores(30, 5).numpy(), scores(20, 5, seed=1).numpy()
    whole = same_type_neighbours(q, b)
    monkeypatch.setattr("assay.compress._bolt._SIMILARITIES", 60)
    np.testing.assert_array_equal(same_type_neighbours(q, b).index, whole.index)


# ---- router ------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.floats(0, 1), min_size=3, max_size=3),
    st.floats(1, 3),
    st.floats(0, 2),
    st.integers(1, 4),
)
def test_cost_never_exceeds_the_budget(gains, budget, threshold, rounds):
    routed = Given(gains, budget=budget, threshold=threshold, max_rounds=rounds).route(ONE)
    assert routed.cost[0] <= budget + 1e-9
    done = routed.actions[0][routed.actions[0] >= 0]
    assert len(set(done.tolist())) == len(done) <= rounds
    assert (routed.utility[0][: len(done)] >= threshold).all()


def test_threshold_gives_the_largest_mean_cost_that_is_allowed():
    router = BudgetRouter().fit(log())
    other = log(seed=1)
    levels = router._route(other, -np.inf).utility.ravel()
    for mean_cost in (1.0, 1.05, 1.2, 1.4, 1.7, 5.0):
        found = router.tune(other, mean_cost).route(other).mean_cost
        assert found <= mean_cost + 1e-9
        cheaper = levels[np.isfinite(levels) & (levels < router.threshold)]
        if cheaper.size:
            router.threshold = cheaper.max()
            assert router.route(other).mean_cost > mean_cost or router.route(other).mean_cost == found


def test_threshold_of_equal_utilities_takes_all_or_none():
    ten = OptionLog(np.zeros((10, 2)), {name: np.zeros((10, 2)) for name in ("HR", "tmRAG", "QD")})
    router = Given(CARD_GAINS, max_rounds=1)
    assert router.tune(ten, 1.2).route(ten).mean_cost == 1.0
    assert router.tune(ten, 1.35).route(ten).mean_cost == pytest.approx(1.35)


def test_cost_falls_as_the_threshold_rises():
    router = BudgetRouter().fit(log())
    costs = []
    for threshold in np.linspace(0, 3, 12):
        router.threshold = threshold
        costs.append(router.route(log(seed=1)).mean_cost)
    assert costs == sorted(costs, reverse=True)
    assert costs[0] > costs[-1] == 1.0


def test_one_by_one_is_the_same_as_all_at_once():
    questions = log(40, seed=2)
    router = BudgetRouter().fit(log()).tune(log(seed=1), 1.4)
    routed = router.route(questions)
    called = []
    actions = {name: lambda i, n=name: called.append((i, n)) or questions.actions[n][i] for name in questions.actions}
    for i in range(40):
        one = router.run(i, lambda i: questions.base[i], actions, affinity=questions.affinity[i])
        assert one.option == routed.option[i]
        assert one.cost == pytest.approx(routed.cost[i])
        np.testing.assert_allclose(one.probs, routed.probs[i])
        names = [routed.names[a] for a in routed.actions[i] if a >= 0]
        assert [s.action for s in one.trace] == names
        assert [n for j, n in called if j == i] == names, "an action was called that was not chosen"
        for step in one.trace:
            assert (step.agreement is not None) == (step.action == "QD")
    assert 1 < routed.mean_cost < 2


def test_the_surest_distribution_answers():
    base = np.log(np.array([[0.6, 0.4], [0.9, 0.1]]))
    once = np.log(np.array([[0.2, 0.8], [0.2, 0.8]]))
    rounds = np.log(np.array([[[0.2, 0.8], [0.4, 0.6]]] * 2))
    router = Given((1.0, 0.0, 0.9))
    routed = router.route(OptionLog(base, {"HR": once, "tmRAG": base, "QD": rounds}))
    assert routed.source.tolist() == [0, -1]
    assert routed.option.tolist() == [1, 0]
    assert routed.flips == 0.5
    found = router.run(0, lambda q: base[0], {"HR": lambda q: once[0], "tmRAG": None, "QD": lambda q: rounds[0]})
    assert [s.action for s in found.trace] == ["QD", "HR"]
    np.testing.assert_allclose(found.trace[0].probs, [0.3, 0.7])
    assert found.trace[0].agreement == pytest.approx(option_agreement(np.array([[0.2, 0.8], [0.4, 0.6]])))


def test_gains_find_the_action_that_helps():
    learned = BudgetRouter().fit(log(1500, strength=(0.0, 4.0, 0.0)))
    p = softmax(log(seed=1).base / learned.temperature_, axis=1)
    gains = learned.gains(routing_features(p, log(seed=1).affinity))
    assert ((gains > 0) & (gains < 1)).all()
    assert (gains.argmax(1) == 1).mean() > 0.95
    # An action can only help where the first answer may be wrong.
    assert np.corrcoef(gains[:, 1], p.max(1))[0, 1] < -0.9


def test_gains_are_rates_of_help():
    questions = log(3000)
    router = BudgetRouter().fit(questions)
    p = softmax(questions.base / router.temperature_, axis=1)
    helped = (p.argmax(1) != questions.answer) & (questions.actions["HR"].argmax(1) == questions.answer)
    gains = router.gains(routing_features(p, questions.affinity))[:, 0]
    assert gains.mean() == pytest.approx(helped.mean(), abs=1e-3)


def test_balanced_gains_are_larger():
    features = routing_features(softmax(log(seed=1).base, axis=1))
    plain, balanced = (BudgetRouter(class_weight=w).fit(log()).gains(features) for w in (None, "balanced"))
    assert (balanced.mean(0) > plain.mean(0)).all()


def test_an_action_that_never_helps_is_hardly_ever_done():
    questions = log()
    useless = OptionLog(questions.base, {"same": questions.base}, questions.answer)
    router = BudgetRouter({"same": 0.5}).fit(useless)
    np.testing.assert_allclose(router.gains(np.zeros((1, 4))), [[0.5 / 301]])
    router.threshold = 0.1
    assert router.route(useless).mean_cost == 1.0


def test_learned_routing_beats_doing_the_same_at_random():
    router = BudgetRouter().fit(log(1500)).tune(log(1500, seed=1), 1.25)
    test = log(4000, seed=2)

    class Random(BudgetRouter):
        def gains(self, features):
            return draw.random((len(features), 3)) * np.array(list(self.costs.values()))

    draw = np.random.default_rng(0)
    random = Random().fit(log(1500)).tune(log(1500, seed=1), 1.25)
    ours, theirs = router.route(test), random.route(test)
    assert ours.mean_cost == pytest.approx(theirs.mean_cost, abs=0.03)
    assert (ours.option == test.answer).mean() > (theirs.option == test.answer).mean() + 0.02


def test_weights_and_costs_of_ones_own():
    router = Given(CARD_GAINS, weights={"tmRAG": 10.0}, max_rounds=1)
    assert router.route(ONE).actions.tolist() == [[1]]
    two = OptionLog(np.zeros((1, 2)), {"a": np.zeros((1, 2)), "b": np.zeros((1, 2))})
    assert Given((0.5, 0.5), costs={"a": 0.2, "b": 0.1}).route(two).actions.tolist() == [[1, 0]]


def test_the_same_twice():
    first, again = (BudgetRouter().fit(log()).tune(log(seed=1), 1.3) for _ in range(2))
    assert first.threshold == again.threshold
    np.testing.assert_array_equal(first.route(log(seed=2)).probs, again.route(log(seed=2)).probs)


def test_tensors_and_questions_of_different_sizes():
    base = torch.tensor([[1.0, 0.0, -torch.inf], [0.0, 1.0, 2.0]], dtype=torch.bfloat16)
    questions = OptionLog(base, {"HR": base, "tmRAG": base, "QD": base[:, None].expand(2, 3, 3)}, torch.tensor([0, 2]))
    routed = Given(CARD_GAINS).route(questions)
    assert routed.option.tolist() == [0, 2]
    assert routed.probs[0, 2] == 0
    assert questions.take(slice(1)).answer.tolist() == [0]


def test_routing_table_figure_and_json():
    routed = BudgetRouter().fit(log()).tune(log(seed=1), 1.3).route(log(seed=2))
    rows = {r[0]: r[1:] for r in routed.table()}
    assert set(rows) == {"first pass", "HR", "tmRAG", "QD"}
    assert sum(r[1] for r in rows.values()) == pytest.approx(1)
    assert len(routed.figure().data) == 2
    assert json.loads(json.dumps(routed.to_dict()))["names"] == ["HR", "tmRAG", "QD"]


# ---- language models ---------------------------------------------------------------------------------------------


class Letters:
    """A tokenizer of single characters, "abc" and so on, from token 1; token 0 begins a text."""

    def __init__(self, merges=(), bos=True):
        self.merges, self.bos = merges, bos

    def __call__(self, texts, add_special_tokens=True, **kwargs):
        rows = []
        for text in texts:
            for i, pair in enumerate(self.merges):
                text = text.replace(pair, chr(ord("A") + i))
            ids = [20 + ord(c) - ord("A") if c.isupper() else 1 + ord(c) - ord("a") for c in text]
            rows.append([0, *ids] if self.bos and add_special_tokens else ids)
        return {"input_ids": rows}


def tiny(vocab=30, seed=0, **config):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    settings = {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": vocab, "n_positions": 32} | config
    model = GPT2LMHeadModel(GPT2Config(**settings)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(4)
    return model


class Fixed(torch.nn.Module):
    """Three tokens; the next depends on the last alone."""

    table = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.6, 0.3], [0.25, 0.25, 0.5]])

    def __init__(self):
        super().__init__()
        self.none = torch.nn.Parameter(torch.zeros(()))

    def forward(self, input_ids, attention_mask):
        class Out:
            logits = self.table.log()[input_ids]

        return Out()


def test_score_by_hand_on_three_tokens():
    found = OptionScorer(Fixed(), Letters())("a", ["b", "ab"])
    # Tokens are 0 (begin), 1 (a), 2 (b): b after a is 0.3; a after a 0.6, then b 0.3.
    expected = torch.tensor([0.3, 0.6 * 0.3]).log()
    torch.testing.assert_close(found.scores, expected)
    torch.testing.assert_close(found.probs, torch.tensor([0.3, 0.18]) / 0.48)
    assert found.n_tokens.tolist() == [1, 2]
    assert found.best == 0
    normal = OptionScorer(Fixed(), Letters(), normalize=True)("a", ["b", "ab"])
    torch.testing.assert_close(normal.scores, expected / torch.tensor([1.0, 2.0]))


def by_hand(model, prompt, whole):
    logits = model(torch.tensor([whole])).logits.log_softmax(-1)[0]
    return sum(logits[i - 1, whole[i]] for i in range(prompt, len(whole)))


@pytest.mark.parametrize("batch_size", [1, 2, 32])
def test_padding_and_batches_change_nothing(batch_size):
    model, options = tiny(), ["c", "defgh", "ef", "gfedcba"]
    scorer = OptionScorer(model, Letters(), batch_size=batch_size)
    with torch.no_grad():
        expected = torch.stack([by_hand(model, 3, Letters()(["ab" + o])["input_ids"][0]) for o in options])
    torch.testing.assert_close(scorer("ab", options).scores, expected, atol=1e-5, rtol=1e-5)


def test_a_token_across_the_border_is_scored_for_every_option():
    model, letters = tiny(), Letters(merges=("bc",))
    found = OptionScorer(model, letters)("ab", ["cd", "dd"])
    # "ab" + "cd" is a|bc|d, so that the prompt's b is a token of its own in the second text alone.
    with torch.no_grad():
        expected = torch.stack([by_hand(model, 2, letters(["ab" + o])["input_ids"][0]) for o in ("cd", "dd")])
    torch.testing.assert_close(found.scores, expected, atol=1e-5, rtol=1e-5)
    assert found.n_tokens.tolist() == [2, 3]


def test_scores_carry_a_gradient_and_leave_the_mode():
    model = tiny().train()
    scorer = OptionScorer(model, Letters())
    assert not scorer("ab", ["c", "d"]).scores.requires_grad
    loss = odd_loss(scorer.score("ab", ["c", "d"])[None], torch.tensor([[0.2, 0.8]]), torch.tensor([1])).loss
    loss.backward()
    assert model.transformer.wte.weight.grad.abs().sum() > 0
    assert model.training


def test_distillation_teaches_a_language_model_the_preference():
    model = tiny(embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0)
    scorer = OptionScorer(model, Letters())
    teacher = torch.tensor([[0.1, 0.7, 0.2]])
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(40):
        optimiser.zero_grad()
        odd_loss(scorer.score("ab", ["c", "de", "f"])[None], teacher).loss.backward()
        optimiser.step()
    torch.testing.assert_close(scorer("ab", ["c", "de", "f"]).probs, teacher[0], atol=0.02, rtol=0)


def test_low_rank_adapters_learn():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(tiny(), peft.LoraConfig(r=4, target_modules=["c_attn"]))
    odd_loss(OptionScorer(model, Letters()).score("ab", ["c", "d"])[None], torch.tensor([[0.2, 0.8]])).loss.backward()
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for n, p in model.named_parameters() if "lora" in n)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_in_the_models_dtype(dtype):
    exact = OptionScorer(tiny(), Letters())("ab", ["c", "de"]).scores
    found = OptionScorer(copy.deepcopy(tiny()).to(dtype), Letters())("ab", ["c", "de"]).scores
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, exact, atol=0.5 if dtype == torch.bfloat16 else 1e-5, rtol=0)


def real():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from assay.reference.tiny_lm import load

    return AutoModelForCausalLM.from_pretrained(load()).eval(), AutoTokenizer.from_pretrained(load())


def test_the_built_in_model_prefers_english():
    scorer = OptionScorer(*real())
    for prompt, options in (
        ("She had been", [" very", " module"]),
        ("He was a man of", [" great sense", " sense great"]),
        ("It was not in her", [" power to", " to power"]),
    ):
        assert scorer(prompt, options).best == 0


def test_chat_template():
    model, tokenizer = real()
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</>\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    found = OptionScorer(model, tokenizer, chat=True)("Is it?", ["Yes", "No"])
    start = "<user>Is it?</>\n<assistant>"
    plain = OptionScorer(model, tokenizer)
    ids = tokenizer(start, add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        expected = [
            by_hand(model, len(ids), tokenizer(f"{start}{o}</>\n", add_special_tokens=False)["input_ids"])
            for o in ("Yes", "No")
        ]
    torch.testing.assert_close(found.scores, torch.stack(expected), atol=1e-4, rtol=1e-4)
    assert plain("Is it?", ["Yes", "No"]).scores.shape == (2,)


def test_a_processor_is_given_the_image_once_a_text():
    class Seeing(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.words = tiny()

        def forward(self, input_ids, attention_mask, pixel_values, logits_to_keep=0):
            assert len(pixel_values) == len(input_ids)
            seen = self.words(input_ids, attention_mask=attention_mask, logits_to_keep=logits_to_keep)
            # What is seen makes token 3 likelier.
            seen.logits = seen.logits + pixel_values.mean((1, 2, 3))[:, None, None] * torch.eye(30)[3]
            return seen

    class Processor:
        tokenizer = Letters()

        def __call__(self, text, images, **kwargs):
            assert kwargs["padding_side"] == "right"
            ids = [torch.tensor(r) for r in self.tokenizer(text)["input_ids"]]
            lengths = torch.tensor([len(r) for r in ids])
            padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
            attended = (torch.arange(padded.shape[1]) < lengths[:, None]).long()
            return {"input_ids": padded, "attention_mask": attended, "pixel_values": torch.stack(list(images))}

    for batch_size in (1, 8):
        scorer = OptionScorer(Seeing(), Processor(), batch_size=batch_size)
        dark, bright = (scorer("ab", ["cd", "d", "eee"], v * torch.ones(3, 2, 2)) for v in (0.0, 50.0))
        torch.testing.assert_close(dark.scores, OptionScorer(tiny(), Letters())("ab", ["cd", "d", "eee"]).scores)
        assert bright.scores[0] > bright.scores[2]
        assert bright.scores[0] != dark.scores[0]


def llava():
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(image_size=8, patch_size=4, projection_dim=8, **sizes),
        text_config=LlamaConfig(vocab_size=30, num_key_value_heads=2, **sizes),
        image_token_index=29,
    )
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return model


class LlavaLike:
    """What a processor of such a model does: one image token a patch, four patches, before the text."""

    tokenizer = Letters()

    def __call__(self, text, images, **kwargs):
        ids = [torch.tensor([29] * 4 + row) for row in self.tokenizer(text)["input_ids"]]
        lengths = torch.tensor([len(row) for row in ids])
        padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
        attended = (torch.arange(padded.shape[1]) < lengths[:, None]).long()
        return {"input_ids": padded, "attention_mask": attended, "pixel_values": torch.stack(list(images))}


def test_a_vision_language_model_of_transformers():
    model, scorer = llava(), OptionScorer(llava(), LlavaLike(), batch_size=2)
    one, other = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    found = scorer("ab", ["c", "de", "f"], one)
    assert found.n_tokens.tolist() == [1, 2, 1]
    inputs = LlavaLike()(["abde"], [one])
    with torch.no_grad():
        logits = model(**inputs).logits[0].log_softmax(-1)
    torch.testing.assert_close(found.scores[1], logits[-3, 4] + logits[-2, 5], atol=1e-4, rtol=1e-4)
    assert not torch.allclose(scorer("ab", ["c", "de", "f"], other).scores, found.scores)


# ---- the trial ---------------------------------------------------------------------------------------------------


def test_trial_parts_do_not_overlap_and_absent_options_stay_absent(tmp_path):

    rows = [
        {"question": f"w{i} x{i % 3} y", "options": ["x0", "x1", "x2"][: 2 + (i % 3 > 1)], "answer": min(i % 3, 1)}
        for i in range(450)
    ]
    path = tmp_path / "asked.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    data = TRIAL.prepare(str(path), seed=0, budget=TRIAL.budgets["tiny"])
    first = [set(p.words[:, 0].tolist()) for p in (data.train, data.fit, data.tune, data.test)]
    assert sum(map(len, first)) == len(set.union(*first))
    assert (data.preferences[data.train.options < 0] == 0).all()
    for arm in TRIAL.arms:
        measured = arm.run(data, seed=0, budget=TRIAL.budgets["tiny"])
        assert set(measured) == {m.name for m in TRIAL.metrics}


def test_trial_on_too_few_questions(tmp_path):

    path = tmp_path / "few.jsonl"
    path.write_text(json.dumps({"question": "a", "options": ["b", "c"], "answer": "b"}))
    with pytest.raises(InputError, match="has 1 questions: 400 are needed"):
        TRIAL.prepare(str(path), seed=0, budget=TRIAL.budgets["tiny"])


def test_trial_on_real_questions(shared_data):

    budget = TRIAL.budgets["tiny"] | {
        "questions": 1500,
        "student": 250,
        "test": 300,
        "rates": (3e-2,),
        "epochs": 8,
        "teacher_epochs": 4,
    }
    data = TRIAL.prepare(str(shared_data("banking77") / "train.csv"), seed=0, budget=budget)
    measured = TRIAL.arm("odd+router").run(data, seed=0, budget=budget)
    assert measured["first-pass accuracy"] > 1 / 6 + 0.1
    assert measured["accuracy"] > measured["first-pass accuracy"]


def test_trial_on_built_in_questions():

    budget = TRIAL.budgets["tiny"] | {
        "questions": 2500,
        "student": 400,
        "test": 500,
        "rates": (3e-2,),
        "epochs": 8,
        "teacher_epochs": 4,
    }
    data = TRIAL.prepare("builtin:questions", seed=0, budget=budget)
    measured = TRIAL.arm("odd+router").run(data, seed=0, budget=budget)
    assert measured["first-pass accuracy"] > 0.25 + 0.1
    assert measured["accuracy"] > measured["first-pass accuracy"]


# ---- refusals ----------------------------------------------------------------------------------------------------

T = torch.tensor
HALF = np.full((2, 2), 0.5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: option_probs(scores(), 0.0), "temperature is 0.0: give a positive number"),
        (lambda: option_probs(torch.arange(4)), "scores are torch.int64"),
        (lambda: option_probs([1.0, 2.0]), "scores are list"),
        (lambda: option_probs(scores(2, 1)), "scores have 1 options"),
        (lambda: option_probs(scores(), 1.0, torch.ones(6, 3, dtype=torch.bool)), "mask is torch.bool of shape"),
        (lambda: option_probs(scores(), 1.0, torch.zeros(6, 4, dtype=torch.bool)), "without any option"),
        (lambda: odd_loss(scores(), scores(6, 3)), "student_scores have shape (6, 4) and teacher_probs (6, 3)"),
        (lambda: odd_loss(scores(), scores()), "teacher_probs are no distributions"),
        (lambda: odd_loss(scores(), option_probs(scores()), lam_kl=-1.0), "lam_kl is -1.0"),
        (lambda: odd_loss(scores(), option_probs(scores()), T([1])), "target has shape (1,): one index a question, 6"),
        (lambda: odd_loss(scores(), option_probs(scores()), torch.full((6,), 4)), "target goes from 4 to 4"),
        (lambda: odd_loss(scores(), option_probs(scores()), torch.zeros(6)), "target is torch.float32"),
        (
            lambda: odd_loss(scores(1, 3), T([[0.5, 0.0, 0.5]]), T([1]), T([[True, False, True]])),
            "the answer is not among the options",
        ),
        (
            lambda: odd_loss(scores(1, 3), T([[0.5, 0.5, 0.0]]), None, T([[True, False, True]])),
            "weight on an option that the mask leaves out",
        ),
        (lambda: routing_features(np.ones((2, 2))), "probs of question 0 are no distribution: they sum to 2"),
        (lambda: routing_features(np.ones(2)), "probs have shape (2,)"),
        (lambda: routing_features(HALF, np.ones(3)), "affinity has shape (3,)"),
        (lambda: routing_features([["a", "b"]]), "probs hold something other than numbers"),
        (lambda: option_agreement(HALF[:1]), "at least 2 rounds"),
        (lambda: option_temperature(np.zeros((2, 2)), np.array([0, 2])), "answer of question 1 is 2: it is not among"),
        (lambda: option_temperature(np.zeros((2, 2)), np.array([0.0, 1.0])), "answer is float64 of shape (2,)"),
        (lambda: option_temperature(np.full((1, 2), np.nan), np.array([0])), "NaN or +inf"),
        (lambda: option_temperature(np.array([[0.0, -np.inf]]), np.array([0])), "question 0 fewer than 2 options"),
        (
            lambda: option_temperature(np.array([[0.0, 1.0, -np.inf]]), np.array([2])),
            "answer of question 0 is 2: it is not among the options",
        ),
        (lambda: option_metrics(HALF, np.array([0, 1]), bins=0), "bins is 0"),
        (lambda: option_metrics(HALF, np.array([0, 1]), none_option=np.array([0])), "none_option has shape (1,)"),
        (lambda: same_type_neighbours(np.eye(2), np.eye(3)), "queries have shape (2, 2) and bank (3, 3)"),
        (lambda: same_type_neighbours(np.eye(2), np.eye(2), k=0), "k is 0"),
        (lambda: same_type_neighbours(np.eye(2), np.eye(2), np.zeros(2)), "go together"),
        (lambda: same_type_neighbours(np.eye(2), np.eye(2), np.zeros(3), np.zeros(2)), "one entry for each row"),
        (lambda: same_type_neighbours(np.full((2, 2), np.inf), np.eye(2)), "queries have entries that are not finite"),
        (lambda: OptionLog(np.zeros((2, 2)), {"a": np.zeros((2, 3))}), "scores of a have shape (2, 3) and base (2, 2)"),
        (
            lambda: OptionLog(np.array([[0, 1, -np.inf]]), {"a": np.zeros((1, 3))}),
            "scores of a miss other options than base",
        ),
        (lambda: OptionLog(np.zeros((2, 2)), {}, affinity=np.ones(3)), "affinity has shape (3,)"),
        (lambda: BudgetRouter({}), "costs name no action"),
        (lambda: BudgetRouter({"a": 0.0}), "cost of a is 0.0"),
        (lambda: BudgetRouter(weights={"zoom": 1.0}), "weights name 'zoom', which has no cost: actions are HR"),
        (lambda: BudgetRouter(weights={"HR": -1.0}), "weight of HR is -1.0"),
        (lambda: BudgetRouter(budget=0.5), "budget is 0.5: the first pass alone costs 1"),
        (lambda: BudgetRouter(max_rounds=0), "max_rounds is 0"),
        (lambda: BudgetRouter(class_weight="even"), "class_weight is 'even'"),
        (lambda: BudgetRouter().fit(ONE), "log has no answers"),
        (lambda: BudgetRouter({"zoom": 0.1}).fit(log()), "no scores of action 'zoom': it has HR, tmRAG, QD"),
        (lambda: BudgetRouter().fit(log()).tune(log(), 0.9), "mean_cost is 0.9"),
        (lambda: Given(CARD_GAINS).run(0, lambda q: [0, 1], {}), "actions lack 'HR'"),
        (
            lambda: Given((1, 0, 0)).run(0, lambda q: [0, 1], dict.fromkeys(("HR", "tmRAG", "QD"), lambda q: [0.0])),
            "scores of HR have shape (1, 1)",
        ),
        (lambda: OptionScorer(Fixed(), Letters())("a", ["b"]), "options must be at least 2 distinct strings"),
        (lambda: OptionScorer(Fixed(), Letters())("a", ["b", "b"]), "options must be at least 2 distinct strings"),
        (lambda: OptionScorer(Fixed(), Letters())("a", "bc"), "options must be at least 2 distinct strings"),
        (lambda: OptionScorer(Fixed(), Letters())("a", ["b", ""]), "option '' adds no token"),
        (lambda: OptionScorer(Fixed(), Letters(bos=False))("", ["a", "b"]), "prompt is empty"),
        (lambda: OptionScorer(Fixed(), Letters())("a", ["a", "b"], image=0), "pass the model's processor"),
        (lambda: OptionScorer(Fixed(), Letters(), batch_size=0), "batch_size is 0"),
    ],
)
def test_refusals(call, message):
    with pytest.raises(InputError) as error:
        call()
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_what_does_not_apply():
    with pytest.raises(NotApplicable, match="call fit"):
        BudgetRouter().route(log())
    with pytest.raises(NotApplicable, match="no chat template"):
        OptionScorer(Fixed(), Letters(), chat=True)


def test_a_broken_model_is_told():
    model = Fixed()
    model.table = torch.full((3, 3), torch.nan)
    with pytest.raises(InputError, match="not finite"):
        OptionScorer(model, Letters())("a", ["a", "b"])
