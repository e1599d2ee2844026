"""The `zmqtrain` command, also as `python -m zmqtrain`."""

import sys


def main() -> int:
    """Run one command; return the process's exit code."""
    try:  # Ctrl-C may come while modules are imported
        from zmqtrain.hosting.signals import interrupts_kept

        with interrupts_kept():
            from zmqtrain.cli.main import main as run

        return run()
    except KeyboardInterrupt:
        sys.stderr.write("error: stopped by Ctrl-C\n")
        return 130  # ExitCode.INTERRUPTED, which may not be imported yet


if __name__ == "__main__":
    sys.exit(main())
