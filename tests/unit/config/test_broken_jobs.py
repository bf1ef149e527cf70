"""Every way a job file can be wrong: the place and the rule are named, in the file's own words."""

from __future__ import annotations

import pytest

from raytrain_opt.config.load import parse_job
from raytrain_opt.errors import JobError, Problem

GOOD = {
    "model": "model: resnet8",
    "data": "data: digits",
    "epochs": "epochs: 2",
    "global_batch_size": "global_batch_size: 8",
}
STPT = "learning_rate: {policy: stpt, "
SCHEDULE = "learning_rate: {policy: schedule, "
CIFAR = "data: {name: cifar10, "
FOLDER = "data: {name: image_folder, root: x, "

# What replaces or joins the good job, the path of its one problem, words of the message.
BROKEN = [
    # missing and unknown keys
    ("model: ", "model", "must be a section"),
    ("data: ", "data", "must be a section"),
    ("data: {root: x}", "data.name", "is required; one of digits"),
    ("data: {name: arrays, test: [a, b]}", "data.train", "is required"),
    ("data: {name: arrays, train: [a], test: [a, b]}", "data.train.1", "is required"),
    ("epoch: 3", "epoch", "did you mean 'epochs'?"),
    ("batch_size: 3", "batch_size", "did you mean 'global_batch_size'?"),
    ("gpus: 3", "gpus", "valid here: name, model, data"),
    ("model: {name: resnet8, arg: {}}", "model.arg", "did you mean 'args'?"),
    (CIFAR + "rot: x}", "data.rot", "did you mean 'root'?"),
    (CIFAR + "augment: {flips: true}}", "data.augment.flips", "did you mean 'flip'?"),
    (CIFAR + "augment: {mirror: true}}", "data.augment.mirror", "here: crop_padding, flip"),
    (CIFAR + "image_size: 3}", "data.image_size", "normalize, name, root, download, augment"),
    (STPT + "gamma: 3}", "learning_rate.gamma", "valid here: policy, combine, "),
    (STPT + "warmup: {epoch: 1}}", "learning_rate.warmup.epoch", "did you mean 'epochs'?"),
    (SCHEDULE + "candidates: mix}", "learning_rate.candidates", "is not a known key"),
    ("limits: {start: 3}", "limits.start", "did you mean 'start_s'?"),
    ("3: 4", "3", "its key must be text"),
    (FOLDER + "5: 4}", "data.5", "its key must be text"),
    ("workers: {resources: {3: 1}}", "workers.resources.3", "its key must be text"),
    # kinds of values
    ("epochs: two", "epochs", "must be a whole number (given: 'two')"),
    ("epochs: 1.5", "epochs", "must be a whole number (given: 1.5)"),
    ("epochs: yes", "epochs", "must be a number (given: True)"),
    (STPT + "include: [1.0, yes]}", "learning_rate.include.1", "must be a number (given: True)"),
    ("epochs: [1]", "epochs", "must be a whole number"),
    ("model: 3", "model", "must be a section"),
    ("model: {name: 3}", "model.name", "must be text or a function (given: 3)"),
    ("model: {name: resnet8, args: [1]}", "model.args", "must be a section"),
    ("workers: 4", "workers", "must be a section (keys and values) (given: 4)"),
    ("workers: {resources: {GPU: most}}", "workers.resources.GPU", "must be a number"),
    ("compile: perhaps", "compile", "must be true or false (given: 'perhaps')"),
    ("storage_path: 3", "storage_path", "must be text (given: 3)"),
    (STPT + "include: 1.0}", "learning_rate.include", "must be a list (given: 1.0)"),
    ("learning_rate: stpt", "learning_rate", "with the key policy (given: 'stpt')"),
    # ranges
    ("epochs: 0", "epochs", "must be more than 0 (given: 0)"),
    ("seed: -1", "seed", "must be at least 0 (given: -1)"),
    (f"seed: '{'9' * 5000}'", "seed", "must be a whole number of fewer digits"),
    ("loss: {label_smoothing: 1}", "loss.label_smoothing", "must be less than 1 (given: 1)"),
    ("loss: {label_smoothing: .nan}", "loss.label_smoothing", "(given: nan)"),
    (STPT + "initial: .inf}", "learning_rate.initial", "must be a finite number"),
    (STPT + "include: [1, 0]}", "learning_rate.include.1", "must be more than 0 (given: 0)"),
    ("data: {name: arrays, train: [a, b, c], test: [a, b]}", "data.train", "at most 2 entries"),
    ("name: a b", "name", "must be text of the form ^[A-Za-z0-9]"),
    (f"name: {'n' * 101}", "name", "must be at most 100 characters long"),
    ("limits: {stop_s: 0}", "limits.stop_s", "must be more than 0"),
    # choices
    ("precision: fp8", "precision", "must be one of fp32, bf16, fp16 (given: 'fp8')"),
    (FOLDER + "corrupt: skp}", "data.corrupt", "one of error, skip (given: 'skp'); did you"),
    ("learning_rate: {policy: stp}", "learning_rate.policy", "did you mean 'stpt'?"),
    ("learning_rate: {policy: 3}", "learning_rate.policy", "one of stpt, schedule, replay"),
    ("learning_rate: {initial: 1}", "learning_rate.policy", "is required; one of stpt, schedule"),
    (SCHEDULE + "shape: cosin}", "learning_rate.shape", "did you mean 'cosine'?"),
    ("data: cifar11", "data.name", "did you mean 'cifar10'?"),
    ("data: {name: cifar_10, root: x}", "data.name", "must be one of digits, mnist"),
    # unions: one problem, whichever alternative was meant
    (STPT + "alpha: 1.5}", "learning_rate.alpha", "a whole number or at most 1 (given: 1.5)"),
    (STPT + "alpha: -3}", "learning_rate.alpha", "must be more than 0 (given: -3)"),
    (STPT + "alpha: few}", "learning_rate.alpha", "must be a number (given: 'few')"),
    (STPT + "candidates: narow}", "learning_rate.candidates", "list (given: 'narow'); did you"),
    (STPT + "candidates: [1, -2]}", "learning_rate.candidates.1", "must be more than 0"),
    (STPT + "candidates: []}", "learning_rate.candidates", "at least one multiplier"),
    (STPT + "candidates: [2, 2]}", "learning_rate.candidates", "each once (given: [2, 2])"),
    (CIFAR + "normalize: atuo}", "data.normalize", "did you mean 'auto'?"),
    (CIFAR + "normalize: [[1], [a]]}", "data.normalize.1.0", "must be a number (given: 'a')"),
    ("workers: {use_gpu: maybe}", "workers.use_gpu", "must be true or false or auto"),
    ("checkpoint: {keep: al}", "checkpoint.keep", "a whole number or all (given: 'al'); did you"),
    # rules over several fields
    (
        "workers: {count: 3}",
        "global_batch_size",
        "does not split evenly over 3 workers (given: 8)",
    ),
    (STPT + "warmup: {epochs: 3}}", "learning_rate.warmup.epochs", "more than the 2 epochs"),
    ("data: {name: digits, selection_fraction: 0}", "data.selection_fraction", "(given: 0)"),
    (SCHEDULE + "shape: multistep}", "learning_rate", "milestones go with shape multistep"),
    (SCHEDULE + "shape: multistep, milestones: [2, 1]}", "learning_rate", "must increase"),
    ("loss: {name: 'a:b', label_smoothing: 0.1}", "loss", "belongs to cross_entropy"),
    ("optimizer: {args: {lr: 1}}", "optimizer.args", "use learning_rate.initial"),
]


def problems(*lines: str) -> list[Problem]:
    """What is wrong with the good job after these lines replaced or joined its own."""
    written = {line.partition(":")[0]: line for line in lines}
    with pytest.raises(JobError) as caught:
        parse_job("\n".join({**GOOD, **written}.values()))
    return caught.value.problems


@pytest.mark.parametrize(("line", "path", "words"), BROKEN)
def test_one_mistake_is_one_problem(line: str, path: str, words: str) -> None:
    (problem,) = problems(line)
    assert problem.path == path
    assert words in str(problem)


@pytest.mark.parametrize("key", GOOD)
def test_a_missing_key_is_named(key: str) -> None:
    lines = [line for name, line in GOOD.items() if name != key]
    with pytest.raises(JobError) as caught:
        parse_job("\n".join(lines))
    assert [str(problem) for problem in caught.value.problems] == [f"{key}: is required"]


def test_all_mistakes_are_reported_at_once() -> None:
    found = problems(
        "epochs: 0",
        "data: {name: cifar10, rot: x, normalize: atuo}",
        STPT + "alpha: 2.5, candidates: narow}",
        "workers: {count: none, use_gpu: maybe}",
        "sead: 1",
    )
    assert {problem.path for problem in found} == {
        "epochs",
        "data.rot",
        "data.normalize",
        "learning_rate.alpha",
        "learning_rate.candidates",
        "workers.count",
        "workers.use_gpu",
        "sead",
    }
    assert len(found) == 8


def test_an_unknown_data_set_hides_no_problem_elsewhere() -> None:
    found = problems("data: {name: cifra10, root: x}", "epochs: 0")
    assert [problem.path for problem in found] == ["epochs", "data.name"]


def test_every_entry_of_a_list_is_judged() -> None:
    found = problems(STPT + "candidates: [1, -2, x, 0]}")
    assert [problem.path.rsplit(".", 1)[1] for problem in found] == ["1", "2", "3"]


def test_long_values_are_cut() -> None:
    (problem,) = problems(f"precision: {'x' * 500}")
    assert problem.value is not None
    assert len(problem.value) == 80


def test_the_message_counts_and_names_the_source() -> None:
    with pytest.raises(JobError) as caught:
        parse_job({"model": "resnet8"}, source="my.yaml")
    assert str(caught.value).startswith("my.yaml: 3 problems\n  data: is required\n")
    assert caught.value.exit_code == 2
