"""Build the site: guide, theorems, serving, results, gallery, tutorial and the API, as pages.

``python -m simulations reference``. The pages need no network: formulas are MathML, fonts are the
reader's own, and search runs in the page.
"""

import argparse
import importlib
import inspect
import io
import json
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

from .common.inputs import ROOT

OUT = Path("docs")
CONFIG = Path(__file__).with_name("mkdocs.yml")
# the project's pages, by their names on the site
PAGES = {
    "README.md": "index.md",
    "cactus_theory/GUIDE.md": "guide.md",
    "cactus_theory/THEORY.md": "theorems.md",
    "cactus_theory/SERVING.md": "serving.md",
    "paper_figures/RESULTS.md": "results.md",
    "simulations/gallery/README.md": "gallery.md",
    "tests/testing/GALLERY.md": "faults.md",
    "simulations/tutorial.ipynb": "tutorial.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changes.md",
}
PICTURES = (".png", ".svg")
# a page each, with what the package exports
PACKAGES = (
    "cactus_theory",
    "cactus_theory.decoding",
    "cactus_theory.decoding.drafters",
    "cactus_theory.divergences",
    "cactus_theory.kernels",
    "cactus_theory.losses",
    "cactus_theory.policies",
    "cactus_theory.testing",
    "cactus_theory.traces",
    "cactus_theory.tuning",
    "cactus_theory.verify",
)
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=OUT, help="folder (default: docs)")


def run(args: argparse.Namespace) -> int:
    """Build the site and name its first page."""
    try:
        from mkdocs.commands.build import build
        from mkdocs.config import load_config
    except ModuleNotFoundError:
        raise RuntimeError("mkdocs is not installed; make setup does that") from None
    with tempfile.TemporaryDirectory() as folder:
        write_pages(Path(folder))
        nav = [{name: f"api/{name}.md"} for name in PACKAGES]
        text = CONFIG.read_text().replace("API: []", f"API: {json.dumps(nav)}")
        config = load_config(
            io.BytesIO(text.encode()),
            docs_dir=folder,
            site_dir=str(args.out.resolve()),
            strict=True,  # a link that leads nowhere is an error
        )
        config.plugins.on_startup(command="build", dirty=False)
        build(config)
    print(f"{args.out / 'index.html'}; for its search: python -m http.server -d {args.out}")
    return 0


def write_pages(folder: Path) -> None:
    """Write the pages as Markdown, with the pictures that they show."""
    from .markup import with_formulas  # with the packages of make docs

    for source, name in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        text = text if source.endswith(".md") else notebook(json.loads(text), folder)
        (folder / name).write_text(with_formulas(linked(text, source, folder)), encoding="utf-8")
    (folder / "api").mkdir()
    places: dict[str, str] = {}
    for package in PACKAGES:
        (folder / "api" / f"{package}.md").write_text(package_page(package, places))


def package_page(package: str, places: dict[str, str]) -> str:
    """Return the page of a package: its docstring, and a place for each name that it exports.

    ``places`` are links to what other pages have shown; what this one shows is added.
    """
    module = importlib.import_module(package)
    parts = [f"# {package}", f"::: {package}\n    options: {{members: false}}"]
    for name in module.__all__:
        value = getattr(module, name)
        defined = inspect.isclass(value) or inspect.isfunction(value)
        path = f"{value.__module__}.{value.__qualname__}" if defined else f"{package}.{name}"
        if inspect.ismodule(value):
            path = value.__name__
        parts.append(f'<a id="{package}.{name}"></a>')
        if path in places:
            parts.append(f"## {name}\n\nSee [{places[path][:-3]}]({places[path]}#{path}).")
            continue
        places[path] = f"{package}.md"
        options = f"{{show_root_heading: true, heading: '{name}', toc_label: '{name}'}}"
        if not defined and not inspect.ismodule(value):
            options = options.replace("{", "{show_if_no_docstring: true, ")
        parts.append(f"::: {path}\n    options: {options}")
    return "\n\n".join(parts) + "\n"


def linked(text: str, source: str, folder: Path) -> str:
    """Return a page whose links lead to other pages and pictures; to other files none do."""

    def link(match: re.Match[str]) -> str:
        mark, label, target = match.groups()
        path, hash_, anchor = target.partition("#")
        if "://" in path or not path:
            return match[0]
        file = (ROOT / source).parent.joinpath(path).resolve()
        if not file.is_relative_to(ROOT) or not file.exists():
            return match[0] if (folder / path).exists() else label
        inside = file.relative_to(ROOT).as_posix()
        if inside in PAGES:
            return f"{mark}[{label}]({PAGES[inside]}{hash_}{anchor})"
        if file.suffix not in PICTURES:
            return label
        shutil.copyfile(file, folder / file.name)
        return f"{mark}[{label}]({file.name})"

    return LINK.sub(link, text)


def notebook(content: dict[str, Any], folder: Path) -> str:
    """Return a notebook as Markdown, what its cells printed and drew included."""
    import base64

    parts = []
    for cell in content["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(text)
            continue
        parts.append(f"```python\n{text}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {})
            if picture := data.get("image/png"):
                name = f"tutorial-{len(parts)}.png"
                (folder / name).write_bytes(base64.b64decode("".join(picture)))
                parts.append(f"![]({name})")
            elif printed := "".join(output.get("text", data.get("text/plain", ""))):
                parts.append(f"```text\n{printed.rstrip()}\n```")
    return "\n\n".join(parts) + "\n"
