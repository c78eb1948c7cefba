"""Reading and writing models: a local Hugging Face directory, a GGUF file, or a LoRA adapter with its base.

Nothing is unpickled unless the caller says so, no code of the checkpoint's is ever run, and no path leaves its
directory.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from assay.core.errors import CheckpointError, MissingDependency
from assay.core.output import new_directory
from assay.core.subject import MAX_JSON, one_line, read_json

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER = "adapter_model.safetensors"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_CONVERT = (
    "convert it where you trust it: `AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW)` writes safetensors"
)
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
# Keys of a configuration that say how many blocks there are, and how large something is.
_DEPTH = re.compile(r"(n|num)_(\w+_)?(layers?|blocks?)|(en|de)coder_layers|depths?")
_SIZE = re.compile(r"(n|num)_\w+|\w+_(size|dim|rank)|d_(model|ff|kv|inner)")
# Quantised files pack up to eight weights into a value, and a model may have a little that is not stored.
_PACKED = 8
_UNSTORED = 1 << 24


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies, its shape and its type in the file."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype


class Checkpoint:
    """A model on disk, opened without reading its weights.

    Args:
        path: a directory with `config.json` and safetensors (one file or shards with an index), a `.gguf` file, or a
            directory with a LoRA adapter.
        base: the base model of an adapter: a path like `path`.
        allow_pickle: read `.bin` weights too, with `weights_only=True`.

    Raises:
        CheckpointError: missing, damaged, refused, or its parts disagree; the message says what to do.
    """

    def __init__(self, path: str | Path, *, base: str | Path | None = None, allow_pickle: bool = False) -> None:
        self.path = Path(path)
        self.base = Checkpoint(base, allow_pickle=allow_pickle) if base is not None else None
        self.allow_pickle = allow_pickle
        self.format = self._recognise()
        if self.base is not None and self.format != "adapter":
            raise CheckpointError(f"{self.path} is no adapter, which has an {ADAPTER_CONFIG}: leave out --base")

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.path)!r}, format={self.format!r})"

    def _recognise(self) -> str:
        path = self.path
        try:
            if path.is_file():
                if path.suffix == ".gguf":
                    return "gguf"
                if path.suffix in _PICKLES:
                    raise CheckpointError(f"{path} is a pickle, which can run code when it is read: {_CONVERT}")
                raise CheckpointError(f"{path} is a file: give the directory that holds config.json, or a .gguf")
            if not path.is_dir():
                raise CheckpointError(f"{path} does not exist: give a local directory or a .gguf file")
            names = {p.name for p in path.iterdir()}
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
        if ADAPTER_CONFIG in names:
            if self.base is None:
                wanted = str(read_json(path / ADAPTER_CONFIG).get("base_model_name_or_path", "unknown"))[:200]
                raise CheckpointError(f"{path} is an adapter for {wanted!r}: give that model's directory with --base")
            if ADAPTER not in names:
                raise CheckpointError(f"{path} has {ADAPTER_CONFIG} but no {ADAPTER}")
            return "adapter"
        if CONFIG not in names:
            ggufs = sorted(n for n in names if n.endswith(".gguf"))
            hint = f"it holds {ggufs[0]}: give that file" if ggufs else "give a Hugging Face model directory"
            raise CheckpointError(f"{path} has no {CONFIG}: {hint}")
        if INDEX in names or SINGLE in names:
            return "safetensors"
        if any(n.endswith(_PICKLES) for n in names):
            if self.allow_pickle:
                return "pickle"
            raise CheckpointError(
                f"{path} holds its weights as a pickle only, which can run code when it is read: {_CONVERT}; "
                "or pass --allow-pickle to read it with weights_only=True"
            )
        raise CheckpointError(f"{path} has {CONFIG} but no {SINGLE} and no {INDEX}")

    @cached_property
    def config(self) -> dict[str, Any]:
        """The model's configuration as it stands in `config.json`; of a GGUF, what transformers makes of it."""
        if self.format == "adapter":
            assert self.base is not None
            return self.base.config
        if self.format == "gguf":
            return self._gguf_config.to_dict()
        return read_json(self.path / CONFIG)

    @cached_property
    def _gguf_config(self) -> Any:
        from transformers import AutoConfig

        _need_gguf()
        _check_gguf(self.path)
        try:
            return AutoConfig.from_pretrained(
                self.path.parent, gguf_file=self.path.name, local_files_only=True, trust_remote_code=False
            )
        except Exception as error:
            raise CheckpointError(f"{self.path} cannot be read as GGUF: {one_line(error)}") from error

    @cached_property
    def configuration(self) -> Any:
        """The configuration as transformers completes it, its numbers compared with what the files hold.

        Raises:
            CheckpointError: transformers does not take it, or the files cannot bear out what it says.
        """
        if self.format == "adapter":
            assert self.base is not None
            return self.base.configuration
        self._check_numbers()
        if self.format == "gguf":
            return self._gguf_config
        with quiet():
            try:
                return self.model_class.config_class.from_pretrained(self.path, local_files_only=True)
            except CheckpointError:
                raise
            except Exception as error:
                raise CheckpointError(
                    f"{self.path / CONFIG} is not what transformers takes: {self._reason(error)}"
                ) from error

    def _check_numbers(self) -> None:
        """Refuse a number that is none, or beyond what the files hold, before anything of that size is made."""
        tensors, values = self._extent
        for key, value in _leaves(self.config):
            if value != value:
                raise CheckpointError(
                    f"{self.path}: the configuration says {key} is NaN: put the model's own value there"
                )
            name = key.rpartition(".")[2]
            if _DEPTH.fullmatch(name):
                most = tensors
            elif _SIZE.fullmatch(name):
                most = _PACKED * values + _UNSTORED
            else:
                continue
            if isinstance(value, int | float) and value > most:
                raise CheckpointError(
                    f"{self.path}: {CONFIG} and the tensors disagree: {key} is {value:,}, and the files hold "
                    f"{tensors:,} tensors with {values:,} values in all"
                )

    @cached_property
    def _extent(self) -> tuple[float, float]:
        """How many tensors the files hold, and how many values in all; of formats without a header no bound."""
        if self.format == "safetensors":
            return len(self.tensors), sum(_numel(t.shape) for t in self.tensors.values())
        return math.inf, math.inf

    def _check_shapes(self) -> None:
        """Refuse a configuration of another model than the one in the files, before memory is set aside for it."""
        with torch.device("meta"):
            outline = self.model_class(self.configuration)
        quantised = self.config.get("quantization_config")
        for name, value in {} if quantised else outline.state_dict().items():
            stored = self.tensors.get(name) or self.tensors.get(name.removeprefix(f"{outline.base_model_prefix}."))
            # Some tensors are transposed as they are read.
            if stored is not None and sorted(stored.shape) != sorted(value.shape):
                raise CheckpointError(
                    f"{self.path}: {CONFIG} and the tensors disagree: {name} should have the shape "
                    f"{list(value.shape)}, and the file holds {list(stored.shape)}"
                )
        size = sum(t.numel() for part in (outline.parameters(), outline.buffers()) for t in part)
        _, values = self._extent
        if size > (_PACKED if quantised else 2) * values + _UNSTORED:
            raise CheckpointError(
                f"{self.path}: {CONFIG} and the tensors disagree: it describes a model of {size:,} values, and the files "
                f"hold {values:,}"
            )

    def _reason(self, error: Exception) -> str:
        """What went wrong, on one line; of a word that transformers looked up in vain, the key that holds it."""
        if isinstance(error, KeyError):
            for key, value in _leaves(self.config):
                if value == error.args[0]:
                    return f"{key} is {value!r}, which transformers does not know"
        return one_line(error)

    @property
    def model_type(self) -> str:
        """The architecture's name, such as "llama"."""
        name = self.config.get("model_type")
        if not isinstance(name, str):
            raise CheckpointError(f"{self.path / CONFIG} names no model_type")
        return name

    @cached_property
    def tensors(self) -> dict[str, TensorInfo]:
        """Every tensor of a safetensors checkpoint, by name, from the files' headers.

        Raises:
            CheckpointError: a shard is missing, truncated or damaged, or the index does not agree with the shards.
        """
        if self.format == "adapter":
            files: dict[str, set[str]] = {ADAPTER: set()}
        elif self.format != "safetensors":
            raise CheckpointError(f"{self.path} is a {self.format} file, whose tensors are read by load() only")
        elif (self.path / INDEX).exists():
            files = self._shards()
        else:
            files = {SINGLE: set()}
        found: dict[str, TensorInfo] = {}
        for name, expected in files.items():
            header = _read_header(self.path / name)
            for tensor, info in header.items():
                if tensor in found:
                    raise CheckpointError(f"{self.path}: tensor {tensor!r} stands in two shards")
                found[tensor] = info
            missing = sorted(expected - set(header))
            if missing:
                raise CheckpointError(f"{self.path / name} lacks {missing[0]!r}, which {INDEX} says it holds")
        return found

    def _shards(self) -> dict[str, set[str]]:
        weight_map = read_json(self.path / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{self.path / INDEX} has no weight_map")
        files: dict[str, set[str]] = {}
        for tensor, name in weight_map.items():
            if not isinstance(name, str) or Path(name).name != name or name in ("", ".", "..") or len(name) > 255:
                raise CheckpointError(
                    f"{self.path / INDEX} names {str(name)[:80]!r}, which is no file of that directory"
                )
            files.setdefault(name, set()).add(tensor)
        for name in files:
            if not (self.path / name).is_file():
                raise CheckpointError(f"{self.path / name} is missing: {INDEX} lists {len(files)} shards")
        return files

    def tensor(self, name: str) -> Tensor:
        """One tensor, read from its place in the file.

        Raises:
            CheckpointError: there is none of that name.
        """
        info = self.tensors.get(name)
        if info is None:
            raise CheckpointError(f"{self.path} has no tensor {name!r}")
        try:
            with safe_open(info.file, framework="pt") as file:
                return file.get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"{info.file} is damaged: {one_line(error)}") from error

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor in turn; no more than one is held."""
        for name in self.tensors:
            yield name, self.tensor(name)

    @property
    def stored_dtype(self) -> torch.dtype:
        """The type that most weights have on disk; of a GGUF float32, which it is decoded to."""
        if self.format == "adapter":
            assert self.base is not None
            return self.base.stored_dtype
        if self.format == "safetensors":
            sizes: dict[torch.dtype, int] = {}
            for info in self.tensors.values():
                if info.dtype.is_floating_point:
                    sizes[info.dtype] = sizes.get(info.dtype, 0) + _numel(info.shape)
            return max(sizes, key=lambda d: sizes[d]) if sizes else torch.float32
        if self.format == "gguf":
            return torch.float32
        name = str(self.config.get("dtype") or self.config.get("torch_dtype") or "float32")
        dtype = getattr(torch, name, None)
        return dtype if isinstance(dtype, torch.dtype) else torch.float32

    def load(self, dtype: torch.dtype | None = None, device: str | torch.device = "cpu") -> nn.Module:
        """The model as a plain module in evaluation mode, its weights read once.

        Args:
            dtype: of the weights; by default `stored_dtype`, or bfloat16 where that is of eight bits.
            device: where to put it.

        Raises:
            CheckpointError: damaged files, a configuration that disagrees with the tensors, an architecture that
                transformers does not have, or a quantisation that it cannot undo here.
        """
        dtype = dtype or self.stored_dtype
        if dtype.itemsize == 1:
            dtype = torch.bfloat16  # eight bits are for storing only
        if self.format == "adapter":
            return self._load_adapter(dtype, device)
        architecture = self.model_class
        kwargs: dict[str, Any] = {
            "config": self.configuration,
            "dtype": dtype,
            "local_files_only": True,
            "trust_remote_code": False,
            "output_loading_info": True,
        }
        if self.format == "safetensors":
            kwargs["use_safetensors"] = True
        elif self.format == "pickle":
            kwargs |= {"use_safetensors": False, "weights_only": True}
        source = self.path
        if self.format == "gguf":
            source, kwargs["gguf_file"] = self.path.parent, self.path.name
        quantised = self.config.get("quantization_config") if self.format != "gguf" else None
        with quiet():
            if quantised:
                self._check_quantisation(quantised)
            try:
                if self.format == "safetensors":
                    self._check_shapes()
                model, info = architecture.from_pretrained(source, **kwargs)
            except (KeyboardInterrupt, MemoryError, CheckpointError):
                raise
            except Exception as error:
                if quantised:
                    raise CheckpointError(
                        f"{self.path} is quantised with {quantised.get('quant_method', 'bitsandbytes')}, which cannot be undone here: "
                        f"{one_line(error)}"
                    ) from error
                raise CheckpointError(f"{self.path} cannot be loaded: {self._reason(error)}") from error
        missing = sorted(info.get("missing_keys", ()))
        if missing:
            raise CheckpointError(
                f"{self.path}: {CONFIG} and the tensors disagree: {len(missing)} tensors are missing, "
                f"first {missing[0]!r}"
            )
        surplus = sorted(name for name in info.get("unexpected_keys", ()) if _of_further_block(model, name))
        if surplus:
            raise CheckpointError(
                f"{self.path}: {CONFIG} and the tensors disagree: it counts fewer blocks than the files hold, which have "
                f"{surplus[0]!r}"
            )
        if quantised:
            model = _dequantised(model, self.path)
        if self.format == "gguf":
            model = _plain(model)
        return model.to(device).eval()

    def _check_quantisation(self, settings: Any) -> None:
        """Refuse what transformers passes over: it would take the packed values for the weights."""
        from transformers.quantizers import AutoHfQuantizer

        method = settings.get("quant_method") if isinstance(settings, dict) else settings
        try:
            known = AutoHfQuantizer.supports_quant_method(settings)
        except (ValueError, TypeError, AttributeError):
            known = False
        if not known:
            raise CheckpointError(
                f"{self.path} is quantised with {method!r}, which transformers does not know: give the unquantised model"
            )
        for name, info in self.tensors.items() if self.format == "safetensors" else ():
            if info.dtype in _FLOAT8 and not {f"{name}_scale", f"{name}_scale_inv"} & self.tensors.keys():
                raise CheckpointError(
                    f"{info.file} holds {name!r} in eight bits and not its scale: fetch the file again"
                )

    @cached_property
    def model_class(self) -> Any:
        """The class in transformers that the model is an instance of.

        Raises:
            CheckpointError: transformers has none.
        """
        import transformers

        if self.format == "adapter":
            assert self.base is not None
            return self.base.model_class
        names = self.config.get("architectures") or []
        for name in names if isinstance(names, list) else []:
            found = getattr(transformers, name, None) if isinstance(name, str) else None
            if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
                return found
        known = transformers.MODEL_FOR_CAUSAL_LM_MAPPING if self.format == "gguf" else transformers.MODEL_MAPPING
        try:
            found = known[transformers.CONFIG_MAPPING[self.model_type]]
        except KeyError as error:
            raise CheckpointError(
                f"{self.path}: transformers has no architecture {self.model_type!r}, and code that comes with a "
                "checkpoint is never run"
            ) from error
        return found[0] if isinstance(found, tuple) else found

    @property
    def reads_text(self) -> bool:
        """Whether the model reads tokens, not images or sound."""
        return bool(self.model_class.main_input_name == "input_ids")

    def _load_adapter(self, dtype: torch.dtype, device: str | torch.device) -> nn.Module:
        try:
            from peft import PeftModel
        except ImportError as error:
            raise MissingDependency("an adapter needs the package peft: pip install peft") from error
        assert self.base is not None
        _ = self.tensors
        base = self.base.load(dtype, device)
        try:
            merged = PeftModel.from_pretrained(base, str(self.path), local_files_only=True).merge_and_unload()
        except Exception as error:
            raise CheckpointError(f"{self.path} cannot be merged into {self.base.path}: {one_line(error)}") from error
        return merged.eval()

    def tokenizer(self) -> Any:
        """The tokenizer; padding is set to the end-of-sequence token where there is none, and goes to the right.

        Raises:
            CheckpointError: there is none, or it cannot be read without running its code.
        """
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        if self.format == "adapter":
            assert self.base is not None
            return self.base.tokenizer()
        kwargs: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
        source = self.path
        if self.format == "gguf":
            source, kwargs["gguf_file"] = self.path.parent, self.path.name
        with quiet():
            try:
                tokenizer = AutoTokenizer.from_pretrained(source, **kwargs)
            except Exception as error:
                if not (self.path / "tokenizer.json").is_file():
                    raise CheckpointError(
                        f"{self.path} has no tokenizer that can be read: put its tokenizer.json there"
                    ) from error
                try:
                    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(self.path / "tokenizer.json"))
                except Exception as second:
                    raise CheckpointError(f"{self.path / 'tokenizer.json'}: {one_line(second)}") from second
        if tokenizer.pad_token_id is None and tokenizer.eos_token_id is not None:
            tokenizer.pad_token = tokenizer.eos_token
        tokenizer.padding_side = "right"
        return tokenizer


def open_checkpoint(path: str | Path, *, base: str | Path | None = None, allow_pickle: bool = False) -> Checkpoint:
    """Open a model on disk; see `Checkpoint`."""
    return Checkpoint(path, base=base, allow_pickle=allow_pickle)


def save(model: nn.Module, path: str | Path, *, tokenizer: Any = None, max_shard_size: str = "5GB") -> None:
    """Write the model as a Hugging Face directory that appears whole or not at all.

    Args:
        model: a transformers model.
        path: a new directory, or one that assay wrote before.
        tokenizer: written beside it where given.
        max_shard_size: as in transformers.

    Raises:
        OutputError: the place is taken or cannot be written.
    """
    with new_directory(path) as temporary, quiet():
        model.save_pretrained(temporary, max_shard_size=max_shard_size)
        if tokenizer is not None:
            tokenizer.save_pretrained(temporary)


def _numel(shape: tuple[int, ...]) -> int:
    n = 1
    for s in shape:
        n *= s
    return n


def _leaves(value: Any) -> Iterator[tuple[str, Any]]:
    """Every value of a parsed JSON that is no container, with its dotted key; items of a list have the list's."""
    waiting: list[tuple[str, Any]] = [("", value)]
    while waiting:
        key, value = waiting.pop()
        if isinstance(value, dict):
            waiting += [(f"{key}.{name}" if key else str(name), inner) for name, inner in value.items()]
        elif isinstance(value, list):
            waiting += [(key, inner) for inner in value]
        else:
            yield key, value


def _of_further_block(model: nn.Module, name: str) -> bool:
    """Whether a tensor belongs to a block beyond those that the model has."""
    found = re.match(r"(.*?)\.(\d+)\.", name)
    try:
        blocks = model.get_submodule(found[1]) if found else None
    except AttributeError:
        return False
    return isinstance(blocks, nn.ModuleList) and found is not None and int(found[2]) >= len(blocks)


def _read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file; everything about them is checked against the file's size."""
    try:
        if not path.is_file():
            raise CheckpointError(f"{path} is no regular file")
        size = path.stat().st_size
        with path.open("rb") as stream:
            prefix = stream.read(8)
            if len(prefix) < 8:
                raise CheckpointError(f"{path} is truncated: {size} bytes")
            (length,) = struct.unpack("<Q", prefix)
            if length > min(size - 8, MAX_JSON):
                raise CheckpointError(
                    f"{path} is truncated or no safetensors file: its header should be {length} bytes"
                )
            header = json.loads(stream.read(length))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: its header is not JSON") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path} is damaged: its header is no JSON object")
    header.pop("__metadata__", None)
    tensors: dict[str, TensorInfo] = {}
    for name, entry in header.items():
        try:
            shape = tuple(int(s) for s in entry["shape"])
            start, end = (int(o) for o in entry["data_offsets"])
            dtype = _DTYPES.get(entry["dtype"])
        except (TypeError, KeyError, ValueError) as error:
            raise CheckpointError(f"{path} is damaged: tensor {name!r} has no proper entry") from error
        if dtype is None:
            raise CheckpointError(f"{path}: tensor {name!r} has the type {entry['dtype']!r}, which is not known")
        if min(shape, default=0) < 0 or end - start != _numel(shape) * dtype.itemsize:
            raise CheckpointError(f"{path} is damaged: tensor {name!r} of shape {shape} does not fill its bytes")
        if start < 0 or 8 + length + end > size:
            raise CheckpointError(f"{path} is truncated: tensor {name!r} ends after the file does")
        tensors[name] = TensorInfo(path, shape, dtype)
    return tensors


def _need_gguf() -> None:
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise MissingDependency("a .gguf file needs the package gguf: pip install gguf accelerate") from error


def _check_gguf(path: Path) -> None:
    try:
        with path.open("rb") as stream:
            magic = stream.read(4)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    if magic != b"GGUF":
        raise CheckpointError(f"{path} is no GGUF file: it does not start with its mark")


def _plain(model: Any) -> nn.Module:
    """The same weights in a module of the same class that does not count as quantised."""
    values = model.config.to_dict()
    values.pop("quantization_config", None)
    config = type(model.config).from_dict(values)
    state = model.state_dict()
    with torch.device("meta"):
        plain = type(model)(config)
    plain.load_state_dict(state, strict=True, assign=True)
    plain.tie_weights()
    # Buffers that are not saved (rotary frequencies, say) were made on the meta device: take the loaded ones.
    loaded = dict(model.named_buffers())
    for name, buffer in list(plain.named_buffers()):
        if buffer.is_meta:
            owner, _, leaf = name.rpartition(".")
            plain.get_submodule(owner).register_buffer(leaf, loaded[name], persistent=False)
    if getattr(model, "generation_config", None) is not None:
        plain.generation_config = model.generation_config
    return plain


def _dequantised(model: Any, path: Path) -> Any:
    if getattr(model, "hf_quantizer", None) is None:
        return model  # undone while it was read
    try:
        return model.dequantize()
    except Exception as error:
        raise CheckpointError(
            f"{path} is quantised in a way that transformers cannot undo: {one_line(error)}"
        ) from error


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps transformers' warnings and bars off the terminal; what matters is raised or reported."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        # The GGUF loader draws its bar on standard error whatever the setting.
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
