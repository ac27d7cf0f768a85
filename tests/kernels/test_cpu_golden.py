"""The CPU device on the default model, against logprobs and greedy texts that another implementation computed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offbook.kernels.cpu_device import CpuDevice
from offbook.kernels.model_files import open_model

pytestmark = pytest.mark.model


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def cpu(request: pytest.FixtureRequest, default_model_path: Path) -> Iterator[CpuDevice]:
    files = open_model(default_model_path)
    device = CpuDevice(files.spec, files.weights, kv_bytes=64 << 20, threads=2, dtype=request.param, slots=1)
    yield device
    device.close()


def test_logprobs_and_greedy_choices(cpu: CpuDevice, golden: dict[str, Any], lab: Any) -> None:
    differences, misses = [], []
    for case in golden["cases"]:
        prompt, greedy = case["prompt_token_ids"], case["greedy_token_ids"]
        ids = prompt + greedy
        cpu.forward(lab.batch((ids, 0, range(len(ids) // 16 + 1))))
        logits = np.concatenate([cpu.logits(i, min(i + 64, len(ids))).copy() for i in range(0, len(ids), 64)])
        wide = logits.astype(np.float64)
        wide -= wide.max(-1, keepdims=True)
        logprobs = wide - np.log(np.exp(wide).sum(-1, keepdims=True))
        differences += [abs(logprobs[i, row["token_id"]] - row["logprob"]) for i, row in enumerate(case["rows"])]
        chosen = logprobs[len(prompt) - 1 : len(ids) - 1].argmax(-1)
        best = [dict(map(tuple, case["rows"][len(prompt) - 1 + i]["top5"])) for i in range(len(greedy))]
        misses += [best[i][greedy[i]] - best[i].get(chosen[i], -99) for i in np.flatnonzero(chosen != greedy)]
    if "float32" in cpu.name:
        assert max(differences) < 1e-3 and misses == []
    else:  # a choice may differ only where the truth itself hardly prefers one
        assert np.mean(differences) < 0.006 and max(misses, default=0) < 0.02 and len(misses) < 4


def test_greedy_by_single_steps(cpu: CpuDevice, golden: dict[str, Any], lab: Any) -> None:
    case = golden["cases"][0]
    ids = list(case["prompt_token_ids"])
    cpu.forward(lab.batch((ids, 0, range(4)), last_only=True))
    for token in case["greedy_token_ids"]:
        chosen = int(cpu.logits(0, 1)[0].argmax())
        if "float32" in cpu.name:
            assert chosen == token
        ids.append(chosen)
        cpu.forward(lab.batch((ids[-1:], len(ids) - 1, range(4))))
    steps = cpu.logits(0, 1).copy()
    cpu.forward(lab.batch((ids, 0, range(4)), last_only=True))
    assert np.array_equal(cpu.logits(0, 1), steps)  # prefill of the whole text: the same bits
