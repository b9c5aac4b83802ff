"""Broken inputs of every kind end in success, or in one line and exit 2 with nothing written; never in a crash or a hang.

A sample runs with the other tests; `python -m pytest tests/test_field_mutations.py --all-mutations` tries 1,200.
"""

import json
import subprocess
import sys

from conftest import REPOSITORY


KINDS = ["config", "safetensors", "gguf", "graft recipe", "rows", "sft recipe"]
# Seeds of inputs that once ended in a crash are among the first
SAMPLE, ALL = 7, 200


def test_no_broken_input_ends_in_a_crash(tmp_path, request):
    count = ALL if request.config.getoption("--all-mutations") else SAMPLE
    words = [sys.executable, REPOSITORY / "tests" / "mutations.py", "0", str(count), tmp_path / "runs", *KINDS]
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, cwd=REPOSITORY)
    ends = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert not [end for end in ends if end[2] is not None]
    assert len(ends) == count * len(KINDS), done.stderr[-2000:]
