"""Settings: what goes together, what fits a layer, and how large it becomes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from assay.compressor import METHODS, Setting
from assay.core.errors import InputError


def layer(n_out=24, n_in=64, seed=0):
    """A matrix, and second moments of inputs that lean on one another."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(n_out, n_in, generator=generator)
    inputs = torch.randn(4 * n_in, n_in, generator=generator) @ torch.randn(n_in, n_in, generator=generator)
    return weight, inputs.T @ inputs / len(inputs)


SETTINGS = (
    Setting("gptq", 4, 32),
    Setting("gptq", 3, None),
    Setting("gptq", 2, 16, symmetric=False),
    Setting("rtn", 8, 64),
    Setting("obr", 4, 32),
    Setting("obr", 4, 32, sparsity=0.25),
    Setting("obr", 4, 32, pattern="2:4"),
    Setting("bof4", group_size=32),
    Setting("logart", 3),
)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: s.name)
def test_the_size_is_foretold(setting):
    weight, hessian = layer()
    outcome = setting.apply(weight, hessian)
    assert outcome.dense.dtype == torch.float32
    assert torch.equal(outcome.dense, outcome.packed.dequantize())
    # Outliers of bof4 are counted at what normal weights have.
    near = 0.1 if setting.method == "bof4" else 1e-9
    assert outcome.packed.bits_per_weight == pytest.approx(setting.bits_per_weight(*weight.shape), abs=near)
    assert 0 < outcome.error < 1
    assert outcome.note == ""


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: s.name)
def test_without_inputs_every_method_falls_back_and_says_so(setting):
    weight, _ = layer()
    outcome = setting.apply(weight, None)
    assert outcome.error != outcome.error
    assert "too few tokens" in outcome.note
    assert float((outcome.dense - weight).norm() / weight.norm()) < 0.8


@pytest.mark.parametrize("method", METHODS)
def test_inputs_help(method):
    """On the calibration inputs no method is worse than itself without them; rounding alone does not use them."""
    weight, hessian = layer()
    with_inputs, without = (Setting(method, group_size=32).apply(weight, h).dense - weight for h in (hessian, None))
    error, blind = (float(((d @ hessian) * d).sum()) for d in (with_inputs, without))
    assert error == blind if method == "rtn" else error < 0.9 * blind


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: s.name)
def test_it_is_deterministic(setting):
    weight, hessian = layer()
    assert torch.equal(setting.apply(weight, hessian).dense, setting.apply(weight, hessian).dense)


def test_the_sparsity_that_was_asked_for_is_the_one_that_comes_out():
    weight, hessian = layer()
    for setting, share in ((Setting("obr", 4, 32), 0.5), (Setting("obr", 4, 32, sparsity=0.25), 0.25)):
        assert setting.apply(weight, hessian).packed.sparsity == pytest.approx(share, abs=1e-6)
    kept = Setting("obr", 4, 32, pattern="2:4").apply(weight, hessian).dense != 0
    assert int(kept.view(24, 16, 4).sum(-1).max()) <= 2


@pytest.mark.parametrize("method", ["obr", "bof4"])
def test_the_last_group_may_be_shorter(method):
    weight, hessian = layer(16, 100)
    setting = Setting(method, group_size=64)
    setting.check_width("layer", 100)
    outcome = setting.apply(weight, hessian)
    assert outcome.packed.shape == weight.shape
    assert outcome.error < 0.6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scales_are_stored_in_the_type_that_they_are_made_in(dtype):
    weight, hessian = layer()
    outcome = Setting("gptq", 4, 32).apply(weight * 1e-3, hessian, dtype)
    assert outcome.packed.scale.dtype == dtype
    assert outcome.error < 0.1


@given(st.sampled_from(["gptq", "rtn"]), st.integers(2, 8), st.integers(1, 40), st.integers(2, 60), st.booleans())
def test_any_shape_of_a_uniform_grid_is_foretold(method, bits, n_out, n_in, symmetric):
    weight = torch.randn(n_out, n_in, generator=torch.Generator().manual_seed(n_in))
    setting = Setting(method, bits, 16, symmetric)
    outcome = setting.apply(weight, None)
    assert outcome.packed.bits_per_weight == pytest.approx(setting.bits_per_weight(n_out, n_in))


@pytest.mark.parametrize(
    ("numbers", "match"),
    [
        ({"method": "awq"}, "--method is 'awq': choose one of gptq, rtn, obr, bof4, logart"),
        ({"bits": 1}, "--bits is 1: gptq takes 2 to 8"),
        ({"bits": 0}, "--bits is 0"),
        ({"bits": 9}, "--bits is 9"),
        ({"method": "bof4", "bits": 3}, "--bits is 3: bof4 has 4"),
        ({"method": "logart", "bits": 7}, "--bits is 7: logart takes 2 to 6"),
        ({"group_size": 1}, "--group-size is 1: give at least 2, or 0 for whole rows"),
        ({"group_size": -64}, "--group-size is -64"),
        ({"sparsity": 0.5}, "go with --method obr, not with gptq"),
        ({"pattern": "2:4"}, "go with --method obr, not with gptq"),
        ({"method": "obr", "sparsity": 1.0}, "--sparsity is 1.0: give a share from 0 to below 1"),
        ({"method": "obr", "sparsity": -0.1}, "--sparsity is -0.1"),
        ({"method": "obr", "sparsity": float("nan")}, "--sparsity is nan"),
        ({"method": "obr", "sparsity": 0.5, "pattern": "2:4"}, "exclude each other"),
        ({"method": "obr", "pattern": "4:2"}, "--pattern is '4:2': give kept:of, such as 2:4"),
        ({"method": "obr", "pattern": "half"}, "--pattern is 'half'"),
        ({"method": "obr", "symmetric": False}, "--asymmetric goes with --method gptq or rtn, not with obr"),
        ({"method": "bof4", "symmetric": False}, "--asymmetric goes with"),
    ],
)
def test_numbers_that_do_not_go_together(numbers, match):
    with pytest.raises(InputError, match=match):
        Setting(**numbers)


def test_widths_that_do_not_fit():
    with pytest.raises(InputError, match=r"--pattern 2:4: the width 90 of blocks\.0\.up is not divisible by 4"):
        Setting("obr", pattern="2:4").check_width("blocks.0.up", 90)
    with pytest.raises(InputError, match=r"--group-size 64 does not divide the width 96 of up: 16, 24, 48 would do"):
        Setting("gptq", 4, 64).check_width("up", 96, 48)
    with pytest.raises(InputError, match="no size fits every layer; 0 means whole rows"):
        Setting("gptq", 4, 64).check_width("up", 97, 1)
    Setting("gptq", 4, 64).check_width("up", 128, 64)
    Setting("gptq", 4, None).check_width("up", 97, 1)
    Setting("gptq", 4, 64).check_width("up", 97)


def test_a_weight_that_is_not_finite():
    weight, hessian = layer()
    weight[3, 4] = float("nan")
    for method in METHODS:
        with pytest.raises(InputError, match="finite"):
            Setting(method, group_size=32).apply(weight, hessian)


def test_names_tell_settings_apart():
    assert len({s.name for s in SETTINGS}) == len(SETTINGS)
    assert Setting("gptq", 3, None, symmetric=False).name == "gptq 3 bit rows asymmetric"
    assert Setting("obr", 4, 32, pattern="2:4").name == "obr 4 bit g32 2:4"
