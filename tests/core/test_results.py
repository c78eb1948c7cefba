import json
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from assay.core.results import Column, Result, Table, format_value, jsonable


@dataclass(frozen=True)
class Inner(Result):
    value: float


@dataclass(frozen=True)
class Outer(Result):
    inner: Inner
    plain: Column
    scores: torch.Tensor
    by_name: dict


def test_result_to_dict_reaches_into_everything():
    result = Outer(Inner(math.nan), Column("a", "s"), torch.tensor([1.0, math.inf]), {1: np.float32(0.5)})
    assert result.to_dict() == {
        "inner": {"value": None},
        "plain": {"name": "a", "unit": "s", "about": ""},
        "scores": [1.0, None],
        "by_name": {"1": 0.5},
    }


leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
trees = st.recursive(leaves, lambda t: st.lists(t) | st.dictionaries(st.text(), t) | st.tuples(t, t), max_leaves=10)


@given(trees)
def test_jsonable_is_strict_json_and_stays_as_it_is(tree):
    once = jsonable(tree)
    assert json.loads(json.dumps(once, allow_nan=False)) == once
    assert jsonable(once) == once


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (torch.tensor([1.5, 2.0], dtype=torch.bfloat16), [1.5, 2.0]),
        (torch.tensor([[1, 2]]).T, [[1], [2]]),
        (torch.tensor(True), True),
        (torch.ones(1, requires_grad=True), [1.0]),
        (np.array([math.nan, 1.0]), [None, 1.0]),
        (np.int64(3), 3),
        (np.bool_(True), True),
        ((1, (2,)), [1, [2]]),
        (frozenset({1}), [1]),
        (np.array("x"), "x"),
    ],
)
def test_jsonable_of_arrays_and_scalars(value, expected):
    found = jsonable(value)
    assert found == expected
    assert type(found) is type(expected)


def test_jsonable_names_what_it_cannot_hold():
    with pytest.raises(TypeError, match="object has no JSON form"):
        jsonable([object()])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (math.nan, "–"),
        (True, "yes"),
        (np.bool_(False), "no"),
        (0.0, "0"),
        (0.123456, "0.1235"),
        (1234.56, "1235"),
        (12345.6, "12,346"),
        (1234567.0, "1.23e+06"),
        (-0.000123456, "-0.000123"),
        (9999, "9999"),
        (10_000, "10,000"),
        (np.int32(-20_000), "-20,000"),
        (np.float32(0.5), "0.5"),
        (math.inf, "inf"),
        ("word", "word"),
    ],
)
def test_format_value(value, text):
    assert format_value(value) == text


def test_table_prints_headings_units_and_aligned_numbers():
    table = Table((Column("layer"), Column("time", "s")), (("first", 1.5), ("b", 12.25)), "Layers")
    assert str(table).split("\n") == [
        "Layers",
        "layer  time (s)",
        "-----  --------",
        "first       1.5",
        "b         12.25",
    ]
    assert table.records() == [{"layer": "first", "time": 1.5}, {"layer": "b", "time": 12.25}]
    assert len(table) == 2
    assert list(table) == [("first", 1.5), ("b", 12.25)]


def test_empty_table_prints_its_headings():
    assert str(Table((Column("a"),), ())) == "a\n-"


def test_table_with_a_missing_number_keeps_its_column_right_aligned():
    lines = str(Table((Column("value"),), ((1.0,), (None,)))).split("\n")
    assert lines[2:] == ["    1", "    –"]


def test_table_to_pandas():
    pandas = pytest.importorskip("pandas")
    frame = Table((Column("a"), Column("b")), ((1, np.float64(2.0)),)).to_pandas()
    assert isinstance(frame, pandas.DataFrame)
    assert frame.to_dict("records") == [{"a": 1, "b": 2.0}]
    assert list(Table((Column("a"),), ()).to_pandas().columns) == ["a"]


def test_table_refuses_a_row_of_another_length():
    with pytest.raises(ValueError, match="a row of 1 values in a table of 2 columns"):
        Table((Column("a"), Column("b")), ((1,),))
