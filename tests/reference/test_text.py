import hashlib
from pathlib import Path

import pytest

from assay.core.errors import InputError
from assay.reference import _text

SHA256 = {
    "prose": "fb68f7337b0f3ab0b0541175e4d3f7c3606fc35ff659926e2bc4aefa8d548eee",
    "technical": "15c06e263effae199a01eea0a85598657335ec3ace7bcea518033ef755b128f9",
}


@pytest.mark.parametrize("name", _text.NAMES)
def test_a_sample_is_long_enough_for_a_default_run_and_small_enough_to_ship(name):
    assert 60_000 < len(_text.sample(name)) < 100_000


@pytest.mark.parametrize("name", _text.NAMES)
def test_a_sample_is_the_text_that_the_figures_were_measured_on(name):
    assert hashlib.sha256(_text.sample(name).encode()).hexdigest() == SHA256[name]


def test_the_default_is_prose():
    assert _text.sample() == _text.sample("prose")


@pytest.mark.parametrize("name", _text.NAMES)
def test_no_sample_shares_a_paragraph_with_the_training_text(name):
    held_out = {p for p in _text.sample(name).split("\n\n") if len(p) > 40}
    trained_on = {p for other in _text.NAMES for p in _text.training_text(other).split("\n\n")}
    assert len(held_out) > 100
    assert not held_out & trained_on


@pytest.mark.parametrize("read", [_text.sample, _text.training_text])
@pytest.mark.parametrize("name", ["verse", "", "../README"])
def test_an_unknown_name_lists_the_known_ones(read, name):
    with pytest.raises(InputError, match=r"no built-in text is called .*: there are prose, technical"):
        read(name)


def test_the_licences_lie_beside_the_texts():
    folder = Path(_text.__file__).parent / "data" / "text"
    assert "PYTHON SOFTWARE FOUNDATION LICENSE" in (folder / "LICENSE-PYTHON.txt").read_text(encoding="utf-8")
    assert "public domain" in (folder / "README.md").read_text(encoding="utf-8")
