"""Block by block, with the model's own arithmetic: nothing changed gives the model's own states and inputs."""

import gc

import pytest
import torch
import transformers as hf
from torch import nn

from assay.compress._blockwise import linear_layers, matrix
from assay.compress._sequential import Activations, Sequential, put
from assay.core.anatomy import anatomy
from assay.core.errors import InputError

TOKENS, WINDOWS, VOCAB = 12, 3, 40
SIZE = {"vocab_size": VOCAB, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
ENDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}

MODELS = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SIZE, **ENDS, intermediate_size=40, num_key_value_heads=2)),
    "llama, eager": lambda: hf.LlamaForCausalLM(
        hf.LlamaConfig(**SIZE, **ENDS, intermediate_size=40, attention_bias=True, attn_implementation="eager")
    ),
    "gpt2": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(vocab_size=VOCAB, n_positions=32, n_embd=24, n_layer=2, n_head=4, **ENDS)
    ),
    "gemma3": lambda: hf.Gemma3ForCausalLM(
        hf.Gemma3TextConfig(
            **SIZE,
            **ENDS,
            intermediate_size=40,
            num_key_value_heads=2,
            head_dim=8,
            sliding_window=4,
            layer_types=["sliding_attention", "full_attention"],
        )
    ),
    "neox, parallel": lambda: hf.GPTNeoXForCausalLM(
        hf.GPTNeoXConfig(**SIZE, **ENDS, intermediate_size=40, use_parallel_residual=True)
    ),
    "falcon, one norm for both": lambda: hf.FalconForCausalLM(
        hf.FalconConfig(**SIZE, **ENDS, ffn_hidden_size=40, parallel_attn=True, multi_query=True)
    ),
    "phi3, fused": lambda: hf.Phi3ForCausalLM(
        hf.Phi3Config(**SIZE, **ENDS, intermediate_size=40, num_key_value_heads=2)
    ),
    "mixtral": lambda: hf.MixtralForCausalLM(
        hf.MixtralConfig(**SIZE, **ENDS, intermediate_size=40, num_key_value_heads=2, num_local_experts=3)
    ),
    "qwen2_moe, a shared expert": lambda: hf.Qwen2MoeForCausalLM(
        hf.Qwen2MoeConfig(
            **SIZE,
            **ENDS,
            moe_intermediate_size=20,
            shared_expert_intermediate_size=40,
            num_key_value_heads=2,
            num_experts=3,
            num_experts_per_tok=2,
        )
    ),
}
every = pytest.mark.parametrize("name", MODELS)


def make(name):
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    # Larger weights than at the start of training, so that an error anywhere would show.
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.mul_(3)
    return model


def ids():
    return torch.randint(3, VOCAB, (WINDOWS, TOKENS), generator=torch.Generator().manual_seed(1))


class Same:
    def __init__(self, dense):
        self.dense = dense


class Keep:
    """A rule that notes what it was given and changes nothing, or what `change` says."""

    def __init__(self, change=None):
        self.hessians, self.weights, self.change = {}, {}, change or (lambda name, w: w)

    def __call__(self, name, weight, hessian):
        self.hessians[name] = None if hessian is None else hessian.clone()
        self.weights[name] = weight.clone()
        return Same(self.change(name, weight.clone()))


def direct(model):
    """Second moments of every layer's inputs in the blocks, and the last hidden states."""
    found, sums, counts, handles = anatomy(model), {}, {}, []
    prefixes = tuple(f"{b.path}." for b in found.blocks)

    def see(name):
        def hook(_module, args):
            x = args[0].flatten(0, -2).double()
            sums[name] = sums.get(name, 0) + x.T @ x
            counts[name] = counts.get(name, 0) + len(x)

        return hook

    for name, layer in linear_layers(model, ())[0].items():
        if name.startswith(prefixes):
            handles.append(layer.register_forward_pre_hook(see(name)))
    with torch.no_grad():
        last = torch.cat([found.backbone(row[None], use_cache=False)[0] for row in ids()])
    for handle in handles:
        handle.remove()
    return {n: (s / counts[n]).float() for n, s in sums.items()}, last


def final(run, found):
    hidden = torch.cat([run._hidden[i] for i in range(WINDOWS)])
    with torch.no_grad():
        return hidden if found.final_norm is None else found.final_norm(hidden)


@every
def test_nothing_changed_gives_the_models_own_states_and_hessians(name):
    model = make(name)
    found, keep = anatomy(model), Keep()
    run = Sequential(found, ids(), keep)
    outcomes = list(run.run())
    hessians, last = direct(model)
    assert [o.index for o in outcomes] == [0, 1]
    assert set(keep.hessians) == set(hessians)
    assert {n for o in outcomes for n in o.layers} == set(hessians)
    for layer, expected in hessians.items():
        assert torch.allclose(keep.hessians[layer], expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max())), layer
        assert torch.equal(keep.weights[layer], matrix(model.get_submodule(layer))), layer
    assert torch.allclose(final(run, found), last, rtol=1e-4, atol=1e-5)


@every
def test_later_layers_see_what_was_changed_before_them(name):
    """The Hessians are those of the model with every change made, for each layer's inputs depend on earlier ones only."""
    model = make(name)

    def change(layer, w):
        g = torch.Generator().manual_seed(len(layer) + w.shape[0])
        return w + 0.3 * w.std() * torch.randn(w.shape, generator=g)

    keep, found = Keep(change), anatomy(model)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    run = Sequential(found, ids(), keep)
    new = {n: made.dense for o in run.run() for n, made in o.layers.items()}
    assert all(torch.equal(before[n], p) for n, p in model.named_parameters())

    plain = direct(model)[0]
    for layer, dense in new.items():
        put(model.get_submodule(layer), dense)
    hessians, last = direct(model)
    for layer, expected in hessians.items():
        assert torch.allclose(keep.hessians[layer], expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max())), layer
    assert torch.allclose(final(run, found), last, rtol=1e-4, atol=1e-5)
    moved = [n for n in hessians if not torch.allclose(plain[n], hessians[n], rtol=1e-3)]
    assert len(moved) >= len(hessians) // 2


@every
def test_on_disk_the_numbers_are_the_same(name, tmp_path):
    model = make(name)
    kept = []
    for memory in (2 << 30, 0):
        keep, found = Keep(), anatomy(model)
        run = Sequential(found, ids(), keep, memory=memory, folder=tmp_path)
        list(run.run())
        if memory == 0:
            assert run._hidden._spill is not None
        kept.append((keep.hessians, final(run, found)))
        del run
    gc.collect()
    assert not list(tmp_path.iterdir())
    for layer, hessian in kept[0][0].items():
        assert torch.equal(hessian, kept[1][0][layer])
    assert torch.equal(kept[0][1], kept[1][1])


@every
def test_a_block_that_was_done_is_only_passed_through(name):
    model = make(name)
    whole = Keep(lambda _, w: 0.7 * w)
    outcomes = list(Sequential(anatomy(model), ids(), whole).run())
    done = {0: {n: made.dense for n, made in outcomes[0].layers.items()}}
    rest = Keep(lambda _, w: 0.7 * w)
    again = list(Sequential(anatomy(model), ids(), rest).run(done))
    assert [o.index for o in again] == [1]
    assert set(rest.hessians) == set(outcomes[1].layers)
    for layer in rest.hessians:
        assert torch.allclose(rest.hessians[layer], whole.hessians[layer], rtol=1e-5, atol=1e-7)


def test_layers_that_share_an_input_are_done_in_the_order_of_the_paper():
    keep = Keep()
    list(Sequential(anatomy(make("llama")), ids(), keep).run())
    order = [n.rpartition(".")[2] for n in keep.hessians if ".layers.0." in n]
    assert [set(order[:3]), order[3], set(order[4:6]), order[6]] == [
        {"q_proj", "k_proj", "v_proj"},
        "o_proj",
        {"gate_proj", "up_proj"},
        "down_proj",
    ]


def test_names_that_are_skipped_are_left_with_the_reason():
    keep = Keep()
    outcomes = list(
        Sequential(anatomy(make("llama")), ids(), keep, skip=("down_proj", "model.layers.1.self_attn")).run()
    )
    assert not any("down_proj" in n or "layers.1.self_attn" in n for n in keep.hessians)
    assert outcomes[0].left == {"model.layers.0.mlp.down_proj": "skipped by name"}
    assert len(outcomes[1].left) == 5


def test_too_few_inputs_give_no_hessian():
    keep = Keep()
    list(Sequential(anatomy(make("llama")), ids(), keep, least_rows=WINDOWS * TOKENS + 1).run())
    assert all(h is None for h in keep.hessians.values())


def test_the_model_and_its_modes_are_as_they_were():
    model = make("gpt2")
    model.train()
    model.transformer.h[1].eval()
    modes = {n: m.training for n, m in model.named_modules()}
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    list(Sequential(anatomy(model), ids(), Keep(lambda _, w: 0 * w)).run())
    assert {n: m.training for n, m in model.named_modules()} == modes
    assert all(torch.equal(before[n], p) for n, p in model.named_parameters())
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


def test_gradients_are_on_between_blocks():
    run = Sequential(anatomy(make("llama")), ids(), Keep()).run()
    next(run)
    assert torch.is_grad_enabled()
    run.close()
    assert torch.is_grad_enabled()


def test_a_model_in_bfloat16_is_worked_on_in_float32():
    model = make("llama").to(torch.bfloat16)
    keep = Keep()
    list(Sequential(anatomy(model), ids(), keep).run())
    assert all(h.dtype == torch.float32 for h in keep.hessians.values())
    assert all(w.dtype == torch.float32 for w in keep.weights.values())
    expected, _ = direct(model.float())
    first = "model.layers.0.self_attn.q_proj"
    assert torch.allclose(keep.hessians[first], expected[first], rtol=2e-2, atol=1e-3)


def test_activations_that_are_not_finite_are_named():
    model = make("llama")
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = torch.inf
    with pytest.raises(InputError, match=r"model\.layers\.0\.mlp\.down_proj is given activations that are not finite"):
        list(Sequential(anatomy(model), ids(), Keep()).run())


def test_no_windows():
    with pytest.raises(InputError, match="there are no windows of text to calibrate on"):
        Sequential(anatomy(make("llama")), torch.zeros(0, 8, dtype=torch.int64), Keep())


def test_a_layer_that_is_not_reached_has_no_hessian():
    model = make("llama")
    model.model.layers[1].mlp.spare = nn.Linear(24, 8)
    keep = Keep()
    list(Sequential(anatomy(model), ids(), keep).run())
    assert keep.hessians["model.layers.1.mlp.spare"] is None


def test_progress_is_told_of_every_block():
    told = []
    list(Sequential(anatomy(make("llama")), ids(), Keep(), progress=lambda *a: told.append(a)).run())
    assert told == [(0, 2, "blocks"), (1, 2, "blocks"), (2, 2, "blocks")]


# ---- waiting tensors ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_tensors_come_back_from_memory_and_disk(dtype, tmp_path):
    waiting = Activations(memory=100 * dtype.itemsize, folder=tmp_path)
    values = [torch.randn(10, 8, generator=torch.Generator().manual_seed(i)).to(dtype).T for i in range(3)]
    for i, value in enumerate(values):
        waiting[i] = value
    assert len(list(tmp_path.rglob("*"))) == 3  # a folder and the two that had no room
    assert all(torch.equal(waiting[i], v) for i, v in enumerate(values))


def test_what_was_read_survives_what_is_written_in_its_place(tmp_path):
    waiting = Activations(memory=0, folder=tmp_path)
    waiting[0] = torch.arange(100_000.0)
    read = waiting[0]
    waiting[0] = torch.zeros(3)
    assert torch.equal(read, torch.arange(100_000.0))
    assert torch.equal(waiting[0], torch.zeros(3))


def test_a_value_may_move_between_memory_and_disk(tmp_path):
    waiting = Activations(memory=40, folder=tmp_path)
    for n in (5, 50, 5):
        waiting[0] = torch.full((n,), float(n))
        assert torch.equal(waiting[0], torch.full((n,), float(n)))
