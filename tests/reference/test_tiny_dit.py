import hashlib
import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageClassification

from assay.core.errors import CheckpointError, InputError
from assay.core.subject import recognise
from assay.reference import builtin, tiny_dit, tiny_vit


@pytest.fixture(scope="module")
def model():
    return tiny_dit.open_model()


def test_the_shipped_weights_are_those_of_the_record():
    file = tiny_dit.load() / "model.safetensors"
    assert hashlib.sha256(file.read_bytes()).hexdigest() == tiny_dit.WEIGHTS_SHA256
    assert file.stat().st_size < 2_000_000


def test_it_is_a_built_in_checkpoint():
    assert builtin("builtin:tiny-dit") is tiny_dit
    subject = recognise(tiny_dit.load())
    assert (subject.kind, subject.model_type) == (tiny_dit.KIND, tiny_dit.MODEL_TYPE)
    assert subject.facts == {"image", "attention", "diffusion"}


def test_the_parameters_are_as_many_as_it_says(model):
    assert sum(p.numel() for p in model.parameters()) == 320_385
    assert "320,385" in tiny_dit.ABOUT
    assert not model.training
    assert not any(p.requires_grad for p in model.parameters())


@torch.no_grad()
def test_the_classifier_sees_the_digit_that_was_asked_for(model):
    noise, label = tiny_dit.draw_noise(64, torch.Generator().manual_seed(0))
    classifier = AutoModelForImageClassification.from_pretrained(tiny_vit.load()).eval()
    drawn = tiny_dit.euler(model, noise, label, 10)
    assert (classifier(drawn).logits.argmax(-1) == label).float().mean() > 0.85
    assert drawn.min() > -1.5
    assert drawn.max() < 1.5


@torch.no_grad()
def test_more_steps_come_nearer_to_the_flow(model):
    noise, label = tiny_dit.draw_noise(8, torch.Generator().manual_seed(1))
    fine = tiny_dit.euler(model, noise, label, 40)
    errors = [(tiny_dit.euler(model, noise, label, n) - fine).square().mean().item() for n in (2, 5, 10, 20)]
    assert errors == sorted(errors, reverse=True)


@torch.no_grad()
def test_attention_with_its_map_is_attention(model):
    x = torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(2))
    attention = model.blocks[1].attention
    out, received = attention.attend(x)
    assert torch.allclose(out, attention(x), atol=1e-5)
    assert torch.allclose(received.sum(1), torch.tensor(64.0))


def test_a_new_model_predicts_no_motion_and_learns():
    script = _script()
    config = tiny_dit.DiTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    fresh = tiny_dit.TinyDiT(config)
    noise, label = tiny_dit.draw_noise(4, torch.Generator().manual_seed(0))
    assert not fresh(noise, torch.zeros(4), label).any()
    states = [script.train(config, 3, 0).state_dict() for _ in range(2)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert states[0]["head.weight"].any()


def test_no_steps():
    with pytest.raises(InputError, match="steps is 0: give at least 1"):
        tiny_dit.euler(torch.nn.Identity(), torch.zeros(1, 1, 8, 8), torch.zeros(1).long(), 0)


def _script():
    path = Path(__file__).parents[2] / "scripts" / "make_tiny_dit.py"
    spec = importlib.util.spec_from_file_location("make_tiny_dit", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def copied(tmp_path):
    return Path(shutil.copytree(tiny_dit.load(), tmp_path / "model"))


def rewrite(path, **changes):
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text("utf-8")) | changes), "utf-8")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "vit"}, 'does not say "model_type": "tiny_dit"'),
        ({"hidden_size": "64"}, "hidden_size is '64' in config.json"),
        ({"hidden_size": 1 << 40}, "hidden_size is 1099511627776"),
        ({"image_size": 0}, "image_size is 0"),
        ({"num_hidden_layers": 10_000}, "the sizes in config.json are none of a model with 52 tensors"),
        ({"num_attention_heads": 5}, "the sizes in config.json are none"),
        ({"num_hidden_layers": 3}, "config.json and the tensors disagree"),
        ({"hidden_size": 128}, "config.json and the tensors disagree"),
    ],
)
def test_a_configuration_of_another_model_is_refused(copied, changes, message):
    rewrite(copied, **changes)
    with pytest.raises(CheckpointError, match=message):
        tiny_dit.open_model(copied)


def test_a_missing_or_damaged_file_is_refused(copied, tmp_path):
    with pytest.raises(CheckpointError, match="no readable config"):
        tiny_dit.open_model(tmp_path / "nothing")
    (copied / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match=r"no readable config\.json and model\.safetensors"):
        tiny_dit.open_model(copied)
    (copied / "config.json").write_text("[", "utf-8")
    with pytest.raises(CheckpointError, match="no readable config"):
        tiny_dit.open_model(copied)
