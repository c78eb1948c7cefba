"""What is packed comes back as it was: from memory, from a state dict, from a directory in another process."""

import copy
import json
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from assay.compress import PackedLinear, SparseTensor, UniformTensor, prune_mask, uniform_grid
from assay.compress._packed import stored_bits
from assay.compress._packed_linear import KINDS, kind_of, stored_form
from assay.core.errors import CheckpointError, InputError, NotApplicable


def draw(seed=0, out=12, n_in=40):
    return torch.randn(out, n_in, generator=torch.Generator().manual_seed(seed))


def uniform(w, **options):
    grid = uniform_grid(w, scale_dtype=torch.bfloat16, **options)
    return UniformTensor.of(grid.nearest(w), grid), grid.nearest(w)


def sparse(w, sparsity=0.5, **options):
    grid = uniform_grid(w, scale_dtype=torch.bfloat16, **options)
    mask = prune_mask(w, sparsity=sparsity, scorer="magnitude")
    return SparseTensor.of(grid.nearest(w) * mask, mask, grid), grid.nearest(w) * mask


MAKERS = {
    "whole": lambda w: uniform(w),
    "asymmetric": lambda w: uniform(w, symmetric=False, group_size=16),
    "three bits": lambda w: uniform(w, bits=3, group_size=24),
    "sparse": lambda w: sparse(w),
    "sparse groups": lambda w: sparse(w, bits=5, group_size=16),
}
each = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


# ---- tensors -----------------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(
    seed=st.integers(0, 10**6),
    out=st.integers(1, 5),
    n_in=st.integers(1, 33),
    bits=st.integers(2, 8),
    group=st.sampled_from([None, 1, 8, 13]),
    symmetric=st.booleans(),
)
def test_a_whole_matrix_comes_back(seed, out, n_in, bits, group, symmetric):
    packed, values = uniform(draw(seed, out, n_in), bits=bits, group_size=group, symmetric=symmetric)
    assert torch.equal(packed.dequantize(), values)
    assert torch.equal(packed.grid.nearest(values), values)


@settings(max_examples=40)
@given(
    seed=st.integers(0, 10**6),
    out=st.integers(1, 5),
    n_in=st.integers(1, 33),
    bits=st.integers(2, 8),
    group=st.sampled_from([None, 8, 13]),
    share=st.floats(0, 1),
)
def test_a_sparse_matrix_comes_back(seed, out, n_in, bits, group, share):
    w = draw(seed, out, n_in)
    grid = uniform_grid(w, bits=bits, group_size=group, scale_dtype=torch.bfloat16)
    mask = torch.rand(w.shape, generator=torch.Generator().manual_seed(seed)) < share
    packed = SparseTensor.of(w, mask, grid)
    assert torch.equal(packed.dequantize(), grid.nearest(w) * mask)
    assert packed.sparsity == pytest.approx(1 - float(mask.float().mean()), abs=1e-6)
    assert packed.kept == int(mask.sum(1).max())


@each
def test_rows_are_those_of_the_whole(make):
    packed, values = make(draw())
    assert torch.equal(packed.rows(3, 7), values[3:7])
    assert packed.rows(4, 4).shape == (0, 40)


@each
def test_stored_and_read_again(make):
    packed, values = make(draw())
    again = type(packed).from_stored(packed.tensors(), packed.settings(), packed.shape)
    assert torch.equal(again.dequantize(), values)
    assert KINDS[kind_of(packed)] is type(packed)


def test_bits_by_hand():
    packed, _ = uniform(draw(n_in=64), group_size=32)
    assert packed.bits_per_weight == 4 + 16 / 32 == stored_bits(12, 64, 4, 32)
    packed, _ = uniform(draw(n_in=64), group_size=32, symmetric=False)
    assert packed.bits_per_weight == 4 + 20 / 32
    packed, _ = sparse(draw(n_in=64))
    assert packed.bits_per_weight == 0.5 * 4 + 1 + 16 / 64 == stored_bits(12, 64, 4, 64, kept=32)


def test_nothing_kept():
    packed, values = sparse(draw(), sparsity=1.0)
    assert packed.codes.shape == (12, 0)
    assert (packed.dequantize() == 0).all()
    assert (values == 0).all()
    assert packed.sparsity == 1.0


def test_a_transposed_matrix_packs_as_its_copy():
    w = draw().T
    for packed, same in (
        (uniform(w)[0], uniform(w.contiguous())[0]),
        (sparse(w)[0], sparse(w.contiguous())[0]),
    ):
        for name, tensor in packed.tensors().items():
            assert torch.equal(tensor, same.tensors()[name]), name


# ---- the layer ---------------------------------------------------------------------------------------------------


def layer_of(make, bias=True, seed=0):
    packed, values = make(draw(seed))
    b = torch.randn(12, generator=torch.Generator().manual_seed(9)) if bias else None
    return PackedLinear.of(packed, b), values, b


@each
@pytest.mark.parametrize("rows", [1, 3, 20])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.bfloat16, 2e-2), (torch.float16, 3e-3), (torch.float32, 1e-5), (torch.float64, 1e-12)],
)
def test_it_computes_what_a_linear_layer_does(make, rows, bias, dtype, tolerance):
    layer, values, b = layer_of(make, bias)
    x = torch.randn(2, rows, 40, generator=torch.Generator().manual_seed(1)).to(dtype)
    out = layer(x)
    expected = nn.functional.linear(x.double(), values.double(), None if b is None else b.double())
    assert out.dtype == dtype
    assert out.shape == (2, rows, 12)
    assert torch.allclose(out.double(), expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))


@each
def test_the_gradient_reaches_the_input_and_no_weight(make):
    layer, values, _ = layer_of(make)
    x = torch.randn(5, 40, dtype=torch.float64, requires_grad=True)
    layer(x).square().sum().backward()
    y = x.detach().clone().requires_grad_(True)
    nn.functional.linear(y, values.double(), layer.bias.double()).square().sum().backward()
    assert torch.allclose(x.grad, y.grad)
    assert not any(p.requires_grad for p in layer.parameters())
    assert torch.autograd.gradcheck(layer, (x.detach()[:2].requires_grad_(True),))


@each
def test_autocast_gives_its_type(make):
    layer, values, _ = layer_of(make)
    x = torch.randn(20, 40, generator=torch.Generator().manual_seed(1), requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(x)
        assert out.dtype == nn.functional.linear(x, values).dtype == torch.bfloat16
    out.float().sum().backward()
    assert x.grad.dtype == torch.float32
    assert torch.allclose(out.float(), nn.functional.linear(x, values, layer.bias), atol=0.1, rtol=0.05)


@each
def test_an_input_that_is_not_contiguous(make):
    layer, _, _ = layer_of(make)
    x = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
    assert torch.equal(layer(x.T), layer(x.T.contiguous()))
    wide = torch.randn(6, 80, generator=torch.Generator().manual_seed(1))
    assert torch.equal(layer(wide[:, ::2]), layer(wide[:, ::2].contiguous()))
    assert layer(wide[:0, ::2]).shape == (0, 12)
    assert torch.equal(layer(wide[0, ::2]), layer(wide[:1, ::2])[0])


@each
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_moving_to_another_type_rounds_nothing(make, dtype):
    layer, values, _ = layer_of(make)
    layer.to(dtype)
    assert torch.equal(layer.weight, values)
    assert layer.bias.dtype == dtype


@each
def test_a_state_dict_goes_from_layer_to_layer(make):
    layer, values, b = layer_of(make)
    other, _, _ = layer_of(make, seed=5)
    assert not torch.equal(other.weight, values)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other.weight, values)
    assert torch.equal(other.bias, b)


@each
def test_a_layer_is_made_from_its_description(make):
    layer, values, b = layer_of(make)
    tensors, description = stored_form(layer.packed)
    description = json.loads(json.dumps(description))
    assert all(not t.dtype.is_floating_point for t in tensors.values())
    empty = PackedLinear.empty(description, nn.Parameter(torch.empty(12, device="meta")))
    assert {n: (t.shape, t.dtype) for n, t in empty.state_dict().items()} == {
        n: (t.shape, t.dtype) for n, t in layer.state_dict().items()
    }
    empty.load_state_dict(layer.state_dict(), assign=True)
    assert torch.equal(empty.weight, values)
    assert torch.equal(empty.bias, b)


@each
def test_copies_are_copies(make):
    layer, values, _ = layer_of(make)
    other = copy.deepcopy(layer)
    next(iter(layer.buffers())).zero_()
    assert torch.equal(other.weight, values)


def test_it_counts_as_a_linear_layer_and_says_what_it_is():
    layer, _, _ = layer_of(MAKERS["sparse"])
    assert isinstance(layer, nn.Linear)
    assert "kind=SparseTensor" in repr(layer)
    assert (layer.in_features, layer.out_features) == (40, 12)


def test_what_is_added_to_a_decoded_weight_is_refused_and_not_lost():
    layer, values, _ = layer_of(MAKERS["sparse"])
    with pytest.raises(NotApplicable, match="cannot be assigned"):
        layer.weight.data += 1.0
    assert torch.equal(layer.weight, values)


# ---- damage ------------------------------------------------------------------------------------------------------


def broken(change):
    tensors, description = stored_form(sparse(draw())[0])
    description = json.loads(json.dumps(description))
    change(description)
    return tensors, description


DAMAGE = {
    "no kind": lambda d: d.pop("kind"),
    "an unknown kind": lambda d: d.update(kind="zip"),
    "no shape": lambda d: d.pop("shape"),
    "a shape of three": lambda d: d.update(shape=[1, 2, 3]),
    "a shape of words": lambda d: d.update(shape=["a", "b"]),
    "no settings": lambda d: d.pop("settings"),
    "a setting too few": lambda d: d["settings"].pop("bits"),
    "a setting too many": lambda d: d["settings"].update(colour=3),
    "settings of words": lambda d: d["settings"].update(bits="four"),
    "an unknown type": lambda d: d["tensors"]["codes"].__setitem__(0, "uint9"),
    "a name of torch that is no type": lambda d: d["tensors"]["codes"].__setitem__(0, "load"),
    "tensors that are none": lambda d: d.update(tensors=3),
    "a tensor too few": lambda d: d["tensors"].pop("scale"),
}


@pytest.mark.parametrize("change", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_description_is_refused(change):
    tensors, description = broken(change)
    named = description.get("tensors")
    tensors = {n: t for n, t in tensors.items() if n in named} if isinstance(named, dict) else tensors
    with pytest.raises(CheckpointError, match="description of a packed layer is damaged"):
        PackedLinear(tensors, description)
    with pytest.raises(CheckpointError, match="description of a packed layer is damaged"):
        PackedLinear.empty(description, None)


def test_a_negative_size_is_refused():
    _, description = broken(lambda d: d["tensors"]["codes"].__setitem__(1, -4))
    with pytest.raises(CheckpointError, match="damaged"):
        PackedLinear.empty(description, None)


def test_a_bias_that_does_not_fit():
    with pytest.raises(InputError, match=r"bias has shape \(5,\): the weight needs \(12,\)"):
        PackedLinear.of(uniform(draw())[0], torch.zeros(5))


def test_an_input_of_another_width():
    layer, _, _ = layer_of(MAKERS["whole"])
    with pytest.raises(RuntimeError):
        layer(torch.ones(2, 39))


# ---- a whole model -----------------------------------------------------------------------------------------------


def test_a_saved_model_is_read_in_a_fresh_process(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    from assay.compress import obr

    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=40, n_positions=32, n_embd=24, n_layer=2, n_head=3, bos_token_id=0, eos_token_id=0)
    ).eval()
    ids = torch.arange(64).view(2, 32) % 40
    model, _ = obr(model, ids)
    model.save_pretrained(tmp_path / "model")
    torch.save((ids, model(ids).logits.detach()), tmp_path / "expected.pt")
    code = f"""
import assay, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained({str(tmp_path / "model")!r}).eval()
ids, expected = torch.load({str(tmp_path / "expected.pt")!r})
assert type(model.transformer.h[0].attn.c_attn).__name__ == "PackedLinear"
assert torch.equal(model(ids).logits, expected)
model.save_pretrained({str(tmp_path / "again")!r})
again = AutoModelForCausalLM.from_pretrained({str(tmp_path / "again")!r}).eval()
assert torch.equal(again(ids).logits, expected)
print("equal")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "equal", done.stderr[-2000:]
