import importlib
import itertools

import pytest

pytest.importorskip("matplotlib")

import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.text import Text  # noqa: E402

from cactus_theory.commands.plot import LOOKS, settings  # noqa: E402
from paper_figures import _style as style  # noqa: E402
from paper_figures.__main__ import HERE, drawable, main, names  # noqa: E402
from tests.amounts import THOROUGH, thorough  # noqa: E402

# pixels at 100 dpi by which two texts may overlap: their boxes are a little larger than the ink
TOUCHING = 2.0


def drawn(name):
    return importlib.import_module(f"paper_figures.fig_{name}").draw(HERE / "data")


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("width", ["page", "column"])
def test_figures_are_drawn_and_no_text_covers_another(name, width, tmp_path):
    if width == "column" and not THOROUGH:
        pytest.skip("one column: run by make test-thorough")
    with style.applied(width):
        figure = drawn(name)
        figure.draw_without_rendering()
        assert figure.get_size_inches()[0] == style.WIDTHS[width]
        check_texts(figure)
        if name != names()[0] and not THOROUGH:
            return  # files are compared in make test-thorough, and drawn by make figures
        paths = style.save(figure, name, tmp_path)
    assert [path.name for path in paths] == [f"{name}.pdf", f"{name}.png"]
    assert paths[0].read_bytes().startswith(b"%PDF")
    assert b"CreationDate" not in paths[0].read_bytes()


@thorough
@pytest.mark.parametrize("name", names())
def test_equal_numbers_give_equal_bytes(name, tmp_path):
    pictures = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        assert main([name, "--out", str(folder)]) == 0
        assert sorted(path.name for path in folder.iterdir()) == [f"{name}.pdf", f"{name}.png"]
        pictures.append([path.read_bytes() for path in sorted(folder.iterdir())])
    assert pictures[0] == pictures[1]


def texts(figure):
    """Return the places of all texts that are seen, with what they say."""
    beyond = {id(label) for axes in figure.axes for label in labels_beyond(axes)}
    places = []
    for text in figure.findobj(Text):
        if text.get_visible() and text.get_text().strip() and id(text) not in beyond:
            places.append((text.get_text(), Text.get_window_extent(text)))  # without its line
    return places


def labels_beyond(axes):
    """Yield the labels of ticks outside the view or of axes turned off, which are not drawn."""
    for axis in (axes.xaxis, axes.yaxis):
        low, high = sorted(axis.get_transform().transform(axis.get_view_interval()))
        slack = 1e-6 * (high - low)
        for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
            place = axis.get_transform().transform([tick.get_loc()])[0]
            if not (axes.axison and low - slack <= place <= high + slack):
                yield from (tick.label1, tick.label2)


def check_texts(figure):
    """Raise if a text covers another one or leaves the page."""
    placed, page = texts(figure), figure.bbox
    for text, box in placed:
        assert page.x0 - TOUCHING <= box.x0 and box.x1 <= page.x1 + TOUCHING, text
        assert page.y0 - TOUCHING <= box.y0 and box.y1 <= page.y1 + TOUCHING, text
    for (one, a), (other, b) in itertools.combinations(placed, 2):
        across = min(a.x1, b.x1) - max(a.x0, b.x0)
        along = min(a.y1, b.y1) - max(a.y0, b.y0)
        assert min(across, along) <= TOUCHING, f"{one!r} covers {other!r}"


def test_a_plotted_row_looks_like_the_figures():
    library = settings()
    with style.applied():
        assert all(
            plt.rcParams[name] == library[name] for name in library if name != "figure.figsize"
        )
    assert library["axes.labelcolor"] == style.INK and library["axes.edgecolor"] == style.MUTED
    assert library["grid.color"] == style.GRID
    for name in ("cactus", "typical"):
        assert LOOKS[name].items() <= style.look(name).options().items()


def test_policies_are_told_apart_without_colour():
    marked = {name: look for name, look in style.LOOKS.items() if look.marker}
    looks = [(look.line, look.marker, look.hollow) for look in marked.values()]
    assert len(set(looks)) == len(looks) == len(style.LOOKS) - len(("draft", "grid"))
    from_a_file = style.look("my_rule.py:my_rule")
    assert from_a_file == style.LOOKS["own"] and style.look("lenience") == style.LOOKS["other"]
    assert from_a_file.colour not in [
        look.colour for look in style.LOOKS.values() if look != from_a_file
    ]


def test_what_a_clone_need_not_have_is_drawn_where_it_was_measured(tmp_path):
    assert {*names()} - {*drawable(tmp_path)} == {"gpu", "answers"}
    for name in ("gpu_verify", "gpu_decode", "answers"):
        (tmp_path / f"{name}.csv").touch()
    assert drawable(tmp_path) == names()
