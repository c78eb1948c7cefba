"""Texts from files, and token windows."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from assay.core.checkpoint import Checkpoint
from assay.core.errors import InputError
from assay.core.text import read_texts, token_windows
from assay.reference import builtin


class Letters:
    """A tokenizer whose tokens are characters."""

    def __init__(self, bos: bool = False):
        self.bos_token_id = 1 if bos else None

    def __call__(self, text, add_special_tokens=True, **_):
        lead = [self.bos_token_id] if add_special_tokens and self.bos_token_id is not None else []
        return {"input_ids": lead + [ord(c) for c in text]}


class TestFiles:
    def test_plain(self, tmp_path):
        (tmp_path / "a.txt").write_text("Ünïcode ✓\nline", encoding="utf-8")
        assert "".join(read_texts(tmp_path / "a.txt")) == "Ünïcode ✓\nline"

    def test_a_large_plain_file_comes_in_blocks(self, tmp_path):
        (tmp_path / "a.txt").write_text("ab" * 200_000)
        assert len(next(read_texts(tmp_path / "a.txt"))) < 100_000

    def test_jsonl(self, tmp_path):
        rows = [{"id": 1, "text": "one"}, {"text": "two", "content": "no"}, {"text": None, "x": "y"}]
        (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
        assert list(read_texts(tmp_path / "a.jsonl", column="text")) == ["one", "two"]

    def test_jsonl_with_one_column_of_strings(self, tmp_path):
        (tmp_path / "a.jsonl").write_text('{"query": "hello", "n": 3}\n"bare string"\n')
        assert list(read_texts(tmp_path / "a.jsonl")) == ["hello", "bare string"]

    def test_jsonl_passes_over_a_text_that_is_null(self, tmp_path):
        (tmp_path / "a.jsonl").write_text('{"text": null, "n": 3}\n{"text": "two", "n": 4}\n')
        assert list(read_texts(tmp_path / "a.jsonl")) == ["two"]

    def test_parquet_without_text(self, tmp_path):
        pq.write_table(pa.table({"n": [1], "m": [2.0]}), tmp_path / "a.parquet")
        with pytest.raises(InputError, match=r"no column holds text; the columns are n, m$"):
            list(read_texts(tmp_path / "a.parquet"))

    def test_parquet(self, tmp_path):
        pq.write_table(pa.table({"n": [1, 2, 3], "body": ["a", None, "c"]}), tmp_path / "a.parquet")
        assert list(read_texts(tmp_path / "a.parquet")) == ["a", "c"]

    @pytest.mark.parametrize(
        ("name", "content", "match"),
        [
            ("a.txt", b"\xff\xfe\x00", "not UTF-8"),
            ("a.jsonl", b'{"text": ', "line 1 is not JSON"),
            ("a.jsonl", b"[1]", "no JSON object"),
            ("a.jsonl", b'{"a": "x", "b": "y", "n": 1}', "which column holds the text: a, b?"),
            ("a.jsonl", b'{"a": 1, "b": [2]}', "no column holds text; the columns are a, b$"),
            ("a.jsonl", b"{}", "no column holds text; the columns are none$"),
            ("a.jsonl", b"[" * 100_000, "is not JSON"),
            ("a.parquet", b"PAR1 nonsense", "no readable Parquet"),
        ],
    )
    def test_damaged(self, tmp_path, name, content, match):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InputError, match=match):
            list(read_texts(tmp_path / name))

    def test_columns_that_are_not_there(self, tmp_path):
        (tmp_path / "a.jsonl").write_text('{"text": "x"}')
        with pytest.raises(InputError, match="no column 'nope': there are text"):
            list(read_texts(tmp_path / "a.jsonl", column="nope"))
        pq.write_table(pa.table({"n": [1, 2]}), tmp_path / "a.parquet")
        with pytest.raises(InputError, match="holds no strings"):
            list(read_texts(tmp_path / "a.parquet", column="n"))

    def test_missing(self, tmp_path):
        with pytest.raises(InputError, match="is no file"):
            list(read_texts(tmp_path / "nothing.txt"))


class TestWindows:
    @given(
        st.lists(st.text(alphabet="abcdef", max_size=30), min_size=1, max_size=6), st.integers(2, 40), st.integers(2, 9)
    )
    def test_windows_are_the_text_in_order(self, texts, tokens, context):
        whole = [ord(c) for c in "".join(texts)]
        if len(whole) < 2:
            with pytest.raises(InputError, match="shorter than two tokens"):
                token_windows(Letters(), texts, tokens=tokens, context=context)
            return
        ids = token_windows(Letters(), texts, tokens=tokens, context=context).input_ids
        flat = ids.flatten().tolist()
        assert flat == whole[: len(flat)]
        assert ids.shape[1] == min(context, tokens, len(whole))
        assert ids.numel() <= tokens

    def test_every_window_starts_as_the_tokenizer_starts(self):
        windows = token_windows(Letters(bos=True), ["abcdefgh"], tokens=8, context=4)
        assert windows.input_ids[:, 0].tolist() == [1, 1]
        assert windows.input_ids[:, 1:].flatten().tolist() == [ord(c) for c in "abcdef"]
        assert windows.starts_with_bos
        assert windows.n_tokens == 8

    def test_reads_no_further_than_needed(self):
        def endless():
            while True:
                yield "abcdefgh"

        assert token_windows(Letters(), endless(), tokens=100, context=10).input_ids.shape == (10, 10)

    def test_characters_are_counted(self):
        assert token_windows(Letters(), ["abcdefgh", "ijkl"], tokens=8, context=4).n_characters == 8

    @pytest.mark.parametrize(("tokens", "context", "match"), [(1, 4, "--tokens is 1"), (8, 1, "--context is 1")])
    def test_impossible(self, tokens, context, match):
        with pytest.raises(InputError, match=match):
            token_windows(Letters(), ["abcdef"], tokens=tokens, context=context)

    def test_a_real_tokenizer(self):
        tokenizer = Checkpoint(builtin("tiny-lm").load()).tokenizer()
        windows = token_windows(tokenizer, ["It is a truth universally acknowledged. " * 20], tokens=64, context=16)
        assert windows.input_ids.shape == (4, 16)
