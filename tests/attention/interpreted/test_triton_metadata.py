"""grkv_triton: the slots its kernels are told to read, through SGLang's own methods, against plain loops."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from grkv_sglang.attention.triton_backend import GrkvTritonAttnBackend
from tests.attention.interpreted.world import GraphBuffers, World, expected_stream, model_runner, padded


def make(page_size, seed=0):
    runner = model_runner(page_size)
    backend = GrkvTritonAttnBackend(runner)
    backend.device_core_count = 64  # as on a GPU: splits depend on lengths
    return backend, World(runner, seed)


def stream(metadata):
    indptr = metadata.kv_indptr.tolist()
    return indptr, metadata.kv_indices[: indptr[-1]].tolist()


def stock_splits(backend, requests):
    """What SGLang itself would do with rows of the physical lengths."""
    return splits_of(backend, [r.seq_len - r.gap for r in requests])


def splits_of(backend, lens):
    splits = torch.zeros(len(lens), dtype=torch.int32)
    TritonAttnBackend.get_num_kv_splits(
        backend, splits, torch.tensor(lens), torch.zeros(1, dtype=torch.int32)
    )
    return splits.tolist()


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("seed", range(8))
def test_eager(page_size, seed):
    backend, world = make(page_size, seed)
    table = backend.req_to_token
    requests = world.requests(1 + seed % 5)
    backend.init_forward_metadata(world.batch(requests, ForwardMode.EXTEND))
    metadata = backend.forward_metadata
    assert stream(metadata) == expected_stream(table, requests, prefix_only=True)
    starts = [0]
    for request in requests:
        starts.append(starts[-1] + request.new)
    assert metadata.qo_indptr.tolist() == starts

    requests = world.requests(1 + seed % 4, new=1)
    backend.init_forward_metadata(world.batch(requests, ForwardMode.DECODE))
    metadata = backend.forward_metadata
    assert stream(metadata) == expected_stream(table, requests, prefix_only=False)
    assert metadata.num_kv_splits.tolist() == stock_splits(backend, requests)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("seed", range(6))
def test_columns_that_hold_other_tokens_for_each_head_are_left_out(page_size, seed):
    backend, world = make(page_size, seed)
    table = backend.req_to_token
    for prefix_only, mode in ((True, ForwardMode.EXTEND), (False, ForwardMode.DECODE)):
        requests = world.requests(1 + seed % 5, new=None if prefix_only else 1)
        # All that a prefix has may be such columns; some requests have none.
        regions = [world.regions(r, 1) if i != 1 else () for i, r in enumerate(requests)]
        backend.init_forward_metadata(world.batch(requests, mode))
        want = expected_stream(table, requests, prefix_only=prefix_only, regions=regions)
        assert stream(backend.forward_metadata) == want
        if not prefix_only:
            lens = [end - start for start, end in pairwise(want[0])]
            assert backend.forward_metadata.num_kv_splits.tolist() == splits_of(backend, lens)


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_graph_is_captured_once_and_reads_what_each_replay_says(page_size):
    backend, world = make(page_size)
    backend.init_cuda_graph_state(max_bs=4, max_num_tokens=4)
    graph = GraphBuffers(4)
    backend.init_forward_metadata_out_graph(graph.captured(world.runner), in_capture=True)
    captured = backend.forward_metadata  # what the captured kernels read, for good
    assert stream(captured) == ([0, 1, 2, 3, 4], [0, 0, 0, 0])
    seen = set()
    for live in (4, 1, 3, 2, 4):
        requests = world.requests(live, new=1)
        backend.init_forward_metadata_out_graph(graph.replayed(world.batch(requests, ForwardMode.DECODE)))
        lanes = padded(requests, 4)
        want = expected_stream(backend.req_to_token, lanes, prefix_only=False)
        assert stream(captured) == want
        assert captured.num_kv_splits[:4].tolist() == stock_splits(backend, lanes)
        seen.add(tuple(want[0]))
    assert len(seen) == 5


def test_a_gap_that_changes_between_replays_of_the_same_row():
    backend, world = make(1)
    backend.init_cuda_graph_state(max_bs=2, max_num_tokens=2)
    graph = GraphBuffers(2)
    backend.init_forward_metadata_out_graph(graph.captured(world.runner), in_capture=True)
    (request,) = world.requests(1, new=1)
    row = backend.req_to_token[request.row, : request.seq_len].tolist()
    for gap in (0, request.prefix // 2, request.prefix, 0):
        backend.row_gaps.set(request.row, gap)
        backend.init_forward_metadata_out_graph(graph.replayed(world.batch([request], ForwardMode.DECODE)))
        n = request.seq_len - gap
        assert stream(backend.forward_metadata) == ([0, n, n + 1], [*row[gap:], 0])


def test_splits_follow_what_is_read():
    backend, world = make(1)
    requests = world.requests(2, new=1)
    got = {}
    for gap in (0, requests[0].prefix):
        backend.row_gaps.set(requests[0].row, gap)
        backend.init_forward_metadata(world.batch(requests, ForwardMode.DECODE))
        got[gap] = backend.forward_metadata.num_kv_splits[0].item()
    assert got[0] > got[requests[0].prefix] == 1


def test_a_stale_gap_of_a_row_that_sglang_borrows_gives_no_negative_length():
    backend, world = make(1)
    (request,) = world.requests(1)
    backend.row_gaps.set(request.row, 50)
    rows, lens = torch.tensor([request.row, 0]), torch.tensor([3, 1])
    assert backend._fill_kv_indptr_and_indices(
        None, 2, lens, rows, torch.zeros(8, dtype=torch.int64)
    ).tolist() == [0, 0, 1]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"sliding_window_size": 16}, "sliding-window models"),
        ({"is_encoder_decoder": True}, "encoder-decoder models"),
        ({"spec_algorithm": SpeculativeAlgorithm.EAGLE}, "speculative decoding"),
    ],
)
def test_what_gaps_do_not_cover_is_refused(changes, what):
    with pytest.raises(
        ValueError, match=rf"grkv_triton does not serve {what}; use --attention-backend triton"
    ):
        GrkvTritonAttnBackend(model_runner(1, **changes))


def test_deterministic_inference_is_refused():
    from sglang.srt.runtime_context import get_exec

    runner = model_runner(1)
    with (
        get_exec().deterministic.override(enable_deterministic_inference=True),
        pytest.raises(ValueError, match="deterministic inference"),
    ):
        GrkvTritonAttnBackend(runner)
