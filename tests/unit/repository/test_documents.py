"""README.md, docs/ and the results show only jobs, paths, commands, options, fields and links
that exist. Each page is one case, which reports everything that is wrong on it."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
import torch
import yaml

import raytrain_opt
from docs.generate import generated_pages, regenerated
from raytrain_opt import cli
from raytrain_opt.config.load import job_schema, load_job, parse_job
from raytrain_opt.config.schema import Job
from raytrain_opt.data import load_shared_data
from raytrain_opt.errors import JobError
from raytrain_opt.train.checkpoint import Checkpoints, Point
from raytrain_opt.train.learner import Learner
from raytrain_opt.train.learner_config import LearnerConfig
from raytrain_opt.train.trained_model import model_metadata

ROOT = Path(__file__).parents[3]
README = ROOT / "README.md"
INDEX = ROOT / "benchmarks" / "RESULTS.md"
CHANGELOG = ROOT / "CHANGELOG.md"
GUIDES = [README, *sorted((ROOT / "docs").glob("*.md"))]
RESULTS = [INDEX, *sorted((ROOT / "benchmarks" / "results").glob("*.md"))]
PAGES = [*GUIDES, ROOT / "CONTRIBUTING.md", CHANGELOG, *RESULTS]
JOBS = sorted((ROOT / "jobs").glob("*.yaml"))
# Files that begin with the commands to use them.
HEADERS = [
    *JOBS,
    *sorted((ROOT / "clusters").glob("*.yaml")),
    *sorted((ROOT / "jobs").glob("*.py")),
]
# References of every field or paper, which readers search rather than read.
REFERENCES = {"job-file.md", "run-directory.md", "references.md"}
MAX_LINES = {README: 150, INDEX: 150}
MAX_GUIDE_LINES = 3000

COMMAND = re.compile(r"(?:raytrain-opt|-m raytrain_opt) ([a-z][a-z-]*)([^`#\n]*)")
PYTHON = re.compile(r"\bpython3? (-m )?([\w./]+)")
LINK = re.compile(r"\]\((?!https?:)([^)\s]+)\)")
FOLDERS = "jobs|benchmarks|clusters|docs|raytrain_opt|tests"
MENTION = re.compile(rf"(?<![\w/.-])((?:{FOLDERS})/[\w./-]*\w)")
ROOMS = sorted(path.parent.name for path in (ROOT / "raytrain_opt").glob("*/__init__.py"))
MODULE = re.compile(rf"(?<![\w/.-])((?:{'|'.join(ROOMS)})/[\w/]+\.py)")
MAKE = re.compile(r"(?:^|`|&& )make ((?:[a-z-]+ ?)+)", re.MULTILINE)
FIELD = re.compile(r"`([a-z_]+(?:\.[a-z_]+)+)(?:[:=][^`]*)?`")
SETTING = re.compile(r"`([a-z_]+(?:\.[a-z_]+)*): ([^`]+)`")
OVERRIDE = re.compile(r"--set ([\w.]+=[^\s`\"]+)")
HEADER_OVERRIDE = re.compile(r"--set ([\w.]+=)(?:'([^']*)'|(\S+?),?(?=\s|$))")
FILE_SUFFIXES = {"cff", "html", "json", "jsonl", "md", "npy", "pt", "py", "safetensors", "yaml"}
STANDALONE = '\nif __name__ == "__main__":\n'
JOB_SCHEMA = job_schema()


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(page: Path, language: str) -> list[str]:
    """Return the contents of the fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text_of(page), re.MULTILINE | re.DOTALL)


def prose(page: Path) -> str:
    """Return a page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", text_of(page), flags=re.MULTILINE | re.DOTALL)


def joined(text: str) -> str:
    """Return a text with the lines joined that end in `\\`, in comments too."""
    return re.sub(r"\\\n#?\s*", "", text)


@cache
def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    titles = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    plain = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title) for title in titles)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in plain}


@cache
def fits_a_job(override: str) -> bool:
    """Return whether a shipped job, or one that a page shows, accepts the override."""
    shown = [block for page in GUIDES for block in blocks(page, "yaml")]
    for text in [*map(text_of, JOBS), *shown]:
        with suppress(JobError):
            parse_job(text, overrides=[override])
            return True
    return False


def fields_below(node: Any, definitions: dict[str, Any]) -> set[str]:
    """Return the names of all fields of a part of the job file's schema, at any depth."""
    names: set[str] = set()
    if isinstance(node, dict):
        reference = node.get("$ref")
        if isinstance(reference, str):
            return fields_below(definitions[reference.rpartition("/")[2]], definitions)
        names |= set(node.get("properties", ()))
        for value in node.values():
            names |= fields_below(value, definitions)
    elif isinstance(node, list):
        for value in node:
            names |= fields_below(value, definitions)
    return names


# Rules: each yields what is wrong on a page.


def links_that_lead_nowhere(page: Path) -> Iterator[str]:
    for target in LINK.findall(prose(page)):
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            yield target


def missing_paths(page: Path) -> Iterator[str]:
    text = text_of(page)
    for folder, pattern in ((ROOT, MENTION), (ROOT / "raytrain_opt", MODULE)):
        paths = sorted(set(pattern.findall(text)))
        yield from (path for path in paths if not (folder / path).exists())


def unknown_commands_and_options(page: Path) -> Iterator[str]:
    for name, arguments in COMMAND.findall(joined(text_of(page))):
        command = cli.main.commands.get(name)
        if command is None:
            yield name
            continue
        options = [item for item in command.params if isinstance(item, click.Option)]
        known = {text for option in options for text in option.opts}
        shown = re.findall(r"(?<!\S)--[a-z-]+", arguments)
        yield from (f"{name} {option}" for option in shown if option not in known)


def python_commands_that_fail(page: Path) -> Iterator[str]:
    """Yield `python -m MODULE` without the module, `python FILE` that imports from the root."""
    for option, name in set(PYTHON.findall(text_of(page))):
        if option:  # Python finds the packages of the current directory
            if not is_module(name):
                yield f"python -m {name}"
        elif name.endswith(".py"):
            imports = re.findall(r"^ *(?:from|import) (\w+)", text_of(ROOT / name), re.MULTILINE)
            if set(imports) & {"benchmarks", "docs", "jobs", "tests"}:
                yield f"python {name}"


def is_module(name: str) -> bool:
    with suppress(ModuleNotFoundError):
        return find_spec(name) is not None
    return False


def missing_make_targets(page: Path) -> Iterator[str]:
    targets = set(re.findall(r"^([a-z-]+):", text_of(ROOT / "Makefile"), re.MULTILINE))
    shown = {target for line in MAKE.findall(text_of(page)) for target in line.split()}
    yield from sorted(shown - targets)


def missing_fields(page: Path) -> Iterator[str]:
    """Yield `section.field` of a job that no section has."""
    for name in sorted(set(FIELD.findall(prose(page)))):
        section, *rest = name.split(".")
        if section in Job.model_fields and rest[-1] not in FILE_SUFFIXES:
            schema = JOB_SCHEMA["properties"][section]
            if not set(rest) <= fields_below(schema, JOB_SCHEMA["$defs"]):
                yield name


def invalid_jobs(page: Path) -> Iterator[str]:
    for block in blocks(page, "yaml"):
        try:
            parse_job(block, source=page.name)
        except JobError as error:
            yield str(error)


def overrides_that_fit_no_job(page: Path) -> Iterator[str]:
    """Yield `--set` arguments and, in the prose, `field: value` that every job refuses."""
    overrides = set(OVERRIDE.findall(text_of(page))) - {"a.b=c"}  # of the synopsis
    for field, value in SETTING.findall(prose(page)):
        if field.partition(".")[0] in Job.model_fields and " | " not in value:
            overrides.add(f"{field}={value}")
    yield from (override for override in sorted(overrides) if not fits_a_job(override))


def header_overrides_that_do_not_fit(job: Path) -> Iterator[str]:
    """Yield the lines of a job's header whose overrides it refuses."""
    for line in joined(text_of(job)).splitlines():
        if line.startswith("#") and "--set" in line:
            found = HEADER_OVERRIDE.findall(line)
            values = [key + (quoted or plain) for key, quoted, plain in found]
            try:
                load_job(job, values)
            except JobError as error:
                yield f"{line}: {error}"
            if not values:
                yield line


# Facts of the present state; the changelog also names fields and options of the past.
PRESENT = [unknown_commands_and_options, python_commands_that_fail, missing_fields]
ALL_PAGES = [links_that_lead_nowhere, missing_paths, missing_make_targets]
OF_GUIDES = [invalid_jobs, overrides_that_fit_no_job]
OF_JOBS = [header_overrides_that_do_not_fit]


def rules(page: Path) -> list[Any]:
    if page.suffix == ".py":
        return [python_commands_that_fail]
    if page in HEADERS:
        header = [unknown_commands_and_options, python_commands_that_fail]
        return [*header, *(OF_JOBS if page in JOBS else ())]
    return [
        *ALL_PAGES,
        *(PRESENT if page != CHANGELOG else ()),
        *(OF_GUIDES if page in GUIDES else ()),
    ]


@pytest.mark.parametrize(
    "page", [*PAGES, *HEADERS], ids=lambda page: page.relative_to(ROOT).as_posix()
)
def test_a_page_shows_only_what_exists(page: Path) -> None:
    problems = [f"{rule.__name__}: {problem}" for rule in rules(page) for problem in rule(page)]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("page", MAX_LINES, ids=lambda page: page.stem)
def test_the_entrance_is_short(page: Path) -> None:
    assert len(text_of(page).splitlines()) <= MAX_LINES[page]


def test_the_guides_are_short() -> None:
    guides = [page for page in GUIDES if page != README and page.name not in REFERENCES]
    assert sum(len(text_of(page).splitlines()) for page in guides) <= MAX_GUIDE_LINES


def linked_from(page: Path) -> set[Path]:
    targets = (target.partition("#")[0] for target in LINK.findall(text_of(page)))
    return {(page.parent / target).resolve() for target in targets}


def test_every_page_can_be_reached_from_the_readme() -> None:
    assert set(PAGES) - linked_from(README) - linked_from(INDEX) == {README}
    assert set(PAGES) - set(RESULTS) - linked_from(README) == {README}


def save_untrained(job: Job, run_dir: Path) -> None:
    """Write the checkpoint of a run that has not trained yet."""
    shared = load_shared_data(job.data)
    learner = Learner(LearnerConfig.from_job(job), shared, torch.device("cpu"))
    checkpoints = Checkpoints(run_dir / "checkpoints", job.checkpoint)
    checkpoints.metadata = model_metadata(job.model, job.task, learner.info)
    checkpoints.folder.mkdir(parents=True)
    checkpoints.save(Point(1), learner.state(copy=True), {}, None)


def run_example(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Execute an example whose training is replaced, by saving an untrained network if it is used.

    tests/ray runs the standalone script.
    """
    code = compile(text, "example", "exec")
    if STANDALONE in text:
        return
    jobs: list[Job] = []

    def train(job: Job) -> SimpleNamespace:
        jobs.append(job)
        if "load_model" in text:
            save_untrained(job, folder / "runs/RUN")
        return SimpleNamespace(run_dir="runs/RUN", test_metric=0.9, best_epoch=1, lrs=(0.1,))

    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(raytrain_opt, "run", train, raising=False)
    exec(code, {"__name__": "example"})
    assert bool(jobs) == ("run(" in text), "the example trains nothing"


@pytest.mark.parametrize(
    "page", [page for page in GUIDES if blocks(page, "python")], ids=lambda page: page.stem
)
def test_every_python_example_runs(
    page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    problems = []
    for number, text in enumerate(blocks(page, "python")):
        try:
            run_example(text, tmp_path / str(number), monkeypatch)
        except Exception as error:  # noqa: BLE001 - all examples of the page are reported
            problems.append(f"{text.splitlines()[0]} …: {error!r}")
    assert not problems, "\n".join(problems)


def test_one_example_is_a_standalone_script() -> None:
    scripts = [block for page in GUIDES for block in blocks(page, "python") if STANDALONE in block]
    assert len(scripts) == 1


@pytest.mark.parametrize("page", generated_pages(), ids=lambda page: page.stem)
def test_generated_text_is_up_to_date(page: Path) -> None:
    assert regenerated(text_of(page)) == text_of(page), "run `make docs`"


def test_all_pages_have_one_tagline() -> None:
    tagline = str(cli.main.help)
    metadata = tomllib.loads(text_of(ROOT / "pyproject.toml"))["project"]
    citation = yaml.safe_load(text_of(ROOT / "CITATION.cff"))["title"]
    assert metadata["description"] == tagline
    assert tagline in " ".join(text_of(README).split())
    assert citation.lower() == f"raytrain_opt: {tagline[:-1].lower()}"
