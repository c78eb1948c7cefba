"""From a checkpoint to a smaller one: calibrate, pack block by block, write, read again, measure."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from assay.compress._blockwise import linear_layers
from assay.compress._sequential import Sequential
from assay.compressor._folder import Partial, check_unquantised, exchangeable, write_model
from assay.compressor._setting import Outcome, Setting
from assay.core.anatomy import Anatomy, anatomy
from assay.core.checkpoint import Checkpoint, quiet
from assay.core.errors import AssayError, InputError, MissingDependency, NotApplicable, OutputError
from assay.core.loss import Drift, DriftResult, LossReducer, LossResult, require_causal
from assay.core.output import check_new, new_directory, write_text
from assay.core.progress import Progress, silent
from assay.core.resources import peak_memory
from assay.core.results import Column, Result, Table, jsonable
from assay.core.text import read_texts, token_windows
from assay.core.trace import trace
from assay.reference import checkpoint as open_source
from assay.reference._text import sample

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

_HELD_WINDOWS = 32
_CONTEXT = 512
# Inputs that a layer must see for its Hessian to be worth more than none, as a share of its width.
_LEAST_ROWS = 0.25


@dataclass(frozen=True)
class Measured:
    """A model on the held-out text, and what it takes.

    Attributes:
        loss: next-token loss with its interval.
        bytes: of the weight files.
        bits_per_weight: of the layers that are packed, as they are stored.
    """

    loss: LossResult
    bytes: int
    bits_per_weight: float


@dataclass(frozen=True)
class LayerReport:
    """One packed layer.

    Attributes:
        name: in the model.
        setting: what was done.
        shape: rows and columns.
        bits_per_weight: as stored.
        error: squared output error on the calibration inputs, as a share of the output's square.
        note: what the reader should know.
    """

    name: str
    setting: str
    shape: tuple[int, ...]
    bits_per_weight: float
    error: float
    note: str


@dataclass(frozen=True)
class Tried:
    """A candidate of a search.

    Attributes:
        name: its setting.
        uniform: whether all layers have the same.
        bits_per_weight: of the packed layers.
        kl_calibration: KL to the original on calibration windows, nats a token: what candidates are chosen by.
        perplexity: on the held-out text, for the reader.
        fits: whether it is small enough.
    """

    name: str
    uniform: bool
    bits_per_weight: float
    kl_calibration: float
    perplexity: float
    fits: bool


@dataclass(frozen=True)
class Compression(Result):
    """What was done to a model and what it cost.

    Attributes:
        source: the original.
        out: where the new one is.
        setting: the method and its numbers; of a search, what was chosen.
        format: "compressed-tensors" or "assay".
        before: the original.
        after: the new model, read again from its directory.
        drift: how far its predictions moved.
        layers: one entry a packed layer.
        left: linear layers that were left, with the reason.
        calibration_tokens: tokens that the layers were fitted on.
        held_tokens: predicted tokens of the held-out text.
        parameters: weights of the whole model, packed or not.
        seconds: of the whole run.
        peak_memory: of the process, bytes.
        tried: the candidates of a search, their second moments taken in the original model; empty without one.
    """

    source: str
    out: str
    setting: str
    format: str
    before: Measured
    after: Measured
    drift: DriftResult
    layers: tuple[LayerReport, ...]
    left: dict[str, str]
    calibration_tokens: int
    held_tokens: int
    parameters: int
    seconds: float
    peak_memory: int
    tried: tuple[Tried, ...] = ()

    def table(self) -> Table:
        """Before and after."""
        columns = (Column("figure"), Column("before"), Column("after"))
        before, after, kl = self.before, self.after, self.drift.kl
        rows = (
            ("perplexity", _perplexity(before.loss), _perplexity(after.loss)),
            ("KL to the original (nats/token)", "0", _with_interval(kl.mean, kl.low, kl.high, 4)),
            ("same first choice", "100%", f"{self.drift.agreement:.1%}"),
            ("weight files (MB)", f"{before.bytes / 1e6:.1f}", f"{after.bytes / 1e6:.1f}"),
            ("bits per packed weight", f"{before.bits_per_weight:.2f}", f"{after.bits_per_weight:.3f}"),
            ("bits per weight, all files", *(f"{8 * x.bytes / self.parameters:.2f}" for x in (before, after))),
        )
        return Table(columns, rows, f"{self.source}: {self.setting}")

    def layer_table(self) -> Table:
        """One row a layer."""
        columns = (
            Column("layer"),
            Column("setting"),
            Column("weights"),
            Column("bits per weight", "bit", "as stored"),
            Column("output error", about="squared error on the calibration inputs, share of the output's square"),
            Column("note"),
        )
        rows = tuple((x.name, x.setting, math.prod(x.shape), x.bits_per_weight, x.error, x.note) for x in self.layers)
        return Table(columns, rows)

    def tried_table(self) -> Table:
        """One row a candidate of the search, smallest first."""
        columns = (
            Column("candidate"),
            Column("bits per weight", "bit"),
            Column("KL, calibration", "nats/token", "what candidates are chosen by"),
            Column("perplexity", about="on the held-out text"),
            Column("fits"),
        )
        ordered = sorted(self.tried, key=lambda t: t.bits_per_weight)
        rows = tuple(
            (t.name, t.bits_per_weight, t.kl_calibration, t.perplexity, "yes" if t.fits else "no") for t in ordered
        )
        return Table(columns, rows)

    def tried_figure(self) -> Figure:
        """Perplexity against size: each method on all layers alike, the mixture, and what was written."""
        import plotly.graph_objects as go

        figure = go.Figure()
        points = [(t.name.split()[0], t.name, t.bits_per_weight, t.perplexity) for t in self.tried]
        points.append(("written, block by block", self.setting, self.after.bits_per_weight, self.after.loss.perplexity))
        for symbol, kind in enumerate(dict.fromkeys(p[0] for p in points)):
            of_kind = sorted((p for p in points if p[0] == kind), key=lambda p: p[2])
            figure.add_scatter(
                x=[p[2] for p in of_kind],
                y=[p[3] for p in of_kind],
                hovertext=[p[1] for p in of_kind],
                mode="lines+markers",
                marker={"symbol": symbol, "size": 9},
                line={"width": 1},
                name=kind,
            )
        figure.update_layout(xaxis_title="bits per packed weight", yaxis_title="perplexity on held-out text")
        figure.update_yaxes(type="log")
        return figure

    def figure(self) -> Figure:
        """Output error of each layer by block, one colour a kind of layer."""
        import plotly.graph_objects as go

        figure = go.Figure()
        kinds = [layer.name.rpartition(".")[2] for layer in self.layers]
        for symbol, kind in enumerate(dict.fromkeys(kinds)):
            # A block's number is the first in the name.
            of_kind = [x for x, k in zip(self.layers, kinds, strict=True) if k == kind]
            figure.add_scatter(
                x=[next((int(part) for part in x.name.split(".") if part.isdigit()), 0) for x in of_kind],
                y=[x.error if x.error > 0 else None for x in of_kind],
                hovertext=[f"{x.name}: {x.setting}, {x.bits_per_weight:.2f} bits" for x in of_kind],
                mode="lines+markers",
                marker={"symbol": symbol, "size": 7},
                line={"width": 1},
                name=kind,
            )
        figure.update_layout(xaxis_title="block", yaxis_title="squared output error (share)")
        figure.update_xaxes(dtick=max(1, len(self.layers) // (10 * len(set(kinds)))))
        figure.update_yaxes(type="log", dtick=1, exponentformat="power")
        return figure

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, without the losses of single windows."""
        values = super().to_dict()
        for side in ("before", "after"):
            loss: LossResult = getattr(self, side).loss
            values[side]["loss"] = {
                "mean": loss.loss.mean,
                "low": loss.loss.low,
                "high": loss.loss.high,
                "perplexity": loss.perplexity,
                "n_tokens": loss.n_tokens,
            }
        return values


def _perplexity(loss: LossResult) -> str:
    low, high = (math.exp(min(v, 700.0)) for v in (loss.loss.low, loss.loss.high))
    return _with_interval(loss.perplexity, low, high, 2)


def _with_interval(mean: float, low: float, high: float, digits: int) -> str:
    """A figure and its interval, which one window alone does not give."""
    interval = f" ({low:.{digits}f} to {high:.{digits}f})" if math.isfinite(low + high) else ""
    return f"{mean:.{digits}f}{interval}"


@dataclass
class Job:
    """A model read, its text cut, its layers looked at: what a run and a search both begin with."""

    source: str
    checkpoint: Checkpoint
    model: Any
    anatomy: Anatomy
    tokenizer: Any
    calibration: Int[Tensor, "windows tokens"]
    held: Int[Tensor, "windows tokens"]
    layers: dict[str, nn.Module]
    left: dict[str, str]
    skip: tuple[str, ...]
    progress: Progress


def open_job(
    source: str | Path,
    *,
    text: Path | None,
    held: Path | None,
    samples: int,
    context: int | None,
    skip: Sequence[str],
    base: Path | None,
    allow_pickle: bool,
    progress: Progress,
) -> Job:
    """Read everything that a run needs, text before weights."""
    if samples < 1:
        raise InputError(f"--samples is {samples}: give at least 1")
    progress(0, None, "load")
    checkpoint = (
        open_source(source)
        if str(source).startswith("builtin:")
        else Checkpoint(source, base=base, allow_pickle=allow_pickle)
    )
    if checkpoint.format != "gguf":
        check_unquantised(checkpoint.config, source)
    if not checkpoint.reads_text:
        raise NotApplicable(f"{source} reads no text, and calibration needs some")
    tokenizer = checkpoint.tokenizer()
    calibration, measured = _windows(tokenizer, text, held, samples, _window_size(checkpoint, context))
    model = checkpoint.load(None if checkpoint.format != "gguf" else torch.bfloat16)
    found = anatomy(model)
    require_causal(found)
    for name, parameter in model.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            raise InputError(f"{name} of {source} has values that are not finite: repair the checkpoint first")
    largest = int(max(calibration.max(), measured.max()))
    if largest >= found.vocab_size:
        raise InputError(
            f"the tokenizer of {source} gives token {largest} and the model's vocabulary has {found.vocab_size}: they do "
            "not match"
        )
    inside = tuple(block.path for block in found.blocks)
    taken, left = linear_layers(model, tuple(skip))
    for pattern in skip:
        # lm_head is skipped without being asked for, and not every model has one.
        if pattern != "lm_head" and "skipped by name" not in linear_layers(model, (pattern,))[1].values():
            raise InputError(
                f"--skip {pattern} names no linear layer of {source}: give a whole name, that of a part that holds layers, "
                "or the last piece of one"
            )
    outside = {n for n in taken if not n.startswith(tuple(f"{p}." for p in inside))}
    left |= dict.fromkeys(outside, "not part of a block")
    layers = {n: m for n, m in taken.items() if n not in outside}
    if not layers:
        raise NotApplicable(f"{source} has no linear layer to pack ({len(left)} were left)")
    for name, module in model.named_modules():
        matrices = [p for p in module._parameters.values() if p is not None and p.ndim > 1]
        if matrices and name not in layers and name not in left and not isinstance(module, nn.Embedding):
            stacked = all(p.ndim > 2 for p in matrices)
            left[name] = "stacked experts are not packed" if stacked else f"{type(module).__name__} is not packed"
    return Job(
        str(source), checkpoint, model, found, tokenizer, calibration, measured, layers, left, tuple(skip), progress
    )


def _window_size(checkpoint: Checkpoint, wanted: int | None) -> int:
    """Tokens in a window: what was asked for, else 512, at most what the model takes."""
    config = checkpoint.configuration.get_text_config().to_dict()
    limits = (config.get(key) for key in ("max_position_embeddings", "n_positions", "seq_length"))
    limit = next((v for v in limits if isinstance(v, int) and v > 0), None)
    if wanted is None:
        return _CONTEXT if limit is None else min(_CONTEXT, limit)
    if limit is not None and wanted > limit:
        raise InputError(f"--context is {wanted}, and the model takes {limit} tokens at most")
    return wanted


def _windows(tokenizer: Any, text: Path | None, held: Path | None, samples: int, context: int) -> tuple[Tensor, Tensor]:
    """Windows to calibrate on, and others to measure on."""
    texts = iter([sample()]) if text is None else read_texts(text)
    apart = _HELD_WINDOWS if held is None else 0
    found = token_windows(tokenizer, texts, tokens=(samples + apart) * context, context=context).input_ids
    if text is None and len(found) < samples + apart:
        # The built-in sample is short: a third is held out, whatever was asked for.
        samples = max(1, len(found) * 2 // 3) if apart else len(found)
    least = samples + (1 if apart else 0)
    if found.shape[1] < context or len(found) < least:
        more = ", with one more to measure on," if apart else ""
        raise InputError(
            f"{text or 'the built-in text'} has {found.numel():,} tokens in whole windows, and {samples} of {context} to "
            f"calibrate on{more} are {least * context:,}: give a longer text, or fewer --samples"
        )
    if held is None:
        return found[:samples], found[samples:]
    return found, token_windows(tokenizer, read_texts(held), tokens=_HELD_WINDOWS * context, context=context).input_ids


def compress_checkpoint(
    source: str | Path,
    out: str | Path,
    setting: Setting | Mapping[str, Setting],
    *,
    text: Path | None = None,
    held: Path | None = None,
    samples: int = 64,
    context: int | None = None,
    skip: Sequence[str] = ("lm_head",),
    base: Path | None = None,
    allow_pickle: bool = False,
    progress: Progress = silent,
) -> Compression:
    """Write a smaller model that loads where the original did, and measure what it cost.

    A run that was killed goes on at the block where it stopped, if it is started again with the same arguments.

    Args:
        source: a model directory, a `.gguf`, or `builtin:NAME`.
        out: a directory that does not exist yet.
        setting: what to do to every layer, or to each by name.
        text: to calibrate on; a built-in sample by default.
        held: to measure on; by default what calibration leaves of `text`.
        samples: windows to calibrate on.
        context: tokens in a window; 512 by default, or as many as the model takes.
        skip: names of layers to leave: a whole name, that of a part that holds them, or the last piece of one.
        base: the base model of an adapter.
        allow_pickle: read `.bin` weights with `weights_only=True`.
        progress: is told of the blocks.

    Raises:
        InputError: an option, the text or the settings do not fit.
        CheckpointError: the model cannot be read, or is quantised already.
        OutputError: `out` exists or cannot be written, or the disk is too full.
        MissingDependency: the format of compressed-tensors is to be written and the library is not there.
    """
    start = time.perf_counter()
    out = Path(out)
    check_new(out)
    job = open_job(
        source,
        text=text,
        held=held,
        samples=samples,
        context=context,
        skip=skip,
        base=base,
        allow_pickle=allow_pickle,
        progress=progress,
    )
    return run_job(job, out, setting, start)


def run_job(
    job: Job,
    out: Path,
    setting: Setting | Mapping[str, Setting],
    start: float,
    *,
    tried: tuple[Tried, ...] = (),
) -> Compression:
    """Pack, write, read again and measure."""
    settings = dict.fromkeys(job.layers, setting) if isinstance(setting, Setting) else dict(setting)
    common = common_width(job) if exchangeable(job.model, job.layers, settings) else None
    for name, layer in job.layers.items():
        settings[name].check_width(name, layer_shape(layer)[1], common)
    if common is not None:
        require_exchange()
    check_disk(job, needed_bytes(job, settings), out)
    partial = Partial(out, _fingerprint(job, settings))
    try:
        layers, left = pack(job, settings, partial)
    except OutputError:
        raise  # there may be room later
    except AssayError:
        partial.remove()
        raise
    # Packing leaves the model as it is, and names the layer where values stop being finite, which measuring cannot.
    before = measure_loss(job.model, job.anatomy, job.held, job.progress)
    drift = Drift(job.model, job.held, anatomy_=job.anatomy)
    with new_directory(out) as folder:
        job.progress(0, None, "write")
        form = write_model(job.model, layers, settings, job.checkpoint, folder)
        job.progress(0, None, "measure")
        again = read_again(folder)
        after = measure_loss(again, found := anatomy(again), job.held, job.progress)
        moved = drift.measure(changed=found)
        names = sorted({s.name for s in settings.values()})
        result = Compression(
            source=job.source,
            out=str(out),
            setting=names[0] if len(names) == 1 else f"{len(names)} settings: {', '.join(names)}",
            format=form,
            before=Measured(before, _weight_bytes(job), 8.0 * job.model.dtype.itemsize),
            after=Measured(after, sum(f.stat().st_size for f in folder.glob("*.safetensors")), mean_bits(layers)),
            drift=moved,
            layers=tuple(
                LayerReport(n, settings[n].name, tuple(o.packed.shape), o.packed.bits_per_weight, o.error, o.note)
                for n, o in layers.items()
            ),
            left=left,
            calibration_tokens=job.calibration.numel(),
            held_tokens=after.n_tokens,
            parameters=sum(p.numel() for p in job.model.parameters()),
            seconds=time.perf_counter() - start,
            peak_memory=peak_memory(),
            tried=tried,
        )
        _write_about(result, folder)
    partial.remove()
    return result


class _Decoded(Mapping[int, dict[str, Tensor]]):
    """The weights of blocks that were finished before, decoded one block at a time."""

    def __init__(self, finished: Mapping[int, Mapping[str, Outcome]]) -> None:
        self._finished = dict(finished)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: outcome.packed.dequantize().float() for name, outcome in self._finished[index].items()}

    def __iter__(self) -> Iterator[int]:
        return iter(self._finished)

    def __len__(self) -> int:
        return len(self._finished)


def pack(
    job: Job, settings: Mapping[str, Setting], partial: Partial | None = None
) -> tuple[dict[str, Outcome], dict[str, str]]:
    """Every layer packed, block by block."""

    # Scales are read in the model's type, so that they must be made in it; bfloat16 goes into float32 as it is.
    scales = torch.float16 if job.model.dtype == torch.float16 else torch.bfloat16

    def rule(name: str, weight: Tensor, hessian: Tensor | None) -> Outcome:
        try:
            return settings[name].apply(weight, hessian, scales)
        except InputError as error:
            raise InputError(f"{name}: {error}") from error

    finished: dict[int, dict[str, Outcome]] = {}
    for block in job.anatomy.blocks if partial else ():
        found = partial.load(block.index) if partial else None
        if found is None:
            break
        finished[block.index] = found
    run = Sequential(
        job.anatomy,
        job.calibration,
        rule,
        skip=(*job.skip, *job.left),
        least_rows=max(1, int(_LEAST_ROWS * job.anatomy.hidden_size)),
        follow_original=True,
        progress=job.progress,
    )
    left = dict(job.left)
    for outcome in run.run(_Decoded(finished)):
        if partial:
            partial.save(outcome.index, outcome.layers)
        finished[outcome.index] = {n: replace(o, dense=o.dense.new_empty(0)) for n, o in outcome.layers.items()}
        left = outcome.left | left
    return {n: o for index in sorted(finished) for n, o in finished[index].items()}, left


def mean_bits(layers: Mapping[str, Outcome]) -> float:
    """Stored bits over weights, of all packed layers together."""
    weights = sum(o.packed.shape.numel() for o in layers.values())
    return sum(o.packed.bits_per_weight * o.packed.shape.numel() for o in layers.values()) / weights


def read_again(folder: Path) -> Any:
    """The model that was written, read from its files."""
    from transformers import AutoModelForCausalLM

    with quiet():
        model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval()
        # compressed-tensors decodes on the first call of the whole model, and measuring calls its parts.
        with torch.no_grad():
            model(torch.zeros(1, 1, dtype=torch.long), use_cache=False)
    return model


def measure_loss(model: nn.Module, found: Anatomy, held: Tensor, progress: Progress) -> LossResult:
    """Next-token loss on the held-out windows."""
    reducer = LossReducer()
    trace(model, list(held.split(1)), [reducer], anatomy=found, total=len(held), progress=progress)
    try:
        return reducer.result()
    except InputError as error:
        raise InputError(f"the model's loss on the held-out text is not finite: {error}") from error


def layer_shape(layer: nn.Module) -> tuple[int, int]:
    """Rows and columns of a layer's weight as a map from inputs to outputs."""
    n_out, n_in = layer.get_parameter("weight").shape
    return (n_in, n_out) if not isinstance(layer, nn.Linear) else (n_out, n_in)


def _weight_bytes(job: Job) -> int:
    """What the original's weights take in its own type."""
    return sum(p.nbytes for p in job.model.parameters())


def needed_bytes(job: Job, settings: Mapping[str, Setting]) -> int:
    """About what the new weight files take."""
    packed = sum(
        settings[n].bits_per_weight(*layer_shape(layer)) / 8 * layer.get_parameter("weight").numel()
        for n, layer in job.layers.items()
    )
    rest = _weight_bytes(job) - sum(layer.get_parameter("weight").nbytes for layer in job.layers.values())
    return int(packed + rest)


def common_width(job: Job) -> int:
    """The greatest common divisor of the widths of all layers."""
    return math.gcd(*(layer_shape(layer)[1] for layer in job.layers.values()))


def require_exchange() -> None:
    """Raise unless the library compressed-tensors is installed, with which transformers reads what is written.

    Raises:
        MissingDependency: it is not.
    """
    if importlib.util.find_spec("compressed_tensors") is None:
        raise MissingDependency("gptq and rtn need the package compressed-tensors: pip install assay[compress]")


def check_disk(job: Job, need: int, out: Path) -> None:
    """Refuse to start where `need` bytes of weights have no room.

    Raises:
        OutputError: there is none.
    """
    # The finished blocks and the model made of them stand side by side for a moment.
    need *= 2
    place = next(p for p in (out.absolute(), *out.absolute().parents) if p.exists())
    free = shutil.disk_usage(place).free
    if free < need:
        raise OutputError(
            f"{out} needs {need / 1e6:,.1f} MB while it is written, and {place} has {free / 1e6:,.1f} MB free"
        )


def _fingerprint(job: Job, settings: Mapping[str, Setting]) -> dict[str, Any]:
    """What a run that goes on must have in common with the one before."""
    sums = hashlib.sha256()
    for name, parameter in job.model.named_parameters():
        sums.update(f"{name}{tuple(parameter.shape)}".encode())
        sums.update(parameter.detach().flatten()[:: max(1, parameter.numel() // 64)].float().cpu().numpy().tobytes())
    sums.update(job.calibration.numpy().tobytes())
    return {"run": sums.hexdigest(), "settings": {n: s.name for n, s in settings.items()}}


def _write_about(result: Compression, folder: Path) -> None:
    from importlib.metadata import version

    document = {"schema": "assay.compression", "version": 1, "assay": version("assay"), **jsonable(result.to_dict())}
    write_text(folder / "compression.json", json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    how = "" if result.format == "compressed-tensors" else "import assay  # teaches transformers the format\n"
    before, after = result.before, result.after
    rows = "\n".join("| " + " | ".join(str(c) for c in row) + " |" for row in result.table().rows)
    noted = [f"- `{layer.name}`: {layer.note}" for layer in result.layers if layer.note]
    write_text(
        folder / "README.md",
        f"""# {Path(result.source.removeprefix("builtin:")).name}, {result.setting}

Made by assay {version("assay")} from `{result.source}`: {len(result.layers)} linear layers packed,
{len(result.left)} left as they were. Weight files: {before.bytes / 1e6:.1f} MB before, {after.bytes / 1e6:.1f} MB now.

```python
{how}from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{Path(result.out).name}")
tokenizer = AutoTokenizer.from_pretrained("{Path(result.out).name}")
```

## What it cost
Measured on {result.held_tokens:,} predicted tokens that were not calibrated on; {result.calibration_tokens:,} tokens were.

| figure | before | after |
|---|---|---|
{rows}

The run took {result.seconds:.0f} s and {result.peak_memory / 2**30:.2f} GiB at its peak. `compression.json` has every layer.
"""
        + ("\n## Layers with a note\n" + "\n".join(noted) + "\n" if noted else ""),
    )
