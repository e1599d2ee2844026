"""A stand-in for kubectl and ssh: it notes how it was called, and answers as its directory says.

answers.json: a list of [words that the call has to contain, exit code, stdout, stderr, whether it
answers once]; the first that fits counts. The tests' texts are those of kubectl, of the API
server and of OpenSSH, from their public sources.
"""

import json
import pathlib
import sys
import time

here = pathlib.Path(__file__).parent
words = sys.argv[1:]
stdin = sys.stdin.read() if "-f" in words else ""
with (here / "calls").open("a") as calls:
    calls.write(json.dumps([[pathlib.Path(sys.argv[0]).name, *words], stdin]) + "\n")
answers = json.loads((here / "answers.json").read_text())
for answer in answers:
    needed, code, stdout, stderr, once = answer
    if all(word in words for word in needed):
        if once:
            answers.remove(answer)
            (here / "answers.json").write_text(json.dumps(answers))
        sys.stdout.write(stdout)
        sys.stdout.flush()
        sys.stderr.write(stderr)
        if "port-forward" in words and code == 0:
            time.sleep(3600)
        sys.exit(code)
sys.exit(f"no answer to {words}")
