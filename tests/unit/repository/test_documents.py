"""README.md and docs/ show only jobs, paths, commands, options, fields and links that exist."""

from __future__ import annotations

import re
import tomllib
from contextlib import suppress
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
from raytrain_opt.train.checkpoint import Checkpoints
from raytrain_opt.train.learner import Learner
from raytrain_opt.train.learner_config import LearnerConfig
from raytrain_opt.train.trained_model import model_metadata

ROOT = Path(__file__).parents[3]
README = ROOT / "README.md"
GUIDES = [README, *sorted((ROOT / "docs").glob("*.md"))]
PAGES = [
    *GUIDES,
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    ROOT / "benchmarks" / "RESULTS.md",
]
# What shows the present state; the changelog also names fields and options of the past.
CURRENT = [page for page in PAGES if page.name != "CHANGELOG.md"]
# Files that begin with the commands to use them.
HEADERS = [*sorted((ROOT / "jobs").glob("*.yaml")), *sorted((ROOT / "clusters").glob("*.yaml"))]
MAX_README_LINES = 160

COMMAND = re.compile(r"(?:raytrain-opt|-m raytrain_opt) ([a-z][a-z-]*)([^`#\n]*)")
LINK = re.compile(r"\]\((?!https?:)([^)\s]+)\)")
FOLDERS = "jobs|benchmarks|clusters|docs|raytrain_opt|tests"
MENTION = re.compile(rf"(?<![\w/.-])((?:{FOLDERS})/[\w./-]*\w)")
ROOMS = sorted(path.parent.name for path in (ROOT / "raytrain_opt").glob("*/__init__.py"))
MODULE = re.compile(rf"(?<![\w/.-])((?:{'|'.join(ROOMS)})/[\w/]+\.py)")
FIELD = re.compile(r"`([a-z_]+(?:\.[a-z_]+)+)(?:[:=][^`]*)?`")
SETTING = re.compile(r"`([a-z_]+(?:\.[a-z_]+)*): ([^`]+)`")
FILE_SUFFIXES = {"cff", "html", "json", "jsonl", "md", "npy", "pt", "py", "safetensors", "yaml"}
STANDALONE = '\nif __name__ == "__main__":\n'


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(page: Path, language: str) -> list[str]:
    """Return the contents of the fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text_of(page), re.MULTILINE | re.DOTALL)


def prose(page: Path) -> str:
    """Return a page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", text_of(page), flags=re.MULTILINE | re.DOTALL)


def named(page: Path, value: str | list[str]) -> Any:
    """Return a parameter whose name has the page and the first line of the value."""
    title = value.splitlines()[0] if isinstance(value, str) else " ".join(value)
    return pytest.param(page, value, id=f"{page.stem}: {title}")


def each_block(language: str) -> list[Any]:
    return [named(page, block) for page in GUIDES for block in blocks(page, language)]


def joined(text: str) -> str:
    """Return a text with the lines joined that end in `\\`, in comments too."""
    return re.sub(r"\\\n#?\s*", "", text)


def commands() -> list[Any]:
    """Return (subcommand, arguments) of every call of the command line."""
    return [
        pytest.param(name, arguments, id=f"{page.name}: {name}{arguments}")
        for page in [*CURRENT, *HEADERS]
        for name, arguments in COMMAND.findall(joined(text_of(page)))
    ]


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    titles = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    plain = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title) for title in titles)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in plain}


def links() -> list[Any]:
    return [named(page, target) for page in PAGES for target in LINK.findall(prose(page))]


def mentions(pattern: re.Pattern[str]) -> list[Any]:
    """Return every path of the repository that a page names, once."""
    return [
        named(page, path) for page in PAGES for path in sorted(set(pattern.findall(text_of(page))))
    ]


def test_pages_have_what_is_checked_here() -> None:
    assert len(each_block("yaml")) >= 10
    assert len(each_block("python")) >= 5
    assert len(commands()) >= 20
    assert len(links()) >= 50


def test_the_readme_is_short() -> None:
    assert len(text_of(README).splitlines()) <= MAX_README_LINES


def test_every_page_of_the_documentation_can_be_reached_from_the_readme() -> None:
    targets = {target.partition("#")[0] for target in LINK.findall(text_of(README))}
    pages = {page.relative_to(ROOT).as_posix() for page in PAGES}
    assert pages - targets == {"README.md"}


@pytest.mark.parametrize(("page", "target"), links())
def test_every_link_resolves(page: Path, target: str) -> None:
    path, _, anchor = target.partition("#")
    file = (page.parent / path).resolve() if path else page
    assert file.exists()
    assert not anchor or anchor in anchors(file)


@pytest.mark.parametrize(("page", "path"), mentions(MENTION))
def test_every_path_exists(page: Path, path: str) -> None:
    assert (ROOT / path).exists()


@pytest.mark.parametrize(("page", "path"), mentions(MODULE))
def test_every_module_exists(page: Path, path: str) -> None:
    assert (ROOT / "raytrain_opt" / path).exists()


@pytest.mark.parametrize(("page", "text"), each_block("yaml"))
def test_every_job_is_valid(page: Path, text: str) -> None:
    assert parse_job(text, source=page.name).name


def make_targets() -> set[str]:
    text = "".join(text_of(page) for page in PAGES)
    shown = re.findall(r"(?:^|`|&& )make ((?:[a-z-]+ ?)+)", text, re.MULTILINE)
    return {target for line in shown for target in line.split()}


def test_every_make_target_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", text_of(ROOT / "Makefile"), re.MULTILINE))
    assert {"install", "quickstart", "test", "docs"} <= make_targets() <= targets


@pytest.mark.parametrize(("name", "arguments"), commands())
def test_every_command_and_option_exists(name: str, arguments: str) -> None:
    command = cli.main.commands[name]
    options = {
        text
        for parameter in command.params
        if isinstance(parameter, click.Option)
        for text in parameter.opts
    }
    assert set(re.findall(r"(?<!\S)--[a-z-]+", arguments)) <= options


def python_commands() -> list[Any]:
    """Return (-m, name) of every `python FILE` and `python -m MODULE` that is shown."""
    files = [*CURRENT, *HEADERS, *sorted((ROOT / "jobs").glob("*.py"))]
    pattern = re.compile(r"\bpython3? (-m )?([\w./]+)")
    shown = {command for path in files for command in pattern.findall(text_of(path))}
    return [
        pytest.param(*command, id="".join(command))
        for command in sorted(shown)
        if command[0] or command[1].endswith(".py")
    ]


@pytest.mark.parametrize(("option", "name"), python_commands())
def test_every_python_command_finds_its_modules(option: str, name: str) -> None:
    if option:  # Python finds the packages of the current directory
        assert find_spec(name)
        return
    imports = re.findall(r"^ *(?:from|import) (\w+)", text_of(ROOT / name), re.MULTILINE)
    assert not set(imports) & {"benchmarks", "docs", "jobs", "tests"}


def overrides() -> list[str]:
    """Return every override but the placeholder of the synopsis."""
    text = "".join(text_of(page) for page in GUIDES)
    values = re.findall(r"--set ([\w.]+=[^\s`\"]+)", text)
    return [override for override in values if override != "a.b=c"]


def fits_a_job(override: str) -> bool:
    """Return whether a shipped job, or one that a page shows, accepts the override."""
    shipped = [text_of(path) for path in HEADERS if path.parent.name == "jobs"]
    shown = [block for page in GUIDES for block in blocks(page, "yaml")]
    for text in shipped + shown:
        with suppress(JobError):
            parse_job(text, overrides=[override])
            return True
    return False


@pytest.mark.parametrize("override", overrides())
def test_every_override_fits_a_job(override: str) -> None:
    assert fits_a_job(override)


def settings() -> list[Any]:
    """Return every `field: value` or `section.field: value` of a job in the prose."""
    return [
        named(page, f"{field}={value}")
        for page in GUIDES
        for field, value in sorted(set(SETTING.findall(prose(page))))
        if field.partition(".")[0] in Job.model_fields and " | " not in value
    ]


@pytest.mark.parametrize(("page", "override"), settings())
def test_every_setting_in_the_prose_fits_a_job(page: Path, override: str) -> None:
    assert fits_a_job(override)


def header_overrides() -> list[Any]:
    """Return (job, overrides) of every line of a job's header that has overrides."""
    pattern = re.compile(r"--set ([\w.]+=)(?:'([^']*)'|(\S+?),?(?=\s|$))")
    return [
        named(page, [key + (quoted or plain) for key, quoted, plain in pattern.findall(line)])
        for page in HEADERS
        if page.parent.name == "jobs"
        for line in joined(text_of(page)).splitlines()
        if line.startswith("#") and "--set" in line
    ]


@pytest.mark.parametrize(("job", "values"), header_overrides())
def test_every_override_in_the_header_of_a_job_fits_it(job: Path, values: list[str]) -> None:
    assert values
    assert load_job(job, values).name


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


JOB_SCHEMA = job_schema()


def job_fields() -> list[Any]:
    """Return every field of a job that a page names as `section.field`."""
    return [
        named(page, field)
        for page in CURRENT
        for field in sorted(set(FIELD.findall(prose(page))))
        if field.partition(".")[0] in Job.model_fields
        and field.rpartition(".")[2] not in FILE_SUFFIXES
    ]


@pytest.mark.parametrize(("page", "field"), job_fields())
def test_every_field_of_a_job_exists(page: Path, field: str) -> None:
    section, *rest = field.split(".")
    schema = JOB_SCHEMA
    assert set(rest) <= fields_below(schema["properties"][section], schema["$defs"])


def save_untrained(job: Job, run_dir: Path) -> None:
    """Write the checkpoint of a run that has not trained yet."""
    shared = load_shared_data(job.data)
    learner = Learner(LearnerConfig.from_job(job), shared, torch.device("cpu"))
    checkpoints = Checkpoints(run_dir / "checkpoints", job.checkpoint)
    checkpoints.metadata = model_metadata(job.model, job.task, learner.info)
    checkpoints.folder.mkdir(parents=True)
    checkpoints.save(1, learner.state(copy=True), {}, None)


@pytest.mark.parametrize(("page", "text"), each_block("python"))
def test_every_python_example_runs(
    page: Path, text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Training itself is replaced, for examples that use its network by saving an untrained one.

    tests/ray runs the standalone script.
    """
    code = compile(text, page.name, "exec")
    if STANDALONE in text:
        return
    jobs: list[Job] = []

    def train(job: Job) -> SimpleNamespace:
        jobs.append(job)
        if "load_model" in text:
            save_untrained(job, tmp_path / "runs/RUN")
        return SimpleNamespace(run_dir="runs/RUN", test_metric=0.9, best_epoch=1, lrs=(0.1,))

    monkeypatch.setattr(raytrain_opt, "run", train, raising=False)
    monkeypatch.chdir(tmp_path)
    exec(code, {"__name__": "example"})
    assert bool(jobs) == ("run(" in text)


def test_one_example_is_a_standalone_script() -> None:
    scripts = [block for page in GUIDES for block in blocks(page, "python") if STANDALONE in block]
    assert len(scripts) == 1


@pytest.mark.parametrize("page", generated_pages(), ids=lambda page: page.stem)
def test_generated_text_is_up_to_date(page: Path) -> None:
    assert regenerated(text_of(page)) == text_of(page), "run `make docs`"


def test_the_job_file_and_the_records_are_generated() -> None:
    assert {page.stem for page in generated_pages()} == {"job-file", "run-directory"}


def test_the_reference_names_every_field_of_a_job() -> None:
    reference = text_of(ROOT / "docs" / "job-file.md")
    missing = [field for field in Job.model_fields if f"`{field}" not in reference]
    assert missing == []


def test_all_pages_have_one_tagline() -> None:
    tagline = str(cli.main.help)
    metadata = tomllib.loads(text_of(ROOT / "pyproject.toml"))["project"]
    citation = yaml.safe_load(text_of(ROOT / "CITATION.cff"))["title"]
    assert metadata["description"] == tagline
    assert tagline in " ".join(text_of(README).split())
    assert citation.lower() == f"raytrain_opt: {tagline[:-1].lower()}"


def test_the_citation_is_complete() -> None:
    citation = yaml.safe_load(text_of(ROOT / "CITATION.cff"))
    assert citation["version"] == raytrain_opt.__version__
    assert {"cff-version", "message", "title", "authors", "license"} <= set(citation)
