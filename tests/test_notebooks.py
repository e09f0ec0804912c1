"""The notebooks are those of their scripts, run as they stand, and show what they showed when they were written."""

from __future__ import annotations

import asyncio
import base64
import io
import re
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import nbformat
import numpy as np
import pytest
from matplotlib.figure import Figure
from nbformat import NotebookNode
from PIL import Image

from notebooks import checks
from notebooks.__main__ import main
from notebooks.pages import HOME, CellError, execute, notebook_of, pages, read, tidy, write
from tests.selection import case

MIB = 2**20
EACH_PAGE = pytest.mark.parametrize("script", pages(), ids=lambda script: script.stem)
# By default, one page runs.
ONE_PAGE = pytest.mark.parametrize(
    "script", [case(page, by_default="first_heatmap" in page.stem, id=page.stem) for page in pages()]
)


def kept(script: Path) -> NotebookNode:
    """The notebook as it stands in the repository."""
    notebook: NotebookNode = nbformat.read(notebook_of(script), as_version=4)
    return notebook


@EACH_PAGE
def test_a_notebook_has_the_cells_of_its_script(script: Path) -> None:
    assert checks.stale(read(script), kept(script)) == [], "run: make notebooks"


@ONE_PAGE
def test_a_notebook_shows_pictures_and_no_errors_warnings_or_paths(script: Path) -> None:
    assert checks.problems(kept(script)) == []


@EACH_PAGE
def test_a_notebook_is_written_as_the_runner_writes_it(script: Path) -> None:
    notebook = kept(script)
    assert tidy(deepcopy(notebook)) == notebook
    nbformat.validate(notebook)


@ONE_PAGE
def test_a_notebook_runs_again_and_shows_the_same(script: Path) -> None:
    fresh = asyncio.run(execute(script))
    assert checks.problems(fresh) == []
    assert checks.differences(fresh, kept(script)) == [], "run: make notebooks"


def test_the_notebooks_are_small_enough_to_be_read_on_the_web() -> None:
    sizes = {script.stem: notebook_of(script).stat().st_size for script in pages()}
    assert all(size < 2 * MIB for size in sizes.values()), sizes
    assert sum(sizes.values()) < 9 * MIB  # fifteen pages


def test_every_page_is_listed_in_the_readme_by_its_title() -> None:
    listed = re.findall(r"^\| \[(.*?)\]\((.*?)\)", (HOME / "README.md").read_text("utf-8"), re.MULTILINE)
    titles = [read(script).cells[0].source.splitlines()[0].removeprefix("# ") for script in pages()]
    assert listed == list(zip(titles, [notebook_of(script).name for script in pages()], strict=True))


# The runner.


def test_pages_are_chosen_by_number_or_by_a_part_of_their_name() -> None:
    assert pages(["first_heat"]) == pages(["03"]) == [HOME / "03_first_heatmap.py"]
    assert len(pages()) >= 4
    with pytest.raises(LookupError, match=r'no page "99"; there are .*03_first_heatmap'):
        pages(["99"])


def test_a_page_that_is_not_there_is_an_error_of_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["no_such_page"])
    assert 'no page "no_such_page"' in capsys.readouterr().err


def script_of(folder: Path, *cells: str) -> Path:
    path = folder / "00_page.py"
    path.write_text("\n\n".join(f"# %%\n{cell}" for cell in cells))
    return path


@pytest.mark.slow
def test_a_failing_cell_is_named_with_its_error(tmp_path: Path) -> None:
    script = script_of(tmp_path, "x = 1", "# divide\nx / 0", "x")
    with pytest.raises(CellError, match=r"(?s)00_page, cell 2 \(# divide\):.*ZeroDivisionError: division by zero"):
        asyncio.run(execute(script))


@pytest.mark.slow
def test_an_end_of_the_kernel_is_told_with_its_cell(tmp_path: Path) -> None:
    script = script_of(tmp_path, "x = 1", "import os; os._exit(1)")
    with pytest.raises(CellError, match=r"(?s)00_page, cell 2 .*died"):
        asyncio.run(execute(script))


@pytest.mark.slow
def test_two_runs_of_a_page_are_the_same_file_and_know_nothing_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "of the user"))
    script = script_of(
        tmp_path,
        "# %matplotlib inline\nimport matplotlib.pyplot as plt\nplt.plot([1, 2]);",
        "for n in range(3): print(n, flush=True)",
        "import warnings; warnings.warn('careful')",
        "raise ValueError('as meant')",
    ).with_name("00_page.py")
    text = script.read_text().replace("# %%\nraise", '# %% tags=["raises-exception"]\nraise')
    script.write_text(text.replace("# %%\nimport warnings", '# %% tags=["warns"]\nimport warnings'))
    for name in ("one.ipynb", "two.ipynb"):
        write(asyncio.run(execute(script)), tmp_path / name)
    one = (tmp_path / "one.ipynb").read_text()
    assert one == (tmp_path / "two.ipynb").read_text()
    assert str(tmp_path) not in one
    assert not (tmp_path / "of the user").exists()
    assert [each for each in checks.problems(nbformat.reads(one, as_version=4)) if "pictures" not in each] == []
    assert "UserWarning: careful" in one
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00_page.py", "one.ipynb", "two.ipynb"]


# Each check can fail.


def sample() -> NotebookNode:
    """A small notebook in which nothing is wrong."""
    random = np.random.default_rng(0)
    tiles = random.integers(0, 256, (8, 8, 3))  # smaller as PNG than as JPEG
    drawings = [
        nbformat.v4.new_output("display_data", {"image/png": picture(tiles.repeat(5, 0).repeat(5, 1))})
        for _ in range(checks.FEWEST_PICTURES)
    ]
    printed = nbformat.v4.new_output("stream", name="stdout", text="loss 0.25\n")
    table = nbformat.v4.new_output("execute_result", {"text/plain": "name  value\n a   -1.5e-03"}, execution_count=1)
    text = nbformat.v4.new_markdown_cell("# A page")
    return tidy(
        nbformat.v4.new_notebook(
            cells=[text, nbformat.v4.new_code_cell("draw()", execution_count=1, outputs=[*drawings, printed, table])]
        )
    )


def picture(pixels: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> str:
    buffer = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(buffer, format="PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def test_nothing_is_wrong_with_the_sample() -> None:
    assert checks.problems(sample()) == checks.stale(sample(), sample()) == checks.differences(sample(), sample()) == []


def blank(notebook: NotebookNode) -> None:
    notebook.cells[1].outputs[0].data["image/png"] = picture(np.full((40, 40, 3), 255))


def nearly_blank(notebook: NotebookNode) -> None:
    pixels = np.full((200, 200, 3), 255)
    pixels[10] = 0
    notebook.cells[1].outputs[0].data["image/png"] = picture(pixels)


def drawn(figure: Figure, kind: str) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind)
    return base64.b64encode(buffer.getvalue()).decode()


def empty_axes(notebook: NotebookNode) -> None:
    figure = Figure()
    figure.subplots(1, 2)[0].set_title("probability of espresso, %")
    notebook.cells[1].outputs[0].data["image/png"] = drawn(figure, "png")


def empty_axes_as_jpeg(notebook: NotebookNode) -> None:
    figure = Figure(figsize=(10.5, 3.8))
    figure.subplots()
    data = notebook.cells[1].outputs[0].data
    del data["image/png"]
    data["image/jpeg"] = drawn(figure, "jpeg")


def black_maps(notebook: NotebookNode) -> None:
    figure = Figure(figsize=(10.5, 3.8))
    for axis in figure.subplots(1, 3):
        axis.imshow(np.zeros((20, 20)), cmap="inferno")
        axis.set_title("guided backpropagation")
        axis.set_axis_off()
    notebook.cells[1].outputs[0].data["image/png"] = drawn(figure, "png")


def broken(notebook: NotebookNode) -> None:
    notebook.cells[1].outputs[0].data["image/png"] = base64.b64encode(b"no picture").decode()


def missing(notebook: NotebookNode) -> None:
    del notebook.cells[1].outputs[0]


def warned(notebook: NotebookNode) -> None:
    notebook.cells[1].outputs.append(nbformat.v4.new_output("stream", name="stderr", text="UserWarning: careful"))


def raised(notebook: NotebookNode) -> None:
    notebook.cells[1].outputs.append(nbformat.v4.new_output("error", ename="ValueError", evalue="no", traceback=[]))


def at_home(notebook: NotebookNode) -> None:
    notebook.cells[1].outputs[-2].text = "saved to /home/reader/map.png\n"


def at_an_address(notebook: NotebookNode) -> None:
    notebook.cells[1].outputs[-1].data["text/plain"] = "<object at 0x7f9667221e60>"


def not_run(notebook: NotebookNode) -> None:
    notebook.cells[1].execution_count = None


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (blank, "blank: 1 colours"),
        (nearly_blank, "blank: 2 colours"),
        (empty_axes, "blank: it has only background"),
        (empty_axes_as_jpeg, "blank: it has only background"),
        (black_maps, "blank: it has only background"),
        (broken, "cannot be read"),
        (missing, "2 pictures"),
        (warned, "wrote to stderr: UserWarning: careful"),
        (raised, "ended in ValueError: no"),
        (at_home, "of this machine: .*/home/reader"),
        (at_an_address, "address of this machine"),
        (not_run, "has not been run"),
    ],
)
def test_a_page_with_a_problem_is_found(spoil: Callable[[NotebookNode], None], words: str) -> None:
    notebook = sample()
    spoil(notebook)
    (problem,) = checks.problems(notebook)
    assert re.search(words, problem)


def test_a_tag_lets_a_cell_warn_or_raise() -> None:
    notebook = sample()
    warned(notebook)
    notebook.cells[1].metadata = {"tags": ["warns"]}
    assert checks.problems(notebook) == []
    raised(notebook)
    assert len(checks.problems(notebook)) == 1
    notebook.cells[1].metadata = {"tags": ["raises-exception"]}
    assert checks.problems(notebook) == []


def test_a_changed_and_a_missing_cell_make_a_notebook_stale() -> None:
    changed = sample()
    changed.cells[1].source = "draw(2)"
    assert checks.stale(changed, sample()) == ["cell 2 (draw(2)) differs in the notebook"]
    shorter = sample()
    del shorter.cells[1]
    assert checks.stale(sample(), shorter) == ["the script has 2 cells, the notebook 1"]


def test_other_numbers_are_no_difference_and_other_words_lines_and_kinds_are() -> None:
    numbers = sample()
    numbers.cells[1].outputs[-2].text = "loss -12.5e-3\n"
    numbers.cells[1].outputs[-1].data["text/plain"] = "name    value\n a   1,234"
    assert checks.differences(numbers, sample()) == []

    for spoil in (missing, warned, raised, at_home, at_an_address):
        notebook = sample()
        spoil(notebook)
        (difference,) = checks.differences(notebook, sample())
        assert difference.startswith("cell 2 (draw()) shows")

    longer = sample()
    longer.cells[1].outputs[-1].data["text/plain"] += "\n b  2"
    jpeg = sample()
    jpeg.cells[1].outputs[0].data["image/jpeg"] = jpeg.cells[1].outputs[0].data.pop("image/png")
    for notebook in (longer, jpeg):
        assert len(checks.differences(notebook, sample())) == 1
