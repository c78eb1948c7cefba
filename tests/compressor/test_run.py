"""A run: what it writes loads elsewhere and is what was measured; what it refuses leaves nothing; a kill costs a block."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from assay.compressor import Setting, compress_checkpoint
from assay.compressor import _run as run_module
from assay.compressor._run import open_job, read_again
from assay.core.anatomy import anatomy
from assay.core.checkpoint import quiet
from assay.core.errors import AssayError, CheckpointError, InputError, MissingDependency, NotApplicable, OutputError
from assay.core.loss import language_loss

SMALL = {"samples": 8, "context": 32}
SETTINGS = {
    "gptq": Setting("gptq", 4, 16),
    "asymmetric": Setting("gptq", 3, 16, symmetric=False),
    "rows": Setting("rtn", 8, None),
    "obr": Setting("obr", 4, 16),
    "pattern": Setting("obr", 4, 16, pattern="2:4"),
    "bof4": Setting("bof4", group_size=16),
    "logart": Setting("logart", 3),
}
EXCHANGED = {"gptq", "asymmetric", "rows"}
IDS = torch.arange(40)[None] + 60

# What a stranger does with what was written, in a process of its own.
ELSEWHERE = """
import sys
{first}
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ids = torch.arange(40)[None] + 60
for out in sys.argv[1:]:
    model, told = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not told["missing_keys"] and not told["mismatched_keys"], told
    with torch.no_grad():
        logits = model(ids).logits
        tokens = model.generate(ids, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    assert AutoTokenizer.from_pretrained(out)("hello").input_ids
    model.save_pretrained(out + "-again")
    again = AutoModelForCausalLM.from_pretrained(out + "-again")
    torch.save([logits, tokens, again(ids).logits.detach()], out + ".pt")
{last}
"""


def weight_file(folder):
    tensors = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


def summary(folder):
    """compression.json without what differs from run to run."""
    document = json.loads((folder / "compression.json").read_text())
    return {k: v for k, v in document.items() if k not in ("seconds", "peak_memory", "out")}


@pytest.fixture(scope="module")
def outs(checkpoint, tmp_path_factory):
    """A small Llama by every method."""
    home = tmp_path_factory.mktemp("outs")
    made = {}
    for name, setting in SETTINGS.items():
        made[name] = compress_checkpoint(checkpoint("llama"), home / name, setting, **SMALL)
    return home, made


@pytest.fixture(scope="module")
def elsewhere(outs):
    """What fresh processes make of them: one that never heard of assay, and one that imports it."""
    home, made = outs
    for theirs in (True, False):
        first, last = ("", "assert 'assay' not in sys.modules") if theirs else ("import assay", "")
        code = ELSEWHERE.format(first=first, last=last)
        places = [str(home / n) for n in made if (n in EXCHANGED) == theirs]
        done = subprocess.run([sys.executable, "-c", code, *places], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
    return {name: torch.load(home / f"{name}.pt") for name in made}


@pytest.mark.parametrize("name", SETTINGS)
class TestEveryMethod:
    def test_it_loads_in_a_fresh_process_and_gives_what_was_measured(self, outs, elsewhere, checkpoint, name):
        home, made = outs
        again = read_again(home / name)
        with torch.no_grad():
            assert torch.equal(again(IDS).logits, elsewhere[name][0])
        job = opened(checkpoint("llama"))
        loss = language_loss(again, list(job.held.split(1)), anatomy_=anatomy(again))
        assert loss.loss.mean == made[name].after.loss.loss.mean
        assert made[name].drift.loss == pytest.approx(loss.loss.mean, rel=1e-6)

    def test_it_generates_and_can_be_saved_again(self, elsewhere, name):
        logits, tokens, again = elsewhere[name]
        assert tokens.shape == (1, 43)
        assert torch.equal(again, logits)

    def test_the_files(self, outs, name):
        home, made = outs
        folder = home / name
        names = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
        assert names | {"README.md", "compression.json", "model.safetensors"} <= {p.name for p in folder.iterdir()}
        config = json.loads((folder / "config.json").read_text())
        method = "compressed-tensors" if name in EXCHANGED else "assay"
        assert config["quantization_config"]["quant_method"] == made[name].format == method
        readme = (folder / "README.md").read_text()
        assert ("import assay" in readme) == (name not in EXCHANGED)
        assert SETTINGS[name].name in readme
        assert not list(home.glob(".*"))
        modes = {p.stat().st_mode for p in folder.iterdir() if p.name != ".assay"}
        assert len(modes) == 1

    def test_the_sizes_add_up(self, outs, name):
        home, _ = outs
        document = json.loads((home / name / "compression.json").read_text())
        bits = sum(x["bits_per_weight"] * math.prod(x["shape"]) for x in document["layers"])
        weights = sum(math.prod(x["shape"]) for x in document["layers"])
        assert document["after"]["bits_per_weight"] == pytest.approx(bits / weights)
        packed = {x["name"] for x in document["layers"]}
        rest = sum(t.nbytes for n, t in weight_file(home / name).items() if n.rpartition(".")[0] not in packed)
        size = document["after"]["bytes"]
        assert size == sum(f.stat().st_size for f in (home / name).glob("*.safetensors"))
        # Scales as wide as the model's type in files that others read, headers, and small tensors that say shapes.
        wider = 0
        if name in EXCHANGED:
            wider = sum(t.nbytes // 2 for n, t in weight_file(home / name).items() if n.endswith("weight_scale"))
        header = 250 * len(weight_file(home / name))
        assert 0 < size - (bits / 8 + rest + wider) < header
        predicted = sum(SETTINGS[name].bits_per_weight(*x["shape"]) * math.prod(x["shape"]) for x in document["layers"])
        assert bits / weights == pytest.approx(predicted / weights, abs=0.1 if name == "bof4" else 1e-9)

    def test_the_document_has_every_figure(self, outs, name):
        home, made = outs
        text = (home / name / "compression.json").read_text()
        document = json.loads(text, parse_constant=pytest.fail)
        assert document["schema"] == "assay.compression"
        assert document["setting"] == SETTINGS[name].name
        assert document["left"] == {"lm_head": "skipped by name"}
        assert len(document["layers"]) == 14
        assert document["drift"]["kl"]["mean"] > 0
        assert document["before"]["loss"]["n_tokens"] == document["held_tokens"] == made[name].drift.n_tokens
        assert document["seconds"] > 0
        assert document["peak_memory"] > 0


def opened(source, **options):
    from assay.core.progress import silent

    given = {"text": None, "held": None, "skip": ("lm_head",), "base": None, "allow_pickle": False} | SMALL | options
    return open_job(source, progress=silent, **given)


def test_two_runs_give_the_same(outs, checkpoint, tmp_path):
    home, _ = outs
    compress_checkpoint(checkpoint("llama"), tmp_path / "gptq", SETTINGS["gptq"], **SMALL)
    assert summary(tmp_path / "gptq") == summary(home / "gptq")
    a, b = weight_file(tmp_path / "gptq"), weight_file(home / "gptq")
    assert a.keys() == b.keys()
    assert all(torch.equal(a[n], b[n]) for n in a)


@pytest.mark.parametrize(
    ("kind", "method", "form", "n_layers"),
    [
        ("gpt2", "gptq", "assay", 8),
        ("gpt2", "obr", "assay", 8),
        ("phi3", "gptq", "compressed-tensors", 8),
        ("phi3", "bof4", "assay", 8),
        ("tied", "gptq", "compressed-tensors", 14),
        ("tied", "logart", "assay", 14),
        ("mixtral", "gptq", "assay", 8),
        ("mixtral", "obr", "assay", 8),
    ],
)
def test_architectures(checkpoint, tmp_path, kind, method, form, n_layers):
    source = checkpoint(kind)
    result = compress_checkpoint(source, tmp_path / "out", SETTINGS[method], **SMALL)
    assert (result.format, len(result.layers)) == (form, n_layers)
    with quiet():
        model, told = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
        original = AutoModelForCausalLM.from_pretrained(source)
        assert not any(told[k] for k in ("missing_keys", "mismatched_keys", "unexpected_keys"))
        with torch.no_grad():
            assert torch.equal(model(IDS).logits, read_again(tmp_path / "out")(IDS).logits)
            moved = model(IDS).logits.log_softmax(-1) - original(IDS).logits.log_softmax(-1)
        assert 0 < float(moved.abs().mean()) < 0.1
    # All that was not packed is as it was.
    packed = tuple(f"{layer.name}." for layer in result.layers)
    after, before = dict(model.named_parameters()), dict(original.named_parameters())
    kept = [n for n in before if not n.startswith(packed)] + [n for n in before if n.endswith("bias")]
    assert kept
    assert all(torch.equal(after[n], before[n]) for n in kept)
    if kind == "mixtral":
        experts = {n: why for n, why in result.left.items() if "mlp" in n}
        assert set(experts.values()) == {"stacked experts are not packed", "MixtralTopKRouter is not packed"}
        assert len(experts) == 4
    else:
        assert result.left == {"lm_head": "skipped by name"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("method", ["gptq", "obr"])
def test_half_precision(checkpoint, tmp_path, dtype, method):
    source = checkpoint("llama", dtype)
    result = compress_checkpoint(source, tmp_path / "out", SETTINGS[method], **SMALL)
    assert result.before.bits_per_weight == 16
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        assert model.dtype == dtype
        with torch.no_grad():
            assert torch.equal(model(IDS).logits, read_again(tmp_path / "out")(IDS).logits)
    stored = weight_file(tmp_path / "out")
    assert stored["model.norm.weight"].dtype == dtype
    if method == "gptq":
        assert stored["model.layers.0.mlp.up_proj.weight_scale"].dtype == dtype


def test_shards_in_and_out(checkpoint, tmp_path, monkeypatch):
    from assay.compressor import _folder

    source = checkpoint("llama", max_shard_size="100KB")
    assert len(list(source.glob("*.safetensors"))) > 1
    monkeypatch.setattr(_folder, "_SHARD", "140KB")
    result = compress_checkpoint(source, tmp_path / "out", SETTINGS["obr"], **SMALL)
    assert (tmp_path / "out" / "model.safetensors.index.json").exists()
    assert result.after.bytes == sum(f.stat().st_size for f in (tmp_path / "out").glob("*.safetensors"))
    model = read_again(tmp_path / "out")
    assert type(model.model.layers[0].mlp.up_proj).__name__ == "PackedLinear"


def test_the_tokenizer_is_the_originals(checkpoint, outs):
    home, _ = outs
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (home / "gptq" / name).read_bytes() == (checkpoint("llama") / name).read_bytes()
    assert AutoTokenizer.from_pretrained(home / "gptq")("hello").input_ids


def test_layers_can_be_left(checkpoint, tmp_path):
    skip = ("lm_head", "down_proj", "model.layers.0.self_attn")
    result = compress_checkpoint(checkpoint("llama"), tmp_path / "out", SETTINGS["gptq"], skip=skip, **SMALL)
    names = {layer.name for layer in result.layers}
    assert len(names) == 14 - 2 - 4
    assert not any("down_proj" in n or "layers.0.self_attn" in n for n in names)
    assert set(result.left) == {"lm_head", *(f"model.layers.{i}.mlp.down_proj" for i in (0, 1))} | {
        f"model.layers.0.self_attn.{p}_proj" for p in "qkvo"
    }
    with torch.no_grad(), quiet():
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")(IDS).logits
        assert torch.equal(loaded, read_again(tmp_path / "out")(IDS).logits)


def test_settings_layer_by_layer(checkpoint, tmp_path):
    """Several settings in one file that others read: each layer is decoded by its own."""
    job = opened(checkpoint("llama"))
    choice = [Setting("gptq", 3, 16), Setting("gptq", 8, None), Setting("rtn", 4, 8)]
    settings = {n: choice[i % 3] for i, n in enumerate(job.layers)}
    result = compress_checkpoint(checkpoint("llama"), tmp_path / "out", settings, **SMALL)
    assert result.format == "compressed-tensors"
    assert {layer.setting for layer in result.layers} == {s.name for s in choice}
    uniform = compress_checkpoint(checkpoint("llama"), tmp_path / "three", choice[0], **SMALL)
    assert result.drift.kl.mean < uniform.drift.kl.mean
    mixed = settings | {n: Setting("gptq", 4, 16, symmetric=False) for n in list(job.layers)[:2]}
    assert compress_checkpoint(checkpoint("llama"), tmp_path / "own", mixed, **SMALL).format == "assay"


def test_layers_that_see_too_few_tokens_are_named(checkpoint, tmp_path):
    result = compress_checkpoint(checkpoint("llama"), tmp_path / "out", SETTINGS["gptq"], samples=1, context=4)
    assert all("too few tokens" in layer.note for layer in result.layers)
    document = json.loads((tmp_path / "out" / "compression.json").read_text(), parse_constant=pytest.fail)
    assert {layer["error"] for layer in document["layers"]} == {None}
    assert "## Layers with a note" in (tmp_path / "out" / "README.md").read_text()


def test_the_window_is_at_most_what_the_model_takes(checkpoint):
    job = opened(checkpoint("llama"), context=None)
    assert job.calibration.shape == (8, 64)


def test_held_text_of_its_own(checkpoint, tmp_path):
    (tmp_path / "held.txt").write_text("It is a truth universally acknowledged. " * 40)
    result = compress_checkpoint(
        checkpoint("llama"), tmp_path / "out", SETTINGS["rows"], held=tmp_path / "held.txt", **SMALL
    )
    assert result.calibration_tokens == 8 * 32
    assert result.held_tokens % 31 == 0


# Runs in a process that is killed once it has finished a block.
KILLED = """
import sys, time
from assay.compressor import Setting, compress_checkpoint

def progress(done, total, what):
    if what == "blocks" and done == 1:
        time.sleep(600)

compress_checkpoint(sys.argv[1], sys.argv[2], Setting(sys.argv[3], 4, 16), samples=8, context=32, progress=progress)
"""


@pytest.mark.parametrize("method", ["gptq", "obr"])
def test_a_killed_run_goes_on(outs, checkpoint, tmp_path, monkeypatch, method):
    home, _ = outs
    source, out = checkpoint("llama"), tmp_path / method
    child = subprocess.Popen([sys.executable, "-c", KILLED, source, out, method], start_new_session=True)
    kept = tmp_path / f".{method}.partial"
    try:
        deadline = time.monotonic() + 240
        while not (kept / "block-00000.safetensors").exists():
            assert child.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
    assert not out.exists()
    assert not (kept / "block-00001.safetensors").exists()
    # Other settings are refused, and what was finished stays.
    for other, options in ((Setting(method, 4, 8), SMALL), (SETTINGS[method], SMALL | {"samples": 9})):
        with pytest.raises(InputError, match="unfinished run with other settings") as refused:
            compress_checkpoint(source, out, other, **options)
        assert "\n" not in str(refused.value)
    assert (kept / "block-00000.safetensors").exists()
    done = []
    plain = Setting.apply

    def watched(self, weight, hessian, *more):
        done.append(weight.shape)
        return plain(self, weight, hessian, *more)

    monkeypatch.setattr(Setting, "apply", watched)
    compress_checkpoint(source, out, SETTINGS[method], **SMALL)
    assert len(done) == 7  # the layers of the second block
    assert summary(out) == summary(home / method)
    a, b = weight_file(out), weight_file(home / method)
    assert all(torch.equal(a[n], b[n]) for n in b)
    assert not kept.exists()


class TestRefusals:
    @pytest.fixture(autouse=True)
    def place(self, tmp_path):
        """Nothing is left behind, whatever is refused."""
        self.home = tmp_path / "home"
        self.home.mkdir()
        self.out = self.home / "out"
        yield
        assert not list(self.home.iterdir())

    @pytest.fixture
    def idle(self, monkeypatch):
        """Fails where calibration or measuring starts."""

        def started(*args, **kwargs):
            pytest.fail("work was started")

        monkeypatch.setattr(run_module, "Sequential", started)
        monkeypatch.setattr(run_module, "measure_loss", started)

    def refuse(self, error, match, source, setting=SETTINGS["gptq"], **options):
        with pytest.raises(error, match=match) as refused:
            compress_checkpoint(source, self.out, setting, **(SMALL | options))
        assert isinstance(refused.value, AssayError)
        assert "\n" not in str(refused.value)

    def test_a_full_disk(self, checkpoint, monkeypatch, idle):
        usage = namedtuple("usage", "total used free")
        monkeypatch.setattr(shutil, "disk_usage", lambda place: usage(1, 1, 100_000))
        self.refuse(
            OutputError, r"out needs 0\.[45] MB while it is written, and .* has 0\.1 MB free", checkpoint("llama")
        )

    def test_a_group_size_that_does_not_divide(self, checkpoint, idle):
        self.refuse(
            InputError,
            r"--group-size 32 does not divide the width 48 of model\.layers\.0\.mlp\.down_proj: 8, 16 would do",
            checkpoint("llama"),
            Setting("gptq", 4, 32),
        )

    def test_a_pattern_that_does_not_divide(self, checkpoint, idle):
        self.refuse(
            InputError,
            r"--pattern 4:8: the width 100 of model\.layers\.0\.self_attn\.q_proj is not divisible by 8",
            checkpoint("odd"),
            Setting("obr", 4, 64, pattern="4:8"),
        )

    def test_without_the_package(self, checkpoint, monkeypatch, idle):
        plain = run_module.importlib.util.find_spec
        monkeypatch.setattr(
            run_module.importlib.util, "find_spec", lambda n, *a: None if n == "compressed_tensors" else plain(n, *a)
        )
        self.refuse(MissingDependency, r"compressed-tensors: pip install assay\[compress\]", checkpoint("llama"))

    def test_too_short_a_text(self, checkpoint, tmp_path, idle):
        (tmp_path / "t.txt").write_text("hello world, again and again. " * 10)
        self.refuse(
            InputError,
            r"t\.txt has \d+ tokens in whole windows, and 8 of 32 to calibrate on, with one more to measure on, are 288",
            checkpoint("llama"),
            text=tmp_path / "t.txt",
        )
        (tmp_path / "t.txt").write_text("")
        self.refuse(InputError, "the text is empty", checkpoint("llama"), text=tmp_path / "t.txt")
        self.refuse(InputError, "is no file", checkpoint("llama"), text=tmp_path / "none.txt")
        self.refuse(InputError, "--samples is 0", checkpoint("llama"), samples=0)
        self.refuse(InputError, "--context is 1", checkpoint("llama"), context=1)
        self.refuse(InputError, "--context is 65, and the model takes 64", checkpoint("llama"), context=65)

    def test_activations_that_are_not_finite(self, checkpoint, tmp_path):
        broken = shutil.copytree(checkpoint("llama"), tmp_path / "broken")
        tensors = load_file(broken / "model.safetensors")
        tensors["model.layers.1.input_layernorm.weight"][3] = 3e38
        save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
        self.refuse(
            InputError, r"layer model\.layers\.1\.self_attn\.q_proj is given activations that are not finite", broken
        )

    def test_weights_that_are_not_finite(self, checkpoint, tmp_path):
        broken = shutil.copytree(checkpoint("llama"), tmp_path / "broken")
        tensors = load_file(broken / "model.safetensors")
        tensors["model.layers.0.mlp.down_proj.weight"][3, 4] = float("inf")
        save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
        self.refuse(InputError, r"model\.layers\.0\.mlp\.down_proj\.weight of .* are not finite", broken)

    @pytest.mark.parametrize("name", ["gptq", "bof4"])
    def test_a_model_that_is_quantised_already(self, outs, name, idle):
        home, _ = outs
        how = "compressed-tensors" if name == "gptq" else "assay"
        self.refuse(CheckpointError, f"is quantised already, with {how}: give the original", home / name)

    def test_an_encoder(self, checkpoint, idle):
        self.refuse(NotApplicable, "encoder", checkpoint("bert"))

    def test_nothing_to_pack(self, checkpoint, idle):
        self.refuse(NotApplicable, "has no linear layer to pack", checkpoint("llama"), skip=("model", "lm_head"))

    def test_no_model(self, tmp_path, idle):
        self.refuse(CheckpointError, "does not exist", tmp_path / "nothing")
        self.refuse(InputError, "is no model", "builtin:ratings")

    def test_a_tokenizer_of_another_model(self, checkpoint, tmp_path, idle):
        other = shutil.copytree(checkpoint("llama"), tmp_path / "other")
        tokenizer = json.loads((other / "tokenizer.json").read_text())
        tokenizer["model"]["vocab"] = {k: v + 5000 for k, v in tokenizer["model"]["vocab"].items()}
        (other / "tokenizer.json").write_text(json.dumps(tokenizer))
        self.refuse(InputError, "they do not match", other)


def test_a_place_that_is_taken(checkpoint, tmp_path):
    for taken in ("file", "folder"):
        (tmp_path / "file").touch()
        (tmp_path / "folder").mkdir(exist_ok=True)
        with pytest.raises(OutputError, match="exists: choose another place"):
            compress_checkpoint(checkpoint("llama"), tmp_path / taken, SETTINGS["gptq"], **SMALL)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder"]
    # What stands where finished blocks would be kept is neither used nor deleted.
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial" / "thesis.tex").touch()
    with pytest.raises(OutputError, match="is no unfinished run"):
        compress_checkpoint(checkpoint("llama"), tmp_path / "out", SETTINGS["gptq"], **SMALL)
    assert (tmp_path / ".out.partial" / "thesis.tex").exists()
