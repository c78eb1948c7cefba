"""`assay compress`: what it prints and writes, and what it refuses in one line with exit status 2."""

import json
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from assay.cli import main
from assay.core.checkpoint import quiet
from assay.reference import tiny_lm

FAST = ("--samples", "4", "--context", "32")
MODEL = "builtin:tiny-lm"


@pytest.fixture
def assay(monkeypatch, capsys, tmp_path):
    """Run `assay compress` in an empty working directory: exit status, standard output, standard error."""
    monkeypatch.chdir(tmp_path)

    def run(*args):
        monkeypatch.setattr(sys, "argv", ["assay", "compress", *map(str, args)])
        try:
            main()
            status = 0
        except SystemExit as stop:
            status = stop.code or 0
        out, err = capsys.readouterr()
        return status, out, err

    return run


@pytest.fixture
def small(tmp_path_factory):
    """A model so small that a run takes a second, and of transposed layers."""
    path = tmp_path_factory.mktemp("small") / "gpt2"
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=1024, n_embd=32, n_layer=2, n_head=2, n_positions=64, bos_token_id=1, eos_token_id=1)
    with quiet():
        GPT2LMHeadModel(config).save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).write_bytes((tiny_lm.load() / name).read_bytes())
    return path


def test_the_whole_of_it(assay, tmp_path):
    status, out, err = assay(MODEL, "smaller", "--method", "rtn", *FAST)
    assert status == 0, err
    for part in ("rtn 4 bit g64", "28 layers packed, 1 left", "perplexity", "KL to the original", "same first choice",
                 "weight files (MB)", "bits per packed weight", "4.250", "peak memory", "lm_head: skipped by name"):  # fmt: skip
        assert part in out
    names = {p.name for p in (tmp_path / "smaller").iterdir()}
    assert {"report.html", "compression.json", "README.md", "config.json", "model.safetensors"} <= names
    page = (tmp_path / "smaller" / "report.html").read_text()
    assert "http://" not in page.split("<script>")[0]
    assert "Before and after" in page
    assert [p.name for p in tmp_path.iterdir()] == ["smaller"]
    with quiet():
        assert AutoModelForCausalLM.from_pretrained(tmp_path / "smaller")(torch.arange(9)[None]).logits.isfinite().all()


def test_json_is_the_document(assay, small, tmp_path):
    status, out, err = assay(small, "out", "--method", "obr", "--pattern", "2:4", "--json", *FAST)
    assert status == 0, err
    assert out == (tmp_path / "out" / "compression.json").read_text()
    document = json.loads(out, parse_constant=pytest.fail)
    assert document["setting"] == "obr 4 bit g64 2:4"
    assert document["format"] == "assay"


def test_options_reach_the_setting(assay, small):
    for args, name in (
        (("--bits", "3", "--group-size", "0", "--asymmetric"), "gptq 3 bit rows asymmetric"),
        (("--method", "obr", "--sparsity", "0.25", "--group-size", "16"), "obr 4 bit g16 25% pruned"),
        (("--method", "logart", "--bits", "3", "--skip", "c_proj", "--skip", "transformer.h.0"), "logart 3 bit"),
    ):
        status, out, err = assay(small, f"out-{name.replace(' ', '-')}", "--json", *args, *FAST)
        assert status == 0, err
        document = json.loads(out)
        assert document["setting"] == name
        # c_attn and c_fc of the second block, where two kinds were skipped.
        assert len(document["layers"]) == (2 if "logart" in name else 8)


@pytest.mark.parametrize(
    ("match", "args"),
    [
        ("--method is 'awq': choose one of", ("--method", "awq")),
        ("--bits is 0: gptq takes 2 to 8", ("--bits", "0")),
        ("--bits is 3: bof4 has 4", ("--method", "bof4", "--bits", "3")),
        ("--sparsity is 1.5", ("--method", "obr", "--sparsity", "1.5")),
        ("--pattern is '4:2'", ("--method", "obr", "--pattern", "4:2")),
        ("--sparsity and --pattern go with --method obr", ("--sparsity", "0.5")),
        ("--asymmetric goes with", ("--method", "bof4", "--asymmetric")),
        ("--group-size does not go with --method logart", ("--method", "logart", "--group-size", "32")),
        ("--group-size 96 does not divide the width 128", ("--group-size", "96")),
        ("the width 128 of model.layers.0.self_attn.q_proj is not divisible by 7", ("--method", "obr", "--pattern", "3:7")),
        ("--samples is 0", ("--samples", "0")),
        ("--context is 300, and the model takes 256", ("--context", "300")),
        ("nothing.txt is no file", ("--text", "nothing.txt")),
        ("nothing.txt is no file", ("--held", "nothing.txt")),
        ("--fit is 1.0: the smallest", ("--fit", "1.0")),
        ("--fit chooses the settings itself", ("--fit", "3.5", "--bits", "4")),
        ("--fit chooses the settings itself", ("--fit", "3.5", "--method", "obr")),
        ("--skip layers.0 names no linear layer", ("--skip", "layers.0")),
        ("No such option: --bit", ("--bit", "4")),
    ],
)  # fmt: skip
def test_refusals(assay, tmp_path, match, args):
    status, out, err = assay(MODEL, "out", *args)
    assert (status, out) == (2, "")
    assert match in err
    assert err.startswith("assay: ")
    assert err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_place_that_is_taken(assay, tmp_path):
    (tmp_path / "out").mkdir()
    status, out, err = assay(MODEL, "out", *FAST)
    assert (status, out) == (2, "")
    assert err == "assay: out exists: choose another place, or delete it\n"
    assert assay("nothing", "new", *FAST)[0] == 2
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_what_it_wrote_is_not_taken_again(assay, small):
    assert assay(small, "out", *FAST)[0] == 0
    status, _, err = assay("out", "out2", *FAST)
    assert status == 2
    assert "out is quantised already, with assay: give the original" in err
