"""Speed of option scoring and of routing.

python benchmarks/bolt.py [MODEL]    a directory of a causal language model; by default the built-in one, on one thread
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from assay.compress import BudgetRouter, OptionLog, OptionScorer, odd_loss, option_probs, same_type_neighbours
from assay.reference import tiny_lm
from assay.reference._text import sample


def seconds(call: Callable[[], object], repeats: int = 7) -> float:
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def one_at_a_time(model: torch.nn.Module, tokenizer: object, prompt: str, options: list[str]) -> list[float]:
    """What most scripts do: a pass an option, with the logits of every token."""
    start = len(tokenizer(prompt)["input_ids"])
    scores = []
    for option in options:
        ids = torch.tensor([tokenizer(prompt + option)["input_ids"]])
        logits = model(ids).logits.log_softmax(-1)[0, start - 1 : -1]
        scores.append(logits.gather(1, ids[0, start:, None]).sum().item())
    return scores


def questions(n: int, rng: np.random.Generator) -> OptionLog:
    answer = rng.integers(4, size=n)
    truth = 2 * np.eye(4)[answer]
    draws = rng.normal(size=(4, n, 4))
    return OptionLog(
        draws[0] + truth, {"HR": draws[1] + 2 * truth, "tmRAG": draws[2] + truth, "QD": draws[3] + truth}, answer
    )


@torch.no_grad()
def scoring(path: str) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path).eval(), AutoTokenizer.from_pretrained(path)
    scorer = OptionScorer(model, tokenizer)
    options = [" a great deal of sense", " nothing", " his own house in the country", " very much to be pitied"]
    for tokens in (32, 192):
        text = sample()
        prompt = tokenizer.decode(tokenizer(text[:4000])["input_ids"][:tokens], skip_special_tokens=True)
        ours = seconds(lambda p=prompt: scorer(p, options))
        theirs = seconds(lambda p=prompt: one_at_a_time(model, tokenizer, p, options))
        gap = np.abs(scorer(prompt, options).scores.numpy() - one_at_a_time(model, tokenizer, prompt, options)).max()
        print(
            f"4 options after {tokens:3d} tokens: {1e3 * ours:7.2f} ms, one at a time {1e3 * theirs:7.2f} ms, "
            f"ratio {ours / theirs:.2f}, largest difference {gap:.1e}"
        )


def main(path: str) -> None:
    torch.set_num_threads(1)
    scoring(path)

    s, t = torch.randn(4096, 5, requires_grad=True), option_probs(torch.randn(4096, 5), 2.0)
    target = torch.randint(5, (4096,))
    print(
        f"loss and gradient, 4096 questions     {1e3 * seconds(lambda: odd_loss(s, t, target).loss.backward()):8.2f} ms"
    )

    rng = np.random.default_rng(0)
    log = questions(10_000, rng)
    router = BudgetRouter()
    print(f"fit the router on 10,000 questions    {1e3 * seconds(lambda: router.fit(log)):8.2f} ms")
    print(f"tune its threshold on as many         {1e3 * seconds(lambda: router.tune(log, 1.3)):8.2f} ms")
    print(f"route as many                         {1e3 * seconds(lambda: router.route(log)):8.2f} ms")
    actions = {name: (lambda i, s=s: s[i]) for name, s in log.actions.items()}
    one = seconds(lambda: [router.run(i, lambda i: log.base[i], actions) for i in range(100)]) / 100
    print(f"route one question                    {1e3 * one:8.2f} ms")
    bank, asked = rng.normal(size=(10_000, 256)), rng.normal(size=(1000, 256))
    print(
        f"4 neighbours of 1,000 among 10,000    {1e3 * seconds(lambda: same_type_neighbours(asked, bank), 3):8.2f} ms"
    )


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else str(tiny_lm.load()))
