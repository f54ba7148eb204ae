"""The FlashInfer modules that ``grkv_flashinfer`` runs on compile for Hopper: minutes each, so outside CI.

``pytest -m slow tests/attention/test_flashinfer_compiles.py``; needs no GPU, but nvcc: the one that SGLang's
CUDA packages bring is found by itself, another one by CUDA_HOME.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import triton

COMPILE = """
import sys
import torch
from flashinfer.jit.attention import gen_batch_decode_module, gen_batch_prefill_module
from flashinfer.jit.cascade import gen_cascade_module
from flashinfer.jit.page import gen_page_module

bf16, head_dim = torch.bfloat16, 128
of_rows = bf16, bf16, bf16, torch.int32, head_dim, head_dim, 0, False, False
spec = {
    "cascade": gen_cascade_module,
    "page": gen_page_module,
    "decode": lambda: gen_batch_decode_module(*of_rows),
    "prefill": lambda: gen_batch_prefill_module("fa2", *of_rows, False),
}[sys.argv[1]]()
spec.build(verbose=False)
spec.load()
print(spec.name)
"""


def toolkit() -> Path | None:
    """The CUDA toolkit: CUDA_HOME, else that of the packages ``nvidia-*-cu13``."""
    given = os.environ.get("CUDA_HOME")
    places = [Path(given)] if given else [Path(sysconfig.get_path("purelib"), "nvidia", "cu13")]
    return next((place for place in places if (place / "bin" / "nvcc").exists()), None)


def linker_libraries(folder: Path, cuda: Path) -> None:
    """What the linker looks for: a stub of the driver, whose library is there only with a GPU, and the
    runtime under the name without a version, which the packages leave out."""
    for runtime in sorted((cuda / "lib").glob("libcudart.so.*"))[:1]:
        (folder / "libcudart.so").symlink_to(runtime)
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    source = folder / "stub.c"
    source.write_text("int grkv_stub;\n")
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-o", str(folder / "libcuda.so"), str(source)], check=True, timeout=60
    )


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("module", ["cascade", "page", "decode", "prefill"])
def test_for_sm_90a(module: str, tmp_path: Path) -> None:
    cuda = toolkit()
    if cuda is None:
        pytest.skip("needs nvcc: install SGLang's CUDA packages or set CUDA_HOME")
    linker_libraries(tmp_path, cuda)
    environment = os.environ | {
        "CUDA_HOME": str(cuda),
        "PATH": os.pathsep.join((str(cuda / "bin"), str(Path(sys.executable).parent), os.environ["PATH"])),
        "FLASHINFER_CUDA_ARCH_LIST": "9.0a",
        "FLASHINFER_WORKSPACE_BASE": str(tmp_path),
        "FLASHINFER_EXTRA_LDFLAGS": f"-L{tmp_path}",
        # The packages' compiler is newer than their headers, which CCCL refuses unless told not to.
        "FLASHINFER_EXTRA_CUDAFLAGS": "-DCCCL_DISABLE_CTK_COMPATIBILITY_CHECK",
        "MAX_JOBS": "2",
    }
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, module],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    libraries = list(tmp_path.rglob("*.so"))
    built = [path for path in libraries if path.parent != tmp_path]
    assert len(built) == 1, libraries
    listed = subprocess.run(
        [triton.knobs.nvidia.cuobjdump.path, "--list-elf", str(built[0])],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert "sm_90a" in listed.stdout
