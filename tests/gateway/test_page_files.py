"""The files of the page, how they are served, and its readings: without a browser."""

from __future__ import annotations

import gzip
import json
import re
import urllib.parse
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any

import pytest
from starlette.types import Message

from gateway_service.app import App
from gateway_service.endpoints.endpoint import Gateway
from gateway_service.endpoints.page import INDEX, POLICY, PageFile, read_files, status_reading
from gateway_service.openapi import Status
from gateway_service.settings import Limits
from gateway_service.upstream import Upstream
from splitpoint.observe.meters import Meters
from splitpoint.observe.metrics import Service
from splitpoint.transport.tls import PLAIN
from splitpoint.v1 import scheduler_pb2 as pb
from splitpoint.v1 import types_pb2

FILES = read_files()
SCRIPTS = {name: file.content.decode() for name, file in FILES.items() if name.endswith(".js")}
# Where a page may get something from: its own server, by absolute paths.
PLACES = {"src", "href", "action", "formaction", "data", "poster", "srcset"}


class Markup(HTMLParser):
    """What the browser would load, run and find in the page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.places: list[str] = []
        self.inline: list[str] = []
        self.labelled: set[str] = set()
        self._open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        self._open.append(tag)
        self.places += [value or "" for name, value in attributes if name in PLACES]
        self.inline += [name for name, _ in attributes if name == "style" or name.startswith("on")]
        if found.get("id"):
            self.ids.append(found["id"] or "")
        if tag == "label" and found.get("for"):
            self.labelled.add(found["for"] or "")
        if tag in ("input", "select", "textarea") and "label" in self._open:
            self.labelled.add(found.get("id") or found.get("name") or "")

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] in ("script", "style") and data.strip():
            self.inline.append(data.strip())


INDEX_MARKUP = Markup(FILES[INDEX].content.decode())


def test_everything_comes_from_the_gateway_itself() -> None:
    for place in INDEX_MARKUP.places:
        assert place.startswith(("/page/", "#")), place
        assert place.startswith("#") or place.removeprefix("/page/") in FILES
    for name, file in FILES.items():
        assert not re.search(r"(https?:)?//(?!www\.w3\.org/2000/svg)\w+\.\w", file.content.decode())
        if name.endswith(".css"):
            assert b"url(" not in file.content
            assert b"@import" not in file.content


def test_nothing_runs_or_is_styled_in_the_markup() -> None:
    assert INDEX_MARKUP.inline == []
    for text in SCRIPTS.values():
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", text
        )
        assert not re.search(r"localStorage|sessionStorage|indexedDB|document\.cookie", text)


def test_the_policy_allows_no_more() -> None:
    rules = dict(rule.split(" ", 1) for rule in POLICY.split("; "))
    assert rules.pop("default-src") == "'none'"
    assert set(rules.values()) == {"'self'", "'none'"}
    assert rules["frame-ancestors"] == "'none'"
    for file in FILES.values():
        assert file.headers["content-security-policy"] == POLICY
        assert file.headers["x-content-type-options"] == "nosniff"
        assert file.headers["referrer-policy"] == "no-referrer"


def test_scripts_find_their_elements_and_each_other() -> None:
    assert len(INDEX_MARKUP.ids) == len(set(INDEX_MARKUP.ids))
    for text in SCRIPTS.values():
        for name in re.findall(r'byId\("([^"]+)"\)', text):
            assert name in INDEX_MARKUP.ids, name
        for name in re.findall(r'from "\./([^"]+)"', text):
            assert name in SCRIPTS


def test_every_field_has_a_label() -> None:
    fields = re.findall(r"<(?:input|select|textarea)\b[^>]*>", FILES[INDEX].content.decode())
    assert len(fields) > 10
    for written in fields:
        found = re.search(r'\bid="([^"]+)"', written) or re.search(r'\bname="([^"]+)"', written)
        assert found is not None
        assert found[1] in INDEX_MARKUP.labelled, written


def test_files_are_small_and_have_a_compressed_form() -> None:
    for file in FILES.values():
        assert gzip.decompress(file.compressed) == file.content
    assert sum(len(file.compressed) for file in FILES.values()) < 32_000


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_tag_names_one_version(name: str) -> None:
    file = FILES[name]
    assert file.headers["etag"] == f"W/{file.tag}"
    assert [other.tag for other in FILES.values()].count(file.tag) == 1
    for known in (file.tag, f"W/{file.tag}", f'"other", {file.tag}', "*"):
        assert file.is_known(known)
    for unknown in ("", '"other"', file.tag.strip('"'), f"{file.tag}x"):
        assert not file.is_known(unknown)


def test_a_page_file_is_what_its_headers_say() -> None:
    for name, kind in (("app.js", "text/javascript"), ("style.css", "text/css")):
        file: PageFile = FILES[name]
        assert file.headers["content-type"].startswith(kind)
    assert FILES[INDEX].headers["content-type"] == "text/html; charset=utf-8"
    assert FILES["icon.svg"].headers["content-type"] == "image/svg+xml"


# -- over HTTP ----------------------------------------------------------------------------------


@dataclass
class Got:
    """An answer of the application."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


class Browser:
    """Asks the application itself; no scheduler is there, and none is needed."""

    def __init__(self) -> None:
        upstream = Upstream(["127.0.0.1:1"], PLAIN, call_seconds=1.0)
        meters = Meters(Service.GATEWAY)
        self._app = App(Gateway(upstream, Limits(), None, meters, checks_host=True))
        self.upstream = upstream

    async def get(self, path: str, method: str = "GET", **headers: str) -> Got:
        """Header names have _ for -."""
        sent = {"host": "localhost:8000", **headers}
        scope = {
            "type": "http",
            "method": method,
            "scheme": "http",
            "http_version": "1.1",
            "path": urllib.parse.unquote(path),
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "server": ("localhost", 8000),
            "client": ("127.0.0.1", 1),
            "headers": [
                (name.replace("_", "-").encode(), value.encode()) for name, value in sent.items()
            ],
        }
        got = Got()

        async def receive() -> Message:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                got.status = message["status"]
                got.headers = {name.decode(): value.decode() for name, value in message["headers"]}
            else:
                got.body += message["body"]

        await self._app(scope, receive, send)
        return got


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    opened = Browser()
    yield opened
    await opened.upstream.close()


async def test_a_browser_gets_each_version_of_a_file_once(browser: Browser) -> None:
    first = await browser.get("/", accept_encoding="br, gzip;q=0.8")
    assert (first.status, gzip.decompress(first.body)) == (200, FILES[INDEX].content)
    assert first.headers["content-encoding"] == "gzip"
    assert first.headers["content-security-policy"] == POLICY
    again = await browser.get("/", if_none_match=first.headers["etag"])
    assert (again.status, again.body) == (304, b"")
    assert again.headers["etag"] == first.headers["etag"]
    plain = await browser.get("/page/app.js")
    assert "content-encoding" not in plain.headers
    assert plain.body == FILES["app.js"].content


async def test_nothing_else_is_a_file_of_the_page(browser: Browser) -> None:
    for path in ("/page/", "/page/none.js", "/page/%2e%2e%2ffiles.py", "/page/static/app.js"):
        got = await browser.get(path)
        assert got.status == 404, path
        assert json.loads(got.body)["error"]["code"] == "unknown_url"
    assert (await browser.get("/", method="POST")).status == 405


async def test_pages_of_other_names_do_not_get_the_page(browser: Browser) -> None:
    """Without keys a name of another site could lead here."""
    for path in ("/", "/page/app.js", "/splitpoint/status"):
        assert (await browser.get(path, host="example.org")).status == 403, path


# -- readings ---------------------------------------------------------------------------------


def worker(**fields: Any) -> pb.WorkerStatus:
    return pb.WorkerStatus(worker_id="0", address="unix:/w0", ready=True, **fields)


def reading(*workers: pb.WorkerStatus, waiting: int = 0) -> Status:
    queue = pb.GetQueueResponse(
        requests=[
            pb.QueuedRequest(request_id="secret-id", tenant="secret-tenant", reason="full")
            for _ in range(waiting)
        ],
        capacity=9,
    )
    scheduler = pb.GetSchedulerStatusResponse(uptime_seconds=2.5, completed_count=3)
    return status_reading(scheduler, queue, pb.ListWorkersResponse(workers=workers))


def the_worker(*workers: pb.WorkerStatus) -> dict[str, Any]:
    return reading(*workers)["workers"][0]


def test_a_long_queue_is_cut_and_counted_and_names_no_tenant() -> None:
    found = reading(waiting=8)
    queue = found["queue"]
    assert (queue["waiting_count"], queue["capacity"]) == (8, 9)
    assert queue["requests"] == [{"waited_seconds": 0.0, "reason": "full"}] * 5
    assert "secret" not in str(found)


def test_a_worker_that_never_answered() -> None:
    lost = pb.WorkerStatus(address="unix:/w0", message="cannot connect")
    found = the_worker(lost)
    assert (found["state"], found["message"]) == ("not ready", "cannot connect")
    assert found["telemetry"] is None
    assert found["link"] is None
    assert the_worker(worker(draining=True))["state"] == "draining"


def test_the_links_rate_comes_from_what_is_known() -> None:
    profile = types_pb2.Profile(link_bytes_per_second=3e9)
    telemetry = types_pb2.Telemetry(link_ceiling_bytes_per_second=5e9)
    assert the_worker(worker(profile=profile))["link"] == {
        "kind": "measured",
        "bytes_per_second": 3e9,
    }
    assert the_worker(worker(profile=profile, telemetry=telemetry))["link"] == {
        "kind": "at most",
        "bytes_per_second": 5e9,
    }
    emulated = worker(telemetry=telemetry, emulated_link_bytes_per_second=1e9)
    assert the_worker(emulated)["link"] == {"kind": "emulated", "bytes_per_second": 1e9}


def test_a_split_of_zero_is_not_a_missing_one() -> None:
    def split(telemetry: types_pb2.Telemetry) -> object:
        found = the_worker(worker(telemetry=telemetry))["telemetry"]
        assert isinstance(found, dict)
        return found["split_tokens"]

    assert split(types_pb2.Telemetry()) is None
    assert split(types_pb2.Telemetry(split_tokens=0)) == 0
