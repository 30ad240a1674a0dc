"""The trainer: its data, its frozen weights, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from recipes_at_work import PLAIN, adapter_state, copied, sd_workload

from labutils.data.loader import EpochOrder, EveryNth
from labutils.recipe import STOCK
from labutils.training import Trainer
from labutils.training.batches import Batches

pytestmark = pytest.mark.usefixtures("single_thread")


@pytest.fixture(scope="module")
def workload():
    return sd_workload()


# ------------------------------------------------------------------------------ batches


@pytest.mark.parametrize("recipe", [STOCK, PLAIN.but(num_workers=2)])
def test_batches_go_through_epoch_after_epoch_in_the_seeds_order(recipe, workload, monkeypatch):
    monkeypatch.setattr(workload, "epoch_length", 18)
    recipe = recipe.but(micro_batch=4, cache="latents+text", seed=5)
    with Trainer(workload, recipe) as trainer:
        known = trainer.dataset.tensors["moments"]
        taken = [next(trainer.batches) for _ in range(9)]
        assert trainer.batches.taken == 9
    rows = []
    for epoch, kept in ((0, 16), (1, 16), (2, 4)):  # the last two of an epoch: a short batch
        order = EpochOrder(16, 18, 5)
        order.go_to(epoch)
        rows += list(order)[:kept]
    assert torch.equal(torch.cat([batch["moments"] for batch in taken]), known[rows])


@pytest.mark.parametrize("count", [1, 3, 4])
def test_ranks_share_the_order_of_one_process(count):
    """Epochs of seven micro-batches, which no number of ranks divides: still every one is
    somebody's, in turn.
    """

    def of(rank: int, ranks: int, taken: int = 0) -> Batches:
        order = EpochOrder(10, 14, seed=3)
        batches = torch.utils.data.BatchSampler(order, 2, drop_last=True)
        chosen = EveryNth(batches, order, ranks)
        loader = torch.utils.data.DataLoader(range(10), batch_sampler=chosen)
        return Batches(loader, 2, order, taken, rank=rank, ranks=ranks)

    single = of(0, 1)
    expected = [next(single).tolist() for _ in range(24)]
    shares = [of(rank, count) for rank in range(count)]
    assert [next(shares[k % count]).tolist() for k in range(24)] == expected
    assert {share.taken for share in shares} == {24}
    assert next(of(count - 1, count, taken=12)).tolist() == expected[12 + count - 1]


# ------------------------------------------------------------------------------ the model


def test_frozen_weights_are_held_once(workload):
    folded = PLAIN.but(adapter="folded")
    with Trainer(workload, PLAIN) as first, Trainer(workload, folded) as second:
        mine, theirs = (
            {p.data_ptr() for p in one.model.parameters() if not p.requires_grad}
            for one in (first, second)
        )
        assert mine == theirs
        trained = {p.data_ptr() for p in first.parameters}
        assert trained.isdisjoint(p.data_ptr() for p in second.parameters)


def test_training_leaves_the_frozen_weights_alone(workload):
    with Trainer(workload, PLAIN) as trainer:
        frozen = [(p, p.clone()) for p in trainer.model.parameters() if not p.requires_grad]
        before = copied(adapter_state(trainer.model.unet))
        trainer.run(2)
        assert all(torch.equal(now, then) for now, then in frozen)
        after = adapter_state(trainer.model.unet)
        assert not any(torch.equal(after[name], before[name]) for name in before if "_B" in name)
