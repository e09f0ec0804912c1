"""The image reader holds under mutated files, as the fuzzer finds them."""

from __future__ import annotations

import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

FUZZER = Path(__file__).parents[1] / "fuzz_images.py"


@pytest.mark.slow
def test_three_seconds_of_mutated_files_give_pictures_or_image_errors(tmp_path: Path) -> None:
    pytest.importorskip("atheris", reason="the fuzzer atheris is not installed")
    # A process inherits the peak of the one that starts it, which may have held large networks by now.
    inherited = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    limits = ["-max_total_time=3", "-timeout=20", f"-rss_limit_mb={inherited + 2048}", "-max_len=4096"]
    command = [sys.executable, str(FUZZER), *limits, f"-artifact_prefix={tmp_path}/", str(tmp_path / "corpus")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)  # noqa: S603
    assert run.returncode == 0, run.stderr[-4000:]
    coverage = [int(each) for each in re.findall(r"cov: (\d+)", run.stderr)]
    # Pillow's and our own branches are counted, and mutation reaches some that the seeds do not.
    assert coverage[-1] > 1000
    assert coverage[-1] > coverage[0]
