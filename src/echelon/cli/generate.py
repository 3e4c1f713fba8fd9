# SPDX-License-Identifier: Apache-2.0
"""`echelon generate`: what a trained model writes after prompts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from echelon.api.generating import Generated, generate_texts
from echelon.cli.flags import Json, Overcommit, Settings, bad_argument
from echelon.cli.output import note, print_result
from echelon.config.generation import Request, Sampling
from echelon.launch.stop import EXIT_INTERRUPTED


def generate(
    run: Annotated[Path, Parameter(help="The run, or the checkpoint in one, that writes.")],
    /,
    *,
    prompt: Annotated[
        tuple[str, ...],
        Parameter(show_default=False, help="A text to go on from; repeat for more."),
    ] = (),
    prompt_file: Annotated[
        tuple[str, ...],
        Parameter(
            show_default=False,
            allow_leading_hyphen=True,
            help="A file that is a prompt, - for standard input.",
        ),
    ] = (),
    max_tokens: Annotated[int, Parameter(help="The most tokens after each prompt.")] = 100,
    temperature: Annotated[
        float, Parameter(help="0 takes the likeliest token; above, one is drawn.")
    ] = 0.6,
    top_k: Annotated[
        int | None, Parameter(help="Draw from so many of the likeliest tokens.")
    ] = None,
    top_p: Annotated[
        float | None, Parameter(help="Draw from the likeliest tokens of this probability.")
    ] = None,
    seed: Annotated[int, Parameter(help="What a draw hangs on, beside the prompt.")] = 0,
    block_tokens: Annotated[int, Parameter(help="Positions of a block of the cache.")] = 16,
    settings: Settings = (),
    allow_overcommit: Overcommit = False,
    json: Json = False,
) -> int:
    """Write after prompts, on ranks that --set mesh.tp, mesh.pp or mesh.dp_replicate ask for."""
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    request = Request(max_tokens=max_tokens, sampling=sampling, block_tokens=block_tokens)
    prompts = (*prompt, *map(_read, prompt_file))
    found = generate_texts(
        run, prompts, request, settings=settings, say=note, allow_overcommit=allow_overcommit
    )
    if found.rank == 0:
        text = f"\n{'-' * 20}\n".join(found.texts) + "\n"
        print_result("generate", lambda: _as_json(found), lambda: text, as_json=json)
        note(_speed(found))
    return EXIT_INTERRUPTED if found.stopped else 0


def _read(name: str) -> str:
    """Return the text of a file, or of standard input."""
    if name == "-":
        return sys.stdin.read()
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise bad_argument(
            f"--prompt-file {name} cannot be read: {reason}", "--prompt-file -", "--prompt TEXT"
        ) from error


def _as_json(found: Generated) -> dict[str, object]:
    return {
        "checkpoint": str(found.checkpoint),
        "texts": [
            {"prompt": prompt, "written": written, "tokens": list(tokens), "ended": ended}
            for prompt, written, tokens, ended in zip(
                found.prompts, found.written, found.tokens, found.ended, strict=True
            )
        ],
        "stopped": found.stopped,
        "cache_bytes": list(found.cache_bytes),
        "seconds_s": found.seconds_s,
    }


def _speed(found: Generated) -> str:
    count = sum(map(len, found.tokens))
    stopped = "stopped: " if found.stopped else ""
    return (
        f"{stopped}{count} tokens in {found.seconds_s:.2f} s "
        f"({count / max(found.seconds_s, 1e-9):.1f} tokens/s), from {found.checkpoint}"
    )
