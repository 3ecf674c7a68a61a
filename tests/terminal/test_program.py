"""The program as a shell starts it: start-up, pipes, terminals, completion."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pexpect
import pytest

from tests.checkpoints import single, weight

# The program itself.


# Unbuffered, Python takes a write that a closing pipe cut short for a whole one.
BUFFERED = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}


def started(*words, **more):
    return subprocess.run(
        [sys.executable, "-m", "lowbitcli", *words], capture_output=True, text=True, **more
    )


def test_the_program_runs_and_its_exit_code_arrives():
    done = started("plan", "model", "--scheme", "nothing")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: no scheme is called 'nothing'\n\nhint: ")


def test_help_inspect_and_plan_load_no_tensor_library():
    code = """
import sys
from lowbitcli import cli, program
codes = [program.run(cli.app, words.split()) for words in sys.argv[1:]]
print(codes, sorted({"torch", "triton", "numpy"} & set(sys.modules)))
"""
    words = ["--help", "inspect model", "plan model", "quantize model --dry-run", "recipe list"]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[0, 0, 0, 0, 0] []"


def test_help_starts_in_half_a_second_of_processor_time():
    best = min(processor_seconds("--help") for _ in range(3))
    assert best < 0.5, f"{best:.2f} s"


def processor_seconds(*words):
    """Time of the processor, not of the clock: other work on the machine does not count."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert started(*words).returncode == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_a_reader_that_goes_away_is_no_error():
    """`lowbit inspect model | head -1`, with more lines than a pipe holds."""
    many = {f"layer.{number:05}.weight": weight(1, 1) for number in range(5000)}
    single(Path("many"), many)
    child = subprocess.Popen(
        [sys.executable, "-m", "lowbitcli", "inspect", "many", "-v"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=BUFFERED,
    )
    assert child.stdout is not None
    assert child.stderr is not None
    child.stdout.readline()
    child.stdout.close()
    assert (child.wait(60), child.stderr.read()) == (141, b"")


def test_a_full_disk_behind_standard_output_is_an_error():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "lowbitcli", "inspect", "model"],
            stdout=full,
            stderr=subprocess.PIPE,
            env=BUFFERED,
            text=True,
        )
    assert (done.returncode, done.stderr) == (5, "error: stdout: No space left on device\n")


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_a_closed_stream_loses_what_it_is_given(closed):
    done = subprocess.run(
        ["sh", "-c", f'"{sys.executable}" -m lowbitcli inspect model {closed}'],
        capture_output=True,
        env=BUFFERED,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_of_commands_options_and_schemes(shell):
    """Ask as the shells' scripts ask: bash and zsh give words in variables."""
    for line, answer in (
        ("lowbit deq", "dequantize"),
        ("lowbit plan --sch", "--scheme"),
        ("lowbit plan --scheme mx", "mxfp8"),
        ("lowbit plan --container comp", "compressed-tensors"),
    ):
        words = line.split()
        environment = {
            **os.environ,
            "_LOWBIT_COMPLETE": f"complete_{shell}",
            "COMP_WORDS": line,
            "COMP_CWORD": str(len(words) - 1),
            "_TYPER_COMPLETE_ARGS": line,
            "_TYPER_COMPLETE_FISH_ACTION": "get-args",
            "_TYPER_COMPLETE_WORD_TO_COMPLETE": words[-1],
        }
        done = started(env=environment)
        assert answer in done.stdout, (line, done)


def test_a_run_on_a_terminal_shows_the_bar(lowbit):
    child = pexpect.spawn(
        sys.executable, ["-m", "lowbitcli", "quantize", "model"], dimensions=(24, 120), timeout=120
    )
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
    shown = child.before.decode()
    assert "quantizing" in shown
    assert "17.5 kB of 17.5 kB" in shown
    assert "model-nvfp4 (compressed-tensors)" in shown
