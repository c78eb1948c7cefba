import io
import zipfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.core.errors import InputError
from assay.reference import builtin
from assay.reference.sequences import load, read_sequences


def test_is_a_built_in_subject():
    assert builtin("builtin:sequences").KIND == "sequences"


def test_parity_is_the_running_sum_of_bits_modulo_two():
    task = load(task="parity", length=20, n=50, seed=0)
    assert task.vocab == 3
    assert (task.tokens[:, 0] == 2).all()
    for row, answers in zip(task.tokens, task.targets, strict=True):
        count = 0
        for bit, answer in zip(row[1:], answers[1:], strict=True):
            count += bit
            assert answer == count % 2
    assert task.mask[:, 1:].all()
    assert not task.mask[:, 0].any()


@settings(max_examples=30, deadline=None)
@given(length=st.integers(1, 12), shortest=st.integers(1, 12), seed=st.integers(0, 1000))
def test_copy_repeats_the_string_and_ends(length, shortest, seed):
    shortest = min(length, shortest)
    task = load(task="copy", length=length, n=5, seed=seed, min_length=shortest)
    for tokens, targets, mask in zip(task.tokens, task.targets, task.mask, strict=True):
        separator = list(tokens).index(27)
        letters = list(tokens[1:separator])
        assert shortest <= len(letters) <= length
        assert all(0 <= x < 26 for x in letters)
        assert list(targets[mask]) == [*letters, 28]
        assert np.flatnonzero(mask)[0] == separator
        assert list(tokens[separator + 1 : separator + 1 + len(letters)]) == letters
        assert np.array_equal(targets[:-1], tokens[1:])


def test_copy_lengths_cover_the_range():
    task = load(task="copy", length=6, n=500, seed=0, min_length=2)
    assert set(task.mask.sum(1).tolist()) == {3, 4, 5, 6, 7}


def test_mqar_answers_with_the_value_of_the_key():
    task = load(task="mqar", length=9, n=40, seed=0)
    assert task.tokens.shape == (40, 27)
    for tokens, targets, mask in zip(task.tokens, task.targets, task.mask, strict=True):
        held = dict(zip(tokens[:18:2].tolist(), tokens[1:18:2].tolist(), strict=True))
        assert len(held) == 9
        assert sorted(tokens[18:].tolist()) == sorted(held)
        assert [held[t] for t in tokens[mask].tolist()] == targets[mask].tolist()
        assert mask.sum() == 9


@pytest.mark.parametrize("task", ["parity", "copy", "mqar"])
def test_same_seed_same_draw(task):
    one, two, other = (load(task=task, length=10, n=20, seed=s) for s in (1, 1, 2))
    assert np.array_equal(one.tokens, two.tokens)
    assert not np.array_equal(one.tokens, other.tokens)
    assert one.tokens.max() < one.vocab
    assert one.targets.max() < one.vocab


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "sorting"}, "task='sorting'"),
        ({"n": 0}, "n=0"),
        ({"length": 0}, "lengths from 0 to 0"),
        ({"length": 4, "min_length": 5}, "lengths from 5 to 4"),
        ({"task": "mqar", "length": 65}, "mqar has 64 keys"),
    ],
)
def test_sizes_out_of_range_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        load(**options)


def arrays(**changed):
    task = load(task="parity", length=7, n=6, seed=0)
    return {"tokens": task.tokens, "targets": task.targets, "mask": task.mask} | changed


def test_what_is_written_is_read(tmp_path):
    held = arrays()
    held["targets"] = np.where(held["mask"], held["targets"], -100).astype(np.int16)
    np.savez_compressed(tmp_path / "a.npz", **held)
    task = read_sequences(tmp_path / "a.npz")
    assert np.array_equal(task.tokens, held["tokens"])
    assert np.array_equal(task.targets[task.mask], held["targets"][held["mask"]])
    assert task.vocab == 3


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tokens": np.ones((6, 8))}, "tokens in .* is float64"),
        ({"targets": np.ones(8, dtype=int)}, "targets in .* shape"),
        ({"mask": np.ones((6, 8), dtype=int)}, "mask in .* is int64: expected booleans"),
        ({"mask": np.ones((6, 7), dtype=bool)}, "shapes must agree"),
        ({"mask": np.zeros((6, 8), dtype=bool)}, "scores nothing"),
        ({"tokens": np.full((6, 8), -1)}, "tokens in .* go from -1"),
        ({"tokens": np.full((6, 8), 1 << 20)}, "they must lie between 0 and"),
        ({"tokens": np.array([[{}] * 8] * 6, dtype=object)}, "not a plain array"),
    ],
)
def test_files_that_do_not_hold_sequences_are_refused(tmp_path, changed, message):
    np.savez(tmp_path / "a.npz", **arrays(**changed))
    with pytest.raises(InputError, match=message):
        read_sequences(tmp_path / "a.npz")


def test_a_missing_array_a_missing_file_and_rubbish_are_refused(tmp_path):
    held = arrays()
    del held["mask"]
    np.savez(tmp_path / "a.npz", **held)
    with pytest.raises(InputError, match="no array 'mask'"):
        read_sequences(tmp_path / "a.npz")
    with pytest.raises(InputError, match="not a readable NPZ"):
        read_sequences(tmp_path / "b.npz")
    (tmp_path / "c.npz").write_bytes(b"not a zip")
    with pytest.raises(InputError, match="not a readable NPZ"):
        read_sequences(tmp_path / "c.npz")
    with zipfile.ZipFile(tmp_path / "d.npz", "w") as archive:
        for name in ("tokens", "targets", "mask"):
            archive.writestr(f"{name}.npy", b"rubbish")
    with pytest.raises(InputError, match=r"tokens in .* cannot be read"):
        read_sequences(tmp_path / "d.npz")


def test_a_header_that_claims_more_than_the_file_holds_is_refused(tmp_path):
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<i8", "fortran_order": False, "shape": (1 << 40, 1 << 20)})
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        for name in ("tokens", "targets", "mask"):
            archive.writestr(f"{name}.npy", header.getvalue())
    with pytest.raises(InputError, match="not a plain array"):
        read_sequences(tmp_path / "a.npz")
