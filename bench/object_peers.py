"""What `object_tier.py` compares with: one program that sends files to an S3 server or fetches them, by some client.

    python object_peers.py CLIENT send|fetch JSON      JSON: endpoint, bucket, prefix, files (paths), size_bytes

Imports and connections' set-up come first; then it prints "ready", waits for a line, works, and prints "done". The
clients: `boto3` (low-level calls, the bytes straight from and into a mapping), `s3transfer` (boto3's upload_file and
download_file with its defaults), `s5cmd`, `dcp` (DCP with s3torchconnector's writer and reader) and
`s3torchconnector` (its client alone: for a server that gives back zeros, which no DCP reader can load).
"""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
from base64 import b64encode
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

MIB = 1 << 20
PART_BYTES = 16 * MIB
CONNECTIONS = 8
BIN = Path(sys.executable).parent

Work = Callable[[], object]
"""Does it, once."""


class Slices:
    """A body for botocore that hands out large slices of a mapping instead of copies of 8 KiB each."""

    def __init__(self, view: memoryview) -> None:
        self._view, self._at = view, 0

    def __len__(self) -> int:
        return len(self._view)

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: len(self._view)}[whence]
        return self._at

    def read(self, size: int = -1) -> memoryview:
        size = len(self._view) - self._at if size is None or size < 0 else max(size, MIB)
        piece = self._view[self._at : self._at + size]
        self._at += len(piece)
        return piece


class Job:
    def __init__(self, facts: dict[str, Any]) -> None:
        self.endpoint: str = facts["endpoint"]
        self.bucket: str = facts["bucket"]
        self.prefix: str = facts["prefix"]
        self.files = [Path(path) for path in facts["files"]]
        self.size_bytes: int = facts["size_bytes"]

    def key(self, path: Path) -> str:
        return f"{self.prefix}/{path.name}"

    def _client(self, **config: Any) -> Any:
        import boto3
        from botocore.config import Config

        config = {"max_pool_connections": CONNECTIONS, **config}
        s3 = {"addressing_style": "path", **config.pop("s3", {})}
        return boto3.client("s3", endpoint_url=self.endpoint, config=Config(s3=s3, **config))

    def _mappings(self, access: int) -> list[memoryview]:
        views = []
        for path in self.files:
            fd = os.open(path, os.O_RDWR if access == mmap.ACCESS_WRITE else os.O_RDONLY)
            views.append(memoryview(mmap.mmap(fd, self.size_bytes, access=access)))
            os.close(fd)
        return views

    def _ranges(self) -> list[tuple[int, int, int]]:
        """File, offset, length of all parts."""
        return [
            (index, offset, min(PART_BYTES, self.size_bytes - offset))
            for index in range(len(self.files))
            for offset in range(0, self.size_bytes, PART_BYTES)
        ]

    def _make_files(self) -> None:
        for path in self.files:
            with path.open("wb") as file:
                file.truncate(self.size_bytes)

    # ------------------------------------------------------------------ boto3, low level

    def send_boto3(self) -> Work:
        from awscrt import checksums

        s3 = self._client(
            parameter_validation=False,
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            s3={"payload_signing_enabled": False},
        )
        views = self._mappings(mmap.ACCESS_READ)
        s3.list_objects_v2(Bucket=self.bucket, MaxKeys=1)

        def work() -> None:
            kind = {"ChecksumAlgorithm": "CRC64NVME", "ChecksumType": "FULL_OBJECT"}
            ids = [
                s3.create_multipart_upload(Bucket=self.bucket, Key=self.key(path), **kind)["UploadId"]
                for path in self.files
            ]

            def send(part: tuple[int, int, int]) -> tuple[int, dict[str, Any]]:
                index, offset, length = part
                view = views[index][offset : offset + length]
                checksum = b64encode(checksums.crc64nvme(view).to_bytes(8, "big")).decode()
                number = offset // PART_BYTES + 1
                answer = s3.upload_part(
                    Bucket=self.bucket,
                    Key=self.key(self.files[index]),
                    UploadId=ids[index],
                    PartNumber=number,
                    Body=Slices(view),
                    ChecksumCRC64NVME=checksum,
                )
                return index, {"PartNumber": number, "ETag": answer["ETag"], "ChecksumCRC64NVME": checksum}

            with ThreadPoolExecutor(CONNECTIONS) as pool:
                sent = list(pool.map(send, self._ranges()))
            for index, path in enumerate(self.files):
                parts = [part for of, part in sent if of == index]
                s3.complete_multipart_upload(
                    Bucket=self.bucket, Key=self.key(path), UploadId=ids[index], MultipartUpload={"Parts": parts}
                )

        return work

    def fetch_boto3(self) -> Work:
        s3 = self._client(parameter_validation=False, response_checksum_validation="when_required")
        s3.list_objects_v2(Bucket=self.bucket, MaxKeys=1)

        def work() -> None:
            self._make_files()
            views = self._mappings(mmap.ACCESS_WRITE)

            def fetch(part: tuple[int, int, int]) -> None:
                index, offset, length = part
                body = s3.get_object(
                    Bucket=self.bucket, Key=self.key(self.files[index]), Range=f"bytes={offset}-{offset + length - 1}"
                )["Body"]
                view, done = views[index][offset : offset + length], 0
                while done < length:
                    got = body._raw_stream._fp.readinto(view[done:])
                    if not got:
                        raise OSError(f"{done} of {length} bytes came")
                    done += got
                body._raw_stream.release_conn()

            with ThreadPoolExecutor(CONNECTIONS) as pool:
                list(pool.map(fetch, self._ranges()))

        return work

    # ------------------------------------------------------------------ boto3's transfer manager

    def _transfer(self, call: str) -> Work:
        s3 = self._client(max_pool_connections=10 * len(self.files))
        s3.list_objects_v2(Bucket=self.bucket, MaxKeys=1)

        def one(path: Path) -> None:
            if call == "upload_file":
                s3.upload_file(str(path), self.bucket, self.key(path))
            else:
                s3.download_file(self.bucket, self.key(path), str(path))

        def work() -> None:
            with ThreadPoolExecutor(len(self.files)) as pool:
                list(pool.map(one, self.files))

        return work

    def send_s3transfer(self) -> Work:
        return self._transfer("upload_file")

    def fetch_s3transfer(self) -> Work:
        return self._transfer("download_file")

    # ------------------------------------------------------------------ programs

    def _s5cmd(self, *arguments: str | Path) -> Work:
        return lambda: subprocess.run(
            [BIN / "s5cmd", "--endpoint-url", self.endpoint, "--log", "error", *arguments], check=True
        )

    def send_s5cmd(self) -> Work:
        return self._s5cmd("cp", f"{self.files[0].parent}/*", f"s3://{self.bucket}/{self.prefix}/")

    def fetch_s5cmd(self) -> Work:
        return self._s5cmd("cp", f"s3://{self.bucket}/{self.prefix}/*", f"{self.files[0].parent}/")

    # ------------------------------------------------------------------ s3torchconnector

    def _connector(self) -> Any:
        from s3torchconnector import S3ClientConfig

        return S3ClientConfig(force_path_style=True)

    def _tensors(self) -> dict[str, Any]:
        import torch

        return {path.name: torch.zeros(self.size_bytes, dtype=torch.uint8) for path in self.files}

    def _dcp(self, save: bool) -> Work:
        import torch.distributed.checkpoint as dcp
        from s3torchconnector.dcp import S3StorageReader, S3StorageWriter

        os.environ["AWS_ENDPOINT_URL"] = self.endpoint
        uri = f"s3://{self.bucket}/{self.prefix}/"
        tensors = self._tensors()
        for tensor in tensors.values():
            tensor.fill_(1)  # its pages are there before the clock runs
        config = self._connector()
        if save:
            writer = S3StorageWriter("us-east-1", uri, s3client_config=config, thread_count=len(self.files))
            return lambda: dcp.save(tensors, storage_writer=writer)
        reader = S3StorageReader("us-east-1", uri, s3client_config=config)
        return lambda: dcp.load(tensors, storage_reader=reader)

    def send_dcp(self) -> Work:
        return self._dcp(save=True)

    def fetch_dcp(self) -> Work:
        return self._dcp(save=False)

    def send_s3torchconnector(self) -> Work:
        from s3torchconnector._s3client import S3Client

        client = S3Client("us-east-1", endpoint=self.endpoint, s3client_config=self._connector())
        views = self._mappings(mmap.ACCESS_READ)

        def one(index: int) -> None:
            with client.put_object(self.bucket, self.key(self.files[index])) as writer:
                for offset in range(0, self.size_bytes, 32 * MIB):
                    writer.write(views[index][offset : offset + 32 * MIB])

        def work() -> None:
            with ThreadPoolExecutor(len(self.files)) as pool:
                list(pool.map(one, range(len(self.files))))

        return work

    def fetch_s3torchconnector(self) -> Work:
        from s3torchconnector import S3ReaderConstructor
        from s3torchconnector._s3client import S3Client

        client = S3Client("us-east-1", endpoint=self.endpoint, s3client_config=self._connector())
        reader = S3ReaderConstructor.range_based(buffer_size=0)

        def work() -> None:
            self._make_files()
            views = self._mappings(mmap.ACCESS_WRITE)

            def one(index: int) -> None:
                source = client.get_object(self.bucket, self.key(self.files[index]), reader_constructor=reader)
                if source.readinto(views[index]) != self.size_bytes:
                    raise OSError("fewer bytes came")

            with ThreadPoolExecutor(len(self.files)) as pool:
                list(pool.map(one, range(len(self.files))))

        return work


def main() -> None:
    client, direction, facts = sys.argv[1:]
    work: Work = getattr(Job(json.loads(facts)), f"{direction}_{client}")()
    print("ready", flush=True)
    sys.stdin.readline()
    work()
    print("done", flush=True)
    sys.stdin.readline()  # until then it can be looked at


if __name__ == "__main__":
    main()
