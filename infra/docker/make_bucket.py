"""Make the bucket that MLflow keeps its artifacts in, if it is not there: `python make_bucket.py NAME`.

Credentials and endpoint come from boto3's own environment variables and files.
"""

import sys

import boto3


def main(name: str) -> None:
    """Make the bucket."""
    client = boto3.client("s3")
    if name not in {bucket["Name"] for bucket in client.list_buckets()["Buckets"]}:
        client.create_bucket(Bucket=name)
    print(f"the bucket {name} is there")


if __name__ == "__main__":
    main(sys.argv[1])
