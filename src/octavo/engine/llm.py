"""LLM: a model, its cache and its scheduler behind `generate`."""

from __future__ import annotations

import operator
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from octavo.engine.block_pool import BlockPool
from octavo.engine.device import best_device
from octavo.engine.errors import RequestError
from octavo.engine.linear import pack_linear_layers
from octavo.engine.models import load
from octavo.engine.request import FinishReason, Request, SamplingParams
from octavo.engine.results import Delta, Result, Stats
from octavo.engine.runner import ModelRunner
from octavo.engine.sampler import SampledToken, Sampler
from octavo.engine.scheduler import Scheduler
from octavo.engine.text import Detokenizer
from octavo.formats import KVFormat, how_to_calibrate
from octavo.scales import KVScales

Prompt = str | Sequence[int]
"""Text, or token ids."""


@dataclass(slots=True)
class _Stream:
    """One prompt on its way through the engine."""

    index: int
    request: Request
    detokenizer: Detokenizer | None
    stop_ids: frozenset[int]
    started: float
    first_token_at: float | None = None
    news: deque[Delta] = field(default_factory=deque)  # what its caller has not seen yet


class LLM:
    """Generates text with a Transformers model over Octavo's pages.

    Args:
        model: a local folder, a GGUF file, a hub name, a packaged name ("smollm2", "gemma3-270m"), or a
            loaded Transformers causal language model (its attention is replaced).
        dtype: "auto" (the checkpoint's, on CPU float32), "float32", "bfloat16", "float16" or a torch dtype.
        kv_format: how the cache stores K and V: "auto" (the model's dtype), "float16", "bfloat16", "float32",
            "fp8_e4m3" ("fp8"), "fp8_e5m2", "int8_kv", "int8_k", "int8_per_token".
        kv_scales: the layers' static scales, or the file that `octavo calibrate` wrote; int8_kv needs them, fp8 takes
            1 without.
        device: where the model runs; None: a GPU if there is one, else the CPU.
        tokenizer: for a loaded model; None: its prompts must be token ids and results have no text.
        block_size: tokens of a page.
        num_blocks: pages of the cache; None: from the budget.
        kv_cache_bytes: memory budget of the cache; None: a quarter of the free memory (of a GPU 80 %), at most
            what max_num_seqs sequences of max_model_len need.
        max_num_seqs: sequences that run together.
        max_num_batched_tokens: tokens of a step; longer prompts are computed in chunks.
        max_model_len: longest sequence, prompt and output; None: what the model allows.
        enable_prefix_caching: keep the pages of finished requests for prompts that begin alike.
        use_graphs: decode steps run as CUDA graphs; None: on a GPU, if the model can be captured.
        pack_weights: on a CPU, put the linear layers' weights into the order that its kernels read, which makes them
            faster; the model can then only run here as it is: not be trained, copied, converted or saved, nor run under
            autocast. None: where the processor can, unless a loaded model is given.

    Raises:
        ModelError: the model is unknown, broken, or its attention cannot be served.
        Unsupported: a cache format or device that this version does not serve.
        ValueError: a size is out of range, scales are missing, unreadable or of another model or format, or weights are
            to be packed that cannot be.
    """

    def __init__(
        self,
        model: str | Path | PreTrainedModel,
        *,
        dtype: str | torch.dtype = "auto",
        kv_format: str = "auto",
        kv_scales: KVScales | str | Path | None = None,
        device: str | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        block_size: int = 16,
        num_blocks: int | None = None,
        kv_cache_bytes: int | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 512,
        max_model_len: int | None = None,
        enable_prefix_caching: bool = True,
        use_graphs: bool | None = None,
        pack_weights: bool | None = None,
    ) -> None:
        # What is wrong without the model should not wait for the model.
        if KVFormat.parse(kv_format, torch.float32).v_scaled_by_channel and kv_scales is None:
            how = how_to_calibrate("MODEL" if isinstance(model, PreTrainedModel) else str(model))
            raise ValueError(f"cache format {kv_format} needs kv_scales: {how}")
        if isinstance(kv_scales, (str, Path)):
            kv_scales = KVScales.load(kv_scales)
        sizes = {
            "block_size": block_size,
            "num_blocks": num_blocks,
            "kv_cache_bytes": kv_cache_bytes,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
        }
        for name, size in sizes.items():
            if size is not None and size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        if max_model_len is not None and max_model_len < 2:
            raise ValueError(f"max_model_len must be at least 2 (a prompt and an answer), got {max_model_len}")
        if num_blocks is not None and kv_cache_bytes is not None:
            raise ValueError("num_blocks and kv_cache_bytes both size the cache; give one of them")
        _check_model_arguments(model, dtype, device, tokenizer)
        self.model: PreTrainedModel
        self.tokenizer: PreTrainedTokenizerBase | None
        self.model_path: Path | None
        if isinstance(model, PreTrainedModel):
            self.model, self.tokenizer, self.model_path = model.eval(), tokenizer, None
        else:
            loaded = load(model, dtype=dtype, device=device or best_device())
            self.model, self.tokenizer, self.model_path = loaded.model, loaded.tokenizer, loaded.path
        longest = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        if max_model_len is None:
            max_model_len = 4096 if longest is None else longest
        elif longest is not None and max_model_len > longest:
            raise ValueError(f"max_model_len must be at most {longest}, the model's positions, got {max_model_len}")
        self.max_model_len = max_model_len
        self.runner = ModelRunner(
            self.model,
            kv_format=kv_format,
            kv_scales=kv_scales,
            block_size=block_size,
            num_blocks=num_blocks,
            kv_cache_bytes=kv_cache_bytes,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            use_graphs=use_graphs,
        )
        # Not before the runner has accepted the model: packed weights can only be multiplied with.
        pack = not isinstance(model, PreTrainedModel) if pack_weights is None else pack_weights
        if pack and not pack_linear_layers(self.model) and pack_weights:
            raise ValueError(
                "pack_weights=True needs a model of float32 or bfloat16 on a CPU that oneDNN has kernels for"
            )
        self.pool = BlockPool(self.runner.num_blocks, block_size, enable_prefix_caching)
        self.scheduler = Scheduler(
            self.pool,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
        )
        self.sampler = Sampler()
        self.stats = Stats()
        self._eos_ids = _eos_ids(self.model)
        self._vocab_size = self.model.get_input_embeddings().num_embeddings
        self._num_requests = 0
        self._streams: dict[str, _Stream] = {}

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Result]:
        """Generate for one prompt or many.

        A prompt that cannot be served raises RequestError if it is given alone; in a list its result says
        so (finish_reason "error", `.error`) and the others go on.

        A step that fails (the model raises) fails the call: its own prompts end with the error, the others of
        the call are aborted, and the engine can be used again.

        Args:
            prompts: text or token ids, or a list of them.
            params: for all prompts, or one per prompt; None: greedy, SamplingParams().

        Returns:
            One result per prompt, in the order of the prompts.
        """
        results = {delta.index: delta.result for delta in self.stream(prompts, params) if delta.result is not None}
        return [results[i] for i in range(len(results))]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[Delta]:
        """Generate, and yield text as it becomes certain. Arguments and errors as for `generate`.

        Closing the iterator early aborts the prompts that are not finished.
        """
        alone = _is_one_prompt(prompts)
        batch: Sequence[Any] = [prompts] if alone else prompts
        for one in params if isinstance(params, (list, tuple)) else [params]:
            if one is not None and not isinstance(one, SamplingParams):
                raise TypeError(f"params must be SamplingParams, got {type(one).__name__}")
        if params is None or isinstance(params, SamplingParams):
            each = [params or SamplingParams()] * len(batch)
        elif len(params) == len(batch):
            each = list(params)
        else:
            raise ValueError(f"{len(batch)} prompts need one SamplingParams or {len(batch)}, got {len(params)}")
        return self._stream(batch, each, alone)

    def chat_prompt(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Token ids of a conversation under the model's chat template, ready for the answer.

        Args:
            messages: [{"role": "system" | "user" | "assistant", "content": text}, ...].

        Raises:
            RequestError: the model has no chat template, or it refuses the conversation.
        """
        if self.tokenizer is None or self.tokenizer.chat_template is None:
            raise RequestError("the model has no chat template; give it plain text")
        for message in messages:
            _check_text(message.get("content") if isinstance(message, dict) else message)
        try:
            encoded = self.tokenizer.apply_chat_template(list(messages), add_generation_prompt=True)
        except (TemplateError, TypeError, ValueError, IndexError, KeyError) as error:
            raise RequestError(f"the model's chat template refuses the conversation {messages!r}: {error}") from error
        ids: list[int] = encoded["input_ids"]
        return ids

    def _stream(self, batch: Sequence[Any], params: Sequence[SamplingParams], alone: bool) -> Iterator[Delta]:
        mine: list[_Stream] = []
        started = time.perf_counter()
        try:
            for index, prompt in enumerate(batch):
                try:
                    mine.append(self._add(index, prompt, params[index], started))
                except RequestError as error:
                    if alone:
                        raise
                    yield Delta(index, "", (), Result("", (), "error", error=str(error)))
            # Other streams of this engine may advance ours, and we theirs: each reads its own news.
            while mine:
                for stream in mine:
                    while stream.news:
                        yield stream.news.popleft()
                mine = [stream for stream in mine if stream.news or not stream.request.is_finished]
                if mine and not any(stream.news for stream in mine):
                    self._advance()
        finally:
            for stream in mine:
                self.scheduler.abort(stream.request.request_id)
                self._forget(stream)

    def _add(self, index: int, prompt: Any, params: SamplingParams, started: float) -> _Stream:
        request = Request(str(self._num_requests), self._token_ids(prompt), params)
        self._num_requests += 1
        try:
            self.scheduler.add(request)
        except ValueError as error:
            raise RequestError(str(error)) from error
        detokenizer = None if self.tokenizer is None else Detokenizer(self.tokenizer, params)
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos_ids)
        stream = _Stream(index, request, detokenizer, stop_ids, started)
        self._streams[request.request_id] = stream
        return stream

    def _token_ids(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            if not prompt:
                raise RequestError("the prompt is empty; give it at least one character")
            if self.tokenizer is None:
                raise RequestError("a text prompt needs a tokenizer; give token ids, or LLM(tokenizer=...)")
            _check_text(prompt)
            ids: list[int] = self.tokenizer(prompt)["input_ids"]
            return ids
        try:
            ids = [operator.index(token) for token in prompt]
        except TypeError as error:
            raise RequestError(f"a prompt is text or a list of token ids, got {prompt!r}") from error
        outside = [token for token in ids if not 0 <= token < self._vocab_size]
        if outside:
            raise RequestError(f"token {outside[0]} lies outside the vocabulary of {self._vocab_size}")
        return ids

    def _advance(self) -> None:
        """Run one step and hand its news to the streams."""
        step = self.scheduler.schedule()
        assert step is not None, "streams are unfinished requests"
        sampling = [chunk.request for chunk in step.scheduled if chunk.samples]
        try:
            sampled = self.sampler.sample(self.runner.run(step.scheduled), sampling)
        except BaseException as error:
            # Nothing of this step may be found again: its pages are half written.
            for chunk in step.scheduled:
                self._end(self._streams[chunk.request.request_id], "error", f"the step failed: {error}")
            self.scheduler.complete(step)
            raise
        self.scheduler.complete(step)
        self.stats.count(step, len(sampled), self.pool.num_blocks - self.pool.num_free)
        now = time.perf_counter()
        for request, token in zip(sampling, sampled, strict=True):
            self._take(self._streams[request.request_id], token, now)

    def _take(self, stream: _Stream, sampled: SampledToken, now: float) -> None:
        """Add a sampled token to its request, and end the request if it is the last."""
        if sampled.token_id is None:
            self._end(stream, "error", sampled.error)
            return
        if stream.first_token_at is None:
            stream.first_token_at = now
        request, token = stream.request, sampled.token_id
        request.output_token_ids.append(token)
        if sampled.logprob is not None:
            request.logprobs.append(sampled.logprob)
        is_stop = token in stream.stop_ids
        text = "" if is_stop or stream.detokenizer is None else stream.detokenizer.push(token)
        if is_stop or (stream.detokenizer is not None and stream.detokenizer.stopped):
            self._end(stream, "stop", text=text, tokens=(token,))
        elif request.is_at_limit:
            self._end(stream, "length", text=text, tokens=(token,))
        else:
            stream.news.append(Delta(stream.index, text, (token,)))

    def _end(
        self,
        stream: _Stream,
        reason: FinishReason,
        error: str | None = None,
        *,
        text: str = "",
        tokens: tuple[int, ...] = (),
    ) -> None:
        """Finish a request and post its last news."""
        if stream.detokenizer is not None:
            text += stream.detokenizer.finish()
        self.scheduler.finish(stream.request, reason, error)
        stream.news.append(Delta(stream.index, text, tokens, self._result(stream)))
        self._forget(stream)

    def _forget(self, stream: _Stream) -> None:
        self._streams.pop(stream.request.request_id, None)
        self.sampler.forget(stream.request.request_id)

    def _result(self, stream: _Stream) -> Result:
        request, first = stream.request, stream.first_token_at
        assert request.finish_reason is not None
        self.stats.num_cached_tokens += request.num_cached_tokens
        self.stats.num_preemptions += request.num_preemptions
        return Result(
            text="" if stream.detokenizer is None else stream.detokenizer.text,
            token_ids=tuple(request.output_token_ids),
            finish_reason=request.finish_reason,
            prompt_token_ids=tuple(request.prompt_token_ids),
            num_cached_tokens=request.num_cached_tokens,
            logprobs=None if request.params.logprobs is None else tuple(request.logprobs),
            time_to_first_token=None if first is None else first - stream.started,
            error=request.error,
        )


def _check_text(text: Any) -> None:
    """Refuse what a tokenizer cannot read: no text, or text with half characters in it."""
    if not isinstance(text, str):
        raise RequestError(f"a message is a role and a text, got {text!r}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"the prompt is no UTF-8 text: {text!r}") from error


def _is_one_prompt(prompts: Any) -> bool:
    """Whether this is text or token ids (also as a 1-D array), rather than a list of prompts."""
    if isinstance(prompts, str):
        return True
    return len(prompts) > 0 and hasattr(prompts[0], "__index__") and getattr(prompts[0], "ndim", 0) == 0


def _check_model_arguments(model: Any, dtype: Any, device: Any, tokenizer: Any) -> None:
    """Refuse what a model that is loaded already, or one that is still to be loaded, cannot take."""
    if isinstance(model, PreTrainedModel):
        given = [name for name, value in (("dtype", dtype), ("device", device)) if value not in ("auto", None)]
        if given:
            raise ValueError(f"{' and '.join(given)} belong to a model that is still to be loaded; convert this one")
    elif tokenizer is not None:
        raise ValueError("tokenizer belongs to a loaded model; a named model brings its own")


def _eos_ids(model: PreTrainedModel) -> frozenset[int]:
    """End-of-text tokens: one, several or none."""
    eos = getattr(model.generation_config, "eos_token_id", None)
    if eos is None:
        eos = model.config.get_text_config().eos_token_id
    if eos is None:
        return frozenset()
    return frozenset(eos if isinstance(eos, list) else [eos])
