import hashlib
import importlib.util
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageClassification

from assay.core.errors import InputError
from assay.core.subject import recognise
from assay.reference import builtin, tiny_vit

HEAD_DIM = 16
ZERO_LAYER, ZERO_HEAD = tiny_vit.GROUND_TRUTH["zero_value_head"]
DEAD_LAYER, DEAD_CHANNEL = tiny_vit.GROUND_TRUTH["dead_channel"]


@pytest.fixture(scope="module")
def model():
    return AutoModelForImageClassification.from_pretrained(tiny_vit.load()).eval()


def test_the_shipped_weights_are_those_of_the_record():
    file = tiny_vit.load() / "model.safetensors"
    assert hashlib.sha256(file.read_bytes()).hexdigest() == tiny_vit.WEIGHTS_SHA256
    assert file.stat().st_size < 1_000_000


def test_it_is_a_built_in_checkpoint():
    assert builtin("builtin:tiny-vit") is tiny_vit
    subject = recognise(tiny_vit.load())
    assert (subject.kind, subject.model_type) == (tiny_vit.KIND, "vit")
    assert "causal" not in subject.facts


def test_the_parameters_are_as_many_as_it_says(model):
    assert sum(p.numel() for p in model.parameters()) == 136_138
    assert "136,138" in tiny_vit.ABOUT


@torch.no_grad()
def test_it_names_the_held_out_digits(model):
    right = model(tiny_vit.images("test")).logits.argmax(-1) == tiny_vit.labels("test")
    assert (right.sum().item(), len(right)) == (442, 449)


def test_the_splits_share_no_image():
    test, train = tiny_vit.images("test"), tiny_vit.images("train")
    assert (len(test), len(train)) == (449, 1348)
    assert test.shape[1:] == train.shape[1:] == (1, 8, 8)
    assert not {x.numpy().tobytes() for x in test} & {x.numpy().tobytes() for x in train}


def test_pixels_and_labels_are_what_the_model_takes():
    pixels, target = tiny_vit.images(), tiny_vit.labels()
    assert pixels.dtype == torch.float32
    assert (pixels.min().item(), pixels.max().item()) == (-1.0, 1.0)
    assert target.dtype == torch.int64
    assert sorted(target.unique().tolist()) == list(range(10))


@pytest.mark.parametrize("read", [tiny_vit.images, tiny_vit.labels])
def test_an_unknown_split_lists_the_known_ones(read):
    with pytest.raises(InputError, match="there are 'train' and 'test'"):
        read("validation")


def test_the_plants_stand_in_the_file():
    state = load_file(tiny_vit.load() / "model.safetensors")
    rows = slice(ZERO_HEAD * HEAD_DIM, (ZERO_HEAD + 1) * HEAD_DIM)
    value = f"vit.encoder.layer.{ZERO_LAYER}.attention.attention.value"
    assert not state[f"{value}.weight"][rows].any()
    assert not state[f"{value}.bias"][rows].any()
    layer = f"vit.encoder.layer.{DEAD_LAYER}"
    assert not state[f"{layer}.intermediate.dense.weight"][DEAD_CHANNEL].any()
    assert state[f"{layer}.intermediate.dense.bias"][DEAD_CHANNEL] == 0
    assert not state[f"{layer}.output.dense.weight"][:, DEAD_CHANNEL].any()


def test_no_other_head_and_no_other_channel_is_dead(model):
    heads, channels = [], []
    for layer in model.vit.layers:
        heads.append(layer.attention.v_proj.weight.view(4, HEAD_DIM, -1).norm(dim=(1, 2)))
        channels.append(layer.mlp.fc1.weight.norm(dim=1) * layer.mlp.fc2.weight.norm(dim=0))
    dead = lambda norms: [tuple(i) for i in (torch.stack(norms) == 0).nonzero().tolist()]  # noqa: E731
    assert dead(heads) == [(ZERO_LAYER, ZERO_HEAD)]
    assert dead(channels) == [(DEAD_LAYER, DEAD_CHANNEL)]


@torch.no_grad()
def test_removing_the_zero_head_changes_no_logit(model):
    pixels = tiny_vit.images()[:32]
    before = model(pixels).logits
    weight = model.vit.layers[ZERO_LAYER].attention.o_proj.weight
    columns = slice(ZERO_HEAD * HEAD_DIM, (ZERO_HEAD + 1) * HEAD_DIM)
    kept = weight[:, columns].clone()
    assert kept.any()
    weight[:, columns] = 0
    after = model(pixels).logits
    weight[:, columns] = kept
    assert torch.equal(before, after)


def _script():
    path = Path(__file__).parents[2] / "scripts" / "make_tiny_vit.py"
    spec = importlib.util.spec_from_file_location("make_tiny_vit", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_training_is_deterministic_and_leaves_the_plants_alone():
    script = _script()
    states = []
    for _ in range(2):
        torch.manual_seed(0)
        model = script.ViTForImageClassification(script.CONFIG)
        free = script.plant(model)
        script.train(model, free, epochs=1, seed=0)
        states.append(model.state_dict())
        for name, mask in free.items():
            assert not model.get_parameter(name)[mask == 0].any()
            assert model.get_parameter(name)[mask == 1].any()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_a_shifted_image_is_moved_whole_by_at_most_one_pixel():
    script = _script()
    pixels = torch.full((200, 1, 8, 8), -1.0)
    pixels[:, 0, 4, 4] = 1.0
    moved = script.shifted(pixels, torch.Generator().manual_seed(0))
    assert torch.equal(moved.sum((1, 2, 3)), pixels.sum((1, 2, 3)))
    places = moved.flatten(1).argmax(1)
    steps = torch.stack([places // 8, places % 8], 1) - 4
    assert steps.abs().max() == 1
    assert {tuple(s) for s in steps.tolist()} == {(a, b) for a in (-1, 0, 1) for b in (-1, 0, 1)}
