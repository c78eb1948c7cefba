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

#: What was planted:
#:
#: - `zero_value_head` (layer, head): its value rows and biases are zero, so it adds nothing, wherever it attends.
#: - `positional_head` (layer, head): its queries and keys are constant, so it attends by offset alone, whatever the
#:   tokens; `positional_offset` tokens back.
#: - `induction_head` (layer, head): queries and keys of its `induction_fast_pairs` fastest rotary pairs are zero, so
#:   it attends by content; training made it attend to what followed the current token before.
#: - `dead_channel` (layer, channel): a feed-forward channel whose incoming and outgoing weights are zero.
GROUND_TRUTH: dict[str, Any] = {
    "zero_value_head": (1, 2),
    "positional_head": (0, 5),
    "positional_offset": 1,
    "induction_head": (1, 6),
    "induction_fast_pairs": 4,
    "dead_channel": (2, 37),
}


def load() -> Path:
    """The checkpoint's Hugging Face directory.

    Example:
        >>> (load() / "model.safetensors").is_file()
        True
    """
    return Path(__file__).parent / "data" / "tiny_lm"
