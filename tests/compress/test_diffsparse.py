"""DiffSparse: the exact budget, the choice of tokens, the cache against the plain model, gradients, and learning."""

import itertools
import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from assay.compress import (
    BlockSpec,
    DiffSparseResult,
    Importance,
    TokenCache,
    allocate_sparsity,
    diffsparse,
    hand_keep,
    token_importance,
)
from assay.compress import _diffsparse as method
from assay.core.errors import InputError, NotApplicable
from assay.reference.tiny_dit import DiTConfig, TinyDiT, draw_noise, euler, open_model
from assay.trials.compress import diffsparse as trial

CARD = torch.tensor([[3.0, 1, 0], [5, 2, 0], [1, 0.5, 0]])
LEVELS = (0.0, 0.25, 0.5, 0.75, 1.0)
RULE = Importance()


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def specs(model):
    return [BlockSpec(b.mlp, b.attention, attend=b.attention.attend) for b in model.blocks]


@pytest.fixture(scope="module")
def small():
    """An untrained transformer of 2 blocks and 16 tokens whose branches all act."""
    torch.manual_seed(0)
    model = TinyDiT(DiTConfig(image_size=4, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_labels=3))
    for parameter in model.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.3)
    return model.eval().requires_grad_(False)


def start(model, n=3, seed=0, dtype=torch.float32):
    noise, label = draw_noise(n, torch.Generator().manual_seed(seed), model.config)
    return noise.to(dtype), label


@torch.no_grad()
def sparse(model, keep, noise, label, rule=RULE):
    with TokenCache(model, specs(model), keep, rule):
        return euler(model, noise, label, len(keep))


# ---- the budget --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("budget", "table", "cost"), [(3, [1, 2, 0], 2), (6, [2, 2, 2], 0), (0, [0, 0, 0], 9)])
def test_three_layers_by_hand(budget, table, cost):
    found = allocate_sparsity(CARD, (0, 1, 2), budget)
    assert found.tolist() == table
    assert CARD.gather(1, found[:, None]).sum() == cost


def brute_force(cost, units, budget, weights):
    best = math.inf
    for choice in itertools.product(range(len(units)), repeat=len(cost)):
        spent = sum(w * units[s] for w, s in zip(weights, choice))
        if spent == budget:
            best = min(best, sum(cost[i][s] for i, s in enumerate(choice)))
    return best


def test_it_equals_brute_force_on_200_problems():
    rng = np.random.default_rng(0)
    for _ in range(200):
        cost, budget = rng.normal(size=(5, 4)), int(rng.integers(0, 16))
        found = allocate_sparsity(torch.from_numpy(cost), (0, 1, 2, 3), budget)
        assert found.sum() == budget
        total = cost[np.arange(5), found.numpy()].sum()
        assert total == pytest.approx(brute_force(cost, (0, 1, 2, 3), budget, [1] * 5), abs=1e-12)


@given(st.data())
def test_uneven_units_and_weights_equal_brute_force(data):
    units = tuple(sorted(data.draw(st.sets(st.integers(0, 7), min_size=2, max_size=4))))
    weights = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    # Whole numbers, so that sums are exact and ties are many.
    cost = data.draw(
        st.lists(
            st.lists(st.integers(-5, 5), min_size=len(units), max_size=len(units)),
            min_size=len(weights),
            max_size=len(weights),
        )
    )
    budget = data.draw(st.integers(units[0] * sum(weights), units[-1] * sum(weights)))
    found = allocate_sparsity(torch.tensor(cost).double(), units, budget, weights).tolist()
    spent = sum(w * units[s] for w, s in zip(weights, found))
    reachable = {
        sum(w * units[s] for w, s in zip(weights, choice))
        for choice in itertools.product(range(len(units)), repeat=len(weights))
    }
    assert spent == max(r for r in reachable if r <= budget)
    assert sum(cost[i][s] for i, s in enumerate(found)) == brute_force(cost, units, spent, weights)


def test_ties_take_the_lowest_level_of_the_last_cell():
    assert allocate_sparsity(torch.zeros(4, 3), (0, 1, 2), 4).tolist() == [2, 2, 0, 0]


def test_a_forbidden_level_is_not_taken():
    cost = torch.tensor([[0.0, 0, math.inf], [0, 9, 9]])
    assert allocate_sparsity(cost, (0, 1, 2), 3).tolist() == [1, 2]
    with pytest.raises(InputError, match="no choice of levels has a finite cost within 0 units"):
        allocate_sparsity(torch.tensor([[math.inf, 0.0]]), (0, 1), 0)


def test_a_constant_added_per_cell_or_per_unit_changes_nothing():
    cost, units = normal(12, 5, dtype=torch.float64), torch.tensor([0, 1, 2, 3, 7])
    table = allocate_sparsity(cost, units.tolist(), 30)
    assert torch.equal(allocate_sparsity(cost + normal(12, 1, seed=1), units.tolist(), 30), table)
    assert torch.equal(allocate_sparsity(cost + 0.7 * units, units.tolist(), 30), table)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_costs_of_any_dtype_and_layout(dtype):
    cost = CARD.to(dtype).T.contiguous().T
    assert not cost.is_contiguous()
    assert allocate_sparsity(cost, (0, 1, 2), 3).tolist() == [1, 2, 0]


def test_a_table_of_28_blocks_and_20_steps_takes_a_moment():
    cost = normal(560, 5, seed=2)
    assert allocate_sparsity(cost, range(5), 1200).sum() == 1200


@pytest.mark.parametrize("cycle", [None, 2, 3, 4, 5])
def test_hand_tables_spend_the_budget(cycle):
    units = torch.tensor([0, 1, 2, 3, 7])
    keep = hand_keep(10, 4, 150, units=units.tolist(), cycle=cycle)
    assert units[(keep * 4).long()].sum() == 150
    full = torch.arange(10) % (cycle or 10) == 0
    assert (keep[full] == 1).all()


def test_hand_tables_spread_levels_evenly():
    keep = hand_keep(9, 1, 4 + 12, cycle=None).flatten()
    assert keep[0] == 1
    assert sorted(keep[1:].tolist()) == [0.25] * 4 + [0.5] * 4
    assert (keep[1:].view(4, 2).sum(1) == 0.75).all()


# ---- which tokens ------------------------------------------------------------------------------------------------


def test_uniform_attention_leaves_the_choice_to_age():
    score = token_importance(torch.tensor([[0, 1, 2, 3]]), torch.full((1, 4), 0.25))
    assert torch.allclose(score.diff(), torch.tensor(0.0625))
    assert score.argmax() == 3


def test_attention_received_is_of_unit_norm():
    score = token_importance(torch.zeros(2, 2, dtype=torch.long), torch.tensor([[3.0, 4], [30, 40]]))
    assert torch.allclose(score, torch.tensor([0.6, 0.8]).expand(2, 2))


def test_sharp_cross_attention_comes_first():
    score = token_importance(torch.zeros(1, 3, dtype=torch.long), entropy=torch.tensor([[2.0, 0.1, 1.0]]))
    assert score.argsort(descending=True).tolist() == [[1, 2, 0]]


def test_the_best_token_of_each_patch_gets_the_bonus():
    signal = torch.tensor([[1.0, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]])
    ages = torch.zeros(1, 16, dtype=torch.long)
    plain = token_importance(ages, signal)
    gained = token_importance(ages, signal, rule=Importance(grid=(4, 4))) / plain
    best = torch.tensor([5, 7, 13, 15])
    assert torch.allclose(gained[0, best], torch.tensor(1.6))
    assert (gained != 1).sum() == 4
    # An odd grid has patches that are cut off.
    odd = token_importance(ages[:, :9], signal[:, :9], rule=Importance(grid=(3, 3)))
    assert (odd > token_importance(ages[:, :9], signal[:, :9])).sum() == 4


def test_halves_share_their_scores():
    ages = torch.zeros(4, 5, dtype=torch.long)
    score = token_importance(ages, normal(4, 5).abs(), rule=Importance(halves=2))
    assert torch.equal(score[:2], score[2:])
    assert not torch.equal(score[0], score[1])


# ---- the cache ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_keeping_all_is_the_full_sampler(small, dtype):
    model = TinyDiT(small.config).to(dtype).eval().requires_grad_(False)
    model.load_state_dict(small.state_dict())
    noise, label = start(model, dtype=dtype)
    with torch.no_grad():
        full = euler(model, noise, label, 4)
    assert torch.allclose(sparse(model, torch.ones(4, 2), noise, label), full, atol=1e-6)
    half = sparse(model, hand_keep(4, 2, 20), noise, label)
    assert half.dtype == dtype
    assert torch.isfinite(half).all()


def test_keeping_none_reuses_the_first_steps_outputs(small):
    outputs = []
    keep = torch.zeros(4, 2)
    keep[0] = 1
    handles = [b.mlp.register_forward_hook(lambda *a: outputs.append(a[-1])) for b in small.blocks]
    handles += [b.attention.register_forward_hook(lambda *a: outputs.append(a[-1])) for b in small.blocks]
    sparse(small, keep, *start(small))
    for handle in handles:
        handle.remove()
    assert len(outputs) == 16
    for k in range(4):
        assert all(torch.equal(outputs[k], outputs[k + 4 * t]) for t in range(4))


class Tokens(nn.Module):
    """Blocks on given tokens; an input that does not change with time."""

    def __init__(self, blocks=1, width=8, gain=1.0, inplace=False):
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))
        self.gain, self.inplace = gain, inplace

    def forward(self, x):
        for block in self.blocks:
            out = block(x)
            x = x + (out.mul_(self.gain) if self.inplace else out * self.gain)
        return x


def repeat(model, x, steps, move=0.0):
    for t in range(steps):
        y = model(x + move * t)
    return y


def linear_specs(model):
    return [BlockSpec(b) for b in model.blocks]


@given(st.lists(st.lists(st.sampled_from(LEVELS), min_size=2, max_size=2), min_size=1, max_size=4))
def test_a_constant_input_gives_the_full_result_under_any_table(rows):
    model, x = Tokens(2).eval(), normal(2, 8, 8)
    keep = torch.tensor([[1.0, 1.0], *rows])
    with torch.no_grad():
        full = model(x)
        with TokenCache(model, linear_specs(model), keep):
            assert torch.allclose(repeat(model, x, len(keep)), full, atol=1e-6)


def test_only_the_most_important_tokens_are_recomputed():
    model, x = Tokens().eval(), normal(2, 8, 8)
    norms = x.norm(dim=-1)
    with (
        torch.no_grad(),
        TokenCache(model, linear_specs(model), torch.tensor([[1.0], [0.25]]), Importance("norm", age_weight=0)),
    ):
        first = model(x) - x
        second = model(x * 2) - x * 2
    seen = ((second - first).abs().amax(-1) > 1e-6).nonzero()[:, 1].view(2, 2)
    assert torch.equal(seen.sort(1).values, norms.topk(2, dim=1).indices.sort(1).values)


def test_with_age_no_token_starves_and_without_it_some_do():
    model, x = Tokens().eval(), normal(1, 8, 8)
    for weight, refreshed in ((4.0, 8), (0.0, 2)):
        keep = torch.tensor([[1.0], *[[0.25]] * 4])
        with torch.no_grad(), TokenCache(model, linear_specs(model), keep, Importance("norm", age_weight=weight)):
            first = model(x) - x
            for _ in range(4):
                last = model(x * 2) - x * 2
        assert ((last - first).abs().amax(-1) > 1e-6).sum() == refreshed


def test_the_token_that_has_moved_most_is_the_least_similar():
    model, x = Tokens().eval(), normal(1, 8, 8)
    moved = x.clone()
    moved[0, 5] = -moved[0, 5]
    rule = Importance("similarity", age_weight=0)
    with torch.no_grad(), TokenCache(model, linear_specs(model), torch.tensor([[1.0], [0.125]]), rule):
        model(x)
        out = model(moved)
    assert torch.allclose(out, model(moved), atol=1e-6)


def test_guidance_halves_recompute_the_same_tokens(small):
    noise, label = start(small, 2)
    pair = torch.cat([noise, noise])
    labels = torch.cat([label, torch.full_like(label, small.config.num_labels)])
    shapes = {}
    original = method.token_importance

    def spy(*args, **kwargs):
        shapes["score"] = original(*args, **kwargs)
        return shapes["score"]

    method.token_importance = spy
    try:
        sparse(small, hand_keep(3, 2, 14), pair, labels, Importance(halves=2))
    finally:
        method.token_importance = original
    assert torch.equal(shapes["score"][:2], shapes["score"][2:])


def test_scaling_an_output_in_place_does_not_reach_the_cache():
    x, keep = normal(1, 4, 8), torch.tensor([[1.0], [0.0], [0.5], [0.0]])
    results = []
    for inplace in (False, True):
        model = Tokens(gain=0.5, inplace=inplace).eval()
        with torch.no_grad(), TokenCache(model, linear_specs(model), keep):
            results.append(repeat(model, x, 4, move=0.1))
    assert torch.equal(*results)


class Cross(nn.Module):
    """Cross-attention to two fixed texts, and its entropy."""

    def __init__(self):
        super().__init__()
        self.text = nn.Parameter(normal(2, 8, seed=3))

    def forward(self, x):
        return self.attend(x)[0]

    def attend(self, x):
        p = (x @ self.text.T).softmax(-1)
        return p @ self.text, -(p * p.log()).sum(-1)


class CrossModel(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.cross, self.mlp = Cross(), nn.Linear(8, 8)

    def forward(self, x):
        x = x + self.cross(x)
        return x + self.mlp(x)


def test_cross_attention_is_recomputed_for_the_kept_tokens_and_leads_the_choice():
    model, x = CrossModel().eval(), normal(1, 8, 8)
    block = BlockSpec(model.mlp, cross=model.cross, cross_attend=model.cross.attend)
    sharpest = model.cross.attend(x)[1].topk(2, largest=False).indices[0].sort().values
    with torch.no_grad(), TokenCache(model, [block], torch.tensor([[1.0], [0.25], [0.0]]), Importance(age_weight=0)):
        first = model(x)
        second = model(x + 0.1)
        model(x)
    with torch.no_grad():
        exact = model(x + 0.1)
    assert torch.allclose(second[:, sharpest], exact[:, sharpest], atol=1e-6)
    others = [i for i in range(8) if i not in sharpest.tolist()]
    assert ((second - exact)[:, others].abs().amax(-1) > 1e-4).all()
    assert first.shape == second.shape


def test_a_table_serves_other_numbers_of_tokens():
    model = Tokens(2).eval()
    keep = hand_keep(3, 2, 14)
    for tokens in (4, 7, 64):
        with torch.no_grad(), TokenCache(model, linear_specs(model), keep):
            assert repeat(model, normal(1, tokens, 8), 3).shape == (1, tokens, 8)


def test_a_share_gives_the_same_number_of_tokens_in_any_precision():
    for share, tokens in itertools.product((0.05, 0.1, 0.15, 0.35, 0.45, 0.55, 0.9), range(1, 300)):
        in_float32 = torch.tensor(share).double().item()
        assert method._round(in_float32, tokens) == method._round(share, tokens)


def test_non_contiguous_tokens():
    model, x = Tokens(2).eval(), normal(8, 2, 8).transpose(0, 1)
    keep = hand_keep(3, 2, 14)
    out = []
    for tokens in (x, x.contiguous()):
        with torch.no_grad(), TokenCache(model, linear_specs(model), keep):
            out.append(repeat(model, tokens, 3, move=0.3))
    assert torch.equal(*out)


def test_the_model_is_as_before_even_after_an_error(small):
    with pytest.raises(ZeroDivisionError), TokenCache(small, specs(small), torch.ones(2, 2)):
        raise ZeroDivisionError
    assert not any("forward" in vars(m) for m in small.modules())
    assert not small._forward_pre_hooks


def test_a_cache_can_be_entered_again(small):
    noise, label = start(small)
    cache = TokenCache(small, specs(small), hand_keep(3, 2, 14))
    results = []
    for _ in range(2):
        with torch.no_grad(), cache:
            results.append(euler(small, noise, label, 3))
    assert torch.equal(*results)


# ---- operations --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [0, 4, 8, 12, 16])
def test_multiplications_of_an_mlp_are_8_k_d_squared(small, kept):
    noise, label = start(small, 1)
    counted = {}
    for share in (0, kept / 16):
        keep = torch.tensor([[1.0, 1.0], [share, 0.0]])
        with FlopCounterMode(display=False) as counter:
            sparse(small, keep, noise, label)
        counted[share] = counter.get_total_flops()
    width = small.config.hidden_size
    mlp = 2 * 8 * kept * width**2
    full, tokens = kept == 16, 16
    # Fused attention is not counted by torch on a CPU; where all is kept its two projections are seen.
    attention = 2 * 4 * tokens * width**2 if full else 0
    extra = counted[kept / 16] - counted[0] - mlp - attention
    # A partial step after the first makes the first one give its map, by counted products.
    assert extra in (0, 2 * 2 * tokens**2 * width)


# ---- gradients ---------------------------------------------------------------------------------------------------


def relaxed(theta, straight_through, keep, model, x, recompute=False):
    chances = (-theta).softmax(-1)
    run = method._Run(
        model, linear_specs(model), keep, Importance("norm"), levels=torch.tensor([0.0, 1.0]), chances=chances,
        straight_through=straight_through, recompute=recompute,
    )  # fmt: skip
    with run:
        return repeat(model, x, len(keep), move=0.5)


def test_the_soft_masks_gradient_is_a_finite_difference_of_the_relaxed_objective():
    model, x = Tokens().double().eval(), normal(1, 4, 8, dtype=torch.float64)
    theta = normal(2, 1, 2, seed=5, dtype=torch.float64).requires_grad_()

    def objective(at):
        return relaxed(at, False, [[1.0], [0.0]], model, x).square().sum()

    (gradient,) = torch.autograd.grad(objective(theta), [theta])
    for s in range(2):
        step = torch.zeros_like(theta)
        step[1, 0, s] = 1e-5
        with torch.no_grad():
            difference = (objective(theta + step) - objective(theta - step)) / 2e-5
        assert gradient[1, 0, s].item() == pytest.approx(difference.item(), rel=1e-4)
    assert not gradient[0].any()
    assert gradient[1].any()


def test_where_the_loss_is_linear_the_straight_through_gradient_is_the_relaxed_one():
    model, x = Tokens().double().eval(), normal(1, 4, 8, dtype=torch.float64)
    theta = normal(2, 1, 2, seed=5, dtype=torch.float64).requires_grad_()
    found = [torch.autograd.grad(relaxed(theta, s, [[1.0], [0.0]], model, x).sum(), [theta])[0] for s in (True, False)]
    assert torch.allclose(*found, atol=1e-12)


def test_recomputing_branches_gives_the_same_gradient():
    model, x = Tokens(2).eval(), normal(1, 4, 8)
    theta = normal(3, 2, 2, seed=5).requires_grad_()
    keep = [[1.0, 1.0], [0.0, 1.0], [1.0, 0.0]]
    found = [
        torch.autograd.grad(relaxed(theta, True, keep, model, x, r).square().sum(), [theta])[0] for r in (False, True)
    ]
    assert torch.equal(*found)


def test_a_training_run_has_the_values_of_the_plain_run(small):
    noise, label = start(small)
    keep = hand_keep(5, 2, 24)
    for signal in ("attention", "similarity", "norm"):
        rule = Importance(signal, grid=(4, 4))
        plain = sparse(small, keep, noise, label, rule)
        chances = torch.full((5, 2, 5), 0.2)
        run = method._Run(small, specs(small), keep.tolist(), rule, levels=torch.tensor(LEVELS), chances=chances)
        with run:
            assert torch.allclose(euler(small, noise, label, 5), plain, atol=1e-5)


@given(st.integers(0, 1000), st.integers(1, 62))
def test_chances_expect_the_budget(seed, rest):
    units = np.array([0, 1, 2, 3, 7])
    p = method._chances(normal(4, 3, 5, seed=seed), units, rest)
    assert torch.allclose(p.sum(-1), torch.ones(4, 3))
    assert (p[1:] @ torch.tensor(units).float()).sum().item() == pytest.approx(rest, abs=1e-2)


# ---- learning ----------------------------------------------------------------------------------------------------


def learn(model, **options):
    # iterations first, so that a test can say its own
    options = {"steps": 5, "iterations": 4, "importance": Importance(grid=(4, 4))} | options
    steps = options["steps"]
    return diffsparse(
        model, partial(euler, steps=steps), specs(model), lambda g: draw_noise(4, g, model.config), **options
    )


def test_the_learned_table_spends_the_budget_and_says_what_it_saves(small):
    for target in (0.43, 0.54):
        found = learn(small, target=target)
        spent = int((found.keep * 4).sum())
        assert spent == found.spent == found.budget == round((1 - target) * 40)
        assert found.realised == 1 - spent / 40
        assert (found.keep[0] == 1).all()
        assert torch.isfinite(found.losses).all()


def test_saving_nothing_keeps_all(small):
    found = learn(small, target=0.0)
    assert (found.keep == 1).all()
    assert found.realised == 0
    assert found.losses.max() < 1e-10


def test_a_cut_to_the_first_step_keeps_nothing_else(small):
    found = learn(small, target=0.8)
    assert (found.keep[1:] == 0).all()


def test_a_large_delta_makes_the_chosen_steps_full(small):
    theta = normal(6, 2, 5)
    picked = torch.tensor([0, 2, 5])
    table = method._table(method._shift(theta, picked, 1e6), np.arange(5), 2 * 2 * 4 + 4)
    assert (table[picked] == 4).all()
    assert table[1:].sum() == 20


def test_the_cheapest_steps_hold_the_first_one():
    phi = torch.zeros(6, 2)
    phi[[2, 5], 0] = 1.0  # not to be full is dear there
    assert method._cheapest_steps(phi, 3).tolist() == [0, 2, 5]
    assert method._cheapest_steps(phi, 1).tolist() == [0]


def test_learning_gives_units_to_the_block_that_moves():
    """Block 0 sees inputs that move with the step, block 1 multiplies by zero: all units belong to block 0."""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(3)
            self.blocks = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
            nn.init.zeros_(self.blocks[1].weight)

        def forward(self, x):
            return x + self.blocks[0](x) + self.blocks[1](x)

    def sampler(model, x):
        for _ in range(4):
            x = x + 0.5 * model(x)
        return x

    model = Two().eval()
    found = diffsparse(
        model, sampler, linear_specs(model), lambda g: (torch.randn(4, 8, 8, generator=g),),
        steps=4, target=0.375, keep_levels=(0, 0.5, 1), iterations=40, stages=1,
    )  # fmt: skip
    assert (found.keep[:, 0] == 1).all()
    assert (found.keep[1:, 1] == 0).all()
    even = hand_keep(4, 2, found.budget, keep_levels=(0, 0.5, 1))
    x = normal(4, 8, 8)
    with torch.no_grad():
        errors = []
        for keep in (found.keep, even):
            with TokenCache(model, linear_specs(model), keep):
                sampled = sampler(model, x)
            errors.append((sampled - sampler(model, x)).square().mean().item())
    assert errors[0] < 1e-10 < errors[1]


def test_the_same_seed_gives_the_same_table_and_another_other_losses(small):
    a, b, c = learn(small), learn(small), learn(small, seed=1)
    assert torch.equal(a.keep, b.keep)
    assert torch.equal(a.losses, b.losses)
    assert torch.equal(a.costs, b.costs)
    assert not torch.equal(a.losses, c.losses)


def test_checkpointing_learns_the_same(small):
    a, b = learn(small), learn(small, checkpointing=True)
    assert torch.equal(a.keep, b.keep)
    assert torch.allclose(a.losses, b.losses)


def test_the_model_and_the_global_generator_are_left_alone(small):
    before = {name: value.clone() for name, value in small.state_dict().items()}
    state = torch.get_rng_state()
    learn(small)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in small.state_dict().items())
    assert all(p.grad is None for p in small.parameters())
    assert not any("forward" in vars(m) for m in small.modules())


def test_stage_one_names_its_full_steps(small):
    found = learn(small, target=0.4, full_steps=3)
    assert len(found.full_steps) == 3
    assert found.full_steps[0] == 0
    assert learn(small, target=0.4, stages=1).full_steps == (0,)


def test_the_result_as_table_figure_and_json(small):
    found = learn(small)
    assert isinstance(found, DiffSparseResult)
    assert len(found.table()) == 5
    assert found.table().records()[0] == {"step": 0, "kept": 1.0, "full blocks": 2, "idle blocks": 0}
    assert found.figure().data[0].z[0][0] == 1
    assert found.to_dict()["units"] == [0, 1, 2, 3, 4]
    assert torch.allclose((-found.costs).exp().sum(-1), torch.ones(5, 2))


def test_learning_on_the_built_in_model_beats_the_even_table():
    model = open_model()
    noise, label = start(model, 16, seed=9)
    found = diffsparse(
        model, partial(euler, steps=5), specs(model), partial(draw_noise, 4), steps=5, target=0.4, units=(0, 1, 2, 3, 7),
        iterations=12,
    )  # fmt: skip
    with torch.no_grad():
        full = euler(model, noise, label, 5)
    even = hand_keep(5, 4, found.budget, units=found.units)
    errors = [(sparse(model, keep, noise, label) - full).square().mean().item() for keep in (found.keep, even)]
    assert errors[0] < errors[1]


# ---- the trial's own arithmetic ----------------------------------------------------------------------------------


def test_units_of_the_built_in_model_are_its_operations():
    assert trial.level_units(open_model()) == (0, 1, 2, 3, 7)


def test_frechet_distance_of_known_sets():
    a = normal(200, 3)
    assert trial._frechet(a, a) == pytest.approx(0, abs=1e-9)
    shift = torch.tensor([1.0, -2, 0])
    assert trial._frechet(a, a + shift) == pytest.approx(5, abs=1e-4)
    # Along the axes of the covariance, scaling by 2 leaves the trace of the covariance itself.
    centred = a - a.mean(0)
    assert trial._frechet(centred, 2 * centred) == pytest.approx(a.var(0).sum().item(), rel=1e-5)


def test_all_sparse_arms_have_the_same_operations():
    data = trial.prepare("builtin:tiny-dit", seed=0, budget={"images": 2})
    tables = [trial._hand(data, cycle) for cycle in (None, 2, 3, 4, 5)]
    found = {trial._operations(data, trial._sparse(data, keep)) for keep in tables}
    assert len(found) == 1
    dense = trial._operations(data, partial(euler, data.model, steps=trial.STEPS))
    # Embedding, modulation and head run in full at each step, beside the units.
    assert 0.5 < found.pop() / dense < 0.51


def test_the_trial_takes_diffusion_transformers_alone():
    with pytest.raises(NotApplicable, match="tried on a diffusion transformer like builtin:tiny-dit"):
        trial.prepare("builtin:tiny-vit", seed=0, budget={"images": 2})


# ---- refusals ----------------------------------------------------------------------------------------------------


def run_cache(keep=None, model=None, blocks=None, steps=2, x=None, **rule):
    model = model or Tokens().eval()
    with (
        torch.no_grad(),
        TokenCache(
            model, blocks or linear_specs(model), torch.ones(2, 1) if keep is None else keep, Importance(**rule)
        ),
    ):
        repeat(model, normal(3, 4, 8) if x is None else x, steps)


class Pair(nn.Module):
    def forward(self, x):
        return x, None


def pair():
    model = nn.Sequential(Pair())
    return model, [BlockSpec(model[0])]


def twice():
    model = Tokens().eval()
    with (
        TokenCache(model, linear_specs(model), torch.ones(2, 1)),
        TokenCache(model, linear_specs(model), torch.ones(2, 1)),
    ):
        pass


def batch_changes():
    model = Tokens().eval()
    with torch.no_grad(), TokenCache(model, linear_specs(model), torch.ones(2, 1)):
        model(normal(2, 4, 8))
        model(normal(3, 4, 8))


def without_model():
    model = Tokens().eval()
    with TokenCache(model, linear_specs(model), torch.ones(2, 1)):
        model.blocks[0](normal(2, 4, 8))


def tiny(**options):
    model = options.pop("model", None) or Tokens().eval()
    sampler = options.pop("sampler", partial(repeat, steps=options.get("steps", 3)))
    return diffsparse(
        model, sampler, linear_specs(model), lambda g: (torch.randn(1, 4, 8, generator=g),),
        **({"steps": 3, "iterations": 2} | options),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: allocate_sparsity([[1.0]], (0,), 0), "cost is a list: pass a tensor of shape"),
        (lambda: allocate_sparsity(torch.zeros(3), (0,), 0), r"cost is a tensor of shape \(3,\)"),
        (lambda: allocate_sparsity(torch.tensor([[math.nan, 0]]), (0, 1), 1), "cost has entries that are NaN"),
        (lambda: allocate_sparsity(CARD, (0, 1), 1), "units is .* give 3 whole numbers from 0"),
        (lambda: allocate_sparsity(CARD, (0, 0.5, 1), 1), "give 3 whole numbers from 0"),
        (lambda: allocate_sparsity(CARD, (0, 2, 1), 1), "give them ascending"),
        (lambda: allocate_sparsity(CARD, (0, 1, 2), 1.0), "budget is 1.0: give a whole number"),
        (lambda: allocate_sparsity(CARD, (1, 2, 3), 2), "budget 2 units cannot be met: the lowest levels alone need 3"),
        (lambda: allocate_sparsity(CARD, (0, 1, 2), 7), "budget 7 units cannot be spent: all cells .* take 6"),
        (lambda: allocate_sparsity(CARD, (0, 1, 2), 2, [1, 1]), "weights is .* give 3 whole numbers"),
        (lambda: allocate_sparsity(CARD, (0, 1, 2), 2, [1, 1, 0]), "weights holds a number below 1"),
        (lambda: hand_keep(4, 2, 10, cycle=2), "the full steps alone need 16"),
        (lambda: hand_keep(0, 2, 10), "steps is 0"),
        (lambda: hand_keep(4, 2, 10, cycle=0), "cycle is 0"),
        (lambda: hand_keep(4, 2, 10, keep_levels=(0, 0.5)), "keep_levels is .* ascending to 1"),
        (lambda: Importance("random"), "signal is 'random'"),
        (lambda: Importance(period=0), "period is 0"),
        (lambda: Importance(bonus=-1), "bonus is -1"),
        (lambda: token_importance(torch.zeros(1, 4), torch.ones(1, 5)), "give them alike"),
        (lambda: token_importance(torch.zeros(1, 4), rule=Importance(grid=(3, 3))), "there are 4 tokens"),
        (lambda: token_importance(torch.zeros(3, 4), rule=Importance(halves=2)), "a batch of 3 has no 2 equal halves"),
        (lambda: run_cache(torch.ones(2, 3)), r"pass a tensor of shape \[steps, 1 blocks\]"),
        (lambda: run_cache(torch.full((2, 1), 1.5)), "keep has entries outside 0 to 1"),
        (lambda: run_cache(torch.tensor([[1.0], [math.nan]])), "keep has entries outside 0 to 1"),
        (lambda: run_cache(torch.zeros(2, 1)), "the first row of keep is not all 1"),
        (lambda: run_cache(steps=3), "calls the model more than 2 times"),
        (lambda: run_cache(steps=1), "called the model 1 times and the table has 2 steps"),
        (lambda: run_cache(x=normal(4, 8)), r"called with a tensor of shape \(4, 8\): tokens are"),
        (lambda: run_cache(model=pair()[0], blocks=[BlockSpec(nn.Linear(1, 1))]), "a module that is not in the model"),
        (lambda: (lambda m: run_cache(model=m[0], blocks=m[1]))(pair()), "a branch returns a tuple for tokens"),
        (lambda: (lambda m: run_cache(model=m, blocks=linear_specs(m) * 2))(Tokens()), "names a module twice"),
        (lambda: run_cache(blocks=[3]), "one BlockSpec a block"),
        (lambda: TokenCache("model", [], torch.ones(1, 1)), "model is a str"),
        (twice, "leave the other token cache first"),
        (batch_changes, r"has tokens \(3, 4\) and had \(2, 4\)"),
        (without_model, "a block runs before the model was called"),
        (lambda: tiny(steps=0), "steps is 0"),
        (lambda: tiny(target=1.0), "target is 1.0"),
        (lambda: tiny(target=0.9), "budget 1 units cannot be met: the first step alone needs 4"),
        (
            lambda: tiny(keep_levels=(0.5, 1.0), units=(2, 4), target=0.4),
            "budget 7 units cannot be met: the lowest levels",
        ),
        (lambda: tiny(stages=3), "stages is 3"),
        (lambda: tiny(iterations=1), "iterations is 1"),
        (lambda: tiny(lr=0), "lr is 0"),
        (lambda: tiny(delta=-1), "delta is -1"),
        (lambda: tiny(full_steps=3, target=0.5), "full_steps is 3: the budget of 6 units pays for 1 to 1"),
        (lambda: tiny(model=Tokens().train()), "model is in training mode"),
        (lambda: tiny(sampler=torch.no_grad()(partial(repeat, steps=3))), "must not run under torch.no_grad"),
        (lambda: tiny(sampler=partial(repeat, steps=2)), "called the model 2 times"),
        (lambda: tiny(loss=lambda a, b: (a - b).sum() * math.nan), "the loss is nan at iteration 0"),
    ],
)
def test_refusals(call, message):
    with pytest.raises(InputError, match=message):
        call()
