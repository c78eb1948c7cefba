"""Results appear whole or not at all, and never over something of the user's."""

import os
import stat

import pytest

from assay.core.errors import OutputError
from assay.core.output import MARKER, check_directory, claim_directory, new_directory, write_text


def test_claim_makes_and_takes_again(tmp_path):
    place = claim_directory(tmp_path / "a" / "b")
    assert (place / MARKER).exists()
    (place / "report.html").write_text("x")
    claim_directory(place)
    check_directory(place)


def test_what_is_not_ours_is_refused_and_left_alone(tmp_path):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "thesis.tex").write_text("x")
    for action in (claim_directory, check_directory):
        with pytest.raises(OutputError, match="was not written by assay"):
            action(tmp_path / "theirs")
    (tmp_path / "file").write_text("x")
    with pytest.raises(OutputError, match="is a file"):
        claim_directory(tmp_path / "file")
    with pytest.raises(OutputError, match="cannot be written: Not a directory"):
        check_directory(tmp_path / "file" / "below")
    assert [p.name for p in (tmp_path / "theirs").iterdir()] == ["thesis.tex"]


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs a file system that takes no files")
@pytest.mark.parametrize("place", ["/proc/assay", "/proc/self/a/b"])
def test_a_place_that_takes_no_files_is_refused_before_work(place):
    with pytest.raises(OutputError, match=f"{place} cannot be written: "):
        check_directory(place)


def test_the_check_leaves_nothing(tmp_path):
    check_directory(tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []


def test_an_empty_directory_may_be_taken(tmp_path):
    (tmp_path / "empty").mkdir()
    claim_directory(tmp_path / "empty")


def test_text_is_replaced_whole(tmp_path, monkeypatch):
    write_text(tmp_path / "a", "old")
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) & 0o400

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OutputError, match="No space left on device"):
        write_text(tmp_path / "a", "new")
    assert (tmp_path / "a").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_a_directory_appears_whole_or_not_at_all(tmp_path):
    with new_directory(tmp_path / "d") as inside:
        (inside / "x").write_text("1")
        assert not (tmp_path / "d").exists()
    assert (tmp_path / "d" / "x").read_text() == "1"

    def fails():
        with new_directory(tmp_path / "d") as inside:
            (inside / "x").write_text("2")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fails()
    assert (tmp_path / "d" / "x").read_text() == "1"
    with new_directory(tmp_path / "d") as inside:
        (inside / "y").write_text("3")
    assert not (tmp_path / "d" / "x").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["d"]
