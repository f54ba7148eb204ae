"""grkv_flashinfer: what wrappers are planned with, through SGLang's own updaters, against plain loops."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from sglang.srt.layers.attention.flashinfer_backend import FlashInferAttnBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_exec
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from grkv_sglang.attention import shared
from grkv_sglang.attention.flashinfer_backend import GrkvFlashInferAttnBackend
from grkv_sglang.attention.torch_backend import GrkvTorchAttnBackend
from tests.attention.interpreted import recording
from tests.attention.interpreted.recording import stream
from tests.attention.interpreted.world import (
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    SHARED_SLOTS,
    UNWRITTEN,
    GraphBuffers,
    Request,
    World,
    expected_stream,
    model_runner,
    padded,
)


@pytest.fixture(autouse=True)
def _recording(monkeypatch):
    recording.install(monkeypatch)


def make(page_size, seed=0):
    runner = model_runner(page_size)
    return GrkvFlashInferAttnBackend(runner), World(runner, seed)


def table(world):
    return world.runner.req_to_token_pool.req_to_token


def query_starts(requests):
    starts = [0]
    for request in requests:
        starts.append(starts[-1] + request.new)
    return starts


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("seed", range(6))
def test_eager_decode(page_size, seed):
    backend, world = make(page_size, seed)
    requests = world.requests(1 + seed % 5, new=1)
    backend.init_forward_metadata(world.batch(requests, ForwardMode.DECODE))
    (wrapper,) = backend.forward_metadata.decode_wrappers
    (plan,) = wrapper.plans
    assert stream(plan) == expected_stream(table(world), requests, prefix_only=False)
    assert plan["pages"] == [1] * len(requests)


@pytest.mark.parametrize(
    ("page_size", "dtype", "tolerance"), [(1, torch.float32, 1e-5), (16, torch.float16, 3e-3)]
)
def test_requests_behind_the_same_slots_decode_together(monkeypatch, page_size, dtype, tolerance):
    """Plans leave out what is read together; outputs are those of requests one by one."""
    monkeypatch.setitem(shared.LEAST_SAVED_SLOTS, "cpu", 20)
    runner = model_runner(page_size, dtype)
    backend, one_by_one, world = (
        GrkvFlashInferAttnBackend(runner),
        GrkvTorchAttnBackend(runner),
        World(runner, 2),
    )
    torch.manual_seed(2)
    for buffer in runner.token_to_kv_pool.get_kv_buffer(0):
        buffer.normal_()
        buffer[0] = torch.nan
    requests = world.sharing_requests()
    batch = world.batch(requests, ForwardMode.DECODE)
    backend.init_forward_metadata(batch)
    (wrapper,) = backend.forward_metadata.decode_wrappers
    rest = [replace(r, gap=r.gap + count) for r, count in zip(requests, SHARED_SLOTS, strict=True)]
    assert stream(wrapper.plans[-1]) == expected_stream(table(world), rest, prefix_only=False)

    layer = RadixAttention(HEADS, HEAD_DIM, HEAD_DIM**-0.5, KV_HEADS, 0)
    q = torch.randn(len(requests), HEADS * HEAD_DIM).to(dtype)
    k, v = torch.randn(2, len(requests), KV_HEADS, HEAD_DIM).to(dtype)
    got = backend.forward_decode(q, k, v, layer, batch)
    assert backend.forward_metadata.decode_wrappers == [wrapper]
    monkeypatch.setitem(shared.LEAST_SAVED_SLOTS, "cpu", 10**9)
    one_by_one.init_forward_metadata(batch)
    want = one_by_one.forward_decode(q, k, v, layer, batch)
    torch.testing.assert_close(got, want.view_as(got), atol=tolerance, rtol=tolerance)

    # One of them, and a batch in which nothing is shared.
    alone = world.batch(requests[:1], ForwardMode.DECODE)
    backend.init_forward_metadata(alone)
    assert stream(wrapper.plans[-1]) == expected_stream(table(world), requests[:1], prefix_only=False)
    got = backend.forward_decode(q[:1], k[:1], v[:1], layer, alone)
    torch.testing.assert_close(got, want[:1].view_as(got), atol=tolerance, rtol=tolerance)


def test_a_graph_reads_rows_as_they_are(monkeypatch):
    """After an eager batch that reads together, too large for the graphs."""
    monkeypatch.setitem(shared.LEAST_SAVED_SLOTS, "cpu", 20)
    backend, world = make(1)
    backend.init_cuda_graph_state(max_bs=3, max_num_tokens=3)
    graph = GraphBuffers(3)
    backend.init_forward_metadata_out_graph(graph.captured(world.runner), in_capture=True)
    (wrapper,) = backend.forward_metadata.decode_wrappers
    requests = world.sharing_requests()
    backend.init_forward_metadata(world.batch(requests, ForwardMode.DECODE))
    assert backend.shared.num_slots.tolist() == backend.shared.num_slots_cpu.tolist() == SHARED_SLOTS
    batch = world.batch(requests[:3], ForwardMode.DECODE)
    backend.init_forward_metadata_out_graph(graph.replayed(batch))
    want = expected_stream(table(world), requests[:3], prefix_only=False)
    assert stream(wrapper.plans[-1]) == want
    assert wrapper.plans[-1]["host_indptr"] == want[0]


@pytest.mark.parametrize("paged_only", [False, True])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("seed", range(6))
def test_extend(page_size, seed, paged_only):
    backend, world = make(page_size, seed)
    backend.use_paged = paged_only  # SGLANG_FLASHINFER_USE_PAGED
    requests = world.requests(1 + seed % 5)
    backend.init_forward_metadata(world.batch(requests, ForwardMode.EXTEND))
    metadata = backend.forward_metadata
    assert metadata.use_ragged is not paged_only
    (plan,) = metadata.prefill_wrappers[0].plans
    assert stream(plan) == expected_stream(table(world), requests, prefix_only=not paged_only)
    assert plan["queries"] == query_starts(requests)
    want = [] if paged_only else [{"queries": query_starts(requests), "keys": query_starts(requests)}]
    assert backend.prefill_wrapper_ragged.plans == want


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_graph_is_captured_once_and_planned_for_each_replay(page_size):
    backend, world = make(page_size)
    backend.init_cuda_graph_state(max_bs=4, max_num_tokens=4)
    graph = GraphBuffers(4)
    backend.init_forward_metadata_out_graph(graph.captured(world.runner), in_capture=True)
    (wrapper,) = backend.forward_metadata.decode_wrappers
    (plan,) = wrapper.plans
    assert stream(plan) == ([0, 1, 2, 3, 4], [0, 0, 0, 0])
    seen = set()
    for live in (4, 1, 3, 2, 4):
        requests = world.requests(live, new=1)
        backend.init_forward_metadata_out_graph(graph.replayed(world.batch(requests, ForwardMode.DECODE)))
        plan = wrapper.plans[-1]
        want = expected_stream(table(world), padded(requests, 4), prefix_only=False)
        assert stream(plan) == want
        assert plan["host_indptr"] == want[0]
        # The captured kernels read these buffers, not what the plan was called with.
        assert wrapper.buffers["paged_kv_indptr_buffer"].tolist() == want[0]
        assert wrapper.buffers["paged_kv_indices_buffer"][: want[0][-1]].tolist() == want[1]
        seen.add(tuple(want[0]))
    assert len(wrapper.plans) == 6
    assert len(seen) == 5


def test_a_gap_that_changes_between_replays_of_the_same_row():
    backend, world = make(1)
    backend.init_cuda_graph_state(max_bs=2, max_num_tokens=2)
    graph = GraphBuffers(2)
    backend.init_forward_metadata_out_graph(graph.captured(world.runner), in_capture=True)
    (wrapper,) = backend.forward_metadata.decode_wrappers
    (request,) = world.requests(1, new=1)
    row = table(world)[request.row, : request.seq_len].tolist()
    for gap in (0, request.prefix // 2, request.prefix, 0):
        backend.row_gaps.set(request.row, gap)
        backend.init_forward_metadata_out_graph(graph.replayed(world.batch([request], ForwardMode.DECODE)))
        n = request.seq_len - gap
        assert stream(wrapper.plans[-1]) == ([0, n, n + 1], [*row[gap:], 0])
        assert wrapper.plans[-1]["host_indptr"] == [0, n, n + 1]


def test_a_batch_without_gaps_on_the_host_is_planned_from_the_device():
    backend, world = make(1)
    backend.init_cuda_graph_state(max_bs=2, max_num_tokens=2)
    graph = GraphBuffers(2)
    backend.init_forward_metadata_out_graph(graph.captured(world.runner), in_capture=True)
    (wrapper,) = backend.forward_metadata.decode_wrappers
    requests = world.requests(2, new=1)
    batch = world.batch(requests, ForwardMode.DECODE, noted=False)
    backend.init_forward_metadata_out_graph(graph.replayed(batch))
    assert wrapper.plans[-1]["host_indptr"] is None
    assert stream(wrapper.plans[-1]) == expected_stream(table(world), requests, prefix_only=False)


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_prefill_graph(monkeypatch, page_size):
    """Request slots beyond the batch's are empty requests of row 0."""
    monkeypatch.setattr(FlashInferAttnBackend, "_full_cg_prefill_workspace_bytes", lambda *a, **k: 16)
    backend, world = make(page_size)
    empty = Request(row=0, gap=0, prefix=0, new=0)
    world.runner.req_to_token_pool.req_to_token[0] = UNWRITTEN  # nothing of it may be read
    capture = world.batch([empty] * 4, ForwardMode.EXTEND, noted=False)
    backend.init_forward_metadata_out_graph(capture, in_capture=True)
    (wrapper,) = backend.forward_metadata.prefill_wrappers
    for live in (3, 4, 1):
        requests = world.requests(live)
        lanes = [*requests, *[empty] * (4 - live)]
        backend.init_forward_metadata_out_graph(world.batch(lanes, ForwardMode.EXTEND, noted=False))
        plan = wrapper.plans[-1]
        assert stream(plan) == expected_stream(table(world), lanes, prefix_only=False)
        assert plan["queries"] == query_starts(lanes)
    assert len(wrapper.plans) == 4


def test_a_plan_that_starts_elsewhere_is_refused():
    backend, world = make(1)
    (request,) = world.requests(1, new=1)
    batch = world.batch([request], ForwardMode.DECODE)
    zero = torch.zeros(1, dtype=torch.int64)
    common = (backend.kv_indptr[0], zero, None)
    with pytest.raises(ValueError, match="already starts elsewhere"):
        backend.indices_updater_decode.call_begin_forward(
            None, batch.seq_lens, 1, *common, None, plan=batch.kv_loc_plan,
            req_pool_indices=batch.req_pool_indices,
        )  # fmt: skip
    with pytest.raises(ValueError, match="already starts elsewhere"):
        backend.indices_updater_prefill.call_begin_forward(
            None, None, batch.req_pool_indices, batch.seq_lens, 1, batch.seq_lens, batch.seq_lens, zero,
            backend.kv_indptr[0], backend.qo_indptr[0], False, None, plan=batch.kv_loc_plan,
        )  # fmt: skip
    batch.spec_info = object()
    with pytest.raises(ValueError, match="speculative"):
        backend.init_forward_metadata(batch)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"sliding_window_size": 16}, "sliding-window models, encoder-decoder models"),
        ({"is_encoder_decoder": True}, "sliding-window models, encoder-decoder models"),
        ({"spec_algorithm": SpeculativeAlgorithm.EAGLE}, "speculative decoding"),
    ],
)
def test_what_gaps_do_not_cover_is_refused(changes, what):
    text = f"grkv_flashinfer does not serve {what}; use --attention-backend flashinfer"
    with pytest.raises(ValueError, match=text):
        GrkvFlashInferAttnBackend(model_runner(1, **changes))


@pytest.mark.parametrize(
    ("bag", "field", "what"),
    [
        ("deterministic", "enable_deterministic_inference", "deterministic inference"),
        ("features", "enable_mis", "multi-item scoring"),
    ],
)
def test_modes_that_gaps_do_not_cover_are_refused(bag, field, what):
    runner = model_runner(1)
    with (
        getattr(get_exec(), bag).override(**{field: True}),
        pytest.raises(ValueError, match=f"does not serve {what};"),
    ):
        GrkvFlashInferAttnBackend(runner)


def test_two_backends_of_one_pool_share_its_gaps():
    """Prefill with one, decode with another: both read what the radix cache writes."""
    from grkv_sglang.attention.triton_backend import GrkvTritonAttnBackend

    runner = model_runner(1)
    prefill, decode = GrkvFlashInferAttnBackend(runner), GrkvTritonAttnBackend(runner)
    assert prefill.row_gaps is decode.row_gaps is runner.req_to_token_pool.grkv_row_gaps
