"""A real S3 server on this machine for tests: moto's, on loopback, with a bucket and credentials.

Rank processes reach it through the environment that `environment` gives; no request leaves here.
"""

import http.client
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

# A made-up secret, which tests search for in output.
SECRET = "wJalrXUtnFEMIsecretSECRETsecret00bPxRfiCY"  # noqa: S105
BUCKET = "checkpoints"


class ObjectStore(NamedTuple):
    """A server, and a client that looks at it from outside."""

    endpoint: str
    client: Any

    @property
    def address(self) -> str:
        """The bucket, for --save."""
        return f"s3://{BUCKET}"

    @property
    def environment(self) -> Mapping[str, str]:
        """What a process needs to find it."""
        return _environment(self.endpoint)

    def names(self, prefix: str = "") -> list[str]:
        """The keys of all objects below a prefix."""
        listed = self.client.list_objects_v2(Bucket=BUCKET, Prefix=prefix)
        return [entry["Key"] for entry in listed.get("Contents", ())]

    def get(self, key: str) -> bytes:
        """What an object holds."""
        data: bytes = self.client.get_object(Bucket=BUCKET, Key=key)["Body"].read()
        return data

    def put(self, key: str, data: bytes) -> None:
        """Make or replace an object."""
        self.client.put_object(Bucket=BUCKET, Key=key, Body=data)


def _environment(endpoint: str) -> Mapping[str, str]:
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "AKIAIOSFODNN7EXAMPLE",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


@contextmanager
def object_store() -> Iterator[ObjectStore]:
    """A server for the length of the `with` block; this process's environment points to it."""
    import boto3
    import s3fs
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    before = {name: os.environ.get(name) for name in _environment(endpoint)}
    os.environ.update(_environment(endpoint))
    s3fs.S3FileSystem.clear_instance_cache()  # a connection is bound to one server
    # All servers of a process have the same objects.
    connection = http.client.HTTPConnection(host, port, timeout=30)
    connection.request("POST", "/moto-api/reset")
    connection.getresponse().read()
    connection.close()
    try:
        client = boto3.client("s3")
        client.create_bucket(Bucket=BUCKET)
        yield ObjectStore(endpoint, client)
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        s3fs.S3FileSystem.clear_instance_cache()
        server.stop()
