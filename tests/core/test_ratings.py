import io
import pickle
import zipfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import coo_matrix, csc_array, csr_matrix, dia_matrix, save_npz

from assay.core.errors import InputError
from assay.core.ratings import read_ratings


@pytest.fixture
def write(tmp_path):
    def put(content: str | bytes, name: str = "ratings.csv"):
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return put


def refused(path) -> str:
    with pytest.raises(InputError) as caught:
        read_ratings(path)
    message = str(caught.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    return message


def test_ids_are_numbered_in_numeric_order(write):
    R = read_ratings(write("userId,movieId,rating,timestamp\n10,200,4.0,1\n9,1000,3.5,2\n10,31,5,3\n"))
    assert isinstance(R, csr_matrix)
    np.testing.assert_array_equal(R.toarray(), [[0, 0, 3.5], [5, 4, 0]])


@pytest.mark.parametrize(
    "header",
    [
        "user_id,item_id,rating",
        "USER,Item,Score",
        '"User ID","Movie ID",Stars',
        "uid,iid,count",
        "﻿userId,movieId,rating",
    ],
)
def test_names_are_recognised_in_their_variants(write, header):
    assert read_ratings(write(f"{header}\n1,1,2\n2,1,3\n")).toarray().ravel().tolist() == [2, 3]


@pytest.mark.parametrize("delimiter", [",", "\t", ";"])
def test_delimiters(write, delimiter):
    rows = [("user", "item", "rating"), ("1", "2", "3"), ("4", "5", "1")]
    R = read_ratings(write("\r\n".join(delimiter.join(row) for row in rows)))
    np.testing.assert_array_equal(R.toarray(), [[3, 0], [0, 1]])


def test_text_ids_keep_their_leading_zeros(write):
    R = read_ratings(write("user,asin\nann,007\nbob,7\nann,B01\n"))
    np.testing.assert_array_equal(R.toarray(), [[1, 0, 1], [0, 1, 0]])


def test_events_without_a_rating_add_up(write):
    R = read_ratings(write("user,item\n1,1\n1,1\n2,1\n"))
    np.testing.assert_array_equal(R.toarray(), [[2], [1]])


def test_a_rating_of_zero_is_no_interaction(write):
    R = read_ratings(write("user,item,rating\n1,1,0\n1,2,3\n"))
    assert R.nnz == 1
    assert R.shape == (1, 2)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "no column is named like a user"),
        ("a,b\n1,2\n", "no column is named like a user (userid, user, uid, customerid, …) among 'a', 'b'"),
        ("user,b\n1,2\n", "no column is named like a item"),
        ("user,item,item\n1,2,3\n", "two columns called 'item'"),
        ("user,item\n", "has a header and no rows"),
        ("user,item\n1,2\n,3\n", "data row 2 has no 'user' (1 such rows)"),
        ("user,item\n1,NaN\n2,3\n", "data row 1 has no 'item'"),
        ("user,item\n1,2\n-1,3\n", "id -1 under 'user' is negative"),
        ("user,item\n1,99999999999999999999\n", "an id under 'item' does not fit in 64 bits"),
        ("user,item,rating\n1,2,nan\n", "data row 1 has no finite number under 'rating'"),
        ("user,item,rating\n1,2,\n", "data row 1 has no finite number under 'rating'"),
        ("user,item,rating\n1,2,5\n1,3,inf\n", "data row 2 has no finite number under 'rating'"),
        ("user,item,rating\n1,2,good\n", "cannot be read as a table"),
        ("user,item,rating\n1,2,5\n1,3\n", "cannot be read as a table"),
        ("user,item,rating\n1,2,5\n1,3,4\n1,2,3\n", "data row 3 rates an item that the same user has rated before"),
        ("user,item,rating\n1,2,0\n", "holds no interaction"),
        (b"\xff\xfe\x00\x01", "neither UTF-8 text nor an NPZ file"),
        (b"user,item\n\xff,1\n", "cannot be read as a table"),
        (pickle.dumps({"user": 1}), "neither UTF-8 text nor an NPZ file"),
    ],
)
def test_bad_tables_are_named(write, content, message):
    assert message in refused(write(content))


def test_missing_files_and_folders_are_named(tmp_path):
    assert "cannot be read" in refused(tmp_path / "none.csv")
    assert "cannot be read" in refused(tmp_path)


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=200), st.sampled_from([b"", b"user,item,rating\n", b"PK\x03\x04"]))
def test_any_bytes_are_read_or_refused(tmp_path_factory, content, start):
    path = tmp_path_factory.mktemp("fuzz") / "file"
    path.write_bytes(start + content)
    try:
        found = read_ratings(path)
    except InputError as error:
        named = str(error).startswith(str(path))
    else:
        named = found.nnz > 0
    assert named


R = csr_matrix([[1.0, 0, 2], [0, 3, 0]])


@pytest.mark.parametrize("matrix", [R, R.tocsc(), R.tocoo(), csc_array(R), R.astype(int), R.astype(np.float32)])
def test_stored_matrices_keep_their_shape(tmp_path, matrix):
    save_npz(tmp_path / "r.npz", matrix)
    found = read_ratings(tmp_path / "r.npz")
    assert isinstance(found, csr_matrix)
    assert found.dtype == np.float64
    np.testing.assert_array_equal(found.toarray(), R.toarray())


def parts(**changed):
    whole = {
        "format": np.array(b"csr"),
        "shape": np.array([2, 3]),
        "data": np.array([1.0, 2, 3]),
        "indices": np.array([0, 2, 1]),
        "indptr": np.array([0, 2, 3]),
    } | changed
    return {name: value for name, value in whole.items() if value is not None}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"format": None}, "holds no sparse matrix"),
        ({"format": np.array(b"bsr")}, "sparse format 'bsr' is not read"),
        ({"indices": None}, "holds no sparse matrix"),
        ({"indices": np.array([0, 3, 1])}, "its ids and its shape (2, 3) disagree"),
        ({"indices": np.array([0, -1, 1])}, "its ids and its shape (2, 3) disagree"),
        ({"indices": np.array([0.0, 1, 1])}, "its ids are not whole numbers"),
        ({"indptr": np.array([0, 5, 3])}, "disagree"),
        ({"indptr": np.array([0, 3])}, "disagree"),
        ({"shape": np.array([2, 10**12])}, "its shape 2 x 1000000000000 is out of range"),
        ({"shape": np.array([-2, 3])}, "out of range"),
        ({"shape": np.array([2.0, 3.0])}, "not two whole numbers"),
        ({"shape": np.array([2, 3, 4])}, "not two whole numbers"),
        ({"data": np.array([1.0, np.nan, 3])}, "values that are not finite"),
        ({"data": np.array(["a", "b", "c"])}, "give real numbers"),
        ({"data": np.zeros(3)}, "holds no interaction"),
    ],
)
def test_bad_stored_matrices_are_named(tmp_path, changed, message):
    np.savez(tmp_path / "r.npz", **parts(**changed))
    assert message in refused(tmp_path / "r.npz")


def test_coo_ids_beyond_the_shape_are_named(tmp_path):
    stored = {"format": np.array(b"coo"), "shape": np.array([2, 3]), "data": np.ones(1)}
    np.savez(tmp_path / "r.npz", **stored, row=np.array([0]), col=np.array([7]))
    assert "disagree" in refused(tmp_path / "r.npz")


def test_repeats_in_a_stored_matrix_add_up_as_scipy_has_it(tmp_path):
    save_npz(tmp_path / "r.npz", coo_matrix((np.ones(2), ([0, 0], [1, 1])), shape=(1, 2)))
    assert read_ratings(tmp_path / "r.npz").toarray().tolist() == [[0, 2]]


def test_other_formats_are_refused(tmp_path):
    save_npz(tmp_path / "r.npz", dia_matrix(R))
    assert "sparse format 'dia' is not read" in refused(tmp_path / "r.npz")


def test_pickles_are_never_loaded(tmp_path):
    class Trap:
        def __reduce__(self):
            return pytest.fail, ("unpickled",)

    np.savez(tmp_path / "r.npz", **parts(data=np.array([Trap()], dtype=object)))
    assert "holds no sparse matrix" in refused(tmp_path / "r.npz")


def test_an_array_that_claims_more_than_it_holds_is_refused_before_it_is_allocated(tmp_path):
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f8", "fortran_order": False, "shape": (10**15,)})
    np.savez(tmp_path / "whole.npz", **parts())
    with zipfile.ZipFile(tmp_path / "whole.npz") as source, zipfile.ZipFile(tmp_path / "r.npz", "w") as target:
        for name in source.namelist():
            target.writestr(name, header.getvalue() if name == "data.npy" else source.read(name))
    assert "of the size that it claims" in refused(tmp_path / "r.npz")


def test_movielens_has_its_published_size(shared_data):
    R = read_ratings(shared_data("movielens_small") / "ratings.csv")
    assert R.shape == (610, 9724)
    assert R.nnz == 100_836
    assert R.data.mean() == pytest.approx(3.50156, abs=1e-5)
