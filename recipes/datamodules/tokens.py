"""Words or word pieces as numbers: tokenizers that are learnt from the training text and kept.

Made with Hugging Face `tokenizers`. A tokenizer is one JSON file, the same in all processes.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

SPECIALS = ["<pad>", "<unk>", "<s>", "</s>"]
PAD, UNKNOWN, BEGIN, END = range(len(SPECIALS))

Kind = Literal["words", "pieces"]


def learn_tokenizer(kind: Kind, texts: Iterable[str], path: Path, *, vocab_size: int) -> None:
    """Learn a tokenizer from texts and keep it in a file, unless the file is there.

    Args:
        kind: ``"words"`` keeps the most frequent words, in lower case and without punctuation;
            ``"pieces"`` is byte-pair encoding, and puts each text between BEGIN and END.
        texts: The training text.
        path: The file; its folder is made.
        vocab_size: Largest number of tokens, the four of ``SPECIALS`` included.
    """
    if path.is_file():
        return
    tokenizer = _words() if kind == "words" else _pieces()
    trainer_class = trainers.WordLevelTrainer if kind == "words" else trainers.BpeTrainer
    trainer = trainer_class(vocab_size=vocab_size, special_tokens=SPECIALS, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path))


def load_tokenizer(path: Path, *, vocab_size: int) -> Tokenizer:
    """Open a tokenizer.

    Raises:
        ValueError: If the file is missing, or the model has fewer embeddings than it has tokens.
    """
    if not path.is_file():
        raise ValueError(
            f"there is no tokenizer at {str(path)!r}; allowed: a tokenizer.json that "
            "prepare_data() of this data has written, or one made by Hugging Face tokenizers; "
            "set data.tokenizer=FILE"
        )
    tokenizer = Tokenizer.from_file(str(path))
    count = tokenizer.get_vocab_size()
    if count > vocab_size:
        raise ValueError(
            f"the tokenizer {str(path)!r} has {count} tokens, the model {vocab_size}; "
            f"set task.vocab_size={count}"
        )
    return tokenizer


def _words() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel(unk_token=SPECIALS[UNKNOWN]))
    breaks = normalizers.Replace(Regex(r"<br\s*/?>"), " ")  # which IMDB's reviews are full of
    tokenizer.normalizer = normalizers.Sequence([breaks, normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\w']+"), "removed", invert=True)
    return tokenizer


def _pieces() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token=SPECIALS[UNKNOWN]))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace(), pre_tokenizers.Punctuation()]
    )
    tokenizer.decoder = decoders.Metaspace()
    begin, end = SPECIALS[BEGIN], SPECIALS[END]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A {end}", special_tokens=[(begin, BEGIN), (end, END)]
    )
    return tokenizer
