"""Finished blocks on disk, and the directory of the model."""

import json
import subprocess
import sys

import pytest
import torch

from assay.compressor import Setting
from assay.compressor._folder import Partial, check_unquantised, exchangeable
from assay.core.errors import CheckpointError, InputError, OutputError


def outcomes(seed=0):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(8, 32, generator=generator)
    settings = (Setting("gptq", 3, 16, symmetric=False), Setting("obr", 4, 16), Setting("bof4", group_size=16))
    made = {f"layer.{s.method}": s.apply(weight, torch.eye(32)) for s in (*settings, Setting("logart", 3))}
    return made | {"layer.blind": Setting("gptq", 4, 16).apply(weight, None)}


def test_a_block_comes_back_as_it_was(tmp_path):
    partial = Partial(tmp_path / "out", {"run": "a"})
    assert not list(tmp_path.iterdir())  # nothing is written before there is something to keep
    made = outcomes()
    partial.save(0, made)
    again = Partial(tmp_path / "out", {"run": "a"})
    found = again.load(0)
    assert again.load(1) is None
    assert found.keys() == made.keys()
    for name, outcome in made.items():
        assert torch.equal(found[name].packed.dequantize(), outcome.dense), name
        assert found[name].note == outcome.note
        assert repr(found[name].error) == repr(outcome.error)
        assert found[name].packed.bits_per_weight == outcome.packed.bits_per_weight
    again.remove()
    assert not list(tmp_path.iterdir())


def test_half_a_block_does_not_count(tmp_path):
    partial = Partial(tmp_path / "out", {})
    partial.save(0, outcomes())
    (partial.path / "block-00001.tmp").write_bytes(b"half")
    assert Partial(tmp_path / "out", {}).load(1) is None


def test_other_settings_are_refused(tmp_path):
    Partial(tmp_path / "out", {"run": "a"}).save(0, outcomes())
    with pytest.raises(InputError, match="unfinished run with other settings: finish it with those, or delete it"):
        Partial(tmp_path / "out", {"run": "b"})


def test_a_damaged_state_is_refused(tmp_path):
    partial = Partial(tmp_path / "out", {})
    partial.save(0, outcomes())
    (partial.path / "state.json").write_text("{")
    with pytest.raises(OutputError, match="no unfinished run that can be read: delete it"):
        Partial(tmp_path / "out", {})


def test_a_damaged_block_is_refused(tmp_path):
    partial = Partial(tmp_path / "out", {})
    partial.save(0, outcomes())
    file = partial.path / "block-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(OutputError, match=r"block-00000\.safetensors is damaged: delete"):
        Partial(tmp_path / "out", {}).load(0)


def test_a_disk_that_fills_up(tmp_path, monkeypatch):
    from assay.compressor import _folder

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(_folder, "save_file", full)
    with pytest.raises(OutputError, match=r"cannot be written: .*No space left on device"):
        Partial(tmp_path / "out", {}).save(0, outcomes())


def test_which_format():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    four, three = Setting("gptq", 4, 8), Setting("gptq", 3, 8, symmetric=False)
    assert exchangeable(model, "01", {"0": four, "1": Setting("rtn", 8, None)})
    assert exchangeable(model, "01", {"0": three, "1": three})
    assert not exchangeable(model, "01", {"0": four, "1": three})
    assert not exchangeable(model, "01", {"0": four, "1": Setting("bof4")})
    model.stack = torch.nn.Module()
    model.stack.gate_up_proj = torch.nn.Parameter(torch.zeros(2, 8, 8))
    assert not exchangeable(model, "01", {"0": four, "1": four})


def test_quantised_models_are_known():
    check_unquantised({}, "m")
    check_unquantised({"quantization_config": None}, "m")
    for config, how in (({"quant_method": "gptq"}, "gptq"), ({}, None), ("awq", r"\?"), ({"bits": 4}, "an unknown")):
        if how is None:
            check_unquantised({"quantization_config": config}, "m")
            continue
        with pytest.raises(CheckpointError, match=f"m is quantised already, with {how}"):
            check_unquantised({"quantization_config": config}, "m")


def test_importing_assay_imports_no_transformers():
    code = "import sys, assay; assert not {'torch', 'transformers'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("order", ["import assay, transformers", "import transformers, assay"])
def test_transformers_knows_the_format_whichever_is_imported_first(order):
    code = f"{order}\nfrom transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING as m\nassert 'assay' in m"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_state_is_plain_json(tmp_path):
    partial = Partial(tmp_path / "out", {"settings": {"a": "gptq"}})
    partial.save(0, {})
    assert json.loads((partial.path / "state.json").read_text()) == {"settings": {"a": "gptq"}}
    assert partial.load(0) == {}
