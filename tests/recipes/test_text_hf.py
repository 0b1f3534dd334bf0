"""Hugging Face datasets and tokenizers by local path, made here; nothing asks the network."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from memwall_strategy.cli.compose import compose_run
from memwall_strategy.cli.settings import check, check_tokenizer, check_vocabulary
from memwall_strategy.core.errors import ConfigError
from memwall_strategy.recipes.text import hf
from memwall_strategy.recipes.text.cache import TokenFiles, ensure_tokens
from memwall_strategy.recipes.text.data import TextData
from memwall_strategy.recipes.text.options import TextOptions

ROWS = [f"Row {i} says: the quick brown fox jumps over {i} lazy dogs.\n" * (1 + i % 3) for i in range(40)]


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<end>"], initial_alphabet=alphabet)
    made.train_from_iterator(ROWS, trainer)
    folder = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>").save_pretrained(str(folder))
    yield folder


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import datasets

    datasets.disable_progress_bars()
    folder = tmp_path_factory.mktemp("datasets")
    rows = datasets.Dataset.from_dict({"text": [*ROWS, None, ""], "label": [0] * 42})
    rows.save_to_disk(str(folder / "plain"))
    split = {"train": rows.select(range(30)), "validation": rows.select(range(30, 42)), "test": rows.select(range(3))}
    datasets.DatasetDict(split).save_to_disk(str(folder / "split"))
    (folder / "files").mkdir()
    split["train"].to_parquet(str(folder / "files" / "train-00000-of-00001.parquet"))
    split["validation"].to_parquet(str(folder / "files" / "validation-00000-of-00001.parquet"))
    (folder / "rows.jsonl").write_text("".join(json.dumps({"body": row}) + "\n" for row in ROWS))
    return folder


def texts(built: TokenFiles, side: str) -> list[str]:
    tokens, ends = built.tokens(side), built.ends(side)
    return [bytes(tokens[a : b - 1].astype(np.uint8)).decode() for a, b in zip([0, *ends], ends, strict=False)]


def test_a_dataset_by_its_own_split_and_by_ours(tmp_path: Path, dataset: Path) -> None:
    def built(name: str, **more: object) -> TokenFiles:
        given = {"dataset": str(dataset / name), "seq_len": 16, "cache_dir": str(tmp_path), "val_fraction": 0.2, **more}
        return ensure_tokens(TextOptions(**given))

    for name in ("split", "files"):
        own = built(name)
        assert own.meta["split"] == "the dataset's own" and own.meta["rows"] == {"train": 30, "val": 12}
        assert texts(own, "train") == ROWS[:30] and texts(own, "val") == ROWS[30:]
    ours = built("plain")
    assert ours.meta["split"] == "by file" and ours.meta["rows"] == {"train": 42}
    assert sorted(texts(ours, "train") + texts(ours, "val")) == sorted(ROWS) and len(texts(ours, "val")) in range(2, 20)
    named = built("rows.jsonl", text_field="body")
    assert sorted(texts(named, "train") + texts(named, "val")) == sorted(ROWS)


def test_a_tokenizer_gives_its_tokens_and_its_end(tmp_path: Path, dataset: Path, tokenizer: Path) -> None:
    from transformers import AutoTokenizer

    given = {"tokenizer": str(tokenizer), "seq_len": 8, "cache_dir": str(tmp_path)}
    built = ensure_tokens(TextOptions(dataset=str(dataset / "split"), **given))
    theirs = AutoTokenizer.from_pretrained(str(tokenizer), local_files_only=True)
    assert (built.meta["vocab"], built.meta["end"], built.meta["dtype"]) == (len(theirs), theirs.eos_token_id, "<u2")
    expected = [token for row in ROWS[:30] for token in [*theirs(row)["input_ids"], theirs.eos_token_id]]
    assert built.tokens("train").tolist() == expected
    data = TextData(TextOptions(dataset=str(dataset / "split"), **given))
    data.setup("fit")
    assert data.bytes_per_token == pytest.approx(
        (sum(map(len, ROWS[30:])) + 10) / len(built.tokens("val"))
    ) and data.bytes_per_token > 1.5


def test_characters_at_every_cut_are_whole(tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memwall_strategy.recipes.text.sources._CHUNK_BYTES", 7)
    monkeypatch.setattr(hf, "_PIECE_CHARACTERS", 16)
    text = "naïve café – ﬁn\n" * 9
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    for fraction in (0.3, 0.31, 0.32, 0.33, 0.34):
        built = ensure_tokens(
            TextOptions(files=(str(tmp_path / "a.txt"),), tokenizer=str(tokenizer), seq_len=2, val_fraction=fraction,
                        cache_dir=str(tmp_path))
        )  # fmt: skip
        encoder = hf.TokenizerEncoder(str(tokenizer), "utf-8")
        sides = [encoder._tokenizer.decode(built.tokens(side)[:-1].tolist()) for side in ("train", "val")]
        assert "".join(sides) == text


def test_what_is_not_text_in_that_encoding_is_refused(tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "a.txt").write_bytes("café ".encode("latin-1") * 20)
    given = {"files": (str(tmp_path / "a.txt"),), "tokenizer": str(tokenizer), "seq_len": 4, "cache_dir": str(tmp_path)}
    with pytest.raises(ConfigError, match=r"data\.encoding=utf-8: the document a\.txt is not utf-8 text \(near byte 3"):
        ensure_tokens(TextOptions(**given))
    assert ensure_tokens(TextOptions(**given, encoding="latin-1")).meta["train_tokens"] > 20


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"dataset": "/nowhere"}, r"data\.dataset='/nowhere': there is no such file or folder.*nothing is downloaded"),
        ({"dataset": "{here}"}, r"data\.dataset=.* holds no dataset: neither what dataset\.save_to_disk writes"),
        ({"dataset": "{data}/plain", "text_field": "txt"}, r"data\.text_field='txt' is no column.*Did you mean 'text'"),
        ({"dataset": "{data}/plain", "text_field": "label"}, r"data\.text_field='label' holds int64, not text"),
        ({"dataset": "{here}/broken.parquet"}, r"data\.dataset=.* cannot be read as a dataset"),
        ({"tokenizer": "/nowhere"}, r"data\.tokenizer='/nowhere': there is no such file or folder"),
        ({"tokenizer": "{here}"}, r"data\.tokenizer=.* cannot be read as a tokenizer"),
        ({"tokenizer": "{here}/broken.json"}, r"data\.tokenizer=.* cannot be read as a tokenizer"),
    ],
)
def test_paths_that_hold_nothing_of_the_kind(tmp_path: Path, dataset: Path, more: dict[str, str], message: str) -> None:
    here = tmp_path / "here"
    here.mkdir()
    if "broken" in str(more):
        (here / "broken.parquet").write_bytes(b"not parquet")
        (here / "broken.json").write_text("{}")
    given = {name: value.format(here=here, data=dataset) for name, value in more.items()}
    with pytest.raises(ConfigError, match=message):
        ensure_tokens(TextOptions(**given, cache_dir=str(tmp_path)))


def test_a_missing_package_names_the_extra(dataset: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs the package datasets, .* pip install 'memwall\[hf\]'"):
        ensure_tokens(TextOptions(dataset=str(dataset / "plain")))
    with pytest.raises(ConfigError, match=r"needs the package transformers, .* pip install 'memwall\[hf\]'"):
        ensure_tokens(TextOptions(tokenizer=str(tokenizer)))


def test_a_vocabulary_larger_than_the_models_is_refused_by_name(tokenizer: Path) -> None:
    settings = check(compose_run([f"data.tokenizer={tokenizer}"]))
    with pytest.raises(ConfigError, match=r"model\.vocab=257 is too small: data\.tokenizer=.* has 300 .*vocab=300"):
        check_tokenizer(settings)
    assert hf.tokenizer_values(str(tokenizer / "tokenizer.json")) == hf.tokenizer_values(str(tokenizer)) == 300
    check_vocabulary(check(compose_run([f"data.tokenizer={tokenizer}", "model.vocab=300"])), 300)
