"""The promises of `saliency report` that need no browser: what is written, from which manifests, and how safely."""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import math
import re
import zlib
from argparse import Namespace
from collections.abc import Iterable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from saliency.batch import BatchError
from saliency.batch import report as page_of
from saliency.batch.report import report
from saliency.batch.store import make_row, manifest_csv
from saliency.cli import main
from saliency.cli.batch_commands import report as report_command
from saliency.cli.console import Screen
from saliency.errors import SaliencyWarning
from saliency.evaluation.comparison import Comparison, MetricResult
from saliency.render.scaling import color_table

Row = dict[str, Any]

EMPTY: Row = make_row()
ABOUT: Row = {
    "format": "saliency batch 5",
    "folder": "/home/anna",
    "versions": {"saliency": "0.1.0", "torch": "2.15.0", "torchvision": "0.30.0", "python": "3.11"},
    "model": {"name": "efficientnet_lite0", "weights": "default"},
    "command": ["saliency", "batch", "photos", "--out", "out"],
    "fingerprint": {"opacity": "map"},
    "batch_sizes": [[0, 8]],
    "counts": {},
    "finished": True,
    "methods": ["grad_cam"],
    "created": "2026-11-20T12:00:00Z",
}
NOTHING: Row = {"heat": None, "overlay": None, "limit": None}  # of a method that failed on a good photo
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&amp;\u2028\u202e${alert(3)}{{data}}"


def row(index: int, method: str | None = "grad_cam", **more: Any) -> Row:
    """A row of the manifest as a run writes it."""
    name = f"photo-{index}"
    photo = {"index": index, "source": f"photos/{name}.jpg", "id": name, "width": 1000, "height": 750}
    seen = {"input_width": 224, "input_height": 224, "box": [125.0, 0.0, 875.0, 750.0], "layer": "conv_head"}
    said = {"target": 282, "name": "tiger cat", "probability": 0.39, "score": 7.1}
    drawn = {"sign": "positive", "units": "score", "limit": 3.2, "colormap": "inferno", "seconds": 0.07}
    files = {
        "thumbnail": f"thumbnails/{name}.jpg",
        "heat": f"heat/{name}.{method}.webp",
        "overlay": f"overlays/{name}.{method}.png",
    }
    return {**EMPTY, **photo, "method": method, "settings": {}, **seen, **said, **drawn, **files, **more}


def failed(index: int, method: str | None = None, **more: Any) -> Row:
    """The row of a photo of which nothing is known but the error."""
    source = {"index": index, "source": f"photos/bad-{index}.jpg", "id": f"bad-{index}", "method": method}
    return {**EMPTY, **source, "error": "the file is empty", "error_kind": "ImageError", **more}


def folder(out: Path, rows: Iterable[Row], pictures: bool = False, **about: Any) -> Path:
    """A folder as `saliency batch` leaves it; its pictures, where they are asked for, are 40 x 30."""
    out.mkdir(exist_ok=True)
    rows = list(rows)
    (out / "manifest.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    methods = [each for each in dict.fromkeys(each["method"] for each in rows) if each]
    (out / "manifest.json").write_text(json.dumps({**ABOUT, "methods": methods, **about}))
    for path in {each[kind] for each in rows for kind in ("thumbnail", "heat", "overlay") if pictures and each[kind]}:
        (out / path).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB" if path.endswith("jpg") else "RGBA", (40, 30), "#bb3754").save(out / path)
    return out


class Elements(HTMLParser):
    """What stands in a page: elements with their attributes, and the text of scripts and styles."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.raw: list[str] = []
        self._inside = False
        self.feed(page.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self._inside = tag in ("script", "style")
        if self._inside:
            self.raw.append("")

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.raw[-1] += data

    def handle_endtag(self, tag: str) -> None:
        self._inside = False

    @property
    def data(self) -> Row:
        """The data of the page; a browser's parser is as strict as this one."""
        return strict(self.raw[1])


def strict(text: str) -> Row:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    parsed: Row = json.loads(text, parse_constant=refuse)
    return parsed


def unzipped(text: str) -> Any:
    return json.loads(zlib.decompress(base64.b64decode(text)))


def unpacked(data: Row) -> list[Row]:
    """Photos with their rows as dictionaries by the keys of the manifest, as the page's script reads them."""
    photos: list[Row] = unzipped(data["images"])
    for photo in photos:
        photo |= {key: photo.get(key) for key in page_of._ENTRY}
        for each in photo["rows"]:
            each |= {key: each.get(key) for key in page_of._ROW}
            each["bar"] = data["head"]["bars"].get(each["bar"])
    return photos


def test_the_page_holds_every_row_of_the_manifest(tmp_path: Path) -> None:
    odd = "a/ü 'q'.jpg"
    rows = [
        row(0),
        row(0, "guided_backprop", sign="signed", colormap="RdBu_r", layer=None, settings={"smooth": "leave"}),
        row(0, "lrp", coverage="3 conv by z+", residual=0.5, ledger={"input": 8.5, "biases": -1.4}),
        row(1, source=odd, name="tabby", target=281, probability=1.0),
        {**row(1, "guided_backprop", source=odd), **NOTHING, "error": "12 values are NaN", "error_kind": "NaN"},
        failed(2),
        failed(4, "grad_cam"),
        failed(4, "guided_backprop"),
    ]
    data = Elements(report(folder(tmp_path / "out", rows))).data
    methods = ["grad_cam", "guided_backprop", "lrp"]
    assert data["head"]["methods"] == methods
    assert (data["head"]["images"], data["head"]["failed"]) == (4, 3)
    photos = unpacked(data)
    assert [photo["index"] for photo in photos] == [0, 1, 2, 4]
    found = [(photo, each) for photo in photos for each in photo["rows"]]
    for (photo, each), wanted in zip(found, rows, strict=True):
        assert (methods[each["method"]] if each["method"] >= 0 else None) == wanted["method"]
        shown = ("target", "name", "probability", "score", "layer", "settings", "sign", "units", "limit")
        for key in (*shown, "coverage", "residual", "ledger", "error", "error_kind"):
            assert each[key] == wanted[key], key
        for key in ("source", "width", "height", "input_width", "input_height", "box"):
            assert photo[key] == wanted[key], key
        for entry, key in ((photo, "thumbnail"), (each, "heat"), (each, "overlay")):
            assert entry[key] == (None if wanted[key] is None else f"./{wanted[key]}")


def test_numbers_of_the_head_that_json_does_not_have_are_left_out(tmp_path: Path) -> None:
    page = report(folder(tmp_path / "out", [row(0)], fingerprint={"opacity": math.nan}, versions={"torch": math.inf}))
    assert Elements(page).data["head"]["versions"] == {"torch": None}


def test_the_page_holds_the_comparison_without_numbers_that_json_does_not_have(tmp_path: Path) -> None:
    out = folder(tmp_path / "out", [row(0)])
    assert unzipped(Elements(report(out)).data["comparison"]) is None
    result = MetricResult("photo-0", "grad_cam", "gini", 1 / 3, {"random": math.nan}, True, 0.5)
    Comparison([result]).save(out / "evaluation.json")
    (read,) = unzipped(Elements(report(out)).data["comparison"])["results"]
    assert (read["value"], read["controls"]) == (0.333333, {"random": None})


@pytest.mark.parametrize(
    "content", ["", '{"rows": [{"name": "grad', "[]", '{"rows": 3}', "[" * 100_000, '{"notes": []}']
)
def test_a_damaged_comparison_is_left_out_with_a_warning(tmp_path: Path, content: str) -> None:
    out = folder(tmp_path / "out", [row(0)])
    (out / "evaluation.json").write_text(content)
    with pytest.warns(SaliencyWarning, match=r"evaluation\.json is damaged, so the page has no comparison"):
        data = Elements(report(out)).data
    assert unzipped(data["comparison"]) is None
    assert len(unpacked(data)) == 1


def test_sizes_come_from_whichever_row_knows_them(tmp_path: Path) -> None:
    rows = [failed(0, "grad_cam"), row(0, "layer_cam")]
    photo = unpacked(Elements(report(folder(tmp_path / "out", rows))).data)[0]
    assert (photo["width"], photo["height"], photo["thumbnail"]) == (1000, 750, "./thumbnails/photo-0.jpg")


def test_the_page_is_one_file_that_names_nothing_outside(tmp_path: Path) -> None:
    out = folder(tmp_path / "out", [row(0)])
    page = report(out)
    assert page == out / "index.html"
    assert sorted(each.name for each in out.iterdir()) == ["index.html", "manifest.json", "manifest.jsonl"]
    for tag, attributes in Elements(page).found:
        for name in ("src", "href", "srcset", "action"):
            address = attributes.get(name) or ""
            assert not address or address.startswith(("#", "data:")), (tag, address)
    assert not re.search(r"url\(|@import|\bfetch\(|XMLHttpRequest|\bimport\b.*from", page.read_text("utf-8"))


def test_the_same_manifest_gives_the_same_bytes_whenever_and_however_fast_it_was_made(tmp_path: Path) -> None:
    first = report(folder(tmp_path / "a", [row(0), row(0, "layer_cam")])).read_bytes()
    again = [row(0, seconds=9.0), row(0, "layer_cam", seconds=None)]
    assert report(folder(tmp_path / "b", again, created="2027-01-01T00:00:00Z")).read_bytes() == first
    assert report(tmp_path / "b").read_bytes() == first


def test_the_policy_allows_this_script_and_this_style_alone(tmp_path: Path) -> None:
    page = Elements(report(folder(tmp_path / "out", [row(0)])))
    policy = next(each["content"] for tag, each in page.found if tag == "meta" and "http-equiv" in each)
    style, _, script = page.raw
    for text, kind in ((style, "style-src"), (script, "script-src")):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind} 'sha256-{digest}';" in (policy or "")
    assert "default-src 'none'" in (policy or "")
    assert "unsafe" not in (policy or "")


def test_the_script_makes_no_html_out_of_text(tmp_path: Path) -> None:
    script = Elements(report(folder(tmp_path / "out", [row(0)]))).raw[2]
    for word in (
        "innerHTML",
        "outerHTML",
        "insertAdjacent",
        "document.write",
        "eval(",
        "Function(",
        "DOMParser",
        "srcdoc",
    ):
        assert word not in script


def test_no_text_of_a_file_becomes_part_of_the_page(tmp_path: Path) -> None:
    plain = Elements(report(folder(tmp_path / "plain", [row(0)])))
    texts = dict.fromkeys(
        ("source", "id", "name", "layer", "units", "error", "error_kind", "colormap", "sign"), HOSTILE
    )
    paths = {kind: f"{kind}/{HOSTILE}.png" for kind in ("thumbnail", "heat", "overlay")}
    rows = [row(0, HOSTILE, settings={HOSTILE: HOSTILE}, **texts, **paths)]
    model = {"name": HOSTILE, "weights": HOSTILE}
    head: Row = {
        "model": model,
        "command": [HOSTILE],
        "versions": {HOSTILE: HOSTILE},
        "title": HOSTILE,
        "created": HOSTILE,
    }
    with pytest.raises(BatchError, match="is damaged"):
        report(folder(tmp_path / "out", rows, **head))
    page = report(folder(tmp_path / "out", rows, **head, methods=["grad_cam"]))
    hostile = Elements(page)
    assert [tag for tag, _ in hostile.found] == [tag for tag, _ in plain.found]
    assert (hostile.raw[0], hostile.raw[2]) == (plain.raw[0], plain.raw[2])
    assert "\u2028" not in page.read_text("utf-8").partition('id="data"')[2]
    assert hostile.data["head"]["model"] == HOSTILE
    assert unpacked(hostile.data)[0]["rows"][0]["settings"] == {HOSTILE: HOSTILE}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(JSON)
@pytest.mark.slow
def test_data_is_json_that_cannot_leave_its_element(value: object) -> None:
    text = page_of.dumped(value)
    assert json.loads(text) == value
    assert not set(text) & set("<>&\u2028\u2029")
    text.encode()


def test_half_a_surrogate_pair_is_no_obstacle(tmp_path: Path) -> None:
    out = folder(
        tmp_path / "out", [row(0, source="photos/\udcff.jpg", thumbnail="thumbnails/\udcff.jpg", name="\ud800")]
    )
    photo = unpacked(
        Elements(
            report(
                out,
            )
        ).data
    )[0]
    assert photo["source"] == "photos/\udcff.jpg"
    assert photo["thumbnail"] == "./thumbnails/%ED%B3%BF.jpg"


@pytest.mark.parametrize(
    ("path", "address"),
    [
        ("heat/a b#c?d%41.webp", "./heat/a%20b%23c%3Fd%2541.webp"),
        ("heat/Zoë 猫.webp", "./heat/Zo%C3%AB%20%E7%8C%AB.webp"),
        ('heat/"><script>.webp', "./heat/%22%3E%3Cscript%3E.webp"),
        ("https://example.org/x.png", "./https%3A//example.org/x.png"),
        ("javascript:alert(1)", "./javascript%3Aalert%281%29"),
        ("a\\..\\b", "./a%5C..%5Cb"),
        ("../secret.png", None),
        ("heat/../../secret.png", None),
        ("/etc/secret.png", None),
        ("//example.org/x.png", None),
    ],
)
def test_addresses_are_encoded_and_stay_in_the_folder(path: str, address: str | None) -> None:
    assert page_of.address(path) == address


def test_the_page_of_an_interrupted_run_has_what_is_whole(tmp_path: Path) -> None:
    out = folder(tmp_path / "out", [row(0), row(1)])
    whole = (out / "manifest.jsonl").read_bytes()
    (out / "manifest.jsonl").write_bytes(whole + json.dumps(row(2)).encode()[:50])
    assert len(unpacked(Elements(report(out)).data)) == 2
    (out / "manifest.jsonl").unlink()
    assert Elements(report(out)).data["head"]["images"] == 0


def test_the_page_of_a_run_in_progress_lists_each_image_once(tmp_path: Path) -> None:
    # A retry has appended image 0, and a second method has begun.
    rows = [row(1), row(0), row(0, "lrp")]
    page = report(folder(tmp_path / "out", rows, methods=["grad_cam", "lrp"]))
    finished = report(folder(tmp_path / "sorted", [row(0), row(0, "lrp"), row(1)], methods=["grad_cam", "lrp"]))
    assert Elements(page).data["head"]["images"] == 2
    assert page.read_bytes() == finished.read_bytes()


def test_what_is_no_batch_folder_is_said(tmp_path: Path) -> None:
    with pytest.raises(BatchError, match=r"no manifest\.json in .*the folder that saliency batch"):
        report(tmp_path)
    out = folder(tmp_path / "out", [row(0)], format="saliency batch 9")
    for text in ((out / "manifest.json").read_bytes(), b"[]", b"null", b"{", b"\xff"):
        (out / "manifest.json").write_bytes(text)
        with pytest.raises(BatchError, match="is damaged, or from another version"):
            report(out)
    assert not (out / "index.html").exists()


@pytest.mark.parametrize("line", [b"nonsense", b"[]", b"{}", b"\xff"])
def test_a_damaged_line_is_an_error(line: bytes, tmp_path: Path) -> None:
    out = folder(tmp_path / "out", [row(0), row(1)])
    first, second = (out / "manifest.jsonl").read_bytes().splitlines(keepends=True)
    (out / "manifest.jsonl").write_bytes(first + line + b"\n" + second)
    with pytest.raises(BatchError, match=f"is damaged after byte {len(first)}"):
        report(out)


def test_an_error_leaves_the_page_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = folder(tmp_path / "out", [row(0)])
    before = report(out).read_bytes()

    def fail(*anything: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("saliency.batch.report._page", fail)
    with pytest.raises(OSError, match="No space left"):
        report(out)
    assert (out / "index.html").read_bytes() == before
    assert sorted(each.name for each in out.iterdir()) == ["index.html", "manifest.json", "manifest.jsonl"]


@pytest.mark.slow
def test_ten_thousand_photos_are_a_page_of_a_few_megabytes(tmp_path: Path) -> None:
    methods = ("grad_cam", "layer_cam", "guided_backprop", "smooth_grad")
    rows = [row(index, method, score=index / 7) for index in range(10_000) for method in methods]
    page = report(folder(tmp_path / "out", rows))
    assert page.stat().st_size < 4_000_000
    assert [photo["index"] for photo in unpacked(Elements(page).data)] == list(range(10_000))


def test_the_bar_has_the_colours_of_the_overlay(tmp_path: Path) -> None:
    rows = [
        row(0, colormap="viridis"),
        row(1),
        row(2, colormap="RdBu_r", sign="signed"),
        row(3, colormap="x"),
    ]
    bars = [each["rows"][0]["bar"] for each in unpacked(Elements(report(folder(tmp_path / "out", rows))).data)]

    def ends(name: str, *, centred: bool = False) -> list[str]:
        entries = color_table(name, centred)
        return ["#{:02x}{:02x}{:02x}".format(*map(int, entries[at])) for at in ((1, 128, 255) if centred else (0, 255))]

    assert [bars[0][0], bars[0][-1]] == ends("viridis")
    assert [bars[1][0], bars[1][-1]] == ends("inferno")
    assert [bars[2][0], bars[2][127], bars[2][254]] == ends("RdBu_r", centred=True)
    assert bars[3] is None


def test_the_command_says_where_the_page_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = folder(tmp_path / "out", [row(0)])
    assert report_command(Namespace(folder=out, csv=False, title=None, fiftyone=None), Screen()) == 0
    assert capsys.readouterr().out == f"written: {out / 'index.html'}\n"
    assert main(["report", str(out), "-q"]) == 0
    assert capsys.readouterr().out == ""


def test_the_command_writes_the_rows_as_csv_and_keeps_a_title(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn = [row(0, source='a "b", c.jpg', name="café", trust={"gini": 1}), failed(1)]
    out = folder(tmp_path / "out", drawn)
    assert main(["report", str(out), "--csv", "--title", "Scans of <May>"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"written: {out / 'manifest.csv'}"
    with (out / "manifest.csv").open(newline="", encoding="utf-8") as file:
        read = list(csv.DictReader(file))
    assert list(read[0]) == list(EMPTY)
    assert (read[0]["source"], read[0]["name"], read[0]["score"]) == ('a "b", c.jpg', "café", "7.1")
    assert json.loads(read[0]["box"]) == [125.0, 0.0, 875.0, 750.0]
    assert json.loads(read[0]["trust"]) == {"gini": 1}
    assert (read[1]["method"], read[1]["error"]) == ("", "the file is empty")
    page = (out / "index.html").read_bytes()
    assert "<title>Scans of &lt;May&gt;: 2 images</title>" in page.decode()
    report(out)
    assert (out / "index.html").read_bytes() == page


def test_a_link_in_place_of_the_page_or_the_table_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, elsewhere = folder(tmp_path / "out", [row(0)]), tmp_path / "elsewhere"
    elsewhere.write_text("precious")
    for name, words in (("index.html", []), ("manifest.csv", ["--csv"])):
        (out / name).unlink(missing_ok=True)
        (out / name).symlink_to(elsewhere)
        assert main(["report", str(out), *words]) == 2
        assert f"{name} is a link" in capsys.readouterr().err
        (out / name).unlink()
    assert elsewhere.read_text() == "precious"


def test_no_cell_of_the_table_is_a_formula(tmp_path: Path) -> None:
    texts = ["=cmd|' /C calc'!A0", "+1", "-1+1", "@SUM(A1)", "\t=1", "\r=1", "plain", "a=b"]
    out = folder(tmp_path / "out", [row(index, source=text, score=-0.5) for index, text in enumerate(texts)])
    with manifest_csv(out).open(newline="", encoding="utf-8") as file:
        read = list(csv.DictReader(file))
    assert [each["source"] for each in read] == [*(f"'{text}" for text in texts[:6]), *texts[6:]]
    assert {each["score"] for each in read} == {"-0.5"}


def test_the_command_says_why_it_cannot_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = folder(tmp_path / "out", [row(0)])
    (out / "index.html").mkdir()
    assert main(["report", str(out)]) == 2
    assert "Is a directory" in capsys.readouterr().err
