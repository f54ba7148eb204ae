"""grkv_triton and grkv_torch compute the same attention over the same rows and the same pool."""

from __future__ import annotations

import pytest
import torch
from grkv_kernels import ragged_attention, read_slots
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from grkv_sglang.attention import cells, shared
from grkv_sglang.attention.kv_scales import kv_scales
from grkv_sglang.attention.torch_backend import GrkvTorchAttnBackend
from grkv_sglang.attention.triton_backend import GrkvTritonAttnBackend
from grkv_sglang.config import TRITON_ATTENTION
from grkv_sglang.core import Storage
from tests.attention.interpreted.world import (
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    SHARED_SLOTS,
    GraphBuffers,
    World,
    model_runner,
)
from tests.attention.reference import reference

TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3}


def make(page_size, dtype, seed, layers=1):
    """Both backends on one pool: its unused slots, the dummy among them, hold NaN."""
    runner = model_runner(page_size, dtype, layers=layers)
    backends = GrkvTritonAttnBackend(runner), GrkvTorchAttnBackend(runner)
    assert backends[0].row_gaps is backends[1].row_gaps
    for layer in range(layers):
        for buffer in runner.token_to_kv_pool.get_kv_buffer(layer):
            buffer.fill_(torch.nan)
    return (
        *backends,
        World(runner, seed),
        RadixAttention(HEADS, HEAD_DIM, HEAD_DIM**-0.5, KV_HEADS, layers - 1),
    )


def fill(world, requests, *, prefix_only):
    """Random keys and values in the slots that the requests have already."""
    table = world.runner.req_to_token_pool.req_to_token
    for request in requests:
        end = request.prefix if prefix_only else request.seq_len
        slots = table[request.row, request.gap : end].long()
        pool = world.runner.token_to_kv_pool
        for layer in range(pool.layer_num):
            for buffer in pool.get_kv_buffer(layer):
                buffer[slots] = torch.randn(slots.numel(), KV_HEADS, HEAD_DIM).to(buffer.dtype)


def random_qkv(num, dtype):
    shapes = (HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM)
    q, k, v = (torch.randn(num, shape).to(dtype) for shape in shapes)
    return q, k.view(num, KV_HEADS, HEAD_DIM), v.view(num, KV_HEADS, HEAD_DIM)


def assert_same(triton, torch_, dtype):
    assert torch.isfinite(torch_).all()
    torch.testing.assert_close(triton.view_as(torch_), torch_, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("page_size", "seed"), [(1, 0), (1, 1), (16, 2)])
def test_extend(dtype, page_size, seed):
    triton, torch_, world, layer = make(page_size, dtype, seed)
    torch.manual_seed(seed)
    requests = world.requests(3)
    assert requests[0].gap > 0 == requests[-1].gap
    fill(world, requests, prefix_only=True)
    batch = world.batch(requests, ForwardMode.EXTEND)
    q, k, v = random_qkv(sum(r.new for r in requests), dtype)
    for backend in (triton, torch_):
        backend.init_forward_metadata(batch)
    got, want = (backend.forward_extend(q, k, v, layer, batch) for backend in (triton, torch_))
    assert_same(got, want, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("page_size", "seed"), [(1, 0), (1, 1), (16, 2)])
def test_decode(dtype, page_size, seed):
    triton, torch_, world, layer = make(page_size, dtype, seed)
    torch.manual_seed(seed)
    requests = world.requests(3, new=1)
    assert requests[0].gap > 0 == requests[-1].gap
    fill(world, requests, prefix_only=True)
    batch = world.batch(requests, ForwardMode.DECODE)
    q, k, v = random_qkv(3, dtype)
    for backend in (triton, torch_):
        backend.init_forward_metadata(batch)
    got, want = (backend.forward_decode(q, k, v, layer, batch) for backend in (triton, torch_))
    assert_same(got, want, dtype)


@pytest.mark.parametrize("mode", [ForwardMode.EXTEND, ForwardMode.DECODE])
@pytest.mark.parametrize(("page_size", "seed", "dtype"), [(1, 3, torch.float32), (16, 4, torch.float16)])
def test_heads_that_hold_tokens_of_their_own(mode, page_size, seed, dtype):
    """Rows with regions beside rows with none, then a batch without any on the same server."""
    triton, torch_, world, layer = make(page_size, dtype, seed, layers=2)
    torch.manual_seed(seed)
    new = 1 if mode is ForwardMode.DECODE else None
    requests = world.requests(5, new=new)
    fill(world, requests, prefix_only=True)
    regions = [world.regions(request, layers=2) for request in requests[:-1]]
    assert max(map(len, regions)) > 1

    def both(some):
        batch = world.batch(some, mode)
        q, k, v = random_qkv(sum(r.new for r in some), dtype)
        for backend in (triton, torch_):
            backend.init_forward_metadata(batch)
        forward = "forward_decode" if new else "forward_extend"
        return [getattr(backend, forward)(q, k, v, layer, batch) for backend in (triton, torch_)]

    torch.manual_seed(99)
    got, want = both(requests)
    assert_same(got, want, dtype)
    got, even = both(requests[-1:])
    assert triton._region_cells == []
    assert_same(got, even, dtype)
    # The same slots and queries, read as those of even spans, give something else.
    for request in requests:
        world.runner.req_to_token_pool.grkv_row_gaps.set(request.row, request.gap)
    torch.manual_seed(99)
    assert not torch.allclose(both(requests)[1], want, atol=0.1)


@pytest.mark.parametrize(
    ("page_size", "dtype", "scales"),
    [(1, torch.float32, None), (16, torch.float16, None), (1, torch.float32, (0.07, 3.0))],
)
def test_requests_behind_the_same_slots_decode_together(monkeypatch, page_size, dtype, scales):
    """As they do one by one, beside a request whose heads hold tokens of their own."""
    triton, torch_, world, layer = make(page_size, dtype, 5, layers=2)
    if scales is not None:  # of a checkpoint: SGLang multiplies by them whatever the pool's dtype is
        layer.k_scale, layer.v_scale = map(torch.tensor, scales)
        layer.k_scale_float, layer.v_scale_float = scales
    torch.manual_seed(5)
    requests = world.sharing_requests()
    fill(world, requests, prefix_only=True)
    if scales is None:
        world.regions(requests[3], layers=2)
    batch = world.batch(requests, ForwardMode.DECODE)
    q, k, v = random_qkv(len(requests), dtype)
    asked = []

    def recorded(*args, q_indptr=None, **kwargs):
        if q_indptr is not None:  # not for regions
            asked.append(q_indptr.tolist())
        return ragged_attention(*args, q_indptr=q_indptr, **kwargs)

    monkeypatch.setattr(cells, "ragged_attention", recorded)

    def decoded(backend, least):
        monkeypatch.setitem(shared.LEAST_SAVED_SLOTS, "cpu", least)
        backend.init_forward_metadata(batch)
        return backend.forward_decode(q.clone(), k.clone(), v.clone(), layer, batch)

    alone = decoded(triton, 10**9)
    assert asked == []
    together = decoded(triton, 20)
    assert asked == [[0, 3, 5]]
    assert_same(together, alone, dtype)
    if scales is None:  # grkv_torch multiplies by nothing
        assert_same(together, decoded(torch_, 10**9), dtype)
        assert_same(together, decoded(torch_, 20), dtype)
    triton.init_forward_metadata(world.batch(requests[:2], ForwardMode.EXTEND))
    assert triton._shared is None


def test_a_graph_forgets_what_was_read_together(monkeypatch):
    """A batch too large for the graphs runs eagerly; the next one is a replay."""
    monkeypatch.setitem(shared.LEAST_SAVED_SLOTS, "cpu", 20)
    triton, torch_, world, layer = make(1, torch.float32, 8)
    triton.init_cuda_graph_state(max_bs=3, max_num_tokens=3)
    graph = GraphBuffers(3)
    triton.init_forward_metadata_out_graph(graph.captured(world.runner), in_capture=True)
    captured = triton.forward_metadata
    requests = world.sharing_requests()
    fill(world, requests, prefix_only=False)
    triton.init_forward_metadata(world.batch(requests, ForwardMode.DECODE))
    assert triton._shared.num_slots.tolist() == SHARED_SLOTS
    batch = world.batch(requests[:3], ForwardMode.DECODE)
    view = graph.replayed(batch)
    triton.init_forward_metadata_out_graph(view)
    triton.forward_metadata = captured  # what the graph's kernels read
    q, k, v = random_qkv(3, torch.float32)
    got = triton.forward_decode(q, k, v, layer, view, save_kv_cache=False)
    torch_.init_forward_metadata(batch)
    assert_same(got, torch_.forward_decode(q, k, v, layer, batch, save_kv_cache=False), torch.float32)


@pytest.mark.parametrize("scales", [(None, None), (0.07, 3.0)], ids=["unscaled", "scaled"])
@pytest.mark.parametrize("mode", [ForwardMode.EXTEND, ForwardMode.DECODE], ids=["extend", "decode"])
def test_a_narrow_pool_is_read_as_compression_reads_it(scales, mode):
    """Both read `kv_scales` times what is stored; a decoding token's own KV has gone through the pool.

    float16 stands for all narrow pools: SGLang's kernels treat them alike, and the interpreter computes
    products of no narrower numbers (nor of bfloat16).
    """
    runner = model_runner(1, torch.float32, torch.float16)
    backend = GrkvTritonAttnBackend(runner)
    layer = RadixAttention(HEADS, HEAD_DIM, HEAD_DIM**-0.5, KV_HEADS, 0)
    for side, scale in zip("kv", scales, strict=True):
        if scale is not None:
            setattr(layer, f"{side}_scale", torch.tensor(scale))
            setattr(layer, f"{side}_scale_float", scale)
    known = kv_scales(layer, TRITON_ATTENTION)
    assert known == tuple(scale or 1.0 for scale in scales)
    for buffer in runner.token_to_kv_pool.get_kv_buffer(0):
        buffer.fill_(torch.nan)
    world = World(runner, 3)
    torch.manual_seed(3)
    requests = world.requests(3, new=1 if mode == ForwardMode.DECODE else None)
    table = runner.req_to_token_pool.req_to_token
    for request in requests:
        slots = KVWriteLoc(table[request.row, request.gap : request.prefix].long())
        kv = torch.randn(2, len(slots.loc), KV_HEADS, HEAD_DIM)
        runner.token_to_kv_pool.set_kv_buffer(layer, slots, *kv, layer.k_scale, layer.v_scale)
    batch = world.batch(requests, mode)
    q, k, v = random_qkv(sum(r.new for r in requests), torch.float32)
    backend.init_forward_metadata(batch)
    forward = backend.forward_decode if mode == ForwardMode.DECODE else backend.forward_extend
    got = forward(q.clone(), k.clone(), v.clone(), layer, batch).view(-1, HEADS, HEAD_DIM)
    start = 0
    for request in requests:
        new = slice(start, start + request.new)
        slots = table[request.row, request.gap : request.seq_len]
        keys, values = (
            Storage(buffer.dtype, scale).load(read_slots(buffer, slots)).double()
            for buffer, scale in zip(runner.token_to_kv_pool.get_kv_buffer(0), known, strict=True)
        )
        if mode == ForwardMode.EXTEND:  # reads the new tokens' KV from the batch
            keys[-request.new :], values[-request.new :] = k[new].double(), v[new].double()
        want = reference(q[new].view(-1, HEADS, HEAD_DIM), keys, values, layer.scaling)
        # The kernels round queries and weights to the pool's dtype.
        bound = TOLERANCE[torch.float16] * known.value
        torch.testing.assert_close(got[new].double(), want, atol=bound, rtol=bound)
        start += request.new


def test_decode_from_what_a_graph_captured():
    """The kernels read the metadata of the capture; each replay has other rows, gaps and lengths in it."""
    triton, torch_, world, layer = make(1, torch.float32, 7)
    # A padded lane reads the dummy slot, whose contents are finite in a server.
    for buffer in world.runner.token_to_kv_pool.get_kv_buffer(0):
        buffer[0] = 0.0
    triton.init_cuda_graph_state(max_bs=3, max_num_tokens=3)
    graph = GraphBuffers(3)
    triton.init_forward_metadata_out_graph(graph.captured(world.runner), in_capture=True)
    captured = triton.forward_metadata
    for live in (2, 3):
        torch.manual_seed(live)
        requests = world.requests(live, new=1)
        fill(world, requests, prefix_only=False)
        batch = world.batch(requests, ForwardMode.DECODE)
        view = graph.replayed(batch)
        triton.init_forward_metadata_out_graph(view)
        assert triton.forward_metadata is captured
        q, k, v = random_qkv(3, torch.float32)
        got = triton.forward_decode(q, k, v, layer, view, save_kv_cache=False)
        torch_.init_forward_metadata(batch)
        want = torch_.forward_decode(q[:live], k, v, layer, batch, save_kv_cache=False)
        assert_same(got[:live], want, torch.float32)
