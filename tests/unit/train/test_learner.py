"""Training and evaluation of one process, against what the same steps give by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from raytrain_opt.config.schema import Job
from raytrain_opt.data.array_sets import Arrays
from raytrain_opt.train.learner import Learner, Shares, reduce_sums

CPU = torch.device("cpu")
LRS = (0.1, 0.05, 0.02)
RAMP = [{"epoch": 2, "factor": 2}]
SIZE, TEST_SIZE, CLASSES = 80, 37, 7


def plain_net(num_classes: int, sample_shape: tuple[int, ...]) -> nn.Module:
    """Without batch normalisation, so that the mean over shares is the mean over the batch."""
    features = 4 * sample_shape[1] * sample_shape[2]
    return nn.Sequential(
        nn.Conv2d(sample_shape[0], 4, 3, padding=1),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(features, num_classes),
    )


def net_with_norm(num_classes: int, sample_shape: tuple[int, ...]) -> nn.Module:
    net = plain_net(num_classes, sample_shape)
    assert isinstance(net, nn.Sequential)
    return nn.Sequential(net[0], nn.BatchNorm2d(4), nn.Dropout(0.3), *net[1:])


def two_classes(num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, num_classes))


@cache
def arrays(classes: int = CLASSES) -> Arrays:
    """Random greyscale images of 4 x 4."""
    random = np.random.default_rng(0)
    x = random.integers(0, 256, (SIZE + TEST_SIZE, 4, 4, 1), dtype=np.uint8)
    y = random.integers(0, classes, SIZE + TEST_SIZE)
    return Arrays(x[:SIZE], y[:SIZE], x[SIZE:], y[SIZE:], classes)


def learner(
    model: Any = plain_net, data: Arrays | None = None, workers: int = 1, **job: Any
) -> Learner:
    made = Job.model_validate(
        {
            "model": model,
            "data": {"name": "digits", "augment": {"crop_padding": 1, "flip": True}},
            "epochs": 2,
            "global_batch_size": 16,
            "workers": {"count": workers},
            **job,
        }
    )
    return Learner(made, data or arrays(), CPU)


def shares(count: int) -> Shares:
    return Shares(range(count), count)


def weights(trained: Learner) -> list[Tensor]:
    return [p.detach().clone() for p in trained.model.parameters()]


def assert_close(a: Sequence[Tensor], b: Sequence[Tensor]) -> None:
    for left, right in zip(a, b, strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=1e-6)


# Training.


@pytest.mark.parametrize("count", [2, 4, 8])
def test_several_shares_are_one_update_of_the_whole_batch(count: int) -> None:
    whole, shared = learner(), learner()
    start = weights(whole)
    a = whole.train(1, 0, LRS, shares(1))
    b = shared.train(1, 0, LRS, shares(count))
    assert_close(weights(whole), weights(shared))
    assert (start[0] - weights(whole)[0]).abs().max() > 1e-3
    assert a.samples == b.samples == 3 * 16
    assert a.loss == pytest.approx(b.loss)
    assert a.correct == b.correct


def by_hand(count: int, lrs: Sequence[float]) -> list[Tensor]:
    """SGD with momentum and weight decay, written out; the mean of the shares' gradients."""
    held = learner()
    parameters = list(held.model.parameters())
    velocity = [torch.zeros_like(p) for p in parameters]
    for step, lr in enumerate(lrs):
        gradients = [torch.zeros_like(p) for p in parameters]
        for batch in held.data.train(1, range(step, step + 1), range(count), count, 16):
            loss = nn.functional.cross_entropy(held.model(batch.x), batch.y)
            for total, gradient in zip(
                gradients, torch.autograd.grad(loss, parameters), strict=True
            ):
                total += gradient / count
        with torch.no_grad():
            for p, v, g in zip(parameters, velocity, gradients, strict=True):
                v.mul_(0.9).add_(g + 1e-4 * p)
                p.sub_(lr * v)
    return weights(held)


@pytest.mark.parametrize("count", [1, 4])
def test_training_is_what_the_definition_gives(count: int) -> None:
    trained = learner()
    trained.train(1, 0, LRS, shares(count))
    assert_close(weights(trained), by_hand(count, LRS))


@pytest.mark.parametrize(("count", "world_size"), [(4, 4), (4, 3), (4, 1), (7, 3), (8, 5)])
def test_the_shares_of_all_workers_are_all_shares_and_weigh_the_same(
    count: int, world_size: int
) -> None:
    of_all = [Shares.of_rank(rank, world_size, count) for rank in range(world_size)]
    assert [share for each in of_all for share in each.mine] == list(range(count))
    assert max(len(each.mine) for each in of_all) - min(len(each.mine) for each in of_all) <= 1
    # The mean over the workers of each one's sum, divided: 1 / count for every share.
    assert [each.divided_by * world_size for each in of_all] == [pytest.approx(count)] * world_size
    cut = of_all[0].cut(2)
    assert (len(cut.mine), cut.count) == (2 * len(of_all[0].mine), 2 * count)
    assert cut.divided_by == 2 * of_all[0].divided_by


def test_shares_of_several_processes_see_the_whole_batch_together() -> None:
    """What a worker is given is its part of what a candidate is given."""
    parts = [learner().train(1, 0, (0.0,), Shares(range(i, i + 1), 2)) for i in range(2)]
    whole = learner().train(1, 0, (0.0,), shares(2))
    assert sum(part.samples for part in parts) == whole.samples == 16
    assert sum(part.loss_sum for part in parts) == pytest.approx(whole.loss_sum)
    assert sum(part.correct for part in parts) == whole.correct


@pytest.mark.parametrize("ramp_by", ["accumulation", "worker"])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_ramp_trains_at_the_larger_batch_from_its_epoch_on(ramp_by: str, workers: int) -> None:
    ramped = learner(workers=workers, batch_ramp=RAMP, ramp_by=ramp_by)
    before, after = learner(workers=workers), learner(workers=workers, global_batch_size=32)
    ramped.train(1, 0, LRS, shares(workers))
    before.train(1, 0, LRS, shares(workers))
    assert_close(weights(ramped), weights(before))
    after.load(before.state(copy=True))
    totals = ramped.train(2, 0, LRS[:2], shares(workers))
    after.train(2, 0, LRS[:2], shares(workers))
    assert_close(weights(ramped), weights(after))
    assert (totals.steps, totals.samples) == (2, 64)


def test_a_phase_can_be_cut_anywhere() -> None:
    whole, cut = learner(), learner()
    whole.train(1, 0, LRS, shares(2))
    cut.train(1, 0, LRS[:1], shares(2))
    cut.train(1, 1, LRS[1:], shares(2))
    assert whole.state(copy=True).digest() == cut.state(copy=True).digest()


@pytest.mark.parametrize(
    "job",
    [
        {},
        {"precision": "bf16"},
        {"precision": "fp16"},
        {"optimizer": {"name": "AdamW"}},
        {"channels_last": False},
    ],
    ids=str,
)
def test_a_phase_from_the_same_state_repeats_bit_by_bit(job: dict[str, Any]) -> None:
    """Whatever ran before, dropout included; also in another process's learner."""
    first, second = learner(net_with_norm, **job), learner(net_with_norm, **job)
    first.train(1, 0, LRS, shares(2))
    start = first.state(copy=True)
    totals = first.train(1, 2, LRS[:2], shares(2))
    reached = first.state(copy=True).digest()
    first.train(2, 0, LRS, shares(1))
    torch.manual_seed(99)
    for other in (first, second):
        other.load(start)
        again = other.train(1, 2, LRS[:2], shares(2))
        assert other.state(copy=True).digest() == reached != start.digest()
        assert (again.loss_sum, again.correct) == (totals.loss_sum, totals.correct)


@pytest.mark.parametrize("change", [{"epoch": 2}, {"first_step": 1}, {"lr": 0.2}])
def test_other_steps_give_another_result(change: dict[str, Any]) -> None:
    at = {"epoch": 1, "first_step": 0, "lr": 0.1}
    reached = set()
    for given in (at, {**at, **change}):
        trained = learner()
        trained.train(given["epoch"], given["first_step"], (given["lr"],), shares(1))
        reached.add(trained.state(copy=True).digest())
    assert len(reached) == 2


def test_seeds_make_different_weights_and_equal_seeds_equal_ones() -> None:
    digests = [learner(seed=seed).state(copy=True).digest() for seed in (0, 0, 1)]
    assert digests[0] == digests[1] != digests[2]


def test_each_step_has_its_rate() -> None:
    """Without momentum, a step at rate 0 changes nothing."""
    job = {"optimizer": {"name": "SGD", "args": {"momentum": 0.0}}}
    one, three = learner(**job), learner(**job)
    one.train(1, 1, (0.1,), shares(1))
    three.train(1, 0, (0.0, 0.1, 0.0), shares(1))
    assert_close(weights(one), weights(three))


def test_a_factor_of_the_weight_decay_is_that_weight_decay() -> None:
    def trained(weight_decay: float, decay: float) -> list[Tensor]:
        args = {"momentum": 0.9, "weight_decay": weight_decay}
        made = learner(optimizer={"name": "SGD", "args": args})
        made.train(1, 0, LRS, shares(1), decay=decay)
        return weights(made)

    assert_close(trained(0.01, 10.0), trained(0.1, 1.0))
    assert not torch.equal(trained(0.01, 10.0)[0], trained(0.01, 1.0)[0])


def test_a_factor_of_the_weight_decay_lasts_for_its_phase_and_spares_what_is_excluded() -> None:
    made = learner(net_with_norm, optimizer={"name": "LARS", "args": {"weight_decay": 0.01}})
    start = made.state(copy=True)

    def decays() -> list[float]:
        return [group["weight_decay"] for group in made.optimizer.param_groups]

    own = decays()
    assert 0.0 in own
    made.train(1, 0, LRS, shares(1), decay=10.0)
    high = made.state(copy=True)
    assert decays() == pytest.approx([10 * each for each in own])
    made.load(start)
    made.train(1, 0, LRS, shares(1))
    assert decays() == own
    made.load(high)
    made.train(1, 0, LRS, shares(1))
    assert decays() == own


def test_no_steps_change_nothing() -> None:
    trained = learner()
    before = trained.state(copy=True).digest()
    totals = trained.train(1, 3, (), shares(2))
    assert trained.state(copy=True).digest() == before
    assert (totals.steps, totals.samples, totals.loss) == (0, 0, 0.0)


def test_on_step_hears_of_every_step_before_it_and_may_stop() -> None:
    heard: list[int] = []

    def on_step(done: int) -> None:
        heard.append(done)
        if done == 2:
            raise InterruptedError

    trained, two_steps = learner(), learner()
    with pytest.raises(InterruptedError):
        trained.train(1, 0, LRS, shares(1), on_step)
    assert heard == [0, 1, 2]
    two_steps.train(1, 0, LRS[:2], shares(1))
    assert_close(weights(trained), weights(two_steps))


def test_totals_are_sums_over_the_samples() -> None:
    trained = learner()
    totals = trained.train(1, 0, (0.0, 0.0), shares(2))
    held = learner()
    held.model.train()
    loss_sum, correct = 0.0, 0
    for batch in held.data.train(1, range(2), range(1), 1, 16):
        output = held.model(batch.x)
        loss_sum += nn.functional.cross_entropy(output, batch.y, reduction="sum").item()
        correct += int((output.argmax(1) == batch.y).sum())
    assert totals.loss == pytest.approx(loss_sum / 32)
    assert (totals.steps, totals.samples, totals.correct) == (2, 32, correct)
    assert totals.accuracy == correct / 32
    assert totals.seconds >= totals.data_wait_s >= 0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_shows(bad: float) -> None:
    trained = learner()
    with torch.no_grad():
        trained.model[3].bias[0] = bad  # type: ignore[index]
    assert not math.isfinite(trained.train(1, 0, (0.1,), shares(2)).loss)
    assert not math.isfinite(trained.evaluate("selection").loss)


def test_a_rate_far_too_large_diverges() -> None:
    trained = learner()
    totals = trained.train(1, 0, (1e30,) * 4, shares(1))
    assert not math.isfinite(totals.loss)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_trains_close_to_full(precision: str) -> None:
    full, mixed = learner(), learner(precision=precision)
    seen: list[torch.dtype] = []
    mixed.model[0].register_forward_hook(  # type: ignore[index]
        lambda _module, _inputs, output: seen.append(output.dtype)
    )
    a, b = (t.train(1, 0, LRS, shares(2)) for t in (full, mixed))
    assert set(seen) == {torch.bfloat16 if precision == "bf16" else torch.float16}
    assert b.loss == pytest.approx(a.loss, rel=0.02)
    assert {p.dtype for p in mixed.model.parameters()} == {torch.float32}
    for left, right in zip(weights(full), weights(mixed), strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=0.02)
    assert mixed.scaler.is_enabled() == (precision == "fp16")


def test_channels_last_changes_the_order_in_memory_only() -> None:
    last, first = learner(channels_last=True), learner(channels_last=False)
    a, b = (t.train(1, 0, LRS, shares(2)) for t in (last, first))
    assert a.loss == pytest.approx(b.loss)
    assert_close(weights(last), weights(first))


# Evaluation.


def counted_by_hand(trained: Learner, x: Tensor, y: Tensor) -> tuple[float, int, int]:
    """Sum of losses, hits of the first guess, hits among the best five; sample by sample."""
    trained.model.eval()
    losses, top1, top5 = 0.0, 0, 0
    with torch.no_grad():
        for sample, label in zip(x, y, strict=True):
            scores = trained.model(sample[None])[0]
            losses -= float(scores.log_softmax(0)[label])
            better = int((scores > scores[label]).sum())
            top1 += better < 1
            top5 += better < 5
    return losses, top1, top5


@pytest.mark.parametrize("batch_size", [1, 8, 37, None])
def test_evaluation_counts_every_test_sample_once(batch_size: int | None) -> None:
    trained = learner(net_with_norm, evaluate={"batch_size_per_worker": batch_size})
    trained.train(1, 0, LRS, shares(1))
    totals = trained.evaluate("test")
    [batch] = trained.data.evaluate("test", 0, 1, 100)
    assert np.array_equal(batch.y.numpy(), arrays().test_y)
    losses, top1, top5 = counted_by_hand(trained, batch.x, batch.y)
    assert (totals.samples, totals.correct, totals.correct_top5) == (TEST_SIZE, top1, top5)
    assert totals.loss == pytest.approx(losses / TEST_SIZE, rel=1e-5)
    assert 0 < top1 < top5 < TEST_SIZE
    assert (totals.accuracy, totals.top5) == (top1 / TEST_SIZE, top5 / TEST_SIZE)


@pytest.mark.parametrize("world_size", [2, 3, 5, 37, 40])
@pytest.mark.parametrize("split", ["test", "selection"])
def test_the_parts_of_all_ranks_are_the_whole(world_size: int, split: Any) -> None:
    trained = learner()
    whole = trained.evaluate(split)
    parts = [trained.evaluate(split, rank, world_size) for rank in range(world_size)]
    assert sum(part.samples for part in parts) == whole.samples
    assert sum(part.correct for part in parts) == whole.correct
    assert sum(part.correct_top5 for part in parts) == whole.correct_top5
    assert sum(part.loss_sum for part in parts) == pytest.approx(whole.loss_sum)


def test_statistics_are_taken_anew_from_training_batches() -> None:
    made = learner(net_with_norm, batch_norm={"recalibrate_batches": 2}, batch_ramp=RAMP)
    made.train(2, 0, LRS[:1], shares(1))
    made.settle_statistics()
    convolution, norm = made.model[0], made.model[1]  # type: ignore[index]
    batches = made.data.train(2, range(2), range(2), 2, 32)
    means = [convolution(next(batches).x).mean((0, 2, 3)) for _ in range(2)]
    assert_close([norm.running_mean], [torch.stack(means).mean(0)])
    assert norm.momentum == 0.1


def test_blocks_tell_the_loss_of_the_same_samples_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raytrain_opt.train.learner.BLOCK", 3)
    made = learner()
    whole = made.evaluate("selection", blocks=True)
    sizes = [3, 3, 2]
    assert whole.samples == sum(sizes)
    assert len(whole.block_losses) == len(sizes)
    weighted = sum(n * loss for n, loss in zip(sizes, whole.block_losses, strict=True))
    assert weighted == pytest.approx(whole.loss_sum)
    assert made.evaluate("selection").block_losses == ()


def test_the_selection_split_is_not_the_test_set() -> None:
    trained = learner()
    assert trained.evaluate("selection").samples == trained.info.selection_size == 8
    assert trained.info.train_size == SIZE - 8


def test_with_fewer_than_five_classes_every_label_is_among_the_best() -> None:
    totals = learner(two_classes, data=arrays(2)).evaluate("test")
    assert totals.correct < totals.correct_top5 == TEST_SIZE


def test_evaluation_changes_nothing() -> None:
    trained, other = learner(net_with_norm), learner(net_with_norm)
    before = trained.state(copy=True).digest()
    trained.evaluate("test")
    assert trained.state(copy=True).digest() == before
    trained.train(1, 0, LRS, shares(1))
    other.train(1, 0, LRS, shares(1))
    assert trained.state(copy=True).digest() == other.state(copy=True).digest()


def test_evaluation_tells_how_far_it_is() -> None:
    heard: list[tuple[int, int]] = []
    trained = learner(evaluate={"batch_size_per_worker": 10})
    trained.evaluate("test", on_step=lambda done, total: heard.append((done, total)))
    assert heard == [(0, 4), (1, 4), (2, 4), (3, 4)]


def test_sums_of_one_process_are_its_own() -> None:
    assert reduce_sums([1.5, 2.0], CPU) == [1.5, 2.0]


def test_arrays_that_cannot_be_written_to_will_do() -> None:
    """As Ray's object store gives them."""
    shared = arrays()
    frozen = {}
    for name in ("train_x", "train_y", "test_x", "test_y"):
        frozen[name] = getattr(shared, name).copy()
        frozen[name].flags.writeable = False
    totals = [
        learner(data=d).train(1, 0, LRS, shares(2)) for d in (replace(shared, **frozen), shared)
    ]
    assert totals[0].loss_sum == totals[1].loss_sum
