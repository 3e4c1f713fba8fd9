# SPDX-License-Identifier: Apache-2.0
"""Text to token ids and back: bytes, byte-pair encoding, or a tokenizer.json.

A tokenizer is known by the hash of its content, which goes into the index of the data and into
every checkpoint: names and paths do not decide whether two tokenizers are the same.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from echelon.core.errors import DataError, first_line
from echelon.core.optional import optional_package
from echelon.core.rulebook.data import DATA_TOKENIZER_SAME, TOKENIZER_FILE, TOKENIZER_KNOWN

END_OF_DOCUMENT = "<|end_of_document|>"
TOKENIZER_FILE_NAME = "tokenizer.json"
TEMPLATE_FILE_NAME = "chat_template.jinja"
BYTES_VOCABULARY = 257  # tokens: 256 bytes, and the end of a document
MAX_TRAINED_VOCABULARY = 1_000_000  # tokens

# The names that published tokenizers give to the token that ends a document, most specific first.
_END_NAMES = (
    END_OF_DOCUMENT,
    "<|endoftext|>",
    "<|end_of_text|>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "</s>",
    "<eos>",
    "[EOS]",
    "<|im_end|>",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerDescription:
    """Say which tokenizer it is: `hash` (sha256 of its content) decides, `name` is for people.

    `vocabulary` is one more than the largest id; `end_of_document` is the id put after each
    document.
    """

    name: str
    vocabulary: int
    end_of_document: int
    hash: str

    @property
    def token_dtype(self) -> str:
        """Return the narrowest dtype that holds every id: "uint16" or "uint32"."""
        return "uint16" if self.vocabulary <= 2**16 else "uint32"


class ByteTokenizer:
    """Take each byte of the UTF-8 text as its own id; 256 ends a document."""

    @property
    def description(self) -> TokenizerDescription:
        """Return the one description that all byte tokenizers share."""
        return TokenizerDescription(
            name="bytes",
            vocabulary=BYTES_VOCABULARY,
            end_of_document=BYTES_VOCABULARY - 1,
            hash=hashlib.sha256(b"echelon byte tokenizer 1: id = byte, 256 = end").hexdigest(),
        )

    def encode(self, text: str) -> list[int]:
        """Return the bytes of `text`."""
        return list(text.encode("utf-8"))

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`; bytes that are not UTF-8 become U+FFFD."""
        return bytes(i for i in ids if i < BYTES_VOCABULARY - 1).decode("utf-8", errors="replace")

    def encode_chunks(self, pieces: Sequence[bytes]) -> list[NDArray[np.uint32]]:
        """Return the bytes of each piece."""
        return [np.frombuffer(piece, dtype=np.uint8).astype(np.uint32) for piece in pieces]

    def to_json(self) -> None:
        """Return None: there is nothing to store."""
        return


class SubwordTokenizer:
    """Wrap a tokenizer of the `tokenizers` package: trained here, or read from a tokenizer.json."""

    def __init__(self, inner: Any, *, name: str, end_of_document: int) -> None:
        """Take the package's object; text that spells a special token is still read as text."""
        inner.encode_special_tokens = True
        inner.no_padding()
        inner.no_truncation()
        self._inner = inner
        # The name goes into the hash of the data, so it cannot be a path.
        self.description = TokenizerDescription(
            name=name,
            vocabulary=max(inner.get_vocab(with_added_tokens=True).values()) + 1,
            end_of_document=end_of_document,
            hash=hashlib.sha256(_canonical(inner.to_str()).encode()).hexdigest(),
        )

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, without special tokens."""
        return self._inner.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`, without special tokens."""
        return self._inner.decode(list(ids), skip_special_tokens=True)

    def encode_chunks(self, pieces: Sequence[bytes]) -> list[NDArray[np.uint32]]:
        """Return the ids of each piece, using all cores."""
        texts = [piece.decode("utf-8") for piece in pieces]
        encodings = self._inner.encode_batch_fast(texts, add_special_tokens=False)
        return [np.asarray(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def of_templates(self) -> Any:
        """Return the package's object that reads the special tokens that templates spell."""
        return type(self._inner).from_str(self._inner.to_str())

    def spelled(self, token: int) -> str:
        """Return how the tokenizer writes a token."""
        return str(self._inner.id_to_token(token))

    def to_json(self) -> str:
        """Return the text of the tokenizer.json."""
        return _canonical(self._inner.to_str())


Tokenizer = ByteTokenizer | SubwordTokenizer


def trained_vocabulary(name: str) -> int | None:
    """Return N of "bpe-N"; None for "bytes" and for paths; DataError for an N out of range."""
    match = re.fullmatch(r"bpe-(\d+)", name)
    if match is None:
        return None
    size = int(match.group(1))
    if not BYTES_VOCABULARY <= size <= MAX_TRAINED_VOCABULARY:
        raise DataError(
            TOKENIZER_KNOWN.problem(
                f"tokenizer {name!r} asks for {size} ids; 256 bytes and an end-of-document are "
                f"{BYTES_VOCABULARY}, and {MAX_TRAINED_VOCABULARY} is the most",
                suggestions=("bpe-512", "bpe-4096", "bpe-32768"),
            )
        )
    return size


def train_tokenizer(name: str, texts: Iterator[str]) -> Tokenizer:
    """Train byte-level byte-pair encoding of N ids ("bpe-N") on `texts`; deterministic.

    A small text may run out of pairs before N ids; the vocabulary is then smaller. Source: Sennrich
    et al., "Neural Machine Translation of Rare Words with Subword Units" (2016), on bytes.
    """
    size = trained_vocabulary(name)
    assert size is not None, "only bpe-N is trained"
    package = _tokenizers("training a tokenizer")
    inner = package.Tokenizer(package.models.BPE())
    inner.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = package.decoders.ByteLevel()
    trainer = package.trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=sorted(package.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    return SubwordTokenizer(inner, name=name, end_of_document=inner.token_to_id(END_OF_DOCUMENT))


def tokenizer_file(name: str) -> Path:
    """Return the tokenizer.json of a path; DataError without one."""
    path = Path(name)
    file = path / TOKENIZER_FILE_NAME if path.is_dir() else path
    if not file.is_file():
        looks_like_path = "/" in name or name.endswith(".json")
        reason = f"there is no file {file}" if looks_like_path else "it is no file either"
        raise DataError(
            TOKENIZER_KNOWN.problem(
                f"tokenizer {name!r} is neither bytes nor bpe-N, and {reason}",
                key="data.tokenizer",
                suggestions=("bytes", "bpe-4096", "PATH/tokenizer.json"),
            )
        )
    return file


def require_tokenizer(name: str) -> None:
    """Refuse a name that is neither "bytes", "bpe-N", nor a file that is there."""
    if name != "bytes" and trained_vocabulary(name) is None:
        tokenizer_file(name)


def load_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer "bytes", or the one in a tokenizer.json (or in a folder with one)."""
    if name == "bytes":
        return ByteTokenizer()
    file = tokenizer_file(name)
    package = _tokenizers(f"reading {file}")
    try:
        inner = package.Tokenizer.from_file(str(file))
    except Exception as error:  # the package raises bare Exception for what does not parse
        raise DataError(
            TOKENIZER_FILE.problem(
                f"{file} is no tokenizer.json: {first_line(error)}",
                key="data.tokenizer",
                suggestions=("bytes", "bpe-4096"),
            )
        ) from error
    end = next((i for text in _END_NAMES if (i := inner.token_to_id(text)) is not None), None)
    if end is None:
        raise DataError(
            TOKENIZER_FILE.problem(
                f"{file} has no token that ends a document",
                suggestions=_END_NAMES[1:3] + _END_NAMES[4:6],
            )
        )
    return SubwordTokenizer(inner, name="custom", end_of_document=end)


def require_same_tokenizer(
    found: TokenizerDescription,
    expected: TokenizerDescription,
    *,
    expected_by: str,
    suggestions: Iterable[str] = (),
) -> None:
    """Raise DataError unless both are the same; `expected_by` says whose tokenizer is expected."""
    if found.hash != expected.hash:
        raise DataError(
            DATA_TOKENIZER_SAME.problem(
                f"the data was made with tokenizer {_short(found)}, but {expected_by} has "
                f"{_short(expected)}",
                key="data.tokenizer",
                suggestions=suggestions,
            )
        )


def _short(tokenizer: TokenizerDescription) -> str:
    return f"{tokenizer.name} ({tokenizer.vocabulary} ids, {tokenizer.hash[:12]})"


def _canonical(text: str) -> str:
    return json.dumps(json.loads(text), sort_keys=True, ensure_ascii=False, indent=1) + "\n"


def _tokenizers(purpose: str) -> Any:
    return optional_package("tokenizers", extra="train", purpose=purpose)
