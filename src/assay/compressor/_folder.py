"""Where a run keeps its finished blocks until the model is whole, and the directory that it becomes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from assay.compress._packed import UniformTensor
from assay.compress._packed_linear import PackedLinear, stored_form
from assay.compress._packing import pack
from assay.compressor._setting import Outcome, Setting
from assay.core.checkpoint import Checkpoint, quiet
from assay.core.errors import CheckpointError, InputError, OutputError
from assay.core.output import MARKER, check_new, write_text
from assay.core.results import jsonable

_STATE = "state.json"
_SHARD = "5GB"
_TOKENIZER_FILES = (
    "tokenizer*", "vocab*", "merges.txt", "*token*.json", "spiece.model", "sentencepiece*.model", "chat_template*",
)  # fmt: skip


class Partial:
    """Finished blocks of a run, beside the place where the model will stand.

    Args:
        out: where the model will stand.
        settings: everything that a resumed run must agree on, plain JSON.

    Raises:
        InputError: there is a run of other settings.
        OutputError: `out` is taken, or something else stands where the blocks are kept.
    """

    def __init__(self, out: Path, settings: Mapping[str, Any]) -> None:
        check_new(out)
        self.path = out.absolute().with_name(f".{out.absolute().name}.partial")
        self._settings = settings
        if not self.path.exists() or (self.path.is_dir() and not any(self.path.iterdir())):
            return
        try:
            found = json.loads((self.path / _STATE).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise OutputError(f"{self.path} is no unfinished run that can be read: delete it") from error
        if found != settings:
            raise InputError(
                f"{self.path} holds an unfinished run with other settings: finish it with those, or delete it"
            )

    def _file(self, block: int) -> Path:
        return self.path / f"block-{block:05d}.safetensors"

    def save(self, block: int, layers: Mapping[str, Outcome]) -> None:
        """Write a block, whole or not at all."""
        tensors: dict[str, Tensor] = {}
        about: dict[str, Any] = {}
        for name, outcome in layers.items():
            stored, description = stored_form(outcome.packed)
            tensors |= {f"{name}\t{part}": t for part, t in stored.items()}
            about[name] = {"description": description, "error": jsonable(outcome.error), "note": outcome.note}
        unfinished = self._file(block).with_suffix(".tmp")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if not (self.path / _STATE).exists():
                write_text(self.path / _STATE, json.dumps(self._settings))
            save_file(tensors, unfinished, metadata={"layers": json.dumps(about)})
            unfinished.replace(self._file(block))
        except (OSError, SafetensorError) as error:
            raise OutputError(f"{unfinished} cannot be written: {error}") from error

    def load(self, block: int) -> dict[str, Outcome] | None:
        """A finished block, its weights only as packed; or None."""
        if not self._file(block).exists():
            return None
        tensors: dict[str, dict[str, Tensor]] = {}
        try:
            with safe_open(self._file(block), framework="pt") as file:
                about = json.loads(file.metadata()["layers"])
                for key in file.keys():  # noqa: SIM118
                    name, part = key.split("\t")
                    tensors.setdefault(name, {})[part] = file.get_tensor(key)
            return {
                name: Outcome(
                    PackedLinear(tensors[name], entry["description"]).packed,
                    torch.empty(0),
                    float("nan") if entry["error"] is None else entry["error"],
                    entry["note"],
                )
                for name, entry in about.items()
            }
        except (OSError, SafetensorError, CheckpointError, ValueError, KeyError, TypeError) as error:
            raise OutputError(f"{self._file(block)} is damaged: delete {self.path}") from error

    def remove(self) -> None:
        """Delete what was kept; the model stands."""
        shutil.rmtree(self.path, ignore_errors=True)


def exchangeable(model: nn.Module, names: Iterable[str], settings: Mapping[str, Setting]) -> bool:
    """Whether a model with these layers packed can be written in the format of compressed-tensors.

    It has no transposed layers, and transformers reads no stack of experts in it that is not packed too. Zero points
    have to be decoded as the file is read (see `_exchange_config`), and transformers then knows one setting for all.
    """
    names = list(names)
    used = {settings[n] for n in names}
    plain = all(isinstance(model.get_submodule(n), nn.Linear) for n in names)
    stacked = any(p.ndim > 2 and not n.endswith(".weight") for n, p in model.named_parameters())
    alike = len(used) == 1 or all(s.symmetric for s in used)
    return plain and not stacked and alike and all(s.exchangeable for s in used)


def write_model(
    model: Any, layers: Mapping[str, Outcome], settings: Mapping[str, Setting], source: Checkpoint, folder: Path
) -> str:
    """Write a model with packed layers as a Hugging Face directory.

    Where every layer is on a uniform grid, the format is that of the library compressed-tensors, which vLLM and others
    read; anything else is written in this library's own, which transformers reads once `assay` is imported.

    Args:
        model: the original, in the types of its checkpoint; it is left as it is.
        layers: by name.
        settings: of each of those layers.
        source: where the original lies, for its tokenizer.
        folder: an empty directory.

    Returns:
        The name of the format.
    """
    exchange = exchangeable(model, layers, settings)
    state = model.state_dict()
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    for name in tied & set(state):
        del state[name]
    for name, outcome in layers.items():
        del state[f"{name}.weight"]
        stored = (
            _exchanged(cast(UniformTensor, outcome.packed), model.dtype) if exchange else stored_form(outcome.packed)[0]
        )
        state |= {f"{name}.{part}": t.contiguous() for part, t in stored.items()}
    before = getattr(model.config, "quantization_config", None)
    if exchange:
        model.config.quantization_config = _exchange_config(model, layers, settings)
    else:
        described = {name: stored_form(o.packed)[1] for name, o in layers.items()}
        model.config.quantization_config = {"quant_method": "assay", "format_version": 1, "layers": described}
    try:
        with quiet():
            model.save_pretrained(folder, state_dict=state, max_shard_size=_SHARD)
        _copy_tokenizer(source, folder)
        for file in folder.glob("*.safetensors"):
            # Their writer lets nobody but the owner read them.
            file.chmod((folder / "config.json").stat().st_mode & 0o777)
    except (OSError, SafetensorError) as error:
        raise OutputError(f"{folder} cannot be written: {error}") from error
    finally:
        if before is None:
            del model.config.quantization_config
        else:
            model.config.quantization_config = before
    (folder / MARKER).touch()
    return "compressed-tensors" if exchange else "assay"


def _copy_tokenizer(source: Checkpoint, folder: Path) -> None:
    """The tokenizer as it was: loading sets padding for measuring, which its next user may not want."""
    home = source
    while home.base is not None:
        home = home.base
    if home.format == "gguf":
        source.tokenizer().save_pretrained(folder)
        return
    for pattern in _TOKENIZER_FILES:
        for file in home.path.glob(pattern):
            if file.is_file():
                shutil.copyfile(file, folder / file.name)


def _exchanged(packed: UniformTensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """A matrix in the format "pack-quantized": the codes of a row, counted from the lowest, in 32-bit words."""
    stored = {
        "weight_packed": _words(packed.codes),
        "weight_scale": packed.scale.to(dtype),
        "weight_shape": torch.tensor(packed.shape, dtype=torch.int64),
    }
    if packed.zero is not None:
        # Zero points are packed down the columns.
        zero = pack((packed.zero.to(torch.int16) + 2 ** (packed.bits - 1)).T, packed.bits)
        stored["weight_zero_point"] = _words(zero).T
    return stored


def _words(codes: Tensor) -> Tensor:
    return torch.nn.functional.pad(codes, (0, -codes.shape[-1] % 4)).contiguous().view(torch.int32)


def _exchange_config(
    model: nn.Module, layers: Mapping[str, Outcome], settings: Mapping[str, Setting]
) -> dict[str, Any]:
    groups: dict[Setting, list[str]] = {}
    for name in layers:
        groups.setdefault(settings[name], []).append(name)
    linear = [n for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    # compressed-tensors makes no room for packed zero points in a model that waits for its weights.
    how = {} if all(s.symmetric for s in groups) else {"dequantize": True}
    return how | {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": [n for n in linear if n not in layers],
        "config_groups": {
            f"group_{i}": {
                # One scheme needs no list of names, and every reader understands the class.
                "targets": ["Linear"] if len(groups) == 1 else names,
                "weights": {
                    "type": "int",
                    "num_bits": setting.bits,
                    "symmetric": setting.symmetric,
                    "strategy": "channel" if setting.group_size is None else "group",
                    "group_size": setting.group_size,
                    "dynamic": False,
                },
            }
            for i, (setting, names) in enumerate(groups.items())
        },
    }


def check_unquantised(config: Mapping[str, Any], path: Any) -> None:
    """Refuse a model that is quantised already.

    Raises:
        CheckpointError: it is.
    """
    quantised = config.get("quantization_config")
    if quantised:
        method = quantised.get("quant_method", "an unknown method") if isinstance(quantised, Mapping) else "?"
        raise CheckpointError(f"{path} is quantised already, with {method}: give the original")
