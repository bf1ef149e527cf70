"""What the README shows exists: its jobs, paths, commands and options."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from raytrain_opt import cli
from raytrain_opt.config.load import job_schema, load_job, parse_job
from raytrain_opt.config.schema import Job
from raytrain_opt.errors import JobError

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMAND = re.compile(r"(?:raytrain-opt|-m raytrain_opt) ([a-z-]+)([^`#\n]*)")


def blocks(language: str) -> list[str]:
    """Contents of the fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def commands() -> list[tuple[str, str]]:
    """(subcommand, arguments) of every call of the command line; `\\` joins lines."""
    return COMMAND.findall(re.sub(r"\\\n\s*", "", README))


def repository_paths() -> set[str]:
    """Link targets and bare mentions of files and folders of the repository."""
    prose = re.sub(r"^```.*?^```$", "", README, flags=re.MULTILINE | re.DOTALL)
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", prose)
    mentions = re.findall(r"(?<![\w/.-])((?:jobs|benchmarks|raytrain_opt)/[\w./-]+\w)", README)
    return {*links, *mentions}


def make_targets() -> set[str]:
    return set(re.findall(r"\bmake ([a-z]+)", " ".join(blocks("sh")) + README))


def test_it_has_what_is_checked_here() -> None:
    assert len(blocks("yaml")) >= 4
    assert len(commands()) >= 5
    assert len(repository_paths()) >= 20


@pytest.mark.parametrize("text", blocks("yaml"), ids=lambda text: text.splitlines()[0])
def test_every_job_is_valid(text: str) -> None:
    job = parse_job(text, source="README.md")
    assert job.epochs > 0


@pytest.mark.parametrize("path", sorted(repository_paths()))
def test_every_path_exists(path: str) -> None:
    assert (ROOT / path).exists()


@pytest.mark.parametrize("target", sorted(make_targets()))
def test_every_make_target_exists(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


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


def overrides() -> list[str]:
    return re.findall(r"--set ([\w.]+=[^\s`]+)", README)


def accepts(job: Path, override: str) -> bool:
    try:
        load_job(job, [override])
    except JobError:
        return False
    return True


@pytest.mark.parametrize("override", [text for text in overrides() if text != "a.b=c"])
def test_every_override_fits_a_shipped_job(override: str) -> None:
    assert any(accepts(job, override) for job in (ROOT / "jobs").glob("*.yaml"))


def table_fields() -> list[str]:
    """Names in the first column of the job file's table."""
    table = README.partition("| field | default | meaning |")[2].partition("\n\n")[0]
    return re.findall(r"^\| `([\w.]+)` \|", table, re.MULTILINE)


@pytest.mark.parametrize("field", [name for name in table_fields() if "." in name])
def test_every_field_of_a_section_exists(field: str) -> None:
    sections = job_schema()["$defs"].values()
    assert any(field.partition(".")[2] in section.get("properties", ()) for section in sections)


def test_the_table_names_every_field_of_a_job() -> None:
    assert {field.partition(".")[0] for field in table_fields()} == set(Job.model_fields)


def test_the_python_example_is_one_guarded_script() -> None:
    (example,) = blocks("python")
    compile(example, "README.md", "exec")
    assert '\nif __name__ == "__main__":\n' in example
    assert README.partition("```python\n")[0].endswith("runs this block as it stands -->\n")
