"""A model taken block by block: each layer is changed knowing its inputs as the changed layers before it make them."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from assay.compress._blockwise import is_conv1d, linear_layers, matrix
from assay.core.anatomy import Anatomy, Block
from assay.core.errors import InputError
from assay.core.linalg import spd_solve
from assay.core.moments import Covariance
from assay.core.progress import Progress, silent

_MEMORY = 2 << 30
# Added to the diagonal, as a share of its mean, where weights are fitted to the original's inputs.
_DAMPING = 0.01


class Rule(Protocol):
    """What is done with one layer."""

    def __call__(self, name: str, weight: Float[Tensor, "out in"], hessian: Float[Tensor, "in in"] | None) -> Any:
        """Anything with a tensor `dense`, `[out, in]`, that takes the weight's place.

        Args:
            name: of the layer in the model.
            weight: float32.
            hessian: second moments of the layer's inputs, float32; None where it saw too few.
        """


class Activations:
    """Tensors that wait: in memory up to a limit, the rest on disk.

    Args:
        memory: bytes that may stay in memory.
        folder: where the rest goes, into files that end with this object; None for the system's place.
    """

    def __init__(self, memory: int = _MEMORY, folder: Path | None = None) -> None:
        self._memory = memory
        self._held: dict[int, Tensor] = {}
        self._kinds: dict[int, tuple[torch.Size, torch.dtype, torch.device]] = {}
        self._folder = folder
        self._spill: tempfile.TemporaryDirectory[str] | None = None

    def __setitem__(self, index: int, value: Tensor) -> None:
        used = sum(t.nbytes for i, t in self._held.items() if i != index)
        if used + value.nbytes <= self._memory:
            self._held[index] = value
            return
        self._held.pop(index, None)
        if self._spill is None:
            self._spill = tempfile.TemporaryDirectory(prefix="assay-", dir=self._folder)
        self._kinds[index] = (value.shape, value.dtype, value.device)
        # Not into the old file, which an earlier tensor may still be reading.
        fresh = self._file(index).with_suffix(".new")
        value.detach().cpu().contiguous().view(torch.uint8).numpy().tofile(fresh)
        fresh.replace(self._file(index))

    def __getitem__(self, index: int) -> Tensor:
        if index in self._held:
            return self._held[index]
        shape, dtype, device = self._kinds[index]
        n = shape.numel() * dtype.itemsize
        return torch.from_file(str(self._file(index)), size=n, dtype=torch.uint8).view(dtype).view(shape).to(device)

    def _file(self, index: int) -> Path:
        assert self._spill is not None
        return Path(self._spill.name) / str(index)


class _Stop(Exception):
    """Ends a forward pass at the place whose value was wanted."""


@dataclass
class _Stage:
    """Layers that see the same input, and the parent whose output one of them makes."""

    names: list[str]
    shortcut: tuple[nn.Module, int | None] | None = None
    """A module that puts out what the stage's layer puts out, and of how many values that is the first."""


@dataclass(frozen=True)
class BlockOutcome:
    """What became of one block.

    Attributes:
        index: its number from 0.
        layers: what the rule gave, by the layer's name in the model.
        left: layers that were left, with the reason.
    """

    index: int
    layers: dict[str, Any]
    left: dict[str, str]


@dataclass
class Sequential:
    """Runs a rule over the layers of a model's blocks, one block in float32 at a time.

    The inputs of each layer are computed through the layers before it as the rule left them, within the block too.
    The model itself is not changed: each block is worked on as a copy.

    Args:
        anatomy: the model's.
        windows: token ids; every window is a sequence of its own.
        rule: see `Rule`.
        skip: names of layers to leave, as in `bof4`.
        least_rows: layers that saw fewer inputs than this get no Hessian.
        follow_original: hand the rule not each weight W but the one whose outputs on the inputs x̂, which the changed
            layers before it make, are nearest to W·x, what the original puts out: W + W·E[(x − x̂)x̂ᵀ]·E[x̂x̂ᵀ]⁻¹. So each
            layer makes good what those before it did, and errors do not pile up with depth.
        memory: bytes of activations held in memory; the rest waits on disk.
        folder: where.
        progress: is told of every block.

    Raises:
        InputError: there are no windows.
    """

    anatomy: Anatomy
    windows: Int[Tensor, "windows tokens"]
    rule: Rule
    skip: Sequence[str] = ()
    least_rows: int = 1
    follow_original: bool = False
    memory: int = _MEMORY
    folder: Path | None = None
    progress: Progress = silent
    _hidden: Activations = field(init=False)
    _original: Activations = field(init=False)
    _arguments: list[dict[str, Any]] = field(init=False)
    _window: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        if not len(self.windows):
            raise InputError("there are no windows of text to calibrate on")
        self._hidden = Activations(self.memory // 4, self.folder)
        self._original = Activations(self.memory // 4, self.folder)

    def run(self, done: Mapping[int, Mapping[str, Tensor]] | None = None) -> Iterator[BlockOutcome]:
        """Yield each block as it is finished.

        Args:
            done: dense weights, by layer, of blocks that were finished before; these are only passed through.
        """
        done = done or {}
        blocks = self.anatomy.blocks
        self._enter()
        for block in blocks:
            self.progress(block.index, len(blocks), "blocks")
            outcome = self._step(block, done.get(block.index))
            if outcome is not None:
                yield outcome
        self.progress(len(blocks), len(blocks), "blocks")

    @torch.no_grad()
    def _step(self, block: Block, done: Mapping[str, Tensor] | None) -> BlockOutcome | None:
        """One block, worked on or passed through."""
        work = copy.deepcopy(block.module).float().eval()
        if done is None:
            return self._block(work, block.index, block.path)
        if self.follow_original:
            self._originals(work, block.index, [])
        for name, dense in done.items():
            put(work.get_submodule(_local(name, block.path)), dense)
        self._pass(work, block.index, [])
        return None

    @torch.no_grad()
    def _enter(self) -> None:
        """The input of the first block for every window, and the other arguments of every block."""
        backbone, blocks = self.anatomy.backbone, self.anatomy.blocks
        self._arguments = [{} for _ in blocks]
        windows = self.windows.to(next(backbone.parameters()).device)
        training = {module: module.training for module in backbone.modules()}
        backbone.eval()
        handles = []

        def keep(index: int) -> Callable[..., None]:
            def see(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                hidden = args[0] if args else kwargs["hidden_states"]
                if index == 0:
                    self._hidden[self._window] = hidden.float()
                    if self.follow_original:
                        self._original[self._window] = hidden.float()
                if self._window:
                    raise _Stop
                rest = {k: _float(v) for k, v in kwargs.items() if k != "hidden_states"}
                self._arguments[index] = rest | {"_args": tuple(map(_float, args[1:]))}

            return see

        try:
            # All windows have the same shape and no padding, so that one of them says what the blocks are given beside
            # the hidden states.
            for block in blocks:
                handles.append(block.module.register_forward_pre_hook(keep(block.index), with_kwargs=True))
            for window in self._each_window():
                try:
                    backbone(windows[window][None], use_cache=False)
                except _Stop:
                    continue
        finally:
            for handle in handles:
                handle.remove()
            for module, flag in training.items():
                module.training = flag

    def _each_window(self) -> Iterator[int]:
        """The number of each window, also where the hooks look for it."""
        for self._window in range(len(self.windows)):  # noqa: B020
            yield self._window

    def _forward(self, work: nn.Module, index: int, hidden: Tensor) -> Tensor:
        rest = self._arguments[index]
        out = work(hidden, *rest["_args"], **{k: v for k, v in rest.items() if k != "_args"})
        return out[0] if isinstance(out, tuple) else out

    def _block(self, work: nn.Module, index: int, path: str) -> BlockOutcome:
        taken, left = linear_layers(work, ())
        names = {f"{path}.{name}": layer for name, layer in taken.items()}
        chosen, skipped = linear_layers(_Named(path, work), self.skip)
        names = {n: layer for n, layer in names.items() if n in chosen}
        layers: dict[str, Any] = {}
        shortcuts: list[tuple[nn.Module, int | None, nn.Module, Activations]] = []
        stages = self._stages(work, index, names)
        wanted = self._originals(work, index, [names[stage.names[0]] for stage in stages])
        for number, stage in enumerate(stages):
            first = names[stage.names[0]]
            kept = Activations(self.memory // 8, self.folder) if stage.shortcut else None
            moments = _Moments(matrix(first).shape[1], wanted[number] if wanted else None)

            def see(_module: nn.Module, args: tuple[Tensor, ...], kept: Any = kept, moments: Any = moments) -> None:
                moments.update(self._window, args[0])
                if kept is not None:
                    kept[self._window] = args[0].clone()
                raise _Stop

            handle = first.register_forward_pre_hook(see)
            with _answered(shortcuts, self):
                for window in self._each_window():
                    try:
                        self._forward(work, index, self._hidden[window])
                    except _Stop:
                        continue
            handle.remove()
            if moments.inputs.n_nonfinite:
                raise InputError(f"layer {stage.names[0]} is given activations that are not finite")
            hessian = moments.inputs.second_moment if moments.inputs.n >= self.least_rows else None
            for name in stage.names:
                weight = matrix(names[name]).float()
                if hessian is not None:
                    weight = moments.followed(weight, hessian)
                layers[name] = self.rule(name, weight, hessian)
                put(names[name], layers[name].dense)
            if stage.shortcut and kept is not None:
                shortcuts.append((*stage.shortcut, first, kept))
        staged = {n for stage in stages for n in stage.names}
        for name in [n for n in names if n not in staged]:
            layers[name] = self.rule(name, matrix(names[name]).float(), None)
            put(names[name], layers[name].dense)
        self._pass(work, index, shortcuts)
        reasons = {f"{path}.{n}": why for n, why in left.items()} | skipped
        return BlockOutcome(index, layers, reasons)

    def _pass(self, work: nn.Module, index: int, shortcuts: list[Any]) -> None:
        with _answered(shortcuts, self):
            for window in self._each_window():
                self._hidden[window] = self._forward(work, index, self._hidden[window])

    def _originals(self, work: nn.Module, index: int, firsts: Sequence[nn.Module]) -> list[Activations]:
        """Pass the original's hidden states through the unchanged block, and keep what these layers are given."""
        if not self.follow_original:
            return []
        kept = [Activations(self.memory // (8 * len(firsts)), self.folder) for _ in firsts]
        handles = []
        for place, layer in zip(kept, firsts, strict=True):

            def see(_module: nn.Module, args: tuple[Tensor, ...], place: Activations = place) -> None:
                place[self._window] = args[0].clone()

            handles.append(layer.register_forward_pre_hook(see))
        for window in self._each_window():
            self._original[window] = self._forward(work, index, self._original[window])
        for handle in handles:
            handle.remove()
        return kept

    def _stages(self, work: nn.Module, index: int, names: Mapping[str, nn.Module]) -> list[_Stage]:
        """Run one window to see in what order the layers come, which share an input, and whose output is a parent's."""
        stages: dict[Any, _Stage] = {}
        made: dict[Any, tuple[str, _Stage]] = {}
        seen: list[Any] = []
        handles = []

        def of_layer(name: str) -> Callable[..., None]:
            def see(_module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
                seen.extend((args, output))
                stage = stages.setdefault(_place(args[0]), _Stage([]))
                if name not in stage.names:
                    stage.names.append(name)
                made[_place(output)] = (name, stage)

            return see

        def of_parent(module: nn.Module, _args: Any, output: Any) -> None:
            seen.append(output)
            parts = output if isinstance(output, tuple) else (output,)
            plain = isinstance(parts[0], Tensor) and all(p is None for p in parts[1:])
            if plain and _place(parts[0]) in made:
                name, stage = made[_place(parts[0])]
                if stage.names == [name]:
                    stage.shortcut = (module, len(parts) if isinstance(output, tuple) else None)

        for name, layer in names.items():
            handles.append(layer.register_forward_hook(of_layer(name)))
        inside = set(names.values())
        for module in work.modules():
            if module is not work and module not in inside:
                handles.append(module.register_forward_hook(of_parent))
        try:
            self._forward(work, index, self._hidden[0])
        finally:
            for handle in handles:
                handle.remove()
        return list(stages.values())


class _Moments:
    """Second moments of a layer's inputs, and of what they lack to the original's."""

    def __init__(self, n: int, wanted: Activations | None) -> None:
        self.inputs = Covariance(n)
        self._wanted = wanted
        self._lack: Tensor | None = None
        self._n = 0

    def update(self, window: int, inputs: Tensor) -> None:
        rows = inputs.flatten(0, -2)
        self.inputs.update(rows)
        if self._wanted is not None:
            self._n += len(rows)
            lack = (self._wanted[window].flatten(0, -2) - rows).T @ rows
            self._lack = lack if self._lack is None else self._lack.add_(lack)

    def followed(self, weight: Float[Tensor, "out in"], hessian: Float[Tensor, "in in"]) -> Float[Tensor, "out in"]:
        """The weight whose outputs on these inputs are nearest to the original's on its own."""
        if self._lack is None or not bool(self._lack.any()):
            return weight
        right = (weight @ (self._lack / self._n)).T
        return weight + spd_solve(hessian.double(), right.double(), _DAMPING).T.to(weight.dtype)


def _place(tensor: Tensor) -> tuple[int, torch.Size, tuple[int, ...]]:
    """What two names of one tensor have in common, and a part of it, or another view, has not."""
    return tensor.data_ptr(), tensor.shape, tensor.stride()


class _Named(nn.Module):
    """A block under its full name, for the rules about names."""

    def __init__(self, path: str, block: nn.Module) -> None:
        super().__init__()
        home: nn.Module = self
        *parents, last = path.split(".")
        for name in parents:
            home._modules[name] = nn.Module()
            home = home._modules[name]  # type: ignore[assignment]
        home._modules[last] = block


@contextmanager
def _answered(shortcuts: Sequence[tuple[nn.Module, int | None, nn.Module, Activations]], run: Any) -> Iterator[None]:
    """While it lasts, modules whose last layer is done answer from that layer's kept input."""

    def answer(n_values: int | None, layer: nn.Module, kept: Activations) -> Callable[..., Any]:
        def forward(*_args: Any, **_kwargs: Any) -> Any:
            out = layer(kept[run._window])
            return out if n_values is None else (out, *[None] * (n_values - 1))

        return forward

    try:
        for module, n_values, layer, kept in shortcuts:
            module.forward = answer(n_values, layer, kept)  # type: ignore[method-assign]
        yield
    finally:
        for module, *_ in shortcuts:
            del module.forward


def put(layer: nn.Module, dense: Float[Tensor, "out in"]) -> None:
    """Write a weight into a layer in the layer's own layout."""
    weight = layer.get_parameter("weight")
    weight.data.copy_(dense.T if is_conv1d(layer) else dense)


def _local(name: str, path: str) -> str:
    return name[len(path) + 1 :]


def _float(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.float() if value.is_floating_point() else value
    if isinstance(value, tuple):
        return tuple(map(_float, value))
    return value
