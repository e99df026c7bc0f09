"""The guarantees of the package about imports."""

import subprocess
import sys


def test_corpora_and_orders_need_no_torch():
    program = (
        "import sys, megatron.data, megatron.data.data_utils, megatron.data.data_samplers; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0
