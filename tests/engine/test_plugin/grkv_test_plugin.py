"""A second SGLang plugin, for tests only: injects faults into our compressor and records what it saw.

Driven by files in the folder named by TEST_GRKV_DIR. Patches grkv_sglang, never SGLang.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import torch


def register() -> None:
    folder = Path(os.environ["TEST_GRKV_DIR"])
    from grkv_sglang.attention import torch_backend
    from grkv_sglang.cache import compressor

    compress_layer = compressor.compress_layer
    state = {"layer": 0}

    def faulty_compress_layer(*args, **kwargs):
        result = compress_layer(*args, **kwargs)
        state["layer"] += 1
        if state["layer"] == 7 and (folder / "raise").exists():
            (folder / "raise").unlink()
            raise RuntimeError("injected by a test")
        if state["layer"] == 7 and (folder / "nan").exists():
            (folder / "nan").unlink()
            result = dataclasses.replace(result, keys=torch.full_like(result.keys, torch.nan))
        return result

    compressor.compress_layer = faulty_compress_layer

    origin = compressor.Compression.origin

    def recording_origin(self, quality):
        """Called when all layers of a span are written."""
        state["layer"] = 0
        if (folder / "dump").exists():
            pool = self._compressor._pool
            layers = range(self._compressor.num_layers)
            torch.save(
                {
                    "token_ids": list(self.source.token_ids),
                    "start_tokens": self.source.start_tokens,
                    "keys": [pool.get_key_buffer(i)[self.new_slots].clone() for i in layers],
                    "values": [pool.get_value_buffer(i)[self.new_slots].clone() for i in layers],
                },
                folder / "span.pt",
            )
            (folder / "dump").unlink()
        return origin(self, quality)

    setattr(compressor.Compression, "origin", recording_origin)  # noqa: B010

    start = compressor.Compressor.start

    def counting_start(self, *args, **kwargs):
        state["layer"] = 0
        return start(self, *args, **kwargs)

    setattr(compressor.Compressor, "start", counting_start)  # noqa: B010

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

    probe = compressor._ProbeBackend.forward

    def comparing_probe(self, q, k, v, layer, forward_batch, save_kv_cache=True):
        if (folder / "queries").exists():
            rows = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
            positions = forward_batch.positions.tolist()
            known = torch.stack([prefill[layer.layer_id][p] for p in positions])
            entry = {
                "layer": layer.layer_id,
                "queries": len(positions),
                "max_abs_difference": float((rows - known).abs().max()),
                "max_abs": float(known.abs().max()),
            }
            with (folder / "queries.jsonl").open("a") as out:
                out.write(json.dumps(entry) + "\n")
        return probe(self, q, k, v, layer, forward_batch, save_kv_cache)

    setattr(compressor._ProbeBackend, "forward", comparing_probe)  # noqa: B010
