"""Drawing makes the files of an image in memory; writing them is all that touches the disk."""

from __future__ import annotations

import errno
import io
import os
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from saliency import Explanation
from saliency.batch import StoppedError
from saliency.batch.drawing import ExplainMapper, ImageResults, draw
from saliency.batch.listing import with_names
from saliency.batch.network import LoadedImage, Network
from saliency.batch.options import NetworkOptions, OutputOptions
from saliency.batch.plan import BatchSlot
from saliency.batch.sources import find_images
from tests.batchwork import Tiny, noise

METHODS = ("grad_cam", "vanilla_gradient")


@pytest.fixture
def explained(tmp_path: Path) -> tuple[LoadedImage, ImageResults]:
    network = Network(NetworkOptions(model=Tiny(), methods=METHODS), Tiny())
    (entry,) = with_names(find_images(noise(tmp_path / "a.png", 0)).entries)
    loaded = network.load(BatchSlot(0, entry, METHODS))
    ((results, _),) = network.explain([loaded])
    return loaded, ImageResults(results)


def mapper(out: Path, **options: Any) -> ExplainMapper:
    return ExplainMapper(options=NetworkOptions(model="tiny"), out=out, output=OutputOptions(**options))


def test_drawing_touches_no_disk_and_writing_writes_its_bytes(
    tmp_path: Path, explained: tuple[LoadedImage, ImageResults]
) -> None:
    drawings = list(draw(OutputOptions(maps=True), *explained))
    contents = [{key: value for key, value in row.items() if isinstance(value, bytes)} for row in drawings]
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]
    assert [row["method"] for row in drawings] == list(METHODS)
    rows = mapper(tmp_path / "out", maps=True).finish(*explained)
    for row, files in zip(rows, contents, strict=True):
        assert set(files) == {"overlay", "thumbnail", "heat", "map"}
        for column, content in files.items():
            assert (tmp_path / "out" / row[column]).read_bytes() == content
            assert row[f"{column}_bytes"] == len(content)
        with Image.open(io.BytesIO(files["overlay"])) as overlay:
            assert overlay.size == (40, 30)


def test_an_error_of_drawing_is_a_row_and_never_stops_the_run(
    tmp_path: Path, explained: tuple[LoadedImage, ImageResults], monkeypatch: pytest.MonkeyPatch
) -> None:
    def exit_(explanation: Explanation, *arguments: object, **options: object) -> None:
        raise (SystemExit("bye") if explanation.method == "grad_cam" else OSError(errno.ENOSPC, "not of the folder"))

    monkeypatch.setattr("saliency.batch.drawing.scale_map", exit_)
    first, second = mapper(tmp_path / "out").finish(*explained)
    assert (first["error"], first["error_kind"]) == ("SystemExit: bye", "SystemExit")
    assert second["error_kind"] == "OSError"
    assert first["thumbnail"] == second["thumbnail"] == "thumbnails/a.jpg"
    assert (first["overlay"], first["seconds"]) == (None, None)


def test_an_error_of_the_disk_stops_the_run_unless_the_name_is_too_long(
    tmp_path: Path, explained: tuple[LoadedImage, ImageResults], monkeypatch: pytest.MonkeyPatch
) -> None:
    code = errno.ENOSPC

    def fail(path: Path, content: bytes) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("saliency.batch.drawing.write_file", fail)
    with pytest.raises(StoppedError, match="free disk space"):
        mapper(tmp_path / "out").finish(*explained)
    code = errno.ENAMETOOLONG
    rows = mapper(tmp_path / "out").finish(*explained)
    assert [(row["method"], row["error_kind"], row["thumbnail"]) for row in rows] == [
        (method, "OSError", None) for method in METHODS
    ]
