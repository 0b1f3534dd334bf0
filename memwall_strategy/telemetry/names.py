"""The metrics that exist, each with its unit and one line on what it means.

The same names appear in ``metrics.csv``, in ``summary.json`` and under any logger.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    Attributes:
        name: as written everywhere; ``<lane>`` stands for a lane's name.
        unit: of the value; ``1`` for a plain number or share.
        meaning: in one line.
    """

    name: str
    unit: str
    meaning: str


STEP_S = "memwall/step_s"
TOKENS_PER_S = "memwall/tokens_per_s"
MFU = "memwall/mfu"
DEVICE_BYTES = "memwall/pool/device_bytes"
DEVICE_PEAK_BYTES = "memwall/pool/device_peak_bytes"
UTILIZATION = "memwall/pool/utilization"
HOST_BYTES = "memwall/pool/host_bytes"
DISK_BYTES = "memwall/pool/disk_bytes"
PAGE_IN_S = "memwall/pool/page_in_s"
PAGE_OUT_S = "memwall/pool/page_out_s"
PAGE_EXPOSED_S = "memwall/pool/exposed_s"
ACCESS_P50_S = "memwall/pool/access_p50_s"
ACCESS_JITTER = "memwall/pool/access_jitter"
OFFLOADED_BYTES = "memwall/pool/offloaded_bytes"
RECOMPUTED_UNITS = "memwall/pool/recomputed_units"
RESERVE_BYTES = "memwall/pool/reserve_bytes"
LENT_BYTES = "memwall/pool/lent_bytes"
RELIEVED = "memwall/pool/relieved"
RETAINED_BYTES = "memwall/pool/retained_bytes"
EXPOSED_S = "memwall/overlap/exposed_s"
EXPOSED_FRACTION = "memwall/overlap/exposed_fraction"
CONTENTION_S = "memwall/overlap/contention_s"
COPY_S = "memwall/overlap/copy_s"
LANE_EXPOSED_S = "memwall/overlap/lane_exposed_s/<lane>"
LANE_BYTES = "memwall/overlap/lane_bytes/<lane>"
LANE_SATURATION = "memwall/overlap/lane_saturation/<lane>"
LANE_BUSY_S = "memwall/overlap/lane_busy_s/<lane>"
PREFETCH = "memwall/overlap/prefetch"
REDUCE_BUFFERS = "memwall/overlap/reduce_buffers"
SHARED_BYTES = "memwall/overlap/shared_bytes"
INPUT_EXPOSED_S = "memwall/input/exposed_s"
PREDICTED_DEVICE_BYTES = "memwall/plan/predicted_device_bytes"
PREDICTED_DEVICE_PEAK_BYTES = "memwall/plan/predicted_device_peak_bytes"
TRAIN_LOSS = "train/loss"
VAL_LOSS = "val/loss"
VAL_BITS_PER_BYTE = "val/bits_per_byte"
LEARNING_RATE = "train/lr"

METRICS: tuple[Metric, ...] = (
    Metric(STEP_S, "s", "wall time of the optimizer step, all its micro-batches included"),
    Metric(TOKENS_PER_S, "tokens/s", "tokens of all ranks over the step's time"),
    Metric(MFU, "1", "the model's arithmetic over the peak that the devices were measured to reach"),
    Metric(DEVICE_BYTES, "B", "bytes that rank 0 holds for the model on its device at the end of the step"),
    Metric(DEVICE_PEAK_BYTES, "B", "the most that it held in the step"),
    Metric(UTILIZATION, "1", "that peak over the rank's budget, where one is set"),
    Metric(HOST_BYTES, "B", "bytes of rank 0's pool that rest on the host"),
    Metric(DISK_BYTES, "B", "bytes of rank 0's pool that rest on disk"),
    Metric(PAGE_IN_S, "s", "time in which rank 0's lane brought optimizer state in"),
    Metric(PAGE_OUT_S, "s", "time in which rank 0's lane sent optimizer state out"),
    Metric(PAGE_EXPOSED_S, "s", "time in which rank 0's training thread waited for either"),
    Metric(ACCESS_P50_S, "s", "median time of the last page-ins of a unit"),
    Metric(ACCESS_JITTER, "1", "their 95th percentile over their median, less 1"),
    Metric(OFFLOADED_BYTES, "B", "activations that rank 0 sent to the host in the step"),
    Metric(RECOMPUTED_UNITS, "1", "forwards of units that rank 0 ran again in the step's backwards"),
    Metric(RESERVE_BYTES, "B", "what is left of rank 0's reserve, where there is one"),
    Metric(LENT_BYTES, "B", "what is lent of it"),
    Metric(RELIEVED, "1", "things that gave way because steps were short, and have not come back"),
    Metric(RETAINED_BYTES, "B", "most gathered weights that rank 0 held beyond their use in the step"),
    Metric(EXPOSED_S, "s", "time in which rank 0's training thread waited for communication"),
    Metric(EXPOSED_FRACTION, "1", "that time over the step's time"),
    Metric(CONTENTION_S, "s", "time in which rank 0's training thread had work but no core: lanes, or others, had it"),
    Metric(COPY_S, "s", "its CPU time for copies in and out of communication buffers"),
    Metric(LANE_EXPOSED_S, "s", "time in which rank 0's training thread waited for the lane"),
    Metric(LANE_BUSY_S, "s", "time in which rank 0's lane was transferring"),
    Metric(LANE_BYTES, "B", "bytes that rank 0's lane received in the step"),
    Metric(
        LANE_SATURATION, "1", "bytes that rank 0's lane moved over what the link moves in a step's time, as measured"
    ),
    Metric(SHARED_BYTES, "B", "bytes that rank 0's lanes read from other ranks' memory on this host"),
    Metric(PREFETCH, "1", "units gathered ahead at most, as far as the budget has room for them"),
    Metric(REDUCE_BUFFERS, "1", "most reductions in flight, as far as the budget has room for them"),
    Metric(INPUT_EXPOSED_S, "s", "time in which rank 0's training thread waited for the step's batches"),
    Metric(PREDICTED_DEVICE_BYTES, "B", "what the plan says a rank holds between two steps, gradients included"),
    Metric(PREDICTED_DEVICE_PEAK_BYTES, "B", "what the plan says a rank holds at most in a step"),
    Metric(TRAIN_LOSS, "nats/token", "mean loss of the last micro-batch of rank 0"),
    Metric(VAL_LOSS, "nats/token", "mean loss over the validation sequences of all ranks"),
    Metric(VAL_BITS_PER_BYTE, "bits/byte", "that loss in bits; the ends of documents count as bytes"),
    Metric(LEARNING_RATE, "1", "learning rate of the first parameter group"),
)
