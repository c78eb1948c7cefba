import numpy as np
import pytest

from assay.core.errors import InputError
from assay.reference.positional_tasks import (
    TASKS,
    IndexTask,
    PartialInductionTask,
    RetrievalTask,
    load,
    positional_head,
    symbolic_head,
)


def rng(seed=0):
    return np.random.default_rng(seed)


@pytest.mark.parametrize("task", TASKS.values())
def test_target_is_the_value_at_the_answer(task):
    drawn = task(8, 12).sample(500, rng())
    assert np.array_equal(drawn.values[np.arange(500), drawn.answer], drawn.target)
    assert drawn.tokens.max() < task(8, 12).n_tokens
    assert drawn.tokens.min() >= 0


def test_index_asks_every_position_and_answers_by_it():
    drawn = IndexTask(8, 12).sample(4000, rng())
    assert np.array_equal(drawn.query, drawn.answer)
    counts = np.bincount(drawn.answer, minlength=8)
    assert np.abs(counts / 4000 - 1 / 8).max() < 4 * np.sqrt(1 / 8 * 7 / 8 / 4000)
    assert np.array_equal(drawn.tokens[:, -1], 12 + drawn.query)


def test_retrieval_keys_differ_and_the_answer_has_the_key():
    drawn = RetrievalTask(8, 12).sample(500, rng())
    assert all(len(set(row)) == 8 for row in drawn.keys.tolist())
    assert np.array_equal(drawn.keys[np.arange(500), drawn.answer], drawn.query)
    assert np.array_equal(drawn.tokens[:, 0:-1:2], drawn.keys)
    assert np.array_equal(drawn.tokens[:, 1::2], 12 + drawn.values)


def test_partial_induction_answers_with_the_last_occurrence():
    drawn = PartialInductionTask(12, 4).sample(500, rng())
    for keys, query, answer in zip(drawn.keys.tolist(), drawn.query.tolist(), drawn.answer.tolist(), strict=True):
        assert max(i for i, key in enumerate(keys) if key == query) == answer
    assert np.array_equal(drawn.keys[:, 1:], drawn.values[:, :-1])
    assert (np.array([len(set(row)) for row in drawn.keys.tolist()]) < 12).all()


@pytest.mark.parametrize("task", sorted(TASKS))
def test_load_scores_the_last_position_and_repeats(task):
    one, two, other = (load(task=task, n=20, items=6, vocab=8, seed=seed) for seed in (3, 3, 4))
    assert np.array_equal(one.tokens, two.tokens)
    assert not np.array_equal(one.tokens, other.tokens)
    assert one.mask[:, -1].all()
    assert one.mask.sum() == 20
    assert one.tokens.max() < one.vocab
    drawn = TASKS[task](6, 8).sample(20, rng(3))
    assert np.array_equal(one.targets[:, -1], drawn.target)


def test_positional_head_looks_at_its_target_and_symbolic_head_at_its_symbol():
    q, k = positional_head(9, theta=0.3, target=4, sharpness=10)
    angle = 0.3 * np.arange(9)
    turned = np.stack([np.cos(angle), np.sin(angle)], axis=1) * k[:, :1]
    at = 0.3 * 8
    query = np.array([[np.cos(at), -np.sin(at)], [np.sin(at), np.cos(at)]]) @ q
    assert np.allclose(turned @ query, 10 * np.cos(0.3 * (np.arange(9) - 4)))
    symbols = rng().integers(4, size=(3, 9))
    q, k = symbolic_head(symbols, symbols[:, 0], vocab=4, sharpness=5)
    assert np.allclose((k @ q[..., None])[..., 0], 5.0 * (symbols == symbols[:, :1]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"task": "sort"}, "choose one of index, retrieval, induction"),
        ({"n": 0}, "n=0: must be at least 1"),
        ({"items": 1}, "both must be at least 2"),
        ({"task": "retrieval", "items": 9, "vocab": 8}, "9 different keys need as many symbols"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(InputError, match=message):
        load(**arguments)
