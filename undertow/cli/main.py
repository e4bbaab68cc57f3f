"""Where the command `undertow` begins and ends: every way out has its exit code.

0 is success, 1 something unexpected (with its traceback) or nobody left to read our output, 2
something the user can put right (one sentence), 130 Ctrl-C. Nothing is imported before the `try`,
so that Ctrl-C is caught from the first moment on.
"""

from __future__ import annotations

import sys

_INTERRUPTED = 130


def run() -> None:
    """The entry point that pyproject names."""
    sys.exit(exit_code(sys.argv[1:]))


def exit_code(argv: list[str]) -> int:
    """Run one command line; what the process should exit with."""
    code = _run(argv)
    if code == _INTERRUPTED:
        # One that came up under `exec` of a text, as generated code runs, leaves a mark by which
        # `python -m` ends itself with the signal whatever we return; other code takes it away.
        exec("")
    return code


def _run(argv: list[str]) -> int:
    try:
        from undertow.cli.app import invoke

        code = invoke(argv)
        sys.stdout.flush()  # a closed pipe shows here at the latest
        return code
    except KeyboardInterrupt:  # before typer, which returns the same for those within a command
        return _INTERRUPTED
    except BrokenPipeError:  # whoever read our output has had enough
        return _hush()


def _hush() -> int:
    """Keep the interpreter from complaining about the closed pipe when it flushes at exit."""
    import os

    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1


if __name__ == "__main__":
    run()
