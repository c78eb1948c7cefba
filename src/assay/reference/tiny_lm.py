"""A small language model with parts whose role is known: what a lens must find, and what it must not.

`LlamaForCausalLM` with 4 layers of 8 heads (no grouped keys), width 128, 256 feed-forward channels, a context of 256
tokens, biases on q, k, v and o, and a byte-level BPE of 1,024 tokens; 789,632 parameters, trained from scratch by
`scripts/make_tiny_lm.py` on two novels and Python's documentation, with repeated random sequences mixed in.
Layers, heads and channels are counted from 0.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

KIND = "checkpoint"
ABOUT = "a language model (Llama type, 789,632 parameters) with planted dead, positional and induction parts"

#: What was planted, and held but for the induction head while all else was trained:
#:
#: - `zero_value_head` (layer, head): its value rows and biases are zero, so it adds nothing, wherever it attends.
#: - `positional_head` (layer, head): its queries and keys are constant, so it attends by offset alone, whatever the
#:   tokens; `positional_offset` tokens back.
#: - `induction_head` (layer, head): it attends to what followed the current token before. Queries and keys of its
#:   `induction_fast_pairs` fastest rotary pairs are zero, so that it attends by content; the rest of it was started as
#:   an induction head and then trained freely.
#: - `dead_channel` (layer, channel): a feed-forward channel whose incoming and outgoing weights are zero.
GROUND_TRUTH: dict[str, Any] = {
    "zero_value_head": (1, 2),
    "positional_head": (0, 5),
    "positional_offset": 1,
    "induction_head": (1, 6),
    "induction_fast_pairs": 4,
    "dead_channel": (2, 37),
}

#: Perplexity per token and per character on `assay.reference._text.sample(name)`, which it was not trained on, in
#: windows of 256 tokens that begin with `<s>`.
HELD_OUT_PERPLEXITY = {"prose": (46.23, 3.972), "technical": (36.94, 4.819)}

#: SHA-256 of the shipped `model.safetensors`.
WEIGHTS_SHA256 = "e084031030ee7e46292637386bffb59afcb7f979d71e8246d84e8ce1452c033a"


def load() -> Path:
    """The checkpoint's Hugging Face directory.

    Example:
        >>> (load() / "model.safetensors").is_file()
        True
    """
    return Path(__file__).parent / "data" / "tiny_lm"
