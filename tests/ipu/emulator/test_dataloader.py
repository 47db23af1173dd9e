"""`poptorch.DataLoader` (docs/user_guide/batching.rst)."""
from __future__ import annotations

from typing import Any, List

import pytest
import torch
from torch.utils.data import BatchSampler, IterableDataset, SequentialSampler, TensorDataset

import ipu_lean.ipu.emulator as poptorch

from .common import options

pytestmark = pytest.mark.pod
Mode = poptorch.DataLoaderMode


def numbers(count: int) -> TensorDataset:
    return TensorDataset(torch.arange(count))


def rows(loader: Any) -> List[List[int]]:
    return [batch[0].tolist() for batch in loader]


def test_the_batch_is_what_one_call_takes() -> None:
    """python/__init__.py:330-345: micro 3, iterations 2, accumulation 4 make 24; input groups count, not replicas."""
    loader = poptorch.DataLoader(options(4, 2), numbers(50), batch_size=3)
    assert loader.combinedBatchSize == 24 and [len(batch) for batch in rows(loader)] == [24, 24] and len(loader) == 2
    made = options(1, 1, 4).inputReplicaGrouping(2, poptorch.CommGroupType.Consecutive)
    assert poptorch.DataLoader(made, numbers(9)).combinedBatchSize == 2
    with pytest.raises(AttributeError, match="frozen"):
        made.deviceIterations(3)


def test_the_last_batch_is_dropped_unless_told(caplog: pytest.LogCaptureFixture) -> None:
    """python/__init__.py:380-410: a short last batch warns, and the executor rejects it when it does not divide."""
    loader = poptorch.DataLoader(options(2), numbers(7), batch_size=2, drop_last=False)
    assert rows(loader) == [[0, 1, 2, 3], [4, 5, 6]]
    assert any("not divisible" in record.getMessage() for record in caplog.records)
    assert len(rows(poptorch.DataLoader(options(2), numbers(3), batch_size=2))) == 0  # smaller than one batch


def test_processes_get_consecutive_parts() -> None:
    """python/__init__.py:126-222."""
    parts = []
    for process in range(2):
        made = options(2)
        made.Distributed.configureProcessId(process, 2)
        parts.append(rows(poptorch.DataLoader(made, numbers(9), batch_size=1)))
    assert parts == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]


def test_shuffling_processes_agree_and_need_a_seed() -> None:
    """python/__init__.py:412-425."""
    made = options(1)
    made.Distributed.configureProcessId(0, 2)
    with pytest.raises(AssertionError, match="randomSeed"):
        poptorch.DataLoader(made, numbers(8), shuffle=True)
    seen: List[int] = []
    for process in range(2):
        made = options(1)
        made.Distributed.configureProcessId(process, 2)
        made.randomSeed(5)
        seen += [row for batch in rows(poptorch.DataLoader(made, numbers(8), shuffle=True)) for row in batch]
    assert sorted(seen) == list(range(8)) and seen != list(range(8))


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(torch.arange(6))


def test_iterable_datasets() -> None:
    """python/__init__.py:356-370: not partitioned automatically."""
    assert [batch.tolist() for batch in poptorch.DataLoader(options(2), Stream(), batch_size=2)] == [[0, 1, 2, 3]]
    made = options()
    made.Distributed.configureProcessId(0, 2)
    with pytest.raises(AssertionError, match="IterableDataset"):
        poptorch.DataLoader(made, Stream())


def test_batch_samplers() -> None:
    """python/__init__.py:305-320: exclusive with batch_size and shuffle; batches are put together."""
    sampler = BatchSampler(SequentialSampler(numbers(10)), 2, False)
    loader = poptorch.DataLoader(options(2), numbers(10), batch_sampler=sampler)
    assert rows(loader) == [[0, 1, 2, 3], [4, 5, 6, 7]] and loader.combinedBatchSize == 4
    with pytest.raises(poptorch.Error, match="batch_sampler"):
        poptorch.DataLoader(options(), numbers(4), batch_sampler=sampler, batch_size=2)


def test_async_gives_the_same_rows_and_reuses_its_buffers() -> None:
    """docs/user_guide/batching.rst:53-86: what was returned is overwritten; clone to keep. A ring of 3."""
    loader = poptorch.DataLoader(options(2), numbers(40), batch_size=2, mode=Mode.Async)
    kept, copied = [], []
    for batch in loader:
        kept.append(batch[0])
        copied.append(batch[0].clone())
    assert [row for batch in copied for row in batch.tolist()] == list(range(40))
    assert len({tensor.data_ptr() for tensor in kept}) == 3 and not torch.equal(kept[0], copied[0])
    assert len(rows(loader)) == 10
    loader.terminate()
    with pytest.raises(AssertionError, match="terminated"):
        iter(loader)


def test_async_rebatches() -> None:
    """python/__init__.py:434-460: workers load smaller batches; drop_last=False with Async becomes rebatching."""
    loader = poptorch.DataLoader(options(2), numbers(10), batch_size=2, mode=Mode.AsyncRebatched, rebatched_worker_size=3)
    assert [batch[0].clone().tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]] and len(loader) == 2
    loader.terminate()
    loader = poptorch.DataLoader(options(2), numbers(10), batch_size=2, mode=Mode.Async, drop_last=False)
    assert [len(batch[0]) for batch in loader] == [4, 4, 2] and len(loader) == 3
    loader.terminate()
    with pytest.raises(AssertionError, match="rebatched_worker_size"):
        poptorch.DataLoader(options(2), numbers(10), mode=Mode.AsyncRebatched, rebatched_worker_size=3)


def test_an_error_in_the_dataset_reaches_the_loop() -> None:
    class Broken(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            raise ValueError("row is broken")

    loader = poptorch.DataLoader(options(), Broken(torch.arange(4)), mode=Mode.Async)
    with pytest.raises(ValueError, match="row is broken"):
        next(iter(loader))
    loader.terminate()
