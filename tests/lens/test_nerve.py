"""NerVE (arXiv 2603.06922): exact values, an independent float64 reference, limits, inputs, and the monitor."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from assay.core.anatomy import anatomy
from assay.core.errors import InputError, NotApplicable
from assay.core.moments import Covariance
from assay.lens import NerveMonitor, NerveReducer, js_spectra, nerve, spectrum_metrics


def reference(x: np.ndarray) -> tuple[float, float, float, np.ndarray]:
    """SE, PR, EEE and spectrum of activations [N, D], written from the formulas in float64."""
    x = x.astype(np.float64)
    n, d = x.shape
    centred = x - x.sum(0) / n
    eigs = np.linalg.eigvalsh(centred.T @ centred / (n - 1))[::-1]
    eigs = np.where(eigs > 0, eigs, 0.0)
    p = eigs / eigs.sum()
    se = -sum(v * math.log(v) for v in p if v > 0)
    pr = eigs.sum() ** 2 / (eigs**2).sum()
    cumulative = 0.0
    total = 0.0
    for k in range(1, d + 1):
        cumulative += p[k - 1]
        total += cumulative - k / d
    return se, pr, min(max(2 / d * total, 0.0), 1.0), eigs


def reference_js(a: np.ndarray, b: np.ndarray) -> float:
    p, q = np.sort(a)[::-1] / a.sum(), np.sort(b)[::-1] / b.sum()
    m = (p + q) / 2
    return 0.5 * sum(v * math.log(v / w) for v, w in zip(p, m) if v > 0) + 0.5 * sum(
        v * math.log(v / w) for v, w in zip(q, m) if v > 0
    )


def tiny_llama(seed: int = 0, **kwargs) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    shape = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    return LlamaForCausalLM(LlamaConfig(**(shape | kwargs))).eval()


def metrics_of(eigs) -> list[float]:
    m = spectrum_metrics(eigs=torch.tensor(eigs, dtype=torch.float64))
    return [float(m.se), float(m.pr), float(m.eee)]


class TestExactValues:
    def test_flat_spectrum(self):
        assert metrics_of([1.0] * 16) == pytest.approx([math.log(16), 16, 0], abs=1e-12)

    def test_rank_one(self):
        se, pr, eee = metrics_of([5.0] + [0.0] * 15)
        assert se <= 1e-9 * 16
        assert pr == pytest.approx(1)
        assert eee == pytest.approx(15 / 16)

    def test_four_three_two_one(self):
        assert metrics_of([4.0, 3, 2, 1]) == pytest.approx([1.279854, 3.333333, 0.25], abs=1e-6)

    def test_js_of_one_direction_against_uniform(self):
        assert float(js_spectra(torch.tensor([1.0, 0, 0, 0]), torch.ones(4))) == pytest.approx(0.380396, abs=1e-6)

    def test_relu_of_independent_normals_keeps_them_independent(self):
        x = torch.randn(200_000, 8, generator=torch.Generator().manual_seed(0)).relu()
        c = Covariance(8)
        c.update(x)
        assert torch.allclose(c.covariance, (0.5 - 1 / (2 * math.pi)) * torch.eye(8), atol=4e-3)
        assert float(spectrum_metrics(x).pr) == pytest.approx(8, rel=2e-3)

    def test_relu_reinjects_variance_into_a_rank_one_input(self):
        u = torch.tensor([0.5, 0.5, -0.5, -0.5])
        z = torch.randn(400_000, 1, generator=torch.Generator().manual_seed(1))
        pre, post = spectrum_metrics(z * u), spectrum_metrics((z * u).relu())
        assert float(pre.pr) == pytest.approx(1, abs=1e-4)
        assert post.eigs[:2].tolist() == pytest.approx([0.25, 0.090845], rel=1e-2)
        assert float(post.pr) == pytest.approx(1.64199, rel=1e-2)
        assert post.eee < pre.eee

    def test_rank_one_input_in_closed_form(self):
        assert metrics_of([0.25, 0.090845])[1] == pytest.approx(1.64199, abs=1e-5)

    def test_streaming_over_uneven_batches_equals_one_shot(self):
        model = tiny_llama()
        ids = torch.randint(0, 61, (7, 19), generator=torch.Generator().manual_seed(0))
        one = nerve(model, [ids])
        many = nerve(model, [ids[:1], ids[1:3], ids[3:]])
        assert torch.allclose(one.pre.eigs, many.pre.eigs, rtol=1e-6, atol=1e-6 * float(one.pre.eigs.max()))
        assert torch.allclose(one.post.pr, many.post.pr, rtol=1e-5)


spectra = hnp.arrays(np.float64, st.integers(2, 24), elements=st.floats(1e-3, 1e3))


class TestInvariances:
    @given(spectra, st.floats(1e-6, 1e6))
    @settings(deadline=None)
    def test_scale(self, eigs, factor):
        assert metrics_of(eigs * factor) == pytest.approx(metrics_of(eigs), rel=1e-9, abs=1e-9)

    @given(spectra)
    @settings(deadline=None)
    def test_bounds_and_order(self, eigs):
        se, pr, eee = metrics_of(eigs)
        d = len(eigs)
        assert 0 <= se <= math.log(d) + 1e-12
        assert 1 - 1e-12 <= pr <= d + 1e-9
        assert 0 <= eee <= 1
        assert metrics_of(eigs[::-1].copy()) == pytest.approx([se, pr, eee])

    @given(spectra, spectra)
    @settings(deadline=None)
    def test_js_is_symmetric_bounded_and_zero_on_itself(self, a, b):
        x, y = torch.tensor(a), torch.tensor(b)
        assert float(js_spectra(x, x)) == pytest.approx(0, abs=1e-12)
        assert float(js_spectra(x, y)) == pytest.approx(float(js_spectra(y, x)), abs=1e-12)
        assert 0 <= float(js_spectra(x, y)) <= math.log(2)

    def test_an_orthogonal_change_of_basis_changes_nothing(self):
        g = torch.Generator().manual_seed(0)
        x = torch.randn(100, 12, generator=g, dtype=torch.float64) * torch.arange(1, 13)
        q, _ = torch.linalg.qr(torch.randn(12, 12, generator=g, dtype=torch.float64))
        a, b = spectrum_metrics(x), spectrum_metrics(x @ q + 3.0)
        assert torch.allclose(a.eigs, b.eigs)

    def test_identity_in_place_of_the_nonlinearity(self):
        mlp = nn.Sequential(nn.Linear(8, 24), nn.Identity(), nn.Linear(24, 8))
        result = nerve(mlp, [torch.randn(200, 8)], layers={"mlp": ("0", "2")})
        # The first is computed through the covariance of the 8 inputs, which leaves the other 16 eigenvalues exactly 0.
        assert torch.allclose(result.pre.eigs, result.post.eigs, atol=1e-6 * float(result.pre.eigs.max()))
        assert (result.pre.eigs > 0).sum() == 8
        assert float(result.js) == pytest.approx(0, abs=1e-6)
        assert float(result.pr_gain) == pytest.approx(1, rel=1e-5)


class TestAgainstTheReference:
    @pytest.mark.parametrize("mask", [False, True])
    def test_every_layer_of_a_gated_model(self, mask):
        model = tiny_llama()
        g = torch.Generator().manual_seed(3)
        batches = []
        for _ in range(3):
            batch = {"input_ids": torch.randint(0, 61, (4, 40), generator=g)}
            if mask:
                lengths = torch.tensor([40, 33, 12, 25])
                batch["attention_mask"] = (torch.arange(40) < lengths[:, None]).long()
            batches.append(batch)
        seen: dict[tuple[int, str], list[np.ndarray]] = {}
        for i, layer in enumerate(model.model.layers):
            layer.mlp.gate_proj.register_forward_hook(lambda m, a, o, i=i: seen.setdefault((i, "pre"), []).append(o))
            layer.mlp.down_proj.register_forward_pre_hook(
                lambda m, a, i=i: seen.setdefault((i, "post"), []).append(a[0])
            )
        result = nerve(model, batches)
        for i in range(3):
            rows = {}
            for site in ("pre", "post"):
                parts = []
                for value, batch in zip(seen[i, site], batches):
                    keep = batch.get("attention_mask", torch.ones(4, 40)).bool()
                    parts.append(value[keep].detach().double().numpy())
                rows[site] = np.concatenate(parts)
                got = getattr(result, site)
                se, pr, eee, eigs = reference(rows[site])
                assert float(got.se[i]) == pytest.approx(se, rel=1e-5)
                assert float(got.pr[i]) == pytest.approx(pr, rel=1e-5)
                assert float(got.eee[i]) == pytest.approx(eee, rel=1e-5)
                assert got.eigs[i].numpy() == pytest.approx(eigs, rel=1e-5, abs=1e-5 * eigs[0])
            js = reference_js(reference(rows["pre"])[3], reference(rows["post"])[3])
            assert float(result.js[i]) == pytest.approx(js, rel=1e-5, abs=1e-6)
        assert result.n_tokens == sum(len(r) for r in rows.values()) / 2

    def test_fewer_tokens_than_units(self):
        x = torch.randn(9, 30, generator=torch.Generator().manual_seed(0))
        got = spectrum_metrics(x)
        se, pr, eee, _ = reference(x.numpy())
        assert [float(got.se), float(got.pr), float(got.eee)] == pytest.approx([se, pr, eee], rel=1e-5)
        assert (got.n_tokens, got.rank_bound) == (9, 8)


class TestMemory:
    def test_a_sample_stands_for_all_where_memory_is_short(self):
        model = tiny_llama()
        ids = torch.randint(0, 61, (40, 32), generator=torch.Generator().manual_seed(0))
        rows = 4 * 3 * (48 + 32)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sampled = nerve(model, ids.split(3), memory=rows * 40)
        assert (sampled.n_tokens, sampled.n_seen) == (40, 1280)
        everything = nerve(model, ids.split(3))
        assert everything.n_tokens == 1280
        assert sampled.pre.eigs.sum(-1) == pytest.approx(everything.pre.eigs.sum(-1), rel=0.35)

    def test_the_sample_is_uniform_and_the_same_in_every_layer(self):
        class Recorder(nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.b = nn.Linear(1, 64, bias=False), nn.Linear(64, 1)
                nn.init.ones_(self.a.weight)

            def forward(self, x):
                return self.b(self.a(x))

        from assay.lens._nerve import _named_layers

        model = Recorder()
        counts = torch.zeros(100)
        from assay.core.trace import attach

        for seed in range(200):
            named = _named_layers(model, {"one": ("a", "b")})
            reducer = NerveReducer(named, memory=4 * (64 + 1) * 20, seed=seed)
            with torch.no_grad(), attach(model, [reducer], anatomy=named):
                for part in torch.arange(100.0)[:, None].split(7):
                    model(part)
            pre, post = reducer._rows["mlp.in", 0], reducer._rows["mlp.post", 0]
            assert torch.equal(pre.expand(-1, 64), post)
            counts[pre[:, 0].long()] += 1
        # Each of 100 rows is kept with probability 0.2 in 200 runs: 40 times, with a deviation of 5.7.
        assert float(counts.mean()) == pytest.approx(40)
        assert float(counts.std()) < 9
        assert abs(float(counts[:50].mean()) - 40) < 3


class TestInputs:
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
    def test_dtypes(self, dtype):
        x = torch.randn(500, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        want = reference(x.to(dtype).double().numpy())
        got = spectrum_metrics(x.to(dtype))
        assert [float(got.se), float(got.pr), float(got.eee)] == pytest.approx(want[:3], rel=1e-5)

    def test_not_contiguous(self):
        x = torch.randn(16, 500, generator=torch.Generator().manual_seed(0))
        assert torch.allclose(spectrum_metrics(x.T).eigs, spectrum_metrics(x.T.contiguous()).eigs, rtol=1e-5)

    def test_bfloat16_model(self):
        model = tiny_llama().to(torch.bfloat16)
        ids = torch.randint(0, 61, (6, 50), generator=torch.Generator().manual_seed(0))
        assert torch.isfinite(nerve(model, [ids]).pre.pr).all()

    def test_deterministic(self):
        ids = torch.randint(0, 61, (6, 50), generator=torch.Generator().manual_seed(0))
        a, b = nerve(tiny_llama(), [ids]), nerve(tiny_llama(), [ids])
        assert torch.equal(a.pre.eigs, b.pre.eigs)
        assert torch.equal(a.js, b.js)

    def test_the_model_is_left_as_it_was(self):
        model = tiny_llama().train()
        before = {k: v.clone() for k, v in model.state_dict().items()}
        nerve(model, [torch.randint(0, 61, (4, 40))])
        assert model.training
        assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
        assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())

    def test_too_few_tokens_for_full_rank_warns(self):
        with pytest.warns(UserWarning, match="only 20 tokens for 48 hidden units: the spectrum has rank at most 19"):
            assert nerve(tiny_llama(), [torch.arange(20)[None]]).rank_limited

    def test_one_token(self):
        with pytest.raises(InputError, match="at least 2"):
            nerve(tiny_llama(), [torch.tensor([[1]])])

    def test_no_batches(self):
        with pytest.raises(InputError, match="no batches"):
            nerve(tiny_llama(), [])

    def test_left_padding(self):
        batch = {"input_ids": torch.ones(1, 5, dtype=torch.long), "attention_mask": torch.tensor([[0, 1, 1, 1, 1]])}
        with pytest.raises(InputError, match="pad on the right"):
            nerve(tiny_llama(), [batch])

    def test_constant_layer(self):
        model = tiny_llama()
        nn.init.zeros_(model.model.layers[1].mlp.gate_proj.weight)
        with pytest.raises(InputError, match="zero variance in layer 1"):
            nerve(model, [torch.randint(0, 61, (4, 40))])

    def test_experts_only(self):
        config = MixtralConfig(
            vocab_size=61, hidden_size=32, intermediate_size=16, num_hidden_layers=1, num_attention_heads=4,
            num_key_value_heads=2, num_local_experts=2,
        )  # fmt: skip
        with pytest.raises(NotApplicable, match="pass layers="):
            nerve(MixtralForCausalLM(config), [torch.randint(0, 61, (4, 40))])

    def test_wrong_names(self):
        mlp = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        with pytest.raises(InputError, match="'9', which the model does not have"):
            nerve(mlp, [torch.randn(5, 4)], layers={"mlp": ("0", "9")})
        with pytest.raises(InputError, match="has 1 names"):
            nerve(mlp, [torch.randn(5, 4)], layers={"mlp": ("0",)})

    def test_bad_spectra(self):
        with pytest.raises(InputError, match="zero variance"):
            spectrum_metrics(eigs=torch.zeros(4))
        with pytest.raises(InputError, match="not finite"):
            spectrum_metrics(eigs=torch.tensor([1.0, float("nan")]))
        with pytest.raises(InputError, match="not finite"):
            spectrum_metrics(torch.full((4, 4), float("inf")))
        with pytest.raises(InputError, match="not both"):
            spectrum_metrics(torch.ones(3, 3), eigs=torch.ones(3))


class TestMonitor:
    def mlp(self):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 24), nn.GELU(), nn.Linear(24, 1))

    def test_training_is_not_disturbed(self):
        def run(watch: bool) -> torch.Tensor:
            model = self.mlp()
            optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
            monitor = NerveMonitor(model, every=2, layers={"mlp": ("0", "2")})
            g = torch.Generator().manual_seed(0)
            for i in range(1, 9):
                x = torch.randn(64, 6, generator=g)
                if watch:
                    with monitor.step(i):
                        loss = model(x).square().mean()
                else:
                    loss = model(x).square().mean()
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
            if watch:
                assert [s for s, _ in monitor.history] == [1, 2, 4, 6, 8]
                assert len(monitor.table()) == 5
                table = monitor.correlation({1: 5.0, 2: 4.0, 4: 3.0, 6: 2.0, 8: 1.0})
                assert all(-1 <= row[1] <= 1 for row in table)
            return model[0].weight.detach()

        assert torch.equal(run(True), run(False))

    def test_too_few_losses(self):
        with pytest.raises(InputError, match="at least 4"):
            NerveMonitor(self.mlp(), layers={"mlp": ("0", "2")}).correlation({1: 0.5})

    def test_trainer_callback(self):
        from types import SimpleNamespace

        model = self.mlp()
        monitor = NerveMonitor(model, every=1, layers={"mlp": ("0", "2")})
        callback = monitor.callback()
        callback.on_step_begin(None, SimpleNamespace(global_step=0), None)
        model(torch.randn(50, 6))
        callback.on_step_end(None, SimpleNamespace(global_step=1), None)
        assert [s for s, _ in monitor.history] == [1]


def test_result_prints_plots_and_serialises():
    import json

    result = nerve(tiny_llama(), [torch.randint(0, 61, (4, 40), generator=torch.Generator().manual_seed(0))])
    assert "PR gain" in str(result.table())
    assert len(result.figure().data) == 4
    assert json.loads(json.dumps(result.to_dict()))["layers"] == [0, 1, 2]
    assert anatomy(tiny_llama()).n_layers == 3
