"""Coverage-guided fuzzing of the decoder: `make fuzz SECONDS=60`.

libFuzzer, whose arguments it takes, chooses the examples of a property test. Hypothesis keeps an
example that fails: `pytest tests/wire/test_codec_laws.py` shows it again.
"""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["zmqtrain"]):
    from tests.wire import test_codec_laws as laws


def main() -> None:
    """Fuzz until libFuzzer's limits are reached."""
    law = laws.test_damaged_message_decodes_or_is_refused
    atheris.Setup(sys.argv, law.hypothesis.fuzz_one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
