"""Opens a model, whatever its format: a GGUF file or a Hugging Face directory.

Rules of this file: what it returns is complete and checked; what it cannot serve is a ModelFileError with one clear
line. Weights stay in the file (memory-mapped) until a device asks for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .gguf_files import open_gguf
from .hf_files import open_hugging_face
from .model_checks import ModelFileError
from .spec import ModelSpec
from .weights import Weights

__all__ = ["ModelFileError", "ModelFiles", "open_model"]


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model opened for loading. ``tokenizer_json`` is in the format of the ``tokenizers`` library."""

    spec: ModelSpec
    weights: Weights
    tokenizer_json: str


def open_model(path: Path) -> ModelFiles:
    """The model at ``path``: a ``.gguf`` file, or a directory with config.json, safetensors and tokenizer.json.

    Raises ModelFileError.
    """
    try:
        if path.is_dir():
            return ModelFiles(*open_hugging_face(path))
        if path.is_file():
            return ModelFiles(*open_gguf(path))
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read: {error.strerror or error}") from error
    what = "is neither a file nor a directory" if path.exists() else "does not exist"
    raise ModelFileError(f"{path}: {what}; give a .gguf file or a Hugging Face directory")
