"""A pool, rows with gaps and batches over them, as SGLang's scheduler would hand them to a backend."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import build_replay_fb_view
from sglang.srt.runtime_context import get_server_args
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from torch import Tensor
from transformers import LlamaConfig

from grkv_sglang import plugin
from grkv_sglang.attention.ragged import RaggedRegion
from grkv_sglang.attention.rows import prefix_row

NUM_ROWS = 6
ROW_TOKENS = 96
HEADS, KV_HEADS, HEAD_DIM = 6, 2, 32
SHARED_SLOTS = [30, 30, 30, 0, 24, 24]
"""Of `World.sharing_requests`."""
UNWRITTEN = 999_999_999
"""What columns hold that no request has reached: a slot that does not exist."""


def model_runner(
    page_size: int,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    layers: int = 1,
    **changes: Any,
) -> SimpleNamespace:
    """The parts of SGLang's ModelRunner that attention backends look at; pools and translator are real.
    `kv_dtype`: the pool's, `dtype` unless given."""
    kv_dtype = kv_dtype or dtype
    pool = ReqToTokenPool(NUM_ROWS, ROW_TOKENS, "cpu", False)
    pool.req_to_token[1:] = UNWRITTEN
    slots = (NUM_ROWS + 1) * 2 * ROW_TOKENS
    kv = MHATokenToKVPool(slots, page_size, kv_dtype, KV_HEADS, HEAD_DIM, layers, "cpu", False)
    allocator = SimpleNamespace(get_kvcache=lambda: kv, page_size=page_size)
    translator = KVIndexTranslator(
        req_to_token=pool.req_to_token, token_to_kv_pool_allocator=allocator, token_to_kv_pool=kv,
        page_size=page_size, device="cpu",
    )  # fmt: skip
    config = SimpleNamespace(
        attention_arch=AttentionArch.MHA, num_attention_heads=HEADS, head_dim=HEAD_DIM, v_head_dim=HEAD_DIM,
        swa_v_head_dim=HEAD_DIM, qk_nope_head_dim=0, qk_rope_head_dim=0, kv_lora_rank=0,
        get_max_num_attention_heads=lambda: HEADS, get_num_kv_heads=lambda *sizes: KV_HEADS,
        context_len=ROW_TOKENS, is_encoder_decoder=False, is_multimodal=False,
        linear_attn_registry_result=None, hf_config=LlamaConfig(architectures=["LlamaForCausalLM"]),
    )  # fmt: skip
    runner = SimpleNamespace(
        device="cpu", gpu_id=0, page_size=page_size, dtype=dtype, kv_cache_dtype=kv_dtype,
        req_to_token_pool=pool, token_to_kv_pool=kv, token_to_kv_pool_allocator=allocator,
        kv_index_translator=translator, model_config=config, server_args=get_server_args(),
        sliding_window_size=None, is_draft_worker=False, spec_algorithm=SpeculativeAlgorithm.NONE,
        decode_num_tokens_per_req=lambda: 1, prefill_attention_backend_str="ours",
        decode_attention_backend_str="ours",
    )  # fmt: skip
    for name, value in changes.items():
        setattr(config if hasattr(config, name) else runner, name, value)
    return runner


@dataclass(frozen=True)
class Request:
    """One request's row: `prefix` logical tokens of which the first `gap` have no slot, then `new` ones."""

    row: int
    gap: int
    prefix: int
    new: int

    @property
    def seq_len(self) -> int:
        return self.prefix + self.new


class World:
    """Rows of a runner's pool filled for requests; slots are unique and never 0."""

    def __init__(self, runner: Any, seed: int) -> None:
        self.runner = runner
        self.random = random.Random(seed)
        self.page = runner.page_size
        first = torch.arange(1, runner.token_to_kv_pool.size // self.page).tolist()
        self.random.shuffle(first)
        self.free = [page * self.page + i for page in first for i in range(self.page)]

    def requests(self, num: int, *, new: int | None = None) -> list[Request]:
        """Random ones in random rows; the first has a gap, the last has none. `new`: 1 for decode."""
        rows = self.random.sample(range(1, NUM_ROWS + 1), num)
        made = []
        for i, row in enumerate(rows):
            pages = self.random.randint(1, (ROW_TOKENS - 20) // self.page)
            gap_pages = 0 if i == num - 1 else self.random.randint(1 if i == 0 else 0, pages)
            # A prefix of whole pages where the tree made it; a decode row grows token by token.
            grown = 0 if self.page == 1 else self.random.randint(0, self.page - 1) * (new == 1)
            count = self.random.randint(1, 12) if new is None else new
            made.append(Request(row, gap_pages * self.page, pages * self.page + grown, count))
            self.write(made[-1])
        return made

    def write(self, request: Request) -> None:
        """The row as the radix cache and SGLang's allocation write it, and the gap."""
        slots = torch.tensor([self.free.pop() for _ in range(request.seq_len - request.gap)])
        table = self.runner.req_to_token_pool.req_to_token
        table[request.row] = UNWRITTEN
        table[request.row, : request.seq_len] = prefix_row(slots, request.seq_len).to(table.dtype)
        if request.row != 0:
            self.runner.req_to_token_pool.grkv_row_gaps.set(request.row, request.gap)

    def sharing_requests(self) -> list[Request]:
        """Decoding: three behind the same 30 slots, one of them without a gap; one alone; two behind 24."""
        sizes = [(1, 7, 47), (3, 7, 52), (2, 0, 45), (5, 3, 20), (4, 9, 40), (6, 9, 33)]
        made = [Request(row, gap, prefix, 1) for row, gap, prefix in sizes]
        for request in made:
            self.write(request)
        table = self.runner.req_to_token_pool.req_to_token
        for number, request in enumerate(made):
            count = SHARED_SLOTS[number]
            first = made[SHARED_SLOTS.index(count)]
            slots = table[first.row, first.gap : first.gap + count].clone()
            table[request.row, request.gap : request.gap + count] = slots
        return made

    def regions(self, request: Request, layers: int) -> tuple[RaggedRegion, ...]:
        """Draw regions anywhere in the request's prefix, next to each other or not, and note them for its
        row: the same slots, read head by head. Some heads have nothing."""
        draw = self.random
        column = request.gap + draw.randint(0, 2)
        made: list[RaggedRegion] = []
        while column < request.prefix and len(made) < 3:
            size = draw.randint(1, min(12, request.prefix - column))
            first = [
                draw.choice([0, size * KV_HEADS, draw.randint(0, size * KV_HEADS)]) for _ in range(layers)
            ]
            counts = torch.tensor([[mine, size * KV_HEADS - mine] for mine in first])
            made.append(RaggedRegion(column, size, counts))
            column += size + draw.choice([0, 1, 7])
        self.runner.req_to_token_pool.grkv_row_gaps.set(request.row, request.gap, tuple(made))
        return tuple(made)

    def batch(self, requests: Sequence[Request], mode: ForwardMode, *, noted: bool = True) -> SimpleNamespace:
        """What ``ForwardBatch.init_new`` makes of live requests, as far as backends look at it."""
        rows = torch.tensor([r.row for r in requests])
        seq_lens = torch.tensor([r.seq_len for r in requests])
        table = self.runner.req_to_token_pool.req_to_token
        new = [table[r.row, r.prefix : r.seq_len] for r in requests]
        batch = SimpleNamespace(
            forward_mode=mode, batch_size=len(requests), req_pool_indices=rows, seq_lens=seq_lens,
            seq_lens_cpu=seq_lens.clone(), seq_lens_sum=int(seq_lens.sum()), max_seq_len_host=None,
            encoder_lens=None, spec_info=None, input_ids=torch.zeros(sum(r.new for r in requests)),
            positions=torch.cat([torch.arange(r.prefix, r.seq_len) for r in requests]),
            out_cache_loc=torch.cat(new).to(torch.int64), cross_attention_custom_mask=None,
            extend_prefix_lens=torch.tensor([r.prefix for r in requests], dtype=torch.int32),
            extend_prefix_lens_cpu=[r.prefix for r in requests],
            extend_seq_lens=torch.tensor([r.new for r in requests], dtype=torch.int32),
            extend_seq_lens_cpu=[r.new for r in requests], mha_one_shot=False, attn_attend_prefix_cache=None,
            max_seq_len_override=None, lora_ids=None, can_run_decode_cuda_graph=True,
        )  # fmt: skip
        self.runner.kv_index_translator.bind_own_plan(batch)
        if noted:
            scheduled = SimpleNamespace(req_pool_indices_cpu=rows.clone())  # a ScheduleBatch
            plugin._note_gaps(batch, None, scheduled, self.runner)
        return batch


class GraphBuffers:
    """A decode graph's static inputs, and the views that SGLang's graph runner makes of them."""

    def __init__(self, lanes: int) -> None:
        self.lanes = lanes
        ones = torch.ones(lanes, dtype=torch.int64)
        self.buffers = SimpleNamespace(
            input_ids=torch.zeros(lanes), positions=torch.zeros(lanes), mamba_track_indices=None,
            req_pool_indices=torch.zeros_like(ones), seq_lens=ones, seq_lens_cpu=ones.clone(),
        )  # fmt: skip

    def captured(self, runner: Any) -> SimpleNamespace:
        """The batch that SGLang captures with: padding in every lane, no request."""
        batch = SimpleNamespace(
            forward_mode=ForwardMode.DECODE, batch_size=self.lanes, seq_lens_sum=self.lanes,
            encoder_lens=None, spec_info=None, out_cache_loc=torch.zeros(self.lanes, dtype=torch.int64),
            req_pool_indices=self.buffers.req_pool_indices, seq_lens=self.buffers.seq_lens,
            seq_lens_cpu=self.buffers.seq_lens_cpu, positions=self.buffers.positions,
        )  # fmt: skip
        runner.kv_index_translator.bind_runner_slots(batch)
        return batch

    def replayed(self, batch: SimpleNamespace) -> Any:
        """`batch` copied into the graph's lanes, the rest padded; SGLang's own view of it."""
        live = batch.batch_size
        for name, padding in (("req_pool_indices", 0), ("seq_lens", 1), ("seq_lens_cpu", 1)):
            buffer = getattr(self.buffers, name)
            buffer[live:] = padding
            buffer[:live] = getattr(batch, name)
        return build_replay_fb_view(
            batch, self.buffers, self.lanes, live, self.lanes, None, 1, ForwardMode.DECODE, False
        )


def padded(requests: Sequence[Request], lanes: int) -> list[Request]:
    """Requests in a graph of so many lanes: a padded lane reads one column of row 0."""
    return [*requests, *[Request(row=0, gap=0, prefix=0, new=1)] * (lanes - len(requests))]


def expected_stream(
    table: Tensor,
    requests: Sequence[Request],
    *,
    prefix_only: bool,
    regions: Sequence[Sequence[RaggedRegion]] | None = None,
) -> Any:
    """The reference: indptr and slots of a batch, column by column."""
    indptr, slots = [0], []
    for index, request in enumerate(requests):
        inside = (
            {c for r in regions[index] for c in range(r.first_column, r.end_column)} if regions else set()
        )
        for column in range(request.prefix if prefix_only else request.seq_len):
            if column >= request.gap and column not in inside:
                slots.append(int(table[request.row, column]))
        indptr.append(len(slots))
    assert UNWRITTEN not in slots
    return indptr, slots
