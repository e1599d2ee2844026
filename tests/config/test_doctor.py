"""The doctor: each mistake is seen, named, and nothing else is."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import pytest

from zmqtrain.cli.main import cli
from zmqtrain.config.cluster import Role
from zmqtrain.config.doctor import compare, diagnose, diagnose_files
from zmqtrain.config.findings import Finding, Severity, exit_code, report
from zmqtrain.config.probes import Probes
from zmqtrain.errors import ExitCode
from zmqtrain.transport.keys import Owner, Pair, add_keys

ROOT = Path(__file__).parents[2]
CLUSTER = {"ps": ["p:1", "q:1"], "worker": ["w:1", "v:1"], "chief": ["c:1"]}
TRUSTED = {"ZMQTRAIN_INSECURE": "1"}  # as keys are a matter of other tests


def fine(host: str, port: int) -> None:
    pass


HEALTHY = Probes(fine, fine, fine, lambda environ: {"ps": 1, "worker": 2, "chief": 1})


def refusing(reason: str, *targets: tuple[str, int]) -> Any:
    """Return a probe that says no for some (host, port)."""

    def probe(host: str, port: int) -> None:
        if (host, port) in targets:
            raise OSError(reason)

    return probe


def tf_config(cluster: Mapping[str, Any] = CLUSTER, role: str = "worker", index: Any = 0) -> str:
    return json.dumps({"cluster": cluster, "task": {"type": role, "index": index}})


def seen(
    role: Role | None = None,
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    probes: Probes = HEALTHY,
    reach: bool = False,
) -> list[str]:
    """Return the report's lines."""
    environ = TRUSTED | dict(environ or {})
    return report(diagnose(role, flags or {}, environ, probes, reach=reach)).splitlines()


@pytest.mark.parametrize(
    ("role", "flags", "environ", "summary"),
    [
        (
            None,
            {},
            {},
            "worker 0 of a cluster with 1 ps (127.0.0.1:2222), 1 worker and a chief of its own",
        ),
        (
            None,
            {},
            {"TF_CONFIG": tf_config(role="ps", index=1)},
            "ps 1 of a cluster with 2 ps (p:1, q:1), 2 workers and a chief of its own",
        ),
        (
            None,
            {},
            {"HONCHO_PROCESS_NAME": "chief.1"},
            "chief 0 of a cluster with 1 ps (127.0.0.1:2222), 2 workers and a chief of its own",
        ),
        (
            Role.WORKER,
            {"chief": False, "ps": "ipc:///tmp/ps"},
            {},
            "worker 0 of a cluster with 1 ps (ipc:///tmp/ps), 1 worker and the chief in worker 0",
        ),
    ],
)
def test_sound_configuration_is_summed_up(
    role: Role | None, flags: dict[str, Any], environ: dict[str, str], summary: str
) -> None:
    assert seen(role, flags, environ) == [f"ok: this is {summary}"]


ERRORS: dict[str, tuple[dict[str, Any], str, str]] = {
    "invalid JSON": (
        {},
        "{",
        (
            "TF_CONFIG is not valid JSON (Expecting property name enclosed in double quotes: line "
            '1 column 2 (char 1)); expected an object such as {"cluster": {"ps": ["host:2222"]}, '
            '"task": {"type": "ps", "index": 0}}; check its quotes and commas'
        ),
    ),
    "no task section": (
        {},
        json.dumps({"cluster": CLUSTER}),
        (
            "TF_CONFIG has a cluster but no task section, so every task would have index 0; "
            'expected one such as "task": {"type": "worker", "index": 0}; add it, or give --index '
            "(or ZMQTRAIN_INDEX)"
        ),
    ),
    "type not in the cluster": (
        {},
        tf_config({"ps": ["p:1"], "worker": ["w:1"]}, "chief"),
        (
            "TF_CONFIG says that this task is chief 0, but its cluster lists ps, worker; add chief "
            "to the cluster, or correct the task's type"
        ),
    ),
    "index out of range": (
        {},
        tf_config(index=2),
        (
            "TF_CONFIG says that this task is worker 2, but its cluster lists worker 0, 1; "
            "expected one of these; correct the task's index"
        ),
    ),
    "index is no number": (
        {},
        tf_config(index="first"),
        'TF_CONFIG gives this task the index "first"; expected a whole number from 0 to 99999',
    ),
    "several chiefs": (
        {},
        tf_config({**CLUSTER, "chief": ["c:1", "d:1"]}),
        "TF_CONFIG lists 2 chiefs; expected at most one; remove the others",
    ),
    "chief and master": (
        {},
        tf_config({**CLUSTER, "master": ["m:1"]}),
        (
            "TF_CONFIG lists both chief and master, two names of one role; expected one of them; "
            "remove master"
        ),
    ),
    "no ps": (
        {},
        tf_config({"worker": ["w:1"]}),
        "TF_CONFIG lists no ps; expected at least one; add it there, or give --ps (or ZMQTRAIN_PS)",
    ),
    "chief and ps only": (
        {},
        tf_config({"ps": ["p:1"], "chief": ["c:1"]}, "chief"),
        (
            "TF_CONFIG lists no worker; expected at least one; add it there, or give --workers (or "
            "ZMQTRAIN_WORKERS)"
        ),
    ),
    "localhost among other hosts": (
        {},
        tf_config({"ps": ["localhost:1"], "worker": ["w:1"]}),
        (
            "TF_CONFIG mixes loopback addresses, such as ps 0 (localhost:1), with those of other "
            "hosts, such as worker 0 (w:1); expected names that every host can reach; replace "
            "localhost"
        ),
    ),
    "localhost among other ps": (
        {"ps": "h:1,127.0.0.1:2"},
        "",
        (
            "--ps (or ZMQTRAIN_PS) mixes the loopback address 127.0.0.1:2 with those of other "
            "hosts; expected names that every host can reach; replace it"
        ),
    ),
    "override of the job out of range": (
        {"steps": "0"},
        "",
        (
            "--steps (or ZMQTRAIN_STEPS) is '0'; it should be greater than or equal to 1; correct "
            "it or leave it out"
        ),
    ),
    "flag of the wrong type": (
        {"index": "one"},
        "",
        (
            "--index (or ZMQTRAIN_INDEX) is 'one'; it should be a valid integer, unable to parse "
            "string as an integer; correct it or leave it out for 0"
        ),
    ),
}


@pytest.mark.parametrize(("flags", "text", "sentence"), ERRORS.values(), ids=ERRORS)
def test_error_is_found(flags: dict[str, Any], text: str, sentence: str) -> None:
    lines = seen(flags=flags, environ={"TF_CONFIG": text} if text else {})
    assert lines == [f"error: {sentence}"]


def test_each_mistake_of_a_tf_config_is_a_finding() -> None:
    text = tf_config({"ps": ["p:1", "p:1"], "worker": ["", "fe80::1:1"]})
    assert [line.split(":")[0] for line in seen(environ={"TF_CONFIG": text})] == ["error"] * 3


HONCHO = {"HONCHO_PROCESS_NAME": "worker.2"}

WARNINGS: dict[str, tuple[dict[str, Any], dict[str, str], str]] = {
    "empty TF_CONFIG": (
        {},
        {"TF_CONFIG": ""},
        "TF_CONFIG is set but empty, which counts as not set; unset it or fill it in",
    ),
    "evaluator": (
        {},
        {"TF_CONFIG": tf_config({**CLUSTER, "evaluator": ["e:1"]})},
        (
            "TF_CONFIG lists an evaluator, which is left out: it counts as no worker, and the "
            "chief evaluates; remove it"
        ),
    ),
    "a worker's localhost": (
        {},
        {"TF_CONFIG": tf_config({"ps": ["p:1"], "worker": ["127.0.0.1:1"]})},
        (
            "TF_CONFIG mixes loopback addresses, such as worker 0 (127.0.0.1:1), with those of "
            "other hosts, such as ps 0 (p:1); expected names that every host can reach; replace "
            "localhost"
        ),
    ),
    "index by flag against TF_CONFIG": (
        {"index": "0"},
        {"TF_CONFIG": tf_config(index=1)},
        (
            "--index (or ZMQTRAIN_INDEX) says that the index is 0, but TF_CONFIG says 1; the first "
            "counts, so two tasks may come to the same index; give it in one place"
        ),
    ),
    "index by variable against honcho": (
        {},
        HONCHO | {"ZMQTRAIN_INDEX": "0"},
        (
            "--index (or ZMQTRAIN_INDEX) says that the index is 0, but "
            "HONCHO_PROCESS_NAME=worker.2 says 1; the first counts, so two tasks may come to the "
            "same index; give it in one place"
        ),
    ),
    "address from PORT": (
        {"ps": "127.0.0.1:5100"},
        HONCHO | {"PORT": "5100"},
        (
            "ps 0 is at 127.0.0.1:5100, the port that honcho put into PORT for worker.2; honcho "
            "gives each process another PORT, so no two tasks agree on it; write fixed ports, or "
            "leave --ps (or ZMQTRAIN_PS) out"
        ),
    ),
    "longer grace than honcho's": (
        {"grace_s": "5"},
        HONCHO,
        (
            "--grace-s (or ZMQTRAIN_GRACE_S) is 5, but honcho kills a process 5 s after SIGTERM; "
            "expected less; lower it, or the end is not clean"
        ),
    ),
    "proxy": (
        {},
        {"https_proxy": "http://proxy:3128"},
        (
            "https_proxy is set; zmqtrain's links go through no proxy, but whoever reads metrics "
            "and health from here may; list the cluster's hosts in NO_PROXY"
        ),
    ),
    "misspelt variable": (
        {},
        {"ZMQTRAIN_WORKER": "4"},
        "ZMQTRAIN_WORKER is set, but zmqtrain has no such variable; did you mean ZMQTRAIN_WORKERS?",
    ),
    "unknown variable": (
        {},
        {"ZMQTRAIN_XYZZY": "4"},
        "ZMQTRAIN_XYZZY is set, but zmqtrain has no such variable; remove it",
    ),
}


@pytest.mark.parametrize(("flags", "environ", "sentence"), WARNINGS.values(), ids=WARNINGS)
def test_trap_is_a_warning(flags: dict[str, Any], environ: dict[str, str], sentence: str) -> None:
    warning, summary = seen(flags=flags, environ=environ)
    assert warning == f"warning: {sentence}"
    assert summary.startswith("ok: this is worker ")


@pytest.mark.parametrize("role", [Role.PS, Role.WORKER])
def test_address_beyond_this_host_needs_keys_or_trust(role: Role) -> None:
    text = report(diagnose(role, {"ps": "h:1"}, {}, HEALTHY))
    where = "listening at tcp://0.0.0.0:1" if role is Role.PS else "connecting to tcp://h:1"
    assert text.startswith(f"error: {where}, ")
    assert "make keys (zmqtrain keys new --keys DIR)" in text
    assert "--insecure (or ZMQTRAIN_INSECURE=1)" in text


def test_keys_that_are_not_there_are_an_error(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    flags = {"ps": "127.0.0.1:1", "keys": str(keys)}
    assert f"error: {keys / 'registry'} cannot be read: " in report(
        diagnose(Role.WORKER, flags, {}, HEALTHY)
    )
    add_keys(keys, {Owner("ps"): Pair("a" * 64, None)})
    assert f"error: {keys / 'worker-0.secret'}, the secret key of worker 0, cannot be read" in (
        report(diagnose(Role.WORKER, flags, {}, HEALTHY))
    )
    assert exit_code(diagnose(Role.WORKER, flags | {"ps": "ipc:///p"}, {}, HEALTHY)) == ExitCode.OK


def test_job_that_does_not_load_or_does_not_allow_an_override_is_an_error(tmp_path: Path) -> None:
    missing, broken = tmp_path / "none.py", tmp_path / "broken.py"
    broken.write_text("job = Job(\n")
    sound = str(ROOT / "examples/digits.py")
    assert seen(flags={"job": str(missing)})[0].startswith(f"error: job file {missing} does not ")
    assert seen(environ={"ZMQTRAIN_JOB": str(broken)})[0] == (
        f"error: job file {broken} does not import: {broken}, line 1: '(' was never closed"
    )
    overlapping = {"job": sound, "overlap": True, "clip_norm": "1"}
    assert "clip_norm needs the whole gradient" in seen(flags=overlapping)[0]
    assert seen(flags={"job": sound})[0].startswith("ok: ")


def test_segment_directory_that_is_none_keeps_a_ps_from_starting(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for place in file, file / "below":
        (finding, *rest) = seen(Role.PS, {"segment_dir": str(place)})
        assert rest == []
        assert finding == (
            f"error: --segment-dir (or ZMQTRAIN_SEGMENT_DIR) is '{place}', but {file} is no "
            "directory that this user can write to; expected one, in which a ps keeps its memory "
            "or makes the directory for it; correct it, or leave it out for one in /dev/shm"
        )
        warning, summary = seen(Role.WORKER, {"segment_dir": str(place)})
        assert warning == finding.replace("error: ", "warning: ")
        assert summary.startswith("ok: this is worker 0 ")
    for place in tmp_path, tmp_path / "not" / "yet":
        assert seen(Role.PS, {"segment_dir": str(place)})[0].startswith("ok: ")
    assert list(tmp_path.iterdir()) == [file]
    tmp_path.chmod(0o750)
    (finding,) = seen(Role.PS, {"segment_dir": str(tmp_path)})
    assert finding == (
        f"error: {tmp_path} is open to other users (mode 0750); expected mode 0700; chmod 700 it"
    )


def test_logdir_that_cannot_be_written_is_found_before_the_first_checkpoint(tmp_path: Path) -> None:
    job, file = str(ROOT / "examples/digits.py"), tmp_path / "file"
    file.touch()
    assert seen(flags={"job": job, "logdir": str(file / "below")})[0] == (
        f"error: the job's logdir is '{file}/below', but {file} is no directory that this user can "
        "write to; expected one for checkpoints, or the place for it; correct --logdir (or "
        "ZMQTRAIN_LOGDIR)"
    )
    bad = {"job": job, "logdir": str(file / "below")}
    for who in {"role": Role.WORKER}, {"environ": {"TF_CONFIG": tf_config()}}:
        assert seen(flags=bad, **who)[0].startswith("ok: ")  # a worker saves nothing
    assert seen(flags=bad, environ={"TF_CONFIG": tf_config(role="ps")})[0].startswith("error: ")
    for good in tmp_path, tmp_path / "not" / "yet":
        assert seen(flags={"job": job, "logdir": str(good)})[0].startswith("ok: ")
    assert list(tmp_path.iterdir()) == [file]


def test_certificate_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    flags = {"metrics_cert": str(tmp_path / "cert"), "metrics_key": str(tmp_path / "key")}
    (finding,) = seen(flags=flags)
    assert finding.startswith(
        f"error: metrics cannot be served with the certificate {tmp_path / 'cert'} and the key "
    )


@pytest.mark.parametrize("document", ["README.md", "deploy/README.md", "Procfile"])
def test_variables_that_documents_tell_to_set_are_known(document: str) -> None:
    names = set(re.findall(r"\bZMQTRAIN_[A-Z_]*[A-Z]\b", (ROOT / document).read_text()))
    assert names
    for name in sorted(names - {"ZMQTRAIN_JOB", "ZMQTRAIN_KEYS"}):  # whose values are looked at
        assert len(seen(environ={name: "0"})) == 1, name


def test_variables_of_every_command_are_known() -> None:
    context = click.Context(cli)
    commands = [cli.get_command(context, name) for name in cli.list_commands(context)]
    options = [option for command in commands if command for option in command.params]
    names = {str(option.envvar) for option in options if option.envvar}
    assert {"ZMQTRAIN_MAX_RESTARTS", "ZMQTRAIN_WITHIN_S", "ZMQTRAIN_STEPS"} <= names
    told = report(diagnose(None, {}, dict.fromkeys(names, "x"), HEALTHY))
    assert "no such variable" not in told


@pytest.mark.parametrize(
    "environ",
    [
        {"PORT": "2222"},
        HONCHO | {"PORT": "5100"},
        {"ZMQTRAIN_WORKERS": "4", "ZMQTRAIN_STEPS": "5"},
        {"HTTP_PROXY": ""},
        HONCHO | {"ZMQTRAIN_INDEX": "1"},
        {  # of services zmqtrain and zmqtrain-ps in Kubernetes
            "ZMQTRAIN_PORT": "tcp://10.0.0.1:2222",
            "ZMQTRAIN_PS_SERVICE_HOST": "10.0.0.1",
            "ZMQTRAIN_PS_SERVICE_PORT_METRICS": "9410",
            "ZMQTRAIN_PS_PORT_2222_TCP_ADDR": "10.0.0.1",
        },
    ],
)
def test_harmless_variables_are_passed_over(environ: dict[str, str]) -> None:
    assert exit_code(diagnose(None, {}, environ, HEALTHY)) is ExitCode.OK
    assert len(seen(environ=environ)) == 1


def test_unresolvable_host_is_an_error() -> None:
    probes = Probes(refusing("Name or service not known", ("q", 1)), fine, fine)
    assert seen(environ={"TF_CONFIG": tf_config()}, probes=probes) == [
        (
            "error: the host of ps 1 at q:1 has no address here (Name or service not known); "
            "expected a name that resolves; correct it, or start the ps's host or pod first"
        )
    ]


def test_ip_address_is_not_resolved() -> None:
    probes = Probes(refusing("no", ("10.0.0.1", 1), ("::1", 1)), fine, fine)
    assert exit_code(diagnose(None, {"ps": "10.0.0.1:1"}, TRUSTED, probes)) is ExitCode.OK


@pytest.mark.parametrize(
    ("role", "flags", "target", "what"),
    [
        (Role.PS, {}, ("127.0.0.1", 2222), "ps 0"),
        (Role.PS, {"ps": "h:7", "bind": "::"}, ("::", 7), "ps 0"),
        (Role.PS, {}, ("127.0.0.1", 9410), "the metrics of ps 0"),
        (Role.WORKER, {"metrics_port": "80"}, ("127.0.0.1", 80), "the metrics of worker 0"),
    ],
)
def test_taken_port_is_an_error(
    role: Role, flags: dict[str, Any], target: tuple[str, int], what: str
) -> None:
    probes = Probes(fine, refusing("Address already in use", target), fine)
    assert seen(role, flags, probes=probes) == [
        (
            f"error: {what} cannot listen on {target[0]} port {target[1]} (Address already in use)"
            "; expected a free port of this machine; stop what has it (an earlier run of this "
            "task?) or choose another"
        )
    ]


def test_port_of_another_task_is_not_tried() -> None:
    probes = Probes(fine, refusing("in use", ("127.0.0.1", 2222)), fine)
    assert exit_code(diagnose(Role.WORKER, {}, {}, probes)) is ExitCode.OK


def test_peers_are_connected_to_only_on_request() -> None:
    probes = Probes(fine, fine, refusing("Connection refused", ("b", 2)))
    flags = {"ps": "a:1,b:2"}
    assert exit_code(diagnose(Role.WORKER, flags, TRUSTED, probes)) is ExitCode.OK
    assert seen(Role.WORKER, flags, probes=probes, reach=True) == [
        (
            "error: ps 1 at b:2 cannot be reached (Connection refused); expected it to accept "
            "connections; start it, and check its address, --bind and the firewall"
        ),
        "ok: ps 0 at a:1 can be reached",
    ]


def test_ps_does_not_connect_to_itself() -> None:
    probes = Probes(fine, fine, refusing("Connection refused", ("a", 1)))
    lines = seen(Role.PS, {"ps": "a:1,b:2"}, probes=probes, reach=True)
    assert lines[0] == "ok: ps 1 at b:2 can be reached"


@pytest.mark.integration
def test_real_probes_tell_a_taken_port_from_a_free_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        flags = {"ps": f"127.0.0.1:{port}", "metrics_port": "0"}
        taken = seen(Role.PS, flags, probes=Probes())
        reached = seen(Role.WORKER, flags, probes=Probes(), reach=True)
    assert taken[0].startswith(f"error: ps 0 cannot listen on 127.0.0.1 port {port} (Address ")
    assert reached[0] == f"ok: ps 0 at 127.0.0.1:{port} can be reached"
    free = seen(Role.PS, flags, probes=Probes())
    lost = seen(Role.WORKER, flags, probes=Probes(), reach=True)
    assert free[0].startswith("ok: this is ps 0 ")
    assert lost[0].startswith(f"error: ps 0 at 127.0.0.1:{port} cannot be reached (Connection ")


def lines_of(**texts: str) -> list[str]:
    return report(compare(texts)).splitlines()


SMALL = {"ps": ["p:1"], "worker": ["w:1"]}


def test_tf_configs_of_one_cluster_agree() -> None:
    assert lines_of(a=tf_config(SMALL, "ps"), b=tf_config(SMALL, "worker")) == [
        "ok: 2 TF_CONFIGs agree on the cluster"
    ]


def test_list_and_map_of_the_same_addresses_agree() -> None:
    as_map = {"ps": {"0": "P:1"}, "worker": {"0": "w:1"}}
    assert lines_of(a=tf_config(SMALL, "ps"), b=tf_config(as_map, "worker")) == [
        "ok: 2 TF_CONFIGs agree on the cluster"
    ]


def test_tf_configs_of_dynamic_workers_agree_where_they_overlap() -> None:
    ps = tf_config({"worker": {}, "ps": ["q:1"]}, "ps", 1)
    worker = tf_config({"worker": {"0": "w:1"}, "ps": ["p:1", "q:1"]}, "worker", 0)
    other = tf_config({"worker": {}, "ps": ["p:1"]}, "ps", 0)
    assert lines_of(a=ps, b=worker, c=other) == ["ok: 3 TF_CONFIGs agree on the cluster"]


DIFFERENT = (
    "error: the clusters of a and b {0}; expected the same cluster in every task's TF_CONFIG; copy "
    "one to all"
)

CONFLICTS: dict[str, tuple[str, str, str]] = {
    "one task twice": (
        tf_config(SMALL),
        tf_config(SMALL),
        (
            "error: a and b are both worker 0; expected a task of its own in each; correct the "
            "task's index in one of them"
        ),
    ),
    "another address": (
        tf_config(SMALL, "ps"),
        tf_config({"ps": ["p:2"], "worker": ["w:1"]}),
        DIFFERENT.format("differ: ps 0 is p:1 in the first and p:2 in the second"),
    ),
    "one worker less": (
        tf_config({"ps": ["p:1"], "worker": ["w:1", "v:1"]}, "ps"),
        tf_config(SMALL),
        DIFFERENT.format("differ: worker 1 is v:1 in the first and not listed in the second"),
    ),
    "another order": (
        tf_config({"ps": ["p:1", "q:1"], "worker": ["w:1"]}, "ps"),
        tf_config({"ps": ["q:1", "p:1"], "worker": ["w:1"]}),
        DIFFERENT.format(
            "list the same addresses in another order: ps 0 is p:1 in the first and q:1 in the "
            "second"
        ),
    ),
    "no task section": (
        tf_config(SMALL),
        json.dumps({"cluster": SMALL}),
        "error: b has no task section; expected one; add it",
    ),
    "empty file": (tf_config(SMALL), "", "error: b has no cluster section; expected one; add it"),
    "a mistake in one": (
        tf_config(SMALL),
        "[]",
        (
            "error: b: TF_CONFIG is []; expected an object such as "
            '{"cluster": {"ps": ["host:2222"]}, "task": {"type": "ps", "index": 0}}'
        ),
    ),
}


@pytest.mark.parametrize(("first", "second", "sentence"), CONFLICTS.values(), ids=CONFLICTS)
def test_conflict_between_tf_configs_is_found(first: str, second: str, sentence: str) -> None:
    assert lines_of(a=first, b=second)[0] == sentence
    assert exit_code(compare({"a": first, "b": second})) is ExitCode.USAGE


def test_task_without_a_tf_config_is_missed() -> None:
    cluster = {"ps": ["p:1"], "worker": ["w:1", "v:1"], "chief": ["c:1"]}
    lines = lines_of(a=tf_config(cluster, "ps"), b=tf_config(cluster, "worker"))
    assert lines == [
        (
            "warning: none of the TF_CONFIGs is that of chief 0, worker 1, which the cluster "
            "lists; the run waits for every task; check that each of them is started with a "
            "TF_CONFIG of its own"
        ),
        "ok: 2 TF_CONFIGs agree on the cluster",
    ]


def test_single_tf_config_misses_nobody() -> None:
    assert lines_of(a=tf_config(CLUSTER)) == ["ok: 1 TF_CONFIGs agree on the cluster"]


def test_files_are_compared_by_name(tmp_path: Path) -> None:
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    first.write_text(tf_config(SMALL))
    second.write_text(tf_config(SMALL))
    assert report(diagnose_files([first, second])).startswith(
        f"error: {first} and {second} are both worker 0;"
    )


def test_file_that_cannot_be_read_is_an_error_and_agrees_with_nobody(tmp_path: Path) -> None:
    path, binary, sound = tmp_path / "none.json", tmp_path / "binary", tmp_path / "sound.json"
    binary.write_bytes(b"\xff\xfe")
    sound.write_text(tf_config(SMALL))
    findings = diagnose_files([path, binary, tmp_path, sound])
    assert findings[0] == Finding(
        Severity.ERROR,
        f"{path} cannot be read: [Errno 2] No such file or directory: '{path}'; expected a "
        "TF_CONFIG in it",
    )
    assert [finding.severity for finding in findings] == [Severity.ERROR] * 3
    assert exit_code(findings) is ExitCode.USAGE


def test_report_puts_the_worst_first() -> None:
    findings = [Finding(severity, severity.value) for severity in reversed(Severity)]
    assert report(findings) == "error: error\nwarning: warning\nok: ok"
