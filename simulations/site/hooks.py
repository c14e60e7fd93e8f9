"""Hooks of mkdocs: collect the site's pages, and convert formulas to MathML."""

import html
import importlib
import inspect
import re
from pathlib import Path

import griffe
from latex2mathml.converter import convert
from mkdocs.structure.files import File
from nbconvert import MarkdownExporter

ROOT = Path(__file__).parents[2]
PAGES = ("*.md", "*/*.md", "paper_figures/results/*.md")
LINK = re.compile(r"\[([^][]*)\]\(([^)#:\s]+)[^)\s]*\)")
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', flags=re.S)
DISPLAYED = re.compile(r"^( *)\.\. math:: *(.*(?:\n\1 +\S.*)*)", flags=re.M)
# a longer inline formula gets a scroll bar; about the width of a phone (style.css)
LONG = 24
ENTRY = re.compile(r"^(\*{0,2}\w[\w, *]*) : ", flags=re.M)


class Markdown(griffe.Extension):
    """Convert docstrings to Markdown, and drop the types of entries, which signatures show."""

    def on_instance(self, *, obj, **_):
        if obj.docstring:
            text = DISPLAYED.sub(r"\n$$\2$$\n", obj.docstring.value)
            text = re.sub(r":math:`([^`]+)`", r"$\1$", text)
            text = re.sub(r":[a-z]+:`~?([^`]+)`", r"`\1`", text)
            obj.docstring.value = ENTRY.sub(r"\1\n    ", text)

    def on_function_instance(self, *, func, **_):
        """Show the keywords behind ``**options`` if the function has a ``__signature__``."""
        if func.parent.is_module:
            found = getattr(importlib.import_module(func.module.path), func.name, None)
            if told := getattr(found, "__signature__", None):
                func.parameters = griffe.Parameters(*map(_parameter, told.parameters.values()))


def _parameter(own):
    empty = inspect.Parameter.empty
    return griffe.Parameter(
        own.name,
        annotation=None if own.annotation is empty else inspect.formatannotation(own.annotation),
        kind=griffe.ParameterKind[own.kind.name.lower()],
        default=None if own.default is empty else repr(own.default),
    )


def on_files(files, config):
    body, made = MarkdownExporter().from_filename(str(ROOT / "simulations/tutorial.ipynb"))
    pages = {path: path.read_text("utf-8") for kind in PAGES for path in ROOT.glob(kind)}
    texts = pages | {ROOT / "simulations/tutorial.md": body}
    linked = {
        (path.parent / link[2]).resolve()
        for path, text in texts.items()
        for link in LINK.finditer(text)
    }
    for path in sorted({*pages, *(path for path in linked if path.is_file())}):
        files.append(File.generated(config, str(path.relative_to(ROOT)), abs_src_path=str(path)))
    for page in next(entry["API"] for entry in config.nav if "API" in entry):
        name = Path(page).stem
        text = f"---\ntitle: {name.removeprefix('cactus_theory.')}\n---\n# {name}\n\n::: {name}\n"
        files.append(File.generated(config, page, content=text))
    for name, content in ({"tutorial.md": body} | made["outputs"]).items():
        files.append(File.generated(config, f"simulations/{name}", content=content))


def on_nav(nav, **_):
    for page in nav.pages:
        if page.file.src_uri == "paper_figures/RESULTS.md":
            page.file.name = "index"  # of its section


def on_page_markdown(markdown, page, **_):
    def shown(link):
        folder = (ROOT / page.file.src_uri).parent / link[2]
        return link[1] if folder.is_dir() else link[0]  # a site shows no folders

    return LINK.sub(shown, markdown.replace("/tutorial.ipynb)", "/tutorial.md)"))


def on_page_content(content, **_):
    return FORMULA.sub(mathml, content)


def mathml(match: re.Match[str]) -> str:
    # the converter does not know \lbrace beside an operator, nor with \big
    tex = re.sub(r"\\big(?=\\[lr]brace)", "", html.unescape(match[2]))
    tex = tex.replace("\\lbrace", "\\{").replace("\\rbrace", "\\}")
    tex = re.sub(r"\\ln *(?=(\()?)", lambda name: "\\,\\ln" + ("" if name[1] else "\\,"), tex)
    drawn = convert(tex, display="inline" if match[1] == "span" else "block")
    drawn = drawn.replace("<mo>&#x0221E;</mo>", "<mi>&#x0221E;</mi>")
    long = len(html.unescape(re.sub("<[^>]*>", "", drawn))) > LONG
    return f'<{match[1]} class="arithmatex{" long" * long}">{drawn}</{match[1]}>'
