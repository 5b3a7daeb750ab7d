"""The recipes' texts: read from the hub's formats, the same tokens in every process."""

from __future__ import annotations

import pytest
import torch

from recipes.datamodules.labelled_texts import LabelledTexts
from recipes.datamodules.sentence_pairs import SentencePairs, collate
from recipes.datamodules.text_windows import Cut, TextWindows
from recipes.datamodules.tokens import BEGIN, END, PAD, UNKNOWN, learn_tokenizer, load_tokenizer
from tests.recipes.tiny_data import (
    SENTENCES,
    write_imdb,
    write_multi30k,
    write_texts,
    write_wmt16,
)

pytestmark = pytest.mark.usefixtures("hub_cache")


def set_up(data):
    data.prepare_data()
    data.setup("fit")
    return data


class TestTokens:
    def test_the_most_frequent_words_in_lower_case_without_punctuation(self, tmp_path):
        file = tmp_path / "new" / "words.json"
        learn_tokenizer("words", ["Bad, bad<br />bad film!", "film"], file, vocab_size=6)
        tokenizer = load_tokenizer(file, vocab_size=6)
        assert tokenizer.encode("Bad film").ids == [4, 5]
        assert tokenizer.encode("a BAD, (film)").ids == [UNKNOWN, 4, 5]

    def test_pieces_give_the_sentence_back(self, tmp_path):
        learn_tokenizer("pieces", SENTENCES["de"], tmp_path / "p.json", vocab_size=60)
        tokenizer = load_tokenizer(tmp_path / "p.json", vocab_size=60)
        ids = tokenizer.encode("zwei Männer spielen.").ids
        assert (ids[0], ids[-1]) == (BEGIN, END)
        assert tokenizer.decode(ids) == "zwei Männer spielen."

    def test_what_was_learnt_is_kept(self, tmp_path):
        for texts in (["first"], ["second"]):
            learn_tokenizer("words", texts, tmp_path / "w.json", vocab_size=9)
        assert "first" in load_tokenizer(tmp_path / "w.json", vocab_size=9).get_vocab()

    def test_a_missing_file_says_where_one_comes_from(self, tmp_path):
        with pytest.raises(ValueError, match=r"set data\.tokenizer=FILE"):
            load_tokenizer(tmp_path / "none.json", vocab_size=9)

    def test_more_tokens_than_embeddings_say_how_many(self, tmp_path):
        learn_tokenizer("words", ["a b c"], tmp_path / "w.json", vocab_size=9)
        with pytest.raises(ValueError, match=r"has 7 tokens, the model 5; set task\.vocab_size=7"):
            load_tokenizer(tmp_path / "w.json", vocab_size=5)


class TestLabelledTexts:
    def data(self, tmp_path, **changes):
        settings = {"vocab_size": 20, "length": 6, "batch_size": 4}
        settings["tokenizer"] = str(tmp_path / "words.json")
        return LabelledTexts(str(write_imdb(tmp_path / "imdb")), **(settings | changes))

    def test_imdb_is_cut_and_padded_to_one_length(self, tmp_path):
        data = set_up(self.data(tmp_path))
        assert (len(data.train), len(data.val)) == (16, 6)
        words, labels = next(iter(data.val_dataloader()))
        assert (words.shape, labels.tolist()) == ((4, 6), [0, 1, 0, 1])
        assert words[0, 4:].tolist() == [PAD, PAD]  # "it's bad so bad"
        assert words[0, 1] == words[0, 3]
        assert PAD not in words[2]

    def test_a_missing_column_lists_the_columns(self, tmp_path):
        with pytest.raises(ValueError, match="no column 'stars'; it has text, label"):
            self.data(tmp_path, label="stars").prepare_data()


class TestSentencePairs:
    def data(self, path, tmp_path, **changes):
        settings = {"source": "en", "target": "de", "vocab_size": 99, "max_length": 50}
        settings |= {"batch_size": 4, "tokenizer": str(tmp_path / "pieces.json")}
        return SentencePairs(str(path), **(settings | changes))

    @pytest.mark.parametrize("write", [write_wmt16, write_multi30k])
    def test_pairs_of_both_formats(self, write, tmp_path):
        data = set_up(self.data(write(tmp_path / "pairs"), tmp_path))
        assert [len(rows) for rows in (data.train, data.val, data.test)] == [8, 4, 4]
        source, target = next(iter(data.test_dataloader()))
        assert (data.decode(source), data.decode(target)) == tuple(SENTENCES.values())
        assert set(source[:, 0].tolist()) == set(target[:, 0].tolist()) == {BEGIN}

    def test_long_sentences_are_left_out_of_training_alone(self, tmp_path):
        folder = write_wmt16(tmp_path / "pairs")
        longest = max(len(pair["target"]) for pair in set_up(self.data(folder, tmp_path)).train)
        data = set_up(self.data(folder, tmp_path, max_length=longest - 1))
        assert 0 < len(data.train) < 8
        assert len(data.val) == 4

    def test_another_tokenizer_at_the_same_place_encodes_anew(self, tmp_path):
        folder = write_wmt16(tmp_path / "pairs")
        before = set_up(self.data(folder, tmp_path)).train[0]
        (tmp_path / "pieces.json").unlink()
        after = set_up(self.data(folder, tmp_path, vocab_size=45)).train[0]
        assert len(after["source"]) > len(before["source"])  # fewer pieces, so shorter ones

    def test_batches_are_padded_to_their_longest(self):
        pairs = [{"source": [2, 7, 3], "target": [2, 3]}, {"source": [2, 3], "target": [2, 3]}]
        source, target = collate(pairs)
        assert source.tolist() == [[2, 7, 3], [2, 3, PAD]]
        assert target.shape == (2, 2)

    def test_a_missing_language_lists_the_languages(self, tmp_path):
        data = self.data(write_wmt16(tmp_path / "pairs"), tmp_path, target="fr")
        with pytest.raises(ValueError, match="no sentences in 'fr', only in en, de"):
            data.prepare_data()


class TestTextWindows:
    def data(self, path, **changes):
        settings = {"block_size": 16, "batch_size": 4, "val_batch_size": 2, "vocab_size": 256}
        return TextWindows(str(path), **({"tokenizer": "bytes"} | settings | changes))

    def test_windows_of_text_files(self, tmp_path):
        data = set_up(self.data(write_texts(tmp_path / "texts")))
        batch = next(iter(data.train_dataloader()))
        assert (batch.shape, batch.dtype) == ((4, 17), torch.int64)
        first = next(iter(data.val_dataloader()))
        assert bytes(first.flatten()[:17].tolist()) == b"validation 0: the"
        assert first[0, -1] == first[1, 0]

    def test_parquet_and_a_slice_of_a_split(self, tmp_path):
        folder = write_imdb(tmp_path / "imdb")
        data = set_up(self.data(folder, train_split="train[25%:]", val_split="train[:25%]"))
        assert len(data.train) > len(data.val) > 0

    def test_texts_are_joined_with_a_token_behind_each(self):
        windows = Cut("bytes", 4, "text")({"text": ["ab", "cdef", ""]})["tokens"]
        assert windows == [[97, 98, 0, 99], [99, 100, 101, 102]]

    def test_a_tokenizer_that_is_not_here_is_named_and_not_downloaded(self, tmp_path, monkeypatch):
        monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("a download"))
        data = self.data(write_texts(tmp_path / "texts"), tokenizer="nobody/none")
        with pytest.raises(ValueError, match="run `hf download nobody/none tokenizer.json"):
            data.prepare_data()

    def test_a_tokenizer_in_a_folder(self, tmp_path):
        learn_tokenizer(
            "pieces", SENTENCES["en"], tmp_path / "t" / "tokenizer.json", vocab_size=50
        )
        config = '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}'
        (tmp_path / "t" / "tokenizer_config.json").write_text(config)
        windows = Cut(str(tmp_path / "t"), 3, "text")({"text": ["a dog", "a"]})["tokens"]
        assert windows[-1][-1] == END
        assert BEGIN not in sum(windows, [])

    def test_more_tokens_than_embeddings_say_how_many(self, tmp_path):
        data = self.data(write_texts(tmp_path / "texts"), vocab_size=100)
        with pytest.raises(ValueError, match=r"has 256 tokens, the model 100; set task.vocab"):
            data.prepare_data()

    def test_a_missing_column_lists_the_columns(self, tmp_path):
        data = self.data(write_imdb(tmp_path / "imdb"), text="page")
        with pytest.raises(ValueError, match="no column 'page'; it has text, label"):
            data.prepare_data()
