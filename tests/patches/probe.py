"""Runs in a process of its own on a copy of SGLang, patched or not, and prints what it saw as JSON.

``python probe.py plugins prefix_cache``: the plugin loader first, then the classic radix cache. Values
are checked in ``test_patches.py``; here is only what drives SGLang.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import logging
import os
import sys
from array import array
from types import SimpleNamespace
from typing import Any

Seen = dict[str, Any]

# -- the plugin loader: fake plugins are in ``fake_plugin.py`` (see test_patches.py) --------------------


def plugins() -> Seen:
    from sglang.srt import plugins as loader

    seen: Seen = {"file": loader.__file__}
    for flag in (None, "0", "1"):
        for bad in ("import_error", "run_error", "absent_hook", "class_hook", "none"):
            seen[f"{bad} {flag}"] = _load(loader, bad, flag)
    return seen


def _load(loader: Any, bad: str, flag: str | None) -> Seen:
    """What `load_plugins` does with one bad plugin in front of a good one."""
    fake = importlib.reload(importlib.import_module("fake_plugin"))
    loader.HookRegistry.reset()
    loader._plugins_loaded = False
    os.environ["SGLANG_PLUGINS"] = f"{bad},good"
    os.environ.pop("SGLANG_PLUGINS_STRICT", None)
    if flag is not None:
        os.environ["SGLANG_PLUGINS_STRICT"] = flag
    errors: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: errors.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("sglang.srt.plugins")
    log.addHandler(handler)
    raised = None
    try:
        loader.load_plugins()
    except Exception as error:  # noqa: BLE001  the subject of the test
        raised = type(error).__name__
    finally:
        log.removeHandler(handler)
    return {"raised": raised, "errors": errors, "good_ran": fake.ran, "good_hook": fake.target()}


# -- the classic radix cache ----------------------------------------------------------------------------


def prefix_cache() -> Seen:
    import torch
    from sglang.srt.beam_search.coordinator import BeamCoordinator
    from sglang.srt.disaggregation.decode import DecodeReqToTokenPool
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache import radix_cache
    from sglang.srt.mem_cache.allocation import alloc_for_extend
    from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey, TreeNode
    from sglang.srt.runtime_context import get_context
    from sglang.srt.sampling.sampling_params import SamplingParams

    get_context().override_server_args(attention_backend="torch_native").install()

    class Span(TreeNode):  # type: ignore[misc]
        """Six tokens in two slots."""

        num_slots = 2

    class SpanCache(RadixCache):  # type: ignore[misc]
        """The four accessors, and the row layout of a path: nothing else."""

        def node_num_slots(self, node: Any) -> int:
            return node.num_slots if isinstance(node, Span) else int(super().node_num_slots(node))

        def node_slots(self, node: Any) -> Any:
            return node.value[-2:] if isinstance(node, Span) else super().node_slots(node)

        def node_child_key(self, node: Any) -> Any:
            return ("span", node.id) if isinstance(node, Span) else super().node_child_key(node)

        def row_start(self, req: Any) -> int:
            return int((self.path_device_indices(req.last_node) == 0).sum())

        def path_device_indices(self, node: Any) -> Any:
            path = super().path_device_indices(node)
            return torch.cat([path[path == 0], path[path != 0]])

    def key(tokens: range, extra: str | None = None) -> Any:
        return RadixKey(array("q", tokens), extra)

    def build(kind: Any, page_size: int = 1, pool: Any = None) -> Any:
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=pool or ReqToTokenPool(4, 32, "cpu", False),
            token_to_kv_pool_allocator=TokenToKVPoolAllocator(32, torch.float32, "cpu", None, False),
            page_size=page_size,
        )
        return kind(params)

    def insert(cache: Any, tokens: range, extra: str | None = None) -> Any:
        slots = cache.token_to_kv_pool_allocator.alloc(len(tokens))
        result = cache.insert(InsertParams(key=key(tokens, extra), value=slots))
        cache.token_to_kv_pool_allocator.free(slots[: result.prefix_len])
        return result.last_device_node

    def sizes(cache: Any) -> list[int]:
        free = cache.token_to_kv_pool_allocator.available_size()
        return [cache.evictable_size(), cache.protected_size(), cache.total_size(), free]

    def free_slots(cache: Any) -> list[int]:
        return sorted(cache.token_to_kv_pool_allocator.free_pages.tolist())

    def printed(cache: Any) -> list[str]:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            cache.pretty_print()
        return out.getvalue().splitlines()

    def evict(cache: Any, slots: int) -> int:
        return int(cache.evict(EvictParams(num_tokens=slots)).num_tokens_evicted)

    def extend(cache: Any, node: Any, prefix_len: int, new: int, held: Any = None) -> Any:
        """SGLang's `alloc_for_extend` for one request anchored on `node`, with a stand-in for the batch."""
        req = held or Req("r", "", array("q", range(prefix_len + new)), SamplingParams())
        req.last_node, req.prefix_len = node, prefix_len
        batch = SimpleNamespace(
            reqs=[req], prefix_lens=[prefix_len], extend_lens=[new], extend_num_tokens=new, device="cpu",
            seq_lens=torch.tensor([prefix_len + new]), seq_lens_cpu=torch.tensor([prefix_len + new]),
            tree_cache=cache, req_to_token_pool=cache.req_to_token_pool, hisparse_coordinator=None,
            maybe_evict_swa=lambda: None, is_dllm=lambda: False,
        )  # fmt: skip
        alloc_for_extend(batch)
        return req

    def release(cache: Any, free: list[int]) -> None:
        """Take all rows back, and the slots that are not among `free` any more."""
        taken = set(free) - set(free_slots(cache))
        cache.token_to_kv_pool_allocator.free(torch.tensor(sorted(taken)))
        cache.req_to_token_pool.clear()

    def row(cache: Any, req: Any) -> list[int]:
        used = cache.req_to_token_pool.req_to_token[req.kv.req_pool_idx, : req.kv.kv_allocated_len]
        return [int(slot) for slot in used]

    def stock(page_size: int) -> list[Any]:
        """A life of the stock tree, every step's numbers."""
        cache = build(RadixCache, page_size)
        first = insert(cache, range(8))
        insert(cache, range(4))  # splits
        insert(cache, range(100, 108), "other")
        steps: list[Any] = [sizes(cache), sorted(cache.all_values_flatten().tolist()), printed(cache)]
        lock = cache.inc_lock_ref(first).delta
        steps += [lock, sizes(cache), evict(cache, 4), sizes(cache), cache.dec_lock_ref(first).delta]
        steps += [sizes(cache), evict(cache, 1), sizes(cache), printed(cache)]
        if page_size == 1:
            req = extend(cache, first.parent, 4, 3)
            steps += [row(cache, req)]
        steps += [sizes(cache), evict(cache, 100), sizes(cache), free_slots(cache)]
        return steps

    def spans() -> Seen:
        cache = build(SpanCache)
        pool = cache.req_to_token_pool
        base = insert(cache, range(4))
        span = Span()
        span.parent, span.key = base, key(range(4, 10))
        slots = cache.token_to_kv_pool_allocator.alloc(2)
        span.value = torch.cat([slots.new_zeros(4), slots])
        name = cache.node_child_key(span)
        base.children[name] = span
        cache.evictable_size_ += cache.node_num_slots(span)
        cache._update_leaf_status(base)
        cache._update_leaf_status(span)
        tail = cache.token_to_kv_pool_allocator.alloc(3)
        cache._insert_helper(span, key(range(10, 13)), tail)
        leaf = next(iter(span.children.values()))
        exact = insert(cache, range(8))

        seen: Seen = {"inserted": sizes(cache), "slots": sorted(cache.all_values_flatten().tolist())}
        seen["locked"] = [cache.inc_lock_ref(leaf).delta, sizes(cache)]
        if not hasattr(RadixCache, "node_num_slots"):
            return seen  # nothing asks the accessors: what follows would free slot 0 and fail
        seen["printed"] = printed(cache)
        free = free_slots(cache)
        try:
            extend(cache, leaf, 13, 2)
        except RuntimeError as error:
            seen["untracked"] = str(error)
        release(cache, free)

        starts = pool.track_row_starts()
        seen["same_tensor"] = starts is pool.track_row_starts() is pool.row_starts
        req = extend(cache, leaf, 13, 2)
        seen["row"], seen["starts"] = row(cache, req), starts.tolist()
        req = extend(cache, leaf, 15, 1, held=req)  # the next chunk is asked again
        seen["chunk_row"], seen["chunk_starts"] = row(cache, req), starts.tolist()
        group = SimpleNamespace(beam_width=3, prompt_len=16)
        BeamCoordinator._spawn_member_rows(SimpleNamespace(req_to_token_pool=pool), group, req)
        seen["beam_starts"] = starts.tolist()
        release(cache, free)
        other = extend(cache, exact, 8, 1)  # takes a row that a request behind the span had
        seen["reused_row"], seen["reused_starts"] = row(cache, other), starts.tolist()
        release(cache, free)

        seen["unlocked"] = [cache.dec_lock_ref(leaf).delta, sizes(cache)]
        for node, age in ((leaf, 1), (exact, 2), (span, 3), (base, 4)):
            node.last_access_time = age
        seen["evicted"] = []
        for _ in range(4):
            seen["evicted"].append([evict(cache, 1), sizes(cache), name in base.children])
        seen["free"] = free_slots(cache)
        return seen

    seen: Seen = {"file": radix_cache.__file__, "page 1": stock(1), "page 4": stock(4), "spans": spans()}
    decode = build(RadixCache, pool=DecodeReqToTokenPool(4, 32, "cpu", False, 0))
    seen["decode pool"] = row(decode, extend(decode, decode.root_node, 0, 3))
    return seen


if __name__ == "__main__":
    probes = {"plugins": plugins, "prefix_cache": prefix_cache}
    # The prefix cache first: SGLANG_PLUGINS, which the other probe sets, also chooses the platform.
    wanted = sorted(sys.argv[1:], reverse=True)
    print(json.dumps({name: probes[name]() for name in wanted}))
