"""Statistics of a stream of rows: one pass, memory that does not grow with the rows, mergeable across streams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Integer, Num, Shaped
from torch import Tensor

from assay.core.errors import InputError

_BUFFER_ROWS = 512  # small updates are gathered up to here: a matmul of few rows is bound by memory
_CHUNK_ROWS = 4096  # larger updates are cut, so that upcasting never doubles a large input
_CHUNK_VALUES = 2**17  # float64 values at once in elementwise passes: they stay in cache
_PANEL = 256  # columns a block of the triangle: fastest of 128 to 768 on CPU


class Covariance:
    """Mean and covariance of rows.

    Each batch is centred on its own mean before its outer product is taken, and batches are joined by the pairwise
    rule, so that float32 keeps its digits when the mean is far larger than the spread. Only the lower triangle is
    computed. Rows with a value that is not finite are left out and counted.

    Args:
        n_features: the length of a row.
        dtype: of the accumulated products, float32 or float64.
        device: where they live; None for the device of the first rows.

    Source:
        Chan, Golub and LeVeque, Updating Formulae and a Pairwise Algorithm for Computing Sample Variances (1979).

    >>> c = Covariance(2)
    >>> c.update(torch.tensor([[0.0, 1.0], [2.0, 5.0]]))
    >>> c.covariance
    tensor([[2., 4.],
            [4., 8.]])
    """

    def __init__(
        self,
        n_features: int,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device | None = None,
    ) -> None:
        if dtype not in (torch.float32, torch.float64):
            raise InputError(f"dtype is {dtype}: products are accumulated in float32 or float64")
        self.n_features = n_features
        self.dtype = dtype
        self.device = None if device is None else torch.device(device)
        self._n = 0
        self._n_nonfinite = 0
        self._mean = torch.zeros(n_features, dtype=torch.float64, device=device)
        # Lower triangle of the sum of centred outer products; what stands above it means nothing.
        self._scatter = torch.zeros(n_features, n_features, dtype=dtype, device=device)
        self._buffer: Tensor | None = None
        self._buffered = 0

    def update(self, x: Float[Tensor, "*rows features"]) -> None:
        """Take rows in, of any float type.

        Raises:
            InputError: the last dimension is not `n_features`, or the values are not floats.
        """
        rows = _rows(x, self.n_features)
        if self.device is None:
            self._move(rows.device)
        for part in rows.split(_CHUNK_ROWS):
            if len(part) > _BUFFER_ROWS // 2:
                self._fold(part.to(self.device, self.dtype, copy=True))
                continue
            if self._buffer is None:
                self._buffer = torch.empty(_BUFFER_ROWS, self.n_features, dtype=self.dtype, device=self.device)
            if self._buffered + len(part) > _BUFFER_ROWS:
                self._flush()
            self._buffer[self._buffered : self._buffered + len(part)] = part
            self._buffered += len(part)

    def merge(self, other: Covariance) -> Covariance:
        """The statistics of both streams together; neither is changed.

        Raises:
            InputError: `other` has rows of another length.
        """
        _check_same_width(self.n_features, other.n_features)
        both = Covariance(self.n_features, self.dtype, self.device or other.device)
        for part in (self, other):
            part._flush()
            both._n_nonfinite += part._n_nonfinite
            if part._n:
                both._shift(part._n, part._mean.to(both._mean.device))
                both._scatter += part._scatter.to(both._scatter.device, both.dtype)
        return both

    @property
    def n(self) -> int:
        """How many rows were taken in, without those left out."""
        self._flush()
        return self._n

    @property
    def n_nonfinite(self) -> int:
        """How many rows were left out because a value in them is not finite."""
        self._flush()
        return self._n_nonfinite

    @property
    def mean(self) -> Float[Tensor, "features"]:
        """The mean row, in `dtype`.

        Raises:
            InputError: no finite row was taken in.
        """
        self._need(1)
        return self._mean.to(self.dtype)

    @property
    def covariance(self) -> Float[Tensor, "features features"]:
        """The covariance with divisor n - 1, in `dtype`.

        Raises:
            InputError: fewer than two finite rows were taken in.
        """
        self._need(2)
        return _mirrored(self._scatter / (self._n - 1))

    @property
    def second_moment(self) -> Float[Tensor, "features features"]:
        """The mean of the outer products x xᵀ about zero, in `dtype`.

        Raises:
            InputError: no finite row was taken in.
        """
        self._need(1)
        mean = self._mean.to(self.dtype)
        return _mirrored((self._scatter / self._n).addr_(mean, mean))

    def _need(self, least: int) -> None:
        self._flush()
        if self._n < least:
            raise InputError(f"only {self._n} finite rows were taken in: this needs at least {least}")

    def _move(self, device: torch.device) -> None:
        self.device = device
        self._mean, self._scatter = self._mean.to(device), self._scatter.to(device)

    def _flush(self) -> None:
        if self._buffer is not None and self._buffered:
            # The buffer is written anew from the start, so that folding may overwrite it.
            rows, self._buffered = self._buffer[: self._buffered], 0
            self._fold(rows)

    def _fold(self, rows: Tensor) -> None:
        """Take in rows of our dtype on our device; they are overwritten."""
        if not len(rows):
            return
        pivot = rows.mean(0)
        # The mean is finite only if every row is, unless large finite values overflow their sum.
        if not bool(torch.isfinite(pivot).all()):
            finite = torch.isfinite(rows).all(1)
            self._n_nonfinite += int((~finite).sum())
            rows = rows[finite]
            if not len(rows):
                return
            pivot = (rows / len(rows)).sum(0)
        # Subtracting a nearby number loses nothing; the rest of the mean is small and then known to full precision.
        rows -= pivot
        rest = rows.mean(0)
        rows -= rest
        self._shift(len(rows), pivot.double() + rest.double())
        for start in range(0, self.n_features, _PANEL):
            stop = min(start + _PANEL, self.n_features)
            self._scatter[start:stop, :stop].addmm_(rows[:, start:stop].T, rows[:, :stop])

    def _shift(self, n: int, mean: Tensor) -> None:
        """Count in `n` more rows with their own `mean`, and what the distance of the two means spreads."""
        total = self._n + n
        delta = mean - self._mean
        if self._n:
            root = (delta * (self._n / total * n) ** 0.5).to(self.dtype)
            self._scatter.addr_(root, root)
        self._mean = self._mean + delta * (n / total)
        self._n = total


class Mean:
    """Mean, variance, least and greatest of each feature, in float64; values that are not finite are left out.

    Args:
        n_features: the length of a row; 1 for a stream of single numbers.
        device: where the statistics live; None for the device of the first rows.

    >>> m = Mean(2)
    >>> m.update(torch.tensor([[1.0, 5.0], [3.0, float("nan")]]))
    >>> m.mean, m.n
    (tensor([2., 5.], dtype=torch.float64), tensor([2, 1]))
    """

    def __init__(self, n_features: int = 1, device: str | torch.device | None = None) -> None:
        self.n_features = n_features
        self.device = None if device is None else torch.device(device)
        self._n = torch.zeros(n_features, dtype=torch.int64, device=device)
        self._n_nonfinite = torch.zeros_like(self._n)
        self._mean = torch.zeros(n_features, dtype=torch.float64, device=device)
        self._scatter = torch.zeros_like(self._mean)
        self._min = torch.full_like(self._mean, torch.inf)
        self._max = torch.full_like(self._mean, -torch.inf)

    def update(self, x: Float[Tensor, "*rows features"]) -> None:
        """Take rows in, of any float type.

        Raises:
            InputError: the last dimension is not `n_features`, or the values are not floats.
        """
        rows = _rows(x, self.n_features)
        if not len(rows):
            return
        if self.device is None:
            self._move(rows.device)
        for part in rows.split(max(1, _CHUNK_VALUES // self.n_features)):
            values = part.to(self.device, torch.float64)
            low, high = values.aminmax(dim=0)
            n, bad = torch.full_like(self._n, len(part)), torch.zeros_like(self._n)
            # NaN and infinities all show in the extremes; the usual stream has none and skips the masks.
            if not bool(torch.isfinite(low + high).all()):
                finite = torch.isfinite(values)
                n = finite.sum(0)
                bad = len(part) - n
                low = torch.where(finite, values, torch.inf).amin(0)
                high = torch.where(finite, values, -torch.inf).amax(0)
                mean = torch.where(finite, values, 0.0).sum(0) / n.clamp(min=1)
                values = torch.where(finite, values, mean)
            else:
                mean = values.mean(0)
            self._join(n, bad, mean, (values - mean).square_().sum(0), low, high)

    def merge(self, other: Mean) -> Mean:
        """The statistics of both streams together; neither is changed.

        Raises:
            InputError: `other` has rows of another length.
        """
        _check_same_width(self.n_features, other.n_features)
        both = Mean(self.n_features, self.device or other.device)
        for p in (self, other):
            both._join(p._n, p._n_nonfinite, p._mean, p._scatter, p._min, p._max)
        return both

    @property
    def n(self) -> Integer[Tensor, "features"]:
        """How many values of each feature were taken in."""
        return self._n.clone()

    @property
    def n_nonfinite(self) -> Integer[Tensor, "features"]:
        """How many values of each feature were left out because they are not finite."""
        return self._n_nonfinite.clone()

    @property
    def mean(self) -> Float[Tensor, "features"]:
        """The mean of each feature; NaN where it has no values."""
        return torch.where(self._n > 0, self._mean, torch.nan)

    @property
    def variance(self) -> Float[Tensor, "features"]:
        """The variance with divisor n - 1; NaN where there are fewer than two values."""
        return torch.where(self._n > 1, self._scatter / (self._n - 1).clamp(min=1), torch.nan)

    @property
    def min(self) -> Float[Tensor, "features"]:
        """The least value of each feature; NaN where it has none."""
        return torch.where(self._n > 0, self._min, torch.nan)

    @property
    def max(self) -> Float[Tensor, "features"]:
        """The greatest value of each feature; NaN where it has none."""
        return torch.where(self._n > 0, self._max, torch.nan)

    def _move(self, device: torch.device | None) -> None:
        self.device = device
        for name in ("_n", "_n_nonfinite", "_mean", "_scatter", "_min", "_max"):
            setattr(self, name, getattr(self, name).to(device))

    def _join(self, n: Tensor, bad: Tensor, mean: Tensor, scatter: Tensor, low: Tensor, high: Tensor) -> None:
        n, bad, mean, scatter, low, high = (t.to(self._n.device) for t in (n, bad, mean, scatter, low, high))
        delta = mean - self._mean
        # Integers divided by integers would be float32.
        share = n.double() / (self._n + n).clamp(min=1)
        self._scatter = self._scatter + scatter + delta.square() * (self._n * share)
        self._mean = self._mean + delta * share
        self._n = self._n + n
        self._n_nonfinite = self._n_nonfinite + bad
        self._min, self._max = torch.minimum(self._min, low), torch.maximum(self._max, high)


class Histogram:
    """How many values fall between given edges.

    Bins are closed on the left and open on the right, and the last is closed on both sides.

    Args:
        edges: rising numbers, one more than there are bins.
        device: where the counts live; None for the device of the first values.

    >>> h = Histogram([0.0, 1.0, 2.0])
    >>> h.update(torch.tensor([-1.0, 0.0, 0.5, 2.0, 9.0]))
    >>> h.counts, h.below, h.above
    (tensor([2, 1]), 1, 1)
    """

    def __init__(
        self, edges: Sequence[float] | Float[Tensor, "edges"], device: str | torch.device | None = None
    ) -> None:
        self.edges = torch.as_tensor(edges, dtype=torch.float64, device=device).detach().clone()
        if self.edges.ndim != 1 or len(self.edges) < 2 or not bool((self.edges.diff() > 0).all()):
            raise InputError("edges must be at least two rising numbers")
        self.device = None if device is None else torch.device(device)
        # Slots: below, each bin, above, not finite.
        self._slots = torch.zeros(len(self.edges) + 2, dtype=torch.int64, device=device)

    def update(self, x: Num[Tensor, "..."]) -> None:
        """Take values in, of any shape and any real type."""
        flat = x.detach().reshape(-1)
        if self.device is None and flat.numel():
            self.device = flat.device
            self.edges, self._slots = self.edges.to(self.device), self._slots.to(self.device)
        for part in flat.split(_CHUNK_VALUES):
            values = part.to(self.device, torch.float64)
            slot = torch.bucketize(values, self.edges, right=True)
            slot = torch.where(values == self.edges[-1], len(self.edges) - 1, slot)
            slot = torch.where(torch.isfinite(values), slot, len(self.edges) + 1)
            self._slots += torch.bincount(slot, minlength=len(self._slots))

    def merge(self, other: Histogram) -> Histogram:
        """The counts of both streams together; neither is changed.

        Raises:
            InputError: `other` has other edges.
        """
        if not torch.equal(self.edges.cpu(), other.edges.cpu()):
            raise InputError("cannot merge histograms with different edges")
        both = Histogram(self.edges, self.device or other.device)
        both._slots = self._slots.to(both.edges.device) + other._slots.to(both.edges.device)
        return both

    @property
    def counts(self) -> Integer[Tensor, "bins"]:
        """How many values fell into each bin."""
        return self._slots[1:-2].clone()

    @property
    def below(self) -> int:
        """How many values lie below the first edge."""
        return int(self._slots[0])

    @property
    def above(self) -> int:
        """How many values lie above the last edge."""
        return int(self._slots[-2])

    @property
    def n(self) -> int:
        """How many finite values were taken in."""
        return int(self._slots[:-1].sum())

    @property
    def n_nonfinite(self) -> int:
        """How many values were left out because they are not finite."""
        return int(self._slots[-1])


class TopK:
    """The `k` largest values of a stream, each with the integers that say where it came from.

    Of equal values the one with the smaller ids is kept, so that the result does not depend on how the stream is
    cut. Values that are not finite are left out and counted.

    Args:
        k: how many to keep.

    >>> top = TopK(2)
    >>> top.update(torch.tensor([1.0, 7.0, 3.0]), torch.tensor([10, 11, 12]))
    >>> top.values, top.ids
    (tensor([7., 3.], dtype=torch.float64), tensor([11, 12]))
    """

    def __init__(self, k: int) -> None:
        if k < 1:
            raise InputError(f"k is {k}: keep at least one value")
        self.k = k
        self._n = 0
        self._n_nonfinite = 0
        self._values: Tensor | None = None
        self._ids: Tensor | None = None

    def update(self, values: Num[Tensor, "*n"], ids: Integer[Tensor, "*n_width"]) -> None:
        """Take values in.

        Args:
            values: any shape.
            ids: one integer a value (the same shape), or a tuple of them (one more dimension).

        Raises:
            InputError: `ids` does not fit `values`, or holds tuples of another length than before.
        """
        width = ids.shape[values.ndim :]
        if ids.shape[: values.ndim] != values.shape or len(width) > 1:
            raise InputError(
                f"ids of shape {tuple(ids.shape)} do not fit values of shape {tuple(values.shape)}: "
                "give one integer or one tuple of integers a value"
            )
        if self._ids is not None and self._ids.shape[1:] != width:
            raise InputError(f"ids are {tuple(width)} integers each; before they were {tuple(self._ids.shape[1:])}")
        flat = values.detach().reshape(-1).double()
        names = ids.detach().reshape(-1, *width)
        finite = torch.isfinite(flat)
        kept = int(finite.sum())
        self._n += kept
        self._n_nonfinite += len(flat) - kept
        if self._values is not None and len(self._values) == self.k:
            finite &= flat >= self._values[-1].to(flat.device)
        flat, names = flat[finite], names[finite]
        if len(flat) > self.k:
            least = torch.topk(flat, self.k, sorted=True).values[-1]
            flat, names = flat[flat >= least], names[flat >= least]
        self._keep(flat, names)

    def merge(self, other: TopK) -> TopK:
        """The largest of both streams together, as many as the larger `k`; neither is changed."""
        both = TopK(max(self.k, other.k))
        for part in (self, other):
            both._n += part._n
            both._n_nonfinite += part._n_nonfinite
            if part._values is not None and part._ids is not None:
                if both._ids is not None and both._ids.shape[1:] != part._ids.shape[1:]:
                    raise InputError("cannot merge: the ids are tuples of different lengths")
                both._keep(part._values, part._ids)
        return both

    @property
    def values(self) -> Float[Tensor, "kept"]:
        """The largest values, falling, in float64."""
        return torch.empty(0, dtype=torch.float64) if self._values is None else self._values.clone()

    @property
    def ids(self) -> Integer[Tensor, "kept *width"]:
        """The ids of `values`, in the same order."""
        return torch.empty(0, dtype=torch.int64) if self._ids is None else self._ids.clone()

    @property
    def n(self) -> int:
        """How many finite values were seen."""
        return self._n

    @property
    def n_nonfinite(self) -> int:
        """How many values were left out because they are not finite."""
        return self._n_nonfinite

    def _keep(self, values: Tensor, ids: Tensor) -> None:
        if self._values is not None and self._ids is not None:
            values = torch.cat([self._values, values.to(self._values.device)])
            ids = torch.cat([self._ids, ids.to(self._ids.device)])
        # Stable sorts from the last key to the first: ids rising, then values falling.
        order = torch.arange(len(values), device=values.device)
        for column in reversed(ids.reshape(len(ids), -1).unbind(1) if len(ids) else []):
            order = order[torch.argsort(column[order], stable=True)]
        order = order[torch.argsort(values[order], descending=True, stable=True)][: self.k]
        self._values, self._ids = values[order], ids[order]


class Reservoir:
    """A uniform sample of `k` rows of a stream, without replacement.

    Every row draws a random key and the rows with the `k` largest keys stay, which makes samples of two streams
    mergeable. Streams that will be merged need generators of different seeds.

    Args:
        k: how many rows to keep.
        generator: a CPU generator for the keys.

    Source:
        Efraimidis and Spirakis, Weighted Random Sampling with a Reservoir (2006), with equal weights.

    >>> r = Reservoir(3, torch.Generator().manual_seed(0))
    >>> r.update(torch.arange(100).reshape(50, 2))
    >>> r.rows.shape, r.n
    (torch.Size([3, 2]), 50)
    """

    def __init__(self, k: int, generator: torch.Generator) -> None:
        if k < 1:
            raise InputError(f"k is {k}: keep at least one row")
        self.k = k
        self.generator = generator
        self._n = 0
        self._keys: Tensor | None = None
        self._rows: Tensor | None = None
        self._indices: Tensor | None = None

    def update(self, rows: Shaped[Tensor, "n *row"]) -> None:
        """Take rows in: the first dimension counts them, the rest is kept as it is.

        Raises:
            InputError: a row has another shape than before.
        """
        if self._rows is not None and rows.shape[1:] != self._rows.shape[1:]:
            raise InputError(f"rows of shape {tuple(rows.shape[1:])} after rows of shape {tuple(self._rows.shape[1:])}")
        keys = torch.rand(len(rows), generator=self.generator, dtype=torch.float64)
        full = self._keys is not None and len(self._keys) == self.k
        keep = torch.nonzero(keys > self._keys.min()).flatten() if full else torch.arange(len(rows))
        if len(keep) > self.k:
            keep = keep[torch.topk(keys[keep], self.k).indices]
        if len(keep) or self._rows is None:
            self._keep(keys[keep], rows.detach()[keep.to(rows.device)], keep + self._n)
        self._n += len(rows)

    def merge(self, other: Reservoir) -> Reservoir:
        """A uniform sample of both streams together, of the smaller `k`; neither is changed.

        The indices of `other` go on after the rows of this stream. The new sample draws from this one's generator.
        """
        both = Reservoir(min(self.k, other.k), self.generator)
        for part in (self, other):
            if part._keys is not None and part._rows is not None and part._indices is not None:
                if both._rows is not None and both._rows.shape[1:] != part._rows.shape[1:]:
                    raise InputError("cannot merge: the rows have different shapes")
                both._keep(part._keys, part._rows, part._indices + both._n)
            both._n += part._n
        return both

    @property
    def rows(self) -> Shaped[Tensor, "kept *row"]:
        """The sampled rows, in the order of the stream."""
        return torch.empty(0) if self._rows is None else self._rows.clone()

    @property
    def indices(self) -> Integer[Tensor, "kept"]:
        """Which rows of the stream they are, counted from 0."""
        return torch.empty(0, dtype=torch.int64) if self._indices is None else self._indices.clone()

    @property
    def n(self) -> int:
        """How many rows were seen."""
        return self._n

    def _keep(self, keys: Tensor, rows: Tensor, indices: Tensor) -> None:
        if self._keys is not None and self._rows is not None and self._indices is not None:
            keys = torch.cat([self._keys, keys])
            rows = torch.cat([self._rows, rows.to(self._rows.device)])
            indices = torch.cat([self._indices, indices])
        order = torch.topk(keys, min(self.k, len(keys))).indices
        order = order[torch.argsort(indices[order])]
        self._keys, self._indices = keys[order], indices[order]
        self._rows = rows[order.to(rows.device)].clone()


def _rows(x: Any, n_features: int) -> Tensor:
    if not isinstance(x, Tensor) or not x.dtype.is_floating_point:
        kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise InputError(f"x is {kind}: give a tensor of floats")
    if x.ndim < 1 or (x.shape[-1] != n_features):
        raise InputError(f"x has shape {tuple(x.shape)}: the last dimension must be {n_features}")
    return x.detach().reshape(-1, n_features)


def _check_same_width(ours: int, theirs: int) -> None:
    if ours != theirs:
        raise InputError(f"cannot merge rows of {theirs} features into rows of {ours}")


def _mirrored(lower: Tensor) -> Tensor:
    """A full symmetric matrix from its lower triangle (what stands above it is ignored)."""
    return lower.tril() + lower.tril(-1).mT
