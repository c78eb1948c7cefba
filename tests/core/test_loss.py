"""Next-token loss and drift against transformers' own numbers."""

import math

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

from assay.core import loss as loss_module
from assay.core import trace as trace_module
from assay.core.errors import InputError, NotApplicable
from assay.core.loss import Drift, LossReducer, language_loss


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        initializer_range=0.5,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def ids():
    return torch.randint(0, 40, (5, 21), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("slice_bytes", [32 << 20, 4 * 2 * 40 * 3])
def test_loss_equals_the_models_own(model, ids, monkeypatch, slice_bytes):
    monkeypatch.setattr(trace_module, "_LOGITS_BYTES", slice_bytes)
    result = language_loss(model, ids.split(2))
    with torch.no_grad():
        own = [float(model(input_ids=row[None], labels=row[None]).loss) for row in ids]
    assert result.per_window.tolist() == pytest.approx(own, rel=1e-5)
    assert result.loss.mean == pytest.approx(sum(own) / 5, rel=1e-5)
    assert result.n_tokens == 5 * 20
    assert result.perplexity == pytest.approx(math.exp(sum(own) / 5), rel=1e-4)
    assert float(result.by_position.mean()) == pytest.approx(sum(own) / 5, rel=1e-5)
    assert [b[:2] for b in result.buckets()] == [(1, 1), (2, 3), (4, 7), (8, 15), (16, 20)]


def test_padding_counts_nothing(model, ids):
    lengths = torch.tensor([21, 10, 4, 21, 2])
    mask = (torch.arange(21) < lengths[:, None]).long()
    result = language_loss(model, [{"input_ids": ids, "attention_mask": mask}])
    with torch.no_grad():
        own = [float(model(input_ids=r[None, :n], labels=r[None, :n]).loss) for r, n in zip(ids, lengths.tolist())]
    assert result.per_window.tolist() == pytest.approx(own, rel=1e-5)


def test_windows_of_one_token_predict_nothing(model):
    with pytest.raises(InputError, match="no token was predicted"):
        language_loss(model, [torch.tensor([[3]])])
    with pytest.raises(InputError, match="no token was predicted"):
        LossReducer().result()


def test_an_encoder_is_refused():
    bert = BertForMaskedLM(
        BertConfig(vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    )
    with pytest.raises(NotApplicable, match="this is an encoder"):
        language_loss(bert, [torch.ones(1, 4, dtype=torch.long)])
    with pytest.raises(NotApplicable, match="no language-model head"):
        language_loss(
            LlamaForCausalLM(
                LlamaConfig(vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
            ).model,
            [],
        )


@pytest.mark.parametrize("slice_bytes", [32 << 20, 4 * 40 * 3])
def test_drift_equals_the_formulas(model, ids, monkeypatch, slice_bytes):
    monkeypatch.setattr(loss_module, "_SLICE_BYTES", slice_bytes)
    with torch.no_grad():
        before = model(ids).logits[:, :-1].double().log_softmax(-1)
        drift = Drift(model, ids)
        model.model.layers[1].mlp.down_proj.weight.mul_(1.5)
        after = model(ids).logits[:, :-1].double().log_softmax(-1)
    got = drift.measure()
    kl = (before.exp() * (before - after)).sum(-1)
    targets = ids[:, 1:, None]
    assert got.kl.mean == pytest.approx(float(kl.mean()), rel=1e-4)
    assert got.loss == pytest.approx(-float(after.gather(-1, targets).mean()), rel=1e-5)
    change = (before - after).gather(-1, targets)
    assert got.loss_change.mean == pytest.approx(float(change.mean()), rel=1e-4, abs=1e-6)
    assert got.agreement == pytest.approx(float((before.argmax(-1) == after.argmax(-1)).double().mean()))
    assert got.n_tokens == 100
    assert drift.measure(2).n_tokens == 40


def test_no_change_is_no_drift(model, ids):
    got = Drift(model, ids).measure()
    assert (got.kl.mean, got.loss_change.mean, got.agreement) == (0, 0, 1)
