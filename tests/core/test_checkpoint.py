"""Reading and writing models, the damaged and the hostile ones included."""

from __future__ import annotations

import importlib.util
import json
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from assay.core.checkpoint import Checkpoint, open_checkpoint, save
from assay.core.errors import AssayError, CheckpointError, OutputError

CONFIG = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
}


@pytest.fixture
def model():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**CONFIG))


@pytest.fixture
def folder(model, tmp_path):
    path = tmp_path / "model"
    model.save_pretrained(path)
    return path


def same(a, b) -> bool:
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def edit_json(path, change) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


class TestReading:
    def test_one_file(self, folder, model):
        checkpoint = open_checkpoint(folder)
        loaded = checkpoint.load()
        assert same(loaded, model)
        assert not loaded.training
        assert checkpoint.model_type == "llama"
        assert checkpoint.stored_dtype == torch.float32
        name = "model.layers.1.mlp.up_proj.weight"
        assert torch.equal(checkpoint.tensor(name), model.state_dict()[name])
        assert checkpoint.tensors[name].shape == (24, 16)
        assert sum(1 for _ in checkpoint) == len(checkpoint.tensors)

    def test_shards(self, model, tmp_path):
        model.save_pretrained(tmp_path / "m", max_shard_size="4KB")
        checkpoint = Checkpoint(tmp_path / "m")
        assert len({t.file for t in checkpoint.tensors.values()}) > 2
        assert same(checkpoint.load(), model)

    def test_tied_weights_stay_tied(self, tmp_path):
        tied = LlamaForCausalLM(LlamaConfig(**CONFIG, tie_word_embeddings=True))
        tied.save_pretrained(tmp_path / "m")
        loaded = Checkpoint(tmp_path / "m").load()
        assert loaded.lm_head.weight is loaded.model.embed_tokens.weight

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
    def test_dtypes(self, model, tmp_path, dtype):
        model.to(dtype).save_pretrained(tmp_path / "m")
        checkpoint = Checkpoint(tmp_path / "m")
        assert checkpoint.stored_dtype == dtype
        assert checkpoint.load().dtype == dtype
        assert checkpoint.load(torch.float32).dtype == torch.float32

    def test_an_encoder_and_experts(self, tmp_path):
        bert = BertModel(
            BertConfig(vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
        )
        bert.save_pretrained(tmp_path / "bert")
        assert type(Checkpoint(tmp_path / "bert").load()) is BertModel
        moe = MixtralForCausalLM(MixtralConfig(**CONFIG, num_local_experts=3))
        moe.save_pretrained(tmp_path / "moe")
        assert same(Checkpoint(tmp_path / "moe").load(), moe)

    def test_an_adapter_is_merged_into_its_base(self, folder, model, tmp_path):
        peft = pytest.importorskip("peft")
        torch.manual_seed(1)
        adapted = peft.get_peft_model(
            Checkpoint(folder).load(), peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
        )
        adapted.save_pretrained(tmp_path / "lora")
        with pytest.raises(CheckpointError, match="give that model's directory with --base"):
            Checkpoint(tmp_path / "lora")
        merged = Checkpoint(tmp_path / "lora", base=folder).load()
        assert type(merged) is LlamaForCausalLM
        ids = torch.arange(10)[None]
        torch.testing.assert_close(merged(ids).logits, adapted.eval()(ids).logits)
        assert not same(merged, model)

    def test_eight_bit_floats_are_undone(self, folder, model):
        pytest.importorskip("accelerate")
        plain, stored = model.state_dict(), {}
        for name, weight in plain.items():
            if "_proj" in name:
                scale = weight.abs().max() / torch.finfo(torch.float8_e4m3fn).max
                stored[name], stored[f"{name}_scale_inv"] = (weight / scale).to(torch.float8_e4m3fn), scale.view(1, 1)
            else:
                stored[name] = weight
        save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
        settings = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
        edit_json(folder / "config.json", lambda v: v.update(quantization_config=settings))
        checkpoint = Checkpoint(folder)
        assert checkpoint.stored_dtype == torch.float8_e4m3fn
        assert checkpoint.load().dtype == torch.bfloat16
        loaded = checkpoint.load(torch.float32)
        for name, weight in loaded.state_dict().items():
            assert weight.dtype == torch.float32
            # Three bits of mantissa: half a step is a sixteenth of the value.
            torch.testing.assert_close(weight, plain[name], rtol=1 / 16, atol=1e-4)

        # Without its scale a weight would be hundreds of times too large.
        del stored["model.layers.1.mlp.up_proj.weight_scale_inv"]
        save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(
            CheckpointError, match=r"'model\.layers\.1\.mlp\.up_proj\.weight' in eight bits and not its scale"
        ):
            Checkpoint(folder).load()

    def test_loading_takes_little_more_than_the_weights(self, tmp_path):
        import subprocess
        import sys

        big = LlamaForCausalLM(
            LlamaConfig(**CONFIG | {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 6})
        )
        size = sum(p.numel() * 4 for p in big.parameters())
        big.save_pretrained(tmp_path / "m", max_shard_size="50MB")
        code = (
            "import sys, psutil, torch, transformers, threading, time\n"
            "from transformers import LlamaForCausalLM\n"
            "from assay.core.checkpoint import Checkpoint\n"
            "p = psutil.Process(); before = p.memory_info().rss; top = [before]; on = [True]\n"
            "def watch():\n"
            "    while on[0]: top[0] = max(top[0], p.memory_info().rss); time.sleep(0.002)\n"
            "t = threading.Thread(target=watch); t.start()\n"
            "m = Checkpoint(sys.argv[1]).load()\n"
            "n = sum(float(q.sum()) for q in m.parameters())\n"
            "on[0] = False; t.join(); print(top[0] - before)\n"
        )
        out = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / "m")], capture_output=True, text=True, check=True
        ).stdout
        # The interpreter itself grows by some 30 MiB of modules and thread stacks on first use.
        assert int(out) <= 1.15 * size + (32 << 20)


class TestTokenizer:
    def test_without_one(self, folder):
        with pytest.raises(CheckpointError, match="no tokenizer"):
            Checkpoint(folder).tokenizer()

    def test_padding_falls_back_to_the_end_of_sequence(self):
        from assay.reference import builtin

        tokenizer = Checkpoint(builtin("tiny-lm").load()).tokenizer()
        assert tokenizer.pad_token_id is not None
        assert tokenizer.padding_side == "right"


class TestSaving:
    def test_round_trip(self, model, tmp_path):
        save(model, tmp_path / "new")
        assert same(Checkpoint(tmp_path / "new").load(), model)
        save(model, tmp_path / "new")
        assert {p.name for p in tmp_path.iterdir()} == {"new"}

    def test_a_directory_of_somebody_else_is_refused(self, model, folder):
        before = sorted(folder.iterdir())
        with pytest.raises(OutputError, match="was not written by assay"):
            save(model, folder)
        assert sorted(folder.iterdir()) == before

    def test_a_failure_leaves_the_old_one(self, model, tmp_path, monkeypatch):
        save(model, tmp_path / "new")

        def fail(*args, **kwargs):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(model, "save_pretrained", fail)
        with pytest.raises(OutputError, match="No space left"):
            save(model, tmp_path / "new")
        assert {p.name for p in tmp_path.iterdir()} == {"new"}
        monkeypatch.undo()
        assert same(Checkpoint(tmp_path / "new").load(), model)


class TestBadInput:
    def fails(self, path, match, **kwargs):
        with pytest.raises(AssayError, match=match) as caught:
            Checkpoint(path, **kwargs).load()
        assert "\n" not in str(caught.value)

    def test_missing(self, tmp_path):
        self.fails(tmp_path / "nothing", "does not exist")

    def test_no_config(self, tmp_path):
        self.fails(tmp_path, "has no config.json")

    def test_a_folder_of_ggufs_says_which_file(self, tmp_path):
        (tmp_path / "a.gguf").touch()
        self.fails(tmp_path, "it holds a.gguf: give that file")

    def test_some_other_file(self, folder):
        self.fails(folder / "model.safetensors", "give the directory")

    def test_config_is_no_json(self, folder):
        (folder / "config.json").write_text("{")
        self.fails(folder, "is not JSON")

    def test_config_is_no_object(self, folder):
        (folder / "config.json").write_text("[1]")
        self.fails(folder, "no JSON object")

    def test_no_weights(self, folder):
        (folder / "model.safetensors").unlink()
        self.fails(folder, "no model.safetensors")

    def test_truncated(self, folder):
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-100])
        self.fails(folder, "truncated")

    @pytest.mark.parametrize(
        "content", [b"", b"\x01", struct.pack("<Q", 1 << 60) + b"{}", struct.pack("<Q", 4) + b"nope"]
    )
    def test_damaged_header(self, folder, content):
        (folder / "model.safetensors").write_bytes(content)
        self.fails(folder, "truncated|damaged")

    @pytest.mark.parametrize(
        "entry",
        [
            {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 8]},
            {"dtype": "F32", "shape": [-2, -2], "data_offsets": [0, 16]},
            {"dtype": "F99", "shape": [2, 2], "data_offsets": [0, 16]},
            {"dtype": "F32", "shape": "x", "data_offsets": [0, 16]},
            {"dtype": "F32"},
            7,
        ],
    )
    def test_mis_shaped_and_mis_typed_tensors(self, folder, entry):
        header = json.dumps({"w": entry}).encode()
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(16))
        self.fails(folder, "damaged|not known")

    def test_a_shard_is_missing(self, model, tmp_path):
        model.save_pretrained(tmp_path / "m", max_shard_size="4KB")
        next(iter((tmp_path / "m").glob("*-of-*.safetensors"))).unlink()
        self.fails(tmp_path / "m", "is missing")

    def test_the_index_names_a_file_elsewhere(self, model, tmp_path):
        model.save_pretrained(tmp_path / "m", max_shard_size="4KB")
        edit_json(
            tmp_path / "m" / "model.safetensors.index.json",
            lambda v: v["weight_map"].update({"lm_head.weight": "../../etc/passwd"}),
        )
        self.fails(tmp_path / "m", "no file of that directory")

    def test_the_index_promises_what_the_shard_lacks(self, model, tmp_path):
        model.save_pretrained(tmp_path / "m", max_shard_size="4KB")
        index = tmp_path / "m" / "model.safetensors.index.json"
        edit_json(index, lambda v: v["weight_map"].update({"extra": next(iter(v["weight_map"].values()))}))
        self.fails(tmp_path / "m", "lacks 'extra'")

    def test_config_and_tensors_disagree_in_shape(self, folder):
        edit_json(folder / "config.json", lambda v: v.update(hidden_size=32))
        self.fails(folder, r"disagree: \S+ should have the shape \[40, 32\], and the file holds \[40, 16\]")

    def test_config_and_tensors_disagree_in_depth(self, folder):
        edit_json(folder / "config.json", lambda v: v.update(num_hidden_layers=3))
        self.fails(folder, "disagree: .* tensors are missing")

    @pytest.mark.parametrize("layers", [1, 0, -1])
    def test_config_counts_fewer_blocks_than_there_are(self, folder, layers):
        edit_json(folder / "config.json", lambda v: v.update(num_hidden_layers=layers))
        self.fails(folder, rf"fewer blocks than the files hold, which have 'model\.layers\.{max(layers, 0)}\.")

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("num_hidden_layers", 10**7),
            ("num_hidden_layers", 1e7),
            ("vocab_size", 10**10),
            ("hidden_size", 10**9),
            ("intermediate_size", 10**12),
            ("num_labels", 10**10),
            ("head_dim", 10**15),
        ],
    )
    def test_absurd_sizes_are_refused_before_anything_of_that_size_is_made(self, folder, monkeypatch, key, value):
        def built(self, *args, **kwargs):
            raise AssertionError("a module was built")

        monkeypatch.setattr(LlamaForCausalLM, "__init__", built)
        edit_json(folder / "config.json", lambda v: v.update({key: value}))
        self.fails(folder, rf"disagree: {key} is [\d,.]+, and the files hold 21 tensors")

    def test_absurd_sizes_further_in(self, folder):
        edit_json(folder / "config.json", lambda v: v.update(text_config={"vision": {"depth": 10**7}}))
        self.fails(folder, r"text_config\.vision\.depth is 10,000,000")

    def test_a_config_of_a_far_larger_model_takes_no_memory(self, folder):
        # Without names in common, shapes cannot be compared, only sizes.
        tensors = {f"other.{k}": v for k, v in load_file(folder / "model.safetensors").items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        edit_json(folder / "config.json", lambda v: v.update(vocab_size=10**7))
        self.fails(folder, "it describes a model of 320,00[0-9],[0-9]+ values")

    def test_a_number_that_is_none(self, folder):
        edit_json(folder / "config.json", lambda v: v.update(rms_norm_eps=float("nan")))
        self.fails(folder, "rms_norm_eps is NaN: put the model's own value there")

    @pytest.mark.parametrize(
        ("values", "match"),
        [
            ({"num_hidden_layers": "x"}, "field 'num_hidden_layers': .*expected int, got str"),
            ({"num_attention_heads": 3}, "hidden size .16. is not a multiple of the number of attention heads"),
            ({"hidden_act": "foo"}, "hidden_act is 'foo', which transformers does not know"),
            ({"rope_parameters": {"rope_type": "nope", "rope_theta": 1.0}}, "rope_parameters.rope_type is 'nope'"),
        ],
    )
    def test_the_reason_is_told(self, folder, values, match):
        edit_json(folder / "config.json", lambda v: v.update(values))
        self.fails(folder, match)

    def test_a_base_for_what_is_no_adapter(self, folder):
        self.fails(folder, "is no adapter, .*leave out --base", base=folder)

    def test_a_tensor_is_missing(self, folder):
        tensors = load_file(folder / "model.safetensors")
        tensors.pop("model.norm.weight")
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        self.fails(folder, "model.norm.weight")

    def test_unknown_architecture_and_its_code(self, folder):
        (folder / "evil.py").write_text("raise SystemExit('ran')")
        edit_json(
            folder / "config.json",
            lambda v: v.update(
                model_type="evil",
                architectures=["EvilModel"],
                auto_map={"AutoModel": "evil.EvilModel", "AutoConfig": "evil.C"},
            ),
        )
        self.fails(folder, "no architecture 'evil'.*never run")

    def test_no_model_type(self, folder):
        edit_json(folder / "config.json", lambda v: (v.pop("model_type"), v.pop("architectures")))
        self.fails(folder, "names no model_type")

    def test_a_pickle_is_refused_and_read_when_asked(self, folder, model):
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
        self.fails(folder, "--allow-pickle")
        self.fails(folder / "pytorch_model.bin", "is a pickle")
        assert same(Checkpoint(folder, allow_pickle=True).load(), model)

    def test_a_pickle_that_runs_code_is_refused_even_when_asked(self, folder, tmp_path):
        class Evil:
            def __reduce__(self):
                return (open, (str(tmp_path / "ran"), "w"))

        torch.save({"w": Evil()}, folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
        self.fails(folder, "cannot be loaded", allow_pickle=True)
        assert not (tmp_path / "ran").exists()

    def test_a_quantised_checkpoint_is_named(self, folder):
        edit_json(
            folder / "config.json",
            lambda v: v.update(quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 64}),
        )
        self.fails(folder, "quantised with gptq, .*(pip install|optimum)")

    @pytest.mark.skipif(importlib.util.find_spec("compressed_tensors") is not None, reason="the package is installed")
    def test_a_quantisation_whose_package_is_not_there_names_it(self, folder):
        edit_json(
            folder / "config.json", lambda v: v.update(quantization_config={"quant_method": "compressed-tensors"})
        )
        self.fails(folder, "quantised with compressed-tensors, .*pip install compressed-tensors")

    @pytest.mark.parametrize("settings", [{"quant_method": "foo"}, {"bits": 4}, {"quant_method": ["gptq"]}])
    def test_an_unknown_quantisation_is_not_taken_for_none(self, folder, settings, capfd):
        edit_json(folder / "config.json", lambda v: v.update(quantization_config=settings))
        self.fails(folder, "which transformers does not know: give the unquantised model")
        assert capfd.readouterr().err == ""

    def test_no_gguf(self, tmp_path):
        (tmp_path / "a.gguf").write_bytes(b"GGUFnonsense")
        self.fails(tmp_path / "a.gguf", "cannot be read as GGUF")
        (tmp_path / "b.gguf").write_bytes(b"nonsense")
        self.fails(tmp_path / "b.gguf", "does not start with its mark")

    def test_files_that_are_no_files(self, folder):
        (folder / "config.json").unlink()
        (folder / "config.json").symlink_to("/dev/zero")
        self.fails(folder, "no regular file")

    def test_a_weight_file_that_is_a_pipe(self, folder):
        import os

        (folder / "model.safetensors").unlink()
        os.mkfifo(folder / "model.safetensors")
        self.fails(folder, "no regular file")

    def test_an_endless_shard_name(self, model, tmp_path):
        model.save_pretrained(tmp_path / "m", max_shard_size="4KB")
        edit_json(
            tmp_path / "m" / "model.safetensors.index.json",
            lambda v: v["weight_map"].update({"lm_head.weight": "a" * 5000}),
        )
        self.fails(tmp_path / "m", "no file of that directory")

    def test_unknown_tensor(self, folder):
        with pytest.raises(CheckpointError, match="no tensor 'nothing'"):
            Checkpoint(folder).tensor("nothing")
