"""The documentation site: doxygen reads the headers, Breathe and Sphinx make the pages.

`./dev docs`, or: sphinx-build -W --keep-going docs build/docs/html
"""

import re
import subprocess
from pathlib import Path

from sphinx.errors import ExtensionError

DOCS = Path(__file__).resolve().parent
HEADER = (DOCS.parent / "include" / "cuflash.h").read_text()

project = "cuflash"
author = "the cuflash authors"
copyright = author
release = ".".join(re.findall(r"#define CUFLASH_VERSION_\w+ (\d+)", HEADER))
version = release

extensions = ["breathe", "myst_parser"]
myst_enable_extensions = ["deflist", "substitution"]
myst_heading_anchors = 3
html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["cuflash.css"]
html_title = f"cuflash {release}"
html_copy_source = False

breathe_default_project = "cuflash"
breathe_domain_by_extension = {"h": "c", "hpp": "cpp"}
breathe_show_enumvalue_initializer = True

# What the header's first comment says, without the comment's frame.
FIRST = re.search(r"^ \* (WHAT IT COMPUTES.*?)^ \*/", HEADER, re.DOTALL | re.MULTILINE).group(1)
myst_substitutions = {"header_text": "```text\n" + re.sub(r"^ \* ?", "", FIRST, flags=re.MULTILINE) + "```"}


def run_doxygen(app, config):
    """Into the folder of Sphinx's own intermediate files."""
    output = Path(app.doctreedir) / "doxygen"
    output.mkdir(parents=True, exist_ok=True)
    config.breathe_projects = {"cuflash": str(output / "xml")}
    settings = f"@INCLUDE = Doxyfile\nOUTPUT_DIRECTORY = {output}\n"
    try:
        done = subprocess.run(["doxygen", "-"], cwd=DOCS, input=settings, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    except FileNotFoundError:
        raise ExtensionError("doxygen is not installed") from None
    if done.returncode:
        raise ExtensionError(f"doxygen:\n{done.stdout}")


def setup(app):
    app.connect("config-inited", run_doxygen)
