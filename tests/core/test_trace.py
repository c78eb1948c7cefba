"""The tracer: what it shows equals what transformers computes, and the model is left as it was."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn

from assay.core import trace as trace_module
from assay.core.anatomy import anatomy
from assay.core.errors import InputError, NotApplicable, UnknownArchitecture
from assay.core.trace import Batch, LogitsSlice, PatternSlice, Reducer, attach, trace
from tests.core.test_anatomy import CASES, TOKENS, Case

TEXT = [c for c in CASES if not c.model.startswith(("ViT", "Dinov2")) and "Gemma3ForConditional" not in c.model]
IMAGES = [c for c in CASES if c.model.startswith(("ViT", "Dinov2"))]


class Everything(Reducer):
    """Keeps all that it is shown."""

    def __init__(self, *sites: str, layers=None):
        self.sites = sites
        self.layers = layers
        self.seen: dict[tuple[str, int], list] = {}

    def update(self, site, layer, value, batch):
        value = value.clone() if isinstance(value, Tensor) else value
        self.seen.setdefault((site, layer), []).append(value)


class Patterns(Reducer):
    """Puts the slices of the pattern together."""

    sites = ("attn.pattern",)

    def __init__(self, n_heads: int, tokens: int):
        self.whole: dict[int, Tensor] = {}
        self.shape = (n_heads, tokens, tokens)
        self.largest = 0

    def update(self, site, layer, value: PatternSlice, batch: Batch):
        whole = self.whole.setdefault(layer, torch.zeros(len(value.weights), *self.shape))
        whole[:, value.heads, value.rows, : value.weights.shape[-1]] = value.weights
        self.largest = max(self.largest, value.weights.numel())
        entropy = -(value.weights * value.weights.clamp_min(1e-30).log()).sum(-1)
        torch.testing.assert_close(value.entropy, entropy, atol=1e-5, rtol=1e-5)


def inputs_of(case: Case, padded: bool = False) -> dict[str, Tensor]:
    ids = torch.randint(3, 50, (2, TOKENS), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids}
    if padded:
        batch["attention_mask"] = (torch.arange(TOKENS) < torch.tensor([[TOKENS], [TOKENS - 4]])).long()
    return batch


@pytest.fixture
def small_slices(monkeypatch):
    """Slices so small that heads and rows are both cut."""
    monkeypatch.setattr(trace_module, "_SLICE_BYTES", 4 * 2 * TOKENS * 16)
    monkeypatch.setattr(trace_module, "_MIN_ROWS", 1)


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("case", TEXT, ids=lambda c: c.name)
def test_tracing_changes_no_output_and_shows_the_models_own_pattern(case, padded, small_slices):
    model = case.build()
    batch = inputs_of(case, padded)
    found = anatomy(model)
    with torch.no_grad():
        plain = found.backbone(**batch).last_hidden_state
    keep = batch.get("attention_mask", torch.ones(2, TOKENS)).bool()
    patterns = Patterns(found.blocks[0].attention.n_heads, TOKENS)
    other = Everything("resid", "attn", "attn.out", "embed")
    with torch.no_grad(), attach(model, [patterns, other], anatomy=found):
        traced = found.backbone(**batch).last_hidden_state
    torch.testing.assert_close(traced[keep], plain[keep], atol=2e-5, rtol=1e-4)
    assert patterns.largest <= 2 * TOKENS * 16
    for block in found.blocks:
        weights = patterns.whole[block.index]
        assert weights.sum(-1)[keep[:, None].expand(-1, weights.shape[1], -1)] == pytest.approx(1, abs=1e-5)
        if block.attention.causal:
            assert float(weights.triu(1).abs().max()) == 0
        view = other.seen["attn", block.index][0]
        heads = (weights @ view.v.repeat_interleave(view.q.shape[1] // view.v.shape[1], 1).float()).to(view.out.dtype)
        torch.testing.assert_close(
            view.out[keep[:, None].expand(view.out.shape[:3])],
            heads[keep[:, None].expand(heads.shape[:3])],
            atol=1e-5,
            rtol=1e-4,
        )
    if case.attention == "eager" and found.blocks[0].attention.interface and "upcast" not in case.name:
        with torch.no_grad():
            own = found.backbone(**batch, output_attentions=True).attentions
        for layer, pattern in enumerate(own):
            rows = keep[:, None].expand(pattern.shape[:3])
            torch.testing.assert_close(patterns.whole[layer][rows], pattern.float()[rows], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("case", IMAGES, ids=lambda c: c.name)
def test_image_models(case, small_slices):
    model = case.build()
    found = anatomy(model)
    pixels = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        plain = found.backbone(pixel_values=pixels).last_hidden_state
        seen = Everything("attn", "mlp.pre", "mlp.post", "resid")
        trace(model, [{"pixel_values": pixels}], [seen])
        again = found.backbone(pixel_values=pixels).last_hidden_state
    torch.testing.assert_close(again, plain)
    assert ("attn", found.n_layers - 1) in seen.seen
    assert ("mlp.post", 0) in seen.seen


@pytest.mark.parametrize("name", ["llama", "gpt2", "phi3", "gemma2"])
def test_the_sites_of_the_mlp(name):
    case = next(c for c in CASES if c.name.startswith(name))
    model = case.build()
    seen = Everything("mlp.pre", "mlp.post", "mlp.out", "attn.out", "resid", "embed")
    trace(model, [inputs_of(case)], [seen])
    found = anatomy(model)
    for block in found.blocks:
        pre, post, out = (seen.seen[f"mlp.{s}", block.index][0] for s in ("pre", "post", "out"))
        if not block.mlp.gated:
            torch.testing.assert_close(block.mlp.act(pre), post)
        torch.testing.assert_close(block.mlp.down(post), out)
        assert pre.shape[-1] == block.mlp.down.in_features
    ids = inputs_of(case)["input_ids"]
    with torch.no_grad():
        states = found.backbone(input_ids=ids, output_hidden_states=True).hidden_states
    torch.testing.assert_close(seen.seen["embed", -1][0], states[0])
    torch.testing.assert_close(seen.seen["resid", 0][0], states[1])


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_logits_come_in_slices_and_equal_the_models(name, monkeypatch):
    monkeypatch.setattr(trace_module, "_LOGITS_BYTES", 4 * 2 * 50 * 5)
    case = next(c for c in CASES if c.name.startswith(name))
    model = case.build()
    seen = Everything("logits")
    trace(model, [inputs_of(case)], [seen])
    slices: list[LogitsSlice] = seen.seen["logits", -1]
    assert [s.rows for s in slices] == [slice(0, 5), slice(5, 10), slice(10, 13)]
    with torch.no_grad():
        want = model(**inputs_of(case)).logits
    torch.testing.assert_close(torch.cat([s.values for s in slices], dim=1), want)


def test_what_a_reducer_returns_takes_the_place_of_what_it_saw():
    case = CASES[5]
    model = case.build()
    found = anatomy(model)

    class Silence(Reducer):
        def __init__(self, site):
            self.sites = (site,)

        def update(self, site, layer, value, batch):
            return torch.zeros_like(value.out if site == "attn" else value)

    for site in ("attn", "attn.out"):
        seen = Everything("attn.out")
        with torch.no_grad(), attach(model, [Silence(site), seen], anatomy=found):
            found.backbone(**inputs_of(case))
        assert float(seen.seen["attn.out", 0][0].abs().max()) == 0


def test_the_next_reducer_sees_what_the_one_before_put_there():
    case = CASES[5]
    model = case.build()

    class Silence(Reducer):
        sites = ("attn",)

        def update(self, site, layer, value, batch):
            return torch.zeros_like(value.out)

    seen = Everything("attn")
    trace(model, [inputs_of(case)], [Silence(), seen])
    view = seen.seen["attn", 0][0]
    assert float(view.out.abs().max()) == 0
    assert view.q.shape[1] == view.block.attention.n_heads


def test_a_projected_slice_cannot_be_replaced():
    class Replace(Reducer):
        sites = ("mlp.pre",)

        def update(self, site, layer, value, batch):
            return value

    with pytest.raises(InputError, match="can only be read"):
        trace(CASES[5].build(), [inputs_of(CASES[5])], [Replace()])


def test_layers_can_be_chosen():
    seen = Everything("resid", layers=(1,))
    trace(CASES[5].build(), [inputs_of(CASES[5])] * 3, [seen])
    assert list(seen.seen) == [("resid", 1)]
    assert len(seen.seen["resid", 1]) == 3


def test_the_model_is_left_as_it_was_also_after_an_error():
    case = CASES[5]
    model = case.build().train()
    before = model.config._attn_implementation

    class Fails(Reducer):
        sites = ("attn", "resid", "mlp.pre")

        def update(self, site, layer, value, batch):
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        trace(model, [inputs_of(case)], [Fails()])
    assert model.training
    assert model.config._attn_implementation == before
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
    assert not trace_module._TRACERS
    trace(model, [inputs_of(case)], [Everything("attn")])


def test_two_tracers_on_one_model():
    model = CASES[5].build()
    outer, inner = (attach(model, [Everything("attn")]) for _ in range(2))
    with outer, pytest.raises(InputError, match="being traced already"), inner:
        pass
    with attach(model, [Everything("attn")]), attach(model, [Everything("resid")]):
        model(**inputs_of(CASES[5]))


def test_batches_are_counted_and_padding_is_known():
    lengths = []

    class Count(Reducer):
        sites = ("resid",)

        def update(self, site, layer, value, batch):
            lengths.append((batch.index, len(batch.rows(value)), batch.valid is None))

    model = CASES[5].build()
    trace(model, [inputs_of(CASES[5]), inputs_of(CASES[5], padded=True)], [Count()])
    assert lengths == [(0, 26, True)] * 3 + [(1, 22, False)] * 3


def test_errors():
    model = CASES[5].build()
    with pytest.raises(InputError, match="no site is called 'nowhere'"):
        trace(model, [inputs_of(CASES[5])], [Everything("nowhere")])
    with pytest.raises(InputError, match="no batches"):
        trace(model, [], [Everything("resid")])
    left = {"input_ids": torch.ones(1, 4, dtype=torch.long), "attention_mask": torch.tensor([[0, 1, 1, 1]])}
    with pytest.raises(InputError, match="pad on the right"):
        trace(model, [left], [Everything("resid")])
    short = {"input_ids": torch.ones(2, 4, dtype=torch.long), "attention_mask": torch.ones(2, 3, dtype=torch.long)}
    with pytest.raises(InputError, match="attention_mask is"):
        trace(model, [short], [Everything("resid")])
    with pytest.raises(UnknownArchitecture):
        trace(nn.Linear(2, 2), [torch.ones(1, 2)], [Everything("resid")])
    with pytest.raises(NotApplicable, match="token ids"):
        _ = Batch({}, None, 0).input_ids


def test_memory_does_not_grow_with_the_number_of_batches():
    model = CASES[5].build()
    held = []

    class Weigh(Reducer):
        sites = ("attn.pattern", "mlp.post", "logits")

        def update(self, site, layer, value, batch):
            if site == "logits":
                gc.collect()
                tensors = [t for t in gc.get_objects() if issubclass(type(t), Tensor)]
                held.append(sum(t.numel() * t.element_size() for t in tensors))

    trace(model, (inputs_of(CASES[5]) for _ in range(12)), [Weigh()])
    assert len(held) == 12
    assert held[-1] <= held[2]


def test_gradients_flow_through_an_attached_model():
    model = CASES[5].build()
    ids = inputs_of(CASES[5])["input_ids"]
    model(input_ids=ids, labels=ids).loss.backward()
    want = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with attach(model, [Everything("mlp.pre")]):
        model(input_ids=ids, labels=ids).loss.backward()
    for p, grad in zip(model.parameters(), want):
        torch.testing.assert_close(p.grad, grad)
