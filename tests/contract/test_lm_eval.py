"""lm-eval's ``local-completions`` against the default model in float32, judged by golden data: what it reports for a
likelihood task and for a generation task is what another implementation computed for the same texts.

The tasks are made of local data. Its tokenizer is the server's own, asked over HTTP (golden ids prove it elsewhere), so
that no other library has to be there; everything else of the client is as it comes.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

import pytest
from live import Live

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
lm_eval: Any = import_module("lm_eval")
completions: Any = import_module("lm_eval.models.openai_completions")
tasks: Any = import_module("lm_eval.tasks")
datasets: Any = import_module("datasets")

pytestmark = [pytest.mark.clients, pytest.mark.model]


class Tokens:
    """What the client asks of a tokenizer."""

    eot_token = 2

    def __init__(self, live: Live) -> None:
        self._live = live

    def encode(self, text: str) -> list[int]:
        """Raises TypeError for several texts: the client then asks for a batch."""
        if not isinstance(text, str):
            raise TypeError(text)
        return self._live.ids(text)

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: list[int]) -> str:
        assert ids == [2]
        return "<|im_end|>"


def client(live: Live, **options: Any) -> Any:
    url = f"{live.url}/v1/completions"
    made = completions.LocalCompletionsAPI(
        base_url=url, model=live.model, tokenizer_backend="none", max_retries=1, max_length=2048, **options
    )
    made.tokenizer, made.tokenizer_backend, made.tokenized_requests = Tokens(live), "tiktoken", True
    return made


def evaluate(model: Any, docs: list[dict[str, Any]], **task: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Results, and the samples in the order of the documents."""
    whole = {
        "task": "local", "custom_dataset": lambda **_: {"test": datasets.Dataset.from_list(docs)},
        "test_split": "test", "target_delimiter": "", "doc_to_text": "{{prompt}}", **task,
    }  # fmt: skip
    manager = tasks.TaskManager(include_defaults=False)  # thousands of them would be read
    out = lm_eval.simple_evaluate(model=model, tasks=[whole], task_manager=manager, log_samples=True, bootstrap_iters=0)
    samples = sorted(out["samples"]["local"], key=lambda sample: sample["doc_id"])
    return out["results"]["local"], samples


@pytest.fixture(scope="module")
def texts(exact: Live, golden: dict[str, Any]) -> list[dict[str, Any]]:
    """Golden cases whose whole text has the tokens of its two parts, with the likelihood of their greedy text."""
    found = []
    for case in golden["cases"]:
        whole = case["prompt"] + case["greedy_text"]
        if (
            case["prompt"].rstrip() == case["prompt"]
            and exact.ids(whole) == case["prompt_token_ids"] + case["greedy_token_ids"]
        ):
            rows = case["rows"][len(case["prompt_token_ids"]) - 1 :]
            found.append(
                {"prompt": case["prompt"], "answer": case["greedy_text"], "truth": sum(r["logprob"] for r in rows)}
            )
    assert len(found) >= 8
    return found


@pytest.mark.parametrize("options", [{"batch_size": 4}, {"num_concurrent": 4}, {}], ids=str)
def test_likelihoods(exact: Live, texts: list[dict[str, Any]], options: dict[str, Any]) -> None:
    metrics = [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}]
    results, samples = evaluate(
        client(exact, **options), texts, output_type="loglikelihood", doc_to_target="{{answer}}", metric_list=metrics
    )
    assert results["acc,none"] == 1.0  # every text is the greedy one
    for sample, text in zip(samples, texts, strict=True):
        ((likelihood, greedy),) = sample["filtered_resps"]
        assert float(likelihood) == pytest.approx(text["truth"], abs=5e-3) and greedy in (True, "True")


def test_multiple_choice(exact: Live, texts: list[dict[str, Any]]) -> None:
    """The greedy text against those of the other prompts: its place among them is the accuracy that is expected."""
    answers = [text["answer"] for text in texts[:4]]
    docs = [{"prompt": text["prompt"], "gold": i if i else 1, "choices": answers} for i, text in enumerate(texts[:4])]
    results, samples = evaluate(
        client(exact, batch_size=4), docs, output_type="multiple_choice", doc_to_target="gold",
        doc_to_choice="choices", metric_list=[{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    )  # fmt: skip
    assert results["acc,none"] == 0.75  # the first one's gold is wrong on purpose
    for i, sample in enumerate(samples):
        assert float(sample["filtered_resps"][i][0]) == pytest.approx(texts[i]["truth"], abs=5e-3)


def test_generations(exact: Live, texts: list[dict[str, Any]]) -> None:
    docs = [{**text, "answer": text["answer"].split(".")[0]} for text in texts]
    results, samples = evaluate(
        client(exact, batch_size=3), docs, output_type="generate_until", doc_to_target="{{answer}}",
        generation_kwargs={"until": ["."], "max_gen_toks": 32, "temperature": 0, "do_sample": False},
        metric_list=[{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    )  # fmt: skip
    assert [sample["filtered_resps"][0] for sample in samples] == [doc["answer"] for doc in docs]
    assert results["exact_match,none"] == 1.0
