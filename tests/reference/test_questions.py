import json

import numpy as np
import pytest

from assay.core.errors import InputError
from assay.reference import builtin, recognise
from assay.reference.questions import KIND, Questions, load, read_questions


def test_is_a_built_in_subject():
    assert builtin("builtin:questions").load is load
    assert recognise("builtin:questions").kind == KIND == "texts"


def test_same_seed_same_questions_and_another_seed_others():
    first, again, other = load(n=50, seed=3), load(n=50, seed=3), load(n=50, seed=4)
    assert first.text == again.text
    assert first.options == again.options
    np.testing.assert_array_equal(first.posterior, again.posterior)
    assert first.text != other.text


def test_options_are_of_one_family_and_in_random_order():
    asked = load(n=4000)
    assert all(len(set(options)) == 4 for options in asked.options)
    families = {}
    for kind, options in zip(asked.kind.tolist(), asked.options, strict=True):
        families.setdefault(kind, set()).update(options)
    assert sorted(map(len, families.values())) == [5] * 8
    assert np.bincount(asked.answer, minlength=4) == pytest.approx([1000] * 4, abs=120)


def test_lengths():
    lengths = [len(t.split()) for t in load(n=3000).text]
    assert (min(lengths), max(lengths)) == (8, 28)


def test_posterior_is_calibrated_and_better_than_any_guess():
    asked = load(n=20_000, seed=1)
    p = asked.posterior
    np.testing.assert_allclose(p.sum(1), 1)
    right = p.argmax(1) == asked.answer
    # Of answers given with a probability, that share is right: the law of the draws, not a model of them.
    for low in (0.4, 0.6, 0.8, 0.95):
        chosen = (p.max(1) >= low) & (p.max(1) < low + 0.05)
        expected = p.max(1)[chosen]
        spread = np.sqrt((expected * (1 - expected)).sum()) / chosen.sum()
        assert abs(right[chosen].mean() - expected.mean()) < 4 * spread
    assert 0.85 < right.mean() < 0.99


def test_posterior_by_the_words_counted():
    # Frequencies of a topic's words, counted on many of its questions, give nearly the same answers.
    asked = load(n=20_000, n_topics=5, seed=2)
    words = {w: i for i, w in enumerate(sorted({w for t in asked.text for w in t.split()}))}
    topics = {o: i for i, o in enumerate(sorted({o for options in asked.options for o in options}))}
    counts = np.ones((5, len(words)))
    for text, options, answer in zip(asked.text, asked.options, asked.answer, strict=True):
        np.add.at(counts[topics[options[answer]]], [words[w] for w in text.split()], 1)
    log_p = np.log(counts / counts.sum(1, keepdims=True))
    guess = [
        np.argmax([log_p[topics[o], [words[w] for w in t.split()]].sum() for o in options])
        for t, options in zip(asked.text[:2000], asked.options[:2000], strict=True)
    ]
    assert np.mean(guess == asked.posterior[:2000].argmax(1)) > 0.97


@pytest.mark.parametrize("options", [2, 3, 5])
def test_any_number_of_options(options):
    asked = load(n=20, n_topics=10, n_options=options)
    assert asked.posterior.shape == (20, options)
    assert asked.take(np.array([3, 1])).text == (asked.text[3], asked.text[1])


def write(tmp_path, rows, name="asked.jsonl"):
    path = tmp_path / name
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows), encoding="utf-8")
    return path


def test_reads_json_lines(tmp_path):
    asked = read_questions(
        write(
            tmp_path,
            [
                {"question": "one?", "options": ["x", "y"], "answer": 1, "type": "b"},
                "",
                {"question": "two?", "choices": ["x", "y", "z"], "answer": "C", "type": "a"},
                {"question": "three?", "options": ["x", "B"], "answer": "B", "type": "b"},
            ],
        )
    )
    assert asked.text == ("one?", "two?", "three?")
    assert asked.options[1] == ("x", "y", "z")
    assert asked.answer.tolist() == [1, 2, 1]
    assert asked.kind.tolist() == [1, 0, 1]
    assert asked.posterior is None


def test_reads_pairs_of_answers_in_an_order_that_tells_nothing(tmp_path):
    rows = [
        {"question": "q", "answer_matching_behavior": a, "answer_not_matching_behavior": b}
        for a, b in ((" Yes", " No"), (" No", " Yes"))
    ]
    asked = read_questions(write(tmp_path, rows))
    assert asked.options == ((" No", " Yes"),) * 2
    assert asked.answer.tolist() == [1, 0]


def test_reads_a_table(tmp_path):
    rows = ["Text;label", *(f"text {i};label{i % 7}" for i in range(700))]
    asked = read_questions(write(tmp_path, rows, "asked.csv"), n_options=3)
    assert len(asked) == 700
    assert all(options[a] == f"label{i % 7}" for i, (options, a) in enumerate(zip(asked.options, asked.answer)))
    assert all(len(set(options)) == 3 for options in asked.options)
    assert np.bincount(asked.answer) == pytest.approx([233] * 3, abs=60)
    assert read_questions(tmp_path / "asked.csv", n_options=3, seed=0).options == asked.options
    assert read_questions(tmp_path / "asked.csv", n_options=3, seed=1).options != asked.options


def test_reads_real_questions(shared_data):
    asked = read_questions(shared_data("banking77") / "train.csv", n_options=6)
    assert len(asked) == 10_003
    assert len({o for options in asked.options for o in options}) == 77
    persona = read_questions(shared_data("anthropic_evals") / "persona" / "agreeableness.jsonl")
    assert set(persona.options) == {(" No", " Yes")}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: load(n=0), "n=0 and n_topics=40"),
        (lambda p: load(n_topics=7), "topics in families of 5"),
        (lambda p: load(n_options=6), "n_options=6: a family has 5 topics"),
        (lambda p: Questions(("q",), (("a", "a"),), np.array([0]), np.array([0])), "at least 2 distinct strings"),
        (lambda p: Questions(("q",), (("a", "b"),), np.array([2]), np.array([0])), "answer not among options"),
        (lambda p: read_questions(p / "none.jsonl"), "is no file"),
        (lambda p: read_questions(write(p, ["{"])), "line 1 is not JSON"),
        (lambda p: read_questions(write(p, [])), "is empty"),
        (lambda p: read_questions(write(p, [{"text": "a"}])), "line 1 has no text under 'question'"),
        (lambda p: read_questions(write(p, [{"question": "a"}])), "options must be at least 2 distinct strings"),
        (
            lambda p: read_questions(write(p, [{"question": "a", "options": ["b", "b"], "answer": 0}])),
            "options must be at least 2 distinct strings",
        ),
        (
            lambda p: read_questions(write(p, [{"question": "a", "options": ["b", "c"], "answer": 2}])),
            "line 1: answer 2 not among options",
        ),
        (
            lambda p: read_questions(write(p, [{"question": "a", "options": ["b", "c"], "answer": "d"}])),
            "answer 'd' not among options",
        ),
        (lambda p: read_questions(write(p, ["a,b", "1,2"], "t.csv")), "has no column text or question: there are a, b"),
        (lambda p: read_questions(write(p, ["text,label", "1,2"], "t.csv")), "has 1 different labels: 4 options"),
        (lambda p: read_questions(write(p, [], "t.csv")), "is empty"),
        (lambda p: read_questions(write(p, ["text,label"], "t.csv"), n_options=1), "n_options=1"),
    ],
)
def test_refusals(tmp_path, call, message):
    with pytest.raises(InputError) as error:
        call(tmp_path)
    assert message in str(error.value)


def test_bytes_that_are_not_text(tmp_path):
    path = tmp_path / "asked.jsonl"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="is not UTF-8"):
        read_questions(path)
    path.write_bytes(b" " * ((64 << 20) + 1))
    with pytest.raises(InputError, match="is larger than"):
        read_questions(path)
