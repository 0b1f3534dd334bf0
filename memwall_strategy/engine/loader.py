"""What memwall needs of DataLoader and of Lightning's fit loop beyond their public names.

Lightning counts a run's progress in batches and takes an epoch's number of batches as fixed once the loaders are set
up. After a resume with another number of ranks both are untrue for the rest of that epoch: ``refresh_lengths`` writes
the right numbers where Lightning keeps them. It also restores loaders only inside its first set-up of the data, which
an earlier use of ``trainer.estimated_stepping_batches`` has already done: ``settle_resume`` catches up on that.

Nothing here imports Lightning: both of its namespaces are served by the objects they pass.
"""

from __future__ import annotations

import copy
import warnings
import weakref
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


def clone_loader(loader: DataLoader, cls: type, **attributes: Any) -> Any:
    """A copy of ``loader`` that shares dataset, collate function and all else, as an instance of ``cls``.

    Relies on: DataLoader keeps ``sampler``, ``batch_sampler`` and ``generator`` in its ``__dict__``, guards the first
    two by ``__setattr__`` only, reads them anew at each pass, and keeps persistent workers in ``_iterator``.
    """
    clone = copy.copy(loader)
    clone.__class__ = cls
    clone.__dict__.update(attributes, _iterator=None)
    return clone


def wrapped_sampler(sampler: Any) -> Any:
    """The user's sampler inside the DistributedSampler that Lightning wraps around it, else None.

    Relies on: ``DistributedSamplerWrapper.dataset._sampler`` in Lightning's two Fabric packages.
    """
    if not isinstance(sampler, DistributedSampler) or type(sampler).__name__ != "DistributedSamplerWrapper":
        return None
    return getattr(sampler.dataset, "_sampler", None)


def follow(loader: Any, trainer: Any) -> None:
    """Let a positioned loader know what ``trainer`` has trained on, and ``trainer`` how many batches it has."""
    trainer_ref = weakref.ref(trainer)  # the trainer holds the loader: no cycle

    def ahead() -> int:
        return 0 if (alive := trainer_ref()) is None else batches_ahead(alive)

    def on_move() -> None:
        if (alive := trainer_ref()) is not None:
            refresh_lengths(alive)

    while loader is not None:
        if hasattr(loader, "ahead"):
            loader.ahead = ahead
        if hasattr(loader, "positions"):
            loader.positions.on_move = on_move
        loader = getattr(loader, "_loader", None)  # inside an EvenLoader


def batches_ahead(trainer: Any) -> int:
    """How many batches Lightning has fetched but not yet trained on: the one in training, and a prefetched one.

    Relies on: ``fit_loop._data_fetcher.fetched`` counts from the epoch's start (Lightning adds what a resumed epoch has
    had), ``epoch_loop.batch_progress.current.processed`` rises right after a batch's training, before
    ``on_train_batch_end``. A ``training_step(dataloader_iter)`` fetches what it likes: what it fetched is trained on.
    """
    fetcher = trainer.fit_loop._data_fetcher
    if fetcher is None or type(fetcher).__name__ == "_DataLoaderIterDataFetcher":
        return 0
    return max(0, fetcher.fetched - trainer.fit_loop.epoch_loop.batch_progress.current.processed)


def batch_weight(trainer: Any) -> float:
    """The weight of the batch in training, by which its loss must be multiplied before the backward.

    1.0 but for the last steps of an epoch that does not divide evenly. Where several loaders are combined their batches
    make one loss, which has no one weight: 1.0 then, unless all agree.
    """
    combined = trainer.fit_loop._combined_loader
    weights = {getattr(loader, "weight", 1.0) for loader in combined.flattened} if combined is not None else set()
    return weights.pop() if len(weights) == 1 else 1.0


def refresh_lengths(trainer: Any) -> None:
    """Write the present number of batches of the training loaders where Lightning keeps it.

    Relies on: ``fit_loop._combined_loader.limits``, ``fit_loop.max_batches`` and ``trainer.val_check_batch`` are
    computed once, in ``setup_data``, as here; ``_data_fetcher.length``, and the limits that ``combined._iterator``
    counts by, at each new iterator.
    """
    loop = trainer.fit_loop
    combined = loop._combined_loader
    if combined is None or combined.limits is None:
        return  # still being set up: Lightning itself is about to count
    combined.limits = [_limited(_length(loader), trainer.limit_train_batches) for loader in combined.flattened]
    fetcher = loop._data_fetcher
    if fetcher is None or fetcher._combined_loader is not combined or combined._iterator is None:
        return
    combined._iterator.limits = combined.limits
    length = len(combined) if _length(combined) != float("inf") else None
    fetcher.length = length
    if length is None:
        return
    fetcher.done = fetcher.fetched >= length
    loop.max_batches = length
    timed = getattr(trainer, "_val_check_time_interval", None) is not None
    if isinstance(trainer.val_check_interval, float) and not timed:
        trainer.val_check_batch = max(1, int(length * trainer.val_check_interval))


def settle_resume(trainer: Any) -> None:
    """Finish what Lightning leaves undone when it resumes; call it from the strategy's ``on_train_start``.

    By then the data is set up, the loops know how they were restarted, and no batch has been asked for.
    """
    loop = trainer.fit_loop
    if loop._combined_loader is None or not loop.restarting:
        return
    if loop._combined_loader_states_to_load:
        # Relies on: emptied by ``_load_combined_loader_states``, which has not run where ``configure_optimizers`` asked
        # for ``trainer.estimated_stepping_batches``: the data was set up then, before the checkpoint was read.
        loop._load_combined_loader_states()
        iter(loop._data_fetcher)  # what was prefetched came from the old position
        refresh_lengths(trainer)
    elif loop.restarted_mid_epoch:
        _assume_positions(loop)
    _mend_progress(loop)


def _mend_progress(loop: Any) -> None:
    """Correct the counts of a checkpoint that was saved within a batch, at an epoch's end or between two epochs.

    Relies on Lightning's restart, which is right where batches are left in the epoch, but
    - with ``max_steps`` always restarts inside an epoch. For one that had ended (``ModelCheckpoint`` saves there) it
      runs an empty epoch first and counts it, so that the next one is lost and gets another's shuffle;
    - saved at an epoch's start, takes the counts of the epoch before for the new one's;
    - saved after an epoch's last batch, goes to the next epoch without its start, and compares the old epoch's batches
      with the new one's, which are not as many after a change of ranks;
    - sets ``current``, but not ``total``, back to the last whole batch.
    """
    epoch_loop, epochs = loop.epoch_loop, loop.epoch_progress
    batches = epoch_loop.batch_progress
    at_batch_end, nothing_left = epoch_loop.restarted_on_train_batch_end, batches.current.processed >= loop.max_batches
    if loop.restarted_mid_epoch:
        if at_batch_end and batches.is_last_batch:
            pass  # Lightning has counted the epoch as ended
        elif nothing_left and not (epoch_loop.restarted_on_last and batches.is_last_batch):
            epochs.increment_processed()
            epochs.increment_completed()
        else:
            if not at_batch_end:
                batches.total.reset_on_restart()
            return
        if at_batch_end:
            epoch_loop._batches_that_stepped += int(not epoch_loop._should_accumulate())
            batches.increment_completed()
    elif loop.restarted_on_epoch_start:
        epochs.current.ready += 1
        _stop_restarting(epoch_loop)
        return
    elif loop.restarted_on_epoch_end:
        epochs.increment_completed()
    # what is left is an ended epoch: go on as if this run had just ended it
    batches.total.reset_on_restart()
    _stop_restarting(loop)
    loop.reset_restart_stage()
    epoch_loop.reset_restart_stage()


def _stop_restarting(loop: Any) -> None:
    loop._restarting = False  # FitLoop's property would set it back
    for inner in vars(loop).values():
        if hasattr(inner, "_restarting"):
            _stop_restarting(inner)


def _assume_positions(loop: Any) -> None:
    """Skip what a checkpoint without data positions (stock Lightning's) says was done in its epoch.

    Relies on: ``epoch_loop.restarted_on_train_batch_end`` tells that the last batch only lacks its last count.
    """
    progress = loop.epoch_loop.batch_progress.current
    done = progress.processed if loop.epoch_loop.restarted_on_train_batch_end else progress.completed
    for loader in loop._combined_loader.flattened:
        if 0 < done < _length(loader) and not getattr(loader, "restored", True):
            warnings.warn(
                f"The checkpoint was saved {done} batches into an epoch and holds no data position. Training goes on "
                "where this run would be by then, which is right only if batch size and number of ranks are the same.",
                stacklevel=2,
            )
            loader.skip(loop.epoch_progress.current.processed, done)


def _length(loader: Any) -> float:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return float("inf")


def _limited(length: float, limit: int | float) -> float:
    if isinstance(limit, int):
        return min(length, limit)
    return int(length * limit) if length != float("inf") else length
