import subprocess
import sys

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from assay.core.seeds import generator, rng, spawn

names = st.lists(st.text(max_size=3) | st.integers(-5, 5), max_size=3).map(tuple)


@given(st.integers(0, 100), names, names)
def test_same_names_same_stream_and_other_names_another(seed, one, other):
    same = np.array_equal(rng(seed, *one).random(4), rng(seed, *other).random(4))
    assert same == (one == other and [type(n) for n in one] == [type(n) for n in other])
    assert torch.equal(torch.rand(4, generator=generator(seed, *one)), torch.rand(4, generator=generator(seed, *one)))


def test_names_do_not_run_together():
    assert rng(0, "ab", "c").random() != rng(0, "a", "bc").random()
    assert rng(0, 1).random() != rng(0, "1").random()
    assert rng(0).random() != rng(1).random()


def test_global_state_is_left_alone():
    before = torch.get_rng_state()
    generator(0, "x")
    rng(0, "x").random()
    assert torch.equal(before, torch.get_rng_state())


def test_streams_are_the_same_in_every_process():
    code = "from assay.core.seeds import rng, spawn; print(rng(3, 'layer', 2).integers(2**40), spawn(3, 2))"
    said = [
        subprocess.run([sys.executable, "-c", code], env={"PYTHONHASHSEED": h}, capture_output=True, text=True).stdout
        for h in ("1", "2")
    ]
    assert said[0] == said[1] == f"{rng(3, 'layer', 2).integers(2**40)} {spawn(3, 2)}\n"


def test_spawn_gives_distinct_seeds_that_fit_31_bits():
    seeds = spawn(0, 1000)
    assert len(set(seeds)) == 1000
    assert all(0 <= s < 2**31 for s in seeds)
    assert spawn(0, 5) == seeds[:5]
    assert spawn(0, 0) == []
    assert not set(spawn(1, 100)) & set(seeds)
