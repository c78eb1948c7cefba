"""The check-up of one model: what is inside, what is dead weight, what 4 bits cost; and what to do about it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from assay._findings import MAX_FINDINGS, Finding, find
from assay.compress import Codebook, af4_codebook, nf4_codebook, quantize, rtn_codebook, solve_codebook
from assay.core.anatomy import Anatomy, anatomy
from assay.core.checkpoint import Checkpoint
from assay.core.errors import CheckpointError, InputError, NotApplicable, UnknownArchitecture
from assay.core.health import WeightHealth, weight_health
from assay.core.loss import Drift, DriftResult, LossReducer, LossResult, language_loss, require_causal
from assay.core.progress import Progress, silent
from assay.core.resources import peak_memory
from assay.core.results import Column, Result, Table
from assay.core.stats import Interval, paired_interval
from assay.core.text import Windows, read_texts, token_windows
from assay.core.trace import Reducer, trace
from assay.lens import (
    HeadScoreReducer,
    HeadScores,
    NerveReducer,
    NerveResult,
    RopeHeadsReducer,
    RopeHeadsResult,
    StabilityCurve,
    ablate_heads,
    noise_stability,
)
from assay.reference import PREFIX, builtin

SECTIONS = ("health", "loss", "nerve", "inactive-heads", "rope-heads", "noise-stability", "bof4")
Level = Literal["quick", "standard", "full"]

# A head is called inactive where zeroing it together with the others of its kind costs less than this much loss.
TOLERANCE = 0.01
# Below this many predicted tokens the report says that they are few.
FEW_TOKENS = 256
_FLOAT32_LIMIT = 2 << 30
_SCORE = "ahon_ln"


@dataclass(frozen=True)
class Effort:
    """How much is measured at one level.

    Attributes:
        tokens: for loss, spectra and head scores.
        context: tokens in a window, at most what the model takes.
        fractions: which shares of heads are removed.
        removal_tokens: for the loss without them.
        drift_tokens: for the loss and KL of each 4-bit scheme.
        schemes: which 4-bit schemes.
        layer_tokens: for the KL of each layer in 4 bits; 0 leaves it out.
        pairs: pairs of windows for noise stability.
        stability_tokens: tokens in such a window.
        rhos: its correlations.
    """

    tokens: int
    context: int
    fractions: tuple[float, ...]
    removal_tokens: int
    drift_tokens: int
    schemes: tuple[str, ...]
    layer_tokens: int
    pairs: int
    stability_tokens: int
    rhos: tuple[float, ...]


EFFORTS: dict[str, Effort] = {
    "quick": Effort(
        tokens=2048,
        context=256,
        fractions=(0.05, 0.1, 0.2),
        removal_tokens=1024,
        drift_tokens=1024,
        schemes=("bof4-s+opq", "nf4", "rtn"),
        layer_tokens=0,
        pairs=24,
        stability_tokens=64,
        rhos=(0.5, 0.9),
    ),
    "standard": Effort(
        tokens=8192,
        context=512,
        fractions=(0.05, 0.1, 0.15, 0.2, 0.3),
        removal_tokens=4096,
        drift_tokens=2048,
        schemes=("bof4-s+opq", "bof4-s", "nf4", "af4", "rtn"),
        layer_tokens=512,
        pairs=128,
        stability_tokens=128,
        rhos=(0.0, 0.25, 0.5, 0.75, 0.9),
    ),
    "full": Effort(
        tokens=65536,
        context=1024,
        fractions=(0.05, 0.1, 0.15, 0.2, 0.25, 0.3),
        removal_tokens=16384,
        drift_tokens=16384,
        schemes=("bof4-s+opq", "bof4-s", "bof4", "nf4", "af4", "rtn"),
        layer_tokens=2048,
        pairs=512,
        stability_tokens=128,
        rhos=(0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95),
    ),
}


@dataclass(frozen=True)
class ModelFacts:
    """Who the model is.

    Attributes:
        name: as the user named it.
        architecture: the class, such as "LlamaForCausalLM".
        model_type: such as "llama".
        parameters: how many, each counted once.
        dtype: of the weights in this run.
        stored_dtype: of most weights on disk, or "GGUF" for that format's own types.
        context: the longest sequence that the configuration allows; None where it does not say.
        vocab_size: tokens that the head tells apart; None for an image model.
        tied: whether the head shares the embedding's weights.
        n_layers, n_heads, n_kv_heads, hidden_size, ffn_size: its shape; None where it is not known.
        causal: whether it predicts the next token.
    """

    name: str
    architecture: str
    model_type: str
    parameters: int
    dtype: str
    stored_dtype: str
    context: int | None
    vocab_size: int | None
    tied: bool
    n_layers: int | None
    n_heads: int | None
    n_kv_heads: int | None
    hidden_size: int | None
    ffn_size: int | None
    causal: bool


@dataclass(frozen=True)
class Removal:
    """What it costs to zero the least active heads, chosen anew for each window.

    Attributes:
        fraction: the share of heads that the threshold flags on the calibration windows.
        tau: the threshold on the score.
        zeroed: the share that was really zeroed.
        change: increase of the loss with its 95 % interval over windows, in nats a token.
    """

    fraction: float
    tau: float
    zeroed: float
    change: Interval


@dataclass(frozen=True)
class HeadMap:
    """Attention heads: which do nothing, which go by position, which by content.

    Attributes:
        score: mean activity of each head relative to its layer's mean (AHON-LN, no unit).
        inactive: heads that are flagged on most windows at the largest share whose removal costs less than
            `TOLERANCE` nats a token, the interval's upper end included; all False where there is none.
        removals: what each share costs.
        rope: positional and symbolic scores, where the model has rotary embeddings.
    """

    score: Float[Tensor, "layers heads"]
    inactive: Bool[Tensor, "layers heads"]
    removals: tuple[Removal, ...]
    tolerated: Removal | None


@dataclass(frozen=True)
class SchemeCost:
    """What one 4-bit scheme costs.

    Attributes:
        scheme: its name.
        bits_per_weight: with scales and outliers.
        relative_error: ‖Ŵ − W‖²/‖W‖² over all block weights.
        layer_error: the same by block.
        drift: how predictions moved; None where the model predicts no next token.
    """

    scheme: str
    bits_per_weight: float
    relative_error: float
    layer_error: tuple[float, ...]
    drift: DriftResult | None


@dataclass(frozen=True)
class FourBits(Result):
    """What 4 bits cost, by scheme and by block.

    Attributes:
        schemes: one entry a scheme; the linear layers of all blocks are quantised, embeddings and head are not.
        layer_scheme: the scheme of `layer_kl`.
        layer_kl: KL of the predictions when only that block is quantised, in nats a token; empty where not measured.
        loss: loss of the unchanged model on the same windows, in nats a token.
        n_tokens: predicted tokens.
    """

    schemes: tuple[SchemeCost, ...]
    layer_scheme: str
    layer_kl: tuple[Interval, ...]
    loss: float | None
    n_tokens: int

    def table(self) -> Table:
        """One row a scheme."""
        columns = (
            Column("scheme"),
            Column("bits/weight"),
            Column("weight error", "‖Δ‖²/‖W‖²"),
            Column("KL", "nats/token"),
            Column("loss change", "nats/token"),
            Column("perplexity"),
            Column("same first choice"),
        )
        rows = []
        for s in self.schemes:
            d = s.drift
            rest = (d.kl.mean, d.loss_change.mean, d.perplexity, d.agreement) if d else (None,) * 4
            rows.append((s.scheme, s.bits_per_weight, s.relative_error, *rest))
        return Table(columns, tuple(rows))


@dataclass(frozen=True)
class Skipped:
    """A section that was not measured, and why."""

    section: str
    reason: str


@dataclass(frozen=True)
class Examination(Result):
    """Everything that was measured on one model. A section that is None stands in `skipped` with the reason."""

    model: ModelFacts
    settings: dict[str, Any]
    findings: tuple[Finding, ...]
    health: WeightHealth | None
    loss: LossResult | None
    heads: HeadMap | None
    rope: RopeHeadsResult | None
    nerve: NerveResult | None
    stability: StabilityCurve | None
    four_bits: FourBits | None
    skipped: tuple[Skipped, ...]
    seconds: dict[str, float]
    peak_memory: int

    def table(self) -> Table:
        """The findings."""
        columns = (Column("finding"), Column("figure"), Column("low"), Column("high"), Column("unit"))
        return Table(columns, tuple((f.sentence, f.number, f.low, f.high, f.unit) for f in self.findings))


@dataclass
class _Run:
    """The state of one examination."""

    model: nn.Module
    name: str
    anatomy: Anatomy | None
    windows: Windows | None
    effort: Effort
    wanted: Collection[str]
    seed: int
    special: tuple[int, ...]
    progress: Progress
    skipped: list[Skipped] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    def section(self, name: str, measure: Callable[[], Any]) -> Any:
        """Measure one section; where it does not apply, note why."""
        if name not in self.wanted:
            return None
        start = time.perf_counter()
        self.progress(0, None, name)
        try:
            return measure()
        except (NotApplicable, UnknownArchitecture) as error:
            self.skipped.append(Skipped(name, str(error)))
            return None
        finally:
            self.seconds[name] = time.perf_counter() - start

    def some(self, tokens: int) -> Int[Tensor, "windows context"]:
        """The first windows, `tokens` tokens of them at most, one at least."""
        rows = self.need_text().input_ids
        return rows[: max(1, tokens // rows.shape[1])]

    def need_text(self) -> Windows:
        """The windows of text.

        Raises:
            NotApplicable: the model reads none.
        """
        if self.windows is None:
            raise NotApplicable("this model does not read text")
        return self.windows

    def need_anatomy(self) -> Anatomy:
        """The anatomy.

        Raises:
            UnknownArchitecture: assay does not know the architecture.
        """
        return self.anatomy if self.anatomy is not None else anatomy(self.model)


def examine(
    source: str | Path | tuple[nn.Module, Any],
    *,
    text: str | Path | Iterable[str] | None = None,
    level: Level = "standard",
    tokens: int | None = None,
    context: int | None = None,
    only: Collection[str] | None = None,
    base: str | Path | None = None,
    allow_pickle: bool = False,
    device: str | torch.device = "cpu",
    seed: int = 0,
    progress: Progress = silent,
) -> Examination:
    """Examine a model.

    Args:
        source: a path that `Checkpoint` takes, "builtin:NAME", or a loaded model with its tokenizer.
        text: a file of text, or texts; by default a built-in sample.
        level: how much effort.
        tokens: of text; by default as `level` says.
        context: tokens in a window; by default as `level` says, and never more than the model takes.
        only: some of `SECTIONS`; all by default.
        base: the base of an adapter.
        allow_pickle: as in `Checkpoint`.
        device: where to run.
        seed: of everything that is sampled.
        progress: called as work advances.

    Raises:
        AssayError: the model or the text cannot be read, or an option is impossible.
    """
    wanted = _wanted(only)
    effort = EFFORTS[level]
    _check_device(device)
    start = time.perf_counter()
    progress(0, None, "load")
    images: Tensor | None = None
    checkpoint: Checkpoint | None = None
    if isinstance(source, tuple):
        model, tokenizer = source
        if base is not None:
            raise InputError("base: a loaded model takes none: leave it out")
        if getattr(model, "main_input_name", "input_ids") != "input_ids":
            tokenizer = None
        name, stored = type(model).__name__, str(next(model.parameters()).dtype)
        config = model.config.to_dict()
    else:
        name, path = str(source), Path(source)
        if name.startswith(PREFIX):
            subject = builtin(name)
            if subject.KIND != "checkpoint":
                raise InputError(f"{name} is no model: `assay try` takes it")
            path = subject.load()
            images = subject.images() if hasattr(subject, "images") else None
        checkpoint = Checkpoint(path, base=base, allow_pickle=allow_pickle)
        stored = "GGUF" if checkpoint.format == "gguf" else str(checkpoint.stored_dtype)
        config = checkpoint.configuration.to_dict()
        tokenizer = checkpoint.tokenizer() if checkpoint.reads_text else None
    # The text comes before the weights: a bad one should not be found out after minutes of loading.
    windows = None
    if tokenizer is not None:
        limit = _context_limit(config)
        if context is not None and limit is not None and context > limit:
            raise InputError(f"--context is {context}, and the model takes {limit} tokens at most")
        windows = token_windows(
            tokenizer,
            _texts(text),
            tokens=effort.tokens if tokens is None else tokens,
            context=min(effort.context, limit or effort.context) if context is None else context,
        )
    elif text is not None:
        raise InputError(f"--text: {name} reads no text: leave it out")
    if checkpoint is not None:
        model = checkpoint.load(_run_dtype(checkpoint), device)
    try:
        found: Anatomy | None = anatomy(model)
    except UnknownArchitecture:
        found = None
    if windows is not None:
        largest, rows = int(windows.input_ids.max()), len(model.get_input_embeddings().weight)
        if largest >= rows:
            raise InputError(
                f"the tokenizer gives token {largest} and the model's embedding has {rows}: they do not match"
            )
    special = tuple(getattr(tokenizer, "all_special_ids", ())) if tokenizer is not None else ()
    run = _Run(model, name, found, windows, effort, wanted, seed, special, progress)
    run.seconds["load"] = time.perf_counter() - start
    return _examine(run, stored, images, level)


def _wanted(only: Collection[str] | None) -> tuple[str, ...]:
    if only is None:
        return SECTIONS
    unknown = [s for s in only if s not in SECTIONS]
    if unknown or not only:
        raise InputError(f"--only {','.join(unknown) or 'nothing'}: choose from {', '.join(SECTIONS)}")
    return tuple(s for s in SECTIONS if s in only)


def _texts(text: str | Path | Iterable[str] | None) -> Iterable[str]:
    if text is None:
        from assay.reference._text import sample

        return [sample()]
    if isinstance(text, str | Path):
        return read_texts(text)
    return text


def _run_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """float32 where it fits comfortably; half precision as stored where it does not (bfloat16 on a CPU)."""
    stored = checkpoint.stored_dtype
    if checkpoint.format == "gguf":
        return torch.float32
    size = sum(math.prod(t.shape) for t in checkpoint.tensors.values()) if checkpoint.format == "safetensors" else 0
    if stored == torch.float32 or 4 * size <= _FLOAT32_LIMIT:
        return torch.float32
    return torch.bfloat16


def _context_limit(config: dict[str, Any]) -> int | None:
    inner = config.get("text_config")
    for source in (config, inner if isinstance(inner, dict) else {}):
        for key in ("max_position_embeddings", "n_positions", "seq_length"):
            value = source.get(key)
            if isinstance(value, int) and value > 0:
                # RoBERTa counts its positions from the padding index on.
                return value - 2 if config.get("model_type") == "roberta" else value
    return None


def _check_device(device: str | torch.device) -> None:
    try:
        if torch.empty(0, device=device).is_meta:
            raise InputError(f"--device {device} cannot be used here: it holds no values")
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise InputError(f"--device {device} cannot be used here: {str(error).splitlines()[0]}") from error


def _examine(run: _Run, stored: str, images: Tensor | None, level: str) -> Examination:
    if not all(p.isfinite().all() for p in run.model.parameters()):
        run.wanted = ("health", *(s for s in run.wanted if s != "health"))
    health: WeightHealth | None = run.section("health", lambda: weight_health(run.model, anatomy=run.anatomy))
    if health is not None and health.not_finite:
        reason = (
            f"the weights hold {health.not_finite:,} NaN or infinite values (most in {health.suspicious()[0].name}), so "
            "nothing that runs the model means anything"
        )
        run.skipped += [Skipped(s, reason) for s in run.wanted if s != "health"]
        run.wanted = ("health",)
    _check_outputs(run, images)
    loss, nerve, scores, rope = _one_pass(run, images)
    heads = run.section("inactive-heads", lambda: _head_map(run, scores)) if scores is not None else None
    stability = run.section("noise-stability", lambda: _stability(run))
    four_bits = run.section("bof4", lambda: _four_bits(run))
    facts = _facts(run, stored)
    settings = {
        "level": level,
        "seed": run.seed,
        "sections": list(run.wanted),
        "tokens": run.windows.n_tokens if run.windows else 0,
        "context": run.windows.input_ids.shape[1] if run.windows else 0,
        "characters": run.windows.n_characters if run.windows else 0,
        "bos": bool(run.windows and run.windows.starts_with_bos),
    }
    return Examination(
        model=facts,
        settings=settings,
        findings=(
            *_caution(run),
            *find(run.name, facts, health, loss, heads, rope, nerve, stability, four_bits),
        )[:MAX_FINDINGS],
        health=health,
        loss=loss,
        heads=heads,
        rope=rope,
        nerve=nerve,
        stability=stability,
        four_bits=four_bits,
        skipped=tuple(run.skipped),
        seconds=run.seconds,
        peak_memory=peak_memory(),
    )


def _check_outputs(run: _Run, images: Tensor | None) -> None:
    """Refuse a model whose finite weights do not give finite outputs on the first window."""
    if run.anatomy is None or set(run.wanted) <= {"health"}:
        return
    rows = images if run.windows is None else run.windows.input_ids
    if rows is None:
        return
    name = "pixel_values" if run.windows is None else "input_ids"
    with torch.no_grad():
        hidden = run.anatomy.backbone(**{name: rows[:1].to(next(run.model.parameters()).device)})[0]
    if not hidden.isfinite().all():
        raise CheckpointError(
            f"{run.name}: all weights are finite, and yet the model computes NaN or infinity from the first window: look "
            "for an impossible number in its configuration, such as a negative epsilon"
        )


def _caution(run: _Run) -> Iterator[Finding]:
    """A warning where little text was measured."""
    if run.windows is None or set(run.wanted) <= {"health"}:
        return
    n, context = run.windows.input_ids.shape
    predicted = n * (context - 1)
    if predicted < FEW_TOKENS:
        yield Finding(
            key="few-tokens",
            level="warning",
            sentence=f"Only {predicted} {'token was' if predicted == 1 else 'tokens were'} predicted, so perplexity and all "
            f"else that rests on the text may be far off: give at least {FEW_TOKENS}, better thousands.",
            number=predicted,
            unit="tokens",
            low=None,
            high=None,
            uncertainty="counted, not estimated",
            command=f"assay examine {run.name} --text LONGER_TEXT --tokens {run.effort.tokens}",
            section="loss",
        )


def _one_pass(
    run: _Run, images: Tensor | None
) -> tuple[LossResult | None, NerveResult | None, HeadScores | None, RopeHeadsResult | None]:
    """Everything that one forward pass over the text can serve together."""

    def causal() -> Anatomy:
        found = run.need_anatomy()
        run.need_text()
        require_causal(found)
        return found

    def rotary() -> RopeHeadsReducer:
        if all(b.attention.rotary is None for b in causal().blocks):
            raise NotApplicable("the model has no rotary position embeddings")
        if run.need_text().input_ids.shape[1] < 3:
            raise NotApplicable("exchanging keys takes windows of at least 3 tokens")
        return RopeHeadsReducer()

    def start_nerve() -> NerveReducer:
        if images is None:
            run.need_text()
        return NerveReducer(run.need_anatomy(), seed=run.seed)

    def start_loss() -> LossReducer:
        causal()
        return LossReducer()

    def start_heads() -> HeadScoreReducer:
        causal()
        return HeadScoreReducer((_SCORE,))

    starts: dict[str, Callable[[], Any]] = {
        "loss": start_loss,
        "nerve": start_nerve,
        "inactive-heads": start_heads,
        "rope-heads": rotary,
    }
    reducers: dict[str, Reducer] = {}
    for name, make in starts.items():
        reducer = run.section(name, make)
        if reducer is not None:
            reducers[name] = reducer
    if not reducers:
        return None, None, None, None
    begin = time.perf_counter()
    if run.windows is not None:
        rows = run.windows.input_ids
        batches: list[Any] = list(rows.split(max(1, 1024 // rows.shape[1])))
    else:
        assert images is not None
        batches = [{"pixel_values": part} for part in images.split(64)]

    def advance(done: float, total: float | None, what: str) -> None:
        run.progress(done, len(batches), "one pass for " + ", ".join(reducers))

    trace(run.model, batches, list(reducers.values()), anatomy=run.anatomy, progress=advance)
    run.seconds["one pass"] = time.perf_counter() - begin
    results = {}
    for name, reducer in reducers.items():
        before = run.seconds.get(name, 0.0)
        results[name] = run.section(name, reducer.result)  # type: ignore[attr-defined]
        run.seconds[name] += before
    return tuple(results.get(name) for name in starts)  # type: ignore[return-value]


def _head_map(run: _Run, scores: HeadScores) -> HeadMap:
    """Remove growing shares of heads on windows that the thresholds were not set on, where there are enough."""
    rows = run.some(run.effort.removal_tokens)
    n = len(rows)
    calibration = scores[_SCORE][n:] if len(scores[_SCORE]) > n else scores[_SCORE]
    # The windows at the end set the thresholds, those at the front tell what they cost.
    taus = HeadScores({_SCORE: calibration}, scores.layers, scores.tokens[-len(calibration) :]).thresholds(
        _SCORE, run.effort.fractions
    )
    batches = list(rows.split(max(1, 1024 // rows.shape[1])))
    before = language_loss(run.model, batches, anatomy_=run.anatomy).per_window
    removals = []
    for done, (fraction, tau) in enumerate(zip(run.effort.fractions, taus.tolist(), strict=True)):
        run.progress(done, len(taus), "losses without inactive heads")
        with ablate_heads(run.model, _SCORE, tau, anatomy=run.anatomy) as stats:
            after = language_loss(run.model, batches, anatomy_=run.anatomy).per_window
        removals.append(Removal(fraction, tau, stats.fraction_zeroed, paired_interval(after.numpy(), before.numpy())))
    tolerated = None
    for removal in removals:
        upper = removal.change.high if math.isfinite(removal.change.high) else removal.change.mean
        if upper >= TOLERANCE:
            break
        tolerated = removal
    mean = scores.mean(_SCORE)
    inactive = torch.zeros_like(mean, dtype=torch.bool)
    if tolerated is not None:
        inactive = scores.flagged(_SCORE, tolerated.tau).float().mean(0) > 0.5
    return HeadMap(mean, inactive, tuple(removals), tolerated)


def _stability(run: _Run) -> StabilityCurve:
    found = run.need_anatomy()
    text = run.need_text()
    rows, tokens = text.input_ids, min(run.effort.stability_tokens, text.input_ids.shape[1])
    # Windows that begin alike are cut short; others can be cut up into more, which are more independent.
    short = (
        rows[:, :tokens] if text.starts_with_bos else rows[:, : rows.shape[1] // tokens * tokens].reshape(-1, tokens)
    )
    return noise_stability(
        run.model,
        short,
        rho=run.effort.rhos,
        kernel="bonami",
        vocab=found.vocab_size,
        n_pairs=run.effort.pairs,
        protect=run.special,
        seed=run.seed,
    )


def _codebooks(names: Iterable[str]) -> dict[str, tuple[Codebook, float | None]]:
    """The codebook of each scheme, and the quantile beyond which weights are kept in 16 bits."""
    makers: dict[str, Callable[[], tuple[Codebook, float | None]]] = {
        "bof4-s+opq": lambda: (solve_codebook(64, signed=True), 0.95),
        "bof4-s": lambda: (solve_codebook(64, signed=True), None),
        "bof4": lambda: (solve_codebook(64, signed=False), None),
        "nf4": lambda: (nf4_codebook(), None),
        "af4": lambda: (af4_codebook(64), None),
        "rtn": lambda: (rtn_codebook(), None),
    }
    return {name: makers[name]() for name in names}


@dataclass
class _Swap:
    """Puts decoded 4-bit weights in the place of a block's own, and the own ones back."""

    blocks: list[list[nn.Module]]
    originals: list[list[Tensor]]

    @classmethod
    def of(cls, found: Anatomy) -> _Swap:
        modules = [[p.module for _, p in block.projections()] for block in found.blocks]
        return cls(modules, [[m.get_parameter("weight").data for m in block] for block in modules])

    def quantise(self, index: int, codebook: Codebook, opq: float | None) -> tuple[float, float, float, int]:
        """Quantise one block: squared error, squared weights, bits and weights."""
        error = energy = bits = 0.0
        count = 0
        for module, weight in zip(self.blocks[index], self.originals[index], strict=True):
            packed = quantize(weight, codebook, 64, opq)
            decoded = packed.dequantize(weight.dtype)
            error += float((decoded.double() - weight.double()).square().sum())
            energy += float(weight.double().square().sum())
            bits += packed.bits_per_weight * weight.numel()
            count += weight.numel()
            module.weight.data = decoded
        return error, energy, bits, count

    def restore(self, indices: Iterable[int]) -> None:
        for index in indices:
            for module, weight in zip(self.blocks[index], self.originals[index], strict=True):
                module.weight.data = weight


def _four_bits(run: _Run) -> FourBits:
    found = run.need_anatomy()
    drift: Drift | None = None
    try:
        require_causal(found)
        drift = Drift(run.model, run.some(run.effort.drift_tokens), anatomy_=found)
        base = drift.measure()
    except NotApplicable:
        base = None
    swap = _Swap.of(found)
    every = range(len(found.blocks))
    books = _codebooks(run.effort.schemes)
    schemes = []
    kls: list[Interval] = []
    try:
        for done, (name, (codebook, opq)) in enumerate(books.items()):
            run.progress(done, len(books), "4-bit schemes")
            parts = [swap.quantise(i, codebook, opq) for i in every]
            errors, energies, bits, counts = (list(column) for column in zip(*parts, strict=True))
            schemes.append(
                SchemeCost(
                    scheme=name,
                    bits_per_weight=sum(bits) / sum(counts),
                    relative_error=sum(errors) / sum(energies),
                    layer_error=tuple(e / w if w else 0.0 for e, w in zip(errors, energies, strict=True)),
                    drift=drift.measure() if drift else None,
                )
            )
            swap.restore(every)
        first, (codebook, opq) = next(iter(books.items()))
        if drift is not None and run.effort.layer_tokens:
            n = max(1, run.effort.layer_tokens // drift.windows.shape[1])
            for i in every:
                run.progress(i, len(found.blocks), "4 bits block by block")
                swap.quantise(i, codebook, opq)
                kls.append(drift.measure(n).kl)
                swap.restore([i])
    finally:
        swap.restore(every)
    return FourBits(tuple(schemes), first, tuple(kls), base.loss if base else None, base.n_tokens if base else 0)


def _facts(run: _Run, stored: str) -> ModelFacts:
    model, found = run.model, run.anatomy
    config = model.config
    first = found.blocks[0] if found and found.blocks else None
    text = run.windows is not None
    embedding = model.get_input_embeddings().weight if text else None
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return ModelFacts(
        name=run.name,
        architecture=type(model).__name__,
        model_type=str(config.model_type),
        parameters=sum(p.numel() for p in model.parameters()),
        dtype=str(next(model.parameters()).dtype).removeprefix("torch."),
        stored_dtype=stored.removeprefix("torch."),
        context=_context_limit(config.to_dict()) if text else None,
        vocab_size=getattr(config, "vocab_size", None) if text else None,
        tied=head is not None and embedding is not None and getattr(head, "weight", None) is embedding,
        n_layers=found.n_layers if found else None,
        n_heads=first.attention.n_heads if first else None,
        n_kv_heads=first.attention.n_kv_heads if first else None,
        hidden_size=found.hidden_size if found else None,
        ffn_size=first.mlp.down.in_features if first and first.mlp else None,
        causal=bool(found and found.causal),
    )
