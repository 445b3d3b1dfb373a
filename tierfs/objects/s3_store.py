"""`s3://bucket/prefix`: Amazon S3 and servers that speak its protocol.

Bytes go from the mapped file to the socket and back without a copy. Each request carries the CRC64NVME of its bytes,
which Amazon checks and keeps; what a compatible server does not know is left out, and the probe says so.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from tierfs.checksum import FileChecksum, combine, to_base64
from tierfs.errors import ObjectCorrupt, ObjectError, ObjectMissing, ObjectUnavailable, UploadMissing
from tierfs.objects.opening import bucket_and_prefix
from tierfs.objects.probing import found_capabilities
from tierfs.objects.s3_client import S3Clients
from tierfs.objects.s3_errors import CLIENT_ERRORS, is_not_understood, translated, wants_new_credentials
from tierfs.objects.s3_transfer import MemoryBody, read_into
from tierfs.objects.store import (
    BATCH_KEYS,
    COPY_BYTES,
    MOST_PARTS,
    Capabilities,
    Flow,
    ObjectInfo,
    Page,
    PartInfo,
    SentPart,
    UnfinishedUpload,
)
from tierfs.settings import S3Settings

log = logging.getLogger("tierfs.objects")

T = TypeVar("T")


class S3Store:
    """See `tierfs.objects.store.ObjectStore`. Thread-safe."""

    def __init__(
        self, bucket: str, prefix: str, settings: S3Settings, connections: int, storage_class: str = ""
    ) -> None:
        """`prefix` without slashes around it. Nothing is asked of the server. SettingsError."""
        self.url = f"s3://{bucket}/{prefix}" if prefix else f"s3://{bucket}"
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._clients = S3Clients(settings, connections)
        self._storage = {"StorageClass": storage_class} if storage_class else {}
        # What the server was found to refuse is not sent again. Another process finds out for itself.
        self._sends_checksums = True
        self._way_to_finish = 0

    def probe(self) -> Capabilities:
        return found_capabilities(self)

    def put(self, key: str, data: memoryview, crc64nvme: int, flow: Flow, *, only_if_absent: bool = False) -> str:
        condition = {"IfNoneMatch": "*"} if only_if_absent else {}

        def send(client: Any, checksum: dict[str, Any]) -> Any:
            return client.put_object(
                Bucket=self._bucket,
                Key=self._key(key),
                Body=MemoryBody(data, flow),
                **self._stored(key),
                **condition,
                **checksum,
            )

        return self._etag(
            self._with_checksum("PutObject", key, send, {"ChecksumCRC64NVME": to_base64(crc64nvme)}), "PutObject", key
        )

    def get(self, key: str, most_bytes: int) -> tuple[bytes, str]:
        with self._calling("GetObject", key) as client:
            answer = client.get_object(Bucket=self._bucket, Key=self._key(key), ChecksumMode="ENABLED")
            with contextlib.closing(answer["Body"]) as body:
                if answer["ContentLength"] > most_bytes:
                    raise ObjectError(
                        f"{self.url}/{key} has {answer['ContentLength']} bytes; at most {most_bytes} were expected"
                    )
                data = body.read()
            if len(data) != answer["ContentLength"]:
                raise ObjectUnavailable(f"{self.url}/{key}: {len(data)} of {answer['ContentLength']} bytes came")
            return data, self._etag(answer, "GetObject", key)

    def read_range(self, key: str, offset: int, into: memoryview, flow: Flow) -> None:
        if not into:
            return
        with self._calling("GetObject", key) as client:
            last = offset + len(into) - 1
            answer = client.get_object(Bucket=self._bucket, Key=self._key(key), Range=f"bytes={offset}-{last}")
            with contextlib.closing(answer["Body"]) as body:
                self._check_range(answer, key, offset, last)
                read_into(body, into, flow, f"{self.url}/{key}")

    def list_page(self, prefix: str, *, delimiter: str = "", more: str = "") -> Page:
        asked: dict[str, Any] = {"Delimiter": delimiter} if delimiter else {}
        if more:
            asked["ContinuationToken"] = more
        with self._calling("ListBucket", prefix) as client:
            answer = client.list_objects_v2(Bucket=self._bucket, Prefix=self._key(prefix), MaxKeys=BATCH_KEYS, **asked)
            objects = tuple(
                ObjectInfo(
                    self._relative(each["Key"]), each["Size"], each["ETag"].strip('"'), each["LastModified"].timestamp()
                )
                for each in answer.get("Contents", ())
                if self._is_below(each["Key"])
            )
            prefixes = tuple(
                self._relative(each["Prefix"])
                for each in answer.get("CommonPrefixes", ())
                if self._is_below(each["Prefix"])
            )
            return Page(objects, prefixes, answer["NextContinuationToken"] if answer.get("IsTruncated") else "")

    def delete(self, keys: Sequence[str]) -> None:
        if len(keys) > 1:
            try:
                self._delete_batch(keys)
                return
            except ObjectError as error:
                if not self._may_know_less(error):
                    raise
                log.debug("%s deletes only one object at a time: %s", self.url, error.message)
        for key in keys:
            with self._calling("DeleteObject", key) as client, contextlib.suppress(ObjectMissing):
                client.delete_object(Bucket=self._bucket, Key=self._key(key))

    def copy(self, source_url: str, key: str, checksum: FileChecksum, flow: Flow) -> str:
        bucket, prefix = bucket_and_prefix(source_url)
        source = {"Bucket": bucket, "Key": f"{prefix}/{key}" if prefix else key}
        flow.passing(0)
        if checksum.size_bytes > COPY_BYTES:
            return self._copy_in_parts(source, key, checksum, flow)

        def send(client: Any, asked: dict[str, Any]) -> Any:
            # Tags are not taken along: reading and setting them needs permissions of their own.
            return client.copy_object(
                Bucket=self._bucket,
                Key=self._key(key),
                CopySource=source,
                TaggingDirective="REPLACE",
                **self._stored(key),
                **asked,
            )

        answer = self._with_checksum("PutObject", key, send, {"ChecksumAlgorithm": "CRC64NVME"})["CopyObjectResult"]
        if answer.get("ChecksumCRC64NVME", to_base64(checksum.full)) != to_base64(checksum.full):
            raise ObjectCorrupt(
                f"{source_url}/{key} has other bytes than its manifest says: its copy has another checksum"
            )
        return self._etag(answer, "PutObject", key)

    def _copy_in_parts(self, source: dict[str, str], key: str, checksum: FileChecksum, flow: Flow) -> str:
        """One after the other: several files are copied at a time. What is not finished is aborted."""
        upload_id = self.start_upload(key)
        try:
            # Without their checksums: not every server sums up parts that it copies. Amazon's checks that of the whole.
            parts: list[dict[str, Any]] = []
            for number, (offset, length) in enumerate(_extents(checksum), 1):
                flow.passing(0)
                with self._calling("PutObject", key) as client:
                    answer = client.upload_part_copy(
                        Bucket=self._bucket,
                        Key=self._key(key),
                        UploadId=upload_id,
                        PartNumber=number,
                        CopySource=source,
                        CopySourceRange=f"bytes={offset}-{offset + length - 1}",
                    )["CopyPartResult"]
                parts.append({"PartNumber": number, "ETag": f'"{self._etag(answer, "PutObject", key)}"'})
            return self._finish(key, upload_id, parts, checksum.size_bytes, checksum.full)
        except BaseException:
            with contextlib.suppress(ObjectError):
                self.abort_upload(key, upload_id)
            raise

    def start_upload(self, key: str) -> str:
        def send(client: Any, checksum: dict[str, Any]) -> Any:
            return client.create_multipart_upload(
                Bucket=self._bucket, Key=self._key(key), **self._stored(key), **checksum
            )

        checksum = {"ChecksumAlgorithm": "CRC64NVME", "ChecksumType": "FULL_OBJECT"}
        return str(self._with_checksum("PutObject", key, send, checksum)["UploadId"])

    def put_part(self, key: str, upload_id: str, number: int, data: memoryview, crc64nvme: int, flow: Flow) -> str:
        def send(client: Any, checksum: dict[str, Any]) -> Any:
            return client.upload_part(
                Bucket=self._bucket,
                Key=self._key(key),
                UploadId=upload_id,
                PartNumber=number,
                Body=MemoryBody(data, flow),
                **checksum,
            )

        return self._etag(
            self._with_checksum("PutObject", key, send, {"ChecksumCRC64NVME": to_base64(crc64nvme)}), "PutObject", key
        )

    def list_parts(self, key: str, upload_id: str) -> list[PartInfo]:
        found: list[PartInfo] = []
        marker: dict[str, Any] = {}
        while True:
            with self._calling("ListMultipartUploadParts", key) as client:
                answer = client.list_parts(Bucket=self._bucket, Key=self._key(key), UploadId=upload_id, **marker)
            found += [
                PartInfo(part["PartNumber"], part["Size"], part["ETag"].strip('"')) for part in answer.get("Parts", ())
            ]
            if not answer.get("IsTruncated"):
                return found
            marker = {"PartNumberMarker": answer["NextPartNumberMarker"]}

    def finish_upload(self, key: str, upload_id: str, parts: Sequence[SentPart]) -> str:
        size = full = 0
        for number, part in enumerate(parts, 1):
            if part.number != number:
                raise ObjectError(f"the parts of {key} must be numbered from 1 without gaps; {number} is missing")
            size += part.size_bytes
            full = combine(full, part.crc64nvme, part.size_bytes)
        try:
            return self._finish(key, upload_id, [self._named(part) for part in parts], size, full)
        except UploadMissing:
            etag = self._finished_before(key, parts, size, full)
            if etag is None:
                raise
            return etag

    def abort_upload(self, key: str, upload_id: str) -> None:
        with contextlib.suppress(UploadMissing), self._calling("AbortMultipartUpload", key) as client:
            client.abort_multipart_upload(Bucket=self._bucket, Key=self._key(key), UploadId=upload_id)

    def list_uploads(self, prefix: str) -> list[UnfinishedUpload]:
        found: list[UnfinishedUpload] = []
        marker: dict[str, Any] = {}
        while True:
            with self._calling("ListBucketMultipartUploads", prefix) as client:
                answer = client.list_multipart_uploads(Bucket=self._bucket, Prefix=self._key(prefix), **marker)
            found += [
                UnfinishedUpload(self._relative(each["Key"]), each["UploadId"], each["Initiated"].timestamp())
                for each in answer.get("Uploads", ())
                if each["Key"].startswith(self._key(prefix)) and self._is_below(each["Key"])
            ]
            if not answer.get("IsTruncated"):
                return found
            marker = {"KeyMarker": answer["NextKeyMarker"], "UploadIdMarker": answer["NextUploadIdMarker"]}

    def close(self) -> None:
        self._clients.close()

    def _key(self, key: str) -> str:
        return self._prefix + key

    def _stored(self, key: str) -> dict[str, str]:
        """The storage class; what tierfs itself adds has the bucket's own, so that it can always be read."""
        return {} if ".tierfs" in key.split("/") else self._storage

    def _relative(self, key: str) -> str:
        return key[len(self._prefix) :]

    def _is_below(self, key: str) -> bool:
        """False for the empty object that consoles make as a 'folder' of the prefix itself."""
        return key.startswith(self._prefix) and len(key) > len(self._prefix)

    @contextlib.contextmanager
    def _calling(self, action: str, key: str) -> Iterator[Any]:
        """The client; what it raises becomes an ObjectError."""
        client = None
        try:
            client = self._clients.current()
            yield client
        except CLIENT_ERRORS as error:
            if client is not None and wants_new_credentials(error):
                self._clients.renew(client)
            raise translated(error, action, self.url, key, self._clients.endpoint) from error

    def _may_know_less(self, error: ObjectError) -> bool:
        """The server may have refused what it does not know. Amazon's knows all that is sent here."""
        return not self._clients.is_amazon and error.__cause__ is not None and is_not_understood(error.__cause__)

    def _with_checksum(
        self, action: str, key: str, send: Callable[[Any, dict[str, Any]], T], checksum: dict[str, Any]
    ) -> T:
        """Send with the checksum; where the server does not understand that, without, and from then on always."""
        if self._sends_checksums:
            try:
                with self._calling(action, key) as client:
                    return send(client, checksum)
            except ObjectError as error:
                if not self._may_know_less(error):
                    raise
                refusal = error
        with self._calling(action, key) as client:
            answer = send(client, {})
        if self._sends_checksums:
            self._sends_checksums = False
            log.warning("%s gets no checksums from now on: it refused one (%s)", self.url, refusal.message)
        return answer

    def _finish(self, key: str, upload_id: str, parts: Sequence[dict[str, Any]], size: int, full: int) -> str:
        whole = {"ChecksumCRC64NVME": to_base64(full), "ChecksumType": "FULL_OBJECT"}
        ways: tuple[dict[str, Any], ...] = (whole | {"MpuObjectSize": size}, whole, {})
        first = self._way_to_finish if self._sends_checksums else len(ways) - 1
        for way in range(first, len(ways)):
            try:
                with self._calling("PutObject", key) as client:
                    answer = client.complete_multipart_upload(
                        Bucket=self._bucket,
                        Key=self._key(key),
                        UploadId=upload_id,
                        MultipartUpload={"Parts": parts},
                        **ways[way],
                    )
            except ObjectError as error:
                # BadDigest: some servers know only checksums of the parts' checksums. The parts were checked one by
                # one, and are named here with their checksums.
                is_composite = isinstance(error, ObjectCorrupt) and not self._clients.is_amazon
                if way + 1 == len(ways) or not (is_composite or self._may_know_less(error)):
                    raise
                continue
            self._way_to_finish = max(self._way_to_finish, way)
            return self._etag(answer, "PutObject", key)
        raise AssertionError("the last way was tried or raised")

    def _named(self, part: SentPart) -> dict[str, Any]:
        named: dict[str, Any] = {"PartNumber": part.number, "ETag": f'"{part.etag}"'}
        return named | ({"ChecksumCRC64NVME": to_base64(part.crc64nvme)} if self._sends_checksums else {})

    def _finished_before(self, key: str, parts: Sequence[SentPart], size: int, full: int) -> str | None:
        """The ETag where the object is just what these parts make: an answer was lost on the way, or the process
        that waited for it died."""
        try:
            with self._calling("GetObject", key) as client:
                answer = client.head_object(Bucket=self._bucket, Key=self._key(key), ChecksumMode="ENABLED")
        except ObjectError:
            return None
        etag = str(answer.get("ETag", "")).strip('"')
        if answer.get("ContentLength") != size:
            return None
        if answer.get("ChecksumCRC64NVME") == to_base64(full):
            return etag
        return etag if etag == _etag_of_parts(parts) else None

    def _delete_batch(self, keys: Sequence[str]) -> None:
        wanted = {"Objects": [{"Key": self._key(key)} for key in keys], "Quiet": True}
        with self._calling("DeleteObject", keys[0]) as client:
            answer = client.delete_objects(Bucket=self._bucket, Delete=wanted)
        for failed in answer.get("Errors", ()):
            if failed.get("Code") == "NoSuchKey":
                continue
            raise self._failed_in_batch(failed)

    def _failed_in_batch(self, failed: dict[str, str]) -> ObjectError:
        from botocore.exceptions import ClientError  # type: ignore[import-untyped]

        error = ClientError({"Error": failed, "ResponseMetadata": {"HTTPStatusCode": 200}}, "DeleteObjects")
        key = self._relative(failed.get("Key", ""))
        return translated(error, "DeleteObject", self.url, key, self._clients.endpoint)

    def _check_range(self, answer: dict[str, Any], key: str, first: int, last: int) -> None:
        status = answer["ResponseMetadata"]["HTTPStatusCode"]
        got = str(answer.get("ContentRange", ""))
        if status == 206 and got.startswith(f"bytes {first}-{last}/"):
            return
        wanted = last - first + 1
        if status == 200 and not got and first == 0 and answer.get("ContentLength") == wanted:
            return
        if status == 200:
            raise ObjectCorrupt(
                f"{self.url}/{key}: the server {self._clients.endpoint} answered with the whole object where bytes "
                f"{first} to {last} were asked for; it can't be used as an object tier"
            )
        raise ObjectCorrupt(
            f"{self.url}/{key}: bytes {first} to {last} were asked for, but the server has {got or 'no such range'}"
        )

    def _etag(self, answer: dict[str, Any], action: str, key: str) -> str:
        etag = str(answer.get("ETag") or "").strip('"')
        if not etag:
            raise ObjectUnavailable(f"{action} {self.url}/{key}: the answer has no ETag, so it is not known to be done")
        return etag


def _extents(checksum: FileChecksum) -> Iterator[tuple[int, int]]:
    """Offset and length of each part that is copied by one request."""
    part = max(COPY_BYTES, -(-checksum.size_bytes // MOST_PARTS))
    for offset in range(0, checksum.size_bytes, part):
        yield offset, min(part, checksum.size_bytes - offset)


def _etag_of_parts(parts: Sequence[SentPart]) -> str:
    """What S3 makes of the parts' ETags where these are MD5 sums: not with KMS or customer keys."""
    try:
        sums = b"".join(bytes.fromhex(part.etag) for part in parts)
    except ValueError:
        return ""
    return f"{hashlib.md5(sums, usedforsecurity=False).hexdigest()}-{len(parts)}"
