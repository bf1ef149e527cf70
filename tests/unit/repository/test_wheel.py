"""The built wheel works without the repository."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CHECK = """
import raytrain_opt, pathlib
from raytrain_opt import Job
assert pathlib.Path(raytrain_opt.__file__).is_relative_to({site!r}), raytrain_opt.__file__
Job(model="resnet8", data="digits", epochs=1, global_batch_size=8)
from raytrain_opt.cli import main
main(["schema"])
"""

TEMPLATES = ("page.html", "style.css")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # From a copy: what an earlier build left in the repository would get into the wheel.
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT / "raytrain_opt", source / "raytrain_opt")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    # Without isolation: nothing may be fetched in a test.
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out)]
    done = subprocess.run([*build, str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (made,) = out.glob("raytrain_opt-*.whl")
    return made


def test_it_holds_the_package_and_its_types_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert "raytrain_opt/py.typed" in names
    assert {"raytrain_opt/pools/worker.py", "raytrain_opt/data/digits.csv.gz"} <= set(names)
    assert {f"raytrain_opt/report/templates/{name}" for name in TEMPLATES} <= set(names)
    assert {name.split("/")[0].split("-")[0] for name in names} == {"raytrain_opt"}


def test_it_runs_from_elsewhere(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    # -P and no PYTHONPATH: only what stands in `site` and the installed dependencies.
    code = f"import sys; sys.path.insert(0, {str(site)!r})" + CHECK.format(site=str(site))
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert '"global_batch_size"' in done.stdout
