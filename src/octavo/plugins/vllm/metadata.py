"""A step of vLLM's as a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.config.vllm import get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder, CommonAttentionMetadata
from vllm.v1.kv_cache_interface import CrossAttentionSpec, EncoderOnlyAttentionSpec, KVCacheSpec

from octavo import backend as core
from octavo.batch import AttentionBatch
from octavo.errors import Unsupported
from octavo.launch import Plan
from octavo.plugins.vllm.impl import Impl


class CrossPlan(Plan):
    """A plan of cross attention: vLLM works out its slots and names them when the plan is made already."""

    __slots__ = ()
    __setattr__ = object.__setattr__

    @classmethod
    def of(cls, plan: Plan) -> CrossPlan:
        return cls(**{field.name: getattr(plan, field.name) for field in fields(plan)})


class MetadataBuilder(AttentionMetadataBuilder[Plan]):
    """Plans the steps of one group of layers; metadata in vLLM's sense is Octavo's plan."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS

    def __init__(
        self, kv_cache_spec: KVCacheSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._has_pages = not isinstance(kv_cache_spec, EncoderOnlyAttentionSpec)
        self._is_cross = isinstance(kv_cache_spec, CrossAttentionSpec)
        # Slots that vLLM works out for cross attention are those of one group.
        self.supports_update_block_table = not self._is_cross
        for layer in self._layers():
            layer.impl.bind(layer)  # scales that are missing or do not fit are refused now, not at the first request

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Plan:
        plan = self._builder.build(0, self._batch(common_attn_metadata))
        return CrossPlan.of(plan) if self._is_cross else plan

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> Plan:
        # By `build`, which vLLM overrides for cross attention, where the bound is the step's longest encoder prompt.
        longest = self.vllm_config.model_config.max_model_len
        return self.build(0, replace(common_attn_metadata, max_seq_len=longest))

    def update_block_table(self, metadata: Plan, blk_table: Tensor, slot_mapping: Tensor) -> Plan:
        return metadata.update_block_table(blk_table, None)

    def _batch(self, step: CommonAttentionMetadata) -> AttentionBatch:
        """The same facts under Octavo's names; all bounds are vLLM's own from the host."""
        causal = self._causal
        if step.causal is not causal:
            raise Unsupported(
                f"the step has causal={step.causal}, its layers were made with causal={causal}: "
                f"leave out --attention-backend CUSTOM for this model"
            )
        if not self._has_pages:
            return AttentionBatch.from_raw_keys(step.query_start_loc_cpu, step.query_start_loc_cpu, device=self.device)
        return AttentionBatch(
            query_start_loc=step.query_start_loc,
            seq_lens=step.seq_lens,
            block_table=step.block_table_tensor,
            num_tokens=step.num_actual_tokens,
            max_query_len=step.max_query_len,
            max_seq_len=step.max_seq_len,
        )

    @cached_property
    def _causal(self) -> bool:
        return self._layers()[0].impl.kind == "decoder"

    def _layers(self) -> Sequence[AttentionLayerBase]:
        layers = get_layers_from_vllm_config(self.vllm_config, AttentionLayerBase, self.layer_names)
        return [layer for layer in layers.values() if isinstance(layer.impl, Impl)]

    @cached_property
    def _builder(self) -> core.MetadataBuilder:
        """Made at the first step, when the layers have their pages; kernels are compiled then too."""
        config, layers = self.vllm_config, self._layers()
        speculative, scheduler = config.speculative_config, config.scheduler_config
        graphs = config.compilation_config.cudagraph_mode
        pages = layers[0].kv_cache
        builder = core.MetadataBuilder(
            core.BuilderConfig(
                num_q_heads=max(layer.num_heads for layer in layers),
                num_kv_heads=min(layer.num_kv_heads for layer in layers),
                value_dim=max(layer.head_size_v for layer in layers),
                block_size=pages.shape[2] if self._has_pages else 1,
                num_blocks=pages.shape[0] if self._has_pages else None,
                max_model_len=config.model_config.max_model_len,
                num_speculative_tokens=0 if speculative is None else speculative.num_speculative_tokens or 0,
                graphs_of_all_steps=graphs is not None and graphs.mixed_mode().name == "FULL",
                device=self.device,
                max_num_seqs=scheduler.max_num_seqs if self._has_pages else None,
                max_num_tokens=scheduler.max_num_batched_tokens,
            )
        )
        if self._has_pages:
            kinds = {layer.impl.bind(layer).spec: layer for layer in layers}
            for layer in kinds.values():
                bound, cache = layer.impl.bind(layer), layer.impl.pages(layer, layer.kv_cache)
                builder.warm_up(bound, cache, config.model_config.dtype, scheduler.max_num_seqs)
        return builder
