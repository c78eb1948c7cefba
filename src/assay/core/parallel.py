"""Side by side on the cores that torch may use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Item = TypeVar("Item")
Made = TypeVar("Made")


def each_on_one_core(function: Callable[[Item], Made], items: Sequence[Item]) -> list[Made]:
    """Apply a function to every item, as many side by side as torch has threads, each with one thread of its own.

    For factorisations of matrices of a few thousand rows this beats giving all threads to one after the other, and it
    suffers far less where other programs want the cores too.

    Args:
        function: it should spend its time in torch, which lets the other threads run.
        items: results come in their order.
    """
    threads = torch.get_num_threads()
    if threads == 1 or len(items) == 1:
        return [function(item) for item in items]
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(threads) as pool:
            return list(pool.map(function, items))
    finally:
        torch.set_num_threads(threads)
