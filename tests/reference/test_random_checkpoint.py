import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from assay.core.checkpoint import Checkpoint
from assay.reference import tiny_lm


@pytest.fixture(scope="module")
def script():
    path = Path(__file__).parents[2] / "scripts" / "make_random_checkpoint.py"
    spec = importlib.util.spec_from_file_location("make_random_checkpoint", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(script, monkeypatch, out, *options):
    monkeypatch.setattr(sys, "argv", ["make_random_checkpoint", "--out", str(out), "--preset", "tiny", *options])
    script.main()
    return out


def test_it_loads_whole_and_runs(script, monkeypatch, tmp_path):
    out = run(script, monkeypatch, tmp_path / "m", "--shard-mb", "1", "--layers", "24")
    assert len(list(out.glob("*.safetensors"))) > 1
    model, told = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(told[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert (type(model).__name__, model.dtype, len(model.model.layers)) == ("Qwen2ForCausalLM", torch.bfloat16, 24)
    text = "It is a truth universally acknowledged"
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer(text).input_ids == AutoTokenizer.from_pretrained(tiny_lm.load())(text).input_ids
    with torch.no_grad():
        assert model(**tokenizer(text, return_tensors="pt")).logits.isfinite().all()


def test_the_same_arguments_write_the_same_bytes_and_the_shard_size_only_cuts(script, monkeypatch, tmp_path):
    first = run(script, monkeypatch, tmp_path / "a")
    second = run(script, monkeypatch, tmp_path / "b")
    assert sorted(p.name for p in first.iterdir()) == sorted(p.name for p in second.iterdir())
    assert all(p.read_bytes() == (second / p.name).read_bytes() for p in first.iterdir())
    cut = dict(Checkpoint(run(script, monkeypatch, tmp_path / "c", "--shard-mb", "0")))
    whole = dict(Checkpoint(first))
    assert all(torch.equal(whole[name], cut[name]) for name in whole | cut)


def test_the_default_has_one_and_a_half_billion_parameters_as_qwen2_has_them(script):
    config = Qwen2Config(vocab_size=151_936, tie_word_embeddings=True, **script.PRESETS["1.5b"])
    with torch.device("meta"):
        model = Qwen2ForCausalLM(config)
    assert dict(script.shapes(config)) == {n: tuple(p.shape) for n, p in model.named_parameters()}
    assert sum(p.numel() for p in model.parameters()) == 1_543_714_304


def test_no_shard_is_larger_than_asked_unless_one_tensor_is(script):
    config = Qwen2Config(vocab_size=151_936, **script.PRESETS["1.5b"])
    for run_ in script.shards(config, 512 << 20):
        assert len(run_) == 1 or sum(2 * torch.Size(shape).numel() for _, shape in run_) <= 512 << 20


def test_an_existing_directory_is_refused(script, monkeypatch, tmp_path, capsys):
    with pytest.raises(SystemExit):
        run(script, monkeypatch, tmp_path)
    assert "exists: give a new directory" in capsys.readouterr().err
