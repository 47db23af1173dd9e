"""`poptorch.DataLoader`: torch's, with the whole batch of one executor call (python/__init__.py:126-523)."""
from __future__ import annotations

import itertools
from typing import Any, Dict, Iterable, Iterator, List, Optional, Sequence, Union

import torch
from torch.utils.data import Dataset, IterableDataset, Sampler

from .enums import DataLoaderMode
from .errors import createPoptorchError
from .log import logger
from .options import Options
from .prefetch import AsynchronousDataAccessor
from .structures import flatten, rebuild


class _SubDataset(Dataset):
    """One process's consecutive part of a map-style dataset; all processes see the same shuffled order."""

    def __init__(self, dataset: Any, options: Options, step: int, drop_last: bool) -> None:
        total, processes, process = len(dataset), options.Distributed.numProcesses, options.Distributed.processId
        self._dataset = dataset
        self._seed = options.random_seed if options.exists("random_seed") else None
        self._order: Optional[torch.Tensor] = None
        self._generator: Optional[torch.Generator] = None
        if drop_last:
            share = step * (total // (step * processes))
            self._offset, self._length, self._leftovers = process * share, share, total - share * processes
        else:
            shares = [total // processes + (total % processes > index) for index in range(processes)]
            self._offset, self._length, self._leftovers = sum(shares[:process]), shares[process], 0
        self._base = self._offset

    def shuffle_global_indices(self) -> None:
        """A new order of the whole dataset, the same in every process."""
        assert self._seed is not None, "Options.randomSeed must be set when shuffling, so that all processes agree"
        if self._generator is None:
            self._generator = torch.Generator()
            self._generator.manual_seed(self._seed)
        self._order = torch.randperm(len(self._dataset), generator=self._generator)

    def swap_range(self) -> None:
        """Alternate between the head and the tail of the dataset, so that what is left over gets its turn."""
        self._offset = self._base + self._leftovers if self._offset == self._base else self._base

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        position = index + self._offset
        return self._dataset[position if self._order is None else int(self._order[position])]


def _combine(batches: Iterator[Any], count: int, drop_last: bool) -> Iterator[Any]:
    """Concatenate `count` batches of a user's sampler into what one call takes."""
    while True:
        group = list(itertools.islice(batches, count))
        if not group or (len(group) < count and drop_last):
            return
        columns: List[List[torch.Tensor]] = [list(column) for column in zip(*[flatten(batch) for batch in group])]
        yield rebuild(group[0], iter([torch.cat(column) for column in columns]))


class DataLoader(torch.utils.data.DataLoader):
    """Batches of batch_size x deviceIterations x replicas (or input groups) x gradientAccumulation rows.

    `batch_size` is the micro-batch. The options are frozen. With several processes a map-style dataset is partitioned.
    """

    def __init__(self, options: Options, dataset: Dataset, batch_size: int = 1, shuffle: Optional[bool] = None,
                 num_workers: int = 0, drop_last: bool = True, persistent_workers: Optional[bool] = None,
                 auto_distributed_partitioning: bool = True, mode: DataLoaderMode = DataLoaderMode.Sync,
                 async_options: Optional[Dict[str, Any]] = None, rebatched_worker_size: Optional[int] = None,
                 batch_sampler: Optional[Union[Sampler, Iterable[Sequence[int]]]] = None, **kwargs: Any) -> None:
        assert isinstance(options, Options), f"expected poptorch.Options, got {type(options)}"
        self._accessor: Optional[AsynchronousDataAccessor] = None
        self._own_sampler = batch_sampler is not None
        if batch_sampler is not None:
            if batch_size != 1 or shuffle:
                raise createPoptorchError("`batch_sampler` excludes batch_size and shuffle")
            if options.Distributed.numProcesses > 1 and auto_distributed_partitioning:
                raise createPoptorchError("`batch_sampler` excludes auto_distributed_partitioning=True")
            batch_size = getattr(batch_sampler, "batch_size", batch_size)
        options._freeze()
        self._options = options
        self._drop_last = drop_last
        groups = options.replication_factor // options.input_group_size
        self._count = options.device_iterations * groups * options.Training.gradient_accumulation
        self._combined_batch_size = None if batch_size is None else batch_size * self._count
        self._shuffles_itself = False
        dataset, shuffle = self._partition(dataset, bool(shuffle), drop_last, auto_distributed_partitioning, num_workers, kwargs)
        asynchronous = mode != DataLoaderMode.Sync
        whole = self._combined_batch_size
        rebatch = asynchronous and not self._own_sampler and (
            mode == DataLoaderMode.AsyncRebatched or (not drop_last and (whole or 1) > 1))
        loaded = rebatched_worker_size if rebatch and rebatched_worker_size is not None else whole
        assert not rebatch or loaded <= whole, f"rebatched_worker_size ({loaded}) must be <= the combined batch size ({whole})"
        if self._own_sampler:
            super().__init__(dataset, batch_sampler=batch_sampler, num_workers=num_workers,
                             persistent_workers=num_workers > 0 if persistent_workers is None else persistent_workers, **kwargs)
        else:
            super().__init__(dataset, batch_size=loaded, shuffle=shuffle, num_workers=num_workers,
                             drop_last=drop_last and not rebatch and whole is not None,
                             persistent_workers=num_workers > 0 if persistent_workers is None else persistent_workers, **kwargs)
        if asynchronous:
            settings = dict(async_options or {})
            assert "rebatched_size" not in settings, "rebatched_size is set by the mode, not in async_options"
            self._accessor = AsynchronousDataAccessor(self, **settings, rebatched_size=whole if rebatch else None)

    def _partition(self, dataset: Any, shuffle: bool, drop_last: bool, automatic: bool, workers: int,
                   kwargs: Dict[str, Any]) -> Any:
        options, whole = self._options, self._combined_batch_size
        processes = options.Distributed.numProcesses
        if isinstance(dataset, IterableDataset):
            assert not automatic or processes == 1, "auto_distributed_partitioning not supported for IterableDataset"
            if workers > 1 and "worker_init_fn" not in kwargs:
                logger.warning("IterableDataset with %d workers but no worker_init_fn: each element comes as often", workers)
            return dataset, shuffle or None
        if not drop_last and not self._own_sampler and whole is not None and len(dataset) % (whole * processes):
            logger.warning("The number of elements (%d) is not divisible by what one step takes (%d) and drop_last=False: the "
                           "last tensor will have %d", len(dataset), whole * processes, len(dataset) % (whole * processes))
        if processes > 1 and automatic:
            assert not shuffle or options.exists("random_seed"), (
                "Shuffling with auto_distributed_partitioning needs Options.randomSeed, so that all processes agree")
            assert whole is not None, "batch_size=None not allowed when using auto_distributed_partitioning."
            self._shuffles_itself = shuffle
            return _SubDataset(dataset, options, whole, drop_last), False
        return dataset, shuffle

    def __len__(self) -> int:
        if self._accessor is not None and self._accessor.rebatched_size:
            full, rest = divmod(len(self.dataset), self._accessor.rebatched_size)  # type: ignore[arg-type]
            return full + (1 if rest and not self._drop_last else 0)
        return super().__len__()

    @property
    def _profiling(self) -> None:
        """PopTorch's tracing channel: there is none here."""

    @property
    def combinedBatchSize(self) -> Optional[int]:
        """Rows that one call of the executor takes."""
        return self._combined_batch_size

    @property
    def options(self) -> Options:
        return self._options

    def terminate(self) -> None:
        """Stop the loader of the asynchronous modes; otherwise nothing."""
        if self._accessor is not None:
            self._accessor.terminate()

    def _batches(self) -> Iterator[Any]:
        """The loader's own iterator, in this process."""
        if self._shuffles_itself:
            self.dataset.shuffle_global_indices()
        if isinstance(self.dataset, _SubDataset) and self._shuffles_itself:
            self.dataset.swap_range()
        found = super().__iter__()
        return _combine(found, self._count, self._drop_last) if self._own_sampler and self._count != 1 else found

    def __iter__(self) -> Any:
        return iter(self._accessor) if self._accessor is not None else self._batches()
