"""Every kernel compiles for a Hopper GPU, also where there is none."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

KERNELS = {
    *("_add_norm", "_adjust", "_argmax", "_combine", "_decode", "_draw", "_embed", "_fixed_gemm", "_gemv", "_gemv_blocks"),
    *(
        "_grouped_gemm",
        "_grouped_gemm_fp8",
        "_grouped_gemm_mxfp4",
        "_judge",
        "_pick_from_all",
        "_place",
        "_pool_rows",
        "_prefill",
        "_quantise_rows",
    ),
    *(
        "_rope_store",
        "_route",
        "_route_row",
        "_row_scales",
        "_gated_mul",
        "_norm_head_rows",
        "_add_gated",
        "_skinny_gemm",
        "_tally",
        "_write_logprobs",
        "_unpack",
        "collect",
        "pick",
    ),
}


@pytest.mark.slow  # three minutes
def test_all_kernels_compile_for_hopper(tmp_path):
    pytest.importorskip("triton", reason="Triton has no wheel for this machine, or is not installed")
    if platform.machine() != "x86_64":
        pytest.skip("Triton's assembler for NVIDIA GPUs is tried on x86_64 only")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    script = Path(__file__).with_name("compile_for_hopper.py")
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line.split() for line in done.stdout.splitlines()]
    assert {name for name, *_ in lines} == KERNELS
    # An H200 has 227 KiB of shared memory for a program.
    assert all(int(size) > 0 and int(shared) <= 227 * 1024 for _, size, shared, _ in lines)
    # With 17 KB for each, its threads take 13 GiB of the GPU.
    assert [line for line in lines if int(line[-1]) > 8192] == []
