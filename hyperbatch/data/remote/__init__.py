"""Data at an address: s3://, gs:// and everything else that fsspec supports, and http(s):// with Python's own client.

    address ── Store ──> ranges of bytes ──┬──> Mirror: whole files in the cache folder, up to a size; the ranks of a
     store.py, http.py, objects.py         │    mirror.py         host share the fetching
                                           └──> RemoteShardSource: samples whose shard is not cached yet, read by range,
                                                source.py          ahead of the step

Packed shards are read remotely, so training starts at once and the cache may be smaller than the set. Archives and
parquet files are fetched first and then opened like local ones.
"""
