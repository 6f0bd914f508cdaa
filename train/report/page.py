"""Fills the template: one file that needs nothing else, neither a server nor the network."""

import base64
import json
import pathlib
from typing import Any

import jinja2
import latex2mathml.converter
import markupsafe

FOLDER = pathlib.Path(__file__).parent / "page"


def render(payload: dict[str, Any]) -> str:
    """Makes the page.

    Args:
        payload: From `train.report.payload.payload`.

    Returns:
        HTML with the styles, scripts, formulas and data inside.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.j2").render(
        import_map=markupsafe.Markup(_json({"imports": modules()})),
        inline=_inline,
        formula=_formula,
        data=markupsafe.Markup(_json(payload)),
        **payload,
    )


def modules() -> dict[str, str]:
    """The JavaScript modules as an import map of data URLs.

    A page from file:// may not load files beside it, and modules inside a page have no names by
    which they could import each other; an import map gives them some.
    """
    urls = {}
    for path in sorted((FOLDER / "js").glob("*.js")):
        name = f"report/{path.name}"
        source = f"{path.read_text(encoding='utf-8')}\n//# sourceURL={name}\n"
        encoded = base64.b64encode(source.encode()).decode("ascii")
        urls[name] = f"data:text/javascript;base64,{encoded}"
    return urls


def _inline(name: str) -> markupsafe.Markup:
    """A file of the page's folder, unescaped."""
    return markupsafe.Markup((FOLDER / name).read_text(encoding="utf-8").strip())


def _formula(latex: str, *, block: bool = False) -> markupsafe.Markup:
    """MathML of a formula; the template keeps formulas as LaTeX."""
    display = "block" if block else "inline"
    return markupsafe.Markup(latex2mathml.converter.convert(latex, display=display))


def _json(values: Any) -> str:
    """JSON that cannot end the script element that it is in."""
    text = json.dumps(values, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
