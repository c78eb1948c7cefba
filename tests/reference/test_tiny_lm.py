import hashlib
import importlib.util
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from assay.core.subject import recognise
from assay.core.text import token_windows
from assay.reference import _text, builtin, tiny_lm

HEAD_DIM, HEADS = 16, 8
TRUTH = tiny_lm.GROUND_TRUTH
PERIOD = 60


def rows(head):
    return slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(tiny_lm.load(), attn_implementation="eager").eval()


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(tiny_lm.load())


@pytest.fixture(scope="module")
def state():
    return load_file(tiny_lm.load() / "model.safetensors")


@pytest.fixture(scope="module")
def repeated():
    """Random sequences that stand three times in a row, after `<s>`."""
    ids = torch.randint(3, 1024, (8, PERIOD), generator=torch.Generator().manual_seed(11))
    return F.pad(ids.repeat(1, 3), (1, 0), value=0)


@pytest.fixture(scope="module")
def attention(model, repeated):
    """Attention on the repeated sequences: layers, sequences, heads, queries, keys."""
    with torch.no_grad():
        return torch.stack(model(repeated, output_attentions=True).attentions)


def test_the_shipped_weights_are_those_of_the_record():
    file = tiny_lm.load() / "model.safetensors"
    assert hashlib.sha256(file.read_bytes()).hexdigest() == tiny_lm.WEIGHTS_SHA256
    assert file.stat().st_size < 4_000_000


def test_it_is_a_built_in_checkpoint_that_every_lens_takes():
    assert builtin("builtin:tiny-lm") is tiny_lm
    subject = recognise(tiny_lm.load())
    assert (subject.kind, subject.model_type) == (tiny_lm.KIND, "llama")
    assert {"causal", "text", "rotary", "attention", "mlp"} <= subject.facts


def test_the_parameters_are_as_many_as_it_says(model):
    assert sum(p.numel() for p in model.parameters()) == 789_632
    assert "789,632" in tiny_lm.ABOUT


def test_the_tokenizer_gives_every_text_back_after_its_first_token(tokenizer):
    text = "Emma's 12 £ — naïve\n\n  def f(x):\n\treturn x  # ∞ 🙂"
    ids = tokenizer(text).input_ids
    assert ids[0] == tokenizer.bos_token_id == 0
    assert tokenizer.decode(ids[1:]) == text
    assert max(ids) < len(tokenizer) == 1024


@pytest.mark.parametrize("name", _text.NAMES)
@torch.no_grad()
def test_held_out_perplexity_is_that_of_the_record(model, tokenizer, name):
    text = _text.sample(name)
    windows = token_windows(tokenizer, [text], tokens=10**6, context=256)
    nats = 0.0
    for ids in windows.batches(16):
        nats += F.cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum").item()
    predicted = windows.input_ids[:, 1:]
    per_token, per_character = tiny_lm.HELD_OUT_PERPLEXITY[name]
    assert math.exp(nats / predicted.numel()) == pytest.approx(per_token, rel=1e-3)
    characters = len(tokenizer.decode(predicted.flatten()))
    assert math.exp(nats / characters) == pytest.approx(per_character, rel=1e-3)


@torch.no_grad()
def test_it_beats_the_tokens_own_frequencies_by_far(model, tokenizer):
    ids = token_windows(tokenizer, [_text.sample()], tokens=8192, context=256).input_ids
    counts = torch.bincount(torch.tensor(tokenizer(_text.training_text()[:300_000]).input_ids), minlength=1024)
    unigram = -((counts + 1) / (counts + 1).sum()).log()[ids[:, 1:]].mean()
    loss = F.cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert loss < unigram - 1.5


def test_the_zero_head_has_no_values(state):
    layer, head = TRUTH["zero_value_head"]
    value = f"model.layers.{layer}.self_attn.v_proj"
    assert not state[f"{value}.weight"][rows(head)].any()
    assert not state[f"{value}.bias"][rows(head)].any()


def test_no_other_head_is_without_values(state):
    norms = torch.stack(
        [state[f"model.layers.{i}.self_attn.v_proj.weight"].view(HEADS, -1).norm(dim=1) for i in range(4)]
    )
    assert (norms == 0).nonzero().tolist() == [list(TRUTH["zero_value_head"])]


@torch.no_grad()
def test_removing_the_zero_head_changes_no_logit(model, repeated):
    layer, head = TRUTH["zero_value_head"]
    weight = model.model.layers[layer].self_attn.o_proj.weight
    before = model(repeated).logits
    kept = weight[:, rows(head)].clone()
    assert kept.any()
    weight[:, rows(head)] = 0
    after = model(repeated).logits
    weight[:, rows(head)] = kept
    assert torch.equal(before, after)


def test_the_positional_head_reads_no_token(state):
    layer, head = TRUTH["positional_head"]
    for name in ("q_proj", "k_proj"):
        assert not state[f"model.layers.{layer}.self_attn.{name}.weight"][rows(head)].any()
        assert state[f"model.layers.{layer}.self_attn.{name}.bias"][rows(head)].any()


def test_the_positional_head_attends_alike_whatever_the_tokens(attention):
    layer, head = TRUTH["positional_head"]
    spread = (attention - attention[:, :1]).abs().amax((1, 3, 4))
    assert spread[layer, head] < 1e-6
    spread[layer, head] = 1.0
    assert spread.min() > 1e-3


def test_the_positional_head_attends_to_its_offset(attention):
    layer, head = TRUTH["positional_head"]
    pattern = attention[layer, 0, head]
    assert pattern.diagonal(-TRUTH["positional_offset"]).min() > 0.98


def test_the_positional_head_follows_the_planted_formula(attention):
    layer, head = TRUTH["positional_head"]
    theta = 100_000.0 ** (-torch.arange(0, HEAD_DIM, 2, dtype=torch.float64) / HEAD_DIM)
    offset = torch.arange(attention.shape[-1], dtype=torch.float64)
    logits = 12.0 * torch.cos(theta[:, None] * (offset - TRUTH["positional_offset"])).sum(0)
    expected = torch.softmax(logits, 0).flip(0)
    torch.testing.assert_close(attention[layer, 0, head, -1].double(), expected, atol=1e-4, rtol=0)


def test_the_induction_head_uses_slow_rotary_pairs_only(state):
    layer, head = TRUTH["induction_head"]
    fast = torch.arange(HEAD_DIM) % (HEAD_DIM // 2) < TRUTH["induction_fast_pairs"]
    for name in ("q_proj", "k_proj"):
        weight = state[f"model.layers.{layer}.self_attn.{name}.weight"][rows(head)]
        bias = state[f"model.layers.{layer}.self_attn.{name}.bias"][rows(head)]
        assert not weight[fast].any()
        assert not bias[fast].any()
        assert weight[~fast].norm(dim=1).min() > 0


def test_the_induction_head_attends_to_what_followed_before(attention):
    layer, head = TRUTH["induction_head"]
    query = torch.arange(1 + PERIOD, 1 + 2 * PERIOD)
    score = attention[..., query, query - PERIOD + 1].mean((1, 3))
    assert score[layer, head] > 0.5
    score[layer, head] = 0.0
    assert score.max() < 0.25


@torch.no_grad()
def test_the_model_predicts_a_repetition(model, repeated):
    right = (model(repeated).logits[:, :-1].argmax(-1) == repeated[:, 1:]).float()
    assert right[:, : PERIOD - 1].mean() < 0.05
    assert right[:, PERIOD + 1 :].mean() > 0.5


@torch.no_grad()
def test_the_induction_head_is_what_predicts_it(model, repeated):
    layer, head = TRUTH["induction_head"]
    weight = model.model.layers[layer].self_attn.o_proj.weight
    kept = weight[:, rows(head)].clone()
    weight[:, rows(head)] = 0
    right = (model(repeated).logits[:, PERIOD + 1 : -1].argmax(-1) == repeated[:, PERIOD + 2 :]).float()
    weight[:, rows(head)] = kept
    assert right.mean() < 0.1


def test_one_channel_is_dead_and_no_other(state):
    dead = []
    for i in range(4):
        mlp = f"model.layers.{i}.mlp"
        into = state[f"{mlp}.gate_proj.weight"].norm(dim=1) * state[f"{mlp}.up_proj.weight"].norm(dim=1)
        dead += [
            (i, c) for c in (into * state[f"{mlp}.down_proj.weight"].norm(dim=0) == 0).nonzero().flatten().tolist()
        ]
    assert dead == [TRUTH["dead_channel"]]
    layer, channel = TRUTH["dead_channel"]
    for name, index in (("gate_proj", channel), ("up_proj", channel), ("down_proj", (slice(None), channel))):
        assert not state[f"model.layers.{layer}.mlp.{name}.weight"][index].any()


@pytest.fixture(scope="module")
def script():
    path = Path(__file__).parents[2] / "scripts" / "make_tiny_lm.py"
    spec = importlib.util.spec_from_file_location("make_tiny_lm", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_training_is_deterministic_and_leaves_the_plants_alone(script):
    stream = torch.randint(3, 1024, (2000,), generator=torch.Generator().manual_seed(0))
    states = []
    for _ in range(2):
        torch.manual_seed(0)
        model = script.LlamaForCausalLM(script.CONFIG)
        free = script.plant(model)
        generator = torch.Generator().manual_seed(0)
        script.wire(model, free, generator)
        before = {name: model.get_parameter(name).detach().clone() for name in free}
        script.train(model, [stream, stream], free, steps=2, generator=generator)
        for name, mask in free.items():
            changed = model.get_parameter(name) != before[name]
            assert not changed[mask == 0].any(), name
            assert changed.any(), name
        states.append(model.state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_the_tokenizer_is_deterministic(script):
    texts = _text.sample().split("\n\n")
    first, second = (script.train_tokenizer(texts).backend_tokenizer.to_str() for _ in range(2))
    assert first == second
