"""Roles, tasks and addresses."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmqtrain.config.cluster import (
    Address,
    bind_endpoint,
    canonical_address,
    connect_endpoint,
    is_of_this_host,
    parse_address,
)
from zmqtrain.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("host:2222", "host:2222"),
        (" Host.NS.svc:2222 ", "host.ns.svc:2222"),
        ("my_service-1:1", "my_service-1:1"),
        ("10.0.0.1:65535", "10.0.0.1:65535"),
        ("[::1]:2222", "[::1]:2222"),
        ("[FE80:0:0::1]:2222", "[fe80::1]:2222"),
        ("ipc:///tmp/ps-0", "ipc:///tmp/ps-0"),
        ("unix:///tmp/ps-0", "ipc:///tmp/ps-0"),
    ],
)
def test_address_has_one_spelling(text: str, canonical: str) -> None:
    assert canonical_address(text) == canonical


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "an address is empty"),
        *((text, "scheme") for text in ("grpc://h:1", "tcp://h:1", "http://h:1/path")),
        *((text, "no port") for text in ("h", "[::1]")),
        (":1", "no host"),
        *((text, "from 1 to 65535") for text in ("h:0", "h:65536", "h:http", "h:-1", "h:²")),
        *((text, "[IPv6]:port") for text in ("::1:2222", "fe80::1")),
        *((text, "the host") for text in ("[h]:1", "h h:1", "u@h:1", "10.0.0.256:1")),
        *((text, "--bind") for text in ("0.0.0.0:1", "*:1", "[::]:1")),
        ("ipc://", "no path"),
    ],
)
def test_wrong_address_is_refused_with_a_reason(text: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        canonical_address(text)
    assert told in str(caught.value)
    assert not text or repr(text) in str(caught.value)


HOSTS = st.one_of(
    st.from_regex(r"[a-z]([a-z0-9-]{0,10}[a-z0-9])?", fullmatch=True),
    st.ip_addresses().filter(lambda ip: not ip.is_unspecified).map(str),
)


@given(HOSTS, st.integers(1, 65535))
def test_address_is_read_back_as_it_is_written(host: str, port: int) -> None:
    address = Address(host, port)
    assert parse_address(str(address)) == address


@given(st.text(max_size=20))
def test_any_text_is_an_address_or_a_config_error(text: str) -> None:
    try:
        canonical = canonical_address(text)
    except ConfigError:
        return
    assert canonical_address(canonical) == canonical


@given(st.ip_addresses())
def test_endpoints_of_an_ip_keep_the_port_and_the_family(ip: IPv4Address | IPv6Address) -> None:
    if ip.is_unspecified:
        return
    address = str(Address(str(ip), 2222))
    assert connect_endpoint(address) == f"tcp://{address}"
    bound = bind_endpoint(address)
    assert bound.endswith(":2222")
    assert ("[" in bound) == (ip.version == 6)


@pytest.mark.parametrize(
    ("address", "host", "endpoint"),
    [
        ("host:2222", None, "tcp://0.0.0.0:2222"),
        ("10.0.0.1:2222", None, "tcp://0.0.0.0:2222"),
        ("[2001:db8::1]:2222", None, "tcp://[::]:2222"),
        ("localhost:2222", None, "tcp://127.0.0.1:2222"),
        ("127.0.0.2:2222", None, "tcp://127.0.0.2:2222"),
        ("[::1]:2222", None, "tcp://[::1]:2222"),
        ("host:2222", "eth0", "tcp://eth0:2222"),
        ("host:2222", "*", "tcp://*:2222"),
        ("localhost:2222", "0.0.0.0", "tcp://0.0.0.0:2222"),
        ("host:2222", "::", "tcp://[::]:2222"),
        ("host:2222", "[::]", "tcp://[::]:2222"),
        ("ipc:///tmp/ps-0", "eth0", "ipc:///tmp/ps-0"),
    ],
)
def test_ps_binds_loopback_only_for_a_loopback_address(
    address: str, host: str | None, endpoint: str
) -> None:
    assert bind_endpoint(address, host) == endpoint


@pytest.mark.parametrize(
    ("address", "endpoint"),
    [
        ("host:2222", "tcp://host:2222"),
        ("localhost:2222", "tcp://127.0.0.1:2222"),
        ("[::1]:2222", "tcp://[::1]:2222"),
        ("ipc:///tmp/ps-0", "ipc:///tmp/ps-0"),
    ],
)
def test_peers_connect_where_the_ps_binds(address: str, endpoint: str) -> None:
    assert connect_endpoint(address) == endpoint


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("localhost:1", True),
        ("127.8.0.1:1", True),
        ("[::1]:1", True),
        ("ipc:///tmp/x", True),
        ("host:1", False),
        ("10.0.0.1:1", False),
    ],
)
def test_loopback_addresses_are_known(address: str, expected: bool) -> None:
    assert is_of_this_host(address) is expected
