"""Next-token loss of a causal language model, and how far a changed model's predictions move from the original's."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from assay.core.anatomy import Anatomy, anatomy
from assay.core.errors import InputError, NotApplicable
from assay.core.progress import Progress, silent
from assay.core.results import Column, Result, Table
from assay.core.stats import Interval, mean_interval
from assay.core.trace import Batch, LogitsSlice, Reducer, trace

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

_SLICE_BYTES = 32 << 20


@dataclass(frozen=True)
class LossResult(Result):
    """Next-token loss on windows of text.

    Attributes:
        per_window: mean loss of each window, in nats a token.
        by_position: mean loss of the token at each position, in nats; the first token has none, so entry 0 is the loss of
            the second.
        n_tokens: predicted tokens.
        loss: mean over windows with its 95 % interval, windows being the unit, in nats a token.
    """

    per_window: Float[Tensor, "windows"]
    by_position: Float[Tensor, "positions"]
    n_tokens: int
    loss: Interval

    @property
    def perplexity(self) -> float:
        """exp of the mean loss."""
        return math.exp(min(self.loss.mean, 700.0))

    def buckets(self) -> list[tuple[int, int, float]]:
        """Mean loss over positions 1, 2–3, 4–7, 8–15, …: (first, last, nats)."""
        out = []
        start = 1
        while start <= len(self.by_position):
            end = min(2 * start - 1, len(self.by_position))
            out.append((start, end, float(self.by_position[start - 1 : end].nanmean())))
            start *= 2
        return out

    def table(self) -> Table:
        """Loss and perplexity by position in the window."""
        columns = (Column("positions"), Column("loss", "nats/token"), Column("perplexity"))
        rows = tuple((f"{a}–{b}" if b > a else str(a), v, math.exp(min(v, 700.0))) for a, b, v in self.buckets())
        return Table(columns, rows, f"loss {self.loss.mean:.4f} nats/token, perplexity {self.perplexity:.2f}")

    def figure(self) -> Figure:
        """Loss by position."""
        from plotly import graph_objects as go

        buckets = self.buckets()
        figure = go.Figure(go.Scatter(x=[(a + b) / 2 for a, b, _ in buckets], y=[v for *_, v in buckets]))
        figure.update_layout(xaxis_title="position in the window", yaxis_title="loss (nats/token)")
        figure.update_xaxes(type="log")
        return figure


class LossReducer(Reducer):
    """Gathers next-token losses from the logits."""

    sites = ("logits",)

    def __init__(self) -> None:
        self._windows: list[Tensor] = []
        self._batch = -1
        self._sum = torch.zeros(0, dtype=torch.float64)
        self._count = torch.zeros(0, dtype=torch.float64)

    def update(self, site: str, layer: int, value: LogitsSlice, batch: Batch) -> None:
        """Take in a slice of logits."""
        nll, counts = next_token_losses(value, batch)
        width = batch.input_ids.shape[1] - 1
        if len(self._sum) < width:
            grow = width - len(self._sum)
            self._sum, self._count = (nn.functional.pad(t, (0, grow)) for t in (self._sum, self._count))
        place = slice(value.rows.start, value.rows.start + nll.shape[1])
        self._sum[place] += nll.double().sum(0).cpu()
        self._count[place] += counts.double().sum(0).cpu()
        sums = torch.stack([nll.double().sum(1), counts.double().sum(1)], dim=1).cpu()
        if batch.index == self._batch:
            self._windows[-1] += sums
        else:
            self._windows.append(sums)
            self._batch = batch.index

    def result(self) -> LossResult:
        """The losses so far.

        Raises:
            InputError: no token was predicted.
        """
        sums = torch.cat(self._windows) if self._windows else torch.zeros(0, 2)
        sums = sums[sums[:, 1] > 0]
        if not len(sums):
            raise InputError("no token was predicted: the text is shorter than two tokens")
        per_window = sums[:, 0] / sums[:, 1]
        return LossResult(
            per_window=per_window,
            by_position=self._sum / self._count,
            n_tokens=int(sums[:, 1].sum()),
            loss=mean_interval(per_window.numpy()),
        )


def next_token_losses(value: LogitsSlice, batch: Batch) -> tuple[Tensor, Tensor]:
    """Losses of the tokens that follow the rows of a slice, and which of them count (0 or 1), `[batch, rows]`."""
    ids = batch.input_ids
    stop = min(value.rows.stop, ids.shape[1] - 1)
    n = max(0, stop - value.rows.start)
    targets = ids[:, value.rows.start + 1 : value.rows.start + 1 + n]
    logits = value.values[:, :n]
    nll = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
    counts = torch.ones_like(nll)
    if batch.valid is not None:
        counts = batch.valid[:, value.rows.start + 1 : value.rows.start + 1 + n].to(nll.dtype)
    return nll * counts, counts


def language_loss(
    model: nn.Module,
    batches: Iterable[Tensor],
    *,
    anatomy_: Anatomy | None = None,
    progress: Progress = silent,
) -> LossResult:
    """Next-token loss of a causal model on windows of token ids.

    Args:
        model: a causal transformers model.
        batches: token ids `[batch, tokens]`, or mappings with `input_ids`.
        anatomy_: the model's anatomy, where the caller has it already.
        progress: called after every batch.

    Raises:
        NotApplicable: the model is not causal.
    """
    found = anatomy_ or anatomy(model)
    require_causal(found)
    reducer = LossReducer()
    trace(model, batches, [reducer], anatomy=found, progress=progress)
    return reducer.result()


def require_causal(found: Anatomy) -> None:
    """Raise unless the model predicts the next token.

    Raises:
        NotApplicable: an encoder, or a model without a language-model head.
    """
    if not found.causal:
        raise NotApplicable("this is an encoder: next-token loss needs a causal language model")
    if found.lm_head is None:
        raise NotApplicable("the checkpoint has no language-model head, so it predicts no token")


@dataclass(frozen=True)
class DriftResult(Result):
    """How a changed model's predictions differ from the original's on the same windows.

    Attributes:
        kl: mean KL(original ‖ changed) of the next-token distributions with its interval over windows, in nats a token.
        loss_change: mean increase of the next-token loss with its interval over windows, in nats a token.
        loss: loss of the changed model, in nats a token.
        agreement: share of positions where both name the same most likely token.
        n_tokens: positions compared.
    """

    kl: Interval
    loss_change: Interval
    loss: float
    agreement: float
    n_tokens: int

    @property
    def perplexity(self) -> float:
        """exp of the changed model's loss."""
        return math.exp(min(self.loss, 700.0))

    def table(self) -> Table:
        """One row."""
        columns = (
            Column("KL", "nats/token"),
            Column("loss change", "nats/token"),
            Column("perplexity"),
            Column("same first choice"),
        )
        return Table(columns, ((self.kl.mean, self.loss_change.mean, self.perplexity, self.agreement),))


class Drift:
    """Compares a model with its own earlier self: made of the unchanged model, then asked as often as it is changed.

    What is kept of the original is its last hidden states (tokens × hidden size), so use it on a bounded number of
    windows; logits are made again, a few positions at a time. The language-model head must stay as it is.

    Args:
        model: a causal transformers model.
        windows: token ids.
        anatomy_: the model's anatomy, where the caller has it already.

    Raises:
        NotApplicable: the model is not causal.
    """

    def __init__(
        self, model: nn.Module, windows: Int[Tensor, "windows context"], *, anatomy_: Anatomy | None = None
    ) -> None:
        self.anatomy = anatomy_ or anatomy(model)
        require_causal(self.anatomy)
        self.windows = windows.to(next(model.parameters()).device)
        self._hidden = [self._run(row) for row in self.windows]

    @torch.no_grad()
    def _run(self, row: Int[Tensor, "context"], backbone: nn.Module | None = None) -> Float[Tensor, "context hidden"]:
        return (backbone or self.anatomy.backbone)(input_ids=row[None], use_cache=False)[0][0]

    @torch.no_grad()
    def measure(self, n_windows: int | None = None, *, changed: Anatomy | None = None) -> DriftResult:
        """Run the changed model on the first `n_windows` windows (all by default) and compare.

        Args:
            n_windows: how many.
            changed: the changed model, where it is another module than the one that this was made of; its head is not
                used.
        """
        backbone = None if changed is None else changed.backbone
        kls, changes, losses, agreed, count = [], [], [], 0, 0
        for row, before in list(zip(self.windows, self._hidden, strict=True))[:n_windows]:
            after = self._run(row, backbone)
            kl = change = loss = 0.0
            step = max(1, _SLICE_BYTES // (4 * self.anatomy.vocab_size))
            for start in range(0, len(row) - 1, step):
                stop = min(start + step, len(row) - 1)
                targets = row[start + 1 : stop + 1, None]
                p, q = (torch.log_softmax(self.anatomy.logits(h[start:stop]).float(), dim=-1) for h in (before, after))
                kl += float((p.exp() * (p - q)).sum(-1).clamp_min(0).double().sum())
                new = -q.gather(1, targets).double()
                loss += float(new.sum())
                change += float((new + p.gather(1, targets).double()).sum())
                agreed += int((p.argmax(-1) == q.argmax(-1)).sum())
            n = len(row) - 1
            count += n
            kls.append(kl / n)
            changes.append(change / n)
            losses.append(loss / n)
        return DriftResult(
            kl=mean_interval(kls),
            loss_change=mean_interval(changes),
            loss=sum(losses) / len(losses),
            agreement=agreed / count,
            n_tokens=count,
        )
