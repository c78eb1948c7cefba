"""The search for a size: what is tried, how it is shared out, what is chosen."""

import itertools
import json
import shutil
from collections import namedtuple
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from assay import report
from assay.compressor import Setting, fit_checkpoint
from assay.compressor import _fit as fit_module
from assay.compressor._fit import _cost, _Moments, _pressure, _replaced, _share_out
from assay.compressor._run import open_job, read_again
from assay.core.checkpoint import quiet
from assay.core.errors import AssayError, InputError, OutputError
from assay.core.loss import Drift
from assay.core.progress import silent

WANTED = 3.5
SMALL = {"samples": 8, "context": 64}
OPTIONS = {"text": None, "held": None, "skip": ("lm_head",), "base": None, "allow_pickle": False, "progress": silent}


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    home = tmp_path_factory.mktemp("fit")
    return home / "out", fit_checkpoint("builtin:tiny-lm", home / "out", WANTED, **SMALL)


def test_it_fits_and_says_what_it_is(fitted):
    out, result = fitted
    assert result.after.bits_per_weight <= WANTED
    uniform = [t for t in result.tried if t.uniform]
    mixed = [t for t in result.tried if not t.uniform]
    assert len(uniform) >= 5
    assert len(mixed) == 1
    assert {t.fits for t in uniform} == {True, False}
    assert all(t.fits == (t.bits_per_weight <= WANTED) for t in result.tried)
    chosen = min((t for t in result.tried if t.fits), key=lambda t: t.kl_calibration)
    names = {layer.setting for layer in result.layers}
    assert (len(names) > 1) == (not chosen.uniform)
    assert sorted(p.name for p in out.parent.iterdir()) == ["out"]


def test_the_mixture_beats_every_uniform_choice_of_its_size(fitted):
    _, result = fitted
    mixed = next(t for t in result.tried if not t.uniform)
    others = [t for t in result.tried if t.uniform and t.fits]
    assert mixed.kl_calibration < min(t.kl_calibration for t in others)
    assert mixed.perplexity < min(t.perplexity for t in others)


def test_what_was_tried_is_written_and_drawn(fitted):
    out, result = fitted
    document = json.loads((out / "compression.json").read_text(), parse_constant=pytest.fail)
    assert len(document["tried"]) == len(result.tried)
    page = report.compression_page(result)
    assert "What was tried" in page
    assert all(t.name in page for t in result.tried)
    sizes = [row[1] for row in result.tried_table().rows]
    assert sizes == sorted(sizes)


def test_a_mixture_loads(fitted):
    out, result = fitted
    ids = torch.arange(40)[None] + 60
    with quiet(), torch.no_grad():
        model, told = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
        assert not told["missing_keys"]
        assert torch.equal(model(ids).logits, read_again(out)(ids).logits)
    assert 0 < result.drift.kl.mean < 0.3


@pytest.fixture(scope="module")
def job():
    return open_job("builtin:tiny-lm", **SMALL, **OPTIONS)


@pytest.fixture(scope="module")
def moments(job):
    return _Moments(job)


def test_second_moments_are_kept_once_an_input(job, moments):
    """q, k and v have one input, gate and up another: four matrices a block instead of seven."""
    assert len(set(moments._place.values())) == 4 * 4
    first = "model.layers.2.self_attn"
    assert torch.equal(moments[f"{first}.q_proj"], moments[f"{first}.v_proj"])
    assert not torch.equal(moments[f"{first}.q_proj"], moments[f"{first}.o_proj"])
    assert moments["model.layers.0.mlp.down_proj"].shape == (256, 256)


def test_trying_leaves_the_model_as_it_was(job, moments):
    before = {n: p.clone() for n, p in job.model.named_parameters()}
    alike = dict.fromkeys(job.layers, Setting("rtn", 2))
    with _replaced(job, alike, moments) as made:
        assert all(m.bits == pytest.approx(2.25) for m in made.values())
        assert any(not torch.equal(p, before[n]) for n, p in job.model.named_parameters())
    assert all(torch.equal(p, before[n]) for n, p in job.model.named_parameters())
    wanted = {n: p.requires_grad for n, p in job.model.named_parameters()}
    _pressure(job, job.calibration[:1])
    assert {n: p.requires_grad for n, p in job.model.named_parameters()} == wanted
    assert all(p.grad is None for p in job.model.parameters())


def test_the_estimate_is_near_what_one_layer_costs(job, moments):
    """One layer at a time: the estimate against the KL that is measured, over layers of very different weight."""
    pressure, drift = _pressure(job, job.calibration), Drift(job.model, job.calibration, anatomy_=job.anatomy)
    estimated, measured = [], []
    for name in list(job.layers)[::4]:
        with _replaced(SimpleNamespace(layers={name: job.layers[name]}), {name: Setting("rtn", 3)}, moments) as made:
            estimated.append(_cost(made[name], pressure[name]))
            measured.append(drift.measure().kl.mean)
    ratio = np.array(estimated) / np.array(measured)
    assert np.corrcoef(np.log(estimated), np.log(measured))[0, 1] > 0.8
    assert 0.2 < np.median(ratio) < 5


@settings(max_examples=25)
@given(st.lists(st.floats(0.01, 10.0), min_size=9, max_size=9), st.floats(2.3, 4.2), st.integers(0, 5))
def test_sharing_out_is_as_good_as_trying_everything(values, wanted, seed):
    candidates = [Setting("gptq", b) for b in (2, 3, 4)]
    widths = np.random.default_rng(seed).integers(1, 5, 3) * 64
    layers = {str(i): torch.nn.Linear(int(w), 64, bias=False) for i, w in enumerate(widths)}
    costs = {c: {str(i): values[3 * k + i] for i in range(3)} for k, c in enumerate(candidates)}
    sizes = {c: {n: c.bits_per_weight(64, layer.in_features) for n, layer in layers.items()} for c in candidates}
    weights = {n: layer.weight.numel() for n, layer in layers.items()}

    def total(choice):
        return sum(costs[c][n] for n, c in choice.items())

    def size(choice):
        return sum(sizes[c][n] * weights[n] for n, c in choice.items()) / sum(weights.values())

    every = [dict(zip(layers, choice, strict=True)) for choice in itertools.product(candidates, repeat=3)]
    best = min(total(c) for c in every if size(c) <= wanted)
    found = _share_out(SimpleNamespace(layers=layers), candidates, costs, sizes, wanted)
    assert size(found) <= wanted + 1e-6
    assert total(found) <= best * (1 + 1e-3) + 1e-9


@pytest.mark.parametrize(
    ("wanted", "match"),
    [
        (1.0, r"--fit is 1\.0: the smallest that can be made of this model has 2\.25 bits a weight"),
        (0.0, r"--fit is 0\.0: give bits a weight"),
        (float("nan"), "--fit is nan"),
        (float("inf"), "--fit is inf"),
        (-3.0, r"--fit is -3\.0"),
    ],
)
def test_sizes_that_cannot_be(tmp_path, monkeypatch, wanted, match):
    monkeypatch.setattr(fit_module, "Sequential", lambda *a, **k: pytest.fail("work was started"))
    with pytest.raises(InputError, match=match) as refused:
        fit_checkpoint("builtin:tiny-lm", tmp_path / "out", wanted, **SMALL)
    assert "\n" not in str(refused.value)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_found_out_before_the_search(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(fit_module, "Sequential", lambda *a, **k: pytest.fail("work was started"))
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage(1, 1, 1000))
    with pytest.raises(OutputError, match="MB while it is written") as refused:
        fit_checkpoint("builtin:tiny-lm", tmp_path / "out", WANTED, **SMALL)
    assert isinstance(refused.value, AssayError)
    assert not list(tmp_path.iterdir())
