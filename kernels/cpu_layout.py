"""The C structs of ``csrc/step.h``, field by field, for ctypes.

Rules of this file: no logic; a change here is a change there.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p

CODES4, CODES8, BF16, F16, F32 = range(5)  # Kind
NONE, STORED, MINUS_EIGHT = range(3)  # Minimum


class Matrix(ctypes.Structure):
    _fields_ = (
        ("data", c_void_p),
        *((name, c_int32) for name in ("kind", "group", "scale_bytes", "minimum", "panels", "blocks")),
        ("block_bytes", c_int64),
    )


LAYER_MATRICES = ("q", "k", "v", "o", "gate_up", "down")
LAYER_VECTORS = ("attention_norm", "ffn_norm", "q_bias", "k_bias", "v_bias", "q_norm", "k_norm")


class Layer(ctypes.Structure):
    _fields_ = (*((name, Matrix) for name in LAYER_MATRICES), *((name, c_void_p) for name in LAYER_VECTORS))


class Model(ctypes.Structure):
    _fields_ = (
        *(
            (name, c_int32)
            for name in (
                "n_layers", "hidden", "hidden_padded", "heads", "kv_heads", "head_dim", "ffn_padded", "vocabulary",
                "bf16",
            )
        ),
        ("norm_epsilon", c_float),
        ("layers", ctypes.POINTER(Layer)),
        ("embedding", Matrix),
        ("head", Matrix),
        *((name, c_void_p) for name in ("output_norm", "rope_cos", "rope_sin", "kv")),
        ("kv_blocks", c_int64),
    )  # fmt: skip


class Batch(ctypes.Structure):
    _fields_ = (
        *((name, c_int32) for name in ("rows", "table_width", "copies", "logit_rows")),
        *(
            (name, c_void_p)
            for name in ("tokens", "positions", "row_sequence", "block_tables", "copy_pairs", "logit_row")
        ),
    )
