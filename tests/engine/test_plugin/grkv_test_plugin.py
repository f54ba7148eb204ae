"""A second SGLang plugin, for tests only: injects faults into our compressor and records what it saw.

Driven by files in the folder named by TEST_GRKV_DIR, which are taken down once they have had their effect. A
fault's file holds the layer it is for. Of SGLang only the freeing of slots is touched: freed KV becomes NaN.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from pathlib import Path

import torch


def register() -> None:
    folder = Path(os.environ["TEST_GRKV_DIR"])
    from grkv_sglang.attention import torch_backend
    from grkv_sglang.cache import compressor, work

    compress_layer = compressor.compress_layer
    state = {"layer": 0}

    def take(name):
        """Whether the test raised this flag for the current layer; takes the flag down."""
        flag = folder / name
        if not flag.exists() or state["layer"] != int(flag.read_text() or "7"):
            return False
        flag.unlink(missing_ok=True)
        return True

    def faulty_compress_layer(*args, **kwargs):
        if (folder / "slow").exists():
            time.sleep(0.15)
        result = compress_layer(*args, **kwargs)
        state["layer"] += 1
        if take("raise"):
            raise RuntimeError("injected by a test")
        if take("nan"):
            result = dataclasses.replace(result, keys=torch.full_like(result.keys, torch.nan))
        return result

    compressor.compress_layer = faulty_compress_layer

    allocate = work.CompressionWork._allocate

    def faulty_allocate(self, n_slots, *, may_evict):
        state["layer"] = 0
        if take("no_room"):
            raise compressor.CompressionError("no_room", "injected by a test")
        return allocate(self, n_slots, may_evict=may_evict)

    setattr(work.CompressionWork, "_allocate", faulty_allocate)  # noqa: B010
    _poison_freed_slots()

    origin = compressor.Compression.origin

    def recording_origin(self, quality):
        """Called when all layers of a span are written."""
        if (folder / "dump").exists():
            pool = self._compressor._pool
            layers = range(self._compressor.num_layers)
            torch.save(
                {
                    "token_ids": list(self.source.token_ids),
                    "start_tokens": self.source.start_tokens,
                    "counts": self.counts,
                    "keys": [pool.get_key_buffer(i)[self.new_slots].clone() for i in layers],
                    "values": [pool.get_value_buffer(i)[self.new_slots].clone() for i in layers],
                },
                folder / "span.pt",
            )
            (folder / "dump").unlink()
        return origin(self, quality)

    setattr(compressor.Compression, "origin", recording_origin)  # noqa: B010

    prefill: dict[int, dict[int, torch.Tensor]] = {}
    extend = torch_backend.GrkvTorchAttnBackend.forward_extend

    def recording_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True):
        if (folder / "queries").exists():
            rows = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
            by_position = prefill.setdefault(layer.layer_id, {})
            for position, row in zip(forward_batch.positions.tolist(), rows, strict=True):
                by_position[position] = row.clone()
        return extend(self, q, k, v, layer, forward_batch, save_kv_cache)

    setattr(torch_backend.GrkvTorchAttnBackend, "forward_extend", recording_extend)  # noqa: B010

    attend = compressor._CachedAttention.forward

    def comparing_probe(self, q, k, v, layer, forward_batch, save_kv_cache=True):
        if not isinstance(self._readers[0], compressor._Probe):
            return attend(self, q, k, v, layer, forward_batch, save_kv_cache)
        if layer.layer_id == 2 and take("probe"):
            raise RuntimeError("injected by a test")
        if (folder / "queries").exists():
            n_probed = self._sizes[0]  # then come requests behind the span
            rows = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)[:n_probed]
            positions = forward_batch.positions.tolist()[:n_probed]
            known = torch.stack([prefill[layer.layer_id][p] for p in positions])
            entry = {
                "layer": layer.layer_id,
                "queries": len(positions),
                "max_abs_difference": float((rows - known).abs().max()),
                "max_abs": float(known.abs().max()),
            }
            with (folder / "queries.jsonl").open("a") as out:
                out.write(json.dumps(entry) + "\n")
        return attend(self, q, k, v, layer, forward_batch, save_kv_cache)

    setattr(compressor._CachedAttention, "forward", comparing_probe)  # noqa: B010


def _poison_freed_slots() -> None:
    """Fill freed slots with NaN: whoever reads one gives a NaN away."""
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
    from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator

    def poison(allocator, slots):
        pool = allocator.get_kvcache()
        for layer in range(pool.layer_num):
            for buffer in pool.get_kv_buffer(layer):  # numbers of 8 bits are kept as bytes
                buffer[slots] = torch.nan

    free, release = TokenToKVPoolAllocator.free, PagedTokenToKVPoolAllocator._release_page_ids

    def poisoning_free(self, free_index):
        if self.free_group is None and free_index.numel():
            poison(self, free_index.long())
        free(self, free_index)

    def poisoning_release(self, page_ids):
        offsets = torch.arange(self.page_size, device=page_ids.device)
        poison(self, (page_ids[:, None] * self.page_size + offsets).flatten().long())
        release(self, page_ids)

    setattr(TokenToKVPoolAllocator, "free", poisoning_free)  # noqa: B010
    setattr(PagedTokenToKVPoolAllocator, "_release_page_ids", poisoning_release)  # noqa: B010
