"""What mkdocs.yml cannot say: where pages come from, and that formulas are MathML."""

import html
import re
from pathlib import Path

import griffe
from latex2mathml.converter import convert
from mkdocs.structure.files import File
from nbconvert import MarkdownExporter

ROOT = Path(__file__).parents[2]
PAGES = ("*.md", "*/*.md", "paper_figures/*.png", "paper_figures/data/*.csv", "*/pair/*.json")
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', flags=re.S)
DISPLAYED = re.compile(r"^( *)\.\. math:: *(.*(?:\n\1 +\S.*)*)", flags=re.M)
ENTRY = re.compile(r"^(\*{0,2}\w[\w, *]*) : ", flags=re.M)


class Markdown(griffe.Extension):
    """Docstrings in Markdown, their entries without types: those are in signatures."""

    def on_instance(self, *, obj, **_):
        if obj.docstring:
            text = DISPLAYED.sub(r"\n$$\2$$\n", obj.docstring.value)
            text = re.sub(r":math:`([^`]+)`", r"$\1$", text)
            text = re.sub(r":[a-z]+:`~?([^`]+)`", r"`\1`", text)
            obj.docstring.value = ENTRY.sub(r"\1\n    ", text)


def on_files(files, config):
    for path in (path for pattern in PAGES for path in ROOT.glob(pattern)):
        files.append(File.generated(config, str(path.relative_to(ROOT)), abs_src_path=str(path)))
    for page in config.nav[-1]["API"]:
        text = f"# {Path(page).stem}\n\n::: {Path(page).stem}\n"
        files.append(File.generated(config, page, content=text))
    body, made = MarkdownExporter().from_filename(str(ROOT / "simulations/tutorial.ipynb"))
    for name, content in ({"tutorial.md": body} | made["outputs"]).items():
        files.append(File.generated(config, f"simulations/{name}", content=content))


def on_page_markdown(markdown, **_):
    return markdown.replace("/tutorial.ipynb)", "/tutorial.md)")


def on_page_content(content, **_):
    return FORMULA.sub(mathml, content)


def mathml(match: re.Match[str]) -> str:
    # a brace by its name is not known beside an operator
    tex = html.unescape(match[2]).replace("\\lbrace", "\\{").replace("\\rbrace", "\\}")
    return convert(tex, display="inline" if match[1] == "span" else "block")
