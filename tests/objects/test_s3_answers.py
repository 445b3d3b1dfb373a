"""What a server may answer, or not, and what becomes of it. A server on a real socket says what the test gives it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from awscrt.checksums import crc64nvme  # type: ignore[import-untyped]

from objects.targets import Target
from objects.transfers import Freely, get, put
from tierfs.checksum import to_base64
from tierfs.errors import (
    ObjectCorrupt,
    ObjectDenied,
    ObjectError,
    ObjectExists,
    ObjectMissing,
    ObjectStoreFull,
    ObjectStoreMissing,
    ObjectThrottled,
    ObjectUnavailable,
    UploadMissing,
)
from tierfs.objects import s3_client
from tierfs.objects.opening import StoreSettings, open_store
from tierfs.objects.s3_store import S3Store
from tierfs.objects.store import SentPart
from tierfs.settings import S3Settings

BODY = b"0123456789"


@dataclass
class Answer:
    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    length: int | None = None
    """What Content-Length says, where that is not what is sent before the connection closes."""


@dataclass
class Asked:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Script:
    """The answers of a server, in order; the last one for ever."""

    endpoint_url: str
    answers: list[Answer] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)


def refusal(status: int, code: str, message: str = "said so") -> Answer:
    return Answer(status, f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode())


@pytest.fixture
def script() -> Iterator[Script]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            script.asked.append(Asked(self.command, self.path, dict(self.headers), body))
            answer = script.answers.pop(0) if len(script.answers) > 1 else script.answers[0]
            self.send_response(answer.status)
            for name, value in answer.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(answer.body) if answer.length is None else answer.length))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(answer.body)
            self.close_connection = answer.length is not None

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _answer

        def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    script = Script(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield script
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def store(script: Script, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Store]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "very-secret")
    store = S3Store("bucket", "pre", S3Settings(endpoint_url=script.endpoint_url, read_timeout_s=1), 4)
    yield store
    store.close()


@pytest.mark.parametrize(
    ("answer", "expected", "says"),
    [
        (refusal(404, "NoSuchKey"), ObjectMissing, "s3://bucket/pre/k"),
        (refusal(404, "NoSuchBucket"), ObjectStoreMissing, "make the bucket of s3://bucket/pre at http://127"),
        (refusal(403, "AccessDenied"), ObjectDenied, "allow s3:PutObject"),
        (refusal(403, "SomethingElse"), ObjectDenied, "allow s3:PutObject"),
        (refusal(400, "ExpiredToken"), ObjectDenied, "expired.*renew them"),
        (refusal(403, "InvalidAccessKeyId"), ObjectDenied, "renew them"),
        (refusal(403, "RequestTimeTooSkewed"), ObjectDenied, "clock"),
        (refusal(400, "KMS.DisabledException"), ObjectDenied, "KMS"),
        (refusal(400, "BadDigest"), ObjectCorrupt, "BadDigest"),
        (refusal(412, "PreconditionFailed"), ObjectExists, "PreconditionFailed"),
        (refusal(409, "ConditionalRequestConflict"), ObjectUnavailable, "ConditionalRequestConflict"),
        (refusal(403, "QuotaExceeded"), ObjectStoreFull, "free space"),
        (refusal(507, "XMinioStorageFull"), ObjectStoreFull, "free space"),
        (refusal(404, "NoSuchUpload"), UploadMissing, "NoSuchUpload"),
        (refusal(400, "EntityTooLarge"), ObjectError, "EntityTooLarge"),
        (refusal(400, "AuthorizationHeaderMalformed", "the region is wrong"), ObjectStoreMissing, r"set s3\.region"),
        (Answer(403), ObjectDenied, "allow s3:PutObject"),
        (Answer(200), ObjectUnavailable, "no ETag"),
    ],
)
def test_what_a_server_refuses_is_said_with_what_to_do(
    script: Script, store: S3Store, answer: Answer, expected: type[ObjectError], says: str
) -> None:
    script.answers = [answer]
    with pytest.raises(ObjectError, match=says) as caught:
        put(store, "k", BODY, only_if_absent=True)
    assert type(caught.value) is expected
    assert "very-secret" not in str(caught.value)
    assert len(script.asked) == 1, "asking again at once is of no use"
    assert script.asked[0].headers["If-None-Match"] == "*"
    assert script.asked[0].headers["x-amz-checksum-crc64nvme"] == to_base64(crc64nvme(BODY))


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (refusal(503, "SlowDown"), ObjectThrottled),
        (refusal(429, "TooManyRequests"), ObjectThrottled),
        (refusal(500, "InternalError"), ObjectUnavailable),
        (Answer(502, b"<html>a proxy's page</html>"), ObjectUnavailable),
    ],
)
def test_what_lasts_for_seconds_is_tried_again_and_then_said(
    script: Script, store: S3Store, answer: Answer, expected: type[ObjectError]
) -> None:
    script.answers = [answer, Answer(headers={"ETag": '"e"'})]
    assert put(store, "k", BODY) == "e"
    assert [asked.body for asked in script.asked] == [BODY, BODY]
    script.answers = [answer]
    with pytest.raises(ObjectError) as caught:
        put(store, "k", BODY)
    assert type(caught.value) is expected
    assert caught.value.may_pass


@pytest.mark.parametrize(
    ("answer", "expected", "says"),
    [
        (Answer(200, BODY), ObjectCorrupt, "whole object"),
        (Answer(206, b"1234", {"Content-Range": "bytes 1-4/10"}), ObjectCorrupt, "bytes 2 to 5 were asked for"),
        (Answer(206, b"234", {"Content-Range": "bytes 2-4/5"}), ObjectCorrupt, "bytes 2 to 5 were asked for"),
        (Answer(206, b"23", {"Content-Range": "bytes 2-5/10"}, length=4), ObjectUnavailable, "2 of 4 bytes"),
        (refusal(416, "InvalidRange"), ObjectCorrupt, "InvalidRange"),
    ],
)
def test_bytes_other_than_those_asked_for_are_refused(
    script: Script, store: S3Store, answer: Answer, expected: type[ObjectError], says: str
) -> None:
    script.answers = [answer]
    with pytest.raises(expected, match=says):
        store.read_range("k", 2, memoryview(bytearray(4)), Freely())
    assert script.asked[0].headers["Range"] == "bytes=2-5"
    script.answers = [Answer(206, b"2345", {"Content-Range": "bytes 2-5/10"})]
    into = bytearray(4)
    store.read_range("k", 2, memoryview(into), Freely())
    assert into == b"2345", "the connection of a refused answer is not used again"


def test_an_answer_that_ends_early_is_no_object(script: Script, store: S3Store) -> None:
    script.answers = [Answer(200, b"01234", {"ETag": '"e"'}, length=10)]
    with pytest.raises(ObjectUnavailable):
        store.get("k", 100)
    wrong = {"ETag": '"e"', "x-amz-checksum-crc64nvme": to_base64(crc64nvme(b"other"))}
    script.answers = [Answer(200, BODY, wrong)]
    with pytest.raises(ObjectCorrupt):
        store.get("k", 100)
    assert script.asked[-1].headers["x-amz-checksum-mode"] == "ENABLED"


def test_a_server_that_does_not_answer_is_given_up(script: Script, store: S3Store) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        deaf = S3Store("bucket", "", S3Settings(endpoint_url=endpoint, read_timeout_s=0.2), 1)
        with pytest.raises(ObjectUnavailable, match=f"{endpoint} took the request and said nothing"):
            deaf.list_page("")
    with pytest.raises(ObjectUnavailable, match=rf"no connection to {endpoint} \(connection refused\)"):
        deaf.list_page("")
    deaf.close()


PARTS = [SentPart(1, 5, "a" * 32, crc64nvme(b"01234")), SentPart(2, 5, "b" * 32, crc64nvme(b"56789"))]
FINISHED = Answer(200, b"<CompleteMultipartUploadResult><ETag>&quot;done&quot;</ETag></CompleteMultipartUploadResult>")


def test_the_whole_objects_checksum_and_size_go_along(script: Script, store: S3Store) -> None:
    script.answers = [FINISHED]
    assert store.finish_upload("k", "u", PARTS) == "done"
    (asked,) = script.asked
    assert asked.headers["x-amz-checksum-crc64nvme"] == to_base64(crc64nvme(BODY))
    assert asked.headers["x-amz-checksum-type"] == "FULL_OBJECT"
    assert asked.headers["x-amz-mp-object-size"] == "10"


def test_a_finish_that_failed_with_status_200_is_no_success(script: Script, store: S3Store) -> None:
    script.answers = [Answer(200, refusal(200, "InternalError").body)]
    with pytest.raises(ObjectUnavailable):
        store.finish_upload("k", "u", PARTS)


@pytest.mark.parametrize("is_ours", [True, False])
def test_a_finish_whose_answer_was_lost_is_found_out(script: Script, store: S3Store, is_ours: bool) -> None:
    there = {
        "ETag": '"there"',
        "Content-Type": "x",
        "x-amz-checksum-crc64nvme": to_base64(crc64nvme(BODY if is_ours else b"another's.")),
    }
    script.answers = [refusal(404, "NoSuchUpload"), Answer(200, BODY, there)]
    if is_ours:
        assert store.finish_upload("k", "u", PARTS) == "there"
    else:
        with pytest.raises(UploadMissing):
            store.finish_upload("k", "u", PARTS)
    assert [asked.method for asked in script.asked] == ["POST", "HEAD"]


def test_what_a_server_does_not_know_is_left_out_from_then_on(script: Script, store: S3Store) -> None:
    script.answers = [refusal(501, "NotImplemented"), Answer(headers={"ETag": '"e"'})]
    put(store, "k", BODY)
    put(store, "k", BODY)
    assert ["x-amz-checksum-crc64nvme" in asked.headers for asked in script.asked] == [True, False, False]
    script.answers = [FINISHED]
    store.finish_upload("k", "u", PARTS)
    assert "x-amz-checksum-crc64nvme" not in script.asked[-1].headers
    assert b"Checksum" not in script.asked[-1].body


def test_keys_of_a_batch_that_were_not_deleted_are_said(script: Script, store: S3Store) -> None:
    failed = "<Error><Key>pre/b</Key><Code>AccessDenied</Code><Message>no</Message></Error>"
    gone = "<Error><Key>pre/a</Key><Code>NoSuchKey</Code></Error>"
    script.answers = [Answer(200, f"<DeleteResult>{gone}</DeleteResult>".encode())]
    store.delete(["a", "b"])
    script.answers = [Answer(200, f"<DeleteResult>{gone}{failed}</DeleteResult>".encode())]
    with pytest.raises(ObjectDenied, match=r"s3://bucket/pre/b: AccessDenied.*allow s3:DeleteObject"):
        store.delete(["a", "b"])
    script.answers = [refusal(400, "MissingContentMD5"), Answer(204)]
    script.asked.clear()
    store.delete(["a", "b"])
    assert [asked.method for asked in script.asked] == ["POST", "DELETE", "DELETE"]


def test_without_credentials_it_says_where_they_may_come_from(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    for profile in ("", "not-there"):
        store = S3Store("bucket", "", S3Settings(endpoint_url="http://127.0.0.1:9", profile=profile), 1)
        with pytest.raises(ObjectDenied, match=r"no credentials.*environment.*profile"):
            store.list_page("")


def test_credentials_that_were_renewed_in_their_file_are_used(
    on_seaweedfs: Target, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server = on_seaweedfs.server
    assert server
    put(on_seaweedfs.store, "k", BODY)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    credentials = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(credentials))
    monkeypatch.setattr(s3_client, "RENEW_EVERY_S", 0.0)
    credentials.write_text("[p]\naws_access_key_id = past\naws_secret_access_key = past\n")
    settings = StoreSettings(
        url=on_seaweedfs.settings.url, s3=S3Settings(endpoint_url=server.endpoint_url, profile="p"), connections=2
    )
    store = open_store(settings)
    for _ in range(2):
        with pytest.raises(ObjectDenied, match="renew them"):
            get(store, "k")
    credentials.write_text(
        f"[p]\naws_access_key_id = {server.access_key}\naws_secret_access_key = {server.secret_key}\n"
    )
    assert get(store, "k") == BODY
    store.close()
