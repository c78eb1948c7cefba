"""The command line: what it prints, what it writes, and what it refuses in one line with exit status 2."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import jsonschema
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

from assay import __version__, report
from assay.cli import main
from assay.core.checkpoint import Checkpoint
from assay.examine import SECTIONS
from assay.reference import builtin


@pytest.fixture
def assay(monkeypatch, capsys, tmp_path):
    """Run a command in an empty working directory: exit status, standard output, standard error."""
    monkeypatch.chdir(tmp_path)

    def run(*args):
        monkeypatch.setattr(sys, "argv", ["assay", *map(str, args)])
        try:
            main()
            status = 0
        except SystemExit as stop:
            status = stop.code or 0
        out, err = capsys.readouterr()
        return status, out, err

    return run


@pytest.fixture
def model(tmp_path_factory):
    """A copy of the small built-in model to damage."""
    path = tmp_path_factory.mktemp("copy") / "model"
    shutil.copytree(builtin("tiny-lm").load(), path)
    return path


def edit_config(path, **values):
    config = json.loads((path / "config.json").read_text()) | values
    (path / "config.json").write_text(json.dumps(config))


FAST = ("--quick", "--tokens", "256", "--context", "64")


class TestExamine:
    def test_the_whole_check_up(self, assay, model, tmp_path):
        status, out, err = assay("examine", model, *FAST, "--out", "place")
        assert status == 0, err
        document = json.loads((tmp_path / "place" / "findings.json").read_text())
        jsonschema.validate(document, report.schema())
        assert 3 <= len(document["findings"]) <= 6
        assert all(document["sections"].values())
        page = (tmp_path / "place" / "report.html").read_text()
        assert "http://" not in page.split("<script>")[0]
        assert "place/report.html" in out
        assert "$ assay try" in out
        # A second run replaces its own results.
        assert assay("examine", model, *FAST, "--out", "place", "--only", "health")[0] == 0

    def test_json_is_the_document(self, assay, model):
        status, out, _ = assay("examine", model, *FAST, "--only", "loss,health", "--json")
        document = json.loads(out)
        assert status == 0
        jsonschema.validate(document, report.schema())
        assert document["sections"]["loss"]["n_tokens"] == 252
        assert document["sections"]["spectra"] is None

    @pytest.mark.parametrize("suffix", ["txt", "jsonl", "parquet"])
    def test_texts(self, assay, model, tmp_path, suffix):
        text = "The quick brown fox jumps over the lazy dog. " * 40
        path = tmp_path / f"text.{suffix}"
        if suffix == "txt":
            path.write_text(text)
        elif suffix == "jsonl":
            path.write_text(json.dumps({"text": text}) + "\n")
        else:
            pq.write_table(pa.table({"text": [text]}), path)
        status, out, err = assay("examine", model, *FAST, "--text", path, "--only", "loss", "--json")
        assert status == 0, err
        assert json.loads(out)["settings"]["tokens"] == 256

    def test_an_encoder_skips_what_is_causal_and_says_why(self, assay, model, tmp_path):
        torch.manual_seed(0)
        config = BertConfig(
            vocab_size=1024, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48,
            max_position_embeddings=64,
        )  # fmt: skip
        BertForMaskedLM(config).save_pretrained(tmp_path / "bert")
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(model / name, tmp_path / "bert" / name)
        status, out, err = assay("examine", "bert", *FAST, "--json")
        assert status == 0, err
        document = json.loads(out)
        reasons = {s["section"]: s["reason"] for s in document["skipped"]}
        assert set(reasons) == {"loss", "inactive-heads", "rope-heads"}
        assert "encoder" in reasons["loss"]
        assert document["sections"]["spectra"]["layers"] == [0, 1]
        assert document["sections"]["four_bits"]["schemes"]

    def test_a_model_without_rotary_embeddings(self, assay, model, tmp_path):
        torch.manual_seed(0)
        GPT2LMHeadModel(GPT2Config(vocab_size=1024, n_embd=32, n_layer=2, n_head=2, n_positions=64)).save_pretrained(
            tmp_path / "gpt2"
        )
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(model / name, tmp_path / "gpt2" / name)
        status, out, err = assay("examine", "gpt2", *FAST, "--json")
        assert status == 0, err
        document = json.loads(out)
        assert [s["section"] for s in document["skipped"]] == ["rope-heads"]
        assert document["sections"]["heads"]["removals"]

    def test_an_image_model(self, assay):
        status, out, err = assay("examine", "builtin:tiny-vit", "--quick", "--json")
        assert status == 0, err
        document = json.loads(out)
        assert document["sections"]["health"]["dead_heads"]
        assert document["sections"]["spectra"]["layers"] == [0, 1, 2, 3]
        assert {s["section"] for s in document["skipped"]} == {
            "loss",
            "inactive-heads",
            "rope-heads",
            "noise-stability",
        }

    def test_nan_weights_are_a_finding(self, assay, model):
        tensors = load_file(model / "model.safetensors")
        name = "model.layers.1.mlp.up_proj.weight"
        tensors[name][0, 0] = float("nan")
        save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
        status, out, err = assay("examine", model, *FAST, "--json")
        assert status == 0, err
        document = json.loads(out)
        assert document["findings"][0]["key"] == "not-finite"
        assert name in document["findings"][0]["sentence"]
        jsonschema.validate(document, report.schema())
        reasons = {s["section"]: s["reason"] for s in document["skipped"]}
        assert set(reasons) == set(SECTIONS) - {"health"}
        assert all(name in reason for reason in reasons.values())
        # The same where the weights were not asked about, and in the report.
        status, out, err = assay("examine", model, *FAST, "--only", "loss,nerve", "--out", "place")
        assert status == 0, err
        assert name in out
        assert "not measured, the weights hold 1 NaN or infinite value" in " ".join(out.split())

    def test_infinite_weights_in_two_layers(self, assay, model):
        tensors = load_file(model / "model.safetensors")
        for layer in (0, 2):
            tensors[f"model.layers.{layer}.self_attn.q_proj.weight"][3] = float("inf")
        save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
        status, out, err = assay("examine", model, *FAST, "--json")
        assert status == 0, err
        document = json.loads(out)
        jsonschema.validate(document, report.schema())
        assert document["findings"][0]["number"] == 256
        assert len([t for t in document["sections"]["health"]["tensors"] if t["not_finite"]]) == 2

    @pytest.mark.parametrize(("text", "predicted"), [("a", 1), ("hello world", 5)])
    def test_little_text_is_a_warning(self, assay, model, tmp_path, text, predicted):
        (tmp_path / "t.txt").write_text(text)
        status, out, err = assay("examine", model, "--quick", "--text", "t.txt", "--json")
        assert status == 0, err
        document = json.loads(out)
        jsonschema.validate(document, report.schema())
        first = document["findings"][0]
        assert (first["key"], first["level"], first["number"]) == ("few-tokens", "warning", predicted)
        assert f"Only {predicted} token" in first["sentence"]
        assert document["sections"]["loss"]["n_tokens"] == predicted

    def test_enough_text_is_no_warning(self, assay, model):
        def keys(tokens):
            out = assay("examine", model, "--quick", "--tokens", tokens, "--context", "33", "--only", "loss", "--json")[
                1
            ]
            return [f["key"] for f in json.loads(out)["findings"]]

        assert keys(33 * 8) == ["perplexity"]
        assert keys(33 * 7) == ["few-tokens", "perplexity"]

    def test_a_tokenizer_without_a_pad_token(self, assay, model):
        config = json.loads((model / "tokenizer_config.json").read_text())
        config.pop("pad_token", None)
        (model / "tokenizer_config.json").write_text(json.dumps(config))
        assert assay("examine", model, *FAST, "--only", "loss")[0] == 0

    def test_an_unknown_architecture_still_gets_what_needs_no_anatomy(self, assay, model, tmp_path):
        from transformers import OPTConfig, OPTForCausalLM

        torch.manual_seed(0)
        config = OPTConfig(
            vocab_size=1024, hidden_size=32, ffn_dim=48, num_hidden_layers=1, num_attention_heads=2,
            max_position_embeddings=64, word_embed_proj_dim=32,
        )  # fmt: skip
        OPTForCausalLM(config).save_pretrained(tmp_path / "opt")
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(model / name, tmp_path / "opt" / name)
        status, out, err = assay("examine", "opt", *FAST, "--json")
        assert status == 0, err
        document = json.loads(out)
        assert document["sections"]["health"]["tensors"]
        assert any("assay/core/architectures.py" in s["reason"] for s in document["skipped"])


class TestRefusals:
    """Exit status 2, one line, nothing written."""

    @pytest.fixture
    def refuses(self, assay, tmp_path):
        def check(match, *args):
            before = sorted(tmp_path.rglob("*"))
            status, out, err = assay(*args)
            assert status == 2
            assert out == ""
            assert err.startswith("assay: ")
            assert err.count("\n") == 1, err
            assert match in err
            assert sorted(tmp_path.rglob("*")) == before

        return check

    def test_no_such_model(self, refuses):
        refuses("does not exist", "examine", "nothing")
        refuses("no built-in subject is called 'nothing'", "examine", "builtin:nothing")
        refuses("is no model", "examine", "builtin:ratings")

    def test_no_config(self, refuses, tmp_path):
        (tmp_path / "empty").mkdir()
        refuses("has no config.json", "examine", "empty")

    def test_truncated_weights(self, refuses, model):
        data = (model / "model.safetensors").read_bytes()
        (model / "model.safetensors").write_bytes(data[: len(data) // 2])
        refuses("truncated", "examine", model)

    def test_config_disagrees(self, refuses, model):
        edit_config(model, num_hidden_layers=9)
        refuses("disagree", "examine", model)

    def test_pickle_only(self, refuses, model):
        torch.save(load_file(model / "model.safetensors"), model / "pytorch_model.bin")
        (model / "model.safetensors").unlink()
        refuses("--allow-pickle", "examine", model)

    def test_pickle_when_allowed(self, assay, model):
        torch.save(load_file(model / "model.safetensors"), model / "pytorch_model.bin")
        (model / "model.safetensors").unlink()
        assert assay("examine", model, *FAST, "--only", "loss", "--allow-pickle")[0] == 0

    def test_no_tokenizer(self, refuses, model):
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (model / name).unlink()
        refuses("tokenizer", "examine", model)

    def test_unknown_to_transformers(self, refuses, model):
        edit_config(model, model_type="nonsense", architectures=["Nonsense"])
        refuses("no architecture 'nonsense'", "examine", model)

    @pytest.mark.parametrize(
        ("content", "match"),
        [(b"", "shorter than two tokens"), (b"\xff\xfe\xfa", "not UTF-8")],
    )
    def test_texts(self, refuses, model, tmp_path, content, match):
        (tmp_path / "t.txt").write_bytes(content)
        refuses(match, "examine", model, "--text", "t.txt")

    @pytest.mark.parametrize(
        "options", [("--text", "nothing.txt"), ("--text", "t.txt"), ("--text", "."), ("--out", "/proc/x")]
    )
    def test_before_the_weights_are_read(self, refuses, model, tmp_path, monkeypatch, options):
        def loaded(*args, **kwargs):
            raise AssertionError("the model was loaded")

        monkeypatch.setattr(Checkpoint, "load", loaded)
        (tmp_path / "t.txt").write_bytes(b"a" * 500 + b"\xff")
        refuses(options[1], "examine", model, *options)

    def test_text_for_a_model_that_reads_none(self, refuses, tmp_path):
        (tmp_path / "t.txt").write_text("hello")
        refuses("reads no text", "examine", "builtin:tiny-vit", "--text", "t.txt")

    def test_a_base_that_is_not_needed(self, refuses, model):
        refuses("is no adapter", "examine", model, "--base", model)

    def test_absurd_depth(self, refuses, model):
        edit_config(model, num_hidden_layers=10**7)
        refuses("num_hidden_layers is 10,000,000", "examine", model)

    def test_a_number_that_makes_nan(self, refuses, model):
        edit_config(model, rms_norm_eps=-1.0)
        refuses("computes NaN or infinity", "examine", model, *FAST, "--only", "loss")

    @pytest.mark.parametrize(
        ("match", "args"),
        [
            ("No such command 'examin'", ("examin",)),
            ("Missing argument 'MODEL': see `assay examine --help`", ("examine",)),
            ("No such option: --foo", ("examine", "m", "--foo")),
            ("No such option: --foo", ("--foo",)),
            ("'--tokens': ", ("examine", "m", "--tokens", "many")),
            ("unexpected extra argument", ("methods", "m")),
            ("'--budget': ", ("try", "nerve", "--budget", "huge")),
            ("--text", ("examine", "m", "--text")),
        ],
    )
    def test_usage(self, refuses, match, args):
        refuses(match, *args)

    def test_missing_text(self, refuses, model):
        refuses("is no file", "examine", model, "--text", "nothing.txt")

    def test_context_beyond_the_models(self, refuses, model):
        refuses("the model takes 256 tokens at most", "examine", model, "--context", "512")

    def test_a_tokenizer_of_another_model(self, refuses, model):
        tokenizer = json.loads((model / "tokenizer.json").read_text())
        tokenizer["model"]["vocab"] = {k: v + 5000 for k, v in tokenizer["model"]["vocab"].items()}
        (model / "tokenizer.json").write_text(json.dumps(tokenizer))
        refuses("they do not match", "examine", model, "--only", "loss")

    def test_half_a_surrogate_pair(self, assay, model, tmp_path):
        (tmp_path / "t.jsonl").write_text('{"text": "\\ud800 hello world, again and again and again"}\n')
        assert assay("examine", model, *FAST, "--only", "loss", "--text", "t.jsonl")[0] == 0

    def test_impossible_options(self, refuses, model):
        refuses("--tokens is 0", "examine", model, "--tokens", "0")
        refuses("--context is 0", "examine", model, "--context", "0")
        refuses("holds no values", "examine", model, "--device", "meta")
        refuses("exclude each other", "examine", model, "--quick", "--full")
        refuses("choose from", "examine", model, "--only", "nothing")
        refuses("at least 2", "examine", model, "--tokens", "1")
        refuses("--device", "examine", model, "--device", "toaster")

    def test_places_that_are_taken(self, refuses, model, tmp_path):
        (tmp_path / "theirs").mkdir()
        (tmp_path / "theirs" / "thesis.tex").touch()
        refuses("was not written by assay", "examine", model, "--out", "theirs")
        (tmp_path / "file").touch()
        refuses("is a file", "examine", model, "--out", "file")

    def test_methods(self, refuses):
        refuses("does not exist", "methods", "--for", "nothing")
        refuses("no family is called 'lense'", "methods", "--family", "lense")

    def test_try(self, refuses, tmp_path):
        refuses("did you mean nerve", "try", "nervee")
        refuses("does not exist", "try", "nerve", "--on", "nothing")
        (tmp_path / "t.csv").write_text("a,b\n1,2\n")
        refuses("t.csv", "try", "deql", "--on", "t.csv")
        refuses("seeds", "try", "deql", "--seeds", "0")


class TestMethods:
    def test_the_list(self, assay):
        status, out, _ = assay("methods")
        assert status == 0
        assert "nerve" in out
        assert "lens: see inside" in out

    def test_json_and_family(self, assay):
        rows = json.loads(assay("methods", "--family", "models", "--json")[1])
        assert {r["slug"] for r in rows} == {"deql", "selective-rope"}

    def test_for(self, assay, model):
        out = assay("methods", "--for", model)[1]
        assert "rope-heads" in out
        assert "deql" not in out
        assert "applies: config.json of a llama model" in out
        assert json.loads(assay("methods", "--for", "builtin:ratings", "--json")[1])["methods"][0]["slug"] == "deql"

    def test_for_what_no_method_takes(self, assay, tmp_path):
        (tmp_path / "t.csv").write_text("a,b\n1,2\n")
        assert "No method applies" in assay("methods", "--for", "t.csv", "--family", "models")[1]


def test_without_arguments_the_help_is_shown(assay):
    status, out, err = assay()
    assert status == 2
    assert "examine" in out + err
    assert "Usage: assay" in out + err


def test_an_interrupt_is_said(assay, monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("assay.cli.methods.catalogue", interrupted)
    assert assay("methods") == (130, "", "assay: interrupted\n")


def test_version(assay):
    assert assay("--version")[1].strip() == f"assay {__version__}"


def test_the_light_commands_import_no_torch():
    code = (
        "import sys, assay; assert 'torch' not in sys.modules; sys.argv = ['assay', 'methods']\n"
        "from assay.cli import main\n"
        "main()\n"
    )
    out = subprocess.run(
        [
            sys.executable,
            "-c",
            f"{code.replace('main()', 'try: main()')}\nexcept SystemExit: pass\nassert 'torch' not in sys.modules",
        ],
        capture_output=True,
        text=True,
    )
    assert out.returncode == 0, out.stderr


def test_no_disk_space(assay, model, tmp_path, monkeypatch):
    from assay.core import output

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(output.os, "replace", full)
    status, _, err = assay("examine", model, *FAST, "--only", "health")
    assert status == 2
    assert "No space left on device" in err
    assert not [p for p in tmp_path.rglob("*") if p.suffix in (".json", ".html")]


def test_sharded_bfloat16(assay, model, tmp_path):
    Checkpoint(model).load(torch.bfloat16).save_pretrained(tmp_path / "sharded", max_shard_size="300KB")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model / name, tmp_path / "sharded" / name)
    status, out, err = assay("examine", "sharded", *FAST, "--only", "loss,nerve", "--json")
    assert status == 0, err
    assert json.loads(out)["model"]["stored_dtype"] == "bfloat16"
