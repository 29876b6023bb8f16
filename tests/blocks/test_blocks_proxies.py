"""Proxies of the environment: one line that names what cannot be used, and none for the loopback interface."""

import os

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from blocks.proxies import exempting_loopback
from templar.errors import PermanentError, Reason
from templar.store.s3_protocol import is_loopback, proxies_of
from tests.support.errors import raising

NAMES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
ADDRESSES = st.text(max_size=12) | st.from_regex(r"\A(https?|socks5?h?|ftp)?(://)?[a-z@:\[\]0-9.]{0,10}\Z")
ENTRIES = st.text(max_size=8) | st.text("[]:/.*0f %@a", max_size=8) | st.sampled_from(["fd00::/8", "[::1]", "::1", "*"])


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.sampled_from(NAMES[:3]), ADDRESSES), st.lists(ENTRIES, max_size=3))
def test_what_is_not_refused_makes_a_client(proxies, entries):
    environment = {
        name: value for name, value in (proxies | {"NO_PROXY": ",".join(entries)}).items() if "\0" not in value
    }
    environment = {name: value for name, value in environment.items() if value.isprintable()}
    try:
        environment |= exempting_loopback(environment)
    except PermanentError as error:
        said = error.message
    else:
        said = ""
    if said:
        assert said.isprintable()
        assert said.startswith(tuple(f"{name} " for name in environment))
        return
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        with httpx.Client(verify=False) as client:
            for host in ("127.0.0.1", "localhost"):
                transport = client._transport_for_url(httpx.URL(f"http://{host}:4200/api"))
                assert transport is client._transport


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        (
            {"ALL_PROXY": "socks5://user:hush@127.0.0.1:9"},
            "ALL_PROXY is no address of an HTTP proxy: set http://HOST:PORT",
        ),
        ({"all_proxy": "socks://127.0.0.1:1080"}, "all_proxy is no address"),
        ({"HTTP_PROXY": "http://hush:port"}, "HTTP_PROXY is no address"),
        ({"https_proxy": "http://"}, "https_proxy is no address"),
        ({"NO_PROXY": "localhost,fd00::/8"}, "NO_PROXY has 'fd00::/8'"),
        ({"no_proxy": "[::1],a"}, "no_proxy has '[::1]'"),
        ({"NO_PROXY": "host:port"}, "NO_PROXY has 'host:port'"),
    ],
)
def test_a_variable_is_named_without_its_secret(variables, said):
    with raising(PermanentError, Reason.BAD_ENVIRONMENT) as caught:
        exempting_loopback(variables)
    assert caught.value.message.startswith(said)
    assert "hush" not in caught.value.message


def test_sound_variables_pass():
    sound = {"HTTP_PROXY": "127.0.0.1:3128", "https_proxy": "https://user:word@proxy.example:8080/", "ALL_PROXY": ""}
    exempting_loopback(
        sound | {"NO_PROXY": "localhost, ::1,10.0.0.0/8,.corp.example,host:80,*.a,http://b", "no_proxy": "*"}
    )


def test_the_loopback_interface_is_never_behind_a_proxy(monkeypatch):
    for name in ("HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://proxy:1")
    monkeypatch.setenv("NO_PROXY", ".inside")
    loopback = ("localhost", "127.0.0.1", "127.8.9.1", "[::1]", "LOCALHOST")
    assert [proxies_of(f"http://{host}:9000") for host in loopback] == [{}] * len(loopback)
    assert proxies_of("http://a.inside") == {}
    assert proxies_of("https://a.outside:1") == {"https": "http://proxy:1"}
    monkeypatch.delenv("HTTPS_PROXY")
    monkeypatch.setenv("ALL_PROXY", "http://all:1")
    assert proxies_of("https://a.outside") == {"https": "http://all:1"}
    assert not is_loopback("127.0.0.1.example")
    assert not is_loopback(None)


def test_what_was_exempt_stays_so():
    both = exempting_loopback({"NO_PROXY": "a, b", "no_proxy": "b,c"}, "127.0.0.9")
    assert both == dict.fromkeys(("NO_PROXY", "no_proxy"), "a,b,c,127.0.0.1,localhost,127.0.0.9")
    assert exempting_loopback({"NO_PROXY": "*"}, "other")["no_proxy"] == "*"
    assert exempting_loopback({}, "other")["NO_PROXY"] == "127.0.0.1,localhost"
    assert "NO_PROXY" not in os.environ
