"""`octavo calibrate` and `octavo eval` as a user runs them, and what the other commands say of scales."""

from __future__ import annotations

import json
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from engine import tiny
from octavo.cli import main
from octavo.engine import llm, scoring
from octavo.engine import models as loading
from octavo.engine.models import LoadedModel
from octavo.scales import KVScales

Run = Callable[..., tuple[int, str, str]]


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token a printable character."""
    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(string.printable)}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="a")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Runs a command line in a folder of its own, with "tiny" and "tiny2" for its models."""

    def load(model: str, dtype: Any = "auto", device: Any = "cpu") -> LoadedModel:
        changes = {"tiny": {}, "tiny2": {"num_hidden_layers": 2}}[model]
        return LoadedModel(tiny.make("Llama", **changes), tiny_tokenizer(), Path(model))

    monkeypatch.setattr(loading, "load", load)
    monkeypatch.setattr(llm, "load", load)
    for module in ("show", "texts", "generate"):
        monkeypatch.setattr(f"octavo.cli.{module}.quieten_transformers", lambda: None)
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[int, str, str]:
        code = main(list(arguments))
        out, err = capsys.readouterr()
        return code, out, err

    return call


def only_error(err: str) -> str:
    lines = [line for line in err.splitlines() if not line.startswith("loading")]
    assert len(lines) == 1, err
    assert lines[0].startswith("error: "), err
    return lines[0]


def test_from_calibration_to_generation(run: Run) -> None:
    """The command that the refusal names, then the one that calibration names."""
    code, _, err = run("generate", "hello", "--model", "tiny", "--kv-format", "int8_kv")
    assert code == 2
    command = only_error(err).partition("run `octavo ")[2].partition("`")[0]
    assert command == "calibrate tiny --kv-format int8_kv --out scales.safetensors"
    code, out, err = run(*command.split(), "--max-tokens", "300")
    assert (code, out) == (0, "")
    assert "scales.safetensors: int8_kv scales of 3 layers, from 300 tokens" in err
    use = err.partition("use them: octavo ")[2].split()[:-1]
    assert " ".join(use) == "generate --model tiny --kv-format int8_kv --kv-scales scales.safetensors"
    code, out, err = run(*use, "hello", "--max-tokens", "4", "--num-blocks", "8", "--json")
    assert code == 0, err
    summary = json.loads(out)["summary"]
    assert summary["kv_format"] == "int8_kv"
    assert summary["pages_per_gib"] == 2**30 // (16 * summary["cache_bytes_per_token"])


def test_calibrate_keeps_where_scales_come_from(run: Run, tmp_path: Path) -> None:
    Path("book.txt").write_text("Call me Ishmael. " * 20)
    options = "--text book.txt --out s.st --kv-format fp8 --percentile 99 --context 50 --json"
    code, out, err = run("calibrate", "tiny", *options.split())
    assert code == 0, err
    found, scales = json.loads(out), KVScales.load(tmp_path / "s.st")
    assert found["format"] == scales.format == "fp8_e4m3"
    assert found["num_tokens"] == scales.provenance.num_tokens == 340
    assert scales.provenance.percentile == 99
    assert len(scales.provenance.text_sha256) == 64
    assert scales.model.name == "tiny"
    assert [scale.shape for scale in scales.k] == [torch.Size([2])] * 3


def test_eval_scores_all_formats(run: Run) -> None:
    code, out, err = run("eval", "tiny", "--max-tokens", "160", "--context", "40", "--json", "--plot", "p.png")
    assert code == 0, err
    found = json.loads(out)
    assert [row["kv_format"] for row in found["formats"]] == [
        "float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2", "int8_kv", "int8_k", "int8_per_token",
    ]  # fmt: skip
    assert (found["num_calibration_tokens"], found["num_evaluated_tokens"], found["context"]) == (40, 120, 40)
    assert [row["scales"] for row in found["formats"] if row["scales"]] == ["the text's first quarter"]
    assert all(row["num_scored"] == 117 and row["longest_context"] == 40 for row in found["formats"])
    assert found["formats"][0]["mean_kl"] == 0 < found["formats"][1]["mean_kl"]
    assert Path("p.png").read_bytes().startswith(b"\x89PNG")


def test_eval_prints_a_table(run: Run) -> None:
    code, out, err = run(
        "eval", "tiny", "--max-tokens", "80", "--kv-format", "int8_k", "--layers", "int8_kv", "--context", "60"
    )
    assert code == 0, err
    rows = [line.split("│")[1].strip() for line in out.splitlines() if line.startswith("│")]
    assert rows == ["float32", "int8_k", "0", "1", "2"]
    assert "the first 20 tokens calibrated, the next 60 evaluated in sequences of up to 60" in out
    assert "pages of 16 per GiB" in out
    assert "Mean KL with one layer alone in int8_kv" in out


def test_eval_without_calibration_reads_the_whole_text(run: Run) -> None:
    run("calibrate", "tiny", "--max-tokens", "50", "--out", "s.st")
    code, out, err = run(
        "eval", "tiny", "--max-tokens", "60", "--kv-format", "int8_kv", "--kv-scales", "s.st", "--json"
    )
    assert code == 0, err
    found = json.loads(out)
    assert (found["num_calibration_tokens"], found["num_evaluated_tokens"]) == (0, 60)
    assert found["formats"][1]["scales"] == "from a file"


def test_eval_takes_ks_mean_from_the_texts_first_quarter(run: Run) -> None:
    arguments = ("eval", "tiny", "--max-tokens", "80", "--kv-format", "int8_k", "--kv-format", "fp8", "--json")
    plain, smooth = (json.loads(run(*arguments, *more)[1]) for more in ((), ("--smooth-k",)))
    assert (plain["num_calibration_tokens"], smooth["num_calibration_tokens"]) == (0, 20)
    assert [x["scales"] for x in smooth["formats"]] == [None, "the text's first quarter", None]
    # The same by a file, as users of `generate` have it.
    run("calibrate", "tiny", "--max-tokens", "20", "--kv-format", "int8_k", "--smooth-k", "--out", "s.st")
    Path("rest.txt").write_text(scoring.shipped_text()[20:80])
    found = json.loads(run("eval", "tiny", "--text", "rest.txt", *arguments[4:], "--kv-scales", "s.st")[1])
    assert found["formats"][1]["mean_kl"] == smooth["formats"][1]["mean_kl"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("calibrate tiny --text nowhere.txt", "--text nowhere.txt cannot be read: No such file"),
        ("calibrate tiny --text empty.txt", "--text empty.txt holds no text"),
        ("calibrate tiny --text bytes.txt", "--text bytes.txt is no UTF-8 text"),
        ("calibrate tiny --text short.txt", "the text has 1 tokens, too few"),
        (
            "calibrate tiny --kv-format int8_k",
            "int8_k needs no scales; --kv-format is one of fp8_e4m3, fp8_e5m2, int8_kv",
        ),
        ("calibrate tiny --kv-format int3", "unknown cache format 'int3'"),
        ("calibrate tiny --out nowhere/s.st", "--out nowhere/s.st: there is no folder"),
        ("calibrate tiny --percentile 10", "--percentile"),
        ("calibrate tiny --context 513", "--context must be at most 512"),
        ("calibrate tiny --device toaster", "unknown device 'toaster'"),
        ("calibrate", "Missing argument"),
        ("eval tiny --text short.txt", "the text has 0 tokens, too few"),
        ("eval tiny --kv-format int3", "unknown cache format 'int3'"),
        ("eval tiny --layers int3", "unknown cache format 'int3'"),
        ("eval tiny --smooth-k --kv-format fp8", "--smooth-k is for the int8 formats, --kv-format names none"),
        ("eval tiny --kv-scales nowhere.st", "no scales at nowhere.st"),
        ("eval tiny --kv-scales s.st --kv-scales s.st", "two files of --kv-scales are for int8_kv"),
        ("eval tiny2 --kv-scales s.st", "they are for 3 layers, the model has 2"),
        ("eval tiny --plot p.jpg", "--plot takes the name of a .png file"),
        ("eval tiny --context 1", "--context"),
        ("generate x --model tiny2 --kv-format int8_kv --kv-scales s.st", "they are for 3 layers, the model has 2"),
        ("generate x --model tiny --kv-format fp8 --kv-scales s.st", "for 'int8_kv', the cache's format is 'fp8_e4m3'"),
        ("generate x --model tiny --kv-format int8_kv --kv-scales nowhere.st", "no scales at nowhere.st"),
    ],
)
def test_wrong_use(run: Run, arguments: str, message: str) -> None:
    for name, content in (("empty.txt", b" \n"), ("bytes.txt", b"\xff\xfe\x00"), ("short.txt", b"a")):
        Path(name).write_bytes(content)
    if "s.st" in arguments.split():
        run("calibrate", "tiny", "--max-tokens", "20", "--out", "s.st")
    code, out, err = run(*arguments.split())
    assert (code, out) == (2, "")
    assert message in only_error(err)


def test_doctor_counts_pages(run: Run) -> None:
    code, out, _ = run("doctor", "--json")
    pages = {row["kv_format"]: row for row in json.loads(out)["pages"]}
    assert code == 0
    assert pages["bfloat16"]["bytes_per_token"] == 32 * 8 * 512
    assert pages["int8_kv"]["bytes_per_token"] == 32 * 8 * 260
    assert pages["int8_per_token"]["pages_per_gib"] == 2**30 // (16 * 32 * 8 * 264)
