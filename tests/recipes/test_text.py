"""Sources, split, token cache and packed sequences, on real files of the standard library and on small ones."""

from __future__ import annotations

import fcntl
import hashlib
import json
import multiprocessing
import os
import pickle
import platform
import signal
import sysconfig
import time
from pathlib import Path

import lightning.pytorch as L
import numpy as np
import pytest
import torch

from memwall_strategy.core.errors import ConfigError, MemwallError
from memwall_strategy.recipes.text import cache
from memwall_strategy.recipes.text.build import ByteEncoder
from memwall_strategy.recipes.text.cache import ensure_tokens
from memwall_strategy.recipes.text.data import DocumentSequences, PackedSequences, TextData
from memwall_strategy.recipes.text.options import DOCUMENT_END, PADDING, TextOptions
from memwall_strategy.recipes.text.sources import find_documents, is_validation
from memwall_strategy.runtime.data import position_loader

LIBRARY = Path(sysconfig.get_paths()["stdlib"])
FEW = tuple(str(LIBRARY / name) for name in ("abc.py", "bisect.py", "copy.py", "heapq.py", "json/decoder.py"))


def options(tmp_path: Path, **more: object) -> TextOptions:
    return TextOptions(**{"files": FEW, "cache_dir": str(tmp_path), "seq_len": 64, **more})


def documents_of(tokens: np.ndarray) -> list[bytes]:
    """The documents in a token file, by their end tokens."""
    ends = np.flatnonzero(tokens == DOCUMENT_END)
    starts = [0, *(ends[:-1] + 1)]
    return [tokens[a:b].astype(np.uint8).tobytes() for a, b in zip(starts, ends, strict=True)]


def test_the_library_is_found_without_its_tests() -> None:
    documents = find_documents(()).documents
    names = [d.name for d in documents]
    assert names == sorted(names) and len(names) > 500
    assert "json/decoder.py" in names
    assert "pydoc_data/topics.py" not in names and sum(n.startswith("pydoc_data/topics/") for n in names) > 50
    assert not [n for n in names if "/test/" in n or n.startswith("test/") or "site-packages" in n]
    assert sum(d.size() for d in documents) > 5_000_000


def test_the_split_is_by_name_and_near_the_share() -> None:
    held_out = [is_validation(d.name, 0.05) for d in find_documents(()).documents]
    assert 0.02 < sum(held_out) / len(held_out) < 0.09
    # Fixed by the hash of the name: any other value would move files between the sides of earlier runs.
    assert [is_validation(name, 0.5) for name in ("abc.py", "bisect.py", "copy.py")] == [
        int(hashlib.sha256(name.encode()).hexdigest()[:16], 16) < 2**63 for name in ("abc.py", "bisect.py", "copy.py")
    ]


def test_tokens_are_the_bytes_of_each_document_and_its_end(tmp_path: Path) -> None:
    built = ensure_tokens(options(tmp_path, val_fraction=0.5))
    texts = {Path(name).read_bytes() for name in FEW}
    train, val = documents_of(built.tokens("train")), documents_of(built.tokens("val"))
    assert built.meta["split"] == "by file" and train and val
    assert set(train) | set(val) == texts and len(train) + len(val) == len(texts)
    digest = hashlib.sha256()
    for name in sorted(FEW, key=lambda name: Path(name).name):  # a file is known by its name, wherever it lies
        digest.update(Path(name).name.encode() + b"\0" + Path(name).read_bytes())
    assert built.meta["sha256"] == digest.hexdigest()
    assert built.meta["python"] == platform.python_version()
    assert built.meta["train_tokens"] == sum(map(len, train)) + len(train)


def test_one_file_is_split_at_its_end(tmp_path: Path) -> None:
    text = (LIBRARY / "heapq.py").read_bytes()
    built = ensure_tokens(options(tmp_path, files=(str(LIBRARY / "heapq.py"),), val_fraction=0.1))
    (train,), (val,) = documents_of(built.tokens("train")), documents_of(built.tokens("val"))
    assert train + val == text and len(val) == len(text) // 10
    assert built.meta["split"] == "end of each file"


def test_long_files_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memwall_strategy.recipes.text.sources._CHUNK_BYTES", 1000)
    text = (LIBRARY / "heapq.py").read_bytes()
    built = ensure_tokens(options(tmp_path, files=(str(LIBRARY / "heapq.py"),), val_fraction=0.3))
    assert documents_of(built.tokens("train"))[0] + documents_of(built.tokens("val"))[0] == text


def test_the_cache_is_used_again_and_follows_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = tmp_path / "a.txt"
    text.write_bytes(b"one two three " * 50)
    chosen = options(tmp_path, files=(str(text),), seq_len=8)
    first = ensure_tokens(chosen)
    with monkeypatch.context() as m:
        m.setattr(cache, "_build", lambda *_: pytest.fail("built again"))
        assert ensure_tokens(chosen).folder == first.folder
    text.write_bytes(b"four five six! " * 50)
    changed = ensure_tokens(chosen)
    assert changed.folder != first.folder and changed.meta["sha256"] != first.meta["sha256"]
    before = text.stat()
    text.write_bytes(b"sixx five four " * 50)
    os.utime(text, ns=(before.st_atime_ns, before.st_mtime_ns))  # as `cp -p` and archives do: size and time as before
    assert ensure_tokens(chosen).meta["sha256"] not in (first.meta["sha256"], changed.meta["sha256"])
    assert ensure_tokens(options(tmp_path, files=(str(text),), seq_len=8, val_fraction=0.4)).folder != first.folder


def test_a_truncated_cache_is_built_again(tmp_path: Path) -> None:
    first = ensure_tokens(options(tmp_path))
    whole = first.tokens("train").tobytes()
    (first.folder / "train.bin").write_bytes(whole[:-2])
    assert ensure_tokens(options(tmp_path)).tokens("train").tobytes() == whole


def test_what_a_killed_builder_left_is_cleared(tmp_path: Path) -> None:
    folder = ensure_tokens(options(tmp_path)).folder
    folder.rename(folder.with_suffix(".building"))
    (folder.with_suffix(".building") / "meta.json").unlink()
    ensure_tokens(options(tmp_path))
    assert sorted(p.name for p in folder.parent.iterdir()) == [folder.name, f"{folder.name}.lock"]


def _build_in_process(tmp_path: str, builds: multiprocessing.Queue) -> None:
    build = cache._build
    cache._build = lambda *args: (builds.put(1), build(*args))[1]
    builds.put(ensure_tokens(options(Path(tmp_path))).meta["sha256"])


def test_two_processes_at_a_time_build_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    told: multiprocessing.Queue = context.Queue()
    processes = [context.Process(target=_build_in_process, args=(str(tmp_path), told)) for _ in range(3)]
    for process in processes:
        process.start()
    answers = [told.get(timeout=30) for _ in range(4)]
    for process in processes:
        process.join(30)
        assert process.exitcode == 0
    assert answers.count(1) == 1 and len(set(answers)) == 2


def test_the_wait_for_another_builder_is_bounded(tmp_path: Path) -> None:
    folder = ensure_tokens(options(tmp_path)).folder
    (folder / "meta.json").unlink()
    with folder.with_suffix(".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(MemwallError, match=r"building the token cache .* for 0 s.*paths\.cache_dir"):
            ensure_tokens(options(tmp_path), wait_s=0.2)


@pytest.mark.parametrize(
    ("content", "more", "message"),
    [
        (b"", {}, r"data\.files: .*a\.txt holds no text \(zero tokens\)"),
        (b"short", {}, r"data\.seq_len=64: the training text has only 6 tokens.*Lower data\.seq_len"),
        (b"x" * 100, {"seq_len": 32}, r"data\.seq_len=32: the validation text has only 6 tokens.*data\.val_fraction"),
    ],
)
def test_too_little_text_is_refused(tmp_path: Path, content: bytes, more: dict, message: str) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        ensure_tokens(options(tmp_path, files=(str(tmp_path / "a.txt"),), **more))


def test_missing_and_unreadable_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.files='.*nowhere.*' matches no file"):
        ensure_tokens(options(tmp_path, files=(str(tmp_path / "nowhere*.txt"),)))
    with pytest.raises(ConfigError, match=r"data\.files=.* is a folder without a text file"):
        ensure_tokens(options(tmp_path, files=(str(tmp_path),)))
    (tmp_path / "a.txt").write_bytes(b"text")
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nothing")
    with pytest.raises(ConfigError, match=r"data\.files=.*gone\.txt cannot be read \(No such file"):
        ensure_tokens(options(tmp_path, files=(str(tmp_path / "gone.txt"),)))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match=r"pipe is a device or a pipe"):
        ensure_tokens(options(tmp_path, files=(str(tmp_path / "pipe"),)))
    (gone,) = find_documents((str(tmp_path / "a.txt"),)).documents
    (tmp_path / "a.txt").unlink()
    with pytest.raises(ConfigError, match=r"data\.files: .*a\.txt cannot be read \(No such file"):
        [*gone.chunks()]


def test_an_unwritable_cache_names_its_option(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"paths\.cache_dir=.* cannot be used"):
        ensure_tokens(options(tmp_path / "file"))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"seq_len": 0}, r"data\.seq_len=0"),
        ({"batch_size": True}, r"data\.batch_size=True"),
        ({"val_fraction": 1.0}, r"data\.val_fraction=1\.0"),
        ({"workers": -1}, r"data\.workers=-1"),
    ],
)
def test_options_that_cannot_be(values: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TextOptions(**values)


def test_sequences_are_packed_and_shifted(tmp_path: Path) -> None:
    built = ensure_tokens(options(tmp_path))
    tokens = built.tokens("train").astype(np.int64)
    data = PackedSequences(built, "train", 64)
    assert len(data) == (len(tokens) - 1) // 64
    assert data[0].dtype == torch.int64 and data[0].shape == (65,)
    joined = torch.cat([data[i][:-1] for i in range(len(data))])
    assert torch.equal(joined, torch.from_numpy(tokens[: len(joined)]))
    assert int(data[3][-1]) == int(data[4][0])
    with pytest.raises(IndexError):
        data[len(data)]
    assert torch.equal(pickle.loads(pickle.dumps(data))[1], data[1])
    assert len(pickle.dumps(data)) < 3000, "the tokens themselves must not travel to workers"


def test_batches_come_from_workers_too(tmp_path: Path) -> None:
    data = TextData(options(tmp_path, batch_size=4, workers=1))
    data.setup("fit")
    batches = [*data.val_dataloader()]
    assert all(batch.shape[1] == 65 for batch in batches)
    assert sum(len(batch) for batch in batches) == len(PackedSequences(data.files, "val", 64))


def test_meta_is_plain_and_sizes_agree(tmp_path: Path) -> None:
    built = ensure_tokens(options(tmp_path))
    assert json.loads((built.folder / "meta.json").read_text()) == built.meta
    for side in ("train", "val"):
        size_bytes = built.meta[f"{side}_tokens"] * ByteEncoder.dtype.itemsize
        assert (built.folder / f"{side}.bin").stat().st_size == size_bytes
        assert built.ends(side).tolist() == (np.flatnonzero(built.tokens(side) == DOCUMENT_END) + 1).tolist()


def test_folders_and_patterns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    docs = tmp_path / "docs"
    for name, content in {
        "a.md": b"# a", "deep/b.md": b"caf\xe9 in latin-1", "deep/c.txt": b"c", "photo.png": b"\x89PNG\0\0",
        ".git/d.md": b"d", "empty.md": b"",
    }.items():  # fmt: skip
        (docs / name).parent.mkdir(parents=True, exist_ok=True)
        (docs / name).write_bytes(content)
    found = find_documents((str(docs),))
    assert [d.name for d in found.documents] == ["a.md", "deep/b.md", "deep/c.txt", "empty.md"] and found.binaries == 1
    monkeypatch.chdir(tmp_path)
    again = find_documents(("docs", "docs/deep/c.txt", "docs/**/*.txt"))  # a file counts once, however it is named
    assert [d.fingerprint() for d in again.documents] == [d.fingerprint() for d in found.documents]
    assert [d.name for d in find_documents(("docs/**/*.md",)).documents] == ["a.md", "deep/b.md", "empty.md"]
    assert [d.name for d in find_documents(("docs/deep/b.md",)).documents] == ["b.md"]
    for files in (("docs/photo.png",), ("docs/*",)):
        with pytest.raises(ConfigError, match=r"photo\.png is not text \(it holds zero bytes\).*narrower pattern"):
            find_documents(files)
    built = ensure_tokens(options(tmp_path, files=("docs",), seq_len=2, val_fraction=0.5))
    assert built.meta["binary_files_left_out"] == 1
    every = [*documents_of(built.tokens("train")), *documents_of(built.tokens("val"))]
    assert sorted(every) == [b"# a", b"c", b"caf\xe9 in latin-1"], "bytes as they are; an empty file is no document"


def test_text_that_changes_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = tmp_path / "log.txt"
    text.write_bytes(b"line\n" * 100)
    write = cache.write_tokens

    def grow(*given: object) -> dict:
        meta = write(*given)
        text.write_bytes(b"line\n" * 101)
        return meta

    monkeypatch.setattr(cache, "write_tokens", grow)
    with pytest.raises(ConfigError, match="changed while it was read"):
        ensure_tokens(options(tmp_path, files=(str(text),), seq_len=8))
    assert not [p for p in (tmp_path / "tokens").iterdir() if p.is_dir()], "nothing half-built is left"


def test_a_foreign_record_is_built_over(tmp_path: Path) -> None:
    first = ensure_tokens(options(tmp_path))
    for content in ("", "{", "[]", '{"dtype": "nonsense"}'):
        (first.folder / "meta.json").write_text(content)
        assert ensure_tokens(options(tmp_path)).meta == first.meta


def _build_slowly(tmp_path: str, started: str) -> None:
    write = cache.write_tokens

    def slow(*given: object) -> dict:
        meta = write(*given)
        Path(started).write_text("")
        time.sleep(60)
        return meta

    cache.write_tokens = slow
    ensure_tokens(options(Path(tmp_path)))


def test_a_builder_killed_at_work_blocks_nobody(tmp_path: Path) -> None:
    started = tmp_path / "started"
    process = multiprocessing.get_context("fork").Process(target=_build_slowly, args=(str(tmp_path), str(started)))
    process.start()
    while not started.exists():
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    built = ensure_tokens(options(tmp_path), wait_s=10.0)
    assert sorted(p.name for p in built.folder.parent.iterdir()) == [built.folder.name, f"{built.folder.name}.lock"]


def test_documents_by_themselves(tmp_path: Path) -> None:
    built = ensure_tokens(options(tmp_path, val_fraction=0.5))
    data = DocumentSequences(built, "train", 64)
    rows = [data[i] for i in range(len(data))]
    assert all(row.shape == (65,) and row.dtype == torch.int64 for row in rows)
    documents, i = [], 0
    while i < len(rows):  # a document's sequences overlap by the token that is target of one and input of the next
        tokens = rows[i][rows[i] != PADDING]
        i += 1
        while int(tokens[-1]) != DOCUMENT_END:
            tokens = torch.cat([tokens[:-1], rows[i][rows[i] != PADDING]])
            i += 1
        documents.append(tokens[:-1].numpy().astype(np.uint8).tobytes())
    assert documents == documents_of(built.tokens("train"))
    predicted = sum(int((row[1:] != PADDING).sum()) for row in rows)
    assert predicted == built.meta["train_tokens"] - built.meta["train_documents"], "each but the first of a document"
    for row in rows:
        length = int((row != PADDING).sum())
        assert length > 1 and bool((row[length:] == PADDING).all()), "padding comes last"
    with pytest.raises(IndexError):
        data[len(data)]


@pytest.mark.parametrize("workers", [0, 2])
def test_it_resumes_in_the_middle_of_a_shuffled_epoch(tmp_path: Path, workers: int) -> None:
    def loader() -> object:
        L.seed_everything(3, verbose=False)
        data = TextData(options(tmp_path, batch_size=4, workers=workers))
        data.setup("fit")
        return position_loader(data.train_dataloader(), rank=0, world=1, seed=3)

    whole = [*loader()]
    interrupted, seen = loader(), []
    for batch in interrupted:
        seen.append(batch)
        if len(seen) == 3:
            state = interrupted.state_dict()
            break
    resumed = loader()
    resumed.load_state_dict(json.loads(json.dumps(state)))
    seen += [*resumed]
    assert len(seen) == len(whole) > 6 and all(torch.equal(a, b) for a, b in zip(seen, whole, strict=True))
    data = PackedSequences(ensure_tokens(options(tmp_path)), "train", 64)
    assert not torch.equal(whole[0][0], data[0]), "shuffled"
