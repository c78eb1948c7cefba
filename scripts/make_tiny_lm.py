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
from torch import Tensor, nn
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
EMBEDDING_STD = 0.1


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


@torch.no_grad()
def wire(model: LlamaForCausalLM, free: dict[str, Tensor], generator: torch.Generator) -> None:
    """Start the induction circuit near where training will take it; all of this is free to move.

    The positional head writes a projection of the previous token to directions of its own; the induction head looks
    there for the projection of the current token, and copies what stands where it finds it.
    """
    nn.init.normal_(model.get_input_embeddings().weight, std=EMBEDDING_STD, generator=generator)
    directions, _ = torch.linalg.qr(torch.randn(CONFIG.hidden_size, 3 * HEAD_DIM, generator=generator))
    token, previous, copied = directions.T.split(HEAD_DIM)

    layer, head = GROUND_TRUTH["positional_head"]
    attention = model.model.layers[layer].self_attn
    attention.v_proj.weight[rows(head)] = token
    attention.o_proj.weight[:, rows(head)] = 3 * EMBEDDING_STD * previous.T

    layer, head = GROUND_TRUTH["induction_head"]
    attention = model.model.layers[layer].self_attn
    slow = free[f"model.layers.{layer}.self_attn.q_proj.bias"][rows(head)].unsqueeze(1)
    attention.q_proj.weight[rows(head)] = 3 * slow * token
    attention.k_proj.weight[rows(head)] = 3 * slow * previous
    attention.v_proj.weight[rows(head)] = copied
    attention.o_proj.weight[:, rows(head)] = 10 * EMBEDDING_STD * copied.T


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


def train(
    model: LlamaForCausalLM,
    streams: list[Tensor],
    free: dict[str, Tensor],
    steps: int,
    generator: torch.Generator,
) -> None:
    """Muon for the matrices inside, AdamW for the rest, one cosine schedule; eight rows a step."""
    for name, mask in free.items():
        model.get_parameter(name).register_hook(lambda grad, mask=mask: grad * mask)
    embedding = model.get_input_embeddings().weight
    matrices = [p for p in model.parameters() if p.ndim > 1 and p is not embedding]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    peak = 1e-2
    optimizers = [
        torch.optim.Muon(matrices, lr=peak, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(
            [{"params": [embedding], "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
            lr=peak,
            betas=(0.9, 0.98),
        ),
    ]
    began = time.perf_counter()
    for step in range(steps):
        decay = 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps))
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = peak * min((step + 1) / 50, decay)
        text = [windows(streams[0], 5, generator), windows(streams[1], 1, generator)]
        ids = torch.cat([*text, repeated(2, generator)])
        logits = model(ids, use_cache=False).logits
        loss = F.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none").mean(1)
        loss.mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if step % 50 == 0 or step + 1 == steps:
            first, last = loss[:6].mean().item(), loss[6:].mean().item()
            print(
                f"step {step:5d}  text {first:.3f}  repeated {last:.3f}  {time.perf_counter() - began:.0f} s",
                flush=True,
            )


@torch.no_grad()
def perplexity(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, text: str) -> tuple[float, float]:
    """Perplexity per token and per character of a text, cut in windows that each begin with `<s>`."""
    stream = torch.tensor(tokenizer.encode(text, add_special_tokens=False, verbose=False))
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
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    texts = [_text.training_text(name) for name in ("prose", "technical")]
    tokenizer = train_tokenizer([p for text in texts for p in text.split("\n\n")])
    streams = [torch.tensor(tokenizer.encode(text, add_special_tokens=False, verbose=False)) for text in texts]
    print("training tokens:", [len(s) for s in streams])

    torch.manual_seed(options.seed)
    model = LlamaForCausalLM(CONFIG)
    free = plant(model)
    print("parameters:", sum(p.numel() for p in model.parameters()))
    generator = torch.Generator().manual_seed(options.seed)
    wire(model, free, generator)
    train(model, streams, free, options.steps, generator)

    model.eval()
    for name in ("prose", "technical"):
        token, character = perplexity(model, tokenizer, _text.sample(name))
        print(f"held-out {name}: perplexity {token:.2f} per token, {character:.3f} per character")
    tokenizer.save_pretrained(options.out)
    model.save_pretrained(options.out)
    print("sha256", hashlib.sha256((options.out / "model.safetensors").read_bytes()).hexdigest())


if __name__ == "__main__":
    main()
