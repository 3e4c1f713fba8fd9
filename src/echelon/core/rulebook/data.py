# SPDX-License-Identifier: Apache-2.0
"""Rules about text and tokens: files, chats, mixtures, sources over a network."""

from echelon.core.rules import Area, Rule

PACKAGE_INSTALLED = Rule(
    id="package-installed",
    why="""
    Planning needs few packages. What reads parquet or trains a tokenizer comes as an extra and is
    imported only where it is used.
    """,
    bad="echelon data prepare corpus.parquet --out tokens     # without pyarrow",
    fixed="pip install 'echelon-parallel[data]'",
)

DATA_IS_NAMED = Rule(
    id="data-is-named",
    why="""
    A preset of a model, a plan and the run file of a search say how a model is split, and no data:
    planning, rehearsing and proving need none. Training needs data, and a run that nobody gave any
    would teach a large model the source of Python's standard library. So `train` asks for it:
    `data.source = "stdlib"` (that source, to try a run out), the path or the URL of text, or a
    folder of prepared data. Presets of runs such as nano name their own.
    """,
    bad="echelon train llama3-8b",
    fixed="echelon train llama3-8b --set data.source=corpus.txt",
)

DATA_SOURCE_UNREADABLE = Rule(
    id="data-source-unreadable",
    why="""
    A source is a file or a folder that exists and can be read to its end. All sources are looked
    at before any is tokenized; one that breaks half-way leaves no output behind.
    """,
    bad="echelon data prepare corpsu.txt --out tokens",
    fixed="echelon data prepare corpus.txt --out tokens",
)

DATA_FORMAT_KNOWN = Rule(
    id="data-format-known",
    why="""
    The end of a file's name says what is inside: text (.txt, .md, .py, ...), one JSON object per
    line (.jsonl), parquet or arrow; .gz in front of the first two is unpacked. A name that says
    nothing is not guessed at: state the format. In a folder, files of unknown formats are skipped
    and counted.
    """,
    bad="echelon data prepare corpus.dump --out tokens",
    fixed="echelon data prepare corpus.dump --format text --out tokens",
)

DATA_FIELD = Rule(
    id="data-field",
    why="""
    Each record (a line of jsonl, a row of parquet or arrow) has one field that holds the text of
    a document, as a string. A record without it would silently shrink the corpus.
    """,
    bad="echelon data prepare corpus.jsonl --out tokens     # the text is under 'content'",
    fixed="echelon data prepare corpus.jsonl --field content --out tokens",
)

DATA_RECORD = Rule(
    id="data-record",
    why="""
    Every line of a jsonl file is a JSON object. A line that is not one usually means that the
    file was cut off, or that it is one JSON document over several lines.
    """,
    bad='[{"text": "one"},\n {"text": "two"}]',
    fixed='{"text": "one"}\n{"text": "two"}',
)

DATA_UTF8 = Rule(
    id="data-utf8",
    why="""
    Text is read as UTF-8. Replacing or dropping what does not decode would train on text that
    nobody wrote, so the file and the byte are named instead.
    """,
    bad="echelon data prepare latin1.txt --out tokens",
    fixed="iconv -f latin1 -t utf-8 latin1.txt > text.txt\n"
    "echelon data prepare text.txt --out tokens",
)

DATA_SPLIT_KNOWN = Rule(
    id="data-split-known",
    why="""
    A Hugging Face dataset folder holds splits ("train", "test", ...). One of them is read, so
    that a test set never ends up in the training data.
    """,
    bad="echelon data prepare my-dataset --split training --out tokens",
    fixed="echelon data prepare my-dataset --split train --out tokens",
)

DATA_EMPTY = Rule(
    id="data-empty",
    why="""
    An empty file or folder is nearly always the wrong one, or a download that failed. Empty files
    and records among others are skipped and counted.
    """,
    bad="touch corpus.txt\nechelon data prepare corpus.txt --out tokens",
    fixed="echelon data prepare shakespeare.txt --out tokens",
)

DATA_OUTPUT_EXISTS = Rule(
    id="data-output-exists",
    why="""
    Prepared data is never written over: a run may be reading it, and a run that is resumed must
    find the tokens that it was trained on.
    """,
    bad="echelon data prepare corpus.txt --out tokens     # tokens exists",
    fixed="echelon data prepare corpus.txt --out tokens-2",
)

DATA_OUTPUT_WRITABLE = Rule(
    id="data-output-writable",
    why="""
    The output is written to a folder beside its final place and then renamed, so the folder above
    it must exist or be creatable, and must be writable.
    """,
    bad="echelon data prepare corpus.txt --out /proc/tokens",
    fixed="echelon data prepare corpus.txt --out ./tokens",
)

DATA_DISK_FULL = Rule(
    id="data-disk-full",
    why="""
    The disk, or the quota on it, had no room for the tokens (2 bytes each for vocabularies up to
    65536, else 4). What was written is removed again; nothing half-finished is left.
    """,
    bad="echelon data prepare corpus.txt --out /small-disk/tokens",
    fixed="echelon data prepare corpus.txt --out /large-disk/tokens",
)

DATA_PREPARED = Rule(
    id="data-prepared",
    why="""
    Prepared data is a folder with an index.json, which is written last. A folder without one was
    not written by `echelon data prepare`, or lost its index.
    """,
    bad="echelon data show texts/",
    fixed="echelon data prepare texts/ --out tokens\nechelon data show tokens",
)

DATA_INDEX = Rule(
    id="data-index",
    why="""
    index.json lists every file of the prepared data and carries a hash over all entries. One that
    does not parse, lacks entries or does not match its own hash was cut off or edited. All files
    are in the folder of the index: one that names others is not read.
    """,
    bad="an index.json with a changed token count",
    fixed="echelon data prepare texts/ --out tokens-2     # prepare again",
)

DATA_SCHEMA = Rule(
    id="data-schema",
    why="""
    The layout of prepared data has a version. Files of another version are refused instead of
    being read as something that they are not.
    """,
    bad="data prepared by a later Echelon",
    fixed="echelon data prepare texts/ --out tokens-2     # prepare again with this version",
)

DATA_SHARD_SIZE = Rule(
    id="data-shard-size",
    why="""
    Every file of the prepared data has the size that the index states; this is checked each time
    the data is opened. A shorter one was truncated, usually by a copy that stopped.
    """,
    bad="truncate -s -100 tokens/shard-00000.bin",
    fixed="copy the folder again, or prepare it again",
)

DATA_SHARD_HASH = Rule(
    id="data-shard-hash",
    why="""
    The sha256 of every file is in the index. Other content of the same size (an edit, or a disk
    that lies) would change the run without a sign.
    """,
    bad="a byte of tokens/shard-00000.bin changed in place",
    fixed="copy the folder again, or prepare it again",
)

DATA_TOKEN_RANGE = Rule(
    id="data-token-range",
    why="""
    Every token id is smaller than the model's vocabulary. A larger one has no row in the
    embedding: on a GPU that is a device-side assertion without a place, on a CPU an index error.
    """,
    bad="model.vocab = 256     # with data of the byte tokenizer: 256 bytes and end-of-document",
    fixed="model.vocab = 257",
)

DATA_TOKENIZER_SAME = Rule(
    id="data-tokenizer-same",
    why="""
    Token ids mean something only together with the tokenizer that made them. The hash of its
    content travels with the data and with every checkpoint; names and paths are not compared.
    """,
    bad="--set data.source=tokens --set data.tokenizer=bytes     # tokens was made with bpe-4096",
    fixed="--set data.source=tokens --set data.tokenizer=bpe-4096",
)

TOKENIZER_KNOWN = Rule(
    id="tokenizer-known",
    why="""
    A tokenizer is "bytes" (257 ids, nothing to train), "bpe-N" (byte-pair encoding with at most N
    ids, trained on the data itself; N from 257 to 1000000), or the path of a tokenizer.json.
    """,
    bad='data.tokenizer = "bpe4096"',
    fixed='data.tokenizer = "bpe-4096"',
)

TOKENIZER_FILE = Rule(
    id="tokenizer-file",
    why="""
    A tokenizer.json is in the format of Hugging Face `tokenizers` and has a token that ends a
    document, such as <|endoftext|>, </s> or <eos>: without it, documents would run into each
    other.
    """,
    bad='data.tokenizer = "vocab.json"',
    fixed='data.tokenizer = "gpt2/tokenizer.json"',
)

DATA_TOO_SHORT = Rule(
    id="data-too-short",
    why="""
    A sample is sequence_length tokens and, shifted by one, their labels. The training part and
    the validation part each need at least one: sequence_length + 1 tokens.
    """,
    bad="batch.sequence_length = 4096     # 1000 tokens of data",
    fixed="batch.sequence_length = 512",
)

DATA_FILLS_BATCH = Rule(
    id="data-fills-batch",
    why="""
    A step reads global_sequences samples, and no sample twice while others of the epoch were not
    read. With fewer samples than that, each step would hold the same samples several times: it
    would cost as much as a batch and teach as much as the few samples in it.
    """,
    bad="batch.global_sequences = 8     # 3 samples of sequence_length tokens in the training part",
    fixed="batch.global_sequences = 2",
)

DATA_SPLIT_FRACTION = Rule(
    id="data-split-fraction",
    why="""
    The validation part is the tail of the data, cut between two documents where one ends near the
    wanted place. Its fraction lies between 0 and 1, and both parts must hold tokens.
    """,
    bad="data.validation_fraction = 1.0",
    fixed="data.validation_fraction = 0.01",
)


DATA_CHATS_AREA = Area("data_chats")
"""Chats: records of messages, templates that write them as text, answers that count."""

DATA_CHAT_RECORD = Rule(
    id="data-chat-record",
    why="""
    A line of a file of chats is {"messages": [{"role": ..., "content": ...}, ...]}, or
    {"prompt": ..., "completion": ...}, both of them text or both lists of messages. Roles are
    system, developer, user, assistant and tool. A template passes over a role that it does not
    know, or writes it as something else: a misspelt one would change the data without a word.
    """,
    bad='{"messages": [{"role": "human", "content": "2 + 2?"}]}',
    fixed='{"messages": [{"role": "user", "content": "2 + 2?"}, '
    '{"role": "assistant", "content": "4"}]}',
)

DATA_CHAT_TEMPLATE = Rule(
    id="data-chat-template",
    why="""
    A model answers in the form that it was trained on, and the template that comes with the
    tokenizer writes that form: chat_template.jinja beside the tokenizer.json, or chat_template in
    its tokenizer_config.json. Without one, or where it fails, there is no text to train on. A model
    that never saw chats has none: put one beside its tokenizer.
    """,
    bad="echelon data prepare chats.jsonl --format chat --tokenizer bytes --out tokens",
    fixed="echelon data prepare chats.jsonl --format chat --tokenizer base --out tokens     "
    "# base/tokenizer.json, base/chat_template.jinja",
)

DATA_CHAT_PREFIX = Rule(
    id="data-chat-prefix",
    why="""
    A template can mark what the model writes by {% generation %} ... {% endgeneration %}. Where it
    does not, an answer is what a chat has more with it than without it. That needs a template that
    writes the first messages alone as it writes them at the head of a longer chat; one that drops
    the reasoning of earlier answers, say, does not, and the answer cannot be found.
    """,
    bad="{% for m in messages %}{% if not loop.last %}...{% endif %}{% endfor %}",
    fixed="{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}",
)

DATA_ANSWERS_TOLD = Rule(
    id="data-answers-told",
    why="""
    With data.train_on = "answers" only the tokens of answers count in the loss. Chats that were
    prepared as such tell them apart by a bit for each token; text does not.
    """,
    bad="echelon data prepare book.txt --out tokens\n"
    "echelon train run.toml --set data.source=tokens --set data.train_on=answers",
    fixed="echelon data prepare chats.jsonl --format chat --tokenizer base --out tokens\n"
    "echelon train run.toml --set data.source=tokens --set data.train_on=answers",
)

DATA_ANSWERS_COUNTED = Rule(
    id="data-answers-counted",
    why="""
    The loss is the mean over the tokens of answers. Where there is no answer in the chats, or none
    in the part that is held out, there is nothing to take the mean of.
    """,
    bad='{"messages": [{"role": "user", "content": "2 + 2?"}]}',
    fixed='{"messages": [{"role": "user", "content": "2 + 2?"}, '
    '{"role": "assistant", "content": "4"}]}',
)


DATA_MIXTURE_AREA = Area("data_mixture")
"""Mixtures, several sources with weights that may change, and of looking at data."""

MIXTURE_PARTS = Rule(
    id="mixture-parts",
    why="""
    Each table of data.mixture names a source and its weight, a number above 0; until_step, where it
    is there, is a whole number from 1. Weights need not add up to one. A source whose share is less
    than half of 1/65536 would never be read.
    """,
    example="""
    [[data.mixture]]
    path = "web"
    weight = 9
    [[data.mixture]]
    path = "code"
    weight = %s
    """,
    bad="0",
    fixed="1",
)

MIXTURE_SCHEDULE = Rule(
    id="mixture-schedule",
    why="""
    All tables with the same until_step are one phase, those without it the last one. In a phase a
    source has one weight, and every step of the run is in a phase.
    """,
    example="""
    [[data.mixture]]
    path = "web"
    weight = 1.0
    until_step = 1000
    [[data.mixture]]
    path = "%s"
    weight = 0.5
    until_step = 1000
    [[data.mixture]]
    path = "code"
    weight = 1.0
    """,
    bad="web",
    fixed="code",
)

SAMPLE_OF_STEP = Rule(
    id="sample-of-step",
    why="""
    A step reads batch.global_sequences samples, counted from 0; steps are counted from 1, as step
    lines count them. Prepared data by itself has no steps: the seed, the batch and the length of
    sequences are those of a run.
    """,
    example="""
    echelon train nano
    %s
    """,
    bad="echelon data look runs/nano --step 0",
    fixed="echelon data look runs/nano --step 1 --sample 3",
)


DATA_URLS_AREA = Area("data_urls")
"""Sources that are read over a network."""

DATA_URL_PLAIN = Rule(
    id="data-url-plain",
    why="""
    What a run reads stands in its run.toml, in its logs and in trackers. So a URL carries no user
    and no password: the package that reads it has its own settings for accounts.
    """,
    bad="data.source = 'https://me:secret@example.com/corpus.jsonl'",
    fixed="data.source = 'https://example.com/corpus.jsonl'",
)

DATA_URL_FAILS = Rule(
    id="data-url-fails",
    why="""
    A connection that breaks is opened again at the byte where it stopped, after half a second, one
    second, two and four. After that the source counts as unreadable. Nothing half-finished is kept:
    tokens count once all sources were read to their end.
    """,
    bad="echelon data prepare https://example.com/c.jsonl --out tokens     # the server is gone",
    fixed="wait, or copy the file once:\ncurl -O https://example.com/c.jsonl\n"
    "echelon data prepare c.jsonl --out tokens",
)
