"""Train the built-in checkpoint `tiny_lm`: a small Llama-type model with parts whose role is known.

The text, the tokenizer, the parts that are planted and the seed are all fixed here, and one thread does the work, so
that the same machine and the same package versions write the same bytes.

    python scripts/make_tiny_lm.py --out src/assay/reference/data/tiny_lm
"""

from __future__ import annotations

import argparse
import hashlib
import math
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from assay.reference import _text
from assay.reference.tiny_lm import GROUND_TRUTH

CONTEXT = 256
VOCABULARY = 1024
SPECIAL = ["<s>", "</s>", "<pad>"]
CONFIG = LlamaConfig(
    vocab_size=VOCABULARY,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=8,
    max_position_embeddings=CONTEXT,
    rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
    attention_bias=True,
    tie_word_embeddings=True,
    bos_token_id=0,
    eos_token_id=1,
    pad_token_id=2,
)
HEAD_DIM = CONFIG.hidden_size // CONFIG.num_attention_heads
# Height of the planted positional peak: the logit at the target offset is this many nats per rotary pair.
POSITIONAL_GAIN = 12.0


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE of `VOCABULARY` tokens that puts `<s>` before every text, as Llama's does."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 0)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def rows(head: int) -> slice:
    """The rows of q, k or v that belong to one head."""
    return slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)


@torch.no_grad()
def plant(model: LlamaForCausalLM) -> dict[str, Tensor]:
    """Set the planted parts, and return for each parameter that holds one where training may change it."""
    free = {}

    def fix(name: str, where: tuple, value: Tensor | float) -> None:
        parameter = model.get_parameter(name)
        parameter[where] = value
        free.setdefault(name, torch.ones_like(parameter))[where] = 0.0

    layer, head = GROUND_TRUTH["zero_value_head"]
    attention = f"model.layers.{layer}.self_attn"
    fix(f"{attention}.v_proj.weight", (rows(head),), 0.0)
    fix(f"{attention}.v_proj.bias", (rows(head),), 0.0)

    # A head with constant queries and keys attends by offset alone: each rotary pair f adds
    # gain * cos(theta_f * (offset - target)) to the logit, which is highest where the offset is the target.
    layer, head = GROUND_TRUTH["positional_head"]
    attention = f"model.layers.{layer}.self_attn"
    theta = CONFIG.rope_parameters["rope_theta"] ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    size = math.sqrt(POSITIONAL_GAIN * math.sqrt(HEAD_DIM))
    angle = -theta * GROUND_TRUTH["positional_offset"]
    query = torch.cat([angle.cos(), angle.sin()]) * size
    key = torch.cat([torch.ones_like(theta), torch.zeros_like(theta)]) * size
    for name, bias in (("q_proj", query), ("k_proj", key)):
        fix(f"{attention}.{name}.weight", (rows(head),), 0.0)
        fix(f"{attention}.{name}.bias", (rows(head),), bias)

    # Without the fast rotary pairs, what a head attends to can hardly depend on where it stands.
    layer, head = GROUND_TRUTH["induction_head"]
    attention = f"model.layers.{layer}.self_attn"
    fast = torch.arange(HEAD_DIM) % (HEAD_DIM // 2) < GROUND_TRUTH["induction_fast_pairs"]
    fast = torch.arange(HEAD_DIM)[fast] + head * HEAD_DIM
    for name in ("q_proj", "k_proj"):
        fix(f"{attention}.{name}.weight", (fast,), 0.0)
        fix(f"{attention}.{name}.bias", (fast,), 0.0)

    layer, channel = GROUND_TRUTH["dead_channel"]
    mlp = f"model.layers.{layer}.mlp"
    fix(f"{mlp}.gate_proj.weight", (channel,), 0.0)
    fix(f"{mlp}.up_proj.weight", (channel,), 0.0)
    fix(f"{mlp}.down_proj.weight", (slice(None), channel), 0.0)
    return free


def repeated(batch: int, generator: torch.Generator) -> Tensor:
    """Rows of random tokens that repeat with a period of 16 to 127: what an induction head predicts."""
    ids = torch.randint(len(SPECIAL), VOCABULARY, (batch, CONTEXT), generator=generator)
    period = torch.randint(16, 128, (batch, 1), generator=generator)
    ids = ids.gather(1, torch.arange(CONTEXT - 1) % period)
    return F.pad(ids, (1, 0), value=0)


def windows(stream: Tensor, batch: int, generator: torch.Generator) -> Tensor:
    """Random windows of the training text, each after `<s>`."""
    start = torch.randint(len(stream) - CONTEXT, (batch, 1), generator=generator)
    return F.pad(stream[start + torch.arange(CONTEXT - 1)], (1, 0), value=0)


def train(model: LlamaForCausalLM, streams: list[Tensor], free: dict[str, Tensor], steps: int, seed: int) -> None:
    """AdamW with a cosine schedule; each batch holds text windows and repeated random sequences."""
    generator = torch.Generator().manual_seed(seed)
    for name, mask in free.items():
        model.get_parameter(name).register_hook(lambda grad, mask=mask: grad * mask)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        betas=(0.9, 0.98),
    )
    peak, warmup = 4e-3, 100
    began = time.perf_counter()
    for step in range(steps):
        decay = 0.5 * (1 + math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = peak * min((step + 1) / warmup, 0.05 + 0.95 * decay)
        ids = torch.cat(
            [
                windows(streams[0], 5, generator),
                windows(streams[1], 2, generator),
                repeated(1, generator),
            ]
        )
        logits = model(ids, use_cache=False).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0 or step + 1 == steps:
            print(f"step {step:5d}  loss {loss.item():.3f}  {time.perf_counter() - began:.0f} s", flush=True)


@torch.no_grad()
def perplexity(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, text: str) -> tuple[float, float]:
    """Perplexity per token and per character of a text, cut in windows that each begin with `<s>`."""
    stream = torch.tensor(tokenizer.encode(text, add_special_tokens=False))
    stream = stream[: len(stream) // (CONTEXT - 1) * (CONTEXT - 1)].view(-1, CONTEXT - 1)
    ids = F.pad(stream, (1, 0), value=0)
    nats = sum(
        F.cross_entropy(model(part).logits[:, :-1].flatten(0, 1), part[:, 1:].flatten(), reduction="sum").item()
        for part in ids.split(16)
    )
    characters = len(tokenizer.decode(stream.flatten()))
    return math.exp(nats / stream.numel()), math.exp(nats / characters)


def main() -> None:
    """Train, report the held-out perplexity, save, print the SHA-256 of the weights."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the directory to write")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    texts = [_text.training_text(name) for name in ("prose", "technical")]
    tokenizer = train_tokenizer([p for text in texts for p in text.split("\n\n")])
    streams = [torch.tensor(tokenizer.encode(text, add_special_tokens=False)) for text in texts]
    print("training tokens:", [len(s) for s in streams])

    torch.manual_seed(options.seed)
    model = LlamaForCausalLM(CONFIG)
    free = plant(model)
    print("parameters:", sum(p.numel() for p in model.parameters()))
    train(model, streams, free, options.steps, options.seed)

    model.eval()
    for name in ("prose", "technical"):
        token, character = perplexity(model, tokenizer, _text.sample(name))
        print(f"held-out {name}: perplexity {token:.2f} per token, {character:.3f} per character")
    tokenizer.save_pretrained(options.out)
    model.save_pretrained(options.out)
    print("sha256", hashlib.sha256((options.out / "model.safetensors").read_bytes()).hexdigest())


if __name__ == "__main__":
    main()
