"""A request to stop, at any moment of a command: one line, the right exit code, nothing left.

Each case starts a command in a new session and sends the signal at a moment: at the import
of a module, behind a printed line, once the process that forks ranks has started, or after a part
of the measured time of its start-up.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

import psutil
import pytest

from echelon.cli.main import main
from tests.cli.test_train import TINY, WORDS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")

LIMIT_S = 300.0
"""Against hanging."""
MARK = "ECHELON_TEST_OF_STOP"
"""Environment variable that all processes of a command have, whatever session they are in."""
COMMAND = """
import os, signal, sys

module, number, whom = sys.argv[1], int(sys.argv[2]), sys.argv[3]
del sys.argv[1:4]

class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == module:
            (os.killpg if whom == "group" else os.kill)(os.getpid(), number)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Finder)
from echelon.cli.main import main
sys.exit(main())
"""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str
    line_s: float
    """Seconds from the signal to the line that answers it."""

    def check(self, number: signal.Signals, codes: tuple[int, ...]) -> None:
        """Assert one line, the code that goes with it, and no traceback."""
        stopping = f"{number.name}: stopping at the end of this step (Ctrl-C again ends at once)"
        lines = [line for line in self.err.splitlines() if line in ("interrupted", stopping)]
        assert len(lines) == 1, self.err
        assert self.code in codes, self.err
        assert (self.code == 75) == (lines == [stopping])
        assert "Traceback" not in self.err + self.out


class Started:
    """A command in a separate session, and its processes."""

    def __init__(self, *arguments: str, module: str = "", number: int = 0, whom: str = "") -> None:
        """Start it; the signal goes out when `module` is imported, if one is named."""
        self.temporary = Path(tempfile.mkdtemp(dir=".", prefix="temporary-")).absolute()
        self.mark = str(self.temporary)
        self.process = subprocess.Popen(
            [sys.executable, "-c", COMMAND, module, str(number), whom, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": self.mark, MARK: self.mark},
        )
        self.lines: list[tuple[float, str]] = []
        self.out: list[str] = []
        self._readers = [Thread(target=self._read_errors), Thread(target=self._read_output)]
        for reader in self._readers:
            reader.start()

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as stream:
            for line in stream:
                self.lines.append((time.monotonic(), line))

    def _read_output(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as stream:
            self.out += stream

    def wait_for(self, come: Callable[[], object]) -> bool:
        """Wait until something has come, or the command has ended; return whether it came."""
        deadline = time.monotonic() + LIMIT_S
        while not come():
            if self.process.poll() is not None:
                return False
            assert time.monotonic() < deadline
            time.sleep(0.005)
        return True

    def has_said(self, text: str) -> bool:
        """True if a line of stderr has the text."""
        return any(text in line for _, line in self.lines)

    def takes_signals(self) -> bool:
        """True once the command catches SIGTERM."""
        status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="ascii")
        caught = next(line for line in status.splitlines() if line.startswith("SigCgt"))
        return bool(int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1)

    def children(self) -> list[psutil.Process]:
        """Return the processes that this command has started."""
        return psutil.Process(self.process.pid).children()

    def fork_servers(self) -> list[psutil.Process]:
        """Return the processes of this command that fork ranks; `git` and the like are not."""
        found: list[psutil.Process] = []
        for child in self.children():
            with suppress(psutil.Error):
                if "echelon.launch.local.fork_server" in child.cmdline():
                    found.append(child)
        return found

    def send(self, number: signal.Signals, whom: str) -> None:
        """Send a signal to the command or to its whole process group, as a terminal does."""
        (os.killpg if whom == "group" else os.kill)(self.process.pid, number)

    def end(self, sent_at: float = 0.0) -> Ended:
        """Wait for the end; assert that no process and no temporary file is left."""
        code = self.process.wait(LIMIT_S)
        for reader in self._readers:
            reader.join(LIMIT_S)
        assert psutil.wait_procs(marked(self.mark), timeout=30)[1] == []
        assert list(self.temporary.glob("echelon*")) == []
        err = "".join(line for _, line in self.lines)
        after = [
            at - sent_at for at, line in self.lines if "interrupted" in line or ": stop" in line
        ]
        return Ended(code, "".join(self.out), err, after[0] if after else 0.0)


def marked(beginning: str) -> list[psutil.Process]:
    """Return the processes whose mark begins so."""
    processes: list[psutil.Process] = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK, "").startswith(beginning):
                processes.append(process)
    return processes


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Work in a new folder, with a text to train on; end what a failed test leaves running."""
    (tmp_path / "words.txt").write_text(WORDS)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for process in marked(str(tmp_path)):
        process.kill()


def training(ranks: int, *settings: str) -> list[str]:
    """Return the command of a run that would take a thousand steps."""
    texts = ("data.source=words.txt", *TINY, "observe.log_every=1", *settings)
    words = [word for text in texts for word in ("--set", text)]
    words[words.index("train.steps=8")] = "train.steps=1000"
    return ["train", "nano", *words, "--set", f"mesh.dp_replicate={ranks}"]


def stopped(
    arguments: list[str], moment: str, number: signal.Signals, whom: str, codes: tuple[int, ...]
) -> Ended:
    """Stop a command at a moment and check how it ends."""
    kind, _, name = moment.partition(" ")
    if kind == "import":
        done = Started(*arguments, module=name, number=number, whom=whom).end()
    else:
        started = Started(*arguments)
        come: Callable[[], object] = started.children
        if kind == "line":
            come = lambda: started.has_said(name)  # noqa: E731 - one of several questions
        assert started.wait_for(come), started.lines
        sent_at = time.monotonic()
        started.send(number, whom)
        done = started.end(sent_at)
    done.check(number, codes)
    return done


def check_run(folder: Path, done: Ended) -> None:
    """Assert that a run is left with a checkpoint (75), or not at all."""
    run = folder / "runs/nano"
    assert run.exists() == (done.code == 75)
    if done.code == 75:
        assert [path.name for path in (run / "checkpoints").iterdir()] != []
        assert "go on: echelon train runs/nano/run.toml --resume runs/nano" in done.err


INT, TERM = signal.SIGINT, signal.SIGTERM
QUICK = [
    ("import echelon.config.load", 1, TERM, "process"),
    ("import torch.distributed", 2, INT, "group"),
    ("line reading", 1, INT, "group"),
    ("child", 2, TERM, "group"),
    ("line step 0/", 1, INT, "process"),
    ("line step 2/", 2, TERM, "group"),
]


@pytest.mark.quick("import-echelon.config.load", "line-reading", "child", "line-step-2/")
@pytest.mark.parametrize(
    ("moment", "ranks", "number", "whom"), QUICK, ids=[case[0].replace(" ", "-") for case in QUICK]
)
def test_a_run_stops_at_a_named_moment(
    folder: Path, moment: str, ranks: int, number: signal.Signals, whom: str
) -> None:
    # The first step may begin before the line of the validation is read here.
    codes = {"line step 2/": (75,), "line step 0/": (130, 75)}.get(moment, (130,))
    check_run(folder, stopped(training(ranks), moment, number, whom, codes))


NUM_MOMENTS = 20


@pytest.fixture(scope="module")
def start_ups(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Measure the start-up of a run, from its first signal handler to its first step."""
    seconds: dict[int, float] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("measured"))
        Path("words.txt").write_text(WORDS)
        for ranks in (1, 2):
            started = Started(*training(ranks))
            assert started.wait_for(started.takes_signals)
            began = time.monotonic()
            assert started.wait_for(lambda run=started: run.has_said("step 1/"))
            seconds[ranks] = time.monotonic() - began
            started.send(TERM, "process")
            assert started.end().code == 75
            shutil.rmtree("runs")
    return seconds


@pytest.mark.slow
@pytest.mark.parametrize("number", [INT, TERM], ids=["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("moment", range(NUM_MOMENTS))
def test_a_run_stops_at_every_moment_of_its_start(
    folder: Path, start_ups: dict[int, float], moment: int, ranks: int, number: signal.Signals
) -> None:
    started = Started(*training(ranks))
    assert started.wait_for(started.takes_signals)
    time.sleep(start_ups[ranks] * (moment + 0.5) / NUM_MOMENTS)
    sent_at = time.monotonic()
    started.send(number, ("process", "group")[moment % 2])
    done = started.end(sent_at)
    print(f"{number.name} at {moment} of {ranks} ranks: {done.code} after {done.line_s:.3f} s")
    # The steps may have begun before they did when they were measured.
    done.check(number, (130, 75) if moment > NUM_MOMENTS // 2 else (130,))
    check_run(folder, done)


@pytest.mark.slow
def test_a_second_ctrl_c_ends_a_run_at_once_and_keeps_its_checkpoints(folder: Path) -> None:
    started = Started(*training(1))
    assert started.wait_for(lambda: started.has_said("saved")), started.lines
    (rank,) = [
        rank for server in started.children() for rank in server.children() if "rank" in rank.name()
    ]
    rank.suspend()
    started.send(INT, "group")
    assert started.wait_for(lambda: started.has_said("SIGINT: stopping at the end of this step"))
    started.send(INT, "group")
    done = started.end()
    assert (done.code, done.err.count("interrupted\n"), "Traceback" in done.err) == (75, 1, False)
    assert "go on: echelon train runs/nano/run.toml --resume runs/nano" in done.err
    assert (folder / "runs/nano/checkpoints").is_dir()


@pytest.mark.slow
def test_a_resumed_run_that_is_stopped_before_a_step_has_the_checkpoint_it_came_from(
    folder: Path,
) -> None:
    settings = [word for text in ("data.source=words.txt", *TINY) for word in ("--set", text)]
    assert main(["train", "nano", *settings]) == 0
    resumed = [*training(1), "--set", "train.run_name=other", "--resume", "runs/nano"]
    started = Started(*resumed)
    assert started.wait_for(lambda: started.has_said("in runs/other"))
    assert started.wait_for(started.children)
    started.send(TERM, "group")
    done = started.end()
    assert done.code == 75, done.err
    assert done.err.splitlines()[-2:] == [
        "interrupted",
        "go on: echelon train runs/nano/run.toml --resume runs/nano",
    ]
    assert not (folder / "runs/other").exists()


def test_a_fork_server_that_is_killed_before_a_step_is_said_to_be(folder: Path) -> None:
    started = Started(*training(2, "zero.stage=3", "mesh.dp_shard=2", "mesh.dp_replicate=1")[:-2])
    assert started.wait_for(started.fork_servers)
    (server,) = started.fork_servers()
    server.kill()
    done = started.end()
    assert done.code == 4
    assert (
        "error[launcher-lost]: the process that forks ranks was killed by SIGKILL (kill -9, or the "
        "kernel for lack of memory)\n"
    ) in done.err
    assert "Traceback" not in done.err


OTHERS = [
    (["plan", "nano", "--cluster", "8xh100"], "import echelon.planner.search.search", INT),
    (["prove", "nano", "--set", "mesh.tp=2"], "child", INT),
    (["prove", "nano", "--set", "mesh.tp=2"], "import echelon.proof.run", TERM),
    (["rehearse", "nano"], "import torch._subclasses", TERM),
    (["rehearse", "nano", "--set", "mesh.pp=2"], "child", INT),
    (["demo"], "import echelon.proof.shrink", TERM),
    (["data", "prepare", "words.txt", "--out", "data"], "import numpy", INT),
    (
        ["data", "prepare", "words.txt", "--out", "data"],
        "import echelon.training.data.writer",
        TERM,
    ),
    (["explore", "--out", "page.html"], "import echelon.page.html", INT),
    (["doctor"], "import torch", TERM),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "moment", "number"),
    OTHERS,
    ids=[f"{case[0][0]}-{case[1].replace(' ', '-')}" for case in OTHERS],
)
def test_other_commands_stop_as_well(
    folder: Path, arguments: list[str], moment: str, number: signal.Signals
) -> None:
    before = {path.name for path in folder.iterdir()}
    done = stopped(arguments, moment, number, "group", (130,))
    assert done.err.splitlines()[-1] == "interrupted"
    left = {path.name for path in folder.iterdir()} - before
    assert {name for name in left if not name.startswith("temporary-")} <= {"runs"}


@pytest.mark.slow
def test_what_reads_a_run_stops_as_well(folder: Path) -> None:
    settings = [word for text in ("data.source=words.txt", *TINY) for word in ("--set", text)]
    assert main(["train", "nano", *settings]) == 0
    writing = ["generate", "runs/nano", "--prompt", "line ", "--max-tokens", "10"]
    for arguments, moment in [
        (writing, "import echelon.training.inference"),
        ([*writing, "--set", "mesh.tp=2"], "child"),
        (["export", "weights", "runs/nano", "--out", "out"], "import torch"),
        (["export", "weights", "runs/nano", "--out", "out", "--ranks", "2"], "child"),
    ]:
        stopped(arguments, moment, TERM, "group", (130,))
        assert not (folder / "out").exists()
        assert not list(folder.glob(".echelon-*"))
    entries = (folder / "runs/nano/metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "runs/nano/metrics.jsonl").write_text("".join(entries[:-2]))
    started = Started("observe", "runs/nano", "--follow")
    assert started.wait_for(started.takes_signals)
    time.sleep(1.0)
    started.send(INT, "group")
    started.end().check(INT, (130,))
