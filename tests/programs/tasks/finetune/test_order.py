"""Every example is in one batch of an epoch, and in one micro-batch of one replica."""

from hypothesis import given
from hypothesis import strategies as st

from tasks.finetune.order import batches_of_epoch, num_batches, share_of_replica


@given(st.integers(1, 60), st.integers(1, 20), st.integers(0, 5))
def test_an_epoch_has_every_example_once(count: int, size: int, epoch: int) -> None:
    batches = batches_of_epoch(count, batch_size=size, seed=1, epoch=epoch)
    assert sorted(at for batch in batches for at in batch) == list(range(count))
    assert len(batches) == num_batches(count, size)
    assert all(len(batch) == size for batch in batches[:-1])
    assert batches == batches_of_epoch(count, batch_size=size, seed=1, epoch=epoch)


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = [
        batches_of_epoch(50, batch_size=50, seed=seed, epoch=epoch)
        for seed in (1, 2)
        for epoch in (1, 2)
    ]
    assert len({tuple(order[0]) for order in orders}) == 4
    assert batches_of_epoch(50, batch_size=50, seed=1, epoch=None) == [list(range(50))]


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4), st.data())
def test_replicas_share_a_batch_out(
    micro: int, replicas: int, num_microbatches: int, data: st.DataObject
) -> None:
    size = micro * replicas * num_microbatches
    batch = list(range(data.draw(st.integers(1, size))))
    shares = [
        share_of_replica(
            batch,
            micro_batch_size=micro,
            replica=replica,
            replicas=replicas,
            num_microbatches=num_microbatches,
        )
        for replica in range(replicas)
    ]
    assert all(len(share) == num_microbatches for share in shares)
    assert sorted(at for share in shares for each in share for at in each) == batch
    assert all(len(each) <= micro for share in shares for each in share)
