"""Checkpoints on disk, over torch's distributed checkpoint (DCP): block by block, whole or not at all.

``model`` and ``optimizer`` say what the state is, ``room`` where loaded state goes, ``planner`` and ``storage`` move
blocks, ``folder`` keeps what stands on the disk whole, ``ranks`` makes all ranks agree, ``save`` and ``load`` put these
together; ``full``, ``weights`` and ``convert`` are about single files. ``runtime.checkpoint`` is the entrance.
"""
