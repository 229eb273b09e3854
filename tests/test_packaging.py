"""What goes to an index of packages: the files of the source distribution, README and URLs."""

import re
import shutil
from pathlib import Path

import pytest

pytest.importorskip("hatchling", reason="it builds the distributions")

from hatchling.builders.sdist import SdistBuilder

ROOT = Path(__file__).parents[1]
ADDRESS = "https://example.org/some/psidiff"
LINK = re.compile(r"\]\(([^)\s]+)\)")


@pytest.fixture(scope="module")
def listing():
    return {each.distribution_path for each in SdistBuilder(str(ROOT)).recurse_included_files()}


def paths(listing):
    """Files and the folders that they are in."""
    return listing | {str(above) for each in listing for above in Path(each).parents}


def named_in(text):
    """Relative links, files and folders of a document that exist here."""
    code = re.findall(r"`([^`\n]+)`", text) + re.findall(r"```\w*\n(.*?)```", text, re.DOTALL)
    words = [word.rstrip(".,:;") for piece in code for word in re.split(r"[\s`'\"]+", piece)]
    known = {path.name for path in ROOT.iterdir()} - {"out", "runs", "dist"}
    there = {w for w in words if w.partition("/")[0] in known and (ROOT / w).exists()}
    return there | {link for link in LINK.findall(text) if ":" not in link and link[0] != "#"}


def test_the_source_distribution_has_all_that_its_documents_name(listing):
    there = paths(listing)
    names = named_in((ROOT / "README.md").read_text(encoding="utf-8"))
    names |= named_in((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    assert {"docs/results.md", "examples", "tests/count_code.py"} <= {
        n.rstrip("/") for n in names
    }
    assert {name for name in names if name.rstrip("/") not in there} == set()
    # what the README has one type, and what a build from these files needs
    assert {"Makefile", "constraints.txt", "hatch_build.py"} <= listing
    assert not [each for each in listing if re.match(r"(out|runs|dist|\.venv)/|.*\.pyc$", each)]


@pytest.fixture
def metadata(tmp_path):
    """A function of a repository's address: the metadata of a package that sets it."""

    def of(address):
        for name in ("README.md", "LICENSE", "NOTICE", "hatch_build.py", "pyproject.toml"):
            shutil.copy(ROOT / name, tmp_path / name)
        package = tmp_path / "src" / "psidiff"
        package.mkdir(parents=True)
        shutil.copy(ROOT / "src/psidiff/__init__.py", package)
        settings = tmp_path / "pyproject.toml"
        text = settings.read_text(encoding="utf-8")
        assert text.count("\nrepository = ") == 1
        settings.write_text(re.sub(r"\nrepository = .*", f'\nrepository = "{address}"', text))
        return SdistBuilder(str(tmp_path)).metadata.core

    return of


def test_one_setting_makes_the_urls_and_the_links_of_the_readme_absolute(metadata):
    made = metadata(f"{ADDRESS}/")
    assert made.urls["Repository"] == ADDRESS and len(made.urls) == 4
    assert all(url.startswith(ADDRESS) for url in made.urls.values())
    links = LINK.findall(made.readme)
    assert len(links) > 10 and all(re.match(r"https?://|#", link) for link in links)
    assert f"]({ADDRESS}/blob/HEAD/docs/results.md)" in made.readme
    assert f"({ADDRESS}/raw/HEAD/docs/pictures/sudoku.png)" in made.readme
    relative = LINK.sub("", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert LINK.sub("", made.readme) == relative, "nothing else is changed"


def test_without_an_address_nothing_points_to_nowhere(metadata):
    made = metadata("")
    assert made.urls == {}
    assert made.readme == (ROOT / "README.md").read_text(encoding="utf-8")


def test_files_that_the_links_of_the_documents_name_exist():
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")):
        for link in LINK.findall(
            re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.S)
        ):
            if ":" not in link and not link.startswith("#"):
                assert (path.parent / link.partition("#")[0]).exists(), (path.name, link)
